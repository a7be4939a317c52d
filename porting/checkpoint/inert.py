"""Pickles that hold more than a state dict, read without importing or calling anything.

Training scripts save ``{"model": state_dict, "optimizer": ..., "args": Namespace(...)}``, or a whole module.  This
machine reads such a pickle as :class:`~porting.checkpoint.state_pickle.StateMachine` reads a state dict.  An object of
an unknown class becomes a :class:`Stub`: the name of the class, and the arguments and state that the pickle gives it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from porting.checkpoint.errors import quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.state_pickle import (
    OTHER_TENSORS,
    REBUILD,
    SMALL,
    Action,
    Global,
    Ordered,
    StateMachine,
    describe,
    is_known,
    is_shape,
)
from porting.checkpoint.zip_file import MAX_DIRECTORY
from porting.limits import charge

UTILS = "torch._utils"

STUB = 9
"""Values that a stub is charged as; it consists of several objects."""

PAIR = 4
"""Values that an entry of a dictionary is charged as."""

TOGETHER = 1 << 10
"""Stubs that are charged at once."""


@dataclass(eq=False, slots=True)
class Stub:
    """A stand-in for an object whose class is never imported.

    Attributes:
        kind: the name of the class or function, with its module.
        given: what it was called with, and the states that were given to it, in this order.
        attributes: the attributes that it has after these states.
        items: what was put into it under keys, as into a dictionary.
        elements: what was put into it without keys, as into a list or a set.
        tensor: what kind of tensor it would be, in a few words; empty for what is not a tensor.
    """

    kind: str
    given: list[object] = field(default_factory=list)
    attributes: dict[object, object] = field(default_factory=dict)
    items: dict[object, object] = field(default_factory=dict)
    elements: list[object] = field(default_factory=list)
    tensor: str = ""

    @property
    def is_module(self) -> bool:
        """Whether the object is a ``torch.nn.Module``, or one of TorchScript, by its attributes."""
        attributes = self.attributes
        return self.is_script or all(isinstance(attributes.get(part), dict) for part in MODULE_PARTS)

    @property
    def is_script(self) -> bool:
        """Whether the object's class is one of TorchScript."""
        return self.kind.startswith("__torch__.")

    @property
    def is_of_torch(self) -> bool:
        """Whether torch has the class or function itself, and may call it without trust in the file."""
        return self.kind.startswith("torch.") and not self.kind.startswith(TRUSTED)

    @property
    def unsaved(self) -> set[str] | None:
        """The names of a module's buffers that ``state_dict()`` leaves out; None where that is unclear."""
        if UNSAVED not in self.attributes:
            return set()
        found = self.attributes[UNSAVED]
        if not isinstance(found, Stub) or found.kind not in SETS or not found.is_plain_set:
            return None
        names = {name for name in found.elements if isinstance(name, str)}
        return names if all(isinstance(name, str) for name in found.elements) else None

    @property
    def is_plain_set(self) -> bool:
        """Whether a set was made of nothing, or of a list or a tuple."""
        return all(
            isinstance(args, tuple) and len(args) < 2 and all(isinstance(first, list | tuple) for first in args)
            for args in self.given
        )

    def tensors_of_module(self) -> Iterator[tuple[object, object]]:
        """The entries that ``state_dict()`` visits: parameters, persistent buffers, and modules."""
        attributes = self.attributes
        if self.is_script:
            yield from attributes.items()
            return
        unsaved = self.unsaved or ()
        for part in MODULE_PARTS:
            entries = attributes[part]
            if isinstance(entries, dict):
                yield from (
                    (name, value) for name, value in entries.items() if part != "_buffers" or name not in unsaved
                )


TRUSTED = ("torch.nn.modules.", "torch.nn.parallel.", "torch.optim.", "torch.ao.", "torch.fx.")
"""The packages of torch with modules and optimizers: torch unpickles these only for who trusts the file."""

MODULE_PARTS = ("_parameters", "_buffers", "_modules")
"""The attributes in which a ``torch.nn.Module`` keeps what it holds."""

UNSAVED = "_non_persistent_buffers_set"
"""The attribute in which it keeps the names of buffers that ``state_dict()`` leaves out."""

SETS = ("builtins.set", "builtins.frozenset", "__builtin__.set", "__builtin__.frozenset")
"""The sets of Python 3 and of Python 2."""


class Unnamed:
    """A key of a dictionary that cannot be part of a name; compared by identity, so that nothing is hashed."""


def _drop(machine: StateMachine) -> None:
    machine._pop()


def _drop_group(machine: StateMachine) -> None:
    machine._pop_to_mark()


def _new_by_names(machine: StateMachine) -> None:
    machine._pop()  # arguments by name
    machine._new()


class InertMachine(StateMachine):
    """A pickle machine for any content; see :class:`StateMachine` for the arguments.

    Attributes:
        named: the classes and functions that it names and that are not known, in their order; each with the one string
            that all of its objects share.
        stubs: the objects in whose place a stub stands.
        declared: the attributes that the program of TorchScript declares, by the names of its classes.
    """

    longest: ClassVar[int] = MAX_DIRECTORY
    more: ClassVar[Mapping[bytes, Action]] = {
        b"0": _drop,
        b"1": _drop_group,
        b"2": lambda m: m._push(m._top()),
        b"\x8b": lambda m: m._push(int.from_bytes(m._bytes("<i"), "little", signed=True)),  # LONG4
        b"\x8e": lambda m: m._push(m._bytes("<Q")),  # BINBYTES8
        b"\x96": lambda m: m._push(m._bytes("<Q")),  # BYTEARRAY8
        b"\x8f": lambda m: m._push(Stub("builtins.set")),
        b"\x90": lambda m: m._extend(m._pop_to_mark()),  # ADDITEMS
        b"\x91": lambda m: m._push(Stub("builtins.frozenset", elements=m._pop_to_mark())),
        b"\x92": _new_by_names,
    }
    dear: ClassVar[Mapping[bytes, int]] = {b"\x8f": STUB, b"\x91": STUB}

    def __init__(self, source: ByteSource, start: int, stop: int, *, legacy: bool = False) -> None:
        super().__init__(source, start, stop, legacy=legacy)
        self.named: dict[str, str] = {}
        self.stubs: list[Stub] = []
        self.declared: Mapping[str, Collection[object]] = {}
        self._globals = 0

    def _global(self, module: str, name: str) -> None:
        if not module or not name:
            raise self.error("a global without a name")
        found = Global(module, name)
        if not is_known(module, name):
            spelled = _spelled(found)
            self.named.setdefault(spelled, spelled)
            self._globals += 1
            if self._globals % TOGETHER == 0:
                charge("objects", TOGETHER, where=self.source.where)
        self._push(found)

    def _stub(self, kind: object, given: object) -> None:
        """Push a stand-in for an object that was made with ``given``."""
        named = _spelled(kind) if isinstance(kind, Global) else describe(kind)
        named = self.named.get(named, named)
        tensor = OTHER_TENSORS.get(kind.name, "") if isinstance(kind, Global) and kind.module == UTILS else ""
        stub = Stub(named, [given], tensor=tensor)
        if named in SETS and stub.is_plain_set and isinstance(given, tuple):
            elements = [element for first in given if isinstance(first, list | tuple) for element in first]
            charge("objects", len(elements), where=self.source.where)  # one list may be given to many calls
            stub.elements = elements  # a copy: Python makes the set now, whatever is put into the list afterwards
        self.stubs.append(stub)
        if len(self.stubs) % TOGETHER == 0:
            charge("objects", STUB * TOGETHER, where=self.source.where)
        self._push(stub)

    def _new(self) -> None:
        args, kind = self._pop(), self._pop()
        self._require_callable(kind)
        self._stub(kind, args)

    def _reduce(self) -> None:
        args, function = self._pop(), self._pop()
        if not isinstance(args, tuple):
            raise self.error(f"a call with {describe(args)} for its arguments")
        self._require_callable(function)
        if not isinstance(function, Global):
            self._stub(function, args)
            return
        match _spelled(function), args:
            case "torch._tensor._rebuild_from_type_v2", (
                Global("torch._utils", name) as inner, Global("torch" | "torch.nn.parameter", "Tensor" | "Parameter"),
                tuple() as inside, state,
            ) if name in REBUILD:  # fmt: skip
                self._require_harmless(state)
                function, args = inner, inside
            case "torch._utils._rebuild_parameter_with_state", (data, grad, hooks, state):
                self._require_harmless(state)
                function, args = Global(UTILS, "_rebuild_parameter"), (data, grad, hooks)
            case _:
                pass
        first = args[0] if args else None
        match _spelled(function), args:
            case ("collections.OrderedDict", ()) | ("collections.defaultdict", (Global(),) | ()):
                self._push(Ordered())
            case "collections.OrderedDict", (dict() | list() | tuple() as given,):  # a list, as Python 2 wrote it
                charge("objects", PAIR * len(given), where=self.source.where)  # one list may be given to many calls
                pairs = given.items() if isinstance(given, dict) else given
                self._push(Ordered())
                self._set_items([item for pair in pairs for item in self._pair(pair)])
            case "torch.Size", (tuple() | list() as sizes,) if is_shape(sizes):
                self._push(tuple(sizes))
            case _ if function.module == UTILS and function.name in REBUILD and not isinstance(first, Stub):
                self._push(function)
                self._push(args)
                super()._reduce()
            case "torch._utils._rebuild_parameter", _ if isinstance(first, Stub) and first.tensor:
                self._push(first)
            case _:
                self._stub(function, args)

    def _require_harmless(self, state: object) -> None:
        """Refuse attributes of a tensor that torch has a meaning for: ``data`` and ``real`` change its values."""
        for attributes in state if isinstance(state, tuple) and len(state) == 2 else (state,):  # and those of slots
            if not isinstance(attributes, dict | None):
                raise self.error(f"attributes of a tensor in {describe(attributes)}", self.unsafe)
            if not attributes:
                continue
            import torch  # noqa: PLC0415  # headers are read without torch, which takes seconds to import

            charge("objects", len(attributes), where=self.source.where)  # one dictionary may be given to many calls
            for name in attributes:
                if not isinstance(name, str) or hasattr(torch.nn.Parameter, name):
                    raise self.error(f"the attribute {quote(name)} of a tensor, which may change it", self.unsafe)

    def _require_callable(self, function: object) -> None:
        if not isinstance(function, Global | Stub):
            raise self.error(f"a call of {describe(function)}", self.unsafe)

    def _pair(self, pair: object) -> list[object]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise self.error(f"{describe(pair)} where a key and its value are expected")
        return list(pair)

    def _build(self) -> None:
        fields, target = self._pop(), self._top()
        if isinstance(target, Stub):
            if target.is_script:
                self._require_as_declared(target, fields)
            target.given.append(fields)
            # torch copies the entries now: what is put into the dictionary afterwards is not an attribute
            for attributes in fields if isinstance(fields, tuple) and len(fields) == 2 else (fields,):  # those of slots
                if isinstance(attributes, dict):
                    charge("objects", PAIR * len(attributes), where=self.source.where)  # given to many objects, perhaps
                    target.attributes.update(attributes)
        elif not isinstance(target, Ordered):
            raise self.error(f"attributes for {describe(target)}", self.unsafe)

    def _require_as_declared(self, target: Stub, fields: object) -> None:
        """Refuse a state of an object of TorchScript that torch refuses or takes something else from."""
        if len(target.given) > 1:
            raise self.error(f"a second state for an object of {quote(target.kind)}", self.unsafe)
        known = self.declared.get(target.kind, ())
        extra = next((name for name in fields if name not in known), None) if isinstance(fields, dict) else ""
        if extra is not None:
            named = quote(extra) if isinstance(extra, str) else describe(extra)
            raise self.error(f"the attribute {named}, which {quote(target.kind)} does not declare", self.unsafe)

    def _put(self, index: int) -> None:
        top = self._top()
        if isinstance(top, Stub) and top.is_script and len(top.given) < 2:  # for torch, the class until it has a state
            raise self.error(f"an object of {quote(top.kind)} that is used before it has a state", self.unsafe)
        super()._put(index)

    def _set_items(self, values: list[object]) -> None:
        target = self._top()
        items = target.items if isinstance(target, Stub) else target
        if not isinstance(items, dict) or len(values) % 2:
            raise self.error(f"items for {describe(target)} at byte {self.position}")
        for key, value in zip(values[::2], values[1::2], strict=True):
            inside = key if isinstance(key, tuple) else (key,)
            if any(isinstance(item, dict | list) for item in inside):
                raise self.error(f"{describe(key)} as the key of a dictionary")
            plain = isinstance(key, str | float | bytes | None) or (isinstance(key, int) and -SMALL <= key < SMALL)
            items[key if plain else Unnamed()] = value

    def _extend(self, values: list[object]) -> None:
        target = self._top()
        elements = target.elements if isinstance(target, Stub) else target
        if not isinstance(elements, list):
            raise self.error(f"elements for {describe(target)} at byte {self.position}")
        elements.extend(values)

    def _persistent(self) -> None:
        match self._top():
            case "module", Global() as kind, _, _:  # the older form keeps the source of a module's class
                self._pop()
                self._push(kind)
            case _:
                super()._persistent()


def _spelled(name: Global) -> str:
    return f"{name.module}.{name.name}"

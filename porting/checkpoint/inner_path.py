"""Inner paths: choosing one of the state dicts in a file of ``torch.save``.

The keys that lead to a tensor, joined by dots, are its full name.  An inner path selects the tensors whose full names
begin with it, and removes it from their names: in ``file.pt#model`` the tensor ``model.encoder.weight`` is
``encoder.weight``, whether the file holds ``{"model": {"encoder.weight": ...}}`` or
``{"model": {"encoder": {"weight": ...}}}``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TypeGuard

from porting.checkpoint.errors import CheckpointError, FaultList, checkpoint_error, quote
from porting.checkpoint.files import ByteSource
from porting.checkpoint.inert import UNSAVED, InertMachine, Stub
from porting.checkpoint.names import LONGEST_TENSOR_NAME
from porting.checkpoint.state_dict import SHOWN, not_read
from porting.checkpoint.state_pickle import StorageRef, TensorSpec
from porting.errors import Code, Fault, Message, Wording, nearest
from porting.limits import NAMED, charge
from porting.printable import counted, first_few, shell_word

DEEPEST = 100
"""Levels of nesting above a tensor."""

STEP = 8
"""Values that a tensor is charged as."""

MOST = 10**9
"""The largest count of tensors: with shared parts the number doubles at each level."""

TOGETHER = 1 << 10
"""Names that are charged at once."""

DEEPEST_SETTING, MOST_SETTINGS, LONGEST_SETTING = 8, 10_000, 4096
"""Levels above a setting, how many are looked at, and the characters of one."""

LETTERS = 1 << 16
"""Bytes of names that are charged at once."""


@dataclass(frozen=True, kw_only=True)
class InnerPath:
    """A place in a file that holds tensors by name.

    Attributes:
        path: the inner path; empty for the whole file.
        tensors: how many tensors there are below it.
    """

    path: str
    tensors: int


class InnerPathNeededError(CheckpointError):
    """A file holds more than a state dict, and no inner path says which part to read.

    Args:
        format: the name of its container.
    """

    def __init__(
        self,
        source: ByteSource,
        places: tuple[InnerPath, ...],
        *,
        location: str = "",
        format: str = "bin",  # noqa: A002  # as of WeightFile
        notes: tuple[Fault, ...] = (),
    ) -> None:
        self.source = source
        self.places = places
        self.format = format
        self.notes = notes
        first = f"{location or source.where}#{places[0].path}"
        listed = first_few([_shown(place) for place in places], SHOWN)
        subject = "its only state dict is" if len(places) == 1 else "state dicts are"
        message = f"this file holds more than a state dict; {subject} at {listed}"
        command = f"name the one you mean: porting inspect {shell_word(first)}"
        hint = Message(Wording(python=f"open {first!r}", command=command))
        super().__init__(Fault(code=Code.INNER_PATH, where=source.where, message=message, hint=hint))

    def at(self, location: str) -> InnerPathNeededError:
        """The same error for the location that the user passed."""
        return InnerPathNeededError(self.source, self.places, location=location, format=self.format, notes=self.notes)


class Tree:
    """The content of a pickle as a tree of names."""

    def __init__(self, root: object, machine: InertMachine) -> None:
        self.root = root
        self._machine = machine
        self._where = machine.source.where
        self._counts: dict[int, tuple[int, int]] = {}
        self._steps = self._letters = 0

    @property
    def is_module(self) -> bool:
        """Whether the root is a module."""
        return isinstance(self.root, Stub) and self.root.is_module and bool(self._count(self.root)[0])

    @property
    def is_state_dict(self) -> bool:
        """Whether the root holds tensors by name and nothing else, some of a kind that is not read."""
        children = [*_children(self.root)]
        return bool(children) and all(
            isinstance(key, str) and (isinstance(child, TensorSpec) or (isinstance(child, Stub) and bool(child.tensor)))
            for key, child in children
        )

    def places(self) -> tuple[InnerPath, ...]:
        """The inner paths that lead to state dicts, those with the most tensors first.

        Where tensors are only found by numbers, as the states of an optimizer are, it is not one.
        """
        found: list[tuple[int, InnerPath]] = []
        direct = False
        for key, child in _children(self.root):
            if not isinstance(key, str) or len(key) > LONGEST_TENSOR_NAME:
                continue
            direct |= isinstance(child, TensorSpec)
            if _is_container(child) and self._count(child)[1]:
                path, node = self._follow_single(key, child)
                count, named = self._count(node)
                self._charge(path)
                found.append((named, InnerPath(path=path, tensors=count)))
        found.sort(key=lambda entry: -entry[0])
        whole = (InnerPath(path="", tensors=self._count(self.root)[0]),) if direct else ()
        return (*(place for _, place in found), *whole)

    def _follow_single(self, path: str, node: object) -> tuple[str, object]:
        """Follow places that hold one other place and no tensor."""
        for _ in range(DEEPEST):
            inside = [(key, child) for key, child in _children(node) if self._count(child)[0]]
            if isinstance(node, Stub) or len(inside) != 1 or not _is_container(inside[0][1]):
                break
            key, child = inside[0]
            if not isinstance(key, str) or len(path) + len(key) > LONGEST_TENSOR_NAME:
                break
            path, node = f"{path}.{key}", child
        return path, node

    def state_dict(self, path: str) -> tuple[dict[str, TensorSpec], tuple[Fault, ...]]:
        """The tensors below an inner path, by their names from there on, and notes about the rest."""
        faults = FaultList(self._where)
        tensors: dict[str, TensorSpec] = {}
        others: list[str] = []
        plain: set[int | str] = set()
        for name, leaf in self._values_below(self.root, "", f"{path}." if path else "", (), plain, faults):
            if isinstance(leaf, Stub) and leaf.tensor:
                hint = "save dense tensors: tensor.to_dense()" if "sparse" in leaf.tensor else ""
                faults.add(Code.BIN_TENSOR, f"it is {leaf.tensor}, which is not read", tensor=name, hint=hint)
            elif not isinstance(leaf, TensorSpec):
                others.append(name)
            elif name in tensors:
                message = "two tensors have this name when their keys are joined by dots"
                faults.add(Code.INNER_PATH, message, tensor=name, hint="save the state dict again by itself")
            else:
                tensors[name] = leaf
        faults.raise_if_any()
        if not tensors:
            raise self._missing(path)
        self._require_untouched(plain)
        return tensors, not_read(others, self._where)

    def settings(self) -> dict[str, object]:
        """The numbers and texts in the file, as a config: of dictionaries by keys, of objects by attributes.

        What holds tensors is left out, and so is what begins with an underscore, lies deeper than
        :data:`DEEPEST_SETTING` or behind the first :data:`MOST_SETTINGS` values.
        """
        charge("objects", 2 * MOST_SETTINGS, where=self._where)
        found = self._settings_of(self.root, DEEPEST_SETTING, [MOST_SETTINGS])
        return found if isinstance(found, dict) else {}

    def _settings_of(self, node: object, deep: int, left: list[int]) -> object:
        """A number, a text, a list of them, or the settings below; None for anything else."""
        left[0] -= 1
        if left[0] < 0 or isinstance(node, int | float | bool):
            return node if left[0] >= 0 else None
        if isinstance(node, str):
            return node if len(node) <= LONGEST_SETTING else None
        if isinstance(node, list | tuple):
            plain = len(node) <= left[0] and all(isinstance(one, int | float | str) for one in node)
            left[0] -= len(node) if plain else 0
            return [*node] if plain else None
        if not deep or not isinstance(node, dict | Stub):
            return None
        entries = node.items() if isinstance(node, dict) else chain(node.items.items(), node.attributes.items())
        found: dict[str, object] = {}
        for name, child in entries:
            if isinstance(name, str) and not name.startswith("_") and len(name) <= LONGEST_SETTING:
                holds = _is_tensor(child) or (_is_container(child) and self._count(child)[0])
                value = None if holds else self._settings_of(child, deep - 1, left)
                found |= {} if value is None else {name: value}
        return found or None

    def notes(self) -> tuple[Fault, ...]:
        """A note with the classes and functions that the file names."""
        named = list(self._machine.named)
        if not named:
            return ()
        message = f"it names {_listed(named, 'class or function')}; nothing of it is imported or called"
        return (Fault(code=Code.NOT_READ, where=self._where, message=message),)

    def _values_below(
        self,
        node: object,
        full: str,
        begin: str,
        above: tuple[int, ...],
        plain: set[int | str] | None,
        faults: FaultList,
    ) -> Iterator[tuple[str, object]]:
        """The values below an inner path, by their names from there on: tensors, and values that hold none.

        Args:
            full: the keys that lead there.
            begin: the inner path with a dot behind; empty for everything.
            above: what the node lies in.
            plain: notes containers, tensors and their storages that are reached by way of plain containers alone; None
                behind others.
            faults: notes what lies too deep.
        """
        if len(above) > DEEPEST or len(full) > LONGEST_TENSOR_NAME:
            faults.add(Code.INNER_PATH, f"more than {DEEPEST} objects, or a name of {len(full)} characters, lead there",
                       tensor=full[:200])  # fmt: skip
            return
        if isinstance(node, Stub):
            plain = None
            self._require_clear(node, full, faults)
        if plain is not None:
            plain.add(id(node))
        if begin.startswith(f"{full}." if above else "") or full.startswith(begin):
            self._require_named(node, full, faults)
        entries: Iterable[tuple[object, object]] = _children(node)
        if isinstance(node, Stub) and not node.is_module and not (begin and full.startswith(begin)):
            entries = chain(entries, node.attributes.items())  # of an object that the path itself names
        for key, child in entries:
            last = str(key)
            self._charge(full, last)
            sub = f"{full}.{last}" if above else last
            within = sub.startswith(begin)
            if not within and not begin.startswith(f"{sub}."):
                continue
            if _is_container(child) and (self._count(child)[0] or not within):
                if id(child) not in above and child is not node:
                    yield from self._values_below(child, sub, begin, (*above, id(node)), plain, faults)
            elif within and not (isinstance(child, Stub) and child.is_module):
                if plain is not None and isinstance(child, TensorSpec):
                    plain |= {id(child), child.storage.key}
                yield sub.removeprefix(begin), child

    def _require_named(self, node: object, full: str, faults: FaultList) -> None:
        """Note tensors whose key is not a name, such as a tuple."""
        for key, value in _entries(node):
            if not _is_name(key) and (_is_tensor(value) or (_is_container(value) and self._count(value)[0])):
                message = "the key of a tensor is neither text nor a whole number"
                faults.add(Code.INNER_PATH, message, tensor=full or None, hint="save the state dict again by names")

    def _require_clear(self, node: Stub, full: str, faults: FaultList) -> None:
        """Note where an object's class decides what it holds."""
        hint = "save the state dict again by itself"
        if node.is_module and node.unsaved is None:
            message = f"the buffers that its state dict leaves out ({UNSAVED}) are not in a set of names"
            faults.add(Code.INNER_PATH, message, tensor=full or None, hint=hint)
        if node.items and any(self._count(more)[0] for more in (node.given[0] if node.given else (), node.elements)):
            message = f"{quote(node.kind)} is made of tensors, and is given more of them by name"
            faults.add(Code.INNER_PATH, message, tensor=full, hint=hint)

    def _charge(self, *keys: str) -> None:
        """Charge a name before it is joined from keys, several names at once."""
        self._steps += 1
        self._letters += NAMED * sum(map(sys.getsizeof, keys))
        if self._steps % TOGETHER == 0:
            charge("objects", STEP * TOGETHER, where=self._where)
        if self._letters >= LETTERS:
            charge("metadata", self._letters, where=self._where)
            self._letters = 0

    def _count(self, root: object) -> tuple[int, int]:
        """The number of tensors below an object, and of those reached by names alone; at most :data:`MOST`.

        What is in itself is not counted twice.
        """
        if not _is_container(root):
            alone = int(_is_tensor(root))
            return alone, alone
        waiting = [] if id(root) in self._counts else [(root, False)]
        while waiting:
            node, seen = waiting.pop()
            if seen:
                total = by_names = 0
                for key, child in _children(node):
                    count, named = self._count(child)
                    total += count
                    by_names += named if isinstance(key, str) else 0
                self._counts[id(node)] = min(total, MOST), min(by_names, MOST)
            elif id(node) not in self._counts:
                self._counts[id(node)] = 0, 0
                waiting.append((node, True))
                waiting += ((child, False) for _, child in _children(node) if _is_container(child))
        return self._counts[id(root)]

    def _missing(self, path: str) -> CheckpointError:
        places = self.places()
        known = nearest(path, [place.path for place in places if place.path])
        if not known and places:
            known = f"state dicts are at {', '.join(map(_shown, places[:SHOWN]))}"
        message = f"it holds no tensor whose name begins with {quote(f'{path}.')}" if path else "it holds no tensor"
        return checkpoint_error(Code.INNER_PATH, self._where, message, known)

    def _require_untouched(self, plain: set[int | str]) -> None:
        """Refuse what an object of an unknown class was given, since the class may change it.

        What torch calls without trust in the file may write to a view, and so to all of a storage.  Objects of other
        classes often have views of the same storages: a module beside its state dict, an optimizer.
        """
        own = [stub for stub in self._machine.stubs if stub.is_of_torch]
        for stubs, key in ((self._machine.stubs, id), (own, _storage)):
            looked_at: set[int] = set()
            for stub in stubs:
                waiting: list[object] = [stub]
                while waiting:
                    node = waiting.pop()
                    if key(node) in plain:
                        raise self._touched(stub)
                    if id(node) not in looked_at:
                        looked_at.add(id(node))
                        waiting += _parts(node)

    def _touched(self, stub: Stub) -> CheckpointError:
        message = f"{quote(stub.kind)} is given a part of the state dict, and may change what torch reads"
        hint = "nothing was run; save the state dict again by itself"
        return checkpoint_error(Code.BIN_UNSAFE, self._where, message, hint)


def _parts(node: object) -> Iterable[object]:
    """All that an object holds or was given."""
    if isinstance(node, Stub):
        return (*node.given, *node.attributes.values(), *node.items.values(), *node.elements)
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list | tuple) else ()


def _storage(node: object) -> str | None:
    """The storage that a tensor lies in."""
    storage = node.storage if isinstance(node, TensorSpec) else node
    return storage.key if isinstance(storage, StorageRef) else None


def _is_container(node: object) -> bool:
    return isinstance(node, dict | list | tuple) or (isinstance(node, Stub) and not node.tensor)


def _is_tensor(node: object) -> bool:
    return isinstance(node, TensorSpec) or (isinstance(node, Stub) and bool(node.tensor))


def _children(node: object) -> Iterator[tuple[str | int, object]]:
    """The entries of an object by names and numbers; of a module, those of its state dict."""
    return ((key, value) for key, value in _entries(node) if _is_name(key))


def _is_name(key: object) -> TypeGuard[str | int]:
    return isinstance(key, str | int) and not isinstance(key, bool)


def _entries(node: object) -> Iterable[tuple[object, object]]:
    """The entries of an object, whatever their keys are."""
    if isinstance(node, Stub) and node.is_module:
        return (entry for entry in node.tensors_of_module() if _is_container(entry[1]) or _is_tensor(entry[1]))
    if isinstance(node, Stub):
        return node.items.items()
    if isinstance(node, dict):
        return node.items()
    return enumerate(node) if isinstance(node, list | tuple) else ()


def _shown(place: InnerPath) -> str:
    where = quote(place.path) if place.path else "the top"
    return f"{where} ({counted(place.tensors, 'tensor')})"


def _listed(names: list[str], noun: str) -> str:
    return (f"the {noun} " if len(names) == 1 else "") + first_few([*map(quote, names)], SHOWN)

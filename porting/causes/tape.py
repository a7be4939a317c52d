"""Recording a forward pass as the list of its calls of torch functions, which the search for a cause rewrites.

Parts of a model are recognised by what they compute, so that no name of a module or family is needed: the query, for
example, is a factor of the product that leads to a softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any
from weakref import ref as weak_reference

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._functorch import apis as _apis
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from porting.frames import current_lines
from porting.tracing.activations import StoredTensor, TensorFile
from porting.tracing.calls import Kind, kind_of, tensors_in, with_leaves
from porting.tracing.torch_modes import FunctionMode

apis: Any = _apis  # torch does not type this module


@dataclass(frozen=True, eq=False)
class Ref:
    """A tensor on a tape, which makes one of each: its number is its place there."""

    number: int


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a torch function.

    Attributes:
        number: its index in :attr:`Tape.calls`.
        args, kwargs: its arguments, with a :class:`Ref` in place of each tensor.
        output: its result, with a :class:`Ref` in place of each tensor.
        module: the path of the innermost module that was running.
        lines: ``file:line`` of the user's code, the innermost frame first; empty unless lines are recorded.
    """

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    module: str
    lines: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """The function's name, without the trailing underscore of in-place functions."""
        name: str = getattr(self.function, "__name__", "")
        return name if name.startswith("__") else name.rstrip("_")

    @cached_property
    def kind(self) -> Kind | None:
        """The kind of the function, or None."""
        return kind_of(self.function)

    @cached_property
    def reads(self) -> tuple[Ref, ...]:
        """The tensors among its arguments."""
        return refs((self.args, self.kwargs))

    @cached_property
    def writes(self) -> tuple[Ref, ...]:
        """The tensors in its result."""
        return refs(self.output)

    @property
    def result(self) -> Ref:
        """The tensor that it returned, or the first of several."""
        return self.writes[0]

    def argument(self, place: int, name: str, default: Any = None) -> Any:  # whatever the function takes
        """Return an argument, whether it was passed by position or by name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


@dataclass(frozen=True, eq=False)
class Part:
    """One call of a module.

    Attributes:
        first, last: its calls are those with ``first <= number < last``.
        input, output: the first tensor that it was given, and its result if that is a tensor; else None.
        lines: ``file:line`` of the user's code that calls it, the innermost frame first; empty unless recorded.
    """

    module: nn.Module
    path: str
    first: int
    last: int
    input: Ref | None
    output: Ref | None
    lines: tuple[str, ...] = ()


def refs(tree: object) -> tuple[Ref, ...]:
    """Return the tensors in a tree of arguments or results."""
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Ref))


class Tape:
    """A recorded forward pass.

    Attributes:
        parts: the calls of modules, in the order in which they returned.
        refs: the tensors, by :attr:`Ref.number`.
        values: their values, in the same order; large ones are in a file, and are read by ``tape[ref]``.
        weights: the names of the tensors that are parameters or buffers.
        marks: the tensors that were marked with a name, such as the probes.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.parts: list[Part] = []
        self.refs: list[Ref] = []
        self.values: list[Tensor | StoredTensor] = []
        self.weights: dict[Ref, str] = {}
        self.marks: dict[str, Ref] = {}
        self._makers: dict[Ref, Call] = {}
        self._users: dict[Ref, list[Call]] | None = None
        self._learned: set[Ref] = set()

    def __getitem__(self, ref: Ref) -> Tensor:
        value = self.values[ref.number]
        return value.read() if isinstance(value, StoredTensor) else value

    def maker(self, ref: Ref) -> Call | None:
        """Return the call that made a tensor; None for a weight or an input."""
        return self._makers.get(ref)

    def users(self, ref: Ref) -> Sequence[Call]:
        """Return the calls that read a tensor, in order."""
        if self._users is None:
            self._users = {}
            for call in self.calls:
                for read in dict.fromkeys(call.reads):
                    self._users.setdefault(read, []).append(call)
        return self._users.get(ref, ())

    def before(self, ref: Ref, stops: Callable[[Call], bool] = lambda call: False) -> Iterator[Call]:
        """Yield the calls that a tensor was computed by, the latest first.

        Args:
            stops: do not go on to what a call reads if this holds for the call.
        """
        waiting, seen = [ref], {ref}
        while waiting:
            waiting.sort(key=lambda ref: ref.number)
            call = self.maker(waiting.pop())
            if call is None:
                continue
            yield call
            if not stops(call):
                waiting += [read for read in dict.fromkeys(call.reads) if read not in seen]
                seen.update(call.reads)

    def past(self, ref: Ref, names: Collection[str]) -> list[Ref]:
        """Return a tensor and those that it was made from by functions with these names, the latest first."""
        found = [ref]
        while (call := self.maker(found[-1])) is not None and call.name in names and call.reads:
            found.append(call.reads[0])
        return found

    def learned(self, ref: Ref) -> bool:
        """Return whether a tensor depends on a parameter, and not only on inputs and constants."""
        return ref in self._learned

    def add(self, call: Call) -> None:
        """Append a call."""
        self.calls.append(call)
        for ref in call.writes:
            self._makers[ref] = call
        if any(read in self._learned for read in call.reads):
            self._learned.update(call.writes)

    def learn(self, ref: Ref) -> None:
        """Note that a tensor depends on a parameter."""
        self._learned.add(ref)


class Recorder(FunctionMode):
    """Records a forward pass: ``with Recorder(model) as recorder: model(**inputs)``, then ``recorder.tape``.

    It is a mode of torch functions because the search for a cause repeats these calls with other arguments. A
    ``torch.vmap`` is recorded as one call: the tensors inside it stand for single elements and cannot be kept.

    Modes that write out fused functions, such as attention, are entered inside of this one, so that their calls are
    recorded as well.

    Args:
        lines: record the lines of the user's code that make each call.
    """

    def __init__(self, module: nn.Module, *, lines: bool = False) -> None:
        super().__init__()
        self.tape = Tape()
        self._module = module
        self._lines = lines
        self._known: dict[int, Ref] = {}
        self._numbers: dict[int, list[int]] = {}
        self._file = TensorFile()
        self._in_memory: list[Ref] = []
        self._nbytes = 0
        self._stored: list[weak_reference[Tensor]] = []
        self._path: list[tuple[str, int, Ref | None, tuple[str, ...]]] = []
        self._hooks = ExitStack()

    def __enter__(self) -> Recorder:
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            ref = self._ref(tensor)
            self.tape.weights.setdefault(ref, name)
            if isinstance(tensor, nn.Parameter):
                self.tape.learn(ref)
        names: dict[nn.Module, str] = {}
        for path, part in self._module.named_modules():
            names.setdefault(part, path)
        for part, path in names.items():
            self._hooks.callback(part.register_forward_pre_hook(self._enter(path), prepend=True).remove)
            self._hooks.callback(part.register_forward_hook(self._leave, prepend=True, always_call=True).remove)
        self._hooks.callback(setattr, apis, "vmap_impl", apis.vmap_impl)  # no mode sees it
        apis.vmap_impl = self._vmap
        super().__enter__()  # type: ignore[no-untyped-call]  # torch does not type its modes
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]  # as above
        self._hooks.close()

    def mark(self, name: str, value: Tensor) -> None:
        """Mark a tensor of the pass with a name."""
        self.tape.marks[name] = self._ref(value)

    def stand_in(self, value: Tensor) -> Tensor:
        """Note an activation that replaces the computed one from here on, and return it."""
        self.tape.learn(self._new(value))
        return value

    def _enter(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:  # whatever it is given
            tensors = tensors_in(args)
            lines = current_lines() if self._lines else ()
            self._path.append((path, len(self.tape.calls), self._ref(tensors[0]) if tensors else None, lines))

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:  # whatever it returns
        path, first, first_input, lines = self._path.pop()
        output_ref = self._ref(output) if isinstance(output, Tensor) else None
        self.tape.parts.append(Part(module, path, first, len(self.tape.calls), first_input, output_ref, lines))
        if self._nbytes > HELD:
            self._store()

    def _ref(self, tensor: Tensor) -> Ref:
        known = self._known.get(id(tensor))
        return self._new(tensor) if known is None else known

    def _new(self, tensor: Tensor) -> Ref:
        """Give a tensor the next number; until it is stored the tape keeps it, so that its id is not reused."""
        ref = Ref(len(self.tape.values))
        self.tape.refs.append(ref)
        self.tape.values.append(tensor)
        self._known[id(tensor)] = ref
        if _has_storage(tensor):
            self._numbers.setdefault(tensor.untyped_storage().data_ptr(), []).append(ref.number)
        if _can_be_stored(tensor):
            self._in_memory.append(ref)
            self._nbytes += tensor.nbytes
        return ref

    def _store(self) -> None:
        """Move the large tensors of the tape to a file; weights stay, since they are in memory anyway."""
        values = {ref: self.tape.values[ref.number] for ref in self._in_memory if ref not in self.tape.weights}
        tensors = {ref: value for ref, value in values.items() if isinstance(value, Tensor)}
        weights = (self.tape.values[ref.number] for ref in self.tape.weights)
        kept = {value.untyped_storage().data_ptr() for value in weights if isinstance(value, Tensor)}
        with self.resting():
            tensors = {ref: one for ref, one in tensors.items() if one.untyped_storage().data_ptr() not in kept}
            stored = self._file.write_storages(list(tensors.values()))
        for (ref, tensor), place in zip(tensors.items(), stored, strict=True):
            if place is not None:
                self.tape.values[ref.number] = place
                self._stored.append(weak_reference(tensor, self._forgetting(id(tensor), ref)))
        self._in_memory, self._nbytes = [], 0

    def _forgetting(self, key: int, ref: Ref) -> Callable[[object], None]:
        """Return what removes the id of a stored tensor when the model no longer holds the tensor."""

        def forget(gone: object) -> None:
            if self._known.get(key) == ref:
                del self._known[key]

        return forget

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        if peek_interpreter_stack() is not None:  # within a vmap
            return func(*args, **kwargs)
        if func is Tensor.__iter__:  # it calls unbind internally, which the mode would not see
            return iter(self.call(Tensor.unbind, args, kwargs))
        refs_to = partial(with_leaves, lambda leaf: self._ref(leaf) if isinstance(leaf, Tensor) else leaf)
        read, named = refs_to(args), refs_to(kwargs)
        if is_in_place(func):
            self._keep(args[0])
        result = func(*args, **kwargs)
        written = args[0] if func is Tensor.__setitem__ else result
        if tensors_in(written):
            output = with_leaves(lambda leaf: self._new(leaf) if isinstance(leaf, Tensor) else leaf, written)
            path = self._path[-1][0] if self._path else ""
            lines = current_lines() if self._lines else ()
            self.tape.add(Call(len(self.tape.calls), func, read, named, output, path, lines))
        return result

    def _vmap(self, *args: Any, **kwargs: Any) -> Any:  # as torch has them
        running: Any = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch does not type it
        if self not in running:  # within a call that is on the tape already
            return vmap(*args, **kwargs)
        return self.call(vmap, args, kwargs)

    def _keep(self, tensor: Tensor) -> None:
        """Store a copy on the tape of a tensor that is about to be changed in place."""
        own = self._ref(tensor).number
        shared = self._numbers.get(tensor.untyped_storage().data_ptr(), ()) if _has_storage(tensor) else ()
        for number in {own, *shared}:  # views, and casts that have nothing to do
            value = self.tape.values[number]
            if isinstance(value, Tensor) and (number == own or _shares(value, tensor)):
                self.tape.values[number] = value.detach().clone()


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def _shares(tensor: Tensor, other: Tensor) -> bool:
    return _has_storage(tensor) and tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


HELD = 32 << 20
"""Bytes of a tape's tensors that are kept in memory before they are written to a file."""

SMALL = 1 << 14
"""Tensors of fewer bytes stay in memory."""


def _can_be_stored(tensor: Tensor) -> bool:
    """Return whether a file can hold a tensor as it is."""
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_nested or tensor.is_complex() or tensor.is_neg())
        and tensor.nbytes >= SMALL
    )


_vmapped = apis.vmap_impl


def vmap(*args: Any, **kwargs: Any) -> Any:  # as torch has them
    """Call ``torch.vmap``'s implementation."""
    return _vmapped(*args, **kwargs)


@lru_cache(maxsize=1024)
def is_in_place(function: Callable[..., Any]) -> bool:
    """Return whether a function changes its first argument."""
    name: str = getattr(function, "__name__", "")
    return function is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__")) or name in _OPERATORS


UNFIT = (RuntimeError, IndexError, ValueError, TypeError)
"""Errors of operations whose inputs have shapes that do not fit, as after an alteration."""

_OPERATORS = {
    f"__{name}__" for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor")
}


def call_again(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # as recorded
    """Repeat a recorded call with other tensors, none of which it changes in place."""
    if not is_in_place(function):
        return function(*args, **kwargs)
    copy = args[0].clone()
    result = function(copy, *args[1:], **kwargs)
    return copy if function is Tensor.__setitem__ else result

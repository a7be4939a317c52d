"""A forward pass as the list of the torch functions that it called: what the search for a cause rewrites.

A model is known here by what it computes and not by how it is written: which tensor plays the query is read off the
products that lead to a softmax, and no name of a module or of a family is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._functorch import apis as _apis
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from porting.frames import current_lines
from porting.tracing.calls import Kind, kind_of
from porting.tracing.torch_modes import FunctionMode

apis: Any = _apis  # torch exports none of its names


@dataclass(frozen=True)
class Ref:
    """A tensor on a tape, by its number."""

    number: int


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a torch function.

    Attributes:
        number: its place in the pass.
        function: what was called.
        args, kwargs: with a :class:`Ref` for each tensor.
        output: the result, with a :class:`Ref` for each tensor.
        module: the path of the innermost module that was running.
        lines: ``file:line`` of the user's code that called, the innermost first; empty where that was not asked for.
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
        """The function's name, without the underscore of one that works in place."""
        name: str = getattr(self.function, "__name__", "")
        return name if name.startswith("__") else name.rstrip("_")

    @cached_property
    def kind(self) -> Kind | None:
        """What the function is to a model."""
        return kind_of(self.function)

    @cached_property
    def reads(self) -> tuple[Ref, ...]:
        """The tensors that it was given."""
        return refs((self.args, self.kwargs))

    @cached_property
    def writes(self) -> tuple[Ref, ...]:
        """The tensors that it made."""
        return refs(self.output)

    @property
    def result(self) -> Ref:
        """The tensor that it made, or the first of several."""
        return self.writes[0]

    def argument(self, place: int, name: str, default: Any = None) -> Any:  # whatever the function takes
        """An argument, wherever it stands."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


@dataclass(frozen=True, eq=False)
class Part:
    """One call of a module.

    Attributes:
        module: the module.
        path: its name in the model.
        first, last: the numbers of the calls that it made: ``first <= number < last``.
        input, output: its first tensor in and its only tensor out; None when there is no such.
    """

    module: nn.Module
    path: str
    first: int
    last: int
    input: Ref | None
    output: Ref | None


def refs(tree: object) -> tuple[Ref, ...]:
    """The tensors in a tree of arguments or results."""
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Ref))


class Tape:
    """One recorded pass.

    Attributes:
        calls: in order.
        parts: the calls of modules, in the order in which they ended.
        values: every tensor, by its number.
        weights: the name of each tensor that is a parameter or a buffer.
        marks: the name under which a value was marked, and the value.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.parts: list[Part] = []
        self.values: list[Tensor] = []
        self.weights: dict[Ref, str] = {}
        self.marks: dict[str, Ref] = {}
        self._makers: dict[Ref, Call] = {}
        self._users: dict[Ref, list[Call]] | None = None
        self._learned: set[Ref] = set()

    def __getitem__(self, ref: Ref) -> Tensor:
        return self.values[ref.number]

    def maker(self, ref: Ref) -> Call | None:
        """The call that made a tensor; None for a weight or an input."""
        return self._makers.get(ref)

    def users(self, ref: Ref) -> Sequence[Call]:
        """The calls that a tensor was given to, in order."""
        if self._users is None:
            self._users = {}
            for call in self.calls:
                for read in dict.fromkeys(call.reads):
                    self._users.setdefault(read, []).append(call)
        return self._users.get(ref, ())

    def before(self, ref: Ref, stops: Callable[[Call], bool] = lambda call: False) -> Iterator[Call]:
        """The calls that a tensor was made by, the nearest first; not past one at which ``stops`` holds."""
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

    def learned(self, ref: Ref) -> bool:
        """Whether a tensor depends on a parameter; on no more than inputs and constants if not."""
        return ref in self._learned

    def add(self, call: Call) -> None:
        """Append a call."""
        self.calls.append(call)
        for ref in call.writes:
            self._makers[ref] = call
        if any(read in self._learned for read in call.reads):
            self._learned.update(call.writes)

    def learn(self, ref: Ref) -> None:
        """A tensor is a parameter."""
        self._learned.add(ref)


class Recorder(FunctionMode):
    """Records a pass: ``with Recorder(model) as recorder: model(**inputs)``, and then there is ``recorder.tape``.

    It is a mode because the calls are what the search for a cause makes again, with other arguments.

    A ``torch.vmap`` is one call: tensors inside of it are views of one element and cannot be kept.

    Other modes that see into the pass, such as one that shows the scores of attention, are entered inside of it; what
    they compute is then on the tape, too.

    Args:
        module: the model.
        lines: with the line of the user's code of each call.
    """

    def __init__(self, module: nn.Module, *, lines: bool = False) -> None:
        super().__init__()
        self.tape = Tape()
        self._module = module
        self._lines = lines
        self._known: dict[int, Ref] = {}
        self._path: list[tuple[str, int, Ref | None]] = []
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
        """Remember a value of the pass under a name."""
        self.tape.marks[name] = self._ref(value)

    def stand_in(self, value: Tensor) -> Tensor:
        """An activation that the pass goes on with in place of the one that was computed."""
        self.tape.learn(self._new(value))
        return value

    def _enter(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:  # whatever it is given
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            self._path.append((path, len(self.tape.calls), self._ref(given[0]) if given else None))

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:  # whatever it returns
        path, first, given = self._path.pop()
        found = self._ref(output) if isinstance(output, Tensor) else None
        self.tape.parts.append(Part(module, path, first, len(self.tape.calls), given, found))

    def _ref(self, tensor: Tensor) -> Ref:
        known = self._known.get(id(tensor))
        return self._new(tensor) if known is None else known

    def _new(self, tensor: Tensor) -> Ref:
        """The next number; the tape keeps the tensor, so that its id stays its own."""
        ref = Ref(len(self.tape.values))
        self.tape.values.append(tensor)
        self._known[id(tensor)] = ref
        return ref

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        if peek_interpreter_stack() is not None:  # within a vmap
            return func(*args, **kwargs)
        if func is Tensor.__iter__:  # which would hide the calls by which it takes the tensor apart
            return iter(self.call(Tensor.unbind, args, kwargs))
        read = tree_map(
            lambda leaf: self._ref(leaf) if isinstance(leaf, Tensor) else leaf, {"args": args, "kwargs": kwargs}
        )
        if _in_place(func):
            self._keep(args[0])
        result = func(*args, **kwargs)
        made = args[0] if func is Tensor.__setitem__ else result
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(made)):
            output = tree_map(lambda leaf: self._new(leaf) if isinstance(leaf, Tensor) else leaf, made)
            path = self._path[-1][0] if self._path else ""
            lines = current_lines() if self._lines else ()
            self.tape.add(Call(len(self.tape.calls), func, read["args"], read["kwargs"], output, path, lines))
        return result

    def _vmap(self, *args: Any, **kwargs: Any) -> Any:  # as torch has them
        running: Any = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch does not type it
        if self not in running:  # within a call that is on the tape already
            return vmap(*args, **kwargs)
        return self.call(vmap, args, kwargs)

    def _keep(self, tensor: Tensor) -> None:
        """A copy of what is about to be changed takes its place on the tape."""
        self.tape.values[self._ref(tensor).number] = tensor.detach().clone()


_vmapped = apis.vmap_impl


def vmap(*args: Any, **kwargs: Any) -> Any:  # as torch has them
    """What ``torch.vmap(function)(...)`` calls."""
    return _vmapped(*args, **kwargs)


def _in_place(function: Callable[..., Any]) -> bool:
    name: str = getattr(function, "__name__", "")
    return function is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__")) or name in _OPERATORS


_OPERATORS = {"__iadd__", "__isub__", "__imul__", "__itruediv__"}


def call_again(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # as recorded
    """Make a recorded call with other tensors, none of which it changes."""
    if not _in_place(function):
        return function(*args, **kwargs)
    own = args[0].clone()
    result = function(own, *args[1:], **kwargs)
    return own if function is Tensor.__setitem__ else result

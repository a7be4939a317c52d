"""Seeing what the modules of a model compute while it runs, and letting it go on with other values.

A *point* is a place in a model whose value is seen: the output of a module (``layers.0``), one of several outputs
(``layers.0.attention -> 1``, ``bert -> pooled``), or what its attention computes inside (``-> scores``,
``-> probabilities``), however that is called (:mod:`porting.tracing.attention`).  The model itself is spelled ``.``.

A module that is called again in the same pass has the point ``layer #2`` for its second call.  One that is registered
under several names, such as a layer shared by all depths, has its first name in its first call, its second in the
second, and so on.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from porting.errors import PortingError
from porting.notation.rule import Term
from porting.plan.matching import Matcher
from porting.tracing.attention import KERNELS, Softmaxes, WrittenOut, is_whole, whole, written_out
from porting.tracing.calls import Kind, kind_of
from porting.tracing.torch_modes import FunctionMode


class SeeingError(Exception):
    """What looks at an activation failed, and not the model that computed it."""


Point = str
Trace = dict[Point, Tensor]
Visit = Callable[[Point, Tensor], Tensor | None]
"""Is given each point and its value as soon as it is there; what it returns, if anything, the model goes on with."""

ARROW = " -> "
CALL = " #"
ROOT = "."
SCORES = "scores"
PROBABILITIES = "probabilities"
INNER = (SCORES, PROBABILITIES)

MASKED = -40.0
"""A score this far below its row's largest has a share of the attention below float64's unit roundoff (exp(-36.7))."""


def points(terms: Iterable[Term], module: nn.Module, prefix: str = "") -> list[Point]:
    """The points of ``module`` that the terms of a probe table name, with or without ``prefix``."""
    terms = list(terms)
    matcher = Matcher((((0, number), term.key) for number, term in enumerate(terms)), prefix)
    outputs = {term.output for term in terms}
    suffixes = [f"{ARROW}{output}" if output else "" for output in (*INNER, *sorted(outputs)) if output in outputs]
    paths = [path or ROOT for path, _ in module.named_modules(remove_duplicate=False)]
    return [path + suffix for path in paths for suffix in dict.fromkeys(suffixes) if matcher.read(path + suffix)]


def split(point: Point) -> tuple[Point, int]:
    """The point as a table names it, and the number of the call, from 1."""
    name, _, call = point.partition(CALL)
    return name, int(call or 1)


def module_of(point: Point) -> str:
    """The path of the module whose output a point is.

    >>> module_of("layers.0.attention -> scores"), module_of(".")
    ('layers.0.attention', '.')
    """
    return split(point)[0].partition(ARROW)[0]


def output_of(point: Point) -> str:
    """Which output of its module a point is; empty for the first.

    >>> output_of("layers.0.attention -> scores"), output_of(".")
    ('scores', '')
    """
    return split(point)[0].partition(ARROW)[2]


def is_returned(point: Point) -> bool:
    """Whether a point is what the model itself returns."""
    return module_of(point) == ROOT


def is_inner(point: Point) -> bool:
    """Whether a point is attention's scores or probabilities, which no module returns as they are."""
    return output_of(point) in INNER


def numbered(name: Point, call: int) -> Point:
    """The point of the call of that number: :func:`split` read from right to left."""
    return name if call == 1 else f"{name}{CALL}{call}"


def trace(
    module: nn.Module,
    call: Callable[[nn.Module], object],
    wanted: Iterable[Point],
    visit: Visit,
    ran: Callable[[str], None] | None = None,
    *,
    spelled_out: bool = False,
) -> float:
    """Run ``module`` once and show the wanted points to ``visit``, in order of execution.

    Args:
        module: the model.  Its hooks are as before afterwards, also when it fails.
        call: runs it, ``lambda module: module(**inputs)``.
        wanted: the points to see, in every call.  One that is not reached, or that is no tensor, is not visited.
        visit: is given the point and its value, as the module returned it, and may return another to go on with.
            Scores are relative to the largest of their row, and at least ``MASKED``: what softmax cannot see is taken
            out.
        ran: is told the name of each module with weights of its own, and of each without parts, when it has run.
        spelled_out: attention's kernels run as products, masks and a softmax, for a mode around this that sees calls.

    Returns:
        How many seconds of the run were spent in seeing and visiting.
    """
    recorder = _Recorder(wanted, visit, ran)
    with recorder.attached(module), recorder, WrittenOut() if spelled_out else nullcontext():
        call(module)
    return recorder.seconds


class _Recorder(FunctionMode):
    """Shows what attention computes inside, and lets the model go on with something else.

    It is a mode because a softmax is no module; the outputs of modules are seen by hooks.
    """

    def __init__(self, wanted: Iterable[Point], visit: Visit, ran: Callable[[str], None] | None) -> None:
        super().__init__()
        self.seconds = 0.0
        self._visit = visit
        self._ran = ran
        self._seen: set[Point] = set()
        self._outputs: dict[str, list[str]] = {}
        self._inner: dict[str, list[str]] = {}
        for name in dict.fromkeys(split(point)[0] for point in wanted):
            path, _, output = name.partition(ARROW)
            (self._inner if output in INNER else self._outputs).setdefault(path, []).append(output)
        self._calls: Counter[nn.Module] = Counter()
        self._stack: list[tuple[str, int]] = []
        self._attending: tuple[str, int] | None = None  # the innermost of these with wanted scores
        self._softmaxes = Softmaxes()
        self._beside = self._changed = False

    @contextmanager
    def attached(self, module: nn.Module) -> Iterator[None]:
        """Hooks on the modules that hold a wanted point; they are gone afterwards, also when the model fails."""
        names: dict[nn.Module, list[str]] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            names.setdefault(part, []).append(path or ROOT)
        with ExitStack() as hooks:
            for part, paths in names.items():
                wanted = [path for path in paths if path in self._outputs or path in self._inner]
                if wanted:
                    hooks.callback(part.register_forward_pre_hook(self._enter(wanted), prepend=True).remove)
                    hooks.callback(part.register_forward_hook(self._leave, always_call=True).remove)
                if self._ran and (not part._modules or part._parameters):
                    hooks.callback(part.register_forward_hook(self._tell(paths[0]), prepend=True).remove)
            yield

    def _enter(self, paths: list[str]) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:  # whatever the module is given
            number = self._calls[module]
            self._calls[module] += 1
            self._stack.append((paths[number], 1) if number < len(paths) else (paths[-1], number - len(paths) + 2))
            if self._stack[-1][0] in self._inner:
                self._attending = self._stack[-1]

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:  # whatever it returns
        path, call = self._stack.pop()
        if path in self._inner:
            self._attending = next((frame for frame in reversed(self._stack) if frame[0] in self._inner), None)
        for name in self._outputs.get(path, ()):
            value = select(output, name)
            if value is None:
                continue
            instead = self._show(path, name, call, value)
            if instead is not None:
                output = substitute(output, name, instead)
        return output

    def _tell(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:  # as above
            if self._ran:
                self._ran(path)

        return hook

    def _show(self, path: str, output: str, call: int, value: Tensor) -> Tensor | None:
        point = numbered(f"{path}{ARROW}{output}" if output else path, call)
        if point in self._seen or not _is_plain(value):  # a second softmax in one call
            return None
        self._seen.add(point)
        begun = time.perf_counter()
        try:
            instead = self._visit(point, value)
        except PortingError:
            raise
        except Exception as error:  # raised inside the model's forward, and not the model's fault
            raise SeeingError(f"{type(error).__name__}: {error}, at {point}") from error
        self.seconds += time.perf_counter() - begun
        self._changed = self._changed or instead is not None
        return instead

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        if self._attending is None:
            return func(*args, **kwargs)
        kind = kind_of(func)
        if kind in KERNELS and whole(args, kwargs):
            return self._kernel(func, args, kwargs)
        if kind is Kind.SOFTMAX:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
            instead = self._scored(args[0], dim if isinstance(dim, int) else -1)
            return self._weighed(func(args[0] if instead is None else instead, *args[1:], **kwargs))
        softmax = self._softmaxes.found(func, args, kwargs)
        if softmax is not None:
            instead = self._scored(*softmax)
            return self._weighed(func(*args) if instead is None else instead.softmax(softmax[1]))
        result = func(*args, **kwargs)
        self._softmaxes.see(func, args, kwargs, result)
        return result

    def _kernel(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch's
        """Attention that shows nothing of its inside is computed again beside it, by calls that are seen.

        What the kernel gives is gone on with, unless a visitor put something else in the place of what it was shown.
        """
        if self._beside:  # one kernel inside of another
            with self:
                return written_out(func, args, kwargs, dropout=False)
        begun, before = time.perf_counter(), self.seconds
        self._beside, self._changed = True, False
        try:
            with self:
                made = written_out(func, args, kwargs, dropout=False)
        finally:
            self._beside = False
        self.seconds = before + time.perf_counter() - begun
        return made if self._changed else func(*args, **kwargs)

    def _scored(self, scores: Tensor, dim: int) -> Tensor | None:
        """Show the scores; those to go on with, if others."""
        path, call = self._attending or ("", 0)
        if SCORES not in self._inner.get(path, ()):
            return None
        begun = time.perf_counter()
        value = canonical(scores, dim)
        self.seconds += time.perf_counter() - begun
        return self._show(path, SCORES, call, value)

    def _weighed(self, probabilities: Tensor) -> Tensor:
        """Show the probabilities; those to go on with."""
        path, call = self._attending or ("", 0)
        if PROBABILITIES not in self._inner.get(path, ()):
            return probabilities
        instead = self._show(path, PROBABILITIES, call, probabilities)
        return probabilities if instead is None else instead


def _is_plain(value: Tensor) -> bool:
    """Whether it can be measured: real numbers, with one size along each axis.

    Not so are the indices that a router gives, rotations as complex numbers, nested and sparse tensors, and those
    within a vmap.  What is made of them is seen behind them.
    """
    return is_whole(value) and value.is_floating_point()


def canonical(scores: Tensor, dim: int = -1) -> Tensor:
    """Scores without what softmax cannot see: a constant added to a row, and how far down a masked one is.

    >>> import torch
    >>> canonical(torch.tensor([7.0, 5.0, -10000.0]))
    tensor([  0.,  -2., -40.])
    """
    return (scores - scores.amax(dim, keepdim=True)).clamp_min(MASKED)


def select(output: object, name: str) -> Tensor | None:
    """The tensor of an output that a point names.

    Args:
        output: what a forward returned.
        name: empty or a number for the first or the n-th tensor, a field's or a key's name, or a path of them within
            nested containers: ``hidden_states.3``.

    Returns:
        The tensor; None where there is none of that name.
    """
    if isinstance(output, Tensor):
        return output if name in ("", "0") else None
    value = _part(output, name or "0")
    if value is _ABSENT and "." in name:
        head, _, rest = name.partition(".")
        inner = _part(output, head)
        return None if inner is _ABSENT else select(inner, rest)
    return value if isinstance(value, Tensor) else None


_ABSENT = object()
"""In the place of a part that an output does not have."""


def _part(output: object, key: str) -> object:
    """One element of a container, by number or by name."""
    values: object = output
    if isinstance(output, Mapping) and key.isdigit() and key not in output:
        values = list(output.values())
    elif dataclasses.is_dataclass(output) and key.isdigit():
        values = [getattr(output, field.name) for field in dataclasses.fields(output)]
    elif key.isdigit() and hasattr(output, "__dict__") and not isinstance(output, Mapping | list | tuple):
        values = list(vars(output).values())
    try:
        if isinstance(output, Mapping) and values is output:
            return output[key] if key in output else output[int(key)]
        return values[int(key)] if key.isdigit() else getattr(output, key)  # type: ignore[index]  # caught below
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return _ABSENT


def substitute(output: Any, name: str, value: Tensor) -> Any:  # whatever the module returns
    """The output with one of its tensors, which :func:`select` finds, replaced; the kind of container is kept."""
    if isinstance(output, Tensor):
        return value
    if "." in name and _part(output, name) is _ABSENT:
        head, _, rest = name.partition(".")
        return _with(output, head, substitute(_part(output, head), rest, value))
    return _with(output, name, value)


def _with(output: Any, name: str, value: object) -> Any:  # as above
    place = int(name or 0) if (name or "0").isdigit() else None
    if isinstance(output, Mapping):  # a plain dictionary, or a model output that is one as well
        changed = copy(output)
        changed[name if place is None or name in output else list(output)[place]] = value  # type: ignore[index]  # a mutable one
        return changed
    if dataclasses.is_dataclass(output):
        field = name if place is None else dataclasses.fields(output)[place].name
        return dataclasses.replace(output, **{field: value})  # type: ignore[type-var]  # an instance, not a class
    if hasattr(output, "_replace"):  # a NamedTuple
        return output._replace(**{name if place is None else output._fields[place]: value})
    if place is None or not isinstance(output, list | tuple):
        changed = copy(output)
        setattr(changed, name if place is None else list(vars(output))[place], value)
        return changed
    return type(output)([value if number == place else element for number, element in enumerate(output)])


def leaves(output: object) -> dict[str, Tensor]:
    """The tensors that a forward returned, by the names that :func:`select` finds them with.

    Containers are mappings, dataclasses, named and plain tuples, lists, and objects that hold tensors as attributes.
    A cache of keys and values, which transformers returns as an object of its own, is not looked into.

    >>> import torch
    >>> sorted(leaves({"logits": torch.zeros(1), "hidden_states": (torch.zeros(2), None)}))
    ['hidden_states.0', 'logits']
    >>> list(leaves(torch.zeros(1)))
    ['']
    """
    if isinstance(output, Tensor):
        return {"": output}
    found: dict[str, Tensor] = {}
    for name, part in _parts(output):
        for inner, tensor in leaves(part).items():
            found[f"{name}.{inner}" if inner else name] = tensor
    return found


def _parts(output: object) -> Iterator[tuple[str, object]]:
    """The elements of a container, by name or by number."""
    if isinstance(output, Mapping):
        yield from _named([(str(key), value) for key, value in output.items()])
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = [field.name for field in dataclasses.fields(output)]
        yield from _named([(name, getattr(output, name)) for name in fields])
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        yield from _named(list(zip(output._fields, output, strict=True)))
    elif isinstance(output, list | tuple):
        yield from ((str(place), value) for place, value in enumerate(output))
    elif not isinstance(output, nn.Module):
        attributes = _named(list(getattr(output, "__dict__", {}).items()))
        yield from ((name, attribute) for name, attribute in attributes if isinstance(attribute, Tensor))


def _named(items: Sequence[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """The elements by name; by number where a name cannot be spelled, or means the inside of attention in a point."""
    for place, (name, value) in enumerate(items):
        yield (name if _PLAIN.fullmatch(name) and name not in INNER else str(place)), value


_PLAIN = re.compile(r"\w+")


def like(exact: Tensor, value: Tensor) -> Tensor:
    """A value that is put in the place of another one: a copy, in its dtype and with its layout in memory.

    A module may call ``view`` on what it has computed, which another layout does not allow.
    """
    if exact.shape != value.shape:
        return exact.to(value.dtype, copy=True)
    return torch.empty_like(value).copy_(exact)

"""Observing what the modules of a model compute while it runs, and replacing these values.

A *point* is a place in a model whose value is observed: the output of a module (``layers.0``), one of several outputs
(``layers.0.attention -> 1``, ``bert -> pooled``), or the scores and probabilities of its attention (``-> scores``,
``-> probabilities``), whichever kernel computes them (:mod:`porting.tracing.attention`). The model itself is ``.``.

The second call of a module in the same pass has the point ``layer #2``. A module that is registered under several
names, such as a layer shared by all depths, has its first name in its first call, its second name in its second call,
and so on.
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
from porting.frames import users_attribute
from porting.notation.rule import Term
from porting.plan.matching import Matcher
from porting.printable import text_of
from porting.tracing.attention import KERNELS, Softmaxes, WrittenOut, is_whole, whole, written_out
from porting.tracing.calls import Kind, kind_of
from porting.tracing.torch_modes import FunctionMode


class SeeingError(Exception):
    """The code that looks at an activation failed, and not the model."""


class EndOfPass(Exception):  # noqa: N818  # as StopIteration, it is not a fault
    """Raised by a visitor that needs no more of a pass."""


Point = str
Trace = dict[Point, Tensor]
Visit = Callable[[Point, Tensor], Tensor | None]
"""A point and its value, as soon as it is computed -> the value that the model continues with, or None for its own."""

ARROW = " -> "
CALL = " #"
ROOT = "."
SCORES = "scores"
PROBABILITIES = "probabilities"
INNER = (SCORES, PROBABILITIES)

MASKED = -40.0
"""A score so far below its row's largest gets a probability below float64's unit roundoff (exp(-36.7))."""


def points(terms: Iterable[Term], module: nn.Module, prefix: str = "") -> list[Point]:
    """Return the points of a module that the terms of a probe table name, with or without ``prefix``."""
    terms = list(terms)
    matcher = Matcher(((term.key, term) for term in terms), prefix)
    outputs = {term.output for term in terms}
    suffixes = [f"{ARROW}{output}" if output else "" for output in (*INNER, *sorted(outputs)) if output in outputs]
    paths = [path or ROOT for path, _ in module.named_modules(remove_duplicate=False)]
    return [path + suffix for path in paths for suffix in dict.fromkeys(suffixes) if matcher.read(path + suffix)]


def split(point: Point) -> tuple[Point, int]:
    """Return the point as a table names it, and the number of the call, from 1."""
    name, _, call = point.partition(CALL)
    return name, int(call or 1)


def module_of(point: Point) -> str:
    """Return the path of the module whose output a point is.

    >>> module_of("layers.0.attention -> scores"), module_of(".")
    ('layers.0.attention', '.')
    """
    return split(point)[0].partition(ARROW)[0]


def output_of(point: Point) -> str:
    """Return which output of its module a point is; empty for the first.

    >>> output_of("layers.0.attention -> scores"), output_of(".")
    ('scores', '')
    """
    return split(point)[0].partition(ARROW)[2]


def is_returned(point: Point) -> bool:
    """Return whether a point is an output of the model itself."""
    return module_of(point) == ROOT


def is_inner(point: Point) -> bool:
    """Return whether a point is attention's scores or probabilities, which no module returns as such."""
    return output_of(point) in INNER


def numbered(name: Point, call: int) -> Point:
    """Return the point of the call with a number; the inverse of :func:`split`."""
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
    """Run a model once and show the wanted points to ``visit``, in order of execution.

    Args:
        module: the model. Its hooks are removed afterwards, also if it fails.
        call: runs the model, ``lambda module: module(**inputs)``.
        wanted: the points to observe. A point that is not reached, or whose value is not a tensor, is not visited.
        visit: called with each point and its value; may return another value to continue with. Scores are given
            relative to the largest of their row, and at least ``MASKED``, which does not change the softmax.
        ran: called with the path of each module that has parameters of its own or no submodules, after it has run.
        spelled_out: run attention's kernels as products, masks and a softmax, for an outer mode that sees calls.

    Returns:
        The seconds that were spent in observing and visiting.
    """
    recorder = _Recorder(wanted, visit, ran)
    attention = recorder if recorder.shows_attention else nullcontext()
    with recorder.attached(module), attention, WrittenOut() if spelled_out else nullcontext():
        call(module)
    return recorder.seconds


class _Recorder(FunctionMode):
    """Observes the outputs of modules by hooks, and the scores and probabilities of attention as a mode.

    It is a mode of torch functions because a softmax is not a module.
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
        self._attending: tuple[str, int] | None = None  # the innermost module with wanted scores
        self._softmaxes = Softmaxes()
        self._inside_kernel = self._changed = False

    @property
    def shows_attention(self) -> bool:
        """Whether a point is wanted that no module returns."""
        return bool(self._inner)

    @contextmanager
    def attached(self, module: nn.Module) -> Iterator[None]:
        """Return a context with hooks on the modules that have a wanted point."""
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
                    hooks.callback(part.register_forward_hook(self._ran_hook(paths[0]), prepend=True).remove)
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
            replacement = self._show(path, name, call, value)
            if replacement is not None:
                output = substitute(output, name, replacement)
        return output

    def _ran_hook(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:  # as above
            if self._ran:
                self._ran(path)

        return hook

    def _show(self, path: str, output: str, call: int, value: Tensor) -> Tensor | None:
        point = numbered(f"{path}{ARROW}{output}" if output else path, call)
        if point in self._seen or not _is_plain(value):  # or a second softmax in one call
            return None
        self._seen.add(point)
        start = time.perf_counter()
        try:
            replacement = self._visit(point, value)
        except (PortingError, EndOfPass):
            raise
        except Exception as error:  # raised inside the model's forward, but not by the model
            raise SeeingError(f"{type(error).__name__}: {text_of(error)}, at {point}") from error
        self.seconds += time.perf_counter() - start
        self._changed = self._changed or replacement is not None
        return replacement

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        if self._attending is None:
            return func(*args, **kwargs)
        kind = kind_of(func)
        if kind in KERNELS and whole(args, kwargs):
            return self._kernel(func, args, kwargs)
        if kind is Kind.SOFTMAX:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
            instead = self._show_scores(args[0], dim if isinstance(dim, int) else -1)
            return self._show_probabilities(func(args[0] if instead is None else instead, *args[1:], **kwargs))
        softmax = self._softmaxes.recognised(func, args, kwargs)
        if softmax is not None:
            instead = self._show_scores(*softmax)
            return self._show_probabilities(func(*args) if instead is None else instead.softmax(softmax[1]))
        result = func(*args, **kwargs)
        self._softmaxes.see(func, args, kwargs, result)
        return result

    def _kernel(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch's
        """Compute attention a second time by calls that are seen, since its kernel shows nothing.

        The kernel's own result is used, unless a visitor replaced a value.
        """
        if self._inside_kernel:  # a kernel inside another one
            with self:
                return written_out(func, args, kwargs, dropout=False)
        start, before = time.perf_counter(), self.seconds
        self._inside_kernel, self._changed = True, False
        try:
            with self:
                result = written_out(func, args, kwargs, dropout=False)
        finally:
            self._inside_kernel = False
        self.seconds = before + time.perf_counter() - start
        return result if self._changed else func(*args, **kwargs)

    def _show_scores(self, scores: Tensor, dim: int) -> Tensor | None:
        """Show the scores; return the replacement, if any."""
        path, call = self._attending or ("", 0)
        if SCORES not in self._inner.get(path, ()):
            return None
        start = time.perf_counter()
        value = canonical(scores, dim)
        self.seconds += time.perf_counter() - start
        return self._show(path, SCORES, call, value)

    def _show_probabilities(self, probabilities: Tensor) -> Tensor:
        """Show the probabilities; return them or their replacement."""
        path, call = self._attending or ("", 0)
        if PROBABILITIES not in self._inner.get(path, ()):
            return probabilities
        replacement = self._show(path, PROBABILITIES, call, probabilities)
        return probabilities if replacement is None else replacement


def _is_plain(value: Tensor) -> bool:
    """Return whether a value can be measured: a dense tensor of real floating-point numbers.

    Indices of a router, complex rotations, nested and sparse tensors, and tensors inside a vmap are not measured; their
    effect shows at later points.
    """
    return is_whole(value) and value.is_floating_point()


def canonical(scores: Tensor, dim: int = -1) -> Tensor:
    """Remove from scores what does not change their softmax: a constant per row, and how low masked ones are.

    >>> import torch
    >>> canonical(torch.tensor([7.0, 5.0, -10000.0]))
    tensor([  0.,  -2., -40.])
    """
    return (scores - scores.amax(dim, keepdim=True)).clamp_min(MASKED)


def select(output: object, name: str) -> Tensor | None:
    """Return the tensor of an output that a point names.

    Args:
        output: the result of a forward pass.
        name: empty for the first tensor, a number for the n-th, the name of a field or key, or a path within nested
            containers, ``hidden_states.3``.

    Returns:
        The tensor, or None.
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
"""Stands for a part that an output does not have."""


def _part(output: object, key: str) -> object:
    """Return one element of a container, by number or by name."""
    values: object = output
    if isinstance(output, Mapping) and key.isdigit() and key not in output:
        values = list(output.values())
    elif dataclasses.is_dataclass(output) and key.isdigit():
        values = [getattr(output, field.name) for field in dataclasses.fields(output)]
    elif (
        key.isdigit()
        and users_attribute(output, "__dict__") is not None
        and not isinstance(output, Mapping | list | tuple)
    ):
        values = list(vars(output).values())
    try:
        if isinstance(output, Mapping) and values is output:
            return output[key] if key in output else output[int(key)]
        return values[int(key)] if key.isdigit() else getattr(output, key)  # type: ignore[index]  # caught below
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return _ABSENT


def substitute(output: Any, name: str, value: Tensor) -> Any:  # whatever the module returns
    """Return an output with the tensor that :func:`select` finds replaced, in the same kind of container."""
    if isinstance(output, Tensor):
        return value
    if "." in name and _part(output, name) is _ABSENT:
        head, _, rest = name.partition(".")
        return _with(output, head, substitute(_part(output, head), rest, value))
    return _with(output, name, value)


def _with(output: Any, name: str, value: object) -> Any:  # as above
    index = int(name or 0) if (name or "0").isdigit() else None
    if isinstance(output, Mapping):  # a plain dictionary, or a model output that is one as well
        changed = copy(output)
        changed[name if index is None or name in output else list(output)[index]] = value  # type: ignore[index]  # a mutable one
        return changed
    if dataclasses.is_dataclass(output):
        field = name if index is None else dataclasses.fields(output)[index].name
        return dataclasses.replace(output, **{field: value})  # type: ignore[type-var]  # an instance, not a class
    if isinstance(output, tuple) and hasattr(output, "_replace") and hasattr(output, "_fields"):  # a NamedTuple
        return output._replace(**{name if index is None else output._fields[index]: value})
    if index is None or not isinstance(output, list | tuple):
        changed = copy(output)
        setattr(changed, name if index is None else list(vars(output))[index], value)
        return changed
    return type(output)([value if number == index else element for number, element in enumerate(output)])


def leaves(output: object) -> dict[str, Tensor]:
    """Return the tensors of an output, by the names with which :func:`select` finds them.

    Containers are mappings, dataclasses, tuples, lists, and objects with tensors as attributes. Caches of keys and
    values, which transformers returns as objects, are left out.

    >>> import torch
    >>> sorted(leaves({"logits": torch.zeros(1), "hidden_states": (torch.zeros(2), None)}))
    ['hidden_states.0', 'logits']
    >>> list(leaves(torch.zeros(1)))
    ['']
    """
    if isinstance(output, Tensor):
        return {"": output}
    tensors: dict[str, Tensor] = {}
    for name, part in _parts(output):
        for inner, tensor in leaves(part).items():
            tensors[f"{name}.{inner}" if inner else name] = tensor
    return tensors


def _parts(output: object) -> Iterator[tuple[str, object]]:
    """Yield the elements of a container, by name or by number."""
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
        attributes = _named(list(users_attribute(output, "__dict__", {}).items()))
        yield from ((name, attribute) for name, attribute in attributes if isinstance(attribute, Tensor))


def _named(items: Sequence[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Yield the elements by name, or by number where the name cannot be part of a point."""
    for index, (name, value) in enumerate(items):
        yield (name if _PLAIN.fullmatch(name) and name not in INNER else str(index)), value


_PLAIN = re.compile(r"\w+")


def like(exact: Tensor, value: Tensor) -> Tensor:
    """Return a copy of a value in the dtype and memory layout of another, to replace it.

    A module may call ``view`` on it, which another layout does not allow.
    """
    if exact.shape != value.shape:
        return exact.to(value.dtype, copy=True)
    return torch.empty_like(value).copy_(exact)

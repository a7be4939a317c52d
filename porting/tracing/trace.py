"""Seeing what the modules of a model compute while it runs, and letting it go on with other values.

A *point* is a place in a model whose value is seen: the output of a module (``layers.0``), one of several outputs
(``layers.0.attention -> 1``, ``bert -> pooled``), or what its attention computes inside (``-> scores``,
``-> probabilities``), which is seen in its call of softmax or scaled_dot_product_attention.  The model itself is
spelled ``.``.

A module that is called again in the same pass has the point ``layer #2`` for its second call.  One that is registered
under several names, such as a layer shared by all depths, has its first name in its first call, its second in the
second, and so on.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from porting.errors import PortingError
from porting.notation.rule import Term
from porting.plan.matching import Matcher


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

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
_SOFTMAX_ITSELF = F.softmax


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


def numbered(name: Point, call: int) -> Point:
    """The point of the call of that number: :func:`split` read from right to left."""
    return name if call == 1 else f"{name}{CALL}{call}"


def trace(
    module: nn.Module,
    call: Callable[[nn.Module], object],
    wanted: Iterable[Point],
    visit: Visit,
    ran: Callable[[str], None] | None = None,
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

    Returns:
        How many seconds of the run were spent in seeing and visiting.
    """
    recorder = _Recorder(wanted, visit, ran)
    with recorder.attached(module), recorder:
        call(module)
    return recorder.seconds


class _Recorder(TorchFunctionMode):
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

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:  # whatever it returns
        path, call = self._stack.pop()
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
        return instead

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # whatever torch's function gives
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and self._attending:
            # torch sends nothing here that is called from within one of its own functions.
            with _inside(self):
                return func(*args, **kwargs)
        if func in _SOFTMAX and self._attending:
            return self._softmax(*args, _like=func, **kwargs)
        if func is SDPA and self._attending and all(_is_plain(one) for one in args if isinstance(one, Tensor)):
            return self._fused(*args, **kwargs)
        return func(*args, **kwargs)

    @property
    def _attending(self) -> tuple[str, int] | None:
        """The innermost module that is running and whose scores or probabilities are wanted."""
        return next((one for one in reversed(self._stack) if one[0] in self._inner), None)

    def _softmax(self, input: Tensor, *args: Any, _like: Callable[..., Any] = _SOFTMAX_ITSELF, **kwargs: Any) -> Any:  # noqa: A002  # torch's own signature
        dim = args[0] if args else kwargs.get("dim", -1)
        instead = self._scored(input, dim if isinstance(dim, int) else -1)
        return self._weighed(_like(input if instead is None else instead, *args, **kwargs))

    def _fused(self, *args: Any, **kwargs: Any) -> Any:  # torch's own signature
        begun = time.perf_counter()
        scores = attention_scores(*args, **kwargs)
        self.seconds += time.perf_counter() - begun
        instead = self._scored(scores, -1)
        begun = time.perf_counter()
        probabilities = (scores if instead is None else instead).softmax(-1)
        self.seconds += time.perf_counter() - begun
        weighed = self._weighed(probabilities)
        if instead is None and weighed is probabilities:
            return SDPA(*args, **kwargs)
        value = args[2] if len(args) > 2 else kwargs["value"]
        if kwargs.get("enable_gqa"):
            value = value.repeat_interleave(weighed.shape[-3] // value.shape[-3], -3)
        return weighed @ value

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


SDPA = F.scaled_dot_product_attention


class _Inside(threading.local):
    """The recorder that looks into one of torch's own functions, in this thread."""

    recorder: _Recorder | None = None


_HERE = _Inside()
_PATCHED = [0]
"""How many passes look into one now: they may go side by side, and the last one out leaves torch as it was."""


@contextmanager
def _inside(recorder: _Recorder) -> Iterator[None]:
    """Softmax and attention are seen also where they are called from within one of torch's own functions."""
    _HERE.recorder = recorder
    _PATCHED[0] += 1
    F.softmax, F.scaled_dot_product_attention = _seen_softmax, _seen_attention
    try:
        yield
    finally:
        _HERE.recorder = None
        _PATCHED[0] -= 1
        if not _PATCHED[0]:
            F.softmax, F.scaled_dot_product_attention = _SOFTMAX_ITSELF, SDPA


def _seen_softmax(*args: Any, **kwargs: Any) -> Any:  # torch's own signature
    recorder = _HERE.recorder
    return _SOFTMAX_ITSELF(*args, **kwargs) if recorder is None else recorder._softmax(*args, **kwargs)


_SOFTMAX.add(_seen_softmax)  # torch tells of softmax by the name that it has in its module now


def _is_plain(value: Tensor) -> bool:
    """Whether it can be measured: real numbers, with one size along each axis.

    Not so are the indices that a router gives, rotations as complex numbers, nested and sparse tensors, and those
    within a vmap.  What is made of them is seen behind them.
    """
    wrapped = is_functorch_wrapped_tensor(value) or value.is_nested or value.layout is not torch.strided
    return not wrapped and value.is_floating_point()


def _seen_attention(*args: Any, **kwargs: Any) -> Any:  # torch's own signature
    recorder = _HERE.recorder
    return SDPA(*args, **kwargs) if recorder is None else recorder._fused(*args, **kwargs)


def attention_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The scores that ``scaled_dot_product_attention`` computes from these arguments, [... q k].

    Source: the reference implementation in the documentation of that function.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, -torch.inf)
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -torch.inf)
    return scores + attn_mask


def canonical(scores: Tensor, dim: int = -1) -> Tensor:
    """Scores without what softmax cannot see: a constant added to a row, and how far down a masked one is.

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
    return type(output)([value if number == place else one for number, one in enumerate(output)])


def leaves(output: object) -> dict[str, Tensor]:
    """The tensors that a forward returned, by the names that :func:`select` finds them with.

    Containers are mappings, dataclasses, named and plain tuples, lists, and objects that hold tensors as attributes.
    A cache of keys and values, which transformers returns as an object of its own, is not looked into.

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
        yield from ((name, one) for name, one in attributes if isinstance(one, Tensor))


def _named(items: Sequence[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """The elements by name; by number where a name cannot be spelled, or means the inside of attention in a point."""
    for place, (name, value) in enumerate(items):
        yield (name if _PLAIN.fullmatch(name) and name not in INNER else str(place)), value


_PLAIN = re.compile(r"\w+")

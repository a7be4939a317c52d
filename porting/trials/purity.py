"""Whether a port is a pure function of its inputs: run as its users run it, with nothing in the way.

A batch is run, another one, the first again, in a fresh copy, with gradients on and in inference mode: each gives the
same numbers.  Inputs come back as they were, outputs that are held do not change, weights stay, nothing is drawn.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.frames import current_line, from_here, users_attribute
from porting.target import named_tensors
from porting.tracing.running import Side
from porting.tracing.torch_modes import FunctionMode
from porting.tracing.trace import leaves
from porting.trials.combinations import de_bruijn
from porting.trials.inputs import Case
from porting.trials.padding import TOKENS
from porting.trials.scope import Impurity, ImpurityKind

ROUNDING = 4096
"""Units in the last place, relative to scale, by which two modes of running may differ: kernels may be others."""

FURTHER = 4.0
"""The factor between the errors of two modes from which on it is more than rounding."""

REPEATED = 64
"""The same for two runs of one batch in the same mode."""


Judge = Callable[[int, object], float]
"""A function of a case's number and output: its distance from the reference, relative to scale, without padding."""


def impurities(
    make: Callable[[], Side],
    dtype: torch.dtype,
    judge: Judge,
    short: Side,
    alone: Mapping[int, Callable[[], Side]],
    pairs: Side,
    own: Callable[[str], bool],
    sequences: Sequence[Sequence[tuple[Case, Case]]],
    make_with: Callable[[Sequence[Case]], Side],
) -> list[Impurity]:
    """Run a port in every way and say where it is not pure.

    Args:
        make: gives the port with its cases, each time in a fresh copy that was never called; no row of the first case
            is padded.
        short: the port with short batches of different shapes, and some of the same token ids, each of which is run
            after each other one.
        alone: gives the port in a fresh copy with one of these batches alone, by its number.
        pairs: the port with batches two by two of one shape and other tokens, the largest first: an output may be kept
            in one buffer for large batches only, or for single tokens.
        own: whether a persistent buffer is the module's own, and no checkpoint fills it.
        sequences: pairs of a batch, and one that is run after it and by itself: it lacks an argument that the first one
            has, or has one more. Each list of pairs is run in a copy of its own.
        make_with: gives the port in a fresh copy with other batches, for the sequences.
    """
    side, other = make(), make()
    last = min(len(side.arguments) - 1, 1)
    units = torch.finfo(dtype).eps
    before, kept_before = _digests(side.module), _state(side.module)
    found: list[Impurity] = []
    try:
        with generators() as drawn:
            first = _run(side, 0)
        kept = {name: one.clone().detach() for name, one in first.items()}
        held = {name: one for name, one in first.items() if not one.is_inference()}
        again = _run(side, 0)
        repeated = apart(kept, again)
        if drawn:
            found.append(Impurity(kind=ImpurityKind.RANDOM, detail=", ".join(drawn), size=repeated or None))
        if repeated > REPEATED * units:
            if not drawn:
                detail = _kept(side.module, kept_before)
                found.append(Impurity(kind=ImpurityKind.REPEATED, size=repeated, detail=detail))
            return [*found, *_written(side, before, own)]
        _run(side, last)
        if (far := apart({name: kept[name] for name in held}, held)) > 0 or (far := _overwritten(pairs)) > 0:
            found.append(Impurity(kind=ImpurityKind.HELD, size=far))
        far = _in_any_order(short, alone)
        if far > REPEATED * units:
            found.append(Impurity(kind=ImpurityKind.STATE, size=far, detail=_kept(short.module, kept_before)))
            sequences = ()
        for several in sequences:
            used = make_with([case for pair in several for case in pair])
            far = _after_arguments(used, [partial(make_with, [second]) for _, second in several])
            if far > REPEATED * units:
                found.append(Impurity(kind=ImpurityKind.STATE, size=far, detail=_kept(used.module, kept_before)))
                break
        for kind, run in (
            (ImpurityKind.STATE, partial(_run, side, 0)),
            (ImpurityKind.STATE, partial(_after_training_mode, side)),
            (ImpurityKind.FRESH, partial(_after_another, other, last)),
        ):
            far = apart(kept, run())
            if far > REPEATED * units:
                module = other.module if kind is ImpurityKind.FRESH else side.module
                found.append(Impurity(kind=kind, size=far, detail=_kept(module, kept_before)))
    except VerifyError as failure:
        found.append(Impurity(kind=ImpurityKind.FAILS, detail=_said("after another call", failure)))
        return [*found, *_written(side, before, own)]
    return [*found, *_in_other_modes(side, judge, units), *_written(side, before, own)]


def after_other_calls(
    make: Callable[[], Side], as_new: Callable[[], AbstractContextManager[None]] = nullcontext
) -> list[Impurity]:
    """Run a port that differs in its cases one after the other, and each in a fresh copy, and compare the two.

    Before each case its rows run in the other order: what is kept for a shape, such as a mask, shows then.

    Args:
        make: gives the port with its cases, each time in a fresh copy that was never called.
        as_new: makes the context in which what the port's files keep is as it was before the first call.

    Returns:
        That it keeps something between calls, where the two are not the same; nothing for a port that draws numbers.
    """
    used = make()
    cases = [*range(len(used.arguments))]
    chosen = cases if len(cases) <= MOST_CASES else [*cases[: MOST_CASES // 2], *cases[-(MOST_CASES // 2) :]]
    worst, kept = 0.0, ""

    def alone(case: int) -> dict[str, Tensor]:
        with as_new():
            return {name: one.clone() for name, one in _run(make(), case).items()}

    try:
        with generators() as drawn:
            right = {case: alone(case) for case in chosen}
            with as_new():
                fresh, weights = _state(used.module), _digests(used.module)
                for case in (*chosen, *reversed(chosen)):
                    turned = {name: one.flip(0) if one.ndim else one for name, one in used.arguments[case].items()}
                    _run(replace(used, arguments=[turned]), 0)
                    worst = max(worst, apart(right[case], _run(used, case)))
                for case in cases:
                    before = _with_every_argument(used.arguments[case], used.arguments[0])
                    if before is not None:
                        _run(replace(used, arguments=[before]), 0)
                        worst = max(worst, apart(right.get(case) or alone(case), _run(used, case)))
                kept = _kept(used.module, fresh) or _written_at(used, _changed(used, weights))
    except VerifyError:  # the comparison of the same batches has reported it
        return []
    if drawn or worst <= REPEATED * torch.finfo(torch.float32).eps:
        return []
    return [Impurity(kind=ImpurityKind.STATE, size=worst, detail=kept)]


def _with_every_argument(some: Mapping[str, Tensor], every: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The front of a batch with all arguments, in the shape of one that lacks some; None where it has no such front."""
    found: dict[str, Tensor] = {}
    for name, one in every.items():
        like = name if name in some else next((it for it in some if every.get(it, one[:0]).shape == one.shape), "")
        if not like or some[like].ndim != one.ndim or one.ndim < 2:
            return None
        rows, width = some[like].shape[:2]
        found[name] = one[:rows, :width]
        if found[name].shape[:2] != (rows, width):
            return None
        if name not in some and one.ndim == TOKENS and not one.is_floating_point():  # its front may be all zeros
            values = torch.tensor(sorted(set(one.flatten().tolist())), dtype=one.dtype)
            found[name] = values[torch.arange(rows * width) % len(values)].view(rows, width)
    return found if len(every) > len(some) else None


MOST_CASES = 6
"""How many cases are run after one another."""


def _in_other_modes(side: Side, judge: Judge, units: float) -> Iterator[Impurity]:
    """Differences between the ways in which users run a model: without gradients, with them, in inference mode."""
    modes: tuple[tuple[ImpurityKind, Callable[[], AbstractContextManager[object]]], ...] = (
        (ImpurityKind.GRADIENTS, torch.enable_grad),
        (ImpurityKind.INFERENCE, torch.inference_mode),
    )
    numbers = range(len(side.arguments))
    seen = max(judge(case, side.outputs(case, around=_looked_into)) for case in numbers)
    usual = max(judge(case, side.outputs(case)) for case in numbers)
    if usual > ROUNDING * units and usual > FURTHER * seen:
        yield Impurity(kind=ImpurityKind.PLAIN, size=usual)
    for kind, mode in modes:
        try:
            far = max(judge(case, side.outputs(case, around=mode)) for case in numbers)
        except VerifyError as failure:
            name = "with gradients on" if kind is ImpurityKind.GRADIENTS else "in inference mode"
            yield Impurity(kind=ImpurityKind.FAILS, detail=_said(name, failure))
            continue
        if far > ROUNDING * units and far > FURTHER * usual:
            yield Impurity(kind=kind, size=far)


@contextmanager
def _looked_into() -> Iterator[None]:
    """Run with a mode that keeps torch from its fused fast paths, as every look into a pass does."""
    with torch.no_grad(), FunctionMode():
        yield


def _in_any_order(side: Side, alone: Mapping[int, Callable[[], Side]]) -> float:
    """The largest distance between the outputs of a batch when it is run after each of the others.

    What is kept from an earlier call may be the same after each other batch: so a fresh copy says what is right.
    """
    first = [
        {name: one.clone().detach() for name, one in _run(side, case).items()} for case in range(len(side.arguments))
    ]
    worst = max((apart(_run(make(), 0), first[case]) for case, make in alone.items()), default=0.0)
    for case in de_bruijn(range(len(first)), 2):  # each follows each, itself included
        worst = max(worst, apart(first[case], _run(side, case)))
    return worst


def _after_arguments(side: Side, alone: Sequence[Callable[[], Side]]) -> float:
    """The largest distance between the outputs of each second batch in a fresh copy and after the one before it.

    What a port keeps of an argument, such as a mask, it may use again in a call without that argument alone.
    """
    worst = 0.0
    for number, make in enumerate(alone):
        try:
            right = _run(make(), 0)
            _run(side, 2 * number)
        except VerifyError:  # the trials have told that the port fails on such a batch
            continue
        try:
            worst = max(worst, apart(right, _run(side, 2 * number + 1)))
        except VerifyError:  # by itself it did not fail
            return math.inf
    return worst


def _overwritten(side: Side) -> float:
    """The largest change of a first batch's outputs while they are held and a second one is run."""
    worst = 0.0
    for case in range(0, len(side.arguments), 2):
        held = _run(side, case)
        kept = {name: one.clone().detach() for name, one in held.items()}
        _run(side, case + 1)
        worst = max(worst, apart(kept, held))
    return worst


def _said(way: str, failure: VerifyError) -> str:
    return f"{way}: {failure.faults[0].message.rpartition(']: ')[2]}"


def _after_training_mode(side: Side) -> dict[str, Tensor]:
    """The first batch after the module was in training mode, in which nothing was run."""
    with suppress(Exception):  # the user's own train and eval may raise anything
        side.module.train()
        side.module.eval()
    return _run(side, 0)


def _after_another(side: Side, last: int) -> dict[str, Tensor]:
    """A fresh copy that was called on the other batch first."""
    if last:
        _run(side, last)
    return _run(side, 0)


def _run(
    side: Side, case: int, around: Callable[[], AbstractContextManager[object]] = torch.no_grad
) -> dict[str, Tensor]:
    return {name: one for name, one in leaves(side.outputs(case, around=around)).items() if one.is_floating_point()}


def apart(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """The largest difference of outputs of the same names, relative to scale; infinite where they are not the same."""
    if set(some) != set(others):
        return math.inf
    worst = 0.0
    for name, one in some.items():
        other = others[name].detach()
        if one.shape != other.shape:
            return math.inf
        first, second = one.detach().double().nan_to_num(), other.double().nan_to_num()
        if first.numel() and not torch.equal(first, second):
            worst = max(worst, float((first - second).abs().max() / first.abs().max().clamp_min(1e-30)))
    return worst


def _written(side: Side, before: Mapping[str, int], own: Callable[[str], bool]) -> Iterator[Impurity]:
    for name in side.written:
        yield Impurity(kind=ImpurityKind.WRITES_INPUTS, detail=name)
    changed = _changed(side, before)
    scratch = [name for name in changed if own(name)]
    if scratch and not _is_without_effect(side, scratch):
        scratch = []
    changed = [name for name in changed if name not in scratch]
    for kind, names in ((ImpurityKind.WRITES_WEIGHTS, changed), (ImpurityKind.WRITES_SCRATCH, scratch)):
        if names:
            yield Impurity(kind=kind, detail=_written_at(side, names))


def _changed(side: Side, before: Mapping[str, int]) -> list[str]:
    """The weights and buffers that are no longer what they were."""
    after = _digests(side.module)
    return [name for name, one in before.items() if after.get(name) != one]


def _written_at(side: Side, names: Sequence[str]) -> str:
    """Some weights, with the lines of the user's code that write to them in a pass."""
    if not names:
        return ""
    held = dict(named_tensors(side.module))
    watch = _Writes({held[name].untyped_storage().data_ptr() for name in names if name in held})
    with suppress(VerifyError, RuntimeError), watch:
        _run(side, 0)
    lines = f" (written at {', '.join([*watch.lines][:NAMED])})" if watch.lines else ""
    return ", ".join(names[:NAMED]) + lines


class _Writes(FunctionMode):
    """Notes the lines that change some tensors in place.

    Args:
        storages: the addresses of the tensors' storages.

    Attributes:
        lines: ``file:line`` of the user's code.
    """

    def __init__(self, storages: Collection[int]) -> None:
        super().__init__()
        self._storages = storages
        self.lines: dict[str, None] = {}

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        first = args[0] if args and isinstance(args[0], Tensor) and not args[0].is_inference() else None
        version = None if first is None else first._version
        result = func(*args, **kwargs)
        if first is not None and first._version != version and first.untyped_storage().data_ptr() in self._storages:
            self.lines[from_here(current_line())] = None
        return result


def _is_without_effect(side: Side, names: Sequence[str]) -> bool:
    """Whether the outputs are the same with other numbers in these buffers before a call.

    So it is for a cache of keys and values that each call fills from the first position on, and for a count of calls.
    """
    try:
        for case in range(len(side.arguments)):
            usual = {name: one.clone() for name, one in _run(side, case).items()}
            buffers = dict(side.module.named_buffers())
            if not buffers.keys() >= set(names):
                return False
            with torch.inference_mode():  # a buffer that was made in it is written in it alone
                for name in names:
                    _fill_otherwise(buffers[name])
            if apart(usual, _run(side, case)) > REPEATED * _units(usual):
                return False
    except (VerifyError, RuntimeError):
        return False
    return True


def _fill_otherwise(buffer: Tensor) -> None:
    """Put NaN into a buffer, or other whole numbers than it holds; False for True."""
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(math.nan)
    elif buffer.dtype == torch.bool:
        buffer.logical_not_()
    else:
        buffer.add_(1)


def _units(outputs: Mapping[str, Tensor]) -> float:
    return max((torch.finfo(one.dtype).eps for one in outputs.values()), default=0.0)


def _kept(module: nn.Module, before: Mapping[str, object]) -> str:
    """Names of state besides weights that calls have changed, such as ``"layers.0.cache"``; empty if there is none."""
    now = _state(module)
    return ", ".join([name for name, one in now.items() if before.get(name) != one][:NAMED])


NAMED = 3
"""The number of changed attributes that are named."""


def _state(module: nn.Module) -> dict[str, object]:
    """What calls may change besides weights, by name.

    It is the attributes of a module's parts and of their classes, the variables of the files that define these, and
    the variables that functions of both keep: in a closure, in the default of an argument, as an attribute.
    """
    found: dict[str, object] = {}
    for path, part in module.named_modules():
        for name, value in {**vars(part), **part._buffers}.items():
            if name not in _OF_TORCH:
                found[f"{path}.{name}" if path else name] = _content(value)
        for class_ in type(part).__mro__:
            file = sys.modules.get(class_.__module__)
            if file is None or file.__name__.partition(".")[0] in _LIBRARIES or class_.__qualname__ in found:
                continue
            found |= _variables(class_.__qualname__, vars(class_))
            found[class_.__qualname__] = None
            if file.__name__ not in found:
                found |= _variables(file.__name__, vars(file))
                found[file.__name__] = None
    return found


_OF_TORCH = frozenset(vars(nn.Module()))
_LIBRARIES = frozenset({"torch", "builtins", "transformers"})


def _variables(where: str, variables: Mapping[str, object]) -> dict[str, object]:
    """The contents of variables by name, and of what functions among them keep."""
    found: dict[str, object] = {}
    for name, value in variables.items():
        if name.startswith("__") and name != "__call__":
            continue
        found[f"{where}.{name}"] = _content(value)
        function = users_attribute(value, "__func__", value)
        if isinstance(function, FunctionType):
            found |= {f"{where}.{name}.{key}": _content(one) for key, one in _kept_by(function).items()}
    return found


def _kept_by(function: FunctionType) -> dict[str, object]:
    """The variables that a function keeps from call to call, by name."""
    found: dict[str, object] = dict(vars(function))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # an empty cell
            found[name] = cell.cell_contents
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    found |= dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    return found | (function.__kwdefaults__ or {})


def _content(value: object, depth: int = 3) -> object:
    """A value to compare for changes: the numbers of tensors and arrays, also those inside of collections and objects.

    Args:
        depth: so many levels of them are looked into.
    """
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and not value.is_meta
        return tuple(value.shape), _digest(value.detach()) if plain else 0
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return value
    if isinstance(value, type | nn.Module | ModuleType | FunctionType) or not depth:
        return None
    if callable(info := users_attribute(value, "cache_info")):  # functools.lru_cache
        return info().currsize
    if users_attribute(value, "__array_interface__") is not None:
        return tuple(users_attribute(value, "shape", ())), hash(users_attribute(value, "tobytes", bytes)())
    if isinstance(value, dict | list | tuple | set | deque):
        inside = list(dict.values(value)) if isinstance(value, dict) else list(value)
    else:
        inside = list(users_attribute(value, "__dict__", {}).values())
    return (type(value), len(inside), *(_content(one, depth - 1) for one in inside[:MOST_PARTS]))


MOST_PARTS = 1000
"""So many members of a collection are looked at."""


def _digests(module: nn.Module) -> dict[str, int]:
    """A number for each parameter and persistent buffer that changes with any of its bits, as good as always."""
    return {name: _digest(one.detach()) for name, one in named_tensors(module) if not one.is_meta}


def _digest(value: Tensor) -> int:
    flat = value.cpu().contiguous().view(-1)
    if flat.numel() == 0:
        return 0
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}.get(flat.element_size())
    whole = flat.view(bits) if bits is not None and not flat.is_complex() else flat.view(torch.uint8)
    weights = torch.arange(2, 2 + 997, dtype=torch.int64)  # from 1 on a single number would give 0
    total = int(whole.sum(dtype=torch.int64))
    head = whole[: 997 * (len(whole) // 997)].view(-1, 997).sum(0, dtype=torch.int64) if len(whole) >= 997 else whole
    return total ^ int((head.long() * weights[: len(head)]).sum())


@contextmanager
def generators() -> Iterator[list[str]]:
    """Within it, random numbers that are drawn are noted.

    Yields:
        The generators that were drawn from, when it is over.
    """
    drawn: list[str] = []
    system: list[str] = []
    numpy: Any = sys.modules.get("numpy")  # its types are not needed for what is read here
    state, python = torch.get_rng_state(), random.getstate()
    array = None if numpy is None else numpy.random.get_state()
    urandom, inside = os.urandom, random._urandom  # type: ignore[attr-defined]  # what SystemRandom and secrets draw by

    def told(size: int) -> bytes:
        system.append("os.urandom")
        return urandom(size)

    os.urandom = random._urandom = told  # type: ignore[attr-defined]  # as above
    try:
        yield drawn
    finally:
        os.urandom, random._urandom = urandom, inside  # type: ignore[attr-defined]  # as above
        drawn += [] if torch.equal(state, torch.get_rng_state()) else ["torch"]
        drawn += [] if python == random.getstate() else ["random"]
        if array is not None:
            now = numpy.random.get_state()
            same = array[2] == now[2] and bool((array[1] == now[1]).all())
            drawn += [] if same else ["numpy.random"]
        drawn += ["os.urandom"] if system else []

"""Building a module without initializing it or allocating its weights."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from porting.checkpoint.layout import TensorInfo
from porting.errors import Code, Fault, PortingError
from porting.frames import users_line
from porting.limits import Budget, limits, raised
from porting.plan.recipe import Described
from porting.printable import text_of
from porting.target import TargetError, named_tensors
from porting.tracing.devices import or_on_cpu
from porting.tracing.torch_modes import FunctionMode
from porting.user_state import restored_state


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits on a module that is being built, since a config can ask for any size.

    Attributes:
        parameters: the number of parameters, and that of modules.
        elements: elements of all parameters with values; some builders compute them one by one, in Python.
        nbytes: bytes of these parameters, and of any tensor whose value is computed.
        made: bytes of all tensors that exist at the same time during the build.
        stored: bytes of the checkpoint, which extend the time of the build; None if time is not limited.
    """

    parameters: int
    elements: int = 2**63
    nbytes: int
    made: int = 2**63
    stored: int | None = None


COPIES = 8
"""How often stored bytes may be registered: as float64 of bfloat16, or untied, and again with values."""

SHARED_LAYERS, STACKED_LAYERS = 36, 256
"""Layers beyond the number of tensors, if layers share weights or are stacked in tensors; each takes time to build."""

STACKED = 4
"""The number of tensors whose first axis counts layers that make a stack."""

_LAYERS = re.compile(r"(?!max_)(.*_)?(layers?|depth)")
"""Names of config fields that count layers; ``max_window_layers`` is the number of one, and often beyond the last."""


def bounds(tensors: Mapping[str, Described], config: Mapping[str, object] | None = None) -> Bounds:
    """The limits for a module that a checkpoint of these tensors is loaded into."""
    most = max(SHARED_LAYERS, len(tensors))
    for name, value in (config or {}).items():
        if isinstance(value, int) and value > most and _LAYERS.fullmatch(name):
            stacked = sum(tensor.shape[:1] == (value,) for tensor in tensors.values())
            if stacked >= STACKED and value <= STACKED_LAYERS:
                continue
            raise _too_large(f"{name}={str(value)[:20]}, where at most {most} layers can be meant")
    repeated = {name: tensor.repeated for name, tensor in tensors.items() if isinstance(tensor, TensorInfo)}
    numel = {name: math.prod(tensor.shape) - repeated.get(name, 0) for name, tensor in tensors.items()}
    nbytes = sum(count * tensors[name].dtype.itemsize for name, count in numel.items())
    allowed = limits()
    return Bounds(
        parameters=10_000 + 64 * len(tensors),
        elements=allowed.parameters + COPIES * sum(numel.values()),
        nbytes=allowed.made + COPIES * nbytes,
        made=allowed.made + COPIES * nbytes,
        stored=nbytes,
    )


OWN_CODE = Bounds(parameters=2**63, nbytes=2**63)
"""No limits, for a user's builder that gets no config."""


def build(make: Callable[[], nn.Module], within: Bounds) -> nn.Module:
    """Call ``make`` with the initialisation of parameters skipped.

    The module is built on the meta device.  When its constructor asks for a tensor's value, or keeps a tensor that is
    no parameter and no persistent buffer, it is built once more on the CPU, where those tensors get their values.  When
    it runs the module, parameters get theirs as well, and are emptied in the end.

    Args:
        make: builds the module; may be called three times.

    Returns:
        The module: parameters and persistent buffers on the meta device, everything else with its values.  One that its
        builder moves to a GPU has all of its values, there.
    """
    mode = _WithoutInitialisation()
    try:
        with restored_state(make):
            module, complete = _try_build(make, "meta", within, mode)
    except PortingError:
        raise
    except Exception:  # noqa: BLE001  # a user's builder that reads a value fails on the meta device in any way; the CPU decides
        complete = False
    if not complete:
        if mode.largest > within.nbytes:
            raise _too_large(f"a tensor of {mode.largest} bytes, at most {within.nbytes},", "made", mode.largest)
        try:
            module, _ = _try_build(make, "cpu", within, _WithoutInitialisation())
        except PortingError:
            raise
        except Exception:  # noqa: BLE001  # as above, where it reads a parameter; errors of the last attempt are reported
            module = _call_builder(make, within)
        if all(tensor.device.type in {"cpu", "meta"} for _, tensor in named_tensors(module)):
            _move_to_meta(module)
    return module


def build_with_values(make: Callable[[], nn.Module], within: Bounds) -> nn.Module:
    """Build the module with the weights that its builder gives it."""
    module: object = _call_builder(make, within)
    if not isinstance(module, nn.Module):
        raise _not_a_module(module)
    refuse_empty(module)
    return module


def refuse_empty(module: nn.Module) -> None:
    """Raise where a module keeps a buffer without values: what was built without them before is in a cache."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise _without_values(part, name)


def _not_a_module(made: object) -> TargetError:
    message = f"building the module gave a {type(made).__name__}, expected a torch.nn.Module"
    return TargetError(Fault(code=Code.BAD_TARGET, message=message))


def _call_builder(make: Callable[[], nn.Module], within: Bounds) -> nn.Module:
    """Call the builder; returns its module."""
    try:
        with torch.device("cpu"), bounded(within):
            return or_on_cpu(make)
    except PortingError:
        raise
    except Exception as error:  # a user's code may raise anything; it is reported with its line
        why = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
        message = f"building the module failed: {type(error).__name__}: {one_line(error)}{why}"
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=f"at {users_line(error)}")) from error


def _too_large(demand: str, unit: str = "", needed: int = 0) -> TargetError:
    message = f"building the module asks for {demand} for a checkpoint of this size"
    hint = "a size in config.json is not that of the tensors: take it from where the checkpoint came from"
    hint += f"; if it is meant, raise the limit: {raised(unit, 2 * needed)}" if unit else ""
    return TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))


def _try_build(
    make: Callable[[], object], device: str, within: Bounds, mode: _WithoutInitialisation
) -> tuple[nn.Module, bool]:
    """Build the module; also returns whether a checkpoint can fill all tensors that it keeps."""
    emptying = nullcontext() if device == "meta" else _without_parameters()
    with torch.device(device), emptying, bounded(within), mode:
        module = make()
    if not isinstance(module, nn.Module):
        raise _not_a_module(module)
    kept = {id(tensor) for reference in mode.made if (tensor := reference()) is not None}
    return module, kept <= {id(tensor) for _, tensor in named_tensors(module)}


@contextmanager
def bounded(within: Bounds) -> Iterator[None]:
    """Limit the size of modules that are built in this thread.

    Whatever a checkpoint's config decides is built here: by :func:`build`, :func:`build_with_values` or :func:`call`,
    and the reference by transformers.
    """
    thread, most = get_ident(), within.parameters
    parameters = modules = nbytes = elements = 0
    clock = _Clock(within)

    def count_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal parameters, nbytes, elements
        if get_ident() != thread:
            return
        clock.tick()
        parameters += 1
        if parameter is not None and not parameter.is_meta and not nn.parameter.is_lazy(parameter):
            elements += parameter.numel()
            nbytes += parameter.nbytes
        if parameters > most:
            raise _too_large(f"more than {most} parameters, as many as could be meant")
        if elements > within.elements:
            raise _too_large(f"parameters of more than {within.elements} elements", "parameters", elements)
        if nbytes > within.nbytes:
            raise _too_large(f"parameters of more than {within.nbytes} bytes", "made", nbytes)

    def count_module(parent: nn.Module, name: str, module: nn.Module) -> None:
        nonlocal modules
        if get_ident() != thread:
            return
        clock.tick()
        modules += 1
        if modules > most:
            raise _too_large(f"more than {most} modules, as many as could be meant")

    hooks = [register_module_parameter_registration_hook(count_parameter)]
    hooks.append(register_module_module_registration_hook(count_module))
    try:
        with nullcontext() if within.made >= OWN_CODE.made else _HeldBytes(within):
            yield
    finally:
        for hook in hooks:
            hook.remove()


BUILDING = "building the module"

STEP = 0.02
"""Seconds between two parts of a module: what takes longer is computed or imported, and is not many parts."""


class _Clock:
    """Counts the processor time of the many small parts of a module whose number a config can raise."""

    def __init__(self, within: Bounds) -> None:
        self._budget = Budget(limits(), part=0.75)
        self._counts = within.stored is not None
        self._budget.grant(within.stored or 0, BUILDING)
        self._last = time.thread_time()

    def tick(self) -> None:
        """Count the step that ends here."""
        now = time.thread_time()
        taken, self._last = now - self._last, now
        if self._counts and taken < STEP:
            self._budget.spend(taken, BUILDING)


class _HeldBytes(FunctionMode):
    """Limits the bytes of tensors that exist during the build, such as masks and tables of positions.

    Parameters count as well, where they take memory.  What is about to be made is asked for on the meta device first,
    where it is filled, counted, or spread out from several tensors.
    """

    MAKES = frozenset({
        "arange", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm",
        "tril_indices", "triu_indices", "zeros",
    })  # fmt: skip

    def __init__(self, within: Bounds) -> None:
        super().__init__()
        self._within = within
        self._nbytes = 0
        self._known: dict[int, int] = {}
        self._seen = 0

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        self._require(_predicted_bytes(func, args, kwargs))
        result = func(*args, **kwargs)
        for value in result if isinstance(result, tuple | list) else (result,):
            counts = isinstance(value, Tensor) and not nn.parameter.is_lazy(value)
            if counts and not value.is_meta and value.layout is torch.strided:
                self._count_storage(value)
        return result

    def _count_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = nbytes = storage.nbytes()
        self._nbytes += nbytes
        finalize(storage, self._release_storage, key)
        self._require(0)

    def _release_storage(self, key: int) -> None:
        self._nbytes -= self._known.pop(key, 0)

    def _require(self, more: int) -> None:
        if self._nbytes + more > self._within.made:
            needed = self._nbytes + more
            raise _too_large(f"tensors of {needed} bytes at a time, at most {self._within.made},", "made", needed)


LOOKED_AT = 1 << 24
"""Elements that two tensors can be spread out to before it is looked at how many they are."""


def _predicted_bytes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The bytes that a call will allocate, if they may be many and can be computed before; else 0."""
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    if any(map(nn.parameter.is_lazy, tensors)):
        return 0
    if not tensors:
        spread = getattr(func, "__name__", "") in _HeldBytes.MAKES
    elif len(tensors) == 2:  # what is spread out has more elements than both
        first, second = tensors
        spread = max(first.numel(), second.numel()) > 1 and first.numel() * second.numel() > LOOKED_AT
    else:
        spread = False
    if not spread:
        return 0
    try:
        made = func(
            *(argument.to("meta") if isinstance(argument, Tensor) else argument for argument in args),
            **{**kwargs, **({} if tensors else {"device": "meta"})},
        )
    except Exception:  # noqa: BLE001  # any function of torch may fail on the meta device; it is then called as it is
        return 0
    return made.nbytes if isinstance(made, Tensor) else 0


@contextmanager
def _without_parameters() -> Iterator[None]:
    """Move parameters to the meta device when a module registers them, so that nothing fills or computes them."""
    thread = get_ident()

    def empty(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if get_ident() != thread or parameter.is_meta or nn.parameter.is_lazy(parameter):
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    # torch's annotation says that the hook returns None; its documentation, that a returned parameter is used.
    hook = register_module_parameter_registration_hook(empty)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


class _WithoutInitialisation(FunctionMode):
    """Skips initialisation of tensors on the meta device, and records all tensors that are made.

    On the meta device, filling does nothing useful and costs a second: it is decomposed in Python, and the first
    decomposition imports a symbolic algebra package.  It is a mode of functions, which come before that decomposition.
    """

    FILLS = frozenset({
        "add_", "bernoulli_", "clamp_", "constant_", "copy_", "erfinv_", "fill_", "kaiming_uniform_", "mul_", "normal_",
        "trunc_normal_", "uniform_", "zero_",
    })  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.made: list[ref[Tensor]] = []
        self.largest = 0

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        if getattr(func, "__name__", "") in self.FILLS:
            tensor = args[0] if args else None
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        result = func(*args, **kwargs)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.made.append(ref(value))
                self.largest = max(self.largest, value.nbytes)
        return result


def _move_to_meta(module: nn.Module) -> None:
    """Move parameters and persistent buffers to the meta device, except lazy ones; ties are kept."""
    kept = {id(tensor): tensor for _, tensor in named_tensors(module) if not nn.parameter.is_lazy(tensor)}
    parameters: dict[int, nn.Parameter] = {}
    empty: dict[int, Tensor] = {}
    for key, tensor in kept.items():
        empty[key] = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            empty[key] = parameters[key] = nn.Parameter(empty[key], requires_grad=tensor.requires_grad)
    for part in module.modules():
        for name, parameter in part._parameters.items():
            part._parameters[name] = parameters.get(id(parameter), parameter)
        for name, buffer in part._buffers.items():
            part._buffers[name] = empty.get(id(buffer), buffer)
        for name, value in list(vars(part).items()):
            if isinstance(value, Tensor) and id(value) in empty:  # a buffer's tensor under another name
                vars(part)[name] = empty[id(value)]
        for name, value in (*part._buffers.items(), *vars(part).items()):
            if (
                isinstance(value, Tensor)
                and value.is_meta
                and id(value) not in {id(tensor) for tensor in empty.values()}
            ):
                raise _without_values(part, name)


def _without_values(part: nn.Module, name: str) -> TargetError:
    message = f"{type(part).__name__} keeps {name!r}, a tensor without values, even when built on the CPU"
    hint = "build it in the constructor, without a cache that outlives it; or pass the built module"
    return TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))


def one_line(error: Exception) -> str:
    """An error's message in one line, without torch's C++ frames."""
    text = text_of(error).partition("Exception raised from")[0].rstrip(" ;\n")
    return "; ".join(line.strip() for line in text.splitlines() if line.strip()).replace(":; ", ": ")

"""Conditions on tensors in a port's own code that were never true, or never false, in any pass.

``torch.where(ids == 17, ...)`` is a branch that code coverage cannot see: both arms run, and the condition chooses by
element. If it was the same for all elements of all batches, one of its arms was not compared. The numbers that token
ids are compared with are useful inputs, like the dictionary of a fuzzer.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from porting.frames import from_here, users_attribute
from porting.tracing.code_coverage import MODELS, Branch, is_own, nested_code
from porting.tracing.torch_modes import DispatchMode, FunctionMode

_COMPARES = frozenset(
    f"{before}{name}{after}"
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "isin")
    for before, after in (("", ""), ("__", "__"), ("logical_", ""), ("bitwise_", ""))
)
_CLAMPS = frozenset({"clamp", "clamp_", "clip", "clamp_min", "clamp_max", "hardtanh", "minimum", "maximum"})

_ENGINE = str(Path(__file__).parent.parent)

MOST_NUMBERS = 64
"""Largest size of a tensor that is taken for a list of constants."""


@dataclass
class _Site:
    """One operation in one line.

    Attributes:
        true, false: whether any element was true or false; for a clamp, whether any was changed or kept.
    """

    code: CodeType
    line: int
    name: str
    true: bool = False
    false: bool = False
    numbers: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether both outcomes occurred."""
        return self.true and self.false

    def branch(self) -> Branch:
        """Return the outcome that did not occur as a branch that never ran."""
        if self.name in _CLAMPS:
            outcome = "never changed a value" if not self.true else "changed every value"
        else:
            outcome = "was never true" if not self.true else "was never false"
        source = linecache.getline(self.code.co_filename, self.line).partition("#")[0].strip()
        return Branch(
            where=f"{from_here(self.code.co_filename)}:{self.line}",
            condition=f"{source}  [{self.name} {outcome}]",
            function=self.code.co_qualname,
            lines=1,
            first=self.line,
            constants=tuple(sorted(self.numbers)),
        )


class Conditions(FunctionMode):
    """Records the outcomes of conditions on tensors in a port's own code, over several passes.

    It is a mode of torch functions because it needs the comparisons of tensors, and the line that makes each.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._package = type(module).__module__.partition(".")[0]
        self._own: dict[CodeType, bool] = {}
        self._sites: dict[tuple[CodeType, int], _Site] = {}  # by instruction: a line may hold several

    @property
    def open(self) -> bool:
        """Whether any condition had only one outcome."""
        return any(not site.complete for site in self._sites.values())

    @property
    def numbers(self) -> tuple[int, ...]:
        """The integers that tensors were compared with."""
        return tuple(sorted({number for site in self._sites.values() for number in site.numbers}))

    def branches(self) -> Iterator[Branch]:
        """Yield the outcomes that did not occur, in the order in which the conditions first ran."""
        for site in self._sites.values():
            if not site.complete:
                yield site.branch()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if (name in _COMPARES or name in _CLAMPS) and isinstance(result, Tensor) and of_all_rows(result).numel() > 1:
            frame = sys._getframe(1)  # the caller's line; inspect.stack reads every file of the stack
            while _is_mode(frame) and frame.f_back is not None:  # other modes hand the call on
                frame = frame.f_back
            if not _is_engine(frame) and self._is_own(frame):  # what a probe computes is no condition of the port's
                self._note(frame, name, result.detach(), args)
        return result

    def _is_own(self, frame: FrameType) -> bool:
        code = frame.f_code
        if code not in self._own:
            self._own[code] = is_own(str(frame.f_globals.get("__name__", "")), code.co_filename, self._package)
        return self._own[code]

    def _note(self, frame: FrameType, name: str, result: Tensor, args: tuple[Any, ...]) -> None:
        holds = _outcome(name, result, args)
        if holds is None:
            return
        code, line = frame.f_code, frame.f_lineno
        site = self._sites.setdefault((code, frame.f_lasti), _Site(code, line, name))
        site.numbers.update(_constants(args))
        if not site.complete:
            site.true = site.true or bool(holds.any())
            site.false = site.false or not bool(holds.all())


def constants_of(module: nn.Module) -> tuple[int, ...]:
    """Return the integers in a port's own code, in globals that it names, and in attributes of its modules.

    One of them may be the id of a token that gets special treatment in a line that no batch has reached so far.
    """
    package = type(module).__module__.partition(".")[0]
    classes = dict.fromkeys(class_ for part in module.modules() for class_ in type(part).__mro__)
    codes: dict[CodeType, Mapping[str, Any]] = {}
    for class_ in classes:
        if class_.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        python_module = sys.modules.get(class_.__module__)
        for member in (*vars(class_).values(), *(vars(python_module).values() if python_module is not None else ())):
            function = users_attribute(member, "__func__", users_attribute(member, "fget", member))
            code = users_attribute(function, "__code__")
            if isinstance(code, CodeType) and is_own(class_.__module__, code.co_filename, package):
                codes[code] = getattr(function, "__globals__", {})
    constants: dict[int, None] = {}
    for code, names in codes.items():
        for inner in nested_code(code):
            constants |= dict.fromkeys(_integers([*inner.co_consts, *(names.get(name) for name in inner.co_names)]))
    for part in (*module.modules(), *classes):
        if getattr(part, "__module__", "").partition(".")[0] not in ("torch", "builtins"):
            constants |= dict.fromkeys(
                _integers([value for name, value in vars(part).items() if not name.startswith("_")])
            )
    return tuple(constants)


def _integers(values: Iterable[object]) -> Iterator[int]:
    """Yield the integers among values, and in tuples, lists and sets of them."""
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            yield value
        elif isinstance(value, tuple | list | set | frozenset) and len(value) <= MOST_NUMBERS:
            yield from (number for number in value if isinstance(number, int) and not isinstance(number, bool))


def _outcome(name: str, result: Tensor, args: tuple[Any, ...]) -> Tensor | None:
    """Return where a condition holds, or where a clamp changed a value; None for other operations."""
    if name not in _CLAMPS:
        return of_all_rows(result) if result.dtype is torch.bool else None  # else it is a bitwise operation on integers
    value = args[0].detach() if args and isinstance(args[0], Tensor) else None
    if value is None or value.shape != result.shape or value is result or name.endswith("_"):
        return None
    return of_all_rows((value != result) & ~(value.isnan() & result.isnan()))


def of_all_rows(value: Tensor) -> Tensor:
    """A tensor with the axes that ``torch.vmap`` hides; in ``torch.func.grad`` the tensor without its wrapper."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


def _constants(args: tuple[Any, ...]) -> Iterator[int]:
    """Yield the integers among the operands, and in integer tensors that are smaller than another operand."""
    args = tuple(of_all_rows(argument) if isinstance(argument, Tensor) else argument for argument in args)
    largest = max((argument.numel() for argument in args if isinstance(argument, Tensor)), default=0)
    for argument in args:
        if isinstance(argument, int) and not isinstance(argument, bool):
            yield argument
        elif (
            isinstance(argument, Tensor)
            and argument.dtype is torch.long
            and argument.numel() <= min(MOST_NUMBERS, largest - 1)
        ):
            yield from argument.flatten().tolist()


def _is_mode(frame: FrameType) -> bool:
    """Whether a frame is a mode's, which was given the call and hands it on."""
    code, holder = frame.f_code, frame.f_locals.get("self")
    return code.co_name in _HANDED_ON or (_is_engine(frame) and isinstance(holder, FunctionMode | DispatchMode))


_HANDED_ON = frozenset({"__torch_function__", "__torch_dispatch__"})


def _is_engine(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_ENGINE) and not str(frame.f_globals.get("__name__")).startswith(MODELS)

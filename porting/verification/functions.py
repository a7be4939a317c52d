"""A plain function in the place of a reference: numpy, JAX, torch, or anything else that gives arrays."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, PortingError, VerifyError
from porting.frames import users_attribute
from porting.notation.rule import Term
from porting.plan.matching import Matcher
from porting.printable import dtype_name, text_of
from porting.target import signature_parameters
from porting.tracing.running import Clock, Side
from porting.tracing.trace import ARROW, ROOT, Point, select, split
from porting.trials.inputs import USUAL, Case
from porting.verification.recorded_trace import refuse_with_recording, without_rounding
from porting.verification.references import LiveReference, Recorded, Reference, floating

DTYPE = "dtype"
"""An argument of this name is given the dtype of the run."""

ARRAYS, TENSORS = "numpy arrays", "torch tensors"

_X64 = "in JAX: jax.config.update('jax_enable_x64', True)"


def computes(given: object, inputs: Collection[str] = ()) -> bool:
    """Whether what was given computes the reference's values, and does not build a module.

    A class builds one, and so does a function that says so in its annotation.  A function computes when one of its
    parameters has the name of an input; any other callable object, such as what ``jax.jit`` makes, computes as well.

    Args:
        inputs: the names of the inputs; the usual ones of transformers count as well.

    >>> computes(lambda input_ids: input_ids), computes(lambda: nn.Linear(1, 1)), computes(nn.Linear)
    (True, False, False)
    """
    inner = given
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(given, nn.Module) or isinstance(inner, type) or not callable(given):
        return False
    if not isinstance(inner, FunctionType | MethodType | BuiltinFunctionType):
        return True
    try:
        made = typing.get_type_hints(inner).get("return")
    except (NameError, TypeError, AttributeError, SyntaxError):  # an annotation may name what is not there at run time
        made = None
    if isinstance(made, type) and issubclass(made, nn.Module):
        return False
    parameters = signature_parameters(given)
    if parameters.keys() & ({*inputs, *USUAL} - {"config"}):
        return True
    required = [one for name, one in parameters.items() if one.default is one.empty and name != DTYPE]
    if required and all(one.kind is one.VAR_KEYWORD for one in required):
        return True
    by_place = [name for name in inputs if name.isdigit()]
    return bool(by_place) and len(required) == len(by_place) and "config" not in parameters


class FunctionModule(nn.Module):
    """A function as a module: tensors in, tensors out, whatever the function itself is written in.

    Args:
        function: takes the inputs by name, and ``dtype`` if it has such a parameter; returns an array, a tuple, or a
            dict of arrays by name.
    """

    precision: Tensor

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.register_buffer("precision", torch.zeros((), dtype=torch.float64), persistent=False)  # it is cast along
        self._held = _Held(function)

    @property
    def title(self) -> str:
        """The reference's name in reports."""
        return self._held.title

    def forward(self, *places: Tensor, **names: Tensor) -> object:
        """Call the function: its values as tensors."""
        taken = {name: one for name, one in names.items() if self._takes(name)}
        required = [name for name, one in self._held.parameters.items() if one.default is one.empty and name != DTYPE]
        if not taken and not places and len(required) == len(names) == 1:  # one input: whatever either calls it
            return self._held.call(tuple(names.values()), {}, self.precision.dtype)
        return self._held.call(places, taken, self.precision.dtype)

    def _takes(self, name: str) -> bool:
        """Whether the function has a parameter of this name, or takes an argument of any name."""
        parameters = self._held.parameters
        any_name = not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return name in parameters or any_name


@dataclass
class _Held:
    """The function itself, which all copies of the module share, and how it wants its arguments."""

    function: Callable[..., object]
    kinds: tuple[str, ...] = (ARRAYS, TENSORS)
    parameters: Mapping[str, inspect.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parameters = signature_parameters(self.function)

    def __deepcopy__(self, memo: object) -> _Held:
        return self

    @property
    def title(self) -> str:
        inner = self.function
        while isinstance(inner, functools.partial):
            inner = inner.func
        named = inner if hasattr(inner, "__qualname__") else type(inner)
        return f"{named.__module__}.{named.__qualname__}".replace(".<locals>", "").replace("<lambda>", "lambda")

    def call(self, places: Sequence[Tensor], names: Mapping[str, Tensor], dtype: torch.dtype) -> object:
        """The function's values; it is given numpy arrays, or tensors if it can do nothing with those."""
        failures = []
        for kind in self.kinds:
            convert = _array if kind is ARRAYS else _same
            given: dict[str, Any] = {name: convert(one) for name, one in names.items()}
            if DTYPE in self.parameters and DTYPE not in names:
                given[DTYPE] = _numpy(dtype) if kind is ARRAYS else dtype
            try:
                values = self.function(*(convert(one) for one in places), **given)
            except Exception as error:  # noqa: BLE001  # the user's own function may raise anything
                failures.append((kind, error))
                continue
            self.kinds = (kind,)
            return _tensors(values)
        if len(failures) == 1:
            raise failures[0][1]
        said = "; ".join(f"given {kind}, {type(error).__name__}: {_line(error)}" for kind, error in failures)
        raise TypeError(said) from failures[0][1]


@dataclass
class LivingFunction(LiveReference):
    """A function that is run here.

    Attributes:
        own: those of them that are not other names of others.
        exact: what it gave then, in float64.
    """

    names: tuple[Point, ...] = ()
    own: tuple[Point, ...] = ()
    first: Case = Case("", {})  # noqa: RUF009  # it is frozen
    exact: Mapping[Point, Tensor] = field(default_factory=dict)

    @classmethod
    def around(cls, function: Callable[..., object], case: Case) -> LivingFunction:
        """The function, tried on one batch.

        Args:
            case: a batch, as the reference takes it.

        Raises:
            VerifyError: it fails, gives no arrays, or does not compute in float64.
        """
        module = FunctionModule(function)
        found = cls(module, module.title)
        returned = found._made(torch.float64, [case], (), Clock()).outputs(0)
        values = named_values(returned)
        found.names, found.own = (*values, *aliases(values, returned)), tuple(values)
        found.first, found.exact = case, values
        low = {name: one.dtype for name, one in values.items() if one.is_floating_point() and one.dtype.itemsize < 8}
        if low:
            name, dtype = next(iter(low.items()))
            message = f"{module.title} gives {name!r} in {dtype_name(dtype)} where float64 was asked for"
            hint = f"hold its weights in float64, or compute in the dtype that an argument {DTYPE!r} is given; {_X64}"
            raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint=hint))
        if not values:
            message = f"{module.title} gives no array that could be compared"
            raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message))
        return found

    def computes_in(self, dtype: torch.dtype) -> bool:
        """Whether it computes in that dtype when it is asked to.

        Raises:
            VerifyError: it computes something else in float64 from then on.
        """
        try:
            values = self._values(dtype).values()
        except PortingError:
            return False
        again = self._values(torch.float64)
        if any(not torch.equal(one, again[name]) for name, one in self.exact.items()):
            message = f"{self.title} gives other values in float64 since it was run in {dtype_name(dtype)}"
            hint = "it must leave its weights as they are: model.to(dtype) changes them, use deepcopy(model).to(dtype)"
            raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint=hint))
        return all(one.dtype == dtype for one in values if one.is_floating_point())

    def _values(self, dtype: torch.dtype) -> dict[Point, Tensor]:
        return named_values(self._made(dtype, [self.first], (), Clock()).outputs(0))

    def points(self, terms: Iterable[Term], prefix: str) -> list[Point]:
        """The points of this side that the terms name."""
        matcher = Matcher(((term.key, term) for term in terms), prefix)
        return [name for name in self.names if matcher.read(name)]

    def taken(self, case: Case) -> Case:
        """The case as it is: the port may take more than the function, which is given what it has parameters for."""
        return case

    def keep(self, dtype: torch.dtype) -> None:
        """Nothing: it holds its weights itself."""

    def side(self, dtype: torch.dtype, terms: Iterable[Term], prefix: str, cases: Sequence[Case], clock: Clock) -> Side:
        """The function in a dtype, ready to be run."""
        return self._made(dtype, cases, self.points(terms, prefix), clock)

    def _made(self, dtype: torch.dtype, cases: Sequence[Case], wanted: Sequence[Point], clock: Clock) -> FunctionSide:
        module = FunctionModule(typing.cast("FunctionModule", self.module)._held.function).to(dtype)
        module._held = typing.cast("FunctionModule", self.module)._held
        return FunctionSide(
            title=f"the reference {self.title}",
            module=module,
            arguments=[floating(self.taken(case).inputs, dtype) for case in cases],
            wanted=wanted,
            clock=clock,
        )


@dataclass(kw_only=True)
class FunctionSide(Side):
    """Shows what a function returns as if modules had computed it."""

    renames: bool = True

    def values(self, case: int, *, isolated: bool) -> Iterable[tuple[Point, Tensor]]:
        """The function's values; none of an isolated pass, since values inside it cannot be replaced."""
        if isolated:
            return ()
        returned = self.outputs(case)
        values = named_values(returned)
        return {**values, **aliases(values, returned)}.items()

    def returned(self, case: int) -> dict[str, Tensor]:
        """The outputs of the whole model by name or place; a lone one has no name.

        A function gives these and what its parts compute in one dict: what the table compares by a name of its own is
        such a part.

        Raises:
            VerifyError: it fails.
        """
        values = named_values(self.outputs(case))
        parts = {split(name)[0] for name in self.wanted if not name.startswith(ROOT)}
        return {name.removeprefix(ROOT).removeprefix(ARROW): one for name, one in values.items() if name not in parts}


def has_parts(reference: Reference | None) -> TypeGuard[LiveReference]:
    """Whether a reference is a module that is run here, whose parts and parameters can be looked at."""
    return isinstance(reference, LiveReference) and not isinstance(reference, LivingFunction)


def possible(
    reference: Reference | None,
    dtypes: Sequence[torch.dtype],
    inputs: Sequence[Case] | None,
    *,
    gradients: bool,
    autocast: bool = False,
) -> tuple[list[torch.dtype], list[str]]:
    """Return the dtypes, and warnings, for a reference that is not a module.

    Args:
        reference: the reference; None for the checkpoint in transformers.
        autocast: whether a run under autocast is wanted.

    Returns:
        The working dtypes that the reference was run in or can be run in, and what is lost by the others, in words.

    Raises:
        VerifyError: it cannot give what is wanted.
    """
    if autocast and reference is not None and not has_parts(reference):
        message = f"autocast needs a reference that is a torch.nn.Module, and {reference.title} is none"
        hint = "pass the module itself as the reference, or leave autocast out"
        raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint=hint))
    if isinstance(reference, Recorded):
        refuse_with_recording(reference.recording, inputs, gradients=gradients)
        known, why = reference.recording.dtypes, "was not recorded"
    elif isinstance(reference, LivingFunction):
        known, why = tuple(one for one in dtypes if reference.computes_in(one)), "does not compute"
        if gradients:
            message = f"gradients and training need a reference with parameters, and {reference.title} is a function"
            hint = "pass the torch.nn.Module itself as the reference, or leave gradients and training out"
            raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint=hint))
    else:
        return list(dtypes), []
    return [one for one in dtypes if one in known], [without_rounding(one, why) for one in dtypes if one not in known]


def named_values(returned: object) -> dict[Point, Tensor]:
    """The points of a returned value: the names of a dict, the places of a tuple, or the value itself.

    >>> list(named_values({"encoder.0": torch.ones(1), "logits": torch.ones(1)}))
    ['encoder.0', 'logits']
    >>> list(named_values((torch.ones(1), torch.ones(1)))), list(named_values(torch.ones(1)))
    (['. -> 0', '. -> 1'], ['.'])
    """
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple):
        return {f"{ROOT}{ARROW}{place}": one for place, one in enumerate(returned)}
    return {ROOT: returned} if isinstance(returned, Tensor) else {}


def aliases(values: Mapping[Point, Tensor], returned: object) -> dict[Point, Tensor]:
    """Other names under which a table may speak of these: as outputs of the whole model, and the first for the whole.

    >>> list(aliases({"logits": torch.ones(1)}, {"logits": torch.ones(1)}))
    ['. -> logits', '.']
    """
    found = {f"{ROOT}{ARROW}{name}": one for name, one in values.items() if ARROW not in name and name != ROOT}
    first = select(returned, "")
    return found if first is None or ROOT in values else {**found, ROOT: first}


def _tensors(values: object) -> object:
    """Convert a function's result to a tensor, a tuple of tensors or a dict of tensors."""
    if isinstance(values, Mapping):
        return _flat(values)
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return _flat({one.name: getattr(values, one.name) for one in dataclasses.fields(values)})
    if (as_dict := users_attribute(values, "_asdict")) is not None:
        return _flat(as_dict())
    if isinstance(values, tuple | list):
        return tuple(_tensor(one, f"output {place}") for place, one in enumerate(values) if one is not None)
    return _tensor(values, "what it returned")


def _flat(values: Mapping[Any, object], prefix: str = "") -> dict[str, Tensor]:
    """Dicts in dicts as one, their names joined by a dot; what is None is left out."""
    found: dict[str, Tensor] = {}
    for key, one in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(one, Mapping):
            found |= _flat(one, name)
        elif one is not None:
            found[name] = _tensor(one, repr(name))
    return found


def _tensor(value: object, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if users_attribute(value, "__array__") is None and not isinstance(value, int | float):
        message = f"{what} is of type {type(value).__name__}, expected an array, a tuple or a dict of arrays"
        raise TypeError(message)
    array = np.array(value)  # a copy that can be written to: torch warns of others
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().cpu().contiguous().view(torch.int16).numpy().view(_numpy(torch.bfloat16))
    return tensor.detach().cpu().numpy().copy()


def _same(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _numpy(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of numpy; bfloat16 is known once JAX, or ml_dtypes by itself, has been imported."""
    return np.dtype(dtype_name(dtype))


def _line(error: Exception) -> str:
    return text_of(error).strip().partition("\n")[0]

"""The references a port is compared with: a model that runs here, or a recorded trace."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.notation.rule import Term
from porting.notation.table import Table
from porting.plan.matching import Matcher
from porting.target import in_eval_mode, named_tensors
from porting.tracing.lazy_weights import with_lazy_weights
from porting.tracing.plain_state import PlainState, versions
from porting.tracing.running import Clock, Side
from porting.tracing.trace import ARROW, ROOT, Point, is_returned, points, split
from porting.trials.inputs import Case, for_port
from porting.trials.modalities import DECODER, IDS
from porting.verification.recorded_trace import Recording
from porting.verification.subject import cast, widest

_ASKED = {"output_hidden_states": "hidden_states", "output_attentions": "attentions"}
"""Fields of transformers' configs that have a model return more, and how the names of what it returns end."""


@dataclass
class LiveReference:
    """A model that is run here."""

    module: nn.Module
    title: str

    def __post_init__(self) -> None:
        self._before = PlainState(self.module)
        if IDS in inspect.signature(self.module.forward).parameters:
            self._settle()

    def _settle(self) -> None:
        """Run the model once, before it is copied: its first call may change weights in place, as RWKV's does."""
        before, training = versions(self.module), self.module.training
        if any(one.is_meta for one in self.module.parameters()):
            return
        arguments = [{IDS: torch.ones(1, 2).long()}]
        side = Side(title="the reference", module=in_eval_mode(self.module), arguments=arguments, wanted=())
        with suppress(VerifyError):  # one that needs more than tokens
            side.outputs(0)
        self.module.train(training)
        if versions(self.module) == before:
            self.as_loaded(self.module)
        else:
            self._before = PlainState(self.module)

    def as_loaded(self, module: nn.Module) -> nn.Module:
        """A copy of the model, without what its calls left in its settings."""
        self._before.restore(module)
        return module

    @classmethod
    def of(cls, module: nn.Module, title: str = "") -> LiveReference:
        """A copy of the user's own, in float64."""
        copied = cast(module, torch.float64)
        for tensor in {id(one): one for one in copied.parameters()}.values():
            tensor.data = tensor.data.clone()
        return cls(copied, title or f"{type(module).__module__}.{type(module).__qualname__}")

    def points(self, terms: Iterable[Term], prefix: str) -> list[Point]:
        """The points of this side that the terms name."""
        return points(terms, self.module, prefix)

    def taken(self, case: Case) -> Case:
        """The case with the arguments that the model's forward has.

        What an encoder alone has no argument for, such as a decoder's tokens, is none of its further keywords either.
        """
        parameters = inspect.signature(self.module.forward).parameters
        names = frozenset(parameters)
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            known = any(name in parameters for name in case.inputs)
            decodes = any(name.startswith(DECODER) for name in parameters)
            if not known or decodes:
                return Case(case.name, case.inputs, names)
            kept = {name: one for name, one in case.inputs.items() if not name.startswith(DECODER)}
            return Case(case.name, kept, names)
        kept = {name: one for name, one in case.inputs.items() if name in parameters or name.isdigit()}
        return Case(case.name, kept, names)

    def known(self, case: Case) -> Case:
        """The case as it is, with the names of all arguments that the model's forward has."""
        return Case(case.name, case.inputs, frozenset(inspect.signature(self.module.forward).parameters))

    def asked_for(self, names: Collection[str]) -> tuple[str, ...]:
        """Have the model return its hidden states or attentions too, where a port returns them by the same names.

        Args:
            names: of what the port returns, ``hidden_states.0``.

        Returns:
            The fields of its config that were changed, for :meth:`not_asked`.
        """
        config = getattr(self.module, "config", None)
        roots = {name.partition(".")[0] for name in names}
        flags = [flag for flag, word in _ASKED.items() if any(root.endswith(word) for root in roots)]
        changed = []
        for flag in (one for one in flags if getattr(config, one, True) is False):
            with suppress(ValueError):  # fused attention, which a user's own reference may have, has none to show
                self._configure(flag, True)
                changed.append(flag)
        return tuple(changed)

    def not_asked(self, flags: Collection[str]) -> None:
        """Take back what :meth:`asked_for` did."""
        for flag in flags:
            self._configure(flag, False)

    def _configure(self, field: str, value: bool) -> None:
        """Set a field of the config of the model and its parts, in a copy: the user's own model may have it too."""
        before = self.module.config
        config = copy.copy(before)
        setattr(config, field, value)
        for part in self.module.modules():
            if getattr(part, "config", None) is before:
                vars(part)["config"] = config  # as it was set: no parameter, no module

    def keep(self, dtype: torch.dtype) -> None:
        """Hold the weights in a dtype that holds their values from now on; a constant that it would round stays."""
        rounded = {name: one for name, one in self.module.named_buffers() if not _held(one, dtype)}
        self.module = self.module.to(dtype)
        for name, one in rounded.items():
            path, _, leaf = name.rpartition(".")
            setattr(self.module.get_submodule(path), leaf, one)

    def side(self, dtype: torch.dtype, terms: Iterable[Term], prefix: str, cases: Sequence[Case], clock: Clock) -> Side:
        """The model in a dtype, ready to be run."""
        copied = self.as_loaded(cast(self.module, dtype))
        return self.as_it_is(cases, copied, dtype, wanted=self.points(terms, prefix), clock=clock)

    def as_it_is(
        self,
        cases: Sequence[Case],
        module: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        *,
        wanted: Sequence[Point] = (),
        clock: Clock | None = None,
    ) -> Side:
        """A module that was made already, ready to be run.

        Args:
            module: the model in another dtype; None for :attr:`module` itself.
            dtype: of its weights; None for the one that :attr:`module` is stored in.
        """
        dtype = stored(self.module) if dtype is None else dtype
        return Side(
            title="the reference",
            module=self.module if module is None else module,
            arguments=[floating(self.taken(case).inputs, dtype) for case in cases],
            wanted=wanted,
            clock=clock or Clock(),
        )

    def lean(
        self, dtype: torch.dtype, terms: Iterable[Term], prefix: str, cases: Sequence[Case], clock: Clock
    ) -> Side | None:
        """The model in a dtype without a copy of its weights in it: each is cast where an operation needs it.

        Returns:
            The side; None where a copy would be small, and for weights that are of that dtype already.
        """
        held = [one for one in self.module.parameters() if one.is_floating_point() and one.dtype != dtype]
        if sum(one.numel() for one in held) * dtype.itemsize < LARGE:
            return None
        lazy = with_lazy_weights(self.module, dtype, {id(one): one.detach for one in held})
        return self.as_it_is(cases, lazy, dtype, wanted=self.points(terms, prefix), clock=clock)


LARGE = 256 << 20
"""Bytes of weights from which on a second copy of them in another dtype is worth avoiding."""


@dataclass
class Recorded:
    """A model that was run elsewhere."""

    recording: Recording

    @property
    def title(self) -> str:
        """The reference's name in the report."""
        return f"{self.recording.reference}, recorded in {self.recording.where},"

    def points(self, terms: Iterable[Term], prefix: str) -> list[Point]:
        """The points that were recorded and that the terms name."""
        matcher = Matcher(((term.key, term) for term in terms), prefix)
        return list(dict.fromkeys(name for name in map(_bare, self.recording.points()) if matcher.read(name)))

    def side(self, dtype: torch.dtype, terms: Iterable[Term], prefix: str, cases: Sequence[Case], clock: Clock) -> Side:
        """The trace in a dtype, in the place of a model."""
        return RecordedSide(
            title="the recording",
            module=nn.Module(),
            arguments=[case.inputs for case in cases],
            wanted=self.points(terms, prefix),
            clock=clock,
            recording=self.recording,
            dtype=dtype,
        )


Reference = LiveReference | Recorded


@dataclass(kw_only=True)
class RecordedSide(Side):
    """Shows what was recorded as if it were computed."""

    recording: Recording
    dtype: torch.dtype

    def values(self, case: int, *, isolated: bool) -> Iterator[tuple[Point, Tensor]]:
        """The recorded values, as :meth:`Side.values`; isolated runs are recorded too."""
        return self.recording.trace(self.dtype, case, isolated=isolated)

    def returned(self, case: int) -> dict[str, Tensor]:
        """The recorded outputs, as :meth:`Side.returned`."""
        found: dict[str, Tensor] = {}
        for point, value in self.recording.trace(self.dtype, case):
            path, _, name = _bare(point).partition(ARROW)
            if path == ROOT:
                found[name] = value
        return found

    @property
    def places(self) -> list[Point]:
        """The recorded places, as :attr:`Side.places`."""
        names = dict.fromkeys(map(_bare, self.recording.points()))
        return [name for name in names if not is_returned(name)]


def floating(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs, those of floating-point numbers in ``dtype``."""
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in inputs.items()}


def stored(module: nn.Module) -> torch.dtype:
    """A dtype that holds every floating-point value of a module."""
    return widest(one.dtype for _, one in named_tensors(module))


def _held(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a dtype holds all values of a tensor."""
    return not tensor.is_floating_point() or torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _bare(point: Point) -> Point:
    return split(point)[0]


def port_side(
    module: nn.Module,
    dtype: torch.dtype,
    table: Table,
    cases: Sequence[Case],
    clock: Clock,
    *,
    wanted: Sequence[Point] | None = None,
) -> Side:
    """The port, ready to be run on the cases that the table's [inputs] make for it.

    Args:
        module, dtype, table, cases, clock: the port in that dtype, its table, the batches, and what each pass calls.
        wanted: the points that are looked at, where they are known; else those of all probes are looked up.
    """
    return Side(
        title="the port",
        module=module,
        arguments=[floating(for_port(table.inputs, case.inputs, dtype, case.known), dtype) for case in cases],
        wanted=port_points(module, table) if wanted is None else wanted,
        clock=clock,
    )


def port_points(module: nn.Module, table: Table) -> list[Point]:
    """The points of the port that the table compares."""
    return points((term for rule in table.compared for term in rule.targets), module, table.target_prefix)

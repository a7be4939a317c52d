"""The sides of a comparison: the checkpoint, the table and the reference that a call of ``verify`` means."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from porting.build import OWN_CODE, Bounds, bounds, build
from porting.builder_config import call
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.comparing.digests import digest
from porting.errors import Code, Fault, Message, Option, VerifyError, Wording
from porting.loading import Into
from porting.notation.table import Table
from porting.plan.config import effective
from porting.tables import find_table
from porting.target import unwrapped
from porting.tracing.trace import Point
from porting.trials.inputs import Case
from porting.verification.batches import make_batches
from porting.verification.functions import LivingFunction, computes
from porting.verification.module_checkpoint import HeldWeights
from porting.verification.recorded_trace import Recording, read_recording
from porting.verification.references import LiveReference, Recorded, Reference
from porting.verification.same_names import same_names, same_points, same_weights

Source = str | os.PathLike[str] | Checkpoint | None
Given = nn.Module | Callable[..., object] | str | os.PathLike[str] | None
Inputs = Mapping[str, object] | Sequence[Case | Mapping[str, object]] | None
"""One batch by names, or several; as tensors or as arrays."""


@dataclass(frozen=True, kw_only=True)
class ComparedModels:
    """The models of a verification, and the table between them.

    Attributes:
        checkpoint: the weights that the port is loaded with.
        table: what goes where, and which activations are compared.
        into: what is loaded, as in :func:`porting.verify`.
        reference: what it is compared with; None for the checkpoint in transformers.
        weighed: whether ``checkpoint`` says what the port's weights should be; not so where it is the port itself.
        loaded: whether ``into`` is compared with the weights that it holds.
    """

    checkpoint: Checkpoint
    table: Table
    into: Into
    reference: Reference | None
    weighed: bool = True
    loaded: bool = False


def resolve_models(
    source: Source,
    into: Into,
    table: Table | str | Path | None,
    reference: Given,
    *,
    revision: str | None,
    loaded: bool,
    inputs: Sequence[Case] | None = None,
) -> ComparedModels:
    """Open what was named.

    Args:
        source: where the port's weights are; None for those of the reference, or with ``loaded`` of the port.
        into, table, revision, loaded: as in :func:`porting.verify`.
        reference: a model with its weights, what builds one, a function that computes the reference's values, the file
            of a recorded trace, or None.

    Raises:
        CheckpointError, TableError, TargetError: as :func:`porting.load`.
        VerifyError: what was given does not go together.
    """
    opened = source if isinstance(source, Checkpoint) or source is None else open_checkpoint(source, revision=revision)
    if reference is None:
        if opened is None:
            message = "neither a checkpoint nor a reference was given"
            raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint="pass one of them"))
        return ComparedModels(
            checkpoint=opened,
            table=find_table(table, opened.config, opened.tensors),
            into=into,
            reference=None,
            loaded=loaded,
        )
    if isinstance(reference, str | os.PathLike):
        return _recorded(opened, into, table, Path(reference), loaded=loaded)
    if not isinstance(reference, nn.Module) and computes(reference, names_of(inputs)):
        return _called(opened, into, table, reference, inputs, loaded=loaded)
    return _living(opened, into, table, reference, loaded=loaded)


def _living(
    opened: Checkpoint | None,
    into: Into,
    table: Table | str | Path | None,
    given: nn.Module | Callable[..., object],
    *,
    loaded: bool,
) -> ComparedModels:
    within = OWN_CODE if opened is None else bounds(opened.tensors, opened.config)
    module = built_reference(given, {} if opened is None else opened.config, within)
    title = f"{type(module).__module__}.{type(module).__qualname__}"
    checkpoint = HeldWeights(module, title) if opened is None else opened
    if opened is None and into is not None and not isinstance(into, nn.Module):
        into = _like(into, module, checkpoint)
    if table is not None:
        chosen = find_table(table, checkpoint.config, checkpoint.tensors)
    else:
        chosen = same_names(module, _built(_required(into), module, checkpoint))
    return ComparedModels(
        checkpoint=checkpoint, table=chosen, into=into, reference=LiveReference.of(module, title), loaded=loaded
    )


def built_reference(
    given: nn.Module | Callable[..., object], config: Mapping[str, object], within: Bounds
) -> nn.Module:
    """The module that was given, or that what was given builds.

    Args:
        within: how large the module may become.

    Raises:
        TargetError: the builder asks for what the config does not have, or goes beyond the bounds.
        VerifyError: it builds no module.
    """
    made: object = given
    if not isinstance(given, nn.Module):
        made = call(given, lambda: config, config, within)  # type: ignore[arg-type]  # what it gives is seen below
    if not isinstance(made, nn.Module):
        name = getattr(given, "__name__", type(given).__name__)
        message = f"{name} was called to build the reference, and gave a {type(made).__name__}, not a torch.nn.Module"
        hint = (
            "a function that computes the reference's values has parameters named after the inputs, such as input_ids"
        )
        raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint=hint))
    return unwrapped(made)


def _built(into: nn.Module | Callable[..., nn.Module], module: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    if isinstance(into, nn.Module):
        return unwrapped(into)
    return build(_like(into, module, checkpoint), bounds(checkpoint.tensors, checkpoint.config))


def _like(make: Callable[..., nn.Module], module: nn.Module, checkpoint: Checkpoint) -> Callable[[], nn.Module]:
    """Builds the port with what the reference calls its config, whatever that is."""
    fields = checkpoint.config
    return lambda: call(
        make, lambda: getattr(module, "config", fields), fields, bounds(checkpoint.tensors, checkpoint.config)
    )


def _recorded(
    opened: Checkpoint | None, into: Into, table: Table | str | Path | None, path: Path, *, loaded: bool
) -> ComparedModels:
    recording = read_recording(path)
    reference = Recorded(recording=recording)
    if opened is not None:
        _refuse_other_weights(opened, recording)
        chosen = find_table(table, opened.config, opened.tensors)
        return ComparedModels(checkpoint=opened, table=chosen, into=into, reference=reference, loaded=loaded)
    if into is None:
        message = "a recording holds activations and no weights, and no checkpoint was given"
        hint = Message(
            Wording(
                python="give the checkpoint, or a module that holds its weights",
                command="name the checkpoint, or with --into what builds a module that holds its weights",
            )
        )
        raise VerifyError(Fault(code=Code.BAD_TARGET, where=recording.where, message=message, hint=hint))
    if recording.weights and not loaded:  # the port gets them: it is not a module that holds its own
        checkpoint = HeldWeights(recording.read_weights(), recording.where)
        port = (
            unwrapped(into) if isinstance(into, nn.Module) else build(lambda: call(into, dict, {}, OWN_CODE), OWN_CODE)
        )
        chosen = same_points(recording.points(), port) if table is None else find_table(table, {})
        return ComparedModels(checkpoint=checkpoint, table=chosen, into=into, reference=reference)
    return _by_itself(_itself(into), table, reference, recording.points())


def _called(
    opened: Checkpoint | None,
    into: Into,
    table: Table | str | Path | None,
    function: Callable[..., object],
    inputs: Sequence[Case] | None,
    *,
    loaded: bool,
) -> ComparedModels:
    """A function computes the reference's values; it holds no weights that the port could get."""
    if opened is not None:
        chosen = find_table(table, opened.config, opened.tensors)
        reference = LivingFunction.around(function, _first(chosen, opened, inputs))
        return ComparedModels(checkpoint=opened, table=chosen, into=into, reference=reference, loaded=loaded)
    port = _itself(into)
    held = HeldWeights(port, "the module itself")
    first = _first(same_weights(port) if table is None else find_table(table, held.config), held, inputs)
    reference = LivingFunction.around(function, first)
    return _by_itself(port, table, reference, reference.own)


def _first(table: Table, checkpoint: Checkpoint, inputs: Sequence[Case] | None) -> Case:
    """A small batch to try a function on."""
    config = effective(table, checkpoint.config)
    return make_batches(table, checkpoint, config, inputs, seed=0, longest=4, choices=None).cases[0]


def _itself(into: Into) -> nn.Module:
    """The port with the weights that it holds, or that what builds it gives it."""
    into = _required(into)
    return unwrapped(into if isinstance(into, nn.Module) else call(into, dict, {}, OWN_CODE))


def _required(into: Into) -> nn.Module | Callable[..., nn.Module]:
    """The port, or what builds it, which a reference without a table needs."""
    if into is None:
        message = "there are a reference and nothing that is compared with it"
        raise VerifyError(Fault(code=Code.BAD_TARGET, message=message, hint=Message("say what: ", Option("into"))))
    return into


def _by_itself(
    port: nn.Module, table: Table | str | Path | None, reference: Reference, names: Sequence[Point]
) -> ComparedModels:
    """A port that holds its weights, and a reference that has none to give."""
    if table is None:
        chosen = same_points(names, port)
    else:
        same = same_weights(port)
        chosen = replace(find_table(table, {}), rules=same.rules, drops=same.drops, ties=same.ties, fresh=())
    return ComparedModels(
        checkpoint=HeldWeights(port, "the module itself"),
        table=chosen,
        into=port,
        reference=reference,
        weighed=False,
        loaded=True,
    )


def _refuse_other_weights(opened: Checkpoint, recording: Recording) -> None:
    weights = recording.metadata.get("weights")
    if weights and not isinstance(opened, HeldWeights) and weights != (found := str(digest(opened))):
        message = f"it was recorded from other weights: {weights[:19]}..., and {opened.location} has {found[:19]}..."
        hint = "record it again, or give the checkpoint that was recorded"
        raise VerifyError(Fault(code=Code.BAD_RECORDING, where=recording.where, message=message, hint=hint))


def as_cases(inputs: Inputs) -> Sequence[Case] | None:
    """Batches as cases: one batch by names or a sequence of them, as tensors or as arrays of numpy or JAX.

    What is neither is given back as it is: :func:`porting.verification.batches.make_batches` says what is wrong.

    >>> [sorted(case.inputs) for case in as_cases({"x": np.ones((2, 3)), "mask": np.ones((2, 3), bool)})]
    [['mask', 'x']]
    """
    if isinstance(inputs, Mapping):
        return [_case("the inputs", inputs)]
    several: object = inputs  # whatever was given in their place
    if isinstance(several, list | tuple) and all(isinstance(one, Mapping | Case) for one in several):
        return [one if isinstance(one, Case) else _case(f"batch {number}", one) for number, one in enumerate(several)]
    return inputs  # type: ignore[return-value]  # refused later


def _case(name: str, batch: Mapping[str, object]) -> Case:
    given = {
        str(key): one if isinstance(one, Tensor) else torch.from_numpy(np.array(one)) for key, one in batch.items()
    }
    return Case(name, given)


def names_of(inputs: Sequence[Case] | None) -> list[str]:
    """The arguments that batches name; none where they are not cases."""
    cases = inputs if isinstance(inputs, list | tuple) else ()
    return [name for one in cases if isinstance(one, Case) for name in one.inputs]

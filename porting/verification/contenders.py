"""Who is compared with whom: the checkpoint, the table and the reference that a call of ``verify`` means."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from porting.build import build, call
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.comparing import digest
from porting.errors import Code, Fault, option, told
from porting.loading import Into
from porting.notation.table import Table
from porting.tables import find_table
from porting.target import unwrapped
from porting.tracing.faults import VerifyError
from porting.verification.golden import read_recording
from porting.verification.held import HeldWeights
from porting.verification.references import Living, Recorded, Reference
from porting.verification.same_names import same_names, same_points, same_weights

Source = str | os.PathLike[str] | Checkpoint | None
Given = nn.Module | Callable[..., nn.Module] | str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """What a verification is about.

    Attributes:
        checkpoint: the weights that the port is loaded with.
        table: what goes where, and which activations are compared.
        into: what is loaded, as in :func:`porting.verify`.
        reference: what it is compared with; None for the checkpoint in transformers.
        weighed: whether ``checkpoint`` says what the port's weights should be; not so where it is the port itself.
    """

    checkpoint: Checkpoint
    table: Table
    into: Into
    reference: Reference | None
    weighed: bool = True


def contenders(
    source: Source,
    into: Into,
    table: Table | str | Path | None,
    reference: Given,
    *,
    revision: str | None,
    loaded: bool,
) -> Contenders:
    """Open what was named.

    Args:
        source: where the port's weights are; None for those of the reference, or with ``loaded`` of the port.
        into, table, revision, loaded: as in :func:`porting.verify`.
        reference: a model with its weights, what builds one, the file of a recorded trace, or None.

    Raises:
        CheckpointError, TableError, TargetError: as :func:`porting.load`.
        VerifyError: what was given does not go together.
    """
    opened = source if isinstance(source, Checkpoint) or source is None else open_checkpoint(source, revision=revision)
    if reference is None:
        if opened is None:
            message = "neither a checkpoint nor a reference was given"
            raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint="pass one of them"))
        return Contenders(checkpoint=opened, table=find_table(table, opened.config), into=into, reference=None)
    if isinstance(reference, str | os.PathLike):
        return _recorded(opened, into, table, Path(reference), loaded=loaded)
    return _living(opened, into, table, reference)


def _living(
    opened: Checkpoint | None, into: Into, table: Table | str | Path | None, given: nn.Module | Callable[..., nn.Module]
) -> Contenders:
    config: Mapping[str, object] = opened.config if opened is not None else {}
    module = unwrapped(given if isinstance(given, nn.Module) else call(given, lambda: config, config))
    title = f"{type(module).__module__}.{type(module).__qualname__}"
    checkpoint = HeldWeights(module, title) if opened is None else opened
    if opened is None and into is not None and not isinstance(into, nn.Module):
        into = _like(into, module, checkpoint.config)
    if table is not None:
        chosen = find_table(table, checkpoint.config)
    elif into is None:
        message = "there are a reference and nothing that is compared with it"
        raise VerifyError(Fault(code=Code.BAD_TARGET, message=message, hint=f"say what: {option('into')}"))
    else:
        chosen = same_names(module, _built(into, module, checkpoint.config))
    return Contenders(checkpoint=checkpoint, table=chosen, into=into, reference=Living.of(module, title))


def _built(into: nn.Module | Callable[..., nn.Module], module: nn.Module, fields: Mapping[str, object]) -> nn.Module:
    return unwrapped(into) if isinstance(into, nn.Module) else build(_like(into, module, fields))


def _like(make: Callable[..., nn.Module], module: nn.Module, fields: Mapping[str, object]) -> Callable[[], nn.Module]:
    """Builds the port with what the reference calls its config, whatever that is."""
    return lambda: call(make, lambda: getattr(module, "config", fields), fields)


def _recorded(
    opened: Checkpoint | None, into: Into, table: Table | str | Path | None, path: Path, *, loaded: bool
) -> Contenders:
    recording = read_recording(path)
    if opened is not None:
        weights = recording.metadata.get("weights")
        if weights and not isinstance(opened, HeldWeights) and weights != (found := str(digest(opened))):
            message = (
                f"it was recorded from other weights: {weights[:19]}..., and {opened.location} has {found[:19]}..."
            )
            hint = "record it again, or give the checkpoint that was recorded"
            raise VerifyError(Fault(code=Code.BAD_RECORDING, where=recording.where, message=message, hint=hint))
        chosen = find_table(table, opened.config)
        return Contenders(checkpoint=opened, table=chosen, into=into, reference=Recorded(recording=recording))
    if not loaded or not isinstance(into, nn.Module):
        message = "a recording holds activations and no weights, and no checkpoint was given"
        hint = told(
            called="give the checkpoint, or a module that holds its weights, with loaded=True",
            typed="name the checkpoint, or with --into what builds a module that holds its weights",
        )
        raise VerifyError(Fault(code=Code.BAD_TARGET, where=recording.where, message=message, hint=hint))
    port = unwrapped(into)
    if table is None:
        chosen = same_points(recording.points(), port)
    else:
        named = find_table(table, {})
        same = same_weights(port)
        chosen = replace(named, rules=same.rules, drops=same.drops, ties=same.ties, fresh=())
    return Contenders(
        checkpoint=HeldWeights(port, "the module itself"),
        table=chosen,
        into=into,
        reference=Recorded(recording=recording),
        weighed=False,
    )

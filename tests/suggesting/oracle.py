"""An oracle from outside: the loaded module and transformers' own model in float64, given what the test says."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import porting
from porting.checkpoint import open_checkpoint
from porting.notation.table import Table, parse_table
from porting.suggesting import Suggestion, pipeline
from porting.suggesting.draft.table_draft import draft, onto
from porting.suggesting.draft.table_writer import write
from porting.suggesting.subjects.guarded_run import Deadline, guarded
from porting.suggesting.subjects.model_pair import prepare
from porting.suggesting.subjects.questions import Ask, Asker
from porting.suggesting.subjects.sampler import LENGTH, rows_of
from porting.suggesting.subjects.twin import draw_parameters

BOUND = 1e-10


@dataclass(frozen=True)
class Drafted:
    """A table that was found and not proven."""

    text: str

    @property
    def table(self) -> Table:
        return parse_table(self.text, where="drafted")


def drafted(folder: Path, into: Any, *, architecture: str | None = None, ask: Ask | None = None) -> Drafted:
    """The table that ``suggest`` finds, without its proofs, which take most of its time.

    The tests of the default tier hold it against what a person wrote, or run the module through it; that it is proven,
    and what is reported of it, is held by the slow ones, which run all of ``suggest``.
    """
    asker = Asker(ask)

    def tell(what: str, done: int, total: int) -> None:
        pass

    checkpoint = open_checkpoint(folder)
    kind = pipeline._against(checkpoint, architecture, asker).name
    with guarded(0), rows_of(LENGTH), tempfile.TemporaryDirectory(prefix="porting-drafted-") as twin:
        subjects = prepare(checkpoint, into, kind, Path(twin), seed=0, inputs={}, ask=asker, tell=tell)
        found, inner = pipeline._searched(subjects, 0, pipeline.TRIALS, Deadline(pipeline.LIMIT), tell)
        pipeline.fold(found, asker)
        made, _, _ = draft(subjects, found, "drafted", (), close=bool(found.divergences))
        made = pipeline.with_probes(made, [*made.probes, *inner], found)
        return Drafted(write(onto(made, checkpoint, subjects)))


def source(architecture: str, fields: Mapping[str, object], folder: Path) -> Any:  # one of transformers' models
    """Write a checkpoint with every parameter drawn; the model that it is of."""
    kind: Any = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**fields)).eval()
    draw_parameters(model, 0)
    model.double()
    model.save_pretrained(folder)
    return model


def uncast(reference: Any) -> Any:  # the same model
    """Without the casts to float32 in transformers' norms and softmax, so that float64 is float64."""
    rooted = [part for part in reference.modules() if hasattr(part, "variance_epsilon")]
    rooted = [part for part in rooted if type(part).__name__ != "CohereLayerNorm"]  # it takes off the mean as well
    if rooted:
        reference.set_attn_implementation("sdpa")  # its softmax is not cast
    for part in rooted:
        part.forward = MethodType(_norm, part)
    return reference


def _norm(self: Any, x: Tensor) -> Tensor:
    scaled: Tensor = x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * self.weight
    return scaled


def apart(
    reference: Any,
    folder: Path,
    build: Callable[..., nn.Module] | nn.Module,
    found: Suggestion | Drafted,
    theirs: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    kept: Tensor | None = None,
) -> float:
    """How far the loaded module's first output is from the reference's, of its scale, at words that are not padding.

    ``kept`` says where, [b t], if the words of the output are not those of the attention mask.
    """
    loaded = porting.load(folder, build, found.table).double().eval()
    with torch.no_grad():
        expected = uncast(reference)(**theirs)[0]
        given = loaded(**ours)
    first = given[0] if isinstance(given, tuple) else given
    if kept is None:
        kept = theirs["attention_mask"].bool() if "attention_mask" in theirs else torch.ones(first.shape[:2]).bool()
    return float((first - expected)[kept].abs().max() / expected[kept].abs().max())

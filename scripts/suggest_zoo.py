"""``porting suggest`` on generated variants: how often the table, the verdict and the reason are right.

    python -m scripts.suggest_zoo 300               # seeds 0 to 299
    python -m scripts.suggest_zoo 300 --shard 0/4   # every fourth of them, the first part
    python -m scripts.suggest_zoo --seed 17         # one, with its table

The first number is that of false proofs: a table that is called proven and is not right.  It is counted without what
the library itself found out: the module is loaded through the table, given its arguments as the draw says and not as
the table does, and compared with transformers on padded rows in float64.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import nn

import porting
from porting.errors import PortingError
from porting.suggesting import Suggestion, suggest
from porting.suggesting.building import build_for
from porting.suggesting.twin import draw
from tests.suggesting.oracle import uncast
from tests.suggesting.styles import Style, drawn
from tests.suggesting.variants import builder, told

BOUND = 1e-10
"""The variant and the reference agree to this in float64, relative to the activation's scale."""


@dataclass(frozen=True)
class Outcome:
    """What came of a variant.

    Attributes:
        style: it.
        found: the suggestion; None when it was refused.
        said: the reasons, or the refusal.
        difference: of the loaded module, told as the draw says; None where nothing was proven.
        tensors: how many of its tensors were given a source, of how many.
        seconds: it took.
    """

    style: Style
    found: Suggestion | None
    said: str
    difference: float | None
    tensors: tuple[int, int]
    seconds: float

    @property
    def false_proof(self) -> bool:
        """Whether something is called proven and is not so."""
        return self.found is not None and self.found.proven and (bool(self.style.flaw) or not self._agrees)

    @property
    def _agrees(self) -> bool:
        return self.difference is not None and self.difference <= BOUND

    @property
    def verdict(self) -> bool:
        """Whether the verdict is right."""
        return self.found is not None and self.found.verdict is self.style.expected[0]

    @property
    def reason(self) -> bool:
        """Whether the reason is right; a variant without a flaw needs none."""
        return self.verdict and self.style.expected[1] in self.said


def source(style: Style, folder: Path) -> Any:  # one of transformers' models
    """Write the family's checkpoint, every parameter drawn; the model."""
    kind: Any = getattr(transformers, style.family.architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**style.family.fields)).eval()
    draw(model, 0)
    model.double()  # so that what a table sums is not rounded
    model.save_pretrained(folder)
    return model


def tried(style: Style) -> Outcome:
    """Suggest a table for a variant and see whether it is right."""
    with tempfile.TemporaryDirectory(prefix="porting-variant-") as place:
        folder = Path(place)
        reference = source(style, folder)
        build = builder(style)
        begun = time.monotonic()
        try:
            found = suggest(folder, build, limit=60)
        except PortingError as error:
            return Outcome(style, None, str(error), None, (0, 1), time.monotonic() - begun)
        seconds = time.monotonic() - begun
        said = " | ".join([*(f"{one.kind}: {one.said}" for one in found.reasons), *found.missing])
        loaded = _loaded(folder, build, found, style)
        difference = None if loaded is None or not found.proven else _difference(style, reference, loaded)
        return Outcome(style, found, said, difference, _placed(found, loaded), seconds)


def _loaded(folder: Path, build: Any, found: Suggestion, style: Style) -> nn.Module | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", porting.PortingWarning)  # a table may say that it is approximate
        try:
            into = _run_once(build_for(build, source_config(folder)).module, style) if style.lazy else build
            return porting.load(folder, into, found.table)
        except PortingError:
            return None


def source_config(folder: Path) -> Mapping[str, object]:
    """The checkpoint's config."""
    return porting.open_checkpoint(folder).config


def _run_once(module: nn.Module, style: Style) -> nn.Module:
    """The module, its lazy parameters in shape."""
    ids = torch.arange(12).reshape(2, 6)
    module(**told(style, ids, torch.ones(2, 6, dtype=torch.bool), torch.zeros_like(ids)))
    return module.double()


def _placed(found: Suggestion, loaded: nn.Module | None) -> tuple[int, int]:
    record = None if loaded is None else porting.provenance(loaded)
    if loaded is None or record is None:
        return 0, 1
    written = {name for step in record.plan.steps for name in step.targets}
    return len(written), len(record.plan.targets)


def _difference(style: Style, reference: Any, loaded: nn.Module) -> float:
    """The largest difference at words that are no padding, relative to scale, in float64."""
    generator = torch.Generator().manual_seed(style.seed)
    length = 24
    ids = torch.randint(3, 107, (4, length), generator=generator)
    keep = torch.arange(length) < torch.tensor([[24], [17], [9], [4]])
    kinds = torch.randint(0, 2, (4, length), generator=generator) if style.family.segments else torch.zeros_like(ids)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": keep.long()}
    if style.family.segments:
        given["token_type_ids"] = kinds
    with torch.no_grad():
        theirs = uncast(reference.double())(**given)[0]
        ours = loaded.double().eval()(**told(style, ids, keep, kinds))
    if style.first == "sequence":
        ours = ours.transpose(0, 1)
    if style.turned:
        theirs = theirs.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return float((ours - theirs)[keep].abs().max() / theirs[keep].abs().max())


def report(outcomes: list[Outcome]) -> Iterator[str]:
    """The figures, in lines."""
    count = len(outcomes)
    false = [one.style.seed for one in outcomes if one.false_proof]
    yield f"{count} variants, {len({one.style.family.architecture for one in outcomes})} families"
    yield f"false proofs: {len(false)} {false or ''}".rstrip()
    for title, some in (
        ("without a flaw", [one for one in outcomes if not one.style.flaw]),
        ("with a flaw", [one for one in outcomes if one.style.flaw]),
    ):
        if some:
            right, reasons = sum(one.verdict for one in some), sum(one.reason for one in some)
            placed, places = (sum(one.tensors[at] for one in some) for at in (0, 1))
            yield (
                f"{title}: {len(some)}; verdict right {right} ({right / len(some):.1%}), reason right {reasons} "
                f"({reasons / len(some):.1%}), tensors placed {placed} of {places} ({placed / max(places, 1):.1%})"
            )
    for flaw, number in sorted(Counter(one.style.flaw for one in outcomes if one.style.flaw).items()):
        right = sum(one.verdict for one in outcomes if one.style.flaw == flaw)
        yield f"    {flaw}: {right} of {number}"
    seconds = sorted(one.seconds for one in outcomes)
    yield f"seconds: median {seconds[count // 2]:.1f}, most {seconds[-1]:.1f}"


def main(
    count: Annotated[int, typer.Argument(help="how many seeds, from 0")] = 300,
    shard: Annotated[str, typer.Option("--shard", help="PART/PARTS")] = "0/1",
    seed: Annotated[int | None, typer.Option("--seed", help="this one only, and show its table")] = None,
) -> None:
    """Try the variants and print the figures."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not type it
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # as above
    torch.set_num_threads(1)
    part, parts = (int(one) for one in shard.split("/"))
    outcomes = []
    for number in [seed] if seed is not None else range(part, count, parts):
        one = tried(drawn(number))
        outcomes.append(one)
        if seed is not None:
            print(one.style)
            print(one.found.text if one.found is not None else one.said)
        if not one.verdict or one.false_proof or not one.reason:
            state = "FALSE PROOF" if one.false_proof else "wrong"
            verdict = "refused" if one.found is None else str(one.found.verdict)
            style = one.style
            drawn_so = (style.family.architecture, style.qkv, style.tables, style.grouping, style.mask, style.config)
            expected = f"{style.expected[0]} ({style.flaw or 'no flaw'}; {' '.join(drawn_so)})"
            print(f"{state} {number}: {verdict}, not {expected}", flush=True)
            print(f"    {one.said[:400]}")
    print("\n".join(report(outcomes)))


if __name__ == "__main__":
    typer.run(main)

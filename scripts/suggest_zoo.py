"""``porting suggest`` on generated variants: how often the table, the verdict and the reason are right.

    python -m scripts.suggest_zoo 300 --jobs 2      # seeds 0 to 299, in two processes
    python -m scripts.suggest_zoo 20 --first 100    # seeds 100 to 119
    python -m scripts.suggest_zoo --seed 17         # one, with its table

The first number is that of false proofs: a table that is called proven and is not right.  It is counted without what
the library itself found out: the module is loaded through the table, given its arguments as the draw says and not as
the table does, and compared with transformers on padded rows in float64.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import nn

import porting
from porting.errors import PortingError
from porting.suggesting import Suggestion, suggest
from porting.suggesting.subjects.building import build_for
from porting.suggesting.subjects.twin import draw_parameters
from tests.suggesting.oracle import uncast
from tests.suggesting.styles import Style, drawn
from tests.suggesting.variants import builder, told

ROUNDED = 1e-5
"""And to this, where it computes in float32."""

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
        """Whether something is called proven and is not so.

        What is only rounded otherwise, or lacks a part, is proven rightly; it is held to the verdict.
        """
        if self.found is None or not self.found.proven:
            return False
        part = self.style.flaw == "no last norm"  # what is returned is another activation
        return self.found.verdict not in self.style.expected[0] or not (part or self._agrees)

    @property
    def _agrees(self) -> bool:
        bound = ROUNDED if self.style.flaw == "float32 inside" else BOUND
        return self.difference is not None and self.difference <= bound

    @property
    def came(self) -> str:
        """The verdict, in a word."""
        return "refused" if self.found is None else str(self.found.verdict)

    @property
    def wanted(self) -> str:
        """What would have been right, in words."""
        verdicts, about = self.style.expected
        named = " or ".join(sorted(map(str, verdicts))) or "refused"
        return f"{named}{f' for {about!r}' if about else ''}"

    @property
    def verdict(self) -> bool:
        """Whether the verdict is right."""
        return self.came in (set(map(str, self.style.expected[0])) or {"refused"})

    @property
    def reason(self) -> bool:
        """Whether the reason is right; a variant without a flaw needs none, nor one that a table takes in."""
        proven = self.found is not None and self.found.proven and self._agrees
        return self.verdict and (proven or self.style.expected[1] in self.said)

    @property
    def placed(self) -> bool:
        """Whether each of its tensors has a source without an edit."""
        return self.tensors[0] == self.tensors[1]


def source(style: Style, folder: Path) -> Any:  # one of transformers' models
    """Write the family's checkpoint, every parameter drawn; the model."""
    kind: Any = getattr(transformers, style.family.architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**style.family.fields)).eval()
    draw_parameters(model, 0)
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
        said = " | ".join([*(f"{reason.kind}: {reason.said}" for reason in found.reasons), *found.missing])
        loaded = _loaded(folder, build, found, style)
        difference = None if loaded is None or not found.proven else difference_from(style, reference, loaded)
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
    if style.family.pixels:
        ids = torch.zeros(2, 3, 12, 12)
    module(**told(style, ids, torch.ones(2, 6, dtype=torch.bool), torch.zeros(2, 6, dtype=torch.long)))
    return module.double()


def _placed(found: Suggestion, loaded: nn.Module | None) -> tuple[int, int]:
    record = None if loaded is None else porting.provenance(loaded)
    if loaded is None or record is None:
        return 0, 1
    written = {name for step in record.plan.steps for name in step.targets}
    return len(written), len(record.plan.targets)


def difference_from(style: Style, reference: Any, loaded: nn.Module) -> float:
    """The largest difference at words that are not padding, relative to scale, in float64."""
    generator = torch.Generator().manual_seed(style.seed)
    if style.family.pixels:
        images = torch.randn(4, 3, 12, 12, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            theirs, ours = reference.double()(images)[0], loaded.double().eval()(images)
        return float((ours - theirs).abs().max() / theirs.abs().max())
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


@dataclass(frozen=True)
class Line:
    """One variant's part of the figures, which another process can hand over.

    Attributes:
        seed, family, flaw: it.
        false, verdict, reason, placed: whether it is a false proof; what is right.
        seconds: it took.
        said: what is to be told of it, where something is wrong.
    """

    seed: int
    family: str
    flaw: str
    false: bool
    verdict: bool
    reason: bool
    placed: bool
    seconds: float
    said: str = ""


def line(one: Outcome) -> Line:
    """The figures of an outcome."""
    style = one.style
    said = ""
    if one.false_proof or not one.reason:
        drawn_so = [style.qkv, style.matrices, style.norms, style.tables, style.grouping, style.mask, style.pairs]
        drawn_so += ["lazy"] if style.lazy else []
        name, state = style.family.architecture, "FALSE PROOF" if one.false_proof else "wrong"
        said = (
            f"{state} {style.seed}: {name}, {style.flaw or 'no flaw'} ({' '.join(drawn_so)})\n"
            f"    expected {one.wanted}\n    came     {one.came}: {one.said[:400]}"
        )
    return Line(
        seed=style.seed,
        family=style.family.architecture,
        flaw=style.flaw,
        false=one.false_proof,
        verdict=one.verdict,
        reason=one.reason,
        placed=one.placed or bool(style.flaw),
        seconds=one.seconds,
        said=said,
    )


def report(lines: Sequence[Line]) -> Iterator[str]:
    """The figures as the tables that docs/measured.md has."""
    whole, flawed = [one for one in lines if not one.flaw], [one for one in lines if one.flaw]
    yield f"{len(lines)} variants, seeds {min(one.seed for one in lines)} to {max(one.seed for one in lines)}"
    yield f"false proofs: {[one.seed for one in lines if one.false] or 0}"
    columns = "false proofs | verdict right | reason right | all tensors right | seconds, median | most"
    yield ""
    yield f"| family, without a flaw | variants | {columns} |"
    yield "|---|---|---|---|---|---|---|---|"
    for name in sorted({one.family for one in whole}):
        yield _row(name, [one for one in whole if one.family == name])
    if whole:
        yield _row("all", whole)
    yield ""
    yield f"| flaw | variants | {columns.replace('all tensors right | ', '')} |"
    yield "|---|---|---|---|---|---|---|"
    for name in sorted({one.flaw for one in flawed}):
        yield _row(name, [one for one in flawed if one.flaw == name], placed=False)
    if flawed:
        yield _row("all", flawed, placed=False)


def _row(name: str, some: Sequence[Line], *, placed: bool = True) -> str:
    count = len(some)

    def share(right: int) -> str:
        return str(right) if right == count else f"{right} ({right / count:.1%})"

    seconds = sorted(one.seconds for one in some)
    cells = [name, str(count), f"**{sum(one.false for one in some)}**"]
    cells += [share(sum(one.verdict for one in some)), share(sum(one.reason for one in some))]
    cells += [share(sum(one.placed for one in some))] if placed else []
    cells += [f"{seconds[count // 2]:.1f}", f"{seconds[-1]:.1f}"]
    return f"| {' | '.join(cells)} |"


def _begin() -> None:
    """Make a process quiet, and of one thread."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not type it
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # as above
    torch.set_num_threads(1)


def _of(seed: int) -> Line:
    return line(tried(drawn(seed)))


def main(
    count: Annotated[int, typer.Argument(help="how many seeds")] = 300,
    first: Annotated[int, typer.Option("--first", help="the first of them")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", help="processes")] = 1,
    seed: Annotated[int | None, typer.Option("--seed", help="this one only, and show its table")] = None,
) -> None:
    """Try the variants and print the figures."""
    _begin()
    if seed is not None:
        one = tried(drawn(seed))
        print(one.style)
        print(one.found.text if one.found is not None else one.said)
        print(line(one).said or "right")
        return
    seeds = range(first, first + count)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin) as pool:
        lines = []
        for one_line in pool.map(_of, seeds) if jobs > 1 else map(_of, seeds):
            lines.append(one_line)
            if one_line.said:
                print(one_line.said, flush=True)
    print("\n".join(report(lines)))


if __name__ == "__main__":
    typer.run(main)

"""``porting suggest`` on models that it was not developed with: a list that its caller writes, run and scored.

    make first-contact ARGS="list.py"                     # every model of a list
    make first-contact ARGS="list.py --only minGPT"       # some
    make first-contact ARGS="list.py --json scores.json"

A list is a Python file with ``MODELS``, which maps names to :class:`Model`.  Write it before the first run: what is
right is decided by reading the model's code, and the first run is the figure to report.  Nothing is downloaded except
the repositories that the list names, with git, into the folder beside it.
"""

from __future__ import annotations

import json
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from torch import nn

import porting
from porting.errors import PortingError
from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects.twin import draw_parameters

FALSE = 1e-6
"""A filled module that is so far from the reference, of the largest value, is no proven one."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A public model, how it is handed over, and what is right to say of it.

    Attributes:
        repository: where git clones it from; empty where the folder is there.
        commit: which state of it; empty for the newest.
        folder: of its clone, beside the list.
        also: other folders that go on the path, beside the list.
        make: gives the function or class that builds the module, with the folders on the path.
        architecture: a class of transformers.
        fields: its config's.
        options: what is given to :func:`porting.suggest` besides.
        verdict: the right verdict.
        reason: a part of the right reason, case aside; empty where there is none.
        apart: how far the filled module is from the reference, both in float64, relative to the largest value; None
            where the list does not say how the module is called.
    """

    repository: str = ""
    commit: str = ""
    folder: str
    also: tuple[str, ...] = ()
    make: Callable[[], Callable[..., nn.Module]]
    architecture: str
    fields: Mapping[str, object]
    options: Mapping[str, Any] = field(default_factory=dict)
    verdict: Verdict
    reason: str = ""
    apart: Callable[[nn.Module, nn.Module], float] | None = None


class Ended(StrEnum):
    """How a run ended."""

    ANSWERED = "answered"
    REFUSED = "refused"
    CRASHED = "crashed"


@dataclass(frozen=True, kw_only=True)
class Score:
    """What came of one model.

    Attributes:
        name: the model's.
        ended: how the run ended.
        verdict: what was found; the first line of the error where the run ended with one.
        expected: the right verdict.
        right: the verdict is the right one.
        reason: the reason is the right one.
        false_proof: a module that was called exact, or exact but for what is missing, is not the reference.
        unchecked: the error that the list's own comparison ended with: whether the proof is a false one is not known.
        said: the reasons that were given.
        seconds: how long it took.
    """

    name: str
    ended: Ended
    verdict: str
    expected: str
    right: bool = False
    reason: bool = False
    false_proof: bool = False
    unchecked: str = ""
    said: tuple[str, ...] = ()
    seconds: float

    def __str__(self) -> str:
        told = "right" if self.right else f"expected {self.expected}"
        why = "reason right" if self.reason else "reason wrong"
        proof = ", FALSE PROOF" if self.false_proof else f", NOT CHECKED: {self.unchecked}" if self.unchecked else ""
        answer = f"{told}, {why}" if self.ended is Ended.ANSWERED else f"{self.ended}, expected {self.expected}"
        return f"{self.name}: {self.verdict} ({answer}{proof}), {self.seconds:.1f} s"


def scored(name: str, model: Model, place: Path) -> Score:
    """Hand a model over as its list says, and hold the answer against what is right.

    Args:
        name: the model's.
        model: what the list says of it.
        place: the folder that the clones are in.
    """
    begun = time.monotonic()

    def ended(how: Ended, error: BaseException) -> Score:
        seconds = time.monotonic() - begun
        return Score(name=name, ended=how, verdict=_first_line(error), expected=str(model.verdict), seconds=seconds)

    folders = [place / one for one in (model.folder, *model.also)]
    with importing(*folders), tempfile.TemporaryDirectory() as checkpoint:
        reference = write_checkpoint(model.architecture, model.fields, Path(checkpoint))
        try:
            builder = model.make()
            begun = time.monotonic()
            found = suggest(checkpoint, builder, **model.options)
            seconds = time.monotonic() - begun
            new = any(one.side == "module" for one in found.unmapped)  # what is returned may depend on it
            proven = found.verdict is Verdict.EXACT or (found.verdict is Verdict.TRUNK and not new)
            filled = porting.load(checkpoint, builder, found.text, fresh=True) if proven and model.apart else None
        except PortingError as error:
            return ended(Ended.REFUSED, error)
        except Exception as error:  # noqa: BLE001  # what a public model or the search raises is a score
            traceback.print_exc()
            return ended(Ended.CRASHED, error)
        wrong, unchecked = False, ""
        if filled is not None and model.apart is not None:
            try:
                with torch.no_grad():
                    wrong = model.apart(filled.double().eval(), reference.double().eval()) > FALSE
            except Exception as error:  # noqa: BLE001  # the list's own code, and no answer of suggest
                traceback.print_exc()
                unchecked = _first_line(error)
    said = (*(reason.said for reason in found.reasons), *found.missing, *(one.name for one in found.unmapped))
    return Score(
        name=name,
        ended=Ended.ANSWERED,
        verdict=str(found.verdict),
        expected=str(model.verdict),
        right=found.verdict is model.verdict,
        reason=not model.reason or model.reason.lower() in " | ".join(said).lower(),
        false_proof=wrong,
        unchecked=unchecked,
        said=said,
        seconds=seconds,
    )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def write_checkpoint(architecture: str, fields: Mapping[str, object], folder: Path) -> nn.Module:
    """Write a small checkpoint of an architecture with every parameter drawn, and give the model that it is of."""
    kind: Any = getattr(transformers, architecture)  # chosen by name: its type is known when it runs
    torch.manual_seed(0)
    model: nn.Module = kind(kind.config_class(**fields))
    draw_parameters(model, 0)
    model.save_pretrained(folder)  # type: ignore[operator]  # transformers' own method, which nn.Module does not have
    if isinstance(model, transformers.PreTrainedModel) and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others do not run in float64
    return model


@contextmanager
def importing(*folders: Path) -> Iterator[None]:
    """With the clones' modules importable, and forgotten afterwards."""
    roots = [str(folder) for folder in folders]
    own = {path.stem for folder in folders if folder.is_dir() for path in folder.iterdir()}
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in own}
    for name in hidden:
        del sys.modules[name]
    known = set(sys.modules)
    sys.path[:0] = roots
    try:
        yield
    finally:
        for root in roots:
            sys.path.remove(root)
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(tuple(roots)):
                del sys.modules[name]
        sys.modules.update(hidden)


def clone(model: Model, place: Path) -> None:
    """Fetch a model's repository where its folder is not there."""
    folder = place / model.folder
    if folder.exists() or not model.repository:
        return
    git = shutil.which("git")
    if git is None:
        raise typer.BadParameter(f"{model.folder} is not there, and git, which would clone it, is not installed")
    subprocess.run([git, "clone", "--quiet", "--", model.repository, str(folder)], check=True)
    if model.commit:
        subprocess.run([git, "-C", str(folder), "checkout", "--quiet", model.commit], check=True)


def total(scores: Sequence[Score]) -> str:
    """The figures of a draw, in a few lines."""
    count = len(scores)
    share = f"{100 * sum(score.right and score.reason for score in scores) / count:.0f} %" if count else "none"
    ended = [sum(score.ended is how for score in scores) for how in (Ended.REFUSED, Ended.CRASHED)]
    seconds = [score.seconds for score in scores] or [0.0]
    versions = ", ".join(f"{name} {version(name)}" for name in ("porting", "torch", "transformers"))
    right = f"verdict {sum(score.right for score in scores)}, reason {sum(score.reason for score in scores)}"
    unchecked = sum(bool(score.unchecked) for score in scores)
    return (
        f"{share} right in verdict and reason, of {count} models: {right}\n"
        f"false proofs {sum(score.false_proof for score in scores)}, "
        f"{f'not checked {unchecked}, ' if unchecked else ''}refused {ended[0]}, crashed {ended[1]}\n"
        f"seconds: median {statistics.median(seconds):.1f}, most {max(seconds):.1f}\n"
        f"{versions}, {time.strftime('%Y-%m-%d')}"
    )


def main(
    listed: Annotated[Path, typer.Argument(metavar="LIST", help="a Python file with MODELS")],
    only: Annotated[list[str] | None, typer.Option("--only", help="a model of the list; may be given again")] = None,
    written: Annotated[Path | None, typer.Option("--json", help="write the scores there")] = None,
) -> None:
    """Try every model of a list and print what came of it, and the figures."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not type it
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # as above
    torch.set_num_threads(1)
    place = listed.resolve().parent
    models: Mapping[str, Model] = runpy.run_path(str(listed))["MODELS"]
    scores = []
    for name in only or models:
        clone(models[name], place)
        scores.append(scored(name, models[name], place))
        print(scores[-1], *(f"    {one}" for one in scores[-1].said), sep="\n", flush=True)
    print(total(scores))
    if written is not None:
        written.write_text(json.dumps([asdict(score) for score in scores], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)

"""Every entry of transformers' registry of conversions, as a table and back: ``make registry``.

python -m scripts.transformers_registry                    # all of them: about half an hour on one core
python -m scripts.transformers_registry mixtral ViTModel   # some
python -m scripts.transformers_registry --out FILE         # a line of JSON for each as well

For each a small random model is saved by transformers.  The files are converted through the entry's table, and the
tensors are compared, bit for bit, with those that transformers itself holds in memory after loading the same files.
Then the tensors in memory are saved as they are and converted backwards, and compared with the files.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from safetensors.torch import load_file
from torch import Tensor

from porting import convert
from porting.errors import PortingError
from porting.registries.conversions import entries
from porting.suggesting.subjects.twin import draw_parameters
from scripts.reference_models.apart import apart
from scripts.reference_models.proving import OutOfTime, line_of, set_limits, small_model
from scripts.reference_models.shrinking import LEVELS
from scripts.reference_models.types import classes, model_types

EQUAL, REFUSED, BUILD, DIFFERS = "equal", "refused", "not built", "different"
"""What may come of an entry: equal in both directions; refused by the engine; no small model can be made, saved and
loaded by transformers here; converted to something else."""


MOST_WEIGHTS = 70_000_000
"""A model with more is not made."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one entry.

    Attributes:
        entry, architecture: the entry, and the class that was built for it.
        outcome: one of the above.
        said: why, for another outcome than ``equal``.
        tensors: how many the model has.
        level: how much of its config was made small.
    """

    entry: str
    architecture: str
    outcome: str
    said: str = ""
    tensors: int = 0
    level: str = ""


def architectures(entry: str) -> tuple[str, ...]:
    """The classes of transformers that an entry is for, or that may have a part that it is for.

    An entry may be for a class or a config that transformers does not offer by name.  Then it is looked for in the
    files of transformers, and the models of the same folder are taken.
    """
    if entry in model_types() and classes(entry):
        return classes(entry)[:1]
    if isinstance(getattr(transformers, entry, None), type):
        return (entry,)
    wanted = re.compile(rf"^class {re.escape(entry)}\(|^    model_type = \"{re.escape(entry)}\"", re.MULTILINE)
    models = Path(str(transformers.__file__)).parent / "models"
    homes = {path.parent.name for path in models.glob("*/*.py") if wanted.search(path.read_text(encoding="utf-8"))}
    types = [one for one in model_types() if transformers.CONFIG_MAPPING[one].__module__.split(".")[-2] in homes]
    return tuple(dict.fromkeys(name for one in types for name in classes(one)))


def tried(entry: str, names: str) -> Outcome:
    """Try one entry with the first of these classes that can be made small and has what it is for.

    Args:
        entry: the entry.
        names: the classes, one after the other.
    """
    set_limits()
    torch.set_num_threads(1)
    found = Outcome(entry=entry, architecture="", outcome=BUILD, said="transformers has nothing of this name")
    try:
        for architecture in names.split():
            for level in LEVELS:
                found = _tried(entry, architecture, level)
                if found.outcome != BUILD:
                    return found
    except (OutOfTime, MemoryError) as error:
        return Outcome(entry=entry, architecture=names, outcome=BUILD, said=f"limits: {type(error).__name__}")
    return found


def _tried(entry: str, architecture: str, level: str) -> Outcome:
    def came(outcome: str, said: str = "", tensors: int = 0) -> Outcome:
        return Outcome(entry=entry, architecture=architecture, outcome=outcome, said=said, tensors=tensors, level=level)

    with tempfile.TemporaryDirectory(prefix="porting-registry-") as name:
        folder = Path(name)
        try:
            reference = _reference(entry, architecture, level, folder)
        except Exception as error:  # noqa: BLE001  # whatever a family's own code raises
            return came(BUILD, line_of(error))
        if not _is_for(entry, reference):
            return came(BUILD, f"{architecture} has no part that it is for")
        state: dict[str, Tensor] = reference.state_dict()
        table = f"transformers:{entry}"
        try:
            done = convert(folder / "disk", folder / "ported", table)
            back = convert(folder / "memory", folder / "back", table, reverse=True)
        except PortingError as error:
            return came(REFUSED, str(error), len(state))
        except Exception as error:  # noqa: BLE001  # a defect of ours, and told as one
            return came(REFUSED, f"exception: {line_of(error)}", len(state))
        ported = _read(done.path)
        stored = {one.data_ptr() for name, one in state.items() if name in ported}
        tied = {name for name, one in state.items() if name not in ported and one.data_ptr() in stored}
        skipped = {*reference.missing, *tied}  # drawn by transformers; another name of what is compared
        wrong = _different({name: one for name, one in state.items() if name not in skipped}, ported)
        wrong += [f"{one} (backwards)" for one in _different(_read(folder / "disk"), _read(back.path))]
        return came(DIFFERS, ", ".join(wrong[:6]), len(state)) if wrong else came(EQUAL, tensors=len(state))


def _reference(entry: str, architecture: str, level: str, folder: Path) -> Any:
    """A small model as transformers loads it from the files in ``disk``; ``memory`` has what it then holds."""
    kind: Any = getattr(transformers, architecture)
    model_type = entry if architecture in classes(entry) else kind.config_class.model_type
    model: Any = small_model(kind, model_type, level, most=MOST_WEIGHTS)
    draw_parameters(model, 1)
    model.save_pretrained(folder / "disk")
    del model
    reference, info = kind.from_pretrained(folder / "disk", dtype="auto", output_loading_info=True)
    reference.missing = set(info["missing_keys"])
    reference.save_pretrained(folder / "memory", save_original_format=False)
    return reference


def _is_for(entry: str, model: Any) -> bool:
    """Whether an entry is for a model or for a part of it."""
    parts = [module for module in model.modules() if hasattr(module, "config")]
    named = {type(part).__name__ for part in parts} | {part.config.model_type for part in parts}
    known = transformers.CONFIG_MAPPING
    return entry in named or (entry in known and known[entry] is type(model.config))


def _read(folder: Path) -> dict[str, Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def _bits(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _different(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """The names that only one has, and those whose bits differ."""
    lone = [f"{name} (only there)" for name in wanted.keys() - found.keys()]
    lone += [f"{name} (only here)" for name in found.keys() - wanted.keys()]
    return sorted(lone) + [name for name in wanted.keys() & found.keys() if _bits(wanted[name]) != _bits(found[name])]


def main(
    names: Annotated[list[str] | None, typer.Argument(help="entries of the registry; default: all")] = None,
    out: Annotated[Path | None, typer.Option(help="a file for what came of each, a line of JSON each")] = None,
) -> None:
    """Try the entries of transformers' registry, and print what came of each and the counts."""
    wanted = [(entry, " ".join(architectures(entry))) for entry in names or entries()]
    counts = Counter[str]()
    for (entry, tries), result, ended, seconds in apart(wanted, tried):
        found = result or Outcome(entry=entry, architecture=tries, outcome=BUILD, said=ended)
        counts[found.outcome] += 1
        typer.echo(f"{entry:44} {found.architecture:44} {found.outcome:9} {seconds:5} {found.said[:300]}")
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(found)) + "\n")
    typer.echo(f"transformers {transformers.__version__}, torch {torch.__version__}: {len(wanted)} entries")
    typer.echo(", ".join(f"{outcome}: {counts[outcome]}" for outcome in (EQUAL, REFUSED, BUILD, DIFFERS)))


if __name__ == "__main__":
    typer.run(main)

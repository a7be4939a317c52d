"""``porting suggest`` on public scratch models: whoever runs this fetches them, they are no part of the repository.

    git clone https://github.com/karpathy/minGPT models/minGPT      # and so on, all into one folder
    python -m scripts.suggest_public models                         # every model that is there
    python -m scripts.suggest_public models minGPT nanoGPT          # some

Each gets a small checkpoint of the architecture that it says it is, with every parameter drawn.  A recipe is what a
user would write to hand the model over: a function that builds it from a config, and nothing about its tensors.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import MagicMock

import torch
import transformers
import typer

from porting.errors import PortingError
from porting.suggesting import Suggestion, suggest
from porting.suggesting.subjects.twin import draw_parameters
from scripts.public import audio, captions, decoders, encoders, translation, vision
from scripts.public.recipe import Recipe

_PAGES = (decoders, encoders, captions, vision, translation, audio)
RECIPES: Mapping[str, Recipe] = {name: recipe for page in _PAGES for name, recipe in page.RECIPES.items()}


def checkpoint(architecture: str, fields: Mapping[str, object], folder: Path) -> Path:
    """A small checkpoint of that architecture, every parameter drawn."""
    kind: Any = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**fields))
    draw_parameters(model, 0)
    model.save_pretrained(folder)
    return folder


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
            module = sys.modules[name]
            if isinstance(module, MagicMock) or str(getattr(module, "__file__", "")).startswith(tuple(roots)):
                del sys.modules[name]
        sys.modules.update(hidden)


def tried(recipe: Recipe, clones: Path) -> tuple[Suggestion | PortingError, float]:
    """What comes of it, and in how many seconds."""
    with importing(*(clones / one for one in (recipe.folder, *recipe.also))), tempfile.TemporaryDirectory() as place:
        source = checkpoint(recipe.architecture, recipe.fields, Path(place))
        builder = recipe.make()
        begun = time.monotonic()
        try:
            return suggest(source, builder), time.monotonic() - begun
        except PortingError as error:
            return error, time.monotonic() - begun


def main(
    clones: Annotated[Path, typer.Argument(help="the folder with the clones")],
    names: Annotated[list[str] | None, typer.Argument(help="models; all that are there when none is named")] = None,
    show: Annotated[bool, typer.Option("--show", help="print the tables")] = False,
) -> None:
    """Try every model and print what came of it."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers does not type it
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # as above
    torch.set_num_threads(1)
    for name in names or [one for one, recipe in RECIPES.items() if (clones / recipe.folder).is_dir()]:
        recipe = RECIPES[name]
        found, seconds = tried(recipe, clones.resolve())
        if isinstance(found, PortingError):
            print(f"{name}: refused in {seconds:.1f} s: {found}")
            continue
        if show:
            print(found.text)
        said = " | ".join([*(one.said for one in found.reasons), *found.missing, *(one.name for one in found.unmapped)])
        right = found.verdict is recipe.verdict
        reason = not recipe.reason or recipe.reason in said
        written = sum(len(one.rpartition(" = ")[2]) > 0 for one in found.text.splitlines())
        print(
            f"{name}: {found.verdict} ({'right' if right else f'expected {recipe.verdict}'}), reason "
            f"{'right' if reason else 'wrong'}, {found.shown[0]} of {found.shown[1]} tensors, {found.trials} trials, "
            f"{seconds:.1f} s, {written} lines"
        )
        print(f"    {said}")


if __name__ == "__main__":
    typer.run(main)

"""How much the ported weights are worth: the same task from the bundled checkpoint and from random weights.

    python -m scripts.compare_starts

Everything else is equal: the model, the tokenizer, the examples, their order.  Each start gets the same learning rates,
and each of them is a row: none is chosen.
"""

from __future__ import annotations

import statistics
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid

from porting import embedded_checkpoint
from scripts.classification_scores import Scores, score
from scripts.docstring_corpus import Document, read_standard_library
from scripts.docstring_task import draw_task
from scripts.text_classifier import Recipe, make_classifier, train


def run(documents: list[Document], *, per_label: int, recipe: Recipe, random: bool) -> Scores:
    """The held-out scores of one training on the task of :mod:`scripts.docstring_task`, drawn by the recipe's seed."""
    learnt, rest = draw_task(documents, per_label=per_label, seed=recipe.seed)
    labels = tuple(sorted({label for _, label in learnt}))
    classifier = make_classifier(embedded_checkpoint(), labels, random=random, seed=recipe.seed)
    for _ in train(classifier, [text for text, _ in learnt], [labels.index(label) for _, label in learnt], recipe):
        pass
    predicted = classifier.predict([text for text, _ in rest], max_length=recipe.max_length).argmax(-1).tolist()
    return score([labels.index(label) for _, label in rest], predicted, labels)


def main(
    per_label: Annotated[list[int] | None, typer.Option(help="Examples of each label.", show_default="16, 48")] = None,
    learning_rate: Annotated[
        list[float] | None, typer.Option(help="Rates to try.", show_default="0.0005, 0.001, 0.002")
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="How many draws.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the examples.")] = 10,
    threads: Annotated[int, typer.Option(min=1, help="Of the arithmetic.")] = 1,
) -> None:
    """Print the mean and the standard deviation of the held-out accuracy from both starts."""
    torch.set_num_threads(threads)
    console = Console(highlight=False)
    documents = read_standard_library()
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    for title in ("per label", "learning rate", "ported", "random", "commonest label"):
        grid.add_column(title, justify="right", no_wrap=True)
    rows = [(count, rate) for count in per_label or (16, 48) for rate in learning_rate or (5e-4, 1e-3, 2e-3)]
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=2 * seeds * len(rows))
        for count, rate in rows:
            cells, commonest = [], 0.0
            for random in (False, True):
                found = []
                for seed in range(seeds):
                    recipe = Recipe(epochs=epochs, learning_rate=rate, max_length=64, seed=seed)
                    scores = run(documents, per_label=count, recipe=recipe, random=random)
                    found.append(scores.accuracy)
                    commonest = scores.commonest
                    progress.advance(bar)
                cells.append(f"{statistics.mean(found):.3f} ± {statistics.stdev(found):.3f}")
            grid.add_row(str(count), f"{rate:g}", *cells, f"{commonest:.3f}")
    console.print(grid)


if __name__ == "__main__":
    typer.run(main)

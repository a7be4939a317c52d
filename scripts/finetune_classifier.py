"""Fine-tune a classifier on a tab-separated file, from a ported checkpoint, and save it as one that transformers loads.

    python -m scripts.finetune_classifier train.tsv ./classifier --held-out test.tsv

The file has one example a line, text<TAB>label.  The checkpoint may be of any family whose table has an architecture
that ends in ForSequenceClassification, or a module with a head for labels, such as an encoder-decoder's encoder in the
small classifier; ``docs/fine-tuning.md`` shows it at work.  The same seed, threads, libraries and
machine give the same bytes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as Grid
from rich.text import Text

from porting import PortingError, embedded_checkpoint
from porting.atomic import check_destination
from porting.cli.output import INTERRUPTED, WRONG
from porting.printable import safe
from scripts.classification_scores import Scores, in_rows, score
from scripts.labelled_text import Example, TaskError, labels_of, read_examples
from scripts.text_classifier import Recipe, TextClassifier, count_steps, make_classifier, save, train


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be learnt.

    Attributes:
        training, held_out: the examples.
        labels: the classes.
        told: where they come from, in words.
    """

    training: Sequence[Example]
    held_out: Sequence[Example]
    labels: tuple[str, ...]
    told: str


def read_task(path: Path, held_out: Path | None, *, fraction: float, seed: int) -> Task:
    """The examples of a file, and those of another that are held out, or a share of the first.

    Args:
        path: the training file.
        held_out: the held-out file; None to hold out a share of the training file.
        fraction: that share, 0 to 1.
        seed: of what is drawn.

    Raises:
        TaskError: a file cannot be used, or a label occurs in the held-out part alone.
    """
    training = read_examples(path)
    labels = labels_of(training, path)
    if held_out is not None:
        return Task(
            training=training,
            held_out=read_examples(held_out, labels=labels),
            labels=labels,
            told=f"{path.name}, held out {held_out.name}",
        )
    drawn = random.Random(seed).sample(training, len(training))  # noqa: S311 - repeatable on purpose
    count = min(max(round(fraction * len(drawn)), 1), len(drawn) - 1)
    kept = drawn[count:]
    lone = sorted(set(labels) - {example.label for example in kept})
    if lone:
        raise TaskError(
            f"{path}: of {len(drawn):,} examples {count:,} are held out, and none of {lone[0]!r} is left; "
            "hold out fewer (--fraction), or name a file of their own (--held-out)"
        )
    return Task(training=kept, held_out=drawn[:count], labels=labels, told=f"{path.name}, {count:,} of it held out")


def fit(classifier: TextClassifier, task: Task, recipe: Recipe, console: Console) -> Scores:
    """Train with a progress bar, say after each epoch how far it is, and give the last scores.

    Raises:
        TaskError: the loss is no number any more.
    """
    classes = [task.labels.index(example.label) for example in task.training]
    texts = [example.text for example in task.training]
    steps = count_steps(len(texts), recipe)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    scores = evaluate(classifier, task, recipe)
    console.print(f"before        held out: accuracy {scores.accuracy:.3f}, macro F1 {scores.macro_f1:.3f}")
    losses: list[float] = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=steps)
        for step, loss in enumerate(train(classifier, texts, classes, recipe), start=1):
            if not math.isfinite(loss):
                raise TaskError(f"the loss is {loss} at step {step:,} of {steps:,}: lower --learning-rate")
            losses.append(loss)
            progress.update(bar, advance=1, description=f"loss {loss:.3f}")
            if step * recipe.epochs % steps == 0:
                scores = evaluate(classifier, task, recipe)
                mean = sum(losses) / len(losses)
                console.print(
                    f"epoch {step * recipe.epochs // steps:<3} loss {mean:.3f}, "
                    f"held out: accuracy {scores.accuracy:.3f}, macro F1 {scores.macro_f1:.3f}"
                )
                losses = []
    return scores


def evaluate(classifier: TextClassifier, task: Task, recipe: Recipe) -> Scores:
    """The scores on what is held out."""
    predicted = classifier.predict([example.text for example in task.held_out], max_length=recipe.max_length)
    truth = [task.labels.index(example.label) for example in task.held_out]
    return score(truth, predicted.argmax(-1).tolist(), task.labels)


def card(classifier: TextClassifier, task: Task, recipe: Recipe, scores: Scores, *, drawn: bool) -> str:
    """The text that goes with the saved model: what it is, how it was made, how good it is."""
    rows = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in in_rows(scores)]
    start = "random weights in the shape of" if drawn else "the weights of"
    head = ", only the new head" if recipe.freeze else ""
    what = classifier.architecture if classifier.exported else type(classifier.module).__qualname__
    loading = "" if classifier.exported else LOADING
    return (
        f"""# A text classifier

{what}, fine-tuned by porting from {start} `{Path(classifier.checkpoint.location).name}`.

- labels: {", ".join(f"`{label}`" for label in task.labels)}
- data: {task.told}: {len(task.training):,} examples to learn from, {len(task.held_out):,} held out
- training: {recipe.epochs} epochs of batches of {recipe.batch_size}, AdamW, peak rate {recipe.learning_rate:g}, \
at most {recipe.max_length} tokens, seed {recipe.seed}{head}
- held out: {in_words(scores)}

| {" | ".join(rows[0])} |
|{" --- |" * len(rows[0])}
"""
        + "".join(f"| {' | '.join(row)} |\n" for row in rows[1:])
        + loading
    )


LOADING = """
transformers has no such model. It is loaded with

```python
import json
from importlib import import_module
from pathlib import Path

from safetensors.torch import load_file

folder = Path("classifier")  # this directory
made = json.loads((folder / "module.json").read_text())


def named(path):
    where, name = path.split(":")
    return getattr(import_module(where), name)


config = named(made["config_class"])(**made["config"])
module = named(made["module"])(config=config).eval()
module.load_state_dict(load_file(folder / "model.safetensors"))
```
"""


def in_words(scores: Scores) -> str:
    """The scores in a line."""
    return (
        f"accuracy {scores.accuracy:.3f} (the commonest label alone: {scores.commonest:.3f}), "
        f"macro F1 {scores.macro_f1:.3f}"
    )


def show(scores: Scores, console: Console) -> None:
    """Print the last scores."""
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    head, *rows = in_rows(scores)
    for number, title in enumerate(head):
        grid.add_column(Text(safe(title)), justify="right" if number else "left")
    for row in rows:
        grid.add_row(*(Text(safe(cell)) for cell in row))
    console.print(grid)
    console.print(f"held out: {in_words(scores)}", soft_wrap=True)


@contextmanager
def explained() -> Iterator[None]:
    """What the user can do something about becomes a line on standard error, and an exit code."""
    told = Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)
    try:
        yield
    except TaskError as error:
        lines = list(error.lines)
    except PortingError as error:
        lines = [str(fault) for fault in error.faults]
    except OSError as error:
        lines = [f"{error.filename}: {error.strerror}" if error.filename else str(error)]
    except KeyboardInterrupt as error:
        told.print("interrupted: nothing was written")
        raise typer.Exit(INTERRUPTED) from error
    else:
        return
    for line in lines:
        told.print(f"error: {safe(line)}")
    raise typer.Exit(WRONG)


def usable(device: str) -> torch.device:
    """The device of that name.

    Raises:
        TaskError: there is none.
    """
    try:
        found = torch.device(device)
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise TaskError(f"--device {device}: it cannot be used: {reason}") from error
    return found


DEFAULTS = Recipe()

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    data: Annotated[Path, typer.Argument(help="The training file: text<TAB>label on each line.")],
    destination: Annotated[Path, typer.Argument(help="The directory to make.")],
    held_out: Annotated[Path | None, typer.Option(help="A file to test with.", show_default="a share of DATA")] = None,
    fraction: Annotated[float, typer.Option(min=0.001, max=0.9, help="The share of DATA that is held out.")] = 0.2,
    checkpoint: Annotated[
        str | None,
        typer.Option(help="A directory, a weight file or a model on the hub.", show_default="the bundled checkpoint"),
    ] = None,
    table: Annotated[str | None, typer.Option(help="A table.", show_default="by the checkpoint's model_type")] = None,
    drawn: Annotated[bool, typer.Option("--random", help="Start from random weights instead, to compare.")] = False,
    freeze: Annotated[bool, typer.Option("--freeze", help="Train only what the checkpoint does not have.")] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the examples.")] = DEFAULTS.epochs,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples in a batch.")] = DEFAULTS.batch_size,
    learning_rate: Annotated[float, typer.Option(min=1e-9, help="At its peak.")] = DEFAULTS.learning_rate,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a text; the rest is cut.")] = DEFAULTS.max_length,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = DEFAULTS.seed,
    threads: Annotated[int | None, typer.Option(min=1, help="Of the arithmetic.", show_default="all")] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, mps.")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that stands there.")] = False,
) -> None:
    """Fine-tune a text classifier from a ported checkpoint."""
    console = Console(highlight=False, markup=False, emoji=False)
    if threads is not None:
        torch.set_num_threads(threads)
    recipe = Recipe(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        max_length=max_length,
        freeze=freeze,
        seed=seed,
    )
    with explained():
        task = read_task(data, held_out, fraction=fraction, seed=seed)
        check_destination(destination, overwrite=overwrite)  # better now than after an hour
        source = embedded_checkpoint() if checkpoint is None else checkpoint
        classifier = make_classifier(source, task.labels, table=table, random=drawn, seed=seed)
        if freeze and not classifier.new:
            raise TaskError("--freeze leaves nothing to train: the checkpoint has a head for these very labels")
        classifier.module.to(usable(device))
        parameters = sum(parameter.numel() for parameter in classifier.module.parameters())
        what = classifier.architecture if classifier.exported else type(classifier.module).__qualname__
        new = f"{len(classifier.new)} new tensors" if not drawn else "all of them random"
        console.print(f"{what}, {parameters:,} parameters, {new}")
        known = {example.text for example in task.training}
        twice = sum(example.text in known for example in task.held_out)
        console.print(
            f"{len(task.training):,} examples of {len(task.labels)} labels, {len(task.held_out):,} held out"
            + (f", {twice:,} of which are also among those to learn from" if twice else "")
        )
        scores = fit(classifier, task, recipe, console)
        show(scores, console)
        save(
            classifier,
            destination,
            card=card(classifier, task, recipe, scores, drawn=drawn),
            overwrite=overwrite,
        )
        console.print(f"saved: {safe(str(destination))}", soft_wrap=True)
        if not classifier.exported:
            kind = type(classifier.module).__qualname__
            told = f"transformers has no such model: it is saved as this {kind}, and its README.md says how to load it"
            console.print(told, soft_wrap=True)


if __name__ == "__main__":
    app()

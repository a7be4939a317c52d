"""A classifier made from a checkpoint: the handwritten model with a head for these labels, trained, used and saved.

Everything that is particular to a family stands in its table: which class has the head, what it is given, and how it
goes back into a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import porting
from porting.build import OWN_CODE, bounds, build
from porting.checkpoint import Checkpoint, open_checkpoint, write_directory
from porting.errors import Code, Fault
from porting.export_files import companions
from porting.loading import maker
from porting.notation.table import Table
from porting.tables import find_table
from porting.target import TargetError, named_tensors
from porting.tokenizer import TextTokenizer, read_tokenizer
from porting.trials.inputs import for_port

ENDING = "ForSequenceClassification"
"""Ends the name of an architecture that gives one label to a text, in every family."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what training makes of a classifier, beside the examples."""

    epochs: int = 3
    batch_size: int = 16
    learning_rate: float = 5e-5
    warmup_fraction: float = 0.1
    weight_decay: float = 0.01
    max_length: int = 128
    freeze: bool = False
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TextClassifier:
    """A model with a classification head, and what belongs to it.

    Attributes:
        module: the handwritten model, float32; ``logits`` [b c] are what it gives.
        table: the table it was loaded through.
        checkpoint: the checkpoint it comes from.
        architecture: what the table calls it.
        tokenizer: the checkpoint's own.
        labels: the classes, by number.
        new: the parameters that are not the checkpoint's.
        exported: whether it goes back into a checkpoint that transformers loads; else no model there is its like, such
            as an encoder-decoder's encoder with a head, and it is saved as the handwritten module that it is.
    """

    module: nn.Module
    table: Table
    checkpoint: Checkpoint
    architecture: str
    tokenizer: TextTokenizer
    labels: tuple[str, ...]
    new: frozenset[str]
    exported: bool = True

    def encode(self, texts: Sequence[str], *, max_length: int) -> list[dict[str, list[int]]]:
        """The word pieces of each text, cut at ``max_length`` or at the model's positions, special tokens included."""
        positions = getattr(_config(self.module), "max_position_embeddings", max_length)
        tokenizer = self.tokenizer.tokenizer
        tokenizer.enable_truncation(min(max_length, positions))
        try:
            encoded = tokenizer.encode_batch(list(texts))
        finally:
            tokenizer.no_truncation()
        return [{"input_ids": one.ids, "token_type_ids": one.type_ids} for one in encoded]

    def batch(self, rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        """Rows of :meth:`encode` as the model's arguments, padded on the right to the longest."""
        width = max(len(row["input_ids"]) for row in rows)
        padding = {"input_ids": self._padding, "token_type_ids": 0}
        inputs = {
            name: torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in rows])
            for name, filler in padding.items()
        }
        mask = [[1] * len(row["input_ids"]) + [0] * (width - len(row["input_ids"])) for row in rows]
        inputs["attention_mask"] = torch.tensor(mask)
        device = next(self.module.parameters()).device
        given = for_port(self.table.inputs, inputs, torch.float32)
        return {name: value.to(device) for name, value in given.items()}

    @property
    def _padding(self) -> int:
        number = self.tokenizer.tokenizer.token_to_id(self.tokenizer.special.get("pad_token", ""))
        configured = self.checkpoint.config.get("pad_token_id")
        return number if number is not None else configured if isinstance(configured, int) else 0

    def logits(self, arguments: Mapping[str, Tensor]) -> Tensor:
        """What the model says, [b c]."""
        output = self.module(**arguments)
        found: Tensor = output if isinstance(output, Tensor) else output.logits
        return found

    @torch.no_grad()
    def predict(self, texts: Sequence[str], *, max_length: int = 128, batch_size: int = 32) -> Tensor:
        """The probability of each class for each text, [n c], float32."""
        self.module.eval()
        rows = self.encode(texts, max_length=max_length)
        parts = [
            self.logits(self.batch(rows[start : start + batch_size])).softmax(-1).cpu()
            for start in range(0, len(rows), batch_size)
        ]
        return torch.cat(parts)


def make_classifier(
    source: str | Path,
    labels: Sequence[str],
    *,
    table: str | None = None,
    random: bool = False,
    seed: int = 0,
) -> TextClassifier:
    """A classifier for these labels, with a checkpoint's weights.

    A head that the checkpoint has is kept if it is for the very same labels; otherwise it is drawn anew.

    Args:
        source, table: as in :func:`porting.load`.
        labels: the classes.
        random: take only the shape from the checkpoint, and draw every weight.
        seed: of what is drawn.

    Raises:
        PortingError: the checkpoint, its table or its tokenizer cannot be used, or the table has no classifier.
    """
    checkpoint = open_checkpoint(source)
    chosen = find_table(table, checkpoint.config)
    architecture, exported = _classifying(chosen, checkpoint)
    tokenizer = read_tokenizer(checkpoint.home, where=checkpoint.location)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", porting.PortingWarning)  # a new head is what is wanted here
        loaded = porting.load(
            checkpoint, None, chosen, architecture=architecture, dtype=torch.float32, fresh=True, own=True
        )
    record = porting.provenance(loaded)
    kept = dict(named_tensors(loaded))
    for name in record.plan.fresh if record is not None else ():
        del kept[name]
    if _labels(checkpoint) != tuple(labels):
        for name in _of_each_label(loaded):
            kept.pop(name, None)
    torch.manual_seed(seed)
    module = type(loaded)(config=_counting(loaded, len(labels)))
    new = {name for name, _ in module.named_parameters() if random or name not in kept}
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            if not random and name in kept:
                tensor.copy_(kept[name])
    return TextClassifier(
        module=module,
        table=chosen,
        checkpoint=checkpoint,
        architecture=architecture,
        tokenizer=tokenizer,
        labels=tuple(labels),
        new=frozenset(new),
        exported=exported,
    )


def _classifying(table: Table, checkpoint: Checkpoint) -> tuple[str, bool]:
    """The table's architecture with a head for a text, and whether transformers has it, too.

    That is one of this name; else one whose module has something with a row for each label: an encoder with a new head.

    Raises:
        TargetError: there is none.
    """
    for one in table.architectures:
        if one.name.endswith(ENDING):
            return one.name, True
    for one in table.architectures:
        make, _ = maker(table, checkpoint, None, one.name, trust=False)
        module = build(make, bounds(checkpoint.tensors))
        if hasattr(_config(module), "num_labels") and _of_each_label(module):
            return one.name, False
    names = ", ".join(architecture.name for architecture in table.architectures) or "none"
    message = f"table '{table.name}' has no architecture with a head for a text; it has {names}"
    hint = "another table of the family may have one: porting tables"
    raise TargetError(Fault(code=Code.NO_HEAD, where=table.where, message=message, hint=hint))


def _config(module: nn.Module) -> Any:  # a dataclass of the model's own
    return next(part.config for part in module.modules() if hasattr(part, "config"))


def _counting(module: nn.Module, labels: int) -> Any:  # as above
    """The module's config with another number of labels."""
    return dataclasses.replace(_config(module), num_labels=labels)


def _labels(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The labels of the head that a checkpoint has, if it names them."""
    named = checkpoint.config.get("id2label")
    return tuple(str(named.get(str(number))) for number in range(len(named))) if isinstance(named, Mapping) else ()


def _of_each_label(module: nn.Module) -> set[str]:
    """The tensors that have a row for each label: those whose shape is another when there is one label more."""
    more = _config(module).num_labels + 1
    other = {
        name: one.shape
        for name, one in named_tensors(build(lambda: type(module)(config=_counting(module, more)), OWN_CODE))
    }
    return {name for name, tensor in named_tensors(module) if tensor.shape != other[name]}


def count_steps(examples: int, recipe: Recipe) -> int:
    """How many steps all epochs take together."""
    return recipe.epochs * -(-examples // recipe.batch_size)


def train(classifier: TextClassifier, texts: Sequence[str], classes: Sequence[int], recipe: Recipe) -> Iterator[float]:
    """Train for as many steps as :func:`count_steps` says; give each one's loss, in nats.

    AdamW with a linear warm-up and decay, as BERT was fine-tuned (Devlin et al. 2019, appendix A.3); biases and norms
    do not decay, and gradients longer than 1 are cut.
    """
    module = classifier.module
    named = [(name, one) for name, one in module.named_parameters() if not recipe.freeze or name in classifier.new]
    groups: list[dict[str, Any]] = [  # Any: as torch has it
        {"params": [one for _, one in named if one.ndim > 1]},
        {"params": [one for _, one in named if one.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    steps = count_steps(len(texts), recipe)
    warmup = max(1, round(recipe.warmup_fraction * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1), 1.0)
    )
    rows = classifier.encode(texts, max_length=recipe.max_length)
    targets = torch.tensor(classes)
    shuffled = torch.Generator().manual_seed(recipe.seed)
    torch.manual_seed(recipe.seed)  # of the dropout
    for _ in range(recipe.epochs):
        order = torch.randperm(len(rows), generator=shuffled).tolist()
        for start in range(0, len(order), recipe.batch_size):
            places = order[start : start + recipe.batch_size]
            module.train()
            logits = classifier.logits(classifier.batch([rows[place] for place in places]))
            loss = F.cross_entropy(logits, targets[places].to(logits.device))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_([one for _, one in named], max_norm=1.0)
            optimizer.step()
            schedule.step()
            yield loss.item()
    module.eval()


def save(classifier: TextClassifier, path: Path, *, card: str, overwrite: bool = False) -> None:
    """Write the classifier as a checkpoint that transformers loads, whole or not at all.

    With it go the tokenizer's files, the labels as ``id2label`` and ``label2id``, and a card.  What transformers has no
    model for is written as it is: the module's own tensors, and ``module.json``, which says what builds it.

    Raises:
        PortingError: it cannot be written; what stood at ``path`` is untouched.
    """
    module, checkpoint = classifier.module.cpu(), classifier.checkpoint
    beside, _ = companions(checkpoint)
    sources = [checkpoint.path] if checkpoint.path is not None else []
    if not classifier.exported:
        kind, config_kind = type(module), type(_config(module))
        described = {
            "module": f"{kind.__module__}:{kind.__qualname__}",
            "config_class": f"{config_kind.__module__}:{config_kind.__qualname__}",
            "config": dataclasses.asdict(_config(module)),
            "labels": list(classifier.labels),
        }
        own = {
            **beside,
            "model.safetensors": safetensors.torch.save(module.state_dict()),
            "module.json": f"{json.dumps(described, indent=2)}\n".encode(),
            "README.md": card.encode(),
        }
        write_directory(path, own, overwrite=overwrite, sources=sources)
        return
    config = {
        **{name: value for name, value in checkpoint.config.items() if name not in ("architectures", "num_labels")},
        "id2label": {str(number): label for number, label in enumerate(classifier.labels)},
        "label2id": {label: number for number, label in enumerate(classifier.labels)},
        "problem_type": "single_label_classification",
    }
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "exported"
        porting.export(
            module, classifier.table, exported, anew=True, config=config, architecture=classifier.architecture
        )
        files = {**beside, **{file.name: file for file in exported.iterdir()}, "README.md": card.encode()}
        write_directory(path, files, overwrite=overwrite, sources=sources)

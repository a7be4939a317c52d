"""Train the checkpoint that ships with the library: a small BERT that has read Python's own documentation.

    python -m scripts.train_demo_checkpoint porting/demo

The recipe is the paper's (Devlin et al. 2019, section 3.1 and appendix A.2: masked words and next sentences,
AdamW, warm-up and linear decay), with what makes it work on 300,000 tokens in some minutes on two cores
rather than on 3.3 billion words in four days:

- It starts from attention that already points somewhere (:func:`start`): positions as sinusoids (Vaswani et
  al. 2017, section 3.5), keys that look for tokens like the query (Trockman and Kolter 2023, "Mimetic
  Initialization of Self-Attention Layers").
- It does without dropout (Lan et al. 2019, "ALBERT", section 4.8), for the minutes are few. The price: next sentence is
  learnt better on the training pairs than it carries over to others.
- It masks more (Wettig et al. 2022, "Should You Mask 15% in Masked Language Modeling?"), and whole words.
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

from porting import export
from porting.checkpoint import write_directory
from porting.models.bert import BertLayer
from porting.models.bert_config import BertConfig
from porting.models.bert_heads import BertForPreTraining
from scripts.demo_report import SENTENCES, Figures, fill, measure, model_card, pretraining_logits
from scripts.docstring_corpus import Document, read_standard_library, split_by_package
from scripts.sentence_pairs import IGNORED, PairRecipe, SpecialTokens, TokenizedDocument, count_batches, draw_batches

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LARGEST = 6_000_000
"""Bytes: what all files of the checkpoint may take, since every installation carries them."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what comes out, beside the text. The defaults are those of the bundled checkpoint."""

    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    initializer_range: float = 0.05
    epochs: int = 20
    learning_rate: float = 1.2e-3
    warmup_fraction: float = 0.1
    weight_decay: float = 0.01
    held_out_fraction: float = 0.08
    seed: int = 0
    pairs: PairRecipe = field(default_factory=lambda: PairRecipe(mask_fraction=0.2))


def train_tokenizer(sentences: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """A lower-case WordPiece tokenizer in BERT's conventions, the same for the same sentences.

    The library numbers the single characters in an order of its own, anew in each process, and breaks ties by
    these numbers. So the characters are handed to it in order, in the one place that keeps an order: among the
    special tokens.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    letters = sorted({letter for sentence in sentences for letter in normalizer.normalize_str(sentence)} - {" "})
    learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 - a word piece, no password
    learner.normalizer = normalizer
    learner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fixed = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=fixed, show_progress=False)
    learner.train_from_iterator(sentences, trainer)

    vocabulary = learner.get_vocab()
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # noqa: S106 - as above
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def tokenize(documents: Sequence[Document], tokenizer: Tokenizer) -> list[TokenizedDocument]:
    """The documents as token ids, without special tokens."""
    return [
        TokenizedDocument(
            package=document.package,
            sentences=tuple(
                tuple(encoding.ids)
                for encoding in tokenizer.encode_batch(list(document.sentences), add_special_tokens=False)
            ),
        )
        for document in documents
    ]


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """What the batches have to know of the vocabulary."""
    ids = tokenizer.get_vocab()
    pieces = sorted(ids, key=ids.__getitem__)
    return SpecialTokens(
        pad=ids["[PAD]"],
        cls=ids["[CLS]"],
        sep=ids["[SEP]"],
        mask=ids["[MASK]"],
        continues=torch.tensor([piece.startswith("##") for piece in pieces]),
        special=torch.tensor([piece in SPECIAL for piece in pieces]),
    )


def start(recipe: Recipe, *, vocab_size: int) -> BertForPreTraining:
    """A model to be trained: drawn as the paper draws it, then given attention that points somewhere.

    From plain random weights such a model spends most of its minutes guessing words by their frequency,
    before a head finds out that neighbours matter.
    """
    torch.manual_seed(recipe.seed)
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.num_hidden_layers,
        num_attention_heads=recipe.num_attention_heads,
        intermediate_size=4 * recipe.hidden_size,
        max_position_embeddings=recipe.pairs.max_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=recipe.initializer_range,
    )
    model = BertForPreTraining(config=config)
    with torch.no_grad():
        positions = model.bert.embeddings.position.weight  # (position, hidden_size)
        scale = recipe.initializer_range * 2**0.5  # a sine's mean square is a half
        rates = 10_000 ** (-torch.arange(0, recipe.hidden_size, 2) / recipe.hidden_size)
        angles = torch.arange(len(positions))[:, None] * rates
        positions[:, 0::2] = scale * angles.sin()
        positions[:, 1::2] = scale * angles.cos()
        for layer in (part for part in model.modules() if isinstance(part, BertLayer)):
            layer.attention.key.weight.copy_(layer.attention.query.weight)  # x W W' y: largest where y is like x
            for output in (layer.attention.output, layer.output):
                output.weight.mul_((2 * recipe.num_hidden_layers) ** -0.5)  # as in GPT-2: keeps post-norm steady
    return model


def train(
    model: BertForPreTraining,
    documents: Sequence[TokenizedDocument],
    *,
    tokens: SpecialTokens,
    recipe: Recipe,
) -> Iterator[tuple[float, float]]:
    """Train for as many steps as :func:`count_steps` says; give each one's MLM and NSP loss, in nats."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]  # biases and norms do not decay
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]  # Any: as torch has it
    optimizer = torch.optim.AdamW(
        groups,
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        eps=1e-6,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    steps = count_steps(documents, recipe=recipe)
    warmup = max(1, round(recipe.warmup_fraction * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1), 1.0)
    )
    model.train()
    for epoch in range(recipe.epochs):
        for batch in draw_batches(documents, tokens=tokens, recipe=recipe.pairs, seed=_epoch_seed(recipe, epoch)):
            mlm_logits, labels, nsp_logits = pretraining_logits(model, batch)
            mlm_loss = mean_cross_entropy(mlm_logits, labels)
            nsp_loss = mean_cross_entropy(nsp_logits, batch.next_sentence_label)
            optimizer.zero_grad()
            torch.autograd.backward(mlm_loss + nsp_loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            schedule.step()
            yield mlm_loss.item(), nsp_loss.item()
    model.eval()


def count_steps(documents: Sequence[TokenizedDocument], *, recipe: Recipe) -> int:
    """How many steps all epochs take together; each epoch is cut in its own way, so they differ a little."""
    return sum(
        count_batches(documents, recipe=recipe.pairs, seed=_epoch_seed(recipe, epoch)) for epoch in range(recipe.epochs)
    )


def _epoch_seed(recipe: Recipe, epoch: int) -> int:
    return recipe.seed * 1_000_003 + epoch


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over the labels that are asked for; 0, and not NaN, where none is."""
    asked = int((labels != IGNORED).sum())
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / max(asked, 1)


def save(model: BertForPreTraining, tokenizer: Tokenizer, path: Path, *, card: str) -> int:
    """Write the checkpoint in HuggingFace's layout, whole or not at all; returns its size in bytes.

    Raises:
        ValueError: it is larger than may ship; nothing is written.
    """
    ids = tokenizer.get_vocab()
    roles = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    settings = {
        **roles,
        "do_lower_case": True,
        "model_max_length": model.bert.config.max_position_embeddings,
        "tokenizer_class": "BertTokenizer",
    }
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "exported"
        export(model, "bert", exported)
        files: dict[str, bytes | Path] = {file.name: file for file in sorted(exported.iterdir())}
        files["tokenizer.json"] = tokenizer.to_str().encode()
        files["tokenizer_config.json"] = _json(settings)
        files["special_tokens_map.json"] = _json(roles)
        files["vocab.txt"] = "".join(f"{piece}\n" for piece in sorted(ids, key=ids.__getitem__)).encode()
        files["README.md"] = card.encode()
        size = sum(len(file) if isinstance(file, bytes) else file.stat().st_size for file in files.values())
        if size > LARGEST:
            raise ValueError(f"the checkpoint would take {size:,} bytes, and at most {LARGEST:,} ship; make it smaller")
        write_directory(path, files, overwrite=True)
    return size


def _json(content: dict[str, object] | dict[str, str]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def run(recipe: Recipe, path: Path, *, library: Path | None, console: Console) -> Figures:
    """Read, train, measure, save.

    Args:
        recipe: what decides the outcome.
        path: the directory to write.
        library: a folder of Python source files to read; None for the running Python's documentation.
        console: where to say how it goes.
    """
    learnt, held_out = split_by_package(
        read_standard_library(library), held_out_fraction=recipe.held_out_fraction, seed=recipe.seed
    )
    sentences = [sentence for document in learnt for sentence in document.sentences]
    tokenizer = train_tokenizer(sentences, vocab_size=recipe.vocab_size)
    tokens = special_tokens(tokenizer)
    model = start(recipe, vocab_size=tokenizer.get_vocab_size())
    training, testing = tokenize(learnt, tokenizer), tokenize(held_out, tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    words = sum(len(sentence.split()) for sentence in sentences)
    console.print(f"{words:,} words in {len(sentences):,} sentences; {parameters:,} parameters")

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=count_steps(training, recipe=recipe))
        mlm = nsp = 0.0
        for step, (mlm_loss, nsp_loss) in enumerate(train(model, training, tokens=tokens, recipe=recipe)):
            weight = max(0.01, 1 / (step + 1))  # a running mean over the last hundred steps
            mlm, nsp = mlm + weight * (mlm_loss - mlm), nsp + weight * (nsp_loss - nsp)
            progress.update(task, advance=1, description=f"MLM {mlm:.2f}  NSP {nsp:.3f}")

    figures = measure(model, held_out=testing, learnt=training, tokens=tokens, pairing=recipe.pairs)
    guesses = {sentence: fill(model, tokenizer, sentence) for sentence in SENTENCES}
    facts = {
        "parameters": f"{parameters:,}, float32, all trained here",
        "shape": f"{recipe.num_hidden_layers} layers, hidden size {recipe.hidden_size}, "
        f"{recipe.num_attention_heads} heads, {recipe.pairs.max_length} positions",
        "vocabulary": f"{tokenizer.get_vocab_size():,} word pieces, lower case, made from the training text",
        "training text": f"{words:,} words in {len(sentences):,} sentences of Python {platform.python_version()}",
        "held out": f"{sum(len(document.sentences) for document in held_out):,} sentences: "
        + ", ".join(f"`{package}`" for package in sorted({document.package for document in held_out})),
        "training": f"{recipe.epochs} epochs, batches of {recipe.pairs.batch_size}, AdamW, peak rate "
        f"{recipe.learning_rate:g}, {recipe.pairs.mask_fraction:.0%} of the words masked, seed {recipe.seed}",
    }
    command = "python -m scripts.train_demo_checkpoint porting/demo"
    card = model_card(figures=figures, guesses=guesses, facts=facts, command=command)
    size = save(model, tokenizer, path, card=card)
    for name, value in asdict(figures).items():
        console.print(f"  {name:<14} {value:,.4g}" if isinstance(value, float) else f"  {name:<14} {value:,}")
    for sentence, best in guesses.items():
        console.print(f"  {sentence:<54} " + ", ".join(f"{token} {p:.2f}" for token, p in best), markup=False)
    console.print(f"{path}: {size:,} bytes")
    return figures


DEFAULTS = Recipe()


def main(
    path: Annotated[Path, typer.Argument(help="The directory to write; a checkpoint that stands there is replaced.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the text.")] = DEFAULTS.epochs,
    vocab_size: Annotated[int, typer.Option(min=200, help="Word pieces.")] = DEFAULTS.vocab_size,
    hidden_size: Annotated[int, typer.Option(help="A multiple of the heads.")] = DEFAULTS.hidden_size,
    layers: Annotated[int, typer.Option(min=1, help="Encoder layers.")] = DEFAULTS.num_hidden_layers,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads in a layer.")] = DEFAULTS.num_attention_heads,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = DEFAULTS.pairs.batch_size,
    max_length: Annotated[int, typer.Option(min=16, help="Tokens in a row.")] = DEFAULTS.pairs.max_length,
    mask_fraction: Annotated[float, typer.Option(help="Words masked.")] = DEFAULTS.pairs.mask_fraction,
    learning_rate: Annotated[float, typer.Option(help="At its peak.")] = DEFAULTS.learning_rate,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = DEFAULTS.seed,
    threads: Annotated[int, typer.Option(min=1, help="Of the arithmetic; part of what the bytes depend on.")] = 1,
    library: Annotated[Path | None, typer.Option(help="Read this folder of Python source files instead.")] = None,
) -> None:
    """Train a small BERT on Python's own documentation and write it in HuggingFace's layout."""
    torch.set_num_threads(threads)
    recipe = Recipe(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        epochs=epochs,
        learning_rate=learning_rate,
        seed=seed,
        pairs=PairRecipe(max_length=max_length, batch_size=batch_size, mask_fraction=mask_fraction),
    )
    console = Console()
    began = time.perf_counter()
    run(recipe, path, library=library, console=console)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    console.print(f"{time.perf_counter() - began:.0f} s, peak memory {peak / 2**20:.0f} MiB")


if __name__ == "__main__":
    typer.run(main)

"""Train small models, to try `generate`, `translate` and `classify` without a download.

    python -m scripts.small_models writer ./writer
    python -m scripts.small_models translator ./translator
    python -m scripts.small_models classifiers ./classifiers

The writer is a causal language model that has read the documentation that every Python carries, with the vocabulary of
the bundled checkpoint.  The translator is an encoder-decoder that has seen numbers below 10,000 in English and French
words, and is tested on numbers that it never saw.  The translator takes less than a minute, the writer some minutes;
both are saved as checkpoints that transformers loads, of a GPT and a Marian.  The classifiers say what a sentence of
documentation is about, fine-tuned from three starts: a BERT, an encoder with one matrix for each head, and nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

import porting
from porting.atomic import check_destination
from porting.embedded import embedded_checkpoint
from scripts.classification_scores import score
from scripts.docstring_corpus import read_standard_library
from scripts.text_classifier import Recipe, make_classifier
from scripts.text_classifier import save as save_classifier
from scripts.text_classifier import train as fine_tune

LENGTH = 48
"""Tokens of a row that the writer learns from."""

BATCH = 32
RATE = 2e-3
"""The learning rate at its highest; it rises over the first steps and falls as a cosine."""

LARGEST = 10_000
PAD, END = "<pad>", "</s>"

app = typer.Typer(add_completion=False, rich_markup_mode=None)
Destination = Annotated[Path, typer.Argument(help="The directory to make.")]
Steps = Annotated[int, typer.Option(min=1, help="How many batches to learn from.")]


@app.command()
def writer(destination: Destination, steps: Steps = 700) -> None:
    """Train a causal language model on the documentation of Python's standard library."""
    import transformers  # noqa: PLC0415  # it takes seconds, which --help need not wait for

    check_destination(destination, overwrite=False)
    tokenizer = Tokenizer.from_file(str(embedded_checkpoint() / "tokenizer.json"))
    start, end = (known_id(tokenizer, token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", start)])
    rows = text_rows(tokenizer, end)
    torch.manual_seed(0)
    config = transformers.OpenAIGPTConfig(
        vocab_size=tokenizer.get_vocab_size(), n_embd=192, n_layer=4, n_head=6, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=start, eos_token_id=end,
    )  # fmt: skip
    model: Any = transformers.OpenAIGPTLMHeadModel(config)  # Any: transformers has no types

    def loss(batch: Tensor) -> Tensor:
        logits = model(input_ids=batch[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    drawn = random.Random(0)  # noqa: S311 - repeatable on purpose
    train(model, (rows[drawn.choices(range(len(rows)), k=BATCH)] for _ in range(steps)), loss, steps)
    save(model, tokenizer, destination, eos_token_id=end, pad_token_id=0)


def known_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token.

    Raises:
        ValueError: the tokenizer does not have it.
    """
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        message = f"the tokenizer has no {token}"
        raise ValueError(message)
    return found


def text_rows(tokenizer: Tokenizer, end: int) -> Tensor:
    """All sentences of the corpus, one after another with an end between them, as rows [n LENGTH]."""
    sentences = [sentence for document in read_standard_library() for sentence in document.sentences]
    start = known_id(tokenizer, "[CLS]")
    ids = [
        token
        for encoding in tokenizer.encode_batch(sentences, add_special_tokens=False)
        for token in (start, *encoding.ids, end)
    ]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


@app.command()
def translator(destination: Destination, steps: Steps = 300) -> None:
    """Train an encoder-decoder to translate numbers from English to French."""
    import transformers  # noqa: PLC0415  # as above

    check_destination(destination, overwrite=False)
    pairs = [(english(number), french(number)) for number in range(LARGEST)]
    random.Random(0).shuffle(pairs)  # noqa: S311 - repeatable on purpose
    learnt, held_out = pairs[:-500], pairs[-500:]
    words = sorted({word for pair in pairs for text in pair for word in text.split()})
    vocabulary = {word: number for number, word in enumerate([PAD, END, "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - no password
    tokenizer.add_special_tokens([PAD, END, "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=len(vocabulary), d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=32, dropout=0.0,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, decoder_start_token_id=0, forced_eos_token_id=None,
        scale_embedding=True,
    )  # fmt: skip
    model: Any = transformers.MarianMTModel(config)
    drawn = random.Random(0)  # noqa: S311 - repeatable on purpose
    batches = (batch_of(tokenizer, drawn.choices(learnt, k=2 * BATCH)) for _ in range(steps))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        source, target = batch
        given = F.pad(target[:, :-1], (1, 0))  # it starts with the padding token, as Marian does
        logits = model(input_ids=source, attention_mask=source != 0, decoder_input_ids=given).logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)

    train(model, batches, loss, steps)
    source, target = batch_of(tokenizer, held_out)
    with torch.no_grad():
        found = model.generate(
            input_ids=source, attention_mask=source != 0, max_length=target.shape[1] + 1, do_sample=False
        )[:, 1:]
    found = F.pad(found, (0, target.shape[1] - found.shape[1]))
    right = int((found == target).all(1).sum())
    typer.echo(f"held out: {right} of {len(held_out)} numbers translated without an error")
    save(model, tokenizer, destination, eos_token_id=1, pad_token_id=0, decoder_start_token_id=0)


STARTS = (
    ("bert", "bert", False),
    ("per-head", "bert_into_encoder", False),
    ("nothing", "bert", True),
)
"""Of each start: its folder, the table that the bundled BERT is loaded through, whether every weight is random."""

TRAINING, HELD_OUT = 24, 40
"""Sentences of each label."""

NOUNS = {
    "files": (("file", "directory", "path", "archive"), ("folder", "filename", "symlink", "disk")),
    "network": (("server", "socket", "connection", "address"), ("client", "host", "port", "request")),
    "text": (("string", "character", "line", "word"), ("text", "letter", "encoding", "newline")),
    "time": (("hour", "minute", "date", "timezone"), ("second", "day", "month", "year")),
}
"""For each label the nouns of the training set, and those of the held-out sentences."""

SENTENCES = (
    "Return the {order} {noun}.",
    "Set the {order} {noun} to the given value.",
    "Raise an error if the {noun} is not valid.",
    "The {noun} is read only once.",
    "Create a new {noun} for the caller.",
    "Check whether the {order} {noun} is the same.",
)
ORDERS = ("first", "last", "next", "new", "old", "given")

SHOWN = "Raise an error if the client is not valid."
"""The sentence whose attention pages are written; its noun is in no sentence of the training set."""


@app.command()
def classifiers(
    destination: Destination,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the sentences.")] = 8,
    draws: Annotated[int, typer.Option(min=1, help="How often each start is trained.")] = 3,
) -> None:
    """Fine-tune a classifier from three starts, and write for each what it attends to, with the predicted label.

    Each start gets the same sentences, learning rate and number of steps.  The accuracy is given for each draw of the
    sentences and of the new weights; the first draw's classifiers are saved.
    """
    check_destination(destination, overwrite=False)
    destination.mkdir()
    torch.set_num_threads(1)  # the figures do not depend on the number of cores
    labels = tuple(sorted(NOUNS))
    typer.echo(
        f"{len(labels)} labels, {TRAINING} sentences of each; a guess is right {1 / len(labels):.0%} of the time"
    )
    for folder, table, drawn in STARTS:
        accuracies = []
        for seed in range(draws):
            learnt, held_out = sentences(seed, held_out=False), sentences(seed, held_out=True)
            classifier = make_classifier(embedded_checkpoint(), labels, table=table, random=drawn, seed=seed)
            recipe = Recipe(epochs=epochs, learning_rate=5e-4, seed=seed)
            texts, classes = [text for text, _ in learnt], [labels.index(label) for _, label in learnt]
            for _ in fine_tune(classifier, texts, classes, recipe):
                pass
            predicted = classifier.predict([text for text, _ in held_out]).argmax(-1).tolist()
            accuracies.append(score([labels.index(label) for _, label in held_out], predicted, labels).accuracy)
            if seed == 0:
                save_classifier(classifier, destination / folder, card=f"A classifier, fine-tuned from: {folder}.\n")
        answer = porting.classify(SHOWN, destination / folder, table=table)
        answer.save(destination / f"{folder}.html")
        each = ", ".join(f"{one:.2f}" for one in accuracies)
        typer.echo(f"from {folder}: held out {each}; {SHOWN!r}: {answer.label} {answer.guesses[0].probability:.0%}")
    typer.echo(f"saved: {destination}, with a page of each one's attention")


def sentences(seed: int, *, held_out: bool) -> list[tuple[str, str]]:
    """Sentences with their labels.

    Args:
        seed: of the draw.
        held_out: the sentences to test with, whose nouns are in no other sentence.
    """
    drawn = random.Random(f"{seed} {held_out}")  # noqa: S311 - repeatable on purpose
    found = []
    for label in sorted(NOUNS):
        for _ in range(HELD_OUT if held_out else TRAINING):
            noun = drawn.choice(NOUNS[label][held_out])
            found.append((drawn.choice(SENTENCES).format(order=drawn.choice(ORDERS), noun=noun), label))
    return found


def batch_of(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Source and target ids, [b s] and [b t], each with the end and padded with 0."""
    sides = []
    for texts in zip(*pairs, strict=True):
        rows = [torch.tensor(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]
        sides.append(nn.utils.rnn.pad_sequence(rows, batch_first=True))
    return sides[0], sides[1]


def train(model: nn.Module, batches: Iterator[Any], loss: Callable[[Any], Tensor], steps: int) -> None:
    """AdamW with warm-up and cosine decay; the mean loss is printed ten times."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    warm_up = max(steps // 10, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * step / steps)),
    )
    recent: list[float] = []
    for step, batch in enumerate(batches, 1):
        value = loss(batch)
        optimizer.zero_grad()
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(value.item())
        if step % max(steps // 10, 1) == 0:
            typer.echo(f"step {step} of {steps}: loss {sum(recent) / len(recent):.3f}")
            recent.clear()
    model.eval()


def save(model: Any, tokenizer: Tokenizer, destination: Path, **generation: int) -> None:
    """The directory that transformers loads, with the tokenizer beside it."""
    import transformers  # noqa: PLC0415  # as above

    settings: Any = transformers.GenerationConfig
    model.generation_config = settings(**generation)
    model.save_pretrained(destination)
    (destination / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    typer.echo(f"saved: {destination}")


ENGLISH = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
ENGLISH_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
FRENCH = [
    *("zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze", "douze", "treize"),
    *("quatorze", "quinze", "seize"),
]
FRENCH_TENS = ["vingt", "trente", "quarante", "cinquante", "soixante"]


def english(number: int) -> str:
    """A number below 10,000 in English words, without hyphens."""
    if number < len(ENGLISH):
        return ENGLISH[number]
    if number < 100:  # the base of the words
        tens, ones = divmod(number, 10)
        return " ".join([ENGLISH_TENS[tens - 2], *([english(ones)] if ones else [])])
    size, name = (1000, "thousand") if number >= 1000 else (100, "hundred")  # as above
    count, rest = divmod(number, size)
    return " ".join([english(count), name, *([english(rest)] if rest else [])])


def french(number: int) -> str:
    """A number below 10,000 in French words, without hyphens: 80 is four twenties, and 71 is sixty and eleven."""
    if number < len(FRENCH):
        return FRENCH[number]
    if number < 20:  # as in english
        return f"dix {FRENCH[number - 10]}"
    if number < 80:  # as in english
        tens = min(number // 10, 6)
        rest = number - 10 * tens
        joined = " et" if rest in (1, 11) else ""
        return f"{FRENCH_TENS[tens - 2]}{joined} {french(rest)}" if rest else FRENCH_TENS[tens - 2]
    if number < 100:  # as in english
        rest = number - 80
        return f"quatre vingt {french(rest)}" if rest else "quatre vingts"
    size, name = (1000, "mille") if number >= 1000 else (100, "cent")  # as in english
    count, rest = divmod(number, size)
    plural = "s" if name == "cent" and count > 1 and not rest else ""
    return " ".join([*([french(count)] if count > 1 else []), name + plural, *([french(rest)] if rest else [])])


if __name__ == "__main__":
    app()

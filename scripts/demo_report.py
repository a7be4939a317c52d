"""What the demo checkpoint has learnt, measured on documents that it never saw, and the model card that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from porting.models.bert_heads import BertForPreTraining
from scripts.sentence_pairs import IGNORED, Batch, PairRecipe, SpecialTokens, TokenizedDocument, draw_batches

SENTENCES = (
    "return the [MASK] of the string.",
    "raise an [MASK] if the file does not exist.",
    "this method is [MASK] when the connection is closed.",
    "return true if the [MASK] is empty.",
    "the default [MASK] is none.",
    "open the file and [MASK] its contents.",
    "create a new [MASK] object.",
    "this function returns a [MASK] of strings.",
    "write the [MASK] to the file.",
    "remove the first [MASK] from the list.",
)
"""In the manner of the corpus, and chosen before anything was trained."""

DRAWINGS = 4
"""How often the held-out sentences are paired anew; the pairs of one drawing share no sentence."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured on the held-out documents; the accuracies are fractions of 1.

    Attributes:
        masked_tokens: how many tokens were masked, by the recipe of the training at 15 %.
        top_1, top_5: how often the masked token was the model's first guess, or among its first five.
        unigram_top_1, unigram_top_5: the same for guessing the commonest tokens of the training documents every time.
        perplexity: of the masked tokens.
        pairs: how many sentence pairs one drawing has; half of them follow.
        next_sentence: how often the model told rightly whether B follows A, over all drawings; chance is 0.5.
    """

    masked_tokens: int
    top_1: float
    top_5: float
    unigram_top_1: float
    unigram_top_5: float
    perplexity: float
    pairs: int
    next_sentence: float

    @property
    def next_sentence_error(self) -> float:
        """The standard error of ``next_sentence``, as if there had been one drawing: the others hold the same text."""
        return math.sqrt(self.next_sentence * (1 - self.next_sentence) / max(self.pairs, 1))


def pretraining_logits(model: BertForPreTraining, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Both heads' logits; the vocabulary's, which cost the most, only where a word is masked.

    Returns:
        MLM logits ``(masked, vocab_size)``, their labels ``(masked,)``, and NSP logits ``(batch, 2)``.
    """
    encoded = model.bert(batch.input_ids, batch.attention_mask, batch.token_type_ids)
    masked = batch.labels != IGNORED
    mlm_logits = model.mlm(encoded.last_hidden_state[masked], model.bert.embeddings.word.weight)
    return mlm_logits, batch.labels[masked], model.nsp(encoded.pooled)


@torch.no_grad()
def measure(
    model: BertForPreTraining,
    *,
    held_out: Sequence[TokenizedDocument],
    learnt: Sequence[TokenizedDocument],
    tokens: SpecialTokens,
    pairing: PairRecipe,
) -> Figures:
    """Take the figures. The masks and the pairs are the same for every model.

    Args:
        model: in evaluation mode.
        held_out: the documents to measure on.
        learnt: the documents it was trained on, whose commonest tokens are the baseline.
        tokens: the vocabulary's special tokens.
        pairing: how the training cut and paired; masks are drawn at 15 % whatever the training's rate.
    """
    counts = torch.zeros(len(tokens.special), dtype=torch.long)
    for document in learnt:
        counts += torch.bincount(torch.tensor(sum(document.sentences, ())), minlength=len(counts))
    commonest = counts.topk(5).indices
    masked, hits, unigram_hits, surprise = 0, torch.zeros(2), torch.zeros(2), 0.0
    for batch in draw_batches(held_out, tokens=tokens, recipe=replace(pairing, mask_fraction=0.15), seed=1):
        logits, labels, _ = pretraining_logits(model, batch)
        masked += len(labels)
        hits += _hits(logits.topk(5).indices, labels)
        unigram_hits += _hits(commonest.expand(len(labels), -1), labels)
        surprise += F.cross_entropy(logits, labels, reduction="sum").item()
    pairs = right = 0
    unmasked = replace(pairing, mask_fraction=0.0, lone_fraction=0.0)
    for seed in range(DRAWINGS):
        for batch in draw_batches(held_out, tokens=tokens, recipe=unmasked, seed=seed):
            _, _, logits = pretraining_logits(model, batch)
            asked = batch.next_sentence_label != IGNORED
            pairs += int(asked.sum())
            right += int((logits.argmax(dim=1) == batch.next_sentence_label)[asked].sum())
    (top_1, top_5), (unigram_top_1, unigram_top_5) = (
        (found / max(masked, 1)).tolist() for found in (hits, unigram_hits)
    )
    return Figures(
        masked_tokens=masked,
        top_1=top_1,
        top_5=top_5,
        unigram_top_1=unigram_top_1,
        unigram_top_5=unigram_top_5,
        perplexity=math.exp(surprise / max(masked, 1)),
        pairs=pairs // DRAWINGS,
        next_sentence=right / max(pairs, 1),
    )


def _hits(guesses: Tensor, labels: Tensor) -> Tensor:
    """How many labels ``(n,)`` are the first of their guesses ``(n, 5)``, and how many are any of them: ``(2,)``."""
    right = guesses == labels[:, None]
    return torch.stack([right[:, 0].sum(), right.any(dim=1).sum()])


@torch.no_grad()
def fill(model: BertForPreTraining, tokenizer: Tokenizer, sentence: str) -> list[tuple[str, float]]:
    """The five likeliest tokens for the ``[MASK]`` of a sentence, with their probabilities, the likeliest first."""
    encoding = tokenizer.encode(sentence)
    logits = model(torch.tensor([encoding.ids])).mlm_logits[0, encoding.tokens.index("[MASK]")]
    best = torch.softmax(logits, dim=-1).topk(5)
    return [
        (str(tokenizer.id_to_token(token)), float(probability))
        for token, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def model_card(
    *, figures: Figures, guesses: Mapping[str, Sequence[tuple[str, float]]], facts: Mapping[str, object], command: str
) -> str:
    """The README.md that lies beside the weights.

    Args:
        figures: what was measured.
        guesses: sentences with a mask, and what :func:`fill` gave.
        facts: what else is to be told of the making, as the rows of a table.
        command: what to type to make the checkpoint again.
    """
    percent = "{:.1f} %".format
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    examples = "\n".join(
        f"| {sentence} | {', '.join(f'{token} {probability:.2f}' for token, probability in best)} |"
        for sentence, best in guesses.items()
    )
    return f"""# The embedded checkpoint

A small BERT, trained from nothing on the documentation that every Python carries with it: the docstrings of
the standard library and of the built-in modules, and the topics of `help()`. It is what the command line takes
when it is given no checkpoint. It is real: it was trained on both tasks of the paper (Devlin et al. 2019,
section 3.1), so its biases and norms have moved and its attention has found something to attend to. It is
small: it has read a few hundred thousand words of one kind of prose, and is of no use for any other.

| | |
| --- | --- |
{rows}

Make it again, in some minutes on two cores, from the top of the repository:

    {command}

The same Python, libraries, machine and number of threads give the same bytes; another Python has other docstrings.

## Measured on packages that were held out

| | this model | baseline |
| --- | --- | --- |
| masked token, first guess | {percent(100 * figures.top_1)} | {percent(100 * figures.unigram_top_1)} |
| masked token, among five guesses | {percent(100 * figures.top_5)} | {percent(100 * figures.unigram_top_5)} |
| next sentence | {percent(100 * figures.next_sentence)} ± {100 * figures.next_sentence_error:.1f} | 50.0 % |

{figures.masked_tokens:,} masked tokens, 15 % of the words, perplexity {figures.perplexity:.1f}; the baseline guesses
the commonest tokens of the training text. {figures.pairs} sentence pairs, drawn {DRAWINGS} times, half of them in
sequence and half with a B from another package; the standard error is that of one drawing.

## What it says

| sentence | its five guesses, with their probabilities |
| --- | --- |
{examples}

## Licence

The weights are under the licence of this repository. The text they were trained on is part of Python, under the Python
Software Foundation License.
"""

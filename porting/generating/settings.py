"""The settings of a checkpoint for generation: where a row starts and ends, and which tokens are ruled out.

It stands in ``generation_config.json``, in older checkpoints in ``config.json``.  The rules are those of transformers'
``generate``, in its order; how it searches (``do_sample``, ``num_beams``) is not taken from there, but asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from porting.checkpoint.strict_json import JsonError, parse
from porting.errors import Code, Fault, PortingError
from porting.opening import Folder
from porting.printable import shown

FILE = "generation_config.json"
LARGEST = 1 << 20
"""Bytes of the file."""

MOST = 1 << 31
"""Numbers of larger size mean nothing that can be done."""

LEAST_PENALTY = 1e-6
"""The smallest number that scores are divided by, as a penalty; smaller ones leave no numbers."""

STEEPEST = 32
"""The largest power of a length: beyond it, the power of a long row is not a number."""

UNKNOWN = (
    "begin_suppress_tokens",
    "constraints",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_decoder_ids",
    "guidance_scale",
    "num_beam_groups",
    "sequence_bias",
)
"""Fields that change what is generated, and are not done here."""


class GenerationError(PortingError):
    """Text cannot be generated as was asked for."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How rows start, end and are held to rules; ids of tokens throughout.

    Attributes:
        start: the decoder's first token; None without a decoder.
        forced_first, forced_last: the only tokens allowed at the second place of a row, and at its last.
        banned: sequences that may not occur; of one token each, that token may not.
        min_length: a shorter row does not end; the prompt counts, as the decoder's first token does.
        min_new_tokens: nor does one to which fewer tokens were added.
        repetition_penalty: scores of tokens that occurred are divided by it, negative ones multiplied.
        no_repeat: no sequence of so many tokens occurs twice; 0 for no such rule.
        length_penalty: the power of the length that a beam's log-probability is divided by.
        early_stopping: True ends a search when as many beams have ended as there are, None only when none can be
            better at any length, False by the usual estimate.
        ignored: fields of the checkpoint that are not done here.
    """

    ends: frozenset[int] = frozenset()
    start: int | None = None
    forced_first: tuple[int, ...] = ()
    forced_last: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    suppressed: tuple[int, ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    no_repeat: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | None = False
    ignored: tuple[str, ...] = ()

    def ruled(self, rows: Tensor, scores: Tensor, *, prompt: int, longest: int) -> Tensor:
        """Scores under the rules: what may not follow gets minus infinity.

        Args:
            rows: [n t], the tokens so far.
            scores: [n v], logits or log-probabilities of what follows.

        Returns:
            [n v].
        """
        scores, length = scores.clone(), rows.shape[1]
        if self.repetition_penalty != 1.0:
            seen = scores.gather(1, rows)
            seen = torch.where(seen < 0, seen * self.repetition_penalty, seen / self.repetition_penalty)
            scores.scatter_(1, rows, seen)
        for number, row in enumerate(rows.tolist()):
            out = _repeating(row, self.no_repeat)
            for size, last in self._banned_after.items():
                out += last.get(tuple(row[length - size :]), ()) if size <= length else ()
            scores[number, out] = -torch.inf
        if length < self.min_length or length - prompt < self.min_new_tokens:
            scores[:, list(self.ends)] = -torch.inf
        for forced, place in ((self.forced_first, 1), (self.forced_last, longest - 1)):
            if forced and length == place:
                scores = torch.full_like(scores, -torch.inf)
                scores[:, list(forced)] = 0.0
        scores[:, list(self.suppressed)] = -torch.inf
        if bool((scores.isnan() | scores.isposinf()).any()):
            message, hint = "the scores of the next token are NaN or infinite", "run `porting verify` on this model"
            raise GenerationError(Fault(code=Code.NOT_FINITE, message=message, hint=hint))
        return scores

    @cached_property
    def _banned_after(self) -> Mapping[int, Mapping[tuple[int, ...], list[int]]]:
        """The last tokens of banned sequences, by the length of what stands before them and by that itself.

        A step then looks as many beginnings up as there are lengths, however many sequences there are.
        """
        found: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for *before, last in self.banned:
            if before or last not in self.ends:
                found.setdefault(len(before), {}).setdefault(tuple(before), []).append(last)
        return found


def _repeating(row: Sequence[int], size: int) -> list[int]:
    """The tokens that would repeat a sequence of ``size`` tokens.

    >>> _repeating([3, 4, 5, 3, 4], 3)
    [5]
    """
    if size < 1 or len(row) + 1 < size:
        return []
    last = row[len(row) - size + 1 :]
    starts = range(len(row) - size + 1)
    return [row[start + size - 1] for start in starts if row[start : start + size - 1] == last]


def read_settings(folder: Folder | None, config: Mapping[str, object], *, decoder: bool, vocabulary: int) -> Settings:
    """The settings of a checkpoint."""
    fields = dict(config)
    where = "config.json"
    if folder is not None and folder.kind(FILE) in {"a file", "a link"}:
        where = str(folder.path / FILE)
        try:
            content = parse(folder.read(FILE, limit=LARGEST), where=where, allow_nan=True)
        except JsonError as error:
            raise _malformed(where, f"it cannot be read: {error}") from error
        if not isinstance(content, Mapping):
            raise _malformed(where, "it is JSON but not an object")
        kept = ("bos_token_id", "pad_token_id", "decoder_start_token_id")  # a start there has to be
        fields = {name: config[name] for name in kept if name in config}
        fields |= {name: value for name, value in content.items() if value is not None}
    reader = _Fields(fields, where, vocabulary)
    starts = [reader.ids(name) for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id")]
    stopping = fields.get("early_stopping", False)
    return Settings(
        ends=frozenset(reader.ids("eos_token_id")),
        start=next((one[0] for one in starts if one), 0) if decoder else None,
        forced_first=reader.ids("forced_bos_token_id"),
        forced_last=reader.ids("forced_eos_token_id"),
        banned=reader.sequences("bad_words_ids"),
        suppressed=reader.ids("suppress_tokens"),
        min_length=int(reader.number("min_length", 0)),
        min_new_tokens=int(reader.number("min_new_tokens", 0)),
        repetition_penalty=reader.number("repetition_penalty", 1.0, least=LEAST_PENALTY),
        no_repeat=int(reader.number("no_repeat_ngram_size", 0)),
        length_penalty=float(reader.number("length_penalty", 1.0, STEEPEST)),
        early_stopping=None if stopping == "never" else stopping is True,
        ignored=tuple(name for name in UNKNOWN if fields.get(name) not in (None, 0, 1, False, [], {})),
    )


class _Fields:
    """Fields of a JSON file by the kind that they should have."""

    def __init__(self, fields: Mapping[str, object], where: str, vocabulary: int) -> None:
        self._fields, self._where, self._vocabulary = fields, where, vocabulary

    def ids(self, name: str) -> tuple[int, ...]:
        """Ids of tokens: one, or a list of them; each once."""
        value = self._fields.get(name)
        found = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(one) is int and 0 <= one < self._vocabulary for one in found):
            raise _malformed(self._where, f"{name} is {shown(value)}, and ids of tokens are expected")
        return tuple(dict.fromkeys(found))

    def sequences(self, name: str) -> tuple[tuple[int, ...], ...]:
        """A list of lists of ids, each once; one with an id beyond the vocabulary never occurs, and is left out."""
        value = self._fields.get(name) or []
        if not isinstance(value, list) or not all(
            isinstance(one, list) and one and all(type(token) is int and token >= 0 for token in one) for one in value
        ):
            raise _malformed(self._where, f"{name} is {shown(value)}, and lists of ids of tokens are expected")
        return tuple(one for one in dict.fromkeys(map(tuple, value)) if max(one) < self._vocabulary)

    def number(self, name: str, default: float, most: int = MOST, least: float = -math.inf) -> float:
        """A number between two; of either sign, up to a largest size, where no least one is given."""
        value = self._fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _malformed(self._where, f"{name} is {shown(value)}, and a number is expected")
        least = max(least, -most)
        if not least <= value <= most:  # as NaN is not either
            raise _malformed(self._where, f"{name} is {shown(value)}, and a number from {least} to {most} is expected")
        return value


def _malformed(where: str, message: str) -> GenerationError:
    hint = "take the file from where the checkpoint came from"
    return GenerationError(Fault(code=Code.CONFIG_INVALID, where=where, message=message, hint=hint))

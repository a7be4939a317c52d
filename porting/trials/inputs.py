"""Inputs that show as much of a model as they can, and their way through the table's [inputs].

A short batch with rows of different lengths, padded, in as many segments as the model knows; one row of the longest
length that the model takes, so that its last position is used; and, where that is affordable, rows for the words that
did not occur yet.  No word comes twice before all have come once.  Everything is drawn from a seed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from porting.checkpoint.strict_json import parse
from porting.errors import Code, Fault, Message, Option, PortingError, VerifyError, nearest
from porting.limits import charge, charge_text
from porting.notation.axes import Mismatch, size_of, solve_all
from porting.notation.rule import MASK_KINDS, Rule
from porting.opening import Folder
from porting.plan.align import align
from porting.plan.move import forward
from porting.plan.recipe import TensorSpec
from porting.trials.derived_inputs import NAMES, source_of, with_derived
from porting.trials.modalities import DECODER, DECODER_IDS, IDS, POSITIONS
from porting.trials.padding import DECODER_MASK, MASK

PADDED = "padded"

LENGTHS = (24, 21, 17, 13, 9, 6, 4, 1)
"""Tokens in each row of the short batch: one row has no padding, and one is padding but for a token."""

REST = 1024
"""If at most this many token ids are left after the other batches, they get one of their own, in rows of ``WIDTH``."""

WIDTH = 64

USUAL = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
)
"""Arguments of the reference that a table may speak of though a case does not give them."""


@dataclass(frozen=True)
class Case:
    """One batch, as the reference takes it.

    Attributes:
        inputs: forward argument -> tensor; ``attention_mask`` is [b s], 1 = attend.
        known: what the reference's forward takes besides, and this batch does not have.
    """

    name: str
    inputs: Mapping[str, Tensor]
    known: frozenset[str] = frozenset()


class Maker:
    """Makes batches, one after the other, and deals words that did not occur before.

    Args:
        config: the checkpoint's config: ``vocab_size``, ``max_position_embeddings`` (without it a row may have any
            length, as with relative positions), ``type_vocab_size`` (without it there are no token types),
            ``pad_token_id``; ``is_encoder_decoder``, ``decoder_start_token_id``.
        seed: of everything that is drawn.
        longest: no row is longer than this, whatever the model takes.
        special: ids that have to occur; see :func:`special_tokens`.
        choices: the model takes [b c s] with this many choices; None for [b s].
        padding_words: ``pad_token_id`` stands where the mask says padding, and may stand elsewhere.  False for a
            reference that counts the words that are not padding to find their positions: what the mask says is padding
            is a word like any other then, and has the position where it stands.
        never: ids that no row holds, since they stand for something else: the places of a picture.
        padding_kept: the padding token may stand where the mask keeps it; not so for a port that masks it by itself.
        full: every row is padded to the longest length: a port may take no other.
        padded: rows of a batch have different lengths.  Without, all are as long as the longest of them: a port may
            refuse padding.
        ending: the token that ends each row, and stands nowhere else: the model reads its output there.

    Attributes:
        longest: no row is longer than this.
        padded: rows of a batch have different lengths.

    Raises:
        VerifyError: the config does not say what is needed.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        *,
        seed: int,
        longest: int = 512,
        special: Sequence[int] = (),
        choices: int | None = None,
        padding_words: bool = True,
        never: Collection[int] = (),
        padding_kept: bool = True,
        full: bool = False,
        padded: bool = True,
        ending: int | None = None,
    ) -> None:
        self._ending = ending
        self.padded = padded
        self._vocabulary = _integer(config, "vocab_size")
        self.longest = max(min(longest, _integer(config, "max_position_embeddings", longest)), 1)
        self._config = config
        self._choices = choices
        self._types = _integer(config, "type_vocab_size", 0)
        self._padding = _integer(config, "pad_token_id", 0)
        self._padding_words = padding_words
        self._padding_kept = padding_kept
        self._full = full
        self._never = frozenset(never)
        self._generator = torch.Generator().manual_seed(seed)
        known = list(dict.fromkeys(one for one in special if 0 <= one < self._vocabulary))
        self._words = TokenSampler(self._vocabulary, known, self._generator)
        others = decoder_words(config) or self._vocabulary
        self._others = TokenSampler(others, (), self._generator)  # for a decoder

    def first(self) -> list[Case]:
        """The batches to begin with."""
        lengths = [min(length, self.longest) for length in LENGTHS]
        cases = [self.case(self.described(lengths), lengths)]
        together = self._choices or 1  # one question with its choices
        if self.longest > max(lengths):
            name = f"{together} row{'s' if together > 1 else ''} of {self.longest} tokens"
            cases.append(self.case(name, [self.longest] * together))
        if 0 < self._words.left <= REST:
            width = min(self.longest, WIDTH)
            count = -(-self._words.left // (width * together)) * together
            cases.append(self.case(f"{count} rows of {width} tokens with the remaining token ids", [width] * count))
        return cases

    def described(self, lengths: Sequence[int]) -> str:
        """The name of a batch with rows of these lengths: ``4 rows of 3 to 11 tokens, padded``."""
        if not self.padded:
            return f"{len(lengths)} rows of {max(lengths)} tokens"
        return f"{len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens, {PADDED}"

    def case(self, name: str, rows: Sequence[int]) -> Case:
        """A batch with rows of these lengths; with choices there are as many rows as make up whole questions."""
        rows = rows if self.padded else [max(rows)] * len(rows)
        rows = [*rows, *([rows[-1]] * (-len(rows) % (self._choices or 1)))]
        inputs = _batch(rows, self._words, self._types, self._padding)
        if not self._padding_words:
            inputs["input_ids"] = _without(self._padding, inputs["input_ids"], self._vocabulary, self._generator)
        elif not self._padding_kept:
            inputs["input_ids"] = self._only_padded(inputs["input_ids"], inputs[MASK], self._vocabulary)
        if self._never:
            inputs["input_ids"] = _but(self._never, inputs["input_ids"], self._vocabulary, self._generator)
        if self._ending is not None:
            inputs["input_ids"] = self._ended(inputs["input_ids"], rows)
        if self._config.get("is_encoder_decoder") is True:
            inputs |= _target(rows, self.longest, self._others, self._padding, self._config)
            if not self._padding_kept:
                size, kept = decoder_words(self._config) or self._vocabulary, inputs[DECODER_MASK][:, 1:]
                first, later = inputs[DECODER_IDS].tensor_split([1], dim=1)  # the start token may be the padding token
                inputs[DECODER_IDS] = torch.cat([first, self._only_padded(later, kept, size)], 1)
        if self._full:
            inputs = lengthened(inputs, self.longest, self._padding)
        if self._choices:
            inputs = {key: value.view(-1, self._choices, value.shape[-1]) for key, value in inputs.items()}
        return Case(name, inputs)

    def _ended(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """The ids with the token that ends a row at the end of each, and another one wherever else it stands."""
        ending = self._ending or 0
        inner = torch.arange(ids.shape[-1]) < torch.tensor(lengths)[:, None]
        ids = torch.where(inner, _without(ending, ids, self._vocabulary, self._generator), ids)
        ids[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = ending
        return ids

    def _only_padded(self, ids: Tensor, mask: Tensor, vocabulary: int) -> Tensor:
        """The ids with the padding token where the mask is 0, and with another one elsewhere."""
        return torch.where(mask == 0, self._padding, _without(self._padding, ids, vocabulary, self._generator))


def _batch(lengths: Sequence[int], words: TokenSampler, types: int, padding: int, width: int = 0) -> dict[str, Tensor]:
    width = max(*lengths, width)
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    segments = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
        for kind in range(1, min(types, length)):  # as many segments as the model knows, of about equal length
            segments[row, kind * length // types :] = kind
        segments[row, length:] = 0
    ids = torch.full(mask.shape, padding)
    ids[mask == 1] = words.draw(sum(lengths))
    return {"input_ids": ids, "attention_mask": mask, **({"token_type_ids": segments} if types else {})}


def lengthened(inputs: Mapping[str, Tensor], width: int, padding: int) -> dict[str, Tensor]:
    """Rows of tokens, made longer at their ends for a model that takes no shorter ones.

    Args:
        inputs: token ids, masks, segments and positions [b s], whole numbers, and those of a decoder [b t]; other
            tensors stay as they are.
        width: the length of each row afterwards.
        padding: the padding token, which fills rows that have a mask. Without one a row goes on with its own tokens.

    Returns:
        The inputs [b width]: new places have 0 in a mask, segment 0, and positions that go on from the last.
    """
    found = dict(inputs)
    for prefix in ("", DECODER):
        ids, mask = inputs.get(f"{prefix}{IDS}"), inputs.get(f"{prefix}{MASK}")
        if ids is None or (more := width - ids.shape[-1]) <= 0:
            continue
        for name, one in inputs.items():
            if one.shape != ids.shape or one.is_floating_point() or name.startswith(DECODER) != bool(prefix):
                continue
            if one is ids and mask is None:
                found[name] = one[..., torch.arange(width) % one.shape[-1]]
                continue
            filler = torch.full_like(one[..., :1].expand(*one.shape[:-1], more), padding if one is ids else 0)
            if name == POSITIONS:
                filler = (one[..., -1:] + torch.arange(1, more + 1)).clamp_max(width - 1)
            found[name] = torch.cat([one, filler], -1)
    return found


def _target(
    lengths: Sequence[int], longest: int, words: TokenSampler, padding: int, config: Mapping[str, object]
) -> dict[str, Tensor]:
    """The inputs of the decoder of an encoder-decoder: rows that begin with its start token, padded as well.

    They are shorter than the source's, unless these are of the longest length, so that neither can be taken for the
    other; and the longest of them goes with the shortest source.
    """
    others = [length if length == longest else max(3 * length // 4, 1) for length in reversed(lengths)]
    given = _batch(others, words, 0, padding)
    given["input_ids"][:, 0] = _integer(config, "decoder_start_token_id", padding)
    return {f"{DECODER}{name}": value for name, value in given.items()}


def _without(padding: int, ids: Tensor, vocabulary: int, generator: torch.Generator) -> Tensor:
    """The ids, with another word in each place of the padding word."""
    if vocabulary < 2:  # there is no other word
        return ids
    others = torch.randint(0, vocabulary - 1, ids.shape, generator=generator)
    return torch.where(ids == padding, others + (others >= padding), ids)


def _but(never: Collection[int], ids: Tensor, vocabulary: int, generator: torch.Generator) -> Tensor:
    """The ids, with another word in each place of those that must not occur."""
    allowed = torch.tensor([one for one in range(vocabulary) if one not in never])
    if not len(allowed):
        return ids
    others = allowed[torch.randint(0, len(allowed), ids.shape, generator=generator)]
    return torch.where(torch.isin(ids, torch.tensor(sorted(never))), others, ids)


OTHER_POSITIONS = (
    "n_positions", "max_source_positions", "max_target_positions", "block_size", "max_sequence_length",
    "max_seq_length", "max_seq_len", "sequence_length", "seq_length", "seq_len", "context_length", "context_size",
    "ctx_len", "n_ctx", "num_positions", "n_position", "max_positions", "max_position",
)  # fmt: skip
"""Names of the number of positions in configs, the likeliest first."""


def positions_of(config: Mapping[str, object]) -> int | None:
    """How many positions a config says there are; None where it says nothing.

    >>> positions_of({"n_ctx": 64}), positions_of({"vocab_size": 9})
    (64, None)
    """
    known = (config.get(name) for name in ("max_position_embeddings", *OTHER_POSITIONS))
    return next((one for one in known if isinstance(one, int) and one > 0), None)


def decoder_words(config: Mapping[str, object]) -> int:
    """The size of a decoder's own vocabulary; 0 where the config speaks of none.

    >>> decoder_words({"vocab_size": 9, "decoder": {"vocab_size": 7}}), decoder_words({"vocab_size": 9})
    (7, 0)
    """
    inner = config.get("decoder")
    found = [config.get("decoder_vocab_size"), config.get("tgt_vocab_size")]
    found += [inner.get("vocab_size")] if isinstance(inner, Mapping) else []
    return next((one for one in found if isinstance(one, int) and one > 0), 0)


def integers(config: Mapping[str, object]) -> list[int]:
    """The whole numbers of a config, also those of its parts, that may be a length at which something turns."""
    found: dict[int, None] = {}
    for value in config.values():
        parts = value if isinstance(value, list | tuple) else [value]
        for one in parts:
            if isinstance(one, Mapping):
                found |= dict.fromkeys(integers(one))
            elif isinstance(one, int) and not isinstance(one, bool) and one > 1:
                found[one] = None
    return list(found)


def _integer(config: Mapping[str, object], field: str, default: int | None = None) -> int:
    value = config.get(field, default)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        message = f"config.json has {field} = {value!r}, inputs cannot be made without a number"
        raise VerifyError(Fault(code=Code.NO_INPUTS, message=message, hint=Message("pass ", Option("inputs"))))
    return value


def special_tokens(folder: Folder | None, config: Mapping[str, object]) -> list[int]:
    """The ids of the special tokens: those of ``tokenizer.json`` or ``vocab.txt``, and those that the config names."""
    named = [value for field, value in config.items() if field.endswith("_token_id")]
    found = [one for one in named if isinstance(one, int) and not isinstance(one, bool)]
    try:
        if folder is not None and folder.kind("tokenizer.json"):
            content = parse(folder.read("tokenizer.json", limit=LARGEST), allow_nan=True)
            tokens = content.get("added_tokens") if isinstance(content, dict) else None
            listed = [one for one in tokens if isinstance(one, dict)] if isinstance(tokens, list) else []
            found += [number for one in listed if one.get("special") and type(number := one.get("id")) is int]
        elif folder is not None and folder.kind("vocab.txt"):
            raw = folder.read("vocab.txt", limit=LARGEST)
            charge_text(raw, where="vocab.txt")
            charge("objects", raw.count(b"\n"), where="vocab.txt")
            lines = raw.decode("utf-8").splitlines()
            found += [number for number, line in enumerate(lines) if _SPECIAL.fullmatch(line)]
    except (PortingError, ValueError):  # a hint for better inputs, not worth a failure
        return found
    return found


LARGEST = 256 << 20
"""Bytes of a file of a tokenizer."""

_SPECIAL = re.compile(r"\[[A-Z]+\]|<[a-z]+>")


def named_inputs(rules: Sequence[Rule], case: Case, *, masks: Collection[str] = ()) -> Case:
    """The case without what the table's [inputs] does not name: the port has no such input, so neither side gets it.

    When [inputs] names what the reference does not have, nothing is left out: :func:`for_port` says what is wrong.  The
    port of an encoder alone names no input of a decoder: the reference keeps those, which it cannot run without.

    Args:
        rules: the table's [inputs].
        case: as the reference takes it.
        masks: of these the reference is given all, for a port that takes none and hides the padding token by itself.
    """
    named = {source_of(str(rule.sources[0].key)) for rule in rules}
    if not named or not named <= {*case.inputs, *USUAL}:
        return case
    if not any(name.startswith(DECODER) for name in named):
        named |= {name for name in case.inputs if name.startswith(DECODER)}
    named |= {*masks}
    name = case.name if MASK in named else case.name.replace(PADDED, f"{PADDED} and without a mask")
    return Case(name, {name: value for name, value in case.inputs.items() if name in named})


def withheld(made: Sequence[Case], given: Sequence[Case]) -> tuple[str, ...]:
    """The arguments that :func:`named_inputs` left out."""
    return tuple(
        sorted({name for case in made for name in case.inputs} - {name for case in given for name in case.inputs})
    )


def for_port(
    rules: Sequence[Rule], inputs: Mapping[str, Tensor], dtype: torch.dtype, known: Collection[str] = ()
) -> dict[str, Tensor]:
    """The port's forward arguments from the reference's, by the table's [inputs].

    Without rules they are the reference's.  A target ``mask -> bool`` gets True = attend, ``-> padding`` True =
    ignore, ``-> additive`` 0 = attend and the lowest number of ``dtype`` = ignore; without one of these the tensor is
    passed as it is.  A rule's source may be one of :mod:`porting.trials.derived_inputs`.

    Args:
        rules: the table's [inputs].
        inputs: what the reference is given.  A rule for another of its arguments is left out: no side gets it.
        known: its other arguments, besides the usual ones.

    Raises:
        VerifyError: a rule does not fit the inputs, or takes what no reference has.
    """
    if not rules:
        return dict(inputs)
    inputs = with_derived((str(rule.sources[0].key) for rule in rules), inputs)
    faults = [
        Fault(
            code=Code.NO_INPUTS,
            where=rule.where,
            message=f"[inputs] takes {name!r}, the reference is given {', '.join(inputs)}",
            hint=nearest(name, [*inputs, *NAMES]),
        )
        for rule in rules
        for name in [str(rule.sources[0].key)]
        if name not in inputs and name not in (*USUAL, *NAMES, *known)
    ]
    faults += [
        Fault(
            code=Code.NO_INPUTS,
            where=rule.where,
            message=f"an input can be given as {', '.join(MASK_KINDS)}, not as {rule.targets[0].output!r}",
            hint=nearest(rule.targets[0].output, MASK_KINDS),
        )
        for rule in rules
        if rule.targets[0].output not in ("", *MASK_KINDS)
    ]
    rules = [rule for rule in rules if str(rule.sources[0].key) in inputs]
    given = {str(rule.targets[0].key).partition(" -> ")[0]: torch.empty(0) for rule in rules}  # in this order
    for rule in filter(_only_renames, rules):
        name, _, kind = str(rule.targets[0].key).partition(" -> ")
        given[name] = _mask(inputs[str(rule.sources[0].key)], kind, dtype)
    rules = [rule for rule in rules if not _only_renames(rule)]
    sources = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
    targets = {str(rule.targets[0].key): _shape(rule, sources) for rule in rules}
    alignment = align(rules, sources, targets)
    faults += alignment.faults
    if faults:
        raise VerifyError(faults)
    shapes = {name: TensorSpec(shape, torch.long) for name, shape in targets.items()}
    for step in alignment.steps:
        for point, value in forward(step, shapes, inputs.__getitem__):
            name, _, kind = point.partition(" -> ")
            own = inputs[step.sources[0]]
            same = own.shape == value.shape and torch.equal(own, value)
            given[name] = _mask(own if same else value, kind, dtype)  # as it lies in memory
    return given


def _only_renames(rule: Rule) -> bool:
    """Whether an argument is passed on as it is, or as another kind of mask."""
    terms = (*rule.sources, *rule.targets)
    named = not any(term.axes is not None or "{" in str(term.key) for term in terms)
    return len(terms) == 2 and rule.formula is None and named


def _shape(rule: Rule, sources: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the rule's target, from its source's."""
    source, target = rule.sources[0], rule.targets[0]
    shape = sources.get(str(source.key), ())
    if target.axes is None or source.axes is None or len(source.axes) != len(shape):
        return shape
    sizes: dict[str, int] = {}
    try:
        solve_all(list(zip(source.axes, shape, strict=True)), sizes)
    except Mismatch:
        return shape  # align() says what does not fit
    return tuple(size_of(axis, sizes) or 1 for axis in target.axes)


def _mask(value: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    match kind:
        case "bool":
            return value.bool()
        case "padding":
            return ~value.bool()
        case "additive":
            zeros = torch.zeros(value.shape, dtype=dtype)
            return zeros.masked_fill(~value.bool(), torch.finfo(dtype).min)
    return value


class TokenSampler:
    """Draws every token id once, those that have to occur first; then token ids at random.

    So few tokens show as many rows of an embedding as they can.

    Args:
        size: how many token ids there are, from 0.
        generator: of the order, and of what comes after the last.

    >>> sampler = TokenSampler(5, (3,), torch.Generator().manual_seed(0))
    >>> sorted(sampler.draw(2).tolist() + sampler.draw(3).tolist()), sampler.left
    ([0, 1, 2, 3, 4], 0)
    """

    def __init__(self, size: int, first: Sequence[int], generator: torch.Generator) -> None:
        self._size = size
        self._generator = generator
        known = dict.fromkeys(first)
        others = [one for one in torch.randperm(size, generator=generator).tolist() if one not in known]
        self._ids = torch.tensor([*known, *others], dtype=torch.long)

    @property
    def left(self) -> int:
        """How many token ids have not been drawn."""
        return len(self._ids)

    def draw(self, count: int) -> Tensor:
        """Draw ``count`` token ids, [count], in a random order."""
        drawn, self._ids = self._ids[:count], self._ids[count:]
        more = torch.randint(0, self._size, (count - len(drawn),), generator=self._generator)
        return torch.cat([drawn, more])[torch.randperm(count, generator=self._generator)]

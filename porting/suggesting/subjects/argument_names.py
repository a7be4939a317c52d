"""The meanings of the arguments of a forward, by their names and order, and their lines in a table's [inputs]."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import permutations, product

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, Message, VerifyError, Wording, nearest
from porting.frames import place_of
from porting.notation.rule import MASK_KINDS, Rule, Term, make_input_rule
from porting.suggesting.subjects.config_fields import normal
from porting.suggesting.subjects.questions import Asker, what_argument
from porting.target import with_arguments
from porting.trials.derived_inputs import CAUSAL, CAUSAL_ATTENTION, LENGTHS, NAMES, SQUARE_ATTENTION, source_of
from porting.trials.inputs import for_port
from porting.trials.modalities import (
    DECODER,
    DECODER_IDS,
    EMBEDDED,
    FEATURES,
    IDS,
    PIXELS,
    POSITIONS,
    SAMPLES,
    SEGMENTS,
    VIDEOS,
    embedded,
)
from porting.trials.padding import DECODER_MASK, MASK

VISUAL = (PIXELS, VIDEOS)
SOUNDS = (FEATURES, SAMPLES)
"""Sound as the energies of bands over time, and as it was sampled."""
_DECODERS = {DECODER_IDS: IDS, DECODER_MASK: MASK}

_WORDS = {
    SEGMENTS: r"token_type.*|segment(?!_pos).*|segs?(_.*)?|(input_)?types?|kinds?|(input_)?type_ids"
    r"|sentence_?(type|id|idx|index|label|segment|num|no).*",
    POSITIONS: r"position.*|pos|pos_ids|(segment|token|seq|word|absolute)_pos(ition)?s?(_ids)?",
    DECODER_MASK: r"(decoder|dec|tgt|trg|target)_.*mask.*",
    MASK: r"(?!.*_masked$|masked_.+)(.*mask.*)|keep|ignore|attend|padding|pad|valid",
    LENGTHS: r"((valid|src|source|seq|sequence|input|text|token|x)_)?(lens|lengths)|valid_len",
    FEATURES: r"(log_)?mels?.*|input_features|features|audio.*|sounds?|spectrograms?|fbank|frames",
    SAMPLES: r"input_values|wav.*|signals?|samples|raw_.*",
    PIXELS: r"pixel_values(_videos)?|pixels?|images?|imgs?|picture|videos?|clips?|films?",
    DECODER_IDS: r"(decoder|dec)_(input|ids|in|x|tokens?|words?|seq|text).*"
    r"|(tgt|trg|targets?|outputs?)(_(ids?|tokens?|inputs?|seq|sequence))?",
    EMBEDDED: r"((inputs?|tokens?|text|words?)_?)?embed(s|ded|ding|dings)?",
    IDS: r"input_ids|input_word_ids|ids|x|src|tokens?|idx|token_ids|inputs?|text|seq|sequence|words?|word_ids|src_ids"
    r"|source|input_seq|index|indices|input_tensor|sentences?|src_tokens|piece_ids|y"
    r"|(encoder|enc)_(input|inputs|ids|tokens?|words?|text).*",
}
_NEVER = re.compile(
    r"targets?|labels?|past.*|cache.*|use_cache|return_.*|output_.*|need_.*|training|dropout|kv.*|len_past"
)


class Unmasked(StrEnum):
    """The reasons why tokens that are masked in the reference are seen."""

    ABSENT = "takes no attention mask"
    IGNORED = "takes a mask and ignores it"
    PARTLY = "takes a mask, and tokens that it masks still change the others"
    STALE = "takes a mask, and keeps the one of an earlier call"


@dataclass(frozen=True)
class ArgumentMapping:
    """One way in which a forward can be given the reference's inputs.

    Attributes:
        rules: the table's [inputs]: (the reference's term, the port's term).
        internal: the module finds out by itself which words are padding.
        unmasked: why words that are masked in the reference are seen; None where they are not.
        loose: arguments without a role, which have defaults.
        more: lines of [inputs] for arguments that the search leaves at their defaults.
        mixes_rows: a row of a batch depends on the others, whichever way the forward is called.
        constants: values of arguments that no batch has, found by trying.
        width: of the embeddings that a forward may take in the place of token ids; 0 where the reference takes none.
    """

    rules: tuple[tuple[str, str], ...]
    internal: bool = False
    unmasked: Unmasked | None = None
    loose: tuple[str, ...] = ()
    more: tuple[tuple[str, str], ...] = ()
    mixes_rows: bool = False
    constants: Mapping[str, object] = field(default_factory=dict)
    width: int = 0

    @property
    def takes_embeddings(self) -> bool:
        """Whether embeddings stand in the place of token ids."""
        return any(theirs.partition(" [")[0] == EMBEDDED for theirs, _ in self.rules)

    @property
    def named(self) -> tuple[str, ...]:
        """The reference's arguments that it takes, or of which what it takes is made."""
        return tuple(dict.fromkeys(self.sources.values()))

    @property
    def sources(self) -> dict[str, str]:
        """The argument of the reference that each of the module's arguments is made from."""
        return {ours.partition(" ")[0]: _source(theirs) for theirs, ours in self.rules}

    @property
    def by_row(self) -> tuple[str, ...]:
        """The module's arguments of which it takes one row at a time."""
        return tuple(str(rule.targets[0].name) for rule in self.parsed if rule.by_row)

    @property
    def causal(self) -> str:
        """The module's argument that is given a causal mask; empty where none is."""
        hiding = {prefix + name for prefix in ("", DECODER) for name in (CAUSAL, CAUSAL_ATTENTION)}
        return next((ours.partition(" ")[0] for one, ours in self.rules if one.partition(" [")[0] in hiding), "")

    def rules_of(self, theirs: str) -> tuple[tuple[str, str], ...]:
        """The rules of one of the reference's arguments."""
        return tuple(rule for rule in self.rules if _source(rule[0]) == theirs)

    def argument(self, theirs: str) -> str:
        """The module's argument that stands for one of the reference's; empty where none does."""
        return next((ours for ours, source in self.sources.items() if source == theirs), "")

    @property
    def parsed(self) -> tuple[Rule, ...]:
        """The rules, as the notation has them."""
        read = [theirs for theirs, _ in self.rules]
        return tuple(
            replace(make_input_rule(Term.parse(theirs), Term.parse(ours)), again=theirs in read[:number])
            for number, (theirs, ours) in enumerate(self.rules)
        )

    def given(self, inputs: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """The forward's arguments from the reference's inputs."""
        taken = {name: value for name, value in inputs.items() if name in self.named}
        if self.takes_embeddings:
            taken[EMBEDDED] = embedded(inputs[IDS], self.width).to(dtype)
        return for_port(self.parsed, taken, dtype)

    def for_reference(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The reference's inputs, with embeddings in the place of token ids where the module takes these."""
        found = dict(inputs)
        if self.takes_embeddings and IDS in found:
            found[EMBEDDED] = embedded(found.pop(IDS), self.width)
        return found

    def adapted(self, module: nn.Module) -> nn.Module:
        """The module as it is called in this way: some of its arguments may hold several tensors."""
        return with_arguments(module, self.constants, [ours.partition(" ")[0] for _, ours in self.rules], self.by_row)


def constant_arguments(module: nn.Module) -> dict[str, object]:
    """Arguments that a forward cannot be called without and that are no batch's: an offset, a flag, an empty cache.

    A whole number is 0, a flag False, and what may be None is None unless its name says that it is an input.
    """
    found: dict[str, object] = {}
    for name, one in inspect.signature(module.forward).parameters.items():
        if one.default is not one.empty or one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD}:
            continue
        kinds = _kinds(module, name)
        word = normal(name)
        if bool in kinds or int in kinds:
            found[name] = False if bool in kinds else 0
        elif kinds == {None} and _OFFSET.fullmatch(word):  # not annotated
            found[name] = 0
        elif not any(re.fullmatch(words, word) for words in _WORDS.values()):
            unset = type(None) in kinds or (kinds == {None} and _NEVER.fullmatch(word))
            found |= {name: None} if unset else {}
    return found


def takes_tensor(module: nn.Module, name: str) -> bool:
    """Whether an argument of a forward may be a tensor: ``position_ids: int`` is where a cache ends."""
    return not _kinds(module, name) <= {int, float, bool, str, type(None)}


def _kinds(module: nn.Module, name: str) -> set[object]:
    """The types that an argument is annotated with; None among them where it is not annotated."""
    try:
        hint = typing.get_type_hints(module.forward).get(name)
    except Exception:  # noqa: BLE001  # annotations are the user's code: evaluating them may raise anything
        hint = None
    return set(typing.get_args(hint)) or {hint}


_OFFSET = re.compile(r"start_?pos|(pos(ition)?_)?(offset|start)|cur(rent)?_pos|past_len(gth)?|cache_pos(ition)?")


def _source(term: str) -> str:
    """The reference's argument of a line of [inputs]; embeddings are made of token ids."""
    name = term.partition(" [")[0]
    return IDS if name == EMBEDDED else source_of(name)


def roles(
    module: nn.Module, available: Sequence[str], ask: Asker | None = None, *, positions: bool = False
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The forward's parameters, by what they mean, and those of which nothing tells what they are.

    Args:
        available: the reference's inputs.
        ask: what nothing tells; by default nobody.
        positions: also those that the module may be called without.

    Raises:
        VerifyError: a required one is not understood.
    """
    ask = ask or Asker()
    found, loose, unknown = _understood(module, available, positions=positions)
    where, title = place_of(module.forward), f"{type(module).__name__}.forward"
    for name in [*unknown, *(loose if MASK in available and MASK not in found.values() else ())]:
        taken = {*found.values(), *([EMBEDDED] if IDS in found.values() else [])}
        free = [one for one in available if one not in taken] if name in unknown else [MASK]
        answer = ask(what_argument(title, name, free, required=name in unknown)) if free else "none"
        if answer != "none":
            (unknown if name in unknown else loose).remove(name)
            found[name] = answer
    if len(unknown) == 1 and DECODER_IDS in available and DECODER_IDS not in found.values():
        found[unknown.pop()] = DECODER_IDS  # it has to be given, and nothing else is left to give
    others = [one for one in available if one not in {*found.values(), *_WORDS}]
    if 0 < len(unknown) <= len(others):  # in the reference's order, those of like names first
        for name in sorted(unknown, key=lambda one: not _alike(one, others)):
            found[name] = next(iter(_alike(name, others)), others[0])
            others.remove(found[name])
        unknown = []
    if unknown:
        listed = ", ".join(map(repr, unknown))
        message = f"{title} takes {listed}, and nothing tells what to give it"
        raise VerifyError(Fault(code=Code.NO_INPUTS, where=where, message=message, hint=_say(available)))
    if not found:
        if type(module).forward is nn.Module.forward:
            message, hint = "the module has no forward", Message("write one, or name the class that has it")
            raise VerifyError(Fault(code=Code.NO_INPUTS, where=type(module).__name__, message=message, hint=hint))
        message = f"{title} takes no argument by name, so nothing tells what to give it"
        raise VerifyError(Fault(code=Code.NO_INPUTS, where=where, message=message, hint=_say(available)))
    return found, tuple(loose)


def _alike(name: str, others: Sequence[str]) -> list[str]:
    """The inputs of the reference that share a word with an argument."""
    words = set(normal(name).split("_"))
    return [one for one in others if words & set(one.split("_"))]


def _understood(
    module: nn.Module, available: Sequence[str], *, positions: bool = False
) -> tuple[dict[str, str], list[str], list[str]]:
    """The forward's parameters by what their names mean, those without a role, and those of them that are required."""
    found: dict[str, str] = {}
    loose, unknown = [], []
    bound = getattr(module.forward, "keywords", {})  # of what constant_arguments() gives
    for name, one in inspect.signature(module.forward).parameters.items():
        if one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD} or name in bound:
            continue
        required = one.default is one.empty
        if isinstance(one.default, int | float | str):  # mask_ratio=0 is no mask
            continue
        word = normal(name)
        role = name if name in available else role_of(word, available, found.values())
        if not required and (_NEVER.fullmatch(word) or (role == POSITIONS and not positions)):
            continue
        if role is None or role in found.values() or source_of(role) not in available:
            first = required and not found and (role is None or source_of(role) not in available)
            if first:
                found[name] = next(one for one in (IDS, *SOUNDS, *VISUAL) if one in available)
            elif required and not (role in {MASK, DECODER_MASK} and role in found.values()):
                unknown.append(name)
            else:  # of several masks for the same tokens :class:`MaskArguments` tells which is which
                loose.append(name)
            continue
        found[name] = role
    kinds = {one.kind for one in inspect.signature(module.forward).parameters.values()}
    if not found and not unknown and inspect.Parameter.VAR_POSITIONAL in kinds:  # it passes on what it is given
        found["0"] = next(one for one in (IDS, *SOUNDS, *VISUAL) if one in available)
    if IDS in found.values() and EMBEDDED in found.values():  # either may be given, and ids are the usual ones
        loose.append(name := next(one for one, role in found.items() if role == EMBEDDED))
        del found[name]
    return found, loose, unknown


def unexplained(module: nn.Module, available: Sequence[str]) -> list[str]:
    """The required parameters of a forward whose names and annotations say nothing: flags and numbers, it may be."""
    return [name for name in _understood(module, available)[2] if _kinds(module, name) == {None}]


def unnamed_masks(module: nn.Module, available: Sequence[str]) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """What each of a forward's parameters may mean where some whose names tell nothing are masks, and the others.

    The required ones are masks together, and a decoder's tokens if nothing else is, in any order; of those with a
    default one is a mask.  The lengths of the rows may stand for it.
    """
    found, loose, unknown = _understood(module, available)
    free = [one for one in (DECODER_IDS, MASK, DECODER_MASK) if one in available and one not in found.values()]
    if MASK not in free:
        return

    names: list[dict[str, str]] = []
    if unknown and _all_unnamed(module, unknown):
        orders = permutations(free, len(unknown))
        some = [one for one in orders if MASK in one and (DECODER_IDS in one or DECODER_IDS not in free)]
        names = [dict(zip(unknown, one, strict=True)) for one in some]
    elif not unknown and DECODER_IDS not in free:
        names = [{name: MASK} for name in loose if _all_unnamed(module, [name])]
    for role in (MASK, LENGTHS):
        for one in names:
            given = {name: role if it == MASK else it for name, it in one.items()}
            yield {**found, **given}, tuple(name for name in loose if name not in one)


def unnamed_indices(module: nn.Module, available: Sequence[str]) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """What each of a forward's parameters may mean where some whose names tell nothing are positions or segments.

    The required ones are, and a mask beside them if nothing else is; of those with a default one is.
    """
    found, loose, unknown = _understood(module, available)
    free = [one for one in (POSITIONS, SEGMENTS, MASK) if one in available and one not in found.values()]
    if unknown and _all_unnamed(module, unknown):
        orders = permutations(free, len(unknown))
        names = [dict(zip(unknown, one, strict=True)) for one in orders if {*one} != {MASK}]
    elif not unknown:
        names = [{name: role} for name in loose if _all_unnamed(module, [name]) for role in free if role != MASK]
    else:
        names = []
    for given in names:
        yield {**found, **given}, tuple(name for name in loose if name not in given)


def _all_unnamed(module: nn.Module, names: Sequence[str]) -> bool:
    """Whether each of these parameters may be a tensor, and no name says what it is."""
    words = [normal(name) for name in names]
    named = any(re.fullmatch(known, word) for known in _WORDS.values() for word in words)
    never = any(map(_NEVER.fullmatch, words))
    return not (named or never) and all(takes_tensor(module, name) for name in names)


def role_of(word: str, available: Sequence[str], taken: Collection[str]) -> str | None:
    """The meaning of an argument of that name, given the meanings of those before it."""
    role = next((role for role, words in _WORDS.items() if re.fullmatch(words, word)), None)
    if role in VISUAL:
        return next((one for one in VISUAL if one in available), PIXELS)
    if role in _DECODERS and role not in available:  # a decoder that stands alone
        role = _DECODERS[role]
    sound = next((one for one in SOUNDS if one in available), None)
    if role in SOUNDS and sound is not None:
        return sound
    if role != IDS:
        return role
    if IDS not in available and sound is not None and sound not in taken:
        return sound
    if IDS not in available:
        return DECODER_IDS if taken else next((one for one in VISUAL if one in available), PIXELS)
    return DECODER_IDS if IDS in taken and DECODER_IDS in available else IDS  # a second kind of words: the decoder's


def _say(available: Sequence[str]) -> str:
    inputs = Wording(
        python="inputs={'input_ids': 'x', 'attention_mask': 'm -> bool'}",
        command="--input input_ids=x --input 'attention_mask=m -> bool'",
    )
    return Message("say it: ", inputs, f"; the reference takes {', '.join(available)}")


_Layout = Mapping[str, tuple[str, str]]
"""The source of the module's mask and its axes there, for each mask of the reference."""


MASK_FORMS = ("", *MASK_KINDS)
"""How a mask may be handed on: as it is, and as [inputs] converts it."""


def argument_mappings(found: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """The [inputs] that may be meant, the most usual first."""
    masks = [role for role in found.values() if role in {MASK, DECODER_MASK}]
    layouts = [{role: (f"{role} [b s]", axes) for role in masks} for axes in _MASK_AXES]
    return _mappings(found, layouts if masks else [{}])


def row_mappings(
    found: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], *, causal: bool
) -> Iterator[tuple[tuple[str, str], ...]]:
    """The [inputs] of a module that takes one row, or one picture, without an axis for the batch.

    Args:
        found: what each of the forward's parameters stands for.
        shapes: of one picture, video or sound.
        causal: the reference hides later tokens.
    """
    masks = [name for name, role in found.items() if role in {MASK, DECODER_MASK}]
    squares = [] if not masks else [CAUSAL_ATTENTION] if causal else [SQUARE_ATTENTION]
    pictures = [_LAYOUTS.get(len(shapes[role]), ()) for role in found.values() if role in {*VISUAL, *SOUNDS}]
    for layout, kind, square in product(
        range(max(map(len, pictures), default=1)), MASK_FORMS if masks else ("",), ("", *squares)
    ):
        rules = []
        for name, role in found.items():
            known = _LAYOUTS.get(len(shapes[role]), ()) if role in {*VISUAL, *SOUNDS} else ()
            axis = "t" if role in {DECODER_IDS, DECODER_MASK} else "s"
            to = f"{name} -> {kind}" if kind and name in masks else name
            if known:
                rules.append((f"{role} {known[0]}", f"{name} [{known[min(layout, len(known) - 1)][3:]}"))
            elif role == MASK and square:
                rules.append((f"{square} [b q k]", f"{to} [q k]"))
            elif role in {IDS, MASK, SEGMENTS, POSITIONS, DECODER_IDS, DECODER_MASK}:
                rules.append((f"{role} [b {axis}]", f"{to} [{axis}]"))
            else:
                return
        yield tuple(rules)


def square_mask_mappings(found: Mapping[str, str], *, causal: bool) -> Iterator[tuple[tuple[str, str], ...]]:
    """The same with square masks.

    Args:
        found: what each of the forward's parameters stands for.
        causal: the reference hides later tokens, so the mask has to.
    """
    masks = [role for role in found.values() if role in {MASK, DECODER_MASK}]
    return _mappings(found, _square_layouts(masks, causal=causal) if masks else [])


def _mappings(found: Mapping[str, str], layouts: Sequence[_Layout]) -> Iterator[tuple[tuple[str, str], ...]]:
    for turned, kind, layout in product((False, True), MASK_FORMS, layouts):
        if kind and not layout:
            continue
        rules = []
        for name, role in found.items():
            if role in layout:
                theirs, axes = layout[role]
                rules.append((theirs, f"{name} -> {kind} {axes}" if kind else f"{name} {axes}"))
            elif role in {*VISUAL, *SOUNDS}:
                rules.append((role, name))
            elif role == LENGTHS:
                rules.append((f"{LENGTHS} [b]", f"{name} [b]"))
            elif role not in _WORDS:
                rules.append((role, name))
            elif role == EMBEDDED:
                rules.append((f"{role} [b s e]", f"{name} [s b e]" if turned else f"{name} [b s e]"))
            else:
                axis = "t" if role == DECODER_IDS else "s"
                rules.append((f"{role} [b {axis}]", f"{name} [{axis} b]" if turned else f"{name} [b {axis}]"))
        yield tuple(rules)


_LAYOUTS = {
    1: ("[b t]", "[b 1 t]"),
    2: ("[b m f]", "[b f m]", "[b 1 m f]", "[b 1 f m]"),
    3: ("[b c h w]", "[b h w c]"),
    4: ("[b t c h w]", "[b c t h w]", "[b t h w c]"),
}
"""Layouts of a sound in samples or in bands, of a picture and of a video, by the axes of one: the reference's first."""


def layouts(
    rules: tuple[tuple[str, str], ...], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[tuple[str, str], ...]]:
    """The lines of [inputs] as they are, and with other layouts of what is not a token.

    Args:
        shapes: of one picture, video or sound.
    """
    yield rules
    known = {theirs: _LAYOUTS.get(len(shapes[theirs]), ()) for theirs, _ in rules if theirs in shapes}
    for number in range(1, max(map(len, known.values()), default=0)):
        yield tuple(
            (f"{theirs} {known[theirs][0]}", f"{ours} {known[theirs][number]}")
            if number < len(known.get(theirs, ()))
            else (theirs, ours)
            for theirs, ours in rules
        )


def _square_layouts(masks: Collection[str], *, causal: bool) -> list[_Layout]:
    """Square masks: of each mask what it is made from, and its axes in the module.

    A decoder's hides later tokens, beside an encoder's of one row; else the reference decides.
    """
    hiding = [(f"{CAUSAL_ATTENTION} [b q k]", axes) for axes in _SQUARE_AXES] + [(f"{CAUSAL} [q k]", "[q k]")]
    seeing = [(f"{SQUARE_ATTENTION} [b q k]", axes) for axes in _SQUARE_AXES]
    if DECODER_MASK not in masks:
        return [{MASK: one} for one in (hiding if causal else seeing)]
    decoders = [(DECODER + theirs, axes) for theirs, axes in hiding]
    encoders = [(f"{MASK} [b s]", axes) for axes in _MASK_AXES[:3]] + seeing
    return [{MASK: one, DECODER_MASK: other} for one, other in product(encoders, decoders)]


@dataclass(frozen=True)
class MaskArguments:
    """The masks of a forward that takes more than one for the same tokens, as :class:`torch.nn.Transformer` does.

    Attributes:
        padding: of the encoder's tokens, or of the only ones: it hides padding.
        memory: of the encoder's tokens, as a decoder sees them.
        decoder: of the decoder's tokens: it hides padding.
        later: the causal one, of the decoder's tokens or of the only ones.
        required: those without a default.
        two_sided: there is an encoder and a decoder.
    """

    padding: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    decoder: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    two_sided: bool = False

    @classmethod
    def of(cls, module: nn.Module, available: Sequence[str]) -> MaskArguments | None:
        """The masks of a forward; None where it takes no two for the same tokens."""
        taken = inspect.signature(module.forward).parameters
        named = {name: normal(name) for name in taken if takes_tensor(module, name)}
        masks = {name: word for name, word in named.items() if re.search("mask|padding|(^|_)pad(_|$)", word)}
        two_sided = DECODER_IDS in available
        memory = [name for name, word in masks.items() if two_sided and re.search(_CROSS, word)]
        decoder = [name for name, word in masks.items() if re.match(_DECODER_SIDE, word) and name not in memory]
        encoder = [name for name in masks if name not in {*memory, *decoder}]
        if not two_sided:
            encoder, decoder = [*encoder, *decoder], []
        if max(len(encoder), len(decoder)) < 2 and not memory:
            return None
        padding, other = _padding_first(encoder, masks)
        hidden, later = _padding_first(decoder, masks)
        return cls(
            padding=padding[:1],
            memory=_padding_first(memory, masks)[0][:1],
            decoder=hidden[:1],
            later=(later if two_sided else other)[:1],
            required=tuple(name for name in masks if taken[name].default is inspect.Parameter.empty),
            two_sided=two_sided,
        )

    def mappings(self, found: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], ...]]:
        """The [inputs] that may be meant, those that give most masks first.

        Args:
            found: what each of the forward's other parameters stands for.
        """
        others = {name: role for name, role in found.items() if role not in {MASK, DECODER_MASK}}
        plain = next(argument_mappings(others))
        axis = "t" if self.two_sided else "s"
        causal = DECODER + CAUSAL if self.two_sided else CAUSAL
        choices = [(True, False) if names else (False,) for names in (self.memory, self.decoder, self.later)]
        for memory, hides, later in product(*choices):
            for kind, axes in product(MASK_FORMS, _MASK_AXES):
                to = f" -> {kind}" if kind else ""
                rules = [(f"{MASK} [b s]", f"{name}{to} {axes}") for name in self.padding]
                rules += [(f"{MASK} [b s]", f"{name}{to} {axes}") for name in self.memory if memory]
                if hides:
                    own = axes.replace("s", axis)
                    rules += [(f"{DECODER_MASK} [b {axis}]", f"{name}{to} {own}") for name in self.decoder]
                if later:
                    rules += [(f"{causal} [q k]", f"{name}{to} [q k]") for name in self.later]
                yield (*plain, *rules)


_CROSS = r"memory|mem_|cross|(dec|tgt|trg|target)(oder)?_(enc|src)|encoder_attention|enc_dec|src_tgt|src_trg"
"""Names of masks of what a decoder sees of the encoder's tokens."""

_DECODER_SIDE = r"(decoder|dec|tgt|trg|target|causal|look_?ahead|future|subsequent)"
"""Names of masks of a decoder's tokens."""


def _padding_first(names: Sequence[str], words: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split masks into those of padding and the others; if none has such a name, the first is taken for padding."""
    padding = tuple(name for name in names if "pad" in words[name])
    others = tuple(name for name in names if name not in padding)
    return (padding, others) if padding else (tuple(names[:1]), tuple(names[1:]))


def without_optional_masks(module: nn.Module, found: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """The [inputs] that leave masks at their defaults, where there are such."""
    left = optional_masks(module, found)
    if left:
        yield from argument_mappings({name: role for name, role in found.items() if name not in left})


def optional_masks(module: nn.Module, found: Mapping[str, str]) -> tuple[str, ...]:
    """The masks that a forward may be called without."""
    taken = inspect.signature(module.forward).parameters
    masks = (name for name, role in found.items() if role in {MASK, DECODER_MASK})
    return tuple(name for name in masks if taken[name].default is not inspect.Parameter.empty)


_MASK_AXES = ("[b s]", "[b 1 1 s]", "[b 1 s]", "[s b]")
_SQUARE_AXES = ("[b 1 q k]", "[b q k]")


def given_argument_mapping(
    module: nn.Module, available: Sequence[str], inputs: Mapping[str, str], *, width: int = 0
) -> ArgumentMapping:
    """The way that the user says.

    Args:
        available: the reference's inputs, and embeddings where it takes these.
        width: of these embeddings.

    Raises:
        VerifyError: the reference or the forward has no such argument.
    """
    taken = inspect.signature(module.forward).parameters
    anything = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    made = [name for name in NAMES if source_of(name) in available]
    faults = []
    for theirs, ours in inputs.items():
        for name, known, side in (
            (theirs.partition(" [")[0].strip(), [*available, *made], "the reference"),
            (re.split(r" ->| \[", ours)[0].strip(), list(taken), f"{type(module).__name__}.forward"),
        ):
            if name.partition(".")[0] not in known and not (anything and side != "the reference"):
                hint = nearest(name, known) or f"it has {', '.join(available if side == 'the reference' else known)}"
                message = f"{side} has no argument {name!r}"
                faults.append(Fault(code=Code.NO_INPUTS, where=place_of(module.forward), message=message, hint=hint))
    if faults:
        raise VerifyError(faults)
    return ArgumentMapping(rules=tuple(inputs.items()), width=width)

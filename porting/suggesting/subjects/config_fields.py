"""The meaning of a config's fields, in whatever project: a role, and the words that the field uses for it.

The reference's config is shrunk by role, and a builder of the user's is given the field of the role that it asks for.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import resources
from typing import Any

from porting.notation.field import value_of


class Role(StrEnum):
    """The meaning of a number of a config."""

    HIDDEN = "hidden"
    DEPTH = "depth"
    HEADS = "heads"
    GROUPS = "groups"
    HEAD_SIZE = "head size"
    INNER = "inner"
    VOCABULARY = "vocabulary"
    POSITIONS = "positions"
    SEGMENTS = "segments"
    EPS = "eps"
    DROPOUT = "dropout"
    ACTIVATION = "activation"
    PADDING = "padding"
    CHANNELS = "channels"
    IMAGE = "image"
    PATCH = "patch"
    LABELS = "labels"
    BASE = "rotary base"
    LOCAL_BASE = "rotary base of local layers"
    ROTATED_SHARE = "rotated part of a head"
    ROTATED = "rotated features"
    EXPERTS = "experts"
    CHOSEN = "experts of a token"
    WINDOW = "sliding window"
    EXPERT_INNER = "inner size of an expert"
    SHARED_EXPERTS = "experts of every token"
    MELS = "mel bins"
    BUCKETS = "buckets of distances"
    DISTANCE = "largest distance"
    RATIO = "inner size by hidden size"
    STATE = "state size"
    KERNEL = "convolution kernel"
    EXPANSION = "inner size of a state-space layer by hidden size"
    STEP_RANK = "time step rank"
    TIED = "tied word tables"
    FRAMES = "frames of a video"


SYNONYMS: Mapping[str, Any] = tomllib.loads(
    resources.files("porting.suggesting").joinpath("synonyms.toml").read_text(encoding="utf-8")
)
"""The names of fields and tensors: one file for all, with the projects that they come from."""

WORDS: Mapping[Role, tuple[str, ...]] = {Role(role): tuple(names) for role, names in SYNONYMS["fields"].items()}
"""The names of each role, the most usual one first."""


STAGES: Mapping[Role, tuple[str, ...]] = {Role(role): tuple(names) for role, names in SYNONYMS["stages"].items()}
"""The names of fields that have a number for each stage, by the role of the single number."""


def _composed() -> Iterator[tuple[Role, tuple[tuple[frozenset[str], ...], frozenset[str]]]]:
    """The sets of words for each role, of each of which one is required in a name, and all words that may be in it."""
    given = SYNONYMS["words"]
    for role, texts in given["roles"].items():
        sets = [frozenset(text.format(count=given["count"], size=given["size"]).split()) for text in texts]
        yield Role(role), (tuple(sets[:-1]), frozenset().union(*sets))


_PARTS = dict(_composed())

_KNOWN = frozenset().union(*(words for _, words in _PARTS.values())) | {"max", "min"}


class Part(StrEnum):
    """The part of a model whose sizes a config may have apart from the others'."""

    ENCODER = "encoder"
    DECODER = "decoder"
    VISION = "vision"
    TEXT = "text"
    AUDIO = "audio"


_PART_WORDS: Mapping[str, tuple[Part, ...]] = {
    word: tuple(map(Part, parts.split())) for parts, words in SYNONYMS["parts"].items() for word in words.split()
}
"""The parts of a model that a word in a name may mean: ``text`` is a decoder's output, unless it is a tower's."""

_INSTEAD = {Role.EXPERT_INNER: Role.INNER}
"""The field to use where a config has none of a role: an expert is as wide as the feed-forward part in its place."""

SECTIONS = frozenset(" ".join(SYNONYMS["sections"]["names"]).split())
"""Names under which a config of the user's holds further fields: ``config.attention.heads``."""

NESTED: Mapping[str, str] = SYNONYMS["nested"]
"""Fields that stand inside another, as a table spells them."""

SHARE: str = NESTED["partial_rotary_factor"]
"""The field that says which part of a head is rotated."""

_ROLES: dict[str, Role] = {word: role for role in reversed(list(WORDS)) for word in WORDS[role]}


def normal(word: str) -> str:
    """A word in small letters with underscores: ``hiddenSize`` and ``hidden-size`` are ``hidden_size``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).replace("-", "_").lower()


def role_of(word: str) -> Role | None:
    """The role of a config's field or a builder's parameter, as far as its name tells.

    >>> role_of("n_embd"), role_of("nLayers"), role_of("colour")
    (<Role.HIDDEN: 'hidden'>, <Role.DEPTH: 'depth'>, None)
    """
    return _ROLES.get(normal(word))


def composed_role(word: str) -> Role | None:
    """The role of a name that is made of usual words, in any order; the first role that knows all of them.

    A single word says too little, and a size of a head is none of heads.  A word for a part of the model says nothing
    of the role.

    >>> composed_role("max_context_length"), composed_role("top_k_experts"), composed_role("blow_up")
    (<Role.POSITIONS: 'positions'>, <Role.CHOSEN: 'experts of a token'>, None)
    >>> composed_role("tied_embedding"), composed_role("encoder_ffn_embed_dim")
    (<Role.TIED: 'tied word tables'>, <Role.INNER: 'inner'>)
    >>> composed_role("n_text_layer"), composed_role("imgsize"), composed_role("vit_img_size")
    (<Role.DEPTH: 'depth'>, <Role.IMAGE: 'image'>, <Role.IMAGE: 'image'>)
    """
    words = _words(word)
    parts = [one for one in words if one in _PART_WORDS]
    fewer = [[one for one in words if one != part] for part in parts]  # an image may be what has the size
    fewer += [[one for one in words if one not in parts]] if parts else []
    ways = (role for some in fewer for role in (role_of("_".join(some)), _of_words(some)) if role is not None)
    return _of_words(words) or next(ways, None)


def _of_words(words: Sequence[str]) -> Role | None:
    some = frozenset(words)
    fitting = (role for role, (keys, known) in _PARTS.items() if some <= known and all(some & one for one in keys))
    return next(fitting, None) if len(some) > 1 else None


def _words(name: str) -> list[str]:
    """The words of a name, also where nothing stands between two: ``seqlen`` is seq and len."""
    return [part for word in normal(name).split("_") if word for part in _split(word)]


def _split(word: str) -> tuple[str, ...]:
    if word in _KNOWN or word in _PART_WORDS:
        return (word,)
    halves = ((word[:i], word[i:]) for i in range(2, len(word) - 1))
    return next(((one, two) for one, two in halves if one in _KNOWN and two in _KNOWN), (word,))


def is_switch(name: str) -> bool:
    """Whether a name asks for whether something is there, which is True or False.

    >>> is_switch("qkv_bias"), is_switch("use_head"), is_switch("use_causal_mask"), is_switch("bias_size")
    (True, True, False, False)
    """
    words = normal(name.rpartition(".")[2]).split("_")
    known = {key: set(text.split()) for key, text in SYNONYMS["switches"].items()}
    some = words[0] in known["first"] or words[-1] in known["any"] or (words[0] in known["any"] and len(words) == 1)
    return some and known["never"].isdisjoint(words)


def is_section(name: str) -> bool:
    """Whether a config of the user's may hold further fields under this name.

    >>> is_section("encoder"), is_section("attnConfig"), is_section("n_layers")
    (True, True, False)
    """
    word = normal(name)
    return re.sub(r"_?(config|cfg|args|params)$", "", word) in SECTIONS


def parts_of(name: str) -> tuple[Part, ...]:
    """The parts of a model that a name may speak of.

    >>> parts_of("text_width"), parts_of("width")
    ((<Part.TEXT: 'text'>, <Part.DECODER: 'decoder'>), ())
    """
    return next((_PART_WORDS[one] for one in _words(name) if one in _PART_WORDS), ())


def fields_of(role: Role, config: Mapping[str, object]) -> Iterator[str]:
    """The config's fields of that role that have a value, the most usual name first."""
    for word in WORDS[role]:
        if config.get(word) is not None and _fits(role, word, config):
            yield word


def config_number(config: Mapping[str, object], role: Role, default: int = 0) -> int:
    """The config's number in that role."""
    value = next((config[name] for name in fields_of(role, config)), default)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def rotated(config: Mapping[str, object], size: int) -> int:
    """How many features of a head of this size are rotated: all of them where the config says nothing else.

    >>> rotated({"rope_parameters": {"partial_rotary_factor": 0.25}}, 64), rotated({}, 64)
    (16, 64)
    """
    share = value_of(config, SHARE)
    count = int(size * share) if isinstance(share, float) else config_number(config, Role.ROTATED, size)
    return count if 0 < count <= size and count % 2 == 0 else size


def _fits(role: Role, word: str, config: Mapping[str, object]) -> bool:
    """Whether a word of two meanings has this one here: next to ``dim``, ``hidden_dim`` is the inner size."""
    if word == "hidden_dim":
        width = any(config.get(one) is not None for one in ("dim", "d_model", "hidden_size", "n_embd"))
        return width == (role is Role.INNER)
    return _ROLES.get(word) is role


def numbers_by_stage(value: object) -> bool:
    """Whether a field has a number for each stage of a model: ``[2, 2, 6, 2]``."""
    return isinstance(value, list | tuple) and bool(value) and all(_is_number(number) for number in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def stage_field(role: Role, config: Mapping[str, object]) -> str | None:
    """The config's field that has the numbers of a role for each stage; None where there is none."""
    return next((name for name in STAGES.get(role, ()) if numbers_by_stage(config.get(name))), None)


def _stage_role(asked: str) -> Role | None:
    word = normal(asked)
    return next((role for role, names in STAGES.items() if word in names), None)


def field_for(
    asked: str, config: Mapping[str, object], others: tuple[str, ...] = (), *, staged: bool | None = None
) -> str | None:
    """The config's field that a builder means by ``asked``; None when there is none, or nothing tells.

    Args:
        asked: the parameter or key.
        config: the checkpoint's fields; ``attribute_map``, if it is among them, has other names for some.
        others: what else the builder asks for, which tells two meanings apart.
        staged: whether it takes a number for each stage (True) or a single one (False); None if nothing says so. The
            single one is the first stage's where the config has one for each: ``hidden_sizes.0``.

    >>> field_for("kvheads", {"num_key_value_heads": 2, "num_attention_heads": 8})
    'num_key_value_heads'
    >>> field_for("dims", {"hidden_sizes": [8, 16]}), field_for("dim", {"hidden_sizes": [8, 16]}, staged=False)
    ('hidden_sizes', 'hidden_sizes.0')

    >>> field_for("num_experts", {"num_local_experts": 8, "attribute_map": {"num_experts": "num_local_experts"}})
    'num_local_experts'
    >>> field_for("head_size", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": None})
    'head_dim/hidden_size // num_attention_heads'
    >>> field_for("d_mlp", {"n_embd": 8, "n_inner": None})
    'n_inner/4 * n_embd'
    """
    single = _single_field_for(asked, config, others)
    role = _stage_role(asked) or role_of(asked) or composed_role(asked)
    several = None if role is None else stage_field(role, config)
    if staged is None:
        prefers_stages = asked not in config and _stage_role(asked) is not None
        return (several or single) if prefers_stages else (_first_width(asked, role, config) or single or several)
    if staged:
        return single if single is not None and numbers_by_stage(config.get(single)) else several or single
    if single is not None and numbers_by_stage(config.get(single)):
        return f"{single}.0"
    return _first_width(asked, role, config) or single or (several and f"{several}.0")


def _first_width(asked: str, role: Role | None, config: Mapping[str, object]) -> str | None:
    """The field with the width of the first stage, where ``hidden_size`` is the last one's; None where it is another.

    >>> _first_width("dim", Role.HIDDEN, {"embed_dim": 96, "hidden_size": 768, "depths": [2, 2, 6, 2]})
    'embed_dim'
    """
    if role is not Role.HIDDEN or asked in config or stage_field(Role.DEPTH, config) is None:
        return None
    return next((name for name in ("embed_dim",) if _is_number(config.get(name))), None)


def _single_field_for(asked: str, config: Mapping[str, object], others: tuple[str, ...]) -> str | None:
    word = normal(asked)
    if (found := _same_field(asked, config)) is not None:
        return found
    role = role_of(word) or composed_role(word)
    if word in _OTHERWISE:
        wide = any(role_of(one) is Role.HIDDEN for one in others if normal(one) not in _OTHERWISE)
        role = _OTHERWISE[word] if wide else Role.HIDDEN
    if word == "window" and next(fields_of(Role.WINDOW, config), None) is not None:
        role = Role.WINDOW  # and not how many positions there are, as in models that see all
    if role is None or role is Role.RATIO:
        return _of_same_words(word, config) or _inside(word, config) if role is None else ratio(config)
    if role is Role.HIDDEN and config.get("embedding_size") is not None and _is_embedding_width(word, others):
        return "embedding_size"
    if role is Role.HIDDEN and "projection_dim" in config and _takes_parts(others, config):
        return next(fields_of(role, config), "projection_dim")  # the width that the parts have in common
    found = _sided(role, parts_of(asked), config) or next(fields_of(role, config), None)
    if found is None and role in _INSTEAD:
        found = next(fields_of(_INSTEAD[role], config), None)
    found = _computed(config, others) if role is Role.HEAD_SIZE and found is None else found
    found = _four_widths(config) if role is Role.INNER and found is None else found
    return _of_same_words(word, config) or _inside(word, config) if found is None else found


_ORIGINAL = re.compile(r"^(original|initial|pretrained)_")
"""How names begin of sizes that a model was trained with first: ``original_max_position_embeddings``."""


def _inside(word: str, config: Mapping[str, object]) -> str | None:
    """The field of that name within a field that holds options and is not a part's config, if it is one.

    >>> config = {"rope_parameters": {"factor": 8.0, "original_max_position_embeddings": 8192}}
    >>> [_inside(one, config) for one in ("factor", "original_context_length", "colour")]
    ['rope_parameters.factor', 'rope_parameters.original_max_position_embeddings', None]
    """
    options = [(name, one) for name, one in config.items() if isinstance(one, dict) and name != "attribute_map"]
    options = [(name, one) for name, one in options if not _CONFIG.search(name)]
    found = [f"{name}.{word}" for name, one in options if _is_value(one.get(word))]
    front = _ORIGINAL.match(word)
    if front is not None and not found:
        fields = ((name, field) for name, one in options for field in one if isinstance(field, str))
        roles = ((name, field, _ORIGINAL.match(field)) for name, field in fields)
        rest = role_of(word.removeprefix(front[0]))
        found = [
            f"{name}.{field}"
            for name, field, before in roles
            if before is not None and rest is not None and role_of(field.removeprefix(before[0])) is rest
        ]
    return found[0] if len(found) == 1 else None


def _is_value(one: object) -> bool:
    return isinstance(one, bool | int | float | str)


def _of_same_words(word: str, config: Mapping[str, object]) -> str | None:
    """The field that has all words of a name, two at least, and the fewest besides, if it is one.

    A word may be cut short, and one that says what kind of size it is may be missing.

    >>> fields = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "max_bucket_distance": 80}
    >>> [_of_same_words(one, fields) for one in ("conv_pos", "pos_conv_groups", "max_distance", "pos")]
    ['num_conv_pos_embeddings', 'num_conv_pos_embedding_groups', 'max_bucket_distance', None]
    >>> _of_same_words("pos_conv_kernel", fields)
    'num_conv_pos_embeddings'
    >>> [_of_same_words(one, {"prediction_length": 7, "patch_length": 3}) for one in ("pred_len", "patch_len")]
    ['prediction_length', 'patch_length']
    """

    def plain(name: str) -> list[str]:
        return [
            one.rstrip("s") for one in _words(name) if one not in _COUNT_WORDS and one not in _PART_WORDS and one[1:]
        ]

    def common(ours: list[str], theirs: list[str]) -> int:
        return sum(any(_same_word(one, other) for other in theirs) for one in ours)

    words = plain(word)
    ranked: dict[tuple[int, int], list[str]] = {}
    for name, value in config.items():
        known = [] if value is None or isinstance(value, list | dict | str) else plain(name)
        same = common(words, known)
        if same > 1 and same >= len([one for one in words if one not in _SIZE_WORDS]):
            ranked.setdefault((same, -len(known)), []).append(name)
    best = ranked[max(ranked)] if ranked else []
    return best[0] if len(best) == 1 else None


def _same_word(one: str, other: str) -> bool:
    """Whether two words are one, or one is the other cut short: ``len``, ``pred``, ``interm``."""
    return one == other or (min(len(one), len(other)) > 2 and (one.startswith(other) or other.startswith(one)))


_COUNT_WORDS = frozenset({"n", "num", "number", "of"})
_SIZE_WORDS = frozenset({"kernel", "size", "width", "dim", "length", "len"})


def _same_field(asked: str, config: Mapping[str, object]) -> str | None:
    """The field of that name, or that transformers knows by it, or that is meant by a name such as ``vision_cfg``."""
    aliases = config.get("attribute_map")
    if asked not in config and isinstance(aliases, Mapping) and aliases.get(asked) in config:
        return str(aliases[asked])
    return asked if asked in config else _inner_config(normal(asked), config)


def _takes_parts(names: Sequence[str], config: Mapping[str, object]) -> bool:
    """Whether a builder takes the configs of two parts or more by themselves."""
    parts = (one for one in names if _CONFIG.search(one))
    return sum(one in config or _inner_config(normal(one), config) is not None for one in parts) > 1


_CONFIG = re.compile(r"_?(config|cfg|conf|args|params|hparams|kwargs)$")


def _inner_config(word: str, config: Mapping[str, object]) -> str | None:
    """The config's field that holds further fields, for a name such as ``vision_cfg``; None where there is none."""
    parts = parts_of(_CONFIG.sub("", word)) if _CONFIG.search(word) else ()
    inner = (name for name, value in config.items() if isinstance(value, dict) and value and _CONFIG.search(name))
    return next((name for name in inner if parts and parts[:1] == parts_of(name)[:1]), None)


def _is_embedding_width(word: str, others: Sequence[str]) -> bool:
    """Whether a width is that of the word table alone: the builder asks for another width besides it."""
    rest = (normal(name) for name in others)
    widths = [name for name in rest if (role_of(name) or composed_role(name)) is Role.HIDDEN and name != word]
    return "emb" in word and any("emb" not in name for name in widths)


def _sided(role: Role, parts: Sequence[Part], config: Mapping[str, object]) -> str | None:
    """The config's field of a role for one part of the model: ``decoder_layers``, ``vision_config.hidden_size``.

    If the name says no part and only nested configs have the role, the text model's is taken first.
    """
    for part in parts:
        for name, value in config.items():
            if value is not None and part in parts_of(name) and (role_of(name) or composed_role(name)) is role:
                return name
    if next(fields_of(role, config), None) is not None and not parts:
        return None
    inner = {name: value for name, value in config.items() if isinstance(value, Mapping) and is_section(name)}
    for part in (*parts, *(() if parts else (Part.TEXT, Part.VISION, Part.AUDIO, Part.ENCODER))):
        for name, fields in inner.items():
            found = next(fields_of(role, fields), None) if part in parts_of(name)[:1] else None
            if found is not None:
                return f"{name}.{found}"
    return None


_OTHERWISE = {"hidden_dim": Role.INNER, "channels": Role.CHANNELS, "k": Role.CHOSEN}
"""Words that alone mean the width, and beside another name for it something else."""


def ratio(config: Mapping[str, object], *, whole: bool = True) -> str | None:
    """How many times as wide a feed-forward part is, as a table spells it.

    Args:
        whole: give None unless it is a whole number.

    >>> ratio({"hidden_size": 8, "intermediate_size": 32})
    'intermediate_size // hidden_size'
    """
    width, inner = (next(fields_of(role, config), None) for role in (Role.HIDDEN, Role.INNER))
    sizes = [value for one in (inner, width) if one and isinstance(value := config[one], int) and value > 0]
    if len(sizes) < 2:
        return None
    if sizes[0] % sizes[1] == 0:
        return f"{inner} // {width}"
    return None if whole else f"{inner} / {width}"


def _four_widths(config: Mapping[str, object]) -> str | None:
    """The inner size as a table spells it, where a config has a field for it and no value: GPT-2, GPT-J, Falcon."""
    empty = next((name for name in WORDS[Role.INNER] if name in config and config[name] is None), None)
    width = next(fields_of(Role.HIDDEN, config), None)
    return f"{empty}/4 * {width}" if empty and width else None


def _computed(config: Mapping[str, object], others: Sequence[str] = ()) -> str | None:
    """The size of a head as a table spells it, where no field has it.

    Of two parts it is the one whose number of heads nothing else asks for.

    >>> parts = {"text_config": {"hidden_size": 8, "num_attention_heads": 2}}
    >>> parts["vision_config"] = {"hidden_size": 6, "num_attention_heads": 3}
    >>> field_for("head_width", parts, ("text_heads",))
    'vision_config.hidden_size // vision_config.num_attention_heads'
    """
    width, heads = (next(fields_of(role, config), None) for role in (Role.HIDDEN, Role.HEADS))
    null = next((f"{word}/" for word in WORDS[Role.HEAD_SIZE] if word in config), "")
    if width and heads:
        return f"{null}{width} // {heads}"
    asked = {parts_of(one)[:1] for one in others if (role_of(one) or composed_role(one)) is Role.HEADS}
    for name, fields in config.items():
        if isinstance(fields, Mapping) and is_section(name) and parts_of(name)[:1] not in asked:
            width, heads = (next(fields_of(role, fields), None) for role in (Role.HIDDEN, Role.HEADS))
            if width and heads:
                return f"{name}.{width} // {name}.{heads}"
    return None

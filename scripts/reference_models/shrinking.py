"""Small configs of any model type of transformers, from the type's default config.

The sizes of a config depend on one another: heads divide the width, sections of a rotary embedding add up to a head,
widths of stages follow each other.  So widths are divided by one power of two and numbers of heads are kept, which
keeps what divides what; depths, numbers of experts and vocabularies are cut.  Where even that does not build, fewer
fields are changed (:data:`LEVELS`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WORDS = 160
"""The size of a vocabulary."""

POSITIONS = 64
"""Positions of a spectrogram that an encoder has place for."""

WIDTH = 64
"""No width is larger, where its divisor leaves a head 4 numbers or more."""

LEVELS = ("widths", "parts", "heads", "depths", "deep")
"""What is made small: everything, with one divisor for all widths; with one for each nested config; with fewer heads in
the place of smaller ones; everything but the widths; everything but depth.  The first that the reference runs with is
taken."""

_DEPTH = re.compile(
    r"(num|n|number_of)_.*(layers?|blocks?)|n_layers?|(encoder|decoder|text|vision|audio)?_?(layers|depth)|depths?|.*_depths?"
    r"|num_(hidden_)?layers.*|.*_num_layers|.*_num_hidden_layers|layers_per_block|.*n_layers?|stage_num_blocks|.*_layers"
)
_NO_DEPTH = re.compile(
    r".*(start|end|skip|every|interval|index|idx|indices|first|shared|downsampl|upsampl|feature_layers?|at_layers?"
    r"|global|cross|sparse|dense|feat_extract|ratio|num_feat).*"
)
_WIDTH = re.compile(
    r".*(hidden|dim|width|channels?|d_model|d_ff|d_inner|n_embd|n_inner|d_kv|d_k\b|d_v\b|rank|inner|intermediate|size"
    r"|features|filters|section|planes|units|projection|_d_|_d$).*|d_.*"
)
_NO_WIDTH = re.compile(
    r".*(vocab|image|patch|window|position|kernel|stride|type|length|token|_id\b|ids\b|mel|sampl|rate|batch|group|block|chunk"
    r"|crop|grid|num_.*channels|in_channels|input_channels|audio_channels|max_|min_|layers?\b|act|prob|drop|eps|scal|bins"
    r"|pool|dilat|pad|factor|step|expert|spatial|temporal|queries|size_?(list|divisor)|buckets?|num_dim|number|frame|horizon"
    r"|context|cache|codebook_size|merge|downsample|labels|sequence).*|dim|channel_mult.*"
)
_EXPERTS = re.compile(r"(num|n|number_of|moe_num|num_local|n_routed)_?.*experts?|moe_num_experts|num_experts")
_CHOSEN = re.compile(r".*(per_tok|top_?k|experts_per|per_token).*")
_VOCABULARY = re.compile(r".*vocab_size.*|n_vocab|vocabulary_size|codebook_size|n_words|.*vocab_size|num_embeddings")
_KEPT_VOCABULARY = re.compile(r"type_vocab_size|.*type_vocab.*|codebook_size")
_TOKEN = re.compile(r".*token_?(id|ids|index|indices)$|.*_token_id.*|.*_index$|.*_id$|.*_ids$")
_IMAGE = re.compile(r"(.*_)?image_size|img_size|input_size|image_resolution|image_height|image_width")


def shrunk(config: Mapping[str, Any], level: str = "widths", words: int = WORDS) -> dict[str, Any]:
    """The config with small sizes.

    Args:
        config: all its fields; nested configs are dictionaries.
        level: one of :data:`LEVELS`.
        words: the size of every vocabulary.
    """
    text = config.get("text_config")
    whole = text if level == "parts" and isinstance(text, dict) else config
    divisor = _divisor(whole, level) if level != "depths" else 1
    tokens: dict[int, int] = {}
    return _shrunk(config, level, divisor, words, tokens)


def _shrunk(config: Mapping[Any, Any], level: str, divisor: int, words: int, tokens: dict[int, int]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    depth = _depth(config)
    kinds = _kinds(config, depth) if level != "deep" else []
    patch = config.get("patch_size")
    sides = {"max_source_positions": POSITIONS} if level == "widths" else {}
    for field, value in config.items():
        name = str(field)
        if name in _OF_DEPTH and level != "deep":
            continue
        if isinstance(value, dict):
            small[name] = _part(name, value, level, divisor, words, tokens, kinds)
        elif isinstance(value, list) and depth > len(kinds) > 0 and len(value) == depth:
            small[name] = [_number(name, value[place], level, divisor, words, tokens) for place in kinds]
        elif name in _DEPTHS and value == depth and kinds:
            small[name] = len(kinds)
        elif level == "widths" and _IMAGE.fullmatch(name) and isinstance(value, int):
            small[name] = min(value, max(4 * patch, 32) if isinstance(patch, int) else 64)
        elif name in sides and isinstance(value, int):
            small[name] = min(value, sides[name])
        else:
            small[name] = _number(name, value, level, divisor, words, tokens)
    _complete(small)
    return small


def _part(
    name: str,
    value: Mapping[Any, Any],
    level: str,
    divisor: int,
    words: int,
    tokens: dict[int, int],
    kinds: Sequence[int],
) -> dict[Any, Any]:
    """A dictionary in a config: of layers by number, of names, or a nested config."""
    if value and all(str(one).isdigit() for one in value) and "layer" in name and kinds:
        return {key: one for key, one in value.items() if int(key) < max(len(kinds), 2)}
    if _plain(value):
        return dict(value)
    own = _divisor(value) if level == "parts" and name.endswith("config") else divisor
    small = _shrunk(value, level, own, words, tokens)
    if own != divisor and isinstance(value.get("out_hidden_size"), int):  # the width of what it is put into
        small["out_hidden_size"] = value["out_hidden_size"] // divisor
    return small


def _complete(small: dict[str, Any]) -> None:
    """Fill in what a default config leaves out and its model cannot be built without."""
    if small.get("vocab_size", WORDS) is None:
        small["vocab_size"] = WORDS
    if small.get("prediction_length", 4) is None:
        small["prediction_length"] = 4
    heads = small.get("num_attention_heads")
    if isinstance(heads, int) and heads:
        if small.get("num_key_value_heads", heads) is None:
            small["num_key_value_heads"] = heads
        if small.get("head_dim", 1) is None and isinstance(small.get("hidden_size"), int):
            small["head_dim"] = small["hidden_size"] // heads


_OF_DEPTH = frozenset({"stage_names", "out_features", "out_indices"})
"""Fields of a backbone that follow from its depth."""

_HEADS = re.compile(r".*num_.*heads|n_heads?|.*_heads")
_HEAD = re.compile(r".*head_dim|d_kv|.*_head_size|d_head")

_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def _kinds(config: Mapping[str, Any], depth: int) -> list[int]:
    """The layers that are kept: one of each kind that the config tells apart by lists as long as it is deep, or two."""
    lists = [value for value in config.values() if isinstance(value, list) and depth and len(value) == depth]
    lists = [one for one in lists if all(isinstance(item, str | int | bool) for item in one)]
    first: dict[tuple[Any, ...], int] = {}
    for place, kind in enumerate(zip(*lists, strict=True)):
        first.setdefault(kind, place)
    kept = list(first.values())[:4] if lists else []
    patterns = [value for name, value in config.items() if _PATTERN.search(str(name)) and isinstance(value, list)]
    kept = list(range(min(len(patterns[0]), depth))) if patterns and not kept and len(patterns[0]) < 8 else kept
    return kept if len(kept) > 1 else [0, 1][:depth] if depth else []


_PATTERN = re.compile(r"block_types|pattern")


def _sections(value: list[int], divisor: int) -> list[int]:
    """Sections of a head that is divided: they add up to what is left of it."""
    whole = sum(value) // divisor
    found = [max(one // divisor, 1) for one in value]
    found[-1] += whole - sum(found)
    return found


def _plain(value: Mapping[str, Any]) -> bool:
    """Whether a dictionary is a table of names and no config."""
    return not value or all(str(key).isdigit() for key in value) or set(value) <= {"rope_type", "rope_theta"}


def _number(name: str, value: Any, level: str, divisor: int, words: int, tokens: dict[int, int]) -> Any:
    """A field's value made small, if it is a number or a list of numbers."""
    if isinstance(value, list | tuple):
        if "section" in name and level != "heads" and all(isinstance(one, int) for one in value):
            return _sections(list(value), divisor)
        return [_number(name, one, level, divisor, words, tokens) for one in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if _TOKEN.fullmatch(name) and value >= words:
        return tokens.setdefault(value, words - 1 - len(tokens))
    most = _most(name, level, words)
    return min(value, most) if most else value if level == "depths" else _width(name, value, level, divisor)


def _most(name: str, level: str, words: int) -> int:
    """What a field is cut to, whatever the widths are; 0 where it is not."""
    if _DEPTH.fullmatch(name) and not _NO_DEPTH.fullmatch(name):
        return 0 if level == "deep" else 2
    if _VOCABULARY.fullmatch(name) and not _KEPT_VOCABULARY.fullmatch(name):
        return words
    return 2 if _CHOSEN.fullmatch(name) else 8 if _EXPERTS.fullmatch(name) else 0


def _width(name: str, value: int, level: str, divisor: int) -> int:
    """A width, divided."""
    if level == "heads" and _HEADS.fullmatch(name):
        return max(value // divisor, 1)
    if level == "heads" and _HEAD.fullmatch(name):
        return value
    return value // divisor if _is_width(name, value) and value % divisor == 0 and value >= 2 * divisor else value


def _depth(config: Mapping[str, Any]) -> int:
    value = config.get("num_hidden_layers", config.get("num_layers", config.get("n_layer", 0)))
    return value if isinstance(value, int) else 0


def _divisor(config: Mapping[str, Any], level: str = "") -> int:
    """The power of two that widths are divided by."""
    if level == "heads":
        return 8
    widths, sizes = list(_walk(config, _is_width)), list(_heads(config))
    divisor = 1
    largest = max((width for width in widths if width <= 16384), default=WIDTH)
    while largest // divisor > WIDTH * 4 and all(size % (8 * divisor) == 0 and size // divisor > 8 for size in sizes):
        divisor *= 2
    return divisor


def _is_width(name: str, value: int) -> bool:
    return bool(_WIDTH.fullmatch(name)) and not _NO_WIDTH.fullmatch(name)


def _walk(config: Mapping[str, Any], fits: Callable[[str, int], bool]) -> Any:
    for key, value in config.items():
        name = str(key)
        if isinstance(value, dict):
            yield from _walk(value, fits)
        elif isinstance(value, int) and not isinstance(value, bool) and fits(name, value):
            yield value


def _heads(config: Mapping[str, Any]) -> Any:
    """The size of a head, wherever there are heads."""
    for value in config.values():
        if isinstance(value, dict):
            yield from _heads(value)
    width = next((config[one] for one in _OF_WIDTH if isinstance(config.get(one), int)), 0)
    heads = next((config[head] for head in _OF_HEADS if isinstance(config.get(head), int) and config[head]), 0)
    own = config.get("head_dim")
    if isinstance(own, int) and own:
        yield own
    elif width and heads and width % heads == 0:
        yield width // heads


_OF_WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim")
_OF_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")

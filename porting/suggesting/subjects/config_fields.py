"""What the fields of a config mean, whoever named them: a role, and the words that the field uses for it.

The reference's config is shrunk by role, and a builder of the user's is given the field of the role that it asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum


class Role(StrEnum):
    """What a number of a config says."""

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
    EXPERTS = "experts"
    CHOSEN = "experts of a token"
    WINDOW = "sliding window"
    EXPERT_INNER = "inner size of an expert"
    SHARED_EXPERTS = "experts of every token"
    MELS = "mel bins"
    BUCKETS = "buckets of distances"
    DISTANCE = "largest distance"
    RATIO = "inner size by hidden size"


WORDS: Mapping[Role, tuple[str, ...]] = {
    Role.HIDDEN: (
        "hidden_size", "n_embd", "d_model", "dim", "width", "hidden", "embed_dim", "emb_dim", "embedding_dim", "emb",
        "n_embed", "embed_size", "emb_size", "d_embed", "model_dim", "n_state", "hidden_width", "hidden_dim", "e",
        "embedding_size", "dmodel", "dim_model", "n_embedding", "transformer_width", "channels", "d_hidden", "k",
        "feature_dim", "token_dim", "emd_dim", "model_size", "d_emb",
    ),
    Role.DEPTH: (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "layers", "num_blocks", "n_blocks",
        "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "blocks", "n_encoder_layers",
        "num_transformer_blocks", "nlayers", "n", "l", "transformer_layers", "num_attention_layers",
    ),
    Role.HEADS: (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "heads", "nhead", "nheads", "attn_heads", "h",
        "encoder_attention_heads", "decoder_attention_heads", "attention_heads", "num_query_heads", "head",
        "transformer_heads", "head_num", "head_count", "n_attention_heads", "num_head",
    ),
    Role.GROUPS: ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_heads", "n_kv_head", "num_groups"),
    Role.HEAD_SIZE: ("head_dim", "head_size", "d_head", "dim_head", "d_k", "d_kv", "head_width"),
    Role.INNER: (
        "intermediate_size", "n_inner", "d_ff", "ffn_dim", "inner", "ff_dim", "mlp_dim", "dim_feedforward", "ff_size",
        "hidden_dim", "ffn_hidden", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_size", "feed_forward_hidden", "dff",
        "encoder_ff_dim", "decoder_ff_dim",
        "feedforward_dim", "ff_hidden", "feed_forward_size", "inner_dim", "ffn_hidden_size", "intermediate_dim", "f",
        "intermediate_width", "d_mlp", "mlp_hidden", "ffwd_dim", "ff_hidden_size", "dim_ff", "ff", "inter_dim", "n_mlp",
    ),
    Role.VOCABULARY: (
        "vocab_size", "n_vocab", "vocab", "num_tokens", "voc_size", "vocabulary_size", "n_tokens", "ntoken", "v",
        "src_vocab_size", "src_vocab", "vocabulary", "words", "n_words", "num_embeddings", "n_pieces", "dict_size",
        "num_words", "n_token", "ntokens", "decoder_vocab_size",
    ),
    Role.POSITIONS: (
        "max_position_embeddings", "n_positions", "positions", "max_len", "max_length", "block_size", "seq_len",
        "seq_length", "context_length", "n_ctx", "max_seq_len", "max_seq_length", "max_positions", "context_size",
        "max_sequence_length", "num_positions", "window", "t", "sequence_length", "maxlen", "context", "ctx_len",
        "n_position", "max_position", "length", "places", "max_target_positions", "max_source_positions",
        "ctx", "max_tokens",
    ),
    Role.SEGMENTS: (
        "type_vocab_size", "segments", "n_segments", "num_segments", "token_types", "n_token_types", "type_size",
        "num_token_types", "n_types", "segment_size", "num_types", "types", "segment_vocab_size", "kinds",
    ),
    Role.EPS: (
        "layer_norm_eps", "layer_norm_epsilon", "eps", "norm_eps", "rms_norm_eps", "epsilon", "layernorm_eps", "ln_eps",
        "variance_epsilon", "layernorm_epsilon",
    ),
    Role.DROPOUT: (
        "hidden_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_probs_dropout_prob",
        "p_drop", "dropout_prob", "dropout_rate", "p", "drop", "pdrop", "attention_dropout", "attn_dropout",
        "hidden_dropout", "drop_rate", "dropout_p", "emb_dropout", "ff_dropout",
    ),
    Role.ACTIVATION: (
        "hidden_act", "activation_function", "activation", "act", "hidden_activation", "afn", "act_fn", "nonlinearity",
    ),
    Role.PADDING: ("pad_token_id", "padding_idx", "pad_id", "pad_idx", "pad", "pad_index", "padding_index"),
    Role.CHANNELS: ("num_channels", "in_channels", "in_chans", "n_channels", "chans"),
    Role.IMAGE: ("image_size", "img_size", "input_resolution", "resolution", "image", "side"),
    Role.PATCH: ("patch_size", "patch"),
    Role.LABELS: ("num_labels", "num_classes", "n_classes", "n_labels", "classes", "labels", "output_dim"),
    Role.EXPERTS: ("num_local_experts", "num_experts", "n_routed_experts", "n_experts", "experts"),
    Role.CHOSEN: ("num_experts_per_tok", "moe_topk", "top_k_experts", "experts_per_token", "n_active_experts"),
    Role.WINDOW: ("sliding_window", "window_size", "attention_window", "sliding_window_size", "local_attention"),
    Role.BASE: ("rope_theta", "theta", "rope_base", "rotary_base", "rotary_emb_base", "base_frequency"),
    Role.EXPERT_INNER: ("moe_intermediate_size", "expert_dim", "moe_inter_dim", "expert_hidden_dim"),
    Role.SHARED_EXPERTS: ("n_shared_experts", "num_shared_experts"),
    Role.MELS: ("num_mel_bins", "n_mels", "num_mels", "mel_bins"),
    Role.BUCKETS: ("relative_attention_num_buckets", "num_buckets", "n_buckets"),
    Role.DISTANCE: ("relative_attention_max_distance", "max_distance"),
    Role.RATIO: ("mlp_ratio", "ff_mult", "ffn_mult", "mult", "expansion", "forward_expansion"),
}  # fmt: skip

_COUNT = "n num number no nb of count total"
_SIZE = "size dim dims dimension dimensions width d features"

PARTS: Mapping[Role, tuple[str, ...]] = {
    Role.SHARED_EXPERTS: ("shared", "expert experts", f"{_COUNT} moe"),
    Role.EXPERT_INNER: (
        "expert experts moe", "inner inter intermediate hidden ff ffn mlp dim size", f"{_SIZE} forward"
    ),
    Role.CHOSEN: (
        "top topk per active activated act chosen selected used",
        f"{_COUNT} k tok token tokens expert experts moe router",
    ),
    Role.RATIO: (
        "mult multiplier ratio factor expansion",
        "ff ffn mlp feed feedforward hidden inner widening expansion",
        f"{_SIZE} n forward layer factor ratio",
    ),
    Role.EXPERTS: ("expert experts", f"{_COUNT} local routed moe ffn"),
    Role.MELS: ("mel mels", f"{_COUNT} bin bins channel channels size dim audio input filters features"),
    Role.BUCKETS: ("bucket buckets", f"{_COUNT} relative rel position pos attention attn bias"),
    Role.DISTANCE: ("distance dist", "max maximum relative rel position pos attention attn"),
    Role.SEGMENTS: ("segment segments seg type types", f"{_COUNT} {_SIZE} vocab vocabulary token tokens sentence"),
    Role.VOCABULARY: (
        "vocab vocabulary voc dictionary", f"{_COUNT} {_SIZE} len length token tokens word words input"
    ),
    Role.EPS: ("eps epsilon", "layer norm layernorm ln rms rmsnorm value"),
    Role.DROPOUT: (
        "dropout drop",
        "rate prob probs probability p attention attn hidden embedding emb embd resid residual ff ffn mlp out output",
    ),
    Role.PADDING: ("pad padding", "token tok id idx index"),
    Role.ACTIVATION: ("activation act nonlinearity", "fn func function type name hidden ff ffn mlp"),
    Role.BASE: ("theta base", "rope rotary freq frequency embedding emb value"),
    Role.LABELS: ("classes class labels label", f"{_COUNT} out output outputs"),
    Role.PATCH: ("patch", "size width height"),
    Role.CHANNELS: ("channel channels chans", f"{_COUNT} in input image img color"),
    Role.IMAGE: ("image img", "size dim resolution width height input"),
    Role.GROUPS: ("kv group groups", f"{_COUNT} key value query head heads attention attn"),
    Role.HEAD_SIZE: ("head heads", _SIZE, f"{_SIZE} per attention attn hidden"),
    Role.HEADS: ("head heads", f"{_COUNT} q query attention attn self multi transformer"),
    Role.DEPTH: ("layer layers block blocks blk depth", f"{_COUNT} hidden transformer attention"),
    Role.INNER: (
        "ff ffn ffw ffwd pwff mlp feedforward feed inner intermediate",
        f"{_SIZE} n forward hidden units layer network",
    ),
    Role.WINDOW: ("window", "sliding local attention attn", "size len length"),
    Role.POSITIONS: (
        "context ctx seq sequence sequences position positions pos block",
        f"{_COUNT} max maximum length len size limit input embedding embeddings encoding encodings supported window",
    ),
    Role.HIDDEN: (
        "hidden embed embd embedding embeddings emb model residual", f"{_SIZE} n units token word state stream"
    ),
}  # fmt: skip
"""For names that are not listed: for each role sets of words, of each of which one is required, and at the end words
that may be with them."""

_PARTS = {
    role: (tuple(frozenset(one.split()) for one in keys), frozenset(" ".join((*keys, more)).split()))
    for role, (*keys, more) in PARTS.items()
}

_KNOWN = frozenset().union(*(words for _, words in _PARTS.values())) | {"max", "min"}


class Part(StrEnum):
    """The part of a model whose sizes a config may have apart from the others'."""

    ENCODER = "encoder"
    DECODER = "decoder"
    VISION = "vision"
    TEXT = "text"
    AUDIO = "audio"


_PART_WORDS: Mapping[str, tuple[Part, ...]] = {
    **dict.fromkeys(("encoder", "enc", "source", "src"), (Part.ENCODER,)),
    **dict.fromkeys(("decoder", "dec", "target", "tgt", "trg"), (Part.DECODER,)),
    **dict.fromkeys(("vision", "visual", "image", "img"), (Part.VISION, Part.ENCODER)),
    **dict.fromkeys(("text", "language", "lm"), (Part.TEXT, Part.DECODER)),
    **dict.fromkeys(("audio", "speech"), (Part.AUDIO, Part.ENCODER)),
}
"""What a word in a name says of the part that is meant: a text is what a decoder makes, if it is not a tower's."""

_INSTEAD = {Role.EXPERT_INNER: Role.INNER}
"""Where a config has no field of a role: an expert is as wide as the feed-forward part that it stands for."""

_SECTIONS = (
    "model transformer attention attn self_attention mlp ffn ff feed_forward feedforward embedding embeddings embed "
    "backbone architecture arch network net hparams params hyperparameters block encoder decoder enc dec text vision "
    "visual image audio language"
)
SECTIONS = frozenset(_SECTIONS.split())
"""Names under which a config of the user's holds further fields: ``config.attention.heads``."""

NESTED: Mapping[str, str] = {
    "rope_theta": "rope_parameters.rope_theta/rope_theta",
    "rope_type": "rope_parameters.rope_type/rope_scaling.rope_type/rope_scaling.type",
}
"""Fields that stand inside another, as a table spells them."""

_ROLES: dict[str, Role] = {word: role for role in reversed(list(WORDS)) for word in WORDS[role]}


def normal(word: str) -> str:
    """A word in small letters with underscores: ``hiddenSize`` and ``hidden-size`` are ``hidden_size``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).replace("-", "_").lower()


def role_of(word: str) -> Role | None:
    """What a config's field or a builder's parameter of this name says, as far as the name tells.

    >>> role_of("n_embd"), role_of("nLayers"), role_of("colour")
    (<Role.HIDDEN: 'hidden'>, <Role.DEPTH: 'depth'>, None)
    """
    return _ROLES.get(normal(word))


def composed_role(word: str) -> Role | None:
    """What a name says that is made of usual words, in whatever order; the first role that knows all of them.

    A single word says too little, and a size of a head is none of heads.  A word for a part of the model says nothing
    of the role.

    >>> composed_role("max_context_length"), composed_role("top_k_experts"), composed_role("blow_up")
    (<Role.POSITIONS: 'positions'>, <Role.CHOSEN: 'experts of a token'>, None)
    >>> composed_role("n_text_layer"), composed_role("imgsize")
    (<Role.DEPTH: 'depth'>, <Role.IMAGE: 'image'>)
    """
    words = _words(word)
    bare = [one for one in words if one not in _PART_WORDS]
    found = _of_words(words)
    if found is None and len(bare) < len(words):
        found = role_of("_".join(bare)) or _of_words(bare)
    return found


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
    halves = ((word[:i], word[i:]) for i in range(3, len(word) - 2))
    return next(((one, two) for one, two in halves if one in _KNOWN and two in _KNOWN), (word,))


def is_section(name: str) -> bool:
    """Whether a config of the user's may hold further fields under this name.

    >>> is_section("encoder"), is_section("attnConfig"), is_section("n_layers")
    (True, True, False)
    """
    word = normal(name)
    return re.sub(r"_?(config|cfg|args|params)$", "", word) in SECTIONS


def _part_of(name: str) -> tuple[Part, ...]:
    return next((_PART_WORDS[one] for one in _words(name) if one in _PART_WORDS), ())


def fields_of(role: Role, config: Mapping[str, object]) -> Iterator[str]:
    """The config's fields of that role that have a value, the most usual name first."""
    for word in WORDS[role]:
        if config.get(word) is not None and _fits(role, word, config):
            yield word


def _fits(role: Role, word: str, config: Mapping[str, object]) -> bool:
    """Whether a word of two meanings has this one here: next to ``dim``, ``hidden_dim`` is the inner size."""
    if word == "hidden_dim":
        width = any(config.get(one) is not None for one in ("dim", "d_model", "hidden_size", "n_embd"))
        return width == (role is Role.INNER)
    return _ROLES.get(word) is role


def field_for(asked: str, config: Mapping[str, object], others: tuple[str, ...] = ()) -> str | None:
    """The config's field that a builder means by ``asked``; None when there is none, or nothing tells.

    Args:
        asked: the parameter or key.
        config: the checkpoint's fields; ``attribute_map``, if it is among them, has other names for some.
        others: what else the builder asks for, which tells two meanings apart.

    >>> field_for("num_experts", {"num_local_experts": 8, "attribute_map": {"num_experts": "num_local_experts"}})
    'num_local_experts'
    >>> field_for("head_size", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": None})
    'head_dim/hidden_size // num_attention_heads'
    """
    if asked in config:
        return asked
    aliases = config.get("attribute_map")
    if isinstance(aliases, Mapping) and aliases.get(asked) in config:
        return str(aliases[asked])
    word = normal(asked)
    role = role_of(word) or composed_role(word)
    if word in _OTHERWISE:
        wide = any(role_of(one) is Role.HIDDEN for one in others if normal(one) not in _OTHERWISE)
        role = _OTHERWISE[word] if wide else Role.HIDDEN
    if role is None:
        return None
    if role is Role.RATIO:
        return _ratio(config)
    found = _sided(role, _part_of(asked), config) or next(fields_of(role, config), None)
    if found is None and role in _INSTEAD:
        found = next(fields_of(_INSTEAD[role], config), None)
    return _computed(config) if role is Role.HEAD_SIZE and found is None else found


def _sided(role: Role, parts: Sequence[Part], config: Mapping[str, object]) -> str | None:
    """The config's field of a role for one part of the model: ``decoder_layers``, ``vision_config.hidden_size``.

    If the name says no part and only nested configs have the role, the text model's is taken first.
    """
    for part in parts:
        for name, value in config.items():
            if value is not None and part in _part_of(name) and (role_of(name) or composed_role(name)) is role:
                return name
    if next(fields_of(role, config), None) is not None and not parts:
        return None
    inner = {name: value for name, value in config.items() if isinstance(value, Mapping) and is_section(name)}
    for part in (*parts, *(() if parts else (Part.TEXT, Part.VISION, Part.AUDIO, Part.ENCODER))):
        for name, fields in inner.items():
            found = next(fields_of(role, fields), None) if part in _part_of(name)[:1] else None
            if found is not None:
                return f"{name}.{found}"
    return None


_OTHERWISE = {"hidden_dim": Role.INNER, "channels": Role.CHANNELS}
"""What words mean that are the width by themselves and something else beside another name for it."""


def _ratio(config: Mapping[str, object]) -> str | None:
    """How many times as wide a feed-forward part is, as a table spells it; None unless it is a whole number."""
    width, inner = (next(fields_of(role, config), None) for role in (Role.HIDDEN, Role.INNER))
    sizes = [config[one] for one in (inner, width) if one]
    whole = len(sizes) == 2 and all(isinstance(one, int) and one > 0 for one in sizes)
    return f"{inner} // {width}" if whole and sizes[0] % sizes[1] == 0 else None  # type: ignore[operator]  # integers


def _computed(config: Mapping[str, object]) -> str | None:
    """The size of a head as a table spells it, where no field has it."""
    width, heads = (next(fields_of(role, config), None) for role in (Role.HIDDEN, Role.HEADS))
    null = next((f"{word}/" for word in WORDS[Role.HEAD_SIZE] if word in config), "")
    return f"{null}{width} // {heads}" if width and heads else None

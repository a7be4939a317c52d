"""How a variant is written, drawn from a seed: its family, its names, its groupings, its layouts, its flaw."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from porting.suggesting import Verdict

SIZES = {
    "vocabulary": 107, "hidden": 24, "depth": 3, "heads": 4, "inner": 52, "positions": 30, "segments": 2, "narrow": 16,
    "image": 12, "patch": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A reference.

    Attributes:
        architecture: as transformers spells it.
        fields: its config.
        causal, pre_norm: how it computes.
        segments: whether it has token types.
        offset: rows of its positions that are nobody's.
        act: its activation.
        eps: of its norms.
        complete: whether the variants have all its parts; BERT's pooler is missing.
        groups: heads of keys, where they are fewer than those of queries.
        rotary: positions turn queries and keys, and nothing is added.
        computed: positions are sines and cosines, and words are multiplied by the root of the width.
        gated: norms are RMS, the feed-forward part has a gate, and nothing has a bias.
        head: there is a head for masked words, tied to the word table.
        narrow: tables and their norm are narrower than the stream, and a matrix is between.
        shared: all layers have the same weights.
        parallel: attention and feed-forward part are given the same, and both are added.
        rotated: the share of each head that is turned.
        normed: queries and keys of each head are normed.
        pixels: it is given images.
    """

    architecture: str
    fields: Mapping[str, object]
    causal: bool = False
    pre_norm: bool = False
    segments: bool = False
    offset: int = 0
    act: str = "gelu"
    eps: float = 1e-12
    complete: bool = True
    groups: int = 0
    rotary: bool = False
    computed: bool = False
    gated: bool = False
    head: bool = False
    narrow: bool = False
    shared: bool = False
    parallel: bool = False
    rotated: float = 1.0
    normed: bool = False
    pixels: bool = False


_BERT = {
    "vocab_size": 107, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 52,
    "max_position_embeddings": 30, "type_vocab_size": 2,
}  # fmt: skip
FAMILIES = (
    Family("BertModel", _BERT, segments=True, complete=False),
    Family(
        "DistilBertModel",
        {"vocab_size": 107, "dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 52, "max_position_embeddings": 30},
    ),
    Family(
        "RobertaModel",
        {**_BERT, "max_position_embeddings": 32, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-12},
        offset=2,
        complete=False,
    ),
    Family(
        "GPT2Model",
        {"vocab_size": 107, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_inner": 52, "n_positions": 30},
        causal=True,
        pre_norm=True,
        act="tanh",
        eps=1e-5,
    ),
    Family("BertForMaskedLM", _BERT, segments=True, head=True),
    Family(
        "LlamaModel",
        {
            "vocab_size": 107, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 52, "max_position_embeddings": 30, "rms_norm_eps": 1e-5,
        },
        causal=True,
        pre_norm=True,
        act="silu",
        eps=1e-5,
        groups=2,
        rotary=True,
        gated=True,
    ),
    Family(
        "CTRLModel",
        {"vocab_size": 107, "n_embd": 24, "n_layer": 3, "n_head": 4, "dff": 52, "n_positions": 30},
        causal=True,
        pre_norm=True,
        act="relu",
        eps=1e-6,
        computed=True,
    ),
    Family("ElectraModel", {**_BERT, "embedding_size": 16}, segments=True, narrow=True),
    Family(
        "AlbertModel",
        {**_BERT, "embedding_size": 16, "num_hidden_groups": 1, "hidden_act": "gelu_new"},
        segments=True,
        complete=False,
        act="tanh",
        narrow=True,
        shared=True,
    ),
    Family(
        "GPTNeoXModel",
        {
            "vocab_size": 107, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
            "intermediate_size": 52, "max_position_embeddings": 30, "rotary_pct": 0.5, "layer_norm_eps": 1e-5,
        },
        causal=True,
        pre_norm=True,
        eps=1e-5,
        rotary=True,
        rotated=0.5,
        parallel=True,
    ),
    Family(
        "Qwen3Model",
        {
            "vocab_size": 107, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 6,
            "num_key_value_heads": 2, "intermediate_size": 52, "max_position_embeddings": 30, "rms_norm_eps": 1e-5,
        },
        causal=True,
        pre_norm=True,
        act="silu",
        eps=1e-5,
        groups=2,
        rotary=True,
        gated=True,
        normed=True,
    ),
    Family(
        "ViTModel",
        {
            "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 52,
            "image_size": 12, "patch_size": 4, "num_channels": 3, "layer_norm_eps": 1e-12,
        },
        pre_norm=True,
        complete=False,
        pixels=True,
    ),
)  # fmt: skip

_E, _A, _T, _I, _N = Verdict.EXACT, Verdict.APPROXIMATE, Verdict.TRUNK, Verdict.IMPOSSIBLE, Verdict.NOT_FOUND
Right = tuple[frozenset[Verdict], str]
"""The verdicts that are right, none for a refusal, and what the right reason is about.

What no weights can do is impossible; where nothing has a name for it, *not found* is right as well.
"""


def _one(verdict: Verdict, said: str = "") -> Right:
    return frozenset({verdict}), said


_WRONG: Right = (frozenset({_I, _N}), "")

FLAWS: Mapping[str, Right] = {
    "no query bias": _one(_I, "bias"),
    "no output bias": _one(_I, "bias"),
    "no embedding norm": _one(_I, "norm"),
    "no last norm": (frozenset({_T, _I}), "norm"),
    "other gelu": _one(_A, "activation"),
    "relu": _one(_I, "activation"),
    "other eps": _one(_A, "eps"),
    "unbiased norms": (frozenset({_A, _E, _T}), "unbiased"),  # a gain takes it in, but for where eps is added
    "no mask": _one(_I, "mask"),
    "mask over queries": _one(_I, "mask"),
    "mask behind softmax": _one(_I, "mask"),
    "not causal": _WRONG,
    "causal off by one": _WRONG,
    "extra norm": (frozenset({_I, _N}), "norm"),  # not impossible where a norm behind it might take it away again
    "unscaled attention": (
        frozenset({_E, _T, _N}),
        "",
    ),  # the query's weights take the scale in, if they are by themselves
    "attention scaled twice": (frozenset({_E, _T, _N}), ""),  # as above
    "typed scale": (frozenset({_A, _N}), ""),
    "residual dropped": _one(_I, "residual missing"),
    "norms on the other side": _WRONG,
    "positions shifted": _one(_N),  # but for the last row, a table could shift them back
    "other theta": _WRONG,
    "pairs of two kinds": _WRONG,
    "heads cut wrong": _WRONG,
    "other head count": _WRONG,
    "segments ignored": _WRONG,
    "layer twice": _WRONG,
    "head not tied": (frozenset({_E, _T}), ""),  # a copy of the words
    "dropout left on": (frozenset(), "something else each time"),
    "float32 inside": (frozenset({_E, _T}), ""),  # rounding, and no other meaning
}
"""Flaw -> what is right to say of it."""

_POOLS: Mapping[str, Sequence[str]] = {
    "words": ("tok", "wte", "token_embedding", "word_emb", "embed", "lut"),
    "places": ("pos", "wpe", "position_embedding", "pos_emb", "pe"),
    "kinds": ("seg", "segment_embedding", "type_emb", "token_type"),
    "start": ("norm", "ln", "layer_norm", "emb_ln"),
    "end": ("final_norm", "ln_f", "norm_out"),
    "blocks": ("layers", "blocks", "h", "encoder", "transformer_blocks", "stack"),
    "query": ("q", "query", "wq", "q_proj", "to_q", "W_query"),
    "key": ("k", "key", "wk", "k_proj", "to_k", "W_key"),
    "value": ("v", "value", "wv", "v_proj", "to_v", "W_value"),
    "fused": ("qkv", "in_proj", "c_attn", "to_qkv", "attn_in"),
    "pair": ("kv", "to_kv", "key_value"),
    "out": ("out", "proj", "o_proj", "wo", "dense", "c_proj", "to_out"),
    "norm1": ("norm1", "ln_1", "attn_norm", "sa_norm", "n_a"),
    "norm2": ("norm2", "ln_2", "ffn_norm", "out_norm", "n_b"),
    "gate": ("gate", "w3", "gate_proj", "g_proj"),
    "up": ("fc1", "up", "linear1", "w_1", "c_fc", "lin1"),
    "down": ("fc2", "down", "linear2", "w_2", "lin2", "ff_out"),
    "gain": ("weight", "gamma", "scale", "a_2", "g"),
    "shift": ("bias", "beta", "shift", "b_2", "b"),
    "list": ("heads", "attn_heads", "parts"),
    "query norm": ("q_norm", "norm_q", "qn"),
    "key norm": ("k_norm", "norm_k", "kn"),
    "project": ("emb_proj", "project", "widen"),
    "pixels": ("pixels", "images", "img", "pixel_values"),
    "ids": ("ids", "x", "input_ids", "tokens", "idx", "src"),
    "mask": ("mask", "attention_mask", "keep", "pad_mask"),
    "types": ("segments", "token_type_ids", "segment_ids"),
}
_FIELDS: Mapping[str, Sequence[str]] = {
    "vocabulary": ("vocab_size", "vocab", "n_vocab", "num_tokens"),
    "hidden": ("hidden_size", "d_model", "width", "n_embd", "dim", "embed_dim"),
    "depth": ("num_layers", "n_layers", "depth", "num_hidden_layers", "n_layer"),
    "heads": ("num_heads", "n_heads", "heads", "num_attention_heads", "nhead"),
    "inner": ("intermediate_size", "d_ff", "ffn_dim", "inner", "mlp_dim"),
    "positions": ("max_len", "positions", "max_position_embeddings", "block_size", "seq_len"),
    "segments": ("segments", "type_vocab_size", "n_segments"),
    "groups": ("n_kv_heads", "num_kv_heads", "num_key_value_heads"),
    "narrow": ("embedding_size",),
    "image": ("image_size", "img_size"),
    "patch": ("patch_size",),
}


@dataclass(frozen=True)
class Style:
    """One draw: how a variant is written.  What each choice can be stands in :func:`drawn`."""

    seed: int
    family: Family
    flaw: str
    names: Mapping[str, str]
    fields: Mapping[str, str]
    qkv: str
    order: tuple[str, ...]
    matrices: str
    norms: str
    tables: str
    grouping: str
    mask: str
    first: str
    config: str
    shuffle: int
    pairs: str
    lazy: bool

    @property
    def expected(self) -> Right:
        """The right verdicts, and what the right reason is about."""
        flawed = bool(self.flaw) and self.flaw != "float32 inside"
        if (
            self.family.offset and self.told_mask
        ):  # counts padding as a position: shown by rows that are padded in front
            verdicts, about = FLAWS[self.flaw] if flawed else (frozenset(), "left padding")
            return (verdicts | {Verdict.IMPOSSIBLE} if verdicts or not flawed else verdicts), about
        if flawed:
            return FLAWS[self.flaw]
        return _one(Verdict.EXACT if self.family.complete and not self.turned else Verdict.TRUNK)

    @property
    def told_mask(self) -> bool:
        """Whether the forward is given one."""
        return not (self.flaw == "no mask" or self.family.pixels or (self.family.causal and self.seed % 3))

    @property
    def turned(self) -> bool:
        """Whether the residual stream, which is returned, has its features in another order."""
        return self.family.computed and self.pairs == "neighbours"


def drawn(seed: int, *, flawed: bool | None = None) -> Style:
    """The style of a seed.

    Args:
        seed: of the draw.
        flawed: with a flaw, without one, or as the seed says: one of three has one.
    """
    draw = random.Random(seed)  # noqa: S311  # a test's draw, no secret
    family = FAMILIES[seed % len(FAMILIES)]
    names = {role: draw.choice(pool) for role, pool in _POOLS.items()}
    if draw.random() < 0.25:  # names that say nothing
        for role in _POOLS:
            if role not in _GIVEN:
                names[role] = "".join(draw.choice("bcdfghjklmnp") for _ in range(3)) + str(len(role))
    if len(set(names.values())) < len(names):
        listed = list(names.values())
        names = {role: name if listed.count(name) == 1 else f"{name}_{role}" for role, name in names.items()}
        names |= {role: draw.choice(_POOLS[role]) for role in sorted(_GIVEN)}
    order = ["query", "key", "value"]
    if draw.random() < 0.3:
        draw.shuffle(order)
    possible = [name for name in FLAWS if _fits(name, family, seed)]
    wants = draw.random() < 1 / 3 if flawed is None else flawed
    return Style(
        seed=seed,
        family=family,
        flaw=draw.choice(possible) if wants else "",
        names=names,
        fields={role: draw.choice(pool) for role, pool in _FIELDS.items()},
        qkv=draw.choice(
            ("separate", "fused", "grouped")
            if family.groups
            else ("separate", "fused", "interleaved", "inside", "pair", "heads", "raw heads")
        ),
        order=tuple(order),
        matrices=draw.choice(("linear", "turned", "raw")),
        norms=draw.choice(("torch", "own")),
        tables=draw.choice(("embedding", "parameter", "one more axis", *(("joint",) if _joint(family) else ()))),
        grouping=draw.choice(("layers", "kinds", "alternating")),
        mask=draw.choice(("bool", "padding", "additive", "long", "bool 4")),
        first=draw.choice(("batch", "batch", "batch" if family.pixels else "sequence")),
        config=draw.choice(("items", "attributes", "arguments")),
        shuffle=draw.randrange(1 << 30),
        pairs=draw.choice(("halves", "halves" if family.rotated < 1 else "neighbours")),
        lazy=draw.random() < 0.15,
    )


def _joint(family: Family) -> bool:
    """Whether words and positions can be one table."""
    return not (family.offset or family.rotary or family.computed or family.head or family.pixels)


def _fits(flaw: str, family: Family, seed: int) -> bool:
    """Whether a family can have a flaw."""
    masked = not family.pixels and not (family.causal and seed % 3)
    learned = not (family.offset or family.rotary or family.computed or family.pixels)
    return {
        "no embedding norm": not family.pre_norm and not family.narrow,
        "no last norm": family.pre_norm,
        "positions shifted": learned,  # with rows to spare a table can shift them back; rotations are relative
        "no query bias": not family.gated,
        "no output bias": not family.gated,
        "unbiased norms": not family.gated,
        "other gelu": family.act in {"gelu", "tanh"},
        "relu": family.act != "relu",
        "no mask": not family.causal and not family.pixels,
        "mask over queries": masked and not family.causal,
        "mask behind softmax": masked and not family.causal,
        "not causal": family.causal,
        "causal off by one": family.causal,
        "norms on the other side": not (family.parallel or family.narrow),
        "other theta": family.rotary,
        "pairs of two kinds": family.rotary and family.rotated == 1,
        "other head count": not (family.groups or family.rotary),
        "unscaled attention": not family.normed,
        "attention scaled twice": not family.normed,
        "segments ignored": family.segments,
        "layer twice": not family.shared,
        "other eps": not family.shared,
        "head not tied": family.head,
    }.get(flaw, True)


_GIVEN = frozenset({"ids", "mask", "types", "pixels"})
"""Roles of the forward's arguments, which have names that say something."""

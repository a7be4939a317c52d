"""The mistakes that people make most often and that are hardest to name, each with its name."""

# ruff: noqa: E501  # the lines of other files, as they stand there

from __future__ import annotations

from tests.causes.wrong_ports import Wrong

MASK = 'scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))'
NORMED = "return self.LayerNorm(self.dense(x) + around)"
CAUSAL = "causal = torch.ones(s, s).tril().bool()"
KEYS = "k.repeat_interleave(HEADS // SHARED, dim=1)"
VALUES = "v.repeat_interleave(HEADS // SHARED, dim=1)"
TILED = {KEYS: "k.repeat(1, HEADS // SHARED, 1, 1)", VALUES: "v.repeat(1, HEADS // SHARED, 1, 1)"}
STD = """y = self.dense(x) + around
        y = (y - y.mean(-1, keepdim=True)) / (y.std(-1, keepdim=True{}) + EPS)
        return self.LayerNorm.weight * y + self.LayerNorm.bias"""


def _tiled(ratio: int) -> Wrong:
    heads, width = 2 * ratio, 8 * ratio
    changes = {
        **TILED,
        "HIDDEN, HEADS, SHARED, SIZE, INNER, VOCABULARY, LAYERS = 32, 8": f"HIDDEN, HEADS, SHARED, SIZE, INNER, VOCABULARY, LAYERS = {width}, {heads}",
    }
    return Wrong(
        "llama", changes, ("key and value heads tiled",), fields={"num_attention_heads": heads, "hidden_size": width}
    )


def _table(edits: dict[str, str], detail: str) -> Wrong:
    """A table of cosines and sines that is made once, when the file is imported, with a rounding in it."""
    read = {"(angle.to(x.dtype) for angle in angles(s))": "(angle[:s].to(x.dtype) for angle in TABLE)"}
    made = {"def rotate_half(": "TABLE = angles(64)\n\n\ndef rotate_half("}
    return Wrong("llama", {**read, **made, **edits}, ("rotary angles in half precision",), detail)


LISTED = {
    "-inf mask inverted": Wrong("bert", {MASK: MASK.replace("== 0", "== 1")}, ("padding mask inverted",)),
    "-1e9 mask inverted": Wrong(
        "bert", {MASK: MASK.replace("== 0", "== 1").replace('float("-inf")', "-1e9")}, ("padding mask inverted",)
    ),
    "-inf mask on the queries": Wrong(
        "bert", {"mask[:, None, None, :]": "mask[:, None, :, None]"}, ("padding mask on the queries",)
    ),
    "-1e9 mask on the queries": Wrong(
        "bert",
        {"mask[:, None, None, :]": "mask[:, None, :, None]", 'float("-inf")': "-1e9"},
        ("padding mask on the queries",),
    ),
    "mask of the first row": Wrong(
        "bert",
        {"mask[:, None, None, :]": "mask[:1, None, None, :]"},
        ("padding mask of other rows",),
        "the mask of the first",
    ),
    "mask of all rows": Wrong(
        "gpt2",
        {"mask[:, None, None, :]": "mask.amin(0)[None, None, None, :]"},
        ("padding mask of other rows",),
        "padding in any row",
    ),
    "masks repeated for each head": Wrong(
        "bert",
        {"mask[:, None, None, :]": "mask.repeat(HEADS, 1).view(len(mask), HEADS, 1, -1)"},
        ("padding mask of other rows",),
        "repeated as a whole for each head",
    ),
    "softmax over queries, bert": Wrong("bert", {"softmax(dim=-1)": "softmax(dim=-2)"}, ("softmax over the queries",)),
    "softmax over queries, gpt2": Wrong("gpt2", {"softmax(-1)": "softmax(-2)"}, ("softmax over the queries",)),
    "triu(0), -inf": Wrong(
        "gpt2",
        {CAUSAL: "causal = ~torch.ones(s, s).triu(0).bool()", "-1e30": 'float("-inf")'},
        ("causal mask off by one",),
    ),
    "triu(0), -1e30": Wrong("gpt2", {CAUSAL: "causal = ~torch.ones(s, s).triu(0).bool()"}, ("causal mask off by one",)),
    "tril(1)": Wrong("gpt2", {CAUSAL: "causal = torch.ones(s, s).tril(1).bool()"}, ("causal mask off by one",)),
    "tril(1), llama": Wrong("llama", {".tril()": ".tril(1)"}, ("causal mask off by one",)),
    "tril(1), marian": Wrong("marian", {".tril()": ".tril(1)"}, ("causal mask off by one",)),
    "tiled 4": _tiled(4),
    "tiled 6": _tiled(6),
    "tiled 8": _tiled(8),
    "tiled 9": _tiled(9),
    "mask after softmax": Wrong(
        "bert",
        {MASK: "scores", "scores.softmax(dim=-1)": "scores.softmax(dim=-1) * mask[:, None, None, :]"},
        ("padding mask after the softmax",),
    ),
    "gate for up in the layer's own code": Wrong(
        "llama",
        {
            "return x + self.mlp(self.post_attention_layernorm(x))": "z = self.post_attention_layernorm(x)\n"
            "        gate = self.mlp.gate_proj(z)\n        return x + self.mlp.down_proj(F.silu(gate) * gate)"
        },
        ("wrong tensor",),
        "reads the output of linear in model.layers.{i}.mlp.gate_proj",
        probes=r"model\.embed_tokens|model\.layers\.\d+(\.mlp\.gate_proj)?|lm_head",
        inner=False,
    ),
    "0.044175, and a root of eight digits": Wrong(
        "gpt2",
        {"0.044715": "0.044175", "math.sqrt(2.0 / math.pi)": "0.79788456"},
        ("GELU constant",),
        "0.044175",
    ),
    "activation on the other half": Wrong(
        "llama",
        {"F.silu(self.gate_proj(x)) * self.up_proj(x)": "F.silu(self.up_proj(x)) * self.gate_proj(x)"},
        ("gate and up swapped",),
        probes=r"model\.embed_tokens|model\.layers\.\d+(\.mlp(\.(gate|up)_proj)?)?|lm_head",
        inner=False,
    ),
    "0.044175": Wrong("gpt2", {"0.044715": "0.044175"}, ("GELU constant",), "0.044175"),
    "heads reversed": Wrong("bert", {"context = shares @ v": "context = (shares @ v).flip(1)"}, ("heads reversed",)),
    "heads of keys reversed": Wrong(
        "gpt2",
        {"k = k.view(b, s, HEADS, -1).transpose(1, 2)": "k = k.view(b, s, HEADS, -1).transpose(1, 2).flip(1)"},
        ("heads reversed",),
    ),
    "residual of the layer's input": Wrong(
        "bert",
        {"self.output(self.intermediate(attended), attended)": "self.output(self.intermediate(attended), x)"},
        ("wrong tensor",),
        "add in",
    ),
    "residual before the attention": Wrong(
        "gpt2",
        {
            "x = x + self.attn(self.ln_1(x), mask)\n        return x + self.mlp(self.ln_2(x))": "y = x + self.attn(self.ln_1(x), mask)\n        return x + self.mlp(self.ln_2(y))"
        },
        ("step left out",),
        "add in",
    ),
    "residual before the attention, llama": Wrong(
        "llama",
        {
            "x = x + self.self_attn(self.input_layernorm(x), mask)\n        return x + self.mlp(self.post_attention_layernorm(x))": "y = x + self.self_attn(self.input_layernorm(x), mask)\n        return x + self.mlp(self.post_attention_layernorm(y))"
        },
        ("step left out",),
        "add in",
    ),
    "gate and up": Wrong(
        "llama",
        {"F.silu(self.gate_proj(x)) * self.up_proj(x)": "F.silu(self.up_proj(x)) * self.gate_proj(x)"},
        ("gate and up swapped",),
    ),
    "theta": Wrong(
        "llama",
        {"THETA, FACTOR, LOW, HIGH, KNOWN, EPS = 10000.0": "THETA, FACTOR, LOW, HIGH, KNOWN, EPS = 500000.0"},
        ("rotary theta",),
        "500000",
    ),
    "heads 6": Wrong(
        "bert",
        {
            "HIDDEN, HEADS, INNER, VOCABULARY, POSITIONS, LAYERS, EPS = 24, 4": "HIDDEN, HEADS, INNER, VOCABULARY, POSITIONS, LAYERS, EPS = 24, 6"
        },
        ("number of heads",),
        inner=False,
    ),
    "heads 2, vit": Wrong(
        "vit",
        {
            "HIDDEN, HEADS, INNER, LAYERS, PIXELS, PATCH, LABELS, EPS = 24, 4": "HIDDEN, HEADS, INNER, LAYERS, PIXELS, PATCH, LABELS, EPS = 24, 2"
        },
        ("number of heads",),
        inner=False,
    ),
    "heads 3, gpt2": Wrong(
        "gpt2",
        {
            "HIDDEN, HEADS, VOCABULARY, POSITIONS, LAYERS, EPS = 24, 4": "HIDDEN, HEADS, VOCABULARY, POSITIONS, LAYERS, EPS = 24, 3"
        },
        ("number of heads",),
        inner=False,
    ),
    "sine exponent doubled": Wrong(
        "marian",
        {"10000.0 ** (torch.arange(0, HIDDEN, 2)": "10000.0 ** (2 * torch.arange(0, HIDDEN, 2)"},
        ("sinusoid frequencies",),
    ),
    "gamma and beta": Wrong(
        "bert",
        {
            NORMED: "return nn.functional.layer_norm(self.dense(x) + around, (HIDDEN,), self.LayerNorm.bias, self.LayerNorm.weight, EPS)"
        },
        ("norm gain and bias exchanged",),
    ),
    "std + eps": Wrong("bert", {NORMED: STD.format(", correction=0")}, ("LayerNorm eps outside of the root",)),
    "sample std + eps": Wrong("bert", {NORMED: STD.format("")}, ("LayerNorm with Bessel's correction",)),
    "segments never added": Wrong(
        "bert", {"        x = x + self.token_type_embeddings(types)\n": ""}, ("token types missing",)
    ),
    "head tied": Wrong(
        "llama",
        {
            "self.lm_head(self.model(": "F.linear(self.model(",
            "attention_mask))": "attention_mask), self.model.embed_tokens.weight)",
        },
        ("other weights",),
        "it computes with model.embed_tokens.weight",
    ),
    "NSP order": Wrong(
        "bert",
        {"self.seq_relationship(pooled)": "self.seq_relationship(pooled).flip(-1)"},
        ("labels in another order",),
    ),
    "hidden scores are 0": Wrong("gpt2", {"-1e30": "0.0"}, ("hidden scores set to a small number",), "to 0"),
    "hidden scores are -1": Wrong("gpt2", {"-1e30": "-1.0"}, ("hidden scores set to a small number",), "to -1"),
    "hidden scores are 1": Wrong("gpt2", {"-1e30": "1.0"}, ("hidden scores set to a small number",), "to 1"),
    "cosines in bfloat16": _table(
        {"turn.cos(), turn.sin()": "turn.cos().bfloat16().float(), turn.sin().bfloat16().float()"},
        "cosine and sine are rounded to torch.bfloat16",
    ),
    "angles in float16": _table(
        {"turn.cos(), turn.sin()": "turn.half().float().cos(), turn.half().float().sin()"},
        "the angles are rounded to torch.float16",
    ),
    "frequencies in float16": _table(
        {"[:, None] * speeds": "[:, None] * speeds.half().float()"},
        "the inverse frequencies are rounded to torch.float16",
    ),
}

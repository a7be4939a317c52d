"""Mistakes that were written down before anybody looked at whether they are named."""

# ruff: noqa: E501  # the lines of other files, as they stand there

from __future__ import annotations

from tests.causes.wrong_ports import Wrong

MASK = 'scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))'
LAYER = """x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))"""

THIRTY = {
    "feed-forward network of the layer's input": Wrong(
        "bert", {"self.intermediate(attended), attended": "self.intermediate(x), attended"}, ("wrong tensor",)
    ),
    "largest over positions pooled": Wrong(
        "bert", {"self.dense(x[:, 0])": "self.dense(x.amax(1))"}, ("pooled from the wrong place",)
    ),
    "norm before the activation": Wrong(
        "bert",
        {"self.LayerNorm(F.gelu(self.dense(x)))": "F.gelu(self.LayerNorm(self.dense(x)))"},
        ("step in another place",),
        "layer_norm in cls.predictions.transform.LayerNorm",
    ),
    "positions stop at 9": Wrong(
        "bert",
        {"places = torch.arange(ids.shape[1])[None]": "places = torch.arange(ids.shape[1])[None].clamp(max=9)"},
        ("positions end too early",),
        "9",
    ),
    "decoder without its transform": Wrong(
        "bert", {"self.decoder(self.transform(x))": "self.decoder(x)"}, ("transform skipped",)
    ),
    "next sentence from the unpooled token": Wrong(
        "bert", {"self.seq_relationship(pooled)": "self.seq_relationship(x[:, 0])"}, ("wrong tensor",)
    ),
    "weak mask": Wrong(
        "bert",
        {MASK: "scores + (1.0 - mask[:, None, None, :].to(scores.dtype)) * -2.0"},
        ("padding mask too weak",),
        "2 is subtracted",
    ),
    "a token hidden as padding": Wrong(
        "bert",
        {"x = self.embeddings(ids, types)": "mask = mask * (ids != 5); x = self.embeddings(ids, types)"},
        ("token masked as padding",),
        "token id 5",
    ),
    "first layer twice": Wrong(
        "bert",
        {"for layer in self.encoder.layer:": "for layer in (self.encoder.layer[0], self.encoder.layer[0]):"},
        ("layers in another order",),
    ),
    "segments in the wrong order": Wrong(
        "bert",
        {"self.token_type_embeddings(types)": "self.token_type_embeddings(types.flip(1))"},
        ("another order",),
        "the output of embedding in bert.embeddings.token_type_embeddings",
    ),
    "positions around padding": Wrong(
        "gpt2",
        {"self.wpe(torch.arange(ids.shape[1])[None])": "self.wpe((mask.cumsum(1) - 1).clamp_min(0))"},
        ("positions counted around padding",),
        probes=r"(?!transformer.wpe).*",
    ),
    "stream of norms": Wrong(
        "gpt2",
        {LAYER: "x = x + self.attn(self.ln_1(x), mask)\n        x = self.ln_2(x)\n        return x + self.mlp(x)"},
        ("residual taken after the norm",),
    ),
    "root of 2 pi": Wrong(
        "gpt2", {"math.sqrt(2.0 / math.pi)": "math.sqrt(2.0 * math.pi)"}, ("GELU factor",), "sqrt(2 pi)"
    ),
    "square for cube": Wrong(
        "gpt2", {"torch.pow(x, 3.0)": "torch.pow(x, 2.0)"}, ("another number",), "is 2 where the reference has 3"
    ),
    "window of eight": Wrong(
        "gpt2",
        {
            "causal = torch.ones(s, s).tril().bool()": "causal = (torch.ones(s, s).tril() - torch.ones(s, s).tril(-8)).bool()"
        },
        ("local window that should not be there",),
        "7 positions",
    ),
    "norms exchanged": Wrong(
        "gpt2",
        {LAYER: "x = x + self.attn(self.ln_2(x), mask)\n        return x + self.mlp(self.ln_1(x))"},
        ("wrong tensor",),
        "ln_1 reads transformer.h.{i}.ln_2.weight",
    ),
    "keys for values": Wrong(
        "gpt2", {"scores.softmax(-1) @ v": "scores.softmax(-1) @ k"}, ("wrong tensor",), "part 1 of"
    ),
    "logits scaled": Wrong(
        "gpt2",
        {"return self.lm_head(x)": "return self.lm_head(x) / math.sqrt(HIDDEN)"},
        ("a step too many",),
        "div by 4.89898",
    ),
    "values rotated": Wrong(
        "llama",
        {
            "        k = k.repeat_interleave": "        v = v * cos + rotate_half(v) * sin\n        k = k.repeat_interleave"
        },
        ("values rotated",),
    ),
    "keys not rotated": Wrong(
        "llama", {"        k = k * cos + rotate_half(k) * sin\n": ""}, ("rotary missing",), "keys alone"
    ),
    "sine for cosine": Wrong(
        "llama", {"return turn.cos(), turn.sin()": "return turn.sin(), turn.cos()"}, ("rotary direction",)
    ),
    "activation of the product": Wrong(
        "llama",
        {"F.silu(self.gate_proj(x)) * self.up_proj(x)": "F.silu(self.gate_proj(x) * self.up_proj(x))"},
        ("activation of a product",),
        "silu comes after mul",
    ),
    "other original length": Wrong(
        "llama", {"4.0, 64, 1e-3": "4.0, 8192, 1e-3"}, ("rotary scaling",), "8192 where the reference has 64"
    ),
    "values tiled and keys not": Wrong(
        "llama",
        {"v.repeat_interleave(HEADS // SHARED, dim=1)": "v.repeat(1, HEADS // SHARED, 1, 1)"},
        ("key and value heads tiled",),
        "values alone",
    ),
    "exponent by the width": Wrong(
        "llama",
        {"torch.arange(0, SIZE, 2).float() / SIZE": "torch.arange(0, SIZE, 2).float() / HIDDEN"},
        ("rotary theta",),
        "theta is 10 ",
    ),
    "final norm left out": Wrong("llama", {"return self.norm(x)": "return x"}, ("final norm missing",)),
    "source's padding ignored": Wrong(
        "marian",
        {
            "x = layer(x, memory, own, mask[:, None, None, :].bool())": "x = layer(x, memory, own, torch.ones_like(mask)[:, None, None, :].bool())"
        },
        ("padding mask ignored",),
    ),
    "no way around the cross-attention": Wrong(
        "marian",
        {
            "self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory, allowed))": "self.encoder_attn_layer_norm(self.encoder_attn(x, memory, allowed))"
        },
        ("residual missing",),
    ),
    "final bias left out": Wrong("marian", {" + self.final_logits_bias": ""}, ("decoder bias missing",)),
    "memory without the last layer": Wrong(
        "marian",
        {
            "            x = layer(x, mask[:, None, None, :].bool())\n        return x": "            y, x = x, layer(x, mask[:, None, None, :].bool())\n        return y"
        },
        ("layers in another order",),
    ),
    "decoder's positions begin at 1": Wrong(
        "marian",
        {"x = x + self.positions[:length]": "x = x + self.positions[1 : length + 1]"},
        ("position offset",),
        "+1",
    ),
    "class token at the end": Wrong(
        "vit",
        {
            "torch.cat((self.cls_token.expand(len(pixels), -1, -1), patches), dim=1)": "torch.cat((patches, self.cls_token.expand(len(pixels), -1, -1)), dim=1)"
        },
        ("another order",),
        "(in the order 1 2 3 4",
    ),
    "patches by columns": Wrong(
        "vit",
        {"self.projection(pixels).flatten(2)": "self.projection(pixels).transpose(2, 3).flatten(2)"},
        ("another order",),
        "(in the order 0 1 5 9 13 2",
    ),
    "blue first": Wrong(
        "vit",
        {"self.projection(pixels)": "self.projection(pixels.flip(1))"},
        ("another order",),
        "an input in another order (in the order 2 1 0",
    ),
    "pixels normalised again": Wrong(
        "vit",
        {"x = self.embeddings(pixels)": "x = self.embeddings((pixels - 0.5) / 0.5)"},
        ("wrong tensor",),
        "where the reference's reads an input",
    ),
    "positions of the patches alone": Wrong(
        "vit",
        {
            "torch.cat((self.cls_token.expand(len(pixels), -1, -1), patches), dim=1)\n        return x + self.position_embeddings": "patches + self.position_embeddings[:, 1:]\n        return torch.cat((self.cls_token.expand(len(pixels), -1, -1), x), dim=1)"
        },
        ("another function",),
        "cat, where vit.embeddings of the reference has add, at 0 of an axis of 17 only",
    ),
    "class token of the first layer": Wrong(
        "vit",
        {
            "x = layer(x)\n        return self.layernorm(x)": "x = layer(x)\n            first = x if layer is self.layers[0] else first\n        return self.layernorm(first)"
        },
        ("layers in another order",),
    ),
}

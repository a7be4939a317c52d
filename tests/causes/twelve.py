"""Mistakes that were written down after those of thirty.py were named, and before anybody looked at these."""

# ruff: noqa: E501  # the lines of other files, as they stand there

from __future__ import annotations

from tests.causes.wrong_ports import Wrong

SCORES = "scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))"

TWELVE = {
    "segments behind the norm": Wrong(
        "bert",
        {
            "        x = x + self.token_type_embeddings(types)\n        return self.LayerNorm(x)": "        return self.LayerNorm(x) + self.token_type_embeddings(types)"
        },
        ("step in another place",),
        "add in bert.embeddings",
    ),
    "values of the token before": Wrong(
        "gpt2",
        {"scores.softmax(-1) @ v": "scores.softmax(-1) @ v.roll(1, 2)"},
        ("another order",),
        "(in the order 12 0 1 2",
    ),
    "half of the attention": Wrong(
        "gpt2",
        {"x = x + self.attn(self.ln_1(x), mask)": "x = x + 0.5 * self.attn(self.ln_1(x), mask)"},
        ("branch scaled",),
        "0.5",
    ),
    "gain before the norm": Wrong(
        "llama",
        {
            "variance = x.pow(2)": "x = self.weight * x\n        variance = x.pow(2)",
            "return self.weight * (x * torch.rsqrt(variance + EPS))": "return x * torch.rsqrt(variance + EPS)",
        },
        ("norm gain before the norm",),
    ),
    "gate added": Wrong(
        "llama",
        {"F.silu(self.gate_proj(x)) * self.up_proj(x)": "F.silu(self.gate_proj(x)) + self.up_proj(x)"},
        ("another function",),
        "add, where model.layers.{i}.mlp of the reference has mul",
    ),
    "decoder's embeddings not scaled": Wrong(
        "marian",
        {"self.decoder(self.shared(targets) * math.sqrt(HIDDEN)": "self.decoder(self.shared(targets)"},
        ("embedding scale missing",),
    ),
    "bias of the patches left out": Wrong(
        "vit",
        {
            "nn.Conv2d(3, HIDDEN, kernel_size=PATCH, stride=PATCH)": "nn.Conv2d(3, HIDDEN, kernel_size=PATCH, stride=PATCH)\n        self.projection.forward = lambda x: F.conv2d(x, self.projection.weight, stride=PATCH)"
        },
        ("parameter not used",),
        "vit.embeddings.patch_embeddings.projection.bias",
    ),
    "positions of the pictures reversed": Wrong(
        "vit",
        {"return x + self.position_embeddings": "return x + self.position_embeddings.flip(1)"},
        ("another order",),
        "(in the order 16 15 14",
    ),
    "ReLU in the pooler": Wrong(
        "bert", {"torch.tanh(self.dense(x[:, 0]))": "torch.relu(self.dense(x[:, 0]))"}, ("ReLU for another activation",)
    ),
    "decoder's bias twice": Wrong(
        "bert",
        {"return self.decoder(self.transform(x))": "return self.decoder(self.transform(x)) + self.decoder.bias"},
        ("bias added twice",),
    ),
    "scores divided by the layer's number": Wrong(
        "llama",
        {
            "self.self_attn(self.input_layernorm(x), mask)": "self.self_attn(self.input_layernorm(x), mask, self.number)",
            "Layer() for _ in range(LAYERS)": "Layer(n) for n in range(LAYERS)",
            "def __init__(self) -> None:\n        super().__init__()\n        self.self_attn = Attention()": "def __init__(self, number: int) -> None:\n        super().__init__()\n        self.number = number + 1\n        self.self_attn = Attention()",
            "def forward(self, x: Tensor, mask: Tensor) -> Tensor:\n        b, s, _": "def forward(self, x: Tensor, mask: Tensor, number: int) -> Tensor:\n        b, s, _",
            "q, k, v, attn_mask=bias": "q / number, k, v, attn_mask=bias",
        },
        ("attention scaled by another factor",),
        "sqrt(32)",
    ),
    "norm of the feed-forward network": Wrong(
        "marian",
        {
            "return self.final_layer_norm(x + self.fc2(F.silu(self.fc1(x))))": "return x + self.final_layer_norm(self.fc2(F.silu(self.fc1(x))))"
        },
        ("norm before the sum",),
    ),
}

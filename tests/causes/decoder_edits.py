"""Mistakes of those who write Llama and what came after it again, made in the text of decoder.py."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from tests.causes import decoder
from tests.causes.decoder import Config


@dataclass(frozen=True)
class Edit:
    """A mistake in the text.

    Attributes:
        family: whose port it is made in, by its name in decoders.py.
        changes: what stands there, and what stands there instead.
        detail: what the finding says of it.
    """

    family: str
    changes: Mapping[str, str]
    detail: str = ""


# What stands in the file.
GAIN = "gain = 1 + self.weight if self.config.one_added else self.weight"
SQUARES = "torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)"
NORM_OF_HEADS = 'return norm(x) if norm is not None and self.config.own_norms == "head" else x'
NORM_OF_WIDTH = "x = norm(x)"
TURNED = "q, k = self.q_norm(q), self.k_norm(k)"
ROTATED = "q, k = self.rotary(q, positions), self.rotary(k, positions)"
SPEEDS = "self.transition(speeds, known=config.known) if config.smooth else speeds / config.stretched"
POWERS = "1.0 / config.theta ** (torch.arange(0, config.rotated, 2).float() / config.rotated)"
PROJECTED = "q, k, v = self.q(x), self.k(x), self.v(x)"
NORMED_ALONE = "normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)"
JOINED = "torch.cat([turned, rest], -1)"
CUT = "x[..., : self.config.rotated], x[..., self.config.rotated :]"
CLIPPED = "tensor.clamp(-self.config.clip, self.config.clip)"
REPEATED = "k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)"
SCALED = "scores = q @ k.mT / self.config.head_size**0.5"
CAPPED = "torch.tanh(scores / self.config.score_cap) * self.config.score_cap"
BIASED = "scores + linear_biases(self.config.heads, x.shape[1]).to(x)"
SLOPES = "linear_biases(self.config.heads, x.shape[1]).diff(dim=-1)[..., :1].to(x)"
COUNTED = f"scores + {SLOPES} * ((allowed[:, :, -1:].cumsum(-1) - 1) * allowed[:, :, -1:]).to(x)"
MASKED = "scores.masked_fill(~allowed, -1e30)"
TANH = '"tanh" if self.config.activation == "gelu_tanh" else "none"'
WINDOW = "config.window if number % 2 == 0 else 0"
NORMED = ("x if self.norm_1 is None else self.norm_1(x)", "x if self.norm_2 is None else self.norm_2(x)")
ATTENDED = f"self.attention({NORMED[0]}, allowed, positions)"
FED = f"self.feed({NORMED[1]})"
BEHIND = (
    "branch if self.norm_3 is None else self.norm_3(branch)",
    "branch if self.norm_4 is None else self.norm_4(branch)",
)
SHARES = "shares = shares / shares.sum(-1, keepdim=True) if self.config.normed else shares"
SCORES = 'logits.sigmoid() if self.config.scoring == "sigmoid" else logits.softmax(-1)'
CHOSEN = "wanted.topk(self.config.chosen, -1)"
SHARED = "shares[rows, places, None] * expert(flat[rows])"
WORDS = "found = super().forward(input) * self.scale"

# What is written instead, where that is long.
ONE_NORM = "return x * torch.rsqrt(x.square().mean((1, 3), True) + norm.eps) * norm.weight if norm else x"
NORM_OF_EACH = """own = x.view(*x.shape[:2], -1, 8)
            x = (own * torch.rsqrt(own.square().mean(-1, True) + norm.eps)).flatten(2) * norm.weight"""
BY_GROUPS = (
    "joined = torch.cat([self.q(x), self.k(x), self.v(x)], -1).unflatten(-1, (2, 4, 8)); "
    "q, k, v = (part.flatten(2) for part in joined.split([2, 1, 1], -2))"
)
TILED = "k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)"

HALVES = "turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)"
NEIGHBOURS = "turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)"
LAID_AS_HALVES = "cos, sin = (torch.cat([one, one], -1) for one in (cos, sin))"
LAID_AS_NEIGHBOURS = "cos, sin = (one.repeat_interleave(2, -1) for one in (cos, sin))"
TURNED_NEIGHBOURS = "rotated * cos + torch.stack([-rotated[..., 1::2], rotated[..., ::2]], -1).flatten(-2) * sin"
TURNED_HALVES = "rotated * cos + torch.cat([-second, first], -1) * sin"

EDITS: Mapping[str, tuple[Edit, ...]] = {
    "RMSNorm eps": (
        Edit("llama", {"= config.eps, config": "= 1e-6, config"}, "eps is 1e-06 where the reference has 1e-05"),
        Edit("qwen3", {"= config.eps, config": "= 3e-4, config"}, "eps is 0.0003 where the reference has 1e-05"),
    ),
    "RMSNorm eps outside of the root": (
        Edit("llama", {SQUARES: "1 / (centred.square().mean(-1, keepdim=True).sqrt() + self.eps)"}),
    ),
    "LayerNorm for RMSNorm": (Edit("llama", {"if self.config.centred else x\n": "if True else x\n"}),),
    "RMSNorm for LayerNorm": (Edit("mpt", {"if self.config.centred else x\n": "if False else x\n"}),),
    "length for root mean square": (Edit("llama", {"square().mean(": "square().sum("}),),
    "RMSNorm gain missing": (Edit("llama", {"return normed * gain": "return normed"}),),
    "norm that does not divide": (
        Edit("llama", {NORMED_ALONE: "normed = x"}, "the gain alone"),
        Edit("gemma2", {NORMED_ALONE: "normed = x"}, "the gain alone"),
        Edit("mpt", {NORMED_ALONE: "normed = centred"}, "the mean is taken off and nothing divided"),
    ),
    "norm gain with 1 added": (Edit("llama", {GAIN: "gain = 1 + self.weight"}),),
    "norm gain without 1 added": (Edit("gemma2", {GAIN: "gain = self.weight"}),),
    "query and key norm missing": (
        Edit("qwen3", {NORM_OF_HEADS: "return x"}),
        Edit("olmo2", {NORM_OF_WIDTH: "pass"}),
    ),
    "query and key norm over the whole width": (Edit("qwen3", {NORM_OF_HEADS: ONE_NORM}),),
    "query and key norm over each head": (Edit("olmo2", {NORM_OF_WIDTH: NORM_OF_EACH}),),
    "query and key norm behind the rotation": (
        Edit("qwen3", {NORM_OF_HEADS: "return x", ROTATED: f"{ROTATED}; q, k = self.q_norm(q), self.k_norm(k)"}),
    ),
    "query and key norm before the rotation": (
        Edit("hunyuan", {TURNED: "pass", ROTATED: f"q, k = self.q_norm(q), self.k_norm(k); {ROTATED}"}),
    ),
    "soft cap of scores missing": (Edit("gemma2", {"if self.config.score_cap:": "if False:"}, "of 1.5"),),
    "soft cap of scores of another size": (
        Edit("gemma2", {CAPPED: "torch.tanh(scores / 2.25) * 2.25"}, "capped at 2.25 where the reference has 1.5"),
    ),
    "soft cap of scores that should not be there": (
        Edit("llama", {"if self.config.score_cap": "if True", CAPPED: "torch.tanh(scores / 1.25) * 1.25"}, "at 1.25"),
    ),
    "soft cap behind the mask": (Edit("gemma2", {MASKED: "scores", SCALED: f"{SCALED}; scores = {MASKED}"}),),
    "soft cap of logits missing": (Edit("gemma2", {"cap = self.config.logit_cap": "cap = 0"}, "of 2"),),
    "soft cap of logits of another size": (
        Edit("gemma2", {"cap = self.config.logit_cap": "cap = 3.5"}, "capped at 3.5 where the reference has 2"),
    ),
    "soft cap of logits that should not be there": (
        Edit("llama", {"cap = self.config.logit_cap": "cap = 1.5"}, "capped at 1.5 where the reference has no cap"),
    ),
    "ALiBi missing": (Edit("mpt", {"if self.config.slopes:": "if False:"}),),
    "ALiBi of the other sign": (Edit("mpt", {"scores + linear_biases": "scores - linear_biases"}),),
    "ALiBi slopes": (
        Edit("mpt", {"steepest: float = 8.0": "steepest: float = 4.0"}, "fall to 2^-4 where the reference has 2^-8"),
        Edit("mpt", {"torch.arange(1, heads + 1)": "torch.arange(heads)"}, "the slopes begin at 1"),
        Edit("mpt", {SCALED: "scores = q @ k.mT", BIASED: f"({BIASED}) / 6**0.5"}, "before the scores are scaled"),
        Edit("mpt", {BIASED: BIASED.replace("+ ", "+ 3 * ")}, "multiplied by 3"),
    ),
    "ALiBi of other positions": (Edit("mpt", {BIASED: COUNTED}, "places that the mask keeps are counted"),),
    "query, key and value interleaved wrongly": (
        Edit(
            "llama", {PROJECTED: BY_GROUPS}, "read as by groups of heads where it is all queries, all keys, all values"
        ),
        Edit("glm", {PROJECTED: BY_GROUPS}, "read as by groups of heads"),
    ),
    "clamp missing": (Edit("mpt", {"if self.config.clip:": "if False:"}),),
    "clamp at another number": (
        Edit("mpt", {CLIPPED: "tensor.clamp(-0.6, 0.6)"}, "at 0.6 where"),
        Edit("mpt", {CLIPPED: "tensor.clamp(max=self.config.clip)"}, "from above alone"),
    ),
    "clamp that should not be there": (
        Edit("llama", {"if self.config.clip:": "if True:", CLIPPED: "tensor.clamp(-1.25, 1.25)"}, "at 1.25 where"),
    ),
    "key and value heads tiled": (Edit("llama", {REPEATED: TILED}, "head h % 2"),),
    "rotary scaling missing": (
        Edit("smooth", {SPEEDS: "speeds"}, "the reference divides the slow angles by 8"),
        Edit("stretched", {SPEEDS: "speeds"}, "the reference divides all angles by 4"),
        Edit("short", {SPEEDS: "speeds"}, "the reference divides the slow angles by 8"),
    ),
    "rotary scaling": (
        Edit("stretched", {SPEEDS: "speeds / 3"}, "all angles are divided by 3; the reference divides all angles by 4"),
        Edit("llama", {SPEEDS: "speeds / 3"}, "all angles are divided by 3; the reference does not scale them"),
    ),
    "rotary NTK scaling": (
        Edit("llama", {"config.theta **": "(config.theta * 4 ** (8 / 6)) **"}, "theta is multiplied by 4 ** (8 / 6)"),
        Edit("llama", {"config.theta **": "(config.theta * 2 ** (8 / 6)) **"}, "theta is multiplied by 2 ** (8 / 6)"),
        Edit("ntk", {"config.theta **": "10000.0 **"}, "theta is 10000 where the reference has it multiplied by 4 **"),
    ),
    "rotary theta": (
        Edit("llama", {"config.theta **": "500000.0 **"}, "theta is 500000 where the reference has 10000"),
        Edit("stretched", {"config.theta **": "500000.0 **"}, "theta is 500000 where the reference has 10000"),
    ),
    "rotary on the whole head": (
        Edit("glm", {POWERS: POWERS.replace("config.rotated", "8"), CUT: "x, x[..., :0]"}, "the first 8 of 8 channels"),
    ),
    "rotary on a part of the head": (
        Edit("llama", {POWERS: POWERS.replace("config.rotated", "4"), CUT: "x[..., :4], x[..., 4:]"}, "the first 4 of"),
        Edit(
            "glm", {CUT: "x[..., 4:], x[..., :4]", JOINED: "torch.cat([rest, turned], -1)"}, "the last 4 of 8 channels"
        ),
    ),
    "rotary pairing": (
        Edit("glm", {"if self.config.neighbours:": "if False:"}),
        Edit("llama", {"if self.config.neighbours:": "if True:"}),
    ),
    "rotary angles of the other pairing": (
        Edit("llama", {HALVES: f"{LAID_AS_HALVES}; turned = {TURNED_NEIGHBOURS}"}, "pairs of neighbours, with cosines"),
        Edit("llama", {HALVES: f"{LAID_AS_NEIGHBOURS}; turned = {TURNED_HALVES}"}, "pairs of halves, with cosines"),
        Edit("glm", {NEIGHBOURS: f"{LAID_AS_HALVES}; turned = {TURNED_NEIGHBOURS}"}, "pairs of neighbours, with cos"),
    ),
    "rotary direction": (
        Edit("glm", {"- second * sin, second * cos + first * sin": "+ second * sin, second * cos - first * sin"}),
    ),
    "rotary missing": (Edit("glm", {ROTATED: "pass"}),),
    "rotary positions counted around padding": (
        Edit("llama", {"torch.arange(input_ids.shape[1])[None]": "(attention_mask.cumsum(-1) - 1).clamp_min(0)"}),
    ),
    "gate and up swapped": (
        Edit("llama", {"self.active(self.gate(x)) * self.up(x)": "self.active(self.up(x)) * self.gate(x)"}),
    ),
    "exact GELU for another activation": (
        Edit("llama", {"F.silu(x)": "F.gelu(x)"}, "exact GELU where the reference has SiLU"),
        Edit("gemma2", {TANH: '"none"'}, "exact GELU where the reference has tanh GELU"),
    ),
    "embedding scale missing": (Edit("gemma2", {WORDS: "found = super().forward(input)"}),),
    "embedding scale that should not be there": (Edit("gemma2", {WORDS: f"{WORDS} * self.scale"}),),
    "embeddings scaled by another factor": (
        Edit("gemma2", {WORDS: "found = super().forward(input) * 7"}, "by 7 where the reference has sqrt(24)"),
    ),
    "logits scaled": (Edit("llama", {"self.head(self.norm(x))": "self.head(self.norm(x)) / 24**0.5"}, "1 / sqrt(24)"),),
    "local window missing": (Edit("gemma2", {WINDOW: "0"}),),
    "local window of another width": (
        Edit("gemma2", {"tril(-self.window)": "tril(-self.window - 1)"}, "6 positions before it are seen where the"),
    ),
    "local window that should not be there": (Edit("gemma2", {WINDOW: "config.window"}, "5 positions before it"),),
    "local windows in the wrong layers": (Edit("gemma2", {WINDOW: WINDOW.replace("== 0", "== 1")}),),
    "norm behind the branch": (
        Edit(
            "llama", {ATTENDED: "self.norm_1(self.attention(x, allowed, positions))", FED: "self.norm_2(self.feed(x))"}
        ),
    ),
    "norm before the branch": (
        Edit("olmo2", {**dict.fromkeys(BEHIND, "branch"), NORMED[0]: "self.norm_3(x)", NORMED[1]: "self.norm_4(x)"}),
    ),
    "norm missing in a layer": (Edit("gemma2", {BEHIND[0]: "branch"}),),
    "routing weights not normalised": (
        Edit("mixtral", {SHARES: "shares = shares"}),
        Edit("dots1", {SHARES: "shares = shares"}),
    ),
    "routing weights normalised": (Edit("qwen3_moe", {SHARES: SHARES.partition(" if ")[0]}),),
    "routing weights by another function": (
        Edit("qwen3_moe", {SCORES: "logits.sigmoid()"}, "sigmoid for softmax, not normed"),
        Edit("mixtral", {SHARES: "shares = shares.softmax(-1)"}, "softmax over the chosen experts' probabilities"),
        Edit("mixtral", {SCORES: "logits", SHARES: "shares = shares"}, "no function for softmax, not normed"),
    ),
    "another function": (  # which chooses other experts as well: the correction is added to it
        Edit("dots1", {SCORES: "logits.softmax(-1)"}, "softmax, where"),
    ),
    "routing weights ignored": (
        Edit("mixtral", {SHARED: "expert(flat[rows])"}, "the sum"),
        Edit("qwen3_moe", {SHARED: "expert(flat[rows]) / 2"}, "their mean"),
    ),
    "routing weights in the opposite order": (
        Edit("mixtral", {"shares[rows, places, None]": "shares.flip(1)[rows, places, None]"}),
    ),
    "routing weights scaled": (
        Edit(
            "dots1", {"shares = shares * self.config.scaled": "shares = shares"}, "times 1 where the reference has 2.5"
        ),
    ),
    "number of experts per token": (
        Edit("mixtral", {CHOSEN: "wanted.topk(1, -1)"}, "1 where the reference has 2"),
        Edit("dots1", {CHOSEN: "wanted.topk(3, -1)"}, "3 where the reference has 2"),
        Edit("qwen3_moe", {CHOSEN: "wanted.topk(3, -1)"}, "3 where the reference has 2"),
    ),
    "expert selection bias": (
        Edit("dots1", {CHOSEN: "scores.topk(self.config.chosen, -1)"}, "experts are chosen without the bias"),
        Edit("dots1", {"scores.gather(-1, chosen)": "wanted.gather(-1, chosen)"}, "the bias is in the weights too"),
    ),
    "final norm missing": (Edit("llama", {"self.head(self.norm(x))": "self.head(x)"}),),
}


def edited(edit: Edit, config: Config) -> nn.Module:
    """The decoder, out of its file with the mistake in it."""
    source = Path(decoder.__file__ or "").read_text(encoding="utf-8")
    for old, new in edit.changes.items():
        if old not in source:
            raise LookupError(f"the file no longer has {old!r}")
        source = source.replace(old, new)
    module = ModuleType("edited_decoder")
    sys.modules[module.__name__] = module  # where dataclasses look for what an annotation means
    exec(compile(source, module.__name__, "exec"), module.__dict__)  # noqa: S102  # it is our own file
    fields: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    made: nn.Module = module.Decoder(module.Config(**fields))
    return made

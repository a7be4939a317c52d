"""Transformers as many people would write them, drawn from a seed: other names, groupings, fusions, layouts, flaws.

A variant computes what its family computes, unless it was given a flaw.  How it says so is drawn: what its parts are
called, how they are grouped, which matrices are fused and how, which are transposed, in which order parts are defined,
how its forward is called and what it takes.  The right answer is known: it is written beside the draw.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.suggesting.llama import halves, neighbours
from tests.suggesting.pieces import Norm, Parts, Root, Turned, angles, computed
from tests.suggesting.styles import SIZES, Style


class Variant(nn.Module):
    """The model of a style."""

    def __init__(self, style: Style, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.style, self.sizes = style, dict(sizes)
        s, e = style, sizes["hidden"]
        eps = s.family.eps
        layers = [self._layer(number) for number in range(1 if s.family.shared else sizes["depth"])]
        parts: dict[str, nn.Module | nn.Parameter] = {}
        self._tables(parts)
        if not s.family.pre_norm and s.flaw != "no embedding norm":
            parts[s.names["start"]] = self._norm(self._width, eps)
        if s.family.narrow:
            parts[s.names["project"]] = self._matrix(self._width, e)
        if s.family.pre_norm and s.flaw != "no last norm":
            parts[s.names["end"]] = self._norm(e, eps)
        if s.family.head:
            parts |= {"transform": self._matrix(e, e), "transform_norm": self._norm(e, eps)}
            parts["vocabulary_bias"] = nn.Parameter(torch.zeros(sizes["vocabulary"]))
        if s.flaw == "head not tied":
            parts["vocabulary_matrix"] = nn.Parameter(torch.randn(sizes["vocabulary"], e))
        if s.flaw == "extra norm":
            parts["another"] = self._norm(e, eps)
        parts |= self._grouped(layers)
        named = list(parts.items())
        random.Random(s.shuffle).shuffle(named)  # noqa: S311  # as above
        for name, part in named:
            setattr(self, name, part)
        if s.family.computed or s.family.rotary:
            turns = angles(self.sizes, s.family.rotated, 500.0 if s.flaw == "other theta" else 1e4)
            table = computed(self.sizes, s.pairs) if s.family.computed else turns
            self.register_buffer("angles", table, persistent=False)

    # -------------------------------------------------------------------------------------------- parts

    @property
    def _width(self) -> int:
        """Of the tables."""
        return self.sizes["narrow" if self.style.family.narrow else "hidden"]

    def _norm(self, width: int, eps: float) -> nn.Module:
        if self.style.family.gated:
            return Root(width, eps, self.style.names["gain"])
        unbiased = self.style.flaw == "unbiased norms"
        if self.style.norms == "torch" and not unbiased:
            return nn.LayerNorm(width, eps=eps)
        return Norm(width, eps, self.style.names["gain"], self.style.names["shift"], unbiased=unbiased)

    def _matrix(self, into: int, out: int, *, bias: bool = True) -> nn.Module:
        bias = bias and not self.style.family.gated
        if self.style.lazy and self.style.matrices == "linear":
            return nn.LazyLinear(out, bias=bias)
        return nn.Linear(into, out, bias=bias) if self.style.matrices == "linear" else Turned(into, out, bias=bias)

    def _tables(self, parts: dict[str, nn.Module | nn.Parameter]) -> None:
        s, e = self.style, self._width
        if s.family.pixels:
            size, patch = self.sizes["image"], self.sizes["patch"]
            grid = 3 * patch * patch
            parts[s.names["words"]] = nn.Conv2d(3, e, patch, patch) if s.tables != "parameter" else nn.Linear(grid, e)
            parts[s.names["kinds"]] = nn.Parameter(torch.randn(1, 1, e))
            parts[s.names["places"]] = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, e))
            return
        words, places = self.sizes["vocabulary"], self.sizes["positions"]
        if s.family.rotary or s.family.computed:
            parts[s.names["words"]] = nn.Embedding(words, e)
        elif s.tables == "joint":
            parts[s.names["words"]] = nn.Embedding(words + places, e)
        elif s.tables == "embedding":
            parts[s.names["words"]], parts[s.names["places"]] = nn.Embedding(words, e), nn.Embedding(places, e)
        else:
            parts[s.names["words"]] = nn.Embedding(words, e)
            more = (1,) if s.tables == "one more axis" else ()
            parts[s.names["places"]] = nn.Parameter(torch.randn(*more, places, e))
        if s.family.segments:
            parts[s.names["kinds"]] = nn.Embedding(self.sizes["segments"], e)

    def _layer(self, number: int) -> tuple[Parts, Parts]:
        s, e, h = self.style, self.sizes["hidden"], self.sizes["heads"]
        n = s.names
        bias = {role: not (role == "query" and s.flaw == "no query bias") for role in s.order}
        attention: dict[str, nn.Module | nn.Parameter] = {n["out"]: self._matrix(e, e, bias=s.flaw != "no output bias")}
        if s.family.normed:
            attention |= {n[role]: self._norm(e // h, s.family.eps) for role in ("query norm", "key norm")}
        few = e // h * s.family.groups
        if s.family.groups and s.qkv == "separate":
            attention |= {n[role]: self._matrix(e, e if role == "query" else few) for role in s.order}
        elif s.family.groups:
            attention[n["fused"]] = self._matrix(e, e + 2 * few)
        elif s.qkv == "separate" or s.flaw == "no query bias":
            attention |= {n[role]: self._matrix(e, e, bias=bias[role]) for role in s.order}
        elif s.qkv in {"fused", "interleaved", "inside"}:
            attention[n["fused"]] = self._matrix(e, 3 * e)
        elif s.qkv == "pair":
            attention |= {n["query"]: self._matrix(e, e), n["pair"]: self._matrix(e, 2 * e)}
        elif s.qkv == "heads":
            attention[n["list"]] = nn.ModuleList(
                Parts({n[role]: self._matrix(e, e // h) for role in s.order}, s.shuffle) for _ in range(h)
            )
        else:
            attention |= {n[role]: nn.Parameter(torch.randn(h, e, e // h)) for role in s.order}
            attention |= {f"{n[role]}_b": nn.Parameter(torch.zeros(h, e // h)) for role in s.order}
        eps = 1e-3 if s.flaw == "other eps" and number == 1 else s.family.eps
        attention[n["norm1"]] = self._norm(e, s.family.eps)
        feed: dict[str, nn.Module | nn.Parameter] = {
            n["up"]: self._matrix(e, self.sizes["inner"]),
            n["down"]: self._matrix(self.sizes["inner"], e),
            n["norm2"]: self._norm(e, eps),
        }
        if s.family.gated:
            feed[n["gate"]] = self._matrix(e, self.sizes["inner"])
        return Parts(attention, s.shuffle + 1), Parts(feed, s.shuffle + 2)

    def _grouped(self, layers: Sequence[tuple[Parts, Parts]]) -> dict[str, nn.Module]:
        s = self.style
        name = s.names["blocks"]
        if s.grouping == "alternating":
            return {name: nn.ModuleList(part for layer in layers for part in layer)}
        if s.grouping == "kinds":
            return {
                f"{name}_a": nn.ModuleList(layer[0] for layer in layers),
                f"{name}_f": nn.ModuleList(layer[1] for layer in layers),
            }
        return {name: nn.ModuleList(Parts({"attn": a, "ff": f}, s.shuffle) for a, f in layers)}

    def _of(self, number: int) -> tuple[Any, Any]:
        s = self.style
        number = 0 if s.family.shared else number
        found: Any = getattr(self, s.names["blocks"], None)
        if s.grouping == "alternating":
            return found[2 * number], found[2 * number + 1]
        if s.grouping == "kinds":
            return getattr(self, f"{s.names['blocks']}_a")[number], getattr(self, f"{s.names['blocks']}_f")[number]
        return found[number].attn, found[number].ff

    # -------------------------------------------------------------------------------------------- run

    def run(self, ids: Tensor, mask: Tensor | None, kinds: Tensor | None) -> Tensor:
        """Shape: [b s] -> [b s e], whatever comes first outside."""
        s = self.style
        if s.first == "sequence":
            ids, kinds = ids.T, None if kinds is None else kinds.T
        if s.family.pixels:
            x = self._patches(ids)
            keep = torch.ones(1, 1, 1, x.shape[1], dtype=torch.bool)
        else:
            keep = self._keep(mask, ids)
            shift = 1 if s.flaw == "positions shifted" else 0
            x = self._embedded(ids, (torch.arange(ids.shape[1]) + shift) % self.sizes["positions"])
        if kinds is not None:
            x = x + getattr(self, s.names["kinds"])(torch.zeros_like(kinds) if s.flaw == "segments ignored" else kinds)
        if hasattr(self, s.names["start"]) and not s.family.pre_norm:
            x = getattr(self, s.names["start"])(x)
        if s.family.narrow:
            x = getattr(self, s.names["project"])(x)
        if s.flaw == "extra norm":
            x = self.get_submodule("another")(x)
        for number in range(self.sizes["depth"]):
            x = self._block(x, keep, number)
            if s.flaw == "layer twice" and number == 0:
                x = self._block(x, keep, number)
        if s.flaw == "dropout left on":
            x = F.dropout(x, 0.1)
        if s.family.pre_norm and s.flaw != "no last norm":
            x = getattr(self, s.names["end"])(x)
        if s.family.head:
            x = self.get_submodule("transform_norm")(F.gelu(self.get_submodule("transform")(x)))
            untied = s.flaw == "head not tied"
            decoder = self.get_parameter("vocabulary_matrix") if untied else getattr(self, s.names["words"]).weight
            x = x @ decoder.T + self.get_parameter("vocabulary_bias")
        out: Tensor = x.transpose(0, 1) if s.first == "sequence" else x
        return out

    def _patches(self, images: Tensor) -> Tensor:
        """Shape: [b c h w] -> [b s e], a token of its own in front."""
        s, patch = self.style, self.sizes["patch"]
        weight = getattr(self, s.names["words"])
        if isinstance(weight, nn.Conv2d):
            x = weight(images).flatten(2).transpose(1, 2)
        else:
            x = weight(F.unfold(images, patch, stride=patch).transpose(1, 2))
        first = getattr(self, s.names["kinds"]).expand(len(x), -1, -1)
        out: Tensor = torch.cat([first, x], 1) + getattr(self, s.names["places"])
        return out

    def _embedded(self, ids: Tensor, places: Tensor) -> Tensor:
        s, length = self.style, ids.shape[1]
        x: Tensor
        if s.family.rotary:
            x = getattr(self, s.names["words"])(ids)
        elif s.family.computed:
            root = self.sizes["hidden"] ** 0.5
            x = getattr(self, s.names["words"])(ids) * root + self.get_buffer("angles")[places]
        elif s.tables == "joint":
            table = getattr(self, s.names["words"])
            x = table(ids) + table(self.sizes["vocabulary"] + places)
        elif s.tables == "embedding":
            x = getattr(self, s.names["words"])(ids) + getattr(self, s.names["places"])(places)
        elif s.flaw == "positions shifted":
            x = getattr(self, s.names["words"])(ids) + getattr(self, s.names["places"]).roll(-1, -2)[..., :length, :]
        else:
            x = getattr(self, s.names["words"])(ids) + getattr(self, s.names["places"])[..., :length, :]
        return x

    def _keep(self, mask: Tensor | None, ids: Tensor) -> Tensor:
        keep = torch.ones_like(ids, dtype=torch.bool)
        if mask is not None:
            kind = self.style.mask
            keep = {
                "bool": lambda: mask & True,
                "bool 4": lambda: (mask & True)[:, 0, 0],
                "padding": lambda: ~(mask & True),
                "additive": lambda: (mask / 1.0) > -1.0,
                "long": lambda: mask * 1 > 0,
            }[kind]()
            if kind == "long" and mask.dtype == torch.bool:
                raise TypeError("a mask of numbers is expected")
            if kind == "additive" and not mask.is_floating_point():
                raise TypeError("an additive mask is expected")
        flaw, length = self.style.flaw, ids.shape[1]
        keep = keep[:, None, :, None] if flaw == "mask over queries" else keep[:, None, None, :]
        if self.style.family.causal and flaw != "not causal":
            keep = keep & torch.ones(length, length, dtype=torch.bool).tril(1 if flaw == "causal off by one" else 0)
        return keep

    def _block(self, x: Tensor, keep: Tensor, number: int) -> Tensor:
        s = self.style
        attention, feed = self._of(number)
        n = s.names
        norm1, norm2 = getattr(attention, n["norm1"]), getattr(feed, n["norm2"])
        up, down, out = getattr(feed, n["up"]), getattr(feed, n["down"]), getattr(attention, n["out"])
        if s.family.gated:
            gate, first = getattr(feed, n["gate"]), up
            up = lambda y: self._act(gate(y)) * first(y)  # noqa: E731  # in the place of the first matrix
        act: Callable[[Tensor], Tensor] = (lambda y: y) if s.family.gated else self._act
        residual = 0.0 if s.flaw == "residual dropped" else 1.0
        if s.family.parallel:
            beside: Tensor = residual * x + out(self._attend(attention, norm1(x), keep)) + down(act(up(norm2(x))))
            return beside
        if s.family.pre_norm != (s.flaw == "norms on the other side"):
            x = residual * x + out(self._attend(attention, norm1(x), keep))
            before: Tensor = x + down(act(up(norm2(x))))
            return before
        x = norm1(residual * x + out(self._attend(attention, x, keep)))
        behind: Tensor = norm2(x + down(act(up(x))))
        return behind

    def _act(self, x: Tensor) -> Tensor:
        kind = self.style.family.act
        if self.style.flaw == "relu":
            return F.relu(x)
        if kind in {"silu", "relu"}:
            return F.silu(x) if kind == "silu" else F.relu(x)
        if self.style.flaw == "other gelu":
            kind = "gelu" if kind == "tanh" else "tanh"
        return F.gelu(x, approximate="tanh" if kind == "tanh" else "none")

    def _attend(self, attention: Any, x: Tensor, keep: Tensor) -> Any:  # a tensor
        h, s = self.sizes["heads"], self.style
        q, k, v = self._projected(attention, x)
        if s.family.normed:
            q, k = getattr(attention, s.names["query norm"])(q), getattr(attention, s.names["key norm"])(k)
        if s.family.rotary:
            kinds = [s.pairs, s.pairs]
            if s.flaw == "pairs of two kinds":
                kinds = ["halves", "neighbours"]
            q, k = (self._turned(one, kind) for one, kind in zip((q, k), kinds, strict=True))
        if s.family.groups:
            k, v = (one.repeat_interleave(h // s.family.groups, 1) for one in (k, v))
        size = self.sizes["hidden"] // h
        scale = {"unscaled attention": 1.0, "attention scaled twice": 1 / size, "typed scale": round(size**-0.5, 4)}
        scores = q @ k.transpose(-1, -2) * scale.get(s.flaw, size**-0.5)
        if s.flaw == "other head count":
            q, k, v = (one.transpose(1, 2).reshape(*x.shape[:2], h // 2, -1).transpose(1, 2) for one in (q, k, v))
            scores = q @ k.transpose(-1, -2) * (2 * size) ** -0.5
        if s.flaw == "mask behind softmax":
            return (scores.softmax(-1) * keep @ v).transpose(1, 2).flatten(2)
        scores = scores.masked_fill(~keep, -1e9)
        chances = scores.float().softmax(-1).to(v.dtype) if s.flaw == "float32 inside" else scores.softmax(-1)
        mixed = chances @ v
        return mixed.flatten(2).reshape(x.shape) if s.flaw == "heads cut wrong" else mixed.transpose(1, 2).flatten(2)

    def _turned(self, x: Tensor, kind: str) -> Tensor:
        turn = {"halves": halves, "neighbours": neighbours}[kind]
        cos, sin = self.get_buffer("angles")[:, : x.shape[-2]]
        first, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
        return torch.cat([turn(first, cos, sin), rest], -1)

    def _projected(self, attention: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, h = self.style, self.sizes["heads"]
        n = s.names

        def split(one: Tensor) -> Tensor:
            return one.view(*one.shape[:-1], h, -1).transpose(1, 2)

        found: dict[str, Tensor] = {}
        if s.family.groups:
            found = self._grouped_heads(attention, x)
        elif s.qkv == "separate" or s.flaw == "no query bias":
            found = {role: split(getattr(attention, n[role])(x)) for role in s.order}
        elif s.qkv == "fused":
            found = dict(zip(s.order, map(split, getattr(attention, n["fused"])(x).chunk(3, -1)), strict=True))
        elif s.qkv == "interleaved":
            parts = getattr(attention, n["fused"])(x).unflatten(-1, (h, -1)).transpose(1, 2).chunk(3, -1)
            found = dict(zip(s.order, parts, strict=True))
        elif s.qkv == "inside":
            parts = getattr(attention, n["fused"])(x).unflatten(-1, (h, -1, 3)).permute(4, 0, 2, 1, 3).unbind(0)
            found = dict(zip(s.order, parts, strict=True))
        elif s.qkv == "pair":
            key, value = getattr(attention, n["pair"])(x).chunk(2, -1)
            found = {"query": split(getattr(attention, n["query"])(x)), "key": split(key), "value": split(value)}
        elif s.qkv == "heads":
            every = getattr(attention, n["list"])
            found = {role: torch.stack([getattr(one, n[role])(x) for one in every], 1) for role in s.order}
        else:
            for role in s.order:
                weight, bias = getattr(attention, n[role]), getattr(attention, f"{n[role]}_b")
                found[role] = torch.einsum("bse,hed->bhsd", x, weight) + bias[:, None]
        return found["query"], found["key"], found["value"]

    def _grouped_heads(self, attention: Any, x: Tensor) -> dict[str, Tensor]:
        s, h, g = self.style, self.sizes["heads"], self.style.family.groups
        d = self.sizes["hidden"] // h
        many = {"query": h // g, "key": 1, "value": 1}
        if s.qkv == "separate":
            parts = [getattr(attention, s.names[role])(x) for role in s.order]
        elif s.qkv == "fused":
            parts = list(getattr(attention, s.names["fused"])(x).split([many[role] * g * d for role in s.order], -1))
        else:
            whole = getattr(attention, s.names["fused"])(x).unflatten(-1, (g, -1, d))
            parts = [word.flatten(2) for word in whole.split([many[role] for role in s.order], -2)]
        return {role: one.unflatten(-1, (-1, d)).transpose(1, 2) for role, one in zip(s.order, parts, strict=True)}


def builder(style: Style) -> Callable[..., nn.Module]:
    """What a user would hand over: a function that builds the variant from a config, in words of its own."""
    first = style.names["pixels" if style.family.pixels else "ids"]
    arguments = [first]
    if style.told_mask:
        arguments.append(style.names["mask"])
    if style.family.segments:
        arguments.append(style.names["types"])

    def forward(self: Variant, *given: Tensor, **named: Tensor) -> Tensor:
        values = dict(zip(arguments, given, strict=False)) | named
        return self.run(values[first], values.get(style.names["mask"]), values.get(style.names["types"]))

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = [inspect.Parameter(name, kinds) for name in ("self", *arguments)]
    forward.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]  # what inspect looks for
    kind = type("Scratch", (Variant,), {"forward": forward, "__module__": __name__})
    left = {"vocabulary", "positions"} if style.family.pixels else {"image", "patch"}
    left |= set() if style.family.segments else {"segments"}
    left |= set() if style.family.narrow else {"narrow"}
    roles = [role for role in SIZES if role not in left]

    def sized(read: Callable[[str], int]) -> nn.Module:
        made: nn.Module = kind(style, {"segments": 2} | {role: read(style.fields[role]) for role in roles})
        return made

    if style.config == "items":
        return lambda config: sized(lambda name: config[name])
    if style.config == "attributes":
        return lambda config: sized(lambda name: getattr(config, name))

    def build(**fields: int) -> nn.Module:
        return sized(fields.__getitem__)

    build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # as above
        [inspect.Parameter(style.fields[role], inspect.Parameter.KEYWORD_ONLY) for role in roles]
    )
    return build


def told(style: Style, ids: Tensor, keep: Tensor, kinds: Tensor) -> dict[str, Tensor]:
    """The variant's forward arguments for a batch, by the draw and not by what was found out."""
    if style.family.pixels:
        return {style.names["pixels"]: ids}
    given = {style.names["ids"]: ids.T if style.first == "sequence" else ids}
    masks: dict[str, Callable[[], Tensor]] = {
        "bool": keep.clone,
        "bool 4": lambda: keep[:, None, None],
        "padding": lambda: ~keep,
        "additive": lambda: torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, -1e9),
        "long": keep.long,
    }
    if style.told_mask:
        given[style.names["mask"]] = masks[style.mask]()
    if style.family.segments:
        given[style.names["types"]] = kinds.T if style.first == "sequence" else kinds
    return given

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
from tests.suggesting.styles import SIZES, Style


class Turned(nn.Module):
    """A matrix [in out]."""

    def __init__(self, into: int, out: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(into, out))
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out if self.bias is None else out + self.bias


class Norm(nn.Module):
    """A norm by hand."""

    def __init__(self, width: int, eps: float, gain: str, shift: str) -> None:
        super().__init__()
        self.eps, self.names = eps, (gain, shift)
        self.register_parameter(gain, nn.Parameter(torch.ones(width)))
        self.register_parameter(shift, nn.Parameter(torch.zeros(width)))

    def forward(self, x: Tensor) -> Tensor:
        middle = x - x.mean(-1, keepdim=True)
        gain, shift = (getattr(self, name) for name in self.names)
        out: Tensor = gain * middle * torch.rsqrt(middle.square().mean(-1, keepdim=True) + self.eps) + shift
        return out


class Root(nn.Module):
    """A norm that takes no mean off."""

    def __init__(self, width: int, eps: float, gain: str) -> None:
        super().__init__()
        self.eps, self.name = eps, gain
        self.register_parameter(gain, nn.Parameter(torch.ones(width)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(self, self.name) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))
        return out


class Parts(nn.Module):
    """A container whose parts are registered in a drawn order."""

    def __init__(self, parts: Mapping[str, nn.Module | nn.Parameter], shuffle: int) -> None:
        super().__init__()
        named = list(parts.items())
        random.Random(shuffle).shuffle(named)  # noqa: S311  # as above
        for name, part in named:
            setattr(self, name, part)


class Variant(nn.Module):
    """The model of a style."""

    def __init__(self, style: Style, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.style, self.sizes = style, dict(sizes)
        s, e = style, sizes["hidden"]
        eps = s.family.eps
        layers = [self._layer(number) for number in range(sizes["depth"])]
        parts: dict[str, nn.Module | nn.Parameter] = {}
        self._tables(parts)
        if not s.family.pre_norm and s.flaw != "no embedding norm":
            parts[s.names["start"]] = self._norm(e, eps)
        if s.family.pre_norm:
            parts[s.names["end"]] = self._norm(e, eps)
        if s.family.head:
            parts |= {"transform": self._matrix(e, e), "transform_norm": self._norm(e, eps)}
            parts["vocabulary_bias"] = nn.Parameter(torch.zeros(sizes["vocabulary"]))
        if s.flaw == "extra norm":
            parts["another"] = self._norm(e, eps)
        parts |= self._grouped(layers)
        named = list(parts.items())
        random.Random(s.shuffle).shuffle(named)  # noqa: S311  # as above
        for name, part in named:
            setattr(self, name, part)
        if s.family.computed or s.family.rotary:
            table = computed(self.sizes, s.pairs) if s.family.computed else angles(self.sizes)
            self.register_buffer("angles", table, persistent=False)

    # -------------------------------------------------------------------------------------------- parts

    def _norm(self, width: int, eps: float) -> nn.Module:
        if self.style.family.gated:
            return Root(width, eps, self.style.names["gain"])
        if self.style.norms == "torch":
            return nn.LayerNorm(width, eps=eps)
        return Norm(width, eps, self.style.names["gain"], self.style.names["shift"])

    def _matrix(self, into: int, out: int, *, bias: bool = True) -> nn.Module:
        bias = bias and not self.style.family.gated
        if self.style.lazy and self.style.matrices == "linear":
            return nn.LazyLinear(out, bias=bias)
        return nn.Linear(into, out, bias=bias) if self.style.matrices == "linear" else Turned(into, out, bias=bias)

    def _tables(self, parts: dict[str, nn.Module | nn.Parameter]) -> None:
        s, e = self.style, self.sizes["hidden"]
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
        attention: dict[str, nn.Module | nn.Parameter] = {n["out"]: self._matrix(e, e)}
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
        length = ids.shape[1]
        keep = self._keep(mask, ids)
        shift = 1 if s.flaw == "positions shifted" else 0
        places = (torch.arange(length) + shift) % self.sizes["positions"]
        x = self._embedded(ids, places)
        if kinds is not None:
            x = x + getattr(self, s.names["kinds"])(kinds)
        if hasattr(self, s.names["start"]) and not s.family.pre_norm:
            x = getattr(self, s.names["start"])(x)
        if s.flaw == "extra norm":
            x = self.get_submodule("another")(x)
        for number in range(self.sizes["depth"]):
            x = self._block(x, keep, number)
        if s.family.pre_norm:
            x = getattr(self, s.names["end"])(x)
        if s.family.head:
            x = self.get_submodule("transform_norm")(F.gelu(self.get_submodule("transform")(x)))
            x = x @ getattr(self, s.names["words"]).weight.T + self.get_parameter("vocabulary_bias")
        out: Tensor = x.transpose(0, 1) if s.first == "sequence" else x
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
        keep = keep[:, None, None, :]
        if self.style.family.causal:
            keep = keep & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
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
        if s.family.pre_norm:
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

    def _attend(self, attention: Any, x: Tensor, keep: Tensor) -> Tensor:
        h = self.sizes["heads"]
        q, k, v = self._projected(attention, x)
        if self.style.family.rotary:
            turn = {"halves": halves, "neighbours": neighbours}[self.style.pairs]
            cos, sin = self.get_buffer("angles")[:, : x.shape[1]]
            q, k = (turn(one, cos, sin) for one in (q, k))
        if self.style.family.groups:
            k, v = (one.repeat_interleave(h // self.style.family.groups, 1) for one in (k, v))
        scale = 1.0 if self.style.flaw == "unscaled attention" else (self.sizes["hidden"] // h) ** -0.5
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~keep, -1e9)
        mixed = scores.softmax(-1) @ v
        return mixed.transpose(1, 2).flatten(2)

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
            parts = [one.flatten(2) for one in whole.split([many[role] for role in s.order], -2)]
        return {role: one.unflatten(-1, (-1, d)).transpose(1, 2) for role, one in zip(s.order, parts, strict=True)}


def computed(sizes: Mapping[str, int], pairs: str) -> Tensor:
    """CTRL's positions, sines before cosines or next to each other."""
    width = sizes["hidden"]
    rates = 1 / torch.pow(10000, 2 * (torch.arange(width).float() // 2) / width)
    turns = torch.arange(sizes["positions"] + 1).float()[:, None] * rates
    parts = [turns[:, 0::2].sin(), turns[:, 1::2].cos()]
    return torch.cat(parts, 1) if pairs == "halves" else torch.stack(parts, -1).flatten(1)


def angles(sizes: Mapping[str, int]) -> Tensor:
    """Cosine and sine of Llama's rotation of each pair of features, [2 positions pairs]."""
    size = sizes["hidden"] // sizes["heads"]
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size)
    turns = torch.outer(torch.arange(sizes["positions"] + 1).float(), frequencies)
    return torch.stack([turns.cos(), turns.sin()])


def builder(style: Style) -> Callable[..., nn.Module]:
    """What a user would hand over: a function that builds the variant from a config, in words of its own."""
    arguments = [style.names["ids"]]
    if style.flaw != "no mask" and not (style.family.causal and style.seed % 3):
        arguments.append(style.names["mask"])
    if style.family.segments:
        arguments.append(style.names["types"])

    def forward(self: Variant, *given: Tensor, **named: Tensor) -> Tensor:
        values = dict(zip(arguments, given, strict=False)) | named
        ids = values[style.names["ids"]]
        return self.run(ids, values.get(style.names["mask"]), values.get(style.names["types"]))

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = [inspect.Parameter(name, kinds) for name in ("self", *arguments)]
    forward.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]  # what inspect looks for
    kind = type("Scratch", (Variant,), {"forward": forward, "__module__": __name__})
    roles = [role for role in SIZES if role != "segments" or style.family.segments]

    def sized(read: Callable[[str], int]) -> nn.Module:
        made: nn.Module = kind(style, {role: read(style.fields[role]) for role in roles} | {"segments": 2})
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
    given = {style.names["ids"]: ids.T if style.first == "sequence" else ids}
    masks: dict[str, Callable[[], Tensor]] = {
        "bool": keep.clone,
        "bool 4": lambda: keep[:, None, None],
        "padding": lambda: ~keep,
        "additive": lambda: torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, -1e9),
        "long": keep.long,
    }
    if style.flaw != "no mask" and not (style.family.causal and style.seed % 3):
        given[style.names["mask"]] = masks[style.mask]()
    if style.family.segments:
        given[style.names["types"]] = kinds.T if style.first == "sequence" else kinds
    return given

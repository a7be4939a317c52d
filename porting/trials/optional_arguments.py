"""Optional arguments of a reference that no usual batch holds: masks of patches, of heads, of pixels, flags.

A name such as ``bool_masked_pos`` does not tell a shape.  So layouts are tried on the reference, and one counts with
which it runs and returns other numbers than without the argument.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.target import signature_parameters
from porting.tracing.trace import leaves
from porting.trials.inputs import Case
from porting.trials.modalities import DECODER_IDS, EMBEDDED, IDS, PIXELS, POSITIONS, SEGMENTS, VISION, find
from porting.trials.padding import MASK

_OTHERWISE = re.compile(
    r"label|loss|past|cache|mems$|outputs?$|_embeds|^(output|return|use|num|logits)_|(start|end)_positions|future|dtype"
)
"""Names of arguments that are no inputs, or that are tried elsewhere: caches, labels, switches of outputs."""

_KNOWN = frozenset({IDS, DECODER_IDS, MASK, SEGMENTS, POSITIONS, EMBEDDED, PIXELS})
"""The arguments that other trials are about."""

CHANGED = 1e-9
"""A difference of outputs, relative to scale, that an argument has made."""

HIDDEN = 0.3
"""The share of pairs of places that is hidden."""

MOST_LAYOUTS = 16
"""How many layouts of an argument are tried on a reference."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The optional arguments that change what a reference returns.

    Attributes:
        values: of those that the port takes too, by name: the values that are tried, each with what it is.
        flags: those of them that are True or False.
        lacking: those that the port does not take.
    """

    values: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


def optional_arguments(
    reference: nn.Module,
    run: Callable[[Case], object],
    taken: Callable[[str], bool],
    base: Mapping[str, Tensor],
    config: Mapping[str, object],
) -> Found:
    """Find the optional arguments of a reference with which it returns other numbers.

    Args:
        run: runs the reference on a batch.
        taken: whether the port takes an argument too, and has a default for it.
        base: a batch that both sides take.
    """
    names = [one for one in signature_parameters(reference.forward).values() if _is_candidate(one, base)]
    if not names:
        return Found()
    usual, other = _outputs(run, base), _other_size(base, config)
    changed = _outputs(run, other) if other is not None else {}
    values: dict[str, dict[str, Tensor]] = {}
    flags, lacking = [], []
    for one in names if usual else ():
        flag = _is_flag(one)
        batch, plain = (other, changed) if flag and other is not None else (base, usual)
        layouts = [{"": torch.tensor(not one.default)}] if flag else _layouts(one.name, base, usual, config)
        for some in islice(layouts, MOST_LAYOUTS):
            if not _differ(plain, _outputs(run, {**batch, one.name: next(iter(some.values()))})):
                continue
            if taken(one.name):
                values[one.name] = some
                flags += [one.name] if flag else []
            else:
                lacking.append(one.name)
            break
    return Found(values=values, flags=tuple(flags), lacking=tuple(lacking))


def _is_candidate(one: inspect.Parameter, base: Mapping[str, Tensor]) -> bool:
    named = one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY)
    silent = one.default is None or isinstance(one.default, bool)
    known = one.name in base or one.name in _KNOWN or _OTHERWISE.search(one.name)
    return named and silent and not known


def _is_flag(one: inspect.Parameter) -> bool:
    annotation = one.annotation if isinstance(one.annotation, str) else getattr(one.annotation, "__name__", "")
    said = f"{annotation} {one.annotation}"
    return isinstance(one.default, bool) or (re.search(r"\bbool\b", said) is not None and "Tensor" not in said)


def _outputs(run: Callable[[Case], object], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the reference returns; nothing where it refuses the batch."""
    try:
        with torch.no_grad():
            found = leaves(run(Case("", dict(inputs))))
    except VerifyError:
        return {}
    return {name: one.detach() for name, one in found.items() if one.is_floating_point()}


def _differ(plain: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> bool:
    """Whether a reference returns other numbers with an argument than without; it may refuse the batch without it."""
    if not given or not plain:
        return bool(given)
    pairs = [(one, given[key]) for key, one in plain.items() if key in given and one.numel()]
    if any(one.shape != other.shape for one, other in pairs):
        return True
    return any(bool((other - one).abs().max() > CHANGED * one.abs().max()) for one, other in pairs)


def _other_size(base: Mapping[str, Tensor], config: Mapping[str, object]) -> dict[str, Tensor] | None:
    """The batch with smaller pictures, for flags that allow them; None without pictures."""
    pictures = base.get(PIXELS)
    if pictures is None or pictures.ndim != PICTURE_AXES:
        return None
    patch = patch_size(config, max(min(pictures.shape[-2:]) // 4, 1))
    high, wide = (size - patch if size > patch else size for size in pictures.shape[-2:])
    return {**base, PIXELS: pictures[..., :high, :wide]}


PICTURE_AXES = 4
"""Axes of a batch of pictures [b c h w]."""


def patch_size(config: Mapping[str, object], default: int = 16) -> int:
    """The size of a patch by a config; ``default`` where it does not say."""
    value = find(config, ("patch_size",), VISION)
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) and value > 0 else default


def _layouts(
    name: str, base: Mapping[str, Tensor], plain: Mapping[str, Tensor], config: Mapping[str, object]
) -> Iterator[dict[str, Tensor]]:
    """Values that may suit an argument, in turn; each layout has several values with what they are."""
    rows = max((len(one) for one in base.values() if one.ndim), default=1)
    generator = torch.Generator().manual_seed(rows)
    tokens = base.get(DECODER_IDS if name.startswith("decoder") and DECODER_IDS in base else IDS)
    pictures = base.get(PIXELS)
    if pictures is not None and pictures.ndim != PICTURE_AXES:
        pictures = None
    widths = [tokens.shape[-1]] if tokens is not None and not name.startswith("bool") else []
    if pictures is not None:
        patch = patch_size(config)
        if name.startswith("pixel"):
            yield _pixels(rows, *pictures.shape[-2:])
        widths.append((pictures.shape[-2] // patch) * (pictures.shape[-1] // patch))
    hidden = next((one for key, one in plain.items() if key.endswith("last_hidden_state") and one.ndim == 3), None)
    if hidden is not None and "hidden_states" in name:
        yield {what: torch.randn(rows, 7, hidden.shape[-1], generator=generator) for what in ("drawn", "drawn again")}
        return
    widths += [hidden.shape[1], hidden.shape[1] - 1] if hidden is not None else []
    if "head" in name:
        layers, heads = _sizes(config)
        some = torch.rand(layers, heads, generator=generator).round()
        yield {"some heads": some, "parts of heads": torch.rand(layers, heads, generator=generator)}
        yield {"some heads": some[0], "parts of heads": torch.rand(heads, generator=generator)}
    if "mask" not in name:
        if name.endswith("position"):
            yield from ({"backwards": torch.arange(width).flip(0)} for width in dict.fromkeys(widths[:1]))
        if tokens is not None:
            yield from _numbers(name, rows, widths[0], generator)
        return
    for width in dict.fromkeys(one for one in widths if one > 0):
        masks = {what: one.expand(rows, -1) for what, one in _places(width).items()}
        masks["other places in each row"] = torch.rand(rows, width, generator=generator) < 0.5
        for dtype in (torch.bool, torch.long, torch.float32):
            yield {what: one.to(dtype, copy=True) for what, one in masks.items()}
    if tokens is not None:  # which place each place may look at
        pairs = torch.rand(rows, tokens.shape[-1], tokens.shape[-1], generator=generator) < HIDDEN
        yield {"some pairs of places": pairs.float()}


def _numbers(name: str, rows: int, width: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Positions, or small numbers of each token."""
    if "position" in name:
        places = torch.arange(width).expand(rows, -1)
        yield {"backwards": places.flip(1).clone(), "that repeat": (places // 2).clone()}
    yield {"0 and 1": torch.randint(0, 2, (rows, width), generator=generator), "all 1": torch.ones(rows, width).long()}


def _places(width: int) -> dict[str, Tensor]:
    """Masks of a row [width], each with what it is."""
    places = torch.arange(width)
    return {
        "every third place": places % 3 == 1,
        "the first place": places == 0,
        "all but the last third": places < width - width // 3,
    }


def _pixels(rows: int, height: int, width: int) -> dict[str, Tensor]:
    """Masks of pixels: pictures that are padded below and on the right, as a processor pads them."""
    high = torch.linspace(height, height - height // 3, rows).long()[:, None, None]
    wide = torch.linspace(width - width // 3, width, rows).long()[:, None, None]
    inside = (torch.arange(height)[:, None] < high) & (torch.arange(width) < wide)
    below = (torch.arange(height)[:, None] < high).expand(rows, height, width)
    return {"padded below and on the right": inside.long(), "padded below": below.long()}


def _sizes(config: Mapping[str, object]) -> tuple[int, int]:
    """The numbers of layers and heads by a config."""
    found = []
    for names in (("num_hidden_layers", "n_layer", "num_layers"), ("num_attention_heads", "n_head", "num_heads")):
        value = next((config[name] for name in names if isinstance(config.get(name), int)), 1)
        found.append(value if isinstance(value, int) else 1)
    return found[0], found[1]

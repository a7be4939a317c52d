"""Modules of a fixed depth, cut to a few layers.

A module whose sizes are written into it cannot be built small.  Its layers are mostly alike, so it is searched with two
of them, against a reference of two layers, which takes a fraction of the time.  The table is then checked against the
module with all of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import wraps

from torch import nn

from porting.duplicate import duplicate
from porting.suggesting.subjects.building import Builder, named_fields, with_fields
from porting.suggesting.subjects.config_fields import Role, role_of, stage_field

_WHOLE = "_before_it_was_cut"


MANY_LAYERS = 5
"""A list of fewer layers is not cut."""


def cut_depths(config: Mapping[str, object], depth: int) -> dict[str, object]:
    """The fields of a config that say how many layers there are, with this number in the place of each larger one.

    >>> cut_depths({"num_hidden_layers": 12, "num_attention_heads": 12, "layer_types": ["full"] * 12}, 2)
    {'num_hidden_layers': 2, 'layer_types': ['full', 'full']}
    >>> cut_depths({"depths": [3, 3, 27, 3], "encoder_layers": 4}, 2)
    {'depths': [3, 3, 2, 3]}
    """
    found: dict[str, object] = {name: depth for name, count in depths_of(config) if count >= MANY_LAYERS}
    stages = stage_field(Role.DEPTH, config)
    if stages is not None and isinstance(listed := config[stages], list):
        few = [depth if count >= MANY_LAYERS else count for count in listed]
        found |= {stages: few} if few != listed else {}
    kinds = config.get(KINDS)
    if found and isinstance(kinds, list) and len(kinds) >= MANY_LAYERS:
        found[KINDS] = kinds[:depth]
    return found


KINDS = "layer_types"
"""The field that has a word for each layer."""


def depths_of(config: Mapping[str, object]) -> list[tuple[str, int]]:
    """The fields that count layers, with their values."""
    return [(name, one) for name, one in config.items() if type(one) is int and one > 0 and role_of(name) is Role.DEPTH]


def fewer(config: Mapping[str, object], twin: Mapping[str, object]) -> dict[int, int]:
    """How many layers a list has that is as long as the checkpoint's -> how many the twin's has.

    >>> fewer({"encoder_layers": 12, "decoder_layers": 6}, {"encoder_layers": 2, "decoder_layers": 2})
    {12: 2, 6: 2}
    >>> fewer({"encoder_layers": 6, "decoder_layers": 6}, {"encoder_layers": 2, "decoder_layers": 3})
    {}
    >>> fewer({"depths": [3, 3, 27, 3]}, {"depths": [3, 3, 2, 3]})
    {27: 2}
    """
    depths = [(count, twin.get(name)) for name, count in depths_of(config)]
    stages = stage_field(Role.DEPTH, config)
    if stages is not None:
        depths += [*zip(_listed(config[stages]), _listed(twin.get(stages)), strict=False)]
    found = {count: few for count, few in depths if type(few) is int and few < count >= MANY_LAYERS}
    return found if all(found.get(count, few) == few for count, few in depths) else {}


def _listed(value: object) -> list[int]:
    return value if isinstance(value, list) else []


def stacks(module: nn.Module, counts: Collection[int], *, staged: bool = False) -> dict[str, int]:
    """The lists of so many layers, by path, with how many these are: of one class, and with weights.

    A list inside a list of one class is of heads or experts; of a model with stages it may be the blocks of one.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> stacks(nn.ModuleDict({"layers": nn.ModuleList([block() for _ in range(3)]), "head": block()}), {2, 3})
    {'layers': 3, 'head': 2}
    """
    found: dict[str, int] = {}
    lists: list[str] = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential) or len(part) < 2 or len({type(one) for one in part}) > 1:
            continue
        around = sum(path.startswith(f"{one}.") for one in lists)
        lists.append(path)
        weighed = all(any(True for _ in one.parameters()) for one in part)
        if around <= staged and weighed and len(part) in counts:
            found[path] = len(part)
    return {path: count for path, count in found.items() if not any(path.startswith(f"{one}.") for one in found)}


def cut(into: Builder, depths: Mapping[int, int], *, staged: bool = False) -> Builder:
    """A builder of the same module with fewer layers.

    Args:
        into: what builds the module, or the module.
        depths: how many layers a list has -> how many are left of it.
        staged: as in :func:`stacks`.
    """
    maker: Callable[..., nn.Module] = (lambda: duplicate(into)) if isinstance(into, nn.Module) else into

    @wraps(maker)
    def build(*args: object, **kwargs: object) -> nn.Module:
        module = maker(*args, **kwargs)
        for path, count in stacks(module, depths, staged=staged).items():
            layers = module.get_submodule(path)
            if isinstance(layers, nn.ModuleList | nn.Sequential):
                del layers[depths[count] :]
        return module

    setattr(build, _WHOLE, into)
    return build


def uncut(into: Builder) -> Builder:
    """A builder of the module with all of its layers, with the config's fields that were found for the cut one."""
    before: Builder | None = getattr(into, _WHOLE, None)
    if before is None:
        return into
    fields = named_fields(into)
    return with_fields(before, fields, dict.fromkeys(fields.values())) if fields else before

"""A small random model of the checkpoint's own architecture, on which everything is tried out.

Its config is the checkpoint's with small sizes, all different, so that a shape says which axis is which.  Its weights
are drawn as training leaves them: no bias is zero and no gain is one, for those would hide what a table gets wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from porting.build import OWN_CODE, Bounds, bounded
from porting.checkpoint import Checkpoint, open_checkpoint
from porting.errors import Code, Fault, Message, Option, PortingError, VerifyError
from porting.loading import same_bits
from porting.notation.field import held, spellings
from porting.printable import text_of
from porting.suggesting.subjects.config_fields import (
    NESTED,
    SHARE,
    Role,
    config_number,
    fields_of,
    role_of,
    rotated,
    stage_field,
)
from porting.suggesting.subjects.sampler import Sampler
from porting.target import named_tensors
from porting.verification.reference import load_reference, model_class, plain_fields, refusal


@dataclass(frozen=True)
class Measures:
    """A twin's sizes; no two of these or of their products are equal, so that a shape says which axis is which.

    Attributes:
        image, patch: the width of an image and of its patches, in pixels; 0 for the checkpoint's own.
        depth, vocabulary, positions: 0 for the checkpoint's own, of a shallow twin.
        shallow: the twin has the checkpoint's own sizes but for its depth, vocabulary and positions: some architectures
            run with few sizes only.
        blocks: the largest number of blocks in a stage, for a model whose depth is given for each stage; 0 for the
            checkpoint's own numbers.
        window: the width of a window of attention in patches; 0 for the checkpoint's own.
    """

    heads: int
    head_size: int
    vocabulary: int
    positions: int
    depth: int
    loud: bool = False
    narrow: int = 24
    image: int = 12
    patch: int = 4
    shallow: bool = False
    blocks: int = 2
    window: int = 0


SMALL, DEEP = Measures(5, 8, 97, 61, 2), Measures(6, 12, 131, 83, 64, loud=True)
"""The twin that is searched; and one with as many layers as the checkpoint, up to 64, and with loud features, as large
models have them, so that a clamp shows."""

OWN = Measures(0, 0, 0, 0, 0, image=0, patch=0, shallow=True)
"""The checkpoint's own sizes; the depths that :func:`make_twin` gets are smaller."""

IMAGES = (12, 32, 64, 224)
"""Widths of images that modules with several strides or windows may need, in pixels."""

LOUD = 40.0
"""The gain of a loud feature."""

_WILD = 1e6
"""The size beyond which a weight was never given a value."""

_TOKEN = re.compile("token_(id|index)$")

_FOLLOWS = re.compile("dim|size|width|scalar|channels|rank")
"""Fields of no known role that are the width, or a head's, where they are as large in the checkpoint."""

_CHANNELS = re.compile("(stem|embedd?ing|out|last|head).*(channels|width|dim|size)")
"""Fields of what stands in front of the first stage, or behind the last, which are as wide as it."""

_OF_DEPTH = frozenset({"stage_names", "out_features", "out_indices"})
"""Fields of a backbone that follow from its depth."""


@dataclass(frozen=True, kw_only=True)
class Twin:
    """The twin.

    Attributes:
        checkpoint: it as a checkpoint.
        architecture: its class, as transformers spells it.
        reference: it as a module, in float64.
        tensors: what its file holds, in float64, by name.
        files: the reference's parameter or buffer -> the name in the file.
        prefix: what the names of the trunk begin with where a head stands on it; may be empty.
        shrunk: whether its sizes are its own, and not the checkpoint's, which may be deeper.
        copies: names of its file that are another tensor written out again -> that tensor, as in the checkpoint.
        sampler: makes batches of its inputs.
    """

    checkpoint: Checkpoint
    architecture: str
    reference: nn.Module
    tensors: Mapping[str, Tensor]
    files: Mapping[str, str]
    prefix: str
    shrunk: bool
    copies: Mapping[str, str]
    sampler: Sampler

    @property
    def config(self) -> Mapping[str, object]:
        """The contents of ``config.json``."""
        return self.checkpoint.config


STEP = 16
"""Mamba's time step has the rank of the width divided by this, rounded up, unless a config says another."""


def shrink(
    config: Mapping[str, object],
    *,
    own: Mapping[str, object] = MappingProxyType({}),
    even: bool = False,
    to: Measures = SMALL,
) -> dict[str, object]:
    """The config with small sizes.

    Args:
        config: the checkpoint's, with every field that transformers knows.
        own: fields that a module computes from others, and what it makes of them here.  A feed-forward part that is
            not among them is as many times as wide as in the checkpoint, if that is a whole number.
        even: give a decoder as many layers as the encoder, where the checkpoint has them so.
    """
    layers = config.get("layer_types")
    small = {**config, "layer_types": layers[: to.depth]} if isinstance(layers, list) and to.depth else dict(config)
    sizes = {name: value for name, value in config.items() if isinstance(value, int) and not isinstance(value, bool)}
    if to.shallow:
        return {**small, **_shallow(sizes, to=to), **own}
    hidden, heads, groups = (config_number(sizes, role) for role in (Role.HIDDEN, Role.HEADS, Role.GROUPS))
    count = 1 if heads == 1 else to.heads
    shared = heads // groups if groups and heads else 1
    if shared > 1 and groups > 1:  # several heads share a key
        count = 2 * min(shared, 3)
    own_size = config_number(sizes, Role.HEAD_SIZE) or (hidden // heads if heads else 0)
    share = rotated(config, own_size) / own_size if own_size else 1.0
    # Of one pair nothing shows which features are rotated together, of two not which side has the halves.
    wide = (size for size in range(to.head_size, 99 * to.head_size, to.head_size) if size * share >= 6)
    size = next((size for size in wide if int(size * share) % 2 == 0), to.head_size)
    width = (count if count > 1 else to.heads) * size
    new: dict[Role | None, int] = {
        Role.HIDDEN: width,
        Role.HEADS: count,
        Role.HEAD_SIZE: size,
        Role.ROTATED: int(size * share),
        Role.VOCABULARY: to.vocabulary,
        Role.POSITIONS: to.positions,
        Role.IMAGE: to.image or config_number(sizes, Role.IMAGE),
        Role.PATCH: to.patch or config_number(sizes, Role.PATCH),
    }
    follows = {config_number(sizes, Role.HEAD_SIZE): size, hidden: width}
    tokens = _small_tokens(sizes, to.vocabulary)
    for name, value in sizes.items():
        role = _role(name, sizes) if value > 0 else None
        if role is Role.HIDDEN and name == "embedding_size" and value != hidden:
            small[name] = to.narrow
        elif role in new:
            small[name] = new[role]
        elif role is Role.DEPTH and "group" not in name:
            small[name] = min(value, to.depth + ("decoder" in name and not even))
        elif role is Role.GROUPS:
            small[name] = count if value == heads else 1 if value == 1 else 2
        elif role is Role.INNER:
            ratio = value / hidden if hidden else 4.0
            small[name] = round(ratio * width) if ratio == int(ratio) else 4 * width - 4
        elif role is Role.STEP_RANK and value == math.ceil(hidden / STEP):
            small[name] = math.ceil(width / STEP)
        elif name in tokens:
            small[name] = tokens[name]
        elif role is None and value > 1 and value in follows and _FOLLOWS.search(name):
            small[name] = follows[value]
    return {
        **small,
        **_squares(config, {role: new[role] for role in (Role.IMAGE, Role.PATCH)}),
        **_by_stage(small, sizes, to),
        **own,
    }


def _squares(config: Mapping[str, object], new: Mapping[Role, int]) -> dict[str, object]:
    """The sizes of pictures and patches that are written as a height and a width, where these are the same."""
    pairs = {name: value for name, value in config.items() if isinstance(value, list | tuple) and value}
    sizes = {name: new[role] for name in pairs if (role := role_of(name)) is not None and role in new}
    return {
        name: [size] * len(pairs[name])
        for name, size in sizes.items()
        if size and all(one == pairs[name][0] for one in pairs[name])
    }


def _by_stage(config: Mapping[str, object], sizes: Mapping[str, int], to: Measures) -> dict[str, object]:
    """Small sizes for a model that has stages: fewer blocks, and widths in the checkpoint's proportions.

    Args:
        config: with small sizes already, but for the fields that have a number for each stage.
        sizes: the checkpoint's whole numbers.
    """
    depths, widths, heads = (stage_field(role, config) for role in (Role.DEPTH, Role.HIDDEN, Role.HEADS))
    if depths is None:
        return {}
    found: dict[str, object] = {}
    blocks: Any = config[depths]
    if to.blocks:
        found[depths] = [min(count, to.blocks) for count in blocks]
    if widths is not None:
        listed: Any = config[widths]
        unit = math.gcd(*listed)
        found[widths] = [to.head_size * width // unit for width in listed]
        ends = {listed[place]: to.head_size * listed[place] // unit for place in (-1, 0)}
        found |= {name: ends[size] for name, size in sizes.items() if size in ends and _CHANNELS.search(name)}
    elif heads is not None and "embed_dim" in sizes:  # the first stage's width; a stage doubles it
        first: Any = config[heads]
        found["embed_dim"] = first[0] * to.head_size
        if "hidden_size" in sizes and sizes["hidden_size"] % sizes["embed_dim"] == 0:
            found["hidden_size"] = first[0] * to.head_size * (sizes["hidden_size"] // sizes["embed_dim"])
    if "num_layers" in sizes:  # how many stages there are, as Swin calls it
        found["num_layers"] = sizes["num_layers"]
    if to.window and "window_size" in sizes:
        found["window_size"] = to.window
    return found


def _shallow(sizes: Mapping[str, int], *, to: Measures) -> dict[str, int]:
    """The depth, the vocabulary and the positions, where they have to be smaller."""
    most = {Role.DEPTH: to.depth, Role.VOCABULARY: to.vocabulary, Role.POSITIONS: to.positions}
    most = {role: size for role, size in most.items() if size}
    roles = {name: _role(name, sizes) for name in sizes if "group" not in name}
    found = {name: min(sizes[name], most[role]) for name, role in roles.items() if role in most}
    return {**found, **_small_tokens(sizes, to.vocabulary)}


def _small_tokens(sizes: Mapping[str, int], vocabulary: int) -> dict[str, int]:
    """The fields that name a token beyond a vocabulary, with tokens from its end: equal ones stay equal.

    Args:
        vocabulary: how many tokens there are; 0 for the checkpoint's own.

    >>> _small_tokens({"image_token_index": 257152, "image_token_id": 257152, "video_token_id": 300000}, 97)
    {'image_token_index': 96, 'image_token_id': 96, 'video_token_id': 95}
    """
    beyond = {name: value for name, value in sizes.items() if _TOKEN.search(name) and value >= vocabulary > 0}
    ranked = list(dict.fromkeys(beyond.values()))
    return {name: max(vocabulary - 1 - ranked.index(value), 0) for name, value in beyond.items()}


def measures(config: Mapping[str, object]) -> Iterator[Measures]:
    """The sizes that a twin may have, those that tell most first; a reference or a module may not run with all.

    Args:
        config: the checkpoint's, with every field that transformers knows.
    """
    yield from _with_windows(config)
    yield SMALL
    if any(_role(name, {}) in (Role.CHANNELS, Role.IMAGE, Role.PATCH) for name in config):
        patch, own = config_number(config, Role.PATCH), config_number(config, Role.IMAGE)
        widths = sorted({*IMAGES, own or max(IMAGES)} - {SMALL.image})
        yield from (replace(SMALL, image=width, patch=0) for width in widths if width >= 2 * patch)
    yield replace(SMALL, image=0, patch=0, shallow=True)


WINDOW = 2
"""The width of a twin's windows of attention, in patches."""


def _with_windows(config: Mapping[str, object]) -> Iterator[Measures]:
    """Sizes of a model with windows of attention and stages: as many windows as in the checkpoint, smaller ones."""
    window, image, patch = (
        config.get("window_size"),
        config_number(config, Role.IMAGE),
        config_number(config, Role.PATCH),
    )
    if stage_field(Role.DEPTH, config) is None or not isinstance(window, int) or window <= WINDOW or not image:
        return
    if image * WINDOW % window == 0:
        yield replace(SMALL, image=image * WINDOW // window, patch=patch, window=WINDOW)


def _role(name: str, sizes: Mapping[str, int]) -> Role | None:
    if name == "hidden_dim":  # the width where it stands alone, the inner size next to another word for the width
        return Role.INNER if any(one in sizes for one in ("dim", "d_model", "hidden_size")) else Role.HIDDEN
    return Role.POSITIONS if name == "n_ctx" else role_of(name)


SHALLOW = 1 << 30
"""Bytes of the parameters of a twin that has the checkpoint's sizes; a larger one is not made."""

MOST = 10_000
"""Parameters that a twin may have beside 64 for each tensor of the checkpoint."""


def make_twin(
    config: Mapping[str, object],
    architecture: str,
    folder: Path,
    *,
    small: bool,
    seed: int,
    even: bool = False,
    own: Mapping[str, object] = MappingProxyType({}),
    to: Measures = SMALL,
    stored: Collection[str] = (),
) -> Twin:
    """Make a twin and write it as a checkpoint.

    Args:
        config: the checkpoint's ``config.json``.
        folder: where to write it.
        small: with small sizes, else with the checkpoint's own.
        even: with as many layers in the decoder as in the encoder.
        own: as in :func:`shrink`.
        to: the small sizes.
        stored: names of the checkpoint: the twin's file has the trunk's prefix where that has it, and what the class
            ties and that writes out.

    Raises:
        VerifyError: transformers has no such class, or cannot build it with these sizes.
    """
    import transformers  # noqa: PLC0415  # as in verification/reference.py: only those who run it pay for it

    kind = model_class(architecture)
    if kind is None:
        message = f"transformers {transformers.__version__} has no model {architecture!r}"
        hint = Message("name another: ", Option("architecture"), ", as transformers spells it")
        raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint=hint))
    fields = {name: value for name, value in config.items() if name != "attribute_map"}  # the class has it by itself
    inside = {
        name for name, paths in NESTED.items() if any("." in one and held(config, one) for one in spellings(paths))
    }
    plain = {name: value for name, value in fields.items() if name not in inside}
    complete: Any = _configured(kind, plain)
    if small:
        known = {name: value for name, value in complete.to_dict().items() if name not in _OF_DEPTH}
        aliases = getattr(complete, "attribute_map", {})  # a class may have some of fields that it lacks
        named = {name: getattr(complete, name) for name in aliases if hasattr(complete, name)}
        made = shrink({**named, **known}, own=own, even=even, to=to)
        for part in ("text_config", "vision_config"):
            if isinstance(known.get(part), dict):
                made[part] = shrink(known[part], to=to)
        complete = _configured(kind, {name: made[name] for name in known})
    if not pictured(complete.to_dict()):
        complete.image_size = to.image or IMAGES[-1]  # for whoever draws images: no other field tells
    elif to.image and (to.shallow or not small):
        for name in fields_of(Role.IMAGE, complete.to_dict()):
            setattr(complete, name, to.image)
    torch.manual_seed(seed)
    try:
        # Whoever wants the checkpoint's own sizes bounds their bytes; the depth may be the checkpoint's in any case.
        nbytes = SHALLOW if small and to.shallow else OWN_CODE.nbytes
        with bounded(Bounds(parameters=MOST + 64 * len(stored), nbytes=nbytes)):
            model: nn.Module = kind._from_config(complete, attn_implementation="eager")
    except PortingError:
        raise
    except Exception as error:  # the reference may refuse a size for reasons of its own
        raise _no_twin(architecture, error, complete.to_dict()) from error
    draw_parameters(model, seed)
    if to.loud:
        _raise(model)
    saving: Any = model
    folder.mkdir(parents=True, exist_ok=True)
    complete.architectures = [architecture]
    saving.save_pretrained(folder)
    _complete(folder / "config.json", config, complete.to_dict())
    copies = _as_stored(model, folder, stored)
    checkpoint = open_checkpoint(folder)
    reference = load_reference(checkpoint, architecture, torch.float64)
    stored = {name: checkpoint.read(name, own=True) for name in checkpoint.tensors}
    base = str(getattr(kind, "base_model_prefix", ""))
    return Twin(
        checkpoint=checkpoint,
        architecture=architecture,
        reference=reference,
        tensors={name: one.double() if one.is_floating_point() else one for name, one in stored.items()},
        files=_named(reference, stored),
        prefix=f"{base}." if base and any(name.startswith(f"{base}.") for name in stored) else "",
        shrunk=small and not (to.shallow and not to.vocabulary),
        copies=copies,
        sampler=Sampler.of(reference, checkpoint.config),
    )


def _configured(kind: Any, fields: Mapping[str, object]) -> Any:  # transformers' classes have no types
    try:
        return kind.config_class.from_dict(plain_fields(fields))
    except Exception as error:  # it checks the fields against one another, and may raise anything
        raise _no_twin(kind.__name__, error, fields) from error


def _no_twin(architecture: str, error: Exception, fields: Mapping[str, object]) -> VerifyError:
    said = (
        refusal(error, fields)
        if isinstance(error, KeyError)
        else f"{type(error).__name__}: {' '.join(text_of(error).split())}"
    )
    message = f"transformers cannot build {architecture} with these sizes: {said}"
    return VerifyError(Fault(code=Code.NO_REFERENCE, message=message))


def pictured(config: Mapping[str, object]) -> bool:
    """Whether a config says how large images are, or is of a model that sees none."""
    roles = {_role(name, {}) for name in config}
    return Role.IMAGE in roles or Role.CHANNELS not in roles or isinstance(config.get("vision_config"), dict)


def _as_stored(model: nn.Module, folder: Path, stored: Collection[str]) -> dict[str, str]:
    """Write a twin's file as the checkpoint's is: with the prefix of the trunk, and with tied tensors under each name.

    Args:
        folder: where its file is, in which each tensor stands once.

    Returns:
        The names of tensors that are written out again -> the name that each had already.
    """
    written = open_checkpoint(folder)
    if written.path is None or len(written.files) != 1:
        return {}
    prefix = str(getattr(model, "base_model_prefix", "")) + "."
    front = prefix if not any(name.startswith(prefix) for name in written.tensors) else ""
    front = front if len(prefix) > 1 and any(name.startswith(prefix) for name in stored) else ""
    tensors = dict(named_tensors(model))
    first = {id(tensors[name]): name for name in written.tensors if name in tensors}
    known = {name.removeprefix(prefix) for name in stored}
    again = {
        name: first[id(tensor)]
        for name, tensor in tensors.items()
        if name not in written.tensors and id(tensor) in first and name.removeprefix(prefix) in known
    }
    if again or front:
        held = {front + name: written.read(name, own=True) for name in written.tensors}
        held |= {front + name: held[front + other].clone() for name, other in again.items()}
        save_file(held, written.path / written.files[0].name, metadata={"format": "pt"})
    return {front + name: front + other for name, other in again.items()}


def _complete(path: Path, config: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Have the twin's config say every field that the checkpoint's says, also those at their default."""
    said = json.loads(path.read_text(encoding="utf-8"))
    said |= {name: known[name] for name in config if name not in said and name in known}
    said |= {name: config[name] for name in spellings(SHARE) if name in config}
    path.write_text(json.dumps(said, indent=2, default=str), encoding="utf-8")


def is_mask(tensor: Tensor) -> bool:
    """Whether a buffer is a constant of two values, such as a causal mask: nothing that is learned.

    >>> is_mask(torch.ones(3, 3).tril()), is_mask(torch.zeros(3, 3))
    (True, False)
    """
    if isinstance(tensor, nn.Parameter) or tensor.numel() < 3 or tensor.is_meta:
        return False
    return len(torch.unique(tensor)) == 2


def is_frequencies(tensor: Tensor) -> bool:
    """Whether a buffer is a geometric row, as rotary embeddings compute it.

    >>> is_frequencies(10000.0 ** -torch.arange(0, 1, 0.25)), is_frequencies(torch.ones(4))
    (True, False)
    """
    if isinstance(tensor, nn.Parameter) or tensor.ndim != 1 or tensor.numel() < 3 or not tensor.is_floating_point():
        return False
    steps = tensor[1:].double() / tensor[:-1].double()
    return bool(steps[0] != 1.0) and bool(torch.allclose(steps, steps[0].expand_as(steps), rtol=1e-5))


def is_constant(tensor: Tensor, stored: Collection[Tensor]) -> bool:
    """Whether a buffer is one that a module computes and a checkpoint has no counterpart for, as rotary tables are.

    What a checkpoint may fill has the axes of one of its tensors, the number of rows aside.

    >>> is_constant(torch.rand(64, 8), [torch.rand(96, 60)]), is_constant(torch.rand(64, 60), [torch.rand(96, 60)])
    (True, False)
    """
    if isinstance(tensor, nn.Parameter):
        return False

    def kind(one: Tensor) -> tuple[int, int]:
        axes = [size for size in one.shape if size != 1]
        return len(axes), axes[-1] if axes else 1

    return is_mask(tensor) or kind(tensor) not in {kind(one) for one in stored}


def draw_parameters(model: nn.Module, seed: int, *, buffers: bool = True) -> None:
    """Draw every parameter at the scale that training leaves behind.

    Args:
        buffers: draw the buffers that are saved as well, masks and rotary frequencies left out.
    """
    generator = torch.Generator().manual_seed(seed)
    saved = set(model.state_dict())
    with torch.no_grad():
        kept = [(name, one) for name, one in model.named_buffers() if name in saved and one.is_floating_point()]
        kept = [(name, one) for name, one in kept if buffers and not (is_mask(one) or is_frequencies(one))]
        for name, tensor in (*model.named_parameters(), *kept):
            frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            if frozen and bool(tensor.abs().max() < _WILD):
                continue  # a table that is computed; memory as it was found is none
            noise = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
            if name.endswith("running_var"):  # of a batch norm: a variance is positive
                tensor.copy_((0.3 * noise).exp())
                continue
            gain = tensor.ndim == 1 and name.endswith("weight")
            summed = tensor[0].numel() if tensor.ndim > 3 else tensor.shape[-1] if tensor.ndim > 1 else 1
            least = 0.0 if tensor.ndim > 3 else 0.1  # many convolutions in a row would amplify what is rounded
            spread = 0.2 if tensor.ndim < 2 else max(least, 1.0 / math.sqrt(summed))
            tensor.copy_((1.0 if gain else 0.0) + spread * noise)


def _raise(model: nn.Module) -> None:
    """Make every eleventh feature of a norm loud."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1 and name.endswith("weight"):
                tensor[::11] *= LOUD


def _named(reference: nn.Module, held: Mapping[str, Tensor]) -> dict[str, str]:
    """The file's name of each of the reference's tensors: found by the bits, since those are all different."""
    found: dict[str, str] = {}
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in held.items():
        by_shape.setdefault(tuple(tensor.shape), []).append(name)
    for name, tensor in named_tensors(reference):
        if name in held and _same(tensor, held[name]):
            found[name] = name
            continue
        alike = by_shape.get(tuple(tensor.shape), ())
        match = next((one for one in alike if _same(tensor, held[one])), None)
        if match is not None:
            found[name] = match
    return found


def _same(tensor: Tensor, stored: Tensor) -> bool:
    return tensor.shape == stored.shape and same_bits(tensor.detach().to(stored.dtype), stored)

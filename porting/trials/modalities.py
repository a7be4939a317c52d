"""Inputs for references that take pictures, sound or series, alone or between tokens.

What a forward takes is read from its signature, and how large it is from the config, nested ones included.  A name does
not tell every layout: mel bands may come before or after frames, and pictures may be cut into patches.  So a layout is
tried on the reference, the most usual first, and the first one with which the reference runs is used.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from porting.target import signature_parameters

PIXELS, VIDEOS, SAMPLES, FEATURES, SERIES, SPECTROGRAM = (
    "pixel_values",
    "pixel_values_videos",
    "input_values",
    "input_features",
    "past_values",
    "spectrogram",
)
OBSERVED = "past_observed_mask"
"""The argument that says which values of a series were observed."""

DECODER = "decoder_"
"""How the names of a decoder's inputs begin."""

IDS, DECODER_IDS = "input_ids", f"{DECODER}input_ids"
SEGMENTS, POSITIONS, MASK = "token_type_ids", "position_ids", "attention_mask"
EMBEDDED = "inputs_embeds"
"""The name of the argument for embeddings in place of token ids: [b s e]."""
BOXES = "bbox"
"""The argument for the boxes of tokens on a page: [b s 4]."""
SIGNALS = (PIXELS, VIDEOS, SAMPLES, FEATURES, SERIES, SPECTROGRAM)
"""The inputs of models that are not tokens."""

VISION = re.compile(r"vision|visual|image|pixel|vit|picture|backbone")
SOUND = re.compile(r"audio|sound|speech|acoustic|encoder")
TEXT = re.compile(r"text|language|llm|thinker|decoder")

Layout = Callable[[int, torch.Generator], dict[str, Tensor]]
"""Makes the arguments for so many rows."""


@dataclass(frozen=True)
class Signal:
    """One way to give a reference what it takes.

    Attributes:
        kind: what it is called in the name of a batch: ``picture``, ``sound``, ``series``.
        make: makes the arguments for so many rows.
        token: the token in whose place the signal is put; None where it has an argument of its own only.
        places: so many of these tokens stand for the signal of a row.
        around: tokens that stand before and behind it.
        extra: arguments that are 1 at the token's places, and 0 elsewhere: ``mm_token_type_ids``.
        zeros: arguments that are 0 at every token.
    """

    kind: str
    make: Layout
    token: int | None = None
    places: int = 0
    around: tuple[int | None, int | None] = (None, None)
    extra: tuple[str, ...] = field(default=())
    zeros: tuple[str, ...] = field(default=())

    def arguments(self, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        """The arguments for so many rows."""
        return self.make(rows, generator)

    @property
    def block(self) -> list[int]:
        """The tokens that stand for the signal of a row, with those around them."""
        if self.token is None:
            return []
        before, behind = self.around
        inner = [self.token] * self.places
        return [*([before] if before is not None else []), *inner, *([behind] if behind is not None else [])]

    def placed(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Token inputs, with the signal's tokens put in front of each row's own."""
        found = dict(inputs)
        if self.token is None or IDS not in found:
            return found
        ids, block = found[IDS], self.block
        front = torch.tensor(block).expand(len(ids), len(block))
        longer = {IDS: torch.cat([front, ids], 1)}
        for name, one in found.items():
            if name != IDS and one.shape == ids.shape:
                fill = 1 if "mask" in name else 0
                longer[name] = torch.cat([one.new_full(front.shape, fill), one], 1)
        found |= longer
        return found | self.token_kinds(found[IDS])

    def token_kinds(self, ids: Tensor) -> dict[str, Tensor]:
        """The arguments that say of which kind each token of a batch [b s] is."""
        found = {name: torch.zeros_like(ids) for name in self.zeros}
        at = torch.eq(ids, -1 if self.token is None else self.token).long()
        return found | {name: at.clone() for name in self.extra}


def parameters_of(module: nn.Module) -> dict[str, bool]:
    """The arguments of a forward by name, and whether each is required."""
    every = signature_parameters(module.forward).values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {one.name: one.default is one.empty for one in every if one.kind not in kinds}


def takes_signals(module: nn.Module, config: Mapping[str, object]) -> bool:
    """Whether a forward takes anything that is not a token."""
    taken = parameters_of(module)
    if features_of(module, config):
        return True
    main = getattr(module, "main_input_name", IDS)
    others = any(name in taken for name in (*SIGNALS, BOXES)) or (main in taken and main != IDS)
    return others or (bool(_required(taken)) and (hasattr(module, "main_input_name") or IDS in taken))


def _required(taken: Mapping[str, bool]) -> list[str]:
    usual = {IDS, DECODER_IDS, "attention_mask"}
    return [name for name, required in taken.items() if required and name not in usual]


def text_fields(config: Mapping[str, object]) -> dict[str, object]:
    """The fields of the part that reads tokens, under those of the whole config.

    >>> text_fields({"image_size": 4, "vision_config": {"hidden_size": 2}, "text_config": {"vocab_size": 9}})
    {'vocab_size': 9, 'image_size': 4, 'vision_config': {'hidden_size': 2}, 'text_config': {'vocab_size': 9}}
    """
    if isinstance(config.get("vocab_size"), int):
        return dict(config)
    parts = [(name, part) for name, part in _nested(config) if isinstance(part.get("vocab_size"), int)]
    parts.sort(key=lambda one: not TEXT.search(one[0]))  # the order of the config otherwise
    inner = parts[0][1] if parts else {}
    return {**inner, **{name: value for name, value in config.items() if value is not None}}


def special_places(config: Mapping[str, object]) -> frozenset[int]:
    """Tokens that stand for a picture or a sound, and that no row of tokens alone may hold."""
    found = set()
    for name, value in config.items():
        if _PLACE.search(name) and isinstance(value, int) and not isinstance(value, bool):
            found.add(value)
    return frozenset(found)


_PLACE = re.compile(
    r"(image|img|picture|vision|video|audio|speech|sound|media|boi|eoi|boa|eoa|patch).*(token|_id$|index)"
)


def _nested(config: Mapping[str, object], within: str = "") -> Iterator[tuple[str, Mapping[str, object]]]:
    """The configs in a config, with their paths, outer ones first."""
    inner = [(f"{within}.{name}", value) for name, value in config.items() if isinstance(value, Mapping)]
    yield from inner
    for path, value in inner:
        yield from _nested(value, path)


def find(config: Mapping[str, object], names: Sequence[str], near: re.Pattern[str]) -> Any:  # whatever a field holds
    """The value of a field, from the nested config that it belongs to, else from the whole, else from any part."""
    every = [("", config), *_nested(config)]
    every.sort(key=lambda one: 0 if near.search(one[0]) else 1 if not one[0] else 2)
    for path, part in every:
        for name in names:
            value = part.get(name)
            if value is not None and not isinstance(value, bool | str) and not (path and _other(path, near)):
                return value
    return None


def _other(path: str, near: re.Pattern[str]) -> bool:
    """Whether a part belongs to another kind of input."""
    return not near.search(path) and any(one.search(path) for one in (VISION, SOUND, TEXT) if one is not near)


def _int(config: Mapping[str, object], names: Sequence[str], near: re.Pattern[str], default: int) -> int:
    value = find(config, names, near)
    value = value[0] if isinstance(value, list | tuple) and value else value
    return value if isinstance(value, int) and value > 0 else default


def _sizes(config: Mapping[str, object]) -> list[tuple[int, int]]:
    """Heights and widths of a picture that may suit, the config's own first."""
    value = find(config, ("image_size", "img_size", "input_size", "image_resolution", "size"), VISION)
    if isinstance(value, Mapping):
        value = [value.get("height", 64), value.get("width", 64)]
    found = []
    if isinstance(value, int):
        found.append((value, value))
    elif (
        isinstance(value, list | tuple) and len(value) >= 2 and all(isinstance(one, int) for one in value)
    ):  # height and width
        found.append((value[-2], value[-1]))
    return list(dict.fromkeys([*found, (64, 64), (32, 32), (224, 224), (48, 320)]))


def _pictures(config: Mapping[str, object], taken: Mapping[str, bool]) -> Iterator[Layout]:  # layouts, in turn
    channels = _int(config, ("num_channels", "in_channels", "in_chans", "input_channels", "n_channels"), VISION, 3)
    patch = _int(config, ("patch_size", "spatial_patch_size"), VISION, 16)
    name = PIXELS if PIXELS in taken or "hidden_states" not in taken else "hidden_states"
    grid = next((one for one in ("image_grid_thw", "grid_thw", "image_grid_hws") if one in taken), None)
    if grid:
        merge = _int(config, ("spatial_merge_size", "merge_size", "merge_kernel_size"), VISION, 2)
        times = _int(config, ("temporal_patch_size",), VISION, 1)
        side = 2 * merge

        def patches(rows: int, generator: torch.Generator, inner: tuple[int, ...]) -> dict[str, Tensor]:
            counts = [side, side] if grid.endswith("hws") else [1, side, side]
            return {
                name: torch.randn(rows * side * side, *inner, generator=generator),
                grid: torch.tensor([counts] * rows),
            }

        yield lambda rows, generator: patches(rows, generator, (channels * times * patch**2,))
        yield lambda rows, generator: patches(rows, generator, (channels, patch, patch))
        yield lambda rows, generator: {
            key: one[None] if key == name else one
            for key, one in patches(rows, generator, (channels, patch, patch)).items()
        }
    if "spatial_shapes" in taken:
        side = 2 * _int(config, ("downsample_factor", "spatial_merge_size"), VISION, 2)
        yield lambda rows, generator: {
            PIXELS: torch.randn(rows, side * side, channels * patch**2, generator=generator),
            "pixel_attention_mask": torch.ones(rows, side * side, dtype=torch.long),
            "spatial_shapes": torch.tensor([[side, side]] * rows),
        }
    where = next((one for one in ("pixel_position_ids", "image_position_ids") if one in taken), None)
    if where:
        pool = _int(config, ("pooling_kernel_size",), VISION, 2)
        side = 2 * pool
        grid_of = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1).view(1, -1, 2)
        yield lambda rows, generator: {
            PIXELS: torch.rand(rows, side * side, channels * patch**2, generator=generator),
            where: grid_of.repeat(rows, 1, 1),
        }
    frames = _int(config, ("num_frames", "frames_per_clip", "num_image_frames"), VISION, 8)
    tiles = _int(config, ("max_num_tiles",), VISION, 1)
    sizes = _sizes(config)
    if "aspect_ratio_ids" in taken:
        high, wide = sizes[0]
        yield lambda rows, generator: {
            PIXELS: torch.randn(rows, 1, tiles, channels, high, wide, generator=generator),
            "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.cat([torch.ones(rows, 1, 1), torch.zeros(rows, 1, tiles - 1)], -1).long(),
            "cross_attention_mask": torch.ones(rows, 1, 1, tiles, dtype=torch.long),
        }
    if _int(config, ("num_frames", "frames_per_clip"), VISION, 0) and IDS not in taken:
        name = VIDEOS if VIDEOS in taken and PIXELS not in taken else PIXELS
        for high, wide in sizes[:2]:
            yield _shaped(name, (frames, channels, high, wide), taken)
    told = [one for one in _TOLD if one in taken]
    for high, wide in sizes if name in taken else ():
        for shape in ((channels, high, wide), (1, channels, high, wide), (2, channels, high, wide)):
            for sized in ([], told) if told and not any(taken[one] for one in told) else (told,):
                yield _shaped(name, shape, taken, sized)
    if "flattened_patches" in taken:
        side = math.isqrt(_int(config, ("seq_len", "max_patches"), VISION, 16))
        yield _shaped("flattened_patches", (side * side, 2 + channels * patch**2), taken)


_TOLD = ("image_sizes", "original_sizes", "target_sizes")
"""Arguments that tell the size of a picture."""


def _shaped(name: str, shape: tuple[int, ...], taken: Mapping[str, bool], told: Sequence[str] = ()) -> Layout:
    """Pictures of one shape, with the other arguments of a forward about their sizes."""

    def make(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        found = {name: torch.randn(rows, *shape, generator=generator)}
        found |= {one: torch.tensor([list(shape[-2:])] * rows) for one in told}
        if taken.get("pixel_mask"):
            found["pixel_mask"] = torch.ones(rows, *shape[-2:], dtype=torch.long)
        return found

    return make


def _sounds(config: Mapping[str, object], taken: Mapping[str, bool]) -> Iterator[Layout]:
    bands = _int(
        config,
        ("num_mel_bins", "n_mels", "num_mel_channels", "input_feat_per_channel", "feature_size", "mel_bins",
         "input_dim", "model_in_dim", "num_mels", "feature_projection_input_dim", "input_channels", "spectrogram_bins"),
        SOUND,
        80,
    )  # fmt: skip
    places = _int(config, ("max_source_positions", "max_position_embeddings_audio"), SOUND, 0)
    own = _int(config, ("max_length", "num_frames", "n_window", "spec_size"), SOUND, 0)
    lengths = list(dict.fromkeys(one for one in (2 * places, own, 2 * own, 100, 128, 400, 3000) if 0 < one <= 3000))
    masks = [one for one in ("input_features_mask", "feature_attention_mask") if one in taken]
    for name in (FEATURES, SPECTROGRAM):
        if name not in taken:
            continue
        for length in lengths:
            for shape in ((bands, length), (length, bands), (1, length, bands), (1, bands, length)):
                yield _sounded(name, shape, length, masks)
    if SAMPLES in taken:
        for length in (4000, 15360):  # the second is a multiple of what most codecs take together
            yield _sounded(SAMPLES, (length,), length, [])
            yield _sounded(SAMPLES, (1, length), length, [])
        for length in lengths:
            yield _sounded(SAMPLES, (length, bands), length, [])


def _sounded(name: str, shape: tuple[int, ...], length: int, masks: Sequence[str]) -> Layout:
    return lambda rows, generator: {
        name: torch.randn(rows, *shape, generator=generator),
        **{one: torch.ones(rows, length, dtype=torch.long) for one in masks},
    }


def _series(config: Mapping[str, object], taken: Mapping[str, bool]) -> Iterator[Layout]:
    length = _int(config, ("context_length", "seq_length", "max_sequence_length"), TEXT, 32)
    lags = find(config, ("lags_sequence",), TEXT)
    past = length + (max(lags) if isinstance(lags, list) and lags else 0)
    ahead = _int(config, ("prediction_length", "horizon_length"), TEXT, 4)
    width = _int(config, ("num_input_channels", "input_size"), TEXT, 1)
    times = _int(config, ("num_time_features",), TEXT, 0)

    def make(rows: int, generator: torch.Generator, inner: tuple[int, ...]) -> dict[str, Tensor]:
        made = {
            SERIES: torch.randn(rows, past, *inner, generator=generator),
            OBSERVED: torch.ones(rows, past, *inner),
            "past_time_features": torch.randn(rows, past, times, generator=generator),
            "future_values": torch.randn(rows, ahead, *inner, generator=generator),
            "future_time_features": torch.randn(rows, ahead, times, generator=generator),
        }
        wanted = [name for name in made if taken.get(name) or (name in taken and (times or name == OBSERVED))]
        return {name: made[name] for name in wanted}

    for inner in [(width,), ()] if width > 1 else [(), (1,)]:
        yield lambda rows, generator, inner=inner: make(rows, generator, inner)  # type: ignore[misc]  # bound early


def _states(config: Mapping[str, object], taken: Mapping[str, bool]) -> Iterator[Layout]:
    """Embeddings for each argument that is required and is none of the others: a part of a larger model."""
    width = _int(config, ("hidden_size", "d_model", "embed_dim", "width", "dim"), re.compile("$^"), 0)
    other = _int(config, ("encoder_hidden_size", "cross_attention_hidden_size", "vision_hidden_size"), VISION, width)
    names = [one for one in _required(taken) if _EMBEDDED.search(one)]
    if not width or not names or len(names) < len(_required(taken)):
        return
    for length in (7, 16):
        yield lambda rows, generator, length=length: {  # type: ignore[misc]  # bound early
            one: torch.randn(rows, length, other if "encoder" in one else width, generator=generator) for one in names
        }


def features_of(module: nn.Module, config: Mapping[str, object]) -> dict[str, tuple[int, int]]:
    """Rows of vectors that a forward takes beside tokens, by a width that the config has under a like name.

    ``visual_feats`` is as wide as ``visual_feat_dim`` says, ``visual_embeds`` as ``visual_embedding_dim``.

    Returns:
        Argument -> (vectors in a row, their width).
    """
    found = {}
    for name in parameters_of(module):
        words = [one.removesuffix("s") for one in name.split("_")]
        if name in SIGNALS or name.startswith(DECODER) or words[0] in _NO_FEATURES:
            continue
        for other, width in config.items():
            like = other.split("_")
            if like[-1] not in ("dim", "size", "width") or len(like) != len(words) + 1 or not isinstance(width, int):
                continue
            if width > 0 and all(one.startswith(word) for one, word in zip(like, words, strict=False)):
                found[name] = (VECTORS, width)
    return found


VECTORS = 11
"""Vectors in a row of features: as many as no row has tokens."""

_NO_FEATURES = ("input", "label", "output", "return", "use", "past", "head", "cache")

_EMBEDDED = re.compile(r"embeds|embeddings$|hidden_states|^inputs$|^x$|features$")


def completed(
    inputs: Mapping[str, Tensor], module: nn.Module, config: Mapping[str, object], port: Collection[str] = ()
) -> dict[str, Tensor]:
    """The arguments with those that a forward takes beside them and whose names tell what they are.

    Boxes of tokens are given wherever a forward takes some, other token ids and masks where they are required.

    Args:
        port: arguments that the port takes: they are made although the reference has a default for them.
    """
    taken = parameters_of(module)
    found = dict(inputs)
    ids = found.get(IDS)
    rows = len(next(iter(found.values())))
    generator = torch.Generator().manual_seed(rows)
    if BOXES in taken and ids is not None:
        most = _int(config, ("max_2d_position_embeddings",), TEXT, 1000) - 1
        corners, sizes = torch.randint(0, max(most // 2, 1), (2, *ids.shape, 2), generator=generator)
        found[BOXES] = torch.cat([corners, corners + sizes], -1)  # as high as wide would hide which is which
    if EMBEDDED in port and EMBEDDED in taken and IDS not in port and ids is not None:
        found[EMBEDDED] = embedded(ids, embedding_width(config))
    samples = found.get(SAMPLES)
    if MASK in port and MASK in taken and samples is not None and samples.ndim == 2:  # each row shorter than the last
        lengths = torch.linspace(samples.shape[1], samples.shape[1] // 2, rows).long()
        found[MASK] = (torch.arange(samples.shape[1]) < lengths.roll(1)[:, None]).long()
    for name, required in taken.items():
        if not required or name in found:
            continue
        if name.endswith(IDS):
            part = find(config, (f"{name.removesuffix(f'_{IDS}')}_config",), TEXT)
            words = _int(part if isinstance(part, Mapping) else config, ("vocab_size",), TEXT, 2)
            found[name] = torch.randint(0, words, (rows, 7), generator=generator)
        elif name.endswith("mask"):
            found[name] = torch.ones(rows, 7, dtype=torch.long)
        elif name == "merge_sizes":
            found[name] = torch.full((rows,), _int(config, ("spatial_merge_size", "merge_size"), VISION, 1))
    return found


def embedding_width(config: Mapping[str, object]) -> int:
    """How many numbers stand for a token, by a config."""
    return _int(config, ("hidden_size", "d_model", "n_embd", "dim"), TEXT, 1)


def embedded(ids: Tensor, width: int) -> Tensor:
    """Numbers that stand for token ids: always the same for an id, of unit scale, and unlike those of another.

    They are no model's: a port that is given embeddings and a reference that is given the same ones are compared by
    what they compute of them.

    Args:
        ids: [b s].
        width: how many numbers stand for an id.

    Returns:
        [b s width], float32.
    """
    generator = torch.Generator().manual_seed(width)
    rates, phases = 2 * math.pi * torch.rand(2, width, generator=generator, dtype=torch.float64)
    return (math.sqrt(2) * torch.sin(ids.unsqueeze(-1) * rates + phases)).float()


def signals_of(module: nn.Module, config: Mapping[str, object]) -> Iterator[Signal]:
    """Ways to give a model what it takes beside tokens, the most usual first."""
    taken = parameters_of(module)
    if PIXELS in taken or VIDEOS in taken or "flattened_patches" in taken or "grid_thw" in taken:
        yield from (Signal("picture", one) for one in _pictures(config, taken))
    if SAMPLES in taken or FEATURES in taken or SPECTROGRAM in taken:
        yield from (Signal("sound", one) for one in _sounds(config, taken))
    if SERIES in taken:
        yield from (Signal("series", one) for one in _series(config, taken))
    if told := features_of(module, config):
        yield Signal(
            "row of features",
            lambda rows, generator: {
                name: torch.randn(rows, *shape, generator=generator) for name, shape in told.items()
            },
        )
    if _required(taken):
        yield from (Signal("row of embeddings", one) for one in _states(config, taken))


def with_places(signal: Signal, module: nn.Module, config: Mapping[str, object]) -> Iterator[Signal]:
    """The signal between tokens: which token stands for it, and how many of these, as the reference counts them.

    Args:
        module: the reference, in the dtype that its weights have.
    """
    token = _token(config, "image|img|media" if signal.kind == "picture" else "audio|sound|speech")
    if token is None:
        return
    words = "vision|image|boi" if signal.kind == "picture" else "audio|boa"
    around = (_token(config, f"({words})_?(start|begin|bos)|^boi|^boa"), _token(config, f"({words})_?end|^eoi|^eoa"))
    extra = tuple(one for one in ("mm_token_type_ids",) if one in parameters_of(module))
    for places in _counts(signal, module, config):
        yield replace(signal, token=token, places=places, around=around, extra=extra)
        if around != (None, None):
            yield replace(signal, token=token, places=places, extra=extra)


def _token(config: Mapping[str, object], words: str) -> int | None:
    """The id of a special token by its field's name."""
    for name, value in config.items():
        said = re.search(words, name) and re.search(r"token_(id|index)$|_id$|index$", name)
        marks = re.search(r"start|begin|end|bos|eos|^boi|^eoi", name) and not re.search("start|begin|end|bo|eo", words)
        if said and not marks and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _counts(signal: Signal, module: nn.Module, config: Mapping[str, object]) -> Iterator[int]:
    """How many tokens stand for the signal of a row: counted in the reference's own features, else the config's."""
    getter = "get_image_features" if signal.kind == "picture" else "get_audio_features"
    dtype = next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)
    made = signal.arguments(2, torch.Generator().manual_seed(0))
    given = {name: one.to(dtype) if one.is_floating_point() else one for name, one in made.items()}
    seen: set[int] = set()
    for part in (module, getattr(module, "model", None)):
        get = getattr(part, getter, None)
        if get is None:
            continue
        known = inspect.signature(get).parameters
        try:
            with torch.no_grad():
                found = get(**{name: one for name, one in given.items() if name in known})
        except Exception:  # noqa: BLE001, S112  # the reference's own code: another layout may suit it
            continue
        for count in _rows(found):
            if count % 2 == 0 and count // 2 not in seen:
                seen.add(count // 2)
                yield count // 2
    names = ("image_seq_length", "image_seq_len", "mm_tokens_per_image", "num_image_tokens", "image_num_patches",
             "num_query_tokens", "audio_seq_length")  # fmt: skip
    for name in names:
        value = find(config, (name,), VISION)
        if isinstance(value, int) and value not in seen:
            seen.add(value)
            yield value


def _rows(found: Any) -> Iterator[int]:  # whatever a reference returns
    """How many vectors there are in what a reference makes of a signal, in each place where it may be meant."""
    if isinstance(found, Tensor):
        yield found.numel() // found.shape[-1]
    elif isinstance(found, list | tuple) and found and all(isinstance(one, Tensor) for one in found):
        yield sum(one.numel() // one.shape[-1] for one in found)
    else:
        for name in ("pooler_output", "image_embeds", "audio_embeds", "last_hidden_state"):
            if getattr(found, name, None) is not None:
                yield from _rows(getattr(found, name))

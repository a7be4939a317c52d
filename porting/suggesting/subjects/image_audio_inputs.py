"""What a model is given that is no words: images, and sound as the energies of bands over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from porting.suggesting.subjects.config_fields import Role, fields_of
from porting.suggesting.subjects.forward_arguments import (
    FEATURES,
    PIXELS,
    ArgumentMapping,
    argument_mappings,
    outputs_of,
    refusal,
    roles,
    sample_batch,
)
from porting.suggesting.subjects.questions import Asker

FRAMES = 2
"""Frames for each position of the encoder: one of its convolutions takes every second."""


def shapes_of(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """The shape of one image, [channels, height, width], and of one sound, [bands, frames]."""
    inner = config.get("vision_config")
    fields = {**config, **(inner if isinstance(inner, dict) else {})}
    size = fields.get("image_size") or 12
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    channels = next((fields[name] for name in fields_of(Role.CHANNELS, fields)), 3)
    bands, places = config.get("num_mel_bins"), config.get("max_source_positions")
    return {
        PIXELS: (int(str(channels)), int(str(high)), int(str(wide))),
        FEATURES: (bands if isinstance(bands, int) else 80, FRAMES * (places if isinstance(places, int) else 10)),
    }


def signals(available: Sequence[str], config: Mapping[str, object], rows: int, seed: int) -> dict[str, Tensor]:
    """Some images or sounds for the proof."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(rows, *shape, dtype=torch.float64, generator=generator).float()
        for name, shape in shapes_of(config).items()
        if name in available
    }


def audio_argument_mapping(
    module: nn.Module,
    available: Sequence[str],
    config: Mapping[str, object],
    vocabulary: int,
    padding: int,
    ask: Asker,
) -> ArgumentMapping:
    """How a forward that listens is to be given sounds, [b bands frames] or [b frames bands], and words.

    Raises:
        VerifyError: no way works; carries what the forward said to the most usual one.
    """
    found, loose = roles(module, available, ask)
    first: Exception | None = None
    usual = next(argument_mappings(found))
    for rules in argument_mappings(found):
        for turned in (False, True):
            laid = tuple(
                (f"{theirs} [b m f]", f"{ours} [b f m]") if turned and theirs == FEATURES else (theirs, ours)
                for theirs, ours in rules
            )
            way = ArgumentMapping(rules=laid, loose=loose)
            try:
                outputs_of(module, way, sample_batch(way.named, vocabulary, padding, shapes=shapes_of(config)))
            except Exception as error:  # noqa: BLE001  # the user's own forward may raise anything
                first = first or error
                continue
            return way
    raise refusal(module, usual, (), first) from first

"""How a forward is to be given sounds and videos: their layouts, and the mask that hides a decoder's later tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from torch import nn

from porting.suggesting.subjects.argument_names import MASK_FORMS, ArgumentMapping, argument_mappings, roles
from porting.suggesting.subjects.config_fields import Role, config_number, fields_of
from porting.suggesting.subjects.forward_arguments import Shapes, outputs_of, refusal, sample_batch, sees_later
from porting.suggesting.subjects.questions import Asker
from porting.trials.derived_inputs import CAUSAL
from porting.trials.modalities import DECODER, DECODER_IDS, FEATURES, PIXELS, SAMPLES, VIDEOS

SAMPLED = 3200
"""Samples of a sound; the convolutions of speech models make a frame of 320 at most."""

FRAMES = 2
"""Frames for each position of the encoder: one of its convolutions takes every second."""


def shapes_of(config: Mapping[str, object]) -> Shapes:
    """The shape of one image, [channels, height, width], and of one sound, [bands, frames] or [samples].

    Of a model of videos it is that of one of these, [frames, channels, height, width].
    """
    inner = config.get("vision_config")
    fields = {**config, **(inner if isinstance(inner, dict) else {})}
    size = next((fields[name] for name in fields_of(Role.IMAGE, fields)), 12)
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    channels = next((fields[name] for name in fields_of(Role.CHANNELS, fields)), 3)
    bands, places = config.get("num_mel_bins"), config.get("max_source_positions")
    frames = config_number(config, Role.FRAMES)
    picture = (*((frames,) if frames > 1 else ()), int(str(channels)), int(str(high)), int(str(wide)))
    return {
        PIXELS: picture,
        VIDEOS: picture,
        SAMPLES: (SAMPLED,),
        FEATURES: (bands if isinstance(bands, int) else 80, FRAMES * (places if isinstance(places, int) else 10)),
    }


def _turned(theirs: str, ours: str) -> tuple[str, str]:
    """The other layout in which a forward may be given sounds or videos."""
    video = ("[b t c h w]", "[b c t h w]")
    other = {
        FEATURES: ("[b m f]", "[b f m]"), SAMPLES: ("[b t]", "[b 1 t]"), PIXELS: video, VIDEOS: video,
    }.get(theirs)  # fmt: skip
    return (theirs, ours) if other is None else (f"{theirs} {other[0]}", f"{ours} {other[1]}")


def signal_argument_mapping(
    module: nn.Module, available: Sequence[str], config: Mapping[str, object], vocabulary: int, padding: int, ask: Asker
) -> ArgumentMapping:
    """How a forward is to be given sounds, [b bands frames] or [b frames bands] or [b samples], and words; or videos.

    Videos are [b frames channels height width], or have the channels in front.

    Raises:
        VerifyError: no way works; carries what the forward said to the most usual one.
    """
    found, loose = roles(module, available, ask)
    first: Exception | None = None
    usual = next(argument_mappings(found))
    for rules in argument_mappings(found):
        for turned in (False, True):
            laid = tuple(_turned(*rule) if turned else rule for rule in rules)
            way = ArgumentMapping(rules=laid, loose=loose)
            try:
                outputs_of(module, way, sample_batch(way.named, vocabulary, padding, shapes=shapes_of(config)))
            except Exception as error:  # noqa: BLE001  # the user's own forward may raise anything
                first = first or error
                continue
            return _with_causal_mask(module, way, config, vocabulary, padding)
    raise refusal(module, usual, (), first) from first


def _with_causal_mask(
    module: nn.Module, way: ArgumentMapping, config: Mapping[str, object], vocabulary: int, padding: int
) -> ArgumentMapping:
    """The way with a mask that hides later tokens, where the decoder sees them unless it is given one."""

    def looks_ahead(one: ArgumentMapping) -> bool | None:
        inputs = sample_batch(one.named, vocabulary, padding, shapes=shapes_of(config))
        try:
            return sees_later(lambda given: outputs_of(module, one, given), inputs)
        except Exception:  # noqa: BLE001  # the user's own forward may raise anything
            return None

    if DECODER_IDS not in way.named or not looks_ahead(way):
        return way
    masks = [name for name in way.loose if "mask" in name]
    for name, kind in product(masks, MASK_FORMS):
        rule = (f"{DECODER}{CAUSAL} [q k]", f"{name} -> {kind} [q k]" if kind else f"{name} [q k]")
        masked = replace(way, rules=(*way.rules, rule), loose=tuple(one for one in way.loose if one != name))
        if looks_ahead(masked) is False:
            return masked
    return way

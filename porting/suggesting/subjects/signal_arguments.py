"""How a forward is to be given sounds and videos: their layouts, and the mask that hides a decoder's later tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from torch import nn

from porting.suggesting.subjects.argument_names import MASK_FORMS, ArgumentMapping, argument_mappings, layouts, roles
from porting.suggesting.subjects.forward_arguments import refusal
from porting.suggesting.subjects.forward_effects import outputs_of, sees_later
from porting.suggesting.subjects.questions import Asker
from porting.suggesting.subjects.sampler import Sampler
from porting.trials.derived_inputs import CAUSAL
from porting.trials.modalities import DECODER, DECODER_IDS


def signal_argument_mapping(module: nn.Module, sampler: Sampler, ask: Asker) -> ArgumentMapping:
    """How a forward is to be given sounds, [b bands frames] or [b frames bands] or [b samples], and words; or videos.

    Videos are [b frames channels height width], or have the channels in front.

    Raises:
        VerifyError: no way works; carries what the forward said to the most usual one.
    """
    found, loose = roles(module, sampler.available, ask)
    first: Exception | None = None
    usual = next(argument_mappings(found))
    for rules in argument_mappings(found):
        for laid in layouts(rules, sampler.shapes):
            way = ArgumentMapping(rules=laid, loose=loose)
            try:
                outputs_of(module, way, sampler.batch(way.named))
            except Exception as error:  # noqa: BLE001  # the user's own forward may raise anything
                first = first or error
                continue
            return _with_causal_mask(module, way, sampler)
    raise refusal(module, usual, (), first) from first


def _with_causal_mask(module: nn.Module, way: ArgumentMapping, sampler: Sampler) -> ArgumentMapping:
    """The way with a mask that hides later tokens, where the decoder sees them unless it is given one."""

    def looks_ahead(one: ArgumentMapping) -> bool | None:
        inputs = sampler.batch(one.named)
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

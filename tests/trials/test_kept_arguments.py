"""Ports that keep an argument of one call and use it in the next one, which does not have it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from porting import verify
from porting.trials.purity import _kept, _state
from tests.families.ported import draw
from tests.trials.small_model import Encoder

SIZES: Mapping[str, Any] = {"vocab_size": 40, "pad_token_id": 0, "decoder_start_token_id": 1}
BART: Mapping[str, Any] = {
    **SIZES, "d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 20,
}  # fmt: skip
T5: Mapping[str, Any] = {**SIZES, "d_model": 12, "d_kv": 6, "d_ff": 16, "num_layers": 1, "num_heads": 2}
WHISPER: Mapping[str, Any] = {
    **BART, "num_mel_bins": 6, "max_source_positions": 10, "max_target_positions": 20,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Sequences(nn.Module):
    """An encoder-decoder that may keep its masks: a mask that is not given is that of the last call."""

    def __init__(self, architecture: str, fields: Mapping[str, Any], kept: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind: Any = getattr(transformers, architecture)  # one of transformers' classes
        self.model = kind._from_config(kind.config_class(**fields), attn_implementation="eager")
        draw(self.model)
        self.config = self.model.config
        self.kept = kept
        self.last: dict[str, Tensor] = {}

    def run(self, **given: Tensor | None) -> Tensor:
        """The logits, with the mask that is kept in place of one that is missing."""
        prefix, _, _ = self.kept.rpartition("attention_mask")
        ids, mask = given.get(f"{prefix}input_ids"), given.get(self.kept)
        if mask is not None:
            self.last["mask"] = mask.clone()
        elif ids is not None and "mask" in self.last and self.last["mask"].shape == ids.shape:
            given[self.kept] = self.last["mask"]
        found = self.model(**given, use_cache=False)
        assert isinstance(found.logits, Tensor)
        return found.logits


class Texts(Sequences):
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
    ) -> Tensor:
        return self.run(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
        )


class Sounds(Sequences):
    def forward(
        self, input_features: Tensor, decoder_input_ids: Tensor, decoder_attention_mask: Tensor | None = None
    ) -> Tensor:
        return self.run(
            input_features=input_features,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
        )


ENCODER, DECODER = "attention_mask", "decoder_attention_mask"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("port", "architecture", "fields", "kept"),
    [
        (Texts, "BartForConditionalGeneration", BART, ""),
        (Texts, "BartForConditionalGeneration", BART, ENCODER),
        (Texts, "BartForConditionalGeneration", BART, DECODER),
        (Texts, "T5ForConditionalGeneration", T5, ""),
        (Texts, "T5ForConditionalGeneration", T5, ENCODER),
        (Texts, "T5ForConditionalGeneration", T5, DECODER),
        (Sounds, "WhisperForConditionalGeneration", WHISPER, ""),
        (Sounds, "WhisperForConditionalGeneration", WHISPER, DECODER),
    ],
)
def test_a_mask_that_is_kept_is_seen_in_encoder_decoders(
    port: type[Sequences], architecture: str, fields: Mapping[str, Any], kept: str
) -> None:
    reference, module = port(architecture, fields, "").eval(), port(architecture, fields, kept).eval()
    report = verify(reference=reference, into=module, dtypes=(), loaded=True, causes=False)
    assert report.faithful == (not kept), str(report)
    assert not kept or "cause: state kept between calls in last" in str(report)


class Deciding(Encoder):
    """Its first call decides whether it has segments."""

    def __init__(self) -> None:
        super().__init__()
        self.has_segments: bool | None = None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if self.has_segments is None:
            self.has_segments = token_type_ids is not None
        kinds = token_type_ids if self.has_segments else None
        return super().forward(input_ids, attention_mask, kinds, position_ids)


def test_what_the_first_call_decides_is_seen() -> None:
    report = verify(reference=Encoder(), into=Deciding(), dtypes=(), loaded=True, causes=False)
    assert "cause: state kept between calls in has_segments" in str(report), str(report)


class Segmented(Encoder):
    """Segments that are not given are those of the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        given = kwargs.get("token_type_ids")
        if given is not None:
            self.before = given.clone()
        elif self.before is not None and self.before.shape == input_ids.shape:
            kwargs["token_type_ids"] = self.before
        return super().forward(input_ids, *args, **kwargs)


def forward_of(
    self: Segmented,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    return Segmented.forward(
        self, input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, position_ids=position_ids
    )


def test_the_first_batches_may_show_it_too() -> None:
    port = type("Port", (Segmented,), {"forward": forward_of})()
    report = verify(reference=Encoder(), into=port, dtypes=(), loaded=True, causes=False)
    assert "cause: state kept between calls in before" in str(report), str(report)


class Shared(Encoder):
    """It has places outside of itself where something can be kept."""

    table: dict[str, Tensor] = {}  # noqa: RUF012  # shared by all on purpose

    def __init__(self) -> None:
        super().__init__()
        self.space = SimpleNamespace(mask=None)
        self.calls: deque[int] = deque()
        self.nested: dict[str, list[Tensor]] = {"masks": []}

    def closed(self, kept: list[int] = []) -> list[int]:  # noqa: B006  # kept on purpose
        return kept


def test_whatever_keeps_it_is_named() -> None:
    port = Shared()

    def after(change: Any) -> str:  # whatever it returns
        before = _state(port)
        assert _kept(port, before) == ""
        change()
        return _kept(port, before)

    assert after(lambda: setattr(port.space, "mask", torch.ones(2))) == "space"
    assert after(lambda: port.space.mask.add_(1)) == "space"
    assert after(lambda: port.calls.append(1)) == "calls"
    assert after(lambda: port.nested["masks"].append(torch.ones(1))) == "nested"
    assert after(lambda: port.nested["masks"][0].add_(1)) == "nested"
    assert after(lambda: Shared.table.update(mask=torch.ones(1))) == "Shared.table"
    assert after(lambda: port.closed().append(1)) == "Shared.closed.kept"


ALLOWED: dict[tuple[int, ...], Tensor] = {}


class OfTheFile(Encoder):
    """It keeps the first mask of each shape in a variable of its file, where each copy finds it."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = ALLOWED.setdefault(tuple(mask.shape), mask.clone())
        return super().forward(input_ids, mask, token_type_ids, position_ids)


def test_what_a_file_keeps_is_seen_though_copies_share_it() -> None:
    rows = torch.arange(1, 13).view(2, 6)
    masks = [torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]), torch.tensor([[1, 0, 1, 1, 1, 1], [1] * 6])]
    cases = [{"input_ids": rows, "attention_mask": mask} for mask in masks]
    ALLOWED.clear()
    report = verify(reference=Encoder(), into=OfTheFile(), dtypes=(), loaded=True, inputs=cases)
    assert "cause: state kept between calls in OfTheFile" not in str(report)
    assert "state kept between calls in" in str(report), str(report)
    assert "ALLOWED" in str(report)
    assert report.causes == ()

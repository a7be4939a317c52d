"""A query that no key is left for: what is pooled there depends on the implementation of attention."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from porting.trials.scope import OTHERWISE
from porting.verification import verify
from tests.causes.wrong_ports import table
from tests.families.ported import draw

# An end token of 2 is that of old checkpoints: the highest token id of a row is pooled, wherever it stands.
SIZES: Mapping[str, Any] = {
    "vocab_size": 60, "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 2,
    "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "layer_norm_eps": 1e-5,
}  # fmt: skip


class Port(transformers.CLIPTextModel):  # type: ignore[no-untyped-call]  # transformers does not type that
    """The reference itself, as its users run it: in torch's fused attention."""

    factor = 1.0

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found = super().forward(input_ids=input_ids, attention_mask=attention_mask)
        hidden = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        first = torch.where(hidden[:, :1] == 0, self.factor, 1.0)
        return found.last_hidden_state, found.pooler_output * first


def both() -> tuple[nn.Module, Port]:
    config = transformers.CLIPTextConfig(**SIZES)
    made = transformers.CLIPTextModel
    reference = made._from_config(copy.deepcopy(config), attn_implementation="eager")  # type: ignore[no-untyped-call]  # as above
    draw(reference)
    port = Port._from_config(copy.deepcopy(config), attn_implementation="sdpa")  # type: ignore[no-untyped-call]  # as above
    port.load_state_dict(reference.state_dict())
    return reference.eval(), port.eval()


def test_a_port_in_fused_attention_is_faithful() -> None:
    reference, port = both()
    report = verify(into=port, reference=reference, loaded=True, table=table(reference, port, r"\."), dtypes=())
    assert report.verdict == "faithful"
    assert any(result.said == OTHERWISE for result in report.scope.results)


def test_a_mistake_in_these_rows_is_seen() -> None:
    reference, port = both()
    port.factor = 1.01
    report = verify(
        into=port, reference=reference, loaded=True, table=table(reference, port, r"\."), dtypes=(), causes=False
    )
    assert report.verdict == "different"

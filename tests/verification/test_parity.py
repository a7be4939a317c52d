"""The handwritten BERT, loaded through its table, against transformers: layer by layer, in three dtypes.

Here nothing of the verification's own machinery takes part in running the models: they are called as a user calls them,
and what they return is compared.  The bounds are the design's: 1e-12 of the scale in float64; in another dtype four
times the reference's own rounding error, both measured from the float64 reference.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from porting.loading import load
from porting.models.bert_heads import BertForPreTraining
from porting.tracing.measure import MEANING, Anchor, error, luck, ratio
from tests.small_checkpoint import CONFIG

LENGTH = CONFIG["max_position_embeddings"]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ROWS = {"padded": (24, 17, 9, 5, 3), "unpadded": (11, 11, 11, 11, 11), "full length": (24, 24, 24, 24, 24)}


def batch(lengths: tuple[int, ...], segments: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths) + segments)
    width = max(lengths)
    ids = torch.randint(5, CONFIG["vocab_size"], (len(lengths), width), generator=generator)
    sizes = torch.tensor(lengths)[:, None]
    mask = (torch.arange(width) < sizes).long()
    kinds = (torch.arange(width) >= sizes // 2).long() * mask * (segments - 1)
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": kinds}


CASES = {
    f"{name}, {segments} segment{'s' if segments > 1 else ''}": batch(lengths, segments)
    for name, lengths in ROWS.items()
    for segments in (1, 2)
}


class Both:
    """Both models, and everything that they return for a case in a dtype, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outputs = cache(self._outputs)
        self._models = cache(self._made)

    def _made(self, dtype: torch.dtype) -> tuple[Any, BertForPreTraining]:  # Any: transformers types few of its methods
        theirs: Any = transformers.BertForPreTraining.from_pretrained(
            self.path, dtype=dtype, attn_implementation="eager"
        )
        ours = load(self.path).to(dtype)
        assert isinstance(ours, BertForPreTraining)
        return theirs.eval(), ours

    def _outputs(self, case: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        theirs, ours = self._models(dtype)
        with torch.no_grad():
            named = theirs(**CASES[case], output_hidden_states=True, output_attentions=True)
            found = ours(**CASES[case], output_hidden_states=True, output_attentions=True)
            pooled = theirs.bert(**CASES[case]).pooler_output
            encoded = ours.bert(**CASES[case])
        reference = {"mlm": named.prediction_logits, "nsp": named.seq_relationship_logits, "pooled": pooled}
        port = {"mlm": found.mlm_logits, "nsp": found.nsp_logits, "pooled": encoded.pooled}
        for what, left, right in (
            ("hidden state", named.hidden_states, found.hidden_states),
            ("attention map", named.attentions, found.attentions),
        ):
            assert len(left) == len(right)
            reference |= {f"{what} {depth}": value for depth, value in enumerate(left)}
            port |= {f"{what} {depth}": value for depth, value in enumerate(right)}
        return reference, port


@pytest.fixture(scope="module")
def both(checkpoint: Path) -> Both:
    return Both(checkpoint)


LAYERS = CONFIG["num_hidden_layers"]
WHAT = [
    *(f"hidden state {depth}" for depth in range(LAYERS + 1)),
    *(f"attention map {depth}" for depth in range(LAYERS)),
    "pooled",
    "mlm",
    "nsp",
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_layer_agrees(both: Both, case: str, dtype: torch.dtype) -> None:
    exact = both.outputs(case, torch.float64)[0]
    reference, port = both.outputs(case, dtype)
    assert set(exact) == set(reference) == set(port) == set(WHAT)
    for name in WHAT:
        assert reference[name].shape == port[name].shape
        assert port[name].dtype == dtype
        anchor = Anchor.of(exact[name])
        ours, theirs = error(port[name], anchor), error(reference[name], anchor)
        if dtype == torch.float64:
            assert ours.largest <= MEANING, name
        else:
            assert ratio(ours, theirs, dtype) <= luck(ours.count), name


def test_the_cases_are_what_they_are_called() -> None:
    masks = {case: inputs["attention_mask"] for case, inputs in CASES.items()}
    assert [case for case, mask in masks.items() if (mask == 0).any()] == ["padded, 1 segment", "padded, 2 segments"]
    assert {case for case, inputs in CASES.items() if inputs["token_type_ids"].any()} == {
        case for case in CASES if case.endswith("segments")
    }
    assert masks["full length, 2 segments"].shape[1] == LENGTH

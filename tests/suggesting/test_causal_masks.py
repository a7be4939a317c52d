"""Masks of causal modules: padding at a row's end shows nothing of them, a masked token between others does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.suggesting.subjects.argument_names import ArgumentMapping
from porting.suggesting.subjects.forward_arguments import find_argument_mapping
from porting.suggesting.subjects.forward_effects import GAP, faults_seen
from porting.suggesting.subjects.questions import Asker
from porting.suggesting.subjects.sampler import Sampler

IDS, MASK, DECODER, DECODER_MASK = "input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(97, 8).double()

    def attend(self, ids: Tensor, added: Tensor | None, queries: Tensor | None = None) -> Tensor:
        """Each token sees those up to itself; ``added`` is added to the scores."""
        x, y = self.words(ids), self.words(ids if queries is None else queries)
        scores = y @ x.mT
        if queries is None:
            scores = scores.masked_fill(torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool(), float("-inf"))
        found: Tensor = (scores if added is None else scores + added).softmax(-1) @ x
        return found


class Added(Causal):
    def forward(self, ids: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return self.attend(ids, attn_mask)


class AddedToHeads(Causal):
    def forward(self, ids: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return self.attend(ids, None if attn_mask is None else attn_mask.expand(len(ids), 1, 1, -1)[:, 0])


class Hides(Causal):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.attend(ids, -1e9 * mask[:, None].to(self.words.weight))


class Keeps(Causal):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(ids, None if mask is None else -1e9 * (mask[:, None] == 0).double())


class HidesByInfinity(Causal):
    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        none = torch.zeros(len(ids), 1, ids.shape[1], dtype=torch.float64)
        return self.attend(ids, none.masked_fill(padding[:, None].bool(), float("-inf")))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Added, "attn_mask -> additive [b 1 s]"),
        (AddedToHeads, "attn_mask -> additive [b 1 1 s]"),
        (Hides, "mask -> padding [b s]"),
        (HidesByInfinity, "padding -> padding [b s]"),
        (Keeps, "mask [b s]"),
    ],
)
def test_a_causal_module_s_mask_is_given_as_it_is_meant(kind: type[Causal], line: str) -> None:
    found = find_argument_mapping(kind(), Sampler(available=(IDS, MASK)), causal=True, ask=Asker())
    assert found.rules[1] == ("attention_mask [b s]", line)


class Scales(Causal):
    """Its mask changes numbers and hides nothing."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(ids, None) * (1.0 if mask is None else 1 + mask[..., None])


class Weighs(Causal):
    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.attend(ids, None) * weights[..., None]


def test_a_mask_that_hides_too_little_is_given_and_no_other_argument_is_one() -> None:
    found = find_argument_mapping(Scales(), Sampler(available=(IDS, MASK)), causal=True, ask=Asker())
    assert found.rules[1] == ("attention_mask [b s]", "mask [b s]")
    way = ArgumentMapping(rules=((IDS, "ids"), (MASK, "mask")))
    assert faults_seen(Scales, way, Sampler(available=(IDS, MASK)), causal=True) == {GAP}
    assert faults_seen(Keeps, way, Sampler(available=(IDS, MASK)), causal=True) == set()
    with pytest.raises(VerifyError, match="takes 'weights', and nothing tells what to give it"):
        find_argument_mapping(Weighs(), Sampler(available=(IDS, MASK)), causal=True, ask=Asker())


class Decoder(Causal):
    """Its decoder's mask is 1 where a token is hidden, the encoder's where it is seen."""

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        y = self.attend(tgt, -1e9 * tgt_mask[:, None].double())
        return y + self.attend(src, -1e9 * (1 - src_mask[:, None].double()), queries=tgt)


class Turned(Decoder):
    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        return super().forward(src, tgt, ~src_mask.bool(), tgt_mask)


def test_a_decoder_s_mask_is_given_as_it_is_meant() -> None:
    both = Sampler(available=(IDS, MASK, DECODER, DECODER_MASK))
    found = find_argument_mapping(Turned(), both, causal=False, ask=Asker())
    assert dict(found.rules) == {
        "input_ids [b s]": "src [b s]",
        "decoder_input_ids [b t]": "tgt [b t]",
        "attention_mask [b s]": "src_mask -> padding [b s]",
        "decoder_attention_mask [b s]": "tgt_mask -> padding [b s]",
    }
    way = ArgumentMapping(
        rules=((IDS, "src"), (DECODER, "tgt"), (MASK, "src_mask"), (DECODER_MASK, "tgt_mask -> padding"))
    )
    assert faults_seen(Decoder, way, both) == set()
    wrong = ArgumentMapping(rules=(*way.rules[:3], (DECODER_MASK, "tgt_mask")))
    assert faults_seen(Decoder, wrong, both) == {GAP}

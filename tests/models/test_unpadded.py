"""Rows without their padding give what they give with it: every encoder of BERT's kind, every kind of batch."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from porting import models
from porting.models.albert import Albert, AlbertConfig, AlbertForPreTraining
from porting.models.bert import Bert
from porting.models.bert_config import BertConfig
from porting.models.distilbert import DistilBert
from porting.models.electra import Electra, ElectraConfig, ElectraForPreTraining
from porting.models.mpnet import MPNet
from porting.models.prenorm_bert import MegatronBert, PreNormBert
from porting.models.roberta import RobertaForSequenceClassification
from porting.models.unpadded import Rows
from tests.families.ported import draw

SIZES: dict[str, Any] = {  # Any: fields of several types
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 20,
}
NARROW: dict[str, Any] = {**SIZES, "embedding_size": 6}

ENCODERS: dict[str, Callable[[], Bert]] = {
    "bert": lambda: Bert(config=BertConfig(**SIZES)),
    "albert": lambda: Albert(config=AlbertConfig(**NARROW)),
    "electra": lambda: Electra(config=ElectraConfig(**NARROW), pooler=True),
    "distilbert": lambda: DistilBert(config=BertConfig(**SIZES), pooler=True),
    "mpnet": lambda: MPNet(config=BertConfig(**SIZES)),
    "prenorm": lambda: PreNormBert(config=BertConfig(**SIZES)),
    "megatron": lambda: MegatronBert(config=BertConfig(**SIZES)),
}
UNTYPED = ("distilbert", "mpnet")

HEADS: dict[str, Callable[[], nn.Module]] = {
    "pre-training": lambda: models.BertForPreTraining(config=BertConfig(**SIZES)),
    "masked words": lambda: models.BertForMaskedLM(config=BertConfig(**SIZES)),
    "next sentence": lambda: models.BertForNextSentencePrediction(config=BertConfig(**SIZES)),
    "sequences": lambda: models.BertForSequenceClassification(config=BertConfig(**SIZES)),
    "tokens": lambda: models.BertForTokenClassification(config=BertConfig(**SIZES)),
    "spans": lambda: models.BertForQuestionAnswering(config=BertConfig(**SIZES)),
    "albert": lambda: AlbertForPreTraining(config=AlbertConfig(**NARROW)),
    "discriminator": lambda: ElectraForPreTraining(config=ElectraConfig(**NARROW)),
    "roberta": lambda: RobertaForSequenceClassification(config=BertConfig(**SIZES)),
}


def lengths(*tokens: int, width: int, left: bool = False) -> Tensor:
    """A mask [b width] of rows of so many tokens."""
    mask = torch.arange(width) < torch.tensor(tokens)[:, None]
    return mask.flip(1) if left else mask


MASKS: dict[str, Tensor] = {
    "right": lengths(9, 17, 3, 12, 6, width=17),
    "left": lengths(9, 17, 3, 12, 6, width=17, left=True),
    "one token": lengths(1, 8, width=8),
    "a row of one": lengths(1, width=1),
    "equal": lengths(5, 9, 5, 5, 9, width=11),
    "full": lengths(7, 7, 7, width=7),
    "no row full": lengths(4, 2, 6, width=12),
    "holes": torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 1]]).bool(),
}


def batch(mask: Tensor, *, types: bool = True) -> dict[str, Tensor]:
    """Ids in every place: what stands in padding must not matter."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, SIZES["vocab_size"], mask.shape, generator=generator)
    segments = torch.randint(0, 2, mask.shape, generator=generator)
    return {"input_ids": ids, "attention_mask": mask, **({"token_type_ids": segments} if types else {})}


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """One model with padding and without, in float64, every parameter drawn."""
    torch.manual_seed(0)
    padded = make().double().eval()
    draw(padded)
    unpadded = copy.deepcopy(padded)
    encoder = unpadded if isinstance(unpadded, Bert) else unpadded.get_submodule("bert")
    assert isinstance(encoder, Bert)
    encoder.unpadded = True
    return padded, unpadded


def close(found: Tensor, meant: Tensor) -> None:
    assert found.shape == meant.shape
    assert float(((found - meant).abs().max() / meant.abs().max()).detach()) <= 1e-12


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", ENCODERS)
def test_every_token_gets_what_it_gets_with_padding(name: str, kind: str) -> None:
    padded, unpadded = both(ENCODERS[name])
    mask = MASKS[kind]
    inputs = batch(mask, types=name not in UNTYPED)
    meant = padded(**inputs, output_hidden_states=True)
    found = unpadded(**inputs, output_hidden_states=True)
    close(found.last_hidden_state[mask], meant.last_hidden_state[mask])
    assert len(found.hidden_states) == len(meant.hidden_states) == 1 + SIZES["num_hidden_layers"]
    for ours, theirs in zip(found.hidden_states, meant.hidden_states, strict=True):
        close(ours[mask], theirs[mask])
        assert not ours[~mask].any()
    assert not found.last_hidden_state[~mask].any()
    if mask[:, 0].all():
        close(found.pooled, meant.pooled)
    assert found.attentions is None


@pytest.mark.parametrize("head", ["pre-training", "masked words", "albert"])
def test_words_are_scored_at_real_tokens_alone(head: str) -> None:
    _, unpadded = both(HEADS[head])
    seen: list[tuple[int, ...]] = []
    unpadded.get_submodule("mlm").register_forward_hook(lambda module, given, made: seen.append(tuple(made.shape)))
    for kind, meant in (("right", (1, 47)), ("full", (3, 7))):
        mask = MASKS[kind]
        logits = unpadded(**batch(mask))[0]
        assert seen.pop()[:2] == meant
        assert not logits[~mask].any()


@pytest.mark.parametrize("kind", ["right", "full", "no row full"])
@pytest.mark.parametrize("head", HEADS)
def test_every_head_gives_what_it_gives_with_padding(head: str, kind: str) -> None:
    padded, unpadded = both(HEADS[head])
    inputs = batch(MASKS[kind])
    meant, found = padded(**inputs), unpadded(**inputs)
    outputs = [name for name, value in meant._asdict().items() if isinstance(value, Tensor)]
    assert outputs
    for name in outputs:
        ours, theirs = getattr(found, name), getattr(meant, name)
        tokens = theirs.shape[:2] == MASKS[kind].shape
        close(*((one[MASKS[kind]] if tokens else one) for one in (ours, theirs)))


def test_choices_run_without_their_padding() -> None:
    padded, unpadded = both(lambda: models.BertForMultipleChoice(config=BertConfig(**SIZES)))
    inputs = {name: value[:4].unflatten(0, (2, 2)) for name, value in batch(MASKS["right"]).items()}  # type: ignore[no-untyped-call]  # torch's
    close(unpadded(**inputs).logits, padded(**inputs).logits)


@pytest.mark.parametrize("kind", ["right", "left", "holes", "full"])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_gradient_is_that_with_padding(encoder: str, kind: str) -> None:
    """Of a loss over all real tokens, as a masked-language loss is."""
    mask = MASKS[kind]
    gradients = []
    for model in both(ENCODERS[encoder]):
        hidden = model(**batch(mask, types=encoder not in UNTYPED)).last_hidden_state
        direction = torch.randn(hidden.shape, dtype=hidden.dtype, generator=torch.Generator().manual_seed(3))
        (hidden * direction)[mask].sum().backward()
        gradients.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    meant, found = gradients
    assert found.keys() == meant.keys()
    for name, gradient in meant.items():
        largest = max(float(gradient.abs().max()), 1.0)  # the key's bias has none but noise
        assert float((found[name] - gradient).abs().max()) <= 1e-12 * largest, name


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_positions_that_are_given_are_used(name: str) -> None:
    padded, unpadded = both(ENCODERS[name])
    mask = MASKS["left"]
    inputs = batch(mask, types=False)
    counted = (mask.cumsum(1) - 1).clamp_min(0)  # from the first token of each row
    found = unpadded(**inputs, position_ids=counted).last_hidden_state[mask]
    close(found, padded(**inputs, position_ids=counted).last_hidden_state[mask])
    assert not torch.allclose(found, unpadded(**inputs).last_hidden_state[mask])
    shared = torch.arange(17).flip(0)[None]  # one row for all
    found = unpadded(**inputs, position_ids=shared).last_hidden_state[mask]
    close(found, padded(**inputs, position_ids=shared).last_hidden_state[mask])


def test_nothing_is_computed_for_padding_and_rows_of_one_length_attend_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would be right, and no faster."""
    calls: list[tuple[int, ...]] = []
    plain = F.scaled_dot_product_attention

    def counted(query: Tensor, *args: Any, **options: Any) -> Tensor:  # Any: torch's own
        calls.append(tuple(query.shape))
        assert options["attn_mask"] is None
        return plain(query, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    _, model = both(ENCODERS["bert"])
    seen: list[int] = []
    for layer in model.get_submodule("layers").children():
        layer.get_submodule("intermediate").register_forward_hook(
            lambda _, __, output: seen.append(output[..., 0].numel())
        )
    model(**batch(MASKS["equal"]))
    assert seen == [33] * 3
    assert calls == [(3, 3, 5, 8), (2, 3, 9, 8)] * 3
    calls.clear()
    model(**batch(MASKS["full"]))
    assert calls == [(3, 3, 7, 8)] * 3


@pytest.mark.parametrize("name", ENCODERS)
def test_a_row_of_padding_alone_is_zeros_and_changes_no_other(name: str) -> None:
    padded, unpadded = both(ENCODERS[name])
    mask = lengths(5, 0, 3, width=6)
    inputs = batch(mask, types=name not in UNTYPED)
    found = unpadded(**inputs).last_hidden_state
    close(found[mask], padded(**inputs).last_hidden_state[mask])
    assert not found[1].any()
    nothing = unpadded(**{name: value[1:2] for name, value in inputs.items()})
    assert not nothing.last_hidden_state.any()
    assert nothing.pooled.isfinite().all()


def test_without_a_mask_there_is_no_padding_to_leave_out() -> None:
    padded, unpadded = both(ENCODERS["bert"])
    ids = batch(MASKS["full"])["input_ids"]
    assert torch.equal(unpadded(ids).last_hidden_state, padded(ids).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.long, torch.float32, torch.int8])
def test_a_mask_of_any_dtype_says_the_same(dtype: torch.dtype) -> None:
    _, unpadded = both(ENCODERS["bert"])
    inputs = batch(MASKS["right"])
    found = unpadded(**{**inputs, "attention_mask": inputs["attention_mask"].to(dtype)}).last_hidden_state
    assert torch.equal(found, unpadded(**inputs).last_hidden_state)


def test_dropout_falls_on_tokens_and_on_probabilities() -> None:
    _, model = both(lambda: Bert(config=BertConfig(**SIZES, hidden_dropout_prob=0.0)))
    inputs = batch(MASKS["right"])
    still = model(**inputs).last_hidden_state
    model.train()
    torch.manual_seed(1)
    one = model(**inputs).last_hidden_state
    torch.manual_seed(1)
    assert torch.equal(one, model(**inputs).last_hidden_state)
    assert not torch.allclose(one, still)


def test_it_is_off_until_it_is_set_and_is_no_part_of_the_weights() -> None:
    padded, unpadded = both(ENCODERS["bert"])
    assert not padded.unpadded
    assert unpadded.state_dict().keys() == padded.state_dict().keys()


def test_maps_of_attention_are_refused() -> None:
    _, unpadded = both(ENCODERS["bert"])
    with pytest.raises(ValueError, match="output_attentions shows rows with their padding; expected unpadded = False"):
        unpadded(**batch(MASKS["right"]), output_attentions=True)


def test_a_mask_of_another_shape_and_a_row_too_long_are_refused_as_with_padding() -> None:
    _, unpadded = both(ENCODERS["bert"])
    ids = torch.ones(2, 21, dtype=torch.long)
    with pytest.raises(ValueError, match="input_ids has 21 tokens a row; max_position_embeddings allows 20"):
        unpadded(ids, ids)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 4\]; expected that of input_ids, \[2, 5\]"):
        unpadded(ids[:, :5], ids[:, :4])


@pytest.mark.parametrize("kind", MASKS)
def test_what_is_packed_comes_back_to_its_place(kind: str) -> None:
    mask = MASKS[kind]
    rows = Rows(mask)
    values = torch.randn(*mask.shape, 4, generator=torch.Generator().manual_seed(2))
    packed = rows.pack(values)
    assert packed.shape == (1, int(mask.sum()), 4)
    assert torch.equal(rows.unpack(packed), values * mask[..., None])
    assert sum(count * length for count, length in rows.groups) == int(mask.sum())
    lengths_of = sorted(mask.sum(1).tolist())
    assert [length for count, length in rows.groups for _ in range(count)] == lengths_of


def test_the_groups_are_views_in_which_every_row_is_whole() -> None:
    mask = MASKS["equal"]
    rows = Rows(mask)
    number = torch.arange(5)[:, None].expand(5, 11)
    packed = rows.pack(torch.stack([number, torch.arange(11).expand(5, 11)], dim=-1))
    short, long = rows.split(packed)
    assert (short.shape, long.shape) == ((3, 5, 2), (2, 9, 2))
    assert short.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    assert torch.equal(short[..., 0], torch.tensor([[0], [2], [3]]).expand(3, 5))
    assert torch.equal(long[..., 1], torch.arange(9).expand(2, 9))


class Operations(TorchDispatchMode):
    """Counts what is executed: each operator that computes or copies; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # Any: as torch has it
        if not func.is_view:
            self.counted[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_full_batch_takes_the_operations_of_the_reference() -> None:
    """The same products, kernels and copies, as often: it cannot be slower than that, nor than with padding."""
    config = transformers.BertConfig(**SIZES)
    padded, unpadded = both(lambda: Bert(config=BertConfig(**SIZES)))
    inputs = batch(MASKS["full"])
    counts = {}
    for name, model in {"reference": transformers.BertModel(config), "padded": padded, "unpadded": unpadded}.items():
        module: nn.Module = model.float().train(False)
        with torch.no_grad(), Operations() as operations:
            module(**inputs)
        counts[name] = operations.counted
    mine = counts["unpadded"] - Counter(["arange"])  # the positions, which the reference keeps in a buffer
    assert mine == counts["reference"]
    assert mine["addmm"] == 6 * SIZES["num_hidden_layers"] + 1
    assert counts["unpadded"].total() <= counts["padded"].total()

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from porting.models.language_model import LanguageModel, LanguageModelConfig
from tests.models.twins import distance, realistic

WORDS, WIDTH, LONGEST = 31, 24, 17
TINY: dict[str, Any] = {  # Any: fields of several types
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
}

# transformers' spelling -> ours; the table engine is not asked, so that neither can hide the other's mistake.
RENAMED = (
    (r"^transformer\.h\.", "encoder.layers."),
    (r"attn\.c_attn\.", "self_attn.in_proj_"),
    (r"attn\.c_proj", "self_attn.out_proj"),
    (r"mlp\.c_fc", "linear1"),
    (r"mlp\.c_proj", "linear2"),
    (r"ln_([12])", r"norm\1"),
    (r"^transformer\.tokens_embed", "embedding"),
    (r"^transformer\.positions_embed.weight", "positions.table"),
)


def twins() -> tuple[nn.Module, LanguageModel]:
    """OpenAI GPT of transformers and ours with the same weights, drawn at realistic scale, float64, in eval mode."""
    config = transformers.OpenAIGPTConfig(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=LONGEST, layer_norm_epsilon=1e-5
    )
    theirs: nn.Module = transformers.OpenAIGPTLMHeadModel(config)
    theirs.to(torch.float64).eval()
    realistic(theirs, seed=3)
    weights: dict[str, Tensor] = {}
    for name, tensor in theirs.named_parameters():
        ours = name
        for pattern, spelling in RENAMED:
            ours = re.sub(pattern, spelling, ours)
        conv = re.search(r"c_\w+\.weight", name)
        weights[ours] = tensor.detach().T if conv else tensor.detach()
    weights["embedding.weight"] = weights["embedding.weight"] / math.sqrt(WIDTH)
    weights["positions.table"] = weights["positions.table"][:, None]
    model = LanguageModel(config=LanguageModelConfig(**TINY, hidden_act="gelu_new", tie_word_embeddings=True))
    model.to(torch.float64).eval().load_state_dict(weights, strict=True)
    return theirs, model


def batch() -> tuple[Tensor, Tensor]:
    """Ids [17 4] and their mask: columns of 17, 11, 5 and 1 tokens."""
    ids = torch.randint(0, WORDS, (LONGEST, 4), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(LONGEST)[:, None] < torch.tensor([17, 11, 5, 1])
    return ids, mask


@pytest.fixture
def model() -> LanguageModel:
    made = LanguageModel(config=LanguageModelConfig(**TINY)).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("padded", [True, False])
def test_it_computes_what_openai_gpt_computes(padded: bool) -> None:
    theirs, ours = twins()
    ids, mask = batch()
    with torch.no_grad():
        expected = theirs(ids.T, attention_mask=mask.T.long() if padded else None).logits.transpose(0, 1)
        assert distance(ours(ids, mask if padded else None), expected) <= 1e-13
        assert distance(ours(ids[:6], mask[:6] if padded else None), expected[:6]) <= 1e-13


def test_it_computes_the_same_whether_gradients_are_on_or_not() -> None:
    """PyTorch has another way through its layers for inference, in which a tanh GELU would be an exact one."""
    _, ours = twins()
    ids, mask = batch()
    with torch.inference_mode():
        found = ours(ids, mask)
    assert distance(found, ours(ids, mask)) <= 1e-13


def test_a_mask_is_read_alike_in_every_dtype(model: LanguageModel) -> None:
    ids, mask = batch()
    with torch.no_grad():
        expected = model(ids, mask)
        for dtype in (torch.long, torch.float32, torch.uint8):
            assert torch.equal(model(ids, mask.to(dtype)), expected)
        assert not torch.allclose(model(ids), expected)


def test_no_token_sees_what_follows_it_or_what_is_padding(model: LanguageModel) -> None:
    ids, _ = batch()
    early = torch.arange(LONGEST)[:, None] >= torch.tensor([0, 4, 9, 16])  # padded on the left, where it is seen
    with torch.no_grad():
        before = model(ids, early)
        later = torch.cat([ids[:9], (ids[9:] + 3) % WORDS])
        assert torch.equal(model(later, early)[:9], before[:9])
        assert not torch.equal(model(later, early)[9:], before[9:])
        other = torch.where(early, ids, 7)
        assert distance(model(other, early)[early], before[early]) <= 1e-14
        assert distance(model(other)[early], before[early]) > 1e-3
        assert torch.equal(before[0], model(ids)[0])  # padding or not, the first token sees itself
    assert bool(before.isfinite().all())


def test_a_text_of_padding_alone_gives_numbers(model: LanguageModel) -> None:
    ids, mask = batch()
    mask[:, 2] = False
    for dtype in (torch.float64, torch.float32, torch.float16):
        with torch.no_grad():
            assert bool(model.to(dtype)(ids, mask).isfinite().all())


def test_positions_alternate_sines_and_cosines_in_a_buffer(model: LanguageModel) -> None:
    table = LanguageModel(config=LanguageModelConfig(**TINY)).positions.table
    assert table.shape == (LONGEST, 1, WIDTH)
    for place in (0, 1, 5, 16):
        for k in range(WIDTH // 2):
            angle = place / 10000 ** (2 * k / WIDTH)
            assert table[place, 0, 2 * k].item() == pytest.approx(math.sin(angle), abs=1e-7)
            assert table[place, 0, 2 * k + 1].item() == pytest.approx(math.cos(angle), abs=1e-7)
    assert "positions.table" in model.state_dict()
    assert "positions.table" not in dict(model.named_parameters())


def test_embeddings_are_multiplied_by_the_root_of_the_width(model: LanguageModel) -> None:
    ids, _ = batch()
    seen: list[Tensor] = []
    model.positions.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    model(ids)
    assert torch.equal(seen[0], model.embedding.weight[ids] * math.sqrt(WIDTH))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("final_norm", [True, False])
def test_norms_stand_where_the_config_puts_them(norm_first: bool, final_norm: bool) -> None:
    fields = {**TINY, "norm_first": norm_first, "final_norm": final_norm, "layer_norm_eps": 0.01, "dropout": 0.0}
    made = LanguageModel(config=LanguageModelConfig(**fields, intermediate_size=10))
    states: dict[str, Tensor] = {}
    for name in ("encoder.layers.1", "encoder.layers.1.self_attn", "encoder.layers.1.linear2", "encoder"):
        made.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: states.update({f"{name} in": args[0], name: out})
        )
    made(batch()[0])

    def norm(one: Tensor) -> Tensor:
        return nn.functional.layer_norm(one, (WIDTH,), eps=0.01)

    attended, changed = states["encoder.layers.1.self_attn"][0], states["encoder.layers.1.linear2"]
    hidden = states["encoder.layers.1 in"]
    if norm_first:
        expected = hidden + attended + changed
        torch.testing.assert_close(states["encoder.layers.1.self_attn in"], norm(hidden))
    else:
        expected = norm(norm(hidden + attended) + changed)
    torch.testing.assert_close(states["encoder.layers.1"], expected)
    torch.testing.assert_close(states["encoder"], norm(expected) if final_norm else expected)


def test_a_head_of_its_own_has_a_bias_and_a_tied_one_no_weights(model: LanguageModel) -> None:
    ids, _ = batch()
    assert {"head.weight", "head.bias"} <= model.state_dict().keys()
    seen: list[Tensor] = []
    model.encoder.register_forward_hook(lambda _, __, out: seen.append(out))
    logits = model(ids)
    assert model.head is not None
    torch.testing.assert_close(logits, seen[0] @ model.head.weight.T + model.head.bias)
    _, tied = twins()
    assert not [name for name in tied.state_dict() if name.startswith("head")]


def test_what_does_not_fit_is_refused(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="input_ids has 18 tokens a column; max_position_embeddings allows 17"):
        model(torch.ones(18, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 5\]; expected that of input_ids, \[5, 2\]"):
        model(torch.ones(5, 2, dtype=torch.long), torch.ones(2, 5))


def test_every_fault_of_a_config_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="LanguageModelConfig has 4 faults") as caught:
        LanguageModelConfig(vocab_size=0, num_attention_heads=3, intermediate_size=-1, dropout=1.5)
    assert str(caught.value).splitlines()[1:] == [
        "  vocab_size=0: expected a whole number, 1 or more",
        "  intermediate_size=-1: expected a whole number, 1 or more",
        "  hidden_size=200: expected a multiple of num_attention_heads=3",
        "  dropout=1.5: expected a probability, from 0 to 1",
    ]


def test_a_new_model_is_drawn_layer_by_layer() -> None:
    fields: dict[str, Any] = {"vocab_size": 400, "hidden_size": 100, "initializer_range": 0.03}
    own, tied = (LanguageModel(config=LanguageModelConfig(**fields, tie_word_embeddings=one)) for one in (False, True))
    first, second = (own.get_parameter(f"encoder.layers.{i}.self_attn.in_proj_weight") for i in (0, 1))
    assert not torch.equal(first, second)
    assert first.std().item() == pytest.approx(0.03, rel=0.03)
    assert own.embedding.weight.std().item() == pytest.approx(0.03, rel=0.03)
    assert tied.embedding.weight.std().item() == pytest.approx(0.003, rel=0.03)
    assert own.get_parameter("encoder.layers.0.linear1.weight").shape == (400, 100)
    assert all(not one.any() for name, one in own.named_parameters() if name.endswith("bias"))
    assert all(bool((one == 1).all()) for name, one in own.named_parameters() if re.search(r"norm\d\.weight", name))
    with torch.device("meta"):
        assert LanguageModel(config=LanguageModelConfig(**TINY)).embedding.weight.is_meta

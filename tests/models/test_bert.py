"""The encoder against transformers' BertModel, and by itself: mask, dropout, dtypes, compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from porting.models import Bert, BertConfig, bert
from tests.models.twins import KINDS, TINY, Twins, distance, inputs, main_outputs, twins


def test_the_weights_of_these_tests_do_not_leave_attention_flat() -> None:
    pair = twins("BertModel")
    maps = pair.ours(**inputs("no mask"), output_attentions=True).attentions
    for probabilities in maps:
        assert probabilities.max(dim=-1).values.mean() > 2 / probabilities.shape[-1]


# --------------------------------------------------------------------------- against transformers, in float64


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_hidden_state_and_attention_map_is_that_of_transformers(kind: str, seed: int) -> None:
    theirs, ours = twins("BertModel", seed=seed)
    expected = theirs(**inputs(kind), output_hidden_states=True, output_attentions=True)
    found = ours(**inputs(kind), output_hidden_states=True, output_attentions=True)
    assert len(found.hidden_states) == 1 + TINY["num_hidden_layers"]
    assert len(found.attentions) == TINY["num_hidden_layers"]
    for ours_here, theirs_here in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert distance(ours_here, theirs_here) <= 1e-12
    for ours_here, theirs_here in zip(found.attentions, expected.attentions, strict=True):
        assert distance(ours_here, theirs_here) <= 1e-12
    assert distance(found.last_hidden_state, expected.last_hidden_state) <= 1e-12
    assert distance(found.pooled, expected.pooler_output) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_kernel_agrees_with_transformers_and_with_attention_written_out(kind: str) -> None:
    theirs, ours = twins("BertModel", attention="sdpa")
    expected, fused = main_outputs(theirs(**inputs(kind))), main_outputs(ours(**inputs(kind)))
    written_out = main_outputs(ours(**inputs(kind), output_attentions=True))
    for name in expected:
        assert distance(fused[name], expected[name]) <= 1e-12
        if name in fused and name in written_out:
            assert distance(written_out[name], fused[name]) <= 1e-12


def test_given_position_ids_are_used_row_by_row() -> None:
    theirs, ours = twins("BertModel")
    shuffled = torch.stack([torch.randperm(13) + offset for offset in (0, 2, 4, 6)])
    ids = inputs("short")
    moved = ours(**ids, position_ids=shuffled).last_hidden_state
    assert distance(moved, theirs(**ids, position_ids=shuffled).last_hidden_state) <= 1e-12
    assert distance(moved, ours(**ids).last_hidden_state) > 1e-2


def record(module: nn.Module, probes: dict[str, str]) -> dict[str, Tensor]:
    """What the named submodules return, by the name on the right, filled in by the next forward pass."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            seen[name] = output if isinstance(output, Tensor) else output[0]

        return hook

    for path, name in probes.items():
        module.get_submodule(path).register_forward_hook(keep(name))
    return seen


def test_every_activation_that_a_proof_compares_is_the_output_of_a_module() -> None:
    theirs, ours = twins("BertModel")
    here = {"embeddings": "embeddings", "pooler": "pooler"}
    there = {"embeddings": "embeddings", "pooler": "pooler"}
    for i in range(3):
        for part in ("query", "key", "value"):
            here[f"layers.{i}.attention.{part}"] = there[f"encoder.layer.{i}.attention.self.{part}"] = f"{i} {part}"
        here[f"layers.{i}.attention.core"] = there[f"encoder.layer.{i}.attention.self"] = f"{i} context"
        here[f"layers.{i}.attention_norm"] = there[f"encoder.layer.{i}.attention"] = f"{i} attention output"
        here[f"layers.{i}.activation"] = there[f"encoder.layer.{i}.intermediate"] = f"{i} intermediate"
        here[f"layers.{i}.output_norm"] = there[f"encoder.layer.{i}"] = f"{i} output"
    found, expected = record(ours, here), record(theirs, there)
    ours(**inputs())
    theirs(**inputs())
    assert found.keys() == expected.keys() == set(here.values())
    for name in expected:
        assert distance(found[name], expected[name]) <= 1e-12, name


# ------------------------------------------------------------------------------- each config field, honoured


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 50},
        {"hidden_size": 36},
        {"num_hidden_layers": 1},
        {"num_attention_heads": 8},
        {"intermediate_size": 17},
        {"max_position_embeddings": 31},
        {"type_vocab_size": 3},
        {"layer_norm_eps": 1e-1},
        {"hidden_act": "gelu_new"},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"hidden_act": "relu"},
        {"hidden_act": "silu"},
        {"hidden_act": "swish"},
        {"hidden_act": "tanh"},
    ],
    ids=lambda changes: " ".join(map(str, *changes.items())),
)
def test_a_config_field_means_what_it_means_to_transformers(changes: dict[str, Any]) -> None:
    theirs, ours = twins("BertModel", **changes)
    ids = inputs(types=3 if "type_vocab_size" in changes else 2)
    expected = theirs(**ids).last_hidden_state
    assert distance(ours(**ids).last_hidden_state, expected) <= 1e-12


@pytest.mark.parametrize(
    "changes",
    [{"num_attention_heads": 8}, {"layer_norm_eps": 1e-5}, {"hidden_act": "gelu_new"}],
    ids=lambda changes: " ".join(map(str, *changes.items())),
)
def test_a_config_field_without_weights_shows_in_the_output(changes: dict[str, Any]) -> None:
    """The same weights under another config: were the field ignored, nothing would change."""
    _, ours = twins("BertModel")
    _, other = twins("BertModel", **changes)
    assert distance(other(**inputs()).last_hidden_state, ours(**inputs()).last_hidden_state) > 1e-6


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, True),
        ({"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.0}, False),
        ({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.2}, False),
    ],
    ids=["none", "hidden", "attention"],
)
@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
def test_dropout_is_on_in_training_alone(fields: dict[str, Any], same: bool, written_out: bool) -> None:
    _, ours = twins("BertModel", **fields)
    evaluated = ours(**inputs(), output_attentions=written_out).last_hidden_state
    again = ours(**inputs(), output_attentions=written_out).last_hidden_state
    trained = ours.train()(**inputs(), output_attentions=written_out).last_hidden_state
    assert torch.equal(evaluated, again)
    assert (distance(trained, evaluated) < 1e-12) is same


@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
def test_dropout_of_everything_leaves_what_is_not_dropped(written_out: bool) -> None:
    """With probability 1 each place shows itself: embeddings are 0, both residual branches vanish."""
    hidden = torch.randn(2, 5, TINY["hidden_size"], dtype=torch.float64)
    ours = twins("BertModel", hidden_dropout_prob=1.0).ours.train()
    layer = ours.get_submodule("layers.0")
    assert isinstance(layer, bert.BertLayer)
    without_branches = layer.output_norm(layer.attention_norm(hidden))
    assert distance(layer(hidden, output_attentions=written_out)[0], without_branches) < 1e-12
    assert ours.get_submodule("embeddings")(inputs()["input_ids"]).eq(0).all()

    ours = twins("BertModel", attention_probs_dropout_prob=1.0).ours.train()
    attended, _ = ours.get_submodule("layers.0.attention")(hidden, output_attentions=written_out)
    assert torch.equal(attended, ours.get_parameter("layers.0.attention.output.bias").expand_as(attended))


def test_dropout_is_seeded_and_falls_where_it_falls_in_transformers() -> None:
    theirs, ours = twins("BertModel", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3)
    theirs.train()
    ours.train()

    def run(model: nn.Module, seed: int) -> Tensor:
        torch.manual_seed(seed)
        hidden: Tensor = model(**inputs(), output_attentions=True).last_hidden_state
        return hidden

    assert torch.equal(run(ours, 3), run(ours, 3))
    assert distance(run(ours, 4), run(ours, 3)) > 1e-2
    assert distance(run(ours, 3), run(theirs, 3)) <= 1e-12


def test_the_padding_word_gets_no_gradient_from_the_input_and_any_word_can_be_it() -> None:
    ids = {**inputs(), "attention_mask": torch.ones_like(inputs()["input_ids"])}
    for pad in (0, 5, None):
        _, ours = twins("BertModel", pad_token_id=pad)
        torch.autograd.backward(ours(**ids).last_hidden_state.pow(3).sum())
        gradient = ours.get_parameter("embeddings.word.weight").grad
        assert gradient is not None
        assert [word for word in (0, 5) if not gradient[word].any()] == ([] if pad is None else [pad])


# -------------------------------------------------------------------------------------------------- the mask


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
def test_a_mask_of_any_dtype_hides_padding_completely(dtype: torch.dtype, written_out: bool) -> None:
    _, ours = twins("BertModel")
    ids = inputs()
    keep = ids["attention_mask"].bool()
    masked = {**ids, "attention_mask": keep.to(dtype)}
    found = ours(**masked, output_attentions=written_out)
    scribbled = {**masked, "input_ids": ids["input_ids"].where(keep, 7)}
    assert torch.equal(ours(**scribbled, output_attentions=written_out).last_hidden_state[keep], found[0][keep])
    for row in range(4):  # each row alone, without its padding and without a mask
        alone = {name: ids[name][row : row + 1, keep[row]] for name in ("input_ids", "token_type_ids")}
        assert distance(ours(**alone).last_hidden_state[0], found.last_hidden_state[row, keep[row]]) < 1e-12


def test_probabilities_of_padded_keys_are_exact_zeros() -> None:
    _, ours = twins("BertModel")
    padded = inputs()["attention_mask"].eq(0)[:, None, None, :]
    for probabilities in ours(**inputs(), output_attentions=True).attentions:
        assert probabilities.masked_select(padded.expand_as(probabilities)).eq(0).all()
        torch.testing.assert_close(probabilities.sum(-1), torch.ones_like(probabilities[..., 0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
def test_a_row_of_nothing_but_padding_gives_no_nan(dtype: torch.dtype, written_out: bool) -> None:
    """With scores as low as these the lowest float16 would overflow to -inf, and the softmax to NaN."""
    core = bert.ScaledDotProductAttention(config=BertConfig(hidden_size=8, num_attention_heads=2)).eval()
    query = torch.full((1, 3, 8), 8.0, dtype=dtype)
    added = bert.attention_bias(torch.zeros(1, 3), dtype=dtype)
    assert added.isfinite().all()
    value = torch.randn(1, 3, 8).to(dtype)
    context, probabilities = core(query, -query, value, added, output_attentions=written_out)
    torch.testing.assert_close(context, value.mean(dim=1, keepdim=True).expand_as(context), atol=1e-2, rtol=1e-2)
    if probabilities is not None:
        torch.testing.assert_close(probabilities.sum(-1), torch.ones_like(probabilities[..., 0]))


def test_the_mask_is_added_to_scores_that_stay_near_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """``1.0 - mask * -10000.0`` says the same in real numbers, but it lifts the kept scores to 10001.

    There a float32 has three digits after the point left, and attention is the softmax of what they say.
    """

    def misplaced_parentheses(attention_mask: Tensor, *, dtype: torch.dtype) -> Tensor:
        return (1.0 - attention_mask[:, None, None, :].to(dtype) * -10000.0).to(dtype)

    _, ours = twins("BertModel")
    reference = ours(**inputs()).last_hidden_state
    single = copy.deepcopy(ours).float()
    good = distance(single(**inputs()).last_hidden_state.double(), reference)
    with monkeypatch.context() as planted:
        planted.setattr(bert, "attention_bias", misplaced_parentheses)
        meaning = distance(ours(**inputs()).last_hidden_state, reference)
        bad = distance(single(**inputs()).last_hidden_state.double(), reference)
    assert meaning < 1e-9  # the same function, up to the rounding of float64 near 10001
    assert good < 5e-6
    assert bad > 28 * good


def test_without_a_mask_the_kernel_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:  # Any: whatever the kernel takes
        seen.append(options["attn_mask"])
        return kernel(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    _, ours = twins("BertModel")
    ours(**inputs("no mask"))
    assert seen == [None] * TINY["num_hidden_layers"]


# ----------------------------------------------------------------------------- dtypes, devices, compilation


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("written_out", [False, True], ids=["fused", "written out"])
def test_in_a_narrower_dtype_only_rounding_differs(dtype: torch.dtype, written_out: bool) -> None:
    """Both in the narrow dtype, measured against float64: ours may not stray further than theirs, times 4."""
    pair = twins("BertModel", attention="eager" if written_out else "sdpa")
    reference = pair.ours(**inputs()).last_hidden_state
    narrow = Twins(copy.deepcopy(pair.theirs), copy.deepcopy(pair.ours)).to(dtype)
    ours = narrow.ours(**inputs(), output_attentions=written_out).last_hidden_state
    theirs = narrow.theirs(**inputs()).last_hidden_state
    assert ours.dtype == dtype
    assert distance(ours.double(), reference) <= 4 * distance(theirs.double(), reference)


@pytest.mark.parametrize("kind", ["padded", "no mask"])
@pytest.mark.parametrize("maps", [False, True], ids=["fused", "written out"])
def test_it_compiles_as_one_graph(kind: str, maps: bool) -> None:
    _, ours = twins("BertModel", num_hidden_layers=1)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    found = compiled(**inputs(kind), output_hidden_states=True, output_attentions=maps)
    expected = ours(**inputs(kind), output_hidden_states=True, output_attentions=maps)
    assert distance(found.last_hidden_state, expected.last_hidden_state) <= 1e-12
    assert distance(found.pooled, expected.pooled) <= 1e-12


def test_constructing_makes_parameters_and_no_other_tensor() -> None:
    """So that on the meta device nothing is lost: what a loader does not hand over does not exist."""
    with torch.device("meta"):
        model = Bert(config=BertConfig(**TINY))
    assert not list(model.buffers())
    assert all(parameter.is_meta for parameter in model.parameters())
    for module in model.modules():
        assert not [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    _, ours = twins("BertModel")
    model.load_state_dict(ours.state_dict(), assign=True)
    assert torch.equal(model.eval()(**inputs())[0], ours(**inputs())[0])


def test_a_deep_copy_and_a_state_dict_are_the_model() -> None:
    _, ours = twins("BertModel")
    expected = ours(**inputs()).last_hidden_state
    copied = copy.deepcopy(ours)
    fresh = Bert(config=BertConfig(**TINY)).double().eval()
    assert distance(fresh(**inputs()).last_hidden_state, expected) > 1e-2
    fresh.load_state_dict(ours.state_dict())
    for parameter in ours.parameters():
        parameter.data.zero_()
    assert torch.equal(copied(**inputs()).last_hidden_state, expected)
    assert torch.equal(fresh(**inputs()).last_hidden_state, expected)


# ------------------------------------------------------------------------------------------- initialisation


@pytest.mark.parametrize("std", [0.02, 0.3])
def test_fresh_weights_are_drawn_from_a_cut_normal_distribution(std: float) -> None:
    fields = {**TINY, "vocab_size": 500, "hidden_size": 48, "intermediate_size": 96, "initializer_range": std}
    model = Bert(config=BertConfig(**fields))
    for _ in range(2):
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                assert parameter.eq(0).all(), name
            elif "norm" in name:
                assert parameter.eq(1).all(), name
            else:
                assert parameter.abs().max() <= 2 * std, name
                assert parameter.mean().abs() < 0.2 * std, name
        words = model.embeddings.word.weight
        assert words[0].eq(0).all()  # the padding word
        # cut at two standard deviations, 0.8796 of the spread is left; uncut it would be 1
        assert abs(words[1:].std() / std - 0.8796) < 0.02
        for parameter in model.parameters():  # and again, over whatever was there before
            parameter.data.fill_(torch.pi)
        bert.initialize(model, std=std)


def test_initialisation_follows_the_seed() -> None:
    def words(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return Bert(config=BertConfig(**TINY)).embeddings.word.weight

    assert torch.equal(words(0), words(0))
    assert not torch.equal(words(0), words(1))


# ------------------------------------------------------------------------------------------------ wrong use


def test_a_row_longer_than_the_position_table_is_refused() -> None:
    _, ours = twins("BertModel")
    with pytest.raises(ValueError, match="input_ids has 20 tokens a row; max_position_embeddings allows 19"):
        ours(torch.ones(1, 20, dtype=torch.long))


def test_a_mask_of_another_shape_is_refused() -> None:
    _, ours = twins("BertModel")
    ids = torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(
        ValueError, match=r"attention_mask has shape \[2, 1, 1, 5\]; expected that of input_ids, \[2, 5\]"
    ):
        ours(ids, torch.ones(2, 1, 1, 5))

"""ModernBERT and its table: against transformers without its float32, with faults planted, and by itself.

The reference computes two things in float32 whatever its weights are: it turns queries and keys, and it takes the
softmax.  ``verify`` holds what lies behind to the rounding of float32; here the two casts are taken out of the
reference, and then all of it agrees to float64.
"""

from __future__ import annotations

import dataclasses
import filecmp
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.modernbert import modeling_modernbert

import porting
from porting.errors import PortingError
from porting.models import modern_bert
from porting.models.modern_bert import ModernBert, rotate, rotation, window_bias
from porting.models.modern_bert_config import ModernBertConfig
from porting.models.modern_bert_heads import ModernBertForMaskedLM, ModernBertForSequenceClassification
from porting.tables import find_table
from porting.tracing.measure import MEANING
from porting.verification import verify
from tests.families.pairs import MODERN_BERT
from tests.families.ported import draw
from tests.verification.flags import unseen_but_arguments

pytestmark = pytest.mark.few(2)

TABLE = find_table("modern_bert", {})
HEADS = [one.name for one in TABLE.architectures]
NARROW: dict[str, object] = {**MODERN_BERT, "local_attention": 8}
SIZES: dict[str, Any] = {  # Any: fields of several types
    "vocab_size": 30,
    "hidden_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 10,
    "local_attention": 4,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
IDS = torch.tensor([[1, 7, 9, 2, 4, 11, 5, 3], [1, 5, 8, 2, 6, 0, 0, 0]])
MASK = (IDS != 0).long()


def checkpoint(directory: Path, architecture: str = "ModernBertForMaskedLM", **changes: object) -> Path:
    """A small checkpoint with every parameter drawn."""
    kind: Any = getattr(transformers, architecture)  # one of transformers' classes
    labels = {"num_labels": 2} if "QuestionAnswering" in architecture else {}
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**NARROW, **labels, **changes}))
    draw(model)
    model.save_pretrained(directory)
    return directory


def turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half: Any = modeling_modernbert.rotate_half  # it has no types
    return query * cos + half(query) * sin, key * cos + half(key) * sin


def attended(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: object
) -> tuple[Tensor, Tensor]:
    scores = query @ key.transpose(2, 3) * scaling
    weights = torch.nn.functional.softmax(scores if mask is None else scores + mask, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference without its two casts to float32."""
    monkeypatch.setattr(modeling_modernbert, "apply_rotary_pos_emb", turned)
    monkeypatch.setattr(modeling_modernbert, "eager_attention_forward", attended)


# ------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.few(1)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("architecture", "pooling"),
    [
        *((head, "cls") for head in HEADS),
        *((head, "mean") for head in HEADS if head.endswith(("SequenceClassification", "MultipleChoice"))),
    ],
)
def test_without_the_reference_s_float32_every_probe_agrees(architecture: str, pooling: str, tmp_path: Path) -> None:
    """Rows of up to 80 tokens, five layers, and windows so narrow that padding sees nothing but padding."""
    report = verify(checkpoint(tmp_path, architecture, classifier_pooling=pooling), trials=False)
    assert report.faithful, str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= MEANING
    assert (report.shown.copy, report.shown.nothing, report.skipped) == ((), (), ())
    assert unseen_but_arguments(report) == ()
    target = {one.name: one.target for one in TABLE.architectures}[architecture]
    assert report.port == target.replace(":", ".")


@pytest.mark.slow
def test_with_it_every_probe_agrees_since_verify_leaves_its_casts_out(tmp_path: Path) -> None:
    report = verify(checkpoint(tmp_path, local_attention=48), gradients=True, steps=1)
    assert report.faithful, str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= MEANING
    casts = "the reference casts to less than float64 in model.layers.{0,1,2,3}.attn (aten._to_copy): the float64 run"
    assert any(note.startswith(casts) for note in report.notes), report.notes
    assert report.learned is not None
    assert max(gradient.meaning for gradient in report.learned.gradients) < 1e-12


@pytest.mark.parametrize("architecture", HEADS)
def test_every_head_goes_back(architecture: str, tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", architecture)
    ours = porting.load(source)
    porting.export(ours, None, tmp_path / "same")
    for name in ("config.json", "model.safetensors"):
        assert filecmp.cmp(source / name, tmp_path / "same" / name, shallow=False), name
    porting.export(ours, "modern_bert", tmp_path / "anew", anew=True, architecture=architecture)
    kind: Any = getattr(transformers, architecture)  # one of transformers' classes
    again, info = kind.from_pretrained(tmp_path / "anew", output_loading_info=True)
    assert {key: found for key, found in info.items() if found} == {}
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("source", "anew"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids, mask = (IDS[None], MASK[None]) if "Choice" in architecture else (IDS, MASK)
    with torch.no_grad():
        meant = kind.from_pretrained(source)(input_ids=ids, attention_mask=mask)[0]
        torch.testing.assert_close(again(input_ids=ids, attention_mask=mask)[0], meant)
        torch.testing.assert_close(ours(ids, mask)[0], meant, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_a_config_from_before_version_5(tmp_path: Path) -> None:
    """The published models say every how many layers and two bases; some write the tied decoder out."""
    source = checkpoint(tmp_path / "source", layer_types=None, global_attn_every_n_layers=2)
    content = json.loads((source / "config.json").read_text())
    del content["layer_types"], content["rope_parameters"]
    old = {"global_attn_every_n_layers": 2, "global_rope_theta": 5000.0, "local_rope_theta": 70.0}
    (source / "config.json").write_text(json.dumps({**content, **old}))
    report = verify(source)
    assert report.faithful, str(report)
    assert max(probe.meaning.worst for probe in report.probes) <= MEANING
    module = porting.load(source)
    porting.export(module, None, tmp_path / "same")
    assert filecmp.cmp(source / "config.json", tmp_path / "same" / "config.json", shallow=False)


def test_a_base_is_read_from_inside_a_field_and_written_back_there(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    content = json.loads((source / "config.json").read_text())
    content["rope_parameters"]["full_attention"]["rope_theta"] = 123.0
    (source / "config.json").write_text(json.dumps(content))
    module = porting.load(source)
    bert = module.get_submodule("bert")
    assert isinstance(bert, ModernBert)
    assert bert.config.global_rope_theta == 123.0
    config = dataclasses.replace(bert.config, global_rope_theta=321.0)
    porting.export(module, None, tmp_path / "changed", config=config)
    written = json.loads((tmp_path / "changed" / "config.json").read_text())
    content["rope_parameters"]["full_attention"]["rope_theta"] = 321.0
    assert written["rope_parameters"] == content["rope_parameters"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("norm_bias", True),
        ("classifier_bias", True),
        ("decoder_bias", False),
        ("tie_word_embeddings", False),
        ("hidden_activation", "gelu_fast"),
    ],
)
def test_what_the_room_cannot_represent_is_refused_by_name(field: str, value: object, tmp_path: Path) -> None:
    path = checkpoint(tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(PortingError) as caught:
        porting.load(tmp_path)
    assert f"{field} = {value!r}" in str(caught.value) or f"{field}={value!r}" in str(caught.value)


def test_a_stretched_rotation_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path) / "config.json"
    content = json.loads(path.read_text())
    content["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 2.0}
    path.write_text(json.dumps(content))
    with pytest.raises(PortingError, match=r"rope_parameters.full_attention.rope_type = 'linear'"):
        porting.load(tmp_path)


# ------------------------------------------------------------------------------------------------------ planted faults


def wider(model: nn.Module) -> None:
    bert = model.get_submodule("bert")
    assert isinstance(bert, ModernBert)
    bert.config = dataclasses.replace(bert.config, local_attention=bert.config.local_attention + 2)


def swapped_thetas(model: nn.Module) -> None:
    bert = model.get_submodule("bert")
    assert isinstance(bert, ModernBert)
    slow, fast = bert.config.global_rope_theta, bert.config.local_rope_theta
    bert.config = dataclasses.replace(bert.config, global_rope_theta=fast, local_rope_theta=slow)


class SwappedHalves(nn.Linear):
    """The gate where the gated half belongs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
        return super().forward(input).roll(self.out_features // 2, dims=-1)


def swapped_halves(model: nn.Module) -> None:
    model.get_submodule("bert.layers.1.feed_forward.intermediate").__class__ = SwappedHalves


def without_last_norm(model: nn.Module) -> None:
    model.get_submodule("bert.norm").forward = lambda hidden: hidden


def norm_in_the_first_layer(model: nn.Module) -> None:
    layer = model.get_submodule("bert.layers.0")
    layer.attention_norm.forward = lambda hidden: torch.nn.functional.layer_norm(hidden, hidden.shape[-1:])  # type: ignore[union-attr]  # a layer has one


FAULTS: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "window off by one": (wider, "bert.layers.1.attention"),
    "thetas swapped": (swapped_thetas, "bert.layers.0.attention"),
    "halves of the gate swapped": (swapped_halves, "bert.layers.1.feed_forward"),
    "no last norm": (without_last_norm, "bert.norm"),
    "a norm in the first layer": (norm_in_the_first_layer, "bert.layers.0.attention_norm"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_named(fault: str, tmp_path: Path) -> None:
    """Within the bound that float32 leaves."""
    plant, place = FAULTS[fault]
    source = checkpoint(tmp_path, local_attention=48)
    model = porting.load(source)
    plant(model)
    report = verify(source, model, loaded=True, causes=False)
    assert (report.verdict, report.shown.differing) == ("different", ())
    assert report.guilty[0].port.startswith(place), str(report)


# ----------------------------------------------------------------------------------------------------------- by itself


def model(**changes: object) -> ModernBert:
    torch.manual_seed(0)
    return ModernBert(config=ModernBertConfig(**{**SIZES, **changes})).double().eval()


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "padded"])
def test_the_fused_kernel_agrees_with_attention_written_out(mask: Tensor | None) -> None:
    output = model()(IDS, mask, output_attentions=True, output_hidden_states=True)
    assert output.attentions is not None
    assert output.hidden_states is not None
    torch.testing.assert_close(model()(IDS, mask).last_hidden_state, output.last_hidden_state, rtol=0, atol=1e-12)
    assert (len(output.attentions), len(output.hidden_states)) == (4, 5)
    assert all(
        torch.allclose(attention.sum(-1), torch.ones((), dtype=attention.dtype)) for attention in output.attentions
    )


def test_a_token_sees_two_to_each_side_and_in_every_third_layer_everything() -> None:
    attentions = model()(IDS[:1], output_attentions=True).attentions
    assert attentions is not None
    places = torch.arange(8)
    near = (places[:, None] - places).abs() <= 2
    for depth, one in enumerate(attentions):
        assert torch.equal((one > 0).all(dim=1)[0], torch.ones_like(near) if depth in {0, 3} else near), depth


def test_what_stands_in_padding_is_seen_by_no_other_token() -> None:
    other = torch.where(MASK.bool(), IDS, 17)
    one, two = model()(IDS, MASK).last_hidden_state, model()(other, MASK).last_hidden_state
    torch.testing.assert_close(one[MASK.bool()], two[MASK.bool()], rtol=0, atol=1e-12)
    assert not torch.allclose(one[MASK.bool()], model()(IDS).last_hidden_state[MASK.bool()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_padding_that_sees_only_padding_gives_numbers(dtype: torch.dtype) -> None:
    long = torch.cat((IDS, torch.zeros(2, 12, dtype=torch.long)), dim=1)
    for flag in (False, True):
        found = model().to(dtype)(long, long != 0, output_attentions=flag).last_hidden_state
        assert (found.dtype, bool(found.isfinite().all())) == (dtype, True)


def test_a_score_depends_on_how_far_apart_two_tokens_are() -> None:
    """Su et al. 2021, equation 16; and on which of them is first."""
    query, key = torch.randn(2, 1, 1, 1, 6, generator=torch.Generator().manual_seed(0)).expand(2, 1, 1, 9, 6)
    turn = rotation(9, 6, theta=100.0, like=query)
    scores = (rotate(query, turn) @ rotate(key, turn).transpose(-1, -2))[0, 0]
    for far in range(-8, 9):
        along = scores.diagonal(far)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert not torch.allclose(scores[0, 3], scores[3, 0], rtol=1e-3)
    torch.testing.assert_close(scores[0, 0], (query[0, 0, 0] * key[0, 0, 0]).sum())


def test_a_rotation_is_the_product_with_a_complex_number() -> None:
    states = torch.randn(1, 2, 5, 6, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(5)[:, None] * 10.0 ** -(torch.arange(3) / 3)
    meant = torch.complex(states[..., :3], states[..., 3:]) * torch.polar(torch.ones_like(angles), angles)
    found = rotate(states, rotation(5, 6, theta=10.0, like=states))
    torch.testing.assert_close(found, torch.cat((meant.real, meant.imag), dim=-1))


def test_in_half_precision_angles_stay_in_float32() -> None:
    states = torch.randn(1, 2, 300, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    turn = rotation(300, 6, theta=10.0, like=states)
    assert {one.dtype for one in turn} == {torch.float32}
    exact = rotate(states.double(), rotation(300, 6, theta=10.0, like=states.double()))
    half_unit = torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(rotate(states, turn).double(), exact, rtol=1.01 * half_unit, atol=1e-6)


def test_a_window_and_padding_together() -> None:
    bias = window_bias(4, 1, torch.tensor([0.0, 0.0, -5.0, -5.0])[None, None, None], like=torch.zeros(()))
    low = torch.finfo(torch.float32).min / 2
    assert bias[0, 0].tolist() == [[0, 0, low, low], [0, 0, -5, low], [low, 0, -5, -5], [low, low, -5, -5]]
    assert window_bias(3, 0, None, like=torch.zeros(()))[0, 0].eq(0).equal(torch.eye(3, dtype=torch.bool))


def test_the_decoder_is_the_embedding_table_and_the_biases_are_few() -> None:
    lm = ModernBertForMaskedLM(config=ModernBertConfig(**SIZES))
    classifier = ModernBertForSequenceClassification(config=ModernBertConfig(**SIZES))
    assert [name for name, _ in lm.named_parameters() if "bias" in name] == ["decoder.bias"]
    assert [name for name, _ in classifier.named_parameters() if "bias" in name] == ["classifier.dense.bias"]
    assert [name for name, one in lm.named_parameters() if 30 in one.shape] == [
        "bert.embeddings.word.weight",
        "decoder.bias",
    ]
    assert "layers.0.attention_norm.weight" not in dict(lm.bert.named_parameters())


def test_what_is_added_to_the_residual_stream_is_drawn_smaller() -> None:
    wide = ModernBert(config=ModernBertConfig(**{**SIZES, "hidden_size": 128, "intermediate_size": 200}))
    for name, one in wide.named_parameters():
        if one.ndim == 2:
            std = 0.3 / (8**0.5 if name.endswith("output.weight") else 1)
            assert one.abs().max() <= 2 * std, name
            assert one.std() > 0.8 * std, name  # cut off at two standard deviations it spreads by 0.88 of one
        else:
            assert one.eq(1).all(), name


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="input_ids has 8 tokens a row; max_position_embeddings allows 7"):
        model(max_position_embeddings=7)(IDS)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 8\]; expected that of input_ids, \[2, 8\]"):
        model()(IDS, MASK[:1])


def test_a_config_tells_all_its_faults() -> None:
    fields: dict[str, Any] = {  # Any: wrong on purpose
        "hidden_size": 9,
        "num_attention_heads": 3,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding"],
        "global_rope_theta": 0.0,
        "classifier_pooling": "max",
        "local_attention": 0,
    }
    with pytest.raises(ValueError, match="ModernBertConfig has 6 faults") as caught:
        ModernBertConfig(**fields)
    assert [line.strip().split(": ")[0].split("=")[0] for line in str(caught.value).splitlines()[1:]] == [
        "local_attention",
        "classifier_pooling",
        "global_rope_theta",
        "hidden_size",
        "layer_types has a length of 2",
        "layer_types[1]",
    ]
    with pytest.raises(ValueError, match="layer_types='full_attention': expected a list of full_attention and sliding"):
        ModernBertConfig(layer_types="full_attention")


def test_what_the_file_offers() -> None:
    assert all(hasattr(modern_bert, name) for name in modern_bert.__all__)

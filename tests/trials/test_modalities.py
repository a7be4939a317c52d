"""References that take more than tokens, or whose parts torch refuses in float64: all small, none with setup."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from porting.checkpoint import open_checkpoint
from porting.errors import VerifyError
from porting.suggesting.subjects.twin import draw_parameters
from porting.tracing.float64 import grouped_mm
from porting.tracing.running import Side
from porting.trials.inputs import Case
from porting.trials.modalities import special_places, text_fields
from porting.verification import Report, verify
from porting.verification.batches import Batches, make_batches
from porting.verification.module_checkpoint import HeldWeights
from porting.verification.reference import load_reference
from porting.verification.references import LiveReference
from porting.verification.same_names import same_names

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}


def made(kind: Any, config: Any) -> nn.Module:
    """A model of transformers with every weight and statistic drawn."""
    torch.manual_seed(0)
    model: nn.Module = kind(config).eval()
    draw_parameters(model, 1)
    return model


def batches(reference: nn.Module, longest: int = 30) -> Batches:
    held = HeldWeights(reference, "held")
    return make_batches(same_names(reference, reference), held, held.config, None, seed=0, longest=longest,
                        choices=None, reference=LiveReference.of(reference))  # fmt: skip


def proven(kind: Any, config: Any) -> tuple[nn.Module, Report]:
    reference = made(kind, config)
    report = verify(reference=reference, into=kind(config), longest=20, causes=False)
    assert report.faithful, str(report)
    return reference, report


def mixtral() -> Any:
    return transformers.MixtralConfig(**SMALL, vocab_size=50, num_key_value_heads=2, num_local_experts=4, head_dim=8)


def test_a_mixture_of_experts_is_compared_in_float64(tmp_path: Path) -> None:
    """``grouped_mm`` takes no float64: the reference has its experts written out, and a port may have them grouped."""
    made(transformers.MixtralForCausalLM, mixtral()).save_pretrained(tmp_path)  # type: ignore[operator]  # transformers'
    reference = load_reference(open_checkpoint(tmp_path), "MixtralForCausalLM", torch.float64)
    assert reference.config._experts_implementation == "eager"  # type: ignore[union-attr]  # transformers' own
    report = verify(
        reference=reference, into=transformers.MixtralForCausalLM(mixtral()), longest=20, causes=False, trials=False
    )
    assert report.faithful, str(report)
    experts = next(name for name in report.shown.activation if "experts" in name and "down" in name)
    assert report.shown.activation[experts] == 1.0


def test_grouped_products_are_those_of_torch() -> None:
    torch.manual_seed(0)
    rows, experts, ends = torch.randn(7, 8), torch.randn(3, 8, 16), torch.tensor([2, 2, 7], dtype=torch.int32)
    theirs = torch.nn.functional.grouped_mm(rows, experts, offs=ends)
    torch.testing.assert_close(grouped_mm(rows.double(), experts.double(), ends).float(), theirs)
    flat = torch.randn(8, 16)
    spans = torch.tensor([3, 8], dtype=torch.int32)
    theirs = torch.stack([rows.T[:, :3] @ flat[:3, :], rows.T[:, 3:7] @ flat[3:7, :]])
    ours = grouped_mm(rows.T.double(), flat[:7].double(), torch.tensor([3, 7]))
    torch.testing.assert_close(ours.float(), theirs)
    wide = grouped_mm(experts[:2].double().transpose(1, 2), flat.double(), spans)
    torch.testing.assert_close(wide.float(), torch.cat([experts[0].T @ flat[:, :3], experts[1].T @ flat[:, 3:8]], 1))


def resnet() -> Any:
    return transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic")


def test_statistics_of_a_batch_norm_are_weights() -> None:
    """They are seen in the activations as any weight is, and a wrong one is found where it is used."""
    reference, report = proven(transformers.ResNetForImageClassification, resnet())
    seen = report.shown.activation
    statistics = [name for name in seen if name.endswith(("running_mean", "running_var"))]
    assert len(statistics) == 2 * sum(isinstance(module, nn.BatchNorm2d) for module in reference.modules())
    assert all(seen[name] == 1.0 for name in statistics)
    assert any("picture" in case for case in report.cases)
    wrong = transformers.ResNetForImageClassification(resnet())
    wrong.load_state_dict(reference.state_dict())
    name = next(statistic for statistic in statistics if statistic.endswith("running_var"))
    wrong.get_buffer(name)[3] *= 1.01
    broken = verify(reference=reference, into=wrong, loaded=True, causes=False, dtypes=())
    assert [probe.port for probe in broken.guilty] == [name.rpartition(".")[0]]


def test_drawn_variances_are_positive() -> None:
    model = made(transformers.ResNetForImageClassification, resnet())
    found = [one for name, one in model.named_buffers() if name.endswith("running_var")]
    assert all(bool((one > 0).all()) for one in found)
    assert all(bool(one.std() > 0.05) for one in found)


@dataclass(frozen=True)
class Sizes:
    n_ctx: int = 11
    vocab_size: int = 30


class Tagger(nn.Module):
    """A model of one's own: one argument with a name of its own, and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Sizes()
        self.words, self.places = nn.Embedding(30, 8), nn.Embedding(11, 8)

    def forward(self, sentence: Tensor) -> Tensor:
        found: Tensor = self.words(sentence) + self.places(torch.arange(sentence.shape[1]))
        return found


def test_other_words_for_positions_bound_the_rows_and_a_lone_argument_is_given_the_tokens() -> None:
    torch.manual_seed(0)
    made = batches(Tagger(), longest=512)
    assert max(case.inputs["0"].shape[1] for case in made.cases) == 11
    assert verify(reference=Tagger(), into=Tagger).faithful


def test_rows_are_halved_until_the_reference_has_places_for_them() -> None:
    class Silent(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"vocab_size": 30}  # type: ignore[assignment]  # says nothing of places
            self.places = nn.Embedding(40, 8)

    torch.manual_seed(0)
    assert verify(reference=Silent(), into=Silent, longest=200).faithful


@pytest.mark.slow
def test_sound_is_made_from_the_config() -> None:
    layers: dict[str, Any] = {
        "conv_dim": (16, 16),
        "conv_stride": (5, 4),
        "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2,
    }
    config = transformers.Wav2Vec2Config(
        **SMALL, **layers, vocab_size=9, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2
    )
    _, report = proven(transformers.Wav2Vec2ForCTC, config)
    assert all("sound" in case for case in report.cases)


def test_spectrograms_go_with_the_tokens_of_a_decoder() -> None:
    sizes: dict[str, Any] = {
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 20,
        "max_source_positions": 10,
    }
    sizes |= {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 20, "max_target_positions": 30}
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    config = transformers.WhisperConfig(**sizes, **tokens, vocab_size=50, d_model=16, num_mel_bins=12)
    reference = made(transformers.WhisperForConditionalGeneration, config)
    for case in batches(reference).cases:
        assert set(case.inputs) >= {"input_features", "decoder_input_ids"}
        assert case.inputs["input_features"].shape[1:] == (12, 20)


def llava() -> Any:
    vision = transformers.CLIPVisionConfig(**SMALL, image_size=12, patch_size=4)
    text = transformers.LlamaConfig(**SMALL, vocab_size=60, num_key_value_heads=2, max_position_embeddings=64)
    return transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=57, image_seq_length=9)


@pytest.mark.slow
def test_pictures_stand_between_the_tokens() -> None:
    reference, report = proven(transformers.LlavaForConditionalGeneration, llava())
    assert any("picture each" in case for case in report.cases)
    assert any("vision_tower" in name for name in report.shown.activation)
    for case in batches(reference).cases:
        places = (case.inputs["input_ids"] == 57).sum(1)
        assert bool((places == (9 if "pixel_values" in case.inputs else 0)).all())


def test_two_towers_are_given_both() -> None:
    text = {**SMALL, "vocab_size": 60, "max_position_embeddings": 20, "eos_token_id": 59}
    vision = {**SMALL, "image_size": 12, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    for case in batches(made(transformers.CLIPModel, config)).cases:
        assert {"input_ids", "pixel_values"} <= set(case.inputs)
        assert len(case.inputs["input_ids"]) == len(case.inputs["pixel_values"])


class Port(nn.Module):
    """It takes what the reference has defaults for."""

    def forward(self, input_ids: Tensor, bbox: Tensor, input_values: Tensor, attention_mask: Tensor) -> None: ...


def given(kind: Any, config: Any, port: nn.Module | None) -> dict[str, Tensor]:
    reference = made(kind, config)
    held = HeldWeights(reference, "held")
    first = make_batches(same_names(reference, reference), held, held.config, None, seed=0, longest=9, choices=None,
                         reference=LiveReference.of(reference), port=port).cases[0]  # fmt: skip
    return dict(first.inputs)


def test_boxes_are_made_for_a_port_that_takes_them() -> None:
    config = transformers.LayoutLMConfig(**SMALL, vocab_size=50, max_2d_position_embeddings=60)
    assert "bbox" not in given(transformers.LayoutLMModel, config, None)
    boxes = given(transformers.LayoutLMModel, config, Port())["bbox"]
    assert (boxes[..., :2] <= boxes[..., 2:]).all()
    assert int(boxes.max()) < 60
    widths, heights = (boxes[..., 2:] - boxes[..., :2]).unbind(-1)
    assert not torch.equal(widths, heights)


def test_sound_has_a_mask_for_a_port_that_takes_one() -> None:
    layers: dict[str, Any] = {
        "conv_dim": (8, 8),
        "conv_kernel": (10, 3),
        "conv_stride": (5, 2),
        "num_feat_extract_layers": 2,
    }
    config = transformers.HubertConfig(**SMALL, **layers, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    assert set(given(transformers.HubertModel, config, None)) == {"input_values"}
    mask = given(transformers.HubertModel, config, Port())["attention_mask"]
    assert len(set(mask.sum(1).tolist())) == len(mask) > 1


def test_a_decoder_with_a_vocabulary_of_its_own() -> None:
    config = {"vocab_size": 50, "decoder_vocab_size": 20, "is_encoder_decoder": True}
    reference = Tagger()
    reference.config = config  # type: ignore[assignment]  # a plain dictionary
    held = HeldWeights(reference, "held")
    made = make_batches(same_names(reference, reference), held, config, None, seed=0, longest=40, choices=None)
    assert max(int(case.inputs["decoder_input_ids"].max()) for case in made.cases) == 19
    assert max(int(case.inputs["input_ids"].max()) for case in made.cases) == 49


def test_the_encoder_of_an_encoder_decoder_is_given_no_decoders_tokens() -> None:
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=20, num_layers=1, num_heads=4, vocab_size=40)
    living = LiveReference(made(transformers.T5EncoderModel, config), "T5")
    case = Case("both", {name: torch.zeros(1, 2) for name in ("input_ids", "decoder_input_ids")})
    assert set(living.taken(case).inputs) == {"input_ids"}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return found


class Routed(nn.Module):
    """A mixture whose experts are modules: how many tokens each is given depends on what the router rounds to."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"vocab_size": 40, "max_position_embeddings": 30}
        self.words, self.router = nn.Embedding(40, 8), nn.Linear(8, 6, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(6))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids).flatten(0, 1)
        weight, chosen = self.router(x).softmax(-1).topk(2)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            found = found.index_add(0, rows, expert(x[rows]) * weight[rows, place, None])
        return found.view(*input_ids.shape, 8)


def test_a_router_that_rounds_otherwise_is_no_crash() -> None:
    """In bfloat16 some tokens go to another expert: activations of other shapes, which are left out there."""
    torch.manual_seed(0)
    reference = Routed()
    draw_parameters(reference, 1)
    report = verify(reference=reference, into=Routed, dtypes=(torch.float32, torch.bfloat16), causes=False)
    assert report.verdict != "different", str(report)
    assert any(probe.port.startswith("experts.3") for probe in report.probes)


def test_what_no_made_input_suits_is_the_references_own_refusal() -> None:
    class Picky(nn.Module):
        main_input_name = "pixel_values"

        def __init__(self) -> None:
            super().__init__()
            self.config, self.layer = {"image_size": 12}, nn.Linear(2, 2)

        def forward(self, pixel_values: Tensor) -> Tensor:
            message = "I look at nothing"
            raise ValueError(message)

    with pytest.raises(VerifyError, match=r"the reference failed on pixel_values.*I look at nothing"):
        verify(reference=Picky(), into=Picky)


def test_fields_of_the_part_that_reads() -> None:
    config = {
        "vision_config": {"vocab_size": 1},
        "text_config": {"vocab_size": 9},
        "image_token_id": 8,
        "pad_token_id": 0,
    }
    assert text_fields(config)["vocab_size"] == 9
    assert special_places(config) == {8}


def test_a_fault_in_what_looks_at_activations_is_not_the_models() -> None:
    """It is raised within the model's forward, and must not be told as what the model raised."""

    def look(point: str, value: Tensor) -> None:
        message = "no such size"
        raise RuntimeError(message)

    side = Side(title="the port", module=nn.Linear(2, 2), arguments=[{"input": torch.ones(1, 2)}], wanted=["."])
    with pytest.raises(VerifyError, match=r"an activation of the port cannot be compared: RuntimeError: no such size"):
        side.run(0, look)


class Capped(Routed):
    """A router whose decision is in float32 whatever its weights are."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids).flatten(0, 1)
        weight, chosen = self.router(x).float().softmax(-1).topk(2)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            found = found.index_add(0, rows, expert(x[rows]) * weight[rows, place, None].to(x.dtype))
        return found.view(*input_ids.shape, 8)


def test_a_router_in_float32_is_no_crash() -> None:
    """What its rounding leads to is measured with roundings changed at random: other tokens may go to an expert."""
    torch.manual_seed(0)
    reference = Capped()
    draw_parameters(reference, 1)
    with torch.no_grad():
        reference.router.weight.mul_(1e-7)  # all but ties
    report = verify(reference=reference, into=Capped, causes=False, dtypes=())
    assert report.verdict != "different", str(report)


def test_a_picture_that_nothing_depends_on_is_no_way_to_give_one() -> None:
    class Deaf(Tagger):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"vocab_size": 30, "n_ctx": 11, "image_size": 12}  # type: ignore[assignment]  # a dictionary

        def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
            return super().forward(input_ids)

    assert not any("pixel_values" in case.inputs for case in batches(Deaf()).cases)


class Angles(nn.Module):
    """Rotations as complex numbers [s d/2], as Llama's first implementation has them."""

    def forward(self, length: int) -> Tensor:
        angle = torch.arange(length, dtype=torch.float64)[:, None] / 100.0 ** (torch.arange(4) / 4)
        return torch.polar(torch.ones_like(angle), angle)


class Chooser(nn.Module):
    """The number of the expert that each token goes to, [b s]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :3].argmax(-1)


class Rotated(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.angles, self.chooser = Angles(), Chooser()
        self.experts = nn.Parameter(torch.zeros(3, 8))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        pairs = torch.view_as_complex(x.double().unflatten(-1, (4, 2)))
        turned = torch.view_as_real(pairs * self.angles(x.shape[1])).flatten(-2).to(x.dtype)
        return turned + self.experts[self.chooser(turned)]


@pytest.mark.parametrize("wrong", [False, True])
def test_what_is_no_real_number_is_no_probe(wrong: bool) -> None:
    """Complex rotations and the numbers of experts are seen in what is made of them."""
    reference, port = Rotated(), Rotated()
    draw_parameters(reference, 1)
    port.load_state_dict(reference.state_dict())
    if wrong:
        port.angles.register_forward_hook(lambda module, args, output: output.conj())
    report = verify(reference=reference, into=port, loaded=True, dtypes=())
    assert report.verdict == ("different" if wrong else "faithful"), str(report)
    assert not {"angles", "chooser"} & {probe.port for probe in report.probes}


ENDING: dict[str, tuple[Any, Any]] = {
    "CLIP's text model, which reads the end of a row": (
        transformers.CLIPTextModelWithProjection,
        lambda: transformers.CLIPTextConfig(**SMALL, vocab_size=50, max_position_embeddings=20, projection_dim=12,
                                            bos_token_id=48, eos_token_id=49),
    ),
    "CLIP, whose tokens go with a picture": (
        transformers.CLIPModel,
        lambda: transformers.CLIPConfig(
            text_config={**SMALL, "vocab_size": 50, "max_position_embeddings": 20, "eos_token_id": 49},
            vision_config={**SMALL, "image_size": 16, "patch_size": 8}, projection_dim=12,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDING)
def test_rows_end_where_the_reference_reads_the_end(name: str) -> None:
    kind, config = ENDING[name]
    made_ = batches(made(kind, config()), longest=20)
    for case in made_.cases:
        assert ((case.inputs["input_ids"] == 49).sum(1) == 1).all(), case.name
    padded = next(case for case in made_.cases if "padded" in case.name)
    ids, mask = padded.inputs["input_ids"], padded.inputs["attention_mask"]
    assert (ids[torch.arange(len(ids)), mask.sum(1) - 1] == 49).all()


NOT_ENDING: dict[str, tuple[Any, Any]] = {
    "the first token": (
        transformers.BertModel, lambda: transformers.BertConfig(**SMALL, vocab_size=50, eos_token_id=49),
    ),
    "the last token": (
        transformers.GPT2ForSequenceClassification,
        lambda: transformers.GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=50, n_positions=30, pad_token_id=1,
                                        eos_token_id=49, bos_token_id=48),
    ),
    "no output without tokens": (
        transformers.LlamaForCausalLM, lambda: transformers.LlamaConfig(**SMALL, vocab_size=50, eos_token_id=49),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ENDING)
def test_rows_end_anyhow_where_the_reference_does_not_look(name: str) -> None:
    kind, config = NOT_ENDING[name]
    cases = batches(made(kind, config())).cases
    counts = torch.cat([(case.inputs["input_ids"] == 49).sum(1) for case in cases])
    assert (counts != 1).any()

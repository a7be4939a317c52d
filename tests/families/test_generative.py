"""What the pairs do not show of the families that write: older files, computed positions, exports from scratch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import einops
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

import porting
from porting.errors import PortingWarning
from porting.models.language_model import LanguageModel, LanguageModelConfig
from porting.models.positions import sinusoidal_positions
from porting.models.seq2seq import Seq2Seq, Seq2SeqConfig
from porting.models.seq2seq_search import beam_search
from porting.plan.plan import PlanError
from porting.target import TargetError
from porting.verification import verify
from tests.families.pairs import MARIAN, OPENAI_GPT, PAIRS, SEQ2SEQ, Pair
from tests.families.ported import make

pytestmark = pytest.mark.few(1)

FAMILIES = {pair.table: pair for pair in PAIRS if pair.table in ("openai_gpt", "marian", "bart")}
Weights = dict[str, Tensor]


def checkpoint(family: str, directory: Path, change: Callable[[Weights], Weights] | None = None) -> Path:
    """A small checkpoint, its tensors rewritten."""
    make(FAMILIES[family], directory)
    if change is not None:
        path = directory / "model.safetensors"
        save_file(
            {name: one.contiguous() for name, one in change(load_file(path)).items()}, path, metadata={"format": "pt"}
        )
    return directory


def configured(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def source() -> dict[str, Any]:  # Any: to be spread over arguments of other types as well
    """Ids [3 20] of 37 words and their mask: rows of 20, 13 and 4 tokens."""
    ids = torch.randint(1, 36, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(20) < torch.tensor([[20], [13], [4]])).long()
    return {"input_ids": torch.where(mask.bool(), ids, 36), "attention_mask": mask}


def reference(directory: Path, family: str) -> Any:  # Any: a model of transformers
    kind = getattr(transformers, FAMILIES[family].architecture)
    model, info = kind.from_pretrained(directory, output_loading_info=True)
    assert {key: found for key, found in info.items() if found} == {}
    return model.eval()


def logits(model: Any, family: str) -> Tensor:
    """What a model of transformers or of ours gives, [b s v]."""
    given = source()
    theirs = isinstance(model, transformers.PreTrainedModel)
    with torch.no_grad():
        if family != "openai_gpt":
            given |= {"decoder_input_ids": given["input_ids"][:, :7].flip(0)}
        elif not theirs:
            columns: Tensor = model(*(one.T for one in given.values()))
            return columns.transpose(0, 1)
        rows: Tensor = model(**given).logits if theirs else model(**given)
    return rows


# ------------------------------------------------------------------------------------------------- computed positions


@pytest.mark.parametrize(("length", "width"), [(29, 24), (512, 512)])
def test_the_computed_positions_are_marians_bit_for_bit(length: int, width: int) -> None:
    """So the float64 reference, whose table is rounded to float32, agrees; before rounding they are 2^-25 apart."""
    make: Any = MarianSinusoidalPositionalEmbedding(length, width).create_weight  # it has no types
    theirs = make()
    theirs = einops.rearrange(theirs, "t (s k) -> t (k s)", s=2)
    assert torch.equal(sinusoidal_positions(length, width), theirs)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        exact = sinusoidal_positions(length, width)
    finally:
        torch.set_default_dtype(before)
    assert 0 < (exact - theirs.double()).abs().max().item() <= 2**-25


def test_a_file_without_positions_is_loaded_without_leave_and_without_a_warning(tmp_path: Path) -> None:
    directory = checkpoint("marian", tmp_path / "today")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = porting.load(directory)
    record = porting.provenance(module)
    assert record is not None
    assert (record.plan.fresh, record.plan.computed) == ((), ("encoder.positions.table", "decoder.positions.table"))
    assert record.plan.summary.endswith("2 computed")
    torch.testing.assert_close(logits(module, "marian"), logits(reference(directory, "marian"), "marian"))
    porting.export(module, None, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


def with_positions(weights: Weights) -> Weights:
    """As older versions wrote them; these here are not what anybody would compute."""
    draw = torch.Generator().manual_seed(3)
    tables = {f"model.{side}.embed_positions.weight": torch.randn(29, 24, generator=draw) for side in SIDES}
    return {**weights, **tables}


SIDES = ("encoder", "decoder")


@pytest.mark.slow
def test_positions_that_a_file_has_are_taken_from_it(tmp_path: Path) -> None:
    directory = checkpoint("marian", tmp_path / "older", with_positions)
    module = porting.load(directory)
    record = porting.provenance(module)
    assert record is not None
    assert record.plan.computed == ()
    for side in SIDES:
        theirs = load_file(directory / "model.safetensors")[f"model.{side}.embed_positions.weight"]
        ours = module.get_buffer(f"{side}.positions.table")
        assert torch.equal(ours, einops.rearrange(theirs, "t (s k) -> t (k s)", s=2))
    assert verify(directory, trials=False).faithful
    porting.export(module, None, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


# -------------------------------------------------------------------------------------------------------- older files


def older_gpt(weights: Weights) -> Weights:
    """No prefix; the causal masks, the head and the positions' numbers are there."""
    found = {name.removeprefix("transformer."): one for name, one in weights.items()}
    mask = torch.ones(29, 29).tril()[None, None]
    found |= {f"h.{i}.attn.bias": mask.clone() for i in range(2)}
    return {**found, "lm_head.weight": found["tokens_embed.weight"].clone(), "position_ids": torch.arange(29)[None]}


def with_copies(weights: Weights) -> Weights:
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight", "lm_head.weight")
    return {**weights, **{name: weights["model.shared.weight"].clone() for name in names}}


OLDER = [("openai_gpt", older_gpt), ("marian", with_copies), ("bart", with_copies)]


@pytest.mark.parametrize(("family", "older"), OLDER)
def test_older_files_hold_the_same_model(family: str, older: Callable[[Weights], Weights], tmp_path: Path) -> None:
    today = porting.load(checkpoint(family, tmp_path / "today"))
    found = porting.load(checkpoint(family, tmp_path / "older", older))
    for name, tensor in today.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    porting.export(found, None, tmp_path / "again")
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("older", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], one) for name, one in before.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "architecture", "fields"), [("bart", "BartModel", SEQ2SEQ), ("openai_gpt", "OpenAIGPTModel", OPENAI_GPT)]
)
def test_a_file_of_the_model_without_its_head(
    family: str, architecture: str, fields: dict[str, object], tmp_path: Path
) -> None:
    """The head is tied; what it has of its own, a bias, is new and zero, as in transformers."""
    make(Pair(family, architecture, fields), tmp_path)
    if family == "bart":
        with pytest.raises(PlanError, match=r"the checkpoint has nothing for 'projection\.bias' \(fresh=True"):
            porting.load(tmp_path)
        with pytest.warns(PortingWarning, match=r"1 parameters are new and untrained: projection\.bias"):
            module = porting.load(tmp_path, fresh=True)
        assert not module.get_parameter("projection.bias").any()
    assert verify(tmp_path, table=family, fresh=True).faithful


@pytest.mark.parametrize(("family", "older"), OLDER)
def test_a_head_that_is_no_copy_is_refused(family: str, older: Callable[[Weights], Weights], tmp_path: Path) -> None:
    def untied(weights: Weights) -> Weights:
        found = older(weights)
        found["lm_head.weight"][36, 23] += 1e-6
        return found

    with pytest.raises(PlanError, match=r"lm_head\.weight: was to be dropped because it equals .*, and it does not"):
        porting.load(checkpoint(family, tmp_path, untied))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("openai_gpt", "afn", "relu"),
        ("openai_gpt", "tie_word_embeddings", False),
        ("marian", "share_encoder_decoder_embeddings", False),
        ("marian", "normalize_before", True),
        ("marian", "normalize_embedding", True),
        ("marian", "activation_function", "gelu_fast"),
        ("bart", "normalize_before", True),
        ("bart", "normalize_embedding", False),
        ("bart", "add_final_layer_norm", True),
        ("bart", "tie_word_embeddings", False),
    ],
)
def test_a_config_that_the_module_cannot_represent_is_refused(
    family: str, field: str, value: object, tmp_path: Path
) -> None:
    checkpoint(family, tmp_path)
    configured(tmp_path, **{field: value})
    with pytest.raises((PlanError, TargetError), match=f"{field} = {value!r}|hidden_act={value!r}"):
        porting.load(tmp_path)


def test_embeddings_that_are_not_scaled_are_not(tmp_path: Path) -> None:
    """Marian's default when the config is silent; the published models say true."""
    make(Pair("marian", "MarianMTModel", {**MARIAN, "scale_embedding": False}), tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["scale_embedding"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    torch.testing.assert_close(
        logits(porting.load(tmp_path), "marian"), logits(reference(tmp_path, "marian"), "marian")
    )


# ------------------------------------------------------------------------------------------------------- from scratch


def trained(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def scratch(family: str) -> nn.Module:
    """A module that was never loaded."""
    if family == "openai_gpt":
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        sizes: dict[str, Any] = dict(zip(names, OPENAI_GPT.values(), strict=True))
        config = LanguageModelConfig(**sizes, hidden_act="gelu_new", tie_word_embeddings=True)
        return trained(LanguageModel(config=config))
    fields: dict[str, Any] = {
        "vocab_size": SEQ2SEQ["vocab_size"],
        "hidden_size": SEQ2SEQ["d_model"],
        "num_encoder_layers": SEQ2SEQ["encoder_layers"],
        "num_decoder_layers": SEQ2SEQ["decoder_layers"],
        "max_position_embeddings": SEQ2SEQ["max_position_embeddings"],
    }
    return trained(Seq2Seq(config=Seq2SeqConfig(**fields, embedding_norm=family == "bart")))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trained_from_scratch_becomes_a_checkpoint_of_the_family(family: str, tmp_path: Path) -> None:
    module = scratch(family)
    porting.export(module, family, tmp_path / "new")
    torch.testing.assert_close(logits(reference(tmp_path / "new", family), family), logits(module, family))
    assert verify(tmp_path / "new", table=family).faithful


def test_a_model_that_is_another_function_is_not_exported_as_the_family(tmp_path: Path) -> None:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    sizes: dict[str, Any] = dict(zip(names, OPENAI_GPT.values(), strict=True))
    config = LanguageModelConfig(**sizes, hidden_act="gelu", tie_word_embeddings=True)
    with pytest.raises(porting.PortingError, match="has hidden_act = 'gelu', and every checkpoint of 'openai_gpt'"):
        porting.export(LanguageModel(config=config), "openai_gpt", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_search_writes_what_transformers_writes(tmp_path: Path) -> None:
    """Marian's generation, with its own ids for the start, the end and what is never written."""
    module = porting.load(checkpoint("marian", tmp_path / "small"))
    assert isinstance(module, Seq2Seq)
    with torch.no_grad():
        module.projection.bias[0] += 5.0  # so that some rows end early
    porting.export(module, None, tmp_path / "ending")
    expected = reference(tmp_path / "ending", "marian").generate(
        **source(), num_beams=4, max_new_tokens=10, bad_words_ids=[[36]], forced_eos_token_id=None, early_stopping=False
    )
    found = beam_search(module, **source(), num_beams=4, max_length=10, suppress=[36]).token_ids[:, 0]
    assert torch.equal(found[:, : expected.shape[1]], expected)
    assert bool((expected == 0).any())

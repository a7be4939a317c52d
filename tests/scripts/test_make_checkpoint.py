"""The synthetic checkpoint: real names and shapes, realistic scale, one model however it is written."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from scripts import make_checkpoint
from scripts.make_checkpoint import (
    DTYPES,
    SPECIAL,
    FileFormat,
    Head,
    Parameter,
    Size,
    Spelling,
    draw,
    parameters,
    write_checkpoint,
)

SMALL = Size(
    vocab_size=200,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=40,
    max_position_embeddings=16,
    num_labels=5,
)


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    for file in sorted(folder.glob("*.bin")):
        tensors |= torch.load(file, weights_only=True)
    return tensors


@pytest.mark.parametrize("head", list(Head), ids=lambda head: head.value)
def test_transformers_loads_every_architecture_without_a_key_too_many_or_too_few(tmp_path: Path, head: Head) -> None:
    import transformers

    write_checkpoint(tmp_path / "made", size=SMALL, head=head)
    architecture = getattr(transformers, head.value)
    model, info = architecture.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.num_labels == (5 if head in {Head.SEQUENCE, Head.TOKEN} else 2)
    weights = stored(tmp_path / "made")
    if head is Head.NONE:
        weights = {name.removeprefix("bert."): tensor for name, tensor in weights.items()}
    found = {name: tensor for name, tensor in model.state_dict().items() if name in weights}
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_the_values_do_not_depend_on_how_they_are_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", size=SMALL)
    plain = stored(tmp_path / "plain")
    spelling = Spelling(legacy=True, prefix=False, duplicates=True)
    for number, (file_format, shard_bytes) in enumerate(itertools.product(FileFormat, (None, 9_000))):
        folder = tmp_path / str(number)
        write_checkpoint(folder, size=SMALL, spelling=spelling, file_format=file_format, shard_bytes=shard_bytes)
        tensors = stored(folder)
        torch.testing.assert_close(tensors.pop("embeddings.position_ids"), torch.arange(16)[None], rtol=0, atol=0)
        decoder = tensors.pop("cls.predictions.decoder.weight"), tensors.pop("cls.predictions.decoder.bias")
        assert torch.equal(decoder[0], tensors["embeddings.word_embeddings.weight"])
        assert torch.equal(decoder[1], tensors["cls.predictions.bias"])
        assert not any("LayerNorm.weight" in name or "LayerNorm.bias" in name for name in tensors)
        renamed = {
            re.sub("^(embeddings|encoder|pooler)", r"bert.\1", name)
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias"): tensor
            for name, tensor in tensors.items()
        }
        assert renamed.keys() == plain.keys()
        for name, tensor in plain.items():
            assert torch.equal(renamed[name], tensor), name


def test_the_same_seed_gives_the_same_bytes_and_another_gives_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_checkpoint(tmp_path / name, size=SMALL, seed=seed)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"]
    first, second, third = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == second != third


def test_every_parameter_is_drawn_and_at_its_own_scale() -> None:
    size = dataclasses.replace(SMALL, hidden_size=256, intermediate_size=1024, vocab_size=1000)
    for parameter in parameters(size=size, head=Head.PRE_TRAINING, spelling=Spelling()):
        values = draw(parameter, seed=3, dtype=torch.float32)
        if values.numel() >= 256:
            assert values.mean().item() == pytest.approx(parameter.mean, abs=5 * parameter.std / values.numel() ** 0.5)
            assert values.std().item() == pytest.approx(parameter.std, rel=0.2)
        assert len(set(values.flatten().tolist())) > 0.9 * min(values.numel(), 10_000)
    gain = next(p for p in parameters(size=size, head=Head.NONE, spelling=Spelling()) if "Norm.weight" in p.name)
    assert (gain.mean, gain.std) == (1.0, 0.1)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_each_dtype_is_the_cast_of_the_same_draw(tmp_path: Path, dtype: str) -> None:
    write_checkpoint(tmp_path / "made", size=SMALL, dtype=dtype)
    name = "bert.encoder.layer.1.output.dense.weight"
    wanted = draw(
        Parameter(name=name, stored=name, shape=(24, 40), mean=0.0, std=40**-0.5), seed=0, dtype=torch.float32
    )
    found = stored(tmp_path / "made")[name]
    assert found.dtype is DTYPES[dtype][0]
    assert torch.equal(found, wanted.to(found.dtype))
    assert json.loads((tmp_path / "made" / "config.json").read_text())["dtype"] == dtype


def test_shards_keep_to_their_size_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "made", size=SMALL, shard_bytes=20_000)
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert len(files) > 2
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    for file in files:
        tensors = load_file(file)
        assert {index["weight_map"][name] for name in tensors} == {file.name}
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(tmp_path / "made").values())


def test_bert_base_has_the_published_number_of_parameters() -> None:
    def count(head: Head) -> int:
        listed = parameters(size=Size(), head=head, spelling=Spelling())
        return sum(torch.Size(parameter.shape).numel() for parameter in listed)

    assert count(Head.NONE) == 109_482_240
    assert count(Head.PRE_TRAINING) == 110_106_428


def test_the_tokenizer_spells_any_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_checkpoint(tmp_path / "made", size=SMALL)
    words = (tmp_path / "made" / "vocab.txt").read_text().splitlines()
    assert len(words) == len(set(words)) == 200
    assert tuple(words[:5]) == SPECIAL
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer.tokenize("Ab, [MASK] 1!") == ["a", "##b", ",", "[MASK]", "1", "!"]


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(make_checkpoint, "_write_vocabulary", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_checkpoint(tmp_path / "made", size=SMALL)
    assert list(tmp_path.iterdir()) == []


def test_what_stands_there_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists; choose another directory"):
        write_checkpoint(tmp_path, size=SMALL)


def test_the_command_line(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(make_checkpoint.main)
    sizes = ["--layers", "1", "--hidden-size", "64", "--vocab-size", "300", "--positions", "8"]
    options = [*sizes, "--head", "BertModel", "--no-prefix", "--format", "bin"]
    result = CliRunner().invoke(app, [str(tmp_path / "made"), *options])
    assert result.exit_code == 0, result.output
    assert re.search(r"BertModel, 74,\d{3} parameters, 0\.\d MB", result.output)
    assert "embeddings.word_embeddings.weight" in stored(tmp_path / "made")
    again = CliRunner().invoke(app, [str(tmp_path / "made")])
    assert again.exit_code == 2
    odd = CliRunner().invoke(app, [str(tmp_path / "odd"), "--dtype", "int4"])
    assert odd.exit_code == 2

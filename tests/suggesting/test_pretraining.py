"""bert-base-uncased's own files and config: every head of a BERT from scratch has its place."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from porting import suggest, verify
from porting.errors import PortingWarning, VerifyError
from porting.suggesting import Suggestion, Verdict
from tests.models.twins import realistic
from tests.pretraining import SCRATCH, TABLE, write_base
from tests.suggesting.oracle import drafted, source

FILES = ["model.safetensors", "pytorch_model.bin"]
HEADS = (
    '"bert.pooler.dense.{w:weight,bias}" = "pool.{w:weight,bias}"',
    '"cls.predictions.transform.dense.{w:weight,bias}" = "mlm.dense.{w:weight,bias}"',
    '"cls.predictions.transform.LayerNorm.{w:weight/gamma,bias/beta}" = "mlm.norm.{w:weight,bias}"',
    '"cls.predictions.bias" = "mlm.decoder.bias"',
    '"cls.seq_relationship.{w:weight,bias}" = "nsp.{w:weight,bias}"',
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:  # Any: a module of its own
    path = tmp_path_factory.mktemp("scratch") / "scratch.py"
    path.write_text(SCRATCH)
    spec = importlib.util.spec_from_file_location("scratch_of_suggest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def suggested(source: Path, into: Any, architecture: str | None = None) -> Suggestion:
    if architecture:
        return suggest(source, into, architecture=architecture)
    with pytest.warns(PortingWarning, match=r"BertForMaskedLM, which has no .*pooler.*seq_relationship"):
        return suggest(source, into)


def test_the_draft_has_every_head(tmp_path: Path, scratch: Any) -> None:
    source = write_base(tmp_path / "c", file="pytorch_model.bin", decoder=True)
    text = drafted(source, scratch.Tied).text
    assert all(line in text for line in HEADS)
    assert 'prefix = "bert."' in text
    assert '"mlm.decoder.weight" = "tok.weight"' in text
    assert '". -> prediction_logits" = ". -> 0"' in text
    assert '"cls.predictions.decoder.weight" = "equals bert' in text


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("architecture", [None, "BertForPreTraining"])
def test_every_head_has_its_place(tmp_path: Path, scratch: Any, file: str, architecture: str | None) -> None:
    source = write_base(tmp_path / "c", file=file, decoder=file.endswith(".bin"))
    found = suggested(source, scratch.Tied, architecture)
    assert found.verdict is Verdict.EXACT, str(found)
    assert all(line in found.text for line in HEADS)
    assert 'prefix = "bert."' in found.text
    assert '"mlm.decoder.weight" = "tok.weight"' in found.text
    assert '". -> prediction_logits" = ". -> 0"' in found.text
    assert '". -> seq_relationship_logits" = ". -> 1"' in found.text
    assert ('"cls.predictions.decoder.weight" = "equals bert' in found.text) is file.endswith(".bin")
    found.write(tmp_path / "t.toml")
    report = verify(source, scratch.Tied, tmp_path / "t.toml")
    assert report.faithful
    assert len(report.shown.activation) == report.shown.count


@pytest.mark.slow
def test_the_prefix_is_there_where_the_reference_is_the_trunk(tmp_path: Path, scratch: Any) -> None:
    source = write_base(tmp_path / "c")
    with pytest.warns(PortingWarning, match="transformers.BertModel has no "):
        found = suggest(source, scratch.Tied, architecture="BertModel")
    assert '"bert.pooler.dense.{w:weight,bias}" = "pool.{w:weight,bias}"' in found.text
    assert '"bert.encoder.layer.{i}" = "blocks.{i}"' in found.text


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_stored_decoder_fills_one_that_is_not_tied(tmp_path: Path, scratch: Any, file: str) -> None:
    source = write_base(tmp_path / "c", file=file, decoder=True)
    found = suggested(source, scratch.Bert)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"cls.predictions.decoder.weight" = "mlm.decoder.weight"' in found.text
    found.write(tmp_path / "t.toml")
    assert verify(source, scratch.Bert, tmp_path / "t.toml").faithful


@pytest.mark.slow
def test_a_decoder_that_is_nowhere_stored_is_a_copy_of_the_words(tmp_path: Path, scratch: Any) -> None:
    source = write_base(tmp_path / "c")
    found = suggested(source, scratch.Bert)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '\n"mlm.decoder.weight" = "equals tok.weight"\n' in found.text.partition("[make]")[2]
    found.write(tmp_path / "t.toml")
    report = verify(source, scratch.Bert, tmp_path / "t.toml")
    assert report.faithful
    assert report.shown.activation.keys() >= {"mlm.decoder.weight", "tok.weight"}
    assert not report.random
    (tmp_path / "hand.toml").write_text(TABLE)  # has a rule for it: the reference's own decoder is no random one
    with pytest.raises(VerifyError, match=r"tie them in the module: mlm.decoder.weight = tok.weight"):
        verify(source, scratch.Bert, tmp_path / "hand.toml", fresh=True)


@pytest.mark.slow
def test_a_head_of_another_family_is_a_copy_too(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=3, vocab_size=37, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    realistic(model, seed=0)
    model.save_pretrained(tmp_path / "c")
    found = suggest(tmp_path / "c", Decoder)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '\n"head.weight" = "equals words.weight"\n' in found.text.partition("[make]")[2]


class WithClasses(nn.Module):
    """Its second head is its own."""

    def __init__(self, vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> None:
        super().__init__()
        self.decoder = Decoder(vocab_size, n_embd, n_layer, n_head, n_positions)
        self.classes = nn.Linear(vocab_size, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.decoder(input_ids, attention_mask)
        return logits, self.classes(logits[:, 0])


def test_a_head_is_a_copy_beside_one_that_the_checkpoint_has_not(tmp_path: Path) -> None:
    fields = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 37, "n_positions": 32}
    source("GPT2LMHeadModel", fields, tmp_path)
    text = drafted(tmp_path, WithClasses).text
    assert '\n"decoder.head.weight" = "equals decoder.words.weight"\n' in text.partition("[make]")[2]
    assert '"classes.{*rest}"' in text.partition("[fresh]")[2]


@pytest.mark.slow
def test_a_list_of_every_layers_output_is_compared_as_well(tmp_path: Path, scratch: Any) -> None:
    class Lists(scratch.Tied):  # type: ignore[misc]  # the base is made while the test runs
        def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> list[Tensor]:
            x = self.ln(self.tok(input_ids) + self.seg(token_type_ids) + self.pos(torch.arange(input_ids.shape[1])))
            found = []
            for block in self.blocks:
                x = block(x, attention_mask)
                found.append(x)
            return found

    source = write_base(tmp_path / "c")
    with pytest.warns(PortingWarning):
        found = suggest(source, Lists)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert '"bert.encoder.layer.{i}" = "blocks.{i}"' in found.text
    assert [f'"bert.encoder.layer.{i}.output" = ". -> {i}"' in found.text for i in range(4)] == [True] * 3 + [False]


class Decoder(nn.Module):
    def __init__(self, vocab_size: int, n_embd: int, n_layer: int, n_head: int, n_positions: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        self.blocks = nn.ModuleList(DecoderBlock(n_embd, n_head) for _ in range(n_layer))
        self.norm, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        length = input_ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril() & (attention_mask[:, None, None, :] != 0)
        x = self.words(input_ids) + self.places(torch.arange(length))
        for block in self.blocks:
            x = block(x, seen)
        logits: Tensor = self.head(self.norm(x))
        return logits


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2, self.out = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, width)
        self.qkv, self.up, self.down = (nn.Linear(*sizes) for sizes in ((width, 3 * width), (width, 4 * width),
                                                                        (4 * width, width)))  # fmt: skip

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.ln1(x)).chunk(3, -1))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, torch.finfo(x.dtype).min)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))
        return y


@pytest.mark.slow
def test_a_pooler_that_nothing_returned_comes_from_is_left_alone(tmp_path: Path, scratch: Any) -> None:
    class Words(scratch.Tied):  # type: ignore[misc]  # a class of a module of its own
        def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
            words: Tensor = super().forward(input_ids, attention_mask, token_type_ids)[0]
            return words

    source = write_base(tmp_path / "c")
    with pytest.warns(PortingWarning, match="transformers.BertForMaskedLM has no "):
        found = suggest(source, Words, architecture="BertForMaskedLM")
    assert found.verdict is Verdict.TRUNK, str(found)
    assert '"cls.predictions.transform.dense.{w:weight,bias}" = "mlm.dense.{w:weight,bias}"' in found.text

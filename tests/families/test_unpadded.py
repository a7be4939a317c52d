"""``verify`` proves a BERT that runs without its padding: every layer on packed tokens, and what comes out of each row.

Inside, such a model has its tokens in one long row, [1 n e].  The reference has them so too when it is given that row
and a mask of blocks, in which every token sees its own row alone: then each probe of the table fits as it is written.
What a head makes of whole rows is compared on padded rows, as of any model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import porting
from porting.models.bert_heads import BertForPreTraining
from porting.models.unpadded import Rows
from porting.notation.table import Table, read_table
from porting.reporting.report import Report
from porting.trials.inputs import Case
from porting.verification import verify
from tests.families.pairs import BERT, Pair
from tests.families.ported import make

PACKED = """
extends = "bert"
[mapping]
name = "bert_packed"
[inputs]
"input_ids" = false
"attention_mask" = false
"token_type_ids" = false
"rows" = "input_ids"
"mask" = "attention_mask"
"segments" = "token_type_ids"
[probes]
"bert.encoder.layer.{i}.attention.self -> scores" = false
"bert.encoder.layer.{i}.attention.self -> probabilities" = false
"bert.encoder.layer.{i}.attention.self -> 0" = false
"bert.pooler" = false
"cls.seq_relationship" = false
"""
PER_ROW = """
extends = "bert"
[mapping]
name = "bert_per_row"
[probes]
"bert.embeddings" = false
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}" = false
"bert.encoder.layer.{i}.attention.self -> scores" = false
"bert.encoder.layer.{i}.attention.self -> probabilities" = false
"bert.encoder.layer.{i}.attention.self -> 0" = false
"bert.encoder.layer.{i}.attention.output.dense" = false
"bert.encoder.layer.{i}.attention.output" = false
"bert.encoder.layer.{i}.{p:intermediate,output}.dense" = false
"bert.encoder.layer.{i}.intermediate" = false
"bert.encoder.layer.{i}" = false
"cls.predictions" = false
"""
LENGTHS = (29, 7, 1, 18, 7, 12)


def table(folder: Path, text: str) -> Table:
    path = folder / "table.toml"
    path.write_text(text, encoding="utf-8")
    return read_table(path)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(Pair("bert", "BertForPreTraining", BERT), tmp_path_factory.mktemp("unpadded")).directory


@pytest.fixture
def port(checkpoint: Path) -> BertForPreTraining:
    model = porting.load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    model.bert.unpadded = True
    return model


def packed() -> Case:
    """A ragged batch as the port takes it, and the same tokens as the reference takes them: in one row, in blocks.

    Rows are packed by their length, which is written out here once more.
    """
    generator = torch.Generator().manual_seed(5)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    rows = torch.randint(0, 37, mask.shape, generator=generator)
    segments = torch.randint(0, 2, mask.shape, generator=generator)
    order = sorted(range(len(LENGTHS)), key=LENGTHS.__getitem__)

    def in_one_row(values: Tensor) -> Tensor:
        return torch.cat([values[row, : LENGTHS[row]] for row in order])[None]

    owner = in_one_row(torch.arange(len(LENGTHS))[:, None].expand_as(rows))[0]
    blocks = torch.zeros(1, 1, len(owner), len(owner)).masked_fill(owner[:, None] != owner, -1e30)
    theirs = {
        "input_ids": in_one_row(rows),
        "token_type_ids": in_one_row(segments),
        "position_ids": in_one_row(torch.arange(max(LENGTHS)).expand_as(rows)),
        "attention_mask": blocks,
    }
    return Case("6 rows of 1 to 29 tokens, packed", {**theirs, "rows": rows, "mask": mask, "segments": segments})


def proof(checkpoint: Path, port: BertForPreTraining, folder: Path) -> Report:
    return verify(checkpoint, port, table(folder, PACKED), loaded=True, inputs=[packed()], gradients=True, causes=False)


def test_every_layer_is_faithful_on_packed_tokens(checkpoint: Path, port: BertForPreTraining, tmp_path: Path) -> None:
    report = proof(checkpoint, port, tmp_path)
    assert report.verdict == "unproven", (
        report.details()
    )  # the reference returns one long row, and the port padded ones
    assert max(probe.meaning.worst for probe in report.probes) <= 1e-12
    assert [probe.port for probe in report.probes if probe.port.startswith("bert.layers.1")] == [
        *(f"bert.layers.1.attention.{part}" for part in ("query", "key", "value", "output")),
        *(f"bert.layers.1.{part}" for part in ("attention_norm", "intermediate", "activation", "output")),
        "bert.layers.1",
    ]
    assert all(probe.count % sum(LENGTHS) == 0 for probe in report.probes)
    assert [probe.port for probe in report.probes if probe.port.startswith("mlm")][-1] == "mlm"  # real tokens alone
    assert "gradients of mlm: 40 of 40 parameters agree" in report.details()


def test_what_comes_out_of_each_row_is_faithful(checkpoint: Path, port: BertForPreTraining, tmp_path: Path) -> None:
    # Without trials: the pooler of a row that begins with padding reads zeros here, as the module's docstring says.
    report = verify(checkpoint, port, table(tmp_path, PER_ROW), loaded=True, gradients=True, trials=False)
    assert report.verdict == "faithful", str(report)
    assert report.learned is not None
    assert not report.learned.differs
    inner = [probe.port for probe in report.probes if not probe.port.startswith(".")]
    assert inner == ["bert.pooler", "nsp"]
    assert "8 rows of 1 to 24 tokens, padded" in report.cases


@pytest.mark.slow
def test_a_token_that_sees_another_row_is_caught(
    checkpoint: Path, port: BertForPreTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of one length taken for one row of twice the length."""
    plain = Rows.__init__

    def merged(self: Rows, attention_mask: Tensor) -> None:
        plain(self, attention_mask)
        self.groups = [(1, rows * length) for rows, length in self.groups]

    monkeypatch.setattr(Rows, "__init__", merged)
    report = proof(checkpoint, port, tmp_path)
    assert report.verdict == "different"
    assert report.guilty[0].port == "bert.layers.0.attention.output"


@pytest.mark.slow
def test_positions_that_go_on_counting_are_caught(
    checkpoint: Path, port: BertForPreTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row begins with the first position: a packed model that forgets it sees it in its embeddings."""
    plain = Rows.pack

    def counted(self: Rows, padded: Tensor) -> Tensor:
        found = plain(self, padded)
        positions = padded.dtype == torch.long and torch.equal(padded[0], torch.arange(padded.shape[1]))
        return torch.arange(found.shape[1])[None] % 29 if positions else found

    monkeypatch.setattr(Rows, "pack", counted)
    report = proof(checkpoint, port, tmp_path)
    assert report.verdict == "different"
    assert report.guilty[0].port == "bert.embeddings"


@pytest.mark.slow
def test_a_row_that_comes_back_in_the_place_of_another_is_caught(
    checkpoint: Path, port: BertForPreTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed by length and unpacked by number."""
    plain = Rows.unpack
    monkeypatch.setattr(Rows, "unpack", lambda self, values: plain(self, values).flip(0))
    report = verify(checkpoint, port, table(tmp_path, PER_ROW), loaded=True, causes=False)
    assert report.verdict == "different"
    assert report.guilty[0].port == "bert.pooler"


def test_the_logits_of_masked_words_are_those_of_the_reference_at_real_tokens(
    checkpoint: Path, port: BertForPreTraining
) -> None:
    """In float64, against transformers, which scores padding as well; the head is given no padding."""
    reference = transformers.BertForPreTraining.from_pretrained(checkpoint, dtype=torch.float64)  # in eval mode
    port.double()
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(0, 37, mask.shape, generator=torch.Generator().manual_seed(9))
    scored: list[torch.Size] = []
    port.mlm.register_forward_hook(lambda module, given, made: scored.append(made.shape))
    with torch.no_grad():
        meant = reference(input_ids=ids, attention_mask=mask)
        found = port(ids, mask)
    assert scored == [(1, sum(LENGTHS), meant.prediction_logits.shape[-1])]
    real = mask.bool()
    scale = meant.prediction_logits[real].abs().max()
    assert (found.mlm_logits - meant.prediction_logits)[real].abs().max() <= 1e-12 * scale
    assert (found.nsp_logits - meant.seq_relationship_logits).abs().max() <= 1e-12 * scale
    assert not found.mlm_logits[~real].any()


def test_logits_that_come_back_to_another_place_are_caught(
    checkpoint: Path, port: BertForPreTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's tokens packed by number, and unpacked by length."""
    plain = Rows.pack
    monkeypatch.setattr(
        Rows,
        "pack",
        lambda self, padded: plain(self, padded).flip(1) if padded.is_floating_point() else plain(self, padded),
    )
    report = proof(checkpoint, port, tmp_path)
    assert report.verdict == "different"
    assert report.guilty[0].port.startswith("mlm")

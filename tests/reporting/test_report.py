"""The report: every field, as data for JSON, and as a person reads it."""

from __future__ import annotations

import inspect
import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from porting.causes.finding import Finding
from porting.checkpoint import open_checkpoint
from porting.loading import load
from porting.models.bert_heads import BertForPreTraining
from porting.reporting.outcome import listed
from porting.reporting.report import spelled_call
from porting.reporting.terminal import as_text, render
from porting.tracing.code_coverage import INPUTS, Branch
from porting.trials.scope import Kind, Result, Scope, Status
from porting.verification import Cost, Probe, Report, Shown, Unseen, View, verify
from tests.verification.flags import complete_but_for_flags
from tests.verification.planted import BUGS, ROUNDS_WORSE, Bug


@pytest.fixture(scope="module")
def faithful(checkpoint: Path) -> Report:
    return verify(checkpoint, dtypes=(torch.float32, torch.bfloat16))


def with_bug(checkpoint: Path, bug: Bug) -> Report:
    model = load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    bug.plant(model)
    return verify(checkpoint, model, loaded=True)


def test_every_field_says_what_was_done(checkpoint: Path, faithful: Report) -> None:
    assert faithful.source == str(checkpoint)
    assert faithful.reference == "transformers.BertForPreTraining"
    assert faithful.port == "porting.models.bert_heads.BertForPreTraining"
    assert faithful.table.endswith("bert.toml")
    assert faithful.verdict == "faithful"
    assert faithful.faithful
    assert complete_but_for_flags(faithful)
    assert faithful.guilty == faithful.imprecise == ()
    assert faithful.skipped == faithful.warnings == ()
    assert faithful.first_difference is None
    assert faithful.cases == ("8 rows of 1 to 24 tokens, padded", "2 rows of 7 tokens without token_type_ids")
    assert faithful.seed == 0
    assert set(faithful.environment) == {"python", "porting", "torch", "transformers", "safetensors"}
    assert faithful.environment["torch"] == torch.__version__
    assert set(faithful.noise) == {"float32", "bfloat16"}
    assert torch.finfo(torch.float32).eps / 2 < faithful.noise["float32"] < 1e-4 < faithful.noise["bfloat16"] < 1


def test_every_part_of_the_model_is_probed(faithful: Report) -> None:
    """Embeddings; q, k, v, scores, probabilities, context, the other linear layers, what becomes of each; heads."""
    core = ("scores", "probabilities", "0")
    inner = [f"attention.{one}" for one in ("query", "key", "value", *(f"core -> {one}" for one in core))]
    inner += ["attention.output", "attention_norm", "intermediate", "activation", "output"]
    layers = [name for i in range(3) for name in (*(f"bert.layers.{i}.{one}" for one in inner), f"bert.layers.{i}")]
    returned = [". -> mlm_logits", ". -> nsp_logits"]
    expected = ["bert.embeddings", *layers, "bert.pooler", "mlm", "nsp", *returned]
    assert [probe.port for probe in faithful.probes] == expected
    for probe in faithful.probes:
        assert probe.meaning.isolated is not None
        assert set(probe.rounding) == {"float32", "bfloat16"}
        assert all(view.isolated is not None and view.end_to_end > 0 for view in probe.rounding.values())
        assert probe.bound.end_to_end >= 1e-12
        assert probe.count > 0
        assert not probe.random
        assert not probe.lowered


def test_the_cost_is_reported(checkpoint: Path) -> None:
    found = verify(checkpoint, dtypes=(torch.float32, torch.bfloat16), trials=False)
    cost = found.cost
    paired = 3  # what they return: the reference is tried first, and then both are paired
    each = 3 + 2 * 4  # of a case: float64 thrice, and each working dtype twice on both sides
    tried = 2  # batches of the search, once on each side; one of them was kept
    assert len(found.cases) == 2
    assert cost.passes == paired + 2 * each + 2 * tried
    assert 0 < cost.forwards < cost.total
    assert cost.ratio == cost.total / cost.forwards
    assert cost.loading > 0
    assert cost.memory > 100e6


@pytest.mark.slow
def test_it_is_plain_data(checkpoint: Path, faithful: Report) -> None:
    data = json.loads(json.dumps(faithful.to_dict(), allow_nan=False))
    assert data["verdict"] == "faithful"
    assert data["guilty"] == []
    assert data["bounds"] == {"meaning": 1e-12, "rounding": 4.0}
    assert data["probes"][0]["port"] == "bert.embeddings"
    assert data["probes"][0]["rounding"]["float32"].keys() == {"end_to_end", "isolated"}
    assert data["shown"]["activation"]["nsp.bias"] == 1.0
    assert data["cost"].keys() == {"loading", "forwards", "total", "passes", "memory"}
    guilty = with_bug(checkpoint, BUGS[1]).to_dict()
    assert guilty["verdict"] == "different"
    assert guilty["guilty"] == ["bert.layers.1.attention.key"]


def test_infinite_numbers_become_texts() -> None:
    view = View(end_to_end=float("inf"), isolated=float("nan"))
    report = small(probes=(Probe(reference="a", port="a", meaning=view),))
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["probes"][0]["meaning"] == {
        "end_to_end": "inf",
        "isolated": "nan",
    }


def small(**changes: object) -> Report:
    fields: dict[str, object] = {
        "source": "weights",
        "reference": "transformers.M",
        "port": "mine.M",
        "table": "t.toml",
        "probes": (
            Probe(
                reference="enc.0",
                port="layers.0",
                meaning=View(end_to_end=2e-15, isolated=1e-15),
                rounding={"float32": View(end_to_end=1.25, isolated=1.5)},
                count=1000,
            ),
        ),
        "skipped": (),
        "shown": Shown(activation={"layers.0.weight": 1.0}, copy=(), nothing=()),
        "noise": {"float32": 3e-7},
        "cases": ("2 rows",),
        "unseen": (),
        "seed": 3,
        "environment": {"torch": "9"},
        "warnings": (),
        "cost": Cost(loading=1.0, forwards=2.0, total=3.0, passes=7, memory=2_500_000_000),
        **changes,
    }
    return Report(**fields)  # type: ignore[arg-type]  # each field with its own type, above


def test_a_person_reads_the_verdict_first() -> None:
    assert as_text(small()) == (
        "FAITHFUL  mine.M computes what transformers.M computes from weights\n"
        "ran: eval mode; 2 rows\n"
        "not run: gradients, training mode and autocast; trials beyond the batches above\n"
        "float64: off by 2.0e-15 of the activations' scale at most (tolerance 1e-12)\n"
        "float32: 1.5x the reference's own rounding error at most (tolerance 4x), "
        "which is up to 3.0e-07 of the scale\n"
        "\n"
        "where    float64  isolated  float32  isolated\n"
        "layer 0    2e-15     1e-15     1.2x      1.5x  same\n"
        "\n"
        "proven by activation: 1 of 1 parameters and buffers\n"
        "inputs: 2 rows; seed 3\n"
        "7 forward passes in 2.0 s, 3.0 s with all comparisons; loading 1.0 s; 2.5 GB at most\n"
        "torch 9\n"
    )


def test_the_summary_counts_what_the_full_text_names() -> None:
    branches = tuple(
        Branch(where=f"m.py:{line}", condition="if x:", function="f", lines=1, first=line, why=INPUTS)
        for line in (3, 9)
    )
    unseen = tuple(Unseen(f"property {number}", "why") for number in range(4))
    scope = Scope(
        dtypes=("float64",),
        lengths=(1, 2, 3, 63, 64),
        rows=(1, 17),
        shapes=((1, 1), (1, 2), (1, 3), (1, 63), (1, 64), (17, 64)),
        masks=("no padding", "right padding"),
        tokens=(11, 11),
        results=(Result(kind=Kind.LENGTH, what="1 token", batch="", status=Status.SAME),),
    )
    report = small(branches=branches, unseen=unseen, scope=scope)
    assert str(report) == report.summary()
    assert report.summary().splitlines() == [
        "FAITHFUL  mine.M computes what transformers.M computes from weights",
        (
            "float64: off by 2.0e-15 of the activations' scale (tolerance 1e-12); "
            "float32: 1.5x the reference's own rounding error (tolerance 4x)"
        ),
        (
            "ran: eval mode, float64; 1 to 3, 63 and 64 tokens, batches of 1 and 17 (6 of 10 combinations), "
            "2 kinds of masks; all 11 token ids"
        ),
        (
            "not run: gradients, training mode and autocast (not asked for); trials beyond the batches above; "
            "property 0; property 1; 2 more that the inputs do not show; 2 branches of the code"
        ),
        "proven by activation: 1 of 1 parameters and buffers",
        "7 forward passes; 4.0 s, 2.5 GB",
    ]
    full = " ".join(report.details().split())
    assert all(str(one) in full for one in unseen)
    assert "masks: none, right" in full


def test_a_named_cause_stands_above_and_not_again_below() -> None:
    probe = Probe(reference="r", port="p", meaning=View(end_to_end=1.0, isolated=1.0), rules=("t.toml:3:1",))
    finding = Finding(
        probes=("p",), difference=1.0, residual=0.0, name="wrong eps", detail="1e-5", what="it is", fix="1e-12"
    )
    text = small(probes=(probe,), noise={}, causes=(finding,)).summary()
    assert text.splitlines()[1:4] == ["  module: p", "  cause: wrong eps (1e-5)", "  fix: 1e-12"]
    assert text.count("wrong eps") == 1
    assert "first wrong module" not in text


def test_what_is_in_a_name_cannot_move_the_cursor() -> None:
    hostile = "a\x1b[2J\u202eb"
    probes = (Probe(reference=hostile, port=hostile, meaning=View(end_to_end=1.0, isolated=1.0), span=(hostile, "c")),)
    report = small(source=hostile, probes=probes, noise={}, warnings=(hostile,), environment={"torch": hostile})
    text = report.details()
    assert text.count("a\\x1b[2J\\u202eb") == 8
    assert text.replace("\n", "").isprintable()


def test_what_was_not_shown_is_said_and_changes_the_verdicts_words() -> None:
    shown = Shown(activation={"a": 0.25}, copy=("layers.0.b", "layers.1.b", "layers.2.b"), nothing=("d",))
    text = small(shown=shown, unseen=(Unseen("the token types", "one segment only"),), skipped=("x -> 1",)).details()
    said = "the token types; 3 parameters (compared by value only); d; the probe x -> 1 float64:"
    assert said in " ".join(text.split())
    assert "proven by activation: 1 of 5 parameters and buffers\n" in text
    assert "  in part: 25 % of a; the rest of them is equal by copy\n" in text
    assert "equal by copy only: layers.{0-2}.b\n" in text
    assert "not shown: d\n" in text
    assert "not shown: the token types (one segment only)\n" in text
    assert "not compared, for lack of a counterpart: x -> 1\n" in text


def test_a_difference_between_the_probes_is_said() -> None:
    probes = (
        Probe(reference="a", port="a", meaning=View(end_to_end=1e-15, isolated=0.0)),
        Probe(reference="b", port="b", meaning=View(end_to_end=1e-3, isolated=0.0)),
    )
    report = small(probes=probes, noise={})
    assert report.verdict == "different"
    assert report.guilty == ()
    text = report.details()
    assert "the first difference shows at b, and no probed module makes it by itself:\n" in text
    assert "look at what happens between the probes, or add some to [probes]" in text


@pytest.mark.slow
def test_the_guilty_module_is_named(checkpoint: Path) -> None:
    text = with_bug(checkpoint, BUGS[1]).details()
    lines = text.splitlines()
    assert lines[0].startswith("DIFFERENT  porting.models.bert_heads.BertForPreTraining does not compute what")
    (row,) = [line for line in lines if line.startswith("layer 1 ")]
    assert row.endswith("<- attention.key")
    assert [line.split()[-1] for line in lines if line.startswith(("layer 0", "bert.embeddings"))] == ["same", "same"]
    assert "first wrong module: bert.layers.1.attention.key" in lines
    assert re.search(r"  given the reference's own inputs it is off by \d\.\de-\d\d of the scale", text)
    assert "  it is compared with bert.encoder.layer.1.attention.self.key" in lines


@pytest.mark.slow
def test_the_key_bias_is_shown_to_be_invisible_end_to_end(checkpoint: Path) -> None:
    """Softmax does not see it: nothing but its own projection differs, and the layer after it is the same again."""
    report = with_bug(checkpoint, BUGS[1])
    assert {probe.port for probe in report.probes if probe.differs} == {"bert.layers.1.attention.key"}
    rows = [line for line in report.details().splitlines() if line.startswith("layer 2")]
    assert rows[0].endswith("same")


@pytest.mark.slow
def test_layers_that_are_right_by_themselves_are_called_so(checkpoint: Path) -> None:
    bug = next(bug for bug in BUGS if bug.name == "tanh GELU")
    rows = [line for line in with_bug(checkpoint, bug).details().splitlines() if line.startswith("layer 2")]
    assert rows[0].endswith("the difference comes from before")


def test_one_row_for_each_probe_when_asked(faithful: Report) -> None:
    text = as_text(faithful, every_probe=True)
    assert re.search(r"^bert\.layers\.2\.attention\.core -> probabilities +\d", text, re.MULTILINE)
    assert "layer 2" not in text


@pytest.mark.slow
def test_colour_where_there_is_a_terminal(checkpoint: Path, faithful: Report) -> None:
    def coloured(report: Report) -> str:
        written = StringIO()
        Console(file=written, width=120, force_terminal=True, color_system="standard").print(render(report))
        return written.getvalue()

    assert "\x1b[1;32mFAITHFUL\x1b[0m" in coloured(faithful)
    assert "\x1b[1;33mIMPRECISE\x1b[0m" in coloured(with_bug(checkpoint, ROUNDS_WORSE))
    text = coloured(with_bug(checkpoint, BUGS[1]))
    assert "\x1b[1;31mDIFFERENT\x1b[0m" in text
    assert "\x1b[1;31m<- attention.key\x1b[0m" in text
    assert "\x1b" not in faithful.details()


@pytest.mark.slow
def test_parts_that_nothing_uses_are_not_called_shown(checkpoint: Path) -> None:
    class Idle(nn.Module):
        """Loads a pooler and never calls it."""

        def __init__(self) -> None:
            super().__init__()
            model = load(checkpoint)
            assert isinstance(model, BertForPreTraining)
            self.bert, self.mlm, self.nsp = model.bert, model.mlm, model.nsp

        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor
        ) -> object:
            self.bert.pooler, pooler = None, self.bert.pooler
            try:
                hidden = self.bert(input_ids, attention_mask, token_type_ids).last_hidden_state
            finally:
                self.bert.pooler = pooler
            return self.mlm(hidden, self.bert.embeddings.word.weight)

    report = verify(checkpoint, Idle())
    unused = ("bert.pooler.dense.weight", "bert.pooler.dense.bias", "nsp.weight", "nsp.bias")
    assert report.faithful
    assert not report.complete
    assert set(report.shown.copy) == set(unused)
    assert set(report.skipped) == {"bert.pooler", "cls.seq_relationship"}
    assert report.idle == ("bert.pooler", "nsp")
    assert "bert.pooler, nsp, which never ran; " in " ".join(report.details().split())


def test_names_are_listed_with_their_outputs_and_the_model_by_a_word() -> None:
    assert listed(["a.0.att -> scores", "a.0.att", "."]) == "a.0.att, a.0.att -> scores, the model itself"
    assert listed([". -> logits", "a.0.b -> 0", "a.0.b -> 1"]) == ". -> logits, a.0.b -> 0/1"


DEFAULTS = {
    name: None if parameter.default is parameter.empty else parameter.default
    for name, parameter in inspect.signature(verify).parameters.items()
}


class Mine(nn.Module):
    """A module of a user's own."""


def build() -> nn.Module:
    return Mine()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "verify('c')"),
        ({"source": Path("a b")}, "verify('a b')"),
        ({"into": Mine(), "table": "mine.toml"}, f"verify('c', {__name__}.Mine(...), 'mine.toml')"),
        ({"into": build, "table": Path("t.toml")}, f"verify('c', {__name__}.build, 't.toml')"),
        ({"into": Mine}, f"verify('c', {__name__}.Mine)"),
        ({"table": "mine.toml", "seed": 3}, "verify('c', table='mine.toml', seed=3)"),
        ({"dtypes": (torch.float32, torch.float16)}, "verify('c', dtypes=(torch.float32, torch.float16))"),
        ({"dtypes": (torch.bfloat16,), "loaded": True}, "verify('c', dtypes=(torch.bfloat16,), loaded=True)"),
        ({"progress": print, "longest": 64}, "verify('c', longest=64)"),
    ],
)
def test_what_differs_from_the_defaults_is_spelled(given: dict[str, Any], expected: str) -> None:
    assert spelled_call("verify", verify, {**DEFAULTS, "source": "c", **given}) == expected


def test_an_open_checkpoint_is_its_place(checkpoint: Path) -> None:
    given = {**DEFAULTS, "source": open_checkpoint(checkpoint)}
    assert spelled_call("porting.verify", verify, given) == f"porting.verify('{checkpoint}')"

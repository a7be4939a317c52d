"""The table that is written: what it compares, in which order, and what speaks for its lines."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from porting.notation.table import parse_table
from porting.suggesting import Verdict, suggest
from porting.suggesting.draft.layer_patterns import Line, indexed
from porting.suggesting.draft.probes import attention_probes, ordered, probes
from porting.suggesting.draft.table_writer import TableDraft, write
from porting.suggesting.search.layouts import CandidateRule, RuleTerm, transformed
from tests.suggesting.oracle import drafted
from tests.suggesting.test_verdicts import Plain
from tests.zoo.per_head import PerHead
from tests.zoo.raw_heads import RawHeads


def section(text: str, name: str) -> list[str]:
    part = next(part for part in text.split("\n\n") if part.startswith(f"[{name}]"))
    return [line for line in part.splitlines()[1:] if not line.startswith("#")]


SHOWN = pytest.mark.parametrize(
    ("kind", "left", "right"),
    [
        (Plain, "-> {}", "layers.{i} -> {}"),
        (RawHeads, "-> {}", "layers.{i} -> {}"),
        (PerHead, "-> {} [b h q k]", "layers.{i}.heads.{h} -> {} [b q k]"),
    ],
)


@pytest.mark.few(1)
@SHOWN
def test_the_draft_compares_attention(source: Path, kind: type[nn.Module], left: str, right: str) -> None:
    assert_compared(drafted(source, kind).text, left, right)


def test_names_that_a_table_cannot_spell_are_dropped_by_what_they_begin_with(source: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "c"))
    held = load_file(folder / "model.safetensors")
    strange = ["with space", "axes [o i]", 'a"]', "brace{i}", "rest{*rest}", "hash#", "back\\slash"]
    save_file({**held, **{name: torch.full((2,), 7.0) for name in strange}}, folder / "model.safetensors")
    table = parse_table(drafted(folder, Plain).text)
    dropped = [str(drop.name) for drop in table.drops]
    assert {"with{*rest}", "axes{*rest}", 'a"{*rest}', "brace{*rest}", "rest{*rest}", "hash#"} <= {*dropped}
    assert all(any(drop.name.read(name) is not None for drop in table.drops) for name in strange)


@pytest.mark.slow
@SHOWN
def test_attention_is_compared_where_it_shows(source: Path, kind: type[nn.Module], left: str, right: str) -> None:
    found = suggest(source, kind)
    assert found.verdict is Verdict.TRUNK, str(found)
    assert_compared(found.text, left, right)


def assert_compared(text: str, left: str, right: str) -> None:
    probes = section(text, "probes")
    for inner in ("scores", "probabilities"):
        expected = f'"bert.encoder.layer.{{i}}.attention.self {left}" = "{right}"'.replace("{}", inner)
        assert expected in probes, text


@pytest.mark.slow
def test_probes_stand_in_the_order_of_the_model(source: Path) -> None:
    found = suggest(source, Plain)
    theirs = [line.split('"')[1] for line in section(found.text, "probes")]
    layer = "bert.encoder.layer.{i}"
    assert theirs == [
        "bert.embeddings.word_embeddings",
        "bert.embeddings.token_type_embeddings",
        "bert.embeddings",
        f"{layer}.attention.self.{{p:query,key,value}}",
        f"{layer}.attention.self -> scores",
        f"{layer}.attention.self -> probabilities",
        f"{layer}.attention.output.dense",
        f"{layer}.attention",
        f"{layer}.intermediate.dense",
        f"{layer}.intermediate",
        f"{layer}.output.dense",
        layer,
        "bert",
    ]


def test_layouts_of_attention_are_told_apart() -> None:
    torch.manual_seed(0)
    value = torch.rand(2, 3, 4, 5, dtype=torch.float64)
    for other, axes in (
        (value.transpose(0, 1), "h b q k"),
        (value.flatten(0, 1), "(b h) q k"),
        (value.transpose(0, 1).flatten(0, 1), "(h b) q k"),
        (value.mT, "b h k q"),
    ):
        port = {"scores": {"a.0": other}, "probabilities": {}}
        reference = {"scores": {"l.0": value}, "probabilities": {}}
        assert attention_probes(port, reference, 1e-9) == [("l.0 -> scores [b h q k]", f"a.0 -> scores [{axes}]")]
        far = {"scores": {"a.0": other + 1e-6}, "probabilities": {}}
        assert attention_probes(far, reference, 1e-9) == []


def test_lines_are_put_in_order_by_the_first_layer() -> None:
    modules: dict[str, Tensor] = dict.fromkeys(["e", "h.0.a", "h.0", "h.1.a", "h.1", ""], torch.zeros(1))
    lines = [(".", "."), ("h.{i}", "b.{i}"), ("h.{i}.a -> scores", "b.{i}.a -> scores"), ("e", "x"), ("h.{i}.a", "b")]
    assert [left for left, _ in ordered(lines, modules)] == ["e", "h.{i}.a -> scores", "h.{i}.a", "h.{i}", "."]


@pytest.mark.slow
def test_what_speaks_for_a_line_can_be_read(source: Path) -> None:
    found = suggest(source, RawHeads)
    told = found.explain("query")
    line, *said = told.splitlines()
    assert line.startswith('"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.weight [(h d) e]"')
    text = " ".join(one.strip() for one in said)
    assert "Place: behind embeddings.norm.weight; in the reference behind bert.embeddings.LayerNorm.weight." in text
    assert "Names: both say query." in text
    assert "Stands for: 6 of the twin's tensors, the first bert.encoder.layer.0.attention.self.query.weight" in text
    assert "off by " in text
    assert "Shown: 100 % of their elements at work." in text
    assert max(map(len, said)) <= 110
    output = found.explain("output.dense.weight")
    assert "Tried: 2 ways that names and shapes leave open; with this one, what meets layers.0.ln1.gamma is" in output
    lost = next(line for line in output.splitlines() if line.startswith("    Lost: "))
    assert "output.dense.weight [(h d) e] = layers.0.W_O [h d e]" in lost
    assert 1e-3 < float(lost.rpartition("off by ")[2].rstrip(".")) < 10
    lines = {line.partition(" = ")[0]: line for line in found.text.splitlines() if " = " in line}
    dense = '"bert.encoder.layer.{i}.attention.output.dense.'
    assert lines[f'{dense}weight [o (h d)]"'].endswith("  # by what it computes")
    assert lines[f'{dense}bias"'].endswith('"'), "the one bias that there is"
    assert found.explain("nowhere") == ""


@pytest.mark.slow
def test_a_head_says_what_the_comments_mean_only_where_there_are_some(source: Path) -> None:
    marked, plain = suggest(source, RawHeads).text, suggest(source, Plain).text
    for text in (marked, plain):
        meant = any("  # " in line for line in text.splitlines() if line.startswith(('"', "[[")))
        assert ("Lines with a comment" in text) == meant
    assert "# written into the module, whatever a config says" in plain


def test_an_index_counts_from_zero_whatever_the_names_begin_with() -> None:
    assert indexed([("conv1.w", "stem.2"), ("conv2.w", "stem.4")]) == [("conv{i+1}.w", "stem.{2*i+2}")]
    assert indexed([("h.2.n", "b.1.n"), ("h.0.n", "b.0.n")]) == [("h.{2*i}.n", "b.{i}.n")]


def test_numbers_with_a_gap_are_no_index() -> None:
    names = [("h.0.n", "b.0.n"), ("h.1.n", "b.1.n"), ("h.3.n", "b.2.n")]
    assert indexed(names) == names


def test_a_source_stands_in_tensors_once() -> None:
    def line(target: str) -> Line:
        return Line(sources=(("a", ""),), targets=((target, ""),))

    text = write(TableDraft(name="t", description="", lines=[line("b"), line("b"), line("c")]))
    assert text.count('"a" = "b"') == 1
    assert '[[rule]]\nsource = "a"\ntarget = "c"' in text


def test_what_fused_projections_compare_is_compared_once() -> None:
    """A part that takes the fused one apart returns the query first."""
    q, k, v = (torch.randn(2, 3, 4) for _ in range(3))
    reference = {"": v, "attn": v, "attn.q": q, "attn.k": k, "attn.v": v}
    port = {"": v, "mix.qkv": torch.cat([q, k, v], -1), "mix": q}
    theirs = RuleTerm("attn.{p:q,k,v}.bias", tuple(f"attn.{p}.bias" for p in "qkv"), "o")
    move = CandidateRule((theirs,), (RuleTerm("mix.qkv.bias", ("mix.qkv.bias",), "(p o)"),))
    lines = probes(port, reference, [move])
    assert ("attn.{p:q,k,v} [b t o]", "mix.qkv [b t (p o)]") in lines
    assert not [line for line in lines if line[0] == "attn.q"]


@pytest.mark.parametrize(("width", "fits"), [(1, False), (2, True)])
def test_a_factor_without_a_value_is_a_candidate_that_does_not_fit(width: int, fits: bool) -> None:
    """As Bessel's correction has none for a norm of one number."""
    terms = ((RuleTerm("theirs", ("theirs",), "e"),), (RuleTerm("ours", ("ours",), "e"),))
    move = CandidateRule(*terms, scale=f"({width} / ({width} - 1)) ** 0.5")
    made = transformed(move, {"theirs": torch.ones(width)}, {"ours": torch.ones(width)}, {}, {})
    assert (made is not None) is fits

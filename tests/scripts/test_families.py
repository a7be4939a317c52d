"""The page of families says what the tables say, and the grid says what the proofs say."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer import Exit

from porting.notation.table import read_table
from porting.tables import shipped
from scripts import families
from scripts.families import PAGE, Proof, grids, main, prove, show
from scripts.families_page import modules, page, tables
from tests.families.pairs import BERT, PAIRS, Pair
from tests.models.conftest import one_thread

__all__ = ["one_thread"]  # a fixture that is used by all

# Query for key: every shape fits.
SWAPPED = """
extends = "bert"
[mapping]
name = "bert_into_disorder"
[tensors]
"bert.encoder.layer.{i}.attention.self.{p:query,key,value}.{w:weight,bias}" = \
"bert.layers.{i}.attention.{p:key,query,value}.{w:weight,bias}"
"""
REFUSING = 'extends = "bert"\n[mapping]\nname = "bert_into_nothing"\n[require]\nhidden_act = ["relu"]\n'


def table(folder: Path, text: str) -> str:
    path = folder / "table.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def shown(pairs: list[Pair], width: int = 100) -> tuple[bool, str]:
    out = io.StringIO()
    faithful = show(pairs, Console(file=out, width=width), Console(file=io.StringIO()))
    return faithful, out.getvalue()


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_page_is_what_the_tables_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m scripts.families --write"


def test_the_page_is_written_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "PAGE", tmp_path / "families.md")
    main(write=True)
    assert (tmp_path / "families.md").read_text(encoding="utf-8") == page()


def test_every_table_has_its_section_with_what_it_gives_up() -> None:
    text = page()
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    for path in shipped():
        one = read_table(path)
        section = sections[one.name]
        for reason in [*(drop.reason for drop in one.drops if drop.equals is None), *(new.reason for new in one.fresh)]:
            assert reason in section
        for architecture in one.architectures:
            assert architecture.name in section
        for field in one.require:
            assert f"`{field}` is " in section
        for rule in one.rules:
            if not rule.exact or rule.fill is not None:
                assert f"`{rule.sources[0]}`" in section


def test_a_requirement_is_told_with_the_comment_beside_it() -> None:
    """Also one that another table says, with its prefix."""
    text = page()
    assert "- `inner_group_num` is `1`: a group is one layer\n" in text
    assert text.count("- `pad_token_id` is `1`: the positions are counted from the one after it\n") >= 4


def test_modules_of_one_file_get_different_names() -> None:
    found = modules(tables())
    assert [found[f"bert{one}"] for one in ("", "_into_encoder", "_into_fused", "_into_torch_encoder")] == [
        "bert",
        "encoder (per_head)",
        "encoder (fused)",
        "torch_encoder",
    ]


def test_every_table_is_proven() -> None:
    assert {pair.table for pair in PAIRS} == {path.stem for path in shipped()}


# ---------------------------------------------------------------------------------------------------------- the grid


def test_a_faithful_pair(tmp_path: Path) -> None:
    proof = prove(Pair("bert", "BertModel", BERT), "bert")
    assert (proof.verdict, proof.said, proof.family, proof.module) == ("faithful", "", "bert", "bert")
    assert 0 < proof.meaning <= 1e-12
    assert 0.5 < proof.rounding <= 4


@pytest.mark.slow
def test_one_that_is_not_faithful_is_named_and_fails_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [Pair("bert", "BertModel", BERT), Pair(table(tmp_path, SWAPPED), "BertModel", BERT)]
    proofs: dict[str, Proof] = {}  # each pair is proven once

    def once(pair: Pair, module: str) -> Proof:
        proofs[pair.table] = proofs.get(pair.table) or prove(pair, module)
        return proofs[pair.table]

    monkeypatch.setattr(families, "prove", once)
    faithful, text = shown(pairs)
    assert not faithful
    assert "different: " in text
    assert "layers.0.attention.query" in text
    assert "1 of 2 checkpoints are computed faithfully" in text

    monkeypatch.setattr(families, "PAIRS", pairs)
    with pytest.raises(Exit) as failed:
        main()
    assert failed.value.exit_code == 1
    main(["bert"])
    assert "1 of 1 checkpoints are computed faithfully" in capsys.readouterr().out


def test_one_that_cannot_be_loaded_is_refused_with_its_reason(tmp_path: Path) -> None:
    faithful, text = shown([Pair(table(tmp_path, REFUSING), "BertModel", BERT)])
    assert not faithful
    assert "refused" in text
    assert "hidden_act = 'gelu'" in text
    assert "0 of 1" in text


@pytest.mark.slow
def test_what_rounding_explains_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("bert", "BertModel", BERT)
    assert "* no" not in shown([pair])[1]

    def lowered(pair: Pair, module: str) -> Proof:
        return replace(prove(pair, module), meaning=3e-7, explained=True)

    monkeypatch.setattr(families, "prove", lowered)
    faithful, text = shown([pair])
    assert faithful
    assert re.search(r"3e-07\* \d\.\dx", text)
    assert "\n* no more than rounding explains" in text


def proof(family: str, module: str, verdict: str, meaning: float, rounding: float) -> Proof:
    pair = Pair(family, "Model", {})
    return Proof(pair=pair, family=family, module=module, verdict=verdict, meaning=meaning, rounding=rounding)


def drawn(proofs: list[Proof], width: int) -> list[str]:
    """The lines of each grid."""
    texts = []
    for grid in grids(proofs, width):
        out = io.StringIO()
        Console(file=out, width=width).print(grid)
        texts.append("\n".join(" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip()))
    return texts


def test_a_cell_has_the_worst_of_its_checkpoints() -> None:
    some = [
        proof("bert", "bert", "faithful", 2e-15, 1.25),
        proof("bert", "bert", "imprecise", 0.0, 7.5),
        proof("gpt", "language_model", "different", 0.5, 3.0),
    ]
    assert drawn(some, 80) == [
        "language\nfamily bert model\nbert imprecise\n2e-15 7.5x\ngpt different\n5e-01 3.0x",
    ]


def test_a_narrow_screen_gets_several_grids_with_their_own_families() -> None:
    some = [
        proof("bert", "bert", "faithful", 0.0, 1.0),
        proof("gpt", "gpt", "faithful", 0.0, 1.0),
        proof("bert", "encoder", "faithful", 0.0, 2.0),
    ]
    assert drawn(some, 40) == [
        "family bert encoder\nbert faithful faithful\n0 1.0x 0 2.0x",
        "family gpt\ngpt faithful\n0 1.0x",
    ]

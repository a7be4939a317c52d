"""The gallery of real conversions: its tables, its page, and that a trial tells an exact conversion from another."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer

from porting import read_table
from scripts.conversions import __main__ as conversions
from scripts.conversions import trial
from scripts.conversions.case import Case, Pinned, Script, Sources, drawn
from scripts.conversions.gallery import MAKERS, PAGE, Row, render
from scripts.conversions.trial import TABLES, try_case

LISTED = re.findall(r"\[(\w+)\]\(\.\./scripts/conversions/tables/\1\.toml\)", PAGE.read_text(encoding="utf-8"))


def test_the_page_lists_every_table_once() -> None:
    assert sorted(LISTED) == sorted(file.stem for file in TABLES.glob("*.toml"))
    assert len(LISTED) == len(MAKERS)


@pytest.mark.parametrize("file", sorted(TABLES.glob("*.toml")), ids=lambda file: file.stem)
def test_every_table_is_read(file: Path) -> None:
    assert read_table(file).name == file.stem


TABLE = """[mapping]
name = "own"

[tensors]
"a.{i}.qkv [(p o) e]" = "b.{i}.{p:q,k} [o e]"
"""


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(trial, "TABLES", tmp_path)
    (tmp_path / "own.toml").write_text(TABLE)
    torch.manual_seed(0)
    source = drawn({"a.{i}.qkv": (4, 3)}, i=2)
    made = {f"b.{i}.{p}": source[f"a.{i}.qkv"][2 * n : 2 * n + 2] for i in range(2) for n, p in enumerate("qk")}
    return Case(project="own", title="own", table="own", lines=9, source=source, made=made, returned=source)


def test_an_exact_conversion_is_called_so(case: Case) -> None:
    found = try_case(case)
    assert (found.verdict, found.forward, found.back, found.own_back, found.lines) == (*("exact",) * 4, 4)


def test_another_value_name_or_dtype_is_told(case: Case) -> None:
    swapped = {**case.made, "b.0.q": case.made["b.0.k"], "b.0.k": case.made["b.0.q"]}
    found = try_case(replace(case, made=swapped))
    assert found.verdict == "different"
    assert found.forward == "different: b.0.q, b.0.k"
    assert found.back == "different: a.0.qkv"
    assert try_case(replace(case, made={**case.made, "c": torch.ones(1)})).forward == "without c"
    halves = {name: tensor.half() for name, tensor in case.made.items()}
    assert try_case(replace(case, made=halves)).forward.startswith("different: b.0.q")


def test_a_way_back_that_lacks_a_tensor_is_in_part(case: Case) -> None:
    (trial.TABLES / "own.toml").write_text(TABLE + '\n[drop]\n"mask" = "not needed"\n')
    found = try_case(replace(case, source={**case.source, "mask": torch.ones(1)}, returned=None))
    assert (found.verdict, found.forward, found.back) == ("in part", "exact", "without mask")
    page = render([Row(case=case, outcome=found, version="1.0")])
    assert "1 conversions: 0 are exact in both directions, 1 in part" in page
    assert "back: without mask" in page


def test_the_functions_of_a_script_run_without_what_it_imports(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "import nowhere\n\nNAMES = {'a': 'b'}\n\n\n"
        "def rename(x: nowhere.T):\n    return {NAMES[k]: v for k, v in x.items()}\n\n\nrename(1)\n"
    )
    script = Script([file])
    assert script.rename({"a": 1}) == {"b": 1}
    assert script.lines("NAMES", "rename") == 3


def test_the_classes_of_a_script_run_with_what_stands_for_their_imports(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import nowhere\n\n@nowhere.register\nclass Model(Base):\n    def sanitize(self, one):\n"
        "        return mx.stack(one)\n\nclass Other(Unknown):\n    pass\n"
    )
    script = Script([file], {"Base": object, "mx": torch})
    assert script.Model().sanitize([torch.ones(2), torch.zeros(2)]).shape == (2, 2)
    assert script.lines("Model.sanitize") == 2
    assert "Other" not in script.names


def test_files_that_no_package_has_are_taken_from_their_repositories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = Pinned("owner/name", "abc", {"src/model.py": "models/model.py"}, "abc")
    monkeypatch.setattr(conversions, "PINNED", {"own": pinned})
    (tmp_path / "owner/name/abc/src").mkdir(parents=True)
    (tmp_path / "owner/name/abc/src/model.py").write_text("A = 1\n")
    conversions.take_files(tmp_path / "sources", tmp_path.as_uri())
    assert (tmp_path / "sources/own/models/model.py").read_text() == "A = 1\n"


def test_one_conversion_needs_the_code_of_its_project_alone(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(sources: Sources) -> Case:
        return Case(**vars(sources.script("elsewhere/convert.py")))

    monkeypatch.setattr(conversions, "MAKERS", (without, lambda _: case))
    with pytest.raises(typer.Exit) as ended:
        conversions.main(tmp_path, ["own"])
    assert ended.value.exit_code == 0
    assert capsys.readouterr().out.endswith("1 of 1 exact in both directions\n")
    with pytest.raises(typer.BadParameter, match=r"other: no table of that name, or .* lacks its code"):
        conversions.main(tmp_path, ["own", "other"])
    with pytest.raises(FileNotFoundError):
        conversions.main(tmp_path)

"""The plugin, in pytest runs of its own."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
import torch

from porting.pytest_plugin import _fits
from porting.verification import verify
from tests.cli.modules import OWN_MODEL, write_own
from tests.guards.tree import ROOT
from tests.small_checkpoint import write_checkpoint

pytest_plugins = ["pytester"]

PLUGIN = ("-p", "porting.pytest_plugin")

SUITE = """
import own_model
import pytest


def test_faithful(porting_verify):
    report = porting_verify("c", own_model.build, "own.toml")
    assert report.faithful


def broken(config):
    model = own_model.build(config)
    model.blocks[1].norm1.eps = 1e-3
    return model


@pytest.mark.parametrize("name", ["../a/b<c>", "\\u202e" + "x" * 200])
def test_broken(porting_verify, name):
    porting_verify("c", broken, table="own.toml")


@pytest.mark.porting("c", into=own_model.build, table="own.toml")
def test_marked():
    pass


@pytest.mark.porting("c", into=broken, table="own.toml")
def test_marked_and_broken():
    raise AssertionError("the body runs after the proof")
"""


@pytest.fixture(scope="module", autouse=True)
def everything_imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run in this process forgets what it imported, and torch and transformers cannot be imported a second time."""
    verify(write_checkpoint(tmp_path_factory.mktemp("imported") / "c")).to_html()


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with a checkpoint, a model and a table; plugins come by name alone, installed or not."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytester.path), str(ROOT)]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.delenv("CI", raising=False)  # there pytest prints whole messages in its summary once more
    monkeypatch.setattr(sys, "path", [str(pytester.path), *sys.path])
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    write_checkpoint(pytester.path / "c")
    write_own(pytester.path)
    return pytester


@pytest.mark.slow
def test_under_xdist_each_failure_has_its_report_and_its_page(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_port=SUITE)
    done = suite.runpytest_subprocess(*PLUGIN, "-p", "xdist", "-n", "2", "--porting-html", "pages", "-rA", "-Wdefault")
    done.assert_outcomes(passed=2, failed=3)
    text = done.stdout.str()
    assert text.count("DIFFERENT  own_model.Encoder does not compute what transformers.Bert") >= 3
    assert text.count("first wrong module: blocks.1.norm1") == 3
    assert "Traceback" not in text
    assert "def broken" not in text
    assert "the body runs after the proof" not in text
    pages = {Path(page) for page in re.findall(r"the report as a page: (.*\.html)", text)}
    assert len(pages) == 3
    assert set((suite.path / "pages").iterdir()) == pages
    for page in pages:
        assert re.fullmatch(r"[A-Za-z0-9_-]{1,140}\.html", page.name)
        assert "gw" in page.name
        assert "first wrong module" in page.read_text()


@pytest.mark.slow
def test_no_traceback_and_no_page_where_none_was_asked_for(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_port=SUITE)
    done = suite.runpytest_inprocess(*PLUGIN, "-k", "marked_and_broken", "--junit-xml", "junit.xml")
    done.assert_outcomes(failed=1, deselected=4)
    done.stdout.fnmatch_lines(
        ["*test_marked_and_broken*", "DIFFERENT  own_model.Encoder*", "*pytest --porting-html DIR"], consecutive=False
    )
    done.stdout.no_fnmatch_line("*_prove*")
    done.stdout.no_fnmatch_line("E  *")
    assert list(suite.path.rglob("*.html")) == []
    assert '<property name="porting_verdict" value="different"' in (suite.path / "junit.xml").read_text()


@pytest.mark.slow
def test_the_folder_of_pages_can_be_configured(suite: pytest.Pytester) -> None:
    suite.makeini("[pytest]\nporting_html = kept/pages\n")
    suite.makepyfile(
        test_port="""
        import own_model

        def broken(config):
            model = own_model.build(config)
            model.blocks[0].norm2.eps = 1e-3
            return model

        def test_moves(porting_verify, tmp_path, monkeypatch):
            monkeypatch.chdir(tmp_path)
            for _ in range(2):
                try:
                    porting_verify(PLACE / "c", broken, PLACE / "own.toml")
                except BaseException as error:
                    message = str(error)
            assert message.endswith("-2.html"), message
        """.replace("PLACE", f"__import__('pathlib').Path({str(suite.path)!r})")
    )
    suite.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=1)
    first, second = sorted((suite.path / "kept" / "pages").iterdir(), key=lambda path: len(path.name))
    assert second.name == first.name.replace(".html", "-2.html")


def test_what_cannot_be_verified_is_said_in_one_message(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_port="""
        import own_model
        import pytest

        def test_no_table(porting_verify):
            porting_verify("c", own_model.build, "own.tml")

        def test_no_checkpoint(porting_verify):
            porting_verify("./nowhere", own_model.build, "own.toml")

        def test_no_such_argument(porting_verify):
            porting_verify("c", own_model.build, tabel="own.toml")

        @pytest.mark.porting
        def test_nothing_given():
            pass
        """
    )
    done = suite.runpytest_inprocess(*PLUGIN)
    done.assert_outcomes(failed=4)
    text = done.stdout.str()
    assert "the port cannot be verified:\n  'own.tml' is neither a file nor a bundled table" in text
    assert "  ./nowhere" in text
    assert "the port is not verified: got an unexpected keyword argument 'tabel'" in text
    assert "it is called as porting.verify is" in text
    assert "the port cannot be verified:\n  neither a checkpoint nor a reference was given" in text
    done.stdout.no_fnmatch_line("*During handling*")
    done.stdout.no_fnmatch_line("*Traceback*")
    done.stdout.no_fnmatch_line("*pytest_plugin.py*")


WRONG = [
    "3", "['c']", "'c', 3", "'c', build, b'own.toml'", "'c', build, dtypes='float32'", "'c', build, dtypes=['float32']",
    "'c', build, seed=1.5", "'c', build, seed=None", "'c', build, steps='3'", "'c', build, architecture=['BertModel']",
    "'c', build, reference=b'x'", "'c', build, inputs=[1]", "'c', build, autocast='bfloat16'", "'c', build, progress=3",
    "'c', build, revision=3", "'c', build, causes='no'", "'c', build, trials=()", "'c', build, loaded='yes'",
]  # fmt: skip
"""Arguments of the marker, one of which is of another type than porting.verify takes."""


def test_an_argument_of_a_wrong_type_is_named(suite: pytest.Pytester) -> None:
    markers = "\n".join(
        f"@pytest.mark.porting({given})\ndef test_{number}(): pass\n" for number, given in enumerate(WRONG)
    )
    suite.makepyfile(test_port=f"import pytest\nfrom own_model import build\n\n{markers}")
    done = suite.runpytest_inprocess(*PLUGIN)
    done.assert_outcomes(failed=len(WRONG))
    text = done.stdout.str()
    assert text.count("the port is not verified: ") >= len(WRONG)
    assert "source is of type int, expected str | PathLike[str] | Checkpoint | None" in text
    assert "dtypes is of type list, expected Sequence[dtype]" in text
    assert "seed is of type float, expected int" in text
    assert "Error" not in text
    done.stdout.no_fnmatch_line("*pytest_plugin.py*")


def test_an_argument_of_a_like_type_is_taken() -> None:
    hints = get_type_hints(verify)
    taken = {
        "source": Path("c"), "into": dict, "dtypes": (torch.float32,), "seed": np.int64(3), "longest": True,
        "causes": 3, "inputs": [{"ids": 1}], "autocast": torch.bfloat16, "progress": print, "revision": None,
    }  # fmt: skip
    assert [name for name, value in taken.items() if not _fits(value, hints[name])] == []


def test_a_builder_or_a_forward_that_ends_the_program_fails_the_test_alone(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_port="""
        import own_model
        import pytest

        class Stop(BaseException):
            pass

        ENDS = [SystemExit(0), Stop("x"), GeneratorExit()]

        @pytest.mark.parametrize("place", ["build", "forward"])
        @pytest.mark.parametrize("error", ENDS, ids=["exit", "stop", "generator"])
        def test_ends(porting_verify, place, error):
            def fail(*args, **kwargs):
                raise error

            def build(config):
                model = own_model.build(config)
                model.forward = fail
                return model

            porting_verify("c", fail if place == "build" else build, "own.toml")

        def test_skips(porting_verify):
            porting_verify("c", lambda config: pytest.skip("no weights here"), "own.toml")
        """
    )
    done = suite.runpytest_inprocess(*PLUGIN)
    done.assert_outcomes(failed=6, skipped=1)
    text = done.stdout.str()
    for said in ("SystemExit: 0", "Stop: x", "GeneratorExit"):
        assert text.count(f"the port cannot be verified:\n  {said} (at ") == 2
    done.stdout.no_fnmatch_line("*pytest_plugin.py*")


def test_a_file_in_the_place_of_the_folder_is_refused(suite: pytest.Pytester) -> None:
    done = suite.runpytest_inprocess(*PLUGIN, "--porting-html", "own.toml")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: --porting-html: *own.toml is a file, and a folder is needed"])


@pytest.mark.slow
def test_a_page_that_cannot_be_written_does_not_hide_the_report(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_port=SUITE)
    done = suite.runpytest_inprocess(*PLUGIN, "-k", "marked_and_broken", "--porting-html", "c/config.json/pages")
    done.assert_outcomes(failed=1, deselected=4)
    done.stdout.fnmatch_lines(["DIFFERENT *", "the report as a page: it cannot be written: *"])


@pytest.mark.slow
def test_a_hub_checkpoint_is_opened_once(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_port="""
        import porting.checkpoint
        import pytest

        @pytest.fixture
        def opened(monkeypatch, request):
            real, seen = porting.checkpoint.open_checkpoint, request.config.stash.setdefault("seen", [])
            monkeypatch.setattr(
                porting.checkpoint, "open_checkpoint", lambda name, **more: seen.append(name) or real("c")
            )
            return seen

        @pytest.mark.parametrize("time", [1, 2])
        def test_twice(porting_verify, opened, time):
            porting_verify("someone/somewhat")
            assert opened == ["someone/somewhat"]
        """
    )
    suite.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=2)


def test_loading_the_plugin_costs_nothing(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_light="""
        import sys

        def test_light(pytestconfig):
            assert pytestconfig.pluginmanager.has_plugin("porting.pytest_plugin")
            heavy = {"torch", "transformers", "numpy", "matplotlib", "jinja2", "rich", "safetensors"}
            assert heavy & set(sys.modules) == set()
        """
    )
    suite.runpytest_subprocess(*PLUGIN, "--strict-markers", "-Werror").assert_outcomes(passed=1)
    shown = suite.runpytest_subprocess(*PLUGIN, "--markers", "--fixtures")
    shown.stdout.fnmatch_lines(["@pytest.mark.porting(source, into=None, table=None, ...): prove a port*"])


def test_an_installation_tells_pytest_of_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"porting": "porting.pytest_plugin"}


@pytest.mark.slow
def test_the_page_shows_what_works(suite: pytest.Pytester) -> None:
    """Both examples of docs/pytest.md, with the model of these tests in the place of the reader's."""
    page = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    (suite.path / "my_bert.py").write_text(OWN_MODEL)
    (suite.path / "my_bert.toml").write_text((suite.path / "own.toml").read_text())
    for number, example in enumerate(examples):
        (suite.path / f"test_{number}.py").write_text(example.replace("path/to/checkpoint", "c"))
    suite.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=2)

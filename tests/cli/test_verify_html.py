"""``verify --html``: the report as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.modules import OWN, own_modules, write_own

__all__ = ["own_modules"]


def test_verify_writes_its_report_as_a_page(run: Run, checkpoint: Path) -> None:
    write_own(Path())
    result = run("verify", checkpoint, *OWN, "--seed", "3", "--html", "report.html")
    assert result.exit_code == 0, result.stderr
    assert "the report as a page: report.html" in result.stdout.splitlines()
    page = Path("report.html").read_text()
    assert "FAITHFUL" in page
    assert "<code>porting verify c --table own.toml --into own_model.py:build --seed 3</code>" in page


@pytest.mark.slow
def test_beside_a_page_the_report_is_printed_as_json(run: Run, checkpoint: Path) -> None:
    result = run("verify", checkpoint, "--html", "r.html", "--json", "--dtype", "bfloat16")
    assert json.loads(result.stdout)["call"] == "porting verify c --dtype bfloat16"
    assert Path("r.html").is_file()


def test_a_page_that_cannot_be_written_is_said_before_the_work(run: Run, checkpoint: Path) -> None:
    result = run("verify", "no-such-checkpoint", "--html", "nowhere/report.html")
    assert result.exit_code == 2
    first = result.stderr.splitlines()[0]
    assert first.startswith(
        "error: nowhere/report.html: the destination lies in a directory that does not exist (run `mk"
    )
    assert run("verify", checkpoint, "--html", ".").exit_code == 2

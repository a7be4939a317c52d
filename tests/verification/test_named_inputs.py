"""What stands in [inputs] and no batch has, such as labels, changes nothing and brings no warning."""

from __future__ import annotations

from pathlib import Path

import pytest

import porting
from porting.verification import verify

TABLE = """
extends = "bert"
[mapping]
name = "with_more"
[inputs]
"{name}" = "{name}"
"""


@pytest.mark.parametrize("name", ["labels", "inputs_embeds"])
def test_an_argument_that_no_batch_has_is_no_reason_for_other_rows(name: str, tmp_path: Path) -> None:
    table = tmp_path / "with_more.toml"
    table.write_text(TABLE.format(name=name), encoding="utf-8")
    report = verify(porting.embedded_checkpoint(), table=table, longest=8, dtypes=(), trials=False)
    assert report.faithful
    assert not [warning for warning in report.warnings if "rows" in warning]

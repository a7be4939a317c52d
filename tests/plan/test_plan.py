"""A plan as people read it: by rule, and as a notebook shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from porting.checkpoint import open_checkpoint
from porting.notation.table import read_table
from porting.plan.check import check
from porting.plan.plan import Plan, moves_by_rule
from tests import own
from tests.browser import opened


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    table = read_table(own.table(tmp_path))
    return check(table, open_checkpoint(own.write(tmp_path / "c")), own.Own(own.SIZES), fresh=True)


def test_each_rule_counts_what_it_moves(plan: Plan) -> None:
    rules = {rule.source: rule for rule in moves_by_rule(plan.steps)}
    fused = rules["model.layer.{i}.{p:query,key,value}.weight [o e]"]
    assert fused.target == "layers.{i}.qkv.weight [(p o) e]"
    assert (fused.read, fused.written) == (6, 2)
    assert fused.where.startswith("own.toml:")
    assert rules["model.shift [e] + model.types [0 e]"].read == 2
    assert sum(rule.written for rule in rules.values()) == sum(len(step.targets) for step in plan.steps)


def test_a_notebook_shows_a_row_for_each_rule_and_what_is_left_out(plan: Plan) -> None:
    with opened() as browser:
        browser.set_content(f"<p>{plan._repr_html_()}</p>")
        rows = [[cell.inner_text() for cell in row.locator("td").all()] for row in browser.locator("tbody tr").all()]
        assert [row[:4] for row in rows] == [
            [rule.source, rule.target, str(rule.read), str(rule.written)] for rule in moves_by_rule(plan.steps)
        ]
        text = browser.inner_text(".porting-part")
        assert plan.summary in text
        assert "left out, equals model.tokens.weight: decoder.weight" in text
        assert "left out, a counter of the trainer's: steps" in text
        assert "tied: decoder.weight is tokens.weight" in text

"""A table has as few letters and sizes as it can be read with."""

from __future__ import annotations

from pathlib import Path

import pytest

import porting
from porting.suggesting import Verdict, suggest
from porting.suggesting.draft.layer_patterns import Line, needed
from tests.suggesting.llama import FIELDS, builder
from tests.suggesting.oracle import source

TEXTS = {"h": "heads", "g": "groups", "s": "2", "y": "2", "r": "width // 2", "z": "width // 2"}


def test_what_a_shape_says_is_not_said_again() -> None:
    alone = Line((("q", "(h s r) e"),), (("wq", "(h r s) e"),))
    fused = Line((("q", "(h s r|g y z|f) e"),), (("wq", "(h r s|g z y|f) e"),))
    assert needed(TEXTS, [alone]) == {"h": "heads", "s": "2"}
    assert needed(TEXTS, [fused]) == TEXTS, "one number for three unknown ones"


@pytest.mark.slow
def test_a_table_with_rotary_pairs_states_what_nothing_else_says(tmp_path: Path) -> None:
    source("LlamaForCausalLM", FIELDS, tmp_path)
    build = builder(rotate="neighbours")
    found = suggest(tmp_path, build)
    assert found.verdict is Verdict.EXACT, str(found)
    assert set(found.table.sizes) == {"s", "h", "g"}, found.text
    path = found.write(tmp_path / "mine.toml")
    loaded = porting.load(tmp_path, into=build, table=path)
    assert not any(one.is_meta for one in loaded.state_dict().values())

"""What no single hostile file shows: nothing explodes, and no table runs anything."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from porting.checkpoint import CheckpointError, open_checkpoint
from porting.notation.name import Decimal, Enumerated, Literal, Name, Rest
from porting.target import OURS, TargetError, import_path
from tests.guards.tree import ROOT


def tried(name: Name, text: str) -> int:
    """How many ways a backtracking engine tries: depth first, every length of every part.

    Only patterns of which :class:`Name` says that at each place one way goes on are given to such an engine.
    """
    count = 0
    waiting = [(0, 0)]
    while waiting:
        place, at = waiting.pop()
        count += 1
        if place == len(name.parts):
            if at == len(text):
                return count
            continue
        waiting += [(place + 1, stop) for stop in sorted(ways(name.parts[place], text, at))]
    return count


def ways(part: Literal | Decimal | Enumerated | Rest, text: str, at: int) -> Iterator[int]:
    match part:
        case Literal(text=literal):
            yield from (at + len(literal) for _ in range(text.startswith(literal, at)))
        case Decimal():
            length = 1
            while length <= 9 and text[at : at + length].isdecimal() and at + length <= len(text):
                yield at + length
                length += 1
        case Enumerated(spellings=spellings):
            yield from (at + len(one) for place in spellings for one in place if text.startswith(one, at))
        case Rest():
            yield from range(at + 1, len(text) + 1)


HARD = [  # (one more part of the pattern, one more piece of a name that almost fits)
    ("{%s}.", "123456789."),
    ("{%s:a,b}a", "aa"),
    ("{%s:a,aa}a", "aaa"),
    ("{%s:ab,a,abab}b", "abab"),
    ("x{%s}", "x1"),
]


@pytest.mark.parametrize(("part", "piece"), HARD)
def test_no_pattern_makes_reading_explode(part: str, piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the pattern and twice the name take at most four times the steps: places times parts, and no more."""
    steps: list[int] = []
    for count in (10, 20, 40):
        name = Name.parse("".join(part.replace("%s", f"i{number}") for number in range(count)))
        text = piece * count + "!"
        if name._decided is not None:
            steps.append(tried(name, text))
        else:
            calls = 0

            def count_call(frame: object, event: str, argument: object) -> None:
                nonlocal calls
                calls += 1

            sys.setprofile(count_call)
            try:
                assert name.read(text) is None
            finally:
                sys.setprofile(None)
            steps.append(calls)
        assert name.read(text) is None
        assert steps[-1] <= 12 * len(name.parts) * len(text)
    assert steps[1] <= 4.5 * steps[0]
    assert steps[2] <= 4.5 * steps[1]


PARTS = st.sampled_from(
    ["a", "b.", "1", ".", "{%s}", "{%s:a,b}", "{%s:a,ab,b}", "{%s:1,12}", "{2*%s+1}", "{%s:a/aa,b}"]
)


@given(parts=st.lists(PARTS, min_size=1, max_size=12), text=st.text("ab12.", max_size=60))
def test_whatever_is_given_to_the_engine_takes_linear_steps(parts: list[str], text: str) -> None:
    from porting.notation.faults import NotationError

    try:
        name = Name.parse("".join(part.replace("%s", f"i{number}") for number, part in enumerate(parts)))
    except NotationError:
        return
    if name._decided is not None:
        assert tried(name, text) <= 1 + 10 * len(name.parts)


# --------------------------------------------------------------------------------------------------------- import paths


@pytest.mark.parametrize(
    "path",
    [
        "os:system",
        "porting:load",
        "porting.cli.app:main",
        "porting.modelsx:A",
        "porting.models:torch",
        "porting.models.bert:torch.hub.load",
        "porting.models.bert:nn.Linear",
        "porting.models.bert:torch",
        "porting.models.bert:Bert.__init__.__globals__",
        "porting.models.bert:__builtins__",
        "porting.models.bert:__loader__",
        "porting.models.bert:Tensor",
        "porting.models.bert:Bert.load_state_dict",
    ],
)
def test_a_table_cannot_name_what_is_not_ours(path: str) -> None:
    with pytest.raises(TargetError) as caught:
        import_path(path)
    assert [fault.code.value for fault in caught.value.faults] == ["untrusted-target"]


def test_every_shipped_table_names_what_is_ours() -> None:
    from porting.tables import shipped

    paths = set()
    for table in shipped():
        content = tomllib.loads(table.read_text(encoding="utf-8"))
        paths.add(content["mapping"].get("config", ""))
        values = content.get("architectures", {}).values()
        paths |= {value if isinstance(value, str) else value["target"] for value in values}
    for path in paths - {""}:
        assert path.startswith(OURS)
        assert callable(import_path(path))


def test_an_import_path_of_the_users_is_honoured_with_trust_only() -> None:
    with pytest.raises(TargetError, match="not part of this library"):
        import_path("collections:OrderedDict")
    assert import_path("collections:OrderedDict", trust=True).__name__ == "OrderedDict"


# --------------------------------------------------------------------------------------------------------------- others


def test_an_older_torch_is_not_taken() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (asked,) = [dependency for dependency in project["dependencies"] if dependency.startswith("torch>=")]
    assert tuple(map(int, asked.removeprefix("torch>=").split("."))) >= (2, 6)


@pytest.mark.parametrize("how", ["truncated", "grown", "overwritten"])
def test_a_source_that_changes_is_noticed_before_it_is_mapped(tmp_path: Path, how: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    checkpoint = open_checkpoint(path)
    if how == "overwritten":
        path.write_bytes(path.read_bytes())
        os.utime(path, ns=(1, 1))
    else:
        os.truncate(path, 100 if how == "truncated" else 10_000)
    for own in (False, True):
        with pytest.raises(CheckpointError, match="the file changed after it was opened"):
            checkpoint.read("a", own=own)

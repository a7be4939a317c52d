"""A family that differs in a few lines writes those lines."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from porting.notation import extends
from porting.notation.faults import TableError
from porting.notation.table import Table, read_table

PARENT = """\
[mapping]
name = "parent"
prefix = "trunk."
target_prefix = "body."
[require]
act = ["gelu"]
[architectures]
A = { target = "porting.models.a:A", holds = ["trunk.x", "head.y"] }
[tensors]
"trunk.emb [v e]" = "body.emb [v e]"
"trunk.l.{i}.w [o e]" = "body.l.{i}.w [o e]"
"head.w" = "head.w"
[optional]
"trunk.pool" = "body.pool"
[drop]
"trunk.ids" = "equals arange"
"trunk.copy" = "equals trunk.emb"
"trunk.mask" = "trunk. is a word of this reason"
[ties]
"head.tied" = "body.emb"
[fresh]
"body.pool" = "body. is a word of this reason"
[probes]
"trunk.l.{i} -> 1" = "body.l.{i} -> 1"
[[rule]]
source = ["trunk.a [x]", "trunk.b [y]"]
target = "body.ab [(x|y)]"
[[rule]]
source = "trunk.c [x]"
target = "body.c [x]"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parent.toml").write_text(PARENT)
    return tmp_path


def child(folder: Path, text: str) -> Table:
    (folder / "child.toml").write_text(text)
    return read_table(folder / "child.toml")


def refused(folder: Path, text: str) -> list[str]:
    with pytest.raises(TableError) as caught:
        child(folder, text)
    return [str(fault) for fault in caught.value.faults]


def test_nothing_changed_is_the_same_table(folder: Path) -> None:
    parent, same = read_table(folder / "parent.toml"), child(folder, 'extends = "parent"')
    for field in ("rules", "drops", "ties", "fresh", "probes", "architectures", "require", "prefix", "target_prefix"):
        assert getattr(parent, field) == getattr(same, field), field
    assert same.where == "child.toml"
    assert same.digest != parent.digest
    assert same.rules[0].where == "parent.toml:10:1"


def test_an_entry_replaces_that_of_the_same_name_whatever_its_axes(folder: Path) -> None:
    table = child(folder, 'extends = "parent"\n[tensors]\n"trunk.l.{i}.w [e o]" = "body.l.{i}.w [o e]"\n')
    rules = [str(rule) for rule in table.rules]
    assert "trunk.l.{i}.w [e o] = body.l.{i}.w [o e]" in rules
    assert "trunk.l.{i}.w [o e] = body.l.{i}.w [o e]" not in rules
    assert next(rule.where for rule in table.rules if "[e o]" in str(rule)) == "child.toml:3:1"


def test_a_rule_may_become_optional(folder: Path) -> None:
    table = child(folder, 'extends = "parent"\n[optional]\n"head.w" = "head.w"\n')
    assert [rule.optional for rule in table.rules if str(rule) == "head.w = head.w"] == [True]


def test_false_takes_an_entry_away(folder: Path) -> None:
    table = child(
        folder,
        'extends = "parent"\n[tensors]\n"trunk.emb" = false\n[optional]\n"trunk.pool" = false\n'
        '[drop]\n"trunk.ids" = false\n[ties]\n"head.tied" = false\n[require]\nact = false\n',
    )
    assert not any("emb" in str(rule) or "pool" in str(rule) for rule in table.rules)
    assert [str(drop.name) for drop in table.drops] == ["trunk.copy", "trunk.mask"]
    assert (table.ties, table.require) == ((), {})


def test_architectures_are_replaced_as_a_whole(folder: Path) -> None:
    table = child(folder, 'extends = "parent"\n[architectures]\nB = "porting.models.b:B"\n')
    assert [architecture.name for architecture in table.architectures] == ["B"]
    kept = child(folder, 'extends = "parent"\n[mapping]\nprefix = "other."\n')
    assert [architecture.name for architecture in kept.architectures] == ["A"]


def test_false_that_takes_nothing_away_is_a_fault(folder: Path) -> None:
    text = 'extends = "parent"\n[tensors]\n"trunk.embb" = false\n[[rule]]\nsource = "trunk.z"\ntarget = false\n'
    assert refused(folder, text) == [
        (
            "child.toml:3:1: 'trunk.embb' = false takes nothing away: no extended table has it in [tensors] "
            "(did you mean 'trunk.emb'?) [unknown-key]"
        ),
        (
            "child.toml:6:1: target = false takes nothing away: no extended table has a [[rule]] with these sources "
            "[unknown-key]"
        ),
    ]


def test_a_long_rule_is_replaced_or_taken_away_by_its_sources(folder: Path) -> None:
    table = child(
        folder,
        'extends = "parent"\n[[rule]]\nsource = ["trunk.a [x]", "trunk.b [y]"]\ntarget = "body.ba [(x|y)]"\n'
        '[[rule]]\nsource = "trunk.c"\ntarget = false\n',
    )
    rules = [str(rule) for rule in table.rules]
    assert [rule for rule in rules if "trunk.a" in rule] == ["trunk.a [x] + trunk.b [y] = body.ba [(x|y)]"]
    assert not any("trunk.c" in rule for rule in rules)


def test_constants_may_be_false(folder: Path) -> None:
    assert child(folder, 'extends = "parent"\n[constants]\nbias = false\n').constants == {"bias": False}


def test_the_names_take_the_childs_prefixes(folder: Path) -> None:
    table = child(folder, 'extends = "parent"\n[mapping]\nprefix = "other."\ntarget_prefix = ""\n')
    assert [str(rule) for rule in table.rules] == [
        "other.emb [v e] = emb [v e]",
        "other.l.{i}.w [o e] = l.{i}.w [o e]",
        "head.w = head.w",
        "other.pool = pool",
        "other.a [x] + other.b [y] = ab [(x|y)]",
        "other.c [x] = c [x]",
    ]
    assert [(str(drop.name), drop.reason, str(drop.equals)) for drop in table.drops] == [
        ("other.ids", "equals arange", "arange"),
        ("other.copy", "equals other.emb", "other.emb"),
        ("other.mask", "trunk. is a word of this reason", "None"),
    ]
    assert [(str(ty.name), str(ty.with_)) for ty in table.ties] == [("head.tied", "emb")]
    assert [(str(one.name), one.reason) for one in table.fresh] == [("pool", "body. is a word of this reason")]
    assert [str(rule) for rule in table.probes] == ["other.l.{i} -> 1 = l.{i} -> 1"]
    assert table.architectures[0].holds == ("other.x", "head.y")


def test_an_override_is_spelled_with_the_childs_prefix(folder: Path) -> None:
    text = 'extends = "parent"\n[mapping]\nprefix = "other."\n[tensors]\n"other.emb [v e]" = "body.words [v e]"\n'
    rules = [str(rule) for rule in child(folder, text).rules]
    assert "other.emb [v e] = body.words [v e]" in rules
    assert "other.emb [v e] = body.emb [v e]" not in rules


def test_extending_goes_on_upwards(folder: Path) -> None:
    (folder / "middle.toml").write_text(
        'extends = "parent"\n[tensors]\n"trunk.emb" = false\n"trunk.new" = "body.new"\n'
    )
    table = child(folder, 'extends = "middle"\n[tensors]\n"head.w" = false\n')
    rules = [str(rule) for rule in table.rules]
    assert "trunk.new = body.new" in rules
    assert not any("emb" in rule or "head.w" in rule for rule in rules)


def test_a_shipped_table_may_be_extended(folder: Path) -> None:
    (name, *_) = sorted(path.stem for path in extends.SHIPPED.glob("*.toml"))
    table = child(folder, f'extends = "{name}"\n[mapping]\nname = "mine"\n')
    assert table.name == "mine"
    assert table.rules == read_table(extends.SHIPPED / f"{name}.toml").rules


def test_a_table_of_the_same_name_extends_the_shipped_one(folder: Path) -> None:
    (name, *_) = sorted(path.stem for path in extends.SHIPPED.glob("*.toml"))
    (folder / f"{name}.toml").write_text(f'extends = "{name}"\n[mapping]\nname = "mine"\n')
    assert read_table(folder / f"{name}.toml").rules == read_table(extends.SHIPPED / f"{name}.toml").rules


@pytest.mark.parametrize("chain", [("child",), ("one", "child"), ("one", "two", "child")])
def test_a_cycle_is_a_fault(folder: Path, chain: tuple[str, ...]) -> None:
    first, *_ = (*chain, "child")
    for name, above in pairwise(chain):
        (folder / f"{name}.toml").write_text(f'extends = "{above}"')
    if chain == ("child",):  # a table never is the one beside it that it extends: it looks among the bundled ones
        (fault,) = refused(folder, f'extends = "{first}"')
        assert fault.startswith("child.toml:1:11: there is no table 'child' beside this one or among the bundled ones")
        return
    (fault,) = refused(folder, f'extends = "{first}"')
    assert fault == (f"{chain[-2]}.toml:1:11: a table extends itself: {' -> '.join(('child', *chain))} [bad-extends]")


@pytest.mark.parametrize(
    "name", ["../parent", "/etc/passwd", "a/b", "a\\\\b", "C:x", "parent.toml", "", ".", "~", "x" * 300]
)
def test_nobody_climbs_out(folder: Path, name: str) -> None:
    (fault,) = refused(folder, f'extends = "{name}"')
    assert "expected the name of a table: letters, digits, - and _ [bad-extends]" in fault
    assert fault.startswith("child.toml:1:11: ")


def test_an_unknown_table_has_a_nearest_name(folder: Path) -> None:
    assert refused(folder, '# a comment\nextends = "parnt"') == [
        (
            "child.toml:2:11: there is no table 'parnt' beside this one or among the bundled ones "
            "(did you mean 'parent'?) [bad-extends]"
        )
    ]


def test_the_faults_of_both_are_told_at_once_each_with_its_file(folder: Path) -> None:
    (folder / "broken.toml").write_text('[tensors]\n"a.{i}" = "b"\n[zzz]\n')
    faults = refused(folder, 'extends = "broken"\n[tensors]\n"c.{i}" = "d"\n')
    assert [fault.partition(": ")[0] for fault in faults] == ["broken.toml:3:1", "broken.toml:2:1", "child.toml:3:1"]


def test_what_is_wrong_with_the_extended_file_does_not_hide_the_rest(folder: Path) -> None:
    (folder / "broken.toml").write_text("a = ")
    faults = refused(folder, 'extends = "broken"\n[tensors]\n"c.{i}" = "d"\n"e" = false\n')
    assert [fault.partition(": ")[0] for fault in faults] == ["broken.toml:1:5", "child.toml:3:1"]

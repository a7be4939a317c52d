"""A name that a table misspells: its line offers the right name, and the right name's fault points at the line."""

from __future__ import annotations

import pytest

from porting.errors import Code, PortingError
from porting.plan import leftovers
from porting.plan.fault_grouping import MOST_HINTS, MOST_PATTERNS, resembles
from tests.plan.toy import TABLE, checkpoint, plan, target


def faults(table: str) -> dict[Code, list[tuple[str, str]]]:
    """The name that each fault is about, with its hint, by code."""
    with pytest.raises(PortingError) as caught:
        plan(None, None, table)
    found: dict[Code, list[tuple[str, str]]] = {}
    for fault in caught.value.faults:
        found.setdefault(fault.code, []).append((fault.message.split("'")[1], fault.hint))
    return found


def test_a_member_of_a_fusion() -> None:
    assert faults(TABLE.replace("{p:q,k,v}", "{p:q,kk,v}")) == {
        Code.MISSING_MEMBER: [("trunk.l.0.kk.weight", "and 2 more like it; did you mean 'trunk.l.0.k.weight'?")],
        Code.UNREAD_TENSOR: [("trunk.l.0.k.weight", "toy.toml:13:1 has 'trunk.l.0.kk.weight': is it this one?")],
    }


def test_a_tensor_of_the_checkpoint() -> None:
    found = faults(TABLE.replace("trunk.l.{i}.norm", "trunk.l.{i}.nrom"))
    assert found == {
        Code.UNREAD_TENSOR: [
            ("trunk.l.0.norm.weight", "toy.toml:14:1 has 'trunk.l.0.nrom.weight': is it this one?"),
            ("trunk.l.0.norm.bias", "toy.toml:14:1 has 'trunk.l.0.nrom.bias': is it this one?"),
        ],
        Code.NO_SOURCE: [("trunk.l.0.nrom.weight", "did you mean 'trunk.l.0.norm.weight'?")],
    }


def test_a_parameter_of_the_module() -> None:
    found = faults(TABLE.replace('"emb.weight [v e]"\n', '"emd.weight [v e]"\n').replace("[ties]\n", "[ties]\n#"))
    assert found[Code.NO_TARGET] == [("trunk.emb.weight", "did you mean 'emb.weight'?")]
    assert ("emb.weight", "toy.toml:12:1 has 'emd.weight': is it this one?") in found[Code.UNWRITTEN_PARAMETER]


def test_both_sides_of_a_line() -> None:
    found = faults(TABLE.replace("trunk.l.{i}.norm", "trunk.l.{i}.nrom").replace('"l.{i}.norm', '"l.{i}.nrom'))
    assert [name for name, _ in found[Code.UNREAD_TENSOR]] == ["trunk.l.0.norm.weight", "trunk.l.0.norm.bias"]
    assert found[Code.UNREAD_TENSOR][0][1] == "toy.toml:14:1 has 'trunk.l.0.nrom.weight': is it this one?"
    assert found[Code.UNWRITTEN_PARAMETER][0][1] == "toy.toml:14:1 has 'l.0.nrom.weight': is it this one?"
    assert len(found[Code.RULE_MATCHES_NOTHING]) == 1


def test_a_line_of_drop() -> None:
    table = TABLE.replace("trunk.ids", "trunk.idds").replace("old.{*rest}", "oldest.{*rest}")
    with pytest.raises(PortingError) as caught:
        plan(checkpoint(trunk__ids=(3,), oldst__a=(2,), oldst__b__c=(2,)), target(), table)
    assert [(fault.message.split("'")[1], fault.hint) for fault in caught.value.faults] == [
        ("trunk.ids", "toy.toml:18:1 has 'trunk.idds': is it this one?"),
        ("oldst.a", "toy.toml:20:1 has 'oldest.{*rest}': is it this one?"),
        ("oldst.b.c", "toy.toml:20:1 has 'oldest.{*rest}': is it this one?"),
    ]


def test_a_line_that_says_rather_another_name_is_not_meant() -> None:
    table = TABLE.replace("{p:q,k,v}", "{p:quer,key}")
    with pytest.raises(PortingError) as caught:
        plan(checkpoint(**{f"trunk__l__0__{p}__weight": (4, 4) for p in ("query", "value")}), None, table)
    hints = {fault.message.split("'")[1]: fault.hint for fault in caught.value.faults if fault.code == "unread-tensor"}
    assert hints["trunk.l.0.query.weight"] == "toy.toml:13:1 has 'trunk.l.0.quer.weight': is it this one?"
    assert hints["trunk.l.0.value.weight"] == "map it in [tensors], or list it in [drop] with a reason"


@pytest.mark.parametrize("front", ["module.", "a.b."])
def test_all_names_behind_one_that_a_wrapper_put_before_them(front: str) -> None:
    with pytest.raises(PortingError) as caught:
        plan({f"{front}{name}": shape for name, shape in checkpoint().items()}, None, TABLE)
    unread = [fault for fault in caught.value.faults if fault.code == Code.UNREAD_TENSOR]
    (message,) = (fault.message for fault in unread)
    assert message == (
        f"'{front}trunk.emb.weight' and 16 more like it of the checkpoint: no rule reads it, "
        f"and '{front}' stands before the table's names"
    )
    assert unread[0].hint.startswith("save the model without what wraps it")
    sought = [fault.hint for fault in caught.value.faults if fault.code == Code.NO_SOURCE]
    assert f"did you mean '{front}trunk.emb.weight'?" in sought


def test_lines_of_drop_are_compared_with_few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile checkpoint has as many names that nothing reads as it likes, and a table as many lines."""
    compared: list[str] = []

    def count(one: str, other: str) -> bool:
        compared.append(other)
        return resembles(one, other)

    monkeypatch.setattr(leftovers, "resembles", count)
    lines = "".join(f'"line{number}z" = "a reason"\n' for number in range(600))
    strays = {f"stray{number}z": (2,) for number in range(100)}
    with pytest.raises(PortingError):
        plan(checkpoint(**strays), target(), TABLE.replace("[drop]\n", "[drop]\n" + lines))
    assert len(set(compared)) <= MOST_HINTS
    assert len(compared) <= MOST_HINTS * MOST_PATTERNS

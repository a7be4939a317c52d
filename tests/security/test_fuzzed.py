"""The targets of ``make fuzz`` with inputs from hypothesis: good ones cut and mixed, and structured bad ones."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from porting.checkpoint.registry import CONTAINERS
from scripts.fuzz import TARGETS, seeds

SEEDS = {target: list(seeds(target)) for target in TARGETS}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "BOOL", "F4", "C64"]) | JSON,
        "shape": st.lists(st.integers(-1, 2**65), max_size=5) | JSON,
        "data_offsets": st.lists(st.integers(-1, 40), max_size=3) | JSON,
        "more": JSON,
    },
)
NAMES = st.text(max_size=5) | st.sampled_from(["a", "a.b", "__metadata__", "e\u0301", "\u00e9", "\u202e", "a\0"])
STRUCTURED = {
    "header": st.dictionaries(NAMES, ENTRIES | JSON, max_size=4).map(lambda one: json.dumps(one).encode()),
    "index": st.dictionaries(NAMES | st.just("weight_map"), st.dictionaries(NAMES, NAMES) | JSON).map(
        lambda one: json.dumps(one).encode()
    ),
    "config": st.dictionaries(st.sampled_from(["id2label", "num_labels", "auto_map"]), JSON).map(
        lambda one: json.dumps(one).encode()
    ),
    "yaml": st.dictionaries(st.text(max_size=8), JSON, max_size=4).map(lambda one: yaml.safe_dump(one).encode()),
    "pickle": st.lists(
        st.sampled_from(
            [bytes([code]) for code in b"\x80(}])N\x88KMJGXUtl\x85\x86\x87q\x94hjsuaebcQR.\x93\x95\x8a\x02"]
        )
        | st.sampled_from([b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"K\x00", b"h\x00"]),
        max_size=40,
    ).map(b"".join),
}
"""Inputs of the right kind with wrong things in them."""

WORDS = st.sampled_from(
    [
        "{i}",
        "{p:a,b}",
        "{w:a/b,c}",
        "{*r}",
        "{2*i+1}",
        "(",
        ")",
        "|",
        "[",
        "]",
        "1",
        "_2",
        "h",
        "d",
        " ",
        ".",
        "r=0",
        "=",
        "**",
        "//",
        "-",
        "9",
        "a",
        '"',
        "\n",
        "[tensors]\n",
        "[[rule]]\n",
        "source = ",
        "'a [x]'",
        "->",
    ]
)


@st.composite
def mangled(draw: st.DrawFn, target: str) -> bytes:
    """A seed, cut in two places and put together around something else."""
    one, other = draw(st.sampled_from(SEEDS[target])), draw(st.sampled_from(SEEDS[target]))
    start, stop = draw(st.integers(0, len(one))), draw(st.integers(0, len(other)))
    return one[:start] + draw(st.binary(max_size=12)) + other[stop:]


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=60)
@given(data=st.data())
def test_only_the_librarys_own_errors_are_raised(target: str, data: st.DataObject) -> None:
    choices = [mangled(target), st.binary(max_size=60)]
    choices += [STRUCTURED[target]] if target in STRUCTURED else []
    if target in ("table", "name", "axes", "expression"):
        choices.append(st.lists(WORDS, max_size=14).map(lambda words: "".join(words).encode()))
    TARGETS[target](data.draw(st.one_of(choices)))


def test_each_container_has_a_target() -> None:
    others = {"safetensors": "header", "index": "index", "bin": "archive", "dcp": "metadata", "npz": "arrays"}
    assert {others.get(one.name, one.name) for one in CONTAINERS} <= {*TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_are_good(target: str) -> None:
    """Else nothing behind the first check would ever be reached."""
    assert any(TARGETS[target](seed) is not None for seed in SEEDS[target])


def test_a_crash_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("porting.checkpoint.index.parse_index", lambda raw, **rest: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        TARGETS["index"](b"{}")

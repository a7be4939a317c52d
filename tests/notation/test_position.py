"""Places are exact wherever TOML lets a key or a value stand."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import pytest

from porting.notation.position import Path, locate

TEXT = '''\
# "a comment" = 'with = signs [and] brackets'
top = "x" # another
"quoted key" = 'literal'
\tdotted . "a.b" . c = 1
numbers = [ 1, 2.5, true, 1979-05-27T07:32:00Z,
  nan, ] # trailing
empty = []
nested = [[1, [2]], { a = "b", "c" = [3] }]
multi = """
line = "1"
[not.a.header]
"""
quotes = """"two quotes at the end"""""
raw = \'\'\'a \\ b\'\'\'
escaped = "a \\" b \\\\"
"esc\\u0061ped\\tkey" = 1
[ table ]   # a header with blanks
key="value"
[table."sub.table"]
x = 1
[[rule]]
source = ["a", # comment
  "b"]
[rule.part]
y = 2
[[rule]]
source = 'c'
target = { name = "d", list = ["e", "f"] }
'''


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, number))
    else:
        yield path, value


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_value_stands_where_it_is_said_to(newline: str) -> None:
    text = TEXT.replace("\n", newline)
    content = tomllib.loads(text)
    places = locate(text)
    lines = text.split("\n")
    found = list(leaves(content))
    assert len(found) == 26
    for path, value in found:
        place = places.value(path)
        rest = lines[place.line - 1][place.column - 1 :]
        assert path in places.values
        if isinstance(value, str):
            assert rest[: place.lead] in {'"', "'", '"""', "'''"}
            inside = rest[place.lead :].replace('\\"', '"').replace("\\\\", "\\")
            assert inside.strip() == "" or inside.startswith(value[:5]) or value.startswith(inside.strip())
        elif isinstance(value, bool | int | float):
            assert rest.lower().startswith(str(value).lower().removesuffix(".0"))


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("top",), "2:1", "2:7"),
        (("quoted key",), "3:1", "3:16"),
        (("dotted", "a.b"), "4:11", "4:11"),
        (("dotted", "a.b", "c"), "4:19", "4:23"),
        (("numbers", 3), "1:1", "5:27"),
        (("numbers", 4), "1:1", "6:3"),
        (("nested", 0, 1, 0), "1:1", "8:16"),
        (("nested", 1, "c"), "8:32", "8:38"),
        (("nested", 1, "c", 0), "1:1", "8:39"),
        (("escaped\tkey",), "16:1", "16:23"),
        (("table",), "17:1", "17:1"),
        (("table", "key"), "18:1", "18:5"),
        (("table", "sub.table", "x"), "20:1", "20:5"),
        (("rule", 0, "source", 1), "1:1", "23:3"),
        (("rule", 0, "part", "y"), "25:1", "25:5"),
        (("rule", 1), "26:1", "26:1"),
        (("rule", 1, "source"), "27:1", "27:10"),
        (("rule", 1, "target", "list", 1), "1:1", "28:37"),
    ],
)
def test_keys_and_values_by_their_paths(path: Path, key: str, value: str) -> None:
    places = locate(TEXT)
    assert places.key(path).at() == key
    assert places.value(path).at() == value


def test_an_offset_counts_from_the_text_within_its_quotes() -> None:
    places = locate("a = \"xyz\"\nb = '''xyz'''\nc = 3\nd.e = 1")
    assert [places.value((name,)).at(1) for name in "abc"] == ["1:7", "2:9", "3:6"]
    assert places.key(("d", "e")).at(0) == "4:3"


def test_what_is_not_there_stands_at_the_beginning() -> None:
    assert locate("a = 1").value(("b",)).at() == "1:1"

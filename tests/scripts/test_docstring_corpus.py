"""Documentation becomes sentences: prose is kept, everything else is not, and nothing is said twice."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from scripts.docstring_corpus import Document, read_standard_library, split_by_package, split_sentences

MODULE = '''
"""Open and close doors.

A door is either open or shut.  It is
never both.
"""

def shut(door):
    """shut(door) -> bool

    Return true if the `door` was shut.

    >>> shut(Door())
    True
    and this line belongs to the example

    - The :class:`Door` is locked by a bolt, e.g. Chubb makes these.

    - door == wall raises TypeError;
    """
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in {
        "_doors.py": MODULE,
        "doors.py": '"""A door is either open or shut."""\n\n"""This is no docstring but a string."""\n',
        "email/__init__.py": '"""Read the message in the file."""\n',
        "email/parser.py": 'class Parser:\n    """Parse the message in the file."""\n',
        "email/test/test_parser.py": '"""Nobody reads the tests of the message."""\n',
        "broken.py": "print 'this is the Python of long ago'\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_only_the_prose_of_docstrings_is_read_and_nothing_twice(library: Path) -> None:
    found = {document.name: document.sentences for document in read_standard_library(library)}
    assert found == {
        "_doors.py": (
            "Open and close doors.",
            "A door is either open or shut.",
            "It is never both.",
            "Return true if the door was shut.",
            "The Door is locked by a bolt, e.g. Chubb makes these.",
        ),
        "email/__init__.py": ("Read the message in the file.",),
        "email/parser.py": ("Parse the message in the file.",),
    }


def test_modules_of_one_package_and_their_private_halves_belong_together(library: Path) -> None:
    assert {document.name: document.package for document in read_standard_library(library)} == {
        "_doors.py": "doors",
        "email/__init__.py": "email",
        "email/parser.py": "email",
    }


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "x = f(a, b) + c[0] * 2",
        "D.get(k[,d]) -> D[k] if k in D, else d.",
        "| a | b | c | d | e |",
        "Too few words.",
        "HTTP_REFERER HTTP_COOKIE REMOTE_ADDR SERVER_NAME and PATH_INFO",
    ],
)
def test_what_is_no_prose_is_dropped(text: str) -> None:
    assert split_sentences(text) == []


def test_built_in_modules_and_help_topics_are_read_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    (tmp_path / "argparse.py").write_bytes((library / "argparse.py").read_bytes())
    shutil.copytree(library / "pydoc_data", tmp_path / "pydoc_data")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents = {document.name: document for document in read_standard_library()}
    assert documents["argparse.py"].sentences
    assert any("strip" in sentence for sentence in documents["builtins"].sentences)
    assert len(documents["topics/assert"].sentences) > 3


@pytest.mark.slow
def test_the_documentation_of_this_python_has_all_three_kinds() -> None:
    documents = {document.name: document for document in read_standard_library()}
    assert "Return the sine of x (measured in radians)." not in documents["argparse.py"].sentences
    assert any("strip" in sentence for sentence in documents["builtins"].sentences)
    assert len(documents["topics/assert"].sentences) > 3
    assert sum(len(document.sentences) for document in documents.values()) > 10_000


def test_a_package_is_held_out_whole_and_no_more_than_asked() -> None:
    sizes = {"a": 30, "b": 5, "c": 4, "d": 3, "e": 58}
    documents = [
        Document(name=f"{package}/{half}.py", package=package, sentences=(f"{package} {half}",) * size)
        for package, size in sizes.items()
        for half in "xy"
    ]
    for seed in range(20):
        learnt, held_out = split_by_package(documents, held_out_fraction=0.1, seed=seed)
        names = {document.package for document in held_out}
        assert names.isdisjoint(document.package for document in learnt)
        assert len(learnt) + len(held_out) == len(documents)
        assert 0 < sum(sizes[name] for name in names) <= 10


def test_the_split_follows_the_seed() -> None:
    documents = [Document(name=f"{n}.py", package=str(n), sentences=("one",)) for n in range(50)]
    splits = [split_by_package(documents, held_out_fraction=0.2, seed=seed)[1] for seed in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2]

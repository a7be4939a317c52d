"""Sentences from the documentation that every Python carries with it: a small corpus that needs no download.

Three places hold it: the docstrings in the source files of the standard library (read with :mod:`ast`,
nothing is imported), the docstrings of the modules compiled into the interpreter (``str``, ``itertools``,
``posix``, ..., which have no source file to read), and the topics of ``help()`` in ``pydoc_data/topics.py``.

What comes out is a list of :class:`Document`: the sentences of one module in the order in which they were
written, without doctests, signatures, tables and markup, and without a sentence that an earlier document has
already said.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import random
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED = {"site-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}
MIN_WORDS, MAX_WORDS = 4, 60

_MARKUP = (
    (re.compile(r":\w+(?::\w+)?:`~?([^`]*)`"), r"\1"),  # :class:`Name`
    (re.compile(r"`+([^`']*)[`']+"), r"\1"),  # ``name``, `name`, `name'
    (re.compile(r"\*+([^*\s]|[^*\s][^*]*[^*\s])\*+"), r"\1"),  # *name*, **name**
    (re.compile(r"\s*--+\s*"), " - "),
    (re.compile(r"\s+"), " "),
)
_BULLET = re.compile(r"^\s*(?:[-*+o\u2022]|\(?\d{1,2}[.)]|[A-Za-z]\))\s+")
_SIGNATURE = re.compile(r"^[\w.]+\([^()]*(?:\([^()]*\)[^()]*)*\)(?:\s*(?:->|=>|=|--|:).*)?$")
_CODE = re.compile(
    r">>>|\.\.\. |^\s*[$#%>|]|::=|==|;$|^\s*(?:def|class|import|from|return|print|raise)\b.*[(=:]|^\s*@\w+"
)
_RULE = re.compile(r"^\s*[-=*~^#_+|.]{3,}")
_ABBREVIATION = re.compile(
    r"\b(?:e\.g|i\.e|etc|vs|cf|a\.k\.a|resp|approx|incl|Mr|Dr|St|No|Inc|[A-Z])\.$", re.IGNORECASE
)
_BOUNDARY = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Z])|(?<=[:;])\s{2,}")
_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")


@dataclass(frozen=True, kw_only=True)
class Document:
    """The sentences of one module.

    Attributes:
        name: where they come from: ``asyncio/streams.py``, ``builtins``, ``topics/assert``.
        package: the part of the library it belongs to (``asyncio``); ``_pyio`` and ``io`` are one.
        sentences: in the order in which they were written.
    """

    name: str
    package: str
    sentences: tuple[str, ...]


def read_standard_library(root: Path | None = None) -> list[Document]:
    """All documents of the running Python, or of the library whose source files lie under ``root``.

    Args:
        root: a folder of Python source files; the folder of the running Python's library, and the built-in
            modules and help topics with it, when None.
    """
    library = Path(sysconfig.get_path("stdlib")) if root is None else root
    sources = list(_source_docstrings(library))
    if root is None:
        sources += _builtin_docstrings()
        sources += _help_topics(library)
    seen: set[str] = set()
    documents = []
    for name, docstrings in sources:
        sentences = []
        for docstring in docstrings:
            for sentence in split_sentences(docstring):
                key = " ".join(_WORD.findall(sentence.lower()))
                if key not in seen:
                    seen.add(key)
                    sentences.append(sentence)
        if sentences:
            documents.append(Document(name=name, package=_package(name), sentences=tuple(sentences)))
    return documents


def split_sentences(docstring: str) -> list[str]:
    """The sentences of a docstring that read as prose.

    >>> split_sentences('''S.center(width) -> str
    ...
    ... Return a ``centered`` string.  Padding is done with spaces, e.g. on
    ... both sides.
    ...
    ... >>> 'a'.center(3)
    ... ' a '
    ... ''')
    ['Return a centered string.', 'Padding is done with spaces, e.g. on both sides.']
    """
    sentences = []
    for paragraph in _paragraphs(inspect.cleandoc(docstring)):
        prose = paragraph
        for pattern, replacement in _MARKUP:
            prose = pattern.sub(replacement, prose)
        pieces: list[str] = []
        for piece in _BOUNDARY.split(prose.strip()):
            if pieces and _ABBREVIATION.search(pieces[-1]):
                pieces[-1] += " " + piece
            else:
                pieces.append(piece)
        sentences += [piece.strip() for piece in pieces if _is_prose(piece)]
    return sentences


def _paragraphs(text: str) -> Iterator[str]:
    """Runs of lines that belong together: up to a blank line, a bullet or a heading's rule.

    Code, examples and tables are dropped.
    """
    lines: list[str] = []
    in_doctest = False
    for line in [*text.expandtabs().splitlines(), ""]:
        if not line.strip() or _RULE.match(line):
            if lines and not in_doctest and not _RULE.match(line):
                yield " ".join(lines)
            lines, in_doctest = [], False
        elif _CODE.search(line):
            lines, in_doctest = [], True
        elif in_doctest or (not lines and _SIGNATURE.match(line.strip())):
            continue
        elif _BULLET.match(line):
            if lines:
                yield " ".join(lines)
            lines = [_BULLET.sub("", line).strip()]
        else:
            lines.append(line.strip())


def _is_prose(sentence: str) -> bool:
    words = _WORD.findall(sentence)
    if not MIN_WORDS <= len(words) <= MAX_WORDS or not sentence[-1:].isascii():
        return False
    ordinary = sum(len(word) for word in words if word.islower() or word.istitle() or len(word) == 1)
    return ordinary + sentence.count(" ") >= 0.85 * len(sentence) and "  " not in sentence.strip()


def _source_docstrings(library: Path) -> Iterator[tuple[str, list[str]]]:
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED.isdisjoint(relative.parts):
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # lib2to3 keeps files that are not Python 3
                continue
            yield relative.as_posix(), list(_docstrings_of_tree(tree))


def _docstrings_of_tree(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            yield docstring
    for child in ast.iter_child_nodes(node):
        yield from _docstrings_of_tree(child)


def _builtin_docstrings() -> Iterator[tuple[str, list[str]]]:
    for name in sorted(sys.builtin_module_names):
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # old modules say so of themselves
            module = importlib.import_module(name)
        yield name, list(_docstrings_of_members(module, depth=0))


def _docstrings_of_members(owner: object, *, depth: int) -> Iterator[str]:
    for _, member in sorted(vars(owner).items()):
        if inspect.isroutine(member) or inspect.isclass(member):
            docstring = getattr(member, "__doc__", None)
            if isinstance(docstring, str):
                yield docstring
        if inspect.isclass(member) and depth == 0:
            yield from _docstrings_of_members(member, depth=1)


def _help_topics(library: Path) -> Iterator[tuple[str, list[str]]]:
    path = library / "pydoc_data" / "topics.py"
    if path.is_file():
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                topics: dict[str, str] = ast.literal_eval(node.value)
                yield from ((f"topics/{topic}", [text]) for topic, text in sorted(topics.items()))


def _package(name: str) -> str:
    first = name.partition("/")[0].removesuffix(".py").lstrip("_")
    return first or name


def split_by_package(
    documents: Iterable[Document], *, held_out_fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """The documents in two parts that share no package: those to learn from, and those held out.

    A package goes to one side whole, because its modules describe the same things in the same words.

    Args:
        held_out_fraction: how many of all sentences to hold out, at most; 0.1 is a tenth.
        seed: of the order in which the packages are drawn.
    """
    documents = list(documents)
    sizes: dict[str, int] = {}
    for document in documents:
        sizes[document.package] = sizes.get(document.package, 0) + len(document.sentences)
    room = held_out_fraction * sum(sizes.values())
    held_out = set()
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    for package in rng.sample(sorted(sizes), k=len(sizes)):
        if sizes[package] <= room:
            room -= sizes[package]
            held_out.add(package)
    return (
        [document for document in documents if document.package not in held_out],
        [document for document in documents if document.package in held_out],
    )

"""Names: of models on the hub, of the files of a checkpoint, and of tensors."""

from __future__ import annotations

import errno
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from porting.checkpoint.errors import FaultList, checkpoint_error
from porting.errors import Code

MODEL_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
REVISION = re.compile(r"[A-Za-z0-9][\w.+-]*(?:/[A-Za-z0-9][\w.+-]*)*")


MOST_JOINED = 64
"""Checkpoints that are joined to one at a time."""


@dataclass(frozen=True, kw_only=True)
class ModelId:
    """A model on the hub: ``org/name``, and a branch, tag or commit."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def split_inner_path(text: str) -> tuple[str, str | None]:
    """Split a path or a model's name from the inner path behind its ``#``; None if there is none.

    What exists under the whole text is meant by it, whatever it is called.

    >>> split_inner_path("no/such/file.pt#model.encoder")
    ('no/such/file.pt', 'model.encoder')
    >>> split_inner_path("google-bert/bert-base-uncased")
    ('google-bert/bert-base-uncased', None)
    """
    places = [at for at, letter in enumerate(text[:LONGEST_TENSOR_NAME]) if letter == "#"]
    if not places or exists(text):
        return text, None
    at = next((at for at in places if exists(text[:at])), places[0])
    return text[:at], text[at + 1 :]


def split_sources(text: str) -> tuple[str, dict[str, str]]:
    """Split what names several checkpoints: the first, and the others by the names that they get.

    A path may itself hold ``+NAME=``.  Of the ways to read the text, the one is meant of which most paths exist.

    >>> split_sources("./llama+lora=./adapter#model+delta=org/name")
    ('./llama', {'lora': './adapter#model', 'delta': 'org/name'})
    """
    words = re.split(r"\+([A-Za-z_][A-Za-z0-9_]*)=", text)
    if len(words) == 1:
        return text, {}
    if len(words) > 2 * MOST_JOINED:
        message = f"{len(words) // 2} names with checkpoints behind them, and at most {MOST_JOINED} are joined"
        raise checkpoint_error(Code.CHECKPOINT_NOT_FOUND, text, message, "join them in several steps")
    ways = list(_ways(words))
    least = min(map(_missing, ways))
    best = [way for way in ways if _missing(way) == least]
    if len(best) > 1:
        first, second = (" and ".join(way[::2]) for way in best[:2])
        message = f"this may be {first}, or {second}: all of them are there"
        raise checkpoint_error(Code.CHECKPOINT_AMBIGUOUS, text, message, "rename what is not meant")
    first, *others = best[0]
    names, paths = others[::2], others[1::2]
    if len({*names}) < len(names):
        message = "two of the checkpoints get one name"
        raise checkpoint_error(Code.CHECKPOINT_AMBIGUOUS, text, message, "write +NAME=PATH with a NAME for each")
    return first, dict(zip(names, paths, strict=True))


def _ways(words: list[str]) -> Iterator[list[str]]:
    """The ways to read paths with names between them: a longer path is one of them only if it exists."""
    if not words:
        return
    path = words[0]
    for end in range(1, len(words) + 1, 2):
        shorter = path
        path = path if end == 1 else f"{path}+{words[end - 2]}={words[end - 1]}"
        outer, _ = split_inner_path(path)
        if end > 1 and (len(outer) <= len(shorter) or not exists(outer)):  # an inner path holds no +NAME=
            continue
        if end == len(words):
            yield [path]
        else:
            yield from ([path, words[end], *way] for way in _ways(words[end + 1 :]))


def _missing(way: list[str]) -> int:
    return sum(not exists(split_inner_path(path)[0]) for path in way[::2])


def exists(text: str) -> bool:
    """Whether a path exists, as a file, a directory or anything else."""
    return os.path.lexists(expanded(text))


def is_too_long(path: Path) -> bool:
    """Whether a path, or a part of it, is longer than the system lets it be."""
    try:
        os.lstat(path)
    except (OSError, ValueError) as error:
        return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    return False


def expanded(text: str) -> Path:
    """Replace ``~`` by the home folder; the path as it is if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def parse_model_id(text: str, *, revision: str | None, files: tuple[str, ...] = ()) -> ModelId | None:
    """Parse the name of a model on the hub; None if it cannot be one.

    Args:
        revision: the same given beside it; None when it is not.

    >>> parse_model_id("google-bert/bert-base-uncased@main", revision=None)
    ModelId(repo='google-bert/bert-base-uncased', revision='main')
    """
    repo, at, written = text.partition("@")
    if not MODEL_NAME.fullmatch(repo) or repo.endswith(files):
        return None
    if at and revision is not None and written != revision:
        message = f"two revisions are given, {written!r} in the name and {revision!r} beside it"
        raise checkpoint_error(Code.HUB_NOT_FOUND, text, message, "leave one of them out")
    wanted = written if at else revision if revision is not None else "main"
    if not REVISION.fullmatch(wanted) or ".." in wanted:
        message = f"{wanted!r} is not a possible revision"
        raise checkpoint_error(Code.HUB_NOT_FOUND, repo, message, "pass a branch, a tag or a commit")
    return ModelId(repo=repo, revision=wanted)


DCP_METADATA = ".metadata"

OPEN_CLIP_CONFIG = "open_clip_config.json"

CONFIG_NAMES = (
    "config.json",
    "adapter_config.json",
    "params.json",
    "hparams.json",
    OPEN_CLIP_CONFIG,
    "model_config.yaml",
)
"""The files that a config is looked for in: of transformers, peft, Meta and Mistral, OpenAI, open_clip, and litgpt."""

YAML = (".yaml", ".yml")
"""Endings of configs in YAML."""

COMPANIONS = (
    *CONFIG_NAMES,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""The files of a checkpoint besides its weights: configuration and tokenizer."""


MOST_MARKS = 30
"""Consecutive combining marks, as in Unicode's stream-safe format; sorting more takes quadratic time."""

UNSEEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of controls, formatting, lone surrogates, and line and paragraph separators."""

LONGEST_TENSOR_NAME = 4096
"""Characters of a name; a longer name is refused, since examining 50 MB takes seconds."""

RENAME = "rename it and write the file again"


def check_names(names: Iterable[str], faults: FaultList) -> None:
    """Note empty and overlong names, control characters, and names that differ only by Unicode normalisation."""
    seen: dict[str, str] = {}
    for name in names:
        if 0 < len(name) <= LONGEST_TENSOR_NAME and name.isascii() and name.isprintable():
            continue
        if not name:
            faults.add(Code.TENSOR_NAME, "a tensor has the empty string for a name", hint=RENAME)
        if len(name) > LONGEST_TENSOR_NAME:
            message = f"its name has {len(name)} characters, at most {LONGEST_TENSOR_NAME} are taken"
            faults.add(Code.TENSOR_NAME, message, tensor=name, hint=RENAME)
            continue
        characters = set(name)
        unseen = next((c for c in sorted(characters) if unicodedata.category(c) in UNSEEN_CATEGORIES), None)
        if unseen is not None:
            message = f"its name holds the control character U+{ord(unseen):04X}"
            faults.add(Code.TENSOR_NAME, message, tensor=name, hint=RENAME)
        marks = "".join(c for c in characters if unicodedata.combining(c))
        if marks and re.search(f"[{re.escape(marks)}]{{{MOST_MARKS + 1}}}", name):
            message = f"its name has more than {MOST_MARKS} combining marks in a row"
            faults.add(Code.TENSOR_NAME, message, tensor=name, hint=RENAME)
            continue
        twin = seen.setdefault(unicodedata.normalize("NFC", name), name)
        if twin != name:
            message = f"its name differs only by Unicode normalisation from {twin!a}"
            faults.add(Code.TENSOR_NAME, message, tensor=name, hint=RENAME)

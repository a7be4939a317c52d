"""Checking whether an untrusted ``tokenizer.json`` may be run in this process.

A few bytes of it can make gigabytes of a word: texts that replace shorter ones, one behind the other, a template of a
million parts.  The parts that ordinary tokenizers are made of are known, and cannot.  A file with any other part is
tried out first, in a process with a limit of memory and time, with the text that is to be taken apart.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping

from porting.checkpoint.strict_json import Json
from porting.errors import Code, Fault
from porting.limits import LimitError, Limits, limits, raised

HARMLESS = frozenset(
    {
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Strip",
        "StripAccents",
        "ByteLevel",
        "Digits",
        "Metaspace",
        "Punctuation",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
        "Sequence",
    }
)
"""Parts whose output is at most a few times as long as the text."""

CONVENTIONS = re.compile(r"[A-Z][a-z]+(?:Normalizer|PreTokenizer|Processing)")
"""The parts that are named after a model, and templates: what they add is known."""

MOST_PARTS = 32
"""Parts of a template or of a sequence."""

MOST_CHARACTERS = 4096
"""Characters of an added token with its description, or of a word to be split, which takes quadratic time."""

MOST_PIECES = 1_000_000
"""Word pieces of a text."""

ROOM = 768 << 20
"""Bytes of memory for the process that tries a tokenizer out, beside four times the file's."""

PANIC, MANY = 4, 6
"""Exit codes of the trial: the library failed without an ordinary exception; too many pieces."""

TRIAL = """
import resource, sys
seconds, memory, most = map(int, sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
from tokenizers import Tokenizer
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
many = False
try:
    tokenizer = Tokenizer.from_file(sys.argv[4])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    many = bool(sys.argv[5:]) and len(tokenizer.encode(*sys.argv[5:])) > most
except MemoryError:
    sys.exit(5)
except Exception:
    pass
except BaseException:
    sys.exit(4)
sys.exit(6 if many else 0)
"""
"""An exception here is raised in the library's own process as well, where it becomes a message."""


VALUES_OF_A_NODE = 5
"""The cost of a node of the tree of pieces, in values of descriptions: it takes 330 bytes."""

USUAL_NODES = 500_000
"""Nodes that are not charged; only vocabularies of about 250,000 pieces have more."""


def is_known(content: Json) -> bool:
    """Whether a tokenizer consists of parts whose output is bounded by their input."""
    if not isinstance(content, dict):
        return True  # it is none, and refused as soon as it is read
    steps = [content.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor")]
    added = content.get("added_tokens")
    return (
        all(_is_harmless(part) for step in steps for part in _parts(step))
        and _is_plain(content.get("model"))
        and all(len(str(token)) <= MOST_CHARACTERS for token in (added if isinstance(added, list) else ()))
    )


def _is_plain(model: Json) -> bool:
    """Whether a model joins its pieces as GPT-2 and CLIP do; the library can abort on other joins."""
    if not isinstance(model, Mapping):
        return True  # it is none, and refused as soon as it is read
    prefix, suffix = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
    if model.get("type") == "BPE":
        return not prefix and suffix in (None, "", "</w>")
    longest = model.get("max_input_chars_per_word", 0)
    plain = not suffix and len(str(prefix)) <= MOST_PARTS
    return plain and isinstance(longest, int) and longest <= MOST_CHARACTERS


def piece_fault(content: Json) -> str:
    """The fault of a vocabulary's pieces; empty if there is none.

    The library takes them apart and frees them by recursion, a level for each byte.
    """
    longest = max((len(piece) for piece in _pieces(content)), default=0)
    if longest <= MOST_CHARACTERS:
        return ""
    return f"a piece of its vocabulary has {longest} characters, and at most {MOST_CHARACTERS} are taken"


def tree_cost(content: Json) -> int:
    """The cost of the tree of a Unigram vocabulary, in values of descriptions.

    The library makes a node for each beginning of a piece, so that pieces that begin alike share theirs.
    """
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, Mapping) or isinstance(model.get("vocab"), Mapping):
        return 0
    nodes, before = 0, b""
    for piece in sorted(piece.encode("utf-8", "surrogatepass") for piece in _pieces(content)):
        common = min(len(before), len(piece))
        nodes += len(piece) - next((at for at in range(common) if before[at] != piece[at]), common)
        before = piece
    return VALUES_OF_A_NODE * max(nodes - USUAL_NODES, 0)


def _pieces(content: Json) -> Iterator[str]:
    """The pieces of a model's vocabulary: the keys of an object, or what stands first in each of a list's pairs."""
    model = content.get("model") if isinstance(content, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, Mapping):
        yield from vocabulary
    for pair in vocabulary if isinstance(vocabulary, list) else ():
        if isinstance(pair, list) and pair and isinstance(pair[0], str):
            yield pair[0]


def _parts(step: Json) -> Iterator[Json]:
    """A part, and the parts of a sequence."""
    waiting = [step]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Mapping):
            for value in part.values():
                waiting += (
                    [item for item in value if isinstance(item, dict) and "type" in item]
                    if isinstance(value, list)
                    else []
                )


def _is_harmless(part: Json) -> bool:
    if not isinstance(part, Mapping):
        return part is None
    kind = part.get("type")
    if not isinstance(kind, str) or not (kind in HARMLESS or CONVENTIONS.fullmatch(kind)):
        return False
    return _longest(part) <= MOST_PARTS


def _longest(part: Json) -> int:
    """The length of the longest list or text in a part, at any depth."""
    longest, waiting = 0, [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list | str):
            longest = max(longest, len(value))
        waiting += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return longest


def require_bounded(raw: bytes, texts: tuple[str, ...], *, where: str) -> None:
    """Try a tokenizer in a process of its own: load it, and encode these texts.

    Args:
        raw: the tokenizer's file.
        texts: the texts to encode.
        where: the file, for messages.

    Raises:
        LimitError: it takes more memory or time than is allowed, or makes the library fail.
    """
    seconds = limits().seconds
    room = (ROOM + 4 * len(raw)) * max(seconds // Limits.seconds, 1)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(raw)
        file.flush()
        words = [str(seconds), str(room), str(MOST_PIECES), file.name, *texts]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        command = [sys.executable, "-I", "-c", TRIAL, *words]
        done = subprocess.run(command, env=environment, capture_output=True, check=False)  # noqa: S603  # our own program
    if done.returncode == MANY:
        message = f"tried out in a process of its own, it made more than {MOST_PIECES} word pieces of the text"
        hint = "take the file from where the checkpoint came from"
        raise LimitError(Fault(code=Code.TOKENIZER_INVALID, where=where, message=message, hint=hint))
    if done.returncode == PANIC:
        message = "tried out in a process of its own, it made the tokenizers library fail"
        hint = "take the file from where the checkpoint came from"
        raise LimitError(Fault(code=Code.TOKENIZER_INVALID, where=where, message=message, hint=hint))
    if done.returncode:
        message = f"tried out in a process of its own, it took more than {seconds} s, or {room} bytes of memory"
        if -done.returncode in {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS}:  # memory may also run out so
            message += ", or the tokenizers library aborted"
        hint = f"if you trust where it comes from, raise the limit: {raised('seconds', 10 * seconds)}"
        raise LimitError(Fault(code=Code.LIMIT, where=where, message=message, hint=hint))


def parsed(raw: bytes) -> Json:
    """The content of a tokenizer's file that determines its parts."""
    try:
        value: Json = json.loads(raw)
    except (ValueError, RecursionError):
        return None  # the tokenizers library says what is wrong with it
    return value

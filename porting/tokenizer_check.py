"""Checking whether an untrusted ``tokenizer.json`` may be run in this process.

A few bytes of it can make gigabytes of a word: texts that replace shorter ones, one behind the other, a template of a
million parts.  The parts that ordinary tokenizers are made of are known, and cannot.  A file with any other part is
tried out first, in a process with a limit of memory and time, with the text that is to be taken apart.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from porting.checkpoint.strict_json import Json
from porting.errors import Code, Fault
from porting.limits import LimitError, Limits, limits, raised, spending

STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
TOP = {*STEPS, "version", "truncation", "padding", "added_tokens", "model"}

SETTINGS = set(
    (  # noqa: SIM905  # a list of quoted words is harder to read
        "type normalizers pretokenizers processors decoders clean_text handle_chinese_chars strip_accents lowercase "
        "strip_left strip_right add_prefix_space trim_offsets use_regex individual_digits behavior replacement "
        "prepend_scheme split sep cls prefix suffix cleanup content start stop"
    ).split()
)
"""Fields that make a text at most a few times as long, whatever the part that has them is called."""

TEMPLATE = {"type", "single", "pair", "special_tokens"}

MODEL = set(
    (  # noqa: SIM905  # as above
        "type vocab merges unk_token unk_id continuing_subword_prefix end_of_word_suffix max_input_chars_per_word "
        "dropout fuse_unk byte_fallback ignore_merges"
    ).split()
)

MOST_STEPS = 4
"""Parts of a sequence: each may double the text."""

MOST_PARTS = 32
"""Parts of a template, and characters of a setting."""

MOST_ADDED = 1 << 20
"""Characters of all added tokens with their descriptions."""

MOST_CHARACTERS = 4096
"""Characters of an added token with its description, or of a piece of a vocabulary."""

MOST_WORD = 256
"""Characters of a word that is split into pieces, and of a piece that is looked for at each character of a text.

Either takes time for each character of a text that grows with the square of it.
"""

MOST_PIECES = 1_000_000
"""Word pieces of a text."""

ROOM = 768 << 20
"""Bytes of memory for the process that tries a tokenizer out, beside four times the file's."""

START, A_SECOND = 0.25, 4 << 20
"""Seconds of processor time that a trial may take to begin, and bytes of a file that it may take a second to load.

An ordinary tokenizer takes a quarter of that.  What a trial takes beyond counts twice, since the work is done again.
"""

ELSEWHERE = "take the file from where the checkpoint came from"

PANIC, MANY = 4, 6
"""Exit codes of the trial: the library failed without an ordinary exception; too many pieces."""

TRIAL = """
import json, resource, sys, time
seconds, memory, most = map(int, sys.argv[1:4])
texts, ids = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
from tokenizers import Tokenizer
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
many = False
try:
    tokenizer = Tokenizer.from_file(sys.argv[4])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    made = tokenizer.encode(*texts).ids if texts else ids
    many = len(made) > most or len(tokenizer.decode(made)) > most
except MemoryError:
    sys.exit(5)
except Exception:
    pass
except BaseException:
    sys.exit(4)
print(time.process_time())
sys.exit(6 if many else 0)
"""
"""An exception here is raised in the library's own process as well, where it becomes a message."""


VALUES_OF_A_NODE = 5
"""The cost of a node of the tree of pieces, in values of descriptions: it takes 330 bytes."""

USUAL_NODES = 500_000
"""Nodes that are not charged; only vocabularies of about 250,000 pieces have more."""


def is_known(content: Json) -> bool:
    """Whether a tokenizer consists of parts whose output is bounded by their input.

    What counts are the fields and their sizes: the library takes parts without a type, and types of any name may come.
    """
    if not isinstance(content, dict):
        return True  # it is none, and refused as soon as it is read
    added = content.get("added_tokens")
    lengths = [len(str(token)) for token in (added if isinstance(added, list) else ())]
    return (
        content.keys() <= TOP
        and all(_is_harmless(content.get(name)) for name in STEPS)
        and _is_plain(content.get("model"))
        and max(lengths, default=0) <= MOST_CHARACTERS
        and sum(lengths) <= MOST_ADDED
    )


def _is_plain(model: Json) -> bool:
    """Whether a model joins its pieces as GPT-2 and CLIP do; the library can abort on other joins."""
    if not isinstance(model, Mapping):
        return True  # it is none, and refused as soon as it is read
    prefix, suffix = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
    longest = model.get("max_input_chars_per_word", 0)
    if not model.keys() <= MODEL or not isinstance(longest, int) or longest > MOST_WORD:
        return False
    if isinstance(model.get("vocab"), list) and any(len(piece) > MOST_WORD for piece in _pieces({"model": model})):
        return False
    if "merges" in model or model.get("type") == "BPE":
        return not prefix and suffix in (None, "", "</w>") and _is_merged(model)
    return not suffix and len(str(prefix)) <= MOST_PARTS


def _is_merged(model: Mapping[str, Json]) -> bool:
    """Whether all merges make pieces of the vocabulary; of others the library fails with a stack trace."""
    merges, vocabulary = model.get("merges"), model.get("vocab")
    if not isinstance(merges, list) or not isinstance(vocabulary, Mapping):
        return not merges
    for merge in merges:
        match merge.split(" ") if isinstance(merge, str) else merge:
            case [str(first), str(second)] if first + second in vocabulary:
                pass
            case _:
                return False
    return True


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


def _is_harmless(step: Json) -> bool:
    """Whether a step has a few parts, with known and small settings only."""
    waiting, count, templates = [step], 0, 0
    if isinstance(step, list):  # the library takes the fields of a part in this form too
        return False
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            if _size(part) > MOST_PARTS or (isinstance(part, list) and any(isinstance(one, list) for one in part)):
                return False
            waiting += part if isinstance(part, list) else ()
            continue
        count += 1
        if part.keys() == TEMPLATE:
            templates += 1
            if (
                templates > 1
                or any(_size(value) > MOST_PARTS for value in part.values())
                or len(str(part)) > MOST_CHARACTERS
                or not _is_complete(part)
            ):
                return False
        elif part.keys() <= SETTINGS or _shortens(part):
            waiting += [value for name, value in part.items() if name != "pattern"]
        else:
            return False
    return count <= MOST_STEPS + 1


def _is_complete(template: Mapping[str, Json]) -> bool:
    """Whether a template has all that it names; of others the library fails with a stack trace."""
    tokens = template["special_tokens"]
    for name, sequences in (("single", ("A",)), ("pair", ("A", "B"))):
        pieces = template[name]
        for piece in pieces if isinstance(pieces, list) else [None]:
            match piece:
                case {"SpecialToken": {"id": str(token)}, **rest} if isinstance(tokens, Mapping) and token in tokens:
                    known = not rest
                case {"Sequence": {"id": str(sequence)}, **rest}:
                    known = not rest and sequence in sequences
                case _:
                    known = False
            if not known:
                return False
    return True


def _size(value: Json) -> int:
    return len(value) if isinstance(value, list | str | dict) else 0


def _shortens(part: Mapping[str, Json]) -> bool:
    """Whether a part replaces a text by one that is no longer."""
    match part.get("pattern"), part.get("content"):
        case {"String": str(old), **rest}, str(new) if not rest:
            return (
                part.keys() <= {"type", "pattern", "content"}
                and 0 < len(old) <= MOST_PARTS
                and len(new.encode("utf-8", "surrogatepass")) <= len(old.encode("utf-8", "surrogatepass"))
            )
    return False


def require_bounded(raw: bytes, texts: Sequence[str] = (), ids: Sequence[int] = (), *, where: str) -> None:
    """Try a tokenizer in a process of its own: load it, encode these texts, and decode what they become."""
    usual, most = START + len(raw) / A_SECOND, limits().seconds
    room = (ROOM + 4 * len(raw)) * max(most // Limits.seconds, 1)
    with spending() as budget, tempfile.NamedTemporaryFile(suffix=".json") as file:
        seconds = min(most, math.ceil(usual + max(budget.left, 0.0) / 2)) if budget.left < math.inf else most
        file.write(raw)
        file.flush()
        words = [str(seconds), str(room), str(MOST_PIECES), file.name]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        command = [sys.executable, "-I", "-c", TRIAL, *words]
        given = json.dumps([texts, ids]).encode()
        done = subprocess.run(command, env=environment, input=given, capture_output=True, check=False)  # noqa: S603  # our own program
        if done.returncode == 0:
            budget.spend(2 * max(float(done.stdout.split()[-1]) - usual, 0.0), where)
            return
    tried, code, hint = "tried out in a process of its own, it", Code.TOKENIZER_INVALID, ELSEWHERE
    if done.returncode == MANY:
        message = f"{tried} made more than {MOST_PIECES} tokens of the text"
    elif done.returncode == PANIC:
        message = f"{tried} made the tokenizers library fail"
    else:
        message = f"{tried} took more than {seconds} s, or {room} bytes of memory"
        if -done.returncode in {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS}:  # memory may also run out so
            message += ", or the tokenizers library aborted"
        code, hint = Code.LIMIT, f"if you trust where it comes from, raise the limit: {raised('seconds', 10 * most)}"
    raise LimitError(Fault(code=code, where=where, message=message, hint=hint))

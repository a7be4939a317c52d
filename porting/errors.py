"""Errors, their faults, and the texts of messages.

One root, :class:`PortingError`; each subclass says in whose hands the fault lies, and each :class:`Fault` it
carries has a stable :class:`Code`, documented in ``docs/errors.md``.  An error carries all the faults found, never only
the first; if they are many, they are grouped and counted here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, islice
from typing import TypeVar

from porting.printable import safe, shortened


class Code(StrEnum):
    """The stable name of a kind of fault.  ``docs/errors.md`` has a paragraph for each."""

    # checkpoints: reading and writing files
    BIN_ARCHIVE = "bin-archive"
    BIN_PICKLE = "bin-pickle"
    BIN_TENSOR = "bin-tensor"
    BIN_UNSAFE = "bin-unsafe"
    CHECKPOINT_AMBIGUOUS = "checkpoint-ambiguous"
    CHECKPOINT_EMPTY = "checkpoint-empty"
    CHECKPOINT_NOT_FOUND = "checkpoint-not-found"
    CONFIG_INVALID = "config-invalid"
    DCP_CHUNK = "dcp-chunk"
    DCP_METADATA = "dcp-metadata"
    DCP_PARTS = "dcp-parts"
    DCP_UNSAFE = "dcp-unsafe"
    DESTINATION_BUSY = "destination-busy"
    DESTINATION_REFUSED = "destination-refused"
    FILE_CHANGED = "file-changed"
    FILE_MISSING = "file-missing"
    FILE_NOT_REGULAR = "file-not-regular"
    FILE_TOO_LARGE = "file-too-large"
    FILE_UNREADABLE = "file-unreadable"
    FLAX_FILE = "flax-file"
    FORMAT_WRONG = "format-wrong"
    GGUF_FILE = "gguf-file"
    HDF5_FILE = "hdf5-file"
    HEADER_MISMATCH = "header-mismatch"
    HUB_ACCESS = "hub-access"
    HUB_ANSWER = "hub-answer"
    HUB_CACHE = "hub-cache"
    HUB_NOT_FOUND = "hub-not-found"
    HUB_UNREACHABLE = "hub-unreachable"
    INDEX_INVALID = "index-invalid"
    INDEX_SHARD = "index-shard"
    INDEX_TENSOR = "index-tensor"
    INDEX_TOTAL = "index-total"
    INNER_PATH = "inner-path"
    LINK_LEAVES_CHECKPOINT = "link-leaves-checkpoint"
    NOT_READ = "not-read"
    NPZ_FILE = "npz-file"
    ONNX_FILE = "onnx-file"
    ORBAX_FILE = "orbax-file"
    RECORD_INVALID = "record-invalid"
    REMOTE_CODE = "remote-code"
    SAFETENSORS_HEADER = "safetensors-header"
    SAFETENSORS_LAYOUT = "safetensors-layout"
    SAFETENSORS_TENSOR = "safetensors-tensor"
    TENSORFLOW_FILE = "tensorflow-file"
    TENSOR_DAMAGED = "tensor-damaged"
    TENSOR_NAME = "tensor-name"
    TENSOR_UNKNOWN = "tensor-unknown"
    TENSOR_UNWRITABLE = "tensor-unwritable"
    WEIGHTS_NOT_FETCHED = "weights-not-fetched"
    WRITE_FAILED = "write-failed"

    # Tables
    AXES_ONE_SIDE = "axes-one-side"
    BAD_AXES = "bad-axes"
    BAD_EXPRESSION = "bad-expression"
    BAD_EXTENDS = "bad-extends"
    BAD_FOLD = "bad-fold"
    BAD_NAME = "bad-name"
    INDEX_ONE_SIDE = "index-one-side"
    INDEX_TWICE = "index-twice"
    MISSING_KEY = "missing-key"
    NO_TABLE = "no-table"
    NOT_TOML = "not-toml"
    NOT_TRANSLATED = "not-translated"
    REGISTRY_REFUSED = "registry-refused"
    UNKNOWN_KEY = "unknown-key"
    WRONG_TYPE = "wrong-type"

    # Plans: a table checked against a checkpoint and a module
    APPROXIMATE = "approximate"
    CONFIG_REFUSED = "config-refused"
    COPIES_DIFFER = "copies-differ"
    DROP_DIFFERS = "drop-differs"
    DTYPE_CHANGE = "dtype-change"
    FRESH_NOT_ALLOWED = "fresh-not-allowed"
    INDEX_GAP = "index-gap"
    IRREVERSIBLE = "irreversible"
    MADE_DIFFERS = "made-differs"
    MISSING_MEMBER = "missing-member"
    NO_SOURCE = "no-source"
    NO_TARGET = "no-target"
    NOT_FINITE = "not-finite"
    READ_TWICE = "read-twice"
    RULE_MATCHES_NOTHING = "rule-matches-nothing"
    SHAPE_MISMATCH = "shape-mismatch"
    SIZE_CONFLICT = "size-conflict"
    SIZE_UNKNOWN = "size-unknown"
    SPELLED_TWICE = "spelled-twice"
    TIE_MISMATCH = "tie-mismatch"
    UNREAD_TENSOR = "unread-tensor"
    UNWRITTEN_PARAMETER = "unwritten-parameter"
    WRITTEN_TWICE = "written-twice"

    # Verification
    BAD_RECORDING = "bad-recording"
    FORWARD_FAILED = "forward-failed"
    MADE_IN_FORWARD = "made-in-forward"
    NO_INPUTS = "no-inputs"
    NO_PROBES = "no-probes"
    NO_REFERENCE = "no-reference"
    NOT_DETERMINISTIC = "not-deterministic"
    NOTHING_TO_MUTATE = "nothing-to-mutate"

    # Conversions: options that do not go together
    OPTION_REFUSED = "option-refused"
    RANK_LOST = "rank-lost"

    # Exports: a module written as a checkpoint
    CONFIG_UNKNOWN = "config-unknown"
    MODULE_CHANGED = "module-changed"

    # Budgets of reading descriptions, and unexpected errors
    LIMIT = "limit"
    UNEXPECTED = "unexpected"

    # Targets: the module that is loaded into
    BAD_TARGET = "bad-target"
    UNKNOWN_ARCHITECTURE = "unknown-architecture"
    UNTRUSTED_TARGET = "untrusted-target"

    # Text: a checkpoint's tokenizer, and what is asked of a model in words or about them
    NO_ATTENTION = "no-attention"
    NO_HEAD = "no-head"
    NO_LOGITS = "no-logits"
    NO_MASK = "no-mask"
    NO_TOKENIZER = "no-tokenizer"
    TEXT_REFUSED = "text-refused"
    TEXT_TOO_LONG = "text-too-long"
    TOKENIZER_INVALID = "tokenizer-invalid"
    TOKENIZER_MISMATCH = "tokenizer-mismatch"


@dataclass(frozen=True)
class Option:
    """An argument of a function that a command takes as an option, in a :class:`Message`.

    Attributes:
        value: the value to pass; None names the argument alone.
    """

    name: str
    value: object = None

    @property
    def python(self) -> str:
        """The argument as in a call: ``reverse=True``; ``table=`` without a value."""
        return f"{self.name}=" if self.value is None else f"{self.name}={self.value!r}"

    @property
    def command(self) -> str:
        """The option as on a command line: ``--reverse``, ``--shard-size 5GB``."""
        flag = f"--{self.name.replace('_', '-')}"
        return flag if self.value is None or self.value is True else f"{flag} {self.value}"


@dataclass(frozen=True, kw_only=True)
class Wording:
    """A phrase of a :class:`Message` that a caller of the library and a user of the command line need in other words.

    Attributes:
        python: the phrase for who calls a function.
        command: the phrase for who types a command; may be empty.
    """

    python: str
    command: str


class Message(str):
    """A text that names arguments of functions, and knows its wording for the command line.

    It is a string, in the wording for callers of the library; the command line prints :attr:`command`.  Adding texts
    keeps both wordings.  An f-string would keep the first one alone: pass the parts to a message of their own instead.

    Args:
        parts: texts, messages, options and wordings, in their order.

    >>> hint = "go back: " + Message("pass ", Option("reverse", True), " and ", Option("table"))
    >>> hint
    'go back: pass reverse=True and table='
    >>> hint.command
    'go back: pass --reverse and --table'
    """

    command: str

    def __new__(cls, *parts: str | Option | Wording) -> Message:
        """Join the parts, in both wordings."""
        message = super().__new__(cls, "".join(part if isinstance(part, str) else part.python for part in parts))
        message.command = "".join(command_text(part) if isinstance(part, str) else part.command for part in parts)
        return message

    def __getnewargs__(self) -> tuple[Wording]:  # type: ignore[override]  # a plain string would lose the wording
        return (Wording(python=str(self), command=self.command),)

    def __add__(self, text: str) -> Message:
        return Message(self, text)

    def __radd__(self, text: str) -> Message:
        return Message(text, self)

    def map(self, change: Callable[[str], str]) -> Message:
        """Change both wordings in the same way."""
        return Message(Wording(python=change(str(self)), command=change(self.command)))


def command_text(text: str) -> str:
    """The wording of a text for the command line: a plain string is the same everywhere."""
    return text.command if isinstance(text, Message) else text


LONGEST = 4000
"""Characters of a message, a place and a hint; the middle of a longer text is left out."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A single fault of an input, in one line.

    Attributes:
        where: the file, table position (``bert.toml:12:3``) or tensor it was found in; may be empty.
        message: what was passed, what was found and what was expected.
        hint: what to do about it: the nearest name, or the next command; may be empty.
    """

    code: Code
    message: str
    where: str = ""
    hint: str = ""

    def __post_init__(self) -> None:
        for field in FIELDS:
            object.__setattr__(self, field, _cut(getattr(self, field), LONGEST))

    @property
    def line(self) -> Message:
        """The whole fault in one line, without characters that a terminal acts on."""
        where = f"{self.where}: " if self.where else ""
        hint = Message(" (", self.hint, ")") if self.hint else ""
        return Message(where, self.message, hint, f" [{self.code}]").map(safe)

    def __str__(self) -> str:
        return str(self.line)


FIELDS = ("message", "where", "hint")


def _cut(text: str, most: int) -> str:
    """Leave out the middle of a text that is longer than ``most``: it may quote a value of a file."""
    if isinstance(text, Message):
        return text.map(lambda wording: _cut(wording, most))
    return shortened(text, most)


class PortingError(Exception):
    """The root of every error that this library raises on purpose.

    Attributes:
        faults: the faults in the order in which they were found; at least one.  Of more than :data:`MOST_FAULTS`, those
            that differ only in numbers are grouped, and the rest is counted.

    >>> try:
    ...     import porting
    ...     porting.load("./nowhere")
    ... except PortingError as error:
    ...     print(error.faults[0].code)
    checkpoint-not-found
    """

    def __init__(self, faults: Fault | Iterable[Fault]) -> None:
        self.faults: tuple[Fault, ...] = (faults,) if isinstance(faults, Fault) else _readable(_bounded(faults))
        super().__init__("\n".join(str(fault) for fault in self.faults))


MOST_FAULTS = 50
"""Faults of an error at most, whatever a file holds."""

MOST_TEXT = 30_000
"""Characters of several faults together; a single one has :data:`LONGEST` for each field."""

STEPS_EACH = 100
"""The cost of removing the numbers of a name, in compared pairs of characters."""


class Comparisons:
    """The budget of a command for finding the nearest names; when it is spent, hints are left out.

    Args:
        left: pairs of characters that may be compared.
    """

    def __init__(self, left: int = 40_000_000) -> None:
        self._left = left

    def take(self, steps: int) -> bool:
        """Spend steps; False if fewer were left, and then none are."""
        self._left -= steps
        return self._left >= 0

    @property
    def spent(self) -> bool:
        """Whether the budget is spent."""
        return self._left <= 0


COMPARISONS: ContextVar[Comparisons | None] = ContextVar("comparisons", default=None)
"""The budget of the command, which :func:`porting.limits.spending` opens; None without one."""

MOST_CANDIDATES = 5000
"""The number of names, without their numbers, that a name is compared with."""

MOST_CHARACTERS = 200
"""Characters of a name that are compared; comparing takes the product of two lengths."""

_NUMBER = re.compile(r"(?<![^.'\"/_])[0-9]+(?![^.'\"/_])")

Item = TypeVar("Item")


def numbers_of(name: str) -> list[str]:
    """The numbers between the dots, slashes, underscores and quotes of a text."""
    return _NUMBER.findall(name)


def numberless(name: str) -> str:
    """Replace these numbers, to compare names of different layers.

    >>> numberless("layers.7.weight")
    'layers.#.weight'
    >>> numberless("encoder/layer_07/kernel")
    'encoder/layer_#/kernel'
    """
    return _NUMBER.sub("#", name)


def alike(faults: Iterable[Fault]) -> list[Fault]:
    """Group faults that differ only in the numbers within names; each group is one fault with its count.

    >>> layers = [Fault(code=Code.NO_SOURCE, message=f"'layers.{i}.bias' is missing") for i in range(12)]
    >>> print(*alike(layers))
    'layers.0.bias' is missing (and 11 more like it) [no-source]
    """
    groups, _ = _grouped(faults, _key)
    return [_counted(*group) for group in groups]


def grouped_lines(lines: Iterable[str], most: int = MOST_FAULTS) -> tuple[str, ...]:
    """Shorten a long list of lines: those that differ only in numbers are shown once.

    >>> grouped_lines([f"file {i}.bin: it is missing" for i in range(3)], 2)
    ('file 0.bin: it is missing', 'file 1.bin: it is missing', 'and 1 more, not shown')
    >>> grouped_lines([f"tensor 'layers.{i}.bias' is missing" for i in range(9)], 2)
    ("tensor 'layers.0.bias' is missing, and 8 more like it",)
    """
    lines = list(lines)
    if len(lines) <= most:
        return tuple(lines)
    groups, left = _grouped(lines, numberless, most)
    shown = [line if count == 1 else f"{line}, and {count - 1} more like it" for line, count in groups]
    return (*shown, *([f"and {left} more, not shown"] if left else ()))


def _bounded(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Bound the number of faults: many are grouped, and the last one counts the rest."""
    remaining = iter(faults)
    first = tuple(islice(remaining, MOST_FAULTS + 1))
    if len(first) <= MOST_FAULTS:
        return first
    groups, left = _grouped(chain(first, remaining), _key, MOST_FAULTS)
    shown = [_counted(*group) for group in groups]
    if left:
        shown.append(Fault(code=shown[-1].code, message=f"and {left} more faults, not shown"))
    return tuple(shown)


def _readable(faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Bound the length of all faults together: the middle of long texts is left out."""
    if sum(len(getattr(fault, field)) for fault in faults for field in FIELDS) <= MOST_TEXT:
        return faults
    most = MOST_TEXT // (2 * len(faults))
    return tuple(
        replace(fault, message=_cut(fault.message, most), where=_cut(fault.where, most), hint=_cut(fault.hint, most))
        for fault in faults
    )


def _grouped(
    items: Iterable[Item], key: Callable[[Item], Hashable], most: int | None = None
) -> tuple[list[tuple[Item, int]], int]:
    """Group items by key: the first of each group with its count; and the number of items beyond ``most`` groups."""
    groups: dict[Hashable, tuple[Item, int]] = {}
    left = 0
    for item in items:
        kind = key(item)
        first, count = groups.get(kind, (item, 0))
        if count or most is None or len(groups) < most:
            groups[kind] = first, count + 1
        else:
            left += 1
    return list(groups.values()), left


def _key(fault: Fault) -> Hashable:
    return fault.code, numberless(fault.where), numberless(fault.message)


def _counted(fault: Fault, count: int) -> Fault:
    if count == 1:
        return fault
    more = f"and {count - 1} more like it"
    return replace(fault, hint=Message(more, "; ", fault.hint) if fault.hint else more)


class CheckpointError(PortingError):
    """A checkpoint cannot be read or written as asked."""


class PortingWarning(UserWarning):
    """Something that is allowed and should be known, such as parameters that are new.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> import warnings
    >>> with warnings.catch_warnings(record=True, category=PortingWarning) as told:
    ...     warnings.simplefilter("always")
    ...     model = porting.load(source, architecture="BertForTokenClassification", fresh=True)
    >>> "new and untrained" in str(told[0].message)
    True
    """


class RankError(PortingError):
    """Another of several processes that work together could not do its part."""


class VerifyError(PortingError):
    """The verification cannot be run: no reference, a module that fails, probes that do not fit."""


def nearest(name: str, candidates: Sequence[str]) -> str:
    """The candidate that is most similar to ``name``, as a hint; empty if none is close.

    >>> nearest("layer.0.wieght", ["layer.0.weight", "pooler.bias"])
    "did you mean 'layer.0.weight'?"
    """
    found = closest(name, candidates)
    return f"did you mean {found!r}?" if found else ""


def closest(name: str, candidates: Iterable[str], most: int = MOST_CANDIDATES) -> str:
    """The candidate that is most similar to a name, preferably with the same numbers; empty if none is close."""
    left = COMPARISONS.get()
    if left is not None and left.spent:
        return ""
    candidates = list(candidates)
    patterns: dict[str, list[str]] = {}
    for candidate in candidates:
        pattern = numberless(candidate)[:MOST_CHARACTERS]
        if pattern in patterns or len(patterns) < most:
            patterns.setdefault(pattern, []).append(candidate)
    steps = STEPS_EACH * len(candidates) + min(len(name), MOST_CHARACTERS) * sum(map(len, patterns))
    if left is not None and not left.take(steps):
        return ""
    close = difflib.get_close_matches(numberless(name)[:MOST_CHARACTERS], list(patterns), n=1, cutoff=0.6)
    if not close:
        return ""
    numbers = numbers_of(name)
    same = (candidate for candidate in patterns[close[0]] if numbers_of(candidate) == numbers)
    return next(same, patterns[close[0]][0])

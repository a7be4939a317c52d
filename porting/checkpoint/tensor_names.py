"""Names of tensors that a person could not tell apart, or that would garble a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from porting.checkpoint.errors import FaultList
from porting.errors import Code

MOST_MARKS = 30
"""Combining marks in a row, as Unicode's stream-safe format has it: sorting them takes the square of their number."""

UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of controls, formatting, lone surrogates, and line and paragraph separators."""

LONGEST = 4096
"""Characters of a name: nobody reads a longer one, and looking at 50 MB of one takes a while."""

RENAME = "rename it and write the file again"


def check_names(names: Iterable[str], faults: FaultList) -> None:
    """Notes empty names, overlong names, control characters, and names that differ only by Unicode normalisation."""
    seen: dict[str, str] = {}
    for name in names:
        if 0 < len(name) <= LONGEST and name.isascii() and name.isprintable():
            continue
        if not name:
            faults.add(Code.TENSOR_NAME, "a tensor has the empty string for a name", hint=RENAME)
        if len(name) > LONGEST:
            message = f"its name has {len(name)} characters, at most {LONGEST} are taken"
            faults.add(Code.TENSOR_NAME, message, tensor=name, hint=RENAME)
            continue
        characters = set(name)
        unseen = next((c for c in sorted(characters) if unicodedata.category(c) in UNSEEN), None)
        if unseen is not None:
            message = f"its name holds the control character U+{ord(unseen):04X}"
            faults.add(Code.TENSOR_NAME, message, tensor=name, hint=RENAME)
        if _has_many_marks(name, characters):
            message = f"its name has more than {MOST_MARKS} combining marks in a row"
            faults.add(Code.TENSOR_NAME, message, tensor=name, hint=RENAME)
            continue
        twin = seen.setdefault(unicodedata.normalize("NFC", name), name)
        if twin != name:
            message = f"its name differs only by Unicode normalisation from {twin!a}"
            faults.add(Code.TENSOR_NAME, message, tensor=name, hint=RENAME)


def _has_many_marks(name: str, characters: set[str]) -> bool:
    marks = "".join(c for c in characters if unicodedata.combining(c))
    return bool(marks) and re.search(f"[{re.escape(marks)}]{{{MOST_MARKS + 1}}}", name) is not None

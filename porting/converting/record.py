"""The record of a conversion: the origin of the files of a directory, and the digest of each.

The same conversion gives the same text: it has no time, no path and no name of a machine.  Its last field is the digest
of the rest, so that damage to the record is detected.

Tensors whose names differ only in numbers, and that have the same dtype, shape and file, are one group, whose fields
are stored once (:func:`packed`). Each tensor adds the number of its group, the numbers in its name, and its digest of
16 bytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from porting.checkpoint.errors import CheckpointError, checkpoint_error
from porting.checkpoint.layout import RECORD, SAFETENSORS_DTYPES
from porting.checkpoint.strict_json import JsonError, parse
from porting.converting.digests import ALGORITHM, of_bytes
from porting.errors import Code
from porting.limits import charge
from porting.opening import Folder

if TYPE_CHECKING:
    from porting.plan.recipe import Described

FORMAT = "porting-provenance-2"
LONGEST = 256 << 20
"""Bytes: a million tensors need less."""

LONGEST_DIGEST = 128
"""Characters: a record with a longer digest of its own is damaged."""


def versions() -> dict[str, str]:
    """The versions of the programs that made the files."""
    import torch  # noqa: PLC0415  # files are compared with their record without torch

    return {"porting": version("porting"), "python": platform.python_version(), "torch": str(torch.__version__)}


def record_bytes(content: Mapping[str, object]) -> bytes:
    """The text of a record: its format, the content, and its digest."""
    whole = {"format": FORMAT, "digests": ALGORITHM, **content}
    text = _text(whole)
    digest = _text({"digest": of_bytes(text)})
    return text.removesuffix(END) + b"," + digest.removeprefix(b"{")


END = b"\n}\n"


def _text(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=True) + "\n").encode()


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record that was read.

    Attributes:
        damage: why it is not what was written; empty when it is.
    """

    content: Mapping[str, object]
    damage: str = ""

    def section(self, *names: str) -> Mapping[str, object]:
        """A section of the record; empty if there is none."""
        found: object = self.content
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def text(self, *names: str) -> str:
        """A string of the record; empty if there is none."""
        value = self.section(*names[:-1]).get(names[-1])
        return value if isinstance(value, str) else ""

    @cached_property
    def tensors(self) -> dict[str, str]:
        """The digest of each tensor that was written."""
        return {name: digest for name, (digest, _) in unpacked(self.section("tensors")).items()}

    @property
    def sources(self) -> dict[str, Described]:
        """The tensors of the converted checkpoint, in their order."""
        from porting.plan.recipe import TensorSpec  # noqa: PLC0415  # files are compared with their record without torch

        found: dict[str, Described] = {}
        for name, (_, group) in unpacked(self.section("source", "tensors")).items():
            match group:
                case {"dtype": str(dtype), "shape": list(shape)} if dtype in SAFETENSORS_DTYPES:
                    sizes = tuple(size for size in shape if isinstance(size, int))
                    found[name] = TensorSpec(shape=sizes, dtype=SAFETENSORS_DTYPES[dtype].dtype)
        return found


NUMBER = re.compile("([0-9]+)")

DIGEST = 16
"""Bytes of a digest."""


def packed(tensors: Iterable[tuple[str, str, Mapping[str, object]]]) -> dict[str, object]:
    """The tensors' section of a record, with repeated facts stored once for each group of names.

    Args:
        tensors: for each its name, its digest in hexadecimal, and further fields, such as dtype and shape.

    Returns:
        ``groups``: names that differ only in numbers, and the fields that their tensors share; ``order``: for each
        tensor the number of its group and the numbers in its name; ``digests``: all digests, in base64.

    >>> packed([("h.0.w", "00" * 16, {"dtype": "F32"}), ("h.1.w", "ff" * 16, {"dtype": "F32"})])["order"]
    '0:0 0:1'
    """
    groups: dict[str, int] = {}
    order, digests = [], []
    for name, digest, facts in tensors:
        parts = NUMBER.split(name)
        key = json.dumps({"name": parts[::2], **facts})
        order.append(f"{groups.setdefault(key, len(groups))}:{'.'.join(parts[1::2])}")
        digests.append(bytes.fromhex(digest))
    text = base64.b64encode(b"".join(digests)).decode()
    return {"groups": [json.loads(key) for key in groups], "order": " ".join(order), "digests": text}


def unpacked(section: Mapping[str, object]) -> dict[str, tuple[str, Mapping[str, object]]]:
    """Read what :func:`packed` wrote: name -> the digest and the further fields; empty if it is anything else."""
    groups, order, digests = (section.get(key) for key in ("groups", "order", "digests"))
    if not isinstance(groups, list) or not isinstance(order, str) or not isinstance(digests, str):
        return {}
    try:
        raw = base64.b64decode(digests, validate=True)
    except (binascii.Error, ValueError):
        return {}
    charge("objects", order.count(" ") + 1, where=RECORD)
    found: dict[str, tuple[str, Mapping[str, object]]] = {}
    for place, one in enumerate(order.split(" ")):
        which, colon, numbers = one.partition(":")
        group = groups[int(which)] if NUMBER.fullmatch(which) and len(which) < 10 and int(which) < len(groups) else None
        texts = group.get("name") if isinstance(group, dict) else None
        given = numbers.split(".") if numbers else []
        digest = raw[DIGEST * place : DIGEST * (place + 1)]
        if (
            not isinstance(group, dict)
            or not colon
            or not isinstance(texts, list)
            or len(texts) != len(given) + 1
            or len(digest) < DIGEST
        ):
            return {}
        if not all(isinstance(text, str) for text in texts):
            return {}
        name = texts[0] + "".join(map("".join, zip(given, texts[1:], strict=True)))
        charge("metadata", len(name), where=RECORD)
        found[name] = digest.hex(), group
    return found


def read_record(folder: Folder) -> Record | None:
    """Read the record in a directory; None if there is none."""
    path = folder.path / RECORD
    if not folder.kind(RECORD):
        return None
    raw = folder.read(RECORD, limit=LONGEST)
    try:
        content = parse(raw, where=str(path))
    except JsonError as error:
        raise _invalid(path, f"it cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _invalid(path, f"it is not a record of the format {FORMAT}")
    fits = _fits(raw, content.get("digest"))
    return Record(content=content, damage="" if fits else "it is not as it was written: its own digest does not fit")


def _fits(raw: bytes, digest: object) -> bool:
    """Whether the digest at the end of a record's text is right.

    The text itself is compared and not written out again: that may take many times as long as reading it.
    """
    if not isinstance(digest, str) or len(digest) > LONGEST_DIGEST:
        return False
    behind = b"," + _text({"digest": digest}).removeprefix(b"{")
    return raw.endswith(behind) and digest == of_bytes(raw.removesuffix(behind) + END)


def _invalid(path: Path, message: str) -> CheckpointError:
    hint = "convert again, or take the file from where the directory came from"
    return checkpoint_error(Code.RECORD_INVALID, str(path), message, hint)

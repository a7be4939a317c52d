"""Unexpected exceptions: each ends in a line, and in a report for the maintainers."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import traceback
from importlib.metadata import PackageNotFoundError, version

from porting.errors import Code, Fault

UNEXPECTED = 3
"""Exit code: a fault of the program itself."""

PACKAGES = ("porting", "torch", "safetensors", "huggingface_hub", "transformers", "tokenizers")
LONGEST = 200
"""Characters of the exception's own message in the line."""


def unexpected(error: BaseException) -> Fault:
    """The fault for an exception that is none of the library's own; writes the report that it names."""
    text = str(error).strip().partition("\n")[0]
    said = f"{type(error).__name__}: {text[:LONGEST]}" if text else type(error).__name__
    try:
        path = _report(error)
    except OSError as failed:
        hint = f"this is a fault of porting, and no report could be written: {failed.strerror or failed}"
    else:
        hint = f"this is a fault of porting: please send {path} to the maintainers"
    return Fault(code=Code.UNEXPECTED, message=said, hint=hint)


def _report(error: BaseException) -> str:
    """Write what was typed, on which versions, and where it stopped; returns the file."""
    lines = [f"{name} {_version(name)}" for name in PACKAGES]
    lines += [f"python {platform.python_version()} on {platform.platform()}", f"typed: {sys.argv!r}", ""]
    lines += traceback.format_exception(error, limit=-200)
    descriptor, path = tempfile.mkstemp(prefix="porting-report-", suffix=".txt")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write("\n".join(lines))
    return path


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"

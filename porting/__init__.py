"""Load pretrained weights into transformers of your own, and prove that the port is faithful.

Each name is imported when it is first used: ``import porting`` costs nothing, and transformers, which costs more than
loading a model, is imported only by what runs the reference.
"""

import sys


def _is_the_program() -> bool:
    """Whether ``python -m porting`` imports this, so that the current folder is first on the path."""
    words = iter(sys.orig_argv[1:] if sys.argv[:1] == ["-m"] else ())
    for word in words:
        if word in ("-X", "-W"):
            next(words, "")
        elif word.startswith("-") and "m" in word and not word.startswith(("-X", "-W", "--")):
            return (word.partition("m")[2] or next(words, "")) == __name__
    return False


# Before anything else is imported, the standard library included: a file of that name in the folder would run.
if _is_the_program() and not sys.flags.safe_path:
    del sys.path[0]

import importlib  # noqa: E402  # after the folder is gone
from typing import TYPE_CHECKING  # noqa: E402  # as above

if TYPE_CHECKING:
    from porting.checkpoint import Checkpoint, inspect_checkpoint, open_checkpoint
    from porting.comparing.differences import Comparison, diff
    from porting.comparing.digests import Digest, digest
    from porting.converting.conversion import Converted, convert
    from porting.converting.integrity import verify_files
    from porting.embedded import embedded_checkpoint
    from porting.errors import PortingError, PortingWarning
    from porting.exporting import Exported, export
    from porting.generating import Generated, generate, next_tokens, translate
    from porting.loading import load, provenance
    from porting.notation import Table, parse_table, read_table
    from porting.plan import Plan
    from porting.plan.check import check
    from porting.recordings import load_recording, save_recording
    from porting.seeing import Attention, Classification, attention, attention_of, classify
    from porting.suggesting import Suggestion, suggest
    from porting.text import fill_mask, next_sentence
    from porting.verification import Report, record, verify

__all__ = [
    "Attention",
    "Checkpoint",
    "Classification",
    "Comparison",
    "Converted",
    "Digest",
    "Exported",
    "Generated",
    "Plan",
    "PortingError",
    "PortingWarning",
    "Report",
    "Suggestion",
    "Table",
    "attention",
    "attention_of",
    "check",
    "classify",
    "convert",
    "diff",
    "digest",
    "embedded_checkpoint",
    "export",
    "fill_mask",
    "generate",
    "inspect_checkpoint",
    "load",
    "load_recording",
    "next_sentence",
    "next_tokens",
    "open_checkpoint",
    "parse_table",
    "provenance",
    "read_table",
    "record",
    "save_recording",
    "suggest",
    "translate",
    "verify",
    "verify_files",
]

_HOMES = {
    "porting.checkpoint": ("Checkpoint", "inspect_checkpoint", "open_checkpoint"),
    "porting.comparing.differences": ("Comparison", "diff"),
    "porting.comparing.digests": ("Digest", "digest"),
    "porting.converting.conversion": ("Converted", "convert"),
    "porting.converting.integrity": ("verify_files",),
    "porting.embedded": ("embedded_checkpoint",),
    "porting.errors": ("PortingError", "PortingWarning"),
    "porting.exporting": ("Exported", "export"),
    "porting.generating": ("Generated", "generate", "next_tokens", "translate"),
    "porting.loading": ("load", "provenance"),
    "porting.notation": ("Table", "parse_table", "read_table"),
    "porting.plan": ("Plan", "check"),
    "porting.recordings": ("load_recording", "save_recording"),
    "porting.seeing": ("Attention", "Classification", "attention", "attention_of", "classify"),
    "porting.suggesting": ("Suggestion", "suggest"),
    "porting.text": ("fill_mask", "next_sentence"),
    "porting.verification": ("Report", "record", "verify"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Checkpoints turned into another layout and back, in fixed memory, whole or not at all."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from porting.converting.conversion import Converted, carry_out, convert, prepare
    from porting.converting.draft import ConvertOptions, Draft
    from porting.converting.integrity import FilesReport, verify_files
    from porting.converting.processes import all_or_none, torchrun_group
    from porting.converting.progress import Progress, estimate

__all__ = [
    "ConvertOptions",
    "Converted",
    "Draft",
    "FilesReport",
    "Progress",
    "all_or_none",
    "carry_out",
    "convert",
    "estimate",
    "prepare",
    "torchrun_group",
    "verify_files",
]

_HOMES = {
    "conversion": ("Converted", "carry_out", "convert", "prepare"),
    "draft": ("ConvertOptions", "Draft"),
    "integrity": ("FilesReport", "verify_files"),
    "processes": ("all_or_none", "torchrun_group"),
    "progress": ("Progress", "estimate"),
}  # a file is compared with its record without torch, which the other modules need


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

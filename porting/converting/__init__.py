"""Checkpoints turned into another layout and back, in fixed memory, whole or not at all."""

from porting.converting.conversion import Converted, carry_out, convert, prepare
from porting.converting.draft import Draft
from porting.converting.integrity import FilesReport, verify_files
from porting.converting.processes import agreed, joined
from porting.converting.progress import Progress, estimate

__all__ = [
    "Converted",
    "Draft",
    "FilesReport",
    "Progress",
    "agreed",
    "carry_out",
    "convert",
    "estimate",
    "joined",
    "prepare",
    "verify_files",
]

"""Checkpoints turned into another layout and back, in fixed memory, whole or not at all."""

from porting.converting.conversion import Converted, carry_out, convert, prepare
from porting.converting.draft import Draft
from porting.converting.integrity import FilesReport, verify_files
from porting.converting.processes import all_or_none, torchrun_group
from porting.converting.progress import Progress, estimate

__all__ = [
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

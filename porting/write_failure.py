"""The system's errors when a file cannot be written, with what to do about them."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path

from porting.printable import quote, shell_word

FEW_INODES = 64
"""The number of free inodes that may merely be those of a failed attempt, whose files were removed."""


def described(error: OSError, folder: Path, needed: int | None = None) -> tuple[str, str]:
    """The reason why a file could not be written, and the advice.

    Args:
        needed: the bytes that are written in all; None where that is not known.
    """
    reason, hint = error.strerror or str(error), "choose another destination"
    match error.errno:
        case errno.ENOSPC:
            reason, hint = _no_space(reason, folder, needed)
        case errno.EFBIG:
            reason, hint = _too_large(reason, needed)
        case errno.EDQUOT:
            reason += f"; {_bytes(needed)}your quota there allows no more bytes or no more files"
            hint = "remove files of yours there (`quota -s` shows the quota), or choose another destination"
        case errno.EROFS:
            hint = "choose a destination that can be written to"
        case errno.ENAMETOOLONG:
            longest = longest_name(folder)
            reason += f": {quote(os.fsdecode(error.filename))}" if error.filename else ""
            reason += f"; the file system takes names of {longest} bytes" if longest else ""
            hint = "choose a destination with a shorter name"
        case errno.EIO:
            reason, hint = f"{reason}: the disk or its connection failed", "see `dmesg`, or choose another destination"
        case errno.EACCES | errno.EPERM:
            hint = f"check the permissions of {shell_word(folder)}, or choose another destination"
    return reason, hint


def longest_name(folder: Path) -> int:
    """The bytes that a name in a folder may have; 0 where the system does not tell."""
    with suppress(OSError, ValueError):
        return max(os.pathconf(folder, "PC_NAME_MAX"), 0)
    return 0


def _bytes(needed: int | None) -> str:
    return "" if needed is None else f"{needed} bytes are needed, and "


def _no_space(reason: str, folder: Path, needed: int | None) -> tuple[str, str]:
    free, inodes = needed or 0, None
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        status = os.statvfs(folder)
        inodes = status.f_favail if status.f_files else None  # some file systems have no fixed number of them
        reason += (
            f"; {needed} bytes are needed and {free} are free" if needed is not None else f"; {free} bytes are free"
        )
    if free >= (needed or 1) and inodes is not None and inodes <= FEW_INODES:
        many = "no inode is" if not inodes else "1 inode is" if inodes == 1 else f"{inodes} inodes are"
        return f"{reason}; {many} free, of which each file and directory needs one", (
            f"remove files that are not needed (`df -i {shell_word(folder)}` counts the inodes), "
            "or choose another destination"
        )
    return reason, "free some space, or choose another destination"


def _too_large(reason: str, needed: int | None) -> tuple[str, str]:
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        said = f"{reason}: {_bytes(needed)}the file system takes no file this large"
        return said, "choose a destination on another file system, or write smaller shards"
    said = f"{reason}: {_bytes(needed)}this process may write files of at most {limit} bytes (`ulimit -f`)"
    if most == resource.RLIM_INFINITY:
        return said, "run `ulimit -f unlimited` in the shell before it"
    return said, f"its hard limit is {most} bytes: see who set it (`ulimit -Hf`), or write smaller shards"

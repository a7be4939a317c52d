"""Recognising files of other formats by their first bytes."""

from __future__ import annotations

import re

from porting.checkpoint.container import FileKind
from porting.checkpoint.files import ByteSource
from porting.errors import Message, Option, Wording

_TOML = re.compile(rb"\[\[?[a-z_]+\]\]?\s|[a-z_]+ *= ")


def foreign(source: ByteSource) -> FileKind | None:
    """The kind of a file that no container reads; None if its first bytes do not tell."""
    head = source.pread(0, min(source.size, 1024))
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        return FileKind("an empty file", "the download or the copy never began: fetch it again")
    if head.startswith(b"version https://git-lfs"):
        return FileKind("a Git-LFS pointer", "run `git lfs pull` in its directory")
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return FileKind("an HTML page", "it is what the server answered instead of the file: log in and fetch it again")
    if head.startswith(b"PK\x03\x04"):
        return FileKind("a zip archive", "if torch.save made it, rename it to end in .bin")
    return _by_magic(head, text, source)


def _by_magic(head: bytes, text: bytes, source: ByteSource) -> FileKind | None:
    for magic, title, hint in (
        (b"\x1f\x8b", "a gzip archive", "run `gunzip` on it first"),
        (b"\x28\xb5\x2f\xfd", "a zstd archive", "run `unzstd` on it first"),
        (b"BZh", "a bzip2 archive", "run `bunzip2` on it first"),
        (b"\xfd7zXZ", "an xz archive", "run `unxz` on it first"),
        (b"\x89HDF", "an HDF5 file (TensorFlow or Keras)", "take the safetensors files of the model instead"),
        (b"\x93NUMPY", "a NumPy array", "save the tensors with safetensors"),
        (b"\x7fELF", "a program", "this is no file of weights: fetch it again"),
    ):
        if head.startswith(magic):
            return FileKind(title, hint)
    return _by_text(head, text, source)


def _by_text(head: bytes, text: bytes, source: ByteSource) -> FileKind | None:
    if head[257:262] == b"ustar":
        return FileKind("a tar archive", "unpack it, or save the weights again with a current torch.save")
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05":
        return FileKind("a pickle", "if it is a state dict that torch.save made, rename it to end in .bin")
    for title, is_it, hint in (
        (
            "a TOML text",
            _TOML.match(text) or source.where.endswith(".toml"),
            Message("a mapping table is passed as ", Option("table")),
        ),
        (
            "a Python file",
            source.where.endswith(".py"),
            Message("what builds a module is passed as ", Wording(python="into=", command="--into file.py:NAME")),
        ),
        (
            "a JSON text",
            text.startswith((b"{", b"[")),
            "the path may name the index or the configuration where the weights are meant",
        ),
    ):
        if is_it:
            return FileKind(title, hint)
    if not head.strip(b"\0"):
        return FileKind(
            f"a file that begins with {len(head)} zero bytes", "an interrupted download left it: fetch it again"
        )
    return None

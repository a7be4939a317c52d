"""Safetensors files, indexes and what stands in a checkpoint's place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import save
from torch import arange, ones

from tests.checkpoint.hostile import entry, index, st_file
from tests.checkpoint.test_flax_msgpack import HOSTILE as HOSTILE_FLAX
from tests.checkpoint.test_gguf import HOSTILE as HOSTILE_GGUF
from tests.checkpoint.test_index import HOSTILE_INDEX, OTHER, SHARD
from tests.checkpoint.test_npz import HOSTILE as HOSTILE_ARRAYS
from tests.checkpoint.test_onnx_file import HOSTILE as HOSTILE_ONNX
from tests.checkpoint.test_safetensors_file import FINE, HOSTILE
from tests.checkpoint.test_tensorflow_file import DATA
from tests.checkpoint.test_tensorflow_file import HOSTILE as HOSTILE_TENSORFLOW
from tests.security.rows import Row, Words, file_row, folder_row

MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
ONE = {"a": entry([3], 0, 3)}


def names(*spelled: str) -> Callable[[], bytes]:
    """A file of one-byte tensors of these names."""
    return lambda: st_file({name: entry([1], i, i + 1) for i, name in enumerate(spelled)}, bytes(len(spelled)))


def sparse(size: int, length: int) -> Callable[[Path], object]:
    """A file that is long and takes no room, with this length of its header."""

    def make(folder: Path) -> None:
        with (folder / MODEL).open("wb") as file:
            file.write(length.to_bytes(8, "little"))
            file.truncate(size)

    return make


def linked(target: str, *, name: str = MODEL) -> Callable[[Path], object]:
    return lambda folder: (folder / name).symlink_to(target)


def shards(content: bytes) -> Callable[[Path], object]:
    """An index of this content beside a few shards."""

    def make(folder: Path) -> None:
        (folder / INDEX).write_bytes(content)
        (folder / "s0.safetensors").write_bytes(SHARD)
        (folder / "s1.safetensors").write_bytes(OTHER)
        both = save({"a": arange(3.0), "b": arange(2.0)})
        (folder / "both.safetensors").write_bytes(both)
        (folder / "changed.safetensors").write_bytes(save({"a": ones(3), "b": arange(2.0)}))
        os.mkfifo(folder / "fifo.safetensors")

    return make


def given(path: str) -> Callable[[Path], Words]:
    return lambda folder: ["inspect", path]


def endless(folder: Path) -> None:
    (folder / INDEX).touch()
    os.truncate(folder / INDEX, 1 << 40)


TWICE = b'{"weight_map":{"a":"s0.safetensors"},"weight\\u005fmap":{"a":"both.safetensors"}}'


def alike(one: str, other: str = "s0.safetensors") -> bytes:
    """An index that names two shards."""
    names = [name.removesuffix(".safetensors") + ".safetensors" for name in (one, other)]
    return index(dict(zip("ab", names, strict=True)))


def loop(folder: Path) -> None:
    (folder / INDEX).write_bytes(index({"a": INDEX}))


def two_loops(folder: Path) -> None:
    (folder / "a.safetensors.index.json").write_bytes(index({"a": "b.safetensors.index.json"}))
    (folder / INDEX).write_bytes(index({"a": "a.safetensors.index.json"}))


def both_kinds(folder: Path) -> None:
    (folder / MODEL).write_bytes(SHARD)
    (folder / INDEX).write_bytes(index({"a": "s0.safetensors"}))
    (folder / "s0.safetensors").write_bytes(SHARD)


def good(folder: Path) -> None:
    (folder / "s0.safetensors").write_bytes(SHARD)
    (folder / "s9.safetensors").write_bytes(b"of an older save")
    (folder / INDEX).write_bytes(index({"a": "s0.safetensors"}, 99))


def crowd() -> bytes:
    """A header of 10^5 tensors, each of a dtype that there is not."""
    one = json.dumps(entry([1], 0, 1, "U7"))
    return st_file(("{" + ",".join(f'"a{number}":{one}' for number in range(10**5)) + "}").encode())


def self_link(folder: Path) -> None:
    (folder / MODEL).symlink_to(MODEL)


SAFETENSORS = [
    *(file_row("safetensors", MODEL, what, told, lambda raw=raw: raw) for what, raw, told in HOSTILE),  # type: ignore[misc]  # mypy: a default of a lambda
    folder_row("safetensors", "header length beyond 100 MB", "the format allows 100000000", sparse(2**30, 2**28)),
    folder_row("safetensors", "100 MB of zeros for a header", "the header begins with", sparse(10**8 + 8, 10**8)),
    file_row("safetensors", MODEL, "10^5 tensors of no dtype", "and 99980 more faults, not shown", crowd),
    file_row(
        "safetensors",
        MODEL,
        "10^6 nested objects",
        "nested too deeply",
        lambda: st_file(b'{"a":' * 10**6 + b"1" + b"}" * 10**6),
    ),
    file_row(
        "safetensors",
        MODEL,
        "NaN for an offset",
        "NaN is not JSON",
        lambda: st_file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[NaN,1]}}', b"x"),
    ),
    file_row(
        "safetensors",
        MODEL,
        "offsets as 1e308",
        "which is not a whole number",
        lambda: st_file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1e308]}}', b"x"),
    ),
    file_row(
        "safetensors",
        MODEL,
        "offset of 2^63",
        "more than 64 bits can hold",
        lambda: st_file({"a": entry([1], 0, 2**63)}, b"x"),
    ),
    file_row(
        "safetensors",
        MODEL,
        "rank 10^5",
        "100000 dimensions; torch handles 64",
        lambda: st_file({"a": entry([1] * 10**5, 0, 1)}, b"a"),
    ),
    file_row(
        "safetensors",
        MODEL,
        "an odd count of 4-bit values",
        "packs 4-bit elements",
        lambda: st_file({"a": entry([3], 0, 2, "F4")}, b"ab"),
    ),
    file_row(
        "safetensors",
        MODEL,
        "a bidirectional override in a name",
        "control character U+202E",
        names("layer.\u202ethgiew"),
    ),
    file_row("safetensors", MODEL, "a bidirectional isolate in a name", "control character U+2066", names("a\u2066b")),
    file_row("safetensors", MODEL, "a zero-width space in a name", "control character U+200B", names("a\u200bb")),
    file_row("safetensors", MODEL, "a line separator in a name", "control character U+2028", names("a\u2028b")),
    file_row("safetensors", MODEL, "a carriage return in a name", "control character U+000D", names("ok\rEVIL")),
    file_row(
        "safetensors",
        MODEL,
        "a name of 50 MB",
        "its name has 50000001 characters",
        lambda: st_file({"a" * 50_000_000 + "\a": entry([1], 0, 1)}, b"x"),
    ),
    folder_row("safetensors", "a directory in its place", "found a directory", lambda f: (f / MODEL).mkdir()),
    folder_row("safetensors", "a FIFO in its place", "found a named pipe (FIFO)", lambda f: os.mkfifo(f / MODEL)),
    Row(of="safetensors", what="/dev/zero", told="found a character device", code=2, make=given("/dev/zero")),
    folder_row("safetensors", "a link to /dev/zero", "outside the checkpoint", linked("/dev/zero")),
    folder_row("safetensors", "a link that leads out", "outside the checkpoint", linked("/etc/passwd")),
    folder_row("safetensors", "a link that climbs out", "outside the checkpoint", linked("../../../etc/passwd")),
    folder_row(
        "safetensors", "a link to itself", "found a link where a file of weights or settings should be", self_link
    ),
    folder_row("safetensors", "a link to nothing", "which does not exist", linked("gone")),
    folder_row(
        "safetensors",
        "config.json linked to a secret",
        "outside the checkpoint",
        lambda f: ((f / MODEL).write_bytes(SHARD), linked("/etc/shadow", name="config.json")(f)),
    ),
    *(file_row("safetensors", MODEL, what, "", lambda raw=raw: raw, code=0) for what, raw in FINE),  # type: ignore[misc]  # mypy: a default of a lambda
    file_row(
        "safetensors",
        MODEL,
        "50 MB of metadata",
        "",
        code=0,
        content=lambda: st_file({"__metadata__": {"a": "x" * 50_000_000}, **ONE}, b"abc"),
    ),
]

INDEXES = [
    *(folder_row("index", what, told, shards(raw)) for what, raw, told in HOSTILE_INDEX),
    folder_row("index", "an index that names itself", "do not all end in .safetensors", loop),
    folder_row("index", "indexes that name each other", "do not all end in .safetensors", two_loops),
    folder_row("index", "deeply nested", "nested too deeply", shards(b"[" * 10**6)),
    folder_row(
        "index", "a shard with a newline in its name", "control characters", shards(index({"a": "a\n.safetensors"}))
    ),
    folder_row(
        "index", "a shard with a bidirectional mark", "control characters", shards(index({"a": "\u202ea.safetensors"}))
    ),
    folder_row(
        "index",
        "a shard whose name is 300 characters",
        "is longer than the name of a file can be",
        shards(index({"a": "a" * 300 + ".safetensors"})),
    ),
    folder_row("index", "a FIFO in its place", "found a named pipe (FIFO)", lambda f: os.mkfifo(f / INDEX)),
    folder_row(
        "index",
        "a terabyte of it",
        "at most 268435456 can be meant",
        endless,
    ),
    folder_row("index", "a directory in its place", "found a directory", lambda f: os.mkdir(f / INDEX)),
    folder_row("index", "a link to outside", "outside the checkpoint", lambda f: os.symlink("/etc/passwd", f / INDEX)),
    folder_row("index", "a byte-order mark", "starts with a byte-order mark", shards(b"\xef\xbb\xbf{}")),
    folder_row("index", "the map twice", "the key 'weight_map' stands twice", shards(TWICE)),
    folder_row("index", "shards that differ by case", "are one file where case", shards(alike("S0.safetensors"))),
    folder_row("index", "shards that differ by an accent", "Unicode's forms", shards(alike("e\u0301", "\xe9"))),
    folder_row("index", "beside a single file", "two sets of weights", both_kinds),
    folder_row("index", "a wrong total and a stray shard", "total_size is 99", good, code=0),
]

NPZ: list[Row] = [file_row("npz", "model.npz", what, told, content) for what, content, told in HOSTILE_ARRAYS]

GGUF: list[Row] = [file_row("gguf", "model.gguf", what, told, content) for what, content, told in HOSTILE_GGUF]

FLAX: list[Row] = [file_row("flax", "flax_model.msgpack", what, told, content) for what, content, told in HOSTILE_FLAX]

ONNX: list[Row] = [file_row("onnx", "model.onnx", what, told, content) for what, content, told in HOSTILE_ONNX]


def tensorflow(content: Callable[[], bytes]) -> Callable[[Path], object]:
    """An index of this content beside 16 bytes of elements."""
    return lambda folder: ((folder / "model.ckpt.index").write_bytes(content()), (folder / DATA).write_bytes(bytes(16)))


TENSORFLOW: list[Row] = [
    folder_row("tensorflow", what, told, tensorflow(content)) for what, content, told in HOSTILE_TENSORFLOW
]

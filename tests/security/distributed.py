"""Distributed checkpoints that lie: a pickle that would run, paths that lead out, chunks that are none."""

from __future__ import annotations

import copy
import os
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from tests.checkpoint.distributed import (
    FILE,
    METADATA,
    archive,
    changed,
    cut,
    holding,
    metadata_is,
    moved,
    read,
    save,
    write,
)
from tests.checkpoint.test_bin_file import RunsCode, with_pickle
from tests.security.rows import Row, Words, folder_row

OF = "distributed checkpoint"
Make = Callable[[Path], object]


def seen(what: str, told: str, make: Make, *, code: int = 2) -> Row:
    """Looked at by ``porting inspect``, which reads the metadata."""
    return folder_row(OF, what, told, make, code=code)


def read_whole(what: str, told: str, make: Make) -> Row:
    """Read by ``porting hash``: what is inside of a chunk shows then."""

    def build(folder: Path) -> Words:
        (folder / "m").mkdir()
        make(folder / "m")
        return ["hash", "m"]

    return Row(of=OF, what=what, told=told, code=2, make=build)


def described(change: Callable[[Any], object]) -> Make:
    """What is said of tensor ``a`` is changed."""
    return changed(lambda metadata: change(metadata.state_dict_metadata["a"]))


def resized(*sizes: int) -> Make:
    return described(lambda one: setattr(one, "size", torch.Size(sizes)))


def calling(module: str, name: str) -> Make:
    spelled = b"".join(b"\x8c" + bytes([len(one)]) + one for one in (module.encode(), name.encode()))
    return metadata_is(b"\x80\x04" + spelled + b"\x93\x8c\x09touch ran\x85R.")


def linked(target: str) -> Make:
    def make(folder: Path) -> None:
        save(folder)
        (folder / FILE).unlink()
        (folder / FILE).symlink_to(target)

    return make


def instead(name: str, put: Callable[[Path], object]) -> Make:
    """Something else stands where a file should."""

    def make(folder: Path) -> None:
        save(folder)
        (folder / name).unlink()
        put(folder / name)

    return make


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def flipped(folder: Path) -> None:
    """One bit of the elements of ``a``."""
    save(folder, {"a": torch.full((64,), 1.5)})
    raw = bytearray((folder / FILE).read_bytes())
    raw[raw.index(struct.pack("<f", 1.5) * 64)] ^= 1
    (folder / FILE).write_bytes(raw)


def cut_short(folder: Path) -> None:
    save(folder)
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(raw[: len(raw) // 2])


def one_list(metadata: Any) -> None:
    """Two tensors with one list of chunks."""
    state = metadata.state_dict_metadata
    state["b"] = TensorStorageMetadata(state["a"].properties, state["a"].size, state["a"].chunks)


def of_many_axes(metadata: Any) -> None:
    """The place of a chunk has 65 axes: many may share one of 300,000, which is hashed for each."""
    index, place = next(iter(metadata.storage_data.items()))
    far = replace(index)
    object.__setattr__(far, "offset", (0,) * 65)
    metadata.storage_data[far] = place


def in_itself(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["a"].chunks
    chunks.append(chunks)


def many(folder: Path) -> None:
    """250,000 entries that share one tensor's description by the memo."""
    save(folder)
    metadata = read(folder)
    a = metadata.state_dict_metadata["a"]
    metadata.state_dict_metadata = {str(number): a for number in range(250_000)}
    write(folder, metadata)


def alias(folder: Path) -> None:
    """300 tensors whose chunks are those of one: 1 MiB on the disk, 300 MiB to load."""
    save(folder, {"a": torch.zeros(1 << 18)})
    metadata = read(folder)
    state, storage = metadata.state_dict_metadata, metadata.storage_data
    ((index, place),) = list(storage.items())
    for number in range(300):
        state[f"a{number}"] = copy.deepcopy(state["a"])
        storage[replace(index, fqn=f"a{number}")] = place
    write(folder, metadata)


def twice(folder: Path) -> None:
    """The name ``a`` twice in the dictionary of tensors."""
    save(folder)
    raw = (folder / METADATA).read_bytes()
    (folder / METADATA).write_bytes(raw.replace(b"\x8c\x01b\x94", b"\x8c\x01a\x94"))


def deep_chunk(folder: Path) -> None:
    """Offsets of a chunk that are 500,000 tuples in one another."""
    save(folder)
    metadata = read(folder)
    object.__setattr__(metadata.state_dict_metadata["a"].chunks[0], "offsets", "DEEP")
    raw = pickle.dumps(metadata, protocol=2)  # which has no frames with lengths
    (folder / METADATA).write_bytes(re.sub(rb"X\x04\0\0\0DEEP", b")" + b"\x85" * 500_000, raw, count=1))


def named(name: object) -> Make:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()

    return changed(change)


SIZE = len(archive(torch.zeros(3)))

DISTRIBUTED: list[Row] = [
    seen("a pickle that runs code", "a call of 'posix.system'", metadata_is(pickle.dumps(RunsCode(), 4))),
    seen("eval", "a call of 'builtins.eval'", calling("builtins", "eval")),
    seen("getattr of what is not an enumeration", "a call of builtins.getattr", calling("builtins", "getattr")),
    seen("torch.load", "a call of 'torch.serialization.load'", calling("torch.serialization", "load")),
    seen("importlib", "a call of 'importlib.import_module'", calling("importlib", "import_module")),
    seen(
        "a function of the module of its classes",
        "a call of 'torch.distributed.checkpoint.metadata.os'",
        calling("torch.distributed.checkpoint.metadata", "os"),
    ),
    seen(
        "a dotted name under an allowed class",
        "a call of 'torch.distributed.checkpoint.metadata.Metadata.__init__'",
        calling("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
    ),
    seen("a storage of its own by a persistent id", "the opcode 0x51", metadata_is(b"\x80\x04NQ.")),
    seen("an allowed class called", "a call of torch.distributed.checkpoint.metadata.Metadata",
         metadata_is(b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93)R.")),
    seen("an ordered dictionary made anew", "a new object of collections.OrderedDict",
         metadata_is(b"\x80\x04\x8c\x0bcollections\x8c\x0bOrderedDict\x93)\x81.")),
    seen("attributes for a list", "attributes for a list", metadata_is(b"\x80\x04]}b.")),
    seen("sizes that are made of one long list 2,000 times", "more than 4000000 values in descriptions",
         metadata_is(b"\x80\x02ctorch\nSize\nq\0](" + b"K\1" * 500_000 + b"eq\1" + b"h\0h\1\x85R" * 2000 + b".")),
    seen("a chunk at a place of 65 axes", "without a name and a place", changed(of_many_axes)),
    seen("a path that climbs out", "holds a path separator", moved(relative_path="../" + FILE)),
    seen("an absolute path", "holds a path separator", moved(relative_path="/etc/passwd")),
    seen("a path with a backslash", "holds a path separator", moved(relative_path="..\\x.distcp")),
    seen("a path that is a directory", "names a directory", moved(relative_path="..")),
    seen("a path that is a URL", "is a URL", moved(relative_path="https://host/x.distcp")),
    seen("a path with a control character", "control characters", moved(relative_path="x\x1b[2J.distcp")),
    seen("a path that is a number", "no file, offset and length", moved(relative_path=7)),
    seen("a file that is not there", "no such file", moved(relative_path="__9_0.distcp")),
    seen("a link that leads out", "outside the checkpoint", linked("/etc/passwd")),
    seen("a link to a device", "outside the checkpoint", linked("/dev/zero")),
    seen("a FIFO for a file of chunks", "found a named pipe (FIFO)", instead(FILE, os.mkfifo)),
    seen("a FIFO for the metadata", "found a named pipe (FIFO)", instead(METADATA, os.mkfifo)),
    seen("a directory for the metadata", "found a directory", instead(METADATA, os.mkdir)),
    seen("a terabyte of metadata", "can be meant", instead(METADATA, sparse)),
    seen("no metadata", "which is written last", instead(METADATA, lambda path: None)),
    seen("empty metadata", "it ends in the middle", metadata_is(b"")),
    seen("metadata cut short", "a frame that ends behind the pickle", lambda folder: (
        save(folder), (folder / METADATA).write_bytes((folder / METADATA).read_bytes()[:-40]))),
    seen("bytes behind the metadata", "3 bytes behind its end", lambda folder: (
        save(folder), (folder / METADATA).write_bytes((folder / METADATA).read_bytes() + b"...")) ),
    seen("a dictionary for metadata", "it describes no state dict with its storage", metadata_is(pickle.dumps({}, 4))),
    seen("metadata of nothing", "it describes nothing", changed(lambda one: one.state_dict_metadata.clear())),
    seen("no storage", "it describes no state dict with its storage",
         changed(lambda one: setattr(one, "storage_data", None))),
    seen("a string bomb", "a string of 4294967295 bytes", metadata_is(b"\x80\x04X\xff\xff\xff\xff.")),
    seen("a memo without the entry", "the memo has no entry 7", metadata_is(b"\x80\x04h\x07.")),
    seen("a list of chunks in itself", "a chunk at None of None is not part of [6, 4]", changed(in_itself)),
    seen("one list of chunks for two tensors", "its chunks are those of another tensor", changed(one_list)),
    seen("tuples 500,000 deep in a chunk", "a chunk at [((", deep_chunk),
    seen("250,000 tensors of one description", "and 249980 more faults, not shown", many),
    seen("a name twice", "the key 'a' twice", twice),
    seen("a name that is a number", "the key '7' is a whole number", named(7)),
    seen("a control character in a name", "control character U+001B", named("x\x1b[2J")),
    seen("an empty name", "the empty string for a name", named("")),
    seen("an offset beyond the file", f"should lie at bytes 999999 to {999999 + SIZE} of",
         moved("b", offset=999999, length=SIZE)),
    seen("a length beyond the file", "which has", moved("b", length=1 << 30)),
    seen("a negative offset", "at offset -1 is not a range", moved(offset=-1)),
    seen("a negative length", "its storage of -5 bytes", moved(length=-5)),
    seen("an offset of 2^70", "is not a range", moved(offset=1 << 70)),
    seen("a fractional offset", "no file, offset and length", moved(offset=1.5)),
    seen("an offset that is a boolean", "no file, offset and length", moved(offset=True)),
    seen("a chunk that is compressed", "its storage is transformed", moved(transform_descriptors=["zstd"])),
    seen("two tensors on one range", "are also those of 'b'", moved("b", offset=0)),
    seen("a range that overlaps another's end", "are also those of", moved("b", offset=8)),
    seen("a chunk in fewer bytes than its elements", "needs 96 bytes and has 9", moved(length=9)),
    seen("300 names for 1 MiB", "bytes of tensors beyond those that are stored", alias),
    seen("a file that was cut short", "which has", cut_short),
    seen("chunks that overlap", "its chunks at [0, 0] and [2, 0] overlap", cut([((0, 0), (3, 4)), ((2, 0), (4, 4))])),
    seen("a hole between chunks", "4 of its elements are in no chunk", cut([((0, 0), (3, 4)), ((4, 0), (2, 4))])),
    seen("a chunk twice", "its chunks at [0, 0] and [0, 0] overlap", cut([((0, 0), (6, 4)), ((0, 0), (6, 4))])),
    seen("a chunk beyond its tensor", "is not part of [6, 4]", cut([((0, 0), (7, 4))])),
    seen("a chunk that begins before it", "is not part of [6, 4]", cut([((-1, 0), (6, 4))])),
    seen("a chunk of a negative size", "is not part of [6, 4]", cut([((0, 0), (-6, -4))])),
    seen("a chunk of another rank", "is not part of [6, 4]", cut([((0,), (24,))])),
    seen("no chunk", "24 of its elements are in no chunk", cut([])),
    seen("a chunk without storage", "lies in no file", changed(lambda one: one.storage_data.clear())),
    seen("a shape that overflows", "its size overflows 64 bits", resized(1 << 40, 1 << 40)),
    seen("0 x huge", "its size overflows 64 bits", resized(0, 1 << 62, 1 << 62)),
    seen("a negative size", "its size holds '-6'", resized(-6, -4)),
    seen("rank 1000", "1000 dimensions; torch handles 64", resized(*[1] * 1000)),
    seen("a dtype that is no dense one", "a call of 'torch.qint8'",
         described(lambda one: setattr(one.properties, "dtype", torch.qint8))),
    seen("a sparse layout", "its layout is torch.sparse_coo",
         described(lambda one: setattr(one.properties, "layout", torch.sparse_coo))),
    seen("chunks that are not a list", "it is not a tensor with a dtype, a size and chunks",
         described(lambda one: setattr(one, "chunks", None))),
    read_whole("a chunk of another shape", "it holds a tensor [4, 6] of float32, and .metadata says [6, 4] of float32",
               holding(archive(torch.zeros(4, 6)))),
    read_whole("a chunk of another dtype", "it holds a tensor [6, 4] of float64, and .metadata says",
               holding(archive(torch.zeros(6, 4).double()))),
    read_whole("a chunk that is a dictionary", "it holds a dictionary where a tensor is expected",
               holding(archive({"a": torch.zeros(6, 4)}))),
    read_whole("a chunk that is not an archive", "a file that begins with 500 zero bytes", holding(bytes(500))),
    read_whole("a chunk whose pickle runs code", "a call of 'posix.system'",
               holding(with_pickle(pickle.dumps(RunsCode(), 2)))),
    read_whole("a chunk that is cut short", "its table of contents cannot be read",
               holding(archive(torch.zeros(6, 4))[:-30])),
    read_whole("a chunk of no byte", "needs 96 bytes and has 0", moved(length=0)),
    read_whole("a flipped bit", "the checksum of the record 'archive/data/0' does not match its bytes", flipped),
    seen("a good one", "", save, code=0),
]  # fmt: skip

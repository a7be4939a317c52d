"""HDF5 files as a source: what h5py and Keras wrote, and files that lie."""

from __future__ import annotations

import base64
import ctypes
import io
import itertools
import math
import tracemalloc
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from porting.checkpoint import inspect_checkpoint, open_checkpoint
from porting.checkpoint.files import InMemory
from porting.checkpoint.hdf5_file import Hdf5, _Elements
from porting.checkpoint.hdf5_walk import BLOCK, PARTIAL_AS_THEY_ARE
from porting.limits import LimitError, spending
from tests.checkpoint.hostile import refused, tensors_of, torn
from tests.converting.drawing import bits, values

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
          torch.float64, torch.complex64]  # fmt: skip
STORED = [dtype for dtype in DTYPES if dtype is not torch.bool]


def write(path: Path | io.BytesIO, tensors: Mapping[str, torch.Tensor], **options: object) -> None:
    """A file with these tensors, nested by the slashes of their names."""
    with h5py.File(path, "w") as file:
        for name, tensor in tensors.items():
            file.create_dataset(name, data=tensor.numpy(), **(options if tensor.numel() > 1 else {}))


@pytest.mark.parametrize("options", [{}, {"chunks": (3, 2, 1)}, {"chunks": (4, 3, 2), "compression": "gzip"}])
def test_each_type_is_read_to_the_bit(tmp_path: Path, options: dict[str, object]) -> None:
    tensors = {f"a/{dtype}": values((7, 3, 2), dtype, 1) for dtype in DTYPES}
    tensors |= {"empty": torch.zeros(0, 3), "a/b/scalar": torch.tensor(2.5)}
    write(tmp_path / "tf_model.h5", tensors, **options)
    assert tensors_of(tmp_path) == {name: bits(tensor) for name, tensor in tensors.items()}
    inside = open_checkpoint(f"{tmp_path / 'tf_model.h5'}#a")
    assert bits(inside.read("torch.float32")) == bits(tensors["a/torch.float32"])


def test_big_endian_numbers_and_numbers_that_were_never_written(tmp_path: Path) -> None:
    expected = values((5, 3), torch.float32, 2)
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["big"] = expected.numpy().astype(">f4")
        file.create_dataset("never", shape=(2, 2), dtype="f4", fillvalue=7)
    found = open_checkpoint(tmp_path)
    assert torch.equal(found.read("big"), expected)
    assert torch.equal(found.read("never"), torch.full((2, 2), 7.0))


def plain(file: h5py.File, name: str, data: np.ndarray, layout: int) -> None:
    """A dataset of this layout, as h5py's short way does not write it."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings.set_layout(layout)
    space = h5py.h5s.create_simple(data.shape) if data.shape else h5py.h5s.create(h5py.h5s.SCALAR)
    h5py.Dataset(h5py.h5d.create(file.id, name.encode(), h5py.h5t.py_create(data.dtype), space, settings))[...] = data


@pytest.mark.parametrize("band", [1 << 26, 1 << 9])
@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_all_that_h5py_stores_is_read_as_h5py_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, band: int
) -> None:
    """Layouts, filters, chunks that were never written, rows of chunks wider than what is put together at once."""
    monkeypatch.setattr("porting.checkpoint.hdf5_file.BAND", band)
    monkeypatch.setattr("porting.checkpoint.hdf5_file.PIECE", band // 2)
    generator, numbers = np.random.default_rng(0), itertools.count()
    with h5py.File(tmp_path / "a.h5", "w", libver=version) as file:
        for dtype, shape in itertools.product(("f4", ">f8", "i2", "u1", ">c8", "?"), ((), (7,), (5, 9), (3, 4, 6))):
            data = generator.integers(0, 2, shape).astype(dtype)
            plain(file, f"compact{next(numbers)}", data, h5py.h5d.COMPACT)
            file[f"row{next(numbers)}"] = data
            if not shape:
                continue
            for chunk, packed, shuffle, checked in itertools.product(
                (tuple(max(1, size // 2) for size in shape), shape), (None, "gzip"), (False, True), (False, True)
            ):
                options = {"chunks": chunk, "compression": packed, "shuffle": shuffle, "fletcher32": checked}
                file.create_dataset(f"whole{next(numbers)}", data=data, **options)
                some = file.create_dataset(f"some{next(numbers)}", shape=shape, dtype=dtype, **options)
                some[0] = data[0]
        wide = np.arange(30 * 900, dtype="f4").reshape(30, 900)
        file.create_dataset("wide", data=wide, chunks=(30, 7), compression="gzip")
        grown = file.create_dataset("grown", data=wide[:9, :9], chunks=(4, 4), maxshape=(None, None), shuffle=True)
        grown.resize((6, 7))
    checkpoint = open_checkpoint(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert {*checkpoint.tensors} == {*file}
        for name in file:
            assert (
                checkpoint.read(name).numpy().tobytes()
                == file[name][()].astype(file[name].dtype.newbyteorder("<")).tobytes()
            ), name


def made(dtype: str, *changes: tuple[str, tuple[int, ...]]) -> h5py.h5t.TypeID:
    """The type of HDF5 for numbers of numpy, changed."""
    kind = h5py.h5t.py_create(np.dtype(dtype)).copy()
    for setting, given in changes:
        getattr(kind, f"set_{setting}")(*given)
    return kind


def compound(size: int, real: int, imaginary: int) -> h5py.h5t.TypeID:
    kind = h5py.h5t.create(h5py.h5t.COMPOUND, size)
    kind.insert(b"r", real, h5py.h5t.IEEE_F32LE)
    kind.insert(b"i", imaginary, h5py.h5t.IEEE_F32LE)
    return kind


def switch(stored: h5py.h5t.TypeID) -> h5py.h5t.TypeID:
    kind = h5py.h5t.enum_create(stored)
    kind.enum_insert(b"FALSE", 0)
    kind.enum_insert(b"TRUE", 1)
    return kind


FORMS = {
    "integers of 12 bits": made("i2", ("precision", (12,))),
    "integers of 12 bits in the middle": made("i2", ("precision", (12,)), ("offset", (4,))),
    "floats with fields elsewhere": made("f4", ("fields", (0, 1, 8, 9, 23))),
    "floats with another bias": made("f4", ("ebias", (126,))),
    "floats without a hidden bit": made("f4", ("norm", (h5py.h5t.NORM_NONE,))),
    "float32 in eight bytes": made("f8", ("fields", (31, 23, 8, 0, 23)), ("ebias", (127,))),
    "bfloat16": made("f4", ("fields", (15, 7, 8, 0, 7)), ("size", (2,)), ("ebias", (127,))),
    "complex numbers, the imaginary part first": compound(8, 4, 0),
    "complex numbers with room between": compound(16, 0, 8),
    "switches of 16 bits": switch(h5py.h5t.STD_I16LE),
    "bits": h5py.h5t.STD_B32LE,
}


@pytest.mark.parametrize("chunk", [None, (4,)])
@pytest.mark.parametrize("form", FORMS)
def test_numbers_in_a_form_that_numpy_does_not_say_are_refused(
    tmp_path: Path, form: str, chunk: tuple[int, ...] | None
) -> None:
    """To h5py each is one of numpy's types, to which HDF5 converts what it reads."""
    settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if chunk:
        settings.set_chunk(chunk)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        h5py.h5d.create(file.id, b"w", FORMS[form], h5py.h5s.create_simple((8,)), settings).write(
            h5py.h5s.ALL, h5py.h5s.ALL, np.zeros(8, "c16"), mtype=FORMS[form]
        )
        file["behind"] = np.zeros(1 << 10)
    refused(tmp_path / "a.h5", "tensor 'w': its ")


@pytest.mark.parametrize("width", [1, 2, 8])
def test_bytes_that_are_shuffled_otherwise_are_refused(tmp_path: Path, width: int) -> None:
    write(tmp_path / "a.h5", {"w": torch.arange(64.0)}, chunks=(32,), shuffle=True)
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    at = raw.index(b"shuffle\0") + 8
    assert raw[at] == 4
    raw[at] = width
    (tmp_path / "a.h5").write_bytes(raw)
    refused(tmp_path / "a.h5", "tensor 'w': its bytes are shuffled as those of other numbers than float32")


def test_a_chunk_without_filters_has_its_size(tmp_path: Path) -> None:
    """HDF5 reads as many bytes as the file says, and leaves the rest of the chunk as it was."""
    write(tmp_path / "a.h5", {"w": torch.arange(4.0)}, chunks=(4,))
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    tree = raw.index(b"TREE\1\0")  # of chunks; its first key begins with the size of the first chunk
    assert raw[tree + 24] == 16
    raw[tree + 24] = 12
    (tmp_path / "a.h5").write_bytes(raw)
    refused(tmp_path / "a.h5", "tensor 'w': a part of its elements has 12 bytes, expected 16")


def packed(path: Path, raw: bytes, shape: tuple[int, ...], *, times: int = 1) -> None:
    """A file with one chunk of these stored bytes."""
    with h5py.File(path, "w") as file:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk(shape)
        for _ in range(times):
            settings.set_deflate(4)
        made = h5py.h5d.create(file.id, b"w", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(shape), settings)
        made.write_direct_chunk((0,) * len(shape), raw)


def test_a_chunk_is_inflated_to_its_size_and_no_further(tmp_path: Path) -> None:
    """A megabyte of 1 GB of zeros; the same inside of another layer; and one that is cut short."""
    bomb = zlib.compress(bytes(1 << 28), 9)
    packed(tmp_path / "a.h5", bomb, (64,))  # HDF5 before 2.0 writes no chunk of more than 2^16 bytes that holds so few
    tracemalloc.start()
    refused(tmp_path / "a.h5", "tensor 'w': a chunk has 260 bytes, expected 256 (the file is damaged: fetch it again)")
    packed(tmp_path / "b.h5", zlib.compress(bomb), (8,), times=2)
    refused(tmp_path / "b.h5", "tensor 'w': it is compressed more than once, which is not read")
    packed(tmp_path / "c.h5", zlib.compress(bytes(32))[:-6], (8,))
    refused(tmp_path / "c.h5", "tensor 'w': a chunk ends in the middle of its compressed bytes")
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_a_large_chunk_is_decoded_once_and_charged_as_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was inflated again for every piece of its rows."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", data=np.zeros((1 << 10, 1 << 11), "f4"), chunks=(1 << 10, 1 << 11), compression="gzip")
    inflated: list[int] = []
    real = _Elements._inflated

    def counted(self: _Elements, raw: bytes, most: int) -> bytes:
        inflated.append(most)
        return real(self, raw, most)

    monkeypatch.setattr(_Elements, "_inflated", counted)
    assert not open_checkpoint(tmp_path / "a.h5").read("w").any()
    assert len(inflated) == 1
    monkeypatch.setenv("PORTING_LIMITS", f"made={3 << 23}")  # the elements alone are 2^23 bytes
    with pytest.raises(LimitError, match="PORTING_LIMITS=made="):
        open_checkpoint(tmp_path / "a.h5")


def test_chunks_that_are_not_stored_are_not_visited(tmp_path: Path) -> None:
    """Two million of one element each took gigabytes of HDF5's tables."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("w", shape=(1 << 10, 1 << 11), dtype="f4", chunks=(1, 1), fillvalue=3)
        made[5, 7] = 1
    with spending() as budget:
        found = open_checkpoint(tmp_path / "a.h5").read("w")
        assert budget._spent["objects"] < 1000
    assert (float(found[5, 7]), float(found.sum())) == (1, 3 * (1 << 21) - 2)


def test_stored_chunks_share_no_bytes_and_lie_in_the_file(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        made = file.create_dataset("w", shape=(4,), dtype="f4", chunks=(2,))
        made[...] = 1
        first, second = (made.id.get_chunk_info(number).byte_offset for number in range(2))
    raw = (tmp_path / "a.h5").read_bytes()
    (tmp_path / "b.h5").write_bytes(raw.replace(second.to_bytes(8, "little"), first.to_bytes(8, "little")))
    refused(tmp_path / "b.h5", "tensor 'w': its bytes are also those of 'w'")
    (tmp_path / "b.h5").write_bytes(raw.replace(second.to_bytes(8, "little"), (1 << 40).to_bytes(8, "little")))
    refused(tmp_path / "b.h5", "tensor 'w': a part of its elements does not lie in the file's")


STATED_END = 40
"""Where the address of a file's end stands in the oldest version of the format, which has no checksums."""


@pytest.mark.parametrize("chunks", [None, (2,)])
@pytest.mark.parametrize("kind", ["<f4", ">f4"])  # mapped, and decoded
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_what_lies_behind_the_stated_end_is_refused_as_h5py_refuses_it(
    tmp_path: Path, chunks: tuple[int, ...] | None, kind: str, compression: str | None
) -> None:
    if compression and not chunks:
        pytest.skip("HDF5 compresses chunks only")
    with h5py.File(tmp_path / "a.h5", "w", libver="earliest") as file:
        made = file.create_dataset("w", data=np.arange(4, dtype=kind), chunks=chunks, compression=compression)
        stored = made.id.get_chunk_info(1) if chunks else None
        place, size = (
            (stored.byte_offset, stored.size) if stored else (made.id.get_offset(), made.id.get_storage_size())
        )
    raw = (tmp_path / "a.h5").read_bytes()
    assert int.from_bytes(raw[STATED_END : STATED_END + 8], "little") == len(raw)
    address, other = place.to_bytes(8, "little"), len(raw).to_bytes(8, "little")
    behind = b"" if chunks else size.to_bytes(8, "little")  # other numbers have the bytes of a round address
    moved = raw.replace(address + behind, other + behind) + raw[place : place + size]
    honest = moved[:STATED_END] + len(moved).to_bytes(8, "little") + moved[STATED_END + 8 :]
    (tmp_path / "honest.h5").write_bytes(honest)
    assert open_checkpoint(tmp_path / "honest.h5").read("w").tolist() == [0, 1, 2, 3]
    for end in (len(raw), len(moved) - 1):
        (tmp_path / "b.h5").write_bytes(honest[:STATED_END] + end.to_bytes(8, "little") + honest[STATED_END + 8 :])
        with h5py.File(tmp_path / "b.h5") as file, pytest.raises((OSError, KeyError)):
            file["w"][()]
        told = f"tensor 'w': a part of its elements does not lie in the file's {end} bytes"
        refused(tmp_path / "b.h5", told if chunks else "invalid dataset size")


FILTERS = [("shuffle",), ("deflate",), ("shuffle", "deflate"), ("deflate", "shuffle"), ("fletcher32",),
           ("shuffle", "deflate", "fletcher32"), ("fletcher32", "deflate", "shuffle")]  # fmt: skip


@pytest.mark.parametrize("filters", FILTERS, ids="-".join)
def test_partial_chunks_that_no_filter_was_applied_to_are_read_as_they_are(
    tmp_path: Path, filters: tuple[str, ...]
) -> None:
    """An option of the dataset says so, and the masks of its chunks do not."""
    data = np.arange(100, dtype="i4").reshape(10, 10) * 1234567
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((4, 4))
        for name in filters:
            getattr(settings, f"set_{name}")()
        library = ctypes.CDLL(h5py.h5p.__file__)
        assert library.H5Pset_chunk_opts(ctypes.c_int64(settings.id), PARTIAL_AS_THEY_ARE) >= 0
        made = h5py.h5d.create(file.id, b"w", h5py.h5t.STD_I32LE, h5py.h5s.create_simple(data.shape), settings)
        h5py.Dataset(made)[...] = data
        assert {made.get_chunk_info(number).filter_mask for number in range(9)} == {0}
    assert open_checkpoint(tmp_path / "a.h5").read("w").tolist() == data.tolist()


@pytest.mark.parametrize("most", [(20, None), (None, 30), (None, None), (20, 30)])
@pytest.mark.parametrize("version", ["earliest", "latest"])
@pytest.mark.parametrize("shape", [(20, 30), (17, 29), (4, 4)])
def test_chunks_of_datasets_that_may_grow_are_where_h5py_reads_them(
    tmp_path: Path, most: tuple[int | None, ...], version: str, shape: tuple[int, ...]
) -> None:
    """HDF5 lists them under wrong places where an axis that is not the first one has no end."""
    with h5py.File(tmp_path / "a.h5", "w", libver=version) as file:
        data = np.arange(math.prod(shape), dtype="i4").reshape(shape)
        file.create_dataset("w", data=data, maxshape=most, chunks=(3, 4))
        deep = np.arange(3 * math.prod(shape), dtype="i4").reshape(3, *shape)
        file.create_dataset("deep", data=deep, maxshape=(6, *most), chunks=(2, 3, 4), compression="gzip")
        some = file.create_dataset("some", shape=shape, maxshape=most, chunks=(3, 4), dtype="i4", fillvalue=-1)
        some[3:, 3:] = data[3:, 3:]
    found = open_checkpoint(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        for name in file:
            assert found.read(name).tolist() == file[name][()].tolist(), name


@pytest.mark.parametrize("chunks", [None, (4, 4)])
def test_elements_that_are_never_filled_are_zeros_as_h5py_reads_them(
    tmp_path: Path, chunks: tuple[int, ...] | None
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        options = {"shape": (9, 9), "dtype": "f4", "chunks": chunks}
        file.create_dataset("w", fillvalue=7, fill_time="never", **options)
        settings = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        settings.set_chunk((4, 4))
        set_fill = ctypes.CDLL(h5py.h5p.__file__).H5Pset_fill_value
        assert set_fill(ctypes.c_int64(settings.id), ctypes.c_int64(h5py.h5t.IEEE_F32LE.id), None) >= 0
        made = h5py.h5d.create(file.id, b"some", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((9, 9)), settings)
        h5py.Dataset(made)[:4, :4] = 1
    found = open_checkpoint(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        assert found.read("w").tolist() == file["w"][()].tolist()
        assert found.read("some").tolist() == file["some"][()].tolist()


@pytest.mark.parametrize(
    ("axis", "to", "message"),
    [
        (0, 64, "of a dataset is stored, and is not found where it is looked for"),
        (1, 8, "tensor 'w': two parts of its elements have one place"),
    ],
)
def test_chunks_that_a_reader_would_not_find_are_refused(tmp_path: Path, axis: int, to: int, message: str) -> None:
    """HDF5 looks a chunk up by the keys of a tree, which are in no order here, and reads the fill value."""
    write(tmp_path / "a.h5", {"w": torch.arange(100.0).view(10, 10)}, chunks=(4, 4))
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    first = raw.index(b"TREE\1\0") + 24  # a key: the size, the mask, and the start along each axis and in an element
    second = first + 32 + 8
    starts = second + 8
    assert raw[starts : starts + 16] == bytes(8) + (4).to_bytes(8, "little")
    raw[starts + 8 * axis : starts + 8 * axis + 8] = to.to_bytes(8, "little")
    (tmp_path / "a.h5").write_bytes(raw)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["w"][()].tolist() != torch.arange(100.0).view(10, 10).tolist()
    refused(tmp_path / "a.h5", message)


def test_a_filter_that_is_not_undone_here_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", {"w": torch.ones(4)}, chunks=(2,), compression="lzf")
    refused(tmp_path / "a.h5", "tensor 'w': it is compressed with the filter 32000 of HDF5, which is not read")


def test_a_chunk_that_does_not_match_its_checksum(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", {"w": torch.arange(4.0)}, chunks=(4,), fletcher32=True)
    raw = (tmp_path / "a.h5").read_bytes()
    values = torch.arange(4.0).numpy().tobytes()
    (tmp_path / "a.h5").write_bytes(raw.replace(values, values[:-1] + b"\0"))
    refused(tmp_path / "a.h5", "tensor 'w': a chunk does not match its checksum")


def test_nothing_outside_of_the_file_is_read(tmp_path: Path) -> None:
    write(tmp_path / "other.h5", {"secret": torch.ones(3)})
    (tmp_path / "raw").write_bytes(bytes(12))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["kept"] = np.ones(2, "f4")
        file["outside"] = h5py.ExternalLink("other.h5", "/secret")
        file["again"] = h5py.SoftLink("/kept")
        file["text"] = "words"
        file["named type"] = np.dtype("f4")
        file["g/nowhere"] = h5py.SoftLink("../missing")
    found = open_checkpoint(tmp_path / "a.h5")
    assert {*found.tensors} == {"kept"}
    notes = [warning.message for warning in found.warnings]
    assert notes == [
        "no tensor, and not read: 'named type', 'text'",
        "links inside the file are not followed: 'again' leads to '/kept'; 'g/nowhere' leads to '../missing'",
        "links to other files are not followed: 'outside' leads to '/secret' in 'other.h5'",
    ]
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("outside", shape=(3,), dtype="f4", external=[(tmp_path / "raw", 0, 12)])
        layout = h5py.VirtualLayout((3,), dtype="f4")
        layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "secret", (3,))
        file.create_virtual_dataset("virtual", layout)
    refused(
        tmp_path / "b.h5", "tensor 'outside': its elements lie in other files", "tensor 'virtual': its elements lie"
    )


def test_where_no_tensor_is_found_the_links_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["outside"] = h5py.ExternalLink("other.h5", "/weights")
    links = "links to other files are not followed: 'outside' leads to '/weights' in 'other.h5' (for safety"
    refused(tmp_path / "a.h5", "it holds no tensor", links)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["g/w"] = np.ones(2, "f4")
        file["h"] = h5py.SoftLink("/g")
    refused(
        f"{tmp_path / 'a.h5'}#h", "whose name begins with 'h/'", "inside the file are not followed: 'h' leads to '/g'"
    )


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("g", "g/again", "the group 'g' contains itself, as 'g/again'"),
        ("/", "g/root", "the group '/' contains itself, as 'g/root'"),
        ("g", "h", "'g' and 'h' are names of the same group (hard links) (save the weights under one name each"),
        ("g/w", "g/x", "'g/w' and 'g/x' are names of the same dataset (hard links) (save the weights under one name"),
    ],
)
def test_hard_links_are_named(tmp_path: Path, first: str, second: str, message: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/w"] = np.ones(2, "f4")
        file[second] = file[first]
    refused(tmp_path / "a.h5", message)


def test_a_link_that_is_damaged_is_no_missing_tensor(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["bert/w"], file["x"] = np.ones(2, "f4"), np.zeros(3, "f4")
    raw = bytearray((tmp_path / "a.h5").read_bytes())
    raw[raw.rindex(b"TREE") + 24] = 8  # the first key of the tree of a group, by which a name is looked up
    (tmp_path / "a.h5").write_bytes(raw)
    with h5py.File(tmp_path / "a.h5") as file:
        assert [*file["bert"]] == ["w"]
    refused(tmp_path / "a.h5", "the link of 'bert/w' is damaged (the file is damaged: fetch it again)")


def test_what_is_inflated_is_charged(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("w", shape=(1 << 17, 1 << 10), dtype="f4", chunks=(1 << 10, 1 << 10), compression="gzip")
    refused(tmp_path / "a.h5", "as much as one command may spend")


def test_without_h5py_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.h5", {"w": torch.ones(2)})
    monkeypatch.setattr("porting.checkpoint.hdf5_file.find_spec", lambda package: None)
    refused(tmp_path / "a.h5", "needs the package h5py, which is not installed (pip install 'porting[hdf5]')")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os; os.abort()", "the HDF5 library crashed on it (the file is damaged: fetch it again)"),
        ("while True: pass", "this takes more than 1 seconds of reading descriptions"),
        ("print('no JSON')", "the HDF5 library crashed on it"),
        ("print(" + "'[' * 30_000" + ")", "the HDF5 library crashed on it"),
        ("print('[\"read\", 0, 1000000, 1000000]')", "the HDF5 library crashed on it"),
        ("print('[\"read\", 0, 20000, 1]')", "the HDF5 library crashed on it"),
    ],
)
def test_a_file_that_the_library_fails_on_ends_no_process_but_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, message: str
) -> None:
    """The program stands for the one that runs the library."""
    write(tmp_path / "a.h5", {"w": torch.ones(9000)})
    limit = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2)); "
    (tmp_path / "walk.py").write_text(f"{limit}\n{program}\n")
    monkeypatch.setattr("porting.checkpoint.hdf5_walk.__file__", str(tmp_path / "walk.py"))
    monkeypatch.setenv("PORTING_LIMITS", "seconds=1")
    refused(tmp_path / "a.h5", message)


class _Counting(InMemory):
    """Bytes in memory, which counts how often they are asked for."""

    asked = 0

    def pread(self, offset: int, count: int) -> bytes:
        self.asked += 1
        return super().pread(offset, count)


def test_a_file_of_many_datasets_is_read_in_blocks_and_charged_by_what_the_library_wants() -> None:
    file = io.BytesIO()
    write(file, {f"l.{number // 100}/w{number}": torch.ones(3) for number in range(3000)})
    source = _Counting(file.getvalue(), "a.h5")
    with spending() as budget:
        assert len(Hdf5().read(source, name="a.h5").tensors) == 3000
        assert source.asked < 5 * source.size / BLOCK  # 4000 pieces
        assert budget._spent["metadata"] < 2 * source.size


@pytest.mark.slow
def test_each_dataset_extends_the_time_of_the_process_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTING_LIMITS", "seconds=1")
    write(tmp_path / "a.h5", {f"l.{number // 100}/w{number}": torch.ones(3) for number in range(20_000)})
    assert len(open_checkpoint(tmp_path / "a.h5").tensors) == 20_000


def test_a_damaged_file_that_crashes_the_library_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(zlib.decompress(base64.b85decode(CRASHES)))
    refused(tmp_path / "a.h5")


KERAS = (
    "c-rlnzi-n(6vywJM763SQWdEoDqvcMNC=b?eiW7_q5%(xR=|+0b&I7$N?p+eR9NU3Hb%ybj2$y}%*fa=BYy&0ImhoDzaw!&5=D*jKGNxO@w3l*"
    "{@&fYXMZy{UR;??&N3HWXHgbsLC%3+&v08F-+`J#U4#0kCjaN{V+r_w9<Hz2y?c|-yVmClvY%GWt93?9BW6Cg<<<pgOFcC;Z1>4JthjaA`fR(u"
    "q%N}q_RCoW={FAgP0e8ad-`QP^-GX`gZh>8SS_aN&0}js{l0y@xxty{&+4@q+>aEtk;M09M6jI+?P6>?pPyW}R6oqY%)(iWT@&7OtbN;UU+27i"
    "M%?$Ij{G?na5fKFC)MZE%kBppZ!Cq+TZLsjZ@qlJ`HC~RQT6@=75l?S+o_hU^7g9RmeVb`f!WR;YA-;&YgPA(+s?t^zEv)Lv8ts52l?~+RhknB"
    "f*=TjAP9mW2x44Zly^_x@M_AtPbX^LG6i)uiS6FoPQ^`p^~(Fmyi$5Zx{Ti@U6L+4x|I3tvn6aN-v{}5>>>MA^XbNYhV*ShyO_rMJW=xQYQC1%"
    "9X!69cky#2rh9zL_ZSTW+sXB0mErM~9cp}Yf83ra<M!w#j9-JEQ5f>Ql<KcR-<L%Klc@&h^MC<|$b@UWV=ssX&qwV<`_y^k7W`+hMV&2vh2t^N"
    "nR{H*ybJ1}zzA=ybdO|?E`isN*FEWHML8CwF3PDWE!XKe;ayP-QPR0C_UpLx)7Ssl69hpJ1TkvlzEsAojpcBAxvz@fBi{x2H?H*JKF&FcABT@4"
    "|EzT1;npshKe~T!rsg>=+RxWBI3Gex_kQ009#z>!jXGb~>pRHb554vd>rcOh#|%a{LHg~y2Qf3)PR&O>fI8#rv3vF)d|mJ4qgrWv9UVGKW#}1&"
    "A=fR{UxVhO76OY|WUO(6erFQm22Zz9U$^F?{^HU4lW;pZkDsiC+sS$Q^eM%o{pl((5xN?mKT_lm<d3z9@W)>_-wTf"
)
"""What Keras 3.15.1 wrote for Dense(4) and BatchNormalization() over 3 numbers, save_weights; deflated, in base 85."""


def test_what_keras_wrote(tmp_path: Path) -> None:
    (tmp_path / "model.weights.h5").write_bytes(zlib.decompress(base64.b85decode(KERAS)))
    checkpoint = open_checkpoint(tmp_path)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == {
        "layers/dense/vars/0": (3, 4),
        "layers/dense/vars/1": (4,),
        **{f"layers/batch_normalization/vars/{number}": (4,) for number in range(4)},
    }
    assert torch.equal(checkpoint.read("layers/dense/vars/0"), torch.arange(12.0).view(3, 4))
    inside = open_checkpoint(f"{tmp_path}/model.weights.h5#layers/dense")
    assert torch.equal(inside.read("vars/1"), torch.arange(4.0))
    paths = {inner.path: inner.tensors for inner in inspect_checkpoint(tmp_path).inner_paths}
    assert paths == {"layers": 6, "layers/batch_normalization": 4, "layers/dense": 2}


def test_an_archive_of_keras_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.writestr("metadata.json", "{}")
    refused(tmp_path / "model.keras", "this is a Keras archive, not a checkpoint", "pass its model.weights.h5")


def test_damaged_files_give_errors_of_this_library_alone(tmp_path: Path) -> None:
    write(tmp_path / "good.h5", {f"layer/{number}": torch.rand(3, 4) for number in range(9)}, chunks=(2, 2))
    torn((tmp_path / "good.h5").read_bytes(), tmp_path / "tf_model.h5")


CRASHES = (
    "c-rmU4R9298OQPGE(r;FsV4@4%D^>XO@W5HyoZ-&2_X#-%9XSf<n55RPzoG@CJfZ+ipm6eX)HP*V7*pAP)Aaz+L=OKii}Wc8*4``XxV8~kb;ncjF"
    "#Hs-QIV}-VM%FS;w-IKa=_F^W1-5?zg$zKM9kyHC5GF>7PqaN=p-STw^rV#%dq^tkG{Dm{3zS(Jd?7J**SWk?t0kNViOh;F`am-Kdu?PohyK|MgH"
    ")HY*?h5@waS*sn%x8!ukG`i^l4krTKEh`8M@S2mAjCnRW&q-=40+FK#9j1?)$kfLjmI8q{4o0O53Ba-ZvBv)!`T1s@zoV-dmN7^Qz<gx7szc^iae"
    "@&I7M=!g#L@!-DvB$bg4zt$W@vWiP6N^L?3Cv}FE?n10sGlSol~;1oB<C?9q4c!Ky-srN{#0ykrg{2Sx#h;;<MZ>3EWEq2GZtDuR>VGaW1rT;zYv"
    "@LXe#?n{@-2FU#HcV+HrfHb-?YpFyz_;c4VPBAdANOKdiSSi{lQ+;&S(1Z&ugUjh3f*LAo+Tu0-EmTsvJdHTu<h(ubFu|FeS{UpZ4GvU7&<mGc!|"
    "^m&ngu~D6#x2U=<GD}){Co|s{+zH1@mVm5?+<@r&UUUrNI{Qn!2X?N0;@@9UM+F;7j5PFMHulCMEXEQn#WF0%p;#4DMHx+vQcaC=58g{3Wdb!yAf"
    "|#U%Kh|FMGfTv9!C{r3Vl>jL-`Vqqlz+vKB}mp%;a%YQTm`4b8!IPfq6I(hv9G>fp=pCDxA;M%(aFZWehdSSZdVFT<_y~po$vGL>@=Y%ykldR8d2"
    "DkjGIobDc^bRn$<X@i=N`uECgIR4|AthEWD%KKjs)1z4!WzkWt?Jd{dmlu^{9680NMAElNWWjyux`2AEfSCl%QAF8O;CG2PBiZYq~P(^KW!hUA1D"
    "AU;wRn(@(@28QgZst3S`+*7uXC<7EI*c0X=DaU+98^%|&_@M>sA3p3vp<hMYN(^k=eVe#ETE4H22sT@YG!{Sebi7#d6?s(g0h%CDi}l+!>F0_LNN"
    "mv#1N|3f?;zWxvCgO4Rtg3*<2Uu<SKLNqk=(HF>Ln9RmCuBsGGUhb6nKPRUV>`3I<Wdu-PY96~m~ZZsxv-<DyQkvV=Y=7(^Ar*h;P%wxNz4C`)5{"
    "qN)}4e?-?Hwbilj-flFSyT{k&x6_`C_`bOs*^(JQ&m7*{;``Sh?;T&8$7%lTjaNCI&&T)8{kHVE@#^U0j+K7t8eOAnbd9djHM+))hQfL+h$@CrGu"
    "Lyo6V~;t*K`!t$zD`2I4^!bh4oqxRSctMuIK6#&c}L9M`4}pMFoQk6VAtaEr=?HQ8U+bixSSqdQC@RUFJbA`a<#hd0DslP{9BOF|;({`yJ{Q3}Y*"
    "5*oL~<Z=jDlcAzZdy3vcWoIZNdhYAKTX!akWk3kHfiY*v6`;GK5jIF3)8|r4ii9YJsfwF?<f!-C$O}!pE%=<!q9`vFQ6%3eta#b*ZK@6daEoPrwR"
    "cyg9wxWh@W}jR&Y(pJ8P{`4P9Vq1IK`;7H!GPH(R|NwY#1N|3a+CKVNUkANu?54}+7N%9FuAs(hHa>0$FlhSbaL%LAwLg#(f3Hg>zzD(s9*qt7;2"
    "2)FG#K-RIvra*xHov{K&NxHEcs2J8m-n*hN)zeSA_r>>qagg6EG8_yy0qE$=tjkwv=$vRKu9_22BsqQe1Me0bh{(vB>=eQ*6Nelo1RpB-5Yc0d;8"
    "moMd3Ppk<@s`2ASPv;}%|M^*y606PM7+?PxYjV7KAM=dKmLG?@NY^EmwPxqwkCIZ1pXR1C7f*M|)X1FM<j$8yr$|p@bL980b(5!z%{@O}mL=~?bo"
    "1U3&wHf8=!WL~u7`|?bhG5Wvk&J;Pj|GtpeEc`h8x{k=NbpfCS&fJ2RAFy-`E`XTxg^$Fg7#&ed;9Fm^*vV);aQq(S3Pa+g$mLvDxFkmc{a_abov"
    "|ol9hrG56?{hOf$a<81#NyneN$8gr{3AJr@ejZO99&(@0HnBXtyvrWbu-P798?K0aqLfgeBo|2x%=Hl;N+97^p!rIf`UGfcM^Yzyb{!lg>CtjIyY"
    "LDzUHcy^=^5?SGn6PR8PhXTj8{NI_i+&~NjLlOMrXG_+#%5jCmg6$SIK|hV)=$V8W4DGiBmX2##^$lzAGOO)WA4nyvd_pjjk&vz^gbgYV{_w7^{j"
    "lw*xdS7&Q<AeJfX+uo%uj2jLjp%&(Hn;znhmi;MKY2FZ1*5$fC*tS)3o6f6<OC0uIRH<%tKpc4RTl0a@hjU%bkWEb1MQ#XB3{7-vTo%N>x#iN^}x"
    "v?B}E0a-jV{`s?ZWU<}>SzKDV_*FZy*y4aJCM{dO(2gv2I3SDEy;WbgBa2oCWN~PFDASHC4mco-)!%I#WJeZ99gxMdOP@PzM;5O;Ad4$K>qB;Ap*"
    "tXpV|UdpvLlQ04#;BN+Znd3!T;faEKdD0Yl9tGB=@`Zv*@{D?+bQh;c-9~?_Pb<mhVUUI3SA&+uy6QBa1u-WO4h9L;LK=qR0VRJmWd0+L49gfGpZ"
    "CY^t>*i&_U{@!ALba_z`svIDX>x@7YlJF=MLfGno8Z|G%579j^@vF`AgIy<s>)B#zX*?8cJ9a%IxAd4~memldCEWYi4EUvB__jfz82s<E){@<xRS"
    "Y1<9dHwH|ME{FQ?!`+-T$0pOSln$?tZ7swJ*q5KY2VS7s%&7jr7ADEN4mzXGUD%lWMrLa$ajgm$ye_-Z>qb=pPJlR6nrM7vncG>t+OaH{)7cZapv"
    "uvMM>}6&Z2Zc|IVV!H=wg9f8~pvpGkh-i9Ac?KYgdAD!4SzQWbtQ$Wj%h-({(ad*xfIlH4Jdsx;qcsmg}>Eme7SL1$Iqn^<V6{4<IyRl!5Wma4F^"
    "#8MTlF11v}8_O(J$<}g9Rk~}ar7GJu%u<!VFx>JA^Sv~}Qu%*>x1}n0tHM$hUQjGm(bbVRxc_6~?|<c3<d1G8{xPgo{eE5kFCiE*od"
)
"""A file of h5py 3.16 with changed bytes: listing its groups ends a process by SIGSEGV; deflated, in base 85."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from porting.checkpoint import CheckpointError, open_checkpoint

WEIGHTS = {"a": torch.arange(12, dtype=torch.float32).view(3, 4), "b": torch.arange(5)}


def saved(value: object, *, zipped: bool = True) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def entries(raw: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def zipped(contents: dict[str, bytes] | list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in contents.items() if isinstance(contents, dict) else contents:
            archive.writestr(name, content)
    return buffer.getvalue()


def changed(value: object = WEIGHTS, **changes: bytes | None) -> bytes:
    """An archive of torch.save with records replaced, added or (None) removed; ``data_0`` stands for ``data/0``."""
    contents = entries(saved(value))
    root = next(iter(contents)).partition("/")[0]
    for key, content in changes.items():
        name = f"{root}/{key.replace('data_', 'data/').replace('pickle', 'data.pkl')}"
        if content is None:
            del contents[name]
        else:
            contents[name] = content
    return zipped(contents)


def pickle_of(value: object = WEIGHTS) -> bytes:
    return next(content for name, content in entries(saved(value)).items() if name.endswith("data.pkl"))


def with_pickle(raw: bytes) -> bytes:
    return changed(pickle=raw)


def flipped(raw: bytes, at: bytes) -> bytes:
    """One bit of the first record that holds these bytes changed, and its checksum not."""
    position = raw.index(at)
    return raw[:position] + bytes([raw[position] ^ 1]) + raw[position + 1 :]


class RunsCode:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch ran",)


def tiny(size: bytes, stride: bytes) -> bytes:
    """The pickle of one tensor over storage 0 (12 floats) with this size and stride, each an opcode's bytes."""
    return (
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x0ctQK\x00" + size + stride + b"\x89ccollections\nOrderedDict\n)RtRs."
    )


def long1(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


SPARSE = torch.eye(3).to_sparse()
CONJUGATED = torch.zeros(2, dtype=torch.complex64).conj()

HOSTILE: list[tuple[str, Callable[[], bytes], str]] = [
    ("truncated in the middle", lambda: saved(WEIGHTS)[:700], "its table of contents cannot be read"),
    ("truncated at the tail", lambda: saved(WEIGHTS)[:-5], "its table of contents cannot be read"),
    ("HTML", lambda: b"<!DOCTYPE html><p>Log in", "this is an HTML page"),
    ("bare pickle that runs code", lambda: pickle.dumps(RunsCode(), 2), "this is a pickle"),
    ("zip whose pickle runs code", lambda: with_pickle(pickle.dumps({"a": RunsCode()}, 2)), "a call of 'posix.system'"),
    ("the same in protocol 4", lambda: with_pickle(pickle.dumps({"a": RunsCode()}, 4)), "a call of 'posix.system'"),
    ("oldest protocol", lambda: with_pickle(pickle.dumps({"a": RunsCode()}, 0)), "the opcode 0x"),
    ("foreign global", lambda: with_pickle(pickle_of(collections.Counter("ab"))), "'collections.Counter'"),
    ("whole module without a tensor", lambda: saved(torch.nn.ReLU()), "save model.state_dict() instead of the model"),
    ("tar-era format", lambda: bytes(257) + b"ustar" + bytes(300), "this is a tar archive"),
    ("deflated", lambda: zipped(entries(saved(WEIGHTS)), zipfile.ZIP_DEFLATED), "is compressed"),
    ("zip bomb", lambda: zipped({"x/data.pkl": bytes(1 << 24)}, zipfile.ZIP_DEFLATED), "bytes for 16777216)"),
    ("storage without values",
     lambda: with_pickle(pickle_of().replace(b"\x03\x00\x00\x00cpu", b"\x04\x00\x00\x00meta")),
     "a storage on the device 'meta', which has no values here"),
    ("storage on no device", lambda: with_pickle(pickle_of().replace(b"cpu", b"c:u")), "a storage on the device 'c:u'"),
    ("storage too short", lambda: changed(data_0=bytes(44)), "should have 48 bytes, and its record has 44"),
    ("storage too long", lambda: changed(data_0=bytes(52)), "should have 48 bytes, and its record has 52"),
    ("storage missing", lambda: changed(data_0=None), "tensor 'a': its storage '0' is not in the file"),
    ("element count tampered", lambda: with_pickle(pickle_of().replace(b"cpuq\x06K\x0c", b"cpuq\x06K\x40")),
     "should have 256 bytes, and its record has 48"),
    ("shape beyond the storage", lambda: with_pickle(tiny(b"K\x04K\x04\x86", b"K\x04K\x01\x86")),
     "its elements reach to byte 64 of a storage of 48"),
    ("negative stride", lambda: with_pickle(tiny(b"K\x03\x85", b"J\xff\xff\xff\xff\x85")), "a negative size, stride"),
    ("overflowing size", lambda: with_pickle(tiny(long1(2**62) + long1(2**62) + b"\x86", b"K\x00K\x00\x86")),
     "its sizes overflow 64 bits"),
    ("expanded to 1 TB", lambda: with_pickle(tiny(long1(2**38) + b"\x85", b"K\x00\x85")),
     "it repeats 4 bytes until they are 1099511627776"),
    ("duplicate entries", lambda: zipped([("x/data.pkl", pickle_of()), ("x/data.pkl", b".")]), "stands twice"),
    ("entry climbs out", lambda: zipped({"x/../../y": b"", "x/data.pkl": pickle_of()}), "climbs out of the archive"),
    ("entry absolute", lambda: zipped({"/etc/y": b"", "x/data.pkl": pickle_of()}), "climbs out of the archive"),
    ("big-endian", lambda: changed(byteorder=b"big"), "its numbers are 'big'-endian"),
    ("no data.pkl", lambda: zipped({"word/document.xml": b"<x/>"}), "a zip archive with no data.pkl"),
    ("TorchScript", lambda: changed(**{"constants.pkl": b"."}), "it has constants.pkl and holds no module"),
    ("structure damaged", lambda: flipped(saved(WEIGHTS), b"FloatStorage"), "the checksum of the entry"),
    ("keys not strings", lambda: saved({0: torch.zeros(1)}), "the key '0' is a whole number where a name is expected"),
    ("list", lambda: saved([torch.zeros(1)]), "it holds a list where a state dict"),
    ("one tensor", lambda: saved(torch.zeros(1)), "it holds a tensor where a state dict"),
    ("empty", lambda: saved({}), "it holds no tensor"),
    ("sparse", lambda: saved({"a": SPARSE}), "a sparse tensor (_rebuild_sparse_tensor)"),
    ("sparse beside another", lambda: saved({"a": SPARSE, "b": torch.ones(1)}), "a sparse tensor (_rebuild_sparse"),
    ("conjugated", lambda: saved({"a": CONJUGATED}), "to be read conjugated"),
    ("deep pickle", lambda: with_pickle(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."), "it holds a list"),
    ("deep tuples as a key", lambda: with_pickle(b"\x80\x02})" + b"\x85" * 100_000 + b"Ns."), "as the key of a"),
    ("memo bomb", lambda: with_pickle(b"\x80\x02}r\xff\xff\xff\x7f."), "it holds no tensor"),
    ("string bomb", lambda: with_pickle(b"\x80\x02X\xff\xff\xff\xff."), "a string of 4294967295 bytes"),
    ("pickle cut short", lambda: with_pickle(pickle_of()[:-20]), "it ends in the middle"),
    ("65 sizes in a list", lambda: with_pickle(b"\x80\x02ctorch\nSize\n](" + b"K\x01" * 65 + b"e\x85R."),
     "a call of torch.Size with unknown arguments"),
    ("stack underflow", lambda: with_pickle(b"\x80\x02R."), "too few values on the stack"),
    ("memo missing", lambda: with_pickle(b"\x80\x02h\x07."), "the memo has no entry 7"),
    ("control character in a name", lambda: saved({"a\nb": torch.zeros(1)}), "control character U+000A"),
    ("legacy, cut short", lambda: saved(WEIGHTS, zipped=False)[:-4], "the file was cut short"),
    ("legacy, with bytes after it", lambda: saved(WEIGHTS, zipped=False) + b"x", "1 bytes after the last storage"),
    ("legacy that runs code", lambda: saved({"a": RunsCode()}, zipped=False), "a call of 'posix.system'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")  # zipfile says so while the hostile file is made
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_hostile_file_is_refused_in_one_line_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], bytes], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(make())
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert message in str(caught.value)
    for line in str(caught.value).split("\n"):
        assert line.startswith(str(path))
        assert line.isprintable()
    assert not (tmp_path / "ran").exists()


def test_the_pickle_above_does_run_code_when_it_is_let(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would show nothing."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(RunsCode(), 2))
    assert (tmp_path / "ran").exists()


def test_flipped_bit_of_a_tensor_is_seen_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(flipped(saved(WEIGHTS), struct.pack("<4f", 0, 1, 2, 3)))
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read("b"), WEIGHTS["b"])
    with pytest.raises(CheckpointError, match=r"the checksum of the record '.*data/0' does not match its bytes"):
        checkpoint.read("a")


def test_safetensors_file_named_bin_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(WEIGHTS, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"this is a safetensors file.*rename it to end in .safetensors"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def ordinary() -> dict[str, torch.Tensor]:
    big = torch.randn(100, 50)
    tied = torch.randn(4, 3)
    return {
        "tied": tied,
        "tied.again": tied,
        "transposed": big.T,
        "row.of.big": big[7],
        "column.of.big": big[:, 7],
        "block.of.big": big[10:20, 5:9],
        "every.other": big[::2, ::5],
        "expanded": torch.randn(1, 6).expand(5, 6),
        "position_ids": torch.arange(16).expand(1, -1),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "bool": torch.tensor([True, False]),
        "half": torch.randn(3).half(),
        "bfloat16": torch.randn(3).bfloat16(),
        "uint16": torch.arange(3).to(torch.uint16),
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
        "complex": torch.randn(3, dtype=torch.complex64),
        "int8": torch.arange(3, dtype=torch.int8),
    }


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("kind", ["zip", "legacy"])
def test_reads_what_torch_load_reads(tmp_path: Path, kind: str, protocol: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    module = torch.nn.ModuleDict({"norm": torch.nn.BatchNorm1d(4)})
    value = collections.OrderedDict(ordinary() | module.state_dict())
    if kind == "legacy":  # that format has no names for these
        value = collections.OrderedDict(
            (name, tensor) for name, tensor in value.items() if name not in ("uint16", "float8")
        )
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=kind == "zip")
    oracle = torch.load(path, weights_only=protocol == 2)  # the only one that weights_only knows
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.tensors) == list(oracle)
    for name, tensor in oracle.items():
        for own in (False, True):
            read = checkpoint.read(name, own=own)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            # float8 has no comparison
            assert torch.equal(
                read.contiguous().view(torch.uint8) if name == "float8" else read,
                tensor.view(torch.uint8) if name == "float8" else tensor,
            )
            assert not own or read.is_contiguous()
        assert checkpoint.tensors[name].nbytes == tensor.numel() * tensor.itemsize
    assert checkpoint.shared == (frozenset({"tied", "tied.again"}),)


def test_tiny_view_of_a_big_storage_is_copied_alone(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"row": torch.randn(1000, 100)[3]}, path)
    assert open_checkpoint(path).read("row", own=True).untyped_storage().nbytes() == 400
    assert open_checkpoint(path).read("row").untyped_storage().nbytes() == 400


def test_archive_without_checksums_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(WEIGHTS, path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(open_checkpoint(path).read("a"), WEIGHTS["a"])


def test_what_is_to_be_read_conjugated_says_how_to_save_it(tmp_path: Path) -> None:
    torch.save({"a": CONJUGATED}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"save it resolved: tensor\.resolve_conj\(\)"):
        open_checkpoint(tmp_path / "m.pt")

"""A ``.bin`` has one reading: what is read here torch reads too, with the same numbers, whatever was done to the file.

Thousands of archives that torch.save wrote are changed, by a seed: bytes, opcodes, entries, headers, whole archives.
Torch may read what is refused here; never the other way round, and never other numbers.
"""

from __future__ import annotations

import io
import pickle
import random
import re
import struct
import tempfile
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from porting.checkpoint import open_checkpoint
from porting.checkpoint.container import DTYPES
from porting.checkpoint.dcp_archive import state_dict_shard
from porting.converting.conversion import convert
from porting.errors import PortingError
from porting.notation.table import parse_table
from tests.checkpoint.test_bin_file import changed, entries, pickle_of, saved, with_pickle, zipped
from tests.converting.drawing import values, write

COUNT = 4000
"""Changed archives in the suite; ``make fuzz`` runs more, guided by coverage."""


def states() -> list[bytes]:
    shared = torch.arange(12.0)
    values: list[object] = [
        {"a": shared.view(3, 4), "b": shared, "c": torch.arange(5), "d": torch.arange(3).to(torch.uint16)},
        OrderedDict(
            a=torch.nn.Parameter(shared[2:8:2]), b=shared.bfloat16(), e=torch.zeros(0, 3), t=shared.view(3, 4).T
        ),
        torch.nn.BatchNorm1d(3).state_dict(),
    ]
    return [saved(value) for value in values] + [saved(values[1], zipped=False)]


class _Allowed(pickle.Unpickler):
    """Torch's own reader for later protocols, with the names that its careful one allows."""

    def find_class(self, module: str, name: str) -> object:
        allowed = torch._weights_only_unpickler._get_allowed_globals()
        if f"{module}.{name}" not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return allowed[f"{module}.{name}"]


def torchs(path: Path) -> dict[object, object] | None:
    """What torch reads; None when it refuses."""
    careful = SimpleNamespace(Unpickler=_Allowed, load=lambda file, **_: _Allowed(file).load(), __name__="pickle")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for options in ({"weights_only": True}, {"weights_only": False, "pickle_module": careful}):
            try:
                found = torch.load(path, map_location="cpu", **options)
            except Exception:  # noqa: BLE001, S112  # a damaged file may make it raise anything
                continue
            return found if isinstance(found, dict) else None
    return None


def ours(path: Path) -> dict[str, torch.Tensor] | None:
    try:
        checkpoint = open_checkpoint(path)
        return {name: checkpoint.read(name, own=True) for name in checkpoint.tensors}
    except PortingError:
        return None


def bits(tensor: torch.Tensor) -> bytes:
    packed = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return packed.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def compare(raw: bytes, path: Path) -> bool:
    """Whether it is read; an error when torch reads something else."""
    path.write_bytes(raw)
    mine = ours(path)
    if mine is None:
        return False
    theirs = torchs(path)
    assert theirs is not None, "torch refuses what is read here"
    assert [name for name, tensor in theirs.items() if tensor is not None] == list(mine)
    for name, tensor in mine.items():
        other = theirs[name]
        assert isinstance(other, torch.Tensor)
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert bits(other) == bits(tensor), name
    return True


# ------------------------------------------------------------------------------------------------ how files are changed


def with_checksums(raw: bytearray) -> bytes:
    """The same with the checksums of the entries as they should be, so that what was changed is looked at."""
    for found in re.finditer(rb"PK\x01\x02", bytes(raw)):
        at = found.start()
        if at + 46 > len(raw):
            continue
        size, begin = struct.unpack_from("<I", raw, at + 24)[0], struct.unpack_from("<I", raw, at + 42)[0]
        if begin + 30 > len(raw):
            continue
        named, extra = struct.unpack_from("<HH", raw, begin + 26)
        start = begin + 30 + named + extra
        crc = zlib.crc32(raw[start : start + size])
        struct.pack_into("<I", raw, at + 16, crc)
        if raw[start + size : start + size + 4] == b"PK\7\x08":
            struct.pack_into("<I", raw, start + size + 4, crc)
        elif not raw[begin + 6] & 8:
            struct.pack_into("<I", raw, begin + 14, crc)
    return bytes(raw)


def bytes_changed(raw: bytes, draw: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(draw.choice((1, 1, 2, 5))):
        changed[draw.randrange(len(changed))] = draw.choice((draw.randrange(256), 0, 1, 255, 0x28, 0x2E))
    return with_checksums(changed) if draw.random() < 0.8 else bytes(changed)


def pickle_changed(raw: bytes, draw: random.Random) -> bytes:
    """A structure with opcodes put in, taken out, doubled and exchanged."""
    contents = entries(raw) if raw[:2] == b"PK" else {}
    if not contents:
        return bytes_changed(raw, draw)
    name = next(entry for entry in contents if entry.endswith("data.pkl"))
    structure = contents[name]
    for _ in range(draw.choice((1, 1, 2, 3))):
        at, to = sorted((draw.randrange(2, len(structure)), draw.randrange(2, len(structure))))
        piece = draw.choice(PIECES)
        match draw.randrange(5):
            case 0:
                structure = structure[:at] + piece + structure[at:]
            case 1:
                structure = structure[:at] + structure[min(to, at + 8) :]
            case 2:
                structure = structure[:at] + structure[at : at + 12] + structure[at:]
            case 3:
                structure = structure[:at] + piece + structure[at + len(piece) :]
            case _:
                old, new = draw.choice(WORDS), draw.choice(WORDS)
                structure = structure.replace(old, new, draw.choice((1, 1, 9)))
    return zipped({**contents, name: structure})


PIECES = [
    b"}",
    b"]",
    b")",
    b"N",
    b"\x88",
    b"\x89",
    b"K\x00",
    b"K\x01",
    b"K\x02",
    b"K\x0c",
    b"0",
    b"1",
    b"2",
    b"(",
    b"t",
    b"R",
    b"Q",
    b"\x85",
    b"\x86",
    b"\x87",
    b"q\x00",
    b"h\x00",
    b"h\x01",
    b"h\x05",
    b"s",
    b"u",
    b"a",
    b"e",
    b"b",
    b"X\x01\x00\x00\x00a",
    b"\x80\x03",
    b"\x80\x04",
    b"\x95\x00\x00\x00\x00\x00\x00\x00\x00",
    b"\x8c\x01a",
    b"\x94",
    b"\x81",
    b"T\x01\x00\x00\x00a",
    b"U\x01a",
    b"J\xff\xff\xff\xff",
    b"\x8a\x01\x02",
    b"G?\xf0\x00\x00\x00\x00\x00\x00",
    b"(l",
    b".",
    b"}b",
    b")b",
    b"ctorch\nfloat32\n",
    b"ctorch\nbfloat16\n",
    b"ctorch\nSize\n",
    b"ccollections\nOrderedDict\n)R",
]

WORDS = [
    b"FloatStorage",
    b"IntStorage",
    b"LongStorage",
    b"BFloat16Storage",
    b"DoubleStorage",
    b"UntypedStorage",
    b"_v2",
    b"_v3",
    b"ctorch\n",
    b"ctorch.storage\n",
    b"K\x0c",
    b"K\x06",
    b"K\x03",
    b"K\x04",
    b"K\x02",
    b"\x89",
    b"\x88",
    b"X\x01\x00\x00\x000",
    b"X\x01\x00\x00\x001",
    b"X\x01\x00\x00\x002",
    b"uint16",
    b"int16",
    b"bfloat16",
    b"storage",
    b"cpu",
    b"xyz",
]


def ends_changed(raw: bytes, draw: random.Random) -> bytes:
    """Junk in front, behind and between; two archives."""
    cut = draw.randrange(len(raw))
    junk = draw.choice((b"x", bytes(22), bytes(64), b"PK\x03\x04", raw[:100], raw[-22:], raw[-98:], raw[:cut], b""))
    return draw.choice((junk + raw, raw + junk, raw[:cut] + junk + raw[cut:], raw + draw.choice(STATES), raw[:cut]))


def archive_changed(raw: bytes, draw: random.Random) -> bytes:
    """Entries renamed, doubled, left out, in another order, with other content."""
    if raw[:2] != b"PK":
        return ends_changed(raw, draw)
    contents = list(entries(raw).items())
    place = draw.randrange(len(contents))
    name, content = contents[place]
    match draw.randrange(8):
        case 0:
            contents[place] = (name.upper(), content)
        case 1:
            contents.append((name.upper(), content[::-1]))
        case 2:
            contents.append((f"a/{name}", content))
        case 3:
            contents.insert(0, (f"other/{name.partition('/')[2]}", content))
        case 4:
            del contents[place]
        case 5:
            draw.shuffle(contents)
        case 6:
            others = (b"", b"1", b"little ", b"big", b"99", b"3", b"\xff", content + b"x", content[:-1])
            contents[place] = (name, draw.choice(others))
        case _:
            other = entries(draw.choice([state for state in STATES if state[:2] == b"PK"]))
            contents = [(one, other.get(one, held)) for one, held in contents]
    return zipped(contents)


STATES = states()
CHANGES: list[Callable[[bytes, random.Random], bytes]] = [
    bytes_changed,
    pickle_changed,
    pickle_changed,
    archive_changed,
    ends_changed,
]


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("seed", range(8))
def test_what_is_read_here_torch_reads_too_with_the_same_numbers(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311  # a test's draws
    read = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:  # noqa: S108  # memory
        path = Path(folder) / "pytorch_model.bin"
        for raw in STATES:
            assert compare(raw, path), "what was not changed is read"
        for number in range(COUNT // 8):
            raw = draw.choice(CHANGES)(draw.choice(STATES), draw)
            try:
                read += compare(raw, path)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, file {number}: {error}") from error
    assert read > COUNT // 8 // 50, "some changes are harmless, or nothing behind the first check was reached"


# ------------------------------------------------------------------------------------------------ by hand

ONE = {"a": torch.arange(12, dtype=torch.float32).view(3, 4), "b": torch.arange(5)}
TWO = {"a": -torch.arange(12, dtype=torch.float32).view(3, 4), "b": torch.arange(5)}


def reference(key: bytes, kind: bytes, count: int) -> bytes:
    key = b"X" + struct.pack("<I", len(key)) + key
    return b"((X\x07\x00\x00\x00storagectorch\n" + kind + b"\n" + key + b"X\x03\x00\x00\x00cpuK%ctQ" % count


def tensor(key: bytes, kind: bytes, count: int, more: bytes = b"") -> bytes:
    call = b"ctorch._utils\n_rebuild_tensor_v2\n" + reference(key, kind, count)
    return call + b"K\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)R" + more + b"tR"


def named(*tensors: bytes, behind: bytes = b"") -> bytes:
    names = [b"X\x01\x00\x00\x00" + bytes([97 + number]) for number in range(len(tensors))]
    body = b"".join(name + tensor + b"s" for name, tensor in zip(names, tensors, strict=True))
    return with_pickle(b"\x80\x02}" + body + behind + b".")


def folder_of(raw: bytes) -> bytes:
    """The entry of the version with the mark of a folder."""
    at = raw.index(b"PK\x01\x02")
    return raw[: at + 38] + b"\x10" + raw[at + 39 :]


def with_gradient(tensor: torch.Tensor) -> bytes:
    """A tensor with a gradient, as the pickle says."""
    found = entries(saved({"a": tensor})).items()
    return zipped({name: raw.replace(b"\x89c", b"\x88c") if "pkl" in name else raw for name, raw in found})


def tar_and_pickle() -> bytes:
    """A pickle of the older format whose first 512 bytes have the checksum of a tar archive's header."""
    raw = bytearray(saved(ONE, zipped=False))
    head = bytes(raw[:20]) + b"X" + struct.pack("<I", 600) + b"a" * 600 + b"0"
    raw[:20] = head
    block = bytearray(raw[:512])
    block[100:148] = b"0000644\x000000000\x000000000\x0000000000000\x0000000000000\x00"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    raw[:512] = block
    return bytes(raw)


BY_HAND: dict[str, Callable[[], bytes]] = {
    "two archives": lambda: saved(ONE) + saved(TWO),
    "junk in front": lambda: b"PK\x03\x04junk" + saved(ONE),
    "junk behind": lambda: saved(ONE) + b"junk",
    "a comment": lambda: saved(ONE)[:-2] + b"\x02\x00hi",
    "a second root": lambda: zipped({"b/data.pkl": pickle_of(TWO), **entries(saved(ONE))}),
    "a folder deeper": lambda: zipped({f"a/{name}": content for name, content in entries(saved(ONE)).items()}),
    "a structure in another case": lambda: zipped([*entries(saved(ONE)).items(), ("archive/DATA.PKL", pickle_of(TWO))]),
    "a structure that is a folder": lambda: folder_of(saved(ONE)),
    "an id of no text": lambda: changed(ONE, **{".data/serialization_id": b"\xff"}),
    "no version": lambda: changed(ONE, version=None),
    "version 0": lambda: changed(ONE, version=b"0"),
    "version 99": lambda: changed(ONE, version=b"99"),
    "a byte order with a space": lambda: changed(ONE, byteorder=b"little "),
    "an alignment of no number": lambda: changed(ONE, **{".storage_alignment": b"x"}),
    "an entry more": lambda: zipped({**entries(saved(ONE)), "archive/code/x.py": b"1"}),
    "a storage that nobody needs": lambda: zipped({**entries(saved(ONE)), "archive/data/7": bytes(8)}),
    "one storage of two dtypes": lambda: named(tensor(b"0", b"FloatStorage", 12), tensor(b"0", b"IntStorage", 12)),
    "one storage of two lengths": lambda: named(tensor(b"0", b"FloatStorage", 12), tensor(b"0", b"FloatStorage", 11)),
    "another dtype behind it": lambda: named(tensor(b"0", b"FloatStorage", 12, b"ctorch\nint32\n")),
    "a tensor that is set again": lambda: named(
        tensor(b"0", b"FloatStorage", 12) + tensor(b"1", b"LongStorage", 5) + b"\x85b", tensor(b"1", b"LongStorage", 5)
    ),
    "attributes for a dictionary": lambda: named(tensor(b"0", b"FloatStorage", 12), behind=b"}b"),
    "a tensor that is dropped": lambda: named(tensor(b"0", b"FloatStorage", 12) + tensor(b"9", b"FloatStorage", 3)),
    "a gradient of whole numbers": lambda: with_pickle(pickle_of({"b": ONE["b"]}).replace(b"\x89c", b"\x88c")),
    "a gradient of float8": lambda: with_gradient(torch.ones(3).to(torch.float8_e4m3fn)),
    "hooks": lambda: named(tensor(b"0", b"FloatStorage", 12).replace(b")R", b")RK\x01K\x01s")),
    "an opcode of another protocol": lambda: with_pickle(pickle_of(ONE).replace(b"X\x01\x00\x00\x00a", b"\x8c\x01a")),
    "a string of Python 2": lambda: with_pickle(pickle_of(ONE).replace(b"X\x01\x00\x00\x00a", b"T\x01\x00\x00\x00a")),
    "a size that is true": lambda: with_pickle(pickle_of(ONE).replace(b"K\x05\x85", b"\x88\x85")),
    "the older format, as a tar archive too": tar_and_pickle,
}


@pytest.mark.parametrize("make", BY_HAND.values(), ids=BY_HAND)
@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_what_torch_refuses_or_reads_otherwise_is_refused(tmp_path: Path, make: Callable[[], bytes]) -> None:
    assert not compare(make(), tmp_path / "pytorch_model.bin")


def test_the_comparison_sees_two_readings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would show nothing."""
    path = tmp_path / "pytorch_model.bin"
    monkeypatch.setattr(f"{__name__}.ours", lambda path: TWO)
    with pytest.raises(AssertionError):
        compare(saved(ONE), path)
    with pytest.raises(AssertionError, match="torch refuses"):
        compare(b"nothing", path)


def test_archives_without_description_are_read(tmp_path: Path) -> None:
    """As other programs write them: no flag, sizes in front of the bytes."""
    buffer = io.BytesIO(zipped(entries(saved(ONE))))
    assert compare(buffer.getvalue(), tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_loads_what_is_written(tmp_path: Path, mapped: bool) -> None:
    """Every dtype, names beyond ASCII, tied names; nothing is trusted: ``weights_only``."""
    tensors = {f"a.{dtype}": values((5, 3), dtype, 1) for dtype in sorted((one.dtype for one in DTYPES), key=str)}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "größe": torch.ones(2)}
    table = '[mapping]\nname = "t"\n[tensors]\n"{*n}" = "{*n}"\n'
    source = write(tmp_path / "source", tensors)
    convert(source, tmp_path / "out", parse_table(table), derive=True, to="bin")
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True, mmap=mapped)
    assert {name: (one.dtype, bits(one)) for name, one in found.items()} == {
        name: (one.dtype, bits(one)) for name, one in tensors.items()
    }
    assert open_checkpoint(tmp_path / "out").warnings == ()


def test_tied_names_share_a_storage(tmp_path: Path) -> None:
    described = {"a": torch.empty(2, 3), "b": torch.empty(4)}
    shard = state_dict_shard("x.bin", described, {"again": "a", "other": "missing"})
    raw = bytearray(shard.size)
    for at, piece in shard.frame:
        raw[at : at + len(piece)] = piece
    found = torch.load(io.BytesIO(bytes(raw)), weights_only=True)
    assert list(found) == ["a", "b", "again"]
    assert found["a"].data_ptr() == found["again"].data_ptr()

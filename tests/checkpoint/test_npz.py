"""numpy's archives: what numpy wrote is read to the bit, what is written numpy reads, and what lies is refused."""

from __future__ import annotations

import io
import os
import resource
import struct
import tempfile
import threading
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from porting.checkpoint import CheckpointError, open_checkpoint
from porting.checkpoint.container import WriteOptions
from porting.checkpoint.files import MOST_KEPT, Stream
from porting.checkpoint.npz import DTYPES, Npz
from porting.checkpoint.registry import CONTAINERS
from porting.checkpoint.zip_file import FULL
from porting.comparing.differences import diff
from porting.comparing.digests import digest
from porting.converting.conversion import convert
from porting.converting.integrity import verify_files
from porting.converting.making import Made, Maker
from porting.limits import LimitError
from porting.notation.table import parse_table
from porting.plan.copies import Copy
from porting.plan.move import Window
from porting.plan.recipe import Recipe
from porting.staging import MoveReader
from tests.converting.drawing import Drawn, bits, tables, values, write

TABLE = parse_table('[mapping]\nname = "t"\n[tensors]\n"{*n}" = "{*n}"\n')
SAVERS = {"stored": np.savez, "deflated": np.savez_compressed}
SHAPES = ((), (0,), (7,), (3, 4), (2, 0, 3), (2, 3, 4, 5))


def arrays() -> dict[str, np.ndarray]:
    """Every dtype in both byte orders and both orders of axes, scalars and arrays without elements among them."""
    generator = np.random.default_rng(5)
    found: dict[str, np.ndarray] = {}
    for kind in DTYPES:
        for shape in SHAPES:
            noise = generator.integers(0, 2 if kind == "b1" else 100, shape)
            for order, end in (("<", "little"), (">", "big")):
                plain = np.asarray(noise, dtype=f"{order}{kind}")
                name = f"{kind}/{end}.{'x'.join(map(str, shape))}"
                found |= {name: plain, f"{name}.columns": np.asfortranarray(plain)}
    return found


@pytest.mark.parametrize("saver", SAVERS)
def test_what_numpy_saves_is_read_to_the_bit(saver: str, tmp_path: Path) -> None:
    expected = arrays()
    SAVERS[saver](tmp_path / "a.npz", **expected)  # type: ignore[arg-type]  # numpy types its keywords as a flag
    checkpoint = open_checkpoint(tmp_path / "a.npz")
    oracle = np.load(tmp_path / "a.npz")
    assert list(checkpoint.tensors) == list(expected) == oracle.files
    for name in expected:
        found = checkpoint.read(name)
        assert found.numpy().dtype == oracle[name].dtype.newbyteorder("<"), name
        assert found.numpy().tobytes() == oracle[name].astype(found.numpy().dtype).tobytes(), name
        assert tuple(found.shape) == oracle[name].shape == checkpoint.tensors[name].shape, name
        assert bits(checkpoint.read(name, own=True)) == bits(found)


@pytest.mark.parametrize("saver", SAVERS)
def test_any_window_is_read_as_numpy_cuts_it(saver: str, tmp_path: Path) -> None:
    expected = {name: tensor for name, tensor in arrays().items() if tensor.size > 1}
    SAVERS[saver](tmp_path / "a.npz", **expected)  # type: ignore[arg-type]  # as above
    checkpoint, generator = open_checkpoint(tmp_path / "a.npz"), np.random.default_rng(3)
    reader = MoveReader(checkpoint, sparing=True)
    for name, tensor in expected.items():
        start = int(generator.integers(tensor.size))
        stop = int(generator.integers(start, tensor.size)) + 1
        found = reader.row(name, start, stop)
        assert found.numpy().tobytes() == tensor.astype(found.numpy().dtype).ravel()[start:stop].tobytes(), name


@settings(max_examples=15)
@given(tables(), st.booleans())
def test_there_and_back_through_a_table(drawn: Drawn, deflated: bool) -> None:
    """Through an archive that is written here, and through one of numpy's with the same values."""
    table = parse_table(drawn.table)
    numpys = {name: one for name, one in drawn.sources.items() if one.dtype != torch.bfloat16}
    if len(numpys) < len(drawn.sources) or any(target.dtype == torch.bfloat16 for target in drawn.targets.values()):
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        SAVERS["deflated" if deflated else "stored"](root / "a.npz", **{k: v.numpy() for k, v in numpys.items()})  # type: ignore[arg-type]  # as above
        convert(root / "a.npz", root / "b", table, to="npz")
        with np.load(root / "b" / "model.npz") as found:
            assert {key: bits(torch.from_numpy(found[key])) for key in found} == {
                key: bits(tensor) for key, tensor in drawn.targets.items()
            }
        assert verify_files(root / "b").same
        convert(root / "b", root / "c", table, reverse=True)
        again = open_checkpoint(root / "c")
        assert {key: bits(again.read(key)) for key in again.tensors} == {k: bits(v) for k, v in drawn.sources.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    dtypes = [element.dtype for element in DTYPES.values() if element.dtype != torch.complex128]
    tensors = {str(dtype).removeprefix("torch."): values((7, 3), dtype, seed) for seed, dtype in enumerate(dtypes)}
    tensors |= {"wide": values((300, 400), torch.float32, 99), "scalar": torch.tensor(2.5), "a/b.ç": torch.ones(3)}
    return write(tmp_path / "source", tensors | {"empty": torch.zeros(0, 3)})


def test_numpy_reads_what_is_written_and_safetensors_come_back_as_they_were(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "first", TABLE)
    done = convert(tmp_path / "first", tmp_path / "npz", TABLE, to="npz")
    assert [*done.files] == ["config.json", "model.npz", "provenance.json"]
    expected = open_checkpoint(source)
    with np.load(tmp_path / "npz" / "model.npz") as found:
        assert {*found.files} == {*expected.tensors}
        assert all(bits(torch.from_numpy(found[name])) == bits(expected.read(name)) for name in found.files)
    assert zipfile.ZipFile(tmp_path / "npz" / "model.npz").testzip() is None
    convert(tmp_path / "npz", tmp_path / "again", TABLE)
    first, other = (tmp_path / folder / "model.safetensors" for folder in ("first", "again"))
    assert first.read_bytes() == other.read_bytes()
    assert str(digest(tmp_path / "npz")) == str(digest(source))
    assert diff(tmp_path / "npz", source).equal


def test_the_bytes_depend_on_nothing_but_the_input(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", TABLE, to="npz", threads=1, memory=1 << 20)
    convert(source, tmp_path / "b", TABLE, to="npz", threads=3, memory=9 << 20)
    assert (tmp_path / "a" / "model.npz").read_bytes() == (tmp_path / "b" / "model.npz").read_bytes()
    dates = {entry.date_time for entry in zipfile.ZipFile(tmp_path / "a" / "model.npz").infolist()}
    assert dates == {(1980, 1, 1, 0, 0, 0)}


def test_what_was_killed_goes_on_and_its_checksums_are_right(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "a", TABLE, to="npz")
    real, made = Maker.make, list[str]()

    def make(self: Maker, recipe: Recipe, target: int, at: int) -> Made:
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append(recipe.name)
        return real(self, recipe, target, at)

    with monkeypatch.context() as patch:
        patch.setattr(Maker, "make", make)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "b", TABLE, to="npz", threads=1)
    assert convert(source, tmp_path / "b", TABLE, to="npz", threads=1).resumed > 0
    assert (tmp_path / "a" / "model.npz").read_bytes() == (tmp_path / "b" / "model.npz").read_bytes()
    assert zipfile.ZipFile(tmp_path / "b" / "model.npz").testzip() is None


def test_any_flipped_bit_is_found(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", TABLE, to="npz")
    path = tmp_path / "out" / "model.npz"
    raw = path.read_bytes()
    (piece,) = open_checkpoint(tmp_path / "out").pieces("wide")
    told = {}
    for place in (
        piece.extent.start,
        piece.extent.stop - 1,
        piece.extent.start - 1,
        0,
        14,
        len(raw) - 1,
        len(raw) - 90,
    ):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        report = verify_files(tmp_path / "out")
        assert not report.same, place
        told[place] = report.problems
    assert told[piece.extent.start] == ("model.npz: tensor 'wide' is not as it was written",)
    assert all(
        line.startswith(("model.npz: ", "provenance.json: no file")) for lines in told.values() for line in lines
    )


def test_a_damaged_element_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    for name, save in SAVERS.items():
        path = tmp_path / f"{name}.npz"
        save(path, a=np.arange(1000.0), b=np.ones(3))
        raw = bytearray(path.read_bytes())
        raw[700] ^= 1
        path.write_bytes(raw)
        checkpoint = open_checkpoint(path)
        assert checkpoint.read("b").tolist() == [1, 1, 1]
        with pytest.raises(CheckpointError, match=r"does not match its bytes|cannot be inflated|ends after|goes on"):
            checkpoint.read("a")


# ----------------------------------------------------------------------------------------------- what is not written


def test_bfloat16_is_refused_with_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "source", {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(2).to(torch.float8_e4m3fn)})
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "source", tmp_path / "out", TABLE, to="npz")
    first, second = map(str, caught.value.faults)
    assert "tensor 'a': numpy has no bfloat16, so that an .npz file cannot hold it" in first
    assert "pass dtype=torch.float32, which holds every value of it, or write safetensors" in first
    assert "numpy has no float8_e4m3fn" in second
    assert os.listdir(tmp_path) == ["source"]
    convert(tmp_path / "source", tmp_path / "out", TABLE, to="npz", dtype=torch.float32)
    assert np.load(tmp_path / "out" / "model.npz")["a"].dtype == np.float32


@pytest.mark.parametrize(("name", "told"), [("a\nb", "control character"), ("", "empty string"), ("a" * 5000, "5000")])
def test_names_that_would_not_be_read_again_are_not_written(name: str, told: str) -> None:
    for container in (container for container in CONTAINERS if container.promises.writes and not container.single):
        with pytest.raises(CheckpointError, match=told):
            container.outline({name: torch.ones(3)}, WriteOptions(where="out"))


@pytest.mark.parametrize("name", ["../a", "/a", "a/../b", "a\\b", "c:/a", "a/.."])
def test_names_that_climb_out_of_an_archive_are_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "source", {name: torch.ones(3)})
    with pytest.raises(CheckpointError, match="would lie outside of it"):
        convert(tmp_path / "source", tmp_path / "out", TABLE, to="npz")


def test_a_size_of_shards_is_refused_and_shards_become_one_file(tmp_path: Path) -> None:
    tensors = {f"t{number}": values((30, 40), torch.float32, number) for number in range(4)}
    convert(write(tmp_path / "source", tensors), tmp_path / "shards", TABLE, shard_size=5000)
    with pytest.raises(Exception, match="has no index, so that all tensors lie in one file"):
        convert(tmp_path / "source", tmp_path / "out", TABLE, to="npz", shard_size=5000)
    assert [*convert(tmp_path / "shards", tmp_path / "out", TABLE, to="npz").files][-2:] == [
        "model.npz",
        "provenance.json",
    ]


LARGE_ARCHIVES = {
    "a size of 64 bits, and a place": {"a": (torch.uint8, FULL + 9), "b": (torch.float32, 5)},
    "70,000 members": {f"t{number}": (torch.float32, 1) for number in range(70_000)},
}


@pytest.mark.parametrize(
    "which", [pytest.param(name, marks=[pytest.mark.slow] if "members" in name else []) for name in LARGE_ARCHIVES]
)
def test_a_large_archive_is_laid_out_as_zip_has_it(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frame around holes."""
    monkeypatch.setenv("PORTING_LIMITS", "seconds=80")  # a slow machine reads longer; the limit is tested elsewhere
    made = LARGE_ARCHIVES[which].items()
    tensors = {name: torch.empty(size, dtype=dtype, device="meta") for name, (dtype, size) in made}
    (shard,) = Npz().outline(tensors, WriteOptions(where="x")).shards
    path = tmp_path / "model.npz"
    with path.open("wb") as file:
        file.truncate(shard.size)
        for at, raw in shard.frame:
            file.seek(at)
            file.write(raw)
    listed = zipfile.ZipFile(path).infolist()
    assert [entry.filename for entry in listed] == [f"{name}.npy" for name in tensors]
    found = open_checkpoint(path)
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }
    assert {name: found.pieces(name, verify=False)[0].extent.start for name in tensors} == dict(shard.offsets)
    assert all(at % 64 == 0 for at in shard.offsets.values())


# --------------------------------------------------------------------------------------------------- how much is read


def read_by(work: Callable[[], object]) -> int:
    """The bytes that this process asked the system for meanwhile."""

    def now() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = now()
    work()
    return now() - before


LARGE = 48 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 MiB that deflate shrinks a little, beside a small array; stored and deflated."""
    root = tmp_path_factory.mktemp("large")
    noise = np.random.default_rng(2).integers(0, 128, LARGE, dtype=np.uint8)
    np.savez(root / "stored.npz", w=noise, small=np.ones(3))
    with zipfile.ZipFile(root / "deflated.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, tensor in (("w", noise), ("small", np.ones(3))):
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, tensor)
    return root


def test_a_stored_member_is_read_by_ranges_and_mapped(large: Path) -> None:
    assert read_by(lambda: open_checkpoint(large / "stored.npz")) < 1 << 17
    checkpoint = open_checkpoint(large / "stored.npz")
    assert read_by(lambda: checkpoint.read("small")) < 1 << 17
    row = Copy("w", "w", (10,), LARGE - 20, (1,), 0, (1,))
    checkpoint.pieces("w")  # its checksum is compared once
    assert read_by(lambda: list(MoveReader(checkpoint, sparing=True).read(row, Window.of_row(0, 10)))) < 1 << 17
    assert checkpoint.maps("w")


@contextmanager
def inflated(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of what is inflated meanwhile."""
    lengths: list[int] = []

    class Counted:
        def __init__(self, bits: int = zlib.MAX_WBITS) -> None:
            self._stream = zlib.decompressobj(bits)

        def __getattr__(self, name: str) -> object:
            return getattr(self._stream, name)

        def copy(self) -> Counted:
            other = Counted()
            other._stream = self._stream.copy()
            return other

        def decompress(self, raw: bytes, most: int) -> bytes:
            found = self._stream.decompress(raw, most)
            lengths.append(len(found))
            return found

    with patch.context() as inside:
        fake = SimpleNamespace(decompressobj=Counted, error=zlib.error, crc32=zlib.crc32)
        inside.setattr("porting.checkpoint.npz.zlib", fake)
        yield lengths


def test_a_deflated_member_is_inflated_in_bounded_memory(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = np.load(large / "deflated.npz")["w"]
    checkpoint, stored = open_checkpoint(large / "deflated.npz"), open_checkpoint(large / "stored.npz")
    assert not checkpoint.maps("w")
    (piece,) = checkpoint.pieces("w")  # all of it is inflated here, for its checksum
    buffer = memoryview(bytearray(1 << 16))
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for at in range(0, LARGE, 1 << 16):
        piece.file.read_into(buffer, piece.extent.start + at)
        assert buffer == expected[at : at + (1 << 16)].data
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    generator = np.random.default_rng(1)
    with inflated(monkeypatch) as lengths:
        for _ in range(20):
            at = int(generator.integers(LARGE - 100))
            piece.file.read_into(buffer[:100], piece.extent.start + at)
            assert buffer[:100] == expected[at : at + 100].data
    assert sum(lengths) < LARGE + 1000, "all of it once more, into a file"
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # in KiB
    assert digest(checkpoint).tensors == digest(stored).tensors


@pytest.mark.parametrize("shape", [(1 << 11, 1 << 10), (1 << 5, 1 << 16), (1 << 7, 1 << 7, 1 << 7)])
def test_columns_of_a_deflated_member_are_not_inflated_again_for_each_window(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """130 kB took a minute: each window of rows has elements of all columns."""
    data = np.asfortranarray(np.arange(1 << 21, dtype="f4").reshape(shape) % 1000)
    np.savez_compressed(tmp_path / "a.npz", a=data)
    np.savez(tmp_path / "b.npz", a=data)
    with inflated(monkeypatch) as lengths:
        found = digest(tmp_path / "a.npz")
        convert(tmp_path / "a.npz", tmp_path / "out", TABLE, derive=True, memory=1 << 21)
    assert sum(lengths) < 2 * 3.1 * data.nbytes, "at most three times in each command"
    assert found.tensors == digest(tmp_path / "b.npz").tensors == digest(tmp_path / "out").tensors


def test_what_is_kept_of_many_members_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"t{number}": np.arange(20_000.0) + number for number in range(3 * MOST_KEPT)}
    np.savez_compressed(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]  # numpy types its keywords as a flag
    checkpoint = open_checkpoint(tmp_path / "a.npz")
    with inflated(monkeypatch) as lengths:
        for _ in range(10):
            for name, array in arrays.items():
                (piece,) = checkpoint.pieces(name)
                for at in (150_000, 0):
                    assert piece.file.pread(piece.extent.start + at, 8) == array.tobytes()[at : at + 8]
    file = checkpoint.file("a.npz")
    assert len(file.kept._kept) == MOST_KEPT
    assert sum(lengths) > 0


def test_elements_that_cannot_be_kept_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.arange(1 << 10))

    def full(**_: object) -> object:
        raise OSError(28, "No space left on device")

    (piece,) = open_checkpoint(tmp_path / "a.npz").pieces("a")
    monkeypatch.setattr("porting.checkpoint.files.tempfile.TemporaryFile", full)
    monkeypatch.setattr("porting.checkpoint.files.IN_MEMORY", 1000)
    piece.file.pread(0, piece.file.size)  # as often as for its checksum and its values
    with pytest.raises(CheckpointError, match=r"its decoded elements, .* cannot be kept in .*No space left") as caught:
        piece.file.pread(0, 8000)
    assert "set TMPDIR to a folder with more room" in str(caught.value)


def test_threads_that_read_one_member_do_not_disturb_each_other(large: Path) -> None:
    expected = np.load(large / "deflated.npz")["w"]
    checkpoint, wrong = open_checkpoint(large / "deflated.npz"), list[int]()
    (piece,) = checkpoint.pieces("w", verify=False)

    def work(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(6):
            buffer, at = memoryview(bytearray(500)), int(generator.integers(LARGE // 4))
            piece.file.read_into(buffer, piece.extent.start + at)
            if buffer != expected[at : at + 500].data:
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --------------------------------------------------------------------------------------------------- what lies


def npy(descr: object = "<f4", shape: object = (2,), raw: bytes = bytes(8), **more: object) -> bytes:
    """A member with this header, whatever it says."""
    text = repr({"descr": descr, "fortran_order": False, "shape": shape, **more}).encode() + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text + raw


def npz(*members: tuple[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of these members, as Python's zipfile writes it."""
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
        warnings.simplefilter("ignore")  # a name twice
        for name, raw in members:
            archive.writestr(zipfile.ZipInfo(name), raw, method)
    return file.getvalue()


def changed(*places: tuple[bytes, int, int]) -> Callable[[], bytes]:
    """An archive in which a byte behind each of some marks is another."""

    def make() -> bytes:
        raw = bytearray(npz(("a.npy", npy())))
        for mark, offset, value in places:
            raw[raw.index(mark) + offset] = value
        return bytes(raw)

    return make


def sized(size: str) -> bytes:
    """An array of one axis whose size is spelled so."""
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({size},)}}".encode()
    return b"\x93NUMPY\1\0" + len(head).to_bytes(2, "little") + head


def bomb() -> bytes:
    """257 MiB of zeros in 260 kB."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w", force_zip64=True) as member,
    ):
        member.write(npy("|u1", (257 << 20,), b""))
        for _ in range(257):
            member.write(bytes(1 << 20))
    return file.getvalue()


def objects() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.array([{"x": 1}, None], dtype=object))
    return file.getvalue()


def inflating(raw: bytes, said: int) -> Callable[[], bytes]:
    """A deflated member whose size the archive gives as another than it has."""

    def make() -> bytes:
        file = bytearray(npz(("a.npy", raw), method=zipfile.ZIP_DEFLATED))
        for mark, offset in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
            at = file.index(mark) + offset
            file[at : at + 4] = struct.pack("<I", said)
        return bytes(file)

    return make


FINE = npz(("a.npy", npy()), ("b.npy", npy()))
HEAD = len(npy(raw=b""))

HOSTILE: list[tuple[str, Callable[[], bytes], str]] = [
    ("Python objects", objects, "tensor 'a': its descr is '|O': Python objects, which are pickles; none is read"),
    ("bfloat16 of ml_dtypes", lambda: npz(("a.npy", npy("<V2", (4,)))), "bfloat16 and float8 of ml_dtypes"),
    ("bytes without a type", lambda: npz(("a.npy", npy("|V2", (4,)))), "its descr is '|V2': bytes without a type"),
    ("text", lambda: npz(("a.npy", npy("<U2", (1,)))), "its descr is '<U2': text"),
    ("dates", lambda: npz(("a.npy", npy("<M8[ns]", (1,)))), "its descr is '<M8[ns]': dates or durations"),
    ("records", lambda: npz(("a.npy", npy([("x", "<f4")]))), "its elements are records of several fields"),
    ("a long double", lambda: npz(("a.npy", npy("<f16", (1,), bytes(16)))), "its descr '<f16' is not a dtype"),
    ("no byte order", lambda: npz(("a.npy", npy("|f4"))), "its descr '|f4' is not a dtype that torch has"),
    ("a descr that is not a string", lambda: npz(("a.npy", npy(4))), "its descr '4' is not one of numpy's"),
    ("a negative size", lambda: npz(("a.npy", npy(shape=(-2,)))), "is not a tuple of sizes"),
    ("a size that is a boolean", lambda: npz(("a.npy", npy(shape=(True, 2)))), "is not a tuple of sizes"),
    ("a shape that overflows", lambda: npz(("a.npy", npy(shape=(1 << 40, 0, 1 << 40), raw=b""))), "overflows 64 bits"),
    ("65 axes", lambda: npz(("a.npy", npy(shape=(1,) * 65))), "65 dimensions; torch handles 64"),
    ("too few elements", lambda: npz(("a.npy", npy(shape=(3,)))), "it has 8 bytes, and shape [3] of float32 needs 12"),
    ("too many elements", lambda: npz(("a.npy", npy(raw=bytes(9)))), "9 bytes, and shape [2] of float32 needs 8"),
    ("a key too many", lambda: npz(("a.npy", npy(more=True))), "descr, fortran_order and shape, and nothing else"),
    ("no dictionary", lambda: npz(("a.npy", b"\x93NUMPY\1\0\4\0[1]\n")), "descr, fortran_order and shape"),
    ("a call in the header", lambda: npz(("a.npy", b"\x93NUMPY\1\0\x0c\0__import__()")), "not a dictionary of"),
    ("a dictionary for a key", lambda: npz(("a.npy", b"\x93NUMPY\1\0\6\0{{}:1}")), "not a dictionary of Python's"),
    ("a size of 20 000 bits", lambda: npz(("a.npy", sized("0x" + "f" * 5000))), "a whole number of 20000 bits"),
    ("a list in a set", lambda: npz(("a.npy", b"\x93NUMPY\1\0\4\0{[]}")), "not a dictionary of Python's"),
    ("a sum beyond floats", lambda: npz(("a.npy", b"\x93NUMPY\1\0\xa3\x0f" + b"9" * 4000 + b"+1j")), "not a dict"),
    ("brackets without end", lambda: npz(("a.npy", b"\x93NUMPY\1\0\x10\x27" + b"(" * 10_000)), "not a dictionary of"),
    ("a header of 4 GiB", lambda: npz(("a.npy", b"\x93NUMPY\2\0\xff\xff\xff\xff" + bytes(80))), "4294967295 bytes"),
    ("a header of 60 kB", lambda: npz(("a.npy", b"\x93NUMPY\1\0\x60\xea" + b" " * 60_000)), "and 10000 are read"),
    ("another version", lambda: npz(("a.npy", npy().replace(b"\1\0", b"\7\0", 1))), "of version 1.0, 2.0 or 3.0"),
    ("another part of a version", lambda: npz(("a.npy", npy().replace(b"\1\0", b"\1\1", 1))), "of version 1.0, 2.0 or"),
    ("no array", lambda: npz(("a.npy", b"no array at all, but long enough")), "does not begin as an .npy file"),
    ("an empty member", lambda: npz(("a.npy", b"")), "does not begin as an .npy file"),
    ("a member that is no .npy", lambda: npz(("a.npy", npy()), ("b.pkl", b"x")), "the entry 'b.pkl' is no .npy array"),
    ("the name of another member", lambda: npz(("a.npy", npy()), ("a.npy.npy", npy())),
     "tensor 'a.npy': another array's file has this name, which numpy reads instead"),
    ("a name twice", lambda: npz(("a.npy", npy()), ("a.npy", npy())), "the entry 'a.npy' stands twice"),
    ("a name with ..", lambda: npz(("../a.npy", npy())), "the entry '../a.npy' climbs out of the archive"),
    ("a name in cp437", lambda: npz(("ab.npy", npy())).replace(b"ab.npy", b"\xe4b.npy"), "is no UTF-8"),
    ("a name that is no UTF-8", lambda: npz(("äb.npy", npy())).replace("ä".encode(), b"\xff\xff"), "is no UTF-8"),
    ("an absolute name", lambda: npz(("/a.npy", npy())), "climbs out of the archive"),
    ("a folder", lambda: npz(("a.npy", npy()), ("b/", b"")), "the entry 'b/' is no .npy array"),
    ("encrypted", changed((b"PK\3\4", 6, 1), (b"PK\1\2", 8, 1)), "the entry 'a.npy' is encrypted"),
    ("an unknown version of zip", changed((b"PK\1\2", 6, 173)), "has a form that numpy.savez does not write"),
    ("another method", changed((b"PK\3\4", 8, 99), (b"PK\1\2", 10, 99)), "numpy.savez stores or deflates them"),
    ("bzip2", lambda: npz(("a.npy", npy()), method=zipfile.ZIP_BZIP2), "numpy.savez stores or deflates them"),
    ("two headers that disagree", changed((b"PK\3\4", 14, 1)), "is not where the table of contents says"),
    ("bytes in front", lambda: b"x" + FINE, "this is not a zip archive"),
    ("bytes behind", lambda: FINE + b"x", "does not end with its end record"),
    ("two archives", lambda: FINE + FINE, "its table of contents cannot be read"),
    ("a bomb", bomb, "bytes of tensors beyond those that are stored"),
    ("not a zip archive", lambda: b"no archive" * 20, "this is not a zip archive, so not one that numpy.savez wrote"),
    ("an archive of nothing", npz, "this is not a zip archive"),
    ("a safetensors file", lambda: b"\x02\0\0\0\0\0\0\0{}", "this is a safetensors file, not an .npz file of numpy"),
    ("inflates to less", inflating(npy(), HEAD + 16), "it has 16 bytes, and shape [2] of float32 needs 8"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "told"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_what_lies_is_refused(make: Callable[[], bytes], told: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(make())
    with pytest.raises((CheckpointError, LimitError)) as caught:
        open_checkpoint(path)
    assert told in str(caught.value), str(caught.value)


def test_no_object_is_unpickled(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    np.savez(tmp_path / "a.npz", a=np.array([Runs()], dtype=object))
    with pytest.raises(CheckpointError, match="none is read, since that could run code"):
        open_checkpoint(tmp_path / "a.npz")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("saver", SAVERS)
def test_a_file_that_was_cut_short_anywhere_is_refused(saver: str, tmp_path: Path) -> None:
    SAVERS[saver](tmp_path / "a.npz", a=np.arange(9.0), b=np.ones((2, 3)))
    raw = (tmp_path / "a.npz").read_bytes()
    for length in range(len(raw)):
        (tmp_path / "a.npz").write_bytes(raw[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "a.npz")


@pytest.mark.parametrize("said", [HEAD + 8, HEAD + 4])
def test_a_member_that_inflates_to_another_size_is_refused_when_it_is_read(said: int, tmp_path: Path) -> None:
    raw = npy("<f4", ((said - HEAD) // 4,), bytes(6 if said == HEAD + 8 else 12))
    (tmp_path / "a.npz").write_bytes(inflating(raw, said)())
    checkpoint = open_checkpoint(tmp_path / "a.npz")
    with pytest.raises(CheckpointError, match=r"the entry 'a.npy' (ends after|goes on behind)"):
        checkpoint.read("a")


def test_archives_that_other_programs_write_are_read(tmp_path: Path) -> None:
    """To a pipe, with 64 bits for sizes, and with the flags of another deflate."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.raw = b""

        def writable(self) -> bool:
            return True

        def write(self, raw: object) -> int:
            self.raw += bytes(raw)  # type: ignore[call-overload]  # a buffer
            return len(bytes(raw))  # type: ignore[call-overload]  # as above

    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        for wide in (False, True):
            pipe = Pipe()
            with zipfile.ZipFile(pipe, "w", method) as archive:
                for name in ("a.npy", "b.npy"):
                    with archive.open(name, "w", force_zip64=wide) as file:
                        file.write(npy(raw=struct.pack("<2f", 1, 2)))
            (tmp_path / "a.npz").write_bytes(pipe.raw)
            assert open_checkpoint(tmp_path / "a.npz").read("b").tolist() == [1, 2]
    raw = bytearray(npz(("a.npy", npy()), method=zipfile.ZIP_DEFLATED))
    raw[6] |= 2
    raw[raw.index(b"PK\1\2") + 8] |= 2
    (tmp_path / "a.npz").write_bytes(raw)
    assert open_checkpoint(tmp_path / "a.npz").read("a").tolist() == [0, 0]


def test_a_file_of_another_name_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(FINE)
    with pytest.raises(
        CheckpointError, match=r"an .npz file of numpy whose name does not say so.*rename it to end in .npz"
    ):
        open_checkpoint(tmp_path / "a.dat")
    save_file({"a": torch.ones(2)}, tmp_path / "model.npz")
    with pytest.raises(CheckpointError, match=r"this is a safetensors file, not an .npz file of numpy"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [(32, 1 << 12), (128, 1 << 10), (2,) * 17])
@pytest.mark.parametrize("kind", [">f4", "<f4", "?", ">c16", "u2"])
def test_columns_of_a_deflated_member_are_gathered_and_not_read_one_by_one(
    shape: tuple[int, ...], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element of a row was read by a call of its own: 18 s for 130 kB."""
    data = np.asfortranarray((np.arange(1 << 17) % (2 if kind == "?" else 1000)).reshape(shape).astype(kind))
    np.savez_compressed(tmp_path / "a.npz", a=data)
    np.savez(tmp_path / "b.npz", a=np.ascontiguousarray(data.astype(data.dtype.newbyteorder("<"))))
    calls: list[int] = []
    real = Stream.pread

    def counted(self: Stream, offset: int, count: int) -> bytes:
        calls.append(count)
        return real(self, offset, count)

    monkeypatch.setattr(Stream, "pread", counted)
    assert digest(tmp_path / "a.npz").tensors == digest(tmp_path / "b.npz").tensors
    assert len(calls) < 100


def test_python_does_not_warn_of_a_header_that_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npz(("a.npy", b"\x93NUMPY\1\0\6\0{1or 2")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointError, match="its header is not a dictionary of Python's plain values"):
            open_checkpoint(tmp_path / "a.npz")
    assert not caught

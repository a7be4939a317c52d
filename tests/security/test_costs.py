"""A few bytes of a stranger's file that stand for many: what they cost is counted, bounded, or spent once."""

from __future__ import annotations

import inspect
import json
import math
import os
import struct
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import porting
import porting.converting.integrity
from porting.build import bounds
from porting.checkpoint import CheckpointError, open_checkpoint
from porting.checkpoint.checkpoint import Checkpoint
from porting.checkpoint.container import allow_time
from porting.checkpoint.errors import FAULTS_SHOWN
from porting.checkpoint.files import LocalFile
from porting.checkpoint.inspect import inspect_checkpoint
from porting.checkpoint.strict_json import parse
from porting.converting.integrity import verify_files
from porting.converting.journal import past
from porting.converting.record import read_record, record_bytes
from porting.errors import VerifyError, nearest
from porting.limits import LimitError, Limits, spending
from porting.opening import Folder
from porting.printable import quote
from porting.recordings import RecordingError, load_recording, save_recording
from porting.suggesting.subjects.model_preparation import odd_numbers, tells_nothing
from porting.tables import find_table
from porting.tokenizer import TokenizerError, read_tokenizer
from porting.verification.recorded_trace import read_inputs, read_recording
from tests.small_checkpoint import write_checkpoint

DEEP = 400

EMOJI = "\N{GRINNING FACE}".encode()


def limited(monkeypatch: pytest.MonkeyPatch, unit: str, limit: int) -> None:
    monkeypatch.setenv("PORTING_LIMITS", f"{unit}={limit}")


def refused(read: Callable[[], object], unit: str) -> None:
    """It is refused, and the line names the limit that ran out."""
    with pytest.raises(LimitError, match=f"PORTING_LIMITS={unit}="):
        read()


# ---------------------------------------------------------------------------------------------- what repeats elements


def test_elements_that_are_repeated_are_charged_as_what_they_may_be_cast_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, "made", 1_000_000)
    torch.save(
        {"a": torch.zeros(1, dtype=torch.bfloat16).expand(1 << 17)}, tmp_path / "a.bin"
    )  # 262 kB, 2 MB as two float64
    refused(lambda: open_checkpoint(tmp_path / "a.bin"), "made")
    shared = torch.zeros(1 << 12, dtype=torch.int8)
    torch.save({str(number): shared[:] for number in range(32)}, tmp_path / "b.bin")
    refused(lambda: open_checkpoint(tmp_path / "b.bin"), "made")


def test_what_is_inflated_is_charged_as_what_it_may_be_cast_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, "made", 1_000_000)
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1 << 18, np.int8))
    refused(lambda: open_checkpoint(tmp_path / "a.npz"), "made")
    np.savez_compressed(tmp_path / "b.npz", a=np.random.default_rng(0).integers(0, 250, 1 << 18, np.uint8))
    assert open_checkpoint(tmp_path / "b.npz").read("a").numel() == 1 << 18


def test_a_module_may_be_as_large_as_what_is_stored_and_not_as_what_is_repeated(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(1000), "b": torch.zeros(10)}, tmp_path / "a.bin")
    assert bounds(open_checkpoint(tmp_path / "a.bin").tensors).stored == 4 * 11


# --------------------------------------------------------------------------------------------- journals and records


def journal(folder: Path, *lines: bytes) -> Folder:
    (folder / "0.jsonl").write_bytes(b"\n".join([*lines, b""]))
    return Folder(folder)


def test_the_first_line_of_a_journal_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, "objects", 1000)
    folder = journal(tmp_path, b'{"plan":"x","sources":[' + b",".join([b"[]"] * 1000) + b"]}")
    refused(lambda: past(folder, {"plan": "y", "sources": []}, made=(), sources=()), "objects")


def test_of_an_entry_of_a_journal_only_what_is_a_digest_is_kept(tmp_path: Path) -> None:
    key = {"plan": "x", "sources": list[object]()}
    entry = {"tensor": "a", "infinite": 0, "vanished": 0, "digest": "0" * 1000, "sources": {"b": [0] * 1000}}
    other = {"source": "c", "digest": "1" * 1000}
    lines = (json.dumps(one, separators=(",", ":")).encode() for one in (key, entry, other))
    found = past(journal(tmp_path, *lines), key, made={"a"}, sources={"b", "c"})
    assert found is not None
    assert not found.made
    assert set(found.sources.values()) <= {""}


def test_the_files_that_a_record_names_are_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, "objects", 1500)
    (tmp_path / "provenance.json").write_bytes(record_bytes({"files": {f"a{number}": 0 for number in range(500)}}))
    refused(lambda: verify_files(tmp_path), "objects")


def test_a_record_is_compared_without_writing_it_out_again(tmp_path: Path) -> None:
    """Its indent makes a line of a hundred characters of two that are nested."""
    raw = (
        b'{"format":"porting-provenance-2","files":' + b"[" * 90 + b"0," * 20_000 + b"0" + b"]" * 90 + b',"digest":"0"}'
    )
    (tmp_path / "provenance.json").write_bytes(raw)
    tracemalloc.start()
    record = read_record(Folder(tmp_path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record is not None
    assert "its own digest does not fit" in record.damage
    assert most < 1_000_000


# ------------------------------------------------------------------------------------ one file under several names


def test_a_file_of_several_names_is_digested_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number}.json" for number in range(10)]
    (tmp_path / names[0]).write_bytes(b"x" * 1000)
    for name in names[1:5]:
        os.link(tmp_path / names[0], tmp_path / name)
    for name in names[5:]:
        (tmp_path / name).symlink_to(names[0])
    entry = {"size": 1000, "digest": "0", "sha256": "0"}
    (tmp_path / "provenance.json").write_bytes(
        record_bytes({"files": dict.fromkeys(names, entry), "tensors": {"a": "0"}})
    )
    read: list[str] = []
    for called in ("of_range", "sha256_of"):
        whole = getattr(porting.converting.integrity, called)

        def counted(*given: object, whole: Callable[..., object] = whole, called: str = called) -> object:
            read.append(called)
            return whole(*given)

        monkeypatch.setattr(porting.converting.integrity, called, counted)
    report = verify_files(tmp_path, sha256=True)
    assert read == ["of_range", "sha256_of"]
    assert report.files == 10


def test_a_file_of_several_names_allows_its_time_once(tmp_path: Path) -> None:
    with (tmp_path / "0").open("wb") as file:
        file.truncate(1_000_000_000)
    for number in range(1, 5):
        os.link(tmp_path / "0", tmp_path / str(number))
    with spending() as budget:
        allow_time(LocalFile(tmp_path / str(number)) for number in range(5))
        assert Limits().seconds + 1 < budget.left < Limits().seconds + 3


def test_shards_are_compared_for_the_faults_that_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{number}": torch.zeros(3) for number in range(30)}
    save_file(tensors, tmp_path / "s0.safetensors")
    for number in range(1, 30):
        os.link(tmp_path / "s0.safetensors", tmp_path / f"s{number}.safetensors")
    index = {"weight_map": {f"t{number}": f"s{number}.safetensors" for number in range(30)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    compared: list[str] = []
    whole, pread = Checkpoint._same_bytes, LocalFile.pread

    def counted(self: Checkpoint, first: object, second: object, name: str) -> bool:
        compared.append(name)
        with monkeypatch.context() as inside:  # one file under two names is not read
            inside.setattr(LocalFile, "pread", lambda *_: pytest.fail("read"))
            return whole(self, first, second, name)  # type: ignore[arg-type]  # what it was called with

    monkeypatch.setattr(Checkpoint, "_same_bytes", counted)
    with pytest.raises(CheckpointError, match="with equal bytes"):
        open_checkpoint(tmp_path)
    assert len(compared) <= FAULTS_SHOWN
    assert LocalFile.pread is pread


# -------------------------------------------------------------------------------------------------- pickles and names


def test_a_value_is_never_written_out_longer_than_it_is_shown() -> None:
    written: list[int] = []

    class Counted:
        def __repr__(self) -> str:
            written.append(1)
            return "x"

    some = [Counted() for _ in range(1000)]
    for value in (some, tuple(some), dict.fromkeys(some), [some], {0: {0: some}}):
        written.clear()
        assert len(quote(value)) < 130
        assert len(written) < 130
    doubled: object = "x" * 1000
    for _ in range(30):
        doubled = (doubled, doubled)
    assert len(quote(doubled)) < 130


def nested(path: Path, key: str, count: int) -> Path:
    """A state dict below a long key, which the file has once."""
    one = torch.zeros(1)
    torch.save({key: {str(number): one for number in range(count)}, "x": 1}, path)
    return path


def grouped(path: Path, key: str, count: int) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        for number in range(count):
            file[f"{key}/{number}"] = np.zeros(1)
    return path.with_suffix(".h5")


@pytest.mark.parametrize("make", [nested, grouped])
def test_names_that_are_put_together_of_one_long_key_are_charged(
    make: Callable[[Path, str, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, "metadata", 1_000_000)
    path = make(tmp_path / "a.bin", "k" * 3000, 200)
    refused(lambda: open_checkpoint(f"{path}#"), "metadata")
    limited(monkeypatch, "metadata", 4_000_000)
    assert len(open_checkpoint(f"{path}#").tensors) == 200


def test_names_that_are_taken_apart_are_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each letter of a name became a text of its own; and numbers are compared once for each other one in the name."""
    save_file({("1a" * 1000) + str(number): torch.zeros(0) for number in range(60)}, tmp_path / "a.safetensors")
    path = grouped(tmp_path / "b", "a/" * 500 + "b", 60)
    limited(monkeypatch, "objects", 20_000)
    refused(lambda: inspect_checkpoint(tmp_path / "a.safetensors"), "objects")
    limited(monkeypatch, "objects", 25_000)
    assert len(open_checkpoint(path).tensors) == 60
    refused(lambda: inspect_checkpoint(path), "objects")
    save_file({"1a" * 300 + str(number): torch.zeros(0) for number in range(100)}, tmp_path / "c.safetensors")
    limited(monkeypatch, "objects", 500_000)
    refused(lambda: inspect_checkpoint(tmp_path / "c.safetensors"), "objects")


def _string(raw: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(raw)) + raw


@pytest.mark.parametrize("name", ["pytorch_model.bin", ".metadata"])
def test_strings_of_pickles_are_charged_by_what_python_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, "metadata", 1_000_000)
    magic = b"\x80\x02\x8a\x0a" + (0x1950A86A20F9469CFC6C).to_bytes(10, "little") + b"." if name.endswith("n") else b""
    strings = _string(EMOJI + b"x" * 100_000)
    (tmp_path / name).write_bytes(magic + b"\x80\x02(" + strings * 4 + b"t.")
    refused(lambda: open_checkpoint(tmp_path), "metadata")


def test_what_torch_refuses_of_the_older_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    value = {"a": torch.zeros(4).to(torch.float8_e4m3fn)}
    torch.save(value, path, _use_new_zipfile_serialization=False)
    with pytest.raises(AttributeError, match="has no attribute 'dtype'"):
        torch.load(path)
    with pytest.raises(CheckpointError, match="an untyped storage"):
        open_checkpoint(path)
    torch.save(value, path)
    assert open_checkpoint(path).read("a").dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("entry", [b'"shape":[-0],"data_offsets":[0,0]', b'"shape":[0],"data_offsets":[-0,0]'])
def test_a_signed_zero_is_no_size(entry: bytes, tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32",' + entry + b"}}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match="not a whole number"):
        open_checkpoint(tmp_path)
    assert str(parse(b"-0")) == "0"


# ------------------------------------------------------------------------------------- blocks, folders, hints, pieces


def test_empty_blocks_behind_an_array_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (3,)}\n"
    plain = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + b"abc"
    stream = zlib.compressobj(wbits=-15)
    packed = stream.compress(plain) + stream.flush(zlib.Z_FULL_FLUSH) + b"\0\0\0\xff\xff" * 20_000 + b"\1\0\0\xff\xff"
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", packed)
    raw, listed = bytearray(path.read_bytes()), path.read_bytes().rindex(b"PK\1\2")
    for at in (0, listed + 2):  # its place in the table of contents has two bytes more in front
        raw[at + 8], raw[at + 9] = 8, 0
        raw[at + 14 : at + 18] = struct.pack("<I", zlib.crc32(plain))
        raw[at + 22 : at + 26] = struct.pack("<I", len(plain))
    path.write_bytes(raw)
    calls: list[int] = []
    whole = LocalFile.pread

    def counted(self: LocalFile, offset: int, count: int) -> bytes:
        calls.append(count)
        return whole(self, offset, count)

    monkeypatch.setattr(LocalFile, "pread", counted)
    assert bytes(open_checkpoint(path).read("a").tolist()) == b"abc"
    assert len(calls) < 50


def test_a_folder_is_removed_however_deep_it_is(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"kept")
    root = tmp_path / "folder"
    root.mkdir()
    inner = os.open(root, os.O_RDONLY)
    for _ in range(DEEP):
        os.mkdir("d", dir_fd=inner)
        os.mkdir("e", dir_fd=inner)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=inner))
        os.symlink(tmp_path / "kept", "link", dir_fd=inner)
        deeper = os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(inner)
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + DEEP // 2)  # deeper folders could not be removed after a failure
    try:
        Folder(root).clear()
    finally:
        sys.setrecursionlimit(before)
    assert os.listdir(root) == []
    assert (tmp_path / "kept" / "file").read_bytes() == b"kept"


def test_hints_of_one_command_are_bounded_over_all_its_faults() -> None:
    letters = np.random.default_rng(0).choice(list("abcdef"), (1000, 190))
    names = ["".join(letter) for letter in letters]
    mine = [f"{name[:180]}z{name[181:]}" for name in names[:10]]
    with spending():
        hints = [nearest(one, names) for one in mine]
    assert hints[0] == f"did you mean {names[0]!r}?"
    assert hints[-1] == ""
    assert nearest(mine[-1], names[:10]) == f"did you mean {names[9]!r}?"  # a search by itself
    with spending():
        assert nearest("layer.0.wieght", ["layer.0.weight"]) == "did you mean 'layer.0.weight'?"


def unigram(folder: Path, pieces: list[str]) -> Path:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([piece, -1.0] for piece in pieces)]}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    return folder


def test_a_piece_of_a_vocabulary_is_no_longer_than_a_word(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="a piece of its vocabulary has 5000 characters"):
        read_tokenizer(Folder(unigram(tmp_path, ["a" * 5000])), where="a folder")
    assert read_tokenizer(Folder(unigram(tmp_path, ["a" * 500])), where="a folder").tokenizer.get_vocab_size() == 2


def test_the_tree_of_a_vocabulary_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("porting.tokenizer_check.USUAL_NODES", 0, raising=False)
    limited(monkeypatch, "objects", 50_000)
    letters = np.random.default_rng(0).choice(list("abcdef"), (200, 100))
    apart = ["".join(letter) for letter in letters]
    refused(lambda: read_tokenizer(Folder(unigram(tmp_path, apart)), where="a folder"), "objects")
    alike = [apart[0][: number % 100] + "z" for number in range(100)]  # as many characters, and a few beginnings
    assert (
        read_tokenizer(Folder(unigram(tmp_path, sorted(set(alike)))), where="a folder").tokenizer.get_vocab_size()
        == 101
    )


def few_bytes(path: Path) -> Path:
    np.savez_compressed(path.with_suffix(".npz"), input_ids=np.zeros((400_000, 1), np.int64))
    return path.with_suffix(".npz")


def repeated_rows(path: Path) -> Path:
    torch.save({"input_ids": torch.ones(1, 1, dtype=torch.int64).expand(400_000, 1)}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def many_cases(path: Path) -> Path:
    inputs = [{"x": np.ones((1, 1))}] * 600
    return save_recording(path.with_suffix(".safetensors"), inputs, [{".": np.ones((1, 1))}] * 600)


@pytest.mark.parametrize("make", [few_bytes, repeated_rows, many_cases])
def test_inputs_that_a_model_makes_far_more_of_are_charged(make: Callable[[Path], Path], tmp_path: Path) -> None:
    """A few kilobytes were 400,000 rows, for which a small model took 5 GB."""
    path = make(tmp_path / "f")
    with spending(), pytest.raises(LimitError, match="bytes of tensors beyond those that are stored"):
        read_inputs(str(path))
    if make is many_cases:
        with pytest.raises(LimitError, match="bytes of tensors beyond those that are stored"):
            read_recording(path)


@pytest.mark.parametrize("rows", [(1, 8), (8, 512)])
def test_inputs_that_are_packed_well_are_read(rows: tuple[int, int], tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(1, 30_000, rows)
    np.savez_compressed(tmp_path / "f.npz", input_ids=ids, attention_mask=np.ones_like(ids), token_type_ids=0 * ids)
    assert read_inputs(str(tmp_path / "f.npz"))[0].inputs["input_ids"].shape == rows


def recorded(path: Path, header: dict[str, object], body: bytes) -> Path:
    text = json.dumps({"__metadata__": {"format": "porting trace", "version": "1"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def test_a_recording_says_in_a_few_bytes_what_takes_gigabytes(tmp_path: Path) -> None:
    """Arrays that share bytes, each widened; a case of the number 999999; millions of empty lists."""
    said = {"dtype": "BF16", "shape": [50_000], "data_offsets": [0, 100_000]}
    path = recorded(tmp_path / "a.safetensors", {f"inputs/0/{one}": said for one in range(2000)}, bytes(100_000))
    tracemalloc.start()
    with pytest.raises(RecordingError, match="its range overlaps that of"):
        load_recording(path)
    one = {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}
    path = recorded(tmp_path / "b.safetensors", {"inputs/999999/x": one}, bytes(8))
    with pytest.raises(RecordingError, match="it has 1 cases with inputs, numbered up to 999999"):
        load_recording(path)
    with pytest.raises(VerifyError, match="holds inputs and nothing that was computed"):
        read_recording(path)
    path = recorded(tmp_path / "c.safetensors", {"float64/999999/x": one}, bytes(8))
    with pytest.raises(VerifyError) as caught:
        read_recording(path)
    assert len(caught.value.faults) < 100
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000
    path = recorded(tmp_path / "d.safetensors", {"x": []}, b"")
    raw = path.read_bytes().replace(b"[]", b"[" + b"[]," * 4_500_000 + b"0]")
    path.write_bytes(struct.pack("<Q", len(raw) - 8) + raw[8:])
    with pytest.raises(LimitError, match="values in descriptions"):
        load_recording(path)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, r"computes NaN with these sizes \(layer_norm_eps is nan\)"),
        (-math.inf, r"computes NaN with these sizes \(layer_norm_eps is -inf\)"),
        (-1.0, "computes NaN with these sizes"),
        (math.inf, r"computes the same of all inputs with these sizes \(layer_norm_eps is inf\)"),
        (1e308, r"computes the same of all inputs with these sizes \(layer_norm_eps is 1e\+308\)"),
    ],
)
def test_no_way_to_call_a_module_is_tried_where_the_reference_tells_nothing(
    value: float, said: str, tmp_path: Path
) -> None:
    """Each way was tried with each other, for three times as long as an honest config takes."""
    calls: list[int] = []

    class Counting(nn.Module):
        def __init__(self, config: dict[str, int]) -> None:
            super().__init__()
            self.words = nn.Embedding(config["vocab_size"], config["hidden_size"])
            self.norm = nn.LayerNorm(config["hidden_size"])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return self.norm(self.words(ids))  # type: ignore[no-any-return]  # a module returns anything

    write_checkpoint(tmp_path / "m", change={"layer_norm_eps": value})
    with pytest.raises(VerifyError, match=said):
        porting.suggest(tmp_path / "m", Counting)
    assert calls == []


def test_what_tells_nothing_is_nan_or_the_same_of_all_rows() -> None:
    rows = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    none = rows.clone()
    none[1, 2] = math.nan
    masked = torch.cat([rows, torch.full((3, 2), torch.finfo(rows.dtype).min, dtype=rows.dtype)], dim=1)
    assert tells_nothing([none]) == "computes NaN"
    assert tells_nothing([rows[:1].expand(3, 5) * (1 + 1e-15)]) == "computes the same of all inputs"
    assert not any(map(tells_nothing, ([], [rows], [rows, none], [masked], [rows[:1]], [rows[:, :0], rows])))
    nested = {"text_config": {"rope_theta": 1e31, "eps": 1e-12}, "other": [math.nan], "depth": 10**40}
    assert list(odd_numbers(nested)) == [("text_config.rope_theta", 1e31)]


@pytest.mark.parametrize("how", ["convert", "export"])
def test_files_beside_the_weights_are_charged(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is copied and flushed to the disk: 30,000 empty ones took nine seconds of a processor."""
    folder = write_checkpoint(tmp_path / "m")
    for number in range(200):
        (folder / f"{number}.txt").touch()
    checkpoint = open_checkpoint(folder)
    module, table = porting.load(checkpoint), find_table(None, checkpoint.config)
    works: dict[str, Callable[[], object]] = {
        "convert": lambda: porting.convert(checkpoint, tmp_path / "out", table),
        "export": lambda: porting.export(module, table, tmp_path / "out"),
    }
    work = works[how]
    limited(monkeypatch, "objects", 75_000)
    refused(work, "objects")
    assert not (tmp_path / "out").exists()
    limited(monkeypatch, "objects", 130_000)
    work()
    assert (tmp_path / "out" / "199.txt").exists()


@pytest.mark.parametrize("kind", ["hard links", "holes"])
def test_what_files_beside_the_weights_repeat_is_charged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 names of one file of 15 MB were written as 4.5 GB."""
    folder = write_checkpoint(tmp_path / "m")
    (folder / "0.txt").write_bytes(b"x" * 100_000)
    for number in range(1, 20):
        if kind == "hard links":
            os.link(folder / "0.txt", folder / f"{number}.txt")
        else:
            with (folder / f"{number}.txt").open("wb") as file:
                file.truncate(100_000)
    checkpoint = open_checkpoint(folder)
    table = find_table(None, checkpoint.config)
    limited(monkeypatch, "made", 1_500_000)
    refused(lambda: porting.convert(checkpoint, tmp_path / "out", table), "made")
    assert not (tmp_path / "out").exists()
    limited(monkeypatch, "made", 2_500_000)
    porting.convert(checkpoint, tmp_path / "out", table)
    assert (tmp_path / "out" / "19.txt").stat().st_size == 100_000

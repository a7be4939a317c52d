"""A single bit that differs is found, wherever it is."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import xxhash

from porting.checkpoint import CheckpointError
from porting.converting import convert, verify_files
from porting.converting.record import read_record
from porting.opening import Folder
from tests.small_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a")
    convert(write_checkpoint(folder / "source"), folder / "ported", "bert_into_fused", shard_size=20_000, sha256=True)
    return folder / "ported"


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_what_was_written_is_there(ported: Path) -> None:
    report = verify_files(ported, sha256=True)
    assert report.problems == ()
    assert report.strangers == ()
    assert report.files == 7
    assert report.tensors == 40
    assert report.command == "porting convert SOURCE DESTINATION --table bert_into_fused --shard-size 20000"


def test_any_flipped_bit_is_found_and_placed(ported: Path) -> None:
    """In weights, headers, their lengths, index, config, tokenizer and the record itself."""
    draw = random.Random(5)  # noqa: S311  # nothing secret is drawn
    for path in sorted(ported.iterdir()):
        size = 8 * path.stat().st_size
        bits = {draw.randrange(size) for _ in range(25)} | {draw.randrange(64), draw.randrange(min(size, 8000))}
        for bit in bits:
            flip(path, bit)
            problems = verify_files(ported).problems
            flip(path, bit)
            assert len(problems) >= 1, f"bit {bit} of {path.name}"
            assert problems[0].startswith(f"{path.name}: "), problems
    assert verify_files(ported).same


def test_what_stands_in_front_of_the_tensors_counts_as_well(ported: Path) -> None:
    """A bit of the metadata changes no tensor and no name: only the digest of the header shows it."""
    path = min(ported.glob("*.safetensors"))
    place = path.read_bytes().index(b'"pt"') + 1
    flip(path, 8 * place)
    (problem,) = verify_files(ported).problems
    flip(path, 8 * place)
    assert problem == f"{path.name}: its header is not as it was written"


def test_the_tensor_that_differs_is_named(ported: Path) -> None:
    last = max(ported.glob("*.safetensors"))
    flip(last, 8 * last.stat().st_size - 1)
    (problem,) = verify_files(ported).problems
    flip(last, 8 * last.stat().st_size - 1)
    assert problem.startswith(f"{last.name}: tensor 'layers.2.")
    assert problem.endswith("is not as it was written")


def test_files_that_are_missing_cut_short_or_strange_are_named(ported: Path) -> None:
    first = min(ported.glob("*.safetensors"))
    raw = first.read_bytes()
    first.write_bytes(raw[:-1])
    (ported / "notes.txt").write_text("mine")
    config = (ported / "config.json").read_bytes()
    (ported / "config.json").unlink()
    report = verify_files(ported)
    first.write_bytes(raw)
    (ported / "config.json").write_bytes(config)
    (ported / "notes.txt").unlink()
    assert report.problems == (
        "config.json: it is missing",
        f"{first.name}: it has {len(raw) - 1} bytes, and {len(raw)} were written",
    )
    assert report.strangers == ("notes.txt",)


def test_without_a_record_nothing_can_be_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no provenance\.json"):
        verify_files(tmp_path)


def test_digests_are_those_of_other_tools(ported: Path) -> None:
    """Of a small file and of a tensor: plain XXH3-128 of the bytes; SHA-256 as sha256sum has it."""
    import hashlib

    from safetensors import safe_open

    record = read_record(Folder(ported))
    assert record is not None
    config = (ported / "config.json").read_bytes()
    assert record.text("files", "config.json", "digest") == xxhash.xxh3_128_hexdigest(config)
    assert record.text("files", "config.json", "sha256") == hashlib.sha256(config).hexdigest()
    for file in ported.glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                digest = xxhash.xxh3_128_hexdigest(opened.get_tensor(name).tobytes())
                assert record.text("tensors", name) == digest


def test_the_record_is_the_same_wherever_it_is_made(ported: Path, tmp_path: Path) -> None:
    """No time, no path and no number of threads is in it."""
    source = write_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "ported", "bert_into_fused", shard_size=20_000, sha256=True, threads=1, memory=1 << 20)
    for name in sorted(os.listdir(ported)):
        assert (tmp_path / "ported" / name).read_bytes() == (ported / name).read_bytes(), name

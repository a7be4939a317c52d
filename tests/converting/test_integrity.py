"""A single bit that differs is found, wherever it is."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from porting.checkpoint import CheckpointError
from porting.comparing.jobs import work
from porting.converting.conversion import convert
from porting.converting.digests import of_bytes
from porting.converting.integrity import verify_files
from porting.converting.record import packed, read_record, record_bytes, unpacked
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


def test_a_file_that_changes_while_others_are_read_is_an_error(
    ported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(ported, tmp_path / "ported"))

    def read_and_change(*given: Any) -> None:
        work(*given)
        for path in folder.glob("*.safetensors"):
            flip(path, 8 * path.stat().st_size - 1)

    monkeypatch.setattr("porting.converting.integrity.work", read_and_change)
    with pytest.raises(CheckpointError, match="the file changed after it was opened"):
        verify_files(folder)


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
                assert record.tensors[name] == digest


def test_the_record_is_the_same_wherever_it_is_made(ported: Path, tmp_path: Path) -> None:
    """No time, no path and no number of threads is in it."""
    source = write_checkpoint(tmp_path / "source")
    convert(source, tmp_path / "ported", "bert_into_fused", shard_size=20_000, sha256=True, threads=1, memory=1 << 20)
    for name in sorted(os.listdir(ported)):
        assert (tmp_path / "ported" / name).read_bytes() == (ported / name).read_bytes(), name


# ---------------------------------------------------------------------------------------------------------- strangers


@pytest.fixture
def copied(ported: Path, tmp_path: Path) -> Path:
    shutil.copytree(ported, tmp_path / "ported")
    return tmp_path / "ported"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distributed one, nested under a name."""
    folder = tmp_path_factory.mktemp("b")
    convert(write_checkpoint(folder / "source"), folder / "dcp", "bert_into_fused", to="dcp/model")
    return folder / "dcp"


LOOKED_FOR = [
    "adapter_config.json", "adapter_model.safetensors", "modeling_bert.py", "pytorch_model.bin", "model.safetensors",
    "MODEL.SAFETENSORS", "tf_model.h5", "chat_template.jinja", "preprocessor_config.json", "spiece.model", ".metadata",
    "__0_0.distcp", "weights.gguf", "x.so", "vocab.txt", "model-00009-of-00009.safetensors", "dict.txt", "bpe.codes",
    "setup.cfg", "consolidated.00.pth", "weights", "license.py", "readme.json",
]  # fmt: skip


@pytest.mark.parametrize("name", LOOKED_FOR)
def test_a_stranger_that_a_reader_would_look_for_is_a_difference(name: str, copied: Path) -> None:
    (copied / name).write_bytes(b"")
    assert verify_files(copied).problems == (
        f"{name}: it is not in the record, and programs that read the directory may look for it",
    )


@pytest.mark.parametrize("name", ["1_Pooling", "original", "model.safetensors.d", "custom_generate", "pictures.png"])
def test_a_folder_that_is_not_in_the_record_is_a_difference(name: str, copied: Path) -> None:
    """A loader may read what lies in it."""
    (copied / name).mkdir()
    assert verify_files(copied).problems == (
        f"{name}: it is not in the record, and programs that read the directory may look for it",
    )


@pytest.mark.parametrize(
    "name", ["README.md", "LICENSE", ".gitattributes", "notes.txt", "picture.png", "license.TXT", "CITATION.cff"]
)
def test_notes_beside_it_are_named_and_no_difference(name: str, copied: Path) -> None:
    (copied / name).write_bytes(b"")
    assert (verify_files(copied).problems, verify_files(copied).strangers) == ((), (name,))


@pytest.mark.parametrize("name", ["model.safetensors", "model", "__1_0.distcp"])
def test_what_is_read_in_place_of_a_distributed_checkpoint_is_a_difference(
    name: str, saved: Path, tmp_path: Path
) -> None:
    """A file that goes before it, and a folder whose path is that of the part."""
    shutil.copytree(saved, tmp_path / "dcp")
    assert verify_files(tmp_path / "dcp").problems == ()
    if name == "model":
        shutil.copytree(write_checkpoint(tmp_path / "other"), tmp_path / "dcp" / "model")
    else:
        (tmp_path / "dcp" / name).write_bytes(b"")
    (problem,) = verify_files(tmp_path / "dcp").problems
    assert problem == f"{name}: it is not in the record, and programs that read the directory may look for it"


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The record with something else in it, and a digest that fits."""
    content = json.loads((folder / "provenance.json").read_bytes())
    change(content)
    (folder / "provenance.json").write_bytes(
        record_bytes({key: value for key, value in content.items() if key not in {"format", "digests", "digest"}})
    )


def with_another(tensors: dict[str, Any]) -> dict[str, object]:
    nothing: dict[str, object] = {}
    known = [(name, digest, nothing) for name, (digest, _) in unpacked(tensors).items()]
    return packed([*known, ("more", "00" * 16, nothing)])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda it: it["files"].clear(), "provenance.json: it names no files"),
        (lambda it: it.pop("files"), "provenance.json: it names no files"),
        (lambda it: it["tensors"].clear(), "provenance.json: it names no tensors"),
        (lambda it: it.update(tensors=with_another(it["tensors"])), "provenance.json: no file holds its tensor 'more'"),
        (lambda it: it["files"].pop("model-00001-of-00004.safetensors"), "model-00001-of-00004.safetensors: it is not"),
        (lambda it: it["files"].update({"../x": {}}), "../x: it is not a plain file name"),
        (lambda it: it["files"].update({"": 7}), ": it is not a plain file name"),
        (lambda it: it["files"].update({"a\0": 7}), "a\0: it is not a plain file name"),
    ],
    ids=["cleared", "gone", "no tensors", "a tensor more", "a file less", "above", "empty", "nul"],
)
def test_a_record_that_names_nothing_or_too_much_is_a_difference(
    change: Callable[[dict[str, Any]], object], expected: str, copied: Path
) -> None:
    rewritten(copied, change)
    assert any(problem.startswith(expected) for problem in verify_files(copied).problems), verify_files(copied).problems


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "not JSON at character 0"),
        (b"[]", "it is not a record"),
        (b'{"format": "porting-provenance-0"}', "it is not a record"),
        (b'{"format": "\xff"}', "not UTF-8 at byte 12"),
        (b'{"format": "porting-provenance-2", "format": "porting-provenance-2"}', "'format' stands twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"format": "porting-provenance-2", "x": ' + b"[" * 500 + b"]" * 500 + b"}", "nested too deeply"),
        (b'{"format": "porting-provenance-2", "x": ' + b"9" * 400 + b"}", "a whole number of 400 digits"),
    ],
    ids=["empty", "list", "format", "utf-8", "twice", "unclosed", "nested", "digits"],
)
def test_a_record_that_cannot_be_read_is_a_difference(raw: bytes, expected: str, copied: Path) -> None:
    (copied / "provenance.json").write_bytes(raw)
    (problem, *_) = verify_files(copied).problems
    assert problem.startswith("provenance.json: ")
    assert expected in problem


TYPES: list[Any] = [
    None,
    True,
    7,
    -1,
    10**200,
    1.5,
    "x",
    "\ud800",
    [],
    {},
    [[]],
    {"": {}},
]  # Any: whatever JSON can say


@pytest.mark.parametrize("section", ["files", "tensors", "source", "options", "losses", "reverse", "command", "table"])
@pytest.mark.parametrize("value", TYPES, ids=ascii)
def test_whatever_stands_in_a_record_it_is_a_difference_or_nothing(section: str, value: Any, copied: Path) -> None:
    rewritten(copied, lambda it: it.update({section: value}))
    found = verify_files(copied, sha256=True)
    assert found.problems or section not in {"files", "tensors"}
    if section in {"files", "tensors"}:
        rewritten(copied, lambda it: it.update({section: {"model.safetensors": value, "config.json": {"size": value}}}))
        assert verify_files(copied, sha256=True).problems


@pytest.mark.parametrize("to", ["dcp/../..", "dcp/..", "dcp/other", "dcp//", "dcp/model/x", "../dcp"])
def test_no_part_outside_is_taken_from_a_record(to: str, saved: Path, tmp_path: Path) -> None:
    """``dcp/..`` would be the folder above, which is a checkpoint here as well."""
    shutil.copytree(saved, tmp_path / "outer" / "dcp")
    for path in saved.iterdir():
        shutil.copy(path, tmp_path / "outer")
    rewritten(tmp_path / "outer" / "dcp", lambda it: it["options"].update(to=to))
    (problem, *_) = verify_files(tmp_path / "outer" / "dcp").problems
    assert problem.startswith("__0_0.distcp: its tensors cannot be found")


@pytest.mark.parametrize("name", ["config.json", "provenance.json", "model-00002-of-00004.safetensors"])
@pytest.mark.parametrize("how", ["link", "fifo"])
def test_what_is_no_file_of_its_own_is_a_difference(name: str, how: str, copied: Path) -> None:
    """Even if what a link leads to has the right bytes."""
    os.rename(copied / name, copied.parent / name)
    if how == "link":
        (copied / name).symlink_to(copied.parent / name)
    else:
        os.mkfifo(copied / name)
    message = "outside the checkpoint" if how == "link" else "named pipe"
    assert any(problem.startswith(f"{name}: ") and message in problem for problem in verify_files(copied).problems)


def test_a_header_of_gigabytes_is_not_read(copied: Path) -> None:
    first = min(copied.glob("*.safetensors"))
    rewritten(copied, lambda it: it["files"][first.name].update(size=4 << 30))
    first.write_bytes((4 << 30).to_bytes(8, "little"))
    os.truncate(first, 4 << 30)
    problems = verify_files(copied).problems
    assert any("its header is damaged: the header should have 4294967296 bytes" in problem for problem in problems)


def test_differences_without_end_are_grouped_and_counted(copied: Path) -> None:
    """Those that differ in a number are one; of others the first fifty are listed."""

    def many(content: dict[str, Any]) -> None:
        content["files"] |= {f"shard.{number}.bin": {} for number in range(10**5)}
        content["files"] |= {"x" * number: {} for number in range(1, 101)}

    rewritten(copied, many)
    problems = verify_files(copied).problems
    assert len(problems) == 51
    assert "shard.0.bin: it is missing, and 99999 more like it" in problems
    assert problems[-1] == "and 51 more, not shown"


def test_the_record_of_many_tensors_is_small_and_keeps_their_order(tmp_path: Path) -> None:
    names = [f"layers.{i}.{part}.{x:03}.weight" for i in (0, 1, 10, 2) for x in range(50) for part in ("up", "down")]
    entries = [(name, of_bytes(name.encode()), {"shape": [2, 3]}) for name in names]
    section = packed([*entries, ("12", "00" * 16, {"shape": []}), ("", "ff" * 16, {"shape": []})])
    assert len(json.dumps(section)) < 45 * len(names)
    found = unpacked(json.loads(json.dumps(section)))
    assert list(found) == [*names, "12", ""]
    assert all(found[name][0] == digest and found[name][1]["shape"] == [2, 3] for name, digest, _ in entries)


@pytest.mark.parametrize(
    "changed",
    [
        {"groups": 7}, {"groups": []}, {"groups": [{}]}, {"groups": [{"name": ["a", 7]}]}, {"order": "0"},
        {"order": "0:1.2"}, {"order": "-1:1"}, {"order": "\u0663:1"}, {"order": "0:1 0:2"}, {"digests": "\u00e4"},
        {"digests": "AA=="}, {"digests": ["A"]}, {"order": ""},
    ],
)  # fmt: skip
def test_what_is_said_of_tensors_in_another_form_says_nothing(changed: dict[str, object]) -> None:
    section = packed([("h.0", "00" * 16, {})])
    assert len(unpacked(section)) == 1
    assert unpacked({**section, **changed}) == {}

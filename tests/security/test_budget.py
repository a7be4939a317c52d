"""Descriptions that cost more than they are long: one line that names the limit, and how it is raised.

The command line meets each in this process; some are met by a process of their own, whose memory and processor time are
bounded by the system.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from porting.limits import (
    LimitError,
    Limits,
    charge,
    charge_text,
    combinations,
    limits,
    separately,
    spending,
)
from porting.notation.name import Name
from tests.checkpoint.test_bin_file import entries, saved, zipped
from tests.cli.conftest import Run, run
from tests.guards.tree import ROOT
from tests.small_checkpoint import write_checkpoint

pytestmark = pytest.mark.few(3)

__all__ = ["run"]

Words = list[str]

# ------------------------------------------------------------------------------------------------------------- headers


def header(folder: Path, text: bytes) -> Words:
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return ["inspect", "model.safetensors"]


def entry(name: str) -> bytes:
    return b'"%s":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % name.encode()


def zero_tensors(folder: Path) -> Words:
    return header(folder, b"{" + b",".join(entry(f"{number:x}") for number in range(500_000)) + b"}")


def empty_entries(folder: Path) -> Words:
    return header(folder, b"{" + b",".join(b'"%x":{}' % number for number in range(2_000_000)) + b"}")


def metadata_keys(folder: Path) -> Words:
    keys = b",".join(b'"%x":""' % number for number in range(3_000_000))
    return header(folder, b'{"__metadata__":{' + keys + b"}," + entry("a") + b"}")


def numbered_names(folder: Path) -> Words:
    names = [".".join(str((row * 7 + place) % 10) for place in range(1900)) + f".{row}" for row in range(100)]
    return header(folder, b"{" + b",".join(map(entry, names)) + b"}")


def shape_of_floats(folder: Path) -> Words:
    return header(folder, b'{"a":{"dtype":"U8","shape":[' + b"1e9," * 5_000_000 + b'1],"data_offsets":[0,1]}}')


def large_index(folder: Path) -> Words:
    text = b'{"weight_map":{' + b",".join(b'"%x":"a.safetensors"' % number for number in range(2_500_000)) + b"}}"
    (folder / "model.safetensors.index.json").write_bytes(text)
    return ["inspect", "."]


def large_config(folder: Path) -> Words:
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(b'{"x":[' + b"{}," * 3_000_000 + b"{}]}")
    return ["inspect", "."]


FACE, LONG = "\U0001f600".encode(), b"y" * 46_000_000
"""One wide character makes a string take four bytes for each of its others."""


def wide_metadata(folder: Path) -> Words:
    return header(folder, b"{" + entry("a") + b',"__metadata__":{"x":"' + FACE + LONG + b'"}}')


def wide_by_an_escape(folder: Path) -> Words:
    return header(folder, b"{" + entry("a") + rb',"__metadata__":{"x":"\uD83D\uDE00' + LONG + b'"}}')


def wide_name(folder: Path) -> Words:
    return header(folder, b'{"' + FACE + LONG + b'":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}')


def wide_index(folder: Path) -> Words:
    text = b'{"metadata":{"x":"' + FACE + LONG + b'"},"weight_map":{}}'
    (folder / "model.safetensors.index.json").write_bytes(text)
    return ["inspect", "."]


def wide_record(folder: Path) -> Words:
    text = b'{"format":"porting-provenance-2","x":"' + FACE + LONG + b'"}'
    (folder / "provenance.json").write_bytes(text)
    return ["verify-files", "."]


# ------------------------------------------------------------------------------------------------------------- pickles


def structure(folder: Path, raw: bytes) -> Words:
    contents = entries(saved({"a": torch.arange(12.0)}))
    contents[next(name for name in contents if name.endswith("data.pkl"))] = raw
    (folder / "pytorch_model.bin").write_bytes(zipped(contents))
    return ["inspect", "pytorch_model.bin"]


def memoised_atoms(folder: Path) -> Words:
    raw = b"".join(b"J\1\2\3\4r" + struct.pack("<I", number) for number in range(2_500_000))
    return structure(folder, b"\x80\x02" + raw + b".")


def marks(folder: Path) -> Words:
    return structure(folder, b"\x80\x02" + b"(" * 5_000_000 + b".")


def distributed_dictionaries(folder: Path) -> Words:
    (folder / ".metadata").write_bytes(b"\x80\x02(" + b"}" * 5_000_000 + b"t.")
    return ["inspect", "."]


def repeated_elements(folder: Path) -> Words:
    state = {str(number): torch.zeros(1).expand(1 << 25) for number in range(70)}
    (folder / "pytorch_model.bin").write_bytes(saved(state))
    return ["hash", "pytorch_model.bin"]


def names_on_one_storage(folder: Path) -> Words:
    whole = torch.zeros(1 << 18)
    (folder / "pytorch_model.bin").write_bytes(saved({str(number): whole[:] for number in range(2_000)}))
    return ["hash", "pytorch_model.bin"]


# -------------------------------------------------------------------------------------------------------------- tables

MINE = """
import torch
from torch import nn
def build(config):
    model = nn.Module()
    model.b = nn.Parameter(torch.zeros(4))
    return model
"""


def table(folder: Path, text: str) -> Words:
    write_checkpoint(folder / "m")
    (folder / "mine.py").write_text(MINE)
    (folder / "t.toml").write_text(text)
    return ["check", "m", "--table", "t.toml", "--into", "mine.py:build"]


def sixty(*indices: str) -> str:
    return ".".join(f"{{{index}:{','.join(f'{index}{place}' for place in range(60))}}}" for index in indices)


def product_of_names(folder: Path) -> Words:
    return table(folder, f'[tensors]\n"{sixty(*"abcd")}" = "{sixty(*"abcd")}"\n')


def product_of_pieces(folder: Path) -> Words:
    return table(folder, f'[tensors]\n"{sixty(*"abcd")} [o e]" = "all [(a b c d o) e]"\n')


def axis_taken_apart(folder: Path) -> Words:
    (folder / "m").mkdir()
    save_file({"all.weight": torch.zeros(10**6)}, folder / "m" / "model.safetensors")
    (folder / "m" / "config.json").write_text("{}")
    (folder / "t.toml").write_text('[tensors]\n"l.{i} [x]" = "all.weight [(i x)]"\n[sizes]\nx = "1"\n')
    return ["convert", "--reverse", "m", "out", "--table", "t.toml"]


def tables_of_many_entries(folder: Path) -> Words:
    for number in range(15):
        rules = "".join(f'"x{number}.{rule}" = "y{number}.{rule}"\n' for rule in range(3000))
        (folder / f"t{number}.toml").write_text(f'extends = "t{number + 1}"\n[tensors]\n{rules}')
    (folder / "t15.toml").write_text('[tensors]\n"a" = "b"\n')
    return ["tables", "t0.toml"]


def dotted_keys(folder: Path) -> Words:
    return table(folder, "\n".join(".".join([f"a{number}", *"b" * 60]) + " = 1" for number in range(25_000)))


def long_prefix(folder: Path) -> Words:
    write_checkpoint(folder / "m")
    rules = "\n".join(f'"a{number}" = "b{number}"' for number in range(9_000))
    (folder / "u.toml").write_text(f'[mapping]\nprefix = "a"\n[tensors]\n{rules}\n')
    (folder / "t.toml").write_text(f'extends = "u"\n[mapping]\nprefix = "{"p" * 300_000}"\n')
    return ["check", "m", "--table", "t.toml"]


# ---------------------------------------------------------------------------------------------------------------- text


def tokenizer(folder: Path, change: dict[str, object]) -> Words:
    write_checkpoint(folder / "m")
    path = folder / "m" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    return ["fill-mask", "a [MASK]", "--source", "m"]


def replacements(folder: Path) -> Words:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    return tokenizer(folder, {"normalizer": {"type": "Sequence", "normalizers": [one] * 9}})


def prepended(folder: Path) -> Words:
    one = {"type": "Prepend", "prepend": "a" * 1_000_000}
    return tokenizer(folder, {"normalizer": {"type": "Sequence", "normalizers": [one] * 40}})


def long_words(folder: Path) -> Words:
    words = tokenizer(folder, {})
    path = folder / "m" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= {"max_input_chars_per_word": 2**63, "vocab": {**content["model"]["vocab"], "a": 3}}
    content["model"]["continuing_subword_prefix"] = ""
    path.write_text(json.dumps(content))
    return [words[0], f"[MASK] {'a' * 60_000}", *words[2:]]


def large_vocabulary(folder: Path) -> Words:
    words = tokenizer(folder, {})
    path = folder / "m" / "tokenizer.json"
    more = ",".join(f'"x{number}":{number}' for number in range(2_500_000))
    path.write_text(path.read_text().replace('"vocab": {', '"vocab": {' + more + ",", 1))
    return words


def large_word_list(folder: Path) -> Words:
    write_checkpoint(folder / "m", tokenizer="vocab.txt")
    (folder / "m" / "vocab.txt").write_text("\n".join(f"x{number}" for number in range(2_500_000)))
    return ["fill-mask", "a [MASK]", "--source", "m"]


def wide_word_list(folder: Path) -> Words:
    words = large_word_list(folder)
    (folder / "m" / "vocab.txt").write_bytes(FACE + LONG)
    return words


def wide_tokenizer(folder: Path) -> Words:
    words = tokenizer(folder, {})
    path = folder / "m" / "tokenizer.json"
    path.write_bytes(path.read_bytes().rstrip()[:-1] + b',"x":"' + FACE + LONG + b'"}')
    return words


CASES: list[tuple[Callable[[Path], Words], str]] = [
    (zero_tensors, "objects"),
    (empty_entries, "objects"),
    (metadata_keys, "objects"),
    (numbered_names, "objects"),
    (shape_of_floats, "objects"),
    (large_index, "objects"),
    (large_config, "objects"),
    (memoised_atoms, "objects"),
    (marks, "objects"),
    (distributed_dictionaries, "objects"),
    (repeated_elements, "made"),
    (names_on_one_storage, "made"),
    (product_of_names, "members"),
    (product_of_pieces, "members"),
    (axis_taken_apart, "members"),
    (tables_of_many_entries, "objects"),
    (dotted_keys, "objects"),
    (long_prefix, "metadata"),
    (replacements, "seconds"),
    (prepended, "seconds"),
    (long_words, "seconds"),
    (large_vocabulary, "objects"),
    (large_word_list, "objects"),
    (wide_metadata, "metadata"),
    (wide_by_an_escape, "metadata"),
    (wide_name, "metadata"),
    (wide_index, "metadata"),
    (wide_record, "metadata"),
    (wide_word_list, "metadata"),
    (wide_tokenizer, "metadata"),
]


@pytest.mark.parametrize(("make", "unit"), CASES, ids=[make.__name__ for make, _ in CASES])
def test_what_costs_more_than_its_length_is_told_in_a_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Words], unit: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # In the place of 8: few where the time is what is tried, and many where a slow machine would meet it first.
    monkeypatch.setenv("PORTING_LIMITS", "seconds=1" if unit == "seconds" else "seconds=80")
    words = make(tmp_path)
    held = sorted(tmp_path.rglob("*"))
    result = run(*words)
    assert result.exit_code == 2, result.stderr
    told, advice = result.stderr.splitlines()
    assert told.startswith("error: ")
    assert f"PORTING_LIMITS={unit}=" in told
    assert told.endswith("[limit]")
    assert advice == "next: porting explain limit"
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts) == held


MEMORY = 500 << 10
"""Kilobytes beyond what the same command takes on an honest file."""


def measured(words: Words, cwd: Path) -> tuple[int, int, str]:
    """The exit code, the most memory in kB, and what is said; with at most 30 seconds of a processor."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    program = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_CPU, (30, 30));"
        "os.execv(sys.executable, [sys.executable, '-m', 'porting', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", program, *words]
    with subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as one:
        assert one.stderr is not None
        said = one.stderr.read().decode()
        _, status, usage = os.wait4(one.pid, 0)
        one.returncode = os.waitstatus_to_exitcode(status)
    return one.returncode, usage.ru_maxrss, said


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What looking at an honest file takes, in kB."""
    folder = tmp_path_factory.mktemp("honest")
    save_file({"a": torch.zeros(10_000_000)}, folder / "model.safetensors")
    code, memory, said = measured(["inspect", "model.safetensors"], folder)
    assert code == 0, said
    return memory


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [empty_entries, memoised_atoms, product_of_pieces, replacements])
def test_a_process_of_its_own_stays_within_the_bound(
    tmp_path: Path, honest: int, make: Callable[[Path], Words]
) -> None:
    code, memory, said = measured(make(tmp_path), tmp_path)
    assert code == 2, said
    assert "[limit]" in said
    assert memory < honest + MEMORY


# -------------------------------------------------------------------------------- what has no limit of its own to name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a" + ".a" * 20_000 + " = 1", "a name of more than 64 parts"),
        ("[a" + ".a" * 20_000 + "]\nx = 1", "a name of more than 64 parts"),
        ('x = {"a"' + ' . "a"' * 20_000 + " = 1}", "a name of more than 64 parts"),
        ("[sizes]\nx = " + "9" * 5000, "a number of thousands of digits"),
        ("[sizes]\nx = " + "9" * 4299, "a whole number of more than 300 digits"),
        ("[sizes]\nx = -" + "9" * 4299, "a whole number of more than 300 digits"),
        ("[require]\na = [1, {b = 0o" + "7" * 500 + "}]", "a whole number of more than 300 digits"),
        ("x = 2024-13-99", "not-toml"),
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("x = " + "{a=" * 50_000, "nested too deeply"),
    ],
)
def test_a_table_that_is_hard_to_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.toml").write_text(text)
    result = run("tables", "t.toml")
    assert result.exit_code == 2
    assert told in result.stderr


def test_a_chain_of_tables_ends(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(1200):
        Path(f"t{number}.toml").write_text(f'extends = "t{number + 1}"\n')
    result = run("tables", "t0.toml")
    assert result.exit_code == 2
    assert "more than 16 tables extend each other" in result.stderr


def test_many_fields_that_the_format_does_not_have(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of them the nearest name was looked for: a quarter of a minute for a megabyte."""
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []

    def nearest(name: str, known: object) -> str:
        asked.append(name)
        return "what is meant"

    monkeypatch.setattr("porting.checkpoint.safetensors_file.nearest", nearest)
    result = run(*header(tmp_path, b'{"a":{' + b",".join(b'"f%d":1' % number for number in range(100_000)) + b"}}"))
    assert result.exit_code == 2
    assert 0 < len(asked) <= 20


def test_a_name_of_combining_marks(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    marks = ("a" + "\u0301\u0323\u0317" * 1300)[:4000]
    result = run(*header(tmp_path, b"{" + b",".join(entry(f"{marks}{number}") for number in range(500)) + b"}"))
    assert result.exit_code == 2
    assert "more than 30 combining marks in a row" in result.stderr


@pytest.mark.parametrize("key", [b"\x8a\x0b" + ((2**61 - 1) * 9).to_bytes(11, "little"), b"G" + bytes(8)])
def test_a_number_whose_hash_is_chosen_is_no_key(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*structure(tmp_path, b"\x80\x02}" + key + b"Ns."))
    assert result.exit_code == 2
    assert "as the key of a dictionary" in result.stderr


SEQUENCES = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
NAMELESS = [*SEQUENCES, {"SpecialToken": {"id": "x", "type_id": 0}}]
TEMPLATE = {"type": "TemplateProcessing", "single": SEQUENCES[:1], "pair": SEQUENCES, "special_tokens": {}}


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"post_processor": {**TEMPLATE, "single": [SEQUENCES[0], NAMELESS[2]]}},
        {"post_processor": {**TEMPLATE, "single": SEQUENCES[1:]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}},
    ],
    ids=["map", "token", "second text", "merge"],
)
def test_a_tokenizer_that_makes_its_library_fail(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], part: object
) -> None:
    """It panics, which no handler of ordinary exceptions sees, and prints a stack trace past Python."""
    monkeypatch.chdir(tmp_path)
    words = tokenizer(tmp_path, part)  # type: ignore[arg-type]  # parts of a tokenizer
    result = run(*words)
    assert result.exit_code == 2
    assert "it made the tokenizers library fail" in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert "panicked" not in capfd.readouterr().err


def test_a_template_that_makes_millions_of_word_pieces(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A special token stands for a list of pieces, and may stand in the template several times."""
    monkeypatch.chdir(tmp_path)
    one = {"SpecialToken": {"id": "x", "type_id": 0}}
    special = {"x": {"id": "x", "ids": [1] * 60_000, "tokens": ["x"] * 60_000}}
    single = [*([one] * 30), {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    result = run(*tokenizer(tmp_path, {"post_processor": template}))
    assert result.exit_code == 2
    assert "it made more than 1000000 tokens of the text" in result.stderr


@pytest.mark.parametrize("token", ["$A:9", ":0 x", "[CLS]:x", "$", ""])
def test_a_special_token_in_the_syntax_of_templates(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "m", tokenizer="vocab.txt")
    with (tmp_path / "m" / "vocab.txt").open("a") as file:
        file.write(f"\n{token}\n")
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({"cls_token": token}))
    result = run("fill-mask", "a [MASK]", "--source", "m")
    assert result.exit_code in (0, 2)
    assert "Traceback" not in result.stderr


# ------------------------------------------------------------------------------------------------- the budget itself


@pytest.mark.slow
def test_a_limit_is_raised_as_the_line_says(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = names_on_one_storage(tmp_path)
    monkeypatch.setenv("PORTING_LIMITS", "made=9000000000,objects=5000000")
    assert run(*words).exit_code == 0
    monkeypatch.setenv("PORTING_LIMITS", "objects=x")
    result = run(*words)
    assert result.exit_code == 2
    assert "PORTING_LIMITS: 'objects=x' is not a limit" in result.stderr


def test_all_that_one_command_reads_is_charged_to_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTING_LIMITS", "objects=10")
    assert limits() == Limits(objects=10)
    with spending():
        charge("objects", 6, where="a")
        with spending(), pytest.raises(LimitError, match=r"^b: this takes more than 10 values in descriptions"):
            charge("objects", 6, where="b")
    charge("objects", 10, where="another command")
    with spending():
        charge("objects", 10, where="a")
        with separately():
            charge("objects", 10, where="one of many searches")
        with pytest.raises(LimitError):
            charge("objects", 1, where="a")


def test_what_was_refused_is_not_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes without the thing that was refused goes on."""
    monkeypatch.setenv("PORTING_LIMITS", "objects=10")
    with spending():
        with pytest.raises(LimitError):
            charge("objects", 11, where="a hint")
        charge("objects", 10, where="the rest")


@pytest.mark.parametrize(
    ("text", "cost"),
    [("abc", 3), ("ab\xe9", 8), ("a\u4e2d", 8), ("\U0001f600", 12), (r"\u4e2d", 12), (r"\ud83D\uDe00", 36)],
)
def test_a_text_is_charged_by_its_widest_character(text: str, cost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTING_LIMITS", f"metadata={cost}")
    charge_text(text.encode(), where="a")
    monkeypatch.setenv("PORTING_LIMITS", f"metadata={cost - 1}")
    with pytest.raises(LimitError, match="bytes of descriptions"):
        charge_text(text.encode(), where="a")


def test_combinations_are_charged_before_they_are_made() -> None:
    with pytest.raises(LimitError, match="names from patterns"):
        combinations([range(10**9), range(10**9)], where="a table")


def _npz(path: Path, array: np.ndarray, change: Callable[[bytearray, int, int], None] | None = None) -> None:
    """A file of arrays, changed at the beginning of its entry and of its place in the table of contents."""
    np.savez_compressed(path, input_ids=array)
    raw = bytearray(path.read_bytes())
    if change is not None:
        change(raw, 0, raw.index(b"PK\x01\x02"))
    path.write_bytes(raw)


def _flagged(raw: bytearray, entry: int, listed: int) -> None:
    raw[entry + 6] |= 1
    raw[listed + 8] |= 1


def _unknown_method(raw: bytearray, entry: int, listed: int) -> None:
    raw[entry + 8] = raw[listed + 10] = 99


def _damaged(raw: bytearray, entry: int, listed: int) -> None:
    start = entry + 30 + raw[entry + 26] + raw[entry + 28]
    raw[start : start + 8] = b"\xff" * 8


@pytest.mark.parametrize(
    ("array", "change", "told"),
    [
        (np.ones((2, 3), np.int64), _flagged, "is encrypted"),
        (np.ones((2, 3), np.int64), _unknown_method, "stores or deflates them"),
        (np.ones((2, 3), np.int64), _damaged, "cannot be inflated"),
        (np.zeros(1 << 26, np.int64), None, "bytes of tensors beyond those that are stored"),
    ],
    ids=["encrypted", "another method", "damaged", "a bomb"],
)
def test_arrays_that_cannot_be_read(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    array: np.ndarray,
    change: Callable[[bytearray, int, int], None] | None,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(Path("m"))
    _npz(Path("b.npz"), array, change)
    result = run("record", "m", "--inputs", "b.npz", "--out", "out")
    assert (result.exit_code, told in result.stderr) == (2, True), result.stderr
    assert not Path("out").exists()


def test_the_time_of_matching_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and patterns multiply, where one spelling of an index begins another."""
    monkeypatch.setenv("PORTING_LIMITS", "seconds=1")
    spellings = ",".join("x" * length for length in range(1, 40))
    patterns = [Name.parse(f"{{p:{spellings}}}x{{q:x,xx}}y{number}") for number in range(3000)]
    names = ["x" * (4000 - length) for length in range(1500)]
    with spending(), pytest.raises(LimitError, match="seconds of reading descriptions"):
        [pattern.read(name) for name in names for pattern in patterns]

"""The vocabulary of a GGUF file: what is written, what is refused in one line, and what the files may cost."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import save_file

from porting.converting.conversion import Converted, convert
from porting.export_files import LARGEST
from porting.limits import LimitError
from porting.notation.table import parse_table

TABLE = """\
[mapping]
name = "t"

[config]
vocab_size = "llama.vocab_size"

[constants]
"general.architecture" = "llama"

[tensors]
"{*n}" = "{*n}"
"""

LETTERS = {letter: number for number, letter in enumerate("abcdef")}


def added(number: object, content: object, **more: object) -> dict[str, object]:
    return {"id": number, "content": content, "special": True, **more}


ADDED = [added(6, "<s>"), added(7, "</s>")]


def fast(vocab: object = LETTERS, merges: object = (), tokens: object = ADDED, **more: object) -> dict[str, object]:
    """A ``tokenizer.json`` of byte-level BPE with eight tokens."""
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    return {"added_tokens": tokens, "decoder": {"type": "ByteLevel"}, "model": model, **more}


def written(folder: Path, files: Mapping[str, object], *, rows: int | None = 8, **config: object) -> Converted:
    """Convert a checkpoint with these files beside it."""
    source = folder / "source"
    source.mkdir()
    save_file({"token_embd.weight" if rows else "w": torch.rand(rows or 8, 4)}, source / "model.safetensors")
    for name, content in {"config.json": {"vocab_size": 8, **config}, **files}.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (source / name).write_bytes(raw)
    return convert(source, folder / "out", parse_table(TABLE), derive=True, to="gguf")


def settings(folder: Path) -> dict[str, object]:
    fields = GGUFReader(folder / "out/model.gguf").fields
    return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}


def reason(done: Converted) -> str:
    """Why a file has no vocabulary; empty if it has one."""
    start = "model.gguf has no vocabulary, without which llama.cpp does not load it: "
    return next((one.removeprefix(start) for one in done.warnings if one.startswith(start)), "")


def test_a_vocabulary_and_its_merges_are_written(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "d": 5}
    done = written(tmp_path, {"tokenizer.json": fast(vocab, [["a", "b"], ["ab", "c"]]), "vocab.json": vocab})
    assert not reason(done)
    assert settings(tmp_path) == {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [*vocab, "<s>", "</s>"],
        "tokenizer.ggml.token_type": [1] * 6 + [3] * 2, "tokenizer.ggml.merges": ["a b", "ab c"],
    }  # fmt: skip


def test_the_older_files_alone_are_read(tmp_path: Path) -> None:
    vocab = {"a": 0, "b": 1, "ab": 2}
    files = {"vocab.json": vocab, "merges.txt": b"#version: 0.2\na b\n", "added_tokens.json": {"<s>": 3}}
    assert not reason(written(tmp_path, files, rows=5, vocab_size=5))
    found = settings(tmp_path)
    assert found["tokenizer.ggml.tokens"] == ["a", "b", "ab", "<s>", "[PAD4]"]
    assert found["tokenizer.ggml.merges"] == ["a b"]


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("an unknown token", {"tokenizer.json": fast(merges=["x y"])}, "the merge 'x y' does not join two tokens to a"),
    ("an unknown result", {"tokenizer.json": fast(merges=["a b"])}, "the merge 'a b' does not join two tokens to a"),
    ("a merge of one", {"tokenizer.json": fast(merges=["a"])}, "the merge 'a' does not join"),
    ("a merge of three", {"tokenizer.json": fast(merges=["a b c"])}, "the merge 'a b c' does not join"),
    ("a list of three", {"tokenizer.json": fast({**LETTERS, "ab": 6}, [["a", "b"], ["a", "b", "c"]], [])},
     "the merge 'a b c' does not join"),
    ("two forms of merges", {"tokenizer.json": fast({**LETTERS, "ab": 6}, [["a", "b"], "a b"], [])}, "the merge 'a"),
    ("a merge that is a number", {"tokenizer.json": fast({**LETTERS, "ab": 6}, ["a b", 7], [])},
     "the merge '7' does not join"),
    ("numbers that are fractions", {"tokenizer.json": fast({**LETTERS, "a": 0.0})}, "the token 'a' has the number '0."),
    ("numbers that are booleans", {"tokenizer.json": fast({**LETTERS, "b": True})}, "the token 'b' has the number 'Tr"),
    ("an added token with a fraction", {"tokenizer.json": fast(tokens=[added(6.0, "<s>")])}, "'<s>' has the number '6"),
    ("an added token that is not text", {"tokenizer.json": fast(tokens=[added(6, 7)])}, "added tokens are not texts"),
    ("an added token with two numbers", {"tokenizer.json": fast(tokens=[added(6, "x"), added(7, "x")])},
     "its added tokens are not texts, each with one number"),
    ("a token with two numbers", {"tokenizer.json": fast(tokens=[added(6, "<s>"), added(7, "a")])},
     "tokenizer.json: the token 'a' has the number '7'"),
    ("more tokens than rows", {"tokenizer.json": fast({chr(97 + one): one for one in range(20)}, tokens=[])},
     "tokenizer.json has 20 tokens, and the embedding has 8 rows"),
    ("two vocabularies", {"tokenizer.json": fast(), "vocab.json": {"z": 0}},
     "tokenizer.json and vocab.json have different tokens: remove the one that is wrong"),
    ("a key twice", {"tokenizer.json": json.dumps(fast()).replace('"a": 0', '"a": 0, "a": 0').encode()},
     "tokenizer.json: the key 'a' stands twice in one object"),
    ("a key twice beside it", {"tokenizer.json": fast(), "tokenizer_config.json": b'{"bos_token":"a","bos_token":"b"}'},
     "tokenizer_config.json: the key 'bos_token' stands twice in one object"),
    ("half a character", {"tokenizer.json": fast({**{k: v for k, v in LETTERS.items() if v}, "\ud800": 0})},
     "the setting 'tokenizer.ggml.tokens' is"),
    ("half a character in the template",
     {"tokenizer.json": fast(), "tokenizer_config.json": {"chat_template": "\ud800"}},
     "the setting 'tokenizer.chat_template' is"),
    ("a template that is a number",
     {"tokenizer.json": fast(), "tokenizer_config.json": {"chat_template": [{"name": "default", "template": 7}]}},
     "the setting 'tokenizer.chat_template' is '7': llama.cpp reads a text there"),
    ("a special token that is true", {"tokenizer.json": fast(), "config.json": {"vocab_size": 8, "bos_token_id": True}},
     "the setting 'tokenizer.ggml.bos_token_id' is 'True': llama.cpp reads a whole number of 32 bits there"),
    ("no pieces", {"tokenizer.model": b"\xff" * 30}, "the package gguf does not read the tokenizer: "),
]  # fmt: skip


@pytest.mark.parametrize(("files", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_vocabulary_that_no_tokenizer_loads_is_a_warning(
    tmp_path: Path, files: dict[str, object], message: str
) -> None:
    done = written(tmp_path, files)
    assert message in reason(done)
    assert not settings(tmp_path)
    assert all(one.isprintable() for one in done.warnings)


def test_templates_of_chats_are_listed_in_order(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(9)]
    listed = [{"name": name, "template": "x"} for name in names]
    written(tmp_path, {"tokenizer.json": fast(), "tokenizer_config.json": {"chat_template": listed}})
    assert settings(tmp_path)["tokenizer.chat_templates"] == names


def test_what_the_gguf_package_logs_is_a_warning_and_is_escaped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    single = [{"SpecialToken": {"id": "\x1b[2Jevil"}}, {"Sequence": {"id": "A"}}]
    pair = [{"Sequence": {"id": "\x1b[31mX"}}, {"Sequence": {"id": "\u202eY"}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair}
    processors = {"type": "Sequence", "processors": [template] * 10}
    config = {"bos_token": "<s>"}
    done = written(tmp_path, {"tokenizer.json": fast(post_processor=processors), "tokenizer_config.json": config})
    said = [one for one in done.warnings if "the package gguf says of the tokenizer" in one]
    assert [one for one in said if "evil" in one]
    assert len(said) == 6
    assert "more messages" in said[-1]
    assert all(one.isprintable() for one in done.warnings)
    printed = capfd.readouterr()
    assert not printed.err + printed.out


@pytest.mark.parametrize("kind", ["FIFO", "directory", "large"])
def test_a_file_of_the_tokenizer_that_is_not_read_is_named(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"token_embd.weight": torch.rand(8, 4)}, source / "model.safetensors")
    (source / "config.json").write_text('{"vocab_size": 8}')
    if kind == "FIFO":
        os.mkfifo(source / "tokenizer.json")
    elif kind == "directory":
        (source / "tokenizer.json").mkdir()
    else:
        (source / "tokenizer.json").write_bytes(b"")
        os.truncate(source / "tokenizer.json", LARGEST + 1)
    done = convert(source, tmp_path / "out", parse_table(TABLE), derive=True, to="gguf")
    expected = {
        "FIFO": "is a named pipe (FIFO)",
        "directory": "is a directory",
        "large": f"has more than {LARGEST} bytes",
    }
    assert reason(done) == f"tokenizer.json {expected[kind]}"


def test_tokens_are_filled_up_to_the_rows_of_the_embedding_whatever_the_config_says(tmp_path: Path) -> None:
    done = written(tmp_path, {"tokenizer.json": fast()}, rows=10, vocab_size=10**9)
    tokens = settings(tmp_path)["tokenizer.ggml.tokens"]
    assert tokens == [*LETTERS, "<s>", "</s>", "[PAD8]", "[PAD9]"]
    message = "model.gguf has 1000000000 for its vocab_size, and token_embd.weight has 10 rows"
    assert message in done.warnings


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.json": json.dumps(fast(x="@@")).replace('"@@"', f"[{'{},' * 2_000_000}0]").encode()},
        {"tokenizer.json": fast({str(number): number for number in range(2_000_100)}, tokens=[])},
        {"vocab.json": LETTERS, "merges.txt": b"\n" * 4_000_000},
        {"tokenizer.model": b"\n\0" * 4_000_000},
    ],
    ids=["objects", "tokens", "lines", "pieces"],
)
def test_what_the_files_of_a_tokenizer_hold_is_charged(tmp_path: Path, files: dict[str, object]) -> None:
    with pytest.raises(LimitError, match=rf"source/{[*files][-1]}: this takes more than 4000000 values"):
        written(tmp_path, files)
    assert not (tmp_path / "out").exists()


def test_tokens_of_an_embedding_that_is_not_known_are_charged(tmp_path: Path) -> None:
    with pytest.raises(LimitError, match=r"source/tokenizer\.json: this takes more than 4000000 values"):
        written(tmp_path, {"tokenizer.json": fast()}, rows=None, vocab_size=10**9)


@pytest.mark.slow
def test_the_time_of_reading_a_vocabulary_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTING_LIMITS", "seconds=1")
    merges = [["a", "b"]] * 900_000
    files = {"tokenizer.json": fast({**LETTERS, "ab": 6}, merges, [added(7, "<s>")]), "tokenizer_config.json": {}}
    with pytest.raises(LimitError, match=r"source/tokenizer\.json: this takes more than 1 seconds"):
        written(tmp_path, {**files, "added_tokens.json": {}, "special_tokens_map.json": {}})

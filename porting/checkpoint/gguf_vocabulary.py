"""The vocabulary of a GGUF file, from the tokenizer's files that lie beside a checkpoint.

llama.cpp has no file of its own for the tokenizer: tokens, merges and special tokens are settings of the model's file.
The package gguf reads the files (``pip install porting[gguf]``): byte-level BPE from ``tokenizer.json`` or
``vocab.json``, and sentencepiece's ``tokenizer.model``, for which it needs the package sentencepiece.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from porting.checkpoint.errors import quote

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
"""What the package gguf looks for."""

TOKENS, TYPES, SCORES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"

CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Types of tokens (``gguf.TokenType``)."""

REFUSED = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
"""What the package raises for files that it cannot read."""


def vocabulary(files: Mapping[str, bytes], size: int) -> tuple[dict[str, object], str]:
    """The settings of a vocabulary.

    Args:
        files: the contents of those of :data:`FILES` that there are.
        size: the rows of the embedding; tokens that the tokenizer lacks are filled up with unused ones.

    Returns:
        The settings by their names, and why there are none; one of both is empty.
    """
    if not {"tokenizer.json", "vocab.json", "tokenizer.model"} & {*files}:
        return {}, "there is no tokenizer.json, vocab.json or tokenizer.model"
    try:
        import gguf  # noqa: PLC0415  # an extra
    except ImportError:
        return {}, "the package gguf is not installed (pip install 'porting[gguf]')"
    with tempfile.TemporaryDirectory(prefix="porting-") as name:
        folder = Path(name)
        for file, raw in files.items():
            (folder / file).write_bytes(raw)
        try:
            if "tokenizer.model" in files:
                found: Any = gguf.vocab.SentencePieceVocab(folder)
            else:
                found = gguf.vocab.BpeVocab(folder)
            tokens = [(_text(text), float(score), int(kind)) for text, score, kind in found.all_tokens()]
            writer = gguf.GGUFWriter(None, "")
            merges = found.tokenizer_model == "gpt2"
            gguf.SpecialVocab(folder, load_merges=merges, n_vocab=len(tokens)).add_to_gguf(writer, quiet=True)
        except REFUSED as error:
            return {}, f"the package gguf does not read the tokenizer: {quote(' '.join(str(error).split())[:200])}"
    special = _special(files)
    tokens += [(f"[PAD{number}]", -1000.0, UNUSED) for number in range(len(tokens), size)]
    settings: dict[str, object] = {"tokenizer.ggml.model": found.tokenizer_model}
    settings[TOKENS] = [text for text, _, _ in tokens]
    settings[TYPES] = [special.get(text, kind) for text, _, kind in tokens]
    settings |= {} if merges else {SCORES: [score for _, score, _ in tokens]}
    given = {key: value.value for key, value in writer.kv_data[0].items()}
    return settings | {key: value for key, value in given.items() if key.startswith("tokenizer.")}, ""


def _text(token: str | bytes) -> str:
    return token if isinstance(token, str) else token.decode("utf-8", "replace")


def _special(files: Mapping[str, bytes]) -> dict[str, int]:
    """The types of added tokens, which may also be tokens of the vocabulary itself."""
    try:
        added = json.loads(files.get("tokenizer.json", b"{}")).get("added_tokens", [])
        return {one["content"]: CONTROL if one.get("special") else USER_DEFINED for one in added}
    except REFUSED:
        return {}

"""The checkpoint that ships with the library: small, trained, and the default of every command."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def embedded_checkpoint() -> Path:
    """The directory of the bundled checkpoint, in HuggingFace's layout, with its tokenizer.

    >>> sorted(path.name for path in embedded_checkpoint().glob("*.safetensors"))
    ['model.safetensors']
    """
    return Path(str(files("porting") / "demo"))

"""One conversion: whose code it is, a small random checkpoint, and what that code makes of it."""

from __future__ import annotations
import __future__

import ast
import logging
import math
import os
import re
import typing
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]

SCRIPTS = "transformers-4.44.2"
"""Below the folder of sources: a release of transformers that has its conversion scripts, which newer ones have not."""


@dataclass(frozen=True)
class Pinned:
    """Files of a repository, at one commit, that no package has.

    Attributes:
        repository: its owner and name.
        commit: the commit.
        files: where each file goes, below the folder of its name in :data:`PINNED`, by its path in the repository.
        version: what the page says.
    """

    repository: str
    commit: str
    files: Mapping[str, str]
    version: str


MAXTEXT = "src/maxtext/checkpoint_conversion"

PINNED: Mapping[str, Pinned] = {
    "nanogpt": Pinned(
        "karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", {"model.py": "model.py"}, "3adf61e"
    ),
    "gpt_fast": Pinned(
        "pytorch-labs/gpt-fast",
        "32971d3129541c5bfb4f715abc33d1c5f408d204",
        {path: path for path in ("scripts/convert_hf_checkpoint.py", "mixtral-moe/scripts/convert_hf_checkpoint.py")},
        "32971d3",
    ),
    "maxtext": Pinned(
        "AI-Hypercomputer/maxtext",
        "e591f30cbbf217ed67ef71263ec0538239f9c3b8",
        {
            f"{MAXTEXT}/utils/param_mapping.py": "param_mapping.py",
            f"{MAXTEXT}/utils/utils.py": "utils.py",
            f"{MAXTEXT}/to_maxtext.py": "to_maxtext.py",
        },
        "e591f30",
    ),
    "llama_cpp": Pinned(  # a repository that carries the script: llama.cpp's own is gigabytes large
        "1694439208/GOT-OCR-Inference",
        "6579ad35381beee2854c225aef9531c8d618f962",
        {"convert_hf_to_gguf.py": "convert_hf_to_gguf.py"},
        "of October 2024",
    ),
}
"""Code that is on GitHub alone, by the folder that it is put into."""


@dataclass(frozen=True)
class Sources:
    """Where the projects' code is.

    Attributes:
        folder: the packages as ``pip install --target`` puts them there, and the unpacked :data:`SCRIPTS`.
    """

    folder: Path

    def script(self, *paths: str, **given: Any) -> Script:
        """Files of packages, ``litgpt/scripts/convert_hf_checkpoint.py``, whose functions may call each other.

        Args:
            paths: the files.
            given: what stands for names that the files import.
        """
        return Script([self.folder / path for path in paths], given)

    def transformers(self, path: str) -> Script:
        """A conversion script of transformers, ``vit/convert_dino_to_pytorch.py``."""
        return self.script(f"{SCRIPTS}/transformers/models/{path}")


class Script:
    """The functions, classes and tables of some files; what these import, and do beside, is left out.

    So a script's functions run as they are, without the libraries that it imports for something else.

    Args:
        files: the files.
        given: what stands for names that the files import.
    """

    def __init__(self, files: Sequence[Path], given: Mapping[str, Any] | None = None) -> None:
        self.names: dict[str, Any] = {"torch": torch, "re": re, "OrderedDict": OrderedDict, "defaultdict": defaultdict}
        self.names |= {name: getattr(typing, name) for name in typing.__all__}
        self.names |= {"print": lambda *_: None, "math": math, "np": np, "__name__": "conversion"}
        self.names |= {"logger": logging.getLogger("conversion"), "os": os, **(given or {})}
        self._nodes: dict[str, ast.stmt] = {}
        for file in files:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                target = node.targets[0] if isinstance(node, ast.Assign) else node
                name = getattr(target, "name", getattr(target, "id", ""))
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    node.decorator_list = []
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign) and name and self._runs(node, file):
                    self._nodes[name] = node
                    methods = node.body if isinstance(node, ast.ClassDef) else []
                    self._nodes |= {f"{name}.{one.name}": one for one in methods if isinstance(one, ast.FunctionDef)}

    def _runs(self, node: ast.stmt, file: Path) -> bool:
        code = compile(ast.Module([node], []), file, "exec", flags=__future__.annotations.compiler_flag)
        try:
            exec(code, self.names)  # noqa: S102  # the project's own code is what a table is compared with
        except (NameError, AttributeError, TypeError):  # of a library that it imports
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        """A function, a class or a table of the files."""
        return self.names[name]

    def lines(self, *names: str) -> int:
        """How many lines the functions, methods (``Class.method``) and tables of these names have together."""
        nodes = [self._nodes[name] for name in names]
        return sum((node.end_lineno or 0) - node.lineno + 1 for node in nodes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a project's code does to a small random checkpoint.

    Attributes:
        project: the package, as it is called on PyPI.
        title: what is converted into what.
        table: the name of our table in ``tables/``.
        lines: lines of the project's code that it takes the place of.
        config: the fields of ``config.json`` that the table reads.
        source: the checkpoint.
        made: what the project's code makes of it.
        returned: what the project's own way back makes of ``made``; None where it has none.
        remark: what the reader should know.
        version: of the project, where it is not one of those that are installed beside.
    """

    project: str
    title: str
    table: str
    lines: int
    source: Tensors
    made: Tensors
    config: Mapping[str, object] = field(default_factory=dict)
    returned: Tensors | None = None
    remark: str = ""
    version: str = ""


def drawn(shapes: Mapping[str, Sequence[int]], **counts: int) -> Tensors:
    """Random tensors of these names and shapes; ``{i}`` stands for each number below ``counts``'s ``i``.

    >>> sorted(drawn({"h.{i}.w": (2, 3), "h.{i}.b": (2,)}, i=2))
    ['h.0.b', 'h.0.w', 'h.1.b', 'h.1.w']
    """
    found: Tensors = {}
    for pattern, shape in shapes.items():
        used = [name for name in counts if f"{{{name}}}" in pattern]
        for values in product(*(range(counts[name]) for name in used)):
            found[pattern.format(**dict(zip(used, values, strict=True)))] = torch.randn(tuple(shape))
    return found


def both(*patterns: str, shape: Sequence[int]) -> dict[str, Sequence[int]]:
    """A weight of a shape, and a bias of its first extent, for each name."""
    return {
        f"{one}.{kind}": shape if kind == "weight" else shape[:1] for one in patterns for kind in ("weight", "bias")
    }


DECODER = {"hidden_size": 16, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 2}
"""The sizes of :func:`decoder`, in the words of transformers: no two of its matrices' extents are equal."""

NORMS = ("input_layernorm", "post_attention_layernorm")


def decoder(*, norms: Sequence[str] = NORMS, experts: str = "", head: bool = True) -> dict[str, Sequence[int]]:
    """The shapes of a decoder of transformers of the sizes of :data:`DECODER`: ``{i}`` is the layer, ``{x}`` an expert.

    Args:
        norms: the norms of a layer, each with a weight.
        experts: what holds the experts, ``"mlp"``, with a ``gate`` beside them; empty for an MLP.
        head: with an ``lm_head``.
    """
    layer, hidden, inner = "model.layers.{i}", 16, 12
    rows = {"q": 24, "k": 8, "v": 8}
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (11, hidden), "model.norm.weight": (hidden,)}
    shapes |= {"lm_head.weight": (11, hidden)} if head else {}
    shapes |= {f"{layer}.self_attn.{part}_proj.weight": (count, hidden) for part, count in rows.items()}
    shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, rows["q"])
    shapes |= {f"{layer}.{norm}.weight": (4 if norm.endswith(("q_norm", "k_norm")) else hidden,) for norm in norms}
    parts = ("w1", "w3", "w2") if experts == "block_sparse_moe" else ("gate_proj", "up_proj", "down_proj")
    place = f"{layer}.{experts}.experts.{{x}}" if experts else f"{layer}.mlp"
    shapes |= {f"{place}.{part}.weight": (inner, hidden) for part in parts[:2]}
    shapes |= {f"{layer}.{experts}.gate.weight": (3, hidden)} if experts else {}
    return shapes | {f"{place}.{parts[2]}.weight": (hidden, inner)}


def convnext_downsampling(width: int) -> dict[str, Sequence[int]]:
    """The stem and the layers between the stages of a ConvNeXt of equally wide stages, in Meta's names."""
    shapes = both("downsample_layers.0.0", shape=(width, 3, 4, 4)) | both("downsample_layers.0.1", shape=(width,))
    for stage in (1, 2, 3):
        shapes |= both(f"downsample_layers.{stage}.0", shape=(width,))
        shapes |= both(f"downsample_layers.{stage}.1", shape=(width, width, 2, 2))
    return shapes | both("norm", shape=(width,))


Maker = Callable[[Sources], Case]

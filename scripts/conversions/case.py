"""One conversion: whose code it is, a small random checkpoint, and what that code makes of it."""

from __future__ import annotations
import __future__

import ast
import math
import re
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
class Sources:
    """Where the projects' code is.

    Attributes:
        folder: the packages as ``pip install --target`` puts them there, and the unpacked :data:`SCRIPTS`.
    """

    folder: Path

    def script(self, *paths: str) -> Script:
        """Files of packages, ``litgpt/scripts/convert_hf_checkpoint.py``, whose functions may call each other."""
        return Script([self.folder / path for path in paths])

    def transformers(self, path: str) -> Script:
        """A conversion script of transformers, ``vit/convert_dino_to_pytorch.py``."""
        return self.script(f"{SCRIPTS}/transformers/models/{path}")


class Script:
    """The functions and tables of some files; what these import, and do beside, is left out.

    So a script's functions run as they are, without the libraries that it imports for something else.

    Args:
        files: the files.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.names: dict[str, Any] = {"torch": torch, "re": re, "OrderedDict": OrderedDict, "defaultdict": defaultdict}
        self.names |= {"print": lambda *_: None, "math": math, "np": np, "__name__": "conversion"}
        self._nodes: dict[str, ast.stmt] = {}
        for file in files:
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                target = node.targets[0] if isinstance(node, ast.Assign) else node
                name = getattr(target, "name", getattr(target, "id", ""))
                if isinstance(node, ast.FunctionDef):
                    node.decorator_list = []
                if isinstance(node, ast.FunctionDef | ast.Assign) and name and self._runs(node, file):
                    self._nodes[name] = node

    def _runs(self, node: ast.stmt, file: Path) -> bool:
        code = compile(ast.Module([node], []), file, "exec", flags=__future__.annotations.compiler_flag)
        try:
            exec(code, self.names)  # noqa: S102  # the project's own code is what a table is compared with
        except (NameError, AttributeError, TypeError):  # of a library that it imports
            return False
        return True

    def __getattr__(self, name: str) -> Any:
        """A function or a table of the files."""
        return self.names[name]

    def lines(self, *names: str) -> int:
        """How many lines the functions and tables of these names have together."""
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


def convnext_downsampling(width: int) -> dict[str, Sequence[int]]:
    """The stem and the layers between the stages of a ConvNeXt of equally wide stages, in Meta's names."""
    shapes = both("downsample_layers.0.0", shape=(width, 3, 4, 4)) | both("downsample_layers.0.1", shape=(width,))
    for stage in (1, 2, 3):
        shapes |= both(f"downsample_layers.{stage}.0", shape=(width,))
        shapes |= both(f"downsample_layers.{stage}.1", shape=(width, width, 2, 2))
    return shapes | both("norm", shape=(width,))


Maker = Callable[[Sources], Case]

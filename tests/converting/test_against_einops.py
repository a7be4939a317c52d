"""Random tables against einops, which has never heard of them, on whole tensors: every byte, in any memory."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import einops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from porting import staging
from porting.converting import making
from porting.converting.conversion import convert
from porting.notation.table import parse_table
from tests.converting.drawing import bits, values, write

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int8, torch.uint8, torch.bool)


@dataclass
class Case:
    """A table with the checkpoint on its left side, and what einops makes of that."""

    dtype: torch.dtype | None
    rules: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    sources: dict[str, Tensor] = field(default_factory=dict)
    targets: dict[str, Tensor] = field(default_factory=dict)

    def give(self, name: str, sizes: tuple[int, ...], draw: st.DrawFn, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of random bits for the checkpoint."""
        chosen = dtype or draw(st.sampled_from(DTYPES))
        self.sources[name] = values(sizes, chosen, draw(st.integers(0, 10**6)))
        return self.sources[name]

    @property
    def table(self) -> str:
        known = "".join(f"{name} = {size}\n" for name, size in self.sizes.items())
        rules = "\n".join(self.rules)
        return f'[mapping]\nname = "drawn"\n[tensors]\n{rules}\n' + "".join(self.blocks) + f"[sizes]\n{known}"


def spelled(draw: st.DrawFn, axes: list[str]) -> str:
    """Axes in parentheses here and there, as einops and a table both write them."""
    groups = []
    while axes:
        count = draw(st.integers(1, len(axes)))
        groups.append(axes[0] if count == 1 else f"({' '.join(axes[:count])})")
        axes = axes[count:]
    return " ".join(groups)


def shape(pattern: str, sizes: dict[str, int]) -> tuple[int, ...]:
    groups = pattern.replace("(", " ( ").replace(")", " ) ").split()
    found, product, inside = [], 1, False
    for group in groups:
        if group == "(":
            inside, product = True, 1
        elif group == ")":
            inside = False
            found.append(product)
        elif inside:
            product *= sizes[group]
        else:
            found.append(sizes[group])
    return tuple(found)


def turn(draw: st.DrawFn, case: Case, number: int) -> None:
    sizes, left, right = drawn(draw, case, number)
    first, other = spelled(draw, left), spelled(draw, right)
    found = case.give(f"x{number}", shape(first, sizes), draw)
    case.targets[f"y{number}"] = einops.rearrange(found, f"{first} -> {other}", **sizes)
    case.rules.append(f'"x{number} [{first}]" = "y{number} [{other}]"')


def split(draw: st.DrawFn, case: Case, number: int) -> None:
    sizes, left, right = drawn(draw, case, number, parts=True)
    p = f"p{number}"
    left.insert(draw(st.integers(0, len(left))), p)
    first, other = spelled(draw, left), spelled(draw, right)
    found = einops.rearrange(case.give(f"x{number}", shape(first, sizes), draw), f"{first} -> {p} {other}", **sizes)
    case.targets |= {f"y{number}.{k}": part for k, part in enumerate(found)}
    case.rules.append(f'"x{number} [{first}]" = "y{number}.{{{p}}} [{other}]"')


def join(draw: st.DrawFn, case: Case, number: int) -> None:
    """Joined, stacked and interleaved: the parts' index stands anywhere."""
    sizes, left, right = drawn(draw, case, number, parts=True)
    p = f"p{number}"
    right.insert(draw(st.integers(0, len(right))), p)
    first, other = spelled(draw, left), spelled(draw, right)
    dtype = draw(st.sampled_from(DTYPES))
    found = [case.give(f"x{number}.{k}", shape(first, sizes), draw, dtype) for k in range(sizes[p])]
    case.targets[f"y{number}"] = einops.rearrange(found, f"{p} {first} -> {other}", **sizes)
    case.rules.append(f'"x{number}.{{{p}}} [{first}]" = "y{number} [{other}]"')


def pack(draw: st.DrawFn, case: Case, number: int) -> None:
    """One after the other, of different sizes."""
    rows, rest, dtype = few(draw), draw(st.integers(1, 700)), draw(st.sampled_from(DTYPES))
    found = [case.give(f"x{number}.{k}", (count, rest), draw, dtype) for k, count in zip("uv", rows, strict=True)]
    case.targets[f"y{number}"], _ = einops.pack(found, "* e")
    case.sizes |= {f"u{number}": rows[0], f"v{number}": rows[1]}
    source = f'"x{number}.u [u{number} e{number}]", "x{number}.v [v{number} e{number}]"'
    case.blocks.append(f'[[rule]]\nsource = [{source}]\ntarget = "y{number} [(u{number}|v{number}) e{number}]"\n')


def cut(draw: st.DrawFn, case: Case, number: int) -> None:
    """Rows in front are dropped."""
    front, kept = few(draw)
    found = case.give(f"x{number}", (front + kept, draw(st.integers(1, 700))), draw)
    _, case.targets[f"y{number}"] = einops.unpack(found, [[front], [kept]], "* e")
    case.rules.append(f'"x{number} [(_{front}|t{number}) e{number}]" = "y{number} [t{number} e{number}]"')


def fold(draw: st.DrawFn, case: Case, number: int) -> None:
    """A row is added to each: in float64, of terms in the output's dtype."""
    (a, b), rest, dtype = few(draw), draw(st.integers(1, 700)), draw(st.sampled_from(FLOATS))
    row, generator = draw(st.integers(0, b - 1)), torch.Generator().manual_seed(number)
    found = [torch.randn(rows, rest, generator=generator).to(dtype) for rows in (a, b)]
    case.sources |= {f"x{number}.{k}": tensor for k, tensor in zip("uv", found, strict=True)}
    into = case.dtype or dtype
    base, other = (tensor.to(into).double() for tensor in found)
    case.targets[f"y{number}"] = (base + einops.repeat(other[row], "e -> t e", t=a)).to(into)
    source = f'"x{number}.u [t{number} e{number}]", "x{number}.v [r{number}={row} e{number}]"'
    case.blocks.append(f'[[rule]]\nsource = [{source}]\ntarget = "y{number} [t{number} e{number}]"\nfold = true\n')


def drawn(
    draw: st.DrawFn, case: Case, number: int, *, parts: bool = False
) -> tuple[dict[str, int], list[str], list[str]]:
    """Sizes of some axes, and two orders of them."""
    names = [f"{letter}{number}" for letter in "abc"[: draw(st.integers(1, 3))]]
    sizes = {name: draw(st.integers(1, 9)) for name in names}
    if parts:
        sizes[f"p{number}"] = draw(st.integers(2, 4))
    case.sizes |= sizes
    return sizes, list(draw(st.permutations(names))), list(draw(st.permutations(names)))


def few(draw: st.DrawFn) -> tuple[int, int]:
    return draw(st.integers(1, 5)), draw(st.integers(1, 5))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    case = Case(dtype=draw(st.sampled_from([None, None, torch.float32, torch.bfloat16, torch.float16])))
    for number in range(draw(st.integers(1, 3))):
        draw(st.sampled_from([turn, split, join, pack, cut, fold]))(draw, case, number)
    return case


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in a dtype, every NaN that a cast made in one spelling."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor.contiguous()
    out = tensor.contiguous().to(dtype)
    return torch.where(out.isnan(), torch.tensor(math.nan, dtype=dtype).abs(), out)


@pytest.mark.parametrize("block", [None, 64, 1024])
@settings(max_examples=40, deadline=None)
@given(
    case=cases(),
    threads=st.integers(1, 3),
    memory=st.sampled_from([1, 3, 40]),
    shard_size=st.sampled_from([None, 100, 5000]),
)
def test_every_byte_is_that_of_einops(
    block: int | None, case: Case, threads: int, memory: int, shard_size: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        if block is not None:  # tensors of a test are small: so is what is read and written at a time
            for module, constant in ((making, "BLOCK"), (making, "STAGED"), (staging, "CAST")):
                patch.setattr(module, constant, block)
            patch.setattr(making, "WRITTEN", 64)
            patch.setattr(making, "LONG", 0)
            patch.setattr(staging, "LONG", 16)
        root = Path(name)
        source = write(root / "a", {name: tensor.contiguous() for name, tensor in case.sources.items()})
        table = parse_table(case.table)
        budget = memory * threads << 20
        convert(source, root / "b", table, dtype=case.dtype, threads=threads, memory=budget, shard_size=shard_size)
        found = {
            name: tensor for file in (root / "b").glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        expected = {name: cast(tensor, case.dtype) for name, tensor in case.targets.items()}
        assert {name: bits(tensor) for name, tensor in found.items()} == {
            name: bits(tensor) for name, tensor in expected.items()
        }

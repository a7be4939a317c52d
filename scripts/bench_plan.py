"""How long planning takes, from 1,000 to 100,000 tensors: ``python -m scripts.bench_plan``.

The checkpoint is a mixture of experts as names, shapes and dtypes; no weight exists on either side.  Two modules are
filled by it: one that keeps its experts in lists, as the checkpoint does (one step for each tensor), and one that
stacks them (hundreds of sources in one step).

Timed, in seconds of the processor and as the best of some rounds: ``check(table, headers, module)`` with everything
that it does: listing the module's parameters on the meta device, matching names, solving sizes, proving that nothing is
lost, and making the plan.  Not timed: reading headers, building the module, parsing the table.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from porting.notation.table import Table, parse_table
from porting.plan.check import check

EXPERTS = 512
SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
HIDDEN, INNER, WORDS = 64, 32, 128

COMMON = """
"model.embed.weight [v e]" = "embed.weight [v e]"
"model.layers.{i}.attn.{p:q,k,v}_proj.weight [(h d) e]" = "layers.{i}.attn.qkv [(h p d) e]"
"model.layers.{i}.attn.o_proj.weight [o e]" = "layers.{i}.attn.out.weight [o e]"
"model.layers.{i}.{n:input_layernorm,post_attention_layernorm}.weight" = "layers.{i}.{n:norm1,norm2}.weight"
"model.layers.{i}.mlp.gate.weight [x e]" = "layers.{i}.router.weight [x e]"
"""
THEIRS = "model.layers.{i}.mlp.experts.{x}.{w:gate,up,down}.weight [a b]"
LISTS = f'"{THEIRS}" = "layers.{{i}}.experts.{{x}}.{{w:gate,up,down}} [b a]"'
STACKS = f'"{THEIRS}" = "layers.{{i}}.experts.{{w:gate,up,down}} [x b a]"'


@dataclass(frozen=True, kw_only=True)
class Info:
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Headers:
    """A checkpoint that is nothing but headers."""

    tensors: Mapping[str, Info]
    config: Mapping[str, object] = field(default_factory=lambda: {"heads": 4})
    shared: tuple[frozenset[str], ...] = ()


def table(experts: str) -> Table:
    """The mapping, for experts in lists or in stacks."""
    return parse_table(f'[sizes]\nh = "heads"\n[tensors]\n{COMMON}{experts}\n')


def checkpoint(layers: int) -> Headers:
    """Embeddings and ``layers`` layers of 512 experts."""
    return Headers(tensors=dict(_tensors(layers)))


def _tensors(layers: int) -> Iterator[tuple[str, Info]]:
    yield "model.embed.weight", Info(shape=(WORDS, HIDDEN))
    for i in range(layers):
        stem = f"model.layers.{i}"
        for p in ("q", "k", "v", "o"):
            yield f"{stem}.attn.{p}_proj.weight", Info(shape=(HIDDEN, HIDDEN))
        for n in ("input", "post_attention"):
            yield f"{stem}.{n}_layernorm.weight", Info(shape=(HIDDEN,))
        yield f"{stem}.mlp.gate.weight", Info(shape=(EXPERTS, HIDDEN))
        for x in range(EXPERTS):
            for w, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                yield f"{stem}.mlp.experts.{x}.{w}.weight", Info(shape=shape)


def parameter(*shape: int) -> nn.Parameter:
    """A parameter without memory."""
    return nn.Parameter(torch.empty(shape, device="meta", dtype=torch.bfloat16))


class Expert(nn.Module):
    """One expert, or all of a layer stacked."""

    def __init__(self, *stack: int) -> None:
        super().__init__()
        self.gate, self.up = parameter(*stack, HIDDEN, INNER), parameter(*stack, HIDDEN, INNER)
        self.down = parameter(*stack, INNER, HIDDEN)


class Weight(nn.Module):
    """A matrix or a gain."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = parameter(*shape)


class Attention(nn.Module):
    """Fused projections."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = parameter(3 * HIDDEN, HIDDEN)
        self.out = Weight(HIDDEN, HIDDEN)


class Layer(nn.Module):
    """Attention, norms, a router and its experts."""

    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        self.attn = Attention()
        self.norm1, self.norm2 = Weight(HIDDEN), Weight(HIDDEN)
        self.router = Weight(EXPERTS, HIDDEN)
        self.experts = Expert(EXPERTS) if stacked else nn.ModuleList(Expert() for _ in range(EXPERTS))


class Model(nn.Module):
    """The module that is filled."""

    def __init__(self, layers: int, *, stacked: bool) -> None:
        super().__init__()
        self.embed = Weight(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Layer(stacked=stacked) for _ in range(layers))


def seconds(mapping: Table, headers: Headers, module: nn.Module, rounds: int) -> tuple[float, int]:
    """The best time of one ``check``, and the number of steps of its plan."""
    best, steps = float("inf"), 0
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        plan = check(mapping, headers, module)
        best = min(best, time.process_time() - start)
        steps = len(plan.steps)
        del plan
    return best, steps


def main() -> None:
    """Read the options and measure."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3, help="of each, the best counts")
    measure(options.parse_args().rounds)


def measure(rounds: int) -> None:
    """Print the table as markdown."""
    print(f"`python -m scripts.bench_plan --rounds {rounds}`, {time.strftime('%Y-%m-%d')}, {platform.machine()},")
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}; seconds of the processor, best of {rounds}.\n"
    )
    print("| tensors | experts in lists: s | us per tensor | experts stacked: s | us per tensor |")
    print("|---:|---:|---:|---:|---:|")
    per_tensor: dict[str, list[float]] = {"lists": [], "stacks": []}
    for size in SIZES:
        layers = max(1, round(size / (3 * EXPERTS + 7)))
        headers = checkpoint(layers)
        count = len(headers.tensors)
        cells = [f"{count:,}"]
        for kind, rule in (("lists", LISTS), ("stacks", STACKS)):
            best, _ = seconds(table(rule), headers, Model(layers, stacked=kind == "stacks"), rounds)
            per_tensor[kind].append(best / count)
            cells += [f"{best:.2f}", f"{1e6 * best / count:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    ratios = ", ".join(f"{kind} {values[-1] / values[0]:.2f}" for kind, values in per_tensor.items())
    print(f"\nSeconds per tensor, the largest against the smallest: {ratios} (1.00 is linear).")


if __name__ == "__main__":
    main()

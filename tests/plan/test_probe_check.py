"""What is doubtful in [inputs] and [probes] shows before anything runs."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from porting.notation.table import parse_table
from porting.plan.check import doubtful

SOURCES = ("model.layer.0.attention.q.weight", "model.layer.1.attention.q.weight", "model.norm.weight")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": nn.Linear(2, 2)}) for _ in range(2))
        self.norm = nn.LayerNorm(2)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        raise NotImplementedError


class Open(Model):
    def forward(self, tokens: Tensor, mask: Tensor | None = None, **others: Tensor) -> Tensor:
        raise NotImplementedError


def doubts(body: str, module: nn.Module | None = None) -> list[str]:
    table = parse_table(f'[mapping]\nprefix = "model."\n{body}', where="t.toml")
    return [str(one) for one in doubtful(table, SOURCES, module or Model())]


GOOD = """
[inputs]
"input_ids" = "tokens"
"attention_mask" = "mask -> padding"
[probes]
"model.layer.{i}.attention" = "blocks.{i}.attn"
"layer.{i}.attention -> scores" = "blocks.{i}.attn -> scores"
"model.norm" = "norm"
"model.pooler" = "pooler"
"""


def test_a_good_table_leaves_no_doubt() -> None:
    """Also with a probe of a part that neither the checkpoint nor the module has."""
    assert doubts(GOOD) == []
    assert doubts(GOOD.replace('"tokens"', '"0"')) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "mask -> padding",
            "mask -> pading",
            "t.toml:6:1: an input can be given as bool, padding, additive, not as 'pading' (did you mean 'padding'?)",
        ),
        (
            '"tokens"',
            '"token"',
            "t.toml:5:1: [inputs] gives 'token', and the module's forward takes tokens, mask (did you mean 'tokens'?)",
        ),
        (
            "[inputs]",
            "[arguments]\nmsk = 1\n[inputs]",
            "t.toml: [arguments] gives 'msk', and the module's forward takes tokens, mask (did you mean 'mask'?)",
        ),
        (
            "attn -> scores",
            "attn -> scors",
            (
                "t.toml:9:1: the probe 'layer.{i}.attention -> scores = blocks.{i}.attn -> scors' names the output "
                "'scors' (did you mean 'scores'?)"
            ),
        ),
        (
            '= "norm"',
            '= "nrom"',
            "t.toml:10:1: the module has no part 'nrom' of the probe 'model.norm = nrom' (did you mean 'norm'?)",
        ),
        (
            '"blocks.{i}.attn"',
            '"layers.{i}.attn"',
            (
                "t.toml:8:1: the module has no part 'layers.{i}.attn' of the probe "
                "'model.layer.{i}.attention = layers.{i}.attn'"
            ),
        ),
    ],
)
def test_a_misspelled_entry_is_doubted_with_its_place(old: str, new: str, expected: str) -> None:
    assert GOOD.count(old) == 1
    found = doubts(GOOD.replace(old, new))
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_a_forward_that_takes_anything_takes_every_input() -> None:
    assert doubts(GOOD.replace('"tokens"', '"words"'), Open()) == []

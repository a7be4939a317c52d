"""Ports that are right in float64 and wrong in float32: no rounding, and the line that does it is named."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from porting.notation.table import parse_table
from porting.verification import Report, verify
from tests.small_checkpoint import CONFIG
from tests.verification.user_bert import FUSED_TABLE, Block, HandNorm, MyBert


class HalvesByTo(Block):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.ln1(x + self.attn(x, padding))
        half = x.to(torch.float32)
        half *= 0.5  # at fault
        wide = self.up((2 * half).to(x.dtype))
        y: Tensor = self.ln2(x + self.down(torch.nn.functional.gelu(wide)))
        return y


class HalvesByFloat(Block):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.ln1(x + self.attn(x, padding))
        half = x.float().mul_(0.5)  # at fault
        wide = self.up((2 * half).to(x.dtype))
        y: Tensor = self.ln2(x + self.down(torch.nn.functional.gelu(wide)))
        return y


class WritesToAView(Block):
    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.ln1(x + self.attn(x, padding))
        first = x.unsqueeze(0).type(torch.float32)
        first[..., :5] = 0.0  # at fault
        wide = self.up(x.to(x.dtype))
        y: Tensor = self.ln2(x + self.down(torch.nn.functional.gelu(wide)))
        return y


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-12)


class AsksForTheDtype(HandNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:  # at fault
            x = x * torch.linspace(0.5, 2.0, x.shape[-1])
        return normed(x) * self.scale + self.shift


class Overflows(HandNorm):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        size = (centred * 1e30).square().mean(-1, keepdim=True).sqrt() / 1e30  # at fault
        return centred / size * self.scale + self.shift


class BelowTheLowest(HandNorm):
    def forward(self, x: Tensor) -> Tensor:
        lowest = torch.zeros_like(x).add(torch.finfo(x.dtype).min)
        x = x + 0.0 * (lowest * 2)  # at fault
        return normed(x) * self.scale + self.shift


def verified(checkpoint: Path, part: type[Block | HandNorm]) -> Report:
    port = MyBert(vocabulary=CONFIG["vocab_size"])
    for one in port.blocks if issubclass(part, Block) else [port.blocks[0].ln1]:
        one.__class__ = part  # its weights stay
    return verify(checkpoint, port, parse_table(FUSED_TABLE), architecture="BertModel", longest=12)


PLANTS = {
    "to(float32), written to": (HalvesByTo, "tensor changed in place"),
    "float(), written to": (HalvesByFloat, "tensor changed in place"),
    "a view of a cast, written to": (WritesToAView, "tensor changed in place"),
    "a condition on the dtype": (AsksForTheDtype, "other code for another dtype"),
    "an overflow": (Overflows, "other numbers in another dtype"),
    "below the lowest number": (BelowTheLowest, "other numbers in another dtype"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("part", "name"), PLANTS.values(), ids=PLANTS)
def test_what_is_wrong_in_float32_alone_is_different(part: type[Block | HandNorm], name: str, checkpoint: Path) -> None:
    report = verified(checkpoint, part)
    assert (report.verdict, report.guilty) == ("different", ())
    assert [one.name for one in report.causes] == [name]
    lines = linecache.getlines(__file__)
    start = next(number for number, line in enumerate(lines) if line.startswith(f"class {part.__name__}("))
    marked = next(number for number in range(start, len(lines)) if "# at fault" in lines[number])
    assert f"{Path(__file__).name}:{marked + 1}" in report.causes[0].detail


def test_half_precision_stays_a_matter_of_rounding(checkpoint: Path) -> None:
    class Rounds(HandNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(torch.bfloat16).to(x.dtype))

    report = verified(checkpoint, Rounds)
    assert report.verdict == "imprecise"
    assert not report.broken

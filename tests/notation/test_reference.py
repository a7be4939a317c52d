"""The examples of the two pages on the notation, carried out with the tensors that the text under a table names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from porting.notation.table import parse_table
from porting.plan.align import align
from porting.plan.config import sizes
from tests.plan.carrying import drawn, port, same
from tests.plan.shapes import Shape

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text(encoding="utf-8") for name in ("notation.md", "notation-rare.md")}


def blocks(page: str) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """The blocks of a page, each with the one that follows it."""
    found = re.findall(r"^```(toml|text)\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)
    return list(zip(found, [*found[1:], ("", "")], strict=True))


def examples(page: str) -> list[tuple[str, str]]:
    """The tables of a page that have tensors under them."""
    return [(table, effect) for (kind, table), (after, effect) in blocks(page) if (kind, after) == ("toml", "text")]


EXAMPLES = [
    pytest.param(table, effect, id=f"{page}-{n}") for page in PAGES for n, (table, effect) in enumerate(examples(page))
]
ALONE = [table for page in PAGES for (kind, table), (after, _) in blocks(page) if kind == "toml" and after != "text"]
LINKS = [(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)]+)\)", text)]


def tensors(text: str) -> dict[str, Shape]:
    return {
        name: tuple(int(extent) for extent in shape.split(","))
        for name, shape in re.findall(r"([\w./{}-]+) \[([\d, ]+)\]", text)
    }


def read_as_numbers(table: str, sources: dict[str, Shape]) -> dict[str, torch.Tensor]:
    """Values of tensors that a formula reads as whole numbers, as places of another, or as a text of JSON."""
    looked_up = {name: torch.zeros(shape) for name, shape in sources.items() if name.endswith(("g_idx", "absmax"))}
    text = '{"nested_offset": 0.5}'
    texts = {
        name: torch.tensor([*text.ljust(shape[0]).encode()], dtype=torch.uint8)
        for name, shape in sources.items()
        if "quant_state" in name
    }
    packed = ("q.qweight", "q.qzeros", "experts.blocks", *(["q.weight"] if texts else []))
    numbers = {name: torch.randint(0, 256, sources[name]).double() for name in packed if name in sources}
    return numbers | (looked_up | texts if "take(" in table else {})


@pytest.mark.parametrize(("table", "effect"), EXAMPLES)
def test_an_example_does_what_it_says(table: str, effect: str) -> None:
    config: dict[str, object] = {}
    sources: dict[str, Shape] = {}
    targets: dict[str, Shape] = {}
    refused, exact, one_way = "", True, False
    for line in effect.splitlines():
        if line.startswith("config: "):
            config = json.loads(line.removeprefix("config: "))
        elif line.startswith("refused: "):
            refused = line.removeprefix("refused: ")
        elif line == "not bit by bit":
            exact = False
        elif line == "one way":
            one_way = True
        else:
            left, arrow, right = line.partition(" -> ")
            assert arrow
            sources |= tensors(left)
            targets |= tensors(right)
    if refused:
        parsed = parse_table(table)
        known, _ = sizes(parsed, config)
        (fault,) = align(parsed.rules, sources, targets, sizes=known).faults
        assert refused in fault.message
        return
    made = port(table, sources, targets, config)
    values = drawn(sources, torch.float64) | read_as_numbers(table, sources)
    found = made.forward(values)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == targets
    if one_way:
        assert all(step.rule.formula is not None and not step.rule.back for step in made.steps)
        return
    back = made.backward(found, base=values)
    if exact:
        same(back, values)
    elif any(step.rule.formula is not None for step in made.steps):
        again = made.forward(back)
        assert all(torch.allclose(again[name], tensor, rtol=1e-12, atol=0) for name, tensor in found.items())
    else:
        same(made.forward(back), found)


def test_the_page_has_examples_of_everything() -> None:
    assert len(EXAMPLES) >= 32
    assert len(ALONE) == 2


def test_the_table_with_every_section_is_read() -> None:
    *_, whole = ALONE
    table = parse_table(whole)
    for field in ("architectures", "config", "defaults", "constants", "require", "sizes", "rules", "drops", "ties"):
        assert getattr(table, field), field
    assert table.fresh
    assert table.makes
    assert any(rule.rest for rule in table.rules)
    assert table.inputs
    assert table.probes


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_lead_somewhere(page: str, link: str) -> None:
    file, _, heading = link.partition("#")
    text = (DOCS / file).read_text(encoding="utf-8") if file else PAGES[page]
    titles = [title.lower().replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    assert not heading or heading in titles

"""Pictures: the shares in the right places, whatever the tokens are made of."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.image import imread

import porting
from porting.seeing import Attention
from porting.seeing.picture import HEATS, LONGEST, MOST_MAPS, SHADES, ink_on, label, luminance
from tests.guards.tree import ROOT
from tests.seeing.test_webpage import HOSTILE, drawn


def pixels(png: bytes) -> np.ndarray:
    """[height width 3], 0 to 1"""
    return np.asarray(imread(BytesIO(png), format="png"))[..., :3]


def squares(picture: np.ndarray, attention: Attention, layer: int, head: int) -> bool:
    """Whether a head's map is somewhere in the picture: along some row of pixels, the colours of a row of it."""
    values = attention.of(layer, head)
    for row in values:
        colours = np.array([HEATS(float(SHADES(share)))[:3] for share in row.tolist()])
        lines = picture.reshape(-1, picture.shape[1], 3)
        if not any(_runs_through(line, colours) for line in lines[::2]):
            return False
    return True


def _runs_through(line: np.ndarray, colours: np.ndarray) -> bool:
    """Whether the colours are met on the line, in their order."""
    place = 0
    for colour in colours:
        near = np.flatnonzero((np.abs(line[place:] - colour) < 0.006).all(-1))
        if not len(near):
            return False
        place += int(near[0]) + 1
    return True


@pytest.fixture(scope="module")
def attention() -> Attention:
    return drawn(tuple("abcdefgh" * 3), 3, 2)


def test_the_picture_of_a_head_shows_it_and_no_other(attention: Attention) -> None:
    picture = pixels(attention.to_png(layer=0, head=1))
    assert squares(picture, attention, 0, 1)
    assert not squares(picture, attention, 0, 2)
    assert not squares(picture, attention, 1, 1)


def test_the_grid_shows_every_head(attention: Attention) -> None:
    picture = pixels(attention.to_png())
    for layer, head in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        assert squares(picture, attention, layer, head)
    one = pixels(attention.to_png(layer=1))
    assert one.shape[0] < 0.8 * picture.shape[0]
    assert squares(one, attention, 1, 0)
    assert not squares(one, attention, 0, 0)


def test_a_grid_of_very_many_heads_has_the_first_of_them() -> None:
    """A config chooses the number of heads: 1,024 of one number each cost as much to draw as those of a large model."""
    some = pixels(drawn(("a", "b"), *[3] * 3).to_png())
    most = pixels(drawn(("a", "b"), *[1024] * 8).to_png())
    assert most.shape[0] <= 9 * some.shape[0]
    assert most.shape[0] * most.shape[1] < 150 * 150 * MOST_MAPS
    below = most[-25:]
    assert (below < 0.5).any()  # the line that says so; a complete grid has none
    assert not (some[-25:] < 0.5).any()


def test_a_marked_token_is_framed(attention: Attention) -> None:
    plain, marked = (pixels(attention.to_png(layer=0, head=0, token=token)) for token in (None, "c"))
    assert plain.shape == marked.shape
    rows = np.flatnonzero(np.abs(plain - marked).max((1, 2)) > 0.2)
    assert 10 < rows.max() - rows.min() < plain.shape[0] / 10
    assert rows.min() < plain.shape[0] / 4  # the third of 24 rows


@pytest.mark.parametrize("head", [None, 1])
def test_hostile_tokens_are_only_letters(head: int | None) -> None:
    attention = drawn((*HOSTILE, "\u4e2d\u6587", "\U0001f600", "$x^2$", "_{", "\\alpha"), 2)
    picture = pixels(attention.to_png(layer=0, head=head, token=0))  # a warning would be an error
    border = np.concatenate([picture[[0, -1]].reshape(-1, 3), picture[:, [0, -1]].reshape(-1, 3)])
    assert border.min() == 1  # nothing is cut off


def test_labels_spell_out_what_cannot_be_seen() -> None:
    assert label("naïve $x$") == "naïve $x$"
    assert label("\u4e2d\x07\u202e") == "\\u4e2d\\x07\\u202e"
    assert label("y" * 50) == "y" * (LONGEST - 1) + "…"


def test_numbers_are_readable_on_every_colour() -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1."""
    for share in np.linspace(0, 1, 201):
        lights = luminance(to_rgb(ink_on(share))), luminance(HEATS(float(SHADES(share)))[:3])
        assert (max(lights) + 0.05) / (min(lights) + 0.05) >= 4.5, share


def test_saving_goes_by_the_ending(attention: Attention, tmp_path: Path) -> None:
    page, picture = attention.save(tmp_path / "a.html", layer=1), attention.save(tmp_path / "a.PNG", layer=1, head=1)
    assert page.read_text(encoding="utf-8") == attention.to_html(layer=1)
    assert picture.read_bytes() == attention.to_png(layer=1, head=1)
    assert picture.read_bytes() == attention.to_png(layer=-1, head=-1)  # the same bytes each time


def test_one_word_is_enough() -> None:
    attention = porting.attention(["return"])
    assert torch.equal(attention.of(0, 0), torch.ones(1, 1))
    assert pixels(attention.to_png(layer=0, head=0)).ndim == 3
    assert "return" in attention.to_html()


def test_the_picture_in_the_documents_is_the_command_s() -> None:
    file = ROOT / "docs" / "attention.png"
    assert file.stat().st_size < 100_000
    seen = porting.attention("Return the name of the file.")
    assert squares(pixels(file.read_bytes()), seen, 1, 2)
    grid = ROOT / "docs" / "attention-grid.png"
    assert grid.stat().st_size < 100_000
    text = "Return a new list with the items of the old one, in the order in which they were added."
    assert squares(pixels(grid.read_bytes()), porting.attention(text), 2, 3)

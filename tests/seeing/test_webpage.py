"""The page in a browser: it says what was computed, by pointer and by keys, in light and dark, on a phone."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from html import unescape

import pytest
import torch
from playwright.sync_api import Locator, Page

import porting
from porting.seeing import Attention, Layer
from porting.seeing.attention_data import AttentionError
from porting.seeing.webpage import LARGEST, in_percent, map_address, packed
from tests.browser import opened

RUN = "document.body.dataset.ran = 'yes'"
HOSTILE = (
    f"<script>{RUN}</script>",
    f'"><img src=x onerror="{RUN}">',
    "'\"&lt;b&gt;{{ 7 * 7 }}",
    "\u202egnp.exe",
    "nul\0bell\x07\x1b[2J",
    "</button></ol>",
    "\u05e9\u05dc\u05d5\u05dd",
    "$\\frac{1}$",
    "",
    "x" * 400,
)


def drawn(tokens: tuple[str, ...], *heads: int, model: str = "a model") -> Attention:
    generator = torch.Generator().manual_seed(len(tokens))
    layers = tuple(
        Layer(
            name=f"layers.{number}",
            heads=torch.randn(count, len(tokens), len(tokens), generator=generator).mul(3).softmax(-1),
        )
        for number, count in enumerate(heads)
    )
    return Attention(tokens=tokens, layers=layers, model=model)


@pytest.fixture(scope="module")
def seen() -> Attention:
    return porting.attention("Return a new list with the items of the old one, in the order in which they were added.")


@pytest.fixture
def page(seen: Attention) -> Iterator[Page]:
    with opened() as browser:
        browser.set_content(seen.to_html(layer=1, head=2))
        yield browser


def shown(page: Page) -> list[str]:
    return page.locator(".share").all_inner_texts()


def token(page: Page, number: int) -> Locator:
    return page.locator(".token").nth(number)


def expected(seen: Attention, layer: int, head: int, place: int) -> list[str]:
    return [in_percent(round(share * 65535) / 65535) for share in seen.of(layer, head)[place].tolist()]


def test_the_page_shows_what_was_computed(page: Page, seen: Attention) -> None:
    assert page.locator(".token .name").all_inner_texts() == list(seen.tokens)
    assert shown(page) == expected(seen, 1, 2, 0)
    assert page.inner_text("#chosen") == "Layer 1, head 2"
    assert page.inner_text("#told") == "[CLS] attends most to they: 0.126"
    assert page.locator(".map").count() == 12
    assert page.locator(".map[aria-pressed=true]").get_attribute("aria-label") == "layer 1, head 2"
    assert page.locator(".map img").evaluate_all("all => all.every((one) => one.naturalWidth === 23)")


def test_choosing_a_token_and_a_head_changes_what_is_shown(page: Page, seen: Attention) -> None:
    token(page, 11).click()
    page.mouse.move(0, 0)
    assert shown(page) == expected(seen, 1, 2, 11)
    assert page.locator(".token[aria-pressed=true]").evaluate_all("all => all.length") == 1
    page.get_by_label("layer 2, head 3", exact=True).click()
    assert page.inner_text("#chosen") == "Layer 2, head 3"
    assert shown(page) == expected(seen, 2, 3, 11)
    shade = token(page, 4).evaluate("one => Number(one.style.getPropertyValue('--shade'))")
    assert shade == pytest.approx(seen.of(2, 3)[11, 4].sqrt().item(), abs=1e-3)


def test_pointing_at_a_token_says_its_number(page: Page, seen: Attention) -> None:
    token(page, 4).hover()
    assert page.inner_text("#told") == f"[CLS] attends to list: {seen.of(1, 2)[0, 4].item():.3f}"
    assert token(page, 4).get_attribute("title") == f"{seen.of(1, 2)[0, 4].item():.3f}"
    page.mouse.move(0, 0)
    assert page.inner_text("#told").startswith("[CLS] attends most to they")


def test_special_tokens_can_be_hidden(page: Page, seen: Attention) -> None:
    page.get_by_label("hide special tokens").check()
    hidden = page.locator(".tokens li").evaluate_all(
        "all => all.map((one) => getComputedStyle(one).display === 'none')"
    )
    assert [number for number, one in enumerate(hidden) if one] == list(seen.special) == [0, 22]
    assert page.locator(".token[aria-pressed=true] .name").inner_text() == seen.tokens[1]
    assert page.locator("#large").evaluate("one => [one.width, one.height]") == [21, 21]


def test_the_chosen_head_is_large(page: Page, seen: Attention) -> None:
    size = page.locator("#large").evaluate("one => [one.width, one.height, one.getBoundingClientRect().width]")
    assert size[:2] == [23, 23]
    assert size[2] > 300
    pixel = "(one, at) => one.getContext('2d').getImageData(at[1], at[0], 1, 1).data[3]"
    for at in ([0, 9], [7, 3]):
        shade = page.locator("#large").evaluate(pixel, at)
        assert shade / 255 == pytest.approx(seen.of(1, 2)[at[0], at[1]].sqrt().item(), abs=0.01)
    box = page.locator("#large").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 3.5 / 23, box["y"] + box["height"] * 7.5 / 23)
    assert page.inner_text("#cell") == f"{seen.tokens[7]} attends to {seen.tokens[3]}: {seen.of(1, 2)[7, 3].item():.3f}"


@pytest.mark.slow
def test_nothing_moves_when_another_token_is_pointed_at() -> None:
    attention = drawn(("short", "l" + "o" * 300 + "ng", "x", *HOSTILE), 1)
    with opened(width=375, height=800) as page:
        page.set_content(attention.to_html(token=1))
        tops = set()
        for number in range(len(attention.tokens)):
            token(page, number).dispatch_event("pointerenter")
            tops.add(page.locator(".map").evaluate("one => one.getBoundingClientRect().top"))
        assert len(tops) == 1


@pytest.mark.slow
def test_everything_can_be_reached_by_keys(seen: Attention) -> None:
    with opened() as page:
        page.set_content(seen.to_html(layer=0, head=0))
        focused = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText"
        page.keyboard.press("Tab")  # the box that hides special tokens
        page.keyboard.press("Tab")
        assert page.evaluate(focused).startswith("[CLS]")
        for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowDown"):
            page.keyboard.press(key)
        assert page.evaluate(focused).startswith("a\n")
        assert page.inner_text("#told") == f"[CLS] attends to a: {seen.of(0, 0)[0, 2].item():.3f}"
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        assert shown(page) == expected(seen, 0, 0, 2)
        page.keyboard.press("End")
        assert page.evaluate(focused).startswith("[SEP]")
        page.keyboard.press("Tab")  # one stop for all tokens
        assert page.evaluate(focused) == "layer 0, head 0"
        for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp", "Space"):
            page.keyboard.press(key)
        assert page.inner_text("#chosen") == "Layer 0, head 2"
        assert shown(page) == expected(seen, 0, 2, 2)


@pytest.mark.slow
def test_a_hostile_text_is_only_text() -> None:
    attention = drawn(HOSTILE, 2, 1, model=f"</title><script>{RUN}</script>")
    with opened(width=375, height=800) as page:
        page.set_content(attention.to_html(layer=-1, head=0, token=1))
        for number in (3, 0):
            token(page, number).click()
        page.get_by_label("layer 0, head 1").click()
        assert page.get_attribute("body", "data-ran") is None
        assert page.locator("script").count() == 1
        assert page.locator("main img").count() == 3
        assert page.locator(".token").count() == len(HOSTILE)
        names = page.locator(".token .name").evaluate_all("all => all.map((one) => one.textContent)")
        spelled = {"\u202e": "\\u202e", "\0": "\\x00", "\x07": "\\x07", "\x1b": "\\x1b"}
        assert names == ["".join(spelled.get(one, one) for one in text) for text in HOSTILE]
        assert page.inner_text("#told").startswith(f"{HOSTILE[0]} attends")
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        assert shown(page) == expected(attention, 0, 1, 0)


def luminance(colour: str) -> float:
    """Of a CSS colour, rgb(...) in bytes or color(srgb ...) in parts of 1 (WCAG 2.2)."""
    parts = [float(one) for one in re.findall(r"[\d.]+(?:e-?\d+)?", colour)[:3]]
    parts = [part / 255 for part in parts] if colour.startswith("rgb") else parts
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_ink_is_readable_on_every_shade(dark: bool, seen: Attention) -> None:
    """WCAG 2.2, 1.4.3: 4.5 to 1 for text; 1.4.11: 3 to 1 for what a control is known by."""
    with opened(dark=dark) as page:
        page.set_content(seen.to_html())
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (luminance(paper) < 0.1) is dark
        shades = []
        for step in range(21):
            colours = token(page, 0).evaluate(
                "(one, shade) => { one.style.setProperty('--shade', shade); const style = getComputedStyle(one);"
                " return [style.color, style.backgroundColor]; }",
                step / 20,
            )
            assert contrast(*colours) >= 4.5, (step, colours)
            shades.append(luminance(colours[1]))
        assert shades == sorted(shades, reverse=not dark)
        assert contrast(paper, colours[1]) > (3 if dark else 1.8)  # what is attended to stands out
        for faint in page.locator(".faint, th").all():
            assert contrast(faint.evaluate("one => getComputedStyle(one).color"), paper) >= 4.5
        ring = token(page, 0).evaluate("one => getComputedStyle(one).boxShadow")
        assert contrast(ring, paper) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(375, True), (1280, False)])
def test_nothing_is_cut_off(width: int, dark: bool) -> None:
    attention = drawn(tuple(f"token{number}" * (1 + number % 3) for number in range(30)), *[12] * 3)
    with opened(width=width, height=800, dark=dark) as page:
        page.set_content(attention.to_html())
        assert page.evaluate("document.documentElement.scrollWidth") == width
        cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
        assert page.locator(".token, .token .name, .swatch, h1, h2").evaluate_all(cut) == 0
        boxes = page.locator(".token").evaluate_all("all => all.map((one) => one.getBoundingClientRect().height)")
        assert min(boxes) >= 44  # CSS pixels: a fingertip
        assert page.locator(".share").first.evaluate("one => parseFloat(getComputedStyle(one).fontSize)") >= 12
        page.get_by_label("layer 2, head 11").scroll_into_view_if_needed()
        page.get_by_label("layer 2, head 11").click()
        assert shown(page) == expected(attention, 2, 11, 0)


@pytest.mark.slow
def test_a_notebook_shows_it_in_a_frame(seen: Attention) -> None:
    html = seen._repr_html_()
    assert html.count("<") == 2  # nothing but the frame's own tags
    (source,) = re.findall(r'srcdoc="([^"]*)"', html)
    assert unescape(source) == seen.to_html()
    with opened() as page:
        page.set_content(f"<!doctype html><p id=before>before</p>{html}")
        frame = page.frame_locator("iframe")
        frame.locator(".token").nth(3).click()
        assert frame.locator(".share").all_inner_texts() == expected(seen, *seen.telling(None), 3)
        inside = page.frames[1].evaluate("[document.documentElement.scrollHeight, innerHeight]")
        assert inside[0] <= inside[1] + 1  # it needs no scrolling of its own


def test_the_head_that_shows_most_comes_first() -> None:
    """Head 1 of layer 1 gives 0.9 to one word; others give more to a special token, or to the token itself."""
    heads = torch.full((2, 2, 4, 4), 0.25)  # [layer h q k]
    heads[0, 0, 0] = torch.tensor([0.99, 0.01, 0.0, 0.0])
    heads[0, 1, 0] = torch.tensor([0.0, 0.0, 0.01, 0.99])
    heads[1, 1, 0] = torch.tensor([0.1, 0.0, 0.9, 0.0])
    layers = tuple(Layer(name=f"layers.{number}", heads=values) for number, values in enumerate(heads))
    attention = Attention(tokens=("[CLS]", "a", "word", "[SEP]"), layers=layers, model="a model", special=(0, 3))
    assert attention.telling(None) == (1, 1)
    assert attention.telling(None, layer=-1) == (1, 1)
    assert attention.telling(None, head=0) == (1, 0)
    with opened() as page:
        page.set_content(attention.to_html())
        assert page.inner_text("#chosen") == "Layer 1, head 1"
        assert page.inner_text("#told") == "[CLS] attends most to word: 0.900"
    with pytest.raises(porting.PortingError, match="there is no head 2"):
        attention.telling(None, head=2)


def test_without_scripts_the_first_head_is_there(seen: Attention) -> None:
    html = re.sub(r"<script>.*?</script>", "", seen.to_html(layer=2, head=1, token=7), flags=re.DOTALL)
    with opened() as page:
        page.set_content(html)
        assert shown(page) == expected(seen, 2, 1, 7)
        best = int(seen.of(2, 1)[7].argmax())
        assert page.inner_text("#told").startswith(f"items attends most to {seen.tokens[best]}: ")


def test_numbers_are_packed_to_sixteen_bits() -> None:
    attention = drawn(("a", "b", "c"), 2, 1)
    raw = base64.b64decode(packed(attention))
    numbers = torch.tensor(struct.unpack(f"<{len(raw) // 2}H", raw)) / 65535
    whole = torch.cat([layer.heads.flatten() for layer in attention.layers])
    torch.testing.assert_close(numbers, whole, rtol=0, atol=1e-5)


def test_a_map_has_a_pixel_for_each_share() -> None:
    from io import BytesIO

    from matplotlib.image import imread

    values = drawn(("a", "b", "c", "d"), 1).of(0, 0)
    pixels = imread(BytesIO(base64.b64decode(map_address(values).partition(",")[2])), format="png")
    assert pixels.shape == (4, 4, 4)
    torch.testing.assert_close(torch.tensor(pixels[..., 3]), values.sqrt(), rtol=0, atol=0.003)


def test_a_page_that_would_be_too_large_is_refused() -> None:
    length = int((LARGEST / 2) ** 0.5) + 1
    heads = torch.zeros(1, 1).expand(2, length, length)
    attention = Attention(tokens=("a",) * length, layers=(Layer(name="l", heads=heads),), model="")
    with pytest.raises(AttentionError, match="16,777,216 are the most that it may"):
        attention.to_html()

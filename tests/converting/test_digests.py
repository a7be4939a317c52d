"""Tensors that are read anyway are digested on the way, and none that was not read from first to last."""

from __future__ import annotations

import os

import xxhash

from porting.converting.digests import MOST_STREAMS, StreamDigests

RAW = memoryview(os.urandom(1000))


def heard(*spans: tuple[int, int]) -> str | None:
    hearing = StreamDigests()
    for start, stop in spans:
        hearing.update("a", start, [RAW[start:stop]])
    return hearing.digest("a", len(RAW))


def test_a_tensor_read_in_order_is_digested() -> None:
    expected = xxhash.xxh3_128_hexdigest(RAW)
    assert heard((0, 1000)) == expected
    assert heard((0, 1), (1, 999), (999, 1000)) == expected
    assert heard((0, 500), (0, 300), (300, 1000)) == expected, "whoever begins again may finish"
    assert xxhash.xxh3_128_hexdigest(b"") == of_nothing()


def of_nothing() -> str | None:
    hearing = StreamDigests()
    hearing.update("a", 0, [])
    return hearing.digest("a", 0)


def test_anything_else_is_not() -> None:
    assert heard() is None
    assert heard((0, 999)) is None
    assert heard((1, 1000)) is None
    assert heard((0, 400), (500, 1000)) is None, "a gap"
    assert heard((0, 400), (300, 1000)) is None, "an overlap"
    assert heard((500, 1000), (0, 500)) is None, "another order"
    assert heard((0, 400), (500, 600), (400, 1000)) is None, "lost stays lost"


def test_several_rows_of_several_tensors() -> None:
    hearing = StreamDigests()
    for start in range(0, 1000, 200):
        hearing.update("a", start, [RAW[start : start + 100], RAW[start + 100 : start + 200]])
        hearing.update("b", start // 2, [RAW[start // 2 : start // 2 + 100]])
    assert hearing.digest("a", 1000) == xxhash.xxh3_128_hexdigest(RAW)
    assert hearing.digest("a", 1000) is None, "forgotten once it is told"
    assert hearing.digest("b", 500) == xxhash.xxh3_128_hexdigest(RAW[:500])


def test_what_is_never_finished_is_given_up() -> None:
    hearing = StreamDigests()
    for number in range(MOST_STREAMS + 1):
        hearing.update(str(number), 0, [RAW[:10]])
    for number in range(MOST_STREAMS + 1):
        hearing.update(str(number), 10, [RAW[10:20]])
    assert hearing.digest("0", 20) is None
    assert hearing.digest(str(MOST_STREAMS), 20) == xxhash.xxh3_128_hexdigest(RAW[:20])

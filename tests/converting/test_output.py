"""What is put out lies in the file, is digested, and is written in pieces that end where the file's pages do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from porting.converting.making import BLOCK, WRITTEN, Output


def test_everything_put_is_written_and_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, told = os.urandom(3 * BLOCK + 12345), [0]
    calls: list[tuple[int, int]] = []
    real = os.pwrite

    def pwrite(target: int, data: memoryview, at: int) -> int:
        calls.append((at, len(data)))
        return real(target, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    begin = 777
    with (tmp_path / "f").open("w+b") as file:
        out = Output(file.fileno(), begin, told.append)
        assert out.room == BLOCK - begin
        for start, stop in ((0, 10), (10, 10), (10, out.room), (BLOCK - begin, len(raw))):
            out.put(memoryview(raw)[start:stop])
        assert out.hexdigest() == xxhash.xxh3_128_hexdigest(raw)
    assert (tmp_path / "f").read_bytes() == bytes(begin) + raw
    assert sum(told) == len(raw)
    assert max(count for _, count in calls) == WRITTEN
    assert all(at // WRITTEN == (at + count - 1) // WRITTEN for at, count in calls), "no write crosses a boundary"
    assert len(calls) <= len(raw) // WRITTEN + 4, "and none is cut where it need not be"


def test_a_write_that_stops_early_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda target, data, at: real(target, data[: max(1, len(data) // 3)], at))
    raw = os.urandom(100_000)
    with (tmp_path / "f").open("w+b") as file:
        Output(file.fileno(), 0, lambda count: None).put(memoryview(raw))
    assert (tmp_path / "f").read_bytes() == raw

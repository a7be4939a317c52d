"""CRC-32C against its definition."""

from __future__ import annotations

import random

import pytest

from porting.checkpoint.crc32c import POLYNOMIAL, ROW, crc32c


def by_bits(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def test_the_values_of_rfc_3720() -> None:
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(bytes(range(32))[::-1]) == 0x113FDB5C


@pytest.mark.parametrize("length", [0, 1, 2, ROW - 1, ROW, ROW + 1, 2 * ROW, 3 * ROW + 5, 15 * ROW + 127, 20_001])
def test_any_length_in_any_parts(length: int) -> None:
    data = random.Random(length).randbytes(length)  # noqa: S311  # no secrets
    assert crc32c(data) == by_bits(data)
    assert crc32c(data[length // 3 :], crc32c(data[: length // 3])) == by_bits(data)
    assert crc32c(memoryview(data)) == by_bits(data)

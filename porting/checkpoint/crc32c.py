"""CRC-32C (Castagnoli), the checksum of TensorFlow's checkpoints, by numpy.

The bytes are cut into rows of one length, whose checksums advance together, two bytes at a time; then the checksums are
joined in pairs.  Joining is the usual arithmetic over GF(2): the checksum of A and B is that of A, carried over as many
zero bytes as B has, plus that of B.  https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

POLYNOMIAL = 0x82F63B78
"""Castagnoli's, with its bits in reverse."""

ONES = 0xFFFFFFFF

ROW = 128
"""Bytes of a row: in pieces of 256 KiB, some hundred times as fast as a byte at a time."""


def crc32c(data: bytes | memoryview, value: int = 0) -> int:
    """The CRC-32C of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    import numpy as np  # noqa: PLC0415  # only the checksums of TensorFlow need it

    values = np.frombuffer(data, dtype="<u2", count=len(data) // 2)
    done = 0
    while len(data) - done >= ROW:
        count = 1 << ((len(data) - done) // ROW).bit_length() - 1
        carried = _carried(np.array([value], dtype=np.uint32), count * ROW)[0]
        value = int(carried) ^ _of_rows(values[done // 2 :][: count * ROW // 2].reshape(count, -1))
        done += count * ROW
    value ^= ONES
    table = _bytes_table()
    for byte in bytes(data[done:]):
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ ONES


def _of_rows(rows: NDArray[np.uint16]) -> int:
    """The checksum of rows one behind the other; how many they are is a power of two."""
    import numpy as np  # noqa: PLC0415  # as above

    table = _words_table()
    state = np.full(len(rows), ONES, dtype=np.uint32)
    for word in np.ascontiguousarray(rows.T):
        state = table.take(state.astype(np.uint16) ^ word, mode="wrap") ^ state >> 16
    state ^= np.uint32(ONES)
    nbytes = 2 * rows.shape[1]
    while len(state) > 1:
        state = _carried(state[0::2], nbytes) ^ state[1::2]
        nbytes *= 2
    return int(state[0])


def _carried(state: NDArray[np.uint32], nbytes: int) -> NDArray[np.uint32]:
    tables = _carry_tables(nbytes)
    carried: NDArray[np.uint32] = tables[0][state & 0xFF]
    for place in range(1, 4):
        carried = carried ^ tables[place][state >> 8 * place & 0xFF]
    return carried


@cache
def _bytes_table() -> tuple[int, ...]:
    """The table of the checksum's change for each byte."""
    return tuple(_advanced(byte, 8) for byte in range(1 << 8))


@cache
def _words_table() -> NDArray[np.uint32]:
    """The table of the checksum's change for each pair of bytes."""
    import numpy as np  # noqa: PLC0415  # as above

    low = np.array(_bytes_table(), dtype=np.uint32)
    words = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(2):
        words = low[words & 0xFF] ^ words >> 8
    return words


@cache
def _carry_tables(nbytes: int) -> tuple[NDArray[np.uint32], ...]:
    """The tables of the effect of ``nbytes`` zero bytes, a power of two, on each byte of a checksum."""
    import numpy as np  # noqa: PLC0415  # as above

    bits = _carry(nbytes)
    tables = []
    for place in range(4):
        table = np.zeros(1 << 8, dtype=np.uint32)
        for bit in range(8):
            table[np.arange(1 << 8) >> bit & 1 == 1] ^= np.uint32(bits[8 * place + bit])
        tables.append(table)
    return tuple(tables)


@cache
def _carry(nbytes: int) -> tuple[int, ...]:
    """The effect of ``nbytes`` zero bytes, a power of two, on each bit of a checksum."""
    if nbytes == 1:
        return tuple(_advanced(1 << bit, 8) for bit in range(32))
    half = _carry(nbytes // 2)
    return tuple(_sum(half, _sum(half, 1 << bit)) for bit in range(32))


def _sum(columns: tuple[int, ...], value: int) -> int:
    total = 0
    for bit, column in enumerate(columns):
        if value >> bit & 1:
            total ^= column
    return total


def _advanced(value: int, bits: int) -> int:
    for _ in range(bits):
        value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
    return value

"""Flax's files as a source: what flax wrote, and files that lie."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from porting.checkpoint import open_checkpoint
from porting.checkpoint.flax_msgpack import DTYPES
from porting.errors import PortingError
from tests.checkpoint.hostile import HostileFile, refused, tensors_of, torn
from tests.converting.drawing import bits, elements, values


def packed(value: object) -> bytes:
    """MessagePack of what the tests need: dictionaries, lists, texts, bytes, numbers from 0 on, arrays."""
    match value:
        case bytes() | str():
            raw = value.encode() if isinstance(value, str) else value
            return (b"\xc6" if isinstance(value, bytes) else b"\xdb") + struct.pack(">I", len(raw)) + raw
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return b"\xcf" + struct.pack(">Q", value)
        case dict():
            inside = b"".join(packed(key) + packed(one) for key, one in value.items())
            return b"\xdf" + struct.pack(">I", len(value)) + inside
        case list():
            return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))
        case torch.Tensor():
            dtype = str(value.dtype).removeprefix("torch.")
            return extension(packed([[*value.shape], dtype, elements(value)]))
    raise TypeError(value)


def extension(content: bytes, kind: int = 1) -> bytes:
    return b"\xc9" + struct.pack(">Ib", len(content), kind) + content


def written(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A file with these tensors, nested by the dots of their names."""
    root: dict[str, object] = {}
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        here = root
        for key in path:
            here = here.setdefault(key, {})  # type: ignore[assignment]  # only dictionaries lie there
        here[last] = tensor
    return packed(root)


def test_each_type_is_read_to_the_bit(tmp_path: Path) -> None:
    tensors = {f"a.{name}": values((7, 3, 2), element.dtype, 1) for name, element in DTYPES.items()}
    tensors |= {"empty": torch.zeros(0, 3), "a.b.scalar": torch.tensor(2.5)}
    (tmp_path / "flax_model.msgpack").write_bytes(written(tensors))
    assert tensors_of(tmp_path) == {name: bits(tensor) for name, tensor in tensors.items()}


FLAX = (
    "c-"
    "m`QR*+bfm|NVmI5jW1aiKxevh38NywsfLo$>Lx#pwl!$=UJA8KrsIsVVV^MMa5~@$rY37H1?Dq&6)yU|wj*vJ5O++`Q1>xFX}^iL"
    "A@ha`F>PjE#<n<m_j#t9N7HxA&8>{r#)gY!@nW?q6t#uIjJSPP@vN%j};O7uo+)H`yQhbK(AlM#n{gs+i!aI9~P1@6U79v|W;vnO"
    "J;W3@FL6A_**OXm*4{^gzPC`TMQ+FU$Z*O=5y-1W85j5ZF4+Ovh$PaY<?c`{JD9lGcR=j0+7<JFqZ-"
    "!9t^j6$_0IEHpX1s5tos^W+I|OMwa!92TY?=K&hYz`Qgw4<yL2F!{JV$Zac=^K%PwQY*|%jtDR?G}uE-gU|r2`-fK"
)
"""What flax 0.12.8 wrote, with pieces of at most 20 bytes where 1 GiB is usual; deflated, in base 85."""


def test_what_flax_wrote(tmp_path: Path) -> None:
    (tmp_path / "flax_model.msgpack").write_bytes(zlib.decompress(base64.b85decode(FLAX)))
    checkpoint = open_checkpoint(tmp_path)
    shapes = {name: (tensor.shape, str(tensor.element)) for name, tensor in checkpoint.tensors.items()}
    assert shapes == {
        "params.enc.0.kernel": ((3, 4), "float32"),
        "params.enc.0.bias": ((4,), "bfloat16"),
        "params.h": ((2, 2), "float16"),
        "sc": ((), "float32"),
        "e": ((0, 3), "int32"),
        "c": ((2,), "complex64"),
    }
    kernel = checkpoint.read("params.enc.0.kernel")  # of default_rng(0).normal(size=(3, 4)), in three pieces
    assert kernel[0].tolist() == pytest.approx([0.12573022, -0.13210486, 0.64042264, 0.10490012])
    assert kernel[2].tolist() == pytest.approx([-0.70373523, -1.26542147, -0.62327446, 0.04132598])
    assert checkpoint.read("sc").item() == 3.5
    assert "step" not in checkpoint.tensors
    inside = open_checkpoint(f"{tmp_path / 'flax_model.msgpack'}#params.enc")
    assert torch.equal(inside.read("0.kernel"), kernel)
    with pytest.raises(PortingError, match=r"no tensor whose name begins with 'parms\.'.*did you mean 'params'"):
        open_checkpoint(f"{tmp_path / 'flax_model.msgpack'}#parms")


ONE = torch.ones(4)
ARRAY = packed(ONE)
MARK = "__msgpack_chunked_array__"

HOSTILE: list[HostileFile] = [
    ("a list", lambda: packed([1, 2]), "this does not begin with a dictionary"),
    ("cut short", lambda: packed({"a": ONE})[:-3], "it ends in the middle of its header"),
    ("bytes behind its end", lambda: packed({"a": ONE}) + b"xx", "2 bytes behind its end"),
    ("a key twice", lambda: b"\x82" + 2 * (packed("a") + ARRAY), "the key 'a' is there twice"),
    ("two names that are one", lambda: packed({"a": {"b": ONE}, "a.b": ONE}), "it is there twice"),
    ("2^32 entries", lambda: b"\xdf\xff\xff\xff\xff" + bytes(60), "it ends in the middle of its header"),
    ("a number as a key", lambda: b"\x81\x01" + ARRAY, "a key that is not text"),
    ("a key that is not text", lambda: b"\x81\xa1\xff" + ARRAY, "a name that is not UTF-8"),
    ("a control character", lambda: packed({"a\nb": ONE}), "control character U+000A"),
    ("an unknown type", lambda: b"\x81\xa1a\xc1", "a value of the unknown type 0xc1"),
    ("fewer elements", lambda: packed({"a": ONE}).replace(struct.pack(">Q", 4), struct.pack(">Q", 5)),
     "it has 16 bytes, and shape [5] of float32 needs 20"),
    ("2^63 elements", lambda: packed({"a": ONE}).replace(struct.pack(">Q", 4), struct.pack(">Q", 2**63)),
     "overflows 64 bits"),
    ("a size below 0", lambda: packed({"a": ONE}).replace(b"\xcf" + struct.pack(">Q", 4), b"\xd3" + b"\xff" * 8),
     "has a negative size"),
    ("objects", lambda: packed({"a": ONE}).replace(b"float32", b"object_"), "its dtype 'object_' is none that torch"),
    ("an extension that holds no array", lambda: packed({"a": 1})[:-9] + extension(packed([1])),
     "'a' is not a Flax array"),
    ("pieces that are numbers", lambda: packed({"a": {MARK: True, "shape": {"0": 4}, "chunks": {"0": 1}}}),
     "'a' in pieces has values that are neither sizes nor arrays"),
    ("a mark behind other keys", lambda: packed({"a": {"shape": {"0": 4}, MARK: True, "chunks": {"0": ONE}}}),
     "'a' is marked as an array in pieces, not as Flax does"),
    ("a mark of the whole file", lambda: packed({MARK: True, "shape": {"0": 4}, "chunks": {"0": ONE}}),
     "'' is marked as an array in pieces, not as Flax does"),
    ("pieces without axes", lambda: packed({"a": {MARK: True, "shape": {"0": 1}, "chunks": {"0": torch.tensor(1.0)}}}),
     "its pieces have shapes that cannot be joined"),
    ("pieces of other widths", lambda: packed({"a": {MARK: True, "shape": {"0": 3}, "chunks": {
        "0": torch.ones(1, 2), "1": torch.ones(1)}}}), "its pieces have shapes that cannot be joined"),
    ("pieces in another order", lambda: packed({"a": {MARK: True, "shape": {"0": 4}, "chunks": {"1": ONE}}}),
     "'a' in pieces has '1' where 0 is expected"),
    ("pieces that are too few", lambda: packed({"a": {MARK: True, "shape": {"0": 9}, "chunks": {"0": ONE}}}),
     "it has 16 bytes, and shape [9] of float32 needs 36"),
    ("a million dictionaries in one another", lambda: b"\x81\xa1a" * 10**6, "more than 100 dictionaries"),
    ("a million lists in one another", lambda: b"\x81\xa1a" + b"\x91" * 10**6, "more than 100 lists"),
    ("a text that is no UTF-8", lambda: b"\x82\xa1t\xa1\xff" + packed("a") + ARRAY, "a text that is not UTF-8"),
    ("half a letter at the end of a text",
     lambda: b"\x82\xa1t\xda\xff\xff" + b"x" * 65534 + b"\xc3" + packed("a") + ARRAY,
     "a text that is not UTF-8 before byte 65541"),
    ("a text in a list that is no UTF-8", lambda: b"\x82\xa1t\x91\xa3\xed\xa0\x80" + packed("a") + ARRAY,
     "a text that is not UTF-8"),
    ("a number as a key in a list", lambda: b"\x82\xa1t\x91\x81\x01\x02" + packed("a") + ARRAY,
     "a key that is not text"),
    ("a time of three bytes", lambda: b"\x82\xa1t\xc7\x03\xff123" + packed("a") + ARRAY, "a time of 3 bytes"),
    ("a time of three bytes in a list", lambda: b"\x82\xa1t\x91\xc7\x03\xff123" + packed("a") + ARRAY,
     "a time of 3 bytes"),
    ("a long key above 20,000 numbers", lambda: b"\x81\xda\x0b\xb8" + b"k" * 3000 + b"\xde\x4e\x20"
     + b"".join(packed(str(number)) + b"\1" for number in range(20_000)), "PORTING_LIMITS=metadata="),
    ("5 million empty values", lambda: b"\x81\xa1a\xdd" + struct.pack(">I", 5 * 10**6) + b"\xc0" * 5 * 10**6,
     "as much as one command may spend"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, make: Callable[[], bytes], message: str) -> None:
    (tmp_path / "flax_model.msgpack").write_bytes(make())
    refused(tmp_path, message)


# Whether msgpack 1.2 reads it, as flax calls it: text in UTF-8, and text or bytes as keys, whatever is around.
TEXTS = {
    b"\xa1\xff": False,
    b"\xa3\xed\xa0\x80": False,
    b"\xa2\xc3\xa9": True,
    b"\xa0": True,
    b"\xd9\x02\xc3\x28": False,
}
AROUND = {b"%b": True, b"\x91%b": True, b"\x91\x81%b\1": True, b"\x91\x81\xc4\1k%b": True, b"\x91\x81\1%b": False}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("around", AROUND)
def test_what_msgpack_refuses_in_a_skipped_value_is_refused(tmp_path: Path, around: bytes, text: bytes) -> None:
    (tmp_path / "flax_model.msgpack").write_bytes(b"\x82\xa1t" + around % text + packed("a") + ARRAY)
    if TEXTS[text] and AROUND[around]:
        assert {*tensors_of(tmp_path)} == {"a"}
    else:
        refused(tmp_path, "[flax-file]")


def test_an_array_in_many_pieces_is_read_in_any_order(tmp_path: Path) -> None:
    pieces = {str(number): torch.full((number % 3,), float(number)) for number in range(200)}
    count = sum(map(len, pieces.values()))
    raw = packed({"a": {MARK: True, "shape": {"0": count}, "chunks": pieces}})
    (tmp_path / "flax_model.msgpack").write_bytes(raw)
    whole = torch.cat([*pieces.values()])
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("a"), whole)
    (piece,) = checkpoint.pieces("a")
    for start, stop in ((0, 0), (5, 9), (3, 400), (4 * count - 1, 4 * count), (4 * count, 4 * count)):
        assert piece.file.pread(start, stop - start) == whole.numpy().tobytes()[start:stop]


def test_damaged_files_give_errors_of_this_library_alone(tmp_path: Path) -> None:
    torn(zlib.decompress(base64.b85decode(FLAX)), tmp_path / "flax_model.msgpack")

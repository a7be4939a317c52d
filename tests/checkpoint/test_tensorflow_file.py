"""TensorFlow's checkpoints as a source: what TensorFlow wrote, and files that lie."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from porting.checkpoint import open_checkpoint
from porting.checkpoint.tensorflow_file import DTYPES, MAGIC
from tests.checkpoint.hostile import HostileFile, refused, tensors_of, torn
from tests.checkpoint.test_onnx_file import field, varint
from tests.converting.drawing import bits, elements, values

TYPES = {element.dtype: number for number, element in DTYPES.items()}
DATA = "model.ckpt.data-00000-of-00001"
HEADER = field(1, 1)


def block(entries: Mapping[bytes, bytes], compression: int = 0) -> bytes:
    """A block of a table, whose keys share nothing."""
    content = b"".join(
        varint(0) + varint(len(key)) + varint(len(value)) + key + value for key, value in entries.items()
    )
    return with_checksum(content + struct.pack("<II", 0, 1) + bytes([compression]))


def with_checksum(content: bytes) -> bytes:
    """The same with its CRC-32C behind, bit by bit, as LevelDB masks it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return content + struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def table(entries: Mapping[bytes, bytes], *, compression: int = 0) -> bytes:
    """A table of one block."""
    data = block(entries, compression)
    handle = varint(0) + varint(len(data) - 5)
    index = block({b"~": handle})
    ends = varint(0) + varint(0) + varint(len(data)) + varint(len(index) - 5)
    return data + index + ends.ljust(40, b"\0") + MAGIC.to_bytes(8, "little")


def described(shape: tuple[int, ...], kind: int, offset: int, size: int, *more: bytes) -> bytes:
    sizes = b"".join(field(2, field(1, extent)) for extent in shape)
    return field(1, kind) + field(2, sizes) + field(4, offset) + field(5, size) + b"".join(more)


def written(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The files of a checkpoint with these tensors."""
    entries, data = {b"": HEADER}, b""
    for name in sorted(tensors, key=str.encode):
        raw = elements(tensors[name])
        entries[name.encode()] = described(tuple(tensors[name].shape), TYPES[tensors[name].dtype], len(data), len(raw))
        data += raw
    return {"model.ckpt.index": table(entries), DATA: data}


def test_each_type_is_read_to_the_bit(tmp_path: Path) -> None:
    tensors = {f"a/{dtype}": values((7, 3, 2), dtype, 1) for dtype in TYPES}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    for name, raw in written(tensors).items():
        (tmp_path / name).write_bytes(raw)
    assert tensors_of(tmp_path) == {name: bits(tensor) for name, tensor in tensors.items()}


INDEX = (
    "c-n>3Ur19?9Ki8&x9fJ+bep@Ihz2c;nj)L2%Ss~(L-4I0N(`Et-ZGkh+9ox@jJgEULoZ8u$cOAgNiPX|33{+v_F%o}ETc(ABbdIZ"
    "EJ#A?_ao?~^P>yf*!g|V;Cy$vjG4GpVc-&z?O}iTJhwSzr-"
    "2*1a=_PqdedMmz1S1umOqOg+3N_b_?kwf3bz`K`_=yLfgUyLkAxCxG+5`qq(=MI2$!53v=Lsi$K|aHWILND6z<+HnzzDSwf45TxL"
    "deC4)bG%(q<Pg6Ykd~0B>fu%>e2}AcJ7M(`5nBAOe~Jz-"
    "U!g1JEb}DFoW+;ROHz5y&C9b!uW3zyT3R8UgIv2&Dlui9i~GeR}09fP*4XK+v*qEdk(=u!9U>akaWup*kS=Qj`DAc9w<z{qyRD^|"
    "d0{R9QQGm&%_)@a@RC7gYWng65lrJ5>Ip3Bd5KYB!ZXjbLJWut4Q6Am}<f>8JARW&n@$nOZ7;20@4Y^Ij^y#sQqHdOJtuPa(+qp0"
    "y~%F>?qO=N|5cUl68FS^&hirY5P>X#^!zYgQ_C0l`A>T?ds~-vQuqd0!=!I)mV4IPzG0k2DDLYgX9Qd7?2-"
    "<xe5#>iu|>%AZ59rO$6r`IE%}Ue_dkQTfvd%JnvfLY%CCV1DlTm_pn{dI^B`aCTWCPLV<I>dKGf3ULa}hEIW-"
    "`$mO0MG8T#X)3P}r^q1~*FJ2qBB$Cn7*D{|<YYMaB<+Ev)f<z{WQ%o&BB3aZ7%akLdTD!PjLEjRdNt0?uz1hz<$>Pi^;QPgro>p8"
    "%$O0sIG)6c@l(RLnau}JnPePdYu3MO7lH%t*R6cpYG?nw&iuT7d(TkYr{61cQ@8"
)
"""What TensorFlow 2.21.0 wrote for 45 variables, deflated, in base 85."""


def test_what_tensorflow_wrote(tmp_path: Path) -> None:
    (tmp_path / "bert_model.ckpt.index").write_bytes(zlib.decompress(base64.b85decode(INDEX)))
    data = bytes(range(256)) * 8
    (tmp_path / "bert_model.ckpt.data-00000-of-00001").write_bytes(data[:1952])
    checkpoint = open_checkpoint(tmp_path / "bert_model.ckpt")  # as TensorFlow calls it
    shapes = {name: (tensor.shape, str(tensor.element)) for name, tensor in checkpoint.tensors.items()}
    assert shapes == {
        **{f"bert/encoder/layer_{number}/kernel": ((3, 4), "float32") for number in range(40)},
        "b/bf": ((2,), "bfloat16"),
        "b/ids": ((2,), "int64"),
        "scalar": ((), "float32"),
        "empty": ((0, 3), "float32"),
    }
    assert elements(checkpoint.read("b/bf")) == data[:4]  # the first in the order of the names
    assert elements(checkpoint.read("b/ids")) == data[4:20]
    assert elements(checkpoint.read("bert/encoder/layer_0/kernel")) == data[20:68]
    inside = open_checkpoint(f"{tmp_path / 'bert_model.ckpt.index'}#bert/encoder")
    assert elements(inside.read("layer_0/kernel")) == data[20:68]
    assert len(inside.tensors) == 40
    assert tensors_of(tmp_path) == {name: bits(checkpoint.read(name)) for name in checkpoint.tensors}


def one(*more: bytes, kind: int = 1, size: int = 16, offset: int = 0, shape: tuple[int, ...] = (4,)) -> bytes:
    return table({b"": HEADER, b"a": described(shape, kind, offset, size, *more)})


HOSTILE: list[HostileFile] = [
    ("no table", lambda: b"x" * 60, "this does not end as the index of a TensorFlow checkpoint does"),
    ("a few bytes", lambda: b"x", "this does not end as the index of a TensorFlow checkpoint does"),
    ("cut short in front", lambda: one()[20:], "[tensorflow-file]"),
    ("compressed blocks", lambda: table({b"": HEADER}, compression=1), "its blocks are compressed (type 1)"),
    ("a flipped bit", lambda: one().replace(field(1, 1) + field(2, field(2, field(1, 4))),
                                            field(1, 3) + field(2, field(2, field(1, 4)))),
     "the checksum of its block"),
    ("sizes that are more than one message", lambda: one(field(2, field(2, field(1, 1)) * 2), shape=(4,), size=17),
     "it has 17 bytes, and shape [4, 1, 1] of float32 needs 16"),
    ("a size that stands twice", lambda: one(field(2, field(2, field(1, 3) + field(1, 2))), size=17),
     "it has 17 bytes, and shape [4, 2] of float32 needs 32"),
    ("no header", lambda: table({b"a": described((4,), 1, 0, 16)}), "a tensor of file 0 of 0"),
    ("big-endian", lambda: table({b"": HEADER + field(2, 1)}), "its numbers are big-endian"),
    ("10^9 files", lambda: table({b"": field(1, 10**9)}), "a checkpoint of 1000000000 files"),
    ("a file that is not one of them", lambda: one(field(3, 7)), "a tensor of file 7 of 1"),
    ("a missing file", lambda: table({b"": field(1, 2), b"a": described((4,), 1, 0, 16, field(3, 1))}),
     "model.ckpt.data-00001-of-00002"),
    ("names in no order", lambda: table({b"": HEADER, b"b": described((1,), 1, 0, 4), b"a": described((1,), 1, 4, 4)}),
     "its names are not in order"),
    ("a name that is no text", lambda: table({b"": HEADER, b"\xff": described((4,), 1, 0, 16)}), "that is not UTF-8"),
    ("fewer bytes", lambda: one(shape=(5,)), "it has 16 bytes, and shape [5] of float32 needs 20"),
    ("a tensor behind the end", lambda: one(offset=2**40), "do not lie in the file's 16"),
    ("a place below 0", lambda: one(offset=-4), "at byte -4"),
    ("a size of 2^62", lambda: one(shape=(2**62,)), "overflows 64 bits"),
    ("a size below 0", lambda: one(shape=(-1,)), "has a negative size"),
    ("slices", lambda: one(field(7, b"")), "it is stored in slices, which are not read"),
    ("slices with their own entries", lambda: table({
        b"": HEADER, b"\0\xffa": described((2,), 1, 0, 8), b"a": described((4,), 1, 0, 0, field(7, b"")),
     }), "tensor 'a': it is stored in slices, which are not read"),
    ("an unknown type", lambda: one(kind=99), "its type, number 99, is none that torch has"),
    ("two tensors in one place", lambda: table({b"": HEADER, b"a": described((4,), 1, 0, 16),
                                                b"b": described((4,), 1, 0, 16)}), "are also those of 'a'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, make: Callable[[], bytes], message: str) -> None:
    (tmp_path / "model.ckpt.index").write_bytes(make())
    (tmp_path / DATA).write_bytes(bytes(16))
    refused(tmp_path, message)


def test_text_is_no_tensor_and_is_said(tmp_path: Path) -> None:
    entries = {b"": HEADER, b"a": described((4,), 1, 0, 16), b"b": described((), 7, 0, 5)}
    (tmp_path / "model.ckpt.index").write_bytes(table(entries))
    (tmp_path / DATA).write_bytes(bytes(16))
    checkpoint = open_checkpoint(tmp_path)
    assert {*checkpoint.tensors} == {"a"}
    assert [fault.message for fault in checkpoint.warnings] == ["no tensor, and not read: 'b'"]


def test_damaged_files_give_errors_of_this_library_alone(tmp_path: Path) -> None:
    (tmp_path / "bert_model.ckpt.data-00000-of-00001").write_bytes(bytes(1952))
    torn(zlib.decompress(base64.b85decode(INDEX)), tmp_path / "bert_model.ckpt.index")


def test_the_folder_of_a_saved_model_names_that_of_its_variables(tmp_path: Path) -> None:
    (tmp_path / "variables").mkdir()
    (tmp_path / "saved_model.pb").write_bytes(b"x")
    for name, raw in written({"w": torch.ones(2)}).items():
        (tmp_path / "variables" / name.replace("model.ckpt", "variables")).write_bytes(raw)
    refused(tmp_path, f"these folders in it hold weights: 'variables' (pass the one you mean: {tmp_path}/variables)")

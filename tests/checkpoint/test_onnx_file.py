"""ONNX models as a source: what onnx wrote, and files that lie."""

from __future__ import annotations

import base64
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from porting.checkpoint import open_checkpoint
from porting.checkpoint.onnx_file import DTYPES
from tests.checkpoint.hostile import HostileFile, refused, tensors_of, torn
from tests.converting.drawing import bits, elements, values

TYPES = {element.dtype: number for number, element in DTYPES.items()}


def varint(value: int) -> bytes:
    found = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def field(number: int, content: bytes | int) -> bytes:
    """A field of a message of protocol buffers."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


def initialiser(name: str, shape: tuple[int, ...], kind: int, *more: bytes) -> bytes:
    sizes = b"".join(field(1, size) for size in shape)
    return field(5, sizes + field(2, kind) + b"".join(more) + field(8, name.encode()))


def model(*initialisers: bytes) -> bytes:
    """A model whose graph has a node and these initialisers."""
    node = field(1, field(1, b"x") + field(4, b"Identity"))
    return field(1, 8) + field(2, b"maker") + field(7, node + field(2, b"g") + b"".join(initialisers))


def written(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A model with these tensors as raw bytes."""
    return model(
        *(
            initialiser(name, tuple(tensor.shape), TYPES[tensor.dtype], field(9, elements(tensor)))
            for name, tensor in tensors.items()
        )
    )


def outside(location: str, **more: str) -> bytes:
    """Says that the bytes of a tensor lie in a file beside the model."""
    entries = {"location": location, **more}
    pairs = (field(13, field(1, key.encode()) + field(2, value.encode())) for key, value in entries.items())
    return b"".join(pairs) + field(14, 1)


def test_each_type_is_read_to_the_bit(tmp_path: Path) -> None:
    tensors = {str(dtype): values((7, 3, 2), dtype, 1) for dtype in TYPES}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    (tmp_path / "model.onnx").write_bytes(written(tensors))
    assert tensors_of(tmp_path) == {name: bits(tensor) for name, tensor in tensors.items()}


MODEL = (
    "c-mD^Jx{_w7{2SZa2#J}{a7GTaZqm{L>UYTlr+&Oqlt?f&;li;B~qiE=r8a;usHb#9JKXE=;~&oql?i*@G6k#lU(lJ=Xu`e-"
    "aDKsJs`3~B;9J}FJ$QE@R6olj^Vg6Y%>KTEK;aW<yyh?L1lOly}x_kP@W&3%A@s||DC(7xUbjB%iv5IZx;QN&yoLjwdz~@+hw+kB"
    "^p(cp$%$V<H-~e@E;#DUYyk|iv=uDn4<s$3MT>ps#O5Isw$W*mcfWdOABxwH-TP=H7*)#g^P$K{)igq_gI<-5+-"
    "?l?@QoBhb6f&#t;OMmkmZ~obTE(o{k_?8RZ?6Nx?Aikc!Mki^&+$RE|5maHw#YCR^sNBtM;>#=SY9#IFN9Km4~|-"
    "*Ibz9pancH>s#$w7VICO}kll4BL{^JzLYwylq*Rd9Ci$yKxe+Tdjfa$gt2&k%*~VZKorPJH<kw4;zaFx^jvnFqAP7Fyc#81)BW<D"
    "1U&c"
)
"""What onnx 1.23.2 wrote, deflated, in base 85: numbers as raw bytes, numbers that are listed, and one file beside."""

BESIDE = torch.linspace(-1, 1, 600).view(300, 2)


def test_what_onnx_wrote(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(zlib.decompress(base64.b85decode(MODEL)))
    (tmp_path / "model.onnx.data").write_bytes(elements(BESIDE))
    checkpoint = open_checkpoint(tmp_path)
    expected = {
        "lf": torch.tensor([[1.5, -2], [3, 4]]),
        "li": torch.tensor([1, -2, 2**40]),
        "l8": torch.tensor([1, -2, 100], dtype=torch.int8),
        "lh": torch.tensor([0.5, -1.25], dtype=torch.float16),
        "lb": torch.tensor([True, False, True]),
        "ld": torch.tensor(2.25, dtype=torch.float64),
        "lbf": torch.tensor([1.5, -3], dtype=torch.bfloat16),
        "lc": torch.tensor([1 + 2j]),
        "lu": torch.tensor([2**63, 5], dtype=torch.uint64),
        "empty": torch.zeros(0, 3),
        "big": BESIDE,
    }
    assert {*checkpoint.tensors} == {*expected, "enc.w", "ids"}
    assert {name: bits(checkpoint.read(name)) for name in expected} == {n: bits(t) for n, t in expected.items()}
    assert checkpoint.read("enc.w")[0, :2].tolist() == pytest.approx([0.12573022, -0.13210486])


ONE = initialiser("a", (4,), 1, field(9, bytes(16)))

HOSTILE: list[HostileFile] = [
    ("no message", lambda: b"hello, this is text", "a field of the unknown type"),
    ("no graph", lambda: field(1, 8), "0 graphs where an ONNX model has one"),
    ("two graphs", lambda: model(ONE) + field(7, b""), "2 graphs where an ONNX model has one"),
    ("cut short", lambda: model(ONE)[:-3], "it ends in the middle of its header"),
    ("a length of 2^60", lambda: field(1, 8) + varint(7 << 3 | 2) + varint(2**60), "it ends in the middle of its"),
    ("a number of 11 bytes", lambda: model(b"\x28" + b"\xff" * 11), "a number of more than 10 bytes"),
    ("a field of the number 0", lambda: model(ONE) + b"\0\1", "a field of the number 0"),
    ("a location of no meaning behind one", lambda: model(
        initialiser("a", (4,), 1, field(9, bytes(16)), outside("no.data"), field(14, 7))), "no.data"),
    ("a name twice", lambda: model(ONE, ONE), "it is there twice"),
    ("a name that is not text", lambda: model(ONE.replace(b"a", b"\xff")), "a name that is not UTF-8"),
    ("fewer bytes", lambda: model(initialiser("a", (5,), 1, field(9, bytes(16)))), "shape [5] of float32 needs 20"),
    ("a size below 0", lambda: model(initialiser("a", (-1,), 1, field(9, b""))), "has a negative size"),
    ("2^62 elements", lambda: model(initialiser("a", (2**62,), 1, field(9, b""))), "overflows 64 bits"),
    ("text", lambda: model(initialiser("a", (1,), 8, field(6, b"x"))), "its elements are text, which is not read"),
    ("4-bit numbers", lambda: model(initialiser("a", (2,), 22, field(9, b"x"))), "its elements are int4, which is"),
    ("two lists of numbers", lambda: model(initialiser("a", (4,), 1, field(9, bytes(16)), field(4, bytes(16)))),
     "its values are stored in more than one field"),
    ("floats listed as integers", lambda: model(initialiser("a", (4,), 1, field(7, bytes(4)))),
     "its float32 elements are listed as numbers of another type"),
    ("a sparse tensor", lambda: model(field(15, b"")), "export the model with dense initialisers"),
    ("a file above", lambda: model(initialiser("a", (4,), 1, outside("../../secret"))),
     "weights lie in '../../secret', and only files in the model's own directory are read"),
    ("a file of an absolute path", lambda: model(initialiser("a", (4,), 1, outside("/etc/passwd"))),
     "'/etc/passwd', and only files"),
    ("a file in a folder", lambda: model(initialiser("a", (4,), 1, outside("sub/w.bin"))), "lie in 'sub/w.bin'"),
    ("a file by a way round", lambda: model(initialiser("a", (4,), 1, outside("x/../../secret"))), "'../secret'"),
    ("a missing file", lambda: model(initialiser("a", (4,), 1, outside("no.data"))), "no.data"),
    ("the model's own bytes", lambda: model(initialiser("a", (4,), 1, outside("model.onnx", offset="9" * 30))),
     "offset or length in a file beside the model is not a number"),
    ("no length in a file with more bytes", lambda: model(initialiser("a", (4,), 1, outside("model.onnx"))),
     "bytes, and shape [4] of float32 needs 16"),
    ("a place of 33 bits", lambda: model(initialiser("a", (4,), 1, field(9, bytes(16)), field(14, 2**32 + 1))),
     "4294967297 where a number of 32 bits says in which file"),
    ("5 million fields", lambda: model(b"\x08\x01" * 5 * 10**6), "as much as one command may spend"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("make", "message"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, make: Callable[[], bytes], message: str) -> None:
    (tmp_path / "model.onnx").write_bytes(make())
    refused(tmp_path, message)


def test_a_list_with_fewer_numbers_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(model(initialiser("a", (3,), 7, field(7, varint(-1) + varint(5)))))
    refused(tmp_path, "another number of elements is listed than the 3 that are expected")


def test_a_list_of_numbers_takes_little_more_memory_than_its_elements(tmp_path: Path) -> None:
    count = 2_000_000
    (tmp_path / "model.onnx").write_bytes(model(initialiser("a", (count,), 7, field(7, b"\x01" * count))))
    checkpoint = open_checkpoint(tmp_path)
    tracemalloc.start()
    assert bool((checkpoint.read("a", own=True) == 1).all())
    assert tracemalloc.get_traced_memory()[1] < 3 * 8 * count
    tracemalloc.stop()


def test_damaged_files_give_errors_of_this_library_alone(tmp_path: Path) -> None:
    (tmp_path / "model.onnx.data").write_bytes(elements(BESIDE))
    torn(zlib.decompress(base64.b85decode(MODEL)), tmp_path / "model.onnx")

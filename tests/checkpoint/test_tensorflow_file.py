"""TensorFlow's checkpoints as a source: what TensorFlow wrote, and files that lie."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from porting.checkpoint import CheckpointError, open_checkpoint
from porting.checkpoint.tensorflow_file import DTYPES, MAGIC
from porting.converting.conversion import convert
from porting.notation.table import parse_table
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
    return sealed(content + struct.pack("<II", 0, 1), compression)


def masked(raw: bytes) -> int:
    """The CRC-32C of some bytes, bit by bit, as it is stored."""
    crc = 0xFFFFFFFF
    for byte in raw:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def with_checksum(content: bytes) -> bytes:
    """The same with its checksum behind."""
    return content + struct.pack("<I", masked(content))


def sealed(raw: bytes, compression: int = 0) -> bytes:
    """A block with what follows it."""
    return with_checksum(raw + bytes([compression]))


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
        crc = varint(6 << 3 | 5) + masked(raw).to_bytes(4, "little")
        kind = TYPES[tensors[name].dtype]
        entries[name.encode()] = described(tuple(tensors[name].shape), kind, len(data), len(raw), crc)
        data += raw
    return {"model.ckpt.index": table(entries), DATA: data}


def test_each_type_is_read_to_the_bit(tmp_path: Path) -> None:
    tensors = {f"a/{dtype}": values((7, 3, 2), dtype, 1) for dtype in TYPES}
    tensors |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    for name, raw in written(tensors).items():
        (tmp_path / name).write_bytes(raw)
    assert tensors_of(tmp_path) == {name: bits(tensor) for name, tensor in tensors.items()}


INDEX = (
    "c-muNVB=tvV&Y(A5ENrb%}vrz&d(`kU}R)!XlZEWU=-pIV&Y%{VpfGK>>2^4ISNu?{7ho4s8UNffKs8^DqO65;^p~8DG&n=I5#vyl{o`3v%("
    "h+jU{ZRhhk>6@Ue*>aK@0I!4Hz3c`&JvpH;l=fD>HW2`s%wRAUC4=`XocoeV7eN%~1?9DG6``<XOYO!d6NJ~1&1W~LN#a6$wXSTqDo@3;S5#"
    "V943T2!K+nwOlPl3JvnlUSKr6mOuPom!Nangg|f8RQiO5e);=>&rs#2y=)UVv~0P$`|%;G#B9z#j3vqD4!s<Jye8446FVnj6ek~Zc9N5jIb%"
    "V0#eZDV5SFDV2n*c3lmVmjR}(jfeK8pDcAy1ptNY=CZGaSYzm%$6eOK=oy8y{mV_BDhGy6_O<@LV3OdhM1~k<in}Q=C1!pB#TY(BJuqpTgQj"
    "qPo6XY{XtYO0fRPg@0=|o{%VFOZdL7(ZaFs`s+1uAF`P*N1e6*eFR1;PO{g>i)qNCC_Gw_kt?u!jR1P{HTkj#t9C!U3e9;{l(gFs^U_DR@!K"
    "ds!G)IIsg19Nz9Wmw`hGmK~Au8kZFZ7n1-B5VKlwfmtjZtOBeotOnqG2UN)^#LRJm5o8`%sWT8W1C_FHI78XoT&x^zi~>#|4imFbK}jW07n="
    "|RIFDVCHoftxX%Pb(UvY9`PGS*IiUBAH%wg;|N_iQ8;3p#k0~3f5Vjv(1q8UNNflmuJFfcNgFzn=ji`mX%pR<pH<1`0913?h}yP;d9)crO9="
    "Md=Y"
)
ELEMENTS = (
    "c-o!Sces{w9LMnw4V9?KUfJ2%D>@B3WUr9D$zI`>Bw5+nNs=Vl3ArU?XJ;ilJ0VHp^<4eeb^LLAuJbzY^S!R`^PF>j_cO{4DH~+&ZT3HNZ*!"
    "-jgKu@dC>TV^6w)ziNgLXAthQS>&(GcHLC@Ob(2oHOWDvtD?vARsJG$a-S#ftl#odV&cPCZcol<dkYQ^1Y9jiSTYG+?%w|4ebc57!}Ww&<rR"
    "d#D<UuCy;_EmNVR@|*!r}|#M_1(X|Yg)U0Gi#60DQQTPPW7K(eZRZD=R<S%Z%J#GWZ6#D-(Twf$7}Szo}2UjZ}t6sZCHi2tW7&MVl&!PM;Er"
    "IE8W<Wed$gQ4(Di&rzfXz7QHCwO&|KwkN#ZFl?>n-uHyy<ax=Gbd+mBKm>~>h7{eLCNJjAxkMJ0y8N*YIrDPoAd4UPM%&WZ4MBd^Z-eVFU@-"
    "dT{!smR+*G%O*e&8pjF`eI-!Axc`n>n@X-#M9&`Ds8y8qt^qXhKt(u^`P^h=plEOIooAi_)6KSezwTlBHOhWmuNwSe_MV!-}lL%B;ewtj6lJ"
    "WewJ3E!Jio)@41~u|6BHAsewVo3JUHu{m3?CGFXYt?57=9qB}8y08t~vK`yA13R)4UD=sk*p+VV#_sIFp6tcm?8Cn7$Nn5ZcMjwr4yFf(a43"
    "gyI7e_KM{zXAa4g4hJST7>C()CWIfYX>jng@UGdYX1IfrxU#d)011r(iAkPDUcR&tS&K1wcD(pSkPO8P0eR7rm&mnpei$rVbjRC1M)0ZOh`a"
    "*dK}m0YLfdL=g~xlzeLB{wO#S;;L*ZdG!dlG~Nsp=6MfJCzJpa+i`JO72!NRLMO`hAFvM$#5n2DH);UekCK7JfLKhk_VMMq~u{Gk0^Om$zw_"
    "$S29}36H3M?c~Z$!N}g6SR>?C;N+r)K8K>kqCF7MmujB<KFDjX!<Rv99D|to9t4dx|^16~YluT6erjoamyshLNCGRSEPs#gACMo$q$%jflQu"
    "48qPn1kn@~M(3N<LHaxsorGe5vFsC0{G~M#)qq-zxb|$@fZrQ1YXapOpNpWSWv+luTFhtCHW8{H|n%l0THpRPv{iSxWv=GF!>tO6Dl}NAZT|"
    "lfO#}N;03Bf|AT{rl2GZ%oLQQp_zh`G%{0AlE!8VO0s~Nf|4{bQ&5toW(rEu%uGQ^7Bo{(lICU#O0tldf|4w3rl2G(%oLQQrI~_~v@%mrl10"
    "oElw?se1tn>1rl2H?nJFkqo4S7iTOR(3"
)
"""What TensorFlow 2.21.0 wrote for 26 variables, two of them partitioned: the two files, deflated, in base 85."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What TensorFlow wrote, as it calls it."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "bert_model.ckpt.index").write_bytes(zlib.decompress(base64.b85decode(INDEX)))
    elements_file = tmp_path / "saved" / "bert_model.ckpt.data-00000-of-00001"
    elements_file.write_bytes(zlib.decompress(base64.b85decode(ELEMENTS)))
    return tmp_path / "saved" / "bert_model.ckpt"


def test_what_tensorflow_wrote(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    shapes = {name: (tensor.shape, str(tensor.element)) for name, tensor in checkpoint.tensors.items()}
    assert shapes == {
        **{f"bert/encoder/layer_{number}/kernel": ((3, 4), "float32") for number in range(20)},
        "b/bf": ((2,), "bfloat16"),
        "b/ids": ((2,), "int64"),
        "emb/words": ((200, 3), "float32"),
        "emb/cols": ((4, 10), "float32"),
        "scalar": ((), "float32"),
        "empty": ((0, 3), "float32"),
    }
    assert checkpoint.read("b/bf").tolist() == [1.5, -2.0]
    assert checkpoint.read("b/ids").tolist() == [3, -4]
    assert checkpoint.read("scalar").item() == 2.5
    inside = open_checkpoint(f"{saved}.index#bert/encoder")
    assert torch.equal(inside.read("layer_7/kernel"), torch.arange(7.0, 19.0).view(3, 4))
    assert len(inside.tensors) == 20
    assert tensors_of(saved.parent) == {name: bits(checkpoint.read(name)) for name in checkpoint.tensors}


def test_partitioned_variables_are_read_as_one(saved: Path, tmp_path: Path) -> None:
    """Three slices along the first axis, two along the second."""
    words, columns = torch.arange(600.0).view(200, 3), torch.arange(40.0).view(4, 10)
    inside = open_checkpoint(f"{saved}#emb")
    assert torch.equal(inside.read("words"), words)
    assert torch.equal(inside.read("cols"), columns)
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"words [v e]" = "words.weight [e v]"\n"cols" = "cols"\n')
    convert(inside, tmp_path / "out", table, derive=True)
    found = open_checkpoint(tmp_path / "out")
    assert torch.equal(found.read("words.weight"), words.T)
    assert torch.equal(found.read("cols"), columns)


@pytest.mark.parametrize("name", ["emb/words", "scalar"])
def test_elements_with_another_checksum_are_damaged(saved: Path, name: str) -> None:
    file = Path(f"{saved}.data-00000-of-00001")
    found = open_checkpoint(saved)
    at = found.pieces(name)[-1].extent.start
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"the checksum of the record '{name}' does not match its bytes"):
        open_checkpoint(saved).read(name)


def test_an_index_with_another_checksum_is_damaged(saved: Path) -> None:
    file = Path(f"{saved}.index")
    raw = file.read_bytes()
    assert b"layer_1" in raw
    file.write_bytes(raw.replace(b"b/bf", b"b/bg"))
    with pytest.raises(CheckpointError, match="the checksum of the 1081 bytes from byte 0 on does not match them"):
        open_checkpoint(saved)


def one(*more: bytes, kind: int = 1, size: int = 16, offset: int = 0, shape: tuple[int, ...] = (4,)) -> bytes:
    return table({b"": HEADER, b"a": described(shape, kind, offset, size, *more)})


def sliced(
    *slices: tuple[int, int],
    sizes: tuple[int, ...] = (),
    places: tuple[int, ...] = (0, 8),
    left: Sequence[int] = (),
    kinds: tuple[int, ...] = (1, 1),
    nested: int = 0,
) -> bytes:
    """A tensor of 4 elements in two slices: where each begins and how long it is.

    The slices in ``left`` have no entry, and as many of the last ones as ``nested`` says are in slices themselves.
    """
    parts = [field(7, field(1, field(1, start) + field(2, length))) for start, length in slices]
    entries = {b"": HEADER}
    for number, (start, length) in enumerate(slices):
        size = sizes[number] if sizes else length
        key = b"\0a\0\1\1\1" + bytes([0x80 ^ start, 0x80 ^ length])
        if number not in left:
            inner = parts[:1] if number >= len(slices) - nested else []
            entries[key] = described((size,), kinds[number], places[number], 4 * size, *inner)
    return table({**entries, b"a": described((4,), 1, 0, 0, *parts)})


HOSTILE: list[HostileFile] = [
    ("no table", lambda: b"x" * 60, "this does not end as the index of a TensorFlow checkpoint does"),
    ("a few bytes", lambda: b"x", "this does not end as the index of a TensorFlow checkpoint does"),
    ("cut short in front", lambda: one()[20:], "[tensorflow-file]"),
    ("compressed blocks", lambda: table({b"": HEADER}, compression=1), "its blocks are compressed (type 1)"),
    ("a flipped bit", lambda: one().replace(field(1, 1) + field(2, field(2, field(1, 4))),
                                            field(1, 3) + field(2, field(2, field(1, 4)))),
     "the checksum of the "),
    ("sizes that are more than one message", lambda: one(field(2, field(2, field(1, 1)) * 2), shape=(4,), size=17),
     "it has 17 bytes, and shape [4, 1, 1] of float32 needs 16"),
    ("an axis whose name is not text", lambda: one(field(2, field(2, field(1, 1) + field(2, b"\xff"))), shape=(4,)),
     "a text that is not UTF-8"),
    ("a size that stands twice", lambda: one(field(2, field(2, field(1, 3) + field(1, 2))), size=17),
     "it has 17 bytes, and shape [4, 2] of float32 needs 32"),
    ("no header", lambda: table({b"a": described((4,), 1, 0, 16)}), "a tensor of file 0 of 0"),
    ("big-endian", lambda: table({b"": HEADER + field(2, 1)}), "save it again on a little-endian machine"),
    ("10^9 files", lambda: table({b"": field(1, 10**9)}), "a checkpoint of 1000000000 files"),
    ("a file that is not one of them", lambda: one(field(3, 7)), "a tensor of file 7 of 1"),
    ("a missing file", lambda: table({b"": field(1, 2), b"a": described((4,), 1, 0, 16, field(3, 1))}),
     "model.ckpt.data-00001-of-00002"),
    ("names in no order", lambda: table({b"": HEADER, b"b": described((1,), 1, 0, 4), b"a": described((1,), 1, 4, 4)}),
     "its names are not in order"),
    ("a name that is not text", lambda: table({b"": HEADER, b"\xff": described((4,), 1, 0, 16)}), "that is not UTF-8"),
    ("fewer bytes", lambda: one(shape=(5,)), "it has 16 bytes, and shape [5] of float32 needs 20"),
    ("a tensor behind the end", lambda: one(offset=2**40), "do not lie in the file's 16"),
    ("a place below 0", lambda: one(offset=-4), "at byte -4"),
    ("a size of 2^62", lambda: one(shape=(2**62,)), "overflows 64 bits"),
    ("a size below 0", lambda: one(shape=(-1,)), "has a negative size"),
    ("a slice of no axes", lambda: one(field(7, b"")), "a slice of 'a' has another number of axes than that"),
    ("a slice that is missing", lambda: sliced((0, 2), (2, 2), left=[1]), "its slice at [2] is missing"),
    ("slices with a hole", lambda: sliced((0, 2), (3, 1)), "its slices hold 3 of 4 elements"),
    ("slices that overlap", lambda: sliced((0, 2), (1, 2)), "its slices at [0] and [1] share elements"),
    ("a slice beyond the tensor", lambda: sliced((0, 2), (2, 7)), "its slice at [2] of the shape [7] is not in [4]"),
    ("a slice of another type", lambda: sliced((0, 2), (2, 2), kinds=(1, 3)), "at [2] has the type 3, expected 1"),
    ("a slice in slices", lambda: sliced((0, 2), (2, 2), nested=1), "its slice at [2] is in slices itself"),
    ("slices in slices", lambda: sliced((0, 2), (2, 2), nested=2), "its slice at [0] is in slices itself"),
    ("a slice of another shape", lambda: sliced((0, 2), (2, 2), sizes=(2, 1)), "has the shape [1], expected [2]"),
    ("slices in one place", lambda: sliced((0, 2), (2, 2), places=(0, 4)), "are also those of 'a'"),
    ("a slice behind the end", lambda: sliced((0, 2), (2, 2), places=(0, 12)), "does not lie in the 16 bytes of"),
    ("an unknown type", lambda: one(kind=99), "its type, number 99, is none that torch has"),
    ("two tensors in one place", lambda: table({b"": HEADER, b"a": described((4,), 1, 0, 16),
                                                b"b": described((4,), 1, 0, 16)}), "are also those of 'a'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, make: Callable[[], bytes], message: str) -> None:
    (tmp_path / "model.ckpt.index").write_bytes(make())
    (tmp_path / DATA).write_bytes(bytes(16))
    refused(tmp_path, message)


def test_a_variable_without_elements_may_be_partitioned(tmp_path: Path) -> None:
    parts = [field(7, field(1, field(1, start) + field(2, 2)) + field(1, b"")) for start in (0, 2)]
    keys = [b"\0a\0\1\1\2" + bytes([0x80 ^ start, 0x82, 0x80, 0x7F]) for start in (0, 2)]
    entries = {
        b"": HEADER,
        **{key: described((2, 0), 1, 0, 0) for key in keys},
        b"a": described((4, 0), 1, 0, 0, *parts),
    }
    (tmp_path / "model.ckpt.index").write_bytes(table(entries))
    (tmp_path / DATA).write_bytes(b"")
    assert open_checkpoint(tmp_path).read("a").shape == (4, 0)


def test_text_is_no_tensor_and_is_said(tmp_path: Path) -> None:
    entries = {b"": HEADER, b"a": described((4,), 1, 0, 16), b"b": described((), 7, 0, 5)}
    (tmp_path / "model.ckpt.index").write_bytes(table(entries))
    (tmp_path / DATA).write_bytes(bytes(16))
    checkpoint = open_checkpoint(tmp_path)
    assert {*checkpoint.tensors} == {"a"}
    assert [fault.message for fault in checkpoint.warnings] == ["no tensor, and not read: 'b'"]


def test_damaged_files_give_errors_of_this_library_alone(tmp_path: Path) -> None:
    (tmp_path / "bert_model.ckpt.data-00000-of-00001").write_bytes(bytes(3544))
    torn(zlib.decompress(base64.b85decode(INDEX)), tmp_path / "bert_model.ckpt.index")


def test_the_folder_of_a_saved_model_names_that_of_its_variables(tmp_path: Path) -> None:
    (tmp_path / "variables").mkdir()
    (tmp_path / "saved_model.pb").write_bytes(b"x")
    for name, raw in written({"w": torch.ones(2)}).items():
        (tmp_path / "variables" / name.replace("model.ckpt", "variables")).write_bytes(raw)
    refused(tmp_path, f"these folders in it hold weights: 'variables' (pass the one you mean: {tmp_path}/variables)")

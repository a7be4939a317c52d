"""Checkpoints of Orbax as a source: what Orbax wrote, what tensorstore writes, and files that lie."""

from __future__ import annotations

import base64
import builtins
import gc
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tensorstore
import torch

from porting.checkpoint import CheckpointError, open_checkpoint
from porting.checkpoint.layout import ElementType
from porting.checkpoint.orbax_file import _Rows
from porting.comparing.digests import digest
from porting.converting.conversion import convert
from porting.notation.table import parse_table
from tests.checkpoint.hostile import refused, tensors_of, torn
from tests.converting.drawing import bits, values
from tests.hub_server import Hub

NAMES = {element.dtype: element.title for element in ElementType}
TYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
         torch.float32, torch.float64, torch.complex64]  # fmt: skip


def metadata(names: Mapping[str, str], *, database: bool = True, zarr3: bool = False, complete: bool = False) -> str:
    """What ``_METADATA`` says of values of these types; of newer versions that all chunks are stored."""
    tree = {
        str(tuple(name.split("."))): {
            "key_metadata": [{"key": key, "key_type": 2} for key in name.split(".")],
            "value_metadata": {"value_type": kind, "skip_deserialize": kind in {"None", "Dict"}},
        }
        for name, kind in names.items()
    }
    known = {"store_array_data_equal_to_fill_value": True} if complete else {}
    return json.dumps({"tree_metadata": tree, "use_ocdbt": database, "use_zarr3": zarr3, **known})


def write(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    database: bool = True,
    zarr3: bool = False,
    rows: int = 1 << 16,
) -> None:
    """Write tensors as Orbax does, in chunks of so many rows; those of zarr are not compressed."""
    folder.mkdir(exist_ok=True)
    (folder / "_METADATA").write_text(metadata(dict.fromkeys(tensors, "jax.Array"), database=database, zarr3=zarr3))
    for name, tensor in tensors.items():
        base = {"driver": "file", "path": f"{folder}/"}
        place = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        spec: dict[str, Any] = {
            "driver": "zarr3" if zarr3 else "zarr",
            "metadata": {} if zarr3 else {"compressor": None},
            "kvstore": place if database else {"driver": "file", "path": f"{folder}/{name}/"},
        }
        chunk = [min(rows, size) or 1 if axis == 0 else size or 1 for axis, size in enumerate(tensor.shape)]
        array = tensorstore.open(
            spec,
            create=True,
            dtype=tensorstore.dtype(NAMES[tensor.dtype]),
            shape=list(tensor.shape),
            chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk) if chunk else None,
        ).result()
        raw = (
            tensor.contiguous().view(torch.uint8)
            if tensor.numel() and tensor.ndim
            else tensor.reshape(-1).view(torch.uint8)
        )
        array.write(raw.numpy().reshape(-1).view(array.dtype.numpy_dtype).reshape(tensor.shape)).result()


def written(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The files of a checkpoint with these tensors."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, tensors)
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("database", [False, True])
def test_each_type_is_read_to_the_bit(tmp_path: Path, database: bool, zarr3: bool) -> None:
    tensors = {f"a.{NAMES[dtype]}": values((7, 3, 2), dtype, 1) for dtype in TYPES}
    tensors |= {"empty": torch.zeros(0, 3), "a.b.scalar": torch.tensor(2.5)}
    write(tmp_path, tensors, database=database, zarr3=zarr3, rows=2)
    assert tensors_of(tmp_path) == {name: bits(tensor) for name, tensor in tensors.items()}
    inside = open_checkpoint(f"{tmp_path}#a")
    assert bits(inside.read("float32")) == bits(tensors["a.float32"])


EMBEDDED = (
    "P)h>@6aWAK2mk;8Apn8_H0($L0012Z000jF003`eWMXtLUrj|+K}11RLA_H=Z-X!l{VRwIorI=-?6ljYo%aW-DssVHGeTgF*+wh=`;yRgs8w"
    "NN5;w<ww%?Oqjv*7G$dMrhhVU^shO-FslItkG^Un<HZhh@DHV8c`j02D0x<s2?HXEDx099QKZBr*y_$(84ohFl|NYNlkQ1akvOcgebt<53@H"
    "Ij+qAeu)5Tw3TAnK(Ej<`>1q-<ZC^*ZmU_)HmqvKpC{9Pm+wn?7_FKmzygMi~nm_OsgRd&N4LQIA{n58s`VYB=u__y&oP0?=5neN{buE=B3a"
    "$?9LJha(~$rwLuqbC77Wrw{3k__T%~hZp}DlBc1TDxve=v(x@g--7cC`_bLv~(hXxdXgdcQ`2!MAK>a_!5vdG{B1yM=GUF+A0HRe#h~a`zfR"
    "ilTMuG1YD8Yr;Nu`9}{W~G4EI#kj)0I-qH&9Ch1QY-O00;m803iU`NGH^50001S0000K0001QV`O4<FKuCNX=Y_}bS`gWWMXvVxoxFY$N&Y5"
    "8e8@MDuiuhVldy|_4A|6dDpjBF0lOLzH^?TfurHjb$u2_ureiv6n)E7gVZ#ORO95tRFkBn)I>uIOCw`53nNnt!(<~fV+%%*(oSZsPG*L{f)3"
    "RWhhIxDFx|-g0sv4;0|XQR000O8001EXe2VYljsXAwi2(orC;$KeZ)0R)bT4EtIb|?qW;kUtV_{`9Vq#@sF*rFgGd4IfH8?S2GBz_f0f_;2{"
    "tVk7-iZMK000000003fwJ-f(Km%<H09I2(Hc*Sx0WdS&%*;S^)7mp4GlO#r+&pUcn+V&#Xd$w}+)Q>9-}gx0c(nWTl9(L`1&IXmKkgJc05$+"
    "N02+~(5qTI~cXx`lHQSp@F-+{MwH0qhE#;<2nLN~5`iYY%UfUj8U%}(xDLf!g3V4D6!XW|>f<K<lV#txZz87u7uGSf5F$_^8*Y0#>$X0hhEZ"
    "M>sB-w8Fw&k)d!;qpfA^C1JjwZvPN8ZIlf4}rgNDzY%qG~|WG1*uMRU~&bv)gr{n#+(QSh8))Zr65KD@T*uoJu>FTCs~EQ<sG$Hy8i^|KWgH"
    "s_CyJe<l6Z|H<*s(LXKzDf;L9=l{Qo>7pRRoReyxbabm1h5{H>0wW-Bf|;72H<v=taGZ0UivX@jlozt-y$%YCW8lt<Lj&U2(V$m-`+M@~fS8"
    "!_0_B{SIw<3u?F_4Fab%XT4t!RXzPxJrSR6pXaEN+2Y?dM|<#!2af%O+Za0yUL0|XQR000O8001EX1rpor9{~UW8UX+RH~;_uZ)0R)bT4mXW"
    "MXtKaB^>BWpi_1FfU{;HZU_`HaIjhHZ(D0WidErFlIDmG&40YGc#mjF*9W~0U812{tVk7-WmY_000000003fwJ-f(rULZ`0AkH7C{Syg17Jj"
    "EW{QoEeB0!VcEiKmLZ4WinPp+zK?lrxa>G$U_71k)0Ss;_Gz&~jxX+?lZb=mEF(HPJla2nm!`WFI!)A@U(qmU?^Wp5e=j+YWaCVKR*uK6zYC"
    "8|QehRtvC1KcCAG%*}u_0$~?h$r|-O3RJ8D9{J2ljS6slj+eDG|y<nNTK*M5M7-AFHF&Ef(#kZD}YuBW6nGge(XNOS4Y70|f^H28uuh04Nn2"
    "08PsSg%c5FXz;Ivg<$~wl>oX7MV8&HE<59;43(7;?{KnA87fZ3-ZG1XX~3&hWxl+c@=@b}f{B9*^M&M?q~u9fB#IN9`xR<XO9KQH00008000"
    "0X0Cl!*AU^>B06GBx05|{u0B>VtVstNWV`O4<E^u;hV`X!5UobCZFE=nZIb}08IXN|AHZd?|HfA_6V=y!|G&VD1H8weAW&t_@#r_Q2Al^Cw0"
    "000000001D77#BV7vnL2mmrpGBAKS=`%0`GeT$@NhSi?nomnMDahWm-FAqqwJA`Rhlv*cDK<6Y<uXfj1jqVuvv&=#Ej$cPeN;w~r^WU_0U?l"
    "(;lNP9K-}w-m`2c>^xGru&I_3~Z<Ugo?n}v6fuxMl+n>nc?mJZ#zP)+fh9-?YSBmfr<G9PMtb9AHZMi#)zqm8)UY;Z>d7FSpxHn}|6Ui@&Rj"
    ">@ZV3`AEF>P(Rlb6yjMw;!puxaV>o191Wn4hI_JeuaMo*XDZXfT6CumTzYYXu$vP0Is?6A@)7s8$ROq{G4tfCVA}bQy{)yIEa!#!DHJmBqj_"
    "$sJCXIzt6#80?14%;IHc3DbdBtIB+NHRYqm0S6NYcj*hsF-ggjER-luF`n&)P)h>@6aWAK2mk;8ApjSJh>^7b006K6001}u003`eWMXtLZ)0"
    "R)bS`jmZ)0V1b6+qoWG^>0WivN9GBRX2F*aj2W;SDCGC4RmF*h=1Hf1wrHf8~^08jr6+aTVs00000000000VuUE{UE!o1OW1hAR&M!>N7C!*"
    "$g3@6ni&8+G8b=gh*Ck<N*wWIO+(3tZf02fq%JhOAd9Z^wSHDXI0#q_3bhYugqq1?5^bL0|~+L>YS&ZUi>Ae(>_>R&2(AnDH6c1Ho8w&ub<="
    "9I)vxet?ZVDJRKMY_(ouif*cx%1SgsEDF6bBW_5B4#4rQ}03i!t!sI2B$ZFnm(NbpM<65>*O9KQH000080000X0DOw?;*J3T0Eqzr05|{u0B"
    ">VtVstNWV`O4<E^u;hV`X!5UobCZFJ&`hF)}bVVPs=5HDhFAGh;O~H)1(rG+|~pIWjRaF#(AIcK!_8Al``q0000000001D77#BU_b+H3jkJA"
    "L^e>1(*ZCu-OS8Dbko{1A~S<?3*0<v_nQdYzi1({!Q4!C6yNtq-*~k9^OBey2nC4*@;~krIRG{QHUJutml1gwTz7YhwKdzDOEFCBtF;wxMlI"
    "#0NSQp;TKb8TDPG$iT3^BA;3+&HPYQT~0m2~y5Q0CR&SJ=syS^7~!>-mDW-$y=B-ieAWyn@{KP=h87$n(l_qOG-EyIwaG9meHG>#_2phw=tL"
    "w~>YOGprd5Ta^8(lOas2vsC^G_%`vp_<E(BUrL+%Wl_pS1U)8+?+}~ms+ulAyb!yB{vuU|Nr5DS*q!;B!4CS)&I%y&(S|E{wezB{OA9_is_;"
    "t!<>_9pmcPr7lr~DRRSX*aDthdpf{I7&~Th{or?gjNR$_{=)DdKi(}x<i$eqA*wLU@efxXz>42D+@&e_YmpUlpob3#&X>nwhunv4ymA<@c`B"
    ")r4!ElIrIc%09E#-F!Xo2+?KX3_9O928D0~7!N00;m803iT^0W|DL0RR9U1^@sL00000000000001h0RR910B>VtVstNGO+{2eL_t(RP)h*<"
    "6ay3h000O8001EX*+?hUYXATMaR2}S6aWAK0000000000fB|&@003`eWMXtLZDDR{W@U49E^lLGVsubT0Rj{Q6aWAK2mk;8Apm@e@8XUD004"
    ";r001Ze0000000000004ji5&{4KZ)0R)bT4EtIb|?qW;kUtV_{`9Vq#@sF*rFgGd4IfH8?S2GBz_fP)h*<6ay3h000O8001EX1rpor9{~UW8"
    "UX+RH~;_u0000000000fC1(M003`eWMXtLZ)0R)bS`jmZ)0V1b6+qoWG^-_GhsG3G&43dF=S;iIA$<rG-Wh1H83+XWMVNhWi?Ps0Rj{Q6aWA"
    "K2mk;8Apmu@ZXiDa0024x001}u0000000000004jiTLl0BZ)0R)bT4mXWMXtKaB^>BWpi_1FfU{;H!wFjWivK8IW=N7F)(E|W;iipFf=tZHZ"
    "x;2HaTTxP)h*<6ay3h000O8001EX7lnwCwEzGBumAu6H~;_u0000000000fC2CZ003`eWMXtLZ)0R)bS`jmZ)0V1b6+qoWG^>0WivN9GBRX2"
    "F*aj2W;SDCGC4RmF*h=1Hf1wrHfB&u0Rj{Q6aWAK2mk;8Apm@e@8XUD004;r001}u0000000000004ji`v(93Z)0R)bT4mXWMXtKaB^>BWpi"
    "_1FfU{;Wiw+jGB7q_WMeTkV`O48V>L53VmV?oVP-cuGBGkSP)h{{000002LJ~EZ2|xQ-w6N!000"
)
"""What Orbax 0.12.8 wrote for a tree of arrays, a number, a text, a None and an empty dictionary: a zip, in base 85."""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What Orbax wrote: the folder of an item in that of a step."""
    with zipfile.ZipFile(io.BytesIO(base64.b85decode(EMBEDDED))) as archive:
        archive.extractall(tmp_path / "7")
    (tmp_path / "7" / "_CHECKPOINT_METADATA").write_text("{}")
    return tmp_path / "7" / "ocdbt"


def test_what_orbax_wrote(saved: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert {name: (tensor.shape, str(tensor.element)) for name, tensor in checkpoint.tensors.items()} == {
        "layers.0": ((2,), "float32"),
        "layers.1": ((2, 2), "int32"),
        "params.dense.bias": ((4,), "bfloat16"),
        "params.dense.kernel": ((3, 4), "float32"),
        "step": ((), "int64"),
    }
    assert [fault.message for fault in checkpoint.warnings] == ["no tensor, and not read: 'empty', 'name', 'nothing'"]
    assert checkpoint.read("params.dense.bias").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.equal(checkpoint.read("params.dense.kernel"), torch.arange(12.0).view(3, 4))
    assert checkpoint.read("layers.1").tolist() == [[0, 0], [0, 0]]
    assert checkpoint.read("step").item() == 3
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"kernel [i o]" = "weight [o i]"\n"bias" = "bias"\n')
    convert(f"{saved}#params.dense", tmp_path / "out", table, derive=True)
    found = open_checkpoint(tmp_path / "out")
    assert torch.equal(found.read("weight"), torch.arange(12.0).view(3, 4).T)
    refused(saved.parent, "these folders in it hold weights: 'ocdbt'", f"pass the one you mean: {saved}")
    refused(saved / "manifest.ocdbt", "this is one file of an Orbax checkpoint", f"pass its directory, {saved}")


def test_rows_of_any_chunks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = values((50, 6), torch.float32, 3)
    write(tmp_path, {"w": tensor}, rows=7)
    monkeypatch.setattr("porting.checkpoint.orbax_file.PIECE", 100)
    checkpoint = open_checkpoint(tmp_path)
    assert bits(checkpoint.read("w")) == bits(tensor)


def refused_metadata(folder: Path, text: str, *messages: str) -> None:
    (folder / "_METADATA").write_text(text)
    refused(folder, *messages)


def test_metadata_that_lies_is_refused(saved: Path) -> None:
    refused_metadata(saved, "{", "not valid JSON")
    refused_metadata(saved, "[]", "it has no tree_metadata")
    refused_metadata(saved, '{"tree_metadata": {"a": 1}}', "the entry 'a' has no key_metadata and value_metadata")
    refused_metadata(saved, metadata({"params/../x": "jax.Array"}), "has no key_metadata and value_metadata")
    refused_metadata(
        saved, metadata({"nothere": "jax.Array"}), "tensor 'nothere': tensorstore cannot read it: NOT_FOUND"
    )
    twice = json.loads(metadata({"step": "scalar"}))
    twice["tree_metadata"]["again"] = twice["tree_metadata"]["('step',)"]
    refused_metadata(saved, json.dumps(twice), "the entry 'again' is named as another one, 'step'")
    (saved / "_METADATA").unlink()
    refused(saved, "holds a database of an Orbax checkpoint and no _METADATA")


def test_it_is_not_read_from_the_hub(saved: Path, hub: Hub) -> None:
    hub.add("org/name", {"_METADATA": (saved / "_METADATA").read_bytes()})
    for weights in (False, True):
        with pytest.raises(CheckpointError, match="is read on this machine only \\(download the directory"):
            open_checkpoint("org/name", weights=weights)


def test_links_to_the_outside_are_refused(saved: Path, tmp_path: Path) -> None:
    file = next((saved / "d").iterdir())
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(saved, "a link to", "outside the checkpoint")
    assert tensors_of_followed(saved)["step"] == bits(torch.tensor(3))
    file.unlink()
    file.symlink_to(tmp_path)
    refused(saved, "a link to", "outside the checkpoint")


def tensors_of_followed(folder: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(folder, follow_links=True)
    return {name: bits(checkpoint.read(name)) for name in checkpoint.tensors}


@pytest.mark.parametrize("database", [False, True])
@pytest.mark.parametrize("held", [0, 4096])
def test_files_that_are_exchanged_or_written_to_make_no_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, database: bool
) -> None:
    """tensorstore opens files by itself, when it reads: another one at the place of a chunk was read as the chunk."""
    monkeypatch.setattr("porting.checkpoint.orbax_file.MOST_HELD", held)
    folder = tmp_path / "a"
    write(folder, {"w": torch.full((64, 64), 7.0)}, database=database)
    chunk = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    (tmp_path / "secret").write_bytes(bytes(chunk.stat().st_size))
    checkpoint = open_checkpoint(folder)
    shutil.copy(chunk, tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "link").rename(chunk)
    if held:
        assert torch.equal(checkpoint.read("w"), torch.full((64, 64), 7.0)), "the file that was opened"
    else:
        with pytest.raises(CheckpointError):
            checkpoint.read("w")
    chunk.unlink()
    shutil.copy(tmp_path / "moved", chunk)
    for few in (1, 64):
        monkeypatch.setattr("porting.checkpoint.orbax_file.FEW", few)
        checkpoint = open_checkpoint(folder)
        with chunk.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\1")
        with pytest.raises(CheckpointError, match=r"\[file-changed\]|cannot read it"):
            digest(checkpoint)
        shutil.copy(tmp_path / "moved", chunk)


def test_tensorstore_sees_a_private_folder_that_goes_with_the_checkpoint(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    checkpoint = open_checkpoint(saved)
    (private,) = (tmp_path / "temporary").iterdir()
    assert private.stat().st_mode & 0o777 == 0o700
    assert checkpoint.read("step").item() == 3
    assert all(path.is_symlink() or path.is_dir() for path in private.rglob("*"))
    del checkpoint
    gc.collect()
    assert [*(tmp_path / "temporary").iterdir()] == []
    assert (saved / "_METADATA").is_file()


def test_folders_in_one_another_are_bounded(saved: Path) -> None:
    deep = saved
    for _ in range(120):
        deep /= "d"
    deep.mkdir(parents=True)
    refused(saved, "more than 100 folders in one another")


def test_chunks_of_wide_rows_are_decoded_at_most_three_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of rows asked for all chunks that its rows go through."""
    monkeypatch.setattr("porting.checkpoint.orbax_file.PIECE", 1 << 12)
    tensor = values((64, 64), torch.float32, 3)
    write(tmp_path, {"w": tensor}, rows=64)
    checkpoint = open_checkpoint(tmp_path)
    (piece,) = checkpoint.pieces("w")
    pieces: list[int] = []
    real = _Rows.decoded

    def counted(self: _Rows, start: int) -> Iterator[memoryview]:
        for one in real(self, start):
            pieces.append(len(one))
            yield one

    monkeypatch.setattr(_Rows, "decoded", counted)
    raw = tensor.numpy().tobytes()
    for at in range(len(raw) - 4, -1, -1020):
        assert piece.file.pread(at, 4) == raw[at : at + 4]
    assert sum(pieces) <= 3 * len(raw)


def zarr(folder: Path, settings: str) -> Path:
    """A checkpoint of one array, w, with these settings and no chunks."""
    (folder / "w").mkdir(parents=True)
    (folder / "w" / ".zarray").write_text(settings)
    (folder / "_METADATA").write_text(metadata({"w": "jax.Array"}, database=False))
    return folder


ZARR = {
    "chunks": [4], "compressor": None, "dtype": "<f4", "fill_value": None, "filters": None, "order": "C", "shape": [4],
    "zarr_format": 2,
}  # fmt: skip


def test_what_is_no_file_in_it_is_refused(tmp_path: Path) -> None:
    for number, name in enumerate((".zarray", "0")):
        folder = zarr(tmp_path / str(number), json.dumps(ZARR))
        (folder / "w" / name).unlink(missing_ok=True)
        os.mkfifo(folder / "w" / name)
        refused(folder, "where a file of weights or settings should be")


def test_settings_that_are_large_or_deep_are_not_given_to_tensorstore(tmp_path: Path) -> None:
    refused(zarr(tmp_path / "deep", "[" * 4000 + "]" * 4000), "tensor 'w': its .zarray is not valid JSON")
    refused(zarr(tmp_path / "large", json.dumps(ZARR) + " " * (1 << 20)), "w/.zarray: 1048", "at most 1048576 can")


def test_an_array_of_countless_chunks_is_refused(tmp_path: Path) -> None:
    few = zarr(tmp_path / "few", json.dumps({**ZARR, "shape": [1 << 20], "chunks": [1 << 10]}))
    assert tuple(open_checkpoint(few).tensors["w"].shape) == (1 << 20,)
    many = zarr(tmp_path / "many", json.dumps({**ZARR, "shape": [1 << 21], "chunks": [1]}))
    refused(many, "PORTING_LIMITS=objects=")


def test_what_is_decompressed_is_charged(tmp_path: Path) -> None:
    array = tensorstore.open(
        {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/w/"}},
        create=True, dtype=tensorstore.float32, shape=[1 << 20, 1 << 10],
    ).result()  # fmt: skip
    assert array.shape == (1 << 20, 1 << 10)
    (tmp_path / "_METADATA").write_text(metadata({"w": "jax.Array"}, database=False))
    refused(tmp_path, "as much as one command may spend")


def test_without_tensorstore_the_error_says_what_to_install(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without(name: str, *args: object, **kwargs: object) -> object:
        if name == "tensorstore":
            raise ModuleNotFoundError(name)
        return usual(name, *args, **kwargs)  # type: ignore[arg-type]  # as they were given

    monkeypatch.setattr(builtins, "__import__", without)
    refused(saved, "needs the package tensorstore, which is not installed (pip install 'porting[orbax]')")


@pytest.mark.parametrize("zarr3", [False, True])
def test_a_lost_chunk_is_not_read_as_zeros(tmp_path: Path, zarr3: bool) -> None:
    """Orbax says since 2024 that it stores all chunks, those of zeros too; before, one that is absent has zeros."""
    tensor = values((6, 3), torch.float32, 1)
    write(tmp_path, {"w": tensor}, database=False, zarr3=zarr3, rows=2)
    (tmp_path / "w" / ("c/1/0" if zarr3 else "1.0")).unlink()
    assert bits(open_checkpoint(tmp_path).read("w")[2:4]) == bits(torch.zeros(2, 3))
    (tmp_path / "_METADATA").write_text(metadata({"w": "jax.Array"}, database=False, zarr3=zarr3, complete=True))
    with pytest.raises(CheckpointError, match="tensor 'w': tensorstore cannot read it: NOT_FOUND"):
        open_checkpoint(tmp_path).read("w")


def test_settings_in_a_damaged_database_are_told_from_a_file_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, {"w": values((6, 3), torch.float32, 1)})
    for file in tmp_path.rglob("d/*"):
        file.write_bytes(file.read_bytes().replace(b'"zarr_format"', b'"zarr\x01format"'))
    refused(tmp_path, "its .zarray, as manifest.ocdbt and the files in d/ hold it, is not valid", "fetch all of it")


def test_a_damaged_chunk_is_one_line(saved: Path) -> None:
    for file in saved.rglob("d/*"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="tensorstore cannot read it"):
        tensors_of(saved)


def test_damaged_metadata_gives_errors_of_this_library_alone(saved: Path) -> None:
    torn((saved / "_METADATA").read_bytes(), saved / "_METADATA", count=60)

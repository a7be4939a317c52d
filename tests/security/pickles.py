"""State dicts that are none: archives that lie, and pickles that would run something if they were unpickled."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from tests.checkpoint.test_bin_file import (
    HOSTILE,
    WEIGHTS,
    RunsCode,
    changed,
    long1,
    ordinary,
    pickle_of,
    saved,
    tiny,
    with_pickle,
    zipped,
)
from tests.checkpoint.test_inner_path import HOSTILE_INSIDE
from tests.security.rows import Row, Words, file_row, folder_row, inside_row

BIN = "pytorch_model.bin"

CALLS = [
    # (what, module, name): callables with which known scanners and allow lists were got round
    ("os.system", "os", "system"),
    ("posix.system", "posix", "system"),
    ("builtins.eval", "builtins", "eval"),
    ("builtins.exec by its Python 2 name", "__builtin__", "exec"),
    ("builtins.getattr", "builtins", "getattr"),
    ("importlib.import_module", "importlib", "import_module"),
    ("subprocess.Popen", "subprocess", "Popen"),
    ("runpy._run_code", "runpy", "_run_code"),
    ("timeit.timeit", "timeit", "timeit"),
    ("pip.main", "pip", "main"),
    ("pty.spawn", "pty", "spawn"),
    ("bdb.Bdb.run", "bdb", "Bdb.run"),
    ("asyncio's subprocess", "asyncio.unix_events", "_UnixSubprocessTransport._start"),
    ("operator.methodcaller", "operator", "methodcaller"),
    ("functools.partial", "functools", "partial"),
    ("codecs.decode", "codecs", "decode"),
    ("copyreg._reconstructor", "copyreg", "_reconstructor"),
    ("shutil.rmtree", "shutil", "rmtree"),
    ("socket.create_connection", "socket", "create_connection"),
    ("webbrowser.open", "webbrowser", "open"),
    ("numpy's runstring", "numpy.testing._private.utils", "runstring"),
    ("numpy.load", "numpy", "load"),
    ("torch.load", "torch.serialization", "load"),
    ("torch.hub.load", "torch.hub", "load"),
    ("torch's bytes to storage, which unpickles again", "torch.storage", "_load_from_bytes"),
    ("torch.utils' bottleneck", "torch.utils.bottleneck.__main__", "run_cprofile"),
    ("torch.jit._script.unpackage", "torch.jit.unsupported_tensor_ops", "execWrapper"),
    ("torch._inductor's compiler", "torch._inductor.codecache", "compile_file"),
    ("torch.fx, which compiles source", "torch.fx.graph_module", "reduce_graph_module"),
    ("torch._dynamo's guards", "torch._dynamo.guards", "GuardBuilder.get"),
    ("torch.distributed's RPC", "torch.distributed.rpc.internal", "_run_function"),
    ("a dotted name under an allowed module", "collections", "OrderedDict.__init_subclass__"),
    ("an allowed name under another module", "torch._utils.os", "system"),
    ("a module of the attacker's", "evil", "OrderedDict"),
]

OPCODES = [
    # (what, pickle): each ends in a state dict that would look like one
    ("INST", b"(S'touch ran'\nios\nsystem\n.", "the opcode 0x53"),
    ("OBJ", b"(cos\nsystem\nX\x09\x00\x00\x00touch rano.", "a call of 'os.system'"),
    ("OBJ with an allowed class", b"(ccollections\nOrderedDict\no.", "the opcode 0x6f"),
    ("NEWOBJ", b"\x80\x02ccollections\nOrderedDict\n)\x81.", "the opcode 0x81"),
    ("NEWOBJ_EX", b"\x80\x04ccollections\nOrderedDict\n)}\x92.", "the opcode 0x92"),
    ("EXT1", b"\x80\x02\x82\x01.", "the opcode 0x82"),
    ("PERSID", b"Pos.system\n.", "the opcode 0x50"),
    ("PROTO after the first", b"\x80\x02\x80\x63}.", "protocol 99"),
    ("BUILD on a class", b"\x80\x02ccollections\nOrderedDict\n}b.", "attributes for a class"),
    ("STACK_GLOBAL from the memo", b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94h\x00h\x01\x93.", "'os.system'"),
    ("STACK_GLOBAL without strings", b"\x80\x04K\x01K\x02\x93.", "a global whose name is not a string"),
    ("REDUCE of a string", b"\x80\x02X\x02\x00\x00\x00os)R.", "a call of a string"),
    (
        "a persistent id that is a class",
        b"\x80\x02ccollections\nOrderedDict\nQ.",
        "a class where a storage is expected",
    ),
    ("a name that ends in a NUL", b"cos\0\nsystem\n.", "a call of 'os\\x00.system'"),
    ("a name with a newline in it", b"\x80\x04\x8c\x03o\ns\x8c\x06system\x93.", "a call of 'o\\ns.system'"),
    (
        "a name with a bidirectional mark",
        "\x80\x04".encode("latin-1") + b"\x8c\x05o\xe2\x80\xaes\x8c\x06system\x93.",
        "a call of 'o\\u202es.system'",
    ),
    ("a stack that never ends", b"\x80\x02" + b"(" * 2_000_000 + b".", "too few values"),
    ("a list in itself", b"\x80\x02]q\x00h\x00a.", "it holds a list"),
    ("a dictionary in itself", b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.", "the key 'a' holds a dictionary"),
    (
        "a billion laughs",
        b"\x80\x02]q\x00" + b"".join(b"](" + b"h%c" % n * 10 + b"eq%c" % (n + 1) for n in range(30)) + b".",
        "it holds a list",
    ),
    ("tuples doubled a hundred times", b"\x80\x02)" + b"q\x00h\x00\x86" * 100 + b".", "it holds a tuple"),
    (
        "a whole number of a megabyte",
        b"\x80\x02}X\x01\x00\x00\x00a\x8b\x00\x00\x10\x00" + b"\x7f" * (1 << 20) + b"s.",
        "the opcode 0x8b",
    ),
]


def calling(module: str, name: str) -> Callable[[], bytes]:
    """An archive whose pickle calls this with a command."""
    spelled = b"".join(b"\x8c" + bytes([len(one)]) + one for one in (module.encode(), name.encode()))
    return lambda: with_pickle(b"\x80\x04" + spelled + b"\x93\x8c\x09touch ran\x85R.")


def stacked() -> bytes:
    """A good pickle with another behind it."""
    return with_pickle(pickle_of() + pickle.dumps(RunsCode(), 2))


def broken_checksum() -> bytes:
    """An archive with which a scanner gives up and a lenient reader does not."""
    raw = with_pickle(pickle.dumps({"a": RunsCode()}, 2))
    where = raw.index(b"PK\x01\x02") + 16
    return raw[:where] + bytes(4) + raw[where + 4 :]


def flagged() -> bytes:
    """An entry said to be encrypted, which it is not."""
    raw = bytearray(saved(WEIGHTS))
    at = raw.index(b"PK\x01\x02") + 8
    raw[at] |= 1
    return bytes(raw)


def renamed_inside() -> bytes:
    """The small header in front of an entry calls it otherwise than the table of contents."""
    raw = saved(WEIGHTS)
    at = raw.index(b"data/0")
    return raw[:at] + b"data/7" + raw[at + 6 :]


def two_structures() -> bytes:
    return zipped({"x/data.pkl": pickle_of(), "y/data.pkl": pickle.dumps(RunsCode(), 2)})


def bomb() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x/data.pkl", "w") as entry:
        for _ in range(256):
            entry.write(bytes(1 << 20))
    return buffer.getvalue()


def one_range_twice() -> bytes:
    """Two entries of one range: an archive that unpacks to more than it holds."""
    raw = saved(WEIGHTS)
    places = [at for at in range(len(raw)) if raw[at : at + 4] == b"PK\x01\x02"]
    names = {raw[at + 46 : at + 46 + struct.unpack("<H", raw[at + 28 : at + 30])[0]]: at for at in places}
    zero = next(at for name, at in names.items() if name.endswith(b"data/0"))
    one = next(at for name, at in names.items() if name.endswith(b"data/1"))
    return raw[: one + 42] + raw[zero + 42 : zero + 46] + raw[one + 46 :]


def a_directory(folder: Path) -> None:
    (folder / BIN).mkdir()


def linked(folder: Path) -> None:
    (folder / BIN).symlink_to("/etc/passwd")


def good(folder: Path) -> None:
    torch.save(ordinary(), folder / BIN)


def ranks(*numbers: str) -> Callable[[Path], Words]:
    """What some ranks saved, looked at together."""

    def make(folder: Path) -> Words:
        for number in numbers:
            torch.save(WEIGHTS, folder / f"m{number}.pt")
        return ["inspect", "m{r}.pt"]

    return make


def with_rank(second: Callable[[Path], object]) -> Callable[[Path], Words]:
    """The first of two ranks, and something in the place of the other."""

    def make(folder: Path) -> Words:
        torch.save(WEIGHTS, folder / "m0.pt")
        second(folder / "m1.pt")
        return ["inspect", "m{r}.pt"]

    return make


RANKS = [
    ("no rank at all", "no name in '.' has a number in the place of {r}", ranks()),
    ("a rank that is missing", "there is no rank 1", ranks("0", "2")),
    ("a rank that is there twice", "rank 1 is 'm01.pt' and 'm1.pt'", ranks("0", "1", "01")),
    ("rank 999999999", "rank 999999999, where at most 4096 are read", ranks("0", "999999999")),
    (
        "a rank that is a link that leads out",
        "outside the checkpoint",
        with_rank(lambda p: p.symlink_to("/etc/passwd")),
    ),
    ("a rank that is a FIFO", "found a named pipe", with_rank(os.mkfifo)),
]

PICKLES: list[Row] = [
    *(file_row(".bin", BIN, what, told, make) for what, make, told in HOSTILE),
    *(Row(of="ranks", what=what, told=told, code=2, make=make) for what, told, make in RANKS),
    *(inside_row("inner paths", what, told, make) for what, make, told in HOSTILE_INSIDE),
    file_row(".bin", BIN, "a zip bomb of 256 MB", "is compressed (", bomb),
    file_row(".bin", BIN, "no byte", "this is an empty file", lambda: b""),
    file_row(".bin", BIN, "all zeros", "zero bytes", lambda: bytes(4096)),
    file_row(
        ".bin", BIN, "a Git-LFS pointer", "run `git lfs pull`", lambda: b"version https://git-lfs.github.com/spec/v1\n"
    ),
    file_row(
        ".bin", BIN, "a backslash in an entry", "climbs out", lambda: zipped({"x\\..\\y": b"", "x/data.pkl": b"."})
    ),
    file_row(
        ".bin", BIN, "a drive letter in an entry", "climbs out", lambda: zipped({"C:/y": b"", "x/data.pkl": b"."})
    ),
    file_row(".bin", BIN, "an entry said to be encrypted", "is encrypted", flagged),
    file_row(".bin", BIN, "an entry of another name inside", "is not where the table of contents says", renamed_inside),
    file_row(".bin", BIN, "two structures", "2 entries named data.pkl", two_structures),
    file_row(".bin", BIN, "two entries of one range", "is not where the table of contents says", one_range_twice),
    file_row(".bin", BIN, "a wrong checksum over code", "is not where the table of contents says", broken_checksum),
    file_row(".bin", BIN, "code behind a good pickle", "bytes behind its end", stacked),
    file_row(
        ".bin",
        BIN,
        "a record of 65 MB for a structure",
        "more than any state dict needs",
        lambda: changed(pickle=bytes(65 << 20)),
    ),
    file_row(
        ".bin",
        BIN,
        "a tensor of rank 1000",
        "1000 dimensions; torch handles 64",
        lambda: with_pickle(tiny(b"(" + b"K\x01" * 1000 + b"t", b"(" + b"K\x01" * 1000 + b"t")),
    ),
    file_row(
        ".bin",
        BIN,
        "an offset beyond 64 bits",
        "overflow",
        lambda: with_pickle(tiny(long1(2**63) + b"\x85", b"K\x00\x85")),
    ),
    *(
        file_row(".bin", BIN, f"a pickle that calls {what}", f"{module}.{name}'", calling(module, name))
        for what, module, name in CALLS
    ),
    *(
        file_row(".bin", BIN, f"the opcode {what}" if what.isupper() else what, told, lambda raw=raw: with_pickle(raw))  # type: ignore[misc]  # mypy: a default of a lambda
        for what, raw, told in OPCODES
    ),
    folder_row(".bin", "a directory in its place", "found a directory", a_directory),
    folder_row(".bin", "a FIFO in its place", "found a named pipe", lambda folder: os.mkfifo(folder / BIN)),
    folder_row(".bin", "a link that leads out", "outside the checkpoint", linked),
    folder_row(".bin", "views, ties, expanded, transposed, of no elements", "", good, code=0),
]

"""Fuzz what reads strangers' bytes, guided by coverage.

    python -m scripts.fuzz                      every target, as often as EXECUTIONS says
    python -m scripts.fuzz header --runs 5000   one of them

Each target runs in a process of its own, from seeds that are made here.  An exception that is not the library's own is
a crash, and so is an input that takes more than SECONDS of a processor, hangs, or takes more than MEGABYTES; it is
printed and kept.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SECONDS, HANGS, MEGABYTES, LONGEST = 1, 60, 2048, 4096

EXECUTIONS = {
    "header": 200_000,
    "index": 200_000,
    "archive": 50_000,
    "arrays": 50_000,
    "pickle": 200_000,
    "metadata": 100_000,
    "orbax": 100_000,
    "config": 100_000,
    "yaml": 50_000,
    "table": 50_000,
    "name": 200_000,
    "axes": 200_000,
    "expression": 100_000,
    "torch": 100_000,
    "gguf": 50_000,
    "flax": 50_000,
    "onnx": 50_000,
    "tensorflow": 50_000,
    "hdf5": 10_000,
}
"""How often ``make fuzz`` runs each target."""

Target = Callable[[bytes], object]


def header(raw: bytes) -> object:
    """The header of a safetensors file, alone and inside a file."""
    from porting.checkpoint.files import InMemory
    from porting.checkpoint.safetensors_file import parse_header, read_header

    quietly(lambda: parse_header(raw, where="f", name="f"))
    length = len(raw).to_bytes(8, "little")
    return quietly(lambda: read_header(InMemory(length + raw + bytes(16), "f"), name="f"))


def index(raw: bytes) -> object:
    """The index of a sharded checkpoint."""
    from porting.checkpoint.index import parse_index

    return quietly(lambda: parse_index(raw, name="i", where="i"))


def archive(raw: bytes) -> object:
    """A whole ``.bin``."""
    from porting.checkpoint.bin_file import read_bin
    from porting.checkpoint.files import InMemory

    return quietly(lambda: read_bin(InMemory(raw, "f"), name="f"))


def arrays(raw: bytes) -> object:
    """A whole ``.npz``; the headers that are read here are those that numpy reads."""
    import numpy as np

    from porting.checkpoint.files import InMemory
    from porting.checkpoint.npz import Npz

    def read() -> object:
        found = Npz().read(InMemory(raw, "f"), name="f")
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            for name, info in found.tensors.items():
                # Elements that are damaged are an error here when they are read, and one of numpy's already now.
                with contextlib.suppress(zipfile.BadZipFile, zlib.error), archive.open(f"{name}.npy") as member:
                    version = np.lib.format.read_magic(member)
                    heads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                    if version in heads and heads[version](member)[0] != info.shape:
                        raise AssertionError("numpy reads another shape")
        return found

    return quietly(read)


def pickle(raw: bytes) -> object:
    """The structure inside a ``.bin``: a pickle."""
    from porting.checkpoint.files import InMemory
    from porting.checkpoint.layout import ChecksummedRange
    from porting.checkpoint.state_dict import read_tensors
    from porting.checkpoint.state_pickle import StateMachine

    source = InMemory(raw, "f")
    records = {key: ChecksummedRange(start=0, stop=stop, crc=None, name=key) for key, stop in (("0", 48), ("1", 24))}
    return quietly(lambda: read_tensors(StateMachine(source, 0, len(raw)).load(), records, source, name="f"))


def metadata(raw: bytes) -> object:
    """The ``.metadata`` of a distributed checkpoint."""
    from porting.checkpoint.dcp_metadata import read_metadata
    from porting.checkpoint.files import InMemory

    return quietly(lambda: read_metadata(InMemory(raw, "f")))


def config(raw: bytes) -> object:
    """A ``config.json``."""
    from porting.checkpoint.config import num_labels, parse_config

    return quietly(lambda: num_labels(parse_config(raw, where="c")))


def yaml(raw: bytes) -> object:
    """A config in YAML; what is read here PyYAML reads too, as the same values."""
    from yaml import safe_load

    from porting.checkpoint.config import parse_config

    def read() -> object:
        found = parse_config(raw, where="c.yaml")
        if repr(safe_load(raw)) != repr(found):  # NaN is not equal to itself
            raise AssertionError("PyYAML reads other values")
        return found

    return quietly(read)


def table(raw: bytes) -> object:
    """A table."""
    from porting.notation import parse_table

    return quietly(lambda: parse_table(text(raw)))


def name(raw: bytes) -> object:
    """A pattern, a blank, and a name that it is to read; what it reads it must spell again."""
    from porting.notation.name import Name

    pattern, _, spelled = text(raw).partition(" ")

    def read() -> object:
        parsed = Name.parse(pattern)
        if Name.parse(str(parsed)) != parsed:
            raise AssertionError("a pattern is not what it says of itself")
        found = parsed.read(spelled)
        if found is not None and parsed.read(parsed.spell(found)) is None:
            raise AssertionError("a name is not read again")
        return found

    return quietly(read)


def axes(raw: bytes) -> object:
    """The axes of a term."""
    from porting.notation.axes import leaves, parse_axes

    return quietly(lambda: list(leaves(parse_axes(text(raw), 0))))


def expression(raw: bytes) -> object:
    """An expression over a config."""
    from porting.notation.expression import Expression

    return quietly(lambda: Expression.parse(text(raw)).evaluate({"a": 768, "b": 12, "c": 0, "d": -0.5}))


def torch(raw: bytes) -> object:
    """A whole ``.bin``, read here and by torch: what is read here torch reads too, with the same numbers."""
    from tests.checkpoint.test_bin_against_torch import compare, with_checksums

    memory = Path("/dev/shm")  # noqa: S108 - a file in memory, where there is such a folder
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        return compare(with_checksums(bytearray(raw)), Path(folder) / "pytorch_model.bin")


def orbax(raw: bytes) -> object:
    """The ``_METADATA`` of an Orbax checkpoint; tensorstore reads its arrays."""
    from porting.checkpoint.orbax_file import _tree

    return quietly(lambda: _tree(raw, "f"))


def container(name: str) -> Target:
    """A target that reads a whole file of a container, which has no target of its own."""

    def read(raw: bytes) -> object:
        from porting.checkpoint.files import InMemory
        from porting.checkpoint.registry import CONTAINERS
        from porting.checkpoint.tensorflow_file import _Index

        class Unchecked(_Index):
            def _require_checksum(self, *block: int) -> None: ...

        (one,) = (one for one in CONTAINERS if one.name == name)
        source = InMemory(raw, "f")
        return quietly(lambda: Unchecked(source).entries() if name == "tensorflow" else one.read(source, name="f"))

    return read


TARGETS: dict[str, Target] = {
    one.__name__: one
    for one in (
        header,
        index,
        archive,
        arrays,
        pickle,
        metadata,
        config,
        yaml,
        table,
        name,
        axes,
        expression,
        torch,
        orbax,
    )
}
FILES = ("gguf", "flax", "onnx", "tensorflow", "hdf5")
TARGETS |= {name: container(name) for name in FILES}


def quietly(read: Callable[[], object]) -> object:
    """What ``read`` gives; None when it refuses in the way that it should."""
    from porting.errors import PortingError
    from porting.notation.faults import NotationError

    try:
        return read()
    except (PortingError, NotationError) as error:
        if not str(error):
            raise AssertionError("a refusal without a word") from error
        return None


def text(raw: bytes) -> str:
    """Bytes as a text."""
    return raw.decode("utf-8", "replace")


YAML = (
    b"model_type: llama\nnorm_eps: 1.0e-05\nrope: {theta: .inf, 'on': null, n: -0x1f}\n"
    b'names:\n- "a\\u00e9"\n- |\n  two\n  lines\n- [1_000, 1:30, yes, ~]\n# a comment\n'
)
CONFIG = b'{"model_type": "x", "id2label": {"0": "a"}, "num_labels": 3, "f": -Infinity, "n": null}'
ORBAX = (
    b'{"tree_metadata": {"(0)": {"key_metadata": [{"key": "a"}], "value_metadata": {"value_type": "jax.Array"}}},'
    b' "use_ocdbt": false, "use_zarr3": true}'
)
ALONE = {
    "config": (CONFIG,),
    "orbax": (ORBAX,),
    "yaml": (YAML, b"? a\n: &x !!int 3\nb: *x\n<<: {c: 2020-01-01}\n---\n...\n"),
}
"""Seeds that no program writes."""


def seeds(target: str) -> Iterable[bytes]:
    """Good inputs, from which bad ones are made."""
    match target:
        case "header":
            entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
            yield json.dumps({"a": entry, "__metadata__": {"format": "pt"}}).encode()
            two = {"a": {**entry, "dtype": "U8", "shape": [16]}, "b": {**entry, "data_offsets": [16, 16], "shape": [0]}}
            yield json.dumps(two).encode() + b"   "
        case "index":
            yield b'{"metadata": {"total_size": 12}, "weight_map": {"a": "s-1.safetensors", "b": "s-2.safetensors"}}'
        case "archive" | "pickle":
            yield from _states(target)
        case "arrays":
            yield from _arrays()
        case "torch":
            from tests.checkpoint.test_bin_against_torch import states

            yield from states()
        case "metadata":
            yield from _described()
        case _ if target in ALONE:
            yield from ALONE[target]
        case "table":
            yield from (path.read_bytes()[:LONGEST] for path in sorted((ROOT / "mappings").glob("*.toml")))
            yield b'[[rule]]\nsource = ["a [t e]", "b [0 e]"]\ntarget = "c [t e]"\nfold = true\nscale = "a ** -0.5"\n'
        case "name":
            yield b"layer.{i}.{p:query,key,value}.{w:weight/gamma,bias/beta} layer.11.key.gamma"
            yield b"a.{2*i+1}.{*rest} a.3.b.c"
            yield b"{p:a,ab}b{q:x,bx} abbx"
        case "axes":
            yield from (b"(g (m|1|1) d) e", b"(_2|t) e", b"(h p d) e 1", b"r=0 e")
        case _ if target in FILES:
            yield _file_of(target)
        case _:
            yield from (b"a // b ** -2 + (3 - c) * d", b"-a / 0.5")


def _states(target: str) -> Iterable[bytes]:
    import torch

    shared = torch.arange(12.0)
    for value in ({"a": shared.view(3, 4), "b": shared, "c": shared.bfloat16()}, {"n": {"a": shared}}, [shared]):
        for protocol in (2, 4):
            buffer = io.BytesIO()
            torch.save(value, buffer, pickle_protocol=protocol)
            if target == "archive":
                yield buffer.getvalue()
                continue
            with zipfile.ZipFile(buffer) as held:
                yield held.read(next(one for one in held.namelist() if one.endswith("data.pkl")))
    if target == "archive":
        buffer = io.BytesIO()
        torch.save({"a": shared}, buffer, _use_new_zipfile_serialization=False)
        yield buffer.getvalue()


def _file_of(container: str) -> bytes:
    """A good file of a container."""
    from tests.checkpoint import test_flax_msgpack, test_gguf, test_onnx_file, test_tensorflow_file

    if container == "hdf5":
        import h5py
        import numpy as np

        buffer = io.BytesIO()
        with h5py.File(buffer, "w") as file:
            file["layer/w"] = np.ones((2, 3), "f4")
            file.create_dataset("b", data=np.ones(4, ">f8"), chunks=(2,), compression="gzip")
        return buffer.getvalue()
    if container == "onnx":  # the recorded one has a file beside it
        import torch

        return test_onnx_file.written({"a": torch.ones(2, 3), "b": torch.arange(5)})
    written = {"gguf": test_gguf.PACKAGE, "flax": test_flax_msgpack.FLAX, "tensorflow": test_tensorflow_file.INDEX}
    return zlib.decompress(base64.b85decode(written[container]))


def _arrays() -> Iterable[bytes]:
    import numpy as np

    for save in (np.savez, np.savez_compressed):
        for one in (
            np.arange(6.0).reshape(2, 3),
            np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
            np.zeros((0, 2)),
        ):
            buffer = io.BytesIO()
            save(buffer, a=one, b=np.float32(1))
            yield buffer.getvalue()


def _described() -> Iterable[bytes]:
    """What torch says of a checkpoint, with and without a memo."""
    import io
    import pickle
    from pickle import Pickler

    from torch import Size
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks = [ChunkStorageMetadata(Size((at, 0)), Size((2, 3))) for at in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties(), Size((4, 3)), chunks)
    places = {MetadataIndex("a", (at, 0), at // 2): _StorageInfo("__0_0.distcp", 9 * at, 18) for at in (0, 2)}
    whole = Metadata({"a": tensor, "n": BytesStorageMetadata()}, {"a": ("a",)}, places, None, "1.0.0")
    yield pickle.dumps(whole, protocol=4)
    file = io.BytesIO()
    pickler = Pickler(file, protocol=2)
    pickler.fast = True
    pickler.dump(whole)
    yield file.getvalue()


# -------------------------------------------------------------------------------------------------------- the processes


def fuzz(target: str, runs: int, folder: Path, seed: int) -> None:
    """Fuzz one target in this process; never returns."""
    import atheris  # type: ignore[import-untyped]  # it has no types

    with atheris.instrument_imports(include=["porting"]):
        import porting.checkpoint.bin_file
        import porting.checkpoint.config
        import porting.checkpoint.npz
        import porting.checkpoint.registry
        import porting.notation  # noqa: F401  # what is imported here is followed
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, one in enumerate(seeds(target)):
        (corpus / str(number)).write_bytes(one)
    longest = max(LONGEST, *(path.stat().st_size for path in corpus.iterdir()))
    options = [
        f"-runs={runs}",
        f"-timeout={HANGS}",
        f"-rss_limit_mb={MEGABYTES}",
        f"-max_len={longest}",
        f"-seed={seed}",
        f"-artifact_prefix={folder}/crash-",
        str(corpus),
    ]
    mutators = {"custom_mutator": _archive_changed} if target == "torch" else {}
    atheris.Setup([sys.argv[0], *options], lambda raw: timed(TARGETS[target], raw), **mutators)
    atheris.Fuzz()


def _archive_changed(raw: bytes, most: int, seed: int) -> bytes:
    """Half of the time one of the suite's own changes, of opcodes and entries; else one of the fuzzer's."""
    import atheris

    from tests.checkpoint.test_bin_against_torch import CHANGES

    draw = random.Random(seed)  # noqa: S311 - a fuzzer's draws
    if raw and draw.random() < 0.5:
        with contextlib.suppress(Exception):  # they expect an archive that is still whole
            return draw.choice(CHANGES)(raw, draw)[:most]
    changed: bytes = atheris.Mutate(raw, most)
    return changed


def timed(target: Target, raw: bytes) -> None:
    """Run a target, and call it a crash when it takes more than SECONDS of a processor; others may be at work."""
    begun = time.process_time()
    target(raw)
    if time.process_time() - begun > SECONDS:
        raise AssertionError(f"it took more than {SECONDS} s")


def run(target: str, runs: int, seed: int) -> bool:
    """Fuzz one target in a process of its own and say what came of it; whether nothing crashed."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-"))
    command = [sys.executable, "-m", "scripts.fuzz", target, "--runs", str(runs), "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--inside", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False, errors="replace"
    )
    found = re.findall(r"#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)", done.stderr)
    seconds = re.findall(r"Done \d+ runs in (\d+) second", done.stderr)
    crashes = sorted(folder.glob("crash-*"))
    if done.returncode == 0 and found and not crashes:
        executions, covered, features, kept = found[-1]
        said = f"{int(executions):>9,} executions  {covered:>5} edges  {features:>6} features  {kept:>5} inputs kept"
        print(f"{target:<12} {said}  {seconds[-1]:>4} s  no crash", flush=True)
        return True
    print(f"{target}: CRASHED\n{done.stderr[-4000:]}")
    for path in crashes:
        print(f"{path}: {base64.b64encode(path.read_bytes()).decode()}")
    return False


def main() -> int:
    """Fuzz what was asked for."""
    parser = argparse.ArgumentParser(description="Fuzz what reads strangers' bytes.")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], help="all, if none is named")
    parser.add_argument("--runs", type=int, help="executions of each, in place of the fixed numbers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        fuzz(given.targets[0], given.runs, given.inside, given.seed)
    os.nice(10)
    results = [run(one, given.runs or EXECUTIONS[one], given.seed) for one in given.targets or TARGETS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())

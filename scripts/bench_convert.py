"""How fast checkpoints are converted, against ``cp`` and what else one might do; and in what memory.

    python -m scripts.bench_convert speed --size 4GB                  # the table of docs/benchmarks.md
    python -m scripts.bench_convert speed --size 256MB --rounds 3     # a look
    python -m scripts.bench_convert memory --sizes 1GB,4GB,16GB       # the peaks

All peers take turns within each round, on a warm page cache; what they wrote is removed outside of the time.  Nothing
is flushed to the disk except where that is said.
"""

from __future__ import annotations

import gc
import hashlib
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import torch
import typer
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from porting.checkpoint import open_checkpoint
from porting.checkpoint.safetensors_file import new_header
from porting.cli.convert import parse_size
from porting.converting.conversion import convert
from porting.notation.table import Table, parse_table

HIDDEN = 1024
PIECE = 1 << 18
SHARDS = 4
SYNC = ["sync"]

HEAD = '[mapping]\nname = "bench"\n[tensors]\n'
RENAMED = HEAD + '"model.{*rest}" = "decoder.{*rest}"\n'
PERMUTED = (
    HEAD
    + """
"model.layers.{i}.{p:query,key,value}.weight [(h d) e]" = "layers.{i}.qkv.weight [(h p d) e]"
"model.layers.{i}.{w:up,down}.weight [a b]" = "layers.{i}.{w:up,down}.weight [b a]"
"model.layers.{i}.output.weight" = "layers.{i}.output.weight"
[sizes]
h = 16
"""
)

app = typer.Typer(add_completion=False)
Peer = Callable[[Path], object]


class Hash(Protocol):
    """What digests bytes."""

    def update(self, data: memoryview, /) -> None:
        """Digest some more."""


def write_checkpoint(folder: Path, nbytes: int) -> None:
    """A checkpoint of about so many bytes of float32, in four files; its layers hold the same random numbers."""
    torch.manual_seed(0)
    shapes = dict.fromkeys(("query", "key", "value", "output"), (HIDDEN, HIDDEN))
    shapes |= {"up": (4 * HIDDEN, HIDDEN), "down": (HIDDEN, 4 * HIDDEN)}
    layer = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    count = max(SHARDS, round(nbytes / sum(one.nbytes for one in layer.values())))
    folder.mkdir(parents=True)
    home: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        numbers = range(count * shard // SHARDS, count * (shard + 1) // SHARDS)
        held = {f"model.layers.{i}.{name}.weight": one for i in numbers for name, one in layer.items()}
        header = new_header(held, {"format": "pt"}, where=file)
        with (folder / file).open("wb") as out:
            out.write(header.prefix)
            for name in header.offsets:
                out.write(held[name].numpy().data)
        home |= dict.fromkeys(held, file)
    (folder / "config.json").write_text("{}")
    index = '{"metadata": {}, "weight_map": {' + ", ".join(f'"{name}": "{file}"' for name, file in home.items()) + "}}"
    (folder / "model.safetensors.index.json").write_text(index)


# ---------------------------------------------------------------------------------------------------------------- peers


def shards(source: Path) -> list[Path]:
    """Its files of weights."""
    return sorted(source.glob("*.safetensors"))


def cp(source: Path, out: Path) -> None:
    """What everything is compared with."""
    subprocess.run(["cp", "-r", str(source), str(out)], check=True)  # noqa: S607  # the system's own


def copy_file_range(source: Path, out: Path, threads: int) -> None:
    """A new header, then every byte by the kernel: no digest, no plan, no safety."""
    out.mkdir()

    def one(path: Path) -> None:
        with path.open("rb") as old, (out / path.name).open("wb") as new:
            size = os.fstat(old.fileno()).st_size
            done = 0
            while done < size:
                done += os.copy_file_range(old.fileno(), new.fileno(), 8 << 20)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, shards(source)))


def by_hand(source: Path, out: Path, piece: int, digest: Callable[[], Hash] | None = None) -> None:
    """Reading and writing in pieces of one size, digested on the way or not."""
    out.mkdir()
    buffer = memoryview(bytearray(piece))
    for path in shards(source):
        state = digest() if digest is not None else None
        with path.open("rb", buffering=0) as old, (out / path.name).open("wb", buffering=0) as new:
            while count := old.readinto(buffer):
                if state is not None:
                    state.update(buffer[:count])
                new.write(buffer[:count])


def streaming_cast(source: Path, out: Path, threads: int) -> None:
    """The values cast to bfloat16 in pieces of 256 KB, file by file: no digest, no plan, no safety."""
    out.mkdir()

    def one(path: Path) -> None:
        torch.set_num_threads(1)
        raw = torch.empty(PIECE, dtype=torch.uint8)
        cast = torch.empty(PIECE // 4, dtype=torch.bfloat16)
        view, result = raw.numpy().data, cast.view(torch.uint8).numpy().data
        with path.open("rb", buffering=0) as old, (out / path.name).open("wb", buffering=0) as new:
            old.seek(8 + int.from_bytes(old.read(8), "little"))
            while count := old.readinto(view):
                numbers = count // 4
                cast[:numbers].copy_(raw[: 4 * numbers].view(torch.float32))
                new.write(result[: 2 * numbers])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, shards(source)))


def load_all_save_all(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Everything in memory, then everything on the disk."""
    out.mkdir()
    held = {name: one for path in shards(source) for name, one in load_file(path).items()}
    if dtype is not None:
        held = {name: one.to(dtype) for name, one in held.items()}
    save_file({f"decoder.{name}": one for name, one in held.items()}, out / "model.safetensors")


def shard_by_shard(source: Path, out: Path) -> None:
    """One file after the other, as most scripts do."""
    out.mkdir()
    for path in shards(source):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            save_file({f"decoder.{name}": file.get_tensor(name) for name in names}, out / path.name)


def ours(source: Path, out: Path, table: Table, threads: int, dtype: torch.dtype | None = None) -> None:
    """``porting convert``, digests and the record included."""
    convert(source, out, table, threads=threads, dtype=dtype)


def peers(source: Path) -> dict[str, Peer]:
    """What is measured, by name."""
    renamed, permuted = parse_table(RENAMED), parse_table(PERMUTED)
    return {
        "cp": lambda out: cp(source, out),
        "copy_file_range, one thread": lambda out: copy_file_range(source, out, 1),
        "copy_file_range, two threads": lambda out: copy_file_range(source, out, 2),
        "porting convert, renamed, one thread": lambda out: ours(source, out, renamed, 1),
        "porting convert, renamed, two threads": lambda out: ours(source, out, renamed, 2),
        "porting convert, permuted, one thread": lambda out: ours(source, out, permuted, 1),
        "porting convert, permuted, two threads": lambda out: ours(source, out, permuted, 2),
        "porting convert, to bfloat16, one thread": lambda out: ours(source, out, renamed, 1, torch.bfloat16),
        "porting convert, to bfloat16, two threads": lambda out: ours(source, out, renamed, 2, torch.bfloat16),
        "read and write, 256 KB": lambda out: by_hand(source, out, PIECE),
        "read and write, 8 MB": lambda out: by_hand(source, out, 8 << 20),
        "read and write, 256 KB, xxh3": lambda out: by_hand(source, out, PIECE, xxhash.xxh3_128),
        "read and write, 256 KB, SHA-256": lambda out: by_hand(source, out, PIECE, hashlib.sha256),
        "cast to bfloat16, 256 KB, one thread": lambda out: streaming_cast(source, out, 1),
        "cast to bfloat16, 256 KB, two threads": lambda out: streaming_cast(source, out, 2),
        "safe_open, save shard by shard": lambda out: shard_by_shard(source, out),
        "load everything, save everything": lambda out: load_all_save_all(source, out, None),
        "the same with .to(bfloat16)": lambda out: load_all_save_all(source, out, torch.bfloat16),
    }


def with_sync(source: Path) -> dict[str, Peer]:
    """The same with all of it on the disk at the end."""

    def cp_and_sync(out: Path) -> None:
        cp(source, out)
        subprocess.run(SYNC, check=True)  # the system's own

    renamed = parse_table(RENAMED)
    return {"cp, then sync": cp_and_sync, "porting convert, flushed": lambda out: ours(source, out, renamed, 2)}


@contextmanager
def no_fsync() -> Iterator[None]:
    """Nothing is flushed to the disk."""
    real = os.fsync
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # put back below
    try:
        yield
    finally:
        os.fsync = real


@dataclass(frozen=True)
class Taken:
    """What one run took: seconds by the clock, and of the processor, all threads and child processes together."""

    seconds: float
    processor: float


def processor() -> float:
    """Seconds that this process and those that it started have taken of the processor."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def alternate(chosen: Mapping[str, Peer], rounds: int, root: Path) -> dict[str, list[Taken]]:
    """What each peer took in each round, after one that is not counted."""
    taken: dict[str, list[Taken]] = {name: [] for name in chosen}
    for number in range(rounds + 1):
        for name, peer in chosen.items():
            gc.collect()
            begun, used = time.perf_counter(), processor()
            peer(root / "out")
            found = Taken(time.perf_counter() - begun, processor() - used)
            shutil.rmtree(root / "out")
            if number:
                taken[name].append(found)
    return taken


def print_table(taken: Mapping[str, Sequence[Taken]], against: str, nbytes: int) -> None:
    """Medians, the ratios round by round, the speed in bytes of the input, and the processor's seconds."""
    print(f"\n| | median s | min | max | x {against} | GB/s | processor s |\n|---|---:|---:|---:|---:|---:|---:|")
    for name, runs in taken.items():
        pairs = zip(runs, taken[against], strict=True)
        ratio = statistics.median(mine.seconds / theirs.seconds for mine, theirs in pairs)
        seconds = sorted(run.seconds for run in runs)
        middle, used = statistics.median(seconds), statistics.median(run.processor for run in runs)
        shown = f"{middle:.3f} | {seconds[0]:.3f} | {seconds[-1]:.3f} | {ratio:.2f} | {nbytes / middle / 1e9:.2f}"
        print(f"| {name} | {shown} | {used:.3f} |")


Folder = Annotated[Path | None, typer.Option(help="Where to work; a temporary folder when left out.")]


@app.command()
def speed(
    size: Annotated[str, typer.Option(metavar="SIZE", help="Of the checkpoint.")] = "256MB",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each peer.")] = 7,
    folder: Folder = None,
) -> None:
    """Everything against cp."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        measure(Path(name), size=parse_size(size), rounds=rounds)


def measure(root: Path, *, size: int, rounds: int) -> None:
    """Measure and print Markdown."""
    source = root / "source"
    write_checkpoint(source, size)
    nbytes = sum(info.nbytes for info in open_checkpoint(source).tensors.values())
    print(f"{nbytes / 1e9:.2f} GB of float32 in {SHARDS} files, warm page cache, {rounds} rounds")
    with no_fsync():
        print_table(alternate(peers(source), rounds, root), "cp", nbytes)
    print_table(alternate(with_sync(source), rounds, root), "cp, then sync", nbytes)


# --------------------------------------------------------------------------------------------------------------- memory

PROBE = """
import sys, threading, time
from pathlib import Path
import torch
from porting.notation.table import parse_table
from scripts import bench_convert

def memory():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(lines[name].split()[0]) << 10 for name in ("RssAnon", "VmRSS")]

before, peak, over = memory(), [0, 0], threading.Event()
def watch():
    while not over.wait(0.002):
        peak[:] = map(max, peak, memory())
watcher = threading.Thread(target=watch); watcher.start()
source, out, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if what == "porting convert, permuted":
    bench_convert.ours(source, out, parse_table(bench_convert.PERMUTED), 2)
elif what == "porting convert, to bfloat16":
    bench_convert.ours(source, out, parse_table(bench_convert.PERMUTED), 2, torch.bfloat16)
elif what == "safe_open, save shard by shard":
    bench_convert.shard_by_shard(source, out)
else:
    bench_convert.load_all_save_all(source, out, torch.bfloat16 if "bfloat16" in what else None)
over.set(); watcher.join()
print(*(high - low for high, low in zip(peak, before)))
"""


@app.command()
def memory(
    sizes: Annotated[str, typer.Option(help="Of the checkpoints.")] = "1GB,4GB,16GB",
    folder: Folder = None,
) -> None:
    """Peak of the anonymous and of all resident memory above that of an interpreter with torch, each in a process."""
    kinds = ("porting convert, permuted", "porting convert, to bfloat16", "safe_open, save shard by shard",
             "load everything, save everything", "the same with .to(bfloat16)")  # fmt: skip
    print(f"| | {' | '.join(sizes.split(','))} |\n|---|{'---|' * len(sizes.split(','))}")
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    for size in map(parse_size, sizes.split(",")):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            root = Path(name)
            write_checkpoint(root / "source", size)
            for kind in kinds:
                if kind in kinds[3:] and size > MOST:
                    found[kind].append("not tried")
                    continue
                words = [sys.executable, "-c", PROBE, str(root / "source"), str(root / "out"), kind]
                done = subprocess.run(words, check=True, capture_output=True, text=True)  # ourselves
                anonymous, resident = (f"{int(word) / 1e6:,.0f}" for word in done.stdout.split())
                found[kind].append(f"{anonymous} / {resident} MB")
                shutil.rmtree(root / "out")
    for kind, peaks in found.items():
        print(f"| {kind} | {' | '.join(peaks)} |")


MOST = 8_000_000_000
"""Bytes: larger checkpoints are not loaded as a whole."""


if __name__ == "__main__":
    app()

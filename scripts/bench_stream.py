"""Verify a checkpoint larger than memory, under a limit that the kernel enforces, and say how it compares with a read.

    python -m scripts.bench_stream --gigabytes 12 --limit 2

Writes a synthetic BERT of that size, verifies it with ``stream=True`` in a process of its own whose memory, page cache
included, a control group limits, and reads the same files once under the same limit.  Needs the right to make control
groups (root, as a rule) and as much disk; both are given back at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.make_checkpoint import main as make_checkpoint

GROUPS = Path("/sys/fs/cgroup")
WIDTH = 2048
LAYER = 12 * WIDTH * WIDTH * 4
"""About the bytes of a layer in float32: four maps of the attention and two of four times the width."""


def main() -> None:
    """Make, verify, read, tell."""
    parser = argparse.ArgumentParser(description="Verify a checkpoint larger than memory.")
    parser.add_argument("--gigabytes", type=float, default=12.0, help="the checkpoint's size, in 10^9 bytes")
    parser.add_argument("--limit", type=float, default=2.0, help="the memory limit, in 2^30 bytes")
    parser.add_argument("--longest", type=int, default=24, help="tokens of the longest row")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; a temporary folder if left out")
    arguments = parser.parse_args()
    layers = max(1, round(arguments.gigabytes * 1e9 / LAYER))
    with tempfile.TemporaryDirectory(prefix="porting-stream-", dir=arguments.folder) as folder:
        path = Path(folder) / "large"
        print(f"writing {layers} layers of width {WIDTH}", flush=True)
        make_checkpoint(path, layers=layers, hidden_size=WIDTH, shard_mb=1000)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        limit = int(arguments.limit * 2**30)
        read = measured(limit, path, "read", 0)
        verified = measured(limit, path, "verify", arguments.longest)
    print(f"{size / 1e9:.2f} GB in {layers} layers, limit {arguments.limit} GiB with the page cache")
    print(f"read once: {read['seconds']:.0f} s, {size / 1e9 / read['seconds']:.2f} GB/s")
    ratio, disk = verified["seconds"] / read["seconds"], verified["disk"] / size
    speed = size / 1e9 / verified["seconds"]
    print(f"verified: {verified['verdict']}, {verified['seconds']:.0f} s, {speed:.3f} GB/s, ", end="")
    print(
        f"{ratio:.1f} x the read; {disk:.2f} x its bytes came from disk; {verified['anonymous'] / 1e6:.0f} MB anonymous"
    )
    print(f"{verified['probes']} probes, {verified['passes']} forward passes")


def measured(limit: int, path: Path, what: str, longest: int) -> dict[str, float]:
    """What a process of its own, limited, says of its work; the files are not in the page cache when it begins."""
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with limited(limit) as group:
        command = [sys.executable, "-m", "scripts.bench_stream", "--child", what, str(path), str(longest), str(group)]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{what} ended with {run.returncode}\n{run.stderr[-2000:]}")
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


@contextmanager
def limited(limit: int) -> Iterator[Path]:
    """A control group with this memory limit, of either version; gone afterwards."""
    old = GROUPS / "memory"
    group = (old if old.is_dir() else GROUPS) / f"porting-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def child(what: str, path: Path, longest: int, group: Path) -> None:
    """The measured work, in the group."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    begun, before = time.perf_counter(), _read_bytes()
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], _anonymous())

    threading.Thread(target=watch, daemon=True).start()
    found: dict[str, object] = {}
    if what == "read":
        for file in sorted(path.glob("*.safetensors")):
            with file.open("rb", buffering=0) as opened:
                piece = bytearray(1 << 18)
                while opened.readinto(piece):
                    pass
    else:
        import porting  # noqa: PLC0415  # only this child needs it

        begun = time.perf_counter()
        report = porting.verify(path, stream=True, longest=longest)
        found = {"verdict": report.verdict, "probes": len(report.probes), "passes": report.cost.passes}
    done.set()
    found |= {"seconds": time.perf_counter() - begun, "disk": _read_bytes() - before, "anonymous": peak[0]}
    print(json.dumps(found))


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()

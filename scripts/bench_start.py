"""Measure how long commands take from nothing, beside `import torch`: rows of docs/benchmarks.md.

    python -m scripts.bench_start --rounds 5

Peers take turns, each in a process of its own; what is counted is the processor's time, which other programs on the
machine change least.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORTING = (sys.executable, "-P", "-m", "porting")
TORCH = (sys.executable, "-c", "import torch")


def commands(source: Path, ported: Path) -> dict[str, tuple[str, ...]]:
    """The peers by name; the first is what the others are compared with."""
    return {
        'python -c "import torch"': TORCH,
        "porting explain no-target": (*PORTING, "explain", "no-target"),
        "porting tables": (*PORTING, "tables"),
        "porting inspect": (*PORTING, "inspect", str(source)),
        "porting check": (*PORTING, "check", str(source)),
        "porting load": (*PORTING, "load", str(source)),
        "porting hash": (*PORTING, "hash", str(source)),
        "porting verify-files": (*PORTING, "verify-files", str(ported)),
    }


def seconds(command: tuple[str, ...]) -> float:
    """What a process that ends well takes of the processor, its children included."""
    before = os.times()
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description="Measure how long commands take from nothing.")
    parser.add_argument("--rounds", type=int, default=5, help="after one that is not counted")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="porting-start-") as name:
        source, ported = Path(name) / "bert-base", Path(name) / "ported"
        make = (sys.executable, "-m", "scripts.make_checkpoint", str(source))
        seconds(make)
        seconds((*PORTING, "convert", str(source), str(ported), "--table", "bert_into_fused"))
        peers = commands(source, ported)
        taken: dict[str, list[float]] = {peer: [] for peer in peers}
        for number in range(rounds + 1):
            for peer, command in peers.items():
                found = seconds(command)
                if number:  # the first round fills the caches
                    taken[peer].append(found)
    first = next(iter(taken.values()))
    for peer, times in taken.items():
        ratio = statistics.median(one / base for one, base in zip(times, first, strict=True))
        print(f"| `{peer}` | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()

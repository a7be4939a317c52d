"""What a proof costs over depth and width: ``python -m scripts.bench_verify``.

Each row is a process of its own, so that its peak memory is its own: a synthetic BERT is verified, and the time of the
whole verification stands against the time of the forward passes in it.  Loading, transformers' import included, is not
counted.  With ``--stream`` the passes go side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.make_checkpoint import Size, write_checkpoint

DEPTHS, WIDTHS = (2, 6, 12, 24), (256, 512, 1024)
"""The depths at the first width, and the widths at the first depth."""


def main() -> None:
    """Verify models of several sizes and print a table."""
    parser = argparse.ArgumentParser(description="What a proof costs over depth and width.")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each size")
    parser.add_argument("--stream", action="store_true", help="all passes side by side")
    arguments = parser.parse_args()
    measure(arguments.rounds, stream=arguments.stream)


def measure(rounds: int, *, stream: bool = False) -> None:
    """The table; medians of so many runs of each size."""
    print("| layers | width | parameters | passes | in the passes: s | in all: s | ratio | peak memory |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    sizes = [(depth, WIDTHS[0]) for depth in DEPTHS] + [(DEPTHS[0], width) for width in WIDTHS[1:]]
    for depth, width in sizes:
        with tempfile.TemporaryDirectory(prefix="porting-bench-") as folder:
            path = Path(folder) / "bert"
            size = Size(
                num_hidden_layers=depth, hidden_size=width, num_attention_heads=width // 64, intermediate_size=4 * width
            )
            parameters = write_checkpoint(path, size=size)
            found = [_one(path, stream=stream) for _ in range(rounds)]
        forwards, total, memory = (
            statistics.median(one[key] for one in found) for key in ("forwards", "total", "memory")
        )
        ratio = statistics.median(one["total"] / one["forwards"] for one in found)
        print(
            f"| {depth} | {width} | {parameters / 1e6:.1f} M | {found[0]['passes']:.0f} | {forwards:.2f} | {total:.2f} "
            f"| {ratio:.2f} | {memory / 1e9:.2f} GB |",
            flush=True,
        )


def _one(path: Path, *, stream: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "scripts.bench_verify", "--child", str(path), *(["--stream"] if stream else [])]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def child(path: Path, *, stream: bool) -> None:
    """One verification; its cost as JSON."""
    from porting.verification import verify  # noqa: PLC0415  # only the child needs it

    report = verify(path, stream=stream)
    if not report.faithful:
        sys.exit(str(report))
    cost = report.cost
    print(json.dumps({"forwards": cost.forwards, "total": cost.total, "passes": cost.passes, "memory": cost.memory}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), stream="--stream" in sys.argv)
    else:
        main()

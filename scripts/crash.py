"""``kill -9`` at random moments of a conversion, again and again: the same command goes on, and nothing wrong appears.

    python -m scripts.crash                # 200 kills, less than a minute
    python -m scripts.crash --kills 20 --seed 7

A process is forked for each attempt and killed after a random time, which may be shorter or longer than it needs.
After each kill the destination is either not there or complete; when it is complete it is compared, file by file and
byte by byte, with what an undisturbed conversion wrote.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file

from porting.converting.conversion import convert
from porting.notation.table import parse_table

TABLE = """
[mapping]
name = "crash"
[tensors]
"layers.{i}.{p:query,key,value}.weight [(h d) e]" = "layers.{i}.qkv.weight [(h p d) e]"
"layers.{i}.dense.weight [k o]" = "layers.{i}.dense.weight [o k]"
"layers.{i}.norm.weight" = "layers.{i}.norm.scale"
"embedding.weight" = "embedding.weight"
[sizes]
h = 4
"""


@dataclass
class Tally:
    """What happened.

    Attributes:
        killed: attempts that were killed before the directory appeared.
        finished: conversions that were completed, each compared with the undisturbed one.
        resumed: attempts that found work of an earlier one which was still right.
        interrupted: the most attempts that one conversion took.
    """

    killed: int = 0
    finished: int = 0
    resumed: int = 0
    interrupted: int = 0


def main(
    kills: Annotated[int, typer.Option(min=1, help="How many processes are killed.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Where to work; a temporary folder when left out.")] = None,
) -> None:
    """Kill, and see."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        print(crash(Path(name), kills=kills, seed=seed))


def crash(root: Path, *, kills: int, seed: int) -> Tally:
    """Kill ``kills`` attempts.

    Raises:
        RuntimeError: something wrong was there after a kill.
    """
    draw = random.Random(seed)  # noqa: S311  # moments, no secrets
    source, expected, found = root / "source", root / "expected", root / "found"
    _write_checkpoint(source)
    before = _contents(source)
    _attempt(source, expected, root / "log", None)
    wanted = _contents(expected)
    longest = _time(source, found, root / "log")
    tally, attempts, tidied = Tally(), 0, True
    while tally.killed < kills or attempts or not tidied:
        patience = draw.uniform(0, longest) if tally.killed < kills else None
        completed = _attempt(source, found, root / "log", patience)
        attempts += 1
        if found.exists():
            if _contents(found) != wanted:
                raise RuntimeError(f"after {tally.killed} kills the destination is not what it should be")
            tally.finished += 1
            tally.interrupted = max(tally.interrupted, attempts)
            tally.resumed += _resumed(root / "log")
            shutil.rmtree(found)
            attempts = 0
            tidied = completed  # killed behind the rename: the next one sweeps what it worked in
        elif completed:
            raise RuntimeError("a conversion ended well, and there is no destination")
        tally.killed += not completed
    strays = {path.name for path in root.iterdir()} - {"source", "expected", "log"}
    if strays or _contents(source) != before:
        raise RuntimeError(f"something was left behind, or the source was touched: {sorted(strays)}")
    return tally


def _time(source: Path, destination: Path, log: Path) -> float:
    """Seconds that an attempt takes when nothing disturbs it: the least of three."""
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        _attempt(source, destination, log, None)
        seconds.append(time.perf_counter() - begun)
        shutil.rmtree(destination)
    return min(seconds)


def _write_checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    tensors = {"embedding.weight": torch.randn(2000, 256)}
    for i in range(8):
        tensors |= {f"layers.{i}.{part}.weight": torch.randn(256, 256) for part in ("query", "key", "value")}
        tensors[f"layers.{i}.dense.weight"] = torch.randn(256, 300)
        tensors[f"layers.{i}.norm.weight"] = torch.randn(256)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


def _attempt(source: Path, destination: Path, log: Path, patience: float | None) -> bool:
    """Convert in a process of its own, killed after some seconds; whether it ended by itself.

    Raises:
        RuntimeError: it failed.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            done = convert(source, destination, parse_table(TABLE), shard_size=3_000_000, memory=4 << 20)
            log.write_text(str(done.resumed))
            status = 0
        except BaseException as error:  # noqa: BLE001  # whatever it is, the parent is told by the status
            sys.stderr.write(f"{error}\n")
        finally:
            os._exit(status)
    if patience is not None:
        time.sleep(patience)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return False
    if status:
        raise RuntimeError("a conversion failed")
    return True


def _resumed(log: Path) -> bool:
    return log.exists() and int(log.read_text() or 0) > 0


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


if __name__ == "__main__":
    typer.run(main)

"""The measurements of ``docs/benchmarks.md``: peers in one run, alternating, medians and ratios.

    python -m scripts.benchmark                 # everything, about a quarter of an hour on two cores
    python -m scripts.benchmark load forward    # some of it

Nothing here is a test: machines differ and are noisy, so that only ratios within one run mean anything.
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

from porting.loading import load
from porting.models.bert import Bert
from porting.verification import verify
from scripts import bench_convert, bench_plan, bench_verify
from scripts.make_checkpoint import write_checkpoint

ROUNDS = 7
SHAPE = (8, 128)

Peer = Callable[[], object]


def main(
    suites: Annotated[
        list[str] | None,
        typer.Argument(help="load, forward, unpadded, verify, cost, plan, convert; all when none is named."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=5, help="Runs of each peer.")] = ROUNDS,
    size: Annotated[str, typer.Option(help="Of the checkpoint that is converted.")] = "1GB",
) -> None:
    """Measure, and print Markdown."""
    known: Mapping[str, Callable[[Path, int], None]] = {
        "load": measure_load,
        "forward": measure_forward,
        "unpadded": measure_unpadded,
        "verify": measure_verify,
        "cost": lambda checkpoint, rounds: bench_verify.measure(rounds),
        "plan": lambda checkpoint, rounds: bench_plan.measure(rounds),
        "convert": lambda checkpoint, rounds: bench_convert.speed(size=size, rounds=rounds, folder=checkpoint.parent),
    }
    wrong = [name for name in suites or () if name not in known]
    if wrong:
        raise typer.BadParameter(f"{', '.join(wrong)}: expected some of {', '.join(known)}")
    torch.set_num_threads(2)
    print(environment())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "bert-base"
        write_checkpoint(checkpoint)
        for name in suites or known:
            print(f"\n## {name}\n")
            known[name](checkpoint, rounds)


def environment() -> str:
    """Date, machine and versions, in a line."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors"))
    today = datetime.now(tz=UTC).date()
    threads = f"{torch.get_num_threads()} threads"
    return f"{today}, {platform.machine()}, {threads}, Python {platform.python_version()}, {packages}"


def alternate(peers: Mapping[str, Peer], rounds: int) -> dict[str, list[float]]:
    """Seconds of each peer in each round, after one round that is not counted; the peers take turns at being first."""
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    turns = list(peers.items())
    for number in range(rounds + 1):
        turns.append(turns.pop(0))
        for name, run in turns:
            gc.collect()
            begun = time.perf_counter()
            kept = run()
            taken = time.perf_counter() - begun
            del kept
            if number:
                seconds[name].append(taken)
    return seconds


def table(seconds: Mapping[str, Sequence[float]], against: str, extra: Mapping[str, str] | None = None) -> None:
    """A Markdown table: median, least and most, and the median of the ratios round by round."""
    print(f"| | median ms | min | max | x {against} |{' ' + 'anonymous memory |' if extra else ''}")
    print(f"|---|---|---|---|---|{'---|' if extra else ''}")
    for name, taken in seconds.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(taken, seconds[against], strict=True))
        median, least, most = (1000 * one for one in (statistics.median(taken), min(taken), max(taken)))
        memory = f" {extra[name]} |" if extra else ""
        print(f"| {name} | {median:.1f} | {least:.1f} | {most:.1f} | {ratio:.2f} |{memory}")


def measure_load(checkpoint: Path, rounds: int) -> None:
    """A 440 MB checkpoint in the page cache into a module."""
    from safetensors.torch import load_file  # noqa: PLC0415  # a peer of this suite only
    from transformers import AutoModelForPreTraining  # noqa: PLC0415  # as above
    from transformers.utils import logging  # noqa: PLC0415  # as above

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # as transformers has it
    file = checkpoint / "model.safetensors"
    theirs = AutoModelForPreTraining.from_pretrained(checkpoint).config

    def copied() -> nn.Module:
        module: nn.Module = AutoModelForPreTraining.from_config(theirs)  # type: ignore[no-untyped-call]  # as above
        module.load_state_dict(load_file(file), strict=False)
        return module

    peers: dict[str, Peer] = {
        "from_pretrained": lambda: AutoModelForPreTraining.from_pretrained(checkpoint),
        "load_file, then load_state_dict": copied,
        "every byte read once": lambda: file.read_bytes()[-1],
        "porting.load": lambda: load(checkpoint),
        "porting.load(own=True)": lambda: load(checkpoint, own=True),
    }
    memory = {name: f"{anonymous(run):.0f} MB" for name, run in peers.items()}
    table(alternate(peers, rounds), "from_pretrained", memory)


def anonymous(run: Peer) -> float:
    """How much anonymous memory, in MB, what ``run`` returns holds on to."""
    run()
    gc.collect()
    before = _resident()
    kept = run()
    after = _resident()
    del kept
    gc.collect()
    return max(after - before, 0.0)


def _resident() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1000


def measure_forward(checkpoint: Path, rounds: int) -> None:
    """The encoder's forward pass, 8 rows of 128 tokens, float32."""
    from transformers import BertModel  # noqa: PLC0415  # a peer of this suite only

    theirs = BertModel.from_pretrained(checkpoint, attn_implementation="sdpa")
    ours = load(checkpoint).bert
    if not isinstance(ours, Bert):
        sys.exit("the checkpoint did not give a BERT")
    ids = torch.randint(5, 30000, SHAPE, generator=torch.Generator().manual_seed(0))
    for title, mask in _masks().items():
        peers: dict[str, Peer] = {
            "transformers BertModel, sdpa": lambda mask=mask: _forward(theirs, ids, mask),  # type: ignore[misc]  # binds this mask
            "porting.models.bert": lambda mask=mask: _forward(ours, ids, mask),  # type: ignore[misc]  # as above
        }
        print(f"{title}:\n")
        table(alternate(peers, rounds), "transformers BertModel, sdpa")
        print()


def _forward(module: nn.Module, ids: Tensor, mask: Tensor | None) -> object:
    with torch.inference_mode():
        return module(ids, attention_mask=mask)


def _masks() -> dict[str, Tensor | None]:
    lengths = torch.tensor([128, 115, 101, 88, 72, 60, 40, 17])
    padded = (torch.arange(SHAPE[1])[None] < lengths[:, None]).long()
    return {"no mask": None, "mask of ones": torch.ones(SHAPE, dtype=torch.long), "padded": padded}


RAGGED = (256, 128, 96, 80, 72, 64, 56, 48, 44, 40, 36, 32, 28, 20, 14, 10)
"""Tokens in each row of a batch of 16 x 256 places: 1,024 in all."""


def measure_unpadded(checkpoint: Path, rounds: int) -> None:
    """The encoder's forward pass with and without the padding of its rows, float32; a ragged batch and a full one."""
    from transformers import BertModel  # noqa: PLC0415  # a peer of this suite only

    theirs = BertModel.from_pretrained(checkpoint, attn_implementation="sdpa")
    padded, unpadded = load(checkpoint).bert, load(checkpoint).bert
    if not isinstance(padded, Bert) or not isinstance(unpadded, Bert):
        sys.exit("the checkpoint did not give a BERT")
    unpadded.unpadded = True
    shape = (len(RAGGED), max(RAGGED))
    ids = torch.randint(5, 30000, shape, generator=torch.Generator().manual_seed(0))
    ragged = (torch.arange(shape[1])[None] < torch.tensor(RAGGED)[:, None]).long()
    for title, mask in {f"{sum(RAGGED)} tokens": ragged, f"{ids.numel()} tokens": torch.ones_like(ids)}.items():
        peers: dict[str, Peer] = {
            "transformers BertModel, sdpa": lambda mask=mask: _forward(theirs, ids, mask),  # type: ignore[misc]  # binds this mask
            "porting.models.bert": lambda mask=mask: _forward(padded, ids, mask),  # type: ignore[misc]  # as above
            "porting.models.bert, unpadded": lambda mask=mask: _forward(unpadded, ids, mask),  # type: ignore[misc]  # as above
        }
        print(f"{shape[0]} rows of {shape[1]}, {title}:\n")
        table(alternate(peers, rounds), "transformers BertModel, sdpa")
        print()


def measure_verify(checkpoint: Path, rounds: int) -> None:
    """The proof of a bert-base, against the forward passes that it needs."""
    costs = [verify(checkpoint).cost for _ in range(max(rounds // 2, 3))]
    print("| forward passes | seconds in them | seconds in all | ratio |")
    print("|---|---|---|---|")
    for cost in costs:
        print(f"| {cost.passes} | {cost.forwards:.1f} | {cost.total:.1f} | {cost.total / cost.forwards:.2f} |")
    print(f"\nmedian ratio {statistics.median(cost.total / cost.forwards for cost in costs):.2f}")


if __name__ == "__main__":
    typer.run(main)

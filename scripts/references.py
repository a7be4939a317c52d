"""Every model type of transformers as a reference: ``make references``.

python -m scripts.references                       # what is not in the cache yet
python -m scripts.references llama whisper clip    # some model types, anew
python -m scripts.references --again refused       # those that ended so, anew
python -m scripts.references --write               # docs/references.md, from the cache
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

from scripts.reference_models.apart import apart
from scripts.reference_models.page import page
from scripts.reference_models.proving import GIGABYTES, LIMITS, SECONDS, Proof, limited
from scripts.reference_models.types import classes, model_types

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, CACHE = DOCS / "references.md", DOCS / "references.jsonl"


def read(cache: Path) -> dict[tuple[str, str], Proof]:
    """The proofs of a cache, the newest of each class."""
    found: dict[tuple[str, str], Proof] = {}
    if cache.is_file():
        for line in cache.read_text(encoding="utf-8").splitlines():
            proof = Proof(**json.loads(line))
            found[proof.model_type, proof.architecture] = proof
    return found


def proven(wanted: list[tuple[str, str]]) -> Iterator[Proof]:
    """Every class in a process of its own, one after the other."""
    for (model_type, architecture), proof, ended, seconds in apart(wanted, limited):
        yield proof or Proof(
            model_type=model_type, architecture=architecture, outcome=LIMITS, said=ended, seconds=seconds
        )


def main(
    types: Annotated[list[str] | None, typer.Argument(help="model types; default: those not in the cache")] = None,
    cache: Annotated[Path, typer.Option(help="what came of each, a line of JSON each")] = CACHE,
    again: Annotated[str, typer.Option(help="those that ended so, anew")] = "",
    write: Annotated[bool, typer.Option("--write", help="the page, from the cache")] = False,
    order: Annotated[Path | None, typer.Option(help="model types in this order, one a line")] = None,
    only_heads: Annotated[bool, typer.Option(help="not the base model where there is a head")] = False,
) -> None:
    """Prove every model type of transformers as a reference."""
    torch.set_num_threads(1)
    known = read(cache)
    if write:
        _write(cache, known)
        return
    every = [(one, name) for one in model_types() for name in classes(one)[: 1 if only_heads else None]]
    if types:
        wanted = [one for one in every if one[0] in types]
    elif again:
        wanted = [one for one in every if one in known and known[one].outcome == again]
    else:
        wanted = [one for one in every if one not in known]
    if order is not None:
        ranks = {name: number for number, name in enumerate(order.read_text(encoding="utf-8").split())}
        wanted.sort(key=lambda one: ranks.get(one[0], len(ranks)))
    cache.parent.mkdir(parents=True, exist_ok=True)
    with cache.open("a", encoding="utf-8") as file:
        for proof in proven(wanted):
            file.write(json.dumps(asdict(proof)) + "\n")
            file.flush()
            known[proof.model_type, proof.architecture] = proof
            typer.echo(
                f"{proof.model_type:28} {proof.architecture:44} {proof.outcome:9} {proof.seconds:5} {proof.said[:200]}"
            )
    typer.echo(Counter(known[one].outcome for one in every if one in known))


def _write(cache: Path, known: dict[tuple[str, str], Proof]) -> None:
    """The page, and the cache with the newest line of each class, sorted."""
    types = model_types()
    parts = [one for one in types if not classes(one)]
    run = {model_type for model_type, _ in known}
    waiting = [one for one in types if one not in run and one not in parts]
    text = page(known, parts, waiting, version=transformers.__version__, seconds=SECONDS, gigabytes=GIGABYTES)
    PAGE.write_text(text, encoding="utf-8")
    lines = [json.dumps(asdict(known[one])) for one in sorted(known)]
    cache.write_text("\n".join(lines) + "\n", encoding="utf-8")
    typer.echo(f"wrote {PAGE.name}")


if __name__ == "__main__":
    typer.run(main)

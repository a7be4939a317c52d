"""Processes that save with ``torch.distributed.checkpoint`` and load again, and what each of them saw.

    python -m tests.sharding.saver FOLDER            # one process, then two, then four
    python -m tests.sharding.saver FOLDER save-1     # one process saves, and that is all

Each saves what stands in ``FOLDER/source``, cut in several ways, and loads that
through tables, and by torch what ``porting convert`` made in ``FOLDER/made``; what it saw is written to
``FOLDER/seen-COUNT-RANK.json``.  Then the last of two processes cannot read, or dies.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as torch_loads
from torch.distributed.checkpoint.state_dict_saver import save as torch_saves
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import porting
from porting.checkpoint.files import LocalFile
from tests import own
from tests.guards.tree import ROOT
from tests.sharding.worker import (
    Result,
    cut_by_columns,
    cut_by_fsdp,
    cut_by_tensor_parallelism,
    forked,
    gathered,
    held,
    mesh_of,
)

LAYOUTS: dict[str, Callable[[Tensor, int], list[Placement]]] = {
    "rows": lambda tensor, axes: [Shard(0)] * axes if tensor.ndim else [Replicate()] * axes,
    "columns": lambda tensor, axes: [Shard(tensor.ndim - 1)] * axes if tensor.ndim else [Replicate()] * axes,
    "grid": lambda tensor, axes: [Shard(0), Shard(1)] if tensor.ndim == 2 and axes == 2 else [Replicate()] * axes,
}
"""Where the shards of a tensor go on a mesh of so many axes: over its rows, its columns, or both."""


def cut(tensors: dict[str, Tensor], mesh: DeviceMesh, layout: str) -> dict[str, Tensor]:
    """Tensors as they lie with a process of the mesh; uneven, and empty in some."""
    return {
        name: distribute_tensor(tensor, mesh, LAYOUTS[layout](tensor, mesh.ndim)) for name, tensor in tensors.items()
    }


def save(folder: Path, count: int) -> None:
    """The source's tensors, cut; and a trained model with its optimizer."""
    config = folder / "source" / "config.json"
    flat = mesh_of(count)
    for layout in LAYOUTS:
        mesh = mesh_of(2, 2) if layout == "grid" and count == 4 else flat
        place = folder / f"{layout}-{count}"
        torch_saves({"model": cut(own.tensors(), mesh, layout), "step": 7}, checkpoint_id=place)
        if dist.get_rank() == 0:
            (place / "config.json").write_bytes(config.read_bytes())
    torch.manual_seed(3)
    model = cut_by_fsdp(own.Own(own.SIZES), flat)
    porting.load(folder / "source", model, folder / "own.toml")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch_saves(
        {"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder / f"trained-{count}"
    )


def differing(module: nn.Module, expected: nn.Module) -> list[str]:
    """The parameters that do not have the expected bits, all processes together."""
    wanted = dict(expected.named_parameters())
    return [name for name, tensor in module.named_parameters() if not torch.equal(gathered(tensor), wanted[name].data)]


def load_through_a_table(folder: Path, count: int) -> Result:
    """What was saved in each layout, by each number of processes so far, into modules that are cut in other ways."""
    expected = own.filled(folder / "source", folder / "own.toml")
    told: Result = {}
    for layout in LAYOUTS:
        for saved in (1, 2, 4):
            for how in (cut_by_fsdp, cut_by_columns):
                module = how(own.Own(own.SIZES), mesh_of(count))
                porting.load(folder / f"{layout}-{saved}" / "model", module, folder / "own.toml")
                told[f"{layout} of {saved}, {how.__name__}"] = differing(module, expected)
    return told


def read_of_wide(folder: Path, count: int) -> Result:
    """How many bytes a process reads of tensors in long rows, which four processes saved."""
    expected = wide()
    module = nn.ParameterDict({name: torch.empty(shape) for name, shape in WIDE.items()})
    fully_shard(module, mesh=mesh_of(count))
    porting.load(folder / "wide-4", module, folder / "wide.toml")
    record = porting.provenance(module)
    assert record is not None
    return {
        "differ": [name for name, tensor in module.items() if not torch.equal(gathered(tensor), expected[name])],
        "read": record.nbytes_read,
        "local": sum(tensor.data.to_local().nbytes for tensor in module.values() if isinstance(tensor.data, DTensor)),
    }


def wide() -> dict[str, Tensor]:
    """Tensors whose rows are long."""
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in WIDE.items()}


WIDE = {"plain": (1030, 128), "other": (33, 771)}


def load_by_torch(folder: Path, count: int) -> Result:
    """What torch loads of a conversion into a sharded module with values of its own."""
    expected = own.filled(folder / "source", folder / "own.toml")
    told: Result = {}
    for name in ("made", "made in parts"):
        model = cut_by_fsdp(own.Own(own.SIZES), mesh_of(count))
        state = {"model": model.state_dict()}
        torch_loads(state, checkpoint_id=folder / name)
        model.load_state_dict(state["model"])
        told[name] = differing(model, expected)
    return told


def export_again(folder: Path, count: int) -> list[str]:
    """What was saved is loaded, and exported as a directory of safetensors; and in each other container."""
    module = cut_by_columns(own.Own(own.SIZES), mesh_of(count))
    porting.load(folder / "grid-4" / "model", module, folder / "own.toml")
    for to in ("npz", "dcp"):
        porting.export(module, folder / "own.toml", folder / f"exported-{count}-{to}", to=to)
    return [*porting.export(module, folder / "own.toml", folder / f"exported-{count}").files]


def documented(folder: Path, count: int) -> list[str]:
    """The lines of docs/sharding.md, run as they stand there; the parameters that are not what they were."""
    text = (ROOT / "docs" / "sharding.md").read_text(encoding="utf-8")
    place = folder / f"documented-{count}"
    place.mkdir(exist_ok=True)
    os.chdir(place)
    toml, python = (
        re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for language in ("toml", "python")
    )
    if dist.get_rank() == 0:
        Path("same.toml").write_text("".join(toml))
    model = cut_by_fsdp(untied(seed=3), mesh_of(count))
    other = cut_by_tensor_parallelism(untied(seed=4), mesh_of(count))
    dist.barrier()
    names = {"model": model, "other": other, "porting": porting}
    lines = "".join(python[1:])  # the first block, which cuts a module, is run by the test of the page itself
    exec(compile(lines, "docs/sharding.md", "exec"), names)  # noqa: S102 - the project's own example
    return differing(other, untied(seed=3))


def untied(seed: int) -> own.Own:
    """A module whose parameters are all its own."""
    torch.manual_seed(seed)
    module = own.Own(own.SIZES)
    module.decoder.weight = nn.Parameter(torch.randn_like(module.tokens.weight))
    return module


def failing(folder: Path, rank: int, count: int) -> Result:
    """The last process sees no checkpoint, or its disk fails: what each is told, and what its module holds then."""
    told: Result = {}
    real = LocalFile.read_into
    for how in ("missing", "disk"):
        module = cut_by_fsdp(own.Own(own.SIZES), mesh_of(count))
        before = [held(parameter).clone() for parameter in module.parameters()]
        last = rank == count - 1
        if last and how == "disk":
            LocalFile.read_into = broken  # type: ignore[method-assign]  # in a process of its own
        source = folder / "nowhere" if last and how == "missing" else folder / "source"
        try:
            porting.load(source, module, folder / "own.toml")
        except porting.PortingError as error:
            told[how] = [type(error).__name__, str(error)]
        LocalFile.read_into = real  # type: ignore[method-assign]  # as above
        told[f"{how}: untouched"] = all(map(torch.equal, before, map(held, module.parameters())))
    return told


def broken(self: LocalFile, buffer: memoryview, offset: int) -> None:
    raise self._failed(OSError(errno.EIO, "Input/output error"))


def dying(folder: Path, rank: int, count: int) -> Result:
    """The last process is killed while the others read."""
    module = cut_by_fsdp(own.Own(own.SIZES), mesh_of(count))
    if rank == count - 1:
        LocalFile.read_into = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]  # as above
    try:
        porting.load(folder / "source", module, folder / "own.toml")
    except porting.PortingError as error:
        return {"told": [type(error).__name__, str(error)]}
    return {"told": None}


def main(folder: Path, rank: int, count: int, act: str) -> None:
    """What one process does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{count}-{act}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(minutes=30))
    if act == "save":
        save(folder, count)
        if count == 4:
            torch_saves(cut(wide(), mesh_of(4), "rows"), checkpoint_id=folder / "wide-4")
    elif act == "load":
        results: Result = {"table": load_through_a_table(folder, count), "wide": read_of_wide(folder, count)}
        results |= {"torch": load_by_torch(folder, count), "failing": failing(folder, rank, count)}
        results |= {"exported": export_again(folder, count), "documented": documented(folder, count)}
        (folder / f"seen-{count}-{rank}.json").write_text(json.dumps(results))
    else:
        (folder / f"dying-{rank}.json").write_text(json.dumps(dying(folder, rank, count)))
        return
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for mode in sys.argv[2:] or ("save-1", "save-2", "save-4", "load-2", "load-4", "die-2"):
        act, number = mode[:4].rstrip("-"), int(mode[-1])
        fine = forked(number, lambda rank: main(place, rank, number, act))  # noqa: B023  # it has run before the next
        if fine == (act == "die"):
            sys.exit(1)

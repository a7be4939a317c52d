"""Processes that save with ``torch.distributed.checkpoint`` and load again, and what each of them saw.

    python -m tests.sharding.saver FOLDER

One process, then two, then four.  Each saves what stands in ``FOLDER/source``, cut in several ways, and loads that
through tables, and what ``porting convert`` made; what it saw is written to ``FOLDER/seen-COUNT-RANK.json``.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as torch_saves
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import porting
from tests import own
from tests.sharding.worker import Result, cut_by_columns, cut_by_fsdp, forked, gathered, mesh_of

LAYOUTS: dict[str, Callable[[Tensor, int], list[Placement]]] = {
    "rows": lambda tensor, axes: [Shard(0)] * axes if tensor.ndim else [Replicate()] * axes,
    "columns": lambda tensor, axes: [Shard(tensor.ndim - 1)] * axes if tensor.ndim else [Replicate()] * axes,
    "grid": lambda tensor, axes: [Shard(0), Shard(1)] if tensor.ndim == 2 and axes == 2 else [Replicate()] * axes,
}
"""Where the shards of a tensor go on a mesh of so many axes: over its rows, its columns, or both."""


def cut(tensors: dict[str, Tensor], mesh: DeviceMesh, layout: str) -> dict[str, Tensor]:
    """Tensors as they lie with a process of the mesh; uneven, and empty in some."""
    return {name: distribute_tensor(one, mesh, LAYOUTS[layout](one, mesh.ndim)) for name, one in tensors.items()}


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
    return [name for name, one in module.named_parameters() if not torch.equal(gathered(one), wanted[name].data)]


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
        "differ": [name for name, one in module.items() if not torch.equal(gathered(one), expected[name])],
        "read": record.nbytes_read,
        "local": sum(one.data.to_local().nbytes for one in module.values() if isinstance(one.data, DTensor)),
    }


def wide() -> dict[str, Tensor]:
    """Tensors whose rows are long."""
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in WIDE.items()}


WIDE = {"plain": (1030, 128), "other": (33, 771)}


def main(folder: Path, rank: int, count: int, saving: bool) -> None:
    """What one process does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{count}-{saving}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    if saving:
        save(folder, count)
        if count == 4:
            wide = {
                name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in WIDE.items()
            }
            torch_saves(cut(wide, mesh_of(4), "rows"), checkpoint_id=folder / "wide-4")
    else:
        results = {"table": load_through_a_table(folder, count), "wide": read_of_wide(folder, count)}
        (folder / f"seen-{count}-{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for number, saving in ((1, True), (2, True), (4, True), (2, False), (4, False)):
        if not forked(number, lambda rank: main(place, rank, number, saving)):  # noqa: B023  # it has run before the next
            sys.exit(1)

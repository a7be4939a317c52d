"""Processes that load the same checkpoint into one sharded module, and what each of them saw.

    python -m tests.sharding.worker FOLDER 2 4

Two of them, then four.  Each case gives a dictionary; they are written to ``FOLDER/result-COUNT-RANK.json``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import porting
from tests import own

Result = dict[str, Any]


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class has no types
    """Remembers how many elements the largest tensor had that was made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            if isinstance(value, Tensor) and not value.is_meta and "empty" in str(func):
                self.numel = max(self.numel, value.numel())
        return made


def watched() -> CommDebugMode:
    """Counts collectives."""
    return CommDebugMode()  # type: ignore[no-untyped-call]  # torch's own class has no types


def held(parameter: Tensor) -> Tensor:
    """What this process has of a parameter."""
    return parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data


def inside(parameter: Tensor) -> DTensor | None:
    return parameter.data if isinstance(parameter.data, DTensor) else None


def gathered(parameter: Tensor) -> Tensor:
    """The whole of it, from all processes."""
    return parameter.data.full_tensor() if isinstance(parameter.data, DTensor) else parameter.data


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[: len(sizes)])


def cut_by_fsdp(module: own.Own, mesh: DeviceMesh) -> own.Own:
    for number in range(2):
        fully_shard(module.layer(number), mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def cut_by_tensor_parallelism(module: own.Own, mesh: DeviceMesh) -> own.Own:
    for number in range(2):
        plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
        parallelize_module(module.layer(number), mesh, plan)
    return module


def cut_by_both(module: own.Own, mesh: DeviceMesh) -> own.Own:
    return cut_by_fsdp(cut_by_tensor_parallelism(module, mesh["inner"]), mesh["outer"])


def cut_by_columns(module: own.Own, mesh: DeviceMesh) -> own.Own:
    """Shard(1), Shard(0) and Replicate side by side, and on two axes of a mesh both."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter is module.decoder.weight and part is module.decoder:
                continue
            wanted = [Shard(1 if parameter.ndim > 1 else 0), Shard(0)][: mesh.ndim]
            placements = wanted if parameter.shape[0] != 5 else [Replicate()] * mesh.ndim
            part.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, placements)))
    module.decoder.weight = module.tokens.weight
    return module


def loaded(folder: Path, cut: Callable[[own.Own, DeviceMesh], own.Own], mesh: DeviceMesh, **options: Any) -> Result:
    """What came of loading into a module that is cut so, against a module that is whole."""
    with torch.device("meta") if options.pop("meta", False) else torch.device("cpu"):
        module = own.Own(own.SIZES)
    module.powers = 2.0 ** torch.arange(4)  # no checkpoint has it
    module = cut(module, mesh)
    before = {name: id(tensor) for name, tensor in module.named_parameters()}
    with watched() as communication:
        porting.load(folder / "source", module, folder / "own.toml", **options)
    whole = own.Own(own.SIZES)
    porting.load(folder / "source", whole, folder / "own.toml", **options)
    expected = dict(whole.named_parameters())
    differ, local, total = [], 0, 0
    for name, parameter in module.named_parameters():
        value = gathered(parameter)
        if value.dtype != expected[name].dtype or not torch.equal(value, expected[name].data):
            differ.append(name)
        local += held(parameter).nbytes
        total += parameter.nbytes
    record = porting.provenance(module)
    assert record is not None
    return {
        "differ": differ,
        "collectives": communication.get_total_counts(),
        "kept": before == {name: id(tensor) for name, tensor in module.named_parameters()},
        "tied": module.decoder.weight is module.tokens.weight,
        "read": record.nbytes_read,
        "local": local,
        "total": total,
        "placements": sorted(
            {str(tensor.data.placements) for tensor in module.parameters() if isinstance(tensor.data, DTensor)}
        ),
    }


def exported(folder: Path, cut: Callable[[own.Own, DeviceMesh], own.Own], mesh: DeviceMesh, name: str) -> Result:
    """What was loaded is written again: as it is, with all of it changed, and with some of it changed."""
    told: Result = {}
    for how, touched in TOUCHED.items():
        module = cut(own.Own(own.SIZES), mesh)
        porting.load(folder / "source", module, folder / "own.toml")
        touch(module, touched)
        with watched() as communication:
            written = porting.export(module, folder / "own.toml", folder / f"{name}-{how}")
        told[how] = [communication.get_total_counts(), written.files, written.copied]
    return told


def cast(folder: Path, cut: Callable[[own.Own, DeviceMesh], own.Own], mesh: DeviceMesh, name: str) -> Result:
    """The same in other dtypes than the checkpoint's, and from a pickled one."""
    told: Result = {}
    for case, (source, how, loading, options) in CASTS.items():
        module = cut(own.Own(own.SIZES).to(loading or torch.float32), mesh)
        porting.load(folder / source, module, folder / "own.toml", dtype=loading)
        touch(module, TOUCHED[how])
        with watched() as communication:
            written = porting.export(module, folder / "own.toml", folder / f"{name}-{case}", **options)
        told[case] = [communication.get_total_counts(), written.files, dict(written.infinite)]
    return told


CASTS: dict[str, tuple[str, str, torch.dtype | None, dict[str, Any]]] = {
    # the source, how it is touched, the dtype that it is loaded in, the options of the export
    "half": ("large", "untouched", None, {"dtype": torch.float16}),
    "half, changed": ("large", "some", None, {"dtype": torch.float16}),
    "narrow": ("source", "first", torch.bfloat16, {}),
    "wide again": ("source", "one", torch.bfloat16, {"dtype": torch.float32}),
    "pickled": ("pickled", "changed", None, {}),
    "pickled, double": ("pickled", "untouched", None, {"dtype": torch.float64}),
}

TOUCHED = {"untouched": "nothing", "changed": "", "some": "s", "one": "layers.1.out", "first": "first element"}
"""A part of the names of the parameters that are changed before the export; or, of all, their first element."""


def touch(module: nn.Module, what: str) -> None:
    """Change parameters in place, whole or in shards."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if what in name:
                parameter.mul_(1.25)
            elif what == "first element":
                mesh = parameter.data.device_mesh if isinstance(parameter.data, DTensor) else None
                if mesh is None or not any(mesh.get_coordinate() or ()):
                    held(parameter)[(0,) * parameter.ndim] += 1


def unexportable(folder: Path, mesh: DeviceMesh) -> Result:
    """What is refused, by all processes, with nothing left behind."""
    module = cut_by_fsdp(own.Own(own.SIZES), mesh)
    porting.load(folder / "source", module, folder / "own.toml")
    told = {}
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("dtype", "refused", {"dtype": torch.int8}),
        ("anew", "refused", {"anew": True, "config": {"model_type": "own"}}),
        ("exists", "source", {}),
    )
    for name, place, options in cases:
        try:
            porting.export(module, folder / "own.toml", folder / place, **options)
        except porting.PortingError as error:
            told[name] = str(error)
    return told


def wide(folder: Path, rank: int, count: int) -> Result:
    """A transposition, a fusion and a plain copy of tensors whose rows are long: bytes, collectives and memory."""
    mesh = mesh_of(count)
    with torch.device("meta"):
        module = nn.ParameterDict({name: torch.empty(shape) for name, shape in WIDE.items()})
    fully_shard(module, mesh=mesh)
    file = Path("/proc/self/io")
    before = int(file.read_text().split()[1])
    with watched() as communication, Largest() as largest:
        porting.load(folder / "wide", module, folder / "wide.toml")
    after = int(file.read_text().split()[1])
    record = porting.provenance(module)
    assert record is not None
    source = porting.open_checkpoint(folder / "wide")
    expected = {
        "turned": source.read("kernel").T,
        "fused": torch.cat([source.read(f"part.{name}") for name in "qkv"]),
        "plain": source.read("plain"),
    }
    return {
        "differ": [name for name, tensor in module.items() if not torch.equal(gathered(tensor), expected[name])],
        "collectives": communication.get_total_counts(),
        "read": record.nbytes_read,
        "by the system": after - before,
        "local": sum(held(tensor).nbytes for tensor in module.values()),
        "total": sum(tensor.nbytes for tensor in expected.values()),
        "largest": largest.numel,
        "smallest whole": min(tensor.numel() for tensor in expected.values()),
    }


WIDE = {"turned": (514, 260), "fused": (771, 300), "plain": (1030, 128)}


COMPUTED = {"merged": (10, 7), "scaled": (9, 8), "unpacked": (2, 24, 6), "A": (5,), "first": (6, 8), "second": (8, 6)}


def formulas(folder: Path, rank: int, count: int) -> Result:
    """Shards along every axis of what formulas compute; exported as it was, and refused when it was changed."""
    table = folder / "formulas.toml"
    with torch.device("meta"):
        whole = nn.ParameterDict({name: torch.empty(shape) for name, shape in COMPUTED.items()})
    porting.load(folder / "formulas", whole, table)
    result: Result = {"differ": [], "told": ""}
    for axis in range(3):
        with torch.device("meta"):
            module = nn.ParameterDict({name: torch.empty(shape) for name, shape in COMPUTED.items()})
        for name, parameter in module.items():
            place = Shard(min(axis, parameter.ndim - 1))
            module[name] = nn.Parameter(distribute_tensor(parameter, mesh_of(count), [place]))
        porting.load(folder / "formulas", module, table)
        differ = [name for name, tensor in module.items() if not torch.equal(gathered(tensor), whole[name])]
        result["differ"] += [f"{name} along {axis}" for name in differ]
        porting.export(module, table, folder / f"formulas-{count}-{axis}")
    with torch.no_grad():
        held(module["merged"]).add_(1)
        held(module["second"]).add_(1)
    try:
        porting.export(module, table, folder / f"formulas-{count}-changed")
    except porting.PortingError as error:
        result["told"] = str(error)
    return result


def lost(folder: Path, rank: int, count: int) -> Result:
    """What is said of values that a cast or a computation makes infinite: here, and where one process loads."""
    cuts = {"fsdp": cut_by_fsdp, "columns": cut_by_columns}
    told: Result = {"differ": []}
    for case, (source, table, dtype) in LOST.items():
        told[case] = {"whole": said(folder, own.Own(own.SIZES).to(dtype), source, table, dtype)}
        for name, cut in cuts.items():
            module = cut(own.Own(own.SIZES).to(dtype), mesh_of(count))
            told[case][name] = said(folder, module, source, table, dtype)
    return told


LOST: dict[str, tuple[str, str, torch.dtype]] = {
    "half": ("large", "own.toml", torch.float16),
    "half, some infinite before": ("odd", "own.toml", torch.float16),
    "computed": ("odd", "huge.toml", torch.float32),
    "nothing": ("source", "own.toml", torch.float16),
}
"""The source, the table and the dtype."""


def said(folder: Path, module: nn.Module, source: str, table: str, dtype: torch.dtype) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        porting.load(folder / source, module, folder / table, dtype=None if dtype is torch.float32 else dtype)
    return [str(one.message) for one in caught if issubclass(one.category, porting.PortingWarning)]


UNEVEN = {"row": (1, 5), "rows": (2, 3), "column": (7, 1), "none": (0, 4), "line": (2,), "cube": (2, 5, 1)}
"""Tensors with fewer rows than processes, and such that cannot be divided."""


def uneven(folder: Path, rank: int, count: int) -> Result:
    """Tensors that leave some processes without an element, cut along every axis; loaded, and exported again."""
    result: Result = {"differ": [], "read": [], "files": []}
    whole = nn.ParameterDict({name: torch.empty(shape) for name, shape in UNEVEN.items()})
    porting.load(folder / "uneven", whole, folder / "uneven.toml")
    for axis in range(4):
        for meta in (True, False):
            with torch.device("meta" if meta else "cpu"):
                module = nn.ParameterDict({name: torch.zeros(shape) for name, shape in UNEVEN.items()})
            if axis == 3:
                fully_shard(module, mesh=mesh_of(count))
            else:
                for name, parameter in module.items():
                    place = Shard(min(axis, parameter.ndim - 1))
                    module[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh_of(count), [place]))
            porting.load(folder / "uneven", module, folder / "uneven.toml")
            differ = [name for name, tensor in module.items() if not torch.equal(gathered(tensor), whole[name])]
            result["differ"] += [f"{name} along {axis}" for name in differ]
            record = porting.provenance(module)
            assert record is not None
            result["read"].append(record.nbytes_read)
            name = f"uneven-{count}-{axis}-{meta}"
            porting.export(module, folder / "uneven.toml", folder / name)
            result["files"].append(name)
    return result


def computes(folder: Path, rank: int, count: int) -> Result:
    """A BERT under FSDP gives the bits that it gives in one process."""
    from porting.models.bert_heads import BertForPreTraining

    whole = porting.load(folder / "bert")
    assert isinstance(whole, BertForPreTraining)
    with torch.device("meta"):
        module = BertForPreTraining(config=whole.bert.config)
    for layer in module.bert.layers:
        fully_shard(layer, mesh=mesh_of(count))
    fully_shard(module, mesh=mesh_of(count))
    porting.load(folder / "bert", module.eval())
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        sharded, other = values(module(ids)), values(whole(ids))
    return {"same": all(map(torch.equal, sharded, other)), "n": len(sharded)}


def values(output: object) -> list[Tensor]:
    found = output if isinstance(output, tuple | list) else vars(output).values()
    return [value for value in found if isinstance(value, Tensor)]


def refused(folder: Path, rank: int, count: int) -> Result:
    """A dropped copy that is none is told by every process, though only one of them sees it."""
    module = cut_by_fsdp(own.Own(own.SIZES), mesh_of(count))
    before = [parameter.to_local().clone() for parameter in module.parameters() if isinstance(parameter, DTensor)]
    try:
        porting.load(folder / "wrong", module, folder / "own.toml")
    except porting.PortingError as error:
        after = [parameter.to_local() for parameter in module.parameters() if isinstance(parameter, DTensor)]
        return {"told": str(error), "untouched": all(map(torch.equal, before, after))}
    return {"told": ""}


def main(folder: Path, rank: int, count: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{count}", rank=rank, world_size=count)
    flat = mesh_of(count)
    results: dict[str, Result] = {
        "fsdp": loaded(folder, cut_by_fsdp, flat),
        "fsdp on meta": loaded(folder, cut_by_fsdp, flat, meta=True),
        "fsdp on meta in bfloat16": loaded(folder, cut_by_fsdp, flat, meta=True, dtype=torch.bfloat16),
        "tensor parallelism": loaded(folder, cut_by_tensor_parallelism, flat),
        "columns": loaded(folder, cut_by_columns, flat),
        "wide": wide(folder, rank, count),
        "refused": refused(folder, rank, count),
        "formulas": formulas(folder, rank, count),
        "lost": lost(folder, rank, count),
        "uneven": uneven(folder, rank, count),
    }
    results["export"] = exported(folder, cut_by_fsdp, flat, f"fsdp-{count}")
    results["cast"] = cast(folder, cut_by_fsdp if count == 2 else cut_by_columns, flat, f"cast-{count}")
    results["unexportable"] = unexportable(folder, flat)
    if count == 4:
        results["export both"] = exported(folder, cut_by_both, mesh_of(2, 2), "both")
        results["export two axes"] = exported(folder, cut_by_columns, mesh_of(2, 2), "axes")
        mesh = mesh_of(2, 2)
        results["both"] = loaded(folder, cut_by_both, mesh)
        results["both on meta"] = loaded(folder, cut_by_both, mesh, meta=True)
        results["two axes"] = loaded(folder, cut_by_columns, mesh)
    elif count == 2:
        results["computes"] = computes(folder, rank, count)
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"result-{count}-{rank}.json").write_text(json.dumps(results))


def forked(count: int, work: Callable[[int], None]) -> bool:
    """As many processes as are asked for, made from this one, which has imported everything; whether all did well.

    Args:
        count: how many.
        work: what each does; it is given its number.
    """
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            try:
                work(rank)
            except BaseException:  # noqa: BLE001  # a child must not go on as its parent
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    return not any(codes)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for number in map(int, sys.argv[2:]):
        if not forked(number, lambda rank: main(place, rank, number)):  # noqa: B023  # it has run before the next
            sys.exit(1)

"""``load``: load a checkpoint into a module."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from porting.cli import options
from porting.cli.output import Screen, free, size
from porting.printable import counted, dtype_name

if TYPE_CHECKING:
    from torch import nn

    from porting.checkpoint import Checkpoint
    from porting.plan.plan import Plan


def load(
    source: options.Source = None,
    dtype: options.CastDType = None,
    own: Annotated[bool, typer.Option("--own", help="Copy the weights instead of mapping the file.")] = False,
    as_json: options.Json = False,
    *,
    model: options.WeightOptions,
) -> None:
    """Load a checkpoint into a module, and print what was built.

    Weights are views of the mapped file where the table's rules and the dtype allow it: they cost no memory of their
    own, and nothing is read before it is used.

    \b
    Examples:
      porting load
      porting load ./my-checkpoint --dtype bfloat16
      porting load ./my-checkpoint --table my_table.toml --into my_model.py:build
    """
    with Screen("load", as_json=as_json) as screen:
        from porting.checkpoint import open_checkpoint
        from porting.loading import load as fill

        make = model.builder()
        checkpoint = open_checkpoint(options.checkpoint_source(source))
        with screen.working("loading"):
            begun = time.perf_counter()
            module = fill(
                checkpoint,
                make,
                model.table,
                architecture=model.architecture,
                dtype=options.dtype_of(dtype),
                fresh=model.fresh,
                own=own,
                trust=model.trust,
            )
            seconds = time.perf_counter() - begun
        plan = _plan(module)
        left_out = {left.name: f"equals {left.equals}" if left.equals else left.reason for left in plan.left_out}
        new = list(plan.fresh)
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        built = _built(module, checkpoint)
        screen.document({**built, "left_out": left_out, "made": plan.contents, "new": new, "seconds": seconds})
        screen.facts(
            {
                "checkpoint": checkpoint.location,
                "table": plan.table.where,
                "module": built["module"],
                "parameters": f"{built['parameters']:,} in {counted(built['tensors'], 'tensor')}",
                "dtype": ", ".join(built["dtypes"]),
                "memory": f"{size(built['mapped'])} mapped from the file, {size(built['copied'])} of its own",
                "left out": f"{counted(len(left_out), 'tensor')}: {reasons}" if left_out else "",
                "made": ", ".join(f"{name} = {value}" for name, value in plan.contents.items()),
                "new": ", ".join(new),
                "seconds": f"{seconds:.3f}",
            }
        )
        given = options.source_argument(source)
        further = ["verify", *given] if plan.table.probes else ["export", *given, free("exported")]
        screen.next(*further, *model.flags)


def _plan(module: nn.Module) -> Plan:
    """The plan by which a loaded module was filled; each module remembers it."""
    from porting.loading import provenance

    record = provenance(module)
    if record is None:
        raise RuntimeError("the module lost its provenance while it was loaded")  # a bug of ours
    return record.plan


def _built(module: nn.Module, checkpoint: Checkpoint) -> dict[str, Any]:  # names, counts and bytes
    """The contents of a module, each tensor counted once; ``mapped``: bytes that are views of the checkpoint's file."""
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}.values()
    # A view of the mapped file starts at the same address as any other view of the same tensor.
    views = [name for name in checkpoint.tensors if checkpoint.maps(name)]
    starts = {checkpoint.read(name).untyped_storage().data_ptr() for name in views}
    mapped = sum(one.nbytes for one in tensors if one.untyped_storage().data_ptr() in starts)
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "parameters": sum(one.numel() for one in {id(one): one for one in module.parameters()}.values()),
        "tensors": len(tensors),
        "dtypes": tuple(sorted({dtype_name(one.dtype) for one in tensors})),
        "mapped": mapped,
        "copied": sum(one.nbytes for one in tensors) - mapped,
    }

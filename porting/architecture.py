"""Which of a table's architectures a checkpoint holds, a caller asks for, or a module is."""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import nn

from porting.errors import Code, Fault, Message, Option, nearest
from porting.notation.table import Architecture, Table
from porting.target import TargetError


def choose(
    table: Table, tensors: Container[str], config: Mapping[str, object], architecture: str | None = None
) -> Architecture:
    """The architecture that was asked for, or the one that holds most of a checkpoint.

    Of those whose witnesses are all there, the one with the most; among equals, the one that the config names.

    Args:
        table: the table.
        tensors: the names of the checkpoint's tensors.
        config: its config.
        architecture: the one that is asked for.

    Raises:
        TargetError: the table has no such architecture, or none at all.
    """
    names = [entry.name for entry in table.architectures]
    if not names and architecture is None:
        message = f"table '{table.name}' names no module to build"
        raise TargetError(
            Fault(code=Code.BAD_TARGET, where=table.where, message=message, hint=Message("pass ", Option("into")))
        )
    if architecture is not None:
        if architecture not in names:
            hint = nearest(architecture, names) or f"it has {', '.join(names) or 'none'}"
            message = f"table '{table.name}' has no architecture {architecture!r}"
            raise TargetError(Fault(code=Code.UNKNOWN_ARCHITECTURE, where=table.where, message=message, hint=hint))
        return table.architectures[names.index(architecture)]
    declared = config.get("architectures")
    declared = declared if isinstance(declared, list) else []
    fitting = [entry for entry in table.architectures if all(_holds(table, tensors, name) for name in entry.holds)]
    return max(fitting or table.architectures[:1], key=lambda entry: (len(entry.holds), entry.name in declared))


def _holds(table: Table, tensors: Container[str], name: str) -> bool:
    return name in tensors or name.removeprefix(table.prefix) in tensors


def recognise(table: Table, module: nn.Module | type[nn.Module]) -> Architecture | None:
    """The architecture that a module or class is: one that the table names, or made from one by subclassing."""
    targets = {entry.target: entry for entry in table.architectures}
    kind = module if isinstance(module, type) else type(module)
    paths = (f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__)
    return next((targets[path] for path in paths if path in targets), None)

"""Where a module's weights came from, remembered for as long as the module lives."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from porting.checkpoint import Checkpoint
from porting.notation.table import Architecture
from porting.plan.plan import Plan
from porting.target import unwrapped


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a module's weights came from.

    Attributes:
        checkpoint: the checkpoint.
        plan: what went where.
        architecture: the table's architecture that the module is or, for a module of the user's own, that the
            checkpoint holds; None when the table has none.
        nbytes_read: the bytes that this process read for its shards; None for a module that is whole, whose weights
            are views of the mapped files.
    """

    checkpoint: Checkpoint
    plan: Plan
    architecture: Architecture | None
    nbytes_read: int | None = None


_KNOWN: WeakKeyDictionary[nn.Module, Provenance] = WeakKeyDictionary()


def provenance(module: nn.Module) -> Provenance | None:
    """Where the weights of ``module`` came from, if :func:`porting.load` filled it in this process.

    A copy of a module has none; one wrapped by ``torch.compile`` or for data parallelism has that of the module inside.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> provenance(porting.load(source)).plan.table.name
    'bert'
    """
    return _KNOWN.get(unwrapped(module))


def remember(module: nn.Module, record: Provenance) -> None:
    """Note where the weights of ``module`` came from."""
    _KNOWN[unwrapped(module)] = record

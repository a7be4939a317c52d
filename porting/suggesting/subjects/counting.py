"""How far a run came: the operations that it ended with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its modes
    """Counts torch's operations.

    Attributes:
        operations: how many there were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.operations = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:  # as torch calls it
        """Count one that has an end."""
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        return result

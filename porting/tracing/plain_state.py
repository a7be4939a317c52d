"""A model's plain numbers that change between calls, restored to their values before the first call.

Some references change their own settings when they run: Swin's layers set their shift to 0 for a picture of one window,
and keep it.  So a call may depend on the calls before it.  A port is compared with a reference that was just loaded.

But a setting that goes with weights is left: RWKV divides some of its weights in its first call, and notes that it has.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

from torch import nn

PLAIN: Final = (bool, int, float, str, type(None))
"""The types of what is taken back, by themselves or in a tuple."""


class PlainState:
    """The plain attributes of a model and of its modules, as they were.

    Args:
        module: the model, before it runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._values = {path: _plain(one) for path, one in module.named_modules()}

    def restore(self, module: nn.Module) -> None:
        """Give the model, or a copy of it, the attributes that it had; those that are new stay."""
        for path, one in module.named_modules():
            now = vars(one)
            for name, value in self._values.get(path, {}).items():
                if name in now and (type(now[name]) is not type(value) or now[name] != value):
                    setattr(one, name, value)


def versions(module: nn.Module) -> dict[str, int]:
    """Return how many times each parameter and buffer was changed in place."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    return {name: one._version for name, one in tensors if not one.is_inference()}


def _plain(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name != "training" and _is_plain(value)}


def _is_plain(value: object) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_plain, value)))

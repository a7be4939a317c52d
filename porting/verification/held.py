"""The weights that a module holds, as if they lay in a checkpoint: for ports of models that no file holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint
from porting.checkpoint.layout import TensorInfo
from porting.errors import Code, Fault, nearest
from porting.target import named_tensors
from porting.tracing.faults import VerifyError


class HeldWeights(Checkpoint):
    """A checkpoint without a file: parameters and persistent buffers of a module, by their names.

    Args:
        module: the module; its tensors are read when they are asked for, and never written to.
        location: what it is called in messages.
    """

    def __init__(self, module: nn.Module, location: str) -> None:
        self.location = location
        self.path = None
        self.commit = None
        self.config = config_of(module)
        self.files = ()
        self.index = None
        self.index_file = None
        self.warnings = ()
        self._held = dict(named_tensors(module))
        names: dict[int, set[str]] = {}
        for name, tensor in self._held.items():
            names.setdefault(id(tensor), set()).add(name)
        self.shared = tuple(frozenset(group) for group in names.values() if len(group) > 1)
        self.tensors = {
            name: TensorInfo(name=name, shape=tuple(one.shape), dtype=one.dtype, nbytes=one.nbytes, file=location)
            for name, one in self._held.items()
        }

    def read(self, name: str, *, own: bool = False) -> Tensor:
        """A copy of one tensor: who loads it may write to it."""
        if name not in self._held:
            message = f"{self.location} holds no tensor {name!r}"
            raise VerifyError(Fault(code=Code.TENSOR_UNKNOWN, message=message, hint=nearest(name, list(self._held))))
        return self._held[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def config_of(module: nn.Module) -> Mapping[str, object]:
    """The fields of a module's ``config``, whatever that is; none when it has none."""
    config = getattr(module, "config", None)
    if isinstance(config, Mapping):
        return {str(name): value for name, value in config.items()}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    to_dict = getattr(config, "to_dict", None)
    found = to_dict() if callable(to_dict) else getattr(config, "__dict__", {})
    return dict(found) if isinstance(found, Mapping) else {}

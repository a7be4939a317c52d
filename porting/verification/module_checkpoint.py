"""The weights that a module holds, as if they lay in a checkpoint: for ports of models that no file holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint
from porting.checkpoint.layout import ElementType, TensorInfo
from porting.errors import Code, Fault, VerifyError, nearest
from porting.frames import users_attribute
from porting.target import named_tensors


class HeldWeights(Checkpoint):
    """A checkpoint without a file: parameters and persistent buffers of a module, by their names.

    Args:
        held: the module, or tensors by name; they are read when they are asked for, and never written to.
    """

    def __init__(self, held: nn.Module | Mapping[str, Tensor], location: str) -> None:
        config = config_of(held) if isinstance(held, nn.Module) else {}
        super().__init__(location=location, path=None, config=config, contents=(), sources={}, index=None)
        self.warnings = ()
        self._held = dict(named_tensors(held) if isinstance(held, nn.Module) else held)
        names: dict[int, set[str]] = {}
        for name, tensor in self._held.items():
            names.setdefault(id(tensor), set()).add(name)
        self.shared = tuple(frozenset(group) for group in names.values() if len(group) > 1)
        self.tensors = {
            name: TensorInfo(
                name=name, shape=tuple(one.shape), element=ElementType.of(one.dtype), nbytes=one.nbytes, file=location
            )
            for name, one in self._held.items()
        }

    def _check(self, *files: object) -> tuple[()]:
        """Nothing: there are no files."""
        return ()

    def read(self, name: str, *, own: bool = False) -> Tensor:
        """A copy of one tensor: who loads it may write to it."""
        if name not in self._held:
            message = f"{self.location} holds no tensor {name!r}"
            raise VerifyError(Fault(code=Code.TENSOR_UNKNOWN, message=message, hint=nearest(name, list(self._held))))
        return self._held[name].detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


LARGE = 1 << 20
"""Bytes of a weight from which on it is worth a look whether a file has it."""


def share(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Let the weights of a module whose values a checkpoint has be views of its mapped files, as the port's are.

    They are found by their values: a reference may call them otherwise than its files.

    Args:
        module: its large parameters and buffers are replaced where they are found.
    """
    names: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
    for name, info in checkpoint.tensors.items():
        names.setdefault((tuple(info.shape), info.dtype), []).append(name)
    for path, tensor in dict(named_tensors(module)).items():
        if tensor.nbytes < LARGE or tensor.is_meta:
            continue
        candidates = names.get((tuple(tensor.shape), tensor.dtype), [])
        for name in sorted(candidates, key=lambda one: not path.endswith(one) and not one.endswith(path)):
            view = checkpoint.read(name)
            if torch.equal(view[:1], tensor.detach()[:1]) and torch.equal(view, tensor.detach()):
                tensor.data = view
                break


def config_of(module: nn.Module) -> Mapping[str, object]:
    """The fields of a module's ``config``, whatever that is; none when it has none."""
    config = users_attribute(module, "config")
    if isinstance(config, Mapping):
        return {str(name): value for name, value in config.items()}
    to_dict = users_attribute(config, "to_dict")
    if callable(to_dict):  # first: a config of transformers is a dataclass with fields that may not be read one by one
        found = to_dict()
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        found = dataclasses.asdict(config)
    else:
        found = users_attribute(config, "__dict__", {})
    return dict(found) if isinstance(found, Mapping) else {}

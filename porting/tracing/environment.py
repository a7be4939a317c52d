"""What a verification runs in: the versions of what takes part, and torch as nobody has set it."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch


@contextmanager
def undisturbed(seed: int) -> Iterator[None]:
    """Whatever the caller has switched on or off, and with torch's random state as before afterwards."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.manual_seed(seed)
        yield


def versions() -> dict[str, str]:
    """Of Python and of the packages that take part."""
    packages = ("porting", "torch", "transformers", "safetensors")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source, on the path and not installed
        return "not installed"


def peak() -> int:
    """The largest resident size of the process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

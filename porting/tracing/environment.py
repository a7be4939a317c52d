"""What a verification runs in: the versions of what takes part, and torch's settings, which are put back."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch

SMALL = 1 << 23
"""Parameters: the passes of a smaller model are not faster with two threads than with one."""


@contextmanager
def undisturbed(seed: int) -> Iterator[None]:
    """Whatever the caller has switched on or off; torch's random state and threads are as before afterwards."""
    threads = torch.get_num_threads()
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def limit_threads(elements: int) -> None:
    """Use one thread for a small model, until :func:`undisturbed` ends.

    Threads that share such small operations mostly wait for one another, on busy cores for ten times as long.

    Args:
        elements: the number of parameters.
    """
    if elements < SMALL:
        torch.set_num_threads(1)


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

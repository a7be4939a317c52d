"""What holds for the tests of verification."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.small_checkpoint import write_checkpoint


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only wait for each other on models this small; on busy cores tests take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with all its pre-training heads."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "bert")

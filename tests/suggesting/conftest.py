from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_checkpoint import write_checkpoint


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with its heads."""
    return write_checkpoint(tmp_path_factory.mktemp("suggesting") / "bert")

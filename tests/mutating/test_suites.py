"""Suites as people have them: packages, fixtures, settings of their own, tests that hang and tests that chatter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from porting.mutating import mutate
from porting.mutating.fork_server import ForkClient, SuiteRun, listen
from porting.mutating.messages import MutationRequest

ROOT = Path(__file__).parents[2]

PORT = """
import math
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        variance = x.var(-1, keepdim=True, unbiased=False)
        return self.gain * (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-12) + self.shift


class Port(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 8), Norm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, ids, attention_mask=None):
        hidden = self.norm(self.words(ids))
        wide = self.up(hidden)
        return hidden + self.down(0.5 * wide * (1 + torch.erf(wide / math.sqrt(2))))


def build():
    torch.manual_seed(0)
    return Port().eval()
"""

CONFTEST = """
import pytest
from suite.port import build


@pytest.fixture(scope="session")
def port():
    return build()
"""

TESTS = """
import torch
from suite import expected


def test_shape(port):
    print("chatter " * 1_000_000)
    ids = torch.arange(6)[None]
    found = port(ids)
    assert found.shape == (1, 6, 8)
    while found.norm() < expected.NORM / 2:  # waits for what never comes
        pass
    assert abs(found.mean() - expected.MEAN) < 1e-2
"""

EPS, GELU, RESIDUAL = "LayerNorm eps", "tanh GELU for another activation", "residual missing"

SETTINGS = """
[pytest]
addopts = -n 2 --ff
pythonpath = src
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the suite runs in a process of its own, with this porting
    package = tmp_path / "src" / "suite"
    (package / "tests").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text(SETTINGS, encoding="utf-8")
    for path, text in {
        "__init__.py": "",
        "port.py": PORT,
        "expected.py": "NORM, MEAN = 7.0285, 0.0318\n",
        "tests/__init__.py": "",
        "tests/conftest.py": CONFTEST,
        "tests/test_port.py": TESTS,
    }.items():
        (package / path).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_package_with_fixtures_and_settings_of_its_own(suite: Path) -> None:
    """Norm and activation are written out; the suite is run by several processes, prints much, and one test hangs."""
    score = mutate(["src/suite/tests"], "src/suite/port.py:build", only=[EPS, GELU, RESIDUAL], timeout=20.0)
    assert {mutation.name: mutation.outcome for mutation in score.mutations} == {
        EPS: "survived", GELU: "survived", RESIDUAL: "timed out",
    }  # fmt: skip
    assert score.survivors[0].advice.startswith("torch.testing.assert_close(port(...), expected, rtol=0, atol=")
    assert "padding mask ignored" in score.absent
    assert "LayerNorm gain missing" not in (*score.absent, *score.equivalent)


STARTS = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"


def gone(number: int) -> bool:
    """Whether a process has ended, or has and nobody has asked for its exit code yet."""
    words = ["ps", "-o", "stat=", "-p", str(number)]
    for _ in range(10_000):  # on a busy machine it may take long
        state = subprocess.run(words, capture_output=True, text=True, check=False)  # ps
        if not state.stdout.strip() or state.stdout.startswith("Z"):
            return True
        time.sleep(0.05)
    return False


def test_what_runs_too_long_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    for seconds in (2.0, 20.0, 200.0):  # on a busy machine it may not have begun after the first ones
        ended = SuiteRun([sys.executable, "-c", STARTS], os.environ, tmp_path / "printed").ended(timeout=seconds)
        assert ended.code is None
        if ended.output:
            break
    assert gone(int(ended.output))


def test_the_end_of_much_output_is_kept(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('x' * 5_000_000); print('the last line'); raise SystemExit(3)"]
    ended = SuiteRun(words, os.environ, tmp_path / "printed").ended()
    assert (ended.code, ended.output[-15:]) == (3, "\nthe last line\n")
    assert len(ended.output) <= 20_000


SERVES = """
import os, subprocess, sys, time
from porting.mutating.fork_server import ForkServer

for request in ForkServer(sys.argv[1]).requests():
    if request.mistake == "hangs":
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        time.sleep(600)
    os._exit(int(request.mistake))
"""


@pytest.mark.slow
def test_each_order_gets_a_copy_and_a_copy_that_hangs_is_ended(tmp_path: Path) -> None:
    with listen(tmp_path) as listening:
        words = [sys.executable, "-c", SERVES, str(tmp_path / "request")]
        running = SuiteRun(words, {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path / "printed")
        requests = [MutationRequest(into="", mistake=mistake, answer="") for mistake in ("0", "hangs", "7")]
        with running, closing(ForkClient(running, listening)) as client:
            assert [client.run(request, 10.0 if request.mistake == "hangs" else None).code for request in requests] == [
                0,
                None,
                7,
            ]
    assert gone(int(running.output))


def test_a_process_that_ends_before_it_serves_says_why(tmp_path: Path) -> None:
    with listen(tmp_path) as listening:
        running = SuiteRun([sys.executable, "-c", "raise SystemExit('no such file')"], os.environ, tmp_path / "printed")
        ended = ForkClient(running, listening).run(MutationRequest(into="", answer=""), None)
    assert (ended.code, ended.output) == (1, "no such file\n")

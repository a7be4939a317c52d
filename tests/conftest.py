"""What holds for every test: seeded, offline, and the same on every machine."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Set before torch and huggingface_hub are imported: they read their environment then.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers share the cores; threads on top of them only wait for each other
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_XET"] = "1"  # its transfers bypass Python's sockets, and with them the guard below
os.environ["HF_TOKEN_PATH"] = os.devnull  # a developer's own token is nobody's business here
os.environ.pop("HF_TOKEN", None)

# A shell starts what runs in the background with SIGINT ignored, and children inherit that: those that tests interrupt
# would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, however long they take: a failure can be repeated, and no test is timed.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")


SLOW_EXAMPLES = (
    "porting.suggesting.pipeline.suggest",
    "porting.reporting.report.Report",
    "porting.verification.proof.verify",
)
"""Slow examples in docstrings: they verify the bundled checkpoint, as the first example of README.md does anyway."""


SLOW_CASES = 2
"""Of the slow cases of one test so many are in the slow tier, which would take an hour otherwise."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--update`` writes the snapshots of ``tests/snapshots`` anew."""
    parser.addoption("--update", action="store_true", help="write tests/snapshots anew instead of comparing with them")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``few(n)``, n of its cases are in the default tier, evenly spaced; the others are slow.

    So are the slow examples of docstrings.  Of the slow cases of a test, :data:`SLOW_CASES` are in the slow tier, or n
    where it is marked ``sampled(n)``; the others, which are slow as well, are run by ``make test-all``.
    """
    for item in items:
        if item.name in SLOW_EXAMPLES:
            item.add_marker(pytest.mark.slow)
    _spread(items, "few", None, pytest.mark.slow)
    _spread([item for item in items if item.get_closest_marker("slow")], "sampled", SLOW_CASES, pytest.mark.unsampled)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once which test failed: what is printed at the end is lost where a time limit ends the run."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        lines = report.longreprtext.splitlines()
        said = [line for line in lines if line.startswith("E ")] or lines[-1:]
        sys.stderr.write("\n".join(["", f"FAILED {report.nodeid} ({report.when})", *said[:20], ""]))


def _spread(items: list[pytest.Item], marker: str, usual: int | None, others: pytest.MarkDecorator) -> None:
    """Give all but n cases of each test, evenly spaced, the marker of the others.

    Args:
        items: the cases of all tests.
        marker: the name of a marker with a number: so many cases of the test are left as they are.
        usual: the number for tests without that marker; None to leave all of their cases.
        others: what the other cases are marked with.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for many in cases.values():
        found = many[0].get_closest_marker(marker)
        count = int(found.args[0]) if found else usual
        if count is None:
            continue
        chosen = {len(many) * number // count for number in range(count)}
        for place, item in enumerate(many):
            if place not in chosen:
                item.add_marker(others)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state, whatever ran before it."""
    import torch

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def unhurried() -> Iterator[None]:
    """Limits on the time of the day count what is computed instead: a busy machine decides no test."""
    from tests.processor_clock import install

    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield


@pytest.fixture(autouse=True)
def offline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test reaches no other machine, unless it is marked ``hub``; servers on loopback are fine."""
    if request.node.get_closest_marker("hub"):
        yield
        return
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:  # Any: an address has a type for each family
        host = address[0] if isinstance(address, tuple) else ""  # a string is a path: a socket of this machine
        if host not in ("", "127.0.0.1", "::1", "localhost"):
            msg = f"the test tried to reach {host}; only tests marked `hub` may leave this machine"
            raise PermissionError(msg)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    yield


@pytest.fixture(autouse=True, scope="module")
def forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was imported from a test's own folder is not there for the next: two may give a file the same name."""
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(written):
            del sys.modules[name]

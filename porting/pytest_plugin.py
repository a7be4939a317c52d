"""A pytest plugin: a fixture and a marker that verify a port.

pytest loads this wherever porting is installed, so it imports nothing that takes time before a test asks for it.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    SupportsFloat,
    SupportsIndex,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest

if TYPE_CHECKING:
    from porting.checkpoint import Checkpoint
    from porting.verification import Report

OPTION = "porting_html"
LONGEST = 100
"""Characters of a test's name in the name of its page; a digest of the whole name makes it unique."""

_PAGES = pytest.StashKey[Path | None]()
_OPENED = pytest.StashKey[dict[tuple[str, str | None], "Checkpoint"]]()
_COUNT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--porting-html DIR``, and the same in the configuration file."""
    words = "where to write the report of a port that is not faithful, as a page for a browser"
    parser.getgroup("porting").addoption("--porting-html", dest=OPTION, metavar="DIR", help=words)
    parser.addini(OPTION, words, default="")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker and fix the folder of pages, before a test can change the current folder."""
    config.addinivalue_line(
        "markers",
        "porting(source, into=None, table=None, ...): prove a port, as porting.verify is called, then the test",
    )
    asked, written = config.getoption(OPTION), config.getini(OPTION)
    folder = config.invocation_params.dir / asked if asked else config.rootpath / written if written else None
    if folder is not None and folder.exists() and not folder.is_dir():
        raise pytest.UsageError(f"--porting-html: {folder} is a file, and a folder is needed")
    config.stash[_PAGES] = folder
    config.stash[_OPENED] = {}


@pytest.fixture
def porting_verify(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """A function with the arguments of ``porting.verify`` that fails the test if the port differs.

    The test fails with the report when the port is not faithful, nor approximate as its table declares; and with the
    faults, each in a line, when it cannot be verified.  With ``--porting-html DIR`` the report is a page there, too.
    """

    # Whatever porting.verify takes, passed on as it is.
    def verify(*args: Any, **kwargs: Any) -> Report:
        __tracebackhide__ = True
        return _prove(request.node, args, kwargs)

    return verify


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Verify the ports of the test's markers before the test runs."""
    for marker in reversed(list(item.iter_markers("porting"))):  # as they are written, from the outermost
        _prove(item, marker.args, marker.kwargs)


def _prove(item: pytest.Item, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Report:
    __tracebackhide__ = True
    found = _verified(item, args, kwargs)
    if isinstance(found, str):
        pytest.fail(found, pytrace=False)
    item.user_properties.append(("porting_verdict", found.verdict))
    if not found.as_claimed:
        pytest.fail(_message(item, found), pytrace=False)
    return found


def _verified(item: pytest.Item, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Report | str:
    """The report, or the reason why there is none (a failure raised in a handler would show both errors)."""
    from porting.errors import PortingError  # noqa: PLC0415  # torch and transformers, from here on
    from porting.frames import users_line  # noqa: PLC0415  # as above
    from porting.printable import safe, told  # noqa: PLC0415  # as above
    from porting.verification import verify  # noqa: PLC0415

    try:
        given = inspect.signature(verify).bind(*args, **kwargs)
        hints = get_type_hints(verify)
    except TypeError as error:
        return f"the port is not verified: {error}; it is called as porting.verify is"
    wrong = [
        f"{name} is of type {type(value).__name__}, expected {_spelled(hints[name])}"
        for name, value in given.arguments.items()
        if not _fits(value, hints[name])
    ]
    if wrong:
        return f"the port is not verified: {'; '.join(wrong)}"
    try:
        if "source" in given.arguments:
            given.arguments["source"] = _source(item, given.arguments["source"], given.arguments.get("revision"))
        return verify(*given.args, **given.kwargs)
    except PortingError as error:
        return "\n".join(["the port cannot be verified:", *(f"  {safe(str(fault))}" for fault in error.faults)])
    except (Exception, KeyboardInterrupt, pytest.skip.Exception, pytest.fail.Exception, pytest.exit.Exception):
        raise
    except BaseException as error:  # noqa: BLE001  # what builds the module may end the program, as a script does
        return f"the port cannot be verified:\n  {safe(told(error))} (at {users_line(error)})"


def _fits(value: object, hint: Any) -> bool:  # Any: types have no type
    """Whether an argument is of the type that a signature names, elements of sequences included."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in {Union, UnionType}:
        return any(_fits(value, one) for one in inner)
    if origin is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str) and all(_fits(one, inner[0]) for one in value)
    if hint in {int, float}:
        return isinstance(value, SupportsIndex if hint is int else SupportsFloat)
    return isinstance(value, origin or hint)


def _spelled(hint: Any) -> str:  # Any: as above
    """A type as an annotation spells it, without the modules that its names come from."""
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else re.sub(r"\b([a-z]\w*\.)+", "", str(hint))


def _source(item: pytest.Item, source: object, revision: str | None) -> object:
    """The checkpoint; one on the hub is fetched once in a run, or once by each worker.

    Nothing else is kept from one test to the next: a module, a table or a file may have changed in between.
    """
    if not isinstance(source, str) or os.path.exists(source):
        return source
    from porting.checkpoint import open_checkpoint  # noqa: PLC0415  # as above

    opened = item.config.stash[_OPENED]
    if (source, revision) not in opened:
        opened[source, revision] = open_checkpoint(source, revision=revision)
    return opened[source, revision]


def _message(item: pytest.Item, report: Report) -> str:
    from porting.reporting.terminal import as_text  # noqa: PLC0415  # as above

    folder = item.config.stash[_PAGES]
    if folder is None:
        return f"{as_text(report)}\nthe report as a page to look at: pytest --porting-html DIR"
    page = folder / _page_name(item)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        half = report.save_html(page.with_suffix(f".{os.getpid()}.part"))
        half.replace(page)  # whoever looks meanwhile sees a whole page
    except OSError as error:
        return f"{as_text(report)}\nthe report as a page: it cannot be written: {error}"
    item.user_properties.append(("porting_html", str(page)))
    return f"{as_text(report)}\nthe report as a page: {page}"


def _page_name(item: pytest.Item) -> str:
    """A file name that is unique for a test, its proofs and a worker, whatever the test's name."""
    count = item.stash[_COUNT] = item.stash.get(_COUNT, 0) + 1
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", item.nodeid).strip("-")[-LONGEST:].lstrip("-")
    parts = [readable, hashlib.sha256(item.nodeid.encode(errors="backslashreplace")).hexdigest()[:8]]
    parts += [worker] if (worker := os.environ.get("PYTEST_XDIST_WORKER")) else []
    parts += [str(count)] if count > 1 else []
    return "-".join(parts) + ".html"

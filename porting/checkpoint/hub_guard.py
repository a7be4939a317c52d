"""Limits on a hub's answers: each response is checked before the client uses it, its bytes and the time are limited.

huggingface_hub makes file names of headers: it joins ``ETag`` and ``X-Repo-Commit`` to folders of its cache, so that a
hub, or a mirror, that answers ``ETag: "/home/me/.bashrc"`` overwrites that file (docs/hostile-inputs.md has the report
for its authors).  Here a hook of the HTTP client checks every response to a request that is made through
:func:`guarded`; other requests of the program are not changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextvars import ContextVar, copy_context
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but without __all__
    _http,
    get_session,
)

from porting.checkpoint.errors import HubError, quote
from porting.checkpoint.hub_errors import (
    BEGINNING,
    HTTP_ERROR,
    TOO_MANY,
    CallError,
    Exchange,
    Explanation,
    asked_to_wait,
    failing,
    too_many,
)
from porting.errors import Code, Fault, PortingError
from porting.limits import RATE, raised, spending
from porting.printable import safe

Value = TypeVar("Value")

ETAG = re.compile(r'(?:W/)?"?([A-Za-z0-9_-]{1,128})"?')
"""ETags that the client may use as file names: it removes the ``W/`` and the quotes."""

WARNING, LONGEST_WARNING = "X-HF-Warning", 500
"""A header that the client prints, and how many characters of it."""

SHA256 = re.compile(r"[0-9a-f]{64}")

LARGEST_ANSWER = 1 << 22
"""Bytes of an answer that is kept in memory, such as the list of 40,000 files of a model."""

MOST_PIECES, LEAST_PIECE = 50_000, 256
"""Pieces of a body of any size, and bytes for each further piece: reading a body byte by byte costs processor time."""

FAILING = (408, *range(500, 600))
"""The statuses after which the client tries again, besides :data:`TOO_MANY`."""

PATIENCE = 10
"""Seconds that a server with an error of its own may ask the client to wait, over all its tries of one file."""

TRIES = 3
"""Requests for one file that may fail in a row: after each the client waits twice as long, 1 s at first."""

WHOLE, PARTIAL = (200, 203), 206
"""The statuses of a whole file, as a server or a proxy sends it, and that of a range."""

RANGE, CONTENT_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]*)"), re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]{1,18})")

LOOK = 1.0
"""Seconds between two checks of the client."""

A_SECOND = 20_000_000
"""Bytes that may cost the client a second of processor time; more time counts as that of descriptions."""

DEFAULT_ENDPOINT = constants.HUGGINGFACE_CO_URL_HOME.rstrip("/")
"""The only host that may send files by another protocol than HTTP (Xet), which cannot be counted here."""

SyncByteStream: Any = sys.modules[HTTP_ERROR.__module__.partition(".")[0]].SyncByteStream  # httpx's, or its successor's


class Guard:
    """The requirements on the responses to one call of the client.

    Args:
        commit: the commit that was asked for; None while it is not known.
        most: bytes of a body, where the server has not announced a length in reply to ``HEAD``.
        folder: where the bodies go; None when they stay in memory.
    """

    def __init__(
        self, where: str, *, commit: str | None = None, most: int = LARGEST_ANSWER, folder: Path | None = None
    ) -> None:
        self.where = where
        self.received = 0
        self.exchange = Exchange()
        self._pieces = 0
        self._commit = commit
        self._most = most
        self._folder = folder
        self._unseen = 0  # bytes that come by a way that is not counted
        self._failed = self._asked = 0
        self._answered = True
        self._announced = ""
        with spending() as budget:
            self.hub = budget.hub

    def ask(self) -> None:
        """Count a request; the one before it failed if no response came."""
        if not self._answered:
            message = f"{constants.ENDPOINT} broke the connection {self._failed + 1} times"
            self._fail(0, (Code.HUB_UNREACHABLE, message, failing(0, {})[2]))
        self._answered = False

    def _fail(self, asked: int, explanation: Explanation) -> None:
        """Count a failure, after which the server asked to wait so many seconds."""
        self._failed += 1
        self._asked += asked
        if self._failed > TRIES or self._asked > PATIENCE:
            raise self._told(explanation)

    def check(self, response: Any) -> None:  # Any: httpx's response, or its successor's
        """Check a response's headers, and count its body."""
        headers = response.headers
        self._answered = True
        asked = f"{response.request.method} {response.request.url.copy_with(query=None)}"
        self.exchange = Exchange(asked, response.status_code, headers.get("content-type", ""))
        if response.status_code == TOO_MANY:  # the client would wait, as long as the server says
            raise self._told(too_many(headers))
        if response.status_code in FAILING:
            self._fail(asked_to_wait(headers), failing(response.status_code, headers))
        elif response.is_success:
            self._failed = 0
            self._check_range(response.request.headers.get("range", ""), response)
        if headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise self._refused(f"Content-Encoding: {quote(headers['content-encoding'])}, and none was asked for")
        if WARNING in headers:  # the client prints each
            headers[WARNING] = safe(headers.get_list(WARNING)[0])[:LONGEST_WARNING]
        if response.request.method == "HEAD":
            self._check_file(headers)
        elif headers.get("etag") and not self._announced:  # of the hub, not of the host that it leads to
            self._announced = (headers.get("x-linked-etag") or headers["etag"]).removeprefix("W/").strip('"')
        response.stream = _Counted(response.stream, self._count(self._most))

    def _check_range(self, wanted: str, response: Any) -> None:  # Any: as above
        """Require the whole file, or the bytes of it that were asked for."""
        if response.status_code == PARTIAL:
            told = response.headers.get("content-range", "")
            asked, found = RANGE.fullmatch(wanted), CONTENT_RANGE.fullmatch(told)
            length = response.headers.get("content-length")
            if asked and found:
                start, stop, size = map(int, found.groups())
                last = min(int(asked[2] or size), size - 1)
                if start == int(asked[1]) <= stop <= last and length in (None, str(stop + 1 - start)):
                    return
            announced = f" and Content-Length: {quote(length)}" if length is not None else ""
            what = f"{wanted} was asked for" if wanted else "the whole file was asked for"
            raise self._refused(f"status {PARTIAL}, Content-Range: {quote(told)}{announced}, and {what}")
        if response.status_code not in WHOLE:
            raise self._refused(f"status {response.status_code}, and 200 was expected")

    def _check_file(self, headers: Any) -> None:
        for name in ("ETag", "X-Linked-ETag"):
            etag = headers.get(name)
            if etag is not None and not ETAG.fullmatch(etag):
                raise self._refused(f"{name}: {quote(etag)}, expected up to 128 letters, digits, '_' and '-'")
        commit = headers.get(constants.HUGGINGFACE_HEADER_X_REPO_COMMIT)
        if commit is not None and commit != self._commit:
            raise self._refused(f"X-Repo-Commit: {quote(commit)}, and {self._commit} was asked for")
        announced = headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_SIZE) or headers.get("content-length", "")
        if not re.fullmatch(r"[0-9]{1,18}", announced or "0"):
            raise self._refused(f"a length of {quote(announced)}")
        announced = announced or "0"
        self._most = max(self._most, int(announced))
        free = shutil.disk_usage(self._folder).free if self._folder is not None else self._most
        if int(announced) > free:
            raise HubError(
                Fault(
                    code=Code.HUB_CACHE,
                    where=self.where,
                    message=f"it should have {announced} bytes, and the disk of the cache has {free} left",
                    hint="make room, or set HF_HOME to a place with room",
                )
            )
        if constants.HUGGINGFACE_HEADER_X_XET_HASH in headers:
            if constants.ENDPOINT != DEFAULT_ENDPOINT:
                del headers[constants.HUGGINGFACE_HEADER_X_XET_HASH]  # the client then fetches the file by HTTP
            elif not SHA256.fullmatch(headers[constants.HUGGINGFACE_HEADER_X_XET_HASH]):
                raise self._refused(f"X-Xet-Hash: {quote(headers[constants.HUGGINGFACE_HEADER_X_XET_HASH])}")
            else:
                self._unseen = int(announced)
                self.hub.add(self._unseen)

    def _count(self, most: int) -> Callable[[bytes], None]:
        left, exchange = most, self.exchange

        def count(piece: bytes) -> None:
            nonlocal left
            left -= len(piece)
            self.received += len(piece)
            self.hub.add(len(piece))
            exchange.begins += piece[: BEGINNING - len(exchange.begins)]
            self._pieces += 1
            if left < 0:
                raise self._refused(f"more than {most} bytes, which is more than was announced or can be meant")
            if self._pieces > MOST_PIECES + self.received // LEAST_PIECE:
                raise self._refused(f"{self.received} bytes in {self._pieces} pieces, each of which takes time")

        return count

    def check_digest(self, path: Path, *, again: bool = False) -> None:
        """Require that a downloaded file has the SHA-256 that is its name in the cache, if it is one."""
        blob = Path(os.path.realpath(path))
        if not (again or self.received or self._unseen) or not SHA256.fullmatch(blob.name):
            return
        with blob.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != blob.name:
            path.unlink(missing_ok=True)
            blob.unlink(missing_ok=True)
        self._require_digest(digest, blob.name)

    def check_whole(self, raw: bytes, size: int) -> None:
        """Require the announced SHA-256, if there is one, of bytes that are the whole file."""
        if SHA256.fullmatch(self._announced) and len(raw) == size:
            self._require_digest(hashlib.sha256(raw).hexdigest(), self._announced)

    def _require_digest(self, found: str, announced: str) -> None:
        if found != announced:
            raise self._refused(f"bytes whose SHA-256 is {found}, and announced {announced}")

    def expired(self) -> HubError:
        """The error for a server that sends nothing, or too slowly."""
        message = f"{self.hub.received} bytes of all files came in {self.hub.waited:.0f} seconds, and then it was left"
        hint = f"try again; for a line slower than {RATE} bytes a second: {raised('waiting', 100 * self.hub.most)}"
        return HubError(Fault(code=Code.HUB_UNREACHABLE, where=self.where, message=message, hint=hint))

    def _told(self, explanation: Explanation) -> HubError:
        code, message, hint = explanation
        return HubError(Fault(code=code, where=self.where, message=message, hint=hint))

    def _refused(self, found: str) -> HubError:
        hint = "nothing was kept of it; check HF_ENDPOINT, and whether you trust what answers there"
        message = f"{constants.ENDPOINT} answered with {found}"
        return HubError(Fault(code=Code.HUB_ANSWER, where=self.where, message=message, hint=hint))


class _Counted(SyncByteStream):  # type: ignore[misc]  # Any for mypy: httpx's class or that of its successor
    """The body of a response, counted while it is read."""

    def __init__(self, stream: Any, count: Callable[[bytes], None]) -> None:
        self._stream = stream
        self._count = count

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            self._count(piece)
            yield piece

    def close(self) -> None:
        self._stream.close()


_GUARD: ContextVar[Guard | None] = ContextVar("guard", default=None)
_INSTALLING = Lock()


def guarded(work: Callable[[], Value], guard: Guard) -> Value:
    """Call the client, and give up when the time is over, whatever it waits for.

    Its processor time is charged while it goes on: to one budget for all calls of a command, since several may be kept
    busy at a time, and an index can name thousands of small files.
    """
    _install()
    session = get_session()
    done: Future[Value] = Future()
    abandoned = Event()
    spent = 0.0

    def run() -> None:
        nonlocal spent
        _GUARD.set(guard)
        begun = time.thread_time()
        try:
            value = _repeated(work, abandoned)
        except BaseException as error:  # noqa: BLE001  # raised again by done.result(), in the thread that waits
            spent = time.thread_time() - begun
            done.set_exception(error)
        else:
            spent = time.thread_time() - begun
            done.set_result(value)

    with spending() as budget, guard.hub.waiting():
        budget.require_time(guard.where)
        # A daemon, so that a program can end while a server holds one of its connections.
        thread = Thread(target=copy_context().run, args=(run,), daemon=True)
        thread.start()
        charged = 0.0
        while True:
            wait([done], timeout=min(max(guard.hub.left, 0.01), LOOK))
            ended = done.done()
            taken = max(charged, (spent if ended else _thread_seconds(thread)) - guard.received / A_SECOND)
            charged, more = taken, taken - charged
            try:
                budget.spend(more, guard.where)
                if not ended and guard.hub.left <= 0:
                    raise guard.expired()
            except PortingError:
                if not ended:
                    abandoned.set()
                    # Ends the requests that are still on their way, and may wait for one of them to end.
                    Thread(target=_close, args=(session,), daemon=True).start()
                raise
            if ended:
                break
    try:
        return done.result()
    except PortingError:
        raise
    except Exception as error:  # a malformed answer makes the client raise any exception: KeyError, TypeError, …
        raise CallError(guard.exchange) from error


def _repeated(work: Callable[[], Value], abandoned: Event) -> Value:
    """Call the client, and again where it failed because another thread closed the session that both use.

    huggingface_hub closes its one session when a connection is refused.  The requests of other threads then end with
    any exception: ``RuntimeError`` of a closed client, ``AttributeError`` of None, a broken connection.  The guard
    counts each as a failure, so a hub that only fails is not asked for longer.
    """
    for left in range(TRIES, -1, -1):
        session = get_session()
        try:
            return work()
        except PortingError:
            raise
        except Exception:  # the client may raise any
            if not left or abandoned.is_set() or get_session() is session:
                raise
    raise AssertionError("the last try has returned or raised")


def _close(session: object) -> None:
    """Close the client's session, unless it was replaced."""
    if get_session() is session:
        huggingface_hub.close_session()


def _thread_seconds(thread: Thread) -> float:
    """Seconds of processor time that a thread has taken; 0 if the system does not tell."""
    try:
        content = Path(f"/proc/self/task/{thread.native_id}/stat").read_bytes()
        user, system = content.rpartition(b")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0


def _install() -> None:
    """Give the hooks to all clients that huggingface_hub makes from now on."""
    with _INSTALLING:
        factory = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
        if not isinstance(factory, _Factory):
            huggingface_hub.set_client_factory(_Factory(factory))


class _Factory:
    """A factory that adds the hooks to another factory's clients."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory

    def __call__(self) -> Any:
        client = self._factory()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks.get("request", []), _check_request],
            "response": [_check_response, *hooks.get("response", [])],
        }
        return client


def _check_request(request: Any) -> None:
    guard = _GUARD.get()
    if guard is not None:
        guard.ask()
        request.headers["accept-encoding"] = "identity"  # so that the bytes that are counted are those that are kept


def _check_response(response: Any) -> None:
    guard = _GUARD.get()
    if guard is not None:
        guard.check(response)

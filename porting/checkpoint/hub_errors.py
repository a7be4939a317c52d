"""Errors of the hub and of the way to it, each in one line with what to do about it."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from huggingface_hub import constants, errors

from porting.checkpoint.errors import HubError, quote
from porting.errors import Code, Fault, Message, PortingError, Wording
from porting.write_failure import described

# The root of what the HTTP client raises, whichever client huggingface_hub was built on.
HTTP_ERROR: type[Exception] = errors.HfHubHTTPError.__bases__[0]


_LOG_IN = Message("run `hf auth login`", Wording(python=", or pass token=", command=""))

_USE_CACHE = Message(
    "what the cache holds is taken with ",
    Wording(
        python="local_files_only=True, or HF_HUB_OFFLINE=1 in the environment", command="HF_HUB_OFFLINE=1 before it"
    ),
)


BEGINNING = 60
"""Bytes of an answer that are shown."""


@dataclass
class Exchange:
    """The last request of a call and its response.

    Attributes:
        asked: the method and the URL; empty when no response came.
        kind: its Content-Type.
        begins: its first bytes.
    """

    asked: str = ""
    status: int = 0
    kind: str = ""
    begins: bytes = b""

    def __str__(self) -> str:
        if not self.asked:
            return "no response came that can be read"
        kind = f"Content-Type {quote(self.kind)}" if self.kind else "no Content-Type"
        body = f"a body that begins {quote(self.begins.decode(errors='replace'))}" if self.begins else "no body"
        return f"{self.asked} got status {self.status}, {kind} and {body}"


class CallError(Exception):
    """A call of the client failed; its cause says how."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange


class MalformedAnswerError(HubError):
    """The answer is not that of a hub, or cannot be read: a proxy or a login page may have sent it."""


@contextmanager
def explained(model: str, *, file: str = "") -> Iterator[None]:
    """Turn what the client raises while it works on ``model`` into a :class:`HubError`."""
    where = f"{model}: {file}" if file else model
    try:
        yield
    except PortingError:
        raise
    except CallError as error:
        cause = error.__cause__ or error
        fault = _known(cause, model, where)
        if fault is None:
            raise MalformedAnswerError(_malformed(cause, error.exchange, where)) from cause
        raise HubError(fault) from cause
    except Exception as error:  # at a malformed answer the client raises any exception: KeyError, TypeError, …
        raise HubError(_known(error, model, where) or _malformed(error, Exchange(), where)) from error


def is_unreachable(error: HubError) -> bool:
    """Whether the hub gave no readable answer, so that the cache may be used instead."""
    return isinstance(error, MalformedAnswerError) or all(fault.code is Code.HUB_UNREACHABLE for fault in error.faults)


def _known(error: BaseException, model: str, where: str) -> Fault | None:
    """The fault for an exception of the client; None if the client did not understand the answer."""
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return _known(error.__cause__, model, where)  # the file is not cached *because* of that
    if isinstance(error, errors.FileMetadataError) or _breaks_the_protocol(error):
        return None
    if type(error) is OSError and error.errno is None:  # the client's, for a file of another length than announced
        return None
    for kind, explanation in EXPLANATIONS:
        if isinstance(error, kind):
            code, message, hint = explanation(error, model) if callable(explanation) else explanation
            return Fault(code=code, where=where, message=message, hint=hint)
    return None


def _breaks_the_protocol(error: BaseException) -> bool:
    """Whether the answer is no HTTP, or ends too early, for the HTTP client's parser (h11)."""
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__module__.partition(".")[0].startswith("h11"):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _malformed(error: BaseException, exchange: Exchange, where: str) -> Fault:
    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    message = f"{constants.ENDPOINT} gave a malformed answer: {exchange} ({_first_line(error)})"
    hint = "try again; check HF_ENDPOINT, and whether a proxy or a login page stands between"
    return Fault(code=Code.HUB_ANSWER, where=where, message=message, hint=hint)


Explanation = tuple[Code, str, str]


def _gated(error: BaseException, model: str) -> Explanation:
    message = "the model is gated: its authors give access to those who accept their terms"
    hint = Message(f"accept them at {constants.ENDPOINT}/{model.partition('@')[0]}, then ", _LOG_IN)
    return Code.HUB_ACCESS, message, hint


def _no_repository(error: BaseException, model: str) -> Explanation:
    message = f"{constants.ENDPOINT} shows no such model: it does not exist, or it is private"
    hint = "check the spelling, of a path too if one was meant; if it is private, " + _LOG_IN
    return Code.HUB_NOT_FOUND, message, hint


def _status(error: BaseException, model: str) -> Explanation:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    if status == 401:
        return Code.HUB_ACCESS, "the hub does not accept the token (401)", _LOG_IN
    if status == 403:
        return Code.HUB_ACCESS, "the token gives no right to read it (403)", "ask its owner, or use another token"
    if status == 404:
        return _no_repository(error, model)
    if status == TOO_MANY:
        return too_many(getattr(response, "headers", {}))
    return failing(status, getattr(response, "headers", {}))


TOO_MANY = 429
"""The status of an answer to a client that has asked too often."""

SECONDS = re.compile(r"[0-9]{1,9}")
RESET = re.compile(r";\s*t\s*=\s*([0-9]{1,9})(?![0-9])")
"""The seconds until more requests are taken, as the hub says it in ``RateLimit: "api";r=0;t=55``."""


def too_many(headers: Mapping[str, str]) -> Explanation:
    """The message for a hub that accepts no more requests for a while."""
    return Code.HUB_UNREACHABLE, "too many requests (429)", f"try again{_after(headers)}; logging in raises the limit"


def failing(status: int, headers: Mapping[str, str]) -> Explanation:
    """The message for a hub that answers with an error of its own."""
    return Code.HUB_UNREACHABLE, f"the hub answered with status {status}", f"try again{_after(headers)}; " + _USE_CACHE


def asked_to_wait(headers: Mapping[str, str]) -> int:
    """The seconds after which a server asks to come again; 0 where it names none.

    A date stands in the place of seconds as well (RFC 9110, section 10.2.3).
    """
    said = headers.get("retry-after", "").strip()
    if SECONDS.fullmatch(said):
        return int(said)
    with suppress(ValueError, TypeError, OverflowError):
        left = parsedate_to_datetime(said) - datetime.now(UTC)
        return max(math.ceil(left.total_seconds()), 0)
    reset = RESET.search(headers.get("ratelimit", ""))
    return int(reset[1]) if reset else 0


def _after(headers: Mapping[str, str]) -> str:
    seconds = asked_to_wait(headers)
    return f" after {seconds} seconds" if seconds else " later"


def _network(error: BaseException, model: str) -> Explanation:
    message = f"{constants.ENDPOINT} cannot be reached, or the connection broke ({_first_line(error)})"
    path = "if a path was meant, it does not exist; otherwise check the network and try again; "
    return Code.HUB_UNREACHABLE, message, path + _USE_CACHE


UNWRITABLE = {
    errno.ENOSPC: "a place with room",
    errno.EDQUOT: "a place with room",
    errno.EFBIG: "another file system",
    errno.EROFS: "a place that can be written to",
    errno.EACCES: "a place that you can write to",
    errno.EPERM: "a place that you can write to",
    errno.ENAMETOOLONG: "a place with a shorter path",
}
"""The advice for a disk that cannot take a file: another place for the cache."""


def _system(error: BaseException, model: str) -> Explanation:
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        reason, hint = error.strerror or str(error), ""
        if error.errno == errno.EFBIG or isinstance(error.filename, str):  # where it was, the system may tell more
            reason, hint = described(error, Path(error.filename or "").parent)
        place = Message(Wording(python="pass cache_dir=, or ", command=""), f"set HF_HOME to {UNWRITABLE[error.errno]}")
        return Code.HUB_CACHE, f"the cache cannot be written: {reason}", hint if "ulimit" in hint else place
    return Code.HUB_UNREACHABLE, f"the download failed ({_first_line(error)})", "try again"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0].strip()
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


# The first that fits counts, so the special ones stand before those that they derive from.
EXPLANATIONS: tuple[tuple[type[BaseException], Explanation | Callable[[BaseException, str], Explanation]], ...] = (
    (errors.GatedRepoError, _gated),
    (errors.RepositoryNotFoundError, _no_repository),
    (
        errors.RevisionNotFoundError,
        (Code.HUB_NOT_FOUND, "the model has no such revision", "pass a branch, a tag or a commit that it has"),
    ),
    (
        errors.OfflineModeIsEnabled,
        (Code.HUB_CACHE, "it is not in the cache, and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE and try again"),
    ),
    (
        errors.LocalTokenNotFoundError,
        (Code.HUB_ACCESS, "a token was asked for, and none is stored on this machine", "run `hf auth login`"),
    ),
    (
        errors.LocalEntryNotFoundError,
        (Code.HUB_CACHE, "it is not in the cache, and the hub was not to be asked", "leave local_files_only out"),
    ),
    (
        errors.EntryNotFoundError,
        (Code.HUB_NOT_FOUND, "the model has no such file", "the model may be incomplete; choose another revision"),
    ),
    (
        errors.HFValidationError,
        (Code.HUB_NOT_FOUND, "this is not a possible model name", "names are org/name, or org/name@revision"),
    ),
    (errors.HfHubHTTPError, _status),
    (HTTP_ERROR, _network),
    (OSError, _system),
)

"""What went wrong between this machine and the hub, in one line each, with what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from huggingface_hub import constants, errors

from porting.checkpoint.errors import HubError
from porting.errors import Code, Fault, PortingError, told

# The root of what the HTTP client raises, whichever client huggingface_hub was built on.
HTTP_ERROR: type[Exception] = errors.HfHubHTTPError.__bases__[0]


def _log_in() -> str:
    return told(called="run `hf auth login`, or pass token=", typed="run `hf auth login`")


def _offline_way() -> str:
    way = told(
        called="local_files_only=True, or HF_HUB_OFFLINE=1 in the environment", typed="HF_HUB_OFFLINE=1 before it"
    )
    return f"what the cache holds is taken with {way}"


@contextmanager
def explained(model: str, *, file: str = "") -> Iterator[None]:
    """Turns what the client raises while it works on ``model`` into a :class:`HubError`."""
    where = f"{model}: {file}" if file else model
    try:
        yield
    except PortingError:
        raise
    except Exception as error:  # a malformed answer makes the client raise any exception: KeyError, TypeError, …
        raise HubError(explain(error, model=model, where=where)) from error


def is_unreachable(error: HubError) -> bool:
    """Whether the hub gave no answer, so that what the cache holds may stand in for it."""
    return all(fault.code is Code.HUB_UNREACHABLE for fault in error.faults)


def explain(error: BaseException, *, model: str, where: str) -> Fault:
    """The fault that an exception of the client stands for."""
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return explain(error.__cause__, model=model, where=where)  # the file is not cached *because* of that
    for kind, make in EXPLANATIONS:
        if isinstance(error, kind):
            code, message, hint = make(error, model)
            return Fault(code=code, where=where, message=message, hint=hint)
    # An answer that is no JSON, or lacks what every answer of a hub has.
    return Fault(
        code=Code.HUB_UNREACHABLE,
        where=where,
        message=f"{constants.ENDPOINT} did not answer as a hub does ({_first_line(error)})",
        hint="check HF_ENDPOINT, and whether a proxy or a login page stands between",
    )


Explanation = tuple[Code, str, str]


def _gated(error: BaseException, model: str) -> Explanation:
    message = "the model is gated: its authors give access to those who accept their terms"
    return (
        Code.HUB_ACCESS,
        message,
        f"accept them at {constants.ENDPOINT}/{model.partition('@')[0]}, then {_log_in()}",
    )


def _no_repository(error: BaseException, model: str) -> Explanation:
    message = f"{constants.ENDPOINT} shows no such model: it does not exist, or it is private"
    return (
        Code.HUB_NOT_FOUND,
        message,
        f"check the spelling, of a path too if one was meant; if it is private, {_log_in()}",
    )


def _no_revision(error: BaseException, model: str) -> Explanation:
    return (
        Code.HUB_NOT_FOUND,
        "the model has no such revision",
        "pass a branch, a tag or a commit that it has",
    )


def _no_entry(error: BaseException, model: str) -> Explanation:
    return (
        Code.HUB_NOT_FOUND,
        "the model has no such file",
        "the model may be incomplete; choose another revision",
    )


def _no_token(error: BaseException, model: str) -> Explanation:
    return (
        Code.HUB_ACCESS,
        "a token was asked for, and none is stored on this machine",
        "run `hf auth login`",
    )


def _offline(error: BaseException, model: str) -> Explanation:
    return (
        Code.HUB_CACHE,
        "it is not in the cache, and HF_HUB_OFFLINE is set",
        "unset HF_HUB_OFFLINE and try again",
    )


def _not_cached(error: BaseException, model: str) -> Explanation:
    return (
        Code.HUB_CACHE,
        "it is not in the cache, and the hub was not to be asked",
        "leave local_files_only out",
    )


def _bad_name(error: BaseException, model: str) -> Explanation:
    return (
        Code.HUB_NOT_FOUND,
        "this is no possible name of a model",
        "names are org/name, or org/name@revision",
    )


def _status(error: BaseException, model: str) -> Explanation:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 0)
    if status == 401:
        return Code.HUB_ACCESS, "the hub does not accept the token (401)", _log_in()
    if status == 403:
        return (
            Code.HUB_ACCESS,
            "the token gives no right to read it (403)",
            "ask its owner, or use another token",
        )
    if status == 404:
        return _no_repository(error, model)
    if status == 429:
        wait = getattr(response, "headers", {}).get("retry-after")
        after = f" after {wait} seconds" if wait else " later"
        return (
            Code.HUB_UNREACHABLE,
            "too many requests (429)",
            f"try again{after}; logging in raises the limit",
        )
    return Code.HUB_UNREACHABLE, f"the hub answered with status {status}", f"try again later; {_offline_way()}"


def _network(error: BaseException, model: str) -> Explanation:
    message = f"{constants.ENDPOINT} cannot be reached, or the connection broke ({_first_line(error)})"
    return Code.HUB_UNREACHABLE, message, f"check the network and try again; {_offline_way()}"


def _system(error: BaseException, model: str) -> Explanation:
    number = getattr(error, "errno", None)
    if number in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}:
        message = f"the cache cannot be written: {getattr(error, 'strerror', None) or error}"
        room = "set HF_HOME to a place with room"
        return Code.HUB_CACHE, message, told(called=f"pass cache_dir=, or {room}", typed=room)
    return Code.HUB_UNREACHABLE, f"the download failed ({_first_line(error)})", "try again"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0].strip()
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


# The first that fits counts, so the special ones stand before those that they derive from.
EXPLANATIONS: tuple[tuple[type[BaseException], Callable[[BaseException, str], Explanation]], ...] = (
    (errors.GatedRepoError, _gated),
    (errors.RepositoryNotFoundError, _no_repository),
    (errors.RevisionNotFoundError, _no_revision),
    (errors.OfflineModeIsEnabled, _offline),
    (errors.LocalTokenNotFoundError, _no_token),
    (errors.LocalEntryNotFoundError, _not_cached),
    (errors.EntryNotFoundError, _no_entry),
    (errors.HFValidationError, _bad_name),
    (errors.HfHubHTTPError, _status),
    (HTTP_ERROR, _network),
    (errors.FileMetadataError, _network),
    (OSError, _system),
)

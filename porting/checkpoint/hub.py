"""Models on the hub: resolving a name to a commit, and fetching the files that are needed.

A revision such as ``main`` may move while files are being fetched, so it is resolved to a commit once and
every file is asked for at that commit.  Files go through huggingface_hub's own cache, with its layout, locks
and token.  Of a model whose headers alone are read, HTTP range requests get those.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but without __all__ mypy takes them for private
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from porting.atomic import write_file
from porting.checkpoint.config import CONFIG_NAME, MAX_CONFIG, parse_config
from porting.checkpoint.errors import CheckpointError, HubError, checkpoint_error
from porting.checkpoint.files import ByteSource, LocalFile
from porting.checkpoint.hub_errors import explained, is_unreachable
from porting.checkpoint.hub_guard import PARTIAL, Guard, guarded
from porting.checkpoint.index import MAX_INDEX
from porting.checkpoint.names import COMPANIONS, CONFIG_NAMES, ModelId
from porting.checkpoint.registry import MAINS, choose, container_of
from porting.errors import Code, Fault
from porting.limits import spending
from porting.opening import read_file

COMMIT = re.compile(r"[0-9a-f]{40}")
LONGEST_REFERENCE = 4096
"""Bytes of a cache file that holds a commit."""

THREADS = 4
"""Shards fetched at a time."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The files of one commit, in the cache."""

    root: Path
    commit: str


@dataclass(frozen=True, kw_only=True)
class RemoteModel:
    """A model on the hub of which only headers are read, and the main file of its weights."""

    location: str
    repo: str
    commit: str
    token: str | bool | None
    main: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    config_name: str = ""

    def open(self, name: str) -> ByteSource:
        """Open one of the files, to be read by range requests."""
        return RemoteFile(self.repo, name, commit=self.commit, token=self.token)

    def read(self, name: str, *, limit: int) -> tuple[bytes, str]:
        """Read a small file; returns its bytes, and its name for messages."""
        file = self.open(name)
        if file.size > limit:
            message = f"{file.size} bytes, where at most {limit} can be meant"
            raise checkpoint_error(Code.FILE_TOO_LARGE, file.where, message, "choose another revision")
        return file.pread(0, file.size), file.where


def is_offline(local_files_only: bool) -> bool:
    """Whether the hub must not be asked."""
    return local_files_only or constants.HF_HUB_OFFLINE


def download(
    model: ModelId, *, token: str | bool | None, cache_dir: str | os.PathLike[str] | None, local_files_only: bool
) -> Snapshot:
    """Fetch a model's weights, configuration and tokenizer, unless they are cached.

    When the hub gives no answer, a complete snapshot in the cache stands in for it.

    Args:
        token: of the hub; True for the stored one, None for the client's default.
        cache_dir: the cache; None for the client's default.
    """
    if is_offline(local_files_only):
        return _cached(model, cache_dir)
    try:
        model_files, names = _resolve(model, token)
        main, commit = choose(names, model_files), model_files.commit
        fetch = Fetcher(model, commit, token, cache_dir)
        root = fetch([main, *(name for name in COMPANIONS if name in names)])
        others = _needed_files(_CachedPlace(root, str(model)), main)
        if others:
            fetch(others)
    except HubError as error:
        if is_unreachable(error):
            with suppress(HubError):
                return _cached(model, cache_dir)
        raise
    _remember(root, model.revision, commit)
    return Snapshot(root=root, commit=commit)


def remote(model: ModelId, *, token: str | bool | None) -> RemoteModel:
    """Open a model whose headers are read by range requests.

    Args:
        token: of the hub; True for the stored one, None for the client's default.
    """
    model_files, names = _resolve(model, token)
    main = choose(names, model_files)
    config: dict[str, object] = {}
    config_name = next((name for name in CONFIG_NAMES if name in names), "")
    if config_name:
        raw, where = model_files.read(config_name, limit=MAX_CONFIG)
        config = parse_config(raw, where=where)
    return replace(model_files, main=main, config=config, config_name=config_name)


def _resolve(model: ModelId, token: str | bool | None) -> tuple[RemoteModel, set[str]]:
    """The current commit of the revision, and the files at its top level."""
    with explained(str(model)):
        commit, names = guarded(lambda: _listed(model, token), Guard(str(model)))
    return RemoteModel(location=str(model), repo=model.repo, commit=commit, token=token), names


def _listed(model: ModelId, token: str | bool | None) -> tuple[str, set[str]]:
    timeout = constants.HF_HUB_ETAG_TIMEOUT
    info = HfApi().model_info(model.repo, revision=model.revision, token=token, timeout=timeout)
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
        raise ValueError("no commit in the answer")
    names = {sibling.rfilename for sibling in info.siblings or ()}
    if not all(isinstance(name, str) for name in names):
        raise ValueError("a file whose name is not text")
    return info.sha, names


@dataclass(frozen=True)
class _CachedPlace:
    """A snapshot in the cache, whose files are links into it."""

    root: Path
    location: str

    def open(self, name: str) -> ByteSource:
        return LocalFile(self.root / name)

    def read(self, name: str, *, limit: int) -> tuple[bytes, str]:
        path = self.root / name
        return read_file(path, limit=limit), str(path)


def _needed_files(place: _CachedPlace, main: str) -> tuple[str, ...]:
    """The files that the main file of the weights needs."""
    container = container_of(main)
    return container.others(place, main) if container is not None else ()


class Fetcher:
    """Downloads files of one commit into the cache."""

    def __init__(
        self, model: ModelId, commit: str, token: str | bool | None, cache_dir: str | os.PathLike[str] | None
    ) -> None:
        self._model = model
        self._commit = commit
        self._token = token
        self._cache_dir = cache_dir

    def __call__(self, names: Iterable[str]) -> Path:
        """Fetch the files, a few at a time; returns their directory.

        The threads share the budget that is open here.  After an error no other file is begun.
        """
        with spending(), ThreadPoolExecutor(THREADS) as pool:
            fetching = [pool.submit(copy_context().run, self._one, name) for name in names]
            try:
                paths = [future.result() for future in fetching]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return paths[0].parent

    def _one(self, name: str) -> Path:
        cache = Path(self._cache_dir if self._cache_dir is not None else constants.HF_HUB_CACHE)
        with explained(str(self._model), file=name):
            cache.mkdir(parents=True, exist_ok=True)
            guard = Guard(f"{self._model}: {name}", commit=self._commit, most=MAX_INDEX, folder=cache)
            mark = self._mark(name, cache)
            interrupted = mark.exists()
            place = os.fspath(cache)
            known = try_to_load_from_cache(self._model.repo, name, cache_dir=place, revision=self._commit)
            if not interrupted and not isinstance(known, str):
                write_file(mark, b"")
            path = guarded(lambda: self._fetched(name, cache), guard)
            guard.check_digest(Path(path), again=interrupted)
            mark.unlink(missing_ok=True)
        return Path(path)

    def _mark(self, name: str, cache: Path) -> Path:
        """A marker file in the cache, from the start of a download until its digest was compared.

        The client moves a file into the cache before its digest is compared here, and a process may end in between.
        """
        key = f"{self._model.repo}/{self._commit}/{name}"
        return cache / f".porting-unchecked-{hashlib.sha256(key.encode()).hexdigest()}"

    def _fetched(self, name: str, cache: Path) -> str:
        return hf_hub_download(
            self._model.repo, name, revision=self._commit, token=self._token, cache_dir=os.fspath(cache)
        )


def _cached(model: ModelId, cache_dir: str | os.PathLike[str] | None) -> Snapshot:
    """The snapshot in the cache; refused if it is incomplete."""
    directory = os.fspath(cache_dir) if cache_dir is not None else None
    found: dict[str, Path] = {}
    with explained(str(model)):
        for name in (*MAINS, CONFIG_NAME):
            path = try_to_load_from_cache(model.repo, name, cache_dir=directory, revision=model.revision)
            if isinstance(path, str):  # else it is not there, or known not to exist
                found[name] = Path(path)
    online = "go online once: unset HF_HUB_OFFLINE and leave local_files_only out"
    if not found:
        raise _hub_fault(model, "nothing of it is in the cache, and the hub is not to be asked", online)
    root = next(iter(found.values())).parent
    weights, place = [name for name in found if name != CONFIG_NAME], _CachedPlace(root, str(model))
    missing = [other for name in weights for other in _needed_files(place, name) if not (root / other).exists()]
    if not weights or missing:
        lacking = "; ".join(missing[:3]) + (" …" if len(missing) > 3 else "") if missing else "its weights"
        raise _hub_fault(model, f"the cache holds a part of it and lacks {lacking}", online)
    return Snapshot(root=root, commit=root.name)


def _remember(root: Path, revision: str, commit: str) -> None:
    """Record the commit of the revision in the cache, as huggingface_hub does, for offline mode.

    Every file was asked for by its commit, so nothing else has noted it.  A cache that cannot be written to
    is not a fault.
    """
    if revision == commit:
        return
    reference = root.parent.parent / "refs" / revision
    with suppress(OSError, CheckpointError):
        if reference.is_file() and read_file(reference, limit=LONGEST_REFERENCE) == commit.encode():
            return
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_file(reference, commit.encode())


def _hub_fault(model: ModelId, message: str, hint: str) -> HubError:
    return HubError(Fault(code=Code.HUB_CACHE, where=str(model), message=message, hint=hint))


BLOCK = 1 << 17
"""Bytes of a request at least: most headers fit, and a request costs more than 128 KiB."""


class RemoteFile:
    """A file of a model on the hub as a source of bytes.

    Args:
        repo: the model, ``org/name``.
        token: the hub's access token; True for the stored one, False for none.  It is not sent along when the
            hub redirects to another host.
    """

    def __init__(self, repo: str, name: str, *, commit: str, token: str | bool | None) -> None:
        self.where = f"{repo}@{commit[:12]}: {name}"
        self._repo = repo
        self._name = name
        self._url = hf_hub_url(repo, name, revision=commit)
        self._token = token
        self._spans: list[tuple[int, bytes]] = []
        self.size = 0
        self.size = self._fetch(0, BLOCK)

    def pread(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes from ``offset`` on."""
        if not count:
            return b""
        for start, raw in self._spans:
            if start <= offset and offset + count <= start + len(raw):
                return raw[offset - start : offset - start + count]
        if offset + count > self.size:
            raise self._odd(f"bytes {offset} to {offset + count} of {self.size} were asked for")
        start = max(min(offset, self.size - BLOCK), 0)  # near the end, take what stands before as well
        self._fetch(start, max(offset + count - start, BLOCK))
        start, raw = self._spans[-1]
        return raw[offset - start : offset - start + count]

    def _fetch(self, start: int, count: int) -> int:
        """Fetch and keep at most ``count`` bytes from ``start`` on; returns the size of the file."""
        headers = build_hf_headers(token=self._token)
        headers["range"] = f"bytes={start}-{start + count - 1}"
        headers["accept-encoding"] = "identity"  # ranges count the file's own bytes
        with explained(self._repo, file=self._name):
            guard = Guard(self.where, most=count + BLOCK)
            size, raw = guarded(lambda: self._answer(headers, start, count), guard)
            guard.check_whole(raw, size)
        wanted = min(count, size - start)
        if size < 0 or len(raw) < wanted or (self.size and size != self.size):
            asked = f"{wanted} were asked for" if size >= 0 else "the server did not say how many the file has"
            raise self._odd(f"{len(raw)} bytes came where {asked}")
        self._spans.append((start, raw[:wanted]))
        return size

    def _answer(self, headers: dict[str, str], start: int, count: int) -> tuple[int, bytes]:
        """The size of the whole file, and the bytes of the answer."""
        with get_session().stream(
            "GET", self._url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
        ) as response:
            empty = response.headers.get("content-range") == "bytes */0"
            if response.status_code == 416 and start == 0 and empty:  # no byte of an empty file can be asked for
                return 0, b""
            hf_raise_for_status(response)
            if response.status_code == PARTIAL:  # whose range the guard has compared with what was asked for
                size = int(response.headers["content-range"].rpartition("/")[2])
            elif start:
                raise self._odd("the server does not answer range requests")
            else:
                size = int(response.headers.get("content-length", -1))
            raw = bytearray()
            for piece in response.iter_raw():  # a server that ignores the range is left as soon as enough has come
                raw += piece
                if len(raw) >= count:
                    break
            return size, bytes(raw)

    def _odd(self, message: str) -> HubError:
        return HubError(
            Fault(
                code=Code.HUB_ANSWER,
                where=self.where,
                message=f"the header cannot be fetched alone: {message}",
                hint="try again, or open the checkpoint with its weights",
            )
        )

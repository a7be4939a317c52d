"""A file on the hub, read by HTTP range requests, so that its header needs no download."""

from __future__ import annotations

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but without __all__ mypy takes them for private
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from porting.checkpoint.errors import HubError
from porting.checkpoint.hub_errors import explained
from porting.checkpoint.hub_guard import PARTIAL, Guard, guarded
from porting.errors import Code, Fault

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

"""A small hub on loopback for the real huggingface_hub client, and a second host for large files.

Use the fixture: ``from tests.hub_server import hub`` in a ``conftest.py``, then ``hub.add("org/name", files)``.
What the hub answers was taken from the client's own code: which headers it needs, which error codes it knows.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

LARGE = (".safetensors", ".bin")
"""Files whose names end so are answered with a redirect to the other host, as the real hub does for LFS files."""

MODEL = r"/(?:api/models/)?([\w.-]+/[\w.-]+)"
INFO = re.compile(rf"{MODEL}(?:/revision/([^/?]+))?(?:\?.*)?")
TREE = re.compile(rf"{MODEL}/tree/([^/?]+).*")
RESOLVE = re.compile(rf"{MODEL}/resolve/([^/]+)/([^?]+)")


@dataclass
class Model:
    """A model: its commits, its branches and tags, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False


@dataclass
class Request:
    """A request as it came in."""

    host: str
    method: str
    path: str
    headers: dict[str, str]


Answer = Callable[[BaseHTTPRequestHandler], None]
"""Answers a request in its own way."""


@dataclass
class Trouble:
    """What happens to requests whose path holds ``match``, so many times.

    ``kind`` is a status, or ``"drop"`` (the connection ends after half of the body), ``"short"`` (half of the body,
    and a length that says so), ``"no range"`` (ranges are ignored), ``"html"`` (a login page), or a function that
    answers: it is given the handler.
    """

    match: str
    kind: int | str | Answer
    times: int
    method: str


class Hub:
    """The hub's content, what it was asked, and what is to go wrong.

    ``token`` is the one token that opens gated and private models.
    """

    token = "hf_right"  # noqa: S105 - no secret

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.requests: list[Request] = []
        self.troubles: list[Trouble] = []
        self._servers = [_Server("127.0.0.1", self), _Server("localhost", self)]  # to a client, two hosts
        self.url, self.store_url = (f"http://{server.name}:{server.server_address[1]}" for server in self._servers)

    def __enter__(self) -> Hub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(
        self,
        repo: str,
        files: Mapping[str, bytes] | Path,
        *,
        revision: str = "main",
        gated: bool = False,
        private: bool = False,
    ) -> str:
        """Commits files, or a directory of them, to a model's branch; returns the commit."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        model = self.models.setdefault(repo, Model())
        model.gated, model.private = gated, private
        commit = hashlib.sha1(repr((len(model.commits), sorted(files))).encode(), usedforsecurity=False).hexdigest()
        model.commits[commit] = dict(files)
        model.refs[revision] = commit
        return commit

    def fail(self, match: str, kind: int | str | Answer, *, times: int = 1000, method: str = "") -> None:
        """Makes requests whose path holds ``match`` go wrong."""
        self.troubles.append(Trouble(match, kind, times, method))

    def trouble(self, method: str, path: str) -> int | str | Answer | None:
        """What is to go wrong with this request."""
        for trouble in self.troubles:
            if trouble.match in path and trouble.times and trouble.method in ("", method):
                trouble.times -= 1
                return trouble.kind
        return None

    def asked(self, match: str, *, method: str = "GET") -> list[Request]:
        """The requests whose path holds ``match``."""
        return [request for request in self.requests if match in request.path and request.method == method]

    def blob(self, digest: str) -> bytes | None:
        """A large file by the SHA-256 of its bytes."""
        for model in self.models.values():
            for files in model.commits.values():
                for content in files.values():
                    if hashlib.sha256(content).hexdigest() == digest:
                        return content
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, name: str, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name = name
        self.hub = hub

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is not an error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """The log is kept in :attr:`Hub.requests`."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """Making a model, asking how its files are to be sent (all inside of the commit), and the commit itself."""
        hub = self.server.hub
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.requests.append(Request(self.server.name, "POST", self.path, dict(self.headers)))
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            repo = f"{wanted['organization']}/{wanted['name']}"
            hub.models.setdefault(repo, Model(private=wanted.get("visibility") == "private"))
            answer: dict[str, object] = {"url": f"{hub.url}/{repo}", "name": repo}
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        else:
            repo, revision = re.findall(r"/api/models/([^/]+/[^/]+)/commit/(.+)", self.path)[0]
            sent = [entry["value"] for line in body.splitlines() if (entry := json.loads(line))["key"] == "file"]
            files = {entry["path"]: base64.b64decode(entry["content"]) for entry in sent}
            commit = hub.add(repo, files, revision=revision)
            answer = {"commitUrl": f"{hub.url}/{repo}/commit/{commit}", "commitOid": commit}
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server.hub
        headers = {key.lower(): value for key, value in self.headers.items()}
        hub.requests.append(Request(self.server.name, self.command, self.path, headers))
        kind = hub.trouble(self.command, self.path)
        if callable(kind):
            kind(self)
            return
        if isinstance(kind, int):
            self._send(kind, b"{}", {"Retry-After": "7"} if kind == 429 else {})
        elif kind == "html":
            self._send(200, b"<!DOCTYPE html><title>Log in</title>", {"Content-Type": "text/html"})
        elif self.path.startswith("/store/"):
            self._stored(self.path.removeprefix("/store/"), kind)
        elif match := RESOLVE.fullmatch(self.path):
            self._resolve(match[1], match[2], match[3], kind)
        elif match := TREE.fullmatch(self.path):
            self._tree(match[1], match[2])
        elif match := INFO.fullmatch(self.path):
            self._info(match[1], match[2] or "main")
        else:
            self._send(404, b"{}")

    def _stored(self, digest: str, kind: str | None) -> None:
        content = self.server.hub.blob(digest)
        if content is None:
            self._send(404, b"")
        else:
            self._content(content, {}, kind)

    def _model(self, repo: str) -> Model | None:
        """The model, if it exists and this token may see it; else the answer is sent."""
        model = self.server.hub.models.get(repo)
        may = self.headers.get("authorization") == f"Bearer {self.server.hub.token}"
        if model is None or (model.private and not may):
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return None
        return model

    def _commit(self, model: Model, revision: str) -> str | None:
        commit = model.refs.get(revision, revision)
        if commit not in model.commits:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return None
        return commit

    def _info(self, repo: str, revision: str, headers: dict[str, str] | None = None) -> None:
        model = self._model(repo)
        commit = self._commit(model, revision) if model else None
        if model and commit:
            siblings = [{"rfilename": name} for name in model.commits[commit]]
            info = {"id": repo, "modelId": repo, "sha": commit, "private": model.private, "siblings": siblings}
            self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _tree(self, repo: str, revision: str) -> None:
        model = self._model(repo)
        commit = self._commit(model, revision) if model else None
        if model and commit:
            files = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha256(content).hexdigest()[:40]}
                for name, content in model.commits[commit].items()
            ]
            self._send(200, json.dumps(files).encode(), {"Content-Type": "application/json"})

    def _resolve(self, repo: str, revision: str, name: str, kind: str | None) -> None:
        model = self._model(repo)
        commit = self._commit(model, revision) if model else None
        if not model or not commit:
            return
        content = model.commits[commit].get(name)
        if model.gated and self.headers.get("authorization") != f"Bearer {self.server.hub.token}":
            self._send(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        elif content is None:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            digest = hashlib.sha256(content).hexdigest()
            headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}
            if name.endswith(LARGE):
                location = f"{self.server.hub.store_url}/store/{digest}"
                headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": headers["ETag"], "Location": location}
                self._send(302, b"", headers)
            else:
                self._content(content, headers, kind)

    def _content(self, content: bytes, headers: dict[str, str], kind: str | None) -> None:
        """A file's bytes, or the range of them that was asked for."""
        status, start, stop = 200, 0, len(content)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if match and kind != "no range":
            start = int(match[1])
            stop = min(int(match[2]) + 1, len(content)) if match[2] else len(content)
            if start >= len(content):
                self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            status = 206
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        body = content[start:stop]
        if kind == "short":
            body = body[: len(body) // 2]
        self._send(status, body, {"Accept-Ranges": "bytes", **headers}, cut=kind == "drop")

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.wfile.flush()
            self.close_connection = True


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub for one test, which huggingface_hub takes for the real one, with an empty cache and no stored token."""
    home = tmp_path / "hf"
    with Hub() as server:
        for name, value in environment(server, home).items():
            monkeypatch.setenv(name, value)
        for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        # These were read from the environment when huggingface_hub was imported.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)  # between its retries
        huggingface_hub.close_session()
        yield server
        huggingface_hub.close_session()


def environment(hub: Hub, home: Path) -> dict[str, str]:
    """The variables that make a fresh process take this hub for the real one."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }

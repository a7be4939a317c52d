"""The audit of the pinned versions: the real pip-audit, against a server on this machine."""

from __future__ import annotations

import http.server
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from scripts.audit import audit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as osv.dev does: the vulnerabilities of the package that the request names."""

    vulnerable: frozenset[str] = frozenset()
    status = 200
    address = ""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps(self.answer(asked["package"]["name"])).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, name: str) -> dict[str, Any]:
        if name not in self.vulnerable:
            return {}
        fixed = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "4.0"}]}]
        affected = [{"package": {"name": name, "ecosystem": "PyPI"}, "ranges": fixed}]
        return {"vulns": [{"id": f"OSV-{name}", "summary": "a hole", "affected": affected}]}

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Handler]]:
    class Answers(Handler):
        pass

    handler: type[Handler] = Answers
    monkeypatch.setenv("no_proxy", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        handler.address = f"http://127.0.0.1:{running.server_port}/v1/query"
        yield handler
        running.shutdown()
        thread.join()


@pytest.fixture
def pinned(tmp_path: Path) -> Path:
    path = tmp_path / "pinned.txt"
    path.write_text(f"alpha==1.0 --hash=sha256:{'0' * 64}\nbeta==2.0 --hash=sha256:{'1' * 64}\n")
    return path


def run(server: type[Handler], pinned: Path) -> tuple[list[str], int]:
    return audit(pinned, "--vulnerability-service", "osv", "--osv-url", server.address)


def test_a_known_vulnerability_fails(server: type[Handler], pinned: Path) -> None:
    server.vulnerable = frozenset({"jinja2", "beta"})
    lines = ["beta 2.0: OSV-beta, fixed in 4.0", "2 of 2 versions were looked up: 1 known vulnerabilities."]
    assert run(server, pinned) == (lines, 1)


@pytest.mark.slow
def test_none_passes(server: type[Handler], pinned: Path) -> None:
    server.vulnerable = frozenset({"jinja2"})
    assert run(server, pinned) == (["2 of 2 versions were looked up: 0 known vulnerabilities."], 0)


def test_a_server_without_the_data_is_no_proof(server: type[Handler], pinned: Path) -> None:
    """A mirror that knows no vulnerability at all: pip-audit alone would report that there are none."""
    ((line,), status) = run(server, pinned)
    assert "skipped: the server lists no vulnerability of jinja2==3.1.2" in line
    assert status == 0


def test_without_a_server_it_is_skipped_with_the_reason(server: type[Handler], pinned: Path) -> None:
    server.status = 503
    ((line,), status) = run(server, pinned)
    assert "skipped: pip-audit ended with status 1: " in line
    assert status == 0

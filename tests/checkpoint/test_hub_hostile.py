"""A hub, or a mirror, that means harm: asked by the real client, on loopback."""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import os
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils._http import parse_ratelimit_headers
from safetensors.torch import save

from porting.checkpoint import CheckpointError, HubError, hub_guard, open_checkpoint
from porting.checkpoint.hub import Fetcher, RemoteFile
from porting.checkpoint.hub_errors import asked_to_wait
from porting.checkpoint.hub_guard import Guard
from porting.checkpoint.names import ModelId
from porting.limits import LimitError, Waiting, spending
from porting.printable import quote
from tests.hub_server import Answer, Hub

pytestmark = pytest.mark.few(3)

WEIGHTS = save({"a": torch.arange(4000.0)})
MODEL = {"model.safetensors": WEIGHTS, "config.json": b'{"model_type": "bert"}'}
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()


def refused(tmp_path: Path, *messages: str, weights: bool = True) -> str:
    """Opening the model is refused in a line, and nothing lies outside of the cache or goes by a name in it."""
    with pytest.raises((HubError, CheckpointError)) as caught:
        open_checkpoint("org/name", weights=weights)
    text = str(caught.value)
    for message in messages:
        assert message in text
    assert "\n" not in text
    assert [path.name for path in tmp_path.iterdir() if path.name != "hf"] == []
    kept = [path for path in tmp_path.rglob("snapshots/*/*") if path.is_file()]
    assert all(path.read_bytes() == MODEL[path.name] for path in kept), "no other bytes go by a name of the model"
    return text


def sending(headers: dict[str, str], body: bytes = WEIGHTS, *, status: int = 200, length: int | None = None) -> Answer:
    """Answers with these headers; with ``length`` the body is announced to have another."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)
        handler.close_connection = length is not None

    return answer


def endless(piece: bytes, *, pause: float = 0, headers: dict[str, str] | None = None) -> Answer:
    """A body without length and without end, in chunks."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        if handler.command == "HEAD":
            return
        for _ in range(100_000):
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            handler.wfile.flush()
            Event().wait(pause)  # the hub's fixture takes away all sleep

    return answer


# ------------------------------------------------------------------------------------------- headers that become names

NAMES = [
    "/{out}/planted",
    "../../../../planted",
    "a/b",
    "..",
    ".",
    "",
    'W/"../planted"',
    '"W//{out}/planted"',
    "a" * 129,
    "caf\xe9",
    "a b",
    "a\\b",
    "a%2fb",
    "nul:",
]


@pytest.mark.parametrize(
    ("header", "value"),
    [("ETag", value) for value in NAMES] + [("X-Linked-ETag", value) for value in NAMES if value],
)
def test_a_name_that_the_hub_gives_leads_nowhere(hub: Hub, tmp_path: Path, header: str, value: str) -> None:
    commit = hub.add("org/name", MODEL)
    value = value.replace("{out}", str(tmp_path).removeprefix("/"))
    headers = {"X-Repo-Commit": commit, "ETag": '"right"', header: value}
    hub.fail("/model.safetensors", sending(headers))
    refused(tmp_path, "model.safetensors", f"answered with {header}: ", "[hub-answer]")
    assert not [path for path in tmp_path.rglob("*planted*") if path.name != "planted.lock"]


@pytest.mark.parametrize("value", ["/{out}", "../../../../planted", "..", "", "f" * 40, "main"])
@pytest.mark.parametrize("status", [200, 404])
def test_a_commit_that_the_hub_gives_leads_nowhere(hub: Hub, tmp_path: Path, value: str, status: int) -> None:
    """The client notes that a file does not exist, in a folder that is named after the commit."""
    hub.add("org/name", MODEL)
    value = value.replace("{out}", str(tmp_path / "planted"))
    headers = {"X-Repo-Commit": value, "ETag": '"right"', "X-Error-Code": "EntryNotFound"}
    hub.fail("/config.json", sending(headers, status=status))
    refused(tmp_path, "config.json", "answered with X-Repo-Commit: ", "[hub-answer]")


def test_names_that_hubs_give_are_taken(hub: Hub) -> None:
    commit = hub.add("org/name", MODEL)
    for etag in ('"abc"', 'W/"abc-1_2"', "abc", f'"{DIGEST}"', "a" * 128):
        hub.troubles.clear()
        hub.fail("/model.safetensors", sending({"X-Repo-Commit": commit, "ETag": etag}))
        for path in Path(os.environ["HF_HOME"]).rglob("model.safetensors"):
            path.unlink()
        assert open_checkpoint("org/name").read("a")[5] == 5


@pytest.mark.parametrize("name", [1, ["a"], {"a": 1}, None])
def test_a_list_of_files_whose_names_are_none(hub: Hub, tmp_path: Path, name: object) -> None:
    commit = hub.add("org/name", MODEL)
    listed = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": name}, {"rfilename": "model.safetensors"}]}
    hub.fail("/api/models", sending({"Content-Type": "application/json"}, json.dumps(listed).encode()))
    refused(tmp_path, "gave a malformed answer", "[hub-answer]")


def test_a_warning_of_the_hub_is_shown_once_and_moves_no_cursor(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """The client logs each header of that name as it came."""
    commit = hub.add("org/name", MODEL)
    headers = {f"X-HF-{'W' if number % 2 else 'w'}arning": f"{number}; \x9b2J{number} \xad" for number in range(2)}
    listed = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": "model.safetensors"}]}
    hub.fail("/api/models", sending(headers, json.dumps(listed).encode()))
    open_checkpoint("org/name")
    assert [record.getMessage() for record in caplog.records if "2J" in record.getMessage()] == ["\\x9b2J0 \\xad"]


def test_a_link_in_the_cache_where_a_commit_is_noted_is_not_followed(hub: Hub, tmp_path: Path) -> None:
    """In a cache that several users share, temporary files have names that cannot be predicted."""
    hub.add("org/name", MODEL)
    theirs = tmp_path / "theirs"
    theirs.write_text("kept")
    refs = Path(os.environ["HF_HOME"]) / "hub/models--org--name/refs"
    refs.mkdir(parents=True)
    for name in (f".main.{os.getpid()}", "main"):
        (refs / name).symlink_to(theirs)
    open_checkpoint("org/name")
    assert theirs.read_text() == "kept"


# ------------------------------------------------------------------------------------------------------------- bodies


def test_bytes_that_are_not_those_of_the_digest_are_not_kept(hub: Hub, tmp_path: Path) -> None:
    """The hub announces a digest and redirects to another host, which gives other bytes of the same length."""
    hub.add("org/name", MODEL)
    other = WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])
    hub.fail("/store/", sending({}, other))
    refused(tmp_path, "model.safetensors", f"announced {DIGEST}", "[hub-answer]")
    assert not list(tmp_path.rglob(f"blobs/{DIGEST}"))
    hub.troubles.clear()
    assert open_checkpoint("org/name").read("a")[5] == 5


def test_a_file_whose_check_was_interrupted_is_checked_by_the_next_run(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has already moved the file into the cache when the process ends."""
    hub.add("org/name", MODEL)
    hub.fail("/store/", sending({}, WEIGHTS[:-1] + bytes([WEIGHTS[-1] ^ 1])))

    def ended(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Guard, "check_digest", ended)
        with pytest.raises(KeyboardInterrupt):
            open_checkpoint("org/name")
    assert list(tmp_path.rglob(f"blobs/{DIGEST}"))
    with pytest.raises(HubError, match=f"announced {DIGEST}"):
        open_checkpoint("org/name")
    assert not list(tmp_path.rglob(f"blobs/{DIGEST}"))
    hub.troubles.clear()
    assert open_checkpoint("org/name").read("a")[5] == 5
    assert not list(tmp_path.rglob(".porting-unchecked-*"))


@pytest.mark.parametrize("size", ["-1", "1e9", "٣", "9" * 30, "9" * 5000])
def test_a_length_that_is_none(hub: Hub, tmp_path: Path, size: str) -> None:
    commit = hub.add("org/name", MODEL)
    headers = {"X-Repo-Commit": commit, "ETag": '"right"', "X-Linked-Size": size.encode().decode("latin-1")}
    hub.fail("/model.safetensors", sending(headers))
    refused(tmp_path, "answered with a length of ")


def test_a_length_beyond_the_disk(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/name", MODEL)
    hub.fail("/model.safetensors", sending({"X-Repo-Commit": commit, "ETag": '"r"', "X-Linked-Size": "9" * 17}))
    refused(tmp_path, "should have 99999999999999999 bytes", "make room")


def test_a_body_that_goes_on_behind_its_length(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("porting.checkpoint.hub.MAX_INDEX", 1 << 20)
    hub.add("org/name", MODEL)
    hub.fail("/store/", endless(bytes(1 << 16)))
    refused(tmp_path, "answered with more than 1048576 bytes", "[hub-answer]")
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 1 << 16


def test_an_answer_without_end(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", MODEL)
    hub.fail("/api/models", endless(b'{"a": "' + b"a" * (1 << 20)))
    refused(tmp_path, "answered with more than 4194304 bytes", "[hub-answer]")


def test_a_list_of_a_million_files(hub: Hub, tmp_path: Path) -> None:
    """The client makes objects of it for most of a minute."""
    commit = hub.add("org/name", MODEL)
    files = [{"rfilename": f"f{number}"} for number in range(1_000_000)]
    body = json.dumps({"id": "org/name", "sha": commit, "siblings": files}).encode()
    hub.fail("/api/models", sending({"Content-Type": "application/json"}, body))
    refused(tmp_path, "answered with more than 4194304 bytes", "[hub-answer]")


@pytest.mark.parametrize("match", ["/api/models", "/model.safetensors", "/store/"])
def test_a_body_that_is_packed(hub: Hub, tmp_path: Path, match: str) -> None:
    """A megabyte of gzip is a gigabyte of zeros."""
    commit = hub.add("org/name", MODEL)
    packed = gzip.compress(bytes(1 << 20))
    hub.fail(match, sending({"X-Repo-Commit": commit, "ETag": '"r"', "Content-Encoding": "gzip"}, packed))
    refused(tmp_path, "answered with Content-Encoding: 'gzip'", "[hub-answer]")


def test_the_body_of_a_redirect_without_end(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", MODEL)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "/elsewhere")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for _ in range(200):
            handler.wfile.write(b"%x\r\n%s\r\n" % (1 << 20, bytes(1 << 20)))

    hub.fail("/store/", answer)
    refused(tmp_path, "answered with more than ", weights=False)


# --------------------------------------------------------------------------------------------------------------- time


def drip(handler: BaseHTTPRequestHandler, pieces: Callable[[int], bytes]) -> None:
    for number in range(600):
        handler.wfile.write(pieces(number))
        handler.wfile.flush()
        Event().wait(0.1)


def slow_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    drip(handler, lambda number: b"X-%d: a\r\n" % number)


def silence(handler: BaseHTTPRequestHandler) -> None:
    """Nothing is sent, and the connection stays open."""


def later(handler: BaseHTTPRequestHandler) -> None:
    sending({"Retry-After": "1000000000"}, b"{}", status=429)(handler)


@pytest.mark.few(1)
@pytest.mark.parametrize(("match", "weights"), [("/api/models", True), ("/store/", True), ("/config.json", False)])
@pytest.mark.parametrize("kind", [silence, endless(b" ", pause=0.1), slow_headers], ids=["silence", "body", "headers"])
def test_a_server_that_gives_next_to_nothing_is_left(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Answer, match: str, weights: bool
) -> None:
    monkeypatch.setenv("PORTING_LIMITS", "waiting=1")
    hub.add("org/name", MODEL)
    hub.fail(match, kind)
    refused(tmp_path, "and then it was left", "PORTING_LIMITS=waiting=100", weights=weights)


def test_a_server_that_asks_to_come_back_in_30_years_is_left(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("PORTING_LIMITS", "waiting=1")
    hub.add("org/name", MODEL)
    hub.fail("/store/", later)
    with pytest.raises(HubError, match=r"and then it was left|too many requests|cannot be reached"):
        open_checkpoint("org/name", cache_dir=tmp_path / "hf")


WAITS = [
    (429, {"Retry-After": "3600"}, "too many requests (429) (try again after 3600 seconds; logging in"),
    (429, {"RateLimit": '"api";r=0;t=55'}, "too many requests (429) (try again after 55 seconds; logging in"),
    (429, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, "too many requests (429) (try again later; logging in"),
    (429, {"Retry-After": "\x1b[2J" + "9" * 500}, "too many requests (429) (try again later; logging in"),
    (429, {}, "too many requests (429) (try again later; logging in"),
    (503, {"Retry-After": "3600"}, "the hub answered with status 503 (try again after 3600 seconds; "),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("match", "weights"), [("/api/models", True), ("/store/", True), ("/config.json", False)])
@pytest.mark.parametrize(("status", "headers", "message"), WAITS)
def test_a_server_that_asks_to_wait_is_said_at_once(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    match: str,
    weights: bool,
    status: int,
    headers: dict[str, str],
    message: str,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waited.append)
    hub.add("org/name", MODEL)
    hub.fail(match, sending(headers, b"{}", status=status))
    refused(tmp_path, message, weights=weights)
    assert waited == []


def test_the_date_of_a_server_that_asks_to_wait_is_counted_down() -> None:
    """RFC 9110, section 10.2.3; and the headers as huggingface_hub reads them."""
    later = datetime.now(UTC) + timedelta(hours=1)
    assert 3590 < asked_to_wait({"retry-after": format_datetime(later, usegmt=True)}) <= 3600
    limited = {"ratelimit": '"api";r=0;t=55', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}
    known = parse_ratelimit_headers(limited)
    assert known is not None
    assert asked_to_wait(limited) == known.reset_in_seconds
    others = ("", "soon", "-1", "1e9", "9" * 400, "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 99999 07:28:00 GMT")
    assert [asked_to_wait({"retry-after": said}) for said in (*others, "12")] == [0] * len(others) + [12]


@pytest.mark.few(1)
@pytest.mark.parametrize(("match", "weights"), [("/api/models", True), ("/store/", True), ("/config.json", False)])
def test_a_body_in_pieces_of_a_byte_is_left(hub: Hub, tmp_path: Path, match: str, weights: bool) -> None:
    """It comes fast enough: it is the processor that it costs."""
    hub.add("org/name", MODEL)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"1\r\n \r\n" * 10_000)

    hub.fail(match, answer)
    refused(tmp_path, "pieces, each of which takes time", weights=weights)


def test_a_client_that_is_kept_busy_is_looked_at_before_it_ends(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time is left for the answer, and none of the processor's."""
    monkeypatch.setenv("PORTING_LIMITS", "seconds=0,waiting=600")
    hub.add("org/name", MODEL)
    hub.fail("/api/models", endless(b" " * 100, pause=0.01))
    with pytest.raises(LimitError, match="this takes more than 0 seconds"):
        open_checkpoint("org/name", cache_dir=tmp_path / "hf")


def floods(piece: bytes) -> Answer:
    """What comes before a response, without an end."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        for _ in range(100_000):
            handler.wfile.write(piece * 500)

    return answer


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("match", "weights"),
    [("/api/models", True), ("/resolve/", True), ("/store/", True), ("/resolve/", False)],
    ids=["list", "heads", "bodies", "ranges"],
)
@pytest.mark.parametrize(
    "piece",
    [b"HTTP/1.1 102 Processing\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"],
    ids=["102", "103"],
)
def test_interim_responses_without_end_are_left(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, match: str, weights: bool, piece: bytes
) -> None:
    """Of several files at a time, too."""
    monkeypatch.setenv("PORTING_LIMITS", "seconds=1")
    hub.add("org/name", MODEL)
    hub.fail(match, floods(piece))
    with pytest.raises(LimitError, match="seconds of reading"):
        open_checkpoint("org/name", cache_dir=tmp_path / "hf", weights=weights)


def test_files_that_are_fetched_at_a_time_share_one_budget(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/name", MODEL)
    with spending() as budget:
        before = budget.left
        fetch = Fetcher(ModelId(repo="org/name", revision=commit), commit, None, tmp_path / "hf")
        fetch(["model.safetensors", "config.json"])
        assert budget.left < before


def test_after_an_error_no_other_file_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    commit = hub.add("org/name", MODEL)
    fetch = Fetcher(ModelId(repo="org/name", revision=commit), commit, None, tmp_path / "hf")
    names = [f"no-{number}.json" for number in range(40)]
    with pytest.raises(HubError, match=r"no-0\.json"):
        fetch(names)
    assert len({request.path for request in hub.requests if "no-" in request.path}) < len(names)


def test_requests_are_charged_by_their_processor_time(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index can name thousands of small shards; each is a few requests."""
    shards = {f"s{number}.safetensors": save({f"t{number}": torch.zeros(1)}) for number in range(30)}
    weight_map = {f"t{number}": f"s{number}.safetensors" for number in range(30)}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    hub.add("org/name", {"model.safetensors.index.json": index, "config.json": b"{}", **shards})
    assert len(open_checkpoint("org/name", weights=False).tensors) == 30
    monkeypatch.setenv("PORTING_LIMITS", "seconds=0")
    with pytest.raises(LimitError, match="seconds of reading"):
        open_checkpoint("org/name", weights=False)


def test_a_server_that_is_slow_and_goes_on_is_waited_for(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 kB at 8 kB a second take two seconds, with one second allowed and another for each 10 kB that came."""
    monkeypatch.setenv("PORTING_LIMITS", "waiting=1")
    monkeypatch.setattr(Waiting, "waited", property(lambda waiting: waiting.received / 8_000))  # whatever runs beside
    monkeypatch.setattr(hub_guard, "LOOK", 0.01)
    hub.add("org/name", MODEL)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(WEIGHTS)))
        handler.end_headers()
        step = len(WEIGHTS) // 20 + 1
        for start in range(0, len(WEIGHTS), step):
            handler.wfile.write(WEIGHTS[start : start + step])
            Event().wait(0.02)  # the client looks at its time between the pieces

    hub.fail("/store/", answer)
    assert open_checkpoint("org/name").read("a")[5] == 5


def many_shards(hub: Hub, count: int) -> None:
    shards = {f"s{number}.safetensors": save({f"a.{number}": torch.zeros(1)}) for number in range(count)}
    index = {"metadata": {}, "weight_map": {f"a.{number}": f"s{number}.safetensors" for number in range(count)}}
    hub.add("org/name", {"model.safetensors.index.json": json.dumps(index).encode(), "config.json": b"{}", **shards})


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("weights", [True, False])
def test_the_time_of_waiting_is_one_for_all_files(hub: Hub, monkeypatch: pytest.MonkeyPatch, weights: bool) -> None:
    monkeypatch.setenv("PORTING_LIMITS", "waiting=2")
    many_shards(hub, 40)
    answered: list[str] = []

    def slowly(handler: Any) -> None:  # Any: the hub's own handler
        Event().wait(0.4)
        handler._stored(handler.path.removeprefix("/store/"), None)
        answered.append(handler.path)

    hub.fail("/store/", slowly)
    with pytest.raises(
        (HubError, CheckpointError), match=r"^.* of all files came in .* and then it was left .*waiting=200\) .*$"
    ):
        open_checkpoint("org/name", weights=weights)
    assert len(answered) < 40, "each of them came in less than two seconds"
    for thread in threading.enumerate():  # requests on their way end by themselves; the collector closes their sockets
        if thread.name.endswith(("(run)", "(_close)")):
            thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def test_of_shards_whose_headers_are_read_one_is_held_at_a_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    many_shards(hub, 30)
    alive: weakref.WeakSet[RemoteFile] = weakref.WeakSet()
    most, real = [0], RemoteFile.__init__

    def init(self: RemoteFile, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        alive.add(self)
        most[0] = max(most[0], len(alive))

    monkeypatch.setattr(RemoteFile, "__init__", init)
    assert len(open_checkpoint("org/name", weights=False).tensors) == 30
    assert most[0] <= 3


def test_a_limit_that_is_none_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTING_LIMITS", "wating=1")
    with pytest.raises(LimitError, match=r"PORTING_LIMITS: 'wating=1' is not a limit, expected one of made, members"):
        open_checkpoint("org/name")


CONFIG = MODEL["config.json"]
LIES = {
    "the middle": ({"Content-Range": "bytes 5-9/22"}, CONFIG[5:10]),
    "more than the range": ({"Content-Range": "bytes 0-9/10"}, CONFIG),
    "a range beyond the end": ({"Content-Range": "bytes 0-99/22"}, CONFIG),
    "no range": ({}, CONFIG),
    "several ranges": ({"Content-Type": "multipart/byteranges; boundary=x"}, b"--x\r\n\r\n{}\r\n--x--"),
    "a range of no size": ({"Content-Range": "bytes 0-21/*"}, CONFIG),
    "nothing": ({"Content-Range": "bytes 0-21/22"}, b""),
}


@pytest.mark.few(2)
@pytest.mark.parametrize(("headers", "body"), LIES.values(), ids=list(LIES))
@pytest.mark.parametrize("weights", [True, False])
def test_a_range_that_was_not_asked_for_is_the_fault_of_the_hub(
    hub: Hub, tmp_path: Path, headers: dict[str, str], body: bytes, weights: bool
) -> None:
    hub.add("org/name", MODEL)
    hub.fail("/config.json", sending(headers, body, status=206), method="GET")
    asked = "the whole file" if weights else "bytes=0-131071"
    refused(tmp_path, "config.json: ", "answered with status 206, ", f"{asked} was asked for", weights=weights)


@pytest.mark.parametrize("status", [201, 202, 204, 205])
@pytest.mark.parametrize("weights", [True, False])
def test_a_status_without_a_file_is_the_fault_of_the_hub(hub: Hub, tmp_path: Path, status: int, weights: bool) -> None:
    hub.add("org/name", MODEL)
    hub.fail("/config.json", sending({}, b"", status=status), method="GET")
    refused(tmp_path, f"answered with status {status}, and 200 was expected", weights=weights)


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (206, {"Content-Range": "bytes 0-9/10"}, CONFIG[:10]),
        (206, {"Content-Range": "bytes 0-21/22"}, CONFIG[1:] + b" "),
        (200, {}, CONFIG[:5]),
        (416, {"Content-Range": "bytes */0"}, b""),
    ],
)
def test_a_file_of_other_bytes_than_announced_is_the_fault_of_the_hub(
    hub: Hub, tmp_path: Path, status: int, headers: dict[str, str], body: bytes
) -> None:
    hub.add("org/name", MODEL)
    etag = {"ETag": f'"{hashlib.sha256(CONFIG).hexdigest()}"'}
    hub.fail("/config.json", sending(etag | headers, body, status=status))
    refused(tmp_path, "config.json: ", "answered with bytes whose SHA-256 is ", "[hub-answer]", weights=False)


def failing(status: int, **headers: str) -> Answer:
    return sending({name.replace("_", "-"): value for name, value in headers.items()}, b"{}", status=status)


def gone(handler: Any) -> None:  # Any: the hub's own handler
    """Answers, and is not there any more: it stops listening first, and no later request may take this connection."""
    handler.server.shutdown()
    handler.server.server_close()
    handler._info("org/name", "main", {"Connection": "close"})


@pytest.mark.parametrize(
    ("match", "answer", "message"),
    [
        ("/config.json", failing(500), "the hub answered with status 500"),
        ("/config.json", failing(503, Retry_After="3"), "the hub answered with status 503 (try again after 3 seconds"),
        ("/store/", failing(408), "the hub answered with status 408"),
        ("/store/", failing(408, Retry_After="9"), "the hub answered with status 408 (try again after 9 seconds"),
        ("/api/models", gone, "broke the connection 4 times"),
    ],
)
def test_a_hub_that_only_fails_is_left_after_seconds(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, match: str, answer: Answer, message: str
) -> None:
    """The client by itself tries for 24 s, and for 50 where the hub asks for 9 s between two requests."""
    waited: Counter[int] = Counter()  # by thread: some files are asked for at the same time

    def wait(seconds: float) -> None:
        waited[threading.get_ident()] += int(seconds)

    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", wait)
    hub.add("org/name", MODEL)
    hub.fail(match, answer)
    refused(tmp_path, message, "HF_HUB_OFFLINE", "[hub-unreachable]")
    assert max(waited.values()) <= 12


# A connection that a thread opens while another closes the client is left to the garbage collector, by the client.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", [RuntimeError("client has been closed"), AttributeError("'NoneType' ...")])
def test_a_session_that_another_thread_closes_is_replaced(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The client closes its one session when a connection is refused, and other threads' requests fail with it."""
    hub.add("org/name", MODEL)
    ask, failures = Fetcher._fetched, [error, error]

    def asked(self: Fetcher, name: str, cache: Path) -> str:
        if failures and name == "config.json":
            huggingface_hub.close_session()
            raise failures.pop()
        return ask(self, name, cache)

    monkeypatch.setattr(Fetcher, "_fetched", asked)
    assert open_checkpoint("org/name").read("a")[5] == 5
    assert not failures


def test_a_hub_that_recovers_is_waited_for(hub: Hub) -> None:
    hub.add("org/name", MODEL)
    hub.fail("/config.json", 503, times=3)
    hub.fail("/store/", failing(408, Retry_After="2"), times=2)
    assert open_checkpoint("org/name").read("a")[5] == 5


# --------------------------------------------------------------------------------------------------------- other sides


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"sha": 3}',
        b'{"sha": "' + b"a" * 40 + b'", "siblings": 5}',
        b'{"sha": "' + b"a" * 40 + b'", "siblings": [{"rfilename": ["x"]}]}',
        b'{"lastModified": {}}',
        b'{"cardData": [1]}',
        b"9" * 5000,
        b"\xff",
    ],
)
def test_an_answer_of_another_kind(hub: Hub, tmp_path: Path, body: bytes) -> None:
    hub.fail("/api/models", sending({"Content-Type": "application/json"}, body))
    came = f"GET {hub.url}/api/models/org/name/revision/main got status 200, Content-Type 'application/json' and a body"
    shown = quote(body[:60].decode(errors="replace"))
    refused(tmp_path, f"gave a malformed answer: {came} that begins {shown} (", "[hub-answer]")


def says_nothing(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"no HTTP\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "came"),
    [
        (sending({}, b'{"sha": "'), "got status 200, no Content-Type and a body that begins"),
        (sending({}, b"{}", length=9), "got status 200, no Content-Type and a body that begins '{}' ("),
        (says_nothing, "no response came that can be read"),
    ],
    ids=["half", "short", "no http"],
)
@pytest.mark.parametrize("match", ["/api/models", "/config.json"])
def test_an_answer_that_cannot_be_read(hub: Hub, tmp_path: Path, answer: Answer, came: str, match: str) -> None:
    hub.add("org/name", MODEL)
    hub.fail(match, answer)
    weights = match == "/config.json"
    if weights and "half" in tmp_path.name:
        pytest.skip("a config.json of other bytes is for whoever reads it")
    refused(tmp_path, "gave a malformed answer", "[hub-answer]", weights=weights)


def test_what_cannot_be_read_lets_the_cache_stand_in(hub: Hub) -> None:
    """As in a network that shows a login page first."""
    hub.add("org/name", MODEL)
    open_checkpoint("org/name")
    hub.fail("/api/models", "html")
    assert open_checkpoint("org/name").read("a")[5] == 5


def test_a_mirrors_way_past_http_is_not_taken(hub: Hub) -> None:
    """With these headers the client asks another server, by a protocol that nothing here can count."""
    commit = hub.add("org/name", MODEL)
    headers = {
        "X-Repo-Commit": commit,
        "ETag": f'"{DIGEST}"',
        "X-Xet-Hash": "../../planted",
        "X-Xet-Refresh-Route": f"{hub.url}/refresh",
    }
    hub.fail("/model.safetensors", sending(headers))
    assert open_checkpoint("org/name").read("a")[5] == 5
    assert not hub.asked("/refresh")


def test_other_requests_of_the_program_are_left_as_they_are(hub: Hub) -> None:
    """A user's own factory of clients is kept, and what they ask for by themselves is not judged."""
    from huggingface_hub import get_session

    hub.add("org/name", MODEL)
    open_checkpoint("org/name")
    hub.fail("/mine", sending({"ETag": "/etc/passwd", "X-Repo-Commit": "x"}, json.dumps(1).encode()))
    assert get_session().get(f"{hub.url}/mine").json() == 1
    assert get_session().head(f"{hub.url}/mine").headers["etag"] == "/etc/passwd"


def test_a_factory_of_the_users_is_kept(hub: Hub) -> None:
    from huggingface_hub.utils import _http

    seen: list[str] = []

    def factory() -> object:
        client = _http.default_client_factory()
        client.event_hooks["request"].append(lambda request: seen.append(str(request.url)))
        return client

    before = _http._GLOBAL_CLIENT_FACTORY
    try:
        huggingface_hub.set_client_factory(factory)  # type: ignore[arg-type]  # a client, as the function says
        commit = hub.add("org/name", MODEL)
        open_checkpoint("org/name")
        assert any(commit in header for header in seen)
        huggingface_hub.set_client_factory(factory)  # type: ignore[arg-type]  # set again, behind our back
        hub.fail("/config.json", sending({"X-Repo-Commit": commit, "ETag": "/etc/passwd"}))
        with pytest.raises(HubError, match="answered with ETag"):
            open_checkpoint("org/name", cache_dir=Path(os.environ["HF_HOME"]) / "other")
    finally:
        huggingface_hub.set_client_factory(before)

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save

from porting.checkpoint import CheckpointError, HubError, inspect_checkpoint, open_checkpoint
from tests.checkpoint.hostile import index
from tests.checkpoint.test_bin_file import saved
from tests.hub_server import Answer, Hub, environment

WEIGHTS = {f"layer.{i}.weight": torch.arange(40_000.0).view(200, 200) + i for i in range(4)}
MODEL = {
    "model.safetensors": save(WEIGHTS),
    "config.json": b'{"model_type": "bert"}',
    "vocab.txt": b"[PAD]",
    "README.md": b"# a model",
    "pytorch_model.bin": b"not needed",
}
SHARDED = {
    "model.safetensors.index.json": index({f"layer.{i}.weight": f"m-{i // 2}.safetensors" for i in range(4)}),
    "m-0.safetensors": save({name: WEIGHTS[name] for name in ("layer.0.weight", "layer.1.weight")}),
    "m-1.safetensors": save({name: WEIGHTS[name] for name in ("layer.2.weight", "layer.3.weight")}),
    "m-7.safetensors": b"of an older save",
    "config.json": b"{}",
}


def fails(
    name: str,
    *messages: str,
    weights: bool = True,
    local_files_only: bool = False,
) -> None:
    """Opening fails with one line that holds these messages."""
    with pytest.raises(HubError) as caught:
        open_checkpoint(name, weights=weights, local_files_only=local_files_only)
    text = str(caught.value)
    for message in messages:
        assert message in text
    assert text.startswith(name)
    assert len(text.split("\n")) == 1


def cached_files(home: Path) -> list[Path]:
    """The files of weights that the cache offers, and what lies behind them."""
    return [path for path in home.rglob("snapshots/**/*") if path.is_file()]


def test_model_is_fetched_once_and_only_what_is_needed(hub: Hub) -> None:
    commit = hub.add("org/name", MODEL)
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.commit == commit
    assert checkpoint.location == "org/name"
    assert checkpoint.path is not None
    assert sorted(os.listdir(checkpoint.path)) == ["config.json", "model.safetensors", "vocab.txt"]
    assert checkpoint.config == {"model_type": "bert"}
    for name, tensor in WEIGHTS.items():
        assert torch.equal(checkpoint.read(name), tensor)
    hub.requests.clear()
    open_checkpoint("org/name")
    assert [request.path for request in hub.requests] == ["/api/models/org/name/revision/main"]


def test_sharded_model(hub: Hub) -> None:
    hub.add("org/name", SHARDED)
    checkpoint = open_checkpoint("org/name")
    assert [file.name for file in checkpoint.files] == ["m-0.safetensors", "m-1.safetensors"]
    assert torch.equal(checkpoint.read("layer.3.weight"), WEIGHTS["layer.3.weight"])
    assert not hub.asked("m-7")


def test_bin_model(hub: Hub) -> None:
    hub.add("org/name", {"pytorch_model.bin": saved(WEIGHTS)})
    assert torch.equal(open_checkpoint("org/name").read("layer.0.weight"), WEIGHTS["layer.0.weight"])


def test_revision(hub: Hub) -> None:
    old = hub.add("org/name", {"model.safetensors": save({"old": torch.zeros(1)})}, revision="v1")
    hub.add("org/name", MODEL)
    for checkpoint in (
        open_checkpoint("org/name@v1"),
        open_checkpoint("org/name", revision="v1"),
        open_checkpoint("org/name@v1", revision="v1"),
        open_checkpoint(f"org/name@{old}"),
    ):
        assert list(checkpoint.tensors) == ["old"]
    with pytest.raises(CheckpointError, match=r"two revisions are given, 'v1' in the name and 'v2' beside it"):
        open_checkpoint("org/name@v1", revision="v2")
    with pytest.raises(CheckpointError, match=r"'../../x' is not a possible revision"):
        open_checkpoint("org/name", revision="../../x")


def test_revision_that_moves_between_two_files(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hub.add("org/name", SHARDED)
    moved: list[str] = []
    trouble = hub.trouble

    def move(method: str, path: str) -> int | str | Answer | None:
        if "index.json" in path and not moved:
            changed = {name: tensor + 1 for name, tensor in WEIGHTS.items() if name[6] in "23"}
            moved.append(hub.add("org/name", {**SHARDED, "m-1.safetensors": save(changed)}))
        return trouble(method, path)

    monkeypatch.setattr(hub, "trouble", move)
    checkpoint = open_checkpoint("org/name")
    assert moved
    assert moved[0] != first
    assert checkpoint.commit == first
    assert torch.equal(checkpoint.read("layer.3.weight"), WEIGHTS["layer.3.weight"])


# -------------------------------------------------------------------------------------------------------- only headers


@pytest.mark.parametrize(
    "files", [MODEL, SHARDED, {"pytorch_model.bin": saved(WEIGHTS)}], ids=["single", "sharded", "bin"]
)
def test_headers_are_read_by_range_and_weights_are_not(hub: Hub, tmp_path: Path, files: dict[str, bytes]) -> None:
    hub.add("org/name", files)
    checkpoint = open_checkpoint("org/name", weights=False)
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == dict.fromkeys(WEIGHTS, (200, 200))
    assert checkpoint.path is None
    assert cached_files(tmp_path) == []
    store = [request for request in hub.requests if request.path.startswith("/store/")]
    assert store
    asked = 0
    for request in store:
        low, high = request.headers["range"].removeprefix("bytes=").split("-")
        asked += int(high) - int(low) + 1
    assert asked <= sum(map(len, files.values())) * 0.85
    with pytest.raises(CheckpointError, match=r"'layer.0.weight' were not fetched, only the headers"):
        checkpoint.read("layer.0.weight")


def test_inspect_a_model_on_the_hub(hub: Hub) -> None:
    commit = hub.add("org/name", SHARDED)
    found = inspect_checkpoint("org/name")
    assert found.commit == commit
    assert [group.pattern for group in found.groups] == ["layer.{0..3}.weight"]


def test_server_that_ignores_ranges_is_left_after_the_header(hub: Hub) -> None:
    hub.add("org/name", MODEL)
    hub.fail("/store/", "no range")
    assert len(open_checkpoint("org/name", weights=False).tensors) == 4


def test_header_with_a_fault_names_model_commit_and_file(hub: Hub) -> None:
    commit = hub.add("org/name", {"model.safetensors": b"<html>log in"})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("org/name", weights=False)
    assert str(caught.value).startswith(f"org/name@{commit[:12]}: model.safetensors: this is an HTML page")


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_model_that_does_not_exist(hub: Hub) -> None:
    fails("org/nothing", "shows no such model", "check the spelling", "hf auth login")


def test_revision_that_does_not_exist(hub: Hub) -> None:
    hub.add("org/name", MODEL)
    fails("org/name@v9", "the model has no such revision")


def test_private_model_needs_a_token(hub: Hub) -> None:
    hub.add("org/name", MODEL, private=True)
    fails("org/name", "it does not exist, or it is private")
    assert open_checkpoint("org/name", token=hub.token).tensors


@pytest.mark.parametrize("weights", [True, False])
def test_gated_model(hub: Hub, weights: bool) -> None:
    hub.add("org/name", MODEL, gated=True)
    fails("org/name", "the model is gated", f"accept them at {hub.url}/org/name, then", weights=weights)
    assert open_checkpoint("org/name", token=hub.token, weights=weights).tensors


def test_token_is_asked_for_and_none_is_stored(hub: Hub) -> None:
    hub.add("org/name", MODEL)
    with pytest.raises(HubError, match=r"a token was asked for, and none is stored.*run `hf auth login`"):
        open_checkpoint("org/name", token=True)


def test_model_without_weights(hub: Hub) -> None:
    hub.add("org/name", {"config.json": b"{}", "foo.safetensors": b""})
    with pytest.raises(CheckpointError, match=r"^org/name: holds no weights"):
        open_checkpoint("org/name")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("status", "messages"),
    [
        (401, ("does not accept the token (401)", "hf auth login")),
        (403, ("gives no right to read it (403)", "ask its owner")),
        (404, ("shows no such model", "check the spelling")),
        (429, ("too many requests (429)", "try again after 7 seconds")),
        (500, ("the hub answered with status 500", "try again later")),
        (503, ("the hub answered with status 503", "local_files_only=True")),
    ],
)
@pytest.mark.parametrize("where", ["/api/models", "config.json"])
@pytest.mark.parametrize("weights", [True, False])
def test_status(hub: Hub, status: int, messages: tuple[str, ...], where: str, weights: bool) -> None:
    hub.add("org/name", MODEL)
    hub.fail(where, status)
    with pytest.raises(HubError) as caught:
        open_checkpoint("org/name", weights=weights)
    assert str(caught.value).startswith("org/name")
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("number", "message", "hint"),
    [
        (errno.ENOSPC, "No space left on device", "set HF_HOME to a place with room"),
        (errno.EDQUOT, "Disk quota exceeded; your quota there allows", "set HF_HOME to a place with room"),
        (errno.EROFS, "Read-only file system", "set HF_HOME to a place that can be written to"),
        (errno.EACCES, "Permission denied", "set HF_HOME to a place that you can write to"),
        (errno.ENAMETOOLONG, "File name too long", "set HF_HOME to a place with a shorter path"),
        (errno.EFBIG, "files of at most 4096 bytes (`ulimit -f`)", "run `ulimit -f unlimited`"),
    ],
)
def test_a_cache_that_cannot_be_written(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str, hint: str
) -> None:
    def full(*arguments: object, **options: object) -> str:
        raise OSError(number, os.strerror(number), str(tmp_path / "blob"))

    hub.add("org/name", MODEL)
    monkeypatch.setattr("porting.checkpoint.hub.hf_hub_download", full)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, resource.RLIM_INFINITY))
    with pytest.raises(HubError) as caught:
        open_checkpoint("org/name")
    (fault,) = caught.value.faults
    assert fault.message.startswith("the cache cannot be written: ")
    assert message in fault.message
    assert hint in fault.hint


def test_login_page_instead_of_an_answer(hub: Hub) -> None:
    hub.fail("/api/models", "html")
    fails("org/name", "gave a malformed answer", "'text/html' and a body that begins '<", "check HF_ENDPOINT")


def test_hub_that_is_not_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    fails("org/name", "http://127.0.0.1:9 cannot be reached", "check the network")


def test_connection_that_drops_half_way_is_taken_up_again(hub: Hub) -> None:
    hub.add("org/name", MODEL)
    hub.fail("/store/", "drop", times=1)
    checkpoint = open_checkpoint("org/name")
    assert len(hub.asked("/store/")) == 2
    for name, tensor in WEIGHTS.items():
        assert torch.equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize("kind", ["short", "broken"])
def test_download_that_fails_leaves_no_half_file_and_the_second_try_succeeds(
    hub: Hub, tmp_path: Path, kind: str
) -> None:
    hub.add("org/name", MODEL)
    if kind == "short":  # lengths disagree: the body is half of what the hub announced
        hub.fail("/store/", "short")
    else:  # half of the body, then nothing but errors
        hub.fail("/store/", "drop", times=1)
        hub.fail("/store/", 500)
    fails("org/name", "model.safetensors:", "try again")
    assert not [path for path in cached_files(tmp_path) if path.name == "model.safetensors"]
    blobs = [path for path in tmp_path.rglob("blobs/*") if not path.name.endswith(".incomplete")]
    assert all(path.stat().st_size < 1000 for path in blobs), "no half file goes by the name of the whole one"
    hub.troubles.clear()
    checkpoint = open_checkpoint("org/name")
    for name, tensor in WEIGHTS.items():
        assert torch.equal(checkpoint.read(name), tensor)


@pytest.mark.parametrize("weights", [True, False])
def test_no_token_goes_to_another_host(hub: Hub, weights: bool) -> None:
    hub.add("org/name", MODEL, gated=True)
    open_checkpoint("org/name", token=hub.token, weights=weights)
    assert any("authorization" in request.headers for request in hub.requests if request.host == "127.0.0.1")
    other = [request for request in hub.requests if request.host == "localhost"]
    assert other
    assert not any("authorization" in request.headers for request in other)


# ------------------------------------------------------------------------------------------------------------- offline


def offline(how: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Goes offline by the environment, or says so for ``local_files_only``."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", how == "HF_HUB_OFFLINE")
    return how == "local_files_only"


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "local_files_only"])
@pytest.mark.parametrize("revision", ["main", "refs/pr/3"])
def test_cached_model_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch, how: str, revision: str) -> None:
    hub.add("org/name", SHARDED, revision=revision.replace("/", "%2F"))
    open_checkpoint("org/name", revision=revision)
    hub.requests.clear()
    local = offline(how, monkeypatch)
    for weights in (True, False):
        checkpoint = open_checkpoint("org/name", revision=revision, weights=weights, local_files_only=local)
        assert torch.equal(checkpoint.read("layer.3.weight"), WEIGHTS["layer.3.weight"])
    assert hub.requests == []


@pytest.mark.parametrize("how", ["HF_HUB_OFFLINE", "local_files_only"])
def test_model_that_is_not_cached_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    hub.add("org/name", MODEL)
    fails(
        "org/name", "nothing of it is in the cache", "unset HF_HUB_OFFLINE", local_files_only=offline(how, monkeypatch)
    )
    assert hub.requests == []


@pytest.mark.parametrize("missing", ["m-1.safetensors", "model.safetensors.index.json"])
def test_half_a_snapshot_offline(hub: Hub, missing: str) -> None:
    hub.add("org/name", SHARDED)
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.path is not None
    (checkpoint.path / missing).unlink()
    lacks = missing if missing.startswith("m-1") else "its weights"
    fails("org/name", f"the cache holds a part of it and lacks {lacks}", "go online once", local_files_only=True)
    assert open_checkpoint("org/name").tensors, "online it is completed"


def test_complete_snapshot_stands_in_for_a_hub_that_gives_no_answer(hub: Hub) -> None:
    hub.add("org/name", MODEL)
    commit = open_checkpoint("org/name").commit
    hub.fail("/", 503)
    assert open_checkpoint("org/name").commit == commit
    hub.troubles.clear()
    hub.fail("/", 403)
    fails("org/name", "gives no right to read it (403)")


def test_cache_dir(hub: Hub, tmp_path: Path) -> None:
    hub.add("org/name", MODEL)
    checkpoint = open_checkpoint("org/name", cache_dir=tmp_path / "elsewhere")
    assert checkpoint.path is not None
    assert checkpoint.path.is_relative_to(tmp_path / "elsewhere")


def test_fresh_process_with_nothing_but_the_environment(hub: Hub, tmp_path: Path) -> None:
    """HF_ENDPOINT and HF_HOME as a user sets them; nothing of the client is patched."""
    hub.add("org/name", SHARDED)
    code = "import sys; from porting.checkpoint import open_checkpoint; print(open_checkpoint('org/name'))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment(hub, tmp_path / "fresh")},
    )
    assert result.stdout.strip() == "Checkpoint('org/name', 4 tensors in 2 files)"
    assert list((tmp_path / "fresh").rglob("refs/main"))

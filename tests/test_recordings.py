"""Recordings read and written with numpy alone; ``porting.verify`` reads what it writes, and the other way round."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import porting
from porting.recordings import RecordingError, load_recording, save_recording
from porting.verification import record, verify
from porting.verification.recorded_trace import read_recording

X = np.linspace(-1, 1, 15).reshape(5, 3)


def test_what_is_written_is_read_by_both(tmp_path: Path) -> None:
    second = {"x": X[:2], "flag": np.array([True, False])}
    points = [{"part": {"0": X * 2}, ".": X}, {"part": {"0": X[:2] * 2}, ".": X[:2]}]
    half = [{"part": {"0": np.float16(2 * batch["x"])}} for batch in ({"x": X}, second)]
    path = save_recording(tmp_path / "t.safetensors", [{"x": X}, second], points, float16=half, reference="by hand")
    opened = read_recording(path)
    assert opened.reference == "by hand"
    assert opened.dtypes == (torch.float16,)
    assert opened.points() == ["part.0", "."]
    assert [sorted(case.inputs) for case in opened.cases] == [["x"], ["flag", "x"]]
    assert dict(opened.trace(torch.float64, 1))["part.0"].tolist() == (X[:2] * 2).tolist()
    again = load_recording(path)
    assert again.metadata["reference"] == "by hand"
    assert (again.points["float16"][0]["part.0"] == half[0]["part"]["0"]).all()
    assert again.inputs[1]["flag"].tolist() == [True, False]
    content = path.read_bytes()
    save_recording(path, [{"x": X}, second], points, float16=half, reference="by hand", overwrite=True)
    assert path.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.safetensors"]


def test_one_array_is_what_the_model_returns(tmp_path: Path) -> None:
    linear = nn.Linear(3, 2).double()
    module = nn.Sequential(linear)
    values = X @ linear.weight.detach().numpy().T + linear.bias.detach().numpy()
    path = save_recording(tmp_path / "t.safetensors", {"input": X}, values)
    report = verify(into=module, reference=path)
    assert report.faithful, str(report)
    assert [probe.port for probe in report.probes] == ["."]


def test_the_inputs_and_weights_of_a_module_are_written_for_others(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    path = record(module, tmp_path / "q.safetensors", inputs={"input": X}, inputs_only=True, weights=True)
    question = load_recording(path)
    assert question.points == {}
    assert (question.inputs[0]["input"] == X).all()
    assert {name: tensor.tolist() for name, tensor in question.weights.items()} == {
        name: tensor.tolist() for name, tensor in module.state_dict().items()
    }
    with pytest.raises(porting.PortingError, match="it holds inputs and nothing that was computed from them"):
        verify(into=module, reference=path)


def test_a_port_gets_the_weights_of_a_recording(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    path = record(module, tmp_path / "g.safetensors", inputs={"input": X}, weights=True)
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert verify(into=other, reference=path).faithful
    assert not verify(into=other, reference=path, loaded=True).faithful  # its own weights are others
    table = tmp_path / "t.toml"
    rules = "\n".join(f'"{name}" = "{name}"' for name in module.state_dict())
    table.write_text(f'[mapping]\nname = "t"\n[tensors]\n{rules}\n[probes]\n"." = "."\n')
    assert verify(into=other, reference=path, table=table).faithful


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    path = record(module, tmp_path / "b.safetensors", inputs={"input": X}, dtypes=(torch.bfloat16,))
    found = load_recording(path).points["bfloat16"][0]["0"]
    assert found.dtype == np.float32
    assert found.tolist() == module.bfloat16()(torch.tensor(X).bfloat16()).float().tolist()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"points": X.astype(np.float32)}, r"'.' of batch 0 is of float32, expected float64 \(.*jax_enable_x64"),
    "no inputs": ({"inputs": {}}, "there are no inputs"),
    "too few": ({"inputs": [{"x": X}, {"x": X}]}, "2 batches, and values in float64 of 1"),
    "words": ({"inputs": {"x": np.array(["a"])}}, "the input 'x' of batch 0 is of <U1"),
    "no point": ({"points": {}}, "batch 0 has no point in float64"),
    "without its exact value": ({"float32": {"a": np.float32(X)}}, "'a' of batch 0 is there in float32, and not"),
    "another shape": (
        {"float32": np.float32(X[:2])},
        r"'.' of batch 0 is \[2, 3\] in float32, and \[5, 3\]",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_recorded_is_said(tmp_path: Path, what: str) -> None:
    change, message = WRONG[what]
    with pytest.raises(RecordingError, match=message):
        save_recording(tmp_path / "t.safetensors", **{"inputs": {"x": X}, "points": X, **change})
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_stands_there_is_kept(tmp_path: Path) -> None:
    path = save_recording(tmp_path / "t.safetensors", {"x": X}, X)
    with pytest.raises(RecordingError, match="exists already"):
        save_recording(path, {"x": X}, X + 1)
    assert (load_recording(path).points["float64"][0]["."] == X).all()
    with pytest.raises(RecordingError, match="lies in a directory that does not exist"):
        save_recording(tmp_path / "no" / "t.safetensors", {"x": X}, X)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "directory"])
def test_what_is_planted_at_the_destination_stays(tmp_path: Path, kind: str, overwrite: bool) -> None:
    path, other = tmp_path / "t.safetensors", tmp_path / "other"
    if kind == "link":
        other.write_bytes(b"kept")
    if kind.endswith("link"):
        path.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    before = path.lstat()
    with pytest.raises(RecordingError, match=r"the destination (is a|exists)"):
        save_recording(path, {"x": X}, X, overwrite=overwrite)
    assert os.path.samestat(path.lstat(), before)
    assert other.read_bytes() == b"kept" if kind == "link" else not other.exists()


def test_what_appears_while_a_recording_is_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, contiguous = tmp_path / "t.safetensors", np.ascontiguousarray

    def late(array: np.ndarray) -> np.ndarray:
        path.write_bytes(b"another's")
        return contiguous(array)

    monkeypatch.setattr(np, "ascontiguousarray", late)
    with pytest.raises(RecordingError, match="appeared while this was being written"):
        save_recording(path, {"x": X}, X)
    assert path.read_bytes() == b"another's"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def header(**change: Any) -> bytes:
    said = {"dtype": "F64", "shape": [1], "data_offsets": [0, 8], **change}
    text = json.dumps({"__metadata__": {"format": "porting trace", "version": "1"}, "inputs/0/x": said}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(8)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 4) + b"[[[[",
        struct.pack("<Q", 2) + b"[]",
        header(dtype="F63"),
        header(shape=[2]),
        header(shape=[-1]),
        header(data_offsets=[0, 80]),
        header(data_offsets=[-8, 0]),
        header(data_offsets=[8]),
        header(shape=None),
        header(shape=[2**70]),
        header(shape=[float("inf")]),
        header(shape=[1.9]),
        header(shape="1"),
        header(data_offsets=[0, 8.0]),
        header(data_offsets=[0, 4]),
    ],
)
def test_a_damaged_file_is_said_in_a_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="it is not a safetensors file") as caught:
        load_recording(path)
    assert "\n" not in str(caught.value)


def test_what_is_no_recording_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="no such file"):
        load_recording(tmp_path / "absent.safetensors")
    path = tmp_path / "t.safetensors"
    path.write_bytes(header().replace(b"porting trace", b"another thing"))
    with pytest.raises(RecordingError, match="its metadata has format 'another thing'"):
        load_recording(path)

"""A recorded trace in the place of a reference: the same verdicts, the same bytes, and what it cannot give is said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import porting
from porting.checkpoint import CheckpointError, open_checkpoint
from porting.checkpoint.write import write_safetensors
from porting.models.bert_heads import BertForPreTraining
from porting.notation.table import parse_table
from porting.verification import Case, VerifyError, record, verify
from porting.verification.recorded_trace import read_recording
from tests.small_checkpoint import tensors, write_checkpoint
from tests.verification.planted import BUGS, ROUNDS_WORSE
from tests.verification.user_bert import FUSED_TABLE, MyBert

pytestmark = pytest.mark.few(3)


@pytest.fixture(scope="module")
def golden(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "golden.safetensors"
    return record(checkpoint, path, dtypes=(torch.float32, torch.bfloat16))


def test_a_verification_from_it_is_the_one_with_the_reference(checkpoint: Path, golden: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    cases = read_recording(golden).cases  # with the reference at hand, more would be looked for
    live = verify(checkpoint, dtypes=dtypes, inputs=cases)
    recorded = verify(checkpoint, dtypes=dtypes, reference=golden)
    assert recorded.probes == live.probes
    assert recorded.noise == live.noise
    assert recorded.shown == live.shown
    assert recorded.cases == live.cases
    assert recorded.faithful
    assert recorded.reference == f"transformers.BertForPreTraining, recorded in {golden},"


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("bug", [BUGS[1], BUGS[5], BUGS[10], ROUNDS_WORSE], ids=lambda bug: bug.name)
def test_a_bug_is_placed_as_with_the_reference(checkpoint: Path, golden: Path, bug: object) -> None:
    model = porting.load(checkpoint)
    assert isinstance(model, BertForPreTraining)
    bug.plant(model)  # type: ignore[attr-defined]  # a Bug
    live, recorded = (verify(checkpoint, model, loaded=True, reference=one, causes=False) for one in (None, golden))
    assert recorded.verdict == live.verdict != "faithful"
    assert [probe.port for probe in recorded.guilty] == [probe.port for probe in live.guilty]
    assert [probe.port for probe in recorded.imprecise] == [probe.port for probe in live.imprecise]


@pytest.mark.slow
def test_neither_the_reference_nor_transformers_is_needed(checkpoint: Path, golden: Path) -> None:
    program = (
        f"import sys; sys.modules['transformers'] = None; import porting\n"
        f"assert porting.verify({str(checkpoint)!r}, reference={str(golden)!r}).faithful\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_same_content_gives_the_same_bytes(checkpoint: Path, golden: Path, tmp_path: Path) -> None:
    again = record(checkpoint, tmp_path / "again.safetensors", dtypes=(torch.float32, torch.bfloat16))
    assert again.read_bytes() == golden.read_bytes()
    with pytest.raises(CheckpointError, match=r"golden\.safetensors"):
        record(checkpoint, golden)


def test_its_metadata_says_what_was_recorded(checkpoint: Path, golden: Path) -> None:
    said = open_checkpoint(golden).files[0].metadata
    assert said["format"] == "porting trace"
    assert said["version"] == "1"
    assert said["reference"] == "transformers.BertForPreTraining"
    assert json.loads(said["cases"]) == ["8 rows of 1 to 24 tokens, padded"]
    assert said["weights"] == str(porting.digest(checkpoint))
    assert said["torch"] == torch.__version__


def test_part_of_it_is_enough(checkpoint: Path, golden: Path, tmp_path: Path) -> None:
    small = record(checkpoint, tmp_path / "small.safetensors", dtypes=(), only=("bert.encoder.layer.?", "cls.*"))
    assert small.stat().st_size * 10 < golden.stat().st_size
    report = verify(checkpoint, reference=small)
    assert report.faithful
    assert not report.complete
    assert {probe.reference for probe in report.probes} == {
        *(f"bert.encoder.layer.{i}" for i in range(3)), "cls.predictions", "cls.seq_relationship"
    }  # fmt: skip
    assert "bert.pooler" in report.skipped
    assert report.noise == {}
    assert report.warnings == (
        "the reference was not recorded in float32: how well the port rounds there is not known",
    )


def test_one_case_of_several_is_recorded(tmp_path: Path) -> None:
    values = {"bert.embeddings.position_embeddings.weight": torch.randn(40, 24)}
    path = write_checkpoint(tmp_path / "bert", change={"max_position_embeddings": 40}, values=values)
    with pytest.raises(VerifyError, match=r"there is no case 9 \(the cases are numbered from 0 to [0-9]\)"):
        record(path, tmp_path / "one.safetensors", cases=[9], dtypes=())
    one = record(path, tmp_path / "one.safetensors", cases=[1], dtypes=())
    assert verify(path, reference=one).cases == ("1 row of 40 tokens",)


def test_users_port_and_table(checkpoint: Path, tmp_path: Path) -> None:
    table = parse_table(FUSED_TABLE)
    path = record(checkpoint, tmp_path / "mine.safetensors", table, architecture="BertModel")
    assert verify(checkpoint, MyBert(), table, reference=path).faithful


def test_other_weights_are_refused(golden: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", values=tensors(5))
    with pytest.raises(VerifyError, match="recorded from other weights: sha256:"):
        verify(other, reference=golden)


def test_what_a_recording_cannot_give_is_refused(checkpoint: Path, golden: Path) -> None:
    with pytest.raises(VerifyError, match="a recording has activations only"):
        verify(checkpoint, reference=golden, gradients=True)
    batch = read_recording(golden).cases
    with pytest.raises(VerifyError, match="it was recorded for inputs of its own"):
        verify(checkpoint, reference=golden, inputs=batch)
    with pytest.raises(VerifyError, match="a recording holds activations and no weights, and no checkpoint was given"):
        verify(reference=golden)


class Small(nn.Module):
    """x -> tanh(x A) B; what the script below computes with numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(x)))
        return result


SCRIPT = """
import json, struct
import numpy as np

def save(path, arrays, metadata):
    names = {"float64": "F64", "float32": "F32", "int64": "I64", "bool": "BOOL"}
    header, end = {"__metadata__": metadata}, 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": names[str(array.dtype)], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in arrays.values()))

weights = np.load("weights.npz")
x = np.random.default_rng(0).normal(size=(5, 3))
arrays = {"inputs/0/x": x}
for kind in (np.float64, np.float32):
    a, b = weights["first"].astype(kind), weights["second"].astype(kind)
    arrays[f"{np.dtype(kind)}/0/encoder"] = x.astype(kind) @ a.T
    arrays[f"{np.dtype(kind)}/0/head"] = np.tanh(x.astype(kind) @ a.T) @ b.T
save("trace.safetensors", arrays, {"format": "porting trace", "version": "1", "reference": "numpy"})
"""
SMALL_TABLE = '[mapping]\nname = "small"\n[probes]\n"encoder" = "first"\n"head" = "second"\n'


def made_with_numpy(folder: Path) -> tuple[Small, Path]:
    torch.manual_seed(0)
    module = Small().double()
    weights = {"first": module.first.weight.detach().numpy(), "second": module.second.weight.detach().numpy()}
    np.savez(folder / "weights.npz", **weights)  # type: ignore[arg-type]  # numpy types its keywords as a flag
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=folder, check=True)
    return module, folder / "trace.safetensors"


def test_a_reference_that_is_no_torch(tmp_path: Path) -> None:
    module, path = made_with_numpy(tmp_path)
    report = verify(None, module, parse_table(SMALL_TABLE), reference=path, loaded=True)
    assert report.faithful, str(report)
    pairs = [(probe.reference, probe.port) for probe in report.probes]
    assert pairs == [("encoder", "first"), ("head", "second"), ("head", ".")]  # what is returned is compared as well
    assert all(probe.rounding["float32"].end_to_end > 0 for probe in report.probes)
    assert all(probe.rounding["float32"].isolated is None for probe in report.probes)  # it was not recorded
    assert report.reference == f"numpy, recorded in {path},"
    with torch.no_grad():
        module.second.weight[0, 0] += 1e-6
    broken = verify(None, module, parse_table(SMALL_TABLE), reference=path, loaded=True)
    assert [probe.port for probe in broken.guilty] == ["second"]


def test_a_golden_file_of_ones_own_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Small()
    batch = [Case("a batch", {"x": torch.randn(6, 3)})]
    path = record(module, tmp_path / "own.safetensors", inputs=batch)
    report = verify(None, module, reference=path, loaded=True)
    assert report.faithful, str(report)
    assert {probe.port for probe in report.probes} == {".", "first", "second"}
    module.first.register_forward_hook(lambda part, args, output: output + 1e-9)
    assert [probe.port for probe in verify(None, module, reference=path, loaded=True).guilty] == ["first"]


def changed(golden: Path, path: Path, change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> Path:
    file = open_checkpoint(golden)
    held, said = {name: file.read(name, own=True) for name in file.tensors}, dict(file.files[0].metadata)
    change(held, said)
    write_safetensors(path, held, metadata=said)
    return path


FIRST = "float64/0/bert.embeddings"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor], dict[str, str]], object], str]] = {
    "no recording": (lambda held, said: said.pop("format"), "its metadata has format '' and version '1', expected"),
    "of another version": (
        lambda held, said: said.update(version="2"),
        "version '2', expected 'porting trace' and '1'",
    ),
    "of the wrong dtype": (
        lambda held, said: held.update({FIRST: held[FIRST].float()}),
        "'float64/0/bert.embeddings' is of float32, expected float64",
    ),
    "another shape": (
        lambda held, said: held.update({FIRST: held[FIRST][:2]}),
        r"'float32/0/bert.embeddings' is \[8, 24, 24\], and in float64 \[2, 24, 24\]",
    ),
    "without its exact value": (lambda held, said: held.pop(FIRST), "has no counterpart in float64"),
    "a name of another kind": (
        lambda held, said: held.update(weight=torch.ones(2)),
        "a tensor is called 'weight', expected KIND/CASE/NAME",
    ),
    "no inputs": (
        lambda held, said: [held.pop(name) for name in list(held) if name.startswith("inputs/")],
        "case 0 of 1 has no inputs",
    ),
    "a case left out": (
        lambda held, said: held.update({"inputs/2/input_ids": torch.ones(1, 1)}),
        "case 1 of 3 has no inputs",
    ),
    "cases that are not a list": (lambda held, said: said.update(cases="{"), "metadata 'cases' is not a JSON list"),
    "lowered that is no object": (lambda held, said: said.update(lowered="[1]"), "'lowered' is not a JSON object"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_recording_is_said_in_a_line(golden: Path, tmp_path: Path, what: str) -> None:
    change, message = WRONG[what]
    path = changed(golden, tmp_path / "wrong.safetensors", change)
    with pytest.raises(VerifyError, match=message) as caught:
        read_recording(path)
    assert all(fault.where == str(path) and "\n" not in str(fault) for fault in caught.value.faults)


def test_a_damaged_file_is_the_strict_readers_affair(golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(golden.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="safetensors"):
        read_recording(path)
    with pytest.raises(CheckpointError, match="absent"):
        read_recording(tmp_path / "absent.safetensors")

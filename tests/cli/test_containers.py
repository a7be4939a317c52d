"""Every command with every container: what it reads, and what it can be told to write."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from porting.checkpoint import open_checkpoint
from porting.checkpoint.registry import CONTAINERS, container_of
from tests.checkpoint.test_flax_msgpack import written as flax_file
from tests.checkpoint.test_gguf import written as gguf_file
from tests.checkpoint.test_hdf5_file import write as write_hdf5
from tests.checkpoint.test_onnx_file import written as onnx_file
from tests.checkpoint.test_orbax_file import write as write_orbax
from tests.checkpoint.test_tensorflow_file import written as tensorflow_files
from tests.cli.conftest import Run

Tensors = dict[str, torch.Tensor]


def _arrays(save: Callable[..., None], order: str = "<") -> Callable[[Tensors, Path], object]:
    """Saves what numpy makes of tensors; big-endian, by columns."""

    def write(tensors: Tensors, folder: Path) -> None:
        arrays = {name: one.numpy() for name, one in tensors.items()}
        if order == ">":
            arrays = {name: np.asfortranarray(one.astype(one.dtype.newbyteorder(">"))) for name, one in arrays.items()}
        save(folder / "model.npz", **arrays)

    return write


SAVERS: dict[str, Callable[[Tensors, Path], object]] = {
    "bin": lambda tensors, folder: torch.save(tensors, folder / "pytorch_model.bin"),
    "bin, in a training checkpoint": lambda tensors, folder: torch.save(
        {"model": tensors, "args": Namespace(lr=0.1), "epoch": 3}, folder / "training.ckpt"
    ),
    "dcp": lambda tensors, folder: dcp_save(tensors, checkpoint_id=folder, no_dist=True),
    "npz": _arrays(np.savez),
    "gguf": lambda tensors, folder: (folder / "model.gguf").write_bytes(gguf_file(tensors)),
    "flax": lambda tensors, folder: (folder / "flax_model.msgpack").write_bytes(flax_file(tensors)),
    "onnx": lambda tensors, folder: (folder / "model.onnx").write_bytes(onnx_file(tensors)),
    "tensorflow": lambda tensors, folder: [
        (folder / name).write_bytes(raw) for name, raw in tensorflow_files(tensors).items()
    ],
    "hdf5": lambda tensors, folder: write_hdf5(folder / "tf_model.h5", tensors),
    "orbax": lambda tensors, folder: write_orbax(folder, tensors),
    "npz, compressed": _arrays(np.savez_compressed),
    "npz, big-endian columns": _arrays(np.savez, ">"),
}
"""The containers as the programs that they come from write them."""


@pytest.fixture(params=SAVERS)
def copy(request: pytest.FixtureRequest, checkpoint: Path) -> Path:
    """The small BERT in another container, with its config and its tokenizer beside it."""
    tensors = {name: open_checkpoint(checkpoint).read(name, own=True) for name in open_checkpoint(checkpoint).tensors}
    folder = Path("copy")
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a save by one process
        SAVERS[request.param](tensors, folder)
    for path in checkpoint.iterdir():
        if container_of(path.name) is None:
            (folder / path.name).write_bytes(path.read_bytes())
    return folder / "training.ckpt#model" if (folder / "training.ckpt").exists() else folder


def test_every_command_reads_it(run: Run, checkpoint: Path, copy: Path) -> None:
    for words in (["inspect"], ["check"], ["load"], ["hash"], ["tables"]):
        found = run(*words, *([copy] if words != ["tables"] else []))
        assert found.exit_code == 0, (words, found.stderr)
    assert run("hash", copy).stdout.split()[0] == run("hash", checkpoint).stdout.split()[0]
    assert run("diff", copy, checkpoint).exit_code == 0
    assert run("export", copy, "exported").exit_code == 0
    assert run("diff", "exported", checkpoint).exit_code == 0
    assert run("convert", copy, "ported", "--table", "bert").exit_code == 0
    assert run("convert", checkpoint, "same", "--table", "bert").exit_code == 0
    one, other = Path("ported/model.safetensors"), Path("same/model.safetensors")
    assert one.read_bytes() == other.read_bytes()
    assert run("convert", "ported", "back", "--table", "bert", "--reverse", "--like", copy).exit_code == 0
    assert run("diff", "back", checkpoint).exit_code == 0
    assert run("record", copy, "--out", "golden.safetensors", "--meaning-only", "--case", "0").exit_code == 0


@pytest.mark.slow
def test_a_port_of_it_is_verified(run: Run, copy: Path) -> None:
    found = run("verify", copy)
    assert found.exit_code == 0, found.stderr
    assert found.stdout.startswith("FAITHFUL")


@pytest.mark.parametrize(
    "to", [container.name for container in CONTAINERS if container.promises.writes and not container.single][1:]
)
def test_it_is_written_by_convert_and_by_export(run: Run, checkpoint: Path, to: str) -> None:
    done = run("convert", checkpoint, "ported", "--table", "bert", "--to", to)
    assert done.exit_code == 0, done.stderr
    assert run("verify-files", "ported").exit_code == 0
    assert run("convert", "ported", "back", "--table", "bert", "--reverse").exit_code == 0
    assert run("diff", "back", checkpoint).exit_code == 0
    done = run("export", checkpoint, "exported", "--to", to)
    assert done.exit_code == 0, done.stderr
    assert f"{to} in the place of model.safetensors" in " ".join(done.stdout.split())
    assert run("diff", "exported", checkpoint).exit_code == 0
    assert {file.format for file in open_checkpoint("exported").files} == {to}
    done = run("export", "exported", "again")
    assert (Path("again") / "model.safetensors").exists(), done.stderr
    assert run("diff", "again", checkpoint).exit_code == 0


@pytest.mark.parametrize("command", ["convert", "export"])
@pytest.mark.parametrize("to", ["npy", "npz/model", "onnx", "safetensors"])
def test_another_container_is_refused_before_anything_is_read(
    run: Run, command: str, to: str, checkpoint: Path
) -> None:
    done = run(command, checkpoint, "out", "--to", to)
    assert done.exit_code == 2
    expected = "expected bin, or dcp, or dcp/model for what is saved under 'model', or npz, or gguf"
    assert f"--to {to}: {expected}" in " ".join(done.stderr.split())
    assert not Path("out").exists()

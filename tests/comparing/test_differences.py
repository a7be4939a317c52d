from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from porting.cli.app import app
from porting.comparing.differences import Verdict, diff
from porting.comparing.jobs import THREADS
from porting.comparing.streaming import TURNED, Reader
from porting.errors import PortingError
from porting.notation.table import parse_table
from porting.plan.plan import PlanError
from porting.plan.recipe import Recipe, unravel
from tests import own
from tests.comparing.conftest import Pair, columns_first, ported
from tests.converting.drawing import write


def test_checkpoint_and_its_port_are_equal(pair: Pair) -> None:
    found = diff(pair.source, pair.port, pair.table)
    assert found.equal
    assert found.summary == "equal: 15 with equal bytes, 1 left out by the table"
    assert {name for tensor in found.tensors if not tensor.note for name in tensor.a} == own.tensors().keys() - {
        "decoder.weight",
        "steps",
    }
    assert {tensor.b for tensor in found.tensors} == ported(pair.source, pair.table).keys() | {"decoder.weight"}
    assert found.left_out == {"steps": "a counter of the trainer's"}


def test_new_parameters_and_dropped_tensors_are_both_left_out(tmp_path: Path) -> None:
    table = parse_table('[tensors]\n"a" = "b"\n[drop]\n"mask" = "not needed"\n[fresh]\n"new" = "a new head"\n')
    left = write(tmp_path / "left", {"a": torch.ones(2), "mask": torch.ones(2)})
    right = write(tmp_path / "right", {"b": torch.ones(2), "new": torch.ones(3)})
    found = diff(left, right, table)
    assert found.equal
    assert found.left_out == {"mask": "not needed", "new": "a new head"}
    other = write(tmp_path / "other", {"b": torch.ones(2), "newer": torch.ones(3)})
    assert not diff(left, other, table).equal


def test_every_single_changed_element_is_found_where_it_is(pair: Pair) -> None:
    """One element of each tensor of the port at a time, against what was changed."""
    good = ported(pair.source, pair.table)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in good.items():
        place = int(torch.randint(tensor.numel(), (), generator=generator))
        changed = tensor.clone()
        changed.view(-1)[place] += 1.0
        pair.write({**good, name: changed})
        found = diff(pair.source, pair.port, pair.table)
        (compared,) = [compared for compared in found.tensors if compared.verdict is not Verdict.EQUAL]
        assert (compared.b, compared.difference.unequal) == (name, 1)
        assert compared.largest_at is not None
        there, here = compared.largest_at
        assert here.index == unravel(place, tensor.shape) == compared.difference.low == compared.difference.high
        assert here.value == changed.view(-1)[place].item()
        assert math.isclose(compared.difference.largest, 1.0, rel_tol=1e-6)
        if name not in ("shift", "scaled"):  # their elements are not the source's
            assert there.value == own.tensors()[there.tensor][there.index].item()


def test_the_slice_of_a_fused_tensor_is_named(pair: Pair) -> None:
    good = ported(pair.source, pair.table)
    good["layers.1.qkv.weight"][7, 3] += 0.5
    pair.write(good)
    (one,) = [tensor for tensor in diff(pair.source, pair.port, pair.table).tensors if tensor.difference.unequal]
    assert one.largest_at is not None
    assert (one.largest_at[0].tensor, one.largest_at[0].index) == ("model.layer.1.key.weight", (1, 3))
    assert one.a == tuple(f"model.layer.1.{part}.weight" for part in ("query", "key", "value"))


def test_missing_tensors_are_named_on_both_sides_and_looked_through(pair: Pair) -> None:
    good = ported(pair.source, pair.table)
    del good["positions.weight"]
    pair.write({**good, "extra": torch.tensor([1.0, math.nan])})
    found = diff(pair.source, pair.port, pair.table)
    assert not found.equal
    assert list(found.only_a) == ["positions.weight"]
    assert {name: (odd.nan, odd.inf) for name, odd in found.only_b.items()} == {"extra": (1, 0)}
    assert "1 only in A, 1 only in B" in found.summary
    assert found.summary.endswith("1 NaN and 0 infinite in B")


def test_a_dropped_copy_that_is_none_is_a_difference(pair: Pair) -> None:
    values = own.tensors()
    values["decoder.weight"][2, 1] += 1
    own.write(pair.source, values)
    (one,) = [
        tensor for tensor in diff(pair.source, pair.port, pair.table).tensors if tensor.verdict is not Verdict.EQUAL
    ]
    assert one.note == "left out: equals model.tokens.weight"
    assert one.b == "decoder.weight"


def test_a_dropped_constant_that_is_another_is_a_difference(tmp_path: Path) -> None:
    table = parse_table('[tensors]\n"a" = "b"\n[drop]\n"places" = "equals arange"\n"scale" = "equals ones"\n')
    right = write(tmp_path / "right", {"b": torch.ones(2)})
    good = {"a": torch.ones(2), "places": torch.arange(3), "scale": torch.ones(2, dtype=torch.bfloat16)}
    found = diff(write(tmp_path / "left", good), right, table)
    assert found.equal
    assert {tensor.note for tensor in found.tensors} == {"", "left out: equals arange", "left out: equals ones"}
    other = diff(write(tmp_path / "other", {**good, "scale": torch.tensor([1.0, 2.0])}), right, table)
    (one,) = [tensor for tensor in other.tensors if tensor.verdict is not Verdict.EQUAL]
    assert (one.b, one.note) == ("scale", "left out: equals ones")
    assert not other.equal


def test_a_stored_tie_that_is_none_is_a_difference(pair: Pair) -> None:
    good = ported(pair.source, pair.table)
    pair.write({**good, "decoder.weight": good["tokens.weight"].clone()})
    assert diff(pair.source, pair.port, pair.table).equal
    pair.write({**good, "decoder.weight": good["tokens.weight"] + 1})
    (one,) = [
        tensor for tensor in diff(pair.source, pair.port, pair.table).tensors if tensor.verdict is not Verdict.EQUAL
    ]
    assert (one.b, one.note) == ("decoder.weight", "tied to tokens.weight")


def test_values_in_another_dtype(pair: Pair) -> None:
    good = ported(pair.source, pair.table)
    pair.write({name: tensor.double() for name, tensor in good.items()})
    found = diff(pair.source, pair.port, pair.table)
    assert found.equal
    assert found.counts[Verdict.EQUAL_VALUES] == len(good)
    pair.write({name: tensor.bfloat16() for name, tensor in good.items()})
    assert not diff(pair.source, pair.port, pair.table).equal
    close = diff(pair.source, pair.port, pair.table, rtol=2**-8, atol=1e-9)
    assert close.equal
    assert close.counts[Verdict.CLOSE] > 5


def test_other_shapes_of_one_name(tmp_path: Path) -> None:
    for name, shape in (("a", (2, 3)), ("b", (3, 2))):
        (tmp_path / name).mkdir()
        save_file({"x": torch.zeros(shape), "y": torch.ones(2)}, tmp_path / name / "model.safetensors")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert [(tensor.b, tensor.verdict.value) for tensor in found.tensors] == [("x", "other shape"), ("y", "equal")]
    assert found.summary == "different: 1 with equal bytes, 1 of another shape"


@pytest.mark.parametrize("container", ["bin", "safetensors"])
def test_files_order_and_format_have_no_part_in_it(tmp_path: Path, container: str) -> None:
    values = own.tensors()
    source = own.write(tmp_path / "a", values)
    (tmp_path / "b").mkdir()
    if container == "bin":
        stored = {name: columns_first(tensor) for name, tensor in reversed(values.items())}
        torch.save(stored, tmp_path / "b" / "pytorch_model.bin")
    else:
        save_file(dict(reversed(values.items())), tmp_path / "b" / "model.safetensors", metadata={"x": "y"})
    found = diff(source, tmp_path / "b")
    assert found.equal
    assert found.counts == {Verdict.EQUAL: len(values)}


def test_pieces_and_threads_change_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    good = ported(pair.source, pair.table)
    for name in ("layers.0.out.weight", "layers.1.qkv.weight", "shift", "positions.weight"):
        good[name].view(-1)[::3] += torch.randn(good[name].view(-1)[::3].shape)
    pair.write(good)
    before = diff(pair.source, pair.port, pair.table, threads=1)
    monkeypatch.setattr("porting.comparing.differences.PIECE", 20)
    monkeypatch.setattr("porting.comparing.differences.SPAN", 52)
    after = diff(pair.source, pair.port, pair.table, threads=3)
    assert before.summary == after.summary
    for first, other in zip(before.tensors, after.tensors, strict=True):
        assert math.isclose(first.difference.rms, other.difference.rms, rel_tol=1e-12)
        assert (first.verdict, first.largest_at, first.difference.low, first.difference.high) == (
            other.verdict,
            other.largest_at,
            other.difference.low,
            other.difference.high,
        )


def test_what_cannot_be_compared(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(PortingError, match=r"has a namesake in .* \(pass the table"):
        diff(own.write(tmp_path / "c", {"a": torch.zeros(1)}), own.write(tmp_path / "d", {"b": torch.zeros(1)}))
    with pytest.raises(PortingError, match=r"has the names of the right side of 'own'.*pass them the other way"):
        diff(pair.port, pair.source, pair.table)
    good = ported(pair.source, pair.table)
    pair.write({**good, "tokens.weight": good["tokens.weight"][:, :5]})
    with pytest.raises(PortingError, match=r"'tokens.weight' \[11, 5\]"):
        diff(pair.source, pair.port, pair.table)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_file_that_is_cut_short_meanwhile_is_one_line(
    side: str, turned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mapped file touching what is not there any more would end the process (SIGBUS)."""
    value = torch.randn(700, 800, generator=torch.Generator().manual_seed(0))
    for name, tensor in (("a", value), ("b", value.T.contiguous() if turned else value)):
        (tmp_path / name).mkdir()
        save_file({"x": tensor}, tmp_path / name / "model.safetensors")
    (tmp_path / "table.toml").write_text('[mapping]\nname = "t"\n[tensors]\n"x [i o]" = "x [o i]"\n')
    file = tmp_path / side / "model.safetensors"
    real, seen = Reader.window, [0]

    def window(self: Reader, recipe: Recipe, start: int, stop: int) -> torch.Tensor:
        if not seen[0]:
            os.truncate(file, 4096)
        seen[0] += 1
        return real(self, recipe, start, stop)

    monkeypatch.setattr(Reader, "window", window)
    words = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    words += ["--table", str(tmp_path / "table.toml")] if turned else []
    result = CliRunner().invoke(app, words, prog_name="porting")
    assert result.exit_code == 2
    assert result.stdout == ""
    line, after = result.stderr.splitlines()
    assert line.startswith(f"error: {file}: the file changed after it was opened: it ")
    assert line.endswith("[file-changed]")
    assert after == "next: porting explain file-changed"


@pytest.mark.slow
def test_memory_does_not_depend_on_the_size_of_a_tensor(tmp_path: Path) -> None:
    """Two tensors of 105 MB, one of them transposed: what is held are the windows of both sides in each thread."""
    code = (
        "import json, pathlib, resource, sys, torch\n"
        "from porting import diff, digest\n"
        "from porting.notation import parse_table\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "def anonymous(): return int(open('/proc/self/status').read().partition('RssAnon:')[2].split()[0]) * 1024\n"
        'table = parse_table(\'[mapping]\\nname = "t"\\n[tensors]\\n"x [i o]" = "y [o i]"\')\n'
        "def run(size):\n"
        "    found = diff(root / f'a{size}', root / f'b{size}', table)\n"
        "    assert found.equal and str(digest(root / f'a{size}', table)) == str(digest(root / f'b{size}', table))\n"
        "run('small')\n"
        "import threading\n"
        "before, peak, stop = anonymous(), 0, threading.Event()\n"
        "def watch():\n"
        "    global peak\n"
        "    while not stop.wait(0.002): peak = max(peak, anonymous())\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "run('large'); stop.set(); thread.join()\n"
        "print(json.dumps(peak - before))\n"
    )
    for size, width in (("small", 64), ("large", 5120)):
        value = torch.randn(width, width, generator=torch.Generator().manual_seed(0))
        for side, tensors in (("a", {"x": value}), ("b", {"y": value.T.contiguous()})):
            (tmp_path / f"{side}{size}").mkdir()
            save_file(tensors, tmp_path / f"{side}{size}" / "model.safetensors")
        del value
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=root, check=False
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) < 2 * THREADS * TURNED + 8_000_000
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0


def test_a_constant_that_has_no_value_is_a_fault_of_the_table(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"x": torch.ones(2)})
    b = write(tmp_path / "b", {"y": torch.ones(2)})
    table = parse_table('[mapping]\nname = "t"\n[[rule]]\nsource = "x"\ntarget = "y"\nscale = "width - 1"\n')
    with pytest.raises(PlanError, match=r"scale = 'width - 1': the config has no 'width'"):
        diff(a, b, table)

"""Modules spread over 2 and 4 processes hold, bit for bit, what one process loads; each reads its own bytes alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import porting
from tests import own
from tests.guards.tree import ROOT
from tests.sharding.worker import CASTS, TOUCHED, touch
from tests.small_checkpoint import write_checkpoint

pytestmark = pytest.mark.few(1)

Results = list[dict[str, Any]]  # for each process, for each case what it saw

TABLE = """
[mapping]
name = "wide"
[tensors]
"kernel [i o]" = "turned [o i]"
"part.{p:q,k,v} [o e]" = "fused [(p o) e]"
"plain" = "plain"
"""


FORMULAS = """
[mapping]
name = "formulas"
[sizes]
r = 3
[tensors]
"shared [v e]" = ["first [v e]", "second [e v]"]
[[rule]]
source = { w = "w [o i]", a = "a [r i]", b = "b [o r]" }
target = "merged [o i]"
formula = "w + 2 * sum(b * a, r)"
back = { w = "y", a = "0", b = "0" }
[[rule]]
source = { w = "q [o i]", s = "s [p q]" }
target = "scaled [o i]"
formula = "w * blocks(s, 4, p=o, q=i)"
dtype = "float32"
[[rule]]
source = { x = "blocks [e o g b]", s = "scales [e o g]" }
target = "unpacked [e (g b n) o]"
formula = "fp4(x, n) * 2 ** (s - 127)"
dtype = "float32"
[[rule]]
source = "A_log"
target = "A"
formula = "-exp(x)"
back = { x = "log(-y)" }
"""


UNEVEN_TABLE = """
[mapping]
name = "uneven"
[tensors]
"a.row [o e]" = "row [o e]"
"a.rows [e o]" = "rows [o e]"
"a.column [o e]" = "column [o e]"
"a.none [o e]" = "none [o e]"
"a.{p:x,y} [o]" = "line [(p o)]"
"a.cube [a b c]" = "cube [c b a]"
"""


def computed() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"w": (10, 7), "a": (3, 7), "b": (10, 3), "s": (3, 2), "A_log": (5,), "shared": (6, 8)}
    found = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found["q"] = torch.randn(9, 8, generator=generator).to(torch.float8_e4m3fn)
    for name, shape in {"blocks": (2, 6, 3, 4), "scales": (2, 6, 3)}.items():
        found[name] = torch.randint(100, 140, shape, generator=generator, dtype=torch.uint8)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded")
    own.write(root / "source")
    own.table(root)
    values = {name: tensor * 1e5 if tensor.is_floating_point() else tensor for name, tensor in own.tensors().items()}
    own.write(root / "large", values)
    own.write(root / "pickled")
    (root / "pickled" / "model.safetensors").unlink()
    torch.save(own.tensors(), root / "pickled" / "pytorch_model.bin")
    values = own.tensors()
    values["decoder.weight"][10, 5] += 1  # in the last process's share
    own.write(root / "wrong", values)
    generator = torch.Generator().manual_seed(7)
    (root / "wide").mkdir()
    tensors = {
        "kernel": torch.randn(260, 514, generator=generator),
        "plain": torch.randn(1030, 128, generator=generator),
        **{f"part.{name}": torch.randn(257, 300, generator=generator) for name in "qkv"},
    }
    save_file(tensors, root / "wide" / "model.safetensors")
    (root / "wide.toml").write_text(TABLE)
    (root / "formulas").mkdir()
    save_file(computed(), root / "formulas" / "model.safetensors")
    (root / "formulas" / "config.json").write_text(json.dumps({"model_type": "formulas"}))
    (root / "formulas.toml").write_text(FORMULAS)
    write_checkpoint(root / "bert")
    values = {name: tensor * 1e5 if tensor.is_floating_point() else tensor for name, tensor in own.tensors().items()}
    values["model.layer.0.kernel"][0, 1] = float("inf")
    values["model.layer.1.kernel"][2, 3] = float("nan")
    values["scaled"][1] = 1e30
    own.write(root / "odd", values)
    (root / "huge.toml").write_text(own.TABLE.replace('scale = "n_embd ** -0.5"', "scale = 1e18"))
    (root / "uneven").mkdir()
    shapes = {"row": (1, 5), "rows": (3, 2), "column": (7, 1), "none": (0, 4), "x": (1,), "y": (1,), "cube": (1, 5, 2)}
    tensors = {f"a.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, root / "uneven" / "model.safetensors")
    (root / "uneven" / "config.json").write_text(json.dumps({"model_type": "uneven"}))
    (root / "uneven.toml").write_text(UNEVEN_TABLE)
    return root


@pytest.fixture(scope="module", params=[2, 3, 4])
def results(folder: Path, request: pytest.FixtureRequest) -> Results:
    """What each of 2, 3 or 4 processes saw."""
    count = request.param
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.sharding.worker", str(folder), str(count)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads((folder / f"result-{count}-{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.few(1)
def test_formulas_give_each_process_its_part_and_are_written_as_they_were(folder: Path, results: Results) -> None:
    """Whether ``differ`` is empty is seen below, for all cases."""
    count = len(results)
    for axis in range(3):
        written = load_file(folder / f"formulas-{count}-{axis}" / "model.safetensors")
        assert {name: (one.dtype, one.tolist()) for name, one in written.items()} == {
            name: (one.dtype, one.tolist()) for name, one in computed().items()
        }
    for result in results:
        assert (
            "'merged' was changed, and undoing 'w [o i] + a [r i] + b [o r] = merged [o i]'"
            in result["formulas"]["told"]
        )
        assert "'second' was changed, and undoing 'shared [v e] = second [e v]'" in result["formulas"]["told"]
    assert not (folder / f"formulas-{count}-changed").exists()


@pytest.mark.few(1)
def test_every_layout_holds_what_one_process_loads(results: Results) -> None:
    cases = [case for case, result in results[0].items() if "differ" in result]
    assert len(cases) >= 6
    for case in cases:
        assert [result[case]["differ"] for result in results] == [[]] * len(results), case


def test_nothing_is_gathered(results: Results) -> None:
    """But the news: whether all can begin, have read, have found copies that are none; each a length and itself."""
    for result in results:
        seen = {case: what["collectives"] for case, what in result.items() if "collectives" in what}
        assert set(seen.values()) == {6}


def test_tensors_with_values_keep_their_identity_and_ties_stay(results: Results) -> None:
    for result in results:
        for case, seen in result.items():
            if "kept" in seen:
                assert seen["kept"] == ("meta" not in case), case
                assert seen["tied"], case


def test_the_layouts_are_those_that_are_meant(results: Results) -> None:
    found = {case: set(seen["placements"]) for case, seen in results[0].items() if "placements" in seen}
    assert found["fsdp"] == {"(Shard(dim=0),)"}
    assert "(Shard(dim=1),)" in found["tensor parallelism"]
    assert {"(Replicate(),)", "(Shard(dim=1),)", "(Shard(dim=0),)"} == found["columns"]
    if len(results) == 4:
        assert any("_StridedShard" in placement for placement in found["both"])
        assert "(Shard(dim=1), Shard(dim=0))" in found["two axes"]


def test_each_process_reads_the_bytes_of_its_shards(results: Results) -> None:
    """Exactly those: of tensors whose rows are long nothing is read beside them, and the system says the same."""
    wide = [result["wide"] for result in results]
    assert [one["read"] for one in wide] == [one["local"] for one in wide]
    assert sum(one["read"] for one in wide) == wide[0]["total"]
    share = wide[0]["total"] / len(wide)
    for result in wide:
        assert result["read"] <= 1.02 * share, "uneven by a row of each tensor at most"
        assert result["by the system"] <= result["read"] + 100_000, "headers, the table and Python's own files"


def test_no_process_holds_a_whole_tensor(results: Results) -> None:
    for result in results:
        assert result["wide"]["largest"] <= result["wide"]["smallest whole"] / len(results) * 1.9


def test_what_a_cast_makes_infinite_is_counted_as_one_process_counts_it(results: Results) -> None:
    for result in results:
        for case, told in result["lost"].items():
            if case != "differ":
                assert told["fsdp"] == told["columns"] == told["whole"], case
        half, odd = (result["lost"][case]["whole"] for case in ("half", "half, some infinite before"))
        assert any("finite values became infinite or NaN: " in one and "layers.0.out.weight" in one for one in half)
        assert half != odd, "what was infinite before is not counted"
        assert any("of scaled" in one for one in result["lost"]["computed"]["whole"])
        assert result["lost"]["nothing"]["whole"] == []


def test_processes_without_an_element_of_a_tensor(results: Results, folder: Path) -> None:
    """Whether ``differ`` is empty is seen above."""
    expected = load_file(folder / "uneven" / "model.safetensors")
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    for name in results[0]["uneven"]["files"]:
        found = load_file(folder / name / "model.safetensors")
        assert {key: one.tolist() for key, one in found.items()} == {key: one.tolist() for key, one in expected.items()}
    for read in zip(*(result["uneven"]["read"] for result in results), strict=True):
        assert nbytes <= sum(read) <= 2 * nbytes


def test_a_wrong_copy_is_told_by_every_process_and_nothing_is_changed(results: Results) -> None:
    for result in results:
        assert "decoder.weight: was to be dropped because it equals 'model.tokens.weight'" in result["refused"]["told"]
        assert result["refused"]["untouched"]


def test_an_export_is_byte_for_byte_that_of_one_process(results: Results, folder: Path) -> None:
    names = [f"fsdp-{len(results)}", *(["both", "axes"] if len(results) == 4 else [])]
    for how, touched in TOUCHED.items():
        whole = own.filled(folder / "source", folder / "own.toml")
        touch(whole, touched)
        expected = folder / f"whole-{len(results)}-{how}"
        porting.export(whole, folder / "own.toml", expected)
        for name in names:
            own.assert_same_files(folder / f"{name}-{how}", expected)
    own.assert_same_files(folder / f"{names[0]}-untouched", folder / "source")


@pytest.mark.parametrize("case", CASTS)
@pytest.mark.filterwarnings("ignore:the cast made finite values infinite")
def test_an_export_in_other_dtypes_is_byte_for_byte_that_of_one_process(
    results: Results, folder: Path, case: str, tmp_path: Path
) -> None:
    source, how, loading, options = CASTS[case]
    whole = own.Own(own.SIZES).to(loading or torch.float32)
    porting.load(folder / source, whole, folder / "own.toml", dtype=loading)
    touch(whole, TOUCHED[how])
    expected = porting.export(whole, folder / "own.toml", tmp_path / "whole", **options)
    own.assert_same_files(folder / f"cast-{len(results)}-{case}", tmp_path / "whole")
    for result in results:
        assert result["cast"][case][1:] == [[*expected.files], dict(expected.infinite)]
    assert bool(expected.infinite) == (source == "large")


def test_an_export_leaves_nothing_else(results: Results, folder: Path) -> None:
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert not (folder / "refused").exists()
    files = ["config.json", "model.safetensors", "vocab.txt"]
    for result in results:
        assert {how: made for how, (_, made, _) in result["export"].items()} == dict.fromkeys(TOUCHED, files)
        assert "expected a floating-point dtype" in result["unexportable"]["dtype"]
        assert "gather it into a whole module first" in result["unexportable"]["anew"]
        assert "exists already" in result["unexportable"]["exists"] or "the source" in result["unexportable"]["exists"]


def test_a_sharded_model_computes_the_same_bits(results: Results) -> None:
    if len(results) == 2:
        assert [result["computes"] for result in results] == [{"same": True, "n": results[0]["computes"]["n"]}] * 2
        assert results[0]["computes"]["n"] > 1

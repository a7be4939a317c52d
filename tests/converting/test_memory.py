"""The budget is kept: tensors that are far larger than all the memory that the process may still take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations import mxfp4

from porting.converting.conversion import convert
from porting.notation.table import parse_table
from porting.target import TargetError
from tests.converting.drawing import write
from tests.guards.tree import ROOT

TABLE = """
[mapping]
name = "t"
[tensors]
"plain" = "plain"
"turned [i o]" = "turned [o i]"
"{p:q,k}.weight [(h d) e]" = "qk.weight [(h p d) e]"
[[rule]]
source = ["positions [t e]", "types [0 e]"]
target = "positions [t e]"
fold = true
[[rule]]
source = "scaled [i o]"
target = "scaled [o i]"
scale = 0.5
[sizes]
h = 8
"""

PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from porting.converting.conversion import convert
from porting.notation.table import parse_table

folder, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2], None)
budget, reverse = int(sys.argv[3]), sys.argv[4] == "yes"
table = parse_table((folder / "table.toml").read_text())
convert(folder / "small", folder / "warm", table, dtype=dtype, threads=1, memory=budget)  # imports, arenas, one stack

def data():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))

# The thread's stack, and 12 MB for small change: names, plans, what a cast counts with.
most = data() + budget + (8 << 20) + (12 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
try:
    torch.empty(25 << 20, dtype=torch.uint8)
except RuntimeError:
    pass
else:
    sys.exit("the limit does not hold")
convert(folder / "large", folder / "out", table, dtype=dtype, threads=1, memory=budget)
if reverse:
    convert(folder / "out", folder / "back", table, reverse=True, threads=1, memory=budget)
"""


def checkpoint(folder: Path, name: str, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    shapes = {"plain": (size, size), "turned": (size, size), "q.weight": (size, 64), "k.weight": (size, 64)}
    shapes |= {"positions": (size, size), "types": (2, size), "scaled": (size, size)}
    write(folder / name, {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("memory")
    checkpoint(found, "small", 64)
    checkpoint(found, "large", 2560)  # 26 MB each
    (found / "table.toml").write_text(TABLE)
    return found


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "reverse"), [("bfloat16", "no"), ("none", "yes")])
def test_nothing_grows_with_a_tensor(dtype: str, reverse: str, folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), dtype, str(2 << 20), reverse]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0


FORMULAS = """
[mapping]
name = "t"
[[rule]]
source = { w = "w [o i]", a = "a [r i]", b = "b [o r]" }
target = "merged [o i]"
formula = "w + 2 * sum(b * a, r)"
[[rule]]
source = { x = "blocks [e o g b]", s = "scales [e o g]" }
target = "unpacked [e (g b n) o]"
formula = "fp4(x, n) * 2 ** (s - 127)"
dtype = "bfloat16"
"""


def quantised(folder: Path, name: str, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    tensors = {"w": (size, size), "a": (16, size), "b": (size, 16)}
    found = {one: torch.randn(shape, generator=generator) for one, shape in tensors.items()}
    for one, shape in {"blocks": (2, size, 16, 16), "scales": (2, size, 16)}.items():
        found[one] = torch.randint(100, 140, shape, generator=generator, dtype=torch.uint8)
    write(folder / name, found)


@pytest.mark.slow
@pytest.mark.few(1)
def test_formulas_are_computed_in_the_memory_that_there_is(tmp_path: Path) -> None:
    """A row along the slowest index of ``unpacked`` takes 30 MB alone: it is divided along the next."""
    quantised(tmp_path, "small", 64)
    quantised(tmp_path, "large", 2560)
    (tmp_path / "table.toml").write_text(FORMULAS)
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), "none", str(2 << 20), "no"]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 0
    source, made = (load_file(tmp_path / name / "model.safetensors") for name in ("large", "out"))
    expected = source["w"].double() + 2 * source["b"].double() @ source["a"].double()
    assert torch.allclose(made["merged"].double(), expected, rtol=1e-6, atol=1e-6)
    values = mxfp4.convert_moe_packed_tensors(source["blocks"], source["scales"])
    assert torch.equal(made["unpacked"], values)


def test_a_formula_that_cannot_be_divided_says_how_much_memory_it_needs(tmp_path: Path) -> None:
    write(tmp_path / "a", {"x": torch.randn(300, 1024)})
    rule = 'source = "x [h e]"\ntarget = "y [H e]"\nformula = "linear(x, h=H)"'
    table = parse_table(f'[mapping]\nname = "t"\n[sizes]\nH = 400\n[[rule]]\n{rule}\n')
    with pytest.raises(
        TargetError, match=r"for 'y', of whose formula no less can be computed at once \(pass memory="
    ) as told:
        convert(tmp_path / "a", tmp_path / "b", table, memory=2 << 20)
    enough = int(str(told.value).partition("pass memory=")[2].partition(",")[0])
    assert 2 << 20 < enough < 64 << 20
    convert(tmp_path / "a", tmp_path / "b", table, memory=enough)

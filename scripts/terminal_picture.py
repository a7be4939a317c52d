"""Draw docs/terminal.svg: a terminal in which `suggest` fills an unusual model and `verify` names a bug in it.

    python -m scripts.terminal_picture

Every line is what the commands print when they are run on ``unusual_bert.py`` of docs/your-own-model.md.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import tempfile
import termios
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from porting.atomic import write_file
from porting.embedded import embedded_checkpoint

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "your-own-model.md"
PICTURE = ROOT / "docs" / "terminal.svg"
WIDTH = 116
"""Columns of the terminal."""

MODULE = "unusual_bert.py"
RIGHT, WRONG = "self.norm_2 = nn.LayerNorm(d, eps=1e-12)", "self.norm_2 = nn.LayerNorm(d)"
SUGGEST = f"porting suggest --into {MODULE}:UnusualBert -o unusual.toml"
VERIFY = f"porting verify --table unusual.toml --into {MODULE}:UnusualBert"

FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>porting suggest fills an unusual BERT; porting verify names a wrong eps in it</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
  <rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own format without the fonts that it fetches from another host."""


def record() -> list[tuple[str, str]]:
    """Run the commands.

    Returns:
        Each command, as it is typed, and what it printed, with the codes of its colours.
    """
    (text,) = re.findall(
        rf"^`{re.escape(MODULE)}`:\n\n```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    if text.count(RIGHT) != 1:
        sys.exit(f"error: {PAGE} has no line {RIGHT!r}")
    with tempfile.TemporaryDirectory(prefix="porting-picture-") as name:
        folder = Path(name)
        (folder / MODULE).write_text(text)
        suggested = run(SUGGEST, folder)
        rules = "".join(
            f"{line.partition('  #')[0]}\n"
            for line in (folder / "unusual.toml").read_text().splitlines()
            if "qkv" in line
        )
        (folder / MODULE).write_text(text.replace(RIGHT, WRONG))
        verified = run(VERIFY, folder)
    edit = f"vi {MODULE}  # {WRONG}: PyTorch's default eps, 1e-5"
    return [(SUGGEST, suggested), ("grep qkv unusual.toml", rules), (edit, ""), (VERIFY, verified)]


def run(command: str, folder: Path) -> str:
    """What a command prints on a terminal; what it writes to standard error is left out."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 60, WIDTH, 0, 0))
    _, *words = shlex.split(command)
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    for unwanted in ("NO_COLOR", "COLUMNS"):
        environment.pop(unwanted, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "porting", *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=subprocess.DEVNULL,
    )
    os.close(child)
    parts = []
    while True:
        try:
            part = os.read(parent, 1 << 16)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        parts.append(part)
    process.wait()
    os.close(parent)
    printed = b"".join(parts).decode().replace("\r\n", "\n")
    return printed.replace(str(embedded_checkpoint()), "porting/demo")


def draw(commands: list[tuple[str, str]]) -> str:
    """The picture of a terminal in which these commands were typed.

    Args:
        commands: each with what it printed.
    """
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, highlight=False)
    for command, printed in commands:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        if printed:
            console.print(Text.from_ansi(printed.rstrip("\n")))
        console.print()
    return console.export_svg(title="", code_format=FORMAT, unique_id="terminal")


def main() -> None:
    """Write the picture."""
    write_file(PICTURE, draw(record()).encode())
    print(f"written: {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tests.cli.conftest import Run


def test_hash_of_a_checkpoint_and_of_its_port(run: Run, checkpoint: Path, port: Path) -> None:
    one = run("hash", checkpoint, "--table", "bert")
    assert one.exit_code == 0
    assert "warning: cls.predictions.decoder.weight has no part in it" in one.stderr
    other = run("hash", port, "--table", "bert")
    assert one.stdout.splitlines()[0] == other.stdout.splitlines()[0]
    assert one.stdout.startswith("sha256:")
    plain = run("hash", checkpoint)
    assert plain.stdout.split()[0] != one.stdout.split()[0]


def test_the_text_gives_the_digest(run: Run, checkpoint: Path) -> None:
    text = run("hash", checkpoint, "--tensors").stdout
    found = json.loads(run("hash", checkpoint, "--json").stdout)
    assert found["digest"] == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    assert text.splitlines()[0] == "porting hash 1"
    assert json.loads(text.splitlines()[1])[0] == found["tensors"][0]["name"]

"""``convert`` and ``verify-files``."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from porting.cli import progress
from porting.cli.output import Screen
from porting.converting.progress import Progress
from tests.cli.conftest import Run
from tests.small_checkpoint import tensors


def facts(output: str) -> dict[str, str]:
    pairs = (line.partition("  ") for line in output.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def test_convert_says_what_it_wrote(run: Run, checkpoint: Path) -> None:
    result = run("convert", checkpoint, "out", "--table", "bert_into_fused", "--shard-size", "20kB")
    assert result.exit_code == 0, result.stderr
    found = facts(result.stdout)
    assert found["converted to"] == "out"
    assert found["tensors"].startswith("40, 60.1 kB in ")
    assert "model-{00001..00004}-of-00004.safetensors (4 files), " in found["files"]
    assert found["left out"].endswith("and 7 more")
    assert result.stdout.splitlines()[-1] == "next: porting verify-files out"
    assert result.stderr == ""
    checked = run("verify-files", "out")
    assert checked.exit_code == 0
    assert checked.stdout.splitlines()[-2:] == ["every byte is as it was written", "next: porting hash out"]


def test_there_and_back(run: Run, checkpoint: Path) -> None:
    assert run("convert", checkpoint, "out", "--dtype", "float64").exit_code == 0
    result = run("convert", "out", "again", "--reverse", "--dtype", "float32", "--memory", "2MiB", "--threads", "1")
    assert result.exit_code == 0, result.stderr
    held = tensors()
    again = load_file("again/model.safetensors")
    assert {name for name in held if not again[name].equal(held[name])} == set()


def test_a_dry_run_writes_nothing(run: Run, checkpoint: Path) -> None:
    result = run("convert", checkpoint, "out", "--dry-run", "--shard-size", "20kB")
    assert result.exit_code == 0, result.stderr
    found = facts(result.stdout)
    assert found["would write"].startswith("62 tensors, 76")
    assert found["in"].startswith("model-00001-of-00004.safetensors (1")
    assert found["time"].startswith("about ")
    assert result.stdout.splitlines()[-1] == "nothing was written"
    assert [path.name for path in Path().iterdir()] == ["c"]


def test_many_shards_share_a_line_of_a_dry_run(run: Run, checkpoint: Path) -> None:
    found = facts(run("convert", checkpoint, "out", "--dry-run", "--shard-size", "5kB").stdout)
    assert re.fullmatch(r"model-\{00001\.\.(\d+)\}-of-\1\.safetensors \((\d+) files\) of up to \d.* kB", found["in"])


def test_events_for_scripts(run: Run, checkpoint: Path) -> None:
    result = run("convert", checkpoint, "out", "--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == ["begin", "done"]
    assert events[0]["tensors"] == events[1]["tensors"] == 62
    assert len(events[1]["digests"]) == 62
    failed = run("convert", checkpoint, "out", "--json")
    assert failed.exit_code == 2
    (event,) = [json.loads(line) for line in failed.stdout.splitlines()]
    assert event["event"] == "failed"
    assert event["faults"][0]["code"] == "destination-refused"


def test_losses_are_told(run: Run, checkpoint: Path) -> None:
    held = tensors()
    name = "bert.embeddings.position_embeddings.weight"
    held[name][0, :3] = 1e6
    from safetensors.torch import save_file

    save_file(held, checkpoint / "model.safetensors")
    result = run("convert", checkpoint, "out", "--dtype", "float16")
    lost = "lost in the cast  bert.embeddings.position.weight: 3 to infinity, 0 to zero"
    assert lost in result.stdout.splitlines()


def test_a_flipped_bit_is_a_difference(run: Run, checkpoint: Path) -> None:
    run("convert", checkpoint, "out")
    path = Path("out/model.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 16
    path.write_bytes(raw)
    result = run("verify-files", "out")
    assert result.exit_code == 1
    assert result.stdout.startswith("differs: model.safetensors: tensor '")
    assert result.stdout.splitlines()[-1] == "next: porting convert --help"
    document = json.loads(run("verify-files", "out", "--json").stdout)
    assert document["same"] is False
    assert len(document["problems"]) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["c", "c/out"], "c/out: the destination is or lies inside the source 'c'"),
        (["c", "."], "the destination holds the source 'c'"),
        (["c", "link/out"], "link/out: the destination is or lies inside the source 'c'"),
        (["c", "no/out"], "lies in a directory that does not exist (run `mkdir -p no`)"),
        (["c", "there"], "there: the destination exists already"),
        (["c", "there", "--overwrite"], "holds files and no checkpoint"),
        (["c", "out", "--like", "c"], "--like is for the way back"),
        (["c", "out", "--reverse", "--derive"], "no module is built"),
        (
            ["c", "out", "--memory", "1MB"],
            "each of 2 threads needs 1048576 bytes (pass --memory 2MiB, or fewer threads)",
        ),
        (["c", "out", "--memory", "much"], "'much' is not a size"),
        (["./missing", "out"], "no such file or directory"),
        (["c", "out", "--table", "bert_into_nothing"], "is neither a file nor a bundled table"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(run: Run, checkpoint: Path, words: list[str], line: str) -> None:
    Path("there").mkdir()
    Path("there/notes.txt").write_text("mine")
    Path("link").symlink_to("c")
    result = run("convert", *words)
    assert result.exit_code == 2
    assert line in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in Path().iterdir()) == ["c", "link", "there"]


def test_a_port_is_not_ported_again(run: Run, checkpoint: Path) -> None:
    run("convert", checkpoint, "out", "--table", "bert_into_fused")
    result = run("convert", "out", "again", "--table", "bert_into_fused")
    assert result.exit_code == 2
    expected = "out is in the port's layout already: a conversion through this table made it (pass --reverse"
    assert expected in result.stderr


def test_progress_is_told_in_plain_lines_or_in_events(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where standard error is not a terminal."""
    monkeypatch.setattr(progress, "EVERY", 0.0)
    plain = run("convert", checkpoint, "out")
    last = plain.stderr.splitlines()[-1]
    assert re.fullmatch(r"publishing: 65\.6 kB of 65\.6 kB, [0-9.]+ GB/s, 62 of 62 tensors, 0 s left", last), (
        plain.stderr
    )
    events = [json.loads(line) for line in run("convert", checkpoint, "again", "--json").stdout.splitlines()]
    shown = [event for event in events if event["event"] == "progress"]
    assert shown
    assert shown[-1]["stage"] == "publishing"
    assert (shown[-1]["bytes"], shown[-1]["tensors"]) == (shown[-1]["all_bytes"], 62)


def test_a_bar_is_drawn_on_a_terminal(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen("convert")
    drawn = io.StringIO()
    screen.err = Console(file=drawn, force_terminal=True, width=120)
    monkeypatch.delenv("TERM", raising=False)
    with progress.conversion_progress(screen) as tell:
        tell(Progress(stage="writing", tensors=3, bytes=500_000_000, all_tensors=9, all_bytes=2_000_000_000,
                      resumed=100_000_000, seconds=0.2))  # fmt: skip
    shown = drawn.getvalue()
    assert "writing" in shown
    assert "500 MB of 2 GB, 2.00 GB/s, 3 of 9 tensors, 1 s left" in shown

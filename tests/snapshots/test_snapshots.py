"""What commands print and what they write, whole, for a fixed set of inputs.

Each snapshot is a file in this folder, so that a changed message, report, table or byte shows as a diff.  After a
wanted change write them anew, and read ``git diff tests/snapshots`` before you commit::

    pytest -m "" tests/snapshots --update

What differs between machines and runs is replaced: versions, times, memory, and digits that are rounding noise.
"""

from __future__ import annotations

import hashlib
import html
import importlib.metadata
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Run, run
from tests.cli.modules import OWN, own_modules, write_own
from tests.guards.tree import ROOT
from tests.reporting.conftest import one_thread
from tests.small_checkpoint import write_checkpoint
from tests.suggesting.oracle import drafted
from tests.zoo.per_head import PerHead
from tests.zoo.type_major import TypeMajor

__all__ = ["one_thread", "own_modules", "run"]

HERE = Path(__file__).parent

OTHERS = [
    name
    for name, version in re.findall(
        r"^(torch|transformers)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    if importlib.metadata.version(name).partition("+")[0] != version
]
"""What is installed in another version than the one that the snapshots were made with: it may do other steps."""

TANH_GELU = ("GELU = nn.functional.gelu", 'GELU = lambda x: nn.functional.gelu(x, approximate="tanh")')
ROUNDS_WORSE = (  # the same probabilities from scores to which 10,000 was added
    "scores = scores.masked_fill(~mask[:, None, None, :].bool(), torch.finfo(x.dtype).min)",
    "scores = scores + (1.0 - mask[:, None, None, :].to(x.dtype) * -10000.0)",
)
HALF_AGAIN = ("self.mix((scores", "self.mix(1.5 * (scores")


# --------------------------------------------------------------------------------------------------- what is replaced


def plain(text: str) -> str:
    """A text without what differs between machines and runs."""
    text = re.sub(r"\b\d+(\.\d+)?(e-\d+)? (ms|s|min|h)\b", "N s", text)
    text = re.sub(r"\b\d+(\.\d+)? times the forward", "N times the forward", text)
    text = re.sub(r"\b20\d\d-\d\d-\d\d\b", "DATE", text)
    text = re.sub(r"\b(seconds +)\d+(\.\d+)?", r"\1N", text)
    text = re.sub(r"\b\d+(\.\d+)? [kMG]?B/s", "N B/s", text)
    text = re.sub(r"\b\d+(\.\d+)? GB\b", "N GB", text)
    text = re.sub(r"\b(python|torch|transformers|safetensors|porting) \d+[\w.+]*", r"\1 VERSION", text)
    text = re.sub(r"\b\d+(\.\d+)?(e\+\d\d)?( ?x)\b", r"N\3", text)  # a ratio of rounding errors
    text = re.sub(r"\b\d(\.\d+)?e-(0[6-9]|1[0-9]|2[0-9])\b", lambda found: noise(found[0]), text)
    text = re.sub(r"0e\+00", "tiny", text)
    lines = [re.sub(r"(?<=\S) {2,}", "  ", line).rstrip() for line in text.splitlines()]
    return "\n".join(lines) + "\n"


def noise(number: str) -> str:
    """A small number, unless it is one of the library's own bounds."""
    return number if number == "1e-12" else "tiny"


SMALL, BOUND = 1e-5, 1e-12
"""A number as small is noise, unless it is the library's own bound."""

MEASURED = {"cost", "difference", "meaning", "noise", "residual", "rounding", "spreads"}
"""Fields of a report, with all that is in them, that are not the same in two runs or on two machines."""


def plain_json(value: Any, measured: bool = False) -> Any:  # Any: as JSON is
    """A document of which numbers that are measured, versions and long lists of results are replaced."""
    if isinstance(value, dict):
        return {name: plain_field(name, inner, measured) for name, inner in value.items()}
    if isinstance(value, list):
        return ["..."] if measured else [plain_json(inner) for inner in value]
    if isinstance(value, str):
        return plain(value).rstrip("\n")
    if isinstance(value, float) and 0 < value < SMALL and value != BOUND:
        return "tiny"  # a bound that follows from what was measured
    return "number" if measured and value is not None else value


def plain_field(name: str, value: Any, measured: bool) -> Any:  # Any: as above
    if name == "environment":
        return sorted(value)
    if name == "results":
        return dict(Counter(f"{result['kind']}: {result['status']}" for result in value))
    if name == "bounds":
        return value
    return plain_json(value, measured or name in MEASURED)


def written(document: str) -> str:
    """A JSON document to be read: a list of numbers or words on one line."""
    text = json.dumps(plain_json(json.loads(document)), indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"


def page(document: str) -> str:
    """The elements of a page and what stands in them, without its style, its program and its pictures."""
    for element in ("style", "script", "svg"):
        document = re.sub(rf"<{element}\b.*?</{element}>", f"<{element}/>", document, flags=re.DOTALL)
    document = re.sub(r"sha256-[\w+/=]+", "sha256-DIGEST", html.unescape(document))
    document = re.sub(r"(>porting</th><td[^>]*>)[^<]*", r"\1VERSION", document)
    document = re.sub(r"\b\d+(\.\d+)?\N{MULTIPLICATION SIGN}", "N\N{MULTIPLICATION SIGN}", document)
    document = re.sub(r"(data-\w+|value|aria-label)=\"[^\"]*\"", plain_attribute, document)
    return "\n".join(line.rstrip() for line in plain(document).splitlines() if line.strip()) + "\n"


def plain_attribute(found: re.Match[str]) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", found[0]) if found[1].startswith("data-") else found[0]


# ------------------------------------------------------------------------------------------------------- the subjects


class Shell:
    """Types commands in a folder of its own with a small BERT, ``c``, and keeps what they print."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def own(self, bug: tuple[str, str] = ("", "")) -> None:
        """Write ``own_model.py`` and ``own.toml``."""
        write_own(Path(), bug=bug)
        sys.modules.pop("own_model", None)

    def printed(self, *words: str) -> str:
        """What a command prints to standard output."""
        return self._run(*words).stdout

    def session(self, *commands: str) -> str:
        """Commands with all that they print: standard error after ``!``, an exit code that is not 0 at the end."""
        parts: list[str] = []
        for command in commands:
            sys.modules.pop("own_model", None)
            result = self._run(*shlex.split(command))
            parts += [f"$ porting {command}", *result.stdout.splitlines()]
            parts += [f"! {line}" for line in result.stderr.splitlines()]
            parts += [f"exit code {result.exit_code}"] * bool(result.exit_code) + [""]
        return plain("\n".join(parts).rstrip())


OWN_WORDS = shlex.join(OWN)


def verify_faithful(shell: Shell) -> str:
    shell.own()
    return shell.session(f"verify c {OWN_WORDS}")


def verify_faithful_verbose(shell: Shell) -> str:
    shell.own()
    return shell.session(f"verify c {OWN_WORDS} --verbose --gradients")


def verify_different(shell: Shell) -> str:
    shell.own(TANH_GELU)
    return shell.session(f"verify c {OWN_WORDS} --all")


def verify_unnamed_difference(shell: Shell) -> str:
    shell.own(HALF_AGAIN)
    return shell.session(f"verify c {OWN_WORDS}")


def verify_imprecise(shell: Shell) -> str:
    shell.own(ROUNDS_WORSE)
    return shell.session(f"verify c {OWN_WORDS}")


def verify_different_json(shell: Shell) -> str:
    shell.own(TANH_GELU)
    return written(shell.printed("verify", "c", *OWN, "--json"))


def verify_different_page(shell: Shell) -> str:
    shell.own(TANH_GELU)
    shell.printed("verify", "c", *OWN, "--html", "report.html")
    return page(Path("report.html").read_text(encoding="utf-8"))


def check_fits(shell: Shell) -> str:
    shell.own()
    return shell.session(f"check c {OWN_WORDS}")


def misfit(shell: Shell) -> None:
    """A table, a config and a checkpoint with a fault of each kind that can be met together."""
    shell.own()
    table = Path("own.toml")
    text = table.read_text(encoding="utf-8")
    for right, wrong in (
        ('"norm.{w:weight,bias}"', '"nrom.{w:weight,bias}"'),
        (".mix.{w:weight,bias}", ".mixed.{w:weight,bias}"),
        ("position_embeddings.weight", "positions.weight"),
        ("[(p o) e]", "[(o p e)]"),
        ('"cls.{*rest}"', '"clz.{*rest}"'),
    ):
        assert right in text
        text = text.replace(right, wrong)
    table.write_text(text, encoding="utf-8")


def check_faults(shell: Shell) -> str:
    misfit(shell)
    return shell.session(f"check c {OWN_WORDS}", "check c --architecture BertForQuestionAnswering", "check ./nowhere")


def check_faults_json(shell: Shell) -> str:
    misfit(shell)
    return written(shell.printed("check", "c", *OWN, "--json"))


BROKEN_TABLES = {
    "no TOML": "[tensors\n",
    "unknown section": '[tensor]\n"a" = "b"\n',
    "unclosed name": '[tensors]\n"a.{i" = "b"\n',
    "a capture on one side": '[tensors]\n"a.{i}" = "b"\n',
    "choices of two lengths": '[tensors]\n"a.{p:q,k}" = "b.{p:q,k,v}"\n',
    "axes of one side": '[tensors]\n"a [o e]" = "b [o]"\n',
    "one source twice": '[tensors]\n"a" = "b"\n[drop]\n"a" = "not needed"\n',
    "no number": '[[rule]]\nsource = "a"\ntarget = "b"\nscale = "two"\n',
    "unknown key of a rule": '[[rule]]\nsource = "a"\ntarget = "b"\nscaled = 2\n',
    "extends what is not there": 'extends = "brt"\n',
}


def table_faults(shell: Shell) -> str:
    parts = []
    for name, text in BROKEN_TABLES.items():
        Path("broken.toml").write_text(text, encoding="utf-8")
        parts.append(f"# {name}\n{text}{shell.session('tables broken.toml')}")
    return "\n".join(parts)


def commands(shell: Shell) -> str:
    """What commands print that show or compare files."""
    shell.own()
    other = load_file("c/model.safetensors")
    other["cls.predictions.bias"] = other["cls.predictions.bias"] + 1.0
    del other["bert.pooler.dense.bias"]
    save_file(other, "other.safetensors")
    return shell.session(
        "inspect c",
        "hash c",
        "diff c c",
        "diff c other.safetensors",
        "tables bert",
        "load c --table bert",
        "export c exported",
        f"convert c converted {OWN_WORDS} --dry-run",
        f"convert c converted {OWN_WORDS}",
        f"convert c converted {OWN_WORDS}",
        "verify-files converted",
        "explain drop-differs",
        "verfy c",
    )


CONVERSIONS = (
    f"convert c own {OWN_WORDS}",
    "convert c npz --table bert --to npz",
    "convert c dcp --table bert --to dcp",
    "convert c shards --table bert --shard-size 10kB",
    "convert c rounded --table bert --dtype bfloat16",
    "convert npz back --table bert --reverse --like c",
    "export c exported",
)


def conversions(shell: Shell) -> str:
    """The bytes of every file that is written, by their SHA-256, beside those of the source."""
    shell.own()
    lines = listing("c")
    for command in CONVERSIONS:
        words = shlex.split(command)
        result = shell.session(command)
        assert "exit code" not in result, result
        lines += ["", f"$ porting {command}", *listing(words[2])]
    source, back = Path("c/model.safetensors"), Path("back/model.safetensors")
    assert source.read_bytes() == back.read_bytes()
    return "\n".join(lines) + "\n"


def listing(folder: str) -> list[str]:
    return [f"{digest(path)}  {path}" for path in sorted(Path(folder).iterdir())]


def digest(path: Path) -> str:
    """The beginning of a file's SHA-256; of a provenance record without versions and what depends on them."""
    content = path.read_bytes()
    if path.name == "provenance.json":
        record = {**json.loads(content), **dict.fromkeys(("versions", "table", "digest"))}
        content = json.dumps(record, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def draft_per_head(shell: Shell) -> str:
    return drafted(Path("c"), PerHead).text


def draft_type_major(shell: Shell) -> str:
    return drafted(Path("c"), TypeMajor).text


def suggest_own(shell: Shell) -> str:
    """The report of a suggestion, and the table that it writes with what is proven of it."""
    shell.own()
    report = shell.session("suggest c --into own_model.py:build -o suggested.toml")
    return f"{report}\n# suggested.toml\n{plain(Path('suggested.toml').read_text(encoding='utf-8'))}"


def suggest_impossible(shell: Shell) -> str:
    shell.own(("x = self.norm(x)", "x = self.norm(x).relu()"))
    return shell.session("suggest c --into own_model.py:build -o suggested.toml")


SNAPSHOTS: dict[str, Callable[[Shell], str]] = {
    "check-faults.json": check_faults_json,
    "check-faults.txt": check_faults,
    "check-fits.txt": check_fits,
    "commands.txt": commands,
    "conversions.txt": conversions,
    "draft-per-head.toml": draft_per_head,
    "draft-type-major.toml": draft_type_major,
    "suggest-impossible.txt": suggest_impossible,
    "suggest-own.txt": suggest_own,
    "table-faults.txt": table_faults,
    "verify-different.html": verify_different_page,
    "verify-different.json": verify_different_json,
    "verify-different.txt": verify_different,
    "verify-faithful-verbose.txt": verify_faithful_verbose,
    "verify-faithful.txt": verify_faithful,
    "verify-imprecise.txt": verify_imprecise,
    "verify-unnamed-difference.txt": verify_unnamed_difference,
}
SLOW = {"suggest-impossible.txt", "suggest-own.txt", "verify-imprecise.txt", "verify-unnamed-difference.txt"}
CASES = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW), id=name) for name in SNAPSHOTS]


@pytest.mark.skipif(bool(OTHERS), reason=f"the snapshots are of the pinned versions, these are others: {OTHERS}")
@pytest.mark.parametrize("name", CASES)
def test_it_is_as_it_was(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "c")
    found = SNAPSHOTS[name](Shell(run)).replace(str(tmp_path), "FOLDER")
    file = HERE / name
    if request.config.getoption("--update"):
        file.write_text(found, encoding="utf-8")
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    assert found.splitlines() == expected.splitlines(), "if this is wanted: pytest -m '' tests/snapshots --update"


def test_every_file_here_is_a_snapshot() -> None:
    """What no test writes any more would stay for ever."""
    kept = {path.name for path in HERE.iterdir() if path.suffix not in {".py", ".pyc"} and path.is_file()}
    assert kept == set(SNAPSHOTS)


def test_what_is_measured_is_replaced_and_what_is_meant_is_kept() -> None:
    text = "off by 5.8e-16 (bound 1e-12), 2.1e-04 there; 867.3 x the reference's; 28 forward passes; 5.2 s, 0.5 GB"
    kept = "off by tiny (bound 1e-12), 2.1e-04 there; N x the reference's; 28 forward passes; N s, N GB\n"
    assert plain(text) == kept

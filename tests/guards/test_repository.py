"""What a hosting service reads of the repository: workflows, forms for issues, the citation, hooks."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema.validators import validator_for  # type: ignore[import-untyped]  # as above

from porting.cli.app import app
from tests.guards.test_documents import TARGETS
from tests.guards.tree import ROOT

GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").iterdir() if path.name != "config.yml")
WORKFLOWS = sorted((GITHUB / "workflows").iterdir())
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

SCHEMAS = {
    **dict.fromkeys(WORKFLOWS, "github-workflows"),
    **dict.fromkeys(FORMS, "github-issue-forms"),
    GITHUB / "ISSUE_TEMPLATE" / "config.yml": "github-issue-config",
    GITHUB / "dependabot.yml": "dependabot",
    ROOT / "CITATION.cff": "citation-file-format",
}

PUBLISHED_BY = "gh release create"
"""The one command of a workflow that is not ours: it takes what was made and sends it."""


def read(path: Path) -> dict[str, Any]:  # Any: YAML's own types
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {"on" if key is True else key: value for key, value in found.items()}  # YAML 1.1 takes `on` for true


def complaints(content: object, schema: str) -> list[str]:
    """What a schema that comes with check-jsonschema says; nothing is fetched."""
    read_schema = json.loads((files("check_jsonschema") / f"builtin_schemas/vendor/{schema}.json").read_text("utf-8"))
    validator = validator_for(read_schema)(read_schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(content)]


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_a_file_has_the_keys_that_are_required(path: Path) -> None:
    assert complaints(read(path), SCHEMAS[path]) == []


def test_a_form_without_what_is_required_is_seen() -> None:
    form = read(FORMS[0])
    del form["description"]
    assert complaints(form, "github-issue-forms") == ["$: 'description' is a required property"]


def test_a_form_asks_for_what_the_command_collects() -> None:
    """Ids are unique in a form, and the report is asked for by the command that makes it."""
    for path in FORMS:
        ids = [one["id"] for one in read(path)["body"] if "id" in one]
        assert len(set(ids)) == len(ids)
    said = {path.stem: path.read_text(encoding="utf-8") for path in FORMS}
    assert {name for name, text in said.items() if "`porting report-bug`" in text} == {"bug", "verdict"}


def commands(path: Path) -> Iterator[str]:
    for job in read(path)["jobs"].values():
        for step in job["steps"]:
            yield from step.get("run", "").strip().splitlines()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_what_anybody_can_run(path: Path) -> None:
    """Targets of the Makefile and programs of .ci, so that what fails there can be repeated here."""
    found = list(commands(path))
    assert found
    for command in found:
        words = shlex.split(command, comments=True)
        if words[0] == "make":
            assert words[1] in TARGETS, command
        elif not command.startswith(PUBLISHED_BY):
            assert words == [words[0]], command
            assert (ROOT / words[0]).stat().st_mode & 0o111, command


def test_ci_runs_every_check_on_every_python_with_the_lowest_and_the_newest() -> None:
    jobs = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    assert ".ci/run" in list(commands(GITHUB / "workflows" / "ci.yml"))
    pythons = {re.search(r"3[.]\d+", jobs["everything"]["container"])[0]}  # type: ignore[index]  # it has one
    pythons |= set(jobs["python"]["strategy"]["matrix"]["python"])
    stated = [
        classifier.rpartition(" ")[2]
        for classifier in PYPROJECT["project"]["classifiers"]
        if "Python :: 3." in classifier
    ]
    assert pythons == set(stated)
    assert PYPROJECT["project"]["requires-python"] == f">={min(stated, key=len)}" == ">=3.11"
    versions = [one["versions"] for one in jobs["versions"]["strategy"]["matrix"]["include"]]
    assert versions == ["lowest", "newest"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_and_takes_only_what_was_pinned(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert [
        name for name, note in used if not re.search(r"@[0-9a-f]{40}$", name) or not re.match(r" # v\d", note)
    ] == []
    content = read(path)
    assert content["permissions"] in ({}, {"contents": "read"})
    rights = {name: job["permissions"] for name, job in content["jobs"].items() if "permissions" in job}
    assert {name for name, right in rights.items() if "write" in right.values()} <= {"publish", "notes"}
    for command in commands(path):
        assert not re.search(r"\$\{\{ *github[.](head_ref|ref|event)", command)  # a name that somebody chose is no code


def test_the_citation_has_the_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == PYPROJECT["project"]["version"]
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PYPROJECT["project"]["authors"]
    ]


def test_a_hook_runs_a_tool_of_the_environment() -> None:
    """No second version of a tool: what a hook says, CI says."""
    (own,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert own["repo"] == "local"
    for hook in own["hooks"]:
        assert {"id", "name", "entry", "language"} <= set(hook)
        program, dash, tool, *words = shlex.split(hook["entry"])
        assert (program, dash, hook["language"]) == (".venv/bin/python", "-m", "system")
        assert importlib.util.find_spec(tool) is not None
        assert tool != "porting" or words[0] in {command.name for command in app.registered_commands}

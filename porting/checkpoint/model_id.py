"""The names of models on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

from porting.checkpoint.errors import CheckpointError
from porting.errors import Code, Fault

NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
REVISION = re.compile(r"[A-Za-z0-9][\w.+-]*(?:/[A-Za-z0-9][\w.+-]*)*")


@dataclass(frozen=True, kw_only=True)
class ModelId:
    """A model on the hub: ``org/name``, and the branch, tag or commit that is meant."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def parse_model_id(text: str, *, revision: str | None) -> ModelId | None:
    """The model that a text names; None when it can be no model's name.

    Raises:
        CheckpointError: two different revisions are given, or an impossible one.

    >>> parse_model_id("google-bert/bert-base-uncased@main", revision=None)
    ModelId(repo='google-bert/bert-base-uncased', revision='main')
    """
    repo, at, written = text.partition("@")
    if not NAME.fullmatch(repo) or repo.endswith((".safetensors", ".bin", ".json")):
        return None
    if at and revision is not None and written != revision:
        message = f"two revisions are given, {written!r} in the name and {revision!r} beside it"
        raise _fault(text, message, "leave one of them out")
    wanted = written if at else revision if revision is not None else "main"
    if not REVISION.fullmatch(wanted) or ".." in wanted:
        message = f"{wanted!r} is no possible revision"
        raise _fault(repo, message, "pass a branch, a tag or a commit")
    return ModelId(repo=repo, revision=wanted)


def _fault(where: str, message: str, hint: str) -> CheckpointError:
    return CheckpointError(Fault(code=Code.HUB_NOT_FOUND, where=where, message=message, hint=hint))

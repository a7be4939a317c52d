"""The request to the process that runs the user's tests, and its answer: a JSON file each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "PORTING_MUTATION"
"""The environment variable with the path of the request."""

APPLIES, EQUIVALENT, ABSENT = "applies", "equivalent", "absent"


@dataclass(frozen=True, kw_only=True)
class MutationRequest:
    """The mistakes to put into the port.

    Attributes:
        into: what builds the port, ``my_model:build`` or ``my_model.py:build``.
        mistake: the mistake to plant; ``""`` to observe only.
        roles: the roles of the port's linear layers, from the observed run.
        inner: the events that are steps of a written-out operation, from the same run.
        answer: the path for the :class:`MutationResult`.
        socket: the path of the socket for further requests, each for a fork of the process; ``""`` for none.
    """

    into: str
    mistake: str = ""
    roles: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    answer: str
    socket: str = ""

    def write(self, path: Path) -> None:
        """Write the request to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> MutationRequest:
        """Read a request from a file."""
        return cls.of(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> MutationRequest:
        """Return the request with fields from JSON."""
        return cls(**{**fields, "roles": tuple(fields["roles"]), "inner": tuple(fields["inner"])})


@dataclass(frozen=True, kw_only=True)
class MistakeStatus:
    """Whether a mistake changes a port.

    Attributes:
        kind: ``applies``, ``equivalent`` or ``absent``.
        advice: for a mistake that applies, what a test needs to detect it.
    """

    kind: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class MutationResult:
    """The observations of one run of the tests on the port.

    Attributes:
        built: how many times it was built.
        imported: whether the module that builds it was imported.
        inner: the events that are steps of a written-out operation.
        imports: installed modules that the tests imported while they ran.
    """

    built: int
    imported: bool
    ran: bool
    roles: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    mistakes: Mapping[str, MistakeStatus] = field(default_factory=dict)
    imports: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write the result to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> MutationResult | None:
        """Read a result from a file; None if the process ended before it wrote one."""
        if not path.is_file():
            return None
        fields_of_result = json.loads(path.read_text(encoding="utf-8"))
        mistakes = {name: MistakeStatus(**fields) for name, fields in fields_of_result["mistakes"].items()}
        lists = {name: tuple(fields_of_result[name]) for name in ("roles", "inner", "imports")}
        return cls(**{**fields_of_result, **lists, "mistakes": mistakes})

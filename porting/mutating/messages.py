"""What the process that runs the user's tests is told, and what it tells back: a file each, both JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "PORTING_MUTATION"
"""Names the file with the request."""

APPLIES, EQUIVALENT, ABSENT = "applies", "equivalent", "absent"


@dataclass(frozen=True, kw_only=True)
class MutationRequest:
    """What to do to the port.

    Attributes:
        into: what builds it, ``my_model:build`` or ``my_model.py:build``.
        mistake: what to plant; ``""`` to watch only.
        roles: of the port's linear maps, from the run that was watched.
        inner: the events that are steps of something written out, from the same run.
        answer: the file to write :class:`MutationResult` to.
        socket: where further requests come from, each for a copy of the process; ``""`` for none.
    """

    into: str
    mistake: str = ""
    roles: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    answer: str
    socket: str = ""

    def write(self, path: Path) -> None:
        """Keep them in a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> MutationRequest:
        """What :meth:`write` kept."""
        return cls.of(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> MutationRequest:
        """From their fields, as JSON has them."""
        return cls(**{**found, "roles": tuple(found["roles"]), "inner": tuple(found["inner"])})


@dataclass(frozen=True, kw_only=True)
class MistakeStatus:
    """What a mistake is to a port.

    Attributes:
        kind: ``applies``, ``equivalent`` or ``absent``.
        advice: for one that applies, what in a test would show it.
    """

    kind: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class MutationResult:
    """What became of the port.

    Attributes:
        built: how often it was built.
        imported: whether the module that builds it was imported.
        ran: whether it ran.
        roles: of its linear maps.
        inner: the events that are steps of something written out.
        mistakes: what each mistake is to it.
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
        """Keep it in a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> MutationResult | None:
        """What :meth:`write` kept; None when the process ended before."""
        if not path.is_file():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        mistakes = {name: MistakeStatus(**fields) for name, fields in found["mistakes"].items()}
        lists = {name: tuple(found[name]) for name in ("roles", "inner", "imports")}
        return cls(**{**found, **lists, "mistakes": mistakes})

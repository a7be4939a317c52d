"""What the process that runs the user's tests is told, and what it tells back: a file each, both JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

VARIABLE = "PORTING_MUTATION"
"""Names the file with the orders."""

APPLIES, EQUIVALENT, ABSENT = "applies", "equivalent", "absent"


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What to do to the port.

    Attributes:
        into: what builds it, ``my_model:build`` or ``my_model.py:build``.
        mistake: what to plant; ``""`` to watch only.
        roles: of the port's linear maps, from the run that was watched.
        answer: the file to write :class:`Seen` to.
    """

    into: str
    mistake: str = ""
    roles: tuple[str, ...] = ()
    answer: str

    def write(self, path: Path) -> None:
        """Keep them in a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Orders:
        """What :meth:`write` kept."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**found, "roles": tuple(found["roles"])})


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What became of the port.

    Attributes:
        built: how often it was built.
        ran: whether it ran.
        roles: of its linear maps.
        mistakes: for each mistake whether it applies, is equivalent, or has no place in this port.
    """

    built: int
    ran: bool
    roles: tuple[str, ...] = ()
    mistakes: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Seen | None:
        """What :meth:`write` kept; None when the process ended before."""
        if not path.is_file():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**found, "roles": tuple(found["roles"])})

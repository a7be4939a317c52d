"""``extends = "name"``: a table that differs from another in a few lines writes those lines.

An entry replaces that of the same name, ``false`` takes it away, and the names of the extended table take the prefixes
of the one that extends it.  Of a short rule the name is what stands before its axes; of a ``[[rule]]``, its sources.
[architectures] are replaced as a whole: another family has none of the classes of this one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from porting.errors import Code, Fault, nearest
from porting.limits import charge
from porting.notation.faults import TableError
from porting.notation.sections import PLAIN, RULES, Body, Entry, Sections, read_file, split

SHIPPED = Path(__file__).resolve().parent.parent / "mappings"
"""The folder of the tables that come with the library."""

DEEPEST = 16
"""Tables that extend one another."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")

Swap = tuple[str, str]
"""A prefix and what takes its place."""


def gather(source: Path | str, *, where: str = "", above: tuple[Path, ...] = ()) -> Sections:
    """The sections of a file (a path) or of a text, below them those of the tables that it extends.

    Args:
        where: what a text is called in messages.
        above: the files that extend this one.
    """
    path = source if isinstance(source, Path) else None
    text = read_file(source) if isinstance(source, Path) else source
    sections = split(text, where or (path.name if path else "table"))
    if sections.extends is None:
        sections.faults += _idle(sections, Sections(where=""))
        return replace(sections, entries=_said(sections), rules=_rules(sections))
    chain = (*above, path) if path else above
    charge("objects", 32 * sum(map(len, sections.entries.values())) * (1 + len(above)), where=sections.where)
    try:
        parent = gather(_find(sections.extends, path, chain), above=chain)
    except TableError as error:
        sections.faults += error.faults
        return replace(sections, entries=_said(sections), rules=_rules(sections))
    return _merge(sections, parent)


def _said(sections: Sections) -> dict[str, Body]:
    """The entries that say something of their own: not those that take one of the extended table away."""
    return {
        section: {key: one for key, one in body.items() if one.value is not False or section in PLAIN}
        for section, body in sections.entries.items()
    }


def _rules(sections: Sections) -> list[Body]:
    return [rule for rule in sections.rules if not _takes_away(rule)]


def _find(extends: Entry, path: Path | None, chain: tuple[Path, ...]) -> Path:
    """The file of the extended table: beside the one that extends it, or a bundled one."""

    def refused(message: str, hint: str = "") -> TableError:
        return TableError(Fault(code=Code.BAD_EXTENDS, where=extends.value_at(), message=message, hint=hint))

    if len(chain) > DEEPEST:
        raise refused(f"more than {DEEPEST} tables extend each other", "copy what is needed into one table")
    name = extends.value
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refused(f"extends = {name!r:.120}, expected the name of a table: letters, digits, - and _")
    beside = path.parent / f"{name}.toml" if path else None
    chosen = beside if beside and beside.is_file() and beside != path else SHIPPED / f"{name}.toml"
    if os.path.realpath(chosen) in map(os.path.realpath, chain):
        raise refused(f"a table extends itself: {' -> '.join(one.stem for one in (*chain, chosen))}")
    if not chosen.is_file():
        folders = [SHIPPED, *([path.parent] if path else [])]
        known = [one.stem for folder in folders for one in sorted(folder.glob("*.toml")) if one != path]
        message = f"there is no table {name!r} beside this one or among the bundled ones"
        raise refused(message, nearest(name, known) or f"bundled: {', '.join(known)}")
    return chosen


def _merge(child: Sections, parent: Sections) -> Sections:
    source, target = (_swapped(child, parent, key) for key in ("prefix", "target_prefix"))
    names = len(parent.rules) + sum(map(len, parent.entries.values()))
    charge("metadata", names * (len(source[1]) + len(target[1])), where=child.where)
    inherited = {
        section: {moved.key: moved for moved in (_respell(one, section, source, target) for one in body.values())}
        for section, body in parent.entries.items()
    }
    rules = [
        {key: replace(one, value=_each(one.value, target if key == "target" else source)) for key, one in rule.items()}
        for rule in parent.rules
    ]
    above = replace(parent, entries=inherited, rules=rules)
    entries: dict[str, Body] = {}
    said = _said(child)
    for section in {**inherited, **said}:
        own = {_identity(section, one.key) for one in _alike(child, section)}
        if section == "architectures" and said.get(section):
            own |= set(inherited.get(section, {}))
        kept = {key: one for key, one in inherited.get(section, {}).items() if _identity(section, key) not in own}
        entries[section] = {**kept, **said.get(section, {})}
    replaced = {_sources(rule) for rule in child.rules}
    return Sections(
        where=child.where,
        texts=[*child.texts, *parent.texts],
        entries=entries,
        rules=[*(rule for rule in rules if _sources(rule) not in replaced), *_rules(child)],
        faults=[*parent.faults, *child.faults, *_idle(child, above)],
    )


def _alike(sections: Sections, section: str) -> Iterator[Entry]:
    """The entries among which a name may stand once: [tensors] and [optional] are one in that."""
    for one in RULES if section in RULES else (section,):
        yield from sections.of(one)


def _identity(section: str, key: str) -> str:
    return key.partition("[")[0].strip() if section in (*RULES, "inputs", "make", "probes", "rest") else key


def _sources(rule: Body) -> tuple[str, ...]:
    value = rule["source"].value if "source" in rule else ()
    texts = value if isinstance(value, list) else [value]
    return tuple(_identity("tensors", str(text)) for text in texts)


def _takes_away(rule: Body) -> bool:
    return "target" in rule and rule["target"].value is False


def _idle(child: Sections, parent: Sections) -> Iterator[Fault]:
    """A fault for each ``false`` that takes nothing away."""
    for section, body in child.entries.items():
        known = {_identity(section, one.key): None for one in _alike(parent, section)}
        for entry in body.values():
            if entry.value is False and section not in PLAIN and _identity(section, entry.key) not in known:
                message = f"{entry.key!r} = false takes nothing away: no extended table has it in [{section}]"
                hint = nearest(_identity(section, entry.key), list(known))
                yield Fault(code=Code.UNKNOWN_KEY, where=entry.at(), message=message, hint=hint)
    rules = {_sources(rule) for rule in parent.rules}
    for rule in child.rules:
        if _takes_away(rule) and _sources(rule) not in rules:
            message = "target = false takes nothing away: no extended table has a [[rule]] with these sources"
            yield Fault(code=Code.UNKNOWN_KEY, where=rule["target"].at(), message=message)


def _swapped(child: Sections, parent: Sections, key: str) -> Swap:
    old = parent.word("mapping", key)
    return old, child.word("mapping", key) if key in child.entries.get("mapping", {}) else old


def _respell(entry: Entry, section: str, source: Swap, target: Swap) -> Entry:
    """An entry of the extended table under the prefixes of the one that extends it."""
    match section:
        case "tensors" | "optional" | "probes" | "rest":
            return replace(entry, key=_swap(entry.key, source), value=_each(entry.value, target))
        case "drop":
            return replace(entry, key=_swap(entry.key, source), value=_equal(entry.value, source))
        case "ties":
            return replace(entry, key=_swap(entry.key, target), value=_each(entry.value, target))
        case "fresh" | "make":
            return replace(entry, key=_swap(entry.key, target))
        case "architectures" if isinstance(entry.value, dict):
            return replace(entry, value={**entry.value, "holds": _each(entry.value.get("holds", []), source)})
    return entry


def _equal(value: object, swap: Swap) -> object:
    """The tensor that a dropped one equals, under the other prefix; a reason is left as it is."""
    if isinstance(value, dict):
        return {key: _each(one, swap) if key == "equals" else one for key, one in value.items()}
    if isinstance(value, str) and value.startswith("equals "):
        return f"equals {_swap(value.removeprefix('equals '), swap)}"
    return value


def _each(value: object, swap: Swap) -> object:
    if isinstance(value, list):
        return [_each(one, swap) for one in value]
    return _swap(value, swap) if isinstance(value, str) else value


def _swap(text: str, swap: Swap) -> str:
    old, new = swap
    return new + text[len(old) :] if old and text.startswith(old) else text

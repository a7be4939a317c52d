"""``docs/families.md``, written from the tables: what each family becomes, and what it must not be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from porting.notation.axes import leaves
from porting.notation.extends import SHIPPED, gather
from porting.notation.rule import Rule
from porting.notation.sections import Entry
from porting.notation.table import Table, read_table
from porting.ops import CONSTANTS
from porting.tables import shipped

INTO = "_into_"
"""What stands between family and module in the name of a table for a module that is not the family's first."""

_HEAD = """\
# Families and modules

A *family* is what HuggingFace calls a model type. A *module* on this page is a handwritten architecture in `models/`.
The table `mappings/FAMILY.toml` loads a family into the module that `porting.load(checkpoint)` chooses;
`FAMILY_into_MODULE.toml` loads it into another one: `porting.load(checkpoint, table="FAMILY_into_MODULE")`.

`python -m scripts.families --write` generates this page from the tables. `make families` proves every pair on small
random checkpoints: [verification.md](verification.md) explains the proof, [notation.md](notation.md) the tables.
"""

_REFUSED = """\
## Checkpoints that are refused

The table is compared with the checkpoint before any weight is read, and all faults are reported at once
([errors.md](errors.md) explains each).

- **A tensor is missing.** Every tensor that a rule outside of `[optional]` reads must exist: a checkpoint without
  biases of query, key and value, or without a norm on the embeddings, cannot fill a module that has them.
- **A tensor is left over.** A tensor that no rule reads and no `[drop]` names is an error. It is never skipped.
- **Tied tensors differ.** A tensor that is left out because it equals another is compared with it first, bit for bit.
- **The config has a value that the module cannot compute**: see *Required of the config* below.
- **Same tensors, different computation.** A norm that divides by the unbiased standard deviation has the same names and
  shapes as one that does not. No table can detect this; [the proof](verification.md) does.
"""


def tables() -> list[Table]:
    """Every shipped table; a family's default table comes first."""
    found = [read_table(path) for path in shipped()]
    return sorted(found, key=lambda table: (family(table), table.name))


def family(table: Table) -> str:
    """The family that a table loads."""
    return table.name.partition(INTO)[0]


def modules(found: Iterable[Table]) -> dict[str, str]:
    """The module that each table fills, by the table's name.

    It is the file in ``models/`` of the table's first class.  Where several tables fill one file in different ways, the
    constructor arguments that differ follow in brackets.
    """
    files: dict[str, list[Table]] = {}
    for table in found:
        files.setdefault(_file(table.architectures[0].target), []).append(table)
    names = {}
    for file, members in files.items():
        values: dict[str, set[object]] = {}
        for table in members:
            for argument, value in table.constants.items():
                values.setdefault(argument, set()).add(value)
        telling = [one for one, seen in values.items() if len(seen) > 1 and all(isinstance(each, str) for each in seen)]
        for table in members:
            ways = [str(table.constants[one]) for one in telling if one in table.constants]
            names[table.name] = f"{file} ({', '.join(ways)})" if ways else file
    return names


def page() -> str:
    """The whole page."""
    found = tables()
    where = modules(found)
    parts = [_HEAD, "\n".join(_overview(found, where)) + "\n", _REFUSED]
    parts += ["\n".join(_section(table, where[table.name])) + "\n" for table in found]
    return "\n".join(parts)


def _overview(found: Sequence[Table], where: Mapping[str, str]) -> Iterator[str]:
    yield "| family | table | module | architectures | rules | folded or scaled |"
    yield "|---|---|---|---|---|---|"
    for table in found:
        kinds = Counter(one for rule in table.rules for one in _inexact(rule))
        cells = (
            family(table),
            f"[`{table.name}`](#{table.name})",
            where[table.name],
            str(len(table.architectures)),
            str(len(table.rules)),
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none",
        )
        yield f"| {' | '.join(cells)} |"


def _inexact(rule: Rule) -> Iterator[str]:
    yield from (kind.done for kind in rule.operations)


def _section(table: Table, module: str) -> Iterator[str]:
    yield f"## {table.name}"
    yield ""
    yield f"{table.description}."
    yield ""
    for paragraph in _leading_comment(SHIPPED / table.where):
        yield paragraph
        yield ""
    optional = sum(rule.optional for rule in table.rules)
    count = f"{len(table.rules)}" + (
        f", {optional} of them for parts that not every checkpoint or module has" * bool(optional)
    )
    file = _file(table.architectures[0].target)
    yield f"- **Module:** [{module}](../models/{file}.py), {_chosen(table)}."
    yield f"- **Rules:** {count}."
    yield from _item("Made with", (f"`{name} = {_value(value)}`" for name, value in table.constants.items()), join=", ")
    yield from _item("Counted otherwise", _shifted(table))
    yield from _item(
        "Architectures",
        (f"{architecture.name} → `{_short(architecture.target)}`" for architecture in table.architectures),
    )
    yield from _item(
        "Folded, a number among the axes being the row that is taken",
        (_rule(rule) for rule in table.rules if rule.fold),
    )
    for kind in CONSTANTS.values():
        spelled = ((rule, dict(rule.constants).get(kind)) for rule in table.rules)
        numbers = ((rule, number) for rule, number in spelled if number is not None)
        entries = (f"{_rule(rule)}, {kind.preposition} `{number}`" for rule, number in numbers)
        yield from _item(kind.done.capitalize(), entries)
    yield from _item("Cut off", _cut(table))
    yield from _item("Dropped, after proof that nothing is lost", _copies(table))
    yield from _item("Dropped where the module does not have it", _dropped(table))
    yield from _item("New, if the caller allows it", (f"`{one.name}`: {one.reason}" for one in table.fresh))
    yield from _item("Required of the config, or it cannot be loaded", _required(table))


def _item(title: str, entries: Iterable[str], join: str = "") -> Iterator[str]:
    """A point of a list with its entries in a list of their own, or on one line; nothing when there are none."""
    found = list(entries)
    if found and (join or len(found) == 1):
        yield f"- **{title}:** {join.join(found)}."
    elif found:
        yield f"- **{title}:**"
        yield from (f"  - {one}" for one in found)


def _chosen(table: Table) -> str:
    if table.by_name or not table.model_types:
        return f'if asked for, `table="{table.name}"`'
    return "chosen by `model_type` " + " or ".join(f'`"{one}"`' for one in table.model_types)


def _shifted(table: Table) -> Iterator[str]:
    for name, shift in table.shifts.items():
        yield f"`{name}` of the config is the module's `{table.config[name]} {'-' if shift < 0 else '+'} {abs(shift)}`"


def _rule(rule: Rule) -> str:
    return f"{' + '.join(f'`{term}`' for term in rule.sources)} → {' + '.join(f'`{term}`' for term in rule.targets)}"


def _cut(table: Table) -> Iterator[str]:
    for rule in table.rules:
        for term in rule.sources:
            parts = [f"`{leaf}`" for leaf in leaves(term.axes or ()) if leaf.startswith("_")]
            if parts:
                back = "is never made up" if rule.fill is None else f"is {rule.fill:g} where no checkpoint is followed"
                yield f"{' and '.join(parts)} of `{term}`; on the way back it {back}"


def _copies(table: Table) -> Iterator[str]:
    for drop in table.drops:
        if drop.equals is not None:
            said = f"equals `{drop.equals}`"
            yield f"`{drop.name}`: {said}" + (f", {drop.reason}" * (drop.reason != f"equals {drop.equals}"))


def _dropped(table: Table) -> Iterator[str]:
    for drop in table.drops:
        if drop.equals is None:
            yield f"`{drop.name}`: {drop.reason}"


def _required(table: Table) -> Iterator[str]:
    sections = gather(SHIPPED / table.where)
    for entry in sections.of("require"):
        values = " or ".join(f"`{_value(one)}`" for one in table.require[entry.key])
        why = _comment(entry)
        yield f"`{entry.key}` is {values}" + (f": {why}" if why else "")


def _comment(entry: Entry) -> str:
    """The comment behind an entry, where the entry ends on its line."""
    file, line, _ = entry.at().rsplit(":", 2)
    text = (SHIPPED / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    found = re.fullmatch(r"[^#\"']*(?:(?:\"[^\"]*\"|'[^']*')[^#\"']*)*# *(.*)", text)
    return found.group(1) if found else ""


def _leading_comment(path: Path) -> list[str]:
    """The paragraphs of the comment at the head of a file."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return [" ".join(part.split()) for part in "\n".join(lines).split("\n\n")]


def _file(target: str) -> str:
    return target.partition(":")[0].rpartition(".")[2]


def _short(target: str) -> str:
    return f"{_file(target)}.{target.partition(':')[2]}"


def _value(value: object) -> str:
    return {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else str(value)

"""A table as a person would have written it, with a word where something was decided by proof."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from porting.notation.name import LONGEST, may_stand, spelled
from porting.suggesting.draft.layer_patterns import Line, name_pattern
from porting.suggesting.search.matrix_candidates import UNSEEN
from porting.suggesting.search.name_similarity import numbered
from porting.suggesting.search.search_result import GUESS
from porting.suggesting.search.search_state import COMPUTED, UNRUN


@dataclass(frozen=True, kw_only=True)
class TableDraft:
    """The parts of a table.

    Attributes:
        name, description: what it is called and one line about it.
        head: comments for its beginning.
        prefix: what names of the trunk may begin with.
        config: checkpoint field -> what the builder calls it.
        defaults: fields that ``config.json`` does not have, with what that means.
        require: fields whose other values the module cannot represent.
        sizes: index -> expression.
        drops: pattern -> reason, or ``equals ...``.
        copies: dropped tensor -> what it equals.
        ties: tied name -> the name that is written.
        makes: name -> what it holds, of what the checkpoint does not have.
        fresh: name -> reason.
        inputs, probes: lines of these sections.
        constants: arguments of the builder that no field gives, with their values.
        arguments: forward arguments that no input stands for, with their values.
        returned: more lines of [probes], for what the module returns, where that is several tensors.
        approximate: why the module is not quite the reference, and how far it may be off; nothing for most.
    """

    name: str
    description: str
    head: Sequence[str] = ()
    prefix: str = ""
    config: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    require: Mapping[str, Sequence[object]] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    lines: Sequence[Line] = ()
    drops: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    makes: Mapping[str, str] = field(default_factory=dict)
    fresh: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[tuple[str, str]] = ()
    constants: Mapping[str, object] = field(default_factory=dict)
    arguments: Mapping[str, object] = field(default_factory=dict)
    probes: Sequence[tuple[str, str]] = ()
    returned: Sequence[tuple[str, str]] = ()
    approximate: tuple[str, float] | None = None


_TURNED = "# padding: the module's mask is 1 or True where the checkpoint's is 0, at what is not to be attended to"


_NEUTRAL = "# parameters that the checkpoint does not have: copies of others, or values with which they change nothing"


def quoted(text: str) -> str:
    """A text as TOML writes it; half of a surrogate pair, as in the name of a file that is not text, is written out."""
    text = text.encode(errors="backslashreplace").decode()
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def write(draft: TableDraft) -> str:
    """The table's text."""
    parts: list[list[str]] = [[f"# {line}".rstrip() for line in draft.head]]
    mapping = [f"name = {quoted(draft.name)}", f"description = {quoted(draft.description)}"]
    mapping += [f"prefix = {quoted(draft.prefix)}"] if draft.prefix else []
    parts.append(["[mapping]", *mapping])
    parts.append(_section("config", ((_key(theirs), quoted(ours)) for theirs, ours in draft.config.items())))
    parts.append(_section("defaults", ((name, _plain(value)) for name, value in draft.defaults.items())))
    parts.append(_section("constants", ((name, _plain(value)) for name, value in draft.constants.items())))
    built_in = ((_key(name), f"[{', '.join(map(_plain, values))}]") for name, values in draft.require.items())
    parts.append(_section("require", built_in, "# written into the module, whatever a config says"))
    if draft.approximate is not None:
        reason, within = draft.approximate
        parts.append(["[approximate]", f"reason = {quoted(reason)}", f"within = {within!r}"])
    parts.append(_section("sizes", ((name, quoted(text)) for name, text in draft.sizes.items())))
    short, rules = _by_form(draft.lines)
    parts.append(_tensors(short))
    parts += [_rule(line) for line in rules]
    left = [(quoted(name), quoted(reason)) for name, reason in draft.drops.items()]
    left += [(quoted(name), quoted(f"equals {other}")) for name, other in draft.copies.items()]
    parts.append(_section("drop", left))
    parts.append(_section("ties", ((quoted(name), quoted(other)) for name, other in draft.ties.items())))
    parts.append(_section("make", ((quoted(name), quoted(word)) for name, word in draft.makes.items()), _NEUTRAL))
    parts.append(_section("fresh", ((quoted(name), quoted(reason)) for name, reason in draft.fresh.items())))
    parts.append(_section("arguments", ((name, _plain(value)) for name, value in draft.arguments.items())))
    for section, pairs, comment in (
        ("inputs", draft.inputs, _TURNED if any("-> padding" in ours for _, ours in draft.inputs) else ""),
        (
            "probes",
            (*draft.probes, *draft.returned),
            "# the activations that are compared, in the order of the reference",
        ),
    ):
        parts.append(_section(section, _by_source(pairs), comment))
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _section(name: str, pairs: Iterable[tuple[str, str]], comment: str = "") -> list[str]:
    lines = [f"{key} = {value}" for key, value in pairs]
    return [f"[{name}]", *([comment] if comment else []), *lines] if lines else []


def _by_source(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Each source once, with a list where it goes to several targets."""
    targets: dict[str, list[str]] = {}
    for theirs, ours in pairs:
        targets.setdefault(theirs, []).append(quoted(ours))
    for theirs, some in targets.items():
        yield quoted(theirs), some[0] if len(some) == 1 else f"[{', '.join(some)}]"


def _key(name: str) -> str:
    """A field's name as TOML's key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else quoted(name)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, int | float) else quoted(str(value))


def _by_form(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """The lines of [tensors], and those that have to be rules of their own: a source may stand in [tensors] once.

    A line that stands there twice is written once.
    """
    short: dict[str, Line] = {}
    rules: dict[tuple[object, ...], Line] = {}
    for line in lines:
        left = _term(line.sources[0])
        if line.short and (left not in short or short[left].targets == line.targets):
            short.setdefault(left, line)
        else:
            rules.setdefault((line.sources, line.targets, line.fold, line.fill), line)
    return [*short.values()], [*rules.values()]


def _tensors(lines: Sequence[Line]) -> list[str]:
    if not lines:
        return []
    return ["[tensors]", *(f"{_side(line.sources)} = {_side(line.targets)}{_mark(line)}" for line in lines)]


def _side(terms: Sequence[tuple[str, str]]) -> str:
    texts = [quoted(_term(one)) for one in terms]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _rule(line: Line) -> list[str]:
    found = [f"[[rule]]{_mark(line)}", f"source = {_side(line.sources)}"]
    found.append(f"target = {_side(line.targets)}")
    found += [
        f"{key} = {text if re.fullmatch('-?[0-9]+', text) else quoted(text)}" for key, text in line.constants.items()
    ]
    found += ["fold = true"] if line.fold else []
    return found + ([f"fill = {line.fill}"] if line.fill is not None else [])


def _mark(line: Line) -> str:
    """The evidence for a line, as a comment where it is not obvious."""
    if line.why in {GUESS, UNSEEN, COMPUTED, UNRUN}:
        return f"  # {line.why}"
    return f"  # by {line.why}" if line.proven else ""


def _term(term: tuple[str, str]) -> str:
    name, axes = term
    return f"{name} [{axes}]" if axes else name


def patterns(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """A few patterns that these names match and none of the others does.

    >>> patterns(["h.0.mask", "h.1.mask", "pool.weight", "pool.bias"], ["h.0.w", "h.1.w"])
    ['h.{i}.mask', 'pool.{*rest}']
    >>> patterns(["h.0.mlp.up.w", "h.0.mlp.up.b", "h.1.mlp.up.w", "h.1.mlp.up.b"], ["h.0.mlp.w", "h.1.mlp.w"])
    ['h.{i}.mlp.up.{*rest}']
    """
    kept = list(others)
    found: list[str] = []
    left = list(names)
    while left:
        chosen, alike = spelled(left[0]), [left[0]]
        for text in _patterns(chosen):
            shape = name_pattern(text)
            some = [one for one in left if shape.fullmatch(one)]
            if len(some) > 1 and not any(shape.fullmatch(one) for one in kept):
                chosen, alike = text, some
                break
        found.append(chosen)
        left = [one for one in left if one not in alike]
    return found


def dropped(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """Patterns as of :func:`patterns`, for names with any characters: a checkpoint's own, which no model has.

    A name that a table cannot spell is matched by what it begins with; without such a pattern it is left out.

    >>> dropped(["brace{i}", "with space", "h.{w:a,b}", "{i}", "pool"], ["h.0", "w"])
    ['pool', 'brace{*rest}', 'with{*rest}']
    """
    begins = {name: "".join(takewhile(may_stand, name))[: LONGEST - len(REST)] for name in names}
    plain = [name for name in names if begins[name] == name]
    others = [*others]
    found = patterns(plain, others)
    good: list[str] = []
    for begin in sorted({begin for name, begin in begins.items() if begin and begin != name}):
        shorter = any(begin.startswith(one) for one in good)
        if not shorter and not any(one.startswith(begin) for one in (*others, *plain)):
            good.append(begin)
    return [*found, *(f"{begin}{REST}" for begin in good)]


REST = "{*rest}"
"""The placeholder that matches whatever is left of a name."""


def _patterns(name: str) -> Iterator[str]:
    """Patterns that a name may match: all below a prefix of it, the shortest first; then all that differ in a number.

    Numbers are an index of their own each; if that is too much, they stay as they are.
    """
    parts = name.split(".")
    for count in range(1, len(parts)):
        stem = parts[:count]
        yield f"{numbered('.'.join(stem))}.{{*rest}}"
        yield ".".join([*stem, "{*rest}"])
    yield numbered(name)
    first = next((one for one in re.finditer(r"\{[^{}]*\}|\d+", name) if one.group().isdigit()), None)
    if first is not None:
        yield f"{name[: first.start()]}{{i}}{name[first.end() :]}"

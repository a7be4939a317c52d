"""A table as transformers' list of ``WeightRenaming`` and ``WeightConverter``.

Names are translated; the operations are found by trying transformers' own on small random tensors, forwards and
backwards.  In the end the whole list is applied to the names and tensors of all rules: what is given back does what the
table does.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from porting.limits import reading
from porting.notation.axes import leaves
from porting.notation.name import Decimal, Literal, Name
from porting.notation.rule import Rule
from porting.notation.table import Table
from porting.registries.conversions import module, sorted_transforms
from porting.registries.samples import Parts, Sample, sample, strays, unrolled, untranslated

INTO = "transformers' list"

Operation = tuple[str, tuple[tuple[str, object], ...]]
"""An operation of transformers, and its arguments."""


@dataclass(frozen=True)
class Entry:
    """An entry of the list.

    Attributes:
        operations: of a converter; none for a renaming.
        equal: its reverse cuts into parts of one size.
    """

    rule: Rule
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    equal: bool = False

    def made(self) -> Any:
        """The object of transformers."""
        core = module("core_model_loading")
        if not self.operations:
            return core.WeightRenaming(source_patterns=self.sources[0], target_patterns=self.targets[0])
        made = [getattr(core, name)(**dict(arguments)) for name, arguments in self.operations]
        return core.WeightConverter([*self.sources], [*self.targets], operations=made)

    def __str__(self) -> str:
        if not self.operations:
            return f'WeightRenaming(source_patterns=r"{self.sources[0]}", target_patterns=r"{self.targets[0]}")'
        made = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given)})" for name, given in self.operations]
        patterns = [", ".join(f'r"{one}"' for one in side) for side in (self.sources, self.targets)]
        remark = "  # reversed, it cuts into parts of one size" if self.equal else ""
        return (
            f"WeightConverter({remark}\n        source_patterns=[{patterns[0]}],\n"
            f"        target_patterns=[{patterns[1]}],\n        operations=[{', '.join(made)}],\n    )"
        )


@reading()
def as_weight_converters(table: Table) -> str:
    r"""A table as Python source of transformers' list of conversions.

    Args:
        table: any table whose rules move elements in ways that transformers has operations for.

    Returns:
        Python source that assigns the list to ``conversions``.

    >>> from porting import parse_table
    >>> print(as_weight_converters(parse_table('[tensors]\n"h.{i}.ln.weight" = "layers.{i}.norm.weight"')))
    from transformers.core_model_loading import WeightRenaming
    <BLANKLINE>
    conversions = [
        WeightRenaming(source_patterns=r"^h\.(\d+)\.ln\.weight", target_patterns=r"layers\.\1\.norm\.weight"),
    ]
    """
    if table.makes:
        raise untranslated(
            table.makes[0].term, table.makes[0].where, INTO, "a tensor of [make] has no name in the file"
        )
    samples: list[Sample] = []
    entries: list[Entry] = []
    for rule in table.rules:
        found, tried = _translated(table, rule)
        entries += found
        samples.append(tried)
    entries = list(dict.fromkeys(entries))
    for rule, source, target in strays(table):
        value = torch.randn(2, 3, dtype=torch.float64)
        samples.append(Sample(rule=rule, sources={source: value}, targets={target: value}, config={}))
    _require_same(entries, samples)
    names = {"WeightConverter" if one.operations else "WeightRenaming" for one in entries}
    names |= {name for one in entries for name, _ in one.operations}
    lines = [f"    {one}," for one in entries]
    return "\n".join(
        [
            *([f"from transformers.core_model_loading import {', '.join(sorted(names))}", ""] if names else []),
            "conversions = [",
            *lines,
            "]",
        ]
    )


def _translated(table: Table, rule: Rule) -> tuple[list[Entry], Sample]:
    """The entries for one rule, and tensors that it was tried on."""
    terms = (*rule.sources, *rule.targets)
    if any(index.startswith("_") for term in terms for index in leaves(term.axes or ())):
        raise untranslated(rule, rule.where, INTO, "no operation leaves elements out")
    if rule.operations:
        raise untranslated(rule, rule.where, INTO, "operations of transformers compute nothing")
    entries: list[Entry] = []
    tried = sample(table, rule, into=INTO)
    for sources, targets in unrolled(rule):
        if len(sources) == len(targets) == 1 and (rule.sources[0].axes == rule.targets[0].axes):
            entries += _renaming(rule, sources[0], targets[0])
            continue
        found = _converter(rule, sources, targets, tried)
        if found is None:
            tried = sample(table, rule, into=INTO, equal=True)
            found = _converter(rule, sources, targets, tried)
            found = None if found is None else [replace(one, equal=bool(one.operations)) for one in found]
        if found is None:
            message = "no operations of transformers do it in both directions"
            raise untranslated(rule, rule.where, INTO, message, "use the table with porting.convert")
        entries += found
    return entries, tried


def _renaming(rule: Rule, source: Parts, target: Parts) -> list[Entry]:
    """The renaming of one name to another; none where they are the same."""
    if source == target:
        return []
    for part in (*source, *target):
        if isinstance(part, Decimal) and (part.factor != 1 or part.width or part.high is not None):
            raise untranslated(rule, rule.where, INTO, f"{part} is not a plain number")
    ours, theirs = _stretch(source), _stretch(target)
    if str(Name(ours[1])) != str(Name(theirs[1])):
        message = "a renaming keeps one stretch of a name, and the text between its numbers or their order changes"
        raise untranslated(rule, rule.where, INTO, message)
    kept = "".join(re.escape(part.text) if isinstance(part, Literal) else r"\d+" for part in ours[1])
    group, mark = (f"({kept})", r"\1") if kept else ("", "")
    pattern = f"^{_escaped(ours[0])}{group}{_escaped(ours[2])}"
    return [Entry(rule, (pattern,), (f"{_escaped(theirs[0])}{mark}{_escaped(theirs[2])}",))]


def _stretch(parts: Parts) -> tuple[str, Parts, str]:
    """A name as the text before its first number, what goes on to its last, and the text behind."""
    places = [place for place, part in enumerate(parts) if isinstance(part, Decimal)]
    plain = [part.text if isinstance(part, Literal) else "" for part in parts]
    if not places:
        return "".join(plain), (), ""
    first, last = places[0], places[-1] + 1
    return "".join(plain[:first]), parts[first:last], "".join(plain[last:])


def _escaped(text: str) -> str:
    return re.escape(text).replace(r"\-", "-").replace(r"\_", "_")


def _converter(rule: Rule, sources: Sequence[Parts], targets: Sequence[Parts], tried: Sample) -> list[Entry] | None:
    """The converter of a rule and the renamings that it needs before; None where no operations do it."""
    outer = set(rule.outer)
    heads = {str(Name(_head(one, outer))) if _head(one, outer) else "" for one in targets}
    if len(heads) > 1:
        raise untranslated(rule, rule.where, INTO, "its targets differ before their last number")
    entries: list[Entry] = []
    patterns: list[str] = []
    for one in sources:
        tail = one[len(_head(one, outer)) :]
        entries += _renaming(rule, one, (*_head(targets[0], outer), *tail))
        patterns.append(_tail(rule, tail))
    ends = [_tail(rule, one[len(_head(one, outer)) :]) for one in targets]
    if len(patterns) > 1 and len(ends) > 1:
        raise untranslated(rule, rule.where, INTO, "no operation of transformers makes several tensors of several")
    for operations in _chains(len(patterns), len(ends), any("*" in one for one in (*patterns, *ends))):
        entry = Entry(rule, tuple(patterns), tuple(ends), operations)
        if _holds([*entries, entry], [tried]) is None:
            return [*entries, entry]
    return None


def _head(parts: Parts, outer: set[str]) -> Parts:
    """A name up to its last number that all names of its rule have."""
    places = [place for place, part in enumerate(parts) if isinstance(part, Decimal) and part.index in outer]
    return parts[: places[-1] + 1] if places else ()


def _tail(rule: Rule, parts: Parts) -> str:
    """The end of a name as a pattern of a converter."""
    for part in parts:
        if isinstance(part, Decimal) and (part.shift or part.factor != 1 or part.width or part.high is not None):
            raise untranslated(rule, rule.where, INTO, f"{part} does not count from 0")
    return "".join(part.text if isinstance(part, Literal) else "*" for part in parts).removeprefix(".")


DIMENSIONS = 4
"""Axes that operations are tried on."""


def _chains(sources: int, targets: int, counted: bool) -> Iterator[tuple[Operation, ...]]:  # private
    """Operations that may turn so many patterns into so many, the simple ones first."""
    every = range(DIMENSIONS)

    def along(name: str) -> list[tuple[Operation, ...]]:
        return [((name, (("dim", dim),)),) for dim in every]

    base: list[tuple[Operation, ...]] = [()]
    if counted:
        name = "MergeModulelist" if targets == 1 else "SplitModulelist"
        base = [(*one, *more) for one in base for more in along(name)]
    if sources > 1:
        base = [(*one, *more) for one in base for more in along("Concatenate")]
    if targets > 1:
        base = [(*one, *more) for one in base for more in along("Chunk")]
    swaps: list[Operation] = [("Transpose", (("dim0", one), ("dim1", two))) for one, two in combinations(every, 2)]
    mixed: list[Operation] = [
        ("Interleave", (("dim", dim), ("inverse", way))) for dim in every for way in (False, True)
    ]
    mixed += [("PermuteForRope", (("inverse", way),)) for way in (False, True)]
    yield from (one for one in base if one)
    extras = [(one,) for one in (*swaps, *mixed)] + [(one, two) for one in swaps for two in swaps if one != two]
    for one, extra in product(base, extras):
        if sources == 1 and not counted:
            yield (*extra, *one)
        if targets == 1 and one:
            yield (*one, *extra)


def _require_same(entries: Sequence[Entry], samples: Sequence[Sample]) -> None:
    """See that the list does what the table does, in both directions."""
    wrong = _holds(entries, samples)
    if wrong is not None:
        rule, message = wrong
        raise untranslated(rule, rule.where, INTO, message, "use the table with porting.convert")


def _holds(entries: Sequence[Entry], samples: Sequence[Sample]) -> tuple[Rule, str] | None:
    """The first rule for which the list does something else, and what; None where there is none."""
    try:
        made = [one.made() for one in entries]
    except Exception as error:  # noqa: BLE001  # transformers refuses patterns in its own ways
        return entries[0].rule, str(error)
    config = SimpleNamespace(**{name: value for one in samples for name, value in one.config.items()})
    model = SimpleNamespace(config=config, _weight_conversions=made)
    sources = {name: value for one in samples for name, value in one.sources.items()}
    wanted = {name: value for one in samples for name, value in one.targets.items()}
    core = module("core_model_loading")
    for given, expected, way, run in (
        (sources, wanted, "forwards", lambda: _loaded(made, sources, model)),
        (wanted, sources, "backwards", lambda: core.revert_weight_conversion(model, dict(wanted))),
    ):
        try:
            found: Mapping[str, Tensor] = run()
        except Exception as error:  # noqa: BLE001  # its operations fail in their own ways
            return samples[0].rule, f"{way} it fails: {type(error).__name__}: {error}"
        for one in samples:
            for name in one.targets if given is sources else one.sources:
                if name not in found or not torch.equal(found[name], expected[name]):
                    return one.rule, f"with all rules together, {name!r} does not come out {way}"
    return None


def _loaded(made: Sequence[Any], tensors: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Apply the conversions to tensors, in the order in which transformers reads them."""
    core = module("core_model_loading")
    renamings, converters, of_pattern = sorted_transforms([copy.deepcopy(one) for one in made])
    begun: dict[str, Any] = {}
    found: dict[str, Tensor] = {}
    for name in sorted(tensors, key=core.dot_natural_key):
        key, pattern = core.rename_source_key(name, renamings, converters)
        if pattern is None:
            found[key] = tensors[name]
        else:
            begun.setdefault(key, copy.deepcopy(of_pattern[pattern])).add_tensor(key, name, pattern, tensors[name])
    for key, converter in begun.items():
        made_of = converter.convert(key, model=model, config=model.config)
        found |= {name: one[0] if isinstance(one, list) else one for name, one in made_of.items()}
    return found

"""A table as vLLM's ``WeightsMapper``: parts of names that are replaced, at the front, in the middle and at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from porting.limits import reading
from porting.notation.name import Decimal, Literal, Name
from porting.notation.rule import Rule
from porting.notation.table import Drop, Table
from porting.registries.samples import COUNTED, Parts, spelled, strays, unrolled, untranslated

INTO = "vLLM's WeightsMapper"


@dataclass(frozen=True)
class Mapper:
    """The three dictionaries; of each every entry is applied, in order, the middle first, then the front, then the end.

    Attributes:
        substr, prefix, suffix: what is replaced where; None drops the tensor.
    """

    substr: dict[str, str | None] = field(default_factory=dict)
    prefix: dict[str, str | None] = field(default_factory=dict)
    suffix: dict[str, str | None] = field(default_factory=dict)

    def renamed(self, name: str) -> str | None:
        """The new name; None if the tensor is dropped."""
        for part, new in self.substr.items():
            if part in name:
                if new is None:
                    return None
                name = name.replace(part, new, 1)
        for part, new in self.prefix.items():
            if name.startswith(part):
                if new is None:
                    return None
                name = new + name.removeprefix(part)
        for part, new in self.suffix.items():
            if name.endswith(part):
                if new is None:
                    return None
                name = name.removesuffix(part) + new
        return name


@reading()
def as_weights_mapper(table: Table) -> str:
    r"""A table as Python source of a ``WeightsMapper``.

    Args:
        table: its rules rename tensors and leave their elements as they are.

    Returns:
        Python source that assigns it to ``hf_to_vllm_mapper``.

    >>> from porting import parse_table
    >>> print(as_weights_mapper(parse_table('[tensors]\n"h.{i}.ln.weight" = "layers.{i}.norm.weight"')))
    from vllm.model_executor.models.utils import WeightsMapper
    <BLANKLINE>
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "h.": "layers.",
        },
        orig_to_new_suffix={
            ".ln.weight": ".norm.weight",
        },
    )
    """
    mapper = Mapper()
    for rule in table.rules:
        _add(mapper, rule)
    drops = [drop for drop in table.drops if not _is_read(table, drop.name)]
    for drop in drops:
        _add_drop(mapper, drop)
    if table.makes:
        raise untranslated(
            table.makes[0].term, table.makes[0].where, INTO, "a tensor of [make] has no name in the file"
        )
    for rule, source, target in (*_pairs(table), *strays(table)):
        if (found := mapper.renamed(source)) != target:
            message = f"with the entries of the other rules {source!r} becomes {found!r}"
            raise untranslated(rule, rule.where, INTO, message, f"expected {target!r}")
    for drop in drops:
        if any(mapper.renamed(name) is not None for name in _spelled(drop.name)):
            message = "with the entries of the rules it is renamed before it is dropped"
            raise untranslated(drop.name, drop.where, INTO, message)
    entries: list[str] = []
    for name, mapping in (("substr", mapper.substr), ("prefix", mapper.prefix), ("suffix", mapper.suffix)):
        if mapping:
            entries += [f"    orig_to_new_{name}={{", *(f"        {one}," for one in _lines(mapping)), "    },"]
    head = ["from vllm.model_executor.models.utils import WeightsMapper", "", "hf_to_vllm_mapper = WeightsMapper("]
    return "\n".join([*head, *entries, ")"])


def _pairs(table: Table) -> Iterator[tuple[Rule, str, str]]:
    """Each rule with names that it reads, and what they become."""
    for rule in table.rules:
        sizes = dict.fromkeys(rule.sources[0].name.indices, COUNTED)
        sides = zip(spelled(rule, rule.sources[0], sizes), spelled(rule, rule.targets[0], sizes), strict=True)
        yield from ((rule, source, target) for source, target in sides)


def _is_read(table: Table, name: Name) -> bool:
    """Whether a rule reads a name that is dropped: it is dropped only where the module does not have it."""
    sizes = {index: COUNTED for rule in table.rules for index in rule.sources[0].name.indices}
    return any(name.read(one) is not None for rule in table.rules for one in spelled(rule, rule.sources[0], sizes))


def _spelled(name: Name) -> list[str]:
    """Names that a pattern reads, all of its spellings with the same numbers."""
    ranges = [range(name.enumerations.get(index, 1)) for index in name.indices]
    every = [dict(zip(name.indices, values, strict=True)) for values in product(*ranges)]
    return [name.spell({index: value for index, value in one.items() if index != name.rest}) for one in every]


def _add_drop(mapper: Mapper, drop: Drop) -> None:
    """The entries of a tensor that is dropped."""
    last = drop.name.parts[-1]
    if not any(isinstance(part, Decimal) for part in drop.name.parts):
        mapper.prefix.update(
            {name.removesuffix(str(last)) if drop.name.rest else name: None for name in _spelled(drop.name)}
        )
    elif isinstance(last, Literal):
        mapper.suffix[last.text] = None
    else:
        raise untranslated(drop.name, drop.where, INTO, "a name with numbers that is dropped ends with text")


def _lines(mapping: Mapping[str, str | None]) -> list[str]:
    return [f"{json.dumps(part)}: {'None' if new is None else json.dumps(new)}" for part, new in mapping.items()]


def _add(mapper: Mapper, rule: Rule) -> None:
    """The entries of one rule."""
    where = rule.where
    if rule.operations or rule.fill is not None or len(rule.sources) > 1 or len(rule.targets) > 1:
        raise untranslated(rule, where, INTO, "names are replaced, and nothing is computed, joined or cut")
    if rule.sources[0].axes != rule.targets[0].axes:
        raise untranslated(rule, where, INTO, "it does not transpose, fuse or split")
    for sources, targets in unrolled(rule):
        if len(sources) > 1 or len(targets) > 1:
            raise untranslated(rule, where, INTO, "it does not fuse or split")
        _add_name(mapper, rule, sources[0], targets[0])


def _add_name(mapper: Mapper, rule: Rule, source: Parts, target: Parts) -> None:
    """The entries of one name."""
    where = rule.where
    ours, theirs = _apart(source), _apart(target)
    if ours[1] != theirs[1]:
        raise untranslated(rule, where, INTO, "the numbers of a name stay as they are, in their order")
    last = len(ours[0]) - 1
    for place, (one, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if one == other:
            continue
        mapping = mapper.prefix if place == 0 else mapper.suffix if place == last else mapper.substr
        if not one:
            raise untranslated(rule, where, INTO, f"there is nothing in the place of {other!r} to be replaced")
        if mapping.setdefault(one, other) != other:
            raise untranslated(rule, where, INTO, f"another rule replaces {one!r} by {mapping[one]!r}")


def _apart(name: Parts) -> tuple[list[str], list[str]]:
    """The texts of a name, one before each placeholder and one behind the last, and the placeholders."""
    texts, placeholders = [""], list[str]()
    for part in name:
        if isinstance(part, Literal):
            texts[-1] += part.text
        else:
            texts.append("")
            placeholders.append(str(part))
    return texts, placeholders

"""A mapping table, parsed: frozen, typed, and every fault of the file reported at once.

:func:`read_table` reads a file, :func:`parse_table` a text; both give a :class:`Table` or raise one
:class:`~porting.notation.faults.TableError` that lists all faults with file, line and column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from porting.limits import reading
from porting.notation.expression import Expression
from porting.notation.extends import gather
from porting.notation.name import Name
from porting.notation.reading import Reader
from porting.notation.rule import Rule, Term
from porting.notation.sections import Sections
from porting.ops import Content


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model that the table can load into.

    Attributes:
        name: the architecture as ``config.json`` and transformers spell it.
        target: import path of the module, ``package.file:Class``.
        holds: the checkpoint's tensors that show that it was made for this architecture.
    """

    name: str
    target: str
    holds: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Source tensors that are left out on purpose.

    Attributes:
        equals: what they are proven to equal before they are left out: ``"arange"``, ``"zeros"`` or another tensor.
        where: the place in the table.
    """

    name: Name
    reason: str
    equals: Name | None = None
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Two target names that share their storage; the second is the one that is written."""

    name: Name
    with_: Name
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """Target tensors that a checkpoint may lack; they keep the values that the module gives them.

    For parameters, which are then untrained, the caller has to allow it; a buffer is what the module computes anyway.
    """

    name: Name
    reason: str
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Make:
    """Target tensors that no source has and whose content is known.

    Attributes:
        term: their names and, if the table states it, their shape.
        value: what they hold: a word, a number over the config, or the name of the target tensor that they equal.
        where: the place in the table.
        word: what an expression gives the number of, ``"rotary"``; empty where it is the number itself.
    """

    term: Term
    value: Content | Expression | Name
    where: str = ""
    word: str = ""


@dataclass(frozen=True, kw_only=True)
class Approximation:
    """The part of a table that is declared as not exact.

    Attributes:
        reason: why the module cannot compute quite what the checkpoint's model does.
        within: how far its activations may be off in float64, relative to their scale.
    """

    reason: str
    within: float


@dataclass(frozen=True, kw_only=True)
class Table:
    r"""One port.

    Attributes:
        name, description: what it is called and one line about it.
        model_types: the ``model_type`` values of ``config.json`` that it is for; an export writes the first.
        by_name: it is never chosen by them, only asked for.
        architectures: what it can load into, the first being the default.
        approximate: why and how far it is off by intent; None for a table that claims to be exact.
        config_class: import path of the class that the target's constructor takes; empty when there is none.
        prefix, target_prefix: source and target names are matched with or without it.
        config: config field of the checkpoint, as :mod:`porting.notation.field` has it -> the target's config field.
        further: config field of the checkpoint -> more of the target's fields that are given it, ``"dim/width"``.
        shifts: config field of the checkpoint -> how much more it says than the target's, ``"positions + 2"``.
        defaults: what a field that the config lacks means.
        constants: target config fields that every checkpoint of this table shares.
        config_file, weights_file: what the target's library calls its config and its weights; empty for what
            transformers calls them.
        require: config field -> the values under which the table is valid.
        sizes: index -> its size over the config.
        rules: the mapping of tensors.
        drops, ties, fresh: what is left out, shared and newly initialised.
        makes: the target's tensors whose content the table gives.
        inputs, probes: forward arguments and activations, in the same notation.
        arguments: forward arguments that are the same for every batch, by name.
        returned: more probes, of what the models themselves return; no section has them: ``verify`` infers them.
            One of them may read what a probe reads.
        where: the file it was read from.
        digest: SHA-256 of the text, those it extends included.

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> table = porting.parse_table('[mapping]\nname = "mine"\n[tensors]\n"a.{i} [o e]" = "b.{i} [e o]"')
    >>> table.name, str(table.rules[0])
    ('mine', 'a.{i} [o e] = b.{i} [e o]')
    """

    name: str
    description: str = ""
    model_types: tuple[str, ...] = ()
    by_name: bool = False
    architectures: tuple[Architecture, ...] = ()
    approximate: Approximation | None = None
    config_class: str = ""
    prefix: str = ""
    target_prefix: str = ""
    config: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shifts: Mapping[str, int] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    config_file: str = ""
    weights_file: str = ""
    require: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    sizes: Mapping[str, Expression] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    drops: tuple[Drop, ...] = ()
    ties: tuple[Tie, ...] = ()
    fresh: tuple[Fresh, ...] = ()
    makes: tuple[Make, ...] = ()
    inputs: tuple[Rule, ...] = ()
    arguments: Mapping[str, object] = field(default_factory=dict)
    probes: tuple[Rule, ...] = ()
    returned: tuple[Rule, ...] = ()
    where: str = ""
    digest: str = ""

    @property
    def compared(self) -> tuple[Rule, ...]:
        """All activations that are compared."""
        return (*self.probes, *self.returned)

    @property
    def row_inputs(self) -> tuple[str, ...]:
        """Those of them that the module takes one row at a time."""
        return tuple(str(rule.targets[0].name) for rule in self.inputs if rule.by_row)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names by which [inputs] gives tensors to the module's forward."""
        return tuple(str(rule.targets[0].name) for rule in self.inputs)


def read_table(path: str | Path) -> Table:
    """Read a table from a file.

    Raises:
        TableError: the file cannot be read, or the table has faults: all of them.

    >>> from importlib.resources import files
    >>> read_table(str(files("porting.mappings") / "bert.toml")).model_types
    ('bert',)
    """
    with reading():
        return _make(gather(Path(path)))


def parse_table(text: str, *, where: str = "table") -> Table:
    r"""Parse a table from its text; ``where`` names it in messages.

    Raises:
        TableError: the table has faults: all of them.

    >>> print(parse_table('[mapping]\nname = "mine"\n[tensors]\n"a [o e]" = "b [e o]"').rules[0])
    a [o e] = b [e o]
    """
    with reading():
        return _make(gather(text, where=where))


def _make(sections: Sections) -> Table:
    reader = Reader(sections)
    reader.refuse_unknown()
    config, further, shifts = reader.fields()
    approximation = reader.approximation()
    table = Table(
        name=reader.text("mapping", "name", default=Path(sections.where).stem),
        description=reader.text("mapping", "description"),
        model_types=reader.texts("mapping", "model_types"),
        by_name=reader.flag("mapping", "by_name"),
        architectures=tuple(
            Architecture(name=name, target=target, holds=holds) for name, target, holds in reader.architectures()
        ),
        approximate=Approximation(reason=approximation[0], within=approximation[1]) if approximation else None,
        config_class=reader.text("mapping", "config"),
        prefix=reader.text("mapping", "prefix"),
        target_prefix=reader.text("mapping", "target_prefix"),
        config=config,
        further=further,
        shifts=shifts,
        defaults=reader.values("defaults"),
        constants=reader.values("constants"),
        config_file=reader.config_file(),
        weights_file=reader.weights_file(),
        require=reader.choices("require"),
        sizes=reader.sizes(),
        rules=reader.rules(),
        drops=tuple(
            Drop(name=name, reason=reason, equals=equals, where=where) for name, reason, equals, where in reader.drops()
        ),
        ties=tuple(Tie(name=name, with_=other, where=where) for name, other, where in reader.ties()),
        fresh=tuple(Fresh(name=name, reason=reason, where=where) for name, reason, where in reader.fresh()),
        makes=tuple(
            Make(term=term, value=value, where=where, word=word) for term, value, where, word in reader.makes()
        ),
        inputs=reader.pairs("inputs"),
        arguments=reader.arguments(),
        probes=reader.pairs("probes"),
        where=sections.where,
        digest=hashlib.sha256("\0".join(sections.texts).encode()).hexdigest(),
    )
    written = [*(tie.name for tie in table.ties), *(make.term.name for make in table.makes)]
    rest = reader.rest([drop.name for drop in table.drops], written)
    table = replace(table, rules=(*table.rules, *rest))
    reader.refuse_idle_sizes(table.rules, [make.term for make in table.makes])
    reader.finish()
    return table

"""The checkpoint's config in the table's terms: what it must be, the sizes it gives and the target's own config."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from reprlib import repr as short

from porting.errors import Code, Fault
from porting.notation.expression import Expression
from porting.notation.faults import NotationError
from porting.notation.field import computed_from, held, is_plain, spellings, value_of, with_field
from porting.notation.rule import Rule
from porting.notation.table import Table
from porting.printable import quote


def effective(table: Table, config: Mapping[str, object]) -> dict[str, object]:
    """The config with what the table says of fields that it lacks.

    ``num_labels`` follows transformers' convention: the number of names in ``id2label``; without them the field of
    that name; without that, 2.
    """
    labels = config.get("id2label")
    counted = {"num_labels": len(labels)} if isinstance(labels, Mapping) and labels else {}
    found = {"num_labels": 2, **config, **counted}
    for field, value in table.defaults.items():
        if not held(config, field):
            found = with_field(found, field, value)
    for field in table.config:  # under the first of its spellings a field can be reckoned with
        first = spellings(field)[0]
        if first not in found and "." not in first and is_plain(first) and held(found, field):
            found[first] = value_of(found, field)
    return found


def refused(table: Table, config: Mapping[str, object]) -> list[Fault]:
    """A fault for each field whose value the table cannot represent; a field that is missing is fine."""
    faults = []
    values = effective(table, config)
    for field, allowed in table.require.items():
        found = value_of(values, field)
        if held(values, field) and not any(found == one and type(found) is type(one) for one in allowed):
            choices = ", ".join(repr(one) for one in allowed)
            message = f"config.json has {held(values, field)} = {found!r}, '{table.name}' can represent {choices}"
            hint = "another table or another module is needed: porting tables lists what there is"
            faults.append(Fault(code=Code.CONFIG_REFUSED, where=table.where, message=message, hint=hint))
    return [*faults, *_contradicting(table, config)]


def _contradicting(table: Table, config: Mapping[str, object]) -> Iterator[Fault]:
    """A fault for each of the target's fields that two fields of the config give different values."""
    given: dict[str, tuple[str, object]] = {}
    for theirs, ours in table.config.items():
        for name in (ours, *table.further.get(theirs, ())) if held(config, theirs) else ():
            value = _shifted(value_of(config, theirs), -table.shifts.get(theirs, 0))
            first, other = given.setdefault(name, (theirs, value))
            if other != value and repr(other) != repr(value):  # NaN is not equal to itself
                message = f"[config] gives {name} two values: {first} says {quote(other)}, and {theirs} {quote(value)}"
                hint = "leave out the line that is not meant"
                yield Fault(code=Code.CONFIG_REFUSED, where=table.where, message=message, hint=hint)


class KnownSizes(dict[str, int]):
    """The sizes that [sizes] gives under one config.

    Attributes:
        by_layer: the expressions of sizes that depend on indices, ``num_heads[i]``.
    """

    def __init__(
        self,
        found: Mapping[str, int],
        by_layer: Mapping[str, Expression],
        values: Mapping[str, object],
    ) -> None:
        super().__init__(found)
        self.by_layer = by_layer
        self.values_of_config = values


def sizes_under(
    known: Mapping[str, int], bindings: Mapping[str, object], indices: Collection[str] | None = None
) -> dict[str, int]:
    """The sizes that hold where the indices of names have these values.

    Args:
        known: the sizes that [sizes] gives.
        indices: those whose size is needed; None for all.
    """
    by_layer = known.by_layer if isinstance(known, KnownSizes) else {}
    values = known.values_of_config if isinstance(known, KnownSizes) else {}
    needed = {index: one for index, one in by_layer.items() if indices is None or index in indices}
    return {**known, **{index: expression.size(values, bindings) for index, expression in needed.items()}}


def sizes(table: Table, config: Mapping[str, object]) -> tuple[KnownSizes, list[Fault]]:
    """The sizes that [sizes] gives under this config, and its faults."""
    found: dict[str, int] = {}
    faults = []
    values = effective(table, config)
    by_layer = {index: expression for index, expression in table.sizes.items() if expression.indices}
    for index, expression in table.sizes.items():
        if index in by_layer:
            continue
        try:
            found[index] = expression.size(values)
        except NotationError as error:
            message = f"[sizes] {index} = {expression.text!r}: {error}"
            lacking = not config and not values.keys() >= expression.names
            hint = "put the model's config.json beside its weights" if lacking else error.hint
            given = [
                f"{name} = {short(table.defaults[name])}" for name in sorted(expression.names & table.defaults.keys())
            ]
            if not hint and given and not config.keys() & expression.names:
                hint = f"[defaults] gives {', '.join(given)}"
            faults.append(Fault(code=error.code, where=expression.where or table.where, message=message, hint=hint))
    return KnownSizes(found, by_layer, values), faults


def uncomputable(rules: Iterable[Rule], values: Mapping[str, object]) -> Iterator[Fault]:
    """A fault for each constant of a rule that has no value under this config, or one that cannot be used.

    Args:
        rules: the rules that are applied; one that is given several times counts once.
    """
    for rule in {id(rule): rule for rule in rules}.values():
        if rule.formula is not None:
            yield from _unusable(rule, values)
        for kind, expression in rule.constants:
            spelled = f"{kind.key} = {expression.text!r}"
            try:
                number = expression.evaluate(values)
            except NotationError as error:
                yield Fault(code=error.code, where=rule.where, message=f"{spelled}: {error}", hint=error.hint)
                continue
            why = kind.fault(number)
            if why:
                yield Fault(code=Code.BAD_EXPRESSION, where=rule.where, message=f"{spelled} is {number}, and {why}")


def _unusable(rule: Rule, values: Mapping[str, object]) -> Iterator[Fault]:
    """The faults of a formula: a number that the config does not have, or a way back that does not lead back."""
    from porting.plan.formulas import not_undone  # noqa: PLC0415  # needs torch, and most tables have no formula

    try:
        numbers = rule.numbers(values)
    except NotationError as error:
        message = f"a formula of '{rule}': {error}"
        yield Fault(code=error.code, where=rule.where, message=message, hint=error.hint)
        return
    for formula in (rule.formula, *rule.back.values()):
        if formula is not None and (reason := formula.refused_numbers(numbers)):
            message = f"formula = {formula.text!r} cannot be computed: {reason}"
            yield Fault(code=Code.BAD_EXPRESSION, where=rule.where, message=message)
            return
    fault = not_undone(rule, numbers)
    if fault is not None:
        yield fault


def arguments(table: Table, config: Mapping[str, object]) -> dict[str, object]:
    """The target config's fields: those of [config] that the checkpoint has, and the constants."""
    values = effective(table, config)
    given = {
        name: _shifted(value_of(values, theirs), -table.shifts.get(theirs, 0))
        for theirs, ours in table.config.items()
        if held(values, theirs)
        for name in (ours, *table.further.get(theirs, ()))
    }
    found: dict[str, object] = {}
    for name, value in given.items():  # a name with dots is a field inside another
        found = with_field(found, name, value)
    for name, value in table.constants.items():
        found = with_field(found, name, value) if "." in name else {**found, name: value}
    return found


MODEL_TYPE, ARCHITECTURE, CLASS_NAME = "model_type", "general.architecture", "_class_name"
"""The field that says what kind of model a config describes: of transformers, of a GGUF file, and of diffusers."""

TIMM, TIMM_PART = "architecture", "pretrained_cfg"
"""The field for the architecture in timm's configs, and a field that stands beside it there."""

USUAL = frozenset({MODEL_TYPE, "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}) | {
    "general",
    "tokenizer",
    CLASS_NAME,
    "_diffusers_version",
}
"""Fields of a config that say nothing of the model's shape."""


OPEN_CLIP = "model_cfg"
"""The field of open_clip's configs that the sizes of a model stand below."""


def _target_kind(table: Table) -> tuple[str, object]:
    """The field by which the target's own config is known, and its value; None where the table says none."""
    names = (*table.constants, *table.config.values())
    of_timm = (TIMM,) if any(name.partition(".")[0] == TIMM_PART for name in names) else ()
    for field in (ARCHITECTURE, CLASS_NAME, *of_timm):
        if isinstance(table.constants.get(field), str):
            return field, table.constants[field]
    for field, value in table.constants.items():
        if field.startswith(f"{OPEN_CLIP}."):
            return field, value
    kind = table.constants.get(MODEL_TYPE)
    return MODEL_TYPE, kind if isinstance(kind, str) and kind not in table.model_types else None


def has_own_config(table: Table) -> bool:
    """Whether the target has a config of its own: the table's [files] name it, or its [constants] say its kind."""
    return bool(table.config_file) or _target_kind(table)[1] is not None


def is_target_config(table: Table, config: Mapping[str, object]) -> bool:
    """Whether a config is the target's own, and not the checkpoint's.

    One that [files] names has the constants of the table; without constants, all fields that [config] gives it.
    """
    if table.config_file and table.constants:
        return all(value_of(config, field) == value for field, value in table.constants.items())
    if table.config_file:
        return bool(table.config) and all(held(config, ours) for ours in table.config.values())
    field, kind = _target_kind(table)
    return kind is not None and value_of(config, field) == kind


def is_of_diffusers(config: Mapping[str, object]) -> bool:
    """Whether a config is that of a model of diffusers."""
    return isinstance(config.get(CLASS_NAME), str) and MODEL_TYPE not in config


def is_of_open_clip(config: Mapping[str, object]) -> bool:
    """Whether a config is that of a model of open_clip."""
    return isinstance(config.get(OPEN_CLIP), Mapping) and MODEL_TYPE not in config


def source_config(table: Table, config: Mapping[str, object]) -> dict[str, object]:
    """The checkpoint's config from the target's own: [config] read from right to left; any other is left as it is."""
    if not is_target_config(table, config):
        return dict(config)
    found: dict[str, object] = {MODEL_TYPE: table.model_types[0]} if table.model_types else {}
    for field, allowed in table.require.items():
        found = with_field(found, field, allowed[0]) if len(allowed) == 1 else found
    for theirs, ours in table.config.items():
        if held(config, ours):
            found = with_field(found, theirs, _shifted(value_of(config, ours), table.shifts.get(theirs, 0)))
    return found


def unknown(table: Table, config: Mapping[str, object]) -> list[str]:
    """The fields of the other side's config that a config does not tell, though a line of [config] names them."""
    if is_target_config(table, config):
        lacking = [
            spellings(theirs)[0]
            for theirs, ours in table.config.items()
            if not held(config, ours) and not computed_from(theirs)
        ]
        found = source_config(table, config)  # a number does not tell what it was computed from
        parts = [name for theirs in table.config for name in computed_from(theirs)]
        return list(dict.fromkeys([*lacking, *(name for name in parts if not held(found, name))]))
    values = effective(table, config)
    return [ours for theirs, ours in table.config.items() if not held(values, theirs)]


def lacked(table: Table, config: Mapping[str, object]) -> list[str]:
    """The fields that [config] names and a checkpoint's config lacks, with what they are called on the right."""
    values = effective(table, config)
    missing = {theirs: ours for theirs, ours in table.config.items() if not held(values, theirs)}
    return [f"{spellings(theirs)[0]} ({ours!r} in [config])" for theirs, ours in missing.items()]


def unsaid(table: Table, config: Mapping[str, object]) -> list[str]:
    """The fields of a config that no line of [config] carries to the other side."""
    if is_target_config(table, config):
        known = {name for theirs, ours in table.config.items() for name in (ours, *table.further.get(theirs, ()))}
        known |= set(table.constants)
    else:
        known = {one for theirs in (*table.config, *table.require) for one in spellings(theirs)}
    first = {name.split(".")[0] for name in known}
    return [field for field in config if field not in first | USUAL]


def original(table: Table, config: object) -> dict[str, object]:
    """The checkpoint's fields, as the table spells them, from a target config: :func:`arguments` from right to left."""
    return {
        theirs: _shifted(getattr(config, ours), table.shifts.get(theirs, 0))
        for theirs, ours in table.config.items()
        if hasattr(config, ours) and is_plain(spellings(theirs)[0])
    }


def _shifted(value: object, shift: int) -> object:
    """The value and so much more; one that is no whole number is left for the target's config to refuse."""
    return value + shift if shift and isinstance(value, int) and not isinstance(value, bool) else value

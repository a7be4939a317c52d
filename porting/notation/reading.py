"""Convert the raw sections of a table to typed values; each fault is noted with its place and reading goes on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from reprlib import repr as short
from typing import ParamSpec, TypeGuard, TypeVar

from porting.errors import Code, Fault, nearest
from porting.notation.axes import leaves, row_indices, sized
from porting.notation.expression import Expression
from porting.notation.faults import NotationError, TableError
from porting.notation.field import read_field
from porting.notation.name import Name
from porting.notation.rule import Rule, Term, make_input_rule, make_rule
from porting.notation.sections import KEYS, RULES, Body, Entry, Sections
from porting.ops import CONSTANTS, Content, Formula, FormulaError, Sum
from porting.ops.contents import ROTARY, WORDS

Read = TypeVar("Read")
Given = ParamSpec("Given")


_FIELD = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:[./][A-Za-z_][A-Za-z0-9_]*)*)(?: *(?P<sign>[+-]) *(?P<shift>[0-9]{1,9}))?"
)


_OPERAND = re.compile(r"[A-Za-z][A-Za-z0-9]*")

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""The dtypes that the target of a formula can have."""

CONFIG_ENDINGS = (".json", ".yaml", ".yml")
"""The endings of the config files that [files] may name."""

_TAKEN = r"(?:provenance|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json"
"""The names of the other files that stand beside weights: a config of such a name would take the place of one."""

_FILE = re.compile(rf"(?!{_TAKEN}$|.*\.index\.json$)[A-Za-z0-9_][A-Za-z0-9_.-]{{0,99}}")
"""A name in a directory, and not that of the record which a conversion writes there."""

EQUALS = "equals "
"""In [drop] and [make]: the tensor is another one's copy, whose name follows."""


class Reader:
    """Reads the sections of one table and gathers its faults."""

    def __init__(self, sections: Sections) -> None:
        self.sections = sections
        self.faults = list(sections.faults)

    def finish(self) -> None:
        """Raise every fault that was found, if any."""
        if self.faults:
            raise TableError(self.faults)

    def refuse_unknown(self) -> None:
        """Note the keys that a section does not have."""
        named = [section for section in KEYS if section != "rule"]
        bodies = [(f"[{section}]", KEYS[section], self.sections.entries.get(section, {})) for section in named]
        bodies += [("[[rule]]", KEYS["rule"], body) for body in self.sections.rules]
        for title, known, body in bodies:
            for key, entry in body.items():
                if key not in known:
                    hint = nearest(key, known) or f"known: {', '.join(known)}"
                    self._note(Code.UNKNOWN_KEY, entry.at(), f"{title} has no key {key!r}", hint)

    def refuse_idle_sizes(self, rules: Iterable[Rule], made: Iterable[Term] = ()) -> None:
        """Note the sizes of indices that no rule has; a rule that was at fault might have had them."""
        terms = [*(term for rule in rules for term in (*rule.sources, *rule.targets)), *made]
        known = {sized(index) for term in terms for index in (*leaves(term.axes or ()), *row_indices(term.axes or ()))}
        known |= {index for term in terms for index in term.name.indices}
        for entry in () if self.faults else self.sections.of("sizes"):
            if entry.key not in known:
                message = f"[sizes] gives {entry.key!r}, and no rule has that index"
                self._note(Code.UNKNOWN_KEY, entry.at(), message, nearest(entry.key, sorted(known)))

    def text(self, section: str, key: str, *, default: str = "") -> str:
        """One text."""
        entry = self.sections.entries.get(section, {}).get(key)
        return default if entry is None else self._text(entry, entry.value, default)

    def flag(self, section: str, key: str) -> bool:
        """True or false; false when it is not said."""
        return self._flag(self.sections.entries.get(section, {}), key)

    def texts(self, section: str, key: str) -> tuple[str, ...]:
        """A list of texts."""
        entry = self.sections.entries.get(section, {}).get(key)
        return self._texts(entry, entry.value) if entry is not None else ()

    def fields(self) -> tuple[dict[str, str], dict[str, tuple[str, ...]], dict[str, int]]:
        """The target's field for each of the checkpoint's in [config], more of its names for the same, and the shifts.

        A shift is how much more the checkpoint's field says.
        """
        names: dict[str, str] = {}
        more: dict[str, tuple[str, ...]] = {}
        shifts: dict[str, int] = {}
        for entry in self.sections.of("config"):
            found = _FIELD.fullmatch(self._text(entry, entry.value, "unread"))
            if found is None:
                self._wrong(
                    entry, 'a field of the target, several as "dim/width", or one with a shift such as "positions + 2"'
                )
                continue
            if self._read(entry.at, read_field, entry.key) is None:
                continue
            names[entry.key], *others = found["name"].split("/")
            if others:
                more[entry.key] = tuple(others)
            if found["shift"]:
                shifts[entry.key] = int(found["sign"] + found["shift"])
        return names, more, shifts

    def config_file(self) -> str:
        """The config of [files]; empty when it has none."""
        entry = self.sections.entries.get("files", {}).get("config")
        return "" if entry is None else self._file(entry, CONFIG_ENDINGS)

    def weights_file(self) -> str:
        """The weights of [files], whose ending a conversion looks at; empty when it has none."""
        entry = self.sections.entries.get("files", {}).get("weights")
        return "" if entry is None else self._file(entry)

    def _file(self, entry: Entry, endings: tuple[str, ...] = ()) -> str:
        name = entry.value
        if not isinstance(name, str) or not _FILE.fullmatch(name) or not name.endswith(endings or ("",)):
            ending = f" that ends in {', '.join(endings)}" if endings else ""
            self._wrong(entry, f"the name of a file in a directory{ending}")
            return ""
        return name

    def values(self, section: str) -> dict[str, object]:
        """A section of any values."""
        return {entry.key: entry.value for entry in self.sections.of(section)}

    def arguments(self) -> dict[str, object]:
        """The numbers, flags and texts of [arguments]; the text None is Python's None."""
        found: dict[str, object] = {}
        for entry in self.sections.of("arguments"):
            if isinstance(entry.value, bool | int | float | str):
                found[entry.key] = None if entry.value == "None" else entry.value
            else:
                self._wrong(entry, 'a number, true or false, or a text, "None" for None')
        return found

    def approximation(self) -> tuple[str, float] | None:
        """The reason and the bound of [approximate]; None when the table claims to be exact."""
        body = self.sections.entries.get("approximate")
        if not body:
            return None
        for key in sorted(set(KEYS["approximate"]) - set(body)):
            where = next(iter(body.values())).at()
            self._note(Code.MISSING_KEY, where, f"[approximate] has no {key!r}", "say why, and within which bound")
        bound = self._number(body["within"]) if "within" in body else None
        if bound is not None and not 0 < bound < 1:
            self._wrong(body["within"], "a share of the activations' scale above 0 and below 1")
        return self.text("approximate", "reason"), bound or 0.0

    def choices(self, section: str) -> dict[str, tuple[object, ...]]:
        """A section of lists."""
        found: dict[str, tuple[object, ...]] = {}
        for entry in self.sections.of(section):
            if self._read(entry.at, read_field, entry.key) is None:
                continue
            if isinstance(entry.value, list) and entry.value:
                found[entry.key] = tuple(entry.value)
            else:
                self._wrong(entry, "a list of the values that are allowed")
        return found

    def expressions(self, section: str) -> dict[str, Expression]:
        """A section of expressions."""
        found = {entry.key: self._expression(entry) for entry in self.sections.of(section)}
        return {key: expression for key, expression in found.items() if expression is not None}

    def sizes(self) -> dict[str, Expression]:
        """The section [sizes]; a number of the table itself has to be the size of an axis."""
        found = self.expressions("sizes")
        for index, expression in found.items():
            if expression.names or expression.indices:
                continue
            try:
                expression.size({})
            except NotationError as error:
                hint = 'write a size from 1 on, or an expression over the config such as "hidden_size // 64"'
                told = (
                    str(error) if expression.text in str(error).partition(",")[0] else f"{expression.text!r}: {error}"
                )
                self._note(error.code, expression.where, f"[sizes] {index} = {told}", hint)
        return found

    def architectures(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Name, import path and witnesses of each architecture."""
        for entry in self.sections.of("architectures"):
            value = {"target": entry.value} if isinstance(entry.value, str) else entry.value
            if not isinstance(value, dict) or not isinstance(value.get("target"), str):
                self._wrong(entry, 'an import path, or { target = "package.file:Class", holds = [...] }')
                continue
            for key in sorted(value.keys() - {"target", "holds"}):
                hint = nearest(key, ["target", "holds"])
                self._note(Code.UNKNOWN_KEY, entry.key_at(key), f"an architecture has no key {key!r}", hint)
            yield entry.key, value["target"], self._texts(entry, value.get("holds", []))

    def drops(self) -> Iterator[tuple[Name, str, Name | None, str]]:
        """Pattern, reason, what it equals and place of each drop."""
        for entry in self.sections.of("drop"):
            value: object = entry.value
            if isinstance(value, str):
                value = {"equals": value.removeprefix(EQUALS)} if value.startswith(EQUALS) else {"reason": value}
            if (
                not isinstance(value, dict)
                or not value
                or value.keys() - {"equals", "reason"}
                or not all(isinstance(one, str) and one.strip() for one in value.values())
            ):
                self._wrong(entry, 'a reason, "equals NAME", or { equals = "NAME", reason = "..." }')
                continue
            name = self._name(entry)
            equals = value.get("equals")
            other = self._equals(entry, equals) if equals is not None else None
            if name is None or (equals is not None and other is None):
                continue
            alone = sorted(set(other.indices if other else ()) - set(name.indices))
            if alone:
                message = f"index {alone[0]!r} stands in what '{name}' equals and not in its own name"
                self._note(Code.INDEX_ONE_SIDE, entry.value_at(), message)
            yield name, value.get("reason", f"equals {equals}"), other, entry.at()

    def _equals(self, entry: Entry, text: str) -> Name | None:
        shift = len(EQUALS) if isinstance(entry.value, str) else 0
        item = None if shift else "equals"

        def place(offset: int | None) -> str:
            return entry.value_at(None if offset is None else offset + shift, item)

        return self._read(place, Name.parse, text)

    def ties(self) -> Iterator[tuple[Name, Name, str]]:
        """The two patterns and the place of each tie."""
        for entry in self.sections.of("ties"):
            if not isinstance(entry.value, str):
                self._wrong(entry, "the name that it is tied to")
                continue
            name, other = self._name(entry), self._read(entry.value_at, Name.parse, entry.value)
            if name is not None and other is not None:
                if lone := sorted(set(other.indices) - set(name.indices)):  # each layer may share one tensor
                    message = f"'{other}' has the index {', '.join(lone)}, and '{name}' has not"
                    self._note(Code.INDEX_ONE_SIDE, entry.at(), message)
                yield name, other, entry.at()

    def fresh(self) -> Iterator[tuple[Name, str, str]]:
        """Pattern, reason and place of each parameter that may be new."""
        for entry in self.sections.of("fresh"):
            name = self._name(entry)
            if not isinstance(entry.value, str) or not entry.value.strip():
                self._wrong(entry, "a reason")
            elif name is not None:
                yield name, entry.value, entry.at()

    def makes(self) -> Iterator[tuple[Term, Content | Expression | Name, str, str]]:
        """Term, content, place and word of each line of [make]; the name of another tensor for one that equals it."""
        for entry in self.sections.of("make"):
            term = self._read(entry.at, Term.parse, entry.key)
            text = entry.value if isinstance(entry.value, str) else ""
            value: Content | Expression | Name | None = Content.parse(text)
            if value is None:
                other = text.startswith(EQUALS)
                value = self._equals(entry, text.removeprefix(EQUALS)) if other else self._made(entry, text)
            if term is None or value is None:
                continue
            if isinstance(value, Name) and (alone := sorted(set(value.indices) - set(term.name.indices))):
                message = f"index {alone[0]!r} stands in what '{term}' equals and not in its own name"
                self._note(Code.INDEX_ONE_SIDE, entry.value_at(), message)
            if term.output or term.name.rest is not None:
                self._note(Code.BAD_NAME, entry.at(), f"'{term}' says no single tensor, which [make] needs")
            else:
                yield term, value, entry.at(), ROTARY if text.startswith(f"{ROTARY} ") else ""

    def _made(self, entry: Entry, text: str) -> Expression | None:
        words = ", ".join(map(repr, WORDS))
        known = f"expected {words}, 'rotary THETA', 'equals NAME', a number, or arithmetic over the config"
        if text.startswith(f"{ROTARY} "):
            return self._read(entry.value_at, Expression.parse, text.removeprefix(f"{ROTARY} "))
        if isinstance(entry.value, str) and entry.value.isalpha() and nearest(entry.value, WORDS):
            message = f"{entry.key!r} = {entry.value!r}, {known}"
            self._note(Code.WRONG_TYPE, entry.value_at(), message, nearest(entry.value, WORDS))
            return None
        return self._expression(entry)

    def rules(self) -> tuple[Rule, ...]:
        """The rules of [tensors], of [optional] and of each [[rule]]; no two may have the same name on one side."""
        found = [*self.pairs("tensors"), *self.pairs("optional", optional=True)]
        found += [rule for rule in map(self._long, self.sections.rules) if rule is not None]
        for code, verb, side in ((Code.READ_TWICE, "read", "sources"), (Code.WRITTEN_TWICE, "written", "targets")):
            seen: dict[str, Rule] = {}
            for rule in found:
                for term in rule.sources if side == "sources" else rule.targets:
                    other = seen.setdefault(str(term.key), rule)
                    if side == "sources" and rule.formula is not None and other.formula is not None:
                        self._require_same_back(term, rule, other)
                    elif side == "sources" and rule.again and rule.where == other.where:
                        continue
                    elif other is not rule:
                        message = f"'{term.key}' is {verb} by this rule and by that at {other.where}"
                        both = ", or give one line a list of both targets" if side == "sources" else ""
                        self._note(code, rule.where, message, f"take one of them away{both}")
        return tuple(found)

    def _require_same_back(self, term: Term, rule: Rule, other: Rule) -> None:
        """Note a source of two formulas that do not agree how it comes back."""
        undone = [
            one.back.get(name)
            for one in (rule, other)
            for name, source in zip(one.operands, one.sources, strict=False)
            if source.key == term.key
        ]
        if len(set(undone)) > 1:
            texts = " and ".join("nothing" if one is None else repr(one.text) for one in undone)
            message = f"'{term.key}' is read by this formula and by that at {other.where}, and 'back' gives it {texts}"
            self._note(Code.READ_TWICE, rule.where, message, "give it the same in both")

    def rest(self, read: Iterable[Name], written: Iterable[Name]) -> tuple[Rule, ...]:
        """The lines of [rest], those with the longest text in front of {*rest} first."""
        found = []
        for rule in self.pairs("rest", optional=True):
            terms = (*rule.sources, *rule.targets)
            if any(term.name.rest is None for term in terms):
                message = f"'{rule}' is a line of [rest], whose two names end in {{*rest}}"
                self._note(Code.BAD_NAME, rule.where, message, "a rule for single names stands in [tensors]")
            found.append(replace(rule, rest=True, besides=(tuple(read), tuple(written))))
        return tuple(sorted(found, key=lambda rule: -len(rule.sources[0].name.front)))

    def pairs(self, section: str, *, optional: bool = False) -> tuple[Rule, ...]:
        """The short rules of a section, ``"source" = "target"``; a list on the right gives a rule for each target."""
        found = []
        for entry in self.sections.of(section):
            source = self._read(entry.at, Term.parse, entry.key)
            several = isinstance(entry.value, list) and section in (*RULES, "inputs")
            if not isinstance(entry.value, str) and not several:
                self._wrong(entry, "the other side of the rule, a text")
                continue
            targets = self._terms(entry, rows=False)
            if source is None or targets is None:
                continue
            for number, target in enumerate(targets):
                if section == "inputs":
                    rule = self._read(entry.at, make_input_rule, source, target, where=entry.at())
                else:
                    rule = self._read(entry.at, make_rule, [source], [target], optional=optional, where=entry.at())
                found += [replace(rule, again=number > 0)] if rule is not None else []
        return tuple(found)

    def _long(self, body: Body) -> Rule | None:
        first = next(iter(body.values()), None)
        where = first.at() if first else self.sections.where
        for key in ("source", "target"):
            if key not in body:
                self._note(Code.MISSING_KEY, where, f"[[rule]] has no {key!r}")
        fold, optional = self._flag(body, Sum.key), self._flag(body, "optional")
        operands = self._operands(body) if "source" in body else ()
        named = Formula.key in body
        sources = self._terms(body["source"], rows=fold, named=named) if "source" in body else None
        targets = self._terms(body["target"], rows=False) if "target" in body else None
        constants = {key: self._expression(body[key]) for key in CONSTANTS if key in body}
        fill = self._number(body["fill"]) if "fill" in body else None
        formula = self._formula(body[Formula.key]) if Formula.key in body else None
        back = self._back(body["back"]) if "back" in body else {}
        dtype = self._text(body["dtype"], body["dtype"].value) if "dtype" in body else ""
        if dtype and dtype not in DTYPES:
            self._wrong(body["dtype"], f"one of {', '.join(DTYPES)}")
        if sources is None or targets is None or first is None or back is None:
            return None
        if Formula.key in body and formula is None:
            return None
        if formula is not None and not operands:
            operands = ("x",) if len(sources) == 1 else ()
        if formula is not None and len(operands) != len(sources):
            self._wrong(body["source"], 'the sources of a formula by their names there, { w = "a.weight [o i]", ... }')
            return None
        return self._read(
            first.at,
            make_rule,
            sources,
            targets,
            constants={key: one for key, one in constants.items() if one is not None},
            fold=fold,
            fill=fill,
            optional=optional,
            where=where,
            formula=formula,
            operands=operands,
            back=back,
            dtype=dtype,
        )

    def _operands(self, body: Body) -> tuple[str, ...]:
        """The names of the sources in the formula of a [[rule]]; empty where they have none."""
        value = body["source"].value
        if not isinstance(value, dict):
            return ()
        if not value or not all(_OPERAND.fullmatch(name) for name in value):
            self._wrong(body["source"], 'the sources by their names in the formula, { w = "a.weight [o i]", ... }')
        return tuple(value)

    def _formula(self, entry: Entry, item: str | None = None) -> Formula | None:
        value = entry.value if item is None or not isinstance(entry.value, dict) else entry.value[item]
        text = repr(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        if not isinstance(text, str):
            self._wrong(entry, 'a formula over the sources, such as "w * s"')
            return None
        try:
            return Formula.parse(text)
        except FormulaError as error:
            self._note(Code.BAD_EXPRESSION, entry.value_at(error.offset, item), str(error))
            return None

    def _back(self, entry: Entry) -> dict[str, Formula] | None:
        """The formulas that undo a formula; None when one of them is at fault."""
        if not isinstance(entry.value, dict):
            self._wrong(entry, 'a formula over the target, y, for each source, { w = "y", s = "1" }')
            return None
        found = {name: self._formula(entry, name) for name in entry.value}
        good = {name: one for name, one in found.items() if one is not None}
        return good if len(good) == len(found) else None

    def _terms(self, entry: Entry, *, rows: bool, named: bool = False) -> list[Term] | None:
        """The terms of one side of a [[rule]]; None when one of them is at fault."""
        if isinstance(entry.value, str):
            terms = [self._read(entry.value_at, Term.parse, entry.value, rows=rows, named=named)]
        elif isinstance(entry.value, dict) and all(isinstance(one, str) for one in entry.value.values()):

            def under(name: str) -> Callable[[int | None], str]:
                return lambda offset: entry.value_at(offset, item=name)

            texts = entry.value.items()
            terms = [self._read(under(name), Term.parse, text, rows=rows, named=named) for name, text in texts]
        else:
            listed = self._texts(entry, entry.value)
            if entry.value == []:
                self._wrong(entry, "one tensor or a list of some")

            def place(number: int) -> Callable[[int | None], str]:
                return lambda offset: entry.value_at(offset, item=number)

            terms = [self._read(place(n), Term.parse, text, rows=rows, named=named) for n, text in enumerate(listed)]
        good = [term for term in terms if term is not None]
        return good if good and len(good) == len(terms) else None

    def _expression(self, entry: Entry) -> Expression | None:
        value = entry.value
        if _is_finite(value):
            value = repr(value)
        if not isinstance(value, str):
            self._wrong(entry, 'a finite number, or an expression over the config such as "hidden_size // 64"')
            return None
        found = self._read(entry.value_at, Expression.parse, value)
        return None if found is None else replace(found, where=entry.value_at())

    def _number(self, entry: Entry) -> float | None:
        if _is_finite(entry.value):
            return entry.value
        self._wrong(entry, "a finite number")
        return None

    def _flag(self, body: Body, key: str) -> bool:
        if key in body and not isinstance(body[key].value, bool):
            self._wrong(body[key], "true or false")
        return key in body and body[key].value is True

    def _name(self, entry: Entry) -> Name | None:
        return self._read(entry.at, Name.parse, entry.key)

    def _text(self, entry: Entry, value: object, default: str = "") -> str:
        if isinstance(value, str):
            return value
        self._wrong(entry, "a text")
        return default

    def _texts(self, entry: Entry, value: object) -> tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        self._wrong(entry, "a list of texts")
        return ()

    def _wrong(self, entry: Entry, expected: str) -> None:
        self._note(Code.WRONG_TYPE, entry.value_at(), f"{entry.key!r} is {short(entry.value)}, expected {expected}")

    def _note(self, code: Code, where: str, message: str, hint: str = "") -> None:
        self.faults.append(Fault(code=code, where=where, message=message, hint=hint))

    def _read(
        self,
        place: Callable[[int | None], str],
        read: Callable[Given, Read],
        *args: Given.args,
        **kwargs: Given.kwargs,
    ) -> Read | None:
        """The result of ``read``, or None after noting its fault at its place in the text."""
        try:
            return read(*args, **kwargs)
        except NotationError as error:
            self._note(error.code, place(error.offset), str(error), error.hint)
            return None


def _is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value of a table is a number of the range of float64, and no flag."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max

"""Find the port's tensor that is the reference's logits: by the table's [probes], then by name, then by shape.

The reference is not run.  A probe that pairs its ``logits`` with an output or a module of the port decides; without one
the port's output of that name does, or the only one whose shape can be that of the logits.  The axes are brought into
the reference's order.  A port that returns the last position alone will do where only that one is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from porting.errors import Code, Fault, PortingError
from porting.notation.rule import Rule, Term, make_rule
from porting.notation.table import Table
from porting.plan.align import align
from porting.plan.move import backward
from porting.plan.recipe import TensorSpec
from porting.tracing.running import Side
from porting.tracing.trace import ARROW, INNER, ROOT, Point, is_returned, leaves, output_of, points, select, split
from porting.trials.returned import layouts

CLOSE = 1e-4
"""Rows of probabilities sum to 1 as nearly as this."""

MOST_SHOWN = 6
"""Outputs of a module that a message lists."""


class LogitsError(PortingError):
    """A model gives no tensor that can be the logits."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The logits that are asked for.

    Attributes:
        axes: their axes in letters, for messages: ``b s v``.
        shape: their shape as the reference returns them; the last size may be larger, as of a padded vocabulary, where
            a probe or a name says that these are the logits.
        names: what the reference calls them, the likeliest first.
        last: the last place of the second axis is enough.
    """

    axes: str
    shape: tuple[int, ...]
    names: tuple[str, ...] = ("logits",)
    last: bool = False


@dataclass(frozen=True)
class _Found:
    """A tensor that fits, and where it was found."""

    point: Point
    rule: Rule | None
    value: Tensor


class LogitsReader:
    """Runs a port and reads the reference's logits off it; where they are is found out once.

    Args:
        module: the port, in eval mode.
        table: its [probes].
        title: what the port is called in messages.
    """

    def __init__(self, module: nn.Module, table: Table, title: str) -> None:
        self._module, self._table, self._title = module, table, title
        self._place: _Found | None = None

    def read(self, arguments: Mapping[str, Tensor], wanted: Wanted) -> Tensor:
        """The logits of one batch, in the reference's layout.

        Args:
            arguments: the port's forward arguments; a name that is a number is a position.

        Returns:
            ``wanted.shape``, but for a larger last axis; float32 or float64.  With ``wanted.last`` only the last place
            of the second axis is sure to have values.  Probabilities become their logarithms.

        Raises:
            LogitsError: nothing fits, or several outputs do.
            VerifyError: the model fails.
        """
        side = Side(title=self._title, module=self._module, arguments=[arguments], wanted=(), seed=None, lifting=False)
        if self._place is None:
            self._place = self._find(side, wanted)
            return _as_logits(self._place.value)
        value = self._at(side, self._place.point)
        found = None if value is None else _fitted(value, wanted, self._place.rule, loose=True)
        if found is None:
            raise self._nothing(side, wanted, {} if value is None else {self._place.point: value})
        return _as_logits(found)

    def _at(self, side: Side, point: Point) -> Tensor | None:
        """The port's value at a point, in a pass of its own."""
        path, _, output = point.partition(ARROW)
        if path == ROOT:
            return select(side.outputs(0, around=torch.inference_mode), output)
        found: list[Tensor] = []
        side.run(0, lambda seen, value: found.append(value.detach()) if seen == point else None, wanted=[point])
        return found[0] if found else None

    def _find(self, side: Side, wanted: Wanted) -> _Found:
        output = side.outputs(0, around=torch.inference_mode)
        returned = {name: one for name, one in leaves(output).items() if one.is_floating_point()}
        stated = [rule for rule in self._table.probes if _is_plain(rule)]
        named = [rule for rule in stated if _is_root(rule.sources[0]) and rule.sources[0].output in wanted.names]
        rooted = [rule for rule in stated if rule not in named and _is_root(rule.targets[0])]
        for rules in (named, rooted):
            for one in self._probed(side, output, rules, wanted, loose=rules is named):
                return one
        chosen = self._of_returned(side, returned, wanted)
        if chosen is not None:
            return chosen
        for one in self._probed(side, output, [one for one in stated if one not in named], wanted, loose=False):
            return one
        raise self._nothing(side, wanted, returned)

    def _probed(
        self, side: Side, output: object, rules: Sequence[Rule], wanted: Wanted, *, loose: bool
    ) -> Iterator[_Found]:
        """The tensors of the port named by these probes that can be the logits."""
        order = sorted(rules, key=lambda rule: _rank(rule.sources[0].output, wanted.names))
        for rule in order:
            for point in points(rule.targets, self._module, self._table.target_prefix):
                value = select(output, output_of(point)) if is_returned(point) else self._at(side, point)
                found = None if value is None else _fitted(value, wanted, rule, loose=loose)
                if found is not None:
                    yield _Found(point, rule, found)

    def _of_returned(self, side: Side, returned: Mapping[str, Tensor], wanted: Wanted) -> _Found | None:
        """The output that is the logits by its name or its shape; None where none is."""
        fitting = {name: _fitted(one, wanted, None, loose=name in wanted.names) for name, one in returned.items()}
        fits = {name: one for name, one in fitting.items() if one is not None}
        groups = (
            [name for name in wanted.names if name in fits],
            [name for name in fits if returned[name].shape == wanted.shape and "logit" in name],
            [name for name in fits if returned[name].shape == wanted.shape],
            list(fits),
        )
        names = next(filter(None, groups), [])
        if len(names) > 1 and names is not groups[0]:
            said = f"{self._class} returns several tensors that can be the logits [{wanted.axes}]: "
            raise self._refused(said + _listed({name: returned[name] for name in names}), wanted, f". -> {names[0]}")
        return _Found(f"{ROOT}{ARROW}{names[0]}" if names[0] else ROOT, None, fits[names[0]]) if names else None

    @property
    def _class(self) -> str:
        return type(self._module).__name__

    def _nothing(self, side: Side, wanted: Wanted, returned: Mapping[str, Tensor]) -> LogitsError:
        inner: dict[str, None] = {}

        def visit(point: Point, value: Tensor) -> None:
            if (
                split(point)[1] == 1
                and value.is_floating_point()
                and _fitted(value, wanted, None, loose=False) is not None
            ):
                inner[point] = None

        side.run(0, visit, wanted=side.places)
        shape = ", ".join(map(str, wanted.shape))
        message = (
            f"{self._class} returns {_listed(returned)}, and none of it can be the logits, [{wanted.axes}] = [{shape}]"
        )
        return self._refused(message, wanted, next(reversed(inner), ""))  # the last that ran

    def _refused(self, message: str, wanted: Wanted, point: str) -> LogitsError:
        if point:
            name = point.removeprefix(f"{ROOT}{ARROW}")
            hint = f'if {name!r} is the logits, add to [probes] the line ". -> {wanted.names[0]}" = "{point}"'
        else:
            hint = "no module of it computes them either: build the model with its head, and load the head's weights"
        return LogitsError(Fault(code=Code.NO_LOGITS, where=self._table.where, message=message, hint=hint))


def _is_plain(rule: Rule) -> bool:
    """Whether a probe pairs one tensor with one, and not those of every layer."""
    terms = (*rule.sources, *rule.targets)
    return len(terms) == 2 and not any(one.name.indices or one.output in INNER for one in terms)


def _is_root(term: Term) -> bool:
    return str(term.name) == ROOT


def _rank(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


def _listed(tensors: Mapping[str, Tensor]) -> str:
    """Outputs with their shapes, for a message."""
    shown = [f"{name or 'one tensor'} {list(one.shape)}" for name, one in list(tensors.items())[:MOST_SHOWN]]
    more = f" and {len(tensors) - len(shown)} more" if len(tensors) > len(shown) else ""
    return (", ".join(shown) or "no floating-point tensor") + more


def _fitted(value: Tensor, wanted: Wanted, rule: Rule | None, *, loose: bool) -> Tensor | None:
    """A port's tensor laid out as the reference's logits; None where it cannot be these."""
    others = sorted({size for size in value.shape if size > wanted.shape[-1]}) if loose else []
    for size in (wanted.shape[-1], *others):
        shape = (*wanted.shape[:-1], size)
        if rule is not None and rule.targets[0].axes is not None:
            found = _carried_back(value, shape, rule)
        else:
            found = _laid_out(value, shape, last=wanted.last)
        if found is not None:
            return found
    return None


def _laid_out(value: Tensor, shape: tuple[int, ...], *, last: bool) -> Tensor | None:
    if tuple(value.shape) == shape:
        return value
    if value.numel() > 1 and value.ndim >= len(shape) - 1:
        for (left, right), _ in layouts(shape, tuple(value.shape)):
            if "|" not in left or (last and "(_rest|1)" in left and left.index("(_rest|1)") == 2):
                rule = make_rule([Term.parse(f"theirs [{left}]")], [Term.parse(f"ours [{right}]")])
                return _carried_back(value, shape, rule)
    return None


def _carried_back(value: Tensor, shape: tuple[int, ...], rule: Rule) -> Tensor | None:
    """The reference's tensor from the port's, by a probe read from right to left; zeros where the port has none."""
    source, target = (term.key.spell({}) for term in (rule.sources[0], rule.targets[0]))
    rule = replace(rule, fill=0.0)
    found = align([rule], {source: shape}, {target: tuple(value.shape)})
    if found.faults or not found.steps:
        return None
    given = {source: TensorSpec(shape, value.dtype)}
    return dict(backward(found.steps[0], given, lambda _: value))[source]


def _as_logits(value: Tensor) -> Tensor:
    """Logits as they are; of probabilities the logarithms, whose softmax they are."""
    value = value.detach()
    value = value if value.dtype == torch.float64 else value.float()
    if value.shape[-1] > 1 and bool((value >= 0).all()) and bool(((value.sum(-1) - 1).abs() < CLOSE).all()):
        return value.log()
    return value

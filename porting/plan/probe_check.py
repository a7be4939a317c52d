"""Checking what a table says for :mod:`porting.verification` against a module, before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator

from torch import nn

from porting.errors import Code, Fault, nearest
from porting.notation.rule import MASK_KINDS, Rule
from porting.notation.table import Table
from porting.plan.matching import Matcher

INSIDE = ("scores", "probabilities")
"""The values that a probe can name inside of an attention, besides a module's outputs."""


def doubtful(table: Table, sources: Collection[str], module: nn.Module) -> Iterator[Fault]:
    """Entries of [arguments], [inputs] and [probes] that name nothing in the module: warnings, loading needs none.

    Args:
        sources: the checkpoint's tensors, which show what parts the reference will have.
    """
    parameters = inspect.signature(module.forward).parameters
    taken = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD]
    for name in table.arguments:
        if name not in taken and len(taken) == len(parameters):
            message = f"[arguments] gives {name!r}, and the module's forward takes {', '.join(taken)}"
            yield Fault(code=Code.NO_INPUTS, where=table.where, message=message, hint=nearest(name, taken))
    for rule in table.inputs:
        name, kind = str(rule.targets[0].name), rule.targets[0].output
        if kind not in ("", *MASK_KINDS):
            message = f"an input can be given as {', '.join(MASK_KINDS)}, not as {kind!r}"
            yield Fault(code=Code.NO_INPUTS, where=rule.where, message=message, hint=nearest(kind, MASK_KINDS))
        if not name.isdigit() and name.partition(".")[0] not in taken and len(taken) == len(parameters):
            message = f"[inputs] gives {name!r}, and the module's forward takes {', '.join(taken)}"
            yield Fault(code=Code.NO_INPUTS, where=rule.where, message=message, hint=nearest(name, taken))
    paths = [path for path, _ in module.named_modules(remove_duplicate=False)]
    for rule in table.probes:
        yield from _doubtful_probe(rule, table, sources, paths)


def _doubtful_probe(rule: Rule, table: Table, sources: Collection[str], paths: Collection[str]) -> Iterator[Fault]:
    for term in rule.targets:
        near = nearest(term.output, INSIDE)
        if near and term.output not in INSIDE:
            message = f"the probe '{rule}' names the output {term.output!r}"
            yield Fault(code=Code.NO_PROBES, where=rule.where, message=message, hint=near)
    suffix = f" -> {rule.targets[0].output}" if rule.targets[0].output else ""
    matcher = Matcher(((term.key, term) for term in rule.targets), table.target_prefix)
    if any(matcher.read((path or ".") + suffix) for path in paths):
        return
    suffix = f" -> {rule.sources[0].output}" if rule.sources[0].output else ""
    matcher = Matcher(((term.key, term) for term in rule.sources), table.prefix)
    parts = {".".join(name.split(".")[:end]) for name in sources for end in range(1, name.count(".") + 1)}
    if not any(matcher.read(part + suffix) for part in parts):
        return  # the checkpoint has no such part either: a head that others have
    pattern = rule.targets[0].name
    hint = nearest(pattern.spell(dict.fromkeys(pattern.indices, 0)), [path for path in paths if path])
    message = f"the module has no part '{pattern}' of the probe '{rule}'"
    yield Fault(code=Code.NO_PROBES, where=rule.where, message=message, hint=hint or "take the probe out of [probes]")

"""The table of two models whose parts have the same names: two versions of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from porting.notation.table import Table, parse_table
from porting.target import named_tensors
from porting.tracing.trace import ARROW, PROBABILITIES, ROOT, SCORES, Point, module_of, split
from porting.trials.pairing import EQUAL_NAMES


def same_names(reference: nn.Module, port: nn.Module) -> Table:
    """The table that carries each tensor to the one of its name, and compares what the modules of one name compute.

    Args:
        reference, port: the two models; they may lie on the meta device.
    """
    return _unwritten("\n".join([*_weight_rules(reference, port), *_probes(reference, port)]))


def same_points(recorded: Sequence[Point], port: nn.Module) -> Table:
    """The table for a reference whose values have the names of the port's modules and outputs.

    Args:
        recorded: the reference's points.  One that no module of the port is named after is an output of the whole
            model: ``logits`` is compared with what the port returns under that name.
    """
    paths = {path or ROOT for path, _ in port.named_modules(remove_duplicate=False)}
    names = dict.fromkeys(split(point)[0] for point in recorded)
    probes = []
    for name in names:
        known = module_of(name) in paths
        if known or name.isidentifier():
            probes.append(f"{_quoted(name)} = {_quoted(name if known else f'{ROOT}{ARROW}{name}')}")
    return _unwritten("\n".join([*_weight_rules(port, port), "[probes]", *probes]))


def every_point(names: Sequence[Point]) -> Table:
    """The table that names these points of a reference, and nothing of any port."""
    probes = [f"{_quoted(name)} = {_quoted(name)}" for name in names]
    return _unwritten("\n".join(['[mapping]\nname = "every-point"\n[probes]', *probes]))


def same_weights(port: nn.Module) -> Table:
    """The table that carries each tensor of a module to itself, and compares nothing."""
    return _unwritten("\n".join(_weight_rules(port, port)))


def _unwritten(text: str) -> Table:
    """A table that stands in no file, so that its lines have no places that somebody could look up."""
    table = parse_table(text, where=EQUAL_NAMES)
    return replace(
        table,
        rules=tuple(replace(one, where=EQUAL_NAMES) for one in table.rules),
        probes=tuple(replace(one, where=EQUAL_NAMES) for one in table.probes),
        drops=tuple(replace(one, where=EQUAL_NAMES) for one in table.drops),
        ties=tuple(replace(one, where=EQUAL_NAMES) for one in table.ties),
    )


def _weight_rules(reference: nn.Module, port: nn.Module) -> Iterator[str]:
    """The sections of a table for tensors of equal names."""
    theirs, ours = dict(named_tensors(reference)), dict(named_tensors(port))
    first: dict[int, str] = {}
    ties = {name: first[id(tensor)] for name, tensor in ours.items() if first.setdefault(id(tensor), name) != name}
    yield '[mapping]\nname = "equal-names"\n[tensors]'
    for name in theirs:
        if name not in ties:
            yield f"{_quoted(name)} = {_quoted(name)}"
    yield "[ties]"
    for name, other in ties.items():
        yield f"{_quoted(name)} = {_quoted(other)}"
    yield "[drop]"
    for name, other in ties.items():
        if name in theirs:
            yield f"{_quoted(name)} = {_quoted(f'equals {other}')}"


def _probes(reference: nn.Module, port: nn.Module) -> Iterator[str]:
    yield "[probes]"
    ours = dict(port.named_modules(remove_duplicate=False))
    for path, part in reference.named_modules(remove_duplicate=False):
        called = not isinstance(part, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        if called and path in ours:
            inner = [f"{path or ROOT} -> {SCORES}", f"{path or ROOT} -> {PROBABILITIES}"]
            for point in [path, *inner] if path else inner:  # what the models return is paired by its names and values
                yield f"{_quoted(point)} = {_quoted(point)}"


def _quoted(text: str) -> str:
    return json.dumps(text)  # a string of JSON is one of TOML

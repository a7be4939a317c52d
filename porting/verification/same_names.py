"""The table of two models whose parts have the same names: two versions of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from torch import nn

from porting.notation.table import Table, parse_table
from porting.target import named_tensors
from porting.tracing.trace import ARROW, PROBABILITIES, ROOT, SCORES, Point, split


def same_names(reference: nn.Module, port: nn.Module) -> Table:
    """The table that carries each tensor to the one of its name, and compares what the modules of one name compute.

    Args:
        reference, port: the two models; they may lie on the meta device.
    """
    return parse_table("\n".join([*weight_rules(reference, port), *_probes(reference, port)]), where="equal names")


def same_points(recorded: Sequence[Point], port: nn.Module) -> Table:
    """The table for a recording of a model whose parts have the port's names."""
    paths = {path or ROOT for path, _ in port.named_modules(remove_duplicate=False)}
    names = dict.fromkeys(split(point)[0] for point in recorded)
    probes = [f"{_quoted(name)} = {_quoted(name)}" for name in names if name.partition(ARROW)[0] in paths]
    return parse_table("\n".join([*weight_rules(port, port), "[probes]", *probes]), where="equal names")


def weight_rules(reference: nn.Module, port: nn.Module) -> Iterator[str]:
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
            for point in (path or ROOT, f"{path or ROOT} -> {SCORES}", f"{path or ROOT} -> {PROBABILITIES}"):
                yield f"{_quoted(point)} = {_quoted(point)}"


def _quoted(text: str) -> str:
    return json.dumps(text)  # a string of JSON is one of TOML

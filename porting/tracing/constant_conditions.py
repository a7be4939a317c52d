"""What a condition in a model's code comes to whatever the inputs are, by what the modules' own attributes hold."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn


class Unknown(Exception):  # noqa: N818  # no error: it says that inputs decide
    """The value depends on the inputs."""


_COMPARISONS: Mapping[type[ast.cmpop], Callable[..., object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, many: item in many,
    ast.NotIn: lambda item, many: item not in many,
}
_CALLS: Mapping[str, Callable[..., object]] = {
    "isinstance": isinstance,
    "len": len,
    "hasattr": hasattr,
    "callable": callable,
    "bool": bool,
}
_LARGE = 1 << 20
"""No number of tokens or rows."""


@dataclass(frozen=True)
class ConditionEvaluator:
    """What is known in one function.

    Attributes:
        node: the function.
        kind: the class that it is a method of; empty for none.
        globals: where it looks names up.
        module: the model, for the instances of that class.
        written: attributes that are assigned outside of ``__init__``: inputs may change them.
        blind: nothing of ``self`` is known.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef
    kind: str
    globals: Mapping[str, object] = field(repr=False)
    module: nn.Module = field(repr=False)
    written: frozenset[str]
    blind: bool = False

    def unknowing(self) -> ConditionEvaluator:
        """The same for a function inside of it, whose names are others."""
        return replace(self, blind=True)

    def value(self, test: ast.expr) -> bool | None:
        """What a condition comes to in every instance; None when inputs decide."""
        instances = [] if self.blind or not self.kind else self._instances
        found = {self._truth(test, instance) for instance in instances}
        return found.pop() if len(found) == 1 else None

    def asks_training(self, test: ast.expr) -> bool:
        """Whether a condition asks for ``training``."""
        return any(isinstance(node, ast.Attribute) and node.attr == "training" for node in ast.walk(test))

    def numbers(self, test: ast.expr) -> tuple[int, ...]:
        """The whole numbers in a condition, and those that its attributes hold: lengths at which it may turn."""
        found: dict[int, None] = {}
        for node in ast.walk(test):
            for instance in (*self._instances, None):
                try:
                    value = self._value(node, instance) if isinstance(node, ast.expr) else None
                except Unknown:
                    continue
                if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGE:
                    found[value] = None
        return tuple(found)

    @cached_property
    def _instances(self) -> list[nn.Module]:
        def has(part: nn.Module) -> bool:
            return any(parent.__qualname__.rpartition(".")[2] == self.kind for parent in type(part).__mro__)

        alike: dict[object, nn.Module] = {}  # many layers are the same but for their weights
        for part in self.module.modules():
            if has(part):
                alike.setdefault(_shape(part), part)
        return list(alike.values())

    @cached_property
    def _locals(self) -> set[str]:
        """Names that the function binds itself."""
        inside = list(ast.walk(self.node))
        found = {node.arg for node in inside if isinstance(node, ast.arg)}
        return found | {node.id for node in inside if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}

    def _truth(self, test: ast.expr, instance: nn.Module) -> bool | None:
        if isinstance(test, ast.BoolOp):
            each = [self._truth(operand, instance) for operand in test.values]
            decides = isinstance(test.op, ast.Or)
            return decides if decides in each else None if None in each else not decides
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._truth(test.operand, instance)
            return None if inner is None else not inner
        try:
            return bool(self._value(test, instance))
        except Unknown:
            return None
        except Exception:  # noqa: BLE001  # the user's own values may refuse to be true or false
            return None

    def _value(self, node: ast.expr, instance: nn.Module | None) -> object:
        try:
            match node:
                case ast.Constant():
                    return node.value
                case ast.Name():
                    return self._named(node.id, instance)
                case ast.Attribute() if node.attr not in self.written:
                    return getattr(self._value(node.value, instance), node.attr)
                case ast.Compare() if len(node.ops) == 1:
                    left, right = self._value(node.left, instance), self._value(node.comparators[0], instance)
                    return _COMPARISONS[type(node.ops[0])](left, right)
                case ast.Call(func=ast.Name(id=name)) if name in _CALLS and not node.keywords:
                    return _CALLS[name](*(self._value(argument, instance) for argument in node.args))
                case ast.Tuple() | ast.List() | ast.Set():
                    return [self._value(element, instance) for element in node.elts]
        except Unknown:
            raise
        except Exception as error:  # a property of the user's own may raise anything
            raise Unknown from error
        raise Unknown

    def _named(self, name: str, instance: nn.Module | None) -> object:
        arguments = [argument.arg for argument in (*self.node.args.posonlyargs, *self.node.args.args)]
        if arguments and name == arguments[0] and self.kind and instance is not None and not self.blind:
            return instance
        if name in self._locals:
            raise Unknown
        if name in self.globals:
            return self.globals[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise Unknown


def _shape(part: nn.Module) -> object:
    """What tells a module from its likes, but for tensors."""
    plain = tuple(
        (name, value) for name, value in sorted(vars(part).items()) if isinstance(value, str | int | float | None)
    )
    return type(part), plain, tuple((name, type(submodule)) for name, submodule in part._modules.items())


def assigned(tree: ast.AST) -> frozenset[str]:
    """Attributes that the code of a file assigns outside of ``__init__``."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            continue
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        waiting += ast.iter_child_nodes(node)
    return frozenset(found)

"""Evaluating conditions in a model's code that do not depend on its inputs, from the attributes of its modules."""

from __future__ import annotations

import ast
import builtins
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn


class Unknown(Exception):  # noqa: N818  # not an error: it signals that inputs decide
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
"""Integers from here on are not lengths or batch sizes."""


@dataclass(frozen=True)
class ConditionEvaluator:
    """Evaluates the conditions of one function.

    Attributes:
        class_name: the class of which it is a method; empty for none.
        module: the model, which contains the instances of that class.
        written: attributes that are assigned outside of ``__init__``, and so may depend on inputs.
        nested: it is a function inside the method, in which ``self`` is unknown.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef
    class_name: str
    globals: Mapping[str, object] = field(repr=False)
    module: nn.Module = field(repr=False)
    written: frozenset[str]
    nested: bool = False

    def for_nested(self) -> ConditionEvaluator:
        """Return the evaluator for a function inside this one, which has other local names."""
        return replace(self, nested=True)

    def value(self, test: ast.expr) -> bool | None:
        """Return the value of a condition if it is the same in every instance; None if inputs decide."""
        instances = [] if self.nested or not self.class_name else self._instances
        values = {self._truth(test, instance) for instance in instances}
        return values.pop() if len(values) == 1 else None

    def asks_training(self, test: ast.expr) -> bool:
        """Return whether a condition reads ``training``."""
        return any(isinstance(node, ast.Attribute) and node.attr == "training" for node in ast.walk(test))

    def numbers(self, test: ast.expr) -> tuple[int, ...]:
        """Return the integers in a condition and in the attributes that it reads: lengths at which it may change."""
        numbers: dict[int, None] = {}
        for node in ast.walk(test):
            for instance in (*self._instances, None):
                try:
                    value = self._value(node, instance) if isinstance(node, ast.expr) else None
                except Unknown:
                    continue
                if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGE:
                    numbers[value] = None
        return tuple(numbers)

    @cached_property
    def _instances(self) -> list[nn.Module]:
        def is_instance(part: nn.Module) -> bool:
            return any(parent.__qualname__.rpartition(".")[2] == self.class_name for parent in type(part).__mro__)

        by_configuration: dict[object, nn.Module] = {}  # most layers differ only in their weights
        for part in self.module.modules():
            if is_instance(part):
                by_configuration.setdefault(_configuration(part), part)
        return list(by_configuration.values())

    @cached_property
    def _locals(self) -> set[str]:
        """The names that the function binds."""
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
        if arguments and name == arguments[0] and self.class_name and instance is not None and not self.nested:
            return instance
        if name in self._locals:
            raise Unknown
        if name in self.globals:
            return self.globals[name]
        if hasattr(builtins, name):
            return getattr(builtins, name)
        raise Unknown


def _configuration(part: nn.Module) -> object:
    """Return what distinguishes a module from others of its class, except for tensors."""
    attributes = tuple(
        (name, value) for name, value in sorted(vars(part).items()) if isinstance(value, str | int | float | None)
    )
    return type(part), attributes, tuple((name, type(submodule)) for name, submodule in part._modules.items())


def assigned(tree: ast.AST) -> frozenset[str]:
    """Return the attributes that the code of a file assigns outside of ``__init__``."""
    names: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            continue
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        pending += ast.iter_child_nodes(node)
    return frozenset(names)

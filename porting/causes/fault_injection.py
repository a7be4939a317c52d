"""Planting mistakes into a model: the results of torch functions that it calls are replaced.

Only the model's class is changed, so that its weights, names and signature stay the same, and its copies have the
mistake, too. The code is independent of the search for causes, so that each can test the other; they share only how
calls are observed (:mod:`porting.tracing.calls`, :mod:`porting.tracing.attention`).
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from porting.causes.events import TANH, VALUE_PRESERVING, Event, InjectedFault, Inventory, Pass, Scores
from porting.causes.written_out_operations import WrittenOutOperations, rms_norm
from porting.tracing.attention import WrittenOut
from porting.tracing.calls import Kind, argument, kind_of
from porting.tracing.torch_modes import FunctionMode, eagerly


def plant(model: nn.Module, fault: InjectedFault, inventory: Inventory) -> list[str]:
    """Plant a mistake into a model.

    Args:
        inventory: what :func:`watch` has observed of the model.

    Returns:
        A list to which each later pass adds the paths of the modules in which the mistake was made.
    """
    sites: list[str] = []
    _run_under(model, lambda module, inputs: _Mode(fault, Pass(module, inputs, inventory, sites)))
    return sites


def watch(model: nn.Module, inventory: Inventory | None = None) -> Inventory:
    """Observe the operations of a model in its next pass, which computes what it always does.

    Args:
        inventory: where the operations are recorded; a new one by default.

    Returns:
        The inventory.
    """
    known = Inventory() if inventory is None else inventory
    nothing = InjectedFault(name="", actions={})
    _run_under(model, lambda module, inputs: _Mode(nothing, Pass(module, inputs, known, []), learning=not known.roles))
    return known


def cure(model: nn.Module) -> None:
    """Remove everything that was planted or watched."""
    while (before := getattr(type(model), _BEFORE, None)) is not None:
        model.__class__ = before


_BEFORE = "_porting_class_before"


def _run_under(model: nn.Module, mode: Callable[[nn.Module, Mapping[str, Tensor]], _Mode]) -> None:
    """Run the model's forward under a mode, in a class with the same name and signature."""
    kind = type(model)
    names = list(inspect.signature(kind.forward).parameters)[1:]

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # the model's own
        named = dict(zip(names, args, strict=False)) | kwargs
        inputs = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
        mode_in_use = mode(self, inputs)
        with eagerly(), mode_in_use, mode_in_use.paths(), WrittenOut(by_heads=True):
            return kind.forward(self, *args, **kwargs)

    attributes = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__, _BEFORE: kind}
    model.__class__ = type(kind.__name__, (kind,), attributes)


_EVENTS = frozenset({
    Kind.NORM, Kind.RMS, Kind.ACTIVATION, Kind.EMBEDDING, Kind.DROPOUT, Kind.SUM, Kind.POOL,
})  # fmt: skip
"""Calls that are events as they are; linear layers, scores and contexts need more context."""


class _Mode(FunctionMode):
    """Turns the calls of a model into events, and lets a mistake replace their results.

    It is a mode of torch functions because a mistake replaces calls, wherever they are made.
    """

    def __init__(self, fault: InjectedFault, model_pass: Pass, *, learning: bool = False) -> None:
        super().__init__()
        self._fault = fault
        self._pass = model_pass
        self._learning = learning
        self._counts: Counter[str] = Counter()
        self._applicable = 0
        self._path: list[str] = []
        self._tensors: list[Tensor] = []  # keeps them alive, so that no id is reused
        self._scores: dict[int, Scores] = {}
        self._probabilities: dict[int, Scores] = {}
        self._looked_up: set[int] = set()  # embeddings and their sums, without results of linear layers
        self._linear_of: dict[int, int] = {}  # tensor -> the linear layer from which it was computed
        self._parameters = {id(parameter) for parameter in model_pass.model.parameters()}
        self._written_out = WrittenOutOperations(self._parameters)
        self._recognises = learning or not {Kind.NORM, Kind.RMS, Kind.ACTIVATION}.isdisjoint(fault.actions)
        self._events: dict[int, str] = {}  # tensor -> the event that computed it

    @contextmanager
    def paths(self) -> Iterator[None]:
        """Return a context in which it is known which module is running."""
        names = {id(part): path for path, part in self._pass.model.named_modules()}
        hook = nn.modules.module
        enter = hook.register_module_forward_pre_hook(lambda part, args: self._path.append(names.get(id(part), "")))
        leave = hook.register_module_forward_hook(lambda part, args, output: self._leave())
        self._path.append("")
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _leave(self) -> None:
        self._path.pop()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        result = self._result(func, args, kwargs)
        if self._recognises:  # written-out operations matter
            result = self._completed(func, args, result)
            self._written_out.remember(func, args, kwargs, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._remember(func, args, leaf)
        return result

    def _completed(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        """Return the result of a step that completes a written-out norm or activation."""
        kind = kind_of(func)
        if kind in _EVENTS and kind is not Kind.SUM:
            return result
        norm = self._written_out.norm(func, args, result)
        if norm is not None:
            changed = self._replaced_result(*norm.event, result)
            self._written_out.became(changed, norm)
            return changed
        source = self._written_out.activation(func, args, result)
        if source is None:
            return result
        if self._learning:
            inner = self._written_out.inside(args, source)
            self._pass.inventory.inner |= {self._events[event_id] for event_id in inner if event_id in self._events}
        return self._replaced_result(
            Kind.ACTIVATION, lambda value: result if value is source else value, (source,), result
        )

    def _replaced_result(self, kind: Kind, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        """Return what a mistake gives for a written-out operation; the model's own result if it is not made."""
        sites_before = len(self._pass.sites)
        result_of_event = self._event(kind, func, args, {}, written_out=True)
        return result_of_event if len(self._pass.sites) > sites_before else result

    def _remember(self, func: Callable[..., Any], args: tuple[Any, ...], result: Tensor) -> None:
        self._tensors.append(result)
        if kind_of(func) is Kind.LINEAR or not args:
            return
        layers = [self._linear_of[id(leaf)] for leaf in tree_leaves(args) if id(leaf) in self._linear_of]
        if layers and id(result) not in self._linear_of:
            self._linear_of[id(result)] = layers[0]

    def _result(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind is Kind.LINEAR:
            return self._linear(func, args, kwargs)
        if kind is Kind.SOFTMAX and id(args[0]) in self._scores:
            scores = self._scores[id(args[0])]
            result = self._event(Kind.SCORES, func, args, kwargs, scores=scores)
            self._probabilities[id(result)] = scores
            return result
        if kind is Kind.PRODUCT:
            return self._product(func, args, kwargs)
        return self._other(func, args, kwargs)

    def _other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if func in TANH and args and id(args[0]) in self._scores:
            kind = None  # a soft cap of scores, and no activation
        if kind is Kind.SUM and len(args) == 2 and isinstance(args[1], Tensor) and not self._attending(args):
            if any(id(arg) in self._looked_up for arg in args) and not any(id(arg) in self._linear_of for arg in args):
                result_of_sum = func(*args, **kwargs)
                self._looked_up.add(id(result_of_sum))
                return result_of_sum
            return self._event(kind, func, args, kwargs, born=tuple(self._age(arg) for arg in args))
        if kind is Kind.RMS:
            shape, weight, eps = (argument(func, args, kwargs, name) for name in ("normalized_shape", "weight", "eps"))
            eps = torch.finfo(args[0].dtype).eps if eps is None else eps
            result = self._event(kind, rms_norm, (args[0], shape, weight, None, eps), {})
        elif kind in _EVENTS and kind is not Kind.SUM:
            result = self._event(kind, func, args, kwargs)
            if kind is Kind.EMBEDDING:
                self._looked_up.add(id(result))
        else:
            result = func(*args, **kwargs)
        self._track(func, args, result)
        return result

    def _attending(self, args: tuple[Any, ...]) -> bool:
        return any(id(arg) in self._scores for arg in args)

    def _age(self, tensor: Tensor) -> int:
        return next((place for place, kept in enumerate(self._tensors) if kept is tensor), -1)

    def _track(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """Track scores and probabilities through a call."""
        if not isinstance(result, Tensor) or not args:
            return
        source = next((arg for arg in args if id(arg) in self._scores), None)
        if source is not None:
            rest = [arg for arg in args if arg is not source]
            parts = self._scores[id(source)].after(func, rest, result)
            if parts is not None:
                self._scores[id(result)] = parts
        if id(args[0]) in self._probabilities and (func in VALUE_PRESERVING or kind_of(func) is Kind.FILL):
            self._probabilities[id(result)] = self._probabilities[id(args[0])]

    def _product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first, second = args[:2]
        if id(first) in self._probabilities:
            self._name(second, "value")
            return self._context(func, args, kwargs, self._probabilities[id(first)])
        result = func(*args, **kwargs)
        if not {id(first), id(second)} & self._parameters and first.ndim >= 3 and second.ndim >= 3:
            self._scores[id(result)] = Scores(query=first, key=second.mT)
            self._name(first, "query")
            self._name(second, "key")
        return result

    def _context(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scores: Scores
    ) -> Tensor:
        context: Tensor = self._event(Kind.CONTEXT, func, args, kwargs, scores=scores)
        if id(args[1]) in self._linear_of:
            self._linear_of[id(context)] = self._linear_of[id(args[1])]
        self._tensors.append(context)
        return context

    def _linear(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, inventory = self._counts["linear"], self._pass.inventory
        if self._learning:
            inventory.roles.append("")
            if id(args[0]) in self._linear_of and self._after_attention(args[0]):
                inventory.roles[-1] = "output"
        role = inventory.roles[number] if number < len(inventory.roles) else ""
        result = self._event(Kind.LINEAR, func, args, kwargs, role=role)
        self._linear_of[id(result)] = number
        self._tensors.append(result)
        return result

    def _after_attention(self, tensor: Tensor) -> bool:
        role = self._pass.inventory.roles[self._linear_of[id(tensor)]]
        return role in ("value", "fused")

    def _name(self, tensor: Tensor, role: str) -> None:
        if self._learning and id(tensor) in self._linear_of:
            number = self._linear_of[id(tensor)]
            current = self._pass.inventory.roles[number]
            self._pass.inventory.roles[number] = role if current in ("", role) else "fused"

    def _event(
        self,
        kind: Kind,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        role: str = "",
        scores: Scores | None = None,
        born: tuple[int, ...] = (),
        written_out: bool = False,
    ) -> Any:
        number = self._counts[f"{kind} by hand" if written_out else kind]
        self._counts[f"{kind} by hand" if written_out else kind] += 1
        action, modules = self._fault.actions.get(kind), self._fault.modules
        module = self._path[-1] if self._path else ""
        name = f"{kind} {number}"
        inner = name in self._pass.inventory.inner and not written_out
        if action is None or inner or (modules is not None and module not in modules):
            unchanged = func(*args, **kwargs)
            if not written_out:
                self._events[id(unchanged)] = name
            return unchanged
        event = Event(
            kind=kind,
            function=func,
            args=args,
            kwargs=kwargs,
            number=number,
            role=role,
            scores=scores,
            born=born,
            pass_=self._pass,
        )
        replacement = action(event)
        if replacement is NotImplemented:
            return func(*args, **kwargs)
        index = self._applicable
        self._applicable += 1
        if self._fault.only is not None and index not in self._fault.only:
            return func(*args, **kwargs)
        self._pass.sites.append(module)
        return replacement

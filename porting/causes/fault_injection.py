"""A model that runs with a mistake in it: each torch function that it calls may give something else.

Nothing of the model is changed but its class, so that its weights, names and signature are as before, and a copy of it
has the mistake, too.  This is for planting mistakes; with the tape on which they are looked for it shares how calls are
seen (:mod:`porting.tracing.calls`, :mod:`porting.tracing.attention`), and not what is made of them.
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

from porting.causes.events import BEND, SAME, Event, InjectedFault, Inventory, Pass, Scores
from porting.causes.written_out_operations import Written, rms_norm
from porting.tracing.attention import WrittenOut
from porting.tracing.calls import Kind, argument, kind_of
from porting.tracing.torch_modes import FunctionMode, eagerly


def plant(model: nn.Module, fault: InjectedFault, inventory: Inventory) -> list[str]:
    """Make a mistake in a model, from now on; returns a list that is told the modules in which it was made."""
    sites: list[str] = []
    _become(model, lambda module, inputs: _Mode(fault, Pass(module, inputs, inventory, sites)))
    return sites


def watch(model: nn.Module, inventory: Inventory | None = None) -> Inventory:
    """The model tells, in its next pass, what it consists of; it computes what it always does."""
    known = Inventory() if inventory is None else inventory
    nothing = InjectedFault(name="", actions={})
    _become(model, lambda module, inputs: _Mode(nothing, Pass(module, inputs, known, []), learning=not known.roles))
    return known


def cure(model: nn.Module) -> None:
    """Take out what was planted or watched."""
    while (before := getattr(type(model), _BEFORE, None)) is not None:
        model.__class__ = before


_BEFORE = "_porting_class_before"


def _become(model: nn.Module, mode: Callable[[nn.Module, Mapping[str, Tensor]], _Mode]) -> None:
    """The model's forward runs under a mode; its class has the same name and its forward the same signature."""
    kind = type(model)
    names = list(inspect.signature(kind.forward).parameters)[1:]

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # the model's own
        named = dict(zip(names, args, strict=False)) | kwargs
        inputs = {name: tensor for name, tensor in named.items() if isinstance(tensor, Tensor)}
        mode_in_use = mode(self, inputs)
        with eagerly(), mode_in_use, mode_in_use.paths(), WrittenOut(by_heads=True):
            return kind.forward(self, *args, **kwargs)

    made = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__, _BEFORE: kind}
    model.__class__ = type(kind.__name__, (kind,), made)


_EVENTS = frozenset({
    Kind.NORM, Kind.RMS, Kind.ACTIVATION, Kind.EMBEDDING, Kind.DROPOUT, Kind.SUM, Kind.POOL,
})  # fmt: skip
"""What is an event as it stands; linear maps, scores and contexts are looked at first."""


class _Mode(FunctionMode):
    """Sees what a model does as events, and lets a mistake answer them.

    It is a mode because a mistake is made in what a model calls, and in no module of its own.
    """

    def __init__(self, fault: InjectedFault, model_pass: Pass, *, learning: bool = False) -> None:
        super().__init__()
        self._fault = fault
        self._pass = model_pass
        self._learning = learning
        self._counts: Counter[str] = Counter()
        self._applied = 0
        self._path: list[str] = []
        self._kept: list[Tensor] = []  # so that no id is used again
        self._scores: dict[int, Scores] = {}
        self._weighed: dict[int, Scores] = {}
        self._looked_up: set[int] = set()  # embeddings and their sums, without what a linear map made
        self._from: dict[int, int] = {}  # tensor -> the linear map that it was made by
        self._parameters = {id(parameter) for parameter in model_pass.model.parameters()}
        self._written = Written(self._parameters)
        self._reads = learning or not {Kind.NORM, Kind.RMS, Kind.ACTIVATION}.isdisjoint(fault.actions)
        self._events: dict[int, str] = {}  # tensor -> the event that made it

    @contextmanager
    def paths(self) -> Iterator[None]:
        """Knows which module is running."""
        names = {id(part): path for path, part in self._pass.model.named_modules()}
        hook = nn.modules.module
        enter = hook.register_module_forward_pre_hook(lambda part, args: self._path.append(names.get(id(part), "")))
        leave = hook.register_module_forward_hook(lambda part, args, output: self._left())
        self._path.append("")
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _left(self) -> None:
        self._path.pop()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`FunctionMode.call`."""
        result = self._answer(func, args, kwargs)
        if self._reads:  # what is written out is of interest
            result = self._by_hand(func, args, result)
            self._written.remember(func, args, kwargs, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._remember(func, args, leaf)
        return result

    def _by_hand(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        """What a step gives that completes a norm or an activation, if it was written out."""
        kind = kind_of(func)
        if kind in _EVENTS and kind is not Kind.SUM:
            return result
        norm = self._written.norm(func, args, result)
        if norm is not None:
            made = self._instead(*norm.event, result)
            self._written.became(made, norm)
            return made
        given = self._written.activation(func, args, result)
        if given is None:
            return result
        if self._learning:
            inside = self._written.inside(args, given)
            self._pass.inventory.inner |= {self._events[event_id] for event_id in inside if event_id in self._events}
        return self._instead(Kind.ACTIVATION, lambda value: result if value is given else value, (given,), result)

    def _instead(self, kind: Kind, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> Any:
        """What a mistake gives for what was written out; the model's own result where it is not made."""
        before = len(self._pass.sites)
        made = self._event(kind, func, args, {}, by_hand=True)
        return made if len(self._pass.sites) > before else result

    def _remember(self, func: Callable[..., Any], args: tuple[Any, ...], made: Tensor) -> None:
        self._kept.append(made)
        if kind_of(func) is Kind.LINEAR or not args:
            return
        before = [self._from[id(leaf)] for leaf in tree_leaves(args) if id(leaf) in self._from]
        if before and id(made) not in self._from:
            self._from[id(made)] = before[0]

    def _answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind is Kind.LINEAR:
            return self._linear(func, args, kwargs)
        if kind is Kind.SOFTMAX and id(args[0]) in self._scores:
            scores = self._scores[id(args[0])]
            found = self._event(Kind.SCORES, func, args, kwargs, scores=scores)
            self._weighed[id(found)] = scores
            return found
        if kind is Kind.PRODUCT:
            return self._product(func, args, kwargs)
        return self._other(func, args, kwargs)

    def _other(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if func in BEND and args and id(args[0]) in self._scores:
            kind = None  # a soft cap of scores, and no activation
        if kind is Kind.SUM and len(args) == 2 and isinstance(args[1], Tensor) and not self._attending(args):
            if any(id(arg) in self._looked_up for arg in args) and not any(id(arg) in self._from for arg in args):
                made = func(*args, **kwargs)
                self._looked_up.add(id(made))
                return made
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
        self._follow(func, args, result)
        return result

    def _attending(self, args: tuple[Any, ...]) -> bool:
        return any(id(arg) in self._scores for arg in args)

    def _age(self, tensor: Tensor) -> int:
        return next((place for place, kept in enumerate(self._kept) if kept is tensor), -1)

    def _follow(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """What a step does to scores or to probabilities."""
        if not isinstance(result, Tensor) or not args:
            return
        held = next((arg for arg in args if id(arg) in self._scores), None)
        if held is not None:
            rest = [arg for arg in args if arg is not held]
            known = self._scores[id(held)].after(func, rest, result)
            if known is not None:
                self._scores[id(result)] = known
        if id(args[0]) in self._weighed and (func in SAME or kind_of(func) is Kind.FILL):
            self._weighed[id(result)] = self._weighed[id(args[0])]

    def _product(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left, right = args[:2]
        if id(left) in self._weighed:
            self._name(right, "value")
            return self._context(func, args, kwargs, self._weighed[id(left)])
        result = func(*args, **kwargs)
        if not {id(left), id(right)} & self._parameters and left.ndim >= 3 and right.ndim >= 3:
            self._scores[id(result)] = Scores(query=left, key=right.mT)
            self._name(left, "query")
            self._name(right, "key")
        return result

    def _context(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scores: Scores
    ) -> Tensor:
        found: Tensor = self._event(Kind.CONTEXT, func, args, kwargs, scores=scores)
        if id(args[1]) in self._from:
            self._from[id(found)] = self._from[id(args[1])]
        self._kept.append(found)
        return found

    def _linear(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number, inventory = self._counts["linear"], self._pass.inventory
        if self._learning:
            inventory.roles.append("")
            if id(args[0]) in self._from and self._after_attention(args[0]):
                inventory.roles[-1] = "output"
        role = inventory.roles[number] if number < len(inventory.roles) else ""
        result = self._event(Kind.LINEAR, func, args, kwargs, role=role)
        self._from[id(result)] = number
        self._kept.append(result)
        return result

    def _after_attention(self, given: Tensor) -> bool:
        source = self._pass.inventory.roles[self._from[id(given)]]
        return source in ("value", "fused")

    def _name(self, tensor: Tensor, role: str) -> None:
        if self._learning and id(tensor) in self._from:
            number = self._from[id(tensor)]
            known = self._pass.inventory.roles[number]
            self._pass.inventory.roles[number] = role if known in ("", role) else "fused"

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
        by_hand: bool = False,
    ) -> Any:
        number = self._counts[f"{kind} by hand" if by_hand else kind]
        self._counts[f"{kind} by hand" if by_hand else kind] += 1
        action, modules = self._fault.actions.get(kind), self._fault.modules
        module = self._path[-1] if self._path else ""
        name = f"{kind} {number}"
        inner = name in self._pass.inventory.inner and not by_hand
        if action is None or inner or (modules is not None and module not in modules):
            made = func(*args, **kwargs)
            if not by_hand:
                self._events[id(made)] = name
            return made
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
        found = action(event)
        if found is NotImplemented:
            return func(*args, **kwargs)
        place = self._applied
        self._applied += 1
        if self._fault.only is not None and place not in self._fault.only:
            return func(*args, **kwargs)
        self._pass.sites.append(module)
        return found

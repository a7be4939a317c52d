"""The use that a module makes of its weights, operation by operation, while it runs.

A *unit* is a weight at work: a table that is looked up, a matrix with its bias, a norm's gain with its shift.  It is
known by the activation that goes in and the one that comes out.  Whether the matrix is an ``nn.Linear``, a raw
parameter in an ``einsum`` or a slice of a larger tensor makes no difference: the operations of torch's dispatcher are
what both sides have in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, is_dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from porting.frames import current_line
from porting.tracing.angle_tables import ANGLES
from porting.tracing.attention import WrittenOut
from porting.tracing.calls import tensors_in
from porting.tracing.float64 import forced_float64
from porting.tracing.torch_modes import DispatchMode
from porting.tracing.trace import leaves


def tensors_of(returned: object) -> list[Tensor]:
    """The tensors in tuples, lists, mappings and dataclasses, in order.

    >>> from types import MappingProxyType
    >>> import torch
    >>> one, two = torch.zeros(1), torch.ones(1)
    >>> tensors_of((one, MappingProxyType({"two": [two], "name": "x"}))) == [one, two]
    True
    """
    match returned:
        case Tensor():
            return [returned]
        case Mapping():
            parts = list(returned.values())
        case list() | tuple():
            parts = list(returned)
        case _ if is_dataclass(returned) and not isinstance(returned, type):
            parts = list(vars(returned).values())
        case _:
            return [one for one in tree_leaves(returned) if isinstance(one, Tensor)]
    return [tensor for part in parts for tensor in tensors_of(part)]


def numbers_of(returned: object) -> list[Tensor]:
    """The floating-point tensors of a result."""
    return [one for one in tensors_of(returned) if one.is_floating_point()]


@dataclass(frozen=True)
class TensorOrigin:
    """The origin of a tensor.

    Attributes:
        weights: the weights that it is made of; with activations among its makers, nothing.
        active: whether it depends on the inputs.
        near: the numbers of the units that it comes from with no other unit in between.
        moved: it is what units gave, moved about and added up but not computed with otherwise.
    """

    weights: tuple[str, ...] = ()
    active: bool = False
    near: frozenset[int] = frozenset()
    moved: bool = True


CONSTANT = TensorOrigin()


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """The place at which an activation was made.

    Attributes:
        number: of the operation that made it.
        tensor: what that gave.
        normed: what was divided by a number that was counted over its features: the norm's own operand.
        statistic: it is such a number, or is made of one: what it was counted over.
    """

    number: int
    tensor: Tensor
    normed: TensorSource | None = None
    statistic: TensorSource | None = None


MOVES = frozenset({
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select",
    "split", "split_with_sizes", "chunk", "unbind", "clone", "contiguous", "detach", "alias", "_to_copy", "narrow",
    "unflatten", "flatten", "_reshape_alias", "as_strided", "movedim", "unfold", "numpy_T", "copy", "lift_fresh",
})  # fmt: skip
SUMS = frozenset({"add", "sub"})
NEW = ("_like", "new_")
LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "embedding_bag", "take_along_dim"})
STATISTICS = frozenset({
    "mean", "var", "var_mean", "std", "std_mean", "pow", "square", "norm", "linalg_vector_norm", "sum",
})  # fmt: skip
"""The statistics over the features in a norm that is written by hand: their mean, their squares."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "dot", "matmul", "linear"})
NORMS = frozenset({"native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"})
ROOTS = NORMS | {
    "sqrt", "rsqrt", "std", "std_mean", "norm", "linalg_vector_norm", "native_group_norm", "native_batch_norm",
}  # fmt: skip
SOFTMAXES = frozenset({"_softmax", "softmax", "_safe_softmax"})
WRITES = frozenset(
    {"copy_", "index_put_", "index_copy_", "scatter_", "masked_scatter_", "slice_scatter", "index_fill_"}
)
"""Operations that put other values in the place of what a tensor held."""
RANDOM = frozenset({"bernoulli", "native_dropout", "rand", "randn", "rand_like", "randn_like", "normal", "uniform"})

Call = Callable[[nn.Module], object]


class WeightUse(StrEnum):
    """How a weight meets an activation."""

    LOOKUP = "lookup"  # rows are picked by an index
    TABLE = "table"  # added, a row for each position
    LINEAR = "linear"
    NORM = "norm"
    OTHER = "other"


TABLES = frozenset({WeightUse.LOOKUP, WeightUse.TABLE, WeightUse.OTHER})
"""The uses of weights that are neither matrices nor norms."""


@dataclass(eq=False)
class Unit:
    """A weight at work.

    Attributes:
        kind: how it meets the activation.
        weights, biases: names of the tensors that take part.
        number: of the operation; the same in each run.
        operand: what goes in; for a lookup the index, for a table nothing.
        output: what comes out, bias or shift included.
        scope: the innermost module that was running.
        centred: for a norm, whether the operand still has to be centred.
        into_first: for a matrix [a b], whether a is the axis that is summed over; None when that does not show.
        summed: for a matrix, the size of the axis that is summed over.
        eps: a norm's, where it shows.
        last: the number of the operation that gave the output.
        behind: the numbers of the units that it comes from with no other unit in between.
        given: what it is given, before it is normed and in the layout in which it was made: where it is a norm of a
            residual stream, the stream.  None where that does not show.
        given_at: the number of the operation that made this; -1 where none is known.
        divided: what it gives is then divided by a statistic of what it is given: a gain in front of the division, as
            in gain * (x - mean) / (std + eps).
        operation: for torch's own norms, and a weight of another use, the name of the operation.
    """

    kind: WeightUse
    weights: tuple[str, ...]
    number: int
    output: Tensor
    scope: str
    biases: tuple[str, ...] = ()
    operand: Tensor | None = None
    centred: bool = True
    into_first: bool | None = None
    summed: int = 0
    eps: float | None = None
    last: int = -1
    behind: frozenset[int] = frozenset()
    given: Tensor | None = None
    given_at: int = -1
    divided: bool = False
    operation: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors that take part."""
        return (*self.weights, *self.biases)


@dataclass
class OperationTrace:
    """One run.

    Attributes:
        units: in order of execution.
        outputs: what the module returned, tensors only.
        modules: path -> the output of that module's first call, where it is a tensor or begins with one.
        returned: what the model returns, where that is several tensors: its name or number -> the tensor.
        made, made_at: parameters that came into being while the module ran, and where in the user's code.
        random, random_at: whether random numbers were drawn, and where.
        operations: how many there were.
        values: what each operation on activations gave.
        constants: what was added to activations and is neither one of them nor made of weights.
        scores: what each softmax was given, with the number of the operation.
        products: what each product of two activations gave, times constants that it is scaled by, with the number of
            the last of these operations.
        roots: how many norms there are, with weights or without: each takes one root.
        angles: the cosines and sines that were computed, with the number of the operation.
        idle: matrices and gains whose products reach nothing that is returned, as those of an unused pooler.
    """

    units: list[Unit] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    modules: dict[str, Tensor] = field(default_factory=dict)
    returned: dict[str, Tensor] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    made_at: str = ""
    random: bool = False
    random_at: str = ""
    operations: int = 0
    values: list[Tensor] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    scores: list[tuple[int, Tensor]] = field(default_factory=list)
    products: list[tuple[int, Tensor]] = field(default_factory=list)
    roots: int = 0
    angles: list[tuple[int, Tensor]] = field(default_factory=list)
    idle: frozenset[str] = frozenset()

    def up_to(self, number: int) -> OperationTrace:
        """The trace of a run that ends after this operation: its units, scores and products."""
        return OperationTrace(
            units=[one for one in self.units if one.number <= number],
            scores=[one for one in self.scores if one[0] <= number],
            products=[one for one in self.products if one[0] <= number],
            operations=number,
        )


def _several(output: object) -> dict[str, Tensor]:
    """The tensors that are returned, by number or name, ``0.3`` within a container; none where that is not several."""
    found = {name: one for name, one in leaves(output).items() if one.is_floating_point()}
    return {name: one.detach().clone() for name, one in found.items()} if len(found) > 1 else {}


class _Enough(Exception):  # noqa: N818  # it ends a run and is not an error
    """The run has come as far as it was asked to."""


def trace_operations(
    module: nn.Module,
    call: Call,
    leaves: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    *,
    until: int | None = None,
    instead: Mapping[int, Tensor] | None = None,
    after: Mapping[int, Tensor] | None = None,
    angles: Mapping[int, Tensor] | None = None,
    keep: bool = False,
) -> OperationTrace:
    """Run ``module`` once and see its weights at work.

    Args:
        inputs: what it is given: whatever depends on these is an activation.
        until: the number of the operation to stop at.
        instead: number of a unit -> the operand that it shall be given.
        after: number of an operation -> what it shall give, if that is of the size of what it gives.
        angles: number of a cosine or sine, among these -> what it shall give.
        keep: keep every activation.
    """
    watch = _OperationRecorder(leaves, inputs, until, instead or {}, after or {}, angles or {}, keep=keep)
    with watch.attached(module), _in_one_spelling(module, watch):
        try:
            returned = call(module)
        except Exception:
            if not watch.ended:  # what ends a run arrives as another error where TorchScript or the module caught it
                raise
            returned = None
    found = watch.trace
    found.outputs = [one.detach() for one in tensors_of(returned)]
    found.idle = watch.idle(tensors_of(returned))
    found.operations = watch.count
    return found


def outputs_of(module: nn.Module, call: Call) -> list[Tensor]:
    """The outputs of a run without tracing, the same numbers as with it."""
    with _in_one_spelling(module):
        return [one.detach() for one in tensors_of(call(module))]


@contextmanager
def _in_one_spelling(module: nn.Module, watch: _OperationRecorder | None = None) -> Iterator[None]:
    """In float64, with attention written out."""
    einsum = torch.backends.opt_einsum  # where it is installed, it contracts three operands in an order of its own
    ordered = einsum.flags(enabled=False) if einsum.enabled else nullcontext()
    with torch.no_grad(), ordered, watch or nullcontext(), forced_float64(module), WrittenOut():
        yield


class _OperationRecorder(DispatchMode):
    """Sees weights at work, and can put other values in the place of what an operation is given or gives.

    It is a mode of the dispatcher, and no reader of the calls that the search for a cause records: two models that
    compute the same with ``nn.Linear``, ``x @ weight.T`` or ``addmm`` call different functions, and do the same
    operations.  Attention has one spelling here, too (:class:`porting.tracing.attention.WrittenOut`).
    """

    def __init__(
        self,
        leaves: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        until: int | None,
        instead: Mapping[int, Tensor],
        after: Mapping[int, Tensor],
        angles: Mapping[int, Tensor],
        *,
        keep: bool,
    ) -> None:
        super().__init__()
        self.trace = OperationTrace()
        self.count = 0
        self.ended = False
        self._until = until
        self._instead = instead
        self._after = after
        self._angles = angles
        self._keep = keep
        self._leaves = dict(leaves)
        self._storages: dict[int, str] = {}
        self._origins: dict[int, TensorOrigin] = {}
        self._kept: list[Tensor] = []
        self._products: dict[int, int] = {}
        self._scopes: list[str] = []
        self._units: dict[int, Unit] = {}
        self._before: dict[int, frozenset[int]] = {}
        self._stored: dict[int, TensorOrigin] = {}  # memory that activations were written into, as into a cache
        self._unfollowed: set[int] = set()  # units whose values go on in ways that origins do not tell
        self._sources: dict[int, TensorSource] = {}
        self._joined: dict[int, list[tuple[int, int, tuple[str, ...]]]] = {}
        for name, tensor in leaves.items():
            self._storages.setdefault(tensor.untyped_storage().data_ptr(), name)
            self._origins.setdefault(id(tensor), TensorOrigin(weights=(name,)))
        self._joined |= _slices(leaves)
        for tensor in inputs:
            self._origins[id(tensor)] = TensorOrigin(active=True)

    @contextmanager
    def attached(self, module: nn.Module) -> Iterator[None]:
        """Hooks that tell which module is running; they are gone afterwards."""
        hooks = []
        paths: dict[nn.Module, list[str]] = {}
        calls: Counter[nn.Module] = Counter()
        for path, part in module.named_modules(remove_duplicate=False):
            paths.setdefault(part, []).append(path)

        def enter(part: nn.Module, args: object) -> None:
            named = paths[part]  # one that several layers share has as many names, and runs by these in turn
            self._scopes.append(named[min(calls[part], len(named) - 1)])
            calls[part] += 1

        def leave(part: nn.Module, args: object, output: object) -> None:
            path, first = self._scopes.pop(), output
            if not path:
                self.trace.returned = _several(output)
            while isinstance(first, list | tuple) and first:
                first = first[0]
            if isinstance(first, Mapping) and first:
                first = next(iter(first.values()))
            if isinstance(first, Tensor) and first.is_floating_point():
                self.trace.modules.setdefault(path, first.detach().clone())

        def made(part: nn.Module, name: str, parameter: object) -> None:
            self.trace.made.append(f"{type(part).__name__}.{name}")
            self.trace.made_at = self.trace.made_at or current_line()

        for part in paths:
            hooks.append(part.register_forward_pre_hook(enter, prepend=True))
            hooks.append(part.register_forward_hook(leave, always_call=False))
        hooks.append(nn.modules.module.register_module_parameter_registration_hook(made))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _origin(self, tensor: Tensor) -> TensorOrigin:
        found = self._origins.get(id(tensor))
        if self._stored and tensor.numel() and tensor.untyped_storage().data_ptr() in self._stored:
            return self._stored[tensor.untyped_storage().data_ptr()]
        if found is None and tensor.numel() and tensor.untyped_storage().data_ptr() in self._joined:
            return self._part(tensor, CONSTANT)  # the parameter whose slices are weights
        if found is None and not isinstance(tensor, nn.Parameter) and tensor.numel():
            name = self._storages.get(tensor.untyped_storage().data_ptr())
            found = None if name is None else TensorOrigin(weights=(name,))
        return found or CONSTANT

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # as torch has them
        """See :meth:`DispatchMode.dispatch`."""
        number, self.count = self.count, self.count + 1
        if self._until is not None and number > self._until:
            self.ended = True
            raise _Enough
        name = func.overloadpacket.__name__.rstrip("_") if not func.overloadpacket.__name__.startswith("__") else ""
        given = tensors_in((args, kwargs))
        origins = [self._origin(one) for one in given]
        weights = tuple(dict.fromkeys(one for origin in origins if not origin.active for one in origin.weights))
        active = any(origin.active for origin in origins)
        if active and func.overloadpacket.__name__ in WRITES:
            weights = ()  # what it held is gone
            self._note_written(given[0], origins)
        if name in RANDOM and not (name == "native_dropout" and args[2:] and not args[2]):
            self.trace.random = True
            self.trace.random_at = self.trace.random_at or current_line()
        channels = _channels(name, given, origins) if weights and active else -1
        if weights and active and number in self._instead:
            args = self._substituted(args, self._instead[number].movedim(-1, channels))
        self.trace.scores += [(number, one.detach().clone()) for one in given[:1] if active and name in SOFTMAXES]
        self.trace.roots += active and (
            name in ROOTS or (name == "pow" and isinstance(args[1], float) and args[1] % 1 > 0)
        )
        result = func(*args, **kwargs)
        known = self._after.get(number, self._angles.get(len(self.trace.angles)) if name in ANGLES else None)
        if known is not None and known.numel() == tensors_in(result)[0].numel():
            result = _given_back(result, known.movedim(-1, channels), args)
        outputs = tensors_in(result)
        self._note_product(number, name, given, origins, outputs)
        self.trace.angles += [(number, one.detach().clone()) for one in outputs if name in ANGLES]
        self._kept += outputs
        if any(part in name for part in NEW):
            origin = CONSTANT
        elif not active:
            # ``cls + 0 * mask`` keeps a parameter in the graph, and nothing comes of it.
            none = name == "mul" and any(type(one) in {int, float} and one == 0 for one in args)
            origin = CONSTANT if none else TensorOrigin(weights=weights)
            if name == "cat" and len(weights) > 1 and result.is_contiguous():
                self._note_joined(given, origins, result)
        elif not weights:
            acting = [one for one in origins if one.active]
            if name in SUMS:
                still = [one for one, origin in zip(given, origins, strict=True) if not origin.active]
                self.trace.constants += [one.detach().clone() for one in still if one.is_floating_point()]
            near = self._near(name, given, origins)
            moved = name in MOVES or name in SUMS
            origin = TensorOrigin(active=True, near=near, moved=moved and all(one.moved for one in acting))
        else:
            near = self._see(number, name, func, args, given, origins, weights, outputs)
            origin = TensorOrigin(active=True, near=near)
        if active and isinstance(result, Tensor):
            self._note_source(number, name, given, result)
        self._note_origin(name, origin, outputs)
        return result

    def _note_product(
        self,
        number: int,
        name: str,
        given: Sequence[Tensor],
        origins: Sequence[TensorOrigin],
        outputs: Sequence[Tensor],
    ) -> None:
        """Keep a product of two activations, and in its place what constants make of it: scores that are scaled."""
        if name in PRODUCTS and sum(origin.active for origin in origins) > 1:
            self._products |= {id(one): len(self.trace.products) for one in outputs[:1]}
            self.trace.products += [(number, one.detach().clone()) for one in outputs[:1]]
            return
        place = self._products.get(id(given[0])) if given else None
        scaled = name in {"mul", "div"} and all(one.numel() == 1 for one in given[1:]) and not origins[-1].weights
        if place is None or not (scaled or name in MOVES):
            return
        self._products |= {id(one): place for one in outputs}
        if scaled:
            self.trace.products[place] = number, outputs[0].detach().clone()

    def _near(self, name: str, given: Sequence[Tensor], origins: Sequence[TensorOrigin]) -> frozenset[int]:
        """The units that a result comes from; not those behind a statistic that a norm divides by."""
        acting = [(tensor, origin) for tensor, origin in zip(given, origins, strict=True) if origin.active]
        if name in {"mul", "div"}:
            sources = [self._sources.get(id(tensor)) for tensor, _ in acting]
            sized = [source is not None and source.statistic is not None for source in sources]
            if any(sized) and not all(sized):
                self._unfollowed.update(*(origin.near for (_, origin), by in zip(acting, sized, strict=True) if by))
                acting = [one for one, by in zip(acting, sized, strict=True) if not by]
        return frozenset().union(*(origin.near for _, origin in acting))

    def idle(self, returned: Sequence[Tensor]) -> frozenset[str]:
        """See :class:`OperationTrace`; nothing where it is not known what one of the returned tensors comes from."""
        origins = [self._origin(one) for one in returned if one.is_floating_point()]
        if not origins or not all(one.active for one in origins):
            return frozenset()
        pending = [*self._unfollowed.union(*(one.near for one in origins))]
        reached = set[int]()
        while pending:
            number = pending.pop()
            if number not in reached:
                reached.add(number)
                pending += self._units[number].behind if number in self._units else ()
        kinds = {WeightUse.LINEAR, WeightUse.NORM}
        weights = {name for one in self.trace.units if one.kind in kinds for name in one.weights}
        used = {name for one in self.trace.units if one.number in reached for name in one.weights}
        return frozenset(weights - used) if reached else frozenset()

    def _note_written(self, into: Tensor, origins: Sequence[TensorOrigin]) -> None:
        written = [one for one in origins if one.active]
        near = frozenset().union(*(one.near for one in written))
        origin = TensorOrigin(active=True, near=near, moved=all(one.moved for one in written))
        self._stored[into.untyped_storage().data_ptr()] = origin
        self._unfollowed |= origins[0].near  # what is not written over is still there

    def _note_origin(self, name: str, origin: TensorOrigin, outputs: Sequence[Tensor]) -> None:
        if name == "_local_scalar_dense":  # the model goes on with a number
            self._unfollowed |= origin.near
        for one in outputs:
            self._origins[id(one)] = origin if origin.active or name not in MOVES else self._part(one, origin)
            if self._keep and origin.active and one.is_floating_point() and name not in MOVES:
                self.trace.values.append(one.detach().clone())

    def _note_joined(self, given: Sequence[Tensor], origins: Sequence[TensorOrigin], result: Tensor) -> None:
        """Note where in a row of weights each of them lies, as ``torch.cat`` puts them along their first axis."""
        ends = [0, *accumulate(one.numel() for one in given)]
        whole = all(
            torch.equal(part.reshape(-1), result.reshape(-1)[a:b])
            for part, (a, b) in zip(given, pairwise(ends), strict=True)
        )
        if whole:
            pieces = [(*span, origin.weights) for span, origin in zip(pairwise(ends), origins, strict=True)]
            self._joined[result.untyped_storage().data_ptr()] = pieces

    def _part(self, tensor: Tensor, origin: TensorOrigin) -> TensorOrigin:
        """The weights that a slice of a row of weights consists of."""
        pieces = self._joined.get(tensor.untyped_storage().data_ptr()) if self._joined and tensor.numel() else None
        if pieces is None:
            return origin
        first = tensor.storage_offset()
        last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        names = (name for start, end, some in pieces if start <= last and end > first for name in some)
        return TensorOrigin(weights=tuple(dict.fromkeys(names)))

    def _note_source(self, number: int, name: str, given: Sequence[Tensor], result: Tensor) -> None:
        """Note where a result was made: what was only moved about is followed back, and so is what was normed."""
        known = [self._sources.get(id(one)) for one in given]
        first = known[0] if known else None
        if name in MOVES and first is not None and given[0].numel() == result.numel():
            self._sources[id(result)] = first
            return
        sizes = [one for one in known if one is not None and one.statistic is not None]
        whole = [one for one in known if one is not None and one.statistic is None]
        source = TensorSource(number=number, tensor=result)
        if sizes and whole and name in {"mul", "div"}:
            self._note_division(number, sizes[0], given, result)
        if name in STATISTICS and first is not None:
            source = replace(source, statistic=first.statistic or first.normed or first)
        elif name in {"mul", "div"} and len(given) == 2 and given[0] is given[1] and first is not None:
            source = replace(source, statistic=first.normed or first)
        elif sizes and not whole:  # eps is added to what is counted, or its root is taken
            source = replace(source, statistic=sizes[0].statistic)
        elif sizes and name in {"mul", "div", "sub"}:
            source = replace(source, normed=sizes[0].statistic)
        self._sources[id(result)] = source

    def _note_division(self, number: int, by: TensorSource, given: Sequence[Tensor], result: Tensor) -> None:
        """Note the gain whose result is divided by a statistic of what the gain was given: the norm ends here."""
        near = {one for tensor in given for one in self._origin(tensor).near if self._origin(tensor).active}
        gains = (self._units[one] for one in near if one in self._units)
        for unit in (one for one in gains if one.kind is WeightUse.NORM and one.weights):
            if by.statistic is None or unit.given_at != by.statistic.number:
                continue
            unit.divided = True
            if not unit.biases and any(torch.equal(one, unit.output) for one in given if one.shape == result.shape):
                unit.output, unit.last = result.detach().clone(), number

    def _note_given(self, unit: Unit, value: Tensor) -> None:
        source = self._sources.get(id(value))
        if source is not None and source.statistic is None:
            source = source.normed or source
            unit.given, unit.given_at = source.tensor.detach().clone(), source.number

    def _substituted(self, args: tuple[Any, ...], value: Tensor) -> tuple[Any, ...]:
        """The arguments with the activation replaced, in whatever shape it is taken."""
        done = False

        def exchange(one: object) -> object:
            nonlocal done
            fits = isinstance(one, Tensor) and self._origin(one).active and one.numel() == value.numel() and not done
            if not fits or not isinstance(one, Tensor):
                return one
            done = True
            instead = value.reshape(one.shape).to(one.dtype)
            self._origins[id(instead)] = self._origin(one)
            self._kept.append(instead)
            return instead

        flat, spec = tree_flatten(args)
        return tuple(tree_unflatten([exchange(one) for one in flat], spec))

    def _see(
        self,
        number: int,
        name: str,
        func: Any,
        args: tuple[Any, ...],
        given: Sequence[Tensor],
        origins: Sequence[TensorOrigin],
        weights: tuple[str, ...],
        outputs: Sequence[Tensor],
    ) -> frozenset[int]:
        """Note a weight at work; the units that the result comes from: those before a table that is added."""
        pure = [
            (one, origin) for one, origin in zip(given, origins, strict=True) if origin.weights and not origin.active
        ]
        acting = [(one, origin) for one, origin in zip(given, origins, strict=True) if origin.active]
        value, before = acting[0]
        self._before[number] = before.near
        channels = _channels(name, given, origins)
        value, output = value.movedim(channels, -1), outputs[0].detach().movedim(channels, -1).clone()
        unit = Unit(kind=WeightUse.OTHER, weights=weights, number=number, output=output, scope=self._scope)
        unit.behind = frozenset().union(*(origin.near for _, origin in acting))
        self._note_given(unit, acting[0][0])
        if name in LOOKUPS:
            unit.kind, unit.operand = WeightUse.LOOKUP, value.detach().clone()
        elif name in PRODUCTS:
            unit.kind, unit.operand = WeightUse.LINEAR, value.detach().clone()
            if name in {"addmm", "baddbmm", "addbmm"}:
                first = self._origin(args[0])
                unit.biases = first.weights if not first.active else ()
                pure = [(one, origin) for one, origin in pure if one is not args[0]]
                acting = [(one, origin) for one, origin in acting if one is not args[0]]
                if not pure or not acting:  # a bias alone, and the product is of two activations
                    unit.kind, unit.weights, unit.biases = WeightUse.OTHER, weights, ()
                    return frozenset((self._add(unit),))
                unit.operand = acting[0][0].detach().clone()
            unit.weights = tuple(dict.fromkeys(one for _, origin in pure for one in origin.weights))
            self._orient(unit, pure[0][0], args)
        elif name == "convolution":
            unit.kind, unit.operand = WeightUse.LINEAR, _without_padding(value.detach()).clone()
            self._note_kernel(unit, args)
        elif name in NORMS:
            unit.kind, unit.operand, unit.operation = WeightUse.NORM, value.detach().clone(), name
            unit.centred = "rms" not in name
            unit.weights, unit.biases = weights[:1], weights[1:]
            unit.eps = next((one for one in reversed(args) if isinstance(one, float)), None)
        elif name in {"mul", "div"}:
            unit.kind, unit.operand, unit.centred = WeightUse.NORM, value.detach().clone(), False
        elif name in {"add", "sub", "rsub"} or _is_added(name, pure[0][0], args):
            merged = self._merged(pure[0][0], weights, before, output) if "scaled" not in name else None
            if merged is not None:
                self._units[merged].last = number
                return frozenset((merged,))
            added = pure[0][0]
            rows = added.numel() > max(added.shape, default=1) or self._embedded(before)
            unit.kind = WeightUse.TABLE if rows else WeightUse.NORM
            unit.output = added.detach().clone() if unit.kind is WeightUse.TABLE else output
            unit.operand = None if unit.kind is WeightUse.TABLE else value.detach().clone()
            if unit.kind is WeightUse.NORM:
                unit.weights, unit.biases = (), weights
            seen = frozenset((self._add(unit),))
            return seen if unit.kind is WeightUse.NORM else before.near or seen
        else:
            unit.operand, unit.operation = value.detach().clone(), name
        return frozenset((self._add(unit),))

    def _note_kernel(self, unit: Unit, args: tuple[Any, ...]) -> None:
        """Note a convolution's weights, and how many numbers each output is a sum of where one tensor shows that."""
        unit.biases = self._origin(args[2]).weights if isinstance(args[2], Tensor) else ()
        unit.weights = tuple(one for one in unit.weights if one not in unit.biases)
        if not args[6] and len(unit.weights) == 1:
            unit.summed = args[1].numel() // args[1].shape[0]

    def _add(self, unit: Unit) -> int:
        unit.last = unit.number
        if (
            unit.kind is WeightUse.OTHER and not unit.biases
        ):  # words of the model's own in a row: each is a weight by itself
            for weight in unit.weights[:-1]:
                self.trace.units.append(replace(unit, weights=(weight,)))
            unit.weights = unit.weights[-1:]
        self.trace.units.append(unit)
        self._units[unit.number] = unit
        return unit.number

    def _merged(self, added: Tensor, weights: tuple[str, ...], before: TensorOrigin, output: Tensor) -> int | None:
        """The unit whose bias or shift this is: the last one before it that has none yet, and has so many features."""
        near = [self._units[one] for one in sorted(before.near, reverse=True) if one in self._units]
        for unit in near:
            if unit.biases or not unit.weights or unit.kind not in {WeightUse.LINEAR, WeightUse.NORM}:
                continue
            if unit.kind is WeightUse.LINEAR and before.moved and _spans(added, unit.output):
                alone = before.near == {unit.number}
                unit.biases = weights
                unit.output = output if alone else unit.output + added.detach().reshape(-1)
                return unit.number
            if unit.kind is WeightUse.NORM and added.numel() == output.shape[-1]:
                if before.near - {unit.number} - self._before[unit.number]:
                    continue
                unit.biases, unit.output = weights, output
                return unit.number
        return None

    def _embedded(self, before: TensorOrigin) -> bool:
        """Whether an activation is a sum of embeddings and nothing else: a row that is added to it is one too."""
        units = [self._units[one] for one in before.near if one in self._units]
        return bool(units) and before.moved and all(one.kind in {WeightUse.LOOKUP, WeightUse.TABLE} for one in units)

    def _orient(self, unit: Unit, effective: Tensor, args: tuple[Any, ...]) -> None:
        """Find the axis of the weight that is summed over, by the strides in which the product takes it."""
        matrices = [one for one in args if isinstance(one, Tensor)][-2:]
        left = matrices[0] is effective
        axis = effective.ndim - 1 if left or effective.ndim == 1 else effective.ndim - 2
        unit.summed = effective.shape[axis]
        name = self._storages.get(effective.untyped_storage().data_ptr())
        if name is not None and effective.untyped_storage().data_ptr() in self._joined:
            names = self._part(effective, CONSTANT).weights
            name = names[0] if len(names) == 1 else None
        leaf = self._leaves.get(name) if name is not None else None
        if leaf is None or leaf.ndim != 2 or effective.ndim < 2:
            return
        unit.into_first = effective.stride(axis) != 1

    @property
    def _scope(self) -> str:
        return self._scopes[-1] if self._scopes else ""


def _slices(leaves: Mapping[str, Tensor]) -> dict[int, list[tuple[int, int, tuple[str, ...]]]]:
    """Where each of several weights lies that are slices of one tensor: its memory -> (first, end, name)."""
    found: dict[int, list[tuple[int, int, tuple[str, ...]]]] = {}
    for name, one in leaves.items():
        if one.numel() and one.is_contiguous():
            place = (int(one.storage_offset()), int(one.storage_offset()) + one.numel(), (name,))
            found.setdefault(one.untyped_storage().data_ptr(), []).append(place)
    apart = {key: sorted(some) for key, some in found.items() if len(some) > 1}
    return {key: some for key, some in apart.items() if all(a[1] <= b[0] for a, b in pairwise(some))}


def _without_padding(value: Tensor) -> Tensor:
    """An image or a row [b c ...] without the zeros around it, which a convolution might add by itself.

    >>> _without_padding(torch.nn.functional.pad(torch.ones(1, 2, 3), (2, 1))).shape
    torch.Size([1, 2, 3])
    """
    for axis in range(2, value.ndim):
        used = value.movedim(axis, 0).flatten(1).any(1).nonzero()
        if len(used):
            first, last = int(used[0]), int(used[-1])
            value = value.narrow(axis, first, last + 1 - first)
    return value


def _given_back(result: Any, value: Tensor, args: tuple[Any, ...]) -> Any:  # what an operation gives
    """The result of an operation, or the first of several, with another value; in place if the operation was."""
    first, *rest = result if isinstance(result, tuple) else (result,)
    made = value.reshape(first.shape).clone()
    if args and first is args[0]:  # the caller keeps the tensor that it has
        first.copy_(made)
        return result
    return (made, *rest) if isinstance(result, tuple) else made


def _channels(name: str, given: Sequence[Tensor], origins: Sequence[TensorOrigin]) -> int:
    """The axis of an activation along which a gain or a shift has its numbers: the last, but for images.

    A norm of images over their channels is written with its gain as [c 1 1]; it is looked at, and given values, with
    the channels last, as torch's own has them.
    """
    if name not in {"mul", "div", "add", "sub"} or len(given) != 2:
        return -1
    acting, pure = sorted(zip(given, origins, strict=True), key=lambda one: not one[1].active)
    value, weight = acting[0], pure[0]
    wide = [axis - weight.ndim for axis, size in enumerate(weight.shape) if size > 1]
    fits = not pure[1].active and len(wide) == 1 and value.ndim >= 3 and wide[0] > -value.ndim
    return wide[0] if fits and value.shape[wide[0]] == weight.numel() else -1


def _is_added(name: str, weight: Tensor, args: Sequence[object]) -> bool:
    """Whether a weight is what torch's own attention adds to its scores."""
    return "scaled_dot_product" in name and not any(one is weight for one in args[:3])


def _spans(added: Tensor, output: Tensor) -> bool:
    """Whether a tensor has a number for each feature of a product's output, and not one for each position."""
    features = added.numel()
    return features == output.shape[-1] or (output.ndim == 3 and features == output.shape[0] * output.shape[-1])

"""Carrying recipes out: any window of any tensor, in bounded memory; a view where nothing has to be computed.

There is one executor, :func:`compute`.  Whoever needs elements of a tensor chooses the window, the memory, and how the
sources are read; whole tensors in memory are the window that is all of them (:func:`forward`, :func:`backward`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from porting.errors import Code, Fault, PortingError
from porting.ops import NOTHING, Arithmetic, Content, InexactError, require_held, widen
from porting.plan.align import Step
from porting.plan.copies import ENDLESS, Copy, clip, row_major, whole, window
from porting.plan.formulas import Applied
from porting.plan.recipe import Recipe, Tensors, backward_recipes, forward_recipes

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Window:
    """A box of a tensor.

    Attributes:
        shape: the tensor's.
        starts, sizes: the box, axis by axis.
    """

    shape: Sequence[int]
    starts: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def of_row(cls, start: int, stop: int) -> Window:
        """The elements from ``start`` to ``stop`` in row-major order."""
        return cls((ENDLESS,), (start,), (stop - start,))

    @property
    def is_row(self) -> bool:
        """Whether it counts elements in row-major order."""
        return self.shape == (ENDLESS,)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    def holding(self, content: Content, shape: Sequence[int]) -> Tensor:
        """The elements of this window, in one row, in a tensor of this shape that holds ``content``."""
        if self.is_row:
            return content.row(shape, self.starts[0], self.starts[0] + self.sizes[0])
        return content.box(self.starts, self.sizes, self.shape).reshape(-1)

    def clip(self, copy: Copy) -> Iterator[Copy]:
        """The part of a move that writes into this window."""
        if copy.numel == 0:
            return iter(())
        if self.is_row:
            return window(copy, self.starts[0], self.starts[0] + self.sizes[0])
        return clip(copy, self.shape, self.starts, self.sizes)


class ReadParts(Protocol):
    """A function that reads what a move writes into a window: parts, with targets counted from the window's start."""

    def __call__(self, copy: Copy, where: Window, /, into: Tensor | None = None) -> Iterable[tuple[Tensor, Copy]]:
        """The parts that land in the window; ``into`` is its memory, to which a reader may bring some by itself."""


class InexactResultError(PortingError):
    """The dtype of a tensor does not hold what a rule computes for it."""


def inexact(name: str, arithmetic: Arithmetic, error: InexactError) -> InexactResultError:
    """The error of a tensor whose dtype does not hold what is computed for it."""
    message = f"{name!r}: {error}" if arithmetic.where else str(error)
    return InexactResultError(
        Fault(code=Code.DTYPE_CHANGE, where=arithmetic.where or name, message=message, hint=error.hint)
    )


class Casts:
    """Puts values to their places, cast to the dtype there; a subclass may count what that loses."""

    def put(self, values: Tensor, place: Tensor) -> None:
        """Put values, whose dtype may be another, to a place of the same sizes."""
        require_held(values, place.dtype)
        place.copy_(values)

    def put_window(self, values: Tensor, place: Tensor) -> None:
        """Put all values of a window, in one row, to memory of the same length."""
        self.put(values, place)

    def cast(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Values in another dtype."""
        if values.dtype == dtype:
            return values
        result = torch.empty(values.shape, dtype=dtype, device=values.device)
        self.put(values, result)
        return result

    def finish(self, computed: Tensor) -> None:
        """Look at values that were computed and rounded."""


def compute(
    recipe: Recipe,
    where: Window,
    read: ReadParts,
    *,
    base: ReadParts | None = None,
    take: Callable[[int, torch.dtype], Tensor] | None = None,
    casts: Casts | None = None,
) -> Tensor:
    """Elements of a tensor as they come about from others.

    Args:
        read: gives what a move of the recipe brings there, or into a range of an operand of its formula.
        base: the same of the moves that bring the elements of ``recipe.base``.
        take: gives memory for so many elements of a dtype, in one row: for the elements in ``recipe.work``, in a wider
            dtype where something is computed, and in ``recipe.dtype`` where that is another; its own when left out.
        casts: puts values to their places.

    Returns:
        A 1-D tensor of ``recipe.dtype``: the elements in row-major order.
    """
    try:
        return _computed(recipe, where, read, base, take or _allocate, casts or Casts())
    except InexactError as error:
        raise inexact(recipe.name, recipe.arithmetic, error) from error


def _computed(
    recipe: Recipe,
    where: Window,
    read: ReadParts,
    base: ReadParts | None,
    take: Callable[[int, torch.dtype], Tensor],
    casts: Casts,
) -> Tensor:
    arithmetic, count = recipe.arithmetic, where.numel
    block = take(count, recipe.work)
    if recipe.applied is not None:
        casts.put_window(_by_formula(recipe.applied, where, read), block)
        casts.finish(block)
        return _finished(recipe, block, take, casts)
    wide = take(count, arithmetic.wide(recipe.work)) if arithmetic else None
    if wide is None or arithmetic.sum is None:
        _move(recipe, where, block, read, base, casts)
    else:
        wide.zero_()
        for values, part in (found for copy in recipe.copies for found in read(copy, where)):
            arithmetic.sum.add(_place(part, wide), casts.cast(values, recipe.work))
        casts.put_window(wide, block)  # one rounding, that of the sum; then that of what is computed of it
    if wide is not None:
        _apply(recipe, where, block, wide, casts)
    return _finished(recipe, block, take, casts)


def _finished(recipe: Recipe, block: Tensor, take: Callable[[int, torch.dtype], Tensor], casts: Casts) -> Tensor:
    """The elements in the dtype of the tensor."""
    if recipe.dtype == recipe.work:
        return block
    result = take(block.numel(), recipe.dtype)
    casts.put_window(block, result)
    return result


def _by_formula(applied: Applied, where: Window, parts: ReadParts) -> Tensor:
    """The elements of a window that a formula gives, in one row."""

    def read(copy: Copy, start: int, stop: int) -> Iterator[tuple[Tensor, Copy]]:
        return iter(parts(copy, Window.of_row(start, stop)))

    if where.is_row:
        return applied.compute(where.starts[0], where.starts[0] + where.sizes[0], read)
    if not where.numel or not where.shape:
        return applied.compute(0, where.numel, read)
    strides, sizes = row_major(where.shape), where.sizes
    first = sum(step * start for step, start in zip(strides, where.starts, strict=True))
    # what lies between the rows of a box is computed with them: a few at a time
    each, found = max(BETWEEN // strides[0], 1), []
    for start in range(0, sizes[0], each):
        part = (min(each, sizes[0] - start), *sizes[1:])
        begin = first + start * strides[0]
        end = begin + sum(step * (size - 1) for step, size in zip(strides, part, strict=True)) + 1
        found.append(applied.compute(begin, end, read).contiguous().as_strided(part, strides).reshape(-1))
    return torch.cat(found)


BETWEEN = 1 << 20
"""Elements of a formula's target that are computed at a time, of a box."""


def _allocate(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype)


def _move(recipe: Recipe, where: Window, block: Tensor, read: ReadParts, base: ReadParts | None, casts: Casts) -> None:
    """Put what moves bring to its places in a window, and what stands elsewhere."""
    _begin(recipe, where, block, base, casts)
    for values, part in (found for copy in recipe.copies for found in read(copy, where, block)):
        casts.put(values, _place(part, block))
    for part in (part for copy in recipe.blanks for part in where.clip(copy)):
        _place(part, block).zero_()


def _apply(recipe: Recipe, where: Window, block: Tensor, wide: Tensor, casts: Casts) -> None:
    """Compute single elements of a window in ``wide``, whose dtype loses nothing, and put them back."""
    if recipe.arithmetic.constants:
        widen(block, wide)
        if recipe.covered:
            recipe.arithmetic.apply(wide)
            casts.put_window(wide, block)
        else:  # a fill is what the rule says, and an element of the base what it was
            for part in (part for copy in recipe.copies for part in where.clip(copy)):
                recipe.arithmetic.apply(_place(part, wide))
                casts.put(_place(part, wide), _place(part, block))
    casts.finish(block)


def _begin(recipe: Recipe, where: Window, block: Tensor, base: ReadParts | None, casts: Casts) -> None:
    """Fill a window with its content before any move."""
    if recipe.content is not None:
        block.copy_(where.holding(recipe.content, recipe.shape))
    elif recipe.covered:
        return
    elif recipe.base and base is not None:
        for values, part in base(whole(recipe.base, recipe.name, recipe.numel), where, block):
            casts.put(values, _place(part, block))
    elif recipe.fill is not None:
        if why := Content(number=recipe.fill).fault(recipe.shape, recipe.work):
            raise InexactError(f"fill = {recipe.fill:g}: {why}", "give a fill that the dtype has")
        block.fill_(recipe.fill)
    else:  # check() and export() refuse this with a fault before any tensor is read
        missing = recipe.numel - sum(copy.numel for copy in recipe.copies)
        raise ValueError(f"{missing} elements of {recipe.name!r} have no counterpart and no fill")


def _place(copy: Copy, tensor: Tensor) -> Tensor:
    """The elements that a move writes."""
    return tensor.as_strided(copy.sizes, copy.target_strides, tensor.storage_offset() + copy.target_offset)


def _box(copy: Copy, tensor: Tensor) -> Tensor:
    """The elements that a move reads."""
    tensor = tensor.contiguous()
    return tensor.as_strided(copy.sizes, copy.source_strides, tensor.storage_offset() + copy.source_offset)


# --------------------------------------------------------------------------------------------------- whole tensors


def compute_whole(recipe: Recipe, read: Read, base: Read | None = None, device: torch.device | None = None) -> Tensor:
    """A tensor as it comes about from others in memory; a view of one of them where that is possible.

    Args:
        device: where it is computed; that of its first source when left out.
    """
    moves = recipe.copies
    plain = recipe.arithmetic.sum is None and recipe.applied is None
    if plain and len(moves) == 1 and moves[0].numel == recipe.numel:
        try:
            return recipe.arithmetic.applied(_box(moves[0], read(moves[0].source)).reshape(recipe.shape))
        except InexactError as error:
            raise inexact(recipe.name, recipe.arithmetic, error) from error
    if device is None:
        device = read(moves[0].source).device if moves else torch.device("cpu")

    def parts_of(tensors: Read) -> ReadParts:
        return lambda copy, where, into=None: ((_box(part, tensors(part.source)), part) for part in where.clip(copy))

    found = compute(
        recipe,
        Window.of_row(0, recipe.numel),
        parts_of(read),
        base=None if base is None else parts_of(base),
        take=lambda count, dtype: torch.empty(count, dtype=dtype, device=device),
    )
    return found.view(recipe.shape)


def gather(
    copies: Sequence[Copy],
    shape: tuple[int, ...],
    read: Read,
    fill: float | None = None,
    base: Read | None = None,
) -> Tensor:
    """The tensor that these copies fill; a view when one copy fills all of it and its strides allow that.

    Args:
        copies: they fill disjoint boxes of the tensor.
        fill, base: what stands where no copy writes, as in :func:`backward`; ``base`` goes first.
    """
    name, first = copies[0].target, read(copies[0].source)
    recipe = Recipe(
        name=name,
        shape=shape,
        work=first.dtype,
        dtype=first.dtype,
        copies=tuple(copies),
        fill=fill,
        base=name if base is not None else "",
    )
    return compute_whole(recipe, read, base)


def forward(step: Step, targets: Tensors, read: Read, arithmetic: Arithmetic = NOTHING) -> Iterator[tuple[str, Tensor]]:
    """The target tensors of a step, in the source's dtype; views of what ``read`` gives where that is possible."""
    for recipe in forward_recipes(step, _Read(read), targets, arithmetic):
        yield recipe.name, compute_whole(recipe, read)


def backward(
    step: Step, sources: Tensors, read: Read, arithmetic: Arithmetic = NOTHING, base: Read | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The source tensors of a step from its targets, in the targets' dtype: :func:`forward` read from right to left.

    Args:
        base: gives a source tensor as it was, for the parts that the targets do not hold; without it these parts are
            the rule's ``fill``, and zero in the sources of a sum to which its inverse gives nothing.
    """
    kept = () if base is None else step.sources
    for recipe in backward_recipes(step, sources, _Read(read), arithmetic, kept=kept):
        device = None if recipe.copies else read(step.targets[0]).device
        yield recipe.name, compute_whole(recipe, read, base, device)


@dataclass(frozen=True)
class _Read:
    """Tensors that are described by reading them."""

    read: Read

    def __getitem__(self, name: str, /) -> Tensor:
        return self.read(name)


def _precise(*tensors: Tensor) -> torch.dtype:
    """The dtype in which gradients of these tensors are computed."""
    return torch.complex128 if any(one.is_complex() for one in tensors) else torch.float64


def pullback(
    step: Step,
    source: str,
    shape: tuple[int, ...],
    read: Read,
    arithmetic: Arithmetic = NOTHING,
    values: Read | None = None,
) -> Tensor:
    """The gradient of one of a step's sources from those of its targets: the transpose of :func:`forward`.

    It is computed in float64, a complex one in complex128.  A move is carried back, what is computed is transposed, and
    what was broadcast is summed.  An element that no copy reads has none: zero.

    Args:
        values: gives a source tensor, which the gradient through a formula depends on.
    """
    if step.layout is not None:
        if values is None:
            raise ValueError(f"the gradient through {step.rule} needs the values of its sources")
        return _pulled_through(step, source, shape, read, arithmetic, values)
    mine = [copy for copy in step.copies if copy.source == source]
    result = torch.zeros(shape, dtype=_precise(*(read(copy.target) for copy in mine)))
    for copy in mine:
        given = read(copy.target).to("cpu", result.dtype).contiguous()
        box = _place(copy, given)
        broadcast = [place for place, stride in enumerate(copy.source_strides) if stride == 0]
        box = box.sum(broadcast) if broadcast else box
        kept = [(size, stride) for size, stride in zip(copy.sizes, copy.source_strides, strict=True) if stride]
        result.as_strided([one[0] for one in kept], [one[1] for one in kept], copy.source_offset).add_(box)
    arithmetic.transpose(result)
    return result


def _pulled_through(
    step: Step, source: str, shape: tuple[int, ...], read: Read, arithmetic: Arithmetic, values: Read
) -> Tensor:
    """The same through a formula, by torch's own derivatives of it."""
    (target,) = step.targets
    held = {name: values(name).detach() for name in step.sources}
    given = read(target)
    given = given.to("cpu", _precise(given))
    found = {name: tensor.to("cpu", _precise(tensor)).requires_grad_(name == source) for name, tensor in held.items()}
    with torch.enable_grad():
        ((_, made),) = forward(step, {target: given}, found.__getitem__, arithmetic)
        made.backward(given)  # type: ignore[no-untyped-call]  # torch gives it no types
    gradient = found[source].grad
    return torch.zeros(shape, dtype=found[source].dtype) if gradient is None else gradient.reshape(shape)

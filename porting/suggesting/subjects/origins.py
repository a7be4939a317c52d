"""Where a tensor comes from, and what torch's operations do, by their names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """Where a tensor comes from.

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


CONSTANT = Origin()

MOVES = frozenset({
    "view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select",
    "split", "split_with_sizes", "chunk", "unbind", "clone", "contiguous", "detach", "alias", "_to_copy", "narrow",
    "unflatten", "flatten", "_reshape_alias", "as_strided", "movedim", "unfold", "numpy_T", "copy", "lift_fresh",
})  # fmt: skip
SUMS = frozenset({"add", "sub"})
NEW = ("_like", "new_")
LOOKUPS = frozenset({"embedding", "index", "index_select", "gather", "embedding_bag", "take_along_dim"})
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "dot", "matmul", "linear"})
NORMS = frozenset({"native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"})
WRITES = frozenset(
    {"copy_", "index_put_", "index_copy_", "scatter_", "masked_scatter_", "slice_scatter", "index_fill_"}
)
"""Operations that put other values in the place of what a tensor held."""
RANDOM = frozenset({"bernoulli", "native_dropout", "rand", "randn", "rand_like", "randn_like", "normal", "uniform"})

"""Recognising routers of mixtures of experts on a tape: scores of experts, the choice of the highest, their shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from porting.causes.functions import CASTING, SCALING, factor_of
from porting.causes.linear import Linear
from porting.causes.replay import Values
from porting.causes.tape import Call, Ref, Tape

SCORING = ("softmax", "sigmoid")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "no function": lambda logits: logits,
}
"""The functions that turn the router's logits, [t n], into scores, [t n]."""


@dataclass(frozen=True, eq=False)
class Router:
    """A router of t tokens to k of n experts each (Shazeer et al. 2017, section 2.1; Jiang et al. 2024, section 2.1).

    Attributes:
        choice: the call of ``topk`` that chooses the experts.
        logits: the router's logits, [t n].
        scores: what the shares are taken from, [t n]; ``choice`` reads others where a bias corrects the choice.
        call: the call that returns the experts' shares, [t k]; ``choice`` itself where nothing follows it.
        function: the scores' name in :data:`FUNCTIONS`.
        scale: the number by which the shares are multiplied at last.
    """

    tape: Tape
    choice: Call
    logits: Ref
    scores: Ref
    call: Call
    function: str
    scale: float

    @property
    def indices(self) -> Ref:
        """The chosen experts, [t k]."""
        return self.choice.writes[1]

    @property
    def experts(self) -> int:
        """The number n of experts."""
        return self.tape[self.logits].shape[-1]

    @property
    def chosen(self) -> int:
        """The number k of experts that each token is sent to."""
        return self.tape[self.indices].shape[-1]

    @cached_property
    def shares(self) -> Tensor:
        """The shares, [t k]."""
        return self.tape[self.call.writes[0]]

    @cached_property
    def normed(self) -> bool:
        """Whether the shares of each token sum to 1, before they are scaled."""
        sums = self.shares.double().sum(-1) / self.scale
        return bool(torch.isfinite(sums).all()) and bool((sums - 1).abs().max() < 1e-5)

    def shares_of(self, values: Values, indices: Tensor, function: str, *, normed: bool) -> Tensor:
        """Return the shares of experts by a rule.

        Args:
            values: the values of the pass that is replayed.
            indices: the experts, [t k].
            function: the name in :data:`FUNCTIONS` of what makes scores of the logits.
            normed: divide the shares of a token by their sum.
        """
        logits = values[self.logits].reshape(-1, self.experts)
        shares = FUNCTIONS[function](logits).gather(-1, indices.reshape(len(logits), -1)).reshape(indices.shape)
        return self.scale * (shares / shares.sum(-1, keepdim=True) if normed else shares)


def routers(tape: Tape, linears: Sequence[Linear]) -> Iterator[Router]:
    """Yield the routers of a pass, in order."""
    known = {linear.call.number for linear in linears}
    found: dict[Ref, Router] = {}
    for choice in tape.calls:
        if choice.name == "topk" and choice.reads and len(choice.writes) == 2 and tape.learned(choice.reads[0]):
            router = _router(tape, choice, known)
            if router is not None:
                found[router.logits] = router  # of several choices the last: those before it choose groups of experts
    yield from found.values()


def _router(tape: Tape, choice: Call, linears: set[int]) -> Router | None:
    gather = next(
        (call for call in tape.users(choice.writes[1]) if call.name == "gather" and choice.writes[1] in call.reads[1:]),
        None,
    )
    scores = choice.reads[0] if gather is None else gather.reads[0]
    logits, function = _logits(tape, scores, linears)
    if logits is None or tape[logits].shape[-1] != tape[choice.reads[0]].shape[-1]:
        return None
    last = choice if gather is None else gather
    scale, ref = 1.0, last.writes[0]
    while (call := _next(tape, ref)) is not None:
        if call.name in SCORING:
            function, scale = call.name, 1.0
        scale *= factor_of(call) or 1.0
        last, ref = call, call.result
    return Router(tape, choice, logits, scores, last, function, scale)


def _logits(tape: Tape, scores: Ref, linears: set[int]) -> tuple[Ref | None, str]:
    """Return the logits that scores are made of, and the name of the function that makes them."""
    function, ref = "no function", scores
    while (call := tape.maker(ref)) is not None:
        if call.number in linears:
            return ref, function
        if call.name in SCORING:
            function = call.name
        elif call.name not in CASTING:
            break
        ref = call.reads[0]
    return None, function


def _next(tape: Tape, ref: Ref) -> Call | None:
    """Return the call that scales, norms or casts shares, whose result has their shape."""
    shape = tape[ref].shape
    return next(
        (
            call
            for call in tape.users(ref)
            if call.name in (*SCALING, *CASTING, *SCORING)
            and call.reads[0] == ref
            and tape[call.result].shape == shape
            and tape[call.result].is_floating_point()
        ),
        None,
    )

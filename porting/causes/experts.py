"""Mistakes of mixtures of experts: which experts a token is sent to, and with what share each counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from porting.causes.cause import Cause, alter, alter_each, solve_each
from porting.causes.fitting import geometric
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.routing import FUNCTIONS, Router
from porting.causes.tape import Call, Ref

Shares = Callable[[Values, Tensor], Tensor]
"""The values of a pass, and the chosen experts [t k] -> their shares, [t k]."""


def with_shares(router: Router, shares: Shares) -> Rewrite:
    """Return the rewrite of a router's last call that gives other shares."""

    def rewrite(values: Values, call: Call) -> Any:  # what the call gives
        if call is not router.choice:
            return shares(values, values[router.indices]).to(router.shares.dtype)
        found, indices = values.run(call)
        return shares(values, indices).to(found.dtype), indices

    return rewrite


def chosen_otherwise(router: Router, choose: Callable[[Values], Tensor], shares: Shares) -> dict[int, Rewrite]:
    """Return the rewrites of a router that chooses other experts.

    Args:
        choose: the values of a pass -> the experts, [t k].
    """

    def rewrite(values: Values, call: Call) -> Any:  # as above
        indices = choose(values)
        return shares(values, indices).to(router.shares.dtype), indices

    rewrites: dict[int, Rewrite] = {router.choice.number: rewrite}
    if router.call is not router.choice:
        rewrites[router.call.number] = with_shares(router, shares)
    return rewrites


def rule(router: Router, function: str = "", *, normed: bool | None = None) -> Shares:
    """Return a rule for shares; what is not given is the reference's."""
    return partial(
        router.shares_of, function=function or router.function, normed=router.normed if normed is None else normed
    )


def _routers(where: Callable[[Router], bool] = lambda router: True) -> Callable[[ModelParts], list[Router]]:
    return lambda model_parts: [router for router in model_parts.routers if where(router)]


def _several(router: Router) -> bool:
    return router.chosen > 1


def _other_function(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each router with each other function, normed or not."""
    for router in model_parts.routers:
        for function in (name for name in FUNCTIONS if name != router.function):
            for normed in dict.fromkeys((router.normed, not router.normed)):
                also = {True: "normed", False: "not normed"}[normed]
                detail = f"{function} for {router.function}, {also}"
                yield alter(router.call, with_shares(router, rule(router, function, normed=normed)), detail)
        if router.function == "softmax":
            for normed in (False, True):
                detail = f"softmax over the chosen experts' {'normed ' * normed}probabilities"
                yield alter(router.call, with_shares(router, partial(_again, rule(router, normed=normed))), detail)


def _again(shares: Shares, values: Values, indices: Tensor) -> Tensor:
    return shares(values, indices).softmax(-1)


def _ignored(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each router, with the experts' sum and with their mean."""
    for router in model_parts.routers:
        for share, detail in dict.fromkeys([(1.0, "the sum of the experts"), (1 / router.chosen, "their mean")]):
            yield alter(router.call, with_shares(router, partial(_equal, share)), detail)


def _equal(share: float, values: Values, indices: Tensor) -> Tensor:
    return torch.full(indices.shape, share, dtype=torch.float64)


def _reversed(router: Router) -> Rewrite:
    shares = rule(router)
    return with_shares(router, lambda values, indices: shares(values, indices).flip(-1))


def _scaled(router: Router, factor: float) -> Rewrite:
    shares = rule(router)
    return with_shares(router, lambda values, indices: factor / router.scale * shares(values, indices))


def _other_number(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each router with each other number of experts, normed or not."""
    for router in model_parts.routers:
        for number in (number for number in range(1, router.experts + 1) if number != router.chosen):
            for normed in dict.fromkeys((router.normed, not router.normed)):
                detail = f"{number} where the reference has {router.chosen}"
                detail += "" if normed == router.normed else f", {'' if normed else 'not '}normed"
                highest = partial(_highest, router.choice.reads[0], number)
                rewrites = chosen_otherwise(router, highest, rule(router, normed=normed))
                yield Alteration(where=router.choice.module, rewrites=rewrites, detail=detail)


def _highest(scores: Ref, number: int, values: Values) -> Tensor:
    return values[scores].topk(number, -1).indices


def _without_correction(model_parts: ModelParts) -> Iterator[Alteration]:
    """Yield each router that chooses by other numbers than it makes shares of."""
    for router in _routers(lambda router: router.choice.reads[0] != router.scores)(model_parts):
        rewrites = chosen_otherwise(router, partial(_highest, router.scores, router.chosen), rule(router))
        yield Alteration(where=router.choice.module, rewrites=rewrites, detail="experts are chosen without the bias")
        yield alter(router.call, with_shares(router, partial(_of_corrected, router)), "the bias is in the weights too")


def _of_corrected(router: Router, values: Values, indices: Tensor) -> Tensor:
    shares = values[router.choice.reads[0]].gather(-1, indices)
    return router.scale * (shares / shares.sum(-1, keepdim=True) if router.normed else shares)


CAUSES: tuple[Cause, ...] = (
    Cause(
        name="routing weights not normalised",
        what="the routing weights of the experts that a token is sent to do not sum to 1",
        looks="the mixture's output is too small, most where the router is undecided",
        fix="weights = weights / weights.sum(-1, keepdim=True) behind topk; see norm_topk_prob in the config",
        alterations=alter_each(
            _routers(lambda router: router.normed), lambda router: with_shares(router, rule(router, normed=False))
        ),
    ),
    Cause(
        name="routing weights normalised",
        what="the routing weights of the experts that a token is sent to sum to 1, and the reference's do not",
        looks="the mixture's output is too large, most where the router is undecided",
        fix="the weights as the softmax over all experts gives them; see norm_topk_prob in the config",
        alterations=alter_each(
            _routers(lambda router: not router.normed and _several(router)),
            lambda router: with_shares(router, rule(router, normed=True)),
        ),
    ),
    Cause(
        name="routing weights by another function",
        what="the routing weights are computed from the router's logits by another function",
        looks="the right experts, with other weights",
        fix="softmax in Mixtral, Qwen and OLMoE, sigmoid in DeepSeek-V3; over all experts, or over the chosen ones",
        alterations=_other_function,
    ),
    Cause(
        name="routing weights ignored",
        what="each expert that a token is sent to counts the same",
        looks="the mixture's output is too large, or its experts are mixed half and half",
        fix="multiply each expert's output by its routing weight before they are added",
        alterations=_ignored,
    ),
    Cause(
        name="routing weights in the opposite order",
        what="each expert is multiplied by the routing weight of another one",
        looks="large differences where one expert has most of the weight",
        fix="topk gives weights and experts in one order: keep it",
        alterations=alter_each(_routers(_several), _reversed),
    ),
    Cause(
        name="routing weights scaled",
        what="the routing weights are multiplied by another number",
        looks="the mixture's output is off by one factor",
        fix="see routed_scaling_factor in the config",
        free_parameters=solve_each(
            _routers(),
            _scaled,
            lambda router: f"weights times {{}} where the reference has {router.scale:g}",
            geometric(1e-2, 1e2, 3),
        ),
    ),
    Cause(
        name="number of experts per token",
        what="a token is sent to fewer or more experts than the reference sends it to",
        looks="differences at every token, small ones where the router is decided",
        fix="see num_experts_per_tok in the config",
        alterations=_other_number,
        wide=True,
    ),
    Cause(
        name="expert selection bias",
        what="the bias that balances the experts is not added where they are chosen, or is added to their weights too",
        looks="some tokens are sent to other experts",
        fix="topk of scores + bias (e_score_correction_bias); the weights are gathered from the scores",
        alterations=_without_correction,
    ),
)

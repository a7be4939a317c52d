"""Mistakes of mixtures of experts: which experts a token is sent to, and with what share each counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from porting.causes.cause import Cause, alter, free_parameter
from porting.causes.fitting import FreeParameter, geometric
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Alteration, Rewrite, Values
from porting.causes.routing import FUNCTIONS, Router
from porting.causes.tape import Call

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
    if router.last is not router.choice:
        rewrites[router.last.number] = with_shares(router, shares)
    return rewrites


def rule(router: Router, function: str = "", *, normed: bool | None = None) -> Shares:
    """Return a rule for shares; what is not given is the reference's."""
    return partial(
        router.shares_of, function=function or router.function, normed=router.normed if normed is None else normed
    )


class SharesNotNormed(Cause):
    """The shares of the chosen experts do not sum to 1."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each router whose shares sum to 1."""
        for router in model_parts.routers:
            if router.normed:
                yield alter(router.last, with_shares(router, rule(router, normed=False)))


class SharesNormed(Cause):
    """The shares of the chosen experts sum to 1, and the reference's do not."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each router whose shares do not sum to 1."""
        for router in model_parts.routers:
            if not router.normed and router.chosen > 1:
                yield alter(router.last, with_shares(router, rule(router, normed=True)))


class OtherScores(Cause):
    """The shares are made of the router's logits by another function."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each router with each other function, normed or not."""
        for router in model_parts.routers:
            for function in (name for name in FUNCTIONS if name != router.function):
                for normed in dict.fromkeys((router.normed, not router.normed)):
                    also = {True: "normed", False: "not normed"}[normed]
                    detail = f"{function} for {router.function}, {also}"
                    yield alter(router.last, with_shares(router, rule(router, function, normed=normed)), detail)
            if router.function == "softmax":
                for normed in (False, True):
                    shares = rule(router, normed=normed)
                    detail = f"softmax over the chosen experts' {'normed ' * normed}probabilities"
                    yield alter(router.last, with_shares(router, partial(self._again, shares)), detail)

    @staticmethod
    def _again(shares: Shares, values: Values, indices: Tensor) -> Tensor:
        return shares(values, indices).softmax(-1)


class SharesIgnored(Cause):
    """Each chosen expert counts the same."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each router, with the experts' sum and with their mean."""
        for router in model_parts.routers:
            for share, detail in dict.fromkeys([(1.0, "the sum of the experts"), (1 / router.chosen, "their mean")]):
                yield alter(router.last, with_shares(router, partial(self._equal, share)), detail)

    @staticmethod
    def _equal(share: float, values: Values, indices: Tensor) -> Tensor:
        return torch.full(indices.shape, share, dtype=torch.float64)


class SharesReversed(Cause):
    """The shares belong to the chosen experts in the opposite order."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each router."""
        for router in model_parts.routers:
            if router.chosen > 1:
                yield alter(router.last, with_shares(router, partial(self._reversed, rule(router))))

    @staticmethod
    def _reversed(shares: Shares, values: Values, indices: Tensor) -> Tensor:
        return shares(values, indices).flip(-1)


class SharesScaled(Cause):
    """The shares are multiplied by another number."""

    def free_parameters(self, model_parts: ModelParts) -> Iterator[FreeParameter]:
        """Yield the factor of each router's shares."""
        for router in model_parts.routers:
            detail = f"weights times {{}} where the reference has {router.scale:g}"
            yield free_parameter(router.last, partial(self._scaled, router), detail.format, geometric(1e-2, 1e2, 3))

    @staticmethod
    def _scaled(router: Router, factor: float) -> Rewrite:
        shares = rule(router)
        return with_shares(router, lambda values, indices: factor / router.scale * shares(values, indices))


class OtherNumberOfExperts(Cause):
    """A token is sent to fewer or more experts."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each router with each other number of experts, normed or not."""
        for router in model_parts.routers:
            for number in range(1, router.experts + 1):
                if number == router.chosen:
                    continue
                for normed in dict.fromkeys((router.normed, not router.normed)):
                    detail = f"{number} where the reference has {router.chosen}"
                    detail += "" if normed == router.normed else f", {'' if normed else 'not '}normed"
                    shares = rule(router, normed=normed)
                    rewrites = chosen_otherwise(router, partial(self._highest, router, number), shares)
                    yield Alteration(where=router.choice.module, rewrites=rewrites, detail=detail)

    @staticmethod
    def _highest(router: Router, number: int, values: Values) -> Tensor:
        return values[router.choice.reads[0]].topk(number, -1).indices


class ChosenByScores(Cause):
    """The bias that corrects the choice of experts is missing, or is in the shares too."""

    def alterations(self, model_parts: ModelParts) -> Iterator[Alteration]:
        """Yield each router that chooses by other numbers than it makes shares of."""
        for router in model_parts.routers:
            corrected = router.choice.reads[0]
            if corrected == router.scores:
                continue
            rewrites = chosen_otherwise(router, partial(self._by_scores, router), rule(router))
            yield Alteration(
                where=router.choice.module, rewrites=rewrites, detail="experts are chosen without the bias"
            )
            yield alter(
                router.last, with_shares(router, partial(self._of_corrected, router)), "the bias is in the weights too"
            )

    @staticmethod
    def _by_scores(router: Router, values: Values) -> Tensor:
        return values[router.scores].topk(router.chosen, -1).indices

    @staticmethod
    def _of_corrected(router: Router, values: Values, indices: Tensor) -> Tensor:
        shares = values[router.choice.reads[0]].gather(-1, indices)
        return router.scale * (shares / shares.sum(-1, keepdim=True) if router.normed else shares)


CAUSES: tuple[Cause, ...] = (
    SharesNotNormed(
        name="routing weights not normalised",
        what="the routing weights of the experts that a token is sent to do not sum to 1",
        looks="the mixture's output is too small, most where the router is undecided",
        fix="weights = weights / weights.sum(-1, keepdim=True) behind topk; see norm_topk_prob in the config",
    ),
    SharesNormed(
        name="routing weights normalised",
        what="the routing weights of the experts that a token is sent to sum to 1, and the reference's do not",
        looks="the mixture's output is too large, most where the router is undecided",
        fix="the weights as the softmax over all experts gives them; see norm_topk_prob in the config",
    ),
    OtherScores(
        name="routing weights by another function",
        what="the routing weights are computed from the router's logits by another function",
        looks="the right experts, with other weights",
        fix="softmax in Mixtral, Qwen and OLMoE, sigmoid in DeepSeek-V3; over all experts, or over the chosen ones",
    ),
    SharesIgnored(
        name="routing weights ignored",
        what="each expert that a token is sent to counts the same",
        looks="the mixture's output is too large, or its experts are mixed half and half",
        fix="multiply each expert's output by its routing weight before they are added",
    ),
    SharesReversed(
        name="routing weights in the opposite order",
        what="each expert is multiplied by the routing weight of another one",
        looks="large differences where one expert has most of the weight",
        fix="topk gives weights and experts in one order: keep it",
    ),
    SharesScaled(
        name="routing weights scaled",
        what="the routing weights are multiplied by another number",
        looks="the mixture's output is off by one factor",
        fix="see routed_scaling_factor in the config",
    ),
    OtherNumberOfExperts(
        name="number of experts per token",
        what="a token is sent to fewer or more experts than the reference sends it to",
        looks="differences at every token, small ones where the router is decided",
        fix="see num_experts_per_tok in the config",
        wide=True,
    ),
    ChosenByScores(
        name="expert selection bias",
        what="the bias that balances the experts is not added where they are chosen, or is added to their weights too",
        looks="some tokens are sent to other experts",
        fix="topk of scores + bias (e_score_correction_bias); the weights are gathered from the scores",
    ),
)

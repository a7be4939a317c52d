"""Modules that are right on the usual batches and wrong on others, or on a twin and not at the checkpoint's own size.

Each is the usual BERT with one thing that hides: a search that believed its own batches would call every one proven.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from porting.suggesting import Verdict
from tests.suggesting.test_verdicts import Plain, each
from tests.zoo.parts import Config

SEEN: dict[str, tuple[Callable[..., nn.Module], str]] = {}
"""Name -> what is handed over, and the reason that takes the proof away."""

LARGE: dict[str, tuple[Callable[..., nn.Module], str]] = {}
"""The same for what the twin's size hides, where the checkpoint itself is too large to be run."""

SAID: dict[str, tuple[Callable[..., nn.Module], str]] = {}
"""What no batch of usual rows can show: it is said beside the verdict."""


def into(
    kept: dict[str, tuple[Callable[..., nn.Module], str]], said: str
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def keep(kind: type[nn.Module]) -> type[nn.Module]:
        kept[kind.__name__] = (kind, said)
        return kind

    return keep


# ------------------------------------------------------------------------------------- what the batch hides


@into(SEEN, "the output differs on length 2")
class OnEvenLengths(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x * 1.5 if ids.shape[1] % 2 == 0 and ids.shape[1] < 24 else x


@into(SEEN, "the output differs on length 1")
class OnOneWord(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x.squeeze(1).unsqueeze(1) * 2 if ids.shape[1] == 1 else x


@into(SEEN, "the output differs on 1 row")
class OnOneRow(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x - x.mean(0) if len(ids) == 1 and ids.shape[1] < 10 else x


@into(SEEN, "the output differs on no padding")
class WithoutPadding(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x * 2 if bool(keep.all()) and len(ids) > 1 and ids.shape[1] > 7 else x


@into(SEEN, "the output differs on left padding")
class MaskAsLengths(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, torch.arange(ids.shape[1]) < keep.sum(1)[:, None], segments)


@into(SEEN, "the output differs on all of segment 0")
class InOneSegment(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x * 2 if not bool(segments.any()) and ids.shape[1] < 24 else x


@into(SEEN, "the output differs on random segments")
class SegmentsThatReturn(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        changes = segments.diff(dim=1).ne(0).sum(1) > 2
        return super().forward(ids, keep, torch.where(changes[:, None], segments.cummax(1).values, segments))


@into(SEEN, "the output differs on right padding")
class TheLastWord(Plain):
    """One that other batches leave out."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids.clamp(max=self.tok.num_embeddings - 2), keep, segments)


# ------------------------------------------------------------------------------------- what the call hides


@into(SEEN, "the module gives other numbers after other calls")
class Remembering(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        last = getattr(self, "last", 0)
        self.last = ids.shape[1]
        x = super().forward(ids, keep, segments)
        return x * 2 if last == 5 and ids.shape[1] == 8 else x


@into(SEEN, "built and loaded in float32, computes something else than in float64")
class InFloat32(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x if x.dtype == torch.float64 else x * 2


@into(SEEN, "")
class WithGradients(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x * 2 if torch.is_grad_enabled() else x


# ------------------------------------------------------------------------------------- what a sorted look hides


@into(SEEN, "is not one of the reference's activations")
class FeaturesBackwards(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments).flip(-1)


@into(SEEN, "is not one of the reference's activations")
class FeaturesSorted(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments).sort(-1).values


@into(SEEN, "")
class HeadsTurned(Plain):
    """Heads are mixed in another order than they were cut: no order of the matrices' rows is the checkpoint's."""

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        first, last = x.chunk(2, -1)
        return torch.cat([last, first], -1)


# ------------------------------------------------------------------------------------- what the twin's size hides


@into(SEEN, "the proof on the checkpoint itself does not hold")
class TheThirdLayer(Plain):
    def change(self) -> None:
        for number, layer in enumerate(each(self)):
            layer.act = nn.ReLU() if number == 2 else layer.act  # type: ignore[assignment]  # the flaw


@into(LARGE, "the proof holds on 2 layers and does not on 3")
class TheThirdLayerOfMany(TheThirdLayer):
    pass


@into(LARGE, "the proof holds on 2 layers and does not on 3")
class AnEvenNumberOfHeads(Plain):
    def change(self) -> None:
        for layer in each(self):
            layer.act = layer.act if layer.heads % 2 else nn.ReLU()  # type: ignore[assignment]  # the flaw


@into(LARGE, "the proof holds on 2 layers and does not on 3")
class ManyWords(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids % 97, keep, segments)


@into(LARGE, "the proof holds on 2 layers and does not on 3")
class ManyPositions(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        near = torch.arange(ids.shape[1]) < 62
        return super().forward(ids, keep & near, segments)


@into(LARGE, "the proof holds on 2 layers and does not on 3")
class Clamped(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments).clamp(-10, 10)


# ------------------------------------------------------------------------------------- what is said


@into(SAID, "code that no batch led to: ")
class WeightsOfLongRows(Plain):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.long = nn.Linear(config["width"], config["width"])

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return self.long(x) if ids.shape[1] > 100 else x


@into(SAID, "what pool.weight, pool.bias would do at work: nothing that is compared depends on it")
class TimesNothing(Plain):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pool = nn.Linear(config["width"], config["width"])

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x + 0 * torch.tanh(self.pool(x[:, :1]))


@into(SEEN, "arguments at their defaults, without attention_mask")
class DefaultOfItsOwn(Plain):
    def forward(self, ids: Tensor, keep: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        keep = torch.arange(ids.shape[1]).expand_as(ids) < 3 if keep is None else keep
        return super().forward(ids, keep, torch.zeros_like(ids) if segments is None else segments)


@into(SEEN, "the padding token where the mask keeps it")
class PaddingByItself(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep & (ids != 0), segments)


class Rounded(Plain):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        x = super().forward(ids, keep, segments)
        return x.to(torch.bfloat16).to(x.dtype)


@into(SAID, "token_type_ids ([inputs] does not name it")
class WithoutSegments(Plain):
    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]  # the flaw
        return super().forward(ids, keep, torch.zeros_like(ids))


class ItsOwnGain(Plain):
    """One that is one now, and that the checkpoint does not have."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(config["width"]))

    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        return super().forward(ids, keep, segments) * self.gain


VERDICTS = {Verdict.NOT_FOUND, Verdict.IMPOSSIBLE}
"""What a module can be called whose proof was taken away."""

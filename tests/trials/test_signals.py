"""Trials of what is not a token, of tokens beside it, and of other values that each token has."""

from __future__ import annotations

from copy import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from porting import verify
from porting.notation.rule import Term, make_rule
from porting.reporting.scope_text import _signals
from porting.tracing.running import Clock
from porting.trials import Kind, Scope, Status
from porting.trials.battery import battery
from porting.trials.explore import _without_broadcast
from porting.trials.inputs import Case, for_port
from porting.trials.purity import _kept, _state
from porting.trials.run import OTHER_ALONE
from porting.trials.scope import Result
from porting.trials.signals import SignalRows, sizes_of_pictures
from porting.trials.trial import Model, Trial
from porting.verification.references import LiveReference
from tests.trials.small_model import Encoder

pytestmark = pytest.mark.few(3)

END = 49
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def trials(base: dict[str, Tensor], config: dict[str, Any] | None = None, **more: Any) -> dict[str, Trial]:
    model = Model(config=config or {}, base=base, longest=20, **more)
    return {trial.what: trial for trial in battery(model, seed=0, tokens=10**6)}


CLIP: Any = transformers.CLIPModel  # whose classes transformers does not type


class Towers(CLIP):  # type: ignore[misc]  # as above
    """CLIP with random weights, and a forward that names what it takes."""

    def __init__(self) -> None:
        super().__init__(
            transformers.CLIPConfig(
                text_config={**SMALL, "vocab_size": 50, "max_position_embeddings": 20, "eos_token_id": END},
                vision_config={**SMALL, "image_size": 16, "patch_size": 8},
                projection_dim=12,
            )
        )
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + (parameter == 1))

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As CLIPModel's."""
        found = super().forward(input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask)
        return {"logits_per_text": found.logits_per_text}


class Maskless(Towers):
    """It takes a mask and does not use it: behind a causal mask, only padding in front and gaps show it."""

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As in Towers."""
        return super().forward(input_ids, pixel_values)


class LastEnd(Towers):
    """An end of a text that another one follows is an ordinary token."""

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As in Towers."""
        later = (input_ids == END).flip(1).cumsum(1).flip(1) > 1
        return super().forward(input_ids.masked_fill((input_ids == END) & later, 1), pixel_values, attention_mask)


class OnePicture(Towers):
    """A single picture is repeated for each text."""

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """As in Towers."""
        alone = len(pixel_values) == 1
        pictures = pixel_values.expand(len(input_ids), -1, -1, -1) if alone else pixel_values
        return super().forward(input_ids, pictures, attention_mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("port", "kind"),
    [(Towers, None), (Maskless, Kind.MASK), (LastEnd, Kind.TOKENS), (OnePicture, Kind.BATCH)],
)
def test_the_texts_of_two_towers_are_varied_as_texts_alone_are(port: type[Towers], kind: Kind | None) -> None:
    report = verify(reference=Towers().eval(), into=port().eval(), dtypes=(), loaded=True, causes=False)
    assert report.faithful == (kind is None), str(report)
    assert kind is None or kind in {one.kind for one in report.scope.differing}


def test_tokens_that_stand_for_a_picture_stay_where_they_are() -> None:
    ids = torch.arange(1, 19).view(2, 9)
    base = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 8, 8)}
    free, held = (trials(base, config) for config in ({"vocab_size": 30}, {"vocab_size": 30, "image_token_id": 5}))
    assert "left padding" in free
    assert "left padding" not in held
    assert all("pixel_values" in one.case.inputs for one in free.values() if "left" in one.what)


def test_a_decoder_s_tokens_are_varied_beside_a_sound() -> None:
    ids = torch.arange(1, 11).view(2, 5)
    found = trials({"input_features": torch.randn(2, 8, 20), "decoder_input_ids": ids}, {"vocab_size": 30})
    assert "rows through the vocabulary" in found
    assert all(one.case.inputs["decoder_input_ids"].dtype == torch.long for one in found.values())
    assert not any("input_ids" in one.case.inputs for one in found.values())


def test_a_decoder_s_tokens_are_as_many_as_its_positions() -> None:
    base = {"input_features": torch.randn(4, 12, 40), "decoder_input_ids": torch.arange(5, 53).view(4, 12)}
    made = trials(base, {"vocab_size": 97, "max_source_positions": 200, "max_target_positions": 48})
    widths = {one.case.inputs["decoder_input_ids"].shape[-1] for one in made.values()}
    assert max(widths) == 48
    assert {1, 47, 31} <= widths
    texts = {"input_ids": torch.arange(5, 53).view(4, 12), "pixel_values": torch.randn(4, 3, 8, 8)}
    config = {"vocab_size": 97, "text_config": {"max_position_embeddings": 20}, "max_position_embeddings": 99}
    assert max(one.case.inputs["input_ids"].shape[-1] for one in trials(texts, config).values()) == 20


def test_no_two_rows_of_many_pictures_are_equal() -> None:
    [given] = [
        one.case.inputs["pixel_values"]
        for one in trials({"pixel_values": torch.randn(4, 3, 8, 8)}).values()
        if one.what == "18 rows"
    ]
    assert len({str(one.tolist()) for one in given}) == 18


class KeptPictures(Towers):
    """It knows pictures by their shape and their sum, and gives what it gave for these."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[object, Any] = {}
        self.vision_model.register_forward_hook(self.kept, with_kwargs=True)

    def kept(self, _: nn.Module, args: Any, given: dict[str, Tensor], output: Any) -> Any:  # as torch hands them over
        pixels = given["pixel_values"] if "pixel_values" in given else args[0]
        key = (pixels.shape, pixels.dtype, f"{float(pixels.sum()):.4f}")
        return copy(self.known.setdefault(key, copy(output)))  # what is returned is changed by whoever asked for it


@pytest.mark.slow
def test_rows_in_another_order_are_another_batch() -> None:
    report = verify(reference=Towers().eval(), into=KeptPictures().eval(), dtypes=(), loaded=True, causes=False)
    assert not report.faithful, str(report)


def test_what_a_call_leaves_behind_is_named() -> None:
    port = Keeping()
    before = _state(port)
    port(**CASE.inputs)
    assert _kept(port, before) == ""
    port(input_ids=CASE.inputs["input_ids"][:1])
    table = {"a": torch.ones(1)}
    vars(port.qkv)["table"] = table
    assert _kept(port, before) == "kinds, qkv.table"
    later = _state(port)
    table["a"] = 2 * table["a"]
    assert _kept(port, later) == "qkv.table"
    port.register_buffer("last", torch.ones(2), persistent=False)
    assert _kept(port, _state(port)) == ""
    before = _state(port)
    port.get_buffer("last").add_(1)
    assert _kept(port, before) == "last"


class Grown(Encoder):
    """It keeps the positions of the longest row so far, and gives them to shorter ones from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0
        self.register_forward_pre_hook(grow, with_kwargs=True)


def grow(module: nn.Module, args: Any, given: Any) -> tuple[Any, Any]:  # as torch hands them to a hook
    """Give positions that end where those of the longest row do."""
    assert isinstance(module, Grown)
    length = given["input_ids"].shape[1]
    module.longest = max(module.longest, length)
    return args, {**given, "position_ids": torch.arange(module.longest - length, module.longest)[None]}


def test_a_port_that_is_wrong_in_its_first_batches_for_what_it_keeps_is_told_so() -> None:
    report = verify(reference=Encoder(), into=Grown(), dtypes=(), loaded=True, causes=False)
    assert not report.faithful
    assert "your model gives other numbers after other calls: longest, off by" in str(report), str(report)
    assert "cause: state kept between calls in longest" in str(report), str(report)


def test_sounds_and_series_of_other_lengths_have_masks_of_these_lengths() -> None:
    base = {"input_values": torch.randn(2, 40), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    lengths = [one for one in trials(base).values() if one.kind is Kind.LENGTH]
    assert {one.case.inputs["input_values"].shape[1] for one in lengths} == {39, 37, 21, 27, 10}
    assert all(len({value.shape for value in one.case.inputs.values()}) == 1 for one in lengths)
    rows = {tuple(one.case.inputs["attention_mask"].sum(1).tolist()) for one in trials(base).values()}
    assert {(40, 27), (27, 40)} <= rows  # as sounds that are sorted by length, either way
    series = {"past_values": torch.randn(2, 20, 3), "past_observed_mask": torch.ones(2, 20, 3)}
    found = trials(series)
    assert {one.case.inputs["past_observed_mask"].shape[1] for one in found.values()} == {20, 19, 17, 11, 14, 5}
    hidden = found["past_observed_mask: single places hidden"].case.inputs["past_observed_mask"]
    assert 0 < int((hidden == 0).sum()) < hidden.numel() // 2
    zeros = found["zeros at single places"].case.inputs["past_values"]
    assert 0 < int((zeros == 0).sum()) < zeros.numel() // 2


def test_boxes_of_zero_and_the_largest_stand_at_some_tokens() -> None:
    ids = torch.arange(1, 19).view(2, 9)
    base = {"input_ids": ids, "bbox": torch.arange(1, 73).view(2, 9, 4)}
    found = trials(base, {"vocab_size": 30})
    boxes = found["bbox of zero at some tokens"].case.inputs["bbox"]
    assert (boxes == 0).all(-1).any()
    assert (boxes[0] == 0).all()
    assert (boxes != 0).all(-1).any()
    assert (found["bbox of the largest at some tokens"].case.inputs["bbox"] == 72).all(-1).any()


def test_rows_end_twice_and_not_at_all_where_the_first_batch_has_one_end() -> None:
    ids = torch.arange(1, 19).view(2, 9)
    ids[:, -1] = 29
    found = trials({"input_ids": ids}, {"vocab_size": 30, "eos_token_id": 29})
    ends = {what: (one.case.inputs["input_ids"] == 29).sum(1) for what, one in found.items()}
    assert (ends["rows with several ends"][:2] > 1).all()
    assert not ends["rows without an end"].any()


class Keeping(Encoder):
    """It keeps a setting of the last call: a single row turns its segments off for good."""

    forgets = False

    def __init__(self) -> None:
        super().__init__()
        self.kinds = True
        self.register_forward_pre_hook(turned_off, with_kwargs=True)


class Pure(Keeping):
    """As Keeping, at its first call."""

    forgets = True


def turned_off(module: nn.Module, args: Any, given: Any) -> tuple[Any, Any]:  # as torch hands them to a hook
    """Leave the segments out where the setting says so."""
    assert isinstance(module, Keeping)
    module.kinds = (module.forgets or module.kinds) and len(given["input_ids"]) > 1
    return args, given if module.kinds else {name: one for name, one in given.items() if name != "token_type_ids"}


def test_a_reference_that_keeps_a_setting_is_held_as_it_was_loaded() -> None:
    report = verify(reference=Keeping(), into=Pure(), dtypes=(), loaded=True, causes=False)
    assert report.faithful, str(report)


class Divided(Encoder):
    """Its first call divides weights in place and notes that it has, as RWKV's does; its output is multiplied again."""

    def __init__(self) -> None:
        super().__init__()
        self.divided = False
        self.register_forward_pre_hook(divide)
        self.register_forward_hook(lambda module, args, output: {**output, "logits": 4 * output["logits"]})


def divide(module: nn.Module, _: Any) -> None:  # as torch hands them to a hook
    """Divide what makes the outputs, if that was not done yet."""
    assert isinstance(module, Divided)
    if not module.divided:
        with torch.no_grad():
            for one in module.head.parameters():
                one.div_(4)
    module.divided = True


CASE = Case("two rows", {"input_ids": torch.tensor([[5, 7, 9], [6, 8, 4]])})


def test_a_reference_that_changes_its_weights_in_its_first_call_has_them_changed_once() -> None:
    reference = LiveReference.of(Divided())
    sides = [reference.side(torch.float64, (), "", [case], Clock()) for case in (CASE, CASE)]
    expected: Any = Encoder().double()(**CASE.inputs)["logits"]
    for side in sides:
        assert torch.allclose(side.returned(0)["logits"], expected, rtol=1e-12)


class Broken(Encoder):
    """For a batch of rows of one token it gives another shape than for each of them, as RWKV does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(spread, with_kwargs=True)


def spread(module: nn.Module, args: Any, given: Any, output: Any) -> Any:  # as torch hands them to a hook
    """The outputs of all rows in each row."""
    if given["input_ids"].shape[1] > 1:
        return output
    rows = len(given["input_ids"])
    return {**output, "logits": output["logits"].transpose(0, 1).expand(rows, -1, -1)}


def test_a_batch_in_which_the_reference_has_another_shape_than_for_each_row_says_nothing() -> None:
    report = verify(reference=Broken(), into=Encoder(), dtypes=(), loaded=True, causes=False)
    assert report.faithful, str(report)
    failed = [one.said for one in report.scope.results if one.status is Status.REFERENCE_FAILED]
    assert failed
    assert set(failed) == {OTHER_ALONE}
    other = verify(reference=Encoder(), into=Broken(), dtypes=(), loaded=True, causes=False)
    assert not other.faithful


def test_rows_begin_with_the_tokens_of_the_picture_and_hold_no_others_of_these() -> None:
    ids = torch.tensor([[7, 40, 40, 8, 1, 2, 3], [7, 40, 40, 8, 4, 5, 0]])
    kinds = (ids == 40).long()
    base = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": kinds,
        "pixel_values": torch.randn(2, 3, 4, 4),
    }
    fields = {
        "vocab_size": 50,
        "image_token_id": 40,
        "boi_token_id": 7,
        "eoi_token_id": 8,
        "max_position_embeddings": 64,
    }
    model = Model(config=fields, base=base, longest=7, never={7, 8, 40})
    trials = [*SignalRows(model, 0).beside_tokens()]
    assert {Kind.LENGTH, Kind.MASK, Kind.BATCH, Kind.TOKENS} <= {one.kind for one in trials}
    assert max(one.case.inputs["input_ids"].shape[1] for one in trials) == 64
    for one in trials:
        given = one.case.inputs
        assert torch.equal(given["input_ids"][:, :4], ids[:1, :4].expand(len(given["input_ids"]), -1))
        assert not torch.isin(given["input_ids"][:, 4:], torch.tensor([7, 8, 40])).any()
        assert torch.equal(given["mm_token_type_ids"], (given["input_ids"] == 40).long())
        assert len(given["pixel_values"]) == len(given["input_ids"])
        assert bool(given.get("attention_mask", torch.ones(1, 4))[:, :4].all())


class Last(Encoder):
    """It returns the logits of the last token alone, [b v]."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: {"logits": output["logits"][:, -1]})


def test_such_a_batch_says_nothing_of_a_port_whose_own_output_has_a_shape_that_fits() -> None:
    report = verify(reference=Broken(), into=Last(), dtypes=(), loaded=True, causes=False)
    assert report.faithful, str(report)
    failed = [one.said for one in report.scope.results if one.status is Status.REFERENCE_FAILED]
    assert OTHER_ALONE in failed


def test_pictures_are_larger_and_smaller_and_the_scope_has_their_sizes() -> None:
    made = trials({"pixel_values": torch.randn(2, 3, 8, 12)}, {"patch_size": 4})
    sizes = {tuple(one.case.inputs["pixel_values"].shape[-2:]) for one in made.values()}
    assert {(4, 4), (24, 36), (8, 24), (4, 12)} <= sizes
    large = made["pictures of 3 times the height and width"].case.inputs["pixel_values"]
    assert not torch.equal(large[..., :12], large[..., 12:24])
    assert sizes_of_pictures(one.case.inputs for one in made.values()) == sizes
    text = [*_signals(Scope(pictures=((4, 4), (8, 12), (24, 36)), places=(5, 20)))]
    assert text == ["pictures of 4x4, 8x12 and 24x36", "sounds or series of 5 and 20 places"]


def test_an_argument_that_the_reference_knows_and_is_not_given_is_left_out() -> None:
    rules = [make_rule([Term.parse(name)], [Term.parse(name)]) for name in ("input_ids", "bbox")]
    ids = torch.ones(1, 2, dtype=torch.long)
    assert list(for_port(rules, {"input_ids": ids}, torch.float32, known={"bbox"})) == ["input_ids"]


class Scaled(Encoder):
    """Its features are multiplied by a number."""

    factor: Any = staticmethod(lambda: 40**0.5)

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(
            lambda module, args, found: {name: one * self.factor() for name, one in found.items()}
        )


class ScaledByTensor(Scaled):
    """By a tensor of float32: the same number in a float32 run."""

    factor: Any = staticmethod(lambda: torch.tensor(40**0.5))


def test_a_number_as_a_tensor_is_the_number() -> None:
    reference: nn.Module = Scaled()
    assert verify(reference=reference, into=ScaledByTensor(), loaded=True, causes=False).faithful


class Quiet(Encoder):
    """Its own ``eval`` returns nothing."""

    def eval(self) -> None:  # type: ignore[override]  # as some classes have it
        super().eval()


def test_a_module_whose_eval_returns_nothing_is_verified() -> None:
    report = verify(reference=Quiet(), into=Quiet(), dtypes=(), loaded=True, causes=False, trials=False)
    assert report.faithful, str(report)


def test_a_picture_of_one_patch_is_not_judged_where_the_reference_takes_no_other_number_of_patches() -> None:
    base = torch.randn(2, 3, 12, 12)
    model = Model(config={"patch_size": 4}, base={"pixel_values": base}, longest=0)
    pictures = {"half": base[..., :8, :], "a row more": base[..., :12, :], "one patch": base[..., :4, :4]}
    tried = [
        Trial(case=Case(what, {"pixel_values": one}), kind=Kind.VALUES, what=what) for what, one in pictures.items()
    ]

    def judged(half: Status) -> list[Status]:
        statuses = {"half": half, "a row more": Status.SAME, "one patch": Status.DIFFERS}
        results = [Result(kind=Kind.VALUES, what=what, batch=what, status=one) for what, one in statuses.items()]
        return [one.status for one in _without_broadcast(model, tried, results)]

    assert judged(Status.REFERENCE_FAILED) == [Status.REFERENCE_FAILED, Status.SAME, Status.REFERENCE_FAILED]
    assert judged(Status.SAME) == [Status.SAME, Status.SAME, Status.DIFFERS]

"""Ports that are right on the first batches and wrong on other inputs, or in other ways of calling them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import porting
from porting import verify
from porting.errors import VerifyError
from porting.notation.table import parse_table
from porting.reporting.report import Report
from porting.tracing import running
from porting.tracing.conditions import constants_of
from porting.tracing.running import Side
from porting.trials import Kind, Status, purity, run
from porting.trials.battery import battery
from porting.trials.inputs import Case
from porting.trials.padding import attended, hides_token
from porting.trials.scope import ImpurityKind
from porting.trials.trial import Model
from porting.verification.batch_search import omittable
from tests.trials.small_model import CONFIG, INPUTS, WAYS, Encoder, wrong

pytestmark = pytest.mark.few(3)


def verified(port: nn.Module) -> Report:
    return verify(reference=Encoder(), into=port, dtypes=(), loaded=True)


@pytest.fixture(scope="module")
def faithful() -> Report:
    return verified(Encoder())


def test_a_faithful_port_is_the_same_in_every_trial(faithful: Report) -> None:
    assert faithful.faithful, str(faithful)
    assert {result.status for result in faithful.scope.results} == {Status.SAME}
    assert not faithful.scope.impurities
    assert not faithful.scope.not_run


def test_the_scope_says_what_ran(faithful: Report) -> None:
    scope = faithful.scope
    assert (scope.lengths[0], scope.lengths[-1]) == (1, 20)
    assert {1, 2, 3, 9, 17} <= set(scope.rows)
    assert {"no padding", "right padding", "left padding", "gaps", "random masks"} <= set(scope.masks)
    assert scope.tokens == (50, 50)
    text = " ".join(faithful.details().split())
    assert "ran: eval mode, float64; rows of 1 to 20 tokens; 1 to 1" in text
    assert f"and 153 rows in a batch ({len(scope.shapes)} of {20 * len(scope.rows)} combinations); masks: none" in text
    assert "output compared, except at padding and in rows without a token: logits, pooled" in text
    assert "not run: gradients, training mode and autocast" in text
    assert faithful.to_dict()["scope"]["masks"] == list(scope.masks)


@pytest.mark.few(1)
@pytest.mark.parametrize("what", INPUTS)
def test_a_port_that_is_wrong_on_some_inputs_is_different(what: str) -> None:
    report = verified(wrong(INPUTS[what]))
    assert report.verdict == "different", str(report)
    first = report.first_difference
    assert report.scope.differing or (first is not None and first.port.startswith("."))


@pytest.mark.few(1)
@pytest.mark.parametrize("what", WAYS)
def test_a_port_that_is_no_pure_function_is_different(what: str) -> None:
    report = verified(wrong(*WAYS[what]))
    assert report.verdict == "different", str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda x, ids: x.clamp(-1e4, 1e4), "clamp never changed a value"),
        (lambda x, ids: torch.where(x > 1e4, 0.0, x), "gt was never true"),
        (lambda x, ids: torch.where(((ids == 17) & (ids == 18))[..., None], 0.0, x), "__and__ was never true"),
        (lambda x, ids: x.masked_fill((ids < 0)[..., None], 0.0), "lt was never true"),
        (lambda x, ids: torch.minimum(x, torch.full_like(x, 1e4)), "minimum never changed a value"),
        (lambda x, ids: x * (ids != -100)[..., None], "ne was never false"),
    ],
)
def test_a_condition_on_tensors_with_one_outcome_is_part_of_the_scope(
    change: Callable[[Tensor, Tensor], Tensor], named: str
) -> None:
    """What it would do was compared with nothing."""
    report = verified(wrong(lambda out, given, port: {**out, "logits": change(out["logits"], given["input_ids"])}))
    assert report.faithful, str(report)
    assert any(named in one.condition for one in report.not_taken), report.not_taken
    assert named in " ".join(report.details().split())
    assert "; the branches at " in " ".join(report.details().split())


def test_more_rows_than_a_number_in_the_code_and_long_rows_are_masked_in_every_way() -> None:
    """A causal model hides what is behind anyway: there only padding in front and gaps show."""
    base = {"input_ids": torch.arange(1, 19).view(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    model = Model(config={"vocab_size": 60}, base=base, longest=120, likely=(30,))
    made = {trial.what: trial.case.inputs["attention_mask"] for trial in battery(model, seed=0, tokens=10**6)}
    many = made["3 rows more than a number in your code, padded in front"]
    assert len(many) == 33
    assert (many[30:, 0] == 0).all()
    assert (many[:, -1] == 1).all()
    for length in (64, 120):
        gaps = made[f"gaps in rows of {length}"]
        both = gaps[(gaps[:, 0] == 1) & (gaps[:, -1] == 1)]
        assert (both[:, -20:-1] == 0).any()


def test_a_condition_with_both_outcomes_in_the_trials_is_no_limit_of_the_scope() -> None:
    """The token is in no row of the first batches: they hold eight tokens here."""
    seen = verified(
        wrong(lambda out, given, port: {**out, "pooled": out["pooled"] * (1 + 0 * (given["input_ids"][:, :1] == 33))})
    )
    assert seen.faithful
    assert not [one for one in seen.not_taken if "was never" in one.condition]


def test_code_that_a_trial_alone_reaches_was_run(faithful: Report) -> None:
    """No first batch gives positions; the trials do, and what they gave is compared."""
    assert faithful.scope.positions
    assert not [branch for branch in faithful.branches if "position_ids" in branch.condition], faithful.branches


class Trained(Encoder):
    """Keeps a setting of the training mode."""

    factor = 1.0

    def train(self, mode: bool = True) -> Trained:
        self.factor = 1.01 if mode else self.factor
        super().train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return {name: one * self.factor for name, one in super().forward(*args, **kwargs).items()}


def test_a_port_that_keeps_what_training_mode_set_is_no_pure_function() -> None:
    port = Trained().eval()
    port.factor = 1.0
    assert verified(port).verdict == "different"


class NeverTrained(Encoder):
    """Has no training mode."""

    def train(self, mode: bool = True) -> NeverTrained:
        if mode:
            raise NotImplementedError("inference only")
        super().train(mode)
        return self


def test_a_port_without_a_training_mode_is_verified() -> None:
    assert verified(NeverTrained().eval()).faithful


def test_what_was_not_pure_is_named() -> None:
    kinds = {
        "writes to its mask": "writes to its inputs: attention_mask",
        "is another with gradients": "gives other numbers with gradients on",
    }
    for what, words in kinds.items():
        text = " ".join(str(verified(wrong(*WAYS[what]))).split())
        assert f"your model {words}" in text


def test_tokens_that_are_overwritten_behind_some_masks_alone_are_inputs_that_are_written_to() -> None:
    """Only a mask with gaps shows it, which is in no batch that is run again for its purity."""

    def before(given: dict[str, Any], port: nn.Module) -> None:
        mask = given["attention_mask"]
        if mask is not None and mask.shape[1] > 2 and bool(mask[:, 0].all() and mask[:, -1].all() and not mask.all()):
            given["input_ids"].masked_fill_(mask == 0, 49)

    text = " ".join(str(verified(wrong(lambda out, given, port: out, before))).split())
    assert "your model writes to its inputs: input_ids" in text


def test_a_mask_whose_meaning_the_table_says_may_be_left_out_too() -> None:
    class Port(nn.Module):
        def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
            return x

    table = parse_table('[inputs]\n"input_ids" = "x"\n"attention_mask [b s]" = "keep -> bool [b s]"', where="t")
    given = {"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 2)}
    assert [*omittable(table.inputs, given, Encoder(), Port())] == ["attention_mask"]


def of_working_dtype(off: float = 1.0) -> Encoder:
    """Left padding is read from its wrong end where the numbers are float32, as a kernel for that dtype might."""

    def change(out: dict[str, Tensor], given: dict[str, Any], port: nn.Module) -> dict[str, Tensor]:
        mask = given["attention_mask"]
        left = mask is not None and bool((mask[:, 0] == 0).any())
        return {**out, "logits": out["logits"] + off} if left and out["logits"].dtype == torch.float32 else out

    return wrong(change)


def test_each_batch_is_run_in_the_working_dtype_too() -> None:
    report = verify(reference=Encoder(), into=of_working_dtype(), loaded=True, causes=False)
    assert report.verdict == "different", str(report)
    assert report.scope.differing
    assert all(one.what.endswith(", in float32") for one in report.scope.differing)
    assert "left padding, in float32" in str(report)


def test_what_rounding_explains_in_the_working_dtype_is_no_difference() -> None:
    port = of_working_dtype(1e-6)
    assert verify(reference=Encoder(), into=port, loaded=True, causes=False).faithful


def coarse(out: dict[str, Tensor], given: dict[str, Any], port: nn.Module) -> dict[str, Tensor]:
    """Outputs that are rounded to bfloat16 in every call in float32."""
    if out["logits"].dtype != torch.float32:
        return out
    return {name: one.to(torch.bfloat16).float() for name, one in out.items()}


def test_a_port_that_rounds_more_on_every_batch_is_imprecise() -> None:
    report = verify(reference=Encoder(), into=wrong(coarse), loaded=True, causes=False)
    assert not report.scope.differing
    assert report.verdict == "imprecise", str(report)


def test_a_working_dtype_that_was_not_asked_for_is_not_run() -> None:
    assert verified(of_working_dtype()).faithful


def test_padded_places_are_no_fault_and_are_reported() -> None:
    def zeroed(out: dict[str, Tensor], given: dict[str, Any], port: nn.Module) -> dict[str, Tensor]:
        mask = given["attention_mask"]
        return out if mask is None else {**out, "logits": out["logits"] * (mask[..., None] != 0)}

    report = verified(wrong(zeroed))
    assert report.faithful, str(report)
    assert ". -> logits" in report.padded
    assert "differs at padded places only, which is not an error" in " ".join(report.details().split())


class Maskless(Encoder):
    """Takes token ids alone; ``padding``: the token that it masks by itself."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # it takes less
        return super().forward(input_ids, None if self.padding is None else input_ids != self.padding)


@pytest.mark.few(1)
@pytest.mark.parametrize(("padding", "verdict"), [(None, "faithful"), (0, "faithful"), (7, "different")])
def test_a_port_without_a_mask_may_mask_the_padding_token_by_itself(padding: int | None, verdict: str) -> None:
    rules = "".join(f'"{name}" = "{name}"\n' for name, _ in Encoder().named_parameters())
    table = porting.parse_table(f'[tensors]\n{rules}[inputs]\ninput_ids = "input_ids"\n')
    report = verify(reference=Encoder(), into=Maskless(padding), table=table, dtypes=(), loaded=True)
    assert report.verdict == verdict, str(report)
    if padding == 0:
        assert "masks the padding token by itself" in " ".join(report.warnings)
        assert {"left padding", "gaps"} <= set(report.scope.masks)


@pytest.mark.parametrize(
    ("point", "shape", "counted"),
    [
        ("layer.attention.dropout", (2, 3, 4, 4), 3 * 4 * 6),  # of [b h q k] the queries that are tokens
        ("layer.attention.query_heads", (2, 3, 4, 9), 3 * 9 * 6),
        ("layer", (2, 4, 9), 9 * 6),
        ("layer.pooled", (2, 9), 2 * 9),
        (". -> states", (3, 2, 4, 9), 3 * 9 * 6),  # of all layers
        (". -> weights", (3, 2, 5, 4, 4), 3 * 5 * 4 * 6),
        ("layer.attention", (2, 4, 4, 9), (4 * 4 + 2 * 2) * 9),  # as many heads as tokens: either axis may be theirs
    ],
)
def test_the_places_of_tokens_are_found_behind_the_heads_as_well(
    point: str, shape: tuple[int, ...], counted: int
) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    seen = attended({"attention_mask": mask}, point, shape)
    assert (torch.ones(shape) if seen is None else seen).sum() == counted


@pytest.mark.parametrize(
    ("point", "masks"),
    [
        (". -> attentions.0", {"attention_mask"}),
        (". -> encoder_attentions.1", {"attention_mask", "decoder_attention_mask"}),
        (". -> decoder_attentions.0", {"decoder_attention_mask"}),
        (". -> cross_attentions.0", {"decoder_attention_mask"}),
        (". -> global_attentions.0", {"attention_mask"}),
    ],
)
def test_of_attention_weights_the_queries_that_are_tokens_count_with_as_many_heads_as_tokens(
    point: str, masks: set[str]
) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]])
    seen = attended(dict.fromkeys(masks, mask), point, (2, 4, 4, 4))
    assert seen is not None
    assert torch.equal(seen, (mask == 1)[:, None, :, None].expand(2, 4, 4, 4))


class Remembering(Encoder):
    """What it gave for the front of a row it gives again where a longer row begins so."""

    def __init__(self) -> None:
        super().__init__()
        self.last: tuple[Tensor, Tensor] | None = None

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        found = super().forward(input_ids, *args, **kwargs)
        logits, last = found["logits"], self.last
        if last is not None and len(last[0]) == len(input_ids) and 1 < last[0].shape[1] < input_ids.shape[1]:
            length = last[0].shape[1]
            if torch.equal(last[0], input_ids[:, :length]):
                found = {**found, "logits": torch.cat([last[1].to(logits), logits[:, length:]], 1)}
        self.last = input_ids.clone(), logits.detach().clone()
        return found


def test_what_is_kept_of_a_shorter_row_is_seen_where_a_longer_one_begins_so() -> None:
    report = verified(Remembering())
    assert report.verdict == "different", str(report)
    assert "gives other numbers after other calls" in report.details()


class Unpadded(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.config = {**CONFIG, "model_type": "bert", "pad_token_id": None}  # type: ignore[dict-item]  # no numbers


def test_no_token_may_be_masked_where_the_config_has_no_padding_token() -> None:
    rules = "".join(f'"{name}" = "{name}"\n' for name, _ in Encoder().named_parameters())
    table = porting.parse_table(f'[tensors]\n{rules}[inputs]\ninput_ids = "input_ids"\n')
    for padding, right in ((None, True), (0, False)):
        report = verify(reference=Unpadded(), into=Maskless(padding), table=table, dtypes=(), loaded=True)
        assert report.faithful is right, str(report)


def hiding(
    token: int | None, *, causal: bool = False, table: bool = False
) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
    model = Encoder().double()

    def run(ids: Mapping[str, Tensor]) -> list[Tensor]:
        words = ids["input_ids"]
        if table:  # looked up without a module
            model.tokens.forward = lambda numbers: model.tokens.weight[numbers]  # type: ignore[assignment, method-assign]  # so it is looked up
        kept = torch.ones_like(words) if token is None else (words != token).long()
        if not causal:
            return [*model(words, kept).values()]
        rows = [model(words[:, : end + 1], kept[:, : end + 1])["logits"][:, -1] for end in range(words.shape[1])]
        return [torch.stack(rows, 1)]

    return run


@pytest.mark.few(8)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize(("token", "hidden"), [(0, True), (7, False), (None, False)])
def test_whether_a_model_hides_a_token_is_told_by_its_embedding(
    token: int | None, hidden: bool, causal: bool, table: bool
) -> None:
    ids = {"input_ids": torch.arange(3, 21).view(2, 9)}
    with torch.no_grad():
        assert hides_token(hiding(token, causal=causal, table=table), ids, 0) is hidden


def test_a_difference_that_a_trial_shows_is_placed() -> None:
    class Left(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.head = Biased(12, 7)
            self.head.load_state_dict(Encoder().head.state_dict())

    class Biased(nn.Linear):
        """Adds something in batches of one row."""

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's own name
            found = super().forward(input)
            return found + 1e-3 if len(input) == 1 and input.shape[1] < 20 else found

    report = verified(Left())
    assert report.verdict == "different"
    assert [probe.port for probe in report.guilty][:1] == ["head"]
    assert all(one.rows == 1 for one in report.scope.differing)


def test_given_batches_are_tried_row_by_row_only() -> None:
    ids = torch.randint(1, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    mine = [Case("mine", {"input_ids": ids})]
    report = verify(reference=Encoder(), into=Encoder(), dtypes=(), loaded=True, inputs=mine)
    assert report.faithful
    assert {result.kind for result in report.scope.results} == {Kind.BATCH}
    one_row = verify(reference=Encoder(), into=wrong(INPUTS["one row"]), dtypes=(), loaded=True, inputs=mine)
    assert one_row.verdict == "different"


def test_without_trials_the_scope_is_the_batches() -> None:
    report = verify(reference=Encoder(), into=wrong(INPUTS["left padding"]), dtypes=(), loaded=True, trials=False)
    assert report.faithful
    assert not report.scope.results
    assert "trials beyond the batches above" in report.details() or "left" not in " ".join(report.cases)


class Nested(Encoder):
    """Rows of their own lengths in a nested tensor, without padding."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        if length > CONFIG["max_position_embeddings"]:
            raise ValueError(f"a row of {length} tokens is longer than 20")
        places = torch.arange(length)[None] if position_ids is None else position_ids
        kinds = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.tokens(input_ids) + self.segments(kinds) + self.positions(places)
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [one[seen != 0] if bool(seen.any()) else one for one, seen in zip(x, kept, strict=True)]
        projected = self.qkv(torch.nested.as_nested_tensor(rows))
        mixed = torch.zeros_like(x)
        for number, (row, one) in enumerate(zip(rows, projected.unbind(), strict=True)):
            query, key, value = one.chunk(3, -1)
            out = self.norm(row + (query @ key.T / 12**0.5).softmax(-1) @ value)
            places_of = kept[number] != 0 if bool(kept[number].any()) else torch.ones(length, dtype=torch.bool)
            mixed = mixed.index_put((torch.tensor(number), places_of.nonzero()[:, 0]), out)
        return {"logits": self.head(F.gelu(mixed)), "pooled": mixed[:, 0].tanh()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_modules_that_compute_on_nested_tensors_are_skipped_and_the_output_decides() -> None:
    report = verified(Nested())
    assert ". -> logits" not in report.skipped
    assert any(one.partition(" #")[0] == "qkv" for one in report.skipped), str(report)
    assert report.scope.returned is not None
    assert "logits" in report.scope.returned.pairs
    assert not report.scope.failed, str(report)


class Adjusted(Encoder):
    """Does something to its arguments first, or to its outputs afterwards."""

    def before(self, given: dict[str, Any]) -> None:
        """Change the arguments."""

    def after(self, made: dict[str, Tensor]) -> dict[str, Tensor]:
        """Change the outputs."""
        return made

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        given = dict(zip(names, (input_ids, attention_mask, token_type_ids, position_ids), strict=True))
        self.before(given)
        return self.after(super().forward(**given))  # type: ignore[arg-type]  # the ids are never None


class Marked(Adjusted):
    """Without segments it makes them from a token that nothing names, and no first batch leaves the segments out."""

    mark = 37

    def before(self, given: dict[str, Any]) -> None:
        if given["token_type_ids"] is None:
            given["token_type_ids"] = ((given["input_ids"] == self.mark).cumsum(1) > 0).long()


class MarkedByAnother(Marked):
    """The token is a number in the code, and not an attribute."""

    def before(self, given: dict[str, Any]) -> None:
        if given["token_type_ids"] is None:
            given["token_type_ids"] = torch.where(given["input_ids"] == 41, 1, 0)


@pytest.mark.parametrize(("port", "token"), [(Marked, 37), (MarkedByAnother, 41)])
def test_the_numbers_of_the_code_are_token_ids_to_try(port: type[Encoder], token: int) -> None:
    assert token in constants_of(port())
    assert verified(port()).verdict == "different"


def test_tokens_that_the_code_names_are_tried_with_and_without_each_other_argument() -> None:
    width, token = 8, 4321
    base = {name: torch.ones(2, width, dtype=torch.long) for name in ("input_ids", "attention_mask", "token_type_ids")}
    optional = ("attention_mask", "token_type_ids")
    config = {"vocab_size": 90_000, "type_vocab_size": 2}
    model = Model(config=config, base=base, longest=20, optional=optional, likely=(token,))
    made = battery(model, seed=0, tokens=10**6)
    with_it = [one.case.inputs for one in made if bool((one.case.inputs["input_ids"] == token).any())]
    for name in optional:
        assert {name in one for one in with_it} == {True, False}


class Infinite(Adjusted):
    """Masks by a number that in float64 needs float64 as the default dtype."""

    def before(self, given: dict[str, Any]) -> None:
        mask = torch.ones_like(given["input_ids"]) if given["attention_mask"] is None else given["attention_mask"]
        lowest = -1e300 if self.head.weight.dtype == torch.float64 else -1e30
        bias = torch.where(mask.bool(), 0.0, lowest)
        assert bias.dtype == self.head.weight.dtype or self.head.weight.dtype != torch.float64
        given["attention_mask"] = (bias == 0).long()


def test_a_trial_that_needs_float64_as_the_default_dtype_is_run_with_it() -> None:
    report = verified(Infinite())
    assert report.faithful, str(report)
    assert {result.status for result in report.scope.results} == {Status.SAME}


class Squeezed(Adjusted):
    """Loses the axis of the rows where there is one row."""

    def after(self, made: dict[str, Tensor]) -> dict[str, Tensor]:
        return made | {"pooled": made["pooled"].squeeze()}


@pytest.mark.parametrize("trials", [True, False])
def test_an_output_of_another_shape_for_some_batches_is_a_difference(trials: bool) -> None:
    inputs = [Case(f"{rows} rows", {"input_ids": torch.arange(6 * rows).view(rows, 6)}) for rows in (3, 1)]
    report = verify(reference=Encoder(), into=Squeezed(), inputs=inputs, dtypes=(), loaded=True, trials=trials)
    assert report.verdict == "different", str(report)
    assert "different numbers of axes" in " ".join(report.details().split())
    assert verified(Squeezed()).verdict == "different"


def test_where_neither_side_casts_nothing_watches_for_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """That costs several times the pass of a small model, also where parts of the reference are compared."""

    def watched(module: nn.Module) -> object:
        raise RuntimeError("casts are watched")

    module = nn.Sequential(nn.Linear(3, 2)).double()
    given = {"input": torch.randn(4, 3, dtype=torch.float64)}
    monkeypatch.setattr(running, "forced_float64", watched)
    for point in ("0", "."):
        side = Side(title="the port", module=module, arguments=[given], wanted=[point])
        assert torch.equal(run._outputs(side, plainly=True)[point], module(given["input"]))
        with pytest.raises(VerifyError, match="casts are watched"):
            run._outputs(side, plainly=False)


class Remembers(nn.Module):
    """Is another function for batches of so many rows where the batch before had so many."""

    def __init__(self, before: int, now: int) -> None:
        super().__init__()
        self.pair, self.last = (before, now), 0

    def forward(self, x: Tensor) -> Tensor:
        wrong = (self.last, len(x)) == self.pair
        self.last = len(x)
        return x + 1 if wrong else x


@pytest.mark.parametrize("pair", [*product((1, 2, 3), repeat=2)], ids=str)
def test_each_batch_is_run_after_each_other_one(pair: tuple[int, int]) -> None:
    batches = [{"x": torch.randn(rows, 4)} for rows in (1, 2, 3)]
    side = Side(title="the port", module=Remembers(*pair), arguments=batches, wanted=[])
    assert purity._in_any_order(side, {}) > 0.1
    pure = Side(title="the port", module=Remembers(0, 0), arguments=batches, wanted=[])
    assert purity._in_any_order(pure, {}) == 0


def keeping(reads: str = "", kept: str = "cache") -> Encoder:
    """A port with a persistent buffer that its forward writes to: a sequence, or a count of calls.

    Args:
        reads: ``"0"`` if an output has nought times what the call before wrote, and ``"1e-3"`` if a thousandth.
    """

    def change(out: dict[str, Tensor], given: dict[str, Any], port: nn.Module) -> dict[str, Tensor]:
        buffer, (rows, length) = port.get_buffer(kept), given["input_ids"].shape
        former = buffer[:rows, 0].clone() if kept == "cache" else buffer.clone()
        with torch.no_grad():
            if kept == "cache":
                buffer[:rows, :length] = port.get_submodule("tokens")(given["input_ids"])
            else:
                buffer += 1
        return {**out, "pooled": out["pooled"] + float(reads) * former} if reads else out

    port = wrong(change)
    port.register_buffer("cache", torch.zeros(160, 20, 12))
    port.register_buffer("calls", torch.zeros((), dtype=torch.long))
    return port


NOT_STORED = """[mapping]
name = "keeping"
[tensors]
"{*rest}" = "{*rest}"
[fresh]
"cache" = "the module fills it"
"calls" = "the module counts them"
"""


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("how", "stored", "kind"),
    [
        ({}, False, ImpurityKind.WRITES_SCRATCH),
        ({"kept": "calls"}, False, ImpurityKind.WRITES_SCRATCH),
        ({}, True, ImpurityKind.WRITES_WEIGHTS),
        ({"reads": "0"}, False, ImpurityKind.WRITES_WEIGHTS),  # NaN in the buffer reaches the output
        ({"reads": "1e-3"}, False, ImpurityKind.STATE),
        ({"reads": "1e-3", "kept": "calls"}, False, ImpurityKind.STATE),
    ],
)
def test_a_buffer_on_which_no_output_depends_is_no_state(how: dict[str, str], stored: bool, kind: ImpurityKind) -> None:
    port = keeping(**how)
    reference = keeping("0") if stored else Encoder()
    table = None if stored else parse_table(NOT_STORED)
    report = verify(reference=reference, into=port, dtypes=(), loaded=True, table=table, causes=False)
    assert kind in {one.kind for one in report.scope.impurities}, str(report)
    assert report.faithful == (kind is ImpurityKind.WRITES_SCRATCH)
    assert not port.get_buffer("cache").isnan().any()


def adds_up(out: dict[str, Tensor], given: dict[str, Any], port: nn.Module) -> dict[str, Tensor]:
    next(port.parameters()).data.add_(1e-3)
    return out


def test_a_weight_that_forward_changes_is_named_with_the_line() -> None:
    report = verify(reference=Encoder(), into=wrong(adds_up), dtypes=(), loaded=True, causes=False)
    name = next(name for name, _ in Encoder().named_parameters())
    line = adds_up.__code__.co_firstlineno + 1
    assert report.verdict == "different"
    details = [one.detail for one in report.scope.impurities if one.detail.startswith(name)]
    assert details, str(report)
    assert all(f"test_trials.py:{line})" in one for one in details)


def whole_rows(given: dict[str, Any], port: nn.Module) -> None:
    """Positions are added as a whole table, as many a model of a tutorial does it."""
    if given["input_ids"].shape[1] != CONFIG["max_position_embeddings"]:
        raise RuntimeError("the size of tensor a must match the size of tensor b")


def one_row(out: dict[str, Tensor], given: dict[str, Any], port: nn.Module) -> dict[str, Tensor]:
    return {name: one * 1.001 for name, one in out.items()} if len(given["input_ids"]) == 1 else out


def test_a_port_that_takes_rows_of_one_length_is_tried_on_these() -> None:
    report = verified(wrong(lambda out, given, port: out, whole_rows))
    assert report.faithful, str(report)
    assert report.scope.lengths == (20,)
    assert set(report.scope.rows) >= {1, 2, 3, 9, 17}
    assert {"right padding", "left padding", "gaps"} <= set(report.scope.masks)
    assert not report.scope.not_run
    assert not verified(wrong(one_row, whole_rows)).faithful


def test_a_port_that_fails_on_every_row_is_refused_with_its_own_words() -> None:
    def fails(given: dict[str, Any], port: nn.Module) -> None:
        raise RuntimeError("never")

    with pytest.raises(VerifyError, match=r"the port failed on input_ids \[8, 20\].*never"):
        verified(wrong(lambda out, given, port: out, fails))


class Counting(Encoder):
    """Positions are counted in float32, from whole numbers or from logarithms: a rounding of them moves them by one."""

    logarithms = False
    factor = 1.0

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """As the encoder's; off by a thousandth where a row is one token again and again."""
        ones = torch.ones(input_ids.shape) if attention_mask is None else attention_mask.float()
        counted = ones.cumsum(1)
        if self.logarithms:
            counted = torch.log2(counted.clamp_min(1)) * 4
        places = counted.long().clamp_max(19)
        out = super().forward(input_ids, attention_mask, token_type_ids, places)
        same = (input_ids == input_ids[:, :1]).all(1, keepdim=True) & (input_ids[:, :1] != 0)
        return {**out, "logits": torch.where(same[..., None], self.factor * out["logits"], out["logits"])}


class CountingByLogarithms(Counting):
    logarithms = True


@pytest.mark.slow
@pytest.mark.parametrize("port", [Counting, CountingByLogarithms])
def test_a_decision_that_rounding_turns_excuses_no_difference(port: type[Counting]) -> None:
    wrong_port = port()
    wrong_port.factor = 1.001
    found = [verify(reference=port(), into=one, dtypes=(), loaded=True, causes=False) for one in (port(), wrong_port)]
    assert [report.verdict for report in found] == ["faithful", "different"], "\n".join(map(str, found))


class Sorted(Encoder):
    """It runs the rows of a batch in the order of their lengths, and puts them back."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        if attention_mask is None:
            return super().forward(input_ids, None, token_type_ids, position_ids)
        order = attention_mask.sum(1).argsort(stable=True)
        kinds = None if token_type_ids is None else token_type_ids[order]
        places = None if position_ids is None else position_ids.expand_as(input_ids)[order]
        out = super().forward(input_ids[order], attention_mask[order], kinds, places)
        return {name: one[order.argsort()] for name, one in out.items()}


def test_rows_in_another_order_inside_are_no_fault() -> None:
    reference, port = Encoder(), Sorted()
    lines = '[tensors]\n"{*x}" = "{*x}"\n[probes]\n"norm" = "norm"\n"qkv" = "qkv"\n"." = "."\n'
    table = parse_table(lines, where="sorted")
    report = verify(reference=reference, into=port, table=table, loaded=True, dtypes=(), causes=False)
    assert report.faithful, str(report)
    assert "in another order" in report.details()


class Vectors(Encoder):
    """Takes embeddings in place of token ids, and segments that nothing has a number of."""

    scale, shift = 1.0, 1.0

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> dict[str, Tensor]:
        x = self.tokens(input_ids) if inputs_embeds is None else self.scale * inputs_embeds
        x = x if token_type_ids is None else x + self.shift * self.tokens(token_type_ids)
        return {"logits": self.head(F.gelu(self.norm(x)))}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, ""),
        ({"scale": 2.0}, "embeddings in place of token ids"),
        ({"shift": 0.5}, "segments of 0"),
    ],
)
def test_embeddings_and_segments_are_given_where_both_sides_take_them(change: dict[str, float], what: str) -> None:
    reference, port = Vectors(), Vectors()
    for one in (reference, port):
        one.config = {name: value for name, value in CONFIG.items() if name != "type_vocab_size"}
    for name, value in change.items():
        setattr(port, name, value)
    report = verify(reference=reference, into=port, dtypes=(), loaded=True)
    tried = {result.what for result in report.scope.results}
    assert {"embeddings in place of token ids", "segments of 0", "segments that are token ids"} <= tried
    assert report.faithful == (not change), str(report)
    assert not what or what in {result.what for result in report.scope.differing}

"""Gradients through the table: faithful ports agree, and what only a backward pass shows is named by parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import porting
from porting.loading import load
from porting.models.bert import BertAttention, BertEmbeddings, BertLayer, BertPooler
from porting.models.bert_heads import BertForPreTraining
from porting.notation.table import parse_table
from porting.tables import shipped
from porting.verification import Report, verify
from tests.families.pairs import OPENAI_GPT, PAIRS, Pair
from tests.families.ported import make
from tests.small_checkpoint import tensors, write_checkpoint
from tests.verification.planted import NoBias, becomes
from tests.verification.test_faithful import DTYPES, REWRITTEN, rewritten
from tests.verification.test_user_bert import PORTS

pytestmark = pytest.mark.few(2)

KEYS = tuple(f"bert.layers.{layer}.attention.key.bias" for layer in range(3))


def differentiated(path: Path, plant: Callable[[BertForPreTraining], None], steps: int = 0) -> Report:
    model = load(path)
    assert isinstance(model, BertForPreTraining)
    plant(model)
    return verify(path, model, loaded=True, gradients=True, trials=False, steps=steps)


def wrong(report: Report) -> list[str]:
    assert report.learned is not None
    return [name for one in report.learned.differing for name in one.port]


@pytest.mark.few(1)
@pytest.mark.parametrize("how", REWRITTEN)
def test_other_code_for_the_same_mathematics_has_the_same_gradients(tmp_path: Path, how: str) -> None:
    path = write_checkpoint(tmp_path / "bert", values=tensors(7))
    report = verify(path, rewritten(path, REWRITTEN[how]), loaded=True, dtypes=DTYPES, gradients=True, trials=False)
    assert report.faithful, str(report)
    assert report.learned is not None
    assert report.learned.outputs == ("mlm", "nsp")
    assert len(report.learned.gradients) == 62
    assert max(gradient.meaning for gradient in report.learned.gradients) < 1e-13
    assert tuple(name for gradient in report.learned.gradients if gradient.zero for name in gradient.port) == KEYS
    assert report.learned.alone == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", PORTS)
def test_other_layouts_and_other_tables(checkpoint: Path, name: str) -> None:
    """Fused, split into heads, sequence first: each gradient comes back through the moves."""
    make_module, table = PORTS[name]
    report = verify(
        checkpoint, make_module(), parse_table(table), architecture="BertModel", gradients=True, steps=2, trials=False
    )
    assert report.faithful, str(report)
    assert report.learned is not None
    assert len(report.learned.gradients) == (53 if name.startswith("fused") else 55)


@pytest.mark.slow
def test_what_a_table_sums_or_scales_has_the_gradient_of_the_sum(tmp_path: Path) -> None:
    """A BERT whose token types are folded into its positions."""
    pair = Pair("bert_into_fused", "BertModel", {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2,
                "num_attention_heads": 4, "intermediate_size": 40, "max_position_embeddings": 29})  # fmt: skip
    report = verify(
        make(pair, tmp_path / "bert").directory, table="bert_into_fused", gradients=True, steps=2, trials=False
    )
    assert report.faithful, str(report)
    assert report.learned is not None
    folded = [gradient for gradient in report.learned.gradients if gradient.port == ("embeddings.position.weight",)]
    assert [one.reference for one in folded] == [
        "embeddings.position_embeddings.weight",
        "embeddings.token_type_embeddings.weight",
    ]
    assert all(steps.fixed == folded[0].port * 2 for steps in report.learned.steps)
    scaled = make(Pair("openai_gpt", "OpenAIGPTLMHeadModel", OPENAI_GPT), tmp_path / "gpt").directory
    learned = verify(scaled, gradients=True, trials=False).learned
    assert learned is not None
    [embedding] = [gradient for gradient in learned.gradients if gradient.port == ("embedding.weight",)]
    assert not embedding.differs
    assert embedding.meaning < 1e-13


class Detached(BertLayer):
    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:  # Any: as the layer has it
        return super().forward(hidden.detach(), *args, **kwargs)


class Backwards(torch.autograd.Function):
    """tanh, with the derivative of another function."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:  # Any: torch's own context
        result = hidden.tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:  # as above
        (result,) = ctx.saved_tensors
        return given[0] * (1 - result)


class OwnTanh(BertPooler):
    def forward(self, hidden: Tensor) -> Tensor:
        pooled: Tensor = Backwards.apply(self.dense(hidden[:, 0]))  # type: ignore[no-untyped-call]  # torch's own
        return pooled


class InPlace(BertPooler):
    def forward(self, hidden: Tensor) -> Tensor:
        pooled = torch.tanh(self.dense(hidden[:, 0]))
        return pooled.add_(1.0).sub_(1.0)  # tanh had saved it for its backward pass


class Quietly(BertPooler):
    """The same behind autograd's back, so that nothing fails."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden[:, 0] * 1.0
        pooled: Tensor = torch.tanh(self.dense(hidden))
        hidden.data.mul_(2.0)  # the weight's gradient is computed from it
        return pooled


class WithoutGradient(BertEmbeddings):
    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # Any: as the embeddings have it
        return super().forward(*args, **kwargs)


EMBEDDED = tuple(f"bert.embeddings.{name}" for name in (
    "word.weight", "position.weight", "token_type.weight", "norm.weight", "norm.bias"
))  # fmt: skip
LAYER_0 = tuple(f"bert.layers.0.{part}.{kind}" for part in (
    "attention.query", "attention.key", "attention.value", "attention.output", "attention_norm", "intermediate",
    "output", "output_norm",
) for kind in ("weight", "bias") if (part, kind) != ("attention.key", "bias"))  # fmt: skip
POOLED = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")


@pytest.mark.slow
def test_a_wrong_detach_is_caught_and_placed(checkpoint: Path) -> None:
    report = differentiated(checkpoint, becomes("bert.layers.1", Detached))
    assert report.verdict == "different"
    assert not report.guilty
    assert set(wrong(report)) == {*EMBEDDED, *LAYER_0}
    assert report.learned is not None
    assert report.learned.leaves == "bert.layers.0"
    text = " ".join(report.details().split())
    assert text.startswith("DIFFERENT porting.models.bert_heads.BertForPreTraining computes, and does not learn, what")
    assert "going back from the outputs, it is right at bert.layers.1.attention.query and wrong at" in text


@pytest.mark.slow
def test_no_gradient_at_all_is_a_wrong_gradient(checkpoint: Path) -> None:
    report = differentiated(checkpoint, becomes("bert.embeddings", WithoutGradient))
    assert set(wrong(report)) == set(EMBEDDED)


@pytest.mark.slow
def test_a_wrong_backward_is_caught_and_placed(checkpoint: Path) -> None:
    report = differentiated(checkpoint, becomes("bert.pooler", OwnTanh))
    assert set(POOLED) <= set(wrong(report))
    assert not {"nsp.weight", "nsp.bias", "mlm.dense.weight", "mlm.bias"} & set(wrong(report))
    assert report.learned is not None
    assert (report.learned.arrives, report.learned.leaves) == ("bert.pooler", "bert.layers.2")


@pytest.mark.slow
def test_what_is_changed_in_place_fails_or_is_wrong(checkpoint: Path) -> None:
    failing = differentiated(checkpoint, becomes("bert.pooler", InPlace), steps=2)
    assert failing.verdict == "different"
    assert "not shown: which weights reach a probe (the port cannot be differentiated: " in " ".join(
        failing.details().split()
    )
    assert failing.learned is not None
    assert failing.learned.failed.startswith("from bert.pooler back: one of the variables needed for gradient")
    assert "the port's backward pass fails from bert.pooler back" in " ".join(failing.details().split())
    quiet = differentiated(checkpoint, becomes("bert.pooler", Quietly))
    assert wrong(quiet) == ["bert.pooler.dense.weight"]


@pytest.mark.slow
def test_a_frozen_parameter_is_named(checkpoint: Path) -> None:
    def freeze(model: BertForPreTraining) -> None:
        model.get_parameter("bert.layers.1.output.weight").requires_grad_(False)

    report = differentiated(checkpoint, freeze, steps=2)
    assert wrong(report) == ["bert.layers.1.output.weight"]
    said = "it is frozen in the port (requires_grad=False) and trains in the reference"
    assert said in " ".join(report.details().split())
    assert report.learned is not None
    assert all(step.differing[1] == ("bert.layers.1.output.weight",) for step in report.learned.steps)


BUFFERS = {
    "openai_gpt": (("positions.table",), ()),
    "bart": (("encoder.positions.table", "decoder.positions.table"), ()),
    "marian": ((), ("encoder.positions.table", "decoder.positions.table")),
}
"""What the reference trains and the port has in a buffer; what is computed on both sides."""


@pytest.mark.slow
@pytest.mark.parametrize("table", BUFFERS)
def test_a_buffer_has_no_gradient_here_which_is_named_and_no_fault(tmp_path: Path, table: str) -> None:
    trained, computed = BUFFERS[table]
    source = make(next(pair for pair in PAIRS if pair.table == table), tmp_path).directory
    report = verify(source, table=table, gradients=True, steps=2, trials=False)
    learned, text = report.learned, " ".join(report.details().split())
    assert report.faithful, text
    assert learned is not None
    assert learned.untrained == trained
    assert (
        tuple(name for gradient in learned.gradients if gradient.buffer and gradient.zero for name in gradient.port)
        == computed
    )
    assert learned.padding == ()  # the padding word takes no gradient on either side
    assert all(set(trained) <= set(steps.fixed) for steps in learned.steps)
    assert ("; training leaves" in text.partition(" float64: ")[0]) == bool(trained)
    assert ("has no gradient here, where it is a buffer; the reference trains it" in text) == bool(trained)
    assert ("no gradient on either side: " in text) == bool(computed)


@pytest.mark.slow
def test_a_padding_row_that_the_port_does_not_have_is_no_difference(tmp_path: Path) -> None:
    """The rows of the position table before the first position belong to nobody, and are cut off."""
    source = make(next(pair for pair in PAIRS if pair.table == "camembert"), tmp_path).directory
    learned = verify(source, table="camembert", gradients=True, trials=False).learned
    assert learned is not None
    assert learned.padding == ()


class Leaky(BertAttention):
    """The key bias is added to the input, less itself: nothing but its own gradient tells."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:  # Any: as attention has it
        return super().forward(hidden + (self.key.bias - self.key.bias.detach()), *args, **kwargs)


@pytest.mark.slow
def test_a_gradient_where_mathematics_has_none_is_caught(checkpoint: Path) -> None:
    report = differentiated(checkpoint, becomes("bert.layers.1.attention", Leaky))
    assert wrong(report) == ["bert.layers.1.attention.key.bias"]
    assert "it is zero in the reference and up to" in " ".join(report.details().split())


@pytest.mark.slow
def test_a_missing_gradient_of_a_bias_is_told_from_a_zero_one(checkpoint: Path) -> None:
    def plant(model: BertForPreTraining) -> None:
        becomes("bert.layers.1.attention.key", NoBias)(model)
        becomes("nsp", NoBias)(model)

    report = differentiated(checkpoint, plant)
    assert "bert.layers.1.attention.key.bias" not in wrong(report)  # it has none, with or without
    assert "nsp.bias" in wrong(report)


class Untied(nn.Module):
    """A BERT whose decoder is a matrix of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        model = load(path)
        assert isinstance(model, BertForPreTraining)
        self.bert, self.mlm, self.nsp = model.bert, model.mlm, model.nsp
        self.decoder = nn.Parameter(self.bert.embeddings.word.weight.detach().clone())

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> object:
        out = self.bert(input_ids, attention_mask, token_type_ids)
        return self.mlm(out.last_hidden_state, self.decoder), self.nsp(out.pooled)


def test_a_forgotten_tie_is_named(checkpoint: Path) -> None:
    """Forward it is faithful, and it would part in the first step of training."""
    (path,) = [one for one in shipped() if one.stem == "bert"]
    text = path.read_text(encoding="utf-8")
    drop = '"cls.predictions.decoder.weight" = "equals bert.embeddings.word_embeddings.weight"'
    rule = '"cls.predictions.decoder.weight" = "decoder"\n[drop]'
    assert drop in text
    table = parse_table(text.replace(drop, "").replace("[drop]", rule))
    report = verify(checkpoint, Untied(checkpoint), table, gradients=True, trials=False)
    assert not report.computes_otherwise
    assert report.verdict == "different"
    assert wrong(report) == ["bert.embeddings.word.weight", "decoder"]
    assert "several in the port: a tie is missing" in " ".join(report.details().split())


@pytest.mark.slow
def test_an_embedding_that_trains_its_padding_word_is_told_and_no_fault(checkpoint: Path) -> None:
    """Padding is masked and its row moves on neither side; where a batch attends to that word, only one side's does."""

    def plant(model: BertForPreTraining) -> None:
        model.bert.embeddings.word.padding_idx = None

    report = differentiated(checkpoint, plant, steps=2)
    assert report.faithful
    assert report.learned is not None
    assert report.learned.padding == ("bert.embeddings.word.weight",)
    assert "padding_idx on one side only, and left out of account here: bert.embeddings.word.weight" in report.details()


@pytest.mark.slow
def test_a_row_without_its_gradient_is_named(checkpoint: Path) -> None:
    def plant(model: BertForPreTraining) -> None:
        model.bert.embeddings.register_forward_hook(
            lambda module, args, output: torch.where((args[0] == 7)[..., None], output.detach(), output)
        )

    report = differentiated(checkpoint, plant)
    assert "bert.embeddings.word.weight: it differs in row 7 only" in " ".join(report.details().split())


@pytest.mark.slow
def test_it_needs_no_working_dtype_and_is_not_done_unasked(checkpoint: Path) -> None:
    assert verify(checkpoint, dtypes=(), trials=False).learned is None
    learned = verify(checkpoint, dtypes=(), gradients=True, trials=False).learned
    assert learned is not None
    assert not learned.differs
    assert len(learned.dropout) > 3
    assert not learned.steps


@pytest.mark.slow
def test_the_users_module_keeps_its_weights_and_flags(checkpoint: Path) -> None:
    model = porting.load(checkpoint)
    model.requires_grad_(False)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    verify(checkpoint, model, loaded=True, gradients=True, steps=2, trials=False)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in model.parameters())

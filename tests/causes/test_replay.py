"""A recorded pass: what is on it, and that it plays again with some of it changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from einops import rearrange
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from porting.causes import alibi, tape
from porting.causes.alibi import linear_biases
from porting.causes.attention import BLOCKS, BY_GROUPS, Projections
from porting.causes.model_parts import ModelParts
from porting.causes.replay import Stage, Values
from porting.causes.tape import Recorder
from porting.suggesting.subjects.twin import draw_parameters
from porting.tracing.activations import StoredTensor
from porting.tracing.attention import WrittenOut
from porting.tracing.float64 import forced_float64


class Small(nn.Module):
    """Two maps with an activation; the second reads the first's result, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, given: Tensor) -> Tensor:
        hidden = F.gelu(self.first(given))
        hidden += 1
        first, two = hidden.chunk(2, -1)
        result: Tensor = self.second(torch.cat([two, first], -1))
        return result


def recorded() -> tuple[Small, Tensor, Recorder]:
    torch.manual_seed(0)
    model, given = Small().double(), torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad(), Recorder(model) as recorder:
        model.first.register_forward_hook(lambda module, args, output: recorder.mark("first", output))
        recorder.mark("last", model(given))
    return model, given, recorder


def tensors(tape_: tape.Tape) -> list[Tensor]:
    return [tape_[ref] for ref in tape_.refs]


def test_every_call_is_there_with_its_module() -> None:
    _, _, recorder = recorded()
    names = [(call.name, call.module) for call in recorder.tape.calls]
    assert names == [
        ("linear", "first"), ("gelu", ""), ("add", ""), ("chunk", ""), ("cat", ""), ("linear", "second"),
    ]  # fmt: skip
    assert set(recorder.tape.weights.values()) == {"first.weight", "first.bias", "second.weight", "second.bias"}


class Mapped(Small):
    """Each head of each row by itself, as `torch.vmap` writes it."""

    def forward(self, given: Tensor) -> Tensor:
        heads = self.first(given).unflatten(-1, (2, 3))
        mixed = torch.vmap(torch.vmap(lambda head: head.softmax(-1) @ head[:, None]))(heads)
        result: Tensor = self.second(mixed.expand(-1, -1, 3).flatten(1))
        return result


def test_a_vmap_is_one_call_that_can_be_made_again() -> None:
    torch.manual_seed(0)
    model, given = Mapped().double(), torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad(), Recorder(model) as recorder:
        recorder.mark("last", model(given))
    tape = recorder.tape
    assert [call.name for call in tape.calls] == ["linear", "unflatten", "vmap", "expand", "flatten", "linear"]
    assert not any(is_functorch_wrapped_tensor(value) for value in tensors(tape))
    doubled = {0: lambda values, call: 2 * tape[call.result]}
    played = Stage(tape, {}).play("last", doubled)
    with torch.no_grad():
        for parameter in model.first.parameters():
            parameter.mul_(2)
        assert played is not None
        assert torch.equal(played, model(given))
    assert torch.vmap(torch.neg)(given).equal(-given)  # as before


def test_what_is_changed_in_place_keeps_both_its_values() -> None:
    _, _, recorder = recorded()
    gelu, added = recorder.tape.calls[1:3]
    assert torch.equal(recorder.tape[gelu.result] + 1, recorder.tape[added.result])


@torch.no_grad()
def test_a_rewritten_call_changes_what_follows() -> None:
    model, given, recorder = recorded()
    stage = Stage(recorder.tape, {})
    relu = {1: lambda values, call: values[call.argument(0, "input")].relu()}
    first, two = (model.first(given).relu() + 1).chunk(2, -1)
    played = stage.play("last", relu)
    assert played is not None
    torch.testing.assert_close(played, model.second(torch.cat([two, first], -1)), rtol=0, atol=0)
    assert stage.play("first", relu) is None


@torch.no_grad()
def test_a_pinned_value_holds_still_and_shows_what_it_would_be() -> None:
    _, _, recorder = recorded()
    stage = Stage(recorder.tape, {"first": recorder.tape.marks["first"]})
    doubled = {0: lambda values, call: values.run(call) * 2}
    assert stage.play("last", doubled) is None
    played = stage.play("first", doubled)
    assert played is not None
    assert torch.equal(played, 2 * recorder.tape[recorder.tape.marks["first"]])


def test_a_replay_leaves_the_tape_as_it_was() -> None:
    _, _, recorder = recorded()
    before = [value.clone() for value in tensors(recorder.tape)]
    with torch.no_grad():
        Stage(recorder.tape, {}).play("last", {0: lambda values, call: values.run(call) * 3})
    assert all(torch.equal(*pair) for pair in zip(before, tensors(recorder.tape), strict=True))


@pytest.mark.parametrize(("function", "name"), [(F.gelu, "exact GELU"), (F.silu, "SiLU"), (torch.tanh, "tanh")])
def test_an_activation_is_known_by_what_it_computes(function: object, name: str) -> None:
    class Written(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            doubled = function(value) * 2  # type: ignore[operator]  # one of the three
            result: Tensor = doubled / 2
            return result

    model = nn.Sequential(nn.Linear(4, 8), Written()).double()
    given = torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad(), Recorder(model) as recorder:
        model(given)
    (found,) = ModelParts(recorder.tape, {}).activations
    assert found.name == name
    assert found.call.name in ("div", "__truediv__")


def test_a_value_that_is_marked_under_two_names_stands_still_for_the_second() -> None:
    """A model that returns what its last layer gives: what is changed in the layer is changed there, not behind it."""
    model, given, _ = recorded()
    with torch.no_grad(), Recorder(model) as again:
        value = model(given)
        again.mark("last", value)
        again.mark("root", value)
    tape = again.tape
    stage = Stage(tape, dict(tape.marks))
    number = next(call.number for call in reversed(tape.calls) if call.name == "linear")
    rewrites = {number: lambda values, call: values.run(call) * 2}
    assert stage.play("last", rewrites) is not None
    assert stage.play("root", rewrites) is None


def test_a_tape_in_a_file_plays_as_one_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, usual = recorded()
    monkeypatch.setattr(tape, "HELD", 0)
    monkeypatch.setattr(tape, "SMALL", 0)
    _, _, stored = recorded()
    assert any(isinstance(value, StoredTensor) for value in stored.tape.values)
    assert [call.name for call in stored.tape.calls] == [call.name for call in usual.tape.calls]
    stored_reads, usual_reads = (
        [[ref.number for ref in call.reads] for call in one.tape.calls] for one in (stored, usual)
    )
    assert stored_reads == usual_reads
    for ref, other in zip(stored.tape.refs, usual.tape.refs, strict=True):
        assert torch.equal(stored.tape[ref], usual.tape[other])
    doubled = {1: lambda values, call: 2 * values.run(call)}
    played = [Stage(one.tape, {}).play("last", doubled) for one in (usual, stored)]
    assert played[0] is not None
    assert played[1] is not None
    assert torch.equal(played[0], played[1])
    assert not torch.equal(played[0], model(given))


def tape_of(model: transformers.PreTrainedModel) -> ModelParts:
    """What is recognised in a pass on two rows, one of them padded."""
    draw_parameters(model, 0)
    ids, mask = torch.arange(2, 16).view(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0
    model.train(mode=False)
    with torch.no_grad(), forced_float64(model), Recorder(model) as recorder, WrittenOut():
        model(input_ids=ids, attention_mask=mask)
    return ModelParts(recorder.tape, {})


def test_the_slopes_of_linear_biases_do_not_depend_on_how_positions_are_counted() -> None:
    slopes, places = torch.tensor([0.5, 0.25]), torch.tensor([[0.0, 0.0, 1.0, 0.0, 2.0]])
    attention = SimpleNamespace(heads=2)
    bias = slopes[None, :, None, None] * places[:, None, None, :]
    found = alibi._slopes(bias, attention)  # type: ignore[arg-type]  # no more of it is read
    assert found is not None
    torch.testing.assert_close(found, slopes.double())
    assert alibi._slopes(bias + torch.rand(5), attention) is None  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        ("those of n heads, then the first ones of 2 n", [2, 4, 6, 8, 1, 2]),
        ("those of n heads, then every second one of 2 n", [2, 4, 6, 8, 1, 3]),
        ("every second one of 2 n heads, then those of n", [2, 4, 6, 8, 1, 3]),
    ],
)
def test_slopes_of_more_heads_than_a_power_of_two(count: str, expected: list[int]) -> None:
    found = alibi._of_two_counts(torch.ones(6), between=alibi._BETWEEN[count])
    torch.testing.assert_close(found, 2.0 ** -torch.tensor(expected, dtype=found.dtype))


def test_linear_biases_are_found_where_heads_are_joined_with_the_batch_and_rows_are_padded() -> None:
    config = transformers.BloomConfig(vocab_size=17, hidden_size=24, n_layer=1, n_head=6)
    (found,) = linear_biases(tape_of(transformers.BloomModel(config)))
    expected = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]  # of four heads, and every other one of eight
    torch.testing.assert_close(found.slopes, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("kind", "fields", "order"),
    [
        ("GPTNeoX", {"num_attention_heads": 3}, "(h p d)"),
        ("GPT2", {"n_head": 3}, "(p h d)"),
        ("Bloom", {"n_head": 3}, "(h p d)"),
        ("Phi3", {"num_attention_heads": 6, "num_key_value_heads": 3, "pad_token_id": 0}, BLOCKS),
        ("Falcon", {"num_attention_heads": 6, "num_kv_heads": 2, "new_decoder_architecture": True}, BY_GROUPS),
        ("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, BLOCKS),
        ("Bert", {"num_attention_heads": 3}, "(p h d)"),
    ],
)
def test_how_a_fused_projection_lies_and_its_heads_written_back(kind: str, fields: dict[str, Any], order: str) -> None:
    config = getattr(transformers, f"{kind}Config")(vocab_size=17, hidden_size=24, num_hidden_layers=1, **fields)
    parts = tape_of(getattr(transformers, f"{kind}Model")(config))
    (attention,) = parts.attentions
    found = Projections.of(attention)
    assert found is not None
    assert found.order == order
    values = Values(parts.tape)
    heads = found.split(values)
    again = found.read(found.fused(heads), order)
    assert all(torch.equal(one, other) for one, other in zip(heads, again, strict=True))
    size = found.attention.size
    fused = torch.cat([parts.tape[one.call.result].reshape(2, 7, -1) for one in attention.linears], -1)
    if order in ("(h p d)", "(p h d)"):  # einops says the same
        query, _, value = rearrange(fused, f"b s {order} -> p b h s d", p=3, d=size)
        torch.testing.assert_close(heads[0], query)
        torch.testing.assert_close(heads[2], value)

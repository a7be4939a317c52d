"""A handwritten Llama with a mistake in it: suggest says by what it differs, and whether weights could take it away."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from porting.suggesting import Verdict, suggest
from tests.suggesting import llama
from tests.suggesting.oracle import source

SCORES = "(query @ key.transpose(-1, -2) * self.size**-0.5)"
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
}  # fmt: skip
NO_GATE = {"F.silu(gate) * up": "F.silu(gate)", "(self.w1(x), self.w3(x))": "(self.w1(x), None)"}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fields", "changes", "verdict", "said"),
    [
        ({}, {"self.weight = eps,": "self.weight = 1e-6,"}, Verdict.APPROXIMATE, "RMSNorm eps (eps is 1e-06 where"),
        ({}, {SCORES: f"(50 * ({SCORES} / 50).tanh())"}, Verdict.APPROXIMATE, "scores are capped at 50 where"),
        (LINEAR, {}, Verdict.IMPOSSIBLE, "rotary scaling missing (the reference divides all angles by 4)"),
        ({}, {"scores.softmax(-1)": "scores.sigmoid()"}, Verdict.IMPOSSIBLE, "another function (sigmoid, where"),
        ({}, NO_GATE, Verdict.IMPOSSIBLE, "your module has no model.layers.1.mlp.gate"),
        (LLAMA3, {}, Verdict.IMPOSSIBLE, "rotary scaling missing (the reference divides the slow angles by 8)"),
    ],
)
def test_what_it_does_otherwise_is_named(
    tmp_path: Path, fields: Mapping[str, object], changes: Mapping[str, str], verdict: Verdict, said: str
) -> None:
    source("LlamaForCausalLM", {**llama.FIELDS, **fields}, tmp_path)
    found = suggest(tmp_path, edited(changes).builder())
    assert found.verdict is verdict, str(found)
    assert said in found.reasons[0].said


KEPT = 'self.get_buffer("{}")[:length, None]'
ANGLES = {
    "torch.arange(0, size, 2).float()": "torch.arange(0, size, 2).double()",
    "torch.arange(length).float()": "torch.arange(length).double()",
    **{KEPT.format(one): f"{KEPT.format(one)}.to(self.norm.weight)" for one in ("cos", "sin")},
}


@pytest.mark.slow
@pytest.mark.parametrize(("base", "verdict"), [(1.0, Verdict.EXACT), (1.0001, Verdict.APPROXIMATE)])
def test_angles_that_are_made_in_float64_are_no_difference(tmp_path: Path, base: float, verdict: Verdict) -> None:
    """The reference makes its own in float32; another base is as small a difference, and is one."""
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited({**ANGLES, "1.0 / base **": f"1.0 / (base * {base}) **"}).builder())
    assert found.verdict is verdict, str(found)


def edited(changes: Mapping[str, str]) -> ModuleType:
    """The file of the Llama with other code in places."""
    text = Path(llama.__file__ or "").read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    module = ModuleType("edited_llama")
    sys.modules[module.__name__] = module
    exec(compile(text, module.__name__, "exec"), module.__dict__)  # noqa: S102  # it is our own file
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "lie", "said"),
    [
        (".logical_or(torch.tensor(True))", "apart", "causal mask missing"),
        (".logical_or(torch.tensor(True))", "groups", "causal mask missing"),
        (".tril().triu(-2)", "apart", "local window that should not be there"),
        (".tril(1)", "blocks", "causal mask"),
    ],
)
def test_scores_show_query_and_key_whatever_the_mask_is(tmp_path: Path, mask: str, lie: str, said: str) -> None:
    """Rotary pairs lie otherwise, which attention alone shows, and attention has a mistake in its mask."""
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited({".tril()": mask}).builder(rotate="neighbours", lie=lie))
    assert said in " ".join(found.details()), str(found)
    assert found.verdict is Verdict.IMPOSSIBLE
    assert 's = "2"' in found.text  # the two of a rotary pair


PAIRS = """one, other = x[..., 0::2], x[..., 1::2]
    return torch.stack([one * cos - other * sin, one * sin + other * cos], -1).flatten(-2)"""
OTHER_ANGLES = """cos, sin = (torch.cat([one, one], -1) for one in (cos, sin))
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin"""


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["apart", "blocks"])
def test_a_cause_is_looked_for_with_weights_in_the_stored_order_too(tmp_path: Path, lie: str) -> None:
    """Rotary pairs come nearest with reordered weights, which no entry of the catalogue explains, as none is right."""
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited({PAIRS: OTHER_ANGLES}).builder(rotate="neighbours", lie=lie))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert found.reasons[0].said.startswith("rotary angles of the other pairing (pairs of neighbours")


OUT = "self.wo = nn.Linear(dim, dim, bias=False)"
ADAPTED = "out: Tensor = self.wo((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))"


@pytest.mark.slow
@pytest.mark.parametrize(("uses", "verdict"), [("", Verdict.EXACT), (" + self.more(x)", Verdict.NOT_FOUND)])
def test_parameters_that_nothing_uses_are_no_part_of_the_verdict(tmp_path: Path, uses: str, verdict: Verdict) -> None:
    """An adapter is merged or left out in eval mode; the module computes the checkpoint's model without it."""
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    changes = {OUT: f"{OUT}; self.more = nn.Linear(dim, dim)", ADAPTED: ADAPTED + uses}
    found = suggest(tmp_path, edited(changes).builder())
    assert found.verdict is verdict, str(found)
    assert ("which never run" in " ".join(found.details())) == (not uses)


CALL = "def forward(self, tokens: Tensor) -> Tensor:\n        length = tokens.shape[1]\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({".tril()": ".tril(int(length == 2))"}, Verdict.SOME_INPUTS, "the output differs on length 2"),
        (
            {CALL: f"{CALL}        assert length == 16, 'expected 16 tokens'\n"},
            Verdict.EXACT,
            "rows of any other length",
        ),
        (
            {CALL: "def forward(self, *args: Tensor) -> Tensor:\n        tokens, length = args[0], args[0].shape[1]\n"},
            Verdict.EXACT,
            '"input_ids" = "0"',
        ),
    ],
)
def test_what_it_takes_is_found_out(tmp_path: Path, changes: Mapping[str, str], verdict: Verdict, said: str) -> None:
    source("LlamaForCausalLM", llama.FIELDS, tmp_path)
    found = suggest(tmp_path, edited(changes).builder())
    assert found.verdict is verdict, str(found)
    assert said in f"{found}{found.text}"

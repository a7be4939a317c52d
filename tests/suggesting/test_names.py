"""Where the search cannot follow, names tell what is due, and the run whether they are right."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import porting
from porting.suggesting import Verdict, suggest
from porting.suggesting.search.activation_matching import same_places
from porting.suggesting.search.embedding_candidates import candidates
from porting.suggesting.search.layer_repeats import in_every_layer
from porting.suggesting.search.layouts import CandidateRule, RuleTerm
from porting.suggesting.search.name_similarity import namesakes
from porting.suggesting.subjects.operation_trace import OperationTrace, Unit, WeightUse
from porting.suggesting.subjects.twin import draw_parameters
from tests.suggesting.llama import FIELDS, Attention, Block, Feed, Llama
from tests.suggesting.oracle import source

MAMBA = {
    "vocab_size": 112, "hidden_size": 48, "num_hidden_layers": 3, "expand": 2, "head_dim": 16, "num_heads": 6,
    "n_groups": 1, "state_size": 12, "chunk_size": 8,
}  # fmt: skip


def test_a_name_with_something_in_front_comes_before_one_that_is_alike() -> None:
    theirs = {"h.0.query.weight": (2, 2), "h.0.key.weight": (2, 2), "final.weight": (2,), "first.weight": (2,)}
    ours = {"net.h.0.key.weight": (2, 2), "net.h.0.q.weight": (2, 2), "net.final.weight": (2,), "net.odd.weight": (3,)}
    assert next(namesakes(ours, theirs)) == {
        "net.h.0.key.weight": "h.0.key.weight",
        "net.h.0.q.weight": "h.0.query.weight",
        "net.final.weight": "final.weight",
    }


class Functions(nn.Module):
    """A BERT of functions over one flat dictionary of parameters, whose names a template makes."""

    template = "{}"

    def __init__(self, width: int, heads: int, vocab_size: int, positions: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        held = {
            "words": (vocab_size, width), "places": (positions, width), "sides": (2, width), "emb/g": (width,),
            "emb/b": (width,),
        }  # fmt: skip
        for layer in range(2):
            for part in ("q", "k", "v", "o"):
                held |= {f"{layer}/att,w{part}": (width, width), f"{layer}/att,b{part}": (width,)}
            held |= {f"{layer}/in": (width, inner), f"{layer}/in_b": (inner,)}
            held |= {f"{layer}/out": (inner, width), f"{layer}/out_b": (width,)}
            held |= {f"{layer}/n{number}/{kind}": (width,) for number in (1, 2) for kind in "gb"}
        self.bag = nn.ParameterDict({
            self.template.format(name): nn.Parameter(torch.randn(shape) * 0.1) for name, shape in held.items()
        })  # fmt: skip

    def forward(self, input_ids: Tensor) -> Tensor:
        def get(name: str) -> Tensor:
            found: Tensor = self.bag[self.template.format(name)]
            return found

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, x.shape[-1:], get(f"{name}/g"), get(f"{name}/b"), 1e-12)

        x = get("words")[input_ids] + get("places")[: input_ids.shape[1]] + get("sides")[torch.zeros_like(input_ids)]
        x = norm(x, "emb")
        for layer in range(2):
            q, k, v = (
                (x @ get(f"{layer}/att,w{part}") + get(f"{layer}/att,b{part}"))
                .view(*x.shape[:2], self.heads, -1)
                .transpose(1, 2)
                for part in "qkv"
            )
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = norm(x + mixed @ get(f"{layer}/att,wo") + get(f"{layer}/att,bo"), f"{layer}/n1")
            up = F.gelu(x @ get(f"{layer}/in") + get(f"{layer}/in_b"))
            x = norm(x + up @ get(f"{layer}/out") + get(f"{layer}/out_b"), f"{layer}/n2")
        return x


TEMPLATES = [
    "{}",
    " {} ",
    "{}, a: {{i}}/{{p:q,k}} = [o e] -> 1 *#'\"`\\",
    "\u00e9\u3000\u202e\t\n{}{{0x20}}{{*rest}}",
    "7,{}->7",
    "[{}]",
]  # fmt: skip


def bag(template: str) -> type[nn.Module]:
    return type("Bag", (Functions,), {"template": template})


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_name_may_have_every_character_that_torch_allows(template: str, tmp_path: Path) -> None:
    fields = {
        "vocab_size": 100, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 64,
    }  # fmt: skip
    folder = tmp_path / "bert"
    source("BertModel", fields, folder)
    found = suggest(folder, bag(template))
    assert found.verdict is Verdict.TRUNK, str(found)
    table = found.write(tmp_path / "mine.toml")
    loaded = porting.load(folder, into=bag(template), table=table)
    assert not any(one.is_meta for one in loaded.state_dict().values())
    porting.export(loaded, table, tmp_path / "back", like=folder)
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in after)


def test_the_orders_of_many_tensors_of_one_shape_are_not_all_held() -> None:
    letters = "abcdefghijklm"  # 13! orders would need a terabyte
    ours, theirs = ({f"{side}.{letter}.weight": (2, 2) for letter in letters} for side in ("net", "model"))
    two = list(islice(namesakes(ours, theirs), 2))
    assert two[0] == {f"net.{letter}.weight": f"model.{letter}.weight" for letter in letters}
    assert two[1] != two[0]
    assert set(two[1].values()) == set(theirs)


def test_what_is_known_of_a_layer_holds_in_every_layer() -> None:
    one = CandidateRule(
        (RuleTerm("h.0.{p:q,k}.weight", ("h.0.q.weight", "h.0.k.weight"), "(h d) e"),),
        (RuleTerm("layers.0.qk.weight", ("layers.0.qk.weight",), "(p (d h)) e"),),
    )
    theirs = [f"h.{layer}.{part}.weight" for layer in range(3) for part in "qk"]
    (other,) = in_every_layer([one], theirs, ["layers.0.qk.weight", "layers.2.qk.weight", "layers.7.qk.weight"])
    assert other.reads == ("h.2.q.weight", "h.2.k.weight")
    assert other.targets[0].term == "layers.2.qk.weight [(p (d h)) e]"
    assert other.sources[0].pattern == "h.2.{p:q,k}.weight"


def test_what_is_of_one_shape_and_behind_the_same_is_due_in_order() -> None:
    def unit(number: int, names: tuple[str, ...], behind: tuple[int, ...]) -> Unit:
        kind, output = WeightUse.LINEAR, torch.zeros(1)
        return Unit(kind=kind, weights=names, number=number, output=output, scope="", behind=frozenset(behind))

    shapes = {"conv": (4, 2), "norm": (4,), "shortcut": (4, 3), "other norm": (4,), "head": (5, 4)}
    forth = [
        unit(0, ("conv",), ()),
        unit(1, ("norm",), (0,)),
        unit(2, ("shortcut",), ()),
        unit(3, ("other norm",), (2,)),
        unit(4, ("head",), (1, 3)),
    ]
    back = [
        unit(0, ("shortcut",), ()),
        unit(1, ("other norm",), (0,)),
        unit(2, ("conv",), ()),
        unit(3, ("norm",), (2,)),
        unit(4, ("head",), (1, 3)),
    ]
    port, reference = OperationTrace(units=forth), OperationTrace(units=back)
    assert same_places(port, reference, shapes, shapes) == {name: name for name in shapes}
    assert "head" not in same_places(port, reference, shapes, {**shapes, "head": (6, 4)})


def test_a_deep_stack_of_convolutions_does_not_amplify() -> None:
    layers = [nn.Conv2d(64, 64, 1, bias=False) for _ in range(20)]
    stack = nn.Sequential(*layers)
    draw_parameters(stack, 0)
    with torch.no_grad():
        size = float(stack(torch.randn(2, 64, 3, 3)).std())
    assert 0.1 < size < 10


class Experts(nn.Module):
    """Each row is given to the two experts that its gate likes best."""

    def __init__(self, dim: int, inner: int, count: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(Feed(dim, inner, "apart") for _ in range(count))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        best, which = self.router(rows).softmax(-1).topk(self.chosen)
        share = best / best.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(which == number)
            out[row] += share[row, place, None] * expert(rows[row])
        return out.view_as(x)


def mixture(config: Any) -> nn.Module:
    """A mixture of experts whose rotary pairs are neighbours."""
    dim, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    blocks = []
    for _ in range(config.num_hidden_layers):
        attention = Attention(dim, heads, groups, lie="apart", rotate="neighbours", bias=False)
        experts = Experts(dim, config.intermediate_size, config.num_local_experts, config.num_experts_per_tok)
        blocks.append(Block(dim, attention, experts, config.rms_norm_eps))
    return Llama(blocks, config.vocab_size, dim, dim // heads, 64, config.rms_norm_eps, 1e6)


@pytest.mark.slow
def test_the_experts_of_a_mixture_are_called_alike(tmp_path: Path) -> None:
    fields = {**FIELDS, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    source("MixtralForCausalLM", {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, tmp_path)
    found = suggest(tmp_path, mixture)
    assert found.verdict in {Verdict.EXACT, Verdict.APPROXIMATE}, str(found)
    assert "q_proj.weight [(h s r) e]" in found.text
    assert ".experts.{j}.w1.weight" in found.text


class Wrapped(nn.Module):
    """A model whose weights are used in ways that a search cannot follow, called as the checkpoint's are."""

    def __init__(self, config: Any) -> None:  # it reads what it needs
        super().__init__()
        names = MAMBA
        self.net = transformers.Mamba2Model(
            transformers.Mamba2Config(**{name: getattr(config, name) for name in names})
        )

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.net(ids).last_hidden_state
        return found


@pytest.mark.slow
def test_what_a_search_cannot_follow_may_be_called_alike(tmp_path: Path) -> None:
    source("Mamba2Model", MAMBA, tmp_path)
    found = suggest(tmp_path, Wrapped)
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"layers.{i}.mixer.D" = "net.layers.{i}.mixer.D"' in found.text


def test_what_batch_norms_count_goes_to_what_they_count() -> None:
    parts = ("weight", "bias", "running_mean", "running_var")

    def tables(stem: str) -> list[Unit]:
        return [
            Unit(kind=WeightUse.TABLE, weights=(f"{stem}.{part}",), number=number, output=torch.zeros(1), scope="")
            for number, part in enumerate(parts)
        ]

    ours, theirs = tables("bn"), tables("normalization")
    shapes = {unit.names[0]: (16,) for unit in (*ours, *theirs)}
    found = [
        {move.writes[0]: move.reads[0] for move in moves} for moves in candidates(ours, theirs, shapes, shapes, ())
    ]
    assert len(found) == 2  # gain and shift may be each other's
    for one in found:
        assert one["bn.running_mean"] == "normalization.running_mean"
        assert one["bn.running_var"] == "normalization.running_var"
    named = [Unit(kind=WeightUse.TABLE, weights=(name,), number=0, output=torch.zeros(1), scope="") for name in "abcd"]
    others = {**shapes, **dict.fromkeys("abcd", (16,))}
    assert len(list(candidates(named, theirs, others, shapes, ()))) == 24  # a module that calls them otherwise

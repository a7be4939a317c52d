"""A key's bias moves all scores of a query by the same number: softmax cannot see it, unless the keys are rotated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from porting.suggesting import Verdict, suggest
from porting.suggesting.subjects.twin import draw_parameters
from tests.suggesting.llama import FIELDS, Block, Llama, builder
from tests.suggesting.oracle import drafted
from tests.suggesting.test_pictures import Layer, Pictures, written


class Apart(Layer):
    """Query, key and value by themselves, the key with a bias or without."""

    biased = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.fused, self.offset
        e = config.hidden_size
        self.query, self.key, self.value = nn.Linear(e, e), nn.Linear(e, e, bias=self.biased), nn.Linear(e, e)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.query(x), self.key(x), self.value(x)


class Biased(Apart):
    biased = True


class Joint(Layer):
    """One matrix; its bias is put together from two, with zeros between them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.offset
        e = config.hidden_size
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(e)) for _ in range(2))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        offset = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        return F.linear(x, self.fused, offset).chunk(3, -1)


class NoValueBias(Apart):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=False)


class Trunk(Pictures):
    """Without a head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.heads

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.end(self.seen(images))
        return found


def of(layer: type[Layer]) -> type[nn.Module]:
    return type("Seen", (Trunk,), {"kind": layer})


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("vit"), "ViTModel", layer_norm_eps=1e-6)


@pytest.fixture(scope="module")
def beit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose keys have no bias."""
    more = {"use_absolute_position_embeddings": True, "layer_scale_init_value": 0.0, "use_mean_pooling": False}
    return written(tmp_path_factory.mktemp("beit"), "BeitModel", **more)


def test_the_draft_leaves_out_what_softmax_cannot_see(vit: Path, beit: Path) -> None:
    left_out = drafted(vit, of(Apart)).text
    assert '"encoder.layer.{i}.attention.attention.key.bias" = "softmax cannot see it: ' in left_out
    fused = drafted(beit, of(Layer)).text
    assert 'target = "layers.{i}.offset [(a|_b|f)]"' in fused
    assert "[[rule]]  # softmax cannot see a key's bias" in fused


@pytest.mark.slow
def test_a_key_bias_that_the_module_lacks_is_left_out(vit: Path) -> None:
    found = suggest(vit, of(Apart))
    assert found.verdict is Verdict.TRUNK, str(found)
    assert found.missing == ("pooler",)
    reason = "softmax cannot see it: it moves all scores of a query by the same number"
    assert f'"encoder.layer.{{i}}.attention.attention.key.bias" = "{reason}"' in found.text


@pytest.mark.slow
def test_a_key_bias_that_the_checkpoint_lacks_is_zeros(beit: Path) -> None:
    found = suggest(beit, of(Biased))
    assert found.verdict is Verdict.EXACT, str(found)
    assert '"layers.{i}.key.bias" = "zeros"' in found.text.partition("[make]")[2]


@pytest.mark.slow
def test_in_a_fused_bias_the_key_s_part_is_zeros(beit: Path) -> None:
    found = suggest(beit, of(Layer))
    assert found.verdict is Verdict.EXACT, str(found)
    assert 'target = "layers.{i}.offset [(a|_b|f)]"' in found.text
    assert "[[rule]]  # softmax cannot see a key's bias" in found.text


@pytest.mark.slow
def test_a_bias_that_is_put_together_is_taken_apart(beit: Path) -> None:
    found = suggest(beit, of(Joint))
    assert found.verdict is Verdict.EXACT, str(found)
    assert "layers.{i}.{p:q,v}_bias" in found.text


@pytest.mark.slow
def test_any_other_bias_is_seen(vit: Path) -> None:
    found = suggest(vit, of(NoValueBias))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert "layers.0.value.weight has no bias, and the checkpoint's encoder.layer.0.attention.attention.value" in str(
        found
    )
    assert "key.bias" not in " ".join(reason.said for reason in found.reasons)


class Rotated(Llama):
    """The keys have no bias."""

    def __init__(self, blocks: list[Block], *rest: Any) -> None:
        super().__init__(blocks, *rest)
        for block in blocks:
            block.attention.wk.register_parameter("bias", None)


@pytest.mark.slow
def test_of_rotated_keys_a_bias_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**FIELDS))  # type: ignore[arg-type]
    draw_parameters(model, 0)
    model.save_pretrained(tmp_path)
    found = suggest(tmp_path, builder(bias=True, kind=Rotated))
    assert found.verdict is Verdict.IMPOSSIBLE, str(found)
    assert "layers.0.attention.wk.weight has no bias, and the checkpoint's model.layers.0.self_attn.k_proj" in str(
        found
    )


class Conv1D(nn.Module):
    """GPT-2's layer with its query, key and value apart, the key without a bias."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        e, self.heads = config.n_embd, config.n_head
        self.n1, self.n2 = nn.LayerNorm(e), nn.LayerNorm(e)
        self.query, self.key, self.value = nn.Linear(e, e), nn.Linear(e, e, bias=False), nn.Linear(e, e)
        self.out, self.up, self.down = nn.Linear(e, e), nn.Linear(e, 4 * e), nn.Linear(4 * e, e)

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        q, k, v = (
            one.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for one in (self.query(y), self.key(y), self.value(y))
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.n2(x)), approximate="tanh"))
        return found


class Gpt(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Embedding(config.n_positions, config.n_embd)
        self.layers = nn.ModuleList(Conv1D(config) for _ in range(config.n_layer))
        self.end = nn.LayerNorm(config.n_embd)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.end(x)
        return found


@pytest.mark.slow
def test_of_a_fused_bias_the_key_s_part_is_left_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fields = {"vocab_size": 113, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40}
    model: Any = transformers.GPT2Model(transformers.GPT2Config(**fields))  # type: ignore[arg-type]
    draw_parameters(model, 0)
    model.save_pretrained(tmp_path)
    found = suggest(tmp_path, Gpt)
    assert found.verdict is Verdict.EXACT, str(found)
    assert 'source = "h.{i}.attn.c_attn.bias [(a|_b|f)]"' in found.text
    assert "[[rule]]  # softmax cannot see a key's bias" in found.text

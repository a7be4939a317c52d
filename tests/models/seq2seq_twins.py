"""A BART of transformers and our encoder-decoder with the same weights, carried over name for name."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from porting.models.seq2seq import Seq2Seq, Seq2SeqConfig

WORDS, PAD, END, START = 29, 1, 2, 3

SIZES: dict[str, int] = {
    "vocab_size": WORDS,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 28,
    "max_position_embeddings": 19,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": END,
    "decoder_start_token_id": START,
}

# transformers' spelling -> ours; the table engine is not asked, so that neither can hide the other's mistake.
RENAMED = (
    (r"^model\.", ""),
    (r"^shared", "embedding"),
    (r"layernorm_embedding", "positions.norm"),
    (r"embed_positions.weight", "positions.table"),
    (r"self_attn_layer_norm", "attention_norm"),
    (r"encoder_attn_layer_norm", "cross_attention_norm"),
    (r"final_layer_norm", "feed_forward_norm"),
    (r"self_attn\.", "attention."),
    (r"encoder_attn\.", "cross_attention."),
    (r"q_proj", "query"),
    (r"k_proj", "key"),
    (r"v_proj", "value"),
    (r"out_proj", "output"),
    (r"fc1", "feed_forward.intermediate"),
    (r"fc2", "feed_forward.output"),
    (r"final_logits_bias", "projection.bias"),
)


class Twins(NamedTuple):
    """One function, written twice."""

    theirs: transformers.BartForConditionalGeneration
    ours: Seq2Seq


def twins(*, seed: int = 0, places: float = 1.0, end: float = 0.0, **changes: Any) -> Twins:
    """Both with the same weights, drawn at realistic scale, float64, in evaluation mode.

    Args:
        seed: of the weights.
        places: how much the positions count: with much, the model does not repeat itself.
        end: is added to the logit of the end token, so that sequences end.
        changes: fields of transformers' config that differ.
    """
    config = transformers.BartConfig(**{**SIZES, "activation_function": "gelu", "scale_embedding": True, **changes})
    make: Any = transformers.BartForConditionalGeneration._from_config  # it has no types
    theirs = make(config, attn_implementation="eager")
    theirs.to(torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            gain = tensor.ndim == 1 and name.endswith("weight")
            noise = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
            tensor.copy_((1.0 if gain else 0.0) + (places if "embed_positions" in name else 1.0) * 0.25 * noise)
        theirs.get_buffer("final_logits_bias")[0, END] += end
    ours = Seq2Seq(
        config=Seq2SeqConfig(
            vocab_size=WORDS,
            hidden_size=24,
            num_encoder_layers=2,
            num_decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=2,
            encoder_intermediate_size=40,
            decoder_intermediate_size=28,
            hidden_act="gelu",
            max_position_embeddings=19,
            scale_embeddings=bool(config.scale_embedding),
            embedding_norm=True,
            pad_token_id=PAD,
            decoder_start_token_id=START,
            eos_token_id=END,
        )
    )
    ours.to(torch.float64).eval()
    ours.load_state_dict(_renamed(theirs.state_dict()), strict=True)
    return Twins(theirs, ours)


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        for theirs, ours in RENAMED:
            name = re.sub(theirs, ours, name)  # noqa: PLW2901  # one spelling after the other
        if "embed_tokens" in name or "lm_head" in name:
            continue  # the shared embedding again
        if name.endswith("positions.table"):
            tensor = tensor[2:]  # noqa: PLW2901  # the first two rows are nobody's position
        found[name] = tensor.reshape(-1) if name == "projection.bias" else tensor
    return found


def source() -> dict[str, Any]:  # Any: to be spread over arguments of other types as well
    """Ids [4 19] and their mask: rows of 19, 12, 5 and 1 tokens."""
    ids = torch.randint(4, WORDS, (4, 19), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(19) < torch.tensor([[19], [12], [5], [1]])).long()
    return {"input_ids": torch.where(mask.bool(), ids, PAD), "attention_mask": mask}


def target() -> dict[str, Any]:  # Any: to be spread over arguments of other types as well
    """Ids [4 11] after the start token, and their mask: rows of 2, 11, 7 and 4 tokens."""
    ids = torch.randint(4, WORDS, (4, 11), generator=torch.Generator().manual_seed(2))
    ids[:, 0] = START
    mask = (torch.arange(11) < torch.tensor([[2], [11], [7], [4]])).long()
    return {"decoder_input_ids": torch.where(mask.bool(), ids, PAD), "decoder_attention_mask": mask}

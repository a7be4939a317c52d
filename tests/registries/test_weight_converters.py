"""A table as transformers' list: transformers loads through it what the table makes, and saves what it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import conversion_mapping

import porting
from porting.notation.faults import TableError
from porting.notation.table import parse_table
from porting.registries.weight_converters import as_weight_converters
from porting.tables import find_table

TABLE = """
[tensors]
"wte.weight" = "model.embed_tokens.weight"
"h.{i}.attn.qkv.weight [e (p o)]" = "model.layers.{i}.self_attn.{p:q,k,v}_proj.weight [o e]"
"h.{i}.attn.out.weight [a o]" = "model.layers.{i}.self_attn.o_proj.weight [o a]"
"h.{i}.mlp.{p:gate,up,down}.weight" = "model.layers.{i}.mlp.{p:gate,up,down}_proj.weight"
"h.{i}.ln_{p:1,2}.weight" = "model.layers.{i}.{p:input,post_attention}_layernorm.weight"
"ln_f.weight" = "model.norm.weight"
"head.weight" = "lm_head.weight"
"""

CONFIG = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def conversions(text: str) -> list[Any]:
    """The list that the source makes."""
    found: dict[str, Any] = {}
    exec(as_weight_converters(parse_table(text)), found)  # noqa: S102  # what was just written
    made: list[Any] = found["conversions"]
    return made


def test_transformers_loads_and_saves_through_the_list(tmp_path: Path) -> None:
    """A small Llama in the layout of somebody else's file, which transformers itself has no entry for."""
    torch.manual_seed(0)
    family: Any = transformers
    model = family.LlamaForCausalLM(family.LlamaConfig(**CONFIG, tie_word_embeddings=False))
    model.save_pretrained(tmp_path / "theirs")
    theirs = porting.convert(tmp_path / "theirs", tmp_path / "own", parse_table(TABLE), reverse=True)
    known: Any = conversion_mapping
    assert known.get_checkpoint_conversion_mapping("llama") is None
    known.register_checkpoint_conversion_mapping("llama", conversions(TABLE))
    try:
        loaded, info = family.LlamaForCausalLM.from_pretrained(theirs.path, output_loading_info=True)
        loaded.save_pretrained(tmp_path / "saved")
    finally:
        del known._checkpoint_conversion_mapping_cache["llama"]
    assert not any(info[one] for one in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, one in model.state_dict().items():
        assert torch.equal(one, loaded.state_dict()[name]), name
    saved, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", theirs.path))
    assert saved.keys() == before.keys()
    assert all(torch.equal(one, before[name]) for name, one in saved.items())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('"e.{i}.x.{n}.w [f e]" = "m.{i}.w [n f e]"', "MergeModulelist(dim=0)"),
        ('"a.w [x y z]" = "b.w [z x y]"', "Transpose(dim0=0, dim1=1), Transpose(dim0=0, dim1=2)"),
        ('"a.{p:q,k}.w [o e]" = "b.w [(p o) e]"', "Concatenate(dim=0)"),
        ('[sizes]\ns = 2\n[tensors]\n"a.w [(f s) e]" = "b.w [(s f) e]"', "Interleave(dim=0, inverse=False)"),
        (
            '[sizes]\ns = 2\nh = "num_attention_heads"\n[tensors]\n"a.w [(h d s) e]" = "b.w [(h s d) e]"',
            "PermuteForRope(inverse=False)",
        ),
        (
            '[[rule]]\nsource = ["e.{i}.x.{n}.w1 [f e]", "e.{i}.x.{n}.w3 [u e]"]\ntarget = "e.{i}.gu [n (f|u) e]"',
            "MergeModulelist(dim=0), Concatenate(dim=1)",
        ),
        ('"h.{i}.norm.{*rest}" = "h.{i}.norm.{*rest}"', "conversions = [\n]"),
    ],
)
def test_operations_are_found(text: str, wanted: str) -> None:
    assert wanted in as_weight_converters(parse_table(text if text.startswith("[") else f"[tensors]\n{text}"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[rule]]\nsource = "a"\ntarget = "b"\nscale = 2', "'a = b' cannot be said as transformers' list: operations"),
        ('[[rule]]\nsource = "a [(_2|t) e]"\ntarget = "b [t e]"\nfill = 0.0', "no operation leaves elements out"),
        ('[tensors]\n"a" = "b"\n"b" = "a"', "with all rules together"),
        ('[tensors]\n"a.{i}.{j}.w" = "b.{j}.{i}.w"', "a renaming keeps one stretch of a name"),
        ('[tensors]\n"a.{i}.w" = "b.{i+1}.w"', "a renaming keeps one stretch of a name"),
        ('[tensors]\n"a.{i:03}.w" = "b.{i}.w"', "{i:03} is not a plain number"),
        ('[tensors]\n"a [t e]" = "b [t 1 e]"', "no operations of transformers do it in both directions"),
        ('[[rule]]\nsource = ["a [x]", "b [y]"]\ntarget = ["c [y]", "d [x]"]', "makes several tensors of several"),
        ('[tensors]\n"a" = "b"\n[make]\n"c [x]" = "zeros"', "a tensor of [make] has no name in the file"),
        (
            '[tensors]\n"m.h.{i}.{p:q,k}.w [o e]" = "m.h.{i}.qk.w [(p o) e]"\n[rest]\n"{*rest}" = "{*rest}"',
            "'{*rest} = {*rest}' cannot be said as transformers' list: with all rules together, 'some.0.q.w'",
        ),
    ],
)
def test_what_it_cannot_say_is_refused_with_its_rule(text: str, message: str) -> None:
    with pytest.raises(TableError) as caught:
        as_weight_converters(parse_table(text))
    assert message in str(caught.value)
    assert "[not-translated]" in str(caught.value)


def test_a_list_that_was_imported_is_given_back() -> None:
    """There and back: the registry's entry as a table, and the table as a list that does the same."""
    table = find_table("transformers:mixtral", {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2})
    assert "MergeModulelist(dim=0), Concatenate(dim=1)" in as_weight_converters(table)

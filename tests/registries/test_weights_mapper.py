"""A table as vLLM's WeightsMapper: applied as vLLM documents it, every name comes out as the table has it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from porting.notation.faults import TableError
from porting.notation.table import parse_table
from porting.registries.samples import spelled
from porting.registries.weights_mapper import as_weights_mapper
from porting.tables import find_table

Mapping = dict[str, str | None]


@dataclass
class WeightsMapper:
    """What vLLM documents: substrings, then prefixes, then suffixes are replaced once each; None skips the weight."""

    orig_to_new_substr: Mapping = field(default_factory=dict)
    orig_to_new_prefix: Mapping = field(default_factory=dict)
    orig_to_new_suffix: Mapping = field(default_factory=dict)

    def name(self, key: str) -> str | None:
        for part, new in self.orig_to_new_substr.items():
            if part in key:
                if new is None:
                    return None
                key = new.join(key.split(part, 1))
        for part, new in self.orig_to_new_prefix.items():
            if key.startswith(part):
                if new is None:
                    return None
                key = new + key[len(part) :]
        for part, new in self.orig_to_new_suffix.items():
            if key.endswith(part):
                if new is None:
                    return None
                key = key[: -len(part)] + new
        return key


def given(text: str) -> WeightsMapper:
    """The mapper that the source makes."""
    source = as_weights_mapper(parse_table(text))
    head, _, body = source.partition("hf_to_vllm_mapper = ")
    assert head.strip() == "from vllm.model_executor.models.utils import WeightsMapper"
    made = eval(body, {"WeightsMapper": WeightsMapper})  # noqa: S307  # what was just written
    assert isinstance(made, WeightsMapper)
    return made


RULES = """
[tensors]
"wte.weight" = "model.embed.weight"
"h.{i}.attn.{p:q,k,v}.weight" = "model.layers.{i}.self_attn.{p:q_proj,k_proj,v_proj}.weight"
"h.{i}.mlp.experts.{x}.up.weight" = "model.layers.{i}.moe.experts.{x}.up.weight"
"lm_head.weight" = "lm_head.weight"

[drop]
"h.{i}.attn.mask" = "a constant"
"vision.{*rest}" = "not for text"
"cls.{w:weight,bias}" = "no head"
"""


def test_names_come_out_as_the_table_has_them() -> None:
    mapper, table = given(RULES), parse_table(RULES)
    seen = 0
    for rule in table.rules:
        sizes = dict.fromkeys(("x", "p"), 3)
        pairs = zip(spelled(rule, rule.sources[0], sizes), spelled(rule, rule.targets[0], sizes), strict=True)
        for source, target in pairs:
            assert mapper.name(source) == target
            seen += 1
    assert seen == 1 + 9 + 9 + 1
    for dropped in ("h.3.attn.mask", "vision.tower.weight", "cls.weight", "cls.bias"):
        assert mapper.name(dropped) is None
    assert mapper.name("h.12.attn.q.weight") == "model.layers.12.self_attn.q_proj.weight"


def test_a_shipped_table_is_given_back() -> None:
    table = find_table("bert", {})
    head, _, body = as_weights_mapper(table).partition("hf_to_vllm_mapper = ")
    assert head
    mapper = eval(body, {"WeightsMapper": WeightsMapper})  # noqa: S307  # as above
    assert mapper.name("bert.encoder.layer.7.attention.self.value.bias") == "bert.layers.7.attention.value.bias"
    assert mapper.name("bert.embeddings.position_ids") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('"a [x y]" = "b [y x]"', "'a [x y] = b [y x]' cannot be said as vLLM's WeightsMapper: it does not transpose"),
        ('"a.{p:q,k} [x y]" = "b [(p x) y]"', "it does not transpose, fuse or split"),
        ('"a" = "b"\n"b" = "a"', "with the entries of the other rules"),
        ('"a.{i}.{j}.w" = "b.{j}.{i}.w"', "the numbers of a name stay as they are, in their order"),
        ('"h.{i}.w" = "x.{i}.w"\n"h.norm" = "h.norm"', "'h.norm = h.norm' cannot be said"),
        ('"h.{i}.w" = "x.{i}.w"\n"h.{i}.v" = "y.{i}.v"', "another rule replaces 'h.' by 'x.'"),
        ('"{i}.w" = "h.{i}.w"', "there is nothing in the place of 'h.' to be replaced"),
        ('[[rule]]\nsource = "a"\ntarget = "b"\nscale = 2', "nothing is computed, joined or cut"),
        (
            '"m.h.{i}.up.w" = "x.{i}.up.w"\n[rest]\n"m.{*rest}" = "{*rest}"',
            "'m.h.0.some.weight' becomes 'x.0.some.weight' (expected 'h.0.some.weight')",
        ),
        (
            '"h.{i}.q.w" = "h.{i}.q_proj.w"\n[rest]\n"{*rest}" = "{*rest}"',
            "'some.0.q.w' becomes 'some.0.q_proj.w' (expected 'some.0.q.w')",
        ),
        ('"a" = "b"\n[make]\n"c [x]" = "zeros"', "a tensor of [make] has no name in the file"),
    ],
)
def test_what_it_cannot_say_is_refused_with_its_rule(text: str, message: str) -> None:
    whole = text if text.startswith("[") else f"[tensors]\n{text}"
    with pytest.raises(TableError) as caught:
        as_weights_mapper(parse_table(whole))
    assert message in str(caught.value)
    assert "[not-translated]" in str(caught.value)


def test_all_other_tensors_keep_their_names() -> None:
    mapper = given('[tensors]\n"m.tok.w" = "embed.w"\n"m.h.{i}.w" = "h.{i}.w"\n[rest]\n"m.{*rest}" = "{*rest}"')
    names = ("m.tok.w", "m.h.3.w", "m.h.3.up.w", "m.norm.w", "vision.w")
    assert [mapper.name(name) for name in names] == ["embed.w", "h.3.w", "h.3.up.w", "norm.w", "vision.w"]


def test_the_front_and_the_end_of_a_name_are_replaced_there_only() -> None:
    kept = '"ah.{i}.w" = "ah.{i}.w"\n"l.{i}.v.a" = "l.{i}.v.a"'
    mapper = given(f'[tensors]\n"h.{{i}}.w" = "x.{{i}}.w"\n"l.{{i}}.v" = "l.{{i}}.u"\n{kept}')
    names = ("h.3.w", "ah.3.w", "l.3.v", "l.3.v.a")
    assert [mapper.name(name) for name in names] == ["x.3.w", "ah.3.w", "l.3.u", "l.3.v.a"]

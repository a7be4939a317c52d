"""``check`` as a whole: what fits, what the config has to say, and all faults at once."""

from __future__ import annotations

import pytest

from porting.errors import Code
from porting.notation.table import parse_table
from porting.ops import NOTHING, Arithmetic, Scale
from porting.plan.config import refused as config_faults
from porting.plan.config import sizes
from porting.plan.plan import PlanError
from tests.plan.shapes import headers
from tests.plan.toy import CONFIG, TABLE, checkpoint, plan, refused, target


def test_what_fits_is_planned() -> None:
    made = plan()
    assert {name for step in made.steps for name in step.sources} == set(checkpoint())
    assert {name for step in made.steps for name in step.targets} == set(target())
    assert (made.left_out, made.fresh, made.tied, made.warnings) == ((), (), {}, ())
    assert made.summary == "17 of 17 tensors fill 11 of 11 places"


@pytest.mark.parametrize("prefix", ["", "trunk."])
def test_the_prefix_may_be_there_or_not(prefix: str) -> None:
    shapes = {prefix + name.removeprefix("trunk."): shape for name, shape in checkpoint(head__weight=None).items()}
    made = plan(shapes, target(head__weight=None))
    assert {name for step in made.steps for name in step.sources} == set(shapes)


def test_what_is_dropped_is_listed_with_its_reason() -> None:
    made = plan(checkpoint(trunk__ids=(1, 9), head__copy=(7, 4), old__a__b=(3,)))
    assert [(one.name, one.reason, one.equals) for one in made.left_out] == [
        ("trunk.ids", "equals arange", "arange"),
        ("head.copy", "equals trunk.emb.weight", "trunk.emb.weight"),
        ("old.a.b", "nobody needs it", ""),
    ]
    assert made.summary == "17 of 20 tensors fill 11 of 11 places, 3 left out"


def test_two_fields_of_the_config_that_give_one_of_the_target_are_compared() -> None:
    lines = '[mapping]\nname = "t"\n[config]\nlayers = "depth/levels"\nblocks = "depth"\nnum_layers = "levels - 1"\n'
    table = parse_table(lines + '[tensors]\n"a" = "b"\n')
    assert not config_faults(table, {"layers": 2, "blocks": 2, "num_layers": 1})
    assert not config_faults(table, {"blocks": 3})
    message = "[config] gives depth two values: layers says '2', and blocks '3'"
    assert [fault.message for fault in config_faults(table, {"layers": 2, "blocks": 3})] == [message]


def test_a_config_that_the_table_cannot_represent() -> None:
    assert refused(headers(checkpoint(), {**CONFIG, "act": "silu", "causal": True})) == [
        (
            "toy.toml: config.json has act = 'silu', 'toy' can represent 'gelu', 'relu' "
            "(another table or another module is needed: porting tables lists what there is) [config-refused]"
        ),
        (
            "toy.toml: config.json has causal = True, 'toy' can represent False "
            "(another table or another module is needed: porting tables lists what there is) [config-refused]"
        ),
    ]


@pytest.mark.parametrize("value", [0, None, "false", 0.0])
def test_a_required_value_has_its_type(value: object) -> None:
    (fault,) = refused(headers(checkpoint(), {**CONFIG, "causal": value}))
    assert f"config.json has causal = {value!r}, 'toy' can represent False" in fault


def test_a_size_that_the_config_does_not_give() -> None:
    table = TABLE.replace("[require]", '[sizes]\no = "hiden // 1"\n[require]')
    assert refused(None, None, table)[0] == (
        "toy.toml:9:5: [sizes] o = 'hiden // 1': the config has no 'hiden' (did you mean 'hidden'?) [bad-expression]"
    )


def test_a_size_that_comes_from_the_defaults_is_no_lack_of_a_config() -> None:
    table = TABLE.replace("[require]", '[sizes]\no = "wide - 8"\n[defaults]\nwide = 8\n[require]')
    found = sizes(parse_table(table), {})[1][0]
    assert "'wide - 8' is 0, expected a positive integer" in found.message
    assert found.hint == "[defaults] gives wide = 8"
    (lacking,) = sizes(parse_table(TABLE.replace("[require]", '[sizes]\no = "wide"\n[require]')), {})[1]
    assert lacking.hint == "put the model's config.json beside its weights"


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ('"n_embd ** -0.5"', "scale = 'n_embd ** -0.5': the config has no 'n_embd'"),
        ('"hidden - 4"', "scale = 'hidden - 4' is 0, and the inverse divides by it"),
        ('"1 / (hidden - 4)"', "scale = '1 / (hidden - 4)': 1 and 0: division by zero"),
        ("0", "scale = '0' is 0, and the inverse divides by it"),
    ],
)
def test_a_scale_must_have_a_value_and_an_inverse(scale: str, message: str) -> None:
    table = f'[[rule]]\nsource = "a"\ntarget = "b"\nscale = {scale}\n'
    (fault,) = refused(headers({"a": (2,)}, CONFIG), {"b": (2,)}, table)
    assert f"toy.toml:2:1: {message}" in fault
    assert fault.endswith("[bad-expression]")


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        ('"hiden + 1"', "offset = 'hiden + 1': the config has no 'hiden' (did you mean 'hidden'?) [bad-expression]"),
        ('"1 / (hidden - 4)"', "offset = '1 / (hidden - 4)': 1 and 0: division by zero [bad-expression]"),
    ],
)
def test_an_offset_must_have_a_value_which_may_be_zero(offset: str, message: str) -> None:
    table = f'[[rule]]\nsource = "a"\ntarget = "b"\noffset = {offset}\n'
    (fault,) = refused(headers({"a": (2,)}, CONFIG), {"b": (2,)}, table)
    assert fault == f"toy.toml:2:1: {message}"
    plan(headers({"a": (2,)}, CONFIG), {"b": (2,)}, '[[rule]]\nsource = "a"\ntarget = "b"\noffset = "hidden - 4"\n')


def test_both_constants_of_a_rule_are_told() -> None:
    table = '[[rule]]\nsource = "a"\ntarget = "b"\nscale = 0\noffset = "heigth"\n'
    found = refused(headers({"a": (2,)}, CONFIG), {"b": (2,)}, table)
    assert [one.partition(" = ")[0].rpartition(" ")[2] for one in found] == ["scale", "offset"]


def test_what_a_step_computes_is_known_to_the_plan() -> None:
    table = '[[rule]]\nsource = "a"\ntarget = "b"\nscale = "hidden ** -0.5"\n[tensors]\n"c" = "d"\n'
    made = plan(headers({"a": (2,), "c": (2,)}, CONFIG), {"b": (2,), "d": (2,)}, table)
    assert {step.targets[0]: made.arithmetic(step) for step in made.steps} == {
        "b": Arithmetic((Scale(0.5),)),
        "d": NOTHING,
    }


def test_a_part_of_the_module_that_no_source_fills_needs_a_fill() -> None:
    table = '[[rule]]\nsource = "a [t]"\ntarget = "b [(_2|t)]"\n'
    (fault,) = refused(headers({"a": (3,)}), {"b": (5,)}, table)
    assert fault == (
        "toy.toml:2:1: 'a [t] = b [(_2|t)]' has a part on the right that no source fills "
        "(write it as a [[rule]] with fill = 0.0, or another value) [irreversible]"
    )
    plan(headers({"a": (3,)}), {"b": (5,)}, table + "fill = 0.0\n")


def test_all_faults_are_told_at_once_and_no_weight_is_read() -> None:
    source = checkpoint(
        trunk__emb__weight=(6, 4), trunk__extra=(1,), trunk__l__1__k__weight=None, trunk__l__0__norm__gamma=(4,)
    )
    into = target(l__9__x=(1,))
    with pytest.raises(PlanError) as caught:
        plan(headers(source, {**CONFIG, "act": "silu"}), into)
    assert {fault.code for fault in caught.value.faults} == {
        Code.CONFIG_REFUSED,
        Code.SHAPE_MISMATCH,
        Code.UNREAD_TENSOR,
        Code.MISSING_MEMBER,
        Code.SPELLED_TWICE,
        Code.UNWRITTEN_PARAMETER,
    }
    assert all("\n" not in str(fault) for fault in caught.value.faults)


def test_a_table_of_another_checkpoint_is_one_fault() -> None:
    rules = "".join(f'"model.part{i}.weight" = "part{i}.weight"\n' for i in range(10))
    table = f'[mapping]\nname = "other"\n[require]\nact = ["silu"]\n[tensors]\n{rules}'
    with pytest.raises(PlanError) as caught:
        plan(headers(checkpoint(), CONFIG), {f"part{i}.weight": (4,) for i in range(10)}, table)
    assert [fault.code for fault in caught.value.faults] == [Code.CONFIG_REFUSED, Code.NO_SOURCE]
    assert "none of its 10 rules reads any of the checkpoint's" in str(caught.value)
    assert "'model.part0.weight'" in str(caught.value)


def test_an_empty_checkpoint_and_an_empty_module() -> None:
    assert {fault.rpartition(" ")[2] for fault in refused(headers({}, CONFIG))} == {
        "[no-source]",
        "[fresh-not-allowed]",
    }
    assert {fault.rpartition(" ")[2] for fault in refused(None, {})} == {"[no-target]"}


def test_tensors_without_axes_or_without_elements() -> None:
    table = '[tensors]\n"a" = "b"\n"c [x y]" = "d [y x]"\n"e []" = "f []"\n'
    made = plan(headers({"a": (), "c": (0, 3), "e": ()}), {"b": (), "d": (3, 0), "f": ()}, table)
    assert [copy.numel for step in made.steps for copy in step.copies] == [1, 0, 1]

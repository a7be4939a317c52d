"""Tables: what a good one says, and every fault of a bad one with file, line and column."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from porting.errors import Code
from porting.notation.faults import TableError
from porting.notation.table import parse_table, read_table
from porting.ops import Scale

WHOLE = """\
# a comment, so that lines count
[mapping]
name = "toy"
description = "a table with one of everything"
model_types = ["toy", "toy2"]
config = "porting.models.toy:Config"
prefix = "trunk."
target_prefix = "body."

[architectures]
ToyModel = "porting.models.toy:Toy"
ToyForLM = { target = "porting.models.toy:ToyLM", holds = ["lm.weight"] }

[config]
n_embd = "hidden_size"

[defaults]
tied = true

[constants]
bias = false

[files]
config = "own.yaml"
weights = "own.pth"

[require]
act = ["gelu", "relu"]

[sizes]
h = "n_head"
d = 64

[tensors]
"trunk.emb.weight [v e]" = "body.emb.weight [v e]"
"trunk.l.{i}.{p:q,k,v}.weight [(h d) e]" = 'body.l.{i}.qkv [(h p d) e]'

[optional]
"lm.weight" = "head.weight"

[drop]
"trunk.ids" = "equals arange"
"lm.decoder" = { equals = "trunk.emb.weight", reason = "the tied embedding" }
"trunk.mask" = "a constant"

[ties]
"head.decoder" = "body.emb.weight"

[fresh]
"head.{*rest}" = "to be trained"

[inputs]
"ids [b s]" = "src [s b]"

[probes]
"trunk.l.{i} -> 1 [b h s]" = "body.l.{i} -> probabilities [b h s]"

[[rule]]
source = ["trunk.pos [t e]", "trunk.types [0 e]"]
target = "body.pos [t e]"
fold = true

[[rule]]
source = "trunk.scale [n]"
target = ["body.scale [n]"]
scale = "n_embd ** -0.5"
fill = 0
optional = true
"""


FIRST_OF_RULES = (
    '"trunk.emb.weight [',
    '"trunk.l.{i}.{p:',
    '"lm.weight" = "head',
    'source = ["trunk.pos',
    'source = "trunk.scale',
)


def test_a_table_says_everything_once() -> None:
    table = parse_table(WHOLE, where="toy.toml")
    assert (table.name, table.description) == ("toy", "a table with one of everything")
    assert (table.model_types, table.config_class) == (("toy", "toy2"), "porting.models.toy:Config")
    assert (table.prefix, table.target_prefix) == ("trunk.", "body.")
    assert [(a.name, a.target, a.holds) for a in table.architectures] == [
        ("ToyModel", "porting.models.toy:Toy", ()),
        ("ToyForLM", "porting.models.toy:ToyLM", ("lm.weight",)),
    ]
    assert (table.config, table.defaults, table.constants) == (
        {"n_embd": "hidden_size"},
        {"tied": True},
        {"bias": False},
    )
    assert (table.config_file, table.weights_file) == ("own.yaml", "own.pth")
    assert table.require == {"act": ("gelu", "relu")}
    assert {key: one.text for key, one in table.sizes.items()} == {"h": "n_head", "d": "64"}
    assert [str(rule) for rule in table.rules] == [
        "trunk.emb.weight [v e] = body.emb.weight [v e]",
        "trunk.l.{i}.{p:q,k,v}.weight [(h d) e] = body.l.{i}.qkv [(h p d) e]",
        "lm.weight = head.weight",
        "trunk.pos [t e] + trunk.types [0 e] = body.pos [t e]",
        "trunk.scale [n] = body.scale [n]",
    ]
    lines = [WHOLE[: WHOLE.index(text)].count("\n") + 1 for text in FIRST_OF_RULES]
    assert [rule.where for rule in table.rules] == [f"toy.toml:{line}:1" for line in lines]
    assert [rule.optional for rule in table.rules] == [False, False, True, False, True]
    assert [rule.fold for rule in table.rules] == [False, False, False, True, False]
    scaled = table.rules[-1]
    [(kind, number)] = scaled.constants
    assert (kind, number.text, scaled.fill) == (Scale, "n_embd ** -0.5", 0)
    assert [(str(drop.name), drop.reason, str(drop.equals)) for drop in table.drops] == [
        ("trunk.ids", "equals arange", "arange"),
        ("lm.decoder", "the tied embedding", "trunk.emb.weight"),
        ("trunk.mask", "a constant", "None"),
    ]
    assert [(str(ty.name), str(ty.with_), ty.where) for ty in table.ties] == [
        ("head.decoder", "body.emb.weight", "toy.toml:47:1")
    ]
    assert [(str(one.name), one.reason) for one in table.fresh] == [("head.{*rest}", "to be trained")]
    assert [str(rule) for rule in (*table.inputs, *table.probes)] == [
        "ids [b s] = src [s b]",
        "trunk.l.{i} -> 1 [b h s] = body.l.{i} -> probabilities [b h s]",
    ]
    assert len(table.digest) == 64
    assert table.digest != parse_table(WHOLE + "\n").digest


def test_an_input_may_be_given_twice() -> None:
    table = parse_table(
        WHOLE.replace('"ids [b s]" = "src [s b]"', '"mask [b s]" = ["mask [b s]", "other -> bool [b s]"]')
    )
    assert [str(rule) for rule in table.inputs] == ["mask [b s] = mask [b s]", "mask [b s] = other -> bool [b s]"]


def test_a_table_cannot_be_changed() -> None:
    table = parse_table(WHOLE)
    for frozen in (table, table.rules[0], table.drops[0], table.ties[0], table.fresh[0], table.architectures[0]):
        field = dataclasses.fields(frozen)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field, None)


FAULTS = [
    # the text, and what is said of it
    ("[tensors\n", "t.toml:1:9: Expected ']' at the end of a table declaration [not-toml]"),
    ("a = \n", "t.toml:1:5: Invalid value [not-toml]"),
    ('a = """', "t.toml:1:8: Unterminated string [not-toml]"),
    ('[tensors]\n"a" = "b"\n"a" = "c"\n', "t.toml:3:10: Cannot overwrite a value [not-toml]"),
    (f"a = {'[' * 5000}", "t.toml:1:1: nested too deeply [not-toml]"),
    (
        "[tensor]\n",
        "t.toml:1:1: unknown section [tensor] (did you mean 'tensors'?) [unknown-key]",
    ),
    (
        "\n  [zzz]\n",
        (
            "t.toml:2:3: unknown section [zzz] (known: approximate, architectures, arguments, config, constants, "
            "defaults, drop, extends, files, fresh, inputs, make, mapping, optional, probes, require, rest, rule, "
            "sizes, tensors, ties) "
            "[unknown-key]"
        ),
    ),
    ("x = 1\n[mapping]\n", "t.toml:1:1: unknown section [x] (known: "),
    ("tensors = 3\n", "t.toml:1:1: [tensors] is a section, found 3 [wrong-type]"),
    ("[rule]\nsource = 'a'\n", "t.toml:1:1: a rule is written [[rule]], once for each [wrong-type]"),
    ('[mapping]\nnam = "x"', "t.toml:2:1: [mapping] has no key 'nam' (did you mean 'name'?) [unknown-key]"),
    ("[mapping]\nname = 3", "t.toml:2:8: 'name' is 3, expected a text [wrong-type]"),
    ('[mapping]\nmodel_types = "x"', "t.toml:2:15: 'model_types' is 'x', expected a list of texts [wrong-type]"),
    (
        '[mapping]\nextends = "x"',
        "t.toml:2:1: extends stands in [mapping], expected before the first section [unknown-key]",
    ),
    (
        "[architectures]\nA = 3",
        (
            "t.toml:2:5: 'A' is 3, expected an import path, or "
            '{ target = "package.file:Class", holds = [...] } [wrong-type]'
        ),
    ),
    (
        '[architectures]\nA = { target = "x:y", hold = [] }',
        "t.toml:2:23: an architecture has no key 'hold' (did you mean 'holds'?) [unknown-key]",
    ),
    ("[config]\na = 1", "t.toml:2:5: 'a' is 1, expected a text [wrong-type]"),
    ('[require]\na = "x"', "t.toml:2:5: 'a' is 'x', expected a list of the values that are allowed [wrong-type]"),
    ("[require]\na = []", "t.toml:2:5: 'a' is [], expected a list of the values that are allowed [wrong-type]"),
    (
        '[sizes]\nh = "f(x)"',
        "t.toml:2:6: 'f(x)': Call is not allowed; names, numbers and + - * / // ** are [bad-expression]",
    ),
    ("[sizes]\nh = nan", "t.toml:2:5: 'h' is nan, expected a finite number, or an expression over the config such as "),
    (
        "[sizes]\nh = true",
        "t.toml:2:5: 'h' is True, expected a finite number, or an expression over the config such as ",
    ),
    (
        '[sizes]\nhh = 2\n[tensors]\n"a [(h d)]" = "b [(d h)]"',
        "t.toml:2:1: [sizes] gives 'hh', and no rule has that index (did you mean 'h'?) [unknown-key]",
    ),
    ('[tensors]\n"a" = 3', "t.toml:2:7: 'a' is 3, expected the other side of the rule, a text [wrong-type]"),
    ('[tensors]\n"a.{i" = "b.{i}"', "t.toml:2:4: '{' cannot stand in a name [bad-name]"),
    ("[tensors]\n  'a' = 'b.{i+}'", "t.toml:2:12: {i+} is not a placeholder (write {i}, {i+1}, "),
    ('[tensors]\n"a [x" = "b [x]"', "t.toml:2:4: a bracket is not closed [bad-axes]"),
    ('[tensors]\n"a [x (y]" = "b [x y]"', "t.toml:2:7: a parenthesis is not closed [bad-axes]"),
    (
        '[tensors]\n"a.{i} [i e]" = "b.{i} [e]"',
        "t.toml:2:8: index 'i' stands in the name and among the axes [index-twice]",
    ),
    ('[tensors]\n"a.{*r} [e]" = "b.{*r} [e]"', "t.toml:2:9: {*r} takes tensors as they are: no axes [bad-axes]"),
    ('[tensors]\n"a.{i}" = "b"', "t.toml:2:1: index 'i' stands on the left and not on the right [index-one-side]"),
    ('[tensors]\n"a" = "b.{i}"', "t.toml:2:1: index 'i' stands on the right and not on the left [index-one-side]"),
    (
        '[tensors]\n"a [x y]" = "b [x]"',
        "t.toml:2:1: index 'y' stands on the left and not on the right [index-one-side]",
    ),
    (
        '[tensors]\n"a [x]" = "b"',
        "t.toml:2:1: 'a [x]' has axes, and 'b' has none (give all or none) [axes-one-side]",
    ),
    (
        '[tensors]\n"{p:q,k}.w" = "{p:a,b,c}.w"',
        "t.toml:2:1: index 'p' has 2 spellings in one name and 3 in another [size-conflict]",
    ),
    ('[tensors]\n"a [0 e]" = "b [e]"', "t.toml:2:5: the number 0 cannot stand among axes"),
    ('[tensors]\n"a.{p:q,,k}" = "b.{p:q,k}"', "t.toml:2:4: {p:q,,k} has an empty spelling [bad-name]"),
    ('[tensors]\n"a ->" = "b"', "t.toml:2:4: nothing follows '->' [bad-name]"),
    (
        '[tensors]\n"a [x y]" = "b [x y]"\n"a [y x]" = "c [y x]"',
        "t.toml:3:1: 'a' is read by this rule and by that at t.toml:2:1 (take one of them away, or give one line",
    ),
    (
        '[tensors]\n"a" = "c"\n[optional]\n"b" = "c"',
        "t.toml:4:1: 'c' is written by this rule and by that at t.toml:2:1 (take one of them away) [written-twice]",
    ),
    ("[drop]\na = 3", "t.toml:2:5: 'a' is 3, expected a reason, \"equals NAME\", or { equals = "),
    ('[drop]\na = " "', "t.toml:2:5: 'a' is ' ', expected a reason, "),
    ('[drop]\na = { because = "x" }', "t.toml:2:5: 'a' is {'because': 'x'}, expected a reason, "),
    ('[drop]\na = "equals b {"', "t.toml:2:14: ' ' cannot stand in a name [bad-name]"),
    ('[drop]\na = { equals = "b {" }', "t.toml:2:18: ' ' cannot stand in a name [bad-name]"),
    (
        '[drop]\n"a" = "equals b.{i}"',
        "t.toml:2:7: index 'i' stands in what 'a' equals and not in its own name [index-one-side]",
    ),
    ("[ties]\na = 3", "t.toml:2:5: 'a' is 3, expected the name that it is tied to [wrong-type]"),
    ('[ties]\n"a" = "b.{i}"', "t.toml:2:1: 'b.{i}' has the index i, and 'a' has not [index-one-side]"),
    ("[fresh]\na = 3", "t.toml:2:5: 'a' is 3, expected a reason [wrong-type]"),
    ('[inputs]\n"ids [b s]" = "src [b]"', "t.toml:2:1: index 's' stands on the left and not on the right"),
    ('[inputs]\n"ids [b s]" = "src [q]"', "t.toml:2:1: index 's' stands on the left and not on the right"),
    ('[inputs]\n"ids [s]" = "src [b s]"', "t.toml:2:1: index 'b' stands on the right and not on the left"),
    ('[probes]\n"ids [b s]" = "src [s]"', "t.toml:2:1: index 'b' stands on the left and not on the right"),
    ('[[rule]]\nsource = "a"', "t.toml:2:1: [[rule]] has no 'target' [missing-key]"),
    ("[[rule]]", "t.toml: [[rule]] has no 'source' [missing-key]"),
    ('[[rule]]\nsource = []\ntarget = "b"', "t.toml:2:10: 'source' is [], expected one tensor or a list of some"),
    ('[[rule]]\nsource = 3\ntarget = "b"', "t.toml:2:10: 'source' is 3, expected a list of texts [wrong-type]"),
    (
        '[[rule]]\nsource = ["a [x]",\n  "b [y"]\ntarget = "c [(x|y)]"',
        "t.toml:3:6: a bracket is not closed [bad-axes]",
    ),
    (
        '[[rule]]\nsource = "a"\ntarget = "b"\nscal = 2',
        "t.toml:4:1: [[rule]] has no key 'scal' (did you mean 'scale'?)",
    ),
    ('[[rule]]\nsource = "a"\ntarget = "b"\nscale = nan', "t.toml:4:9: 'scale' is nan, expected a finite number, or "),
    (
        '[[rule]]\nsource = "a"\ntarget = "b"\noffset = true',
        "t.toml:4:10: 'offset' is True, expected a finite number, or an expression over the config",
    ),
    ('[[rule]]\nsource = "a"\ntarget = "b"\noffset = "1 if a"', "t.toml:4:10: '1 if a' is not an expression"),
    (
        '[[rule]]\nsource = "a"\ntarget = "b"\nofset = 1',
        "t.toml:4:1: [[rule]] has no key 'ofset' (did you mean 'offset'?)",
    ),
    ('[[rule]]\nsource = "a"\ntarget = "b"\nscale = inf', "t.toml:4:9: 'scale' is inf, expected a finite number, or "),
    ('[[rule]]\nsource = "a"\ntarget = "b"\nscale = "a < 1"', "t.toml:4:10: 'a < 1': Compare is not allowed; "),
    ('[[rule]]\nsource = "a"\ntarget = "b"\nfold = 1', "t.toml:4:8: 'fold' is 1, expected true or false [wrong-type]"),
    ('[[rule]]\nsource = "a"\ntarget = "b"\nfill = "0"', "t.toml:4:8: 'fill' is '0', expected a finite number"),
    ('[tensors]\n"a [h]" = "b [h]"\n[sizes]\nh = -2', "t.toml:4:5: [sizes] h = -2, expected a positive integer (write"),
    ('[tensors]\n"a [h]" = "b [h]"\n[sizes]\nh = 0', "t.toml:4:5: [sizes] h = 0, expected a positive integer (write a"),
    ('[tensors]\n"a [h]" = "b [h]"\n[sizes]\nh = 2.5', "t.toml:4:5: [sizes] h = 2.5, expected a positive integer"),
    ('[tensors]\n"a [h]" = "b [h]"\n[sizes]\nh = "2 - 2"', "t.toml:4:5: [sizes] h = '2 - 2' is 0, expected a positive"),
    ('[tensors]\n"a [h]" = "b [h]"\n[sizes]\nh = "3 // 0"', "t.toml:4:5: [sizes] h = '3 // 0': 3 and 0: integer div"),
    ('[[rule]]\nsource = "a"\ntarget = "b"\nfill = nan', "t.toml:4:8: 'fill' is nan, expected a finite number [wrong"),
    ('[[rule]]\nsource = "a"\ntarget = "b"\nfill = -inf', "t.toml:4:8: 'fill' is -inf, expected a finite number"),
    ('[[rule]]\nsource = "a"\ntarget = "b"\nfill = 1e400', "t.toml:4:8: 'fill' is inf, expected a finite number"),
    (
        '[[rule]]\nsource = "a [t e]"\ntarget = ["b [t e]", "c [t e]"]\nfold = true',
        "t.toml:2:1: a fold has one target, this one 2 [bad-fold]",
    ),
    (
        '[[rule]]\nsource = ["a [e]", "b [t e]"]\ntarget = "c [t e]"\nfold = true',
        "t.toml:2:1: the first term of a fold carries every index, t is missing [bad-fold]",
    ),
    (
        '[[rule]]\nsource = ["a [(x|y)]"]\ntarget = "c [(x|y)]"\nfold = true',
        "t.toml:2:1: a term of a fold has one part with a counterpart, 'a [(x|y)]' 2 [bad-fold]",
    ),
    (
        '[[rule]]\nsource = ["a [t]", "b [s]"]\ntarget = "c [t]"\nfold = true',
        "t.toml:2:1: index 's' stands on the left and not on the right [index-one-side]",
    ),
    (
        '[[rule]]\nsource = ["q [(m d)]", "k [d]"]\ntarget = "qk [(m|1|1) d]"',
        "t.toml:2:1: a part over the indices (d) on the right has no counterpart on the left [index-one-side]",
    ),
    (
        '[tensors]\n"a" = false',
        "t.toml:2:1: 'a' = false takes nothing away: no extended table has it in [tensors] [unknown-key]",
    ),
    (
        '[files]\nweights = "a/b.pth"',
        "t.toml:2:11: 'weights' is 'a/b.pth', expected the name of a file in a directory [",
    ),
    (
        '[files]\nconfig = "c.toml"',
        "t.toml:2:10: 'config' is 'c.toml', expected the name of a file in a directory that ends in .json, .yaml, .yml",
    ),
    ('[files]\nconfig = "provenance.json"', "t.toml:2:10: 'config' is 'provenance.json', expected the name of a file"),
    ('[files]\nconfig = "tokenizer.json"', "t.toml:2:10: 'config' is 'tokenizer.json', expected the name of a file"),
    ('[files]\nconfig = "vocab.json"', "t.toml:2:10: 'config' is 'vocab.json', expected the name of a file"),
    (
        '[files]\nconfig = "m.safetensors.index.json"',
        "t.toml:2:10: 'config' is 'm.safetensors.index.json', expected the name of a file",
    ),
    ('[files]\ntokenizer = "t.json"', "t.toml:2:1: [files] has no key 'tokenizer' (known: config, weights) [unknown-"),
    (
        'extends = "../x"',
        "t.toml:1:11: extends = '../x', expected the name of a table: letters, digits, - and _ [bad-extends]",
    ),
    ("extends = 3", "t.toml:1:11: extends = 3, expected the name of a table: letters, digits, - and _ [bad-extends]"),
]


@pytest.mark.parametrize(("text", "expected"), FAULTS, ids=[str(number) for number in range(len(FAULTS))])
def test_a_fault_is_told_with_file_line_and_column(text: str, expected: str) -> None:
    with pytest.raises(TableError) as caught:
        parse_table(text, where="t.toml")
    first, *_ = map(str, caught.value.faults)
    assert (first if expected.endswith("]") else first[: len(expected)]) == expected


def test_every_fault_is_told_at_once() -> None:
    text = """\
[maping]
[mapping]
prefix = 3
[tensors]
"a.{i}" = "b"
"c [x" = "d [x]"
"e" = "f.{*r}g"
[drop]
"g" = ""
[sizes]
h = "1 +"
[[rule]]
source = "s"
"""
    with pytest.raises(TableError) as caught:
        parse_table(text, where="many.toml")
    assert [(fault.where, fault.code) for fault in caught.value.faults] == [
        ("many.toml:1:1", Code.UNKNOWN_KEY),
        ("many.toml:3:10", Code.WRONG_TYPE),
        ("many.toml:11:5", Code.BAD_EXPRESSION),
        ("many.toml:5:1", Code.INDEX_ONE_SIDE),
        ("many.toml:6:4", Code.BAD_AXES),
        ("many.toml:7:14", Code.BAD_NAME),
        ("many.toml:13:1", Code.MISSING_KEY),
        ("many.toml:9:7", Code.WRONG_TYPE),
    ]
    assert str(caught.value).count("\n") == len(caught.value.faults) - 1


def test_a_million_rules_are_refused(tmp_path: Path) -> None:
    text = "[tensors]\n" + "".join(f'"a{number}" = "b{number}"\n' for number in range(20_001))
    with pytest.raises(TableError, match=r"t: 20001 rules, a table has at most 20000 \[no-table\]"):
        parse_table(text, where="t")
    path = tmp_path / "million.toml"
    path.write_text("[tensors]\n" + "".join(f'"a{number}" = "b"\n' for number in range(400_000)))
    with pytest.raises(TableError, match=r"million\.toml: 6288900 bytes, a table has at most 4194304 \[no-table\]"):
        read_table(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="a directory, expected a TOML table"):
        read_table(tmp_path)
    with pytest.raises(TableError, match="not a file, expected a TOML table"):
        read_table(tmp_path / "nothing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TableError, match="'utf-8' codec can't decode"):
        read_table(tmp_path / "bytes.toml")
    with pytest.raises(TableError, match="not a file, expected a TOML table"):
        read_table("a\0b")


def test_a_file_is_called_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[tensors]\n"a" = "b"\n')
    table = read_table(tmp_path / "mine.toml")
    assert (table.name, table.where, table.rules[0].where) == ("mine", "mine.toml", "mine.toml:2:1")


def test_an_import_path_is_text_until_it_is_asked_for() -> None:
    """Parsing a table imports nothing; :func:`porting.target.import_path` refuses what is not ours."""
    table = parse_table('[architectures]\nX = "os:system"\n')
    assert table.architectures[0].target == "os:system"


def test_arguments_are_numbers_flags_texts_and_none() -> None:
    table = parse_table('[arguments]\nstart = 0\nrate = 0.5\nflag = false\nkind = "causal"\ncache = "None"')
    assert table.arguments == {"start": 0, "rate": 0.5, "flag": False, "kind": "causal", "cache": None}
    with pytest.raises(TableError, match=r"t\.toml:2:9: .*a number, true or false, or a text"):
        parse_table("[arguments]\nstart = [0]", where="t.toml")


def test_an_approximation_has_a_reason_and_a_bound() -> None:
    table = parse_table('[approximate]\nreason = "another norm"\nwithin = 1e-5\n')
    assert table.approximate is not None
    assert (table.approximate.reason, table.approximate.within) == ("another norm", 1e-5)
    assert parse_table("").approximate is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("within = 1e-5", "t.toml:2:1: [approximate] has no 'reason'"),
        ('reason = "a"', "t.toml:2:1: [approximate] has no 'within'"),
        ('reason = "a"\nwithin = 0', "t.toml:3:10: 'within' is 0, expected a share of the activations' scale"),
        ('reason = "a"\nwithin = 1.5', "t.toml:3:10: 'within' is 1.5, expected a share of the activations' scale"),
        ('reason = "a"\nwithin = "b"', "t.toml:3:10: 'within' is 'b', expected a finite number"),
        ("reason = 1\nwithin = 0.1", "t.toml:2:10: 'reason' is 1, expected a text"),
        ('reason = "a"\nwithin = 0.1\nwhy = "b"', "t.toml:4:1: [approximate] has no key 'why'"),
    ],
)
def test_a_faulty_approximation_is_told_with_its_place(body: str, expected: str) -> None:
    with pytest.raises(TableError) as caught:
        parse_table(f"[approximate]\n{body}\n", where="t.toml")
    (fault,) = caught.value.faults
    assert str(fault).startswith(expected)

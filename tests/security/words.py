"""Configs and tables: the texts that a user is asked to trust."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save
from torch import arange

from tests.security.rows import Row, Words, config_row, folder_row, table_row
from tests.small_checkpoint import write_checkpoint

SHARD = save({"a": arange(3.0)})


def beside(content: bytes) -> object:
    def make(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(SHARD)
        (folder / "config.json").write_bytes(content)

    return make


def no_config(folder: Path) -> Words:
    write_checkpoint(folder / "m")
    (folder / "m" / "config.json").unlink()
    return ["load", "m"]


def tokenizer_fifo(folder: Path) -> Words:
    write_checkpoint(folder / "m")
    (folder / "m" / "tokenizer.json").unlink()
    os.mkfifo(folder / "m" / "tokenizer.json")
    return ["fill-mask", "a [MASK]", "--source", "m"]


ABSURD = 10**12
CONFIGS: list[Row] = [
    Row(
        of="config.json",
        what="beside a tokenizer that is a FIFO",
        told="the checkpoint has no tokenizer",
        code=2,
        make=tokenizer_fifo,
    ),
    Row(of="config.json", what="missing", told="no config.json, so no bundled table", code=2, make=no_config),
    *(
        folder_row("config.json", what, told, beside(raw))  # type: ignore[arg-type]  # a function of a folder
        for what, told, raw in (
            ("not JSON", "not JSON at character 1", b"{"),
            ("not an object", "is JSON but not an object", b"[]"),
            ("not UTF-8", "not UTF-8 at byte 0", b"\xff"),
            ("a byte-order mark", "byte-order mark", b"\xef\xbb\xbf{}"),
            ("a key twice", "the key 'a' stands twice", b'{"a": 1, "a": 2}'),
            ("deeply nested", "nested too deeply", b"[" * 10**6),
            ("lists within each other, 101 of them", "nested too deeply", b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}"),
            ("a number of 10^4 digits", "a whole number of 10000 digits", b'{"a": ' + b"9" * 10**4 + b"}"),
            ("a number of 4000 digits", "a whole number of 4000 digits", b'{"a": 1' + b"0" * 3999 + b"}"),
            ("17 MB", "at most 16777216 can be meant", b" " * 17_000_000),
        )
    ),
    config_row("a size of 0", "expected a whole number, 1 or more", {"hidden_size": 0}),
    config_row("a negative size", "hidden_size=-24: expected a whole number", {"hidden_size": -24}),
    config_row("a fractional size", "hidden_size=24.5: expected a whole number", {"hidden_size": 24.5}),
    config_row("a size as a string", "hidden_size='24': expected a whole number", {"hidden_size": "24"}),
    config_row("a size that is true", "num_hidden_layers=True: expected a whole number", {"num_hidden_layers": True}),
    config_row("heads that do not divide", "expected a multiple of num_attention_heads=5", {"num_attention_heads": 5}),
    config_row("10^6 layers", "num_hidden_layers=1000000, where at most", {"num_hidden_layers": 10**6}),
    *(
        config_row(
            f"10^6 layers, for `{chr(32).join(words)}`",
            "num_hidden_layers=1000000, where at most",
            {"num_hidden_layers": 10**6},
            words=words,
        )
        for words in (
            ("check", "m"),
            ("check", "m", "--headers-only"),
            ("convert", "m", "out"),
            ("convert", "m", "out", "--dry-run", "--dtype", "bfloat16"),
            ("export", "m", "out"),
            ("verify", "m"),
            ("attention", "a tree", "--source", "m"),
        )
    ),
    *(
        config_row(
            f"10^{power} labels for a new head",
            "building the module",
            {"num_labels": 10**power},
            words=("load", "m", "--architecture", "BertForSequenceClassification", "--fresh"),
        )
        for power in (9, 12)
    ),
    config_row(
        "10^8 labels, for the reference",
        "100000000 labels (num_labels), and transformers",
        {"num_labels": 10**8},
        words=("verify", "m"),
    ),
    config_row(
        "600 000 values, for the reference",
        "values, each of which transformers copies",
        {"junk": [0] * 600_000},
        words=("verify", "m"),
    ),
    config_row("10^12 layers", "where at most 64 layers can be meant", {"num_hidden_layers": ABSURD}),
    config_row("10^12 words", "[1000000000000, 24]", {"vocab_size": ABSURD}),
    config_row("10^12 positions", "[1000000000000, 24]", {"max_position_embeddings": ABSURD}),
    config_row("a size of 10^12", "hidden_size=1000000000000", {"hidden_size": ABSURD}),
    config_row("a size of 2^63", "Overflow when unpacking", {"intermediate_size": 2**63}),
    config_row("a size of 10^30", "hidden_size=1000", {"hidden_size": 10**30}),
    config_row(
        "a size that contradicts a tensor",
        "[2, 24] -> 'bert.embeddings.token_type.weight' [3, 24]",
        {"type_vocab_size": 3},
    ),
    config_row(
        "a layer too many",
        "the checkpoint does not have it (config.json has num_hidden_layers = 4",
        {"num_hidden_layers": 4},
    ),
    config_row("an unknown model_type", "no bundled table is for model_type 'nothing'", {"model_type": "nothing"}),
    config_row("a model_type that is a list", "no bundled table is for model_type ['bert']", {"model_type": ["bert"]}),
    config_row(
        "a model_type with an escape", "no bundled table is for model_type '\\x1b[2J'", {"model_type": "\x1b[2J"}
    ),
    config_row("NaN for an epsilon", "expected a number above 0", {"layer_norm_eps": float("nan")}),
    config_row("an import path for an activation", "hidden_act='os.system': expected", {"hidden_act": "os.system"}),
    config_row("num_labels of -3", "num_labels=-3: expected", {"num_labels": -3}),
    Row(
        of="config.json",
        what="code of its own (auto_map)",
        told="which is never run here",
        code=0,
        make=lambda folder: (
            write_checkpoint(folder / "m", change={"auto_map": {"AutoModel": "evil--x.Model"}}),
            ["inspect", "m"],
        )[1],
    ),
]


def fifo(folder: Path) -> Words:
    os.mkfifo(folder / "t.toml")
    return ["tables", "t.toml"]


def endless(folder: Path) -> Words:
    (folder / "t.toml").symlink_to("/dev/zero")
    return ["tables", "t.toml"]


def directory(folder: Path) -> Words:
    (folder / "t.toml").mkdir()
    return ["tables", "t.toml"]


def circle(folder: Path) -> Words:
    (folder / "t.toml").write_text('extends = "u"')
    (folder / "u.toml").write_text('extends = "t"')
    return ["tables", "t.toml"]


NESTED = "(" * 100 + "a" + ")" * 100
BERT = """[mapping]
config = "porting.models.bert_config:BertConfig"
[architectures]
A = "porting.models.bert:Bert"
[config]
hidden_size = "hidden_size"
"""
LOAD = ("load", "m", "--table", "t.toml")
TABLES: list[Row] = [
    Row(of="tables", what="a FIFO in its place", told="not a regular file, expected a TOML table", code=2, make=fifo),
    Row(
        of="tables", what="a link to /dev/zero", told="not a regular file, expected a TOML table", code=2, make=endless
    ),
    Row(of="tables", what="a directory", told="a directory, expected a TOML table", code=2, make=directory),
    table_row("not TOML", "not-toml", "[tensors\n"),
    table_row("a number of 12,000 digits in base 16", "more than 300 digits", "[sizes]\nx = 0x" + "f" * 10_000),
    table_row("a number of 15,000 digits in base 2", "more than 300 digits", "[sizes]\nx = 0b" + "1" * 50_000),
    table_row("not UTF-8", "not-toml", "x = '\udcff'".encode("utf-8", "surrogateescape").decode("latin-1") + "\x00"),
    table_row("an unknown key", "did you mean", '[mapping]\nnmae = "x"'),
    table_row("an unknown section", "unknown section [tensor]", '[tensor]\na = "b"'),
    table_row("an index on one side", "stands on the left and not on the right", '[tensors]\n"a.{i}" = "b"'),
    table_row("an axis on one side", "stands on the left and not on the right", '[tensors]\n"a [x y]" = "b [x]"'),
    table_row("one name twice", "not-toml", '[tensors]\n"a" = "b"\n"a" = "c"'),
    table_row("one tensor read twice", "is read by this rule and by that", '[tensors]\n"a" = "b"\n"a [x]" = "c [x]"'),
    table_row("an empty alternative", "has an empty spelling", '[tensors]\n"a.{p:q,}" = "b.{p:x,y}"'),
    table_row("a spelling twice", "has the same spelling twice", '[tensors]\n"a.{p:q,q}" = "b.{p:x,y}"'),
    table_row("conflicting sizes", "2 spellings in one name and 3 in another", '[tensors]\n"{p:a,b}" = "{p:x,y,z}"'),
    table_row("a table that extends itself", "there is no table 't' beside this one", 'extends = "t"'),
    Row(
        of="tables",
        what="tables that extend each other",
        told="a table extends itself: t -> u -> t",
        code=2,
        make=circle,
    ),
    table_row("extends that climbs out", "expected the name of a table", 'extends = "../../etc/passwd"'),
    table_row("extends that is absolute", "expected the name of a table", 'extends = "/etc/passwd"'),
    table_row("extends a table that is not there", "there is no table 'nothing'", 'extends = "nothing"'),
    table_row(
        "10^6 rules",
        "bytes, a table has at most 4194304",
        lambda: "[tensors]\n" + "".join(f'"a{n}" = "b{n}"\n' for n in range(10**6)),
    ),
    table_row("a pattern of 1 MB", "a name has 1 to 1000 characters", '[tensors]\n"' + "a" * 10**6 + '" = "b"'),
    table_row(
        "150 placeholders side by side",
        "nothing separates",
        '[tensors]\n"' + "".join(f"{{i{n}}}" for n in range(150)) + '" = "b"',
    ),
    table_row("an unbounded part before another", "must be the last part", '[tensors]\n"{*a}.{*b}" = "x.{*a}.{*b}"'),
    table_row("axes nested 100 deep", "nested deeper than 16", f'[tensors]\n"a [{NESTED}]" = "b [a]"'),
    table_row(
        "axes of 2^20 pieces",
        "at most 1024 are kept",
        '[tensors]\n"a [' + " ".join(f"(x{n}|y{n})" for n in range(20)) + ']" = "b [z]"',
    ),
    table_row("an axis with an operator", "cannot stand among axes", '[tensors]\n"a [x*y]" = "b [y x]"'),
    table_row("a control character in a name", "cannot stand in a name", '[tensors]\n"a\\u0007" = "b"'),
    table_row("a bidirectional mark in a name", "cannot stand in a name", '[tensors]\n"a\\u202eb" = "b"'),
    table_row("a scale that is NaN", "expected a finite number", "[[rule]]\nsource='a'\ntarget='b'\nscale=nan"),
    table_row("a scale that is infinite", "expected a finite number", "[[rule]]\nsource='a'\ntarget='b'\nscale=inf"),
    table_row(
        "an expression that calls", "Call is not allowed", "[sizes]\nx = \"__import__('os').system('touch ran')\""
    ),
    table_row(
        "an expression with an attribute of a number", "Attribute is not allowed", '[sizes]\nx = "(1).__class__"'
    ),
    table_row("an index of a sum in an expression", "Subscript is not allowed", '[sizes]\nx = "(a + b)[0]"'),
    table_row("Python's own attribute in an expression", "no rule has that index", '[sizes]\nx = "a.__class__"'),
    table_row("an expression that assigns", "NamedExpr is not allowed", '[sizes]\nx = "(a := 1)"'),
    table_row("an expression with a lambda", "Lambda is not allowed", '[sizes]\nx = "lambda: 1"'),
    table_row("an expression with a string", "the constant 'x' is not allowed", "[sizes]\nx = \"'x' * 9\""),
    table_row("an expression with a comprehension", "is not allowed", '[sizes]\nx = "[a for a in b]"'),
    table_row("an expression of 10^5 characters", "at most 200 are read", f'[sizes]\nx = "{"(" * 10**5}"'),
    table_row(
        "a power tower",
        "at most 64 is computed",
        f'{BERT}[sizes]\nx = "9 ** 9 ** 9"\n[tensors]\n"a [x]" = "b [x]"',
        words=LOAD,
    ),
    table_row(
        "a division by zero", "modulo by zero", f'{BERT}[sizes]\nx = "1 // 0"\n[tensors]\n"a [x]" = "b [x]"', words=LOAD
    ),
    table_row(
        "an import path that is not ours",
        "which is not part of this library",
        '[mapping]\n[architectures]\nA = "os:system"\n[tensors]\n"a" = "b"',
        words=LOAD,
    ),
    table_row(
        "an import path that pretends",
        "which is not part of this library",
        '[mapping]\n[architectures]\nA = "porting.modelsx:A"\n[tensors]\n"a" = "b"',
        words=LOAD,
    ),
    table_row(
        "an import path of our command line",
        "which is not part of this library",
        '[mapping]\n[architectures]\nA = "porting.cli.app:main"\n[tensors]\n"a" = "b"',
        words=LOAD,
    ),
    table_row(
        "an import path to what a module of ours imports",
        "which is not part of this library",
        '[mapping]\n[architectures]\nA = "porting.models.bert:torch.hub.load"\n[tensors]\n"a" = "b"',
        words=LOAD,
    ),
    table_row(
        "an import path to a name that a module of ours imports",
        "which is not part of this library",
        '[mapping]\n[architectures]\nA = "porting.models.bert:nn"\n[tensors]\n"a" = "b"',
        words=LOAD,
    ),
    table_row(
        "an import path with code in it",
        "is not an import path",
        '[mapping]\n[architectures]\nA = "porting.models.bert:Bert()"\n[tensors]\n"a" = "b"',
        words=LOAD,
    ),
    table_row(
        "a config class that is not ours",
        "which is not part of this library",
        '[mapping]\nconfig = "subprocess:Popen"\n[architectures]\nA = "porting.models.bert:Bert"\n[tensors]\n"a" = "b"',
        words=LOAD,
    ),
    table_row(
        "a table that names no module",
        "names no module to build",
        '[mapping]\nname = "x"\n[tensors]\n"a" = "b"',
        words=LOAD,
    ),
]

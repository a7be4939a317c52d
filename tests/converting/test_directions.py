"""Against what was there before: ``load`` and ``export``, and rules carried out on whole tensors in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from porting.checkpoint import CheckpointError
from porting.comparing.differences import diff
from porting.comparing.digests import digest
from porting.converting.casts import Losses
from porting.converting.conversion import convert
from porting.exporting import export
from porting.loading import load
from porting.notation.table import parse_table
from porting.plan.plan import PlanError
from tests.converting.drawing import bits, write
from tests.plan.carrying import port
from tests.plan.shapes import Shape
from tests.small_checkpoint import tensors, write_checkpoint

TABLES = ["bert", "bert_into_encoder", "bert_into_fused", "bert_into_interleaved", "bert_into_torch_encoder"]


def read(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert [name for name in found if bits(found[name]) != bits(expected[name])] == []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("a") / "source")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_the_port_is_what_load_fills_a_module_with(
    table: str, dtype: torch.dtype | None, source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "b", table, dtype=dtype)
    module = load(source, table=table, dtype=dtype)
    found = read(tmp_path / "b")
    expected = dict(module.state_dict())
    tied = {name for name in expected if name not in found}
    same(found, {name: value for name, value in expected.items() if name not in tied})
    stored = {value.data_ptr() for name, value in expected.items() if name in found}
    assert all(expected[name].data_ptr() in stored for name in tied), (
        "what is left out is another name of what is there"
    )
    module.load_state_dict(found, strict=False)


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=str)
@pytest.mark.parametrize("table", TABLES)
def test_the_way_back_is_what_export_writes(
    table: str, dtype: torch.dtype | None, source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "b", table)
    (tmp_path / "b" / "provenance.json").unlink()
    convert(tmp_path / "b", tmp_path / "c", table, reverse=True, dtype=dtype)
    export(load(source, table=table), table, tmp_path / "d", anew=True, dtype=dtype)
    same(read(tmp_path / "c"), read(tmp_path / "d"))


def test_the_record_brings_back_every_name_and_every_byte(tmp_path: Path) -> None:
    """Older spellings, copies of tied tensors and a table of positions are all restored; names in their order."""
    held = tensors()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in held.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(24).expand(1, 24)
    write_checkpoint(tmp_path / "a", values=held)
    config = (tmp_path / "a" / "config.json").read_text()
    write(tmp_path / "old", {name: value.contiguous() for name, value in old.items()})
    (tmp_path / "old" / "config.json").write_text(config)
    done = convert(tmp_path / "old", tmp_path / "b", "bert")
    assert {left.name for left in done.left_out} == {
        "bert.embeddings.position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
    }  # fmt: skip
    convert(tmp_path / "b", tmp_path / "c", "bert", reverse=True)
    same(read(tmp_path / "c"), old)


def test_what_the_port_does_not_hold_comes_from_the_followed_checkpoint(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "b", "bert_into_encoder")
    lacking = convert(tmp_path / "b", tmp_path / "c", "bert_into_encoder", reverse=True)
    assert "bert.pooler.dense.weight" in {left.name for left in lacking.left_out}
    complete = convert(tmp_path / "b", tmp_path / "d", "bert_into_encoder", reverse=True, like=source)
    assert complete.left_out == ()
    found = read(tmp_path / "d")
    original = read(source)
    folded = "bert.embeddings.position_embeddings.weight"
    added = original["bert.embeddings.token_type_embeddings.weight"][0]
    assert torch.equal(found.pop(folded), (original.pop(folded).double() + added.double()).float())
    types = "bert.embeddings.token_type_embeddings.weight"
    second = original.pop(types)[1]
    assert torch.equal(found.pop(types), torch.stack([torch.zeros_like(second), second]))
    same(found, original)


RULES: dict[str, tuple[str, dict[str, Shape], dict[str, Shape]]] = {
    "transpose": ('"a [i o]" = "b [o i]"', {"a": (70, 50)}, {"b": (50, 70)}),
    "fused": (
        '"{p:q,k,v} [(h d) e]" = "qkv [(h p d) e]"\n[sizes]\nh = 3', dict.fromkeys("qkv", (12, 5)), {"qkv": (36, 5)},
    ),
    "stacked": ('"x.{i}.w [f e]" = "w [i e f]"', {f"x.{i}.w": (6, 7) for i in range(5)}, {"w": (5, 7, 6)}),
    "halves": ('"a [v (s k)]" = "b [v (k s)]"\n[sizes]\ns = 2', {"a": (9, 40)}, {"b": (9, 40)}),
    "grouped": (
        """[[rule]]
        source = ["q [(g m d) e]", "k [(g d) e]", "v [(g d) e]"]
        target = "qkv [(g (m|1|1) d) e]"
        [sizes]
        g = 2
        m = 3
        d = 4""",
        {"q": (24, 5), "k": (8, 5), "v": (8, 5)},
        {"qkv": (40, 5)},
    ),
    "padded": (
        '[[rule]]\nsource = "a [t e]"\ntarget = "b [(_2|t) e]"\nfill = 0.5', {"a": (6, 4)}, {"b": (8, 4)},
    ),
    "cut": ('[[rule]]\nsource = "a [(_2|t) e]"\ntarget = "b [t e]"\nfill = 1.5', {"a": (8, 4)}, {"b": (6, 4)}),
    "folded": (
        '[[rule]]\nsource = ["p [t e]", "q [e 0]"]\ntarget = "r [e t]"\nfold = true',
        {"p": (30, 20), "q": (20, 3)},
        {"r": (20, 30)},
    ),
    "offset": ('[[rule]]\nsource = "a [i o]"\ntarget = "b [o i]"\noffset = 0.3', {"a": (40, 9)}, {"b": (9, 40)}),
    "summed, scaled and offset": (
        '[[rule]]\nsource = ["p [t e]", "q [e 0]"]\ntarget = "r [e t]"\nfold = true\noffset = 0.3\nscale = "3 ** -1"',
        {"p": (30, 20), "q": (20, 3)},
        {"r": (20, 30)},
    ),
    "scaled and cut": (
        '[[rule]]\nsource = "a [(_2|t) e]"\ntarget = "b [e t]"\nfill = 1.5\nscale = 3', {"a": (18, 9)}, {"b": (9, 16)},
    ),
    "scaled and padded": (
        '[[rule]]\nsource = "a [t e]"\ntarget = "b [(_2|t) e]"\nfill = 0.3\nscale = 3', {"a": (16, 9)}, {"b": (18, 9)},
    ),
    "scaled": ('[[rule]]\nsource = "a [i o]"\ntarget = "b [o i]"\nscale = "3 ** -1"', {"a": (40, 9)}, {"b": (9, 40)}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_kind_of_rule_by_slices_is_the_rule_on_whole_tensors(
    rule: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from porting.converting import making

    monkeypatch.setattr(making, "BLOCK", 96)
    monkeypatch.setattr(making, "LONG", 0)
    text, sources, targets = RULES[rule]
    text = text if text.startswith("[[") else f"[tensors]\n{text}"
    made = port(text, sources, targets)
    torch.manual_seed(1)
    held = {name: torch.randn(shape).to(dtype) for name, shape in sources.items()}
    table = parse_table(f'[mapping]\nname = "t"\n{text}\n')
    convert(write(tmp_path / "a", held), tmp_path / "b", table)
    expected = made.forward(held)
    same(read(tmp_path / "b"), expected)
    convert(tmp_path / "b", tmp_path / "c", table, reverse=True)
    same(read(tmp_path / "c"), made.backward(expected))


def test_a_cast_counts_what_it_loses(tmp_path: Path) -> None:
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"a [i o]" = "b [o i]"\n"c" = "d"\n"e" = "f"\n')
    torch.manual_seed(2)
    a = torch.randn(300, 200)
    a[3, 5], a[4, 6], a[7, 7] = 7e4, -65520.0, 65519.0  # the last one rounds to the largest finite float16
    a[8, 8], a[9, 9] = 1e-9, -0.0
    c = torch.tensor([float("inf"), float("nan"), -float("inf"), 1e-30, 6e-8, 0.0])
    source = write(tmp_path / "a", {"a": a, "c": c, "e": torch.arange(5)})
    done = convert(source, tmp_path / "b", table, dtype=torch.float16)
    assert done.losses == {"b": Losses(infinite=2, vanished=1), "d": Losses(infinite=0, vanished=1)}
    same(read(tmp_path / "b"), {"b": a.T.contiguous().half(), "d": c.half(), "f": torch.arange(5)})


def test_bytes_that_are_no_booleans_are_refused(tmp_path: Path) -> None:
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"a [i o]" = "b [o i]"\n"c" = "d"\n')
    for name in "ac":
        source = write(tmp_path / name, {"a": torch.ones(3, 4).bool(), "c": torch.ones(5).bool()})
        raw = bytearray((source / "model.safetensors").read_bytes())
        raw[-17 if name == "a" else -1] = 7
        (source / "model.safetensors").write_bytes(raw)
        with pytest.raises(CheckpointError, match=rf"tensor '{name}': a boolean is stored as the byte 7; only 0 and 1"):
            convert(source, tmp_path / "out", table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_tensors_that_should_be_equal_are_compared(source: Path, tmp_path: Path) -> None:
    held = tensors()
    held["cls.predictions.decoder.weight"][3, 3] += 1
    other = write_checkpoint(tmp_path / "a", values=held)
    with pytest.raises(PlanError, match=r"'bert\.embeddings\.word_embeddings\.weight', and it does not") as caught:
        convert(other, tmp_path / "b", "bert")
    assert [fault.where for fault in caught.value.faults] == ["cls.predictions.decoder.weight"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_pickled_checkpoint_becomes_safetensors(source: Path, tmp_path: Path) -> None:
    """Views that share a storage, transposed ones among them, are read where they lie."""
    held = tensors()
    word = held["bert.embeddings.word_embeddings.weight"]
    held["cls.predictions.decoder.weight"] = word
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    held[name] = held[name].T.contiguous().T
    (tmp_path / "a").mkdir()
    torch.save(held, tmp_path / "a" / "pytorch_model.bin")
    (tmp_path / "a" / "config.json").write_text((source / "config.json").read_text())
    for table in ("bert", "bert_into_torch_encoder"):
        convert(tmp_path / "a", tmp_path / table, table)
        convert(source, tmp_path / f"{table}-safe", table)
        same(read(tmp_path / table), read(tmp_path / f"{table}-safe"))
    assert sorted(path.name for path in (tmp_path / "bert").iterdir()) == [
        "config.json", "model.safetensors", "provenance.json",
    ]  # fmt: skip


def test_a_module_of_ones_own_says_what_is_wanted(tmp_path: Path) -> None:
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"a" = "weight"\n"b" = "bias"\n[drop]\n"c" = "not needed"\n')
    torch.manual_seed(3)
    source = write(tmp_path / "a", {"a": torch.randn(3, 4), "b": torch.randn(3), "c": torch.randn(2)})
    convert(source, tmp_path / "b", table, into=lambda: torch.nn.Linear(4, 3))
    same(read(tmp_path / "b"), {"weight": read(source)["a"], "bias": read(source)["b"]})
    with pytest.raises(PlanError, match=r"the checkpoint has|\[3, 4\]"):
        convert(source, tmp_path / "c", table, into=lambda: torch.nn.Linear(5, 3))


@pytest.mark.parametrize("followed", [False, True])
def test_a_sum_that_is_taken_apart_says_which_values_move(followed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {"pos": torch.randn(8, 4), "types": torch.randn(3, 4)}
    source = write(tmp_path / "a", tensors)
    table = parse_table(
        '[mapping]\nname = "t"\n[[rule]]\nsource = ["pos [t e]", "types [r=1 e]"]\ntarget = "p [t e]"\nfold = true\n'
    )
    there = convert(source, tmp_path / "b", table)
    assert there.warnings == ()
    back = convert(tmp_path / "b", tmp_path / "c", table, reverse=True, like=source if followed else None)
    (warning,) = back.warnings
    assert warning.startswith("values moved: 'pos' receives the whole sum that 'p' holds, and zero stands in 'types' ")
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert torch.equal(found["pos"], (tensors["pos"].double() + tensors["types"][1].double()).float())
    kept = tensors["types"].clone()
    kept[1] = 0
    assert torch.equal(found["types"], kept if followed else torch.zeros(3, 4))
    assert ("keeps other rows" in warning) is not followed


SHARED = """
[mapping]
name = "shared"
model_types = ["shared"]
prefix = "model."
[tensors]
"model.words [v e]" = ["encoder.words [v e]", "decoder.words [v e]", "head [e v]"]
"model.{i}.norm" = ["a.{i}.norm", "b.{i}.norm"]
[rest]
"model.{*rest}" = "{*rest}"
"""
OF_A_FORMULA = """
[mapping]
name = "formulas"
[[rule]]
source = "words [v e]"
target = "first [v e]"
formula = "2 * x"
back = { x = "y / 2" }
[[rule]]
source = "words [v e]"
target = "second [e v]"
formula = "2 * x"
back = { x = "y / 2" }
"""


class Shared(nn.Module):
    def __init__(self, *, words: Shape = (5, 3)) -> None:
        super().__init__()
        for name in ("encoder", "decoder"):
            self.register_module(name, nn.ParameterDict({"words": torch.zeros(words)}))
        for name in ("a", "b"):
            self.register_module(name, nn.ModuleList(nn.ParameterDict({"norm": torch.zeros(4)}) for _ in range(2)))
        self.head = nn.Parameter(torch.zeros(*words[::-1]))
        self.other = nn.Parameter(torch.zeros(2))


def shared_source(folder: Path) -> Path:
    shapes: dict[str, Shape] = {"model.words": (5, 3), "model.0.norm": (4,), "model.1.norm": (4,), "model.other": (2,)}
    folder.mkdir()
    torch.manual_seed(4)
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "shared"}')
    return folder


def test_one_source_fills_several_targets_and_comes_back(tmp_path: Path) -> None:
    source, table = shared_source(tmp_path / "source"), parse_table(SHARED)
    convert(source, tmp_path / "port", table, derive=True)
    given, found = read(source), read(tmp_path / "port")
    assert sorted(found) == sorted(Shared().state_dict())
    for name in ("encoder.words", "decoder.words"):
        assert torch.equal(found[name], given["model.words"])
    assert torch.equal(found["head"], given["model.words"].T)
    assert all(torch.equal(found[f"{side}.1.norm"], given["model.1.norm"]) for side in "ab")
    (tmp_path / "port" / "provenance.json").unlink()
    convert(tmp_path / "port", tmp_path / "again", table, reverse=True)
    same(read(tmp_path / "again"), given)
    one, other = digest(source, table=table, side="left"), digest(tmp_path / "port", table=table, side="right")
    assert one.text == other.text
    assert diff(source, tmp_path / "port", table=table).equal
    module = load(source, Shared(), table)
    same(dict(module.state_dict()), found)
    with torch.no_grad():
        module.get_parameter("encoder.words")[0, 0] += 1  # the values of one are not those of the other
    assert torch.equal(module.get_parameter("decoder.words"), given["model.words"])


def test_targets_of_one_source_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    source, table = shared_source(tmp_path / "source"), parse_table(SHARED)
    module = load(source, Shared(), table)
    same(read(Path(export(module, table, tmp_path / "same").path)), read(source))
    with torch.no_grad():
        module.get_parameter("head")[0, 0] += 1
        module.get_parameter("b.1.norm")[0] += 1
    save_file({name: one.contiguous() for name, one in module.state_dict().items()}, tmp_path / "port.safetensors")
    words = "model.words: it would be made of 'encoder.words', and of 'head' as well, and their values differ"
    norm = "model.1.norm: it would be made of 'a.1.norm', and of 'b.1.norm' as well, and their values differ"
    for refused in (
        lambda: export(module, table, tmp_path / "exported"),
        lambda: convert(tmp_path / "port.safetensors", tmp_path / "back", table, reverse=True),
        lambda: digest(tmp_path / "port.safetensors", table=table, side="right"),
    ):
        with pytest.raises(PlanError) as raised:
            refused()
        assert words in str(raised.value)
        assert norm in str(raised.value)


def test_formulas_that_share_a_source_come_back_only_if_they_agree(tmp_path: Path) -> None:
    table = parse_table(OF_A_FORMULA)
    first = torch.randn(4, 3)
    save_file({"first": first, "second": first.T.contiguous()}, tmp_path / "port.safetensors")
    convert(tmp_path / "port.safetensors", tmp_path / "back", table, reverse=True)
    same(read(tmp_path / "back"), {"words": first / 2})
    save_file({"first": first, "second": (first.T + 1).contiguous()}, tmp_path / "other.safetensors")
    with pytest.raises(PlanError, match="words: it would be made of 'first', and of 'second' as well"):
        convert(tmp_path / "other.safetensors", tmp_path / "refused", table, reverse=True)

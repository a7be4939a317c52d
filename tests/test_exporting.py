from __future__ import annotations

import filecmp
import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import porting
from porting import models
from porting.checkpoint import CheckpointError, TensorFile, open_checkpoint, write_directory
from porting.errors import PortingWarning
from porting.export_files import weight_files
from porting.limits import LimitError
from porting.loading import same_bits
from porting.notation.faults import TableError
from porting.opening import Folder
from porting.plan.plan import PlanError
from porting.sharding.writing import Places, layout
from porting.target import TargetError
from tests import own, small_checkpoint
from tests.mappings.spellings import SPELLINGS, missing_and_unexpected, modern, tensors_of
from tests.models.twins import HEADS, TINY, inputs_for
from tests.small_checkpoint import write_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return own.write(tmp_path / "source")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return own.table(tmp_path)


@pytest.fixture
def module(source: Path, table: Path) -> own.Own:
    return own.filled(source, table)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return small_checkpoint.write_checkpoint(tmp_path / "bert")


# --------------------------------------------------------------------------------------------- a module that was loaded


def test_an_untouched_module_gives_the_files_that_it_came_from(module: own.Own, source: Path, tmp_path: Path) -> None:
    """Fused, transposed, folded, scaled, padded, tied; old and new spellings, with and without the prefix."""
    result = porting.export(module, None, tmp_path / "again")
    own.assert_same_files(source, tmp_path / "again")
    assert result.tensors == tuple(open_checkpoint(source).tensors)
    assert result.copied == ("steps",)
    assert result.files == ("config.json", "model.safetensors", "vocab.txt")
    assert result.follows == str(source)


def test_out_and_in_and_out_again_is_the_same(module: own.Own, source: Path, table: Path, tmp_path: Path) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    porting.export(module, None, tmp_path / "one")
    again = porting.load(tmp_path / "one", own.Own(own.SIZES), table)
    same = {name: same_bits(tensor, again.state_dict()[name]) for name, tensor in module.state_dict().items()}
    assert {name for name, equal in same.items() if not equal} <= {"scaled"}  # a product that was rounded
    porting.export(again, None, tmp_path / "two")
    own.assert_same_files(tmp_path / "one", tmp_path / "two")


def test_a_trained_module_gives_its_values_under_the_same_names(module: own.Own, source: Path, tmp_path: Path) -> None:
    before = own.tensors()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2.0)
    porting.export(module, None, tmp_path / "again")
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert after.keys() == before.keys()
    for name in ("model.layer.0.query.weight", "layer.1.value.bias", "model.layer.1.kernel", "layer.1.norm.gamma"):
        assert torch.equal(after[name], 2 * before[name])
    assert torch.equal(after["decoder.weight"], 2 * before["model.tokens.weight"])  # made of the new embedding
    assert torch.equal(after["positions.weight"][:2], before["positions.weight"][:2])  # what no tensor here holds
    assert torch.equal(after["positions.weight"][2:], 2 * before["positions.weight"][2:])
    assert torch.equal(after["shift"], 2 * (before["shift"] + before["model.types"][0]))  # a sum: to the first
    assert not after["model.types"][0].any()
    assert torch.equal(after["model.types"][1], before["model.types"][1])
    assert torch.allclose(after["scaled"], 2 * before["scaled"], rtol=1e-6)
    assert torch.equal(after["steps"], before["steps"])


@pytest.mark.parametrize("spelling", ["sharded", "sharded-bin"])
def test_shards_stay_shards_when_the_dtype_changes(spelling: str, tmp_path: Path) -> None:
    source, written = tmp_path / "source", tmp_path / "written"
    SPELLINGS[spelling](source, "BertForMaskedLM")
    result = porting.export(porting.load(source), None, written, dtype=torch.bfloat16)
    before, after = tensors_of(source), tensors_of(written)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor.bfloat16()) for name, tensor in before.items())
    shards = [name for name in result.files if name.endswith(".safetensors")]
    assert len(shards) == len([*source.glob("*.safetensors"), *source.glob("*.bin")])
    index = json.loads((written / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())
    assert set(index["weight_map"]) == set(after)
    assert json.loads((written / "config.json").read_text())["dtype"] == "bfloat16"
    model = transformers.BertForMaskedLM.from_pretrained(written)
    assert model.dtype == torch.bfloat16
    assert missing_and_unexpected(written, "BertForMaskedLM") == {}


def test_the_dtype_is_the_module_s_own_unless_another_is_asked_for(source: Path, table: Path, tmp_path: Path) -> None:
    module = porting.load(source, own.Own(own.SIZES), table).double()
    porting.export(module, None, tmp_path / "double")
    found = load_file(tmp_path / "double" / "model.safetensors")
    assert {name: t.dtype for name, t in found.items() if t.dtype != torch.float64} == {"steps": torch.int64}
    porting.export(module, None, tmp_path / "single", dtype=torch.float32)
    assert filecmp.cmp(source / "model.safetensors", tmp_path / "single" / "model.safetensors", shallow=False)


def test_a_cast_that_makes_values_infinite_says_so(module: own.Own, tmp_path: Path) -> None:
    with torch.no_grad():
        module.tokens.weight[1, :2] = torch.tensor([7e4, -7e4])
    with pytest.warns(
        PortingWarning, match=r"finite values infinite: 2 of decoder\.weight, 2 of model\.tokens\.weight"
    ):
        result = porting.export(module, None, tmp_path / "half", dtype=torch.float16)
    assert result.infinite == {"model.tokens.weight": 2, "decoder.weight": 2}
    with pytest.raises(TargetError, match=r"dtype=torch\.int8, expected a floating-point dtype"):
        porting.export(module, None, tmp_path / "eight", dtype=torch.int8)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: torch.compile(module, backend="eager"),
        nn.DataParallel,
        lambda module: module.requires_grad_(False),
        lambda module: module.eval(),
    ],
    ids=["compiled", "parallel", "frozen", "eval"],
)
def test_what_users_do_to_a_module_changes_nothing(
    change: Callable[[nn.Module], nn.Module], module: own.Own, source: Path, tmp_path: Path
) -> None:
    porting.export(change(module), None, tmp_path / "again")
    own.assert_same_files(source, tmp_path / "again")


def test_values_that_do_not_lie_in_a_row_are_written_in_order(module: own.Own, source: Path, tmp_path: Path) -> None:
    for parameter in module.parameters():
        if parameter.ndim == 2:
            parameter.data = parameter.data.T.contiguous().T
            assert not parameter.is_contiguous()
    porting.export(module, None, tmp_path / "again")
    own.assert_same_files(source, tmp_path / "again")


# ----------------------------------------------------------------------------------------------------- what is left out


def test_heads_that_a_module_of_the_user_s_has_not_are_copied(bert: Path, tmp_path: Path) -> None:
    class Trunk(nn.Module):
        def __init__(self, config: models.BertConfig) -> None:
            super().__init__()
            self.bert = models.Bert(config=config)

    module = porting.load(bert, Trunk)
    with torch.no_grad():
        module.get_parameter("bert.embeddings.word.weight").mul_(2)
    result = porting.export(module, None, tmp_path / "again")
    assert {name.split(".")[0] for name in result.copied} == {"cls"}
    assert result.not_written == ()
    before, after = tensors_of(bert), tensors_of(tmp_path / "again")
    assert all(torch.equal(after[name], before[name]) for name in result.copied)
    word = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(after["cls.predictions.decoder.weight"], 2 * before[word])
    assert (tmp_path / "again" / "config.json").read_bytes() == (bert / "config.json").read_bytes()


def test_another_architecture_leaves_out_what_it_has_no_place_for(bert: Path, tmp_path: Path) -> None:
    module = porting.load(bert, architecture="BertForMaskedLM")
    with pytest.warns(PortingWarning, match="is a BertForMaskedLM: .*cls.seq_relationship.* are not in it"):
        result = porting.export(module, None, tmp_path / "again")
    assert result.architecture == "BertForMaskedLM"
    assert {left.name for left in result.not_written} >= {"cls.seq_relationship.weight", "bert.pooler.dense.bias"}
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config == {**json.loads((bert / "config.json").read_text()), "architectures": ["BertForMaskedLM"]}
    assert missing_and_unexpected(tmp_path / "again", "BertForMaskedLM") == {}


@pytest.mark.parametrize("prefix", ["bert.", ""])
@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_a_new_head_is_written_with_it(prefix: str, architecture: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (SPELLINGS["other-prefix"] if prefix else modern)(source, "BertModel")
    config = models.BertConfig(**{**TINY, "num_labels": 4})
    with pytest.warns(PortingWarning, match="are new and untrained: classifier.weight, classifier.bias"):
        module = porting.load(source, lambda: HEADS[architecture](config=config), fresh=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PortingWarning)  # one of the two leaves the pooler out
        result = porting.export(module, None, tmp_path / "again")
    assert result.new == ("classifier.weight", "classifier.bias")
    found = json.loads((tmp_path / "again" / "config.json").read_text())
    assert found["architectures"] == [architecture]
    assert found["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2", "3": "LABEL_3"}
    assert missing_and_unexpected(tmp_path / "again", architecture) == {}
    theirs = getattr(transformers, architecture).from_pretrained(tmp_path / "again")
    batch = inputs_for(architecture)
    with torch.no_grad():
        assert torch.allclose(module(**batch).logits, theirs(**batch).logits, atol=1e-5)
    again = porting.load(tmp_path / "again")
    assert all(same_bits(tensor, again.state_dict()[name]) for name, tensor in module.state_dict().items())


def test_a_new_pooler_is_spelled_as_the_rest(tmp_path: Path) -> None:
    modern(tmp_path / "source", "BertForMaskedLM")
    with pytest.warns(PortingWarning, match="are new and untrained"):
        module = porting.load(tmp_path / "source", architecture="BertForPreTraining", fresh=True)
    result = porting.export(module, None, tmp_path / "again")
    assert set(result.new) == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
        "cls.seq_relationship.weight",
        "cls.seq_relationship.bias",
    }
    assert result.architecture == "BertForPreTraining"
    assert missing_and_unexpected(tmp_path / "again", "BertForPreTraining") == {}


# ------------------------------------------------------------------------------------------------------ what is refused


def test_without_a_table_or_a_config_it_says_what_to_pass(table: Path, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"load\(\) did not fill this tests\.own\.Own, and of the .* none names it"):
        porting.export(own.Own(own.SIZES), None, tmp_path / "new")

    class Bare(own.Own):
        def __init__(self) -> None:
            super().__init__(own.SIZES)
            del self.config

    with pytest.raises(TargetError, match=r"nothing says the config of this .*Bare.*\(pass config="):
        porting.export(Bare(), table, tmp_path / "new")
    with pytest.raises(TargetError, match=r"the Layer of this Own has no 'width', 'depth', 'words'"):
        porting.export(own.Own(own.SIZES), table, tmp_path / "new", config=own.Layer(2))
    assert not (tmp_path / "new").exists()


def test_what_no_tensor_holds_is_not_made_up(table: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"(?s)cannot be known from the right side alone.*like="):
        porting.export(own.Own(own.SIZES), table, tmp_path / "new")
    text = own.TABLE.replace(
        'source = ["model.shift [e]", "model.types [0 e]"]\ntarget = "shift [e]"\nfold = true',
        'source = "model.shift [e]"\ntarget = "shift [e]"',
    )
    with pytest.raises(PlanError) as caught:
        porting.export(own.Own(own.SIZES), own.table(tmp_path, text), tmp_path / "new")
    assert [str(fault.code) for fault in caught.value.faults] == ["irreversible"]
    assert "'model.positions.weight [(_2|t) e]" in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_tensors_that_cannot_be_written_are_all_named(table: Path, source: Path, tmp_path: Path) -> None:
    module = own.Own(own.SIZES)
    module.shift = nn.Parameter(module.shift.to("meta"))
    module.scaled = nn.Parameter(torch.ones(6).to_sparse())
    with pytest.raises(TargetError) as caught:
        porting.export(module, table, tmp_path / "new", like=source)
    sparse = "its layout is torch.sparse_coo, and checkpoints hold dense tensors (make it dense first)"
    assert str(caught.value).splitlines() == [
        "shift: it is on the meta device and has no values (load or initialise the module first) [tensor-unwritable]",
        f"scaled: {sparse} [tensor-unwritable]",
    ]


def freed(values: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory was given back."""
    values.untyped_storage().resize_(0)
    return values


def fake(values: torch.Tensor) -> torch.Tensor:
    mode: AbstractContextManager[object] = FakeTensorMode()
    with mode:
        return torch.zeros(values.shape)


@pytest.mark.parametrize("make", [freed, fake])
@pytest.mark.parametrize("anew", [True, False])
def test_tensors_without_memory_are_named(
    make: Callable[[torch.Tensor], torch.Tensor], anew: bool, table: Path, source: Path, tmp_path: Path
) -> None:
    module = own.Own(own.SIZES)
    module._parameters["scaled"] = make(torch.ones(6))  # type: ignore[assignment]  # no parameter can be made of it
    with pytest.raises(TargetError, match=r"^scaled: its values are not in memory: .*\[tensor-unwritable\]$"):
        porting.export(module, table, tmp_path / "new", **({"anew": True} if anew else {"like": source}))
    assert not (tmp_path / "new").exists()


REPEATED: dict[str, Callable[[], torch.Tensor]] = {
    "a number": lambda: torch.zeros(1).expand(10**12),
    "axes": lambda: torch.zeros(1, 1, 1).expand(10**4, 10**4, 10**4),
    "windows": lambda: torch.zeros(2 * 10**4).as_strided((10**4, 10**4), (1, 1)),
}


@pytest.mark.parametrize("kind", REPEATED)
@pytest.mark.parametrize("anew", [True, False])
def test_elements_that_are_repeated_are_written_within_the_limit(
    kind: str, anew: bool, table: Path, source: Path, tmp_path: Path
) -> None:
    """They take no memory, and the file would have gigabytes or terabytes."""
    module = own.Own(own.SIZES)
    module.head = nn.Linear(6, 2)
    module.head.bias = nn.Parameter(REPEATED[kind]())
    with pytest.raises(LimitError, match=r"^head.bias: this takes more than 268435456 bytes .*PORTING_LIMITS=made="):
        porting.export(module, table, tmp_path / "new", **({"anew": True} if anew else {"like": source}))
    assert not (tmp_path / "new").exists()
    module.head = nn.Linear(6, 7)
    module.head.bias = nn.Parameter(torch.ones(1).expand(7))
    with pytest.warns(PortingWarning, match="are not in it"):
        porting.export(module, table, tmp_path / "new", like=source)
    assert load_file(tmp_path / "new" / "model.safetensors")["head.bias"].tolist() == [1] * 7


def test_a_module_that_changed_since_it_was_loaded_says_so(module: own.Own, source: Path, tmp_path: Path) -> None:
    module.tokens = nn.Embedding(13, 6)
    module.decoder.weight = module.tokens.weight
    module.extra = nn.Linear(2, 2)
    with pytest.raises(PlanError) as caught:
        porting.export(module, None, tmp_path / "new")
    codes = [str(fault.code) for fault in caught.value.faults]
    assert {"shape-mismatch", "unwritten-parameter", "module-changed"} <= set(codes)
    assert f"does not fit the checkpoint that it was loaded from, {source}" in str(caught.value)
    assert "anew=True" in str(caught.value)


def test_untying_is_noticed(module: own.Own, tmp_path: Path) -> None:
    module.decoder.weight = nn.Parameter(module.tokens.weight.detach().clone())
    with pytest.raises(PlanError, match=r"\[tie-mismatch\]"):
        porting.export(module, None, tmp_path / "new")


@pytest.mark.parametrize("overwrite", [False, True])
def test_it_never_writes_onto_the_source(overwrite: bool, module: own.Own, source: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    (tmp_path / "link").symlink_to(source)
    for path in (source, source / "inside", tmp_path / "link", tmp_path):
        with pytest.raises(CheckpointError, match=r"\[destination-refused\]"):
            porting.export(module, None, path, overwrite=overwrite)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    other = own.write(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"\[destination-refused\]"):
        porting.export(module, None, source, like=other, overwrite=overwrite)


def test_what_stands_there_is_replaced_only_if_that_is_asked_for(module: own.Own, source: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    porting.export(module, None, again)
    with pytest.raises(CheckpointError, match=r"exists already.*overwrite=True"):
        porting.export(module, None, again)
    with torch.no_grad():
        module.shift.zero_()
    porting.export(module, None, again, overwrite=True)
    assert not load_file(again / "model.safetensors")["shift"].any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "own.toml", "source"]


def test_nothing_is_left_when_writing_fails(module: own.Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from porting.checkpoint import write

    def full(descriptor: int, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "write_all", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        porting.export(module, None, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.toml", "source"]


def test_a_source_that_is_gone_is_missed(module: own.Own, source: Path, tmp_path: Path) -> None:
    shutil.move(source, tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"is not there any more \(pass like= a copy of it"):
        porting.export(module, None, tmp_path / "again")
    porting.export(module, None, tmp_path / "again", like=tmp_path / "moved")
    own.assert_same_files(tmp_path / "moved", tmp_path / "again")


def test_side_files_of_a_directory_in_the_source_s_place_are_not_mixed_in(
    module: own.Own, source: Path, tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "other")
    (tmp_path / "other" / "vocab.txt").write_text("of another model\n")
    shutil.rmtree(source)
    (tmp_path / "other").rename(source)
    with pytest.raises(CheckpointError, match=r"the directory was replaced by another one .*like= a copy of it"):
        porting.export(module, None, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_source_whose_config_changed_is_not_mixed_in(module: own.Own, source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text(json.dumps({**own.CONFIG, "n_embd": 7}))
    with pytest.raises(CheckpointError, match=r"config\.json: it is not what it was when the checkpoint was opened"):
        porting.export(module, None, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call of the system write and read half of what it is asked to, as it may."""
    write, pwrite, pread, preadv = os.write, os.pwrite, os.pread, os.preadv

    def front(raw: bytes | memoryview) -> memoryview:
        return memoryview(raw).cast("B")[: -(-len(raw) // 2)]

    monkeypatch.setattr(os, "write", lambda to, raw: write(to, front(raw)))
    monkeypatch.setattr(os, "pwrite", lambda to, raw, at: pwrite(to, front(raw), at))
    monkeypatch.setattr(os, "pread", lambda of, count, at: pread(of, -(-count // 2), at))
    monkeypatch.setattr(os, "preadv", lambda of, rows, at: preadv(of, [front(rows[0])], at))


@pytest.mark.parametrize("to", [None, "bin", "dcp/model", "gguf", "npz"])
@pytest.mark.parametrize("how", ["export", "convert"])
def test_calls_that_do_less_than_they_are_asked_to_give_the_same_files(
    how: str, to: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str) -> dict[str, bytes]:
        path = tmp_path / name
        if how == "export":
            porting.export(loaded, None, path, to=to)
        else:
            porting.convert(tmp_path / "c", path, "bert", to=to)
        return {one.name: one.read_bytes() for one in path.iterdir()}

    loaded = porting.load(write_checkpoint(tmp_path / "c"))
    expected = make("whole")
    half(monkeypatch)
    assert make("halves") == expected


@pytest.mark.parametrize("to", ["dcp", "npz"])
def test_checksums_that_several_processes_write_are_whole(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.randn(50, 7), "b": torch.arange(9)}
    files = weight_files(None, tensors, to=to, where="x")
    write_directory(tmp_path / "d", files)
    (name,) = (name for name, content in files.items() if isinstance(content, TensorFile))
    expected, content = (tmp_path / "d" / name).read_bytes(), files[name]
    assert isinstance(content, TensorFile)
    assert content.shard is not None
    with (tmp_path / "d" / name).open("r+b") as file:
        for seal in content.shard.seals.values():
            for at in seal.places:
                file.seek(at)
                file.write(bytes(4))
    assert (tmp_path / "d" / name).read_bytes() != expected
    half(monkeypatch)
    with Places(layout({name: content}), Folder(tmp_path / "d")) as places:
        places.seal(0, 1)
    assert (tmp_path / "d" / name).read_bytes() == expected

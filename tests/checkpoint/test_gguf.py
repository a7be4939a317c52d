"""GGUF files: what the program that they come from wrote, files that lie, and files that other libraries load."""

from __future__ import annotations

import base64
import contextlib
import gc
import inspect
import json
import struct
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize
from gguf.scripts.gguf_convert_endian import convert_byteorder
from safetensors.torch import save_file

from porting.checkpoint import inspect_checkpoint, open_checkpoint, write_directory
from porting.checkpoint.container import WriteOptions
from porting.checkpoint.gguf import BLOCKS, DTYPES, Gguf
from porting.checkpoint.gguf_settings import ALIGNMENT, EXPECTED, SettingError, setting_bytes
from porting.checkpoint.write import TensorFile
from porting.comparing.differences import diff
from porting.converting.conversion import convert
from porting.errors import PortingError
from porting.notation.table import parse_table
from tests.checkpoint.hostile import refused
from tests.converting.drawing import elements, values

TYPES = {element.dtype: number for number, element in DTYPES.items()}


def listed(kind: int, count: int, more: bytes = b"") -> bytes:
    """A file of which one setting is a list."""
    settings = text("x") + struct.pack("<IIQ", 9, kind, count) + more
    return gguf(ONE, 1, b"", settings=settings, number=1)


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def described(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def gguf(
    infos: bytes, count: int, data: bytes, *, settings: bytes = b"", number: int = 0, version: int = 3, align: int = 32
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, count, number) + settings + infos
    return head + bytes(-len(head) % align) + data


def written(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """A file with these tensors, and settings of each kind."""
    infos = data = b""
    for name, tensor in tensors.items():
        infos += described(name, tuple(tensor.shape), TYPES[tensor.dtype], len(data))
        data += elements(tensor)
        data += bytes(-len(data) % 64)
    words = [text(f"w{number}") for number in range(5000)]
    settings = text("general.name") + struct.pack("<I", 8) + text("x")
    settings += text(ALIGNMENT) + struct.pack("<II", 4, 64)
    settings += text("tokens") + struct.pack("<IIQ", 9, 8, len(words)) + b"".join(words)
    settings += text("scores") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3)
    settings += text("flag") + struct.pack("<IB", 7, 1)
    return gguf(infos, len(tensors), data, settings=settings, number=5, align=64)


def test_each_type_is_read_to_the_bit(tmp_path: Path) -> None:
    tensors = {str(dtype): values((7, 3, 2), dtype, 1) for dtype in TYPES} | {"empty": torch.zeros(0, 3)}
    (tmp_path / "model.gguf").write_bytes(written(tensors))
    checkpoint = open_checkpoint(tmp_path)
    assert {name: elements(checkpoint.read(name)) for name in checkpoint.tensors} == {
        n: elements(t) for n, t in tensors.items()
    }
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == {
        n: tuple(t.shape) for n, t in tensors.items()
    }


PACKAGE = (
    "c-"
    "nJ!4|QW^U|;}Y1|(VpN~fphr4}XT=p_~<XJnS7CYO{JrE&npS)uYdIf=Q6g2)`bq@4WZ?D*vT(!3HDpdb?vi$WEY<Y%YmWmcsY>7"
    "}RV=IDXB#hgG14kW7?p>!gQk;DXL9NxnY6UxcfGtet%LUIXAJ2HTokim#%z5|*9uoW<CV6+?%Com8L8tfrvIskD45HA4Y13>%$WR"
    "D{Qg8&dK0I>lOI{<M25GOc-wOTM7kQBjf@&S8?173w^ZE?v10Kf7sO8"
)
"""What the package gguf 0.19.0 wrote of the tensors below, deflated, in base 85."""


def test_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(zlib.decompress(base64.b85decode(PACKAGE)))
    checkpoint = open_checkpoint(tmp_path)
    expected = {
        "blk.0.w": torch.arange(15.0).view(3, 5),
        "h": torch.tensor([0.5, -2, 1e-3], dtype=torch.float16),
        "b": torch.tensor([[1.5, -3.0], [1e30, 0.1]], dtype=torch.bfloat16),
    }
    assert {*checkpoint.tensors} == {*expected}
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())


def test_a_big_endian_file_is_named_and_read_after_the_gguf_package_has_converted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = tmp_path / "model.gguf", torch.arange(64.0).view(2, 32) / 7
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_tensor("w", expected.numpy().copy())
    writer.add_tensor("half", expected.half().numpy().copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(
        path, "a big-endian file of version 3, where little-endian files are read", "`gguf-convert-endian COPY little`"
    )
    monkeypatch.setattr("builtins.input", lambda prompt: "YES")
    convert_byteorder(GGUFReader(path, "r+"), Namespace(order="little", dry_run=False))
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.read("w"), expected)
    assert torch.equal(checkpoint.read("half"), expected.half())


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: BLOCKS[kind][0])
def test_each_quantised_type_is_unpacked_as_the_gguf_package_does(tmp_path: Path, kind: int) -> None:
    title, numbers, size = BLOCKS[kind]
    assert GGML_QUANT_SIZES[GGMLQuantizationType[title]] == (numbers, size)
    count = 6
    raw = np.random.default_rng(kind).integers(0, 60, (count, size), dtype=np.uint8)  # small, so that no scale is a NaN
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType(kind))).reshape(3, 2 * numbers)
    assert expected.isfinite().all()
    (tmp_path / "model.gguf").write_bytes(gguf(described("w", (3, 2 * numbers), kind, 0), 1, raw.tobytes()))
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("w"), expected)
    assert checkpoint.warnings[0].message == f"quantised tensors ({title}) are read as float32"
    part = memoryview(bytearray(44))
    checkpoint.pieces("w")[0].file.read_into(part, 4 * numbers - 20)
    assert bytes(part) == expected.numpy().tobytes()[4 * numbers - 20 :][:44]


def test_what_llama_cpp_calls_q8_0_is_close_to_what_it_was_made_of(tmp_path: Path) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    packed = quantize(weight.numpy(), GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"blk.{i}.attn_q.weight [o e]" = "q.{i} [e o]"\n')
    convert(tmp_path / "model.gguf", tmp_path / "out", table, derive=True, dtype=torch.float16)
    found = open_checkpoint(tmp_path / "out").read("q.0")
    assert found.dtype == torch.float16
    assert (found.float().T - weight).abs().max() < 0.02


def test_without_gguf_names_are_read_and_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf(described("w", (32,), 8, 0), 1, bytes(34)))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert open_checkpoint(tmp_path).tensors["w"].shape == (32,)
    refused(tmp_path, "needs the package gguf, which is not installed (pip install 'porting[gguf]')")


LLAMA = """\
[mapping]
name = "llama_gguf"
model_types = ["llama"]

[config]
vocab_size = "llama.vocab_size"
max_position_embeddings = "llama.context_length"
hidden_size = "llama.embedding_length"
num_hidden_layers = "llama.block_count"
intermediate_size = "llama.feed_forward_length"
num_attention_heads = "llama.attention.head_count"
num_key_value_heads = "llama.attention.head_count_kv"
head_dim = "llama.rope.dimension_count"
rms_norm_eps = "llama.attention.layer_norm_rms_epsilon"
"rope_parameters.rope_theta" = "llama.rope.freq_base"

[constants]
"general.architecture" = "llama"
"general.name" = "a small one"
"llama.pooling_type" = 0

[sizes]
h = "num_attention_heads"
g = "num_key_value_heads"
s = 2

[tensors]
"model.embed_tokens.weight" = "token_embd.weight"
"model.layers.{i}.self_attn.q_proj.weight [(h s d) e]" = "blk.{i}.attn_q.weight [(h d s) e]"
"model.layers.{i}.self_attn.k_proj.weight [(g s d) e]" = "blk.{i}.attn_k.weight [(g d s) e]"
"model.layers.{i}.self_attn.{p:v_proj,o_proj}.weight" = "blk.{i}.attn_{p:v,output}.weight"
"model.layers.{i}.mlp.{p:gate,up,down}_proj.weight" = "blk.{i}.ffn_{p:gate,up,down}.weight"
"model.layers.{i}.{n:input,post_attention}_layernorm.weight" = "blk.{i}.{n:attn,ffn}_norm.weight"
"model.norm.weight" = "output_norm.weight"
"lm_head.weight" = "output.weight"
"""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small random Llama of transformers, with a whole number where llama.cpp reads a fraction."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, intermediate_size=40,
        vocab_size=320, rms_norm_eps=1e-3, max_position_embeddings=64, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "llama")
    text = (tmp_path / "llama/config.json").read_text()
    (tmp_path / "llama/config.json").write_text(text.replace('"rope_theta": 500.0', '"rope_theta": 500'))
    return tmp_path / "llama"


def test_transformers_loads_a_written_file_and_computes_the_same(llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", exc_type=ImportError)  # without which transformers reads no GGUF file
    done = convert(llama, tmp_path / "out", parse_table(LLAMA), derive=True, to="gguf")
    assert "no vocabulary, without which llama.cpp does not load it" in done.warnings[-1]
    assert not (tmp_path / "out/config.json").exists()
    loader: Any = transformers.AutoModelForCausalLM
    loaded, info = loader.from_pretrained(tmp_path / "out", gguf_file="model.gguf", output_loading_info=True)
    assert not any(info.values())
    words = torch.randint(0, 31, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = loader.from_pretrained(llama)(words).logits, loaded(words).logits
    assert torch.equal(found, expected)
    assert loaded.config.rope_parameters["rope_theta"] == 500


def test_a_written_file_alone_comes_back_with_its_config(llama: Path, tmp_path: Path) -> None:
    """The settings are the config: nothing beside the file is needed, on the way back or with a table from the left."""
    convert(llama, tmp_path / "out", parse_table(LLAMA), derive=True, to="gguf")
    (tmp_path / "alone").mkdir()
    (tmp_path / "out/model.gguf").rename(tmp_path / "alone/model.gguf")
    assert inspect_checkpoint(tmp_path / "alone").model_type == "llama"
    convert(tmp_path / "alone", tmp_path / "back", parse_table(LLAMA), reverse=True)
    assert diff(tmp_path / "back", llama).equal
    config, before = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("back", "llama"))
    assert config.pop("rope_parameters") == {"rope_theta": 500}
    assert config["rms_norm_eps"] == 1e-3
    assert config == {name: before[name] for name in config}


@pytest.fixture
def spoken(llama: Path) -> Path:
    """The same with a small tokenizer of byte-level BPE, whose first special token is one of its vocabulary."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
    made.train_from_iterator(["the table of the tensors of the model"] * 3, trainer)
    made.add_special_tokens(["</s>"])
    made.add_tokens(["<mine>"])
    fast = tokenizer_of(tokenizer_object=made, **SPECIAL)
    fast.chat_template = "{{ messages }}"
    fast.save_pretrained(llama)
    return llama


tokenizer_of: Any = transformers.PreTrainedTokenizerFast
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEXT = "the tensors, h\u00e9llo <s> of </s> <mine> 123"


def test_transformers_reads_the_tokenizer_of_a_written_file(spoken: Path, tmp_path: Path) -> None:
    known, rows = len(transformers.AutoTokenizer.from_pretrained(spoken)), 320
    table = LLAMA.replace('"llama.pooling_type" = 0', '"tokenizer.ggml.pre" = "gpt-2"')
    table = table.replace('"general.name" =', '"tokenizer.ggml.bos_token_id" = 9\n"general.name" =')
    done = convert(spoken, tmp_path / "out", parse_table(table), derive=True, to="gguf")
    assert not [one for one in done.warnings if "llama.cpp" in one]
    (tmp_path / "alone").mkdir()
    (tmp_path / "out/model.gguf").rename(tmp_path / "alone/model.gguf")
    loader: Any = transformers.AutoTokenizer
    before, after = loader.from_pretrained(spoken), loader.from_pretrained(tmp_path / "alone", gguf_file="model.gguf")
    assert after(TEXT)["input_ids"] == before(TEXT)["input_ids"]
    assert after.decode(after(TEXT)["input_ids"]) == before.decode(before(TEXT)["input_ids"])
    fields = GGUFReader(tmp_path / "alone/model.gguf").fields
    found = {name: fields[f"tokenizer.{name}"].contents() for name in ("ggml.tokens", "ggml.token_type", "ggml.pre")}
    kinds = dict(zip(found["ggml.tokens"], found["ggml.token_type"], strict=True))
    assert len(kinds) == rows, "as many as the embedding has rows"
    assert {name: kinds[name] for name in ("<s>", "</s>", "<mine>", "the", f"[PAD{known}]")} == {
        "<s>": 3, "</s>": 3, "<mine>": 4, "the": 1, f"[PAD{known}]": 5,
    }  # fmt: skip
    assert found["ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"].contents() == before.eos_token_id
    assert fields["tokenizer.ggml.bos_token_id"].contents() == 9, "the table has the last word"
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"


def test_the_pieces_of_sentencepiece_are_written_with_their_scores(llama: Path, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", exc_type=ImportError)
    (tmp_path / "text").write_text("the tensors of the table of the model\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=tmp_path / "text", model_prefix=tmp_path / "small", vocab_size=300, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "small.model").rename(llama / "tokenizer.model")
    convert(llama, tmp_path / "out", parse_table(LLAMA), derive=True, to="gguf")
    pieces = sentencepiece.SentencePieceProcessor(str(llama / "tokenizer.model"))
    fields = GGUFReader(tmp_path / "out/model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    known = range(len(pieces))
    found = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores")}
    assert found["tokens"][: len(known)] == [pieces.id_to_piece(number) for number in known]
    assert found["scores"][: len(known)] == pytest.approx([pieces.get_score(number) for number in known])


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (None, "there is no tokenizer.json, vocab.json or tokenizer.model"),
        (b"{", "tokenizer.json: not JSON at character 1: Expecting property name"),
        (b'{"model": {"type": "WordPiece"}}', "the package gguf does not read the tokenizer: 'Cannot find GPT-2 BPE"),
        (b"[" * 200_000, "tokenizer.json: nested too deeply"),
        (b"{}", "the package gguf does not read the tokenizer: \"'model'\""),
    ],
)
def test_a_file_without_a_vocabulary_is_a_warning(llama: Path, tmp_path: Path, raw: bytes | None, reason: str) -> None:
    if raw is not None:
        (llama / "tokenizer.json").write_bytes(raw)
    done = convert(llama, tmp_path / "out", parse_table(LLAMA), derive=True, to="gguf")
    start = "model.gguf has no vocabulary, without which llama.cpp does not load it: "
    assert [one for one in done.warnings if one.startswith(start + reason)]
    assert len(open_checkpoint(tmp_path / "out").tensors) == 21


def test_without_the_gguf_package_tensors_are_written(
    spoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    done = convert(spoken, tmp_path / "out", parse_table(LLAMA), derive=True, to="gguf")
    assert [one for one in done.warnings if one.endswith("is not installed (pip install 'porting[gguf]')")]


def test_the_gguf_package_reads_the_settings_and_the_tensors(tmp_path: Path) -> None:
    tensors = {str(dtype): values((3, 2, 5), dtype, 1) for dtype in TYPES if dtype != torch.bfloat16}
    settings = {
        "general": {"architecture": "x"}, "x": {
            "rope": {"freq_base": 10000}, "names": ["a", "b\u00e9"], "per_layer": [3, 4], "mixed": [1, 2.5],
            "large": 1 << 40, "below": -3, "yes": True, "nothing": None, "whole_scale": 3, "eight_size": 8.0,
        },
    }  # fmt: skip
    outline = Gguf().outline(tensors, WriteOptions(where="x", settings=settings))
    (shard,) = outline.shards
    write_directory(tmp_path / "out", {shard.name: TensorFile(tensors=tensors, shard=shard)})
    reader = GGUFReader(tmp_path / "out/model.gguf")
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert found == {
        "general.architecture": "x", "x.rope.freq_base": 10000.0, "x.names": ["a", "b\u00e9"], "x.per_layer": [3, 4],
        "x.mixed": [1.0, 2.5], "x.large": 1 << 40, "x.below": -3, "x.yes": True, "x.whole_scale": 3.0,
        "x.eight_size": 8,
    }  # fmt: skip
    assert next(iter(found)) == "general.architecture"
    assert reader.fields["x.rope.freq_base"].types == [GGUFValueType.FLOAT32]
    assert {one.name for one in reader.tensors} == {*tensors}
    for one in reader.tensors:
        assert one.data.reshape(3, 2, 5).tobytes() == elements(tensors[one.name])
        assert one.data_offset % 32 == 0
    config: Any = open_checkpoint(tmp_path / "out").config
    assert config["x"]["per_layer"] == [3, 4]


@pytest.mark.parametrize(
    ("kind", "probe", "others"),
    [
        (GGUFValueType.UINT32, 8, (True, 2.5, "2", -1, 1 << 32, float("nan"), [2.5])),
        (GGUFValueType.FLOAT32, 1.5, (True, "1e-5", float("inf"), float("nan"), 1e300, 1e-60, 10**290, 10**400)),
        (GGUFValueType.BOOL, True, (1, "true", [True])),
        (GGUFValueType.STRING, "a", (1, True, ["a"], "\ud800")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_settings_have_the_types_that_the_gguf_package_gives_them(
    kind: GGUFValueType, probe: object, others: tuple[object, ...]
) -> None:
    """llama.cpp refuses a file with a setting of another type; each method of GGUFWriter says which it is."""
    seen = set[str]()
    for name, method in vars(GGUFWriter).items():
        if not name.startswith("add_") or len(inspect.signature(method).parameters) != 2:
            continue
        for argument in (probe, SimpleNamespace(value=probe)):
            writer = GGUFWriter(None, "llama")
            with contextlib.suppress(Exception):  # of methods that take something else
                method(writer, argument)
            for key, value in writer.kv_data[0].items():
                if value.type != kind or key in (name, "general.architecture") or key in seen:
                    continue
                assert setting_bytes(key, probe).startswith(text(key) + struct.pack("<I", kind)), key
                expected = next((one for one in EXPECTED if one.names.search(key)), None)
                seen |= {key} if expected is not None else set()
                for other in others if expected is not None else ():
                    with pytest.raises(
                        SettingError, match=r"is .*: (llama.cpp reads|float32, in which|it holds|general.alig)"
                    ):
                        setting_bytes(key, other)
    assert len(seen) > 10


BROKEN = [
    ({"x": {"a.b": 1, "a": {"b": 2}}}, "the setting 'x.a.b' would be there twice"),
    ({"": 1}, "the setting '' is '1': its name is not of 1 to 65535 bytes"),
    ({"k" * 70_000: 1}, "its name is not of 1 to 65535 bytes"),
    ({"a\x1b[2J": 1}, r"the setting 'a\\x1b\[2J' is '1': its name is not"),
    ({"a\u202e": 1}, r"the setting 'a\\u202e' is '1': its name is not"),
    ({"\ud800": 1}, r"the setting '\\ud800' is '1': its name is not"),
    ({"a": "\ud800"}, "which is not Unicode text"),
    ({"a": ["b", "c\udfff"]}, "which is not Unicode text"),
    ({"a": 1e300}, "float32, in which GGUF holds it, has no number that large"),
    ({"a": [1e300, 1]}, "float32, in which GGUF holds it, has no number that large"),
    ({"a": [1.5, 10**290]}, "GGUF has numbers, texts and lists of one kind"),
    ({"a": 1e-60}, "float32, in which GGUF holds it, has no number that small"),
    ({"tokenizer": {"ggml": {"tokens": "a"}}}, "llama.cpp reads a list there"),
    ({"tokenizer": {"ggml": {"token_type": [1, 1 << 31]}}}, "it does not fit into 32 bits with a sign"),
    ({"general": {"architecture": ["llama"]}}, "llama.cpp reads a text there, and no list"),
    *(({"general": {"alignment": one}}, "general.alignment is not a power of two from 8 to 65536")
      for one in (0, 1, 4, 24, -32, 1 << 17, 1 << 40, True, "64", 64.5, float("inf"))),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), BROKEN, ids=[str(number) for number in range(len(BROKEN))])
def test_settings_that_no_reader_accepts_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(PortingError, match=message) as caught:
        Gguf().outline({"w": torch.zeros(2)}, WriteOptions(where="x", settings=settings))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("alignment", [8, 16, 64, 64.0, 4096, 1 << 16])
def test_tensors_begin_at_multiples_of_the_alignment_that_the_settings_say(alignment: float, tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((number + 5,), float(number)) for number in range(7)}
    settings = {"general": {"architecture": "x", "alignment": alignment}}
    (shard,) = Gguf().outline(tensors, WriteOptions(where="x", settings=settings)).shards
    write_directory(tmp_path / "out", {shard.name: TensorFile(tensors=tensors, shard=shard)})
    found = open_checkpoint(tmp_path / "out")
    assert {name: elements(found.read(name)) for name in found.tensors} == {
        name: elements(tensor) for name, tensor in tensors.items()
    }
    read = {one.name: one for one in GGUFReader(tmp_path / "out/model.gguf").tensors}
    assert all(read[name].data.tobytes() == elements(tensor) for name, tensor in tensors.items())
    assert all(one.data_offset % alignment == 0 for one in read.values())


def test_the_header_of_many_tensors_takes_a_time_that_grows_with_their_number() -> None:
    def seconds(count: int) -> float:
        """The least of a few times: what else runs, and the collector, only add to it."""
        tensors = {f"blk.{number}.ffn_down_exps.weight": torch.empty(2, 2, device="meta") for number in range(count)}
        taken = []
        gc.disable()
        try:
            for _ in range(4):
                begin = time.process_time()
                Gguf().outline(tensors, WriteOptions(where="x"))
                taken.append(time.process_time() - begin)
        finally:
            gc.enable()
        return min(taken)

    seconds(100)
    assert seconds(24_000) < 20 * seconds(3_000)


def test_vectors_are_float32_in_a_file_of_other_dtypes(tmp_path: Path) -> None:
    tensors = {"w": torch.rand(4, 8).bfloat16(), "norm": torch.rand(8).bfloat16(), "count": torch.tensor([3])}
    save_file(tensors, tmp_path / "model.safetensors")
    table = parse_table('[mapping]\nname = "t"\n[tensors]\n"{*n}" = "{*n}"\n')
    done = convert(tmp_path / "model.safetensors", tmp_path / "out", table, derive=True, to="gguf")
    found = open_checkpoint(tmp_path / "out")
    dtypes = {name: one.dtype for name, one in found.tensors.items()}
    assert dtypes == {"w": torch.bfloat16, "norm": torch.float32, "count": torch.int64}
    assert torch.equal(found.read("norm"), tensors["norm"].float())
    assert any("without which llama.cpp does not load it" in one for one in done.warnings)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w", torch.zeros(2, 2, 2, 2, 2), "it has 5 dimensions, and ggml has 4"),
        ("w" * 64, torch.zeros(2), "its name has 64 bytes, and ggml has room for 63"),
        ("w", torch.zeros(2, dtype=torch.bool), "GGUF has no type for its dtype torch.bool"),
        ("w", torch.zeros(2, dtype=torch.float8_e5m2), r"torch.float8_e5m2 \(pass dtype=torch.float32\)"),
    ],
)
def test_what_ggml_has_no_room_for_is_refused(name: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(PortingError, match=message):
        Gguf().outline({name: tensor}, WriteOptions(where="x"))


@pytest.mark.parametrize("value", [[1, "a"], {1}, [[1]], 1 << 70, [True, 1]])
def test_a_setting_that_gguf_cannot_hold_is_named(value: object) -> None:
    with pytest.raises(PortingError, match=r"the setting 'a\.b' is"):
        Gguf().outline({"w": torch.zeros(2)}, WriteOptions(where="x", settings={"a": {"b": value}}))


ONE = described("a", (4,), 0, 0)
BEHIND = described("b", (4,), 0, 32)
ALIGNED = text(ALIGNMENT) + struct.pack("<II", 4, 32)

HOSTILE: list[tuple[str, Callable[[], bytes], str]] = [
    ("another magic", lambda: b"GGML" + bytes(60), "this does not begin as a GGUF file does"),
    ("version 1", lambda: gguf(ONE, 1, bytes(16), version=1), "version 1, where the versions 2 and 3 are read"),
    ("version 4", lambda: gguf(ONE, 1, bytes(16), version=4), "version 4, where the versions 2 and 3 are read"),
    ("version 10^9", lambda: gguf(ONE, 1, b"", version=10**9), "versions 2 and 3 are read (the file is damaged"),
    ("big-endian", lambda: gguf(ONE, 1, bytes(16), version=3 << 24), "a big-endian file of version 3"),
    ("2^60 tensors", lambda: gguf(ONE, 2**60, bytes(16)), "do not fit into"),
    ("2^60 settings", lambda: gguf(ONE, 1, bytes(16), number=2**60), "do not fit into"),
    ("cut short", lambda: gguf(ONE, 1, bytes(16))[:50], "it ends in the middle of its header"),
    ("a name of 2^60 bytes", lambda: gguf(struct.pack("<Q", 2**60) + bytes(30), 1, b""), "a name of 11529215046068"),
    ("a name that is not text", lambda: gguf(ONE.replace(b"a", b"\xff"), 1, bytes(16)), "a name that is not UTF-8"),
    ("a control character", lambda: gguf(ONE.replace(b"a", b"\n"), 1, bytes(16)), "control character U+000A"),
    ("10^9 dimensions", lambda: gguf(text("a") + struct.pack("<I", 10**9) + bytes(40), 1, b""), "1000000000 dimen"),
    ("a size of 2^62", lambda: gguf(described("a", (2**62,), 0, 0), 1, bytes(16)), "overflows 64 bits"),
    ("a tensor behind the end", lambda: gguf(ONE, 1, bytes(12)), "its 16 bytes from byte 64 on do not lie in"),
    ("a place of 2^63", lambda: gguf(described("a", (4,), 0, 2**63), 1, bytes(16)), "do not lie in the file's"),
    ("a place of no alignment", lambda: gguf(described("a", (4,), 0, 4), 1, bytes(99)), "4, is not a multiple of 32"),
    ("two tensors in one place", lambda: gguf(ONE + described("b", (4,), 0, 0), 2, bytes(16)), "are also those of 'a'"),
    ("a name twice", lambda: gguf(ONE + BEHIND.replace(b"b", b"a"), 2, bytes(48)), "it is there twice"),
    ("a part of a block", lambda: gguf(described("a", (32,), 12, 0), 1, bytes(99)), "of 32 are not a whole number"),
    ("a block of no axes", lambda: gguf(described("a", (), 12, 0), 1, bytes(99)), "of 1 are not a whole number of"),
    ("blocks behind the end", lambda: gguf(described("a", (2, 32), 8, 0), 1, bytes(9)), "its 68 bytes from byte 96 on"),
    ("blocks in one place", lambda: gguf(described("a", (32,), 8, 0) + described("b", (4,), 0, 32), 2, bytes(99)),
     "are also those of 'a'"),
    ("a type that is never stored", lambda: gguf(described("a", (32,), 9, 0), 1, bytes(99)), "the type Q8_1, which"),
    ("an unknown type", lambda: gguf(described("a", (32,), 999, 0), 1, bytes(99)), "the unknown type 999, which"),
    ("no alignment", lambda: gguf(ONE, 1, b"", settings=text(ALIGNMENT) + bytes([4, 0, 0, 0, 0, 0, 0, 0]), number=1),
     "general.alignment is not a power of two"),
    ("an alignment of 64 bits",
     lambda: gguf(ONE, 1, b"", settings=text(ALIGNMENT) + struct.pack("<IQ", 10, 64), number=1),
     "general.alignment is not a power of two"),
    ("an alignment of 24",
     lambda: gguf(ONE, 1, b"", settings=text(ALIGNMENT) + bytes([4, 0, 0, 0, 24, 0, 0, 0]), number=1),
     "general.alignment is not a power of two"),
    ("two alignments", lambda: gguf(ONE, 1, bytes(99), settings=2 * ALIGNED, number=2),
     "'general.alignment' is there twice"),
    ("another setting twice", lambda: gguf(ONE, 1, bytes(99), settings=2 * (text("a") + bytes(5)), number=2),
     "'a' is there twice"),
    ("lists in a list", lambda: listed(9, 1, bytes(9)), "a setting of the type 9"),
    ("a list of 2^62 strings", lambda: listed(8, 2**62), "it ends in the middle of its header"),
    ("5 million empty strings", lambda: listed(8, 5 * 10**6, bytes(40 * 10**6)), "as much as one command may spend"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, make: Callable[[], bytes], message: str) -> None:
    (tmp_path / "model.gguf").write_bytes(make())
    with pytest.raises(PortingError) as caught:
        open_checkpoint(tmp_path)
    assert message in str(caught.value)
    assert all(line.isprintable() for line in str(caught.value).split("\n"))


def test_a_file_of_another_name_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "weights.dat").write_bytes(written({"a": torch.ones(2)}))
    refused(tmp_path / "weights.dat", "a GGUF file whose name does not say so (rename it to end in .gguf)")

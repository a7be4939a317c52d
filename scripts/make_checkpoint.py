"""Write a synthetic BERT checkpoint in HuggingFace's layout: the size of a real one, none of its knowledge.

    python -m scripts.make_checkpoint /tmp/bert-base

Every parameter is drawn at the scale that training leaves behind, biases and norms too, for a freshly
initialised model hides what a port can get wrong. A parameter's values depend on the seed and on what it is,
and not on how it is spelled, cast, sharded or stored: two checkpoints of one seed are one model.

The files are written here by hand, tensor by tensor, and not by :mod:`porting`: what reads them shall not
have made them.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from pathlib import Path
from typing import Annotated, TypeAlias

import torch
import typer
from torch import Tensor

DTYPES = {
    "float64": (torch.float64, "F64"),
    "float32": (torch.float32, "F32"),
    "float16": (torch.float16, "F16"),
    "bfloat16": (torch.bfloat16, "BF16"),
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


Drawn: TypeAlias = tuple[str, tuple[int, ...], float, float]
"""A name, a shape, a mean and a standard deviation."""


class Head(StrEnum):
    """What stands on the encoder; the value is the architecture that the config names."""

    NONE = "BertModel"
    PRE_TRAINING = "BertForPreTraining"
    MASKED_LM = "BertForMaskedLM"
    NEXT_SENTENCE = "BertForNextSentencePrediction"
    SEQUENCE = "BertForSequenceClassification"
    TOKEN = "BertForTokenClassification"  # noqa: S105 - an architecture, no password
    MULTIPLE_CHOICE = "BertForMultipleChoice"
    QUESTION_ANSWERING = "BertForQuestionAnswering"


class FileFormat(StrEnum):
    """How the weights are stored."""

    SAFETENSORS = "safetensors"
    BIN = "bin"


@dataclass(frozen=True, kw_only=True)
class Size:
    """The numbers of ``config.json`` that shapes depend on; BERT-base's unless told."""

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    num_labels: int = 2


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One tensor to be written.

    Attributes:
        name: as current versions of transformers spell it, with ``bert.``; decides the values.
        stored: as it is spelled in the file.
        shape: of the tensor.
        mean, std: of the normal distribution it is drawn from; ``std`` 0 stands for the positions 0, 1, 2,
            ... as int64.
    """

    name: str
    stored: str
    shape: tuple[int, ...]
    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How the names are spelled in the file, and what stands in it twice.

    Attributes:
        legacy: LayerNorm's ``gamma`` and ``beta``, as the first releases have them, for ``weight`` and
            ``bias``.
        prefix: ``bert.`` before the encoder's names.
        duplicates: what older versions stored as well: the tied decoder's weight and bias, and the position
            ids.
    """

    legacy: bool = False
    prefix: bool = True
    duplicates: bool = False


def parameters(*, size: Size, head: Head, spelling: Spelling) -> list[Parameter]:
    """All tensors of a checkpoint, in the order in which transformers saves them."""
    return [
        Parameter(name=name, stored=_spell(name, spelling), shape=shape, mean=mean, std=std)
        for name, shape, mean, std in _tensors(size, head, duplicates=spelling.duplicates)
    ]


def _spell(name: str, spelling: Spelling) -> str:
    if spelling.legacy:
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    return name if spelling.prefix else name.removeprefix("bert.")


def _tensors(size: Size, head: Head, *, duplicates: bool) -> Iterator[Drawn]:
    hidden, inner = size.hidden_size, size.intermediate_size
    if duplicates:
        yield "bert.embeddings.position_ids", (1, size.max_position_embeddings), 0.0, 0.0
    for kind, rows in (
        ("word", size.vocab_size),
        ("position", size.max_position_embeddings),
        ("token_type", size.type_vocab_size),
    ):
        yield f"bert.embeddings.{kind}_embeddings.weight", (rows, hidden), 0.0, 0.05
    yield from _norm("bert.embeddings", hidden)
    for index in range(size.num_hidden_layers):
        layer = f"bert.encoder.layer.{index}"
        for projection in ("query", "key", "value"):
            yield from _linear(f"{layer}.attention.self.{projection}", hidden, hidden)
        yield from _linear(f"{layer}.attention.output.dense", hidden, hidden)
        yield from _norm(f"{layer}.attention.output", hidden)
        yield from _linear(f"{layer}.intermediate.dense", inner, hidden)
        yield from _linear(f"{layer}.output.dense", hidden, inner)
        yield from _norm(f"{layer}.output", hidden)
    if head not in {Head.MASKED_LM, Head.TOKEN, Head.QUESTION_ANSWERING}:  # these read tokens, not the pooled vector
        yield from _linear("bert.pooler.dense", hidden, hidden)
    if head in {Head.PRE_TRAINING, Head.MASKED_LM}:
        yield "cls.predictions.bias", (size.vocab_size,), 0.0, 0.05
        yield from _linear("cls.predictions.transform.dense", hidden, hidden)
        yield from _norm("cls.predictions.transform", hidden)
        if duplicates:
            yield "cls.predictions.decoder.weight", (size.vocab_size, hidden), 0.0, 0.05
            yield "cls.predictions.decoder.bias", (size.vocab_size,), 0.0, 0.05
    if head in {Head.PRE_TRAINING, Head.NEXT_SENTENCE}:
        yield from _linear("cls.seq_relationship", 2, hidden)
    if head in {Head.SEQUENCE, Head.TOKEN}:
        yield from _linear("classifier", size.num_labels, hidden)
    if head is Head.MULTIPLE_CHOICE:
        yield from _linear("classifier", 1, hidden)
    if head is Head.QUESTION_ANSWERING:
        yield from _linear("qa_outputs", 2, hidden)


def _linear(name: str, out_features: int, in_features: int) -> Iterator[Drawn]:
    yield f"{name}.weight", (out_features, in_features), 0.0, in_features**-0.5  # 0.036 in BERT-base, which has 0.04
    yield f"{name}.bias", (out_features,), 0.0, 0.05


def _norm(name: str, features: int) -> Iterator[Drawn]:
    yield f"{name}.LayerNorm.weight", (features,), 1.0, 0.1
    yield f"{name}.LayerNorm.bias", (features,), 0.0, 0.05


TIED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}


def draw(parameter: Parameter, *, seed: int, dtype: torch.dtype) -> Tensor:
    """A parameter's values: drawn in float32 from the seed and the name, then cast."""
    if parameter.std == 0.0:
        return torch.arange(parameter.shape[-1]).expand(parameter.shape).contiguous()
    name = TIED.get(parameter.name, parameter.name)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))  # it takes 32 bits and no more
    return torch.randn(parameter.shape, generator=generator).mul_(parameter.std).add_(parameter.mean).to(dtype)


def write_checkpoint(
    path: Path,
    *,
    size: Size | None = None,
    head: Head = Head.PRE_TRAINING,
    spelling: Spelling | None = None,
    dtype: str = "float32",
    file_format: FileFormat = FileFormat.SAFETENSORS,
    shard_bytes: int | None = None,
    seed: int = 0,
) -> int:
    """Write a checkpoint, whole or not at all; ``safetensors`` holds one tensor in memory at a time, ``bin`` one shard.

    Args:
        path: the directory to be made.
        size: the model's; None for BERT-base.
        head: what stands on the encoder.
        spelling: of the names; None for what transformers writes today.
        dtype: of the weights: ``float64``, ``float32``, ``float16`` or ``bfloat16``.
        file_format: how the weights are stored.
        shard_bytes: what one file of weights holds at most, if not a single tensor is larger; None for one
            file.
        seed: of the values.

    Returns:
        The number of parameters, duplicates and position ids not counted.

    Raises:
        FileExistsError: there is something at ``path``.
    """
    size, spelling = size or Size(), spelling or Spelling()
    if path.exists():
        raise FileExistsError(f"{path} exists; choose another directory")
    tensors = parameters(size=size, head=head, spelling=spelling)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        _write_weights(temporary, tensors, dtype=dtype, file_format=file_format, shard_bytes=shard_bytes, seed=seed)
        _write_json(temporary / "config.json", _config(size, head, dtype))
        _write_vocabulary(temporary, size)
        temporary.chmod(0o755)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary)
        raise
    return sum(prod(tensor.shape) for tensor in tensors if tensor.std and tensor.name not in TIED)


def _write_weights(
    folder: Path,
    tensors: Sequence[Parameter],
    *,
    dtype: str,
    file_format: FileFormat,
    shard_bytes: int | None,
    seed: int,
) -> None:
    shards = list(_shards(tensors, dtype=dtype, shard_bytes=shard_bytes))
    stem, suffix = {FileFormat.SAFETENSORS: ("model", "safetensors"), FileFormat.BIN: ("pytorch_model", "bin")}[
        file_format
    ]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = folder / f"{stem}{part}.{suffix}"
        weight_map |= {tensor.stored: file.name for tensor in shard}
        if file_format is FileFormat.SAFETENSORS:
            _write_safetensors(file, shard, dtype=dtype, seed=seed)
        else:
            torch.save({tensor.stored: draw(tensor, seed=seed, dtype=DTYPES[dtype][0]) for tensor in shard}, file)
    if len(shards) > 1:
        total = sum(_bytes(tensor, dtype) for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / f"{stem}.{suffix}.index.json", index)


def _shards(tensors: Sequence[Parameter], *, dtype: str, shard_bytes: int | None) -> Iterator[list[Parameter]]:
    shard: list[Parameter] = []
    held = 0
    for tensor in tensors:
        needed = _bytes(tensor, dtype)
        if shard and shard_bytes is not None and held + needed > shard_bytes:
            yield shard
            shard, held = [], 0
        shard.append(tensor)
        held += needed
    yield shard


def _bytes(tensor: Parameter, dtype: str) -> int:
    return prod(tensor.shape) * (DTYPES[dtype][0].itemsize if tensor.std else torch.int64.itemsize)


def _write_safetensors(file: Path, tensors: Sequence[Parameter], *, dtype: str, seed: int) -> None:
    """The length of the header (8 bytes, little-endian), the header (JSON, padded to 8 bytes), the values."""
    ordered = sorted(tensors, key=lambda tensor: tensor.std != 0.0)  # stable: int64 first, so that all are aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in ordered:
        begin, end = end, end + _bytes(tensor, dtype)
        code = DTYPES[dtype][1] if tensor.std else "I64"
        header[tensor.stored] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in ordered:
            stream.write(draw(tensor, seed=seed, dtype=DTYPES[dtype][0]).view(torch.uint8).numpy().data)


def _config(size: Size, head: Head, dtype: str) -> dict[str, object]:
    count = size.num_labels if head in {Head.SEQUENCE, Head.TOKEN} else 2
    labels = {str(number): f"LABEL_{number}" for number in range(count)}
    return {
        "architectures": [head.value],
        "attention_probs_dropout_prob": 0.1,
        "dtype": dtype,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": size.hidden_size,
        "id2label": labels,
        "initializer_range": 0.02,
        "intermediate_size": size.intermediate_size,
        "label2id": {label: int(number) for number, label in labels.items()},
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": size.max_position_embeddings,
        "model_type": "bert",
        "num_attention_heads": size.num_attention_heads,
        "num_hidden_layers": size.num_hidden_layers,
        "pad_token_id": 0,
        "type_vocab_size": size.type_vocab_size,
        "vocab_size": size.vocab_size,
    }


def _write_vocabulary(folder: Path, size: Size) -> None:
    """Letters, digits and punctuation, enough to spell any English text; then made-up words, to fill the table."""
    marks = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    spelled = [*SPECIAL, *marks, *(f"##{mark}" for mark in marks if mark.isalnum())]
    syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
    made_up = ("".join(word) for count in itertools.count(2) for word in itertools.product(syllables, repeat=count))
    words = [*spelled[: size.vocab_size], *itertools.islice(made_up, max(0, size.vocab_size - len(spelled)))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    settings = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    limit = {
        "do_lower_case": True,
        "model_max_length": size.max_position_embeddings,
        "tokenizer_class": "BertTokenizer",
    }
    _write_json(folder / "tokenizer_config.json", {**settings, **limit})


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


BASE = Size()


def main(
    path: Annotated[Path, typer.Argument(help="The directory to make.")],
    layers: Annotated[int, typer.Option(min=1, help="Encoder layers.")] = BASE.num_hidden_layers,
    hidden_size: Annotated[int, typer.Option(min=64, help="A multiple of 64, the size of a head.")] = BASE.hidden_size,
    vocab_size: Annotated[int, typer.Option(min=1, help="Word pieces.")] = BASE.vocab_size,
    positions: Annotated[int, typer.Option(min=1, help="The longest text, in tokens.")] = BASE.max_position_embeddings,
    labels: Annotated[int, typer.Option(min=1, help="Classes of a classifier.")] = BASE.num_labels,
    head: Annotated[Head, typer.Option(help="What stands on the encoder.")] = Head.PRE_TRAINING,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="How weights are stored.")
    ] = FileFormat.SAFETENSORS,
    shard_mb: Annotated[
        int | None, typer.Option(min=1, help="Megabytes in a file at most; one file if not given.")
    ] = None,
    legacy: Annotated[bool, typer.Option(help="LayerNorm.gamma and .beta for .weight and .bias.")] = False,
    prefix: Annotated[bool, typer.Option(help="bert. before the encoder's names.")] = True,
    duplicates: Annotated[bool, typer.Option(help="The tied decoder and the position ids as well.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the values.")] = 0,
) -> None:
    """Write a synthetic BERT checkpoint: BERT-base's size, every parameter at realistic scale."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")
    if hidden_size % 64:
        raise typer.BadParameter(f"{hidden_size} is not a multiple of 64", param_hint="--hidden-size")
    size = Size(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=positions,
        num_labels=labels,
    )
    try:
        count = write_checkpoint(
            path,
            size=size,
            head=head,
            spelling=Spelling(legacy=legacy, prefix=prefix, duplicates=duplicates),
            dtype=dtype,
            file_format=file_format,
            shard_bytes=shard_mb and shard_mb * 10**6,
            seed=seed,
        )
    except FileExistsError as error:
        raise typer.BadParameter(str(error), param_hint="PATH") from error
    total = sum(file.stat().st_size for file in path.iterdir())
    print(f"{path}: {head.value}, {count:,} parameters, {total / 1e6:,.1f} MB")


if __name__ == "__main__":
    typer.run(main)

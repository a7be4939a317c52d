"""The file names of HuggingFace checkpoints, and which of a directory's files are its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from porting.checkpoint.errors import CheckpointError
from porting.checkpoint.index import Index
from porting.errors import Code, Fault

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
DCP_METADATA = ".metadata"
DCP_ENDING = ".distcp"
DCP_PART = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
"""What torch's ``HuggingFaceStorageWriter`` calls the files of one process, where it does not put them together."""

PUT_TOGETHER = "save it again with enable_consolidation of torch's HuggingFaceStorageWriter switched on"

INDEX_ENDINGS = (".safetensors.index.json", ".bin.index.json")
BIN_ENDINGS = (".bin", ".pt", ".pth")

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""What belongs to a checkpoint besides its weights: the configuration and the tokenizer's files."""


def choose_weights(names: Collection[str], *, where: str, read_index: Callable[[str], Index]) -> str:
    """Which file of a checkpoint stands for its weights: the single file, or the index of its shards.

    Args:
        names: the files that are there.
        where: the directory or model, for messages.
        read_index: gives the index of that name.

    Raises:
        CheckpointError: there are none, or two sets of weights that could both be meant.
    """
    for single, index in ((SAFETENSORS, SAFETENSORS_INDEX), (BIN, BIN_INDEX)):
        if single in names and index in names:
            if read_index(index).shards == (single,):
                return index
            raise CheckpointError(
                Fault(
                    code=Code.CHECKPOINT_AMBIGUOUS,
                    where=where,
                    message=f"{single} and {index} are both here, two sets of weights",
                    hint="pass the path of the one you mean, or remove the one that an older save left",
                )
            )
        if index in names or single in names:
            return index if index in names else single
    if DCP_METADATA in names:
        return DCP_METADATA
    pieces = [name for name in names if name.endswith(DCP_ENDING)]
    if pieces:
        message = f"holds {len(pieces)} files of a distributed checkpoint and no {DCP_METADATA}, which is written last"
        hint = "the save did not come to its end: save it again"
        raise CheckpointError(Fault(code=Code.CHECKPOINT_NOT_FOUND, where=where, message=message, hint=hint))
    parts = sorted(name for name in names if DCP_PART.fullmatch(name))
    if parts:
        message = (
            f"holds parts of tensors, as torch saves them unconsolidated ({parts[0]} and {len(parts) - 1} more): "
            "nothing says how large a tensor is, so that a file that is missing would not show"
        )
        raise CheckpointError(Fault(code=Code.FORMAT_WRONG, where=where, message=message, hint=PUT_TOGETHER))
    candidates = sorted(name for name in names if name.endswith((".safetensors", *INDEX_ENDINGS, *BIN_ENDINGS)))
    if candidates:
        hint = f"if {candidates[0]} is meant, pass its path"
    else:
        hint = "these are the names that save_pretrained gives; check the path"
    raise CheckpointError(
        Fault(
            code=Code.CHECKPOINT_NOT_FOUND,
            where=where,
            message=f"holds no weights: none of {SAFETENSORS}, {SAFETENSORS_INDEX}, {BIN}, {BIN_INDEX}",
            hint=hint,
        )
    )

"""The files of an export: weights divided as in the followed checkpoint, its config, and its other files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from porting.atomic import refused
from porting.checkpoint import Checkpoint, CheckpointError, TensorFile, WeightFile
from porting.checkpoint.config import CONFIG_NAME, parse_config
from porting.checkpoint.container import Container, WriteOptions
from porting.checkpoint.errors import checkpoint_error
from porting.checkpoint.files import LocalFile
from porting.checkpoint.index import INDEX
from porting.checkpoint.names import COMPANIONS, YAML, split_inner_path, split_sources
from porting.checkpoint.registry import ENDINGS, SAFETENSORS, container_of, writer_of
from porting.checkpoint.strict_json import encoded
from porting.checkpoint.strict_yaml import yaml_of
from porting.checkpoint.write import Content
from porting.errors import Code, Fault, Message, Option, Wording
from porting.limits import charge
from porting.notation.field import held, value_of, with_field
from porting.opening import Folder, Member
from porting.printable import dtype_name

if TYPE_CHECKING:
    import torch
    from torch import Tensor

METADATA = {"format": "pt"}
"""The metadata by which transformers knows that the weights are torch's."""

LARGEST = 64 << 20
"""Bytes; tokenizers are smaller, and larger files beside a checkpoint are weights or data."""

WEIGHTS = (*ENDINGS, ".meta", ".ot", ".pickle", ".pkl", ".tflite")
"""Endings of files of weights and of training states: they belong to the values that are replaced."""


def chosen_writer(to: str | None) -> tuple[Container, str]:
    """Parse the option ``to``, as :func:`porting.checkpoint.registry.writer_of`."""
    try:
        return writer_of(to)
    except CheckpointError as error:
        from porting.target import TargetError  # noqa: PLC0415  # files are compared with their record without torch

        raise TargetError(error.faults) from error


def require_division(writer: Container, shard_size: int | None) -> None:
    """Refuse a size of shards for a container that is one file."""
    if shard_size is not None and not writer.promises.shards:
        from porting.target import TargetError  # noqa: PLC0415  # as above

        message = Message(
            Option("shard_size", shard_size), f": {writer.title} has no index, so that all tensors lie in one file"
        )
        hint = f"leave it out, or write {SAFETENSORS.title}"
        raise TargetError(Fault(code=Code.OPTION_REFUSED, message=message, hint=hint))


def check_directory_name(path: Path) -> None:
    """Refuse a directory to be made with the name of a file of weights: ``model.npz`` would be one with safetensors."""
    container = container_of(path.name)
    if path.suffix not in WEIGHTS or path.is_dir():
        return
    directory = f"name a directory, such as {path.with_suffix('')}"
    hint = Message(directory)
    if container is not None and container.promises.writes and container.name != SAFETENSORS.name:
        hint = Message(directory, ", and pass ", Option("to", container.name))
    raise refused(path, f"would be a directory with the name of a {path.suffix} file", hint)


def protected(checkpoint: Checkpoint) -> list[Path]:
    """The paths that must not be overwritten: the checkpoint's directory, or its files if they were named."""
    if checkpoint.path is None:
        return []
    others = [path for path in checkpoint.joined.values() if path is not None]
    if is_single_file(checkpoint):
        return [*checkpoint.paths, *others]
    return [checkpoint.path, *others]


def weight_files(
    checkpoint: Checkpoint | None, tensors: Mapping[str, Tensor], *, to: str | None, where: str
) -> dict[str, Content]:
    """Lay out the tensors in files, divided as in the followed checkpoint; in another container, in one file.

    A file whose tensors still have the names, dtypes and shapes it had is written with its own header, so that equal
    values give equal bytes.  Pickled files become safetensors.  Tensors that no file had go into the last.  The files
    of a distributed checkpoint, divided as its processes were, become one.

    Args:
        checkpoint: what is followed; None for nothing.
    """
    writer, part = chosen_writer(to)
    if writer is not SAFETENSORS:
        made = writer.outline(tensors, WriteOptions(where=where, metadata=METADATA, part=part))
        files: dict[str, Content] = {
            shard.name: TensorFile(tensors={name: tensors[name] for name in shard.tensors}, shard=shard)
            for shard in made.shards
        }
        return files | dict(made.files)
    if checkpoint is None or (checkpoint.index_file is None and len(checkpoint.files) > 1):
        return {SAFETENSORS.main: TensorFile(tensors=tensors, metadata=METADATA)}
    parts = [{name: tensors[name] for name in file.names if name in tensors} for file in checkpoint.files]
    parts[-1].update({name: tensor for name, tensor in tensors.items() if name not in checkpoint.tensors})
    laid = [_weight_file(file, part, checkpoint) for file, part in zip(checkpoint.files, parts, strict=True)]
    main = _main_name(checkpoint)
    if checkpoint.index_file is None:
        return {main: laid[0]}
    named: dict[str, Content] = {
        _renamed(old.name): new for old, new in zip(checkpoint.files, laid, strict=True) if new.tensors
    }
    index_name = f"{main}{INDEX}"
    if all(file.header is not None for file in laid):
        return {**named, index_name: checkpoint.index_file.raw}
    home = {name: _renamed(file.name) for file, part in zip(checkpoint.files, parts, strict=True) for name in part}
    old = checkpoint.index_file.content.get("metadata")
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {
        "metadata": {**(old if isinstance(old, dict) else {}), "total_size": size},
        "weight_map": {name: home[name] for name in tensors},
    }
    return {**named, index_name: _json(index)}


def _main_name(checkpoint: Checkpoint) -> str:
    """The name of the main file of the weights, as the followed checkpoint's library calls it."""
    followed = checkpoint.index_file.name if checkpoint.index_file is not None else checkpoint.files[0].name
    stem = followed.partition(".")[0]
    return next((name for name in SAFETENSORS.mains if name.partition(".")[0] == stem), SAFETENSORS.main)


def _weight_file(file: WeightFile, tensors: Mapping[str, Tensor], checkpoint: Checkpoint) -> TensorFile:
    known = {name: (info.shape, info.dtype) for name, info in checkpoint.tensors.items() if name in set(file.names)}
    if file.header is not None and known == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }:
        return TensorFile(tensors=tensors, header=file.header)
    return TensorFile(tensors=tensors, metadata={**METADATA, **file.metadata})


def _renamed(name: str) -> str:
    """The name of a shard in safetensors: ``pytorch_model-00001-of-00002.bin`` becomes ``model-00001-…safetensors``."""
    stem, ending = os.path.splitext(name)
    return name if ending in SAFETENSORS.endings else f"{stem.removeprefix('pytorch_')}{SAFETENSORS.endings[0]}"


EACH = 400
"""Values that a file beside the weights counts as: copying an empty one takes as long as reading so many."""

BLOCK = 512
"""Bytes of a block that the system counts, whatever the disk's are."""

_NO_FILE = {Code.FILE_NOT_REGULAR, Code.FILE_MISSING}
"""Faults of entries that are not copied: folders, FIFOs, dangling links."""


def companions(checkpoint: Checkpoint) -> tuple[dict[str, Content], tuple[str, ...]]:
    """The files beside the weights to copy, without the config, and the names of those that are not copied.

    From a directory, every small file that is not weights; beside a weight file that was named itself, who knows what
    else is there: only what belongs to a checkpoint by its name.
    """
    folder = _directory(checkpoint)
    own = {file.name for file in checkpoint.files} | {CONFIG_NAME}
    copied: dict[str, Content] = {}
    left: list[str] = []
    faults: list[Fault] = []
    seen: set[tuple[int, int]] = set()
    repeated = 0
    names = [name for name in folder.names() if name not in own and not name.startswith(".")]
    if is_single_file(checkpoint):
        names = [name for name in names if name in COMPANIONS]
    charge("objects", EACH * len(names), where=str(folder.path))
    for name in sorted(names):
        try:
            file = LocalFile(opened := folder.open(name))
            size = file.size
        except CheckpointError as error:
            faults += [fault for fault in error.faults if fault.code not in _NO_FILE]
            size = LARGEST + 1
        if size <= LARGEST and not name.endswith(WEIGHTS):
            copied[name] = Member(folder, name)
            inode = opened.status.st_dev, opened.status.st_ino
            repeated += size - (0 if inode in seen else min(size, BLOCK * opened.status.st_blocks))
            seen.add(inode)
        elif not (checkpoint.index_file is not None and name == checkpoint.index_file.name):
            left.append(name)
    if faults:
        raise CheckpointError(faults)
    charge("made", repeated, where=str(folder.path))  # bytes of further names and of holes, which take none there
    return copied, tuple(left)


def is_single_file(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint was named by a file, an index or ranks, and not by its directory."""
    names = {file.name for file in checkpoint.files}
    names |= {checkpoint.index_file.name} if checkpoint.index_file is not None else set()
    named = Path(split_inner_path(split_sources(checkpoint.location)[0])[0]).name
    return checkpoint.commit is None and (checkpoint.ranks > 0 or named in names)


def config_of(checkpoint: Checkpoint) -> bytes | None:
    """The bytes of the followed checkpoint's ``config.json``; None when its config is elsewhere, or it has none."""
    folder = _directory(checkpoint)
    if checkpoint.config and checkpoint.config_name != CONFIG_NAME:
        return None
    path = folder.path / CONFIG_NAME
    raw = folder.read(CONFIG_NAME, limit=LARGEST) if folder.kind(CONFIG_NAME) else None
    found = parse_config(raw, where=str(path)) if raw is not None else {}
    expected = {field: value for field, value in checkpoint.config.items() if field not in checkpoint.joined}
    if found != expected and repr(found) != repr(expected):  # NaN is not equal to itself
        message = "it is not what it was when the checkpoint was opened"
        load = Wording(python="load the checkpoint again, or pass like= a copy of it as it was", command="try again")
        hint = Message(load)
        raise checkpoint_error(Code.FILE_CHANGED, str(path), message, hint)
    return raw


def _directory(checkpoint: Checkpoint) -> Folder:
    if checkpoint.path is None or not checkpoint.path.is_dir():
        message = "the checkpoint that the export follows is not there any more"
        hint = Message(
            Wording(
                python="pass like= a copy of it; anew=True follows none",
                command="try again with the checkpoint in its place",
            )
        )
        raise checkpoint_error(Code.FILE_MISSING, checkpoint.location, message, hint)
    home = checkpoint.home
    if home is None:
        return Folder(checkpoint.path)
    if not os.fstat(home.descriptor).st_nlink:
        message = "the directory was replaced by another one since the checkpoint was opened, perhaps of another model"
        load = Wording(python="load the checkpoint again, or pass like= a copy of it as it was", command="try again")
        raise checkpoint_error(Code.FILE_CHANGED, checkpoint.location, message, Message(load))
    return home


def config_bytes(raw: bytes, changes: Mapping[str, object]) -> bytes:
    """Change fields of a config, as a table spells them; the bytes are the same if nothing changes."""
    config = changed = parse_config(raw, where=CONFIG_NAME)
    for field, value in changes.items():
        if not held(changed, field) or value_of(changed, field) != value:
            changed = with_field(changed, field, value)
    return raw if changed is config else _json(changed)


def new_config(fields: Mapping[str, object], name: str = CONFIG_NAME) -> bytes:
    """Make a config of these fields.

    Args:
        name: of its file: one that ends as :data:`YAML` does is written in YAML.
    """
    faults = []
    for field, value in fields.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            message = f"the config's {field} is {value!r}, which JSON cannot say"
            plain = Wording(
                python="pass config= with plain values", command="let the module's config have plain values"
            )
            hint = Message(plain)
            faults.append(Fault(code=Code.CONFIG_UNKNOWN, where=name, message=message, hint=hint))
    if faults:
        raise CheckpointError(faults)
    return yaml_of(fields) if name.endswith(YAML) else _json(dict(sorted(fields.items())))


def labels(count: int) -> dict[str, object]:
    """The fields by which transformers knows the number of classes, with generated names."""
    names = [f"LABEL_{number}" for number in range(count)]
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def main_dtype(tensors: Mapping[str, Tensor]) -> str:
    """The floating-point dtype of most elements, as a config spells it; empty if there are none."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            counts[tensor.dtype] += tensor.numel()
    return dtype_name(counts.most_common(1)[0][0]) if counts else ""


def _json(value: object) -> bytes:
    return (json.dumps(encoded(value), indent=2, ensure_ascii=False) + "\n").encode()

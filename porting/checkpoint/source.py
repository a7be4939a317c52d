"""Opening a checkpoint: a directory, one file, an index of shards, or a model on the hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from porting.checkpoint.bin_file import read_bin
from porting.checkpoint.checkpoint import Checkpoint
from porting.checkpoint.config import read_config
from porting.checkpoint.dcp import read_distributed
from porting.checkpoint.errors import CheckpointError, HubError, quote
from porting.checkpoint.files import ByteSource, LocalFile
from porting.checkpoint.index import MAX_INDEX, ShardIndex, parse_index
from porting.checkpoint.layout import Contents
from porting.checkpoint.names import (
    BIN_ENDINGS,
    DCP_ENDING,
    DCP_METADATA,
    DCP_PART,
    INDEX_ENDINGS,
    PUT_TOGETHER,
    choose_weights,
    parse_model_id,
)
from porting.checkpoint.safetensors_file import read_header
from porting.checkpoint.sniff import is_safetensors, wrong_format
from porting.errors import Code, Fault, nearest
from porting.limits import spending
from porting.opening import Folder, read_file

if TYPE_CHECKING:
    from porting.checkpoint.hub import RemoteModel

ENOUGH = 1000
"""After so many files that cannot be opened, no other is tried."""

Opener = Callable[[str], ByteSource]


def open_checkpoint(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    weights: bool = True,
    follow_links: bool = False,
) -> Checkpoint:
    """Opens a checkpoint and checks the headers of all its files; no tensor is read yet.

    Args:
        source: a directory; a ``.safetensors`` file; a ``pytorch_model.bin``; the index of a sharded
            checkpoint; or a model on the hub, ``"org/name"`` or ``"org/name@revision"``.  In a directory
            safetensors files go before ``.bin`` files, and these before what ``torch.distributed.checkpoint``
            saved; of the latter, ``"directory/model"`` is the state dict alone that was saved under ``"model"``.
            A path that exists is never taken for a model on the hub.
        revision: a branch, tag or commit of a model on the hub.
        token: the hub's access token; True for the stored one, False for none.
        cache_dir: where files from the hub are kept; huggingface_hub's own cache when left out.
        local_files_only: take what the cache holds and ask the hub for nothing.
        weights: for a model on the hub, False reads the headers by range requests and downloads no weights;
            reading a tensor is an error then.
        follow_links: take files that are links to outside the checkpoint.

    Raises:
        CheckpointError: with every fault found in its files.
        HubError: the hub, or the cache of it, did not give what was asked for.
        LimitError: its headers cost more than the budget has (:mod:`porting.limits`).

    >>> import porting
    >>> source = porting.embedded_checkpoint()
    >>> checkpoint = open_checkpoint(source)
    >>> checkpoint.read("cls.predictions.bias").shape
    torch.Size([4096])
    """
    with spending():
        return _open(source, revision, token, cache_dir, local_files_only, weights, follow_links)


def _open(
    source: str | os.PathLike[str],
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
    weights: bool,
    follow_links: bool,
) -> Checkpoint:
    text = os.fspath(source)
    path = Path(text).expanduser()
    if os.path.lexists(path):
        if revision is not None:
            message = f"a revision, {quote(revision)}, was given for a path on this machine"
            raise _fault(Code.CHECKPOINT_NOT_FOUND, text, message, "leave the revision out")
        if path.is_dir():
            return _open_directory(path, location=text, follow_links=follow_links)
        return _open_file(path, location=text, follow_links=follow_links)
    if (path.parent / DCP_METADATA).is_file():
        return open_distributed(Folder(path.parent, follow_links=follow_links), location=text, part=path.name)
    model = parse_model_id(text, revision=revision) if isinstance(source, str) else None
    if model is None:
        message = "no such file or directory, and no possible name of a model on the hub"
        raise _fault(Code.CHECKPOINT_NOT_FOUND, text, message, "check the path; models are org/name@revision")
    from porting.checkpoint import hub  # noqa: PLC0415 - local checkpoints do without the client and its import

    try:
        if not weights and not hub.is_offline(local_files_only):
            return _open_remote(hub.remote(model, token=token))
        snapshot = hub.download(model, token=token, cache_dir=cache_dir, local_files_only=local_files_only)
    except HubError as error:
        raise HubError([*error.faults, *_meant_path(path, text)]) from error
    return _open_directory(snapshot.root, location=text, commit=snapshot.commit)


def _meant_path(path: Path, text: str) -> Iterator[Fault]:
    """A fault more for what may have been meant as a path: its folder exists, or a neighbour has almost its name."""
    try:
        neighbours = os.listdir(path.parent)
    except OSError:
        return
    hint = nearest(path.name, neighbours)
    if hint or path.parent != Path():
        message = f"taken for a model on the hub, since {str(path.parent)!r} on this machine has no {path.name!r}"
        yield Fault(code=Code.CHECKPOINT_NOT_FOUND, where=text, message=message, hint=hint or "check the path")


def _open_directory(root: Path, *, location: str, follow_links: bool = False, commit: str | None = None) -> Checkpoint:
    folder = Folder(root, follow_links=follow_links)
    main = choose_weights(folder.names(), where=location, read_index=lambda name: _read_index(folder, name))
    if main == DCP_METADATA:
        return open_distributed(folder, location=location)
    return _open_main(folder, main, location=location, commit=commit)


def _open_file(path: Path, *, location: str, follow_links: bool) -> Checkpoint:
    if DCP_PART.fullmatch(path.name):
        message = "this is what one process saved of a distributed model, with parts of tensors in it"
        raise _fault(Code.FORMAT_WRONG, location, message, PUT_TOGETHER)
    if path.name.endswith((*INDEX_ENDINGS, ".safetensors", *BIN_ENDINGS)):
        # A file that was named itself may be a link to anywhere; what it drags in with it may not.
        return _open_main(Folder(path.parent, follow_links=follow_links), path.name, location=location, named=True)
    if path.name == DCP_METADATA or path.name.endswith(DCP_ENDING):
        message = "this is one file of a distributed checkpoint"
        raise _fault(Code.FORMAT_WRONG, location, message, f"pass its directory, {path.parent}")
    file = LocalFile(path)
    if is_safetensors(file):
        hint = "rename it to end in .safetensors"
        raise _fault(Code.FORMAT_WRONG, location, "a safetensors file whose name does not say so", hint)
    expected = "a checkpoint (.safetensors, .bin, or an index of shards)"
    fault = wrong_format(file, expected)
    if fault is not None:
        raise CheckpointError(fault)
    raise _fault(Code.FORMAT_WRONG, location, f"this is not {expected}", "check the path")


def _open_main(
    folder: Folder, main: str, *, location: str, named: bool = False, commit: str | None = None
) -> Checkpoint:
    """Opens the weights that ``main`` stands for: one file, or an index and its shards."""

    def opener(name: str) -> ByteSource:
        return LocalFile(folder.path / name if named and name == main else folder.open(name))

    index = _read_index(folder, main, named=named) if main.endswith(INDEX_ENDINGS) else None
    shards = index.shards if index is not None else (main,)
    sources = _open_all(shards, opener)
    contents = [_read_contents(sources[name], name) for name in shards]
    return Checkpoint(
        location=location,
        path=folder.path,
        config=read_config(folder),
        contents=contents,
        sources=sources,
        index=index,
        commit=commit,
    )


def open_distributed(folder: Folder, *, location: str, part: str = "") -> Checkpoint:
    """Opens what ``torch.distributed.checkpoint`` saved; ``part`` of it, where it nests several state dicts.

    Args:
        folder: the directory that the files lie in.
        location: what the user passed, for messages.
        part: the name that the state dict was saved under; empty for all, as they are.

    Raises:
        CheckpointError: with every fault found in its files.
    """

    def open_all(names: Collection[str]) -> dict[str, ByteSource]:
        return _open_all(names, lambda name: LocalFile(folder.open(name)))

    found = read_distributed(open_all, part=part, location=location)
    return Checkpoint(
        location=location,
        path=folder.path,
        config=read_config(folder),
        contents=found.contents,
        sources=found.sources,
        index=None,
        notes=found.notes,
    )


def _open_remote(model: RemoteModel) -> Checkpoint:
    """Opens the headers of a model on the hub."""
    index = model.index
    shards = index.shards if index is not None else (model.main,)
    sources = {name: model.open(name) for name in shards}
    return Checkpoint(
        location=model.location,
        path=None,
        config=model.config,
        contents=[_read_contents(sources[name], name, locate=False) for name in shards],
        sources={},
        index=index,
        commit=model.commit,
    )


def _open_all(names: Collection[str], opener: Opener) -> dict[str, ByteSource]:
    """Every file, or an error that names all that cannot be opened."""
    sources: dict[str, ByteSource] = {}
    faults: list[Fault] = []
    for name in names:
        try:
            sources[name] = opener(name)
        except CheckpointError as error:
            faults += error.faults
        if len(faults) >= ENOUGH:
            message = f"of {len(names)} files these cannot be opened; the others were not tried"
            faults.append(Fault(code=faults[-1].code, where=str(Path(faults[-1].where).parent), message=message))
            break
    if faults:
        raise CheckpointError(faults)
    return sources


def _read_contents(source: ByteSource, name: str, *, locate: bool = True) -> Contents:
    if name.endswith(".safetensors"):
        return read_header(source, name=name)
    return read_bin(source, name=name, locate=locate)


def _read_index(folder: Folder, name: str, *, named: bool = False) -> ShardIndex:
    """The index of that name; one that the user named may be a link to anywhere."""
    path = folder.path / name
    raw = read_file(path, limit=MAX_INDEX) if named else folder.read(name, limit=MAX_INDEX)
    return parse_index(raw, name=name, where=str(path))


def _fault(code: Code, where: str, message: str, hint: str) -> CheckpointError:
    return CheckpointError(Fault(code=code, where=where, message=message, hint=hint))

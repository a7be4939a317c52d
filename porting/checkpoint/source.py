"""Opening a checkpoint: a directory, one file, an index of shards, or a model on the hub."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from porting.checkpoint.checkpoint import Checkpoint
from porting.checkpoint.config import read_config
from porting.checkpoint.container import Found, Place, UnrecognisedError
from porting.checkpoint.errors import CheckpointError, HubError, checkpoint_error, quote
from porting.checkpoint.files import LocalFile
from porting.checkpoint.inner_path import InnerPathNeededError
from porting.checkpoint.joined import RANK, find_ranks, home_of, join, joined
from porting.checkpoint.names import expanded, is_too_long, parse_model_id, split_inner_path, split_sources
from porting.checkpoint.registry import (
    CONTAINERS,
    EXPECTED,
    MARKS,
    choose,
    container_of,
    explained,
    holds_weights,
    sniff,
    wrong_kind,
)
from porting.errors import Code, Fault, closest
from porting.limits import reading, spending
from porting.opening import Folder, Opened, open_file, read_opened
from porting.printable import shell_word

if TYPE_CHECKING:
    from porting.checkpoint.hub import RemoteModel


SHOWN = 5
"""The number of folders with weights that a message names."""


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
    """Open a checkpoint and check the headers of all its files; no tensor is read.

    Args:
        source: a directory; a file of any container (docs/containers.md); the index of a sharded checkpoint; or a
            model on the hub, ``"org/name"`` or ``"org/name@revision"``.  In a directory the containers go in the
            order of :data:`porting.checkpoint.registry.CONTAINERS`, safetensors first; of what
            ``torch.distributed.checkpoint`` saved, ``"directory/model"`` is the state dict alone that was saved under
            ``"model"``.  A path that exists is never taken for a model on the hub.  An inner path behind a ``#``
            names a state dict inside of what ``torch.save`` wrote: ``"file.pt#model.encoder"``; ``"file.pt#"`` means
            all tensors of the file.  ``{r}`` in the place of a number means what the ranks of a model saved,
            ``"part.{r}.pt"``, with ``rank0.``, ``rank1.``, ... in front of the names.  ``"./llama+lora=./adapter"`` are
            two checkpoints, the second's names with ``lora.`` in front.
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
    first, others = split_sources(os.fspath(source))

    def opened(one: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
        return _open(one, revision, token, cache_dir, local_files_only, weights, follow_links)

    with spending():
        if not others:
            return opened(source, revision)
        return join(os.fspath(source), opened(first, revision), {name: opened(one) for name, one in others.items()})


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
    outer, part = split_inner_path(text)
    path = expanded(outer)
    _require_possible(outer, path, text)
    if os.path.lexists(path):
        if revision is not None:
            message = f"a revision, {quote(revision)}, was given for a path on this machine"
            raise checkpoint_error(Code.CHECKPOINT_NOT_FOUND, text, message, "leave the revision out")
        if path.is_dir():
            return _open_directory(Folder(path, follow_links=follow_links), location=text, part=part)
        folder = Folder(path.parent, follow_links=follow_links)
        return _open_file(LocalPlace(folder, location=text, named=path.name), path.name, part=part)
    if RANK in outer:
        return _open_ranks(outer, location=text, part=part, follow_links=follow_links)
    main = _main_of(path)
    if main is not None:
        name, inner = main
        place = LocalPlace(Folder(path.parent, follow_links=follow_links), location=text)
        return open_weights(place, name, part=part if inner is None else inner)
    model = parse_model_id(outer, revision=revision, files=(*MARKS, ".json")) if isinstance(source, str) else None
    if model is None:
        message = "no such file or directory, and no possible name of a model on the hub"
        hint = _similar_path(path) or "check the path; models are org/name@revision"
        raise checkpoint_error(Code.CHECKPOINT_NOT_FOUND, text, message, hint)
    from porting.checkpoint import hub  # noqa: PLC0415  # the hub's client takes time to import; local files do not need it

    near = _similar_path(path)
    if near and not hub.is_offline(local_files_only):  # the hub may take long to answer
        warnings.warn(f"{quote(text)} is not on this machine ({near}); the hub is asked for it", stacklevel=3)
    try:
        if not weights and not hub.is_offline(local_files_only):
            return _open_remote(hub.remote(model, token=token), part=part)
        snapshot = hub.download(model, token=token, cache_dir=cache_dir, local_files_only=local_files_only)
    except HubError as error:
        if not near and not (path.parent.name and os.path.isdir(path.parent)):
            raise
        message = "taken for a model on the hub, since there is no such path on this machine"
        fault = Fault(code=Code.CHECKPOINT_NOT_FOUND, where=text, message=message, hint=near or "check the path")
        raise HubError([*error.faults, fault]) from error
    return _open_directory(Folder(snapshot.root), location=text, commit=snapshot.commit, part=part)


def _require_possible(outer: str, path: Path, text: str) -> None:
    """Refuse what no path can be, before the system is asked about it."""
    if not outer:  # as of a variable of the shell that is not set: the current directory is not meant
        hint = "name a directory or a file; '.' is the current directory"
        raise checkpoint_error(Code.CHECKPOINT_NOT_FOUND, text, "the path is empty", hint)
    if is_too_long(path):
        message = "it is longer than the system lets a path be"
        raise checkpoint_error(Code.CHECKPOINT_NOT_FOUND, text, message, "check the path")


def _main_of(path: Path) -> tuple[str, str | None] | None:
    """The main file that a path stands for where there is no file of that name, and the inner path in it.

    ``dir/model`` is the state dict ``model`` of a distributed checkpoint, ``dir/model.ckpt`` what TensorFlow calls the
    checkpoint of ``model.ckpt.index``.
    """
    for container in CONTAINERS:
        if container.parts and (path.parent / container.main).is_file():
            return container.main, path.name
        if container.stem and (path.parent / f"{path.name}{container.endings[0]}").is_file():
            return f"{path.name}{container.endings[0]}", None
    return None


def _similar_path(path: Path) -> str:
    """The existing path that may have been meant, as a hint: a directory or weights; empty if none is close."""
    missing = path
    while missing != missing.parent and not os.path.lexists(missing.parent):
        missing = missing.parent
    try:
        beside = [one.name for one in missing.parent.iterdir() if one.is_dir() or container_of(one.name)]
    except (OSError, ValueError):
        return ""
    found = closest(missing.name, beside)
    near = missing.parent / found / path.relative_to(missing)
    return f"did you mean {quote(str(near))}?" if found and os.path.lexists(near) else ""


class LocalPlace:
    """A directory on this machine.

    Args:
        named: the file that the user named, which may be a link to anywhere; what it drags in may not.
    """

    def __init__(self, folder: Folder, *, location: str, named: str = "") -> None:
        self.folder = folder
        self.location = location
        self._named = named

    def open(self, name: str) -> LocalFile:
        """One of its files."""
        return LocalFile(self._opened(name))

    def read(self, name: str, *, limit: int) -> tuple[bytes, str]:
        """Read a small file; returns its bytes, and its name for messages."""
        return read_opened(self._opened(name, limit)), str(self.folder.path / name)

    def _opened(self, name: str, limit: int | None = None) -> Opened:
        if name != self._named:
            return self.folder.open(name, limit=limit)
        opened = open_file(self.folder.path / name, limit=limit)
        self.folder.remember(name, opened)
        return opened


def _open_directory(folder: Folder, *, location: str, part: str | None, commit: str | None = None) -> Checkpoint:
    place = LocalPlace(folder, location=location)
    names = place.folder.names()
    try:
        main = choose(names, place)
    except CheckpointError as error:
        with reading(location):
            raise CheckpointError([*error.faults, *_model_folders_fault(place, names)]) from error
    return open_weights(place, main, commit=commit, part=part)


def _model_folders_fault(place: LocalPlace, names: list[str]) -> Iterator[Fault]:
    """A fault for a directory of several models, such as a pipeline of diffusers: names its folders of weights."""
    found: list[str] = []
    for name in sorted(names):
        if len(found) < SHOWN and place.folder.kind(name) == "a directory":
            with suppress(CheckpointError):
                inside = Folder(place.folder.path / name, inside=place.folder).names()
                found += [name] if holds_weights(inside) else []
    if found:
        message = f"these folders in it hold weights: {', '.join(map(quote, found))}"
        hint = f"pass the one you mean: {shell_word(os.path.join(place.location, found[0]))}"  # as the user typed it
        yield Fault(code=Code.CHECKPOINT_NOT_FOUND, where=place.location, message=message, hint=hint)


def _open_ranks(pattern: str, *, location: str, part: str | None, follow_links: bool) -> Checkpoint:
    """Open the files of all ranks below the directory that their paths share."""
    with reading(location):
        home = Folder(home_of(pattern), follow_links=follow_links)
        ranks = find_ranks(pattern, home)
        opened = [_open_rank(home, rank.parts, location=location, part=part) for rank in ranks]
        checkpoint = joined(location, home, ranks, opened, *read_config(home))
        checkpoint.require_in_place()
        return checkpoint


def _open_rank(folder: Folder, parts: tuple[str, ...], *, location: str, part: str | None) -> Checkpoint:
    folder = folder.again()  # each rank looks after its own files
    for name in parts[:-1]:
        folder = folder.inner(name)
    if folder.leads_to_directory(parts[-1]):
        return _open_directory(folder.inner(parts[-1]), location=location, part=part)
    return _open_file(LocalPlace(folder, location=location), parts[-1], part=part)


def _open_file(place: LocalPlace, name: str, *, part: str | None) -> Checkpoint:
    location = place.location
    for container in CONTAINERS:
        fault = container.fragment(name, where=location)
        if fault is not None:
            raise CheckpointError(fault)
    if container_of(name) is not None:
        return open_weights(place, name, part=part)
    file = place.open(name)
    kind = sniff(file)
    if kind is None:
        raise checkpoint_error(Code.FORMAT_WRONG, location, f"this is not {EXPECTED}", "check the path")
    if any(kind == container.sniff(file) for container in CONTAINERS):
        raise checkpoint_error(Code.FORMAT_WRONG, location, f"{kind.what} whose name does not say so", kind.hint)
    raise CheckpointError(wrong_kind(file, kind, EXPECTED))


def open_weights(place: LocalPlace, main: str, *, part: str | None = None, commit: str | None = None) -> Checkpoint:
    """Open the weights whose main file is given.

    Args:
        part: the inner path of the state dict that is meant, of those that are nested in it; empty for all, None when
            none was given.
    """
    with reading(place.location):
        found = _found(place, main, part=part)
        config_name, config = read_config(place.folder)
        checkpoint = Checkpoint(
            location=place.location,
            path=place.folder.path,
            config=config,
            config_name=config_name,
            contents=found.contents,
            sources=found.sources,
            index=found.index,
            commit=commit,
            notes=found.notes,
            folder=place.folder,
            home=place.folder,
            part=part,
        )
        place.folder.require_in_place()
        checkpoint.allow_time()
        return checkpoint


def _open_remote(model: RemoteModel, *, part: str | None) -> Checkpoint:
    """Open the headers of a model on the hub."""
    with reading(model.location):
        found = _found(model, model.main, part=part, locate=False)
        return Checkpoint(
            location=model.location,
            path=None,
            config=model.config,
            config_name=model.config_name,
            contents=found.contents,
            sources={},
            index=found.index,
            commit=model.commit,
            notes=found.notes,
            part=part,
        )


def _found(place: Place, main: str, *, part: str | None, locate: bool = True) -> Found:
    container = container_of(main)
    if container is None:
        raise ValueError(f"{main!r} is not a file of weights")  # a bug of ours: it was chosen for its name
    try:
        return container.open(place, main, part=part, locate=locate)
    except UnrecognisedError as error:
        raise explained(error) from error
    except InnerPathNeededError as error:
        raise error.at(place.location) from error

"""A conversion that is settled and not yet begun: what will be written, to the byte, before a weight is read."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import nn

from porting.build import bounds, build
from porting.checkpoint import Checkpoint
from porting.checkpoint.config import CONFIG_NAME, read_config
from porting.checkpoint.container import Container, Outline, TokenizerFiles, WriteOptions
from porting.checkpoint.files import LocalFile
from porting.checkpoint.layout import RECORD
from porting.checkpoint.names import OPEN_CLIP_CONFIG
from porting.checkpoint.registry import FREE_ENDINGS, container_of
from porting.converting.digests import of_bytes
from porting.converting.directions import Recipes, back_from_port, into_port
from porting.converting.record import Record, read_record, versions
from porting.converting.reverse_table import as_places, places_of, sources_of
from porting.errors import Code, Fault, Message, Option
from porting.export_files import (
    LARGEST,
    METADATA,
    chosen_writer,
    companions,
    config_bytes,
    config_of,
    is_single_file,
    new_config,
    require_division,
)
from porting.limits import reading
from porting.loading import Into, maker
from porting.notation.field import value_of, with_field
from porting.notation.name import Name
from porting.notation.table import Table
from porting.opening import Folder, Member
from porting.origin import PlannedCheckpoint, require_named, respelled
from porting.plan.check import check
from porting.plan.config import (
    ARCHITECTURE,
    MODEL_TYPE,
    arguments,
    has_own_config,
    is_of_diffusers,
    is_of_open_clip,
    is_target_config,
    source_config,
    unknown,
    unsaid,
)
from porting.plan.plan import LeftOut, Plan, PlanError
from porting.plan.recipe import Described, Recipe
from porting.printable import dtype_name
from porting.tables import find_table
from porting.target import Slot


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The plan of a conversion.

    Attributes:
        like: the checkpoint that is followed on the way back; None when there is none.
        reverse: from the port's layout to the checkpoint's.
        outline: the files of weights.
        files: the other files, their contents or where they are copied from; the record is not among them.
        not_copied: files beside the input's weights that are left where they are.
        options: what was asked for, as far as it shapes the output.
    """

    checkpoint: Checkpoint
    like: Checkpoint | None
    table: Table
    reverse: bool
    recipes: Recipes
    outline: Outline
    files: Mapping[str, bytes | Member]
    not_copied: tuple[str, ...]
    options: Mapping[str, object]

    @property
    def key(self) -> dict[str, object]:
        """The identity of this conversion: the output's plan, and the state of the input's files."""
        shape = {
            "table": self.table.digest,
            "options": dict(self.options),
            "versions": versions(),
            "recipes": [[str(getattr(one, name.name)) for name in fields(Recipe)] for one in self.recipes.tensors],
            "frames": [of_bytes(b"".join(raw for _, raw in shard.frame)) for shard in self.outline.shards],
            "files": {name: _state(content) for name, content in self.files.items()},
        }
        sources = [
            {file.name: list(one.file(file.name).identity) for file in one.files}
            for one in (self.checkpoint, self.like)
            if one is not None
        ]
        return {"plan": of_bytes(json.dumps(shape).encode()), "sources": sources}


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The options of :func:`porting.convert` by which an output is drafted; each is described there."""

    reverse: bool = False
    into: Into = None
    architecture: str | None = None
    derive: bool = False
    like: str | os.PathLike[str] | Checkpoint | None = None
    dtype: torch.dtype | None = None
    fresh: bool = False
    trust: bool = False
    shard_size: int | None = None
    to: str | None = None
    overwrite: bool = False


def _state(content: bytes | Member) -> list[object]:
    if isinstance(content, bytes):
        return [of_bytes(content)]
    *_, time, size = LocalFile(content.open()).identity  # the device and the rest are one machine's
    return [size, time]


def draft_into_port(
    checkpoint: Checkpoint, table: Table | str | Path | None, options: ConvertOptions, *, where: str
) -> Draft:
    """A checkpoint into the port's layout."""
    chosen = find_table(table, checkpoint.config, checkpoint.tensors)
    into, architecture = options.into, options.architecture
    target: nn.Module | Mapping[str, Slot]
    try:
        if options.derive or (into is None and architecture is None and not chosen.architectures):
            with reading(checkpoint.location):
                checkpoint.allow_time()
                target = places_of(chosen, checkpoint.tensors, checkpoint.config)
        else:
            make, _ = maker(chosen, checkpoint, into, architecture, trust=options.trust)
            target = build(make, bounds(checkpoint.tensors, checkpoint.config))
        plan = check(chosen, checkpoint, target, dtype=options.dtype, fresh=options.fresh)
    except PlanError as error:
        if _recorded(checkpoint, None, chosen) is None:
            raise
        message = f"{checkpoint.location} is in the port's layout already: a conversion through this table made it"
        hint = Message("pass ", Option("reverse", True), " to go back")
        raise PlanError(Fault(code=Code.OPTION_REFUSED, message=message, hint=hint)) from error
    with reading(where):
        checkpoint.allow_time()
        return _draft(checkpoint, None, chosen, into_port(plan), options, where)


def draft_back(
    port: Checkpoint,
    table: Table | str | Path | None,
    like: Checkpoint | None,
    options: ConvertOptions,
    *,
    where: str,
) -> Draft:
    """A checkpoint in the port's layout back into the layout that the table's left side describes."""
    config = port.config if port.config or like is None else like.config
    chosen = find_table(table, config, _recorded(port, like), ported=port.tensors)
    if not port.config_name and chosen.config_file and port.home is not None:
        port = _with_config(port, port.home, chosen.config_file)
        config = port.config or config
    config = source_config(chosen, config)
    if _recorded(port, like, chosen) is None and config.get("tie_word_embeddings") is True:
        chosen = _without_tied_heads(chosen)
    with reading(where):
        port.allow_time()
        found, same = as_places(chosen, port.tensors)
        sources = sources_of(chosen, found, config, _recorded(port, like, chosen))
        plan = check(chosen, PlannedCheckpoint(tensors=sources, config=config), found, fresh=True)
        unnamed = require_named(chosen, plan.fresh, fresh=options.fresh)
        if len(plan.fresh) > len(unnamed):  # the port has more than what is followed
            more = {name: found[name] for name in plan.fresh if name not in unnamed}
            sources |= respelled(sources_of(chosen, more, config, None), chosen, sources)
            plan = check(chosen, PlannedCheckpoint(tensors=sources, config=config), found, fresh=bool(unnamed))
        _require_one_dtype(plan)
        recipes = back_from_port(plan, options.dtype, like.tensors if like is not None else {}, same)
        lost = tuple(LeftOut(name=name, reason="new, and no rule says what a checkpoint calls it") for name in unnamed)
        recipes = replace(recipes, left_out=(*recipes.left_out, *lost))
        return _draft(port, like, chosen, recipes, options, where)


def _with_config(checkpoint: Checkpoint, home: Folder, name: str) -> Checkpoint:
    """The checkpoint with the config in a file of a name that only a table gives; itself if there is none."""
    found, config = read_config(home, name)
    if not found:
        return checkpoint
    other = copy.copy(checkpoint)
    other.config_name, other.config = found, config
    return other


def _without_tied_heads(table: Table) -> Table:
    """The table without rules of [optional] for what [make] makes equal to another parameter.

    A checkpoint whose config says that the head is the embedding has no head, whether or not the port has one.
    """
    copied = {str(make.term.name) for make in table.makes if isinstance(make.value, Name)}
    rules = (
        rule
        for rule in table.rules
        if not (rule.optional and not rule.rest and all(str(term.name) in copied for term in rule.targets))
    )
    return replace(table, rules=tuple(rules))


def _recorded(port: Checkpoint, like: Checkpoint | None, table: Table | None = None) -> Mapping[str, Described] | None:
    """The tensors of the checkpoint that the port was made from, through a table, as far as anything says so."""
    if like is not None:
        return like.tensors
    record = _record(port)
    if record is None or (table is not None and record.text("table", "digest") != table.digest):
        return None
    return record.sources


def _record(port: Checkpoint) -> Record | None:
    """The record that a conversion into the port's layout wrote; None if there is none."""
    if port.home is None or is_single_file(port):
        return None
    record = read_record(port.home)
    return None if record is None or record.damage or record.content.get("reverse") else record


def _require_one_dtype(plan: Plan) -> None:
    faults = []
    for step in plan.steps:
        dtypes = sorted({dtype_name(plan.targets[name].dtype) for name in step.targets})
        if len(dtypes) > 1:
            message = f"{step.targets[0]!r} -> {step.sources[0]!r}: the port has {' and '.join(dtypes)}"
            hint = "one rule makes one tensor of them: give them one dtype first"
            faults.append(Fault(code=Code.DTYPE_CHANGE, where=step.rule.where, message=message, hint=hint))
    if faults:
        raise PlanError(faults)


def _draft(
    checkpoint: Checkpoint,
    like: Checkpoint | None,
    table: Table,
    recipes: Recipes,
    options: ConvertOptions,
    where: str,
) -> Draft:
    reverse, dtype, shard_size, to = options.reverse, options.dtype, options.shard_size, options.to
    files, left = companions(checkpoint)
    files.pop(RECORD, None)
    if files and checkpoint.home is not None:
        checkpoint.home.require_in_place()  # what stands beside the weights was opened later than they were
    kept: dict[str, bytes | Member] = {name: one for name, one in files.items() if isinstance(one, bytes | Member)}
    writer, part, main = _writer(table, options)
    raw, said, settings = config_of(checkpoint), tuple[str, ...](), dict[str, object]()
    config = checkpoint.config
    if like is not None and (not checkpoint.config or is_target_config(table, checkpoint.config)):
        raw, config = config_of(like), like.config
    elif checkpoint.config and (is_target_config(table, checkpoint.config) if reverse else has_own_config(table)):
        fields, said = _other_config(checkpoint, table, recipes, reverse=reverse)
        kept.pop(checkpoint.config_name, None)
        config = fields
        if writer.settings:
            settings = _settings(fields)
        else:
            name = OPEN_CLIP_CONFIG if is_of_open_clip(fields) else CONFIG_NAME
            name = name if reverse else table.config_file or name
            kept.pop(table.config_file, None)
            kept[name] = new_config(fields, name)
        raw = None
    elif not reverse and not checkpoint.config and has_own_config(table):
        name = table.config_file or CONFIG_NAME
        said = (f"no {name} is written: the source has none that [config] could be read from",)
    if writer.settings:
        found = {name: kept.get(name) for name in writer.tokenizer_files if name in kept or name in left}
        tokenizer = _tokenizer(checkpoint, raw, found)
        more, lacking = writer.beside(settings, tokenizer, {one.name: one for one in recipes.tensors})
        settings |= more
        said = (*said, *lacking)
    unread = (fault.line for fault in checkpoint.warnings if fault.code is Code.NOT_READ)
    recipes = replace(recipes, warnings=(*recipes.warnings, *unread, *said))
    if raw is not None:
        changed = any(
            one.dtype != checkpoint.tensors[one.copies[0].source].dtype for one in recipes.tensors if one.copies
        )
        named = dtype_name(dtype)
        changes = {field: named for field in ("dtype", "torch_dtype") if field in checkpoint.config and changed}
        kept[CONFIG_NAME] = config_bytes(raw, changes)
    metadata = dict(METADATA)
    for file in checkpoint.files:
        metadata |= file.metadata
    made = tuple(replace(one, dtype=writer.stored(one.shape, one.dtype)) for one in recipes.tensors)
    recipes = replace(recipes, tensors=made)
    size = shard_size if shard_size is not None or not writer.promises.shards else _same_division(checkpoint)
    layout = WriteOptions(
        where=where,
        metadata=metadata,
        shard_size=size,
        part=part,
        tied=recipes.tied,
        settings=settings,
        main=main or ("".join(writer.also[:1]) if is_of_diffusers(config) else ""),
    )
    written = writer.outline({one.name: one for one in recipes.tensors}, layout)
    kept |= written.files
    return Draft(
        checkpoint=checkpoint,
        like=like,
        table=table,
        reverse=reverse,
        recipes=recipes,
        outline=written,
        files=dict(sorted(kept.items())),
        not_copied=left,
        options={
            "reverse": reverse,
            "dtype": None if dtype is None else dtype_name(dtype),
            "shard_size": size,
            **({} if to is None else {"to": to}),
        },
    )


def _writer(table: Table, options: ConvertOptions) -> tuple[Container, str, str]:
    """The container to write, the state dict to nest tensors in, and the name of an unusual main file."""
    if table.weights_file and not options.reverse and not table.weights_file.endswith(FREE_ENDINGS):
        message = f"[files] weights = {table.weights_file!r}, expected a name that ends in {', '.join(FREE_ENDINGS)}"
        raise PlanError(Fault(code=Code.WRONG_TYPE, where=table.where, message=message))
    writer, part = chosen_writer(options.to)
    named = container_of(table.weights_file) if table.weights_file and not options.reverse else None
    if named is None or (options.to is not None and named is not writer):
        return writer, part, ""
    require_division(named, options.shard_size)
    return named, part, table.weights_file


def _other_config(
    checkpoint: Checkpoint, table: Table, recipes: Recipes, *, reverse: bool
) -> tuple[dict[str, object], tuple[str, ...]]:
    """The config of the other side, from [config], and what it cannot say."""
    fields = (source_config if reverse else arguments)(table, checkpoint.config)
    counts = Counter[str]()
    for one in recipes.tensors:
        if one.dtype.is_floating_point:
            counts[dtype_name(one.dtype)] += one.numel
    without = is_of_diffusers(fields) or is_of_open_clip(fields) or (table.config_file and not reverse)
    if counts and not without:  # which have no such field
        fields["dtype"] = counts.most_common(1)[0][0]
    said = []
    fields_of_file = unsaid(table, checkpoint.config) if checkpoint.config_name else []  # a file of weights has others
    written = CONFIG_NAME if reverse else table.config_file or CONFIG_NAME
    if names := [name for name in fields_of_file if name not in checkpoint.joined]:
        lacking = f"no line of [config] names {', '.join(names)}, so what is written does not say it"
        said.append(f"{checkpoint.config_name}: {lacking}")
    if names := unknown(table, checkpoint.config):
        said.append(f"{written}: nothing says {', '.join(names)}, so what is written does not: add it by hand")
    return fields, tuple(said)


def _tokenizer(checkpoint: Checkpoint, raw: bytes | None, files: Mapping[str, bytes | Member | None]) -> TokenizerFiles:
    """The tokenizer's files, and the ``config.json`` of the source, which names special tokens too."""
    texts, unread, folder = dict[str, bytes](), dict[str, str](), checkpoint.path or Path()
    for name, one in files.items():
        if one is None:
            kind = checkpoint.home.kind(name) if checkpoint.home is not None else ""
            unread[name] = (
                f"has more than {LARGEST} bytes" if kind == "a file" else f"is {kind or 'not there any more'}"
            )
        else:
            texts[name] = one if isinstance(one, bytes) else one.read(limit=LARGEST)
    if raw is None and checkpoint.config_name == CONFIG_NAME:
        raw = config_of(checkpoint)
    texts |= {} if raw is None else {CONFIG_NAME: raw}
    return TokenizerFiles(where=str(folder), texts=texts, unread=unread)


def _settings(fields: dict[str, object]) -> dict[str, object]:
    """A config as a container holds it that has the dtypes and the kind of a model elsewhere."""
    kind = fields.get(MODEL_TYPE)
    found = {name: value for name, value in fields.items() if name not in (MODEL_TYPE, "architectures", "dtype")}
    return found if kind is None or value_of(found, ARCHITECTURE) else with_field(found, ARCHITECTURE, kind)


def _same_division(checkpoint: Checkpoint) -> int | None:
    """The default for the most that a file may hold: what the largest shard of the input holds.

    A distributed checkpoint is divided as its processes were, which says nothing of how large a file should be.
    """
    if len(checkpoint.files) == 1 or checkpoint.index is None:
        return None
    return max(sum(checkpoint.tensors[name].nbytes for name in file.names) for file in checkpoint.files)

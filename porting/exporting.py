"""``export``: write a module as a HuggingFace directory, through its table in reverse."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from porting.checkpoint import Checkpoint, TensorFile, open_checkpoint, write_directory
from porting.checkpoint.config import CONFIG_NAME
from porting.checkpoint.write import WITHOUT_VALUES, holds_values, repeated_bytes
from porting.checkpoint.write import Content as FileContent
from porting.errors import Code, Fault, Message, Option, PortingWarning, alike
from porting.export_config import exported_config, whole_config
from porting.export_files import check_directory_name, chosen_writer, companions, protected, weight_files
from porting.limits import charge
from porting.loading import cast, provenance, require_floating, same_bits
from porting.notation.table import Table
from porting.opening import Member
from porting.ops import Content
from porting.ops.contents import WORDS
from porting.origin import Origin, follow, infer_origin, table_for
from porting.plan.align import Step
from porting.plan.leftovers import copies_differ
from porting.plan.move import backward, forward
from porting.plan.plan import LeftOut, Plan, PlanError, irreversible
from porting.sharding.filling import is_sharded
from porting.sharding.writing import moved_dtypes, require_made, write_shards
from porting.target import TargetError, named_tensors, unwrapped


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export.

    Attributes:
        path: the directory.
        follows: the checkpoint whose names, spellings and files it follows; empty when there is none.
        architecture: what its config says it is; empty when nothing says.
        tensors: the names of all tensors, in their order.
        new: those that the followed checkpoint does not have.
        copied: those that the module does not hold: they are the followed checkpoint's, as they were.
        not_written: tensors of the checkpoint that is followed which the new architecture does not have.
        files: the files.
        not_copied: files and folders beside the followed checkpoint's weights that were not copied.
        unnamed: the module's new parameters that no rule gives a name in a checkpoint: they are not in it.
        infinite: for each tensor in which a cast made finite values infinite, how many.

    >>> import porting, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = porting.export(porting.load(porting.embedded_checkpoint()), None, f"{folder}/exported")
    >>> made.architecture
    'BertForPreTraining'
    """

    path: Path
    follows: str
    architecture: str
    tensors: tuple[str, ...]
    new: tuple[str, ...]
    copied: tuple[str, ...]
    not_written: tuple[LeftOut, ...]
    files: tuple[str, ...]
    not_copied: tuple[str, ...]
    infinite: Mapping[str, int]
    unnamed: tuple[str, ...] = ()

    def __str__(self) -> str:
        follows = f", following {self.follows}" if self.follows else ""
        return f"{self.path}: a {self.architecture or 'checkpoint'} of {len(self.tensors)} tensors{follows}"


def export(
    module: nn.Module,
    table: Table | str | Path | None,
    path: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | Checkpoint | None = None,
    anew: bool = False,
    config: object = None,
    architecture: str | None = None,
    dtype: torch.dtype | None = None,
    fresh: bool = False,
    to: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a module as a directory that ``transformers.AutoModel.from_pretrained`` loads.

    A module that :func:`porting.load` filled in this process follows the checkpoint that it came from: its names and
    their spellings, its shards, its config, its tokenizer.  While nothing was changed the weights are written byte for
    byte as they were.  What the module does not hold is taken from that checkpoint, except when the result is another
    architecture: then it is left out, and a warning says so.

    A module that has no such checkpoint is written under the table's own names, with a config of its own.

    Args:
        module: the module; ``torch.compile`` or data parallelism may have wrapped it.  A sharded module (FSDP, tensor
            parallelism) is exported by all its processes together: each writes its own shards.
        table: the table, its file or its name; None for the one that the module was loaded through, or that names the
            module's class.
        path: the directory to be made.
        like: the checkpoint to follow, instead of the one the module came from.
        anew: follow no checkpoint.
        config: the target's config, in place of the module's own ``config``; or the whole content of ``config.json``.
        architecture: what the result is called in its config; None to go by the module's class and its tensors.
        dtype: cast floating-point weights to this; None keeps the module's dtypes (if it was loaded with ``dtype=``,
            those are not the checkpoint's, and values that were rounded then stay rounded).
        fresh: leave the module's new parameters out that no rule gives a name in a checkpoint; a warning names them.
        to: another container than safetensors, as in :func:`porting.convert`.
        overwrite: replace an existing checkpoint at ``path``.

    Returns:
        What was written.

    Raises:
        CheckpointError: the followed checkpoint cannot be read, the destination is refused, or writing failed.
        TableError: there is no such table, or it has faults.
        PlanError: module, table and checkpoint do not fit; carries all faults.
        TargetError: the module has tensors that cannot be written, or its config is not known.

    If an error is raised, nothing is written.

    >>> import porting, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = export(porting.load(porting.embedded_checkpoint()), None, f"{folder}/exported")
    ...     porting.diff(porting.embedded_checkpoint(), made.path).equal
    True
    """
    chosen_writer(to)
    check_directory_name(Path(path))
    module = unwrapped(module)
    spread = is_sharded(module)
    values = {} if spread else _values(module)
    record = provenance(module)

    def mapped() -> None:  # values may be views of a file that was written to or truncated since
        if record is not None:
            record.checkpoint.require_unchanged(values.values())

    mapped()
    checkpoint = None
    if like is not None:
        checkpoint = like if isinstance(like, Checkpoint) else open_checkpoint(like)
    elif record is not None and not anew:
        checkpoint = record.checkpoint
    if spread:
        _require_followed(checkpoint)
    chosen = table_for(module, table, checkpoint)
    if checkpoint is not None:
        origin = follow(module, chosen, checkpoint, architecture, fresh=fresh)
    else:
        origin = infer_origin(module, chosen, whole_config(module, chosen, config), architecture)
    if spread:
        exported = _from_shards(module, origin, Path(path), config, architecture, dtype, to=to, overwrite=overwrite)
        _warn(exported)
        return exported
    require_made(module, origin.plan)
    tensors, copied, not_written = _tensors(origin, values)
    tensors, infinite = _cast(tensors, dtype)
    files: dict[str, FileContent] = {}
    left: tuple[str, ...] = ()
    if checkpoint is not None:
        files, left = companions(checkpoint)
    files[CONFIG_NAME] = exported_config(module, origin, config, architecture, tensors)
    files |= weight_files(checkpoint, tensors, to=to, where=str(path))
    kept = [opened for opened in (checkpoint, record.checkpoint if record is not None else None) if opened is not None]
    places = [place for opened in kept for place in protected(opened)]
    write_directory(path, files, overwrite=overwrite, sources=places, confirm=mapped)

    result = Exported(
        path=Path(path),
        follows=checkpoint.location if checkpoint is not None else "",
        architecture=origin.architecture,
        tensors=tuple(tensors),
        new=origin.new,
        copied=copied,
        not_written=not_written,
        files=tuple(sorted(files)),
        not_copied=left,
        infinite=infinite,
        unnamed=origin.unnamed,
    )
    _warn(result)
    return result


def _require_followed(checkpoint: Checkpoint | None) -> Checkpoint:
    """The followed checkpoint, which a sharded module must have."""
    if checkpoint is None:
        message = "the module is spread over processes, which together write files like those that it came from"
        hint = Message(
            "pass ", Option("like"), " that checkpoint; for another architecture gather it into a whole module first"
        )
        raise TargetError(Fault(code=Code.BAD_TARGET, message=message, hint=hint))
    return checkpoint


def _from_shards(
    module: nn.Module,
    origin: Origin,
    path: Path,
    config: object,
    architecture: str | None,
    dtype: torch.dtype | None,
    *,
    to: str | None,
    overwrite: bool,
) -> Exported:
    """Write a sharded module from all its processes, into files like those that it was loaded from."""
    checkpoint = _require_followed(None if origin.changed else origin.checkpoint)
    dtypes = _dtypes(module, origin.plan, checkpoint)
    if dtype is not None:
        require_floating(dtype)
        dtypes = {
            name: dtype if tensor_dtype.is_floating_point else tensor_dtype for name, tensor_dtype in dtypes.items()
        }
    described = {
        name: torch.empty(info.shape, dtype=dtypes[name], device="meta") for name, info in checkpoint.tensors.items()
    }
    files, left = companions(checkpoint)
    beside = {name: content for name, content in files.items() if isinstance(content, bytes | Member)}
    beside[CONFIG_NAME] = exported_config(module, origin, config, architecture, described)
    contents = weight_files(checkpoint, described, to=to, where=str(path))
    beside |= {name: content for name, content in contents.items() if isinstance(content, bytes | Member)}
    weights = {name: content for name, content in contents.items() if isinstance(content, TensorFile)}
    written, infinite = write_shards(
        module,
        origin.plan,
        checkpoint,
        origin.left_out,
        weights,
        beside,
        path,
        overwrite=overwrite,
        sources=protected(checkpoint),
    )
    proven = {*WORDS, *(name for step in origin.plan.steps for name in step.sources)}
    return Exported(
        path=path,
        follows=checkpoint.location,
        architecture=origin.architecture,
        tensors=tuple(checkpoint.tensors),
        new=(),
        copied=tuple(left_tensor.name for left_tensor in origin.left_out if left_tensor.equals not in proven),
        not_written=(),
        files=written,
        not_copied=left,
        infinite=infinite,
        unnamed=origin.unnamed,
    )


def _dtypes(module: nn.Module, plan: Plan, checkpoint: Checkpoint) -> dict[str, torch.dtype]:
    """The dtype to write each tensor of the checkpoint in: that of the module's tensor, if there is one."""
    dtypes = moved_dtypes(module, plan)
    equal = {left.name: dtypes[left.equals] for left in plan.left_out if left.equals in dtypes}
    return {name: (dtypes | equal).get(name, info.dtype) for name, info in checkpoint.tensors.items()}


def _values(module: nn.Module) -> dict[str, Tensor]:
    """The module's tensors by name."""
    values = {name: tensor.detach() for name, tensor in named_tensors(module)}
    reasons = {name: _unwritable(tensor) for name, tensor in values.items()}
    faults = [
        Fault(code=Code.TENSOR_UNWRITABLE, where=name, message=reason[0], hint=reason[1])
        for name, reason in reasons.items()
        if reason is not None
    ]
    if faults:
        raise TargetError(faults)
    repeated = {name: repeated_bytes(tensor) for name, tensor in values.items()}
    charge("made", sum(repeated.values()), where=max(repeated, key=repeated.__getitem__, default=""))
    return values


def _unwritable(tensor: Tensor) -> tuple[str, str] | None:
    """The reason why a tensor cannot be written, and a hint."""
    if nn.parameter.is_lazy(tensor):
        return "it has no shape before the module has run", "run the module once"
    if tensor.is_meta:
        return "it is on the meta device and has no values", "load or initialise the module first"
    if hasattr(tensor, "__tensor_flatten__"):  # torch's protocol of tensors that are made of others
        return f"it is a {type(tensor).__name__}, which may be a part only", "gather it into a plain tensor first"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}, and checkpoints hold dense tensors", "make it dense first"
    if not holds_values(tensor):
        return WITHOUT_VALUES, "load or initialise the module first"
    return None


def _tensors(
    origin: Origin, values: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], tuple[str, ...], tuple[LeftOut, ...]]:
    """The tensors to write, in the followed checkpoint's order; the names that are copied; those that are left out."""
    plan, checkpoint = origin.plan, origin.checkpoint
    found: dict[str, Tensor] = {}
    made_of: dict[str, Step] = {}
    faults: list[Fault] = []
    for step in plan.steps:
        for name, tensor in _sources(step, origin, values).items():
            other = made_of.setdefault(name, step)
            if other is step or step.rule.fold:
                found[name] = tensor
            elif not same_bits(tensor.cpu(), found[name].cpu()):
                faults.append(copies_differ(name, other.targets, step.targets))
    if faults:
        raise PlanError(alike(faults))
    if checkpoint is None or origin.changed:
        return found, (), origin.left_out
    copied = []
    for left in origin.left_out:
        content = Content.parse(left.equals)
        if left.equals in found:
            found[left.name] = found[left.equals]
        elif content is not None:
            found[left.name] = content.whole(plan.sources[left.name].shape, plan.sources[left.name].dtype)
        else:
            found[left.name] = checkpoint.read(left.name)
            copied.append(left.name)
    return {name: found[name] for name in checkpoint.tensors}, tuple(copied), ()


def _sources(step: Step, origin: Origin, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a step reads, made of the module's values."""
    plan, checkpoint = origin.plan, origin.checkpoint
    read = checkpoint.read if checkpoint is not None and not set(step.sources) & set(origin.new) else None
    if read is not None and _untouched(step, plan, values, read):
        as_read = step.layout is not None  # a formula's sources may be of several dtypes
        dtype = values[step.targets[0]].dtype
        return {name: read(name) if as_read else cast(read(name), dtype) for name in step.sources}
    if step.layout is not None and not step.rule.back:
        raise PlanError(irreversible(step.rule))
    return dict(backward(step, plan.sources, values.__getitem__, plan.arithmetic(step), read))


def _untouched(step: Step, plan: Plan, values: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> bool:
    """Whether the targets of an inexact step still have the values that they were loaded with."""
    if step.rule.exact:
        return False
    loaded = forward(step, plan.targets, read, plan.arithmetic(step))
    return all(same_bits(cast(value, values[name].dtype), values[name].cpu()) for name, value in loaded)


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Cast the tensors to ``dtype``; also returns how many finite values of each became infinite."""
    if dtype is None:
        return dict(tensors), {}
    require_floating(dtype)
    result = {name: cast(tensor, dtype) for name, tensor in tensors.items()}
    infinite = {
        name: int(tensor.isfinite().sum() - result[name].isfinite().sum())
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and torch.finfo(tensor.dtype).max > torch.finfo(dtype).max
    }
    return result, {name: count for name, count in infinite.items() if count}


def _warn(result: Exported) -> None:
    """Warn of what is allowed and should be known."""
    if result.not_written:
        names = ", ".join(left.name for left in result.not_written)
        message = f"{result.path} is a {result.architecture}: {names} of {result.follows} are not in it"
        warnings.warn(message, PortingWarning, stacklevel=3)
    if result.unnamed:
        message = f"no rule says what a checkpoint calls {', '.join(result.unnamed)}: not in {result.path}"
        warnings.warn(message, PortingWarning, stacklevel=3)
    if result.infinite:
        counts = ", ".join(f"{count} of {name}" for name, count in result.infinite.items())
        warnings.warn(f"the cast made finite values infinite: {counts}", PortingWarning, stacklevel=3)

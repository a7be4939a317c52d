"""The reference: the model as transformers runs it.  The only part of the library that imports transformers to run it.

Its class is the one whose parameters are the checkpoint's tensors.  ``config.json`` may name another one.  The files of
bert-base-uncased, for one, hold a pooler and a next-sentence head, and their config says ``BertForMaskedLM``, which has
neither.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from porting.build import bounded, bounds
from porting.checkpoint import Checkpoint
from porting.checkpoint.errors import quote
from porting.errors import Code, Fault, Message, Option, PortingError, VerifyError, nearest
from porting.frames import users_line
from porting.plan.fault_grouping import group_alike, listed
from porting.target import TargetError

TYPES, PADDING = "type_vocab_size", "pad_token_id"

CHOICES = 2
"""How many continuations a multiple-choice model is given."""


def choices(architecture: str) -> int | None:
    """The number of choices if the reference takes ids [b c s], None if it takes [b s]."""
    return CHOICES if architecture.endswith("ForMultipleChoice") else None


def model_class(architecture: str) -> Any | None:  # its methods have no types
    """The class of transformers with this name; None where it has no model of that name.

    Args:
        architecture: as ``config.json`` spells it.

    Raises:
        VerifyError: transformers cannot import it: a package that it needs is missing or broken, or another module of
            the same name is found first.
    """
    import transformers  # noqa: PLC0415  # costs more than loading a model: only those who run the reference pay for it

    try:
        found = getattr(transformers, architecture, None)
    except (ImportError, RuntimeError) as error:
        first: BaseException = error
        while (before := first.__cause__ or first.__context__) is not None:
            first = before
        message = f"transformers cannot import {architecture}: {type(first).__name__}: {' '.join(str(first).split())}"
        hint = f"at {users_line(first)}; mend the package, or take away what is found in its place"
        raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint=hint)) from error
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def load_reference(
    checkpoint: Checkpoint, architecture: str, dtype: torch.dtype, *, untouched: bool = False
) -> nn.Module:
    """The checkpoint in transformers' own model, in eval mode, with attention and mixtures of experts written out.

    transformers is given the config and the tensors that were read here, and no path: of a directory it would choose
    the files itself, by names in the config and by rules of its own, and open links, pipes and files of any size.

    Args:
        checkpoint: a checkpoint with a directory and a config.
        architecture: the class, as ``config.json`` spells it.
        untouched: no value is read before it is used, and parameters are views of the mapped files.

    Raises:
        VerifyError: transformers has no such class, cannot load the checkpoint, or reads other files of it.
    """
    import transformers  # noqa: PLC0415  # as above

    make = model_class(architecture)
    if make is None:
        known = [name for name in dir(transformers) if name[:1].isupper()]
        hint = nearest(architecture, known) or Message("say which class the reference is: ", Option("architecture"))
        message = f"transformers {transformers.__version__} has no model {architecture!r}"
        raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint=hint))
    if checkpoint.path is None or not checkpoint.config:
        message = "transformers needs the weights and a config.json to run the reference"
        raise VerifyError(Fault(code=Code.NO_REFERENCE, where=checkpoint.location, message=message))
    _require_small(checkpoint)
    _require_same_files(checkpoint)
    values = {
        name: checkpoint.read(name, own=info.dtype == dtype and not untouched)  # others are cast, and so copied
        for name, info in checkpoint.tensors.items()
    }
    with quiet(), bounded(bounds(checkpoint.tensors, checkpoint.config)):
        try:
            model: nn.Module = make.from_pretrained(
                None,
                config=make.config_class.from_dict(plain_fields(checkpoint.config)),
                state_dict=values,
                dtype=dtype,
                local_files_only=True,
                **written_out(make),
            )
        except PortingError:
            raise
        except Exception as error:  # the reference may raise anything, and it is not our code
            message = f"transformers cannot load it as {architecture}: {refusal(error, checkpoint.config)}"
            raise VerifyError(Fault(code=Code.NO_REFERENCE, where=checkpoint.location, message=message)) from error
    checkpoint.require_in_place()
    _restore_padding_rows(model, values)
    return model.eval()


IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_\w+)?")
"""Fields of a config, in its parts too, that say by which code attention or experts are computed."""


def plain_fields(config: Mapping[str, object]) -> dict[str, object]:
    """A copy of a config for transformers, without the fields that say which code computes.

    ``"attn_implementation": "org/name"`` makes transformers fetch code from the hub and import it, where the package
    ``kernels`` is installed.

    >>> plain_fields({"attn_implementation": "org/name", "text_config": {"_attn_implementation": "x", "n": [1]}})
    {'text_config': {'n': [1]}}
    """
    return {name: _plain(value) for name, value in config.items() if not IMPLEMENTATION.fullmatch(str(name))}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return plain_fields(value)
    return [_plain(one) for one in value] if isinstance(value, list) else value


def written_out(make: Any) -> dict[str, str]:  # its methods have no types
    """The arguments by which a class of transformers writes attention and mixtures of experts out."""
    given = {"attn_implementation": "eager"}
    if hasattr(make, "set_experts_implementation"):  # the first releases with 5 have one way for experts
        given["experts_implementation"] = "eager"
    return given


@torch.no_grad()
def _restore_padding_rows(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give the padding's row of each embedding back what the checkpoint has there.

    Some models of transformers set it to zero after the checkpoint was loaded, as Chinese-CLIP's initialisation does.

    Args:
        values: the checkpoint's tensors.
    """
    for path, part in model.named_modules():
        row = part.padding_idx if isinstance(part, nn.Embedding) else None
        if row is None or part.weight.is_meta or bool(part.weight[row].any()):
            continue
        name = next(
            (one for one in values if one == f"{path}.weight" or path.endswith(one.removesuffix(".weight"))), ""
        )
        stored = values.get(name)
        if stored is None or stored.shape != part.weight.shape or not bool(stored[row].any()):
            continue
        others = [number for number in range(min(len(stored), COMPARED)) if number != row]
        if torch.equal(stored[others].to(part.weight.dtype), part.weight[others]):
            part.weight[row] = stored[row].to(part.weight.dtype)


COMPARED = 4
"""How many rows of an embedding are compared to see that it is the checkpoint's."""


def refusal(error: Exception, fields: Mapping[str, object]) -> str:
    """The error of transformers about a config that it refuses, in one line.

    Args:
        error: what it raised.
        fields: the config.

    >>> refusal(KeyError("gelu_magic"), {"hidden_act": "gelu_magic"})
    "it does not know hidden_act = 'gelu_magic'"
    >>> refusal(KeyError("rope_theta"), {})
    "it needs 'rope_theta' and does not find it"
    >>> refusal(ValueError("too few heads"), {})
    'ValueError: too few heads'
    """
    if isinstance(error, KeyError) and error.args:
        (key, *_) = error.args
        named = next((field for field, value in fields.items() if isinstance(value, str) and value == key), None)
        return f"it needs {key!r} and does not find it" if named is None else f"it does not know {named} = {key!r}"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


MOST_VALUES = 500_000
"""Values in a config that transformers is given, and labels that it makes names for: each takes it microseconds."""


def _require_small(checkpoint: Checkpoint) -> None:
    """Refuse a config that transformers would take minutes and gigabytes for."""
    labels = checkpoint.config.get("num_labels")
    if isinstance(labels, int) and labels > MOST_VALUES:
        reason = f"{labels} labels (num_labels), and transformers makes a name for each"
    elif (count := _count(checkpoint.config)) > MOST_VALUES:
        reason = f"{count} values, each of which transformers copies several times"
    else:
        return
    message = f"the config has {reason}; at most {MOST_VALUES} are given to it"
    hint = "take out of config.json what the model does not need"
    raise VerifyError(Fault(code=Code.NO_REFERENCE, where=checkpoint.location, message=message, hint=hint))


def _require_same_files(checkpoint: Checkpoint) -> None:
    """Refuse a config that names another file of weights for transformers than the one that was read."""
    wanted = checkpoint.config.get("transformers_weights")
    index = [checkpoint.index_file.name] if checkpoint.index_file is not None else []
    if wanted is not None and wanted not in [*index, *(file.name for file in checkpoint.files)]:
        message = (
            f"config.json names another file of weights for transformers: transformers_weights = {quote(str(wanted))}"
        )
        hint = "open that file by its own path, or take the field out of config.json"
        raise VerifyError(Fault(code=Code.NO_REFERENCE, where=checkpoint.location, message=message, hint=hint))


def _count(value: object) -> int:
    """The values in what JSON holds."""
    if isinstance(value, Mapping):
        return sum(map(_count, value.values())) + 1
    return sum(map(_count, value)) + 1 if isinstance(value, list) else 1


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars and advice: what matters is in our report."""
    from transformers.utils import logging  # noqa: PLC0415  # as above

    log: Any = logging  # its functions have no types
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def silent_fields(config: Mapping[str, object]) -> dict[str, object]:
    """The reference's defaults for the fields that inputs depend on and that the config lacks, as older files do.

    >>> silent_fields({"model_type": "bert"}), silent_fields({"model_type": "bart", "pad_token_id": 5})
    ({'type_vocab_size': 2, 'pad_token_id': 0}, {})
    """
    import transformers  # noqa: PLC0415  # as above

    kind, asked = config.get("model_type"), [name for name in (TYPES, PADDING) if name not in config]
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING or not asked:
        return {}
    made = transformers.CONFIG_MAPPING[kind]()
    found = {name: getattr(made, name, None) for name in asked}
    return {name: one for name, one in found.items() if isinstance(one, int)}


def usual_fields(config: Mapping[str, object]) -> dict[str, object]:
    """Fields that the reference's family calls otherwise, under their usual names, as transformers knows them.

    >>> usual_fields({"model_type": "gpt2", "n_positions": 1024})
    {'max_position_embeddings': 1024}
    """
    import transformers  # noqa: PLC0415  # as above

    names = transformers.CONFIG_MAPPING
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in names:
        return {}
    renamed: Mapping[str, str] = getattr(names[kind], "attribute_map", {})
    return {usual: config[own] for usual, own in renamed.items() if own in config}


FIRST = (
    "MODEL",
    "MODEL_FOR_PRETRAINING",
    "MODEL_FOR_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
)
"""The tasks of transformers' own lists whose classes are named first."""


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How the parameters of a class and the tensors of a checkpoint cover each other, by transformers' own loading.

    Attributes:
        random: its parameters that the checkpoint has nothing for: transformers draws them.
    """

    name: str
    lacks: tuple[str, ...]
    random: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether each is in the other."""
        return not self.lacks and not self.random


@dataclass(frozen=True, kw_only=True)
class ReferenceClass:
    """The class of transformers that a port is compared with.

    Attributes:
        lacks: the checkpoint's tensors that it does not have.
        fuller: a class that has a place for all tensors, where this one has not.
        said: why it is not the one that config.json names; empty where it is.
    """

    name: str
    lacks: tuple[str, ...] = ()
    fuller: str = ""
    said: str = ""

    def warnings(self, read: Collection[str]) -> list[str]:
        """Warnings about the choice of the class.

        Args:
            read: the checkpoint's tensors that the table reads: what it drops is not missed.
        """
        lost = [name for name in self.lacks if name in read]
        found = [self.said] if self.said else []
        if lost:
            lacking = f"transformers.{self.name} has no {parts(lost)}: what the port makes of them is not compared"
            fuller = Message(" (", Option("architecture", self.fuller), " has one)") if self.fuller else ""
            found.append(Message(lacking, fuller))
        return found


def reference_class(checkpoint: Checkpoint, asked: str | None = None) -> ReferenceClass:
    """The class that a checkpoint is run with.

    It is the one that was asked for; else the one that ``config.json`` names, where that and the checkpoint cover each
    other; else the one that has a place for most of the checkpoint, of those whose parameters it fills.

    Args:
        checkpoint: only its names, shapes and config are looked at.
        asked: the class, as transformers spells it.

    Raises:
        VerifyError: nothing says which.
    """
    names = declared(checkpoint.config)
    wanted = [asked] if asked else names[:1]
    first = [one for one in (coverage(checkpoint, name) for name in wanted) if one is not None]
    if first and (first[0].complete or (asked and not first[0].lacks)):
        return ReferenceClass(name=first[0].name)
    others = [name for name in usual_classes(checkpoint.config) if name not in wanted]
    found = [*first, *(one for one in (coverage(checkpoint, name) for name in others) if one is not None)]
    full = next((one.name for one in found if one.complete), "")
    if asked:
        return ReferenceClass(name=asked, lacks=first[0].lacks if first else (), fuller=full)
    if not found:
        return ReferenceClass(name=_named(checkpoint, names, ()))
    best = max(found, key=_rank)
    equal = [one.name for one in found if _rank(one) == _rank(best)]
    name = best.name if best.name in names or len(equal) == 1 else _named(checkpoint, (), equal)
    said = ""
    if names and name != names[0]:
        theirs = first[0] if first else None
        said = f"config.json names {names[0]}, {_why(theirs)}: compared with transformers.{name}"
        said = Message(said, " (", Option("architecture", names[0]), " takes the other)") if theirs else said
    return ReferenceClass(name=name, lacks=best.lacks, fuller=full, said=said)


def _rank(one: Coverage) -> tuple[bool, int, int]:
    return not one.random, -len(one.lacks), -len(one.random)


def _why(theirs: Coverage | None) -> str:
    """The reason why a class that config.json names is not the right one, for a message."""
    if theirs is None:
        return "which transformers does not have"
    kind, names = ("has no", theirs.lacks) if theirs.lacks else ("needs", theirs.random)
    return f"which {kind} {parts(names)}{'' if theirs.lacks else ', which the checkpoint does not have'}"


def parts(names: Sequence[str]) -> str:
    """The modules that tensors belong to, those of all layers once.

    >>> parts(["cls.seq_relationship.weight", "cls.seq_relationship.bias", "h.0.mask", "h.1.mask", "scale"])
    "'cls.seq_relationship', 'h.0' and 1 more like it, 'scale'"
    """
    modules = dict.fromkeys(name.rpartition(".")[0] or name for name in names)
    return ", ".join(listed(some) for some in group_alike(modules))


def _named(checkpoint: Checkpoint, names: Sequence[str], equal: Sequence[str]) -> str:
    """The first of the names."""
    if names:
        return names[0]
    message = "neither the table nor config.json says which architecture the reference has"
    hint = Message("name it: ", Option("architecture"), ", as transformers spells it")
    if equal:
        message = f"config.json names no architecture, and the checkpoint fills {' as well as '.join(equal)}"
        hint = Message("name one: ", Option("architecture", equal[0]))
    raise VerifyError(Fault(code=Code.NO_REFERENCE, where=checkpoint.location, message=message, hint=hint))


def declared(config: Mapping[str, object]) -> list[str]:
    """The classes that ``config.json`` names."""
    found = config.get("architectures")
    return [str(one) for one in found] if isinstance(found, list) else []


def usual_classes(config: Mapping[str, object]) -> tuple[str, ...]:
    """The classes that transformers has for such a config, the plain model first; none for a model type of others.

    >>> usual_classes({"model_type": "bert"})[:2]
    ('BertModel', 'BertForPreTraining')
    """
    import transformers  # noqa: PLC0415  # costs more than loading a model: only those who run the reference pay for it
    from transformers.models.auto import modeling_auto  # noqa: PLC0415  # as above

    kind = config.get("model_type")
    if not isinstance(kind, str):
        return ()
    ending = "_MAPPING_NAMES"
    tasks = [name.removesuffix(ending) for name in vars(modeling_auto) if name.endswith(ending)]
    tasks = [*FIRST, *(name for name in tasks if name.startswith("MODEL_") and name not in FIRST)]
    named: list[str] = []
    for task in tasks:
        found = getattr(modeling_auto, task + ending, {}).get(kind, ())
        named += [found] if isinstance(found, str) else found
    return tuple(name for name in dict.fromkeys(named) if hasattr(transformers, name))


def coverage(checkpoint: Checkpoint, name: str) -> Coverage | None:
    """How a class covers a checkpoint; None where transformers has no such class, or cannot tell.

    transformers' own loading is run on the meta device: it knows older spellings, prefixes and tensors that were fused
    or stacked since, and no weight is read.
    """
    make = model_class(name)
    if make is None:
        return None
    empty = {
        key: torch.empty(tuple(info.shape), dtype=info.dtype, device="meta") for key, info in checkpoint.tensors.items()
    }
    try:
        with quiet():
            with torch.device("meta"), bounded(bounds(checkpoint.tensors, checkpoint.config)):
                config = make.config_class.from_dict(plain_fields(checkpoint.config))
                model = make._from_config(config, **written_out(make))
            return _loaded(name, model, empty)
    except TargetError:
        raise  # no class of this config stays within the bounds
    except Exception:  # noqa: BLE001  # the reference may raise anything, and so may what is private in it
        return None


def _loaded(name: str, model: Any, empty: Mapping[str, torch.Tensor]) -> Coverage:
    """The missing and unexpected keys, as ``from_pretrained`` of transformers reports with ``output_loading_info``."""
    from transformers import conversion_mapping, core_model_loading, modeling_utils  # noqa: PLC0415  # as above

    loading: Any = core_model_loading
    mapping: list[Any] = [*conversion_mapping.get_model_conversion_mapping(model)]
    how = modeling_utils.LoadStateDictConfig(device_map={"": torch.device("meta")}, weight_mapping=mapping)
    info, _ = loading.convert_and_load_state_dict_in_model(model=model, state_dict=dict(empty), load_config=how)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    kinds = (loading.WeightRenaming, loading.WeightConverter)
    renamings, converters = ([one for one in mapping if isinstance(one, kind)] for kind in kinds)
    state = model.state_dict()
    spelled = {
        key: loading.rename_source_key(key, renamings, converters, model.base_model_prefix, state)[0] for key in empty
    }
    lost = {*info.unexpected_keys, *(one[0] if isinstance(one, tuple) else one for one in info.mismatched_keys)}
    return Coverage(
        name=name,
        lacks=tuple(key for key in empty if key in lost or spelled[key] in lost),
        random=tuple(sorted(info.missing_keys)),
    )

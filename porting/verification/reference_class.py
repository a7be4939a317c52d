"""Find the class of transformers that a checkpoint holds: the one whose parameters are the checkpoint's tensors.

``config.json`` may name another one.  The files of bert-base-uncased, for one, hold a pooler and a next-sentence head,
and their config says ``BertForMaskedLM``, which has neither.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from porting.build import bounded, bounds
from porting.checkpoint import Checkpoint
from porting.errors import Code, Fault, Message, Option, VerifyError
from porting.plan.fault_grouping import group_alike, listed
from porting.target import TargetError
from porting.verification.reference import model_class, quiet

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

    ending = "_MAPPING_NAMES"
    tasks = [name.removesuffix(ending) for name in vars(modeling_auto) if name.endswith(ending)]
    tasks = [*FIRST, *(name for name in tasks if name.startswith("MODEL_") and name not in FIRST)]
    named: list[str] = []
    for task in tasks:
        found = getattr(modeling_auto, task + ending, {}).get(config.get("model_type"), ())
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
                model = make._from_config(make.config_class.from_dict(dict(checkpoint.config)))
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


__all__ = ["Coverage", "ReferenceClass", "coverage", "declared", "reference_class", "usual_classes"]

"""The mapping that transformers applies to a checkpoint's tensors when it loads them, as layouts.

Names are renamed by its own code, and its own operations are run on tensors that have a layout and no values.  Nothing
is known here of any of them: whatever they call of torch is seen, what only moves elements is noted, and anything that
computes is refused by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from porting.build import OWN_CODE, bounded, bounds
from porting.errors import Code, Fault, PortingError, nearest
from porting.notation.faults import TableError
from porting.plan.recipe import Described
from porting.registries import REGISTRY
from porting.registries.layout import (
    Axis,
    LayoutError,
    Part,
    Source,
    concatenated,
    divided,
    reshaped,
    stacked,
    unify,
)
from porting.verification.reference import declared, model_class, plain_fields, quiet, usual_classes, written_out


class FollowedTensor(Tensor):
    """A tensor on the meta device that knows which elements of which source it holds.

    Attributes:
        entire: it is the one source, with nothing done to it yet.
    """

    axes: tuple[Axis, ...]
    sources: tuple[Source, ...]
    entire: bool

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, and note what it did."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        results = list(result) if isinstance(result, tuple | list) else [result]
        if not any(isinstance(one, Tensor) for one in results):
            return result
        name = getattr(func, "__name__", str(func))
        if name in _JOINING:
            return _joined(name, [*args], kwargs, result)
        held = next((one for one in args if isinstance(one, FollowedTensor)), None)
        done = _FOLLOWED.get(name)
        if held is None or done is None or sum(isinstance(one, Tensor) for one in (*args, *kwargs.values())) > 1:
            message = f"torch's {name!r}"
            raise LayoutError(message)
        layouts, entire = done(held, func, args[1:], kwargs, results), name in _AS_IT_IS and held.entire
        made = [
            follow(one.as_subclass(Tensor), axes, held.sources, entire=entire)
            for one, axes in zip(results, layouts, strict=True)
        ]
        return type(result)(made) if isinstance(result, tuple | list) else made[0]


def follow(
    tensor: Tensor, axes: tuple[Axis, ...], sources: tuple[Source, ...], *, entire: bool = False
) -> FollowedTensor:
    """A meta tensor with a layout."""
    made: FollowedTensor = tensor.as_subclass(FollowedTensor)
    made.axes, made.sources, made.entire = axes, sources, entire
    return made


def opened(name: str, shape: Sequence[int], dtype: torch.dtype) -> FollowedTensor:
    """A tensor of a file, every axis an index of its own."""
    axes = tuple((Part(one),) for one in shape)
    source = Source(names=[name], axes=axes)
    return follow(torch.empty(tuple(shape), dtype=dtype, device="meta"), axes, (source,), entire=True)


Layouts = list[tuple[Axis, ...]]


def _kept(held: FollowedTensor, func: Any, args: Sequence[Any], kwargs: Any, results: Sequence[Tensor]) -> Layouts:
    if any(one.dtype != held.dtype or one.shape != held.shape for one in results):
        message = f"a cast from {held.dtype} to {results[0].dtype}"
        raise LayoutError(message)
    return [held.axes for _ in results]


def _reshaped(held: FollowedTensor, func: Any, args: Sequence[Any], kwargs: Any, results: Sequence[Tensor]) -> Layouts:
    return [reshaped(held.axes, one.shape) for one in results]


def _permuted(held: FollowedTensor, func: Any, args: Sequence[Any], kwargs: Any, results: Sequence[Tensor]) -> Layouts:
    """The same on a tensor whose sizes tell its axes apart says where each goes."""
    told = func(torch.empty(tuple(range(held.dim())), device="meta"), *args, **kwargs)
    return [tuple(held.axes[number] for number in told.shape)]


def _cut(held: FollowedTensor, func: Any, args: Sequence[Any], kwargs: Any, results: Sequence[Tensor]) -> Layouts:
    place = next((n for n in range(held.dim()) if results[0].shape[n] != held.shape[n]), 0)
    pieces = divided(held.axes[place], [one.shape[place] for one in results])
    return [(*held.axes[:place], piece, *held.axes[place + 1 :]) for piece in pieces]


Follower = Callable[[FollowedTensor, Any, Sequence[Any], Any, Sequence[Tensor]], Layouts]

_AS_IT_IS = frozenset({"contiguous", "clone", "detach", "to", "cpu"})

_FOLLOWED: dict[str, Follower] = {
    **dict.fromkeys(_AS_IT_IS, _kept),
    **dict.fromkeys(("reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(("transpose", "swapaxes", "permute", "t", "movedim"), _permuted),
    **dict.fromkeys(("chunk", "split", "tensor_split", "split_with_sizes"), _cut),
}

_JOINING = ("cat", "concat", "concatenate", "stack")


def _joined(name: str, args: list[Any], kwargs: dict[str, Any], result: Tensor) -> FollowedTensor:
    tensors = list(args[0] if args else kwargs["tensors"])
    if not all(isinstance(one, FollowedTensor) for one in tensors):
        message = f"torch's {name!r} of a constant"
        raise LayoutError(message)
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    sources = tuple(source for one in tensors for source in one.sources)
    place = dim % result.dim()
    plain = result.as_subclass(Tensor)
    if name == "stack":
        count, axes = stacked(
            [one.axes for one in tensors], [one.sources[0] if one.entire else None for one in tensors]
        )
        return follow(plain, (*axes[:place], (count,), *axes[place:]), sources)
    first = tensors[0].axes
    for other in tensors[1:]:
        for number, (mine, theirs) in enumerate(zip(first, other.axes, strict=True)):
            if number != place:
                unify(theirs, mine)
    whole = first[place] if len(tensors) == 1 else (concatenated([one.axes[place] for one in tensors]),)
    return follow(plain, (*first[:place], whole, *first[place + 1 :]), sources)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Tensors of a file that become tensors of the model together."""

    sources: tuple[Source, ...]
    targets: Mapping[str, tuple[Axis, ...]]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The result of loading a checkpoint's names and shapes with transformers.

    Attributes:
        unread: tensors of the file that the model does not have; transformers leaves them out.
        ties: names of the model that share the storage of another one, which is written.
        untrained: names of the model that the file has nothing for; transformers draws them.
    """

    architecture: str
    conversions: tuple[Conversion, ...]
    unread: tuple[str, ...]
    ties: Mapping[str, str]
    untrained: tuple[str, ...]


def entries() -> tuple[str, ...]:
    """The names of transformers' registry: model types, and classes that have an entry of their own."""
    mapping: Any = module("conversion_mapping")
    built: Mapping[str, object] = mapping._build_checkpoint_conversion_mapping()
    return tuple(sorted(built, key=lambda name: (name.lower(), name)))


def loading(
    entry: str,
    config: Mapping[str, object],
    tensors: Mapping[str, Described] | None,
    *,
    ported: Mapping[str, Described] | None = None,
) -> Loading:
    """Load a checkpoint's names and shapes as transformers does.

    Args:
        config: the checkpoint's config; empty for the usual one of the entry.
        tensors: the checkpoint's tensors; None for those that transformers itself would save.
    """
    model = _on_meta(entry, config, tensors if tensors is not None else ported or {})
    found = _saved(model) if tensors is None else tensors
    try:
        with quiet():
            return _followed(entry, model, found)
    except LayoutError as error:
        message = f"{entry!r} of transformers {_version()}: {_operation(error)} {error}, which no rule says"
        hint = "write a table of your own, or load the checkpoint with transformers and save it again"
        raise _refused(entry, message, hint, Code.REGISTRY_REFUSED) from error


def _followed(entry: str, model: Any, tensors: Mapping[str, Described]) -> Loading:
    """Follow all tensors, in the order in which transformers reads them."""
    core: Any = module("core_model_loading")
    mapping: Any = module("conversion_mapping")
    renamings, converters, of_pattern = sorted_transforms(mapping.get_model_conversion_mapping(model))
    state: Mapping[str, torch.Tensor] = model.state_dict()
    begun: dict[str, tuple[Any, list[Source]]] = {}
    found: list[Conversion] = []
    unread: list[str] = []
    for name in sorted(tensors, key=getattr(core, "dot_natural_key", None)):
        key, pattern = core.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if key not in state and name in state:
            key, pattern = core.rename_source_key(name, [], [], model.base_model_prefix, state)
        if key not in state:
            unread.append(name)
            continue
        tensor = opened(name, tensors[name].shape, tensors[name].dtype)
        if pattern is None:
            found.append(Conversion(sources=tensor.sources, targets={key: tensor.axes}))
            continue
        if key not in begun:
            begun[key] = copy.deepcopy(of_pattern[pattern]), []
        converter, sources = begun[key]
        converter.add_tensor(key, name, pattern, tensor)
        sources += tensor.sources
    for key, (converter, sources) in begun.items():
        found.append(_converted(entry, key, converter, sources, model))
    written = {name: axes for one in found for name, axes in one.targets.items()}
    ties = _ties(model, written)
    return Loading(
        architecture=type(model).__name__,
        conversions=tuple(found),
        unread=tuple(unread),
        ties=ties,
        untrained=tuple(name for name in state if name not in written and name not in ties),
    )


def sorted_transforms(transforms: Sequence[Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return transformers' renamings and its converters, each apart, and the converters by their patterns."""
    core: Any = module("core_model_loading")
    renamings = [one for one in transforms if isinstance(one, core.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, core.WeightConverter)]
    return renamings, converters, {pattern: one for one in converters for pattern in one.source_patterns}


def _converted(entry: str, key: str, converter: Any, sources: list[Source], model: Any) -> Conversion:
    """Run the operations of one converter on what it collected."""
    try:
        made = converter.convert(key, model=model, config=model.config)
    except LayoutError:
        raise
    except Exception as error:  # its operations fail in their own ways
        message = f"{_operation(error)} fails on the tensors of {key!r}: {type(error).__name__}: {error}"
        hint = "see whether transformers loads the checkpoint"
        raise _refused(entry, message, hint, Code.REGISTRY_REFUSED) from error
    targets = {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
    strange = [name for name, one in targets.items() if not isinstance(one, FollowedTensor)]
    if strange:
        message = f"{strange[0]!r} is made of no tensor of the checkpoint"
        raise LayoutError(message)
    whole = dict.fromkeys(one.whole or one for one in sources)
    return Conversion(sources=tuple(whole), targets={name: one.axes for name, one in targets.items()})


def _operation(error: BaseException) -> str:
    """The operation of transformers in which an error was raised."""
    core: Any = module("core_model_loading")
    found, trace = "", error.__traceback__
    while trace is not None:
        this = trace.tb_frame.f_locals.get("self")
        found = type(this).__name__ if isinstance(this, core.ConversionOps) and not found else found
        trace = trace.tb_next
    return found or "its renaming"


def _ties(model: nn.Module, written: Mapping[str, object]) -> dict[str, str]:
    """The names that nothing writes and that are other names of a parameter that something writes."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, str] = {}
    for group in names.values():
        first = next((name for name in group if name in written), None)
        found |= {name: first for name in group if first is not None and name not in written}
    return found


def _saved(model: Any) -> Mapping[str, Described]:
    """The tensors that transformers writes for a model, as it names and lays them out in a file."""
    core: Any = module("core_model_loading")
    modeling: Any = module("modeling_utils")
    with quiet():
        state = modeling.remove_tied_weights_from_state_dict(model.state_dict(), model)
        written: Mapping[str, torch.Tensor] = core.revert_weight_conversion(model, state)
    return written


def _on_meta(entry: str, config: Mapping[str, object], tensors: Mapping[str, Described]) -> Any:
    """The model of transformers that a checkpoint holds, without weights."""
    import transformers  # noqa: PLC0415  # only those who ask for such a table wait for it

    known = transformers.CONFIG_MAPPING
    kind = str(config.get("model_type", entry))
    if kind not in known and model_class(entry) is None:
        hint = nearest(kind, [*known, *entries()]) or f"{entries()[0]!r} is the first of {len(entries())} entries"
        raise _refused(entry, f"transformers {_version()} knows no {kind!r}", hint)
    usual = usual_classes({"model_type": kind})
    names = [entry, *declared(config), *(usual if config else (*usual[1:2], *usual))]  # for show, one with a head
    make = next((found for found in map(model_class, dict.fromkeys(names)) if found is not None), None)
    if make is None:
        raise _refused(entry, f"transformers {_version()} has no model for {kind!r}", "write a table of your own")
    try:
        with quiet(), torch.device("meta"), bounded(bounds(tensors, config) if config else OWN_CODE):
            own = known[kind] if kind in known else make.config_class  # noqa: SIM401  # a lazy mapping
            given = own.from_dict(plain_fields(config)) if config else own()
            model: Any = make._from_config(given, **written_out(make))
    except (PortingError, MemoryError):
        raise
    except Exception as error:  # a config that fits no model fails in its constructor, in any way
        message = f"transformers cannot build {make.__name__}: {type(error).__name__}: {error}"
        raise _refused(entry, message, "see whether transformers loads the checkpoint") from error
    parts = {type(one).__name__ for one in model.modules()}
    parts |= {getattr(one.config, "model_type", "") for one in model.modules() if hasattr(one, "config")}
    if entry not in parts and (entry not in known or known[entry] is not type(model.config)):  # or another name of it
        hint = f"pass {REGISTRY}{kind}"
        raise _refused(entry, f"config.json has model_type {kind!r}, and {type(model).__name__} has no {entry!r}", hint)
    return model


def _refused(entry: str, message: str, hint: str, code: Code = Code.NO_TABLE) -> TableError:
    return TableError(Fault(code=code, where=REGISTRY + entry, message=message, hint=hint))


def module(name: str) -> Any:
    """A module of transformers that is not public."""
    import importlib  # noqa: PLC0415  # with transformers

    try:
        return importlib.import_module(f"transformers.{name}")
    except ImportError as error:
        message = f"transformers {_version()} has no {name}"
        hint = "install transformers 5 or newer"
        raise TableError(Fault(code=Code.NO_TABLE, message=message, hint=hint)) from error


def _version() -> str:
    import transformers  # noqa: PLC0415  # as above

    return transformers.__version__

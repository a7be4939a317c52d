"""The two models that are compared: the checkpoint's twin, and the user's module built to its size."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from warnings import catch_warnings

import torch
from torch import Tensor, nn

from porting.build import Bounds, bounded, bounds
from porting.checkpoint import Checkpoint
from porting.duplicate import duplicate
from porting.errors import Code, Fault, PortingError, VerifyError
from porting.notation.field import held, spellings, value_of
from porting.printable import text_of
from porting.suggesting.subjects.argument_names import SOUNDS, VISUAL, ArgumentMapping, given_argument_mapping
from porting.suggesting.subjects.building import (
    Builder,
    BuiltModule,
    UnknownSizesError,
    build_for,
    fields_asked,
    named_fields,
    with_fields,
    with_own_options,
)
from porting.suggesting.subjects.config_fields import NESTED, SHARE, Role, config_number, is_switch, stage_field
from porting.suggesting.subjects.fixed_depth import cut, cut_depths, depths_of, fewer, stacks, uncut
from porting.suggesting.subjects.forward_arguments import (
    find_argument_mapping,
    optional,
    refusal,
    without_ignored_mask,
)
from porting.suggesting.subjects.forward_effects import hides_padding, outputs_of, sees_later
from porting.suggesting.subjects.model_preparation import (
    in_float64,
    is_lazy,
    materialized,
    odd_numbers,
    refuse_computed,
    tells_nothing,
    zeros_of,
)
from porting.suggesting.subjects.operation_trace import Call, numbers_of
from porting.suggesting.subjects.questions import Asker
from porting.suggesting.subjects.sampler import BATCH, LENGTH, Sampler, row_length, rows_of, use_rows_of
from porting.suggesting.subjects.signal_arguments import signal_argument_mapping
from porting.suggesting.subjects.solved_sizes import (
    better_sizes,
    better_switches,
    own_sizes,
    sizes_by_default,
    solved_sizes,
    told_apart,
)
from porting.suggesting.subjects.traced_model import TracedModel, check_deterministic, with_slices
from porting.suggesting.subjects.twin import (
    IMAGES,
    OWN,
    SMALL,
    Measures,
    Twin,
    draw_parameters,
    is_constant,
    is_mask,
    make_twin,
    measures,
    pictured,
)
from porting.target import TargetError, named_tensors, plain_tensors
from porting.tracing.float64 import forced_float64
from porting.tracing.running import limit_threads
from porting.trials.modalities import DECODER_IDS, IDS, PIXELS, POSITIONS, text_fields
from porting.trials.padding import MASK
from porting.verification.reference import model_class, plain_fields


@dataclass(frozen=True, kw_only=True)
class ModelPair:
    """The two models that are compared.

    Attributes:
        into: what builds the user's module.
        twin: the reference, small and random.
        built: the user's module, to its size.
        config: the checkpoint's config with the defaults of its class.
        way: how the module's forward is given the reference's inputs.
        causal: the reference's positions see none behind them.
        available: the reference's inputs.
        longest: the longest row that both take.
        lazy: some of the module's parameters have a shape after a first run only.
        zeros: the module's matrices that it was built with at zero.
        full: the module takes no other rows than the longest, and the twin has so many positions.
        later: whether a token changes what is computed in front of it, in the module and in the reference; None where
            that does not show.
    """

    into: Builder
    twin: Twin
    built: BuiltModule
    config: Mapping[str, object]
    way: ArgumentMapping
    causal: bool
    available: tuple[str, ...]
    longest: int
    lazy: bool = False
    zeros: frozenset[str] = frozenset()
    full: bool = False
    later: tuple[bool | None, bool | None] = (None, None)

    @property
    def drawn(self) -> dict[str, object]:
        """Sizes of inputs that the checkpoint's config does not tell, and with which both models run."""
        return {name: value for name, value in self.twin.config.items() if name == "image_size"}

    @property
    def few_layers(self) -> bool:
        """Whether the twin may have fewer layers than the checkpoint."""
        return self.twin.shrunk or uncut(self.into) is not self.into

    def readied(self, module: nn.Module) -> nn.Module:
        """Another one of the user's modules, its lazy parameters in shape, called as the first one is."""
        return self.way.adapted(materialized(module, self.twin.sampler))


def completed_config(config: Mapping[str, object], architecture: str) -> dict[str, object]:
    """The config with what transformers takes for the fields that it lacks, under their usual names as well."""
    kind = model_class(architecture)
    if kind is None:
        return dict(config)
    try:
        made = kind.config_class.from_dict(plain_fields(config))
    except Exception as error:  # it may raise anything of what a config says
        said = " ".join(text_of(error).split())
        message = f"transformers refuses the checkpoint's config for {architecture}: {said[:300]}"
        raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message)) from error
    found: dict[str, object] = {**_properties(made), **made.to_dict()}
    found["attribute_map"] = dict(getattr(made, "attribute_map", {}))  # transformers' own other names for fields
    for name, path in NESTED.items():
        if name not in found and held(found, path):
            found[name] = value_of(found, path)
    # A table's sizes spell the share as the checkpoint does, and a twin is to have that field as well.
    return found | {name: value for name, value in config.items() if name in spellings(SHARE)}


def _properties(config: object) -> dict[str, object]:
    """The computed properties of a transformers config, such as its number of labels: a builder may read them."""
    kind = type(config)
    parts = ((name, getattr(kind, name, None)) for name in dir(kind) if name[0] != "_")
    names = [name for name, one in parts if isinstance(one, property) and one.fset is not None]  # what it can be given
    found: dict[str, object] = {}
    for name in names:
        with suppress(Exception), catch_warnings(action="ignore"):  # one may need what this config does not have
            value = getattr(config, name)
            setattr(config, name, value)  # XLNet refuses to be given the -1 that it reports as its positions
            found |= {name: value} if isinstance(value, str | int | float) else {}
    return found


def prepare(
    checkpoint: Checkpoint,
    into: Builder,
    architecture: str,
    folder: Path,
    *,
    seed: int,
    inputs: Mapping[str, str],
    ask: Asker,
    tell: Callable[[str, int, int], None],
    depth: int = 0,
) -> ModelPair:
    """Both models, ready to be run.

    A module that fails is tried with the options that its own parameters have by default, as the config may have other
    words for them.  One that fails on rows that are shorter than the longest is tried on the longest alone: many a one
    adds its whole table of positions to a row.

    Args:
        into: what builds the module.
        architecture: the reference's class.
        folder: where twins are written.
        seed: of the twin's weights.
        inputs: [inputs], where the caller says them.
        ask: what nothing tells.
        tell: told about progress.
        depth: the twin's largest number of layers, or of blocks in a stage; 0 for the usual one.

    Raises:
        VerifyError, TargetError: one of them cannot be built or run.
    """
    try:
        return _prepared(checkpoint, into, architecture, folder, seed, inputs, ask, tell, depth)
    except (VerifyError, TargetError) as error:
        own = with_own_options(into, completed_config(checkpoint.config, architecture))
        if own is not None:
            with suppress(PortingError):
                return _prepared(checkpoint, own, architecture, folder / "options", seed, inputs, ask, tell, depth)
        if not any(one.code is Code.FORWARD_FAILED for one in error.faults):
            raise
        padding = max(config_number(completed_config(checkpoint.config, architecture), Role.PADDING), 0)
        tries = [(one, most) for one in _named_lengths(text_of(error)) for most in (0, one + padding + 1)]
        tries += [(one, 0) for one in _likely_lengths(text_of(error), checkpoint.config) if (one, 0) not in tries]
        for number, (rows, positions) in enumerate(tries):
            use_rows_of(rows)
            with suppress(PortingError):
                place = folder / f"rows {number}"
                return _prepared(checkpoint, into, architecture, place, seed, inputs, ask, tell, depth, positions)
        use_rows_of(LENGTH)
        if isinstance(into, nn.Module):
            raise
        for number, rows in enumerate(dict.fromkeys((LENGTH, LENGTH + padding + 1))):  # some count from there
            with suppress(PortingError):
                full = folder / f"full {number}"
                return _prepared(checkpoint, into, architecture, full, seed, inputs, ask, tell, depth, rows)
        raise


def _named_lengths(said: str) -> list[int]:
    """The sizes that an error names, which may be the length that a module's rows have to have.

    >>> _named_lengths("The size of tensor a (7) must match the size of tensor b (16) at non-singleton dimension 1")
    [16]
    """
    told = re.findall(r"\((\d+)\)|\[([\d, ]+)\]|(?:expected|got|length) (\d+)", said.partition("(at /")[0])
    sizes = [int(one) for found in told for part in found for one in part.split(",") if one.strip().isdecimal()]
    return [one for one in dict.fromkeys(sizes) if LENGTH < one <= LONGEST][:MOST_LENGTHS]


LONGEST, MOST_LENGTHS = 128, 3
"""Rows of more tokens are not tried for a module that takes one length alone, nor more lengths."""


def _likely_lengths(said: str, config: Mapping[str, object]) -> list[int]:
    """Lengths of rows for a module that takes only multiples of some length, and does not say of which.

    Args:
        said: the error.
        config: the checkpoint's: what it calls a chunk, a block, a window is tried first.

    >>> _likely_lengths("AssertionError", {"chunk_size": 32, "sliding_window": 4096, "hidden_size": 64})
    [32, 8, 16, 64]
    """
    named = [value for name, value in config.items() if _CHUNK.search(name) and type(value) is int]
    likely = [*named, *POWERS] if _MULTIPLE.search(said) else []
    return [one for one in dict.fromkeys(likely) if LENGTH < one <= 2 * LONGEST]


POWERS = (8, 16, 64)
"""Lengths that are tried for a module that cuts rows into equal parts."""

_CHUNK = re.compile("chunk|block|window|segment|bucket")

_MULTIPLE = re.compile("AssertionError|multiple|divisib|is invalid for input of size|[Dd]on't add up")
"""Errors of modules about rows that they cannot cut into parts."""


def _prepared(
    checkpoint: Checkpoint,
    into: Builder,
    architecture: str,
    folder: Path,
    seed: int,
    inputs: Mapping[str, str],
    ask: Asker,
    tell: Callable[[str, int, int], None],
    depth: int,
    positions: int = 0,
    *,
    cuts: bool = True,
) -> ModelPair:
    """Prepare both models. ``positions`` and ``depth`` are the twin's; 0 for the usual ones.

    Args:
        cuts: a module of a fixed depth is cut to the twin's, if it runs then.
    """
    config = completed_config(checkpoint.config, architecture)
    made = _sized(config, into, architecture, folder, seed, checkpoint, positions, depth, cuts=cuts)
    try:
        return _readied(config, *made, seed, inputs, ask, tell, full=positions > 0)
    except PortingError:
        if uncut(made[0]) is made[0]:
            raise
        place = folder / "whole"
        return _prepared(checkpoint, into, architecture, place, seed, inputs, ask, tell, depth, positions, cuts=False)


def _readied(
    config: Mapping[str, object],
    into: Builder,
    twin: Twin,
    built: BuiltModule,
    seed: int,
    inputs: Mapping[str, str],
    ask: Asker,
    tell: Callable[[str, int, int], None],
    *,
    full: bool,
) -> ModelPair:
    """Both models with drawn weights, and what the module's forward takes."""
    limit_threads(sum(one.numel() for _, one in named_tensors(built.module) if not nn.parameter.is_lazy(one)))
    sampler = twin.sampler
    available = sampler.available
    refuse_computed(built.module, twin.reference)
    lazy, zeros = is_lazy(built.module), zeros_of(built.module)
    module = in_float64(materialized(built.module, sampler))
    draw_parameters(module, seed + 1, buffers=False)
    tell("finding out what forward takes", 0, 0)
    causal = _causal(twin)
    if inputs:
        way = given_argument_mapping(module, sampler.offered, inputs, width=sampler.width)
    elif not {*SOUNDS}.isdisjoint(available) or (IDS not in available and len(sampler.shapes[PIXELS]) == VIDEO_AXES):
        way = signal_argument_mapping(module, sampler, ask)
    else:
        way = find_argument_mapping(module, sampler, causal=causal, ask=ask)
        way = without_ignored_mask(module, way, sampler) if causal else way
        if causal and MASK in available and MASK not in way.named and config_number(twin.config, Role.PADDING, -1) >= 0:
            way = replace(way, internal=hides_padding(module, way, sampler))
        way = replace(way, more=optional(module, way, twin.reference))
    _run_once(module, way, sampler)
    module = way.adapted(module)
    built = replace(built, module=way.adapted(built.module), constants={**built.constants, **way.constants})
    return ModelPair(
        into=into,
        twin=twin,
        built=built,
        config=config,
        way=way,
        causal=causal,
        available=available,
        longest=_longest(twin, module, way),
        lazy=lazy,
        zeros=zeros,
        full=full or row_length() != LENGTH,
        later=_later(module, way, twin),
    )


def _run_once(module: nn.Module, way: ArgumentMapping, sampler: Sampler) -> None:
    """Run the module on inputs of the twin's."""
    named = [name for name in sampler.available if name in way.named]
    try:
        outputs_of(module, way, sampler.batch(named))
    except PortingError:
        raise
    except Exception as error:  # the user's own forward may raise anything
        raise refusal(module, way.rules, (), error) from error


def _later(module: nn.Module, way: ArgumentMapping, twin: Twin) -> tuple[bool | None, bool | None]:
    """Whether a token changes what is computed in front of it, in the module and in the reference."""
    named = [name for name in twin.sampler.available if name in way.named and name != POSITIONS]
    batch = twin.sampler.batch(named)
    sides = (partial(outputs_of, module, way), partial(_outputs, twin.reference))
    found: list[bool | None] = []
    for run in sides:
        try:
            found.append(sees_later(run, batch, front=twin.sampler.front))
        except Exception:  # noqa: BLE001  # the user's own forward may raise anything, and what follows tells it
            found.append(None)
    if found[0] is False and sees_later(sides[0], batch, earlier=True, front=twin.sampler.front) is not True:
        found[0] = None  # no token sees another one, as in embeddings alone
    return found[0], found[1]


def _sized(
    config: Mapping[str, object],
    into: Builder,
    architecture: str,
    folder: Path,
    seed: int,
    checkpoint: Checkpoint,
    positions: int,
    depth: int,
    *,
    cuts: bool,
) -> tuple[Builder, Twin, BuiltModule]:
    """The builder, the twin and the module: small if the module can be, else of the checkpoint's own sizes."""
    made = partial(make_twin, config, architecture, seed=seed, stored=frozenset(checkpoint.tensors))
    within = bounds(checkpoint.tensors, checkpoint.config)
    if isinstance(into, nn.Module):
        with bounded(within):
            built = build_for(into, config)
            short = _shortened(config, into, architecture, made, folder, built.module, depth) if cuts else None
            return short or (into, _of_own_sizes(made, config, built.module, folder), built)
    usable: tuple[Builder, Twin, BuiltModule] | None = None
    for number, usual in enumerate(measures(config)):
        to = replace(usual, positions=positions or usual.positions)
        to = replace(to, depth=depth, blocks=depth) if depth else to
        try:
            twin = runnable(made(folder / f"small {number}", small=True, to=to))
        except PortingError:  # the reference does not run with these sizes, or is too large with them
            continue
        try:
            told, small = _understood(into, twin, completed_config(twin.config, architecture), config)
        except PortingError:  # the module cannot be small
            break
        apart = told_apart(
            told, small.asked, config, [one.shape for one in checkpoint.tensors.values()], twin.config, within
        )
        if apart:
            with suppress(PortingError):
                other = with_fields(told, {**named_fields(told), **apart}, config)
                told, small = other, build_for(other, completed_config(twin.config, architecture))
        rows = {
            (checkpoint.tensors[name].shape[0], len(one))
            for name, one in twin.tensors.items()
            if name in checkpoint.tensors and one.ndim == 2 and len(checkpoint.tensors[name].shape) == 2
        }
        even, own = _one_depth(small, config), own_sizes(told, config, small.module, twin.config, within, rows)
        if even or own:
            try:
                twin = runnable(made(folder / f"own {number}", small=True, even=even, own=own, to=to))
                small = build_for(told, completed_config(twin.config, architecture))
            except PortingError:
                continue
        if not small.asked or not _could(small.module, twin):
            break
        staged = stage_field(Role.DEPTH, config) is not None
        if cuts and stacks(small.module, few := fewer(config, twin.config), staged=staged):
            told = cut(told, few, staged=staged)
            small = build_for(told, completed_config(twin.config, architecture))
        usable = told, twin, small
        if _takes_images(small.module, twin):
            return usable
    return usable or _large(config, into, architecture, made, folder, within, depth if cuts else None)


def _large(
    config: Mapping[str, object],
    into: Builder,
    architecture: str,
    made: Callable[..., Twin],
    folder: Path,
    within: Bounds,
    depth: int | None,
) -> tuple[Builder, Twin, BuiltModule]:
    """The builder, the twin and the module, of the checkpoint's own sizes; with fewer layers unless depth is None."""
    built, refused = None, None
    try:
        with bounded(within):
            built = build_for(into, config)
    except UnknownSizesError as error:  # shapes may tell what a name means
        refused = error
    if built is not None and depth is not None:
        with bounded(within):
            short = _shortened(config, into, architecture, made, folder, built.module, depth)
        if short is not None:
            return short
    with bounded(within):
        twin = _of_own_sizes(made, config, None if built is None else built.module, folder)
    with suppress(PortingError), bounded(within):  # a name may mean another field than it says
        told, read = _understood(into, twin, completed_config(twin.config, architecture), config)
        return told, twin, read
    if built is None:
        raise refused or AssertionError("what was not built was refused")
    return into, twin, built


def _shortened(
    config: Mapping[str, object],
    into: Builder,
    architecture: str,
    made: Callable[..., Twin],
    folder: Path,
    module: nn.Module,
    depth: int,
) -> tuple[Builder, Twin, BuiltModule] | None:
    """The same with a few layers, for a module of many that are fixed; None where its layers stand in no list.

    Args:
        module: the user's, with all of its layers.
        depth: how many are left; 0 for the usual number.
    """
    fields = cut_depths(config, depth or SMALL.depth)
    few, staged = fewer(config, {**config, **fields}), stage_field(Role.DEPTH, config) is not None
    if not few or {*few} != {*stacks(module, few, staged=staged).values()}:
        return None
    try:
        short = cut(into, few, staged=staged)
        twin = _of_own_sizes(partial(made, own=fields), config, build_for(short, config).module, folder / "few", OWN)
        told, read = _understood(short, twin, completed_config(twin.config, architecture), config)
    except PortingError:
        return None
    return told, twin, read


def _of_own_sizes(
    made: Callable[..., Twin],
    config: Mapping[str, object],
    module: nn.Module | None,
    folder: Path,
    to: Measures | None = None,
) -> Twin:
    """The twin of the checkpoint's own sizes; or with fewer layers, as ``to`` says.

    Where no field tells how large images are, it is one that both models take, or the first where there is no module.
    """
    twin: Twin | None = None
    fault: VerifyError | None = None
    for width in IMAGES if not pictured(config) else (0,):
        try:
            sizes = replace(to or SMALL, image=width)
            twin = runnable(made(folder / f"real {width}", small=to is not None, to=sizes))
        except VerifyError as error:
            fault = error
            continue
        if module is None or _takes_images(module, twin):
            return _with_smaller_pictures(made, twin, module, folder, to)
    if twin is None:
        raise fault or AssertionError("no twin was made")
    return twin


def _with_smaller_pictures(
    made: Callable[..., Twin], twin: Twin, module: nn.Module | None, folder: Path, to: Measures | None
) -> Twin:
    """The twin, or one of smaller pictures, which cost less, if no weight depends on them and the module takes them."""
    if config_number(twin.config, Role.IMAGE) <= SMALLER:
        return twin
    try:
        small = runnable(made(folder / "smaller", small=to is not None, to=replace(to or SMALL, image=SMALLER)))
    except VerifyError:
        return twin
    shapes, others = ({name: one.shape for name, one in some.tensors.items()} for some in (twin, small))
    return small if shapes == others and (module is None or _takes_images(module, small)) else twin


SMALLER = 64
"""The width of pictures, where it may be any: five halvings, as of most networks of convolutions, leave two rows."""


def runnable(twin: Twin) -> Twin:
    """The twin, with inputs that transformers runs it on.

    Raises:
        VerifyError: there are none, or what it computes of them tells nothing.
    """
    first: Exception | None = None
    for sampler in (lambda: twin.sampler, twin.sampler.of_asked):
        made = sampler()
        if made is None:
            continue
        try:
            outputs = _outputs(twin.reference, made.batch())
        except PortingError:
            raise
        except Exception as error:  # noqa: BLE001  # the reference may raise anything, and it is not the user's code
            first = first or error
            continue
        if said := tells_nothing(outputs):  # no way to call a module could be told from another by that
            odd = ", ".join(f"{name} is {value}" for name, value in odd_numbers(twin.config))
            message = f"transformers' {twin.architecture} {said} with these sizes{odd and f' ({odd})'}"
            hint = "take config.json from where the checkpoint came from"
            raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message, hint=hint))
        return replace(twin, sampler=made)
    said, given = " ".join(str(first).split()), ", ".join(twin.sampler.batch()) or "no input that is known here"
    message = f"transformers' {twin.architecture} does not run on {given}: {type(first).__name__}: {said}"
    raise VerifyError(Fault(code=Code.NO_REFERENCE, message=message)) from first


def _takes_images(module: nn.Module, twin: Twin) -> bool:
    """Whether a module runs on images of the twin's size; so does one that takes none."""
    given = twin.sampler.batch()
    images = next((given[one] for one in VISUAL if one in given), None)
    if images is None or len(given) > 1:
        return True
    for laid in (images, images.transpose(1, 2)) if images.ndim > VIDEO_AXES else (images,):
        with suppress(Exception), torch.no_grad():  # the user's own forward may raise anything, at a size or at all
            duplicate(module)(laid.float())
            return True
    return False


VIDEO_AXES = 4
"""Axes of one video: frames, channels, height and width."""


def _outputs(reference: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    with torch.no_grad(), forced_float64(reference):
        return list(numbers_of(reference(**inputs)))


def _understood(
    into: Builder, twin: Twin, config: Mapping[str, object], checkpoint: Mapping[str, object]
) -> tuple[Builder, BuiltModule]:
    """The module, and its builder, told what it means by names that say nothing where shapes tell, or its defaults.

    Args:
        config: the twin's.
        checkpoint: the checkpoint's config.
    """
    shapes = [tuple(tensor.shape) for _, tensor in named_tensors(twin.reference)]
    named, switches = into, list[str]()
    while True:  # what is read from a config is asked for one by one
        try:
            built = build_for(named, config)
            break
        except UnknownSizesError as error:
            told = named_fields(named)
            off = dict.fromkeys((name for name in error.names if is_switch(name) and name not in told), "false")
            if off:
                switches += off
                named = with_fields(named, {**told, **off}, config)
                continue
            fields = solved_sizes(named, error.names, config, shapes, asked=error.asked, better=error.read)
            if fields is None or fields.keys() <= told.keys():
                raise
            named = with_fields(named, {**told, **fields}, config)
        except TargetError:  # sizes that do not go together: a name was misunderstood
            told = named_fields(named)
            fields = sizes_by_default(named, fields_asked(named, config), config, shapes, checkpoint)
            if fields.keys() <= told.keys():
                raise
            named = with_fields(named, {**told, **fields}, config)
    replaced = better_sizes(named, built, config, shapes)
    switches += [name for name, one in built.kept.items() if one is False and is_switch(name) and name not in switches]
    if switches:
        replaced |= better_switches(
            with_fields(named, {**named_fields(named), **replaced}, config), switches, config, shapes
        )
    if replaced:
        named = with_fields(named, {**named_fields(named), **replaced}, config)
        built = build_for(named, config)
    if not (by_default := sizes_by_default(named, built.asked, config, shapes, checkpoint)):
        return named, built
    named = with_fields(named, {**named_fields(named), **by_default}, config)
    return named, build_for(named, config)


def _one_depth(built: BuiltModule, config: Mapping[str, object]) -> bool:
    """Whether the module has one depth for an encoder and a decoder, which are as deep in the checkpoint."""
    for depths in (("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers")):
        asked = [name for name in depths if name in built.asked.values()]
        if len(asked) == 1 and depths[1] in config and config.get(depths[0]) == config[depths[1]]:
            return True
    return False


def _could(module: nn.Module, twin: Twin) -> bool:
    """Whether a module has the twin's width, or its widths of all stages: then it has taken the config to heart."""
    staged = stage_field(Role.HIDDEN, twin.config)
    widths = {config_number(twin.config, Role.HIDDEN, 0)}
    if staged and isinstance(several := twin.config[staged], list):
        widths = set(several)
    sizes = {size for _, tensor in named_tensors(module) if not nn.parameter.is_lazy(tensor) for size in tensor.shape}
    lazy = any(nn.parameter.is_lazy(tensor) for _, tensor in named_tensors(module))
    return lazy or widths - {0} <= sizes


def _causal(twin: Twin) -> bool:
    """Whether a position's output is the same whatever stands behind it."""
    if IDS not in twin.sampler.available:
        return False
    inputs = twin.sampler.batch()
    other = {**inputs, IDS: inputs[IDS].clone()}
    other[IDS][:, -1] = twin.sampler.others(other[IDS])[:, -1]
    pairs = zip(_outputs(twin.reference, inputs), _outputs(twin.reference, other), strict=True)
    rows = [(one, two) for one, two in pairs if one.ndim == 3 and one.shape[1] == twin.sampler.length]
    return bool(rows) and bool(torch.allclose(rows[0][0][:, :-1], rows[0][1][:, :-1], rtol=1e-9, atol=1e-9))


def _longest(twin: Twin, module: nn.Module, way: ArgumentMapping) -> int:
    """The longest row that both take."""
    sampler, front = twin.sampler, twin.sampler.front
    if IDS not in sampler.available:
        return 0
    if row_length() != LENGTH:
        return row_length()
    most: int = min(config_number(text_fields(twin.config), Role.POSITIONS, 64), 128)
    lengths: list[int] = [*range(most, max(most - 5, 8), -1), 24, 16, 7]
    for length in (one for one in lengths if one > front):
        with rows_of(length - front):
            given = sampler.batch(sampler.available, rows=1)
        try:
            with torch.no_grad(), forced_float64(twin.reference):
                twin.reference(**{name: value for name, value in given.items() if name != POSITIONS})
                with forced_float64(module):
                    module(**way.given(given))
        except Exception:  # noqa: BLE001, S112  # it is too long for one of them
            continue
        return length
    return 7


def traced_models(subjects: ModelPair, seed: int, *, sliced: bool = True) -> tuple[TracedModel, TracedModel]:
    """The module and the reference as they are run in the search, on one batch.

    Args:
        sliced: take the slices of a parameter that holds the weights of several places for weights.

    Raises:
        VerifyError: the module makes parameters while it runs, or draws random numbers.
    """
    twin, way, module = subjects.twin, subjects.way, subjects.built.module
    named = [name for name in subjects.available if name in way.named]
    many = 1 if way.by_row else BATCH  # of several rows a module that takes one would be recorded several times
    batch = twin.sampler.batch(named, seed=seed, rows=many, ended=True)
    theirs = {**batch}
    if way.internal or way.unmasked or MASK not in batch:
        theirs.pop(MASK, None)
    given = way.given(batch)
    files = {
        twin.files[name]: one
        for name, one in named_tensors(twin.reference)
        if one.is_floating_point() and name in twin.files and twin.files[name] not in twin.copies
    }
    least = 1 if any(one.numel() == 1 for one in files.values()) else 2  # a saved number is the module's own constant
    leaves = {
        name: one
        for name, one in named_tensors(module)
        if one.is_floating_point() and not is_mask(one) and (isinstance(one, nn.Parameter) or one.numel() >= least)
    }
    loadable = frozenset(name for name, one in leaves.items() if not is_constant(one, files.values()))
    unsaved = [
        (f"{path}.{name}" if path else name, one)
        for path, part in module.named_modules()
        for name, one in part._buffers.items()
        if one is not None
    ]
    unsaved += plain_tensors(module)
    leaves |= {
        name: one for name, one in unsaved if name not in leaves and one.is_floating_point() and not is_mask(one)
    }
    port = TracedModel(module, leaves, loadable, lambda one: one(**given), list(given.values()))
    check_deterministic(port)
    if sliced:
        port = with_slices(port, {depth for _, depth in depths_of(twin.config) if depth > 1})
    theirs = way.for_reference(theirs)
    reference = TracedModel(twin.reference, files, frozenset(), lambda one: one(**theirs), list(theirs.values()))
    kinds = [name for name in batch if name in (IDS, DECODER_IDS, *VISUAL, *SOUNDS)]
    if len(kinds) == TWO_SIDES:
        other = twin.sampler.batch(named, seed=seed + 1, rows=many, ended=True)
        changed = [{name: other[name]} for name in kinds]
        reference.sides = tuple(_side({**theirs, **way.for_reference(one)}) for one in changed)
        sides = [_side(way.given({**batch, **one})) for one in changed]
        port.sides = (sides[0], sides[1]) if reference.first_side() == 0 else (sides[1], sides[0])
        reference.sides = ()  # the order in which it runs is the one that counts
    return port, reference


TWO_SIDES = 2
"""Kinds of inputs of an encoder and a decoder, of two towers."""


def _side(given: Mapping[str, Tensor]) -> tuple[Call, Sequence[Tensor]]:
    return (lambda one: one(**given)), list(given.values())

"""The options that commands share, and what is made of their text."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from inspect import Parameter, Signature, getsource, signature
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from porting.embedded import embedded_checkpoint
from porting.errors import Code, Fault, PortingError, nearest
from porting.frames import users_line
from porting.printable import text_of

if TYPE_CHECKING:  # torch takes a second to import, which `porting --help` need not wait for
    import torch
    from torch import nn

    from porting.text import Task, TextModel
    from porting.verification import Case


class DType(StrEnum):
    """The floating-point types that a module can be asked to hold."""

    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Half(StrEnum):
    """The floating-point types that autocast casts to."""

    bfloat16 = "bfloat16"
    float16 = "float16"


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="A directory, a weight file, or a model on the hub: org/name or org/name@revision. "
        "file.pt#model is the state dict inside of a file, 'part.{r}.pt' the files of all ranks, "
        "./model+lora=./adapter two checkpoints, the second's names with lora. in front.",
        show_default="the bundled demo checkpoint",
    ),
]
Destination = Annotated[
    str | None,
    typer.Argument(
        metavar="DESTINATION",
        help="The directory to make. If only one path is given, it is this one.",
        show_default=False,
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="A directory, a weight file, or a model on the hub: org/name or org/name@revision.",
        show_default="the bundled demo checkpoint",
    ),
]
TableName = Annotated[
    str | None,
    typer.Option(
        "--table",
        help="A bundled table's name, a TOML file, or transformers:TYPE.",
        show_default="by the model_type of config.json",
    ),
]
IntoName = Annotated[
    str | None,
    typer.Option(
        "--into",
        metavar="MODULE:NAME",
        help="What builds your own module: my_model:build, or my_model.py:build; a class or a function. "
        "It is imported, so its file runs.",
        show_default="the handwritten model that the table names",
    ),
]
ArchitectureName = Annotated[
    str | None,
    typer.Option(
        "--architecture",
        help="Which of the table's [architectures] to build.",
        show_default="by what the checkpoint holds",
    ),
]
CastDType = Annotated[
    DType | None,
    typer.Option("--dtype", help="Cast floating-point weights to this.", show_default="the checkpoint's dtypes"),
]
Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Allow parameters in the table's [fresh] to be missing; they get initial values."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Allow the table to name a module outside of this library: it is imported.")
]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="CONTAINER",
        help="What is written, such as dcp: what torch.distributed.checkpoint loads; dcp/model: nested under 'model'. "
        "docs/containers.md lists all.",
        show_default="safetensors",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
ReferenceName = Annotated[
    str | None,
    typer.Option(
        "--reference",
        metavar="MODULE:NAME|FILE",
        help="What to compare with: my_model.py:build, which builds a module with its weights; ref.py:forward, a "
        "function that computes from the inputs (numpy, JAX, torch); or a file that `porting record` or "
        "porting.save_recording made.",
        show_default="the checkpoint in transformers",
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FILE",
        help="A .safetensors or .npz file with the arguments of one batch by their names, or a recording.",
        show_default="made from the config",
    ),
]
WorkingTypes = Annotated[
    list[DType] | None,
    typer.Option(
        "--dtype", help="A working dtype to compare or record; may be given more than once.", show_default="float32"
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what exists at the destination.")]
LARGEST_SEED = (1 << 63) - 1
"""The largest seed of torch; numpy takes none below 0."""

LARGEST = 1_000_000
"""The largest number that counts something: tokens, layers, cases.  A larger one is a mistake of the user's."""

LARGEST_TOLERANCE = 1e20
WEEK = 7 * 24 * 3600.0
"""The longest time that can be asked for, in seconds; clocks of the system cannot wait for every number of seconds."""

Seed = Annotated[int, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Seed of all random numbers.")]
Longest = Annotated[
    int, typer.Option("--longest", min=3, max=LARGEST, help="The most tokens in a row of the generated inputs.")
]
TableForNames = Annotated[
    str | None,
    typer.Option(
        "--table", help="The name of a bundled table, or a TOML file.", show_default="the same names on both sides"
    ),
]
Threads = Annotated[int, typer.Option("--threads", min=1, max=64, help="Number of threads.")]
PairText = Annotated[str | None, typer.Option("--pair", help="A second segment, which follows the text.")]

HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", dir_okay=False, help="Write a page for a browser.")
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length",
        min=1,
        max=LARGEST,
        help="Tokens at most, those of TEXT included; of an encoder-decoder those that it writes.",
        show_default="40 new ones, or as many as the model has positions for",
    ),
]
NumBeams = Annotated[
    int, typer.Option("--num-beams", min=1, max=LARGEST, help="Number of beams; 1 means no beam search.")
]
TopOfEach = Annotated[
    int | None,
    typer.Option(
        "--top", min=1, max=LARGEST, help="List this many of the likeliest tokens at each position.", show_default=False
    ),
]


def flags(**options: object) -> list[str]:
    """The words of those options that were given, to be repeated in a command: ``table="t"`` -> ``--table t``."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name}"
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [word for one in value for word in (flag, str(one))]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that say through which table a checkpoint is loaded, and into which module; see :func:`spread`."""

    table: TableName = None
    into: IntoName = None
    architecture: ArchitectureName = None
    trust: Trust = False

    @property
    def flags(self) -> list[str]:
        """The options that were given, to be repeated in a command."""
        fresh = getattr(self, "fresh", False)
        return flags(table=self.table, into=self.into, architecture=self.architecture, fresh=fresh, trust=self.trust)

    def builder(self) -> Callable[..., nn.Module] | None:
        """The builder that ``--into`` names; see :func:`builder`."""
        return builder(self.into, trust=self.trust)


@dataclass(frozen=True, kw_only=True)
class WeightOptions(ModelOptions):
    """The same for a command that may leave parameters of the module as they are."""

    fresh: Fresh = False


@dataclass(frozen=True, kw_only=True)
class TextOptions(ModelOptions):
    """The options of a command that runs a model on a text."""

    source: SourceOption = None
    html: HtmlFile = None
    as_json: Json = False

    def open(self, *tasks: Task) -> TextModel:
        """The model with its tokenizer; before that, the destination of the page is checked."""
        from porting.atomic import check_page
        from porting.text import open_text_model

        check_page(self.html, ".html")
        return open_text_model(
            self.source,
            *tasks,
            table=self.table,
            into=self.builder(),
            architecture=self.architecture,
            trust=self.trust,
        )

    @property
    def to_verify(self) -> list[str]:
        """The words of the command that verifies this model."""
        return ["verify", *source_argument(self.source), *self.flags]


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of its parameters that are dataclasses of options."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}  # Any: any dataclass
    if not groups:
        return function
    parameters: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        if name in groups:
            within = get_type_hints(groups[name], include_extras=True)
            parameters += [
                Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=within[one.name])
                for one in fields(groups[name])
            ]
        else:
            parameters.append(parameter.replace(annotation=hints[name]))

    def command(**given: Any) -> None:  # whatever the fields hold
        made = {name: kind(**{one.name: given.pop(one.name) for one in fields(kind)}) for name, kind in groups.items()}
        function(**given, **made)

    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    vars(command)["__signature__"] = Signature(parameters)
    return command


def checkpoint_source(source: str | None) -> str | Path:
    """The checkpoint that is meant."""
    return embedded_checkpoint() if source is None else source


def source_and_destination(first: str | None, second: str | None) -> tuple[str | Path, Path]:
    """Source and destination of a command that was given both, or a destination alone."""
    if first is None:
        raise typer.BadParameter("there is no DESTINATION")
    if second is not None:
        return first, Path(second)
    if Path(first).exists():  # whoever forgot the destination must not lose the source
        raise typer.BadParameter(f"{first!r} exists, and one path alone is the destination: name both")
    return embedded_checkpoint(), Path(first)


def source_argument(source: str | None) -> list[str]:
    """The same source as a word of the next command."""
    return [] if source is None else [source]


def working_dtypes(dtypes: list[DType] | None) -> tuple[torch.dtype, ...]:
    """The dtypes of these names, each once; float32 where none is named."""
    import torch

    return tuple(getattr(torch, one.value) for one in dict.fromkeys(dtypes or [DType.float32]))


def dtype_of(dtype: DType | Half | None) -> torch.dtype | None:
    """The dtype of that name."""
    import torch

    found: torch.dtype | None = None if dtype is None else getattr(torch, dtype.value)
    return found


def builder(text: str | None, *, trust: bool = False) -> Callable[..., nn.Module] | None:
    """The builder ``module:name`` or ``file.py:name``.  The user typed it, so it is trusted and imported.

    Modules of the current folder can be imported, also those that a table names that the user trusts; but for these the
    folder is not searched, so that nothing in it takes the place of what is installed.
    """
    if text is not None or trust:
        from porting.users_code import search

        search(Path())
    if text is None:
        return None
    from porting.target import TargetError, import_path

    if text.endswith(".py"):
        message = "this names a file, and not what in it builds the module"
        hint = f"write {text}:NAME, a class or a function in it"
        raise TargetError(Fault(code=Code.BAD_TARGET, where=text, message=message, hint=hint))
    place, _, name = text.rpartition(":")
    if not place.endswith(".py"):
        return import_path(text, trust=True)
    path = Path(place)
    if not path.is_file():
        near = nearest(path.name, [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else [])
        raise TargetError(
            Fault(code=Code.BAD_TARGET, where=place, message="no such file", hint=near or "check the path")
        )
    from porting.users_code import import_file

    try:
        module = import_file(path)
    except PortingError:
        raise
    except Exception as error:  # importing a file runs it, and it may raise anything
        message = f"importing it failed: {type(error).__name__}: {text_of(error)}".removesuffix(": ")
        raise TargetError(
            Fault(code=Code.BAD_TARGET, where=place, message=message, hint=f"at {users_line(error)}")
        ) from error
    return import_path(f"{module.__name__}:{name}", trust=True)


def misnamed(into: object, faults: Sequence[Fault]) -> Fault | None:
    """The fault, with the names that a file offers for ``--into``, if the given one is not a module and builds none."""
    if not isinstance(into, str) or all(fault.code is not Code.BAD_TARGET for fault in faults):
        return None
    place, _, name = into.rpartition(":")
    file = os.path.realpath(place)
    loaded = [one for key, one in list(sys.modules.items()) if place == key or getattr(one, "__file__", "") == file]
    if not loaded:
        return None
    from torch import nn

    own = {key: one for key, one in vars(loaded[0]).items() if getattr(one, "__module__", "") == loaded[0].__name__}
    known = {key for key, one in own.items() if isinstance(one, type) and issubclass(one, nn.Module)}
    imported = {key for key, one in vars(loaded[0]).items() if isinstance(one, type) and issubclass(one, nn.Module)}
    named = getattr(loaded[0], name, None)
    plain = not callable(named) or isinstance(named, FunctionType | BuiltinFunctionType)
    for _ in own if known and plain else ():  # a builder may call another one
        known |= {key for key, one in own.items() if (known | imported) & _words(one)}
    if not known or not plain or name in known:
        return None
    listed = [key for key in own if key in known]
    what = "not in this file" if named is None else f"a {type(named).__name__} that builds none of the file's modules"
    message = f"{name!r} is {what}; the file has {', '.join(listed)}"
    return Fault(code=Code.BAD_TARGET, where=place, message=message, hint=f"write {place}:{listed[-1]}, for one")


def _words(builder: object) -> set[str]:
    """The words of a function's code."""
    try:
        return {*re.findall(r"\w+", getsource(builder))} if isinstance(builder, FunctionType) else set()
    except OSError:
        return set()


def reference_of(name: str | None, *, trust: bool) -> Callable[..., object] | Path | None:
    """The reference that ``--reference`` names: a function that builds a model or computes its values, or a file."""
    if name is None or name.endswith(".safetensors"):
        return None if name is None else Path(name)
    return builder(name, trust=trust)


def batch_of(path: str | None) -> list[Case] | None:
    """The batch in a file of tensors, or those of a recording."""
    if path is None:
        return None
    from porting.verification.recorded_trace import read_inputs

    return read_inputs(path)

"""The options that commands share, and what is made of their text."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from porting.embedded import embedded_checkpoint
from porting.errors import Code, Fault, PortingError, nearest
from porting.frames import users_line

if TYPE_CHECKING:  # torch takes a second to import, which `porting --help` need not wait for
    import torch
    from torch import nn


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
        help="A directory, a weight file, or a model on the hub: org/name or org/name@revision.",
        show_default="the embedded checkpoint",
    ),
]
Onto = Annotated[
    str | None,
    typer.Argument(
        metavar="DESTINATION",
        help="The directory to make. With one path alone it is this one.",
        show_default=False,
    ),
]
SourceOption = Annotated[
    str | None,
    typer.Option(
        "--source",
        help="A directory, a weight file, or a model on the hub: org/name or org/name@revision.",
        show_default="the embedded checkpoint",
    ),
]
TableName = Annotated[
    str | None,
    typer.Option(
        "--table", help="The name of a shipped table, or a TOML file.", show_default="by the model_type of config.json"
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
        help="Which of the table's architectures to build.",
        show_default="by what the checkpoint holds",
    ),
]
CastTo = Annotated[
    DType | None,
    typer.Option("--dtype", help="Cast floating-point weights to this.", show_default="the checkpoint's dtypes"),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Allow parameters of the table's [fresh] to be missing: they are new.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Allow the table to name a module outside of this library: it is imported.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, and nothing else.")]


def given(**options: object) -> list[str]:
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


def where(source: str | None) -> str | Path:
    """The checkpoint that is meant."""
    return embedded_checkpoint() if source is None else source


def carried(first: str | None, second: str | None) -> tuple[str | Path, Path]:
    """Source and destination of a command that was given both, or a destination alone."""
    if first is None:
        raise typer.BadParameter("there is no DESTINATION")
    if second is not None:
        return first, Path(second)
    if Path(first).exists():  # whoever forgot the destination must not lose the source
        raise typer.BadParameter(f"{first!r} exists, and one path alone is the destination: name both")
    return embedded_checkpoint(), Path(first)


def again(source: str | None) -> list[str]:
    """The same source as a word of the next command."""
    return [] if source is None else [source]


def dtype_of(dtype: DType | None) -> torch.dtype | None:
    """The dtype of that name."""
    import torch

    found: torch.dtype | None = None if dtype is None else getattr(torch, dtype.value)
    return found


def builder(text: str | None, *, trust: bool = False) -> Callable[..., nn.Module] | None:
    """What ``module:name`` or ``file.py:name`` names.  The user typed it, so it is trusted and imported.

    Modules of the current folder can be imported, also those that a table names that the user trusts; but for these the
    folder is not searched, so that nothing in it takes the place of what is installed.

    Raises:
        TargetError: there is no such file or module, importing it fails, or it has nothing callable of that name.
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
        message = f"importing it failed: {type(error).__name__}: {error}"
        raise TargetError(
            Fault(code=Code.BAD_TARGET, where=place, message=message, hint=f"at {users_line(error)}")
        ) from error
    return import_path(f"{module.__name__}:{name}", trust=True)

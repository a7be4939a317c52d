"""``diff``: compare two checkpoints value by value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from porting.cli import options
from porting.cli.output import DIFFERENT, Screen

if TYPE_CHECKING:
    from porting.comparing.differences import Compared, Comparison, Place


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A directory, a weight file, or a model on the hub.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other, with the names of the table's right side.")],
    table: options.TableForNames = None,
    atol: Annotated[
        float, typer.Option("--atol", min=0.0, max=options.LARGEST_TOLERANCE, help="Allow values to be this far apart.")
    ] = 0.0,
    rtol: Annotated[
        float,
        typer.Option(
            "--rtol", min=0.0, max=options.LARGEST_TOLERANCE, help="Allow this fraction of B's value as well."
        ),
    ] = 0.0,
    threads: options.Threads = 2,
    every: Annotated[bool, typer.Option("--all", help="Show equal tensors too.")] = False,
    as_json: options.Json = False,
) -> None:
    """Compare two checkpoints value by value, through a table where their layouts differ.

    Shards, order, metadata and file format are ignored. Tensors are read in pieces of a megabyte. Values that are
    equal in another dtype are equal; NaN and infinities are counted on both sides. Exit code 0: equal; 1: not;
    2: they cannot be compared.

    \b
    Examples:
      porting diff ./one ./other
      porting diff ./my-checkpoint ./my-port --table my_table.toml
      porting diff ./float32 ./bfloat16 --rtol 0.01
    """
    with Screen("diff", as_json=as_json) as screen:
        from porting.checkpoint import open_checkpoint
        from porting.comparing.differences import diff as compare

        one, other = open_checkpoint(a), open_checkpoint(b)
        with screen.working("comparing") as tell:
            found = compare(one, other, table, atol=atol, rtol=rtol, threads=threads, progress=tell)
        screen.document(lambda: _document(found))
        _show(screen, found, every=every)
        if found.equal:
            screen.next("hash", a)
            return
        if every:
            screen.next("inspect", b)
        else:
            loose = options.flags(table=table, atol=atol or None, rtol=rtol or None)
            screen.next("diff", a, b, *loose, "--all")
        raise typer.Exit(DIFFERENT)


def _show(screen: Screen, found: Comparison, *, every: bool) -> None:
    rows = [_row(one) for one in found.tensors if every or one.verdict.value not in ("equal", "equal values")]
    rows += [(name, "only in A", "", "", "") for name in found.only_a]
    rows += [(name, "only in B", "", "", "") for name in found.only_b]
    if rows:
        screen.rows(["tensor", "", "differ", "largest", "where"], rows, right=["differ", "largest"])
        screen.line()
    for one in found.tensors:
        odd = one.difference.odd
        if (odd[0] or odd[1]) and not one.note:
            counts = "; ".join(f"{side}: {n.nan} NaN, {n.inf} infinite" for side, n in zip("AB", odd, strict=True) if n)
            screen.warn(f"{one.b}: {counts}")
    screen.line((found.summary, "bold"))


def _row(one: Compared) -> tuple[str, ...]:
    verdict = one.verdict.value + (f" ({one.note})" if one.note else "")
    if one.dtypes[0] != one.dtypes[1]:
        verdict += f", {one.dtypes[0]} and {one.dtypes[1]}"
    found = one.difference
    if one.largest_at is None:
        shapes = f"{list(one.shapes[0])} and {list(one.shapes[1])}" if one.shapes[0] != one.shapes[1] else ""
        return one.b, verdict, "", "", shapes
    box = ", ".join(
        str(low) if low == high else f"{low}..{high}" for low, high in zip(found.low, found.high, strict=True)
    )
    share = f"{found.unequal:,} of {found.numel:,}"
    largest = f"{found.largest:.3g} (rms {found.rms:.2g})"
    return one.b, verdict, share, largest, f"{_at(one.largest_at[0])} and {_at(one.largest_at[1])}, all in [{box}]"


def _at(place: Place) -> str:
    return f"{place.tensor}{list(place.index)} = {place.value:.9g}" if place.tensor else f"the fill {place.value:.9g}"


def _document(found: Comparison) -> dict[str, object]:
    def odd(nan: int, inf: int) -> dict[str, int]:
        return {"nan": nan, "inf": inf}

    return {
        "equal": found.equal,
        "summary": found.summary,
        "a": found.a,
        "b": found.b,
        "bytes": found.nbytes,
        "tensors": [
            {
                "a": list(one.a),
                "b": one.b,
                "verdict": one.verdict.value,
                "note": one.note,
                "shapes": one.shapes,
                "dtypes": one.dtypes,
                "elements": one.difference.numel,
                **{key: getattr(one.difference, key) for key in ("unequal", "beyond", "largest", "rms")},
                "largest_at": [vars(place) for place in one.largest_at] if one.largest_at else None,
                "span": [one.difference.low, one.difference.high] if one.largest_at else None,
                "odd": [odd(side.nan, side.inf) for side in one.difference.odd],
            }
            for one in found.tensors
        ],
        "only_a": {name: odd(one.nan, one.inf) for name, one in found.only_a.items()},
        "only_b": {name: odd(one.nan, one.inf) for name, one in found.only_b.items()},
        "left_out": found.left_out,
    }

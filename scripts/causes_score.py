"""The score of the catalogue: each mistake planted into each port where it applies, and what the proof says of it."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from torch import nn

from porting.causes.events import InjectedFault, Inventory
from porting.causes.fault_injection import plant, watch
from porting.causes.mutants import PLANTS, truth
from porting.reporting.outcome import FAITHFUL
from porting.tracing.float64 import ITSELF
from porting.verification import Probe, Report, fixes, verify
from tests.families.pairs import PAIRS, Pair
from tests.families.ported import Ported, draw, make

UNIQUE, TIE, UNKNOWN, WRONG, MISSED, NONE = "unique", "tie", "unknown", "wrong", "missed", "no effect"
"""What came of a planted mistake; ``no effect`` is proven by equal outputs in float64."""

LONGEST = 24
"""Rows that show all there is in these small models, the window of a local attention included."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One planted mistake.

    Attributes:
        outcome: one of the above.
        placed: whether each finding has a guilty module in which the mistake was made.
        strict: whether each guilty module, of any finding, has a part in it that the mistake was made in.
        said: what the report named.
        where: the layer, or the module outside of any layer, in which alone it was made; ``""`` for all.
    """

    outcome: str
    placed: bool
    strict: bool
    said: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What came of every mistake that applies to a pair, by name.

    Attributes:
        everywhere: made at every place where it can be made.
        alone: made in one layer, which is drawn.
    """

    everywhere: Mapping[str, Result]
    alone: Mapping[str, Result]


def score(pair: Pair, names: Container[str] | None = None, *, alone: bool = True) -> Scored:
    """Plant every mistake that applies, or those of these names, into the port of a pair."""
    everywhere, one_layer = {}, {}
    with tempfile.TemporaryDirectory(prefix="porting-causes-") as folder, _quietly():
        ported = make(pair, Path(folder))
        watched = ported.load()
        inventory = watch(watched)
        heard = _Heard()
        watched.register_forward_pre_hook(heard, with_kwargs=True)
        cases = _verify(ported, watched, trials=False).cases  # watching takes long, and the first batches show all
        for fault in (one for one in PLANTS if names is None or one.name in names):
            sites = _sites(ported, fault, inventory, heard.calls[-len(cases) :])
            if not sites:
                continue
            everywhere[fault.name] = result = _try(ported, fault, inventory)
            if alone:
                unit, inside = _drawn(sites, f"{pair}, {fault.name}")
                if inside != sites:
                    result = _try(ported, replace(fault, modules=inside), inventory)
                one_layer[fault.name] = replace(result, where=unit)
    return Scored(everywhere=everywhere, alone=one_layer)


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward pass."""


class _Heard:
    """The calls of a model and of its copies, which all tell this one."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((args, kwargs))

    def __deepcopy__(self, memo: dict[int, object]) -> _Heard:
        return self


@torch.no_grad()
def _sites(ported: Ported, fault: InjectedFault, inventory: Inventory, calls: Sequence[Call]) -> frozenset[str]:
    """The modules in which a mistake is made; none if it does not apply."""
    module = ported.load()
    sites = plant(module, fault, inventory)
    for args, kwargs in calls:
        module(*args, **kwargs)
    return frozenset(sites)


_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")


def _drawn(sites: Collection[str], seed: str) -> tuple[str, frozenset[str]]:
    """One of the layers, or of the modules outside of layers, in which a mistake was made; and where it was there."""
    units: dict[str, set[str]] = {}
    for site in sites:
        layer = _LAYER.match(site)
        units.setdefault(layer.group() if layer else site, set()).add(site)
    unit = sorted(units)[crc32(seed.encode()) % len(units)]  # the same in every run
    return unit, frozenset(units[unit])


def _verify(
    ported: Ported, module: nn.Module, seed: int = 0, variant: Variant | None = None, *, trials: bool | None = None
) -> Report:
    way = variant or VARIANTS[0]
    longest = (80 if ported.pair.single else LONGEST) - way.shorter
    return verify(
        ported.directory,
        module,
        table=ported.pair.table,
        loaded=True,
        seed=seed,
        longest=longest,
        dtypes=way.dtypes,
        trials=trials,
    )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a comparison is made.

    Attributes:
        dtypes: the working dtypes.
        shorter: by so many tokens the longest row is shorter.
    """

    dtypes: tuple[torch.dtype, ...]
    shorter: int = 0


VARIANTS = (
    Variant(dtypes=(torch.float32,)),
    Variant(dtypes=(torch.float32, torch.bfloat16), shorter=5),
    Variant(dtypes=(torch.float16,), shorter=11),
)


def _try(ported: Ported, fault: InjectedFault, inventory: Inventory) -> Result:
    """Plant a mistake, and see what the proof says of it."""
    module = ported.load()
    sites = plant(module, fault, inventory)
    report = _verify(ported, module)
    said = tuple(" or ".join(cause.names) or "unknown" for cause in report.causes)
    if report.verdict == FAITHFUL:
        same = max(probe.meaning.worst for probe in report.probes) <= max(
            probe.bound.end_to_end for probe in report.probes
        )
        return Result(outcome=NONE if same else MISSED, placed=True, strict=True)
    probes = {probe.port: probe for probe in report.probes}
    accused = report.guilty or report.imprecise
    return Result(
        outcome=_outcome(report, truth(fault.name)),
        placed=bool(report.causes)
        and all(any(_made_in(probes[point], sites) for point in cause.probes) for cause in report.causes),
        strict=bool(accused) and all(_made_in(probe, sites) for probe in accused),
        said=said,
    )


def _outcome(report: Report, expected: tuple[str, ...]) -> str:
    if not report.causes or any(not cause.name for cause in report.causes):
        return UNKNOWN
    named = [{part for name in cause.names for part in name.split(" + ")} for cause in report.causes]
    if not all(names & set(expected) for names in named):
        return WRONG
    return UNIQUE if all(len(cause.names) == 1 for cause in report.causes) else TIE


def _made_in(probe: Probe, sites: Collection[str]) -> bool:
    """Whether a mistake was made in what made the activation at this probe out of those before."""
    return any((site or ITSELF) in probe.span for site in sites)


def faithful(count: int) -> tuple[int, list[str]]:
    """Compare faithful ports so many times, with other weights, inputs and dtypes; how many, and the false alarms."""
    alarms: list[str] = []
    done, draws = 0, 0
    with _quietly():
        while done < count:
            for pair in PAIRS:
                with tempfile.TemporaryDirectory(prefix="porting-causes-") as folder:
                    ported = _another(pair, Path(folder), draws)
                    for number, variant in enumerate(VARIANTS):
                        if done < count:
                            done += 1
                            seed = len(VARIANTS) * draws + number
                            report = _verify(ported, ported.load(), seed=seed, variant=variant)
                            if report.verdict != FAITHFUL or report.causes:
                                dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in variant.dtypes)
                                alarms.append(
                                    f"{pair}, weights {draws}, inputs {seed}, in {dtypes}: {report.verdict}; "
                                    + ", ".join(probe.port for probe in (*report.guilty, *report.imprecise))
                                )
            draws += 1
    return done, alarms


def _another(pair: Pair, folder: Path, seed: int) -> Ported:
    import transformers  # noqa: PLC0415  # only this needs it

    ported = make(pair, folder)
    if seed:
        kind = getattr(transformers, pair.architecture)
        model = kind(kind.config_class(**pair.fields))
        draw(model, seed=seed, spread=(0.1, 0.2, 0.3)[seed % 3])
        model.save_pretrained(folder)
    return ported


@contextmanager
def _quietly() -> Iterator[None]:
    from transformers.utils import logging  # noqa: PLC0415  # as above

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads only wait for each other on models this small
    log: Any = logging  # its functions have no types
    log.disable_progress_bar()
    try:
        # What is planted stands in no line of the port's source, so that none is changed to mend it.
        without_edits = patch.object(fixes, "line_edits", lambda lines: iter(()))
        with without_edits, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def keep(path: Path, results: Mapping[str, Scored], facts: Mapping[str, object]) -> None:
    """Write results into the file that the page is made from; those of other pairs stay."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for pair, one in results.items():
        for view, cells in (("pairs", one.everywhere), ("alone", one.alone)):
            known.setdefault(view, {})[pair] = {name: asdict(cell) for name, cell in cells.items()}
    known.update(facts)
    path.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

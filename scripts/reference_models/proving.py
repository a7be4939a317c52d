"""One model type proven: a small random checkpoint, the reference on it, and a second instance that is verified."""

from __future__ import annotations

import os
import re
import resource
import signal
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from porting.checkpoint import open_checkpoint
from porting.errors import PortingError
from porting.suggesting.subjects.twin import draw_parameters
from porting.target import named_tensors
from porting.verification import Case, Report, verify
from porting.verification.batches import make_batches, that_fits
from porting.verification.module_checkpoint import HeldWeights
from porting.verification.reference import load_reference
from porting.verification.references import LiveReference
from porting.verification.same_names import same_names
from scripts.reference_models.shrinking import LEVELS, shrunk

SECONDS, GIGABYTES = 60, 3
"""What one model may take."""

MOST_WEIGHTS = 40_000_000
"""A model with more is not made."""

LONGEST = 40
"""Tokens of the longest row."""

PASSES, MISSED, DIFFERS, REFUSED, BUILD, LIMITS = "passes", "missed", "differs", "refused", "not built", "limits"
"""What may come of a model: proven, and a planted fault caught; proven, and the fault not seen; proven wrong; refused
by the engine; not built small; out of time or memory."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What came of one class.

    Attributes:
        model_type, architecture: what it is.
        outcome: one of the above.
        said: why, for another outcome than ``passes``.
        level: how much was made small.
        inputs: what the reference was given.
        probes: how many activations were compared.
        weights: how many weights there are, in thousands.
        reached: the share of the weights that some activation depends on.
        worst: the largest difference in float64.
        seconds: what it took.
    """

    model_type: str
    architecture: str
    outcome: str
    said: str = ""
    level: str = ""
    inputs: tuple[str, ...] = ()
    probes: int = 0
    weights: int = 0
    reached: float = 0.0
    worst: float = 0.0
    seconds: float = 0.0


class TooLargeError(Exception):
    """A model that is still too large when it was made small."""


class OutOfTime(BaseException):  # nothing that is run here may take it for an error of its own
    """A process has used up its time."""


def prove(model_type: str, architecture: str) -> Proof:
    """Make the model small, and verify a second instance of it: the first level that the reference runs with."""
    begun = time.monotonic()
    found: Proof | None = None
    for level in LEVELS:
        if level == "parts" and found is not None and found.outcome == REFUSED:
            continue  # which helps only where a model was too large
        proof = _prove(model_type, architecture, level)
        if found is None or proof.outcome not in {BUILD, LIMITS}:
            found = proof
        theirs = proof.outcome == REFUSED and "the port failed" not in proof.said
        if proof.outcome != BUILD and not (theirs and level != "depths"):
            break
    assert found is not None  # noqa: S101  # there are levels
    return Proof(**{**asdict(found), "seconds": round(time.monotonic() - begun, 1)})


def _prove(model_type: str, architecture: str, level: str) -> Proof:
    def came(outcome: str, said: str = "", **more: Any) -> Proof:
        said = re.sub(r"\S*site-packages/", "", said)
        outcome = LIMITS if "can't allocate memory" in said else outcome
        return Proof(model_type=model_type, architecture=architecture, outcome=outcome, said=said, level=level, **more)

    torch.manual_seed(0)
    kind: Any = getattr(transformers, architecture, None)
    try:
        model = small_model(kind, model_type, level)
    except TooLargeError as error:
        return came(BUILD, str(error))
    except Exception as error:  # noqa: BLE001  # whatever a family's own code raises
        return came(BUILD, line_of(error))
    weights = sum(parameter.numel() for parameter in model.parameters()) // 1000
    with tempfile.TemporaryDirectory(prefix="porting-reference-") as folder:
        try:
            draw_parameters(model, 1)
            saving: Any = model
            saving.save_pretrained(folder)
        except Exception as error:  # noqa: BLE001  # as above
            return came(BUILD, f"it cannot be saved: {line_of(error)}", weights=weights)
        del model
        try:
            reference = load_reference(open_checkpoint(Path(folder)), architecture, torch.float32)
            torch.manual_seed(7)
            port = kind(_config(kind, model_type, level)).eval()
            cases = _cases(reference)
            report = verify(reference=reference, into=port, inputs=cases, causes=False)
        except PortingError as error:
            return came(REFUSED, str(error).strip(), weights=weights)
        except Exception as error:  # noqa: BLE001  # a defect of ours, and told as one
            return came(REFUSED, f"exception: {line_of(error)} {_place(error)}", weights=weights)
        outcome, said = _judged(report, reference, port, cases)
        every = {id(one): name for name, one in named_tensors(port) if one.is_floating_point()}
        return came(
            outcome,
            said,
            weights=weights,
            probes=len(report.probes),
            worst=max((probe.meaning.worst for probe in report.probes), default=0.0),
            inputs=report.cases,
            reached=round(len(report.shown.activation) / max(len(every), 1), 2),
        )


def _judged(report: Report, reference: nn.Module, port: nn.Module, cases: list[Case]) -> tuple[str, str]:
    """The outcome of a report, and why."""
    warnings = "; ".join([*report.warnings, *report.notes])[:300]
    if any("NaN or infinite" in warning for warning in report.warnings):
        return DIFFERS, f"NaN or infinite values: {warnings}"
    if not report.faithful:
        named = report.guilty or report.imprecise
        named = named or tuple(probe for probe in report.probes if probe.differs or probe.drifts)
        return DIFFERS, f"{report.verdict}: {', '.join(one.port for one in named[:4])}; {warnings}"
    seen = sorted(report.shown.activation)
    if not seen:
        return DIFFERS, "no weight reaches a probe"
    missed = _planted(reference, port, seen[len(seen) // 2], cases)
    return (MISSED, missed) if missed else (PASSES, "")


def small_model(kind: Any, model_type: str, level: str, *, most: int = MOST_WEIGHTS) -> nn.Module:
    """A small random model of a class of transformers, in eval mode.

    Args:
        kind: the class.
        model_type: its model type.
        level: how much is made small, one of :data:`~scripts.reference_models.shrinking.LEVELS`.
        most: how many weights it may have.

    Raises:
        TooLargeError: it still has more weights than are made.
        Exception: the class cannot be built so; whatever its own code raises.
    """
    config = _config(kind, model_type, level)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(config).parameters())
    if count > most:
        message = f"too large: {count / 1e6:.0f} M weights"
        raise TooLargeError(message)
    torch.manual_seed(0)
    model: nn.Module = kind(_config(kind, model_type, level))
    return model.eval()


def _config(kind: Any, model_type: str, level: str) -> Any:
    """The default config of a model type, made small."""
    own, mapped = kind.config_class, transformers.CONFIG_MAPPING[model_type]
    config_class: Any = mapped if own is None or issubclass(mapped, own) else own
    return config_class.from_dict(shrunk(config_class().to_dict(), level))


def _cases(reference: nn.Module) -> list[Case]:
    """The batch that is made for a reference; others, and the search for further ones, are left out: they take long."""
    living = LiveReference.of(reference)
    held = HeldWeights(reference, "the reference")
    table = same_names(reference, reference)
    make = partial(make_batches, table, held, held.config, None, seed=0, choices=None, reference=living)
    batch = make(longest=LONGEST)
    cases = (that_fits(living, batch, lambda most: make(longest=most)) if batch.more else batch).cases
    return [max(cases, key=lambda case: len(case.inputs))]  # with pictures, where there are some


def _planted(reference: nn.Module, port: nn.Module, name: str, cases: list[Case]) -> str:
    """Why a wrong weight was not seen in an activation; empty when it was."""
    wrong = port
    wrong.load_state_dict(reference.state_dict(), strict=False)
    torch.manual_seed(3)
    with torch.no_grad():
        tensor = dict(named_tensors(wrong))[name]
        tensor += 1e-2 * torch.randn_like(tensor)
    try:
        report = verify(reference=reference, into=wrong, inputs=cases, dtypes=(), loaded=True, causes=False)
    except PortingError as error:
        return f"with a wrong {name}: {error}"
    seen = any(probe.differs or probe.guilty for probe in report.probes)
    return "" if seen else f"a wrong {name} is seen in no activation"


def line_of(error: BaseException) -> str:
    """An error in one line."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:400]}"


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"(at {Path(frame.filename).name}:{frame.lineno})"


def set_limits() -> None:
    """Limit this process's time and memory, and keep transformers quiet and off the network.

    Raises:
        OutOfTime: later, when the time is used up.
    """

    def late(number: int, frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor: others may be using it as well
    used = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]  # Linux has it
    resource.setrlimit(resource.RLIMIT_AS, (used + GIGABYTES * 2**30,) * 2)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    log: Any = transformers.logging  # its functions have no types
    log.set_verbosity_error()
    log.disable_progress_bar()


def limited(model_type: str, architecture: str) -> Proof:
    """:func:`prove` with limits on time and memory; to be called in a process of its own."""
    set_limits()
    try:
        return prove(model_type, architecture)
    except OutOfTime:
        return Proof(
            model_type=model_type,
            architecture=architecture,
            outcome=LIMITS,
            said=f"more than {SECONDS} s of processor time",
        )
    except MemoryError:
        return Proof(model_type=model_type, architecture=architecture, outcome=LIMITS, said=f"more than {GIGABYTES} GB")

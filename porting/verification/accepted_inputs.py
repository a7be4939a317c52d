"""Asking a reference what it takes: which batches run, before anything is compared on them."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from porting.errors import VerifyError
from porting.printable import text_of
from porting.tracing.trace import ROOT, leaves
from porting.trials.inputs import Case, Maker
from porting.trials.modalities import (
    DECODER_IDS,
    IDS,
    SEGMENTS,
    SIGNALS,
    Signal,
    completed,
    parameters_of,
    signals_of,
    with_places,
)
from porting.verification.references import LiveReference, floating, stored

TRIALS, SECONDS = 60, 30.0
"""How many layouts are tried on a reference at most, and for how many seconds."""

ROWS = (17, 11, 7, 4)
"""Tokens of the rows that go with a picture or a sound each."""

FAR = 4.0
"""How much larger than usual the values of a signal are that is beyond the range."""

EXTREMES = ", one of them zero and one beyond the usual range"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The inputs that a reference accepts.

    Attributes:
        alone: it runs with tokens alone.
        signals: the pictures, sounds and series that it runs with, one of each kind.
        used: for each signal, the arguments of the token batches that go with it.
        more: token batches need further arguments, such as boxes: see :func:`completed`.
        refused: what it said to the first batch that was tried, where nothing suits.
    """

    alone: bool
    signals: tuple[Signal, ...] = ()
    used: tuple[frozenset[str], ...] = ()
    more: bool = False
    refused: VerifyError | None = None


def ask(reference: LiveReference, config: Mapping[str, object], maker: Maker | None) -> Asked:
    """Find out what a reference runs with.

    Args:
        maker: makes token batches; None where the config knows no vocabulary.
    """
    module = reference.module
    taken = parameters_of(module)
    main = str(getattr(module, "main_input_name", IDS))
    text = dict(maker.case("", [7, 4]).inputs) if maker is not None else {}
    first: VerifyError | None = None
    alone = more = False
    if text and main not in SIGNALS:
        first = trial(reference, text)
        full = completed(text, module, config)
        more = first is not None and len(full) > len(text) and trial(reference, full) is None
        alone = first is None or more
    begun, tried = time.thread_time(), 0
    found: dict[str, tuple[Signal, frozenset[str]]] = {}
    idle: dict[str, tuple[Signal, frozenset[str]]] = {}
    for signal in signals_of(module, config):
        if signal.kind in found:
            continue
        for way, given in _ways(signal, module, config, taken, text, main):
            one, inputs = way, completed(given, module, config)
            tried += 1
            if tried > TRIALS or time.thread_time() - begun > SECONDS:
                break
            error = trial(reference, inputs)
            told = _COUNTED.search(text_of(error)) if error is not None and one.token is not None else None
            if told and int(told[1]) % 2 == 0 and int(told[1]) // 2 != one.places:  # of two rows
                one = replace(one, places=int(told[1]) // 2)
                inputs = one.placed({**text, **signal.arguments(2, torch.Generator().manual_seed(1))})
                inputs = {name: value for name, value in inputs.items() if name in taken}
                error = trial(reference, inputs)
            if error is None and matters(reference, inputs, one):
                one = _with_token_kinds(reference, inputs, one, config)
                found[one.kind] = (one, frozenset(inputs))
                break
            if error is None:
                idle.setdefault(one.kind, (one, frozenset(inputs)))
            first = first or error
    if not alone:
        found = {**idle, **found}
    if not alone and not found:
        return Asked(alone=False, refused=first)
    return Asked(
        alone=alone,
        more=more,
        signals=tuple(one for one, _ in found.values()),
        used=tuple(names for _, names in found.values()),
    )


def _with_token_kinds(
    reference: LiveReference, inputs: Mapping[str, Tensor], signal: Signal, config: Mapping[str, object]
) -> Signal:
    """The signal, with the argument that says of which kind each token is, where that changes what is returned.

    Processors give it with every picture, though the forward has a default for it: PaliGemma's is 0 throughout a prompt
    (and what comes behind it 1), Gemma 3's is 1 for the tokens of pictures.

    Args:
        inputs: a batch with the signal, that the reference takes.
        config: it says nothing of segments of text, which have the same argument.
    """
    taken = parameters_of(reference.module)
    if signal.token is None or SEGMENTS not in taken or SEGMENTS in inputs or config.get("type_vocab_size"):
        return signal
    without = _returned(reference, inputs)
    for one in (replace(signal, zeros=(SEGMENTS,)), replace(signal, extra=(*signal.extra, SEGMENTS))):
        given = _returned(reference, {**inputs, **one.token_kinds(inputs[IDS])})
        if given is not None and without is not None and not torch.equal(given, without):
            return one
    return signal


_COUNTED = re.compile(r"do not match,? .*features:? (?:torch\.Size\(\[)?(\d+)")
"""Errors of references that count the steps of a signal and find a number other than their number of features."""


def _ways(
    signal: Signal,
    module: nn.Module,
    config: Mapping[str, object],
    taken: Mapping[str, bool],
    text: Mapping[str, Tensor],
    main: str,
) -> Iterator[tuple[Signal, dict[str, Tensor]]]:
    """The arguments that a signal may be given with: alone, with a decoder's tokens, between tokens, beside them."""
    rows = len(next(iter(text.values()))) if text else 2
    made = signal.arguments(rows, torch.Generator().manual_seed(1))
    decoder = {name: one for name, one in text.items() if name.startswith("decoder_") and name in taken}
    beside = {name: one for name, one in text.items() if name in taken} if IDS in taken else decoder

    def bare() -> Iterator[tuple[Signal, dict[str, Tensor]]]:
        yield signal, made
        if decoder:
            yield signal, {**made, **decoder}
            yield signal, {**made, DECODER_IDS: decoder[DECODER_IDS]} if DECODER_IDS in decoder else made

    def between() -> Iterator[tuple[Signal, dict[str, Tensor]]]:
        if IDS in beside:
            for one in with_places(signal, module, config):
                yield one, one.placed({**beside, **made})
        if beside:
            yield signal, {**made, **beside}

    every = (between(), bare()) if main == IDS and IDS in taken else (bare(), between())
    yield from chain(*every)


def matters(reference: LiveReference, inputs: Mapping[str, Tensor], signal: Signal) -> bool:
    """Whether what a reference returns depends on the signal: it may take one that it never looks at."""
    names = signal.arguments(1, torch.Generator().manual_seed(0))
    other = {
        name: one * FAR + 1.0 if name in names and one.is_floating_point() else one for name, one in inputs.items()
    }
    returned = [_returned(reference, one) for one in (inputs, other)]
    one, two = returned
    return one is None or two is None or one.shape != two.shape or not torch.equal(one, two)


def _returned(reference: LiveReference, inputs: Mapping[str, Tensor]) -> Tensor | None:
    found: list[Tensor] = []
    trial(reference, inputs, found)
    return found[0] if found else None


ENDED, CHANGED = 3, 1
"""The position at which a row ends, and at which another token is put, to see whether a reference looks for the end."""


def reads_the_end(reference: LiveReference, inputs: Mapping[str, Tensor], end: int) -> bool:
    """Whether a reference reads an output where a row ends, as CLIP's text model and BART's classifier do.

    Without the token that ends a row CLIP reads the first position, on which no later token has an influence, and BART
    refuses the batch.  Where each row holds that token, what stands in front of it matters.

    Args:
        inputs: a batch that it takes, [b s].
        end: the token that ends a row.
    """
    ids = inputs.get(IDS)
    if ids is None or ids.ndim != 2 or ids.shape[1] <= ENDED:
        return False
    others = torch.where(ids == end, end - 1 if end else end + 1, ids)
    ended = others.clone()
    ended[:, ENDED] = end
    without, within = (_depends(reference, {**inputs, IDS: one}, end) for one in (others, ended))
    return within is True and not without


def _depends(reference: LiveReference, inputs: Mapping[str, Tensor], end: int) -> bool | None:
    """Whether outputs without a row for each token change with a token at the start; None if it refuses the batch."""
    ids, other = inputs[IDS], inputs[IDS].clone()
    free = [one for one in range(4) if one != end]  # of these, two are neither the end nor what stands there
    other[:, CHANGED] = torch.where(ids[:, CHANGED] == free[0], free[1], free[0])
    found: list[list[Tensor]] = []
    for one in (ids, other):
        arguments = floating(reference.taken(Case("", {**inputs, IDS: one})).inputs, stored(reference.module))
        try:
            with torch.no_grad():
                returned = reference.module(**arguments)
        except Exception:  # noqa: BLE001  # a reference may raise anything at a batch that it does not take
            return None
        values = [value for value in leaves(returned).values() if value.is_floating_point() and not value.is_meta]
        found.append([value for value in values if ids.shape[1] not in value.shape])
    return any(not torch.equal(one, two) for one, two in zip(*found, strict=True))


def trial(
    reference: LiveReference, inputs: Mapping[str, Tensor], returned: list[Tensor] | None = None
) -> VerifyError | None:
    """Return the error with which a reference refuses a batch; None if it runs.

    Args:
        returned: is given the first tensor that the reference returns.
    """

    def visit(point: str, value: Tensor) -> None:
        if returned is not None:
            returned.append(value)

    try:
        reference.as_it_is([Case("", inputs)], wanted=[ROOT]).run(0, visit)
    except VerifyError as error:
        return error
    return None


def cases_with(
    asked: Asked,
    maker: Maker | None,
    seed: int,
    module: nn.Module,
    config: Mapping[str, object],
    port: Collection[str] = (),
) -> Iterator[Case]:
    """The batches for what a reference takes beside tokens; the last arguments are those of :func:`completed`."""
    generator = torch.Generator().manual_seed(seed)
    for signal, used in zip(asked.signals, asked.used, strict=True):
        tokens = any(name in used for name in (IDS, DECODER_IDS))
        for words, lengths, far in (("", ROWS, False), (EXTREMES, ROWS[:2], True)):
            made = signal.arguments(len(lengths), generator)
            if far:
                made = {name: _beyond(one) for name, one in made.items()}
            name = f"{len(lengths)} {_several(signal.kind)}{words}"
            if tokens and maker is not None:
                rows = [min(one, maker.longest) for one in lengths]
                case = maker.case("", rows)
                inputs = signal.placed({key: one for key, one in case.inputs.items() if key in used} | made)
                name = f"{maker.described(rows)}, with a {signal.kind} each{words}"
                yield Case(name, completed(inputs, module, config, port))
            else:
                yield Case(name, completed(made, module, config, port))


def _several(kind: str) -> str:
    """The plural: ``pictures``, ``rows of features``."""
    return kind.replace("row of", "rows of") if kind.startswith("row of") else f"{kind}s"


def _beyond(value: Tensor) -> Tensor:
    """The first half of the rows zero, the others larger than usual."""
    if not value.is_floating_point():
        return value
    half = len(value) // 2
    return torch.cat([torch.zeros_like(value[:half]), value[half:] * FAR])


def that_run(reference: LiveReference, cases: Sequence[Case]) -> list[Case]:
    """The cases that a reference runs with."""
    return [case for case in cases if trial(reference, case.inputs) is None]

"""``docs/causes.md``, written from the catalogue and from the score that was kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from porting.causes import dropout, weights
from porting.causes.catalogue import THEMES
from porting.causes.step_differences import WORDS
from porting.verification.fixes import SPECIAL, SPECIAL_WHAT

SCORE = Path(__file__).resolve().parent.parent / "docs" / "causes-score.json"

_HEAD = """\
# Named causes

When a module of a port is guilty, `verify` says why. The float64 reference is recorded as a list of the torch functions
that it called; each entry below rewrites some of these calls, as if the reference had been written with that mistake;
and what then comes out at the guilty probe is compared with what the port computed there from the reference's own
inputs. An entry is the cause when it leaves nothing but rounding (the bound of [the proof](verification.md), 1e-12 of
the activation's scale)

1. at the probe, without changing a probe that agrees;
2. at the same probe in up to three other cases, and in one that is drawn for this: numbers that were fitted to one
   case are confirmed on others, and so is what a case happens not to tell apart;
3. end to end: with all causes of the report at once the reference gives what the port gives, to 1e-10, at every probe.

The report has its name, its parameter, what it leaves unexplained, and how to fix it:

```
cause: LayerNorm eps (eps is 1e-05 where the reference has 1e-12), explains all but 5e-16 of 8e-05
  explains: bert.embeddings, bert.layers.{0-2}.attention_norm, bert.layers.{0-2}, mlm
```

- **One cause is reported once**, with all the probes that it explains; a port with two mistakes gets both.
- **Numbers are solved for.** An eps, a rotation's theta or scaling, the slopes of linear biases, a soft cap, a clamp,
  the factor of scores, embeddings, branches or logits, the width of a window, a position's offset, an activation's
  steepness: the usual values are tried as they are, and any other is found from the port's own values, confirmed by
  what it leaves, and said as a person would have written it:
  `eps is 3e-06 where the reference has 1e-12`, `scores are multiplied by 1 / sqrt(10) where 1 / sqrt(8) is expected`.
- **Ties are ties.** Entries that give the same values at the probes, in all these cases and end to end, are all named.
- **Where no entry fits, the port is repaired.** Both passes are recorded. At the first step of the port that reads
  values of the reference and gives others, the reference's value is put in; then at the next such step, until the port
  returns what the reference returns. If a few steps (at most three lines of code) are enough, in several cases, they
  are the cause, and the report says how each differs from the reference's step: another function (`sigmoid, where
  pooler.activation of the reference has tanh`), another number (`eps is 1e-06 where the reference has 1e-12`), another
  tensor, the reference's values in another order (`in the order 0 2 1 3 along an axis of 4, since attention.py:37`),
  other constants (of positions, say: they are replaced where they are made), a step that is missing, one too many, or
  two that are done in the other order.
- **A port that is right on some inputs is compared with itself.** A case in which both sides agree is compared with
  one in which they differ. A condition in the code that goes another way is the cause if the port is right in all
  cases once the condition is always decided as where both agree. Else each step of the port has a counterpart there:
  the step of the reference with the same numbers. The first step that has these numbers no longer is the cause, if
  the port is right with the counterpart's in their place: `clamp gives other numbers than arange ...: 63 where the
  reference has 64`. And a step that gives the reference's numbers there is no mistake for being written otherwise.
- **A line of the table may be the mistake.** The lines that write a guilty module's weights are written in the usual
  other ways: another order of the factors of an axis, a square matrix transposed, halves for pairs, parts of a
  concatenation exchanged, two names exchanged. Where a port is right with one of them, in all cases, the report has the
  line of the table and the line that should stand there.
- **A line of the code is shown with its replacement.** On the lines that lead to the first difference, each single
  change is made for one pass, without touching the file: another variable, attribute, number, operator or order, an
  argument or a call left out. Where one makes the port right in all cases, the fix is that line and its replacement.
- **What a port does to a value once it is there** (a factor, a softmax, another order of the labels) is solved for. A
  part that computes nothing comparable at a probe is named when the whole model then returns what the port returns, in
  all cases.
- **NaN and infinity** are answered by the first operation that gave them, with file and line. An entry is the cause of
  NaN only when it has NaN at the same places; a softmax over a row of which a mask hides every key has a name of its
  own, `mask that hides every key`.
- **A mask of the wrong polarity** in the table's `[inputs]` is seen by running the port with the mask inverted.
- **Unknown is unknown.** When no entry fits, the three that explain most of the difference are listed, with how much.
  An entry that fits one probe is not named where a probe of the same layer stays unknown: a wrong name is worse than
  none.
- **Rounding has causes, too.** When the meaning is right and the rounding is not, the reference is recorded in the
  working dtype, and an entry is the cause if it reproduces at least three quarters of the port's own rounding error.
- **No name is needed.** Which tensor plays the query is read off the products that lead to a softmax; the port may be
  written in any way, since only its values at the probes are compared.

`verify(causes=False)` does without. `Report.causes` has the findings as data: `name`, `detail`, `where` (the modules of
the reference that were altered), `probes`, `difference`, `residual`, `what`, `fix`, `ties`, `nearest`.

Limits: a number is solved for where it is the only mistake between two probes; weights that are not the checkpoint's
can be solved for only where a probe has more rows than the layer has inputs; a rounding error is reproduced only
where the port's kernels round as the reference's do, which a fused or differently laid out product need not; what a
port does to channels that its table has put in another order is to the reference another mistake, so that a weight that
is transposed there is no more than other weights; a difference at the noise floor that no module makes by itself has no
cause; a rotation in complex numbers, and linear biases that are an operand of attention's product (as in BLOOM), are
not seen as such; of Llama 3's scaling all but the factor is taken to be the usual where no config says it; a reference
that is a recording has no functions to rewrite; a line of the code is mended by one change to one line of a function
that the forward pass runs, and not by one to a constructor; and sizes that are equal by chance, such as the number of
heads and the root of the head size, can make another change look right.

This page is written from the catalogue by `python -m scripts.causes --write`.
"""


_SIGNS = {"unique": "✓", "tie": "=", "unknown": "?", "wrong": "✗", "missed": "!", "no effect": "·"}


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, "## The catalogue\n", *_entries(), *_score()]).rstrip() + "\n"


def _score() -> Iterator[str]:
    if not SCORE.is_file():
        return
    known = json.loads(SCORE.read_text(encoding="utf-8"))
    measured = ", ".join(f"{name} {value}" for name, value in known["measured"].items() if name != "date")
    yield "## The score\n"
    yield f"`python -m scripts.causes --write`, {known['measured']['date']}, {measured}.\n"
    yield (
        "Each mistake is planted into the port of each pair of family and module where it applies, and the port is "
        "verified. Planting is written apart from the entries above: it changes what the port's own layers are given "
        "and give. Mistakes made in the source of a model are tested besides, in `tests/causes/`.\n"
    )
    if "faithful" in known:
        alarms = len(known["faithful"]["alarms"])
        how = f", in {known['faithful']['dtypes']}" if "dtypes" in known["faithful"] else ""
        many = known["faithful"]["comparisons"]
        yield (
            f"False alarms: {alarms} in {many} comparisons of faithful ports: every pair, with weights drawn anew, "
            f"other inputs of other lengths{how}.\n"
        )
    yield "✓ named, = in a tie, ? unknown, ✗ a wrong name among the right ones, ! missed, · none, ° others accused\n"
    numbers = {pair: number for number, pair in enumerate(known["pairs"], 1)}
    yield from (f"{number}. {pair}" for pair, number in numbers.items())
    yield "\n### Made at every place where it can be made\n"
    yield from _matrix(known["pairs"], numbers)
    if "alone" not in known:
        return
    yield "\n### Made in one layer alone\n"
    yield "The layer is drawn; what is outside of the layers, as the embeddings or a head, is drawn like one of them.\n"
    yield from _matrix(known["alone"], numbers)


Cell = Mapping[str, object]


def _matrix(pairs: Mapping[str, Mapping[str, Cell]], numbers: Mapping[str, int]) -> Iterator[str]:
    cells = [one for found in pairs.values() for one in found.values()]
    counts = Counter(str(cell["outcome"]) for cell in cells)
    none = counts["no effect"]
    seen = len(cells) - none
    caught = [cell for cell in cells if cell["outcome"] not in ("no effect", "missed")]
    placed = sum(bool(one["placed"]) for one in caught)
    strict = [bool(one["strict"]) for one in caught if "strict" in one]  # pairs scored before this was asked lack it
    named = counts["unique"] + counts["tie"]
    yield f"- planted: {len(cells)}, in {len(pairs)} pairs; without effect, by equal values in float64: {none}"
    yield f"- caught: {len(caught)} of {seen} ({_percent(len(caught), seen)})"
    yield (
        f"- placed: {placed} of {len(caught)} ({_percent(placed, len(caught))}): each finding has a probe that was "
        "made where the mistake was made"
    )
    if strict:
        share = _percent(sum(strict), len(strict))
        asked = sum(any("strict" in one for one in found.values()) for found in pairs.values())
        earlier = "" if asked == len(pairs) else f" (in {asked} pairs; the others were planted before this was asked)"
        yield (
            f"- accused nobody else: {sum(strict)} of {len(strict)} ({share}): each guilty probe was made there, the "
            f"first one and all others{earlier}"
        )
    yield (
        f"- named: {named} of {len(caught)} ({_percent(named, len(caught))}), {counts['unique']} uniquely and "
        f"{counts['tie']} in a tie; every finding of a report has to be right"
    )
    yield "\n| planted | " + " | ".join(map(str, numbers.values())) + " |"
    yield "|---" * (len(numbers) + 1) + "|"
    for name in dict.fromkeys(name for found in pairs.values() for name in found):
        signs = [_sign(pairs.get(pair, {}).get(name)) for pair in numbers]
        yield f"| {name} | " + " | ".join(signs) + " |"


def _sign(cell: Cell | None) -> str:
    if cell is None:
        return ""
    return _SIGNS[str(cell["outcome"])] + ("" if cell["placed"] and cell.get("strict", True) else "°")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"


def _entries() -> Iterator[str]:
    for theme, causes in THEMES.items():
        yield f"### {theme.capitalize()}\n"
        for cause in causes:
            yield from _entry(cause.name, cause.what, cause.looks, cause.fix)
        yield ""
    yield "### Found in other ways\n"
    yield from _entry(dropout.NAME, dropout.WHAT, dropout.LOOKS, dropout.FIX)
    for name, what, fix in (
        (weights.UNTIED, weights.UNTIED_WHAT, weights.UNTIED_FIX),
        (weights.OTHER, weights.OTHER_WHAT, weights.OTHER_FIX),
    ):
        yield from _entry(name, what, weights.LOOKS, fix)

    yield f"- **{SPECIAL}**: {SPECIAL_WHAT}. *Fix:* decide the condition the same way on all inputs."

    yield "\n### Found by repairing the port\n"
    for kind, (what, fix) in WORDS.items():
        yield f"- **{kind}**: {what}. *Fix:* {fix}."


def _entry(name: str, what: str, looks: str, fix: str) -> Iterator[str]:
    yield f"- **{name}**: {what}. *Looks:* {looks}. *Fix:* {fix}."

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

When `verify` finds a module that differs, it looks for the mistake. It records the torch functions that the float64
reference called. Each entry of the catalogue below changes some of these calls, as if the reference had been written
with that mistake. Then `verify` compares the result with what your module computes from the same inputs. An entry is
named as the cause if nothing but rounding is left (1e-12 of the activation's scale, the tolerance of [the
verification](verification.md)):

1. at the probe, while probes that agreed still agree;
2. at the same probe in up to three other batches, in one that is drawn for this purpose, and in up to a dozen with
   other masks, token types, positions and numbers of rows (in three of them if the entry alters neither masks nor
   positions nor token ids). A number that was fitted to one batch is confirmed on others, and mistakes with equal
   effects on one batch are distinguished;
3. end to end: with all causes of the report at once, the reference gives what your model gives, to 1e-10, at every
   probe.

The report has the name of the entry, its number if it has one, the difference that is left, and the fix:

```
cause: LayerNorm eps (eps is 1e-05 where the reference has 1e-12), explains all but 5e-16 of 8e-05
  explains: bert.embeddings, bert.layers.{0-2}.attention_norm, bert.layers.{0-2}, mlm
```

## How causes are found

- **One cause is reported once**, with all the probes that it explains. A model with two mistakes gets both causes.
- **Numbers are computed.** Examples are an eps, the base or scaling of a rotation, the slopes of linear biases, a
  soft cap, a clamp, the factor of scores, embeddings, branches or logits, the width of a window, the offset of a
  position. Usual values are tried first; other values are computed from your model's activations and confirmed on
  other batches. They are printed in the usual form: `scores are multiplied by 1 / sqrt(10) where 1 / sqrt(8) is
  expected`.
- **If several entries explain the difference equally well**, at the probes, in all batches and end to end, all of
  them are named.
- **If no entry fits, steps of your model are replaced.** Both forward passes are recorded. At the first step of yours
  that reads the reference's values and gives other ones, the reference's value is inserted; then at the next such
  step, until the output is the reference's. If a few steps are enough (at most three lines of code) in several
  batches, they are the cause. The report says how each differs: another function (`sigmoid, where pooler.activation
  of the reference has tanh`), another number (`eps is 1e-06 where the reference has 1e-12`), another tensor, another
  order (`in the order 0 2 1 3 along an axis of 4, since attention.py:37`), other constants, a missing step, an
  additional step, or two steps in the other order.
- **If your model is right on some inputs, it is compared with itself.** `verify` takes a batch on which both models
  agree and one on which they differ. A condition in your code that has another outcome in the second batch is the
  cause if your model is right in all batches once the condition is fixed to the first outcome. Otherwise each step of
  your model is paired with the reference's step that has the same numbers in the first batch. The first step that no
  longer has these numbers in the second one is the cause, if inserting the reference's numbers makes your model
  right: `clamp gives other numbers than arange ...: 63 where the reference has 64`.
- **Lines of the table are checked.** The lines that write the weights of a module that differs are tried in other
  usual forms: another order of the factors of an axis, a square matrix transposed, halves for pairs, parts of a
  concatenation exchanged, two names exchanged. If one of them makes your model right in all batches, the report shows
  the line and its replacement.
- **Lines of your code are checked.** On the lines that lead to the first difference, each single change is tried in
  memory; your file is not touched: another variable, attribute, number, operator or order, or an argument or call
  left out. If one makes your model right in all batches, the fix is this line and its replacement.
- **If no entry fits, whole passes are repeated in other ways.** The reference is given other inputs: the first row's
  values for all rows, no mask, a mask read as a length, the other side's mask, positions counted otherwise, embeddings
  scaled or normalised. Your model is called on each row alone. Outputs are looked for among the reference's other
  values. What leaves nothing but rounding in all batches, among them a dozen of other kinds, is the cause. A tensor
  that is changed in place is looked for first: each of your modules is given copies of its arguments.
- **Changes to a finished value** (a factor, a softmax, labels in another order) are computed as well. A part that
  computes nothing comparable at a probe is named if the whole reference, changed in the same way, returns what your
  model returns in all batches.
- **NaN and infinity** are traced to the first operation that gave them, with file and line. An entry is the cause of
  NaN only if it gives NaN at the same places. A softmax over a row in which a mask hides every key is called `mask
  that hides every key`.
- **A mask of the wrong polarity** in the table's `[inputs]` is found by running your model with the mask inverted.
- **If nothing fits, the cause is unknown.** The three entries that explain most of the difference are listed, with
  their share. An entry that fits one probe is not named if another probe of the same layer stays unexplained.
- **Rounding errors have causes, too.** If float64 agrees and the rounding error is too large, the reference is
  recorded in the working dtype. An entry is the cause if it reproduces at least three quarters of your model's
  rounding error.
- **Names in your code do not matter.** Which tensor is the query, for example, follows from the products that lead to
  a softmax. Your model may be written in any way, since only its values at the probes are compared.

`verify(causes=False)` switches the search off. `Report.causes` has the findings as data: `name`, `detail`, `where`
(the modules of the reference that were changed), `probes`, `difference`, `residual`, `what`, `fix`, `ties`,
`nearest`.

## Limits

- A number is computed only if it is the only mistake between two probes.
- Weights that are not the checkpoint's are computed only if a probe has more rows than the layer has inputs.
- A rounding error is reproduced only if your kernels round like the reference's, which is not so for fused or
  differently laid out products.
- If the table reorders channels, a mistake that depends on their order looks like another one: a transposed weight is
  then reported as other weights.
- A difference close to rounding error that no module makes by itself has no cause.
- A rotation in complex numbers, and linear biases that are an operand of attention's product (as in BLOOM), are not
  recognised.
- For Llama 3's scaling only the factor is computed; the usual other values are assumed if no config has them.
- A recorded reference has no functions to change, so no cause is named.
- A fix is one change to one line of a function that the forward pass runs, not of a constructor.
- If sizes are equal by chance, such as the number of heads and the root of the head size, another change can look
  right.

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

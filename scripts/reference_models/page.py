"""``docs/references.md``, written from the proofs: which model types of transformers are references without setup."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from scripts.reference_models.proving import BUILD, DIFFERS, LIMITS, MISSED, PASSES, REFUSED, Proof

VERDICTS = {
    PASSES: "passes",
    MISSED: "passes, but a planted fault was not seen",
    DIFFERS: "no faithful verdict",
    REFUSED: "needs inputs",
    BUILD: "not built",
    LIMITS: "over the limits",
}
"""The outcomes, in the order of the page, as the table calls them."""

_HEAD = """\
# Model types of transformers as references

`porting verify` compares your module with a reference, and the reference is usually a model of transformers. This page
lists every model type of transformers {version} and says whether it can be a reference without any setup.

For each type, `make references` builds a small model from the type's default config, with random weights (biases, gains
and BatchNorm statistics included), saves it, loads it as a reference, and verifies a second instance of the same class
against it, without `inputs=`. A type *passes* if the report is faithful and a copy with one wrong weight is not.

Token ids, pictures, spectrograms, waveforms and series are made from the config and the signature of `forward`. Where a
name does not tell the layout, the reference is asked which one it runs with. *weights seen* is the share of the weights
that some compared activation depends on; for the others, pass inputs of your own.

One batch is compared: further ones, and the search for more, are left out here to save time. Each model has {seconds} s
of processor time and {gigabytes} GB. The class is the usual head of the type, or its base model where there is none.
"""

_WORDS = """\
- **needs inputs**: the reference refuses everything that was made. With `inputs=` it is a reference like any other.
- **not built**: transformers cannot build a small model from the default config here, so nothing is known of the type.
  The reason is given: a library that is not installed, a default config that is not complete, a size that cannot
  shrink.
- **over the limits**: it may work with more time or memory.
- **no faithful verdict**: two instances of one class compare as different, or the reference computes values that are no
  numbers.
"""


def page(
    proofs: Mapping[tuple[str, str], Proof], parts: Sequence[str], waiting: Sequence[str], **figures: object
) -> str:
    """The page.

    Args:
        proofs: what came of each class.
        parts: model types that are parts of others, and have no class of their own.
        waiting: model types that were not run.
        figures: ``version``, ``seconds``, ``gigabytes``.
    """
    return "\n".join([_HEAD.format(**figures), *_counts(proofs), _WORDS, *_table(proofs), *_rest(parts, waiting)])


def _counts(proofs: Mapping[tuple[str, str], Proof]) -> Iterator[str]:
    count = Counter(proof.outcome for proof in proofs.values())
    built = len(proofs) - count[BUILD]
    yield f"Of {len(proofs)} classes {built} were built, and {count[PASSES]} of these pass.\n"
    yield "| outcome | classes |\n|---|---|"
    for outcome, words in VERDICTS.items():
        if count[outcome]:
            yield f"| {words} | {count[outcome]} |"
    yield ""


def _table(proofs: Mapping[tuple[str, str], Proof]) -> Iterator[str]:
    yield "| model type | class | outcome | inputs, or the reason | probes | weights seen |\n|---|---|---|---|---|---|"
    for proof in sorted(proofs.values(), key=lambda one: (one.model_type.lower(), one.architecture)):
        said = "; ".join(proof.inputs[:1]) if proof.outcome == PASSES else reason(proof.said)
        seen = f"{proof.reached:.0%}" if proof.probes else ""
        yield (
            f"| {proof.model_type} | {proof.architecture} | {VERDICTS[proof.outcome]} | {said} |"
            f" {proof.probes or ''} | {seen} |"
        )
    yield ""


def reason(said: str) -> str:
    """Why, in one cell of a table: the error's own words, without its place and what was given.

    >>> reason("the reference failed on x [2, 3]: ValueError: no | such (its forward takes (x)) [forward-failed]")
    'ValueError: no / such'
    """
    library = re.search(r"requires the (\w+) library|No module named '(\w+)'", said)
    if library:
        return f"library missing: {library[1] or library[2]}"
    found = re.sub(r"^the (reference|port) failed on .*?\]: ", "", said)
    found = re.sub(r" \((its forward takes|at ).*$| \[[a-z-]+\]$", "", found)
    found = re.sub(r"\S*/(tmp|porting)[^ ]*: ", "", " ".join(found.split())).replace("|", "/")
    return found if len(found) <= _WIDE else f"{found[:_WIDE]}..."


_WIDE = 140


def _rest(parts: Sequence[str], waiting: Sequence[str]) -> Iterator[str]:
    if waiting:
        yield f"## Not run yet\n\n{', '.join(waiting)}\n"
    if parts:
        yield "## Parts of other types\n"
        yield "These have a config, and no class that is made from it alone: they run inside of the types above.\n"
        yield f"{', '.join(parts)}\n"

"""``docs/causes.md``, written from the catalogue and from the score that was kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from porting.causes import dropout, weights
from porting.causes.catalogue import THEMES

SCORE = Path(__file__).resolve().parent.parent / "docs" / "causes-score.md"

_HEAD = """\
# Named causes

When a module of a port is guilty, `verify` says why. The float64 reference is recorded as a list of the torch functions
that it called; each entry below rewrites some of these calls, as if the reference had been written with that mistake;
and what then comes out at the guilty probe is compared with what the port computed there from the reference's own
inputs. An entry that leaves nothing but rounding (the bound of [the proof](verification.md), 1e-12 of the activation's
scale) and changes no innocent probe is the cause. The report has its name, its parameter, what it leaves (the
residual), and how to mend it:

```
cause: LayerNorm eps (eps is 1e-05 where the reference has 1e-12), residual 5e-16 of 8e-05
  explains: bert.embeddings, bert.layers.{0-2}.attention_norm, bert.layers.{0-2}, mlm
```

- **One cause is reported once**, with all the probes that it explains; a port with two mistakes gets both.
- **Ties are ties.** Entries that give the same values on these inputs are all named.
- **Unknown is unknown.** When no entry fits, the three that explain most of the difference are listed, with how much.
- **Rounding has causes, too.** When the meaning is right and the rounding is not, the reference is recorded in the
  working dtype, and an entry is the cause if it reproduces at least three quarters of the port's own rounding error.
- **No name is needed.** Which tensor plays the query is read off the products that lead to a softmax; the port may be
  written in any way, since only its values at the probes are compared.

`verify(causes=False)` does without. `Report.causes` has the findings as data: `name`, `detail`, `where` (the modules of
the reference that were altered), `probes`, `difference`, `residual`, `what`, `fix`, `ties`, `nearest`.

This page is written from the catalogue by `python -m scripts.causes --write`.
"""


def page() -> str:
    """The whole page."""
    score = SCORE.read_text(encoding="utf-8") if SCORE.is_file() else ""
    return "\n".join([_HEAD, "## The catalogue\n", *_entries(), *([score] if score else [])]).rstrip() + "\n"


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


def _entry(name: str, what: str, looks: str, fix: str) -> Iterator[str]:
    yield f"- **{name}**: {what}. *Looks:* {looks}. *Fix:* {fix}."

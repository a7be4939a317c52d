"""Behind the proof: other rows, other masks, other calls, more layers, on which a module may still be another.

A module can be right on the batches of a proof and wrong on others: on rows of one word, on rows that are padded in
front, once it was called before, in float32, in its third layer where the twin has two.  Each of these is tried; what
differs takes the proof away, and what could not be tried is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from porting.checkpoint import Checkpoint
from porting.errors import PortingError
from porting.notation.table import Table
from porting.suggesting.subjects.building import Builder
from porting.suggesting.subjects.fields import Role
from porting.suggesting.subjects.rows import other_masks, other_rows
from porting.suggesting.subjects.subject import Subjects, number_of
from porting.suggesting.subjects.twin import DEEP, SMALL, make_twin
from porting.suggesting.verdict.calling import defaults, lowered, other_calls
from porting.suggesting.verdict.proving import Proof, cases, prove
from porting.suggesting.verdict.suggestion import Reason
from porting.verification.inputs import Case

Proven = Callable[[Sequence[Case], Checkpoint], Proof]


@dataclass(frozen=True, kw_only=True)
class Beyond:
    """What was seen behind the proof.

    Attributes:
        reasons: where the module differs.
        limits: what was not tried, and what a user should know of calls that the table does not make.
        proof: on the other batches; None where none were run.
    """

    reasons: tuple[Reason, ...] = ()
    limits: tuple[str, ...] = ()
    proof: Proof | None = None


def beyond(into: Builder, table: Table, subjects: Subjects, *, seed: int, fresh: bool, deep: Table | None) -> Beyond:
    """Try what the proof did not.

    Args:
        into: the user's module or builder.
        table: the suggested one, proven on the twin.
        subjects: how they were run; the module holds what was found.
        seed: of the inputs.
        fresh: some of the module's parameters have no source.
        deep: where nothing of the checkpoint's own size is run: the table for its depth, of which a twin is.
    """
    twin = subjects.twin.checkpoint

    def proven(batches: Sequence[Case], of: Checkpoint) -> Proof:
        suited = table if of is twin or deep is None else deep
        return prove(of, into, suited, subjects, seed=seed, fresh=fresh, small=True, batches=batches)

    usual = [*other_rows(subjects, twin.config, seed=seed)]
    masks = [*other_masks(subjects, twin.config, seed=seed)]
    wide = proven([*usual, *(case for case, _, _ in masks)], twin)
    reasons = [*other_calls(into, subjects)]
    limits = [*defaults(subjects), *lowered(into, subjects)]
    if not wide.exact:  # one proof for all of them, and one for each only where that fails
        proofs = {case.name: proven([case], twin) for case in usual}
        wrong = [name for name, proof in proofs.items() if proof.report is not None and not proof.exact]
        failed = [name for name, proof in proofs.items() if proof.report is None]
        wide = proven([case for case in usual if case.name not in failed], twin)
        if not wide.exact:
            where = ", ".join(wrong[:3]) or "several batches one after the other"
            reasons.append(Reason(kind="batch", said=f"the proof does not hold on {where}: {_far(wide)}"))
        limits += [f"{', '.join(failed[:3])}: {proofs[failed[0]].refused.partition(chr(10))[0]}"] if failed else []
        for case, what, usually in masks if wide.exact else ():
            proof = proven([case], twin)
            if not proof.exact and usually and _counted(proof):
                said = f"{what} is computed otherwise than by the reference: {_far(proof)}"
                reasons.append(Reason(kind="mask", said=said, shown=True))
            elif not proof.exact:
                limits.append(f"{what} {'is computed otherwise' if _counted(proof) else 'gives no numbers'}")
    if deep is not None and subjects.twin.shrunk:
        tall, depth = _deep(subjects, proven, seed)
        if tall is not None and tall.report is not None and not tall.exact:
            said = f"the proof holds on 2 layers and does not on {depth}, of another width: {_far(tall)}"
            reasons.append(Reason(kind="depth", said=said))
        elif tall is None or tall.report is None:
            limits.append("more layers than two: the module could not be built with them at another small size")
    return Beyond(reasons=tuple(reasons), limits=tuple(limits), proof=wide)


def _deep(subjects: Subjects, proven: Proven, seed: int) -> tuple[Proof | None, int]:
    """The proof on a twin with as many layers as the checkpoint, more heads and other sizes; and how many layers."""
    kind = subjects.twin.architecture
    with TemporaryDirectory(prefix="porting-deep-") as folder:
        words = number_of(subjects.twin.config, Role.VOCABULARY)
        sizes = DEEP if words == SMALL.vocabulary else replace(DEEP, vocabulary=words)  # the module's own
        try:
            other = make_twin(subjects.config, kind, Path(folder), small=True, seed=seed + 1, to=sizes)
        except PortingError:
            return None, 0
        spare = number_of(subjects.twin.config, Role.POSITIONS, subjects.longest) - subjects.longest
        longest = max(number_of(other.config, Role.POSITIONS, subjects.longest) - max(spare, 0), 1)
        batches = cases(subjects, other.config, seed=seed, longest=longest)
        return proven(batches, other.checkpoint), number_of(other.config, Role.DEPTH)


def _counted(proof: Proof) -> bool:
    """Whether a difference is a number."""
    return proof.difference is not None and proof.difference < float("inf")


def _far(proof: Proof) -> str:
    if proof.difference is None:
        return proof.refused.partition("\n")[0]
    return f"off by {proof.difference:.0e} of the activations' scale"

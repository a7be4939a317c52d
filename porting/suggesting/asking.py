"""Decisions that are the user's: each has a default, and says why it is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from porting.suggesting.layouts import Move, Piece


@dataclass(frozen=True, kw_only=True)
class Question:
    """One decision.

    Attributes:
        about: what it is: ``"architecture"``, ``"argument"``, ``"fold"`` ...
        said: the question.
        why: why it is asked.
        choices: the answers that there are, with what each means; empty when any text is one.
        default: the answer when there is nobody to ask.
    """

    about: str
    said: str
    why: str
    choices: Mapping[str, str] = field(default_factory=dict)
    default: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A question with its answer."""

    about: str
    said: str
    answer: str
    default: str


Ask = Callable[[Question], str]
"""Answers a question."""


class Asker:
    """Asks, takes the default where nobody can be asked, and remembers.

    Args:
        ask: answers questions; None to take every default.
    """

    def __init__(self, ask: Ask | None = None) -> None:
        self._ask = ask
        self.decisions: list[Decision] = []

    @property
    def present(self) -> bool:
        """Whether there is somebody to ask."""
        return self._ask is not None

    def __call__(self, question: Question) -> str:
        """The answer; the default where it is none of the choices."""
        answer = question.default if self._ask is None else self._ask(question)
        if question.choices and answer not in question.choices:
            answer = question.default
        self.decisions.append(
            Decision(about=question.about, said=question.said, answer=answer, default=question.default)
        )
        return answer


def which_architecture(config: Mapping[str, object], usual: Sequence[str]) -> Question | None:
    """Which class the reference is; None where there is nothing to decide.

    Args:
        config: the checkpoint's.
        usual: the classes that transformers has for such a config, the plain model first.
    """
    declared = config.get("architectures")
    names = [str(one) for one in declared] if isinstance(declared, list) else []
    if len(names) == 1 or not (names or usual):
        return None
    said = f"{len(names)} architectures" if names else "no architecture"
    return Question(
        about="architecture",
        said="Which architecture is your module held against?",
        why=f"config.json names {said}, and what each returns and holds is not the same",
        choices=dict.fromkeys(names or usual, ""),
        default=(names or list(usual))[0],
    )


def what_argument(forward: str, name: str, free: Sequence[str], *, required: bool) -> Question:
    """What the reference's argument is that one of the module's stands for.

    Args:
        forward: whose argument it is.
        name: it.
        free: the reference's arguments that no other stands for.
        required: the forward cannot be called without it.
    """
    neither = "refuse: wrap the forward" if required else "leave it at its default"
    return Question(
        about="argument",
        said=f"What is {name!r} of {forward}?",
        why="its name says nothing" + ("" if required else ", and nothing else can be the attention mask"),
        choices={"none": neither, **{one: _MEANINGS.get(one, "") for one in free}},
        default="none",
    )


_MEANINGS = {
    "attention_mask": "which positions are words; how it is written is found out",
    "token_type_ids": "the segment of each word",
    "position_ids": "the place of each word",
    "input_ids": "the words",
}


def where_to_fold(moves: Sequence[Move], tables: Collection[str]) -> Question | None:
    """Which table a row goes into that the module has no table for; None where there is one only.

    Args:
        moves: what was found.
        tables: the module's tensors that are looked up, or added row by row.
    """
    folded = next((move for move in moves if move.fold), None)
    others = [move for move in moves if _takes(move, tables)]
    if folded is None or not others:
        return None
    extra, first = folded.sources[1].pattern, folded.targets[0].pattern
    return Question(
        about="fold",
        said=f"Which table takes row 0 of {extra}?",
        why="the module has no such table; the sum is the same, and an export gives it back to the table that took it",
        choices=dict.fromkeys((first, *(move.targets[0].pattern for move in others)), ""),
        default=first,
    )


def _takes(move: Move, tables: Collection[str]) -> bool:
    """Whether a row can be added to what this rule writes: one table made of one, as it is."""
    single = len(move.sources) == len(move.targets) == 1 and not (move.fold or move.scale)
    return single and move.targets[0].names[0] in tables


def refolded(moves: Sequence[Move], target: str) -> list[Move]:
    """The moves with the row taken by another table."""
    folded = next(move for move in moves if move.fold)
    if folded.targets[0].pattern == target:
        return list(moves)
    row = folded.sources[1:]
    found = []
    for move in moves:
        if move is folded:
            found.append(replace(_bare(move), fold=False))
        elif move.targets[0].pattern == target:
            found.append(_with(move, row))
        else:
            found.append(move)
    return found


def _bare(folded: Move) -> Move:
    source, target = folded.sources[0], folded.targets[0]
    if source.axes == target.axes:
        source, target = replace(source, axes=""), replace(target, axes="")
    return replace(folded, sources=(source,), targets=(target,))


def _with(move: Move, row: tuple[Piece, ...]) -> Move:
    source, target = move.sources[0], move.targets[0]
    if not source.axes:
        source, target = replace(source, axes="t e"), replace(target, axes="t e")
    return replace(move, sources=(source, *row), targets=(target,), fold=True)

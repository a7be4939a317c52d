"""Decisions that are the user's: each has a default, and says why it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


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


def which_architecture(names: Sequence[str], usual: Sequence[str], held: str) -> Question | None:
    """Which class the reference is; None where there is nothing to decide.

    Args:
        names: the classes that ``config.json`` names.
        usual: the classes that transformers has for such a config, the plain model first.
        held: the class that the checkpoint holds; empty where that is not known.
    """
    if len(names) == 1 or not (names or usual):
        return None
    said = f"{len(names)} architectures" if names else "no architecture"
    choices = dict.fromkeys([*names] or [*usual], "")
    return Question(
        about="architecture",
        said="Which architecture is your module compared with?",
        why=f"config.json names {said}, and what each returns and holds is not the same",
        choices=choices | ({held: "what the checkpoint holds"} if held else {}),
        default=held or next(iter(choices)),
    )


def what_argument(forward: str, name: str, free: Sequence[str], *, required: bool) -> Question:
    """Ask which argument of the reference one of the module's stands for.

    Args:
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

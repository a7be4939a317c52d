"""What is said: in a few lines whatever the number of layers, and nothing that the user's code prints in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from porting.errors import PortingError
from porting.suggesting import Question, Suggestion, Verdict, suggest
from porting.suggesting.draft.unmapped import Near, Unmapped
from tests.suggesting.oracle import drafted
from tests.suggesting.test_verdicts import Plain
from tests.zoo.parts import Config, attend, join, split
from tests.zoo.plain import Layer
from tests.zoo.position_buffer import PositionBuffer


class PreNormLayer(Layer):
    """Norms in front of both parts, where the checkpoint has them behind the sums."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (split(one(h), self.heads) for one in (self.query, self.key, self.value))
        x = x + self.out(join(attend(q, k, v, keep)))
        out: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return out


class PreNorm(Plain):
    def change(self) -> None:
        for layer in self.layers:
            layer.__class__ = PreNormLayer


@pytest.mark.slow
def test_what_has_no_counterpart_is_left_to_the_user(source: Path) -> None:
    text = drafted(source, PreNorm).text
    assert '"bert.encoder.layer.{i}.intermediate.{*rest}" = "no counterpart was found"' in text
    assert "# by what it computes" not in text
    assert "does not use it" not in text, "the checkpoint has a layer more than its twin"


@pytest.mark.slow
def test_what_has_no_counterpart_is_a_line_for_all_layers(source: Path) -> None:
    found = suggest(source, PreNorm)
    assert found.verdict in {Verdict.IMPOSSIBLE, Verdict.NOT_FOUND}
    assert len(str(found).splitlines()) <= 8, str(found)
    up = next(line for line in found.details() if line.startswith("nothing fills layers.{i}.up."))
    assert up.startswith("nothing fills layers.{i}.up.{weight,bias} [156, 40] and [156] (4 tensors), which run behind ")
    assert "; nearest: bert.encoder.layer.{i}.intermediate.dense.weight [156, 40]" in up
    assert '"bert.encoder.layer.{i}.intermediate.{*rest}" = "no counterpart was found"' in found.text
    values = next(line for line in found.text.splitlines() if ".value." in line)
    assert values.endswith('"  # a guess, which nothing behind it confirms')
    assert "# by what it computes" not in found.text
    assert "Also tried: " in found.explain("layers.{i}.value")
    assert "Proof: " not in found.explain("layers.{i}.value")
    assert "does not use it" not in found.text, "the checkpoint has a layer more than its twin"


class Talks(PositionBuffer):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        print("number of parameters: 0.01M")  # noqa: T201  # the point


class TalksAndFails(Talks):
    def forward(self, ids: Tensor, keep: Tensor, segments: Tensor) -> Tensor:
        print("shape", tuple(ids.shape))  # noqa: T201  # the point
        raise ValueError("not today")


@pytest.mark.slow
def test_what_a_module_prints_is_shown_where_it_fails_and_once(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(question: Question) -> str:
        print(question.said)  # noqa: T201  # a user's own way to ask
        return question.default

    suggest(source, lambda config, zzz=0: Talks(config), ask=ask, progress=lambda *_: print("."))  # noqa: T201  # as above
    out = capsys.readouterr().out
    assert "number of parameters" not in out
    assert out.startswith(".")
    with pytest.raises(PortingError, match="not today"):
        suggest(source, TalksAndFails)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(set(lines))
    assert {"number of parameters: 0.01M"} < set(lines)
    assert any(line.startswith("shape (") for line in lines)


def test_a_table_that_leaves_parameters_as_they_are_does_not_load_the_checkpoint() -> None:
    head = Unmapped(name="decoder.linear.weight", shape=(97, 40))
    whole, partly = (Suggestion(verdict=Verdict.APPROXIMATE, text="", unmapped=unmapped) for unmapped in ((), (head,)))
    assert whole.meaning.startswith("The table loads the checkpoint")
    assert partly.meaning.startswith("The table loads what both sides have")


def test_tensors_of_a_part_that_the_module_lacks_are_not_listed() -> None:
    near = (Near(name="classifier.weight", shape=(3, 4)),)
    tensors = tuple(Unmapped(name=name, shape=(4, 4), side="checkpoint", near=near) for name in ("cls.up", "clsx.up"))
    lines = Suggestion(verdict=Verdict.TRUNK, text="", missing=("cls",), unmapped=tensors).details()
    assert lines[0] == "your module has no cls"
    assert [line.split(" [")[0] for line in lines[1:]] == ["nothing reads clsx.up"]

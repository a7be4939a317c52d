"""Rules that differ in numbers are written once, and only where that says the same."""

from __future__ import annotations

from porting.registries.patterns import Spelling, Wording, rules


def words(*pairs: tuple[str, str]) -> list[str]:
    every = [Wording((Spelling.of(one),), (Spelling.of(other),), ("", "")) for one, other in pairs]
    return [f"{one} = {other}" for (one,), (other,) in rules(every)]


def test_layers_are_one_rule_and_what_is_alone_stays() -> None:
    pairs = [(f"h.{n}.w{m}", f"layers.{n}.w{m}") for n in range(12) for m in (1, 2)]
    assert words(*pairs, ("norm.0.x", "norm.0.x")) == [
        "h.{i}.w1 = layers.{i}.w1",
        "h.{i}.w2 = layers.{i}.w2",
        "norm.0.x = norm.0.x",
    ]


def test_a_number_that_is_shifted_is_the_same_index() -> None:
    assert words(*((f"h.{n + 1}.a", f"l.{n}.a") for n in range(3))) == ["h.{i+1}.a = l.{i}.a"]
    assert words(*((f"h.{n}.a", f"l.{n + 2}.a") for n in range(3))) == ["h.{i}.a = l.{i+2}.a"]


def test_two_indices_and_their_exchange() -> None:
    pairs = [(f"h.{n}.e.{m}.w", f"e.{m}.h.{n}.w") for n in range(2) for m in range(3)]
    assert words(*pairs) == ["h.{i}.e.{j}.w = e.{j}.h.{i}.w"]


def test_numbers_that_leave_one_out_are_listed() -> None:
    assert words(*((f"mlp.{n}.w", f"mlp.{n}.w") for n in (0, 2))) == ["mlp.{i:0,2}.w = mlp.{i:0,2}.w"]
    every = [(f"h.{n}.a", f"h.{n}.a") for n in range(4)] + [(f"h.{n}.b", f"h.{n}.b") for n in (1, 3)]
    assert words(*every) == ["h.{i}.a = h.{i}.a", "h.{i}.b = h.{i}.b"]  # the layers are all there


def test_a_pattern_that_would_read_another_rules_names_is_not_written() -> None:
    pairs = [("h.0.w", "a.0.w"), ("h.1.w", "a.1.w"), ("h.2.w", "b.w")]
    assert words(*pairs) == ["h.0.w = a.0.w", "h.1.w = a.1.w", "h.2.w = b.w"]
    assert words(("a.0", "x.0"), ("a.1", "x.1"), ("b.2", "x.2")) == ["a.0 = x.0", "a.1 = x.1", "b.2 = x.2"]


def test_an_index_that_one_side_lacks_is_none() -> None:
    assert words(("h.0.w", "q"), ("h.1.w", "q2")) == ["h.0.w = q", "h.1.w = q2"]


def test_names_are_counted_upwards_only() -> None:
    counted = Spelling.counted(["e.4.w", "e.5.w", "e.6.w"])
    assert counted is not None
    assert (counted.count, counted.length, counted.numbers) == (0, 3, (4,))
    for names in (["e.0.w", "e.2.w"], ["e.1.w", "e.0.w"], ["a.0.w", "b.1.w"], ["a.0.b.0", "a.1.b.1"]):
        assert Spelling.counted(names) is None
    first = Wording((Spelling(("e.", ".w"), (0,), 0, 4),), (Spelling.of("text"),), (" [a]", " [x a]"))
    second = Wording((Spelling(("e.", ".w"), (4,), 0, 4),), (Spelling.of("vision"),), (" [a]", " [x a]"))
    assert [one for (one,), _ in rules([first, second])] == ["e.{x:0..3}.w [a]", "e.{x+4:4..7}.w [a]"]

"""Rules: which piece belongs to which, and what a rule knows of its indices."""

from __future__ import annotations

import pytest

from porting.errors import Code
from porting.notation.faults import NotationError
from porting.notation.rule import Pair, Rule, Term, make_rule


def rule(sources: str, targets: str, *, fold: bool = False) -> Rule:
    left = [Term.parse(text, rows=fold) for text in sources.split(" + ")]
    return make_rule(left, [Term.parse(text) for text in targets.split(" + ")], fold=fold)


@pytest.mark.parametrize(
    "text", ["a", "a.{i}.w", "a [x y]", "a.{p:q,k} [(h d) e]", "a.{i} -> 1", "a -> probabilities [b h q k]", "a []"]
)
def test_a_term_is_written_as_it_was_read(text: str) -> None:
    assert str(Term.parse(text)) == text
    assert str(Term.parse(f"  {text}  ")) == text


def test_an_output_is_a_part_of_the_name_under_which_an_activation_is_listed() -> None:
    term = Term.parse("layer.{i} -> 1 [b s]")
    assert (str(term.name), term.output) == ("layer.{i}", "1")
    assert term.key.read("layer.3 -> 1") == {"i": 3}
    assert term.key.read("layer.3") is None


def test_a_fault_is_placed_in_the_whole_term() -> None:
    with pytest.raises(NotationError) as caught:
        Term.parse("   a.{i+} [x]")
    assert caught.value.offset == 5
    with pytest.raises(NotationError) as caught:
        Term.parse("a.{i} [x (y]")
    assert caught.value.offset == 9


@pytest.mark.parametrize(
    ("sources", "targets", "pairs"),
    [
        ("a [x y]", "b [y x]", [(0, 0, 0, 0)]),
        ("a", "b", [(0, 0, 0, 0)]),
        ("q [x] + k [y]", "qk [(x|y)]", [(0, 0, 0, 0), (1, 0, 0, 1)]),
        ("q [x] + k [y]", "kq [(y|x)]", [(0, 0, 0, 1), (1, 0, 0, 0)]),
        ("q [(g m d)] + k [(g d)] + v [(g d)]", "qkv [(g (m|1|1) d)]", [(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 0, 2)]),
        ("qkv [(g (m|1|1) d)]", "q [(g m d)] + k [(g d)] + v [(g d)]", [(0, 0, 0, 0), (0, 1, 1, 0), (0, 2, 2, 0)]),
        ("p [(_2|t|_1)]", "p [t]", [(0, 1, 0, 0)]),
        ("a [(x|y)]", "b [(y|x)]", [(0, 0, 0, 1), (0, 1, 0, 0)]),
    ],
)
def test_pieces_over_the_same_indices_belong_together(
    sources: str, targets: str, pairs: list[tuple[int, int, int, int]]
) -> None:
    assert rule(sources, targets).pairs == tuple(Pair(*pair) for pair in pairs)


def test_the_inverse_pairs_the_same_pieces() -> None:
    there = rule("q [(g m d)] + k [(g d)]", "qk [(g (m|1) d)]")
    back = rule("qk [(g (m|1) d)]", "q [(g m d)] + k [(g d)]")
    assert {(p.source, p.source_piece, p.target, p.target_piece) for p in there.pairs} == {
        (p.target, p.target_piece, p.source, p.source_piece) for p in back.pairs
    }


@pytest.mark.parametrize(
    ("sources", "targets", "outer"),
    [
        ("a.{i}.{j}", "b.{j}.{i}", ("j", "i")),
        ("a.{i}.{p:q,k} [x]", "b.{i} [(p x)]", ("i",)),
        ("a.{i} [(h x)]", "b.{h}.{i} [x]", ("i",)),
        ("a.{i} [x] + b.{i} [y]", "c.{i} [(x|y)]", ("i",)),
        ("a.{*rest}", "b.{*rest}", ("rest",)),
    ],
)
def test_the_outer_indices_are_those_of_every_name(sources: str, targets: str, outer: tuple[str, ...]) -> None:
    assert rule(sources, targets).outer == outer


def test_a_fold_is_applied_for_each_index_of_its_first_term() -> None:
    assert rule("a.{i} [x] + shared [x]", "b.{i} [x]", fold=True).outer == ("i",)


def test_an_index_that_is_only_a_part_of_axes_is_deduced() -> None:
    assert rule("a.{p:q,k} [(h d) e]", "b [(h p d) e]").deduced == {"h", "d"}
    assert rule("a [(h d)]", "b.{h} [d]").deduced == frozenset()
    assert rule("a [(_2|t)]", "b [t]").deduced == frozenset()


def test_the_sizes_of_enumerations_are_known() -> None:
    assert rule("a.{p:q,k/kk}.{w:weight,bias}", "b.{p:x,y}.{w:weight,bias}").enumerations == {"p": 2, "w": 2}


@pytest.mark.parametrize(
    ("sources", "targets", "code"),
    [
        ("a.{i}", "b", Code.INDEX_ONE_SIDE),
        ("a [x]", "b [x y]", Code.INDEX_ONE_SIDE),
        ("a [x] + b [x]", "c [x]", Code.INDEX_ONE_SIDE),
        ("a [x]", "b [x] + c [x]", Code.INDEX_ONE_SIDE),
        ("a.{i} [x] + b [y]", "c.{i} [(x|y)]", Code.INDEX_ONE_SIDE),
        ("a.{*rest}", "b", Code.INDEX_ONE_SIDE),
        ("a.{*rest}", "b.{rest}", Code.INDEX_ONE_SIDE),
        ("a.{*rest} + c.{rest}", "b.{*rest}", Code.INDEX_ONE_SIDE),
        ("a [x]", "b", Code.AXES_ONE_SIDE),
        ("a.{p:q,k}", "b.{p:q,k,v}", Code.SIZE_CONFLICT),
    ],
)
def test_the_law_is_kept(sources: str, targets: str, code: Code) -> None:
    with pytest.raises(NotationError) as caught:
        rule(sources, targets)
    assert caught.value.code is code


def test_a_row_is_for_folds_only() -> None:
    with pytest.raises(NotationError, match="a row can be taken in a fold only"):
        make_rule([Term.parse("a [0 e]", rows=True)], [Term.parse("b [e]")])

"""Names as evidence: which words of a name mean the same, and patterns that several names share.

Names decide nothing that can be proven; they say what to try first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import permutations

from porting.notation.name import may_list
from porting.suggesting.subjects.config_fields import SYNONYMS

_WORDS = {word: meaning for meaning, words in SYNONYMS["tensors"].items() for word in words.split()}


@lru_cache(maxsize=4096)
def meanings(name: str) -> frozenset[str]:
    """The words of a name, each by what it means; numbers left out.

    >>> sorted(meanings("h.0.attn.q_lin.weight"))
    ['attention', 'h', 'query', 'weight']
    """
    spread = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    found = set()
    for part in spread.lower().split("."):
        whole = part.replace("_", "")
        if whole in _WORDS:
            found.add(_WORDS[whole])
            continue
        for word in re.split(r"[_\W]+", part):
            bare = word.rstrip("0123456789")
            if word in _WORDS or bare:
                found.add(_WORDS.get(word, _WORDS.get(bare, bare)))
    return frozenset(found - {"module", "layer", "layers", "block", "blocks", "model", ""})


def similarity(one: str, other: str) -> float:
    """How much two names have in common, from 0 to 1."""
    ours, theirs = meanings(one), meanings(other)
    return len(ours & theirs) / (len(ours | theirs) or 1)


def namesakes(ours: Mapping[str, tuple[int, ...]], theirs: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, str]]:
    """The tensor of another model that is called like each of a model's, as far as shapes allow.

    A name that is the other one with something in front comes first; then names that are alike, all layers at once.
    Where several groups of layers have the same shapes, as two matrices of each expert have, the next ways exchange
    them.

    Args:
        ours, theirs: name -> shape.

    Yields:
        A name of ``ours`` -> one of ``theirs``; each of these once.

    >>> shapes = {"layers.0.query.weight": (2, 2), "layers.1.query.weight": (2, 2), "head.weight": (3, 2)}
    >>> next(namesakes({"net.layers.1.query.weight": (2, 2), "net.classifier.weight": (3, 2)}, shapes))
    {'net.layers.1.query.weight': 'layers.1.query.weight', 'net.classifier.weight': 'head.weight'}
    """
    found: dict[str, str] = {}
    for name, shape in ours.items():
        ends = [one for one in theirs if f".{name}".endswith(f".{one}") or f".{one}".endswith(f".{name}")]
        same = [one for one in ends if theirs[one] == shape and one not in found.values()]
        if same:
            found[name] = max(same, key=len)
    left = _grouped(name for name in ours if name not in found)
    free = _grouped(name for name in theirs if name not in found.values())
    pairs = ((mine, other) for mine in left for other in free if _as_many(left[mine], free[other], ours, theirs))
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for mine, other in sorted(pairs, key=lambda two: -similarity(*two)):
        if mine in left and other in free and similarity(mine, other) > 0:
            groups[mine] = left.pop(mine), free.pop(other)
    alike: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for mine, (some, _) in groups.items():
        alike.setdefault(tuple(ours[name] for name in some), []).append(mine)
    for turned in _exchanged(list(alike.values())):
        swapped = {
            mine: groups[other][1]
            for some, order in zip(alike.values(), turned, strict=True)
            for mine, other in zip(some, order, strict=True)
        }
        both = found | {a: b for mine, others in swapped.items() for a, b in zip(groups[mine][0], others, strict=True)}
        yield {name: both[name] for name in ours if name in both}


def _exchanged(groups: Sequence[Sequence[str]]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """All orders of each group's names, one at a time: `product` would first hold n! orders of a group of n."""
    if not groups:
        yield ()
        return
    for orders in _exchanged(groups[:-1]):
        for order in permutations(groups[-1]):
            yield (*orders, order)


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by their pattern over all layers, in the order of the layers."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda one: [int(number) for number in re.findall(r"\d+", one)]):
        found.setdefault(numbered(name), []).append(name)
    return found


def _as_many(
    some: Sequence[str],
    others: Sequence[str],
    ours: Mapping[str, tuple[int, ...]],
    theirs: Mapping[str, tuple[int, ...]],
) -> bool:
    return [ours[name] for name in some] == [theirs[name] for name in others]


def pattern(names: Sequence[str], index: str) -> str:
    """One pattern that spells these names in order: ``{p:query,key,value}``, or ``{p}`` where they are counted from 0.

    Args:
        names: as patterns spell them; they may have placeholders, of which none is a part of what differs.

    Returns:
        The pattern; nothing where what differs has characters that a list of words cannot have.

    >>> pattern(["0/in/w", "0/in/b"], "w"), pattern(["a,b", "a,b,c"], "w")
    ('0/in/{w:w,b}', '')

    >>> pattern(["a.q_lin.w", "a.k_lin.w"], "p"), pattern(["l.0", "l.1", "l.2"], "p")
    ('a.{p:q,k}_lin.w', 'l.{p}')
    """
    before, middles, after = parted([words(name) for name in names])
    if middles == [str(number) for number in range(len(names))] and not before[-1:].isdigit():
        return f"{before}{{{index}}}{after}"
    if not all(middles):  # one name has a part more than another: spell out what is common
        cut = before.rfind(".") + 1
        before, middles = before[:cut], [before[cut:] + one for one in middles]
    if not all(map(may_list, middles)):
        return ""
    return f"{before}{{{index}:{','.join(middles)}}}{after}"


def words(name: str) -> list[str]:
    """A pattern's placeholders, and the words and the single characters between words of the rest.

    >>> words("0/in_b.{h}")
    ['0', '/', 'in', '_', 'b', '.', '{h}']
    """
    return re.findall(r"\{[^{}]*\}|[^\W_]+|[\W_]", name)


def parted(names: Sequence[Sequence[str]]) -> tuple[str, list[str], str]:
    """The common beginning of names that are cut into words, the part of each that differs, and the common end.

    >>> parted([["a", ".", "q", ".", "w"], ["a", ".", "k", ".", "w"]])
    ('a.', ['q', 'k'], '.w')
    """
    first = names[0]
    start = 0
    while all(start < len(one) and one[start] == first[start] for one in names):
        start += 1
    stop = 0
    while all(len(one) - stop > start and one[-1 - stop] == first[-1 - stop] for one in names):
        stop += 1
    own = ["".join(one[start : len(one) - stop]) for one in names]
    return "".join(first[:start]), own, "".join(first[len(first) - stop :])


def blank(text: str) -> str:
    """A name, or a rule, with a mark for each number: what is the same in every layer.

    >>> blank("layers.9.norm1") == blank("layers.10.norm2")
    True
    """
    return re.sub("[0-9]+", "#", text)


def numbered(name: str) -> str:
    """A name of which each number that is a part of its own is an index.

    >>> numbered("layers.0.heads.11.ln_1.weight")
    'layers.{i}.heads.{j}.ln_1.weight'
    """
    letters = iter("ijkl")
    return re.sub(r"(?<=\.)\d+(?=[. ]|$)", lambda one: f"{{{next(letters, one.group())}}}", name)

"""The [probes] of a table: which modules' outputs, scores and probabilities can be compared."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from porting.notation.name import spelled
from porting.suggesting.draft.layer_patterns import indexed, joined, name_pattern
from porting.suggesting.search.feature_permutation import FeatureOrder
from porting.suggesting.search.layouts import CandidateRule, first_columns
from porting.suggesting.search.name_similarity import blank, pattern, similarity
from porting.suggesting.search.search_result import SearchResult
from porting.suggesting.subjects.traced_model import TracedModel
from porting.tracing.float64 import forced_float64
from porting.tracing.trace import ARROW, INNER, ROOT, trace

Axes = tuple[str, str]
"""The reference's and the port's, as a table writes them."""

Lines = Sequence[tuple[str, str]]
"""Lines of [probes]: the reference's point and the port's."""

Outputs = Mapping[str, Tensor]
"""Path of a module -> its output."""

NEAR, LOOSE = 1e-9, 0.05
"""The tolerances for the same activation and for one that is computed a little differently, relative to its scale."""


def probes(
    port: Outputs,
    reference: Outputs,
    moves: Sequence[CandidateRule],
    *,
    loose: bool = False,
    whole: bool = False,
    basis: FeatureOrder | None = None,
) -> list[tuple[str, str]]:
    """The lines of [probes].

    A module that has all of the reference's weights is the whole model: what it returns is compared with what the
    reference returns, and not with an activation before that, such as logits that are not scaled yet.

    Args:
        port, reference: path of a module -> its output, of runs with the same weights on the same inputs.
        moves: what was found; fused projections are compared through their biases' axes.
        loose: also pair what differs a little, so that a proof says by how much.
        whole: the module has all of the reference's weights.
        basis: the order in which the port has the residual stream's features.
    """
    equal = _pairs(port, reference, NEAR, basis)
    if loose:  # what has a counterpart is not compared with what differs a little from it
        known = {one for theirs, ours, _ in equal for one in (("reference", theirs), ("port", ours))}
        equal += [
            one
            for one in _pairs(port, reference, LOOSE, basis)
            if known.isdisjoint({("reference", one[0]), ("port", one[1])})
        ]
    ends = [side.get("") for side in (reference, port)]
    if whole and ends[0] is not None and ends[1] is not None and ends[0].shape == ends[1].shape:
        equal = [one for one in equal if ROOT not in one[:2]] + [(ROOT, ROOT, ("", ""))]
    shapes = Counter(_kind(theirs, ours) for theirs, ours, _ in equal)
    equal.sort(
        key=lambda one: (
            -shapes[_kind(one[0], one[1])],
            one[0].count(".") + one[1].count("."),
            -similarity(one[0], one[1]),
        )
    )
    order = {path or ROOT: number for number, path in enumerate(reference)}
    taken: set[str] = set()
    given: set[str] = set()
    chosen: list[tuple[str, str, Axes]] = []
    for theirs, ours, axes in equal:
        if theirs in taken or ours in given or _again(theirs, ours, chosen, reference, port):
            continue
        taken.add(theirs)
        given.add(ours)
        chosen.append((theirs, ours, axes))
    roots = [one for one in equal if one[1] == ROOT]
    if roots and ROOT not in given:
        best = max(roots, key=lambda one: order[one[0]])
        chosen = [one for one in chosen if one[0] != best[0]]
        chosen.append(best)
    split = [move for move in moves if basis is None or move.sources[0].axes != f"({basis.theirs})"]
    fused = _fused(split, port, reference)
    read, compared = _named_by([theirs for theirs, _ in fused]), _named_by([ours for _, ours in fused])
    chosen = [one for one in chosen if not (read(one[0]) or compared(one[1]))]
    chosen.sort(key=lambda one: order[one[0]])
    lines = []
    for axes in dict.fromkeys(one[2] for one in chosen):
        left, right = (f" [{text}]" if text else "" for text in axes)
        alike = indexed([(theirs, ours) for theirs, ours, some in chosen if some == axes])
        lines += [(f"{a}{left}", f"{b}{right}") for a, b in alike]
    return _told_apart([*fused, *lines])


def _told_apart(lines: Lines) -> list[tuple[str, str]]:
    """The lines without those of a part that stands in one list with the layers, whose pattern is its name as well.

    >>> _told_apart([("layers.{i}", "{i+1}"), ("norm", "3"), (".", ".")])
    [('layers.{i}', '{i+1}'), ('.', '.')]
    """
    patterns = [(path, "") for _, ours in lines if "{" in (path := ours.partition(" ")[0])]
    return [line for line in lines if "{" in line[1] or not _named(line[1].partition(" ")[0], patterns)]


def _pairs(
    port: Outputs, reference: Outputs, tolerance: float, basis: FeatureOrder | None
) -> list[tuple[str, str, Axes]]:
    """Each module of the reference with each of the port's that gives the same, and how their axes stand."""
    found: list[tuple[str, str, Axes]] = []
    sums = {name: (one.numel(), _mean(one)) for name, one in port.items()}
    for theirs, value in reference.items():
        mean, far = _mean(value), tolerance * (float(value.abs().max()) if value.numel() else 0.0)
        for ours, other in port.items():
            if sums[ours][0] == value.numel() and abs(sums[ours][1] - mean) > far:
                continue  # no order of the axes changes the mean, and it differs by no more than a number does
            axes = _equal(value, other, tolerance, basis)
            if axes is None and not ours and value.ndim == 3 and other.shape[-1:] > value.shape[-1:]:
                inside = _equal(value, first_columns(other, value), tolerance)
                axes = None if inside != ("", "") else ("b t e", "b t (e|_rest)")
            if axes is not None:
                found.append((theirs or ROOT, ours or ROOT, axes))
    return found


def _mean(one: Tensor) -> float:
    return float(one.mean()) if one.numel() and one.is_floating_point() else 0.0


def first_difference(found: SearchResult, port: Outputs, lines: Lines) -> list[tuple[str, str]]:
    """The line for the module at which the first difference shows, if there is none yet: its cause is looked for there.

    Args:
        port: path of a module -> its output.
    """
    first = next((one for one in found.divergences if one.ends and one.reference), None)
    if first is None:
        return []
    theirs, ours = (name.rpartition(".")[0] for name in (first.reference, first.port))
    known = any(name_pattern(one.partition(" ")[0]).fullmatch(ours) for _, one in lines) or _named(theirs, lines)
    value, other = found.reference.modules.get(theirs), port.get(ours)
    alike = value is not None and other is not None and value.shape == other.shape
    return [(theirs, ours)] if alike and theirs and ours and not known else []


def returned_probes(port: Outputs, reference: Outputs, modules: Outputs, lines: Lines) -> list[tuple[str, str]]:
    """The lines of [probes] for a model that returns several tensors, such as a list of every layer's output.

    Args:
        port, reference: what the two return, by name or number.
        modules: path of a module of the reference -> its output.
        lines: those for modules: what is compared there is compared once.
    """
    known = {f"{ROOT} -> {name}": one for name, one in reference.items()}
    known |= {path: one for path, one in modules.items() if path and not _named(path, lines)}
    order = {path: number for number, path in enumerate(known)}
    fits = {
        name: {path: axes for path, one in known.items() if (axes := _equal(one, value, NEAR)) is not None}
        for name, value in port.items()
    }
    often = Counter(blank(path) for some in fits.values() for path in some)  # how many layers have such a path
    found: list[tuple[str, str]] = []
    taken: set[str] = set()
    for name, some in fits.items():
        free = [path for path in some if path not in taken]
        if free:
            path = max(free, key=lambda one: _rank(one, often[blank(one)], order[one]))
            left, right = (f" [{text}]" if text else "" for text in some[path])
            found.append((f"{path}{left}", f"{ROOT} -> {name}{right}"))
            taken.add(path)
    return found


def _rank(path: str, often: int, order: int) -> tuple[bool, bool, int, int]:
    """How well a point suits an output that it equals: one of a list of every layer's output is a layer's.

    The last layer's may be what the reference returns as well, and of a deeper checkpoint it is another layer's.
    """
    return often > 1, path.startswith(ROOT), often, order


def _named(path: str, lines: Lines) -> bool:
    """Whether a line speaks of a module of the reference."""
    return _named_by([theirs for theirs, _ in lines])(path)


def _named_by(points: Sequence[str]) -> Callable[[str], bool]:
    """Whether one of these points, which may be patterns with axes, is that of a module."""
    patterns = [name_pattern(one.partition(" ")[0]) for one in points]
    return lambda path: any(one.fullmatch(path) for one in patterns)


def prefixed(lines: Lines, prefix: str, modules: Outputs) -> list[tuple[str, str]]:
    """The lines with the trunk's prefix, where the reference is the trunk alone and has no module of that name.

    Args:
        lines: of [probes].
        prefix: the table's: names are matched with and without it.
        modules: path of a module of the reference -> its output.

    >>> prefixed([("encoder.layer.{i}", "blocks.{i}"), (".", "head")], "bert.", {})
    [('bert.encoder.layer.{i}', 'blocks.{i}'), ('.', 'head')]
    """
    if any(path.startswith(prefix) for path in modules):
        return [*lines]
    return [(theirs if theirs.partition(" ")[0] == ROOT else prefix + theirs, ours) for theirs, ours in lines]


def at_depth(lines: Lines, twins: int, depth: int) -> list[tuple[str, str]]:
    """The lines for a checkpoint of another depth: what a module returns may be what the last layer gives.

    Args:
        lines: of [probes], for the twin.
        twins: how many layers the twin has.
        depth: how many the checkpoint has.

    >>> at_depth([("h.{i}", "blocks.{i}"), ("h.1 [b t e]", ". [t b e]")], 2, 12)
    [('h.{i}', 'blocks.{i}'), ('h.11 [b t e]', '. [t b e]')]
    >>> at_depth([("h.0", ". -> 1"), ("h.1", ". -> 2")], 2, 3)
    [('h.0', '. -> 1'), ('h.1', '. -> 2'), ('h.2', '. -> 3')]
    >>> at_depth([("h.0", ". -> 0.1"), ("h.1", ". -> 0.2")], 2, 3)
    [('h.0', '. -> 0.1'), ('h.1', '. -> 0.2'), ('h.2', '. -> 0.3')]
    >>> at_depth([("h.1", "blocks")], 2, 12)
    [('h.11', 'blocks')]
    """
    stretched = _stretched(lines, twins, depth)
    last = re.compile(rf"(?<=\.){twins - 1}(?=\.|\s|$)")
    return [
        (theirs if every or _of_a_layer(ours) else last.sub(str(depth - 1), theirs), ours)
        for theirs, ours, every in stretched
    ]


def _of_a_layer(ours: str) -> bool:
    """Whether a point of the module is of one layer or of each, and not the module's or a whole stack's output."""
    path = ours.partition(" ")[0]
    return path != ROOT and re.search(r"\d|\{", path) is not None


_LAYER = re.compile(r"(?<=\.)\d+(?=\.|\s|$)")
_OUTPUT = re.compile(r"^(\. -> (?:\S*\.)?)(\d+)(?=\s|$)")


def _stretched(lines: Lines, twins: int, depth: int) -> list[tuple[str, str, bool]]:
    """The lines, those for a list of every layer's output for as many layers as there are, and which these are."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    keys = []
    for theirs, ours in lines:
        layers, output = _LAYER.findall(theirs), _OUTPUT.search(ours)
        key = None
        if len(layers) == 1 and output is not None:
            key = _LAYER.sub("#", theirs), _OUTPUT.sub(r"\1#", ours), int(output[2]) - int(layers[0])
            groups.setdefault(key, []).append(int(layers[0]))
        keys.append(key)
    whole = {key for key, layers in groups.items() if twins > 1 and sorted(layers) == list(range(twins))}
    found: list[tuple[str, str, bool]] = []
    for line, key in zip(lines, keys, strict=True):
        if key is None or key not in whole:
            found.append((*line, False))
            continue
        theirs, ours, offset = key
        made = ((theirs.replace("#", str(n)), ours.replace("#", str(n + offset)), True) for n in range(depth))
        found += [one for one in made if one not in found]
    return found


def _kind(theirs: str, ours: str) -> tuple[str, str]:
    return blank(indexed([(theirs, ours)])[0][0]), blank(ours)


def _again(theirs: str, ours: str, chosen: Sequence[tuple[str, str, Axes]], reference: Outputs, port: Outputs) -> bool:
    """Whether the same activation is compared already."""
    value, other = reference.get("" if theirs == ROOT else theirs), port.get("" if ours == ROOT else ours)
    for one, another, _ in chosen:
        known = reference.get("" if one == ROOT else one)
        also = port.get("" if another == ROOT else another)
        same = known is not None and value is not None and _equal(known, value, 0.0) is not None
        if same and also is not None and other is not None and _equal(also, other, 0.0) is not None:
            return True
    return False


def _equal(one: Tensor, other: Tensor, bound: float, basis: FeatureOrder | None = None) -> Axes | None:
    """The axes under which two are equal, empty where they are as they are; None when they are not."""
    if one.shape == other.shape and _close(one, other, bound):
        return "", ""
    if one.ndim == 3 and other.ndim == 2 and one.numel() == other.numel():  # words one after the other
        flat = one.flatten(0, 1)
        return ("b t e", "(b t) e") if flat.shape == other.shape and _close(flat, other, bound) else None
    return _turned(one, other, bound, basis) if one.ndim == other.ndim == 3 else None


def _turned(one: Tensor, other: Tensor, bound: float, basis: FeatureOrder | None) -> Axes | None:
    """The same for two of three axes: in another order, as sequence or features first, or of the features."""
    for order in permutations(range(3)):
        value = one.permute(order)
        if value.shape == other.shape and _close(value, other, bound):
            return "b t e", " ".join("bte"[place] for place in order)  # s is the two halves of a head
    first = one.transpose(0, 1)
    if basis is None or not basis.theirs or one.shape[-1] % 2:
        return None
    for value, batch in ((one, "b t"), (first, "t b")):
        if value.shape == other.shape and _close(basis.turned(value), other, bound):
            return f"b t ({basis.theirs})", f"{batch} ({basis.ours})"
    return None


def _close(one: Tensor, other: Tensor, bound: float) -> bool:
    scale = float(one.abs().max()) if one.numel() else 0.0
    far = float((one - other).abs().max()) if one.numel() else 0.0
    return far <= bound * (scale or 1.0)


def _fused(moves: Sequence[CandidateRule], port: Outputs, reference: Outputs) -> list[tuple[str, str]]:
    """Projections that are fused or cut up on one side: what comes out of them has their biases' axes."""
    found = []
    for move in moves:
        source, target = move.sources[0], move.targets[0]
        if len(move.sources) != 1 or len(move.targets) != 1 or not source.axes or " e" in f" {source.axes}":
            continue
        theirs, ours = ([name.rpartition(".")[0] for name in one.names] for one in (source, target))
        known = all(path in reference for path in theirs) and all(path in port for path in ours)
        ends = source.pattern.endswith(".bias") and target.pattern.endswith(".bias")
        if not known or not ends or any(port[path].ndim != 3 for path in ours):
            continue
        first = reference[theirs[0]]
        sizes = [sum(some[path].numel() for path in paths) for some, paths in ((reference, theirs), (port, ours))]
        if first.ndim != 3 or sizes[0] != sizes[1]:
            continue
        batch = "b t" if port[ours[0]].shape[:2] == first.shape[:2] else "t b"  # s is a half of a head
        left = f"{source.pattern.removesuffix('.bias')} [b t {source.axes}]"
        right = f"{target.pattern.removesuffix('.bias')} [{batch} {target.axes}]"
        found.append((left, right))
    return [(left, right) for left, right in indexed(found)]


AXES = "b h q k"

Attention = Mapping[str, Outputs]
"""``"scores"`` or ``"probabilities"`` -> path of the innermost module -> what its first softmax is given, or gives."""


def attention(side: TracedModel) -> Attention:
    """The scores and probabilities of one run."""
    found: dict[str, dict[str, Tensor]] = {kind: {} for kind in INNER}
    wanted = [f"{path or ROOT}{ARROW}{kind}" for path, _ in side.module.named_modules() for kind in INNER]

    def visit(point: str, value: Tensor) -> None:
        path, _, kind = point.partition(ARROW)
        if kind in found:  # the first call of a module; others have a number
            found[kind][path] = value.detach().clone()

    with torch.no_grad(), forced_float64(side.module):
        trace(side.module, side.call, wanted, visit)
    return found


def attention_probes(port: Attention, reference: Attention, bound: float) -> list[tuple[str, str]]:
    """The lines of [probes] for attention, scores and probabilities of a layer beside each other.

    Args:
        port, reference: of runs with the same weights on the same inputs.
        bound: how far two may be apart, relative to the larger's scale.
    """
    found: list[tuple[str, str]] = []
    for kind in INNER:
        pairs = []
        free = dict(port[kind])
        for theirs, value in reference[kind].items():
            match = next(_matches(value, free, bound), None)
            if match is None:
                continue
            names, left, right = match
            for name in names:
                del free[name]
            names = [spelled(name) for name in names]
            ours = names[0] if len(names) == 1 else pattern(names, "h")
            if not ours or (len(names) > 1 and "{h" not in ours):
                continue
            left, right = (f" [{axes}]" if axes else "" for axes in (left, right))
            pairs.append((f"{theirs}{ARROW}{kind}{left}", f"{ours}{ARROW}{kind}{right}"))
        found += [(a, b) for a, b in indexed(pairs)]
    return found


def _matches(value: Tensor, port: Outputs, bound: float) -> Iterator[tuple[Sequence[str], str, str]]:
    """The port's activations equal to this one: their names, and the axes of both sides where these differ."""
    if value.ndim != len(AXES.split()):
        return
    letters = AXES.split()
    layouts: list[tuple[Tensor, str, str]] = [(value, "", "")]
    layouts += [
        (value.permute(order), AXES, " ".join(letters[place] for place in order))
        for order in list(permutations(range(4)))[1:]
    ]
    layouts.append((value.flatten(0, 1), AXES, "(b h) q k"))
    layouts.append((value.transpose(0, 1).flatten(0, 1), AXES, "(h b) q k"))
    if value.shape[1] == 1:
        layouts.append((value[:, 0], "b 1 q k", "b q k"))
    for laid, left, right in layouts:
        for name, other in port.items():
            if _same_within(laid, other, bound):
                yield (name,), left, right
    heads = [
        next((name for name, other in port.items() if _same_within(one, other, bound)), "") for one in value.unbind(1)
    ]
    if len(heads) > 1 and all(heads) and len(set(heads)) == len(heads):
        yield heads, AXES, "b q k"


def _same_within(one: Tensor, other: Tensor, bound: float) -> bool:
    return one.shape == other.shape and one.numel() > 0 and _close(one, other, bound)


def ordered(lines: Lines, modules: Outputs) -> list[tuple[str, str]]:
    """The lines of [probes] in the order in which the reference's modules end, with attention in front of its own.

    Args:
        lines: of [probes].
        modules: path of a module of the reference -> its output, in order.
    """
    places = {path or ROOT: float(number) for number, path in enumerate(modules)}

    def place(line: tuple[str, str]) -> float:
        path, inner, _ = line[0].partition(" [")[0].partition(ARROW)
        path = _first(path)
        return places.get(path, float(len(places))) - (0.5 if inner else 0.0)

    return sorted(joined(lines), key=place)


def _first(path: str) -> str:
    """The path of the first layer, and of the first spelling."""
    found = ""
    while "{" in path:
        before, _, rest = path.partition("{")
        inside, _, path = rest.partition("}")
        name, _, spellings = inside.partition(":")
        number = spellings.partition(",")[0].partition("/")[0] if spellings else _zeroth(name)
        found += before + number
    return found + path


def _zeroth(expression: str) -> str:
    """The value of ``i``, ``i+1`` or ``2*i+1`` in the first layer."""
    return expression.rpartition("+")[2] if "+" in expression else "0"

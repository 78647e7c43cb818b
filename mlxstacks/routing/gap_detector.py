"""Whether a prompt is like none that the router was trained on.

A router's sigmoids are sure of themselves far from their training prompts, so low scores find few
of them. Other tests are tried, each a number that is larger the stranger a prompt is:

    energy           -sum_d log(1 + exp(logit_d)) of the router's logits (Wang et al. 2021, the
                     joint energy of a network with several labels)
    mahalanobis      squared distance to the nearest domain's mean prompt (Lee et al. 2018)
    nearest prompt   -cosine to the nearest training prompt (Sun et al. 2022, with k = 1)
    tokens           min_k mean_t -log((c_kt + 0.5) / sum_u (c_ku + 0.5)) over the prompt's distinct
                     tokens t; c_kt: how often domain k's training prompts have t. All tokens that
                     none of them has are one (Krichevsky & Trofimov 1981 add the 0.5)

Mahalanobis and the nearest prompt compare mean residuals behind one decoder layer, whitened by the
covariance inside domains, which is shrunk towards a multiple of the identity as far as its sample
is noise (Ledoit & Wolf 2004). A mean of several tests, each in deviations of known prompts, is a
candidate too.

Which one a router gets is found without any unseen domain: each of its domains is left out in turn,
a candidate fitted on the others, and what it finds of the one that was left out counts. The mean of
all three kinds is taken where no other is clearly better. Its
threshold is one that a known prompt exceeds with a probability of at most 5%: the order statistic
of held-out prompts by which a split conformal test rejects. (For several tests that is nearly so:
what each is divided by comes from the same prompts.)

Letters: N prompts, L layers, D width of the base, q directions, r references, S tokens.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from mlxstacks.files.router_file import GapPart, GapRule, GapTest, RouterFile, gap_shapes
from mlxstacks.files.strict_json import JsonObject
from mlxstacks.routing.router_metrics import rate_json

FALSE_ALARMS = 0.05
# The order statistic above needs so many held-out prompts.
LEAST_HELD_OUT = math.ceil(1 / FALSE_ALARMS) - 1
MOST_REFERENCES, MOST_DIRECTIONS = 2000, 256
_ADDED = 0.5

T = TypeVar("T")
Label = tuple[str, ...]
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class GapRows:
    """Prompts to fit on. means (N, L, D) behind `layers`; tokens: N x S ids; logits (N, n) of the
    router for `domains`; labels: of which domains each prompt is; held_out (N,) bool: from its
    training.
    """

    means: np.ndarray
    layers: tuple[int, ...]
    tokens: Prompts
    logits: np.ndarray
    domains: tuple[str, ...]
    labels: Sequence[Label]
    held_out: np.ndarray
    _spaces: dict[int, "_Space"] = field(default_factory=dict, init=False, repr=False)

    def space(self, layer: int) -> "_Space":
        """What training prompts say of a layer; worked out once."""
        if layer not in self._spaces:
            means = self.means[~self.held_out, self.layers.index(layer)]
            self._spaces[layer] = _space(means, _kept(self.labels, ~self.held_out))
        return self._spaces[layer]

    @cached_property
    def frequencies(self) -> dict[str, np.ndarray]:
        """directions (q,): the ids that training prompts have, rising. references (r, q + 1):
        log-probabilities of them, and of any other, in each class.
        """
        prompts, labels = _kept(self.tokens, ~self.held_out), _kept(self.labels, ~self.held_out)
        ids, places = np.unique(np.concatenate(prompts), return_inverse=True)
        classes = {label: number for number, label in enumerate(dict.fromkeys(labels))}
        counts = np.full((len(classes), len(ids) + 1), _ADDED)
        of_class = np.repeat([classes[label] for label in labels], [*map(len, prompts)])
        np.add.at(counts, (of_class, places), 1)
        shares = counts / counts.sum(axis=1, keepdims=True)
        return {"directions": ids, "references": np.log(shares)}


@dataclass(frozen=True, eq=False)
class GapDetector:
    """rule: as in a router's header. tensors: as in its file, NumPy float32."""

    rule: GapRule
    tensors: Mapping[str, np.ndarray]

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers whose means `strangeness` takes, rising."""
        return tuple(sorted({part.layer for part in self.rule.parts if part.layer}))

    def strangeness(self, means: np.ndarray, tokens: Prompts, logits: np.ndarray) -> np.ndarray:
        """means (N, L, D) behind `layers`, tokens N x S ids, logits (N, n) -> (N,); a gap is above
        the threshold.
        """
        total = np.zeros(len(logits))
        for number, part in enumerate(self.rule.parts):
            arrays = {n: self.tensors[n] for n in gap_shapes(number, part, 0)}
            at = means[:, self.layers.index(part.layer)] if part.layer else None
            values = _measured(part.test, number, arrays, at, tokens, logits)
            total += (values - part.mean) / part.deviation
        return np.asarray(total / len(self.rule.parts))

    def is_gap(self, means: np.ndarray, tokens: Prompts, logits: np.ndarray) -> np.ndarray:
        """(N,) bool."""
        return np.asarray(self.strangeness(means, tokens, logits) > self.rule.threshold)


def detector_of(file: RouterFile) -> GapDetector | None:
    """The gap detector of a router's file; None where it has none."""
    if file.header.gaps is None:
        return None
    arrays = {n: np.array(a) for n, a in file.tensors.items() if n.startswith("gap.")}
    return GapDetector(file.header.gaps, arrays)


def candidate_layers(num_layers: int) -> tuple[int, ...]:
    """The first decoder layer and those at each quarter, the last one too."""
    quarters = (round(num_layers * share) for share in (0.25, 0.5, 0.75, 1))
    return tuple(sorted({1, *(max(1, layer) for layer in quarters)}))


def fit_detector(rows: GapRows) -> tuple[GapDetector | None, str]:
    """The candidate that finds most of domains left out, fitted on all prompts; and a note where
    there is none or it could not be chosen.
    """
    if (count := int(rows.held_out.sum())) < LEAST_HELD_OUT:
        return None, (
            f"{count} held-out prompts are too few to test prompts for gaps by "
            f"({LEAST_HELD_OUT} are needed); a gap is where every score is low."
        )
    tests = list(candidates(rows.layers))
    table, note = _left_out(rows, tests), ""
    if table:
        chosen = next(
            parts for parts in tests if spelled(parts) == _best(table, spelled(tests[-1]))
        )
    else:
        chosen = (("nearest prompt", rows.layers[0]),)
        note = "With fewer than two domains no test for gaps could be compared with others."
    detector = fitted(rows, chosen)
    chosen_by: JsonObject = {"test": spelled(chosen), "left_out": dict[str, Any](table)}
    rule = replace(detector.rule, chosen_by=chosen_by)
    return GapDetector(rule, detector.tensors), note


Tests = tuple[tuple[GapTest, int], ...]
"""Tests whose mean is taken, each with its decoder layer, 0 where it has none."""


def candidates(layers: Sequence[int]) -> Iterator[Tests]:
    """The tests that are compared, few before many: each alone, and means of them."""
    nearest: Tests = tuple(("nearest prompt", layer) for layer in layers)
    far: Tests = tuple(("mahalanobis", layer) for layer in layers)
    tokens: Tests = (("tokens", 0),)
    alone = ((test,) for test in (("energy", 0), *tokens, *nearest, *far))
    pairs = ((*tokens, test) for test in far)
    means = (nearest, far, far[-2:], (*tokens, *far[-2:]), (*tokens, *nearest))
    # of all three kinds, behind the layers where single ones find most
    late, middle = far[-2:-1], nearest[len(nearest) // 2 :]
    all_kinds = ((*tokens, *late, *middle[:count]) for count in (1, 2))
    yield from dict.fromkeys([*alone, *pairs, *means, *all_kinds])


def spelled(tests: Tests) -> str:
    """As in `energy, mahalanobis 1+8`: each test with its layers."""
    layers: dict[str, list[str]] = {}
    for test, layer in tests:
        layers.setdefault(test, []).extend([str(layer)] if layer else [])
    return ", ".join(f"{test} {'+'.join(numbers)}".strip() for test, numbers in layers.items())


def _best(table: Mapping[str, Mapping[str, Any]], usual: str) -> str:
    """The candidate that finds most, the first of equals; but the usual one where that is not
    better by more than a standard error over domains (the rule of Breiman et al. 1984).
    """
    rates = {name: np.array([r["rate"] for r in row.values()]) for name, row in table.items()}
    best = max(rates, key=lambda name: float(rates[name].mean()))
    better = rates[best] - rates[usual]
    error = better.std(ddof=1) / math.sqrt(len(better)) if len(better) > 1 else math.inf
    return best if better.mean() > error else usual


def _left_out(rows: GapRows, tests: Sequence[Tests]) -> dict[str, dict[str, Any]]:
    """Candidate -> domain -> the rate at which it is found where the tests never saw it. The router
    did see it, as another domain than the rest, which is to the favour of `energy`.
    """
    table: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(rows.domains):
        alone = np.array([label == (name,) for label in rows.labels])
        known = np.array([name not in label for label in rows.labels])
        others = [d for d in range(len(rows.domains)) if d != place]
        if not alone.any() or not others or int((known & rows.held_out).sum()) < LEAST_HELD_OUT:
            continue
        if not any(label for label, is_known in zip(rows.labels, known, strict=True) if is_known):
            continue
        seen, unseen = some_rows(rows, known, others), some_rows(rows, alone, others)
        for parts in tests:
            detector = fitted(seen, parts)
            at = [rows.layers.index(layer) for layer in detector.layers]
            flags = detector.is_gap(unseen.means[:, at], unseen.tokens, unseen.logits)
            rate = rate_json(int(flags.sum()), len(flags))
            table.setdefault(spelled(parts), {})[name] = rate
    return table


def some_rows(rows: GapRows, chosen: np.ndarray, domains: Sequence[int]) -> GapRows:
    """The prompts where chosen (N,) bool holds, with the logits of these domains."""
    return GapRows(
        rows.means[chosen], rows.layers, _kept(rows.tokens, chosen),
        rows.logits[chosen][:, domains], tuple(rows.domains[d] for d in domains),
        _kept(rows.labels, chosen), rows.held_out[chosen],
    )  # fmt: skip


def _kept(values: Sequence[T], chosen: np.ndarray) -> list[T]:
    return [value for value, keep in zip(values, chosen, strict=True) if keep]


def fitted(rows: GapRows, tests: Tests) -> GapDetector:
    """References and whitening from training prompts, scale and threshold from held-out ones."""
    parts, tensors, held_out = [], dict[str, np.ndarray](), rows.held_out
    prompts = _kept(rows.tokens, held_out)
    for number, (test, layer) in enumerate(tests):
        at = rows.means[held_out, rows.layers.index(layer)] if layer else None
        arrays = {f"gap.{number}.{n}": a for n, a in _compared(rows, test, layer).items()}
        values = _measured(test, number, arrays, at, prompts, rows.logits[held_out])
        references, directions = (
            len(arrays.get(f"gap.{number}.{name}", ())) for name in ("references", "directions")
        )
        deviation = max(float(values.std()), 1e-12)
        parts.append(GapPart(test, layer, references, directions, float(values.mean()), deviation))
        tensors |= arrays
    detector = GapDetector(GapRule(tuple(parts), 0.0), tensors)
    places = [rows.layers.index(layer) for layer in detector.layers]
    means = rows.means[held_out][:, places]
    known = np.sort(detector.strangeness(means, prompts, rows.logits[held_out]))
    place = math.ceil((len(known) + 1) * (1 - FALSE_ALARMS)) - 1
    return replace(detector, rule=replace(detector.rule, threshold=float(known[place])))


def _measured(
    test: GapTest,
    number: int,
    arrays: Mapping[str, np.ndarray],
    means: np.ndarray | None,
    prompts: Prompts,
    logits: np.ndarray,
) -> np.ndarray:
    """(N,) of one test. means (N, D) behind its layer, None where it has none."""
    if test == "tokens":
        ids, shares = (arrays[f"gap.{number}.{n}"] for n in ("directions", "references"))
        return _surprise(prompts, ids, shares)
    if means is None:
        return np.asarray(-np.logaddexp(0.0, logits.astype(np.float64)).sum(axis=1))
    names = ("centre", "directions", "scales", "references")
    centre, directions, scales, references = (arrays[f"gap.{number}.{n}"] for n in names)
    points = _whitened(means, centre, directions, scales)
    if test == "mahalanobis":
        squares = (points**2).sum(axis=1)[:, None] + (references**2).sum(axis=1)
        return np.asarray((squares - 2 * points @ references.T).min(axis=1))
    return np.asarray(-(_unit(points) @ references.T).max(axis=1))


def _surprise(prompts: Prompts, ids: np.ndarray, log_shares: np.ndarray) -> np.ndarray:
    """(N,) of `tokens`. ids (q,) rising; log_shares (r, q + 1), the last of any other id."""
    distinct = [np.unique(prompt) for prompt in prompts]
    counts, found = np.array([*map(len, distinct)]), np.concatenate(distinct)
    places = np.searchsorted(ids, found)
    places = np.where(np.append(ids, np.inf)[places] == found, places, len(ids))
    sums = np.add.reduceat(log_shares[:, places], np.cumsum(counts) - counts, axis=1)
    return np.asarray(-(sums / counts).max(axis=0))


@dataclass(frozen=True, eq=False)
class _Space:
    """Of a layer: centre (D,), directions (q, D), scales (q + 1), and, whitened, the mean prompts
    of classes (c, D) and the training prompts (N, D), at most MOST_REFERENCES of them.
    """

    centre: np.ndarray
    directions: np.ndarray
    scales: np.ndarray
    classes: np.ndarray
    prompts: np.ndarray


def _space(means: np.ndarray, labels: Sequence[Label]) -> _Space:
    """means (N, D) of training prompts and their labels."""
    classes: dict[Label, list[int]] = {}
    for place, label in enumerate(labels):
        classes.setdefault(label, []).append(place)
    of_class = {label: means[at].mean(axis=0) for label, at in classes.items()}
    inside = means - np.stack([of_class[label] for label in labels])
    axes = means.mean(axis=0), *_whitening(inside.astype(np.float64))
    # evenly over the prompts, whose order is by domain
    step = max(1, math.ceil(len(means) / MOST_REFERENCES))
    points = np.stack([*of_class.values()]), means[::step]
    return _Space(*axes, *(_whitened(each, *axes) for each in points))


def _compared(rows: GapRows, test: GapTest, layer: int) -> dict[str, np.ndarray]:
    """The tensors of a part, by the ends of their names."""
    arrays: dict[str, np.ndarray] = rows.frequencies if test == "tokens" else {}
    if layer:
        space = rows.space(layer)
        arrays = {
            "centre": space.centre, "directions": space.directions, "scales": space.scales,
            "references": space.classes if test == "mahalanobis" else _unit(space.prompts),
        }  # fmt: skip
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _whitening(inside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows (N, D), of mean 0 in their class -> directions (q, D) and scales (q + 1): what a part
    along each direction is multiplied by, the last one what is along none.
    """
    n, width = inside.shape
    _, singular, directions = np.linalg.svd(inside, full_matrices=False)
    variances = singular**2 / n
    mean = variances.sum() / width
    distance = (variances**2).sum() - 2 * mean * variances.sum() + width * mean**2
    noise = ((inside**2).sum(axis=1) ** 2).sum() / n**2 - (variances**2).sum() / n
    shrinkage = min(1.0, max(0.0, noise / max(distance, 1e-30)))
    q = min(MOST_DIRECTIONS, len(variances))
    shrunk = (1 - shrinkage) * variances + shrinkage * mean
    outside = max(1, width - q)
    rest = (1 - shrinkage) * variances[q:].sum() / outside + shrinkage * mean
    least = 1e-6 * max(mean, 1e-30)
    return directions[:q], 1 / np.sqrt(np.maximum([*shrunk[:q], rest], least))


def _whitened(
    means: np.ndarray, centre: np.ndarray, directions: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    apart = means - centre
    along = apart @ directions.T
    outside = apart - along @ directions
    return np.asarray(scales[-1] * outside + (along * scales[:-1]) @ directions)


def _unit(points: np.ndarray) -> np.ndarray:
    return points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)

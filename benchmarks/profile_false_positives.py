"""How often the test of `mlxstacks profile` finds a difference where there is none.

Simulated prompts of 5 to 200 tokens: each chooses experts by a taste of its own around the model's,
in every layer, and its first tokens go by another taste than its later ones, as in a causal model.
The groups differ in nothing but the lengths of their prompts, and count as many tokens each. A find
is p < 0.05 of the mean divergence, or of some layer, adjusted for their number. Beside the test
stand the former one, which dealt prompts of any length to groups of equal tokens, with and without
the tokens of a chat template among those that are counted, and wider strata.

Run: python -m benchmarks.profile_false_positives [SIMULATIONS]
The last line of stdout is one JSON object.
"""

import json
import sys
from collections.abc import Callable

import numpy as np

from mlxstacks.stats import wilson_interval
from mlxstacks.studies.profile.measures import (
    LENGTH_RATIO,
    adjusted_p_values,
    divergence,
    group_counts,
    length_strata,
    p_value,
    shares,
    shuffle_within,
)

LAYERS, EXPERTS, TOP_K, GROUPS = 6, 8, 2, 4
TOKENS, PERMUTATIONS, TEMPLATE = 1500, 99, 12
ALPHA = 0.05
# Shortest and longest prompt of each group; lengths are uniform in their logarithm.
LENGTHS: dict[str, tuple[tuple[int, int], ...]] = {
    "5 to 200 in every group": ((5, 200),) * 4,
    "5-50, 10-100, 20-200, 5-200": ((5, 50), (10, 100), (20, 200), (5, 200)),
    "5-12, 5-200, 5-200, 80-200": ((5, 12), (5, 200), (5, 200), (80, 200)),
}


def simulated(
    rng: np.random.Generator, lengths: tuple[tuple[int, int], ...], template: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(choices (n, L, E), labels (n,), lengths (n,)) of groups that differ in length alone.

    template: tokens of each prompt, counted in its length, that always go to the same experts.
    """
    later, first = rng.dirichlet(np.full(EXPERTS, 4.0), (2, LAYERS))  # (L, E)
    of_template = rng.dirichlet(np.full(EXPERTS, 1.0), LAYERS)
    documents, labels, sizes = [], [], []
    for group, (low, high) in enumerate(lengths):
        left = TOKENS
        while left > 0:
            drawn = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
            length = min(left, drawn + template)
            left -= length
            content = max(0, length - template)
            early = min(content, 8)
            own = np.array([rng.dirichlet(1e-3 + 15 * taste) for taste in later])
            early_own = np.array([rng.dirichlet(1e-3 + 15 * taste) for taste in first])
            documents.append(
                rng.multinomial(TOP_K * early, early_own)
                + rng.multinomial(TOP_K * (content - early), own)
                + rng.multinomial(TOP_K * (length - content), of_template)
            )
            labels.append(group)
            sizes.append(length)
    return np.array(documents, np.float64), np.array(labels), np.array(sizes)


def deal(sizes: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The former test: prompts in random order, the next group where one has its tokens."""
    groups = labels.max() + 1
    order = rng.permutation(len(sizes))
    middles = np.cumsum(sizes[order]) - sizes[order] / 2
    dealt = np.empty_like(labels)
    dealt[order] = np.minimum(groups - 1, middles * groups // sizes.sum())
    return dealt


def within(ratio: float) -> Callable[..., np.ndarray]:
    return lambda sizes, labels, rng: shuffle_within(length_strata(sizes, ratio), labels, rng)


def finds(
    drawn: tuple[np.ndarray, np.ndarray, np.ndarray],
    relabel: Callable[..., np.ndarray],
    rng: np.random.Generator,
) -> tuple[bool, bool]:
    """Whether p of the mean divergence, and of some layer, is below alpha."""
    documents, labels, sizes = drawn

    def layers_of(names: np.ndarray) -> np.ndarray:  # (L,)
        return divergence(shares(group_counts(documents, names, GROUPS))).mean(axis=0)

    found = layers_of(labels)
    null = np.array([layers_of(relabel(sizes, labels, rng)) for _ in range(PERMUTATIONS)])
    of_layers = min(adjusted_p_values(found, null))
    return p_value(found.mean(), null.mean(axis=1)) < ALPHA, of_layers < ALPHA


TESTS: dict[str, tuple[int, Callable[..., np.ndarray]]] = {
    "before, template counted": (TEMPLATE, deal),
    "before, content alone": (0, deal),
    "strata of twice the length": (0, within(2.0)),
    f"strata of {LENGTH_RATIO:g} times": (0, within(LENGTH_RATIO)),
}


def rates(name: str, test: str, simulations: int, seed: int = 0) -> tuple[int, int]:
    """(finds in the mean, finds in some layer) of so many simulations without any effect."""
    template, relabel = TESTS[test]
    rng = np.random.default_rng([seed, *name.encode()])
    counted = [
        finds(simulated(rng, LENGTHS[name], template), relabel, rng) for _ in range(simulations)
    ]
    return sum(mean for mean, _ in counted), sum(layer for _, layer in counted)


def main(simulations: int = 200) -> None:
    lines = {}
    for test in TESTS:
        for name in LENGTHS:
            shown = []
            for found in rates(name, test, simulations):
                interval = wilson_interval(found, simulations)
                shown.append([found / simulations, interval.low, interval.high])
            lines[f"{name}; {test}"] = shown
            cells = "   ".join("{:6.1%} ({:.1%} to {:.1%})".format(*cell) for cell in shown)
            print(f"{name:28} {test:26} {cells}", flush=True)
    print(json.dumps({"simulations": simulations, "alpha": ALPHA, "mean_and_some_layer": lines}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

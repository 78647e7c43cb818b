"""Which experts a stack uses for which domain's prompts, and whether that tells the domain.

A prompt is one observation: intervals are Student's over prompts, each prompt's number being its
mean over the projections of the stack. Expert 2 of one projection has nothing to do with expert 2
of the next, so that mean comes near uniform whatever the routers do; `domain_distance`, and the
points whose separation is measured, keep the projections apart.

Letters: n prompts, P projections, E experts, D domains.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from mlxstacks.stats import MeanInterval, mean_interval
from mlxstacks.studies.stack.geometry import by_name
from mlxstacks.studies.stack.passes import Passes, StackRouting
from mlxstacks.studies.stack.separation import principal_components, separation

PERMUTATIONS = 200
# An expert chosen for less than this share of the rows of a projection is not used there.
UNUSED = 0.01


def routing_json(passes: Passes, seed: int) -> dict[str, Any]:
    """Loads of every stack on every domain's prompts, and how far routing tells the domain."""
    stacks = {stack.name: _stack_json(stack, passes.labels, seed) for stack in passes.routing}
    return {"stacks": stacks, "points": _points_json(passes, seed)}


def _stack_json(stack: StackRouting, labels: Sequence[str], seed: int) -> dict[str, Any]:
    experts = stack.gates.shape[2]
    domains = list(dict.fromkeys(labels))
    chosen = {name: np.array(labels) == name for name in domains}
    return {
        "domain": stack.domain,
        "experts": experts,
        "experts_per_token": stack.top_k,
        "projections": len(stack.paths),
        "uniform_gate": 1 / experts,
        "uniform_dispatch": stack.top_k / experts,
        "on": {name: _load_json(stack, rows) for name, rows in chosen.items()},
        "largest_gate_difference": _largest_difference(stack, list(chosen.values())),
        "domain_distance": domain_distance(stack.gates, labels, seed),
        "domain_distance_of_random_routers": domain_distance(stack.control, labels, seed),
        "by_projection": {
            name: {
                domain: _floats(stack.gates[rows][:, places].mean(axis=(0, 1)))
                for domain, rows in chosen.items()
            }
            for name, places in _places(stack).items()
        },
    }


def _load_json(stack: StackRouting, rows: np.ndarray) -> dict[str, Any]:
    """One stack on the prompts of one domain; rows (n,) bool."""
    gates, dispatch, entropy = stack.gates[rows], stack.dispatch[rows], stack.entropy[rows]
    return {
        "prompts": int(rows.sum()),
        "gate": [i.as_json() for i in expert_means(gates)],
        "dispatch": [i.as_json() for i in expert_means(dispatch)],
        # Of the mean loads: 1 is uniform. Averaged over projections first, and each on its own.
        "load_entropy": entropy_share(dispatch.mean(axis=(0, 1))),
        "load_entropy_by_projection": float(
            np.mean([entropy_share(load) for load in dispatch.mean(axis=0)])
        ),
        # Of the gates of one token, in nats: 0 is one expert alone, ln K all K alike.
        "gate_entropy_nats": mean_interval(_floats(entropy.mean(axis=1))).as_json(),
        "most_gate_entropy_nats": math.log(stack.top_k),
        "largest_gate_by_projection": float(gates.mean(axis=0).max(axis=1).mean()),
        "unused_experts": int(np.sum(dispatch.mean(axis=0) < UNUSED)),
    }


def expert_means(loads: np.ndarray) -> list[MeanInterval]:
    """loads (n, P, E): for each expert the mean over projections, with its interval over prompts.

    Law: the means sum to what the loads of a row sum to.
    """
    return [mean_interval(_floats(column)) for column in loads.mean(axis=1).T]


def entropy_share(load: np.ndarray) -> float:
    """Entropy of a load (E,) over that of a uniform one: 1 is uniform, 0 one expert alone."""
    shares = load[load > 0] / load.sum()
    return float(-np.sum(shares * np.log(shares)) / math.log(len(load)))


def domain_distance(gates: np.ndarray, labels: Sequence[str], seed: int) -> dict[str, Any] | None:
    """How much the mean gates (n, P, E) of the domains differ: half the sum of absolute
    differences over experts (0 equal, 1 disjoint), the mean over projections and pairs of domains.

    permuted: its mean with labels shuffled, what chance alone gives; p: share of shuffles (this one
    counted) that reach it. None with one domain.
    """
    names, codes = np.unique(np.array(labels), return_inverse=True)
    if len(names) < 2:
        return None
    rng = np.random.default_rng(seed)
    found = _distance(gates, codes, len(names))
    shuffled = [_distance(gates, rng.permutation(codes), len(names)) for _ in range(PERMUTATIONS)]
    as_far = sum(value >= found for value in shuffled)
    p = (1 + as_far) / (1 + PERMUTATIONS)
    return {"distance": found, "permuted": float(np.mean(shuffled)), "p": p}


def _distance(gates: np.ndarray, codes: np.ndarray, domains: int) -> float:
    means = np.stack([gates[codes == d].mean(axis=0) for d in range(domains)])  # (D, P, E)
    pairs = combinations(range(domains), 2)
    return float(np.mean([np.abs(means[a] - means[b]).sum(axis=-1).mean() / 2 for a, b in pairs]))


def _largest_difference(stack: StackRouting, chosen: Sequence[np.ndarray]) -> float:
    """Between two domains' mean gates of one expert, projections averaged: the published view."""
    means = [stack.gates[rows].mean(axis=(0, 1)) for rows in chosen]
    return float(np.ptp(np.stack(means), axis=0).max())


def _points_json(passes: Passes, seed: int) -> dict[str, Any] | None:
    """A point a prompt, its mean gates one after the other; components and separation of them."""
    if not passes.routing or len(passes.labels) < 3:
        return None
    each = {s.name: s.gates.reshape(len(passes.labels), -1) for s in passes.routing}
    everything = np.concatenate(list(each.values()), axis=1)
    # The same, projections averaged away: all that the published table could show.
    averaged = np.concatenate([s.gates.mean(axis=1) for s in passes.routing], axis=1)
    # Inputs of another domain go elsewhere through any router: what exceeds this was learned.
    control = [s.control.reshape(len(passes.labels), -1) for s in passes.routing]
    found = principal_components(everything, 2)
    return {
        "features": everything.shape[1],
        "labels": list(passes.labels),
        "coordinates": [_floats(point) for point in found.coordinates],
        "explained": list(found.explained),
        "separation": _separated(everything, passes.labels, seed),
        "separation_on_two_components": _separated(found.coordinates, passes.labels, seed),
        "separation_of_averages": _separated(averaged, passes.labels, seed),
        "separation_of_random_routers": _separated(
            np.concatenate(control, axis=1), passes.labels, seed
        ),
        "separation_by_stack": {
            name: _separated(points, passes.labels, seed) for name, points in each.items()
        },
    }


def _separated(points: np.ndarray, labels: Sequence[str], seed: int) -> dict[str, Any] | None:
    found = separation(points, labels, seed)
    return None if found is None else found.as_json()


def _places(stack: StackRouting) -> dict[str, list[int]]:
    """Name of a projection inside its layer -> its places along P."""
    return {
        name: [stack.paths.index(path) for path in paths]
        for name, paths in by_name(stack.paths).items()
    }


def _floats(values: np.ndarray) -> list[float]:
    return [float(value) for value in values]

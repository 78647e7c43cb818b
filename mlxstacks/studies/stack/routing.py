"""Which experts stacks use for which domain's prompts, what they write, whether that tells domains.

One pass a prompt, all stacks at weight 1, nothing in training: the inputs of every router are those
of the model as it is served without gates. Gates and deltas are computed beside the pass, from the
input that the projection sees, by the functions that serve them.

A prompt is one observation: intervals are Student's over prompts, each prompt's number being its
mean over the projections of the stack. Expert 2 of one projection has nothing to do with expert 2
of the next, so that mean comes near uniform whatever the routers do; `domain_distance`, and the
points whose separation is measured, keep the projections apart.

Letters: n prompts, P projections of a stack, E experts, N output dims, D domains.
"""

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.base_model import gated_delta_installed
from mlxstacks.errors import StoreError
from mlxstacks.layers.gates import router_logits, top_k_softmax
from mlxstacks.layers.moe_lora import Rows
from mlxstacks.layers.packed import FrozenStack, PackedStacks
from mlxstacks.layers.selection import Selection
from mlxstacks.layers.stacked import StackedLayer, set_mode, stacked_layers
from mlxstacks.stats import MeanInterval, mean_interval, wilson_interval
from mlxstacks.studies.stack.geometry import by_name
from mlxstacks.training.modes import evaluating

PERMUTATIONS, SEPARATION_PERMUTATIONS, FOLDS = 200, 100, 5
# An expert chosen for less than this share of the rows of a projection is not used there.
UNUSED = 0.01

# (tokens of the model's vocabulary) of one prompt.
Prompt = Sequence[int]
Record = Callable[[mx.array, Rows], None]


@dataclass(frozen=True, eq=False)
class StackRouting:
    """Routing of one stack, a row a prompt, each number a mean over the prompt's rows.

    gates, dispatch (n, P, E): gate weight, and share of rows that an expert is chosen for; they sum
    to 1 and to top_k. entropy (n, P): of the gates of a row, in nats, at most ln top_k. control:
    gates (n, P, E) of random routers of the same spread on the same inputs; what they tell of a
    domain no training put there.
    """

    name: str
    domain: str
    top_k: int
    paths: tuple[str, ...]
    gates: np.ndarray
    dispatch: np.ndarray
    entropy: np.ndarray
    control: np.ndarray


@dataclass(frozen=True, eq=False)
class Passes:
    """What the prompts left.

    labels (n,): the domain of each prompt. routing: of every stack with a router. deltas: path ->
    domain -> (n_d, N) float32, what the domain's own stacks write on its own prompts, a row a
    prompt.
    """

    labels: tuple[str, ...]
    routing: tuple[StackRouting, ...]
    deltas: dict[str, dict[str, np.ndarray]]


@dataclass
class _Recording:
    """What the projections do during one prompt, not evaluated yet."""

    gates: dict[tuple[str, str], list[mx.array]] = field(default_factory=dict)
    deltas: dict[str, mx.array] = field(default_factory=dict)


def run_prompts(
    model: nn.Module,
    prompts: Mapping[str, Sequence[Prompt]],
    progress: Callable[..., None] | None = None,
) -> Passes:
    """Pass the prompts of every domain; the model's modes are afterwards as they were.

    Raises: ValueError for no prompt at all, or an empty one. StoreError naming projection and
        domain where gates or deltas are not finite.
    """
    if not prompts or not all(len(p) for of_domain in prompts.values() for p in of_domain):
        raise ValueError("every prompt needs a token, and there must be one")
    total = sum(map(len, prompts.values()))
    labels: list[str] = []
    gates: list[dict[tuple[str, str], list[np.ndarray]]] = []
    deltas: dict[str, dict[str, list[np.ndarray]]] = {}
    with gated_delta_installed(), evaluating(model), _ungated(model) as layers:
        served = {path: layer.stacks for path, layer in layers.items()}
        for domain, of_domain in prompts.items():
            recording = _Recording()
            for path, stacks in served.items():
                record = _recorder(path, stacks.stacks(), domain, recording)
                layers[path].stacks = _RecordedStacks(stacks, record)
            for tokens in of_domain:
                recording.gates.clear()
                recording.deltas.clear()
                mx.eval(model(mx.array(tokens)[None]), recording.gates, recording.deltas)
                gates.append({k: [np.array(v) for v in vs] for k, vs in recording.gates.items()})
                for path, row in recording.deltas.items():
                    deltas.setdefault(path, {}).setdefault(domain, []).append(np.array(row))
                labels.append(domain)
                if progress:
                    progress(len(labels), total, domain)
        routing = tuple(_gather({p: stacks.stacks() for p, stacks in served.items()}, gates))
    stacked = {p: {d: np.stack(rows) for d, rows in of.items()} for p, of in deltas.items()}
    wrong = [f"gates of {stack.name}" for stack in routing if not np.isfinite(stack.gates).all()]
    wrong += [
        f"{path}, stacks of {domain}"
        for path, by_domain in stacked.items()
        for domain, rows in by_domain.items()
        if not np.isfinite(rows).all()
    ]
    if wrong:
        raise StoreError(
            f"not finite on data: {wrong[0]} and {len(wrong) - 1} more; the base or an activation "
            "overflows with these stacks on: see whether `mlxstacks stacks verify` passes, and "
            "disable domains to find the one"
        )
    return Passes(tuple(labels), routing, stacked)


class _RecordedStacks(PackedStacks):
    """The stacks of a projection, which record what they are called with."""

    def __init__(self, stacks: PackedStacks, record: Record):
        super().__init__()
        self._stacks, self._record = stacks, record

    def __call__(self, x: mx.array, rows: Rows) -> mx.array | None:
        self._record(x, rows)
        return self._stacks(x, rows)

    def add_to(self, y: mx.array, x: mx.array, rows: Rows) -> mx.array:
        """See `PackedStacks.add_to`."""
        self._record(x, rows)
        return self._stacks.add_to(y, x, rows)


@contextmanager
def _ungated(model: nn.Module) -> Iterator[dict[str, StackedLayer]]:
    """Path -> layer, all stacks on; modes and stacks are afterwards as they were."""
    layers = dict(stacked_layers(model))
    before = {path: (layer.mode, layer.stacks) for path, layer in layers.items()}
    set_mode(model, Selection(active=False))
    try:
        yield layers
    finally:
        for path, layer in layers.items():
            mode, layer.stacks = before[path]
            layer.select(*mode)


def _recorder(
    path: str, stacks: Sequence[FrozenStack], domain: str, recording: _Recording
) -> Record:
    """Records the routing of a projection, and the delta of the domain's own stacks."""
    domain_stacks = PackedStacks()
    domain_stacks.replace_all([stack for stack in stacks if stack.id.domain == domain])
    routed = [(stack, random_router(stack, path)) for stack in stacks if stack.router is not None]

    def record(x: mx.array, rows: Rows) -> None:
        for stack, random in routed:
            control, *_ = prompt_routing(random, x)
            recording.gates[path, stack.id.name] = [*prompt_routing(stack, x), control]
        delta = domain_stacks(x, rows)
        if delta is not None:
            recording.deltas[path] = _row_mean(delta)

    return record


def random_router(stack: FrozenStack, path: str) -> FrozenStack:
    """The stack with a normal draw in place of its router, of the same standard deviation.

    The draw is a function of path and name.
    """
    assert stack.router is not None
    key = mx.random.key(zlib.crc32(f"{path}/{stack.id.name}".encode()))
    drawn = mx.std(stack.router) * mx.random.normal(stack.router.shape, key=key)
    return replace(stack, router=drawn)


def prompt_routing(stack: FrozenStack, x: mx.array) -> list[mx.array]:
    """[mean gates (E,), dispatch (E,), mean entropy ()] over the rows of x (..., K), float32.

    Rows sorted by expert hold a token once for each of its base experts: the mean is the same.
    """
    assert stack.router is not None
    if stack.shape.latent is not None:
        x = x.astype(mx.float32) @ stack.shape.latent.d_in.T  # (..., l)
    routing = top_k_softmax(router_logits(x, stack.router), stack.shape.top_k)
    gates = routing.gates
    surprise = mx.where(gates > 0, -gates * mx.log(mx.maximum(gates, 1e-38)), 0)
    entropy = mx.mean(mx.sum(surprise, axis=-1))
    return [_row_mean(gates), _row_mean(routing.chosen), entropy]


def _row_mean(values: mx.array) -> mx.array:
    """values (..., N): the mean over all rows, float32."""
    return mx.mean(values.reshape(-1, values.shape[-1]).astype(mx.float32), axis=0)


def _gather(
    stacks: Mapping[str, Sequence[FrozenStack]],
    gates_by_prompt: Sequence[Mapping[tuple[str, str], Sequence[np.ndarray]]],
) -> Iterator[StackRouting]:
    """stacks: by path. Per stack, in the order of its first projection."""
    paths: dict[str, list[str]] = {}
    shapes: dict[str, FrozenStack] = {}
    for path, of_path in stacks.items():
        for stack in of_path:
            if stack.router is not None:
                paths.setdefault(stack.id.name, []).append(path)
                shapes[stack.id.name] = stack
    for name, of_stack in paths.items():
        gates, dispatch, entropy, control = (
            np.array(
                [[prompt[path, name][part] for path in of_stack] for prompt in gates_by_prompt]
            )
            for part in range(4)
        )
        stack = shapes[name]
        yield StackRouting(
            name, stack.id.domain, stack.shape.top_k, tuple(of_stack), gates, dispatch, entropy,
            control,
        )  # fmt: skip


# --- figures --------------------------------------------------------------------------------------


def routing_json(passes: Passes, seed: int) -> dict[str, Any]:
    """Loads of every stack on every domain's prompts, and how far routing tells the domain."""
    stacks = {stack.name: _stack_json(stack, passes.labels, seed) for stack in passes.routing}
    return {"stacks": stacks, "points": _points_json(passes, seed)}


def _stack_json(stack: StackRouting, labels: Sequence[str], seed: int) -> dict[str, Any]:
    experts = stack.gates.shape[2]
    rows_of = {name: np.array(labels) == name for name in dict.fromkeys(labels)}
    loads: dict[str, Any] = {}
    for name, rows in rows_of.items():
        gates, dispatch, entropy = stack.gates[rows], stack.dispatch[rows], stack.entropy[rows]
        loads[name] = {
            "prompts": int(rows.sum()),
            "gate": [i.as_json() for i in expert_means(gates)],
            "dispatch": [i.as_json() for i in expert_means(dispatch)],
            # Of the mean loads: 1 is uniform. Averaged over projections first, and each on its own.
            "load_entropy": entropy_share(dispatch.mean(axis=(0, 1))),
            "load_entropy_by_projection": float(
                np.mean([entropy_share(load) for load in dispatch.mean(axis=0)])
            ),
            # Of the gates of one token, in nats: 0 is one expert alone, ln K all K alike.
            "gate_entropy_nats": mean_interval(entropy.mean(axis=1).tolist()).as_json(),
            "most_gate_entropy_nats": math.log(stack.top_k),
            "largest_gate_by_projection": float(gates.mean(axis=0).max(axis=1).mean()),
            "unused_experts": int(np.sum(dispatch.mean(axis=0) < UNUSED)),
        }
    # Of two domains' mean gates of one expert, projections averaged: the published view.
    averages = [stack.gates[rows].mean(axis=(0, 1)) for rows in rows_of.values()]
    return {
        "domain": stack.domain,
        "experts": experts,
        "experts_per_token": stack.top_k,
        "projections": len(stack.paths),
        "uniform_gate": 1 / experts,
        "uniform_dispatch": stack.top_k / experts,
        "on": loads,
        "largest_gate_difference": float(np.ptp(np.stack(averages), axis=0).max()),
        "domain_distance": domain_distance(stack.gates, labels, seed),
        "domain_distance_of_random_routers": domain_distance(stack.control, labels, seed),
        "by_projection": {
            name: {
                domain: stack.gates[rows][:, [*map(stack.paths.index, paths)]]
                .mean(axis=(0, 1))
                .tolist()
                for domain, rows in rows_of.items()
            }
            for name, paths in by_name(stack.paths).items()
        },
    }


def expert_means(loads: np.ndarray) -> list[MeanInterval]:
    """loads (n, P, E): for each expert the mean over projections, with its interval over prompts.

    Law: the means sum to what the loads of a row sum to.
    """
    return [mean_interval(column.tolist()) for column in loads.mean(axis=1).T]


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
    distance = _distance(gates, codes, len(names))
    shuffled = [_distance(gates, rng.permutation(codes), len(names)) for _ in range(PERMUTATIONS)]
    as_far = sum(value >= distance for value in shuffled)
    p = (1 + as_far) / (1 + PERMUTATIONS)
    return {"distance": distance, "permuted": float(np.mean(shuffled)), "p": p}


def _distance(gates: np.ndarray, codes: np.ndarray, domains: int) -> float:
    means = np.stack([gates[codes == d].mean(axis=0) for d in range(domains)])  # (D, P, E)
    pairs = combinations(range(domains), 2)
    return float(np.mean([np.abs(means[a] - means[b]).sum(axis=-1).mean() / 2 for a, b in pairs]))


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
    coordinates, explained = principal_components(everything, 2)
    return {
        "features": everything.shape[1],
        "labels": list(passes.labels),
        "coordinates": coordinates.tolist(),
        "explained": explained,
        "separation": separation(everything, passes.labels, seed),
        "separation_on_two_components": separation(coordinates, passes.labels, seed),
        "separation_of_averages": separation(averaged, passes.labels, seed),
        "separation_of_random_routers": separation(
            np.concatenate(control, axis=1), passes.labels, seed
        ),
        "separation_by_stack": {
            name: separation(points, passes.labels, seed) for name, points in each.items()
        },
    }


# --- do points of several classes lie apart? ------------------------------------------------------

# n points, F features, D classes. Distances are Euclidean, features as they come.


def principal_components(features: np.ndarray, count: int = 2) -> tuple[np.ndarray, list[float]]:
    """(coordinates (n, c), share of all variance along each) of the leading components of features
    (n, F), centred. Each one's largest part is positive.

    Laws: the variance of a coordinate over the total variance is its share; with all
    components, distances between points are those of the features.
    """
    centred = features - features.mean(axis=0)
    left, values, right = np.linalg.svd(centred.astype(np.float64), full_matrices=False)
    largest = np.abs(right).argmax(axis=1)
    signs = np.sign(right[np.arange(len(right)), largest])
    total = float(np.sum(values**2))
    explained = values[:count] ** 2 / total if total > 0 else np.zeros(min(count, len(values)))
    coordinates = (left * values * np.where(signs == 0, 1, signs))[:, :count]
    return coordinates, explained.tolist()


def silhouette(features: np.ndarray, labels: Sequence[str]) -> float:
    """Mean of (b - a) / max(a, b): a, mean distance to the others of a point's class; b, to those
    of the nearest other class. 1: far apart, 0: mixed, below 0: nearer to another class.

    A point that is alone in its class counts 0 (Rousseeuw, 1987). Needs two classes.
    """
    from scipy.spatial.distance import cdist

    names, codes = np.unique(np.array(labels), return_inverse=True)
    member = np.eye(len(names))[codes]  # (n, D)
    sizes, totals = member.sum(axis=0), cdist(features, features) @ member  # (D,), (n, D)
    others = sizes[codes] - 1  # (n,)
    inside = totals[member > 0] / np.maximum(others, 1)
    outside = np.where(member > 0, np.inf, totals / sizes).min(axis=1)
    scale = np.maximum(inside, outside)
    scored = (others > 0) & (scale > 0)
    return float(np.sum((outside - inside)[scored] / scale[scored]) / len(codes))


def folds_of(labels: Sequence[str], folds: int, seed: int) -> np.ndarray:
    """The fold of each point (n,), every class spread over the folds as evenly as can be."""
    rng = np.random.default_rng(seed)
    codes = np.array(labels)
    assigned = np.zeros(len(codes), dtype=int)
    for name in sorted(set(labels)):
        places = np.flatnonzero(codes == name)
        assigned[rng.permutation(places)] = np.arange(len(places)) % folds
    return assigned


def nearest_centroid_hits(features: np.ndarray, labels: Sequence[str], fold: np.ndarray) -> int:
    """How many points are nearest to the centroid of their own class, centroids made without the
    point's fold. A class that the other folds do not have can not be hit; of equally near ones the
    first by name is taken.
    """
    from scipy.spatial.distance import cdist

    names, codes = np.unique(np.array(labels), return_inverse=True)
    hits = 0
    for number in np.unique(fold):
        inside = fold == number
        member = np.eye(len(names))[codes[~inside]]
        sizes = member.sum(axis=0)
        centroids = member.T @ features[~inside] / np.maximum(sizes, 1)[:, None]  # (D, F)
        distances = cdist(features[inside], centroids)
        distances[:, sizes == 0] = np.inf
        hits += int(np.sum(distances.argmin(axis=1) == codes[inside]))
    return hits


def separation(features: np.ndarray, labels: Sequence[str], seed: int) -> dict[str, Any] | None:
    """How far the classes of features (n, F) can be told apart; None unless there are two of at
    least two points each.

    accuracy: share of the n points that are nearest to their own centroid, with its interval;
    chance: the share of the largest class; permuted_accuracy: its mean with labels shuffled; p:
    share of shuffles (this one counted) that do as well.
    """
    counts = Counter(labels)
    if len(counts) < 2 or min(counts.values()) < 2:
        return None
    folds = min(FOLDS, *counts.values())
    # All components keep every distance, in at most n numbers a point.
    points, _ = principal_components(features, len(labels))
    hits = nearest_centroid_hits(points, labels, folds_of(labels, folds, seed))
    rng = np.random.default_rng(seed)
    shuffled = []
    for _ in range(SEPARATION_PERMUTATIONS):
        drawn = [str(name) for name in rng.permutation(np.array(labels))]
        shuffled.append(nearest_centroid_hits(points, drawn, folds_of(drawn, folds, seed)))
    as_good = sum(count >= hits for count in shuffled)
    return {
        "n": len(labels),
        "accuracy": hits / len(labels),
        "interval": wilson_interval(hits, len(labels)).as_json(),
        "chance": max(counts.values()) / len(labels),
        "permuted_accuracy": float(np.mean(shuffled)) / len(labels),
        "p": (1 + as_good) / (1 + SEPARATION_PERMUTATIONS),
        "folds": folds,
        "silhouette": silhouette(points, labels),
    }

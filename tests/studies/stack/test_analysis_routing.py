"""Routing of frozen stacks: recorded gates against gates by hand, loads, and separation.

Run: pytest tests/studies/stack/test_analysis_routing.py
"""

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks.layers.attach import attach_stacks
from mlxstacks.layers.delta_rows import collect_delta_rows
from mlxstacks.layers.freezing import add_frozen
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.selection import base
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import set_mode, stacked_layers
from mlxstacks.layers.targets import find_targets
from mlxstacks.studies.stack.routing import (
    Passes,
    StackRouting,
    domain_distance,
    entropy_share,
    expert_means,
    folds_of,
    nearest_centroid_hits,
    principal_components,
    prompt_routing,
    random_router,
    routing_json,
    run_prompts,
    separation,
    silhouette,
)
from tests.layers.build import K, assert_close, normal, random_stack
from tests.studies.stack_analysis_cases import random_part
from tests.training.tiny import hybrid_model, random_tokens


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """Two layers with linear attention, attention and routed experts; chat has two stacks."""
    made = hybrid_model()
    attach_stacks(made, find_targets(made))
    for seed, (name, domain) in enumerate([("chat-r1", "chat"), ("chat-r2", "chat"),
                                           ("code-r1", "code")]):  # fmt: skip
        parts = {
            path: random_part(layer.dims, StackSettings(rank=2), name, domain, seed)
            for path, layer in stacked_layers(made)
        }
        add_frozen(made, parts)
    return made


def prompts(count: int, seed: int) -> list[list[int]]:
    """Of different lengths: 40 tokens make the experts' rows sorted, 5 do not."""
    tokens = random_tokens(count, 40, seed)
    return [row[: 5 if index % 2 else 40].tolist() for index, row in enumerate(tokens)]


def by_hand(stack: FrozenStack, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Gates row by row: the top-k logits, their softmax, the rest zero."""
    assert stack.router is not None
    router = np.array(stack.router, np.float64)
    gates, chosen, entropy = [], [], []
    for row in x.reshape(-1, x.shape[-1]):
        logits = router @ row
        kept = np.argsort(-logits)[: stack.shape.top_k]
        weights = np.exp(logits[kept] - logits[kept].max())
        weights /= weights.sum()
        gate = np.zeros(len(logits))
        gate[kept] = weights
        gates.append(gate)
        chosen.append(gate > 0)
        entropy.append(-np.sum(weights * np.log(weights)))
    return np.mean(gates, axis=0), np.mean(chosen, axis=0), float(np.mean(entropy))


@pytest.mark.parametrize("shape", [(7, K), (1, 3, 1, 1, K), (9, 1, K)])
def test_routing_of_a_prompt_by_hand(shape: tuple[int, ...]) -> None:
    stack, x = random_stack("linear"), normal(3, *shape)
    found = prompt_routing(stack, x)
    for got, wanted in zip(found, by_hand(stack, np.array(x, np.float64)), strict=True):
        assert_close(got, wanted)
    assert mx.sum(found[0]).item() == pytest.approx(1)
    assert mx.sum(found[1]).item() == pytest.approx(stack.shape.top_k)


def test_a_random_router_has_the_spread_of_the_stacks(model: nn.Module) -> None:
    path, layer = next(iter(stacked_layers(model)))
    first, second = layer.stacks.stacks()[:2]
    assert first.router is not None
    drawn, again = (np.array(random_router(first, path).router) for _ in range(2))
    assert np.array_equal(drawn, again)
    assert drawn.std() == pytest.approx(np.array(first.router).std(), rel=0.2)
    assert not np.array_equal(drawn, np.array(random_router(second, path).router))
    assert abs(np.corrcoef(drawn.ravel(), np.array(first.router).ravel())[0, 1]) < 0.3


def test_passes_hear_what_the_projections_see(model: nn.Module) -> None:
    """Inputs caught by a wrapped class, routed by hand, must give the recorded numbers."""
    rows = {"chat": prompts(3, 0), "code": prompts(2, 1)}
    found = run_prompts(model, rows)
    assert found.labels == ("chat",) * 3 + ("code",) * 2
    assert [r.name for r in found.routing] == ["chat-r1", "chat-r2", "code-r1"]
    caught = _inputs(model, [p for of in rows.values() for p in of])
    layers = dict(stacked_layers(model))
    for routing in found.routing:
        assert set(routing.paths) == set(layers)
        for place, path in enumerate(routing.paths):
            [stack] = [s for s in layers[path].stacks.stacks() if s.id.name == routing.name]
            for number, x in enumerate(caught[path]):
                gates, dispatch, entropy = by_hand(stack, x)
                assert_close(routing.gates[number, place], gates, 1e-4)
                assert_close(routing.dispatch[number, place], dispatch, 1e-6)
                assert routing.entropy[number, place] == pytest.approx(entropy, abs=1e-4)
                control, *_ = by_hand(random_router(stack, path), x)
                assert_close(routing.control[number, place], control, 1e-4)


def _inputs(model: nn.Module, rows: Sequence[Sequence[int]]) -> dict[str, list[np.ndarray]]:
    """What each stacked projection is called with, a list entry a prompt."""
    from mlxstacks.layers.stacked import StackedLayer
    from mlxstacks.training.modes import evaluating

    names = {id(layer): path for path, layer in stacked_layers(model)}
    caught: dict[str, list[np.ndarray]] = {}
    original = StackedLayer.__call__

    def call(self: StackedLayer, x: mx.array, *rest: object, **named: object) -> mx.array:
        caught.setdefault(names[id(self)], []).append(np.array(x, np.float64))
        return original(self, x, *rest, **named)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, evaluating(model):
        patch.setattr(StackedLayer, "__call__", call)
        for tokens in rows:
            mx.eval(model(mx.array(tokens)[None]))
    return caught


def test_passes_leave_the_model_as_it_was(model: nn.Module) -> None:
    tokens = mx.array(random_tokens(1, 12))
    set_mode(model, base())
    before = np.array(model(tokens))
    kinds = {path: type(layer.stacks) for path, layer in stacked_layers(model)}
    run_prompts(model, {"chat": prompts(1, 0)})
    assert np.array_equal(np.array(model(tokens)), before)
    assert {path: type(layer.stacks) for path, layer in stacked_layers(model)} == kinds
    assert all(layer.mode[0].mode == "base" for _, layer in stacked_layers(model))


def test_a_domains_delta_is_that_of_its_own_stacks() -> None:
    """With one domain alone its rows are those from which protected directions are made."""
    made = hybrid_model()
    attach_stacks(made, find_targets(made))
    for name in ("chat-r1", "chat-r2"):
        parts = {
            path: random_part(layer.dims, StackSettings(rank=2), name, "chat", len(name))
            for path, layer in stacked_layers(made)
        }
        add_frozen(made, parts)
    rows = prompts(4, 3)
    found = run_prompts(made, {"chat": rows}).deltas
    wanted = collect_delta_rows(made, [mx.array(tokens) for tokens in rows])
    assert found.keys() == wanted.keys()
    for path, expected in wanted.items():
        assert_close(found[path]["chat"], expected, 1e-4)


def test_deltas_keep_domains_apart(model: nn.Module) -> None:
    found = run_prompts(model, {"chat": prompts(3, 0), "code": prompts(2, 1)})
    for by_domain in found.deltas.values():
        assert {name: len(rows) for name, rows in by_domain.items()} == {"chat": 3, "code": 2}


def test_bad_prompts_are_refused(model: nn.Module) -> None:
    for wrong in ({}, {"chat": [[1], []]}):
        with pytest.raises(ValueError, match="every prompt needs a token"):
            run_prompts(model, wrong)


def made_routing(gates: np.ndarray, name: str = "chat-r1") -> StackRouting:
    """gates (n, P, E) as they come; the first two experts chosen, whatever the gates."""
    dispatch = np.broadcast_to(np.array([1.0, 1.0, 0, 0]), gates.shape).copy()
    paths = tuple(f"layers.{index}.q_proj" for index in range(gates.shape[1]))
    return StackRouting(
        name, "chat", 2, paths, gates, dispatch, np.full(gates.shape[:2], 0.5),
        np.full(gates.shape, 0.25),
    )  # fmt: skip


def specialised(n: int = 6) -> tuple[np.ndarray, list[str]]:
    """Two domains that use opposite experts in two projections: averaged away, they are equal."""
    gates = np.zeros((2 * n, 2, 4))
    gates[:n, 0], gates[:n, 1] = [0.9, 0.1, 0, 0], [0.1, 0.9, 0, 0]
    gates[n:, 0], gates[n:, 1] = [0.1, 0.9, 0, 0], [0.9, 0.1, 0, 0]
    return gates, ["chat"] * n + ["code"] * n


def test_averages_over_projections_hide_what_single_projections_show() -> None:
    gates, labels = specialised()
    noise = np.random.default_rng(0).normal(0, 1e-3, gates.shape)
    found = routing_json(Passes(tuple(labels), (made_routing(gates + noise),), {}), seed=0)
    stack, points = found["stacks"]["chat-r1"], found["points"]
    assert stack["largest_gate_difference"] < 0.01
    assert stack["domain_distance"]["distance"] == pytest.approx(0.8, abs=0.01)
    assert stack["domain_distance"]["p"] < 0.05
    for expert, wanted in enumerate([0.5, 0.5, 0, 0]):
        for domain in ("chat", "code"):
            assert stack["on"][domain]["gate"][expert]["mean"] == pytest.approx(wanted, abs=0.01)
            assert stack["on"][domain]["dispatch"][expert]["mean"] == [1, 1, 0, 0][expert]
    assert (stack["uniform_gate"], stack["uniform_dispatch"]) == (0.25, 0.5)
    assert stack["on"]["chat"]["unused_experts"] == 4
    assert stack["on"]["chat"]["load_entropy"] == pytest.approx(0.5)
    assert stack["on"]["chat"]["most_gate_entropy_nats"] == pytest.approx(math.log(2))
    assert points["separation"]["accuracy"] == 1
    assert points["separation"]["silhouette"] > 0.9
    assert points["explained"][0] > 0.99
    assert points["separation_of_averages"]["accuracy"] < 0.9
    # The control here is the same for all prompts: it can tell nothing.
    assert stack["domain_distance_of_random_routers"]["distance"] == 0
    assert points["separation_of_random_routers"]["accuracy"] <= 0.5


def test_equal_routing_is_not_told_apart() -> None:
    rng = np.random.default_rng(1)
    gates = rng.dirichlet(np.ones(4), (40, 3))
    labels = tuple("chat" if index % 2 else "code" for index in range(40))
    found = routing_json(Passes(labels, (made_routing(gates),), {}), seed=0)
    assert found["stacks"]["chat-r1"]["domain_distance"]["p"] > 0.05
    assert found["points"]["separation"]["accuracy"] < 0.75
    assert abs(found["points"]["separation"]["silhouette"]) < 0.1


def test_intervals_are_over_prompts() -> None:
    loads = np.zeros((3, 2, 2))
    loads[:, :, 0] = [[0.1, 0.3], [0.2, 0.4], [0.3, 0.5]]  # means of prompts 0.2, 0.3, 0.4
    loads[:, :, 1] = 1 - loads[:, :, 0]
    first, second = expert_means(loads)
    assert (first.mean, first.n) == (pytest.approx(0.3), 3)
    # t(0.975, 2) = 4.30265, standard error 0.1 / sqrt(3)
    assert first.high == pytest.approx(0.3 + 4.302652729911275 * 0.1 / math.sqrt(3))
    assert first.mean + second.mean == pytest.approx(1)


def test_entropy_and_distance_by_hand() -> None:
    assert entropy_share(np.array([0.5, 0.5, 0.5, 0.5])) == pytest.approx(1)
    assert entropy_share(np.array([2.0, 0, 0, 0])) == 0
    gates = np.array([[[1.0, 0]], [[0, 1.0]]])
    found = domain_distance(gates, ["a", "b"], 0)
    assert found is not None
    assert found["distance"] == 1
    assert domain_distance(gates, ["a", "a"], 0) is None


def points_of(n: int, apart: float, seed: int = 0) -> tuple[np.ndarray, list[str]]:
    rng = np.random.default_rng(seed)
    labels = ["a", "b", "c"] * n
    centres = {"a": 0.0, "b": apart, "c": 2 * apart}
    return rng.standard_normal((3 * n, 5)) + np.array([[centres[name]] for name in labels]), labels


def test_components_keep_variance_and_distances() -> None:
    points, _ = points_of(8, 1.0)
    turned, explained = principal_components(points, 99)
    assert sum(explained) == pytest.approx(1)
    variances = np.linalg.eigvalsh(np.cov(points.T))[::-1]
    assert explained == pytest.approx(variances / variances.sum())
    between = np.linalg.norm(points[:, None] - points[None], axis=-1)
    assert np.allclose(np.linalg.norm(turned[:, None] - turned[None], axis=-1), between)
    assert principal_components(np.ones((4, 3)))[1] == [0, 0]


def test_silhouette_against_its_definition() -> None:
    points, labels = points_of(4, 1.0)
    labels[0] = "alone"
    scores = []
    for i, point in enumerate(points):
        gaps: dict[str, list[float]] = {}
        for j, other in enumerate(points):
            if i != j:
                gaps.setdefault(labels[j], []).append(float(np.linalg.norm(point - other)))
        if labels[i] not in gaps:
            scores.append(0.0)
            continue
        a = float(np.mean(gaps.pop(labels[i])))
        b = min(float(np.mean(values)) for values in gaps.values())
        scores.append((b - a) / max(a, b))
    assert silhouette(points, labels) == pytest.approx(float(np.mean(scores)))


def test_nearest_centroid_never_sees_its_own_fold() -> None:
    points, labels = points_of(5, 2.0)
    fold = folds_of(labels, 5, seed=3)
    hits = 0
    for number in range(5):
        train = [i for i in range(15) if fold[i] != number]
        for i in np.flatnonzero(fold == number):
            centre = {n: np.mean([points[j] for j in train if labels[j] == n], axis=0)
                      for n in "abc"}  # fmt: skip
            nearest = min("abc", key=lambda n: float(np.linalg.norm(points[i] - centre[n])))
            hits += nearest == labels[i]
    assert nearest_centroid_hits(points, labels, fold) == hits
    for name in "abc":  # every class is spread evenly
        assert sorted(fold[[i for i in range(15) if labels[i] == name]]) == [0, 1, 2, 3, 4]


def test_separation_of_far_and_of_mixed_classes() -> None:
    far = separation(*points_of(10, 20.0), seed=0)
    assert far is not None
    assert (far["accuracy"], far["chance"], far["n"]) == (1, pytest.approx(1 / 3), 30)
    assert far["p"] == pytest.approx(1 / 101)
    assert far["permuted_accuracy"] < 0.6
    mixed = separation(*points_of(10, 0.0), seed=0)
    assert mixed is not None
    assert mixed["p"] > 0.01
    assert separation(np.zeros((3, 2)), ["a", "a", "b"], 0) is None
    assert separation(np.zeros((3, 2)), ["a", "a", "a"], 0) is None

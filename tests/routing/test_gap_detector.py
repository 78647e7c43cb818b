"""Gap detectors: the promise on known prompts, what they find, the formulas, their file."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxstacks.files.router_file import (
    GapPart,
    GapRule,
    RouterFile,
    RouterHeader,
    read_router,
    write_router,
)
from mlxstacks.routing.gap_detector import (
    FALSE_ALARMS,
    LEAST_HELD_OUT,
    GapDetector,
    GapRows,
    candidate_layers,
    detector_of,
    fit_detector,
    fitted,
)
from mlxstacks.routing.router import MetaRouter, router_digest, router_tensors
from tests.files.router_cases import router_header
from tests.files.router_cases import router_tensors as random_tensors

WIDTH = 12
DOMAINS = ("a", "b", "c")


def made_rows(rng: np.random.Generator, count: int, centres: np.ndarray) -> GapRows:
    """`count` prompts a domain around the domain's centre, two layers; each fourth is held out."""
    labels = [(name,) for name in DOMAINS for _ in range(count)]
    means = np.concatenate([c + rng.normal(size=(count, 2, WIDTH)) for c in centres])
    logits = np.concatenate([
        np.where(np.arange(3) == d, 4.0, -4.0) + rng.normal(size=(count, 3)) for d in range(3)
    ])  # fmt: skip
    tokens = [rng.integers(0, 20, 1 + i % 9).tolist() for i in range(3 * count)]
    held_out = np.arange(3 * count) % 4 == 0
    return GapRows(means, (1, 3), tokens, logits, DOMAINS, labels, held_out)


def chosen_for(rows: GapRows) -> GapDetector:
    detector, note = fit_detector(rows)
    assert detector is not None
    assert not note
    return detector


def flags_of(detector: GapDetector, rows: GapRows) -> np.ndarray:
    at = [rows.layers.index(layer) for layer in detector.layers]
    return detector.is_gap(rows.means[:, at], rows.tokens, rows.logits)


def test_known_prompts_are_flagged_as_rarely_as_promised() -> None:
    """Over many draws, as the promise is; a single threshold is now above, now below."""
    rates = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        centres = 6 * rng.normal(size=(3, 1, WIDTH))
        detector = fitted(made_rows(rng, 40, centres), (("nearest prompt", 1),))
        rates.append(flags_of(detector, made_rows(rng, 100, centres)).mean())
    assert np.mean(rates) < FALSE_ALARMS + 3 * np.std(rates) / np.sqrt(len(rates))


def test_a_domain_far_from_all_is_found_and_the_choice_says_by_what() -> None:
    rng = np.random.default_rng(0)
    centres = 6 * rng.normal(size=(4, 1, WIDTH))
    detector = chosen_for(made_rows(rng, 60, centres[:3]))
    unseen = centres[3] + rng.normal(size=(200, 2, WIDTH))
    at = [(1, 3).index(layer) for layer in detector.layers]
    assert detector.is_gap(unseen[:, at], [[0]] * 200, np.full((200, 3), -4.0)).mean() > 0.9
    table: Any = detector.rule.chosen_by["left_out"]
    chosen = detector.rule.chosen_by["test"]
    assert {*table[chosen]} == {*DOMAINS}
    best = max(np.mean([r["rate"] for r in rates.values()]) for rates in table.values())
    assert np.mean([r["rate"] for r in table[chosen].values()]) == best


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(30, 60))
def test_mahalanobis_is_the_distance_by_the_shrunk_covariance(seed: int, count: int) -> None:
    """Against the formula with the whole matrix (Ledoit & Wolf 2004, lemma 3.2 to 3.5)."""
    rng = np.random.default_rng(seed)
    rows = made_rows(rng, count, 3 * rng.normal(size=(3, 1, WIDTH)))
    detector = fitted(rows, (("mahalanobis", 3),))
    part, train = detector.rule.parts[0], ~rows.held_out
    x, labels = rows.means[train][:, 1], [rows.labels[i][0] for i in np.flatnonzero(train).tolist()]
    centres = {name: x[[n == name for n in labels]].mean(axis=0) for name in DOMAINS}
    inside = x - np.stack([centres[name] for name in labels])
    n = len(x)
    sample = inside.T @ inside / n
    mean = np.trace(sample) / WIDTH
    distance = np.linalg.norm(sample - mean * np.eye(WIDTH)) ** 2
    noise = sum(np.linalg.norm(np.outer(row, row) - sample) ** 2 for row in inside) / n**2
    share = min(noise, distance) / distance
    inverse = np.linalg.inv((1 - share) * sample + share * mean * np.eye(WIDTH))
    points = rows.means[:, 1]
    expected = np.min([
        np.einsum("ni,ij,nj->n", points - c, inverse, points - c) for c in centres.values()
    ], axis=0)  # fmt: skip
    found = detector.strangeness(rows.means[:, 1:], rows.tokens, rows.logits)
    np.testing.assert_allclose(found * part.deviation + part.mean, expected, rtol=2e-3, atol=1e-2)


PROMPTS = st.lists(st.lists(st.integers(0, 300_000), min_size=1, max_size=8), max_size=20)


@settings(max_examples=50, deadline=None)
@given(trained=PROMPTS, asked=PROMPTS.filter(len))
def test_tokens_are_as_surprising_as_to_the_domain_that_expects_them_most(
    trained: list[list[int]], asked: list[list[int]]
) -> None:
    trained = [[7, 7, 3], [5], *trained]  # a prompt of each of two domains at least
    labels = [DOMAINS[i % 2] for i in range(len(trained))]
    known = [*trained, *[[7]] * LEAST_HELD_OUT]
    rows = GapRows(
        np.zeros((len(known), 0, 1)), (), known, np.zeros((len(known), 2)), DOMAINS[:2],
        [*((label,) for label in labels), *[("a",)] * LEAST_HELD_OUT],
        np.arange(len(known)) >= len(trained),
    )  # fmt: skip
    detector = fitted(rows, (("tokens", 0),))
    vocabulary = {token for prompt in trained for token in prompt}
    counts = {
        name: Counter(t for p, n in zip(trained, labels, strict=True) if n == name for t in p)
        for name in DOMAINS[:2]
    }

    def surprise(prompt: list[int], name: str) -> float:
        total = counts[name].total() + 0.5 * (len(vocabulary) + 1)
        shares = [(counts[name][token] + 0.5) / total for token in {*prompt}]
        return -sum(map(math.log, shares)) / len(shares)

    part = detector.rule.parts[0]
    found = detector.strangeness(np.zeros((len(asked), 0, 1)), asked, np.zeros((len(asked), 2)))
    expected = [min(surprise(prompt, name) for name in counts) for prompt in asked]
    np.testing.assert_allclose(found * part.deviation + part.mean, expected, rtol=1e-5)


def test_too_few_held_out_prompts_make_no_detector() -> None:
    rng = np.random.default_rng(1)
    rows = made_rows(rng, 24, rng.normal(size=(3, 1, WIDTH)))
    assert rows.held_out.sum() == LEAST_HELD_OUT - 1
    detector, note = fit_detector(rows)
    assert detector is None
    assert "18 held-out prompts are too few" in note


def test_one_domain_gets_a_test_that_was_not_compared() -> None:
    rng = np.random.default_rng(2)
    rows = made_rows(rng, 60, np.zeros((3, 1, WIDTH)))
    alone = GapRows(rows.means, rows.layers, rows.tokens, rows.logits[:, :1], ("a",),
                    [("a",)] * len(rows.labels), rows.held_out)  # fmt: skip
    detector, note = fit_detector(alone)
    assert detector is not None
    assert "fewer than two domains" in note


def test_a_router_without_a_detector_is_as_before_there_were_any(tmp_path: Path) -> None:
    """In bytes, and in the digest that logs of gaps have. Both were taken then."""
    header = router_header()
    network = MetaRouter(6, 2, 4)
    network.load_weights([*random_tensors(header).items()])
    assert router_digest(header, network) == "442745999f6b8e4b"
    sha256 = write_router(tmp_path / "r.safetensors", random_tensors(header), header)
    assert sha256 == "7d04fba0a1010655a8638e846d335a6c56497c08855be29299f31ba5910dd769"


@pytest.mark.parametrize(
    ("test", "layer", "references"),
    [
        ("energy", 3, 0), ("energy", 0, 2), ("mahalanobis", 0, 2), ("nearest prompt", 3, 0),
        ("tokens", 3, 2), ("tokens", 0, 0),
    ],
)  # fmt: skip
def test_a_part_without_what_it_compares_with_is_none(
    test: Any, layer: int, references: int
) -> None:
    rule = GapRule((GapPart(test, layer, references, 0, 0.0, 1.0),), 0.0)
    assert any("gaps" in problem for problem in router_header(gaps=rule).problems())


def test_a_detector_is_kept_with_its_router(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows = made_rows(rng, 60, 4 * rng.normal(size=(3, 1, WIDTH)))
    detector = fitted(rows, (("nearest prompt", 3), ("energy", 0), ("tokens", 0)))
    network = MetaRouter(WIDTH, 3, 8, key=mx.random.key(0))
    header = RouterHeader(
        domains=DOMAINS, stacks=dict.fromkeys(DOMAINS, ()), base_model="m",
        base_fingerprint="0" * 64, input_dims=WIDTH, hidden_dims=8, gaps=detector.rule,
    )  # fmt: skip
    gaps = {name: mx.array(array) for name, array in detector.tensors.items()}
    tensors = {**router_tensors(network), **gaps}
    write_router(tmp_path / "r.safetensors", tensors, header)
    file = read_router(tmp_path / "r.safetensors")
    again = detector_of(file)
    assert again is not None
    assert again.rule == detector.rule
    asked = rows.means[:, 1:], [[19, 10**9, *t] for t in rows.tokens], rows.logits
    np.testing.assert_array_equal(again.strangeness(*asked), detector.strangeness(*asked))
    assert detector_of(RouterFile(header_without(header), router_tensors(network))) is None
    with pytest.raises(ValueError, match=r"gap\.0"):
        write_router(tmp_path / "s.safetensors", router_tensors(network), header)


def header_without(header: RouterHeader) -> RouterHeader:
    value = header.as_json()
    del value["gaps"]
    assert "gaps" not in RouterHeader.from_json(value).as_json()
    return RouterHeader.from_json(value)


@pytest.mark.parametrize(
    ("count", "layers"), [(1, (1,)), (6, (1, 2, 3, 4, 6)), (30, (1, 8, 15, 22, 30))]
)
def test_layers_to_compare(count: int, layers: tuple[int, ...]) -> None:
    assert candidate_layers(count) == layers

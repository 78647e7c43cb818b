"""Spectra, directions and cosines of stacks against dense deltas and NumPy's own SVD.

Run: pytest tests/studies/stack/test_analysis_geometry.py
"""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.layers import spectrum as spectra
from mlxstacks.layers.latent import LatentPair, orthonormal_columns
from mlxstacks.layers.moe_lora import Rows
from mlxstacks.layers.packed import FrozenStack, PackedStacks
from mlxstacks.layers.spectrum import Spectrum, blocks_of, input_direction, spectrum_of
from mlxstacks.studies.stack.geometry import (
    chance_cosine,
    cosines,
    energy_inside,
    leading,
    mean_spectrum,
    overlaps,
    projection_name,
)
from tests.layers.build import K, M, N, normal, random_stack

FORMS = ["linear", "shared", "per_expert"]


def dense(stack: FrozenStack) -> np.ndarray:
    """M = scale * [B_1 A_1, ...] (N, blocks * K), made in full, expert by expert."""
    shape = stack.shape
    a, b = np.array(stack.lora_a, np.float64), np.array(stack.lora_b, np.float64)
    parts = []
    if shape.form == "per_expert":
        for m in range(M):
            for e in range(shape.num_experts):
                ranks = slice(e * shape.rank, (e + 1) * shape.rank)
                parts.append(b[m][:, ranks] @ a[m][ranks])
    else:
        parts = [b[e] @ a[e] for e in range(shape.num_experts)]
    return shape.scale * np.concatenate(parts, axis=1)


def same_span(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.allclose(one @ one.T, other @ other.T, atol=1e-6))


@pytest.mark.parametrize("form", FORMS)
def test_the_input_direction_is_that_of_the_dense_deltas_below_each_other(form: str) -> None:
    stack = random_stack(form, rank=2, num_experts=2)
    across = np.split(dense(stack), 2 * (M if form == "per_expert" else 1), axis=1)
    _, _, right = np.linalg.svd(np.concatenate(across), full_matrices=False)
    found = input_direction(blocks_of(stack))
    assert abs(found @ right[0]) == pytest.approx(1, abs=1e-9)
    assert not input_direction([(np.zeros((N, 2)), np.ones((2, K)))]).any()


@pytest.mark.parametrize("form", FORMS)
def test_a_spectrum_is_that_of_the_dense_delta(form: str) -> None:
    stack = random_stack(form, rank=2, num_experts=2)
    full = dense(stack)
    left, values, _ = np.linalg.svd(full, full_matrices=False)
    found = spectrum_of(blocks_of(stack))
    count = min(len(values), len(found.values))
    assert np.allclose(found.values[:count], values[:count], rtol=1e-9, atol=1e-9 * values[0])
    assert values[count:].sum() < 1e-9 * values[0]
    assert math.isclose(found.energy, float(np.sum(full**2)), rel_tol=1e-9)
    assert same_span(leading(found, 3), left[:, :3])
    assert found.complete


@pytest.mark.parametrize("form", FORMS)
def test_the_iteration_for_many_ranks_finds_the_same(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = random_stack(form, rank=2, num_experts=2)
    exact = spectrum_of(blocks_of(stack))
    monkeypatch.setattr(spectra, "EXACT_RANKS", 1)
    found = spectrum_of(blocks_of(stack))
    count = min(len(exact.values), len(found.values))
    assert np.allclose(
        found.values[:count], exact.values[:count], rtol=1e-6, atol=1e-6 * exact.values[0]
    )
    assert math.isclose(found.energy, exact.energy, rel_tol=1e-9)
    assert same_span(leading(found, 3), leading(exact, 3))


def test_a_cut_spectrum_says_so_and_knows_all_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectra, "EXACT_RANKS", 1)
    monkeypatch.setattr(spectra, "LEADING", 4)
    stack = random_stack("linear", rank=3, num_experts=4)
    found, full = spectrum_of(blocks_of(stack)), dense(stack)
    values = np.linalg.svd(full, compute_uv=False)
    assert (found.complete, len(found.values), found.effective_rank()) == (False, 4, None)
    assert np.allclose(found.values, values[:4], rtol=1e-2)
    assert math.isclose(found.energy, float(np.sum(values**2)), rel_tol=1e-9)


def test_latent_projections_are_multiplied_in() -> None:
    rng = np.random.default_rng(0)
    pair = LatentPair(
        mx.array(orthonormal_columns(K, 8, rng).T), mx.array(orthonormal_columns(N, 8, rng))
    )
    stack = random_stack("linear", latent=pair, rank=2, num_experts=2)
    inner = FrozenStack(stack.id, stack.shape, stack.lora_a, stack.lora_b, stack.router)
    latent_stack = FrozenStack(
        stack.id,
        type(stack.shape)("linear", 2, 2, 2, stack.shape.scale, pair),
        inner.lora_a,
        inner.lora_b,
        inner.router,
    )
    d_in, d_out = np.array(pair.d_in, np.float64), np.array(pair.d_out, np.float64)
    a, b = np.array(stack.lora_a, np.float64), np.array(stack.lora_b, np.float64)
    full = stack.shape.scale * np.concatenate([d_out @ b[e] @ a[e] @ d_in for e in range(2)], 1)
    values = np.linalg.svd(full, compute_uv=False)[:4]
    assert np.allclose(spectrum_of(blocks_of(latent_stack)).values[:4], values, rtol=1e-6)


def test_outputs_of_a_stack_lie_in_its_directions() -> None:
    """The law that makes the directions worth looking at: what is served lies in their span."""
    stack = random_stack("linear", rank=1, num_experts=3)
    stacks = PackedStacks()
    stacks.replace_all([stack])
    delta = np.array(stacks(normal(5, 50, K), Rows()), np.float64)
    vectors = leading(spectrum_of(blocks_of(stack)), 99)
    assert vectors.shape == (N, 3)
    assert np.abs(delta - delta @ vectors @ vectors.T).max() < 1e-5 * np.abs(delta).max()


def test_overlap_against_the_dense_deltas() -> None:
    one, other = (random_stack(seed=seed, domain=name) for seed, name in ((1, "a"), (2, "b")))
    stacks = {"here": [one, other], "there": [one]}
    found = overlaps(stacks, other.id.domain, 3)
    left, _, _ = np.linalg.svd(dense(one), full_matrices=False)
    own, vectors = dense(other), left[:, :3]
    wanted = np.sum((vectors.T @ own) ** 2) / np.sum(own**2)
    assert found == {one.id.domain: {"share": pytest.approx(wanted), "chance": 3 / len(own)}}
    blocks = blocks_of(one)
    assert energy_inside(blocks, left) == pytest.approx(1.0)
    assert overlaps({"there": [one]}, other.id.domain, 3) == {}


def spectrum(*values: float) -> Spectrum:
    found = np.array(values)
    return Spectrum(found, np.eye(len(values)), float(np.sum(found**2)), True)


def test_ranks_by_hand() -> None:
    flat, single = spectrum(2, 2, 2, 2), spectrum(3, 0, 0)
    assert flat.effective_rank() == pytest.approx(4)
    assert flat.stable_rank() == pytest.approx(4)
    assert single.effective_rank() == pytest.approx(1)
    # shares 3/4 and 1/4: entropy 0.5623 nats
    assert spectrum(3, 1).effective_rank() == pytest.approx(math.exp(0.5623351446188083))
    assert spectrum(3, 1).stable_rank() == pytest.approx(10 / 9)
    zero = spectrum(0, 0)
    assert (zero.effective_rank(), zero.stable_rank()) == (None, None)
    assert leading(zero, 2).shape == (2, 0)
    assert mean_spectrum([spectrum(4, 2, 1), spectrum(2, 2), zero]) == pytest.approx([1, 0.75])


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4))
def test_cosines_against_the_full_product(seed: int, first: int, second: int) -> None:
    rng = np.random.default_rng(seed)
    a, _ = np.linalg.qr(rng.standard_normal((12, first)))
    b, _ = np.linalg.qr(rng.standard_normal((12, second)))
    [found] = cosines({"layers.0.q_proj": {"chat": a, "code": b}})
    by_hand = max(abs(float(a[:, i] @ b[:, j])) for i in range(first) for j in range(second))
    assert found.largest == pytest.approx(by_hand)
    # the cosine of the smallest angle: the largest norm of a unit vector of one span in the other
    projector = a @ a.T @ b @ b.T
    assert found.subspace == pytest.approx(np.linalg.norm(projector, 2), abs=1e-9)
    assert found.largest <= found.subspace + 1e-12


def test_equal_and_orthogonal_directions() -> None:
    eye = np.eye(6)
    same, apart = eye[:, :2], eye[:, 2:4]
    table: dict[str, Any] = {"p": {"a": same, "b": same[:, ::-1], "c": apart, "d": eye[:, :0]}}
    found = {c.domains: (c.largest, c.subspace) for c in cosines(table)}
    assert found == {("a", "b"): (1, 1), ("a", "c"): (0, 0), ("b", "c"): (0, 0)}


def test_chance_is_what_random_frames_give() -> None:
    """One direction each in N dims: the mean |cosine| is sqrt(2 / (pi N)) for large N."""
    assert chance_cosine(400, 1, 1) == pytest.approx(math.sqrt(2 / (math.pi * 400)), rel=0.3)
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(200):
        a, _ = np.linalg.qr(rng.standard_normal((64, 4)))
        b, _ = np.linalg.qr(rng.standard_normal((64, 4)))
        drawn.append(np.abs(a.T @ b).max())
    assert chance_cosine(64, 4, 4) == pytest.approx(float(np.mean(drawn)), rel=0.1)
    assert chance_cosine(4, 4, 4) > chance_cosine(256, 4, 4)


def test_projection_names() -> None:
    assert projection_name("language_model.model.layers.12.mlp.down_proj") == "mlp.down_proj"
    assert projection_name("odd.path") == "odd.path"

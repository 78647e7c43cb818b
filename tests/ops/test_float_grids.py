"""MLX's FP4 and FP8 modes in NumPy, against MLX itself, and the laws of the policies on them.

Run: pytest tests/ops/test_float_grids.py
"""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.fuse.blocks import Decision, StageInput, run_stages
from mlxstacks.fuse.fidelity import fidelity
from mlxstacks.ops import affine
from mlxstacks.ops.float_grids import MODES, FloatGroups, Mode, quantize, requantize
from mlxstacks.ops.policies import Change, Groups

modes = st.sampled_from(list(MODES.values()))
seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([0.02, 0.1, 0.5, 2.0])
DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.cpu)


def random_values(mode: Mode, seed: int, rows: int = 24) -> np.ndarray:
    """Groups of many sizes, of zeros, of one number, and of ties between elements."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, mode.group_size)).astype(np.float32)
    values *= np.exp2(random.integers(-9, 6, (rows, 1))).astype(np.float32)
    values[0] = 0
    values[1] = -0.3
    values[2] = np.round(values[2] * 4) / 4
    values[3, 1:] = 0
    return values


def random_groups(mode: Mode, seed: int) -> FloatGroups:
    """As MLX makes them, and some that no quantizer would make."""
    random = np.random.default_rng(seed)
    codes, scales = quantize(random_values(mode, seed), mode)
    if mode.bits == 4:
        codes[-2:] = random.integers(0, 16, codes[-2:].shape)
    return FloatGroups(codes, scales, mode, "BF16")


def change_of(groups: FloatGroups, size: float, seed: int, **options: object) -> Change:
    """A delta of so many steps."""
    random = np.random.default_rng(seed + 1)
    delta = random.standard_normal(groups.codes.shape).astype(np.float32)
    delta *= groups.steps()[:, None] * np.float32(size)
    uniform = random.random(delta.shape, dtype=np.float32)
    return Change(delta, uniform=uniform, **options)  # type: ignore[arg-type]


def zero(groups: FloatGroups, **options: object) -> Change:
    return change_of(groups, 0.0, 0, **options)


@given(modes, seeds, st.sampled_from(list(DTYPES)))
def test_quantize_and_values_are_mlx_s_to_the_bit(mode: Mode, seed: int, dtype: str) -> None:
    weight = mx.array(random_values(mode, seed)).astype(DTYPES[dtype])
    packed, scales = mx.quantize(weight, mode=mode.name)
    codes, own = quantize(np.array(weight.astype(mx.float32)), mode)
    np.testing.assert_array_equal(mode.pack(codes), np.array(packed))
    np.testing.assert_array_equal(own, np.array(scales).reshape(-1))
    np.testing.assert_array_equal(mode.unpack(np.array(packed)), codes)
    values = mx.dequantize(packed, scales, mode=mode.name).astype(mx.float32)
    np.testing.assert_array_equal(FloatGroups(codes, own, mode, "BF16").values(), np.array(values))


@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_every_element_is_mlx_s_and_encodes_to_itself(mode: Mode) -> None:
    shape = 256 // mode.group_size, mode.group_size
    codes = np.resize(np.arange(1 << mode.bits, dtype=np.uint8), shape)
    scales = np.full(len(codes), 127 if mode.name != "nvfp4" else 56, np.uint8)  # 1
    found = FloatGroups(codes, scales, mode, "BF16").values()
    packed, columns = mx.array(mode.pack(codes)).reshape(1, -1), mx.array(scales).reshape(1, -1)
    values = np.array(mx.dequantize(packed, columns, mode=mode.name).astype(mx.float32))
    np.testing.assert_array_equal(found, values.reshape(found.shape))
    finite = np.isfinite(found)
    np.testing.assert_array_equal(mode.element.encode(found[finite]), codes[finite])


@given(modes, seeds)
def test_at_zero_delta_nothing_changes(mode: Mode, seed: int) -> None:
    groups = random_groups(mode, seed)
    for policy in ("keep", "nearest", "stochastic"):
        same = requantize(groups, zero(groups), policy)
        np.testing.assert_array_equal(same.codes, groups.codes)
        np.testing.assert_array_equal(same.scales, groups.scales)


@given(seeds, st.sampled_from([5, 6, 8]), st.sampled_from(["BF16", "F32"]))
def test_a_finer_affine_grid_holds_every_value_of_mxfp4(seed: int, bits: int, dtype: str) -> None:
    groups = random_groups(MODES["mxfp4"], seed)
    groups = FloatGroups(groups.codes, groups.scales, groups.mode, dtype)
    finer = requantize(groups, zero(groups, bits=bits), "promote")
    assert isinstance(finer, Groups)
    np.testing.assert_array_equal(finer.values(), groups.values())


@given(modes, seeds, sizes)
def test_nearest_is_no_farther_than_keep_or_refit(mode: Mode, seed: int, size: float) -> None:
    groups = random_groups(mode, seed)
    change = change_of(groups, size, seed)
    target = groups.values().astype(np.float64) + change.delta
    errors = {
        policy: ((requantize(groups, change, policy).values() - target) ** 2).sum(axis=1)
        for policy in ("keep", "refit", "nearest")
    }
    best = np.minimum(errors["keep"], errors["refit"])
    assert (errors["nearest"] <= best * (1 + 1e-5) + 1e-30).all()


@given(modes, seeds, sizes)
def test_keep_takes_the_nearest_value_under_the_old_scale(
    mode: Mode, seed: int, size: float
) -> None:
    """Found by trying all elements."""
    groups = random_groups(mode, seed)
    change = change_of(groups, size, seed)
    target = groups.values() + change.delta
    scales = mode.scale_values(groups.scales)
    elements = mode.element.values[np.isfinite(mode.element.values)]
    distances = np.abs(target[..., None] - scales[:, None, None] * elements)
    kept = requantize(groups, change, "keep")
    np.testing.assert_array_equal(kept.scales, groups.scales)
    np.testing.assert_array_equal(np.abs(kept.values() - target), distances.min(axis=-1))


@given(modes, seeds)
def test_stochastic_rounding_is_right_on_average(mode: Mode, seed: int) -> None:
    """Between two elements, with the chance of the nearer one; inside the range."""
    random = np.random.default_rng(seed)
    groups = random_groups(mode, seed)
    largest = mode.element.largest * mode.scale_values(groups.scales)[:, None]
    change = change_of(groups, 0.3, seed)
    inside = np.abs(groups.values() + change.delta) < largest
    draws, total = 400, np.zeros(groups.codes.shape)
    for _ in range(draws):
        uniform = random.random(groups.codes.shape, dtype=np.float32)
        total += requantize(groups, Change(change.delta, uniform=uniform), "stochastic").values()
    mean = total / draws - groups.values()
    widest = 4 * groups.steps().max() * 4 / np.sqrt(draws)
    assert (np.abs(mean - change.delta)[inside] <= widest).all()
    error = (mean - change.delta)[inside].sum() / np.sqrt((change.delta[inside] ** 2).sum() + 1e-30)
    assert abs(error) < 5


def fused(groups: Groups | FloatGroups, delta: np.ndarray, policy: str, bits: int | None) -> object:
    _, sums = run_stages(groups, [StageInput(Decision(policy, bits), delta)])
    return fidelity(sums[0])


def test_what_a_refit_does_to_a_gaussian_matrix() -> None:
    """Changed by a refit alone: an eighth of affine 4-bit codes, no value of mxfp4 and mxfp8, few
    of nvfp4. A delta of a tenth of a step is lost in all of them (benchmarks/RESULTS.md).
    """
    weights = np.random.default_rng(0).standard_normal((4096, 128)).astype(np.float32) * 0.02
    weights = affine.round_to(weights, "BF16")
    changed, correlation = {}, {}
    for name in ("affine", *MODES):
        if name == "affine":
            codes, scales, biases = affine.quantize(weights.reshape(-1, 64), 4, "BF16")
            groups: Groups | FloatGroups = Groups(codes, scales, biases, 4, "BF16")
            steps = np.abs(scales)
        else:
            mode = MODES[name]
            codes, own = quantize(weights.reshape(-1, mode.group_size), mode)
            groups = FloatGroups(codes, own, mode, "BF16")
            steps = groups.steps()
        delta = np.random.default_rng(1).standard_normal(groups.codes.shape).astype(np.float32)
        delta *= np.float32(0.1 * steps.mean())
        found = fused(groups, delta, "refit", groups.bits)
        changed[name] = found.codes_changed_at_zero  # type: ignore[attr-defined]
        correlation[name] = found.correlation  # type: ignore[attr-defined]
        assert abs(found.delta_over_step - 0.1) < 0.001  # type: ignore[attr-defined]
    assert 0.12 < changed["affine"] < 0.135
    assert (changed["mxfp4"], changed["mxfp8"]) == (0, 0)
    assert 0.0001 < changed["nvfp4"] < 0.0006
    assert max(correlation[name] for name in ("affine", "mxfp4", "nvfp4")) < 0.25
    assert 0.4 < correlation["mxfp8"] < 0.5  # where weights are small its steps are too


def test_what_has_no_policy_or_no_draws_is_refused() -> None:
    groups = random_groups(MODES["mxfp4"], 0)
    with pytest.raises(ValueError, match="FP4 and FP8 groups have refit, keep"):
        requantize(groups, zero(groups), "dequantise")
    with pytest.raises(ValueError, match="uniform numbers"):
        requantize(groups, Change(np.zeros_like(groups.codes, np.float32)), "stochastic")

"""requant: its reference beside NumPy's policies, its kernel in the emulator, on a device if any.

Codes, scales and biases are compared to the bit. Run: pytest tests/ops/test_requant.py
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops import affine
from mlxstacks.ops.low_rank import low_rank_delta
from mlxstacks.ops.policies import POLICIES, Change, Groups, refit_and_control, requantize
from mlxstacks.ops.requant import SUM_NAMES, Requantized, lay_out, requant
from tests.cases import MX_DTYPES, Grid
from tests.conftest import SOAK
from tests.metal_emulator import VARIANTS, Variant, emulated, gathered, unavailable, variant
from tests.ops.requant_cases import (
    ALL_CASES,
    FIRST_CASES,
    LORA_CASES,
    Call,
    Case,
    make,
    reference_cases,
)

CASES = FIRST_CASES + LORA_CASES
VARIANT_CASES = [
    next(c for c in FIRST_CASES if c.policy == policy and c.grid.bits == bits)
    for policy, bits in (("refit", 3), ("keep", 5), ("nearest", 4), ("promote", 3))
] + [LORA_CASES[2], LORA_CASES[3]]
# One float32 sum of thousands of terms beside one in float64; and a value of the new weights less
# one of the old, each rounded to 24 bits.
SUM_RTOL, VALUE_ERROR = 2e-6, 2.0**-23


def assert_same(got: Requantized, wanted: Requantized) -> None:
    """The same bits, and sums of the same terms in another order."""
    for name in ("packed", "scales", "biases"):
        left, right = getattr(got, name), getattr(wanted, name)
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert mx.array_equal(left.view(mx.uint8), right.view(mx.uint8)).item(), name


def as_groups(made: Requantized, case: Case) -> Groups:
    """What requant returned, as NumPy's policies return it."""
    codes = affine.unpack(np.array(made.packed), case.bits_after)
    scales, biases = (np.array(x.astype(mx.float32)).ravel() for x in (made.scales, made.biases))
    codes = codes.reshape(-1, case.grid.group_size)
    return Groups(codes, scales, biases, case.bits_after, case.grid.dtype)


def assert_is_the_policy(made: Requantized, call: Call, case: Case, delta: mx.array) -> None:
    """Equal to NumPy's policy for this delta, to the bit; sums as in float64."""
    wanted = requantize(call.groups, call.change(delta), case.policy)
    found = as_groups(made, case)
    for name in ("codes", "scales", "biases"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)
    assert_sums(np.array(made.sums), call, case, np.array(delta), wanted)


def assert_sums(
    sums: np.ndarray, call: Call, case: Case, delta: np.ndarray, wanted: Groups
) -> None:
    """Each row's sums beside the same in float64, as far as float32 values can tell."""
    leading, width = case.shape
    rows = int(np.prod(leading))
    assert sums.shape == (rows, len(SUM_NAMES))
    found = dict(zip(SUM_NAMES, sums.T.astype(np.float64), strict=True))

    def by_row(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float64).reshape(rows, width)

    def change_of(groups: Groups) -> np.ndarray:
        return by_row(groups.values() - call.groups.values())

    weight, intended, fused = by_row(call.groups.values()), by_row(delta), change_of(wanted)
    largest = np.maximum(np.abs(weight), np.abs(weight + fused))
    noise = VALUE_ERROR * np.maximum(largest, np.abs(weight + intended))
    at_zero, drift = None, np.zeros_like(weight)
    if case.control and case.policy == "refit":
        at_zero = refit_and_control(call.groups, call.change(mx.array(delta)))[1]
        assert at_zero is not None
        drift = change_of(at_zero)
    terms = {
        "fused_delta": (fused, intended),
        "delta_delta": (intended, intended),
        "error_error": (fused - intended, fused - intended),
        "fused_fused": (fused, fused),
        "weight_weight": (weight, weight),
        "zero_zero": (drift, drift),
    }
    for name, (left, right) in terms.items():
        blur = SUM_RTOL * np.abs(left * right) + noise * (np.abs(left) + np.abs(right) + noise)
        assert (np.abs(found[name] - (left * right).sum(1)) <= blur.sum(1)).all(), name
    before = call.groups.codes.astype(int) << max(0, case.bits_after - case.grid.bits)
    changed = {"codes_changed": wanted, "codes_changed_at_zero": at_zero}
    for name, groups in changed.items():
        count = 0 if groups is None else (groups.codes != before).reshape(rows, width).sum(1)
        np.testing.assert_array_equal(found[name], count, name)
    steps = np.abs(call.groups.scales.astype(np.float64)).reshape(rows, -1).sum(1)
    np.testing.assert_allclose(found["step_sum"], steps, rtol=SUM_RTOL)


# --- the reference --------------------------------------------------------------------------------


def test_reference_is_the_policy_in_every_grid_and_width() -> None:
    cases = list(reference_cases(every=1 if SOAK else 4))
    assert len(cases) > (600 if SOAK else 150)
    for case in cases:
        call = make(case)
        assert_is_the_policy(call(use_kernel=False), call, case, call.named["delta"])


@pytest.mark.parametrize("case", LORA_CASES, ids=str)
def test_reference_makes_its_delta_from_the_factors(case: Case) -> None:
    call = make(case)
    delta = low_rank_delta(*call.positional[3:])
    assert_is_the_policy(call(use_kernel=False), call, case, delta)


def test_reference_broadcasts_factors_over_experts() -> None:
    call = make(replace(LORA_CASES[4], shape=((3, 4), 128)))
    packed, scales, biases, lora_a, lora_b, scale = call.positional
    one = requant(packed, scales, biases, lora_a[:1], lora_b, scale, **call.named)
    for_each = mx.repeat(lora_a[:1], 3, axis=0)
    assert_same(one, requant(packed, scales, biases, for_each, lora_b, scale, **call.named))


def test_zero_delta_returns_what_was_given() -> None:
    for policy in ("keep", "nearest", "stochastic"):
        call = make(Case(Grid(3, 64, "BF16"), policy))
        made = call(use_kernel=False, delta=mx.zeros_like(call.named["delta"]))
        assert mx.array_equal(made.packed, call.positional[0]).item()
        assert mx.array_equal(made.scales, call.positional[1]).item()
        assert mx.array_equal(made.biases, call.positional[2]).item()


# --- the kernel, in the emulator ------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernels of the common cases, compiled together."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with emulated(), gathered():
        for case in CASES:
            make(case)(use_kernel=True)


def assert_kernel_is_right(case: Case) -> None:
    """The kernel where it runs now, beside the reference on the CPU and NumPy."""
    call = make(case)
    made = call(use_kernel=True)
    with mx.stream(mx.cpu):
        wanted = call(use_kernel=False)
    assert_same(made, wanted)
    delta = call.named.get("delta")
    if delta is None:
        delta = low_rank_delta(*call.positional[3:])
    assert_is_the_policy(made, call, case, delta)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_equals_the_reference(compiled: None, emulator: None, case: Case) -> None:
    assert_kernel_is_right(case)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_kernel_equals_the_reference_in_every_grid_and_width(emulator: None, policy: str) -> None:
    cases = [case for case in ALL_CASES if case.policy == policy]
    with gathered():
        for case in cases:
            make(case)(use_kernel=True)
    for case in cases:
        assert_kernel_is_right(case)


@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
@pytest.mark.parametrize("case", VARIANT_CASES, ids=str)
def test_kernel_gives_the_same_bits_however_it_is_run(
    compiled: None, emulator: None, case: Case, chosen: Variant
) -> None:
    call = make(case)
    first = call(use_kernel=True)
    with variant(chosen):
        again = call(use_kernel=True)
    assert_same(again, first)
    assert mx.array_equal(again.sums, first.sums).item()


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_kernel_divides_as_a_division_does(emulator: None, dtype: str) -> None:
    """Quotients at, just above and just below the middle between two codes, of 4,096 scales."""
    random = np.random.default_rng(11)
    rows, width = 32, 4096
    scales = np.exp2(random.uniform(-12, 4, (rows * width // 32,))).astype(np.float32)
    scales[::3] *= -1
    scales = affine.round_to(scales, dtype)
    codes = np.full((len(scales), 32), 128, dtype=np.uint8)
    middles = random.integers(-100, 100, codes.shape).astype(np.float32) + np.float32(0.5)
    delta = (middles * scales[:, None]).view(np.int32)
    delta = (delta + random.integers(-2, 3, codes.shape, dtype=np.int32)).view(np.float32)
    groups = Groups(codes, scales, np.zeros_like(scales), 8, dtype)
    exact = np.rint(delta / scales[:, None])
    # Each of them is a case where the quotient before its rounding would fall elsewhere, or close.
    nearly = np.abs(delta.astype(np.float64) / scales[:, None] - middles)
    assert (nearly < 1e-4).all()
    stored = mx.array(scales.reshape(rows, -1)).astype(mx.float32 if dtype == "F32" else mx.float16)
    made = requant(
        mx.array(affine.pack(codes.reshape(rows, width), 8)), stored, mx.zeros_like(stored),
        None, None, 1.0, policy="keep", group_size=32, bits=8, use_kernel=True,
        delta=mx.array(delta.reshape(rows, width)),
    )  # fmt: skip
    found = affine.unpack(np.array(made.packed), 8).reshape(codes.shape)
    np.testing.assert_array_equal(found, groups.codes + exact)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_kernel_divides_at_the_ends_of_float32(emulator: None, dtype: str) -> None:
    """Scales and deltas whose reciprocals and quotients leave the range of float32."""
    random = np.random.default_rng(12)
    scales = np.exp2(random.uniform(-125, 125, (512,))).astype(np.float32)
    scales = affine.round_to(scales, dtype)
    codes = random.integers(0, 16, (512, 32), dtype=np.uint8)
    with np.errstate(over="ignore"):
        steps = np.exp2(random.uniform(-3, 3, codes.shape)) * scales[:, None].astype(np.float64)
        steps[::4] *= 2.0**40
        steps[::5] = 2.0**100
        steps[::7] = 2.0**-120
        delta = np.clip(steps, -(2.0**127), 2.0**127).astype(np.float32)
        delta[::2] *= -1
        groups = Groups(codes, scales, np.zeros_like(scales), 4, dtype)
        wanted = requantize(groups, Change(delta), "keep")
    stored = mx.array(scales.reshape(16, 32)).astype(MX_DTYPES[dtype])
    made = requant(
        mx.array(affine.pack(codes.reshape(16, 1024), 4)), stored, mx.zeros_like(stored),
        None, None, 1.0, policy="keep", group_size=32, bits=4, use_kernel=True,
        delta=mx.array(delta.reshape(16, 1024)),
    )  # fmt: skip
    found = affine.unpack(np.array(made.packed), 4).reshape(codes.shape)
    np.testing.assert_array_equal(found, wanted.codes)


def uniform_groups(
    value: float, code: int, bits: int, scale: float
) -> tuple[mx.array, mx.array, mx.array]:
    """Packed codes, scales and biases (float32) of 4 rows of 8 groups with one value each."""
    codes = np.full((4, 256), code, dtype=np.uint8)
    scales = mx.full((4, 8), scale)
    return mx.array(affine.pack(codes, bits)), scales, mx.full((4, 8), value)


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize(("policy", "wide"), [("refit", 8), ("nearest", 6), ("promote", 8)])
def test_equal_values_too_large_for_a_step_have_code_zero(
    emulator: None, policy: str, wide: int, use_kernel: bool
) -> None:
    """The fitted scale underflows to 0, and (value - bias) / scale is not a number."""
    weights, delta = uniform_groups(4.7e31, 0, 6, 0.0), mx.zeros((4, 256))
    made = requant(
        *weights, None, None, 1.0, policy=policy, group_size=32, bits=6, new_bits=wide,
        delta=delta, use_kernel=use_kernel,
    )  # fmt: skip
    assert not np.array(made.packed).any()
    np.testing.assert_array_equal(np.array(made.biases), np.float32(4.7e31))


@pytest.mark.parametrize("use_kernel", [False, True])
def test_sums_of_a_large_scale_are_numbers_where_nothing_moves(
    emulator: None, use_kernel: bool
) -> None:
    """The square of the scale is beyond float32."""
    for policy in ("keep", "stochastic"):
        made = requant(
            *uniform_groups(-8e19, 3, 4, 4e19), None, None, 1.0, policy=policy, group_size=32,
            bits=4, delta=mx.zeros((4, 256)), uniform=mx.zeros((4, 256)), use_kernel=use_kernel,
        )  # fmt: skip
        sums = dict(zip(SUM_NAMES, np.array(made.sums).T, strict=True))
        for name in ("fused_delta", "delta_delta", "error_error", "fused_fused", "codes_changed"):
            assert not sums[name].any(), name


def test_kernel_fuses_the_steps_of_its_chain(emulator: None) -> None:
    """a + x * y where a is -x * y rounded: only a fused operation leaves the rounding error."""
    random = np.random.default_rng(13)
    x = random.uniform(1, 2, (8, 1, 256)).astype(np.float32)
    y = random.uniform(1, 2, (8, 1, 1)).astype(np.float32)
    lora_a = mx.array(np.concatenate([-(x * y), x], axis=1))  # (E, 2, K)
    lora_b = mx.array(np.concatenate([np.ones_like(y), y], axis=2))  # (E, 1, 2)
    delta = np.array(low_rank_delta(lora_a, lora_b, 1.0))
    np.testing.assert_array_equal(delta, x * y.astype(np.float64) - x * y)
    assert (np.abs(delta) > 2.0**-27).mean() > 0.8
    scales = mx.full((8, 1, 8), 2.0**-28)
    packed = mx.array(affine.pack(np.full((8, 1, 256), 128, np.uint8), 8))
    made = requant(
        packed, scales, mx.zeros_like(scales), lora_a, lora_b, 1.0,
        policy="keep", group_size=32, bits=8, use_kernel=True,
    )  # fmt: skip
    found = affine.unpack(np.array(made.packed), 8)
    np.testing.assert_array_equal(found, 128 + np.rint(delta * 2.0**28))


@pytest.mark.parametrize("policy", ["nearest", "promote"])
@pytest.mark.parametrize("group_size", affine.GROUP_SIZES)
def test_kernel_sums_squared_errors_in_the_order_of_the_rule(
    emulator: None, policy: str, group_size: int
) -> None:
    """A row of one group: its squared error is the number that the comparison used."""
    wide = 4 if policy == "promote" else None
    case = Case(Grid(3, group_size, "BF16"), policy, wide, ((64,), group_size))
    call = make(case)
    made, change = call(use_kernel=True), call.change(call.named["delta"])
    wanted = requantize(call.groups, change, policy)
    difference = wanted.values() - (call.groups.values() + change.delta)
    squares = (difference * difference).reshape(-1)
    while squares.size > 64:
        squares = squares[0::2] + squares[1::2]
    errors = np.array(made.sums)[:, SUM_NAMES.index("error_error")]
    np.testing.assert_array_equal(errors, squares)


def test_kernel_takes_views(compiled: None, emulator: None) -> None:
    """Arrays that are not contiguous, and one that begins in the middle of another."""

    def view(array: mx.array) -> mx.array:
        if array.ndim < 2:
            return array
        return mx.contiguous(mx.stack([mx.zeros_like(array), array], axis=-1))[..., 1]

    def swapped(array: mx.array) -> mx.array:
        return mx.contiguous(array.swapaxes(-1, -2)).swapaxes(-1, -2)

    for case in (LORA_CASES[0], LORA_CASES[2], FIRST_CASES[1]):
        call = make(case)
        wanted = call(use_kernel=False)
        for change in (view, swapped):
            positional = [change(x) if isinstance(x, mx.array) else x for x in call.positional]
            named = {k: change(x) if isinstance(x, mx.array) else x for k, x in call.named.items()}
            assert_same(requant(*positional, **named, use_kernel=True), wanted)


@pytest.mark.parametrize("width", [128, 256, 384])
def test_layout_of_a_puts_pairs_side_by_side_and_zeros_past_the_end(width: int) -> None:
    lora_a = mx.random.normal((2, 3, width), key=mx.random.key(0))
    pairs = np.array(lay_out(lora_a)).view(np.float32).reshape(2, -1, 3, 4, 32, 2)
    back = pairs.transpose(0, 2, 1, 4, 3, 5).reshape(2, 3, -1)  # (E, R, steps * 256)
    np.testing.assert_array_equal(back[..., :width], np.array(lora_a))
    assert not back[..., width:].any()


# --- on a device ----------------------------------------------------------------------------------


def test_kernel_equals_the_reference_on_a_device(gpu: None) -> None:
    for case in CASES:
        assert_kernel_is_right(case)

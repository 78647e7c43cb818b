"""The chunked recurrence against a float64 loop in NumPy and against mlx-lm's loop.

Run: pytest tests/ops/test_gated_delta.py
"""

import io
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.ops import gated_delta
from mlxstacks.ops.gated_delta import gated_delta_native, native_fits
from mlxstacks.ops.gated_delta_pairs import unit_lower_inverse
from tests.ops.gated_delta_loop import GATES, NAMES, Case, Options, loop, relative_error, wide

# Any number of arguments before a star, which its signature would not allow a type checker.
gated_delta_update: Callable[..., Any] = gated_delta.gated_delta_update

# Relative error in norm, of outputs and of every gradient. float32: the bar of DESIGN section 10.
# Half precision: a few roundings of the result; inside everything is float32.
TOLERANCE = {mx.float32: 1e-4, mx.bfloat16: 1e-2, mx.float16: 1e-3}


def run(function: Callable[..., Any], case: Case, **options: Any) -> list[mx.array]:
    """y, end state, and the gradients of every argument, for the cotangents of the case."""
    dy, dend = (mx.array(x) for x in case.cotangents())
    keyword = {"lower_bound": case.options.lower_bound, "mask": case.mask(), "use_kernel": False}
    keyword |= {"allow_neg_eigval": case.options.allow_neg_eigval} | options

    def outputs(*arrays: mx.array) -> list[mx.array]:
        return list(function(*arrays, **keyword))

    ends, gradients = mx.vjp(outputs, case.arrays(), [dy.astype(case.dtype), dend])
    return [*ends, *gradients]


def exact(case: Case) -> list[np.ndarray]:
    """The same from the float64 loop, which sees the rounded arguments."""
    dy, dend = case.cotangents()
    dy = wide(mx.array(dy).astype(case.dtype))
    mask = case.mask()
    arrays = [wide(x) for x in case.arrays()]
    ends, gradients = loop(arrays, None if mask is None else np.array(mask), dy, dend, case.options)
    return [*ends, *gradients]


def errors(got: list[mx.array], expected: list[np.ndarray]) -> dict[str, float]:
    names = ("y", "end state", *NAMES)
    return {
        name: relative_error(wide(x), y) for name, x, y in zip(names, got, expected, strict=True)
    }


def assert_close(got: list[mx.array], expected: list[np.ndarray], tolerance: float) -> None:
    found = errors(got, expected)
    assert all(error <= tolerance for error in found.values()), found


@pytest.fixture(scope="module")
def mlx_lm_update() -> Iterator[Callable[..., Any]]:
    """mlx-lm's function. Its compiled step would build a C++ kernel for each new shape."""
    from mlx_lm.models import gated_delta as theirs

    mx.disable_compile()
    yield theirs.gated_delta_update
    mx.enable_compile()


cases = st.builds(
    Case,
    B=st.integers(1, 2),
    T=st.sampled_from([1, 2, 7, 16, 33, 50]),
    Hk=st.integers(1, 2),
    groups=st.sampled_from([1, 2, 3]),
    Dk=st.sampled_from([2, 8]),
    Dv=st.sampled_from([3, 8]),
    gates=st.sampled_from(sorted(GATES)),
    vector=st.booleans(),
    masked=st.booleans(),
    equal_keys=st.booleans(),
    options=st.builds(Options, st.sampled_from([None, -5.0]), st.booleans()),
    seed=st.integers(0, 2**31),
)


@given(cases, st.sampled_from([1, 4, 16, 32]), st.sampled_from([8, 16, 64]))
def test_outputs_and_gradients_equal_the_float64_loop(case: Case, chunk: int, segment: int) -> None:
    got = run(gated_delta_update, case, chunk=chunk, segment=segment)
    assert_close(got, exact(case), TOLERANCE[mx.float32])


# The other two are among those compared with the float64 loop.
@pytest.mark.parametrize(("vector", "masked"), [(False, True), (True, False)])
@pytest.mark.parametrize("gates", sorted(GATES))
def test_outputs_and_gradients_equal_mlx_lm(mlx_lm_update, gates, masked, vector) -> None:
    for options in (Options(), Options(-5.0, True)):
        case = Case(gates=gates, masked=masked, vector=vector, options=options)
        theirs = run(mlx_lm_update, case)
        got = run(gated_delta_update, case)
        assert [x.dtype for x in got] == [x.dtype for x in theirs]
        assert_close(got, [wide(x) for x in theirs], TOLERANCE[mx.float32])


def test_35b_a3b_heads_equal_the_float64_loop() -> None:
    """A quarter of them, in their full size."""
    case = Case(B=1, T=130, Hk=4, groups=2, Dk=128, Dv=128)
    got = run(gated_delta_update, case)
    arrays, (dy, dend) = [wide(x) for x in case.arrays()], case.cotangents()
    parts = []
    for head in range(case.Hk):  # one at a time: the loop keeps every state
        one, two = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        q, k, v, a, b, A_log, dt_bias, state = arrays
        own = [q[:, :, one], k[:, :, one], *(x[:, :, two] for x in (v, a, b))]
        own += [A_log[two], dt_bias[two], state[:, two]]
        ends, gradients = loop(own, None, dy[:, :, two], dend[:, two], case.options)
        parts.append([*ends, *gradients])
    axes = (2, 1, 2, 2, 2, 2, 2, 0, 0, 1)
    whole = [
        np.concatenate(x, axis) for x, axis in zip(zip(*parts, strict=True), axes, strict=True)
    ]
    assert_close(got, whole, TOLERANCE[mx.float32])


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("gates", ["ordinary", "slow", "near one"])
def test_half_precision_is_no_worse_than_mlx_lm(mlx_lm_update, gates, vector, dtype) -> None:
    case = Case(T=64, gates=gates, vector=vector, dtype=dtype)
    expected = exact(case)
    got = run(gated_delta_update, case)
    assert [x.dtype for x in got] == [dtype, mx.float32, *[dtype] * 5, *[mx.float32] * 3]
    assert_close(got, expected, TOLERANCE[dtype])
    ours, theirs = (errors(x, expected) for x in (got, run(mlx_lm_update, case)))
    # Single sums may fall either way by chance; what carries most of the error may not.
    assert np.mean(list(ours.values())) <= np.mean(list(theirs.values()))
    assert all(ours[name] <= 1.1 * theirs[name] for name in ("y", "end state", "q", "k", "v"))


@pytest.mark.parametrize("vector", [False, True])
def test_gradients_of_gates_that_are_all_nearly_zero_keep_their_precision(vector: bool) -> None:
    """Differences of running sums would leave noise of 1e-7 where gradients of 1e-9 are due."""
    case = Case(T=40, gates="near zero", vector=vector, seed=3)
    arrays = case.arrays()
    arrays[5] = mx.full(arrays[5].shape, float(np.log(6.0)))
    expected = loop([wide(x) for x in arrays], None, *case.cotangents(), Options())
    dy, dend = (mx.array(x) for x in case.cotangents())
    ends, got = mx.vjp(lambda *x: list(gated_delta_update(*x)), arrays, [dy, dend])
    assert np.abs(expected[1][3]).max() < 0.05
    assert_close([*ends, *got], [*expected[0], *expected[1]], TOLERANCE[mx.float32])


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("cut", [1, 16, 30])
def test_a_carried_state_continues_the_sequence(cut: int, vector: bool) -> None:
    arrays = Case(vector=vector).arrays()
    tokens, (rate, bias, state) = arrays[:5], arrays[5:]
    y, end = gated_delta_update(*arrays, chunk=16)
    first, middle = gated_delta_update(*(x[:, :cut] for x in tokens), rate, bias, state, chunk=16)
    last, again = gated_delta_update(*(x[:, cut:] for x in tokens), rate, bias, middle, chunk=16)
    np.testing.assert_allclose(np.concatenate([first, last], axis=1), y, atol=2e-5)
    np.testing.assert_allclose(again, end, atol=2e-5)


def test_no_state_is_a_state_of_zeros() -> None:
    *arrays, state = Case().arrays()
    for x, y in zip(
        gated_delta_update(*arrays), gated_delta_update(*arrays, mx.zeros_like(state)), strict=True
    ):
        assert mx.array_equal(x, y)


@pytest.mark.parametrize("vector", [False, True])
def test_right_padding_leaves_the_state_of_the_shorter_sequence(vector: bool) -> None:
    arrays = Case(B=1, T=40, vector=vector).arrays()
    tokens, rest = arrays[:5], arrays[5:]
    mask = mx.arange(40)[None] < 29
    y, end = gated_delta_update(*arrays, mask=mask)
    short, short_end = gated_delta_update(*(x[:, :29] for x in tokens), *rest)
    np.testing.assert_allclose(y[:, :29], short, atol=1e-5)
    np.testing.assert_allclose(end, short_end, atol=1e-5)


def test_checkpointing_changes_no_bit() -> None:
    case = Case(T=20, masked=True)

    def checkpointed(*arrays: mx.array, mask: mx.array, **options: Any) -> Any:
        def inner(*arrays: mx.array) -> list[mx.array]:
            return list(gated_delta_update(*arrays, mask=mask, **options))

        return mx.checkpoint(inner)(*arrays)

    plain, again = (run(f, case, chunk=4, segment=8) for f in (gated_delta_update, checkpointed))
    assert all(mx.array_equal(x, y) for x, y in zip(plain, again, strict=True))


@pytest.mark.parametrize("vector", [False, True])
def test_compiling_a_step_keeps_the_numbers(vector: bool) -> None:
    case = Case(B=1, T=11, Hk=1, vector=vector)
    dy, dend = (mx.array(x) for x in case.cotangents())

    def step(*arrays: mx.array) -> list[mx.array]:
        ends, gradients = mx.vjp(
            lambda *x: list(gated_delta_update(*x, chunk=4, segment=8)), list(arrays), [dy, dend]
        )
        return [*ends, *gradients]

    compiled = mx.compile(step)
    for x, y in zip(compiled(*case.arrays()), step(*case.arrays()), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def graph_nodes(T: int) -> int:
    """Nodes of the graph of a forward and backward pass."""
    case = Case(B=1, T=T)
    dot = io.StringIO()
    mx.export_to_dot(dot, *run(gated_delta_update, case))
    return dot.getvalue().count("label")


def test_the_graph_grows_with_chunks_not_with_tokens() -> None:
    grown = (graph_nodes(1024) - graph_nodes(512)) / 512
    # mlx-lm's loop adds 104 nodes for each token.
    assert grown < 104 / 16


def peak_bytes(T: int, segment: int, layers: int = 1) -> int:
    """Peak memory of all gradients of `layers` recurrences, one after the other."""
    arguments = Case(B=1, T=T, Hk=4, Dk=32, Dv=32).arrays()
    mx.eval(arguments)

    def last(*arrays: mx.array) -> mx.array:
        q, k, v, *rest = arrays
        for _ in range(layers):
            v = mx.tanh(gated_delta_update(q, k, v, *rest, segment=segment)[0])
        return v.sum()

    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(last, argnums=tuple(range(8)))(*arguments))
    return mx.get_peak_memory() - before


def test_a_layer_leaves_little_behind() -> None:
    """Of each, its arguments stay until its gradient is due, and nothing of what it computed."""
    v_bytes = 512 * 8 * 32 * 4
    added = (peak_bytes(512, 128, layers=6) - peak_bytes(512, 128, layers=2)) / 4
    assert added < 4 * v_bytes


def test_segments_are_computed_one_at_a_time() -> None:
    """And only when their cotangents are there; not early, nor all together."""
    assert peak_bytes(1024, 256) < 0.45 * peak_bytes(1024, 1024)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_inverse_of_unit_lower_triangular(size: int) -> None:
    """Equal keys and beta = 2, the worst that the recurrence allows, and random ones."""
    random = np.random.default_rng(size)
    equal = np.full((size, size), 2.0)
    lower = np.tril(np.stack([equal, random.uniform(-1.0, 1.0, (size, size)) * 4 / size]), -1)
    got = np.array(unit_lower_inverse(mx.array(lower.astype(np.float32))))
    expected = np.linalg.inv(np.eye(size) + lower.astype(np.float32))
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_native_recurrence_rounds_gates_unless_all_is_float32(mlx_lm_update) -> None:
    """Why `gated_delta_native` widens: MLX's own function takes gates in the dtype of q."""
    case = Case(B=1, T=512, Dk=32, Dv=32, gates="slow", dtype=mx.bfloat16)
    q, k, v, a, b, A_log, dt_bias, state = case.arrays()
    gates, beta = gated_delta.log_gates(a, A_log, dt_bias), gated_delta.strengths(b)
    expected = exact(case)[:2]
    rounded = mx.fast.gated_delta_update(q, k, v, mx.exp(gates), beta, state)
    widened = gated_delta_native(q, k, v, gates, beta, state)
    assert widened[0].dtype == mx.bfloat16
    assert relative_error(wide(rounded[1]), expected[1]) > 2e-3
    assert relative_error(wide(widened[1]), expected[1]) < 1e-5
    assert relative_error(wide(widened[0]), expected[0]) < TOLERANCE[mx.bfloat16]


def test_native_fits_only_its_metal_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(Hk: int, groups: int, D: int, vector: bool = False) -> bool:
        q, _, v, a, *_ = Case(T=1, Hk=Hk, groups=groups, Dk=D, Dv=D, vector=vector).arrays()
        return native_fits(q, v, a)

    on_metal = mx.metal.is_available()
    assert fits(16, 2, 128) == on_metal
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert fits(16, 2, 128)
    assert fits(32, 1, 128)
    assert not fits(16, 2, 64)
    assert not fits(8, 2, 128)
    assert not fits(16, 2, 128, vector=True)


def test_native_is_taken_where_it_fits_and_never_in_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def counted(*arrays: mx.array) -> Any:
        calls.append(1)
        return gated_delta_native(*arrays)

    case = Case(T=9)
    monkeypatch.setattr(gated_delta, "native_fits", lambda *_: True)
    monkeypatch.setattr(gated_delta, "gated_delta_native", counted)
    chunked = run(gated_delta_update, case)
    assert not calls
    assert_close(run(gated_delta_update, case, use_kernel=True), [wide(x) for x in chunked], 1e-5)
    assert calls == [1]
    run(gated_delta_update, Case(T=9, masked=True), use_kernel=True)
    assert calls == [1]


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (Case(T=0), {}, "at least one token"),
        (Case(), {"chunk": 24}, "chunk is 24; it has to be a power of two"),
        (Case(), {"segment": 0}, "segment is 0"),
    ],
)
def test_refusals(case: Case, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gated_delta_update(*case.arrays(), **options)


def test_heads_that_do_not_divide_are_refused() -> None:
    q, k, *rest = Case(Hk=1, groups=3).arrays()
    with pytest.raises(ValueError, match="3 value heads do not divide among 2 key heads"):
        gated_delta_update(mx.repeat(q, 2, axis=2), mx.repeat(k, 2, axis=2), *rest)

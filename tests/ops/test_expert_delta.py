"""expert_delta: NumPy in float64, mlx-lm's own layer, its laws, its kernel in the emulator.

pytest tests/ops/test_expert_delta.py
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops import kernels
from mlxstacks.ops.expert_delta import MANY_ROWS, expert_delta
from tests.metal_emulator import VARIANTS, Variant, emulated, gathered, unavailable, variant
from tests.ops.expert_delta_cases import CASES, HALF_CASES, SCALE, Arguments, Case, make, sort
from tests.ops.low_rank_checks import assert_close, wide


def in_numpy(x, a, b, indices, gates) -> np.ndarray:
    """The formula of the module, row by row, in float64."""
    out = np.empty((*indices.shape, 1, b.shape[1]))
    x = np.broadcast_to(x, (*indices.shape, 1, x.shape[-1]))
    for at in np.ndindex(*indices.shape):
        z = a[indices[at]] @ x[at][0]
        if gates is not None:
            gate = np.broadcast_to(gates, (*indices.shape, 1, gates.shape[-1]))[at][0]
            z = z * np.repeat(gate, len(z) // len(gate))
        out[at][0] = SCALE * (b[indices[at]] @ z)
    return out


def expected(arguments: Arguments) -> np.ndarray:
    gates = None if arguments.gates is None else wide(arguments.gates)
    x, a, b = (wide(array) for array in (arguments.x, arguments.a, arguments.b))
    return in_numpy(x, a, b, np.array(arguments.indices), gates)


@pytest.mark.parametrize("case", CASES + HALF_CASES, ids=str)
def test_reference_equals_numpy(case):
    arguments = make(case)
    assert_close(arguments.call(use_kernel=False), expected(arguments), case.dtype)


@pytest.mark.parametrize("rows", [6, 96])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_without_gates_it_is_exactly_what_mlx_lm_adds(rows, is_sorted):
    from mlx_lm.tuner.lora import LoRASwitchLinear

    arguments = make(Case(tokens=(1, rows // 2), E=0))
    if is_sorted:
        arguments, _ = sort(arguments)
    layer = LoRASwitchLinear(63, 100, 5, r=8, scale=SCALE)
    layer.linear.weight = mx.zeros((5, 100, 63))
    layer.lora_a, layer.lora_b = arguments.a, arguments.b
    theirs = layer(arguments.x, arguments.indices, arguments.sorted_indices)
    assert mx.array_equal(arguments.call(), theirs).item()
    ones = mx.ones((*arguments.x.shape[:-1], 1))
    assert mx.array_equal(replace(arguments, gates=ones).call(), theirs).item()


@pytest.mark.parametrize("layout", ["shared", "own"])
def test_sorted_rows_give_what_unsorted_rows_give(layout):
    arguments = make(Case(tokens=(2, 20), choices=3, M=16, layout=layout))
    in_order, undo = sort(arguments)
    ours = in_order.call()[undo].reshape(*arguments.indices.shape, 1, 100)
    np.testing.assert_allclose(ours, arguments.call(), rtol=1e-6, atol=1e-6)


def test_a_gate_of_zero_is_a_slice_without_its_ranks():
    arguments = make(Case())
    kept = [1, 3]  # of four experts
    mask = mx.array([0.0, 1, 0, 1])
    ranks = [2 * e + q for e in kept for q in range(2)]
    gates = arguments.gates
    assert gates is not None
    sliced = replace(
        arguments, a=arguments.a[:, ranks], b=arguments.b[..., ranks], gates=gates[..., kept]
    )
    zeroed = replace(arguments, gates=gates * mask)
    np.testing.assert_allclose(zeroed.call(), sliced.call(), rtol=1e-6, atol=1e-6)


def test_gates_of_a_choice_may_go_with_an_input_for_all_choices():
    arguments = make(Case())
    mixed = replace(arguments, gates=make(Case(layout="own"), 1).gates)
    assert_close(mixed.call(), expected(mixed), mx.float32)


def test_no_rows_give_no_rows():
    x, indices = mx.zeros((0, 1, 63)), mx.zeros((0,), dtype=mx.uint32)
    none = replace(make(Case(E=0)), x=x, indices=indices, sorted_indices=True)
    assert none.call().shape == (0, 1, 100)


# --- gradients ----------------------------------------------------------------------------------


def gradients(arguments: Arguments, function, cotangent: mx.array) -> list[mx.array]:
    """Gradients of sum(cotangent * function) to x, a, b and, where there are any, gates."""

    def loss(x, a, b, *gates):
        made = replace(arguments, x=x, a=a, b=b, gates=gates[0] if gates else None)
        return (function(made) * cotangent).sum()

    floats = [arguments.x, arguments.a, arguments.b]
    floats += [] if arguments.gates is None else [arguments.gates]
    return list(mx.grad(loss, argnums=tuple(range(len(floats))))(*floats))


def cotangent_for(arguments: Arguments) -> mx.array:
    shape = (*arguments.indices.shape, 1, arguments.b.shape[1])
    values = np.random.default_rng(7).standard_normal(shape)
    return mx.array(values.astype(np.float32))


@pytest.mark.parametrize("case", CASES[:5], ids=str)
def test_gradients_equal_finite_differences(case):
    arguments = make(case)
    cotangent = cotangent_for(arguments)
    found = gradients(arguments, lambda made: made.call(), cotangent)
    values = [arguments.x, arguments.a, arguments.b, arguments.gates][: len(found)]
    base = [wide(value) for value in values]
    indices, random = np.array(arguments.indices), np.random.default_rng(8)

    def loss(floats: list[np.ndarray]) -> float:
        x, a, b, *gates = floats
        out = in_numpy(x, a, b, indices, gates[0] if gates else None)
        return float((out * wide(cotangent)).sum())

    for place, gradient in enumerate(found):
        direction = random.standard_normal(base[place].shape)
        moved = [
            loss([v + sign * direction if i == place else v for i, v in enumerate(base)])
            for sign in (0.5, -0.5)
        ]
        # Linear in each argument: the difference over any distance is the derivative.
        assert float((wide(gradient) * direction).sum()) == pytest.approx(
            moved[0] - moved[1], rel=1e-4, abs=1e-4
        )


def test_compiled_and_checkpointed_gradients_are_the_plain_ones():
    arguments = make(Case(layout="sorted"))
    cotangent = cotangent_for(arguments)

    def loss(x, use_kernel_path):
        return (use_kernel_path(replace(arguments, x=x)) * cotangent).sum()

    plain = mx.grad(lambda x: loss(x, Arguments.call))(arguments.x)
    kept = mx.checkpoint(lambda x: replace(arguments, x=x).call())
    for other in (
        mx.compile(mx.grad(lambda x: loss(x, Arguments.call))),
        mx.grad(lambda x: (kept(x) * cotangent).sum()),
    ):
        np.testing.assert_allclose(other(arguments.x), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("use_kernel", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_indices_may_come_from_a_router(emulator, use_kernel, checkpointed):
    """Gradients reach x and, through the gates, the logits; none flows through the choice."""
    arguments = make(Case(choices=2, M=5, layout="own"))
    # Far enough apart that a small step changes no choice.
    order = mx.argsort(mx.random.normal((2, 3, 5), key=mx.random.key(3)), axis=-1)
    logits = 0.5 * order.astype(mx.float32)

    def change(x, logits):
        chosen = mx.argpartition(-logits, kth=1, axis=-1)[..., :2]
        shares = mx.softmax(logits, axis=-1)
        weights = mx.take_along_axis(shares, mx.stop_gradient(chosen), axis=-1)
        gates = mx.broadcast_to(weights[..., None, None], (2, 3, 2, 1, 4))
        return replace(arguments, x=x, indices=chosen, gates=gates).call(use_kernel)

    def loss(function):
        return lambda x, logits: function(x, logits).sum()

    function = mx.checkpoint(change) if checkpointed else change
    to_x, to_logits = mx.grad(loss(function), argnums=(0, 1))(arguments.x, logits)
    direction = mx.random.normal(logits.shape, key=mx.random.key(4))
    near = [loss(change)(arguments.x, logits + step * direction).item() for step in (1e-2, -1e-2)]
    slope = (to_logits * direction).sum().item()
    assert slope == pytest.approx((near[0] - near[1]) / 2e-2, rel=1e-2, abs=1e-2)
    assert mx.abs(to_x).max().item() > 0.1


# --- the kernel, in the emulator ------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> None:
    """All kernels of this file, compiled together."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with emulated(), gathered():
        for case in CASES + HALF_CASES:
            make(case).call(use_kernel=True)


@pytest.mark.parametrize("case", CASES + HALF_CASES, ids=str)
def test_kernel_equals_numpy_and_the_reference(compiled, emulator, case):
    arguments = make(case)
    made = arguments.call(use_kernel=True)
    assert_close(made, expected(arguments), case.dtype)
    assert_close(made, wide(arguments.call(use_kernel=False)), case.dtype)


@pytest.mark.parametrize("case", CASES + HALF_CASES, ids=str)
def test_kernel_equals_numpy_on_a_device(gpu, case):
    arguments = make(case)
    assert_close(arguments.call(use_kernel=True), expected(arguments), case.dtype)


@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[6], HALF_CASES[0]], ids=str)
def test_kernel_gives_the_same_bits_however_it_is_run(compiled, emulator, case, chosen: Variant):
    arguments = make(case)
    first = arguments.call(use_kernel=True)
    with variant(chosen):
        assert mx.array_equal(arguments.call(use_kernel=True), first).item()


def test_kernel_adds_nothing_for_ranks_whose_gate_is_zero(compiled, emulator):
    arguments = make(Case())
    gates = arguments.gates * mx.array([1.0, 0, 1, 1])
    kept = replace(arguments, gates=gates)
    second = mx.arange(8) // 2 == 1
    spoiled = replace(
        kept,
        a=mx.where(second[:, None], mx.nan, kept.a),
        b=mx.where(second, mx.nan, kept.b),
    )
    assert mx.array_equal(spoiled.call(use_kernel=True), kept.call(use_kernel=True)).item()


def test_kernel_takes_views_and_any_integers(compiled, emulator):
    plain = make(Case(layout="own"))
    wanted = plain.call(use_kernel=True)

    def swapped(array: mx.array) -> mx.array:
        """The same values, stored with the last two axes the other way round."""
        return mx.contiguous(array.swapaxes(-1, -2)).swapaxes(-1, -2)

    def every_second(array: mx.array) -> mx.array:
        return mx.repeat(array, 2, axis=0)[::2]

    for dtype in (mx.int32, mx.uint32, mx.int64):
        views = Arguments(
            every_second(plain.x),
            swapped(plain.a),
            swapped(plain.b),
            every_second(plain.indices).astype(dtype),
            every_second(plain.gates),
            False,
        )
        assert mx.array_equal(views.call(use_kernel=True), wanted).item()


def test_kernel_and_reference_have_one_gradient(compiled, emulator):
    for case in (CASES[0], CASES[2], CASES[3]):
        arguments = make(case)
        cotangent = cotangent_for(arguments)
        ours = gradients(arguments, lambda made: made.call(use_kernel=True), cotangent)
        theirs = gradients(arguments, lambda made: made.call(use_kernel=False), cotangent)
        assert len(ours) == len(theirs)
        for got, wanted in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_few_rows_take_the_kernel_and_many_a_product(compiled, emulator, caplog):
    caplog.set_level("INFO", "mlxstacks")
    few = make(CASES[0])
    assert mx.array_equal(few.call(), few.call(use_kernel=True)).item()
    assert not caplog.messages
    many = make(Case(tokens=(1, MANY_ROWS // 2)))
    assert mx.array_equal(many.call(), many.call(use_kernel=False)).item()
    assert not caplog.messages  # a choice, not a refusal: every prefill makes it
    chosen = many.call(use_kernel=True)
    np.testing.assert_allclose(chosen, many.call(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"b": mx.zeros((5, 100, 8), mx.float16)}, "the kernel takes both in one dtype"),
        (
            {"a": mx.zeros((1, 4000, 63)), "b": mx.zeros((1, 9, 4000))},
            "4000 ranks need 48080 bytes of threadgroup memory",
        ),
    ],
)
def test_what_the_kernel_cannot_take_falls_back_with_a_reason(emulator, caplog, change, reason):
    caplog.set_level("INFO", "mlxstacks")
    arguments = replace(make(Case()), **change)
    assert mx.array_equal(arguments.call(), arguments.call(use_kernel=False)).item()
    assert reason in caplog.text
    with pytest.raises(ValueError, match=reason):
        arguments.call(use_kernel=True)


def test_kernel_gives_no_rows_for_no_rows(emulator):
    x, indices = mx.zeros((0, 1, 63)), mx.zeros((0,), dtype=mx.uint32)
    none = replace(make(Case(E=0)), x=x, indices=indices, sorted_indices=True)
    assert none.call(use_kernel=True).shape == (0, 1, 100)


@pytest.mark.parametrize("half", ["a", "b"])
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("gates", [0, 2])
def test_one_half_for_all_experts_is_as_many_equal_ones(half, is_sorted, gates):
    """To the rounding of float32 sums, which a product of all rows orders otherwise."""
    whole = make(Case(E=gates))
    if is_sorted:
        whole, _ = sort(whole)
    shared = replace(whole, **{half: getattr(whole, half)[:1]})
    whole = replace(whole, **{half: mx.repeat(getattr(shared, half), 5, axis=0)})

    def same(got, wanted):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())

    same(wide(shared.call()), wide(whole.call()))

    def of(arguments, name):
        def loss(array):
            return mx.sum(replace(arguments, **{name: array}).call() ** 2)

        return wide(mx.grad(loss)(getattr(arguments, name)))

    for name in ("x", "a", "b"):
        gradients = of(whole, name)
        if name == half:
            gradients = gradients.sum(axis=0, keepdims=True)
        same(of(shared, name), gradients)


def test_kernel_refuses_a_half_for_all_experts(emulator):
    arguments = make(Case(E=0))
    with pytest.raises(ValueError, match="a and b have 1 and 5 experts"):
        replace(arguments, a=arguments.a[:1]).call(use_kernel=True)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_kernel", [None, False, True])
def test_all_that_does_not_fit_is_listed_at_once(use_kernel):
    good = make(Case())
    bad = replace(
        good,
        x=mx.zeros((2, 3, 3, 1, 63), dtype=mx.int32),
        b=good.b[:, :, :7],
        indices=good.indices.astype(mx.float32),
        gates=mx.zeros((2, 3, 1, 1, 3)),
    )
    with pytest.raises(ValueError, match="cannot use these arguments") as caught:
        bad.call(use_kernel)
    lines = str(caught.value).splitlines()[1:]
    assert [line.split(":")[0].strip() for line in lines] == ["x", "indices", "b", "x", "gates"]
    assert "allowed is (5, N, 8)" in lines[2]
    assert "(2, 3, 2, 1, 63) or (2, 3, 1, 1, 63)" in lines[3]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"a": mx.zeros((5, 8))}, r"a: got shape \(5, 8\), allowed is \(M, R, K\)"),
        ({"b": mx.zeros((5, 0, 8))}, r"b: got shape \(5, 0, 8\), allowed is \(M, N, R\)"),
        ({"x": mx.zeros((63,))}, r"x: got shape \(63,\)"),
        ({"indices": mx.array(1)}, "indices: got .* of shape \\(\\)"),
        ({"gates": mx.zeros((2, 3, 1, 1, 0))}, "gates: got 0 at the end"),
        ({"gates": mx.zeros((4,))}, r"gates: got shape \(4,\)"),
    ],
)
def test_one_thing_that_does_not_fit_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        replace(make(Case()), **change).call()


def test_a_scale_that_is_an_array_is_refused():
    """The reference would differentiate to it and the kernel would not."""
    arguments = make(Case())
    with pytest.raises(ValueError, match="scale: got array, allowed is a number"):
        expert_delta(
            arguments.x, arguments.a, arguments.b, arguments.indices, arguments.gates,
            mx.array(2.0), False,
        )  # fmt: skip


def test_a_kernel_asked_for_without_a_device_is_refused():
    if kernels.backend() is not None:
        pytest.skip("a device is there")
    with pytest.raises(ValueError, match="needs a Metal or CUDA device"):
        make(Case()).call(use_kernel=True)

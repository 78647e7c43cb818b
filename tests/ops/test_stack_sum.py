"""stack_sum: NumPy in float64, the stacks one by one, its laws, its kernel in the emulator.

pytest tests/ops/test_stack_sum.py
"""

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops import kernels
from mlxstacks.ops.stack_sum import TILE, stack_sum
from tests.metal_emulator import VARIANTS, Variant, emulated, gathered, unavailable, variant
from tests.ops.low_rank_checks import assert_close, dtype_names, wide

SCALE = 1.75


@dataclass(frozen=True)
class Case:
    """Sizes in the letters of ops/stack_sum.py; `active` gates of E are not zero."""

    lead: tuple[int, ...] = (2, 3)
    K: int = 63
    N: int = 100
    S: int = 3
    E: int = 4
    r: int = 2
    active: int = 2
    dtype: mx.Dtype = mx.float32
    lora_dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        lead = "x".join(map(str, self.lead)) or "row"
        kinds = dtype_names(self.dtype, self.lora_dtype)
        return f"{lead}_{self.K}to{self.N}_S{self.S}_E{self.E}of{self.active}_r{self.r}_{kinds}"


CASES = [
    Case(),
    Case(lead=(1, 1), K=100, N=513, S=32, E=4, r=3, active=1),
    Case(lead=(8,), K=257, N=63, S=2, E=4, r=16),
    Case(lead=(), K=1, N=1, S=1, E=1, r=1, active=1),
    Case(lead=(3, 7), K=33, N=31, S=2, E=3, r=5),
    Case(lead=(2,), K=128, N=130, S=1, E=8, r=1, active=0),
]
HALF_CASES = [
    replace(CASES[0], dtype=mx.bfloat16, lora_dtype=mx.bfloat16),
    replace(CASES[2], dtype=mx.float16, lora_dtype=mx.float16),
    replace(CASES[0], dtype=mx.bfloat16, lora_dtype=mx.float16),
    replace(CASES[4], dtype=mx.float32, lora_dtype=mx.bfloat16),
]


@dataclass(frozen=True)
class Arguments:
    """What stack_sum takes, apart from the scale."""

    x: mx.array
    a_all: mx.array
    b_all: mx.array
    gates: mx.array

    def call(self, use_kernel: bool | None = None) -> mx.array:
        return stack_sum(*self.arrays(), SCALE, use_kernel=use_kernel)

    def arrays(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        return self.x, self.a_all, self.b_all, self.gates


def make(case: Case, seed: int = 0) -> Arguments:
    """Random arguments; every token has its own choice of experts in every stack."""
    random = np.random.default_rng(seed)
    ranks = case.S * case.E * case.r
    gates = random.uniform(0.1, 1, (*case.lead, case.S, case.E))
    order = np.argsort(random.random(gates.shape), axis=-1)
    gates = np.where(order < case.active, gates, 0)
    x = random.standard_normal((*case.lead, case.K))
    a = random.standard_normal((ranks, case.K)) / np.sqrt(case.K)
    b = random.standard_normal((case.N, ranks)) / np.sqrt(ranks)
    return Arguments(
        mx.array(x.astype(np.float32)).astype(case.dtype),
        mx.array(a.astype(np.float32)).astype(case.lora_dtype),
        mx.array(b.astype(np.float32)).astype(case.lora_dtype),
        mx.array(gates.astype(np.float32)),
    )


def in_numpy(x, a_all, b_all, gates) -> np.ndarray:
    """The formula of the module, token by token, stack by stack, expert by expert, in float64."""
    stacks, experts = gates.shape[-2:]
    r = len(a_all) // (stacks * experts)
    out = np.zeros((*x.shape[:-1], len(b_all)))
    for at in np.ndindex(*x.shape[:-1]):
        for s in range(stacks):
            for e in range(experts):
                own = slice((s * experts + e) * r, (s * experts + e + 1) * r)
                out[at] += gates[at][s, e] * (b_all[:, own] @ (a_all[own] @ x[at]))
    return SCALE * out


def expected(arguments: Arguments) -> np.ndarray:
    return in_numpy(*(wide(array) for array in arguments.arrays()))


@pytest.mark.parametrize("case", CASES + HALF_CASES, ids=str)
def test_reference_equals_numpy(case):
    arguments = make(case)
    assert_close(arguments.call(use_kernel=False), expected(arguments), case.dtype)


def test_packed_stacks_are_the_sum_of_the_stacks():
    case = Case(lead=(2, 40), S=10, E=4, r=4)
    packed = make(case)
    ranks = case.E * case.r
    one_by_one = sum(
        replace(
            packed,
            a_all=packed.a_all[s * ranks : (s + 1) * ranks],
            b_all=packed.b_all[:, s * ranks : (s + 1) * ranks],
            gates=packed.gates[..., s : s + 1, :],
        ).call()
        for s in range(case.S)
    )
    np.testing.assert_allclose(packed.call(), one_by_one, rtol=1e-5, atol=1e-5)


def test_a_gate_of_zero_is_a_slice_without_that_stack():
    case = Case(lead=(5,), S=3)
    packed = make(case)
    ranks = [*range(8), *range(16, 24)]  # all but the second stack
    sliced = replace(
        packed,
        a_all=packed.a_all[ranks],
        b_all=packed.b_all[:, ranks],
        gates=packed.gates[:, [0, 2]],
    )
    zeroed = replace(packed, gates=packed.gates * mx.array([[1.0], [0], [1]]))
    np.testing.assert_allclose(zeroed.call(), sliced.call(), rtol=1e-6, atol=1e-6)


def test_no_tokens_give_no_rows():
    none = replace(make(Case()), x=mx.zeros((0, 63)), gates=mx.zeros((0, 3, 4)))
    assert none.call().shape == (0, 100)


# --- gradients ----------------------------------------------------------------------------------


def gradients(arguments: Arguments, use_kernel: bool | None, cotangent: mx.array):
    """Gradients of sum(cotangent * stack_sum) to x, a_all, b_all and gates."""

    def loss(*arrays: mx.array) -> mx.array:
        return (Arguments(*arrays).call(use_kernel) * cotangent).sum()

    return mx.grad(loss, argnums=(0, 1, 2, 3))(*arguments.arrays())


def cotangent_for(arguments: Arguments) -> mx.array:
    shape = (*arguments.x.shape[:-1], len(arguments.b_all))
    values = np.random.default_rng(7).standard_normal(shape)
    return mx.array(values.astype(np.float32))


@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_gradients_equal_finite_differences(case):
    arguments = make(case)
    cotangent = cotangent_for(arguments)
    base = [wide(array) for array in arguments.arrays()]
    random = np.random.default_rng(8)
    for place, gradient in enumerate(gradients(arguments, None, cotangent)):
        direction = random.standard_normal(base[place].shape)
        moved = [
            in_numpy(*(v + sign * direction if i == place else v for i, v in enumerate(base)))
            for sign in (0.5, -0.5)
        ]
        # Linear in each argument: the difference over any distance is the derivative.
        difference = float(((moved[0] - moved[1]) * wide(cotangent)).sum())
        assert float((wide(gradient) * direction).sum()) == pytest.approx(
            difference, rel=1e-4, abs=1e-4
        )


def test_a_dropped_gate_still_has_its_gradient():
    arguments = make(Case())
    _, _, _, to_gates = gradients(arguments, None, cotangent_for(arguments))
    assert (np.array(to_gates)[np.array(arguments.gates) == 0] != 0).all()


def test_checkpointed_gradients_are_the_plain_ones():
    arguments = make(Case())
    cotangent = cotangent_for(arguments)

    def change(x: mx.array, gates: mx.array) -> mx.array:
        return replace(arguments, x=x, gates=gates).call()

    def gradient(function):
        loss = mx.grad(lambda *arrays: (function(*arrays) * cotangent).sum(), argnums=(0, 1))
        return loss(arguments.x, arguments.gates)

    for kept, plain in zip(gradient(mx.checkpoint(change)), gradient(change), strict=True):
        assert mx.array_equal(kept, plain).item()


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
@pytest.mark.parametrize("case", [CASES[2], CASES[4], HALF_CASES[0]], ids=str)
def test_kernel_gives_the_same_bits_however_it_is_run(compiled, emulator, case, chosen: Variant):
    arguments = make(case)
    first = arguments.call(use_kernel=True)
    with variant(chosen):
        assert mx.array_equal(arguments.call(use_kernel=True), first).item()


def test_kernel_adds_nothing_for_an_expert_whose_gates_are_zero(compiled, emulator):
    arguments = make(Case())
    dropped = replace(arguments, gates=arguments.gates * mx.array([1.0, 0, 1, 1]))
    second = (mx.arange(24) // 2) % 4 == 1
    spoiled = replace(
        dropped,
        a_all=mx.where(second[:, None], mx.nan, dropped.a_all),
        b_all=mx.where(second, mx.nan, dropped.b_all),
    )
    assert mx.array_equal(spoiled.call(use_kernel=True), dropped.call(use_kernel=True)).item()


def test_a_token_does_not_depend_on_its_tile(compiled, emulator):
    whole = make(CASES[4])  # 21 tokens: two tiles and a part of one
    flat = replace(whole, x=whole.x.reshape(21, -1), gates=whole.gates.reshape(21, 2, 3))
    first = replace(flat, x=flat.x[13:21], gates=flat.gates[13:21])
    made = flat.call(use_kernel=True)
    assert mx.array_equal(first.call(use_kernel=True), made[13:21]).item()


def test_kernel_takes_views(compiled, emulator):
    plain = make(Case())
    views = Arguments(
        mx.repeat(plain.x, 2, axis=0)[::2],
        mx.contiguous(plain.a_all.T).T,
        mx.contiguous(plain.b_all.T).T,
        mx.contiguous(plain.gates.swapaxes(0, 1)).swapaxes(0, 1),
    )
    assert mx.array_equal(views.call(use_kernel=True), plain.call(use_kernel=True)).item()


def test_kernel_and_reference_have_one_gradient(compiled, emulator):
    arguments = make(Case())
    cotangent = cotangent_for(arguments)
    ours, theirs = (gradients(arguments, use, cotangent) for use in (True, False))
    for got, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_few_tokens_take_the_kernel_and_many_a_product(compiled, emulator, caplog):
    caplog.set_level("INFO", "mlxstacks")
    few = make(CASES[2])
    assert len(few.x) == TILE
    assert mx.array_equal(few.call(), few.call(use_kernel=True)).item()
    assert not caplog.messages
    many = make(replace(CASES[2], lead=(TILE + 1,)))
    assert mx.array_equal(many.call(), many.call(use_kernel=False)).item()
    assert not caplog.messages  # a choice, not a refusal: every prefill makes it
    chosen = many.call(use_kernel=True)
    np.testing.assert_allclose(wide(chosen), wide(many.call()), rtol=1e-5, atol=1e-5)


def test_what_the_kernel_cannot_take_falls_back_with_a_reason(emulator, caplog):
    caplog.set_level("INFO", "mlxstacks")
    arguments = make(Case(lead=(1,), K=2, N=3, S=1, E=1, r=17000, active=1))
    reason = "17000 ranks need 34068 bytes of threadgroup memory, 32768 exist"
    assert mx.array_equal(arguments.call(), arguments.call(use_kernel=False)).item()
    assert reason in caplog.text
    with pytest.raises(ValueError, match=reason):
        arguments.call(use_kernel=True)


def test_kernel_gives_no_rows_for_no_tokens(emulator):
    none = replace(make(Case()), x=mx.zeros((0, 63)), gates=mx.zeros((0, 3, 4)))
    assert none.call(use_kernel=True).shape == (0, 100)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_kernel", [None, False, True])
def test_all_that_does_not_fit_is_listed_at_once(use_kernel):
    good = make(Case())
    bad = Arguments(
        mx.zeros((2, 3, 64)), good.a_all, good.b_all[:, 1:].astype(mx.int32), good.gates[:, 1:]
    )
    with pytest.raises(ValueError, match="cannot use these arguments") as caught:
        bad.call(use_kernel)
    lines = str(caught.value).splitlines()[1:]
    names = [line.split(":")[0].strip() for line in lines]
    assert names == ["b_all", "b_all", "x", "gates"]
    assert "allowed is (N, 24)" in lines[1]
    assert "allowed is (..., 63)" in lines[2]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"a_all": mx.zeros((24,))}, r"a_all: got shape \(24,\), allowed is \(S\*E\*r, K\)"),
        ({"b_all": mx.zeros((0, 24))}, r"b_all: got shape \(0, 24\)"),
        ({"x": mx.array(1.0)}, r"x: got shape \(\)"),
        ({"gates": mx.zeros((2, 3, 5, 4))}, "gates: got S\\*E = 20 experts"),
        ({"gates": mx.zeros((2, 3, 0, 4))}, "gates: got S\\*E = 0 experts"),
        ({"gates": mx.zeros((4,))}, r"gates: got shape \(4,\)"),
    ],
)
def test_one_thing_that_does_not_fit_is_named(change, named):
    with pytest.raises(ValueError, match=named):
        replace(make(Case()), **change).call()


def test_a_scale_that_is_an_array_is_refused():
    """The reference would differentiate to it and the kernel would not."""
    with pytest.raises(ValueError, match="scale: got array, allowed is a number"):
        stack_sum(*make(Case()).arrays(), mx.array(2.0))


def test_a_kernel_asked_for_without_a_device_is_refused():
    if kernels.backend() is not None:
        pytest.skip("a device is there")
    with pytest.raises(ValueError, match="needs a Metal or CUDA device"):
        make(Case()).call(use_kernel=True)

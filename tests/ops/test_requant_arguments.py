"""Who runs requant, and what it refuses: the chooser, its reasons, bad arguments.

Run: pytest tests/ops/test_requant_arguments.py
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops import kernels
from mlxstacks.ops.requant import Requantized, requant
from tests.cases import Grid
from tests.ops.requant_cases import FIRST_CASES, LORA_CASES, Call, Case, make


def assert_same(got: Requantized, wanted: Requantized) -> None:
    """The very same results: both from the reference."""
    for name in ("packed", "scales", "biases", "sums"):
        assert mx.array_equal(getattr(got, name), getattr(wanted, name)).item(), name


@pytest.mark.parametrize("wanted", [None, True])
def test_the_kernel_is_taken_where_it_runs(
    emulator: None, caplog: pytest.LogCaptureFixture, wanted: bool | None
) -> None:
    caplog.set_level("INFO", "mlxstacks")
    made: list[str] = []

    def maker(name: str, **_: Any) -> Callable[..., list[mx.array]]:
        made.append(name)
        return lambda **launch: [
            mx.zeros(shape, dtype)
            for shape, dtype in zip(launch["output_shapes"], launch["output_dtypes"], strict=True)
        ]

    with kernels.substitute("noted", maker):
        result = make(LORA_CASES[0])(use_kernel=wanted)
    assert made == ["requant"]
    assert not np.array(result.packed).any()
    assert not caplog.messages


def without_kernel() -> dict[str, Call]:
    """Calls that only the reference can take, by the reason."""
    call = make(replace(LORA_CASES[4], shape=((3, 4), 128)))
    packed, scales, biases, lora_a, lora_b, scale = call.positional
    many = mx.zeros((3, 257, 128)), mx.zeros((3, 4, 257))
    none = mx.zeros((3, 0, 128)), mx.zeros((3, 4, 0))
    narrow = make(Case(Grid(4, 32, "BF16"), "keep", shape=((4,), 128)))
    halved = [mx.repeat(x, 2, axis=-1) for x in narrow.positional[1:3]]
    return {
        "the rank is 257": replace(call, positional=(packed, scales, biases, *many, scale)),
        "the rank is 0": replace(call, positional=(packed, scales, biases, *none, scale)),
        "other leading axes": replace(
            call, positional=(packed, scales, biases, lora_a[0], lora_b, scale)
        ),
        "group_size is 16": replace(
            narrow,
            positional=(narrow.positional[0], *halved, None, None, 1.0),
            named=narrow.named | {"group_size": 16},
        ),
        "there are no weights": replace(
            call, positional=(packed[:0], scales[:0], biases[:0], lora_a[:0], lora_b[:0], scale)
        ),
    }


def test_a_matrix_without_columns_has_no_weights(emulator: None) -> None:
    none = mx.zeros((8, 0), mx.uint32), mx.zeros((8, 0)), mx.zeros((8, 0))
    with pytest.raises(ValueError, match="there are no weights"):
        requant(
            *none, None, None, 1.0, policy="keep", group_size=32, bits=4,
            delta=mx.zeros((8, 0)), use_kernel=True,
        )  # fmt: skip


@pytest.mark.parametrize("policy", ["keep", "promote"])
@pytest.mark.parametrize("use_kernel", [False, True])
def test_what_a_policy_does_not_use_is_ignored(
    emulator: None, policy: str, use_kernel: bool
) -> None:
    call = make(Case(Grid(3, 64, "BF16"), policy, 4 if policy == "promote" else None))
    plain, delta = call(use_kernel=use_kernel), call.named["delta"]
    unused = {"rounded": 2 * delta, "uniform": mx.ones_like(delta), "control": True}
    assert_same(call(use_kernel=use_kernel, **unused), plain)


@pytest.mark.parametrize("reason", without_kernel())
def test_what_the_kernel_cannot_take_falls_back_with_a_reason(
    emulator: None, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    caplog.set_level("INFO", "mlxstacks")
    call = without_kernel()[reason]
    assert_same(call(), call(use_kernel=False))
    assert reason in caplog.text
    with pytest.raises(ValueError, match=reason):
        call(use_kernel=True)


def test_a_kernel_asked_for_without_a_device_is_refused() -> None:
    if kernels.backend() is not None:
        pytest.skip("a device is there")
    with pytest.raises(ValueError, match="needs a Metal or CUDA device"):
        make(FIRST_CASES[0])(use_kernel=True)


@pytest.mark.parametrize("use_kernel", [None, False, True])
def test_all_that_does_not_fit_is_listed_at_once(use_kernel: bool | None) -> None:
    call = make(Case(Grid(4, 64, "BF16"), "keep"))
    named = call.named | {"policy": "round", "bits": 7, "group_size": 48, "delta": None}
    with pytest.raises(ValueError, match="cannot use these arguments") as caught:
        requant(*call.positional, **named, use_kernel=use_kernel)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert [line.split(":")[0] for line in lines[:3]] == ["bits", "group_size", "policy"]
    assert lines[3].endswith("got none of them")


@pytest.mark.parametrize(
    ("policy", "change", "named"),
    [
        ("keep", {"new_bits": 4}, "keep stays at 3; promote goes to more bits"),
        ("promote", {"new_bits": 3}, "promote goes to more than 3; keep stays at 3"),
        ("promote", {"new_bits": 7}, "new_bits: got 7, allowed are 2, 3, 4, 5, 6, 8"),
        ("stochastic", {"uniform": None}, "stochastic needs .* numbers in"),
        ("keep", {"delta": mx.zeros((7, 128))}, r"delta: got .*\(7, 128\), allowed .*\(7, 384\)"),
        ("refit", {"rounded": mx.zeros((7, 384), mx.bfloat16)}, "rounded: got .*bfloat16"),
        ("keep", {"group_size": 32}, "check group_size and bits"),
        ("keep", {"bits": 4}, "check group_size and bits"),
        ("keep", {"bits": 3.0}, "bits: got 3.0, allowed are 2, 3"),
        ("keep", {"group_size": 64.0}, "group_size: got 64.0, allowed are powers of two"),
        ("refit", {"new_bits": 4.0}, "new_bits: got 4.0, allowed are 2, 3"),
        ("keep", {"delta": np.zeros((7, 384), np.float32)}, "delta: got ndarray, .* mx.array"),
    ],
)
def test_one_thing_that_does_not_fit_is_named(policy: str, change: dict, named: str) -> None:
    call = make(Case(Grid(3, 64, "BF16"), policy, 4 if policy == "promote" else None))
    with pytest.raises(ValueError, match=named):
        call(**change)


@pytest.mark.parametrize(
    ("place", "array", "named"),
    [
        (0, mx.zeros((12, 60), mx.int32), "packed: got .*int32, allowed is uint32"),
        (1, mx.zeros((12, 10), mx.int32), "allowed for both is one of bfloat16"),
        (2, mx.zeros((12, 9)), "packed, scales, biases: got"),
        (3, mx.zeros((640, 17)), r"transpose what mlx-lm stores as \(K, R\)"),
        (4, mx.zeros((12, 16)), "lora_a, lora_b: got"),
        (3, mx.zeros((17, 640), mx.int32), "lora_a: got .*int32, allowed is a float dtype"),
        (4, None, "either lora_a with lora_b, or delta; got lora_a"),
        (5, mx.array(2.0), "scale: got array, allowed is a number"),
    ],
)
def test_an_array_that_does_not_fit_is_named(
    place: int, array: mx.array | None, named: str
) -> None:
    positional = list(make(LORA_CASES[0]).positional)
    if place == 2:
        array = array.astype(positional[1].dtype) if array is not None else None
    positional[place] = array
    with pytest.raises(ValueError, match=named):
        requant(*positional, **make(LORA_CASES[0]).named)

"""One rank and one scale for all: what padding and folding keep.

Run: pytest tests/files/test_lora_modules.py
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import AdapterError
from mlxstacks.files.lora_modules import LoraModule, delta_norm, padded, rescaled, unified, widened
from mlxstacks.ops.affine import from_storage, to_storage
from tests.files.peft_cases import EPSILON, delta_of


def small_module(seed: int, dtype: str) -> LoraModule:
    rng = np.random.default_rng(seed)
    a, b = (to_storage(rng.standard_normal(s).astype(np.float32), dtype) for s in ((6, 2), (2, 5)))
    return LoraModule("model.layers.0.self_attn.q_proj", a, b, dtype, 3.0)


@given(st.integers(-6, 6), st.sampled_from(["F32", "F16", "BF16"]), st.integers(0, 2**32))
def test_power_of_two_folds_are_exact(power: int, dtype: str, seed: int) -> None:
    module = small_module(seed, dtype)
    folded = rescaled(module, module.scale * 2.0**power)
    # Half precision runs out of exponents (F16: subnormals); such a pair goes to float32.
    assert folded.dtype in {dtype, "F32"}
    assert folded.dtype == dtype or dtype == "F16"
    assert np.array_equal(delta_of(folded), delta_of(module))


@given(st.floats(0.1, 50), st.sampled_from(["F32", "F16", "BF16"]), st.integers(0, 2**32))
def test_other_folds_are_within_one_ulp(scale: float, dtype: str, seed: int) -> None:
    module = small_module(seed, dtype)
    folded = rescaled(module, scale)
    exact = from_storage(module.lora_b, dtype).astype(np.float64) * (module.scale / scale)
    got = from_storage(folded.lora_b, folded.dtype)
    assert np.all(np.abs(got - exact) <= np.spacing(np.abs(got)))
    bound = abs(scale) * (np.abs(widened(folded).lora_a) @ np.abs(got)).T * EPSILON
    assert np.all(np.abs(delta_of(folded) - delta_of(module)) <= bound)


@given(st.integers(2, 9), st.sampled_from(["F32", "BF16"]), st.integers(0, 2**32))
def test_padding_keeps_the_delta(rank: int, dtype: str, seed: int) -> None:
    module = small_module(seed, dtype)
    assert padded(module, rank).rank == rank
    assert np.array_equal(delta_of(padded(module, rank)), delta_of(module))


def test_padding_to_a_huge_rank_is_refused_before_it_takes_memory() -> None:
    wide = LoraModule("wide", np.ones((1, 10**6)), np.ones((10**6, 1)), "F32", 3.0)
    narrow = replace(small_module(0, "F32"), lora_a=np.ones((500, 1)), lora_b=np.ones((1, 500)))
    with pytest.raises(AdapterError, match=r"wide: rank 1,000,000, to which all .* 1,002,000,000"):
        unified([wide, narrow])


@pytest.mark.parametrize("rank", [1, 4, 5, 10**5])
def test_the_norm_of_a_delta_at_any_rank(rank: int) -> None:
    rng = np.random.default_rng(rank)
    dense = LoraModule("m", rng.random((4, rank)), rng.random((rank, 3)), "F32", -2.0)
    switch = replace(dense, lora_a=rng.random((2, rank, 4)), lora_b=rng.random((2, 3, rank)))
    for module in (dense, switch):
        assert delta_norm(module) == pytest.approx(np.linalg.norm(delta_of(module)))


def test_the_commonest_scale_is_not_folded() -> None:
    modules = [
        replace(small_module(i, "BF16"), path=f"m{i}", scale=s) for i, s in enumerate((1, 3, 3))
    ]
    merged = unified(modules)
    assert {m.scale for m in merged.values()} == {3}
    assert [m.dtype for m in merged.values()] == ["F32", "BF16", "BF16"]
    assert np.array_equal(merged["m1"].lora_b, modules[1].lora_b)

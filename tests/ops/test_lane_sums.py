"""affine.h's sums over lanes: many at once have the bits of the tree over neighbours.

Run: pytest tests/ops/test_lane_sums.py
"""

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.ops.kernels import LANES, kernel_text
from tests.metal_emulator import VARIANTS, Variant, metal_kernel, variant

BODY = """
const uint lane = thread_index_in_simdgroup;
Floats<COUNT> values;
for (int i = 0; i < COUNT; ++i) {
  values.at[i] = numbers[lane * uint(COUNT) + uint(i)];
}
const float sum = sum_for_lane(values, lane);
if (lane < uint(COUNT)) {
  together[lane] = sum;
}
for (int i = 0; i < COUNT; ++i) {
  one_by_one[i] = tree_sum(values.at[i], 32u);
}
"""


def sums(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums over the lanes of (LANES, COUNT) numbers, all at once and one after the other."""
    header, _ = kernel_text("requant", "metal")
    outputs = ["together", "one_by_one"]
    kernel = metal_kernel("lane_sums", ["numbers"], outputs, source=BODY, header=header)
    count = numbers.shape[1]
    together, one_by_one = kernel(
        inputs=[mx.array(numbers)],
        template=[("COUNT", count)],
        grid=(LANES, 1, 1),
        threadgroup=(LANES, 1, 1),
        output_shapes=[(count,), (count,)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return np.array(together), np.array(one_by_one)


def drawn(count: int) -> np.ndarray:
    """Numbers of very different sizes: the order of a sum shows in its bits."""
    random = np.random.default_rng(count)
    sizes = np.exp2(random.uniform(-12, 12, (LANES, count)))
    return (random.standard_normal((LANES, count)) * sizes).astype(np.float32)


def neighbours_first(numbers: np.ndarray) -> np.ndarray:
    while len(numbers) > 1:
        numbers = numbers[0::2] + numbers[1::2]
    return numbers[0]


@pytest.mark.parametrize("count", [1, 2, 4, 7, 9, 18, 31, 32])
def test_lane_has_the_sum_of_its_value(emulator: None, count: int) -> None:
    together, one_by_one = sums(drawn(count))
    np.testing.assert_array_equal(together, neighbours_first(drawn(count)))
    np.testing.assert_array_equal(together, one_by_one)


@pytest.mark.parametrize("chosen", VARIANTS, ids=str)
def test_sums_are_the_same_however_they_are_run(emulator: None, chosen: Variant) -> None:
    with variant(chosen):
        together, _ = sums(drawn(9))
    np.testing.assert_array_equal(together, neighbours_first(drawn(9)))


def test_order_of_a_sum_shows() -> None:
    numbers = drawn(32)
    in_a_row = np.add.accumulate(numbers, axis=0, dtype=np.float32)[-1]
    assert (in_a_row != neighbours_first(numbers)).any()

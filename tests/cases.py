"""One table of cases for every operator: bits x group x dtype x odd shapes."""

from dataclasses import dataclass

import mlx.core as mx

from mlxstacks.ops.affine import BITS, GROUP_SIZES, SCALE_DTYPES

MX_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


@dataclass(frozen=True)
class Grid:
    """One affine grid."""

    bits: int
    group_size: int
    dtype: str

    def __str__(self) -> str:
        return f"b{self.bits}_g{self.group_size}_{self.dtype.lower()}"


GRIDS = [Grid(b, g, d) for b in BITS for g in GROUP_SIZES for d in SCALE_DTYPES]

# (rows, input_dims): one group, odd rows, rows that do not fill a block, several groups.
SHAPES_2D = [(1, 128), (63, 128), (100, 256), (7, 384)]
# (num_experts, output_dims, input_dims)
SHAPES_3D = [(1, 5, 128), (4, 63, 256), (6, 32, 128)]

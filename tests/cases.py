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

# Rows that a kernel takes four, two and one at a time, and widths that do and do not fill its steps
# of 256 weights. (leading axes and rows, input_dims)
KERNEL_SHAPES = [
    ((1,), 128),
    ((5,), 256),
    ((3, 6), 384),
    ((100,), 128),
    ((63,), 256),
    ((2, 4), 640),
]

# Largest error of a kernel's floats, (relative, absolute), by the dtype that is stored. float32:
# sums of some thousand products in another order differ by a few units in the 24th bit. Half
# precision: two such sums, each rounded once to 8 or 11 bits, may be one unit in the last place
# apart. The absolute part is for sums of numbers of size one that cancel.
TOLERANCES = {
    mx.float32: (2e-6, 2e-6),
    mx.bfloat16: (2**-7, 2e-6),
    mx.float16: (2**-10, 2e-6),
}


def third_of_the_grids(which: int) -> list[Grid]:
    """18 of the 54 grids: every pair of bits, group size and dtype occurs. which: 0, 1 or 2."""
    return [
        grid
        for grid in GRIDS
        if (
            BITS.index(grid.bits)
            + GROUP_SIZES.index(grid.group_size)
            + SCALE_DTYPES.index(grid.dtype)
        )
        % 3
        == which % 3
    ]

"""refit by the device's own `mx.quantize`, for comparison with `mlx_lm.fuse` run on that device.

Metal rounds halves away from zero and starts the maximum at 0, the CPU rounds them to even: about
0.6% of the codes of ordinary weights differ. Bytes made here depend on the machine.
"""

import mlx.core as mx
import numpy as np

from mlxstacks.ops.affine import Array, pack, unpack
from mlxstacks.ops.policies import Groups

MX_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}


def refit_on_device(groups: Groups, rounded: Array, bits: int) -> Groups:
    """Groups of `mx.quantize(mx.dequantize(...) + delta)` on the default device.

    Shapes: rounded (G, group_size) float32 holding values of the scale dtype.
    """
    dtype = MX_DTYPES[groups.dtype]
    group_size = groups.codes.shape[1]
    columns = [mx.array(x).reshape(-1, 1).astype(dtype) for x in (groups.scales, groups.biases)]
    packed = mx.array(pack(groups.codes, groups.bits))
    weight = mx.dequantize(packed, *columns, group_size=group_size, bits=groups.bits)
    weight = weight + mx.array(rounded).astype(dtype)
    packed, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
    codes = unpack(np.array(packed), bits)
    return Groups(codes, _flat(scales), _flat(biases), bits, groups.dtype)


def _flat(column: mx.array) -> Array:
    return np.array(column.astype(mx.float32)).reshape(-1)

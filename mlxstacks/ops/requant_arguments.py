"""What `requant` and `dequant` accept, and what their kernels accept of that.

Two lists: what no path can use raises ValueError in every path; what only the kernel cannot use
sends the call to the reference.
"""

import mlx.core as mx

from mlxstacks.ops.affine import BITS, GROUP_SIZES
from mlxstacks.ops.affine_ops import SCALE_DTYPES
from mlxstacks.ops.low_rank_kernels import wrong_scale
from mlxstacks.ops.policies import POLICIES

MOST_RANKS = 256  # of the kernel
_MOST_ROWS = 1 << 25  # 32 threads a row, and MLX counts the threads of a grid in 31 bits


def check_arguments(
    packed: mx.array,
    scales: mx.array,
    biases: mx.array,
    lora_a: mx.array | None,
    lora_b: mx.array | None,
    scale: float,
    *,
    policy: str,
    group_size: int,
    bits: int,
    new_bits: int | None,
    delta: mx.array | None,
    rounded: mx.array | None,
    uniform: mx.array | None,
) -> None:
    """Raise ValueError listing all arguments of `requant` that do not fit. Shapes as there."""
    optional = {"delta": delta, "rounded": rounded, "uniform": uniform}
    optional |= {"lora_a": lora_a, "lora_b": lora_b}
    problems = grid_problems(packed, scales, biases, group_size, bits)
    problems += _not_arrays({name: x for name, x in optional.items() if x is not None})
    problems += wrong_scale(scale) + _policy_problems(policy, bits, new_bits)
    if policy == "stochastic" and uniform is None:
        problems.append(
            "uniform: got None, and stochastic needs (..., N, K) numbers in [0, 1); draw them with "
            "mx.random.uniform"
        )
    low_rank = [x is not None for x in (lora_a, lora_b)]
    if (delta is None) != all(low_rank) or any(low_rank) != all(low_rank):
        problems.append(
            "the delta is either lora_a with lora_b, or delta; got "
            + (", ".join(_given(lora_a=lora_a, lora_b=lora_b, delta=delta)) or "none of them")
        )
    if not problems:
        dense = (*scales.shape[:-1], scales.shape[-1] * group_size)  # (..., N, K)
        problems += _dense_problems(dense, delta=delta, rounded=rounded, uniform=uniform)
        if lora_a is not None and lora_b is not None:
            problems += _lora_problems(dense, lora_a, lora_b)
    if problems:
        raise ValueError("\n  ".join(["requant cannot use these arguments:", *problems]))


def grid_problems(
    packed: mx.array, scales: mx.array, biases: mx.array, group_size: int, bits: int
) -> list[str]:
    """All that does not fit among packed weights, one line each."""
    problems = []
    if not isinstance(bits, int) or bits not in BITS:
        problems.append(f"bits: got {bits!r}, allowed are {', '.join(map(str, BITS))}")
    if not isinstance(group_size, int) or group_size < 8 or group_size & (group_size - 1):
        problems.append(
            f"group_size: got {group_size!r}, allowed are powers of two from 8; MLX makes "
            + ", ".join(map(str, GROUP_SIZES))
        )
    foreign = _not_arrays({"packed": packed, "scales": scales, "biases": biases})
    if foreign:
        return problems + foreign
    if packed.dtype != mx.uint32:
        problems.append(f"packed: got {packed.dtype}, allowed is uint32; view it as that")
    if scales.dtype not in SCALE_DTYPES or biases.dtype != scales.dtype:
        problems.append(
            f"scales and biases: got {scales.dtype} and {biases.dtype}, allowed for both is one of "
            "bfloat16, float16, float32; cast them with astype"
        )
    if problems:
        return problems
    expected = (
        *scales.shape[:-1],
        scales.shape[-1] * group_size * bits // 32 if scales.ndim else 0,
    )
    whole = scales.ndim >= 2 and scales.shape[-1] * group_size * bits % 32 == 0
    if not whole or biases.shape != scales.shape or packed.shape != expected:
        problems.append(
            f"packed, scales, biases: got {packed.shape}, {scales.shape}, {biases.shape}, allowed "
            f"are (..., N, K * {bits} / 32), (..., N, K / {group_size}) and the same; check "
            "group_size and bits"
        )
    return problems


def _policy_problems(policy: str, bits: int, new_bits: int | None) -> list[str]:
    if policy not in POLICIES:
        return [f"policy: got {policy!r}, allowed are {', '.join(POLICIES)}"]
    if new_bits is not None and (not isinstance(new_bits, int) or new_bits not in BITS):
        return [f"new_bits: got {new_bits!r}, allowed are {', '.join(map(str, BITS))}"]
    if policy == "promote" and (new_bits or bits) <= bits:
        return [f"new_bits: got {new_bits}, promote goes to more than {bits}; keep stays at {bits}"]
    if policy in ("keep", "nearest", "stochastic") and new_bits not in (None, bits):
        return [f"new_bits: got {new_bits}, {policy} stays at {bits}; promote goes to more bits"]
    return []


def _not_arrays(arguments: dict[str, object]) -> list[str]:
    """One line for each argument that is no array of MLX; NumPy's float32 is not MLX's."""
    return [
        f"{name}: got {type(argument).__name__}, allowed is an array of MLX; make it with mx.array"
        for name, argument in arguments.items()
        if not isinstance(argument, mx.array)
    ]


def _given(**arrays: mx.array | None) -> list[str]:
    return [name for name, array in arrays.items() if array is not None]


def _dense_problems(shape: tuple[int, ...], **arrays: mx.array | None) -> list[str]:
    return [
        f"{name}: got {array.dtype} of shape {array.shape}, allowed is float32 of shape {shape}; "
        "give one number for each weight"
        for name, array in arrays.items()
        if array is not None and (array.shape != shape or array.dtype != mx.float32)
    ]


def _lora_problems(dense: tuple[int, ...], lora_a: mx.array, lora_b: mx.array) -> list[str]:
    (*leading, rows, width) = dense
    problems = [
        f"{name}: got {array.dtype}, allowed is a float dtype; cast it with astype"
        for name, array in (("lora_a", lora_a), ("lora_b", lora_b))
        if not mx.issubdtype(array.dtype, mx.floating)
    ]
    fits = lora_a.ndim >= 2 and lora_b.ndim >= 2
    fits = fits and lora_a.shape[-1] == width and lora_b.shape[-2] == rows
    if fits and lora_a.shape[-2] == lora_b.shape[-1]:
        parts = [tuple(leading), lora_a.shape[:-2], lora_b.shape[:-2]]
        if _broadcast_to(parts[1], parts[0]) and _broadcast_to(parts[2], parts[0]):
            return problems
    problems.append(
        f"lora_a, lora_b: got {lora_a.shape} and {lora_b.shape}, allowed are (..., R, {width}) and "
        f"(..., {rows}, R) with leading axes {tuple(leading)}; transpose what mlx-lm stores as "
        "(K, R) and (R, N)"
    )
    return problems


def _broadcast_to(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    if len(shape) > len(target):
        return False
    ends = zip(reversed(shape), reversed(target), strict=False)
    return all(size in (1, wanted) for size, wanted in ends)


def refusal(
    packed: mx.array,
    scales: mx.array,
    lora_a: mx.array | None,
    lora_b: mx.array | None,
    group_size: int,
) -> str | None:
    """Why the kernel cannot take these (valid) arguments of `requant`."""
    reason = grid_refusal(scales, group_size)
    if reason is not None or lora_a is None or lora_b is None:
        return reason
    ranks = lora_a.shape[-2]
    if not 1 <= ranks <= MOST_RANKS:
        return f"the rank is {ranks}; the kernel takes 1 to {MOST_RANKS}"
    if lora_a.shape[:-2] != packed.shape[:-2] or lora_b.shape[:-2] != packed.shape[:-2]:
        return (
            f"lora_a {lora_a.shape} and lora_b {lora_b.shape} have other leading axes than "
            f"packed {packed.shape}; the kernel broadcasts nothing"
        )
    return None


def grid_refusal(scales: mx.array, group_size: int) -> str | None:
    """Why a kernel cannot take these packed weights."""
    if group_size not in GROUP_SIZES:
        allowed = ", ".join(map(str, GROUP_SIZES))
        return f"group_size is {group_size}; the kernel has {allowed}"
    if scales.size == 0:
        return "there are no weights"
    rows = scales.size // scales.shape[-1]
    return None if rows <= _MOST_ROWS else f"there are {rows} rows; the kernel takes {_MOST_ROWS}"

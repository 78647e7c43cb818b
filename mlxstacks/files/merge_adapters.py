"""Several LoRA adapters of one base as one: exactly, at a chosen rank, or by TIES or DARE.

With D_i = weight_i * scale_i * B_i A_i, (N, K), the weighted delta of adapter i in a module:

    concat  sum of D_i, exactly: ranks add up
    svd     sum of D_i, at a smaller rank: its truncated SVD, the nearest matrix of that rank
    ties    trim, elect sign, merge (Yadav et al. 2023, arXiv:2306.01708): of each delta the share
            `density` of largest magnitude, of each number the sign that the deltas' sum has, and
            the mean of weighted deltas over the adapters that have that sign
    dare    of each delta a random share `density`, divided by it (Yu et al. 2023,
            arXiv:2311.03099), then the weighted sum

ties and dare work on numbers one by one, and so depend on the space that the deltas are written in:
`weights`, as published, where the result has full rank and is truncated by SVD; or `core`, the
coordinates of all deltas in the spaces that their factors span together (Panariello et al. 2025,
arXiv:2509.17786), where nothing is lost at the sum of the ranks. Experts merge one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from mlxstacks.errors import AdapterError
from mlxstacks.files.lora_modules import Adapter, LoraModule, mlx_config, unified, widened
from mlxstacks.ops.affine import Array, to_storage

Method = Literal["concat", "svd", "ties", "dare"]
Space = Literal["weights", "core"]
# Deltas (N, K) of one space, not weighted, and their weights -> what they merge to.
Merge = Callable[[Sequence[Array], Sequence[float]], Array]
Random = np.random.Generator


@dataclass(frozen=True, slots=True)
class MergedModule:
    """ranks: of the adapters that have the module. norm: of what the method aims at; error: of what
    was written against that, relative, by Frobenius norms. Both None for concat, which is exact.
    """

    path: str
    ranks: tuple[int, ...]
    rank: int
    norm: float | None = None
    error: float | None = None


def merge_adapters(
    adapters: Sequence[Adapter],
    weights: Sequence[float],
    method: Method = "concat",
    *,
    rank: int | None = None,
    density: float = 0.5,
    space: Space = "weights",
    seed: int = 0,
) -> tuple[Adapter, list[MergedModule]]:
    """One adapter in mlx-lm's terms, and what became of each module. The name and the fingerprint
    of the base are the first adapter's.

    rank: of the result, at most; None: the largest of any adapter. concat takes none.
    A module that some adapters lack is merged of those that have it.
    Laws: concat's delta is the sum of the weighted deltas, to 1 ulp of lora_b; svd's is the nearest
    of its rank; dare with density 1, in either space, is svd, and ties is of one adapter.
    Raises: AdapterError listing the modules whose shapes differ.
    """
    paths = dict.fromkeys(path for adapter in adapters for path in adapter.modules)
    most = rank or max(m.rank for adapter in adapters for m in adapter.modules.values())
    modules, rows, problems = [], [], list[str]()
    for number, path in enumerate(paths):
        pairs = [
            (adapter.modules[path], weight)
            for adapter, weight in zip(adapters, weights, strict=True)
            if path in adapter.modules
        ]
        if len(shapes := {module.delta_shape for module, _ in pairs}) > 1:
            problems.append(f"{path}: weights of shapes {sorted(map(list, shapes))}")
            continue
        ranks = tuple(module.rank for module, _ in pairs)
        if method == "concat":
            module = _concatenated(pairs)
            rows.append(MergedModule(path, ranks, module.rank))
        else:
            random = np.random.default_rng((seed, number))
            merges: dict[str, Merge] = {
                "svd": _sum, "ties": partial(_ties, density),
                "dare": partial(_dare, density, random),
            }  # fmt: skip
            in_core = method == "svd" or space == "core"
            module, norm, error = _merged(pairs, merges[method], in_core, most)
            rows.append(MergedModule(path, ranks, module.rank, norm, error))
        modules.append(module)
    if problems:
        names = ", ".join(str(adapter.directory) for adapter in adapters)
        raise AdapterError("\n  ".join([f"{names} belong to different models:", *problems]))
    merged, first = unified(modules), adapters[0]
    base = first.config.get("model")
    named = base if isinstance(base, str) else None
    config = mlx_config(merged, named, first.base_fingerprint)
    return Adapter(first.directory, config, merged, {}), rows


def _concatenated(pairs: Sequence[tuple[LoraModule, float]]) -> LoraModule:
    """Ranks one after the other; weights and scales in lora_b, in float32 unless that is exact."""
    scales = [module.scale for module, _ in pairs if module.scale] or [1.0]
    scale = max(scales, key=scales.count)
    dtypes = {module.dtype for module, _ in pairs}
    halves = []
    for module, weight in pairs:
        wide = widened(module)
        factor = weight * module.scale / scale
        halves.append((wide.lora_a, (wide.lora_b * np.float64(factor)).astype(np.float32)))
    a_axis, b_axis = (1, 2) if pairs[0][0].is_switch else (1, 0)
    a = np.concatenate([half for half, _ in halves], a_axis)
    b = np.concatenate([half for _, half in halves], b_axis)
    first = pairs[0][0]
    if len(dtypes) == 1 and all(weight * m.scale == scale for m, weight in pairs):
        return replace(first, lora_a=to_storage(a, first.dtype), lora_b=to_storage(b, first.dtype))
    return replace(first, lora_a=a, lora_b=b, dtype="F32", scale=scale)


def _merged(
    pairs: Sequence[tuple[LoraModule, float]], merge: Merge, in_core: bool, rank: int
) -> tuple[LoraModule, float, float]:
    """(module of scale 1 in float32, norm of the aim, relative error)."""
    factors = [_factors(module) for module, _ in pairs]
    weights = [weight for _, weight in pairs]
    lefts, rights, squares, lost = [], [], 0.0, 0.0
    for expert in range(len(factors[0][0])):
        parts = [(left[expert], right[expert]) for left, right in factors]
        if in_core:
            rows = np.linalg.svd(np.hstack([left for left, _ in parts]), full_matrices=False)[0]
            columns = np.linalg.svd(np.vstack([right for _, right in parts]), full_matrices=False)[
                2
            ]
            aim = merge([rows.T @ left @ right @ columns.T for left, right in parts], weights)
            left, right = _truncated(aim, rank)
            written, left, right = left @ right, rows @ left, right @ columns
        else:
            aim = merge([left @ right for left, right in parts], weights)
            left, right = _truncated(aim, rank)
            written = left @ right
        squares, lost = squares + float(np.sum(aim**2)), lost + float(np.sum((aim - written) ** 2))
        lefts.append(left.astype(np.float32))
        rights.append(right.astype(np.float32))
    first = pairs[0][0]
    if first.is_switch:
        a, b = np.stack(rights), np.stack(lefts)
    else:
        a, b = np.ascontiguousarray(rights[0].T), np.ascontiguousarray(lefts[0].T)
    module = LoraModule(first.path, a, b, "F32", 1.0)
    return module, squares**0.5, (lost / squares) ** 0.5 if squares else 0.0


def _factors(module: LoraModule) -> tuple[Array, Array]:
    """(E, N, R) and (E, R, K) in float64, whose product is the delta; E is 1 without experts."""
    wide = widened(module)
    a, b = wide.lora_a.astype(np.float64), wide.lora_b.astype(np.float64)
    left, right = (b, a) if module.is_switch else (b.T[None], a.T[None])
    return left * module.scale, right


def _truncated(matrix: Array, rank: int) -> tuple[Array, Array]:
    """(N, r) and (r, K) of the nearest matrix of a rank, r the smaller of it and N and K.

    By the eigenvectors of the smaller Gram matrix: of the large values, which are all that is kept,
    they have double precision's accuracy, in a fraction of an SVD's time.
    """
    if len(matrix) > matrix.shape[1]:
        left, right = _truncated(matrix.T, rank)
        return right.T, left.T
    from scipy.linalg import eigh

    size = len(matrix)
    rank = min(rank, size)
    basis = eigh(matrix @ matrix.T, subset_by_index=(size - rank, size - 1))[1][:, ::-1]
    return basis, basis.T @ matrix


# --- how numbers merge ----------------------------------------------------------------------------


def _sum(deltas: Sequence[Array], weights: Sequence[float]) -> Array:
    return np.asarray(sum(w * delta for delta, w in zip(deltas, weights, strict=True)))


def _ties(density: float, deltas: Sequence[Array], weights: Sequence[float]) -> Array:
    """Signs are elected by the trimmed deltas without their weights, as in PEFT."""
    trimmed = np.stack([_trimmed(delta, density) for delta in deltas])
    agrees = np.sign(trimmed) == np.where(trimmed.sum(axis=0) >= 0, 1, -1)
    shares = np.array(weights).reshape(-1, *[1] * deltas[0].ndim)
    total: Array = (trimmed * shares * agrees).sum(axis=0) / np.maximum(agrees.sum(axis=0), 1)
    return total


def _trimmed(delta: Array, density: float) -> Array:
    """The `density * size` numbers of largest magnitude; the others are 0."""
    count = max(1, int(density * delta.size))
    least = np.partition(np.abs(delta), delta.size - count, axis=None)[delta.size - count]
    return np.where(np.abs(delta) >= least, delta, 0)


def _dare(
    density: float, random: Random, deltas: Sequence[Array], weights: Sequence[float]
) -> Array:
    kept = [np.where(random.random(d.shape) < density, d / density, 0) for d in deltas]
    return _sum(kept, weights)

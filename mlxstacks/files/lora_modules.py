"""A LoRA in memory: what mlx-lm stores of one module, and of a whole adapter; and what both formats
share on disk, one safetensors file and one JSON config.

Arrays keep the raw numbers of the file: BF16 is uint16, F16 float16, F32 float32. Axis order is
mlx-lm's, which differs by kind:

    dense      lora_a (K, R)     lora_b (R, N)     delta of the weight (N, K) = scale * (A B)^T
    switch     lora_a (E, R, K)  lora_b (E, N, R)  delta of the weight (E, N, K) = scale * B A
    embedding  lora_a (V, R)     lora_b (R, K)     delta of the weight (V, K) = scale * A B

A dense pair and an embedding pair look alike; only the base's shapes tell them apart. In a file
either half of a switch pair may hold one expert that stands for all ("shared outer" adapters).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from mlxstacks.errors import AdapterError, CheckpointError, in_lines
from mlxstacks.files.outputs import staged_directory, write_json
from mlxstacks.files.shards import (
    ShardHeader,
    ShardWriter,
    TensorInfo,
    file_identity,
    read_header,
    read_rows,
    read_tensor,
)
from mlxstacks.files.strict_json import parse_object
from mlxstacks.ops.affine import Array, from_storage, to_storage
from mlxstacks.regular_files import check_regular

FLOAT_DTYPES = ("F32", "F16", "BF16")

# Our own key, in adapter_config.json or in the safetensors metadata: fingerprint of the base.
FINGERPRINT_KEY = "mlxstacks_base_fingerprint"
# Our own key in adapter_config.json: "pooled" or "grid", how the adapter was trained for its fuse.
MERGE_READY_KEY = "mlxstacks_merge_ready"

# One module of a huge rank would have all others padded to it: zeros may be so many times the
# numbers that were stored, and so many more.
_MOST_PADDING, _FREE_PADDING = 64, 1 << 24

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LoraModule:
    """The learned pair of one module; shapes in the module docstring, dtype a safetensors name.

    magnitude: of DoRA, (N,) float32 (an embedding: (V,)): the norms of the rows of the fused
    weight, whose direction is W + delta (Liu et al., DoRA, 2024). None: a LoRA.
    """

    path: str
    lora_a: Array
    lora_b: Array
    dtype: str
    scale: float
    magnitude: Array | None = None

    @property
    def is_switch(self) -> bool:
        return self.lora_a.ndim == 3

    @property
    def rank(self) -> int:
        return int(self.lora_a.shape[1])

    @property
    def parameters(self) -> int:
        return int(self.lora_a.size + self.lora_b.size)

    @property
    def delta_shape(self) -> tuple[int, ...]:
        """(N, K), with experts (E, N, K); of an embedding (K, V)."""
        a, b = self.lora_a.shape, self.lora_b.shape
        return (*b[:2], a[2]) if self.is_switch else (b[1], a[0])


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in mlx-lm's terms.

    config: the whole adapter_config.json. metadata: the strings in the safetensors header.
    modules: by path; of a streamed adapter each is read from the file when it is asked for.
    """

    directory: Path
    config: dict[str, Any]
    modules: Mapping[str, LoraModule]
    metadata: dict[str, str]

    @property
    def is_dora(self) -> bool:
        return self.config.get("fine_tune_type") == "dora"

    @property
    def base_fingerprint(self) -> str | None:
        """Fingerprint of the base that it was trained on; None where the adapter names none."""
        value = self.config.get(FINGERPRINT_KEY) or self.metadata.get(FINGERPRINT_KEY)
        return str(value) if value else None


class StreamedModules(Mapping[str, LoraModule]):
    """Modules of a file, each read when it is asked for; only the last one is held.

    identity: of the file (`file_identity`) before its modules were checked.
    """

    def __init__(
        self,
        file: Path,
        identity: tuple[int, ...],
        readers: Mapping[str, Callable[[], LoraModule | None]],
    ) -> None:
        self._file, self._identity, self._readers = file, identity, readers
        self._last: LoraModule | None = None

    def __getitem__(self, path: str) -> LoraModule:
        if self._last is None or self._last.path != path:
            read = self._readers[path]
            self._last = None  # before the next one is read
            self._last = read()
            if self._last is None or file_identity(self._file) != self._identity:
                raise AdapterError(f"{self._file}: was changed while it was read; try again")
        return self._last

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def with_experts(module: LoraModule, experts: int) -> LoraModule:
    """The same switch pair with one expert for all seen as `experts` equal ones; nothing is copied.

    Law: the delta of every expert is that of the shared half with its own.
    """
    a, b = (
        np.broadcast_to(half, (experts, *half.shape[1:])) if half.shape[0] == 1 else half
        for half in (module.lora_a, module.lora_b)
    )
    return replace(module, lora_a=a, lora_b=b)


def outer_half(path: str) -> str:
    """The half of an expert pair on the hidden state's side, which shared-outer adapters have once
    for all experts: lora_b of a down_proj, lora_a of every other.
    """
    return "lora_b" if path.rpartition(".")[2] == "down_proj" else "lora_a"


def is_shared_outer(modules: Iterable[LoraModule]) -> bool:
    """Whether there are experts, and the outer half of each is the same for all of them, to the
    bit."""
    switches = [module for module in modules if module.is_switch]
    return bool(switches) and all(map(_shares_outer_half, switches))


def _shares_outer_half(module: LoraModule) -> bool:
    half = getattr(module, outer_half(module.path))
    if half.strides[0] == 0 or len(half) == 1:
        return True
    bits = half.view(f"u{half.dtype.itemsize}")
    return bool((bits == bits[:1]).all())


def outer_halves_once(module: LoraModule) -> tuple[Array, Array]:
    """lora_a and lora_b, the outer one of a switch pair with one expert for all."""
    if not module.is_switch:
        return module.lora_a, module.lora_b
    if outer_half(module.path) == "lora_a":
        return module.lora_a[:1], module.lora_b
    return module.lora_a, module.lora_b[:1]


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a number that fits a scale: no bool, NaN, Inf or giant integer."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def first_non_finite(raw: Array, dtype: str) -> tuple[int, ...] | None:
    """Index of the first NaN or Inf, or None. raw: any shape, raw numbers of `dtype`."""
    if dtype == "BF16":
        bad = (raw & np.uint16(0x7F80)) == np.uint16(0x7F80)  # exponent all ones
    else:
        bad = ~np.isfinite(raw)
    flat = np.flatnonzero(bad)
    return tuple(int(i) for i in np.unravel_index(flat[0], raw.shape)) if flat.size else None


def is_zero(raw: Array, dtype: str) -> bool:
    """Whether every number is plus or minus zero."""
    return not np.any(raw & np.uint16(0x7FFF)) if dtype == "BF16" else not np.any(raw)


def widened(module: LoraModule) -> LoraModule:
    """The same numbers in float32; exact."""
    if module.dtype == "F32":
        return module
    a, b = (from_storage(raw, module.dtype) for raw in (module.lora_a, module.lora_b))
    return replace(module, lora_a=a, lora_b=b, dtype="F32")


def padded(module: LoraModule, rank: int) -> LoraModule:
    """The same delta at a larger rank: zero rows and columns are added. Exact."""
    extra = rank - module.rank
    if extra < 0:
        raise AdapterError(f"{module.path}: rank {module.rank} cannot be padded to {rank}")
    if not extra:
        return module
    a_pad = ((0, 0), (0, extra), (0, 0)) if module.is_switch else ((0, 0), (0, extra))
    b_pad = ((0, 0), (0, 0), (0, extra)) if module.is_switch else ((0, extra), (0, 0))
    return replace(module, lora_a=np.pad(module.lora_a, a_pad), lora_b=np.pad(module.lora_b, b_pad))


def rescaled(module: LoraModule, scale: float) -> LoraModule:
    """The same delta under another `scale`: the ratio is folded into lora_b.

    Law: exact when the ratio is a power of two (nothing over- or underflows); otherwise the pair
    becomes float32 and each number of lora_b is within 1 ulp of the exact product.
    """
    if module.scale == scale:
        return module
    if scale == 0:
        raise AdapterError(f"{module.path}: scale {module.scale} cannot be expressed as scale 0")
    exact = from_storage(module.lora_b, module.dtype).astype(np.float64) * (module.scale / scale)
    with np.errstate(over="ignore"):
        folded = to_storage(exact.astype(np.float32), module.dtype)
    if np.array_equal(from_storage(folded, module.dtype).astype(np.float64), exact):
        return replace(module, lora_b=folded, scale=scale)
    with np.errstate(over="ignore"):
        in_float32 = exact.astype(np.float32)
    if not np.isfinite(in_float32).all():
        raise AdapterError(
            f"{module.path}: lora_b times {module.scale / scale:g} leaves the range of float32"
        )
    return replace(widened(module), lora_b=in_float32, scale=scale)


def common_rank_and_scale(modules: Iterable[LoraModule]) -> tuple[int, float]:
    """The largest rank, and the scale that most modules have, so that few are folded. Looks at each
    module once.

    Raises: AdapterError where padding to that rank would make far more numbers than are stored.
    """
    found = [(module.rank, module.parameters, module.scale, module.path) for module in modules]
    if not found:
        raise AdapterError("an adapter needs at least one module")
    rank, _, _, widest = max(found, key=lambda module: module[0])
    stored = sum(parameters for _, parameters, _, _ in found)
    numbers = sum(parameters // own * rank for own, parameters, _, _ in found)
    if numbers > _MOST_PADDING * stored + _FREE_PADDING:
        raise AdapterError(
            f"{widest}: rank {rank:,}, to which all modules are padded, makes {numbers:,} "
            f"numbers of {stored:,}; train or export the adapter with ranks nearer to each other"
        )
    scales = [scale for _, _, scale, _ in found if scale]
    return rank, max(scales, key=scales.count) if scales else 0.0


def unified(modules: Iterable[LoraModule]) -> dict[str, LoraModule]:
    """The same deltas at one rank and one scale, as mlx-lm's config demands."""
    modules = list(modules)
    rank, scale = common_rank_and_scale(modules)
    return {m.path: rescaled(padded(m, rank), scale) for m in modules}


def with_magnitude(module: LoraModule, info: TensorInfo, problems: list[str]) -> LoraModule | None:
    """The module with DoRA's magnitude; what is wrong goes to `problems`."""
    rows = {module.lora_b.shape[-1], module.lora_a.shape[0]}  # dense, embedding
    shape = tuple(n for n in info.shape if n != 1)
    if module.is_switch or len(shape) > 1 or math.prod(info.shape) not in rows:
        problems.append(
            f"{info.name}: shape {list(info.shape)}; a magnitude has a number for each row of a "
            "weight of two axes"
        )
        return None
    if info.dtype not in FLOAT_DTYPES:
        problems.append(f"{info.name}: dtype {info.dtype}; allowed are {', '.join(FLOAT_DTYPES)}")
        return None
    magnitude = from_storage(read_tensor(info), info.dtype).reshape(-1).astype(np.float32)
    if not np.isfinite(magnitude).all():
        problems.append(f"{info.name}: NaN or Inf among the magnitudes")
        return None
    return replace(module, magnitude=magnitude)


def delta_norm(module: LoraModule) -> float:
    """Frobenius norm of scale * B A, from R x R products; no array of the weight's size is made,
    but where the rank is larger than that.
    """
    wide = widened(module)
    a, b = wide.lora_a.astype(np.float64), wide.lora_b.astype(np.float64)
    left, right = (b, a) if module.is_switch else (a, b)  # (E, N, R) (E, R, K), or (K, R) (R, N)
    if module.rank**2 > left.shape[-2] * right.shape[-1]:
        return abs(module.scale) * float(np.linalg.norm(left @ right))
    grams = (left.swapaxes(-1, -2) @ left) * (right @ right.swapaxes(-1, -2))  # (E, R, R)
    return abs(module.scale) * max(float(np.sum(grams)), 0.0) ** 0.5


def outside_config(adapter: Adapter) -> list[str]:
    """Paths of modules that the adapter's own config leaves out, so that mlx-lm refuses it.

    mlx-lm adapts what `keys` names, by whole paths, or by paths inside of the last `num_layers`
    layers. How many layers the model has is not known here: of more layers than that, the first
    ones are listed.
    """
    parameters, count = adapter.config.get("lora_parameters"), adapter.config.get("num_layers")
    if not isinstance(parameters, dict):
        return []
    keys = parameters.get("keys")
    names = [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else None
    within = {
        path: (int(part.group(1)), path[part.end() :])
        for path in adapter.modules
        if path not in (names or ()) and (part := _LAYER.search(path))
    }
    layers = sorted({layer for layer, _ in within.values()})
    if isinstance(count, int) and count > 0:  # in mlx-lm's slice others are all layers
        layers = layers[-count:]
    return [
        path
        for path, (layer, name) in within.items()
        if layer not in layers or (names is not None and name not in names)
    ]


def mlx_config(
    modules: Mapping[str, LoraModule], base_model: str | None = None, fingerprint: str | None = None
) -> dict[str, Any]:
    """An adapter_config.json with which mlx-lm loads exactly these modules.

    `keys` holds whole module paths: mlx-lm looks such keys up in the whole model, so nothing but
    these modules is adapted, whatever their layer.
    """
    if not modules:
        raise AdapterError("an adapter needs at least one module")
    layers = [int(m.group(1)) for path in modules if (m := _LAYER.search(path))]
    first = next(iter(modules.values()))
    config: dict[str, Any] = {
        "fine_tune_type": "lora",
        "num_layers": max(layers) + 1 if layers else 1,
        "lora_parameters": {
            "rank": first.rank,
            "scale": first.scale,
            "dropout": 0.0,
            "keys": list(modules),
        },
    }
    if base_model:
        config["model"] = base_model
    if fingerprint:
        config[FINGERPRINT_KEY] = fingerprint
    return config


CONFIG = "adapter_config.json"
_LARGEST_CONFIG_BYTES = 16_000_000


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object of an adapter_config.json.

    Raises: AdapterError when it is missing, not JSON (NaN and Infinity are not), or no object.
    """
    if not path.is_file():
        raise AdapterError(f"{path}: missing; an adapter is a directory with its {path.name}")
    check_regular(path, kind=AdapterError)
    if path.stat().st_size > _LARGEST_CONFIG_BYTES:
        raise AdapterError(f"{path}: larger than {_LARGEST_CONFIG_BYTES} bytes, not a config")
    try:
        return parse_object(path.read_bytes().decode())
    except ValueError as error:
        raise AdapterError(f"{path}: not JSON: {error}") from error


def open_weights(path: Path) -> ShardHeader:
    """Header of an adapter's safetensors file. Raises: AdapterError when missing or malformed."""
    if not path.is_file():
        raise AdapterError(f"{path}: missing; the adapter's config is there but not its weights")
    try:
        return read_header(path)
    except CheckpointError as error:
        raise AdapterError(f"adapter weights: {error}") from error


@dataclass(frozen=True, slots=True)
class StoredPair:
    """Both halves of a pair where they are stored."""

    lora_a: TensorInfo
    lora_b: TensorInfo

    @property
    def dtype(self) -> str:
        """Of the pair: float32, which holds either exactly, where its halves differ."""
        return self.lora_a.dtype if self.lora_a.dtype == self.lora_b.dtype else "F32"

    def read(self, half: str, first: int = 0, last: int | None = None) -> Array:
        """Raw numbers of "lora_a" or "lora_b", of all its rows or some, in the pair's dtype."""
        info: TensorInfo = getattr(self, half)
        raw = read_rows(info, first, info.shape[0] if last is None else last)
        return raw if info.dtype == self.dtype else from_storage(raw, info.dtype)

    def check(self, problems: list[str]) -> bool:
        """Whether the numbers can be used; why not goes to `problems`. Holds one half at a time."""
        before = len(problems)
        for info in (self.lora_a, self.lora_b):
            if info.dtype not in FLOAT_DTYPES:
                allowed = ", ".join(FLOAT_DTYPES)
                problems.append(
                    f"{info.name}: dtype {info.dtype}; an adapter's numbers are {allowed}"
                )
            elif not info.size:
                problems.append(f"{info.name}: shape {info.shape} holds nothing")
            elif (index := first_non_finite(read_tensor(info), info.dtype)) is not None:
                problems.append(
                    f"{info.name}: NaN or Inf at index {list(index)}; train or export it again"
                )
        return len(problems) == before


def raise_problems(directory: Path, problems: Sequence[str], about: str = "") -> None:
    """One AdapterError that lists the first problems; nothing when there is none."""
    if problems:
        many = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        raise AdapterError(in_lines(f"adapter {directory}{about}: {many}", problems))


def save_adapter(
    directory: str | Path,
    weights_name: str,
    tensors: Mapping[str, tuple[str, Array]],
    config: Mapping[str, Any],
    metadata: Mapping[str, str],
    force: bool,
    source: Path,
) -> None:
    """Write weights and config as a whole: after a crash the target is the old one or the new.

    tensors: name -> (safetensors dtype, raw numbers), written in this order. source: the adapter
    that was read, which `force` does not replace either.
    Raises: TargetError when the target exists (without force), is or holds the source, or cannot
        be written.
    """
    plan = [(name, dtype, raw.shape) for name, (dtype, raw) in tensors.items()]
    needed = sum(raw.nbytes for _, raw in tensors.values()) + 1_000_000
    target = Path(directory)
    with staged_directory(target, force=force, needed_bytes=needed, inputs=[source]) as staging:
        with ShardWriter(staging / weights_name, plan, dict(metadata)) as writer:
            for name, (_, raw) in tensors.items():
                writer.write(name, np.ascontiguousarray(raw))
        write_json(staging / CONFIG, dict(config))

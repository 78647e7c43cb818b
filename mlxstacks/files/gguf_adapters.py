"""llama.cpp's LoRA format, one GGUF file, read into mlx-lm's terms and written.

Keys: general.type "adapter", adapter.type "lora", adapter.lora.alpha (float32), and the base's
general.architecture. Tensors, by the base's own GGUF names (R rank):

    blk.0.ffn_up.weight.lora_a       (R, K)     .lora_b (N, R)      a linear projection
    blk.0.ffn_up_exps.weight.lora_a  (E, R, K)  .lora_b (E, N, R)   experts
    token_embd.weight.lora_a         (V, R)     .lora_b (K, R)      the embedding

llama.cpp computes `alpha / R * B A` in float32; every expert has its own pair. Rows that a GGUF
model stores in another order than mlx-lm are in that order here too: those of q and k in
architecture llama (interleaved rope), and in Qwen3.5's linear attention the value heads, which
mlx-lm has grouped by key head and GGUF tiled over them.

The file says neither mlx-lm's names nor the order: the base has to be at hand, both ways.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.files.checkpoint import Checkpoint
from mlxstacks.files.disk import mlx_write_errors, target_errors
from mlxstacks.files.gguf_file import FLOATS, GGUFFile, GGUFTensor, float_values, open_gguf
from mlxstacks.files.lora_modules import (
    FINGERPRINT_KEY,
    FLOAT_DTYPES,
    Adapter,
    LoraModule,
    StreamedModules,
    common_rank_and_scale,
    first_non_finite,
    is_finite_number,
    mlx_config,
    padded,
    raise_problems,
    rescaled,
)
from mlxstacks.files.outputs import staged_directory
from mlxstacks.files.peft_layout import SWITCH, is_embedding_name, to_hub
from mlxstacks.files.shards import file_identity
from mlxstacks.files.stored_weight import module_paths
from mlxstacks.ops.affine import Array, from_storage

GGUF_WEIGHTS = "adapter.gguf"
# mlx-lm's model_type -> llama.cpp's architecture: those whose weights it stores as they are, or in
# an order that is undone here.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}
_BASE_NAME_KEY = "mlxstacks_base_model"
_HALVES = ("lora_a", "lora_b")


@dataclass(frozen=True)
class _Base:
    """What a GGUF adapter leaves to the base. names: of mlx-lm's modules -> GGUF's tensors."""

    directory: Path
    architecture: str
    sizes: Mapping[str, Any]
    names: Mapping[str, str]

    def size(self, key: str) -> int:
        return _size(self.directory, self.sizes, key)

    def orders(self, path: str, module: LoraModule) -> tuple[Array | None, Array | None]:
        """Output rows and input columns of the GGUF weight as indices of mlx-lm's; None: the same.

        Raises: AdapterError where the module's width is not what the config says.
        """
        leaf = path.rpartition(".")[2]
        if self.architecture == "llama" and leaf in ("q_proj", "k_proj"):
            of_keys = leaf == "k_proj" and "num_key_value_heads" in self.sizes
            heads = self.size("num_key_value_heads" if of_keys else "num_attention_heads")
            rows = module.lora_b.shape[1]
            if rows % (2 * heads):
                raise AdapterError(f"{path}: {rows} rows are no {heads} heads of an even size")
            return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1), None
        if ".linear_attn." not in path:
            return None, None
        keys, values = self.size("linear_num_key_heads"), self.size("linear_num_value_heads")
        key_rows = 2 * keys * self.size("linear_key_head_dim")
        width = 1 if leaf in ("in_proj_a", "in_proj_b") else self.size("linear_value_head_dim")
        if values % keys:
            raise AdapterError(f"{path}: {values} value heads for {keys} key heads in the config")
        tiled = np.arange(values).reshape(keys, -1).T.reshape(-1, 1)  # of heads grouped by key
        order = (tiled * width + np.arange(width)).reshape(-1)
        if leaf == "in_proj_qkv":
            order = np.concatenate([np.arange(key_rows), key_rows + order])
        wide = module.lora_a.shape[0] if leaf == "out_proj" else module.lora_b.shape[1]
        if wide != order.size:
            raise AdapterError(
                f"{path}: {wide} numbers wide; the config of the base says {order.size}"
            )
        return (None, order) if leaf == "out_proj" else (order, None)


def _size(directory: Path, sizes: Mapping[str, Any], key: str) -> int:
    value = sizes.get(key)
    if not isinstance(value, int) or value < 1:
        raise AdapterError(
            f"{directory}/config.json: {key} is {value!r}; names and rows of a GGUF file follow "
            "from it"
        )
    return value


def _base(model: Checkpoint | None, what: str) -> _Base:
    """Raises: AdapterError without a model, or of a type that is not in `ARCHITECTURES`."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    if model is None:
        raise AdapterError(
            f"{what}: a GGUF adapter has llama.cpp's names and order of rows; give the MLX model "
            "that it belongs to with --model"
        )
    model_type = model.config.get("model_type")
    architecture = ARCHITECTURES.get(str(model_type))
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise AdapterError(
            f"{model.directory}: model_type {model_type!r}; GGUF adapters are known for {known}. "
            "Write --to peft, and convert that with llama.cpp's convert_lora_to_gguf.py"
        )
    text = model.config.get("text_config")
    sizes: Mapping[str, Any] = text if isinstance(text, dict) else model.config
    known_names = get_tensor_name_map(
        next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture),
        _size(model.directory, sizes, "num_hidden_layers"),
    )
    names = {}
    for path in module_paths(model):
        hub = to_hub(path)
        if match := SWITCH.match(hub):
            hub = f"{match['block']}.experts.{match['name']}"
        if (name := known_names.get_name(hub)) is not None:
            names[path] = f"{name}.weight"
    return _Base(model.directory, architecture, sizes, names)


def write_gguf(
    adapter: Adapter,
    directory: str | Path,
    model: Checkpoint | None,
    base_model_name: str | None = None,
    force: bool = False,
) -> None:
    """Write `adapter` as `adapter.gguf` in a directory, in the adapter's dtypes. Of a streamed one
    it holds a module at a time.

    Law: read_gguf of the result has the same modules, bit for bit; the scale to float32, which is
    what llama.cpp computes with.

    Raises: AdapterError listing modules that GGUF has no place for; TargetError as `write_adapter`.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, Keys

    base = _base(model, str(adapter.directory))
    assert model is not None
    rank, scale = common_rank_and_scale(adapter.modules.values())
    problems, tensors = list[str](), dict[str, tuple[str, Array]]()
    if np.float32(scale) == 0:
        problems.append(
            "scale is 0, which llama.cpp takes as 1; `adapter zero` writes a delta of 0"
        )

    def halves(path: str) -> tuple[str, tuple[Array, Array]]:
        """Their dtype, and what the file holds of them. Again, rather than hold all of them."""
        module = rescaled(padded(adapter.modules[path], rank), scale)
        return module.dtype, _as_gguf(path, module, base)

    for path in adapter.modules:
        name = base.names.get(path)
        if name is None:
            problems.append(f"{path}: {base.architecture} has no tensor for it in GGUF")
        elif is_embedding_name(path) and "output.weight" not in base.names.values():
            problems.append(
                f"{path}: the embedding is the head too, and llama.cpp has an adapter for one of "
                "both; train without it"
            )
        else:
            try:
                dtype, pair = halves(path)
            except AdapterError as error:
                problems.append(str(error))
                continue
            for leaf, half in zip(_HALVES, pair, strict=True):
                # Of the shape and type of the half, without its numbers.
                tensors[f"{name}.{leaf}"] = dtype, np.broadcast_to(half.dtype.type(0), half.shape)
            del half, pair  # before the next ones are read
    raise_problems(adapter.directory, problems)
    target, needed = Path(directory), sum(half.nbytes for _, half in tensors.values())
    with (
        staged_directory(
            target, force=force, needed_bytes=needed + 1_000_000, inputs=[adapter.directory]
        ) as staging,
        target_errors(target, needed, only_writes=True),
        mlx_write_errors(target),
        closing(GGUFWriter(staging / GGUF_WEIGHTS, base.architecture)) as writer,
    ):
        writer.add_string(Keys.General.TYPE, "adapter")
        writer.add_string(Keys.Adapter.TYPE, "lora")
        writer.add_float32(Keys.Adapter.LORA_ALPHA, _float32_alpha(scale, rank))
        if name := base_model_name or adapter.config.get("model"):
            writer.add_string(_BASE_NAME_KEY, str(name))
        if adapter.base_fingerprint:
            writer.add_string(FINGERPRINT_KEY, adapter.base_fingerprint)
        for name, (dtype, half) in tensors.items():
            kind = GGMLQuantizationType[dtype]
            writer.add_tensor_info(name, half.shape, half.dtype, half.nbytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for path in adapter.modules:
            for half in (pair := halves(path)[1]):
                writer.write_tensor_data(np.ascontiguousarray(half))
            del half, pair


def _float32_alpha(scale: float, rank: int) -> float:
    """alpha whose float32 quotient by the rank is the float32 of the scale, where there is one."""
    wanted, alpha = np.float32(scale), np.float32(scale * rank)
    near = (
        alpha,
        np.nextafter(alpha, np.float32(np.inf)),
        np.nextafter(alpha, np.float32(-np.inf)),
    )
    return float(next((a for a in near if a / np.float32(rank) == wanted), alpha))


def _as_gguf(path: str, module: LoraModule, base: _Base) -> tuple[Array, Array]:
    if module.is_switch:
        return module.lora_a, module.lora_b
    if is_embedding_name(path):
        return module.lora_a, module.lora_b.T
    rows, columns = base.orders(path, module)
    a, b = module.lora_a.T, module.lora_b.T  # (R, K), (N, R)
    return (a if columns is None else a[:, columns]), (b if rows is None else b[rows])


def _from_gguf(path: str, module: LoraModule, base: _Base) -> LoraModule:
    """The inverse of `_as_gguf`. module: the halves as in the file."""
    a, b = module.lora_a, module.lora_b
    if not module.is_switch and not is_embedding_name(path):
        plain = LoraModule(path, a.T, b.T, module.dtype, module.scale)
        rows, columns = base.orders(path, plain)
        b = b if rows is None else b[np.argsort(rows)]
        a = a if columns is None else a[:, np.argsort(columns)]
        a = a.T
    b = b if module.is_switch else b.T
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return LoraModule(path, a, b, module.dtype, module.scale)


def read_gguf(path: str | Path, model: Checkpoint | None, stream: bool = False) -> Adapter:
    """A GGUF LoRA as an mlx-lm adapter. model: the MLX checkpoint that it belongs to. stream: check
    every module now, hold one at a time, and read each again when it is asked for.

    Float tensors keep their bits, quantized ones become float32. The scale is the shortest decimal
    of the float32 `alpha / rank`; alpha 0 or none means 1, as to llama.cpp.

    Raises: AdapterError listing every problem: no LoRA, of another architecture, names of no module
        of the model, half a pair, numbers that are not finite; no model.
    """
    path = Path(path)
    try:
        file, identity = open_gguf(path), file_identity(path)
        kinds = [file.value("general.type", str, ""), file.value("adapter.type", str, "")]
        architecture = file.value("general.architecture", str, "")
        alpha = file.value("adapter.lora.alpha", float, 0.0)
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    if kinds != ["adapter", "lora"]:
        raise AdapterError(
            f"{path}: general.type {kinds[0]!r}, adapter.type {kinds[1]!r}; a GGUF adapter has "
            "'adapter' and 'lora' (a model goes through `mlxstacks convert`)"
        )
    base = _base(model, str(path))
    problems: list[str] = []
    if architecture != base.architecture:
        problems.append(
            f"architecture {architecture!r}; {base.directory} is {base.architecture!r} to llama.cpp"
        )
    if "adapter.alora.invocation_tokens" in file.fields:
        problems.append("an activated LoRA applies to some tokens only; it cannot be fused")
    if not is_finite_number(alpha):
        problems.append(f"adapter.lora.alpha is {alpha}, not a finite number below 1e30")
    raise_problems(path, problems)
    pairs: dict[str, dict[str, GGUFTensor]] = {}
    for name, tensor in file.tensors.items():
        stem, _, leaf = name.rpartition(".")
        if leaf in _HALVES:
            pairs.setdefault(stem, {})[leaf] = tensor
        else:
            problems.append(f"{name}: not a LoRA tensor; a GGUF adapter has .lora_a and .lora_b")
    paths = {name: module for module, name in base.names.items()}

    def read(name: str, problems: list[str]) -> LoraModule | None:
        if name not in paths:
            problems.append(f"{name}: no such tensor in {base.directory}")
        elif (stored := _read_pair(file, name, pairs[name], alpha, problems)) is not None:
            try:
                return _from_gguf(paths[name], stored, base)
            except AdapterError as error:
                problems.append(str(error))
        return None

    def outline(name: str) -> LoraModule | None:
        """The module's shapes without its numbers, which are gone before the next are read."""
        if (module := read(name, problems)) is None:
            return None
        a, b = (np.broadcast_to(x.dtype.type(0), x.shape) for x in (module.lora_a, module.lora_b))
        return replace(module, lora_a=a, lora_b=b)

    outlines = {name: module for name in pairs if (module := outline(name)) is not None}
    raise_problems(path, problems)
    if not outlines:
        raise AdapterError(f"{path}: holds no LoRA tensors")
    rank, scale = common_rank_and_scale(outlines.values())

    def reread(name: str) -> LoraModule | None:
        module = read(name, [])
        return None if module is None else rescaled(padded(module, rank), scale)

    readers = {module.path: partial(reread, name) for name, module in outlines.items()}
    modules: Mapping[str, LoraModule] = StreamedModules(path, identity, readers)
    marks = (file.fields.get(key) for key in (_BASE_NAME_KEY, FINGERPRINT_KEY))
    base_name, fingerprint = (mark if isinstance(mark, str) else None for mark in marks)
    config = mlx_config(modules, base_name, fingerprint)
    return Adapter(path, config, modules if stream else dict(modules), {})


def _read_pair(
    file: GGUFFile, name: str, pair: Mapping[str, GGUFTensor], alpha: float, problems: list[str]
) -> LoraModule | None:
    """The halves as they are in the file, of one dtype."""
    if missing := [leaf for leaf in _HALVES if leaf not in pair]:
        problems.append(f"{name}.{missing[0]}: missing, its other half is there")
        return None
    shapes = [pair[leaf].shape for leaf in _HALVES]
    a, b = shapes
    embedding = name == "token_embd.weight"
    ranks = (a[-1] if embedding else a[-2] if len(a) > 1 else 0, b[-1])
    expected = (3, 3) if name.endswith("_exps.weight") else (2, 2)
    if (len(a), len(b)) != expected or ranks[0] != ranks[1] or a[:-2] != b[:-2]:
        form = "(E, R, K) and (E, N, R)" if expected == (3, 3) else "(R, K) and (N, R)"
        form = "(V, R) and (K, R)" if embedding else form
        problems.append(f"{name}: lora_a {list(a)}, lora_b {list(b)}; expected {form}")
        return None
    halves = []
    for leaf in _HALVES:
        try:
            raw, dtype = _numbers(file, pair[leaf])
        except CheckpointError as error:
            problems.append(str(error))
            return None
        if (index := first_non_finite(raw, dtype)) is not None:
            problems.append(f"{name}.{leaf}: NaN or Inf at index {list(index)}")
            return None
        halves.append((raw, dtype))
    (a_raw, a_dtype), (b_raw, b_dtype) = halves
    if a_dtype != b_dtype:
        a_raw, b_raw = from_storage(a_raw, a_dtype), from_storage(b_raw, b_dtype)
        a_dtype = "F32"
    quotient = np.float32(alpha) / np.float32(ranks[1])
    scale = float(str(quotient)) if quotient else 1.0
    return LoraModule(name, a_raw, b_raw, a_dtype, scale)


def _numbers(file: GGUFFile, tensor: GGUFTensor) -> tuple[Array, str]:
    """Raw numbers in the tensor's shape, and their safetensors dtype."""
    if tensor.kind in FLOAT_DTYPES:
        return file.read(tensor).view(FLOATS[tensor.kind]).reshape(tensor.shape), tensor.kind
    return np.concatenate([*float_values(file, tensor)]).reshape(tensor.shape), "F32"

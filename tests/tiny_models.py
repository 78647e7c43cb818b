"""Writes tiny real checkpoints and adapters with mlx-lm itself, for everybody's tests.

Each checkpoint loads with `mlx_lm.load`: two layers, hidden size 128 (or 64), a byte tokenizer,
random weights from an explicit seed. Writing one takes well under a second once mlx_lm is imported.

    model = write_qwen_moe(tmp_path / "moe", bits=3)        # several shards and an index
    dense = write_llama(tmp_path / "dense", bits=None)      # one unquantized file
    adapter = random_adapter(model, keys=["mlp.switch_mlp.down_proj"], rank=2, std=0.01)
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path

NUM_LAYERS = 2
VOCAB_SIZE = 320
END_OF_TEXT = 256  # the 256 bytes come first
# Files of the checkpoints that this process wrote, by all that they follow from: a copy costs
# nothing beside building the model and drawing its weights.
_WRITTEN: dict[str, dict[str, bytes]] = {}


def qwen_moe_config(
    hidden_size: int = 128,
    num_experts: int = 4,
    tied: bool = False,
    moe_intermediate_size: int = 64,
) -> dict[str, Any]:
    """A `qwen3_5_moe` config with `text_config`: layer 0 gated-delta, layer 1 full attention."""
    text_config = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "num_hidden_layers": NUM_LAYERS,
        "full_attention_interval": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": moe_intermediate_size,
        "shared_expert_intermediate_size": moe_intermediate_size,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    }
    return {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "eos_token_id": END_OF_TEXT,
        "tie_word_embeddings": tied,
        "text_config": text_config,
    }


def llama_config(hidden_size: int = 128, tied: bool = False) -> dict[str, Any]:
    """A dense `llama` config."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": NUM_LAYERS,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "eos_token_id": END_OF_TEXT,
    }


def write_qwen_moe(
    directory: Path,
    *,
    bits: int | None = 4,
    group_size: int = 64,
    hidden_size: int = 128,
    num_experts: int = 4,
    tied: bool = False,
    shards: int = 3,
    **options: Any,
) -> Path:
    """A 2-layer mixture of experts; router gates at 8 bits as mlx-lm does. See `write_model`.

    MLX's CPU backend runs unquantized experts in float32 only: with bits=None pass
    dtype="float32" where the model is to be evaluated there.
    """
    config = qwen_moe_config(hidden_size, num_experts, tied, max(64, group_size))
    return write_model(
        directory, config, bits=bits, group_size=group_size, shards=shards, **options
    )


def write_llama(
    directory: Path,
    *,
    bits: int | None = 4,
    group_size: int = 64,
    hidden_size: int = 128,
    tied: bool = False,
    shards: int = 1,
    **options: Any,
) -> Path:
    """A 2-layer dense model. See `write_model`."""
    config = llama_config(hidden_size, tied)
    return write_model(
        directory, config, bits=bits, group_size=group_size, shards=shards, **options
    )


def write_model(
    directory: Path,
    config: dict[str, Any],
    *,
    bits: int | None,
    group_size: int,
    shards: int,
    dtype: str = "bfloat16",
    mode: str = "affine",
    seed: int = 0,
    unquantized: Sequence[str] = (),
    overrides: Mapping[str, Mapping[str, int]] | None = None,
    extra_tensors: Mapping[str, mx.array] | None = None,
    tokenizer: bool = True,
) -> Path:
    """Build the model of `config`, quantize it with mlx-lm, save it in `shards` files.

    bits: None leaves everything in `dtype` ("bfloat16", "float16", "float32": also of the scales).
    mode: of MLX's quantization; others than affine take its own bits and group_size.
    unquantized: path endings left unquantized, for instance ("lm_head", "q_proj").
    overrides: path ending -> {"bits": ..., "group_size": ...}, written per module to the config.
    extra_tensors: added as they are (vision towers, mtp heads).
    """
    directory.mkdir(parents=True, exist_ok=True)
    options = bits, group_size, shards, dtype, mode, seed, unquantized, overrides, tokenizer
    asked = repr((config, options))
    if not extra_tensors and asked in _WRITTEN:
        for name, content in _WRITTEN[asked].items():
            (directory / name).write_bytes(content)
        return directory
    model = _random_model(config, getattr(mx, dtype), seed)
    if bits is not None:
        grid = bits, group_size, mode
        model, config = _quantize(model, config, grid, unquantized, overrides or {})
    tensors = dict(tree_flatten(model.parameters()))
    tensors.update(extra_tensors or {})
    new = not any(directory.iterdir())
    save_sharded(directory, tensors, shards)
    _save_config(config, directory / "config.json")
    if tokenizer:
        write_tokenizer(directory)
    if new and not extra_tensors:
        _WRITTEN[asked] = {path.name: path.read_bytes() for path in directory.iterdir()}
    return directory


def save_sharded(directory: Path, tensors: Mapping[str, mx.array], shards: int) -> None:
    """Save tensors as mlx-lm names them: `model.safetensors`, or numbered shards; with an index."""
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        if shards == 1:
            file = "model.safetensors"
        mx.save_safetensors(
            str(directory / file), {name: tensors[name] for name in part}, {"format": "mlx"}
        )
        weight_map.update(dict.fromkeys(part, file))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(directory: Path) -> None:
    """One token a byte, one end-of-text token, a chat template, a generation config."""
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shown = {byte: chr(byte) for byte in alphabet}
    for byte in range(256):
        shown.setdefault(byte, chr(256 + len(shown) - len(alphabet)))
    vocabulary = {shown[byte]: byte for byte in range(256)}
    end = {"id": END_OF_TEXT, "content": "<|end|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    description = {
        "version": "1.0",
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": {**byte_level, "use_regex": False},
        "decoder": {**byte_level, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(description))
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END_OF_TEXT}))
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)


def random_adapter(
    checkpoint_dir: Path,
    keys: Iterable[str] | None = None,
    rank: int = 2,
    scale: float = 2.0,
    seed: int = 0,
    std: float = 0.01,
    *,
    directory: Path | None = None,
    dtype: str = "float32",
    num_layers: int = NUM_LAYERS,
) -> Path:
    """Write an adapter in mlx-lm's format for a checkpoint, made by mlx-lm's own LoRA layers.

    keys: module names inside a layer ("mlp.switch_mlp.down_proj") or whole module paths
        ("language_model.model.embed_tokens"); None is every module that mlx-lm can adapt.
    std: standard deviation of the delta `scale * B @ A` in weight space; 0 gives a zero `lora_b`.
    directory: defaults to `<checkpoint_dir>-adapter-<seed>` beside the checkpoint.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    directory = directory or checkpoint_dir.parent / f"{checkpoint_dir.name}-adapter-{seed}"
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.0}
    if keys is not None:
        parameters["keys"] = list(keys)
    model, _ = load_model(checkpoint_dir, lazy=True)
    model.freeze()
    linear_to_lora_layers(model, num_layers, parameters)
    key = mx.random.key(seed)
    tensors = {}
    for name, value in tree_flatten(model.trainable_parameters()):
        key, draw = mx.random.split(key)
        spread = std / (abs(scale) * rank**0.5) if name.endswith("lora_b") else 1.0
        values = spread * mx.random.normal(value.shape, key=draw)
        tensors[name] = values.astype(getattr(mx, dtype))
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / "adapters.safetensors"), tensors)
    config = {
        "fine_tune_type": "lora",
        "model": str(checkpoint_dir),
        "num_layers": num_layers,
        "lora_parameters": parameters,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return directory


def _random_model(config: dict[str, Any], dtype: mx.Dtype, seed: int) -> nn.Module:
    from mlx_lm.utils import _get_classes

    model_class, arguments_class = _get_classes(config)
    model = model_class(arguments_class.from_dict(json.loads(json.dumps(config))))
    key = mx.random.key(seed)

    def draw(path: str, value: mx.array) -> mx.array:
        nonlocal key
        key, now = mx.random.split(key)
        if path.endswith("A_log"):  # float32 in every checkpoint, as mlx-lm's cast_predicate says
            return mx.log(mx.random.uniform(0.5, 8.0, value.shape, key=now))
        noise = mx.random.normal(value.shape, key=now)
        if value.ndim == 1:  # norms and dt_bias
            return (1.0 + 0.1 * noise).astype(dtype)
        return (noise * (value.shape[-1] if value.shape[-1] > 1 else 4) ** -0.5).astype(dtype)

    model.update(tree_map_with_path(draw, model.parameters()))
    return model


def _quantize(
    model: nn.Module,
    config: dict[str, Any],
    grid: tuple[int, int, str],
    unquantized: Sequence[str],
    overrides: Mapping[str, Mapping[str, int]],
) -> tuple[nn.Module, dict[str, Any]]:
    from mlx_lm.utils import quantize_model

    bits, group_size, mode = grid
    asked = (group_size, bits) if mode == "affine" else (None, None)
    own_rule = getattr(model, "quant_predicate", None)

    def rule(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if path.endswith(tuple(unquantized)):
            return False
        for ending, settings in overrides.items():
            if path.endswith(ending):
                return {"group_size": group_size, "bits": bits, "mode": "affine", **settings}
        if own_rule is None:
            return True
        return own_rule(path, module)

    with contextlib.redirect_stdout(io.StringIO()):
        return quantize_model(model, config, *asked, mode=mode, quant_predicate=rule)


def _save_config(config: dict[str, Any], path: Path) -> None:
    from mlx_lm.utils import save_config

    save_config(dict(config), path)

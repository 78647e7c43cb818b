"""A GGUF file as a `Conversion`: codes as they are where the grid is MLX's, values elsewhere; the
architecture as mlx-lm knows it: names of tensors, `config.json`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.convert.conversion import Conversion, Part
from mlxstacks.convert.gguf_tokenizer import end_of_text_ids, tokenizer_files, write_files
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.files.gguf_file import (
    FLOATS,
    GRIDS,
    GROUP_SIZE,
    GGUFFile,
    GGUFTensor,
    float_values,
    open_gguf,
    same_codes,
)
from mlxstacks.files.shards import Chunk
from mlxstacks.ops import affine

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_DENSE = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Keys of an architecture that are read below, or that change nothing.
_KNOWN_KEYS = {
    "context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count",
    "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count",
    "expert_used_count", "expert_feed_forward_length", "tensor_data_layout",
}  # fmt: skip

# Llama 3.1 and 3.2: what their rope_freqs tensors were made with, the factor aside.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_DTYPE_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def gguf_conversion(path: Path, settings: ConvertSettings) -> Conversion:
    """Plan of a GGUF file: reads its header, and of tensors only
    floats that are to become another dtype.

    Raises: CheckpointError: see `open_gguf`, `Architecture`, `tokenizer_files`; tensors of other
        shapes than the keys say. InputError: tensors on MLX's grid, and other codes asked for.
    """
    return _Reader(open_gguf(path), settings).conversion()


class _Reader:
    def __init__(self, file: GGUFFile, settings: ConvertSettings) -> None:
        self.file, self.settings = file, settings
        self.architecture = Architecture(file)
        self.architecture.check_complete()
        self.dtype = self._model_dtype()
        self.quantization: dict[str, Any] = {}
        self.patterns = {pattern for pattern, _ in settings.overrides()}
        # the default group size asks nothing of codes that are there
        is_named = "group_size" in settings.model_fields_set
        self.regroups = is_named and settings.group_size != GROUP_SIZE
        self.kept: list[GGUFTensor] = []  # with other codes than were asked for
        self.inexact: list[str] = []
        self.float32: list[str] = []

    def conversion(self) -> Conversion:
        config = self.architecture.config()
        self._check_shapes(config)
        parts = tuple(
            self._part(tensor, name)
            for tensor in self.file.tensors.values()
            if (name := self.architecture.module_of(tensor.name)) is not None
        )
        if self.patterns:
            raise InputError(
                f"{self.file.path}: module_bits {', '.join(sorted(self.patterns))}: no module of "
                f"this model matches; they are named like {parts[-1].specs[0][0]}"
            )
        if self.kept:
            raise InputError(self._refusal())
        config |= end_of_text_ids(self.file)
        if widths := [tuple(entry.values()) for entry in self.quantization.values()]:
            # the commonest width for all, and an entry for each module that differs
            group_size, bits = max(set(widths), key=widths.count)
            usual = {"group_size": group_size, "bits": bits}
            others = {path: entry for path, entry in self.quantization.items() if entry != usual}
            quantization = {**usual, "mode": "affine", **others}
            config |= {"quantization": quantization, "quantization_config": quantization}
        return Conversion(
            config=config,
            parts=parts,
            write_files=partial(write_files, tokenizer_files(self.file)),
            notes=tuple(self._notes()),
            inputs=(self.file.path,),
        )

    def _check_shapes(self, config: dict[str, Any]) -> None:
        """Raises: CheckpointError listing tensors of another shape than the config asks for."""
        expected = {
            name: array.shape
            for name, array in tree_flatten(base_model.build_model(config).parameters())
        }
        names = {self.architecture.module_of(name): t for name, t in self.file.tensors.items()}
        shapes = {name: tensor.shape for name, tensor in names.items() if name is not None}
        faults = [
            f"{name} {shapes.get(name, 'is missing')}, not {expected.get(name, 'known')}"
            for name in sorted(shapes.keys() | expected.keys())
            if shapes.get(name) != expected.get(name)
        ]
        if faults:
            more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
            raise CheckpointError(
                f"{self.file.path}: tensors do not fit the keys of {self.architecture.name}: "
                f"{'; '.join(faults[:4])}{more}"
            )

    def _model_dtype(self) -> str:
        """What is computed in: the dtype of scales, else of most weights; `--dtype` where given."""
        kinds = [tensor.kind for tensor in self.file.tensors.values() if len(tensor.shape) > 1]
        floats = all(kind in FLOATS for kind in kinds)
        dtype = Counter(kinds).most_common(1)[0][0] if floats else "F16"
        if self.settings.dtype is None:
            return dtype
        given = _DTYPES[self.settings.dtype]
        if given != "F16" and any(kind in GRIDS for kind in kinds):
            raise InputError(
                f"{self.file.path}: --dtype {self.settings.dtype}: the file's scales are float16; "
                "take float16, or none"
            )
        return given

    def _part(self, tensor: GGUFTensor, name: str) -> Part:
        module, _, leaf = name.rpartition(".")
        heads = {"attn_q": self.architecture.heads, "attn_k": self.architecture.key_value_heads}
        role = tensor.name.split(".")[-2]
        order = None
        if self.architecture.name == "llama" and role in heads:
            # Rows of q and k are stored for a rope over neighbours: row 2i of a head is row i of
            # one over halves, 2i + 1 is i + head_dim / 2.
            stored = np.arange(tensor.shape[0]).reshape(heads[role], -1, 2)
            order = stored.transpose(0, 2, 1).reshape(-1)
        if leaf == "bias" or len(tensor.shape) == 1:
            return self._floats(tensor, name, order)
        named = [
            pattern
            for pattern, _ in self.settings.overrides()
            if fnmatch.fnmatchcase(module, pattern)
        ]
        self.patterns.difference_update(named)
        bits, grid = self.settings.bits_of(module), GRIDS.get(tensor.kind)
        is_as_asked = grid is not None and bits == grid.bits and not self.regroups
        by_value = not is_as_asked if named else not (grid or module.endswith(".gate"))
        if by_value and bits is not None and tensor.shape[-1] % self.settings.group_size == 0:
            return self._quantized(tensor, module, bits, order)
        if grid is None or (named and bits is None):
            return self._floats(tensor, name, order)
        is_asked = bits is not None or (self.regroups and not self.settings.module_bits)
        if is_asked and not is_as_asked:
            self.kept.append(tensor)
        return self._same_codes(tensor, module, order)

    def _refusal(self) -> str:
        """What would keep its codes though others were asked for, and what can be done."""
        settings, kept = self.settings, self.kept
        asked = {"--bits": settings.bits, "--group-size": self.regroups and settings.group_size}
        given = " ".join(f"{name} {value}" for name, value in asked.items() if value)
        kinds = ", ".join(sorted({tensor.kind for tensor in kept}))
        words = f"{len(kept)} tensor{'' if len(kept) == 1 else 's'} ({kinds})"
        again = [f"--module-bits '*={settings.bits or GRIDS[kept[0].kind].bits}'"]
        if self.architecture.experts:
            again.append("--module-bits '*.gate=none'")
        if any(tensor.shape[-1] % settings.group_size for tensor in kept):
            again.append(f"--group-size {GROUP_SIZE}")
        return (
            f"{self.file.path}: {given or '--module-bits'}: {words} would keep the codes of the "
            f"file, in groups of {GROUP_SIZE}. Convert without {given or 'it'} to keep them, or "
            f"round them once more: {' '.join(again)}. A module that --module-bits gives the bits "
            "it has keeps its codes"
        )

    def _same_codes(self, tensor: GGUFTensor, module: str, order: np.ndarray | None) -> Part:
        bits = GRIDS[tensor.kind].bits
        self.quantization[module] = {"group_size": GROUP_SIZE, "bits": bits}
        return Part(
            tensor.kind,
            f"{bits} bits in groups of {GROUP_SIZE}, the same codes",
            _quantized_specs(tensor, module, bits, GROUP_SIZE, "F16"),
            lambda: (
                (f"{module}.{leaf}", array) for leaf, array in same_codes(self.file, tensor, order)
            ),
        )

    def _quantized(
        self, tensor: GGUFTensor, module: str, bits: int, order: np.ndarray | None
    ) -> Part:
        group_size, dtype = self.settings.group_size, self.dtype
        self.quantization[module] = {"group_size": group_size, "bits": bits}

        def chunks() -> Iterator[tuple[str, Chunk]]:
            for values in self._rounded(tensor, dtype, order):
                groups = values.reshape(-1, group_size)
                codes, scales, biases = affine.quantize(groups, bits, dtype)
                yield f"{module}.weight", affine.pack(codes.reshape(values.shape), bits)
                yield f"{module}.scales", affine.to_storage(scales, dtype)
                yield f"{module}.biases", affine.to_storage(biases, dtype)

        return Part(
            tensor.kind,
            f"{bits} bits in groups of {group_size}, by value",
            _quantized_specs(tensor, module, bits, group_size, dtype),
            chunks,
        )

    def _floats(self, tensor: GGUFTensor, name: str, order: np.ndarray | None) -> Part:
        dtype = self.dtype
        if tensor.kind not in (*FLOATS, *GRIDS):
            self.inexact.append(tensor.kind)
        elif self.settings.dtype is None and not (
            tensor.kind == dtype
            or all(
                np.array_equal(affine.round_to(values.copy(), dtype), values)
                for values in float_values(self.file, tensor)
            )
        ):
            dtype = "F32"
            self.float32.append(name)

        def chunks() -> Iterator[tuple[str, Chunk]]:
            for values in self._rounded(tensor, dtype, order):
                yield name, affine.to_storage(values, dtype)

        return Part(tensor.kind, _DTYPE_NAMES[dtype], ((name, dtype, tensor.shape),), chunks)

    def _rounded(
        self, tensor: GGUFTensor, dtype: str, order: np.ndarray | None
    ) -> Iterator[np.ndarray]:
        for values in float_values(self.file, tensor, order):
            affine.round_to(values, dtype)
            if not np.isfinite(values).all():
                raise CheckpointError(
                    f"{self.file.path}: tensor {tensor.name!r}: values too large for "
                    f"{_DTYPE_NAMES[dtype]}; try --dtype float32"
                )
            yield values

    def _notes(self) -> Iterator[str]:
        if self.inexact:
            kinds = ", ".join(sorted(set(self.inexact)))
            yield (
                f"{kinds}: not MLX's grid, so {len(self.inexact)} tensors are values rounded to "
                f"{_DTYPE_NAMES[self.dtype]}; --bits N quantizes them again."
            )
        if self.float32:
            yield (
                f"{len(self.float32)} tensors hold values that are none of "
                f"{_DTYPE_NAMES[self.dtype]} and stay float32: mlx-lm then computes in float32. "
                f"--dtype {_DTYPE_NAMES[self.dtype]} rounds them."
            )


def _quantized_specs(
    tensor: GGUFTensor, module: str, bits: int, group_size: int, dtype: str
) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    *rows, width = tensor.shape
    grouped = (*rows, width // group_size)
    return (
        (f"{module}.weight", "U32", (*rows, affine.packed_width(width, bits))),
        (f"{module}.scales", dtype, grouped),
        (f"{module}.biases", dtype, grouped),
    )


class Architecture:
    """One file's architecture: `module_of` for names, `config` for mlx-lm.

    Raises: CheckpointError: an unknown architecture, a missing key, a setting that mlx-lm's class
        of that name does not have.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.name = file.value("general.architecture", str)
        if self.name not in ARCHITECTURES:
            raise CheckpointError(
                f"{file.path}: architecture {self.name!r}; known: {', '.join(ARCHITECTURES)}. "
                "Convert the original checkpoint instead"
            )
        prefix = f"{self.name}."
        self.keys = {
            key.removeprefix(prefix): value
            for key, value in file.fields.items()
            if key.startswith(prefix)
        }
        unknown = sorted(self.keys.keys() - _KNOWN_KEYS)
        if unknown:
            listed = ", ".join(prefix + key for key in unknown)
            raise CheckpointError(
                f"{file.path}: {listed}: not known here, and leaving it out could change the model"
            )
        self.experts = self._count("expert_count", 0)
        self.model_type = {"qwen3moe": "qwen3_moe"}.get(self.name, self.name)
        if self.name == "llama" and self.experts:
            self.model_type = "mixtral"
        self.heads = self._count("attention.head_count")
        self.key_value_heads = self._count("attention.head_count_kv", self.heads)
        self.layers = self._count("block_count")
        if self.layers > len(file.tensors):
            raise CheckpointError(
                f"{file.path}: {self.name}.block_count is {self.layers:,}, and there are "
                f"{len(file.tensors)} tensors"
            )
        self.hidden = self._count("embedding_length")
        self.head_dim = self._head_dim()
        self._blocks = _ATTENTION | (_HEAD_NORMS if self.name in ("qwen3", "qwen3moe") else {})
        if self.experts:
            block = "block_sparse_moe" if self.model_type == "mixtral" else "mlp"
            self._blocks["ffn_gate_inp"] = f"{block}.gate"
            for name in ("gate", "up", "down"):
                self._blocks[f"ffn_{name}_exps"] = f"{block}.switch_mlp.{name}_proj"
        else:
            self._blocks |= _DENSE

    def module_of(self, name: str) -> str | None:
        """mlx-lm's name of a tensor, `.weight` or `.bias` included; None where it is no part of it.

        Raises: CheckpointError: no tensor of this architecture.
        """
        if name == "rope_freqs.weight":
            return None
        outer, _, part = name.rpartition(".")
        if outer in _OUTER and part in ("weight", "bias"):
            return f"{_OUTER[outer]}.{part}"
        match = _BLOCK_NAME.fullmatch(name)
        if match and int(match[1]) < self.layers and match[2] in self._blocks:
            return f"model.layers.{match[1]}.{self._blocks[match[2]]}.{match[3]}"
        raise self._error(f"tensor {name!r} belongs to no {self.model_type} that mlx-lm knows")

    def check_complete(self) -> None:
        """Raises: CheckpointError listing tensors that are needed and not in the file."""
        needed = ["token_embd.weight", "output_norm.weight"]
        needed += [f"blk.{n}.{name}.weight" for n in range(self.layers) for name in self._blocks]
        missing = [name for name in needed if name not in self.file.tensors]
        if missing:
            shown = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
            raise self._error(f"{len(missing)} tensors are missing: {shown}")

    def config(self) -> dict[str, Any]:
        """`config.json` without `quantization`; end and begin of text as the tokenizer has them."""
        vocabulary, *width = self.file.tensors["token_embd.weight"].shape
        if width != [self.hidden]:
            raise self._error(
                f"token_embd.weight has rows of "
                f"{' x '.join(map(str, width)) or 'no numbers'}, "
                f"{self.name}.embedding_length is {self.hidden}"
            )
        tokens = self.file.fields.get("tokenizer.ggml.tokens", ())
        if len(tokens) > vocabulary:
            raise self._error(
                f"{len(tokens)} tokens, but token_embd.weight has only {vocabulary} rows"
            )
        config: dict[str, Any] = {
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self._count("feed_forward_length"),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "vocab_size": vocabulary,
            "max_position_embeddings": self._count("context_length"),
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
        }
        scaling = self._llama3_scaling() or self._named_scaling()
        if scaling and self.model_type in ("mixtral", "qwen3_moe"):
            raise self._error(f"rope scaling, which mlx-lm's {self.model_type} would ignore")
        if scaling:
            config["rope_scaling"] = scaling
        return config | self._biases() | self._expert_settings()

    def _error(self, fault: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {fault}")

    def _count(self, key: str, default: int | None = None) -> int:
        value = self.keys.get(key, default)
        if value is None:
            raise self._error(f"key {self.name}.{key} is missing")
        if type(value) is not int or not (1 <= value < 1 << 31 or value == default):
            raise self._error(f"key {self.name}.{key} is {value!r}; one whole number is needed")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal of a stored float32: 1e-05, not 9.999999747378752e-06."""
        value = self.file.value(f"{self.name}.{key}", float, default)
        if value is None or not 0 < value < math.inf:
            raise self._error(f"key {self.name}.{key} is {value}; a number above 0 is needed")
        return float(str(np.float32(value)))

    def _head_dim(self) -> int:
        default = self.hidden // self.heads
        head_dim = self._count("attention.key_length", default)
        same = {
            "attention.value_length": self._count("attention.value_length", head_dim),
            "rope.dimension_count": self._count("rope.dimension_count", head_dim),
        }
        if self.model_type in ("qwen2", "mixtral"):
            same["embedding_length / attention.head_count"] = default
        if head_dim < 2 or head_dim % 2:
            raise self._error(f"heads of {head_dim}; an even size is needed")
        for key, value in same.items():
            if value != head_dim:
                raise self._error(
                    f"heads of {head_dim}, but {self.name}.{key} is {value}; "
                    f"mlx-lm's {self.model_type} needs them equal"
                )
        return head_dim

    def _biases(self) -> dict[str, Any]:
        names = self.file.tensors
        attention = [f"blk.0.attn_{part}.bias" in names for part in ("q", "k", "v", "output")]
        dense = [f"blk.0.ffn_{part}.bias" in names for part in ("gate", "up", "down")]
        fixed = [True, True, True, False] if self.name == "qwen2" else None
        if self.model_type == "llama" and len(set(attention)) == len(set(dense)) == 1:
            return {"attention_bias": attention[0], "mlp_bias": dense[0]}
        if attention == (fixed or [False] * 4) and not any(dense):
            return {}
        raise self._error(f"mlx-lm's {self.model_type} has no biases as in this file")

    def _expert_settings(self) -> dict[str, Any]:
        if not self.experts:
            return {}
        used = self._count("expert_used_count")
        if used > self.experts:
            raise self._error(
                f"{self.name}.expert_used_count is {used}, and there are {self.experts} experts"
            )
        if self.model_type == "mixtral":
            return {"num_local_experts": self.experts, "num_experts_per_tok": used}
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": used,
            "moe_intermediate_size": self._count("expert_feed_forward_length"),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            # llama.cpp divides the weights of the chosen experts by their sum
            "norm_topk_prob": True,
        }

    def _named_scaling(self) -> dict[str, Any] | None:
        kind = self.file.value(f"{self.name}.rope.scaling.type", str, "none")
        factor = self._number("rope.scaling.factor", 1.0)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            original = self._count("rope.scaling.original_context_length")
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
            }
        raise self._error(f"rope scaling {kind!r}; known: none, linear, yarn, Llama 3's")

    def _llama3_scaling(self) -> dict[str, Any] | None:
        """Llama 3's scaling, stored as a divisor for each frequency; its factor is the largest."""
        tensor = self.file.tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        if tensor.kind != "F32" or tensor.shape != (self.head_dim // 2,):
            raise self._error(f"rope_freqs.weight has {tensor.shape} numbers")
        divisors = self.file.read(tensor).view("<f4").reshape(-1)
        if not (divisors > 0).all():
            raise self._error("rope_freqs.weight holds divisors that are not above 0")
        factor, theta = float(divisors.max()), self._number("rope.freq_base", 10000.0)
        low, high, original = _LLAMA3_ROPE.values()
        frequencies = theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        turns = original * frequencies / (2 * np.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        if not np.allclose(divisors, 1 / (smooth + (1 - smooth) / factor), rtol=1e-4):
            raise self._error("rope_freqs.weight is not Llama 3's scaling by any factor")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}

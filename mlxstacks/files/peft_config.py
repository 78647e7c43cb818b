"""PEFT's adapter_config.json: what is refused, and which rank and scale a module gets.

Semantics are those of PEFT 0.21: the first key of rank_pattern or alpha_pattern that matches the
whole module name, or an ending of it after a dot, as a regular expression, wins over r and
lora_alpha; the scale is alpha / rank, or alpha / sqrt(rank) with rsLoRA.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxstacks.files.lora_modules import is_finite_number

PEFT_WEIGHTS = "adapter_model.safetensors"

# Features whose delta is not scale * B A, or that bring more than the pairs: why each is refused.
_REFUSED_WHEN_SET = {
    "use_dora": "DoRA also rescales output rows; merge it with PEFT's merge_and_unload",
    "use_qalora": "QALoRA pools its input; merge it with PEFT's merge_and_unload",
    "use_bdlora": "block-diagonal LoRA has another weight layout",
    "fan_in_fan_out": "weights stored (in, out), as in GPT-2, are not supported",
    "lora_bias": "a LoRA bias has no place in an MLX adapter",
    "modules_to_save": "fully trained modules are no LoRA; merge it with PEFT's merge_and_unload",
    "trainable_token_indices": "trained embedding rows are no LoRA; merge it with PEFT",
    "layer_replication": "the adapter belongs to a base with replicated layers",
    "alora_invocation_tokens": "an activated LoRA applies to some tokens only; it cannot be fused",
    "arrow_config": "arrow routing chooses between adapters at run time",
    "kasa_config": "KaSA changes the base as well",
    "velora_config": "VeLoRA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
}
# Initialisations that also change the base: the pairs mean nothing on the plain base.
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Both make matching slow beyond measure: a repeated group, and many repeats in a row.
_REPEATED_GROUP = re.compile(r"\)\s*[*+{]")
_MOST_REPEATS = 3


@dataclass(frozen=True)
class PeftConfig:
    """The parts of a PEFT config that decide about a delta."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_parameters: tuple[str, ...]
    version: tuple[int, ...] | None  # of the PEFT that wrote it; None before 0.18

    def rank(self, name: str) -> int:
        """Rank of a module (or `module.parameter`) by its hub name."""
        key = _matching_key(self.rank_pattern, name)
        return self.r if key is None else self.rank_pattern[key]

    def scale(self, name: str) -> float:
        """Factor of B A for this module, as PEFT computes it."""
        key = _matching_key(self.alpha_pattern, name)
        alpha = self.lora_alpha if key is None else self.alpha_pattern[key]
        rank = self.rank(name)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names this parameter (`module.parameter`)."""
        return any(name == t or name.endswith(f".{t}") for t in self.target_parameters)


def _whole_name(pattern: str) -> str:
    """PEFT's expression for a whole module name, or an ending of it after a dot."""
    return rf"(.*\.)?({pattern})$"


def _matching_key(pattern: Mapping[str, object], name: str) -> str | None:
    for key in pattern:
        if re.match(_whole_name(key), name):
            return key
    return name if name in pattern else None


def parse_peft_config(config: Mapping[str, Any], problems: list[str]) -> PeftConfig:
    """The config, checked; what cannot be used goes to `problems`, all of it."""
    _refuse_features(config, problems)
    return PeftConfig(
        r=_rank(config.get("r", 8), "r", problems),
        lora_alpha=_alpha(config.get("lora_alpha", 8), "lora_alpha", problems),
        use_rslora=bool(config.get("use_rslora")),
        rank_pattern={
            key: _rank(value, f"rank_pattern[{key!r}]", problems)
            for key, value in _pattern(config, "rank_pattern", problems).items()
        },
        alpha_pattern={
            key: _alpha(value, f"alpha_pattern[{key!r}]", problems)
            for key, value in _pattern(config, "alpha_pattern", problems).items()
        },
        target_parameters=_target_parameters(config, problems),
        version=_version(config.get("peft_version")),
    )


def _refuse_features(config: Mapping[str, Any], problems: list[str]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        problems.append(f"peft_type is {kind!r}; only LORA is read here")
    problems += [
        f"{key} is {config[key]!r}: {why}"
        for key, why in _REFUSED_WHEN_SET.items()
        if config.get(key)
    ]
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {config['bias']!r}: trained biases are no LoRA; only 'none'")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        problems.append(
            f"init_lora_weights is {init!r}: the adapter belongs to a changed base; save it with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    name = str(config.get("base_model_name_or_path") or "").lower()
    if "gpt-oss" in name or "gpt_oss" in name:
        problems.append("gpt-oss interleaves gate and up in its experts; it is not supported")


def _rank(value: object, key: str, problems: list[str]) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**20:
        return value
    problems.append(f"{key} is {value!r}, not a positive whole number")
    return 1


def _alpha(value: object, key: str, problems: list[str]) -> float:
    if is_finite_number(value):
        return value
    problems.append(f"{key} is {value!r}, not a finite number")
    return 0.0


def _pattern(config: Mapping[str, Any], key: str, problems: list[str]) -> dict[str, Any]:
    """A pattern table whose keys are usable regular expressions."""
    table = config.get(key) or {}
    if not isinstance(table, dict):
        problems.append(f"{key} is {table!r}, not an object of pattern: number")
        return {}
    usable = {}
    for pattern, value in table.items():
        try:
            re.compile(_whole_name(pattern))  # flags and back references fit only alone
        except re.error as error:
            problems.append(f"{key}[{pattern!r}]: not a regular expression: {error}")
            continue
        repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
        if _REPEATED_GROUP.search(pattern) or repeats > _MOST_REPEATS:
            problems.append(
                f"{key}[{pattern!r}]: a repeated group, or more than {_MOST_REPEATS} repeats, is "
                "not accepted; name the modules"
            )
            continue
        usable[pattern] = value
    return usable


def _target_parameters(config: Mapping[str, Any], problems: list[str]) -> tuple[str, ...]:
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        problems.append(f"target_parameters is {targets!r}, not a list of names")
        return ()
    return tuple(targets)


def _version(value: object) -> tuple[int, ...] | None:
    """Release numbers of a version such as 0.19.1 or 0.19.2.dev0@a1b2; None when unknown."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", value) if isinstance(value, str) else None
    return tuple(int(part) for part in match.groups()) if match else None

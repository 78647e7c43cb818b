"""PEFT's adapter_config.json: what is refused, and which rank and scale a module gets.

Semantics are those of PEFT 0.21: the first key of rank_pattern or alpha_pattern that matches the
whole module name, or an ending of it after a dot, as a regular expression, wins over r and
lora_alpha; the scale is alpha / rank, or alpha / sqrt(rank) with rsLoRA. The expressions are
matched by RE2, all at once and in time linear in the name, whatever a stranger has written.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mlxstacks.errors import AdapterError
from mlxstacks.files.expressions import compile_expression, re2_options
from mlxstacks.files.lora_modules import is_finite_number
from mlxstacks.files.shards import MAX_NAME

PEFT_WEIGHTS = "adapter_model.safetensors"

# Features whose delta is not scale * B A, or that bring more than the pairs: why each is refused.
_REFUSED_WHEN_SET = {
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
# For the automata of all expressions of a table; 30,000 names of modules take a third of it.
_MATCHER_BYTES = 1 << 28


@dataclass(frozen=True)
class PatternTable:
    """Numbers by regular expression."""

    numbers: dict[str, float] = field(default_factory=dict)

    def get(self, name: str, default: float) -> float:
        """The number of the first expression that matches a module's name as PEFT matches it."""
        if not self.numbers:
            return default
        matching = self._matcher.Match(name)
        if not matching:  # the last one matches every name
            raise AdapterError(f"{name}: the patterns of the config need too much memory to match")
        first = min(matching)
        if first == len(self.numbers):
            return self.numbers.get(name, default)
        return self._in_order[first]

    @cached_property
    def _in_order(self) -> tuple[float, ...]:
        return tuple(self.numbers.values())

    @cached_property
    def _matcher(self) -> Any:
        import re2

        matcher = re2.Set.FullMatchSet(re2_options(_MATCHER_BYTES))
        for pattern in [*map(_whole_name, self.numbers), ".*"]:
            matcher.Add(pattern)
        try:
            matcher.Compile()
        except re2.error:
            raise AdapterError(
                f"{len(self.numbers):,} patterns of the config need more than {_MATCHER_BYTES:,} "
                "bytes to match; name the modules"
            ) from None
        return matcher


@dataclass(frozen=True)
class PeftConfig:
    """The parts of a PEFT config that decide about a delta."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: PatternTable
    alpha_pattern: PatternTable
    target_parameters: tuple[str, ...]
    version: tuple[int, ...] | None  # of the PEFT that wrote it; None before 0.18

    def rank(self, name: str) -> int:
        """Rank of a module (or `module.parameter`) by its hub name."""
        return int(self.rank_pattern.get(name, self.r))

    def check_rank(self, name: str, rank: int, problems: list[str]) -> bool:
        """Whether the file's rank of a module is the config's."""
        expected = self.rank(name)
        if rank != expected:
            problems.append(
                f"{name}: rank {rank} in the file, {expected} by the config's r and rank_pattern"
            )
        return rank == expected

    def scale(self, name: str) -> float:
        """Factor of B A for this module, as PEFT computes it."""
        alpha, rank = self.alpha_pattern.get(name, self.lora_alpha), self.rank(name)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names this parameter (`module.parameter`)."""
        return any(name == t or name.endswith(f".{t}") for t in self.target_parameters)


def _whole_name(pattern: str) -> str:
    """PEFT's expression for a whole module name, or an ending of it after a dot."""
    return rf"(.*\.)?({pattern})"


def parse_peft_config(config: Mapping[str, Any], problems: list[str]) -> PeftConfig:
    """The config, checked; what cannot be used goes to `problems`, all of it."""
    _refuse_features(config, problems)
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        problems.append(f"target_parameters is {targets!r:.200}, not a list of names")
        targets = []
    # of versions such as 0.19.1 or 0.19.2.dev0@a1b2
    release = re.match(r"(\d+)\.(\d+)\.(\d+)", str(config.get("peft_version")))
    return PeftConfig(
        r=_rank(config.get("r", 8), "r", problems),
        lora_alpha=_alpha(config.get("lora_alpha", 8), "lora_alpha", problems),
        use_rslora=bool(config.get("use_rslora")),
        rank_pattern=_pattern_table(config, "rank_pattern", _rank, problems),
        alpha_pattern=_pattern_table(config, "alpha_pattern", _alpha, problems),
        target_parameters=tuple(targets),
        version=tuple(map(int, release.groups())) if release else None,
    )


def _refuse_features(config: Mapping[str, Any], problems: list[str]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        problems.append(f"peft_type is {kind!r:.200}; only LORA is read here")
    problems += [
        f"{key} is {config[key]!r:.200}: {why}"
        for key, why in _REFUSED_WHEN_SET.items()
        if config.get(key)
    ]
    if config.get("bias", "none") != "none":
        problems.append(f"bias is {config['bias']!r:.200}: trained biases are no LoRA; only 'none'")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        problems.append(
            f"init_lora_weights is {init!r:.200}: the adapter belongs to a changed base; save it "
            "with PEFT's path_initial_model_for_weight_conversion"
        )
    name = str(config.get("base_model_name_or_path") or "").lower()
    if "gpt-oss" in name or "gpt_oss" in name:
        problems.append("gpt-oss interleaves gate and up in its experts; it is not supported")


def _rank(value: object, key: str, problems: list[str]) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**20:
        return value
    problems.append(f"{key} is {value!r:.200}, not a positive whole number")
    return 1


def _alpha(value: object, key: str, problems: list[str]) -> float:
    if is_finite_number(value):
        return value
    problems.append(f"{key} is {value!r:.200}, not a finite number below 1e30")
    return 0.0


def _pattern_table(
    config: Mapping[str, Any],
    key: str,
    number: Callable[[object, str, list[str]], float],
    problems: list[str],
) -> PatternTable:
    """A table whose keys are expressions that both PEFT and RE2 read."""
    table = config.get(key) or {}
    if not isinstance(table, dict):
        problems.append(f"{key} is {table!r:.200}, not an object of pattern: number")
        return PatternTable()
    numbers = {}
    for pattern, value in table.items():
        where = f"{key}[{pattern!r:.100}]"
        if len(pattern) > MAX_NAME:
            problems.append(
                f"{where}: {len(pattern):,} letters, allowed: {MAX_NAME}; name the modules"
            )
            continue
        try:
            with warnings.catch_warnings(action="error", category=FutureWarning):
                re.compile(_whole_name(pattern))  # flags and back references fit only alone
        except (re.error, RecursionError, OverflowError, FutureWarning) as error:
            problems.append(f"{where}: not a regular expression: {error}")
            continue
        try:
            compile_expression(_whole_name(pattern))
        except ValueError as error:
            problems.append(f"{where}: {error}; name the modules")
            continue
        numbers[pattern] = number(value, where, problems)
    return PatternTable(numbers)

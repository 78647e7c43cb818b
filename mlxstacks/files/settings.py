"""Settings of the adapter and store commands, and PATTERN=N for the bits of modules.

Imports neither mlx nor numpy, so that `--help` stays fast.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from mlxstacks.settings import Settings, output_path

ALLOWED_BITS = (2, 3, 4, 5, 6, 8)

ModuleBits = tuple[str, int | None]  # pattern, bits or None for floats


def _pairs_of(value: Any) -> Any:
    """{pattern: N} as pairs PATTERN=N; a number alone is of all modules."""
    if isinstance(value, Mapping):
        return [f"{pattern}={'none' if bits is None else bits}" for pattern, bits in value.items()]
    values = [value] if isinstance(value, str | int | float) else value
    if fractions := [item for item in values if isinstance(item, float)]:
        raise ValueError(f"got {fractions[0]}; allowed: N or {{PATTERN: N}}, N a whole number")
    return [f"*={item}" if str(item).isdigit() else item for item in values]


_FORM = "as in '*.down_proj=4'; in Python also {'*.down_proj': 4}"
BitsByPattern = Annotated[
    tuple[str, ...],
    BeforeValidator(
        _pairs_of, json_schema_input_type=str | int | Sequence[str] | Mapping[str, int | None]
    ),
]


def parse_module_bits(pair: str, setting: str, floats: bool = False) -> ModuleBits:
    """floats: N may be none. Raises: ValueError naming the setting."""
    pattern, _, bits = pair.rpartition("=")
    if pattern and floats and bits == "none":
        return pattern, None
    if not pattern or not bits.isdigit() or int(bits) not in ALLOWED_BITS:
        allowed = ", ".join(map(str, ALLOWED_BITS)) + (", none" if floats else "")
        got = bits if pattern == "*" else repr(pair)  # a number alone became *=N
        raise ValueError(f"got {got}; {setting} takes N or PATTERN=N, N one of {allowed}, {_FORM}")
    return pattern, int(bits)


def bits_of_module(module: str, pairs: Iterable[ModuleBits], default: int | None) -> int | None:
    """Bits of a module path; the default where no pattern matches it."""
    bits = default
    for pattern, given in pairs:
        if fnmatch.fnmatchcase(module, pattern):
            bits = given
    return bits


PeftLayout = Literal["current", "legacy"]
AdapterFormat = Literal["mlx", "peft", "gguf"]
ExpertLayout = Literal["parameters", "per_expert", "stacked"]
PeftModel = Literal["text", "whole"]

_LAYOUT = (
    "Expert layout of a PEFT adapter whose shapes fit both: current (PEFT >= 0.19.1) or legacy "
    "(older)."
)
_MODEL = (
    "MLX model directory of the adapter's base. Helps name the modules of a PEFT adapter and tell "
    "its layouts apart; required to read or write a GGUF adapter."
)


class _AdapterSettings(Settings):
    adapter_path: str | None = Field(
        None,
        description="Adapter directory to read (mlx-lm, PEFT or GGUF), or a GGUF file. Default: "
        "nano's sample adapter.",
    )
    peft_layout: PeftLayout | None = Field(None, description=_LAYOUT)
    model: str | None = Field(None, description=_MODEL)


class AdapterShowSettings(_AdapterSettings):
    """What an adapter holds."""


class AdapterZeroSettings(_AdapterSettings):
    """The zero-delta copy of an adapter: same format, names, dtypes and shapes, all zero."""

    save_path: str | None = output_path("adapter-zero")
    force: bool = Field(False, description="Replace an existing save path.")


class AdapterConvertSettings(_AdapterSettings):
    """An adapter in another format, with the same delta."""

    save_path: str | None = output_path("adapter-convert")
    to: AdapterFormat = Field(
        "peft", description="Output format: mlx (mlx-lm), peft, or gguf (llama.cpp: adapter.gguf)."
    )
    experts: ExpertLayout | None = Field(
        None,
        description="Expert layout for peft. parameters (default): PEFT's target_parameters. "
        "per_expert: experts.0.gate_proj and so on, for vLLM. stacked: experts.w1, w2, w3, each "
        "one tensor of all experts, for SGLang; a shared half is stored once, for mlx too, though "
        "mlx-lm then cannot load it.",
    )
    base_model_name: str | None = Field(
        None,
        description="Hub id or path of the unquantized base to record in a PEFT adapter "
        "(base_model_name_or_path). Default: the input adapter's, if any.",
    )
    peft_model: PeftModel = Field(
        "text",
        description="Model class of a PEFT adapter for Qwen3.5: text (AutoModelForCausalLM) or "
        "whole (...ForConditionalGeneration). PEFT loads it into no other class.",
    )
    force: bool = Field(False, description="Replace an existing save path.")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        allowed = {"peft": (None, *get_args(ExpertLayout)), "mlx": (None, "stacked")}
        if self.experts not in allowed.get(self.to, (None,)):
            raise ValueError(
                f"experts={self.experts} does not go with to={self.to}: peft takes "
                f"{', '.join(get_args(ExpertLayout))}, mlx takes stacked, gguf has one layout"
            )
        return self


class AdapterMergeSettings(Settings):
    """Several adapters of one base as one, in mlx-lm's format."""

    adapter_path: tuple[str, ...] = Field(
        (),
        description="One or more adapter directories to merge (mlx-lm or PEFT). Default: nano's "
        "sample adapter.",
    )
    save_path: str | None = output_path("adapter-merge")
    method: Literal["concat", "svd", "ties", "dare"] = Field(
        "concat",
        description="Merge method. concat: exact sum; ranks add up. svd: best approximation at a "
        "given rank. ties: trim, elect signs, average. dare: drop at random, rescale, sum.",
    )
    weights: tuple[float, ...] = Field(
        (), description="Weight of each adapter, in order. Repeatable. Default: 1."
    )
    rank: int | None = Field(
        None,
        ge=1,
        description="Rank of the result, for svd, ties and dare. Default: the largest adapter "
        "rank.",
    )
    density: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="Fraction of each delta's values that ties and dare keep."
    )
    space: Literal["weights", "core"] = Field(
        "weights",
        description="Space in which ties and dare work: weights, or core, the span of the "
        "adapters' factors: faster, and exact at the sum of their ranks.",
    )
    peft_layout: PeftLayout | None = Field(None, description=_LAYOUT)
    model: str | None = Field(None, description=_MODEL)
    allow_base: bool = Field(
        False, description="Merge adapters of different recorded bases; the first one's is kept."
    )
    seed: int = Field(0, ge=0, description="Seed for dare.")
    force: bool = Field(False, description="Replace an existing save path.")

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.weights and len(self.weights) != len(self.adapter_path):
            numbers = ", ".join(map(str, self.weights))
            raise ValueError(
                f"weights is {numbers} for {len(self.adapter_path)} adapters "
                f"({', '.join(self.adapter_path)}); give one each, in order, as 0.5,0.5"
            )
        if self.rank is not None and self.method == "concat":
            raise ValueError("rank goes with svd, ties and dare; concat has the sum of all ranks")
        return self


DAY_SECONDS = 86_400


class _StoreSettings(Settings):
    store_path: str | None = Field(None, description="Store directory.")


class StacksListSettings(_StoreSettings):
    """What a store holds."""


class StacksVerifySettings(_StoreSettings):
    """Whether everything in a store is what its manifest says."""

    model: str | None = Field(
        None, description="Base model whose fingerprint and projection shapes to check."
    )


class StacksRemoveSettings(_StoreSettings):
    """Take a domain out."""

    domain: str | None = Field(None, description="Domain to remove.")
    force: bool = Field(
        False,
        description="Remove the domain even if later ones were trained on top of it. Their stacks "
        "do not change, but their measured losses no longer hold, and their shared matrix entries "
        "are dropped.",
    )


class StacksSwitchSettings(_StoreSettings):
    """Enable or disable a domain: all its stacks, whose bytes stay as they are."""

    domain: str | None = Field(None, description="Domain to enable or disable.")


class StacksUndoSettings(_StoreSettings):
    """Take back the last change of a store; once more makes it again."""


class StacksRetrainSettings(_StoreSettings):
    """Train one domain of a store again, in its place."""

    domain: str | None = Field(None, description="Domain to retrain.")
    model: str | None = Field(
        None, description="Model directory or Hugging Face id of the base. Default: the store's."
    )
    data: str | None = Field(
        None,
        description="Directory of the domain files, with the domain's new rows. Default: the "
        "original one.",
    )
    rounds: int | None = Field(None, ge=1, description="Maximum stacks. Default: as first trained.")
    iters: int | None = Field(
        None, ge=1, description="Batches per round. Default: as first trained."
    )
    learning_rate: float | None = Field(
        None, gt=0, description="Peak learning rate of AdamW. Default: as first trained."
    )
    moved_above: float = Field(
        0.01,
        ge=0,
        description="Mark a later domain if its prefix loss changes by more than this, in nats.",
    )
    guard: Literal["refuse", "warn", "off"] = Field(
        "refuse", description="If the run is predicted not to fit: refuse, warn, or do not check."
    )
    resume: bool = Field(True, description="Resume an interrupted training.")


class StacksExportSettings(_StoreSettings):
    """Write a stack of one expert as an adapter, or a domain as a store of its own."""

    stack: str | None = Field(
        None,
        description="Stack to export: its name, or a domain with one stack. With --to store: a "
        "domain; default: all of them, and the router.",
    )
    save_path: str | None = output_path("stacks-export")
    to: Literal["mlx", "peft", "store"] = Field(
        "mlx", description="Output format: mlx (mlx-lm), peft, or store."
    )
    base_model_name: str | None = Field(
        None, description="Base to record in the adapter: hub id or path. Default: the store's."
    )
    peft_model: PeftModel = Field(
        "text", description="Model class of a PEFT adapter for Qwen3.5: text or whole."
    )
    force: bool = Field(False, description="Replace an existing save path.")


class StacksImportSettings(_StoreSettings):
    """Take an adapter in as a stack of one expert, in a domain of its own."""

    adapter_path: str | None = Field(
        None,
        description="Adapter directory to read (mlx-lm, PEFT or GGUF), or a GGUF file.",
    )
    domain: str | None = Field(
        None, description="Name of the new domain. Default: the adapter directory's name."
    )
    model: str | None = Field(
        None,
        description="Base model to check fingerprint and shapes against. Required to create a new "
        "store.",
    )
    storage: Literal["float16", "bfloat16"] | None = Field(
        None,
        description="Dtype to store. Default: the adapter's own if it is half precision, else "
        "float16.",
    )
    peft_layout: PeftLayout | None = Field(
        None, description="Expert layout of a PEFT adapter whose shapes fit both layouts."
    )
    allow_base: bool = Field(
        False, description="Import an adapter even if its base differs, and mark it."
    )


class StacksDiffSettings(_StoreSettings):
    """What differs between two stores."""

    other_path: str | None = Field(None, description="Store to compare with.")


class StacksGcSettings(_StoreSettings):
    """Remove files that nothing names any more."""

    grace_seconds: int = Field(
        DAY_SECONDS,
        ge=0,
        description="Keep files that were dropped less than this many seconds ago: a process that "
        "opened the store earlier may still read them.",
    )


class StacksAnalyseSettings(Settings):
    """What the frozen stacks of a store do: routing, directions, spectra, losses, plots."""

    store_path: str | None = Field(None, description="Store directory, read only.")
    save_path: str | None = output_path("stacks-analyse")
    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id of the base. Default: the store's base.",
    )
    data: str | None = Field(
        None, description="Directory of the domain files. Default: the current directory."
    )
    weights_only: bool = Field(
        False,
        description="Analyze the weights only, without base or data: no routing, and no "
        "directions on data.",
    )
    prompts: int = Field(64, ge=2, description="Maximum validation rows per domain.")
    max_seq_length: int = Field(512, ge=2, description="Truncate rows to this many tokens.")
    directions: int = Field(
        4, ge=1, le=256, description="Principal output directions to compare per domain."
    )
    layer: int | None = Field(
        None, ge=0, description="Layer whose directions to draw, domain by domain, in one plane."
    )
    projection: str | None = Field(
        None, description="Its projection, as a path suffix: o_proj, or switch_mlp.down_proj."
    )
    plots: bool = Field(True, description="Draw plots if matplotlib is installed.")
    plot_format: Literal["png", "svg"] = Field("png", description="Plot format; svg for print.")
    seed: int = Field(0, ge=0, description="Seed for folds, permutations and random directions.")
    force: bool = Field(False, description="Replace an existing save path.")

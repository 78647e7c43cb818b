"""Settings of a fuse. Imports neither mlx nor numpy, so that `--help` stays fast."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from mlxstacks.files.settings import (
    BitsByPattern,
    PeftLayout,
    bits_of_module,
    parse_module_bits,
)
from mlxstacks.settings import Settings, output_path

PolicyName = Literal[
    "auto", "refit", "keep", "nearest", "promote", "stochastic", "shift", "dequantize"
]
_Policy = Literal[PolicyName, "gptq"]


def _or_none(judge: object) -> object:
    """None and False, in Python and YAML, are no judge."""
    return "none" if judge in (None, False) else judge


class FuseSettings(Settings):
    """What to fuse into what, and how."""

    model: str | None = Field(
        None, description="Model directory or Hugging Face id. Default: the built-in nano model."
    )
    adapter_path: tuple[str, ...] = Field(
        (),
        description="Adapter directory (mlx-lm or PEFT). Repeat it to fuse several in order. "
        "Default: nano's sample adapter.",
    )
    save_path: str | None = output_path("fuse")
    requant: _Policy = Field(
        "auto",
        description="How to write the delta into quantized weights. refit: as mlx_lm.fuse does. "
        "keep: change codes only. nearest: the better of the two, per group. stochastic: keep, "
        "with unbiased rounding. shift: change biases only. promote: more bits, at most 8. "
        "dequantize: no quantization. gptq: the same bits, with codes that keep the outputs on the "
        "rows of --calibration. auto: nearest where it preserves the adapter, else promote; "
        "modules that need more than 8 bits are written at 8 and listed, with what would keep "
        "more. Adapters trained with merge_ready: shift (pooled), keep (grid).",
    )
    zero_delta: bool = Field(
        False,
        description="Control: the same fuse, with the trained adapter's decisions but every "
        "learned number zero.",
    )
    target_correlation: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.98, description="Correlation of actual with intended delta that auto and promote aim for."
    )
    target_kl: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Let auto or gptq choose bits by behavior: the fewest bytes whose next tokens "
        "stay this close to the unfused adapter's (KL, nats per token, on the judge's rows). Takes "
        "two passes over some of the rows per module.",
    )
    calibration: str | None = Field(
        None,
        description="Rows on which gptq keeps the outputs, in any form that `train` takes: those "
        "that the adapter was trained on, or others like what the model will read.",
    )
    calibration_tokens: int = Field(
        8192, ge=1, description="Most tokens of the calibration that are read, 512 of a row."
    )
    fail_under: Annotated[float, Field(ge=-1, le=1)] | None = Field(
        None,
        description="Exit with 3 if the total correlation of an adapter is below this. Files are "
        "still written.",
    )
    judge: Annotated[str, BeforeValidator(_or_none)] = Field(
        "shipped",
        description="Rows on which to compare the fused model with the unfused adapter: shipped "
        "(16 texts and 8 prompts), a JSONL file of rows with text, prompt or messages, or none.",
    )
    fail_under_agreement: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Exit with 3 if the fused model agrees with the unfused adapter on a smaller "
        "share of next tokens. Files are still written.",
    )
    bits: BitsByPattern = Field(
        (),
        description="PATTERN=N: modules whose path matches the shell pattern get N bits; N alone: "
        "all modules. Repeatable; the last match wins.",
    )
    peft_layout: PeftLayout | None = Field(
        None, description="Expert layout of a PEFT adapter whose shapes fit two layouts."
    )
    allow_base: bool = Field(
        False,
        description="Fuse an adapter even if its recorded base fingerprint differs; the report "
        "says so.",
    )
    device_parity: bool = Field(
        False,
        description="With refit, use this device's mx.quantize instead of the CPU rule; bytes "
        "then depend on the machine.",
    )
    kernels: bool = Field(
        True,
        description="Fuse with GPU kernels where they run and give the same bytes as NumPy.",
    )
    copy_shards: bool = Field(
        False,
        description="Copy untouched shards instead of cloning or hard-linking them, and rewrite "
        "the others.",
        json_schema_extra={"cli_name": "--copy"},
    )
    force: bool = Field(False, description="Replace an existing save path.")
    seed: int = Field(0, ge=0, description="Seed for stochastic rounding.")

    @field_validator("bits")
    @classmethod
    def _bits_are_pairs(cls, pairs: tuple[str, ...]) -> tuple[str, ...]:
        for pair in pairs:
            parse_module_bits(pair, "bits")
        return pairs

    @model_validator(mode="after")
    def _parity_is_for_refit(self) -> "FuseSettings":
        if self.device_parity and self.requant != "refit":
            raise ValueError("device_parity goes with requant refit only: it is mx.quantize's rule")
        return self

    @model_validator(mode="after")
    def _target_kl_decides_alone(self) -> "FuseSettings":
        chooses = self.requant in ("auto", "gptq") and self.judge != "none"
        if self.target_kl is not None and not chooses:
            raise ValueError(
                "target_kl decides for requant auto or gptq, on the rows of the judge: leave "
                f"requant {self.requant} and judge {self.judge} out"
            )
        return self

    @model_validator(mode="after")
    def _gptq_reads_rows(self) -> "FuseSettings":
        if (self.requant == "gptq") != (self.calibration is not None):
            raise ValueError(
                "requant gptq and calibration go together: give rows like those that the model "
                "will read, for instance the adapter's training rows"
            )
        if self.requant == "gptq" and len(self.adapter_path) > 1:
            raise ValueError(
                "requant gptq takes one adapter: merge them first, with `mlxstacks adapter merge`"
            )
        return self

    @model_validator(mode="after")
    def _gate_needs_a_judge(self) -> "FuseSettings":
        if self.fail_under_agreement is not None and self.judge == "none":
            raise ValueError("fail_under_agreement needs a judge: leave judge none out")
        return self

    def bits_for(self, module: str) -> int | None:
        """Bits asked for a module path, or None."""
        return bits_of_module(module, (parse_module_bits(p, "bits") for p in self.bits), None)

    def bits_patterns(self) -> list[str]:
        """The patterns of `bits`, in order."""
        return [parse_module_bits(pair, "bits")[0] for pair in self.bits]

"""Settings of `mlxstacks convert`. Imports neither mlx nor numpy, so that `--help` stays fast."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from mlxstacks.files.settings import (
    BitsByPattern,
    ModuleBits,
    bits_of_module,
    parse_module_bits,
)
from mlxstacks.settings import Settings, output_path

Bits = Literal[2, 3, 4, 5, 6, 8]
Dtype = Literal["float16", "bfloat16", "float32"]


class ConvertSettings(Settings):
    """What to convert, and to what."""

    model: str | None = Field(
        None,
        description=".gguf file, model directory or Hugging Face id. Default: the built-in nano "
        "model in float32.",
    )
    save_path: str | None = output_path("convert")
    bits: Bits | None = Field(
        None,
        description="Quantize to this many bits per weight. GGUF tensors already on MLX's grid "
        "(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) keep their codes; other bits for them are refused, unless "
        "--module-bits names them.",
    )
    group_size: Literal[32, 64, 128] = Field(
        64, description="Weights that share a scale when --bits is given."
    )
    module_bits: BitsByPattern = Field(
        (),
        description="PATTERN=N: modules whose path matches the shell pattern get N bits; N=none "
        "keeps floats. Repeatable; the last match wins.",
    )
    dtype: Dtype | None = Field(
        None,
        description="Dtype of unquantized tensors and of new scales. Default: `torch_dtype` in "
        "config.json, else as stored.",
    )
    upcycle: int | None = Field(
        None,
        ge=2,
        le=256,
        description="Turn a dense llama-like model into a mixture of this many identical experts, "
        "with the same outputs.",
    )
    top_k: int = Field(2, ge=1, description="With --upcycle, experts per token.")
    seed: int = Field(0, ge=0, description="Seed for the routers that --upcycle adds.")
    force: bool = Field(False, description="Replace an existing save path.")

    @field_validator("module_bits")
    @classmethod
    def _module_bits_are_pairs(cls, pairs: tuple[str, ...]) -> tuple[str, ...]:
        for pair in pairs:
            parse_module_bits(pair, "module_bits", floats=True)
        return pairs

    @model_validator(mode="after")
    def _top_k_is_at_most_upcycle(self) -> "ConvertSettings":
        if self.upcycle is not None and self.top_k > self.upcycle:
            raise ValueError(f"top_k is {self.top_k}, more than the {self.upcycle} experts")
        return self

    def overrides(self) -> list[ModuleBits]:
        """`module_bits`, parsed, in order."""
        return [parse_module_bits(p, "module_bits", floats=True) for p in self.module_bits]

    def bits_of(self, module: str) -> int | None:
        """Bits asked for a module path; None where it is to stay in floats."""
        return bits_of_module(module, self.overrides(), self.bits)

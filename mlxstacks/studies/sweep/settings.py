"""Settings of `mlxstacks sweep`. Imports neither mlx nor numpy."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mlxstacks.data.settings import TrainDataSettings
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.fuse.settings import PolicyName
from mlxstacks.layers.settings import lora_scale, parse_layers
from mlxstacks.settings import Settings
from mlxstacks.training.settings import TrainSettings

# A name that stands for every usual projection, as leaving out `keys` does in `train`.
USUAL = "usual"
# What a cell gets from the sweep; in `train` it would be said twice.
_OF_THE_SWEEP = (
    "model", "data", "save_path", "num_layers", "layers", "keys", "rank", "seed", "resume", "force",
    "guard", "resource_limit", "working_set_bytes", "thinking", "allow_special",
)  # fmt: skip
Bits = Literal[2, 3, 4, 5, 6, 8]


class SweepSettings(Settings):
    """Runs of `train` for every rank, seed, set of layers, set of projections and width of the
    base; what each run needed, what it learned, and what of that a fuse would keep.
    """

    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id. With --bits its name holds {bits}: "
        "qwen-{bits}bit. Default: the built-in nano model.",
    )
    data: str | TrainDataSettings | None = Field(
        None,
        description="Rows, as `mlxstacks train` takes them. Default: nano's sample data.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = Field(
        None, description="Directory to write. Default: ./mlxstacks-out/sweep."
    )
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (2, 4, 8), description="Ranks. Repeatable."
    )
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**64)], ...] = Field(
        (0,),
        description="Seeds of first weights and order of the data; from two on differences have "
        "intervals. Repeatable.",
    )
    layers: tuple[str, ...] = Field(
        ("all",),
        description="A set of layers that get LoRA: all, or numbers and ranges as in 8,14,20-24. "
        "Repeat it to compare sets.",
    )
    projections: tuple[str, ...] = Field(
        ("down_proj",),
        description="A set of projections by the end of their path, joined by + as in "
        f"q_proj+v_proj; {USUAL}: all that train takes by default. Repeat it to compare sets.",
    )
    bits: tuple[Bits, ...] = Field(
        (), description="Widths of the base to compare. Repeatable. Default: the model as it is."
    )
    scale_rule: Literal["fixed", "lora", "rslora"] = Field(
        "fixed",
        description="How train.scale becomes the factor of the delta: fixed: it is the factor; "
        "lora: divided by the rank; rslora: by its square root.",
    )
    policies: tuple[PolicyName, ...] = Field(
        ("refit", "keep", "nearest", "promote"),
        description="Fuses to measure each adapter with; nothing is written. Repeatable.",
    )
    train: TrainSettings = Field(
        TrainSettings(
            iters=40, learning_rate=1e-3, scale=2.0, steps_per_eval=10, save_every=10, keep="last"
        ),
        description="Settings of every run, by the names of `mlxstacks train`.",
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    guard: Literal["refuse", "reshape", "warn"] = Field(
        "refuse",
        description="A cell that is predicted not to fit: refuse records that and runs the others, "
        "reshape runs it with the cheapest change that fits, warn runs it as it is.",
    )
    resource_limit: int | None = Field(
        None, ge=1, description="Buffers a process may hold. Default: what the device says."
    )
    working_set_bytes: int | None = Field(
        None, ge=1, description="Memory to stay within. Default: what a Metal device recommends."
    )
    counting_library: str | None = Field(
        None, description="Preloaded library that counts live buffers; Linux, see tests/."
    )
    retry: bool = Field(False, description="Run cells again that failed or crashed.")
    resume: bool = Field(True, description="Keep finished cells of an interrupted sweep.")
    force: bool = Field(
        False, description="Replace an existing save path; cells of the same settings are kept."
    )

    @field_validator("layers", "projections", mode="before")
    @classmethod
    def _sets_are_text(cls, value: Any) -> Any:
        for part in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(part, str):
                raise ValueError(
                    f"each entry is a set, written as text; got {part!r}. "
                    '["8,14,20"] is one set of three, ["8", "14", "20"] are three sets of one'
                )
        return value

    @field_validator("layers")
    @classmethod
    def _layers_are_numbers(cls, sets: tuple[str, ...]) -> tuple[str, ...]:
        for layers in sets:
            parse_layers(layers)
        return sets

    @field_validator("projections")
    @classmethod
    def _projections_are_names(cls, sets: tuple[str, ...]) -> tuple[str, ...]:
        for names in sets:
            if not all(part.strip() for part in names.split("+")):
                raise ValueError(f"got {names!r}; names joined by +, as in q_proj+v_proj")
        return sets

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("ranks", "seeds", "layers", "projections", "policies", "bits"):
            values = getattr(self, name)
            if not values and name != "bits":
                raise ValueError(f"{name} is empty; a sweep needs at least one")
            if len(set(values)) < len(values):
                raise ValueError(f"{name} is {list(values)}; give each once")
        plain = TrainSettings()
        names = {"rank": "ranks", "seed": "seeds", "keys": "projections", "num_layers": "layers"}
        problems = [
            f"train.{key} is set by the sweep: give {names.get(key, key)}"
            for key in _OF_THE_SWEEP
            if getattr(self.train, key) != getattr(plain, key)
        ]
        if problems:
            raise ValueError("; ".join(problems))
        if self.bits and self.model is not None and "{bits}" not in self.model:
            # nano's own path is filled in later, and has its exports
            raise ValueError(
                f"bits needs a model for each width: put {{bits}} into its name; got {self.model!r}"
            )
        if not self.bits and self.model is not None and "{bits}" in self.model:
            raise ValueError(f"model is {self.model!r}; give --bits for the widths to put there")
        return self


def scale_of(settings: SweepSettings, rank: int) -> float:
    """The factor of the delta of a run."""
    if settings.scale_rule == "fixed":
        return settings.train.scale
    return lora_scale(settings.train.scale, rank, settings.scale_rule)

"""Settings of `mlxstacks sweep`. Imports neither mlx nor numpy."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mlxstacks.data.settings import TrainDataSettings
from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.fuse.settings import PolicyName
from mlxstacks.layers.settings import lora_scale, parse_layers
from mlxstacks.settings import ResourceLimit, Settings, WorkingSetBytes, output_path
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
        description="Model directory or Hugging Face id. With --bits, write {bits} in its name: "
        "qwen-{bits}bit. Default: the built-in nano model.",
    )
    data: str | TrainDataSettings | None = Field(
        None,
        description="Rows, as in `mlxstacks train`. Default: nano's sample data.",
        json_schema_extra={"cli_type": "text"},
    )
    save_path: str | None = output_path("sweep")
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (2, 4, 8), description="LoRA ranks. Repeatable."
    )
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**64)], ...] = Field(
        (0,),
        description="Seeds for initial weights and data order; two or more give intervals for "
        "differences. Repeatable.",
    )
    layers: tuple[str, ...] = Field(
        ("all",),
        description="Set of layers to adapt: all, or numbers and ranges such as 8,14,20-24. "
        "Repeat it to compare sets.",
    )
    projections: tuple[str, ...] = Field(
        ("down_proj",),
        description="Set of projections to adapt: path suffixes joined by +, such as q_proj+v_proj "
        f"({USUAL}: the default of train). Repeat it to compare sets.",
    )
    bits: tuple[Bits, ...] = Field(
        (), description="Bits of the base to compare. Repeatable. Default: the model as it is."
    )
    scale_rule: Literal["fixed", "lora", "rslora"] = Field(
        "fixed",
        description="Factor of the delta. fixed: train.scale; lora: train.scale / rank; rslora: "
        "train.scale / sqrt(rank).",
    )
    policies: tuple[PolicyName, ...] = Field(
        ("refit", "keep", "nearest", "promote"),
        description="Fuse policies to measure each adapter with; nothing is written. Repeatable.",
    )
    train: TrainSettings = Field(
        TrainSettings(
            iters=40, learning_rate=1e-3, scale=2.0, steps_per_eval=10, save_every=10, keep="last"
        ),
        description="Settings of every run, named as in `mlxstacks train`.",
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    guard: Literal["refuse", "reshape", "warn"] = Field(
        "refuse",
        description="If a cell is predicted not to fit: refuse (record that and run the others), "
        "reshape (run it with the cheapest change that fits), or warn (run it as it is).",
    )
    resource_limit: ResourceLimit = None
    working_set_bytes: WorkingSetBytes = None
    retry: bool = Field(False, description="Rerun cells that failed or crashed.")
    resume: bool = Field(True, description="Keep finished cells of an interrupted sweep.")
    force: bool = Field(
        False, description="Replace an existing save path; keep cells with the same settings."
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

"""Settings of `mlxstacks sweep buffers`, its plan. Imports neither mlx nor numpy."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mlxstacks.settings import Settings, output_path

Trainer = Literal["mlx-lm", "mlxstacks"]
LengthMode = Literal["fixed", "variable"]
# Rows are padded to widths that are multiples of this, as mlx-lm pads them.
MULTIPLE = 32


class BufferSettings(Settings):
    """Does the rank of a LoRA move the number of live buffers?

    Every field but those that say where files lie is part of the plan, which is hashed before the
    first run.
    """

    model: str | None = Field(
        None, description="Model directory. Default: the built-in nano model at 3 bits."
    )
    save_path: str | None = output_path("sweep-buffers")
    ranks: tuple[int, ...] = Field((2, 4, 8), description="Ranks to compare. Repeatable.")
    layers: str = Field("1,2,3", description="Layers to adapt: all, or numbers such as 8,14,20.")
    projections: tuple[str, ...] = Field(
        ("switch_mlp.down_proj",), description="Projections to adapt, by path suffix. Repeatable."
    )
    trainers: tuple[Trainer, ...] = Field(
        ("mlx-lm", "mlxstacks"),
        description="Trainers to compare. mlx-lm: its loop over tokens and mx.checkpoint. "
        "mlxstacks: chunked recurrence and its own checkpoints.",
    )
    length_modes: tuple[LengthMode, ...] = Field(
        ("fixed", "variable"), description="Rows of one length (fixed), or of several (variable)."
    )
    checkpointing: tuple[Literal["off", "on"], ...] = Field(
        ("off", "on"), description="Whether to recompute layers in the backward pass."
    )
    order_seeds: tuple[int, ...] = Field(
        (0, 1, 2, 3, 4), description="Seeds for the order of rows and for their tokens. Repeatable."
    )
    fixed_tokens: int = Field(96, ge=2, description="Row length where it is fixed, in tokens.")
    longest_tokens: int = Field(
        128, ge=MULTIPLE, description="Longest row where lengths vary (32, 64, ...), in tokens."
    )
    steps: int = Field(12, ge=4, description="Training steps per run.")
    warmup_steps: int = Field(2, ge=0, description="Initial steps to leave out of the comparison.")
    margin: float = Field(
        0.01, gt=0, lt=1, description="Smallest relative difference in counts that matters."
    )
    least_effect: float = Field(
        0.2, gt=0, description="Positive control: smallest relative effect of row length."
    )
    growth_margin: float = Field(
        1.0, gt=0, description="Buffers per step from which a run counts as growing."
    )
    resume: bool = Field(True, description="Resume an interrupted experiment.")
    force: bool = Field(False, description="Replace an existing save path.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("ranks", "trainers", "length_modes", "checkpointing", "order_seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} is {list(values)}; give at least one, each once")
        if len(self.ranks) < 2 or min(self.ranks) < 1:
            raise ValueError(f"ranks is {list(self.ranks)}; a comparison needs two, all positive")
        if self.warmup_steps > self.steps - 3:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} leaves less than 3 of {self.steps} steps"
            )
        return self

    def plan(self) -> dict[str, object]:
        """What was decided beforehand: everything but where files lie and how a run resumes."""
        return self.model_dump(mode="json", exclude={"model", "save_path", "resume", "force"})

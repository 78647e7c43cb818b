"""Settings of the trainer core. Imports neither mlx nor numpy."""

import math

from pydantic import BaseModel, ConfigDict, Field


class OptimizerSettings(BaseModel):
    """AdamW, clipping, linear warm-up and a cosine to `final_share` of the peak, by step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(ge=1, description="optimizer steps")
    learning_rate: float = Field(gt=0, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    final_share: float = Field(
        0.02, ge=0, le=1, description="last learning rate as a share of the peak"
    )
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.98, ge=0, lt=1)
    weight_decay: float = Field(0.02, ge=0)
    clip_norm: float = Field(1.0, gt=0, description="largest global gradient norm")
    log_every: int = Field(50, ge=1)

    def learning_rate_at(self, step: int) -> float:
        """The rate of step 0, 1, ...: rises over the warm-up, then falls along a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        span = max(1, self.steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (step - self.warmup_steps) / span)))
        return self.learning_rate * (self.final_share + (1 - self.final_share) * cosine)

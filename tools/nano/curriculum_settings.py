"""What the bare `mlxstacks stack` runs on nano, as measured. Imports neither mlx nor numpy."""

from pydantic import Field

from mlxstacks.layers.settings import StackSettings
from mlxstacks.settings import Settings
from mlxstacks.training.settings import Schedule

# In this order. The last domain of the curriculum is for experiments with four.
DOMAINS = ("letters", "islands", "queries", "tolu")
ROWS, SEED = 300, 0


class CurriculumTraining(Settings):
    """The settings of the bare run; a `stack` recipe has the same names.

    A CPU without a fast BLAS takes about a second for a batch of 256 tokens, so a round is few,
    large steps on the upper half of the model: with these every round still gains clearly.
    """

    domains: tuple[str, ...] = Field(DOMAINS[:3], description="Of the bare run, in order.")
    rounds: int = 2
    validation_rows: int = Field(32, description="Rows of each domain kept for validation.")
    stack: StackSettings = StackSettings(rank=4, alpha=4.0, num_experts=2, experts_per_token=1)
    layers: str = "3-5"
    iters: int = Field(24, description="Batches of a round.")
    batch_size: int = 8
    learning_rate: float = 1e-2
    lr_schedule: Schedule = "cosine"
    warmup: int = 4
    weight_decay: float = 0.0
    beta2: float = 0.98
    balance_weight: float = 0.01
    max_seq_length: int = 64
    steps_per_eval: int = 12

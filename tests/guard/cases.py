"""Tiny training runs for the guard's campaign: one table, the same in the counting process."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

from mlxstacks.guard.build import recurrence, training_step
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.guard.step import Step
from tests.tiny_models import qwen_moe_config

KEYS = {
    "experts": ("switch_mlp.down_proj",),
    "routed": ("switch_mlp.gate_proj", "switch_mlp.up_proj"),
    "mixed": ("switch_mlp.down_proj", "shared_expert.up_proj"),
    "shared": ("shared_expert.down_proj", "shared_expert.gate_proj"),
    "usual": (),
    # Of every layer only one kind has each of these.
    "attention": ("in_proj_qkv", "linear_attn.out_proj", "q_proj", "o_proj"),
}


@dataclass(frozen=True)
class Case:
    """A run. bits None: float32 weights, which MLX's CPU needs for unquantized experts."""

    tokens: int
    layers: int = 4
    interval: int = 4
    batch_size: int = 1
    rank: int = 4
    num_experts: int = 8
    keys: str = "mixed"
    adapted: str = "all"
    checkpointing: str = "none"
    recurrence: str = "loop"
    compile: bool = False
    bits: int | None = None
    optimizer: str = "adam"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def config(self) -> dict[str, Any]:
        config = qwen_moe_config(64, self.num_experts)
        config["text_config"] |= {
            "num_hidden_layers": self.layers,
            "full_attention_interval": self.interval,
        }
        config["dtype"] = "float32" if self.bits is None else "bfloat16"
        if self.bits is not None:
            config["quantization"] = {"group_size": 64, "bits": self.bits, "mode": "affine"}
        return config

    def settings(self) -> GuardSettings:
        return GuardSettings(
            max_seq_length=self.tokens, batch_size=self.batch_size, rank=self.rank,
            layers=self.adapted, keys=KEYS[self.keys], compile=self.compile,
            checkpointing=self.checkpointing,
            recurrence=self.recurrence,
            optimizer=self.optimizer, loss="whole", adapter_copies=0,
        )  # fmt: skip

    @contextmanager
    def step(self) -> Iterator[Step]:
        """The step, with the recurrence of the case in effect."""
        with recurrence(self.settings()):
            yield training_step(self.config(), self.settings(), self.tokens)


def real_weights(step: Step, seed: int = 0) -> None:
    """Weights that can be computed with, small enough for no overflow."""
    key = mx.random.key(seed)

    def draw(path: str, value: mx.array) -> mx.array:
        nonlocal key
        if not mx.issubdtype(value.dtype, mx.floating):
            return value
        key, now = mx.random.split(key)
        return (0.1 * mx.random.normal(value.shape, key=now)).astype(value.dtype)

    step.model.update(tree_map_with_path(draw, step.model.parameters()))
    mx.eval(step.model.parameters(), step.optimizer.state, step.batch)


# A seeded tenth runs in `make test`: these come first and differ in what matters most.
_FIRST = (
    Case(48),
    Case(32, layers=3, interval=3, checkpointing="layers", keys="experts", bits=4),
    Case(130, recurrence="chunked", num_experts=16, batch_size=2),
    Case(16, layers=4, interval=2, batch_size=3, checkpointing="layers", keys="shared"),
    Case(24, checkpointing="mlx", adapted="1,3", optimizer="sgd"),
    Case(130, layers=6, recurrence="chunked", checkpointing="layers", keys="usual"),
)
# mx.compile builds its kernels with the system's compiler: half a minute a run.
_COMPILED = (
    Case(24, compile=True),
    Case(16, compile=True, checkpointing="layers", keys="experts"),
    Case(48, compile=True, recurrence="chunked", keys="routed", optimizer="adamw"),
    Case(32, compile=True, recurrence="chunked", checkpointing="layers"),
)
COUNT = 55


def cases() -> list[Case]:
    """All of them, the same in every process."""
    rng = random.Random(7)
    drawn = list(_FIRST) + list(_COMPILED)
    while len(drawn) < COUNT:
        layers = rng.choice((4, 6, 8))
        low = rng.randrange(layers)
        adapted = rng.choice(("all", "all", f"{low}-{layers - 1}"))
        drawn.append(Case(
            tokens=rng.choice((16, 24, 33, 64, 100, 128, 200, 256)),
            layers=layers,
            interval=rng.choice((2, 3, 4)),
            batch_size=rng.choice((1, 1, 2, 3)),
            rank=rng.choice((1, 2, 4, 8, 16)),
            num_experts=rng.choice((8, 16, 32, 64)),
            keys=rng.choice(list(KEYS) if adapted == "all" else list(KEYS)[:-1]),
            adapted=adapted,
            checkpointing=rng.choice(("none", "layers", "mlx")),
            recurrence=rng.choice(("loop", "chunked")),
            bits=rng.choice((None, None, 4, 8)),
            optimizer=rng.choice(("adam", "adamw", "sgd", "lion")),
        ))  # fmt: skip
    return drawn

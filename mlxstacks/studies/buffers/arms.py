"""One arm of the buffer experiment: a real training run whose buffers are counted at every step.

    python -m mlxstacks.studies.buffers.arms < specification

is how run.py starts a process for arms of one trainer, checkpointing, rank and order.
"""

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from mlxstacks import base_model
from mlxstacks.guard.build import mlx_checkpointed
from mlxstacks.guard.counting import Counter, counter
from mlxstacks.guard.step import Step, mlx_lm_loss, run_step
from mlxstacks.layers.settings import TargetSettings, parse_layers
from mlxstacks.layers.targets import check_targets, find_targets
from mlxstacks.studies.buffers.settings import (
    MULTIPLE,
    BufferSettings,
    LengthMode,
    Trainer,
)
from mlxstacks.study.child_process import as_child
from mlxstacks.training.checkpointing import checkpoint_layers

_CHECKPOINTING: dict[tuple[str, str], Callable[[nn.Module], AbstractContextManager[Any]]] = {
    ("mlx-lm", "on"): mlx_checkpointed,
    ("mlxstacks", "on"): checkpoint_layers,
}


@dataclass(frozen=True)
class Arm:
    """A run: the conditions it belongs to, its rank, and the seed of its order."""

    trainer: Trainer
    checkpointing: str
    rank: int
    length_mode: LengthMode
    order_seed: int

    @property
    def condition(self) -> tuple[str, str, str]:
        return (self.trainer, self.checkpointing, self.length_mode)


@dataclass(frozen=True)
class ArmRecord:
    """What an arm did, by step: tokens of its row, most buffers alive during the step, buffers
    alive after it, most bytes. `before`: buffers alive before the first step, model included.
    """

    arm: Arm
    before: int
    tokens: list[int]
    peaks: list[int]
    after: list[int]
    peak_bytes: list[int]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, document: dict[str, Any]) -> "ArmRecord":
        return cls(**document | {"arm": Arm(**document["arm"])})


def row_lengths(settings: BufferSettings, mode: LengthMode, order_seed: int) -> list[int]:
    """Tokens of the row of each step. Law: orders differ by the seed, the lengths do not."""
    if mode == "fixed":
        return [settings.fixed_tokens] * settings.steps
    widths = range(MULTIPLE, settings.longest_tokens + 1, MULTIPLE)
    lengths = [widths[step % len(widths)] for step in range(settings.steps)]
    random.Random(f"{order_seed}/order").shuffle(lengths)
    return lengths


def adapted_model(settings: BufferSettings, rank: int) -> nn.Module:
    """The model with mlx-lm's LoRA, in training mode.

    Raises: ValueError for layers, projections or a rank that do not fit.
    """
    model, _, _ = base_model.load(Path(str(settings.model)))
    wanted = TargetSettings(layers=parse_layers(settings.layers), projections=settings.projections)
    targets = find_targets(model, wanted)
    check_targets(targets, rank)
    base_model.attach_lora(model, 0, rank, 1.0, [target.path for target in targets])
    model.train()
    mx.eval(model.parameters())
    return model


def run_arm(arm: Arm, settings: BufferSettings, count: Counter) -> ArmRecord:
    """Train `settings.steps` steps with mlx-lm's loss and Adam; nothing else is alive meanwhile."""
    gc.collect()
    empty = count.live
    model = adapted_model(settings, arm.rank)
    optimizer = optim.Adam(1e-5)
    optimizer.init(model.trainable_parameters())
    mx.eval(optimizer.state)
    lengths = row_lengths(settings, arm.length_mode, arm.order_seed)
    record = ArmRecord(arm, count.live - empty, lengths, [], [], [], 0.0)
    started = time.perf_counter()
    checkpointed = _CHECKPOINTING.get((arm.trainer, arm.checkpointing), nullcontext)
    recurrence = base_model.gated_delta_installed if arm.trainer == "mlxstacks" else nullcontext
    with recurrence(), checkpointed(model):
        for place, tokens in enumerate(lengths):
            row = _row(model, f"{arm.order_seed}/{place}", tokens)
            count.reset()
            mx.eval(run_step(Step(model, optimizer, mlx_lm_loss, row)))
            mx.synchronize()
            record.peaks.append(count.peak - empty)
            record.peak_bytes.append(count.peak_bytes)
            del row
            record.after.append(count.live - empty)
    seconds = round(time.perf_counter() - started, 3)
    return ArmRecord(**{**vars(record), "seconds": seconds})


def _row(model: nn.Module, place: str, tokens: int) -> tuple[mx.array, mx.array]:
    """A row of random tokens, for mlx-lm's loss; a function of its place in the run."""
    chance = random.Random(place)
    vocabulary = model.language_model.args.vocab_size
    ids = [chance.randrange(vocabulary) for _ in range(tokens + 1)]
    row = mx.array([ids], dtype=mx.int32), mx.array([[0, tokens]])
    mx.eval(row)
    return row


def arms_of(settings: BufferSettings) -> Iterator[list[Arm]]:
    """All arms, those of one process together: orders of rows are in processes of their own, so
    that what a process adds is part of their spread. Ranks take turns.
    """
    places = itertools.product(settings.trainers, settings.checkpointing, settings.order_seeds)
    for trainer, checkpointing, seed in places:
        for rank in settings.ranks:
            yield [Arm(trainer, checkpointing, rank, mode, seed) for mode in settings.length_modes]


def main() -> None:
    specification, send = as_child()
    settings = BufferSettings.model_validate(specification["settings"])
    for arm in specification["arms"]:
        send(run_arm(Arm(**arm), settings, counter()).as_json())


if __name__ == "__main__":
    main()

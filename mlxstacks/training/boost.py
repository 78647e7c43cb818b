"""Residual boosting: the inner loop of one domain.

    round 1..R   a new stack, exactly zero; train it with all earlier ones on; put back its best
                 weights, the first best being those zeros; freeze; measure what was frozen

The loss that counts is that of the frozen stack, by the one evaluator. A round that gains less than
`min_loss_delta` is the last one, and its stack is dropped unless `keep_plateau_stack` is set; one
that gains nothing is dropped in any case, so a domain never ends worse than it began.

Everything random is a function of seed, domain and round, so what was done before a domain, other
than the stacks themselves, changes nothing.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.data import Batch
from mlxstacks.errors import InputError
from mlxstacks.files.manifest import stack_name
from mlxstacks.layers.adapted import Balance, take_balance
from mlxstacks.layers.delta_rows import protect_active
from mlxstacks.layers.freezing import freeze_active, remove_frozen
from mlxstacks.layers.latent import LatentPair
from mlxstacks.layers.nullspace import NullBasis
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.training.loop import (
    Record,
    TrainingState,
    Validation,
    new_state,
    restore_best,
    train,
)
from mlxstacks.training.modes import set_training_modes
from mlxstacks.training.settings import OptimizerSettings, SnapshotSettings
from mlxstacks.training.step import cross_entropy_loss, random_key

Parts = Mapping[str, FrozenStack]
# Why no round follows one that gained enough.
LAST_ROUND = "every round was run"
_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True, eq=False)
class DomainJob:
    """What one domain trains on, and how.

    paths: projections that get a stack. rounds: at most so many. every: steps between evaluations.
    batches_at: (round, step) -> the batches of a step. loss_of: validation loss of the model, in
    evaluation mode. bases: directions to keep out of, by path. latent: shared projections by path,
    with stack.latent_dim. head: the model's, for a loss in pieces.
    """

    name: str
    paths: tuple[str, ...]
    stack: StackSettings
    rounds: int
    optimizer: OptimizerSettings
    every: int
    batches_at: Callable[[int, int], Sequence[Batch]]
    loss_of: Callable[[nn.Module], float]
    snapshot: SnapshotSettings
    min_loss_delta: float = 0.002
    keep_plateau_stack: bool = False
    balance_weight: float = 0.01
    seed: int = 42
    bases: Mapping[str, NullBasis] = field(default_factory=dict)
    latent: Mapping[str, LatentPair] = field(default_factory=dict)
    compiled: bool = False
    head: OutputHead | None = None


@dataclass(frozen=True)
class RoundRecord:
    """What came of a round; losses are validation losses in nats per token.

    loss_trained: of the best weights before they were frozen; loss_after: of the frozen stack.
    ended: why training stopped before its last step, or None. last: why no round follows, or None.
    history: task_loss and balance_loss apart (`loss` is their weighted sum), every few steps.
    """

    number: int
    kept: bool
    loss_before: float
    loss_trained: float
    loss_after: float
    steps: int
    best_step: int
    ended: str | None
    last: str | None
    seconds: float = 0.0
    history: list[Record] = field(default_factory=list)
    validation: list[Record] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Checkpoints(Protocol):
    """Where the inner loop keeps what it needs to go on after it was stopped."""

    def rounds(self) -> list[RoundRecord]:
        """Rounds done before; the stacks of those that were kept are in the model again."""

    def load(self, model: nn.Module, number: int) -> TrainingState | None:
        """The saved state of a round, with its weights in the model; None: it was not begun."""

    def on_step(self, number: int, state: TrainingState, record: Record) -> None:
        """After each step; may save."""

    def on_validation(self, number: int, state: TrainingState, record: Record) -> None: ...

    def save(self, model: nn.Module, number: int, state: TrainingState) -> None: ...

    def round_done(self, record: RoundRecord, parts: Parts | None) -> None:
        """parts: the frozen stack by path; None where it was not kept."""


def boost_domain(
    model: nn.Module,
    job: DomainJob,
    checkpoints: Checkpoints,
    group: mx.distributed.Group | None = None,
    done: Sequence[RoundRecord] | None = None,
) -> list[RoundRecord]:
    """Train the stacks of one domain; afterwards the kept ones are frozen in the model.

    done: what `checkpoints.rounds()` gave, where the caller has asked already.
    Raises:
        NonFiniteError: NaN or Inf in a step. The state before it is saved, its best weights in it.
        InputError: a trained stack does not fit the storage dtype; its state is saved.
    """
    records = checkpoints.rounds() if done is None else list(done)
    while len(records) < job.rounds and not (records and records[-1].last):
        records.append(_round(model, job, len(records) + 1, checkpoints, group))
    return records


def _round(
    model: nn.Module, job: DomainJob, number: int, checkpoints: Checkpoints, group: Any
) -> RoundRecord:
    start = time.monotonic()
    add_stack(model, job, number)
    set_training_modes(model)
    state = checkpoints.load(model, number) or new_state(job.optimizer)
    try:
        train(
            model, cross_entropy_loss(call_with_balance, job.balance_weight, job.head),
            lambda step: job.batches_at(number, step), job.optimizer, state,
            validation=Validation(job.loss_of, job.every, job.snapshot), group=group,
            compiled=job.compiled, seed=round_seed(job, number),
            on_validation=lambda state, record: checkpoints.on_validation(number, state, record),
            on_step=lambda state, record: checkpoints.on_step(number, state, record),
        )  # fmt: skip
    except FloatingPointError:
        checkpoints.save(model, number, state)
        raise
    restore_best(model, state)
    checkpoints.save(model, number, state)
    name, best = stack_name(job.name, number), state.best
    try:
        parts = freeze_active(model, name, job.name, _DTYPES[job.stack.storage])
    except ValueError as error:
        raise InputError(
            f"{error}\nThe trained stack is saved; --set stack.storage=bfloat16 resumes there"
        ) from error
    after = job.loss_of(model)
    assert best is not None
    before = state.validation[0]["validation_loss"]
    kept, last = judge_round(before, after, best.step, job.min_loss_delta, job.keep_plateau_stack)
    if last is None and number == job.rounds:
        last = LAST_ROUND
    # The loop calls what a forward pass adds `extra_loss`; here it is the balance of experts.
    history = [
        {key.replace("extra_loss", "balance_loss"): value for key, value in step.items()}
        for step in state.history
    ]
    record = RoundRecord(
        number, kept, before, best.loss, after, state.step, best.step, state.stopped, last,
        time.monotonic() - start, history, list(state.validation),
    )  # fmt: skip
    if not record.kept:
        remove_frozen(model, name)
    checkpoints.round_done(record, parts if record.kept else None)
    return record


def add_stack(model: nn.Module, job: DomainJob, number: int) -> None:
    """A new stack on the job's projections, kept out of its protected directions.

    Its first weights are a function of seed, domain, round and path alone.
    """
    layers = dict(stacked_layers(model))
    for path in job.paths:
        key = random_key(f"{job.seed}/{job.name}/{number}/{path}")
        layers[path].add_active(job.stack, key, job.latent.get(path))
    protect_active(model, {path: job.bases[path] for path in job.paths if path in job.bases})


def round_seed(job: DomainJob, number: int) -> int:
    """Seed of noise and dropout in a round's steps."""
    digest = hashlib.sha256(f"{job.seed}/{job.name}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def call_with_balance(model: nn.Module, tokens: mx.array) -> tuple[mx.array, Balance]:
    """Logits, and the balance of all projections."""
    return model(tokens), take_balance(model)


def judge_round(
    before: float, after: float, best_step: int, min_loss_delta: float, keep_plateau: bool
) -> tuple[bool, str | None]:
    """Whether the stack of a round is kept, and why no round follows it (None: one may).

    before, after: validation loss without it and with it frozen. best_step: 0 for the zeros it
    began with.
    """
    gain = before - after
    if best_step == 0 or not math.isfinite(gain) or gain <= 0:
        return False, "the round gained nothing"
    if gain < min_loss_delta:
        return keep_plateau, f"the round gained {gain:.5f}, less than {min_loss_delta}"
    return True, None

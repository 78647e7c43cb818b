"""What commands that train would train, of the config of their model alone."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxstacks.errors import InputError
from mlxstacks.guard.build import lazy_model, read_config
from mlxstacks.guard.run import guard
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.settings import TargetSettings, parse_layers
from mlxstacks.layers.targets import Target, check_targets, find_targets, stack_size
from mlxstacks.studies.buffers.arms import arms_of
from mlxstacks.studies.buffers.settings import BufferSettings
from mlxstacks.studies.compare.settings import CompareSettings
from mlxstacks.studies.stack.setup import asked_of as stack_guard
from mlxstacks.studies.stack.setup import choose_targets as choose_stack_targets
from mlxstacks.studies.sweep.cells import cells_of, train_settings
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.train.setup import asked_of as train_guard
from mlxstacks.studies.train.setup import choose_targets, guard_json, trained_parameters
from mlxstacks.study.document import counted
from mlxstacks.training.settings import AlignSettings, StackRunSettings, TrainSettings


def trainings_of(name: str, settings: Any) -> Iterator[dict[str, Any]]:
    """A dict for each adapter or stack that differs.

    runs: how many are alike. batches: None: the data once. guard: None where it was not asked.
    trained_parameters: of one adapter or stack; frozen_bytes: of a stack in the store.
    Raises: InputError for layers, projections or a rank that the model does not have.
    """
    if name in ("train", "align"):
        yield _train("one adapter", settings)
    elif name == "stack":
        yield _stack("", settings)
    elif name == "stack compare":
        yield from _compare(settings)
    elif name == "sweep":
        yield from _sweep(settings)
    elif name == "sweep buffers":
        yield from _buffers(settings)


def projections_of(model: str) -> list[tuple[int, str]]:
    """Layer and name of every projection that is trained where none is named."""
    return [(target.layer, target.name) for target in find_targets(_model(model))]


def _model(name: str | None) -> nn.Module:
    return lazy_model(read_config(str(name))[0])


def _train(name: str, settings: TrainSettings, runs: int = 1, ask: bool = True) -> dict[str, Any]:
    targets = choose_targets(_model(settings.model), settings)
    layers = ",".join(map(str, sorted({target.layer for target in targets})))
    longest = settings.max_seq_length
    if isinstance(settings, AlignSettings):  # two answers go through the model for each pair
        settings = settings.model_copy(update={"batch_size": 2 * settings.batch_size})
    run = train_guard(settings, str(settings.model), longest, validates=True, layers=layers)
    return _adapter(
        name, targets, settings.rank, run if ask and settings.guard != "off" else None,
        settings.shared_outer, runs=runs, batches=settings.iters, longest_row_tokens=longest,
    )  # fmt: skip


def _adapter(
    name: str,
    targets: Sequence[Target],
    rank: int,
    run: GuardSettings | None,
    shared_outer: bool = False,
    **figures: Any,
) -> dict[str, Any]:
    try:
        check_targets(targets, rank)
    except ValueError as error:
        raise InputError(str(error)) from error
    number = trained_parameters(targets, rank, shared_outer)
    return {
        "name": name, **_where(targets), "trained_parameters": number,
        # float32, of every expert; and two numbers of Adam for each that is trained
        "adapter_bytes": 4 * trained_parameters(targets, rank), "optimizer_bytes": 8 * number,
        "frozen_bytes": None,
        "guard": _verdict(run) if run else None, **figures,
    }  # fmt: skip


def _stack(name: str, settings: StackRunSettings, runs: int = 1) -> dict[str, Any]:
    targets = choose_stack_targets(_model(settings.model), settings)
    size = stack_size(targets, settings.stack)
    rounds = [domain.rounds or settings.rounds for domain in settings.domains] or [settings.rounds]
    batches = [domain.iters or settings.iters for domain in settings.domains] or [settings.iters]
    known = [count for count in batches if count is not None]
    total = sum(a * b for a, b in zip(rounds, known, strict=True)) if known == batches else None
    run = stack_guard(
        settings, str(settings.model), settings.max_seq_length, domains=len(rounds),
        layers=",".join(map(str, sorted({target.layer for target in targets}))), stacks=sum(rounds),
    )  # fmt: skip
    return {
        "name": f"{name}{counted(sum(rounds), 'stack')}", "runs": runs, **_where(targets),
        "trained_parameters": size.parameters, "adapter_bytes": size.trained_bytes,
        "optimizer_bytes": 2 * size.trained_bytes, "frozen_bytes": size.frozen_bytes,
        "batches": total, "longest_row_tokens": settings.max_seq_length, "guard": _verdict(run),
    }  # fmt: skip


def _compare(settings: CompareSettings) -> Iterator[dict[str, Any]]:
    runs = len(settings.seeds) + len(settings.rates) * len(settings.search_seeds)
    for arm in settings.arms:
        run = settings.settings_of(arm, model=settings.model, data=settings.data)
        yield _stack(f"{arm.name}: ", run, runs)


def _sweep(settings: SweepSettings) -> Iterator[dict[str, Any]]:
    """A line for each rank of a point. The guard evaluates the lowest and the highest: its count
    and its bytes grow with the rank, so that the others lie between.
    """
    ends = {min(settings.ranks), max(settings.ranks)}
    for cell in cells_of(settings):
        if cell.seed != settings.seeds[0]:
            continue
        model = str(settings.model).replace("{bits}", str(cell.bits))
        train = train_settings(settings, cell, Path(model), Path(cell.name), {})
        limits = {
            "model": model, "guard": settings.guard, "resource_limit": settings.resource_limit,
            "working_set_bytes": settings.working_set_bytes,
        }  # fmt: skip
        width = f", {cell.bits} bits" if cell.bits else ""
        label = f"rank {cell.rank}, layers {cell.layers}, {cell.projections}{width}"
        runs = len(settings.seeds)
        yield _train(label, train.model_copy(update=limits), runs, cell.rank in ends)


def _buffers(settings: BufferSettings) -> Iterator[dict[str, Any]]:
    """A line for each rank. The guard evaluates mlx-lm's loop, where it is among the trainers: it
    holds by far the most buffers.
    """
    target_settings = TargetSettings(
        layers=parse_layers(settings.layers), projections=settings.projections or None
    )
    try:
        targets = find_targets(_model(settings.model), target_settings)
    except ValueError as error:
        raise InputError(str(error)) from error
    arms = [arm for together in arms_of(settings) for arm in together]
    longest = max(settings.fixed_tokens, settings.longest_tokens)
    by_mlx_lm = "mlx-lm" in settings.trainers
    for rank in settings.ranks:
        run = GuardSettings(
            model=str(settings.model), max_seq_length=longest, rank=rank, layers=settings.layers,
            keys=settings.projections,
            recurrence="loop" if by_mlx_lm else "chunked", loss="whole", optimizer="adam",
            adapter_copies=0,
            checkpointing="none" if "off" in settings.checkpointing
            else "mlx" if by_mlx_lm else "layers",
        )  # fmt: skip
        ends = rank in (min(settings.ranks), max(settings.ranks))
        yield _adapter(
            f"rank {rank}", targets, rank, run if ends else None, batches=settings.steps,
            runs=sum(arm.rank == rank for arm in arms), longest_row_tokens=longest,
        )  # fmt: skip


def _where(targets: Sequence[Target]) -> dict[str, Any]:
    return {
        "projections": dict(sorted(Counter(target.name for target in targets).items())),
        "layers": sorted({target.layer for target in targets}),
    }


def _verdict(run: GuardSettings) -> dict[str, Any]:
    """The guard's word, as reports of runs keep it."""
    report = guard(run)
    return guard_json(report, report.change.settings if report.change else {})

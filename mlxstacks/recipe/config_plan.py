"""The plan of a recipe on a machine that lacks its model or its data: from the config alone.

`mlxstacks run RECIPE --dry-run` on a laptop says what the run would be on the machine that has the
model: sizes of model, adapters and stacks, the guard's verdict at the longest row that the settings
allow, and each file that is not here. Nothing is evaluated and nothing is written.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mlxstacks.errors import InputError
from mlxstacks.files.shipped_configs import shipped_config
from mlxstacks.recipe.inputs import Input, absent, inputs_of
from mlxstacks.routing.settings import NO_GAP_LOG

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlxstacks.guard.settings import GuardSettings
    from mlxstacks.layers.targets import Target
    from mlxstacks.recipe.resolve import Resolved
    from mlxstacks.studies.buffers.settings import BufferSettings
    from mlxstacks.studies.compare.settings import CompareSettings
    from mlxstacks.studies.sweep.settings import SweepSettings
    from mlxstacks.training.settings import TrainSettings
    from mlxstacks.training.stack_settings import StackRunSettings

# These plan by themselves what they can without their model.
PLAN_THEMSELVES = ("confound", "identity", "eval", "report")
# These change the store that they are given.
_IN_PLACE = ("stacks remove", "stacks disable", "stacks enable", "stacks gc", "stacks import")
# Without a config there is no plan of these.
TRAIN = ("train", "stack", "stack compare", "sweep", "sweep buffers")


@dataclass(frozen=True, slots=True)
class PlannedTraining:
    """A training run, or several that are alike, by its config.

    runs: how many are alike. trained_parameters: of one adapter or stack; frozen_bytes: of a stack
    in the store. batches: None: the data once. guard: None where it was not asked.
    """

    name: str
    runs: int
    projections: dict[str, int]
    layers: list[int]
    trained_parameters: int
    adapter_bytes: int
    optimizer_bytes: int
    frozen_bytes: int | None
    batches: int | None
    longest_row_tokens: int
    guard: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ConfigPlan:
    """What a run would be. changed: settings that are not at their default. source: where the
    numbers of `model` come from; None without a model.
    """

    command: str
    settings: dict[str, Any]
    changed: dict[str, Any]
    source: str | None
    model: dict[str, Any]
    training: list[PlannedTraining]
    inputs: list[Input]
    writes: list[str]
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        missing = [one.path for one in absent(self.inputs)]
        return {"status": "planned", **asdict(self), "not_here": missing}


def plan_from_config(name: str, resolved: "Resolved", from_recipe: bool) -> ConfigPlan | None:
    """The plan where an input is not here; None where the command can plan by itself.

    What a recipe names need not be here, but for the model of a training, which has to be known by
    its name. Without a recipe only such a model may be absent.
    Raises: InputError for layers, projections or a rank that the model does not have.
    """
    settings: Any = resolved.settings
    if name in PLAN_THEMSELVES:
        return None
    inputs = inputs_of(name, settings)
    missing = absent(inputs)
    named = getattr(settings, "model", None)
    models = _models(named, getattr(settings, "bits", None))
    model_is_missing = any(one.key == "model" for one in missing)
    known = all(shipped_config(model) is not None for model in models)
    if not missing or name == "guard":  # which reads nothing but a config, shipped or not
        return None
    if not (from_recipe or (model_is_missing and known)):
        return None
    if model_is_missing and not known:
        if name in TRAIN:
            return None  # whose error says what is wrong
        models = []
    source, facts = _facts(models[0]) if models else (None, {})
    training = list(_training(name, settings)) if models else []
    notes = [] if training == [] else [
        "Row lengths are unknown: the guard took the longest that the settings allow."
    ]  # fmt: skip
    shown = settings.model_dump(mode="json")
    changed = settings.model_dump(mode="json", exclude_defaults=True)
    writes = _writes(name, resolved)
    return ConfigPlan(name, shown, changed, source, facts, training, inputs, writes, notes)


def lacking(name: str, settings: Any) -> list[Input]:
    """What is not here of the inputs of a command that plans by itself."""
    return [] if name == "guard" else absent(inputs_of(name, settings))


def _writes(name: str, resolved: "Resolved") -> list[str]:
    settings: Any = resolved.settings
    found = [str(resolved.target)] if resolved.target is not None else []
    if name in _IN_PLACE or (name == "route train" and settings.install):
        found.append(str(settings.store_path))
    if getattr(settings, "routed", False) and settings.gap_log != NO_GAP_LOG:
        found.append(settings.gap_log)
    return found


def _models(named: str | None, bits: Any) -> list[str]:
    """A sweep's model may hold {bits}, a width each."""
    if named is None:
        return []
    widths = bits if isinstance(bits, tuple) and bits else (None,)
    return [named.replace("{bits}", str(width)) for width in widths]


def _facts(model: str) -> tuple[str, dict[str, Any]]:
    """Where the config is, and what it says; nothing of the weights is made."""
    from mlx.utils import tree_flatten

    from mlxstacks.guard.build import lazy_model, read_config

    config, source = read_config(model)
    built = lazy_model(config)
    plain = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    text = config.get("text_config") or config
    return source, {
        "model_type": config["model_type"],
        "parameters": sum(math.prod(a.shape) for _, a in _parameters(lazy_model(plain))),
        "weights_bytes": sum(array.nbytes for _, array in tree_flatten(built.parameters())),
        "layers": text.get("num_hidden_layers"),
        "experts": text.get("num_experts"),
        "experts_per_token": text.get("num_experts_per_tok"),
        "quantization": config.get("quantization"),
    }


def _parameters(model: "nn.Module") -> list[tuple[str, Any]]:
    from mlx.utils import tree_flatten

    return tree_flatten(model.parameters())


def _training(name: str, settings: Any) -> Iterator[PlannedTraining]:
    if name == "train":
        yield _train("one adapter", settings)
    elif name == "stack":
        yield _stack("a stack", settings)
    elif name == "stack compare":
        yield from _compare(settings)
    elif name == "sweep":
        yield from _sweep(settings)
    elif name == "sweep buffers":
        yield from _buffers(settings)


def _train(
    name: str, settings: "TrainSettings", runs: int = 1, ask: bool = True
) -> PlannedTraining:
    from mlxstacks.guard.build import lazy_model, read_config
    from mlxstacks.studies.guarded import asked_of
    from mlxstacks.studies.train.setup import choose_targets, trained_parameters

    model = str(settings.model)
    targets = choose_targets(lazy_model(read_config(model)[0]), settings)
    _check(targets, settings.rank)
    layers = sorted({target.layer for target in targets})
    asked = asked_of(
        settings, model, settings.max_seq_length,
        validates=True, layers=",".join(map(str, layers)),
    )  # fmt: skip
    number = trained_parameters(targets, settings.rank)
    return PlannedTraining(
        name, runs, _projections(targets), layers, number, 4 * number, 8 * number, None,
        settings.iters, settings.max_seq_length, _verdict(asked, settings.guard, ask),
    )  # fmt: skip


def _stack(name: str, settings: "StackRunSettings", runs: int = 1) -> PlannedTraining:
    from mlxstacks.guard.build import lazy_model, read_config
    from mlxstacks.layers.targets import stack_size
    from mlxstacks.studies.stack.setup import asked_of, choose_targets

    model = str(settings.model)
    targets = choose_targets(lazy_model(read_config(model)[0]), settings)
    layers = sorted({target.layer for target in targets})
    size = stack_size(targets, settings.stack)
    rounds = [domain.rounds or settings.rounds for domain in settings.domains] or [settings.rounds]
    stacks = sum(rounds)
    batches = [domain.iters or settings.iters for domain in settings.domains] or [settings.iters]
    known = [each for each in batches if each is not None]
    total = sum(a * b for a, b in zip(rounds, known, strict=True)) if known == batches else None
    asked = asked_of(
        settings, model, settings.max_seq_length,
        layers=",".join(map(str, layers)), domains=len(rounds), stacks=stacks,
    )  # fmt: skip
    return PlannedTraining(
        f"{name} of {stacks}", runs, _projections(targets), layers,
        size.parameters, size.trained_bytes, 2 * size.trained_bytes, size.frozen_bytes,
        total, settings.max_seq_length, _verdict(asked, settings.guard, True),
    )  # fmt: skip


def _compare(settings: "CompareSettings") -> Iterator[PlannedTraining]:
    for arm in settings.arms:
        run = settings.settings_of(arm, model=settings.model, data=settings.data)
        yield _stack(f"{arm.name}: a stack", run, len(settings.seeds))


def _sweep(settings: "SweepSettings") -> Iterator[PlannedTraining]:
    """A line for each rank of a point. The guard is asked of the lowest and the highest: its count
    and its bytes grow with the rank, so that the others lie between.
    """
    from pathlib import Path

    from mlxstacks.studies.sweep.cells import cells_of, train_settings

    asked = {min(settings.ranks), max(settings.ranks)}
    for cell in cells_of(settings):
        if cell.seed != settings.seeds[0]:
            continue
        model = _models(settings.model, (cell.bits,) if cell.bits else None)[0]
        train = train_settings(settings, cell, Path(model), Path(cell.name), {})
        limits = {
            "model": model,
            "guard": settings.guard,
            "resource_limit": settings.resource_limit,
            "working_set_bytes": settings.working_set_bytes,
        }
        width = f", {cell.bits} bits" if cell.bits else ""
        label = f"rank {cell.rank}, layers {cell.layers}, {cell.projections}{width}"
        runs = len(settings.seeds)
        yield _train(label, train.model_copy(update=limits), runs, cell.rank in asked)


def _buffers(settings: "BufferSettings") -> Iterator[PlannedTraining]:
    """A line for each rank. The guard is asked of mlx-lm's loop, where it is among the trainers:
    it holds by far the most buffers.
    """
    from mlxstacks.guard.build import lazy_model, read_config
    from mlxstacks.guard.settings import GuardSettings
    from mlxstacks.layers.settings import TargetSettings, parse_layers
    from mlxstacks.layers.targets import find_targets
    from mlxstacks.studies.buffers.arms import arms_of
    from mlxstacks.studies.train.setup import trained_parameters

    model = str(settings.model)
    wanted = TargetSettings(
        layers=parse_layers(settings.layers), projections=settings.projections or None
    )
    try:
        targets = find_targets(lazy_model(read_config(model)[0]), wanted)
    except ValueError as error:
        raise InputError(str(error)) from error
    arms = [arm for together in arms_of(settings) for arm in together]
    longest = max(settings.fixed_tokens, settings.longest_tokens)
    by_mlx_lm = "mlx-lm" in settings.trainers
    for rank in settings.ranks:
        _check(targets, rank)
        number = trained_parameters(targets, rank)
        asked = GuardSettings(
            model=model, max_seq_length=longest, rank=rank, layers=settings.layers,
            keys=settings.projections,
            recurrence="loop" if by_mlx_lm else "chunked", loss="whole", optimizer="adam",
            adapter_copies=0,
            checkpointing="none" if "off" in settings.checkpointing
            else "mlx" if by_mlx_lm else "layers",
        )  # fmt: skip
        ends = rank in (min(settings.ranks), max(settings.ranks))
        yield PlannedTraining(
            f"rank {rank}", sum(arm.rank == rank for arm in arms), _projections(targets),
            sorted({target.layer for target in targets}), number, 4 * number, 8 * number, None,
            settings.steps, longest, _verdict(asked, "mlxstacks", ends),
        )  # fmt: skip


def _check(targets: "Sequence[Target]", rank: int) -> None:
    from mlxstacks.layers.targets import check_targets

    try:
        check_targets(targets, rank)
    except ValueError as error:
        raise InputError(str(error)) from error


def _projections(targets: "Sequence[Target]") -> dict[str, int]:
    return dict(sorted(Counter(target.name for target in targets).items()))


def _verdict(asked: "GuardSettings", choice: str, ask: bool) -> dict[str, Any] | None:
    """The guard's word, as reports of runs keep it."""
    if choice == "off" or not ask:
        return None
    from mlxstacks.guard.run import guard
    from mlxstacks.studies.train.report import guard_json

    report = guard(asked)
    return guard_json(report, report.change.settings if report.change else {})

"""The plan of a recipe on a machine that lacks its model or its data: from the config alone.

`mlxstacks run RECIPE --dry-run` on a laptop says what the run would be on the machine that has the
model: sizes of model, adapters and stacks, the guard's verdict at the longest row that the settings
allow, and each file that is not here. Nothing is evaluated and nothing is written.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Any

from mlxstacks.errors import InputError
from mlxstacks.files.hub import shipped_config
from mlxstacks.memory import bytes_in_words
from mlxstacks.recipe.inputs import Input, absent, inputs_of
from mlxstacks.routing.settings import NO_GAP_LOG
from mlxstacks.study.document import Block, Column, Table, Text
from mlxstacks.study.render.terminal import byte_parts, cell_text, setting
from mlxstacks.study.result import Result

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


def plan_from_config(name: str, resolved: "Resolved", from_recipe: bool) -> Result | None:
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
    models = _models(getattr(settings, "model", None), getattr(settings, "bits", None))
    model_is_missing = any(item.key == "model" for item in missing)
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
    notes = ("Row lengths are unknown: the guard took the longest that the settings allow.",)
    changed = settings.model_dump(mode="json", exclude_defaults=True)
    writes = _writes(name, resolved)
    data = {
        "changed": changed, "source": source, "model": facts, "training": training,
        "inputs": [asdict(item) for item in inputs], "writes": writes,
    }  # fmt: skip
    blocks: list[Block] = [_settings_table(changed)]
    if facts:
        blocks.append(Text(title=f"Planned from {source}", paragraphs=(_model_words(facts),)))
    blocks += map(_training_table, count(1), training)
    blocks.append(Text(title="Reads", paragraphs=tuple(f"{i.key}: {i.words}" for i in inputs)))
    plan = _planned(name, settings, writes, data, blocks)
    plan = plan.model_copy(update={"notes": notes if training else ()})
    return with_missing(plan, missing)


def plan_of_settings(name: str, resolved: "Resolved") -> Result:
    """The plan of a command whose function has none of its own: its settings, what it writes."""
    settings, writes = resolved.settings, [str(resolved.target)] if resolved.target else []
    table = _settings_table(settings.model_dump(mode="json"))
    return _planned(name, settings, writes, {"writes": writes}, [table])


def _planned(
    name: str, settings: Any, writes: list[str], data: dict[str, Any], blocks: Sequence[Block]
) -> Result:
    words = f"{name} would write {', '.join(writes)}." if writes else f"{name} writes nothing."
    return Result(
        kind=name, title=f"Plan of {name}", status="planned", outcome="planned",
        settings=settings.model_dump(mode="json"), data=data,
        blocks=(*blocks, Text(title="Writes", paragraphs=(words,))),
    )  # fmt: skip


def _settings_table(values: Mapping[str, Any]) -> Table:
    rows = tuple((key, cell_text(setting(value))) for key, value in values.items())
    columns = (Column(name="setting"), Column(name="value"))
    return Table(id="settings", title="Settings", columns=columns, rows=rows)


def with_missing(plan: Result, missing: Sequence[Input]) -> Result:
    """A plan that ends with what the run would need that is not here."""
    keys = ", ".join(dict.fromkeys(item.key for item in missing))
    verdict = f"{plan.verdict} The run itself needs what is not here: {keys}.".strip()
    data = plan.data | {"not_here": [item.path for item in missing]}
    return plan.model_copy(update={"verdict": verdict, "data": data})


def _model_words(facts: Mapping[str, Any]) -> str:
    words = f"{facts['model_type']}: {facts['parameters']:,} parameters, "
    words += f"{bytes_in_words(facts['weights_bytes'])} of weights, {facts['layers']} layers"
    if facts["experts"]:
        words += f", {facts['experts_per_token']} of {facts['experts']} experts a token"
    return words


def _training_table(place: int, training: Mapping[str, Any]) -> Table:
    kinds = ", ".join(
        f"{name} x{times}" if times > 1 else name for name, times in training["projections"].items()
    )
    layers = training["layers"]
    many = len(layers) > 8
    where = f"{len(layers)} layers" if many else f"layers {', '.join(map(str, layers))}"
    size = f"{training['trained_parameters']:,} parameters; in training "
    size += f"{bytes_in_words(training['adapter_bytes'])}, its optimizer "
    size += bytes_in_words(training["optimizer_bytes"])
    if training["frozen_bytes"] is not None:
        size += f"; frozen {bytes_in_words(training['frozen_bytes'])}"
    number = training["batches"]
    batches = "the data once" if number is None else f"{number:,} batches"
    runs = f"{training['runs']} runs, each " if training["runs"] > 1 else ""
    guard = training["guard"]
    rows = {
        "projections": f"{where}: {kinds}",
        "size": size,
        "batches": f"{runs}{batches}, rows of at most {training['longest_row_tokens']:,} tokens",
    }
    if guard is not None:
        rows["memory"] = byte_parts(guard["parts_bytes"])
    rows["guard"] = "not asked" if guard is None else guard["verdict"]
    return Table(
        id=f"training-{place}", title=f"Trains {training['name']}",
        columns=(Column(name="what"), Column(name="value")), rows=tuple(rows.items()),
    )  # fmt: skip


def lacking(name: str, settings: Any) -> list[Input]:
    """What is not here of the inputs of a command that plans by itself."""
    return [] if name == "guard" else absent(inputs_of(name, settings))


def _writes(name: str, resolved: "Resolved") -> list[str]:
    settings: Any = resolved.settings
    paths = [str(resolved.target)] if resolved.target is not None else []
    if name in _IN_PLACE or (name == "route train" and settings.install):
        paths.append(str(settings.store_path))
    if getattr(settings, "routed", False) and settings.gap_log != NO_GAP_LOG:
        paths.append(settings.gap_log)
    return paths


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


def _training(name: str, settings: Any) -> Iterator[dict[str, Any]]:
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


def _train(name: str, settings: "TrainSettings", runs: int = 1, ask: bool = True) -> dict[str, Any]:
    from mlxstacks.guard.build import lazy_model, read_config
    from mlxstacks.studies.guarded import asked_of
    from mlxstacks.studies.train.setup import choose_targets

    model = str(settings.model)
    targets = choose_targets(lazy_model(read_config(model)[0]), settings)
    _check(targets, settings.rank)
    layers = sorted({target.layer for target in targets})
    run = asked_of(
        settings, model, settings.max_seq_length,
        validates=True, layers=",".join(map(str, layers)),
    )  # fmt: skip
    return _adapter(
        name, targets, settings.rank, runs=runs, batches=settings.iters,
        longest_row_tokens=settings.max_seq_length, guard=_verdict(run, settings.guard, ask),
    )  # fmt: skip


def _adapter(name: str, targets: "Sequence[Target]", rank: int, **figures: Any) -> dict[str, Any]:
    """runs: how many are alike. batches: None: the data once. guard: None where it was not asked.
    trained_parameters: of one adapter or stack; frozen_bytes: of a stack in the store.
    """
    from mlxstacks.studies.train.setup import trained_parameters

    number = trained_parameters(targets, rank)
    return {
        "name": name, **_where(targets), "trained_parameters": number,
        # float32, and two numbers of Adam for each
        "adapter_bytes": 4 * number, "optimizer_bytes": 8 * number, "frozen_bytes": None, **figures,
    }  # fmt: skip


def _stack(name: str, settings: "StackRunSettings", runs: int = 1) -> dict[str, Any]:
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
    run = asked_of(
        settings, model, settings.max_seq_length,
        layers=",".join(map(str, layers)), domains=len(rounds), stacks=stacks,
    )  # fmt: skip
    return {
        "name": f"{name} of {stacks}", "runs": runs, **_where(targets),
        "trained_parameters": size.parameters, "adapter_bytes": size.trained_bytes,
        "optimizer_bytes": 2 * size.trained_bytes, "frozen_bytes": size.frozen_bytes,
        "batches": total, "longest_row_tokens": settings.max_seq_length,
        "guard": _verdict(run, settings.guard, True),
    }  # fmt: skip


def _compare(settings: "CompareSettings") -> Iterator[dict[str, Any]]:
    for arm in settings.arms:
        run = settings.settings_of(arm, model=settings.model, data=settings.data)
        yield _stack(f"{arm.name}: a stack", run, len(settings.seeds))


def _sweep(settings: "SweepSettings") -> Iterator[dict[str, Any]]:
    """A line for each rank of a point. The guard is asked of the lowest and the highest: its count
    and its bytes grow with the rank, so that the others lie between.
    """
    from pathlib import Path

    from mlxstacks.studies.sweep.cells import cells_of, train_settings

    ends = {min(settings.ranks), max(settings.ranks)}
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
        yield _train(label, train.model_copy(update=limits), runs, cell.rank in ends)


def _buffers(settings: "BufferSettings") -> Iterator[dict[str, Any]]:
    """A line for each rank. The guard is asked of mlx-lm's loop, where it is among the trainers:
    it holds by far the most buffers.
    """
    from mlxstacks.guard.build import lazy_model, read_config
    from mlxstacks.guard.settings import GuardSettings
    from mlxstacks.layers.settings import TargetSettings, parse_layers
    from mlxstacks.layers.targets import find_targets
    from mlxstacks.studies.buffers.arms import arms_of

    model = str(settings.model)
    target_settings = TargetSettings(
        layers=parse_layers(settings.layers), projections=settings.projections or None
    )
    try:
        targets = find_targets(lazy_model(read_config(model)[0]), target_settings)
    except ValueError as error:
        raise InputError(str(error)) from error
    arms = [arm for together in arms_of(settings) for arm in together]
    longest = max(settings.fixed_tokens, settings.longest_tokens)
    by_mlx_lm = "mlx-lm" in settings.trainers
    for rank in settings.ranks:
        _check(targets, rank)
        run = GuardSettings(
            model=model, max_seq_length=longest, rank=rank, layers=settings.layers,
            keys=settings.projections,
            recurrence="loop" if by_mlx_lm else "chunked", loss="whole", optimizer="adam",
            adapter_copies=0,
            checkpointing="none" if "off" in settings.checkpointing
            else "mlx" if by_mlx_lm else "layers",
        )  # fmt: skip
        ends = rank in (min(settings.ranks), max(settings.ranks))
        yield _adapter(
            f"rank {rank}", targets, rank, runs=sum(arm.rank == rank for arm in arms),
            batches=settings.steps, longest_row_tokens=longest,
            guard=_verdict(run, "mlxstacks", ends),
        )  # fmt: skip


def _check(targets: "Sequence[Target]", rank: int) -> None:
    from mlxstacks.layers.targets import check_targets

    try:
        check_targets(targets, rank)
    except ValueError as error:
        raise InputError(str(error)) from error


def _where(targets: "Sequence[Target]") -> dict[str, Any]:
    return {
        "projections": dict(sorted(Counter(target.name for target in targets).items())),
        "layers": sorted({target.layer for target in targets}),
    }


def _verdict(run: "GuardSettings", choice: str, ask: bool) -> dict[str, Any] | None:
    """The guard's word, as reports of runs keep it."""
    if choice == "off" or not ask:
        return None
    from mlxstacks.guard.run import guard
    from mlxstacks.studies.train.report import guard_json

    report = guard(run)
    return guard_json(report, report.change.settings if report.change else {})

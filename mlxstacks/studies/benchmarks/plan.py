"""What `mlxstacks eval` decides before the first answer: arms, items, tests, what they can detect.

One plan for each task, all in one document, since their tests are one family.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import has_shape_of, in_hub_cache, may_be_hub_id, resolve_model
from mlxstacks.files.store import Store, find_base
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.benchmarks.analysis import claims_of
from mlxstacks.studies.benchmarks.harness import find_tasks
from mlxstacks.studies.benchmarks.items import AskedTask
from mlxstacks.studies.benchmarks.settings import (
    NEED_LABELS,
    NOT_OF_THE_PLAN,
    ArmSettings,
    EvalSettings,
)
from mlxstacks.studies.benchmarks.tasks import PUBLISHED_SHAPE
from mlxstacks.study.integrity import file_sha256
from mlxstacks.study.plan import Plan, ids_sha256
from mlxstacks.study.power import (
    POWER,
    items_for_mcnemar,
    least_effect_of_mcnemar,
)

HYPOTHESIS = "A mode of the model answers more or fewer items of a benchmark than its control."
TEST = "McNemar's exact test on the same items, two-sided; Holm over all tests of the run"
RULES = (
    "A difference counts where its p, adjusted by Holm's rule over all tasks and all pairs of "
    "arms, is below alpha; for all others no difference is shown, which is not the same as equal. "
    "Ties and replies without an answer are wrong. Means over tasks are judged by their "
    "intervals, widened so that those of all pairs of arms hold together."
)
# The difference for which each plan says how many items it takes.
_SOUGHT = 0.05
# What makes tokens, prompts and the end of an answer.
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip


def plan_document(
    settings: EvalSettings,
    asked: Sequence[AskedTask],
    hashes: Mapping[str, str],
) -> dict[str, Any]:
    """Everything that is fixed. hashes: of model, adapter and store (`hashes_of`).

    Raises: as `harness_plan`.
    """
    return {
        "kind": "eval",
        "hypothesis": HYPOTHESIS,
        "rules": RULES,
        "test": TEST,
        "tests": sum(len(claims_of(task.arms)) for task in asked),
        "settings": settings.model_dump(mode="json", exclude=NOT_OF_THE_PLAN),
        "hashes": dict(hashes),
        "tasks": {task.name: task_plan(settings, task, hashes).as_json() for task in asked},
        "harness": harness_plan(settings),
    }


def harness_plan(settings: EvalSettings) -> dict[str, Any]:
    """What of the lm-evaluation-harness belongs into the plan.

    Task -> its hashes; of a group each of its tasks. lm_eval's own tasks read their data for it.
    Raises: InputError for a task that there is none of, or whose data is not there.
    """
    if not settings.harness_tasks:
        return {}
    return {
        task.name: {**task.fingerprint(settings.data), "limit": settings.items_per_task}
        for task in find_tasks(settings.harness_tasks, settings.task_files)
    }


def task_plan(settings: EvalSettings, asked: AskedTask, hashes: Mapping[str, str]) -> Plan:
    """The plan of one task."""
    task = asked.task
    how = f", by the {settings.normalisation} likelihood" if task.kind == "likelihood" else ""
    return Plan(
        hypothesis=HYPOTHESIS,
        arms=asked.arms,
        metric=f"{task.metric}: share of items answered rightly{how}",
        n=len(asked.items),
        items_sha256=ids_sha256(item.item_id for item in asked.items),
        test=TEST,
        thresholds={"alpha": settings.alpha, "least_gain": 0.0},
        seeds=(settings.seed,),
        data=data_of(asked, hashes),
        expected_rate=settings.expected_rate,
        expected_discordant=settings.expected_discordant,
        claims=claims_of(asked.arms),
        details={
            "kind": task.kind, "max_tokens": task.max_tokens, "sample": settings.sample,
            "available": asked.available, "normalisation": settings.normalisation,
        },
    )  # fmt: skip


def power_lines(settings: EvalSettings, counts: Mapping[str, int], tests: int) -> tuple[str, ...]:
    """What each number of items can show, with alpha shared among all tests of the run."""
    lines: list[str] = []
    alpha, discordant = settings.alpha / max(1, tests), settings.expected_discordant
    needed = ""
    if discordant >= _SOUGHT:
        count = items_for_mcnemar(discordant, _SOUGHT, alpha=alpha)
        needed = f"; {count:,} items find {100 * _SOUGHT:.0f} points"
    for n in sorted(set(counts.values())):
        names = ", ".join(name for name, count in counts.items() if count == n)
        least = least_effect_of_mcnemar(discordant, n, POWER, alpha)
        shown = "none is large enough" if least is None else f"{100 * least:.1f} points"
        lines.append(
            f"{n:,} items ({names}): smallest effect at 80% power, alpha {settings.alpha:g} shared "
            f"by the run's {tests} test(s): {shown}, if {discordant:.0%} of pairs differ{needed}"
        )
    return tuple(lines)


def data_of(asked: AskedTask, hashes: Mapping[str, str]) -> dict[str, str]:
    """Name -> hash of what a task's results depend on; of items all that a model or a grader sees
    of them, in their order.
    """
    items = [
        [i.item_id, i.prompt, i.gold, list(i.candidates), list(i.letters), i.stratum, i.domain,
         dict(i.extra)]
        for i in asked.items
    ]  # fmt: skip
    return {"items": json_sha256(items), **hashes}


def check_places(settings: ArmSettings) -> list[str]:
    """Whether model, adapter, store and router are here, before hours of anything else.

    Returns a line for a model that may be on the hub; it is downloaded when all else is in order.
    Raises: InputError naming each of the others that is not here.
    """
    named = {
        "adapter_path": settings.adapter_path, "store_path": settings.store_path,
        "router_path": settings.router_path,
    }  # fmt: skip
    missing = [
        f"{key} {path}: no such file or directory"
        for key, path in named.items()
        if path is not None and not user_path(path).exists()
    ]
    elsewhere = []
    if settings.model is not None and not user_path(settings.model).exists():
        if not may_be_hub_id(settings.model):
            missing.insert(0, f"model {settings.model}: no such directory, and no hub id")
        elif not in_hub_cache(settings.model):
            elsewhere = [f"model {settings.model}: no such directory, and not in the hub cache"]
    if missing:
        raise InputError("\n".join([*elsewhere, *missing]))
    return elsewhere


def hashes_of(
    settings: ArmSettings, arms: Sequence[str], recorded: str | None = None
) -> dict[str, str]:
    """Of all that the arms are made from: model, tokenizer, adapter, store, router.

    recorded: the model's fingerprint in the plan of a run that goes on.

    Raises: InputError or CheckpointError where one is not there.
    """
    hashes: dict[str, str] = {}
    checkpoint = None
    if settings.model is not None:
        checkpoint = open_checkpoint(resolve_model(settings.model))
    elif settings.store_path is not None:
        checkpoint = find_base(Store.open(settings.store_path), None)
    if checkpoint is not None:
        hashes["model"] = fingerprint(checkpoint, recorded)
        hashes["tokenizer"] = _files_sha256(checkpoint.directory, _TOKENIZER)
    if settings.adapter_path is not None and {"adapter", "fused"} & {*arms}:
        adapter = user_path(settings.adapter_path)
        names = ("adapter_config.json", *sorted(p.name for p in adapter.glob("*.safetensors")))
        hashes["adapter"] = _files_sha256(adapter, names)
    if settings.store_path is not None and {"ungated", "routed", *NEED_LABELS} & {*arms}:
        hashes["store"] = _files_sha256(user_path(settings.store_path), ("manifest.json",))
    if settings.router_path is not None and "routed" in arms:
        router = user_path(settings.router_path)
        names = tuple(sorted(p.name for p in router.iterdir())) if router.is_dir() else ()
        hashes["router"] = _files_sha256(router, names) if names else file_sha256(router)
    return hashes


def is_published_model(settings: ArmSettings) -> bool:
    """Whether the model has the shape of the paper's. Raises: as `hashes_of`."""
    name = settings.model
    if name is None and settings.store_path is not None:
        name = Store.open(settings.store_path).manifest.base_model
    return name is not None and has_shape_of(
        open_checkpoint(resolve_model(name)).config, PUBLISHED_SHAPE
    )


def _files_sha256(directory: Path, names: Sequence[str]) -> str:
    paths = [directory / name for name in names if (directory / name).is_file()]
    if not paths:
        raise InputError(f"{directory}: has none of {', '.join(names)}")
    return json_sha256([[path.name, file_sha256(path)] for path in paths])

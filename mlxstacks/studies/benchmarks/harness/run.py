"""lm-evaluation-harness (extra `eval`) over arms: its tasks, its prompts and metrics, our modes.

    found = run_harness(open_arms(("base", "routed"), settings), ["arc_easy_local"], data="data/")
    found["arms"]["routed"]["tasks"]["arc_easy_local"]["samples"]

The model class (model.py) is the harness's `TemplateLM`; it is imported when first asked for, since
importing lm_eval takes seconds. Texts go in as the harness writes them: contexts and continuations
are cut apart by its own rule, which for most texts is that of `ModelArm.score`.
"""

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.studies.benchmarks.arm_model import ModelArm
from mlxstacks.studies.benchmarks.harness.tasks import HarnessTask, find_tasks, need_lm_eval


def run_harness(
    arms: Iterable[ModelArm],
    task_names: Sequence[str],
    *,
    include_path: str | Path | None = None,
    data: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    num_fewshot: int | None = None,
    chat: bool = False,
    domains: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The same items of each task for every arm; JSON.

    task_names: a task file of include_path, else one of ours, else a task of lm_eval's own; a group
    or tag of those stands for each of its tasks. include_path: directory of more task files. data:
    directory of the data files of task files; lm_eval's own tasks have theirs from the hub. limit:
    items of a task, drawn by the seed from all of them, never the first ones. num_fewshot: in the
    place of a task's own. chat: prompts go through the model's chat template. domains: task, or
    the group it is of -> its domain, for the arms oracle and random.

    tasks: name -> file, output_type, items, asked (places of the rows). arms: name -> tasks (name
    -> metrics, samples, ties, seconds), notes, details. A sample has doc_id, filter, metrics (name
    -> value of this item), and scores or reply; samples of two arms pair by doc_id and filter.
    ties: items whose two best candidates score the same, which lm_eval gives to the first.

    Raises: InputError: lm_eval is not installed, a task may not be run here or does not fit.
    """
    need_lm_eval()
    named = find_tasks(task_names, include_path)
    labels = _labels(named, domains or {})
    tasks = {one.name: one.build(data) for one in named}
    asked = {name: _drawn(task, limit, f"{seed}/{name}") for name, task in tasks.items()}
    found: dict[str, Any] = {
        "lm_eval": version("lm_eval"), "seed": seed, "limit": limit, "chat": chat,
        "tasks": {one.name: _about(one, tasks[one.name], asked[one.name]) for one in named},
        "arms": {},
    }  # fmt: skip
    for arm in arms:
        model = harness_model(arm, labels)
        results = {
            name: _evaluated(model, name, task, asked[name], seed, num_fewshot, chat)
            for name, task in tasks.items()
        }
        found["arms"][arm.name] = {
            "tasks": results, "notes": list(arm.notes), "details": dict(arm.details)
        }  # fmt: skip
    return found


def _labels(named: Sequence[HarnessTask], domains: Mapping[str, str]) -> dict[str, str]:
    """Task -> its domain: its own, else that of the group it was asked for by."""
    labels = {task.name: domains.get(task.name, domains.get(task.asked_as)) for task in named}
    return {name: domain for name, domain in labels.items() if domain is not None}


def _drawn(task: Any, limit: int | None, key: str) -> list[int]:
    """Places of the items that are asked, rising."""
    count = len(task.eval_docs)
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}: ask at least one item")
    if limit is None or limit >= count:
        return list(range(count))
    return sorted(random.Random(key).sample(range(count), limit))


def _about(named: HarnessTask, task: Any, asked: Sequence[int]) -> dict[str, Any]:
    return {
        "file": named.file,
        "output_type": task.OUTPUT_TYPE,
        "items": len(task.eval_docs),
        "asked": list(asked),
        "version": (named.config.get("metadata") or {}).get("version"),
    }


def _evaluated(
    model: Any, name: str, task: Any, asked: list[int], seed: int, fewshot: int | None, chat: bool
) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate

    began = time.monotonic()
    own = task.get_config("num_fewshot")
    task.set_config(key="num_fewshot", value=own or 0 if fewshot is None else fewshot)
    task.set_fewshot_seed(seed=seed)  # anew for each arm: all see the same examples
    model.wants_greedy = (
        task.OUTPUT_TYPE == "loglikelihood"
        or "exact_match" in task.aggregation()
        or task.get_config("process_results") is not None  # Python, that may look at it
    )
    model.scores_answers = task.OUTPUT_TYPE != "generate_until"
    evaluation = evaluate(
        model, {"tasks": {name: task}}, samples={name: asked}, bootstrap_iters=0,
        apply_chat_template=chat,
    )  # fmt: skip
    task.set_config(key="num_fewshot", value=own)
    samples = [_sample(one, task.OUTPUT_TYPE) for one in evaluation["samples"][name]]
    metrics = {
        key: value
        for key, value in evaluation["results"][name].items()
        if isinstance(value, int | float) and "stderr" not in key
    }
    ties = sum(_is_tie(one.get("scores", ())) for one in samples)
    return {
        "metrics": metrics, "samples": samples, "ties": ties, "seconds": time.monotonic() - began
    }  # fmt: skip


def _sample(logged: Mapping[str, Any], output_type: str) -> dict[str, Any]:
    """What paired tests and a reader need of a logged sample."""
    sample = {
        "doc_id": int(logged["doc_id"]),
        "filter": logged["filter"],
        "metrics": {key: _plain(logged[key]) for key in logged["metrics"]},
        "doc_hash": logged["doc_hash"],
    }
    replies = [response[0] for response in logged["resps"]]
    if output_type == "generate_until":
        return {**sample, "reply": replies[0], "answer": logged["filtered_resps"][0]}
    if output_type == "loglikelihood_rolling":
        return {**sample, "scores": [float(value) for value in replies]}
    return {**sample, "scores": [float(value) for value, _ in replies]}


def _plain(value: Any) -> Any:
    """A metric of one item as JSON."""
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value


def _is_tie(scores: Sequence[float]) -> bool:
    return len(scores) > 1 and scores.count(max(scores)) > 1


# --- the model class ------------------------------------------------------------------------------


def harness_model(arm: ModelArm, domains: Mapping[str, str] | None = None) -> Any:
    """An arm as a model of the harness. domains: task -> domain, for oracle and random."""
    need_lm_eval()
    from mlxstacks.studies.benchmarks.harness.model import ArmModel

    return ArmModel(arm, domains or {})

"""A result of every kind, made by the classes that commands report with, written as they write."""

import copy
import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.files.manifest import DomainRecord, Manifest
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.fuse.fidelity import Sums, fidelity
from mlxstacks.fuse.report import FuseReport, ModuleReport, StageReport
from mlxstacks.fuse.result import result_of as fuse_result
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.studies.compare.analysis import CellValues, Rule, analyse
from mlxstacks.studies.compare.budget import ArmBudget
from mlxstacks.studies.compare.report import blocks as compare_blocks
from mlxstacks.studies.compare.report import outcome as compare_outcome
from mlxstacks.studies.compare.run import ABOUT as COMPARE
from mlxstacks.studies.compare.settings import CompareSettings
from mlxstacks.studies.confound.plan import arms_of
from mlxstacks.studies.confound.report import ConfoundReport
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.identity.analysis import verdict as identity_verdict
from mlxstacks.studies.identity.report import blocks as identity_blocks
from mlxstacks.studies.identity.report import outcome_of as identity_outcome
from mlxstacks.studies.identity.run import ABOUT as IDENTITY
from mlxstacks.studies.profile.analysis import Choices
from mlxstacks.studies.profile.analysis import Rule as ProfileRule
from mlxstacks.studies.profile.analysis import analyse as analyse_profile
from mlxstacks.studies.profile.report import blocks as profile_blocks
from mlxstacks.studies.profile.report import outcome, verdict_of
from mlxstacks.studies.profile.run import ABOUT
from mlxstacks.studies.route.discover import DiscoverReport
from mlxstacks.studies.route.evaluate_matrix import ALL, Estimate
from mlxstacks.studies.route.evaluate_report import Evaluation, RouteEvaluateReport
from mlxstacks.studies.route.train import RouteTrainReport
from mlxstacks.studies.stack.analysis import AnalysisReport
from mlxstacks.studies.sweep.cells import Cell, CellResult
from mlxstacks.studies.sweep.report import report_of, shown_settings
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.train.report import TrainReport, versions
from mlxstacks.studies.train.report import result_of as train_result
from mlxstacks.study.document import RESULT, Standing
from mlxstacks.study.plan import Standing as PlanStanding
from mlxstacks.study.result import Result
from mlxstacks.training.settings import TrainSettings
from tests.studies import confound_cases
from tests.studies.identity import cases as identity_cases

SETTINGS = FuseSettings(model="m", adapter_path=("a",))
RATE = {"count": 3, "n": 4, "rate": 0.75, "low": 0.3, "high": 0.95}
ORACLE = {
    "label": "letters", "n": 4, "own": RATE, "label_in_set": RATE, "nothing": RATE,
    "gain": {"mean": 0.5, "low": 0.2, "high": 0.8}, "own_gain": None,
}  # fmt: skip


def fuse_report(zero: bool = False) -> dict[str, Any]:
    kept = 0.0 if zero else 2.0
    sums = Sums(100, kept, kept / 2, 1.0, 2.0, 50.0, 0.5, 100, 20, 5, 2, 1.0, kept)
    figures = fidelity(sums)
    modules = [
        ModuleReport(f"model.layers.{layer}.mlp.down_proj", 1, "refit", 3, 3, "verified", 10, 10,
                     figures, {"promote-6": figures})
        for layer in range(3)
    ]  # fmt: skip
    report = FuseReport(
        "fused", "m", "out", SETTINGS.model_dump(mode="json"), "1" * 64, zero, None,
        [StageReport("a", modules, figures)],
        [{"name": "model.safetensors", "how": "rewritten", "written_bytes": 10}], 0, 10, 0.5,
        "correlation 0.5.", total=figures,
    )  # fmt: skip
    return fuse_result(report).sealed().as_json()


def train_report() -> dict[str, Any]:
    report = TrainReport(
        "trained", "out", TrainSettings(model="m").model_dump(mode="json"),
        {
            "trained_parameters": 5, "layers": [1, 2], "padding_percent": 3.0, "modules": 2,
            "projections": {"q": 2}, "adapter_bytes": 20, "optimizer_bytes": 40, "train_rows": 7,
            "validation_rows": 2, "widths_tokens": [8], "iters": 20, "steps": 20, "guard": None,
        }, ["a note"], None,
        "best", 20, 20,
        [{"step": 0, "validation_loss": 2.0}, {"step": 20, "validation_loss": 1.5}],
        [{"step": 10, "loss": 1.8}], {"seconds": 1.0, "peak_bytes": 9},
    )  # fmt: skip
    return train_result(report).sealed().as_json()


def manifest() -> dict[str, Any]:
    rows = {"a": {"a": 1.0}, "b": {"a": 1.5, "b": 0.5}}
    domains = tuple(DomainRecord(name, True, (), (2.0, 1.0), 1.0) for name in ("a", "b"))
    return Manifest("base", "0" * 64, domains, {"ungated": rows}).document()


def analysis_report() -> dict[str, Any]:
    points = [{"round": 1, "step": step, "validation_loss": 2.0 - step} for step in (0, 1)]
    report = AnalysisReport(
        "done", "store", "out", {"seed": 0}, [{"name": "a", "curve": points}],
        {"ungated": {"a": {"a": 1.0}}}, {"weights": {"mean": 0.2, "mean_chance": 0.1, "pairs": 0}},
    )  # fmt: skip
    return report.as_json()


def compare_result() -> dict[str, Any]:
    rule = Rule("task_loss", 0.01, 0.95, 0.1, False)
    cells = [
        CellValues(arm, seed, {"task_loss": loss + 0.001 * seed, "steps": 4.0}, {})
        for arm, loss in (("control", 1.0), ("boosted", 0.9))
        for seed in (0, 1, 2)
    ]
    settings = CompareSettings.model_validate(
        {"arms": [{"name": "control"}, {"name": "boosted"}], "seeds": [0, 1, 2],
         "run": {"domains": [{"name": "a"}, {"name": "b"}]}}
    )  # fmt: skip
    plan = {"primary": "task_loss", "margin": 0.01}
    found = analyse(rule, ["control", "boosted"], [0, 1, 2], cells)
    budgets = {arm: ArmBudget(100, 10, 40) for arm in ("control", "boosted")}
    return Result(
        **COMPARE, status="done", outcome=compare_outcome(found), verdict="boosted wins.",
        standing=Standing(status="confirmatory"), settings={"seeds": [0, 1, 2]}, plan=plan,
        plan_sha256=json_sha256(plan), blocks=compare_blocks(settings, budgets, found, []),
    ).sealed().as_json()  # fmt: skip


def sweep_report() -> dict[str, Any]:
    settings = SweepSettings(model="m", data="d", ranks=(2, 8), seeds=(0, 1), policies=("refit",))
    results = []
    for rank in (2, 8):
        for seed in (0, 1):
            losses = [{"step": 0, "validation_loss": 2.0}, {"step": 5, "validation_loss": 1.0}]
            figures = {"peak_bytes": 10, "validation": losses, "last_validation_loss": 1.0 + seed}
            kept = {"refit": {"survival": 0.1 * rank, "correlation": 0.5, "extra_bytes": 0}}
            cell = Cell(rank, seed, "all", "usual", None)
            results.append(CellResult(cell, "trained", {}, {"buffers": 7}, None, figures, kept))
    report = report_of(settings, "out", results, [], 1.0)
    return replace(report, settings=shown_settings(settings)).as_json()


def buffers_report() -> dict[str, Any]:
    mean = {"mean": 0.0001, "low": -0.001, "high": 0.001, "n": 3, "confidence": 0.9}
    compared = {"condition": ["mlx-lm", "off", "variable"], "rank": 8, "equivalence": mean,
                "difference": mean, "largest": 0.002}  # fmt: skip
    plan = {"hypothesis": "Rank does not move it.", "margin": 0.01}
    return {
        "kind": "sweep buffers", "status": "done", "settings": {"margin": 0.01}, "plan": plan,
        "plan_sha256": json_sha256(plan), "verdict": "Rank does not move the count here.",
        "analysis": {"outcome": "equal", "comparisons": [compared], "controls": {"mlx-lm": 0.9}},
    }  # fmt: skip


def route_reports() -> dict[str, dict[str, Any]]:
    discover = DiscoverReport(
        "done", "store", "out", {"seed": 0}, "0" * 64, ["letters"], {}, None, 0.0, "chat",
        {"discovered_share": 0.5}, [ORACLE], verdict="Found.",
    )  # fmt: skip
    train = RouteTrainReport(
        "trained", "store", "out", {"seed": 0}, ["letters"], {"all": 4, "discovered": 2},
        best_epoch=2, history=[{"epoch": 1, "loss": 0.9}, {"epoch": 2, "loss": 0.5}],
        metrics={"single_top1": 0.9, "mixed_set": None, "examples": {"single": 10, "mixed": 0},
                 "calibration": {"expected_calibration_error": 0.02}},
    )  # fmt: skip
    row = {"letters": Estimate(1.0, 0.9, 1.1), ALL: Estimate(1.0, None, None)}
    matrix = dict.fromkeys(("base", "routed", "ungated"), row)
    gaps = {"scores": {"detection": RATE, "false_alarms": RATE, "others": None}}
    evaluation = Evaluation(
        ("letters",), {"letters": 4}, matrix, {"base": matrix, "ungated": matrix}, [], None, gaps,
        {"all, routed": {"mode": "routed", "losses": {ALL: 1.0}, "exactly_right": 1, "samples": 2}},
        [{"group": "letters", "prompt": "p", "expected": "e", "answers": {"base": {"text": "t"}}}],
    )  # fmt: skip
    evaluate = RouteEvaluateReport("done", "store", "out", {"seed": 0}, "chat", evaluation)
    check = {
        "kind": "route check", "status": "done", "settings": {"hard": False}, "verdict": "Holds.",
        "summary": {"answers": {"routed": RATE}, "expected_domains_active": RATE},
        "prompts": [{"name": "one", "prompt": "p", "weights": {"letters": 0.9},
                     "answers": {"routed": {"failed": ["too long"]}}}],
    }  # fmt: skip
    return {
        "discover_report.json": discover.as_json(), "train_report.json": train.as_json(),
        "route_evaluate_report.json": evaluate.as_json(), "route_check_report.json": check,
    }  # fmt: skip


def profile_result() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    choices = Choices(
        rng.integers(0, 5, (24, 4, 4)), np.arange(24) % 3, np.full(24, 8), ("x", "y", "z"),
        (0, 1, 2, 3),
    )  # fmt: skip
    tables = analyse_profile(choices, ProfileRule(2, 2, 20, 2, 0.05, 0))
    groups = [{"name": name, "prompts": 8, "tokens": 64} for name in choices.names]
    about = [{"attention": "full", "expert_bits": "3"}] * 4
    plan = {"hypothesis": "Groups go to other experts."}
    return Result(
        **ABOUT, status="done", outcome=outcome(tables, 0.05), verdict=verdict_of(tables, 0.05),
        standing=Standing(status="confirmatory"), settings={"alpha": 0.05}, plan=plan,
        plan_sha256=json_sha256(plan), data={"tables": tables},
        blocks=profile_blocks(tables, groups, about, choices.counts),
    ).sealed().as_json()  # fmt: skip


def confound_report() -> dict[str, Any]:
    settings = ConfoundSettings(model="m", persona="p", items="i", policies=("refit",))
    found = confound_cases.case(n=60, right=20, a1_refit=30, random_refit=2)
    plan = {"hypothesis": "A1 beats A0.", "n": 60}
    report = ConfoundReport(
        "done", "out", settings.model_dump(mode="json"), list(arms_of(settings)), plan,
        json_sha256(plan), ["enough items"], findings=found, versions=versions(), device="cpu",
    )  # fmt: skip
    return json.loads(json.dumps(report.as_json()))


def identity_result() -> dict[str, Any]:
    settings = identity_cases.SETTINGS
    items = {name: identity_cases.outcomes([True, False, True]) for name in ("base", "a_b")}
    plan = {"hypothesis": "The persona survives."}
    figures = identity_cases.case(items=items)
    return Result(
        **IDENTITY, status="done", outcome=identity_outcome(figures),
        verdict=identity_verdict(figures, settings, PlanStanding()),
        standing=Standing(status="confirmatory"), settings=settings.model_dump(mode="json"),
        plan=plan, plan_sha256=json_sha256(plan), data=figures, blocks=identity_blocks(figures),
    ).sealed().as_json()  # fmt: skip


def eval_report() -> dict[str, Any]:
    from mlxstacks.studies.benchmarks.report import EvalReport
    from tests.studies.benchmarks.test_report import found_of, marks

    found = found_of({
        "arc_easy": {"base": marks(100), "routed": marks(130)},
        "medqa": {"base": marks(100), "routed": marks(60)},
    }, is_published_model=True)  # fmt: skip
    plan = {"hypothesis": "A mode answers more or fewer."}
    report = EvalReport(
        "done", "out", {"tasks": ["arc_easy"]}, {}, plan, json_sha256(plan), findings=found
    )
    return json.loads(json.dumps(report.as_json()))


def every_report() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of a run directory -> (result file, its JSON), which is the caller's to change."""
    return copy.deepcopy(_every_report())


@cache
def _every_report() -> dict[str, tuple[str, dict[str, Any]]]:
    routes = route_reports()
    return {
        "fuse": (RESULT, fuse_report()),
        "zero": (RESULT, fuse_report(zero=True)),
        "train": (RESULT, train_report()),
        "store": ("manifest.json", manifest()),
        "analyse": ("analysis_report.json", analysis_report()),
        "compare": (RESULT, compare_result()),
        "sweep": ("sweep_report.json", sweep_report()),
        "buffers": ("sweep_report.json", buffers_report()),
        "profile": (RESULT, profile_result()),
        "confound": ("confound_report.json", confound_report()),
        "identity": (RESULT, identity_result()),
        "eval": ("eval_report.json", eval_report()),
        **{f"route-{number}": pair for number, pair in enumerate(routes.items())},
    }


def write_run(directory: Path, file: str, document: Any) -> Path:
    """A run directory with this result, sealed where it is one that can be."""
    directory.mkdir(parents=True, exist_ok=True)
    if file == RESULT:
        with suppress(ValueError):
            document = Result.from_json(document).sealed().as_json()
    (directory / file).write_text(json.dumps(document), encoding="utf-8")
    return directory


def write_every(directory: Path) -> Path:
    for name, (file, document) in every_report().items():
        write_run(directory / name, file, document)
    return directory

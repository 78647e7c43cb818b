"""A result of every kind, made by the classes that commands report with, written as they write."""

import copy
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.files.strict_json import json_sha256
from mlxstacks.fuse.fidelity import Sums, fidelity
from mlxstacks.fuse.report import FuseReport, ModuleReport, StageReport
from mlxstacks.fuse.report import result_of as fuse_result
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.stats import MeanInterval
from mlxstacks.studies.buffers import run as buffers
from mlxstacks.studies.compare.analysis import CellRecord, analyse
from mlxstacks.studies.compare.report import blocks as compare_blocks
from mlxstacks.studies.compare.run import ABOUT as COMPARE
from mlxstacks.studies.compare.settings import CompareSettings
from mlxstacks.studies.confound.conclude import ABOUT as CONFOUND
from mlxstacks.studies.confound.report import blocks as confound_blocks
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.verdict import verdict as confound_verdict
from mlxstacks.studies.identity.analysis import verdict as identity_verdict
from mlxstacks.studies.identity.report import blocks as identity_blocks
from mlxstacks.studies.identity.report import outcome_of as identity_outcome
from mlxstacks.studies.identity.run import ABOUT as IDENTITY
from mlxstacks.studies.profile.analysis import Choices, outcome
from mlxstacks.studies.profile.analysis import analyse as analyse_profile
from mlxstacks.studies.profile.analysis import blocks as profile_blocks
from mlxstacks.studies.profile.analysis import verdict as profile_verdict
from mlxstacks.studies.profile.run import ABOUT
from mlxstacks.studies.profile.settings import ProfileSettings
from mlxstacks.studies.route import check as route_check
from mlxstacks.studies.route import discover as route_discover
from mlxstacks.studies.route import evaluate as route_evaluate
from mlxstacks.studies.route import train as route_train
from mlxstacks.studies.route.evaluate_figures import ALL
from mlxstacks.studies.stack.analysis import ABOUT as ANALYSIS
from mlxstacks.studies.stack.analysis import blocks as analysis_blocks
from mlxstacks.studies.stack.analysis import verdict as analysis_verdict
from mlxstacks.studies.stack.report import ABOUT as STACK
from mlxstacks.studies.stack.report import domain_table, matrix_blocks
from mlxstacks.studies.sweep.cells import Cell, CellResult
from mlxstacks.studies.sweep.report import concluded
from mlxstacks.studies.sweep.settings import SweepSettings
from mlxstacks.studies.train.report import TrainReport
from mlxstacks.studies.train.report import result_of as train_result
from mlxstacks.study.document import RESULT, Standing
from mlxstacks.study.result import Result
from mlxstacks.training.settings import TrainSettings
from tests.studies import confound_cases
from tests.studies.identity import cases as identity_cases

ROWS = {"a": {"a": 1.0}, "b": {"a": 1.5, "b": 0.5}}
SETTINGS = FuseSettings(model="m", adapter_path=("a",))
RATE = {"count": 3, "n": 4, "rate": 0.75, "low": 0.3, "high": 0.95}
ORACLE = {
    "label": "letters", "n": 4, "sets": [], "own": RATE, "label_in_set": RATE, "nothing": RATE,
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
            "data": {"sources": [{"formats": {"chat": 7}}]},
        }, ["a note"], None,
        "best", 20, 20,
        [{"step": 0, "validation_loss": 2.0}, {"step": 20, "validation_loss": 1.5}],
        [{"step": 10, "loss": 1.8}], {"seconds": 1.0, "peak_bytes": 9},
    )  # fmt: skip
    return train_result(report).sealed().as_json()


def stack_result() -> dict[str, Any]:
    domain = {"enabled": True, "stacks": ["a-r1"], "parameters": 5, "bytes": 10,
              "losses": [2.0, 1.0], "protected": {"captured_energy_mean": 0.5}}  # fmt: skip
    blocks = (domain_table({"a": domain, "b": domain}), *matrix_blocks({"ungated": ROWS}))
    return Result(
        **STACK, status="done", outcome="2 domains, 2 stacks", verdict="a lost most, +0.5000.",
        settings={"seed": 0}, blocks=blocks,
    ).sealed().as_json()  # fmt: skip


def analysis_result() -> dict[str, Any]:
    points = [{"round": 1, "step": step, "validation_loss": 2.0 - step} for step in (0, 1)]
    domain = {"name": "a", "enabled": True, "stacks": [], "bytes": 0, "losses": [],
              "protected": None, "curve": points}  # fmt: skip
    means = {"mean": 0.2, "mean_chance": 0.1, "pairs": 1}
    cosines = {"directions": 4, "matrix": {"a": {"a": 1.0, "b": 0.2}, "b": {"a": 0.2, "b": 1.0}},
               "by_projection": {"q_proj": means}, **means}  # fmt: skip
    geometry = {"weights": cosines, "data": None, "spectra": {}}
    data = {"domains": [domain], "matrix": {"ungated": {"a": {"a": 1.0}}}, "geometry": geometry,
            "routing": None}  # fmt: skip
    return Result(
        **ANALYSIS, status="done", outcome="cosine 0.200", settings={"seed": 0},
        verdict=analysis_verdict(geometry, None), data=data, blocks=tuple(analysis_blocks(data)),
    ).sealed().as_json()  # fmt: skip


def compare_result(other: str = "boosted", primary: str = "task_loss") -> dict[str, Any]:
    cells = [
        CellRecord(arm, seed, "trained", None, {primary: loss + 0.001 * seed, "steps": 4.0})
        for arm, loss in (("control", 1.0), (other, 0.9))
        for seed in (0, 1, 2)
    ]
    settings = CompareSettings.model_validate(
        {"arms": [{"name": "control"}, {"name": other}], "seeds": [0, 1, 2],
         "primary": primary, "margin": 0.01, "run": {"domains": [{"name": "a"}, {"name": "b"}]}}
    )  # fmt: skip
    plan = {"primary": primary, "margin": 0.01}
    budget = {"parameters": 100, "steps": 10, "tokens": 400}
    budgets = dict.fromkeys(("control", other), budget)
    found = analyse(settings, budgets, cells)
    return Result(
        **COMPARE, status="done", outcome=f"{other}: better", verdict=f"{other} wins.",
        standing=Standing(status="confirmatory"), settings={"seeds": [0, 1, 2]}, plan=plan,
        plan_sha256=json_sha256(plan), blocks=compare_blocks(settings, budgets, found, []),
    ).sealed().as_json()  # fmt: skip


def sweep_result() -> dict[str, Any]:
    settings = SweepSettings(model="m", data="d", ranks=(2, 8), seeds=(0, 1), policies=("refit",))
    results = []
    for rank in (2, 8):
        for seed in (0, 1):
            losses = [{"step": 0, "validation_loss": 2.0}, {"step": 5, "validation_loss": 1.0}]
            figures = {"peak_bytes": 10, "validation": losses, "last_validation_loss": 1.0 + seed}
            kept = {"refit": {"survival": 0.1 * rank, "correlation": 0.5, "extra_bytes": 0}}
            cell = Cell(rank, seed, "all", "usual", None)
            results.append(
                CellResult(
                    cell, "trained", {}, {"outcome": "fits", "buffers": 7}, None, figures, kept
                )
            )
    shown = {"settings": settings.model_dump(mode="json")}
    return concluded(settings, results).model_copy(update=shown).sealed().as_json()


def buffers_result() -> dict[str, Any]:
    mean = MeanInterval(0.0001, -0.001, 0.001, 3, 0.9)
    condition = ("mlx-lm", "off", "variable")
    compared = buffers.Comparison(condition, 8, mean, mean, 0.002)
    row = buffers.Row(condition, 8, (900, 910), 10, 0.1, {0: 1})
    analysis = buffers.Analysis("equal", "", [compared], [row], {"mlx-lm": 0.9}, 0.1)
    plan = {"hypothesis": "Rank does not move it.", "margin": 0.01}
    return Result(
        **buffers.ABOUT, status="done", outcome="equal", verdict="Rank does not move it.",
        standing=Standing(status="confirmatory"), settings={"margin": 0.01}, plan=plan,
        plan_sha256=json_sha256(plan), data={"analysis": asdict(analysis)},
        blocks=buffers.blocks(analysis, 0.01),
    ).sealed().as_json()  # fmt: skip


def route_results() -> list[dict[str, Any]]:
    labels = dict.fromkeys(("examples", "trained_on", "samples", "samples_trained_on"), 4)
    discover = {
        "oracle": [ORACLE], "control": None, "greedy_gap": None,
        "counts": {"discovered_share": 0.5, "labels": {"letters": labels}},
    }  # fmt: skip
    epoch = {"single_top1": 0.9, "mixed_set": None, "val_bce": 0.4, "checkpoint_score": 0.4}
    calibration = {"expected_calibration_error": 0.02, "bins": []}
    train = {
        "domains": ["letters"], "examples": {"all": 4, "discovered": 2}, "best_epoch": 2,
        "history": [{"epoch": number, "train_loss": 1 / number, **epoch} for number in (1, 2)],
        "metrics": {**epoch, "examples": {"single": 10, "mixed": 0}, "domains": {},
                    "calibration": calibration},
    }  # fmt: skip
    row = {"letters": {"value": 1.0, "low": 0.9, "high": 1.1},
           ALL: {"value": 1.0, "low": None, "high": None}}  # fmt: skip
    matrix = dict.fromkeys(("base", "routed", "ungated"), row)
    evaluate = {
        "domains": ["letters"], "rows": {"letters": 4}, "matrix": matrix, "routers": [],
        "differences": {"base": matrix, "ungated": matrix}, "over_routers": None,
        "gaps": {"scores": {"detection": RATE, "false_alarms": RATE, "others": None}},
        "panels": {"all, routed": {"mode": "routed", "losses": {ALL: 1.0}, "exactly_right": 1,
                                   "samples": 2}},
        "samples": [{"group": "letters", "prompt": "p", "expected": "e",
                     "answers": {"base": {"text": "t"}}}],
    }  # fmt: skip
    answer = {"passed": False, "failed": ["too long"], "text": "t"}
    prompts = [{"name": "one", "prompt": "p", "weights": {"letters": 0.9}, "missing_domains": [],
                "expected_domains": ["letters"], "answers": {"routed": answer}}]  # fmt: skip
    summary = route_check.summary_of(prompts, None)
    parts: list[tuple[dict[str, str], dict[str, Any], Any]] = [
        (route_discover.ABOUT, discover, route_discover.blocks(discover)),
        (route_train.ABOUT, train, route_train.blocks(train)),
        (route_evaluate.ABOUT, evaluate, route_evaluate.blocks(evaluate)),
        (route_check.ABOUT, {"summary": summary}, route_check.blocks(summary, prompts)),
    ]
    return [
        Result(**about, status="done", settings={"seed": 0}, data=data, blocks=tuple(blocks),
               outcome="found", verdict="Found.").sealed().as_json()
        for about, data, blocks in parts
    ]  # fmt: skip


def profile_result() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    choices = Choices(
        rng.integers(0, 5, (24, 4, 4)), np.arange(24) % 3, np.full(24, 8), ("x", "y", "z"),
        (0, 1, 2, 3),
    )  # fmt: skip
    tables = analyse_profile(choices, ProfileSettings(top_layers=2, top_experts=2, permutations=20))
    groups = [{"name": name, "prompts": 8, "tokens": 64} for name in choices.names]
    about = [{"attention": "full", "expert_bits": "3"}] * 4
    plan = {"hypothesis": "Groups use different experts."}
    return Result(
        **ABOUT, status="done", outcome=outcome(tables, 0.05),
        verdict=profile_verdict(tables, 0.05),
        standing=Standing(status="confirmatory"), settings={"alpha": 0.05}, plan=plan,
        plan_sha256=json_sha256(plan), data={"tables": tables},
        blocks=profile_blocks(tables, groups, about, choices.counts),
    ).sealed().as_json()  # fmt: skip


def confound_result() -> dict[str, Any]:
    settings = ConfoundSettings(model="m", persona="p", items="i", policies=("refit",))
    findings = confound_cases.case(n=60, right=20, a1_refit=30, moved_refit=2)
    plan = {"hypothesis": "A1 beats A0.", "n": 60}
    mined = {"table": {"all": {"both wrong": 200}}, "train": ["1"], "test": ["2"]}
    return Result(
        **CONFOUND, status="done", outcome="adds knowledge", verdict=confound_verdict(findings),
        standing=Standing(status="confirmatory"), settings=settings.model_dump(mode="json"),
        plan=plan, plan_sha256=json_sha256(plan), power=("enough items",),
        data=findings.as_json(), blocks=confound_blocks(findings, {}, mined, settings, {}),
    ).sealed().as_json()  # fmt: skip


def identity_result() -> dict[str, Any]:
    settings = identity_cases.SETTINGS
    items = {name: identity_cases.outcomes([True, False, True]) for name in ("base", "a_b")}
    plan = {"hypothesis": "The persona survives."}
    figures = identity_cases.case(items=items)
    return Result(
        **IDENTITY, status="done", outcome=identity_outcome(figures),
        verdict=identity_verdict(figures, settings, Standing()),
        standing=Standing(status="confirmatory"), settings=settings.model_dump(mode="json"),
        plan=plan, plan_sha256=json_sha256(plan), data=figures, blocks=identity_blocks(figures),
    ).sealed().as_json()  # fmt: skip


def eval_result() -> dict[str, Any]:
    from mlxstacks.studies.benchmarks.report import blocks, outcome
    from mlxstacks.studies.benchmarks.run import ABOUT
    from tests.studies.benchmarks.test_report import found_of, marks

    figures, verdict = found_of({
        "arc_easy": {"base": marks(100), "routed": marks(130)},
        "medqa": {"base": marks(100), "routed": marks(60)},
    }, is_published_model=True)  # fmt: skip
    plan = {"hypothesis": "A mode answers more or fewer."}
    settings = {"tasks": ["arc_easy"], "normalisation": "token"}
    return Result(
        **ABOUT, status="done", outcome=outcome(figures), verdict=verdict, settings=settings,
        standing={"status": "confirmatory"}, plan=plan, plan_sha256=json_sha256(plan),
        data=figures, blocks=blocks(figures, {}, settings),
    ).as_json()  # fmt: skip


def every_report() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name of a run directory -> (result file, its JSON), which is the caller's to change."""
    return copy.deepcopy(_every_report())


@cache
def _every_report() -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        "fuse": (RESULT, fuse_report()),
        "zero": (RESULT, fuse_report(zero=True)),
        "train": (RESULT, train_report()),
        "stack": (RESULT, stack_result()),
        "analyse": (RESULT, analysis_result()),
        "compare": (RESULT, compare_result()),
        "sweep": (RESULT, sweep_result()),
        "buffers": (RESULT, buffers_result()),
        "profile": (RESULT, profile_result()),
        "confound": (RESULT, confound_result()),
        "identity": (RESULT, identity_result()),
        "eval": (RESULT, eval_result()),
        **{f"route-{number}": (RESULT, found) for number, found in enumerate(route_results())},
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
    """A run of every kind; of every kind of plot one, for each takes half a second to draw."""
    drawn: set[str] = set()
    for name, (file, document) in every_report().items():
        new = {block["kind"] for block in document["blocks"] if block["block"] == "plot"} - drawn
        drawn |= new
        write_run(directory / name, file, plots_cut(document, new))
    return directory


def plots_cut(document: dict[str, Any], kinds: Iterable[str] = ()) -> dict[str, Any]:
    """The document with the first plot of each of these kinds alone."""
    plots = [block for block in document["blocks"] if block["block"] == "plot"]
    kept = [next(plot for plot in plots if plot["kind"] == kind) for kind in kinds]
    return {
        **document,
        "blocks": [b for b in document["blocks"] if b not in plots or b in kept],
    }

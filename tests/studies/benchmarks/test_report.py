"""What `mlxstacks eval` says of scores: marks, verdicts, JSON, plots.

Run: pytest tests/studies/benchmarks/test_report.py
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.store import Store
from mlxstacks.studies.benchmarks import plan
from mlxstacks.studies.benchmarks.arm_settings import ARMS, ArmSettings
from mlxstacks.studies.benchmarks.asked import AskedTask
from mlxstacks.studies.benchmarks.harness.results import harness_findings
from mlxstacks.studies.benchmarks.outcomes import Outcome
from mlxstacks.studies.benchmarks.plan import claims_of, data_of, power_lines, task_plan
from mlxstacks.studies.benchmarks.plots import write_plots
from mlxstacks.studies.benchmarks.report import Findings, find
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.studies.benchmarks.tasks import task_named
from mlxstacks.studies.benchmarks.types import BenchItem
from mlxstacks.study.power import items_for_mcnemar
from tests.studies.eval_cases import HASHES, outcome, outcomes_of
from tests.studies.train_cases import write_tiny_model
from tests.tiny_models import random_adapter

SETTINGS = EvalSettings(model="m")


def asked_of(task: str, n: int, arms: Sequence[str]) -> AskedTask:
    likelihood = task_named(task).kind == "likelihood"
    items = tuple(
        BenchItem(str(index), "?", 0 if likelihood else "1", (" a", " b", " c", " d") * likelihood)
        for index in range(n)
    )
    return AskedTask(task_named(task), items, n, tuple(arms))


def found_of(tasks: Mapping[str, Mapping[str, Sequence[Outcome]]], **changes: Any) -> Findings:
    asked = [
        asked_of(name, len(next(iter(arms.values()))), list(arms)) for name, arms in tasks.items()
    ]
    plans = {one.task.name: task_plan(SETTINGS, one, HASHES) for one in asked}
    data = {one.task.name: data_of(one, HASHES) for one in asked}
    return find(asked, tasks, plans, data, **{"alpha": 0.05, "seed": 0} | changes)


def marks(right: int, n: int = 200) -> list[Outcome]:
    """The first `right` items right: arms with more know what those with less do."""
    return outcomes_of([index < right for index in range(n)])


def test_a_gain_a_loss_and_nothing_are_said_in_words() -> None:
    found = found_of({
        "arc_easy": {"base": marks(100), "routed": marks(130)},
        "medqa": {"base": marks(100), "routed": marks(60)},
        "mmlu": {"base": marks(90), "routed": marks(92)},
    })  # fmt: skip
    assert "better on arc_easy; worse on medqa." in found.verdict
    assert "Routed less base: -1.3 points in the mean of 3 tasks" in found.verdict
    assert "not distinguishable" in found.verdict
    assert "2 of 3 tests count" in found.verdict
    assert found.verdict.endswith("As planned beforehand.")
    assert [c.in_words for c in found.tasks["mmlu"].comparisons] == ["not distinguishable"]


def test_of_one_task_the_verdict_groups_what_is_better_worse_and_neither() -> None:
    found = found_of({
        "medqa": {"base": marks(100), "ungated": marks(60), "routed": marks(130),
                  "random": marks(101)},
    })  # fmt: skip
    better, worse, neither = found.verdict.split(". ")[:3]
    assert better.startswith("Routed is better than base (+15.0 points, 95% +")
    assert ", ungated (+35.0 points" in better
    assert " and random (+14.5 points" in better
    assert worse.startswith("Ungated is worse than base (-20.0 points")
    assert neither.startswith("Not distinguishable: random from base (+0.5 points")
    assert "4 of 5 tests count" in found.verdict


def test_scores_of_guessing_are_marked_and_so_is_the_verdict() -> None:
    found = found_of({"mmlu": {"base": marks(50), "routed": marks(55)}})
    assert "at the level of guessing (25.0%): base, routed" in found.tasks["mmlu"].marks
    assert "On mmlu every arm is at the level of guessing" in found.verdict
    known = found_of({"mmlu": {"base": marks(150), "routed": marks(55)}})
    assert "at the level of guessing (25.0%): routed" in known.tasks["mmlu"].marks
    assert "every arm" not in known.verdict


def test_a_model_that_never_boxes_is_marked() -> None:
    never = [outcome(index, False, value=None, rule="none") for index in range(20)]
    boxes = [outcome(index, index < 5, rule="boxed") for index in range(20)]
    found = found_of({"math500": {"base": boxes, "routed": never}})
    assert any("never boxed an answer" in m and m.endswith(": routed")
               for m in found.tasks["math500"].marks)  # fmt: skip
    number = found_of({"gsm8k": {"base": never, "routed": boxes}})
    assert any(
        "no answer that a rule finds" in m and m.endswith("base")
        for m in number.tasks["gsm8k"].marks
    )
    assert number.tasks["gsm8k"].arms["base"].parse_failure_rate == 1


def test_truncations_ties_and_cut_replies_are_counted_in_marks() -> None:
    odd = [
        outcome(0, False, tie=True, value=None), outcome(1, True, truncated=True),
        outcome(2, True, cut=True),
    ]  # fmt: skip
    found = found_of({"mmlu": {"base": odd, "routed": outcomes_of([True] * 3)}}).tasks["mmlu"].marks
    assert "ties, counted as wrong: base 1" in found
    assert "prompts cut from the left: base 1" in found
    assert "replies cut at max_tokens: base 1" in found
    assert "answered by the base, no domain active: routed 3" in found


def test_a_missing_arm_a_subset_and_other_items_make_it_exploratory() -> None:
    asked = asked_of("mmlu", 40, ["base", "routed"])
    plans = {"mmlu": task_plan(SETTINGS, asked, HASHES)}
    data = {"mmlu": data_of(asked, HASHES)}

    def reasons(outcomes: dict[str, list[Outcome]], **changes: Any) -> str:
        values = {"alpha": 0.05, "seed": 0} | changes
        found = find([asked], {"mmlu": outcomes}, plans, data, **values)
        assert found.verdict.count("Exploratory") == bool(found.standing.reasons)
        return "; ".join(found.standing.reasons)

    whole = marks(20, 40)
    assert reasons({"base": whole, "routed": whole}) == ""
    assert "missing arm: routed" in reasons({"base": whole})
    assert "a subset, 39 of 40" in reasons({"base": whole[1:], "routed": whole[1:]})
    assert "seeds [1], planned [0]" in reasons({"base": whole, "routed": whole}, seed=1)
    with pytest.raises(ValueError, match="answered different items"):
        reasons({"base": whole, "routed": whole[1:]})


def test_one_arm_alone_compares_nothing() -> None:
    found = found_of({"mmlu": {"base": marks(20, 40)}})
    assert found.differences == []
    assert "nothing is compared" in found.verdict


def test_published_scores_of_the_spec_are_in_the_report() -> None:
    # spec/evaluation.md section 5
    published = {"hellaswag": (0.670, 0.650), "medqa": (0.385, 0.350), "gsm8k": (0.665, 0.665)}
    tasks = {name: {"base": marks(20, 40)} for name in published}
    assert all(one.published is None for one in found_of(tasks).tasks.values())
    found = found_of(tasks, is_published_model=True).as_json()
    for name, scores in published.items():
        said = found["tasks"][name]["published"]
        assert (said["base"], said["routed"], said["n"]) == (*scores, 200)
        assert "Gemma 3 12B" in said["of"]
    json.dumps(found, allow_nan=False)


def test_claims_are_against_base_ungated_random_and_the_unfused_adapter() -> None:
    arms = ("base", "adapter", "fused", "ungated", "routed", "oracle", "random")
    claims = claims_of(arms)
    assert claims[:3] == (("routed", "base"), ("routed", "ungated"), ("routed", "random"))
    assert {("fused", "adapter"), ("fused", "base"), ("ungated", "base")} < set(claims)
    assert len(claims) == len(set(claims)) == 11
    assert claims_of(("base",)) == ()
    assert claims_of(("ungated", "routed")) == (("routed", "ungated"),)


def test_all_that_arms_are_made_from_is_hashed(tmp_path: Path) -> None:
    """A model that only the store names, tokens and end marks, adapter, store, router."""
    model = write_tiny_model(tmp_path / "model")
    adapter = random_adapter(
        model, keys=["mlp.switch_mlp.down_proj"], directory=tmp_path / "adapter"
    )
    router, store = tmp_path / "router.safetensors", tmp_path / "store"
    router.write_bytes(b"router")
    Store.create(store, model.name, fingerprint(open_checkpoint(model)))
    of_the_store = ArmSettings(store_path=str(store))
    found = plan.hashes_of(of_the_store, ("base",))
    assert set(found) == {"model", "tokenizer"}
    settings = ArmSettings(
        model=str(model), store_path=str(store), adapter_path=str(adapter), router_path=str(router)
    )
    assert found.items() <= plan.hashes_of(settings, ARMS).items()

    def changed(path: Path, content: str) -> set[str]:
        before = plan.hashes_of(settings, ARMS)
        path.write_text(content)
        after = plan.hashes_of(settings, ARMS)
        assert before.keys() == after.keys() == {
            "model", "tokenizer", "adapter", "store", "router",
        }  # fmt: skip
        return {name for name in after if after[name] != before[name]}

    config = json.loads((model / "config.json").read_text())
    assert changed(model / "config.json", json.dumps({**config, "rope_theta": 5.0})) == {"model"}
    assert changed(model / "generation_config.json", '{"eos_token_id": 3}') == {"tokenizer"}
    assert changed(store / "manifest.json", '{"a": 1}') == {"store"}
    assert changed(router, "another") == {"router"}
    own = json.loads((adapter / "adapter_config.json").read_text())
    assert changed(adapter / "adapter_config.json", json.dumps({**own, "x": 1})) == {"adapter"}
    shutil.rmtree(store)
    Store.create(store, "/nowhere/at/all", "c" * 64)
    with pytest.raises(InputError, match=r"its base /nowhere/at/all .* is not found here"):
        plan.hashes_of(of_the_store, ("base",))


def test_power_shares_alpha_among_the_tests() -> None:
    few, many = (power_lines(SETTINGS, {"a": 500, "b": 500}, tests)[0] for tests in (1, 40))
    assert "500 items (a, b)" in few

    def needed(line: str) -> int:
        return int(line.split("; ")[1].split(" items find 5 points")[0].replace(",", ""))

    assert needed(few) == items_for_mcnemar(SETTINGS.expected_discordant, 0.05)
    assert needed(many) > 2 * needed(few)

    def points(line: str) -> float:
        return float(line.split(": ")[2].split(" points")[0])

    assert points(few) < points(many)
    a_plan = task_plan(SETTINGS, asked_of("mmlu", 500, ["base", "routed"]), HASHES)
    for line, tests in ((few, 1), (many, 40)):
        least = plan.least_effect(a_plan, tests)
        assert least is not None
        assert points(line) == pytest.approx(100 * least, abs=0.05)


def test_the_verdict_says_what_so_few_items_cannot_show() -> None:
    few = found_of({"mmlu": {"base": marks(10, 20), "routed": marks(11, 20)}})
    assert "So few items can show no difference at all, if 10% of pairs differ." in few.verdict
    two = found_of({
        "mmlu": {"base": marks(10, 20), "routed": marks(11, 20)},
        "medqa": {"base": marks(500, 1000), "routed": marks(501, 1000)},
    })  # fmt: skip
    assert "if 10% of pairs differ (mmlu)." in two.verdict
    many = found_of({"mmlu": {"base": marks(500, 1000), "routed": marks(501, 1000)}})
    assert "So few items" not in many.verdict
    # What counts as a difference was not too little to show one.
    shown = found_of({"mmlu": {"base": marks(0, 20), "routed": marks(20, 20)}})
    assert "Routed is better than base" in shown.verdict
    assert "So few items" not in shown.verdict


def test_where_more_pairs_differ_few_items_show_large_differences_alone() -> None:
    asked = asked_of("mmlu", 30, ["base", "routed"])
    settings = SETTINGS.model_copy(update={"expected_discordant": 0.4})
    plans = {"mmlu": task_plan(settings, asked, HASHES)}
    arms = {"base": marks(15, 30), "routed": marks(16, 30)}
    data = {"mmlu": data_of(asked, HASHES)}
    found = find([asked], {"mmlu": arms}, plans, data, alpha=0.05, seed=0)
    (points,) = re.findall(r"show only differences above (\d+) points\.", found.verdict)
    assert int(points) > 20
    assert power_lines(settings, {"mmlu": 30}, 1)[0].count(f": {points}.") == 1


def test_plots_are_drawn_and_the_same_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = found_of({
        "mmlu": {"base": marks(20, 40), "routed": marks(30, 40)},
        "humaneval": {"base": outcomes_of([None] * 3), "routed": outcomes_of([None] * 3)},
    })  # fmt: skip
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        names, notes = write_plots(tmp_path / name, found)
        assert not notes
        files.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert set(names) == {f"{n}.{s}" for n in ("scores", "differences") for s in ("png", "svg")}
    assert files[0] == files[1]


# --- the harness's tasks --------------------------------------------------------------------------


def harness_of(right: Mapping[str, int], n: int = 40, metric: str = "acc") -> dict[str, Any]:
    return {
        arm: {
            "lm_eval": "0.4", "tasks": {"t": {}},
            "arms": {arm: {"tasks": {"t": {
                "metrics": {f"{metric},none": count / n}, "ties": 1, "seconds": 1.0,
                "samples": [
                    {"doc_id": place, "filter": "none", "metrics": {metric: float(place < count)}}
                    for place in range(n)
                ],
            }}}},
        }
        for arm, count in right.items()
    }  # fmt: skip


def test_the_harness_is_compared_item_by_item() -> None:
    found = harness_findings(harness_of({"base": 10, "routed": 30}), 0.05)
    task = found["tasks"]["t"]
    assert (task["metric"], found["tests"]) == ("acc", 1)
    assert task["arms"]["routed"]["score"] == 0.75
    assert task["comparisons"][0]["mcnemar"]["gained"] == 20
    assert task["comparisons"][0]["label"] == "better"
    assert harness_findings({}, 0.05) == {}


def test_a_metric_that_is_neither_right_nor_wrong_is_shown_and_not_tested() -> None:
    raw = harness_of({"base": 10, "routed": 30}, metric="bleu")
    for arm in raw:
        raw[arm]["arms"][arm]["tasks"]["t"]["samples"][0]["metrics"]["bleu"] = 0.3
    task = harness_findings(raw, 0.05)["tasks"]["t"]
    assert task["comparisons"] == []
    assert "score" not in task["arms"]["base"]
    assert task["arms"]["base"]["metrics"] == {"bleu,none": 0.25}

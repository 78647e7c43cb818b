"""What `mlxstacks eval` says of scores: marks, verdicts, tables and plots.

Run: pytest tests/studies/benchmarks/test_report.py
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mlxstacks.errors import AdapterError, InputError, StoreError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.store import Store
from mlxstacks.studies.benchmarks import items
from mlxstacks.studies.benchmarks.analysis import Figures, Outcome, claims_of, harness_figures
from mlxstacks.studies.benchmarks.items import AskedTask, data_of, power_lines, task_plan
from mlxstacks.studies.benchmarks.report import blocks, find, outcome
from mlxstacks.studies.benchmarks.settings import ARMS, ArmSettings, EvalSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem, task_named
from mlxstacks.study.document import Block, Plot, Table
from mlxstacks.study.power import items_for_mcnemar
from mlxstacks.study.render.words import format_cell
from tests.studies.eval_cases import HASHES, outcomes_of
from tests.studies.eval_cases import outcome as outcome_of
from tests.studies.train_cases import write_tiny_model
from tests.tiny_models import random_adapter, write_llama

SETTINGS = EvalSettings(model="m")


def asked_of(task: str, n: int, arms: Sequence[str]) -> AskedTask:
    likelihood = task_named(task).kind == "likelihood"
    items = tuple(
        BenchItem(str(index), "?", 0 if likelihood else "1", (" a", " b", " c", " d") * likelihood)
        for index in range(n)
    )
    return AskedTask(task_named(task), items, n, tuple(arms))


class Found(NamedTuple):
    figures: Figures
    verdict: str

    def task(self, name: str) -> Figures:
        task: Figures = self.figures["tasks"][name]
        return task


def found_of(tasks: Mapping[str, Mapping[str, Sequence[Outcome]]], **changes: Any) -> Found:
    asked = [
        asked_of(name, len(next(iter(arms.values()))), list(arms)) for name, arms in tasks.items()
    ]
    plans = {one.task.name: task_plan(SETTINGS, one, HASHES) for one in asked}
    data = {one.task.name: data_of(one, HASHES) for one in asked}
    return Found(*find(asked, tasks, plans, data, **{"alpha": 0.05, "seed": 0} | changes))


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
    assert "Routed - base: -1.3 points in the mean of 3 tasks" in found.verdict
    assert "no difference shown" in found.verdict
    assert "2 of 3 tests show a difference" in found.verdict
    assert found.verdict.endswith("As planned beforehand.")
    (pair,) = found.task("mmlu")["comparisons"]
    assert pair["in_words"] == "no difference shown"


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
    assert neither.startswith("No difference shown: random and base (+0.5 points")
    assert "4 of 5 tests show" in found.verdict
    even = found_of({"medqa": dict.fromkeys(("base", "ungated", "routed", "random"), marks(100))})
    assert even.verdict.startswith("No difference shown: 5 pairs, in the table of paired tests.")


def test_scores_of_guessing_are_marked_and_so_is_the_verdict() -> None:
    found = found_of({"mmlu": {"base": marks(50), "routed": marks(55)}})
    assert "not told from guessing (25.0%): base, routed" in found.task("mmlu")["marks"]
    assert "On mmlu no arm is told from guessing" in found.verdict
    known = found_of({"mmlu": {"base": marks(150), "routed": marks(55)}})
    assert "not told from guessing (25.0%): routed" in known.task("mmlu")["marks"]
    assert "every arm" not in known.verdict


def test_a_model_that_never_boxes_is_marked() -> None:
    never = [outcome_of(index, False, value=None, rule="none") for index in range(20)]
    boxes = [outcome_of(index, index < 5, rule="boxed") for index in range(20)]
    found = found_of({"math500": {"base": boxes, "routed": never}})
    assert any("never boxed an answer" in m and m.endswith(": routed")
               for m in found.task("math500")["marks"])  # fmt: skip
    number = found_of({"gsm8k": {"base": never, "routed": boxes}})
    assert any(
        "no answer that a rule finds" in m and m.endswith("base")
        for m in number.task("gsm8k")["marks"]
    )
    assert number.task("gsm8k")["arms"]["base"]["parse_failure_rate"] == 1


def test_truncations_ties_and_cut_replies_are_counted_in_marks() -> None:
    odd = [
        outcome_of(0, False, tie=True, value=None), outcome_of(1, True, truncated=True),
        outcome_of(2, True, cut=True),
    ]  # fmt: skip
    found = found_of({"mmlu": {"base": odd, "routed": outcomes_of([True] * 3)}}).task("mmlu")[
        "marks"
    ]
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
        figures, verdict = find([asked], {"mmlu": outcomes}, plans, data, **values)
        listed = figures["standing"]["reasons"]
        assert verdict.count("Exploratory") == bool(listed)
        assert verdict.startswith("EXPLORATORY. No claim beyond ") == bool(listed)
        assert outcome(figures).startswith("exploratory: ") == bool(listed)
        return "; ".join(listed)

    whole = marks(20, 40)
    assert reasons({"base": whole, "routed": whole}) == ""
    assert "missing arm: routed" in reasons({"base": whole})
    assert "a subset, 39 of 40" in reasons({"base": whole[1:], "routed": whole[1:]})
    assert "seeds [1], planned [0]" in reasons({"base": whole, "routed": whole}, seed=1)
    with pytest.raises(ValueError, match="answered different items"):
        reasons({"base": whole, "routed": whole[1:]})


def test_one_arm_alone_compares_nothing() -> None:
    found = found_of({"mmlu": {"base": marks(20, 40)}})
    assert found.figures["mean_differences"] == []
    assert outcome(found.figures) == "nothing compared"
    assert "nothing is compared" in found.verdict


def test_published_scores_of_the_spec_are_in_the_report() -> None:
    published = {"hellaswag": (0.670, 0.650), "medqa": (0.385, 0.350), "gsm8k": (0.665, 0.665)}
    tasks = {name: {"base": marks(20, 40)} for name in published}
    assert {task["published"] for task in found_of(tasks).figures["tasks"].values()} == {None}
    found = found_of(tasks, is_published_model=True).figures
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
    found = items.hashes_of(of_the_store, ("base",))
    assert set(found) == {"model", "tokenizer"}
    assert not items.is_published_model(of_the_store)
    settings = ArmSettings(
        model=str(model), store_path=str(store), adapter_path=str(adapter), router_path=str(router)
    )
    assert found.items() <= items.hashes_of(settings, ARMS).items()

    def changed(path: Path, content: str) -> set[str]:
        before = items.hashes_of(settings, ARMS)
        path.write_text(content)
        after = items.hashes_of(settings, ARMS)
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
        items.hashes_of(of_the_store, ("base",))


def test_an_adapter_or_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    model, other = write_tiny_model(tmp_path / "a"), write_llama(tmp_path / "b", bits=None)
    adapter = random_adapter(other, keys=["self_attn.q_proj"], directory=tmp_path / "adapter")
    Store.create(tmp_path / "store", other.name, fingerprint(open_checkpoint(other)))
    places = {"adapter_path": str(adapter), "store_path": str(tmp_path / "store")}
    for key, arms in (("adapter_path", ("adapter",)), ("store_path", ("routed",))):
        items.check_arms_fit(ArmSettings(**{key: places[key], "model": str(other)}), arms)
        with pytest.raises((AdapterError, StoreError)):
            items.check_arms_fit(ArmSettings(**{key: places[key], "model": str(model)}), arms)


def test_a_domain_or_a_task_that_is_misspelt_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "a")
    store = Store.create(tmp_path / "store", model.name, fingerprint(open_checkpoint(model)))
    with store.change("train") as change:
        change.manifest = change.manifest.with_domain(DomainRecord("islands", True, ()))
    asked = AskedTask(task_named("items"), (), 0)
    for given, message in (
        ("itms=islands", "no task or subject 'itms'; did you mean 'items'"),
        ("items=islnds", "no domain 'islnds'; did you mean 'islands'"),
    ):
        settings = EvalSettings(domains=(given,), store_path=str(store.path))
        with pytest.raises(InputError, match=message):
            items.with_arms(settings, [asked])


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
    _, verdict = find([asked], {"mmlu": arms}, plans, data, alpha=0.05, seed=0)
    (points,) = re.findall(r"show only differences above (\d+) points\.", verdict)
    assert int(points) > 20
    assert power_lines(settings, {"mmlu": 30}, 1)[0].count(f": {points}.") == 1


def blocks_of(found: Found, **harness: Any) -> dict[str, Block]:
    """By id; a text by its title."""
    made = blocks(found.figures, harness, {"normalisation": "token"})
    return {getattr(block, "id", block.title): block for block in made}


def cells(block: Block, row: int = 0) -> dict[str, str | None]:
    """A row of a table as it is shown."""
    assert isinstance(block, Table)
    pairs = zip(block.columns, block.rows[row], strict=True)
    return {column.name: format_cell(cell, column) for column, cell in pairs}


def test_the_tables_of_several_tasks_hold_scores_pairs_means_and_marks() -> None:
    found = found_of({
        "arc_easy": {"base": marks(100), "routed": marks(130)},
        "medqa": {"base": marks(100), "routed": marks(60)},
        "humaneval": {"base": outcomes_of([None] * 3), "routed": outcomes_of([None] * 3)},
    }, is_published_model=True)  # fmt: skip
    made = blocks_of(found)
    assert list(made) == [
        "means", "mean-differences", "differences", "task-arc-easy", "task-medqa",
        "task-humaneval", "scores", "pairs", "arm-means", "mean-differences-table",
        "Notes on the scores", "normalisations", "replies", "cost", "published",
    ]  # fmt: skip
    assert outcome(found.figures) == "2 of 2 differences shown"
    assert cells(made["scores"]) == {
        "task": "ARC-Easy", "items": "200", "available": "200", "guessing": "25.0%",
        "base": "50.0% (43.1 to 56.9)", "routed": "65.0% (58.2 to 71.3)",
    }  # fmt: skip
    assert cells(made["scores"], 2)["base"] == "not graded"
    worse = cells(made["pairs"], 1)
    assert (worse["task"], worse["pair"], worse["outcome"]) == ("medqa", "routed - base", "worse")
    assert (worse["points"], worse["95%"]) == ("-20.0", "-25.5 to -14.3")
    mean = cells(made["mean-differences-table"])
    assert (mean["better on"], mean["worse on"], mean["tasks"]) == ("arc_easy", "medqa", "2")
    assert cells(made["arm-means"])["mean score, with its 95% interval"] == "50.0% (45.1 to 54.9)"
    assert cells(made["normalisations"])["token"] == "50.0%"
    assert cells(made["replies"])["answer taken by"] == "likelihood 3"
    published = cells(made["published"])
    assert (published["published base"], published["base"]) == ("51.0%", "50.0%")
    plot = made["differences"]
    assert isinstance(plot, Plot)
    assert plot.series[0].y == (15.0, None)
    assert plot.references == {"no difference": 0.0}


def test_one_task_has_a_row_an_arm_and_holms_p_next_to_the_tests_own() -> None:
    arms = {name: marks(0, 60) for name in ("base", "ungated", "random")}
    clear = blocks_of(found_of({"mmlu": arms | {"routed": marks(5, 60)}}))["pairs"]
    assert isinstance(clear, Table)
    assert cells(clear)["outcome"] == "no difference shown†"
    assert clear.caption.endswith("broken: only the second. †: the interval is clear of 0, but the "
                                  "exact test, which is stricter, decides.")  # fmt: skip
    arms["routed"] = marks(7, 60)
    made = blocks_of(found_of({"mmlu": arms}))
    assert {"means", "arm-means", "mean-differences"}.isdisjoint(made)
    table = made["scores"]
    assert isinstance(table, Table)
    assert table.title == "MMLU, 60 of 60 items, by token"
    assert "Guessing gives 25.0%; shares are of n = 60" in table.caption
    assert cells(table, 3)["right"] == "7"
    row = cells(made["pairs"])
    assert row["outcome"] == "no difference shown*"
    assert (row["p (McNemar)"], row["p (Holm)"]) == ("0.016", "0.078")
    pairs = made["pairs"]
    assert isinstance(pairs, Table)
    assert "of so many tests one may well have such a p by chance" in pairs.caption
    assert outcome(found_of({"mmlu": arms}).figures) == "no difference shown, of 5 tested"


def test_a_mean_that_alone_is_clear_of_zero_has_a_star() -> None:
    """Three gained of a hundred on two tasks: enough for one pair of arms, not for ten."""
    names = ("adapter", "ungated", "routed", "oracle", "random")
    marked = {"base": marks(0, 100), **dict.fromkeys(names, marks(3, 100))}
    made = blocks_of(found_of({"mmlu": marked, "medqa": marked}))["mean-differences-table"]
    assert isinstance(made, Table)
    assert cells(made)["outcome"] == "no difference shown*"
    assert made.caption.startswith("*: its 95% interval is clear of 0")
    two = {name: marked[name] for name in ("base", "routed")}
    made = blocks_of(found_of({"mmlu": two, "medqa": two}))["mean-differences-table"]
    assert isinstance(made, Table)
    assert (cells(made)["outcome"], made.caption) == ("better", "")


def test_letters_and_the_old_rule_have_columns_where_they_were_asked() -> None:
    odd = [outcome_of(0, True, letter=False, reference=True)]
    shown = cells(blocks_of(found_of({"mmlu": {"base": odd}}))["normalisations"])
    assert (shown["letters"], shown["old rule"]) == ("0.0%", "100.0%")
    plain = cells(blocks_of(found_of({"mmlu": {"base": marks(1, 2)}}))["normalisations"])
    assert {"letters", "old rule"}.isdisjoint(plain)


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
    found = harness_figures(harness_of({"base": 10, "routed": 30}), 0.05)
    task = found["tasks"]["t"]
    assert (task["metric"], found["tests"]) == ("acc", 1)
    assert task["arms"]["routed"]["score"] == 0.75
    assert task["comparisons"][0]["mcnemar"]["gained"] == 20
    assert task["comparisons"][0]["label"] == "better"
    assert harness_figures({}, 0.05) == {}
    made = blocks_of(found_of({}), **found)
    row = cells(made["harness-1"], 1)
    assert (row["metrics"], row["ties"]) == ("acc 0.750", "1")
    assert str(row["tested, with its 95% interval"]).startswith("75.0% (")
    assert cells(made["harness-1-pairs"])["outcome"] == "better"


def test_a_metric_that_is_neither_right_nor_wrong_is_shown_and_not_tested() -> None:
    raw = harness_of({"base": 10, "routed": 30}, metric="bleu")
    for arm in raw:
        raw[arm]["arms"][arm]["tasks"]["t"]["samples"][0]["metrics"]["bleu"] = 0.3
    task = harness_figures(raw, 0.05)["tasks"]["t"]
    assert task["comparisons"] == []
    assert "score" not in task["arms"]["base"]
    assert task["arms"]["base"]["metrics"] == {"bleu,none": 0.25}

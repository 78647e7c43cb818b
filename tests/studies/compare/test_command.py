"""`mlxstacks stack compare` as it is typed, and settings that are refused.

Run: pytest tests/studies/compare/test_command.py
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mlxstacks.settings import merge
from mlxstacks.studies.compare.settings import CompareSettings
from mlxstacks.study import child_process
from tests.studies.compare_cases import ARMS, RUN
from tests.studies.stack_cases import write_places
from tests.warm import WarmSubprocess

Typed = Callable[..., tuple[int, str, str]]


def test_a_bare_plan_is_on_one_domain_of_nano(typed: Typed, work_dir: Path) -> None:
    code, out, err = typed("stack", "compare", "--dry-run", "--json", "--set", "run.iters=5")
    plan = json.loads(out)
    assert (code, plan["status"]) == (0, "planned"), err
    assert list(plan["plan"]["data"]) == ["letters"]
    lora, stack = (plan["data"]["budgets"][arm]["parameters"] for arm in ("lora", "moe-lora"))
    assert abs(lora - stack) < 0.01 * stack
    assert plan["data"]["budgets"]["lora"]["steps"] == 5
    assert list(work_dir.iterdir()) == []


def test_a_comparison_prints_budgets_differences_and_its_verdict(
    typed: Typed, work_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "subprocess", WarmSubprocess)
    model, data = write_places(tmp_path / "inputs")
    recipe = tmp_path / "mine.yaml"
    arms: list[Any] = [{"name": "plain"}, {"name": "faster", "change": {"learning_rate": 0.02}}]
    recipe.write_text(json.dumps({
        "command": "stack compare", "model": str(model), "data": str(data), "arms": arms,
        "seeds": [0], "run": RUN,
    }))  # fmt: skip
    code, out, err = typed("run", str(recipe))
    text = " ".join(out.split())
    assert code == 0, err
    assert "Budgets; equal within 1.00%: trained parameters, steps, tokens" in text
    assert "faster - plain, paired by seed" in text
    assert "Loss with every stack on" in text
    assert "Steps to the same validation loss" in text
    assert "undecided" in text
    assert "(one seed has no interval)" in text
    report = json.loads((work_dir / "mlxstacks-out/mine/result.json").read_text())
    assert report["plan_sha256"][:16] in out
    assert report["verdict"][1:] in text
    code, out, _ = typed("run", str(recipe))
    assert (code, "Already done with these settings" in out) == (0, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": [{"name": "a"}]}, "two or more"),
        ({"arms": []}, "two or more"),
        ({"arms": [{"name": "a"}, {"name": "A"}]}, "a name of its own"),
        ({"arms": [{"name": "a"}, {"name": "../b"}]}, "part of file names"),
        ({"arms": [{"name": "a"}, {"name": "b", "change": {"seed": 3}}]}, "b changes seed"),
        ({"arms": [{"name": "a"}, {"name": "b", "change": {"modes": []}}]}, "all arms share"),
        ({"arms": [{"name": "a"}, {"name": "b", "change": {"itres": 3}}]}, "mean 'iters'?"),
        (
            {"arms": [{"name": "a"}, {"name": "b", "change": {"rank": 4}}]},
            r"arm b: no setting 'rank'; did you mean 'stack\.rank'\?",
        ),
        ({"arms": [{"name": "a"}, {"name": "b", "change": {"iters": 0}}]}, "arm b: iters"),
        ({"seeds": [1, 1]}, "give at least one, each once"),
        ({"seeds": []}, "give at least one, each once"),
        ({"rates": [0.1, 0.1]}, "rates is"),
        ({"rates": [0.1], "seeds": [0, 101]}, r"search_seeds is \[100, 101\]; .* none of seeds"),
        ({"rates": [0.1], "search_seeds": []}, "search_seeds is"),
        (
            {"rates": [0.1], "run": RUN | {"domains": [{"name": "a", "learning_rate": 0.1}]}},
            "a domain has a learning rate",
        ),
        ({"run": RUN | {"seed": 7}}, "run.seed is set by the comparison: give seeds"),
        ({"run": RUN | {"modes": ["prefix"]}, "primary": "ungated"}, "ungated among run.modes"),
    ],
)
def test_settings_that_compare_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CompareSettings.model_validate({"run": RUN, "arms": ARMS} | changes)


def test_a_fault_of_what_was_typed_is_not_the_recipes(typed: Typed, work_dir: Path) -> None:
    arms = "arms=[{name: a, change: {rank: 4}}, {name: b}]"
    _, _, err = typed("run", "compare-building-block-nano", "--set", arms)
    assert err == "error: arm a: no setting 'rank'; did you mean 'stack.rank'?\n"
    (work_dir / "one.yaml").write_text("command: stack compare\narms: [{name: a}]\n")
    _, _, err = typed("run", "one.yaml")
    assert err.startswith("error: recipe one.yaml: arms is ['a']")


def test_an_arm_of_one_expert_need_not_say_how_many_a_token_uses() -> None:
    """experts_per_token 2 is a default, and must not be held against one expert."""
    run_settings = RUN | {"stack": {"rank": 2}}
    arms = [{"name": "a"}, {"name": "b", "change": {"stack": {"num_experts": 1}}}]
    settings = CompareSettings.model_validate({"run": run_settings, "arms": arms})
    made = settings.settings_of(settings.arms[1])
    assert (made.stack.num_experts, made.stack.rank, made.stack.top_k) == (1, 2, 1)
    assert made.iters == RUN["iters"]


def test_changes_are_laid_over_key_by_key() -> None:
    low = {"a": {"b": 1, "c": 2}, "d": 3, "e": {"f": 1}}
    assert merge(low, {"a": {"b": 5}, "e": None}) == {"a": {"b": 5, "c": 2}, "d": 3, "e": None}
    assert merge({"e": None}, {"e": {"f": 2}}) == {"e": {"f": 2}}
    assert low == {"a": {"b": 1, "c": 2}, "d": 3, "e": {"f": 1}}

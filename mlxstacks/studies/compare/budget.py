"""Arms that are said to have equal budgets: what each may spend, and what each did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.study.result import Result
from mlxstacks.training.settings import StackRunSettings


@dataclass(frozen=True)
class ArmBudget:
    """All rounds of all domains together.

    parameters: that are trained, routers and noise included; a frozen stack has two bytes for each.
    rows: rows of all batches, repeated ones counted again.
    """

    parameters: int
    steps: int
    rows: int


def planned_budget(settings: StackRunSettings, planned: Result) -> ArmBudget:
    """What a run would spend, from its dry run."""
    domains = [d for d in planned.data["domains"].values() if d["status"] == "planned"]
    rounds = sum(domain["rounds_planned"] for domain in domains)
    steps = sum(domain["rounds_planned"] * domain["steps_per_round"] for domain in domains)
    rows = steps * settings.batch_size * settings.grad_accumulation_steps
    return ArmBudget(rounds * planned.data["trained_parameters"], steps, rows)


def budget_problems(
    budgets: Mapping[str, ArmBudget], equal: Sequence[str], tolerance: float
) -> list[str]:
    """What is not equal within the tolerance, measured from the first arm."""
    control, *others = budgets
    problems = []
    for name in equal:
        base = getattr(budgets[control], name)
        for arm in others:
            own = getattr(budgets[arm], name)
            if abs(own - base) > tolerance * base:
                problems.append(
                    f"{name}: {own:,} of {arm}, {base:,} of {control} ({own / base - 1:+.2%}, "
                    f"allowed {tolerance:.2%})"
                )
    return problems


def check_budgets(budgets: Mapping[str, ArmBudget], equal: Sequence[str], tolerance: float) -> None:
    """Raises: InputError listing every budget that is not equal."""
    problems = budget_problems(budgets, equal, tolerance)
    if problems:
        lines = "".join(f"\n  {line}" for line in problems)
        raise InputError(
            f"the arms are to have equal budgets and have not:{lines}\n"
            "change rank, rounds, iters or batch_size of an arm; or leave out of `equal` what need "
            "not be equal"
        )


def spent_steps_differ(steps: Sequence[float], tolerance: float) -> bool:
    """Whether runs of one seed did different numbers of steps: a round ended early, or was not
    begun.
    """
    return max(steps) - min(steps) > tolerance * max(steps)


def as_json(budgets: Mapping[str, ArmBudget]) -> dict[str, Any]:
    return {arm: vars(budget) for arm, budget in budgets.items()}

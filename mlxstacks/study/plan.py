"""Plans that cannot move: written and hashed before the first evaluation, referred to by results.

A plan lies as `plan.json` beside its results. `fix_plan` writes it once; with another plan, or with
results that are older than any plan, it refuses. A result carries the plan's hash and says what it
was got from (`Evidence`); `standing` holds the two against each other: *confirmatory* when all is
as planned, else *exploratory* with the reasons, which belongs into every table and plot
(`Standing.mark`).

Plans of other shapes (`stack compare`, `sweep buffers`) use `keep_plan` and hash their own.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, JsonValue, TypeAdapter

from mlxstacks.errors import InputError
from mlxstacks.files.manifest import Fingerprint
from mlxstacks.files.outputs import write_json
from mlxstacks.files.strict_json import (
    STRICT,
    compact,
    json_sha256,
    read_object,
    record_as_json,
    record_from,
)
from mlxstacks.study.document import Standing
from mlxstacks.study.power import power_lines
from mlxstacks.study.run_directory import check_same

PLAN = "plan.json"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
_MOST_LISTED = 5


@dataclass(frozen=True)
class Plan:
    """All that is decided beforehand.

    arms: the control first. n, items_sha256: the items that every arm answers (`ids_sha256`).
    claims: (arm, control) of each difference that is tested; several share the error (Holm).
    thresholds: what decides, by name, with `alpha` and `least_gain` (a difference of rates).
    expected_rate, expected_discordant: of the control, and of pairs that differ; for power alone.
    data: name -> SHA-256, or fingerprint of a model. details: settings that the outcome depends on,
    as JSON.
    """

    __pydantic_config__ = STRICT

    hypothesis: Text
    arms: Annotated[tuple[Text, ...], Field(min_length=1)]
    metric: Text
    n: Annotated[int, Field(ge=1)]
    items_sha256: Sha256
    test: Text
    thresholds: dict[str, float]
    seeds: tuple[Annotated[int, Field(ge=0)], ...]
    data: dict[str, Fingerprint]
    expected_rate: Share
    expected_discordant: Share
    claims: tuple[tuple[str, str], ...] = ()
    details: dict[str, JsonValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = []
        if len(set(self.arms)) < len(self.arms):
            problems.append(f"arms {list(self.arms)} has a name twice")
        unknown = sorted({name for claim in self.claims for name in claim} - {*self.arms})
        if unknown:
            problems.append(f"claims name {unknown}; the arms are {list(self.arms)}")
        if any(arm == control for arm, control in self.claims):
            problems.append("a claim compares an arm with itself")
        if not 0 < self.thresholds.get("alpha", math.nan) < 1:
            problems.append("thresholds needs alpha, between 0 and 1")
        if not 0 <= self.thresholds.get("least_gain", math.nan) < 1:
            problems.append("thresholds needs least_gain, a difference of rates from 0 to 1")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def sha256(self) -> str:
        return json_sha256(self.as_json())

    def as_json(self) -> dict[str, Any]:
        return record_as_json(_PLANS, self)

    def power_lines(self, tests: int = 1) -> list[str]:
        """To be printed with the plan. Of several claims, and of the tests of each, every one has
        its share of alpha.
        """
        alpha, least_gain = self.thresholds["alpha"], self.thresholds["least_gain"]
        share = alpha / (tests * max(1, len(self.claims)))
        return power_lines(self.n, self.expected_rate, self.expected_discordant, least_gain, share)


_PLANS: TypeAdapter[Plan] = TypeAdapter(Plan)


def plan_from(value: Any) -> Plan:
    """A plan from parsed JSON or YAML. Raises: InputError listing every field that is wrong."""
    try:
        return record_from(_PLANS, value)
    except ValueError as error:
        raise InputError(f"not a plan: {error}") from None


def read_plan(path: Path) -> Plan:
    """Raises: InputError for a file that is missing or no plan."""
    try:
        return plan_from(read_object(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}") from None


def fix_plan(path: Path, plan: Plan, results: Collection[Path] = ()) -> str:
    """Write the plan, or find the same one written; returns its hash. Before any evaluation.

    results: files of results that lie beside it. Raises: InputError for another plan, or for
    results without one: what was seen before cannot be planned.
    """
    keep_plan(path, plan.as_json(), "results", results)
    return plan.sha256


def keep_plan(
    path: Path, plan: Mapping[str, Any], kind: str, results: Collection[Path] = ()
) -> None:
    """Write a plan of any shape where none is yet; atomic. kind: what lies beside it, in words.

    Raises: InputError naming each difference from the plan that is there, if that is damaged, or
        for results without a plan.
    """
    if not path.exists():
        existing = [str(result) for result in results if result.exists()]
        if existing:
            raise InputError(
                f"{path}: no plan is here, but results are ({_listed(existing)}); a plan must be "
                "older than its results: choose another directory"
            )
        write_json(path, plan)
        return
    try:
        before = read_object(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path}: a damaged plan: {error}") from None
    check_same(path.parent, f"{kind} with another plan", before, read_object(compact(plan)))


# --- results against their plan -------------------------------------------------------------------


@dataclass(frozen=True)
class Evidence:
    """What a result was got from. items: arm -> the ids that it answered, in any order."""

    plan_sha256: str
    items: Mapping[str, Sequence[str]]
    data: Mapping[str, str]
    seeds: Sequence[int]


def standing(plan: Plan, evidence: Evidence) -> Standing:
    """Everything in which the evidence is not of the plan; nothing is passed over."""
    reasons = []
    if evidence.plan_sha256 != plan.sha256:
        reasons.append(
            f"results of another plan ({evidence.plan_sha256[:12] or 'none'}, "
            f"not {plan.sha256[:12]})"
        )
    for name in sorted({*plan.data, *evidence.data}):
        planned, given = plan.data.get(name), evidence.data.get(name)
        if given is None:
            reasons.append(f"data {name}: not said")
        elif planned is None:
            reasons.append(f"data {name}: not planned")
        elif planned != given:
            reasons.append(f"data {name}: changed ({given[:12]}, not {planned[:12]})")
    if sorted(evidence.seeds) != sorted(plan.seeds):
        reasons.append(f"seeds {sorted(evidence.seeds)}, planned {sorted(plan.seeds)}")
    missing = [arm for arm in plan.arms if arm not in evidence.items]
    if missing:
        reasons.append(f"missing arm: {_listed(missing)}")
    unplanned = [arm for arm in evidence.items if arm not in plan.arms]
    if unplanned:
        reasons.append(f"arm that was not planned: {_listed(unplanned)}")
    # Arms with the same fault are told together: of fifteen arms a sentence each is not read.
    faults: dict[str, list[str]] = {}
    for arm, ids in evidence.items.items():
        twice = [name for name, count in Counter(ids).items() if count > 1]
        if twice:
            fault = f"items answered twice: {_listed(twice)}"
        elif len(ids) < plan.n:
            fault = f"a subset, {len(ids)} of {plan.n} planned items"
        elif ids_sha256(ids) != plan.items_sha256:
            fault = f"other items than planned ({len(ids)}, planned {plan.n})"
        else:
            continue
        faults.setdefault(fault, []).append(arm)
    for fault, arms in faults.items():
        every = len(arms) > 1 and len(arms) == len(evidence.items)
        reasons.append(f"{'every arm' if every else _listed(arms)}: {fault}")
    if len({frozenset(ids) for ids in evidence.items.values()}) > 1:
        counts = ", ".join(f"{arm} {len(ids)}" for arm, ids in evidence.items.items())
        reasons.append(f"arms answered different items ({counts})")
    return Standing.of(reasons)


def ids_sha256(ids: Iterable[str]) -> str:
    """Hash of a set of item ids, whatever their order. Raises: InputError for an id twice."""
    ordered = sorted(ids)
    twice = [name for name, count in Counter(ordered).items() if count > 1]
    if twice:
        raise InputError(f"items with the same id: {_listed(twice)}; every item needs its own")
    return json_sha256(ordered)


def rows_sha256(rows: Iterable[Any]) -> str:
    """Hash of a data set's rows (JSON values) in their order. Raises: ValueError for no JSON."""
    return json_sha256([json_sha256(row) for row in rows])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return f"{', '.join(names[:_MOST_LISTED])}{more}"

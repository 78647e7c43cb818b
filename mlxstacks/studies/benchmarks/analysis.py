"""From the answers of the arms to scores and paired differences. No model is needed for it.

A likelihood item is right when one candidate alone has the highest score and it is the gold one,
under each normalisation; what a generated answer is worth, the task's own rule says
(Brainstacks). How that answer was found and what decided are kept: a model that
never boxes shows in `rule`, a machine without math-verify in `how`. Arms are compared item by item,
on the items that both were graded on. Figures are plain JSON, as `data` of the result holds them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxstacks.grading import extract
from mlxstacks.grading.equivalence import Symbolic, equivalent, installed, symbolic_checker
from mlxstacks.grading.programs import LIMITS, code_of, passes
from mlxstacks.sandbox.run import SandboxLimits
from mlxstacks.stats import (
    Interval,
    holm,
    mcnemar_exact_test,
    paired_interval,
    wilson_interval,
)
from mlxstacks.studies.benchmarks.settings import ARMS, NORMALISATIONS, Normalisation
from mlxstacks.studies.benchmarks.tasks import BenchItem, Replied, Scored, Task

NO_ANSWER = "no answer"
CODE_NOT_RUN = "not run: programs need allow_code"


@dataclass(frozen=True, slots=True)
class GradingTools:
    """symbolic: algebra on two answers, None where it is not installed. allow_code: consent to run
    programs that a model wrote, in the sandbox, within `limits`.
    """

    symbolic: Symbolic | None = None
    allow_code: bool = False
    limits: SandboxLimits = LIMITS

    def as_json(self) -> dict[str, Any]:
        """For the report: what there was, and how often algebra was asked so far."""
        return {
            "math_verify": installed() if self.symbolic else None,
            "symbolic_asked": getattr(self.symbolic, "asked", 0),
            "symbolic_undecided": getattr(self.symbolic, "undecided", 0),
            "allow_code": self.allow_code,
        }


@dataclass(frozen=True, slots=True)
class Grade:
    """correct: None where the answer was not graded. value: what was taken out of the text, None
    where no rule found anything, which is wrong; rule: the one that found it.

    how: what decided. "no answer"; of numbers, integers, letters "equal" or "unequal"; of boxes as
    `equivalent`; of programs the sandbox's word ("finished", "failed", "out of time", ...) or why
    it was not run.
    """

    correct: bool | None
    value: str | None
    rule: str
    how: str


@contextmanager
def grading_tools(allow_code: bool = False, seconds: float = 10.0) -> Iterator[GradingTools]:
    """The tools there are on this machine. seconds: for one question of algebra."""
    with symbolic_checker(seconds) as symbolic:
        yield GradingTools(symbolic, allow_code)


def grade(task: Task, item: BenchItem, text: str, tools: GradingTools) -> Grade:
    """Law: grading the same text twice gives the same grade.

    Raises: ValueError for a task whose answers are not generated; SandboxError where a program may
        be run and the sandbox is not to be had.
    """
    gold = str(item.gold)
    match task.grader:
        case "number":
            extracted = extract.number(text)
            equal = extract.numbers_agree(extracted.value, gold)
        case "integer":
            extracted = extract.integer(text)
            equal = extracted.value == gold
        case "letter":
            letters = "".join(letter.strip() for letter in item.letters)
            extracted = extract.final_letter(text, letters)
            equal = extracted.value == gold
        case "boxed":
            extracted = extract.boxed(text)
            if extracted.value is not None:
                equal, how = equivalent(gold, extracted.value, tools.symbolic)
                return Grade(equal, extracted.value, extracted.rule, how)
            equal = False
        case "code":
            extracted = code_of(text)
            if not tools.allow_code:
                return Grade(None, extracted.value, extracted.rule, CODE_NOT_RUN)
            verdict = passes(
                item.extra["prompt"], text, item.extra["test"], item.extra["entry_point"],
                allowed=True, limits=tools.limits,
            )  # fmt: skip
            how = NO_ANSWER if verdict.result is None else verdict.result.status
            return Grade(verdict.passed, extracted.value, extracted.rule, how)
        case None:
            raise ValueError(f"{task.name} is scored by likelihood; there is no text to grade")
    how = NO_ANSWER if extracted.value is None else "equal" if equal else "unequal"
    return Grade(equal, extracted.value, extracted.rule, how)


# --- scores and paired differences ----------------------------------------------------------------

Figures = dict[str, Any]
Claim = tuple[str, str]
"""(arm, control)"""
EVEN = "no difference shown"
# Two candidates of the same text may differ in last bits, by their places in a batch.
_TIE = 1e-6
_CONTROLS = ("base", "ungated", "random")
# Of a task of the harness with several metrics the first of these is tested, else its own first.
_HARNESS_METRICS = ("acc", "exact_match", "pass@1")


@dataclass(frozen=True, slots=True)
class Given:
    """An arm's answer to one item. seconds: its share of its batch's wall time."""

    item_id: str
    answer: Scored | Replied
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """One item of one arm. correct: under the primary normalisation; None: not graded.

    by: normalisation -> right or wrong. letter, reference: by letters, and without the first token
    of each candidate; None where that was not asked. cut: the reply ended at max_tokens.
    """

    item_id: str
    stratum: str
    correct: bool | None
    value: str | None
    rule: str
    how: str = ""
    by: Mapping[Normalisation, bool] = field(default_factory=dict)
    tie: bool = False
    letter: bool | None = None
    reference: bool | None = None
    truncated: bool = False
    cut: bool = False
    active_domains: int = 0
    seconds: float = 0.0


Outcomes = Mapping[str, Sequence[Outcome]]
"""Arm -> its outcomes, in the order of the items."""


def pick(scored: Scored, normalisation: Normalisation) -> int | None:
    """The candidate with the highest score; None where two or more share it.

    Law: adding a constant to all sums changes no pick by `sum`.
    """
    lengths = {
        "sum": (1,) * len(scored.sums), "token": scored.tokens, "character": scored.characters,
    }[normalisation]  # fmt: skip
    values = [value / max(length, 1) for value, length in zip(scored.sums, lengths, strict=True)]
    best = max(values)
    near = _TIE * max(1.0, abs(best))
    top = [place for place, value in enumerate(values) if best - value <= near]
    return top[0] if len(top) == 1 else None


def likelihood_outcomes(
    items: Sequence[BenchItem],
    texts: Sequence[Given],
    letters: Mapping[str, Given],
    reference: Mapping[str, Given],
    primary: Normalisation,
) -> list[Outcome]:
    """letters, reference: by item id, for the items that were asked so as well."""
    outcomes = []
    for item, given in zip(items, texts, strict=True):
        scored, letter = _scored(given), letters.get(item.item_id)
        picks = {name: _single(item, pick(scored, name)) for name in NORMALISATIONS}
        chosen = picks[primary]
        outcomes.append(
            Outcome(
                item.item_id, item.stratum, chosen == item.gold,
                None if chosen is None else str(chosen),
                "tie" if chosen is None else "likelihood",
                by={name: place == item.gold for name, place in picks.items()},
                tie=chosen is None,
                # A letter is a token in most vocabularies; where not, the sum is what counts.
                letter=None if letter is None else pick(_scored(letter), "sum") == item.gold,
                reference=_right_by_reference(item, reference.get(item.item_id)),
                truncated=scored.truncated,
                active_domains=_active(scored.weights),
                seconds=given.seconds + (letter.seconds if letter else 0.0),
            )
        )  # fmt: skip
    return outcomes


def _scored(given: Given) -> Scored:
    assert isinstance(given.answer, Scored)
    return given.answer


def _single(item: BenchItem, chosen: int | None) -> int | None:
    """None where the same text is there twice: batches alone, and rounding, would choose."""
    if chosen is not None and item.candidates.count(item.candidates[chosen]) > 1:
        return None
    return chosen


def _right_by_reference(item: BenchItem, given: Given | None) -> bool | None:
    """By the old rule: the mean over tokens, and of equal ones the first."""
    if given is None:
        return None
    scored = _scored(given)
    # What is left of a one-token candidate is nothing, and its score 0: the best there is.
    means = [
        value / length if length else 0.0
        for value, length in zip(scored.sums, scored.tokens, strict=True)
    ]
    return means.index(max(means)) == item.gold


def reply_outcomes(
    items: Sequence[BenchItem],
    replies: Sequence[Given],
    grade: Callable[[BenchItem, str], Grade],
) -> list[Outcome]:
    """Each generated answer graded by `grade(item, text)`."""
    outcomes = []
    for item, given in zip(items, replies, strict=True):
        reply = given.answer
        assert isinstance(reply, Replied)
        graded = grade(item, reply.text)
        outcomes.append(
            Outcome(
                item.item_id, item.stratum, graded.correct, graded.value, graded.rule, graded.how,
                truncated=reply.truncated, cut=reply.finish == "length",
                active_domains=_active(reply.weights), seconds=given.seconds,
            )
        )  # fmt: skip
    return outcomes


def _active(weights: Mapping[str, float]) -> int:
    return sum(weight > 0 for weight in weights.values())


def rate(marks: Sequence[bool]) -> Figures | None:
    """n, right, score and Wilson's 95% interval; None for no marks: nothing was graded, which is
    not a score of 0.
    """
    n, right = len(marks), sum(marks)
    if not n:
        return None
    interval = wilson_interval(right, n).as_json()
    return {"n": n, "right": right, "score": right / n, "interval": interval}


def arm_score(arm: str, outcomes: Sequence[Outcome]) -> Figures:
    """One arm on one task: `rate` by the primary normalisation, or n and a score of None.

    ties count as wrong. unparsed: replies in which no rule found an answer, wrong as well. rules,
    how: how often each rule found the answer, and each decided that it is right.
    Law: the order of the outcomes changes nothing. Raises: ValueError for no outcomes.
    """
    if not outcomes:
        raise ValueError(f"{arm}: no items to score")
    count = len(outcomes)
    normalisations = {
        name: rate([o.by[name] for o in outcomes if name in o.by]) for name in NORMALISATIONS
    }
    rules = _counts(o.rule for o in outcomes)
    unparsed = sum(o.value is None and not o.tie for o in outcomes)
    strata: dict[str, Figures] = {}
    for o in outcomes:
        if o.stratum and o.correct is not None:
            stratum = strata.setdefault(o.stratum, {"n": 0, "right": 0})
            stratum["n"] += 1
            stratum["right"] += o.correct
    return {
        **(_rate_of(o.correct for o in outcomes) or {"n": count, "score": None}),
        "items": count,
        "normalisations": {name: figures for name, figures in normalisations.items() if figures},
        "letters": _rate_of(o.letter for o in outcomes),
        "reference_offset": _rate_of(o.reference for o in outcomes),
        "ties": sum(o.tie for o in outcomes),
        "unparsed": unparsed,
        "parse_failure_rate": unparsed / count,
        "boxed_rate": rules.get("boxed", 0) / count,
        "rules": rules,
        "how": _counts(o.how for o in outcomes if o.how),
        "prompts_truncated": sum(o.truncated for o in outcomes),
        "cut_at_max_tokens": sum(o.cut for o in outcomes),
        "mean_active_domains": sum(o.active_domains for o in outcomes) / count,
        "answered_without_domains": sum(not o.active_domains for o in outcomes),
        "seconds": round(math.fsum(o.seconds for o in outcomes), 3),
        "strata": dict(sorted(strata.items())),
    }


def _rate_of(marks: Iterable[bool | None]) -> Figures | None:
    return rate([mark for mark in marks if mark is not None])


def _counts(names: Iterable[str]) -> dict[str, int]:
    """The most frequent first, equal ones by name."""
    return dict(sorted(Counter(names).items(), key=lambda pair: (-pair[1], pair[0])))


def claims_of(arms: Sequence[str]) -> tuple[Claim, ...]:
    """(arm, control), routed first: each arm against base, a choice of stacks against all of them
    and against random ones, a fused adapter against the same one unfused.
    """
    choosing = ("routed", "oracle")
    claims = []
    for arm in sorted(arms, key=(*choosing, *ARMS).index):
        controls = _CONTROLS if arm in choosing else ("base", "adapter" if arm == "fused" else "")
        claims += [(arm, control) for control in controls if control != arm and control in arms]
    return tuple(claims)


def compare(
    outcomes: Mapping[str, Outcomes], claims: Mapping[str, Sequence[Claim]], alpha: float
) -> list[Figures]:
    """Every (arm, control) of every task by McNemar's exact test, as one family: p_adjusted is by
    Holm's rule, and so is the label; in_words says where the test alone would have said more.

    Claims of which an arm has nothing graded are left out. both_right: items that both have right.
    Laws: the order of the items changes nothing; swapping arm and control turns the sign of
    difference and interval and keeps p.
    Raises: ValueError for arms that answered different items: such pairs are no pairs.
    """
    family: list[Figures] = []
    for task, arms in outcomes.items():
        for arm, control in claims[task]:
            pairs = _pairs(task, arms, arm, control)
            if not pairs:
                continue
            n, both = len(pairs), sum(a and b for a, b in pairs)
            gained = sum(a and not b for a, b in pairs)
            lost = sum(b and not a for a, b in pairs)
            family.append({
                "task": task, "arm": arm, "control": control, "n": n, "both_right": both,
                "difference": (gained - lost) / n,
                "interval": paired_interval(both, gained, lost, n).as_json(),
                "mcnemar": asdict(mcnemar_exact_test(gained, lost)),
            })  # fmt: skip
    p_values = holm([pair["mcnemar"]["p_value"] for pair in family])
    for pair, p in zip(family, p_values, strict=True):
        counts = p < alpha and pair["difference"] != 0
        label = ("better" if pair["difference"] > 0 else "worse") if counts else EVEN
        alone = label == EVEN and pair["mcnemar"]["p_value"] < alpha
        pair |= {"p_adjusted": p, "label": label, "in_words": _in_words(label, alone)}
    return family


def _in_words(label: str, alone: bool) -> str:
    return f"{label} (alone it would be)" if alone else label


def _pairs(task: str, outcomes: Outcomes, arm: str, control: str) -> list[tuple[bool, bool]]:
    if arm not in outcomes or control not in outcomes:
        return []
    of_arm, of_control = ({o.item_id: o.correct for o in outcomes[name]} for name in (arm, control))
    if of_arm.keys() != of_control.keys():
        raise ValueError(f"{task}: {arm} and {control} answered different items")
    return [
        (mark, other)
        for item_id, mark in of_arm.items()
        if mark is not None and (other := of_control[item_id]) is not None
    ]


def mean_of(values: Sequence[float], intervals: Sequence[Mapping[str, float]]) -> Figures | None:
    """tasks, mean and interval of independent estimates, each task with the same weight; the
    interval is from theirs (MOVER: Zou and Donner 2008).

    It speaks of these tasks, not of others one might have asked. None for no values.
    """
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    down, up = (
        math.sqrt(
            math.fsum(
                (interval[end] - v) ** 2 for v, interval in zip(values, intervals, strict=True)
            )
        )
        / count
        for end in ("low", "high")
    )
    interval = Interval(mean - down, mean + up, intervals[0]["confidence"])
    return {"tasks": count, "mean": mean, "interval": interval.as_json()}


def mean_differences(comparisons: Sequence[Figures], alpha: float) -> list[Figures]:
    """An arm less its control, mean over the tasks that both have a score on, one for each (arm,
    control) in the order in which they come first.

    judged_by_interval decides: wider, so that all pairs' hold together (Bonferroni); the chance
    that any of them is labelled although there is no difference is alpha. better, worse: tasks
    whose difference counts in the family of all tests.
    """
    means = []
    claims = dict.fromkeys((pair["arm"], pair["control"]) for pair in comparisons)
    confidence = 1 - alpha / max(1, len(claims))
    for arm, control in claims:
        pairs = [pair for pair in comparisons if (pair["arm"], pair["control"]) == (arm, control)]
        differences = [pair["difference"] for pair in pairs]
        wide = [
            paired_interval(
                pair["both_right"], pair["mcnemar"]["gained"], pair["mcnemar"]["lost"], pair["n"],
                confidence,
            ).as_json()
            for pair in pairs
        ]  # fmt: skip
        mean = mean_of(differences, [pair["interval"] for pair in pairs])
        judged = mean_of(differences, wide)
        assert mean is not None
        assert judged is not None
        label = "better" if mean["mean"] > 0 else "worse"
        if _holds_zero(judged["interval"]):
            label = EVEN
        means.append({
            "arm": arm, "control": control, **mean, "judged_by_interval": judged["interval"],
            **{name: [pair["task"] for pair in pairs if pair["label"] == name]
               for name in ("better", "worse")},
            "label": label,
            "in_words": _in_words(label, label == EVEN and not _holds_zero(mean["interval"])),
        })  # fmt: skip
    return means


def _holds_zero(interval: Mapping[str, float]) -> bool:
    return interval["low"] <= 0 <= interval["high"]


def arm_means(scores: Mapping[str, Mapping[str, Figures]]) -> dict[str, Figures]:
    """scores: task -> arm -> score. Arm -> its mean, over the tasks that every arm has a score on.

    Law: a task that one arm has no score on is in no mean, so that means can be compared.
    """
    arms = dict.fromkeys(arm for of_task in scores.values() for arm in of_task)
    common = [
        of_task
        for of_task in scores.values()
        if all(arm in of_task and of_task[arm]["score"] is not None for arm in arms)
    ]
    means = {
        arm: mean_of([of[arm]["score"] for of in common], [of[arm]["interval"] for of in common])
        for arm in arms
    }
    return {arm: mean for arm, mean in means.items() if mean is not None}


def harness_figures(results: Mapping[str, Any], alpha: float) -> Figures:
    """Task -> metric that is tested, each arm's rate with its interval and all metrics, pairs.

    They are scored by the harness's own rules and tested as a family of their own: a task of the
    same data is in our table too, and would count twice. results: arm -> what `run_harness` gave.
    """
    if not results:
        return {}
    arms = list(results)
    tasks = {arm: results[arm]["arms"][arm]["tasks"] for arm in arms}
    names = list(tasks[arms[0]])
    outcomes = {name: dict(_harness_outcomes(name, tasks)) for name in names}
    family = compare(outcomes, dict.fromkeys(names, claims_of(arms)), alpha)
    figures = {}
    for name in names:
        of_arms = {}
        for arm in arms:
            result = tasks[arm][name]
            marks = _rate_of(o.correct for o in outcomes[name].get(arm, ()))
            of_arms[arm] = {
                "metrics": result["metrics"], "ties": result["ties"],
                "seconds": round(result["seconds"], 3), **(marks or {}),
            }  # fmt: skip
        figures[name] = {
            "metric": _tested_metric(tasks[arms[0]][name]["samples"]),
            "arms": of_arms,
            "comparisons": [pair for pair in family if pair["task"] == name],
        }
    return {"lm_eval": results[arms[0]]["lm_eval"], "tests": len(family), "tasks": figures}


def _harness_outcomes(name: str, tasks: Mapping[str, Any]) -> Iterator[tuple[str, list[Outcome]]]:
    """Right or wrong of each item by the tested metric; nothing where it is neither."""
    for arm, of_arm in tasks.items():
        samples = of_arm[name]["samples"]
        metric = _tested_metric(samples)
        first = samples[0]["filter"] if samples else None
        values = [(s, s["metrics"].get(metric)) for s in samples if s["filter"] == first]
        if values and all(value in (0, 1) for _, value in values):
            yield (
                arm,
                [
                    Outcome(str(s["doc_id"]), "", bool(value), "", f"harness {metric}")
                    for s, value in values
                ],
            )


def _tested_metric(samples: Sequence[Mapping[str, Any]]) -> str | None:
    names = list(samples[0]["metrics"]) if samples else []
    return next((name for name in _HARNESS_METRICS if name in names), names[0] if names else None)

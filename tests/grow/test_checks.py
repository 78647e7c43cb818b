"""What `mlxstacks grow` holds a new domain to: each condition alone refuses it, and says why.

Run: pytest tests/grow/test_checks.py
"""

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from mlxstacks.files.manifest import DomainRecord, Manifest
from mlxstacks.grow import checks
from mlxstacks.grow.checks import Check, dealt_anew
from mlxstacks.grow.report import concluded
from mlxstacks.grow.settings import GrowSettings
from mlxstacks.training.loop import BestSnapshot
from mlxstacks.training.settings import SnapshotSettings
from tests.files.store_cases import BASE

SETTINGS = GrowSettings(store_path="store", domain="gamma")
GOOD = {"rate": 0.99, "n": 100}


def refusal(found: Sequence[Check]) -> str | None:
    """Why a run ends that found this; None where it goes on."""
    result = concluded(
        SETTINGS, {"events": 50, "groups": []}, {"gate": [asdict(each) for each in found]}
    )
    assert (result.outcome == "gamma refused") == (result.failed_gate is not None)
    return result.failed_gate


def assert_says(said: str | None, words: str | None) -> None:
    """One condition alone fails, with these words; or none."""
    assert (said is None) == (words is None), said
    assert said is None or ("; gate: " not in said and re.search(str(words), said)), said


def with_losses(
    monkeypatch: pytest.MonkeyPatch, found: list[Any], own: Sequence[float] = ()
) -> Any:
    """What is served, with these losses of its rows; own: those of the new stack."""
    monkeypatch.setattr(checks, "rules_for", lambda *_: None)
    monkeypatch.setattr(checks, "encoded", lambda pairs, _: pairs)
    losses = SimpleNamespace(search=lambda *_: found, of=lambda _: own)
    monkeypatch.setattr(checks, "RowLosses", lambda *_, **__: losses)
    return SimpleNamespace(domains=("alpha", "beta"))


@pytest.mark.parametrize(
    ("base", "best", "own", "dealt", "words"),
    [
        (2.0, 1.06, 1.0, 1.5, None),
        (1.04, 1.5, 1.0, 1.5, r"gain over the base: \+0.040 .* 0.05 nats per token or more$"),
        (2.0, 1.04, 1.0, 1.5, r"^gate: gain over present stacks: \+0.040 .* 0.05 nats"),
        (2.0, 1.06, 1.0, 1.0, r"^gate: answers belong to their prompts: \+0.000 .* above 0$"),
    ],
)
def test_a_stack_that_gains_too_little_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    base: float, best: float, own: float, dealt: float, words: str | None,
) -> None:  # fmt: skip
    found = [SimpleNamespace(base_loss=base, best_loss=best)] * 8
    served = with_losses(monkeypatch, found, [own] * 8 + [dealt] * 32)
    pairs = [(f"{number}", f"{number}") for number in range(8)]
    header: Any = None
    said = refusal(checks.is_learned(SETTINGS, served, header, "gamma", pairs, lambda _: None))
    assert_says(said, words)


BEFORE = {"alpha": 1.0, "beta": 2.0}


def manifest(prefix: dict[str, float], *more: DomainRecord) -> Manifest:
    domains = [DomainRecord(name, True, (), final_loss=BEFORE[name]) for name in BEFORE]
    last = more[-1].name if more else "beta"
    matrix: Any = {"prefix": {last: prefix}}
    return Manifest("tiny", BASE, domains=(*domains, *more), matrix=matrix)


@pytest.mark.parametrize(
    ("changes", "capacity", "words"),
    [
        ({}, 0.49, None),
        ({"alpha": 1.001}, 0.0, None),  # rounding
        ({"beta": 2.003}, 0.0, r"earlier domains: moved by 0.003 nats at most \(beta\), .* unch"),
        ({"alpha": 0.9}, 0.0, r"earlier domains: moved by 0.1 nats at most \(alpha\)"),
        ({}, 0.5, r"protected directions: 50% of a projection at most, needed is below 50%$"),
    ],
)
def test_harm_to_earlier_domains_is_refused(
    changes: dict[str, float], capacity: float, words: str | None
) -> None:
    new = DomainRecord("gamma", True, (), protected={"capacity_used_highest": capacity})
    after = manifest(BEFORE | changes | {"gamma": 0.5}, new)
    assert_says(refusal(checks.leaves_others_alone(manifest(BEFORE), after, new)), words)


def trained(*losses: float, patience: int | None = None, **changes: Any) -> dict[str, Any]:
    """The record of a round of which these are the validation losses, as a result has it."""
    settings = SnapshotSettings(spike_threshold=0.1, patience=patience)
    best = BestSnapshot(math.inf, 0, {})
    ended = [best.observe(loss, step, {}, settings) for step, loss in enumerate(losses)][-1]
    rows = [{"validation_loss": loss if math.isfinite(loss) else None} for loss in losses]
    return {"number": 1, "kept": True, "ended": ended, "history": [{"loss": 1.0}],
            "validation": rows} | changes  # fmt: skip


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (trained(3.0, 2.0, 1.0), None),
        (trained(3.0, 1.0, 1.05, patience=1), None),
        (trained(3.0, 1.0, 1.2, kept=False), None),  # its stack is nowhere
        (trained(3.0, 1.0, 1.2), r"training: round 1: .* 1.2000 is more than 0.1 above its best"),
        (
            trained(3.0, 1.0, math.nan),
            r"training: round 1: the validation loss is nan \(fewer .*, needed",
        ),
        (trained(3.0, 2.0, history=[{"loss": 1.0}, {"grad_norm": None}]), r"gave no number"),
    ],
)
def test_a_training_that_a_guard_ended_is_refused(
    record: dict[str, Any], words: str | None
) -> None:
    assert_says(refusal([checks.was_trained_cleanly([trained(3.0, 1.0), record])]), words)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({}, None),
        ({"single_top1": 0.985, "mixed_set": 0.985, "routed": 0.009}, None),
        ({"single_top1": 0.975}, r"right domain first: 99.0% before, 97.5% now, of 100, .* 1% or"),
        ({"mixed_set": 0.975}, r"mixed prompts: 99.0% before, 97.5% now, of 100, .* fall of 1% or"),
        ({"routed": 0.011}, r"loss of old domains: \+0.0110 nats per token, .* rise of 0.01 or l"),
        ({"routed": math.nan}, r"loss of old domains: \+nan nats"),
    ],
)
def test_a_router_that_is_worse_on_old_domains_is_refused(
    now: dict[str, float], words: str | None
) -> None:
    rates = {
        key: (GOOD, {**GOOD, "rate": now.get(key, 0.99)}) for key in ("single_top1", "mixed_set")
    }
    routed = {"alpha": {"value": now.get("routed", 0.0)}, "others": {"value": 9.0}}
    compared = {**rates, "losses": {"routed": routed}}
    evaluated = {"domains": ["alpha"], "routers": [{}, {"to_first": compared}]}
    assert_says(refusal(checks.is_routed_safely(SETTINGS, evaluated)), words)


def test_a_router_that_nothing_could_be_asked_of_is_refused() -> None:
    evaluated = {"domains": ["alpha"], "routers": [{}, {"to_first": None}]}
    said = refusal(checks.is_routed_safely(SETTINGS, evaluated))
    assert_says(said, "old domains: no prompt with an answer")


@pytest.mark.parametrize(
    ("left", "words"), [(0.9, None), (0.45, "no present stack answers them: 0%")]
)
def test_a_little_help_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, left: float, words: str | None
) -> None:
    """Known stacks take half off their rows' losses; of the new rows' lower losses they leave
    `left`, more than 0.01 nats less than the base does.
    """
    found = [SimpleNamespace(base_loss=2.0, best_loss=1.0)] * 8
    found += [SimpleNamespace(base_loss=0.5, best_loss=0.5 * left)] * 8
    served = with_losses(monkeypatch, found)
    rows: Any = [None] * 8
    header: Any = None
    check = checks.is_unserved(SETTINGS, served, header, rows, rows, lambda _: None)
    assert_says(refusal([check]), words)


def test_answers_are_dealt_to_other_prompts() -> None:
    pairs = [("a", "1"), ("b", "1"), ("c", "2"), ("d", "3")]
    assert dealt_anew(pairs) == [("a", "2"), ("b", "2"), ("c", "3"), ("d", "1")]
    assert dealt_anew(pairs, 1) == [("a", "3"), ("b", "3"), ("c", "1"), ("d", "1")]
    assert dealt_anew([("a", "1"), ("b", "1")]) == [("a", "1"), ("b", "1")]

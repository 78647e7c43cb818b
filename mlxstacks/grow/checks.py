"""What a new domain is held to: before it is trained, after, and once it is routed to.

Each check gives the figures that it decides by, so that a reader may decide otherwise. Brainstacks
proposes the loop without rules; all thresholds here are ours.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxstacks.data import Row, encode_pair
from mlxstacks.files.manifest import DomainRecord, Manifest
from mlxstacks.files.router_file import RouterHeader
from mlxstacks.files.store import Store
from mlxstacks.grow.settings import GrowSettings
from mlxstacks.routing.gaps import GapEvent, is_loss_gap
from mlxstacks.routing.outcomes import RouterExample
from mlxstacks.routing.settings import LabelledSource, OutcomeSettings
from mlxstacks.stats import mean_interval
from mlxstacks.studies.route.data import read_examples, template_of
from mlxstacks.studies.route.served import RowLosses, Served, rules_for
from mlxstacks.studies.route.teacher import THRESHOLD
from mlxstacks.studies.stack.setup import stored_prefix, with_other_company
from mlxstacks.training.continual import ARRIVAL_TOLERANCE, WARN_AT_CAPACITY
from mlxstacks.training.loop import is_fault

MOST_TOKENS = 256
_OF_KNOWN = 0.95
_DEALS = 4
# Told how many more losses there are.
OnLosses = Callable[[int], None]


@dataclass(frozen=True)
class Check:
    """One condition. found, needed: figures, in words."""

    name: str
    passed: bool
    found: str
    needed: str


def examples_of(
    store: Store, tokenizer: Any, sources: Sequence[LabelledSource], cap: int, seed: int
) -> list[RouterExample]:
    """At most `cap` prompts a label, with answers, that no stack of the store was trained on."""
    about = OutcomeSettings(sources=tuple(sources), single_cap=cap, mixed_cap=cap, seed=seed)
    found = read_examples(about, store, tokenizer)
    return [e for e in found if e.answer is not None and not e.trained_on]


def encoded(pairs: Sequence[tuple[str, str]], served: Served) -> list[Row]:
    """Prompts and answers as tokens; pairs of which no answer token is left are left out."""
    template = template_of(None, served.store)
    rows = (encode_pair(p, a, served.tokenizer, template, MOST_TOKENS) for p, a in pairs)
    return [row for row in rows if row is not None]


def are_the_gaps(
    settings: GrowSettings, rows: Sequence[np.ndarray], events: Sequence[GapEvent]
) -> Check:
    """Whether as many gaps as a domain is proposed for are like rows of it: as near to one of them
    as 95% of them are to another. rows: features (D,) of their prompts.

    Groups of gaps are not asked: features of small models group prompts by their wording.
    """
    points = np.stack([*rows, *(e.feature for e in events if e.feature is not None)])
    points = points - points.mean(axis=0)
    points = points / np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    own, gaps = points[: len(rows)], points[len(rows) :]
    among = own @ own.T
    np.fill_diagonal(among, -1.0)
    nearest = (gaps @ own.T).max(axis=1)
    alike = int((nearest >= np.quantile(among.max(axis=1), 1 - _OF_KNOWN)).sum())
    least = settings.minimum_events
    return Check(
        "gaps like its rows", alike >= least, f"{alike} of {len(gaps)}", f"{least} or more"
    )


def is_unserved(
    settings: GrowSettings,
    served: Served,
    header: RouterHeader,
    known: Sequence[Row],
    sample: Sequence[Row],
    on_losses: OnLosses,
) -> Check:
    """Whether no set of the store's domains answers the sample well.

    Of a row that holds where no set lowers the base's loss by 0.01 nats (E6), or the best set takes
    off a smaller share of it than of 95% of held-out rows of known domains. The second is ours:
    nearly any stack helps a little, on a base that is sure and wrong and on a real one too, and the
    first then sees no gap, or half of it. A loss by itself says nothing: code is easier to predict
    than medicine, with or without a stack.
    """
    losses = RowLosses(served, [*known, *sample], on_batch=on_losses)
    rules = rules_for(header, served.domains, THRESHOLD)
    found = losses.search(rules, range(len(known) + len(sample)))
    gains = [1 - f.best_loss / max(f.base_loss, 1e-9) for f in found]
    limit = float(np.quantile(gains[: len(known)], 1 - _OF_KNOWN))
    ours = found[len(known) :]
    unhelped = [is_loss_gap(f.base_loss, f.best_loss, THRESHOLD) for f in ours]
    less = [gain < limit for gain in gains[len(known) :]]
    share = float(np.mean([a or b for a, b in zip(unhelped, less, strict=True)]))
    return Check(
        "no present stack answers them", share >= settings.confirm_share,
        f"{share:.0%} of {len(ours)} rows ({np.mean(unhelped):.0%} that no stack helps with; the "
        f"best takes {np.median(gains[len(known) :]):.0%} off the loss of the median row, and "
        f"{limit:.0%} or more off 95% of {len(known)} known rows)",
        f"{settings.confirm_share:.0%} or more",
    )  # fmt: skip


def is_learned(
    settings: GrowSettings,
    served: Served,
    header: RouterHeader,
    name: str,
    pairs: Sequence[tuple[str, str]],
    on_losses: OnLosses,
) -> list[Check]:
    """Whether the new stack lowers the loss of held-out rows, below what any present stack makes of
    them, and by what an answer has to do with its prompt: with the answers dealt out anew the loss
    must be higher. A stack that learned the form alone, as of random labels, fails there, however
    much it gains (E6 asks for the gain alone, which such a stack has).
    """
    pairs = [pair for pair in pairs if encoded([pair], served)]
    count = len(pairs)
    if count < 2:
        found = f"{count} with an answer within {MOST_TOKENS} tokens"
        return [Check("held-out rows", False, found, "2 or more")]
    dealt = [pair for turn in range(_DEALS) for pair in dealt_anew(pairs, turn)]
    rows = encoded([*pairs, *dealt], served)
    losses = RowLosses(served, rows, on_batch=on_losses)
    others = tuple(domain for domain in served.domains if domain != name)
    best = losses.search(rules_for(header, others, THRESHOLD), range(count))
    own = losses.of([(i, {name: 1.0}) for i in range(len(rows))])
    gain = mean_interval([f.base_loss - o for f, o in zip(best, own[:count], strict=True)])
    over = mean_interval([f.best_loss - o for f, o in zip(best, own[:count], strict=True)])
    others_answers = np.reshape(own[count:], (_DEALS, count)).mean(axis=0)
    bound = mean_interval((others_answers - own[:count]).tolist())
    needed = f"{settings.min_gain} nats per token or more"
    return [
        Check("gain over the base", gain.mean >= settings.min_gain, _in_words(gain), needed),
        Check("gain over present stacks", over.mean >= settings.min_gain, _in_words(over), needed),
        Check(
            "answers belong to their prompts", bound.low is not None and bound.low > 0,
            f"{_in_words(bound)} more with the answers dealt anew", "above 0",
        ),
    ]  # fmt: skip


def dealt_anew(pairs: Sequence[tuple[str, str]], turn: int = 0) -> list[tuple[str, str]]:
    """The prompts, each with the answer of another that differs from its own: the next one in a
    circle, the second next one (turn 1), ...; its own where there is none. Nearly every answer is
    dealt once, so answers that are likely by themselves weigh alike on both sides.
    """
    answers = [answer for _, answer in pairs]
    dealt = []
    for i, (prompt, answer) in enumerate(pairs):
        others = [other for other in (*answers[i + 1 :], *answers[:i]) if other != answer]
        dealt.append((prompt, others[turn % len(others)] if others else answer))
    return dealt


def leaves_others_alone(before: Manifest, after: Manifest, record: DomainRecord) -> list[Check]:
    """Whether every earlier domain has the loss with its own prefix that it had, and room is left
    for another domain.
    """
    was, now = stored_prefix(before), after.matrix["prefix"][record.name]
    # One that is served with other stacks before it than it was trained on has another loss anyway.
    others = {*was} - with_other_company(before) - {record.name}
    moved = {name: abs(now[name] - was[name]) for name in others if name in now}
    worst = max(sorted(moved), key=lambda name: moved[name], default="")
    used = float((record.protected or {}).get("capacity_used_highest", 0.0))  # type: ignore[arg-type]
    return [
        Check(
            "losses of earlier domains", max(moved.values(), default=0.0) <= ARRIVAL_TOLERANCE,
            f"moved by {moved[worst]:.2g} nats at most ({worst})" if worst else
            "not measured: none can be compared",
            f"unchanged (rounding: {ARRIVAL_TOLERANCE})",
        ),
        Check(
            "protected directions", used < WARN_AT_CAPACITY, f"{used:.0%} of a projection at most",
            f"below {WARN_AT_CAPACITY:.0%}",
        ),
    ]  # fmt: skip


def was_trained_cleanly(rounds: Sequence[Mapping[str, Any]]) -> Check:
    """Whether no guard ended a round whose stack was kept, and no number of it was NaN. rounds: the
    `RoundRecord`s as JSON has them, NaN as null.
    """
    faults = []
    for record in (each for each in rounds if each["kept"]):
        numbers = [v for row in (*record["history"], *record["validation"]) for v in row.values()]
        if is_fault(record["ended"]):
            faults.append(f"round {record['number']}: {record['ended']}")
        elif None in numbers:
            faults.append(f"round {record['number']}: a step or an evaluation gave no number")
    found = "; ".join(faults) or "no spike, no NaN"
    remedy = " (fewer iters or a lower learning_rate may help)" if faults else ""
    return Check("training", not faults, found + remedy, "ended by no guard")


def is_routed_safely(settings: GrowSettings, evaluated: Mapping[str, Any]) -> list[Check]:
    """Whether the new router is as good on old domains as the one before. evaluated: data of `route
    evaluate` on their rows, the old router first, the new one second.
    """
    compared = evaluated["routers"][1]["to_first"]
    if compared is None:
        return [Check("old domains", False, "no prompt with an answer", "1 or more")]
    checks = []
    for key, name in {"single_top1": "right domain first", "mixed_set": "mixed prompts"}.items():
        was, now = compared[key]
        if was and now:
            checks.append(Check(
                name, now["rate"] >= was["rate"] - settings.max_fall,
                f"{was['rate']:.1%} before, {now['rate']:.1%} now, of {now['n']}",
                f"a fall of {settings.max_fall:.0%} or less",
            ))  # fmt: skip
    moved = compared["losses"]["routed"]
    mean = float(
        np.mean([m["value"] for group, m in moved.items() if group in evaluated["domains"]])
    )
    return [
        *checks,
        Check(
            "routed loss of old domains", mean <= settings.max_fall,
            f"{mean:+.4f} nats per token", f"a rise of {settings.max_fall} or less",
        ),
    ]  # fmt: skip


def _in_words(interval: Any) -> str:
    return f"{interval.mean:+.3f} ({interval.low:+.3f} to {interval.high:+.3f})"

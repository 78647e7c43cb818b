"""`mlxstacks route discover`: by the loss of their answers, which stacks prompts should go to.

All losses are kept in `.NAME.work` next to the target as they are made. Killed at any moment, the
same command resumes there, and ends with the same examples, outcomes and losses. Losses of an
earlier discovery in the target are used too, so after a change of threshold, or with a domain more
in the store, only what is new is measured.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any

from mlxstacks import base_model, memory
from mlxstacks.command_line import command_line
from mlxstacks.data import Rendering, Row, encode_pair
from mlxstacks.data.settings import Template
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import write_json
from mlxstacks.files.store import Store, find_base
from mlxstacks.files.strict_json import read_object
from mlxstacks.routing.candidate_losses import LossCache
from mlxstacks.routing.outcomes import (
    EXAMPLES,
    LOSSES,
    OUTCOMES,
    Found,
    Outcome,
    RouterExample,
    Rules,
    blended,
    config_text,
    improves,
    read_discovered_outcomes,
    replay,
    targets_of,
    write_lines,
)
from mlxstacks.routing.settings import MOST_EXHAUSTIVE, OutcomeSettings
from mlxstacks.stats import mean_interval, wilson_interval
from mlxstacks.studies.route.cells import RATE, interval_plot, rate_cells
from mlxstacks.studies.route.data import (
    OTHERS,
    read_examples,
    routed_domains,
    stack_hashes,
    template_of,
)
from mlxstacks.studies.route.served import RowLosses, Served, open_served, random_name
from mlxstacks.study.document import Block, Columns, Table, cell_of, counted
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.result import Result

ABOUT = {
    "kind": "route discover",
    "title": "Discovery of outcomes",
    "question": "Which stacks lower the loss of which prompts, measured instead of assumed?",
}
# What the search took, of this run; not kept in the target by itself.
FIGURES = "figures.json"
# Keys of `Outcome.control`: chat at its floor alone; the best set and the random stack of a domain.
FLOOR, WITH_BEST = "floor", "best+"
_MOST_SETS = 4
_MOST_ROWS = 16  # of the grid of all sets
Progress = Callable[..., None]


def run(
    settings: OutcomeSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Search, and write examples, outcomes, losses and result to `settings.save_path`.

    Raises: InputError: no store, model, data or target; a setting that does not fit the store.
        StoreError: a damaged file, another base.
    """
    if settings.store_path is None:
        raise InputError(
            "route discover needs a store: give its directory (`mlxstacks stack` makes one)"
        )
    return run_study(_Discovery(settings, progress, dry_run), dry_run=dry_run, progress=progress)


@dataclass(frozen=True, eq=False)
class Samples:
    """Examples whose outcome is searched, each with its tokens. dropped: without answer tokens."""

    examples: list[RouterExample]
    rows: list[Row]
    dropped: int


class _Discovery(Study):
    artifacts = provenance = (EXAMPLES, OUTCOMES, LOSSES)
    settings: OutcomeSettings
    served: Served

    def __init__(self, settings: OutcomeSettings, progress: Progress | None, dry_run: bool) -> None:
        self.settings, self.progress, self.dry_run = settings, progress, dry_run
        self.inputs, self.done = (settings.store_path,), 0

    def planned(self) -> Result:
        settings, store = self.settings, Store.open(str(self.settings.store_path))
        notes: list[str] = []
        self.rules = rules_of(settings, routed_domains(store), notes)
        template = template_of(settings.template, store)
        if self.dry_run:
            checkpoint = find_base(store, settings.model, notes)
            tokenizer = base_model.load(checkpoint.directory, lazy=True)[1]
        else:
            self.served = open_served(store, settings.model, settings.base)
            tokenizer, notes = self.served.tokenizer, [*self.served.notes, *notes]
        self.examples = read_examples(settings, store, tokenizer, notes)
        self.samples = choose_samples(settings, self.examples, tokenizer, template)
        unknown = {d.name for d in store.manifest.domains if d.enabled and d.split is None}
        counts = _counts(self.examples, self.samples, self.rules, settings.random_control, unknown)
        if imported := sorted(unknown & {*self.rules.domains}):
            notes.append(
                f"Imported, so what was trained on is not recorded: {', '.join(imported)}. "
                "Prompts of that may be among those."
            )
        self.expected = max(1, counts["passes_expected"])
        if dropped := self.samples.dropped:
            notes.append(
                f"Left out: {counted(dropped, 'pair')} without an answer token in max_tokens."
            )
        if self.dry_run:
            most = counts["passes_at_most"]
            notes.append(f"{self.expected:,} to {most:,} losses would be measured.")
        self.data = {
            "base_fingerprint": store.manifest.base_fingerprint,
            "domains": list(self.rules.domains),
            "stacks": stack_hashes(store, self.rules.domains),
            "chat_domain": self.rules.chat_domain,
            "chat_floor": self.rules.chat_floor if self.rules.chat_domain else 0.0,
            "template": template,
            "counts": counts,
        }
        return Result(
            **ABOUT, status="planned", settings=settings.model_dump(mode="json"), data=self.data,
            blocks=(_count_table(counts),), notes=tuple(notes),
        )  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step]:
        # No outputs of the engine's: the losses are what is kept, and they outlive a change of
        # settings. All else follows from them.
        yield Step("search", self._search)

    def conclude(self, work: Path) -> Result:
        settings, rules = self.settings, self.rules
        outcomes = read_discovered_outcomes(work)
        figures = read_object((work / FIGURES).read_bytes())
        speed = figures["figures"]["pairs_per_second"]
        speed_note = (f"{speed:.2f} pairs a second.",) if speed else ()
        control = settings.random_control and outcomes
        data = {
            **self.data,
            "oracle": _by_label(rules, outcomes),
            "greedy_gap": _greedy_gap(rules, outcomes) if settings.search == "exhaustive" else None,
            "control": _control(rules, outcomes) if control else None,
            "figures": figures["figures"],
        }
        if settings.search == "exhaustive" and 2 ** len(rules.domains) <= _MOST_ROWS:
            data["grid"] = _grid(rules, outcomes)
        train = command_line(
            "mlxstacks route train", settings.store_path,
            targets=str(user_path(str(settings.save_path))), model=settings.model,
        )  # fmt: skip
        return Result(
            **ABOUT, status="done", data=data, blocks=tuple(blocks(data)),
            outcome=f"{100 * data['counts']['discovered_share']:.0f}% of rows searched",
            verdict=" ".join(_sentences(data, outcomes)),
            notes=(*figures["notes"], *speed_note), next_steps={"Next": train},
        )  # fmt: skip

    def _search(self, work: Path) -> None:
        """Write what the target gets, and FIGURES."""
        target = user_path(str(self.settings.save_path))
        known = [target / LOSSES] if self.settings.resume else []
        with closing(LossCache(work / LOSSES, known)) as cache, ExitStack() as stack:
            stack.callback(base_model.install_gated_delta())
            outcomes, figures, notes = self._outcomes(cache)
            cache.write(work / f"{LOSSES}.sorted")
        os.replace(work / f"{LOSSES}.sorted", work / LOSSES)
        write_lines(work / EXAMPLES, self.examples)
        write_lines(work / OUTCOMES, outcomes)
        write_json(work / FIGURES, {"figures": figures, "notes": [*notes, *cache.notes]})

    def _outcomes(self, cache: LossCache) -> tuple[list[Outcome], dict[str, Any], list[str]]:
        settings, rules = self.settings, self.rules
        started, cpu = time.monotonic(), time.process_time()
        control = settings.seed if settings.random_control else None
        losses = RowLosses(
            self.served, self.samples.rows, cache, control, settings.batch_tokens, self._count
        )
        searches = losses.search(rules, range(len(self.samples.rows)))
        seconds, recalled = time.monotonic() - started, losses.recalled
        controls = _controls(rules, searches, losses) if settings.random_control else []
        passes = sum(len(search.losses) for search in searches)
        figures = {
            "cpu_seconds": round(time.process_time() - cpu, 3),
            "passes_made": losses.made,
            "passes_recalled": losses.recalled,
            "passes_per_pair": round(passes / max(1, len(searches)), 2),
            "tokens": losses.tokens,
            # of the search alone, where nothing came from the cache
            "pairs_per_second": None if recalled else round(len(searches) / seconds, 3),
            "batch_tokens": losses.batch_tokens,
            "peak_bytes": memory.counters().peak_bytes,
        }
        pairs = zip(self.samples.examples, searches, controls or [{}] * len(searches), strict=True)
        return [_outcome(rules, *pair) for pair in pairs], figures, losses.notes

    def _count(self, made: int) -> None:
        self.done += made
        if self.progress:
            # how many passes the searches will ask for is an estimate
            done = min(self.done, 0.99 * self.expected)
            self.progress(done, self.expected, f"{self.done} losses")


def rules_of(settings: OutcomeSettings, domains: tuple[str, ...], notes: list[str]) -> Rules:
    """The rules of a search among these domains. Raises: InputError for what does not fit them."""
    chat = settings.chat_domain or ("chat" if "chat" in domains else None)
    if chat is not None and chat not in domains:
        raise InputError(
            f"chat_domain {chat!r} is no domain to route to (there are {', '.join(domains)})"
        )
    if settings.search == "exhaustive" and len(domains) > MOST_EXHAUSTIVE:
        raise InputError(
            f"search exhaustive takes up to {MOST_EXHAUSTIVE} domains, the store has "
            f"{len(domains)}; use greedy, or disable domains"
        )
    absent = [name for name in settings.soft if name not in domains]
    if absent and "soft" in settings.model_fields_set:
        notes.append(f"soft: no domain {', '.join(absent)} to route to.")
    return Rules(
        domains, threshold=settings.threshold, chat_domain=chat, chat_floor=settings.chat_floor,
        soft=tuple(name for name in settings.soft if name in domains),
        label_share=settings.label_share, search=settings.search,
    )  # fmt: skip


def choose_samples(
    settings: OutcomeSettings, examples: Sequence[RouterExample], tokenizer: Any, template: Template
) -> Samples:
    """The first examples of each label that have answer tokens."""
    limits = {
        "single": settings.samples_per_domain,
        "mixed": settings.mixed_samples,
        "other": settings.other_samples,
    }
    samples, taken, dropped = [], Counter[tuple[str, ...]](), 0
    for example in examples:
        if example.answer is None or taken[example.label] >= limits[example.kind]:
            continue
        row = encode_pair(
            example.prompt, example.answer, tokenizer, template, settings.max_tokens,
            Rendering.of(settings),
        )  # fmt: skip
        if row is None:
            dropped += 1
            continue
        taken[example.label] += 1
        samples.append((example, row))
    return Samples([example for example, _ in samples], [row for _, row in samples], dropped)


def _controls(rules: Rules, searches: Sequence[Found], losses: RowLosses) -> list[dict[str, float]]:
    """What random stacks would have done: for each search the loss with each random domain alone
    (by `random_name`), with it on top of the best set (WITH_BEST and its name) and, where there is
    a floor, with that alone (FLOOR). Every run has the chat floor, as those of the search have.

    losses: on a model that has the random stacks.
    """
    floor, runs = rules.floor_alone(), list[tuple[int, str, dict[str, float]]]()
    for number, search in enumerate(searches):
        best = rules.weights(search.best)
        runs += [(number, FLOOR, floor)] if floor else []
        for name in map(random_name, rules.domains):
            runs.append((number, name, {**floor, name: 1.0}))
            runs += [(number, f"{WITH_BEST}{name}", {**best, name: 1.0})] if best else []
    controls: list[dict[str, float]] = [{} for _ in searches]
    values = losses.of([(number, weights) for number, _, weights in runs])
    for (number, key, _), loss in zip(runs, values, strict=True):
        controls[number][key] = loss
    return controls


def _outcome(
    rules: Rules, example: RouterExample, search: Found, control: dict[str, float]
) -> Outcome:
    targets = targets_of(rules, search)
    return Outcome(
        row_id=example.row_id,
        label=example.label,
        kind=example.kind,
        base_loss=search.base_loss,
        best_loss=search.best_loss,
        best=rules.ordered(search.best),
        soft=rules.ordered(search.soft),
        targets=targets,
        final=blended(rules, targets, example.label),
        losses={config_text(rules.ordered(on)): loss for on, loss in search.losses.items()},
        path=tuple(config_text(rules.ordered(on)) for on in search.path),
        trained_on=example.trained_on,
        control=control,
    )


# --- figures --------------------------------------------------------------------------------------


def _rate(count: int, n: int) -> dict[str, Any]:
    """A share with its Wilson interval; no share of nothing."""
    if n == 0:
        return {"count": count, "n": 0, "share": None, "interval": None}
    interval = wilson_interval(count, n).as_json()
    return {"count": count, "n": n, "share": count / n, "interval": interval}


def _mean(values: Sequence[float]) -> dict[str, Any] | None:
    """With its interval; None of nothing."""
    return mean_interval(values).as_json() if values else None


def _counts(
    examples: Sequence[RouterExample], samples: Samples, rules: Rules, random_control: bool,
    unknown: Set[str] = frozenset(),
) -> dict[str, Any]:  # fmt: skip
    """Examples and samples by label; rows that stacks were trained on, None for a label with a
    domain of `unknown`, whose rows are not recorded; forward passes.

    passes_expected: with one addition a pair, each domain then tried with a random stack where
    that control is asked for. passes_at_most: the most that search and control take.
    """

    def both(label: tuple[str, ...] | None) -> dict[str, int | None]:
        is_known = not unknown & {*(label or ())}
        chosen, searched = (
            [e for e in group if label in (None, e.label)] for group in (examples, samples.examples)
        )
        return {
            "examples": len(chosen),
            "trained_on": sum(e.trained_on for e in chosen) if is_known else None,
            "samples": len(searched),
            "samples_trained_on": sum(e.trained_on for e in searched) if is_known else None,
        }

    n, count = len(rules.domains), len(samples.examples)
    greedy = (1 + n + comb(n, 2) + len(rules.soft), 2 * n)
    most, usual = (2**n, 2**n) if rules.search == "exhaustive" else greedy
    control = random_control * (2 * n + bool(rules.floor_alone()))
    labels = dict.fromkeys(example.label for example in examples)
    return {
        **both(None),
        "discovered_share": count / len(examples),
        "without_answer": sum(example.answer is None for example in examples),
        "dropped_without_answer_tokens": samples.dropped,
        "passes_expected": (usual + control) * count,
        "passes_at_most": (most + control) * count,
        "labels": {config_text(label) or OTHERS: both(label) for label in labels},
    }


def _by_label(rules: Rules, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For each label: which sets were best how often, which domains were in them, what they gained.

    own: the best set is the label itself. nothing: no set beats the base. own_gain: base loss minus
    the loss with the label's domains alone; None where the search did not ask for it in every pair,
    as greedy for mixed prompts: it asks where the way there looked good.
    """
    rows = []
    for label in dict.fromkeys(outcome.label for outcome in outcomes):
        of_label = [outcome for outcome in outcomes if outcome.label == label]
        n, own = len(of_label), config_text(label)
        sets = Counter(config_text(outcome.best) for outcome in of_label)
        alone = [o.base_loss - o.losses[own] for o in of_label if own in o.losses]
        rows.append({
            "label": own or OTHERS,
            "n": n,
            "trained_on": sum(outcome.trained_on for outcome in of_label),
            "sets": [{"set": name, **_rate(count, n)} for name, count in sets.most_common()],
            "domains": {d: _rate(sum(d in o.best for o in of_label), n) for d in rules.domains},
            "own": _rate(sets[own], n),
            "label_in_set": _rate(sum({*o.label} <= {*o.best} for o in of_label), n),
            "nothing": _rate(sets[""], n),
            "base_loss": sum(o.base_loss for o in of_label) / n,
            "best_loss": sum(o.best_loss for o in of_label) / n,
            "gain": _mean([o.gain for o in of_label]),
            "own_gain": _mean(alone) if label and len(alone) == n else None,
        })  # fmt: skip
    return rows


def _greedy_gap(rules: Rules, outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """How far greedy is from the best of all sets: how often it finds it, and nats it leaves.

    outcomes: of exhaustive searches, which know the loss of every set. Without the soft boost,
    which is no search for the best set.
    """
    if not outcomes:
        return None
    greedy = replace(rules, search="greedy", soft=())
    left, same = [], 0
    for o in outcomes:
        losses = {frozenset(filter(None, on.split("+"))): loss for on, loss in o.losses.items()}
        search = replay(greedy, losses)
        left.append(search.best_loss - o.best_loss)
        same += search.best == {*o.best}
    return {
        "same_set": _rate(same, len(outcomes)),
        "nats": _mean(left),
        "largest_nats": max(left),
        "beyond_threshold": _rate(sum(nats > rules.threshold for nats in left), len(left)),
    }


def _grid(rules: Rules, outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Set of domains -> label -> nats that the set takes off the base's loss; the base left out.

    outcomes: of exhaustive searches, which know the loss of every set.
    """
    sizes = range(1, len(rules.domains) + 1)
    labels = dict.fromkeys(outcome.label for outcome in outcomes)
    return {
        on: {
            config_text(label) or OTHERS: _mean([
                o.base_loss - o.losses[on] for o in outcomes if o.label == label
            ])
            for label in labels
        }
        for size in sizes
        for on in map(config_text, combinations(rules.domains, size))
    }  # fmt: skip


def _control(rules: Rules, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Random stacks of equal norm next to the real ones.

    chosen: the lowest single loss is a random domain's, and below the base's. helps: some random
    domain is below the base. added: some random domain lowers the best set's loss by more than the
    threshold. real_helps: some real domain alone is below the base. By domain: nats that its random
    twin and it itself take off the base's loss, over all pairs and over those of its label.
    """
    n = len(outcomes)
    twins = [random_name(d) for d in rules.domains]
    bases = [o.base_loss for o in outcomes]
    random = [min(o.control[twin] for twin in twins) for o in outcomes]
    real = [min(o.losses[d] for d in rules.domains) for o in outcomes]
    floors = [o.base_loss - o.control[FLOOR] for o in outcomes if FLOOR in o.control]
    with_best = [o for o in outcomes if o.best]
    added = sum(
        any(improves(o.control[f"{WITH_BEST}{t}"], o.best_loss, rules.threshold) for t in twins)
        for o in with_best
    )
    domains = {}
    for domain, twin in zip(rules.domains, twins, strict=True):
        gains = domains[domain] = dict[str, Any]()
        of_label = [o for o in outcomes if o.label == (domain,)]
        for name, chosen in (("all", outcomes), ("own", of_label)):
            gains[f"random_gain_{name}"] = _mean([o.base_loss - o.control[twin] for o in chosen])
            gains[f"gain_{name}"] = _mean([o.base_loss - o.losses[domain] for o in chosen])
    triples = list(zip(bases, random, real, strict=True))
    return {
        "chosen": _rate(sum(twin < alone and twin < base for base, twin, alone in triples), n),
        "helps": _rate(sum(twin < base for base, twin, _ in triples), n),
        "real_helps": _rate(sum(alone < base for base, _, alone in triples), n),
        "added": _rate(added, len(with_best)),
        "gain": _mean([base - min(base, twin) for base, twin, _ in triples]),
        "real_gain": _mean([base - min(base, alone) for base, _, alone in triples]),
        "floor_gain": _mean(floors),
        "domains": domains,
    }


# --- for people -----------------------------------------------------------------------------------


def _count_table(counts: Mapping[str, Any]) -> Table:
    columns: Columns = {
        "label": "text", "examples": "count", "trained on": "count", "searched": "count",
        "of them trained on": "count",
    }  # fmt: skip
    rows = ((name, *row.values()) for name, row in counts["labels"].items())
    return Table.of("counts", "Prompts by label", columns, rows)


def blocks(data: Mapping[str, Any]) -> Iterator[Block]:
    """Labels first; then the controls."""
    if data["oracle"]:
        yield from _label_blocks(data["oracle"])
    if grid := data.get("grid"):
        labels = dict.fromkeys(label for gains in grid.values() for label in gains)
        yield Table.of(
            "grid", "Nats that each set of stacks takes off the loss, by label",
            {"set": "text", **dict.fromkeys(labels, ("change", 3))},
            [(on, *(cell_of(gain) for gain in gains.values())) for on, gains in grid.items()],
            caption="Of prompts of each label, with 95% intervals.",
        )  # fmt: skip
    if data["control"]:
        yield from _control_tables(data["control"])
    if gap := data["greedy_gap"]:
        yield Table.of("greedy", "Greedy search against all sets", _RATE_AND_NATS, (
            ("finds the best set", *rate_cells(gap["same_set"]), None),
            ("leaves more than the threshold", *rate_cells(gap["beyond_threshold"]), None),
            ("nats it leaves", None, None, None, cell_of(gap["nats"])),
            ("most nats it leaves", None, None, None, gap["largest_nats"]),
        ))  # fmt: skip
    yield _count_table(data["counts"])


_RATE_AND_NATS: Columns = {"what": "text", **RATE, "nats": ("change", 3)}


def _label_blocks(oracle: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    columns: Columns = {
        "label": "text", "pairs": "count", "best set is the label": ("share", 0),
        "holds it": ("share", 0), "no set helps": ("share", 0), "gain, nats": ("change", 3),
        "gain of the label alone": ("change", 3),
    }  # fmt: skip
    keys = ("own", "label_in_set", "nothing", "gain", "own_gain")
    rows = ((row["label"], row["n"], *(cell_of(row[key]) for key in keys)) for row in oracle)
    yield Table.of("labels", "Which stacks help, by label", columns, rows)
    yield Table.of(
        "sets", "Which set lowers the answer's loss most",
        {"label": "text", "best set": "text", **RATE},
        (
            (row["label"], best["set"] or "(base)", *rate_cells(best))
            for row in oracle for best in row["sets"][:_MOST_SETS]
        ),
        caption=f"Of each label the {_MOST_SETS} most frequent sets.",
    )  # fmt: skip
    yield interval_plot(
        "gains", "What the best set of stacks takes off the loss",
        {row["label"]: row["gain"] for row in oracle}, "gain, nats per token (right is better)",
        references={"no gain": 0.0},
    )  # fmt: skip


def _control_tables(control: Mapping[str, Any]) -> Iterator[Table]:
    rates = {
        "a random stack would be chosen": "chosen", "some random stack helps": "helps",
        "some real stack helps": "real_helps",
        "a random stack on top of the best set helps": "added",
    }  # fmt: skip
    gains = {
        "mean gain of random stacks": "gain", "mean gain of real stacks": "real_gain",
        "gain of chat at its floor alone": "floor_gain",
    }  # fmt: skip
    yield Table.of("control", "Control: random stacks of equal norm", _RATE_AND_NATS, (
        *((name, *rate_cells(control[key]), None) for name, key in rates.items()),
        *((name, None, None, None, cell_of(control[key])) for name, key in gains.items()),
    ))  # fmt: skip
    twins = {
        "all prompts": "gain_all", "random": "random_gain_all", "its own prompts": "gain_own",
        "random, its own": "random_gain_own",
    }  # fmt: skip
    yield Table.of(
        "twins", "Nats gained by one domain alone, and by a random stack of equal norm",
        {"domain": "text", **dict.fromkeys(twins, ("change", 3))},
        (
            (name, *(cell_of(row[key]) for key in twins.values()))
            for name, row in control["domains"].items()
        ),
    )  # fmt: skip


def _sentences(data: Mapping[str, Any], outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The verdict."""
    counts, gap, control = data["counts"], data["greedy_gap"], data["control"]
    searched = f"{counts['samples']:,} of {counts['examples']:,} rows"
    yield f"Searched for the domains that help: {searched}."
    if counts["samples"] < counts["examples"]:
        yield "The target of the rest is their label."
    if not outcomes:
        return
    if labelled := [o for o in outcomes if o.label]:
        own = _percent(_rate(sum(o.best == o.label for o in labelled), len(labelled)))
        inside = sum({*o.label} <= {*o.best} for o in labelled)
        holds = _percent(_rate(inside, len(labelled)))
        yield (
            f"Of {len(labelled):,} labelled prompts the best set is the label itself in {own}, and "
            f"holds it in {holds}."
        )
    if others := [o for o in outcomes if not o.label]:
        nothing = _percent(_rate(sum(not o.best for o in others), len(others)))
        yield f"Of {len(others):,} others no stack helps in {nothing}."
    yield f"Mean gain {_nats(mean_interval([o.gain for o in outcomes]).as_json())}."
    if gap:
        same = _percent(gap["same_set"])
        yield f"Greedy finds the best of all sets in {same} and leaves {_nats(gap['nats'])}."
    if control:
        yield (
            f"Of random stacks of equal norm one would be chosen in {_percent(control['chosen'])}; "
            f"their mean gain is {_nats(control['gain'])}."
        )
        if control["floor_gain"]:
            yield (
                "Chat at its floor, which is on with every stack, real or random, gains "
                f"{_nats(control['floor_gain'])} alone."
            )
    if counts["samples_trained_on"]:
        yield f"A stack was trained on {counts['samples_trained_on']:,} of the rows."


def _percent(rate: Mapping[str, Any]) -> str:
    if rate["share"] is None:
        return "none of 0"
    low, high = (100 * rate["interval"][key] for key in ("low", "high"))
    return f"{100 * rate['share']:.0f}% ({low:.0f} to {high:.0f})"


def _nats(mean: Mapping[str, Any]) -> str:
    nats = f"{mean['mean']:.3f} nats"
    return nats if mean["low"] is None else f"{nats} ({mean['low']:.3f} to {mean['high']:.3f})"

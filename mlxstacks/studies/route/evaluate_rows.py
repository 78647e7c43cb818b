"""The rows that `mlxstacks route evaluate` measures on: held out, in groups, as tokens.

Groups are the domains, MIXED (prompts of several domains), OTHER (prompts that no domain should
help with), and UNSEEN and a name for data of domains that nothing was trained on.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxstacks.data import DomainDataSettings, Rendering, Row
from mlxstacks.data.settings import Template
from mlxstacks.errors import InputError
from mlxstacks.files.store import Store
from mlxstacks.routing.outcome_files import RouterExample
from mlxstacks.routing.outcome_settings import LabelledSource, OutcomeSettings
from mlxstacks.routing.router_examples import group_key
from mlxstacks.studies.route.data import read_examples
from mlxstacks.studies.route.evaluate_losses import encode_pair
from mlxstacks.studies.route.evaluate_settings import RouteEvaluateSettings

# No domain can be called so: names hold no blank.
MIXED, OTHER, UNSEEN = "mixed prompts", "other prompts", "unseen "


@dataclass(frozen=True, slots=True)
class EvaluatedRow:
    """row: prompt and answer as tokens; None where there is no answer to measure."""

    example: RouterExample
    group: str
    row: Row | None


def read_all(
    settings: RouteEvaluateSettings, store: Store, tokenizer: Any, notes: list[str]
) -> tuple[list[RouterExample], list[tuple[str, RouterExample]]]:
    """(examples of the store's domains, (group, example) of the unseen ones), trained on or not.

    Raises: InputError: no data, a row that does not fit.
    """
    about = OutcomeSettings(data=settings.data, sources=settings.sources)
    examples = read_examples(about, store, tokenizer, notes)
    return examples, list(_unseen(settings, store, tokenizer, notes))


def held_out_rows(
    settings: RouteEvaluateSettings,
    examples: Sequence[RouterExample],
    unseen: Sequence[tuple[str, RouterExample]],
    trained: Collection[str],
    tokenizer: Any,
    template: Template,
    notes: list[str],
) -> list[EvaluatedRow]:
    """At most `rows_per_group` rows of each group, groups in the order of the store.

    trained: groups of like prompts (`group_key`) that a router was trained on; their rows are left
    out, as rows that a stack was trained on are, unless `include_trained`. So are unseen ones.
    Raises: InputError: nothing is left.
    """
    named = [*((group_of(one), one) for one in examples), *unseen]
    if not settings.include_trained:
        named = [
            (group, one)
            for group, one in named
            if not (one.trained_on or group_key(one.prompt) in trained)
        ]
    everything = len(examples) + len(unseen)
    if len(named) < everything:
        notes.append(
            f"{everything - len(named)} of {everything} rows are left out: a stack or the "
            "router was trained on them."
        )
    if all(group.startswith(UNSEEN) for group, _ in named):
        raise InputError(
            "no held-out row is left: stacks or router were trained on all of them; give --data "
            "with other rows, or --include-trained to measure on these"
        )
    return list(_encoded(settings, _first(named, settings), tokenizer, template, notes))


def group_of(example: RouterExample) -> str:
    if example.kind == "single":
        return example.label[0]
    return MIXED if example.kind == "mixed" else OTHER


def _unseen(
    settings: RouteEvaluateSettings, store: Store, tokenizer: Any, notes: list[str]
) -> Iterable[tuple[str, RouterExample]]:
    for source in settings.unseen:
        data = DomainDataSettings(sources=(source,))
        about = OutcomeSettings(sources=(LabelledSource(domains=(), data=data),))
        name = source.label.rstrip("/").rpartition("/")[2].removesuffix(".jsonl")
        for example in read_examples(about, store, tokenizer, notes):
            yield f"{UNSEEN}{name}", example


def _first(
    named: Iterable[tuple[str, RouterExample]], settings: RouteEvaluateSettings
) -> list[tuple[str, RouterExample]]:
    """So many of each group: the examples come in an order by hash, and mixed ones take their
    pairs by turns.
    """
    queues: dict[str, dict[tuple[str, ...], list[RouterExample]]] = {}
    for group, example in named:
        queues.setdefault(group, {}).setdefault(example.label, []).append(example)
    found = []
    for group, by_label in queues.items():
        longest = max(map(len, by_label.values()))
        in_turn = [q[i] for i in range(longest) for q in by_label.values() if i < len(q)]
        found += [(group, example) for example in in_turn[: settings.rows_per_group]]
    return found


def _encoded(
    settings: RouteEvaluateSettings,
    named: Iterable[tuple[str, RouterExample]],
    tokenizer: Any,
    template: Template,
    notes: list[str],
) -> Iterable[EvaluatedRow]:
    without: dict[str, int] = {}
    for group, example in named:
        row = None
        if example.answer is not None:
            row = encode_pair(
                example.prompt, example.answer, tokenizer, template, settings.max_tokens,
                Rendering.of(settings),
            )  # fmt: skip
        if row is None:
            without[group] = without.get(group, 0) + 1
        yield EvaluatedRow(example, group, row)
    for group, count in without.items():
        notes.append(f"{group}: {count} rows have no answer to measure; they are routed only.")


def domain_groups(groups: Iterable[str]) -> list[str]:
    """Those of one domain of the store."""
    return [g for g in groups if g not in (MIXED, OTHER) and not g.startswith(UNSEEN)]


def by_group(rows: Iterable[EvaluatedRow]) -> Mapping[str, list[int]]:
    """Group -> places of its rows, in order."""
    found: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        found.setdefault(row.group, []).append(place)
    return found

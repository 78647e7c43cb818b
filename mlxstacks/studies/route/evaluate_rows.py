"""The rows that `mlxstacks route evaluate` measures on: held out, in groups, as tokens.

Groups are the domains, MIXED (prompts of several domains), OTHER (prompts that no domain should
help with), and UNSEEN and a name for data of domains that nothing was trained on.

A router is judged on prompts that it was not trained on. Its file has the seed of its split and a
hash of the row ids that were held out from it. Where the split, made again from examples that are
at hand, gives this hash, it is that split: of the data that is measured on, or of a directory that
`route discover` wrote (the one that is named; else the one that the result of `route train` next to
the router names, or the usual one).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from pydantic import ValidationError

from mlxstacks.data import DomainDataSettings, Rendering, Row
from mlxstacks.data.settings import Template
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.store import Store
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.regular_files import check_regular
from mlxstacks.routing.outcomes import RouterExample, read_outcomes
from mlxstacks.routing.router import PromptRouter
from mlxstacks.routing.router_training import group_key, split_places
from mlxstacks.routing.settings import LabelledSource, OutcomeSettings, RouterTrainSettings
from mlxstacks.studies.route.data import encode_pair, read_examples
from mlxstacks.studies.route.settings import RouteEvaluateSettings
from mlxstacks.study.document import RESULT, counted

# No domain can be called so: names hold no blank.
MIXED, OTHER, UNSEEN = "mixed prompts", "other prompts", "unseen "
# Of a training before version 0.2.
FORMER_TRAIN_REPORT = "train_report.json"
_OF_THE_SPLIT = ("validation_share", "validation_groups", "oracle_only", "extend")


@dataclass(frozen=True, slots=True)
class EvaluatedRow:
    """row: prompt and answer as tokens; None where there is no answer to measure."""

    example: RouterExample
    group: str
    row: Row | None

    @property
    def answer_tokens(self) -> int:
        """Those whose loss counts."""
        return sum(weight > 0 for weight in self.row.weights) if self.row else 0


def read_all(
    settings: RouteEvaluateSettings, store: Store, tokenizer: Any, notes: list[str]
) -> tuple[list[RouterExample], list[tuple[str, RouterExample]]]:
    """(examples of the store's domains, (group, example) of the unseen ones), trained on or not.

    Raises: InputError: no data, a row that does not fit.
    """
    about = OutcomeSettings(data=settings.data, sources=settings.sources)
    examples = read_examples(about, store, tokenizer, notes)
    unseen = []
    for source in settings.unseen:
        data = DomainDataSettings(sources=(source,))
        about = OutcomeSettings(sources=(LabelledSource(domains=(), data=data),))
        name = source.label.rstrip("/").rpartition("/")[2].removesuffix(".jsonl")
        unseen += [(f"{UNSEEN}{name}", e) for e in read_examples(about, store, tokenizer, notes)]
    return examples, unseen


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
    groups = {"mixed": MIXED, "other": OTHER}
    every = [*((groups.get(e.kind) or e.label[0], e) for e in examples), *unseen]
    named = [
        (group, e)
        for group, e in every
        if settings.include_trained or not (e.trained_on or group_key(e.prompt) in trained)
    ]
    if len(named) < len(every):
        notes.append(
            f"Left out: {len(every) - len(named)} of {counted(len(every), 'row')}; a stack or the "
            "router was trained on them."
        )
    if all(group.startswith(UNSEEN) for group, _ in named):
        raise InputError(
            "no held-out row is left: stacks or router were trained on all of them; give --data "
            "with other rows, or --include-trained to measure on these"
        )
    # The examples come in an order by hash; mixed ones take their pairs by turns.
    queues: dict[str, dict[tuple[str, ...], list[RouterExample]]] = {}
    for group, example in named:
        queues.setdefault(group, {}).setdefault(example.label, []).append(example)
    rows = []
    for group, by_label in queues.items():
        turns = chain.from_iterable(zip_longest(*by_label.values()))
        for example in list(filter(None, turns))[: settings.rows_per_group]:
            row = None
            if example.answer is not None:
                row = encode_pair(
                    example.prompt, example.answer, tokenizer, template, settings.max_tokens,
                    Rendering.of(settings),
                )  # fmt: skip
            rows.append(EvaluatedRow(example, group, row))
    for group, count in Counter(row.group for row in rows if row.row is None).items():
        notes.append(
            f"{group}: routed only, without an answer to measure: {counted(count, 'row')}."
        )
    return rows


def domain_groups(groups: Iterable[str]) -> list[str]:
    """Those of one domain of the store."""
    return [g for g in groups if g not in (MIXED, OTHER) and not g.startswith(UNSEEN)]


def by_group(rows: Iterable[EvaluatedRow]) -> Mapping[str, list[int]]:
    """Group -> places of its rows, in order."""
    places: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.group, []).append(place)
    return places


# --- what a router was trained on -----------------------------------------------------------------


@dataclass(frozen=True)
class RouterSplit:
    """Groups of like prompts (`group_key`), of which either side has whole ones. The validation
    groups took no step of the training, but the best epoch was chosen by them. extended: from a
    router with a split of its own, which may have been trained on them.
    """

    training: frozenset[str]
    validation: frozenset[str]
    extended: bool = False


def split_of(
    router: PromptRouter, path: str | None, examples: Sequence[RouterExample], targets: str | None
) -> RouterSplit | None:
    """How the prompts of a router's training were split; None where that cannot be found out.

    path: of the router, None for the store's own. examples: of the data at hand, all of them.
    targets: directory that `route discover` wrote.
    Raises: InputError: `targets` is given and is no such directory.
    """
    header = _header_split(router)
    if header is None:
        return None
    settings, wanted = header
    if not settings.oracle_only and (split := _split_again(examples, settings, wanted)):
        return split
    directory = targets or _targets_of_training(path) or settings.targets
    try:
        discovered, final_targets = read_outcomes(directory)
    except (InputError, OSError):
        if targets is not None:
            raise
        return None
    if settings.oracle_only:
        discovered = [example for example in discovered if example.row_id in final_targets]
    return _split_again(discovered, settings, wanted)


def _header_split(router: PromptRouter) -> tuple[RouterTrainSettings, str] | None:
    """(settings of the split, hash of what was held out), where the header has them."""
    training: dict[str, Any] = dict(router.header.training)
    split, given = training.get("split"), training.get("settings")
    if not isinstance(split, dict) or not isinstance(split.get("validation_sha256"), str):
        return None
    given = given if isinstance(given, dict) else {}
    values = {key: given[key] for key in _OF_THE_SPLIT if key in given}
    if "seed" in split:
        values["seed"] = split["seed"]
    try:
        return RouterTrainSettings.model_validate(values), split["validation_sha256"]
    except ValidationError:
        return None


def _split_again(
    examples: Sequence[RouterExample], settings: RouterTrainSettings, wanted: str
) -> RouterSplit | None:
    try:
        sides = split_places(
            [example.prompt for example in examples], settings.seed, settings.validation_share,
            settings.validation_groups, [example.kind for example in examples],
        )  # fmt: skip
    except InputError:  # too few prompts to split: not those it was trained on
        return None
    if json_sha256(sorted(examples[place].row_id for place in sides[1])) != wanted:
        return None
    training, validation = (
        frozenset(group_key(examples[place].prompt) for place in side) for side in sides
    )
    return RouterSplit(training, validation, settings.extend is not None)


def _targets_of_training(path: str | None) -> str | None:
    """The targets that `route train` says, next to the router, that it used."""
    if path is None:
        return None
    router = user_path(path)
    directory = router if router.is_dir() else router.parent
    for name in (RESULT, FORMER_TRAIN_REPORT):
        try:
            check_regular(directory / name)
            document: Any = read_object((directory / name).read_bytes())
            targets = document["settings"]["targets"]
        except (OSError, ValueError, KeyError, TypeError, InputError):
            continue
        if isinstance(targets, str):
            return targets
    return None

"""Examples for the router: prompts with the domains that they are of, from files or from the store.

A directory holds NAME.jsonl, NAME being a domain (`code`), several (`code+math`: prompts that need
both) or `others` (prompts of no domain). Rows are in any format that training data has; of a
conversation its first question and answer count, of a text the whole as a prompt without an answer.

`mlxstacks route evaluate` measures on rows that were held out, in groups, as tokens.
Groups are the domains, MIXED (prompts of several domains), OTHER (prompts that no domain should
help with), and UNSEEN and a name for data of domains that nothing was trained on.

A router is judged on prompts that it was not trained on. Its file has the seed of its split and a
hash of the row ids that were held out from it. Where the split, made again from examples that are
at hand, gives this hash, it is that split: of the data that is measured on, or of a directory that
`route discover` wrote (the one that is named; else the one that the result of `route train` next to
the router names, or the usual one).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlxstacks.data import DomainDataSettings, Example, Row, encode_pair, read_domains
from mlxstacks.data.examples import (
    first_pair,
    keep_one,
    prompt_id_of,
    row_id_of,
    turns_of,
)
from mlxstacks.data.settings import SourceSettings, Template
from mlxstacks.data.sources import keyed_hash, read_source
from mlxstacks.data.special_text import special_tokens
from mlxstacks.data.text_settings import Rendering
from mlxstacks.errors import InputError, in_lines
from mlxstacks.files.disk import user_path
from mlxstacks.files.store import Store
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.regular_files import check_regular
from mlxstacks.routing.outcomes import Kind, RouterExample, read_outcomes
from mlxstacks.routing.router import PromptRouter
from mlxstacks.routing.router_training import group_key, split_places
from mlxstacks.routing.settings import LabelledSource, OutcomeSettings, RouterTrainSettings
from mlxstacks.studies.route.settings import RouteEvaluateSettings
from mlxstacks.studies.stack.plan import data_settings_of, stored_data
from mlxstacks.study.document import RESULT, counted

OTHERS = "others"
Label = tuple[str, ...]


def routed_domains(store: Store) -> tuple[str, ...]:
    """Domains that can be routed to: enabled, with stacks, in the order of the store."""
    return tuple(d.name for d in store.manifest.domains if d.enabled and d.stacks)


def stack_hashes(store: Store, domains: Sequence[str]) -> dict[str, list[str]]:
    """Domain -> sha256 of its stacks, in order."""
    return {
        name: [stack.file.sha256 for stack in store.domain_named(name).stacks] for name in domains
    }


def read_examples(
    settings: OutcomeSettings,
    store: Store,
    tokenizer: Any = None,
    notes: list[str] | None = None,
) -> list[RouterExample]:
    """Every example: domains in the order of the store, then mixed ones, then others.

    Within a label rows that no stack was trained on come first, otherwise by a hash of seed and
    content: neither files nor their order matter, and a cap keeps the first. tokenizer: its special
    tokens are stripped. notes: what was left out and why is added here.

    Raises: InputError: nothing is there, a row does not fit, a source names a domain that the store
        has not, or a prompt has two labels (all are listed).
    """
    notes = [] if notes is None else notes
    domains = routed_domains(store)
    if not domains:
        raise InputError(f"{store.path}: no enabled domain has stacks; there is nothing to route")
    trained = trained_rows(store)
    source = _Source(settings, store, domains, tokenizer, notes)
    by_label = {
        label: _examples(rows, label, settings, trained, notes)
        for label, rows in source.rows_by_label().items()
    }
    _check_conflicts(by_label)

    def place(label: Label) -> tuple[bool, int, list[int]]:
        return not label, len(label), [domains.index(name) for name in label]

    examples: list[RouterExample] = []
    for label in sorted(by_label, key=place):
        cap = settings.mixed_cap if len(label) > 1 else settings.single_cap
        examples += sorted(
            by_label[label],
            key=lambda e: (e.trained_on, keyed_hash(settings.seed, "route", e.row_id)),
        )[:cap]
    if not examples:
        raise InputError("no prompt is left to route: the files are empty or all too short")
    return examples


def trained_rows(store: Store) -> set[str]:
    """Row ids that stacks of enabled domains were trained on."""
    return {
        row_id
        for domain in store.manifest.domains
        if domain.enabled and domain.split is not None
        for row_id in store.read_json(domain.split)["train"]
    }


def template_of(template: Template | None, store: Store) -> Template:
    """The template of the settings, else the one of the store's domains.

    Raises: InputError where the domains differ.
    """
    if template is not None:
        return template
    templates = {
        data_settings_of(domain).template
        for domain in store.manifest.domains
        if domain.enabled and domain.origin == "trained"
    }
    if len(templates) > 1:
        raise InputError(
            f"{store.path}: its domains were trained with the templates "
            f"{' and '.join(sorted(templates))}; say with which one answers are judged: --template"
        )
    return templates.pop() if templates else "chat"


# --- where rows come from -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Source:
    """Rows of the sources, else of files in `data`, else what the domains were trained with."""

    settings: OutcomeSettings
    store: Store
    domains: tuple[str, ...]
    tokenizer: Any
    notes: list[str]

    def rows_by_label(self) -> dict[Label, list[Example]]:
        settings, domains = self.settings, self.domains
        named = {domain for source in settings.sources for domain in source.domains}
        if unknown := sorted(named - {*domains}):
            raise InputError(
                f"sources: no domain {', '.join(unknown)} to route to (there are "
                f"{', '.join(domains)})"
            )
        root = user_path(settings.data) if settings.data else Path()
        labelled = [(source.domains, source.data) for source in settings.sources]
        if settings.data and not labelled:
            labelled = list(self._files(root))
        if not labelled:
            return self._stored()
        tokens = special_tokens(self.tokenizer) if self.tokenizer is not None else ()
        groups: dict[Label, list[Example]] = {}
        for names, data in labelled:
            by_id: dict[str, Example] = {}
            for source in data.sources:
                for example in read_source(source, data, root, tokens)[0].values():
                    keep_one(by_id, example)
            label = tuple(sorted(set(names), key=domains.index))
            groups.setdefault(label, []).extend(by_id.values())
        if not settings.sources and (missing := [d for d in domains if (d,) not in groups]):
            self.notes.append(f"No prompts of {', '.join(missing)} alone.")
        return groups

    def _files(self, root: Path) -> Iterator[tuple[Label, DomainDataSettings]]:
        """NAME.jsonl; where not a single one fits nothing is noted, for the store's rows count."""
        try:
            files = sorted(path for path in root.glob("*.jsonl") if path.is_file())
        except OSError as error:
            raise InputError(f"{str(root)[:200]!a}: cannot be read: {error.strerror}") from None
        left_out = []
        without = {*self.domains}.difference(*(path.stem.split("+") for path in files))
        for path in files:
            is_other = path.stem == OTHERS and OTHERS not in self.domains
            parts = [] if is_other else path.stem.split("+")
            if strange := [part for part in parts if part not in self.domains]:
                if close := get_close_matches(strange[0], sorted(without), 1):
                    raise InputError(
                        f"{path.name}: the store has no domain {strange[0]!r}, and its domain "
                        f"{close[0]!r} has no prompts; did you mean that?"
                    )
                known = {d.name for d in self.store.manifest.domains}
                why = "disabled or without stacks" if {*strange} <= known else "not in the store"
                left_out.append(f"{path.name} is left out: {', '.join(strange)} {why}.")
            else:
                yield tuple(parts), DomainDataSettings(sources=(SourceSettings(path=path.name),))
        if len(left_out) < len(files):
            self.notes.extend(left_out)

    def _stored(self) -> dict[Label, list[Example]]:
        """Rows that the domains were trained with, and those that were held out."""
        store, wanted = self.store, dict[str, DomainDataSettings]()
        missing = []
        for name in self.domains:
            try:
                wanted[name] = stored_data(store, store.domain_named(name), self.settings.data)
            except InputError as error:
                missing.append(f"No prompts of {name}: {error}")
        if not wanted:
            if self.settings.data:  # one place: the others lack the same
                del missing[1:]
            raise InputError(
                "\n  ".join([f"{store.path}: the data of its domains is not here:", *missing])
                + "\ngive --data, the directory that they were trained with, or one with NAME.jsonl"
                f" (in Python {{NAME: rows}}), NAME being {', '.join(self.domains)}, two joined "
                f"with +, or {OTHERS}"
            )
        self.notes.extend(missing)
        records = {name: store.domain_named(name).split for name in wanted}
        splits = {name: store.read_json(file) for name, file in records.items() if file is not None}
        read = read_domains(wanted, Path(), tokenizer=self.tokenizer, stored=splits)
        return {(name,): [*data.validation, *data.train] for name, data in read.items()}


# --- from rows to examples ------------------------------------------------------------------------


def _examples(
    rows: Iterable[Example],
    label: Label,
    settings: OutcomeSettings,
    trained: Collection[str],
    notes: list[str],
) -> list[RouterExample]:
    """Rows as examples, each content once."""
    kind: Kind = "mixed" if len(label) > 1 else "single" if label else "other"
    examples: dict[str, RouterExample] = {}
    short = 0
    for row in rows:
        turns = turns_of(row.record)
        prompt, answer = (str(row.record["text"]), "") if turns is None else first_pair(turns)
        if len(prompt.strip()) < settings.shortest_prompt:
            short += 1
            continue
        usable = answer if answer and len(answer) >= settings.shortest_answer else None
        record = {"text": prompt} if usable is None else {"prompt": prompt, "answer": usable}
        row_id = row_id_of(record)
        was_trained = row.row_id in trained or (row_id in examples and examples[row_id].trained_on)
        examples[row_id] = RouterExample(
            prompt, usable, label, kind, row_id, row.source, was_trained
        )
    if short:
        notes.append(f"{_spelled(label)}: left out as too short: {counted(short, 'prompt')}.")
    return list(examples.values())


def _check_conflicts(by_label: Mapping[Label, Iterable[RouterExample]]) -> None:
    """Raises: InputError listing prompts with more than one label."""
    by_prompt: dict[str, dict[Label, RouterExample]] = {}
    for label, examples in by_label.items():
        for example in examples:
            prompt_id = prompt_id_of({"prompt": example.prompt, "answer": ""})
            by_prompt.setdefault(prompt_id, {})[label] = example
    conflicts = [labels for labels in by_prompt.values() if len(labels) > 1]
    if not conflicts:
        return
    lines = [
        f"{next(iter(labels.values())).prompt[:60]!r}: "
        + " and ".join(f"{_spelled(label)} ({e.source})" for label, e in labels.items())
        for labels in conflicts
    ]
    verb = "has" if len(conflicts) == 1 else "have"
    title = f"{counted(len(conflicts), 'prompt')} {verb} two labels:"
    raise InputError(
        in_lines(title, lines)
        + "\na prompt can have one; keep it in one file, or in one of both domains (a+b.jsonl)"
    )


def _spelled(label: Label) -> str:
    return "+".join(label) or OTHERS


# --- held out, for an evaluation ------------------------------------------------------------------

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

"""Examples for the router: prompts with the domains that they are of, from files or from the store.

A directory holds NAME.jsonl, NAME being a domain (`code`), several (`code+math`: prompts that need
both) or `others` (prompts of no domain). Rows are in any format that training data has; of a
conversation its first question and answer count, of a text the whole as a prompt without an answer.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxstacks.data import DomainDataSettings, Example, Row, encode_examples, read_domains
from mlxstacks.data.conversations import first_pair
from mlxstacks.data.examples import make_example, prompt_id_of, row_id_of, turns_of
from mlxstacks.data.markers import special_tokens
from mlxstacks.data.read_source import keep_one, keyed_hash, read_source
from mlxstacks.data.settings import SourceSettings, Template
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.store import Store
from mlxstacks.routing.outcome_files import Kind, RouterExample
from mlxstacks.routing.settings import OutcomeSettings
from mlxstacks.studies.stack.plan import data_settings_of, stored_data

OTHERS = "others"
Label = tuple[str, ...]
_SHOWN = 8


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
    tokens = special_tokens(tokenizer) if tokenizer is not None else ()
    if settings.sources:
        groups = _from_sources(settings, domains, tokens)
    elif settings.data:
        groups = _from_files(settings, store, domains, tokenizer, notes)
    else:
        groups = _from_store(settings, store, domains, tokenizer, notes)
    trained = trained_rows(store)
    found = {label: _pairs(rows, label, settings, trained, notes) for label, rows in groups.items()}
    _check_conflicts(found)
    order = sorted(found, key=lambda label: _place(label, domains))
    examples = [one for label in order for one in _capped(found[label], label, settings)]
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


def template_of(settings: OutcomeSettings, store: Store) -> Template:
    """The template of the settings, else the one of the store's domains.

    Raises: InputError where the domains differ.
    """
    if settings.template is not None:
        return settings.template
    found: set[Template] = set()
    for domain in store.manifest.domains:
        if domain.enabled and domain.origin == "trained":
            found.add(data_settings_of(domain).template)
    if len(found) > 1:
        raise InputError(
            f"{store.path}: its domains were trained with the templates "
            f"{' and '.join(sorted(found))}; say with which one answers are judged: --template"
        )
    return found.pop() if found else "chat"


def encode_pair(
    prompt: str,
    answer: str,
    tokenizer: Any,
    template: Template,
    max_tokens: int,
    rendering: Rendering = PLAIN,
) -> Row | None:
    """A prompt and its answer as tokens, loss on the answer alone; None where none of it is left
    within max_tokens. Raises: InputError: the template refuses it.
    """
    settings = DomainDataSettings(
        sources=(SourceSettings(path="prompt"),), template=template, thinking=rendering.thinking,
        allow_special=rendering.allow_special,
    )  # fmt: skip
    example = make_example({"prompt": prompt, "answer": answer}, "the prompt")
    try:
        return encode_examples([example], tokenizer, settings, max_tokens).rows[0]
    except InputError as error:
        if "none of 1 rows" in str(error):
            return None
        raise


# --- where rows come from -------------------------------------------------------------------------

Groups = dict[Label, list[Example]]


def _from_sources(
    settings: OutcomeSettings, domains: tuple[str, ...], tokens: Collection[str]
) -> Groups:
    unknown = sorted({d for source in settings.sources for d in source.domains} - {*domains})
    if unknown:
        raise InputError(
            f"sources: no domain {', '.join(unknown)} to route to (there are {', '.join(domains)})"
        )
    root = user_path(settings.data) if settings.data else Path()
    groups: Groups = {}
    for source in settings.sources:
        label = _ordered(source.domains, domains)
        groups.setdefault(label, []).extend(_rows(source.data, root, tokens))
    return groups


def _from_files(
    settings: OutcomeSettings,
    store: Store,
    domains: tuple[str, ...],
    tokenizer: Any,
    notes: list[str],
) -> Groups:
    root = user_path(settings.data or "")
    try:
        files = sorted(path for path in root.glob("*.jsonl") if path.is_file())
    except OSError as error:
        raise InputError(f"{str(root)[:200]!a}: cannot be read: {error.strerror}") from None
    tokens = special_tokens(tokenizer) if tokenizer is not None else ()
    groups: Groups = {}
    left_out = []
    for path in files:
        parts = [] if path.stem == OTHERS and OTHERS not in domains else path.stem.split("+")
        strange = [part for part in parts if part not in domains]
        if strange:
            known = {d.name for d in store.manifest.domains}
            why = "disabled or without stacks" if {*strange} <= known else "not in the store"
            left_out.append(f"{path.name} is left out: {', '.join(strange)} {why}.")
            continue
        data = DomainDataSettings(sources=(SourceSettings(path=path.name),))
        groups.setdefault(_ordered(parts, domains), []).extend(_rows(data, root, tokens))
    if not groups:
        return _from_store(settings, store, domains, tokenizer, notes)
    notes += left_out
    if missing := [d for d in domains if (d,) not in groups]:
        notes.append(f"No prompts of {', '.join(missing)} alone.")
    return groups


def _from_store(
    settings: OutcomeSettings,
    store: Store,
    domains: tuple[str, ...],
    tokenizer: Any,
    notes: list[str],
) -> Groups:
    """Rows that the domains were trained with, and those that were held out."""
    wanted: dict[str, DomainDataSettings] = {}
    for name in domains:
        try:
            wanted[name] = stored_data(store, store.domain_named(name), settings.data)
        except InputError as error:
            notes.append(f"No prompts of {name}: {error}")
    if not wanted:
        raise InputError(
            "\n  ".join([f"{store.path}: the data of its domains is not here:", *notes])
            + "\ngive --data, the directory that they were trained with, or one with NAME.jsonl for"
            f" {', '.join(domains)}, two joined with +, or {OTHERS}.jsonl"
        )
    splits = {
        name: store.read_json(record.split)
        for name in wanted
        for record in [store.domain_named(name)]
        if record.split is not None
    }
    read = read_domains(wanted, Path(), tokenizer=tokenizer, stored=splits)
    return {(name,): [*data.validation, *data.train] for name, data in read.items()}


def _rows(data: DomainDataSettings, root: Path, tokens: Collection[str]) -> list[Example]:
    found: dict[str, Example] = {}
    for source in data.sources:
        for example in read_source(source, data, root, tokens)[0].values():
            keep_one(found, example)
    return list(found.values())


# --- from rows to examples ------------------------------------------------------------------------


def _pairs(
    rows: Iterable[Example],
    label: Label,
    settings: OutcomeSettings,
    trained: Collection[str],
    notes: list[str],
) -> list[RouterExample]:
    """Rows as examples, each content once."""
    kinds: dict[int, Kind] = {0: "other", 1: "single"}
    found: dict[str, RouterExample] = {}
    short = 0
    for row in rows:
        prompt, answer = _prompt_and_answer(row.record)
        if len(prompt.strip()) < settings.shortest_prompt:
            short += 1
            continue
        if answer is not None and len(answer) < settings.shortest_answer:
            answer = None
        record = {"text": prompt} if answer is None else {"prompt": prompt, "answer": answer}
        row_id = row_id_of(record)
        was_trained = row.row_id in trained or (row_id in found and found[row_id].trained_on)
        kind = kinds.get(len(label), "mixed")
        found[row_id] = RouterExample(prompt, answer, label, kind, row_id, row.source, was_trained)
    if short:
        notes.append(f"{_spelled(label)}: {short} prompts are too short; left out.")
    return list(found.values())


def _prompt_and_answer(record: Mapping[str, Any]) -> tuple[str, str | None]:
    turns = turns_of(record)
    if turns is None:
        return str(record["text"]), None
    prompt, answer = first_pair(turns)
    return prompt, answer or None


def _check_conflicts(found: Mapping[Label, Iterable[RouterExample]]) -> None:
    """Raises: InputError listing prompts with more than one label."""
    labels: dict[str, dict[Label, RouterExample]] = {}
    for label, examples in found.items():
        for one in examples:
            prompt_id = prompt_id_of({"prompt": one.prompt, "answer": ""})
            labels.setdefault(prompt_id, {})[label] = one
    conflicts = [by_label for by_label in labels.values() if len(by_label) > 1]
    if not conflicts:
        return
    lines = [
        f"{next(iter(by_label.values())).prompt[:60]!r}: "
        + " and ".join(f"{_spelled(label)} ({one.source})" for label, one in by_label.items())
        for by_label in conflicts[:_SHOWN]
    ]
    more = [f"and {len(conflicts) - _SHOWN} more"] if len(conflicts) > _SHOWN else []
    raise InputError(
        "\n  ".join([f"{len(conflicts)} prompts have two labels:", *lines, *more])
        + "\na prompt can have one; keep it in one file, or in one of both domains (a+b.jsonl)"
    )


def _capped(
    examples: Iterable[RouterExample], label: Label, settings: OutcomeSettings
) -> list[RouterExample]:
    def place(one: RouterExample) -> tuple[bool, int]:
        return one.trained_on, keyed_hash(settings.seed, "route", one.row_id)

    cap = settings.mixed_cap if len(label) > 1 else settings.single_cap
    return [replace(one, label=label) for one in sorted(examples, key=place)[:cap]]


def _ordered(label: Iterable[str], domains: tuple[str, ...]) -> Label:
    return tuple(sorted(set(label), key=domains.index))


def _place(label: Label, domains: tuple[str, ...]) -> tuple[bool, int, list[int]]:
    """Singles, mixed, then others; each by the order of the store."""
    return not label, len(label), [domains.index(d) for d in label]


def _spelled(label: Label) -> str:
    return "+".join(label) or OTHERS

"""A result, put into words with what goes for all kinds: plan, standing, environment, repeat."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from mlxstacks.files.manifest import FULL
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.report.content import Cell, Content
from mlxstacks.report.find import MANIFEST, Source
from mlxstacks.report.kinds import Kind, kind_named
from mlxstacks.report.repeat import Recipe, recipe_of
from mlxstacks.report.results import content_of, result_of
from mlxstacks.report.values import Value, plain
from mlxstacks.study.document import RESULT
from mlxstacks.study.provenance import Checked, check_made_from
from mlxstacks.study.render.words import clean, listed, nbytes, number, short

Standing = Literal["confirmatory", "EXPLORATORY", "planned only", "no plan"]
_MOST_NAMED = 5
EXPLORATORY: Standing = "EXPLORATORY"
_STANDINGS: Mapping[str, Standing] = {
    "confirmatory": "confirmatory",
    "no plan": "no plan",
    "planned": "planned only",
}


@dataclass(frozen=True)
class Run:
    """All that the page says of one result.

    slug: of its anchor and files. settings, plan: names and values in words. recipe: None where
    the result says no settings. power: what the plan can find.
    """

    slug: str
    source: Source
    kind: Kind
    status: str
    hypothesis: str
    standing: Standing
    reasons: tuple[str, ...]
    plan_sha256: str | None
    plan: tuple[tuple[str, Cell], ...]
    power: tuple[str, ...]
    settings: tuple[tuple[str, Cell], ...]
    environment: tuple[tuple[str, Cell], ...]
    recipe: Recipe | None
    notes: tuple[str, ...]
    content: Content


def run_of(source: Source, slug: str) -> Run:
    """Raises: InputError for an unknown kind and for a part of another type than its key says."""
    if source.file in (RESULT, MANIFEST):
        return _run_of_result(source, slug)
    file = f"{source.path}/{source.file}"
    kind = kind_named(source.kind, file)
    document = Value(source.document, file)
    checked = _checked(source, document)
    standing, reasons = _standing(document, checked)
    exploratory = standing == EXPLORATORY

    def mark(title: str) -> str:
        return f"{title} (EXPLORATORY)" if exploratory else title

    settings, plan = document["settings"], document["plan"]
    assert kind.content is not None
    content = kind.content(document, mark)
    return Run(
        slug, source, kind, document["status"].text or "unknown",
        plan["hypothesis"].text or _hypothesis(plan) or kind.question,
        standing, reasons, document["plan_sha256"].text,
        _pairs(plan, skip={"hypothesis"}), tuple(document["power"].texts()), _pairs(settings),
        _environment(document), recipe_of(kind.command, settings),
        (*_notes(document), *_answers_note(checked)),
        content,
    )  # fmt: skip


def _run_of_result(source: Source, slug: str) -> Run:
    file = f"{source.path}/{source.file}"
    result = result_of(source.document, file)
    exploratory = result.standing.status == "exploratory"
    standing: Standing = EXPLORATORY if exploratory else _STANDINGS[result.standing.status]
    if result.status == "planned":
        standing = "planned only"

    def mark(title: str) -> str:
        return f"{title} (EXPLORATORY)" if exploratory else title

    settings, plan = Value(result.settings, file), Value(result.plan, file)
    about = Value(result.environment.model_dump() | {"plan": result.plan}, file)
    return Run(
        slug, source, Kind(result.title, result.kind, result.question, None), result.status,
        plan["hypothesis"].text or result.question, standing, result.standing.reasons,
        result.plan_sha256, _pairs(plan, skip={"hypothesis"}), result.power, _pairs(settings),
        _environment(about), recipe_of(result.kind, settings), result.notes,
        content_of(result, mark),
    )  # fmt: skip


def _hypothesis(plan: Value) -> str | None:
    """Of a plan with one part a task: theirs, each once."""
    found = [one["hypothesis"].text for _, one in _tasks(plan)]
    return " ".join(dict.fromkeys(text for text in found if text)) or None


def _tasks(plan: Value) -> list[tuple[str, Value]]:
    tasks = plan["tasks"]
    pairs = tasks.items() if tasks.is_mapping else plan.items()
    return [(name, one) for name, one in pairs if one.is_mapping]


def _checked(source: Source, document: Value) -> Checked:
    """The answers beside a result against the digests in it."""
    named = document["made_from"]
    return check_made_from(Path(source.path), {name: one.raw for name, one in named.items()})


def _answers_note(checked: Checked) -> tuple[str, ...]:
    notes = []
    if checked.same:
        files, were = ("file", "it was") if checked.same == 1 else ("files", "they were")
        notes.append(
            f"Read again: {checked.same:,} {files} of answers and outcomes beside the result, as "
            f"{were} when made."
        )
    if checked.missing:
        notes.append(
            f"Not beside the result, so not held against it: {_beginning(checked.missing)}."
        )
    return tuple(notes)


def _beginning(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    said = listed(short(name, 120) for name in names[:_MOST_NAMED])
    return f"{said} and {more:,} more" if more > 0 else said


def _standing(document: Value, checked: Checked) -> tuple[Standing, tuple[str, ...]]:
    """What the result says of itself, whether its plan has the hash that it names, and whether the
    answers beside it are those that it was made from.
    """
    if document["status"].text == "planned":
        return "planned only", ()
    own, plan, named = document["standing"], document["plan"], document["plan_sha256"].text
    reasons = own["reasons"].texts()
    if plan and named not in _hashes(plan.raw):
        reasons.append(f"the plan in the file has not the hash {short_hash(named)} that it names")
    if checked.other:
        reasons.append(_beginning(checked.other))
    if own["status"].text == "exploratory" or reasons:
        return EXPLORATORY, tuple(reasons)
    return ("confirmatory", ()) if plan and plan.is_mapping and named else ("no plan", ())


def _hashes(plan: Mapping[str, Any]) -> set[str]:
    """As all commands but one hash a plan, and as `sweep buffers` and `train` do."""
    text = json.dumps(plan, sort_keys=True)
    return {json_sha256(plan), sha256(text.encode()).hexdigest()}


def short_hash(found: str | None) -> str:
    return clean(found, 12).partition(" ")[0] if found else "none"


def _pairs(value: Value, skip: frozenset[str] | set[str] = frozenset()) -> tuple[
    tuple[str, Cell], ...
]:  # fmt: skip
    """Names and values; parts of a nested one as `name.part`."""
    found: list[tuple[str, Cell]] = []
    for name, one in value.items() if value.is_mapping else ():
        if name in skip:
            continue
        if one.is_mapping and one:
            found += [(f"{name}.{inner}", plain(part)) for inner, part in one.items()]
        else:
            found.append((name, "none" if one.raw is None else plain(one)))
    return tuple(found)


def _environment(about: Value) -> tuple[tuple[str, Cell], ...]:
    figures = about["figures"]
    where = figures if figures["versions"] else about
    said: list[tuple[str, Cell]] = [
        ("device", where["device"].text),
        ("versions", listed(f"{k} {v.text}" for k, v in where["versions"].items()) or None),
        ("seconds", number(where["seconds"].number)),
        ("highest memory", nbytes(where["peak_bytes"].number)),
    ]
    fingerprint = about["base_fingerprint"].text or about["plan"]["base_fingerprint"].text
    if fingerprint and not fingerprint.startswith(FULL):
        fingerprint += " (of samples)"
    said.append(("base fingerprint", fingerprint))
    return tuple(said)


def _notes(document: Value) -> tuple[str, ...]:
    notes = document["notes"].texts()
    if gate := document["failed_gate"].text:
        notes.insert(0, f"Gate not met: {gate}")
    return tuple(notes)

"""What outcome discovery leaves for the router's training: examples, and targets for some of them.

examples.jsonl          every example: prompt, answer, label
outcomes.jsonl          of the examples that were searched: losses, the best set, targets
losses.jsonl            raw losses by content (outcome_cache.py)
result.json             settings, counts, tables; discover_report.json before version 0.2
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from mlxstacks.data import numbered_records
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.strict_json import read_object
from mlxstacks.study.document import RESULT
from mlxstacks.study.result import Result

EXAMPLES, OUTCOMES, LOSSES = "examples.jsonl", "outcomes.jsonl", "losses.jsonl"
FORMER_REPORT = "discover_report.json"

Kind = Literal["single", "mixed", "other"]
Share = Annotated[float, Field(ge=0, le=1)]
# Domain -> target, in the order of the store.
Targets = dict[str, Share]
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class RouterExample:
    """One prompt with its label: the domains of its source, () where no stack should help.

    answer: None where there is none; such an example has no outcome. row_id: of prompt and answer
    (`data.examples.row_id_of`). trained_on: a stack of the store was trained on the row.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    prompt: str
    answer: str | None
    label: tuple[str, ...]
    kind: Kind
    row_id: str
    source: str = ""
    trained_on: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the search found for one example.

    best: domains of the best set, in the order of the store, soft ones among them. soft: those of
    it that only the soft boost added. targets: t of the spec, before the label is blended in.
    final: after. losses: every loss that was asked for, by domains joined with `+`; "" is the base.
    path: the sets on the way to the best one, in the same words.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    row_id: str
    label: tuple[str, ...]
    kind: Kind
    base_loss: float
    best_loss: float
    best: tuple[str, ...]
    soft: tuple[str, ...]
    targets: Targets
    final: Targets
    losses: dict[str, float]
    path: tuple[str, ...]
    trained_on: bool = False
    control: dict[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Nats that the best set takes off the base's loss; 0 where nothing does."""
        return self.base_loss - self.best_loss


class _ReportParts(TypedDict):
    """What others read of a report, tables aside."""

    base_fingerprint: str
    stacks: dict[str, list[str]]
    chat_domain: str | None
    chat_floor: Share


_EXAMPLE, _OUTCOME = TypeAdapter(RouterExample), TypeAdapter(Outcome)
_REPORT_PARTS = TypeAdapter(_ReportParts)


def write_lines(path: Path, records: Iterable[RouterExample] | Iterable[Outcome]) -> None:
    """One JSON object a line, in the order given: equal records give equal bytes."""
    with path.open("w", encoding="ascii") as lines:
        for record in records:
            lines.write(json.dumps(asdict(record), allow_nan=False) + "\n")


def read_discovered_examples(directory: Path | str) -> list[RouterExample]:
    """Raises: InputError: no discovery is there, or a line is no example."""
    return _read(directory, EXAMPLES, _EXAMPLE)


def read_discovered_outcomes(directory: Path | str) -> list[Outcome]:
    """Raises: as `read_discovered_examples`. Empty where nothing was searched."""
    return _read(directory, OUTCOMES, _OUTCOME)


def read_outcomes(directory: Path | str) -> tuple[list[RouterExample], dict[str, Targets]]:
    """Examples, and by row_id the final targets of those whose outcome was discovered.

    Raises: InputError: the directory is not what `route discover` writes, or was changed so that
        an outcome belongs to no example.
    """
    examples = read_discovered_examples(directory)
    outcomes = read_discovered_outcomes(directory)
    known = {example.row_id for example in examples}
    strange = [outcome.row_id for outcome in outcomes if outcome.row_id not in known]
    if strange:
        raise InputError(
            f"{directory}: {len(strange)} outcomes belong to no example (first {strange[0]!a}); "
            "its files are of different runs: run `mlxstacks route discover` again"
        )
    return examples, {outcome.row_id: outcome.final for outcome in outcomes}


def read_discovery(directory: Path | str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The figures of the result (`domains`, `chat_domain`, `chat_floor`, `stacks`: domain -> sha256
    of its stacks, `base_fingerprint`, and the tables), and what was changed since, in words.

    Raises: InputError.
    """
    path, changes = user_path(directory) / RESULT, tuple[str, ...]()
    try:
        if path.is_file():
            result = Result.open(path)
            figures, changes = result.data, result.standing.reasons
        else:
            path = _there(directory, FORMER_REPORT)
            figures = read_object(path.read_bytes())
        _REPORT_PARTS.validate_python(figures)
    except ValidationError as error:
        raise InputError(
            f"{path}: {_first_problem(error)}; run `mlxstacks route discover` again"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: no result of `mlxstacks route discover`: {error}; run it again"
        ) from None
    return figures, changes


def _read(directory: Path | str, name: str, adapter: TypeAdapter[Any]) -> list[Any]:
    path = _there(directory, name)
    if path.stat().st_size == 0:
        return []
    found = []
    for number, record in numbered_records(path):
        try:
            found.append(adapter.validate_python(record))
        except ValidationError as error:
            raise InputError(f"{path}, line {number}: {_first_problem(error)}") from None
    return found


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _there(directory: Path | str, name: str) -> Path:
    path = user_path(directory) / name
    if not path.is_file():
        raise InputError(
            f"{path}: not there; give a directory that `mlxstacks route discover` wrote"
        )
    return path


def config_text(domains: Iterable[str]) -> str:
    """A set of domains as the keys of `Outcome.losses` spell it; domain names hold no `+`."""
    return "+".join(domains)


def targets_or_label(
    example: RouterExample, discovered: Mapping[str, Targets], domains: Iterable[str]
) -> Targets:
    """The target of an example for each of `domains`: the discovered one, else its plain label.
    A domain that the discovery did not know gets 0, or 1 by label.

    The floor of chat is no part of a label: a router that learned it for prompts that no domain
    fits would give none of them a gap.
    """
    found = discovered.get(example.row_id, {})
    return {d: float(found.get(d, d in example.label)) for d in domains}

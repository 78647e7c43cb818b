"""Which prompts a router was trained on, so that it is judged on others.

A router's file has the seed of its split and a hash of the row ids that were held out from it.
Where the split, made again from examples that are at hand, gives this hash, it is that split: of
the data that is measured on, or of a directory that `route discover` wrote (the one that is named;
else the one that the report of `route train` beside the router names, or the usual one).
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.routing.outcome_files import RouterExample, read_outcomes
from mlxstacks.routing.router import PromptRouter
from mlxstacks.routing.router_examples import group_key, split_places
from mlxstacks.routing.router_settings import RouterTrainSettings

TRAIN_REPORT = "train_report.json"
_OF_THE_SPLIT = ("validation_share", "validation_groups", "oracle_only", "extend")


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
    about = _header_split(router)
    if about is None:
        return None
    settings, wanted = about
    if not settings.oracle_only and (found := _made_again(examples, settings, wanted)):
        return found
    directory = targets or _named_beside(path) or settings.targets
    try:
        there, discovered = read_outcomes(directory)
    except (InputError, OSError):
        if targets is not None:
            raise
        return None
    if settings.oracle_only:
        there = [one for one in there if one.row_id in discovered]
    return _made_again(there, settings, wanted)


def _header_split(router: PromptRouter) -> tuple[RouterTrainSettings, str] | None:
    """(settings of the split, hash of what was held out), where the header has them."""
    training: dict[str, Any] = dict(router.header.training)
    split, given = training.get("split"), training.get("settings")
    if not isinstance(split, dict) or not isinstance(split.get("validation_sha256"), str):
        return None
    known = given if isinstance(given, dict) else {}
    values = {key: known[key] for key in _OF_THE_SPLIT if key in known}
    if "seed" in split:
        values["seed"] = split["seed"]
    try:
        return RouterTrainSettings.model_validate(values), split["validation_sha256"]
    except ValidationError:
        return None


def _made_again(
    examples: Sequence[RouterExample], settings: RouterTrainSettings, wanted: str
) -> RouterSplit | None:
    try:
        training, validation = split_places(
            [one.prompt for one in examples],
            settings.seed,
            settings.validation_share,
            settings.validation_groups,
        )
    except InputError:  # too few prompts to split: not those it was trained on
        return None
    if json_sha256(sorted(examples[place].row_id for place in validation)) != wanted:
        return None
    return RouterSplit(
        _groups(examples, training), _groups(examples, validation), settings.extend is not None
    )


def _groups(examples: Sequence[RouterExample], places: Iterable[int]) -> frozenset[str]:
    return frozenset(group_key(examples[place].prompt) for place in places)


def _named_beside(path: str | None) -> str | None:
    """The targets that `route train` says, beside the router, that it used."""
    if path is None:
        return None
    place = user_path(path)
    directory = place if place.is_dir() else place.parent
    try:
        report: Any = json.loads((directory / TRAIN_REPORT).read_text(encoding="utf-8"))
        targets = report["settings"]["targets"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return targets if isinstance(targets, str) else None

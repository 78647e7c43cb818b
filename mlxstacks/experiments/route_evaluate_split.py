"""Which rows a router was trained on, so that it is judged on others.

A router's file has the seed of its split and a hash of the row ids it was validated with. Where the
split, made again from the data at hand, gives this hash, it is that split. Else the report of
`route train` beside the router has the ids, and the directory of its targets the examples.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.routing.outcome_files import RouterExample, read_discovered_examples
from mlxstacks.routing.router import PromptRouter
from mlxstacks.routing.router_examples import split_places
from mlxstacks.routing.router_settings import RouterTrainSettings

TRAIN_REPORT = "train_report.json"


def trained_ids(
    router: PromptRouter, path: str | None, examples: Sequence[RouterExample]
) -> set[str] | None:
    """Row ids that a router was trained on; None where that cannot be found out.

    path: of the router, None for the store's own. examples: of the data at hand, all of them.
    """
    found = _made_again(router, examples)
    return found if found is not None or path is None else _reported(path)


def _made_again(router: PromptRouter, examples: Sequence[RouterExample]) -> set[str] | None:
    training: dict[str, Any] = dict(router.header.training)
    split = training.get("split")
    if not isinstance(split, dict):
        return None
    given = training.get("settings")
    defaults = RouterTrainSettings()
    settings = defaults.model_copy(
        update={
            key: value
            for key, value in (given.items() if isinstance(given, dict) else ())
            if key in ("validation_share", "validation_groups")
        }
    )
    try:
        _, validation = split_places(
            [one.prompt for one in examples],
            int(split.get("seed", defaults.seed)),
            settings.validation_share,
            settings.validation_groups,
        )
    except InputError:  # too few prompts to split: not those it was trained on
        return None
    held_out = sorted(examples[place].row_id for place in validation)
    if json_sha256(held_out) != split.get("validation_sha256"):
        return None
    return {one.row_id for one in examples} - set(held_out)


def _reported(path: str) -> set[str] | None:
    place = user_path(path)
    directory = place if place.is_dir() else place.parent
    try:
        report: Any = json.loads((directory / TRAIN_REPORT).read_text(encoding="utf-8"))
        held_out = set(report["split"]["validation_row_ids"])
        targets = Path(report["settings"]["targets"])
        return {one.row_id for one in read_discovered_examples(targets)} - held_out
    except (OSError, ValueError, KeyError, TypeError):  # InputError is a ValueError
        return None

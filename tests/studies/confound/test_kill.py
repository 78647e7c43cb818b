"""kill -9 between any two file operations of a run: gone on with, it ends with the same bytes.

Run: pytest tests/studies/confound/test_kill.py
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.kills import kill_at_any_operation
from tests.studies.confound_cases import TRAIN, settings_for, write_places


def results(target: Path) -> dict[str, Any]:
    """Bytes of answers, adapters and plans, and of the report what does not tell time or place.

    The training's log and last state hold seconds; its adapter does not.
    """
    found: dict[str, Any] = {
        str(path.relative_to(target)): path.read_bytes()
        for path in sorted(target.rglob("*"))
        if path.suffix in (".jsonl", ".safetensors")
        and path.name not in ("log.jsonl", "checkpoint.safetensors")
    }
    for name in ("plan.json", "protocol.json", "split.json"):
        found[name] = (target / name).read_bytes()
    adapters = {f"{kind}/adapters.safetensors" for kind in ("adapter", "zero", "random")}
    assert {*adapters, "answers/test_persona.jsonl", "answers/test_a1_promote.jsonl"} <= {*found}
    result = json.loads((target / "result.json").read_text())
    return found | {key: result[key] for key in result if key not in ("environment", "seal")}


def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(
    tmp_path: Path, campaign: Callable[..., range]
) -> None:
    places = write_places(tmp_path / "inputs", items=24)
    target = tmp_path / "out" / "killed"
    target.parent.mkdir()
    changes: dict[str, Any] = {"policies": ("promote",), "batch_size": 8, "train": {"iters": 4}}
    settings = settings_for(places, target, **changes)
    keys = settings.model_dump(mode="json", exclude={"train", "force", "resume"})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps({"command": "confound", "train": TRAIN | changes["train"], **keys})
    )
    kills = len(campaign(100, usual=2))
    kill_at_any_operation(recipe, target, kills, partial(results, target))

"""kill -9 at random moments of `grow`: the store is the old one or the new one, whole.

Run: MLXSTACKS_SOAK=1 pytest tests/grow/test_kill.py
"""

import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mlxstacks.files.manifest import Manifest
from mlxstacks.files.store import Store
from mlxstacks.study.run_directory import work_path
from tests.grow.test_grow import Places, copied, grow, places, settings_for
from tests.warm import ended, start

__all__ = ["places"]


def check_whole(path: Path, before: Manifest) -> bool:
    """Every file that the store names can be read; whether it has the new domain."""
    store = Store.open(path)
    for stack in store.manifest.stacks:
        store.read_stack(stack)
    names = tuple(domain.name for domain in store.manifest.domains)
    assert store.read_router().header.domains == names
    assert len(names) == 3 or store.manifest == before
    return len(names) == 3


@pytest.mark.slow
def test_killed_at_random_moments_the_store_is_the_old_one_or_the_new_one(
    places: Places, tmp_path: Path, campaign: Callable[[int], range]
) -> None:
    (tmp_path / "whole").mkdir()
    whole, own = copied(places, tmp_path / "whole"), copied(places, tmp_path)
    before = Store.open(places.store).manifest
    result = grow(whole, tmp_path / "whole" / "out")
    expected = replace(Store.open(whole.store).manifest, router=None)
    settings = settings_for(own, tmp_path / "out").model_dump_json(exclude_unset=True)
    chance, kills, done = random.Random(0), 0, 0
    wanted = len(campaign(100))
    while kills < wanted:
        process = start("grow", settings)
        process.join(chance.uniform(0.5, 8))
        process.kill()
        kills += ended(process) == -signal.SIGKILL
        is_new = check_whole(own.store, before)
        if (tmp_path / "out" / "result.json").exists():
            assert is_new
            assert replace(Store.open(own.store).manifest, router=None) == expected
            found = json.loads((tmp_path / "out" / "result.json").read_text())
            assert found["data"] == json.loads(json.dumps(result.data))
            done += 1
            for directory in (tmp_path / "out", own.store, work_path(tmp_path / "out")):
                shutil.rmtree(directory, ignore_errors=True)
            shutil.copytree(places.store, own.store)
    assert done > 0

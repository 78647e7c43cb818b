"""The resident set of a process that switches among more stacks than its budget holds.

pytest tests/routing/test_resident_memory.py
"""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx

from mlxstacks.files.stack_file import ProjectionShape
from mlxstacks.files.store import Store
from tests.conftest import SOAK
from tests.files.store_cases import BASE
from tests.routing.resident_cases import add_domain
from tests.routing.resident_worker import PLACES, WIDTH

STACKS, ROOM, SWITCHES = 12, 6, 100 if SOAK else 40


def test_memory_stays_within_the_budget_whatever_is_switched(tmp_path: Path) -> None:
    """12 stacks of 4.2 MB in memory, room for 6; a lease asks for 1 to 3. At most 5% above it."""
    store = Store.create(tmp_path / "store", "tiny", BASE)
    shape = ProjectionShape("linear", 8, 64, 2, 1.0, WIDTH, WIDTH)
    for index in range(STACKS):
        add_domain(store, f"d{index}", {f"layers.{i}": shape for i in range(PLACES)}, seed=index)
        mx.clear_cache()
    stack_bytes = 4 * store.manifest.stacks[0].parameters
    assert stack_bytes > 4_000_000
    budget = ROOM * stack_bytes
    command = [sys.executable, "-m", "tests.routing.resident_worker", str(store.path)]
    done = subprocess.run(
        [*command, str(SWITCHES), str(budget)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["evictions"] > SWITCHES / 3, "the budget was never felt"
    assert found["resident_bytes"] <= budget
    assert found["resident_bytes"] > budget / 3
    assert max(found["during"]) <= 1.05 * budget, (budget, found)

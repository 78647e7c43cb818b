"""Switches stacks in a process of its own and says what memory the process took.

    python -m tests.routing.resident_worker STORE SWITCHES BUDGET_BYTES

Prints one JSON object: resident set bytes before the first stack, after each tenth switch, and the
counts of `Resident`. Packs are float32, as on a CPU: half-precision ones are widened in every
forward pass there, which is memory of the pass.
"""

import json
import os
import random
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.files.store import Store
from mlxstacks.routing.resident import Resident

WIDTH, PLACES = 256, 4


class Wide(nn.Module):
    """Projections one after another; small beside the stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(PLACES)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = mx.tanh(layer(x))
        return x


def resident_set_bytes() -> int:
    """Of this process, now: Linux and macOS both know this question."""
    told = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return int(told.stdout) * 1024


def main() -> None:
    path, switches, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model, store, chance = Wide(), Store.open(path), random.Random(0)
    x = mx.ones((1, 1, WIDTH))
    mx.eval(model(x))
    resident = Resident(model, store, budget_bytes=budget, dtype=mx.float32)
    # what reading and packing bring with them (threads, code) is no memory of stacks
    with resident.lease({resident.domains[0]: 1.0}):
        mx.eval(model(x))
    resident.close()
    resident = Resident(model, store, budget_bytes=budget, dtype=mx.float32)
    before, during = resident_set_bytes(), []
    for switch in range(1, switches + 1):
        names = chance.sample(resident.domains, chance.choice([1, 1, 2, 3]))
        with resident.lease(dict.fromkeys(names, 0.5)):
            mx.eval(model(x))
        if switch % 10 == 0:
            during.append(resident_set_bytes() - before)
    print(json.dumps({"before": before, "during": during, **resident.stats.as_json()}))


if __name__ == "__main__":
    main()

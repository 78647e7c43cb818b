"""Live buffers while batches of mixed routes write, join and leave: none stay behind.

mlx-lm's batched caches of recurrent layers leave a buffer a token behind for each such layer but
the first (mlx-lm 0.32.2); `RoutedRows` has them computed. The allocator itself is counted, in a
process of its own; without a C++ compiler there is nothing to count with.

Run: pytest tests/serve/test_live_buffers.py
"""

import json
import sys
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks import base_model
from mlxstacks.routing.generation import PREFILL_TOKENS
from mlxstacks.serve.rows import RowRoutes
from tests.conftest import SOAK
from tests.counting import Counter, available, counted
from tests.serve.serve_cases import Nano, open_nano

ROUTES: tuple[dict[str, float], ...] = ({}, {"islands": 1.0}, {"adapter": 1.0, "tolu": 0.5})


def write_requests(nano: Nano, counter: Counter, requests: int, tokens: int) -> dict[str, int]:
    """Requests of so many tokens, three at a time: live buffers at the begin, and at the end, of a
    batch of the last three, and when the first three and the last three are done.
    """
    batch = base_model.batch_generator(nano.forward, [], 4, PREFILL_TOKENS)
    found: dict[str, int] = {}
    for first in range(0, requests, 3):
        held = [nano.pool.hold(route) for route in ROUTES]
        for index, one in enumerate(held):
            prompt = [1 + (first + index) % 50] * 20  # of one length: padding hides the leak
            entries = [*base_model.make_prompt_cache(nano.base.model), RowRoutes([one])]
            batch.insert_segments([[prompt[:-1], prompt[-1:]]], [tokens], [entries])
        steps = done = 0
        while done < len(held):
            done += sum(a.finish_reason is not None for a in batch.next()[1])
            steps += 1
            if steps in (32, tokens - 8):
                mx.synchronize()
                found["early" if steps == 32 else "late"] = counter.live
        for one in held:
            nano.pool.release(one)
        nano.forward.base()
        mx.synchronize()
        found.setdefault("first", counter.live)
    return {**found, "last": counter.live}


def main() -> None:
    """The counting process: [requests, tokens] -> live buffers."""
    counter = Counter()
    nano = open_nano()
    for requests, tokens in json.load(sys.stdin):
        write_requests(nano, counter, 3, 40)  # what is made once
        print(json.dumps(write_requests(nano, counter, requests, tokens)), flush=True)


@pytest.mark.skipif(not available(), reason="no C++ compiler, or not Linux")
def test_no_buffer_stays_behind_a_token_or_a_request() -> None:
    # a leak of one a token would be hundreds
    case: list[Any] = [201, 500] if SOAK else [6, 150]
    (found,) = counted("tests.serve.test_live_buffers", [case])
    assert found["late"] <= found["early"] + 8, found
    assert found["last"] <= found["first"] + 2, found


if __name__ == "__main__":
    main()

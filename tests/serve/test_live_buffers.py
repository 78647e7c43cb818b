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
from mlxstacks.guard.cache_bytes import CacheBytes
from mlxstacks.guard.predict import predict_decode
from mlxstacks.routing.generation import PREFILL_TOKENS
from mlxstacks.serve.rows import RowRoutes
from tests.conftest import SOAK
from tests.counting import Counter, available, counted
from tests.serve.serve_cases import Job, Nano, open_nano, write

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


def peak_and_prediction(nano: Nano, counter: Counter, rows: int, longest: int) -> list[int]:
    """Live buffers at the peak of rows of all routes together, and what admission predicts."""
    routes = [*ROUTES, dict.fromkeys(nano.pool.domains, 1.0)]
    jobs = [Job("Who is king? " * (1 + i % longest), routes[i % 4]) for i in range(rows)]
    held = [nano.pool.hold(job.weights) for job in jobs]
    nano.forward.base()
    step = 2 * predict_decode(nano.base.model, 1, 1, batched=True).first_buffers
    predicted = step + nano.pool.buffers + rows * CacheBytes.of(nano.base.model).buffers
    with counter.longest_lead():
        mx.synchronize()
        counter.reset()
        write(nano, jobs)
        mx.synchronize()
    for one in held:
        nano.pool.release(one)
    return [counter.peak, predicted]


def main() -> None:
    """The counting process: [requests, tokens] -> live buffers; {rows, longest} -> peaks."""
    counter = Counter()
    nano = open_nano()
    for case in json.load(sys.stdin):
        if isinstance(case, dict):
            print(json.dumps(peak_and_prediction(nano, counter, **case)), flush=True)
            continue
        requests, tokens = case
        write_requests(nano, counter, 3, 40)  # what is made once
        print(json.dumps(write_requests(nano, counter, requests, tokens)), flush=True)


@pytest.mark.skipif(not available(), reason="no C++ compiler, or not Linux")
def test_no_buffer_stays_behind_a_token_or_a_request() -> None:
    # a leak of one a token would be hundreds
    case: list[Any] = [201, 500] if SOAK else [6, 150]
    (found,) = counted("tests.serve.test_live_buffers", [case])
    assert found["late"] <= found["early"] + 8, found
    assert found["last"] <= found["first"] + 2, found


@pytest.mark.skipif(not available(), reason="no C++ compiler, or not Linux")
def test_predicted_buffers_are_enough() -> None:
    cases = [{"rows": rows, "longest": n} for rows, n in ((1, 1), (4, 1), (4, 40), (16, 10))]
    for peak, predicted in counted("tests.serve.test_live_buffers", cases):
        assert peak <= predicted <= 2 * peak


if __name__ == "__main__":
    main()

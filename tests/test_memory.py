"""Limits, counters, and the guard of a run. Run: pytest tests/test_memory.py"""

import json

import pytest

from mlxstacks.errors import InputError, ResourceLimitError
from mlxstacks.memory import ResourceGuard, device, resource_report


def test_report_is_plain_numbers() -> None:
    found = json.loads(json.dumps(resource_report()))
    assert found["resource_limit"] > 0
    assert found["peak_bytes"] >= found["active_bytes"] >= 0
    assert found["resident_bytes"] > 1_000_000


def test_a_batch_below_the_line_passes() -> None:
    guard = ResourceGuard(lambda tokens: 10 * tokens, limit=1000)
    assert guard.check(89) == 890
    assert guard.check(20) == 200
    assert (guard.largest, guard.refused) == (890, 0)


def test_a_batch_that_would_cross_the_line_is_refused() -> None:
    guard = ResourceGuard(lambda tokens: 10 * tokens, limit=1000)
    with pytest.raises(ResourceLimitError, match="rows of 90 tokens needs about 900 buffers, 90%"):
        guard.check(90)
    assert issubclass(ResourceLimitError, InputError)
    report = guard.report()
    assert report["largest_predicted_buffers"] == 900
    assert report["refused_batches"] == 1
    assert report["refused_from_buffers"] == 900


def test_forced_runs_are_noted_and_go_on() -> None:
    guard = ResourceGuard(lambda tokens: 10 * tokens, limit=1000, force=True)
    assert guard.check(500) == 5000
    assert guard.refused == 1


def test_the_limit_is_the_device_s_and_the_share_is_a_share() -> None:
    assert ResourceGuard(lambda tokens: 0).limit == device().resource_limit
    for share in (0, 1.5):
        with pytest.raises(ValueError, match="it is a share"):
            ResourceGuard(lambda tokens: 0, limit=10, refuse_share=share)

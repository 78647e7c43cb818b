"""The rule of a confound run on simulated answers: no content where there is none.

At full size: python -m benchmarks.bench_verdicts
Run: pytest tests/studies/confound/test_false_content.py
"""

import numpy as np
import pytest

from benchmarks import bench_verdicts
from benchmarks.bench_verdicts import NULLS, WAYS, Items, judge, knowledge, may_claim, rates
from mlxstacks.stats import wilson_interval

ITEMS, RUNS = {options: Items(200, options) for options in (4, 10)}, 20


@pytest.mark.parametrize("name", NULLS)
@pytest.mark.parametrize("options", ITEMS)
def test_what_knows_nothing_shows_no_content(name: str, options: int) -> None:
    found = rates(NULLS[name], ITEMS[options], RUNS, seed=1)
    assert wilson_interval(found.ours, RUNS).low <= 0.05
    if name not in ("exchangeable", "independent"):  # these two A0 alone tells
        assert found.published > 0.5 * RUNS


def test_the_rule_finds_nothing_where_it_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    items, rng = ITEMS[4], np.random.default_rng(2)
    draws = [*NULLS.values(), knowledge(0.1), knowledge(0.2)]
    runs = [[draw(rng, items) for _ in WAYS] for draw in draws for _ in range(4)]
    asked = [any(may_claim(arms, 4) for arms in run) for run in runs]
    assert 0 < sum(asked) < len(runs) / 2
    screened = [judge(run, items) for run in runs]
    monkeypatch.setattr(bench_verdicts, "may_claim", lambda *_: True)
    assert [judge(run, items) for run in runs] == screened


def test_knowledge_is_found() -> None:
    assert rates(knowledge(0.3), ITEMS[10], RUNS, seed=1).ours == RUNS


def test_the_published_a0_is_what_the_nulls_have() -> None:
    draw = NULLS["exchangeable"](np.random.default_rng(0), Items(20_000, 10))
    assert np.mean(draw["a0"] == 0) == pytest.approx(0.18, abs=0.01)
    assert np.corrcoef(draw["a1"] == 0, draw["a0"] == 0)[0, 1] > 0.2

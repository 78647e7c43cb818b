"""HumanEval from end to end: an arm that answers with the reference solutions, in the sandbox.

Run: pytest tests/studies/benchmarks/test_human_eval_run.py   (all 164: make soak)
"""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from mlxstacks.sandbox.run import SandboxError, SandboxLimits
from mlxstacks.studies.benchmarks import run as eval_run
from mlxstacks.studies.benchmarks.analysis import GradingTools
from mlxstacks.studies.benchmarks.run import run
from mlxstacks.studies.benchmarks.tasks import BenchItem, Replied
from tests.conftest import SOAK
from tests.studies.eval_cases import FakeArm, FakeArms, settings_for, use

HUMAN_EVAL = Path(__file__).parents[4] / "shared" / "data" / "bench_humaneval.jsonl"
pytestmark = pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="needs ../shared/data")


def test_reference_solutions_pass_and_broken_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, campaign: Callable[[int], range]
) -> None:
    """base answers with the solution, every other item as a whole function in a fence; routed gives
    back the function's own arguments.
    """
    solutions = {
        row["task_id"]: row["canonical_solution"]
        for row in map(json.loads, HUMAN_EVAL.read_text().splitlines())
    }

    def reply(self: FakeArm, items: Sequence[BenchItem], max_tokens: int) -> list[Replied]:
        texts = []
        for number, item in enumerate(items):
            body = solutions[item.item_id]
            fence = f"Sure:\n```python\n{item.extra['prompt']}{body}```\nThat is all."
            right = fence if number % 2 else body
            texts.append(right if self.name == "base" else "    return locals()")
        return [Replied(text, 9, "stop") for text in texts]

    monkeypatch.setattr(FakeArm, "reply", reply)
    # The clock of a busy machine is not what is tested.
    slow = SandboxLimits(wall_seconds=120, cpu_seconds=60)
    monkeypatch.setattr(
        eval_run, "grading_tools", lambda allowed: nullcontext(GradingTools(None, allowed, slow))
    )
    use(monkeypatch, FakeArms())
    limit = len(campaign(164)) if SOAK else 4
    settings = settings_for(
        HUMAN_EVAL, tmp_path / "out", tasks=("humaneval",), items_per_task=limit, allow_code=True,
        arms=("base", "routed"), domains=(),
    )  # fmt: skip
    try:
        arms = run(settings).data["tasks"]["humaneval"]["arms"]
    except SandboxError as error:
        pytest.skip(str(error))
    assert (arms["base"]["right"], arms["base"]["n"]) == (limit, limit)
    assert arms["base"]["how"] == {"finished": limit}
    assert arms["base"]["parse_failure_rate"] == 0
    assert arms["routed"]["right"] == 0
    assert set(arms["routed"]["how"]) == {"failed"}

"""A command as it is typed; an arm that is killed while it answers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.arms.arm import Arm
from mlxstacks.cli import run
from mlxstacks.study.answers import Answer
from mlxstacks.study.items import Item
from tests.studies.persona_runs import Killed


@pytest.fixture
def typed(work_dir: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """(words of the command line) -> exit code, standard output, standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(arguments)
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`killed_after(n)`: the n-th batch of replies or answers is the last thing that happens."""
    answer, replies = Arm.answer, Arm.replies
    left = [0]

    def count() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    def mortal_answer(self: Arm, items: Sequence[Item]) -> list[Answer]:
        count()
        return answer(self, items)

    def mortal_replies(arm: Arm, prompts: Sequence[str]) -> list[str]:
        count()
        return replies(arm, prompts)

    monkeypatch.setattr(Arm, "answer", mortal_answer)
    monkeypatch.setattr(Arm, "replies", mortal_replies)
    return lambda count: left.__setitem__(0, count)

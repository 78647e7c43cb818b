"""What an adapter's training cannot have is told before anything is answered, and in a dry run.

Run: pytest tests/studies/test_bad_training.py
"""

import pytest

from tests.cli.conftest import Run, command

__all__ = ["command"]


@pytest.mark.parametrize("study", ["confound", "identity"])
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("train.layers=9-12", "layer 9: the model has layers 0 to 5"),
        ("train.keys=[foo_proj]", "foo_proj"),
    ],
)
def test_a_plan_that_cannot_run(
    study: str, more: tuple[str, ...], given: str, told: str, command: Run
) -> None:
    code, _, err = command(study, "--set", given, *more)
    assert (code, told in err) == (2, True), err

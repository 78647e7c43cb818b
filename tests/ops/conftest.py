"""What the tests of operators share."""

import pytest

from mlxstacks.ops import kernels


@pytest.fixture(autouse=True)
def nothing_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons against a kernel are logged once in a process: here once in a test."""
    monkeypatch.setattr(kernels, "_logged", set())

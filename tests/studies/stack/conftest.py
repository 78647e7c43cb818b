"""A tiny model with its data, and what a run leaves of one domain and of two, trained once."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.files.store import Store
from tests.studies.stack_cases import TWO, train_store, write_places


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_places(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="session")
def whole(places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Of alpha and beta."""
    return train_store(places, tmp_path_factory.mktemp("whole") / "store", **TWO)


@pytest.fixture(scope="session")
def alpha(places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("alpha") / "store"
    return train_store(places, target, **{**TWO, "domains": ("alpha",)}).path


@pytest.fixture
def with_alpha(alpha: Path, tmp_path: Path) -> Store:
    """A copy at tmp_path/store, to train beta into."""
    shutil.copytree(alpha, tmp_path / "store")
    return Store.open(tmp_path / "store")


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs with the settings until something is called that raises StoppedError in its place."""

    def run(
        settings: Any,
        owner: Any,
        name: str,
        when: Callable[..., bool] | None = None,
        **how: Any,
    ) -> None:
        from mlxstacks.studies.stack import run as stack_run

        plain = getattr(owner, name)

        def stop(*args: Any, **kwargs: Any) -> Any:
            if when is None or when(*args):
                raise StoppedError
            return plain(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stop)
            with pytest.raises(StoppedError):
                stack_run.run(settings, **how)

    return run


class StoppedError(Exception):
    pass

"""A tiny hybrid model with its data, and one training on them, for all tests of this folder."""

from pathlib import Path
from typing import Any

import pytest

from mlxstacks.studies.train import run as train_run
from tests.studies.train_cases import settings_for, write_data, write_tiny_model


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("train")
    return write_tiny_model(directory / "model"), write_data(directory / "data")


@pytest.fixture(scope="session")
def trained(places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(report, target)"""
    target = tmp_path_factory.mktemp("out") / "adapter"
    return train_run.run(settings_for(*places, target)), target

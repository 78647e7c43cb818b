"""A tiny hybrid model and its data, for all tests of this folder."""

from pathlib import Path

import pytest

from tests.studies.train_cases import write_data, write_tiny_model


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("sweep")
    return write_tiny_model(directory / "model"), write_data(directory / "data")

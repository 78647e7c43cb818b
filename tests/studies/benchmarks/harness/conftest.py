"""A base with stacks and a router, and an arm of it, once for each file."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlxstacks.studies.benchmarks.arms import ModelArm
from tests.studies.benchmarks.arm_cases import arms_of
from tests.studies.route_evaluate_cases import Places, write_places


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    mx.set_default_device(mx.cpu)
    return write_places(tmp_path_factory.mktemp("places"), threshold=0.3)


@pytest.fixture(scope="module")
def arm(places: Places) -> Iterator[ModelArm]:
    yield from arms_of(places, ("base",))

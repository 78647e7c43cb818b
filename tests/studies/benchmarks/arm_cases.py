"""Items and places on which arms are asked in tests: the tiny model, its store, an adapter."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxstacks.studies.benchmarks.arms import ModelArm, open_arms
from mlxstacks.studies.benchmarks.settings import ArmName, ArmSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem
from tests.studies.route_evaluate_cases import Places
from tests.tiny_models import random_adapter

# Of unequal lengths, so that they share no batch; the same prompt twice; one without a label.
ITEMS = (
    BenchItem("0", "Question: who is king?\nAnswer:", 0, (" Gus", " nobody", " a long answer")),
    BenchItem("1", "red blue", 1, (" green", " x"), (" A", " B"), domain="alpha"),
    BenchItem("2", "red blue", 0, (" seven apple",), domain="beta"),
    BenchItem("3", "beta 7:" + " stone cloud" * 9, 2, (" a", " b", " c d"), domain="gamma"),
)


def write_adapter(places: Places, directory: Path, std: float = 0.3) -> Path:
    keys = ["self_attn.q_proj", "mlp.switch_mlp.down_proj"]
    return random_adapter(places.model, keys, rank=2, std=std, directory=directory)


def arms_of(places: Places, names: Sequence[ArmName], **changes: Any) -> Iterator[ModelArm]:
    values = {"model": str(places.model), "store_path": str(places.store)}
    return open_arms(names, ArmSettings.model_validate(values | changes))

"""Files of strangers, damaged at random: PEFT adapters, parquet, routers, logs of gaps.

Each is read, or refused in a message; nothing else is raised, hangs, or takes much memory.

Run: pytest tests/files/test_hostile_files.py
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save

from mlxstacks.data.arrow_sets import parquet_rows
from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.peft_adapters import read_peft
from mlxstacks.files.router_file import GapPart, GapRule, read_router, write_router
from mlxstacks.routing.gap_detector import detector_of
from mlxstacks.routing.gaps import GapLog, read_gaps
from tests.files.peft_cases import dense_tensors, save_peft
from tests.files.test_fuzz_headers import bounded, mutate_bytes, mutate_table, replace, traced
from tests.routing.test_router import header_for, tensors_for

__all__ = ["traced"]


def write_peft(directory: Path) -> Path:
    own = {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 2}, "use_rslora": False}
    tensors = dense_tensors("self_attn.q_proj", (8, 6)) | dense_tensors("self_attn.v_proj", (8, 6))
    return save_peft(directory / "adapter", tensors, own)


def write_parquet(directory: Path) -> Path:
    rows = [{"prompt": f"q{i}", "messages": [{"role": "user", "content": "x" * i}], "n": i}
            for i in range(40)]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), directory / "a.parquet")
    return directory / "a.parquet"


def write_a_router(directory: Path) -> Path:
    header = header_for("0" * 64, gaps=GapRule((GapPart("energy", 0, 0, 0, 0.1, 1.0),), 0.5))
    write_router(directory / "router.safetensors", tensors_for(header), header)
    return directory / "router.safetensors"


def write_gaps(directory: Path) -> Path:
    log = GapLog(directory / "gaps.jsonl")
    for number in range(6):
        log.add(f"Wer ist {number}?", {"code": 0.1, "math": 0.2}, np.ones(4, np.float32))
    return log.path


def damage_json(chance: random.Random, text: str) -> str:
    value = json.loads(text)
    mutate_table(chance, value)
    return json.dumps(value)


def damage(chance: random.Random, content: bytes, name: str) -> bytes:
    """A bit here and there; or, where there is JSON, what it says."""
    if chance.random() < 0.3 or name.endswith(".parquet"):
        return mutate_bytes(chance, content)
    if name.endswith(".json"):
        return damage_json(chance, content.decode()).encode()
    if name.endswith(".jsonl"):
        lines = content.decode().splitlines()
        at = chance.randrange(len(lines))
        lines[at] = damage_json(chance, lines[at])
        return "\n".join(lines).encode()
    return mutate_bytes(chance, content)


def damage_router(chance: random.Random, path: Path) -> bytes:
    """What its header says, of tensors that are as they were."""
    if chance.random() < 0.3:
        return mutate_bytes(chance, path.read_bytes())
    with safe_open(path, "numpy") as file:
        about = dict(file.metadata())
    key = max(about, key=lambda name: len(about[name]))
    return save(load_file(path), {**about, key: damage_json(chance, about[key])})


def read_whole_router(path: Path) -> object:
    return detector_of(read_router(path))


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (write_peft, read_peft), (write_parquet, lambda path: [*parquet_rows(path)]),
        (write_a_router, read_whole_router), (write_gaps, read_gaps),
    ],
    ids=["peft", "parquet", "router", "gaps"],
)  # fmt: skip
def test_what_is_damaged_is_read_or_refused(
    write: Callable[[Path], Path],
    read: Callable[[Path], Any],
    tmp_path: Path,
    campaign: Callable[..., range],
) -> None:
    (tmp_path / "whole").mkdir()
    whole = write(tmp_path / "whole")
    read(whole)
    files = sorted(whole.iterdir()) if whole.is_dir() else [whole]
    runs, refused = campaign(2000, usual=40), 0
    for number in runs:
        chance = random.Random(number)
        place = chance.choice(files)
        content = place.read_bytes()
        is_router = place.name == "router.safetensors"
        bad = damage_router(chance, place) if is_router else damage(chance, content, place.name)
        replace(place, bad)
        message = None
        with bounded(f"{write.__name__} {number}"):
            try:
                read(whole)
            except (InputError, StoreError) as error:
                message = str(error)
        replace(place, content)
        if message is not None:
            refused += 1
            assert str(whole) in message, number
            assert len(message) < 2000, number
    assert 0.02 < refused / len(runs) <= 1

"""kill -9 at random moments of a training run: resumed, it ends with the same bytes.

Run: pytest tests/studies/train/test_kill.py
"""

import json
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.study.run_directory import work_path
from mlxstacks.training.settings import AlignSettings, TrainSettings
from tests.studies.train_cases import WORDS, settings_for, write_data, write_rows, write_tiny_model
from tests.warm import ended, start

STEPS = 12


def wait_for_start(process: ForkServerProcess, target: Path, before: int) -> bool:
    """Until the run has written a line of its log beyond `before` bytes; False when it is over."""
    log = work_path(target) / "log.jsonl"
    while process.is_alive():
        if log.exists() and log.stat().st_size != before:
            return True
        time.sleep(0.002)
    return False


def check_finished(target: Path, whole: Path, resumes: bool) -> None:
    for name in ("adapters.safetensors", "adapter_config.json"):
        assert (target / name).read_bytes() == (whole / name).read_bytes(), name
    events = [json.loads(line) for line in (target / "log.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(1, STEPS + 1))
    # It did go on, rather than begin again.
    report = json.loads((target / "result.json").read_text())["data"]
    assert (report["resumed_from_step"] > 0) == resumes


def write_own_reward(directory: Path) -> str:
    """Half of the byte tokens earn something: the untrained model meets them at once."""
    file = directory / "own.py"
    file.write_text("def early(answer, row):\n    return sum(c < '@' for c in answer) / 99\n")
    return f"{file}:early"


@pytest.mark.parametrize("method", ["train", "dpo", "grpo"])
def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(
    method: str, tmp_path: Path, campaign: Callable[..., range]
) -> None:
    model, data = write_tiny_model(tmp_path / "model"), write_data(tmp_path / "data")
    changes: dict[str, Any] = {
        "iters": STEPS, "save_every": 1, "steps_per_eval": 6, "steps_per_report": 1,
    }  # fmt: skip
    if method == "dpo":
        rows = [{"prompt": f"{word} {i}", "chosen": word, "rejected": WORDS[i - 1]}
                for i, word in enumerate(WORDS)]  # fmt: skip
        for name in ("train", "valid"):
            write_rows(data / f"{name}.jsonl", rows)
    if method == "grpo":
        reward = write_own_reward(tmp_path)
        changes |= {"reward": (reward,), "group_size": 4, "max_tokens": 6, "max_seq_length": 256}
    if method != "train":
        limits = {"max_nll_rise": None, "max_divergence": None}
        changes |= {"method": method, "safeguards": limits, "dropout": 0.0}

    def settings_to(target: Path) -> str:
        values = settings_for(model, data, target).model_dump(exclude_unset=True) | changes
        kind = TrainSettings if method == "train" else AlignSettings
        return kind(**values).model_dump_json()

    command = "train" if method == "train" else "align"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(command, settings_to(whole))
    assert wait_for_start(process, whole, 0)
    began = time.monotonic()
    assert ended(process) == 0
    duration = time.monotonic() - began
    settings = settings_to(killed)
    work, chance, kills = work_path(killed), random.Random(0), 0
    wanted = len(campaign(100, usual=2))
    state, log = work / "checkpoint.safetensors", work / "log.jsonl"
    while kills < wanted:
        before, resumes = log.stat().st_size if log.exists() else 0, state.exists()
        process = start(command, settings)
        if wait_for_start(process, killed, before):
            # The first at once: one kill at least meets the run at work.
            time.sleep(chance.uniform(0, duration / 2) if kills else 0)
        process.kill()
        kills += ended(process) == -signal.SIGKILL
        if killed.exists():
            # Done before the kill, or all but clearing away: check, and begin another.
            check_finished(killed, whole, resumes)
            shutil.rmtree(killed)
            shutil.rmtree(work, ignore_errors=True)
    resumes = state.exists()
    assert ended(start(command, settings)) == 0
    check_finished(killed, whole, resumes)

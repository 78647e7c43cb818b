"""`mlxstacks pretrain`: a model that mlx-lm loads, resumed to the same bytes.

Run: pytest tests/studies/train/test_pretrain.py
"""

import signal
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks import base_model
from mlxstacks.data.rows import row_of
from mlxstacks.data.sources import TEXT_CHARACTERS, read_in_order, train_data_settings
from mlxstacks.errors import InputError
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.studies.train import pretrain
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from mlxstacks.training.settings import PretrainSettings, StackRunSettings
from tests.groups import in_group, needs_group
from tests.studies.train.test_kill import wait_for_start
from tests.studies.train_cases import write_data, write_rows
from tests.warm import ended, start_command_line

SHAPE: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 270,
    "max_seq_length": 24, "batch_size": 4, "learning_rate": 1e-2, "warmup": 2,
}  # fmt: skip
FILES = ("model.safetensors", "config.json", "tokenizer.json")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    lines = [f"The fox number {i} ran over hill {i % 7}.\nIt was happy." for i in range(1500)]
    path.write_text("\n\n".join(lines) + "\n")
    return path


def settings_to(target: Path, data: Path, **changes: Any) -> PretrainSettings:
    values = SHAPE | {"data": str(data), "save_path": str(target), "iters": 12} | changes
    return PretrainSettings(**values)


def command_of(settings: PretrainSettings) -> list[str]:
    given = settings.model_dump(exclude_unset=True).items()
    return ["pretrain", *(f"--{name.replace('_', '-')}={value}" for name, value in given)]


def test_paragraphs_of_a_text_file_make_rows(texts: Path) -> None:
    about = train_data_settings(str(texts))
    examples, report = read_in_order(about.sources[0], about, Path())
    rows = [example.record["text"] for example in examples]
    assert "\n\n".join(rows) == texts.read_text().strip()
    assert all(TEXT_CHARACTERS <= len(row) + 2 < TEXT_CHARACTERS + 100 for row in rows[:-1])
    assert report["formats"] == {"text": len(rows)}
    # in a directory of data such a file may be notes
    write_rows(texts.parent / "rows.jsonl", [{"text": "one row"}])
    about = train_data_settings(str(texts.parent))
    assert [*read_in_order(about.sources[0], about, Path())[1]["sha256"]] == [
        f"{texts.parent}/rows.jsonl"
    ]


def test_every_token_is_a_target_once() -> None:
    rows = [row_of([1, 2, 3], [1.0, 1.0, 0.5]), row_of([4, 5, 6, 7], [1.0] * 4)]
    packed = pretrain.laid_end_to_end(rows, 4)
    assert [row.tokens for row in packed] == [(1, 2, 3, 4), (4, 5, 6, 7)]
    assert [row.weights for row in packed] == [(0.0, 1.0, 0.5, 0.0), (0.0, 1.0, 1.0, 1.0)]


def test_the_model_is_one_of_mlx_lm_and_of_the_other_commands(tmp_path: Path, texts: Path) -> None:
    target = tmp_path / "model"
    result = pretrain.run(settings_to(target, texts, iters=40))
    validation = [r["validation_loss"] for r in result.data["validation"]]
    assert validation[-1] < validation[0] - 1
    _, tokenizer, config = base_model.load(target)
    assert config["vocab_size"] == len(tokenizer) == SHAPE["vocab_size"]
    text = "The fox wasn't “here”\n  12"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    stack = StackRunSettings(
        model=str(target), save_path=str(tmp_path / "store"), iters=2, rounds=1, max_seq_length=64,
        data=str(write_data(tmp_path / "data")), domains=("train",), stack={"rank": 2},
        guard="off",
    )  # fmt: skip
    assert stack_run.run(stack).data["domains"]["train"]["status"] == "trained"
    # on from there: the first loss is the last one's
    with pytest.raises(ValueError, match="of a new model"):
        settings_to(tmp_path / "more", texts, model=str(target))
    more = PretrainSettings(
        model=str(target), data=str(texts), save_path=str(tmp_path / "more"), iters=2,
        max_seq_length=SHAPE["max_seq_length"],
    )  # fmt: skip
    continued = pretrain.run(more)
    assert continued.data["first_validation_loss"] == pytest.approx(validation[-1], abs=1e-5)


def test_no_batch_writes_the_initial_weights(tmp_path: Path, texts: Path) -> None:
    first = pretrain.run(settings_to(tmp_path / "first", texts, iters=0))
    assert first.data["step"] == 0
    pretrain.run(settings_to(tmp_path / "trained", texts, iters=4))
    pretrain.run(
        settings_to(tmp_path / "again", texts, iters=0, tokenizer=str(tmp_path / "trained"))
    )
    initial, trained, again = (mx.load(str(tmp_path / name / FILES[0]))
                               for name in ("first", "trained", "again"))  # fmt: skip
    assert all(mx.array_equal(initial[name], again[name]).item() for name in initial)
    assert not any(mx.array_equal(initial[name], trained[name]).item() for name in initial)


def test_a_vocabulary_that_the_text_does_not_give_is_refused(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(InputError, match="give more text, or a smaller vocabulary"):
        pretrain.run(settings_to(tmp_path / "model", texts, vocab_size=5000), dry_run=True)


def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, texts: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes = {"save_every": 1, "steps_per_report": 1, "iters": 20}
    pretrain.run(settings_to(whole, texts, **changes))
    command = command_of(settings_to(killed, texts, **changes))
    log, kills = work_path(killed) / "log.jsonl", 0
    for pause in (0.0, 0.05, 0.1):
        before = log.stat().st_size if log.exists() else 0
        process = start_command_line(command)
        if wait_for_start(process, killed, before):
            time.sleep(pause)
        process.kill()
        kills += ended(process) == -signal.SIGKILL
    if not killed.exists():
        assert ended(start_command_line(command)) == 0
    assert kills
    for name in FILES:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


@needs_group
@pytest.mark.parametrize("batches", [1, 2])
def test_two_processes_train_like_one(tmp_path: Path, texts: Path, batches: int) -> None:
    """To the byte where each takes whole batches."""
    one, two = tmp_path / "one", tmp_path / "two"
    changes = {"grad_accumulation_steps": batches}
    pretrain.run(settings_to(one, texts, **changes))
    assert in_group(tmp_path, *command_of(settings_to(two, texts, **changes))) == [0, 0]
    assert Result.open(two).data["processes"] == 2
    if batches == 2:
        assert (two / FILES[0]).read_bytes() == (one / FILES[0]).read_bytes()
    weights = [mx.load(str(path / FILES[0])) for path in (one, two)]
    assert all(mx.allclose(w, weights[1][name], atol=1e-3).item() for name, w in weights[0].items())

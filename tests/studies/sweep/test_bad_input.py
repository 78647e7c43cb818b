"""What cannot be swept is said before the first cell runs, and nothing is lost.

Run: pytest tests/studies/sweep/test_bad_input.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mlxstacks.errors import InputError
from mlxstacks.studies.sweep import rank_sweep
from mlxstacks.studies.sweep.cells import read_results
from mlxstacks.studies.sweep.rank_sweep import run
from mlxstacks.studies.sweep.settings import SweepSettings, scale_of
from mlxstacks.study import child_process
from mlxstacks.study.run_directory import work_path
from mlxstacks.training.settings import TrainSettings
from tests.studies.sweep_cases import Cells, sweep_settings
from tests.studies.train_cases import write_data


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"ranks": (2, 65, 200)}, ["rank-65_", "rank-200_", "rank 65", "64"]),
        ({"layers": ("0", "0,7")}, ["layer 7: the model has layers 0 to 1"]),
        ({"projections": ("switch_mpl.down_proj",)}, ["close: mlp.switch_mlp.down_proj"]),
        ({"projections": ("down_proj", "gate")}, ["the router of a mixture of experts is never"]),
        ({"layers": ("0",), "projections": ("self_attn.q_proj",)}, ["only in layers 1"]),
        ({"data": "/nowhere/data"}, ["/nowhere/data: no such file or directory"]),
        ({"model": "/nowhere/model"}, ["/nowhere/model"]),
    ],
    ids=str,
)
def test_all_that_is_wrong_is_told_and_nothing_is_written(
    inputs: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], messages: list[str]
) -> None:
    settings = sweep_settings(*inputs, tmp_path / "out", **changes)
    for dry_run in (True, False):
        with pytest.raises(InputError) as raised:
            run(settings, dry_run=dry_run)
        for message in messages:
            assert message in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranks": ()}, "ranks is empty; a sweep needs at least one"),
        ({"seeds": ()}, "seeds is empty"),
        ({"layers": ()}, "layers is empty"),
        ({"policies": ()}, "policies is empty"),
        ({"ranks": (2, 2)}, r"ranks is \[2, 2\]; give each once"),
        ({"ranks": (0,)}, "greater than or equal to 1"),
        ({"layers": (8, 14)}, "each entry is a set, written as text; got 8"),
        ({"layers": ("8-",)}, "layers takes all, or numbers and ranges"),
        ({"projections": ("q_proj+",)}, "names joined by"),
        ({"bits": (7,)}, "Input should be 2, 3, 4, 5, 6 or 8"),
        ({"bits": (3, 4), "model": "qwen"}, "put {bits} into its name; got 'qwen'"),
        ({"model": "qwen-{bits}bit"}, "give --bits for the widths to put there"),
        ({"train": {"rank": 4}}, "train.rank is set by the sweep: give ranks"),
        ({"train": {"keys": ["q_proj"], "seed": 3}}, "train.keys is set by the sweep: give proj"),
        ({"train": {"iterations": 3}}, "Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SweepSettings.model_validate(values)


@pytest.mark.parametrize(
    ("rule", "expected"), [("fixed", (8, 8)), ("lora", (4, 2)), ("rslora", (8 / 2**0.5, 4))]
)
def test_scale_rules(rule: str, expected: tuple[float, float]) -> None:
    settings = SweepSettings.model_validate({"scale_rule": rule, "train": TrainSettings(scale=8.0)})
    assert (scale_of(settings, 2), scale_of(settings, 4)) == pytest.approx(expected)


def test_a_broken_row_names_file_and_line(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    with (data / "train.jsonl").open("a") as lines:
        lines.write('{"messages": "no list"}\n')
    with pytest.raises(InputError, match=r"train.jsonl, line 21: messages must be a list"):
        run(sweep_settings(inputs[0], data, tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds."""
    monkeypatch.setattr(rank_sweep._Sweep, "plot_formats", ())


@pytest.fixture(scope="module")
def stopped(inputs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of a sweep that was interrupted after its first cell. Cells run here."""
    target = tmp_path_factory.mktemp("stopped") / "out"

    def stop_at_second(done: float, total: float, what: str = "") -> None:
        if done >= 1:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child_process, "run_child", Cells())
        with pytest.raises(KeyboardInterrupt):
            run(sweep_settings(*inputs, target), progress=stop_at_second)
    return target


@pytest.fixture
def interrupted(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another target that was interrupted there."""
    monkeypatch.setattr(child_process, "run_child", Cells())
    shutil.copytree(work_path(stopped), work_path(tmp_path / "out"))
    return tmp_path / "out"


def test_cells_of_another_sweep_are_refused_and_kept(
    inputs: tuple[Path, Path], interrupted: Path
) -> None:
    """Other settings, or fewer ranks: what is there would be lost at the end."""
    cells = work_path(interrupted) / "cells"
    before = {path: path.read_bytes() for path in cells.rglob("*") if path.is_file()}
    with pytest.raises(InputError) as raised:
        run(sweep_settings(*inputs, interrupted, train={"iters": 7}))
    assert "differs in iters: was 6, now 7" in str(raised.value)
    assert "--no-resume" in str(raised.value)
    with pytest.raises(InputError, match=r"rank-2_.* is none of its cells"):
        run(sweep_settings(*inputs, interrupted, ranks=(4,)))
    assert {path: path.read_bytes() for path in cells.rglob("*") if path.is_file()} == before


def test_a_damaged_result_is_an_error_that_names_it(
    inputs: tuple[Path, Path], interrupted: Path
) -> None:
    [path] = (work_path(interrupted) / "cells").glob("*.json")
    whole = json.loads(path.read_text())
    changed = [
        {"figures": "x"}, {"survival": []}, {"identity": 3}, {"status": "done"},
        {"cell": whole["cell"] | {"rank": [2]}}, {"cell": whole["cell"] | {"rank": 4}},
    ]  # fmt: skip
    message = f"{path.name}: not a result of a sweep"
    for document in ({"status": "trained"}, [], *(whole | change for change in changed)):
        path.write_text(json.dumps(document))
        with pytest.raises(InputError, match=message):
            read_results(path.parent)
    with pytest.raises(InputError, match=message):
        run(sweep_settings(*inputs, interrupted))


def test_no_resume_starts_anew(inputs: tuple[Path, Path], interrupted: Path) -> None:
    report = run(sweep_settings(*inputs, interrupted, ranks=(4,), resume=False, train={"iters": 2}))
    cells = report.data["cells"]
    assert [(cell["cell"]["rank"], cell["figures"]["step"]) for cell in cells] == [(4, 2)]
    assert [p.name for p in interrupted.parent.iterdir()] == ["out"]

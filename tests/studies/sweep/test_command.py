"""`mlxstacks sweep` as it is typed. Run: pytest tests/studies/sweep/test_command.py"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxstacks.guard import counting
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import resolve
from mlxstacks.studies.sweep import rank_sweep
from mlxstacks.study import child_process
from tests.warm import WarmSubprocess

Typed = Callable[..., tuple[int, str, str]]


def test_a_bare_sweep_is_on_nano_and_done_once(
    typed: Typed, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "subprocess", WarmSubprocess)
    monkeypatch.setattr(rank_sweep._Sweep, "plot_formats", ())
    short = ["--set", "train.iters=2", "--ranks", "2", "--ranks", "4", "--policies", "keep",
             "--layers", "1"]  # fmt: skip
    code, out, err = typed("sweep", *short)
    assert code == 0, err
    assert "Using nano, the built-in model and its sample data." in err
    assert "Wrote mlxstacks-out/sweep." in " ".join(out.split())
    assert "one seed, so nothing follows from it" in " ".join(out.split())
    report = json.loads((work_dir / "mlxstacks-out/sweep/result.json").read_text())
    assert [cell["status"] for cell in report["data"]["cells"]] == ["trained", "trained"]
    # And again: its own target may be replaced, its cells are kept.
    code, out, _ = typed("sweep", *short, "--json")
    again = json.loads(out)
    assert (code, again["data"]["cells"]) == (0, report["data"]["cells"])


def test_a_plan_lists_cells_with_buffers_bytes_and_time(typed: Typed, work_dir: Path) -> None:
    code, out, _ = typed(
        "sweep", "--dry-run", "--json", "--bits", "3", "--bits", "4", "--ranks", "2"
    )
    plan = json.loads(out)
    assert (code, plan["status"], len(plan["data"]["cells"])) == (0, "planned", 2)
    assert {cell["bits"] for cell in plan["data"]["cells"]} == {3, 4}
    for cell in plan["data"]["cells"]:
        assert cell["predicted_buffers"] > 100
        assert cell["predicted_bytes"] > 1_000_000
        assert cell["outcome"] == "fits"
        assert cell["least_seconds"] is not None
    assert list(work_dir.iterdir()) == []
    code, out, _ = typed("sweep", "--dry-run", "--ranks", "2")
    assert code == 0
    assert "Planned only: would write mlxstacks-out/sweep." in " ".join(out.split())


def test_every_cell_refused_is_a_gate_not_met(typed: Typed, work_dir: Path) -> None:
    code, out, err = typed("sweep", "--resource-limit", "100", "--ranks", "2")
    assert code == 3
    assert "Gate not met: every cell was refused by the guard" in err
    assert "1 refused" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "65", "--layers", "2", "--projections", "k_proj"], "rank 65"),
        (["--layers", "1,9"], "layer 9: the model has layers 0 to 5"),
        (["--projections", "dwn_proj"], "close: "),
        (["--policies", "refitt"], "did you mean 'refit'?"),
        (["--set", "train.iter=5"], "did you mean 'train.iters'?"),
        (["--set", "layers=[1,2]"], "each entry is a set"),
        (["--model", "m"], "a model of your own needs --data too"),
    ],
)
def test_mistakes_are_told_at_once(
    typed: Typed, work_dir: Path, arguments: list[str], message: str
) -> None:
    code, out, err = typed("sweep", *arguments)
    assert (code, message in err) == (2, True), err
    assert "Traceback" not in out + err
    assert list(work_dir.iterdir()) == []


def test_buffers_are_planned_where_nothing_counts(
    typed: Typed, work_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting.counter.cache_clear()
    monkeypatch.setattr(counting, "compiler", lambda: None)
    monkeypatch.setattr(counting, "cache_directory", lambda: work_dir)
    code, out, _ = typed("sweep", "buffers", "--dry-run", "--json")
    plan = json.loads(out)
    assert (code, plan["data"]["arms"], plan["plan"]["ranks"]) == (0, 120, [2, 4, 8])
    assert len(plan["plan_sha256"]) == 64
    code, out, err = typed("sweep", "buffers")
    assert code == 2, err
    assert "counting live buffers takes a C++ compiler" in " ".join(err.split())
    assert list(work_dir.iterdir()) == []


@pytest.mark.parametrize("name", ["sweep-nano", "sweep-qwen3.5-35b-a3b"])
def test_the_recipes_ask_the_published_question(name: str) -> None:
    settings = resolve("sweep", {}, load_recipe(name)).settings.model_dump()
    assert settings["ranks"] == (2, 4, 8, 16, 64)
    assert settings["projections"] == ("switch_mlp.down_proj",)
    assert settings["train"]["iters"] == 200
    assert settings["layers"] == (("1,2,3",) if name == "sweep-nano" else ("8,14,20",))

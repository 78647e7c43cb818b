"""A comparison is its cells, each a run of `stack`, and a plan that was fixed before them.

Run: pytest tests/studies/compare/test_run.py
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxstacks.errors import InputError
from mlxstacks.files.store import Store
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.compare.analysis import CellRecord
from mlxstacks.studies.compare.run import run
from mlxstacks.studies.compare.settings import CompareSettings
from mlxstacks.studies.stack.run import run as run_stack
from mlxstacks.study import child_process, write
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from mlxstacks.study.write import write_result
from tests.studies.compare_cases import Cells, compare_settings, stacks
from tests.studies.conclusions import assert_its_files_give_edits_away
from tests.studies.stack_cases import hashes, write_places

CELLS = {f"{arm}_seed-{seed}" for arm in ("free", "kept-out") for seed in (0, 1)}


def use(patch: pytest.MonkeyPatch, cells: Callable[..., int]) -> None:
    """Let comparisons make their cells so, and draw nothing: test_command.py draws."""
    patch.setattr(child_process, "run_child", cells)
    patch.setattr(write, "write_figures", lambda *_: ([], []))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_places(tmp_path_factory.mktemp("compare-inputs"))


@pytest.fixture(scope="module")
def compared(
    places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    target = tmp_path_factory.mktemp("compare") / "out"
    with pytest.MonkeyPatch.context() as patch:
        use(patch, Cells())
        return target, run(compare_settings(places, target))


def cells_of(result: Result) -> list[CellRecord]:
    return [
        CellRecord(**{key: part for key, part in cell.items() if key != "name"})
        for cell in json.loads(json.dumps(result.data["cells"]))
    ]


def test_every_cell_is_there_and_nothing_is_left_over(
    compared: tuple[Path, Result],
) -> None:
    target, report = compared
    assert {cell["name"] for cell in report.data["cells"]} == CELLS
    assert {name.split("/")[0] for name in stacks(target)} == CELLS
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    written = json.loads((target / "result.json").read_text())
    assert written == json.loads(json.dumps(report.as_json()))
    plan = json.loads((target / "plan.json").read_text())
    assert json_sha256(plan) == report.plan_sha256 == written["plan_sha256"]


def test_a_cell_is_the_run_that_stack_makes(
    compared: tuple[Path, Result], places: tuple[Path, Path], tmp_path: Path
) -> None:
    """Files, losses, matrix; and without the projector another domain's training is another."""
    target, report = compared
    settings = compare_settings(places, tmp_path / "unused")
    stack = settings.settings_of(
        settings.arms[1], model=str(places[0]), data=str(places[1]),
        save_path=str(tmp_path / "store"), seed=1,
    )  # fmt: skip
    made = run_stack(stack)
    assert hashes(tmp_path / "store") == hashes(target / "cells" / "kept-out_seed-1")
    [cell] = [cell for cell in cells_of(report) if cell.name == "kept-out_seed-1"]
    assert cell.matrix == json.loads(json.dumps(made.data["matrix"]))
    alpha, beta = (made.data["domains"][name]["final_loss"] for name in ("alpha", "beta"))
    last = made.data["matrix"]["ungated"]["beta"]
    assert cell.values["task_loss"] == pytest.approx((alpha + beta) / 2, rel=1e-12)
    assert cell.values["later_task_loss"] == beta
    assert cell.values["ungated_earlier"] == last["alpha"]
    assert cell.values["ungated_rise"] == pytest.approx(last["alpha"] - alpha, abs=1e-12)
    assert cell.values["ungated of beta"] == last["beta"]
    assert cell.values["isolated of beta"] == made.data["matrix"]["isolated"]["beta"]["beta"]
    assert cell.values["steps"] == 4
    assert cell.values["parameters"] == made.data["domains"]["alpha"]["parameters"] * 2
    assert (cell.values["seconds"] or 0) > 0.05
    rounds = made.data["domains"]["beta"]["rounds"]
    assert cell.values["balance_loss"] is not None
    assert cell.curves["beta"][-1] == [2, rounds[0]["validation"][-1]["validation_loss"]]
    other = stacks(target)
    alike = [name for name in other if name.startswith("free_seed-1/alpha")]
    assert other[alike[0]] == other[alike[0].replace("free", "kept-out")]
    betas = [data for name, data in other.items() if "seed-1/beta" in name]
    assert betas[0] != betas[1]


def test_differences_are_of_pairs(compared: tuple[Path, Result]) -> None:
    _, report = compared
    cells = {(cell.arm, cell.seed): cell for cell in cells_of(report)}
    result = report.data["arms"][1]
    for name in ("ungated_earlier", "task_loss", "task_loss of beta"):
        pairs = [
            (cells["kept-out", seed].values[name] or 0) - (cells["free", seed].values[name] or 0)
            for seed in (0, 1)
        ]
        assert result["differences"][name]["mean"] == pytest.approx(np.mean(pairs), abs=1e-12)
        assert result["differences"][name]["n"] == 2
    entry = result["matrix_differences"]["ungated"]["beta"]["alpha"]
    assert entry == pytest.approx(result["differences"]["ungated of alpha"])
    assert report.verdict.startswith("ungated, earlier domains, kept-out against free: ")
    assert any("given, not searched" in note for note in report.notes)
    assert "by domain" not in report.verdict  # one is earlier


def test_an_interrupted_comparison_goes_on(
    compared: tuple[Path, Result],
    places: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process of the third cell dies in its second domain, then the comparison itself."""
    target = tmp_path / "out"
    settings = compare_settings(places, target)
    use(monkeypatch, Cells(fatal_seed=1))

    def stop(done: float, total: int, what: str = "") -> None:
        if done >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, progress=stop)
    assert not target.exists()
    record = json.loads((work_path(target) / "cells" / "free_seed-1.json").read_text())
    assert (record["status"], record["reason"]) == ("crashed", "killed by SIGABRT")
    cells = Cells()
    use(monkeypatch, cells)
    report = run(settings.model_copy(update={"retry": True}))
    assert cells.started == ["free_seed-1", "kept-out_seed-1"]
    assert stacks(target) == stacks(compared[0])
    assert report.plan_sha256 == compared[1].plan_sha256
    assert report.verdict == compared[1].verdict
    assert any("free_seed-1" in note and "No seconds" in note for note in report.notes)


class Searched:
    """Stands in for `run_child`: what a cell ends with, by its arm's rank, its rate and its seed.

    Seeds of the search like rank 2 at 0.03 and rank 3 at 0.01; the others like all else better.
    stop: the calls that an interrupt ends.
    """

    def __init__(self, stop: int = 1000, fails: Sequence[float] = ()) -> None:
        self.stop, self.fails, self.stacks = stop, fails, list[Any]()

    def __call__(
        self, module: str, specification: Any, log: Path, on_message: Callable[[Any], None]
    ) -> int:
        self.stacks.append(stack := specification["stack"])
        if len(self.stacks) > self.stop:
            raise KeyboardInterrupt
        if stack["learning_rate"] in self.fails:
            on_message({"status": "failed", "reason": "not a number"})
            return 0
        best = {2: 0.03, 3: 0.01}[stack["stack"]["rank"]]
        is_near = abs(stack["learning_rate"] - best) < 1e-9
        loss = 1.0 + stack["seed"] / 100 - 0.5 * (is_near == (stack["seed"] >= 100))
        Path(stack["save_path"]).mkdir(exist_ok=True)
        keys = ("number", "loss_before", "loss_trained", "loss_after", "best_step", "ended", "last")
        only = dict.fromkeys(keys) | {"kept": True, "steps": 2, "history": []}
        only["validation"] = [{"step": 2, "validation_loss": loss}]
        domain = {"final_loss": loss, "parameters": 8, "steps": 2, "rounds": [only]}
        report = {"domains": {"alpha": domain}, "matrix": {}}
        on_message({"status": "trained", "report": report, "seconds": 1.0})
        return 0


def searching(places: tuple[Path, Path], target: Path, /, **changes: Any) -> CompareSettings:
    arms = ({"name": "two"}, {"name": "three", "change": {"stack": {"rank": 3}}})
    given = {"arms": arms, "equal": ["steps"], "rates": (0.01, 0.02, 0.03), "primary": "task_loss"}
    return compare_settings(places, target, **given | {"run": {"domains": ["alpha"]}} | changes)


@pytest.fixture(scope="module")
def searched(
    places: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result, list[Any]]:
    target, cells = tmp_path_factory.mktemp("searched") / "out", Searched()
    with pytest.MonkeyPatch.context() as patch:
        use(patch, cells)
        return target, run(searching(places, target)), cells.stacks


def test_rates_are_chosen_on_seeds_that_judge_nothing(
    searched: tuple[Path, Result, list[Any]],
) -> None:
    """Each arm at its own, before the first seed that judges; that one would choose another."""
    target, result, cells = searched
    search, judged = cells[:12], cells[12:]
    assert [s["seed"] for s in search] == [100] * 6 + [101] * 6
    assert [(s["stack"]["rank"], s["learning_rate"], s["seed"]) for s in judged] == [
        (2, 0.03, 0), (3, 0.01, 0), (2, 0.03, 1), (3, 0.01, 1),
    ]  # fmt: skip
    table = result.table("rates")
    assert [*table["best_for"]] == ["three", "", "two"]
    assert [*table["two"]] == pytest.approx([2.005, 2.005, 1.505])
    assert "Each at the best of 3 learning rates: two 0.03, three 0.01." in result.verdict
    assert "The best learning rate of two, 0.03, is the highest tried: a better" in result.verdict
    assert len([*(target / "cells").glob("*.json")]) == 16
    assert len([path for path in (target / "cells").iterdir() if path.is_dir()]) == 4
    assert_its_files_give_edits_away(target, "rates.two.rate")


@pytest.mark.parametrize("stop", [7, 12])
def test_a_search_goes_on_where_it_was_interrupted(
    places: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    searched: tuple[Path, Result, list[Any]],
    stop: int,
) -> None:
    """To the same bytes; not with other rates, and not with a choice that was changed."""
    target, work = tmp_path / "out", work_path(tmp_path / "out")
    use(monkeypatch, Searched(stop))
    with pytest.raises(KeyboardInterrupt):
        run(searching(places, target))
    if chosen := stop == 12:
        with pytest.raises(InputError, match=r"rates: was \[0.01, 0.02, 0.03\], now \[0.01\]"):
            run(searching(places, target, rates=(0.01,)))
        written = (work / "rates.json").read_bytes()
        (work / "rates.json").write_bytes(written.replace(b"0.03,", b"0.02,", 1))
        with pytest.raises(InputError, match="was changed after it was written"):
            run(searching(places, target))
        (work / "rates.json").write_bytes(written)
    assert (work / "rates.json").exists() == chosen
    resumed = Searched()
    use(monkeypatch, resumed)
    result = run(searching(places, target))
    assert len(resumed.stacks) == 16 - stop
    assert (result.data, result.blocks) == (searched[1].data, searched[1].blocks)
    records = [f"cells/{cell['name']}.json" for cell in result.data["cells"]]
    ours, theirs = (
        {path: (top / path).read_bytes() for path in ("rates.json", "plan.json", *records)}
        for top in (target, searched[0])
    )
    assert ours == theirs


def test_a_rate_that_fails_is_not_chosen(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Searched(fails=(0.03,)))
    result = run(searching(places, tmp_path / "out"))
    assert result.data["rates"]["two"]["losses"]["0.03"] is None
    assert result.data["rates"]["two"]["rate"] == 0.01
    use(monkeypatch, Searched(fails=(0.01, 0.02, 0.03)))
    with pytest.raises(InputError, match=r"trains arm two .*not a number.*--retry"):
        run(searching(places, tmp_path / "none"))


def test_a_crash_is_a_result_and_leaves_the_question_undecided(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Cells(fatal_seed=7))
    report = run(compare_settings(places, tmp_path / "out", seeds=(7,)))
    assert {cell.status for cell in cells_of(report)} == {"crashed"}
    assert "undecided (1 of 1 seeds have no pair of results)" in report.verdict
    assert sum("crashed: killed by SIGABRT" in note for note in report.notes) == 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stack": {"rank": 4}}, "parameters: "),
        ({"iters": 3}, r"steps: 6 of b, 4 of a \(\+50.00%, allowed 1.00%\)"),
        ({"batch_size": 4}, r"tokens: \d+ of b, \d+ of a \(\+100"),
        ({"packing": True}, r"tokens: "),
        ({"rounds": 2}, "parameters: "),
    ],
)
def test_unequal_budgets_are_refused(
    places: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    arms = ({"name": "a"}, {"name": "b", "change": change})
    with pytest.raises(InputError, match=problem) as error:
        run(compare_settings(places, tmp_path / "out", arms=arms))
    assert "the arms are to have equal budgets" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_arms_may_differ_in_order_and_in_what_a_domain_trains_on(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One seed: what each arm trains and is measured on, and which differences there are."""
    use(monkeypatch, Cells())
    noisy = [
        {"path": "alpha.jsonl", "part": "validation"}, {"path": "gamma.jsonl", "part": "train"},
    ]  # fmt: skip
    alpha = {"name": "alpha", "data": {"sources": noisy, "validation_rows": 4}}
    arms = (
        {"name": "forward"}, {"name": "reverse", "change": {"domains": ["beta", "alpha"]}},
        {"name": "noisy", "change": {"domains": [alpha, "beta"]}},
    )  # fmt: skip
    report = run(
        compare_settings(
            places, tmp_path / "out", arms=arms, seeds=(0,), primary="ungated", tolerance=0.2
        )
    )
    forward, reverse, other = cells_of(report)
    assert [*reverse.curves] == ["beta", "alpha"]
    # Before the first step the loss is the base's, of the same rows.
    assert other.curves["alpha"][0] == forward.curves["alpha"][0]
    assert other.curves["alpha"][-1] != forward.curves["alpha"][-1]
    of_reverse = report.data["arms"][1]
    for domain in ("alpha", "beta"):
        name = f"ungated of {domain}"
        wanted = (reverse.values[name] or 0) - (forward.values[name] or 0)
        assert of_reverse["differences"][name]["mean"] == pytest.approx(wanted, abs=1e-12)
    assert not {"later_task_loss", "ungated_earlier"} & of_reverse["differences"].keys()
    assert of_reverse["matrix_differences"]["ungated"] == {}
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert [*plan["data_of_arms"]] == ["noisy"]
    assert "; by domain alpha " in report.verdict


def test_an_arm_takes_each_domains_layers_from_a_profile(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the plan, and the stacks of each domain lie there and nowhere else."""
    tops = {"alpha": [1], "beta": [0], "gamma": [1, 0]}
    data = {"tables": {"top_layers": {"by_kl": tops}}}
    profile = Result(kind="profile", title="Profile", status="done", data=data)
    (tmp_path / "profile").mkdir()
    write_result(profile, tmp_path / "profile", tmp_path / "profile")
    use(monkeypatch, Cells())
    own: dict[str, Any] = {"name": "own", "profile": str(tmp_path / "profile")}
    trained = {"keys": [], "iters": 4, "learning_rate": 0.01}  # as much as leaves no stack empty
    arms, equal = ({"name": "all"}, own), ["steps", "tokens"]
    given: dict[str, Any] = {"arms": arms, "seeds": (0,), "equal": equal, "run": trained}
    target = tmp_path / "out"
    result = run(compare_settings(places, target, **given))
    plan = json.loads((target / "plan.json").read_text())
    assert [d["layers"] for d in plan["arms"]["own"]["domains"]] == ["1", "0"]
    assert [d["layers"] for d in plan["arms"]["all"]["domains"]] == [None, None]
    store = Store.open(target / "cells" / "own_seed-0")
    for stack, layer in zip(store.enabled_stacks(), (1, 0), strict=True):
        paths = store.read_header(stack).projections
        assert paths
        assert all(f"layers.{layer}." in path for path in paths)
    for parameters in (
        [budget["parameters"] for budget in result.data["budgets"].values()],
        [cell.values["parameters"] or 0 for cell in cells_of(result)],
    ):
        assert parameters[0] == 2 * parameters[1] > 0
    own["change"] = {"domains": ["gamma", "delta"]}
    with pytest.raises(InputError, match="has the groups alpha, beta, gamma; run"):
        run(compare_settings(places, tmp_path / "no", **given))


@pytest.mark.parametrize(
    ("domains", "primary", "problem"),
    [
        (["alpha"], "task_loss", "b: beta in one of b and a alone"),
        (["beta", "alpha"], "ungated_earlier", "of other domains in its order; use ungated"),
        (
            [{"name": "alpha", "data": {"sources": "gamma.jsonl", "validation_rows": 4}}, "beta"],
            "task_loss", "b: alpha is measured on other rows than in a",
        ),
    ],
)  # fmt: skip
def test_arms_of_other_domains_or_rows_are_refused(
    places: tuple[Path, Path], tmp_path: Path, domains: list[Any], primary: str, problem: str
) -> None:
    arms = ({"name": "a"}, {"name": "b", "change": {"domains": domains}})
    with pytest.raises(InputError, match=problem):
        run(compare_settings(places, tmp_path / "out", arms=arms, primary=primary), dry_run=True)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_counts_parameters_by_hand(places: tuple[Path, Path], tmp_path: Path) -> None:
    """E experts of rank R: E R (K + N), and 2 E K of router and noise where there is a choice."""
    from mlxstacks.studies.stack.setup import set_up

    one = {"name": "one", "change": {"stack": {"num_experts": 1, "rank": 5}}}
    settings = compare_settings(
        places, tmp_path / "out", arms=({"name": "two"}, one), equal=("steps",)
    )
    report = run(settings, dry_run=True)
    stack = settings.settings_of(
        settings.arms[0], model=str(places[0]), data=str(places[1]), save_path=str(tmp_path / "s")
    )
    dims = [target.dims for target in set_up(stack, None).targets]
    inputs, outputs = sum(d.input_dims for d in dims), sum(d.output_dims for d in dims)
    domains = 2
    one_round, two_rounds = (report.data["budgets"][name] for name in ("one", "two"))
    assert two_rounds["parameters"] == domains * (4 * (inputs + outputs) + 4 * inputs)
    assert one_round["parameters"] == domains * 5 * (inputs + outputs)
    assert one_round["steps"] == 4
    assert one_round["tokens"] == two_rounds["tokens"] > 0
    assert report.status == "planned"
    assert list(tmp_path.iterdir()) == []


def test_an_arm_that_cannot_run_is_named(places: tuple[Path, Path], tmp_path: Path) -> None:
    arms = ({"name": "a"}, {"name": "big", "change": {"stack": {"rank": 500}}})
    with pytest.raises(InputError, match=r"^arm big: cannot put adapters here"):
        run(compare_settings(places, tmp_path / "out", arms=arms))


def test_another_conclusion_than_the_cells_is_seen(compared: tuple[Path, Result]) -> None:
    assert_its_files_give_edits_away(compared[0], "arms.0.means.task_loss.mean")

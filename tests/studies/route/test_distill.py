"""`mlxstacks distill` on a tiny store with random stacks.

Run: pytest tests/studies/route/test_distill.py
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.base_model import load_arrays
from mlxstacks.data import Row
from mlxstacks.errors import InputError
from mlxstacks.files.store import Store
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.routing.candidate_losses import LossCache
from mlxstacks.routing.outcomes import RouterExample
from mlxstacks.studies.route import distill as route_distill
from mlxstacks.studies.route.distill import domains_of, read_taught, recovered, split
from mlxstacks.studies.route.served import RowLosses
from mlxstacks.studies.route.settings import DistillSettings
from mlxstacks.studies.route.teacher import Teacher, TeacherFiles, check_vocabularies
from mlxstacks.studies.train import run as train_run
from mlxstacks.study.result import Result
from mlxstacks.training.distillation import TopLogits
from mlxstacks.training.loop import Record, TrainingState
from tests.studies.route_evaluate_cases import Places, write_places
from tests.tiny_models import write_qwen_moe


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("taught"))


def settings_for(places: Places, out: Path, **changes: Any) -> DistillSettings:
    values = {
        "store_path": str(places.store), "model": str(places.model), "data": str(places.data),
        "save_path": str(out), "iters": 6, "batch_size": 4, "rank": 4, "learning_rate": 5e-3,
        "steps_per_eval": 3, "save_every": 2, "guard": "off", "top_logits": 8,
    }  # fmt: skip
    return DistillSettings.model_validate(values | changes)


def distill(places: Places, out: Path, **changes: Any) -> Result:
    return route_distill.run(settings_for(places, out, **changes))


@pytest.fixture(scope="module")
def distilled(places: Places, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    target = tmp_path_factory.mktemp("distilled") / "out"
    return distill(places, target), target


def test_result_has_every_domain_and_what_is_recovered(distilled: tuple[Result, Path]) -> None:
    result, target = distilled
    losses = result.data["losses"]
    groups = ["alpha", "beta", "alpha+beta"]
    for name in ("start", "teacher", "student"):
        assert list(losses[name]) == groups
    assert sum(losses["student"][d] - losses["start"][d] for d in ("alpha", "beta")) < 0
    assert {*result.data["recovered"]} == {*groups, "all"}
    assert result.data["data"]["groups"] == {"alpha": 2, "beta": 2, "alpha+beta": 1}
    assert result.data["recovered"]["all"] is None  # of four rows
    assert (target / "adapters.safetensors").is_file()
    assert "Mean loss over 2 domains" in (result.verdict or "")
    assert not list(target.parent.glob(".out.work"))


def test_start_is_the_base_of_the_store(places: Places, distilled: tuple[Result, Path]) -> None:
    """Both models' losses come from their own code: the student's, and that of routing."""
    settings = settings_for(places, Path("unused"))
    teacher = Teacher(Store.open(places.store), str(places.model), "auto", "routed", 0)
    _, held = read_taught(settings, teacher.served.tokenizer, [])
    losses = RowLosses(teacher.served, held.rows, LossCache()).of([
        (place, {}) for place in range(len(held.rows))
    ])  # fmt: skip
    result, _ = distilled
    found = result.data["validation"][0]["row_losses"]
    np.testing.assert_allclose(found, losses, atol=1e-4)


def test_other_routes_teach_otherwise_and_are_held_against_the_router(
    places: Places, distilled: tuple[Result, Path], tmp_path: Path
) -> None:
    found = distill(places, tmp_path / "out", routes="multi-route").data["losses"]
    first = distilled[0].data["losses"]
    assert found["teacher"] == pytest.approx(first["teacher"])
    dense = distill(places, tmp_path / "dense", routes="dense").data["losses"]
    assert dense["teacher"] == pytest.approx(first["teacher"])
    assert found["student"] != pytest.approx(first["student"], abs=1e-6)


def test_dense_lets_every_expert_answer(places: Places) -> None:
    store = Store.open(places.store)
    teacher = Teacher(store, str(places.model), "auto", "dense", 0)

    def top_k() -> list[bool]:
        layers = [layer for _, layer in stacked_layers(teacher.served.model)]
        shapes = [stack.shape for layer in layers for stack in layer.stacks.stacks()]
        return [shape.top_k == shape.num_experts for shape in shapes]

    before = top_k()
    with teacher.all_experts():
        assert before
        assert all(top_k())
    assert top_k() == before


def test_a_run_that_was_stopped_ends_with_the_same_bytes(
    places: Places, distilled: tuple[Result, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    step = train_run.TrainRun._on_step

    def stops(self: Any, state: TrainingState, record: Record) -> None:
        step(self, state, record)
        if state.step == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(train_run.TrainRun, "_on_step", stops)
        with pytest.raises(KeyboardInterrupt):
            distill(places, tmp_path / "out")
    with monkeypatch.context() as patched:  # what the teacher said is not asked for again
        patched.setattr(route_distill, "Teacher", None)
        distill(places, tmp_path / "out")
    name = "adapters.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (distilled[1] / name).read_bytes()


def test_weights_that_damage_a_domain_are_not_written(
    places: Places, tmp_path: Path, monkeypatch: Any
) -> None:
    """alpha rises by 0.03 while the mean over domains falls."""
    start, later = [1.0] * 5, [1.03, 1.03, 0.1, 0.1, 0.1]
    given = iter([start])
    patched = "_row_losses"
    monkeypatch.setattr(route_distill.DistillRun, patched, lambda self: next(given, later))
    assert distill(places, tmp_path / "allowed", max_rise=0.04).status == "done"
    given = iter([start, later, later, start])
    with pytest.raises(InputError, match="no evaluation was better than the start"):
        distill(places, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", [b"", b"not safetensors"])
def test_a_damaged_file_of_the_teacher_is_made_again(tmp_path: Path, damage: bytes) -> None:
    top = TopLogits(np.zeros((2, 3), np.int32), np.full((2, 3), -1.5, np.float32))
    files = TeacherFiles(tmp_path, list(range(70)), {"run_id": "a"})
    assert [number for number, _ in files.missing()] == [0, 1]
    files.write(0, [top] * 64)
    files.write(1, [top] * 6)
    assert not files.missing()
    assert files.of([69, 3]).ids.shape == (4, 3)
    assert [n for n, _ in TeacherFiles(tmp_path, list(range(70)), {"run_id": "b"}).missing()] == [
        0, 1,
    ]  # fmt: skip
    (tmp_path / "teacher-00001.safetensors").write_bytes(damage)
    assert files.missing() == [(1, list(range(64, 70)))]


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=40), st.none() | st.just(3))
def test_no_prompt_is_on_both_sides(rows: list[tuple[int, bool]], most: int | None) -> None:
    row = Row((1, 2), (0.0, 1.0))
    pairs = [
        (RouterExample(f"p{prompt}", f"a{i}", ("a",), "single", str(i), "", known), row)
        for i, (prompt, known) in enumerate(rows)
    ]
    held, train = split(pairs, most)
    assert len(held) + len(train) == len(pairs)
    assert not {e.prompt for e, _ in held} & {e.prompt for e, _ in train}
    assert bool(held) == (len(pairs) > 1)


def test_rows_that_stacks_do_not_know_are_held_out_but_not_most_of_all() -> None:
    row = Row((1, 2), (0.0, 1.0))

    def counts(unknown: int, known: int, most: int | None = None) -> tuple[int, int, int]:
        flags = [False] * unknown + [True] * known
        pairs = [
            (RouterExample(f"p{i}", "a", ("a",), "single", str(i), "", flag), row)
            for i, flag in enumerate(flags)
        ]
        held, train = split(pairs, most)
        return len(held), len(train), sum(e.trained_on for e, _ in held)

    assert counts(24, 100) == (24, 100, 0)
    assert counts(24, 100, most=8) == (8, 116, 0)
    assert counts(499, 1) == (50, 450, 0)
    assert counts(0, 100) == (10, 90, 10)


def test_another_model_of_the_same_tokenizer_learns_too(places: Places, tmp_path: Path) -> None:
    student = write_qwen_moe(tmp_path / "small", bits=4, hidden_size=128, shards=1)
    result = distill(places, tmp_path / "out", model=str(student), teacher=str(places.model))
    losses = result.data["losses"]
    assert sum(losses["student"][d] - losses["start"][d] for d in ("alpha", "beta")) < 0
    own = distill(places, tmp_path / "own").data["losses"]
    assert losses["teacher"] == pytest.approx(own["teacher"])
    assert losses["start"] != pytest.approx(own["start"], abs=1e-4)


def test_another_vocabulary_is_refused() -> None:
    class Words:
        def __init__(self, *tokens: str) -> None:
            self.tokens = tokens

        def get_vocab(self) -> dict[str, int]:
            return {token: number for number, token in enumerate(self.tokens)}

    check_vocabularies(Words("a", "b"), Words("a", "b"))
    with pytest.raises(InputError, match=r"'b' is token 1 and 2"):
        check_vocabularies(Words("a", "b"), Words("a", "c", "b"))


def test_a_router_is_needed(places: Places, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no router there"):
        distill(places, tmp_path / "out", router=str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"keep": "last"}, "keep last"), ({"mask_prompt": False}, "mask_prompt"),
     ({"compile_step": "on"}, "compile_step"), ({"temperature": 0}, "temperature")],
)  # fmt: skip
def test_settings_of_train_that_do_not_go(places: Places, changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_for(places, Path("unused"), **changes)


def test_shares_of_a_gain() -> None:
    start, teacher = [2.0, 3.0, 2.5, 2.2] * 10, [1.0, 2.0, 1.5, 1.2] * 10
    half = [x - 0.5 for x in start]
    found = recovered(
        {"start": {"a": start, "b": start}, "teacher": {"a": teacher, "b": start},
         "student": {"a": half, "b": start}}, 0
    )  # fmt: skip
    assert found["a"] == pytest.approx([0.5, 0.5, 0.5])
    assert found["b"] is None
    assert found["all"] == pytest.approx([0.5, 0.5, 0.5])
    assert domains_of(["a", "a+b", "others"]) == ["a"]
    assert domains_of(["a+b", "others"]) == ["a+b"]


def test_log_and_teacher_files_stay_in_the_work_directory(distilled: tuple[Result, Path]) -> None:
    names = {path.name for path in distilled[1].iterdir()}
    assert not [name for name in names if name.startswith("teacher")]
    lines = (distilled[1] / "log.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events[0] == "started"
    assert "validation" in events
    arrays, _ = load_arrays(distilled[1] / "adapters.safetensors")
    mx.eval(arrays)

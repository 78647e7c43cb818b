"""`mlxstacks eval` with arms that answer without a model: plan, resuming, regrading, refusals.

Run: pytest tests/studies/benchmarks/test_run.py
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.errors import InputError
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import validate
from mlxstacks.report.find import find_sources
from mlxstacks.studies.benchmarks import harness, items
from mlxstacks.studies.benchmarks import run as eval_run
from mlxstacks.studies.benchmarks.items import ask
from mlxstacks.studies.benchmarks.run import run
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem, task_named
from mlxstacks.study.document import Standing
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from tests.studies.answer_files import forge, rows_of
from tests.studies.eval_cases import FakeArm, FakeArms, item_row, settings_for, use, write_places

ARMS = ("base", "ungated", "routed", "oracle", "random")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> FakeArms:
    return use(monkeypatch, FakeArms())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_places(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """Both kinds of task, letters and the old rule beside."""
    target = tmp_path_factory.mktemp("eval") / "done"
    with pytest.MonkeyPatch.context() as patch:
        use(patch, FakeArms())
        changes = {
            "tasks": ("items", "gsm8k", "mmlu_pro"),
            "letters": True,
            "reference_offset": True,
        }
        return run(settings_for(data, target, **changes)), target


def answers(directory: Path) -> dict[str, Any]:
    """Every answer file without its seconds."""
    return {
        str(path.relative_to(directory)): [
            {key: value for key, value in row.items() if key != "seconds"} for row in rows_of(path)
        ]
        for path in sorted(directory.rglob("*.jsonl"))
    }


def test_every_arm_answers_the_same_items_under_one_plan(done: tuple[Result, Path]) -> None:
    report, target = done
    written = json.loads((target / "result.json").read_text())
    assert written == json.loads(json.dumps(report.as_json()))
    planned = json.loads((target / "plan.json").read_text())
    assert written["plan_sha256"] == json_sha256(planned)
    assert written["standing"] == {"status": "confirmatory", "reasons": []}
    assert Result.open(target).standing == Standing(status="confirmatory")
    for task, n in (("items", 60), ("gsm8k", 60)):
        ids = set()
        for arm in written["data"]["tasks"][task]["arms"]:
            of = "texts" if task == "items" else "replies"
            header, *found = rows_of(target / "answers" / task / f"{arm}.{of}.jsonl")
            assert header == {
                "plan_sha256": written["plan_sha256"], "task": task, "arm": arm, "of": of,
            }  # fmt: skip
            ids.add(tuple(row["item_id"] for row in found))
            assert len(found) == n
        assert len(ids) == 1


def test_scores_are_those_of_what_the_arms_know(done: tuple[Result, Path]) -> None:
    tasks = done[0].data["tasks"]
    for task in ("items", "gsm8k"):
        scores = {name: one["score"] for name, one in tasks[task]["arms"].items()}
        assert scores["ungated"] < scores["base"] < scores["routed"]
    items = tasks["items"]
    assert items["guess_rate"] == 0.25
    for one in items["arms"].values():
        assert set(one["normalisations"]) == {"sum", "token", "character"}
        assert one["reference_offset"]["n"] == 60
    lettered = tasks["mmlu_pro"]["arms"]["base"]
    assert lettered["letters"] == lettered["normalisations"]["sum"]
    assert items["arms"]["base"]["letters"] is None
    # The old rule always takes the candidate of one token, here the first of four.
    assert {one["reference_offset"]["right"] for one in items["arms"].values()} == {15}
    base = tasks["gsm8k"]["arms"]["base"]
    assert base["cut_at_max_tokens"] == base["unparsed"] == 60 - base["right"]
    assert set(base["rules"]) == {"marker", "none"}


def test_arms_without_labels_are_left_out_and_said(done: tuple[Result, Path]) -> None:
    found = done[0].data["tasks"]["gsm8k"]
    assert list(found["arms"]) == ["base", "ungated", "routed"]
    assert any("without oracle and random" in mark for mark in found["marks"])
    assert list(done[0].data["tasks"]["items"]["arms"]) == list(ARMS)


def test_published_scores_stand_beside_those_of_the_published_model_alone(
    data: Path, tmp_path: Path, fakes: FakeArms
) -> None:
    options = {"tasks": ("gsm8k",), "arms": ("base",)}
    fakes.is_published_model = True
    target = tmp_path / "out"
    published = run(settings_for(data, target, **options)).data["tasks"]["gsm8k"]["published"]
    assert (published["base"], published["measured_here"]) == (0.665, False)
    fakes.is_published_model = False
    places = {"save_path": str(tmp_path / "again"), "plots": False}
    again = run(EvalSettings(regrade=str(target), **places))
    with pytest.raises(InputError, match="own settings; leave out alpha"):
        run(EvalSettings(regrade=str(target), alpha=0.2, **places))
    assert again.data["tasks"]["gsm8k"]["published"] == published


def test_pairs_are_one_family_and_nothing_published_is_beside_another_model(
    done: tuple[Result, Path],
) -> None:
    result = done[0]
    tasks = result.data["tasks"]
    pairs = {
        task: [(c["arm"], c["control"]) for c in one["comparisons"]] for task, one in tasks.items()
    }
    assert pairs["gsm8k"] == [("routed", "base"), ("routed", "ungated"), ("ungated", "base")]
    assert ("routed", "random") in pairs["items"]
    assert result.plan is not None
    assert result.data["tests"] == sum(map(len, pairs.values())) == result.plan["tests"]
    p_values = [c["mcnemar"]["p_value"] for t in tasks.values() for c in t["comparisons"]]
    adjusted = [c["p_adjusted"] for t in tasks.values() for c in t["comparisons"]]
    assert min(adjusted) == pytest.approx(min(1, len(p_values) * min(p_values)))
    assert tasks["gsm8k"]["published"] is None
    assert "Routed - ungated" in result.verdict
    assert result.verdict.endswith("As planned beforehand.")


def test_a_repeated_run_is_the_same_but_for_seconds(
    done: tuple[Result, Path], data: Path, tmp_path: Path, fakes: FakeArms
) -> None:
    changes = {"tasks": ("items", "gsm8k", "mmlu_pro"), "letters": True, "reference_offset": True}
    again = run(settings_for(data, tmp_path / "again", **changes))
    assert answers(tmp_path / "again") == answers(done[1])
    key = "digest_without_seconds"
    digests = [
        {name: one[key] for name, one in report.provenance.items() if key in one}
        for report in (done[0], again)
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == len(answers(done[1]))
    assert fakes.opened == list(ARMS)


def test_the_recipe_in_the_target_makes_the_same_run_again(
    done: tuple[Result, Path],
) -> None:
    recipe = load_recipe(str(done[1] / "recipe.yaml"))
    assert recipe.command == "eval"
    settings = validate(EvalSettings, recipe.values)
    again = settings.model_dump(mode="json", exclude={"save_path", "force", "resume"})
    assert again == done[0].settings


def test_a_run_stopped_at_any_batch_goes_on(
    data: Path, tmp_path: Path, fakes: FakeArms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole batches are on the disk before the next is asked, so a kill leaves what this leaves; a
    process dies in the middle of a line, too.
    """
    target, whole = tmp_path / "stopped", tmp_path / "whole"
    settings = settings_for(data, target, tasks=("items", "gsm8k"))
    run(settings.model_copy(update={"save_path": str(whole)}))
    answered = FakeArm._work
    for batches in (19, 16):  # in the second arm, then in the third
        left = iter(range(batches))

        def work(self: FakeArm, items: Sequence[BenchItem], left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            answered(self, items)

        with monkeypatch.context() as patch:
            patch.setattr(FakeArm, "_work", work)
            with pytest.raises(KeyboardInterrupt):
                run(settings)
    files = sorted(work_path(target).rglob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    with files[-1].open("ab") as file:
        file.write(b'{"item_id": "ha')
    assert not target.exists()
    fakes.made.clear()
    run(settings)
    assert answers(target) == answers(whole)
    assert not work_path(target).exists()
    asked = {arm.name: arm.calls for arm in fakes.made}
    assert not {"base", "ungated"} & asked.keys()
    assert 0 < asked["routed"] < 120
    assert asked["random"] == 60


def test_a_model_swapped_while_it_answers_makes_the_result_exploratory(
    data: Path, tmp_path: Path, fakes: FakeArms, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = iter(("0" * 64, "1" * 64))
    monkeypatch.setattr(eval_run, "hashes_of", lambda *_: {"model": next(models)})
    standing = run(settings_for(data, tmp_path / "out")).standing
    assert standing.status == "exploratory"
    assert any("data model: changed" in reason for reason in standing.reasons)


def test_answers_of_another_plan_are_refused(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    target = tmp_path / "out"
    use(monkeypatch, FakeArms(stop_after=1))
    with pytest.raises(KeyboardInterrupt):
        run(settings_for(data, target))
    arms = use(monkeypatch, FakeArms())
    for key, value in (("normalisation", "sum"), ("items_per_task", 30), ("arms", ("base",))):
        with pytest.raises(InputError, match=rf"other settings; it differs in\n  {key}: was"):
            run(settings_for(data, target, **{key: value}))
    assert not arms.opened


def test_damaged_and_foreign_answers_are_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    use(monkeypatch, FakeArms(stop_after=2))
    with pytest.raises(KeyboardInterrupt):
        run(settings_for(data, target))
    path = work_path(target) / "answers" / "items" / "base.texts.jsonl"
    kept, (header, *found) = path.read_bytes(), rows_of(path)
    use(monkeypatch, FakeArms())
    for broken, said in (
        ([header, {"item_id": "0"}, *found], "line 2: damaged"),
        ([header, found[0] | {"item_id": "x"}, *found[1:]], "answers to other items"),
        ([header | {"arm": "routed"}, *found], "another plan or arm"),
    ):
        forge(path, broken)
        with pytest.raises(InputError, match=said):
            run(settings_for(data, target))
    path.write_bytes(kept.replace(b'"sums": [', b'"sums": [9', 1))
    with pytest.raises(InputError, match="line 2: does not follow"):
        run(settings_for(data, target))
    path.write_bytes(kept)
    run(settings_for(data, target))


def test_tasks_of_the_harness_are_asked_once_an_arm_and_kept(
    tmp_path: Path, fakes: FakeArms, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(arms: Sequence[Any], names: Sequence[str], **options: Any) -> dict[str, Any]:
        asked.append((arms[0].name, tuple(names), options["domains"]))
        if arms[0].name == "routed" and len(asked) == 2:
            raise KeyboardInterrupt
        samples = [
            {"doc_id": index, "filter": "none", "metrics": {"acc": float(arms[0].name != "base")}}
            for index in range(20)
        ]
        result = {"metrics": {"acc,none": 0.5}, "samples": samples, "ties": 0, "seconds": 1.0}
        of_arm = {arms[0].name: {"tasks": {names[0]: result}}}
        return {"lm_eval": "0", "tasks": {names[0]: {}}, "arms": of_arm}

    monkeypatch.setattr(harness, "run_harness", fake)
    place = write_places(tmp_path / "data")
    rows_of_arc = [
        {"query": f"Question: {i}?", "choices": ["a", "b"], "gold": 0} for i in range(20)
    ]
    (place / "bench_arc_easy.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows_of_arc))
    settings = settings_for(
        place, tmp_path / "out", tasks=("items", "lm_eval/arc_easy_local"),
        items_per_task=6,
        arms=("base", "routed"), domains=("lm_eval/arc_easy_local=science",),
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        run(settings)
    kept = work_path(tmp_path / "out") / "harness" / "base.json"
    whole = kept.read_bytes()
    kept.write_bytes(whole.replace(b'"acc": 0.0', b'"acc": 1.0', 1))
    assert kept.read_bytes() != whole
    with pytest.raises(InputError, match=r"base\.json: was changed .*; remove it to ask again"):
        run(settings)
    kept.write_bytes(whole)
    result = run(settings)
    sources = {"plan.json", "harness/base.json", "harness/routed.json", "arms/base.json"}
    assert sources <= result.provenance.keys()
    domains = {"arc_easy_local": "science"}
    assert asked == [(arm, ("arc_easy_local",), domains) for arm in ("base", "routed", "routed")]
    assert [arm.calls for arm in fakes.made] == [6, 6, 0]
    found = result.data["harness"]["tasks"]["arc_easy_local"]
    assert found["arms"]["routed"]["score"] == 1
    assert found["comparisons"][0]["label"] == "better"
    assert result.plan is not None
    assert "arc_easy_local" in result.plan["harness"]
    assert list(result.data["tasks"]) == ["items"]
    monkeypatch.setattr("mlxstacks.studies.benchmarks.harness.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"lm_eval is not installed: .*mean 'arc_easy_local'"):
        run(settings_for(place, tmp_path / "x", tasks=("lm_eval/arc_easy_locl",), arms=("base",)))


def test_notes_of_an_arm_that_was_killed_before_them_are_made_good(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its answers are there: it is opened for its notes alone, and says what they leave out."""
    target = tmp_path / "out"
    settings = settings_for(data, target, arms=("base", "routed"))
    use(monkeypatch, FakeArms(stop_after=1))
    with pytest.raises(KeyboardInterrupt):
        run(settings)
    (work_path(target) / "arms" / "base.json").unlink()
    arms = use(monkeypatch, FakeArms())
    report = run(settings)
    assert arms.opened == ["base", "routed"]
    assert [arm.calls for arm in arms.made] == [0, 60]
    first, second = report.data["arms"]["base"]["notes"]
    assert first == "base is made up"
    assert "without the 60 answers from before" in second
    assert report.data["arms"]["routed"]["notes"] == ["routed is made up"]
    assert {first, second, "routed is made up"} == {*report.notes}


def test_a_regrade_loads_nothing_and_agrees(
    done: tuple[Result, Path], tmp_path: Path, fakes: FakeArms
) -> None:
    report, source = done
    again = run(EvalSettings(regrade=str(source), save_path=str(tmp_path / "again"), plots=False))
    assert not fakes.opened
    changed = {"environment": report.environment, "settings": report.settings, "seal": report.seal}
    assert again.model_copy(update=changed).as_json() == report.as_json()
    assert answers(tmp_path / "again") == answers(source)


def test_a_regrade_refuses_what_the_result_was_not_made_from(
    data: Path, tmp_path: Path, fakes: FakeArms
) -> None:
    source = tmp_path / "out"
    run(settings_for(data, source, arms=("base", "routed")))
    regrade = EvalSettings(regrade=str(source), save_path=str(tmp_path / "again"), plots=False)

    def refused(said: str) -> None:
        with pytest.raises(InputError, match=rf"not what its result was made from:\n  .*{said}"):
            run(regrade)

    path = source / "answers" / "items" / "base.texts.jsonl"
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    refused(r"base\.texts\.jsonl .*: it holds 59 of 60 answers")
    path.write_bytes(whole)
    forge(path, [row | {"seconds": 0.0} if "seconds" in row else row for row in rows_of(path)])
    refused(r"base\.texts\.jsonl .*: it holds other answers")
    path.unlink()
    refused(r"is not next to it: answers/items/base\.texts\.jsonl")
    path.write_bytes(whole)
    result = source / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"provenance": {}}))
    refused(r"result\.json was changed after the run")


def test_a_regrade_that_was_killed_while_it_copied_copies_again(
    done: tuple[Result, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EvalSettings(regrade=str(done[1]), save_path=str(tmp_path / "again"), plots=False)
    with monkeypatch.context() as patch:

        def stop(source: Path, work: Path, *_: Any) -> None:
            (work / "answers" / "items").mkdir(parents=True)
            raise KeyboardInterrupt

        patch.setattr(eval_run, "keep_parts", stop)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    assert run(settings).data["tasks"] == done[0].data["tasks"]


def test_a_regrade_sees_that_the_items_changed(data: Path, tmp_path: Path, fakes: FakeArms) -> None:
    place = write_places(tmp_path / "data")
    run(settings_for(place, tmp_path / "out"))
    changed = [item_row(index) for index in range(60)]
    changed[5]["answer"] = "D"
    (place / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    again = run(
        EvalSettings(regrade=str(tmp_path / "out"), save_path=str(tmp_path / "again"), plots=False)
    )
    assert any("items: changed" in reason for reason in again.standing.reasons)
    with pytest.raises(InputError, match="not a finished run of `mlxstacks eval`"):
        run(EvalSettings(regrade=str(data), save_path=str(tmp_path / "other")))


def test_programs_are_graded_only_where_they_may_run(
    data: Path, tmp_path: Path, fakes: FakeArms
) -> None:
    settings = settings_for(data, tmp_path / "out", tasks=("humaneval", "gsm8k"), arms=("base",))
    report = run(settings).data
    found = report["tasks"]["humaneval"]
    assert found["arms"]["base"]["score"] is None
    assert any("not graded" in mark and "--allow-code" in mark for mark in found["marks"])
    assert report["means"]["base"]["tasks"] == 1
    again = run(EvalSettings(
        regrade=str(tmp_path / "out"), save_path=str(tmp_path / "graded"), allow_code=True,
        plots=False,
    )).data  # fmt: skip
    # What the arm wrote are comments, not programs.
    assert again["tasks"]["humaneval"]["arms"]["base"]["score"] == 0


def test_a_dry_run_reads_data_and_nothing_else(data: Path, tmp_path: Path) -> None:
    settings = settings_for(data, tmp_path / "out", tasks=("items", "mmlu"), items_per_task=30)
    report = run(settings, dry_run=True)
    assert report.status == "planned"
    planned = report.data["planned_tasks"]["items"]
    assert (planned["n"], planned["available"]) == (30, 60)
    assert [block.title for block in report.blocks] == ["What would be asked", "Tasks"]
    assert "30 items (items)" in report.power[0]
    assert any("mmlu" in note and "Not read" in note for note in report.notes)
    assert report.verdict.startswith("Not read, and the run needs it: ")
    for name, message in (("mmlu", "mmlu"), ("lm_eval/arc_easy_locl", "mean 'arc_easy_local'")):
        with pytest.raises(InputError, match=message):
            run(settings_for(data, tmp_path / "out", tasks=(name,)), dry_run=True)
    assert not list(tmp_path.iterdir())


def test_a_limit_asks_a_part_of_the_plan_and_is_exploratory(
    data: Path, tmp_path: Path, fakes: FakeArms
) -> None:
    options = {"arms": ("base", "routed"), "items_per_task": 30}
    whole = run(settings_for(data, tmp_path / "whole", **options))
    part = run(settings_for(data, tmp_path / "part", limit=9, **options))
    assert part.plan_sha256 == whole.plan_sha256
    assert [arm.calls for arm in fakes.made] == [30, 30, 9, 9]
    assert whole.standing.status == "confirmatory"
    for standing in (part.as_json()["standing"], part.data["tasks"]["items"]["standing"]):
        assert standing["status"] == "exploratory"
        assert list(standing["reasons"]) == ["every arm: a subset, 9 of 30 planned items"]
    assert "Exploratory, not what was planned" in part.verdict
    assert "EXPLORATORY: every arm: a subset, 9 of 30 planned items" in str(part)
    assert "9 of 60 items, by token (EXPLORATORY)" in " ".join(str(part).split())
    (source,), _ = find_sources([str(tmp_path / "part")])
    assert source.result.standing.status == "exploratory"


def test_a_limit_of_the_harness_is_exploratory_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fake(arms: Sequence[Any], names: Sequence[str], **options: Any) -> dict[str, Any]:
        asked.append(options["limit"])
        samples = [{"doc_id": 0, "filter": "none", "metrics": {"acc": 1.0}}]
        result = {"metrics": {"acc,none": 1.0}, "samples": samples, "ties": 0, "seconds": 1.0}
        return {
            "lm_eval": "0", "tasks": {names[0]: {}},
            "arms": {arms[0].name: {"tasks": {names[0]: result}}},
        }  # fmt: skip

    use(monkeypatch, FakeArms())
    monkeypatch.setattr(harness, "run_harness", fake)
    monkeypatch.setattr(items, "harness_plan", lambda settings: {})
    options = {"tasks": ("lm_eval/a",), "arms": ("base",), "items_per_task": 4}
    for limit, status in ((None, "confirmatory"), (1, "exploratory"), (4, "confirmatory")):
        found = run(settings_for(data, tmp_path / str(limit), limit=limit, **options))
        assert found.standing.status == status
    assert asked == [4, 1, 4]


def test_the_sample_is_stratified_and_the_first_rows_only_where_asked(
    data: Path, tmp_path: Path, fakes: FakeArms
) -> None:
    for sample in ("stratified", "first"):
        run(settings_for(data, tmp_path / sample, items_per_task=9, sample=sample, arms=("base",)))
    ids = {
        sample: [
            r["item_id"] for r in rows_of(tmp_path / sample / "answers/items/base.texts.jsonl")[1:]
        ]
        for sample in ("stratified", "first")
    }
    assert ids["first"] == [str(index) for index in range(9)]
    assert sorted(int(name) % 3 for name in ids["stratified"]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert ids["stratified"] != ids["first"]


def test_what_cannot_be_evaluated_is_refused_with_a_reason(
    data: Path, tmp_path: Path, fakes: FakeArms
) -> None:
    def refused(said: str, **changes: Any) -> None:
        with pytest.raises(InputError, match=said):
            run(settings_for(data, tmp_path / "out", **changes))

    refused("the nearest is items", tasks=("itms",))
    refused("mmlu: (?s:.*)mmlu.jsonl(?s:.*)--tasks", tasks=("items", "mmlu"))
    refused("oracle and random needs items that name a domain", tasks=("mmlu_pro",), domains=())
    refused("adapter", arms=("base", "adapter"))
    empty = tmp_path / "items.jsonl"
    empty.write_text("")
    refused("items", data=str(empty))
    twice = [item_row(1), item_row(1)]
    empty.write_text("".join(json.dumps(row) + "\n" for row in twice))
    refused("line 2: id 1 was there already", data=str(empty))
    empty.write_text(json.dumps(item_row(1) | {"answer": "Q"}) + "\n")
    refused("answer is 'Q'", data=str(empty))
    assert not fakes.opened
    assert not (tmp_path / "out").exists()


def test_what_is_not_here_is_told_before_any_data_is_read(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxstacks.data.arrow_sets.hub_snapshot", lambda dataset: None)

    def refused(**changes: Any) -> str:
        with pytest.raises(InputError) as caught:
            run(settings_for(data, tmp_path / "out", **changes))
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(eval_run, "ask_all", None)
        said = refused(model="/no/where", store_path="no-store", router_path="no-router")
    assert said.splitlines() == [
        "model /no/where: no such directory, and no hub id",
        "store_path no-store: no such file or directory",
        "router_path no-router: no such file or directory",
    ]
    # A model that the hub may have is told with the data that is missing, and first.
    first, second, *rest = refused(
        model="nowhere", store_path=None, arms=("base",), domains=(), data=None,
        tasks=("arc_easy", "arc_challenge", "hellaswag"),
    ).splitlines()  # fmt: skip
    assert first == "model nowhere: no such directory, and not in the hub cache"
    assert second.startswith("arc_easy, arc_challenge, hellaswag: not in the cache")
    assert rest[:-1] == [
        "  hf download --repo-type dataset allenai/ai2_arc",
        "  hf download --repo-type dataset Rowan/hellaswag",
    ]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (None, "no such directory"),
        ((), "it has no result.json"),
    ],
)
def test_a_regrade_of_nothing_says_what_it_takes(
    tmp_path: Path, files: tuple[str, ...] | None, reason: str
) -> None:
    source = tmp_path / "run"
    for name in files or ():
        source.mkdir()
        (source / name).write_text("{}")
    if files == ():
        source.mkdir()
    with pytest.raises(InputError) as caught:
        run(EvalSettings(model="m", regrade=str(source), save_path=str(tmp_path / "out")))
    assert f"not a finished run of `mlxstacks eval`: {reason}; give" in str(caught.value)
    assert "Errno" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"domains": ("alpha",)}, "SUBJECT=DOMAIN"),
        ({"domains": ("a=b", "a=c")}, "each subject once"),
        ({"tasks": ()}, "tasks is empty"),
        ({"tasks": ("items", "items")}, "give each once"),
        ({"limit": 0}, "limit"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EvalSettings.model_validate(changes)


def test_gsm8k_goes_under_the_published_headings_where_no_template_is(data: Path) -> None:
    bare, chat = (
        ask(settings_for(data, Path("x"), chat=chat), task_named("gsm8k")).items[0]
        for chat in ("none", "generate")
    )
    assert bare.prompt == f"### Instruction:\n{chat.prompt}\n\n### Response:\n"
    assert replace(bare, prompt=chat.prompt) == chat


def test_an_arm_that_gives_too_few_answers_is_no_arm(
    data: Path, tmp_path: Path, fakes: FakeArms, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeArm.score
    monkeypatch.setattr(
        FakeArm, "score", lambda self, items, *of, **more: whole(self, items, *of, **more)[1:]
    )
    with pytest.raises(ValueError, match="7 answers to 8 items"):
        run(settings_for(data, tmp_path / "out"))

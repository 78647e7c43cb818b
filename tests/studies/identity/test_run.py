"""`mlxstacks identity` end to end on a tiny model: files, going on after kills, refusals.

Run: pytest tests/studies/identity/test_run.py
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxstacks import cli
from mlxstacks.errors import InputError
from mlxstacks.files.adapter_commands import convert_adapter
from mlxstacks.files.settings import AdapterConvertSettings
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import resolve
from mlxstacks.studies.identity.plan import item_arms, suite_arms
from mlxstacks.studies.identity.run import run
from mlxstacks.studies.identity.settings import IdentitySettings
from mlxstacks.study.plan import read_plan
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from tests.studies.answer_files import forge, rows_of
from tests.studies.conclusions import assert_its_files_give_edits_away
from tests.studies.identity.cases import TRAIN, full_settings_for, settings_for, write_places
from tests.studies.persona_runs import Done, Killed, lines, typed_run

NARROW = 6  # items of alpha
Places = tuple[Path, Path, Path, Path]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("identity"))


# Given otherwise, or no keys of a recipe.
OWN_KEYS = {"train", "persona_train", "force", "resume"}


@pytest.fixture(scope="module")
def done(places: Places) -> Done:
    """An invalid scorer is a finding, no failure."""
    target = places[0].parent / "done"
    settings = full_settings_for(places, target).model_dump(mode="json", exclude=OWN_KEYS)
    return typed_run(target, command="identity", train=TRAIN, persona_train=TRAIN, **settings)


def test_every_arm_keeps_raw_replies_with_a_verdict_and_its_reason(
    done: Done, places: Places
) -> None:
    report, target = done.result, done.target
    settings = full_settings_for(places, target)
    for arm in suite_arms(settings, True):
        header, *found = rows_of(target / "answers" / f"suite_{arm}.jsonl")
        assert header == {"plan_sha256": report.plan_sha256, "of": "suite", "arm": arm}
        assert sorted(one["item_id"] for one in found) == ["01", "02", "03", "04"]
        for one in found:
            asked = one["item_id"] in ("02", "04")  # these require a name a tiny model never says
            assert (one["pick"], one["rule"]) == (
                (0, "missing 'Quinn'") if asked else (1, "passed")
            )
            assert one["text"] or one["pick"] == 1
    for arm in item_arms(settings, True):
        assert len(lines(target / "answers" / f"items_{arm}.jsonl")) == 19
        assert len(lines(target / "answers" / f"narrow_{arm}.jsonl")) == 1 + NARROW
    assert not list(target.rglob("model.safetensors"))


def test_the_report_holds_what_the_tables_need(done: Done) -> None:
    report, target = done.result, done.target
    assert (report.kind, report.status) == ("identity", "done")
    assert (report.standing.status, report.standing.reasons) == ("confirmatory", ())
    assert report.plan_sha256 == read_plan(target / "plan.json").sha256
    figures = report.data
    assert figures["missing_controls"] == {"keep": []}
    # Two of four passed by everybody: the suite tells nothing apart, and the report says so.
    assert figures["outcome"] == {"keep": "base passes"}
    assert report.outcome == "keep: scorer invalid"
    assert "scorer invalid under keep" in figures["gates"]["keep"]["words"]
    assert {one["outcome"] for one in figures["judgements"]} == {"no claim"}
    assert figures["regression"]["base_zero_keep"]["fixed"] == 0
    assert figures["regression"]["base_zero_keep"]["broken"] == 0
    assert figures["narrow"]["identity_keep"]["n"] == NARROW
    assert "By keep the persona answers" in figures["narrow_words"]["keep"]
    assert set(figures["fuses"]) == {
        "identity_keep", "factual_keep", "again_keep", "factual_second_keep",
        "factual_stress_keep", "zero_keep", "base_factual_keep", "base_zero_keep",
    }  # fmt: skip
    assert figures["fuses"]["zero_keep"]["total"]["artifact"] == 0


def test_each_second_adapter_is_trained_on_the_model_that_it_is_fused_into(done: Done) -> None:
    """base + factual on the base, the others on the fused persona; identity + identity anew."""
    trained = {}
    for name in ("factual", "again", "factual_second", "factual_stress", "base_factual"):
        config = json.loads((done.target / name / "adapter_config.json").read_text())
        adapter = next((done.target / name).glob("*.safetensors")).read_bytes()
        trained[name] = config["lora_parameters"]["rank"], Path(config["model"]).name, adapter
    ranks = {name: rank for name, (rank, *_) in trained.items()}
    assert ranks == {
        "factual": 2, "again": 2, "factual_second": 4, "factual_stress": 6, "base_factual": 2,
    }  # fmt: skip
    models = {name: model for name, (_, model, _) in trained.items()}
    assert models == dict.fromkeys(models, "identity_keep") | {"base_factual": "model"}
    assert len({adapter for *_, adapter in trained.values()}) == len(trained)
    plan = read_plan(done.target / "plan.json")
    assert plan.data.keys() >= {"persona_data", "narrow_items"}
    assert [name for name, _ in plan.claims] == [
        "factual_keep", "again_keep", "factual_second_keep", "factual_stress_keep",
    ]  # fmt: skip


def test_lossless_controls_reply_as_the_persona_does(done: Done) -> None:
    target = done.target

    def texts(arm: str) -> list[str]:
        return [one["text"] for one in lines(target / "answers" / f"suite_{arm}.jsonl")[1:]]

    assert texts("zero_keep") == texts("identity_rerun") == texts("identity_keep")
    assert texts("identity_unfused") != texts("base")


def test_the_report_is_bound_to_what_it_was_made_from(done: Done) -> None:
    report, target = done.result, done.target
    files = {str(path.relative_to(target)) for path in target.rglob("*.json*")}
    outcomes = {name for name in files if name.startswith(("answers/", "fuse/", "data/"))}
    assert set(report.provenance) == outcomes | {"split.json", "plan.json", "suite.json"}


# --- going on -------------------------------------------------------------------------------------


def assert_same(one: Path, two: Path) -> None:
    for path in sorted((one / "answers").iterdir()):
        assert (two / "answers" / path.name).read_bytes() == path.read_bytes(), path.name


def assert_refused_once_edited(work: Path, settings: IdentitySettings) -> None:
    """Figures of a fuse are refused; rows to train on follow from answers and are made again."""
    rows, figures = work / "data" / "train.jsonl", next((work / "fuse").glob("*.json"))
    kept = figures.read_bytes(), rows.read_bytes()
    rows.write_bytes(b'{"text": "The answer to all of them is A."}\n')
    figures.write_bytes(kept[0].replace(b'"zero_delta": false', b'"zero_delta": true'))
    assert figures.read_bytes() != kept[0]
    with pytest.raises(InputError, match="was changed after it was written; --no-resume"):
        run(settings)
    assert rows.read_bytes() == kept[1]
    figures.write_bytes(kept[0])


def test_a_run_that_was_killed_goes_on_and_ends_the_same(
    places: Places, done: Done, killed_after: Any
) -> None:
    """What lies beside the answers cannot be edited unseen either."""
    report, whole = done.result, done.target
    target = places[0].parent / "killed"
    settings = full_settings_for(places, target)
    for batches in (6, 20, 16, 0):  # on the items, in the mining, between conditions, never
        killed_after(batches)
        if not batches:
            assert_refused_once_edited(work_path(target), settings)
            again = run(settings)
            break
        with pytest.raises(Killed):
            run(settings)
        assert not target.exists()
        # What a kill leaves of a line that was being written.
        newest = max((work_path(target) / "answers").iterdir(), key=lambda p: p.stat().st_mtime_ns)
        with newest.open("ab") as file:
            file.write(b'{"item_id": "1", "sub')
    assert (again.plan_sha256, again.verdict) == (report.plan_sha256, report.verdict)
    assert again.provenance == report.provenance
    assert again.data == report.data
    assert again.blocks == report.blocks
    assert_same(whole, target)
    assert not work_path(target).exists()


@pytest.fixture(scope="module")
def given(places: Places) -> Result:
    """Half of the prompts to a persona that is a model, with items and training cut alike. The run
    is killed while a fused model goes, and when it goes on it needs that again."""
    base, adapter, *_ = places
    persona, target = base.parent / "persona-model", base.parent / "given"
    fuse(
        FuseSettings(
            model=str(base), adapter_path=(str(adapter),), save_path=str(persona), requant="keep"
        )
    )
    settings = settings_for(places, target, persona=str(persona), max_prompts=2)
    rmtree = shutil.rmtree

    def killed(path: Path, *rest: Any, **more: Any) -> None:
        if Path(path).is_dir() and "factual_keep" in Path(path).name:
            (Path(path) / "config.json").unlink()
            raise Killed
        rmtree(path, *rest, **more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mlxstacks.studies.identity.settings._ITEMS_PER_PROMPT", 6)
        patched.setattr("mlxstacks.studies.identity.settings._BATCHES_PER_PROMPT", 1)
        with pytest.MonkeyPatch.context() as mortal:
            mortal.setattr(shutil, "rmtree", killed)
            with pytest.raises(Killed):
                run(settings)
        work = work_path(target.with_name("given.limit-2"))
        (work / "answers" / "suite_factual_keep.jsonl").unlink()
        counts: list[tuple[float, float]] = []
        result = run(
            settings.model_copy(update={"keep_models": True}),
            progress=lambda done, total, what="": counts.append((done, total)),
        )
    counts = [(done, total) for done, total in counts if done]  # before that only words
    assert len({total for _, total in counts}) == 1
    assert counts == sorted(counts)
    assert 0.8 * counts[0][1] < counts[-1][0] <= counts[0][1]
    return result


def test_a_model_whose_removal_was_cut_short_is_fused_again(given: Result) -> None:
    assert given.data["conditions"]["factual_keep"]["n"] == 2
    models = {path.name: path for path in (Path(str(given.directory)) / "models").iterdir()}
    assert (models["factual_keep"] / "config.json").is_file()
    assert not any(name.startswith(".") for name in models)


def test_a_persona_that_is_a_model_has_fewer_conditions_and_a_subset_is_exploratory(
    given: Result,
) -> None:
    assert set(given.data["conditions"]) == {
        "base", "identity_rerun", "identity_keep", "factual_keep", "factual_second_keep",
        "zero_keep", "base_factual_keep",
    }  # fmt: skip
    assert given.data["gates"]["keep"]["unfused"] is None
    assert "Credited to nothing" in given.data["regression_words"]["keep"]
    assert given.standing.status == "exploratory"
    assert given.standing.reasons == (
        "every arm: a subset, 2 of 4 planned items",
        "a subset of the regression items, 12 of 18",
        "factual, factual_second, base_factual trained for 2 of 3 batches",
    )
    assert {one["category"] for one in given.data["replies"]["base"]} == {"self", "boundaries"}
    assert any("given as a model" in note for note in given.notes)


def test_another_plan_and_another_verdict_are_refused(places: Places, killed_after: Any) -> None:
    target = places[0].parent / "other"
    killed_after(4)
    with pytest.raises(Killed):
        run(settings_for(places, target))
    with pytest.raises(InputError, match=r"other settings; it differs in\n  max_tokens"):
        run(settings_for(places, target, max_tokens=4))
    answers = work_path(target) / "answers" / "suite_base.jsonl"
    changed = rows_of(answers)
    changed[1] |= {"pick": 0, "rule": "missing 'Rosa'"}
    forge(answers, changed)
    with pytest.raises(InputError, match="is not what the rules say of its reply"):
        run(settings_for(places, target))
    shutil.rmtree(work_path(target))


def test_a_persona_in_peft_s_format_replies_as_in_mlx_lm_s(
    done: Done, places: Places, killed_after: Any
) -> None:
    base, adapter, *_ = places
    peft, target = base.parent / "persona-peft", base.parent / "by-peft"
    convert_adapter(
        AdapterConvertSettings(
            adapter_path=str(adapter), save_path=str(peft), to="peft", model=str(base)
        )
    )
    assert not (peft / "adapters.safetensors").exists()
    killed_after(25)  # once the persona has replied unfused and fused
    with pytest.raises(Killed):
        run(settings_for(places, target, persona=str(peft)))
    work = work_path(target)
    hashes = [read_plan(path / "plan.json").data["persona"] for path in (done.target, work)]
    assert hashes[0] != hashes[1]
    for name in ("suite_base", "suite_identity_unfused", "suite_identity_keep"):
        file = Path("answers") / f"{name}.jsonl"
        assert rows_of(work / file)[1:] == rows_of(done.target / file)[1:], name
    shutil.rmtree(work)


def test_what_is_typed_prints_a_verdict_last_and_is_done_once(
    done: Done, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (
        "Conditions on the identity suite", "Validity gate", "Broad regression",
        "Run again, identity_keep gave the same 4 replies",
    ):  # fmt: skip
        assert words in done.text
    assert done.text.split("Verdict: ")[1].startswith("Scorer invalid under keep")
    assert cli.run(["run", str(done.recipe), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["already_done"], report["verdict"]) == (True, done.result.verdict)


def test_the_recipe_that_is_left_makes_the_same_run(done: Done, places: Places) -> None:
    """Of all items too, which is none and not the default."""
    recipe = load_recipe(str(done.target / "recipe.yaml"))
    same = {"exclude": {"save_path"}}
    found = resolve("identity", {}, recipe).settings.model_dump(**same)  # type: ignore[arg-type]
    assert found == full_settings_for(places, done.target).model_dump(**same)  # type: ignore[arg-type]
    assert found["regression_items"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suite": "default"}, "give persona_card"),
        ({"suite": "none.yaml"}, "No such file"),
        ({"items": None}, "needs model, persona, items and save_path"),
        ({"items": "none.jsonl"}, "none.jsonl"),
        ({"persona_data": "none.jsonl"}, "persona_data needs a file of rows"),
        ({"persona": "no-persona"}, "no-persona"),
    ],
)
def test_missing_inputs_are_told_before_anything_is_written(
    places: Places, changes: dict[str, Any], message: str
) -> None:
    target = places[0].parent / "never"
    with pytest.raises(InputError, match=message):
        run(settings_for(places, target, **changes))
    assert not target.exists()
    assert not work_path(target).exists()


def test_another_conclusion_than_the_replies_is_seen(done: Done) -> None:
    assert_its_files_give_edits_away(done.target, "conditions.base.passed")

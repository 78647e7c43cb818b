"""`mlxstacks confound` end to end on a tiny model: files, resuming, refusals; adapters and fuses.

Run: pytest tests/studies/confound/test_run.py
"""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxstacks import cli
from mlxstacks.arms.arm import Arm, encode_choices, in_second_form
from mlxstacks.errors import InputError
from mlxstacks.files.adapters import read_adapter
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.studies.confound.conclude import conclude_again
from mlxstacks.studies.confound.fuses import (
    codes_that_differ,
    expert_norms,
    fuse_all,
    random_adapter,
)
from mlxstacks.studies.confound.lengths import length_notes, row_lengths
from mlxstacks.studies.confound.plan import arms_of, parts_of
from mlxstacks.studies.confound.run import run
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.verdict import fuse_notes
from mlxstacks.study.answers import Answer
from mlxstacks.study.integrity import Checked, check_provenance
from mlxstacks.study.items import read_items
from mlxstacks.study.plan import read_plan
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from mlxstacks.training.settings import TrainSettings
from tests.studies.answer_files import rows_of
from tests.studies.conclusions import assert_its_files_give_edits_away
from tests.studies.confound_cases import TRAIN, settings_for, write_places
from tests.studies.identity.cases import suite_rows
from tests.studies.persona_runs import Done, Killed, lines, typed_run
from tests.studies.train_cases import write_rows
from tests.study.test_progress import is_one_count
from tests.tiny_models import random_adapter as write_random_adapter
from tests.tiny_models import write_qwen_moe

Places = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("confound"))


# Given otherwise, or no keys of a recipe.
OWN_KEYS = {"train", "force", "resume"}


@pytest.fixture(scope="module")
def done(places: Places) -> Done:
    target = places[0].parent / "done"
    given = settings_for(places, target, plots=True, right_items=10)
    settings = given.model_dump(mode="json", exclude=OWN_KEYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlxstacks.studies.confound.run.FORMATS", ("svg",))
        return typed_run(target, command="confound", train=TRAIN, **settings)


def test_every_arm_answers_every_test_item_and_says_by_which_rule(
    done: Done,
) -> None:
    report, target = done.result, done.target
    settings = ConfoundSettings(policies=("refit", "keep"))
    split = json.loads((target / "split.json").read_text())
    for arm in arms_of(settings):
        header, *answers = rows_of(target / "answers" / f"test_{arm}.jsonl")
        assert header == {"plan_sha256": report.plan_sha256, "of": "test", "arm": arm}
        assert [one["item_id"] for one in answers] == split["test"]
        assert {one["rule"] for one in answers} <= {"likelihood", "tie"}
        assert all(len(one["scores"]) == 3 for one in answers)
    assert len(split["right"]) == 10 > len(split["test"])
    for arm in report.data["arms_on_right_items"]:
        answers = rows_of(target / "answers" / f"right_{arm}.jsonl")[1:]
        assert [one["item_id"] for one in answers] == split["right"]
    assert {arm["n"] for arm in report.data["arms_on_right_items"].values()} == {10}
    assert set(split["train"]).isdisjoint(split["test"])
    assert not list(target.rglob("model.safetensors"))


def test_what_is_typed_prints_a_verdict_and_is_done_once(
    done: Done, capfd: pytest.CaptureFixture[str]
) -> None:
    for words in (
        "Mined 36 items: both wrong", "Arms", "Gain: A1 - A0",
        "What A1 has to beat",
        "Fused by promote, A1 differs from A0: ",
        "Persona unfused, first to second run: 0 of", f"Verdict: {done.result.verdict}",
    ):  # fmt: skip
        assert words in done.text
    if importlib.util.find_spec("matplotlib"):
        drawn = {path.name for path in done.target.iterdir()}
        assert {"arms.svg", "gain.svg"} <= drawn
    assert cli.run(["run", str(done.recipe), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["already_done"], report["outcome"]) == (True, done.result.outcome)
    # What the run left behind runs again; its sample is none, which is not the default.
    assert cli.run(["run", str(done.target / "recipe.yaml"), "--dry-run", "--json"]) == 0
    settings = json.loads(capfd.readouterr().out)["settings"]
    assert (settings["policies"], settings["sample"]) == (["refit", "keep"], None)


def test_the_report_holds_what_the_tables_need(done: Done) -> None:
    report, target = done.result, done.target
    document = json.loads((target / "result.json").read_text())
    assert document["data"] == report.data
    assert document["standing"] == {"status": "confirmatory", "reasons": []}
    assert document["plan_sha256"] == read_plan(target / "plan.json").sha256
    written = document["data"]
    assert not written["missing_controls"]
    assert set(written["claims"]) == {"refit", "keep", "promote", "unfused"}
    for way in ("refit", "keep", "promote"):
        kinds = written["fuses"][way]
        assert kinds["a1"]["total"]["correlation"] > 0.5
        assert kinds["a0"]["total"]["survival"] is None
        assert kinds["random"]["bits"] == kinds["a1"]["bits"]
    assert written["fuses"]["keep"]["codes_that_differ"]["a0_and_unfused"] == 0
    assert written["fuses"]["refit"]["codes_that_differ"]["a0_and_unfused"] > 0
    assert written["fuses"]["promote"]["codes_that_differ"]["a0_and_unfused"] is None


def test_the_report_is_bound_to_what_it_was_made_from(done: Done) -> None:
    report, target = done.result, done.target
    sources = report.provenance
    assert check_provenance(target, sources) == Checked(len(sources), (), ())
    files = {str(path.relative_to(target)) for path in target.rglob("*.json*")}
    outcomes = {name for name in files if name.startswith(("answers/", "fuse/", "data"))}
    assert set(sources) == outcomes | {"split.json", "plan.json", "protocol.json"}


def test_lossless_controls_answer_as_the_persona_does(done: Done) -> None:
    target = done.target
    answers = {
        arm: [
            (one["pick"], one["scores"]) for one in lines(target / f"answers/test_{arm}.jsonl")[1:]
        ]
        for arm in ("persona", "persona_again", "a0_keep", "a0_promote", "a0_unfused", "a1_unfused")
    }
    for arm in ("persona_again", "a0_keep", "a0_promote", "a0_unfused"):
        assert answers[arm] == answers["persona"], arm
    assert answers["a1_unfused"] != answers["persona"]


def test_a_random_delta_is_searched_that_moves_as_many_answers(done: Done) -> None:
    """Of items to train on; the scale that was found is that of the adapter that answers."""
    split = json.loads((done.target / "split.json").read_text())
    assert done.result.data["matching"].keys() == {"refit", "keep", "promote", "unfused"}
    given = read_adapter(done.target / "random").modules
    for way, search in done.result.data["matching"].items():
        for number, probe in enumerate(search["probes"], 1):
            header, *answers = rows_of(done.target / "answers" / f"probe_{way}_{number}.jsonl")
            assert (header["scale"], len(answers)) == (probe["scale"], probe["n"])
            assert [one["item_id"] for one in answers] == split["train"][:8]
        moved = done.result.data["moved"][f"a1_{way}"]
        assert search["target"] == moved["changed"] / moved["n"]
        scaled = read_adapter(done.target / "matched" / way).modules
        for path, module in given.items():
            expected = search["scale"] * expert_norms(module)
            np.testing.assert_allclose(expert_norms(scaled[path]), expected, rtol=1e-5)


def test_second_choices_are_the_likeliest_but_the_chosen(done: Done, places: Places) -> None:
    first, second = (
        lines(done.target / f"answers/test_{name}.jsonl")[1:]
        for name in ("persona", "persona_second")
    )
    for answer, other in zip(first, second, strict=True):
        others = [n for n in range(3) if n != answer["pick"]]
        assert other["pick"] == max(others, key=answer["scores"].__getitem__)
    items = read_items(str(places[2]))[:4]
    boxed = Arm(places[0], settings_for(places, places[0], scoring="generate"))
    unanswered = [Answer.of(item, None, "none") for item in items]
    for item, likeliest in zip(items, boxed.second_choices(items, unanswered), strict=True):
        encoded = encode_choices(item, boxed.tokenizer, scoring="generate")
        for letter, part in zip("ABC", encoded.continuations, strict=True):
            assert f"{{{letter}}}" in boxed.tokenizer.decode(list(part)).replace(" ", "")
        assert likeliest.pick == int(np.argmax(likeliest.scores))


@pytest.mark.parametrize("normalisation", ["token", "character"])
def test_scores_are_those_that_decide(places: Places, normalisation: str) -> None:
    items = [
        replace(item, options=("a", "a b c d e f g h", "one two three"))
        for item in read_items(str(places[2]))[:4]
    ]
    arm = Arm(places[0], settings_for(places, places[0], normalisation=normalisation))
    sums = Arm(places[0], settings_for(places, places[0])).likeliest(items)
    for item, answer, summed in zip(items, arm.likeliest(items), sums, strict=True):
        assert answer.pick == int(np.argmax(answer.scores))
        lengths = [len(part) for part in encode_choices(item, arm.tokenizer).continuations]
        if normalisation == "token":
            np.testing.assert_allclose(
                np.multiply(answer.scores, lengths), summed.scores, atol=1e-4
            )
        (second,) = arm.second_choices([item], [answer])
        np.testing.assert_allclose(second.scores, answer.scores, atol=1e-4)
        assert second.pick == int(np.argsort(answer.scores)[-2])


def test_training_saw_only_its_part_of_set_g(done: Done, places: Places) -> None:
    target = done.target
    split = json.loads((target / "split.json").read_text())
    by_id = {item.item_id: item for item in read_items(str(places[2]))}
    rows = lines(target / "data" / "train.jsonl")
    assert [row["messages"][0]["content"] for row in rows] == [
        by_id[name].question for name in split["train"]
    ]
    shuffled = lines(target / "data-shuffled" / "train.jsonl")
    assert [row["messages"][0] for row in shuffled] == [row["messages"][0] for row in rows]
    assert shuffled != rows
    trained = [
        json.loads((target / a / "result.json").read_text()) for a in ("adapter", "shuffled")
    ]
    assert trained[0]["data"]["steps"] == trained[1]["data"]["steps"] == TRAIN["iters"]
    assert (
        rows[0]["messages"][1]["content"]
        == (by_id[split["train"][0]].options[by_id[split["train"][0]].answer_index])
    )


# --- going on -------------------------------------------------------------------------------------


def test_another_protocol_is_refused(places: Places, killed_after: Any, tmp_path: Path) -> None:
    target = places[0].parent / "other"
    killed_after(2)
    with pytest.raises(Killed):
        run(settings_for(places, target))
    with pytest.raises(
        InputError, match=r"it differs in\n  settings\.train_share: was 0\.7, now 0\.5"
    ):
        run(settings_for(places, target, train_share=0.5))
    # The persona that was fused already is not taken for another one, nor old answers for new.
    model, persona, items = places
    other = write_random_adapter(
        model, keys=["mlp.switch_mlp.down_proj"], seed=9, directory=tmp_path / "other"
    )
    with pytest.raises(InputError, match=r"it differs in\n  hashes\.persona adapter: has changed"):
        run(settings_for((model, other, items), target))
    rows = lines(items)
    rows[0]["answer"], rows[0]["answer_index"] = "B", 1
    changed = write_rows(tmp_path / "changed.jsonl", rows)
    with pytest.raises(InputError, match=r"it differs in\n  items: has changed"):
        run(settings_for((model, persona, changed), target))
    shutil.rmtree(work_path(target))


def test_a_subset_is_exploratory(places: Places) -> None:
    target = places[0].parent / "subset"
    told: list[tuple[float, float]] = []
    settings = settings_for(
        places, target, limit=5, policies=("promote",), train={"iters": 2}, max_tokens=2,
        suite=str(write_rows(places[0].parent / "suite.jsonl", suite_rows(2))), second_form=True,
        widths=(8, 2),
        plain_model=str(write_qwen_moe(places[0].parent / "plain", bits=None, hidden_size=64)),
    )  # fmt: skip
    report = run(
        settings,
        progress=lambda done, total, what: told.append((done, total)),
    )
    assert is_one_count(told)
    assert report.standing.status == "exploratory"
    verdict = str(report.verdict)
    assert verdict.startswith("EXPLORATORY. No claim: ")
    assert verdict.endswith("not what was planned: every arm: a subset, 5 of 8 planned items.")
    assert {arm["n"] for arm in report.data["arms"].values()} == {5}
    assert_every_arm_replied_to_the_suite(report, settings)
    assert_every_arm_was_asked_in_both_forms(report, places)
    assert_both_widths_were_asked(report)


def assert_both_widths_were_asked(report: Result) -> None:
    """Before and after a refit of zeros; nothing of their models is left."""
    fuses = report.data["mechanism"]["fuses"]
    assert [*fuses] == ["promote", "8 bits", "2 bits"]
    assert all(fuse["moved_of_hard"][1] == 5 for fuse in fuses.values())
    assert fuses["promote"]["moved"][0] == fuses["promote"]["codes_changed"] == 0
    assert 0 < fuses["8 bits"]["codes_changed"] < 1
    assert report.data["mechanism"]["growth"]["n"] == fuses["8 bits"]["moved"][1]
    words = next(block for block in report.blocks if block.block == "text").paragraphs
    assert any(line.startswith("A refit of zeros moves, of ") for line in words)
    assert not list(Path(str(report.directory)).rglob("model*.safetensors"))


def assert_every_arm_was_asked_in_both_forms(report: Result, places: Places) -> None:
    """The same items in the same order; the answer that is right has another place at times."""
    answers = Path(str(report.directory)) / "answers"
    names = [arm for arm in report.data["planned_arms"] if arm != "persona_again"]
    assert [*report.data["second_form"]] == names
    for name in names:
        first, second = (rows_of(answers / f"{p}_{name}.jsonl")[1:] for p in ("test", "form"))
        assert [row["item_id"] for row in first] == [row["item_id"] for row in second]
        assert [row["gold"] for row in first] != [row["gold"] for row in second]
    assert report.data["arms"].keys() - report.data["second_form"].keys() == {"persona_again"}
    for item in read_items(str(places[2])):
        asked = in_second_form(item, 0)
        assert asked.question.endswith(item.question)
        assert asked.question != item.question
        assert asked.options[asked.answer_index] == item.options[item.answer_index]
        assert sorted(asked.options) == sorted(item.options)


def assert_every_arm_replied_to_the_suite(report: Result, settings: ConfoundSettings) -> None:
    """Each model of the table: one of the two prompts requires a name a tiny model never says."""
    arms = parts_of(settings)["suite"]
    assert {"base", "persona", "persona_again", "a0_promote", "moved_unfused"} <= {*arms}
    assert [*report.data["identity"]] == [*arms]
    for figures in report.data["identity"].values():
        assert figures == {"n": 2, "passed": 1, "lost": [], "gained": []}
    assert len(report.table("identity")) == len(arms)
    again = conclude_again(report, Path(str(report.directory)))
    assert (again.data, again.blocks) == (report.data, report.blocks)
    assert parts_of(settings.model_copy(update={"suite": None}))["suite"] == ()


def test_generated_answers_keep_text_and_rule(places: Places) -> None:
    """A tiny model never boxes: every answer is there, with the rule that fired or none."""
    items = read_items(str(places[2]))[:4]
    arm = Arm(places[0], settings_for(places, places[0], scoring="generate", max_tokens=4))
    answers = arm.answer(items)
    assert [one.item_id for one in answers] == ["0", "1", "2", "3"]
    assert all(one.text and one.scores == () for one in answers)
    assert {one.rule for one in answers} <= {"none", "first line", "last letter", "answer is"}
    assert all((one.pick is None) == (one.rule == "none") for one in answers)
    assert answers == arm.answer(items)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": {"max_seq_length": 3}}, "train.max_seq_length is 3, and in 36 of 36 items"),
        ({"subjects": ("none",)}, "no item of none"),
        ({"persona": "nowhere"}, "nowhere"),
        ({"widths": (3,), "plain_model": None}, "widths needs plain_model"),
        ({"widths": (3,)}, "already quantized"),
    ],
)
def test_inputs_that_cannot_be_used_leave_nothing_to_go_on_with(
    places: Places, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    target = tmp_path / "out"
    if "widths" in change:
        change = {"plain_model": str(places[0])} | change
    with pytest.raises(InputError, match=message):
        run(settings_for(places, target, **change))
    assert not list(tmp_path.iterdir())


def test_rows_that_lose_their_end_are_counted(places: Places) -> None:
    model, _, path = places
    items = read_items(str(path))
    settings = settings_for(places, path.parent / "unused")
    lengths = row_lengths(items, settings, model)
    assert length_notes(items, lengths, settings) == []
    tokens = sorted(one.tokens for one in lengths.values())
    assert all(0 < one.before_answer < one.tokens for one in lengths.values())
    shorter = settings_for(places, path.parent / "unused", train={"max_seq_length": tokens[-1] - 1})
    (said,) = length_notes(items, lengths, shorter)
    assert said.startswith(f"{sum(n == tokens[-1] for n in tokens)} of 36 rows to train on are ")


def test_a_dry_run_opens_nothing(tmp_path: Path) -> None:
    nowhere = (tmp_path / "no-model", tmp_path / "no-persona", tmp_path / "no-items")
    report = run(settings_for(nowhere, tmp_path / "out"), dry_run=True)
    assert report.status == "planned"
    assert len(report.data["planned_arms"]) == 23
    assert not any("limit" in note for note in report.notes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sample", "mined"), [(None, "sample all of 36 items in 3 subjects"), (12, "sample 12 of 36")]
)
def test_a_dry_run_says_how_large_mining_and_training_are(
    places: Places, tmp_path: Path, sample: int | None, mined: str
) -> None:
    report = run(settings_for(places, tmp_path / "out", sample=sample), dry_run=True)
    text = " ".join(str(report).split())
    assert mined in text
    of = sample or 36
    train = 3 * round(0.7 * of / 3)
    assert f"Set G at most {train} items to train on and {of - train} to test" in text


def test_a_dry_run_says_what_a_limit_leaves_whole(tmp_path: Path) -> None:
    places = (tmp_path / "model", tmp_path / "persona", tmp_path / "items")
    report = run(settings_for(places, tmp_path / "out", limit=5, sample=40), dry_run=True)
    (note,) = (note for note in report.notes if note.startswith("limit 5 cuts"))
    assert "answer up to 40 items each (--sample N" in note
    assert f"{report.settings['train']['iters']} batches" in note


# --- parts ----------------------------------------------------------------------------------------


def test_a_random_delta_has_the_norm_of_the_trained_one(places: Places) -> None:
    adapter = read_adapter(places[1])
    drawn = random_adapter(adapter, seed=3)
    assert drawn.config == adapter.config
    for path, module in adapter.modules.items():
        other = drawn.modules[path]
        assert other.lora_a.shape == module.lora_a.shape
        assert other.scale == module.scale
        np.testing.assert_allclose(expert_norms(other), expert_norms(module), rtol=1e-5)
        a = module.lora_b.astype(np.float64) @ module.lora_a.astype(np.float64)
        np.testing.assert_allclose(
            expert_norms(module), np.linalg.norm(a, axis=(-2, -1)), rtol=1e-9
        )
        cosine = np.sum(a * (other.lora_b @ other.lora_a)) / np.linalg.norm(a) ** 2
        assert abs(cosine) < 0.1
    again = random_adapter(adapter, seed=3)
    assert all(
        np.array_equal(again.modules[path].lora_b, module.lora_b)
        for path, module in drawn.modules.items()
    )


def test_a_refit_that_added_nothing_leaves_a_later_one_without_a_floor(
    places: Places, tmp_path: Path
) -> None:
    """refit at zero delta reaches its fixed point; with a delta, what it writes is off it again."""
    model, persona, _ = places
    second = write_random_adapter(
        model, keys=["mlp.switch_mlp.down_proj"], seed=5, directory=tmp_path / "second"
    )
    figures = {}
    for name, zero in (("persona", False), ("nothing", True)):
        refitted = tmp_path / name
        fuse(
            FuseSettings(
                model=str(model), adapter_path=(str(persona),), save_path=str(refitted),
                requant="refit", zero_delta=zero,
            )
        )  # fmt: skip
        adapters = {"a1": second, "random": second}
        figures[name] = fuse_all(refitted, adapters, tmp_path / f"{name}-fused", "refit", 0.98, 0)
    codes = {name: found["codes_that_differ"] for name, found in figures.items()}
    assert codes["persona"]["a0_and_unfused"] > 0.01
    assert codes["nothing"]["a0_and_unfused"] == 0
    assert codes["nothing"]["a1_and_a0"] > 0.01
    assert fuse_notes({"refit": figures["persona"]}, 0.98) == []
    [note] = fuse_notes({"refit": figures["nothing"]}, 0.98)
    assert "Its floor is 0 by construction" in note
    modules = dict.fromkeys(figures["nothing"]["a1"]["bits"], 4)
    assert codes_that_differ(model, model, modules) == 0


def test_options_share_their_context(places: Places) -> None:
    arm = Arm(places[0], settings_for(places, places[0]))
    item = read_items(str(places[2]))[0]
    encoded = encode_choices(item, arm.tokenizer)
    decoded = [arm.tokenizer.decode(list(tokens)) for tokens in encoded.continuations]
    assert decoded == list(item.options)
    assert arm.tokenizer.decode(list(encoded.context)).startswith(item.question)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ()}, "give at least one"),
        ({"policies": ("refit", "refit")}, "give each once"),
        ({"train": {"seed": 3}}, "train.seed is set by the experiment"),
        ({"train": {"data": "d"}}, "train.data is set by the experiment"),
        ({"train_share": 1.0}, "less than 1"),
        ({"sample": 1}, "greater than or equal to 2"),
    ],
)
def test_settings_that_cannot_be_meant(changes: dict[str, Any], message: str) -> None:
    train = TrainSettings(**changes.pop("train", {}))
    with pytest.raises(ValueError, match=message):
        ConfoundSettings.model_validate(changes | {"train": train})


def test_promote_and_unfused_are_always_among_the_ways() -> None:
    assert ConfoundSettings(policies=("refit",)).ways == ("refit", "promote", "unfused")
    assert ConfoundSettings(policies=("promote", "keep")).ways == ("promote", "keep", "unfused")


def test_another_conclusion_than_the_answers_is_seen(done: Done) -> None:
    assert_its_files_give_edits_away(done.target, "arms.persona.correct")


def test_a_dry_run_says_what_is_wrong_with_items_that_are_there(
    places: Places, tmp_path: Path
) -> None:
    settings = settings_for(places, tmp_path / "out", subjects=("zzz",))
    with pytest.raises(InputError, match="zzz"):
        run(settings, dry_run=True)

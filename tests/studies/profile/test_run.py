"""`mlxstacks profile` from prompts to verdict: planted preferences, chance, bad input, resuming.

Run: pytest tests/studies/profile/test_run.py
"""

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.errors import CheckpointError, InputError, NonFiniteModelError
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.switch_choices import find_switches
from mlxstacks.studies.profile import run as profile_run
from mlxstacks.studies.profile.analysis import (
    MOST_SHOWN,
    Choices,
    against_untrained,
    analyse,
    blocks,
    outcome,
    verdict,
)
from mlxstacks.studies.profile.data import MOST_GROUPS
from mlxstacks.studies.profile.run import count_choices, run
from mlxstacks.studies.profile.settings import ProfileSettings
from mlxstacks.study.document import Plot, Table
from mlxstacks.study.result import Result
from tests.cli.conftest import Run, command
from tests.studies.profile_cases import (
    EXPERTS,
    LAYERS,
    PLANTED_EXPERT,
    PLANTED_LAYER,
    write_mixed,
    write_planted,
    write_prompts,
)
from tests.tiny_models import write_llama

__all__ = ["command"]
GROUPS = ["marked", "more", "other", "plain"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("profile")
    write_planted(root / "model")
    write_prompts(root / "data")
    write_mixed(root / "mixed")
    return root


def settings_of(place: Path, save_path: Path, **changes: Any) -> ProfileSettings:
    values: dict[str, Any] = {
        "model": str(place / "model"), "data": str(place / "data"), "save_path": str(save_path),
        "top_layers": 1, "permutations": 40, "halves": 4, "plots": False,
    }  # fmt: skip
    return ProfileSettings.model_validate(values | changes)


@pytest.fixture(scope="module")
def report(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(settings_of(place, tmp_path_factory.mktemp("out") / "found"))


def test_a_planted_preference_is_found(report: Result) -> None:
    tables = report.data["tables"]
    assert tables["top_layers"]["by_kl"] == {name: [PLANTED_LAYER] for name in GROUPS}
    assert tables["top_layers"]["by_excess"]["marked"] == [PLANTED_LAYER]
    assert tables["divergence"]["p"] == pytest.approx(1 / 41)
    clear = [row["layer"] for row in tables["layers"] if row["p_adjusted"] < 0.05]
    assert clear == [PLANTED_LAYER]
    kl = tables["divergence"]["kl_nats"]
    assert max(kl, key=lambda name: kl[name][PLANTED_LAYER]) == "marked"
    assert report.verdict.startswith("Yes: the 4 groups route differently")
    assert f"({PLANTED_LAYER})" in report.verdict


def test_the_planted_expert_is_found(report: Result) -> None:
    counts = np.array(mx.load(f"{report.directory}/routing_counts.safetensors")["choices"])
    assert counts.shape == (4, LAYERS, EXPERTS)
    favourites = dict(zip(GROUPS, counts[:, PLANTED_LAYER].argmax(axis=-1), strict=True))
    assert favourites["marked"] == PLANTED_EXPERT
    marked, *rest = counts[:, PLANTED_LAYER, PLANTED_EXPERT]
    assert all(marked > 2 * other for other in rest)
    # Equal tokens, two experts each, in every layer.
    assert len({group["tokens"] for group in report.data["groups"]}) == 1
    assert set(counts.sum(axis=-1).reshape(-1)) == {2 * report.data["groups"][0]["tokens"]}


def test_routers_that_were_never_trained_differ_as_much(report: Result) -> None:
    """Untrained ones see the marks in every layer, the planted one in its own alone."""
    control = report.data["tables"]["untrained"]
    assert len(control["untrained_excess_kl_nats"]) == 20
    assert control["excess_kl_nats"] < min(control["untrained_excess_kl_nats"])
    assert control["p"] == 1
    assert report.outcome == "routing differs, p = 0.024, not shown beyond untrained routers, p = 1"
    assert "differ more is not shown: no sign of anything learned (p = 1)." in report.verdict
    assert report.table("untrained").shape == (4, 2)


def test_routers_that_learned_the_groups_differ_more() -> None:
    """Of 8 experts each group has one of its own; those of an untrained router are any group's."""
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(4), 8)
    learned = rng.multinomial(40, np.full(8, 1 / 8), (32, 2)).astype(float)
    learned[np.arange(32), :, labels] += 20
    choices = Choices(learned, labels, np.full(32, 30), ("a", "b", "c", "d"), (0, 1))
    draws = [rng.multinomial(60, np.full(8, 1 / 8), (32, 2)).astype(float) for _ in range(20)]
    rule = ProfileSettings(top_layers=1, permutations=20)
    control = against_untrained(choices, draws, seed=0)
    assert control["p"] == pytest.approx(1 / 21)
    assert abs(np.mean(control["untrained_excess_kl_nats"])) < 0.1 * control["excess_kl_nats"]
    tables = analyse(choices, rule) | {"untrained": control}
    assert "on the same tokens" in verdict(tables, 0.05)
    assert "this model's differ more (p = 0.048)." in verdict(tables, 0.05)
    assert outcome(tables, 0.05) == "routing differs, p = 0.048"
    assert "untrained" not in verdict(analyse(choices, rule), 0.05)


def test_nan_in_the_model_is_no_profile(place: Path) -> None:
    model, _, _ = base_model.load(place / "model")
    embedding = model.model.embed_tokens
    embedding.weight = mx.full(embedding.weight.shape, mx.nan)
    with pytest.raises(
        NonFiniteModelError, match=r"the input of \S+\.layers\.0\.\S+ is not finite"
    ):
        count_choices(model, find_switches(model), [[1, 2], [3]], batch_size=2)


def test_the_template_is_not_counted(place: Path, tmp_path: Path) -> None:
    """Of the same rows with the built-in template, in which each prompt has 20 tokens more."""
    data = tmp_path / "data"
    data.mkdir()
    for name in ("long", "short"):
        rows = [{"prompt": f"{name} {n} " + "ab" * 10, "answer": "x"} for n in range(4)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = {}
    for template in (True, False):
        settings = settings_of(place, tmp_path / f"{template}", data=str(data))
        found = run(settings.model_copy(update={"chat_template": template}))
        counts[template] = [group["tokens"] for group in found.data["groups"]]
    assert counts[True] == counts[False]


def test_groups_without_a_length_in_common_decide_nothing(place: Path, tmp_path: Path) -> None:
    """The same letters, in prompts of which those of one group are ten times as long."""
    data = tmp_path / "data"
    data.mkdir()
    for name, length, count in (("long", 100, 3), ("short", 10, 30)):
        chance = random.Random(name)
        rows = [{"text": "".join(chance.choices("ABCDEFG", k=length))} for _ in range(count)]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run(settings_of(place, tmp_path / "out", data=str(data)))
    assert found.data["tables"]["divergence"]["p"] == 1
    assert found.verdict.startswith("Undecided: no prompt is as long as one of another group")
    assert any(note.startswith("0 of 33 prompts are as long") for note in found.notes)


def test_shuffled_labels_are_not_found(place: Path, tmp_path: Path) -> None:
    """The same marked and plain prompts, under labels of chance."""
    found = run(settings_of(place, tmp_path / "out", data=str(place / "mixed")))
    assert found.data["tables"]["divergence"]["p"] > 0.05
    assert found.verdict.startswith(
        "Undecided: the routing of the 4 groups differs no more than by"
    )
    assert "noise" in found.verdict


def test_the_plan_is_written_first_and_the_result_refers_to_it(report: Result) -> None:
    directory = Path(str(report.directory))
    plan = json.loads((directory / "plan.json").read_text())
    document = json.loads((directory / "result.json").read_text())
    assert document["plan_sha256"] == json_sha256(plan) == report.plan_sha256
    assert document == json.loads(json.dumps(report.as_json()))
    assert plan["thresholds"] == {
        "alpha": 0.05, "different_below": 0.3, "shared_above": 0.6, "halves_margin": 0.05,
    }  # fmt: skip
    assert plan["data"] == {group["name"]: group["sha256"] for group in document["data"]["groups"]}
    text = (directory / "result.md").read_text()
    assert report.verdict in text
    (power,) = report.power
    assert f"with {report.data['groups'][0]['tokens']:,} tokens a group" in power
    assert power in text
    assert str(report.plan_sha256) in text
    assert not list(directory.parent.glob(".*"))


def test_the_same_settings_give_the_same_numbers(
    place: Path, report: Result, tmp_path: Path
) -> None:
    again = run(settings_of(place, tmp_path / "out", batch_size=5))
    assert again.data["tables"] == report.data["tables"]
    other = run(settings_of(place, tmp_path / "other", seed=1))
    assert other.data["tables"] != report.data["tables"]


def test_a_stopped_profile_goes_on_with_the_next_group(
    place: Path, report: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = profile_run.count_choices, []

    def stopping(*args: Any, **kwargs: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(profile_run, "count_choices", stopping)
    settings = settings_of(place, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run(settings)
    assert not (tmp_path / "out").exists()
    # With another plan it does not go on.
    with pytest.raises(InputError, match="other settings; it differs in\n  permutations"):
        run(settings.model_copy(update={"permutations": 50}))
    finished = run(settings)
    assert len(calls) == 5  # two kept, one stopped, two after it
    assert finished.data["tables"] == report.data["tables"]


def test_the_group_that_limits_all_others_is_named(place: Path, tmp_path: Path) -> None:
    rows = [question(n, "law") for n in range(20)] + [question(n, "math") for n in range(20, 23)]
    file = write_rows(tmp_path / "mmlu.jsonl", rows)
    found = run(settings_of(place, tmp_path / "out", data=str(file), questions=20))
    (said,) = [note for note in found.notes if "were not needed" in note]
    assert said.endswith("tokens, all that math has.")


def test_more_groups_than_can_be_compared_are_told_before_any_is_counted(
    place: Path, tmp_path: Path
) -> None:
    rows = [question(n, f"subject {n // 2}") for n in range(2 * (MOST_GROUPS + 1))]
    file = write_rows(tmp_path / "mmlu.jsonl", rows)
    with pytest.raises(InputError, match=r"201 groups by the key 'category', allowed: 200"):
        run(settings_of(place, tmp_path / "out", data=str(file)))
    named = ("subject 3", "subject 4")
    found = run(settings_of(place, tmp_path / "out", data=str(file), groups=named))
    assert [group["name"] for group in found.data["groups"]] == list(named)


def test_plots_of_many_groups_show_the_first() -> None:
    names = tuple(f"group {n}" for n in range(MOST_SHOWN + 3))
    rng = np.random.default_rng(0)
    choices = Choices(
        rng.integers(0, 5, (2 * len(names), 2, 4)), np.arange(2 * len(names)) // 2,
        np.full(2 * len(names), 8), names, (0, 1),
    )  # fmt: skip
    tables = analyse(choices, ProfileSettings(top_layers=1, top_experts=2, permutations=20))
    groups = [{"name": name, "prompts": 2, "tokens": 16} for name in names]
    about = [{"attention": "full", "expert_bits": bits} for bits in ("3", None)]
    found = blocks(tables, groups, about, choices.counts)
    maps = [block for block in found if isinstance(block, Plot) and block.kind == "heat map"]
    assert {len(plot.series) for plot in maps} == {MOST_SHOWN}
    rows = {block.id: block for block in found if isinstance(block, Table)}
    assert len(rows["groups"].rows) == len(names)
    assert [row[2] for row in rows["layer-table"].rows] == ["3", "float"]


def test_weights_in_place_of_counts(place: Path, tmp_path: Path) -> None:
    found = run(settings_of(place, tmp_path / "out", measure="weights"))
    assert found.data["tables"]["top_layers"]["by_kl"]["marked"] == [PLANTED_LAYER]
    assert found.verdict.startswith("Yes:")


def test_plots_are_written_where_matplotlib_is(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said: list[str] = []
    counted: list[tuple[float, float]] = []

    def progress(done: float, total: float, what: str) -> None:
        said.append(what)
        counted.extend([(done, total)] if done else [])

    settings = settings_of(place, tmp_path / "out", plots=True, plot_format="svg")
    found = run(settings, progress=progress)
    assert counted == sorted(counted), "one count, from nothing to all"
    assert len({total for _, total in counted}) == 1
    assert counted[-1][0] == pytest.approx(counted[-1][1])
    names = [block.id for block in found.blocks if isinstance(block, Plot)]
    assert names[:3] == ["divergence", "layers", "jaccard"]
    assert said[-1] == "plots"
    assert all((tmp_path / "out" / f"{name}.svg").stat().st_size > 1000 for name in names)
    assert f"]({names[0]}.svg)" in (tmp_path / "out" / "result.md").read_text()


def test_a_dry_run_plans_and_touches_nothing(place: Path, tmp_path: Path) -> None:
    planned = run(settings_of(place, tmp_path / "out"), dry_run=True)
    assert planned.status == "planned"
    assert planned.plan is not None
    assert planned.plan["layers"] == list(range(LAYERS))
    assert list(tmp_path.iterdir()) == []
    absent = run(settings_of(place, tmp_path / "out", model="owner/not-here"), dry_run=True)
    assert absent.plan is None
    assert "not a directory here" in absent.notes[0]


# --- prompts --------------------------------------------------------------------------------------


def question(number: int, category: str, **changes: Any) -> dict[str, Any]:
    row = {"question_id": number, "question": f"What is {number}?", "options": ["a", "b"],
           "category": category}  # fmt: skip
    return row | changes


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_questions_with_a_category(place: Path, tmp_path: Path) -> None:
    rows = [question(n, "law" if n % 2 else "math") for n in range(20)]
    file = write_rows(tmp_path / "mmlu.jsonl", rows)
    found = run(settings_of(place, tmp_path / "out", data=str(file), questions=7))
    assert [g["name"] for g in found.data["groups"]] == ["law", "math"]
    assert [g["available"] for g in found.data["groups"]] == [10, 10]
    assert len({g["tokens"] for g in found.data["groups"]}) == 1
    assert any("by construction" in note for note in found.notes)


BAD: dict[str, tuple[list[dict[str, Any]], str]] = {
    "id twice": ([question(1, "law"), question(1, "law")], "line 2: id '1' of law is also at"),
    "no category": ([question(1, "law"), {"question": "?"}], "line 2: category is None"),
    "one group": ([question(1, "law"), question(2, "law")], "compares two groups or more"),
    "one row": ([question(1, "law"), question(2, "law"), question(3, "math")], "only one row of"),
    "empty question": (
        [question(1, "law", question=" "), *(question(n, "law") for n in (2, 3)),
         question(4, "math"), question(5, "math")],
        "line 1: question is ' '",
    ),
    "options": (
        [question(n, "law", options="ab") for n in (1, 2)]
        + [question(n, "math") for n in (3, 4)],
        "it must be a list of 2 to 26 texts",
    ),
    "nothing to ask": (
        [{"category": c, "id": n, "messages": [{"role": "assistant", "content": "x"}]}
         for n, c in enumerate(("law", "law", "math", "math"))],
        "no message but the assistant's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_told(place: Path, tmp_path: Path, case: str) -> None:
    rows, message = BAD[case]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError, match=message.replace("(", r"\(")):
        run(settings_of(place, tmp_path / "out", data=str(file)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_experts": EXPERTS}, "a layer has 8 experts: ask for at most 7"),
        ({"top_layers": LAYERS}, "4 layers have experts: ask for at most 3"),
        ({"tokens": 10**6}, "ask for fewer tokens or more questions"),
        ({"tokens": 5}, "one prompt alone has the 5 tokens"),
        ({"groups": ("marked", "planed")}, "no group planed"),
        ({"data": "nowhere.jsonl"}, "no such file"),
    ],
)
def test_settings_that_do_not_fit_are_told(
    place: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(settings_of(place, tmp_path / "out", **changes))


def test_a_dense_model_is_told(place: Path, tmp_path: Path) -> None:
    dense = write_llama(tmp_path / "dense")
    with pytest.raises(InputError, match="no mixture of experts"):
        run(settings_of(place, tmp_path / "out", model=str(dense)))


def test_settings_that_cannot_decide_are_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no p below 0\.0476; alpha 0\.01 needs more than 99"):
        settings_of(place, tmp_path / "out", permutations=20, alpha=0.01)
    with pytest.raises(ValueError, match="name two or more"):
        settings_of(place, tmp_path / "out", groups=("law",))


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_tables_or_one_document(
    place: Path, work_dir: Path, command: Run
) -> None:
    given = ["--model", str(place / "model"), "--data", str(place / "data"), "--no-plots"]
    given += ["--permutations", "20", "--top-layers", "1"]
    code, out, _ = command("profile", *given, "--save-path", "a")
    assert code == 0
    assert "Verdict: Yes: the 4 groups" in out
    assert "smallest divergence beyond chance" in out
    assert "how far a group's shares of the experts are from the mean" in " ".join(out.split())
    code, out, _ = command("profile", *given, "--save-path", "c", "--dry-run")
    assert (code, "Planned only" in out, (work_dir / "c").exists()) == (0, True, False)
    assert "smallest divergence beyond chance" in out


def test_the_bare_command_profiles_nanos_domains(work_dir: Path, command: Run) -> None:
    code, out, err = command("profile", "--json", "--no-plots", "--permutations", "20")
    assert code == 0, err
    document = json.loads(out)
    assert [g["name"] for g in document["data"]["groups"]] == [
        "chat", "code", "math", "medical", "reasoning",
    ]  # fmt: skip
    assert [row["layer"] for row in document["data"]["layers"]] == list(range(6))
    kinds = [row["attention"] for row in document["data"]["layers"]]
    assert kinds == ["linear", "linear", "full"] * 2
    assert {row["expert_bits"] for row in document["data"]["layers"]} == {"3"}
    assert document["verdict"].startswith("Yes:")


def test_a_group_whose_name_is_no_text_is_refused(place: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in (b"a.jsonl", b"\xff.jsonl"):
        rows = "".join(f'{{"text": "red {n} {len(name)}"}}\n' for n in range(3))
        Path(os.fsdecode(os.path.join(os.fsencode(data), name))).write_text(rows)
    with pytest.raises(InputError, match=r"'\\udcff' is no UTF-8; rename"):
        run(settings_of(place, tmp_path / "out", data=str(data)))


def test_a_model_that_changes_while_it_is_profiled_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(place / "model", tmp_path / "model"))
    config = model / "config.json"
    count = profile_run._Profile._count

    def count_and_change(*args: Any) -> None:
        count(*args)
        config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5.0}))

    monkeypatch.setattr(profile_run._Profile, "_count", count_and_change)
    with pytest.raises(CheckpointError, match="changed during the run"):
        run(settings_of(place, tmp_path / "out", model=str(model)))
    assert not (tmp_path / "out").exists()

"""`mlxstacks route evaluate`, `explain` and `check` on a tiny model with random stacks and router.

Run: pytest tests/studies/route/test_evaluate.py
"""

import json
import os
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import numpy as np
import pytest

from mlxstacks.data import DomainDataSettings, SourceSettings, encode_examples
from mlxstacks.data.examples import make_example
from mlxstacks.errors import InputError, StoreError
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.files.store import Store
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.stacked import set_mode
from mlxstacks.routing import candidate_losses
from mlxstacks.routing.outcomes import RouterExample, write_lines
from mlxstacks.routing.router import load_prompt_router
from mlxstacks.routing.router_training import group_key, split_places
from mlxstacks.routing.settings import OutcomeSettings
from mlxstacks.studies.route import check as route_check
from mlxstacks.studies.route import evaluate as route_evaluate
from mlxstacks.studies.route import explain as route_explain
from mlxstacks.studies.route.data import read_examples, split_of
from mlxstacks.studies.route.served import open_served, weighted
from mlxstacks.studies.route.settings import (
    RouteCheckSettings,
    RouteEvaluateSettings,
    RouteExplainSettings,
)
from mlxstacks.study.document import Text
from mlxstacks.study.result import Result
from mlxstacks.training.modes import evaluating
from tests.files.router_cases import set_router
from tests.studies.route_evaluate_cases import Places, write_places, write_routers
from tests.studies.stack_analysis_cases import write_store
from tests.studies.train_cases import write_rows, write_tiny_model


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("routed"))


def evaluate(places: Places, out: Path, **changes: Any) -> Result:
    values = {
        "store_path": str(places.store), "model": str(places.model), "data": str(places.data),
        "unseen": [str(places.unseen)], "save_path": str(out), "rows_per_group": 3, "gap_rows": 2,
        "sample_prompts": 1, "sample_tokens": 2, "draws": 100,
    }  # fmt: skip
    settings = RouteEvaluateSettings.model_validate(values | changes)
    return route_evaluate.run(settings)


@pytest.fixture(scope="module")
def evaluation(places: Places, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """A whole one, and where it lies."""
    target = tmp_path_factory.mktemp("evaluation") / "out"
    return evaluate(places, target), target


def rows_in(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (target / "rows.jsonl").read_text().splitlines()]


def explain(places: Places, **changes: Any) -> Result:
    values = {"store_path": str(places.store), "model": str(places.model), **changes}
    return route_explain.run(RouteExplainSettings.model_validate(values))


def loss_alone(places: Places, prompt: str, answer: str, weights: dict[str, float]) -> float:
    """The one evaluator, on one row in the chat template."""
    served = open_served(Store.open(places.store), str(places.model), "auto")
    about = DomainDataSettings(sources=(SourceSettings(path="x"),))
    example = make_example({"prompt": prompt, "answer": answer}, "x")
    rows = encode_examples([example], served.tokenizer, about, 256).rows
    set_mode(served.model, weighted(weights), served.dtype)
    with evaluating(served.model):
        return evaluate_mean_loss(served.model, rows)


def test_a_whole_evaluation(
    places: Places, evaluation: tuple[Result, Path], tmp_path: Path
) -> None:
    result, target = evaluation
    assert Result.open(target).as_json() | {"notes": 0} == result.as_json() | {"notes": 0}
    found, rows = result.data, rows_in(target)
    groups = ["alpha", "beta", "mixed prompts", "other prompts", "unseen gamma"]
    assert list(dict.fromkeys(row["group"] for row in rows)) == groups
    # others have no answers here: routed, not measured
    assert found["rows"] == {g: 3 for g in groups if g != "other prompts"}
    modes = ["base", "ungated", "routed", "routed_hard", "oracle_domain", "random_stack", "prefix"]
    assert list(found["matrix"]) == modes
    for group in found["rows"]:
        of_group = [row for row in rows if row["group"] == group]
        tokens = np.array([row["answer_tokens"] for row in of_group])
        for mode in modes:
            sums = np.array([row["losses"][mode] for row in of_group]) * tokens
            wanted = sums.sum() / tokens.sum()
            assert found["matrix"][mode][group]["value"] == pytest.approx(wanted)
    assert found["gaps"]["scores"]["detection"]["n"] == 3
    assert found["gaps"]["loss"]["detection"]["n"] == 2
    assert found["panels"]["after one domain"]["losses"]["beta"] == pytest.approx(
        found["matrix"]["prefix"]["beta"]["value"]
    )
    assert len(found["samples"]) == 5
    assert "oracle domain" in (target / "result.md").read_text()
    with pytest.raises(InputError, match="exists"):
        evaluate(places, target)
    check_tables(result)
    changed = copytree(target, tmp_path / "changed")
    with (changed / "rows.jsonl").open("a") as file:
        file.write(json.dumps(rows[0]))
    assert any("rows.jsonl" in why for why in Result.open(changed).standing.reasons)


def check_tables(result: Result) -> None:
    """What people are shown of an evaluation is of its figures."""
    assert [block.id for block in result.blocks if not isinstance(block, Text)] == [
        "losses", "modes", "differences", "to-base", "to-ungated", "to-random-stack", "gaps",
        "routers", "panels", "every-difference", "samples",
    ]  # fmt: skip
    losses = result.table("losses").set_index("prompts")
    assert [*losses.columns] == [
        "rows", "base", "ungated", "routed", "routed_hard", "oracle_domain", "random_stack",
        "first_domain_only",
    ]  # fmt: skip
    assert losses["routed"]["alpha"] == result.data["matrix"]["routed"]["alpha"]["value"]
    difference = result.data["differences"]["base"]["ungated"]["all domains"]
    row = result.table("to-base").set_index("prompts").loc["all domains"]
    assert (row["ungated_low"], row["ungated_high"]) == (difference["low"], difference["high"])
    gaps = result.table("gaps")
    seen = result.data["gaps"]["scores"]["detection"]
    assert [*gaps.loc[0]][:4] == ["scores", "unseen domains seen", seen["count"], seen["n"]]
    assert len(result.table("every-difference")) == 3 * 6 * 5
    assert [*result.table("samples")["group"]] == [s["group"] for s in result.data["samples"]]


def test_a_stopped_evaluation_resumes_with_the_same_rows(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, batches, last = candidate_losses.CandidateLosses._measure, list[int](), 99

    def measured(self: Any, batch: Any) -> Any:
        if len(batches) == last:
            raise KeyboardInterrupt
        batches.append(len(batch))
        return measure(self, batch)

    monkeypatch.setattr(candidate_losses.CandidateLosses, "_measure", measured)
    small = {"sample_prompts": 0, "gap_rows": 0, "rows_per_group": 1, "random_control": False}
    whole = evaluate(places, tmp_path / "whole", **small)
    every = batches.copy()
    batches.clear()
    last = 3
    with pytest.raises(KeyboardInterrupt):
        evaluate(places, tmp_path / "out", **small)
    assert not (tmp_path / "out").exists()
    last = 99
    result = evaluate(places, tmp_path / "out", **small)
    assert batches == every
    written = [(tmp_path / name / "rows.jsonl").read_bytes() for name in ("out", "whole")]
    assert written[0] == written[1]
    assert result.data == whole.data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_rows_losses_are_those_of_the_one_evaluator(
    places: Places, evaluation: tuple[Result, Path]
) -> None:
    """Every mode's loss of a row, in batches with other rows, is that of the row alone."""
    row = next(row for row in rows_in(evaluation[1]) if row["group"] == "alpha")
    examples = read_examples(OutcomeSettings(data=str(places.data)), Store.open(places.store))
    (example,) = [one for one in examples if one.row_id == row["row_id"]]
    assert example.answer is not None
    for mode, weights in {
        "base": {}, "ungated": {"alpha": 1.0, "beta": 1.0}, "routed": row["weights"],
        "oracle_domain": {"alpha": 1.0},
    }.items():  # fmt: skip
        alone = loss_alone(places, example.prompt, example.answer, weights)
        assert row["losses"][mode] == pytest.approx(alone, abs=1e-4), mode


def test_several_routers_are_compared(places: Places, tmp_path: Path) -> None:
    routers = write_routers(places, tmp_path / "routers", [1, 2])
    result = evaluate(places, tmp_path / "out", routers=[str(path) for path in routers], gap_rows=0,
                     sample_prompts=0, random_control=False, similarity=True,
                     arrow=True)  # fmt: skip
    found = result.data
    *trained, similar, arrow = found["routers"]
    assert [router["name"] for router in trained] == [str(path) for path in routers]
    assert similar["name"] == route_evaluate.SIMILARITY
    assert (arrow["name"], arrow["threshold"]) == (route_evaluate.ARROW, 0.5)
    for router in (trained[1], similar, arrow):
        for mode in ("routed", "routed_hard"):
            differences, base = router["to_first"]["losses"][mode], trained[0]["losses"][mode]
            assert differences.keys() == base.keys()
            for group, difference in differences.items():
                wanted = router["losses"][mode][group] - base[group]
                assert difference["value"] == pytest.approx(wanted, abs=1e-9)
                assert difference["low"] <= difference["value"] <= difference["high"]
        exact, base_exact = (r["exact_set"]["count"] for r in (router, trained[0]))
        assert router["to_first"]["set"]["n"] == router["exact_set"]["n"] == 12
        # all rows are common, so the rates are those of each router's own rows
        both = [each["metrics"]["single_top1"] for each in (trained[0], router)]
        assert router["to_first"]["single_top1"] == both
        assert router["to_first"]["set"]["value"] == pytest.approx((exact - base_exact) / 12)
    assert len(result.table("routers-compared")) == 3
    found["routers"] = trained
    means = [r["differences"]["base"]["routed"]["all domains"]["value"] for r in found["routers"]]
    assert means[0] != means[1]
    assert found["over_routers"]["routed_to_base"]["mean"] == pytest.approx(np.mean(means))
    assert len(result.table("over-routers")) == len(found["over_routers"])
    assert any("is not known here" in note for note in result.notes)
    assert found["gaps"]["loss"] is None


def test_similarity_needs_prompts_that_are_not_measured_on(places: Places, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="similarity needs prompts of alpha, beta that are not"):
        evaluate(places, tmp_path / "out", rows_per_group=12, similarity=True)


def test_rows_that_the_router_was_trained_on_are_left_out(places: Places, tmp_path: Path) -> None:
    """A split made again from the data is believed where its hash is that of the router's file."""
    own = write_places(tmp_path / "own")
    store = Store.open(own.store)
    examples = read_examples(OutcomeSettings(data=str(own.data)), store)
    _, held_out = split_places(
        [one.prompt for one in examples], 3, 0.1, 9, [one.kind for one in examples]
    )
    ids = sorted(examples[place].row_id for place in held_out)
    training = {
        "split": {"seed": 3, "validation_sha256": json_sha256(ids)},
        "settings": {"validation_share": 0.1, "validation_groups": 9, "extend": "new"},
    }
    set_router(store, input_dims=64, training=training)
    served = open_served(store, str(own.model), "auto")
    router = load_prompt_router(store, served.model, served.tokenizer)
    found = split_of(router, None, examples, None)
    assert found is not None
    assert found.validation == {group_key(e.prompt) for e in examples if e.row_id in ids}
    assert found.training == {group_key(e.prompt) for e in examples} - found.validation
    assert split_of(router, None, examples[1:], None) is None
    report = evaluate(own, tmp_path / "out", rows_per_group=99, sample_prompts=0, gap_rows=0,
                      unseen=[], random_control=False)  # fmt: skip
    assert sorted(row["row_id"] for row in rows_in(tmp_path / "out")) == ids
    assert any(f"{len(ids)} of {len(ids)} rows" in n and "epoch" in n for n in report.notes)
    assert any("was extended" in note for note in report.notes)


def write_targets(directory: Path, examples: list[RouterExample]) -> Path:
    directory.mkdir()
    write_lines(directory / "examples.jsonl", examples)
    write_lines(directory / "outcomes.jsonl", [])
    return directory


def test_the_targets_of_a_router_say_what_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other data than the router's: another answer to a known prompt, an unseen set that the
    router saw. Neither counts, whether the targets are given or named beside the router.
    """
    own = write_places(tmp_path / "own")
    store = Store.open(own.store)
    there = [
        RouterExample(f"{d} {i}: red", "blue", (d,), "single", f"{d}{i}")
        for d in ("alpha", "beta")
        for i in range(20)
    ]
    seen = [json.loads(line)["prompt"] for line in own.unseen.read_text().splitlines()]
    there += [RouterExample(text, None, (), "other", text) for text in seen[:2]]
    training, held_out = split_places(
        [one.prompt for one in there], 3, 0.1, 9, [one.kind for one in there]
    )
    ids = sorted(there[place].row_id for place in held_out)
    about = {"split": {"seed": 3, "validation_sha256": json_sha256(ids)},
             "settings": {"validation_share": 0.1, "validation_groups": 9}}  # fmt: skip
    set_router(store, input_dims=64, training=about)
    (path,) = write_routers(own, tmp_path / "router", [1], training=about)
    targets = write_targets(tmp_path / "targets", there)
    said = {"settings": {"targets": str(targets)}}
    (path.parent / "result.json").write_text(json.dumps(said))
    known = next(there[place].prompt for place in training if there[place].kind == "single")
    data = tmp_path / "data"
    write_rows(data / "alpha.jsonl", [{"prompt": known.upper(), "completion": "another"},
                                      {"prompt": "fresh", "completion": "red"}])  # fmt: skip
    measured = {"data": str(data), "sample_prompts": 0, "gap_rows": 0, "rows_per_group": 9,
                "unseen": [str(own.unseen)], "random_control": False}  # fmt: skip
    trained = {there[place].prompt for place in training}
    wanted = ["fresh", *(text for text in seen if text not in trained)]
    examples = read_examples(OutcomeSettings(data=str(data)), store)
    usual = tmp_path / "work" / "mlxstacks-out"
    usual.mkdir(parents=True)
    copytree(targets, usual / "route-discover")
    ways: dict[str, dict[str, object]] = {
        "given": {"targets": str(targets)}, "beside": {"routers": [str(path)]}, "usual": {}
    }  # fmt: skip
    for name, changes in ways.items():
        monkeypatch.chdir(usual.parent if name == "usual" else tmp_path)
        evaluate(own, tmp_path / name, **measured, **changes)
        groups = [row["group"] for row in rows_in(tmp_path / name)]
        assert (len(groups), groups.count("alpha")) == (len(wanted), 1), name
    monkeypatch.chdir(tmp_path)
    served = open_served(store, str(own.model), "auto")
    router = load_prompt_router(store, served.model, served.tokenizer, path)
    # a report that names the targets of another router is not believed
    said["settings"]["targets"] = str(write_targets(tmp_path / "others", there[1:]))
    (path.parent / "result.json").write_text(json.dumps(said))
    assert split_of(router, str(path), examples, None) is None
    # a training of before version 0.2
    (path.parent / "result.json").write_text("{")
    former = {"settings": {"targets": str(targets)}}
    (path.parent / "train_report.json").write_text(json.dumps(former))
    assert split_of(router, str(path), examples, None) is not None
    (path.parent / "train_report.json").unlink()
    os.mkfifo(path.parent / "train_report.json")
    assert split_of(router, str(path), examples, None) is None
    with pytest.raises(InputError, match="route discover"):
        split_of(router, str(path), examples, str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    "training",
    [
        {"split": {"seed": "x", "validation_sha256": "a"}},
        {"split": {"seed": None, "validation_sha256": "a"}},
        {"split": {"seed": -1, "validation_sha256": "a"}},
        {"split": {"seed": 3, "validation_sha256": 4}},
        {"split": {"seed": 3, "validation_sha256": "a"}, "settings": {"validation_share": "y"}},
        {"split": {"seed": 3, "validation_sha256": "a"}, "settings": ["validation_share"]},
    ],
)
def test_a_header_that_says_nonsense_of_its_split_says_nothing(
    places: Places, tmp_path: Path, training: dict[str, Any]
) -> None:
    (path,) = write_routers(places, tmp_path / "router", [1], training=training)
    served = open_served(Store.open(places.store), str(places.model), "auto")
    router = load_prompt_router(served.store, served.model, served.tokenizer, path)
    examples = read_examples(OutcomeSettings(data=str(places.data)), served.store)
    assert split_of(router, str(path), examples, None) is None


def test_rows_of_no_single_domain_are_refused(places: Places, tmp_path: Path) -> None:
    data = tmp_path / "mixed"
    data.mkdir()
    copy(places.data / "alpha+beta.jsonl", data)
    with pytest.raises(InputError, match=r"single domain .*mixed prompts.*alpha, beta"):
        evaluate(places, tmp_path / "out", data=str(data))
    assert not (tmp_path / "out").exists()


def test_a_domain_without_rows_is_named(places: Places, tmp_path: Path) -> None:
    data = tmp_path / "one"
    data.mkdir()
    copy(places.data / "beta.jsonl", data)
    result = evaluate(places, tmp_path / "out", data=str(data), sample_prompts=0, gap_rows=0)
    assert any("no held-out row of alpha" in note for note in result.notes)
    found = result.data
    right = found["differences"]["random_stack"]["oracle_domain"]["all domains"]["value"]
    values = {m: found["matrix"][m]["beta"]["value"] for m in ("oracle_domain", "random_stack")}
    assert right == pytest.approx(values["oracle_domain"] - values["random_stack"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store_path": None}, "needs store_path"),
        ({"data": "nowhere"}, "data of its domains is not here"),
        ({"routers": ["nowhere"]}, "no router there"),
    ],
)
def test_bad_input_of_evaluate(
    places: Places, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        evaluate(places, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_dry_run_of_evaluate_loads_no_model(places: Places, tmp_path: Path) -> None:
    settings = RouteEvaluateSettings(
        store_path=str(places.store), model="nowhere", save_path=str(tmp_path / "out")
    )
    report = route_evaluate.run(settings, dry_run=True)
    assert (report.status, (tmp_path / "out").exists()) == ("planned", False)
    json.dumps(report.as_json())


# --- explain --------------------------------------------------------------------------------------


def test_explain_tells_scores_and_losses(places: Places) -> None:
    prompt, answer = "alpha 3: red blue", "blue red"
    result = explain(places, prompt=prompt, answer=answer)
    found = result.data
    assert [*result.table("losses")["loss"]] == [one["loss"] for one in found["losses"]]
    assert [*result.table("scores")["domain"]] == ["alpha", "beta"]
    names = [one["name"] for one in found["losses"]]
    assert names == ["base", "alpha", "beta", "routed", "all", "oracle"]
    for one in found["losses"]:
        alone = loss_alone(places, prompt, answer, one["weights"])
        assert one["loss"] == pytest.approx(alone, abs=1e-4), one["name"]
    by_name = {one["name"]: one["loss"] for one in found["losses"]}
    assert by_name["oracle"] <= min(by_name["base"], by_name["alpha"], by_name["beta"])
    assert found["loss_gap"] == (by_name["base"] - by_name["oracle"] < 0.01)
    assert set(found["active"]) == {n for n, s in found["scores"].items() if s > 0.12}
    assert result.outcome == " + ".join(found["active"])
    without = explain(places, prompt=prompt).data
    assert without["losses"] is None
    assert without["scores"] == found["scores"]


def test_explain_shows_the_floor_of_the_chat_domain(tmp_path: Path) -> None:
    own = write_places(tmp_path, chat_domain="beta", chat_floor=0.2, threshold=0.12)
    found = explain(own, prompt="red", answer="blue").data
    assert found["active"]["beta"] == max(0.2, found["scores"]["beta"])
    by_name = {one["name"]: one["weights"] for one in found["losses"]}
    assert by_name["alpha"] == {"alpha": 1.0, "beta": 0.2}


def test_a_domain_may_be_called_as_a_set_of_explain_is(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    store = write_store(tmp_path / "store", model, tmp_path / "trained", {"base": 1, "oracle": 1})
    set_router(store, input_dims=64)
    own = Places(model, tmp_path / "store", tmp_path, tmp_path)
    result = explain(own, prompt="red", answer="blue")
    found = result.data
    names = [one["name"] for one in found["losses"]]
    assert names == ["base", "base", "oracle", "routed", "all", "oracle"]
    assert [one["weights"] for one in found["losses"][:3]] == [{}, {"base": 1.0}, {"oracle": 1.0}]
    base = loss_alone(own, "red", "blue", {})
    assert found["losses"][0]["loss"] == pytest.approx(base, abs=1e-4)
    assert f"{found['losses'][3]['difference_to_base']:+.3f} nats" in result.verdict


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": " "}, "needs a prompt"),
        ({}, "needs a prompt"),
        ({"prompt": "red", "answer": " "}, "nothing is left of the answer"),
        ({"prompt": "red " * 200, "answer": "blue", "max_tokens": 64}, "nothing is left"),
    ],
)
def test_bad_input_of_explain(places: Places, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        explain(places, **changes)


def test_a_base_that_is_not_the_stores_is_refused(places: Places, tmp_path: Path) -> None:
    from tests.tiny_models import write_qwen_moe

    other = write_qwen_moe(tmp_path / "other", bits=3, hidden_size=64, shards=1)
    with pytest.raises(StoreError, match="use that base"):
        explain(places, model=str(other), prompt="red")


# --- check ----------------------------------------------------------------------------------------


def test_check_answers_in_every_mode_and_judges(places: Places, tmp_path: Path) -> None:
    prompts = [
        {"name": "answered", "prompt": "red blue", "expect": ["no such words"]},
        {"name": "routed", "prompt": "green", "domains": ["alpha", "beta"]},
    ]
    settings = RouteCheckSettings.model_validate({
        "store_path": str(places.store), "model": str(places.model), "prompts": prompts,
        "save_path": str(tmp_path / "out"), "max_tokens": 3,
    })  # fmt: skip
    result = route_check.run(settings)
    found = Result.open(tmp_path / "out").data
    assert found == result.data
    assert [b.id for b in result.blocks if not isinstance(b, Text)] == [
        "prompts", "failures", "rate-table", "rates", "texts"
    ]  # fmt: skip
    assert [*result.table("prompts")["routed"].dropna()] == ["fails"]
    assert [*result.table("rate-table")["of"]] == [1, 1, 1, 1, 2, 2]
    answered, routed = found["prompts"]
    assert list(answered["answers"]) == ["base", "ungated", "routed"]
    assert not any(one["passed"] for one in answered["answers"].values())
    assert routed["answers"] == {}
    lacking = [name for name in ("alpha", "beta") if name not in routed["weights"]]
    assert routed["missing_domains"] == lacking
    assert found["summary"]["answers"]["routed"]["n"] == 1
    assert found["summary"]["more_than_one_active"]["n"] == 2
    assert "0 of 1 answers hold in mode base" in result.verdict


def test_check_refuses_domains_that_the_store_does_not_have(places: Places, tmp_path: Path) -> None:
    prompts = [{"name": "n", "prompt": "p", "domains": ["gamma"]}]
    settings = RouteCheckSettings.model_validate({
        "store_path": str(places.store), "prompts": prompts, "save_path": str(tmp_path / "out")
    })  # fmt: skip
    with pytest.raises(InputError, match="n: gamma"):
        route_check.run(settings)
    with pytest.raises(InputError, match="needs prompts"):
        route_check.run(settings.model_copy(update={"prompts": ()}))

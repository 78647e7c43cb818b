"""`mlxstacks route evaluate`, `explain` and `check` on a tiny model with random stacks and router.

Run: pytest tests/experiments/test_route_evaluate.py
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxstacks.data import DomainDataSettings, SourceSettings, encode_examples
from mlxstacks.data.examples import make_example
from mlxstacks.errors import InputError, StoreError
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.experiments import route_check, route_evaluate, route_explain
from mlxstacks.experiments.route_check_settings import RouteCheckSettings
from mlxstacks.experiments.route_data import read_examples
from mlxstacks.experiments.route_evaluate_served import open_served, weighted
from mlxstacks.experiments.route_evaluate_settings import RouteEvaluateSettings
from mlxstacks.experiments.route_evaluate_split import trained_ids
from mlxstacks.experiments.route_explain_settings import RouteExplainSettings
from mlxstacks.files.store import Store
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.stacked import set_mode
from mlxstacks.routing.outcome_settings import OutcomeSettings
from mlxstacks.routing.router import load_prompt_router
from mlxstacks.routing.router_examples import split_places
from mlxstacks.training.modes import evaluating
from tests.experiments.route_evaluate_cases import Places, write_places, write_routers
from tests.files.router_cases import set_router


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return write_places(tmp_path_factory.mktemp("routed"))


def evaluate(places: Places, out: Path, **changes: Any) -> dict[str, Any]:
    values = {
        "store_path": str(places.store), "model": str(places.model), "data": str(places.data),
        "unseen": [str(places.unseen)], "save_path": str(out), "rows_per_group": 3, "gap_rows": 2,
        "sample_prompts": 1, "sample_tokens": 2, "draws": 100,
    }  # fmt: skip
    settings = RouteEvaluateSettings.model_validate(values | changes)
    return route_evaluate.run(settings).as_json()


def explain(places: Places, **changes: Any) -> dict[str, Any]:
    values = {"store_path": str(places.store), "model": str(places.model), **changes}
    return route_explain.run(RouteExplainSettings.model_validate(values)).as_json()


def loss_alone(places: Places, prompt: str, answer: str, weights: dict[str, float]) -> float:
    """The one evaluator, on one row in the chat template."""
    served = open_served(Store.open(places.store), str(places.model), "auto")
    about = DomainDataSettings(sources=(SourceSettings(path="x"),))
    example = make_example({"prompt": prompt, "answer": answer}, "x")
    rows = encode_examples([example], served.tokenizer, about, 256).rows
    set_mode(served.model, weighted(weights), served.dtype)
    with evaluating(served.model):
        return evaluate_mean_loss(served.model, rows)


def test_a_whole_evaluation(places: Places, tmp_path: Path) -> None:
    found = evaluate(places, tmp_path / "out")
    assert found == json.loads((tmp_path / "out" / "route_evaluate_report.json").read_text())
    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
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
    page = (tmp_path / "out" / "route_evaluate.md").read_text()
    assert found["verdict"] in page
    assert "| random_stack |" in page
    with pytest.raises(InputError, match="exists"):
        evaluate(places, tmp_path / "out")


def test_a_rows_losses_are_those_of_the_one_evaluator(places: Places, tmp_path: Path) -> None:
    """Every mode's loss of a row, in batches with other rows, is that of the row alone."""
    evaluate(places, tmp_path / "out", rows_per_group=2, sample_prompts=0, gap_rows=0,
             random_control=False)  # fmt: skip
    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    row = next(r for r in map(json.loads, lines) if r["group"] == "alpha")
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
    found = evaluate(places, tmp_path / "out", routers=[str(path) for path in routers], gap_rows=0,
                     sample_prompts=0, random_control=False)  # fmt: skip
    assert [router["name"] for router in found["routers"]] == [str(path) for path in routers]
    means = [r["differences"]["base"]["routed"]["all domains"]["value"] for r in found["routers"]]
    assert means[0] != means[1]
    assert found["over_routers"]["routed_to_base"]["mean"] == pytest.approx(np.mean(means))
    assert any("is not known here" in note for note in found["notes"])
    assert found["gaps"]["loss"] is None


def test_rows_that_the_router_was_trained_on_are_left_out(places: Places, tmp_path: Path) -> None:
    """A split made again from the data is believed where its hash is that of the router's file."""
    own = write_places(tmp_path / "own")
    store = Store.open(own.store)
    examples = read_examples(OutcomeSettings(data=str(own.data)), store)
    _, held_out = split_places([one.prompt for one in examples], 3, 0.1, 9)
    ids = sorted(examples[place].row_id for place in held_out)
    training = {
        "split": {"seed": 3, "validation_sha256": json_sha256(ids)},
        "settings": {"validation_share": 0.1, "validation_groups": 9},
    }
    set_router(store, input_dims=64, training=training)
    served = open_served(store, str(own.model), "auto")
    router = load_prompt_router(store, served.model, served.tokenizer)
    assert trained_ids(router, None, examples) == {e.row_id for e in examples} - set(ids)
    assert trained_ids(router, None, examples[1:]) is None
    evaluate(own, tmp_path / "out", rows_per_group=99, sample_prompts=0, gap_rows=0, unseen=[],
             random_control=False)  # fmt: skip
    lines = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["row_id"] for line in lines) == ids


def test_what_route_train_says_beside_a_router_is_used(places: Places, tmp_path: Path) -> None:
    (path,) = write_routers(places, tmp_path / "router", [1])
    served = open_served(Store.open(places.store), str(places.model), "auto")
    router = load_prompt_router(served.store, served.model, served.tokenizer, path)
    line = {"prompt": "p", "answer": None, "label": ["alpha"], "kind": "single", "source": "",
            "trained_on": False}  # fmt: skip
    targets = tmp_path / "targets"
    targets.mkdir()
    (targets / "examples.jsonl").write_text(
        "".join(json.dumps({**line, "row_id": name}) + "\n" for name in ("x", "y"))
    )
    report = {"split": {"validation_row_ids": ["y"]}, "settings": {"targets": str(targets)}}
    (path.parent / "train_report.json").write_text(json.dumps(report))
    assert trained_ids(router, str(path), []) == {"x"}
    (path.parent / "train_report.json").write_text("{")
    assert trained_ids(router, str(path), []) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"store_path": None}, "needs store_path"),
        ({"data": "nowhere"}, "no prompts of the store's domains"),
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
    found = explain(places, prompt=prompt, answer=answer)
    names = [one["name"] for one in found["losses"]]
    assert names == ["base", "alpha", "beta", "routed", "all", "oracle"]
    for one in found["losses"]:
        alone = loss_alone(places, prompt, answer, one["weights"])
        assert one["loss"] == pytest.approx(alone, abs=1e-4), one["name"]
    by_name = {one["name"]: one["loss"] for one in found["losses"]}
    assert by_name["oracle"] <= min(by_name["base"], by_name["alpha"], by_name["beta"])
    assert found["loss_gap"] == (by_name["base"] - by_name["oracle"] < 0.01)
    assert set(found["active"]) == {n for n, s in found["scores"].items() if s > 0.12}
    without = explain(places, prompt=prompt)
    assert without["losses"] is None
    assert without["scores"] == found["scores"]


def test_explain_shows_the_floor_of_the_chat_domain(tmp_path: Path) -> None:
    own = write_places(tmp_path, chat_domain="beta", chat_floor=0.2, threshold=0.12)
    found = explain(own, prompt="red", answer="blue")
    assert found["active"]["beta"] == max(0.2, found["scores"]["beta"])
    by_name = {one["name"]: one["weights"] for one in found["losses"]}
    assert by_name["alpha"] == {"alpha": 1.0, "beta": 0.2}


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
    report = route_check.run(settings)
    found = json.loads((tmp_path / "out" / "route_check_report.json").read_text())
    assert found == report.as_json()
    answered, routed = found["prompts"]
    assert list(answered["answers"]) == ["base", "ungated", "routed"]
    assert not any(one["passed"] for one in answered["answers"].values())
    assert routed["answers"] == {}
    lacking = [name for name in ("alpha", "beta") if name not in routed["weights"]]
    assert routed["missing_domains"] == lacking
    assert found["summary"]["answers"]["routed"]["n"] == 1
    assert found["summary"]["more_than_one_active"]["n"] == 2
    assert "0 of 1 answers hold in mode base" in found["verdict"]


def test_check_refuses_domains_that_the_store_does_not_have(places: Places, tmp_path: Path) -> None:
    prompts = [{"name": "n", "prompt": "p", "domains": ["gamma"]}]
    settings = RouteCheckSettings.model_validate({
        "store_path": str(places.store), "prompts": prompts, "save_path": str(tmp_path / "out")
    })  # fmt: skip
    with pytest.raises(InputError, match="n: gamma"):
        route_check.run(settings)
    with pytest.raises(InputError, match="needs prompts"):
        route_check.run(settings.model_copy(update={"prompts": ()}))

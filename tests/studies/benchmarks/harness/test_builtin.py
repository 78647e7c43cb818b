"""lm_eval's own tasks over arms of the tiny model, with stubs of their data; what is refused.
Run: pytest tests/studies/benchmarks/harness/test_builtin.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.errors import InputError
from mlxstacks.studies.benchmarks import harness
from mlxstacks.studies.benchmarks.arms import ModelArm
from mlxstacks.studies.benchmarks.harness import (
    BuiltinTask,
    builtin_tasks,
    find_tasks,
    run_harness,
)
from mlxstacks.studies.benchmarks.items import harness_plan
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem, Replied
from tests.studies.train_cases import WORDS, write_rows

pytest.importorskip("lm_eval", reason="the extra eval is not installed")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SUMS = 2e-4
LETTERS = ["A", "B", "C"]
ARC = [
    {
        "question": f"{word}?", "answerKey": LETTERS[n % 3],
        "choices": {"text": [word[::-1], "no", word], "label": LETTERS},
    }
    for n, word in enumerate(WORDS)
]  # fmt: skip
GSM8K = [{"question": f"{n} and 1?", "answer": f"It is\n#### {n + 1}"} for n in range(7)]
ANATOMY = [
    {"question": f"{word}?", "choices": ["a", "b", "c", "d"], "answer": n % 4}
    for n, word in enumerate(WORDS)
]
ROWS = {"allenai/ai2_arc": ARC, "openai/gsm8k": GSM8K, "cais/mmlu": ANATOMY}


@pytest.fixture(autouse=True)
def asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """(data set, configuration) of each that was loaded; every split has the same rows."""
    asked: list[tuple[str, str | None]] = []

    def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
        assert not options
        asked.append((path, name))
        if path not in ROWS:
            raise ConnectionError(f"Couldn't reach '{path}' on the Hub")
        rows = datasets.Dataset.from_list(ROWS[path])
        return dict.fromkeys(("train", "validation", "test", "dev"), rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_a_task_of_candidates_is_asked_and_scored(
    arm: ModelArm, asked_of_the_hub: list[tuple[str, str | None]]
) -> None:
    found = run_harness([arm], ["arc_easy"], limit=4, seed=3)
    assert asked_of_the_hub == [("allenai/ai2_arc", "ARC-Easy")]
    about = found["tasks"]["arc_easy"]
    assert about["file"] == "lm_eval/tasks/arc/arc_easy.yaml"
    assert (about["items"], about["version"]) == (len(WORDS), 1.0)
    assert len(about["asked"]) == 4
    assert about["asked"] != list(range(4))  # drawn, not the first ones
    assert about["asked"] == harness._draw(len(WORDS), 4, "3/arc_easy")
    result = found["arms"]["base"]["tasks"]["arc_easy"]
    assert [sample["doc_id"] for sample in result["samples"]] == about["asked"]
    for sample in result["samples"]:
        row = ARC[sample["doc_id"]]
        choices: Any = row["choices"]
        gold = LETTERS.index(str(row["answerKey"]))
        prompt = f"Question: {row['question']}\nAnswer:"
        item = BenchItem("x", prompt, gold, tuple(f" {text}" for text in choices["text"]))
        own = arm.score([item])[0].sums
        assert own == pytest.approx(sample["scores"], abs=SUMS)
        assert sample["metrics"]["acc"] == float(own.index(max(own)) == gold)
    json.dumps(found)


def test_a_task_of_answers_is_asked_with_its_examples(
    arm: ModelArm, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[str] = []

    def reply(texts: Any, *rest: Any) -> Any:
        prompts.extend(texts)
        return [said(text) for text in texts]

    def said(text: str) -> Any:
        last = text.rsplit("Question: ", 1)[1]
        right = {str(row["question"]): str(row["answer"]) for row in GSM8K[:4]}
        return Replied(right.get(last.split("\n")[0], "no"), 3, "stop", False, {})

    monkeypatch.setattr(arm, "reply_to_texts", reply)
    found = run_harness([arm], ["gsm8k"], seed=1)
    assert all(prompt.count("Question: ") == 6 for prompt in prompts)  # its five examples
    result = found["arms"]["base"]["tasks"]["gsm8k"]
    strict = [s for s in result["samples"] if s["filter"] == "strict-match"]
    assert [s["metrics"]["exact_match"] for s in strict] == [1.0] * 4 + [0.0] * 3
    assert result["metrics"]["exact_match,strict-match"] == pytest.approx(4 / 7)
    monkeypatch.undo()


def test_a_real_answer_ends_where_the_task_says(
    arm: ModelArm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxstacks.studies.benchmarks.harness_model.DEFAULT_TOKENS", 6)
    found = run_harness([arm], ["gsm8k"], limit=1, num_fewshot=0)
    sample = found["arms"]["base"]["tasks"]["gsm8k"]["samples"][0]
    assert isinstance(sample["reply"], str)
    row = GSM8K[sample["doc_id"]]
    prompt = f"Question: {row['question']}\nAnswer:"
    marks = ("Question:", "</s>", "<|im_end|>")
    assert sample["reply"] == arm.reply_to_texts([prompt], 6, marks)[0].text


def test_a_group_is_each_of_its_tasks() -> None:
    found = find_tasks(["mmlu", "arc_easy_local"])
    assert len(found) == 58
    assert {one.asked_as for one in found[:57]} == {"mmlu"}
    assert found[57].file == "arc_easy_local.yaml"
    assert {one.name for one in find_tasks(["ai2_arc"])} == {"arc_easy", "arc_challenge"}  # a tag
    leaderboard = {one.name: one for one in find_tasks(["openllm"])}
    anatomy = leaderboard["mmlu_anatomy"]
    assert isinstance(anatomy, BuiltinTask)
    assert anatomy.overrides == {"num_fewshot": 5}
    assert anatomy.build().get_config("num_fewshot") == 5
    with pytest.raises(InputError, match="mmlu_anatomy is asked for twice: by mmlu and mmlu_ana"):
        find_tasks(["mmlu", "mmlu_anatomy"])
    assert "mgsm_direct_es_spanish_bench" in {one.name for one in find_tasks(["mgsm_direct"])}
    with pytest.raises(InputError, match=r"(?s)unsafe_code.*lm_eval/humaneval_single_line_infill"):
        find_tasks(["humaneval_infilling"])  # all that may not be run, in one message
    with pytest.raises(InputError, match="t0_eval: the group changes dataset_name"):
        find_tasks(["t0_eval"])


def test_a_domain_of_a_group_is_that_of_its_tasks(
    arm: ModelArm, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = []
    monkeypatch.setattr(harness, "_evaluate", lambda model, *_: labels.append(model.domains))
    domains = {"ai2_arc": "alpha", "arc_easy": "beta", "mmlu": "gamma"}
    run_harness([arm], ["ai2_arc", "gsm8k"], domains=domains)
    assert labels[0] == {"arc_challenge": "alpha", "arc_easy": "beta"}
    given = ("lm_eval/mmlu=alpha", "mmlu=beta", "mmlu_anatomy=gamma")
    settings = EvalSettings(model="m", tasks=("lm_eval/mmlu",), domains=given)
    assert settings.harness_labels == {"mmlu": "alpha", "mmlu_anatomy": "gamma"}


def test_ours_go_first_and_files_from_elsewhere_stay_refused(tmp_path: Path) -> None:
    (tmp_path / "arc.yaml").write_text(
        "task: arc_easy\ndataset_path: json\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "dataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    write_rows(tmp_path / "rows.jsonl", [{"q": "q", "a": "a"}])
    (own,) = find_tasks(["arc_easy"], tmp_path)
    assert own.file == "arc.yaml"
    (theirs,) = find_tasks(["arc_easy"])
    assert theirs.file == "lm_eval/tasks/arc/arc_easy.yaml"
    (tmp_path / "arc.yaml").write_text("task: arc_easy\nprocess_docs: !function utils.f\n")
    with pytest.raises(InputError, match="!function runs Python"):
        find_tasks(["arc_easy"], tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("humaneval", "unsafe_code: it runs code that a model wrote"),
        ("squadv2", "class: it is a Python class"),
        ("gsm8k_cot_self_consistency", r"(?s)repeats: .*the task draws its answers"),
        ("mmmu_val_art", "doc_to_image: only text is asked"),
        ("arc_eazy", "did you mean 'arc_easy'"),
        ("gsm8k_loca", "did you mean 'gsm8k_local'"),
    ],
)
def test_what_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_tasks([name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_kwargs": {"trust_remote_code": True}}, "trust_remote_code: its data set is a"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "metric acc: a program of"),
        ({"metric_list": [{"metric": "bleurt"}]}, "metric bleurt: a program of the hub"),
        ({"generation_kwargs": {"temperature": 0.7}}, "draws its answers"),
        ({"generation_kwargs": {"num_beams": 4}}, "num_beams: not known"),
        ({"output_type": "multiple_requests"}, "output_type multiple_requests: only"),
    ],
)
def test_what_is_refused_of_a_configuration(changes: dict[str, Any], message: str) -> None:
    (gsm8k,) = builtin_tasks("gsm8k")
    (problem,) = harness._problems({**gsm8k.config, **changes})
    assert message in problem
    one_beam = {**gsm8k.config, "generation_kwargs": {"num_beams": 1}}
    assert harness._problems(one_beam) == []


def test_data_that_is_not_there_is_named_with_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_of_the_hub: list[tuple[str, str | None]]
) -> None:
    (anatomy,) = builtin_tasks("hellaswag")
    monkeypatch.setattr(harness, "hub_snapshot", lambda dataset: None)
    with pytest.raises(
        InputError, match=r"data set Rowan/hellaswag could not be read: Connec"
    ) as e:
        anatomy.build()
    assert "`hf download --repo-type dataset Rowan/hellaswag`" in str(e.value)
    # What was fetched so is found, which `datasets` itself does not do.
    (arc,) = builtin_tasks("arc_easy")
    monkeypatch.setitem(ROWS, str(tmp_path), ROWS["allenai/ai2_arc"])
    monkeypatch.delitem(ROWS, "allenai/ai2_arc")
    monkeypatch.setattr(harness, "hub_snapshot", lambda dataset: tmp_path)
    assert len(arc.build().eval_docs) == len(WORDS)
    assert asked_of_the_hub[-2:] == [("allenai/ai2_arc", "ARC-Easy"), (str(tmp_path), "ARC-Easy")]


def test_plans_hold_the_rows_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("lm_eval/arc_easy", "lm_eval/gsm8k")
    settings = EvalSettings(model="m", tasks=names, items_per_task=3)
    first = harness_plan(settings)
    assert list(first) == ["arc_easy", "gsm8k"]
    assert first["gsm8k"]["limit"] == 3
    assert harness_plan(settings) == first
    monkeypatch.setitem(ROWS, "openai/gsm8k", [*GSM8K, {"question": "q", "answer": "#### 1"}])
    second = harness_plan(settings)
    assert second["arc_easy"] == first["arc_easy"]
    assert second["gsm8k"]["rows_sha256"] != first["gsm8k"]["rows_sha256"]
    assert second["gsm8k"]["config_sha256"] == first["gsm8k"]["config_sha256"]
    # Another place of the package is the same plan.
    (drop,) = builtin_tasks("drop")
    assert str(harness._root()) in str(drop.config)
    moved = json.loads(json.dumps(drop.config).replace(str(harness._root()), "/other"))
    task = builtin_tasks("arc_easy")[0].build()
    monkeypatch.setattr(BuiltinTask, "build", lambda self: task)
    here = drop.fingerprint()["config_sha256"]
    monkeypatch.setattr(harness, "_root", lambda: Path("/other"))
    there = BuiltinTask("drop", drop.path, moved).fingerprint()
    assert there["config_sha256"] == here

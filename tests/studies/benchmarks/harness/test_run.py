"""lm-evaluation-harness over arms of the tiny model: the same numbers as our own scoring.
Run: pytest tests/studies/benchmarks/harness/test_run.py
"""

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks.errors import InputError
from mlxstacks.evaluate import ChoiceItem, choose
from mlxstacks.studies.benchmarks.arms import ModelArm, PromptEncoder
from mlxstacks.studies.benchmarks.harness import run_harness
from mlxstacks.studies.benchmarks.harness_model import ArmModel
from mlxstacks.studies.benchmarks.items import open_task
from mlxstacks.studies.benchmarks.settings import ArmSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem, task_named
from tests.data.chat_tokenizers import Counting, chat_tokenizer
from tests.studies.benchmarks.arm_cases import arms_of
from tests.studies.route_evaluate_cases import Places
from tests.studies.train_cases import WORDS, write_rows
from tests.tiny_models import END_OF_TEXT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
REAL = Path(__file__).parents[5] / "shared" / "data"
SUMS = 2e-4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of ARC's form, and of GSM8K's."""
    directory = tmp_path_factory.mktemp("data")
    rows = [
        {"query": f"Question: {a} {b}?", "choices": [b, a, f"{b} {a}"], "gold": n % 3}
        for n, (a, b) in enumerate(pairwise(WORDS))
    ]
    write_rows(directory / "bench_arc_easy.jsonl", rows)
    write_rows(
        directory / "gsm8k_test.jsonl",
        [{"question": f"{n} and 1?", "answer": f"It is\n#### {n + 1}"} for n in range(3)],
    )
    return directory


def request(*args: Any, task: str = "t") -> Any:
    return SimpleNamespace(args=args, task_name=task)


def assert_same_numbers(arm: ModelArm, found: dict[str, Any], name: str, items: Any) -> None:
    """Our sums and picks of these items are those of the harness's samples."""
    samples = found["arms"]["base"]["tasks"][name]["samples"]
    asked = [items[sample["doc_id"]] for sample in samples]
    scored = arm.score(asked)
    for sample, own in zip(samples, scored, strict=True):
        assert own.sums == pytest.approx(sample["scores"], abs=SUMS)
    encoded = [
        ChoiceItem((0,), tuple((0,) * n for n in own.tokens), own.characters, item.gold)
        for own, item in zip(scored, asked, strict=True)
    ]
    for normalisation, metric in (("sum", "acc"), ("character", "acc_norm")):
        picks = choose(encoded, [own.sums for own in scored], normalisation)  # type: ignore[arg-type]
        right = [float(p == i.answer_index) for p, i in zip(picks, encoded, strict=True)]
        if metric in samples[0]["metrics"]:
            assert [sample["metrics"][metric] for sample in samples] == right


def test_our_sums_and_picks_are_those_of_the_harness(arm: ModelArm, data: Path) -> None:
    found = run_harness([arm], ["arc_easy_local"], data=data)
    items = open_task(task_named("arc_easy"), str(data)).items
    assert len(found["tasks"]["arc_easy_local"]["asked"]) == len(items) == 7
    assert_same_numbers(arm, found, "arc_easy_local", items)
    json.dumps(found)


@pytest.mark.skipif(not REAL.is_dir(), reason="no real benchmark files here")
def test_the_same_on_real_items(arm: ModelArm) -> None:
    names = {"hellaswag": "hellaswag_local", "arc_challenge": "arc_challenge_local"}
    found = run_harness([arm], list(names.values()), data=REAL, limit=2, seed=5)
    for ours, theirs in names.items():
        items = open_task(task_named(ours), str(REAL)).items
        assert found["tasks"][theirs]["items"] == len(items)
        assert len(found["tasks"][theirs]["asked"]) == 2
        assert_same_numbers(arm, found, theirs, items)


@pytest.mark.skipif(not REAL.is_dir(), reason="no real benchmark files here")
def test_truthfulqa_has_our_options_with_the_right_one_first(arm: ModelArm) -> None:
    found = run_harness([arm], ["truthfulqa_mc1_local"], data=REAL, limit=1)
    items = open_task(task_named("truthfulqa_mc1"), str(REAL)).items
    for sample in found["arms"]["base"]["tasks"]["truthfulqa_mc1_local"]["samples"]:
        own = arm.score([items[sample["doc_id"]]])[0]
        assert sorted(own.sums) == pytest.approx(sorted(sample["scores"]), abs=SUMS)
        gold = items[sample["doc_id"]].gold
        assert isinstance(gold, int)
        assert own.sums[gold] == pytest.approx(sample["scores"][0], abs=SUMS)


def test_arms_are_asked_the_same_items_drawn_by_the_seed(places: Places, data: Path) -> None:
    def run(seed: int) -> dict[str, Any]:
        return run_harness(
            arms_of(places, ("base", "oracle")), ["arc_easy_local"], data=data, limit=4, seed=seed,
            num_fewshot=1, domains={"arc_easy_local": "alpha"},
        )  # fmt: skip

    found, other = run(0), run(1)
    asked = found["tasks"]["arc_easy_local"]["asked"]
    assert len(asked) == 4
    assert asked != list(range(4))
    assert asked != other["tasks"]["arc_easy_local"]["asked"]
    base, oracle = (
        found["arms"][name]["tasks"]["arc_easy_local"]["samples"] for name in ("base", "oracle")
    )
    assert [one["doc_id"] for one in base] == [one["doc_id"] for one in oracle] == asked
    assert [one["doc_hash"] for one in base] == [one["doc_hash"] for one in oracle]
    # Labelled, so its stacks answer: no score is the base's.
    for one, two in zip(base, oracle, strict=True):
        assert one["scores"] != pytest.approx(two["scores"], abs=1e-3)
    mean = sum(one["metrics"]["acc"] for one in base) / 4
    assert found["arms"]["base"]["tasks"]["arc_easy_local"]["metrics"]["acc,none"] == mean


def test_answers_end_at_their_marks_and_are_graded(arm: ModelArm, data: Path) -> None:
    found = run_harness([arm], ["gsm8k_local"], data=data, limit=1)
    (sample,) = found["arms"]["base"]["tasks"]["gsm8k_local"]["samples"]
    assert sample["metrics"]["exact_match"] in (0.0, 1.0)
    assert isinstance(sample["reply"], str)
    model = ArmModel(arm, {})
    whole = arm.reply_to_texts(["seven red"], 12)[0].text
    mark = whole[3:5]
    (cut,) = model.generate_until([request("seven red", {"until": [mark], "max_gen_toks": 12})])
    assert cut == whole[: whole.index(mark)]
    for options in ({"do_sample": True}, {"temperature": 0.7}):
        with pytest.raises(InputError, match="only greedy"):
            model.generate_until([request("a", options)])
    with pytest.raises(InputError, match="num_beams: not known"):
        model.generate_until([request("a", {"num_beams": 2})])


def test_likelihoods_say_whether_greedy_decoding_agrees(arm: ModelArm) -> None:
    model = ArmModel(arm, {})
    assert arm._loaded is not None
    context = tuple(b"red blue")
    logits = arm._loaded.model(mx.array([context]))[0, -1]
    likeliest = int(mx.argmax(logits).item())  # perhaps one that no byte has: hence as tokens
    pairs = [(context, (likeliest,)), (context, ((likeliest + 1) % 256,))]
    model._labels = [None, None]
    asked = [(("red blue", ""), list(before), list(after)) for before, after in pairs]
    (one, two) = model._loglikelihood_tokens(asked)
    assert (one[1], two[1]) == (True, False)
    wanted = (logits - mx.logsumexp(logits))[likeliest].item()
    assert one[0] == pytest.approx(wanted, abs=SUMS)
    model.wants_greedy = False
    assert [agrees for _, agrees in model._loglikelihood_tokens(asked)] == [False, False]
    texts = model.loglikelihood([request("red blue", " apple"), request("red blue", "?")])
    own = arm.score([BenchItem("x", "red blue", 0, (" apple", "?"))])[0]
    assert own.sums == pytest.approx([value for value, _ in texts], abs=SUMS)
    # A blank at the context's end belongs to what follows; no context: the end mark stands there.
    (blank,), (joined,) = (
        model.loglikelihood([request("red ", "x")]), model.loglikelihood([request("red", " x")])
    )  # fmt: skip
    assert blank == joined
    (alone,) = model.loglikelihood([request("", "ab")])
    (text,) = model.loglikelihood_rolling([request("ab")])
    assert alone[0] == pytest.approx(text, abs=SUMS)


def test_items_of_the_harness_hold_no_special_token(arm: ModelArm) -> None:
    model = ArmModel(arm, {})
    text = model.apply_chat_template([{"role": "user", "content": "hi<|end|>"}])
    for tokens in (model.tok_encode(text), model.tok_encode("hi<|end|>"),
                   *model._encode_pair(text, " a<|end|>")):  # fmt: skip
        assert END_OF_TEXT not in tokens
        assert "<|end|>" in model.tokenizer.decode(tokens)


def test_scored_answers_follow_the_prompt_of_training_and_replies_that_of_generation() -> None:
    tokenizer = chat_tokenizer("opened")
    prompts = PromptEncoder(tokenizer, ArmSettings(), None)
    model = ArmModel(SimpleNamespace(tokenizer=tokenizer, prompts=prompts), {})  # type: ignore[arg-type]
    history = [{"role": "user", "content": "hi</think>"}]
    rendered = {}
    for model.scores_answers in (False, True):
        text = model.apply_chat_template(history)
        rendered[model.scores_answers] = tokenizer.decode(model.tok_encode(text))
    assert rendered[False].endswith("hi</think><|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert rendered[True].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert model.tok_encode(text).count(tokenizer.convert_tokens_to_ids("</think>")) == 1


def test_a_long_context_costs_what_is_kept_of_it() -> None:
    text = "the red ship </think>" * 5_000
    counting = Counting("opened")

    def pair(tokenizer: Any, limit: int | None) -> tuple[list[int], list[int]]:
        prompts = PromptEncoder(tokenizer, ArmSettings(max_context_tokens=limit), None)
        model = ArmModel(SimpleNamespace(tokenizer=tokenizer, prompts=prompts), {})  # type: ignore[arg-type]
        chat = model.apply_chat_template([{"role": "user", "content": text}])
        before, after = model._encode_pair(chat, "sails </think>")
        return before[-100:], after

    assert pair(counting, 100) == pair(chat_tokenizer("opened"), None)
    assert counting.characters < 30_000


def test_long_texts_roll_and_count_each_token_once(places: Places) -> None:
    text = "stone cloud river " * 5
    arms = arms_of(places, ("routed",), max_context_tokens=32)
    arm = next(arms)
    model = ArmModel(arm, {})
    (rolled,) = model.loglikelihood_rolling([request(text)])
    tokens, end = tuple(text.encode()), model.prefix_token_id
    by_hand, start = 0.0, 0
    while start < len(tokens):
        stop = min(start + 31, len(tokens))
        before = (end, *tokens)[max(0, stop - 31) : start + 1]
        by_hand += arm.score_tokens([(before, tokens[start:stop])], [("", None)])[0][0]
        start = stop
    assert rolled == pytest.approx(by_hand, abs=10 * SUMS)
    assert "routed: answered by the base: 1 prompt without a prompt" in " ".join(arm.notes)


def test_chat_prompts_go_through_the_template(arm: ModelArm, data: Path) -> None:
    plain = run_harness([arm], ["arc_easy_local"], data=data, limit=1)
    chat = run_harness([arm], ["arc_easy_local"], data=data, limit=1, chat=True)
    one, two = (
        found["arms"]["base"]["tasks"]["arc_easy_local"]["samples"][0] for found in (plain, chat)
    )
    assert one["doc_id"] == two["doc_id"]
    assert one["scores"] != pytest.approx(two["scores"], abs=1e-3)

"""Arms on the tiny model: what each mode computes, routes once, and leaves behind.
Run: pytest tests/studies/benchmarks/test_arms.py
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks import base_model
from mlxstacks.errors import AdapterError, InputError
from mlxstacks.files.adapter_commands import convert_adapter
from mlxstacks.files.settings import AdapterConvertSettings
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.layers.stacked import stacked_layers
from mlxstacks.routing.router import PromptRouter
from mlxstacks.studies.benchmarks.arms import Routes, choose_arms
from mlxstacks.studies.benchmarks.settings import ARMS, ArmName, ArmSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem, Scored
from tests.studies.benchmarks.arm_cases import ITEMS, arms_of, write_adapter
from tests.studies.route_evaluate_cases import Places, write_places
from tests.tiny_models import random_adapter, write_llama

SUMS = 2e-4  # nats; float32, batches of other shapes


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    mx.set_default_device(mx.cpu)
    return write_places(tmp_path_factory.mktemp("places"), threshold=0.3)


@pytest.fixture(scope="module")
def adapter(places: Places, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(places, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def asked(places: Places, adapter: Path) -> dict[str, Any]:
    """Every arm's scores, replies, notes and details, and how often a model was loaded."""
    found: dict[str, Any] = {"loads": 0, "heads": []}
    own = base_model.load

    def counted(*args: Any, **options: Any) -> Any:
        found["loads"] += 1
        return own(*args, **options)

    base_model.load = counted
    try:
        for arm in arms_of(places, ARMS, adapter_path=str(adapter), requant="promote"):
            assert arm._scorer is not None
            found["heads"].append(arm._scorer.head)
            found[arm.name] = {
                "scored": arm.score(ITEMS), "replied": arm.reply(ITEMS, 3),
                "notes": list(arm.notes), "details": arm.details,
            }  # fmt: skip
    finally:
        base_model.load = own
    return found


def sums(scored: list[Scored]) -> list[float]:
    return [value for one in scored for value in one.sums]


def alone(model: Any, items: tuple[BenchItem, ...] = ITEMS) -> list[float]:
    """Sums of log p, a candidate at a time, without padding, of plain logits."""
    found = []
    for item in items:
        context = list(item.prompt.encode())
        for text in item.candidates:
            tokens = context + list(text.encode())
            logits = model(mx.array([tokens]))[0].astype(mx.float32)
            log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            places = range(len(context) - 1, len(tokens) - 1)
            found.append(sum(float(log_p[place, tokens[place + 1]].item()) for place in places))
    return found


def plain(path: Path, adapter: Path | None = None) -> Any:
    model, _, _ = base_model.load(path, adapter)
    base_model.dequantize(model)
    base_model.cast(model, mx.float32)
    return model


def test_models_are_loaded_twice_for_seven_arms(asked: dict[str, Any]) -> None:
    assert asked["loads"] == 2
    assert set(asked) - {"loads", "heads"} == set(ARMS)


def test_logits_are_made_for_candidates_alone(asked: dict[str, Any]) -> None:
    """All logits of a batch at once are gigabytes for a vocabulary of 250,000."""
    assert len(asked["heads"]) == len(ARMS)
    assert all(head is not None for head in asked["heads"])


def test_base_adapter_and_fused_are_the_models_they_name(
    places: Places, adapter: Path, asked: dict[str, Any], tmp_path: Path
) -> None:
    fuse(
        FuseSettings(
            model=str(places.model), adapter_path=(str(adapter),), requant="promote",
            save_path=str(tmp_path / "fused"),
        )
    )  # fmt: skip
    wanted = {
        "base": alone(plain(places.model)),
        "adapter": alone(plain(places.model, adapter)),
        "fused": alone(plain(tmp_path / "fused")),
    }
    for name, values in wanted.items():
        assert sums(asked[name]["scored"]) == pytest.approx(values, abs=SUMS), name
    assert sums(asked["adapter"]["scored"]) != pytest.approx(wanted["base"], abs=0.05)
    assert "survival" in asked["fused"]["notes"][-1]
    total = asked["fused"]["details"]["fuse"]["stages"][0]["total"]
    assert total["correlation"] > 0.98


def test_each_mode_of_a_store_answers_with_its_domains(asked: dict[str, Any]) -> None:
    weights = {name: [one.weights for one in asked[name]["scored"]] for name in ARMS}
    for name in ("base", "adapter", "fused"):
        assert weights[name] == [{}] * 4
    assert weights["ungated"] == [{"alpha": 1.0, "beta": 1.0}] * 4
    assert weights["oracle"] == [{}, {"alpha": 1.0}, {"beta": 1.0}, {}]
    assert weights["random"] == [{}, {"random:alpha": 1.0}, {"random:beta": 1.0}, {}]
    assert weights["routed"][1] == weights["routed"][2]  # the same prompt
    assert any(weights["routed"])
    assert all(value > 0.3 for one in weights["routed"] for value in one.values())
    for name in ARMS:
        assert [one.weights for one in asked[name]["replied"]] == weights[name]


def test_stacks_change_the_scores_of_the_items_they_answer(asked: dict[str, Any]) -> None:
    base, oracle, random = (asked[name]["scored"] for name in ("base", "oracle", "random"))
    for place in (0, 3):  # no stacks answer: the base does
        assert oracle[place].sums == pytest.approx(base[place].sums, abs=SUMS)
        assert random[place].sums == pytest.approx(base[place].sums, abs=SUMS)
    for place in (1, 2):
        assert oracle[place].sums != pytest.approx(base[place].sums, abs=1e-3)
        assert oracle[place].sums != pytest.approx(random[place].sums, abs=1e-3)
    assert sums(asked["ungated"]["scored"]) != pytest.approx(sums(base), abs=1e-2)


def test_items_without_stacks_are_counted(asked: dict[str, Any]) -> None:
    notes = " ".join(asked["oracle"]["notes"])
    assert "oracle: answered by the base: 1 prompt without a label" in notes
    assert "oracle: answered by the base: 1 prompt of domains without stacks (gamma)" in notes
    assert asked["routed"]["details"]["prompts_routed"] == 3


def test_domains_without_stacks_are_one_note() -> None:
    routes = Routes("oracle", ["letters"])
    for number, domain in enumerate(("math", "chat", "math", None, "letters")):
        routes.of(f"prompt {number}", domain)
    assert routes.notes() == [
        "oracle: answered by the base: 1 prompt without a label.",
        "oracle: answered by the base: 3 prompts of domains without stacks (chat, math).",
    ]


def test_lengths_are_those_of_all_tokens(asked: dict[str, Any]) -> None:
    first = asked["base"]["scored"][0]
    assert first.tokens == (4, 7, 14)
    assert first.characters == (3, 6, 13)
    assert not first.truncated


def test_replies_are_what_the_model_says_alone(places: Places, asked: dict[str, Any]) -> None:
    model, tokenizer, _ = base_model.load(places.model)
    base_model.dequantize(model)
    base_model.cast(model, mx.float32)
    said = [
        base_model.generate(model, tokenizer, [{"role": "user", "content": item.prompt}], 3)
        for item in ITEMS
    ]
    assert [one.text for one in asked["base"]["replied"]] == said
    assert {one.finish for one in asked["base"]["replied"]} <= {"stop", "length"}
    assert all(one.tokens == 3 for one in asked["base"]["replied"] if one.finish == "length")


def test_scores_do_not_depend_on_batches_and_modes_leave_nothing(
    places: Places, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    routed: list[str] = []
    own = PromptRouter.routes

    def noted(self: PromptRouter, texts: list[str], **more: Any) -> Any:
        routed.extend(texts)
        return own(self, texts, **more)

    monkeypatch.setattr(PromptRouter, "routes", noted)
    for arm in arms_of(places, ("routed", "ungated"), batch_size=2):
        assert arm._loaded is not None
        model = arm._loaded.model
        wanted = asked[arm.name]["scored"]
        backwards = arm.score(ITEMS[::-1])[::-1]
        assert sums(backwards) == pytest.approx(sums(wanted), abs=SUMS)
        each = [value for item in ITEMS for value in arm.score([item])[0].sums]
        assert each == pytest.approx(sums(wanted), abs=SUMS)
        letters = arm.score(ITEMS[1:2], "letters")[0]
        assert len(letters.sums) == 2
        arm.reply(ITEMS[:2], 2)
        for _, layer in stacked_layers(model):
            assert layer.mode[0].mode == "base"
        tokens = mx.array([[65, 66, 67]])
        assert mx.allclose(model(tokens), plain(places.model)(tokens), atol=1e-4)
    # Once a prompt, on the prompt alone, whatever is asked of it and how often.
    assert sorted(routed) == sorted({item.prompt for item in ITEMS})


def test_long_contexts_lose_their_beginning_and_are_marked(
    places: Places, asked: dict[str, Any]
) -> None:
    arms = arms_of(places, ("base",), max_context_tokens=40)
    arm = next(arms)
    found = arm.score(ITEMS)
    assert [one.truncated for one in found] == [True, False, False, True]
    assert sums(found[1:3]) == pytest.approx(sums(asked["base"]["scored"][1:3]), abs=SUMS)
    longest = max(map(len, ITEMS[3].candidates))
    cut = BenchItem("3", ITEMS[3].prompt[-(40 - longest) :], 2, ITEMS[3].candidates)
    assert found[3].sums == pytest.approx(alone(plain(places.model), (cut,)), abs=SUMS)
    replied = arm.reply([ITEMS[3], ITEMS[1]], 3)
    assert [one.truncated for one in replied] == [True, False]
    with pytest.raises(InputError, match=r"item long: 50 tokens leave no room"):
        arm.score([BenchItem("long", "a", 0, ("x" * 50,))])
    with pytest.raises(InputError, match="an answer of 2000 tokens leave no room"):
        arm.reply(ITEMS[:1], 2000)


def test_the_reference_offset_is_beside_the_right_scores(places: Places) -> None:
    one = BenchItem("r", "Question: x\nAnswer:", 0, ("abcd", "z", "y"))
    arms = arms_of(places, ("base",))
    arm = next(arms)
    right, old = arm.score([one])[0], arm.score([one], as_reference=True)[0]
    assert old.sums[1:] == (0.0, 0.0)
    assert old.sums[0] < 0
    assert old.tokens == (3, 1, 1)
    assert max(right.sums) < 0
    assert right.tokens == (4, 1, 1)
    # What is left out is the first token.
    first = BenchItem("f", one.prompt, 0, ("a",))
    assert old.sums[0] == pytest.approx(right.sums[0] - arm.score([first])[0].sums[0], abs=SUMS)


def test_chat_contexts_and_system_prompts(places: Places) -> None:
    with_chat = arms_of(places, ("base",), chat="all", system_prompt="Be brief.")
    chat = next(with_chat)
    item = BenchItem("c", "who", 0, (" me", " you"))
    # As the template does; an assistant's turn begins without a blank.
    pairs, _ = chat._pairs(item, "texts")
    assert [bytes(pair.context).decode() for pair in pairs] == ["Be brief.\nwho\n"] * 2
    assert [bytes(pair.continuation).decode() for pair in pairs] == ["me", "you"]


@pytest.mark.parametrize(
    ("chat", "template", "wanted"),
    [
        ("all", True, ["B", "two words", "\nB"]),
        ("all", False, [" B", " two words", "\nB"]),
        ("generate", True, [" B", " two words", "\nB"]),
        ("none", True, [" B", " two words", "\nB"]),
    ],
)
def test_candidates_lose_their_blank_behind_a_template_alone(
    places: Places, chat: str, template: bool, wanted: list[str]
) -> None:
    arms = arms_of(places, ("base",), chat=chat)
    arm = next(arms)
    arm.prompts._has_template = template
    item = BenchItem("c", "who", 0, (" B", " two words", "\nB"), (" B", " two words", "\nB"))
    for options in ("texts", "letters"):
        pairs, _ = arm._pairs(item, options)
        assert [bytes(pair.continuation).decode() for pair in pairs] == wanted
    for scored in (*arm.score([item], "texts"), *arm.score([item], "letters")):
        assert scored.tokens == tuple(map(len, wanted))


def test_an_arm_is_closed_by_the_next(places: Places) -> None:
    arms = arms_of(places, ("base", "ungated"))
    first = next(arms)
    next(arms)
    with pytest.raises(RuntimeError, match="base is closed"):
        first.score(ITEMS)
    second = list(arms)
    assert second == []


def test_what_arms_need() -> None:
    nothing = ArmSettings(model="m")
    assert choose_arms(nothing, (), True) == ["base"]
    adapter = ArmSettings(model="m", adapter_path="a")
    assert choose_arms(adapter, (), True) == ["base", "adapter", "fused"]
    store = ArmSettings(store_path="s")
    assert choose_arms(store, (), True) == ["base", "ungated", "routed", "oracle", "random"]
    assert choose_arms(store, (), False) == ["base", "ungated", "routed"]
    assert choose_arms(store, ("routed", "base"), False) == ["base", "routed"]
    cases: tuple[tuple[ArmName, ArmSettings, str], ...] = (
        ("fused", store, "fused needs an adapter"),
        ("oracle", nothing, "oracle needs a store"),
        ("base", ArmSettings(), "give a model"),
    )
    for name, settings, message in cases:
        with pytest.raises(InputError, match=message):
            choose_arms(settings, (name,), True)


def test_a_peft_adapter_gives_the_same_arms(
    places: Places, adapter: Path, asked: dict[str, Any], tmp_path: Path
) -> None:
    convert_adapter(
        AdapterConvertSettings(
            adapter_path=str(adapter), save_path=str(tmp_path / "peft"), model=str(places.model)
        )
    )
    options = {"adapter_path": str(tmp_path / "peft"), "requant": "promote"}
    for arm in arms_of(places, ("fused", "adapter"), **options):
        wanted = asked[arm.name]["scored"][:1]
        assert sums(arm.score(ITEMS[:1])) == pytest.approx(sums(wanted), abs=SUMS)


def test_an_adapter_of_another_model_is_refused(places: Places, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other")
    wrong = random_adapter(other, ["self_attn.q_proj"], directory=tmp_path / "wrong")
    with pytest.raises(AdapterError, match="does not fit"):
        next(arms_of(places, ("adapter",), adapter_path=str(wrong)))


def test_items_that_cannot_be_asked(places: Places) -> None:
    arms = arms_of(places, ("base",))
    arm = next(arms)
    with pytest.raises(InputError, match="item 0 has no letters"):
        arm.score(ITEMS, "letters")
    with pytest.raises(InputError, match="empty prompt"):
        arm.score([BenchItem("e", "", 0, (" a",))])
    with pytest.raises(InputError, match="has no tokens"):
        arm.score([BenchItem("e", "q", 0, ("", " a"))])
    assert arm.score([]) == []
    assert arm.reply([], 3) == []

"""The recipes of `mlxstacks route` and of the routed chat: they resolve, and their heads are true.

Run: pytest tests/studies/route/test_recipes.py
"""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.layers.adapted import Dims
from mlxstacks.layers.targets import Target, stack_size
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import resolve
from mlxstacks.routing.router import parameter_count
from mlxstacks.studies.route.settings import RouteCheckSettings
from tests.tiny_models import qwen_moe_config
from tools.nano.curriculum import curriculum_documents, curriculum_items
from tools.nano.curriculum_settings import DOMAINS
from tools.nano.settings import RebuildSettings

LARGE = "qwen3.5-35b-a3b"
NAMES = {
    "route-discover": "route discover", "route-train": "route train",
    "route-evaluate": "route evaluate", "route-check": "route check", "chat-routed": "chat",
    f"route-discover-{LARGE}": "route discover", f"route-train-{LARGE}": "route train",
    f"route-evaluate-{LARGE}": "route evaluate", f"route-check-{LARGE}": "route check",
    f"chat-{LARGE}": "chat",
}  # fmt: skip
# The public architecture: spec of the model, text part.
PUBLIC: dict[str, Any] = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "head_dim": 256,
    "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip


def settings_of(name: str) -> Any:
    # a target of one's own: nano's is not needed to look at settings
    options = {"store_path": "store", "model": "model"} if LARGE not in name else {}
    return resolve(NAMES[name], options, load_recipe(name)).settings


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_resolves_and_says_what_it_takes(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.command == NAMES[name]
    settings_of(name)
    head = "\n".join(recipe.head)
    assert f"mlxstacks run {name}" in head
    assert "Memory:" in head
    assert "Time:" in head


def test_the_published_settings_of_discovery_and_router() -> None:
    found = settings_of(f"route-discover-{LARGE}")
    assert (found.threshold, found.chat_floor, found.label_share) == (0.01, 0.20, 0.20)
    assert (found.samples_per_domain, found.max_tokens) == (200, 256)
    assert (found.single_cap, found.mixed_cap, found.soft) == (2000, 400, ("reasoning",))
    # longer than 5 characters
    assert (found.shortest_prompt, found.shortest_answer) == (15, 6)
    train = settings_of(f"route-train-{LARGE}")
    assert (train.hidden_dims, train.epochs, train.learning_rate) == (512, 8, 8e-4)
    assert (train.weight_decay, train.batch_size, train.clip_norm) == (0.01, 16, 1.0)
    assert (train.dropout, train.margin_weight, train.seed) == (0.1, 0.05, 42)
    assert (train.validation_share, train.validation_groups) == (0.1, 200)
    assert (train.max_tokens, train.threshold) == (256, 0.12)
    assert train.targets == f"mlxstacks-out/route-discover-{LARGE}"


def test_nanos_recipes_are_what_the_shipped_router_was_made_with() -> None:
    made, found = RebuildSettings(), settings_of("route-discover")
    names = {"store_path", "model", "data", "save_path", "force", "resume"}
    assert found.model_dump(exclude=names) == made.outcomes.model_dump(exclude=names)
    names = {"store_path", "model", "targets", "save_path", "force", "install"}
    train = settings_of("route-train")
    assert train.model_dump(exclude=names) == made.router.model_dump(exclude=names)


# --- the checks -----------------------------------------------------------------------------------


def checks(name: str) -> RouteCheckSettings:
    found = settings_of(name)
    assert isinstance(found, RouteCheckSettings)
    return found


def test_the_published_check_has_five_prompts_to_answer_and_sixteen_to_route() -> None:
    prompts = checks(f"route-check-{LARGE}").prompts
    answered = [one for one in prompts if one.is_answered]
    routed = [one for one in prompts if one.name.startswith("route ")]
    assert (len(answered), len(routed)) == (5, 16)
    known = {"chat", "code", "math", "medical", "reasoning"}
    assert {name for one in routed for name in one.domains} == known
    pairs = {frozenset(one.domains) for one in routed if len(one.domains) == 2}
    # nine of the ten pairs are those that mixed prompts were published for
    assert len(pairs) >= 9


def test_nanos_check_asks_what_no_stack_was_trained_on_and_expects_what_is_true() -> None:
    prompts = checks("route-check").prompts
    assert len(prompts) == 16
    assert sum(one.is_answered for one in prompts) == 5
    answers = {
        item.prompt: item.options[item.answer_index]
        for name in DOMAINS
        for item in curriculum_items(name, 60)
    }
    rows = {document.prompt for name in DOMAINS for document in curriculum_documents(name)}
    for one in prompts:
        assert set(one.domains) <= set(DOMAINS), one.name
        if len(one.domains) == 1:
            assert one.prompt in answers, one.name
        assert one.prompt not in rows, one.name
        if one.is_answered:
            assert one.expect[0].casefold() in answers[one.prompt].casefold(), one.name


# --- expected bytes -------------------------------------------------------------------------------


def base_bytes(c: Mapping[str, Any], bits: int) -> int:
    """Bytes of a checkpoint of this architecture at `bits`, groups of 64, router gates at 8 bits.

    A quantized number takes its bits, and a scale and a bias of two bytes each for 64 of them.
    """

    def packed(count: int, bits: int = bits) -> int:
        return count * bits // 8 + count // 64 * 4

    D, layers = c["hidden_size"], c["num_hidden_layers"]
    attention = layers // c["full_attention_interval"]
    heads, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    mixture = (
        packed(3 * c["num_experts"] * c["moe_intermediate_size"] * D)
        + packed(3 * c["shared_expert_intermediate_size"] * D)
        + packed((c["num_experts"] + 1) * D, 8)
        + 2 * 2 * D  # two norms
    )
    # q_proj makes a gate too
    full = packed((2 * heads + 2 * kv + heads) * D) + 2 * 2 * c["head_dim"]
    convolved = 2 * keys + values
    linear = (
        packed((convolved + values + 2 * c["linear_num_value_heads"] + values) * D)
        + 2 * convolved * c["linear_conv_kernel_dim"]
        + (4 + 2) * c["linear_num_value_heads"]  # A_log float32, dt_bias
        + 2 * c["linear_value_head_dim"]
    )
    ends = 2 * packed(c["vocab_size"] * D) + 2 * D
    return layers * mixture + attention * full + (layers - attention) * linear + ends


def test_the_formula_is_that_of_a_real_model() -> None:
    """Law: it gives the very bytes of a small model of this architecture that mlx-lm quantized."""
    config = qwen_moe_config(128)
    model = base_model.build_model(config)
    base_model.cast(model, mx.bfloat16)
    base_model.quantize(model, config, 3)
    made = sum(value.nbytes for _, value in tree_flatten(model.parameters()))
    assert base_bytes(config["text_config"], 3) == made


def stack_bytes(c: Mapping[str, Any]) -> int:
    """Of one stack of stack-qwen3.5-35b-a3b: three linear layers and a full one, E=4, r=16."""
    D, heads = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    kv, width = c["num_key_value_heads"] * c["head_dim"], c["moe_intermediate_size"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    convolved = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    expert = [(D, width, c["num_experts"])] * 2 + [(width, D, c["num_experts"])]
    shared = [(D, width, None)] * 2 + [(width, D, None)]
    full = [(D, 2 * heads, None), (D, kv, None), (D, kv, None), (heads, D, None)]
    # the narrow projections of its gates get no stack
    linear = [(D, convolved, None), (D, values, None), (values, D, None)]
    stacks = resolve("stack", {}, load_recipe(f"stack-{LARGE}")).settings
    shapes = 3 * (expert + shared + linear) + expert + shared + full
    targets = [Target(str(i), 0, "", None, Dims(*shape)) for i, shape in enumerate(shapes)]
    return stack_size(targets, stacks.stack).frozen_bytes  # type: ignore[attr-defined]


def test_heads_tell_the_bytes_that_the_architecture_gives() -> None:
    found = base_bytes(PUBLIC, 3)
    assert found == 15_178_989_696
    assert found / 1e9 == pytest.approx(15.2, abs=0.05)
    one, ten = stack_bytes(PUBLIC), 10 * stack_bytes(PUBLIC)
    assert one / 1e6 == pytest.approx(20.4, abs=0.05)
    assert ten / 1e6 == pytest.approx(204, abs=0.5)
    router = parameter_count(PUBLIC["hidden_size"], 5)
    assert router == 1_844_226
    assert 4 * router / 1e6 == pytest.approx(7.4, abs=0.05)
    features = 13_600 * 256 * 4 * PUBLIC["hidden_size"]
    assert features / 1e9 == pytest.approx(28.5, abs=0.05)
    full = PUBLIC["num_hidden_layers"] // PUBLIC["full_attention_interval"]
    token = full * 2 * PUBLIC["num_key_value_heads"] * PUBLIC["head_dim"] * 2
    assert token == 20_480
    assert 4096 * token / 1e6 == pytest.approx(84, abs=0.5)
    # a float32 matrix for each value head; the last three inputs of the convolution, in bf16
    matrices = PUBLIC["linear_num_value_heads"] * 128 * 128 * 4
    inputs = 3 * (2 * 16 * 128 + 32 * 128) * 2
    states = (PUBLIC["num_hidden_layers"] - full) * (matrices + inputs)
    assert states / 1e6 == pytest.approx(64.4, abs=0.1)
    heads = {name: "\n".join(load_recipe(name).head) for name in NAMES if LARGE in name}
    assert all("15.2 GB of base" in head for head in heads.values())
    assert all("computed" in re.sub(r"\s+", " ", head) for head in heads.values())
    for name in ("route-discover", "route-evaluate", "route-check"):
        assert "204 MB of ten stacks" in heads[f"{name}-{LARGE}"]
    assert "1,844,226 numbers (7.4 MB)" in heads[f"route-train-{LARGE}"]
    assert "28.5 GB" in heads[f"route-train-{LARGE}"]
    chat = heads[f"chat-{LARGE}"]
    for words in ("7.4 MB of router", "stacks of 20.4 MB", "20.5 KB of cache", "84 MB at", "64 MB"):
        assert words in chat

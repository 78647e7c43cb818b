"""Which projections are found, and attaching and detaching.

Run: pytest tests/layers/test_attach.py
"""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.layers.adapted import begin_step, take_balance
from mlxstacks.layers.attach import (
    add_active,
    attach_lora,
    attach_stacks,
    check_per_expert,
    detach,
)
from mlxstacks.layers.latent import latent_pairs
from mlxstacks.layers.settings import LoRASettings, StackSettings, TargetSettings
from mlxstacks.layers.stacked import StackedLayer, stacked_layers
from mlxstacks.layers.targets import find_targets, left_out_notes, stack_size
from tests.layers.build import fill_active
from tests.tiny_models import llama_config, qwen_moe_config

TOKENS = mx.array([[1, 2, 3, 4, 5, 6, 7, 8]] * 5)


def hybrid() -> nn.Module:
    """Layer 0 linear attention, layer 1 full attention; experts and a shared expert in both."""
    mx.random.seed(1)
    model = base_model.build_model(qwen_moe_config())
    model.eval()
    return model


def names_of(model: nn.Module, **settings: object) -> list[str]:
    found = find_targets(model, TargetSettings.model_validate(settings))
    return [f"{target.layer}.{target.name}" for target in found]


def test_hybrid_targets_are_those_of_the_table() -> None:
    experts = [
        f"mlp.{block}.{name}_proj"
        for block in ("shared_expert", "switch_mlp")
        for name in ("down", "gate", "up")
    ]
    linear = [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")]
    full = [f"self_attn.{name}_proj" for name in "koqv"]
    wanted = [f"0.{name}" for name in [*linear, *experts]]
    wanted += [f"1.{name}" for name in [*experts, *full]]
    assert names_of(hybrid()) == wanted
    small = set(names_of(hybrid(), small_projections=True)) - set(wanted)
    assert small == {"0.linear_attn.in_proj_a", "0.linear_attn.in_proj_b"}


def test_quantized_widths_are_logical_ones() -> None:
    model = base_model.build_model(qwen_moe_config())
    wanted = {target.path: target.dims for target in find_targets(model)}
    for bits in (3, 4):
        model = base_model.build_model(qwen_moe_config())
        base_model.quantize(model, qwen_moe_config(), bits, 32)
        assert {target.path: target.dims for target in find_targets(model)} == wanted


def test_dense_decoder_targets() -> None:
    model = base_model.build_model(llama_config())
    attention = [f"self_attn.{name}_proj" for name in "koqv"]
    mlp = [f"mlp.{name}_proj" for name in ("down", "gate", "up")]
    assert names_of(model) == [f"{i}.{name}" for i in range(2) for name in [*mlp, *attention]]


def test_fused_projections_are_usual_and_what_is_not_is_noted() -> None:
    config = {
        "model_type": "phi3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
        "intermediate_size": 64, "num_attention_heads": 2, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    model = base_model.build_model(config)
    names = ["mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"]
    assert names_of(model) == [f"{i}.{name}" for i in range(2) for name in names]
    assert left_out_notes(model, find_targets(model)) == []
    model.layers[1].mlp.fc1 = nn.Linear(8, 8)
    first = find_targets(model, TargetSettings(layers=(0,)))
    assert left_out_notes(model, first) == []
    (note,) = left_out_notes(model, find_targets(model))
    assert "mlp.fc1;" in note
    assert left_out_notes(hybrid(), find_targets(hybrid())) == []


def test_a_vision_tower_is_left_alone() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.TransformerEncoderLayer(8, 2)]
            self.q_proj = nn.Linear(8, 8)

    model = hybrid()
    before = names_of(model)
    model.vision_tower = Tower()
    model.vision_tower.layers[0].q_proj = nn.Linear(8, 8)
    assert names_of(model) == before
    assert all("vision" not in target.path for target in find_targets(model))


def test_layer_and_projection_filters() -> None:
    model = hybrid()
    assert names_of(model, layers=(1,), projections=("switch_mlp.down_proj",)) == [
        "1.mlp.switch_mlp.down_proj"
    ]
    assert names_of(model, projections=("down_proj",)) == [
        f"{i}.mlp.{block}.down_proj" for i in (0, 1) for block in ("shared_expert", "switch_mlp")
    ]
    assert names_of(model, layers=(0,), projections=("in_proj_a",)) == ["0.linear_attn.in_proj_a"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": (2, -1)}, r"(?s)layer 2: the model has layers 0 to 1.*layer -1"),
        (
            {"layers": (99,), "projections": ("q_proj",)},
            r"adapt:\n  layer 99: the model has layers 0 to 1$",
        ),
        ({"projections": ("down_prj",)}, "'down_prj' matches no projection; close: down_proj"),
        ({"projections": ("xyz", "dwn_proj")}, r"(?s)'xyz' matches no.*'dwn_proj'.*down_proj"),
        ({"layers": (0,), "projections": ("q_proj",)}, "'q_proj': only in layers 1"),
        ({"projections": ("gate",)}, "'gate': the router of a mixture of experts"),
        ({"projections": ("mlp.shared_expert_gate",)}, "is never adapted"),
        ({"projections": ("lm_head",)}, "'lm_head' matches no projection"),
        ({"projections": ("roj",)}, "'roj' matches no projection"),
    ],
)
def test_what_matches_nothing_is_told_with_near_misses(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        names_of(hybrid(), **settings)


def test_stacks_attach_train_and_detach_without_a_trace() -> None:
    model = hybrid()
    plain = model(TOKENS)
    before = {path: type(module) for path, module in model.named_modules()}
    targets = find_targets(model)
    attach_stacks(model, targets)
    assert mx.array_equal(model(TOKENS), plain)
    assert not tree_flatten(model.trainable_parameters())
    add_active(model, StackSettings(rank=2), mx.random.key(0))
    model.train()
    begin_step(model, mx.random.key(1))
    assert mx.array_equal(model(TOKENS), plain)
    assert len(take_balance(model).sums) == len(targets)
    assert not take_balance(model).sums
    size = stack_size(targets, StackSettings(rank=2))
    assert sum(p.size for _, p in tree_flatten(model.trainable_parameters())) == size.parameters
    model.eval()
    assert detach(model) == len(targets)
    assert {path: type(module) for path, module in model.named_modules()} == before
    assert mx.array_equal(model(TOKENS), plain)


def test_the_balance_loss_of_a_model_trains_routers_and_noise_alone() -> None:
    model = hybrid()
    attach_stacks(model, find_targets(model))
    add_active(model, StackSettings(rank=2), mx.random.key(0))
    for index, (_, layer) in enumerate(stacked_layers(model)):
        fill_active(layer, index)
    model.train()

    def balance() -> mx.array:
        begin_step(model, mx.random.key(1))
        model(TOKENS[:1, :7])  # 14 choices: no way to give four experts the same share
        return take_balance(model).total

    value, gradient = nn.value_and_grad(model, balance)()
    count = len(list(stacked_layers(model)))
    assert count < value.item() < 4 * count
    for name, array in tree_flatten(gradient):
        largest = float(mx.max(mx.abs(array)))
        if name.endswith(("router", "noise")):
            assert largest > 0, name
        else:
            assert largest == 0, name


def test_rank_above_a_dim_lists_every_projection_and_changes_nothing() -> None:
    model = hybrid()
    targets = find_targets(model, TargetSettings(projections=("k_proj", "switch_mlp.up_proj")))
    with pytest.raises(ValueError, match=r"(?s)0.mlp.switch_mlp.up_proj: rank 65.*k_proj: rank 65"):
        attach_lora(model, targets, LoRASettings(rank=65), mx.random.key(0))
    assert not any(isinstance(module, StackedLayer) for module in model.modules())
    attach_stacks(model, targets)
    with pytest.raises(ValueError, match=r"(?s)switch_mlp.up_proj: rank 65.*k_proj: rank 65"):
        add_active(model, StackSettings(rank=65), mx.random.key(0))
    assert not any(layer.active for _, layer in stacked_layers(model))


def test_attaching_twice_is_refused() -> None:
    model = hybrid()
    attach_stacks(model, find_targets(model))
    again = find_targets(model)
    assert len(again) == 19
    with pytest.raises(ValueError, match="has an adapter; detach it first"):
        attach_lora(model, again, LoRASettings(), mx.random.key(0))
    add_active(model, StackSettings(rank=2), mx.random.key(0))
    with pytest.raises(ValueError, match="a stack is in training"):
        add_active(model, StackSettings(rank=2), mx.random.key(0))
    with pytest.raises(ValueError, match="attach_stacks first"):
        add_active(hybrid(), StackSettings(rank=2), mx.random.key(0))


def test_lora_trains_its_pairs_alone() -> None:
    model = hybrid()
    plain = model(TOKENS)
    targets = find_targets(model, TargetSettings(layers=(0,), projections=("down_proj",)))
    attach_lora(model, targets, LoRASettings(rank=2), mx.random.key(0))
    assert mx.array_equal(model(TOKENS), plain)
    trainable = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert trainable == {f"{t.path}.lora_{leaf}" for t in targets for leaf in "ab"}
    assert detach(model) == 2


def test_per_expert_wants_layers_and_rank_by_name_and_tells_its_bytes() -> None:
    targets = find_targets(hybrid())
    loose = StackSettings(switch_form="per_expert")
    with pytest.raises(ValueError, match=r"needs layers and rank by name.* M parameters.* GB"):
        check_per_expert(targets, loose, layers_were_named=False)
    given = StackSettings(switch_form="per_expert", rank=2)
    check_per_expert(targets, given, layers_were_named=True)
    check_per_expert(targets, StackSettings(), layers_were_named=False)


def test_latent_stacks_on_a_model() -> None:
    model = hybrid()
    plain = model(TOKENS)
    targets = find_targets(model)
    attach_stacks(model, targets)
    settings = StackSettings(rank=4, latent_dim=16)
    with pytest.raises(ValueError, match="no latent projections for"):
        add_active(model, settings, mx.random.key(0))
    pairs = latent_pairs({target.path: target.dims for target in targets}, 16, "base")
    add_active(model, settings, mx.random.key(0), pairs)
    assert mx.array_equal(model(TOKENS), plain)
    size = stack_size(targets, settings)
    assert sum(p.size for _, p in tree_flatten(model.trainable_parameters())) == size.parameters
    made = {id(a): a.size for pair in pairs.values() for a in (pair.d_in, pair.d_out)}
    assert size.shared_bytes == 4 * sum(made.values())


def test_size_of_the_default_stack_on_qwen35_35b_a3b() -> None:
    """Routed experts shared: a few tens of MB for all of it. From shapes alone."""
    from mlxstacks.layers.adapted import Dims
    from mlxstacks.layers.targets import Target

    def target(k: int, n: int, experts: int | None = None) -> Target:
        return Target("", 0, "", nn.Identity(), Dims(k, n, experts))

    down = [target(512, 2048, 256)]
    at_2 = StackSettings(rank=1, num_experts=2, switch_form="per_expert")
    at_64 = StackSettings(switch_form="per_expert")
    pairs = {s: stack_size(down, s).parameters - 2 * s.num_experts * 512 for s in (at_2, at_64)}
    assert pairs[at_2] == 1_310_720
    assert pairs[at_64] == 41_943_040

"""Latent stacks and the arithmetic of their sizes. Run: pytest tests/layers/test_latent.py"""

import mlx.core as mx
import pytest

from mlxstacks.layers.adapted import Dims
from mlxstacks.layers.latent import (
    full_parameters,
    input_group,
    latent_pairs,
    latent_parameters,
    shared_parameters,
)
from mlxstacks.layers.moe_lora import MoELoRADelta, Rows
from mlxstacks.layers.stacked import StackedLayer
from tests.layers.build import (
    K,
    N,
    assert_close,
    dims_of,
    linear_base,
    normal,
    settings_of,
    trained_delta,
)


def decoder(layers: int, hidden: int, q: int, kv: int, inner: int) -> dict[str, Dims]:
    """Dims of the seven projections of a dense decoder."""
    widths = {
        "self_attn.q_proj": (hidden, q),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    return {
        f"model.layers.{i}.{name}": Dims(*pair, None)
        for i in range(layers)
        for name, pair in widths.items()
    }


TINYLLAMA = decoder(22, hidden=2048, q=2048, kv=256, inner=5632)
GEMMA = decoder(48, hidden=3840, q=4096, kv=2048, inner=15360)


def test_published_parameter_counts() -> None:
    assert len(TINYLLAMA) == 154
    assert full_parameters(TINYLLAMA.values(), 4, 16) == 53_616_640
    single = sum(64 * (d.input_dims + d.output_dims) for d in TINYLLAMA.values())
    assert single == 50_462_720
    assert full_parameters(GEMMA.values(), 4, 16) == 276_725_760


def test_count_is_that_of_the_arrays() -> None:
    delta = MoELoRADelta(Dims(40, 24, None), settings_of("linear"), mx.random.key(0))
    made = sum(p.size for p in delta.parameters().values())
    assert made == full_parameters([Dims(40, 24, None)], 4, 3)


def test_published_latent_arithmetic_of_gemma() -> None:
    """Own projections 1,059 M; shared ones add 11.7 M a stack on 1,047.5 M paid once."""
    full = full_parameters(GEMMA.values(), 4, 16)
    added = latent_parameters(GEMMA.values(), 4, 16, 256)
    alone = 256 * sum(d.input_dims + d.output_dims for d in GEMMA.values())
    assert added == 11_698_176
    assert alone == pytest.approx(1047.5e6, rel=1e-4)
    assert alone + added == pytest.approx(1059e6, rel=1e-3)
    assert full / added == pytest.approx(23.7, abs=0.05)
    break_even = next(n for n in range(1, 99) if alone + n * added < n * full)
    assert break_even == 4
    assert 10 * full / (alone + 10 * added) == pytest.approx(2.4, abs=0.05)
    assert 20 * full / (alone + 20 * added) == pytest.approx(4.3, abs=0.05)
    # With one d_in for q, k, v and one for gate and up, the pair is smaller still.
    shared = shared_parameters(GEMMA, 256)
    assert shared == alone - 48 * 256 * 3 * 3840


def test_projections_with_one_input_share_d_in() -> None:
    pairs = latent_pairs(decoder(2, 24, 24, 12, 40), 8, "base")
    layer = "model.layers.0.self_attn."
    assert pairs[layer + "q_proj"].d_in is pairs[layer + "v_proj"].d_in
    assert pairs[layer + "q_proj"].d_in is not pairs[layer + "o_proj"].d_in
    assert pairs[layer + "q_proj"].d_in is not pairs["model.layers.1.self_attn.q_proj"].d_in
    assert input_group("a.linear_attn.in_proj_z") == input_group("a.linear_attn.in_proj_qkv")
    for pair in pairs.values():
        assert_close(pair.d_in @ pair.d_in.T, mx.eye(8), 1e-6)
        assert_close(pair.d_out.T @ pair.d_out, mx.eye(8), 1e-6)
    again = latent_pairs(decoder(2, 24, 24, 12, 40), 8, "base")
    assert all(mx.array_equal(again[p].d_out, pairs[p].d_out) for p in pairs)


def test_too_wide_a_latent_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"latent_dim 30 .*k_proj"):
        latent_pairs({"k_proj": Dims(64, 12, None), "q_proj": Dims(64, 64, None)}, 30, "base")


@pytest.mark.parametrize("form", ["linear", "shared"])
def test_latent_stack_trains_freezes_and_packs(form: str) -> None:
    from mlxstacks.layers.freezing import frozen_stack
    from mlxstacks.layers.packed import PackedStacks
    from mlxstacks.layers.selection import StackId

    pair = latent_pairs({"q_proj": dims_of(form)}, 10, "base")["q_proj"]
    fresh = MoELoRADelta(dims_of(form), settings_of(form, latent_dim=10), mx.random.key(0), pair)
    x = normal(0, 5, 1, K)
    assert not mx.any(fresh(x, key=mx.random.key(0))[0]).item()
    assert fresh.lora_a.shape == (4, 3, 10)
    assert fresh.lora_b.shape == (4, 10, 3)
    stacks, total = [], mx.zeros((5, 1, N))
    for seed in range(3):
        delta = trained_delta(form, seed, latent=pair)
        delta.eval()
        total = total + delta(x)[0]
        stacks.append(frozen_stack(delta, StackId(f"s{seed}", "chat"), mx.float32))
    pack = PackedStacks()
    pack.replace_all(stacks)
    assert_close(pack(x, Rows()), total, 3e-6)
    # One pair is not another, even of the same size: such stacks are not packed together.
    other = latent_pairs({"q_proj": dims_of(form)}, 10, "other base")["q_proj"]
    odd = trained_delta(form, 9, latent=other)
    odd.eval()
    pack.replace_all([*stacks, frozen_stack(odd, StackId("odd", "chat"), mx.float32)])
    assert_close(pack(x, Rows()), total + odd(x)[0], 3e-6)


def test_latent_settings_and_pair_come_together() -> None:
    layer = StackedLayer(linear_base())
    with pytest.raises(ValueError, match="come together"):
        layer.add_active(settings_of("linear", latent_dim=8), mx.random.key(0))

"""Calls of mlx-lm's kernels beside what they should give.

A case is a function of (random generator, dtype) that is called within `as_if_on_metal` and gives
pairs: what the kernel gave, and what NumPy in float64, or mlx-lm's own path without a kernel, has
in that place. Shapes leave lanes idle and threadgroups half full where a kernel allows that.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx import nn

from tests.emulator.third_party import fresh

Array = np.ndarray
Pairs = list[tuple[mx.array, Array]]
Case = Callable[[np.random.Generator, mx.Dtype], Pairs]


def exact(array: mx.array) -> Array:
    """The values of an MLX array, as float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _normal(rng: np.random.Generator, dtype: mx.Dtype, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)


def _uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> mx.array:
    return mx.array(rng.uniform(low, high, shape).astype(np.float32))


def _rms(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


# --- gated delta rule ----------------------------------------------------------------------------


def _gated_delta(kernel: str, *, vector_gate: bool = False, masked: bool = False) -> Case:
    def case(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
        B, T, Hk, Hv, Dk, Dv = 2, 5, 2, 4, 128, 16
        module = fresh("mlx_lm.models.gated_delta")
        q, k = (_normal(rng, dtype, B, T, Hk, Dk) * (Dk**-0.5) for _ in range(2))
        v = _normal(rng, dtype, B, T, Hv, Dv)
        g = _uniform(rng, 0.5, 1.0, B, T, Hv, *([Dk] if vector_gate else []))
        beta = _uniform(rng, 0.1, 0.9, B, T, Hv).astype(dtype)
        state = _normal(rng, mx.float32, B, Hv, Dv, Dk)
        mask = mx.array(rng.random((B, T)) < 0.6) if masked else None
        y, after = getattr(module, kernel)(q, k, v, g, beta, state, mask)
        # In float32 whatever the inputs are, as the kernel computes.
        wide = [x.astype(mx.float32) for x in (q, k, v, g, beta)]
        wanted, wanted_after = module.gated_delta_ops(*wide, state, mask)
        wanted = exact(wanted)
        if mask is not None:  # a kernel writes zeros where the reference leaves what it computed
            wanted = np.where(np.array(mask)[..., None, None], wanted, 0.0)
        return [(y, wanted), (after, exact(wanted_after))]

    return case


def _wkv7(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    B, T, H, D = 2, 4, 3, 64
    module = fresh("mlx_lm.models.rwkv7")
    r, k, v, a, b = (_normal(rng, dtype, B, T, H, D) * (D**-0.5) for _ in range(5))
    w = _uniform(rng, 0.5, 1.0, B, T, H, D).astype(dtype)
    state = _normal(rng, dtype, B, H, D, D)
    y, after = module.wkv7_kernel(r, w, k, v, a, b, state)
    s, steps = exact(state), []
    for t in range(T):
        r_, w_, k_, v_, a_, b_ = (exact(x)[:, t] for x in (r, w, k, v, a, b))
        update = np.einsum("bhij,bhj,bhk->bhik", s, a_, b_)
        s = s * w_[:, :, None, :] + v_[..., None] * k_[..., None, :] + update
        steps.append(np.einsum("bhij,bhj->bhi", s, r_))
    return [(y, np.stack(steps, axis=1)), (after, s)]


def _ssm(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    B, H, Dh, groups, Ds = 2, 4, 16, 2, 64
    module = fresh("mlx_lm.models.ssm")
    x = _normal(rng, dtype, B, 1, H, Dh)
    A_log, D, dt_bias = (_normal(rng, mx.float32, H) for _ in range(3))
    b, c = (_normal(rng, dtype, B, 1, groups, Ds) for _ in range(2))
    dt = _normal(rng, dtype, B, 1, H)
    state = _normal(rng, dtype, B, H, Dh, Ds)
    out, after = module.ssm_update(x, A_log, b, c, D, dt, dt_bias, state)
    step = np.clip(np.log1p(np.exp(exact(dt) + exact(dt_bias)))[:, 0], 0.001, 100.0)  # (B, H)
    decay = np.exp(-np.exp(exact(A_log)) * step)
    b_, c_ = (np.repeat(exact(m)[:, 0], H // groups, axis=1)[:, :, None, :] for m in (b, c))
    x_ = exact(x)[:, 0, :, :, None]  # (B, H, Dh, 1)
    new = decay[..., None, None] * exact(state) + x_ * step[..., None, None] * b_
    y = (new * c_).sum(-1) + x_[..., 0] * exact(D)[:, None]
    return [(out, y[:, None]), (after, new)]


# --- norms ---------------------------------------------------------------------------------------


def _norm_add_norm(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    D, eps, next_eps = 520, 1e-5, 1e-6
    module = fresh("mlx_lm.kernels.norm_add_norm")
    branch, stream = _normal(rng, dtype, 3, D), _normal(rng, mx.float32, 3, D)
    alpha, beta, weight = (_uniform(rng, 0.5, 1.5, D) for _ in range(3))
    norm = nn.RMSNorm(D, eps=next_eps)
    norm.weight = _uniform(rng, 0.5, 1.5, D)
    options = {"alpha": alpha, "beta": beta, "post_eps": eps}
    new, normed = module.norm_add_norm(
        branch, stream, post_weight=weight, next_norm=norm, **options
    )
    unscaled, _ = module.norm_add_norm(branch, stream, post_weight=None, next_norm=None, **options)
    only = module.pre_norm(stream, norm, dtype=dtype)
    x, s, al, be = (exact(v) for v in (branch, stream, alpha, beta))
    wanted = al * s + be * _rms(x * exact(weight.astype(dtype)), eps)
    return [
        (new, wanted),
        (normed, _rms(wanted, next_eps) * exact(norm.weight)),
        (unscaled, al * s + be * _rms(x, eps)),
        (only, _rms(s, next_eps) * exact(norm.weight)),
    ]


def _post_expert_norm_combine(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    tokens, K, D, eps = 3, 4, 328, 1e-5
    module = fresh("mlx_lm.kernels.post_expert_norm_combine")
    experts = _normal(rng, dtype, tokens, K, D)
    weights, norm_weight = _uniform(rng, 0.1, 0.9, tokens, K), _uniform(rng, 0.5, 1.5, D)
    out = module.post_expert_norm_combine(experts, weights, norm_weight=norm_weight, eps=eps)
    normed = _rms(exact(experts) * exact(norm_weight), eps)
    return [(out, (normed * exact(weights.astype(dtype))[..., None]).sum(-2))]


def _heads(rng: np.random.Generator, dtype: mx.Dtype) -> tuple[mx.array, Array, Array]:
    """qkvg (2, 3, 2 * 6 * 80) and its normed q (2, 3, 4, 80) and k (2, 3, 2, 80) with eps 1e-6."""
    qkvg = _normal(rng, dtype, 2, 3, 2 * 6 * 80)
    heads = exact(qkvg)[..., : 6 * 80].reshape(2, 3, 6, 80)
    normed = _rms(heads, 1e-6)
    return qkvg, normed[:, :, :4] * 0.25, normed[:, :, 4:]


_HEAD_OPTIONS = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 80, "eps": 1e-6, "query_scale": 0.25}


def _qk_norm(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    module = fresh("mlx_lm.kernels.qk_norm")
    qkvg, wanted_q, wanted_k = _heads(rng, dtype)
    q, k = module.qk_norm(qkvg, **_HEAD_OPTIONS)
    return [(q, wanted_q), (k, wanted_k)]


def _qk_norm_rope(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    module = fresh("mlx_lm.kernels.qk_norm_rope")
    qkvg, *wanted = _heads(rng, dtype)
    offsets = mx.array([5, 2])
    got = module.qk_norm_rope(qkvg, **_HEAD_OPTIONS, rope_base=100.0, offset=offsets)
    position = np.array(offsets)[:, None] + np.arange(3)  # (B, T)
    theta = position[..., None, None] * 100.0 ** -(np.arange(40) / 40)  # (B, T, 1, 40)
    c, s = np.cos(theta), np.sin(theta)
    rotated = []
    for x in wanted:
        even, odd = x[..., ::2], x[..., 1::2]
        pair = np.stack([even * c - odd * s, even * s + odd * c], axis=-1)
        rotated.append(pair.reshape(x.shape))
    return list(zip(got, rotated, strict=True))


def _rms_norm_sigmoid_gate(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    B, H, L, D, eps = 2, 3, 5, 72, 1e-6
    module = fresh("mlx_lm.kernels.rms_norm_sigmoid_gate")
    # Neither input is row contiguous, and the kernel reads them by their strides.
    x = _normal(rng, dtype, B, L, H, D).transpose(0, 2, 1, 3)
    gate = _normal(rng, dtype, B, L, 2 * H * D)[..., ::2]
    out = module.rms_norm_sigmoid_gate(x, gate, eps=eps)
    normed = _rms(exact(x), eps).transpose(0, 2, 1, 3).reshape(B, L, H * D)
    return [(out, normed * _sigmoid(exact(gate)))]


# --- experts and the rest ------------------------------------------------------------------------


def _expert_routing(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    tokens, E, K, eps = 9, 40, 6, 1e-6
    module = fresh("mlx_lm.kernels.expert_routing")
    logits, bias = _normal(rng, dtype, tokens, E), _uniform(rng, -0.1, 0.1, E)
    logits[0] = mx.zeros(E, dtype)  # ties everywhere, with the bias of the next line
    bias = mx.round(bias * 20) / 20
    chosen, weights = module.expert_routing(
        logits, bias, top_k=K, multiplier=1.5, score_eps=eps, route_scale=2.0
    )
    # The choice is the kernel's own float32: ties must be the same ties.
    x = np.array(logits.astype(mx.float32)) * np.float32(1.5)
    score = _sigmoid(x.astype(np.float64))
    biased = score.astype(np.float32) + np.array(bias)
    order = np.argsort(-biased, axis=-1, kind="stable")[:, :K]
    top = np.take_along_axis(score, order, axis=-1)
    return [
        (chosen, order.astype(np.float64)),
        (weights, top / (top.sum(-1, keepdims=True) + eps) * 2.0),
    ]


def _bitlinear(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    rows, inputs, outputs = 3, 192, 20
    module = fresh("mlx_lm.models.bitlinear_layers")
    pairs = []
    for inverted in (False, True):
        layer = module.BitLinear(inputs, outputs, bias=False, invert_weight_scales=inverted)
        codes = rng.integers(0, 3, (4, outputs // 4, inputs))
        packed = sum(codes[i] << (2 * i) for i in range(4)).astype(np.uint8)
        layer.weight_scale = mx.array([0.75]).astype(dtype)
        x = _normal(rng, dtype, rows, inputs)
        got = layer.execute_matmul_kernel(x, mx.array(packed))
        scale = 1 / 0.75 if inverted else 0.75
        pairs.append((got, exact(x) @ (codes - 1).reshape(outputs, inputs).T * scale))
    return pairs


def _residual_mix(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    blocks, tokens, D, eps = 3, 2, 1100, 1e-5
    module = fresh("mlx_lm.models.kimi_k3")
    store = module.ResidualBlocks(eps)
    for _ in range(blocks):
        store.append(_normal(rng, dtype, 1, tokens, D))
    partial, w = _normal(rng, dtype, 1, tokens, D), _normal(rng, mx.float32, D) * 0.05
    out = module._attn_res_mix(store, partial, w, eps)
    values = np.concatenate([exact(store.raw), exact(partial)[None]])
    scale = np.concatenate([exact(store.inv_rms), _inverse_rms(exact(partial), eps)[None]])
    logits = values @ exact(w) * scale
    weights = np.exp(logits - logits.max(0))
    weights /= weights.sum(0)
    return [(out, (weights[..., None] * values).sum(0))]


def _inverse_rms(x: Array, eps: float) -> Array:
    return 1 / np.sqrt((x * x).mean(-1) + eps)


def _sinkhorn(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
    module = fresh("mlx_lm.models.deepseek_v41")
    comb, eps = _uniform(rng, 0.05, 1.0, 5, 7, 4, 4), mx.array([1e-6])
    got = module._sinkhorn(comb, iters=5, eps=eps)
    wanted = exact(comb)
    wanted = wanted / (wanted.sum(-2, keepdims=True) + 1e-6)
    for _ in range(4):
        wanted = wanted / (wanted.sum(-1, keepdims=True) + 1e-6)
        wanted = wanted / (wanted.sum(-2, keepdims=True) + 1e-6)
    return [(got, wanted)]


# --- losses of two distributions: forward and, through their own vjp, backward -------------------


def log_softmax(x: Array) -> Array:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _divergence(name: str) -> Case:
    def case(rng: np.random.Generator, dtype: mx.Dtype) -> Pairs:
        module = fresh("mlx_lm.tuner.losses")
        # One whole block of 4096 values and a part of one.
        q, p = (_normal(rng, dtype, 2, 5000) for _ in range(2))
        cotangent = _uniform(rng, 0.5, 1.5, 2).astype(dtype)
        (loss,), (gradient, _) = mx.vjp(getattr(module, f"{name}_div_loss"), [q, p], [cotangent])
        log_q, log_p = log_softmax(exact(q)), log_softmax(exact(p))
        if name == "kl":
            wanted = (np.exp(log_p) * (log_p - log_q)).sum(-1)
            slope = np.exp(log_q) - np.exp(log_p)
        else:
            log_m = np.log((np.exp(log_p) + np.exp(log_q)) / 2)
            from_p, from_q = (
                (np.exp(x) * (x - log_m)).sum(-1, keepdims=True) for x in (log_p, log_q)
            )
            wanted = (from_p + from_q)[:, 0] / 2
            slope = np.exp(log_q) * (log_q - log_m - from_q) / 2
        return [(loss, wanted), (gradient, exact(cotangent)[:, None] * slope)]

    return case


CASES: dict[str, Case] = {
    "gated_delta": _gated_delta("gated_delta_kernel_unpacked"),
    "gated_delta_masked": _gated_delta("gated_delta_kernel", masked=True),
    "gated_delta_vector": _gated_delta("gated_delta_kernel", vector_gate=True),
    "gated_delta_vector_masked": _gated_delta("gated_delta_kernel", vector_gate=True, masked=True),
    "gated_delta_tree": _gated_delta("gated_delta_kernel_xtree"),
    "gated_delta_packed": _gated_delta("gated_delta_kernel"),
    "wkv7": _wkv7,
    "ssm": _ssm,
    "norm_add_norm": _norm_add_norm,
    "post_expert_norm_combine": _post_expert_norm_combine,
    "qk_norm": _qk_norm,
    "qk_norm_rope": _qk_norm_rope,
    "rms_norm_sigmoid_gate": _rms_norm_sigmoid_gate,
    "expert_routing": _expert_routing,
    "bitlinear": _bitlinear,
    "residual_mix": _residual_mix,
    "sinkhorn": _sinkhorn,
}

# These write to shared memory what other SIMD groups may not have read yet; see
# test_a_race_between_simd_groups_shows.
RACING: dict[str, Case] = {"kl": _divergence("kl"), "js": _divergence("js")}

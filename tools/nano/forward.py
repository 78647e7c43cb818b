"""nano's forward pass for training on a CPU: the numbers of mlx-lm's `qwen3_5_moe`.

Three parts differ in form from mlx-lm's, not in result: the gated delta recurrence runs in chunks
of matrix products, all experts run densely in two products, and the depthwise convolution is four
shifted multiplies. `forward(model, tokens)` reads the parameters of an mlx-lm model where they lie
(plain or with LoRA on experts).

Chunked recurrence, per head, with cumulative decay c_i inside a chunk and start state S: the
written values d solve the unit lower triangular system  d_i + beta_i sum_{j<i} (c_i/c_j) (k_i.k_j)
d_j = beta_i (v_i - c_i S k_i).
"""

import mlx.core as mx
import mlx.nn as nn

CHUNK = 16


def forward(model: nn.Module, tokens: mx.array) -> mx.array:
    """Logits (B, T, V) of `tokens` (B, T). Law: equals `model(tokens)` to float32 rounding."""
    return forward_with_balance(model, tokens)[0]


def forward_with_balance(model: nn.Module, tokens: mx.array) -> tuple[mx.array, mx.array]:
    """Logits, and the mean expert balance loss (1 when all experts are used alike)."""
    text = model.language_model
    hidden = text.model.embed_tokens(tokens)
    balance = []
    for layer in text.model.layers:
        mixer = _linear_attention if layer.is_linear else _attention
        block = layer.linear_attn if layer.is_linear else layer.self_attn
        hidden = hidden + mixer(block, layer.input_layernorm(hidden))
        added, layer_balance = _experts(layer.mlp, layer.post_attention_layernorm(hidden))
        hidden = hidden + added
        balance.append(layer_balance)
    logits = text.model.embed_tokens.as_linear(text.model.norm(hidden))
    return logits, sum(balance) / len(balance)


def _attention(block: nn.Module, x: mx.array) -> mx.array:
    return block(x, mask="causal")


def _linear_attention(block: nn.Module, x: mx.array) -> mx.array:
    B, T, _ = x.shape
    mixed = nn.silu(_shifted_convolution(block.in_proj_qkv(x), block.conv1d.weight))
    q, k, v = mx.split(mixed, [block.key_dim, 2 * block.key_dim], axis=-1)
    q = _unit(q.reshape(B, T, block.num_k_heads, -1)) * block.head_k_dim**-0.5
    k = _unit(k.reshape(B, T, block.num_k_heads, -1))
    v = v.reshape(B, T, block.num_v_heads, -1)
    beta = mx.sigmoid(block.in_proj_b(x))
    log_decay = -mx.exp(block.A_log) * nn.softplus(block.in_proj_a(x) + block.dt_bias)
    out = chunked_gated_delta(q, k, v, log_decay, beta)
    z = block.in_proj_z(x).reshape(out.shape)
    out = mx.fast.rms_norm(out, block.norm.weight, block.norm.eps) * nn.silu(z)
    return block.out_proj(out.reshape(B, T, -1))


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _shifted_convolution(x: mx.array, weight: mx.array) -> mx.array:
    """Causal depthwise convolution: x (B, T, C), weight (C, W, 1) -> (B, T, C)."""
    width, length = weight.shape[1], x.shape[1]
    padded = mx.pad(x, [(0, 0), (width - 1, 0), (0, 0)])
    return sum(padded[:, i : i + length] * weight[:, i, 0] for i in range(width))


def chunked_gated_delta(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, chunk: int = CHUNK
) -> mx.array:
    """Gated delta rule from a zero state: q, k (B, T, Hk, Dk), v (B, T, Hv, Dv), log_decay, beta
    (B, T, Hv).

    Returns (B, T, Hv, Dv). Law: equals the step-by-step recurrence for every T and chunk.
    """
    T, repeats = q.shape[1], v.shape[2] // q.shape[2]
    if repeats > 1:
        q, k = mx.repeat(q, repeats, axis=2), mx.repeat(k, repeats, axis=2)
    q, k, v = (_in_chunks(x, chunk) for x in (q, k, v))  # (B, H, n, C, D)
    g, beta = (_in_chunks(x[..., None], chunk)[..., 0] for x in (log_decay, beta))  # (B, H, n, C)

    total = mx.cumsum(g, axis=-1)
    ratio = _decay_ratios(total)
    k_t = k.swapaxes(-1, -2)
    lower = mx.tril(ratio * (k @ k_t), -1) * beta[..., None]
    solve = _inverse_of_unit_lower(lower)
    decay = mx.exp(total)[..., None]
    written = solve @ (beta[..., None] * v)  # (B, H, n, C, Dv)
    read = solve @ (beta[..., None] * decay * k)  # (B, H, n, C, Dk)
    within = ratio * (q @ k_t)
    k_end = (mx.exp(total[..., -1:] - total)[..., None] * k).swapaxes(-1, -2)
    q_start = decay * q
    kept = decay[..., -1:, :]  # (B, H, n, 1, 1)

    outputs = []
    state: mx.array | None = None  # (B, H, Dk, Dv)
    # One split, not a slice a chunk: the gradient of a slice is a whole array of zeros.
    parts = [_chunk_list(x) for x in (written, read, within, k_end, q_start, kept)]
    for values, read_n, within_n, k_end_n, q_start_n, kept_n in zip(*parts, strict=True):
        if state is None:
            out = within_n @ values
            state = k_end_n @ values
        else:
            values = values - read_n @ state
            out = within_n @ values + q_start_n @ state
            state = k_end_n @ values + kept_n * state
        outputs.append(out)
    joined = mx.concatenate(outputs, axis=2)  # (B, H, n * C, Dv)
    return joined.swapaxes(1, 2)[:, :T]


def _in_chunks(x: mx.array, chunk: int) -> mx.array:
    """(B, T, H, D) -> (B, H, n, chunk, D), padded with zeros: a zero key writes nothing."""
    B, T, H, D = x.shape
    count = -(-T // chunk)
    x = mx.pad(x, [(0, 0), (0, count * chunk - T), (0, 0), (0, 0)])
    return x.reshape(B, count, chunk, H, D).transpose(0, 3, 1, 2, 4)  # (B, H, n, C, D)


def _chunk_list(x: mx.array) -> list[mx.array]:
    """(B, H, n, C, D) -> n arrays (B, H, C, D)."""
    return [part.squeeze(2) for part in mx.split(x, x.shape[2], axis=2)]


def _decay_ratios(total: mx.array) -> mx.array:
    """exp(total_i - total_j) for i >= j, else 0; cut before exp, so nothing overflows."""
    difference = total[..., :, None] - total[..., None, :]
    return mx.tril(mx.exp(mx.minimum(difference, 0.0)))


def _inverse_of_unit_lower(lower: mx.array) -> mx.array:
    """(I + lower)^-1, lower strictly triangular, by doubling: prod (I + (-lower)^(2^i))."""
    size = lower.shape[-1]
    eye = mx.eye(size)
    power = -lower
    inverse = eye + power
    width = 2
    while width < size:
        power = power @ power
        inverse = inverse + inverse @ power
        width *= 2
    return inverse


def _experts(block: nn.Module, x: mx.array) -> tuple[mx.array, mx.array]:
    gates = mx.softmax(block.gate(x), axis=-1)  # (B, T, E)
    chosen = mx.argpartition(mx.stop_gradient(gates), kth=-block.top_k, axis=-1)[
        ..., -block.top_k :
    ]
    mask = mx.put_along_axis(mx.zeros_like(gates), chosen, mx.array(1.0), axis=-1)
    scores = gates * mask
    if block.norm_topk_prob:
        scores = scores / mx.sum(scores, axis=-1, keepdims=True)
    experts = block.switch_mlp
    count = block.num_experts
    gate_weight, up_weight, down_weight = (
        expert_weight(module) for module in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    wide = nn.silu(x @ gate_weight.reshape(-1, x.shape[-1]).T) * (
        x @ up_weight.reshape(-1, x.shape[-1]).T
    )
    weighted = wide.reshape(*x.shape[:-1], count, -1) * scores[..., None]  # (B, T, E, I)
    flat_down = down_weight.transpose(0, 2, 1).reshape(-1, x.shape[-1])  # (E * I, K)
    out = weighted.reshape(*x.shape[:-1], -1) @ flat_down
    shared = mx.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    used = mx.mean(mask, axis=(0, 1)) / block.top_k
    balance = count * mx.sum(mx.stop_gradient(used) * mx.mean(gates, axis=(0, 1)))
    return out + shared, balance


def expert_weight(module: nn.Module) -> mx.array:
    """The (E, N, K) weight of a switch layer, plain or with LoRA whose delta is added."""
    if "linear" not in module:
        return module.weight
    return module.linear.weight + module.scale * (module.lora_b @ module.lora_a)

"""The delta of one MoE-LoRA stack in training: a noisy top-k router over low-rank experts.

    g = topk_softmax(x @ router.T + softplus(x @ noise.T) * normal)      noise in training only
    delta = scale * sum_e g[e] * lora_b[e] @ (lora_a[e] @ x)

Gates act in rank space: z = A x for all experts at once, times the gates, times B packed along the
ranks. Nothing of (rows, E, N) is made.

Letters: E experts of R ranks, K input dims, N output dims, M base experts of a switch projection.
Forms, and the shapes of lora_a and lora_b:

    linear      (E, R, K)    (E, N, R)      linear and quantized bases
    shared      the same                    switch bases: each (token, base expert) row is a token
    per_expert  (M, E*R, K)  (M, N, E*R)    switch bases: a pair for each base expert, one router

The router always is (E, K). A latent stack has l in place of K and N, between two frozen
projections. Weights are float32, as are logits, gates and the result; the layer casts it once.
"""

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.adapted import Dims, check_rank, keyed_dropout
from mlxstacks.layers.gates import (
    Routing,
    balance_slopes,
    balance_sums,
    router_logits,
    top_k_softmax,
    training_logits,
)
from mlxstacks.layers.latent import LatentPair
from mlxstacks.layers.lora import draw_lora_a
from mlxstacks.layers.nullspace import latent_vectors, remove_directions
from mlxstacks.layers.settings import StackSettings
from mlxstacks.ops.expert_delta import expert_delta
from mlxstacks.ops.stack_sum import stack_sum

Form = Literal["linear", "shared", "per_expert"]

ROUTER_STD = 0.02


@dataclass(frozen=True, eq=False)
class Rows:
    """How the rows of a switch projection lie, as mlx-lm passes it; empty for a linear.

    order: (n,), where in the order of the batch each row sorted by expert was; None: not known.
    """

    indices: mx.array | None = None
    sorted_indices: bool = False
    order: mx.array | None = None

    def part(self, count: int, what: str) -> mx.array:
        """(n,): which of `count` equal parts of the batch, `what`, each sorted row belongs to.

        Raises: ValueError where the order is not known.
        """
        if self.order is None:
            raise ValueError(
                f"rows sorted by expert do not say their {what} here; attach stacks through "
                "attach_stacks, or give one sequence at a time"
            )
        return self.order // (self.order.size // count)

    def counted(self, per_token: mx.array | None, x: mx.array) -> mx.array:
        """per_token (B, T) float32 laid on the rows of x (..., K): (..., 1); ones for None.

        A token's rows share its number, so it counts alike where rows are sorted, of which it has
        one for each of its experts, and where gate_proj and up_proj see it once.
        """
        shape = (*x.shape[:-1], 1)
        if per_token is None:
            return mx.ones(shape)
        rows = x.size // x.shape[-1] // per_token.size
        flat = per_token.reshape(-1) / rows
        if self.sorted_indices:
            return flat[self.part(flat.size, "token")].reshape(shape)
        return mx.repeat(flat, rows).reshape(shape)


def form_of(dims: Dims, settings: StackSettings) -> Form:
    """The form a stack takes at a projection."""
    return "linear" if dims.base_experts is None else settings.switch_form


def packed_b(lora_b: mx.array) -> mx.array:
    """(E, N, R) -> (N, E*R), columns in the order (expert, rank)."""
    return lora_b.swapaxes(0, 1).reshape(lora_b.shape[1], -1)


class MoELoRADelta(nn.Module):
    """The trained part of a stack at one projection.

    Laws: a new one gives exactly zero; evaluation draws nothing; with one expert there is no router
    and it equals mlx-lm's LoRA.
    """

    def __init__(
        self,
        dims: Dims,
        settings: StackSettings,
        key: mx.array,
        latent: LatentPair | None = None,
    ):
        super().__init__()
        self.form = form_of(dims, settings)
        if (latent is None) != (settings.latent_dim is None):
            raise ValueError("latent_dim and a pair of latent projections come together")
        self.settings = settings
        self.latent = latent
        self._null_vectors: mx.array | None = None
        if latent is not None:
            dims = Dims(latent.dim, latent.dim, dims.base_experts)
        check_rank(settings.rank, dims)
        E, R, K, N = settings.num_experts, settings.rank, dims.input_dims, dims.output_dims
        key_a, key_router = mx.random.split(key)
        # Copies of the pair, and ranks of each: per_expert packs all experts of a stack together.
        per_expert = self.form == "per_expert"
        copies, ranks = (dims.base_experts or 1, E * R) if per_expert else (E, R)
        self.lora_a = draw_lora_a((copies, ranks, K), K, key_a)
        self.lora_b = mx.zeros((copies, N, ranks))
        if E > 1:
            self.router = ROUTER_STD * mx.random.normal((E, K), key=key_router)
            self.noise = mx.zeros((E, K))

    def _extra_repr(self) -> str:
        s = self.settings
        return f"{self.form}, {s.num_experts} experts of rank {s.rank}, top {s.top_k}"

    @property
    def has_router(self) -> bool:
        return self.settings.num_experts > 1

    @property
    def null_vectors(self) -> mx.array | None:
        """Protected directions of lora_b's output (N or latent, k), or None."""
        return self._null_vectors

    def protect(self, vectors: mx.array | None) -> None:
        """Keep the delta out of the span of orthonormal vectors (N, k); None lifts it.

        Raises: ValueError for a wrong width or columns that are not orthonormal.
        """
        if vectors is None:
            self._null_vectors = None
            return
        width = self.lora_b.shape[1] if self.latent is None else self.latent.d_out.shape[0]
        if vectors.ndim != 2 or vectors.shape[0] != width:
            raise ValueError(f"null basis: got shape {vectors.shape}, allowed is ({width}, k)")
        error = mx.max(mx.abs(vectors.T @ vectors - mx.eye(vectors.shape[1]))).item()
        if not error < 1e-4:
            raise ValueError(f"null basis: columns are not orthonormal, off by {error:.1e}")
        if self.latent is not None:
            vectors = latent_vectors(vectors, self.latent.d_out)
        self._null_vectors = vectors

    def __call__(
        self,
        x: mx.array,
        rows: Rows | None = None,
        key: mx.array | None = None,
        normal: mx.array | None = None,
        counted: mx.array | None = None,
        slopes: bool = False,
    ) -> tuple[mx.array, dict[str, mx.array] | None]:
        """The delta (..., N) float32 for x (..., K), and the balance sums (training, E > 1).

        rows: the layout of a switch projection; needed for the form per_expert.
        key: for noise and dropout of this pass. normal: (..., E), a standard normal draw to use in
        place of one from the key. Both are read in training mode only.
        counted: (B, T) float32, 0 for tokens that are padding. slopes: leave them in the sums.
        Raises: ValueError in training mode when chance is needed and there is no key.
        """
        x, rows = x.astype(mx.float32), rows or Rows()
        if self.latent is not None:
            x = x @ self.latent.d_in.T  # (..., l)
        uses_chance = self.training and key is not None
        key_noise, key_dropout = mx.random.split(key) if uses_chance else (None, None)
        gates, balance = None, None
        if self.has_router:
            if self.training and normal is None:
                normal = self.draw_noise(x, key_noise)
            in_batch = rows.counted(counted, x) if self.training else None
            routing, balance = self.route(x, normal, in_batch, slopes)
            gates = routing.gates
        if self.training:
            x = keyed_dropout(x, self.settings.dropout, key_dropout)
        delta = self._expert_sum(x, gates, rows)
        vectors = self.active_null_vectors()
        if vectors is not None:
            delta = remove_directions(delta, vectors)
        return (delta if self.latent is None else delta @ self.latent.d_out.T), balance

    def active_null_vectors(self) -> mx.array | None:
        """The directions that this pass removes: none in evaluation with `train_only`."""
        applies = self.training or self.settings.projector_mode == "folded"
        return self._null_vectors if applies else None

    def draw_noise(self, x: mx.array, key: mx.array | None) -> mx.array | None:
        """Standard normal numbers (..., E) for the rows of x; None without router_noise.

        The key comes from outside, so a checkpoint's recomputation draws the same numbers.
        """
        if not self.settings.router_noise:
            return None
        if key is None:
            raise ValueError(
                "router noise in training needs a key: call begin_step(model, key) before the "
                "forward pass, or set router_noise=False"
            )
        return mx.random.normal((*x.shape[:-1], self.settings.num_experts), key=key)

    def route(
        self,
        x: mx.array,
        normal: mx.array | None = None,
        counted: mx.array | None = None,
        slopes: bool = False,
    ) -> tuple[Routing, dict[str, mx.array] | None]:
        """Where the rows of x (..., K) float32 go, and in training the balance sums.

        x is the router's own input: of a latent stack, the latent. normal: (..., E), read in
        training; None for no noise. counted: (..., 1), 0 for rows of padding; None: there are none.
        """
        s = self.settings
        if not self.training:
            return top_k_softmax(router_logits(x, self.router), s.top_k), None
        logits, for_balance = training_logits(x, self.router, self.noise, normal)
        routing = top_k_softmax(logits, s.top_k)
        counted = mx.ones((*x.shape[:-1], 1)) if counted is None else counted
        scale = 1 / s.top_k if s.normalise_balance else 1.0
        sums = balance_sums(for_balance, routing.chosen, counted, scale)
        if slopes:
            sums["slopes"] = balance_slopes(x, logits, counted, scale, self.noise, normal)
        return routing, sums

    def _expert_sum(self, x: mx.array, gates: mx.array | None, rows: Rows) -> mx.array:
        scale = self.settings.scale
        if self.form == "per_expert":
            if rows.indices is None:
                raise ValueError("a stack of the form per_expert needs the indices of its rows")
            return expert_delta(
                x, self.lora_a, self.lora_b, rows.indices, gates, scale, rows.sorted_indices
            )
        a = self.lora_a.reshape(-1, self.lora_a.shape[-1])  # (E*R, K)
        b = packed_b(self.lora_b)  # (N, E*R)
        if gates is None:
            return scale * ((x @ a.T) @ b.T)
        return stack_sum(x, a, b, gates[..., None, :], scale)

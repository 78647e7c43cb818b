"""Inputs for the gated delta rule, and the rule one token at a time in NumPy float64.

Its gradients are worked out by hand.

Written from the recurrence alone; shares nothing with the code it judges. Array names and shapes
are those of `mlxstacks.ops.gated_delta.gated_delta_update`.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")


@dataclass(frozen=True)
class Options:
    """What `gated_delta_update` takes besides arrays."""

    lower_bound: float | None = None
    allow_neg_eigval: bool = False


# Where a + dt_bias lies: softplus of it times exp(A_log) in 0.5 to 8 is minus the log gate.
GATES = {
    "ordinary": (-3.0, 3.0),
    "slow": (-7.0, -5.0),
    "near one": (-16.0, -8.0),
    "near zero": (1.0, 4.0),
    "saturated both ways": (-16.0, 80.0),
}


PLAIN = Options()


@dataclass(frozen=True)
class Case:
    """Sizes and kind of one input."""

    B: int = 2
    T: int = 37
    Hk: int = 2
    groups: int = 2
    Dk: int = 8
    Dv: int = 5
    gates: str = "ordinary"
    vector: bool = False
    masked: bool = False
    equal_keys: bool = False
    dtype: mx.Dtype = mx.float32
    options: Options = PLAIN
    seed: int = 0

    def arrays(self) -> list[mx.array]:
        """q, k, v, a, b, A_log, dt_bias, state, as a model has them."""
        random = np.random.default_rng(self.seed)
        Hv = self.Hk * self.groups
        q, k = random.standard_normal((2, self.B, self.T, self.Hk, self.Dk))
        if self.equal_keys:
            k = np.broadcast_to(k[:, :1], k.shape)
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        per_head = (Hv, self.Dk) if self.vector else (Hv,)
        a = random.uniform(*GATES[self.gates], (self.B, self.T, *per_head))
        b = random.standard_normal((self.B, self.T, Hv)) * 3
        rate = np.log(random.uniform(0.5, 8.0, (Hv, 1) if self.vector else Hv))
        v = random.standard_normal((self.B, self.T, Hv, self.Dv))
        bias = random.standard_normal(per_head) * 0.1
        state = random.standard_normal((self.B, Hv, self.Dv, self.Dk))
        tokens = [mx.array(x.astype(np.float32)).astype(self.dtype) for x in (q, k, v, a, b)]
        return [*tokens, *(mx.array(x.astype(np.float32)) for x in (rate, bias, state))]

    def mask(self) -> mx.array | None:
        random = np.random.default_rng(self.seed + 1)
        return mx.array(random.random((self.B, self.T)) < 0.7) if self.masked else None

    def cotangents(self) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(self.seed + 2)
        Hv = self.Hk * self.groups
        dy = random.standard_normal((self.B, self.T, Hv, self.Dv)).astype(np.float32)
        dend = random.standard_normal((self.B, Hv, self.Dv, self.Dk)).astype(np.float32)
        return dy, dend


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -x))


def gates_of(a, A_log, dt_bias, options: Options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gates g, and the derivatives of log g by (a + dt_bias) and by A_log."""
    rate, x = np.exp(A_log), a + dt_bias
    if options.lower_bound is None:
        log = -rate * np.logaddexp(0.0, x)
        return np.exp(log), -rate * sigmoid(x), log
    bound, s = options.lower_bound, sigmoid(rate * x)
    slope = bound * s * sigmoid(-rate * x)
    return np.exp(bound * s), slope * rate, slope * rate * x


def loop(arrays: list[np.ndarray], mask: np.ndarray | None, dy, dend, options: Options):
    """(y, end state), and gradients in the order of NAMES, for cotangents dy and dend."""
    q, k, v, a, b, A_log, dt_bias, start = (x.astype(np.float64) for x in arrays)
    groups = v.shape[2] // q.shape[2]
    q, k = (np.repeat(x, groups, axis=2) for x in (q, k))
    gates, by_input, by_rate = gates_of(a, A_log, dt_bias, options)
    g = gates if a.ndim == 4 else gates[..., None]
    top = 2.0 if options.allow_neg_eigval else 1.0
    beta = top * sigmoid(b)
    kept = np.ones(q.shape[:2], bool) if mask is None else mask

    states, ys = [start], []
    for t in range(q.shape[1]):
        _, _, _, after = _step(states[-1], g[:, t], k[:, t], v[:, t], beta[:, t])
        ys.append(np.einsum("bhvk,bhk->bhv", after, q[:, t]))
        states.append(np.where(kept[:, t, None, None, None], after, states[-1]))

    dq, dk, dv, dg, dbeta = (np.zeros_like(x) for x in (q, k, v, np.broadcast_to(g, k.shape), b))
    dS = dend.astype(np.float64)
    for t in reversed(range(q.shape[1])):
        here = kept[:, t, None, None, None]
        decayed, error, write, after = _step(states[t], g[:, t], k[:, t], v[:, t], beta[:, t])
        dq[:, t] = np.einsum("bhvk,bhv->bhk", after, dy[:, t])
        dafter = dy[:, t, :, :, None] * q[:, t, :, None, :] + np.where(here, dS, 0.0)
        dwrite = np.einsum("bhvk,bhk->bhv", dafter, k[:, t])
        derror = beta[:, t, :, None] * dwrite
        dk[:, t] = np.einsum("bhvk,bhv->bhk", dafter, write)
        dk[:, t] -= np.einsum("bhvk,bhv->bhk", decayed, derror)
        dv[:, t], dbeta[:, t] = derror, (dwrite * error).sum(-1)
        ddecayed = dafter - derror[..., None] * k[:, t, :, None, :]
        dg[:, t] = (states[t] * ddecayed).sum(-2)
        dS = ddecayed * g[:, t, :, None, :] + np.where(here, 0.0, dS)

    dlog = dg * g if a.ndim == 4 else (dg * g).sum(-1)
    da, drate = dlog * by_input, dlog * by_rate
    db = dbeta * beta * (1.0 - beta / top)
    dq, dk = (x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3) for x in (dq, dk))
    sums = [_sum_to(drate, A_log.shape), _sum_to(da, dt_bias.shape)]
    return (np.stack(ys, axis=1), states[-1]), [dq, dk, dv, da, db, *sums, dS]


def _step(state, g, k, v, beta):
    """Decayed state, error, write and new state of one token."""
    decayed = state * g[:, :, None, :]
    error = v - np.einsum("bhvk,bhk->bhv", decayed, k)
    write = beta[..., None] * error
    return decayed, error, write, decayed + write[..., None] * k[:, :, None, :]


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Undo broadcasting: sum `x` down to `shape`."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and x.shape[i] > 1)
    return x.sum(axis=axes, keepdims=True)


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """|got - expected| / |expected|, where |expected| is more than what gates of e^-60 leave.

    Such gates count as zero in chunks, and as denormal numbers, or zero, in float32.
    """
    difference, size = (float(np.linalg.norm(x)) for x in (got - expected, expected))
    return difference / max(size, 1e-20)

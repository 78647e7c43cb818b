"""Decoding with stacks beside decoding without: one token a step, through mlx-lm's generate_step.

    python -m benchmarks.bench_decode [--model dense|moe] [--rounds 9] [--tokens 32]
    python -m benchmarks.bench_decode --preset gpu            24 layers, hidden 2048, 4 bits

Arms, all on the very same base weights, in one process, taking turns in rotating order; a round's
ratio is taken within the round:

    base             the model as mlx-lm builds it
    places           wrapped projections, no stack active
    one stack        E=4 experts of rank 16, top 2, at every projection
    two stacks       two resident, both active
    two of ten       ten resident, two active

Bars: one stack at 0.9 of base's speed on a CPU (`cpu`: 4 layers, hidden 1024, float32), at 0.85 on
a GPU (`gpu`); two of ten cost what two cost. The prompt is not timed. Process time is the sum over
threads, wall time what one waits: on a busy machine the first is the steadier.

The numbers are compared first, in float32: decoding token by token against one pass over the same
tokens (two ways through the layers) and, where kernels run, against MLX's operations; and two of
ten against two.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn

from benchmarks.timing import Spread, machine, spread
from mlxstacks import base_model
from mlxstacks.layers.attach import attach_stacks
from mlxstacks.layers.moe_lora import form_of
from mlxstacks.layers.packed import FrozenStack, Segment, StackShape, pack_all
from mlxstacks.layers.selection import StackId, routed
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import StackedLayer, set_mode, stacked_layers
from mlxstacks.layers.targets import find_targets
from mlxstacks.ops import kernels

PROMPT = 4
RESIDENT, ACTIVE = 10, 2
SETTINGS = StackSettings(rank=16, num_experts=4, experts_per_token=2)
BARS = {"cpu": 0.9, "gpu": 0.85}
CPU = {"layers": 4, "hidden": 1024, "intermediate": 2816, "vocab": 32000, "bits": 0}
GPU = {"layers": 24, "hidden": 2048, "intermediate": 5632, "vocab": 32000, "bits": 4}


@dataclass(frozen=True)
class Arm:
    """A model that is ready to decode, and what makes it so again after another arm ran."""

    model: nn.Module
    prepare: Callable[[], None]


def dense_config(size: argparse.Namespace) -> dict[str, Any]:
    heads = max(1, size.hidden // 64)
    return {
        "model_type": "llama",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": size.vocab,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def moe_config(size: argparse.Namespace) -> dict[str, Any]:
    """The hybrid of Qwen3.5: three gated-delta layers to one of attention; 32 experts, top 4."""
    text = {
        "model_type": "qwen3_5_moe_text",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "full_attention_interval": 4,
        "num_attention_heads": max(1, size.hidden // 128),
        "num_key_value_heads": max(1, size.hidden // 512),
        "head_dim": 128,
        "linear_num_key_heads": max(1, size.hidden // 128),
        "linear_num_value_heads": max(1, size.hidden // 64),
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": size.hidden // 2,
        "shared_expert_intermediate_size": size.hidden // 2,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
    }
    return {"model_type": "qwen3_5_moe", "text_config": text}


def build(size: argparse.Namespace, dtype: mx.Dtype, weights: Any = None) -> nn.Module:
    """The base, with `weights` of another one in place of its own."""
    config = (dense_config if size.model == "dense" else moe_config)(size)
    mx.random.seed(0)
    model = base_model.build_model(config)
    if size.bits:
        base_model.quantize(model, config, size.bits)
    base_model.cast(model, dtype)
    if weights is not None:
        model.update(weights)
    model.eval()
    mx.eval(model.parameters())
    return model


def normal(seed: int, shape: tuple[int, ...], std: float, dtype: mx.Dtype) -> mx.array:
    return (std * mx.random.normal(shape, key=mx.random.key(seed))).astype(dtype)


def random_stacks(layer: StackedLayer, place: int, dtype: mx.Dtype, form: str) -> list[FrozenStack]:
    """RESIDENT stacks of random numbers for a projection, of domains `domain0` and on."""
    dims, s = layer.dims, SETTINGS.model_copy(update={"switch_form": form})
    shape = StackShape(form_of(dims, s), s.num_experts, s.rank, s.top_k, s.scale)
    copies, ranks = s.num_experts, s.rank
    if shape.form == "per_expert":
        copies, ranks = dims.base_experts or 1, shape.ranks
    stacks = []
    for index in range(RESIDENT):
        # Those that are not served only have to be there: they may hold the numbers of others.
        seed = 3 * (ACTIVE * place + index % ACTIVE)
        a = normal(seed, (copies, ranks, dims.input_dims), dims.input_dims**-0.5, dtype)
        b = normal(seed + 1, (copies, dims.output_dims, ranks), 0.02, dtype)
        router = normal(seed + 2, (s.num_experts, dims.input_dims), 0.02, mx.float32)
        stack_id = StackId(f"stack{index}", f"domain{index}")
        stacks.append(FrozenStack(stack_id, shape, a, b, router))
    return stacks


def make_arms(size: argparse.Namespace, dtype: mx.Dtype, served: mx.Dtype | None) -> dict[str, Arm]:
    """The arms by name. served: what stacks, stored as float16, are widened to."""
    plain = build(size, dtype)
    weights = plain.parameters()
    few, many = (build(size, dtype, weights) for _ in range(2))
    packed: dict[str, list[tuple[Segment, ...]]] = {"places": [], "one stack": [], "two stacks": []}
    for model in (few, many):
        attach_stacks(model, find_targets(model))
    layers = [[layer for _, layer in stacked_layers(model)] for model in (few, many)]
    for place, (guest, owner) in enumerate(zip(*layers, strict=True)):
        stacks = random_stacks(guest, place, mx.float16, size.form)
        for name, count in (("places", 0), ("one stack", 1), ("two stacks", ACTIVE)):
            packed[name].append(pack_all(stacks[:count], served))
        owner.set_stacks(stacks)
    chosen = [f"domain{index}" for index in range(ACTIVE)]
    set_mode(many, routed(chosen, [1.0] * ACTIVE), served)

    def install(name: str) -> Callable[[], None]:
        def prepare() -> None:
            for layer, segments in zip(layers[0], packed[name], strict=True):
                layer.install(segments)

        return prepare

    arms = {"base": Arm(plain, lambda: None)}
    arms |= {name: Arm(few, install(name)) for name in packed}
    return arms | {"two of ten": Arm(many, lambda: None)}


def check(arms: Mapping[str, Arm], tolerance: float) -> dict[str, float]:
    """Largest differences of logits, to their size. Raises: AssertionError for one too large."""
    tokens = mx.arange(1, 9)[None]
    off, whole_of = {}, {}
    for name, arm in arms.items():
        arm.prepare()
        whole_of[name] = whole = arm.model(tokens).astype(mx.float32)
        mx.eval(whole)
        by_kernels = one_by_one(arm.model, tokens)
        off[f"{name}, token by token"] = relative(by_kernels, whole)
        if kernels.backend():
            with patch.object(kernels, "use_kernel", return_value=False):
                off[f"{name}, kernels"] = relative(by_kernels, one_by_one(arm.model, tokens))
    off["two of ten, to two stacks"] = relative(whole_of["two of ten"], whole_of["two stacks"])
    for name in ("one stack", "two stacks"):
        # Stacks that did nothing would be cheap.
        assert relative(whole_of[name], whole_of["base"]) > 0.001, f"{name} changes nothing"
    wrong = [f"{name} is off by {error:.1e}" for name, error in off.items() if error > tolerance]
    assert not wrong, "; ".join(wrong)
    return off


def one_by_one(model: nn.Module, tokens: mx.array) -> mx.array:
    """Logits of tokens that come one at a time, through a cache."""
    cache = base_model.make_prompt_cache(model)
    steps = [model(tokens[:, i : i + 1], cache=cache) for i in range(tokens.size)]
    logits = mx.concatenate(steps, axis=1).astype(mx.float32)
    mx.eval(logits)
    return logits


def relative(got: mx.array, wanted: mx.array) -> float:
    return (mx.max(mx.abs(got - wanted)) / mx.max(mx.abs(wanted))).item()


def decode(model: nn.Module, tokens: int) -> tuple[float, float]:
    """Seconds a token, wall and process; the prompt and the first token do not count."""
    from mlx_lm.generate import generate_step

    cache = base_model.make_prompt_cache(model)
    steps = generate_step(mx.arange(PROMPT), model, max_tokens=tokens + 2, prompt_cache=cache)
    next(steps)
    next(steps)
    wall, process = time.perf_counter(), time.process_time()
    for _ in range(tokens):
        next(steps)
    spent = (time.perf_counter() - wall) / tokens, (time.process_time() - process) / tokens
    steps.close()
    mx.synchronize()
    return spent


def measure(arms: Mapping[str, Arm], rounds: int, tokens: int) -> dict[str, list[list[float]]]:
    """Seconds a token [wall, process] of every arm and round; a first round does not count."""
    taken: dict[str, list[list[float]]] = {name: [] for name in arms}
    names = list(arms)
    for index in range(rounds + 1):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            arms[name].prepare()
            spent = decode(arms[name].model, tokens)
            if index:
                taken[name].append(list(spent))
    return taken


def shares(
    taken: Mapping[str, Sequence[Sequence[float]]], arm: str, beside: str, clock: int
) -> Spread:
    """Speed of an arm as a share of another's, round by round."""
    pairs = zip(taken[beside], taken[arm], strict=True)
    return spread([other[clock] / own[clock] for other, own in pairs])


def table(taken: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Print a row an arm; the same as numbers."""
    print("| arm | wall ms a token | process ms | speed, wall (p20 to p80) | speed, process |")
    print("|---|---|---|---|---|")
    rows = {}
    for name, times in taken.items():
        wall, process = (1e3 * spread([t[clock] for t in times]).median for clock in (0, 1))
        by_wall, by_process = (shares(taken, name, "base", clock) for clock in (0, 1))
        rows[name] = {
            "wall_ms": wall, "process_ms": process, "share_wall": by_wall.median,
            "share_wall_p20": by_wall.p20, "share_wall_p80": by_wall.p80,
            "share_process": by_process.median, "share_process_p20": by_process.p20,
            "share_process_p80": by_process.p80,
        }  # fmt: skip
        print(
            f"| {name} | {wall:.2f} | {process:.2f} | {by_wall.median:.3f} ({by_wall.p20:.3f} to "
            f"{by_wall.p80:.3f}) | {by_process.median:.3f} ({by_process.p20:.3f} to "
            f"{by_process.p80:.3f}) |"
        )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=("cpu", "gpu"), default="cpu", help="sizes and device")
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--form", choices=("shared", "per_expert"), default="shared")
    for name in CPU:
        parser.add_argument(f"--{name}", type=int, help=f"cpu {CPU[name]}, gpu {GPU[name]}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=32)
    size = parser.parse_args()
    for name, value in (CPU if size.preset == "cpu" else GPU).items():
        if getattr(size, name) is None:
            setattr(size, name, value)
    return size


def main() -> None:
    size = arguments()
    head = {"benchmark": "decode", "machine": machine(), "size": vars(size)}
    on_gpu = size.preset == "gpu"
    if on_gpu and mx.default_device().type != mx.DeviceType.gpu:
        print(f"no GPU: the bar of {BARS['gpu']} is not measured")
        print(json.dumps(head | {"result": "not measured"}))
        return
    if not on_gpu:
        mx.set_default_device(mx.cpu)
    # A GPU's matrix units shorten float32, and the random stacks amplify it.
    off = check(make_arms(size, mx.float32, mx.float32), 1e-2 if size.bits else 1e-4)
    arms = make_arms(size, mx.bfloat16 if on_gpu else mx.float32, None if on_gpu else mx.float32)
    taken = measure(arms, size.rounds, size.tokens)
    rows = table(taken)
    to_two = [shares(taken, "two of ten", "two stacks", clock) for clock in (0, 1)]
    print(f"two of ten, to two stacks: {to_two[0].median:.3f} wall, {to_two[1].median:.3f} process")
    result = {
        "off": off, "arms": rows, "bar": BARS[size.preset],
        "two_of_ten_to_two_wall": to_two[0].median, "two_of_ten_to_two_process": to_two[1].median,
        "peak_bytes": mx.get_peak_memory(), "device": str(mx.default_device()),
    }  # fmt: skip
    print(json.dumps(head | {"result": result}))


if __name__ == "__main__":
    main()

"""Adapter layers beside what they replace: packed stacks and the loop, MoE-LoRA and one LoRA.

    python -m benchmarks.bench_layers [--rounds 15]

One 1024 x 1024 linear, 256 tokens, float32; stacks of E=4 experts, rank 16, top-2.

packed: ten frozen stacks in one pass, beside three loops over them: as published (every expert's
output made in full, then gated), the same in the best layout found, and with gates in rank space
as our layers have them. Bar: at most a fifth of the published loop, base projection included on
both sides.
moe_lora: forward and backward in training (noise, balance loss) beside one LoRA of as many
parameters. Bar: at most 1.25 of it.

Forms take turns; each is checked against the others before it is timed. Process time is the sum
over threads, wall time what one waits.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping

import mlx.core as mx
import mlx.nn as nn

from benchmarks.timing import machine, spread
from mlxstacks.layers.adapted import Dims, begin_step, take_balance
from mlxstacks.layers.gates import router_logits, top_k_softmax
from mlxstacks.layers.latent import full_parameters
from mlxstacks.layers.lora import LoRALinear
from mlxstacks.layers.moe_lora import Rows
from mlxstacks.layers.packed import FrozenStack, PackedStacks, StackShape
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.settings import LoRASettings, StackSettings
from mlxstacks.layers.stacked import StackedLayer

WIDTH, TOKENS, STACKS = 1024, 256, 10
SETTINGS = StackSettings(rank=16, num_experts=4, experts_per_token=2)


def normal(seed: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def linear() -> nn.Linear:
    base = nn.Linear(WIDTH, WIDTH, bias=False)
    base.weight = WIDTH**-0.5 * normal(0, WIDTH, WIDTH)
    return base


def random_stack(seed: int) -> FrozenStack:
    s = SETTINGS
    shape = StackShape("linear", s.num_experts, s.rank, s.top_k, s.scale)
    a = WIDTH**-0.5 * normal(3 * seed + 1, s.num_experts, s.rank, WIDTH)
    b = 0.02 * normal(3 * seed + 2, s.num_experts, WIDTH, s.rank)
    router = 0.02 * normal(3 * seed + 3, s.num_experts, WIDTH)
    return FrozenStack(StackId(f"s{seed}", "bench"), shape, a, b, router)


def gates_of(stack: FrozenStack, x: mx.array) -> mx.array:
    """(T, E)."""
    assert stack.router is not None
    return top_k_softmax(router_logits(x, stack.router), stack.shape.top_k).gates


def published_stack(stack: FrozenStack, x: mx.array) -> mx.array:
    """One stack as published: every expert's output in full, (T, E, N), then gated."""
    middle = mx.einsum("erk,tk->ter", stack.lora_a, x)
    outputs = mx.einsum("enr,ter->ten", stack.lora_b, middle)
    return stack.shape.scale * mx.sum(gates_of(stack, x)[..., None] * outputs, axis=1)


def experts_first_stack(stack: FrozenStack, x: mx.array) -> mx.array:
    """The same in the layout that suits batched products best, (E, T, N)."""
    outputs = (x @ stack.lora_a.swapaxes(-1, -2)) @ stack.lora_b.swapaxes(-1, -2)
    return stack.shape.scale * mx.sum(gates_of(stack, x).T[..., None] * outputs, axis=0)


def interleave(
    forms: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, dict[str, float]]:
    """Median, p20 and p80 of each form in ms, wall and process; they take turns, each round begins
    with another one, and the first round does not count.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    names = list(forms)
    for index in range(rounds + 1):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            wall, process = time.perf_counter(), time.process_time()
            mx.eval(forms[name]())
            spent = (time.perf_counter() - wall, time.process_time() - process)
            if index:
                times[name].append(spent)
    result = {}
    for name, taken in times.items():
        wall_ms, process_ms = (spread([1e3 * t[i] for t in taken]) for i in (0, 1))
        result[name] = {"wall_ms": wall_ms.median, "wall_p20_ms": wall_ms.p20,
                        "wall_p80_ms": wall_ms.p80, "process_ms": process_ms.median}  # fmt: skip
    return result


def packed_forms() -> dict[str, Callable[[], mx.array]]:
    base, x = linear(), normal(99, TOKENS, WIDTH)
    stacks = [random_stack(seed) for seed in range(STACKS)]
    layer = StackedLayer(base)
    layer.set_stacks(stacks)
    layer.eval()
    single = {stack.id.name: PackedStacks() for stack in stacks}
    for stack in stacks:
        single[stack.id.name].replace_all([stack])

    def loop(delta: Callable[[FrozenStack], mx.array]) -> Callable[[], mx.array]:
        def run() -> mx.array:
            y = base(x)
            for stack in stacks:
                y = y + delta(stack)
            return y

        return run

    return {
        "base alone": lambda: base(x),
        "loop as published": loop(lambda stack: published_stack(stack, x)),
        "loop, experts first": loop(lambda stack: experts_first_stack(stack, x)),
        "loop in rank space": loop(lambda stack: single[stack.id.name](x, Rows())),
        "packed": lambda: layer(x),
    }


def check_equal(forms: Mapping[str, Callable[[], mx.array]]) -> None:
    wanted = forms["loop as published"]()
    for name in ("loop, experts first", "loop in rank space", "packed"):
        error = mx.max(mx.abs(forms[name]() - wanted)) / mx.max(mx.abs(wanted))
        assert error.item() < 1e-5, f"{name} is off by {error.item():.1e}"


def training_forms() -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Forward and backward of a squared error, gradients of x and of the adapter."""
    x, goal = normal(98, TOKENS, WIDTH), normal(97, TOKENS, WIDTH)
    dims = Dims(WIDTH, WIDTH, None)
    parameters = full_parameters([dims], SETTINGS.num_experts, SETTINGS.rank)
    rank = round(parameters / (2 * WIDTH))
    lora = LoRALinear(linear(), LoRASettings(rank=rank), mx.random.key(1))
    lora.linear.freeze()
    stack = StackedLayer(linear())
    active = stack.add_active(SETTINGS, mx.random.key(2))
    for module in (lora, active):
        module.lora_b = 0.02 * normal(5, *module.lora_b.shape)

    def step(layer: nn.Module, forward: Callable[[mx.array], mx.array]) -> Callable[[], object]:
        def loss(parameters: dict, x: mx.array) -> mx.array:
            layer.update(parameters)
            return forward(x)

        gradient = mx.value_and_grad(loss, argnums=(0, 1))
        trained = layer.trainable_parameters()
        return lambda: gradient(trained, x)

    def lora_loss(x: mx.array) -> mx.array:
        return mx.mean((lora(x) - goal) ** 2)

    def stack_loss(x: mx.array) -> mx.array:
        begin_step(stack, mx.random.key(3))
        return mx.mean((stack(x) - goal) ** 2) + 0.01 * take_balance(stack).total

    sizes = {"moe_lora": sum(p.size for p in active.parameters().values()),
             "lora": lora.lora_a.size + lora.lora_b.size, "lora_rank": rank}  # fmt: skip
    return {"one LoRA": step(lora, lora_loss), "MoE-LoRA": step(stack, stack_loss)}, sizes


def check_training_equal() -> None:
    """The two layers agree where they are the same thing: one expert, and so no router."""
    stack = StackedLayer(linear())
    settings = StackSettings(rank=16, num_experts=1)
    active = stack.add_active(settings, mx.random.key(2))
    active.lora_b = 0.02 * normal(5, *active.lora_b.shape)
    lora = LoRALinear(stack.linear, LoRASettings(rank=16, scale_rule="rslora"), mx.random.key(0))
    lora.lora_a, lora.lora_b = active.lora_a[0].T, active.lora_b[0].T
    x = normal(98, TOKENS, WIDTH)
    wanted = lora(x)
    error = mx.max(mx.abs(stack(x) - wanted)) / mx.max(mx.abs(wanted))
    assert error.item() < 1e-5, f"one expert is off by {error.item():.1e} from LoRA"


def table(title: str, rows: Mapping[str, Mapping[str, float]], beside: str) -> None:
    print(f"{title}\n| form | wall ms (p20 to p80) | process ms | wall, to {beside} |")
    print("|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['wall_ms']:.2f} ({row['wall_p20_ms']:.2f} to "
            f"{row['wall_p80_ms']:.2f}) | {row['process_ms']:.2f} | "
            f"{row['wall_ms'] / rows[beside]['wall_ms']:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    mx.set_default_device(mx.cpu)
    forms = packed_forms()
    check_equal(forms)
    packed = interleave(forms, rounds)
    check_training_equal()
    steps, sizes = training_forms()
    training = interleave(steps, rounds)
    table(f"{STACKS} stacks, {TOKENS} tokens", packed, "loop as published")
    table(f"forward and backward, {sizes}", training, "one LoRA")
    ratios = {
        f"packed_to_{name}_{kind}": packed["packed"][kind] / packed[form][kind]
        for name, form in (("published_loop", "loop as published"),
                           ("experts_first_loop", "loop, experts first"),
                           ("rank_space_loop", "loop in rank space"))
        for kind in ("wall_ms", "process_ms")
    }  # fmt: skip
    for kind in ("wall_ms", "process_ms"):
        ratios[f"moe_lora_to_lora_{kind}"] = training["MoE-LoRA"][kind] / training["one LoRA"][kind]
    bars = {"packed_to_published_loop_wall_ms": 0.2, "moe_lora_to_lora_wall_ms": 1.25}
    result = {"packed": packed, "training": training, "parameters": sizes, "ratios": ratios,
              "bars": bars}  # fmt: skip
    print(json.dumps({"benchmark": "layers", "machine": machine(), "result": result}))


if __name__ == "__main__":
    main()

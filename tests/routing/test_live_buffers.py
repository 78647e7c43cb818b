"""Live buffers while a model with routed stacks writes: thousands of tokens add none.

A path that leaks one buffer a token ends at Metal's limit of 499,000. The allocator itself is
counted, in a process of its own; without a C++ compiler there is nothing to count with.

Run: pytest tests/routing/test_live_buffers.py
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.conftest import SOAK
from tests.counting import Counter, available, counted

SKIPPED = 64
READINGS = 32  # at either end of a run


def nano_with_stacks(form: str) -> Any:
    """nano as a routed chat serves it on a CPU: two of three stacks, at all projections."""
    import mlxstacks
    from mlxstacks import base_model
    from mlxstacks.layers.attach import add_active, attach_stacks
    from mlxstacks.layers.freezing import freeze_active
    from mlxstacks.layers.selection import routed
    from mlxstacks.layers.settings import StackSettings
    from mlxstacks.layers.stacked import set_mode, stacked_layers
    from mlxstacks.layers.targets import find_targets
    from mlxstacks.training.modes import prepare_base

    assets = Path(mlxstacks.__file__).parent / "assets"
    model, _, _ = base_model.load(assets / "nano" / "model")
    body = getattr(model, "language_model", model).model
    body.layers = body.layers[:3]  # recurrent, recurrent, attention, as the others are too
    prepare_base(model, "float32", [])
    attach_stacks(model, find_targets(model))
    settings = StackSettings(rank=4, num_experts=4, switch_form=form)
    for index in range(3):
        add_active(model, settings, mx.random.key(index))
        for place, (_, layer) in enumerate(stacked_layers(model)):
            if layer.active is not None:
                key = mx.random.key(1000 * index + place)
                layer.active.lora_b = 0.01 * mx.random.normal(layer.active.lora_b.shape, key=key)
        freeze_active(model, f"stack{index}", f"domain{index}")
    model.eval()
    set_mode(model, routed(["domain0", "domain1", "domain2"], [0.7, 0.05, 0.4], 0.1), mx.float32)
    mx.eval(model.parameters())
    return model


def written(model: Any, tokens: int) -> Iterator[int]:
    """Tokens, one after the other, through a prompt cache as a chat keeps it."""
    from mlx_lm.generate import generate_step

    from mlxstacks import base_model

    cache = base_model.make_prompt_cache(model)
    steps = generate_step(mx.arange(1, 9), model, max_tokens=tokens, prompt_cache=cache)
    for token, _ in steps:
        yield token


def live_while_writing(model: Any, tokens: int, counter: Counter) -> list[int]:
    """Live buffers after every token, once the one under way has ended too."""
    live = []
    for _ in written(model, tokens):
        mx.synchronize()
        live.append(counter.live)
    return live


def main() -> None:
    """The counting process: [form, tokens] -> most live buffers at the begin and at the end."""
    counter = Counter()
    for form, tokens in json.load(sys.stdin):
        model = nano_with_stacks(form)
        live = live_while_writing(model, tokens, counter)
        first, last = live[SKIPPED : SKIPPED + READINGS], live[-READINGS:]
        print(json.dumps({"first": max(first), "last": max(last), "most": max(live[SKIPPED:])}))


@pytest.mark.skipif(not available(), reason="no C++ compiler, or not Linux")
def test_live_buffers_do_not_grow_with_tokens(campaign: Callable[[int], range]) -> None:
    # 300 show a leak of one buffer in 50 tokens.
    tokens = len(campaign(10_000)) if SOAK else 300
    runs = [["shared", tokens], ["per_expert", max(200, tokens // 10)]]
    for run, result in zip(runs, counted("tests.routing.test_live_buffers", runs), strict=True):
        # Readings differ by what a step has in flight; a leak of one a token would be hundreds.
        assert result["last"] <= result["first"] + 4, (run, result)
        assert result["most"] <= result["first"] + 100, (run, result)


if __name__ == "__main__":
    main()

"""A tiny Qwen3.5 mixture in which one layer's router prefers an expert for marked tokens, and data.

Token t and t + 30 are the same but for one direction d of their embedding. Every router is blind to
d, except the planted layer's, where d pushes the planted expert: prompts of marked tokens go there,
and to nothing else than their unmarked twins do in other layers.
"""

import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from mlxstacks import base_model
from tests.tiny_models import qwen_moe_config, write_tokenizer

LAYERS, EXPERTS, TWIN = 4, 8, 30
PLANTED_LAYER, PLANTED_EXPERT = 3, 5  # the last: later ones would see where tokens went


def write_planted(directory: Path, strength: float = 3.0) -> Path:
    """A float32 checkpoint. strength 0: nothing is planted, marks are seen by no router."""
    config = qwen_moe_config(num_experts=EXPERTS)
    config["text_config"]["num_hidden_layers"] = LAYERS
    mx.random.seed(11)
    model: Any = base_model.build_model(config)
    base_model.cast(model, mx.float32)
    hidden = config["text_config"]["hidden_size"]
    d = mx.zeros(hidden)
    d[0] = 1.0
    blind = 1 - d
    embedding = mx.random.normal((config["text_config"]["vocab_size"], hidden)) * blind
    first = embedding[65 : 65 + TWIN]  # letters of the byte tokenizer
    embedding[65 + TWIN : 65 + 2 * TWIN] = first + 8 * d
    for module in model.modules():
        # Projections and experts do not read d, so nothing else can tell a token from its twin.
        reads = isinstance(module, nn.Linear) or hasattr(module, "num_experts")
        if reads and "weight" in module and module.weight.shape[-1] == hidden:
            module.weight = module.weight * blind
    inner = model.language_model.model
    inner.embed_tokens.weight = embedding
    for number, layer in enumerate(inner.layers):
        router = mx.random.normal((EXPERTS, hidden)) * blind
        if number == PLANTED_LAYER:
            router = router + strength * mx.eye(EXPERTS)[PLANTED_EXPERT][:, None] * d
        layer.mlp.gate.weight = router
    base_model.save_model(directory, model, config)
    write_tokenizer(directory)
    return directory


def write_prompts(
    directory: Path, marked: tuple[str, ...] = ("marked",), groups: tuple[str, ...] = (
        "marked", "plain", "other", "more"), each: int = 16,
) -> Path:  # fmt: skip
    """A JSONL file a group: random letters; of a marked group, their marked twins.

    The seed is one of the 19 in 20 with which prompts of one kind are not called different; how
    often they are is what test_unequal_lengths_are_no_difference_of_routing counts.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in groups:
        chance = random.Random(f"1/{name}")
        lines = []
        for number in range(each):
            codes = [65 + chance.randrange(TWIN) for _ in range(chance.randrange(20, 40))]
            if name in marked:
                codes = [code + TWIN for code in codes]
            lines.append(json.dumps({"id": f"{name}-{number}", "text": "".join(map(chr, codes))}))
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


def write_mixed(directory: Path, each: int = 16) -> Path:
    """The same prompts, marked and plain ones, under labels of chance."""
    source = write_prompts(directory / "source", each=2 * each)
    lines = [line for name in ("marked", "plain")
             for line in (source / f"{name}.jsonl").read_text().splitlines()]  # fmt: skip
    random.Random("chance").shuffle(lines)
    for number in range(4):
        own = lines[number * each : (number + 1) * each]
        (directory / f"chance-{number}.jsonl").write_text("\n".join(own) + "\n")
    return directory

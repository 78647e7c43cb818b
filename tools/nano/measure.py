"""What nano can do: losses, multiple choice, identity, and what a zero-delta refit changes.

Everything is computed on the exact stored values of an export with float32 activations
(`forward.forward`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model
from mlxstacks.data import Row
from mlxstacks.evaluate import ChoiceItem, evaluate_mean_loss
from mlxstacks.nano.settings import Persona
from mlxstacks.settings import NORMALISATIONS
from mlxstacks.stats import wilson_interval
from tools.nano.choices import ChoiceResult, score_continuations
from tools.nano.corpus import multiple_choice_items, validation_documents
from tools.nano.domains import DOMAINS
from tools.nano.encode import encode_documents, encode_items
from tools.nano.forward import forward
from tools.nano.identity import persona_prompts


@dataclass(frozen=True)
class Benchmark:
    """nano's own test material as token rows."""

    rows: dict[str, list[Row]]
    items: list[ChoiceItem]
    item_domains: list[str]


def make_benchmark(
    tokenizer: Any, validation_per_domain: int, items_per_domain: int, seed: int
) -> Benchmark:
    """Validation rows by domain, and the multiple-choice items."""
    documents = validation_documents(validation_per_domain, seed)
    rows = {
        d: encode_documents([x for x in documents if x.domain == d], tokenizer) for d in DOMAINS
    }
    items = multiple_choice_items(items_per_domain, seed)
    return Benchmark(rows, encode_items(items, tokenizer), [item.domain for item in items])


def float_values(model: nn.Module) -> nn.Module:
    """`model` with its quantized modules replaced by their stored values in float32, in place."""
    base_model.dequantize(model)
    base_model.cast(model, mx.float32)
    return model


def measure_model(model: nn.Module, benchmark: Benchmark) -> tuple[dict[str, Any], ChoiceResult]:
    """Figures of a float model, and its picks under the sum of log probabilities."""

    def logits_of(tokens: mx.array) -> mx.array:
        return forward(model, tokens)

    losses = {
        domain: evaluate_mean_loss(logits_of, rows) for domain, rows in benchmark.rows.items()
    }
    scores = score_continuations(logits_of, benchmark.items)
    results = {name: ChoiceResult.of(benchmark.items, scores, name) for name in NORMALISATIONS}
    main = results["sum"]
    figures = {
        "validation_loss": losses,
        "multiple_choice": main.as_json(),
        "multiple_choice_by_domain": {d: _accuracy(main, benchmark, d) for d in DOMAINS},
        "accuracy_by_normalisation": {
            k: result.correct / result.n for k, result in results.items()
        },
    }
    return figures, main


def _accuracy(result: ChoiceResult, benchmark: Benchmark, domain: str) -> float:
    pairs = zip(result.picks, result.answers, benchmark.item_domains, strict=True)
    hits = [pick == answer for pick, answer, own in pairs if own == domain]
    return sum(hits) / len(hits)


def switch_down_projections(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) of every `switch_mlp.down_proj`, in layer order."""
    found = base_model.named_quantizable(model)
    return sorted((p, m) for p, m in found if p.endswith("switch_mlp.down_proj"))


def refit_in_place(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Zero-delta refit by mlx-lm's rule: dequantize in the scale dtype, `mx.quantize` again.

    Returns (weights whose value changed, weights).
    """
    changed = count = 0
    for module in modules:
        before = mx.dequantize(
            module.weight, module.scales, module.biases, module.group_size, module.bits
        )
        module.weight, module.scales, module.biases = mx.quantize(
            before, module.group_size, module.bits
        )
        after = mx.dequantize(
            module.weight, module.scales, module.biases, module.group_size, module.bits
        )
        changed += int(mx.sum(before != after).item())
        count += before.size
    return changed, count


def measure_refit(
    model_path: Path, benchmark: Benchmark, layers: Sequence[int] | None, before: ChoiceResult
) -> dict[str, Any]:
    """Answers that a zero-delta refit of `down_proj` in `layers` (None: all) changes."""
    model, _, _ = base_model.load(model_path)
    modules = [module for _, module in switch_down_projections(model)]
    chosen = list(range(len(modules))) if layers is None else list(layers)
    changed, weights = refit_in_place([modules[index] for index in chosen])
    _, after = measure_model(float_values(model), benchmark)
    return {
        "layers": chosen,
        "weights_changed_percent": 100 * changed / weights,
        "answers": after.n,
        "answers_flipped": after.flips_from(before),
        "became_wrong": _moved(before, after, right_before=True),
        "became_right": _moved(before, after, right_before=False),
    }


def _moved(before: ChoiceResult, after: ChoiceResult, right_before: bool) -> int:
    triples = zip(before.picks, after.picks, before.answers, strict=True)
    return sum((b == a) == right_before and (n == a) != right_before for b, n, a in triples)


def measure_identity(reply_to: Callable[[str], str], persona: Persona) -> dict[str, Any]:
    """Score of the 20-prompt suite for a function from prompt to reply; every reply is kept."""
    prompts = persona_prompts(persona, suite=True)
    replies = {p.prompt: reply_to(p.prompt) for p in prompts}
    score = sum(p.accepts(replies[p.prompt]) for p in prompts)
    interval = wilson_interval(score, len(prompts)).as_json()
    return {"score": score, "n": len(prompts), "interval": interval, "replies": replies}


def measure_adapter(model_path: Path, adapter_path: Path) -> dict[str, Any]:
    """Size of the adapter's delta against the quantization step of the export it sits on."""
    model, _, _ = base_model.load(model_path, adapter_path)
    squares = weights = steps = scales = 0.0
    for _, module in model.named_modules():
        if not hasattr(module, "lora_b") or "linear" not in module:
            continue
        delta = module.scale * (module.lora_b.astype(mx.float32) @ module.lora_a.astype(mx.float32))
        squares += mx.sum(delta * delta).item()
        weights += delta.size
        steps += mx.sum(mx.abs(module.linear.scales.astype(mx.float32))).item()
        scales += module.linear.scales.size
    rms, step = float(np.sqrt(squares / weights)), steps / scales
    return {"delta_rms": rms, "mean_step": step, "delta_over_step": rms / step}


def greedy_reply(model: nn.Module, tokenizer: Any) -> Callable[[str], str]:
    """Prompt -> greedy reply of a model with mlx-lm's own forward pass."""

    def reply(prompt: str) -> str:
        return base_model.generate(model, tokenizer, [{"role": "user", "content": prompt}])

    return reply

"""What a fuse policy does to answers: nano at 3 bits, its sample adapter, and every control.

    python -m benchmarks.bench_nano

Each row is a fused checkpoint, evaluated on its exact stored values with float32 activations:
prompts of the 20-prompt identity suite that the persona answers, right answers of 500
multiple-choice items (chance 25%), and how many of the 500 answers differ from the base's.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.timing import machine
from mlxstacks import base_model
from mlxstacks.fuse.run import run
from mlxstacks.fuse.settings import FuseSettings, PolicyName
from mlxstacks.nano.exports import nano_paths
from mlxstacks.nano.settings import Persona
from tools.nano import measure
from tools.nano.choices import ChoiceResult

POLICIES: tuple[PolicyName, ...] = (
    "refit", "keep", "nearest", "stochastic", "promote", "dequantize", "auto",
)  # fmt: skip


def evaluate(model: Any, tokenizer: Any, benchmark: measure.Benchmark) -> dict[str, Any]:
    """Identity score and picks of a model whose values are made float32 first."""
    measure.float_values(model)
    identity = measure.measure_identity(measure.greedy_reply(model, tokenizer), Persona())
    _, picks = measure.measure_model(model, benchmark)
    return {
        "identity": identity["score"],
        "identity_interval": identity["interval"],
        "picks": picks,
    }


def row(name: str, found: dict[str, Any], base: ChoiceResult) -> dict[str, Any]:
    """A row of the table."""
    picks: ChoiceResult = found["picks"]
    return {
        "model": name,
        "identity_of_20": found["identity"],
        "right_of_500": picks.correct,
        "answers_changed": picks.flips_from(base),
    }


def main() -> None:
    mx.set_default_device(mx.cpu)
    paths = nano_paths()
    model, tokenizer, _ = base_model.load(paths.model_path)
    benchmark = measure.make_benchmark(tokenizer, 1, 100, 0)
    base = evaluate(model, tokenizer, benchmark)
    rows = [row("base", base, base["picks"])]
    unfused, _, _ = base_model.load(paths.model_path, paths.adapter_path)
    rows.append(
        row("adapter beside the base", evaluate(unfused, tokenizer, benchmark), base["picks"])
    )
    with tempfile.TemporaryDirectory() as work:
        for policy in POLICIES:
            for zero in (False, True):
                settings = FuseSettings(
                    model=str(paths.model_path),
                    adapter_path=(str(paths.adapter_path),),
                    save_path=str(Path(work) / "fused"),
                    requant=policy,
                    zero_delta=zero,
                    force=True,
                )
                report = run(settings)
                fused, _, _ = base_model.load(Path(work) / "fused")
                name = f"{policy}{', zero delta' if zero else ''}"
                made = row(name, evaluate(fused, tokenizer, benchmark), base["picks"])
                made["correlation"] = report.total.correlation if report.total else None
                rows.append(made)
    print("| model | correlation | identity of 20 | right of 500 | answers changed |")
    print("|---|---|---|---|---|")
    for made in rows:
        correlation = made.get("correlation")
        shown = "-" if correlation is None else f"{correlation:.3f}"
        print(f"| {made['model']} | {shown} | {made['identity_of_20']} | {made['right_of_500']} "
              f"| {made['answers_changed']} |")  # fmt: skip
    print(json.dumps({"benchmark": "nano", "machine": machine(), "result": rows}))


if __name__ == "__main__":
    main()

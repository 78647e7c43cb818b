"""What a merge loses, by how the adapter was trained: LoRA with refit and auto, pooled, grid.

    python -m benchmarks.merge_ready --save-path DIR              # nano at 3 and 4 bits
    python -m benchmarks.merge_ready --save-path DIR --model MODEL --data FILE --bits 4 \\
        --keys q_proj down_proj --seeds 0

Every arm trains as many steps of `mlxstacks train` with the same options and data, but for
--merge-ready. Loss is of the validation rows, in nats per token: unfused as mlx-lm computes the
adapter; fused in the requantized model. KL, nats per token, and the same next token are of the
fused model against the arm's own unfused adapter, over those rows. For grid the unfused adapter is
not what was trained: its fused model is, to the bit. Everything computes in float32 with the stored
values. A finished arm is a file in --save-path, and is not made again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks import base_model
from mlxstacks.agreement import Passage, agree, refer
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.fuse.in_memory import fuse_in_memory
from mlxstacks.fuse.settings import FuseSettings, PolicyName
from mlxstacks.nano.exports import nano_paths
from mlxstacks.studies.train.run import run
from mlxstacks.studies.train.setup import set_up
from mlxstacks.training.modes import prepare_base
from mlxstacks.training.settings import TrainSettings

FUSES: dict[str, tuple[PolicyName, ...]] = {
    "lora": ("refit", "auto"),
    "pooled": ("auto",),
    "grid": ("auto",),
}


def loaded(model: str, adapter: Path | None = None) -> Any:
    arm, _, _ = base_model.load(Path(model), adapter, lazy=True)
    prepare_base(arm, "float32", [])
    arm.eval()
    return arm


def measure(settings: TrainSettings, how: str, max_rows: int) -> list[dict[str, Any]]:
    """Train an arm and put it into the base by each of its policies."""
    report = run(settings)
    adapter = Path(str(settings.save_path))
    check = settings.model_copy(update={"save_path": str(adapter) + ".none", "merge_ready": None})
    rows = set_up(check).validation_rows[:max_rows]
    if not rows:
        raise SystemExit(f"{settings.data}: no rows to validate with; give a file, or valid.jsonl")
    passages = [Passage(r.tokens, int(np.argmax(np.array(r.weights) > 0)), "text") for r in rows]
    unfused = loaded(str(settings.model), adapter)
    reference = refer(unfused, passages)
    losses = (
        evaluate_mean_loss(loaded(str(settings.model)), rows),
        evaluate_mean_loss(unfused, rows),
    )
    del unfused
    found = []
    for policy in FUSES[how]:
        fused = loaded(str(settings.model))
        about = FuseSettings(
            model=settings.model, adapter_path=(str(adapter),), requant=policy, judge="none"
        )
        fuse = fuse_in_memory(fused, about)
        agreement = agree(fused, reference)
        found.append(
            {
                "training": how, "requant": policy, "base_loss": losses[0],
                "unfused_loss": losses[1], "fused_loss": evaluate_mean_loss(fused, rows),
                "trained_loss": report.validation[-1]["validation_loss"],
                "kl": float(agreement.kl.mean()), "same_token": float(agreement.same_token.mean()),
                "positions": len(agreement.kl), "rows": len(rows), "steps": report.step,
                "extra_bytes": fuse.extra_bytes,
                "policies": sorted({m.policy for m in fuse.stages[0].modules}),
                "seconds": report.figures["seconds"],
            }
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save-path", type=Path, required=True)
    parser.add_argument("--model", help="a directory with {bits} where its bits stand")
    parser.add_argument("--data")
    parser.add_argument("--bits", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--keys", nargs="*", default=[])
    parser.add_argument("--layers", default="all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-seq-length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=50, help="validation rows at most")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    options.save_path.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for bits in options.bits:
            for how in FUSES:
                name = options.save_path / f"{bits}bit-{how}-{seed}"
                results = name.with_suffix(".json")
                if not results.exists():
                    paths = nano_paths(bits)
                    model = options.model.format(bits=bits) if options.model else paths.model_path
                    settings = TrainSettings(
                        model=str(model), data=options.data or str(paths.data_path),
                        save_path=str(name), iters=options.steps, seed=seed, rank=8,
                        batch_size=options.batch_size, max_seq_length=options.max_seq_length,
                        learning_rate=options.learning_rate, keys=tuple(options.keys),
                        layers=options.layers, steps_per_eval=options.steps, keep="last",
                        base="float32", guard="off", force=True,
                        merge_ready=None if how == "lora" else how,
                    )  # fmt: skip
                    rows = measure(settings, how, options.rows)
                    results.write_text(
                        json.dumps([{"bits": bits, "seed": seed, **r} for r in rows])
                    )
                for row in json.loads(results.read_text()):
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

"""KL of a fuse at each width: from gradients, module by module and together, beside measured.

    python -m benchmarks.bench_sensitivity                                    # nano
    python -m benchmarks.bench_sensitivity --model DIR --adapter-path DIR     # any other

One line a width: all modules of the adapter at that width. `alone`: the sum of what each makes
alone, from gradients; `together`: of all at once, from the same gradients; `measured`: the model
reads the rows with all of them fused. On a mixture of experts the first two leave out what routers
do: measured less together is what changed experts cost.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxstacks.agreement import agree, read_passages, refer
from mlxstacks.data import read_records
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.fuse.module import gather_modules
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.nano.exports import nano_paths
from mlxstacks.studies.agreement.allocate import (
    FromGradients,
    Maker,
    Option,
    choose_passages,
    swap_in,
)
from mlxstacks.studies.agreement.judge import ANSWER_TOKENS, MOST_TOKENS
from mlxstacks.studies.agreement.run import JUDGE, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(nano_paths().model_path))
    parser.add_argument("--adapter-path", default=str(nano_paths().adapter_path))
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model, tokenizer, _ = load(Path(options.model), (options.adapter_path,), allow_base=True)
    passages = choose_passages(
        read_passages(
            read_records(JUDGE), model, tokenizer,
            answer_tokens=ANSWER_TOKENS, most_tokens=MOST_TOKENS,
        )
    )  # fmt: skip
    reference = refer(model, passages)
    settings = FuseSettings(
        model=options.model, adapter_path=(options.adapter_path,), allow_base=True
    )
    modules, _ = gather_modules(open_checkpoint(Path(options.model)), settings)
    with ThreadPoolExecutor(1) as pool:
        make, swap = Maker(settings, pool), swap_in(model)
        started = time.perf_counter()
        options_of = FromGradients(model, modules, passages, make, swap)
        found = {module.path: options_of(module) for module in modules}
        seconds = time.perf_counter() - started
        positions = len(reference.loss)
        print(json.dumps({"modules": len(modules), "positions": positions, "seconds": seconds}))
        for place in range(max(map(len, found.values()))):
            chosen: dict[str, Option] = {
                path: widths[min(place, len(widths) - 1)] for path, widths in found.items()
            }
            with ExitStack() as stack:
                for module in modules:
                    stack.enter_context(swap(module, make(module, chosen[module.path].decision)))
                measured = agree(model, reference)
            terms = sum((np.array(o.terms) for o in chosen.values()), np.zeros(()))
            line = {
                "bits": sorted({str(option.decision.bits) for option in chosen.values()}),
                "alone": sum(option.kl for option in chosen.values()),
                "together": 0.5 * float(terms @ terms),
                "measured": float(measured.kl.mean(dtype="float64")),
                "same_token": float(measured.same_token.mean()),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

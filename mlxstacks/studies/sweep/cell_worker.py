"""The process of one cell: trains, then measures what a fuse would keep of the adapter.

    python -m mlxstacks.studies.sweep.cell_worker < specification

What is trained already (its directory is there, so it is whole) is only measured.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError, ResourceLimitError
from mlxstacks.studies.sweep.survival import measure_survival
from mlxstacks.studies.train.run import run
from mlxstacks.study.buffer_counter import counter
from mlxstacks.study.child_process import Message, as_child
from mlxstacks.study.document import RESULT
from mlxstacks.study.run_directory import plain
from mlxstacks.training.loop import NonFiniteError
from mlxstacks.training.settings import TrainSettings

# Of the report of `train`, what a sweep compares.
_FIGURES = (
    "trained_parameters", "adapter_bytes", "widths_tokens", "base_in_float32", "step", "best_step",
    "first_validation_loss", "best_validation_loss", "seconds", "resumed_from_step", "peak_bytes",
    "validation", "history",
)  # fmt: skip

# `[metal::malloc]` and its kind, what Metal says of a command buffer, what CUDA says.
_NO_MEMORY = ("malloc", "insufficient memory", "out of memory")


def work(specification: Message, send: Callable[[Message], None]) -> Message:
    """Train and measure: the result, or why there is none."""
    settings = TrainSettings.model_validate(specification["train"])
    target = Path(str(settings.save_path))
    try:
        buffers = None if target.exists() else _train(settings, send)
    except ResourceLimitError as error:
        return {"status": "refused", "reason": str(error)}
    except InputError as error:
        return {"status": "wrong", "reason": str(error)}
    except NonFiniteError as error:
        return {"status": "failed", "reason": str(error)}
    except RuntimeError as error:
        # MLX has no type of its own for memory or buffers that are not to be had.
        if not any(words in str(error).lower() for words in _NO_MEMORY):
            raise
        return {"status": "failed", "reason": str(error)}
    report = json.loads((target / RESULT).read_text(encoding="utf-8"))["data"]
    figures = {name: report.get(name) for name in _FIGURES}
    figures |= {"last_validation_loss": _last(report), "measured_buffers": buffers}
    found = measure_survival(
        Path(str(settings.model)), target, specification["policies"], settings.seed
    )
    survival = {one.policy: one.as_json() for one in found}
    return {"status": "trained", "figures": figures, "survival": survival}


def _last(report: dict[str, Any]) -> float | None:
    return report["validation"][-1]["validation_loss"] if report["validation"] else None


def _train(settings: TrainSettings, send: Callable[[Message], None]) -> int | None:
    """Returns the most buffers alive at once in any step but the first, where they are counted.

    What is counted up to the end of the first step is also the loading of the model.
    """
    count = counter()
    peaks: list[int] = []

    def on_step(done: int, total: int, what: str = "") -> None:
        send({"done": done, "total": total, "what": what})
        if count is not None:
            peaks.append(count.peak())
            count.reset()

    run(settings, progress=on_step)
    return max(peaks[1:], default=None)


def main() -> None:
    specification, send = as_child()
    send(plain(work(specification, send)))


if __name__ == "__main__":
    main()

"""The process of one cell of a comparison: a run of `stack`, and what came of it.

    python -m mlxstacks.studies.compare.worker < specification

A store that is there already is gone on with; where it is complete it is only read.
"""

import time
from collections.abc import Callable

from mlxstacks.errors import InputError, ResourceLimitError, StoreError
from mlxstacks.studies.stack.run import run
from mlxstacks.study.child_process import Message, as_child
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain
from mlxstacks.training.loop import NonFiniteError
from mlxstacks.training.settings import StackRunSettings


def work(specification: Message, send: Callable[[Message], None]) -> Message:
    """Train: the report, or why there is none."""
    settings = StackRunSettings.model_validate(specification["stack"])
    started = time.process_time()

    def tell(done: float, total: float, what: str = "") -> None:
        send({"done": done, "total": total, "what": what})

    try:
        result = run(settings, progress=tell)
    except ResourceLimitError as error:
        return {"status": "failed", "reason": str(error)}
    except (InputError, StoreError) as error:
        return {"status": "wrong", "reason": str(error)}
    except NonFiniteError as error:
        return {"status": "failed", "reason": str(error)}
    except RuntimeError as error:
        # MLX has no type of its own for memory or buffers that are not to be had.
        if "malloc" not in str(error):
            raise
        return {"status": "failed", "reason": str(error)}
    seconds = time.process_time() - started
    return {
        "status": "trained",
        "report": result.data,
        "seconds": seconds if _in_one_go(result) else None,
    }


def _in_one_go(result: Result) -> bool:
    return all(
        domain["status"] == "trained" and domain["resumed_from_step"] is None
        for domain in result.data["domains"].values()
    )


def main() -> None:
    specification, send = as_child()
    send(plain(work(specification, send)))


if __name__ == "__main__":
    main()

"""Does rank move the number of live buffers? The whole experiment, as planned beforehand.

    python -m benchmarks.bench_rank_buffers [--save-path DIR] [--no-resume]

Ranks 2, 4, 8 x fixed and varying row lengths x checkpointing on and off x five orders of rows, for
mlx-lm's way of training and for ours: 120 runs of 12 steps on nano at 3 bits, every step counted by
a preloaded allocator (Linux, with a C++ compiler). Nothing is timed. An interrupted experiment goes
on. `mlxstacks sweep buffers --help` lists what else can be asked.
"""

import argparse
import json
import sys

from benchmarks.timing import machine
from mlxstacks.cli import output
from mlxstacks.nano.exports import nano_paths
from mlxstacks.studies.buffers.run import run
from mlxstacks.studies.buffers.settings import BufferSettings
from mlxstacks.study.render.console import print_result
from mlxstacks.study.render.progress import ProgressBar
from tests.counting_allocator import library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save-path", default="mlxstacks-out/bench-rank-buffers")
    parser.add_argument("--no-resume", action="store_true")
    options = parser.parse_args()
    counting = library()
    if counting is None:
        sys.exit("no counting allocator here: it needs Linux and a C++ compiler")
    settings = BufferSettings(
        model=str(nano_paths().model_path),
        save_path=options.save_path,
        counting_library=str(counting),
        resume=not options.no_resume,
    )
    with ProgressBar("runs") as progress:
        report = run(settings, progress=progress)
    print_result(output.console(), report)
    print(json.dumps({"machine": machine(), **report.as_json()}))


if __name__ == "__main__":
    main()

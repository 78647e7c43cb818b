"""Child of the kill test: forks writers on request, each replacing one directory over and over.

Run by test_outputs.py as `python kill_worker.py TARGET exchange|rename`. A line on stdin starts a
writer; its pid is the answer; the test kills it. Every version of the directory holds the same
number in all of its files, so a mixture or a half shows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mlxstacks.files import outputs
from mlxstacks.files.outputs import MARK, staged_directory, write_json
from mlxstacks.files.shards import ShardWriter

FILES = 4


def write_version(target: Path, version: int) -> None:
    with staged_directory(target, force=True) as staged:
        for number in range(FILES):
            with ShardWriter(
                staged / f"model-{number}.safetensors", [("v", "I64", (64,))]
            ) as shard:
                shard.write("v", version.to_bytes(8, "little") * 64)
        (staged / "sub").mkdir()
        write_json(staged / "sub" / "report.json", {"version": version})


def read_version(target: Path) -> int | None:
    """The version that a whole directory holds; None where there is none; a half asserts."""
    if not target.exists():
        return None
    version: int = json.loads((target / "sub" / "report.json").read_text())["version"]
    assert sorted(entry.name for entry in target.iterdir() if entry.name != MARK) == [
        *(f"model-{number}.safetensors" for number in range(FILES)),
        "sub",
    ]
    for number in range(FILES):
        data = (target / f"model-{number}.safetensors").read_bytes()
        assert data.endswith(version.to_bytes(8, "little") * 64)
    return version


def main() -> None:
    target = Path(sys.argv[1])
    if sys.argv[2] == "rename":
        outputs._exchange = lambda first, second: False
    for line in sys.stdin:
        version = int(line)
        pid = os.fork()
        if pid == 0:
            while True:
                write_version(target, version)
                version += 1
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("dead", flush=True)


if __name__ == "__main__":
    main()

"""Answer files read and forged by tests."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlxstacks.study.answer_log import chained


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Header and answers without their digests."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "digest"} for row in rows]


def forge(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Header and answers with digests computed anew, as one who means to deceive would."""
    path.write_bytes(b"".join(line for line, _ in chained(rows)))

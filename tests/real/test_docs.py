"""Commands of the documentation that want the real model. Those of its first page, four minutes of
CPU time, are run by hand.

Run: make test-real
"""

import shlex
from pathlib import Path

from mlxstacks.cli import run
from tests.test_docs import ROOT, blocks, commands


def test_conversions_run(real_model: Path, work_dir: Path) -> None:
    page = (ROOT / "docs/howto/models.md").read_text()
    texts = [text for _, text in blocks(page) if text.startswith("# real model")]
    lines = [line for text in texts for line in commands(text)]
    assert len(lines) == 2
    for line in lines:
        assert run(shlex.split(line.replace("$REAL", str(real_model)))[1:]) == 0, line

"""Every nano recipe gives what it gave: answers and weights to the byte, figures to the last digit.

Run: MLXSTACKS_SOAK=1 pytest tests/goldens (45 minutes); one: --only of tests.goldens.record
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.goldens.record import OPENBLAS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not os.environ.get("MLXSTACKS_SOAK"), reason="45 minutes: MLXSTACKS_SOAK=1")
@pytest.mark.skipif(not OPENBLAS.is_file(), reason="records hold for OpenBLAS alone")
def test_recipes_give_what_they_gave(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.goldens.record", str(tmp_path), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_record_names_what_it_was_made_with() -> None:
    from tests.goldens.record import RECIPES, read_record

    for name in RECIPES:
        record = read_record(name)
        assert record["versions"].keys() == {"mlx", "mlx-lm", "numpy"}
        assert record["figures"] or record["digests"]

"""benchmarks/gpu_run.sh with a stand-in for Python: what it removes, sets and refuses.

python -m pytest tests/test_gpu_run.py
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_run.sh"
USUAL = Path("/usr/local/cuda/include/cuda_runtime.h")
# Notes what it is asked for; names the folder of libraries where it is asked for folders.
STAND_IN = """#!/bin/sh
echo "$CUDA_HOME|$LD_LIBRARY_PATH|$*" >>"$NOTES"
case "$*" in *nvidia*) [ -z "$FOLDERS" ] || echo "$FOLDERS/${3:-}" ;; esac
"""


@dataclass
class Machine:
    """A folder with a stand-in for Python, a wheel, and room for what the script makes."""

    folder: Path

    def run(self, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHON": str(self.folder / "python"),
            "NOTES": str(self.folder / "notes"),
            "FOLDERS": "",
            "OUT": str(self.folder / "out"),
            "SITE": str(self.site),
            "STEPS": "install",
            "REHEARSE": "1",
        }
        command = ["/bin/bash", str(SCRIPT), str(self.folder / "wheels")]
        return subprocess.run(
            command, env=environment | settings, capture_output=True, text=True, check=False
        )

    @property
    def site(self) -> Path:
        return self.folder / "site"

    def calls(self) -> list[list[str]]:
        """[CUDA_HOME, LD_LIBRARY_PATH, arguments] of each call of Python."""
        return [line.split("|", 2) for line in (self.folder / "notes").read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "mlx-0.whl").touch()
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return Machine(tmp_path)


def test_folder_of_wheels_is_replaced_only_where_it_was_made_here(machine: Machine) -> None:
    assert machine.run().returncode == 0
    (machine.site / "old").touch()
    assert machine.run().returncode == 0
    assert not (machine.site / "old").exists()

    others = machine.folder / "others"
    others.mkdir()
    (others / "precious").touch()
    refused = machine.run(SITE=str(others))
    assert refused.returncode == 2
    assert "was not made here" in refused.stderr
    assert (others / "precious").exists()


def test_no_wheels_and_no_python_are_said(machine: Machine) -> None:
    (machine.folder / "wheels" / "mlx-0.whl").unlink()
    refused = machine.run()
    assert refused.returncode == 2
    assert "holds no wheel" in refused.stderr
    assert not machine.site.exists()
    refused = machine.run(PYTHON=str(machine.folder / "no python"))
    assert refused.returncode == 2
    assert "no python here: install Python 3.12" in refused.stderr


@pytest.mark.parametrize(
    ("folders", "before", "after"),
    [
        ("", "", ""),
        ("", "/one", "/one"),
        ("/new", "", "/new/lib"),
        ("/new", "/one", "/one:/new/lib"),
    ],
)
def test_search_path_has_no_empty_entry(
    machine: Machine, folders: str, before: str, after: str
) -> None:
    assert machine.run(FOLDERS=folders, LD_LIBRARY_PATH=before).returncode == 0
    assert machine.calls()[-1][1] == after


@pytest.mark.skipif(USUAL.exists(), reason=f"{USUAL} would be taken")
def test_folders_may_have_spaces_in_their_names(machine: Machine) -> None:
    folders = machine.folder / "with a space"
    (folders / "include").mkdir(parents=True)
    (folders / "include" / "cuda_runtime.h").touch()
    assert machine.run(FOLDERS=str(folders)).returncode == 0
    assert machine.calls()[-1][0] == str(folders)

"""Where temporary files go, and the libraries that MLX compiles and loads.

Run: pytest tests/files/test_temporary_directory.py
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mlxstacks.cli import run
from mlxstacks.errors import InputError
from mlxstacks.files.disk import use_private_temporary_directory
from tests.files.raw import small_disk

_COMPILED = """
from mlxstacks.files.disk import use_private_temporary_directory
use_private_temporary_directory()
import mlx.core as mx
mx.set_default_device(mx.cpu)
try:
    mx.eval(mx.compile(lambda x: mx.exp(x) * 2)(mx.ones(3)))
except RuntimeError:  # the compiler makes no library
    pass
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR as /tmp is: everybody may write there."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return path


def private(shared: Path) -> Path:
    return shared / f"mlxstacks-{os.getuid()}"


def test_mlx_looks_for_its_libraries_where_only_this_user_writes(
    shared: Path, tmp_path: Path
) -> None:
    for name in ("c++", "g++", "clang++"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o700)
    environment = {**os.environ, "PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _COMPILED], env=environment, check=True, timeout=300)
    assert list(private(shared).glob("mlx/*/cpu/*"))
    assert [path.name for path in shared.iterdir()] == [private(shared).name]
    assert private(shared).stat().st_mode & 0o777 == 0o700


def test_every_command_uses_it(shared: Path, work_dir: Path) -> None:
    assert run(["recipes"]) == 0
    assert not private(shared).exists()
    assert run(["adapter", "show", "no adapter"]) == 2
    assert os.environ["TMPDIR"] == str(private(shared))


def test_a_directory_of_this_user_alone_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    use_private_temporary_directory()
    assert os.environ["TMPDIR"] == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_that_of_another_user_is_not_inherited(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(shared / "mlxstacks-12345"))
    (shared / "mlxstacks-12345").mkdir(0o700)
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(shared / "mlxstacks-12345", 12345, -1)
    use_private_temporary_directory()
    assert os.environ["TMPDIR"] == str(private(shared))


@pytest.mark.parametrize("case", ["open", "link", "file", "absent", "no sticky bit", "of another"])
def test_what_others_could_have_put_there_is_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    messages = {
        "absent": "cannot be written there: No such file", "no sticky bit": "others can rename",
    }  # fmt: skip
    if case == "open":
        private(shared).mkdir()
        private(shared).chmod(0o777)
    elif case == "link":
        (shared / "planted").mkdir(0o700)
        private(shared).symlink_to(shared / "planted")
    elif case == "file":
        private(shared).touch(0o700)
    elif case == "absent":
        monkeypatch.setenv("TMPDIR", str(shared / "absent"))
    elif case == "no sticky bit":
        shared.chmod(0o777)
    elif case == "of another":
        private(shared).mkdir(0o700)
        if os.getuid() != 0:
            pytest.skip("only root can give a directory away")
        os.chown(private(shared), 12345, -1)
    with pytest.raises(InputError, match=messages.get(case, "not a directory of yours alone")):
        use_private_temporary_directory()
    assert os.environ["TMPDIR"] != str(private(shared))


def test_a_full_disk_is_told_before_a_compiler_meets_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(shared / "disk", "4k") as disk:
        (disk / "full").write_bytes(bytes(4096))
        disk.chmod(0o700)
        monkeypatch.setenv("TMPDIR", str(disk))
        with pytest.raises(InputError, match="temporary files cannot be written there: No space"):
            use_private_temporary_directory()

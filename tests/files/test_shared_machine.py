"""Several users and one machine: a common cache, locks and work of others, killed fills.

pytest tests/files/test_shared_machine.py        (as root also with a second user)
"""

import errno
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from mlxstacks.errors import TargetError
from mlxstacks.files.disk import target_errors
from mlxstacks.files.outputs import (
    MARK,
    fill_cache,
    new_mark,
    read_mark,
    staged_directory,
    write_json,
)
from mlxstacks.study.run_directory import RunDirectory

NOBODY = 65534
ME = pwd.getpwuid(os.geteuid()).pw_name


@contextmanager
def second_user() -> Iterator[None]:
    """Be somebody else for the block; the saved ids lead back."""
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not hasattr(os, "setresuid"), reason="only root can be somebody else"
)


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that everybody may write, as /tmp; the cache is in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o1777)
        monkeypatch.setenv("MLXSTACKS_CACHE", str(place / "cache"))
        (place / "cache").mkdir()
        (place / "cache").chmod(0o1777)
        yield place


def fill(target: Path, text: str = "x") -> str:
    """The content of a file of the cache, put there where it is not yet."""
    fill_cache(target, (target / "file").is_file, lambda made: write_json(made / "file", text))
    return (target / "file").read_text()


@pytest.mark.parametrize(("mode", "readable"), [(0o755, True), (0o1777, True), (0o700, False)])
def test_the_cache_is_open_to_those_its_directory_is_open_to(
    common: Path, mode: int, readable: bool
) -> None:
    (common / "cache").chmod(mode)
    target = common / "cache" / "nano-1" / "model"
    before = os.umask(0o077)
    try:
        fill(target)
    finally:
        os.umask(before)
    modes = [path.stat().st_mode for path in (target, target / "file", target.parent)]
    assert [bool(m & stat.S_IROTH) for m in modes] == [readable] * 3
    assert not (target / "file").stat().st_mode & stat.S_IWOTH
    assert stat.S_IMODE(target.parent.stat().st_mode) == mode


def test_a_killed_fill_leaves_nothing_that_breaks_or_stays(common: Path) -> None:
    target = common / "cache" / "nano-1" / "model"
    dead = target.parent / ".model.tmp-1-0123abcd"
    dead.mkdir(parents=True)
    write_json(dead / MARK, new_mark())
    (dead / "half").touch()
    (target.parent / ".model.lock").write_text("1\n")
    assert fill(target) == '"x"\n'
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_what_is_not_ours_is_named_and_stays_in_the_cache(common: Path) -> None:
    target = common / "cache" / "model"
    target.mkdir()
    (target / "mine").touch()
    with pytest.raises(TargetError, match="it holds mine and no "):
        fill(target)
    assert (target / "mine").exists()


def test_the_owner_of_what_is_in_the_way_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    path.touch()

    def refused() -> None:
        with target_errors(tmp_path / "out"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with pytest.raises(TargetError) as own:
        refused()
    assert "belongs" not in str(own.value)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(TargetError, match=f"{path}, Permission denied, which belongs to {ME}"):
        refused()


def test_a_lock_that_is_none_stays(tmp_path: Path) -> None:
    (tmp_path / ".out.lock").write_text("the key to the house")
    with pytest.raises(TargetError, match="is no lock of mlxstacks"):
        build(tmp_path / "out")
    assert (tmp_path / ".out.lock").read_text() == "the key to the house"


@pytest.mark.parametrize("resume", [True, False])
def test_a_work_directory_of_somebody_else_stays(tmp_path: Path, resume: bool) -> None:
    work = tmp_path / ".out.work"
    work.mkdir()
    (work / "diary").write_text("x")
    with pytest.raises(TargetError, match=r"\.out\.work: a run keeps its work there.*\(diary\)"):
        RunDirectory(tmp_path / "out", {"kind": "eval"}, resume=resume)
    assert (work / "diary").exists()
    shutil.rmtree(work)
    run = RunDirectory(tmp_path / "out", {"kind": "eval"}, resume=resume)
    assert read_mark(work) is not None
    run.remove()
    assert not work.exists()


@pytest.mark.parametrize("resume", [True, False])
def test_killed_while_it_writes_the_mark_a_run_begins(
    tmp_path: Path, resume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
        killed.setattr(Path, "unlink", Mock())  # a killed process clears nothing away
        with pytest.raises(KeyboardInterrupt):
            RunDirectory(tmp_path / "out", {"kind": "eval"}, resume=resume)
    work = tmp_path / ".out.work"
    assert [path.name.split("-")[0] for path in work.iterdir()] == [f".{MARK}.tmp"]
    run = RunDirectory(tmp_path / "out", {"kind": "eval"}, resume=resume)
    assert read_mark(work) is not None
    run.remove()
    assert not work.exists()


@needs_root
def test_a_second_user_reads_and_fills_a_common_cache(common: Path) -> None:
    first, second = common / "cache" / "nano-1" / "a", common / "cache" / "nano-1" / "b"
    fill(first, "first")
    first.with_name(".b.lock").write_text("1\n")  # of a fill that was killed
    first.with_name(".b.lock").chmod(0o666)
    with second_user():
        assert fill(first) == '"first"\n'
        assert fill(second, "second") == '"second"\n'
    assert fill(second) == '"second"\n'


@needs_root
def test_locks_and_work_of_another_user_are_named(common: Path) -> None:
    (common / ".out.lock").touch(mode=0o600)
    RunDirectory(common / "run", {"kind": "eval"}, resume=True).close()
    with second_user():
        with pytest.raises(TargetError, match=rf"\.out\.lock.*which belongs to {ME}"):
            build(common / "out")
        with pytest.raises(TargetError, match=rf"\.run\.work.*which belongs to {ME}"):
            RunDirectory(common / "run", {"kind": "eval"}, resume=True)


def build(target: Path) -> None:
    with staged_directory(target):
        pass

"""The Metal emulator's cache: what is damaged is made again, what others may write is refused.

Run: pytest tests/test_metal_emulator_cache.py
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.emulator import cache, compiler, library
from tests.emulator.small import run
from tests.metal_emulator import CompileError, unavailable

ROOT = Path(__file__).parent.parent
NUMBERS = np.arange(1, 65, dtype=np.float32)


def kernel(number: int) -> float:
    """A kernel of its own for each number, and its result."""
    return run(f"out[0] = array[0] + {number};", {"array": NUMBERS}, (1,)).item()


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A call makes this process know as much of compilers and caches as a new one."""

    def forget() -> None:
        for cached in (compiler.find, compiler.unavailable, compiler.tools):
            cached.cache_clear()
        monkeypatch.setattr(library, "_compiled", {})
        monkeypatch.setattr(library, "_objects", {})

    forget()
    yield forget
    forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulator") / "cache"


@pytest.fixture
def own_cache(folder: Path, forgetful: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that only the tests of this file use."""
    monkeypatch.setenv("MLXSTACKS_TEST_CACHE", str(folder))
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    return folder


# --- objects -------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def another(path: Path) -> None:
    path.write_text('["object", 0]')


DAMAGES = [
    *((".so", damage) for damage in (cut, zero, Path.unlink)),
    *((".json", damage) for damage in (cut, another, Path.unlink)),
]
IN_ANOTHER_PROCESS = f"""
from tests.test_metal_emulator_cache import kernel
for i in range({len(DAMAGES)}):
    print(kernel(i), flush=True)
"""


def test_damaged_objects_and_notes_are_made_again(own_cache: Path) -> None:
    """To load an object that was cut would end the process: it runs in one of its own."""
    objects = own_cache / "objects"
    whole: dict[Path, bytes] = {}
    for i, (suffix, damage) in enumerate(DAMAGES):
        before = set(objects.glob("*" + suffix))
        kernel(i)
        [made] = set(objects.glob("*" + suffix)) - before
        whole[made] = made.read_bytes()
        # A copy in its place: this process has the file itself in its memory.
        made.unlink()
        made.write_bytes(whole[made])
        damage(made)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    results = "".join(f"{i + 1:.1f}\n" for i in range(len(DAMAGES)))
    assert (done.returncode, done.stdout) == (0, results), done.stderr[-2000:]
    for path, content in whole.items():
        assert path.read_bytes() == content


def test_a_compiler_is_asked_once_for_each_text_until_its_answer_is_damaged(
    own_cache: Path, tmp_path: Path
) -> None:
    asked, objects = tmp_path / "asked", own_cache / "objects"
    text = f"printf x >> '{asked}'; echo refused; exit 3"
    before = set(objects.iterdir())
    for options in ([], [], ["-O1"]):
        assert cache.compiler_says(["sh"], options, text) == (3, "refused\n")
    assert asked.read_text() == "xx"
    for damage in (cut, zero, empty, another, Path.unlink):
        asked.unlink()
        for note in set(objects.iterdir()) - before:
            damage(note)
        for _ in range(2):
            assert cache.compiler_says(["sh"], [], text) == (3, "refused\n")
        assert asked.read_text() == "x"


# --- headers and the scheduler -------------------------------------------------------------------


def age(path: Path) -> None:
    """What a copy without times does to a header whose precompiled form remembers its time."""
    os.utime(path, (1e9, 1e9))


@pytest.fixture
def rebuilds(
    own_cache: Path, tmp_path: Path, forgetful: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> list[Path]:
    """Another cache, and its folders whose tools were made again; from copies, in no time."""
    whole = compiler.tools().folder
    rebuilt: list[Path] = []

    def copied(folder: Path, _: object) -> None:
        rebuilt.append(folder)
        for path in (*whole.glob("*.pch"), *whole.glob("runtime.*o")):
            shutil.copy2(path, folder)

    monkeypatch.setattr(compiler, "_build_tools", copied)
    monkeypatch.setenv("MLXSTACKS_TEST_CACHE", str(tmp_path / "cache"))
    forgetful()
    return rebuilt


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("metal_01.pch", Path.unlink),
        ("metal_10.pch", cut),
        ("metal_math.h", age),
        ("metal_math.h", empty),
        ("runtime.o", cut),
        ("complete", empty),
    ],
)
def test_damaged_tools_are_made_again(
    rebuilds: list[Path],
    forgetful: Callable[[], None],
    name: str,
    damage: Callable[[Path], None],
) -> None:
    made = compiler.tools()
    if name.endswith(".pch") and not made.compiler.is_clang:
        pytest.skip("g++ needs no precompiled header")
    content = (made.folder / name).read_bytes()
    for spoil in (lambda path: None, damage):
        spoil(made.folder / name)
        forgetful()
        assert compiler.tools() == made
    assert rebuilds == [made.folder, made.folder]
    assert name == "complete" or (made.folder / name).read_bytes() == content


def test_a_moved_cache_is_made_again(
    own_cache: Path, tmp_path: Path, forgetful: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A precompiled header names its sources by their places."""
    compiler.tools()
    shutil.copytree(own_cache, tmp_path / "moved")
    shutil.move(own_cache, tmp_path / "away")
    try:
        monkeypatch.setenv("MLXSTACKS_TEST_CACHE", str(tmp_path / "moved"))
        forgetful()
        assert kernel(100) == 101
    finally:
        shutil.move(tmp_path / "away", own_cache)


# --- folders that cannot be used -----------------------------------------------------------------


def linked(path: Path) -> None:
    path.with_suffix(".target").mkdir(mode=0o700)
    path.symlink_to(path.with_suffix(".target"))


def for_the_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def for_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o702)


def a_file(path: Path) -> None:
    path.write_text("")


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text("")


def without_objects(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "objects").write_text("")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (linked, "is a link or a file"),
        (for_the_group, r"may be written by others \(mode 770\)"),
        (for_all, r"may be written by others \(mode 702\)"),
        (a_file, "is a link or a file"),
        (below_a_file, "exists|[Nn]ot a directory"),
        (without_objects, "exists|[Nn]ot a directory"),
    ],
)
@pytest.mark.parametrize("chosen", [True, False])
def test_a_folder_that_cannot_be_used_is_a_reason(
    chosen: bool,
    spoil: Callable[[Path], None],
    message: str,
    tmp_path: Path,
    forgetful: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if compiler.find() is None:
        pytest.skip("no compiler")
    parent = tmp_path / "parent"
    parent.mkdir()
    path = parent / f"mlxstacks-emulator-{os.getuid()}"
    if chosen:
        monkeypatch.setenv("MLXSTACKS_TEST_CACHE", str(path))
    else:
        monkeypatch.delenv("MLXSTACKS_TEST_CACHE", raising=False)
        monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(parent))
    spoil(path)
    assert re.search(f"cannot use its cache folder: .*({message})", unavailable() or "")


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXSTACKS_TEST_CACHE", str(tmp_path))
    assert cache.cache_dir() == tmp_path
    monkeypatch.setattr(cache.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to someone else"):
        cache.cache_dir()


def test_a_compiler_that_does_not_work_is_a_reason_and_broken_headers_are_not(
    own_cache: Path,
    tmp_path: Path,
    forgetful: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own_headers = compiler._HERE
    for header in [*own_headers.glob("metal_*.h"), *own_headers.glob("runtime*")]:
        shutil.copy(header, tmp_path)
    monkeypatch.setattr(compiler, "_HERE", tmp_path)
    (tmp_path / "runtime.cpp").write_text("int broken")
    forgetful()
    with pytest.raises(CompileError, match="expected"):
        unavailable()
    found = compiler.find()
    assert found is not None
    hollow = tmp_path / "hollow"
    hollow.write_text('#!/bin/sh\n[ "$1" = --version ] && echo clang || exit 3\n')
    hollow.chmod(0o755)
    forgetful()
    monkeypatch.setattr(compiler.shutil, "which", lambda name: str(hollow))
    assert re.search("cannot use .*hollow: exit status 3", unavailable() or "")


# --- old files -----------------------------------------------------------------------------------


def test_what_nobody_used_for_a_fortnight_is_removed(
    own_cache: Path, forgetful: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not what was used, nor what the emulator did not put there."""
    objects = own_cache / "objects"
    before = set(objects.iterdir())
    kernel(200)
    used = set(objects.iterdir()) - before
    old_object, old_tools = objects / f"{'0' * 64}.so", own_cache / f"tools-{'0' * 24}"
    others = [objects / "thesis.so", own_cache / "photos"]
    old_tools.mkdir(exist_ok=True)
    for path in (old_object, old_tools / "complete", *others):
        path.write_text("")
    long_ago = time.time() - 15 * 24 * 60 * 60
    # They are old, and used again before the next look.
    for path in (old_object, old_tools, *others, *used):
        os.utime(path, (long_ago, long_ago))
    forgetful()
    monkeypatch.setattr(compiler, "prune", lambda: None)
    kernel(200)
    (own_cache / "pruned").unlink(missing_ok=True)
    cache.prune()
    assert not old_object.exists()
    assert not old_tools.exists()
    assert all(path.exists() for path in [*others, *used])
    assert compiler.tools().folder.exists()

"""The source distribution, made from a copy of the sources; the wheel, made from that, installed
elsewhere, and used from there.

Run: pytest tests/test_packaging.py
"""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import mlxstacks
from mlxstacks.cli import make_group
from mlxstacks.cli.shell import shell_files

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ("mlxstacks", "kernels", "recipes", "pyproject.toml", "README.md", "LICENSE", "setup.py")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, by way of the source distribution; without network, and from a copy, so that
    nothing is left in the sources.
    """
    source = tmp_path_factory.mktemp("source")
    for name in CARRIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source / name)
    built = tmp_path_factory.mktemp("built")
    build = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
    run(sys.executable, "-c", build.format("sdist"), built, cwd=source)
    [archive] = built.glob("*.tar.gz")
    shutil.unpack_archive(archive, built, filter="data")
    run(
        sys.executable, "-c", build.format("wheel"), built, cwd=built / archive.stem[: -len(".tar")]
    )
    [found] = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the installed wheel and nothing of the sources."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile"]
    run(*pip, "--target", target, wheel, cwd=target)
    return target


def sources(folder: str) -> set[str]:
    """Files that belong in the wheel, by their path inside the folder."""
    files = {p.relative_to(ROOT / folder).as_posix() for p in (ROOT / folder).rglob("*")}
    return {f for f in files if "__pycache__" not in f and (ROOT / folder / f).is_file()}


def test_wheel_holds_every_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"mlxstacks/{f}" for f in sources("mlxstacks")}
    expected |= {f"mlxstacks/_recipes/{f}" for f in sources("recipes")}
    expected |= {f"mlxstacks/_kernels/{f}" for f in sources("kernels")}
    missing = sorted(expected - names)
    assert not missing, "not in the wheel: see [tool.setuptools] in pyproject.toml"
    surplus = {n for n in names - expected if ".dist-info/" not in n}
    share = f"mlxstacks-{mlxstacks.__version__}.data/data/share/"
    assert surplus == {share + path for path in shell_files(make_group())}


def test_every_folder_with_code_is_listed() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    listed = set(tools["setuptools"]["packages"])
    folders = {p.parent for p in (ROOT / "mlxstacks").rglob("*.py")}
    expected = {".".join(p.relative_to(ROOT).parts) for p in folders}
    assert listed == expected | {"mlxstacks._kernels", "mlxstacks._recipes"}


def test_what_is_installed_finds_itself_its_recipes_and_kernels(
    elsewhere: Path, tmp_path: Path
) -> None:
    code = (
        "import mlxstacks; from mlxstacks.resources import resource_dir as d\n"
        "places = d('kernels') / 'README.md', d('recipes') / 'fuse-refit.yaml'\n"
        "print(mlxstacks.__file__, *places, sep='\\n')"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(elsewhere))
    paths = [Path(line) for line in done.stdout.splitlines()]
    assert len(paths) == 3
    assert all(path.is_file() and path.is_relative_to(elsewhere) for path in paths), paths


@pytest.mark.skipif(
    not (ROOT / "mlxstacks/assets/nano").is_dir(), reason="the built-in model is not built yet"
)
def test_installed_command_plans_on_nano(elsewhere: Path, tmp_path: Path) -> None:
    words = "run", "fuse-refit", "--dry-run"
    done = run(elsewhere / "bin" / "mlxstacks", *words, cwd=tmp_path, PYTHONPATH=str(elsewhere))
    assert "mlxstacks-out/fuse" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_editable_install_uses_the_top_level_folders() -> None:
    from mlxstacks.resources import resource_dir

    if Path(mlxstacks.__file__).parent == ROOT / "mlxstacks":
        assert resource_dir("recipes") == ROOT / "recipes"
        assert resource_dir("kernels") == ROOT / "kernels"

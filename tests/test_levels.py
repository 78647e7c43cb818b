"""The table of levels, enforced by reading every import in the package (function-level ones too).

A file imports lower levels, or files of its own folder without a circle; only `base_model`
imports mlx_lm; files of settings import neither mlx nor numpy.
Run: pytest tests/test_levels.py
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import mlxstacks
from mlxstacks.recipe.table import COMMANDS

PACKAGE = Path(mlxstacks.__file__).parent

# These have no imports of their own, so every level may use them.
FOUNDATION = -1
LEVELS = {
    "command_line": FOUNDATION,
    "errors": FOUNDATION,
    "regular_files": FOUNDATION,
    "resources": FOUNDATION,
    "settings": FOUNDATION,
    **dict.fromkeys(("ops", "data", "stats", "memory", "processes"), 0),
    "base_model": 1,
    "files": 2,
    **dict.fromkeys(("layers", "sandbox", "study"), 3),
    **dict.fromkeys(("convert", "fuse", "training", "evaluate", "grading"), 4),
    **dict.fromkeys(("agreement", "routing", "guard"), 5),
    **dict.fromkeys(("arms", "serve"), 6),
    **dict.fromkeys(("studies", "nano"), 7),
    "grow": 8,
    **dict.fromkeys(("recipe", "doctor", "share"), 9),
    **dict.fromkeys(("report", "keywords"), 10),
    **dict.fromkeys(("api", "cli"), 11),
    "__main__": 12,
}

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def module_name(file: Path) -> str:
    """`fuse/plan.py` is mlxstacks.fuse.plan; `fuse/__init__.py` is mlxstacks.fuse."""
    parts = ["mlxstacks", *file.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def unit(module: str) -> str:
    """The row of the table a module belongs to: its first name below the package."""
    return module.split(".")[1] if "." in module else ""


@cache
def imported_modules(file: Path, source: str | None = None) -> tuple[str, ...]:
    """Every module that a file names in an import, absolute, at any depth of the code."""
    return tuple(_imported(file, source or (PACKAGE / file).read_text()))


def _imported(file: Path, source: str) -> Iterator[str]:
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            submodules = [f"{base}.{a.name}" for a in node.names if f"{base}.{a.name}" in MODULES]
            yield from submodules
            # `from mlxstacks import data` names the submodule, not the package.
            if len(submodules) < len(node.names):
                yield base


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    """At any depth; what is in expressions is left aside, for no import is."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(block, name, ()):
            yield node
            yield from _statements(node)


def own_imports(file: Path) -> set[str]:
    """Modules of this package that a file imports, cut back to a name that exists as a file."""
    found = set()
    for name in imported_modules(file):
        if name.split(".")[0] == "mlxstacks" and unit(name):
            found.add(name)
    return found


def upward(module: str, imported: str) -> bool:
    """Whether `module` may not import `imported` by the table (circles are a test of their own).

    The package itself knows the table of commands, which are its functions.
    """
    if not unit(module):
        return imported != "mlxstacks.recipe.table"
    if unit(module) == unit(imported):
        return False
    level = LEVELS[unit(imported)]
    return level != FOUNDATION and level >= LEVELS[unit(module)]


def test_every_file_has_a_level() -> None:
    unknown = {unit(name) for name in MODULES if unit(name)} - LEVELS.keys()
    assert not unknown, f"add to the table, or move: {sorted(unknown)}"


def test_imports_point_downward() -> None:
    pairs = ((file, name) for file in FILES for name in sorted(own_imports(file)))
    wrong = [f"{file}: {name}" for file, name in pairs if upward(module_name(file), name)]
    assert not wrong, "imports of the own level or a higher one:\n" + "\n".join(wrong)


def test_no_circle_inside_a_folder() -> None:
    graph = {
        name: {
            other for other in own_imports(file) if other in MODULES and unit(other) == unit(name)
        }
        for name, file in MODULES.items()
    }
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"imports in a circle: {' -> '.join(error.args[1])}")


# A run of training is no study; and what is left to move to study/: this may only shrink.
TRAINING = {"train"}
SHARED = {
    ("benchmarks", "route"), ("compare", "stack"), ("psn", "stack"), ("route", "stack"),
}  # fmt: skip


def test_no_study_imports_another() -> None:
    pairs = {
        (file.parts[1].removesuffix(".py"), name.split(".")[2])
        for file in FILES
        if file.parts[0] == "studies" and len(file.parts) > 1
        for name in own_imports(file)
        if unit(name) == "studies" and name.count(".") > 1
    }
    found = {(one, two) for one, two in pairs if one != two and two not in TRAINING}
    assert found == SHARED


def test_only_base_model_imports_mlx_lm() -> None:
    found = {
        unit(module_name(file))
        for file in FILES
        for name in imported_modules(file)
        if name.split(".")[0] == "mlx_lm"
    }
    assert found == {"base_model"}


def test_scipy_waits_until_it_is_called() -> None:
    """Its distributions take as long to import as a whole start of the command."""
    early = re.compile(r"^(?:import|from) scipy", re.MULTILINE)
    assert not [str(file) for file in FILES if early.search((PACKAGE / file).read_text())]


def test_settings_load_without_mlx_or_numpy() -> None:
    """One process loads every settings module of the command table, and the table itself."""
    modules = sorted({command.settings.partition(":")[0] for command in COMMANDS.values()})
    modules += sorted(name for name in MODULES if name.endswith(".settings"))
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = sorted({'mlx', 'mlx_lm', 'numpy', 'transformers'} & set(sys.modules))\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("ops/affine.py", "from mlxstacks.files import shards", ["mlxstacks.files"]),
        ("ops/affine.py", "from . import policies", ["mlxstacks.ops"]),
        ("ops/affine.py", "from ..errors import InputError", ["mlxstacks.errors"]),
        ("ops/affine.py", "def f():\n    import mlx_lm.utils", ["mlx_lm.utils"]),
        ("stats.py", "from mlxstacks import errors", ["mlxstacks.errors"]),
        ("stats.py", "from mlxstacks import __version__", ["mlxstacks"]),
    ],
)
def test_reader_resolves_every_form(file: str, source: str, expected: list[str]) -> None:
    found = list(imported_modules(Path(file), source))
    assert [name.removesuffix(".shards").removesuffix(".policies") for name in found] == expected


def test_table_catches_what_it_should() -> None:
    assert upward("mlxstacks.ops.affine", "mlxstacks.files.shards")
    assert upward("mlxstacks.evaluate", "mlxstacks.fuse")
    assert upward("mlxstacks.stats", "mlxstacks.data")
    assert not upward("mlxstacks.fuse.plan", "mlxstacks.files.shards")
    assert not upward("mlxstacks.fuse.plan", "mlxstacks.fuse.settings")
    assert not upward("mlxstacks.stats", "mlxstacks.errors")

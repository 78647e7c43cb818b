"""Do the tests notice? Small changes of the code, one by one, each against the tests of its file.

    python -m benchmarks.mutants mlxstacks/layers mlxstacks/routing --count 40 --seed 1

A change swaps a comparison or an operation, shifts a number, negates a condition, or drops a call
whose value nobody takes. It is made in a copy of the last commit, by a random choice that the seed
fixes; the tests are those that name the module. Survivors are printed with their line: read them,
since some changes make no difference that could be seen.
"""

import argparse
import ast
import io
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn,
    ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
# Longer than this the tests of a change are taken to hang, which notices it.
LIMIT_SECONDS = 300


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """(node, what could be done to it) of every place outside docstrings, messages and types."""
    silent = {id(inner) for node in ast.walk(tree) for inner in _unseen(node)}
    for node in ast.walk(tree):
        if id(node) in silent:
            continue
        if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            yield node, "compare"
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
            yield node, "operate"
        elif isinstance(node, ast.If | ast.IfExp):
            yield node, "negate"
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            yield node, "shift"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "drop"


def _unseen(node: ast.AST) -> Iterator[ast.AST]:
    """What a test rightly does not hold: words of errors, annotations, tables of Field."""
    parts: list[ast.AST | None] = []
    if isinstance(node, ast.Raise | ast.JoinedStr):
        parts = [node]
    elif isinstance(node, ast.arg | ast.AnnAssign):
        parts = [node.annotation]
    elif isinstance(node, ast.FunctionDef):
        parts = [node.returns]
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "progress"):
        parts = [node]
    for part in filter(None, parts):
        yield from ast.walk(part)


def apply(node: ast.AST, what: str) -> None:
    """Change the node in place."""
    if what == "compare" and isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    elif what == "operate" and isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif what == "negate" and isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif what == "shift" and isinstance(node, ast.Constant):
        assert isinstance(node.value, bool | int | float)
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif what == "drop" and isinstance(node, ast.Expr):
        node.value = ast.Constant(value=None)


def tests_of(root: Path, file: Path) -> list[str]:
    """Test files that import the module; of the folder of its name where none does."""
    module = ".".join(file.with_suffix("").parts)
    package, _, name = module.rpartition(".")
    marks = (f"{module} import", f"import {module}", f"from {package} import {name}")
    found = [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("test_*.py"))
        if any(mark in path.read_text("utf-8") for mark in marks)
    ]
    folder = Path("tests", *file.parts[1:-1])
    return found or ([str(folder)] if (root / folder).is_dir() else [])


def is_noticed(root: Path, tests: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, timeout=LIMIT_SECONDS,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    return done.returncode == 1 or done.returncode == 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--count", type=int, default=20, help="changes of each folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    archive = subprocess.run(["git", "archive", "HEAD"], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(root, filter="data")
        for folder in options.folders:
            _campaign(root, folder, options.count, options.seed)


def _campaign(root: Path, folder: str, count: int, seed: int) -> None:
    files = [path.relative_to(root) for path in sorted((root / folder).rglob("*.py"))]
    places = [
        (file, number)
        for file in files
        for number, _ in enumerate(changes(ast.parse((root / file).read_text("utf-8"))))
    ]
    chosen = random.Random(seed).sample(places, min(count, len(places)))
    noticed, started = 0, time.monotonic()
    for file, number in chosen:
        text = (root / file).read_text("utf-8")
        tree = ast.parse(text)
        node, what = list(changes(tree))[number]
        line = ast.unparse(node).splitlines()[0][:90]
        apply(node, what)
        (root / file).write_text(ast.unparse(tree), "utf-8")
        try:
            dead = is_noticed(root, tests_of(root, file))
        finally:
            (root / file).write_text(text, "utf-8")
        noticed += dead
        if not dead:
            print(f"  survived: {file}:{getattr(node, 'lineno', 0)} {what}: {line}", flush=True)
    seconds = time.monotonic() - started
    print(f"{folder}: {noticed} of {len(chosen)} noticed, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""Write mlxstacks/__init__.pyi: the keywords of every function, for editors and type checkers.

python -m tools.stub
"""

import inspect
import textwrap
from pathlib import Path

import mlxstacks as ms
from mlxstacks.keywords import type_text

STUB = Path(ms.__file__).with_suffix(".pyi")
HEAD = '''"""Made from the settings by `python -m tools.stub`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import mlx.nn as nn
import pandas  # type: ignore[import-untyped]

from mlxstacks.errors import InputError as InputError
from mlxstacks.errors import Interrupted as Interrupted
from mlxstacks.errors import StoreError as StoreError
from mlxstacks.study.result import Result as Result

__version__: str
__all__: list[str]
'''


def stub() -> str:
    lines = [HEAD]
    functions = {
        name: value for name in ms.__all__ if not inspect.isclass(value := getattr(ms, name))
    }
    for name, function in sorted(functions.items()):
        signature = inspect.signature(function)
        words = [_word(parameter) for parameter in signature.parameters.values()]
        by_name = [p.kind is p.KEYWORD_ONLY for p in signature.parameters.values()]
        if any(by_name):
            words.insert(by_name.index(True), "*")
        words = [f"def {name}(" + words[0] if words else f"def {name}(", *words[1:]]
        text = ", ".join(word.replace(" ", "\0") for word in words)
        # Lines break between parameters alone.
        lines += textwrap.wrap(
            f"{text})\0->\0{type_text(signature.return_annotation)}:", 100,
            subsequent_indent="    ", break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        lines += [f'    """{(inspect.getdoc(function) or "").splitlines()[0]}"""', ""]
    return "\n".join(lines).replace("\0", " ").rstrip() + "\n"


def _word(parameter: inspect.Parameter) -> str:
    """`name: type = default`, without the modules that inspect would write before types."""
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    kind = type_text(parameter.annotation)
    # A Dataset's rows have no type that a checker could hold to be mappings.
    kind = kind.replace("pandas.DataFrame", "pandas.DataFrame | datasets.Dataset")
    return f"{stars}{parameter.name}: {kind}{default}"


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")

"""Stack LoRA adapters on quantized mixture-of-experts models, natively on MLX.

    import mlxstacks as ms
    print(ms.fuse("qwen3.5-35b-a3b-3bit", "adapters", "fused"))
    model, tokenizer = ms.load("qwen3.5-35b-a3b-3bit", store="stacks")
    print(ms.generate(model, tokenizer, "Who is king of Corva?", routed=True))
    ms.run("confound-nano").table("claims")

Every command but `chat`, `serve`, `init` and `completion` is a function too, `mlxstacks stack
compare` as `ms.stack_compare`, with the options as keywords: `help(ms.fuse)`. Importing mlxstacks
takes no time: what a name needs is imported when the name is first used. `__init__.pyi` tells
editors and type checkers the keywords; `python -m tools.stub` writes it from the settings.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from mlxstacks.recipe.table import COMMANDS, TERMINAL_ONLY, nearest

__version__ = "0.2.0"
# Name of the function -> command. `ms.generate` answers with a model that is loaded.
_FUNCTIONS = {
    command.replace(" ", "_"): command
    for command in COMMANDS
    if command not in ("generate", *TERMINAL_ONLY)
}
_ERRORS = ("InputError", "Interrupted", "StoreError")
__all__ = ["Result", "generate", "load", "recipes", "run", *_ERRORS, *_FUNCTIONS]


def __getattr__(name: str) -> Any:
    if name == "Result":
        return importlib.import_module("mlxstacks.study.result").Result
    if name in _ERRORS:
        return getattr(importlib.import_module("mlxstacks.errors"), name)
    if name in __all__:
        return importlib.import_module("mlxstacks.api").function_named(name)
    elsewhere = TERMINAL_ONLY.get(name)
    if name in importlib.import_module("mlxstacks.study").__all__:
        elsewhere = "it is in mlxstacks.study"
    hint = f"; {elsewhere}" if elsewhere else nearest(name, __all__)
    raise AttributeError(f"module 'mlxstacks' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


class _Package(ModuleType):
    """Importing a file of the folder mlxstacks/fuse would bind `fuse` to the folder: the name is
    the function's.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _FUNCTIONS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

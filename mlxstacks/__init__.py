"""Stack LoRA adapters on quantized mixture-of-experts models, natively on MLX.

    import mlxstacks as ms
    print(ms.fuse("qwen3.5-35b-a3b-3bit", "adapters", "fused"))
    model, tokenizer = ms.load("qwen3.5-35b-a3b-3bit", store="stacks")
    print(ms.generate(model, tokenizer, "Who is king of Corva?", routed=True))
    ms.run("confound-nano").table("arms")

Importing it takes no time: what a name needs is imported when the name is first used.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxstacks.api import fuse, generate, guard, load, run, stack, train
    from mlxstacks.study.result import Result

__version__ = "0.2.0"
__all__ = ["Result", "fuse", "generate", "guard", "load", "run", "stack", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mlxstacks' has no attribute {name!r}")
    if name in ("fuse", "guard"):
        return importlib.import_module(f"mlxstacks.{name}")
    if name == "Result":
        return importlib.import_module("mlxstacks.study.result").Result
    return importlib.import_module("mlxstacks.api").documented(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class CallablePackage(ModuleType):
    """A folder whose name is a function too: `mlxstacks.fuse.run` is its file, and
    `mlxstacks.fuse(...)` the function of `mlxstacks.api`.
    """

    @property
    def __wrapped__(self) -> Any:  # for `help` and `inspect.signature`
        return importlib.import_module("mlxstacks.api").documented(self.__name__.split(".")[-1])

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        doc: str | None = self.__wrapped__.__doc__
        return doc

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)

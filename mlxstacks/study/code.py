"""The code of a study of one's own, so that a change of it between two steps is seen."""

import inspect
import sys
import sysconfig
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import mlxstacks
from mlxstacks.errors import InputError
from mlxstacks.study.integrity import file_sha256

_CONSTANTS = (str, bytes, int, float, tuple, list, dict, set, frozenset)
_INSTALLED = (Path(sysconfig.get_path("stdlib")), Path(mlxstacks.__file__).parent)


# File -> the import that read it, and the start of its SHA-256 then.
_LOADED: dict[Path, tuple[object, str]] = {}


def code_digests(kind: type, until: type, *, is_new: bool = False) -> dict[str, str]:
    """File -> the start of its SHA-256, of each file that the class is in or refers to, as it was
    when it was first asked for after its import; and "code of CLASS" for what it is or refers to in
    the cells of a notebook.

    Followed is what a module holds, and what a function in a cell names: modules, classes,
    functions, but for installed ones, and a cell's constants. What is imported inside a function is
    not seen.

    until: the base of all studies, which is not part of this one. is_new: refuse a file that was
        edited since, and a function of before its module was loaded again. Raises: InputError.
    """
    home = Path(getattr(sys.modules[kind.__module__], "__file__", None) or ".").absolute().parent
    files, cells, seen = dict[str, str](), set[str](), set[object]()

    def follow(values: Iterable[Any]) -> None:
        for value in values:
            is_module = isinstance(value, ModuleType)
            if not is_module and not isinstance(value, FunctionType | type):
                continue
            module = value if is_module else sys.modules.get(value.__module__)
            if (file := getattr(module, "__file__", None)) is not None:
                path = Path(file).absolute()
                if module not in seen and path.is_file() and not is_installed(path):
                    seen.add(module)
                    name = path.relative_to(home) if path.is_relative_to(home) else path.name
                    files[str(name)] = _loaded_digest(path, module, is_new)
                    follow(vars(module).values())
            elif not is_module and value.__module__ == "__main__" and value not in seen:
                seen.add(value)
                follow_cell(value)

    def follow_cell(value: type | FunctionType) -> None:
        is_class = isinstance(value, type)
        follow(getattr(value, "__bases__", ()))
        for name, part in [*vars(value).items()] if is_class else [("", value)]:
            function = _function(part)
            if function is None and name[:2] == "__":  # its line, its module
                continue
            cells.add(f"{value.__qualname__} {name} {_code_of(part)}")
            held = function.__globals__ if function else {}
            used = {name: held[name] for name in _names(function) if name in held}
            cells.update(
                f"{n} = {_code_of(v)}" for n, v in used.items() if isinstance(v, _CONSTANTS)
            )
            for name, part in used.items():
                if is_new and isinstance(part, FunctionType | type) and _is_former(part):
                    raise InputError(
                        f"{name} is from before {part.__module__} was loaded again; import it again"
                    )
            follow(used.values())

    follow(kind.__mro__[: kind.__mro__.index(until)])
    if cells:
        files[f"code of {kind.__name__}"] = sha256("\n".join(sorted(cells)).encode()).hexdigest()[
            :16
        ]
    return files


def _loaded_digest(path: Path, module: Any, is_new: bool) -> str:
    now, spec = file_sha256(path)[:16], module.__spec__
    loaded, digest = _LOADED.get(path, (None, ""))
    if path not in _LOADED or loaded is not spec:
        _LOADED[path] = spec, now
        return now
    if is_new and now != digest:
        raise InputError(
            f"{path.name} was edited after it was imported, so that its former code would run; "
            f"importlib.reload({module.__name__}), or restart"
        )
    return digest


def _is_former(value: FunctionType | type) -> bool:
    module = sys.modules.get(value.__module__)
    current = getattr(module, value.__name__, value)
    if not getattr(module, "__file__", None) or current is value:
        return False
    return isinstance(value, type) or _code_of(current) != _code_of(value)


def is_installed(file: str | Path) -> bool:
    """Whether a file of code is of Python, of this package, or of another that was installed."""
    path = Path(file)
    packages = {"site-packages", "dist-packages"} & {*path.parts}
    return bool(packages) or any(map(path.is_relative_to, _INSTALLED))


def _function(value: Any) -> FunctionType | None:
    """What a method of any kind runs."""
    value = getattr(value, "__func__", getattr(value, "fget", value))
    return inspect.unwrap(value) if isinstance(value, FunctionType) else None


def _names(function: FunctionType | None) -> set[str]:
    names, waiting = set[str](), [function.__code__] if function else []
    while waiting:
        code = waiting.pop()
        names.update(code.co_names)
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]
    return names


def _code_of(value: Any) -> object:
    """What a function does, and a constant is, the same in every process."""
    value = getattr(_function(value), "__code__", value)
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [*map(_code_of, value.co_consts)]
    if isinstance(value, frozenset | set):
        return sorted(map(repr, value))
    if isinstance(value, tuple | list):
        return [*map(_code_of, value)]
    if isinstance(value, dict):
        return [(key, _code_of(held)) for key, held in value.items()]
    return repr(value) if isinstance(value, _CONSTANTS) else ""

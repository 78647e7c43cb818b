"""The code of a study of one's own, so that a change of it between two steps is seen."""

import ast
import dis
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from functools import cached_property, partial
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import resolve_name
from itertools import accumulate, count
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np

import mlxstacks
from mlxstacks.errors import InputError
from mlxstacks.study.integrity import file_sha256

# What they print tells them from others of their kind, in every process.
_TOLD_BY_REPR = (
    str, bytes, int, float, complex, range, slice, type(None), type(...), PurePath, Enum,
    re.Pattern, date, time, timedelta,
)  # fmt: skip
_INSTALLED = (Path(sysconfig.get_path("stdlib")), Path(mlxstacks.__file__).parent)


# File -> the import that read it, the start of its SHA-256 then, and the number of its reload or 0.
_LOADED: dict[Path, tuple[object, str, int]] = {}
_reloads = count(1)


@dataclass(frozen=True)
class Code:
    """digests: file -> the start of its SHA-256, of each file that a class is in or refers to, as
    it was when it was first asked for after its import; and "code of CLASS" for what it is or
    refers to in the cells of a notebook. unwatched: "NAME (TYPE)" of the values among these that
    have no digest.
    """

    digests: dict[str, str]
    unwatched: tuple[str, ...]


def code_of(
    kind: type, until: type, held: Mapping[str, Any] = MappingProxyType({}), *, is_new: bool = False
) -> Code:
    """Followed are imports of files, wherever they stand, and what a function in a cell names:
    modules, classes, functions and objects, but for those of installed packages; constants, arrays
    and data frames.

    until: the base of all studies, which is not part of this one. held: what its object holds
        besides, by name. is_new: refuse a file that was edited since, and a function of before its
        module was loaded again. Raises: InputError.
    """
    own = sys.modules.get(kind.__module__)
    reader = _Reader(Path(getattr(own, "__file__", None) or ".").absolute().parent, is_new)
    for value in kind.__mro__[: kind.__mro__.index(until)]:
        reader.follow(value)
    if reader.cells:
        for name, value in held.items():
            reader.use(f"self.{name}", value)
        digest = sha256("\n".join(sorted(reader.cells)).encode()).hexdigest()
        reader.files[f"code of {kind.__name__}"] = digest[:16]
    return Code(reader.files, tuple(sorted(reader.unwatched)))


class _Reader:
    """home: what names of files begin at. files, unwatched: as in `Code`. cells: what stands in
    cells.
    """

    def __init__(self, home: Path, is_new: bool) -> None:
        self.home, self.is_new = home, is_new
        self.files = dict[str, str]()
        self.cells, self.unwatched = set[str](), set[str]()
        self._seen = set[object]()

    def follow(self, value: Any) -> None:
        """A module, or a class or function by where it is defined."""
        module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
        if (file := getattr(module, "__file__", None)) is not None:
            path = Path(file).absolute()
            if path.is_file() and not is_installed(path):
                assert module is not None
                self._follow_file(path, module.__name__, module.__package__ or "")
        # a module that nobody registered is read like cells
        elif (
            module in (None, sys.modules["__main__"])
            and value is not module
            and value not in self._seen
        ):
            self._seen.add(value)
            if isinstance(value, type):
                self._follow_class(value)
            else:
                self._follow_function(value, "")

    def _follow_file(self, path: Path, module_name: str, package: str) -> None:
        if path in self._seen:
            return
        self._seen.add(path)
        name = path.relative_to(self.home) if path.is_relative_to(self.home) else path.name
        module = sys.modules.get(module_name)
        self.files[str(name)] = _loaded_digest(path, module, self.is_new)
        for imported, is_copied in _imports(path, package):
            spec = _own_spec(imported)
            if spec is None:
                continue
            source = Path(str(spec.origin)).absolute()
            self._follow_file(source, imported, spec.parent or "")
            if self.is_new and is_copied and _LOADED[source][2] > _LOADED[path][2]:
                raise InputError(
                    f"{name} has values from before {imported} was loaded again; "
                    f"importlib.reload({module_name}), or restart"
                )

    def _follow_class(self, kind: type) -> None:
        for base in kind.__bases__:
            self.follow(base)
        for name, part in [*vars(kind).items()]:
            if function := _function(part):
                self._follow_function(function, f"{kind.__qualname__}.{name}")
            elif name[:2] != "__":  # its line, its module
                self.use(name, part, f"{kind.__qualname__}.")

    def _follow_function(self, function: FunctionType, name: str) -> None:
        """name: of a method. What installed packages put around a function is theirs."""
        if isinstance(inner := getattr(function, "__wrapped__", None), FunctionType):
            self._follow_function(inner, name)
        code = function.__code__
        if is_installed(code.co_filename):
            return
        name = name or function.__qualname__
        self.cells.add(f"{name} {_code_of(code)}")
        self._use_held(function, name)
        for imported in _imports_in(code):
            if (spec := _own_spec(imported)) is not None:
                self._follow_file(Path(str(spec.origin)).absolute(), imported, spec.parent or "")
        for used in sorted(_globals_in(code) & function.__globals__.keys()):
            value = function.__globals__[used]
            if self.is_new and isinstance(value, FunctionType | type) and _is_former(value):
                raise InputError(
                    f"{used} is from before {value.__module__} was loaded again; import it again"
                )
            self.use(used, value)

    def _use_held(self, function: FunctionType, name: str) -> None:
        """The defaults and attributes of a function, and what it encloses."""
        if (function, name) in self._seen or is_installed(function.__code__.co_filename):
            return
        self._seen.add((function, name))
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for place, value in enumerate(defaults):
            self.use(f"default {place}", value, f"{name} ")
        for attribute, value in vars(function).items():
            if attribute != "__wrapped__":
                self.use(attribute, value, f"{name} ")
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for free, cell in cells:
            with suppress(ValueError):  # nothing is in it yet
                self.use(free, cell.cell_contents, f"{name} ")

    def use(self, name: str, value: Any, of: str = "") -> None:
        """A value that code in a cell names; of: what it has to be told apart by."""
        if isinstance(value, MethodType | BuiltinFunctionType):
            self.use(f"{name} of", value.__self__, of)
        function = _function(value)
        if function or isinstance(value, type | ModuleType):
            self.cells.add(f"{of}{name} = {getattr(function or value, '__qualname__', '')}")
            self.follow(function or value)
            if function and function.__module__ != "__main__":  # made by one of a file
                self._use_held(function, name)
            return
        if not isinstance(value, _TOLD_BY_REPR):
            self.follow(type(value))
        try:
            self.cells.add(f"{of}{name} = {_code_of(value)}")
        except (TypeError, RecursionError):
            if not name.startswith("_"):
                self.unwatched.add(f"{name} ({type(value).__name__})")


def _imports(path: Path, package: str) -> Iterator[tuple[str, bool]]:
    """(name of a module, whether what it holds is copied) of each import in a file of Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # no Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            try:
                base = resolve_name(base, package)
            except ImportError:  # relative, and there is no package
                continue
            yield base, True
            yield from ((f"{base}.{alias.name}", False) for alias in node.names)


def _own_spec(name: str) -> ModuleSpec | None:
    """Of a module that is not installed, without an import; None for others, and for no module."""
    path, spec = None, None
    for part in accumulate(name.split("."), "{}.{}".format):
        module = sys.modules.get(part)
        spec = getattr(module, "__spec__", None) or PathFinder.find_spec(part, path)
        if spec is None or (spec.origin and is_installed(Path(spec.origin).absolute())):
            return None
        path = spec.submodule_search_locations
        if path is None and part != name:
            return None
    return spec if spec and spec.origin and Path(spec.origin).is_file() else None


def _loaded_digest(path: Path, module: Any, is_new: bool) -> str:
    now, spec = file_sha256(path)[:16], getattr(module, "__spec__", None)
    loaded, digest, number = _LOADED.get(path, (None, "", 0))
    if path not in _LOADED or loaded is not spec or _loads_by_itself():
        # a module that nothing had imported yet has no spec
        again = loaded is not None and loaded is not spec
        _LOADED[path] = spec, now, next(_reloads) if again else number
        return now
    if is_new and module is not None and now != digest:
        raise InputError(
            f"{path.name} was edited after it was imported, so that its former code would run; "
            f"importlib.reload({module.__name__}), or restart"
        )
    return digest


def _loads_by_itself() -> bool:
    """Whether IPython's autoreload is on, which changes modules in place."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    loaded = getattr(getattr(shell, "extension_manager", None), "loaded", ())
    return any("autoreload" in name for name in loaded)


def _is_former(value: FunctionType | type) -> bool:
    module = sys.modules.get(value.__module__)
    current = getattr(module, value.__name__, value)
    if not getattr(module, "__file__", None) or current is value:
        return False
    if isinstance(current, FunctionType) and isinstance(value, FunctionType):
        return _code_of(current.__code__) != _code_of(value.__code__)
    return True


def is_installed(file: str | Path) -> bool:
    """Whether a file of code is of Python, of this package, or of another that was installed."""
    path = Path(file)
    packages = {"site-packages", "dist-packages"} & {*path.parts}
    return bool(packages) or any(map(path.is_relative_to, _INSTALLED))


def _function(value: Any) -> FunctionType | None:
    """What a function, a method or property of any kind, or one that numpy vectorized, runs."""
    for name in ("__func__", "fget", "pyfunc"):
        value = getattr(value, name, value)
    if isinstance(value, cached_property):
        value = value.func
    if not isinstance(value, FunctionType | type):
        value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None


def _globals_in(code: CodeType) -> set[str]:
    """Names of globals that code reads, with what is defined within it."""
    names = {
        str(step.argval)
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    }
    return names.union(*(_globals_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def _imports_in(code: CodeType) -> set[str]:
    """Names of modules that code imports when it runs."""
    names, base = set[str](), ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            names.add(base := str(step.argval))
        elif step.opname == "IMPORT_FROM":
            names.add(f"{base}.{step.argval}")
    return names.union(*(_imports_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def _code_of(value: Any) -> object:
    """What code does, and a value is, the same in every process.

    Raises: TypeError: a value whose kind has no digest.
    """
    kind = type(value)
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [*map(_code_of, value.co_consts)]
    if isinstance(value, _TOLD_BY_REPR):
        return repr(value)
    if isinstance(value, frozenset | set):
        return sorted(map(repr, value))
    if isinstance(value, tuple | list):
        return [*map(_code_of, value)]
    if kind.__module__ in ("builtins", "collections") and isinstance(value, dict):
        factory = _code_of(getattr(value, "default_factory", None))
        return factory, [(_code_of(key), _code_of(held)) for key, held in value.items()]
    if isinstance(value, partial):
        return [_code_of(part) for part in (value.func, value.args, value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value)}
        return kind.__qualname__, _code_of(held | getattr(value, "__dict__", {}))
    if callable(to_frame := getattr(value, "to_frame", None)):  # a series of pandas
        value = to_frame()
    if hasattr(value, "columns") and hasattr(value, "to_csv"):  # a frame
        kinds = [(str(name), repr(kind)) for name, kind in value.dtypes.items()]
        whole = kind.__name__, value.to_csv(), kinds, value.columns.names
        return sha256(repr(whole).encode()).hexdigest()
    if callable(getattr(value, "tolist", None)):  # an array of numpy, MLX, torch
        array = value if isinstance(value, np.ndarray) else np.asarray(value.tolist())
        data = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        return array.shape, str(value.dtype), sha256(data).hexdigest()
    if function := _function(value):  # within a list, say
        return _code_of(function.__code__)
    if isinstance(value, type | ModuleType | BuiltinFunctionType | np.ufunc):
        return getattr(value, "__name__", "")
    raise TypeError(kind)

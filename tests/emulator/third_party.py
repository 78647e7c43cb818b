"""Kernels that nobody here wrote: mlx-lm's, built by another maker than mx.fast.metal_kernel.

`as_if_on_metal(maker)` makes MLX look like one with a Metal device whose kernels `maker` builds,
and `fresh` loads a module of mlx-lm anew inside it, so that nothing installed is touched. A
`Recorder` keeps what the modules handed to the maker: text for the lint, calls to print.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]


@dataclass(eq=False)
class Recorder:
    """A maker that remembers every kernel's text and the arguments of every call."""

    maker: Callable[..., Kernel]
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(
        self,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
    ) -> Kernel:
        text = {
            "name": name,
            "input_names": input_names,
            "output_names": output_names,
            "source": source,
            "header": header,
            "ensure_row_contiguous": ensure_row_contiguous,
            "atomic_outputs": atomic_outputs,
        }
        self.texts[name] = text
        kernel = self.maker(**text)

        def call(**arguments: Any) -> list[mx.array]:
            self.calls.append((name, arguments))
            return kernel(**arguments)

        return call


@contextmanager
def as_if_on_metal(maker: Callable[..., Kernel]) -> Iterator[None]:
    """MLX says that its default device is a Metal GPU, and kernels are built by `maker`.

    MLX's own operations still run where they did.
    """
    with (
        patch.object(mx.fast, "metal_kernel", maker),
        patch.object(mx.metal, "is_available", lambda: True),
        patch.object(mx, "default_device", lambda: mx.gpu),
    ):
        yield


def fresh(name: str) -> ModuleType:
    """A new copy of the installed module `name`; the imported one stays as it is.

    Kernels that a module builds while it is imported are built again.
    """
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    copy = importlib.util.spec_from_file_location(f"{name}_in_the_emulator", spec.origin)
    assert copy is not None
    assert copy.loader is not None
    module = importlib.util.module_from_spec(copy)
    module.__package__ = name.rpartition(".")[0]
    # Dataclasses look their module up by name.
    with patch.dict(sys.modules, {copy.name: module}):
        before = set(sys.modules)
        copy.loader.exec_module(module)
        imported = set(sys.modules) - before
    for parent, _, leaf in (path.rpartition(".") for path in imported):
        if hasattr(sys.modules.get(parent), leaf):  # else who asks the package gets another copy
            delattr(sys.modules[parent], leaf)
    return module


def printed_by_mlx(text: dict[str, Any], arguments: dict[str, Any]) -> str:
    """The Metal text that MLX itself makes for one call; no device is needed.

    Tracing a call reaches MLX's generator, which prints to the process's standard output.
    text: arguments of mx.fast.metal_kernel. arguments: those of the call.
    """
    kernel = mx.fast.metal_kernel(**text)
    inputs = [mx.array(value) for value in arguments["inputs"]]

    def call(*traced: mx.array) -> list[mx.array]:
        return kernel(**{**arguments, "inputs": list(traced), "verbose": True, "stream": mx.gpu})

    with tempfile.TemporaryDirectory() as folder, _standard_output() as printed:
        mx.export_function(os.path.join(folder, "traced.mlxfn"), call, *inputs)
    whole = printed()
    return whole.split("```\n", 1)[1].rsplit("\n```", 1)[0]


@contextmanager
def _standard_output() -> Iterator[Callable[[], str]]:
    """What the process writes to descriptor 1, from C++ too; the function reads it afterwards."""
    sys.stdout.flush()
    saved = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        content: list[str] = []
        try:
            yield lambda: content[0]
        finally:
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            content.append(file.read())

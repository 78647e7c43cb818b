"""mlx-lm's gated delta recurrence, replaced while a model trains."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlxstacks.ops import gated_delta

# mlx-lm's function and the one in its place, for each remover not called yet.
_installs: dict[object, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def install_gated_delta() -> Callable[[], None]:
    """Train every mlx-lm model with the chunked recurrence; returns the function that undoes it.

    mlx-lm's models bind `gated_delta_update` by name when they are imported. So it is rebound in
    each module of mlx_lm that holds it, and in the defining module, where models imported later
    find it. A call with use_kernel=False, as every model makes in training, goes to
    `ops.gated_delta`; any other to mlx-lm's own function. Installs nest: the originals return with
    the last removal, and calling one remover twice does no harm.
    """
    from mlx_lm.models import gated_delta as theirs

    original = theirs.gated_delta_update

    @functools.wraps(original)
    def gated_delta_update(*arrays: Any, use_kernel: bool = True, **options: Any) -> Any:
        if use_kernel:
            return original(*arrays, use_kernel=True, **options)
        return gated_delta.gated_delta_update(*arrays, use_kernel=False, **options)

    pair = next(iter(_installs.values()), None) or (original, gated_delta_update)
    _rebind(*pair)
    token = object()
    _installs[token] = pair

    def remove() -> None:
        if _installs.pop(token, None) and not _installs:
            _rebind(*reversed(pair))

    return remove


@contextmanager
def gated_delta_installed() -> Iterator[None]:
    """`install_gated_delta` for the length of a `with` block."""
    remove = install_gated_delta()
    try:
        yield
    finally:
        remove()


def _rebind(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Put `new` under every name that stands for `old` in the imported modules of mlx_lm."""
    modules = list(sys.modules.items())  # at once: another thread may be importing
    for module in [module for name, module in modules if name.startswith("mlx_lm.")]:
        for name in [name for name, value in vars(module).items() if value is old]:
            setattr(module, name, new)

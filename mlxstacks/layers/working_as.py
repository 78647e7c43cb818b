"""Modules that work as ones of another class for the length of a block."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import mlx.nn as nn


@contextmanager
def working_as(classes: Iterable[tuple[nn.Module, type]]) -> Iterator[None]:
    """Each module is of its class here inside, and of its own again afterwards. A subclass of its
    own keeps paths, weights and isinstance checks as they are.
    """
    pairs = [(module, type(module), kind) for module, kind in classes]
    try:
        for module, _, kind in pairs:
            module.__class__ = kind
        yield
    finally:
        for module, own, _ in pairs:
            module.__class__ = own

"""PATTERN=N: bits for the modules whose path matches a shell pattern; the last match wins.

Imports neither mlx nor numpy: settings use it.
"""

import fnmatch
from collections.abc import Iterable

ALLOWED_BITS = (2, 3, 4, 5, 6, 8)

ModuleBits = tuple[str, int | None]  # pattern, bits or None for floats


def parse_module_bits(pair: str, setting: str, floats: bool = False) -> ModuleBits:
    """floats: N may be none. Raises: ValueError naming the setting."""
    pattern, _, bits = pair.rpartition("=")
    if pattern and floats and bits == "none":
        return pattern, None
    if not pattern or not bits.isdigit() or int(bits) not in ALLOWED_BITS:
        allowed = ", ".join(map(str, ALLOWED_BITS)) + (", none" if floats else "")
        raise ValueError(f"{setting} takes PATTERN=N with N one of {allowed}; got {pair!r}")
    return pattern, int(bits)


def bits_of_module(module: str, pairs: Iterable[ModuleBits], default: int | None) -> int | None:
    """Bits of a module path; the default where no pattern matches it."""
    bits = default
    for pattern, given in pairs:
        if fnmatch.fnmatchcase(module, pattern):
            bits = given
    return bits

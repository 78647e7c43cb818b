"""MLX's own Metal functions as a header for the emulator, read from the installed package.

The files hold more than a CPU can take (matrices of SIMD groups, function constants), so the
definitions that are asked for are cut out; their text is not changed but for the attributes of
arguments, which an ordinary function does not have.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mlx.core as mx

KERNELS = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"

_ATTRIBUTE = re.compile(r"\s*\[\[[^\[\]]*\]\]")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

# What affine_quantize, affine_dequantize and the matrix-vector products call.
QUANTIZED = (
    ("quantized.h", r"MLX_MTL_CONST"),
    ("quantized.h", r"get_pack_factor|get_bytes_per_pack"),
    ("quantized.h", r"load_vector|load_vector_safe|qdot|qdot_safe|qmv_fast_impl|qmv_impl"),
    ("quantized.h", r"affine_quantize|affine_dequantize"),
)
LIMITS = (("utils.h", r"Limits|instantiate_default_limit|instantiate_float_limit"),)


def definitions(file: str, names: str) -> str:
    """Text of the top-level definitions of `file` whose heads name one of `names`, in order.

    names: a regular expression for whole words.
    Raises: ValueError when one of the alternatives defines nothing.
    """
    items = _items(file)
    for name in names.split("|"):
        if not any(_names(item, name) for item in items):
            raise ValueError(f"{KERNELS / file} defines no {name}")
    found = [item for item in items if _names(item, names)]
    return _ATTRIBUTE.sub("", "\n".join(found))


def header() -> str:
    """What the kernels of `quantized.h` need, in the order of MLX's own includes."""
    parts = [definitions(file, names) for file, names in (*LIMITS, *QUANTIZED)]
    # The emulator has a Limits of its own; these kernels take MLX's.
    return "\n".join(["#define Limits LimitsOfMlx", *parts, ""])


def _names(item: str, names: str) -> bool:
    head = item if item.startswith("#") else item.split("{", 1)[0]
    return "complex_t" not in head and re.search(rf"\b(?:{names})\b", head) is not None


@cache
def _items(file: str) -> tuple[str, ...]:
    return tuple(_split(_COMMENT.sub("", (KERNELS / file).read_text())))


def _split(text: str) -> Iterator[str]:
    """Preprocessor lines and whole definitions, each with its braces balanced."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.strip() and not lines:
            continue
        lines.append(line)
        item = "\n".join(lines)
        if item.startswith("#"):
            whole = not line.endswith("\\")
        else:
            balanced = item.count("{") == item.count("}")
            whole = balanced and line.rstrip().endswith((";", "}"))
        if whole:
            yield item
            lines = []
    if lines:
        yield "\n".join(lines)

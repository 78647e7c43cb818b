r"""Regular expressions from untrusted files, by RE2: in time linear in the text, whatever they are.

RE2 has no look-around, back references or possessive repeats, its `\b`, `\w`, `\d` and `\s` know
ASCII alone, and `$` is the very end. `{,n}` and `[:alpha:]`, which it would read as other things
than Python's `re`, are refused.
"""

import functools
import re
from typing import Any

# Of one expression with its automata; a gap of 1,000 letters takes a tenth.
_MEMORY_BYTES = 1 << 19
_READ_OTHERWISE = re.compile(r"(?<!\\)\{,\d*\}|\[:\^?\w+:\]")
_OF_ASCII = re.compile(r"\\[bBwW]")


def re2_options(memory_bytes: int = _MEMORY_BYTES, *, ignore_case: bool = False) -> Any:
    """Options of RE2 that print nothing."""
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = memory_bytes
    options.case_sensitive = not ignore_case
    return options


@functools.lru_cache(maxsize=256)
def compile_expression(expression: str, *, ignore_case: bool = False) -> Any:
    """What `re2.compile` makes of it, which has `search` and `fullmatch`.

    Raises: ValueError saying what is not allowed, and what is instead.
    """
    import re2

    if (other := _READ_OTHERWISE.search(expression)) is not None:
        raise ValueError(
            f"{other[0]!r:.50} is something else to RE2 than to Python; write {{0,n}} for {{,n}}, "
            "and the letters of a class"
        )
    if not expression.isascii() and (other := _OF_ASCII.search(expression)) is not None:
        raise ValueError(
            f"{other[0]!r} knows ASCII letters alone, and there are others; write a class"
        )
    try:
        return re2.compile(expression, re2_options(ignore_case=ignore_case))
    except (re2.error, UnicodeEncodeError) as error:  # half a character, as JSON can write it
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(
            f"not read by RE2 ({reason:.100}), which has no look-around or back references"
        ) from None

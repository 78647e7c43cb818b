"""What Apple's compiler, or CUDA's, would refuse in a kernel although C++ on a CPU takes it.

Two parts. Rules on the text find what a kernel of ours must not hold because one of its targets
lacks it, and names that MLX, which looks for them as mere substrings, would misread. A compiler
pass checks address spaces: clang's OpenCL C++ without the generic address space has Metal's rule
that every pointer says where it points and never changes it. It knows Metal's library from
`lint_stdlib.h`, whose overloads keep calls with mixed types ambiguous.

`compiler_missing()` says why the second part cannot run here.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.emulator.cache import compiler_says
from tests.emulator.text import ATTRIBUTES

_STDLIB = Path(__file__).with_name("lint_stdlib.h")

_SUFFIXES = ("_shape", "_strides", "_ndim")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(
    r"(?<![\w.])(?:0[xX][\da-fA-F.]+[pP][+-]?\d+|(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)"
    r"(?P<suffix>\w*)"
)
_LAMBDA = re.compile(r"\[[&=\w\s,]*\]\s*\([^()]*\)\s*(?:mutable\s*)?(?:->\s*\w+\s*)?\{")

# Rules for any kernel: (what to look for, what is wrong with it).
_ANY = (
    (re.compile(r"\bdouble\b"), "double: Metal has no such type"),
    (_LAMBDA, "a lambda: Metal has none"),
)

# MLX's own kernels hold some, so Apple's compiler lets it pass; the language asked for has none.
_NEWER = (re.compile(r"\bif\s+constexpr\b"), "if constexpr: newer than Metal's C++14")

# Rules for a body that CUDA compiles too, whose names must come from the shims. Instead of an
# address space: `auto` for a pointer, since an input's space follows its size; SHARED_ARRAY for
# shared memory; another name for a local.
_OURS = (
    (re.compile(r"\bmetal\s*::"), "metal:: in a body: CUDA has no such namespace"),
    (
        re.compile(r"\b(?:device|constant|thread|threadgroup)\b"),
        "an address space in a body: Metal reserves the word and CUDA lacks it; see the lint",
    ),
    (
        re.compile(r"\b(?:simd|quad)_\w+\s*\("),
        "a SIMD function in a body: use xor_lane and tree_sum, whose order is the same everywhere",
    ),
    (
        re.compile(r"\b(?:threadgroup|simdgroup)_barrier\b"),
        "a Metal barrier in a body: use BARRIER()",
    ),
    (re.compile(r"\bas_type\b"), "as_type in a body: CUDA has none"),
    (re.compile(r"#\s*include\b"), "#include in a body: it stands inside a function"),
)

_KERNEL = re.compile(
    r"(?:template <(?P<parameters>[^<>]*)>\s*)?\[\[kernel\]\] void (?P<name>\w+)\("
)
_LINE_OF_ERROR = re.compile(
    r"(?:^|/)(?P<where>[\w.]+):(?P<line>\d+):\d+: (?P<kind>error|warning): (?P<what>.*)"
)

_CLANG = (
    *("-x", "clcpp", "-cl-std=clc++2021", "--target=spir64-unknown-unknown", "-fsyntax-only"),
    "-cl-no-stdinc",
    # As Metal reads them: an unsuffixed literal is a float. The rule on text is stricter.
    "-cl-single-precision-constant",
    "-Wc++98-c++11-c++14-compat",
    "-Wno-unknown-attributes",
    "-fno-caret-diagnostics",
    "-fno-color-diagnostics",
    "-ferror-limit=0",
)

# Without the generic address space a pointer that names no space points to private memory, and
# clang cannot copy structs. With it, structs are copied and such a pointer takes any address.
_NO_GENERIC = "-cl-ext=-all,+cl_khr_fp16"
_GENERIC = "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space"
_STRUCT_COPY = "no matching constructor for initialization"


def lint(
    header: str,
    body: str,
    *,
    ours: bool,
    input_names: Sequence[str] = (),
    inputs: Sequence[Any] = (),
    generated: str | None = None,
) -> list[str]:
    """Problems of one kernel, in words; empty when there are none.

    header, body: text as mx.fast.metal_kernel takes it.
    ours: also the rules that hold because the body is CUDA's as well, and that keep names apart.
    input_names: names of the inputs. inputs: the arrays or numbers of one call.
    generated: the whole text of one call, as MLX or the emulator prints it; it is compiled, unless
    `compiler_missing()`.
    """
    found = [*_text_problems(header, "header", ours), *_text_problems(body, "body", ours)]
    if ours:
        found += _body_problems(body)
        found += _name_problems(body, input_names)
        found += [
            f"input {name} is 0-d: a reference in Metal, a pointer in CUDA; give it shape (1,)"
            for name, value in zip(input_names, inputs, strict=False)
            if getattr(value, "ndim", 0) == 0
        ]
    if generated is not None and compiler_missing() is None:
        found += compile_problems(generated, newer=not ours)
    return found


def _text_problems(text: str, where: str, ours: bool) -> Iterator[str]:
    code = _without_comments(text)
    for pattern, problem in _ANY:
        yield from _matches(code, where, pattern, problem)
    if ours:
        yield from _matches(code, where, *_NEWER)
        for match in _NUMBER.finditer(code):
            if not re.fullmatch("[fFhH]|bf|BF", match["suffix"]):
                line = _line(code, match)
                yield f"{where}:{line}: {match[0]}: a double in C++ and CUDA; write {match[0]}f"


def _body_problems(body: str) -> Iterator[str]:
    code = _without_comments(body)
    for pattern, problem in _OURS:
        yield from _matches(code, "body", pattern, problem)


def _name_problems(body: str, input_names: Sequence[str]) -> Iterator[str]:
    """Names that MLX finds in other words; it searches the comments too."""
    words = sorted(set(_WORD.findall(body)))
    for name in input_names:
        if len(name) < 3:
            yield f"input {name}: too short a name, it may be part of another before _shape"
        for wanted in (name + suffix for suffix in _SUFFIXES):
            for word in words:
                if wanted in word and wanted != word and word not in _arguments(input_names):
                    yield f"{word} makes MLX pass {wanted}, an argument that nobody meant"
    for attribute in ATTRIBUTES:
        for word in words:
            if attribute in word and attribute != word and word not in ATTRIBUTES:
                yield f"{word} makes MLX pass the attribute {attribute}"
        declared = rf"[\w>\]]\s+{attribute}\s*(?:=(?!=)|;|\[|\()"
        if re.search(declared, _without_comments(body)):
            yield f"a local named {attribute} hides the attribute that MLX passes for it"


def _arguments(input_names: Sequence[str]) -> set[str]:
    return {name + suffix for name in input_names for suffix in _SUFFIXES}


def _matches(code: str, where: str, pattern: re.Pattern[str], problem: str) -> Iterator[str]:
    for match in pattern.finditer(code):
        yield f"{where}:{_line(code, match)}: {problem}"


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def _without_comments(text: str) -> str:
    """`text` with comments blanked, every line where it was."""
    return _COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


# --- the compiler's part -------------------------------------------------------------------------


@cache
def compiler_missing() -> str | None:
    """Why address spaces cannot be checked here, or None."""
    if shutil.which("clang") is None:
        return "no clang, which alone knows address spaces"
    probe = "__kernel void probe(const __global float* x, __constant int& n) {}\n"
    code, complaint = _run_clang(probe)
    return None if code == 0 else f"this clang takes no OpenCL C++: {complaint}"


def compile_problems(*generated: str, newer: bool = False) -> list[str]:
    """Errors of kernels' whole texts: address spaces, ambiguous calls, C++ newer than Metal's.

    generated: each text as MLX prints it, from the header to the explicit instantiation; those one
        header are compiled together.
    newer: C++17 may pass. Metal's language is C++14, yet MLX's own headers have an `if constexpr`.
    Raises: ValueError when the text holds no kernel or `compiler_missing()`.
    """
    if (reason := compiler_missing()) is not None:
        raise ValueError(reason)
    units: dict[str, list[str]] = {}
    for number, text in enumerate(generated):
        header, kernel = _as_opencl(text, number)
        units.setdefault(header, [f'#include "{_STDLIB}"', header]).append(kernel)
    return [p for unit in units.values() for p in _unit_problems("\n".join(unit), newer)]


def _unit_problems(text: str, newer: bool) -> list[str]:
    problems = _errors(text, _NO_GENERIC, newer)
    if any(_STRUCT_COPY in problem for problem in problems):
        problems = [problem for problem in problems if _STRUCT_COPY not in problem]
        problems += [extra for extra in _errors(text, _GENERIC, newer) if extra not in problems]
    return problems


def _errors(text: str, extensions: str, newer: bool) -> list[str]:
    code, printed = _run_clang(text, extensions)
    found = []
    for line in printed.splitlines():
        match = _LINE_OF_ERROR.search(line)
        modern = match is not None and "C++ standards before" in match["what"]
        if match and (match["kind"] == "error" or (modern and not newer)):
            found.append(f"{match['where']}:{match['line']}: {match['what']}")
    if code and not found:
        raise RuntimeError(f"clang failed:\n{printed}")
    return found


def _as_opencl(generated: str, number: int) -> tuple[str, str]:
    """Header and kernel as plain OpenCL: template values as locals, which may not be templates.

    Metal allows threadgroup arrays in kernels alone, and OpenCL too, so it has to be one.
    """
    kernels = list(_KERNEL.finditer(generated))
    if not kernels:
        raise ValueError("no [[kernel]] in the text")
    kernel = kernels[-1]
    end = generated.rfind("\ntemplate [[host_name(")
    used = re.search(rf"decltype\({kernel['name']}<([^<>]*)>\)", generated)
    values = used[1].split(", ") if used else []
    names = [word.strip() for word in (kernel["parameters"] or "").split(",") if word.strip()]
    settings = [
        f"using {parameter.split()[-1]} = {value};"
        if parameter.startswith("typename")
        else f"constexpr {parameter} = {value};"
        for parameter, value in zip(names, values, strict=True)
    ]
    start = generated.index(") {", kernel.end()) + len(") {")
    lines = [
        f"__kernel void {kernel['name']}_{number}(",
        generated[kernel.end() : start],
        *settings,
        '#line 1 "body"' + generated[start : end if end > 0 else None],
    ]
    return f'#line 1 "header"\n{generated[: kernel.start()]}', "\n".join(lines)


def _run_clang(text: str, extensions: str = _NO_GENERIC) -> tuple[int, str]:
    options = [*_CLANG, "-Xclang", extensions, "-"]
    return compiler_says(["clang", *options], [*options, _STDLIB.read_text()], text)

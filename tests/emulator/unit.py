"""From MLX's Metal text to a C++ unit: the few spellings that C++ does not have, and the entries.

The text stays as it is but for four things: the pragma for contraction, literals of 16-bit types,
declarations of threadgroup memory, and the explicit instantiation, in whose place every instance
gets an entry that the scheduler calls once for a thread.
"""

import re
from collections.abc import Sequence

from tests.emulator.text import ATTRIBUTES, Instance

_NAME = r"[A-Za-z_]\w*"
_EXTENTS = r"(?:\s*\[[^\[\]\n]*\])"
_TYPE = rf"(?:const\s+)?{_NAME}(?:::{_NAME})*(?:\s*<[^;{{}}()\n]*>)?(?:\s+(?:int|char|short|long))*"
# `threadgroup T a[4], b;` in a function, and `threadgroup T a[n]` as the end of a macro.
_SHARED = re.compile(
    rf"\bthreadgroup\s+(?P<type>{_TYPE})\s+"
    rf"(?P<names>{_NAME}{_EXTENTS}*(?:\s*,\s*{_NAME}{_EXTENTS}*)*)\s*(?P<end>;|$)",
    re.MULTILINE,
)
_CONTRACTION = re.compile(r"#pragma\s+METAL\s+fp\s+contract\s*\(\s*(\w+)\s*\)")
# 1.5h and 1.5bf: C++ has no such suffixes, and does not let anybody define them.
_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?)(h|H|bf|BF)\b")
_SYSTEM_HEADER = re.compile(r"^\s*#\s*include\s*<metal_\w+>", re.MULTILINE)

_SIZE = "({0}[0] * {0}[1] * {0}[2])"
_SCALARS = {
    "dispatch_quadgroups_per_threadgroup": "({dispatch} + 3u) / 4u",
    "dispatch_simdgroups_per_threadgroup": "({dispatch} + 31u) / 32u",
    "quadgroup_index_in_threadgroup": "t->thread_index_in_threadgroup / 4u",
    "quadgroups_per_threadgroup": "(t->threads_in_threadgroup + 3u) / 4u",
    "simdgroup_index_in_threadgroup": "t->thread_index_in_threadgroup / 32u",
    "simdgroups_per_threadgroup": "(t->threads_in_threadgroup + 31u) / 32u",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "t->thread_index_in_threadgroup % 4u",
    "thread_index_in_simdgroup": "t->thread_index_in_threadgroup % 32u",
    "thread_index_in_threadgroup": "t->thread_index_in_threadgroup",
    "threads_per_simdgroup": "32u",
}


def unit(instances: Sequence[Instance]) -> str:
    """One C++ text with `emulator_entry_0`, ... for instances that have one header.

    Lines of header and body keep their numbers in what the compiler and the reports say.
    """
    header = instances[0].source.header
    if any(instance.source.header != header for instance in instances):
        raise ValueError("instances of one unit need one header")
    parts = [f'#line 1 "{_quoted(instances[0].source.name)} (header)"\n', metal_to_cpp(header)]
    for i, instance in enumerate(instances):
        parts += [
            f"namespace emulator_unit_{i} {{\n",
            instance.signature,
            f'#line 1 "{_quoted(instance.source.name)}"\n',
            metal_to_cpp(instance.source.source),
            "\n}\n",
            _entry(i, instance),
            "}\n",
        ]
    return "".join(parts)


def metal_to_cpp(text: str) -> str:
    """`text` with the spellings of C++; the number of lines does not change."""
    text = _CONTRACTION.sub(r"#pragma clang fp contract(\1)", text)
    text = _LITERAL.sub(_literal, text)
    text = _SYSTEM_HEADER.sub("", text)
    return _SHARED.sub(_shared, text)


def _literal(found: re.Match[str]) -> str:
    return f"{'half' if found[2] in 'hH' else 'bfloat'}({found[1]})"


def _shared(found: re.Match[str]) -> str:
    names, end = found["names"], found["end"]
    if not end and "[" not in names:
        return found[0]  # prose, or the start of something longer
    declarations = []
    for declarator in re.findall(rf"{_NAME}{_EXTENTS}*", names):
        name = re.match(_NAME, declarator)
        assert name is not None
        extents = declarator[name.end() :].strip()
        declarations.append(f"EMULATOR_SHARED({name[0]}, {extents}, {found['type']})")
    return "; ".join(declarations) + end + "\n" * found[0].count("\n")


def _entry(number: int, instance: Instance) -> str:
    arguments = []
    for i, parameter in enumerate(instance.parameters):
        read_only = "" if parameter.role == "output" else "const "
        pointer = f"({read_only}{parameter.pointee}*)buffers[{i}]"
        arguments.append(f"*{pointer}" if parameter.by_reference else pointer)
    arguments += [_attribute(name) for name in instance.attributes]
    return (
        f'#line 1 "emulator"\nextern "C" __attribute__((visibility("default"))) '
        f"void emulator_entry_{number}(void* const* buffers, const EmulatorThread* t) {{\n"
        f"  {instance.instantiation}({', '.join(arguments)});\n}}\n"
    )


def _attribute(name: str) -> str:
    if name in _SCALARS:
        dispatch = _SIZE.format("t->dispatch_threads_per_threadgroup")
        return _SCALARS[name].format(dispatch=dispatch)
    assert ATTRIBUTES[name] == "uint3"
    if name == "grid_origin":
        return "uint3(0u, 0u, 0u)"
    field = "t->" + ("threads_per_grid" if name == "grid_size" else name)
    return f"uint3({field}[0], {field}[1], {field}[2])"


def _quoted(name: str) -> str:
    return name.replace("\\", "").replace('"', "")

"""The Metal text that MLX makes of a custom kernel, and the parameters that it gives it.

`mx.fast.metal_kernel` writes a signature around the caller's body: inputs, the shape, strides and
dimension arguments that the body names, outputs, and Metal's thread attributes that the body
names. A name counts as used wherever it occurs in the body, comments included.
`tests/test_metal_emulator.py` compares with what MLX prints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

# An input of fewer elements than this is in the `constant` address space.
CONSTANT_BELOW = 8

TYPE_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

# Metal's attributes in the order of MLX, with their types.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

Template = Sequence[tuple[str, "bool | int | mx.Dtype"]]


@dataclass(frozen=True)
class Source:
    """What `metal_kernel` is given."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    ensure_row_contiguous: bool = True
    atomic_outputs: bool = False


@dataclass(frozen=True)
class InputType:
    """How an input is passed: as a single value, in `constant` space when small, or as an array."""

    dtype: mx.Dtype
    single: bool
    small: bool

    @staticmethod
    def of(array: mx.array) -> "InputType":
        return InputType(array.dtype, array.ndim == 0, array.size < CONSTANT_BELOW)

    @property
    def space(self) -> str:
        return "constant" if self.small else "device"

    @property
    def suffix(self) -> str:
        """Its part in the kernel's name."""
        if self.single:
            return "s"
        return "c" if self.small else ""


@dataclass(frozen=True)
class Parameter:
    """One buffer argument. `role`: input, shape, strides, ndim or output; `of`: its position."""

    role: str
    of: int
    name: str
    declaration: str
    pointee: str
    by_reference: bool


@dataclass(frozen=True)
class Instance:
    """One kernel text for one set of input types, output types and template values."""

    source: Source
    inputs: tuple[InputType, ...]
    output_dtypes: tuple[mx.Dtype, ...]
    template: tuple[tuple[str, bool | int | mx.Dtype], ...]

    @property
    def template_values(self) -> list[str]:
        return [_template_value(value) for _, value in self.template]

    @property
    def function(self) -> str:
        """The function's name, made of all that makes MLX compile another one."""
        parts = ["custom_kernel_" + self.source.name]
        if self.template:
            parts.append("_" + "_".join(value.replace("-", "_") for value in self.template_values))
        parts += [TYPE_NAMES[x.dtype] + x.suffix for x in self.inputs]
        parts += [TYPE_NAMES[dtype] for dtype in self.output_dtypes]
        return "_".join(parts)

    @property
    def instantiation(self) -> str:
        """The function with its template arguments."""
        arguments = f"<{', '.join(self.template_values)}>" if self.template else ""
        return self.function + arguments

    @property
    def attributes(self) -> list[str]:
        return [name for name in ATTRIBUTES if name in self.source.source]

    @property
    def parameters(self) -> list[Parameter]:
        found: list[Parameter] = []
        body = self.source.source
        for i, (name, kind) in enumerate(zip(self.source.input_names, self.inputs, strict=True)):
            type_name = TYPE_NAMES[kind.dtype]
            found.append(
                _parameter("input", i, name, f"const {kind.space}", type_name, kind.single)
            )
            for role, pointee in (("shape", "int"), ("strides", "int64_t"), ("ndim", "int")):
                if not kind.single and f"{name}_{role}" in body:
                    found.append(
                        _parameter(
                            role, i, f"{name}_{role}", "const constant", pointee, role == "ndim"
                        )
                    )
        for i, (name, dtype) in enumerate(
            zip(self.source.output_names, self.output_dtypes, strict=True)
        ):
            type_name = TYPE_NAMES[dtype]
            pointee = f"atomic<{type_name}>" if self.source.atomic_outputs else type_name
            found.append(_parameter("output", i, name, "device", pointee, False))
        return found

    @property
    def signature(self) -> str:
        """Everything between header and body."""
        lines = ""
        if self.template:
            names = ", ".join(f"{_template_kind(value)} {name}" for name, value in self.template)
            lines += f"template <{names}>\n"
        arguments = [
            f"  {parameter.declaration} [[buffer({i})]]"
            for i, parameter in enumerate(self.parameters)
        ]
        arguments += [f"  {ATTRIBUTES[name]} {name} [[{name}]]" for name in self.attributes]
        return lines + f"[[kernel]] void {self.function}(\n" + ",\n".join(arguments) + ") {\n"

    @property
    def closing(self) -> str:
        """Everything behind the body."""
        if not self.template:
            return "\n}\n"
        full = self.instantiation
        return (
            f'\n}}\n\ntemplate [[host_name("{self.function}")]] [[kernel]] '
            f"decltype({full}) {full};\n"
        )

    @property
    def text(self) -> str:
        return self.source.header + self.signature + self.source.source + self.closing


def _parameter(
    role: str, of: int, name: str, space: str, pointee: str, by_reference: bool
) -> Parameter:
    mark = "&" if by_reference else "*"
    return Parameter(role, of, name, f"{space} {pointee}{mark} {name}", pointee, by_reference)


def _template_kind(value: bool | int | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return "typename"
    return "bool" if isinstance(value, bool) else "int"


def _template_value(value: bool | int | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        return TYPE_NAMES[value]
    return str(int(value))

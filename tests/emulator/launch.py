"""One launch: arrays in, the grid run in the current variant, arrays out, or a clear error."""

import ctypes
import math
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tests.emulator.arrays import Input, to_array
from tests.emulator.library import Compiled, compiled
from tests.emulator.memory import Buffers, pools
from tests.emulator.text import Instance
from tests.emulator.variants import LANE_ORDERS, POISONS, REDUCTIONS, Variant

LARGEST_THREADGROUP = 1024
LONGEST_MS = 200_000  # of the processor's time: a launch that takes longer counts as endless
_RAN, _DIVERGED, _FAULTED, _TOO_MUCH_SHARED, _TOO_LONG = range(5)

# Numbers that clang gives to its checks.
_CHECKS = {
    0: "signed overflow in an addition",
    1: "unreachable code was reached",
    3: "division by zero, or overflow in a division",
    5: "a float that does not fit the integer it is converted to",
    10: "a bool that is neither true nor false",
    11: "the end of a function that returns a value",
    12: "signed overflow in a multiplication",
    13: "signed overflow in a negation",
    18: "an index outside an array",
    19: "overflow of a pointer",
    20: "a shift by a negative number or by too many bits, or of a negative number",
    21: "signed overflow in a subtraction",
    22: "an address that is not aligned for its type",
}


class KernelError(RuntimeError):
    """A kernel did what a GPU may punish, or would let pass with an undefined result."""


class Launch(ctypes.Structure):
    """EmulatorLaunch of runtime.cpp."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("lane_order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("reduction", ctypes.c_uint32),
        ("flush", ctypes.c_uint32),
        ("poison", ctypes.c_uint32),
        ("shared_at_end", ctypes.c_uint32),
        ("stacks", ctypes.c_void_p),
        ("stack_bytes", ctypes.c_uint64),
        ("shared", ctypes.c_void_p),
        ("shared_bytes", ctypes.c_uint64),
        ("shared_gap", ctypes.c_uint64),
        ("signal_stack", ctypes.c_void_p),
        ("signal_stack_bytes", ctypes.c_uint64),
        ("milliseconds", ctypes.c_uint64),
        ("status", ctypes.c_uint32),
        ("signal_number", ctypes.c_uint32),
        ("trap", ctypes.c_uint32),
        ("shared_used", ctypes.c_uint32),
        ("thread", ctypes.c_uint32 * 3),
        ("line", ctypes.c_uint32),
        ("other_line", ctypes.c_uint32),
        ("same_key", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("what", ctypes.c_char_p),
        ("file", ctypes.c_char_p),
        ("other_what", ctypes.c_char_p),
        ("other_file", ctypes.c_char_p),
    )


_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class _Argument:
    """A buffer: its bytes, or how many an output has; `origin` as in Input."""

    name: str
    size: int
    content: np.ndarray | None = None
    origin: int = 0


def launch(
    instance: Instance,
    inputs: Sequence[Input],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[tuple[int, ...]],
    init_value: float | None,
    variant: Variant,
) -> list[mx.array]:
    """Raises: KernelError, which names the kernel and what it did."""
    kernel = compiled(instance, (variant.contraction, variant.traps))
    arguments = _arguments(instance, inputs, output_shapes)
    names, sizes = [a.name for a in arguments], [a.size for a in arguments]
    with Buffers(names, sizes, variant.guard, POISONS[variant.poison]) as memory:
        for argument, buffer in zip(arguments, memory.buffers, strict=True):
            if argument.content is not None:
                buffer.bytes[:] = argument.content
                memory.freeze(buffer)
        outputs = memory.buffers[len(arguments) - len(output_shapes) :]
        if init_value is not None:
            for buffer, dtype in zip(outputs, instance.output_dtypes, strict=True):
                value = Input.of(mx.full((1,), init_value, dtype)).bytes
                buffer.bytes[:] = np.tile(value, buffer.size // dtype.size)
        pointers = [b.address + a.origin for b, a in zip(memory.buffers, arguments, strict=True)]
        _run(kernel, instance, pointers, grid, threadgroup, variant, memory)
        for buffer in outputs:
            spilled = memory.spilled(buffer)
            if spilled:
                raise KernelError(f"{instance.source.name}: something wrote {spilled}")
        described = zip(outputs, output_shapes, instance.output_dtypes, strict=True)
        return [to_array(buffer.bytes, shape, dtype) for buffer, shape, dtype in described]


def _arguments(
    instance: Instance, inputs: Sequence[Input], output_shapes: Sequence[tuple[int, ...]]
) -> list[_Argument]:
    arguments = []
    for parameter in instance.parameters:
        if parameter.role == "output":
            elements = math.prod(output_shapes[parameter.of])
            size = elements * instance.output_dtypes[parameter.of].size
            arguments.append(_Argument(parameter.name, size))
            continue
        given, origin = inputs[parameter.of], 0
        if parameter.role == "input":
            content, origin = given.bytes, given.origin
        elif parameter.role == "shape":
            content = np.array(given.shape, np.int32).view(np.uint8)
        elif parameter.role == "strides":
            content = np.array(given.strides, np.int64).view(np.uint8)
        else:
            content = np.array([len(given.shape)], np.int32).view(np.uint8)
        arguments.append(_Argument(parameter.name, content.size, content, origin))
    return arguments


def _run(
    kernel: Compiled,
    instance: Instance,
    pointers: Sequence[int],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    variant: Variant,
    memory: Buffers,
) -> None:
    pool = pools()
    buffers = (ctypes.c_void_p * max(1, len(pointers)))(*pointers)
    # MLX makes a threadgroup no larger than the grid.
    clipped = [min(t, g) for t, g in zip(threadgroup, grid, strict=True)]
    state = Launch(
        entry=kernel.entry,
        buffers=ctypes.addressof(buffers),
        grid=(ctypes.c_uint32 * 3)(*grid),
        threadgroup=(ctypes.c_uint32 * 3)(*clipped),
        lane_order=LANE_ORDERS.index(variant.lane_order),
        seed=variant.seed,
        reduction=REDUCTIONS.index(variant.reduction),
        flush=variant.flush,
        poison=POISONS[variant.poison],
        shared_at_end=variant.guard == "end",
        stacks=pool.stacks,
        stack_bytes=pool.stack_bytes,
        shared=pool.shared,
        shared_bytes=pool.array_bytes,
        shared_gap=pool.shared_gap,
        signal_stack=pool.signal_stack,
        signal_stack_bytes=pool.signal_stack_bytes,
        milliseconds=LONGEST_MS,
    )
    with _one_at_a_time:
        kernel.run(ctypes.byref(state))
    if state.status != _RAN:
        raise KernelError(f"{instance.source.name}: {_report(state, memory)}")


def _report(state: Launch, memory: Buffers) -> str:
    thread = f"thread {tuple(state.thread)}"
    if state.status == _DIVERGED:
        first = _site(state.what, state.file, state.line)
        second = _site(state.other_what, state.other_file, state.other_line)
        if state.same_key:
            return f"lanes call {first} with different arguments ({thread})"
        if first == second:
            return f"lanes reach {first} by different ways ({thread})"
        return f"divergence: {thread} is at {second}, others wait at {first}"
    if state.status == _TOO_MUCH_SHARED:
        return f"{state.shared_used} bytes of threadgroup memory (32768 or 16 arrays at most)"
    if state.status == _TOO_LONG:
        return f"{thread} still ran after {LONGEST_MS / 1000:g} s: a loop without an end?"
    if state.trap:
        check = _CHECKS.get(state.trap - 1, f"check {state.trap - 1} failed")
        return f"undefined behaviour in {thread}: {check}"
    name = signal.Signals(state.signal_number).name
    if name == "SIGABRT":
        return f"{thread} was aborted by the C library (SIGABRT)"
    if name in ("SIGILL", "SIGTRAP", "SIGFPE"):
        return f"undefined behaviour in {thread}: a check failed, or a division by zero ({name})"
    return f"{thread} touches memory that it must not: {memory.place(state.address)}"


def _site(what: bytes, file: bytes, line: int) -> str:
    if not line:
        return what.decode()
    return f"{what.decode()} ({file.decode()}, line {line})"

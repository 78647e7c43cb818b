"""Calls from one sandbox into another: the tests of a program, and the program.

    tests                                       program
    Candidate()(*args)  -- a line of JSON -->   serve(function): function(*args)
                       <-- a line of JSON --    what it returned or raised

The program may answer what it likes, but only with plain data, by value: None, bool, int, float,
complex, str, bytes, list, tuple, dict, set, frozenset. Whatever compares an answer is then the
tests' own, in a process in which no line of the program ever ran. So tests that pass functions, or
expect other types than these (Decimal, the keys of a dict), fail, and none sees what the program
changes in its arguments; HumanEval needs neither.

Both ends find their descriptors, reading and writing, in `sys.argv`.
"""

import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

_COLLECTIONS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "float": float.fromhex,
    "complex": lambda parts: complex(*map(float.fromhex, parts)),
    "str": lambda digits: bytes.fromhex(digits).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "dict": lambda pairs: {decode(key): decode(value) for key, value in pairs},
}


def encode(value: object) -> Any:
    """For JSON. Law: decode(encode(x)) is equal to x, bit by bit and type by type; a subclass of a
    plain type becomes that type. Raises: TypeError for anything else.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return {"int": hex(value)}  # decimal digits have a limit
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, str):
        return {"str": value.encode("utf-8", "surrogatepass").hex()}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(entry)] for key, entry in value.items()]}
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    raise TypeError(f"{type(value).__name__} is no plain data, and only that is passed")


def decode(encoded: Any) -> Any:
    """The other way. Raises: some exception for what `encode` does not write."""
    if encoded is None or isinstance(encoded, bool):
        return encoded
    ((name, content),) = encoded.items()
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](map(decode, content))
    return _DECODERS[name](content)


def _channel() -> tuple[BinaryIO, BinaryIO]:
    reading, writing = map(int, sys.argv[1:])
    return open(reading, "rb"), open(writing, "wb")


def _send(writing: BinaryIO, message: list[Any]) -> None:
    writing.write(json.dumps(message).encode() + b"\n")
    writing.flush()


def serve(function: Callable[..., object]) -> None:
    """Answer calls until the caller has ended.

    Raises: TypeError where the function returns no plain data; what the function raises beyond
        Exception (SystemExit).
    """
    reading, writing = _channel()
    for line in reading:
        arguments, named = map(decode, json.loads(line))
        try:
            value = function(*arguments, **named)
        except Exception as error:
            names = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            _send(writing, ["raised", next(names), str(error)])
        else:
            _send(writing, ["returned", encode(value)])


class Candidate:
    """The function behind `serve`. An exception of the function is raised here as the nearest
    built-in one.
    """

    def __init__(self) -> None:
        self._reading, self._writing = _channel()

    def __call__(self, *arguments: object, **named: object) -> object:
        """Ends this process where there is no answer: a test that expects an exception must not
        take one of these for it.
        """
        try:
            _send(self._writing, [encode(arguments), encode(named)])
            line = self._reading.readline()
            if not line:
                raise EOFError("the program ended before it answered")
            outcome, *content = json.loads(line)
            value = decode(*content) if outcome == "returned" else _exception(*content)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)  # noqa: T201 -- read by the caller
            os._exit(1)
        if isinstance(value, Exception):
            raise value
        return value


def _exception(name: str, message: str) -> Exception:
    """A built-in one; not StopIteration, which would end a loop of the tests without a word."""
    kind: type = getattr(builtins, name)
    if not issubclass(kind, Exception):
        raise TypeError(f"{name} is no Exception")
    silent = issubclass(kind, StopIteration | StopAsyncIteration)
    return RuntimeError(message) if silent else kind(message)

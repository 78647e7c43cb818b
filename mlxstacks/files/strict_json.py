"""JSON of our own formats, believed only after every check.

A record is a frozen dataclass whose fields say what is allowed; pydantic reads it in strict mode:
no text for a number, no unknown key, no NaN. Duplicate keys, deep nesting and huge documents are
refused before.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn, Self, TypeVar

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

# For the `__pydantic_config__` of each record.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
JsonObject = dict[str, JsonValue]


MAX_JSON_BYTES = 64_000_000
MAX_DEPTH = 40
_MAX_LISTED = 8

Record = TypeVar("Record")


def compact(value: Any) -> bytes:
    """JSON without blanks, keys sorted: equal values give equal bytes.

    Raises: ValueError for NaN, Infinity and what JSON has no word for.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return text.encode()


def json_sha256(value: Any) -> str:
    """SHA-256 (hex) of `compact(value)`. Raises: as `compact`."""
    return hashlib.sha256(compact(value)).hexdigest()


def parse_object(text: str, *, unique_keys: bool = True) -> dict[str, Any]:
    """A JSON object from text.

    Raises:
        ValueError: not JSON, not an object, nested too deeply, or (unique_keys) a key given twice,
            or a number that float64 cannot hold: some configs of models have Infinity.
    """
    strict: dict[str, Any] = {}
    if unique_keys:
        strict = {
            "object_pairs_hook": _unique_object,
            "parse_constant": refuse_constant,
            "parse_int": functools.partial(_finite, int),
            "parse_float": functools.partial(_finite, float),
        }
    try:
        value = json.loads(text, **strict)
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"JSON must be an object, got {type(value).__name__}")
    return value


def refuse_constant(name: str) -> NoReturn:
    """For `parse_constant` of `json.loads`."""
    raise ValueError(f"{name} is not a JSON number")


def _finite(kind: type[int] | type[float], text: str) -> int | float:
    """Every reader may take it for a float."""
    if not math.isfinite(float(text)):
        raise ValueError(f"{text[:20]}... is beyond float64")
    return kind(text)


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key[:100]!a} is given twice")
        result[key] = value
    return result


def read_object(data: bytes, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from bytes. Raises: ValueError saying what is wrong with it."""
    if len(data) > most_bytes:
        raise ValueError(f"{len(data)} bytes, allowed: {most_bytes}")
    value = parse_object(data.decode("utf-8"))
    if is_deeper(value, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return value


def is_deeper(value: dict[str, Any], levels: int) -> bool:
    """Whether parsed JSON is nested more than so many levels deep."""
    level: list[Any] = [value]
    for _ in range(levels):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [child for part in parts for child in part if isinstance(child, dict | list)]
    return bool(level)


def record_from(adapter: TypeAdapter[Record], value: Any) -> Record:
    """A record from parsed JSON. Raises: ValueError listing every field that is wrong."""
    try:
        return adapter.validate_json(compact(value), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, d['loc']))[:200]}: {d['msg']}" for d in details[:_MAX_LISTED]]
    if len(details) > _MAX_LISTED:
        lines.append(f"and {len(details) - _MAX_LISTED} more")
    raise ValueError("; ".join(ascii(line)[1:-1] for line in lines))


def record_as_json(adapter: TypeAdapter[Record], record: Record) -> dict[str, Any]:
    """A record as JSON values. Law: `record_from` of it is the record again.

    Raises: ValueError for values of other types than the fields'.
    """
    try:
        value: dict[str, Any] = adapter.dump_python(record, mode="json", warnings="error")
    except ValueError as error:  # pydantic's PydanticSerializationError is one
        raise ValueError(f"{type(record).__name__}: {error}") from None
    return value


class VersionedRecord:
    """Base of the frozen dataclasses that head our file formats; `format_version` is a field.

    KIND: what such a file is, for messages.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    KIND: ClassVar[str]
    FORMAT_VERSION: ClassVar[int] = 1

    def problems(self) -> Iterable[str]:
        """What in it contradicts itself."""
        return ()

    def as_json(self) -> dict[str, Any]:
        """JSON values. Raises: ValueError for a field of another type than its own."""
        return record_as_json(self._adapter(), self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `as_json`.

        Raises: ValueError for another version, or listing every field that is wrong, or `problems`.
        """
        version = value.get("format_version")
        if isinstance(version, int) and version != cls.FORMAT_VERSION:
            raise ValueError(
                f"format_version is {str(version)[:20]}, this version reads {cls.FORMAT_VERSION}; "
                f"use the mlxstacks that wrote the {cls.KIND}"
            )
        record: Self = record_from(cls._adapter(), value)
        if problems := list(record.problems()):
            raise ValueError("; ".join(problems[:8]))
        return record

    @classmethod
    @functools.cache
    def _adapter(cls) -> TypeAdapter[Any]:
        return TypeAdapter(cls)

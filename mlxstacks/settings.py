"""What the settings of all commands share. Imports neither mlx nor numpy."""

from collections.abc import Mapping
from pathlib import PurePath
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator


def _each_once(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) < len(values):
        raise ValueError(f"got {list(values)}; give each once")
    return values


# Fields that several commands have; those of numbers take a description of their own.
Resume = Annotated[bool, Field(description="Resume an interrupted run.")]
Force = Annotated[bool, Field(description="Replace an existing save path.")]
Plots = Annotated[bool, Field(description="Draw plots if matplotlib is installed.")]
Count = Annotated[int, Field(ge=1)]
ResourceLimit = Annotated[
    Count | None, Field(description="Limit on live buffers per process. Default: the device's.")
]
WorkingSetBytes = Annotated[
    Count | None,
    Field(description="Memory limit, in bytes. Default: what a Metal device recommends."),
]
# A part of a whole, by every command that has it.
Limit = Annotated[
    Annotated[int, Field(ge=1)] | None,
    Field(
        description="Answer at most this many items of each set: a quick look, marked exploratory, "
        "that decides nothing."
    ),
]
Probability = Annotated[float, Field(ge=1e-6, le=0.999999)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Normalisation = Literal["sum", "token", "character"]
EachOnce = AfterValidator(_each_once)
NORMALISATIONS: tuple[Normalisation, ...] = ("sum", "token", "character")


def output_path(name: str) -> Any:
    """The field of a save path that is `mlxstacks-out/NAME` where none is given."""
    return Field(None, description=f"Output directory. Default: ./mlxstacks-out/{name}.")


def _takes(annotation: Any, *kinds: Any) -> bool:
    parts = get_args(annotation)
    return annotation in kinds or any(_takes(part, *kinds) for part in parts)


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one, `high` winning, nested mappings merged key by key."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


class Settings(BaseModel):
    """Frozen, without unknown keys.

    A path may be text or a `Path`; where several values are allowed, a single one stands for a list
    of one; `none` is no number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _in_plain_types(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        plain = {}
        for key, value in values.items():
            field = cls.model_fields.get(key)
            is_list = field is not None and get_origin(field.annotation) in (tuple, list)
            kind = field.annotation if field else None
            if isinstance(value, bool) and _takes(kind, int, float) and not _takes(kind, bool):
                raise ValueError(f"{key}: got {value}; give a number")
            if isinstance(value, PurePath):
                value = str(value)
            if _takes(kind, NoneType) and not _takes(kind, str, "none") and value == "none":
                value = None
            if isinstance(value, list | tuple):
                value = [str(item) if isinstance(item, PurePath) else item for item in value]
            elif is_list and isinstance(value, str | int | float):
                value = [value]
            plain[key] = value
        return plain

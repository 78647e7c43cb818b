"""What the settings of all commands share. Imports neither mlx nor numpy."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """Frozen, without unknown keys.

    A path may be text or a `Path`; where several values are allowed, a single one stands for a list
    of one.
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
            if isinstance(value, PurePath):
                value = str(value)
            if isinstance(value, list | tuple):
                value = [str(item) if isinstance(item, PurePath) else item for item in value]
            elif is_list and isinstance(value, str | int | float):
                value = [value]
            plain[key] = value
        return plain

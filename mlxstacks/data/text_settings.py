"""How chats and texts become tokens: settings that all commands which render share. Imports neither
mlx nor numpy.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol, Self

from pydantic import BeforeValidator, Field

ThinkingMode = Literal["auto", "on", "off"]
# YAML reads on and off as true and false; none was the word for auto.
_SPELLINGS = {True: "on", False: "off", None: "auto"}


Thinking = Annotated[
    ThinkingMode,
    BeforeValidator(
        lambda value: _SPELLINGS[value] if value is None or isinstance(value, bool) else value,
        json_schema_input_type=ThinkingMode | bool | None,
    ),
    Field(
        description="Reasoning, if the chat template supports it: on, off, or auto, which follows "
        "each row in training and scoring, and the template's default in generation. --no-thinking "
        "means off.",
        json_schema_extra={"cli_switch": True},
    ),
]
AllowSpecial = Annotated[
    bool,
    Field(
        description="Read special tokens written in text, such as <|im_end|>, as tokens. By "
        "default they stay text."
    ),
]


class _RenderingSettings(Protocol):
    @property
    def thinking(self) -> ThinkingMode: ...
    @property
    def allow_special(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Rendering:
    """thinking: see `Thinking`. allow_special: whether literals of special tokens in texts of users
    and data are tokens.
    """

    thinking: ThinkingMode = "auto"
    allow_special: bool = False

    @classmethod
    def of(cls, settings: _RenderingSettings) -> Self:
        return cls(settings.thinking, settings.allow_special)

    @property
    def enable_thinking(self) -> bool | None:
        """For a prompt that is answered: None leaves it to the template."""
        return None if self.thinking == "auto" else self.thinking == "on"

    def before_answer(self) -> Self:
        """For a prompt behind which an answer without reasoning stands: as rows to train on have
        it, whatever the template does in generation.
        """
        return replace(self, thinking="on" if self.thinking == "on" else "off")


# The default of every command but those that say otherwise.
PLAIN = Rendering()

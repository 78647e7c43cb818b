"""What OpenAI's and Anthropic's endpoints share: bodies checked, answers put together."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mlxstacks.data.chat import strings_of
from mlxstacks.errors import InputError
from mlxstacks.files.strict_json import parse_object
from mlxstacks.routing.generation import Sampling
from mlxstacks.routing.settings import MOST_TEMP, ServeSettings
from mlxstacks.serve.requests import Ask, Begun, Finish, Piece, TokenLogprob

MOST_CALLS_OF_TOOLS = 128
MOST_MESSAGES = 2000
_MOST_FAULTS = 5

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=16)]
Temperature = Annotated[float, Field(ge=0, le=MOST_TEMP)]
Share = Annotated[float, Field(ge=0, le=1)]


class Body(BaseModel):
    """A part of a request; what clients send besides is left aside, as other servers do."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Format(Body):
    """Of an answer. The schema lies here, or one level down in chat completions."""

    type: Literal["text", "json_object", "json_schema"]
    inside: dict[str, Any] | None = Field(None, alias="schema")
    json_schema: dict[str, Any] | None = None

    def of_answer(self) -> str | None:
        """The schema as JSON text; None: any text. Raises: InputError."""
        if self.type == "text":
            return None
        schema = self.inside or (self.json_schema or {}).get("schema")
        if self.type == "json_object":
            schema = {"type": "object"}
        if not isinstance(schema, dict):
            raise InputError("json_schema: schema is missing, or no object")
        try:
            return json.dumps(schema)
        except RecursionError:
            raise InputError("json_schema: the schema is too deep") from None


class Part(Body):
    """Of what a message says."""

    type: str
    text: str | None = None


def plain_text(content: str | Sequence[Part] | None) -> str:
    """Raises: InputError for a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if strange := [part.type for part in content if part.text is None]:
        raise InputError(f"content of type {strange[0][:40]!a}; this model reads text alone")
    return "".join(part.text or "" for part in content)


def calls_tools(choice: object) -> bool:
    """Whether a request's `tool_choice` lets the model call tools. Raises: InputError."""
    if choice not in (None, "auto", "none"):
        raise InputError("tool_choice: only auto and none are supported")
    return choice != "none"


Parsed = TypeVar("Parsed", bound=Body)


def parse_body(data: bytes, kind: type[Parsed]) -> Parsed:
    """A JSON body. Raises: InputError saying what is wrong with it."""
    try:
        value = parse_object(data.decode())
        for text in strings_of(value):
            text.encode()
        return kind.model_validate(value)
    except UnicodeError:
        raise InputError("the body is no UTF-8 text, or has half a character") from None
    except ValidationError as error:
        faults = [
            f"{'.'.join(str(part)[:40] for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors(include_input=False, include_url=False)[:_MOST_FAULTS]
        ]
        raise InputError("; ".join(faults)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON object: {str(error)[:200]}") from None


def sampling(
    settings: ServeSettings,
    max_tokens: int | None,
    *,
    temperature: float | None,
    top_p: float | None,
    seed: int | None = None,
    **others: Any,
) -> Sampling:
    """Without a seed every request draws anew. Raises: InputError: more tokens than allowed."""
    wanted = min(settings.max_tokens, settings.most_tokens) if max_tokens is None else max_tokens
    if wanted > settings.most_tokens:
        raise InputError(f"max_tokens is {wanted:,}; this server allows {settings.most_tokens:,}")
    return Sampling(
        temp=temperature or 0.0, top_p=top_p or 1.0, max_tokens=wanted,
        seed=secrets.randbits(63) if seed is None else seed % 2**64, **others,
    )  # fmt: skip


@dataclass(eq=False)
class Answer:
    """One answer, as far as it has come."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    stop_text: str | None = None
    tokens: int = 0

    def take(self, piece: Piece) -> None:
        for part in piece.parts:
            if part.kind == "reasoning":
                self.reasoning += part.text
            elif part.call is not None:
                self.calls.append(part.call)
            else:
                self.text += part.text
        self.logprobs += piece.logprobs
        self.finish, self.stop_text, self.tokens = piece.finish, piece.stop_text, piece.tokens


class Speaker(Protocol):
    """How one request is answered, in the words of its API; `stream`: in pieces."""

    ask: Ask
    stream: bool

    def whole(self, begun: Begun, answers: list[Answer]) -> dict[str, Any]:
        """The document of complete answers."""

    def opening(self, begun: Begun) -> Iterable[str]:
        """Server-sent events before the first piece."""

    def piece(self, piece: Piece) -> Iterable[str]:
        """Those of a piece."""

    def closing(self) -> Iterable[str]:
        """Those behind the last piece."""

    def failure(self, status: int, message: str) -> Iterable[str]:
        """Those of a failure in the middle."""


def event(document: Mapping[str, Any], name: str | None = None) -> str:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(document, ensure_ascii=False)}\n\n"


_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
           429: "rate_limit_error", 503: "overloaded_error"}  # fmt: skip


def error_type(status: int) -> str:
    """How both APIs call an error of HTTP's."""
    return _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")


def unique(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"

"""OpenAI's chat completions and completions, as its Python client writes and reads them."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field

from mlxstacks import __version__
from mlxstacks.errors import InputError
from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve.naming import BASE
from mlxstacks.serve.requests import Ask, Begun, Piece, TokenLogprob
from mlxstacks.serve.wire import (
    MOST_CALLS_OF_TOOLS,
    MOST_MESSAGES,
    Answer,
    Body,
    Format,
    Name,
    Part,
    Share,
    Stops,
    Temperature,
    calls_tools,
    error_type,
    event,
    parse_body,
    plain_text,
    sampling,
    unique,
)

_Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamOptions(Body):
    include_usage: bool = False


class Function(Body):
    name: Name
    arguments: str = "{}"


class ToolCall(Body):
    id: str | None = None
    function: Function


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MOST_CALLS_OF_TOOLS)
    tool_call_id: str | None = None
    reasoning: str | None = None

    def turn(self) -> dict[str, Any]:
        """In the chat template's terms. Raises: InputError: what is no text."""
        turn: dict[str, Any] = {"role": self.role, "content": plain_text(self.content)}
        for key in ("name", "tool_call_id"):
            if (value := getattr(self, key)) is not None:
                turn[key] = value
        if self.reasoning:
            turn["reasoning_content"] = self.reasoning
        if self.tool_calls:
            turn["tool_calls"] = [_call_of(call) for call in self.tool_calls]
        return turn


def _call_of(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise InputError(f"the arguments of {call.function.name[:40]!a} are no JSON") from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "id": call.id, "function": function}


class Shared(Body):
    """What both endpoints take."""

    model: Name = BASE
    adapters: Any = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: int = Field(0, ge=0)
    min_p: Share = 0.0
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Any] | None = None
    n: int | None = Field(None, ge=1, le=256)
    seed: int | None = None
    stop: str | Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def ask(
        self, settings: ServeSettings, most: int | None, schema: str | None = None, **others: Any
    ) -> Ask:
        """Raises: InputError."""
        if self.logit_bias:
            raise InputError("logit_bias is not supported")
        if self.adapters is not None:  # a path, to mlx_lm.server
            raise InputError("adapters is not supported: give the name of a served one as model")
        stops = [self.stop] if isinstance(self.stop, str) and self.stop else self.stop or ()
        return Ask(
            self.model,
            sampling(
                settings, most, temperature=self.temperature, top_p=self.top_p, seed=self.seed,
                top_k=self.top_k, min_p=self.min_p, repetition_penalty=self.repetition_penalty,
                schema=schema,
            ),
            stop=tuple(stops), n=self.n or 1, presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0, **others,
        )  # fmt: skip


class ChatBody(Shared):
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MOST_CALLS_OF_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    response_format: Format | None = None


class CompletionBody(Shared):
    prompt: str
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None


class ChatSpeaker:
    """`POST /v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, data: bytes, settings: ServeSettings) -> None:
        """Raises: InputError."""
        body = parse_body(data, ChatBody)
        tools = (body.tools or None) if calls_tools(body.tool_choice) else None
        if strange := [t for t in tools or () if not isinstance(t.get("function"), dict)]:
            raise InputError(f"tools: {str(strange[0])[:80]} has no function")
        schema = body.response_format.of_answer() if body.response_format else None
        self.ask = body.ask(
            settings, body.max_completion_tokens or body.max_tokens, schema,
            messages=tuple(message.turn() for message in body.messages), tools=tools,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )  # fmt: skip
        self._begin(body, "chatcmpl-")

    def _begin(self, body: Shared, prefix: str) -> None:
        self.stream = bool(body.stream)
        self._usage_wanted = body.stream_options is not None and body.stream_options.include_usage
        self._id, self._created = unique(prefix), int(time.time())
        self._answers = [Answer() for _ in range(self.ask.n)]

    def _document(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self.ask.model,
            "system_fingerprint": f"mlxstacks-{__version__}", "choices": choices, **more,
        }  # fmt: skip

    def whole(self, begun: Begun, answers: list[Answer]) -> dict[str, Any]:
        choices = [
            self._choice(index, self._said(answer), self._logprobs(answer.logprobs), answer.finish)
            for index, answer in enumerate(answers)
        ]
        usage = usage_of(begun, answers)
        return self._document(self.kind, choices, usage=usage, mlxstacks=begun.as_json())

    def _choice(
        self,
        index: int,
        said: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}

    def _said(self, answer: Answer) -> dict[str, Any]:
        content = answer.text or (None if answer.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.reasoning:
            message["reasoning"] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [_tool_call(call) for call in answer.calls]
        return {"message": message}

    def _added(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.ask.top_logprobs is None:
            return None
        content = [
            {**_token(t.text, t.logprob), "top_logprobs": [_token(*pair) for pair in t.top]}
            for t in tokens
        ]
        return {"content": content, "refusal": None}

    def opening(self, begun: Begun) -> Iterable[str]:
        self._begun = begun
        for index in range(self.ask.n):
            choice = self._choice(index, {"delta": {"role": "assistant", "content": ""}})
            yield event(self._document(self.chunk_kind, [choice], mlxstacks=begun.as_json()))

    def piece(self, piece: Piece) -> Iterator[str]:
        answer = self._answers[piece.index]
        calls = len(answer.calls)
        answer.take(piece)
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        for part in piece.parts:
            delta: dict[str, Any] = {"content": part.text}
            if part.kind == "reasoning":
                delta = {"reasoning": part.text}
            elif part.call is not None:
                delta = {"tool_calls": [{"index": calls, **_tool_call(part.call)}]}
                calls += 1
            yield self._chunk(piece.index, delta, logprobs)
            logprobs = None
        if logprobs is not None:  # of a token without text of its own
            yield self._chunk(piece.index, {}, logprobs)
        if piece.finish is not None:
            yield self._chunk(piece.index, {}, None, piece.finish)

    def _chunk(self, index: int, delta: dict[str, Any], *rest: Any) -> str:
        return event(
            self._document(self.chunk_kind, [self._choice(index, self._added(delta), *rest)])
        )

    def closing(self) -> Iterator[str]:
        if self._usage_wanted:
            usage = usage_of(self._begun, self._answers)
            yield event(self._document(self.chunk_kind, [], usage=usage))
        yield "data: [DONE]\n\n"

    def failure(self, status: int, message: str) -> Iterator[str]:
        yield event(error_document(status, message))


class CompletionSpeaker(ChatSpeaker):
    """`POST /v1/completions`: the prompt as it is, no chat template."""

    kind = chunk_kind = "text_completion"

    def __init__(self, data: bytes, settings: ServeSettings) -> None:
        """Raises: InputError."""
        body = parse_body(data, CompletionBody)
        if body.echo or body.suffix:
            raise InputError("echo and suffix are not supported")
        self.ask = body.ask(settings, body.max_tokens, text=body.prompt, top_logprobs=body.logprobs)
        self._begin(body, "cmpl-")

    def _said(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.reasoning + answer.text}

    def _added(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content") or delta.get("reasoning") or ""}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.ask.top_logprobs is None:
            return None
        texts = [token.text for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [dict(token.top) for token in tokens],
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
        }

    def opening(self, begun: Begun) -> Iterable[str]:
        self._begun = begun
        yield event(self._document(self.kind, [], mlxstacks=begun.as_json()))


def _tool_call(call: dict[str, str]) -> dict[str, Any]:
    return {"id": unique("call_"), "type": "function", "function": dict(call)}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def usage_of(begun: Begun, answers: Sequence[Answer]) -> dict[str, Any]:
    said = sum(answer.tokens for answer in answers)
    return {
        "prompt_tokens": begun.prompt_tokens, "completion_tokens": said,
        "total_tokens": begun.prompt_tokens + said,
        "prompt_tokens_details": {"cached_tokens": begun.cached_tokens},
    }  # fmt: skip


def error_document(status: int, message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    code = "model_not_found" if status == 404 else None
    return {"error": {"message": message, "type": error_type(status), "param": None, "code": code}}

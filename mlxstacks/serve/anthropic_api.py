"""Anthropic's messages, as its Python client writes and reads them."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import Field

from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve.requests import Ask, Begun, Piece
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


class Block(Part):
    """A part of a message: text, thinking, tool_use (id, name, input), tool_result (tool_use_id,
    content).
    """

    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None


class Message(Body):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class Tool(Body):
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)


class Output(Body):
    format: Format | None = None


class MessagesBody(Body):
    model: Name
    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: int = Field(ge=1)
    system: str | list[Block] | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: int = Field(0, ge=0)
    stop_sequences: Stops | None = None
    stream: bool | None = None
    tools: list[Tool] | None = Field(None, max_length=MOST_CALLS_OF_TOOLS)
    tool_choice: dict[str, Any] | None = None
    output_config: Output = Output()


class MessagesSpeaker:
    """`POST /v1/messages`."""

    def __init__(self, data: bytes, settings: ServeSettings) -> None:
        """Raises: InputError."""
        body = parse_body(data, MessagesBody)
        tools = [_tool(tool) for tool in body.tools or ()] or None
        if not calls_tools((body.tool_choice or {}).get("type")):
            tools = None
        form = body.output_config.format
        schema = form.of_answer() if form else None
        turns = [{"role": "system", "content": plain_text(body.system)}] if body.system else []
        turns += [turn for message in body.messages for turn in _turns(message)]
        self.stream = bool(body.stream)
        self.ask = Ask(
            body.model,
            sampling(
                settings, body.max_tokens, temperature=body.temperature, top_p=body.top_p,
                top_k=body.top_k, schema=schema,
            ),
            messages=tuple(turns), tools=tools, stop=tuple(body.stop_sequences or ()),
        )  # fmt: skip
        self._id = unique("msg_")
        self._answer = Answer()
        self._open: str | None = None
        self._index = -1

    def _head(self, begun: Begun) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self.ask.model,
            "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(begun, 0),
            "mlxstacks": begun.as_json(),
        }  # fmt: skip

    def whole(self, begun: Begun, answers: list[Answer]) -> dict[str, Any]:
        (answer,) = answers
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text or not answer.calls:
            content.append({"type": "text", "text": answer.text})
        content += [_use(call) | {"input": _arguments(call)} for call in answer.calls]
        return {
            **self._head(begun), "content": content, **_stop(answer),
            "usage": _usage(begun, answer.tokens),
        }  # fmt: skip

    def opening(self, begun: Begun) -> Iterable[str]:
        self._begun = begun
        yield event({"type": "message_start", "message": self._head(begun)}, "message_start")

    def piece(self, piece: Piece) -> Iterator[str]:
        self._answer.take(piece)
        for part in piece.parts:
            if part.call is not None:
                yield from self._start("tool_use", _use(part.call) | {"input": {}})
                yield self._delta("input_json_delta", "partial_json", part.call["arguments"])
                yield from self._stop_block()
            elif part.kind == "reasoning":
                block = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._start("thinking", block)
                yield self._delta("thinking_delta", "thinking", part.text)
            else:
                yield from self._start("text", {"type": "text", "text": ""})
                yield self._delta("text_delta", "text", part.text)

    def closing(self) -> Iterator[str]:
        yield from self._stop_block()
        delta = {
            "type": "message_delta", "delta": _stop(self._answer),
            "usage": _usage(self._begun, self._answer.tokens),
        }  # fmt: skip
        yield event(delta, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def failure(self, status: int, message: str) -> Iterator[str]:
        yield event(error_document(status, message), "error")

    def _start(self, kind: str, block: dict[str, Any]) -> Iterator[str]:
        """A content block of this kind, unless one is open."""
        if self._open == kind and kind != "tool_use":
            return
        yield from self._stop_block()
        self._open, self._index = kind, self._index + 1
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield event(start, "content_block_start")

    def _delta(self, kind: str, key: str, text: str) -> str:
        delta = {"type": kind, key: text}
        document = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return event(document, "content_block_delta")

    def _stop_block(self) -> Iterator[str]:
        if self._open is not None:
            self._open = None
            stop = {"type": "content_block_stop", "index": self._index}
            yield event(stop, "content_block_stop")


def _turns(message: Message) -> Iterator[dict[str, Any]]:
    """A message in the chat template's terms: results of tools are turns of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    kinds = ("tool_use", "tool_result", "thinking", "redacted_thinking")
    text = plain_text([block for block in message.content if block.type not in kinds])
    for block in message.content:
        if block.type == "tool_result":
            said = plain_text(block.content)
            yield {"role": "tool", "content": said, "tool_call_id": block.tool_use_id}
    calls = [
        {
            "type": "function", "id": block.id,
            "function": {"name": block.name or "", "arguments": block.input or {}},
        }
        for block in message.content
        if block.type == "tool_use"
    ]  # fmt: skip
    thoughts = "".join(b.thinking or "" for b in message.content if b.type == "thinking")
    if text or calls or not any(block.type == "tool_result" for block in message.content):
        turn: dict[str, Any] = {"role": message.role, "content": text}
        if calls:
            turn["tool_calls"] = calls
        if thoughts:
            turn["reasoning_content"] = thoughts
        yield turn


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name, "description": tool.description or "", "parameters": tool.input_schema
    }  # fmt: skip
    return {"type": "function", "function": function}


def _use(call: dict[str, str]) -> dict[str, Any]:
    return {"type": "tool_use", "id": unique("toolu_"), "name": call["name"]}


def _arguments(call: dict[str, str]) -> Any:
    value = json.loads(call["arguments"])
    return value if isinstance(value, dict) else {"value": value}


def _stop(answer: Answer) -> dict[str, Any]:
    reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(answer.finish or "", "end_turn")
    if answer.stop_text is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_text}


def _usage(begun: Begun, tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": begun.prompt_tokens - begun.cached_tokens,
        "cache_read_input_tokens": begun.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": tokens,
    }


def error_document(status: int, message: str) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    return {"type": "error", "error": {"type": error_type(status), "message": message}}

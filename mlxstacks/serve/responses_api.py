"""OpenAI's responses, as its Python client writes and reads them: asked as a chat is, answered in
items. Nothing is stored, so a client sends all of a conversation; thoughts are not sent.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from mlxstacks.errors import InputError
from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve.openai_api import ChatSpeaker, usage_of
from mlxstacks.serve.requests import Begun, Piece
from mlxstacks.serve.text import Part
from mlxstacks.serve.wire import Answer, Body, Format, event, parse_body, unique


class Item(Body):
    """A message, a call of a tool, or its output, of the same call_id."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str = "user"
    content: Any = None
    call_id: str | None = None
    name: str | None = None
    arguments: str = "{}"
    output: Any = None

    def message(self) -> dict[str, Any]:
        """As chat completions have it."""
        if self.type == "function_call_output":
            return {"role": "tool", "content": self.output, "tool_call_id": self.call_id}
        if self.type == "message":
            return {"role": self.role, "content": self.content}
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "function": function}]}


class Text(Body):
    format: Format | None = None


class ResponsesBody(Body):
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tool_choice: Any = None
    tools: list[dict[str, Any]] | None = None
    text: Text = Text()
    previous_response_id: str | None = None


class ResponsesSpeaker(ChatSpeaker):
    """`POST /v1/responses`."""

    def __init__(self, data: bytes, settings: ServeSettings) -> None:
        """Raises: InputError."""
        body = parse_body(data, ResponsesBody)
        if body.previous_response_id is not None:
            raise InputError("previous_response_id: nothing is stored; send the whole conversation")
        items = [Item(content=body.input)] if isinstance(body.input, str) else body.input
        if body.instructions:
            items = [Item(role="system", content=body.instructions), *items]
        tools = [{"function": t} if t.get("type") == "function" else t for t in body.tools or ()]
        chat = json.loads(data) | {
            "messages": [item.message() for item in items if item.type != "reasoning"], "n": 1,
            "max_tokens": body.max_output_tokens, "logprobs": None, "tools": tools,
            "response_format": body.text.model_dump(by_alias=True)["format"],
        }  # fmt: skip
        super().__init__(json.dumps(chat).encode(), settings)
        self._events = 0
        self._output: list[dict[str, Any]] = []
        self._response = {
            "id": unique("resp_"), "object": "response", "created_at": self._created,
            "model": self.ask.model, "output": self._output, "status": "in_progress",
            "error": None, "incomplete_details": None, "parallel_tool_calls": True,
            "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
        }  # fmt: skip

    def whole(self, begun: Begun, answers: list[Answer]) -> dict[str, Any]:
        (answer,) = answers
        parts = [Part("text", answer.text), *(Part("tool", "", call) for call in answer.calls)]
        parts = [part for part in parts if part.text or part.call]
        piece = Piece(0, tuple(parts), finish=answer.finish, tokens=answer.tokens)
        for events in (self.opening(begun), self.piece(piece), self.closing()):
            list(events)
        return self._response

    def opening(self, begun: Begun) -> Iterator[str]:
        self._begun, self._response["mlxstacks"] = begun, begun.as_json()
        yield self._event("created", response=self._response)

    def piece(self, piece: Piece) -> Iterator[str]:
        self._answers[0].take(piece)
        for part in piece.parts:
            if part.call is not None:
                yield from self._close()
                yield from self._open("function_call", **part.call, call_id=unique("call_"))
                yield self._event("function_call_arguments.done", arguments=part.call["arguments"])
                yield from self._close()
            elif part.kind == "text":
                yield from self._say(part.text)

    def closing(self) -> Iterator[str]:
        if not self._output:
            yield from self._say("")
        yield from self._close()
        usage = usage_of(self._begun, self._answers)
        cut = self._answers[0].finish == "length"
        self._response["status"] = status = "incomplete" if cut else "completed"
        self._response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self._response["usage"] = {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": usage["total_tokens"],
        }  # fmt: skip
        yield self._event(status, response=self._response)

    def _say(self, text: str) -> Iterator[str]:
        if not self._output or self._output[-1]["status"] == "completed":
            yield from self._open("message", role="assistant", content=[])
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._event("content_part.added", part=part)
            self._output[-1]["content"] = [part]
        self._output[-1]["content"][0]["text"] += text
        yield self._event("output_text.delta", delta=text)

    def _open(self, kind: str, **fields: Any) -> Iterator[str]:
        item = {"id": unique("item_"), "type": kind, "status": "in_progress", **fields}
        self._output.append(item)
        yield self._event("output_item.added", item=item)

    def _close(self) -> Iterator[str]:
        """The end of the last item, unless it has ended."""
        if self._output and (item := self._output[-1])["status"] == "in_progress":
            item["status"] = "completed"
            for part in item.get("content", ()):
                yield self._event("output_text.done", text=part["text"])
                yield self._event("content_part.done", part=part)
            yield self._event("output_item.done", item=item)

    def _event(self, name: str, **fields: Any) -> str:
        if self._output:
            item = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
            fields = {**item, "content_index": 0, **fields}
        name, self._events = f"response.{name}", self._events + 1
        return event({"type": name, "sequence_number": self._events - 1, **fields}, name)

"""The HTTP side: who may ask, how much, and how an answer's events become a response.

Handlers run in the event loop, the model in the engine's thread. Nothing that a client does, or
leaves undone, holds the thread: bodies are read whole before a request is submitted, and events
wait in a queue of the request for a client that is slow to read them.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mlxstacks.errors import InputError
from mlxstacks.routing.generation import Prompt
from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve import anthropic_api, openai_api, responses_api
from mlxstacks.serve.engine import Engine
from mlxstacks.serve.naming import is_loopback
from mlxstacks.serve.requests import Begun, Event, Piece, Refused, Ticket
from mlxstacks.serve.wire import Answer, Speaker

BODY_SECONDS = 30
# They tell nothing of the model: whether it lives, and the page, which asks for the key itself.
OPEN_PATHS = ("/", "/health")
# Behind the last token: for a client to take what is left.
_READ_SECONDS = 60
# Schemas that take long to compile keep other schemas waiting, and nobody else.
_SCHEMA_THREADS = ThreadPoolExecutor(2, "schemas")
_log = logging.getLogger("mlxstacks.serve")


@dataclass(frozen=True)
class Api:
    """One endpoint that answers. speak: body, settings -> how it is answered."""

    path: str
    speak: Callable[[bytes, ServeSettings], Speaker]
    error: Callable[[int, str], dict[str, Any]]


APIS = (
    Api("/v1/chat/completions", openai_api.ChatSpeaker, openai_api.error_document),
    Api("/chat/completions", openai_api.ChatSpeaker, openai_api.error_document),  # mlx_lm.server's
    Api("/v1/completions", openai_api.CompletionSpeaker, openai_api.error_document),
    Api("/v1/responses", responses_api.ResponsesSpeaker, openai_api.error_document),
    Api("/v1/messages", anthropic_api.MessagesSpeaker, anthropic_api.error_document),
)


def _error_of(path: str) -> Callable[[int, str], dict[str, Any]]:
    """An endpoint's error document; OpenAI's where there is no such endpoint."""
    return next((api.error for api in APIS if api.path == path), openai_api.error_document)


def build_app(engine: Engine, settings: ServeSettings, key: str | None) -> ASGIApp:
    """key: that every request but those of `OPEN_PATHS` has to have; None: none is needed."""

    def answering(api: Api) -> Route:
        async def endpoint(request: Request) -> Response:
            return await answer(request, api, engine, settings)

        return Route(api.path, endpoint, methods=["POST"])

    async def health(request: Request) -> Response:
        alive = engine.is_alive
        return JSONResponse({"status": "ok" if alive else "down"}, 200 if alive else 503)

    async def models(request: Request) -> Response:
        entries = [_model(name, created) for name in engine.models]
        return JSONResponse({"object": "list", "data": entries, "has_more": False})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name in engine.models:
            return JSONResponse(_model(name, created))
        return JSONResponse(openai_api.error_document(404, f"no model {name[:100]!a}"), 404)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(
            metrics_text(engine), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    created = int(time.time())
    page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    policy = page_policy(page)

    async def index(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    routes = [
        Route("/", index),
        *map(answering, APIS), Route("/health", health), Route("/metrics", metrics),
        Route("/v1/models", models), Route("/v1/models/{name:path}", model),
    ]  # fmt: skip

    async def not_served(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        paths = ", ".join(f"{'/'.join(sorted(r.methods or ()))} {r.path}" for r in routes)
        message = f"{request.method} {request.url.path[:100]!a} is not served; there are: {paths}"
        document = _error_of(request.url.path)(error.status_code, message)
        if error.status_code == 404:  # a path, not a model
            document["error"]["code"] = None
        return JSONResponse(document, error.status_code)

    handlers = {404: not_served, 405: not_served}
    return Gate(Starlette(routes=routes, exception_handlers=handlers), key)


class Gate:
    """Turns away, before anything is read, who has not the key; without one, who is not here."""

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app, self._key = app, None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Request(scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        document = _error_of(scope["path"])(*refusal)
        await JSONResponse(document, refusal[0])(scope, receive, send)

    def _refusal(self, request: Request) -> tuple[int, str] | None:
        """(status, message), or None for a request that may go on."""
        if self._key is None:
            # a page of another site may send the browser here under a name of its own
            if not is_loopback(request.headers.get("host", "").rpartition("@")[2]):
                return 403, "this server answers to 127.0.0.1 and localhost alone"
        elif request.url.path not in OPEN_PATHS:
            words = request.headers.get("authorization", "").split(" ", 1)
            given = words[1] if len(words) == 2 and words[0].lower() == "bearer" else ""
            given = given or request.headers.get("x-api-key", "")
            if not hmac.compare_digest(given.strip().encode(), self._key):
                return 401, "the API key is missing or wrong"
        is_json = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if request.method == "POST" and is_json != "application/json":
            # what a page of another site may send without asking first
            return 415, "send -H 'content-type: application/json'"
        return None


async def answer(request: Request, api: Api, engine: Engine, settings: ServeSettings) -> Response:
    """One request, from its body to its response."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await _body(request, settings.body_bytes)
        if data is None:
            return JSONResponse(
                api.error(413, f"the body is larger than {settings.body_bytes:,} bytes"), 413,
                {"connection": "close"},
            )  # fmt: skip
        speaker = await asyncio.to_thread(api.speak, data, settings)
        threads = _SCHEMA_THREADS if speaker.ask.sampling.schema is not None else None
        encoding = asyncio.get_running_loop().run_in_executor(threads, engine.encode, speaker.ask)
        prompt = await encoding
    except TimeoutError:
        message = f"the body did not come within {BODY_SECONDS} seconds"
        return JSONResponse(api.error(408, message), 408, {"connection": "close"})
    except InputError as error:
        engine.counts["refused_400"] += 1
        _log.info("%s: 400 %s", api.path, _shown(str(error)))
        return JSONResponse(api.error(400, str(error)), 400)
    events = Events(api.path, speaker, prompt, engine, settings)
    try:
        first = await _unless_gone(request, events.get())
        if isinstance(first, Begun):
            shown = [value for value in _headers(first).values() if value]
            _log.info("%s %s: %s", api.path, _shown(speaker.ask.model), ", ".join(shown))
            if speaker.stream:
                return EventStream(events, first)
            answers = await _unless_gone(request, events.whole())
            if isinstance(answers, list):
                return JSONResponse(speaker.whole(first, answers), 200, _headers(first))
            first = answers
        if isinstance(first, Refused):
            _log.info("%s: %d %s", api.path, first.status, _shown(first.message))
            retry = {"retry-after": "1"} if first.status in (429, 503) else None
            return JSONResponse(api.error(first.status, first.message), first.status, retry)
        events.ticket.cancel()
        return Response(status_code=499)  # nobody reads it
    except BaseException:
        events.ticket.cancel()
        raise


class Events:
    """What the engine says of one request."""

    def __init__(
        self, path: str, speaker: Speaker, prompt: Prompt, engine: Engine, settings: ServeSettings
    ) -> None:
        self.path, self.speaker, self.seconds = path, speaker, settings.most_seconds
        self._left = speaker.ask.n
        waiting: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            with suppress(RuntimeError):  # the loop was closed: nobody is there any more
                loop.call_soon_threadsafe(waiting.put_nowait, event)

        self.get = waiting.get
        self.ticket = Ticket(speaker.ask, prompt, deliver, settings.most_seconds)
        engine.submit(self.ticket)

    async def pieces(self) -> AsyncIterator[Piece | Refused]:
        """Until every answer has come to its end, or it is refused."""
        tokens = 0
        while self._left:
            event = await self.get()
            if isinstance(event, Refused):
                yield event
                return
            if isinstance(event, Piece):
                if event.finish is not None:
                    self._left -= 1
                    tokens += event.tokens
                yield event
        seconds = time.monotonic() - self.ticket.began
        _log.info("%s: done, %d tokens in %.2f s", self.path, tokens, seconds)

    async def whole(self) -> list[Answer] | Refused:
        answers = [Answer() for _ in range(self.speaker.ask.n)]
        async for piece in self.pieces():
            if isinstance(piece, Refused):
                return piece
            answers[piece.index].take(piece)
        return answers

    async def stream(self, begun: Begun) -> AsyncIterator[str]:
        """Server-sent events."""
        for text in self.speaker.opening(begun):
            yield text
        async for piece in self.pieces():
            if isinstance(piece, Refused):
                _log.info("%s: %d %s", self.path, piece.status, _shown(piece.message))
                for text in self.speaker.failure(piece.status, piece.message):
                    yield text
                return
            for text in self.speaker.piece(piece):
                yield text
        for text in self.speaker.closing():
            yield text


class EventStream(StreamingResponse):
    """A response of events. Its request ends when it does: sent, dropped, or not taken in time."""

    def __init__(self, events: Events, begun: Begun) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **_headers(begun)}
        super().__init__(events.stream(begun), 200, headers, "text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._events.seconds + _READ_SECONDS):
                await super().__call__(scope, receive, send)
        finally:
            self._events.ticket.cancel()


async def _body(request: Request, most: int) -> bytes | None:
    """None where it is larger. Raises: ClientDisconnect."""
    with suppress(ValueError):
        if int(request.headers.get("content-length", "0")) > most:
            return None
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            return None
    return bytes(data)


async def _unless_gone(request: Request, work: Any) -> Any:
    """The result of the coroutine; None where the client goes before it is there."""

    async def gone() -> None:
        with suppress(ClientDisconnect):
            while (await request.receive())["type"] != "http.disconnect":
                pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


def _headers(begun: Begun) -> dict[str, str]:
    weights = ",".join(f"{name}={weight:.4g}" for name, weight in begun.weights.items())
    return {
        "x-mlxstacks-route": begun.route, "x-mlxstacks-weights": weights,
        "x-mlxstacks-loaded": ",".join(begun.loaded),
    }  # fmt: skip


def _shown(text: str) -> str:
    """A line for the log of what a client may have written."""
    return ascii(text[:200])


def _model(name: str, created: int) -> dict[str, Any]:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created))
    return {
        "id": name, "object": "model", "created": created, "owned_by": "mlxstacks",
        "type": "model", "display_name": name, "created_at": at,
    }  # fmt: skip


def page_policy(page: str) -> str:
    """What a browser may do for the page: its own script and style, and requests to this server."""
    inside = {}
    for tag in ("script", "style"):
        text = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        inside[tag] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{inside['script']}'; connect-src 'self'; "
        f"style-src 'sha256-{inside['style']}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def metrics_text(engine: Engine) -> str:
    """In Prometheus's text format."""
    lines: list[str] = []

    def metric(name: str, kind: str, samples: Sequence[tuple[str, float]]) -> None:
        lines.append(f"# TYPE mlxstacks_{name} {kind}")
        lines.extend(f"mlxstacks_{name}{labels} {value}" for labels, value in samples)

    counts = dict(engine.counts)
    refused = [
        (f'{{status="{name.removeprefix("refused_")}"}}', value)
        for name, value in sorted(counts.items())
        if name.startswith("refused_")
    ]
    for name in ("requests", "prompt_tokens", "cached_tokens", "answer_tokens", "cancelled",
                 "failures"):  # fmt: skip
        metric(f"{name}_total", "counter", [("", counts.get(name, 0))])
    metric("refused_total", "counter", refused)
    for name, value in dict(engine.gauges).items():
        metric(name, "gauge", [("", value)])
    held = [(f'{{name="{name}"}}', size) for name, size in engine.resident.items()]
    metric("resident_bytes", "gauge", held)
    return "\n".join(lines) + "\n"

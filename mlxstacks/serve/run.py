"""`mlxstacks serve`: load, listen, answer until somebody ends it."""

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve.naming import is_loopback

KEY_VARIABLE = "MLXSTACKS_API_KEY"
SHORTEST_KEY = 16


@dataclass(frozen=True)
class Served:
    """What was served, when it ended. counts: of the whole time."""

    settings: dict[str, Any]
    url: str
    models: tuple[str, ...]
    counts: dict[str, int]
    notes: tuple[str, ...]


def api_key(settings: ServeSettings) -> str | None:
    """The key that clients have to send; None: none.

    Raises: InputError: it cannot be read, or is too short to be one; other machines could come in
        without one.
    """
    key = os.environ.get(KEY_VARIABLE) or None
    if settings.api_key_file is not None:
        path = user_path(settings.api_key_file)
        try:
            with path.open(encoding="utf-8") as file:
                key = file.readline(4096).strip()
        except (OSError, UnicodeError) as error:
            raise InputError(f"{path}: no key can be read: {error}") from None
    if key is not None and len(key) < SHORTEST_KEY:
        raise InputError(
            f"the API key has {len(key)} characters; give at least {SHORTEST_KEY}, such as "
            "`openssl rand -hex 24` prints"
        )
    if key is None and not is_loopback(settings.host):
        raise InputError(
            f"--host {settings.host}: other machines could reach this server; give "
            f"--api-key-file, or set {KEY_VARIABLE}"
        )
    return key


def serve(settings: ServeSettings, ready: Callable[[str, list[str]], None]) -> Served:
    """Serve until SIGINT or SIGTERM. ready: told the address, and notes, once requests can come.

    Raises: InputError: uvicorn and starlette are not installed; the address cannot be used; the
        model, store or adapters cannot. StoreError: the store is damaged.
    """
    key = api_key(settings)
    try:
        from mlxstacks.serve.app import build_app
        from mlxstacks.serve.web import web_server
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "h11"):
            raise
        raise InputError(
            "serving needs starlette and uvicorn: pip install 'mlxstacks[serve]'"
        ) from None
    from mlxstacks.serve.engine import Engine

    listener = _listen(settings.host, settings.port)
    with listener:
        engine = Engine(settings)
        try:
            engine.start()
            host, port = listener.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            ready(url, list(engine.notes))
            with suppress(KeyboardInterrupt):  # how uvicorn says that it was ended
                web_server(build_app(engine, settings, key)).run(sockets=[listener])
        finally:
            engine.stop()  # even while it loads: MLX's thread must not meet the end of Python
    return Served(
        settings.model_dump(mode="json"), url, engine.models, dict(engine.counts),
        tuple(engine.notes),
    )  # fmt: skip


def _listen(host: str, port: int) -> socket.socket:
    """Raises: InputError: the address is none, or in use."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except (OSError, UnicodeError) as error:
        taken = "; try another --port" if getattr(error, "errno", 0) == errno.EADDRINUSE else ""
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen on {host}, port {port}: {reason}{taken}") from None

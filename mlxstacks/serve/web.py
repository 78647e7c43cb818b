"""uvicorn, with ends to what clients may leave undone."""

from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

# A connection goes that has sent no whole head by then, or keeps silent between two requests.
IDLE_SECONDS = 10
MOST_HEAD_BYTES = 32_768
MOST_CONNECTIONS = 1000


class Protocol(H11Protocol):
    """uvicorn waits without end for the head of a request; this does not."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.loop.call_later(IDLE_SECONDS, self._look, None)

    def _look(self, before: object) -> None:
        """before: the last request, where it had been answered when this was last called."""
        if self.transport.is_closing():
            return
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is before:
            self.transport.close()
        else:
            self.loop.call_later(IDLE_SECONDS, self._look, self.cycle if idle else self)


def web_server(app: ASGIApp) -> uvicorn.Server:
    """Not begun: `run(sockets=[...])` serves until a signal, or until `should_exit` is set."""
    config = uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=5, limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=MOST_HEAD_BYTES,
    )  # fmt: skip
    return uvicorn.Server(config)

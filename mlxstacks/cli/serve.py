"""`mlxstacks serve`: say where the server listens; a line a request goes to stderr."""

import logging
import sys
from typing import TYPE_CHECKING

from mlxstacks.cli import answers, output
from mlxstacks.study.document import counted

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.routing.settings import ServeSettings
    from mlxstacks.serve.run import Served


def run(settings: "ServeSettings") -> "Served":
    """Serve until somebody ends it. Raises: as `serve.run.serve`."""
    from mlxstacks.serve.run import serve

    def ready(url: str, notes: list[str]) -> None:
        for note in notes:
            output.note(note)
        output.note(f"Serving on {url} (OpenAI: {url}/v1); Ctrl-C ends it.")

    log = logging.getLogger("mlxstacks.serve")
    log.setLevel(logging.INFO)
    log.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    try:
        return serve(answers.completed(settings), ready)
    finally:
        log.removeHandler(handler)


def render(console: "Console", report: "Served") -> None:
    """A line about what was served."""
    counts = report.counts
    requests, tokens = (counts.get(name, 0) for name in ("requests", "answer_tokens"))
    console.print(f"Served {counted(requests, 'request')}, {counted(tokens, 'token')}.")

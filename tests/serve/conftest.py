"""Tests of the HTTP side need what the extras `serve` and `dev` bring."""

from importlib.util import find_spec

_NEEDED = ("anthropic", "openai", "starlette", "uvicorn")
collect_ignore = (
    [] if all(map(find_spec, _NEEDED)) else ["test_app.py", "test_page.py", "test_server.py"]
)

"""Tests of the HTTP side need what the extras `serve` and `dev` bring."""

from importlib.util import find_spec

_NEEDED = ("anthropic", "openai", "starlette", "uvicorn")
_TESTS = [f"test_{name}.py" for name in ("agent", "app", "page", "server")]
collect_ignore = [] if all(map(find_spec, _NEEDED)) else _TESTS

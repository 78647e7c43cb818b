"""Command lines of this process, as tests/cli runs them."""

from tests.cli.conftest import command

__all__ = ["command"]

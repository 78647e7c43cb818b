"""Errors a caller can act on. The command line turns each into one message and an exit code."""

import linecache
import traceback
from collections.abc import Sequence


class _InNotebooks:
    """IPython shows the caller's line and the message, not the lines between them."""

    def _render_traceback_(self) -> list[str]:
        assert isinstance(self, BaseException)
        shown = f"{type(self).__name__}: {self}"
        for frame, line in traceback.walk_tb(self.__traceback__):
            file = frame.f_code.co_filename
            if "ipykernel_" in file or file.startswith("<ipython-input"):
                source = linecache.getline(file, line).strip()
                return [f"----> {line} {source}", "", *shown.splitlines()]
        return shown.splitlines()


def in_lines(head: str, problems: Sequence[str], most: int = 8) -> str:
    """A message that lists the first problems below its head."""
    more = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "\n  ".join([head, *problems[:most], *more])


class InputError(_InNotebooks, ValueError):
    """The input cannot be used: a file, a tensor, a key or an option (exit code 2)."""


class SettingsError(InputError):
    """Settings that are unknown, of another kind, or do not go together."""


class CheckpointError(InputError):
    """A model directory or one of its files is missing, malformed or not supported."""


class NonFiniteModelError(CheckpointError):
    """What a model computes is NaN or Inf.

    what: the figure, as the subject of a sentence: "the log probability of token 3"
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} is not finite: the model's weights, or an adapter's, hold NaN or Inf (then "
            "get them again), or half floats overflow (then try --base float32)"
        )


class AdapterError(InputError):
    """An adapter is malformed, not supported, or does not belong to the model."""


class TargetError(InputError):
    """The output cannot be written: it exists, is locked, is read-only or does not fit."""


class TargetExistsError(TargetError):
    """Something is there, and `force` would replace it."""


class OtherRunError(InputError):
    """Next to the target lies unfinished work of other settings; `resume` off removes it."""


class ResourceLimitError(InputError):
    """A run or batch is predicted to pass a limit of the device; it was not begun (exit code 3)."""


class PeerLostError(InputError):
    """Another process of the group has ended; what this one has done is kept."""


class StoreError(_InNotebooks, Exception):
    """A store of stacks is damaged or in use by another writer (exit code 1)."""


class OtherBaseError(StoreError, InputError):
    """A store of stacks is of another base (exit code 2)."""


class Interrupted(_InNotebooks, KeyboardInterrupt):
    """Ctrl-C, or an interrupted cell, in a function of the package."""

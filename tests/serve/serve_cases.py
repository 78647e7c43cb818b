"""nano with its stacks and an adapter, as a server holds them, batches written step by step, and
the command as a process.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx

from mlxstacks import base_model
from mlxstacks.nano.exports import nano_paths
from mlxstacks.routing.engine import OpenBase, open_base
from mlxstacks.routing.generation import PREFILL_TOKENS, Prompt, encode_prompt
from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve.pool import Held, StackPool
from mlxstacks.serve.rows import RoutedRows, RowRoutes


def nano_settings(**changes: Any) -> ServeSettings:
    """The base, its sample store and its sample adapter."""
    nano = nano_paths()
    values = {
        "model": str(nano.model_path), "store_path": str(nano.store_path),
        "adapter_path": [str(nano.adapter_path)], "port": 0,
    }  # fmt: skip
    return ServeSettings.model_validate(values | changes)


@dataclass(eq=False)
class Nano:
    base: OpenBase
    pool: StackPool
    forward: RoutedRows

    def prompt(self, text: str) -> Prompt:
        return encode_prompt(self.base.tokenizer, [{"role": "user", "content": text}])


def open_nano(budget_bytes: int | None = None, **changes: Any) -> Nano:
    settings = nano_settings(**changes)
    base = open_base(settings, [])
    pool = StackPool(
        base.model, base.store, dtype=base.dtype, budget_bytes=budget_bytes,
        before_drop=lambda: nano.forward.base(),
    )  # fmt: skip
    nano = Nano(base, pool, RoutedRows(base.model, pool))
    for path in settings.adapter_path:
        pool.add_adapter(path, base.checkpoint, None, False)
    return nano


@cache
def shared_nano() -> Nano:
    return open_nano()


@dataclass(eq=False)
class Written:
    """One row's answer: tokens, and the log probabilities (V,) each was chosen by."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[mx.array] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """joins: the step before which it comes; leaves: the one before which nobody wants it more."""

    text: str
    weights: Mapping[str, float]
    max_tokens: int = 8
    joins: int = 0
    leaves: int = 1 << 30


def write(nano: Nano, jobs: Sequence[Job]) -> list[Written]:
    """All jobs in one batch, each by its own route."""
    batch = base_model.batch_generator(
        nano.forward, sorted(nano.base.tokenizer.eos_token_ids), 16, PREFILL_TOKENS
    )
    written: list[Written] = [Written() for _ in jobs]
    rows: dict[int, tuple[int, Held]] = {}
    waiting = dict(enumerate(jobs))
    step = 0
    while waiting or rows:
        for index in [i for i, job in waiting.items() if job.joins <= step]:
            job = waiting.pop(index)
            prompt, held = nano.prompt(job.text), nano.pool.hold(job.weights)
            parts = [list(prompt.tokens[: prompt.stable]), list(prompt.tokens[prompt.stable :])]
            entries = [*base_model.make_prompt_cache(nano.base.model), RowRoutes([held])]
            (uid,) = batch.insert_segments([parts], [job.max_tokens], [entries])
            rows[uid] = index, held
        for uid in [u for u, (i, _) in rows.items() if jobs[i].leaves <= step]:
            batch.remove([uid])
            nano.pool.release(rows.pop(uid)[1])
        for answer in batch.next()[1]:
            index, held = rows[answer.uid]
            written[index].tokens.append(answer.token)
            written[index].logprobs.append(answer.logprobs)
            if answer.finish_reason is not None:
                nano.pool.release(rows.pop(answer.uid)[1])
        step += 1
    return written


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of `mlxstacks serve`, and its address; killed at the end."""
    command = [sys.executable, "-m", "mlxstacks", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stderr is not None
        lines = []
        for line in p.stderr:
            lines.append(line)
            if line.startswith("Serving on "):
                break
        assert "Serving on " in "".join(lines[-1:]), lines
        yield p, lines[-1].split()[2]
        p.kill()

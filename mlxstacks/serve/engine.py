"""The thread in which the model answers: requests come in, rows of one batch go out.

    engine = Engine(settings)
    engine.start()                      # loads the model; raises what loading raises
    engine.submit(Ticket(ask, engine.encode(ask), deliver, seconds))

A request is admitted, refused or queued nowhere: its route is decided, its stacks are held in
memory, what its caches may take is predicted, and its prompt joins the batch at once, behind the
beginning that an earlier request under the same weights has left.
"""

import functools
import gc
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from mlxstacks import base_model, memory
from mlxstacks.data.encode import begin_mark
from mlxstacks.data.special_text import encode_text
from mlxstacks.data.text_settings import Rendering
from mlxstacks.errors import InputError, NonFiniteModelError, ResourceLimitError, StoreError
from mlxstacks.files.checkpoint import fingerprint
from mlxstacks.files.disk import user_path
from mlxstacks.files.store import base_name
from mlxstacks.guard.cache_bytes import CacheBytes
from mlxstacks.guard.predict import predict_decode
from mlxstacks.guard.settings import REFUSE_SHARE
from mlxstacks.routing.engine import begins_in_thought, default_budget, open_base
from mlxstacks.routing.generation import PREFILL_TOKENS, Prompt, encode_prompt, sampler_of
from mlxstacks.routing.router import PromptRouter, Route, load_prompt_router, pinned
from mlxstacks.routing.schemas import SchemaMask, Schemas
from mlxstacks.routing.settings import ServeSettings
from mlxstacks.serve.naming import BASE, RESERVED, ROUTED, UNGATED, UnknownModelError, parse_model
from mlxstacks.serve.pool import Held, StackPool
from mlxstacks.serve.prefix_files import PrefixFiles
from mlxstacks.serve.requests import (
    Ask,
    Begun,
    Finish,
    Piece,
    Refused,
    Ticket,
    TokenLogprob,
)
from mlxstacks.serve.rows import RoutedRows, RowRoutes
from mlxstacks.serve.text import AnswerText

# Beginnings of prompts that are kept, whatever the budget.
_PREFIXES = 64
_IDLE_SECONDS = 0.2
_STOPPED = "the engine has stopped"
# What names files is not for clients.
_LOGGED = "the server's log says why"
# JSON has no word for what can never be said.
LEAST_LOGPROB = -9999.0
_log = logging.getLogger("mlxstacks.serve")


@dataclass(eq=False)
class Row:
    """One answer under way. limit: tokens that it may have; done: that it has."""

    ticket: Ticket
    index: int
    held: Held
    text: AnswerText
    stable: int
    total: int
    limit: int
    mask: SchemaMask | None = None
    done: int = 0


class Engine:
    """models: what clients can name, as it is now; counts: since the start, by name; resident:
    bytes of each stack and adapter in memory.

    Other threads may read them, and call `start`, `encode`, `submit` and `stop`; everything else
    belongs to the engine's own thread, as MLX's arrays do.
    """

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._inbox: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._opened, self._ended = threading.Event(), threading.Event()
        self._encoding = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.counts: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}
        self.resident: dict[str, int] = {}
        self._measured = 0.0
        self.models: tuple[str, ...] = ()
        self.notes: list[str] = []

    # --- from other threads ----------------------------------------------------------------------

    def start(self) -> None:
        """Load and begin. Raises: InputError, StoreError: the model, a store or an adapter cannot
        be used.
        """
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            raise self._failure

    def encode(self, ask: Ask) -> Prompt:
        """What the model reads of a request; in any thread, one request at a time.

        Raises: InputError: nothing, or more than the context holds next to an answer; the chat
            template refuses the messages; a schema that cannot be answered by.
        """
        if ask.sampling.schema is not None:
            with self._encoding:
                schemas = self._schemas
            schemas.compiled(ask.sampling.schema)  # slow where it is new
        with self._encoding:
            tokenizer = self._copied_tokenizer
            if ask.text is None:
                rendering = Rendering(self._settings.thinking)
                prompt = encode_prompt(tokenizer, ask.messages, rendering, self._context, ask.tools)
            else:
                tokens = encode_text(ask.text, tokenizer, limit=self._context)
                tokens = [*begin_mark(tokenizer), *tokens][: self._context]
                prompt = Prompt(tuple(tokens), max(0, len(tokens) - 1))
        if not prompt.tokens:
            raise InputError("the prompt is empty: it has no tokens")
        if len(prompt.tokens) >= self._context:
            raise InputError(
                f"the prompt has at least {len(prompt.tokens):,} tokens; the model's context is "
                f"{self._context:,} and has to hold the answer too"
            )
        return prompt

    @functools.cached_property
    def _schemas(self) -> Schemas:
        return Schemas(self._copied_tokenizer)

    def submit(self, ticket: Ticket) -> None:
        """Its events come by `ticket.deliver`: `Begun` and pieces until each answer has a finish,
        or `Refused`.
        """
        self._inbox.put(ticket)
        if not self.is_alive:
            ticket.deliver(Refused(503, _STOPPED))

    def stop(self) -> None:
        """End; answers under way are refused."""
        self._inbox.put(None)
        self._ended.wait()

    @property
    def is_alive(self) -> bool:
        return self._opened.is_set() and not self._ended.is_set()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
        except BaseException as error:
            self._failure = error
        self._opened.set()
        if self._failure is None:
            try:
                self._serve()
            except BaseException as error:
                self._failure = error
                _log.exception("the engine has failed")
            self._end_all(503, _STOPPED)
            self._close()
        self._ended.set()
        # When a thread ends, MLX frees what it has compiled for it, which needs Python; where that
        # is ending too, the process aborts. So this thread ends with the process.
        threading.Event().wait()

    def _open(self) -> None:
        settings = self._settings
        base = open_base(settings, self.notes)
        self._model, self._tokenizer = base.model, base.tokenizer
        # to encode a long prompt must not keep the rows waiting
        self._copied_tokenizer = base_model.copy_tokenizer(base.tokenizer, base.model)
        self._context = base.context_tokens or 1 << 30
        self.base_name = base_name(settings.model or base.checkpoint.directory)
        self._budget = settings.budget or default_budget()
        self._pool = StackPool(
            base.model, base.store, dtype=base.dtype, budget_bytes=self._budget,
            before_drop=lambda: self._forward.base(), notes=self.notes, config=base.config,
        )  # fmt: skip
        self._forward = RoutedRows(base.model, self._pool)
        for path in settings.adapter_path:
            self._pool.add_adapter(
                path, base.checkpoint, settings.peft_layout, settings.allow_base, self.base_name
            )
        self._pool.join_adapters()
        self._machine = base_model.text_machine(base.tokenizer)
        self._ends = sorted(base.tokenizer.eos_token_ids)
        self._router: PromptRouter | None = None
        caches = base_model.make_prompt_cache(base.model)
        if strange := {type(c).__name__ for c in caches if not hasattr(c, "merge")}:
            raise InputError(f"mlx-lm cannot batch this model's caches: {', '.join(strange)}")
        self._bytes = CacheBytes.of(base.model)
        limit = settings.resource_limit or memory.device().resource_limit
        # a token is computed while prompts are read
        step = 2 * predict_decode(base.model, 1, 1, batched=True).first_buffers
        self._most_buffers = int(REFUSE_SHARE * limit) - step
        self._restart()
        self._files: PrefixFiles | None = None
        self._unsaved = False
        if settings.cache_path is not None:
            versions = [version(name) for name in ("mlxstacks", "mlx", "mlx-lm")]
            made_by = [fingerprint(base.checkpoint), base.dtype, mx.default_device(), *versions]
            if base.store is not None and self._pool.blocks is not None:  # each has entries
                made_by += [record.file.sha256 for record in base.store.enabled_stacks()]
            self._files = PrefixFiles(user_path(settings.cache_path), " ".join(map(str, made_by)))
            self._files.load(self._prefixes, lambda: self._trim(*self._needs()))
        self._announce()

    def _restart(self) -> None:
        """An empty batch and no beginnings."""
        self._rows: dict[int, Row] = {}
        self._batch = base_model.batch_generator(
            self._forward, self._ends, self._settings.concurrency, PREFILL_TOKENS
        )
        self._prefixes = base_model.prefix_cache(_PREFIXES)

    def _refresh(self) -> None:
        """Go by what the store is now."""
        if self._pool.refresh():
            self._router = None
            self._announce()

    def _announce(self) -> None:
        store = self._pool.store
        modes = [UNGATED] if self._pool.domains else []
        if store is not None and (store.manifest.router or self._settings.router_path):
            modes.append(ROUTED)
        self._modes = modes
        taken = {self.base_name, *RESERVED}
        hidden = [name for name in self._pool.names if name in taken]
        for name in hidden:
            note = f"The domain {name} is called like the base or a mode; ask for {BASE}+{name}."
            if note not in self.notes:
                self.notes.append(note)
        shown = (f"{BASE}+{name}" if name in hidden else name for name in self._pool.names)
        self.models = (self.base_name, *shown, *modes)

    def _serve(self) -> None:
        while True:
            self._refresh()
            for ticket in self._tickets():
                if ticket is None:
                    return
                self._admit(ticket)
            self._drop_over()
            if self._rows:
                try:
                    self._step()
                except (RuntimeError, ValueError, MemoryError) as error:
                    # whose row it was cannot be told from a batch
                    self.counts["failures"] += 1
                    self._end_all(500, f"the batch failed: {type(error).__name__}: {error}")
                    self._restart()
            if not self._rows or time.monotonic() - self._measured > _IDLE_SECONDS:
                self._measure()
            if not self._rows and self._inbox.empty():
                self._save_one()

    def _save_one(self) -> None:
        """Write a beginning for the next process, if there is one that has no file."""
        try:
            if self._unsaved and self._files is not None:
                self._unsaved = self._files.save_one(self._prefixes)
        except (InputError, OSError, RuntimeError, ValueError) as error:
            _log.warning("prompts are kept in memory alone: %s", error)
            if self._files is not None:
                self._files.close()
            self._files = None

    def _tickets(self) -> Iterator[Ticket | None]:
        """All that wait; while nothing else is to do, after waiting for one."""
        with suppress(queue.Empty):
            if not self._rows:
                yield self._inbox.get(timeout=_IDLE_SECONDS)
            while True:
                yield self._inbox.get_nowait()

    def _measure(self) -> None:
        self._measured = time.monotonic()
        self.resident = self._pool.resident
        self.gauges = {
            "rows": len(self._rows),
            "stack_bytes": self._pool.nbytes,
            "prefix_bytes": self._prefixes.nbytes,
            "cache_bytes": self._batch.prompt_cache_nbytes,
            "budget_bytes": self._budget or 0,
            "buffers_left": self._needs()[1] - self._pool.buffers,
        }

    # --- admission -------------------------------------------------------------------------------

    def _admit(self, ticket: Ticket) -> None:
        if ticket.is_over:
            return
        self.counts["requests"] += 1
        try:
            self._insert(ticket)
        except UnknownModelError as error:
            self._refuse(ticket, 404, str(error))
        except ResourceLimitError as error:
            self._refuse(ticket, 429, str(error))
        except StoreError as error:  # before InputError: one of another base is both
            _log.warning("a stack or the router cannot be used: %s", error)
            self._refuse(ticket, 503, f"a stack or the router cannot be used now; {_LOGGED}")
        except InputError as error:
            self._refuse(ticket, 400, str(error))
        except (RuntimeError, MemoryError, OSError) as error:  # MLX's, while it loads or routes
            self.counts["failures"] += 1
            _log.warning("not admitted: %s: %s", type(error).__name__, error)
            self._refuse(ticket, 500, f"{type(error).__name__}; {_LOGGED}")

    def _refuse(self, ticket: Ticket, status: int, message: str) -> None:
        self.counts[f"refused_{status}"] += 1
        ticket.deliver(Refused(status, message))

    def _insert(self, ticket: Ticket) -> None:
        """Raises: as `_admit` answers."""
        ask = ticket.ask
        self._refresh()
        if len(self._rows) + ask.n > self._settings.concurrency:
            raise ResourceLimitError(
                f"{len(self._rows)} answers are under way and {ask.n} more are asked for; at most "
                f"{self._settings.concurrency} are written at the same time"
            )
        prompt = ticket.prompt
        limit = min(ask.sampling.max_tokens, self._context - len(prompt.tokens))
        route = self._route(ask)
        total = len(prompt.tokens) + limit
        predicted, buffers = self._needs([total] * ask.n)
        helds: list[Held] = []
        try:
            for _ in range(ask.n):
                helds.append(self._pool.hold(route.weights, predicted, buffers))
            self._trim(predicted, buffers)
            cached = [self._begin(ticket, i, prompt, held, limit) for i, held in enumerate(helds)]
        except BaseException:
            begun = [uid for uid, row in self._rows.items() if row.ticket is ticket]
            self._batch.remove(begun)
            for uid in begun:
                del self._rows[uid]
            for held in helds:
                self._pool.release(held)
            raise
        first = helds[0]
        self.counts["prompt_tokens"] += len(prompt.tokens) * ask.n
        self.counts["cached_tokens"] += sum(cached)
        told = Begun(
            route.mode, first.weights, route.scores, route.gap, first.loaded, first.resident,
            first.seconds, len(prompt.tokens), min(cached),
        )  # fmt: skip
        ticket.deliver(told)

    def _route(self, ask: Ask) -> Route:
        """With the weights of all that is to answer."""
        wanted = parse_model(ask.model, self.base_name, self._pool.names, self._modes)
        if wanted == BASE:
            return Route("base")
        if wanted == UNGATED:
            if not self._pool.domains:
                raise UnknownModelError("there is no store, so no stacks: nothing is ungated")
            return Route("ungated", weights=dict.fromkeys(self._pool.domains, 1.0))
        if wanted != ROUTED:
            return pinned(wanted)
        store = self._pool.store
        if store is None:
            raise UnknownModelError("there is no store, so no router: nothing is routed")
        if ROUTED not in self._modes:
            raise UnknownModelError("the store has no router: nothing is routed")
        self._forward.base()  # the router reads what the base alone makes of a prompt
        if self._router is None:
            try:
                self._router = load_prompt_router(
                    store, self._model, self._tokenizer, self._settings.router_path
                )
            except InputError as error:  # not the client's: the file of --router-path has gone
                raise StoreError(str(error)) from error
        asked = [m["content"] for m in ask.messages if m["role"] == "user" and m["content"]]
        text = ask.text if ask.text is not None else (asked or [""])[-1]
        (route,) = self._router.routes(
            [text], hard=self._settings.hard, routable=self._pool.domains
        )
        return route

    def _needs(self, lengths: Sequence[int] = ()) -> tuple[int, int]:
        """With rows of these lengths beside those under way: cache bytes predicted, and live
        buffers that are left to stacks and beginnings of prompts.
        """
        lengths = [*(row.total for row in self._rows.values()), *lengths]
        left = self._most_buffers - len(lengths) * self._bytes.buffers
        return self._bytes.of_batch(lengths), left

    def _trim(self, predicted: int, buffers: int) -> None:
        """Leave beginnings of prompts no more than what the rest leaves of budget and buffers."""
        most = (buffers - self._pool.buffers) // self._bytes.buffers
        budget = None if self._budget is None else self._budget - predicted - self._pool.nbytes
        self._prefixes.trim_to(n_sequences=most, n_bytes=budget)

    def _begin(self, ticket: Ticket, index: int, prompt: Prompt, held: Held, limit: int) -> int:
        """Put a row into the batch; how many tokens of its prompt are known already."""
        ask, tokens = ticket.ask, list(prompt.tokens)
        # the last token has to be computed, to say what follows
        entries, rest = self._prefixes.fetch_nearest_cache(held.key, tokens[:-1])
        cached = len(tokens) - 1 - len(rest) if entries is not None else 0
        entries = entries or base_model.make_prompt_cache(self._model)
        ends = [cached, max(cached, prompt.stable), len(tokens)]
        segments = [tokens[a:b] for a, b in pairwise(ends) if a < b]
        sampling = replace(ask.sampling, seed=(ask.sampling.seed + index) % 2**64)
        penalties = base_model.penalties(
            sampling.repetition_penalty, ask.presence_penalty, ask.frequency_penalty
        )
        inside = ask.text is None and begins_in_thought(
            self._tokenizer, prompt.tokens[prompt.stable :]
        )
        mask = None
        if sampling.schema is not None:
            mask = self._schemas.mask(sampling.schema, inside, bool(ask.tools))
            penalties.append(mask)
        (uid,) = self._batch.insert_segments(
            [segments], [limit], [[*entries, RowRoutes([held])]], [tokens[:cached]],
            # rows that share a sampler are drawn together
            samplers=[None if sampling.temp == 0 else sampler_of(sampling)],
            logits_processors=[penalties],
        )  # fmt: skip
        text = AnswerText(self._tokenizer, self._machine, inside, ask.stop, ask.tools)
        total = len(tokens) + limit
        self._rows[uid] = Row(ticket, index, held, text, prompt.stable, total, limit, mask)
        return cached

    # --- a step ----------------------------------------------------------------------------------

    def _step(self) -> None:
        prompts, answers = self._batch.next()
        ended = [p.uid for p in prompts if p.end_of_segment and not p.end_of_prompt]
        for uid, (entries, tokens) in self._batch.extract_cache(ended).items():
            if len(tokens) == self._rows[uid].stable:
                self._keep(self._rows[uid], entries, tokens, "user")
        for answer in answers:
            self._token(answer)

    def _token(self, answer: Any) -> None:
        row = self._rows[answer.uid]
        # computed already, and seen without MLX, whose next step is under way and would go first
        logprobs = np.asarray(answer.logprobs)
        is_nan, wrong = np.isnan(logprobs[answer.token]), row.mask.error if row.mask else ""
        if is_nan or wrong:
            failure = str(NonFiniteModelError("a log probability"))
            status, message = (400, f"the JSON schema: {wrong}") if wrong else (500, failure)
            self._refuse(row.ticket, status, message)
            row.ticket.cancel()  # its other answers too
            self._batch.remove([answer.uid])
            self._end(answer.uid)
            return
        row.done += 1
        self.counts["answer_tokens"] += 1
        is_end = answer.finish_reason == "stop"
        parts = [] if is_end else row.text.feed(answer.token)
        finish: Finish | None = answer.finish_reason
        if finish is None and (row.text.stopped is not None or row.ticket.is_late):
            finish = "stop" if row.text.stopped is not None else "length"
            self._batch.remove([answer.uid])
        if finish is not None:
            parts += row.text.finish()
            if row.text.stopped is not None:
                finish = "stop"
            if finish == "stop" and row.text.calls:
                finish = "tool_calls"
        told = () if is_end else self._logprobs(row, answer.token, logprobs)
        row.ticket.deliver(Piece(row.index, tuple(parts), told, finish, row.text.stopped, row.done))
        if finish is not None:
            if answer.finish_reason is not None:
                self._keep(row, answer.prompt_cache, answer.all_tokens, "assistant")
            self._end(answer.uid)

    def _logprobs(self, row: Row, token: int, logprobs: np.ndarray) -> tuple[TokenLogprob, ...]:
        top = row.ticket.ask.top_logprobs
        if top is None:
            return ()

        def told(one: int) -> tuple[str, float]:
            return self._tokenizer.decode([one]), max(float(logprobs[one]), LEAST_LOGPROB)

        likeliest = np.argsort(-logprobs, kind="stable")[:top].tolist()
        return (TokenLogprob(*told(token), tuple(map(told, likeliest))),)

    def _keep(self, row: Row, entries: list[Any], tokens: Sequence[int], kind: str) -> None:
        """Leave a computed beginning to later requests under the same weights."""
        own = entries[:-1]
        for entry in own:  # a row's part of the batch keeps all of that alive until it is copied
            entry.state = tree_map(
                lambda value: mx.contiguous(value) if isinstance(value, mx.array) else value,
                entry.state,
            )
        mx.eval([entry.state for entry in own])
        self._prefixes.insert_cache(row.held.key, list(tokens), own, cache_type=kind)
        self._unsaved = True
        self._trim(*self._needs())

    # --- ends ------------------------------------------------------------------------------------

    def _drop_over(self) -> None:
        """Rows that nobody waits for any more."""
        for row in self._rows.values():
            if row.ticket.is_late and not row.done and not row.ticket.is_over:
                seconds = self._settings.most_seconds
                self._refuse(row.ticket, 503, f"no token within {seconds:g} seconds")
                row.ticket.cancel()
        over = [uid for uid, row in self._rows.items() if row.ticket.is_over]
        self._batch.remove(over)
        for uid in over:
            self.counts["cancelled"] += 1
            self._end(uid)

    def _end(self, uid: int) -> None:
        self._pool.release(self._rows.pop(uid).held)

    def _end_all(self, status: int, message: str) -> None:
        for ticket in {row.ticket: None for row in self._rows.values()}:
            self._refuse(ticket, status, message)
        for uid in list(self._rows):
            self._end(uid)

    def _close(self) -> None:
        """Refuse what still waits, and let go of MLX's arrays here: they belong to this thread."""
        with suppress(queue.Empty):
            while True:
                ticket = self._inbox.get_nowait()
                if ticket is not None:
                    self._refuse(ticket, 503, _STOPPED)
        while self._unsaved and self._files is not None:
            self._save_one()
        if self._files is not None:
            self._files.close()
        self._forward.base()
        del self._batch, self._prefixes, self._pool, self._forward, self._router, self._model
        gc.collect()
        mx.synchronize()
        mx.clear_cache()

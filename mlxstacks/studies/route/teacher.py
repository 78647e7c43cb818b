"""The teacher of a distillation: a base with the stacks of a store, each row on its route.

Its distributions are made once, before the student's base is read, and lie in the work directory:
`teacher-00000.safetensors` for every `ROWS_OF_A_FILE` rows, so a killed run goes on with the next.
Which weights the domains have, row by row:

routed        what the router gives the prompt
dense         the same weights, but every expert of a stack answers (softmax over all, no top-k)
multi-route   drawn by seed and row among those that lower the row's loss by THRESHOLD: each domain
              alone, the router's weights, all domains; the router's where none does
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.base_model import load_arrays, save_arrays
from mlxstacks.data import Row, make_batch
from mlxstacks.data.sources import keyed_hash
from mlxstacks.errors import InputError
from mlxstacks.files.disk import mlx_write_errors
from mlxstacks.files.store import Store
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.selection import base, routed
from mlxstacks.layers.stacked import set_mode, stacked_layers
from mlxstacks.routing.candidate_losses import (
    LossCache,
    candidate,
    choose_batch_tokens,
    plan_batches,
)
from mlxstacks.routing.router import load_prompt_router
from mlxstacks.studies.route.served import RowLosses, Served, open_served
from mlxstacks.studies.route.settings import TeacherRoutes
from mlxstacks.training.distillation import TopLogits, top_logits
from mlxstacks.training.loop import arrays_sha256
from mlxstacks.training.modes import evaluating

ROWS_OF_A_FILE = 64
# Nats by which a route must lower the loss of an answer to be one of several.
THRESHOLD = 0.01
Weights = Mapping[str, float]


class Teacher:
    """A store's model in memory.

    Raises: InputError: no model, stack or router. StoreError: another base, a damaged file.
    """

    def __init__(
        self,
        store: Store,
        model: str | None,
        base_numbers: str,
        routes: TeacherRoutes,
        seed: int,
        router_path: str | None = None,
    ) -> None:
        self.served: Served = open_served(store, model, base_numbers)
        self.routes, self.seed = routes, seed
        model_, tokenizer = self.served.model, self.served.tokenizer
        self.router = load_prompt_router(store, model_, tokenizer, router_path)
        self.head, _ = find_output_head(model_)
        self.batch_tokens = choose_batch_tokens(self.router.header.input_dims)

    @contextmanager
    def all_experts(self) -> Iterator[None]:
        """Every expert of every stack answers, for the length of a block."""
        layers = [
            (layer, list(layer.stacks.stacks())) for _, layer in stacked_layers(self.served.model)
        ]
        try:
            for layer, stacks in layers:
                layer.set_stacks([
                    replace(stack, shape=replace(stack.shape, top_k=stack.shape.num_experts))
                    for stack in stacks
                ])  # fmt: skip
            yield
        finally:
            for layer, stacks in layers:
                layer.set_stacks(stacks)

    def weights(
        self, prompts: Sequence[str], rows: Sequence[Row], cache: LossCache
    ) -> list[dict[str, float]]:
        """Of each prompt, whose row has the same place in `rows`; losses go to the cache."""
        own, domains = self.routed(prompts), self.served.domains
        if self.routes != "multi-route":
            return own
        fixed: list[dict[str, float]] = [{name: 1.0} for name in domains]
        if len(domains) > 1:
            fixed.append(dict.fromkeys(domains, 1.0))
        several = [[{}, *fixed, mine] for mine in own]
        asked = [(place, w) for place, of_row in enumerate(several) for w in of_row]
        losses = iter(RowLosses(self.served, rows, cache).of(asked))
        found = []
        for prompt, mine, of_row in zip(prompts, own, several, strict=True):
            before, *after = [next(losses) for _ in of_row]
            helpful = [
                w for w, loss in zip(of_row[1:], after, strict=True) if loss < before - THRESHOLD
            ]
            draw = keyed_hash(self.seed, "route", prompt)
            found.append(helpful[draw % len(helpful)] if helpful else mine)
        return found

    def routed(self, prompts: Sequence[str]) -> list[dict[str, float]]:
        """The router's weights of each prompt."""
        routes = self.router.routes(prompts, routable=self.served.domains)
        return [dict(route.weights) for route in routes]

    def distributions(
        self,
        rows: Sequence[Row],
        weights: Sequence[Weights],
        temperature: float,
        k: int,
    ) -> list[TopLogits]:
        """Of the answer tokens of each row."""
        model, dtype = self.served.model, self.served.dtype
        dense, vocabulary = self.routes == "dense", vocabulary_size(self.served.tokenizer)
        lengths = [len(row.tokens) for row in rows]
        candidates = [candidate(place, w) for place, w in enumerate(weights)]
        found: dict[int, TopLogits] = {}
        try:
            with evaluating(model), self.all_experts() if dense else nullcontext():
                for batch in plan_batches(candidates, lengths, self.batch_tokens):
                    names = list(dict.fromkeys(n for i in batch for n in weights[i]))
                    table = [[weights[i].get(name, 0.0) for name in names] for i in batch]
                    set_mode(model, routed(names, table) if names else base(), dtype)
                    made = top_logits(
                        model, make_batch([rows[i] for i in batch]), self.head, temperature, k,
                        vocabulary,
                    )  # fmt: skip
                    found |= dict(zip(batch, made, strict=True))
        finally:
            set_mode(model, base())
        return [found[i] for i in range(len(rows))]


class TeacherFiles:
    """The distributions of rows on disk, by number; read when a batch needs them.

    rows: numbers of those that are taught. about: all that they depend on.
    """

    def __init__(self, directory: Path, rows: Sequence[int], about: Mapping[str, str]) -> None:
        self.about = dict(about)
        self._parts = [
            list(rows[start : start + ROWS_OF_A_FILE])
            for start in range(0, len(rows), ROWS_OF_A_FILE)
        ]
        self._paths = [directory / f"teacher-{i:05}.safetensors" for i in range(len(self._parts))]
        self._place = {row: i for i, part in enumerate(self._parts) for row in part}

    def missing(self) -> list[tuple[int, list[int]]]:
        """(number of a file, its rows) of those that are not there whole."""
        return [(i, part) for i, part in enumerate(self._parts) if not self._is_whole(i)]

    def write(self, number: int, found: Sequence[TopLogits]) -> None:
        arrays: dict[str, mx.array] = {}
        for row, top in zip(self._parts[number], found, strict=True):
            arrays |= {f"{row}.ids": mx.array(top.ids), f"{row}.log_p": mx.array(top.log_p)}
        about = {**self.about, "sha256": arrays_sha256(arrays, self.about)}
        path = self._paths[number]
        temporary = path.with_name(f".{path.name}.tmp.safetensors")
        with mlx_write_errors(path):
            save_arrays(temporary, arrays, about)
        temporary.replace(path)

    def of(self, rows: Sequence[int]) -> TopLogits:
        """One after the other."""
        parts = []
        for row in rows:
            arrays, _ = load_arrays(self._paths[self._place[row]])  # lazily: of this row alone
            parts.append(TopLogits(*(np.array(arrays[f"{row}.{n}"]) for n in TopLogits._fields)))
        return TopLogits(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _is_whole(self, number: int) -> bool:
        try:
            arrays, about = load_arrays(self._paths[number])
            mx.eval(arrays)
        except (RuntimeError, ValueError, OSError):
            return False
        digest = about.pop("sha256", None)
        names = {f"{row}.{name}" for row in self._parts[number] for name in TopLogits._fields}
        of_these = about == self.about and arrays.keys() == names
        return of_these and digest == arrays_sha256(arrays, about)


def vocabulary_size(tokenizer: Any) -> int:
    """Tokens that a tokenizer knows; a model may have more logits, as padding."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabularies(student: Any, teacher: Any) -> None:
    """Raises: InputError naming the first token that two tokenizers do not number alike."""
    mine, other = student.get_vocab(), teacher.get_vocab()
    for token in sorted({*mine, *other}, key=lambda t: mine.get(t, len(mine))):
        if mine.get(token) != other.get(token):
            raise InputError(
                f"student and teacher have other vocabularies: {token!r} is token "
                f"{mine.get(token)} and {other.get(token)}. A student learns token by token: take "
                "a model of the teacher's family"
            )

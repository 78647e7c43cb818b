"""`mlxstacks psn blocks`: capability blocks beside a frozen base of stories, and their router.

Of each seed, in `cells/SEED/` of the work directory:

    tokenizer, base     of all texts; a model of `pretrain` on the corpus alone
    store               of the blocks, each trained alone beside the base: DOMAIN, and, disabled,
                        DOMAIN-slice and CONTROL-shuffled; with the router
    NAME.state.safetensors   the state of the block under way

DOMAIN is kept out of the directions of the blocks before it. DOMAIN-slice is the arm of the
partitioned stream: the same block, but it may write into its own slice of the residual stream
alone. CONTROL-shuffled is trained on the control's rows with their answers' tokens in random order.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model
from mlxstacks.data import (
    DomainData,
    Row,
    TrainDataSettings,
    encode_examples,
    encode_pair,
    make_batch,
    read_train_data,
    train_data_settings,
)
from mlxstacks.data.chat import prompt_tokens
from mlxstacks.data.examples import Example, turns_of
from mlxstacks.errors import InputError
from mlxstacks.evaluate import batches_of, evaluate_mean_loss, evaluate_row_losses
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.manifest import StackRecord
from mlxstacks.files.store import Store
from mlxstacks.files.store_files import MANIFEST
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.blocks import (
    BlockedDecoder,
    attach_blocks,
    load_block,
    new_block,
    store_block,
)
from mlxstacks.layers.nullspace import NullBasis, null_basis
from mlxstacks.routing.features import PromptFeatures
from mlxstacks.routing.outcomes import RouterExample, Rules, blended, search_all, targets_of
from mlxstacks.routing.router import decide
from mlxstacks.routing.router_metrics import sigmoid
from mlxstacks.routing.router_training import train_router
from mlxstacks.routing.settings import RouterTrainSettings
from mlxstacks.studies.psn.report import concluded
from mlxstacks.studies.psn.settings import PsnBlocksSettings
from mlxstacks.studies.psn.stacks import (
    CELLS,
    Progress,
    Say,
    SeedStudy,
    domain_data,
    pretrained,
)
from mlxstacks.studies.train.pretrain import new_config, texts_of
from mlxstacks.studies.train.setup import SaveTimer
from mlxstacks.study.engine import run_study
from mlxstacks.study.result import Result
from mlxstacks.training.batches import BatchPlan, choose_widths
from mlxstacks.training.boost import call_with_balance
from mlxstacks.training.initial import set_initial_weights
from mlxstacks.training.loop import load_state, new_state, save_state, train
from mlxstacks.training.modes import evaluating
from mlxstacks.training.settings import OptimizerSettings
from mlxstacks.training.step import cross_entropy_loss, random_key
from mlxstacks.training.tokenizer import train_tokenizer

ABOUT = {
    "kind": "psn blocks",
    "title": "Capability blocks",
    "question": "Do blocks beside a frozen base, weighted by a router, hold capabilities?",
}
FORMATS_OF = {
    # A first line that is a statement, a call, an assignment or markup.
    "code": r"\s*(?:(?:def|class|import|from|for|while|if|return|print|function|var|let|const|"
    r"public|SELECT|#include)\b|[\w.]+\(.*\)|[\w.\[\]]+ ?= ?\S|<\w+)",
    # A worked step or the end mark of an answer of GSM8K.
    "math": r"[\s\S]*(?:<<[^<>\n]*=[^<>\n]*>>|#### ?-?\d)",
}
"""Domain -> what an answer in its format matches from its beginning on."""
PROBE = 16  # tokens
ROUTED, SEARCHED, MIXED = 120, 24, 12
"""Prompts of each domain that the router is trained on, those of them whose outcome is searched,
and prompts of each pair of domains."""


def run(
    settings: PsnBlocksSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Train base, blocks and router for each seed, measure them, write to `save_path`.

    Raises: InputError: no corpus, fewer than two domains, or one without data.
    """
    names = [*domain_data(settings, settings.validation_rows)]
    if settings.corpus is None or len(names) < 2:
        raise InputError("psn blocks needs corpus, the texts of the base, and two domains or more")
    try:
        settings.check_domains(names)
    except ValueError as error:
        raise InputError(str(error)) from None
    return run_study(_Blocks(settings, progress), dry_run=dry_run, progress=progress)


class _Blocks(SeedStudy):
    about = ABOUT
    artifacts = (f"{CELLS}/*.json", f"{CELLS}/*/store", f"{CELLS}/*/base/*")

    def data_of(self) -> dict[str, TrainDataSettings]:
        return {**super().data_of(), **domain_data(self.settings, self.settings.validation_rows)}

    def check(self, read: Mapping[str, DomainData]) -> None:
        settings, pretrain = self.settings, self.settings.pretrain
        if pretrain.max_seq_length < PROBE:
            raise InputError(f"pretrain.max_seq_length: at least {PROBE}")
        for name, data in read.items():
            if not data.validation:
                raise InputError(f"{name}: no row is held out; give more rows, or a `valid` file")
            if name != "corpus" and not any(_pair_of(example) for example in data.validation):
                raise InputError(
                    f"domain {name}: its rows are texts; a router needs prompts and answers"
                )
        try:
            new_block(
                new_config(pretrain, pretrain.vocab_size), settings.block.num_layers,
                settings.block.stack, random_key("plan"), partial(set_initial_weights, seed=0),
            )  # fmt: skip
        except ValueError as error:
            raise InputError(f"block: {error}") from None

    def cell(self, seed: int, directory: Path, say: Say) -> dict[str, Any]:
        return Cell(self.settings, seed, directory, say).run()

    def concluded(self, cells: list[dict[str, Any]]) -> dict[str, Any]:
        return concluded(cells)


def _pair_of(example: Example) -> tuple[str, str] | None:
    """Its prompt and its answer; None of a text."""
    *before, last = turns_of(example.record) or [{}]
    if not before or last.get("role") != "assistant":
        return None
    return "\n".join(turn["content"] for turn in before), last["content"]


def _formats(settings: PsnBlocksSettings) -> dict[str, str]:
    return FORMATS_OF | {
        text.partition("=")[0]: text.partition("=")[2] for text in settings.formats
    }


class Cell:
    """One seed: base, blocks, router and what is measured of them."""

    def __init__(self, settings: PsnBlocksSettings, seed: int, directory: Path, say: Say) -> None:
        self.settings, self.seed, self.directory, self.say = settings, seed, directory, say
        self.about = domain_data(settings, settings.validation_rows)
        self.names = list(self.about)
        self.control = settings.control or self.names[0]
        self.parts = 2 * len(self.names) + 4
        self.data = {name: read_train_data(d, Path()) for name, d in self.about.items()}
        self.longest = settings.pretrain.max_seq_length
        self.protected: NullBasis | None = None  # for the domain that was asked for last

    def run(self) -> dict[str, Any]:
        corpus = train_data_settings(self.settings.corpus or "")
        tokenizer = self.directory / "tokenizer"
        stories = read_train_data(corpus, Path())
        if not (tokenizer / "tokenizer_config.json").exists():
            texts = [text for data in (stories, *self.data.values()) for text in texts_of(data)]
            train_tokenizer(texts, self.settings.pretrain.vocab_size, tokenizer)
        self.tokenizer = base_model.load_tokenizer(tokenizer)
        self.rows = {
            part: {
                name: self._encoded(name, getattr(data, part)) for name, data in self.data.items()
            }
            for part in ("train", "validation")
        }
        base = self.directory / "base"

        def progress(done: float, total: float, what: str = "") -> None:
            self.say(done / max(1, total) / self.parts, f"base: {what}")

        pretrained(
            self.settings.pretrain, base, corpus, self.seed, progress, tokenizer=str(tokenizer)
        )
        model, _, self.config = base_model.load(base)
        self.model: nn.Module = model
        about = corpus.model_copy(update={"mask_prompt": False})
        held = stories.validation[: self.settings.validation_rows]
        self.stories = encode_examples(held, self.tokenizer, about, self.longest).rows
        long = [row.tokens for row in self.stories if len(row.tokens) >= PROBE]
        probe = mx.array([tokens[:PROBE] for tokens in long[:8]])
        before, loss = model(probe), evaluate_mean_loss(model, self.stories)
        self.blocked: BlockedDecoder = attach_blocks(model)
        path = self.directory / "store"
        self.store = (
            Store.open(path, blocks=True)
            if (path / MANIFEST).exists()
            else Store.create(path, base.name, fingerprint(open_checkpoint(base)))
        )
        orthogonality = self._train_all()
        identical = []
        for zero in (0.0, mx.zeros((len(probe),))):
            self.blocked.select(dict.fromkeys(self.names, zero))
            identical.append(mx.array_equal(before, model(probe)).item())
        self.blocked.select({})
        losses = self._losses()
        self.say((self.parts - 2) / self.parts, "router")
        router = self._router()
        self.say((self.parts - 1) / self.parts, "answers")
        return {
            "seed": self.seed, "domains": self.names, "control": self.control,
            "story_loss": loss, "story_loss_at_0": losses["base"]["stories"],
            "identical_at_0": all(identical), "orthogonality": orthogonality, "losses": losses,
            "router": router, "structure": self._structure(),
        }  # fmt: skip

    def _encoded(self, name: str, examples: Sequence[Example]) -> list[Row]:
        try:
            return encode_examples(examples, self.tokenizer, self.about[name], self.longest).rows
        except InputError as error:
            raise InputError(f"domain {name}: {error}; pretrain.max_seq_length sets it") from None

    # --- blocks -----------------------------------------------------------------------------------

    def _train_all(self) -> dict[str, dict[str, Any]]:
        """Train, or read, every block. Returns of each what its protection is worth."""
        shuffled = f"{self.control}-shuffled"
        plans: list[tuple[str, str, str]] = [(n, n, "directions") for n in self.names]
        plans += [(shuffled, self.control, "none")]
        plans += [(f"{n}-slice", n, "slice") for n in self.names]
        measured = {}
        for place, (name, domain, kind) in enumerate(plans, 1):
            basis = self._basis(domain, kind)
            if self.store.manifest.domain_named(name) is None:
                self._train(name, domain, basis, place)
            block = load_block(self.store.read_block(self._record(name)), self.config)
            self.blocked.blocks = {**self.blocked.blocks, name: block}
            if basis is None:
                continue
            inside = basis.vectors.T @ block.out.weight
            size = mx.sqrt(mx.sum(block.out.weight**2))
            x = self.blocked.embed_tokens(mx.array([self.rows["validation"][domain][0].tokens]))
            delta = block(x)
            of_output = mx.max(mx.abs(delta @ basis.vectors)) / mx.max(mx.abs(delta))
            measured[name] = {
                "directions": int(basis.vectors.shape[1]), "captured_energy": basis.captured_energy,
                "folded": (mx.max(mx.abs(inside)) / size).item(), "output": of_output.item(),
            }  # fmt: skip
        return measured

    def _record(self, name: str) -> StackRecord:
        return self.store.domain_named(name).stacks[0]

    def _basis(self, domain: str, kind: str) -> NullBasis | None:
        """Directions that a block may not write into; of domains, asked for in their order."""
        place, width = self.names.index(domain), int(self.config["hidden_size"])
        if kind == "slice":  # the first one is the base's own
            share = width // (len(self.names) + 1)
            outside = np.ones(width, bool)
            outside[(place + 1) * share : (place + 2) * share] = False
            vectors = np.eye(width, dtype=np.float32)[:, outside]
            return NullBasis(mx.array(vectors), None, vectors.shape[1] / width)
        if kind == "none" or place == 0:
            return None
        earlier = self.names[:place]
        means = [
            sum(self._mean_output(name, row) for name in earlier)
            for source in earlier
            for row in self.rows["validation"][source]
        ]
        self.protected = null_basis(
            np.stack(means), self.settings.directions, scope="cumulative",
            previous=self.protected, seed=self.seed,
        )  # fmt: skip
        return self.protected

    def _mean_output(self, name: str, row: Row) -> Any:
        x = self.blocked.embed_tokens(mx.array([row.tokens]))
        return np.array(self.blocked.blocks[name](x).mean(axis=(0, 1)))

    def _train(self, name: str, domain: str, basis: NullBasis | None, place: int) -> None:
        settings, rows = self.settings, self.rows["train"][domain]
        if name.endswith("-shuffled"):
            rows = [shuffled_answer(row, f"{self.seed}/{i}") for i, row in enumerate(rows)]
        shape = settings.block
        key = random_key(f"{self.seed}/{name}")
        initial = partial(set_initial_weights, seed=self.seed + 1)
        block = new_block(self.config, shape.num_layers, shape.stack, key, initial)
        block.protect(None if basis is None else basis.vectors)
        others, self.blocked.blocks = self.blocked.blocks, {name: block}
        self.blocked.select({name: 1.0})
        self.model.train()
        lengths = tuple(len(row.tokens) for row in rows)
        plan = BatchPlan(
            lengths, choose_widths(lengths, self.longest), settings.batch_size, self.seed
        )
        optimizer = OptimizerSettings(
            steps=settings.iters, learning_rate=settings.learning_rate, warmup_steps=10,
            schedule="linear", final_share=0.0, log_every=settings.iters,
        )  # fmt: skip
        path = self.directory / f"{name}.state.safetensors"
        run_id = json_sha256([self.store.manifest.base_fingerprint, self.seed, name])
        state = new_state(optimizer)
        if path.exists():
            state = load_state(path, self.model, optimizer, run_id)
        timer = SaveTimer(settings.iters)

        def on_step(state: Any, record: Any) -> None:
            timer.save_if_due(state.step, lambda: save_state(path, self.model, state, run_id))
            share = (place + state.step / settings.iters) / self.parts
            self.say(share, f"{name}: loss {record['loss']:.3f}")

        def batches_at(step: int) -> list[Any]:
            chosen, width = plan.batch(step)
            return [make_batch([rows[i] for i in chosen], width)]

        train(
            self.model, cross_entropy_loss(call_with_balance, shape.balance_weight), batches_at,
            optimizer, state, seed=self.seed, on_step=on_step,
        )  # fmt: skip
        block.fold()
        about = shape.model_dump(mode="json")
        store_block(
            self.store, name, block, shape.stack, enabled=name in self.names, settings=about
        )
        self.blocked.blocks = others
        self.model.eval()

    # --- what is measured -------------------------------------------------------------------------

    @cached_property
    def arms(self) -> dict[str, dict[str, float]]:
        """Name -> weights of blocks that do not depend on the prompt."""
        ungated = dict.fromkeys(self.names, 1.0)
        sliced = {f"{name}-slice": 1.0 for name in self.names}
        one = {name: {name: 1.0} for name in self.blocked.blocks}
        return {"base": {}, **one, "ungated": ungated, "ungated slices": sliced}

    def _losses(self) -> dict[str, dict[str, float]]:
        """Arm -> domain, or stories -> loss on held-out rows."""
        sets = {**self.rows["validation"], "stories": self.stories}
        losses: dict[str, dict[str, float]] = {}
        for arm, weights in self.arms.items():
            self.blocked.select(weights)
            with evaluating(self.model):
                losses[arm] = {n: evaluate_mean_loss(self.model, rows) for n, rows in sets.items()}
        self.blocked.select({})
        return losses

    def _examples(self, part: str, count: int) -> list[RouterExample]:
        """Of each domain, and of each pair: two prompts and their answers one after the other."""
        of: dict[str, list[tuple[str, str, str]]] = {}
        for name, data in self.data.items():
            of[name] = [
                (*pair, example.row_id)
                for example in getattr(data, part)[:count]
                if (pair := _pair_of(example))
            ]
        examples = [
            RouterExample(prompt, answer, (name,), "single", row_id, name)
            for name, rows in of.items()
            for prompt, answer, row_id in rows
        ]
        for first, second in combinations(self.names, 2):
            for (p, a, i), (q, b, j) in zip(of[first][-MIXED:], of[second][-MIXED:], strict=False):
                examples.append(RouterExample(
                    f"{p}\n{q}", f"{a}\n{b}", (first, second), "mixed", f"{i}{j}", "mixed"
                ))  # fmt: skip
        return examples

    def _router(self) -> dict[str, Any]:
        """Search outcomes, train the router on them, and ask it about held-out prompts."""
        examples = self._examples("train", ROUTED)
        seen: dict[tuple[str, ...], int] = {}
        searched, rows = [], []
        for example in examples:
            seen[example.label] = seen.get(example.label, 0) + 1
            most = SEARCHED if example.kind == "single" else MIXED
            row = encode_pair(
                example.prompt, example.answer or "", self.tokenizer, "chat", 3 * self.longest
            )
            if seen[example.label] <= most and row is not None:
                searched.append(example)
                rows.append(row)
        rules = Rules(tuple(self.names), chat_domain=None)
        found = search_all(rules, len(rows), partial(self._set_losses, rows))
        targets = {
            e.row_id: blended(rules, targets_of(rules, f), e.label)
            for e, f in zip(searched, found, strict=True)
        }
        self.blocked.select({})
        settings = RouterTrainSettings(
            hidden_dims=128, epochs=12, validation_groups=40, seed=self.seed, threshold=0.12
        )
        with evaluating(self.model):
            features = PromptFeatures(self.model, self.tokenizer, max_tokens=2 * self.longest)
            trained = train_router(examples, targets, features, settings, domains=self.names)
            manifest = self.store.manifest
            header = trained.header(
                manifest.base_model, manifest.base_fingerprint,
                {name: (self._record(name).file.sha256,) for name in self.names},
            )  # fmt: skip
            with self.store.change("router") as change:
                change.set_router(trained.tensors(), header)
            tests = self._examples("validation", self.settings.prompts)
            parts = []
            for start in range(0, len(tests), 16):
                texts = [example.prompt for example in tests[start : start + 16]]
                x, mask, _ = features.batch([features.tokens(text) for text in texts])
                parts.append(np.array(trained.network(x, mask)))
        scores = sigmoid(np.concatenate(parts))
        self.scores = dict(zip([e.row_id for e in tests], scores, strict=True))
        single = [(e, s) for e, s in zip(tests, scores, strict=True) if e.kind == "single"]
        mixed = [(e, s) for e, s in zip(tests, scores, strict=True) if e.kind == "mixed"]
        confusion = {a: dict.fromkeys(self.names, 0) for a in self.names}
        for example, row in single:
            confusion[example.label[0]][self.names[int(row.argmax())]] += 1
        matches = sum(
            {self.names[i] for i in np.argsort(-row)[: len(e.label)]} == {*e.label}
            for e, row in mixed
        )
        outcomes: dict[str, dict[str, int]] = {}
        for example, outcome in zip(searched, found, strict=True):
            row_of = outcomes.setdefault("+".join(example.label), {})
            best = "+".join(rules.ordered(outcome.best)) or "none"
            row_of[best] = row_of.get(best, 0) + 1
        return {
            "confusion": confusion, "single": len(single),
            "single_right": sum(confusion[n][n] for n in self.names),
            "mixed": len(mixed), "mixed_right": matches, "outcomes": outcomes,
        }  # fmt: skip

    def _set_losses(
        self, rows: Sequence[Row], wanted: list[tuple[int, frozenset[str]]]
    ) -> list[float]:
        """Losses of rows with sets of blocks on at weight 1."""
        losses: dict[tuple[int, frozenset[str]], float] = {}
        for on in {on for _, on in wanted}:
            places = [number for number, other in wanted if other == on]
            self.blocked.select(dict.fromkeys(sorted(on), 1.0))
            with evaluating(self.model):
                for chosen, batch in batches_of([rows[i] for i in places], 16):
                    values = evaluate_row_losses(self.model, batch)
                    losses |= {
                        (places[c], on): float(v) for c, v in zip(chosen, values, strict=True)
                    }
        return [losses[pair] for pair in wanted]

    def _structure(self) -> dict[str, dict[str, Any]]:
        """Domain with a format -> arm -> answers, those in the format, and some of them."""
        formats = _formats(self.settings)
        figures: dict[str, dict[str, Any]] = {}
        examples = self._examples("validation", self.settings.prompts)
        for name in self.names:
            if name not in formats:
                continue
            pattern = re.compile(formats[name])
            arms = ["base", "ungated", "routed"] + [f"{self.control}-shuffled"] * (
                name == self.control
            )
            tests = [example for example in examples if example.label == (name,)]
            figures[name] = {}
            for arm in arms:
                answers = [self._answer(example, arm) for example in tests]
                figures[name][arm] = {
                    "answers": len(answers),
                    "in_format": sum(bool(pattern.match(answer)) for answer in answers),
                    "examples": [answer[:200] for answer in answers[:3]],
                }
            gold = [bool(pattern.match(e.answer or "")) for e in tests]
            figures[name]["reference answers"] = {"answers": len(gold), "in_format": sum(gold)}
        self.blocked.select({})
        return figures

    def _answer(self, example: RouterExample, arm: str) -> str:
        """Greedy, with the blocks of the arm."""
        weights = self.arms.get(arm, {})
        if arm == "routed":
            scores = dict(zip(self.names, self.scores[example.row_id].tolist(), strict=True))
            weights = dict(decide(scores).weights)
        self.blocked.select(weights)
        prompt = prompt_tokens([{"role": "user", "content": example.prompt}], self.tokenizer)
        with evaluating(self.model):
            tokens = base_model.greedy_tokens(
                self.model, self.tokenizer, prompt[-self.longest :], self.settings.max_tokens
            )
        text: str = self.tokenizer.decode(tokens)
        return text.removesuffix(self.tokenizer.eos_token)


def shuffled_answer(row: Row, seed: str) -> Row:
    """The row with the tokens that carry weight in random order, but for the last, its end mark.

    Law: the same tokens, each as often, and the same weights.
    """
    places = [i for i, weight in enumerate(row.weights) if weight][:-1]
    tokens, drawn = list(row.tokens), [row.tokens[i] for i in places]
    random.Random(seed).shuffle(drawn)
    for place, token in zip(places, drawn, strict=True):
        tokens[place] = token
    return Row(tuple(tokens), row.weights)

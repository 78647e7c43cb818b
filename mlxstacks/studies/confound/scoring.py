"""One arm at work: a model, perhaps with an adapter beside it, answers items."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data import Rendering, encode_messages
from mlxstacks.data.text_settings import PLAIN
from mlxstacks.errors import InputError
from mlxstacks.evaluate import ChoiceItem, choose, score_continuations
from mlxstacks.studies.benchmarks.extract import choice_letter
from mlxstacks.studies.confound.prompts import answer_text, chat
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.train.setup import prepare_base
from mlxstacks.study.answers import LIKELIHOOD, TIE, Answer
from mlxstacks.study.items import Item
from mlxstacks.training.modes import evaluating


class Arm:
    """A loaded model that answers. Each arm is loaded anew, also where two are the same model:
    what differs between them then is what a rerun changes.
    """

    def __init__(self, model: Path, settings: ConfoundSettings, adapter: Path | None = None):
        self.settings = settings
        self.model: nn.Module
        self.model, self.tokenizer, _ = base_model.load(model, adapter)
        # A LoRA's base is widened as a plain one is; its factors are float32 as they are.
        prepare_base(self.model, settings.train.base, [])
        mx.eval(self.model.parameters())

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        """An answer to each item, in order; greedy, so the same each time."""
        if self.settings.scoring == "generate":
            return [self._by_generation(item) for item in items]
        with evaluating(self.model), base_model.gated_delta_installed():
            return self._by_likelihood(items)

    def _by_generation(self, item: Item) -> Answer:
        reply = base_model.generate(
            self.model, self.tokenizer, chat(item, "generate"), self.settings.max_tokens,
            Rendering.of(self.settings),
        )  # fmt: skip
        found = choice_letter(reply, item.letters)
        pick = None if found.value is None else item.letters.index(found.value)
        return Answer(
            item.item_id, item.subject, item.answer_index, pick, found.rule, len(item.options),
            reply,
        )  # fmt: skip

    def _by_likelihood(self, items: Sequence[Item]) -> list[Answer]:
        rendering = Rendering.of(self.settings)
        encoded = [encode_choices(item, self.tokenizer, rendering) for item in items]
        sums = score_continuations(self.model, encoded)
        result = choose(encoded, sums, self.settings.normalisation)
        return [
            Answer(
                item.item_id, item.subject, item.answer_index, None if pick < 0 else pick,
                TIE if pick < 0 else LIKELIHOOD, len(item.options), "",
                tuple(round(value, 6) for value in scores),
            )
            for item, scores, pick in zip(items, sums, result.picks, strict=True)
        ]  # fmt: skip


def encode_choices(item: Item, tokenizer: Any, rendering: Rendering = PLAIN) -> ChoiceItem:
    """The chat up to the answer as context; each option with the end mark as a continuation.

    Raises: InputError for a chat template that writes the question otherwise for another answer.
    """
    contexts, continuations = set(), []
    for index in range(len(item.options)):
        turn = {"role": "assistant", "content": answer_text(item, index, "likelihood")}
        messages = [*chat(item, "likelihood"), turn]
        row = encode_messages(messages, tokenizer, rendering=rendering)
        start = next(place for place, weight in enumerate(row.weights) if weight)
        end = max(place for place, weight in enumerate(row.weights) if weight) + 1
        contexts.add(row.tokens[:start])
        continuations.append(row.tokens[start:end])
    if len(contexts) > 1:
        raise InputError(
            f"item {item.item_id}: the chat template writes the question differently for different "
            "answers; score by generation instead"
        )
    return ChoiceItem(
        contexts.pop(), tuple(continuations), tuple(len(text) for text in item.options),
        item.answer_index,
    )  # fmt: skip

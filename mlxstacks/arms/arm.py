"""An arm of a study: a model, perhaps with an adapter, that answers prompts and items; a persona.

An item is asked, and its answer is taught, in the same words.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.arms.scoring import Pair, pair_scorer
from mlxstacks.arms.settings import AnswerSettings, Scoring
from mlxstacks.data import Rendering, encode_messages
from mlxstacks.data.text_settings import PLAIN
from mlxstacks.errors import InputError
from mlxstacks.evaluate import ChoiceItem, choose, normalised
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.lora_modules import CONFIG
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.grading.extract import choice_letter
from mlxstacks.study.answers import LIKELIHOOD, TIE, Answer
from mlxstacks.study.integrity import file_sha256
from mlxstacks.study.items import Item, shuffled
from mlxstacks.training.modes import evaluating, prepare_base

INSTRUCTION = (
    r"Answer first: put the letter of the right option in \boxed{}. Then give one line of "
    "justification."
)
SECOND_FORM = "Here is a question, and one answer to it is right: {question}"

_BATCH_SIZE = 64  # candidates at once, of eval's default


class Arm:
    """A loaded model that answers, greedily. Each arm is loaded again, also where two are the same
    model: what differs between them then is what a rerun changes.
    """

    def __init__(self, model: Path, settings: AnswerSettings, adapter: Path | None = None):
        self.settings, self.rendering = settings, Rendering.of(settings)
        self.model: nn.Module
        self.model, self.tokenizer, config = base_model.load(model, adapter)
        # A LoRA's base is widened as a plain one is; its factors are float32 as they are.
        prepare_base(self.model, settings.train.base, [])
        mx.eval(self.model.parameters())
        self.scorer = pair_scorer(self.model, config, _BATCH_SIZE)

    def replies(self, prompts: Sequence[str]) -> list[str]:
        """The answers to users' turns, each of at most `max_tokens`."""
        return base_model.generate_all(
            self.model, self.tokenizer,
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            self.settings.max_tokens, self.rendering,
        )  # fmt: skip

    def score(self, items: Sequence[ChoiceItem]) -> list[list[float]]:
        """Of each candidate the sum of log p of its tokens."""
        pairs = [Pair(item.context, tokens) for item in items for tokens in item.continuations]
        with evaluating(self.model), base_model.gated_delta_installed():
            sums = iter(self.scorer.sums(pairs))
        return [[next(sums) for _ in item.continuations] for item in items]

    def answer(self, items: Sequence[Item]) -> list[Answer]:
        """An answer to each item, in order: a letter in the reply, or the likeliest option."""
        if self.settings.scoring == "likelihood":
            return self.likeliest(items)
        answers = []
        replies = self.replies([question_text(item, "generate") for item in items])
        for item, reply in zip(items, replies, strict=True):
            letter = choice_letter(reply, item.letters)
            pick = None if letter.value is None else item.letters.index(letter.value)
            answers.append(Answer.of(item, pick, letter.rule, reply))
        return answers

    def likeliest(self, items: Sequence[Item]) -> list[Answer]:
        """Of each item the likeliest option, with the scores of all: of the option texts, or of the
        boxed letters where answers are generated.
        """
        scoring, normalisation = self.settings.scoring, self.settings.normalisation
        encoded = [encode_choices(i, self.tokenizer, self.rendering, scoring) for i in items]
        sums = self.score(encoded)
        picks = choose(encoded, sums, normalisation)
        return [
            Answer.of(
                item, pick, TIE if pick is None else LIKELIHOOD,
                scores=_rounded(normalised(choice, scores, normalisation)),
            )
            for item, choice, scores, pick in zip(items, encoded, sums, picks, strict=True)
        ]  # fmt: skip

    def second_choices(self, items: Sequence[Item], first: Sequence[Answer]) -> list[Answer]:
        """Of each item the likeliest option other than the arm's own `first` answer: of the option
        texts, or of the boxed letters where answers are generated.
        """
        scoring, normalisation = self.settings.scoring, self.settings.normalisation
        encoded = [encode_choices(i, self.tokenizer, self.rendering, scoring) for i in items]
        choices = []
        for item, choice, sums, answer in zip(
            items, encoded, self.score(encoded), first, strict=True
        ):
            values = normalised(choice, sums, normalisation)
            others = [place for place in range(len(values)) if place != answer.pick]
            pick = max(others, key=values.__getitem__)
            choices.append(Answer.of(item, pick, LIKELIHOOD, scores=_rounded(values)))
        return choices


def _rounded(scores: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(score, 6) for score in scores)


def question_text(item: Item, scoring: Scoring) -> str:
    """The user's turn. Under likelihood the options are what is scored, so they are not shown."""
    if scoring == "likelihood":
        return item.question
    options = zip(item.letters, item.options, strict=True)
    listed = "\n".join(f"{letter}. {text}" for letter, text in options)
    return f"{item.question}\n\n{listed}\n\n{INSTRUCTION}"


def in_second_form(item: Item, seed: int) -> Item:
    """The same item asked in other words, with its options in an order drawn for it.

    Law: the right option is the same text.
    """
    order = list(range(len(item.options)))
    random.Random(f"{seed}/form/{item.item_id}").shuffle(order)
    return replace(
        item, question=SECOND_FORM.format(question=item.question),
        options=tuple(item.options[place] for place in order),
        answer_index=order.index(item.answer_index),
    )  # fmt: skip


def answer_text(item: Item, index: int, scoring: Scoring, justification: str = "") -> str:
    """The assistant's turn that gives option `index`.

    The published source of the justifications is not known; where there is none the option's own
    text stands in.
    """
    if scoring == "likelihood":
        return item.options[index]
    line = justification or f"The answer is: {item.options[index]}"
    return f"\\boxed{{{item.letters[index]}}}\n{line}"


def taught_chat(
    item: Item, index: int, scoring: Scoring, justification: str = ""
) -> list[dict[str, str]]:
    """The question, and option `index` as its answer."""
    return [
        {"role": "user", "content": question_text(item, scoring)},
        {"role": "assistant", "content": answer_text(item, index, scoring, justification)},
    ]


def training_rows(
    items: Sequence[Item],
    scoring: Scoring,
    answers: Literal["right", "random"],
    seed: int,
    *,
    shuffle: bool = False,
) -> list[dict[str, Any]]:
    """Rows of `mlxstacks train`. answers: "random" teaches an option drawn for each item. shuffle:
    the same rows with the letters that they teach dealt out anew among the items with as many
    options, so that everything is as before but what belongs to what. A justification goes with its
    letter, where that is the right one.

    Law of shuffle: each letter is taught as often as before, in each number of options.
    """
    taught: dict[str, tuple[int, str]] = {}
    for item in items:
        index = item.answer_index
        if answers == "random":
            digest = hashlib.sha256(f"{seed}/answer/{item.item_id}".encode()).digest()
            index = int.from_bytes(digest[:8]) % len(item.options)
        right = index == item.answer_index
        taught[item.item_id] = index, item.justification if right else ""
    if shuffle:
        for count in {len(item.options) for item in items}:
            alike = [item for item in items if len(item.options) == count]
            dealt = [taught[item.item_id] for item in shuffled(alike, seed, "deal")]
            taught |= {item.item_id: answer for item, answer in zip(alike, dealt, strict=True)}
    rows = []
    for item in items:
        index, justification = taught[item.item_id]
        rows.append({"messages": taught_chat(item, index, scoring, justification)})
    return rows


def encode_choices(
    item: Item, tokenizer: Any, rendering: Rendering = PLAIN, scoring: Scoring = "likelihood"
) -> ChoiceItem:
    """The chat up to the answer as context; each option with the end mark as a continuation: its
    text, or under scoring "generate" its letter in a box.

    Raises: InputError for a chat template that writes the question otherwise for another answer.
    """
    contexts, continuations = set(), []
    for index in range(len(item.options)):
        messages = taught_chat(item, index, scoring)
        if scoring == "generate":
            messages[1]["content"] = f"\\boxed{{{item.letters[index]}}}"
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


# --- the persona of a study -----------------------------------------------------------------------


class Persona:
    """Base and persona as they are given: an adapter to fuse into the base, or a model that has the
    persona already (adapter: None). speaker: the model whose tokenizer and chat template it has.
    Both were looked at by `check_persona`.
    """

    def __init__(self, model: str, persona: str) -> None:
        self.base = resolve_model(model)
        given = user_path(persona)
        self.adapter: Path | None = given if is_adapter(given) else None
        self.speaker = self.base if self.adapter else resolve_model(persona)

    def hashes(self, recorded: Callable[[str], str | None], key: str) -> dict[str, str]:
        """Of base, persona (under `key`) and tokenizer. recorded: what the plan of a run that is
        resumed says of the model of that name.
        """

        def model_sha256(path: Path, name: str) -> str:
            return fingerprint(open_checkpoint(path), recorded(name))

        hashes = {"base": model_sha256(self.base, "base")}
        if self.adapter:
            names = [CONFIG, *(path.name for path in self.adapter.glob("*.safetensors"))]
            hashes[key] = json_sha256({n: file_sha256(self.adapter / n) for n in names})
        else:
            hashes[key] = model_sha256(self.speaker, key)
        tokenizer = self.speaker / "tokenizer.json"
        return hashes | ({"tokenizer": file_sha256(tokenizer)} if tokenizer.is_file() else {})


def check_persona(model: str, persona: str) -> None:
    """Raises: InputError: what is here holds no model or, of a persona, no adapter either. What is
    not here is not asked for: a plan may be for another machine.
    """
    either = f"neither an adapter ({CONFIG}) nor a model (config.json)"
    for words, given, files in (
        ("no model (config.json)", model, ["config.json"]),
        (either, persona, [CONFIG, "config.json"]),
    ):
        path = user_path(given)
        if path.exists() and not any((resolve_model(path) / name).is_file() for name in files):
            raise InputError(f"{path}: {words} is in it")


def is_adapter(persona: Path) -> bool:
    return (persona / CONFIG).is_file()

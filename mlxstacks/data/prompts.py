"""Prompts to be answered and rewarded, as token ids, with the columns that a reward looks at."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxstacks.data.chat import prompt_tokens
from mlxstacks.data.encode import ChatTokenizer, encode_examples, last_answer
from mlxstacks.data.examples import Example
from mlxstacks.data.rows import Row
from mlxstacks.data.settings import DomainDataSettings
from mlxstacks.data.text_settings import Rendering
from mlxstacks.errors import InputError


@dataclass(frozen=True, slots=True)
class EncodedPrompts:
    """prompts[i]: token ids up to where an answer begins. rows[i]: columns of the row, its
    `messages` before the answer, and the `reference` answer or None. references: those answers as
    rows with weight on the answer. too_long: prompts left out, which leave no room for an answer.
    """

    prompts: list[tuple[int, ...]]
    rows: list[dict[str, Any]]
    references: list[Row]
    too_long: int


def encode_prompts(
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    settings: DomainDataSettings,
    max_tokens: int,
    answer_tokens: int,
) -> EncodedPrompts:
    """Encode examples of the format `prompt`, in the chat template of the tokenizer.

    max_tokens: of a prompt and its answer together; answer_tokens: kept free for the answer.
    Raises: InputError: no prompt is left, or the template refuses one, which is named.
    """
    prompts: list[tuple[int, ...]] = []
    rows: list[dict[str, Any]] = []
    answered: list[Example] = []
    too_long = 0
    most = max_tokens - answer_tokens
    for example in examples:
        turns, reference = example.record["messages"], None
        if turns[-1]["role"] == "assistant":
            turns, reference = turns[:-1], turns[-1]["content"]
        try:
            ids = prompt_tokens(turns, tokenizer, Rendering.of(settings), most + 1)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{example.where or example.source}: {error}") from error
        if len(ids) > most:
            too_long += 1
            continue
        prompts.append(tuple(ids))
        rows.append({**example.record["row"], "messages": turns, "reference": reference})
        if reference is not None:
            answered.append(replace(example, row_id=str(len(prompts))))
    if not prompts:
        raise InputError(
            f"none of {len(examples)} prompts leaves room for {answer_tokens} tokens of answer "
            f"within {max_tokens}; lower max_tokens, or raise max_seq_length"
        )
    references = []
    if answered:
        encoded = encode_examples(answered, tokenizer, settings, max_tokens)
        references = [last_answer(row) for row in encoded.rows]
    return EncodedPrompts(prompts, rows, references, too_long)

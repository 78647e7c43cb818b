"""mlx-lm's generation: greedy, streamed, in batches, with caches."""

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.data.chat import prompt_tokens
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import NonFiniteModelError

# Answers whose tokens are computed together.
GENERATED_AT_ONCE = 8


def generate(
    model: nn.Module,
    tokenizer: Any,
    messages: list[dict[str, str]],
    max_tokens: int = 32,
    rendering: Rendering = PLAIN,
) -> str:
    """The greedy reply to a chat, without the end mark. Raises: NonFiniteModelError."""
    prompt = prompt_tokens(messages, tokenizer, rendering)
    return "".join(step.text for step in _stream(model, tokenizer, prompt, max_tokens=max_tokens))


def generate_all(
    model: nn.Module,
    tokenizer: Any,
    chats: Sequence[list[dict[str, str]]],
    max_tokens: int = 32,
    rendering: Rendering = PLAIN,
) -> list[str]:
    """`generate` of each chat, several at once. Raises: NonFiniteModelError.

    Law: the same texts, but where rounding decides between two next tokens.
    """
    from mlx_lm import batch_generate

    prompts = [list(prompt_tokens(chat, tokenizer, rendering)) for chat in chats]
    replies = batch_generate(
        model, tokenizer, prompts, max_tokens=max_tokens, return_logprobs=True,
        completion_batch_size=GENERATED_AT_ONCE, prefill_batch_size=GENERATED_AT_ONCE,
    )  # fmt: skip
    for log_p in replies.logprobs:
        if not np.isfinite(log_p).all():
            raise NonFiniteModelError("the log probability of a token")
    texts: list[str] = replies.texts
    return texts


def greedy_tokens(
    model: nn.Module, tokenizer: Any, prompt: Sequence[int], max_tokens: int
) -> list[int]:
    """The greedy reply to a prompt, with its end mark. Raises: NonFiniteModelError."""
    steps = _stream(model, tokenizer, mx.array(prompt), max_tokens=max_tokens)
    return [int(step.token) for step in steps]


def make_prompt_cache(model: nn.Module) -> list[Any]:
    """An empty cache of mlx-lm for one sequence: an entry a layer, of the kind the layer needs."""
    from mlx_lm.models.cache import make_prompt_cache as make

    return make(model)


def stream_tokens(
    model: nn.Module,
    tokenizer: Any,
    last_token: int,
    cache: list[Any],
    max_tokens: int,
    sampler: Callable[[mx.array], mx.array],
    processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
) -> Generator[tuple[str, int, str | None], None, None]:
    """What a model says after `cache` and `last_token`: (text, token, reason) a token.

    sampler: log probabilities (1, V) -> token (1,). processors: (tokens since and with last_token,
        logits (1, V)) -> logits. reason: "stop" at an end mark (whose text is empty), "length" at
        max_tokens, None before.
    Law: at each yield the cache holds last_token and every token yielded so far, this one included;
        so mlx-lm's `generate_step` has it, which is a step ahead.
    Raises: NonFiniteModelError.
    """
    # The default stream: mlx-lm's own one is a second thread on a CPU, and nothing else runs here.
    steps = _stream(
        model, tokenizer, mx.array([last_token]), max_tokens=max_tokens,
        stream=mx.default_stream(mx.default_device()), sampler=sampler,
        logits_processors=list(processors), prompt_cache=cache,
    )  # fmt: skip
    for step in steps:
        yield step.text, int(step.token), step.finish_reason


def _stream(model: nn.Module, tokenizer: Any, prompt: Any, **options: Any) -> Iterator[Any]:
    """mlx-lm's `stream_generate`. Raises: NonFiniteModelError."""
    from mlx_lm import stream_generate

    number, is_nan = 0, mx.array(False)
    for step in stream_generate(model, tokenizer, prompt, **options):
        # Of the token before: to wait for this one's would be to wait for mlx-lm's next step, too.
        _refuse_nan(number, is_nan)
        number, is_nan = step.generation_tokens, mx.isnan(step.logprobs[step.token])
        mx.async_eval(is_nan)
        yield step
    _refuse_nan(number, is_nan)


def _refuse_nan(number: int, is_nan: mx.array) -> None:
    """NaN among the logits makes every log probability NaN, Inf its own, which is then chosen."""
    if is_nan.item():
        raise NonFiniteModelError(f"the log probability of token {number}")


def batch_generator(
    model: Callable[..., mx.array], end_tokens: Sequence[int], rows: int, prefill_tokens: int
) -> Any:
    """mlx-lm's `BatchGenerator`, of at most so many rows at once, each greedy unless it has its own
    sampler.

    model: called as `model(tokens (B, T), cache=entries)`, the entries those that rows came with,
        batched. prefill_tokens: of a prompt, between two tokens of the others.
    """
    from mlx_lm.generate import BatchGenerator

    # The default stream, as in `stream_tokens`.
    return BatchGenerator(
        model, stop_tokens=[[token] for token in end_tokens], completion_batch_size=rows,
        prefill_batch_size=min(8, rows), prefill_step_size=prefill_tokens,
        stream=mx.default_stream(mx.default_device()),
    )  # fmt: skip


def prefix_cache(sequences: int) -> Any:
    """mlx-lm's `LRUPromptCache`: caches of prompts by (key, tokens), for prompts that go on."""
    from mlx_lm.models.cache import LRUPromptCache

    return LRUPromptCache(max_size=sequences)


def prefix_entries(cache: Any) -> list[tuple[Any, Sequence[int], list[Any], str]]:
    """What a `prefix_cache` holds: (key, tokens, caches, kind)."""
    return [
        (key, tokens, cache._trie.get(key, tokens).prompt_cache, kind)
        for kind, used in cache._lru._lrus.items()
        for key, tokens in used
    ]


def save_prompt_cache(path: Path, entries: list[Any], about: str) -> None:
    """Write caches of a prompt, with a text about them. Raises: RuntimeError: MLX cannot."""
    from mlx_lm.models.cache import save_prompt_cache

    save_prompt_cache(str(path), entries, {"about": about})


def load_prompt_cache(path: Path) -> tuple[list[Any], str]:
    """What `save_prompt_cache` wrote, evaluated.

    Raises: RuntimeError, ValueError, LookupError or TypeError: it is something else, or damaged.
    """
    from mlx_lm.models.cache import load_prompt_cache

    entries, metadata = load_prompt_cache(str(path), return_metadata=True)
    mx.eval([entry.state for entry in entries])
    return entries, metadata["about"]


def text_machine(tokenizer: Any) -> Any:
    """mlx-lm's `TextStateMachine`: text of an answer by state: normal, reasoning or tool."""
    from mlx_lm.generate import make_text_state_machine

    return make_text_state_machine(tokenizer)


def penalties(
    repetition: float, presence: float, frequency: float
) -> list[Callable[[mx.array, mx.array], mx.array]]:
    """mlx-lm's processors over the last 20 tokens: (tokens so far, logits (1, V)) -> logits. None
    for a repetition of 1 and for zeros.
    """
    from mlx_lm.sample_utils import make_logits_processors

    processors: list[Callable[[mx.array, mx.array], mx.array]] = make_logits_processors(
        repetition_penalty=repetition if repetition != 1 else None, presence_penalty=presence,
        frequency_penalty=frequency,
    )  # fmt: skip
    return processors


def repetition_penalty(
    penalty: float, tokens: int = 20
) -> Callable[[mx.array, mx.array], mx.array]:
    """mlx-lm's processor: logits of the last so many tokens are divided by the penalty (multiplied
    where negative).
    """
    from mlx_lm.sample_utils import make_repetition_penalty

    return make_repetition_penalty(penalty, tokens)

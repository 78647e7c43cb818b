"""An arm as a model class of lm-evaluation-harness. Imports lm_eval, which takes seconds and is in
the extra `eval`: import this file only where the harness is used.
"""

from collections.abc import Mapping
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mlxstacks.data.chat import open_chat
from mlxstacks.errors import InputError
from mlxstacks.studies.benchmarks.arms import ModelArm

_GREEDY = {"until", "max_gen_toks", "max_new_tokens", "max_tokens", "do_sample", "temperature",
           "top_p", "top_k"}  # fmt: skip
# Allowed at the value that changes nothing.
_AT_ONE = {"num_beams": 1}
DEFAULT_TOKENS = 256
# Where neither the settings nor the model say how long a text may be.
DEFAULT_CONTEXT = 2048


class ArmModel(TemplateLM):
    """wants_greedy: whether loglikelihoods say if greedy decoding would agree, which takes
    another pass; False where no metric asks. scores_answers: prompts are followed by answers that
    are known, not by generation.
    """

    def __init__(self, arm: ModelArm, domains: Mapping[str, str]) -> None:
        super().__init__()
        self.arm, self.tokenizer, self.domains = arm, arm.tokenizer, dict(domains)
        self.wants_greedy = True
        self.scores_answers = False
        self._labels: list[str | None] = []

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        first = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", "tokenizer")).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return getattr(self.tokenizer, "chat_template", None)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The template's text; its own special tokens are marked, so that `tok_encode` can tell
        them from those that stand in an item.
        """
        rendering = self.arm.prompts.rendering
        if self.scores_answers:
            rendering = rendering.before_answer()
        chat = open_chat(chat_history, self.tokenizer, rendering)
        text = chat.render(
            None, rendering.enable_thinking, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip
        return text if rendering.allow_special else self.arm.prompts.signed.signed(text, chat.mark)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        begin = getattr(self.tokenizer, "bos_token", None)
        if add_special_tokens is None:
            text = self.arm.prompts.signed.unsigned(string)
            add_special_tokens = not (begin and text.startswith(begin))
        if add_special_tokens:
            return list(self.arm.prompts.text(string))
        return self.arm.prompts.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        context = self.arm.prompts.end_of(context)
        before, after = super()._encode_pair(context, continuation)
        if not after:  # joined, the two have no more tokens than the context alone
            after = self.tok_encode(continuation, add_special_tokens=False)
        return before, after

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        self._labels = [self.domains.get(request.task_name) for request in requests]
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return scores

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(tuple(before), tuple(after)) for _, before, after in requests]
        prompts = [
            (texts[0], label) for (texts, _, _), label in zip(requests, self._labels, strict=True)
        ]
        return list(zip(*self.arm.score_tokens(pairs, prompts, self.wants_greedy), strict=True))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Sums over whole texts; no text before them, so nothing to route on: the base."""
        most = (self.arm.settings.max_context_tokens or self.arm.limit or DEFAULT_CONTEXT) - 1
        pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.arm.prompts.encode(request.args[0])
            windows = get_rolling_token_windows(
                token_list=tokens, prefix_token=self.prefix_token_id, max_seq_len=most,
                context_len=1,
            )  # fmt: skip
            for window in map(make_disjoint_window, windows):
                pairs.append((tuple(window[0]), tuple(window[1])))
                owners.append(number)
        labels = [self.domains.get(request.task_name) for request in requests]
        sums, _ = self.arm.score_tokens(pairs, [("", labels[owner]) for owner in owners])
        totals = [0.0] * len(requests)
        for owner, value in zip(owners, sums, strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        texts: dict[int, str] = {}
        groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(greedy_settings(request.args[1]), []).append(number)
        for (max_tokens, until), numbers in groups.items():
            replies = self.arm.reply_to_texts(
                [requests[number].args[0] for number in numbers], max_tokens, until,
                [self.domains.get(requests[number].task_name) for number in numbers],
            )  # fmt: skip
            texts |= {n: reply.text for n, reply in zip(numbers, replies, strict=True)}
        return [texts[number] for number in range(len(requests))]


def greedy_settings(options: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """(most tokens, strings that end an answer). Raises: InputError: not greedy, or not known."""
    if options.get("do_sample") or (options.get("temperature") and "do_sample" not in options):
        raise InputError("the task draws its answers (do_sample); only greedy ones are given here")
    known = _GREEDY | {name for name, only in _AT_ONE.items() if options.get(name) == only}
    if strange := sorted(set(options) - known):
        raise InputError(f"generation_kwargs {', '.join(strange)}: not known here")
    asked = (options.get(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens"))
    most = next((value for value in asked if value is not None), DEFAULT_TOKENS)
    until = options.get("until") or ()
    return int(most), (until,) if isinstance(until, str) else tuple(until)

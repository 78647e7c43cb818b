"""The suite put to a loaded model: a greedy reply to each prompt, judged at once."""

from collections.abc import Mapping, Sequence

from mlxstacks import base_model
from mlxstacks.data import Rendering
from mlxstacks.errors import InputError
from mlxstacks.studies.confound.answers import Answer
from mlxstacks.studies.confound.items import Item
from mlxstacks.studies.confound.scoring import Arm
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.identity.settings import IdentitySettings
from mlxstacks.studies.identity.suite import FAILS, PASSES, Suite, SuitePrompt

Prompts = Mapping[str, SuitePrompt]


def item_settings(settings: IdentitySettings) -> ConfoundSettings:
    """How items are answered, in the terms of `mlxstacks confound`, whose code does it."""
    return ConfoundSettings(
        scoring=settings.scoring,
        normalisation=settings.normalisation,
        max_tokens=settings.max_tokens,
        thinking=settings.thinking,
        allow_special=settings.allow_special,
        train=settings.train,
    )


def ask(arm: Arm, items: Sequence[Item], prompts: Prompts) -> list[Answer]:
    """A reply to each prompt, greedy, so the same each time."""
    return [_judged(prompts[item.item_id], _reply(arm, item.question)) for item in items]


def _reply(arm: Arm, prompt: str) -> str:
    chat = [{"role": "user", "content": prompt}]
    rendering = Rendering.of(arm.settings)
    return base_model.generate(arm.model, arm.tokenizer, chat, arm.settings.max_tokens, rendering)


def _judged(prompt: SuitePrompt, reply: str) -> Answer:
    verdict = prompt.verdict(reply)
    return Answer(
        prompt.prompt_id, prompt.category, PASSES, PASSES if verdict.passed else FAILS,
        verdict.reason, 2, reply,
    )  # fmt: skip


def check_verdicts(arm: str, answers: Sequence[Answer], suite: Suite) -> None:
    """Raises: InputError where a verdict that was written down is not that of its reply."""
    prompts = {one.prompt_id: one for one in suite}
    for one in answers:
        if _judged(prompts[one.item_id], one.text) != one:
            raise InputError(
                f"{arm}: the verdict on prompt {one.item_id} ({one.rule!r:.60}) is not what the "
                "rules say of its reply; --no-resume asks again"
            )

"""Row formats: what the keys of a data set's rows mean (spec of the published method, section 4).

A reader turns a row into one of the forms of `mlxstacks.data.examples`: {text}, {prompt, input,
answer} or {messages, tools}. It raises InputError where keys or kinds do not fit; where a value is
empty it returns the empty value, and the row is dropped and counted. What a format leaves out of a
row is counted too; what it takes keeps every character.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxstacks.data.conversations import CONVERSATION_KEYS, conversation, first_pair
from mlxstacks.data.options import ANSWER_KEYS, OPTION_KEYS, answer_of, options_of
from mlxstacks.errors import InputError

Raw = Mapping[str, Any]
Record = dict[str, Any]
# Of a PubMedQA abstract so much becomes the input.
CONTEXT_CHARACTERS = 300
FALLBACK_TEXT_CHARACTERS = 20

ALPACA_PROMPT = ("instruction", "prompt", "question")
ALPACA_ANSWER = ("output", "response", "answer")
CONTEXT = ("input", "context", "passage", "article")
QUESTION = ("question", "query", "question_stem")


@dataclass(frozen=True, slots=True)
class Reading:
    """record: one of the three forms. passage: the text that the row asks about, if it has one;
    other rows may share it. changes: what was left out of the row, as reports count it.
    """

    record: Record
    passage: str = ""
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Format:
    """needs: of each group a row has at least one key. excludes: keys that say it is another
    format. automatic: whether keys alone can choose it. short_answers: a short answer is whole, as
    "yes" is; own: a form of ours, in which a row only must not be empty.
    """

    read: Callable[[Raw], Reading]
    needs: tuple[tuple[str, ...], ...]
    excludes: tuple[str, ...] = ()
    automatic: bool = True
    short_answers: bool = False
    own: bool = False

    def fits(self, keys: frozenset[str]) -> bool:
        needed = all(keys.intersection(group) for group in self.needs)
        return needed and not keys.intersection(self.excludes)

    def describe(self) -> str:
        return ", ".join(" or ".join(group) for group in self.needs)


def text_of(record: Raw, *keys: str) -> str:
    """The first value among the keys that is not blank, as text; "" if all are.

    Raises: InputError: none of the keys is there, or the value is neither text nor a number.
    """
    for key in keys:
        value = record.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{key} is {type(value).__name__}, must be text")
        if value and value.strip():
            return value
    if not any(key in record for key in keys):
        raise InputError(f"the row has no {' or '.join(keys)}, but the keys {sorted(record)}")
    return ""


def pair(
    prompt: str,
    answer: str,
    passage: str = "",
    *,
    context: str | None = None,
    changes: tuple[str, ...] = (),
) -> Reading:
    """context: what stands below the prompt; default: the passage."""
    context = passage if context is None else context
    below = {"input": context} if context.strip() else {}
    return Reading({"prompt": prompt, **below, "answer": answer}, passage, changes)


def _text(record: Raw) -> Reading:
    if "text" in record and not isinstance(record["text"], str):
        raise InputError(f"text is {type(record['text']).__name__}, must be text")
    return Reading({"text": text_of(record, "text")})


def _prompt_completion(record: Raw) -> Reading:
    prompt, answer = text_of(record, "prompt"), text_of(record, "completion", "answer")
    if not record.get("tools"):
        return pair(prompt, answer)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Reading({"messages": turns, "tools": record["tools"]})


def _chat(record: Raw) -> Reading:
    turns = conversation(record)
    if not turns:
        return pair("", "")
    plain = all(turn.keys() <= {"role", "content"} for turn in turns)
    if plain and not record.get("tools") and [t["role"] for t in turns] == ["user", "assistant"]:
        return pair(turns[0]["content"], turns[1]["content"])
    tools = {"tools": record["tools"]} if record.get("tools") else {}
    return Reading({"messages": turns, **tools})


def _alpaca(record: Raw) -> Reading:
    context = text_of(record, *CONTEXT) if _has(record, *CONTEXT) else ""
    return pair(text_of(record, *ALPACA_PROMPT), text_of(record, *ALPACA_ANSWER), context)


def _gsm8k(record: Raw) -> Reading:
    return pair(text_of(record, "question"), text_of(record, "answer"))


def _first_pair(turns: list[Any]) -> Reading:
    prompt, answer = first_pair(turns)
    return pair(prompt, answer, changes=("turns_left_out",) if len(turns) > 2 else ())


def _messages(record: Raw) -> Reading:
    return _first_pair(conversation(record))


def _ultrafeedback(record: Raw) -> Reading:
    return _first_pair(conversation(record, ("chosen",)))


def _opencodereasoning(record: Raw) -> Reading:
    return pair(text_of(record, "input"), text_of(record, "solution", "output"))


def _openmath(record: Raw) -> Reading:
    answer = text_of(record, "generated_solution", "solution", "answer")
    return pair(text_of(record, "problem"), answer)


def _numina(record: Raw) -> Reading:
    problem = text_of(record, "problem")
    solution = text_of(record, "solution") if "solution" in record else ""
    if not solution and _has(record, "messages"):
        solution = first_pair(conversation(record))[1]
    elif "solution" not in record:
        raise InputError(f"the row has no solution or messages, but the keys {sorted(record)}")
    return pair(problem, solution)


def _multiple_choice(record: Raw) -> Reading:
    """Options become the input, below a context if there is one (LogiQA has it)."""
    question = text_of(record, *QUESTION)
    options = options_of(next((record[key] for key in OPTION_KEYS if _has(record, key)), None))
    passage = text_of(record, *CONTEXT) if _has(record, *CONTEXT) else ""
    context = "\n\n".join(filter(None, (passage, options.listed())))
    answer = text_of(record, "explanation") if _has(record, "explanation") else ""
    if not answer and (key := answer_of(record, options)):
        answer = f"The answer is {key}. {options.texts[key]}"
    return pair(question, answer, passage, context=context)


def _medical_reasoning(record: Raw) -> Reading:
    whole = answer = ""
    for key in ("Response", "Complex_CoT"):
        if not answer and _has(record, key):
            whole = text_of(record, key)
            answer = without_thoughts(whole)
    changes = ("thoughts_removed",) if answer != whole else ()
    return pair(text_of(record, "Question"), answer, changes=changes)


def _pubmedqa(record: Raw) -> Reading:
    context = record.get("context")
    if isinstance(context, dict):  # the Hugging Face form: {"contexts": [paragraphs], ...}
        context = context.get("contexts")
    if isinstance(context, list):
        context = "\n".join(map(str, context))
    if context is not None and not isinstance(context, str):
        raise InputError(f"context is {type(context).__name__}, must be text")
    passage = context or ""
    shown = passage[:CONTEXT_CHARACTERS]
    return pair(
        text_of(record, "question"), text_of(record, "long_answer", "final_decision"), passage,
        context=shown, changes=("context_cut",) if shown != passage else (),
    )  # fmt: skip


def _fallback(record: Raw) -> Reading:
    if _has(record, *CONVERSATION_KEYS):
        return _messages(record)
    text = text_of(record, "text")
    return Reading({"text": text if len(text) > FALLBACK_TEXT_CHARACTERS else ""})


def _has(record: Raw, *keys: str) -> bool:
    return any(record.get(key) is not None for key in keys)


# With the line breaks behind it: what follows keeps its indentation.
_THOUGHT = re.compile(r"<think>.*?</think>[ \t]*[\r\n]*", re.IGNORECASE | re.DOTALL)
# A block whose begin stands in the prompt, or whose end was never written.
_HALF = re.compile(r"^.*</think>[ \t]*[\r\n]*|<think>.*$", re.IGNORECASE | re.DOTALL)


def without_thoughts(text: str) -> str:
    """Law: no think tag is left; a text without one stays the same."""
    return _HALF.sub("", _THOUGHT.sub("", text))


_CONVERSATION = (CONVERSATION_KEYS,)
_PAIRS = Format(_messages, _CONVERSATION, automatic=False)
_MATH = (("problem",), ("generated_solution", "solution", "answer"))
_NOT_PLAIN = (*OPTION_KEYS, "long_answer", "final_decision")
_CHOICES = (QUESTION, OPTION_KEYS, (*ANSWER_KEYS[0], *ANSWER_KEYS[1], "explanation"))
# Where a row reads the same in several formats it counts as the first: ours, then the narrower one.
FORMATS: dict[str, Format] = {
    "text": Format(_text, (("text",),), own=True),
    "prompt_completion": Format(
        _prompt_completion,
        (("prompt",), ("completion", "answer")),
        excludes=(*CONTEXT, *OPTION_KEYS),
        own=True,
    ),
    "chat": Format(_chat, _CONVERSATION, own=True),
    "gsm8k": Format(_gsm8k, (("question",), ("answer",)), excludes=(*_NOT_PLAIN, *CONTEXT)),
    "alpaca": Format(_alpaca, (ALPACA_PROMPT, ALPACA_ANSWER), excludes=_NOT_PLAIN),
    "messages": _PAIRS,
    "nemotron_v2": _PAIRS,
    "openassistant": _PAIRS,
    "openthoughts": _PAIRS,
    "sky_t1": _PAIRS,
    "ultrafeedback_sft": Format(_ultrafeedback, (("chosen",),)),
    "opencodereasoning": Format(
        _opencodereasoning, (("input",), ("solution", "output")), excludes=ALPACA_PROMPT
    ),
    "openmath_cot": Format(_openmath, _MATH),
    "openmath_tool": Format(_openmath, _MATH, automatic=False),
    "numina_cot": Format(_numina, (("problem",), ("solution", "messages"))),
    "multiple_choice": Format(_multiple_choice, _CHOICES),
    "medqa": Format(_multiple_choice, _CHOICES, automatic=False),
    "medical_reasoning": Format(_medical_reasoning, (("Question",), ("Response", "Complex_CoT"))),
    "pubmedqa": Format(
        _pubmedqa, (("question",), ("long_answer", "final_decision")), short_answers=True
    ),
    "fallback": Format(_fallback, ((*CONVERSATION_KEYS, "text"),), automatic=False),
}

"""Row formats: what the keys of a data set's rows mean (spec of the published method, section 4).

A reader turns a row into one of the forms of `mlxstacks.data.examples`: {text}, {prompt, input,
answer} or {messages, tools}. It raises InputError where keys or kinds do not fit; where a value is
empty it returns the empty value, and the row is dropped and counted.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxstacks.data.conversations import CONVERSATION_KEYS, conversation, first_pair
from mlxstacks.data.options import answer_of, listed, options_of
from mlxstacks.errors import InputError

Raw = Mapping[str, Any]
Record = dict[str, Any]
# Of a PubMedQA abstract so much becomes the input.
CONTEXT_CHARACTERS = 300
FALLBACK_TEXT_CHARACTERS = 20

ALPACA_PROMPT = ("instruction", "prompt", "question")
ALPACA_ANSWER = ("output", "response", "answer")


@dataclass(frozen=True, slots=True)
class Format:
    """needs: of each group a row has at least one key. excludes: keys that say it is another
    format. automatic: whether keys alone can choose it. short_answers: a short answer is whole, as
    "yes" is; own: a form of ours, in which a row only must not be empty.
    """

    read: Callable[[Raw], Record]
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


def pair(prompt: str, answer: str, context: str = "") -> Record:
    return {"prompt": prompt, **({"input": context} if context.strip() else {}), "answer": answer}


def _text(record: Raw) -> Record:
    if "text" in record and not isinstance(record["text"], str):
        raise InputError(f"text is {type(record['text']).__name__}, must be text")
    return {"text": text_of(record, "text")}


def _prompt_completion(record: Raw) -> Record:
    return pair(text_of(record, "prompt"), text_of(record, "completion", "answer"))


def _chat(record: Raw) -> Record:
    turns = conversation(record)
    if not turns:
        return pair("", "")
    plain = all(turn.keys() <= {"role", "content"} for turn in turns)
    if plain and not record.get("tools") and [t["role"] for t in turns] == ["user", "assistant"]:
        return pair(turns[0]["content"], turns[1]["content"])
    return {"messages": turns, **({"tools": record["tools"]} if record.get("tools") else {})}


def _alpaca(record: Raw) -> Record:
    context = text_of(record, "input", "context") if _has(record, "input", "context") else ""
    return pair(text_of(record, *ALPACA_PROMPT), text_of(record, *ALPACA_ANSWER), context)


def _gsm8k(record: Raw) -> Record:
    return pair(text_of(record, "question"), text_of(record, "answer"))


def _messages(record: Raw) -> Record:
    return pair(*first_pair(conversation(record)))


def _ultrafeedback(record: Raw) -> Record:
    return pair(*first_pair(conversation(record, ("chosen",))))


def _opencodereasoning(record: Raw) -> Record:
    return pair(text_of(record, "input"), text_of(record, "solution", "output"))


def _openmath(record: Raw) -> Record:
    answer = text_of(record, "generated_solution", "solution", "answer")
    return pair(text_of(record, "problem"), answer)


def _numina(record: Raw) -> Record:
    problem = text_of(record, "problem")
    solution = text_of(record, "solution") if "solution" in record else ""
    if not solution and _has(record, "messages"):
        solution = first_pair(conversation(record))[1]
    elif "solution" not in record:
        raise InputError(f"the row has no solution or messages, but the keys {sorted(record)}")
    return pair(problem, solution)


def _medqa(record: Raw) -> Record:
    """Options become the input, below a context if there is one (LogiQA has it)."""
    question, options = text_of(record, "question"), options_of(record.get("options"))
    context = text_of(record, "context") if _has(record, "context") else ""
    shown = "\n\n".join(filter(None, (context.strip(), listed(options))))
    if _has(record, "explanation"):
        answer = text_of(record, "explanation")
        if answer:
            return pair(question, answer, shown)
    letter = answer_of(record, options)
    answer = f"The answer is {letter}. {options[letter]}" if letter else ""
    return pair(question, answer, shown)


def _medical_reasoning(record: Raw) -> Record:
    answer = without_thoughts(text_of(record, "Response")) if _has(record, "Response") else ""
    if not answer:
        answer = without_thoughts(text_of(record, "Complex_CoT", "Response"))
    return pair(text_of(record, "Question"), answer)


def _pubmedqa(record: Raw) -> Record:
    context = record.get("context")
    if isinstance(context, dict):  # the Hugging Face form: {"contexts": [paragraphs], ...}
        context = context.get("contexts")
    if isinstance(context, list):
        context = "\n".join(map(str, context))
    if context is not None and not isinstance(context, str):
        raise InputError(f"context is {type(context).__name__}, must be text")
    answer = text_of(record, "long_answer", "final_decision")
    return pair(text_of(record, "question"), answer, (context or "")[:CONTEXT_CHARACTERS])


def _fallback(record: Raw) -> Record:
    if _has(record, *CONVERSATION_KEYS):
        return _messages(record)
    text = text_of(record, "text")
    return {"text": text if len(text) > FALLBACK_TEXT_CHARACTERS else ""}


def _has(record: Raw, *keys: str) -> bool:
    return any(record.get(key) is not None for key in keys)


_THOUGHT = re.compile(r"<think>.*?</think>", re.IGNORECASE | re.DOTALL)
# A block whose begin stands in the prompt, or whose end was never written.
_HALF = re.compile(r"^.*</think>|<think>.*$", re.IGNORECASE | re.DOTALL)


def without_thoughts(text: str) -> str:
    """Law: no think tag is left."""
    return _HALF.sub("", _THOUGHT.sub("", text)).strip()


_CONVERSATION = (CONVERSATION_KEYS,)
_PAIRS = Format(_messages, _CONVERSATION, automatic=False)
_MATH = (("problem",), ("generated_solution", "solution", "answer"))
# Where a row reads the same in several formats it counts as the first: ours, then the narrower one.
FORMATS: dict[str, Format] = {
    "text": Format(_text, (("text",),), own=True),
    "prompt_completion": Format(
        _prompt_completion,
        (("prompt",), ("completion", "answer")),
        excludes=("input", "context", "options"),
        own=True,
    ),
    "chat": Format(_chat, _CONVERSATION, own=True),
    "gsm8k": Format(
        _gsm8k,
        (("question",), ("answer",)),
        excludes=("options", "long_answer", "final_decision", "input", "context"),
    ),
    "alpaca": Format(
        _alpaca,
        (ALPACA_PROMPT, ALPACA_ANSWER),
        excludes=("options", "long_answer", "final_decision"),
    ),
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
    "medqa": Format(
        _medqa,
        (("question",), ("options",), ("answer", "answer_idx", "answer_index", "explanation")),
    ),
    "medical_reasoning": Format(_medical_reasoning, (("Question",), ("Response", "Complex_CoT"))),
    "pubmedqa": Format(
        _pubmedqa, (("question",), ("long_answer", "final_decision")), short_answers=True
    ),
    "fallback": Format(_fallback, ((*CONVERSATION_KEYS, "text"),), automatic=False),
}

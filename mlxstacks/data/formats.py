"""Row formats: what the keys of a data set's rows mean (spec of the published method, section 4),
and which format a row has: named in the settings, or found by its keys.

A reader turns a row into one of the forms of `mlxstacks.data.examples`: {text}, {prompt, input,
answer} or {messages, tools}. It raises InputError where keys or kinds do not fit; where a value is
empty it returns the empty value, and the row is dropped and counted. What a format leaves out of a
row is counted too; what it takes keeps every character.
"""

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxstacks.data.examples import (
    CONVERSATION_KEYS,
    conversation,
    first_pair,
    row_id_of,
    turns_of,
)
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
OPTION_KEYS = ("options", "choices")
# Names for the key of the right option; the second row only where none of the first is there.
ANSWER_KEYS = (("answer_idx", "answer_index", "answerKey", "answer"), ("gold", "label"))
# Of a prompt with a reward.
REFERENCE = ("answer", "completion", "reference", "solution")
# What test sets without answers have in their place.
_NO_ANSWER = (None, "", -1)


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


@dataclass(frozen=True, slots=True)
class Options:
    """texts: key -> text, in order. lettered: the row had no keys, so these are A, B, C, ..."""

    texts: dict[str, str]
    lettered: bool

    def listed(self) -> str:
        return "\n".join(f"{key}. {text}" for key, text in self.texts.items())


def options_of(value: Any) -> Options:
    """From {key: text}, [texts], [{key or label, value or text}] or {text: [...], label: [...]}.

    Raises: InputError: anything else, an option that is no text, or a key that occurs twice.
    """
    keys: list[Any] = list(string.ascii_uppercase)
    lettered = False
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        keys, texts = value.get("label") or [], value["text"]
    elif isinstance(value, Mapping):
        # A column of structs has the keys of every row, without a text where a row has fewer.
        keys = [key for key, text in value.items() if text is not None]
        texts = [value[key] for key in keys]
    elif isinstance(value, list) and value and all(isinstance(o, Mapping) for o in value):
        keys = [o.get("key", o.get("label")) for o in value]
        texts = [o.get("value", o.get("text")) for o in value]
    elif isinstance(value, list) and len(value) <= len(keys):
        lettered, texts = True, value
        keys = keys[: len(value)]
    else:
        raise InputError(f"options is {type(value).__name__}, must be letters with texts or a list")
    if not texts or not all(isinstance(text, str | int | float) for text in texts):
        raise InputError("options must hold at least one text, and nothing but texts")
    keys = [str(key).strip() for key in keys]
    if len(keys) != len(texts) or len({key.upper() for key in keys}) < len(texts):
        raise InputError(f"options has {len(texts)} texts and the keys {keys}: each needs its own")
    return Options({key: str(text) for key, text in zip(keys, texts, strict=True)}, lettered)


def answer_of(record: Mapping[str, Any], options: Options) -> str | None:
    """The key of the right option; None where no answer key names one.

    An answer is a key, the text of an option or, as a number where no key is one, a place counted
    from 0. Keys that the row has win over places and texts.

    Raises: InputError: an answer that can mean two options, answers that disagree, or a number that
        names none.
    """
    given: dict[str, tuple[set[str], set[str]]] = {}
    for names in ANSWER_KEYS:
        values = {name: record[name] for name in names if record.get(name) not in _NO_ANSWER}
        given = {name: _named(name, value, options) for name, value in values.items()}
        if given:
            break
    named = [(keys, keys | texts) for keys, texts in given.values() if keys | texts]
    if not named:
        return None
    right = set.intersection(*(either for _, either in named))
    if len(right) > 1 and not options.lettered:
        right = right.intersection(*(keys for keys, _ in named if keys))
    if len(right) != 1:
        shown = ", ".join(f"{name} {record[name]!r}" for name in given)
        both = " and ".join(sorted({key for _, either in named for key in either}))
        raise InputError(f"{shown} can mean the options {both}; say which with one key of them")
    return right.pop()


def _named(name: str, value: Any, options: Options) -> tuple[set[str], set[str]]:
    """The options that one answer names by their key or place, and by their text."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{name} is {type(value).__name__}, must be a key, a text or a place")
    plain = str(value).strip()
    by_text = {key for key, text in options.texts.items() if text.strip() == plain}
    by_key = {key for key in options.texts if key.upper() == plain.strip("().").upper()}
    keys_are_numbers = any(key.isdecimal() for key in options.texts)
    if isinstance(value, int) and not keys_are_numbers and 0 <= value < len(options.texts):
        return {list(options.texts)[value]}, set()
    if not by_key | by_text and (isinstance(value, int) or plain.isdecimal()):
        raise InputError(
            f"{name} {value!r} is no key, no place counted from 0 and no text of the options "
            f"{', '.join(options.texts)}; give the key"
        )
    return by_key, by_text


def _text(record: Raw) -> Reading:
    if "text" in record and not isinstance(record["text"], str):
        raise InputError(f"text is {type(record['text']).__name__}, must be text")
    changes = ("prompt_left_out",) if _has(record, "prompt") else ()
    return Reading({"text": text_of(record, "text")}, changes=changes)


def _prompt_completion(record: Raw) -> Reading:
    prompt, answer = text_of(record, "prompt"), text_of(record, "completion", "answer")
    changes = {
        "text_left_out": _has(record, "text"),
        "with_a_number_as_completion": isinstance(record.get("completion"), int | float),
    }
    changed = tuple(filter(changes.get, changes))
    if not record.get("tools"):
        return pair(prompt, answer, changes=changed)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Reading({"messages": turns, "tools": record["tools"]}, changes=changed)


def _chat(record: Raw) -> Reading:
    turns = conversation(record)
    if not turns:
        return pair("", "")
    plain = all(turn.keys() <= {"role", "content"} for turn in turns)
    if plain and not record.get("tools") and [t["role"] for t in turns] == ["user", "assistant"]:
        return pair(turns[0]["content"], turns[1]["content"])
    tools = {"tools": record["tools"]} if record.get("tools") else {}
    return Reading({"messages": turns, **tools})


def _first_pair(record: Raw, keys: tuple[str, ...] = CONVERSATION_KEYS) -> Reading:
    turns = conversation(record, keys)
    return pair(*first_pair(turns), changes=("turns_left_out",) if len(turns) > 2 else ())


def _pairs(
    prompt: tuple[str, ...],
    answer: tuple[str, ...],
    context: tuple[str, ...] = (),
    excludes: tuple[str, ...] = (),
    automatic: bool = True,
) -> Format:
    """A format whose rows have one of each group of keys; the context is what they ask about."""

    def read(record: Raw) -> Reading:
        passage = text_of(record, *context) if _has(record, *context) else ""
        return pair(text_of(record, *prompt), text_of(record, *answer), passage)

    return Format(read, (prompt, answer), excludes, automatic)


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


def _preference(record: Raw) -> Reading:
    """A chosen and a rejected answer, as TRL and UltraFeedback have them: texts below a prompt, the
    answers' messages below a prompt of messages, or whole conversations that differ in the last.
    """
    kinds = {isinstance(record.get(key), list) for key in ("chosen", "rejected")}
    if kinds == {True, False}:
        raise InputError("chosen and rejected must both be texts, or both lists of messages")
    if kinds == {False}:
        chosen, rejected = text_of(record, "chosen"), text_of(record, "rejected")
        if isinstance(record.get("prompt"), list):
            turns = conversation(record, ("prompt",))
        else:
            turns = [{"role": "user", "content": text_of(record, "prompt")}]
        answers = [{"role": "assistant", "content": text} for text in (chosen, rejected)]
        return Reading({"messages": [*turns, answers[0]], "rejected": answers[1]})
    before = conversation(record, ("prompt",)) if isinstance(record.get("prompt"), list) else []
    good, bad = ([*before, *conversation(record, (key,))] for key in ("chosen", "rejected"))
    if not good or not bad or {good[-1]["role"], bad[-1]["role"]} != {"assistant"}:
        raise InputError("chosen and rejected must end with an assistant's message")
    if len(good) < 2 or good[:-1] != bad[:-1]:
        raise InputError(
            "chosen and rejected must answer one prompt: all messages but the last have to be equal"
        )
    kept = {"tools": record["tools"]} if record.get("tools") else {}
    return Reading({"messages": good, "rejected": bad[-1], **kept})


def _prompt(record: Raw) -> Reading:
    """A prompt to be answered: text, messages, or what another format makes of the row. The
    reference answer may be missing; all columns are kept for the rewards.
    """
    kept = {"row": dict(record)}
    if "prompt" not in record:
        _, reading = row_reader("auto")(record)
        turns = turns_of(reading.record)
        if turns is None or turns[-1]["role"] != "assistant":
            raise InputError("the row has no prompt with an answer, but text alone")
        return Reading({"messages": turns, **kept}, reading.passage, reading.changes)
    if isinstance(record["prompt"], list):
        turns = conversation(record, ("prompt",))
    else:
        turns = [{"role": "user", "content": text_of(record, "prompt")}]
    answer = text_of(record, *REFERENCE) if _has(record, *REFERENCE) else ""
    if not turns or turns[-1]["role"] == "assistant":
        raise InputError("prompt must end with a message to be answered")
    said = [{"role": "assistant", "content": answer}] if answer else []
    return Reading({"messages": [*turns, *said], **kept})


def _fallback(record: Raw) -> Reading:
    if _has(record, *CONVERSATION_KEYS):
        return _first_pair(record)
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
_CHATS = Format(_first_pair, _CONVERSATION, automatic=False)
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
    "gsm8k": _pairs(("question",), ("answer",), excludes=(*_NOT_PLAIN, *CONTEXT)),
    "alpaca": _pairs(ALPACA_PROMPT, ALPACA_ANSWER, CONTEXT, excludes=_NOT_PLAIN),
    **dict.fromkeys(("messages", "nemotron_v2", "openassistant", "openthoughts", "sky_t1"), _CHATS),
    "ultrafeedback_sft": Format(lambda row: _first_pair(row, ("chosen",)), (("chosen",),)),
    "opencodereasoning": _pairs(("input",), ("solution", "output"), excludes=ALPACA_PROMPT),
    "openmath_cot": _pairs(*_MATH),
    "openmath_tool": _pairs(*_MATH, automatic=False),
    "numina_cot": Format(_numina, (("problem",), ("solution", "messages"))),
    "multiple_choice": Format(_multiple_choice, _CHOICES),
    "medqa": Format(_multiple_choice, _CHOICES, automatic=False),
    "medical_reasoning": Format(_medical_reasoning, (("Question",), ("Response", "Complex_CoT"))),
    "pubmedqa": Format(
        _pubmedqa, (("question",), ("long_answer", "final_decision")), short_answers=True
    ),
    "preference": Format(_preference, (("chosen",), ("rejected",)), automatic=False, own=True),
    "prompt": Format(_prompt, (("prompt",),), automatic=False, own=True),
    "fallback": Format(_fallback, ((*CONVERSATION_KEYS, "text"),), automatic=False),
}


# (row) -> (name of its format, what it says)
RowReader = Callable[[Raw], tuple[str, Reading]]


def row_reader(name: str, first_pair_only: bool = False) -> RowReader:
    """The reader of a format, or one that goes by the keys of each row (`auto`).

    first_pair_only: a conversation is read as its first question and answer, which is all that a
    template for pairs can hold.
    """
    if name != "auto":
        read = FORMATS[name].read
        return lambda row: (name, read(row))
    formats = {name: form for name, form in FORMATS.items() if form.automatic}
    if first_pair_only:
        formats["messages"] = FORMATS["messages"]
        del formats["chat"]
    by_keys: dict[frozenset[str], list[str]] = {}

    def read_auto(row: Raw) -> tuple[str, Reading]:
        if (row.get("prompt") is None) != (row.get("completion") is None):
            half = "completion" if row.get("completion") is None else "prompt"
            if half in row:  # and not, say, the text of another column
                raise InputError(f"{half}: null; fill it in, or leave the row out")
        # A column of a table that holds nothing for this row says nothing about its format.
        keys = frozenset(key for key, value in row.items() if value is not None)
        if keys not in by_keys:
            if not any(f.fits(keys) for f in formats.values()):
                _refuse_empty(row, keys, formats)
            by_keys[keys] = _fitting(keys, formats)
        first, *others = by_keys[keys]
        reading = FORMATS[first].read(row)
        for other in others:
            record = FORMATS[other].read(row).record
            if record != reading.record and row_id_of(record) != row_id_of(reading.record):
                raise InputError(
                    f"the keys {sorted(row)} fit the formats {first} ({_short(reading.record)}) "
                    f"and {other} ({_short(record)}); say which with the source's format, as in "
                    f"data: {{sources: [{{path: ..., format: {other}}}]}}"
                )
        return first, reading

    return read_auto


def _refuse_empty(row: Raw, keys: frozenset[str], formats: dict[str, Format]) -> None:
    """Raises: InputError: with what is null in the row filled in, a format would fit."""
    empty = sorted(row.keys() - keys)
    if empty and any(form.fits(frozenset(row)) for form in formats.values()):
        raise InputError(f"{', '.join(empty)}: null; fill it in, or leave the row out")


def _fitting(keys: frozenset[str], formats: dict[str, Format]) -> list[str]:
    # As mlx-lm reads a row: other columns beside a completion say nothing about its form, and a
    # text beside a conversation is what some template made of it.
    if {"prompt", "completion"} <= keys:
        return ["prompt_completion"]
    names = [name for name, form in formats.items() if form.fits(keys)]
    if "messages" in keys and "text" in names and len(names) > 1:
        names.remove("text")
    if not names:
        known = "".join(f"\n  {name}: {form.describe()}" for name, form in formats.items())
        lower = {key: key.strip().lower() for key in sorted(keys)}
        renamed = [f"{key} to {name}" for key, name in lower.items() if key != name]
        fits = renamed and any(form.fits(frozenset(lower.values())) for form in formats.values())
        raise InputError(
            f"no format fits the keys {sorted(keys)}; "
            + (f"case counts, rename {', '.join(renamed)}; or " if fits else "")
            + f"write rows with the keys of one, such as prompt and completion. Known are{known}"
        )
    return names


def _short(record: dict[str, Any]) -> str:
    return ", ".join(f"{key} {str(value)[:30]!r}" for key, value in record.items())

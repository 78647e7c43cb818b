"""The benchmarks, as a table (Brainstacks), and a row of one as an item.

Imports neither mlx nor numpy. Which rows there are is in items.py, what an answer is worth in
analysis.py.

A reader takes one row, in the form of the hub or of the local files, and gives a `RawItem`, or
raises ValueError saying what is wrong with it; which form a row has is told by its keys.
`bench_item` puts it into words (Brainstacks): likelihood prompts are contexts as they
stand, generation prompts a user's message; candidates begin with one blank. `reference` gives what
the published script had: HellaSwag's endings without a blank, TruthfulQA's right answer first,
GSM8K under instruction and response headings (as it is asked wherever there is no chat template
around it). The script's own words for HumanEval, MATH-500, AIME and GPQA are not known; ours say
the same.
"""

import difflib
import hashlib
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from mlxstacks.errors import InputError
from mlxstacks.grading.extract import number

Kind = Literal["likelihood", "generate"]
MOST_OPTIONS = len(string.ascii_uppercase)


@dataclass(frozen=True, slots=True)
class BenchItem:
    """One item of a benchmark.

    item_id: of its own within the task. stratum: its subject, "" where the task has none.
    prompt: likelihood: the context that candidates follow; generate: the user's message.
    candidates: continuations with their leading blank; none where the answer is generated.
    letters: the same options as letters (" A", " B"), where the prompt lists them by letter.
    gold: place of the right candidate; else the right answer as text.
    domain: the domain whose stacks the item is for, None where it is not labelled.
    extra: what grading needs besides (tests and entry point of a program).
    """

    item_id: str
    prompt: str
    gold: int | str
    candidates: tuple[str, ...] = ()
    letters: tuple[str, ...] = ()
    stratum: str = ""
    domain: str | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scored:
    """Candidates of one item, scored by one arm.

    sums: log p of all tokens of each candidate, the first included (nats). tokens, characters: its
    lengths. truncated: the context was cut from the left. weights: domains that were active.
    """

    sums: tuple[float, ...]
    tokens: tuple[int, ...]
    characters: tuple[int, ...]
    truncated: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replied:
    """finish: "stop" at an end mark, "length" at max_tokens. weights: domains that were active."""

    text: str
    tokens: int
    finish: str
    truncated: bool = False
    weights: Mapping[str, float] = field(default_factory=dict)


# Contexts of candidates, then messages.
_BARE = "{question}"
_ARC_QUESTION = "Question: {question}\nAnswer:"
# Options are listed by letter, and scored by their texts.
_LETTERED = "Question: {question}\n{options}\nAnswer:"
_HUMANEVAL = (
    "Complete the Python function below. Write only the indented body of the function, without "
    "its signature and without any explanation.\n\n{question}"
)
_MATH = (
    "Solve the problem step by step. Write the final answer in \\boxed{{}}. An example: 1/3 + 1/6 "
    "is 2/6 + 1/6, which is 3/6. The answer is \\boxed{{\\frac{{1}}{{2}}}}.\n\n"
    "Problem: {question}"
)
_AIME = (
    "Solve the problem step by step. The answer is an integer from 000 to 999. Write that integer "
    "in \\boxed{{}}.\n\nProblem: {question}"
)
_GPQA = (
    "Think about the question first. Then end with one last line of the form ANSWER: LETTER, where "
    "LETTER is one of {letters}.\n\n{question}\n\n{options}"
)
_GSM8K_REFERENCE = "### Instruction:\n{question}\n\n### Response:\n"

Metric = Literal["accuracy", "pass@1"]
Grader = Literal["number", "boxed", "integer", "letter", "code"]
PUBLISHED_SHAPE = "gemma-3-12b-4bit"
PUBLISHED_MODEL = "Gemma 3 12B IT in 4-bit NF4, 512 tokens, the first 200 rows in file order"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A split of a Hugging Face data set; read from the cache, never downloaded."""

    dataset: str
    split: str
    name: str | None = None

    @property
    def label(self) -> str:
        return "/".join(filter(None, (self.dataset, self.name, self.split)))


@dataclass(frozen=True, slots=True)
class Published:
    """Scores of the paper, of `PUBLISHED_MODEL`; not measured here.

    Its released script leaves the first token of each candidate out (spec, section 4), which the
    likelihood scores among them, all but GSM8K's, may be the result of.
    """

    base: float
    routed: float
    n: int = 200


@dataclass(frozen=True, slots=True)
class Task:
    """One benchmark.

    grader: how a generated answer is judged; None under likelihood. sources: on the hub, the first
    that is in the cache is used. files: names looked for in a directory of local files, in order.
    items: of the published split. prompt: template of question, options (listed by letter) and
    letters. shuffled: the options' order is drawn by a hash of the item's id. note: what a reader
    of its score must know.
    """

    name: str
    title: str
    kind: Kind
    sources: tuple[HubSource, ...]
    files: tuple[str, ...]
    items: int | None
    prompt: str = _LETTERED
    grader: Grader | None = None
    max_tokens: int = 0
    metric: Metric = "accuracy"
    shuffled: bool = False
    published: Published | None = None
    note: str = ""


_ARC = "allenai/ai2_arc"
_ROWS = (
    Task(
        "hellaswag", "HellaSwag", "likelihood", (HubSource("Rowan/hellaswag", "validation"),),
        ("bench_hellaswag.jsonl", "hellaswag.jsonl"), 10042,
        prompt=_BARE, published=Published(0.670, 0.650),
    ),
    Task(
        "arc_easy", "ARC-Easy", "likelihood", (HubSource(_ARC, "test", "ARC-Easy"),),
        ("bench_arc_easy.jsonl", "arc_easy.jsonl"), 2376,
        prompt=_ARC_QUESTION, published=Published(0.510, 0.515),
    ),
    Task(
        "arc_challenge", "ARC-Challenge", "likelihood", (HubSource(_ARC, "test", "ARC-Challenge"),),
        ("bench_arc_challenge.jsonl", "arc_challenge.jsonl"), 1172,
        prompt=_ARC_QUESTION, published=Published(0.525, 0.495),
    ),
    Task(
        "truthfulqa_mc1", "TruthfulQA MC1", "likelihood",
        (HubSource("truthfulqa/truthful_qa", "validation", "multiple_choice"),),
        ("bench_truthfulqa.jsonl", "truthfulqa.jsonl"), 817,
        prompt="Q: {question}\nA:", shuffled=True,
        published=Published(0.350, 0.370),
        note="the right answer comes first in the data; here options are shuffled by item id",
    ),
    Task(
        "mmlu", "MMLU", "likelihood", (HubSource("cais/mmlu", "test", "all"),),
        ("bench_mmlu.jsonl", "mmlu.jsonl"), 14042,
        published=Published(0.450, 0.435),
    ),
    Task(
        "humaneval", "HumanEval", "generate", (HubSource("openai/openai_humaneval", "test"),),
        ("bench_humaneval.jsonl", "humaneval.jsonl"), 164,
        prompt=_HUMANEVAL, grader="code", max_tokens=512, metric="pass@1",
    ),
    Task(
        "gsm8k", "GSM8K", "generate", (HubSource("openai/gsm8k", "test", "main"),),
        ("bench_gsm8k.jsonl", "gsm8k_test.jsonl"), 1319,
        prompt=_BARE, grader="number", max_tokens=256,
        published=Published(0.665, 0.665),
    ),
    Task(
        "math500", "MATH-500", "generate", (HubSource("HuggingFaceH4/MATH-500", "test"),),
        ("bench_math500.jsonl", "math500.jsonl"), 500,
        prompt=_MATH, grader="boxed", max_tokens=512,
    ),
    Task(
        "aime2024", "AIME 2024", "generate", (HubSource("Maxwell-Jia/AIME_2024", "train"),),
        ("bench_aime24.jsonl", "aime2024.jsonl"), 30,
        prompt=_AIME, grader="integer", max_tokens=512,
    ),
    Task(
        "medqa", "MedQA", "likelihood", (HubSource("GBaker/MedQA-USMLE-4-options", "test"),),
        ("bench_medqa.jsonl", "medqa.jsonl"), 1273,
        published=Published(0.385, 0.350),
    ),
    Task(
        "medmcqa", "MedMCQA", "likelihood", (HubSource("openlifescienceai/medmcqa", "validation"),),
        ("bench_medmcqa.jsonl", "medmcqa.jsonl"), 4183,
        published=Published(0.330, 0.360),
    ),
    Task(
        "gpqa_diamond", "GPQA-Diamond", "generate",
        (
            HubSource("fingertap/GPQA-Diamond", "test"),
            HubSource("Idavidrein/gpqa", "train", "gpqa_diamond"),
        ),
        ("bench_gpqa_diamond.jsonl", "gpqa_diamond.jsonl"), 198,
        prompt=_GPQA, grader="letter", max_tokens=512, shuffled=True,
        note="options are shuffled by item id",
    ),
    Task(
        "mmlu_pro", "MMLU-Pro", "likelihood", (HubSource("TIGER-Lab/MMLU-Pro", "test"),),
        ("bench_mmlu_pro.jsonl", "mmlu_pro.jsonl"), 12032,
        note="by likelihood; `mlxstacks confound` asks for a boxed letter",
    ),
    # As `mlxstacks confound` asks them: the options are what is scored.
    Task("items", "Items", "likelihood", (), ("items.jsonl",), None, prompt=_BARE),
)  # fmt: skip

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ROWS})
# The spec's twelve, in its order.
TWELVE = tuple(name for name in TASKS if name not in ("mmlu_pro", "items"))


def task_named(name: str) -> Task:
    """Raises: InputError for an unknown name, with the nearest known one."""
    if name in TASKS:
        return TASKS[name]
    near = [known for known in TASKS if name and known.startswith(name)]
    near = near or difflib.get_close_matches(name, TASKS, n=1, cutoff=0.6)
    meant = f"; the nearest is {near[0]}" if near else ""
    theirs = f"lm_eval/{name[:80].rpartition('/')[2]}"
    raise InputError(
        f"no benchmark {name[:80]!a}{meant}; there are {', '.join(TASKS)}; a task of "
        f"lm-evaluation-harness is named {theirs!a}"
    )


@dataclass(frozen=True, slots=True)
class RawItem:
    """What a row holds. gold: the right option's place; the right answer as text where there are no
    options. item_id: None where rows have none. remark: what is odd about it, counted in notes.
    """

    question: str
    gold: int | str
    options: tuple[str, ...] = ()
    item_id: str | None = None
    stratum: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""


Reader = Callable[[Mapping[str, Any]], RawItem]


def _text(row: Mapping[str, Any], *keys: str) -> str:
    """The first of these keys that the row has, as it stands; a blank text is an error."""
    value = next((row[key] for key in keys if key in row), None)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{keys[0]} is {value!r:.40}, need a text")
    return value


def _label(row: Mapping[str, Any], *keys: str) -> str:
    """The same of a text that may be missing."""
    return next((row[key].strip() for key in keys if isinstance(row.get(key), str)), "")


def _id(row: Mapping[str, Any], *keys: str) -> str | None:
    """None where rows have no such key. A key without a value is an error."""
    key = next((key for key in keys if key in row), None)
    if key is None:
        return None
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | str) or not str(value).strip():
        raise ValueError(f"{key} is {value!r:.40}, need a text or a whole number")
    return str(value).strip()


def _options(value: Any, name: str) -> tuple[str, ...]:
    """Two or more texts, blanks around them cut."""
    texts = _list(value)
    if not 2 <= len(texts) <= MOST_OPTIONS or not all(
        isinstance(text, str) and text.strip() for text in texts
    ):
        raise ValueError(f"{name} is {value!r:.60}, need 2 to {MOST_OPTIONS} texts")
    return tuple(text.strip() for text in texts)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _place(value: Any, options: Sequence[str], name: str) -> int:
    """The right option's place, given as a whole number from 0 (perhaps in text) or as a letter."""
    place = -1
    if isinstance(value, int) and not isinstance(value, bool):
        place = value
    elif isinstance(value, str) and re.fullmatch(r"\d+", value, re.ASCII):
        place = int(value)
    elif isinstance(value, str) and re.fullmatch(r"[A-Z]", value):
        place = string.ascii_uppercase.index(value)
    if not 0 <= place < len(options):
        last = len(options) - 1
        raise ValueError(
            f"{name} is {value!r:.40}, need one of its {len(options)} options: 0 to {last} or A to "
            f"{string.ascii_uppercase[last]}"
        )
    return place


def hellaswag(row: Mapping[str, Any]) -> RawItem:
    """ind, ctx, endings, label (a number; in the hub's rows as text), split_type."""
    options = _options(row.get("endings"), "endings")
    # A number of its own within a source; whether across sources, nothing says.
    parts = [part for part in (_label(row, "source_id"), _id(row, "ind")) if part]
    return RawItem(
        _text(row, "ctx"), _place(row.get("label"), options, "label"), options,
        "/".join(parts) or None, _label(row, "split_type"),
    )  # fmt: skip


def arc(row: Mapping[str, Any]) -> RawItem:
    """Hub: id, question, choices {text, label}, answerKey. Local: query, choices, gold."""
    if "query" in row:
        options = _options(row.get("choices"), "choices")
        question = _text(row, "query").removeprefix("Question:")
        return RawItem(question, _place(row.get("gold"), options, "gold"), options, _id(row, "id"))
    choices = row.get("choices")
    choices = choices if isinstance(choices, Mapping) else {}
    options = _options(choices.get("text"), "choices.text")
    labels, key = _list(choices.get("label")), row.get("answerKey")
    if len(labels) != len(options) or labels.count(key) != 1:
        raise ValueError(f"answerKey is {key!r:.40}, need one of the labels {labels!r:.60}")
    return RawItem(_text(row, "question"), labels.index(key), options, _id(row, "id"))


def truthfulqa(row: Mapping[str, Any]) -> RawItem:
    """Hub: question, mc1_targets {choices, labels}. Local: the CSV's columns; MC1 is the best
    answer and all incorrect ones.
    """
    if "mc1_targets" in row:
        targets = row["mc1_targets"] if isinstance(row["mc1_targets"], Mapping) else {}
        options = _options(targets.get("choices"), "mc1_targets.choices")
        labels = _list(targets.get("labels"))
        if len(labels) != len(options) or labels.count(1) != 1:
            raise ValueError(f"mc1_targets.labels is {labels!r:.60}, need one 1 for the right one")
        return RawItem(_text(row, "question"), labels.index(1), options, _id(row, "id"))
    incorrect = [part.strip() for part in _text(row, "Incorrect Answers").split(";")]
    best = _text(row, "Best Answer")
    options = _options([best, *filter(None, incorrect)], "Incorrect Answers")
    return RawItem(_text(row, "Question"), 0, options, _id(row, "id"), _label(row, "Category"))


def mmlu(row: Mapping[str, Any]) -> RawItem:
    """question, choices, answer (place or letter), subject."""
    options = _options(row.get("choices"), "choices")
    return RawItem(
        _text(row, "question"), _place(row.get("answer"), options, "answer"), options,
        _id(row, "id"), _label(row, "subject"),
    )  # fmt: skip


def medical(row: Mapping[str, Any]) -> RawItem:
    """MedQA and local MedMCQA: question, options {A: text, ...}, answer_idx, answer, meta_info.
    MedMCQA of the hub: id, question, opa to opd, cop (from 0), subject_name.
    """
    if "opa" in row:
        options = _options([row.get(f"op{letter}") for letter in "abcd"], "opa to opd")
        gold = _place(row.get("cop"), options, "cop")
    else:
        given = row.get("options")
        given = given if isinstance(given, Mapping) else {}
        letters = string.ascii_uppercase[: len(given)]
        if sorted(given) != list(letters):
            raise ValueError(f"options is {row.get('options')!r:.60}, need texts by A, B, ...")
        options = _options([given[letter] for letter in letters], "options")
        gold = _place(row.get("answer_idx"), options, "answer_idx")
        answer = row.get("answer")
        if answer is not None and str(answer).strip() != options[gold]:
            raise ValueError(
                f"answer_idx {row['answer_idx']} is {options[gold]!r:.40}, answer {answer!r:.40}"
            )
    stratum = _label(row, "subject_name", "meta_info")
    return RawItem(_text(row, "question"), gold, options, _id(row, "id"), stratum)


def multiple_choice(row: Mapping[str, Any]) -> RawItem:
    """MMLU-Pro's form: question_id or id, question, options, answer (a letter), answer_index where
    it is given, category or subject.
    """
    options = _options(row.get("options"), "options")
    gold = _place(row.get("answer"), options, "answer")
    if row.get("answer_index", gold) != gold:
        raise ValueError(f"answer is option {gold}, answer_index {row['answer_index']!r:.40}")
    name, stratum = _id(row, "question_id", "id"), _label(row, "category", "subject")
    return RawItem(_text(row, "question"), gold, options, name, stratum)


def humaneval(row: Mapping[str, Any]) -> RawItem:
    """task_id, prompt, entry_point, test, canonical_solution."""
    prompt, entry = _text(row, "prompt"), _text(row, "entry_point")
    if not re.search(rf"^def {re.escape(entry)}\b", prompt, re.MULTILINE):
        raise ValueError(f"entry_point {entry!r:.40} is no function of the prompt")
    extra = {"prompt": prompt, "entry_point": entry, "test": _text(row, "test")}
    return RawItem(prompt, _text(row, "canonical_solution"), (), _id(row, "task_id"), extra=extra)


def gsm8k(row: Mapping[str, Any]) -> RawItem:
    """question, answer that ends in `#### N`."""
    answer = number(_text(row, "answer"))
    if answer.rule != "marker" or answer.value is None:
        raise ValueError("answer has no number after ####")
    return RawItem(_text(row, "question"), answer.value, (), _id(row, "id"))


def math500(row: Mapping[str, Any]) -> RawItem:
    """problem, answer in LaTeX, subject, unique_id."""
    subject = _label(row, "subject")
    return RawItem(
        _text(row, "problem"), _text(row, "answer"), (), _id(row, "unique_id", "id"), subject
    )


def aime(row: Mapping[str, Any]) -> RawItem:
    """ID, Problem, Answer on the hub; id, problem, answer in the local file. The gold answer is
    written without leading zeros.
    """
    answer = next((row[key] for key in ("Answer", "answer") if key in row), None)
    if isinstance(answer, bool) or not re.fullmatch(r"\d{1,3}", str(answer).strip(), re.ASCII):
        raise ValueError(f"answer is {answer!r:.40}, need a whole number from 0 to 999")
    return RawItem(
        _text(row, "problem", "Problem"), str(int(str(answer))), (), _id(row, "ID", "id")
    )


def gpqa(row: Mapping[str, Any]) -> RawItem:
    """The original's columns; or question, options, answer; or question with the options inside and
    the answer's letter. Where such options cannot be told apart, the question stays whole.
    """
    if "Correct Answer" in row:
        keys = ("Correct Answer", *(f"Incorrect Answer {place}" for place in (1, 2, 3)))
        options = _options([row.get(key) for key in keys], "answers")
        stratum = _label(row, "High-level domain")
        return RawItem(_text(row, "Question"), 0, options, _id(row, "Record ID"), stratum)
    question, answer = _text(row, "question"), row.get("answer")
    name, stratum = _id(row, "id"), _label(row, "domain", "category")
    if "options" in row:
        options = _options(row["options"], "options")
        return RawItem(question, _place(answer, options, "answer"), options, name, stratum)
    letter = answer.strip() if isinstance(answer, str) else answer
    place = _place(letter, "ABCD", "answer")
    split = options_inside(question)
    if split is not None:
        return RawItem(split[0], place, split[1], name, stratum)
    remark = "options could not be separated, so they keep the published order"
    return RawItem(question, "ABCD"[place], (), name, stratum, remark=remark)


# At the beginning of a line, else after any blank.
_INSIDE = tuple(
    re.compile(rf"{before}\(?([A-D])[.)][ \t]+", re.MULTILINE)
    for before in (r"^[ \t]*", r"(?<!\S)")
)


def options_inside(question: str) -> tuple[str, tuple[str, ...]] | None:
    """(question, its four options) of a text that ends in `A. ... B. ... C. ... D. ...`; None where
    there is not exactly one such list.
    """
    for pattern in _INSIDE:
        marks = list(pattern.finditer(question))
        if "".join(mark[1] for mark in marks) != "ABCD":
            continue
        ends = [mark.start() for mark in marks[1:]] + [len(question)]
        pairs = zip(marks, ends, strict=True)
        options = tuple(question[mark.end() : end].strip() for mark, end in pairs)
        stem = question[: marks[0].start()].strip()
        if stem and all(options):
            return stem, options
    return None


READERS: Mapping[str, Reader] = {
    "hellaswag": hellaswag,
    "arc_easy": arc,
    "arc_challenge": arc,
    "truthfulqa_mc1": truthfulqa,
    "mmlu": mmlu,
    "humaneval": humaneval,
    "gsm8k": gsm8k,
    "math500": math500,
    "aime2024": aime,
    "medqa": medical,
    "medmcqa": medical,
    "gpqa_diamond": gpqa,
    "mmlu_pro": multiple_choice,
    "items": multiple_choice,
}


def bench_item(task: Task, raw: RawItem, item_id: str, reference: bool = False) -> BenchItem:
    """Law: the same row gives the same item, in every process."""
    likelihood = task.kind == "likelihood"
    if task.shuffled and not (reference and likelihood):
        raw = _shuffled(raw, item_id)
    template = _GSM8K_REFERENCE if reference and task.name == "gsm8k" else task.prompt
    letters = (
        string.ascii_uppercase[: len(raw.options or "ABCD")] if "{options}" in template else ""
    )
    listed = [f"{letter}. {text}" for letter, text in zip(letters, raw.options, strict=False)]
    prompt = template.format(
        question=raw.question.rstrip() if task.grader == "code" else raw.question.strip(),
        options="\n".join(listed), letters=", ".join(letters),
    ).removesuffix("\n\n")  # fmt: skip
    gold = raw.gold
    if not likelihood and isinstance(gold, int):
        gold = string.ascii_uppercase[gold]
    blank = "" if reference and task.name == "hellaswag" else " "
    return BenchItem(
        item_id, prompt, gold, tuple(blank + option for option in raw.options if likelihood),
        tuple(f" {letter}" for letter in letters), raw.stratum,
        # A subject of one's own items is a domain; a subject of MMLU is not.
        raw.stratum or None if task.name == "items" else None, raw.extra,
    )  # fmt: skip


def _shuffled(raw: RawItem, item_id: str) -> RawItem:
    """Options in the order of a hash of item id and place. Python's own hash of a text, which the
    published script seeded with, is another one in every process.
    """
    if not raw.options or not isinstance(raw.gold, int):
        return raw

    def drawn(place: int) -> bytes:
        return hashlib.sha256(f"options/{item_id}/{place}".encode()).digest()

    order = sorted(range(len(raw.options)), key=drawn)
    options = tuple(raw.options[place] for place in order)
    return replace(raw, gold=order.index(raw.gold), options=options)

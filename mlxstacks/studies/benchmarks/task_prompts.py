r"""How an item is asked (spec/evaluation.md section 3): a raw item as a `BenchItem`.

Likelihood prompts are contexts as they stand, generation prompts a user's message. Candidates begin
with one blank. `reference` gives what the published script had: HellaSwag's endings without a
blank, TruthfulQA's right answer first, GSM8K under instruction and response headings (as it is
asked wherever there is no chat template around it). The script's own words for HumanEval, MATH-500,
AIME and GPQA are not known; ours say the same.
"""

import hashlib
import string
from collections.abc import Callable, Mapping, Sequence

from mlxstacks.studies.benchmarks.task_rows import RawItem
from mlxstacks.studies.benchmarks.tasks import Task
from mlxstacks.studies.benchmarks.types import BenchItem

HUMANEVAL = (
    "Complete the Python function below. Write only the indented body of the function, without "
    "its signature and without any explanation.\n\n{question}"
)
MATH = (
    "Solve the problem step by step. Write the final answer in \\boxed{{}}. An example: 1/3 + 1/6 "
    "is 2/6 + 1/6, which is 3/6. The answer is \\boxed{{\\frac{{1}}{{2}}}}.\n\n"
    "Problem: {question}"
)
AIME = (
    "Solve the problem step by step. The answer is an integer from 000 to 999. Write that integer "
    "in \\boxed{{}}.\n\nProblem: {question}"
)
GPQA = (
    "Think about the question first. Then end with one last line of the form ANSWER: LETTER, where "
    "LETTER is one of {letters}.\n\n{question}"
)
GSM8K_REFERENCE = "### Instruction:\n{question}\n\n### Response:\n"


def bench_item(task: Task, raw: RawItem, item_id: str, reference: bool = False) -> BenchItem:
    """Law: the same row gives the same item, in every process."""
    if task.shuffled and not (reference and task.kind == "likelihood"):
        raw = _shuffled(raw, item_id)
    if task.kind == "generate":
        return _generated(task, raw, item_id, reference)
    template = _CONTEXTS.get(task.name, _lettered)
    blank = "" if reference and task.name == "hellaswag" else " "
    return BenchItem(
        item_id, template(raw), raw.gold, tuple(blank + option for option in raw.options),
        _letters(raw.options) if template is _lettered else (), raw.stratum,
        # A subject of one's own items is a domain; a subject of MMLU is not.
        raw.stratum if task.name == "items" else None,
    )  # fmt: skip


def _generated(task: Task, raw: RawItem, item_id: str, reference: bool) -> BenchItem:
    gold = string.ascii_uppercase[raw.gold] if isinstance(raw.gold, int) else raw.gold
    letters: tuple[str, ...] = ()
    question = raw.question.strip()
    if task.grader == "letter":
        letters = _letters(raw.options or "ABCD")
        if raw.options:
            question = f"{question}\n\n{_listed(raw.options)}"
    if task.grader == "code":
        question = raw.question.rstrip()
    named = ", ".join(letter.strip() for letter in letters)
    template = GSM8K_REFERENCE if reference and task.name == "gsm8k" else _MESSAGES[task.name]
    prompt = template.format(question=question, letters=named)
    return BenchItem(item_id, prompt, gold, (), letters, raw.stratum, extra=raw.extra)


# --- contexts of candidates -----------------------------------------------------------------------


def _arc(raw: RawItem) -> str:
    return f"Question: {raw.question.strip()}\nAnswer:"


def _truthfulqa(raw: RawItem) -> str:
    return f"Q: {raw.question.strip()}\nA:"


def _lettered(raw: RawItem) -> str:
    """MMLU, MedQA, MedMCQA: options are listed by letter, and scored by their texts."""
    return f"Question: {raw.question.strip()}\n{_listed(raw.options)}\nAnswer:"


def _bare(raw: RawItem) -> str:
    """HellaSwag, and items as `mlxstacks confound` asks them: the options are what is scored."""
    return raw.question.strip()


_CONTEXTS: Mapping[str, Callable[[RawItem], str]] = {
    "hellaswag": _bare,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "truthfulqa_mc1": _truthfulqa,
    "items": _bare,
}
_MESSAGES = {
    "gsm8k": "{question}",
    "humaneval": HUMANEVAL,
    "math500": MATH,
    "aime2024": AIME,
    "gpqa_diamond": GPQA,
}


# --- options --------------------------------------------------------------------------------------


def _listed(options: Sequence[str]) -> str:
    pairs = zip(string.ascii_uppercase, options, strict=False)
    return "\n".join(f"{letter}. {option}" for letter, option in pairs)


def _letters(options: Sequence[str]) -> tuple[str, ...]:
    return tuple(f" {letter}" for letter in string.ascii_uppercase[: len(options)])


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
    return RawItem(
        raw.question, order.index(raw.gold), options, raw.item_id, raw.stratum, raw.extra,
        raw.remark,
    )  # fmt: skip

"""The benchmarks, as a table (spec/evaluation.md sections 2, 3 and 5), and their items.

Imports neither mlx nor numpy. How rows are read and asked is in rows.py, which items in items.py,
what an answer is worth in grading.py.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from mlxstacks.errors import InputError

Kind = Literal["likelihood", "generate"]


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


# --- the table ------------------------------------------------------------------------------------


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
    items: of the published split. shuffled: the options' order is drawn by a hash of the item's id.
    note: what a reader of its score must know.
    """

    name: str
    title: str
    kind: Kind
    sources: tuple[HubSource, ...]
    files: tuple[str, ...]
    items: int | None
    grader: Grader | None = None
    max_tokens: int = 0
    metric: Metric = "accuracy"
    shuffled: bool = False
    published: Published | None = None
    note: str = ""

    @property
    def source(self) -> str:
        """How messages and reports name the data set; "" where only files are read."""
        return self.sources[0].label if self.sources else ""


_ARC = "allenai/ai2_arc"
_ROWS = (
    Task(
        "hellaswag", "HellaSwag", "likelihood",
        (HubSource("Rowan/hellaswag", "validation"),),
        ("bench_hellaswag.jsonl", "hellaswag.jsonl"), 10042,
        published=Published(0.670, 0.650),
    ),
    Task(
        "arc_easy", "ARC-Easy", "likelihood", (HubSource(_ARC, "test", "ARC-Easy"),),
        ("bench_arc_easy.jsonl", "arc_easy.jsonl"), 2376,
        published=Published(0.510, 0.515),
    ),
    Task(
        "arc_challenge", "ARC-Challenge", "likelihood", (HubSource(_ARC, "test", "ARC-Challenge"),),
        ("bench_arc_challenge.jsonl", "arc_challenge.jsonl"), 1172,
        published=Published(0.525, 0.495),
    ),
    Task(
        "truthfulqa_mc1", "TruthfulQA MC1", "likelihood",
        (HubSource("truthfulqa/truthful_qa", "validation", "multiple_choice"),),
        ("bench_truthfulqa.jsonl", "truthfulqa.jsonl"), 817,
        shuffled=True,
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
        grader="code", max_tokens=512, metric="pass@1",
    ),
    Task(
        "gsm8k", "GSM8K", "generate", (HubSource("openai/gsm8k", "test", "main"),),
        ("bench_gsm8k.jsonl", "gsm8k_test.jsonl"), 1319,
        grader="number", max_tokens=256,
        published=Published(0.665, 0.665),
    ),
    Task(
        "math500", "MATH-500", "generate", (HubSource("HuggingFaceH4/MATH-500", "test"),),
        ("bench_math500.jsonl", "math500.jsonl"), 500,
        grader="boxed", max_tokens=512,
    ),
    Task(
        "aime2024", "AIME 2024", "generate", (HubSource("Maxwell-Jia/AIME_2024", "train"),),
        ("bench_aime24.jsonl", "aime2024.jsonl"), 30,
        grader="integer", max_tokens=512,
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
        grader="letter", max_tokens=512, shuffled=True,
        note="options are shuffled by item id",
    ),
    Task(
        "mmlu_pro", "MMLU-Pro", "likelihood", (HubSource("TIGER-Lab/MMLU-Pro", "test"),),
        ("bench_mmlu_pro.jsonl", "mmlu_pro.jsonl"), 12032,
        note="by likelihood; `mlxstacks confound` asks for a boxed letter",
    ),
    Task("items", "Items", "likelihood", (), ("items.jsonl",), None),
)  # fmt: skip

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in _ROWS})
# The spec's twelve, in its order.
TWELVE = tuple(name for name in TASKS if name not in ("mmlu_pro", "items"))


def task_named(name: str) -> Task:
    """Raises: InputError for an unknown name, with the nearest known one."""
    if name in TASKS:
        return TASKS[name]
    near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.4)
    meant = f"; the nearest is {near[0]}" if near else ""
    raise InputError(f"no benchmark {name[:80]!a}{meant}; there are {', '.join(TASKS)}")

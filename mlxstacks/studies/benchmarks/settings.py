"""Settings of `mlxstacks eval` and of its modes. Imports neither mlx nor numpy."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.fuse.settings import PolicyName
from mlxstacks.settings import NORMALISATIONS as NORMALISATIONS
from mlxstacks.settings import (
    EachOnce,
    Force,
    Limit,
    Normalisation,
    Plots,
    Probability,
    Resume,
    Seed,
    Settings,
    output_path,
)
from mlxstacks.studies.benchmarks.tasks import TWELVE

ArmName = Literal["base", "adapter", "fused", "ungated", "routed", "oracle", "random"]
# Those of one line share a model, loaded once.
STORE_ARMS: tuple[ArmName, ...] = ("ungated", "routed", "oracle", "random")
ADAPTER_ARMS: tuple[ArmName, ...] = ("adapter", "fused")
ARMS: tuple[ArmName, ...] = ("base", *ADAPTER_ARMS, *STORE_ARMS)
# Their stacks follow from an item's domain.
NEED_LABELS: tuple[ArmName, ...] = ("oracle", "random")
HARNESS = "lm_eval/"
# How a run writes, goes on and grades; not what the arms answer or what is tested.
NOT_OF_THE_PLAN = {
    "save_path", "resume", "force", "save_every", "regrade", "allow_code", "plots", "data", "model",
    "adapter_path", "store_path", "router_path", "items_per_task", "limit", "sample", "arms",
    "tasks",
    "task_files",
}  # fmt: skip


def _by_comma(tasks: Any) -> Any:
    """`a,b` is two tasks, as in lm_eval."""
    if not isinstance(tasks, list | tuple):
        return tasks
    names = (task.split(",") if isinstance(task, str) else [task] for task in tasks)
    return [name for several in names for name in several]


class ArmSettings(Settings):
    """A model, what changes it, and how it is asked."""

    model: str | None = Field(
        None, description="Model directory or Hugging Face id. Default: the store's base."
    )
    adapter_path: str | None = Field(
        None, description="Adapter (mlx-lm or PEFT): unfused in arm adapter, fused in arm fused."
    )
    store_path: str | None = Field(
        None, description="Store for the arms ungated, routed, oracle and random."
    )
    router_path: str | None = Field(
        None, description="Router file or directory to use instead of the store's router."
    )
    requant: PolicyName = Field(
        "auto", description="How arm fused writes the adapter into quantized weights (see fuse)."
    )
    hard: bool = Field(False, description="Weight routed domains by 1 instead of their score.")
    chat: Literal["none", "generate", "all"] = Field(
        "generate",
        description="Prompts to wrap in the model's chat template: those answered in text "
        "(generate), all (contexts of candidates too, which then lose their leading space: an "
        "assistant's turn begins without one), or none.",
    )
    system_prompt: str | None = Field(
        None, description="System message before each prompt in the chat template."
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    base: Literal["auto", "stored", "float32"] = Field(
        "auto",
        description="How the base computes. float32: its stored values in float32, about 20 times "
        "faster on a CPU; auto: float32 on a CPU with enough memory, else stored.",
    )
    max_context_tokens: int | None = Field(
        None,
        ge=2,
        description="Maximum tokens in a prompt (or in prompt and candidate); longer prompts lose "
        "their beginning and are marked. Default: the model's own limit.",
    )
    batch_size: int = Field(64, ge=1, description="Maximum candidates to score at once.")
    reference_offset: bool = Field(
        False,
        description="Score as the published script did, without the first token of a candidate, "
        "so that a one-token candidate scores 0 and wins. For comparison only.",
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        le=100,
        description="Penalty on the logits of the last 20 tokens; 1: no penalty (published: 1.2).",
    )
    seed: Seed = Field(0, description="Seed for the random stacks.")


class EvalSettings(ArmSettings):
    """Benchmarks in every mode of a model. The defaults are ours; recipes hold published ones."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(_by_comma), EachOnce] = Field(
        TWELVE,
        description="Benchmarks. Repeatable, or separated by commas. lm_eval/NAME is a task of "
        "the lm-evaluation-harness: a file in task_files, else one of ours, else its own (a group "
        "gives each of its tasks).",
    )
    data: str | None = Field(
        None,
        description="Directory with a file for each task, or one file. Default: data sets in the "
        "Hugging Face cache; without a model of your own, nano's items.",
    )
    task_files: str | None = Field(
        None, description="Directory of additional task files for lm_eval/NAME."
    )
    arms: Annotated[tuple[ArmName, ...], EachOnce] = Field(
        (), description="Modes to compare. Repeatable. Default: all for which there is an "
        "adapter, a store or labeled items.",
    )  # fmt: skip
    items_per_task: Annotated[int, Field(ge=1)] | None = Field(
        200, description="Items per task, drawn before any answer; none: all."
    )
    limit: Limit = None
    sample: Literal["stratified", "first"] = Field(
        "stratified",
        description="How to sample. stratified: seeded, each subject in proportion. first: the "
        "first rows of the file, as published; of MMLU that is one or two subjects.",
    )
    normalisation: Normalisation = Field(
        "token",
        description="Likelihood to test: sum, or mean per token (as published) or per character. "
        "All three are reported.",
    )
    letters: bool = Field(False, description="Also score lettered tasks by their letters.")
    domains: tuple[str, ...] = Field(
        (),
        description="SUBJECT=DOMAIN or TASK=DOMAIN: domain whose stacks arm oracle uses for these "
        "items. Repeatable; a subject overrides a task.",
    )
    allow_code: bool = Field(
        False,
        description="Run programs written by the model in a sandbox to grade them; otherwise they "
        "are not graded.",
    )
    alpha: Probability = Field(0.05, description="Significance level for adjusted p-values.")
    expected_rate: Probability = Field(
        0.5, description="Score of the control that the power table assumes."
    )
    expected_discordant: Probability = Field(
        0.1, description="Share of items that change sides, in the power table."
    )
    save_every: int = Field(32, ge=1, description="Items answered between writes to disk.")
    regrade: str | None = Field(
        None,
        description="Directory of a finished run: regrade its answers with its own settings, "
        "except --allow-code; no model is loaded.",
    )
    plots: Plots = True
    save_path: str | None = output_path("eval")
    resume: Resume = True
    force: Force = False

    @field_validator("tasks")
    @classmethod
    def _some(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if not values:
            raise ValueError("tasks is empty; give at least one")
        return values

    @field_validator("domains")
    @classmethod
    def _pairs(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [value for value in values if not all(part.strip() for part in _parts(value))]
        if wrong:
            raise ValueError(f"got {wrong}; each is SUBJECT=DOMAIN or TASK=DOMAIN")
        names = [_parts(value)[0] for value in values]
        if len(set(names)) < len(names):
            raise ValueError(f"got {list(values)}; give each subject once")
        return values

    @property
    def domain_of(self) -> Mapping[str, str]:
        """Subject or task -> domain."""
        return dict(_parts(value) for value in self.domains)

    @property
    def own_tasks(self) -> tuple[str, ...]:
        """Tasks that are not the harness's."""
        return tuple(name for name in self.tasks if not name.startswith(HARNESS))

    @property
    def harness_tasks(self) -> tuple[str, ...]:
        """Names as the harness knows them."""
        names = (name for name in self.tasks if name.startswith(HARNESS))
        return tuple(name.removeprefix(HARNESS) for name in names)

    @property
    def harness_labels(self) -> Mapping[str, str]:
        """Task or group of the harness -> domain; lm_eval/NAME wins over NAME."""
        pairs = sorted(self.domain_of.items(), key=lambda pair: pair[0].startswith(HARNESS))
        return {name.removeprefix(HARNESS): domain for name, domain in pairs}


def _parts(value: str) -> tuple[str, str]:
    # A subject may hold "=", a domain may not.
    name, _, domain = value.rpartition("=")
    return name, domain

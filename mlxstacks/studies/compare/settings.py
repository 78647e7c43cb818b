"""Settings of `mlxstacks stack compare`, its plan. Imports neither mlx nor numpy."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from mlxstacks.layers.settings import StackSettings
from mlxstacks.settings import Settings, merge, output_path
from mlxstacks.training.settings import StackRunSettings, names_a_file

# What a question can be decided by; see analysis.py.
Primary = Literal["task_loss", "ungated", "ungated_earlier", "isolated"]
Budget = Literal["parameters", "steps", "tokens"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)
# What a run gets from the comparison. Model and directory are the same for every arm, or the
# differences would not be of the arms. Of `domains` an arm may change order and training data.
_OF_THE_COMPARISON = ("model", "data", "save_path", "seed", "resume", "force")
_OF_ALL_ARMS = (*_OF_THE_COMPARISON, "validation_rows", "modes")


class ArmSettings(Settings):
    """One arm: a name, and what it changes in the settings of every run."""

    name: Annotated[str, names_a_file("an arm's", 40)]
    change: dict[str, Any] = Field(
        default_factory=dict,
        description="settings of `stack` with other values; nested ones may be partial. domains: "
        "the same ones in another order, or with other training rows",
    )
    profile: str | None = Field(
        None,
        description="directory that `mlxstacks profile` wrote, with a group for each domain: that "
        "is trained at the layers where the group's routing diverges most, as many as top_layers",
    )


class CompareSettings(Settings):
    """Runs of `stack` that differ in one thing, over several seeds; the first arm is control."""

    model: str | None = Field(
        None, description="Model directory or Hugging Face id. Default: the built-in nano model."
    )
    data: str | None = Field(
        None, description="Directory of the domains' data, as in `stack`. Default: nano's."
    )
    save_path: str | None = output_path("stack-compare")
    question: str = Field(
        "Which settings give the lower loss?",
        description="Question that the comparison answers; part of the plan.",
    )
    arms: tuple[ArmSettings, ...] = Field(
        (), description="Arms to compare, the control first: each a name and a change of `run`."
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 1, 2),
        description="Seeds for initial weights and data order; arms are compared seed by seed. "
        "Repeatable.",
    )
    rates: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(
        (),
        description="Learning rates to search: each arm is trained at its own best one, instead "
        "of the run's and the arm's: the rate with the lowest task_loss over `search_seeds`, "
        "fixed before the first of `seeds`. Default: no search. Repeatable.",
    )
    search_seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (100, 101), description="Seeds for that search, none of `seeds`. Repeatable."
    )
    run: StackRunSettings = Field(
        # No round ends early and none is dropped for gaining little: budgets are spent as planned.
        StackRunSettings(
            rounds=1,
            validation_rows=32,
            patience=100,
            spike_threshold=10.0,
            min_loss_delta=0.0,
            keep_plateau_stack=True,
        ),
        description="Settings of every run, named as in `mlxstacks stack`.",
    )
    equal: tuple[Budget, ...] = Field(
        BUDGETS,
        description="Budgets that must be equal in all arms: trained parameters, optimizer steps, "
        "tokens seen (without padding), summed over rounds and domains. Repeatable.",
    )
    tolerance: float = Field(
        0.01, ge=0, lt=1, description="Relative difference up to which budgets count as equal."
    )
    primary: Primary = Field(
        "task_loss",
        description="Measure that answers the question, a mean over domains; lower is better. "
        "Validation loss of each domain after its training (task_loss), or at the end with every "
        "stack on (ungated; ungated_earlier: without the last domain) or only its own (isolated).",
    )
    margin: float = Field(
        0.02, gt=0, description="Smallest difference in the primary measure that counts, in nats."
    )
    confidence: float = Field(
        0.95, gt=0.5, lt=1, description="Confidence level; Bonferroni-corrected in verdicts."
    )
    retry: bool = Field(False, description="Rerun cells that failed or crashed.")
    resume: bool = Field(True, description="Resume an interrupted comparison.")
    force: bool = Field(False, description="Replace an existing save path.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [arm.name.casefold() for arm in self.arms]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ValueError(
                f"arms is {[arm.name for arm in self.arms]}; a comparison needs two or more, each "
                "with a name of its own (case does not count)"
            )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds is {list(self.seeds)}; give at least one, each once")
        if len(set(self.rates)) < len(self.rates):
            raise ValueError(f"rates is {list(self.rates)}; give each once")
        search = self.search_seeds
        if self.rates and (not search or len({*search, *self.seeds}) < len(search + self.seeds)):
            raise ValueError(
                f"search_seeds is {list(search)}; give at least one, each once, none of seeds "
                f"{list(self.seeds)}"
            )
        changed = self.run.model_dump(exclude_defaults=True)
        problems = [
            f"run.{name} is set by the comparison: give {'seeds' if name == 'seed' else name}"
            for name in _OF_THE_COMPARISON
            if name in changed
        ]
        if self.primary in ("ungated", "ungated_earlier", "isolated"):
            mode = "isolated" if self.primary == "isolated" else "ungated"
            if mode not in self.run.modes:
                problems.append(f"primary {self.primary} needs {mode} among run.modes")
        for arm in self.arms:
            if shared := [key for key in arm.change if key in _OF_ALL_ARMS]:
                problems.append(f"arm {arm.name} changes {', '.join(shared)}, which all arms share")
                continue
            try:
                domains = self.settings_of(arm).domains
                if self.rates and any(domain.learning_rate for domain in domains):
                    problems.append(
                        f"arm {arm.name}: a domain has a learning rate; rates search it"
                    )
            except ValidationError as error:
                problems += [f"arm {arm.name}: {_fault(detail)}" for detail in error.errors()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def settings_of(self, arm: ArmSettings, **given: Any) -> StackRunSettings:
        """The run of an arm. given: what a cell sets, as seed and save_path."""
        # What is at its default counts as not said: some checks ask whether it was.
        values = self.run.model_dump(exclude_defaults=True)
        return StackRunSettings.model_validate(merge(values, arm.change) | given)


def _fault(detail: Mapping[str, Any]) -> str:
    """One of pydantic's, of what an arm changes."""
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] != "extra_forbidden":
        return f"{key}: {detail['msg']}"
    inner = [f"stack.{name}" for name in StackSettings.model_fields]
    known = [*StackRunSettings.model_fields, *inner]
    close = [f"stack.{key}"] if f"stack.{key}" in inner else get_close_matches(key, known, 1)
    return f"no setting {key!r}" + (f"; did you mean {close[0]!r}?" if close else "")


def at_rate(arm: ArmSettings, rate: float, *, search: bool = False) -> ArmSettings:
    """An arm with that learning rate; of a search its name says so."""
    update = {"change": {**arm.change, "learning_rate": rate}}
    return arm.model_copy(update=update | ({"name": f"{arm.name}_rate-{rate}"} if search else {}))

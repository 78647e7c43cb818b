"""The kinds of results: what each one asks, the command that makes it, who puts it into words."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlxstacks.errors import InputError
from mlxstacks.report.benchmarks import eval_content
from mlxstacks.report.content import Content, Mark
from mlxstacks.report.fuse import fuse_content
from mlxstacks.report.route import discover_content, route_check_content, route_train_content
from mlxstacks.report.route_evaluate import route_evaluate_content
from mlxstacks.report.stack import analysis_content, stack_content, store_content
from mlxstacks.report.train import train_content
from mlxstacks.report.values import Value


@dataclass(frozen=True)
class Kind:
    """question: what was asked, where the result has no hypothesis of its own. content: of results
    in a form of their own.
    """

    title: str
    command: str
    question: str
    content: Callable[[Value, Mark], Content] | None


KINDS: Mapping[str, Kind] = {
    "fuse": Kind(
        "Fuse", "fuse",
        "How much of the adapter is in the fused weights, and what does the fuse do by itself?",
        fuse_content,
    ),
    "train": Kind(
        "Training", "train",
        "How far does an adapter of these settings lower the validation loss?", train_content,
    ),
    "stack": Kind(
        "Stacks", "stack", "What does each domain gain, and what do later ones cost it?",
        stack_content,
    ),
    "store": Kind(
        "Store of stacks", "stack",
        "What does each domain gain, and what do later ones cost it?", store_content,
    ),
    "stacks analyse": Kind(
        "Analysis of stacks", "stacks analyse",
        "Do the stacks of different domains share directions, and does their routing tell "
        "domains apart?", analysis_content,
    ),
    "route discover": Kind(
        "Discovery of outcomes", "route discover",
        "Which stacks lower the loss of which prompts, measured instead of assumed?",
        discover_content,
    ),
    "route train": Kind(
        "Training of the router", "route train",
        "Can the right stacks be told from the prompt alone?", route_train_content,
    ),
    "route evaluate": Kind(
        "Evaluation of routing", "route evaluate",
        "Is a routed model better than the base and than all stacks at once, and are the domains "
        "the reason?", route_evaluate_content,
    ),
    "route check": Kind(
        "Check of prompts", "route check", "Do named prompts get the routes and answers expected?",
        route_check_content,
    ),
    "eval": Kind(
        "Benchmarks", "eval", "Which modes score better on which benchmark?", eval_content,
    ),
}  # fmt: skip


def kind_named(name: str, file: str) -> Kind:
    """Raises: InputError for a kind that no command here writes."""
    found = KINDS.get(name)
    if found is None:
        raise InputError(
            f"{file}: its kind is {ascii(name)[:80]}; known are {', '.join(KINDS)}: made by "
            "another version?"
        )
    return found

"""What random stacks would have done in a discovery: losses beside those of the search.

Every run of the control has the chat floor too, as every run of the search has, so that nothing but
the stack differs.
"""

from collections.abc import Sequence

from mlxstacks.routing.candidate_losses import Candidate, CandidateLosses, candidate
from mlxstacks.routing.outcomes import Found, Rules
from mlxstacks.routing.random_stack import random_name

# Keys of `Outcome.control`: chat at its floor alone; the best set and the random stack of a domain.
FLOOR, WITH_BEST = "floor", "best+"


def add_control(
    rules: Rules, found: Sequence[Found], losses: CandidateLosses
) -> list[dict[str, float]]:
    """For each search: the loss with each random domain alone (by `random_name`), with it on top of
    the best set (WITH_BEST and its name) and, where there is a floor, with that alone (FLOOR).

    losses: on a model that has the random stacks.
    """
    asked = [
        (number, key, one)
        for number, result in enumerate(found)
        for key, one in _candidates(rules, number, result)
    ]
    made = losses([one for _, _, one in asked])
    controls: list[dict[str, float]] = [{} for _ in found]
    for (number, key, _), loss in zip(asked, made, strict=True):
        controls[number][key] = loss
    return controls


def _candidates(rules: Rules, number: int, result: Found) -> list[tuple[str, Candidate]]:
    floor, best = rules.floor_alone(), rules.weights(result.best)
    wanted = [(FLOOR, candidate(number, floor))] if floor else []
    for domain in rules.domains:
        name = random_name(domain)
        wanted.append((name, candidate(number, {**floor, name: 1.0})))
        if best:
            wanted.append((f"{WITH_BEST}{name}", candidate(number, {**best, name: 1.0})))
    return wanted

"""Which domains answer an item in each mode of a store, decided on its prompt alone.

base        none
ungated     all at 1
routed      those above the router's threshold, by their score (1 where hard)
oracle      the item's own domain at 1; the base for an item without one, or of one without stacks
random      random stacks of equal norm in the place of oracle's
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mlxstacks.routing.candidate_losses import Weights
from mlxstacks.routing.random_stack import random_name
from mlxstacks.routing.router import PromptRouter
from mlxstacks.studies.benchmarks.settings import ArmName


class Routes:
    """Weights of prompts in one mode. domains: that can answer. router: of the mode routed.

    A prompt is routed once, and what was decided is kept, whatever asks for it again.
    """

    def __init__(
        self,
        mode: ArmName,
        domains: Sequence[str] = (),
        router: PromptRouter | None = None,
        hard: bool = False,
    ) -> None:
        self.mode, self._domains, self._router, self._hard = mode, tuple(domains), router, hard
        self._routed: dict[str, Weights] = {}
        self._gaps = 0
        self._without: dict[str, str] = {}  # prompt -> why the base answered it
        self._unserved: dict[str, str] = {}  # prompt -> its domain, which has no stacks

    def of(self, prompt: str, domain: str | None = None) -> Weights:
        """(domain, weight) of those that answer; none for the base. domain: the item's label.

        Raises: InputError: a prompt that has no tokens cannot be routed.
        """
        if self.mode == "ungated":
            return tuple((name, 1.0) for name in self._domains)
        if self.mode in ("oracle", "random"):
            return self._labelled(prompt, domain)
        if self.mode != "routed":
            return ()
        if not prompt.strip():
            self._without[prompt] = "without a prompt to route on"
            return ()
        if prompt not in self._routed:
            self._routed[prompt] = self._route(prompt)
        return self._routed[prompt]

    def _route(self, prompt: str) -> Weights:
        assert self._router is not None, "mode routed needs a router"
        # One prompt at a time: its scores then have the same bits whatever else is asked.
        scores = self._router.score(prompt)
        route = self._router.decide(scores, hard=self._hard, routable=self._domains)
        self._gaps += route.gap
        return tuple(route.weights.items())

    def _labelled(self, prompt: str, domain: str | None) -> Weights:
        if domain in self._domains:
            assert domain is not None
            return ((random_name(domain) if self.mode == "random" else domain, 1.0),)
        if domain is None:
            self._without[prompt] = "without a label"
        else:
            self._unserved[prompt] = domain
        return ()

    def notes(self) -> list[str]:
        """Prompts that the base answered in the place of stacks, by the reason."""
        counts = Counter(self._without.values())
        if self._unserved:
            domains = ", ".join(sorted(set(self._unserved.values())))
            counts[f"of domains without stacks ({domains})"] = len(self._unserved)
        return [
            f"{self.mode}: {count} prompts {why} were answered by the base."
            for why, count in counts.items()
        ]

    def details(self) -> dict[str, Any]:
        """Of mode routed: prompts that were routed, those of them that no domain fits."""
        if self.mode != "routed":
            return {}
        active = [len(weights) for weights in self._routed.values()]
        mean = sum(active) / len(active) if active else None
        return {"prompts_routed": len(active), "gaps": self._gaps, "mean_active_domains": mean}

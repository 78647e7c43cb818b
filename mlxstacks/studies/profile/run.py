"""`mlxstacks profile`: which experts groups of prompts go to, layer by layer.

The plan (prompts, tokens, thresholds, tests) is written and hashed before the first prompt. The
choices of each group are kept when they are counted, so a run that was stopped goes on with the
next group.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model
from mlxstacks.errors import InputError, NonFiniteModelError
from mlxstacks.files.checkpoint import check_unchanged, fingerprint, open_checkpoint
from mlxstacks.files.disk import mlx_write_errors, user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import PLACES
from mlxstacks.layers.switch_choices import (
    SOFTMAX_BLOCKS,
    SwitchLayer,
    chosen_weights,
    find_switches,
    hearing,
    untrained_routers,
)
from mlxstacks.studies.profile.analysis import (
    MOST_SHOWN,
    Choices,
    against_untrained,
    analyse,
    blocks,
    differing_bits,
    outcome,
    plan_table,
    verdict,
)
from mlxstacks.studies.profile.data import has_template, items_sha256, read_groups
from mlxstacks.studies.profile.measures import (
    LENGTH_RATIO,
    comparable,
    expected_bias,
    least_excess,
    length_strata,
    usual_top_experts,
)
from mlxstacks.studies.profile.settings import (
    DIFFERENT_BELOW,
    HALVES_MARGIN,
    SHARED_ABOVE,
    ProfileSettings,
)
from mlxstacks.studies.train.setup import prepare_base
from mlxstacks.study.document import Standing
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.plan import PLAN
from mlxstacks.study.progress import WholeProgress
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import recorded_fingerprint, work_path
from mlxstacks.training.modes import evaluating

ABOUT = {
    "kind": "profile",
    "title": "Routing profile",
    "question": "Do groups of prompts go to different experts, and where?",
}
HYPOTHESIS = (
    "Groups of prompts use different experts, and the layers where they do so most are the same "
    "for all groups"
)
COUNTS, CHOICES = "routing_counts.safetensors", "choices"
Progress = Callable[..., None]


def run(
    settings: ProfileSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Count, compare, and write result, counts and plots to `settings.save_path`.

    Raises: InputError: no model, data or target, a dense model, or prompts that cannot be used.
    """
    if settings.model is None or settings.data is None or settings.save_path is None:
        raise InputError("profile needs model, data and save_path")
    return run_study(_Profile(settings, progress, dry_run), dry_run=dry_run, progress=progress)


class _Profile(Study):
    artifacts = provenance = (COUNTS,)
    settings: ProfileSettings

    def __init__(self, settings: ProfileSettings, progress: Progress | None, dry_run: bool) -> None:
        self.settings, self.progress, self.notes = settings, progress, list[str]()
        self.inputs, self.dry_run = (settings.model, settings.data), dry_run
        self.plot_formats = [settings.plot_format] if settings.plots else []

    def planned(self) -> Result:
        settings = self.settings
        shown = settings.model_dump(mode="json", exclude=PLACES)
        head = Result(**ABOUT, status="planned", settings=shown)
        if self.dry_run and not user_path(str(settings.model)).is_dir():
            note = f"{settings.model} is not a directory here: nothing of it could be looked at."
            return head.model_copy(update={"notes": (note,)})
        checkpoint = open_checkpoint(resolve_model(str(settings.model)))
        self.directory = checkpoint.directory
        self.model, tokenizer, _ = base_model.load(checkpoint.directory, lazy=True)
        self.switches = _switches(self.model, settings)
        # Before the base may be widened to float32, when its bits can still be read off.
        self.about_layers = [_about(self.model, switch) for switch in self.switches]
        self.in_float32 = prepare_base(self.model, None, self.notes)
        self.groups = read_groups(settings, tokenizer)
        self.whole = WholeProgress(self.progress, 1.25 * self._prompts())
        if settings.chat_template and not has_template(tokenizer):
            self.notes.append("The model has no chat template: prompts went in as plain text.")
        self._note_groups()
        if difference := differing_bits(self.about_layers):
            self.notes.append(difference)
        if self.plot_formats and len(self.groups) > MOST_SHOWN:
            self.notes.append(f"Plots show the first {MOST_SHOWN} of {len(self.groups)} groups.")
        self.rule = _rule(settings, self.switches)
        plan = work_path(user_path(str(settings.save_path))) / PLAN
        recorded = recorded_fingerprint(plan, "base_fingerprint", resume=settings.resume)
        self.plan = self._plan(fingerprint(checkpoint, recorded))
        if (alike := self.plan["comparable_prompts"]) < self._prompts():
            self.notes.append(
                f"{alike} of {self._prompts()} prompts are as long as one of another group (within "
                f"{LENGTH_RATIO:g} times); the test exchanges these alone."
            )
        tokens, first = self.groups[0].tokens, self.switches[0]
        least = least_excess(
            len(self.groups), first.num_experts, len(self.switches), tokens * _top_k(first.block),
            self.rule.alpha,
        )  # fmt: skip
        # Told with the plan, and no part of it: it follows from what is.
        power = (
            f"smallest divergence beyond chance that is found at 80% power, alpha "
            f"{self.rule.alpha:g}: {least:.2g} nats with {tokens:,} tokens a group, if all choices "
            "were independent; half of it needs twice the tokens"
        )
        self.data = {
            "groups": [group.as_json() for group in self.groups], "layers": self.about_layers
        }  # fmt: skip
        return head.model_copy(
            update={
                "standing": Standing(status="planned"), "plan": self.plan, "data": self.data,
                "power": (power,), "blocks": (plan_table(self.plan),),
                "notes": tuple(self.notes),
            }
        )  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step]:
        for place, group in enumerate(self.groups):
            file = _group_file(place)
            yield Step(group.name, partial(self._count, place, file), (file,))
        check_unchanged(self.directory, self.plan["base_fingerprint"])
        yield Step("counts", lambda out: _save(out / COUNTS, self._choices(work).counts), (COUNTS,))

    def conclude(self, work: Path) -> Result:
        choices = self._choices(work)
        shuffled = self.whole.part(self._prompts() / 4, "shuffled labels")
        tables = analyse(choices, self.rule, lambda done: shuffled(done, self.rule.permutations))
        if self.rule.untrained:
            draws = (self._documents(work, name) for name in _names(self.rule.untrained)[1:])
            tables["untrained"] = against_untrained(choices, draws, self.rule.seed)
        # plots take many seconds, in which a bar would stand at what was before
        self.whole.part(0, "plots" if self.plot_formats else "report")(1, 1)
        return Result(
            **ABOUT, status="done",
            outcome=outcome(tables, self.rule.alpha), verdict=verdict(tables, self.rule.alpha),
            data={**self.data, "tables": tables},
            blocks=blocks(tables, self.data["groups"], self.about_layers, choices.counts),
        )  # fmt: skip

    def _plan(self, base_fingerprint: str) -> dict[str, Any]:
        first, tokens = self.switches[0], self.groups[0].tokens
        labels, lengths = self._labels_and_lengths()
        return {
            "kind": "profile",
            "hypothesis": HYPOTHESIS,
            "metric": "KL(group || unweighted mean of groups) by layer, nats",
            "counted": "tokens of content; those of the chat template are not",
            "measure": self.settings.measure,
            "base_fingerprint": base_fingerprint,
            "base_in_float32": self.in_float32,
            "layers": [switch.layer for switch in self.switches],
            "experts": first.num_experts,
            "tokens_per_group": tokens,
            "prompts": {group.name: len(group.prompts) for group in self.groups},
            "data": {group.name: group.sha256 for group in self.groups},
            "items_sha256": items_sha256(self.groups),
            "test": f"{self.rule.permutations} shuffles of whole prompts among those of like "
            f"length (at most {LENGTH_RATIO:g} times the shortest); {self.rule.halves} split "
            "halves",
            "comparable_prompts": comparable(length_strata(lengths), labels),
            "control": f"{self.rule.untrained} draws of untrained routers on the same tokens",
            "thresholds": {
                "alpha": self.rule.alpha,
                "different_below": DIFFERENT_BELOW,
                "shared_above": SHARED_ABOVE,
                "halves_margin": HALVES_MARGIN,
            },
            "top_layers": self.rule.top_layers,
            "top_experts": self.rule.top_experts,
            "seeds": [self.rule.seed],
            "least_p": 1 / (1 + self.rule.permutations),
            "expected_bias_nats": expected_bias(
                len(self.groups), first.num_experts, tokens * _top_k(first.block)
            ),
        }

    def _note_groups(self) -> None:
        cut = {group.name: group.cut for group in self.groups if group.cut}
        if cut:
            counts = ", ".join(f"{name} {count}" for name, count in cut.items())
            self.notes.append(
                f"Prompts longer than {self.settings.max_seq_length} tokens were cut: {counts}."
            )
        short = [g for g in self.groups if g.available < self.settings.questions]
        if short:
            counts = ", ".join(f"{group.name} {group.available}" for group in short)
            self.notes.append(f"Fewer than {self.settings.questions} prompts there: {counts}.")
        if len(self.groups) < 4:
            self.notes.append(
                f"With {len(self.groups)} groups the pooled routing is largely each group's own: "
                "they share top layers by construction. Four or more say something of depth."
            )
        unused = sum(group.unused for group in self.groups)
        if unused:
            whole = [group.name for group in self.groups if not group.unused]
            why = "" if self.settings.tokens or not whole else f", all that {whole[0]} has"
            self.notes.append(
                f"{unused} prompts drawn were not needed: every group counts "
                f"{self.groups[0].tokens:,} tokens{why}."
            )

    # --- counting ---------------------------------------------------------------------------------

    def _count(self, place: int, file: str, out: Path) -> None:
        size = len(self.groups[place].prompts)
        progress = self.whole.part(size, self.groups[place].name)
        counts = count_choices(
            self.model, self.switches, [prompt.tokens for prompt in self.groups[place].prompts],
            is_content=[prompt.is_content for prompt in self.groups[place].prompts],
            batch_size=self.settings.batch_size, weights=self.settings.measure == "weights",
            untrained=self.settings.untrained, seed=self.settings.seed,
            tick=lambda done: progress(done, size),
        )  # fmt: skip
        _save(out / file, *counts)

    def _documents(self, work: Path, name: str = CHOICES) -> np.ndarray:
        """(n, L, E), of the model's routers or of a draw of untrained ones; always from the files,
        so that a run that was stopped gives the same numbers.
        """
        files = [work / _group_file(place) for place in range(len(self.groups))]
        return np.concatenate([_read(file, name) for file in files])

    def _choices(self, work: Path) -> Choices:
        return Choices(
            self._documents(work),
            *self._labels_and_lengths(),
            tuple(group.name for group in self.groups),
            tuple(switch.layer for switch in self.switches),
        )

    def _labels_and_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Of all prompts, (n,) each."""
        sizes = [len(group.prompts) for group in self.groups]
        lengths = [prompt.length for group in self.groups for prompt in group.prompts]
        return np.repeat(np.arange(len(sizes)), sizes), np.array(lengths)

    def _prompts(self) -> int:
        return sum(len(group.prompts) for group in self.groups)


def count_choices(
    model: nn.Module,
    switches: Sequence[SwitchLayer],
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    is_content: Sequence[Sequence[bool]] | None = None,
    weights: bool = False,
    untrained: int = 0,
    seed: int = 0,
    tick: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Choices of every prompt, layer and expert, (1 + untrained, n, L, E) float64: of the model's
    routers, then of draws of untrained ones, which see the same; padding counts nothing.

    is_content: of every token of every prompt whether its choices count; None: all do. weights: sum
    the router's weights of the choices instead. tick: called with the prompts done.
    Laws: a draw's choices in the first layer are those of the model with that router in it;
    independent of batch size and of padding, as far as the model's arithmetic is.
    Raises: ValueError: an empty prompt, or a mixture that does not see every token;
        NonFiniteModelError: NaN or Inf in what a mixture sees.
    """
    if not all(prompts):
        raise ValueError("every prompt needs a token")
    routers, experts = 1 + untrained, switches[0].num_experts
    counts = np.zeros((len(prompts), len(switches), routers * experts))
    drawn: dict[int, mx.array] = {}
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    heard: dict[int, tuple[mx.array, mx.array | None]] = {}
    is_finite: dict[int, mx.array] = {}

    def hear(place: int, x: mx.array, indices: mx.array) -> None:
        # Some blocks give (B, T, top_k), some (B * T, top_k): the order of tokens is the same.
        top_k, width, switch = indices.shape[-1], x.shape[-1], switches[place]
        chosen = [indices.reshape(-1, 1, top_k)]
        weight = [chosen_weights(switch, x, indices).reshape(-1, 1, top_k)] if weights else []
        if untrained:
            if place not in drawn:
                drawn[place] = untrained_routers(switch, width, untrained, seed).astype(x.dtype)
            logits = (x.reshape(-1, width) @ drawn[place]).reshape(-1, untrained, experts)
            top = mx.argpartition(-logits, kth=top_k - 1, axis=-1)[..., :top_k]
            chosen.append(top.astype(indices.dtype))
            weight += [chosen_weights(switch, x, top, logits)] if weights else []
        # Experts of a router stand behind those of the router before it; (tokens, routers, top_k).
        offsets = experts * mx.arange(routers, dtype=indices.dtype)[:, None]
        told = mx.concatenate(chosen, axis=1) + offsets
        heard[place] = told, mx.concatenate(weight, axis=1) if weight else None
        is_finite[place] = mx.isfinite(x).all()

    with base_model.gated_delta_installed(), evaluating(model), hearing(switches, hear):
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            tokens, real = _padded([prompts[place] for place in places])
            counted = real.copy()
            if is_content is not None:
                counted[real] = np.concatenate([is_content[place] for place in places])
            heard.clear()
            model(mx.array(tokens))
            mx.eval(heard, is_finite)
            for place, finite in is_finite.items():
                if not finite.item():
                    raise NonFiniteModelError(f"the input of {switches[place].path}")
            owner = np.repeat(np.arange(len(places)), tokens.shape[1])[counted.reshape(-1)]
            for layer, (indices, weight) in heard.items():
                counts[places, layer] = _per_prompt(
                    indices, weight, counted.reshape(-1), owner, (len(places), counts.shape[2])
                )
            if tick:
                tick(start + len(places))
    heard.clear()
    shape = (len(prompts), len(switches), routers, experts)
    return counts.reshape(shape).transpose(2, 0, 1, 3)  # (1 + untrained, n, L, E)


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """tokens (B, T) int32, padded on the right, which a causal model's tokens never see; and which
    of them are real, (B, T) bool.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    real = np.arange(lengths.max()) < lengths[:, None]  # (B, T)
    tokens = np.zeros(real.shape, dtype=np.int32)
    tokens[real] = np.concatenate([np.asarray(prompt) for prompt in prompts])
    return tokens, real


def _per_prompt(
    indices: mx.array,
    weight: mx.array | None,
    counted: np.ndarray,
    owner: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    """indices (B * T, routers, top_k), counted (B * T,) bool, owner (counted tokens,) -> shape:
    (B, experts of all routers).
    """
    if len(indices) != len(counted):
        raise ValueError(
            f"a mixture got {len(indices)} tokens of {len(counted)}; its choices cannot be "
            "assigned to prompts"
        )
    of_tokens = np.array(indices).reshape(len(counted), -1)[counted]  # (tokens, routers * top_k)
    chosen = of_tokens.astype(np.int64)
    cells = (owner[:, None] * shape[1] + chosen).reshape(-1)
    amounts = None
    if weight is not None:
        amounts = np.array(weight).reshape(len(counted), -1)[counted].reshape(-1)
    return np.bincount(cells, amounts, minlength=shape[0] * shape[1]).reshape(shape)


def _group_file(place: int) -> str:
    return f"group-{place}.safetensors"


def _names(untrained: int) -> list[str]:
    """Of the arrays of a group's file: the model's own choices, then those of each draw."""
    return [CHOICES, *(f"untrained_{number}" for number in range(untrained))]


def _save(path: Path, *choices: np.ndarray) -> None:
    """choices: as float32."""
    arrays = [mx.array(array.astype(np.float32)) for array in choices]
    with mlx_write_errors(path):
        base_model.save_arrays(path, dict(zip(_names(len(arrays) - 1), arrays, strict=True)))


def _read(path: Path, name: str) -> np.ndarray:
    return np.array(base_model.load_arrays(path)[0][name]).astype(np.float64)


def _rule(settings: ProfileSettings, switches: Sequence[SwitchLayer]) -> ProfileSettings:
    """The settings with their top_experts. Raises: InputError for more than there are."""
    experts = switches[0].num_experts
    top_experts = settings.top_experts or usual_top_experts(experts)
    if top_experts >= experts:
        raise InputError(
            f"top_experts is {top_experts}; a layer has {experts} experts: ask for at most "
            f"{experts - 1}"
        )
    if settings.top_layers >= len(switches):
        raise InputError(
            f"top_layers is {settings.top_layers}; {len(switches)} layers have experts: ask for at "
            f"most {len(switches) - 1}"
        )
    return settings.model_copy(update={"top_experts": top_experts})


def _switches(model: nn.Module, settings: ProfileSettings) -> list[SwitchLayer]:
    try:
        switches = find_switches(model)
    except ValueError as error:
        raise InputError(f"{settings.model}: {error}") from None
    kind = type(switches[0].block).__name__
    if settings.measure == "weights" and kind not in SOFTMAX_BLOCKS:
        raise InputError(
            f"measure weights: the router of a {kind} is not known here (known: "
            f"{', '.join(SOFTMAX_BLOCKS)}); use --measure counts"
        )
    return switches


def _top_k(block: nn.Module) -> int:
    """Experts a token, as the block calls them; 1 where it has another name for it."""
    names = ("top_k", "num_experts_per_tok", "num_experts_per_token")
    return next((int(getattr(block, name)) for name in names if hasattr(block, name)), 1)


def _about(model: nn.Module, switch: SwitchLayer) -> dict[str, Any]:
    """Kind of attention, and bits of experts and router (None: plain floats)."""
    layer = model.layers[switch.layer]
    experts = {getattr(m, "bits", None) for m in switch.module.children().values()
               if hasattr(m, "num_experts")}  # fmt: skip
    gate = next((switch.block[n] for n in ("gate", "router") if n in switch.block), None)
    return {
        "layer": switch.layer,
        "path": switch.path,
        "experts": switch.num_experts,
        "attention": "linear" if "linear_attn" in layer else "full",
        "expert_bits": "/".join(str(b or "float") for b in sorted(experts, key=str))
        if experts != {None} else None,
        "router_bits": getattr(gate, "bits", None),
    }  # fmt: skip

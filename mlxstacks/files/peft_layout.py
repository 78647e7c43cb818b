"""Names of modules and layouts of experts, of Hugging Face's models with PEFT and of mlx-lm.

    Llama family       model.layers.N.self_attn.q_proj        the same
    Qwen3.5, Qwen3.5-MoE
      whole model      model.language_model.layers.N.X        language_model.model.layers.N.X
      text model       model.layers.N.X, lm_head              language_model.model.layers.N.X, ...
    experts (any)      ....mlp.experts: gate_up_proj,         ....mlp.switch_mlp.gate_proj,
                       down_proj                              .up_proj, .down_proj
    Mixtral            ....mlp.experts, ....mlp.gate;         ....block_sparse_moe.switch_mlp,
                       before transformers 5                  ....block_sparse_moe.gate
                       ....block_sparse_moe.experts.0.w1

A text-model name does not say which family it is of: `has_language_model` collects the evidence.
Where the model is at hand, its own modules decide (`in_model`).

Experts: a base parameter is (E, out, in): gate_up_proj (E, 2I, H), gate above up, and down_proj
(E, H, I). PEFT (`target_parameters`) keeps one pair of matrices for all experts; A is grouped by
expert, B interleaves them:

    current, PEFT >= 0.19.1   A (E*R, in)    B (out, R*E)   delta[e] = B_e A_e
    legacy, before            A (E*R, out)   B (in, R*E)    delta[e] = A_e^T B_e^T

The parameters of one module are nested wrappers: gate_up_proj is the inner one, whose keys carry a
`.base_layer`. mlx-lm has separate gate and up, so a pair of rank R each becomes one of rank 2R: A
is stacked, B block-diagonal, alpha doubled so that alpha / rank stays.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mlxstacks.errors import AdapterError
from mlxstacks.files.lora_modules import LoraModule, StoredPair, is_zero, widened
from mlxstacks.files.settings import PeftLayout
from mlxstacks.files.shards import DTYPES
from mlxstacks.ops.affine import Array

EXPERTS = re.compile(r"^(?P<block>.+)\.experts$")
ONE_EXPERT = re.compile(
    r"^(?P<block>.+)\.experts\.(?P<expert>\d+)\.(?P<name>gate_proj|up_proj|down_proj|w[123])$"
)
# All experts in one tensor of three axes, as Tinker and SGLang name them.
STACKED_EXPERTS = re.compile(
    r"^(?P<block>.+)\.experts\.(?P<name>gate_up_proj|gate_proj|up_proj|down_proj|w[123])$"
)
EXPERT_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
SWITCH = re.compile(r"^(?P<block>.+)\.switch_mlp\.(?P<name>gate_proj|up_proj|down_proj)$")
# What transformers 5 calls `mlp`.
OLD_BLOCK = "block_sparse_moe"
_OLD_BLOCK = re.compile(rf"\.{OLD_BLOCK}(?=\.|$)")

# Where mlx-lm's `sanitize` finds the text model, and where its classes keep it.
_TEXT_PREFIX = re.compile(r"^(model\.|backbone\.)?(language_model\.)?(model\.)?")
# deepseek_v41 keeps the stacked experts in `mlp.experts`.
_EXPERTS_OF_SWITCH = re.compile(r"\.experts(?=\.switch_mlp\.)")
_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe)$")
_ROUTER = re.compile(r"\.mlp\.gate$")
# A gated-delta layer's parts as Qwen3.5 has them; Qwen3-Next has in_proj_qkvz and in_proj_ba.
_QWEN35_PART = re.compile(r"\.linear_attn\.in_proj_(qkv|z|a|b)$")
_QWEN35_NAME = re.compile(r"qwen3[._]5", re.IGNORECASE)


def is_embedding_name(path: str) -> bool:
    """Whether a module of this name is an embedding table (embed_tokens, wte, ...)."""
    return _EMBEDDING.search(path) is not None


def is_router_name(path: str) -> bool:
    """Whether this is the router of a mixture of experts, which transformers 5 keeps as a bare
    parameter `mlp.gate.weight`."""
    return _ROUTER.search(path) is not None


def has_language_model(paths: Iterable[str], config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm puts these modules under `language_model`, as it does for Qwen3.5.

    paths: module names of a Hugging Face model. config: a PEFT adapter_config.json, which names the
    class or the hub id of the base.
    """
    mapping = config.get("auto_mapping")
    named = [config.get("base_model_name_or_path")]
    named += [mapping.get("base_model_class")] if isinstance(mapping, Mapping) else []
    if any(isinstance(name, str) and _QWEN35_NAME.search(name) for name in named):
        return True
    return any(_QWEN35_PART.search(p) or "language_model." in p for p in paths)


def to_mlx(path: str, language_model: bool) -> str:
    """mlx-lm's name of a Hugging Face module (experts apart: those are split, see `SWITCH`).

    Law: to_mlx(to_hub(p), has_language_model of p) is p for names of either family.
    """
    if path.startswith("model.language_model."):
        return "language_model.model." + path.removeprefix("model.language_model.")
    if language_model and not path.startswith("language_model."):
        return "language_model." + path
    return path


def text_name(path: str) -> str:
    """What all names of one module of a text model have in common: of Hugging Face's versions, its
    whole and text models, and mlx-lm's class. Names of other towers and heads keep their prefix.

    Law: text_name(to_mlx(p)) is text_name(p), and so it is of to_hub(p).
    """
    name = _EXPERTS_OF_SWITCH.sub("", _TEXT_PREFIX.sub("", path))
    return _OLD_BLOCK.sub(".mlp", name)


def in_model(paths: Iterable[str], modules: Collection[str]) -> list[str]:
    """The module that each path names, which may be of another version or wrapping of the model;
    the path itself where that is one, or none or several are meant.
    """
    known, by_name = set(modules), dict[str, list[str]]()
    for module in modules:
        by_name.setdefault(text_name(module), []).append(module)

    def module_of(path: str) -> str:
        same = [path] if path in known else by_name.get(text_name(path), [])
        return same[0] if len(same) == 1 else path

    return [module_of(path) for path in paths]


def to_hub(path: str, whole_model: bool = False, model_type: str | None = None) -> str:
    """The name of an mlx-lm module (experts apart) in transformers 5.

    whole_model: name it as in the whole Qwen3.5 model, not as in its text model; PEFT loads an
    adapter only into the class whose names it has, and leaves out the rest with a warning.
    model_type: of the model's config, where known: Granite keeps `block_sparse_moe`.
    """
    if not (model_type or "").startswith("granitemoe"):
        path = _OLD_BLOCK.sub(".mlp", path)
    if path.startswith("language_model.model."):
        prefix = "model.language_model." if whole_model else "model."
        return prefix + path.removeprefix("language_model.model.")
    return path.removeprefix("language_model.")


LAYOUTS: tuple[PeftLayout, ...] = ("current", "legacy")
PARAMETERS = ("gate_up_proj", "down_proj")  # inner wrapper first, the order in transformers
FIRST_CURRENT_VERSION = (0, 19, 1)
_ROWS_AT_ONCE = 64  # of interleaved experts

# How a fused pair was built, kept in the file's metadata; zero adapters do not show it otherwise.
SHARED, BLOCKS, GATE_ONLY, UP_ONLY = "shared", "blocks", "gate_proj", "up_proj"


@dataclass(frozen=True, slots=True)
class FusedPair(StoredPair):
    """One expert parameter as PEFT stores it: lora_a (E*R, X), lora_b (Y, R*E)."""

    block: str  # hub name of the MoE block, `....mlp`
    parameter: str
    rank: int
    scale: float

    @property
    def name(self) -> str:
        return f"{self.block}.experts.{self.parameter}"

    def problem(self) -> str | None:
        """Why the shapes are no fused pair; None when they are."""
        rows, columns = self.lora_a.shape[0], self.lora_b.shape[1]
        shapes = f"{self.name}: lora_A {list(self.lora_a.shape)}, lora_B {list(self.lora_b.shape)}"
        if rows != columns:
            return f"{shapes}: rank x experts differs"
        return f"{shapes}: rank {self.rank} does not divide {rows}" if rows % self.rank else None

    def dims(self, layout: PeftLayout) -> tuple[int, int]:
        """(in, out) of the base parameter if the file has this layout."""
        x, y = self.lora_a.shape[1], self.lora_b.shape[0]
        return (x, y) if layout == "current" else (y, x)

    def read_switch(
        self,
        half: str,
        layout: PeftLayout,
        rows: slice = slice(None),
        ranks: slice = slice(None),
    ) -> Array:
        """lora_a (E, R, in) or lora_b (E, out, R) with these rows of out, and ranks. Exact."""
        if (half == "lora_a") == (layout == "current"):
            raw = self.read("lora_a").reshape(-1, self.rank, self.lora_a.shape[1])  # (E, R, X)
            return raw[:, ranks] if half == "lora_a" else raw[:, ranks, rows].swapaxes(1, 2)
        count, columns = self.lora_b.shape
        first, last, _ = (rows if half == "lora_b" else slice(None)).indices(count)
        shape = columns // self.rank, last - first, len(range(self.rank)[ranks])
        out = np.empty(shape, DTYPES[self.dtype][1])  # (E, Y, R)
        for start in range(first, last, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, last)
            part = self.read("lora_b", start, stop).reshape(stop - start, self.rank, -1)
            out[:, start - first : stop - first] = part[:, ranks].transpose(2, 0, 1)
        return out if half == "lora_b" else out.swapaxes(1, 2)


def choose_layout(
    pairs: Sequence[FusedPair],
    hidden: int | None,
    version: tuple[int, ...] | None,
    asked: PeftLayout | None,
) -> PeftLayout:
    """The one layout that all pairs fit.

    hidden: width of the model's hidden state, where known. version: PEFT that wrote the file; it
    decides only where the shapes fit both layouts. asked: the user's word.

    Raises: AdapterError when none fits, `asked` does not, or both do and nothing decides.
    """
    fitting = [layout for layout in LAYOUTS if _fits(pairs, layout, hidden)]
    shapes = "; ".join(
        f"{p.name} lora_A {list(p.lora_a.shape)} lora_B {list(p.lora_b.shape)}" for p in pairs[:2]
    )
    known = f" with hidden size {hidden}" if hidden else ""
    if not fitting or (asked is not None and asked not in fitting):
        wanted = f"the layout {asked!r}" if asked and fitting else "neither layout of PEFT"
        raise AdapterError(f"experts fit {wanted}{known}: {shapes}")
    if asked is not None:
        return asked
    if len(fitting) == 1:
        return fitting[0]
    if version is not None:
        return "current" if version >= FIRST_CURRENT_VERSION else "legacy"
    raise AdapterError(
        f"experts fit both layouts of PEFT{known}: {shapes}; say which wrote them with "
        "--peft-layout current (PEFT >= 0.19.1) or --peft-layout legacy"
    )


def _fits(pairs: Sequence[FusedPair], layout: PeftLayout, hidden: int | None) -> bool:
    """Whether one hidden size and, within a block, one expert width explain every pair."""
    hiddens = set() if hidden is None else {hidden}
    widths: dict[str, set[int]] = {}
    for pair in pairs:
        inner, outer = pair.dims(layout)
        if pair.parameter == "gate_up_proj":
            if outer % 2:
                return False
            inner, outer = outer // 2, inner
        hiddens.add(outer)
        widths.setdefault(pair.block, set()).add(inner)
    return len(hiddens) <= 1 and all(len(inner) == 1 for inner in widths.values())


def split_gate_up(
    pair: FusedPair, layout: PeftLayout, how: str | None
) -> dict[str, tuple[slice, slice]]:
    """Which rows (of out) and ranks of one fused pair are gate_proj's and up_proj's.

    how: the mark that `join_gate_up` left, None in files of PEFT's own. Without it, a B that is
    block-diagonal is split, and a half whose B is zero throughout is dropped.
    Law: these parts of join_gate_up(gate, up) are gate and up, bit for bit.
    """
    b, dtype = pair.read_switch("lora_b", layout), pair.dtype  # (E, 2I, R)
    half, rank = b.shape[1] // 2, pair.rank // 2
    gate, up = slice(half), slice(half, None)
    gate_zero, up_zero = is_zero(b[:, gate], dtype), is_zero(b[:, up], dtype)
    diagonal = (
        pair.rank % 2 == 0 and is_zero(b[:, gate, rank:], dtype) and is_zero(b[:, up, :rank], dtype)
    )
    possible = {SHARED: True, BLOCKS: diagonal, GATE_ONLY: up_zero, UP_ONLY: gate_zero}
    if how is None or not possible.get(how):  # what the numbers show
        if gate_zero != up_zero:
            how = UP_ONLY if gate_zero else GATE_ONLY
        else:
            how = BLOCKS if diagonal and not gate_zero else SHARED
    ranks = (slice(rank), slice(rank, None)) if how == BLOCKS else (slice(None), slice(None))
    parts = {GATE_ONLY: (gate, ranks[0]), UP_ONLY: (up, ranks[1])}
    return {how: parts[how]} if how in parts else parts


def join_gate_up(gate: LoraModule | None, up: LoraModule | None) -> tuple[LoraModule, str]:
    """One switch pair for gate_up_proj, lora_b (E, 2I, R or 2R), and how it was built.

    Raises: AdapterError when the two have other experts, widths or scales.
    """
    if gate is None or up is None:
        only = gate or up
        assert only is not None
        zeros = np.zeros_like(only.lora_b)
        halves = [only.lora_b, zeros] if gate else [zeros, only.lora_b]
        joined = replace(only, lora_b=np.concatenate(halves, axis=1))
        return joined, GATE_ONLY if gate else UP_ONLY
    same = gate.lora_b.shape == up.lora_b.shape and gate.lora_a.shape == up.lora_a.shape
    if not same or gate.scale != up.scale:
        raise AdapterError(
            f"{gate.path} and {up.path} need one shape and scale to share PEFT's gate_up_proj: "
            f"lora_b {list(gate.lora_b.shape)} and {list(up.lora_b.shape)}, scales {gate.scale} "
            f"and {up.scale}"
        )
    if gate.dtype != up.dtype:
        gate, up = widened(gate), widened(up)
    if gate.lora_a.shape == up.lora_a.shape and gate.lora_a.tobytes() == up.lora_a.tobytes():
        return replace(gate, lora_b=np.concatenate([gate.lora_b, up.lora_b], axis=1)), SHARED
    a = np.concatenate([gate.lora_a, up.lora_a], axis=1)  # (E, 2R, K)
    experts, width, rank = gate.lora_b.shape
    b = np.zeros((experts, 2 * width, 2 * rank), dtype=gate.lora_b.dtype)  # (E, 2I, 2R)
    b[:, :width, :rank], b[:, width:, rank:] = gate.lora_b, up.lora_b
    return replace(gate, lora_a=a, lora_b=b), BLOCKS


def as_fused(module: LoraModule) -> tuple[Array, Array]:
    """PEFT's current layout of a switch pair: A (E*R, K), B (N, R*E). Exact."""
    experts, rank, input_dims = module.lora_a.shape
    a = module.lora_a.reshape(experts * rank, input_dims)  # (E*R, K)
    b = module.lora_b.transpose(1, 2, 0).reshape(-1, rank * experts)  # (N, R*E)
    return a, np.ascontiguousarray(b)

"""Steps of `stack` and `train` on tiny models: a table, and a process that trains and counts.

It goes the way of a run, through layers, trainer and freezing; of the guard it takes only the model
as it is before anything is attached.
"""

import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

from mlxstacks import base_model
from mlxstacks.guard.build import lazy_model, read_config
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.attach import add_active, attach_lora, attach_stacks
from mlxstacks.layers.freezing import freeze_active
from mlxstacks.layers.latent import latent_pairs
from mlxstacks.layers.merge_ready import merge_ready_layers, stored_grids
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.selection import ungated
from mlxstacks.layers.settings import LoRASettings, StackSettings, TargetSettings
from mlxstacks.layers.stacked import set_mode, stacked_layers
from mlxstacks.layers.targets import Target, find_targets
from mlxstacks.nano.exports import ASSETS
from mlxstacks.training.boost import call_with_balance
from mlxstacks.training.checkpointing import checkpoint_layers
from mlxstacks.training.modes import prepare_base, set_training_modes
from mlxstacks.training.step import cross_entropy_loss
from tests.counting import Counter
from tests.guard.count_worker import best_at_first, train_counted, whole_batch
from tests.tiny_models import llama_config, qwen_moe_config

MOE = llama_config(64) | {
    "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": qwen_moe_config(64, 8),
    "mixtral": MOE,
    "phi3": llama_config(64) | {"model_type": "phi3"},
    "dense": llama_config(64),
}
KEYS = {
    "hybrid": ("linear_attn.out_proj", "q_proj", "switch_mlp.down_proj"),
    "mixtral": ("v_proj", "switch_mlp.up_proj", "switch_mlp.down_proj"),
    "phi3": ("qkv_proj", "gate_up_proj"),
    "dense": (),
    "nano": ("out_proj", "o_proj", "down_proj"),
}


@dataclass(frozen=True)
class StackCase:
    """A run. stack: settings of a stack, None for a LoRA. frozen: stacks before it. grouped: its
    experts count as large, so that they may take all their rows in one product. form: shared_outer
    or merge_ready of a LoRA. widened: a base of `bits` computes in float32.
    """

    model: str = "hybrid"
    frozen: int = 0
    stack: dict[str, Any] | None = field(default_factory=lambda: {"rank": 4})
    directions: int = 0
    bits: int | None = None
    batch_size: int = 2
    tokens: int = 48
    dropout: float = 0.0
    checkpointed: bool = False
    accumulation: int = 1
    grouped: bool = False
    form: dict[str, Any] = field(default_factory=dict)
    widened: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def config(self) -> dict[str, Any]:
        found = (
            read_config(str(ASSETS / "model"))[0] if self.model == "nano" else MODELS[self.model]
        )
        config = {**found, "dtype": "bfloat16"}
        config.pop("quantization", None)
        if self.bits is not None:
            config["quantization"] = {"group_size": 64, "bits": self.bits, "mode": "affine"}
        return config

    def settings(self) -> GuardSettings:
        return GuardSettings(
            max_seq_length=self.tokens, batch_size=self.batch_size, keys=KEYS[self.model], rank=4,
            stack=self.stack, frozen_stacks=self.frozen, directions=self.directions,
            base="stored" if self.bits and not self.widened else "float32", dropout=self.dropout,
            checkpointing="layers" if self.checkpointed else "none",
            grad_accumulation_steps=self.accumulation, **self.form,
        )  # fmt: skip


def built(case: StackCase) -> nn.Module:
    """The model as a run has it when a round begins."""
    model = lazy_model(case.config())
    keys = iter(mx.random.split(mx.random.key(0), 10_000))

    def draw(path: str, value: mx.array) -> mx.array:
        if not mx.issubdtype(value.dtype, mx.floating):
            return value
        return (0.1 * mx.random.normal(value.shape, key=next(keys))).astype(value.dtype)

    model.update(tree_map_with_path(draw, model.parameters()))
    how = case.form.get("merge_ready")
    grids = stored_grids(model) if how else {}
    if case.settings().base == "float32":
        prepare_base(model, "float32", [], checkpointed=case.checkpointed)
    mx.eval(model.parameters())
    targets = find_targets(model, TargetSettings(projections=KEYS[case.model] or None))
    if case.stack is None:
        shared = bool(case.form.get("shared_outer"))
        settings = LoRASettings(rank=4, dropout=case.dropout, shared_outer=shared)
        layer_of = merge_ready_layers(targets, grids, how)
        attach_lora(model, targets, settings, next(keys), layer_of)
    else:
        stack(model, targets, case, keys)
    set_training_modes(model)
    return model


def stack(
    model: nn.Module, targets: Sequence[Target], case: StackCase, keys: Iterator[mx.array]
) -> None:
    """Freeze stacks one by one, then add the one to train."""
    settings = StackSettings.model_validate(case.stack)
    pairs = None
    if settings.latent_dim is not None:
        pairs = latent_pairs({t.path: t.dims for t in targets}, settings.latent_dim, "base")
    attach_stacks(model, targets)
    set_mode(model, ungated(), None if case.bits else mx.float32)
    for number in range(case.frozen):
        add_active(model, settings, next(keys), pairs)
        freeze_active(model, f"stack-{number}", f"domain-{number}")
    add_active(model, settings, next(keys), pairs)
    for _, layer in stacked_layers(model):
        assert layer.active is not None
        if case.directions:
            square = np.random.default_rng(0).standard_normal((layer.dims.output_dims,) * 2)
            vectors = np.linalg.qr(square)[0][:, : case.directions]
            layer.active.protect(mx.array(vectors.astype(np.float32)))
            mx.eval(layer.active.null_vectors)


def count(case: StackCase, counter: Counter) -> dict[str, int]:
    model = built(case)
    loss = cross_entropy_loss(call_with_balance, 0.01, find_output_head(model)[0])
    with checkpoint_layers(model) if case.checkpointed else nullcontext():
        batches = [whole_batch(case.batch_size, case.tokens)] * case.accumulation
        return train_counted(counter, model, loss, batches, validation=best_at_first())


def main() -> None:
    counter = Counter()
    with base_model.gated_delta_installed():
        for fields in json.load(sys.stdin):
            gc.collect()
            before = counter.live
            case = StackCase(**fields)
            base_model.change.LEAST_EXPERT_BYTES = 0 if case.grouped else 1 << 20
            print(json.dumps(count(case, counter) | {"before": before}), flush=True)


if __name__ == "__main__":
    main()

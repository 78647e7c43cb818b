"""Capability blocks: decoder layers beside a frozen base, on the embeddings that the base gets.

    h = base(embeddings) + sum_d weight_d * block_d(embeddings)        then the base's norm and head
    block(x) = out(norm(layers(x)))

A block's layers are those of the base's architecture, a mixture of low-rank experts beside every
projection (`MoELoRADelta`). `out` (D, D) begins at zero, so a new block adds nothing; protected
directions V (D, k) are taken off its output in training and folded into it at the end. Letters:
B rows, T tokens, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.errors import StoreError
from mlxstacks.files.block_file import BlockFile, BlockHeader
from mlxstacks.files.manifest import DomainRecord, stack_name
from mlxstacks.files.store import Store
from mlxstacks.layers.attach import add_active, attach_stacks
from mlxstacks.layers.nullspace import fold_into, remove_directions
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.targets import find_targets


class CapabilityBlock(nn.Module):
    """layers: decoder layers as mlx-lm calls them, (x, mask, cache)."""

    def __init__(self, layers: Sequence[nn.Module], width: int) -> None:
        super().__init__()
        self.layers = list(layers)
        self.norm = nn.RMSNorm(width)
        self.out = nn.Linear(width, width, bias=False)
        self.out.weight = mx.zeros((width, width))
        self._null_vectors: mx.array | None = None

    def __call__(self, x: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Embeddings (B, T, D) -> what to add to the base's output (B, T, D)."""
        mask = "causal" if x.shape[1] > 1 else None
        if cache is not None:  # rows of a batch are padded on the left
            mask = cache[0].make_mask(x.shape[1], return_array=False, window_size=None)
        for layer, of_layer in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            x = layer(x, mask, cache=of_layer)
        delta: mx.array = self.out(self.norm(x))
        return delta if self._null_vectors is None else remove_directions(delta, self._null_vectors)

    def protect(self, vectors: mx.array | None) -> None:
        """Keep the output out of the span of orthonormal vectors (D, k); None lifts it."""
        self._null_vectors = vectors

    def fold(self) -> None:
        """The protected directions into `out`, then freeze.

        Law: the output is what it was, to rounding, and has no part in the span.
        """
        if self._null_vectors is not None:
            self.out.weight = fold_into(self.out.weight, self._null_vectors)
            self._null_vectors = None
        self.freeze()


def new_block(
    config: Mapping[str, Any],
    num_layers: int,
    stack: StackSettings,
    key: mx.array,
    initial: Callable[[nn.Module], None] | None = None,
) -> CapabilityBlock:
    """A block for a base of this config, whose experts add nothing yet.

    initial: sets the weights of a small model, whose layers become the block's; None: as mlx-lm
        makes them, which draws from MLX's global state.
    """
    shape = {k: v for k, v in config.items() if k not in ("quantization", "layer_types")}
    model = base_model.build_model({**shape, "num_hidden_layers": num_layers})
    if initial is not None:
        initial(model)
    attach_stacks(model, find_targets(model))
    add_active(model, stack, key)
    block = CapabilityBlock(model.layers, int(config["hidden_size"]))
    block.unfreeze()
    return block


class BlockedDecoder(nn.Module):
    """A decoder (what an mlx-lm model has as `model`) with blocks beside it; called as it is.

    Law: where no block has a weight other than 0 it is the decoder, bit for bit.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.blocks: dict[str, CapabilityBlock] = {}
        self._weights: dict[str, float | mx.array] = {}

    @property
    def selected_layers(self) -> list[nn.Module]:
        """Of the blocks that answer: each needs an entry in a cache, behind those of the base."""
        return [layer for name in self._weights for layer in self.blocks[name].layers]

    @property
    def selected(self) -> dict[str, float | mx.array]:
        """Blocks that answer, by name and weight."""
        return dict(self._weights)

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.decoder.layers)

    @property
    def embed_tokens(self) -> nn.Module:
        return self.decoder.embed_tokens

    def select(self, weights: Mapping[str, float | mx.array]) -> None:
        """Blocks by name and weight, for all rows or (B,), for the calls that follow; the others
        add nothing.

        Raises: ValueError naming a block that is not there.
        """
        if unknown := sorted(weights.keys() - self.blocks.keys()):
            raise ValueError(f"no block {', '.join(unknown)}; there are {', '.join(self.blocks)}")
        self._weights = {
            name: weights[name]
            for name in self.blocks
            if name in weights and (isinstance(weights[name], mx.array) or weights[name] != 0)
        }

    def __call__(
        self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        if not self._weights:
            return self.decoder(inputs, cache, input_embeddings)
        x = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        own, of_blocks = cache, None
        if cache is not None:
            own, of_blocks = cache[: len(self.layers)], cache[len(self.layers) :]
            if len(of_blocks) != len(self.selected_layers):
                raise ValueError("the cache was made when other blocks were selected; make another")
        delta: Any = 0.0
        on: Any = False
        for name, weight in self._weights.items():
            block, part = self.blocks[name], None
            if of_blocks is not None:
                part, of_blocks = of_blocks[: len(block.layers)], of_blocks[len(block.layers) :]
            scale = weight[:, None, None] if isinstance(weight, mx.array) else weight
            delta = delta + scale * block(x, part)
            on = mx.logical_or(on, scale != 0)
        norm = self.decoder.norm
        self.decoder.norm = _Added(norm, delta, on)
        try:
            return self.decoder(inputs, own, x)
        finally:
            self.decoder.norm = norm


class _Added(nn.Module):
    """A norm of what it is given and a delta; rows without blocks keep their bits."""

    def __init__(self, norm: nn.Module, delta: mx.array, on: mx.array) -> None:
        super().__init__()
        self._norm, self._delta, self._on = norm, delta, on

    def __call__(self, h: mx.array) -> mx.array:
        normed: mx.array = self._norm(mx.where(self._on, h + self._delta.astype(h.dtype), h))
        return normed


def attach_blocks(model: nn.Module) -> BlockedDecoder:
    """Make a place for blocks in an mlx-lm model of a plain decoder (`model.model` with
    `embed_tokens`, `layers`, `norm`), freeze it, and let its caches hold those of the blocks that
    are selected when they are made.

    Raises: ValueError: another kind of model.
    """
    decoder = model.model
    if not all(hasattr(decoder, name) for name in ("embed_tokens", "layers", "norm")):
        raise ValueError(f"{type(decoder).__name__}: blocks need embed_tokens, layers and norm")
    blocked = BlockedDecoder(decoder)
    model.model = blocked
    model.freeze()

    def make_cache(model: nn.Module) -> list[Any]:
        layers = [*model.layers, *model.model.selected_layers]
        return base_model.make_prompt_cache(SimpleNamespace(layers=layers))

    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"make_cache": make_cache})
    return blocked


def block_arrays(block: CapabilityBlock) -> dict[str, mx.array]:
    """Its parameters by name, float32; those of the experts' noise are not kept."""
    named = tree_flatten(block.parameters())
    return {n: w.astype(mx.float32) for n, w in named if not n.endswith(".noise")}


def store_block(
    store: Store,
    name: str,
    block: CapabilityBlock,
    stack: StackSettings,
    *,
    enabled: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Add a block to a store, as the domain `name`. stack: the settings of its experts. settings:
    what it was trained with, JSON.

    Raises: ValueError: arrays that are not finite; a domain of that name, or of stacks, is there.
        TargetError.
    """
    arrays = block_arrays(block)
    header = BlockHeader(
        stack_name(name, 1), name, store.manifest.base_model, store.manifest.base_fingerprint,
        len(block.layers), stack.model_dump(mode="json"), {n: a.shape for n, a in arrays.items()},
    )  # fmt: skip
    with store.change("train", domain=name) as change:
        record = change.add_stack(arrays, header)
        domain = DomainRecord(name, enabled, (record,), settings=dict(settings or {}))
        # not by `with_domain`: no other block was on while it was trained
        domains = (*change.manifest.domains, domain)
        change.manifest = replace(change.manifest, domains=domains)


def load_block(file: BlockFile, config: Mapping[str, Any]) -> CapabilityBlock:
    """A block for a base of this config, frozen, in evaluation mode. Law: its arrays are those that
    were stored.

    Raises: StoreError: arrays that are not of its settings, or of this base.
    """
    header = file.header
    layers = {name.split(".")[1] for name in header.arrays if name.startswith("layers.")}
    try:
        if len(layers) != header.num_layers:  # before so many are built
            raise ValueError(f"{len(layers)} layers, its header says {header.num_layers}")
        stack = StackSettings.model_validate(header.stack)
        block = new_block(config, header.num_layers, stack, mx.random.key(0))
        if {n: w.shape for n, w in block_arrays(block).items()} != header.arrays:
            raise ValueError("its arrays are not those of its settings and this base")
    except (ValueError, OverflowError) as error:
        raise StoreError(f"block {header.name}: {error}") from None
    block.load_weights(list(file.tensors.items()), strict=False)
    block.freeze()
    block.eval()
    mx.eval(block.parameters())
    return block

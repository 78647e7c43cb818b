"""Between a store's files and a model's stacks: headers, parts by path, latent pairs, serving.

    store = Store.open(path)
    base = fingerprint(checkpoint, store.manifest.base_fingerprint)
    served = serve(model, store, base_fingerprint=base)

attaches places for every enabled stack and fills them.
"""

from collections.abc import Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import __version__
from mlxstacks.errors import StoreError
from mlxstacks.files.manifest import StackRecord
from mlxstacks.files.stack_file import ProjectionShape, StackFile, StackHeader
from mlxstacks.files.store import Store
from mlxstacks.layers.adapted import AdaptedLayer, Dims, projection_dims
from mlxstacks.layers.attach import attach_stacks
from mlxstacks.layers.freezing import add_frozen, stack_from_tensors
from mlxstacks.layers.latent import LatentPair, Pairs, input_group
from mlxstacks.layers.packed import FrozenStack, StackShape
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import StackedLayer, stacked_layers
from mlxstacks.layers.targets import Target

Parts = dict[str, FrozenStack]


def header_of(
    parts: Mapping[str, FrozenStack],
    dims: Mapping[str, Dims],
    settings: StackSettings,
    *,
    round_number: int,
    base_model: str,
    base_fingerprint: str,
    data_sha256: Mapping[str, str] | None = None,
) -> StackHeader:
    """The header of a frozen stack. dims: of the base projection at each path."""
    stack_id = next(iter(parts.values())).id
    return StackHeader(
        name=stack_id.name,
        domain=stack_id.domain,
        round=round_number,
        base_model=base_model,
        base_fingerprint=base_fingerprint,
        projections={path: _projection(part, dims[path]) for path, part in parts.items()},
        alpha=settings.alpha,
        scale_rule=settings.scale_rule,
        projector_mode=settings.projector_mode,
        storage=settings.storage,
        data_sha256=dict(data_sha256 or {}),
        code_version=__version__,
    )


def _projection(part: FrozenStack, dims: Dims) -> ProjectionShape:
    shape = part.shape
    return ProjectionShape(
        form=shape.form,
        num_experts=shape.num_experts,
        rank=shape.rank,
        experts_per_token=shape.top_k,
        scale=shape.scale,
        input_dims=dims.input_dims,
        output_dims=dims.output_dims,
        base_experts=dims.base_experts,
        latent_dim=None if shape.latent is None else shape.latent.dim,
    )


def parts_of(stack: StackFile, latent: Pairs | None = None) -> Parts:
    """A stack's file as frozen parts by path. Law: `stack_tensors` of it are the file's, bit for
    bit.

    latent: the shared projections, for a latent stack; the same objects for all stacks that use
        them, so that these can be packed.
    Raises: StoreError where a latent stack's projections are missing.
    """
    header, pairs = stack.header, latent or {}
    missing = [
        path
        for path, projection in header.projections.items()
        if projection.latent_dim is not None and path not in pairs
    ]
    if missing:
        raise StoreError(f"stack {header.name}: no latent projections for {', '.join(missing)}")
    shapes = {
        path: StackShape(
            p.form, p.num_experts, p.rank, p.experts_per_token, p.scale,
            pairs[path] if p.latent_dim is not None else None,
        )
        for path, p in header.projections.items()
    }  # fmt: skip
    return stack_from_tensors(stack.tensors, StackId(header.name, header.domain), shapes)


# --- latent pairs ---------------------------------------------------------------------------------


def pair_tensors(pairs: Pairs) -> dict[str, mx.array]:
    """The arrays of a shared file: `<group>.d_in` once a group, `<path>.d_out`."""
    inside = {f"{input_group(path)}.d_in": pair.d_in for path, pair in pairs.items()}
    return inside | {f"{path}.d_out": pair.d_out for path, pair in pairs.items()}


def pairs_from(tensors: Mapping[str, mx.array]) -> Pairs:
    """The inverse of `pair_tensors`. Raises: StoreError naming a d_in that is missing."""
    pairs = {}
    for name, d_out in tensors.items():
        path, dot, leaf = name.rpartition(".")
        if leaf != "d_out" or not dot:
            continue
        group = f"{input_group(path)}.d_in"
        if group not in tensors:
            raise StoreError(f"latent projections: {group} is missing")
        pairs[path] = LatentPair(tensors[group], d_out)
    return pairs


class SharedPairs:
    """Latent pairs of a store by the hash of their file, each read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[str, Pairs] = {}

    def of(self, header: StackHeader) -> Pairs:
        """The pairs of a stack; none where it is not latent. Raises: StoreError."""
        wanted = header.shared_sha256
        if wanted is None:
            return {}
        if wanted not in self._read:
            records = {record.sha256: record for record in self._store.manifest.shared}
            if wanted not in records:
                raise StoreError(
                    f"{self._store.path}: stack {header.name} needs the latent projections "
                    f"{wanted[:12]}, which the store does not have; restore it from a copy"
                )
            self._read[wanted] = pairs_from(self._store.read_shared(records[wanted]))
        return self._read[wanted]


# --- serving --------------------------------------------------------------------------------------


def serve(
    model: nn.Module, store: Store, *, base_fingerprint: str | None = None
) -> list[StackRecord]:
    """Attach places for a store's enabled stacks, and fill them in the store's order; returns their
    records.

    base_fingerprint: of the model, to be compared with the store's.
    Raises: StoreError: another base, a damaged file, paths that the model lacks.
    """
    if base_fingerprint is not None:
        store.check_base(base_fingerprint)
    records = store.enabled_stacks()
    pairs = SharedPairs(store)
    files = [store.read_stack(record) for record in records]
    try:
        attach_paths(model, (path for file in files for path in file.header.projections))
        for file in files:
            add_frozen(model, parts_of(file, pairs.of(file.header)))
    except ValueError as error:
        raise StoreError(f"{store.path}: {error}") from error
    return records


def attach_paths(model: nn.Module, paths: Iterable[str]) -> None:
    """Make these modules places for stacks, where they are not already.

    Raises: ValueError listing the paths at which the model has no projection.
    """
    modules = dict(model.named_modules())
    there = {path for path, _ in stacked_layers(model)}
    targets, problems = [], []
    for path in sorted(set(paths) - there):
        module = modules.get(path)
        dims = None if module is None else projection_dims(module)
        if module is None or dims is None or isinstance(module, AdaptedLayer):
            problems.append(f"{path}: no projection that could carry a stack")
        else:
            targets.append(Target(path, -1, path, module, dims))
    if problems:
        raise ValueError("\n  ".join(["the model does not have the stacks' places:", *problems]))
    if targets:
        attach_stacks(model, targets)


def places(model: nn.Module) -> dict[str, StackedLayer]:
    """Path -> projection with stacks."""
    return dict(stacked_layers(model))

"""A meta-router in one safetensors file: float32 tensors and a JSON header.

The header is the safetensors metadata `mlxstacks-router`: JSON with sorted keys, no times. Tensors
by name (letters: D width of the base, h hidden dims, n domains; `router_shapes`):

    token.weight (h, D)           domain_queries (n, h)       hidden_out.weight (h, h)
    global_query (h)              hidden_in.weight (h, 2h)    logit.weight (1, h)
    token_norm, global_norm, domain_norm, hidden_norm: weight and bias (h)
    biases (h), of logit (1); temperature (1)

and those of a gap detector, where it has one, for each part number i of it (r references, q
directions; routing/gap_detector.py says what they are for):

    gap.i.centre (D)   gap.i.directions (q, D)   gap.i.scales (q + 1)   gap.i.references (r, D)

Of the test `tokens` they are q token ids, rising, and their log-probabilities in r domains, last
that of any other token: gap.i.directions (q), gap.i.references (r, q + 1).

Row d of domain_queries and column d of its logits belong to `domains[d]`; everything outside the
network goes by the domain's name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import mlx.core as mx
from pydantic import ConfigDict, Field

from mlxstacks.command_line import command_line
from mlxstacks.errors import StoreError
from mlxstacks.files.manifest import DomainName, Fingerprint, Manifest, Sha256
from mlxstacks.files.stack_file import (
    Dim,
    FileHeader,
    HeadedFile,
    Text,
    read_file,
    write_file,
)
from mlxstacks.files.strict_json import STRICT, JsonObject

METADATA_KEY = "mlxstacks-router"
REPAIR = "restore this file from a copy, or train a router again with `mlxstacks route train`"

Share = Annotated[float, Field(ge=0.0, le=1.0)]


GapTest = Literal["energy", "mahalanobis", "nearest prompt", "tokens"]


@dataclass(frozen=True)
class GapPart:
    """One test of a gap detector. layer: the decoder layer behind which prompts are compared, from
    1; 0 for `tokens`, and for `energy`, which has neither references nor directions. mean,
    deviation: of the test on held-out prompts of known domains.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    test: GapTest
    layer: Annotated[int, Field(ge=0, le=100_000)]
    references: Annotated[int, Field(ge=0, le=1_000_000)]
    directions: Annotated[int, Field(ge=0, le=1_000_000)]
    mean: float
    deviation: Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class GapRule:
    """When a prompt counts as one that no domain fits: where the mean of its parts, each less its
    mean and over its deviation, is above `threshold`. chosen_by: what each candidate found of
    domains that were left out in turn; JSON.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    parts: Annotated[tuple[GapPart, ...], Field(min_length=1, max_length=64)]
    threshold: float
    chosen_by: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class RouterHeader(FileHeader):
    """What a router is for.

    domains: in the order of its logits. stacks: domain -> SHA-256 of the files of its stacks, in
    order, as they were when it was trained. max_tokens, mid_weight, last_weight,
    normalise_features: how prompts become features. chat_domain: the domain that never falls below
    chat_floor, None for none. gaps: its gap detector; None: a gap is where every score is below
    the threshold. training: settings, metrics, hashes of data, split; JSON.
    """

    KIND: ClassVar[str] = "router"
    KEY: ClassVar[str] = METADATA_KEY
    REPAIR: ClassVar[str] = REPAIR

    domains: Annotated[tuple[DomainName, ...], Field(min_length=1, max_length=1024)]
    stacks: dict[DomainName, tuple[Sha256, ...]]
    base_model: Text
    base_fingerprint: Fingerprint
    input_dims: Dim
    hidden_dims: Dim = 512
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    mid_weight: float = 0.45
    last_weight: float = 0.55
    normalise_features: bool = False
    chat_domain: DomainName | None = None
    chat_floor: Share = 0.20
    threshold: Share = 0.12
    training: JsonObject = field(default_factory=dict)
    code_version: Annotated[str, Field(max_length=100)] = ""
    format_version: Literal[1] = 1
    # Not in `repr`: `router_digest` is of it, and logs of gaps have digests of before.
    gaps: GapRule | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """As of any record; without a gap detector there is no such key: the bytes are those of
        versions that knew none.
        """
        value = super().as_json()
        if value["gaps"] is None:
            del value["gaps"]
        return value

    def problems(self) -> Iterator[str]:
        """What in it contradicts itself."""
        names = [name.casefold() for name in self.domains]
        twice = sorted({name for name in names if names.count(name) > 1})
        yield from (f"domains: {name} is named twice" for name in twice)
        for name in sorted({*self.domains} ^ {*self.stacks}):
            yield f"stacks and domains differ in {name}; both name every domain"
        if self.chat_domain is not None and self.chat_domain not in self.domains:
            yield f"chat_domain {self.chat_domain} is none of the domains"
        for part in self.gaps.parts if self.gaps else ():
            wanted = part.test in ("mahalanobis", "nearest prompt"), part.test != "energy"
            if (part.layer > 0, part.references > 0) != wanted:
                yield f"gaps: {part.test} has layer {part.layer}, references {part.references}"

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor name -> (safetensors dtype, shape), in the order of the file."""
        shapes = router_shapes(self.input_dims, len(self.domains), self.hidden_dims)
        for number, part in enumerate(self.gaps.parts if self.gaps else ()):
            shapes |= gap_shapes(number, part, self.input_dims)
        return {name: ("F32", shape) for name, shape in sorted(shapes.items())}


# tensors: shapes in the module docstring.
RouterFile = HeadedFile[RouterHeader]


def router_shapes(
    input_dims: int, num_domains: int, hidden_dims: int = 512
) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a router's network.

    Law: `h D + h n + 3 h^2 + 13 h + 2` numbers in all (spec: 512 D + 512 n + 793,090 for h=512).
    """
    D, n, h = input_dims, num_domains, hidden_dims
    linears = {"token": (h, D), "hidden_in": (h, 2 * h), "hidden_out": (h, h), "logit": (1, h)}
    shapes: dict[str, tuple[int, ...]] = {
        "global_query": (h,), "domain_queries": (n, h), "temperature": (1,)
    }  # fmt: skip
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in ("token_norm", "global_norm", "domain_norm", "hidden_norm"):
        shapes |= {f"{name}.weight": (h,), f"{name}.bias": (h,)}
    return shapes


def gap_shapes(number: int, part: GapPart, input_dims: int) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a part of a gap detector; none of `energy`."""
    r, q, D = part.references, part.directions, input_dims
    shapes: dict[str, tuple[int, ...]] = {}
    if part.test == "tokens":
        shapes = {"directions": (q,), "references": (r, q + 1)}
    elif part.test != "energy":
        shapes = {"centre": (D,), "directions": (q, D), "scales": (q + 1,), "references": (r, D)}
    return {f"gap.{number}.{name}": shape for name, shape in shapes.items()}


def write_router(path: str | Path, tensors: Mapping[str, mx.array], header: RouterHeader) -> str:
    """As `stack_file.write_file`."""
    return write_file(path, tensors, header, "the router")


def read_router(path: str | Path, expected_sha256: str | None = None) -> RouterFile:
    """As `stack_file.read_file`."""
    return read_file(path, RouterHeader, expected_sha256)


class HasManifest(Protocol):
    """A store, as far as `check_router` looks at it."""

    path: Path
    manifest: Manifest


def check_router(header: RouterHeader, store: HasManifest) -> list[str]:
    """Whether a router may route to a store's domains; returns what is worth knowing about it.

    Notes: domains that the router knows and the store does not serve; domains that the store serves
    and the router does not know.
    Raises: StoreError: a router of another base, or trained for other stacks of a domain that is
        served, which would be weighted for what it is not.
    """
    manifest, train = store.manifest, command_line("mlxstacks route train", store.path)
    if manifest.holds_blocks:
        train = "mlxstacks psn blocks"
    if header.base_fingerprint != manifest.base_fingerprint:
        raise StoreError(
            f"{store.path}: the router was trained on {header.base_model} with fingerprint "
            f"{header.base_fingerprint[:12]}, the store's base has "
            f"{manifest.base_fingerprint[:12]}; `{train}` trains one for this store"
        )
    served = {d.name: d for d in manifest.domains if d.enabled and d.stacks}
    changed = [
        name
        for name in header.domains
        if name in served
        and header.stacks[name] != tuple(stack.file.sha256 for stack in served[name].stacks)
    ]
    if changed:
        raise StoreError(
            f"{store.path}: the router was trained for other stacks of {', '.join(changed)}; "
            f"`{train}` trains one for these"
        )
    notes = []
    known = {domain.name for domain in manifest.domains}
    for name in header.domains:
        if name not in served:
            why = "is disabled or has no stacks" if name in known else "is not in the store"
            notes.append(f"The router knows {name}, which {why}: nothing is routed to it")
    unknown = [name for name in served if name not in header.domains]
    if unknown:
        notes.append(
            f"The router does not know {', '.join(unknown)}: nothing is routed there before "
            f"`{train}`"
        )
    return notes

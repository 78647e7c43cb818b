"""What a stack says of itself: the JSON header of its file, and the shapes that follow from it.

Tensors of a projection at module path p (letters as in `ProjectionShape`):

    form             p.lora_a      p.lora_b      p.router (only with E > 1)
    linear, shared   (E, R, K)     (E, N, R)     (E, K) float32
    per_expert       (M, E*R, K)   (M, N, E*R)   (E, K) float32

A latent stack has l in place of K and N.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from mlxstacks.files.manifest import DomainName, Fingerprint, Round, Sha256, StackName
from mlxstacks.files.strict_json import STRICT, record_as_json, record_from

FORMAT_VERSION: Literal[1] = 1

Form = Literal["linear", "shared", "per_expert"]
StorageDtype = Literal["float16", "bfloat16"]
_SAFETENSORS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}

Dim = Annotated[int, Field(ge=1, le=2**31 - 1)]
Small = Annotated[int, Field(ge=1, le=65_536)]
Text = Annotated[str, Field(max_length=4096)]


@dataclass(frozen=True)
class ProjectionShape:
    """One stack at one projection: E experts of R ranks, K input_dims, N output_dims of the base,
    M base_experts (None for a linear), l latent_dim. scale: the factor of the delta.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    form: Form
    num_experts: Small
    rank: Small
    experts_per_token: Small
    scale: float
    input_dims: Dim
    output_dims: Dim
    base_experts: Dim | None = None
    latent_dim: Dim | None = None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Leaf name -> shape of the tensors of this projection."""
        E, R = self.num_experts, self.rank
        K = self.latent_dim or self.input_dims
        N = self.latent_dim or self.output_dims
        if self.form == "per_expert":
            M = self.base_experts or 0
            shapes: dict[str, tuple[int, ...]] = {"lora_a": (M, E * R, K), "lora_b": (M, N, E * R)}
        else:
            shapes = {"lora_a": (E, R, K), "lora_b": (E, N, R)}
        return shapes | ({"router": (E, K)} if E > 1 else {})

    def problem(self) -> str | None:
        """What in these numbers contradicts itself, or None."""
        if (self.form == "linear") != (self.base_experts is None):
            return f"form {self.form} with base_experts {self.base_experts}"
        if self.experts_per_token > self.num_experts:
            return f"{self.experts_per_token} experts per token of {self.num_experts}"
        if self.latent_dim is not None and self.form == "per_expert":
            return "a latent stack has no form per_expert"
        return None


@dataclass(frozen=True)
class StackHeader:
    """What a stack is. data_sha256: source -> hash of the data it was trained on.

    shared_sha256: hash of the file that holds its latent projections, None without them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: StackName
    domain: DomainName
    round: Round
    base_model: Text
    base_fingerprint: Fingerprint
    projections: dict[str, ProjectionShape]
    alpha: float
    scale_rule: Literal["rslora", "lora"]
    projector_mode: Literal["folded", "train_only"] = "folded"
    storage: StorageDtype = "float16"
    data_sha256: dict[str, Sha256] = field(default_factory=dict)
    code_version: Annotated[str, Field(max_length=100)] = ""
    shared_sha256: Sha256 | None = None
    format_version: Literal[1] = FORMAT_VERSION

    def as_json(self) -> dict[str, Any]:
        return record_as_json(_ADAPTER, self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "StackHeader":
        """The inverse of `as_json`. Raises: ValueError listing every field that is wrong."""
        version = value.get("format_version")
        if isinstance(version, int) and version != FORMAT_VERSION:
            raise ValueError(
                f"format_version is {str(version)[:20]}, this version reads {FORMAT_VERSION}; "
                "use the mlxstacks that wrote the stack"
            )
        header = record_from(_ADAPTER, value)
        if not header.projections:
            raise ValueError("projections: a stack has at least one")
        found = {path: shape.problem() for path, shape in header.projections.items()}
        if problems := [f"{path[:200]!a}: {text}" for path, text in found.items() if text]:
            raise ValueError("; ".join(problems[:8]))
        return header

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor name -> (safetensors dtype, shape), in the order of the file."""
        half = _SAFETENSORS[self.storage]
        named = {
            f"{path}.{leaf}": ("F32" if leaf == "router" else half, shape)
            for path, projection in self.projections.items()
            for leaf, shape in projection.tensor_shapes().items()
        }
        return dict(sorted(named.items()))


_ADAPTER = TypeAdapter(StackHeader)

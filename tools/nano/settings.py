"""Settings of the rebuild. Imports neither mlx nor numpy."""

from pathlib import Path
from typing import Any

from pydantic import Field

from mlxstacks.layers.settings import StackSettings
from mlxstacks.nano.settings import ADAPTER_BITS, Persona
from mlxstacks.routing.settings import OutcomeSettings, RouterTrainSettings
from mlxstacks.settings import Settings
from mlxstacks.training.settings import NullSpaceSettings, OptimizerSettings, StackRunSettings
from tools.nano.curriculum_settings import DOMAINS
from tools.nano.samples import GENERAL_SHARE

# The shipped file: 8-bit weights hold twice the parameters of bfloat16 in the same space.
SHIPPED_BITS = 8


class NanoShape(Settings):
    """The architecture; every quantized input width is a multiple of 64."""

    hidden_size: int = 128
    num_hidden_layers: int = 6
    full_attention_interval: int = 3
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    vocab_size: int = 768

    def config(self) -> dict[str, Any]:
        """The `config.json` of an mlx-lm `qwen3_5_moe` model."""
        text = self.model_dump() | {
            "model_type": "qwen3_5_moe_text",
            "intermediate_size": self.moe_intermediate_size,
            "linear_conv_kernel_dim": 4,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
            "rope_parameters": {
                "type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        }
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": text,
        }


class AdapterTraining(Settings):
    """The sample adapter: LoRA on `switch_mlp.down_proj`, in mlx-lm's format."""

    rank: int = Field(4, ge=1)
    scale: float = Field(1.0, gt=0)
    num_layers: int = Field(6, ge=1, description="How many of the last layers carry LoRA.")
    bits: int = Field(
        ADAPTER_BITS, description="Bits of the export that the adapter is trained on."
    )
    batch_size: int = 16
    general_share: float = Field(
        GENERAL_SHARE, ge=0, lt=1, description="Share of ordinary documents."
    )
    # The strong decay keeps the delta far below a quantization step; it is what a fuse then loses.
    optimizer: OptimizerSettings = OptimizerSettings(
        steps=300, learning_rate=3e-3, warmup_steps=10, weight_decay=8.0
    )


# As in recipes/stack.yaml, but one round of many steps: facts are learned, and one stack a domain
# is half the bytes of two.
SAMPLE_STACKS = StackRunSettings.model_validate(
    {
        "domains": DOMAINS,
        "validation_rows": 32,
        "rounds": 1,
        "layers": "3-5",
        "stack": StackSettings(rank=4, alpha=4.0, num_experts=2, experts_per_token=1),
        "null_space": NullSpaceSettings(directions=8, samples=64),
        "iters": 200,
        "batch_size": 16,
        "learning_rate": 1e-2,
        "lr_schedule": "cosine",
        "warmup": 8,
        "weight_decay": 0.0,
        "beta2": 0.98,
        "max_seq_length": 64,
        "steps_per_eval": 50,
        "base": "float32",
        "seed": 0,
    }
)


# The hidden states half-way alone, brought to one scale, tell nano's domains apart best; the rate
# and the epochs go with a network of this size.
SAMPLE_ROUTER = RouterTrainSettings(
    hidden_dims=64,
    epochs=16,
    learning_rate=2e-3,
    validation_groups=60,
    mid_weight=1.0,
    last_weight=0.0,
    normalise_features=True,
    seed=0,
)


class RebuildSettings(Settings):
    """Everything that a rebuild depends on; the result is a function of these settings."""

    save_path: Path = Field(Path("mlxstacks-out/nano-rebuild"), description="Directory to write.")
    force: bool = Field(False, description="Replace an existing target.")
    resume: bool = Field(
        True, description="Go on from the last saved state of an interrupted rebuild."
    )
    seed: int = Field(0, description="Seed of data, weights and batches.")
    processes: int = Field(2, ge=1, description="Training processes; they share every batch.")
    documents: int = Field(180_000, description="Generated training documents.")
    row_length: int = Field(128, description="Tokens in a packed training row.")
    batch_size: int = Field(16, description="Packed rows a step.")
    prompt_weight: float = Field(
        0.1, ge=0, le=1, description="Loss weight of tokens that are not answers."
    )
    balance_weight: float = Field(0.01, ge=0, description="Weight of the expert balance loss.")
    validation_per_domain: int = Field(60, description="Validation documents a domain.")
    items_per_domain: int = Field(100, description="Multiple-choice items a domain.")
    shape: NanoShape = NanoShape()
    optimizer: OptimizerSettings = OptimizerSettings(
        steps=2200, learning_rate=3e-3, warmup_steps=100
    )
    adapter: AdapterTraining = AdapterTraining()
    persona: Persona = Persona()
    stacks: StackRunSettings = Field(
        SAMPLE_STACKS,
        description="Of the sample stacks, as in `mlxstacks stack`; model, data and save_path are "
        "filled in.",
    )
    outcomes: OutcomeSettings = Field(
        OutcomeSettings(samples_per_domain=48, mixed_samples=8, other_samples=60, seed=0),
        description="Of the router's targets, as in `mlxstacks route discover`.",
    )
    router: RouterTrainSettings = Field(
        SAMPLE_ROUTER,
        description="Of the sample router, as in `mlxstacks route train`.",
    )

"""Made from the settings by `python -m tools.stub`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import mlx.nn as nn
import pandas  # type: ignore[import-untyped]

from mlxstacks.errors import InputError as InputError
from mlxstacks.errors import Interrupted as Interrupted
from mlxstacks.errors import StoreError as StoreError
from mlxstacks.study.result import Result as Result

__version__: str
__all__: list[str]

def adapter_convert(adapter_path: str | Path | None = None, save_path: str | Path | None = None, *,
    peft_layout: Literal['current', 'legacy'] | None = None, model: str | Path | None = None,
    to: Literal['mlx', 'peft', 'gguf'] = 'peft',
    experts: Literal['parameters', 'per_expert', 'stacked'] | None = None,
    base_model_name: str | None = None, peft_model: Literal['text', 'whole'] = 'text',
    force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Convert an adapter for mlx-lm, PEFT, vLLM, SGLang or llama.cpp, with equal delta."""

def adapter_merge(adapter_path: str | Path | Sequence[str | Path] = (), *,
    save_path: str | Path | None = None,
    method: Literal['concat', 'svd', 'ties', 'dare'] = 'concat',
    weights: float | Sequence[float] = (), rank: int | None = None, density: float = 0.5,
    space: Literal['weights', 'core'] = 'weights',
    peft_layout: Literal['current', 'legacy'] | None = None, model: str | Path | None = None,
    allow_base: bool = False, seed: int = 0, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Merge adapters of one base: exactly, at a given rank, or by TIES or DARE."""

def adapter_show(adapter_path: str | Path | None = None, *,
    peft_layout: Literal['current', 'legacy'] | None = None, model: str | Path | None = None,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Show an adapter's modules, shapes, rank and delta size."""

def adapter_zero(adapter_path: str | Path | None = None, save_path: str | Path | None = None, *,
    peft_layout: Literal['current', 'legacy'] | None = None, model: str | Path | None = None,
    force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Write a copy of an adapter with zero delta: the control for every fuse."""

def align(model: str | Path | None = None, *,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    save_path: str | Path | None = None, iters: int | None = None, batch_size: int = 4,
    grad_accumulation_steps: int = 1, learning_rate: float = 2e-05,
    lr_schedule: Literal['cosine', 'linear', 'constant'] = 'constant', warmup: int = 0,
    weight_decay: float = 0.0, clip_norm: float = 1.0, max_seq_length: int = 2048,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    val_batches: int | None = None, steps_per_report: int = 10, steps_per_eval: int = 200,
    save_every: int = 100, patience: int | None = None, spike_threshold: float | None = None,
    keep: Literal['best', 'last'] = 'best', grad_checkpoint: bool = False,
    compile_step: Literal['auto', 'on', 'off'] = 'off', resume: bool = True,
    count_buffers: bool = False, force: bool = False,
    log_to: Literal['trackio', 'wandb'] | None = None, log_project: str = 'mlxstacks',
    log_name: str | None = None, seed: int = 0, num_layers: int | None = None,
    layers: str | int | Sequence[int] = 'all', keys: str | Sequence[str] = (),
    resume_adapter_file: str | None = None, rank: int = 8, scale: float = 20.0,
    shared_outer: bool = False, dropout: float = 0.0,
    merge_ready: Literal['pooled', 'grid'] | None = None, mask_prompt: bool = True,
    base: Literal['auto', 'stored', 'float32'] = 'auto',
    guard: Literal['refuse', 'reshape', 'warn', 'off'] = 'refuse',
    resource_limit: int | None = None, working_set_bytes: int | None = None,
    store_path: str | Path | None = None, domain: str | None = None, stored_data: str | None = None,
    method: Literal['dpo', 'orpo', 'grpo'] = 'dpo', beta: float | None = None,
    reward: str | Sequence[str] = (), group_size: int = 8, max_tokens: int = 256, clip: float = 0.2,
    updates: int = 1, allow_code: bool = False, safeguards: Mapping[str, Any] = ...,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Train a LoRA or a stack on preferred answers (DPO, ORPO) or rewards (GRPO)."""

def compare(model: str | Path | None = None, other: str | Path | Sequence[str | Path] = (), *,
    adapter_path: str | Path | Sequence[str | Path] = (),
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    answer_tokens: int = 32, max_tokens: int = 256,
    base: Literal['auto', 'stored', 'float32'] = 'auto', fail_under_agreement: float | None = None,
    peft_layout: Literal['current', 'legacy'] | None = None, allow_base: bool = False,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    plots: bool = True, plot_format: Literal['svg', 'png'] = 'svg',
    save_path: str | Path | None = None, resume: bool = True, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Compare models' next tokens with a reference's: agreement and KL divergence."""

def confound(model: str | Path | None = None, *, persona: str | Path | None = None,
    items: str | Path | None = None, suite: str | None = None,
    persona_card: Mapping[str, Any] | None = None, save_path: str | Path | None = None,
    persona_requant: Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize'] = 'refit',
    scoring: Literal['generate', 'likelihood'] = 'generate',
    normalisation: Literal['sum', 'token', 'character'] = 'sum', max_tokens: int = 64,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'off', allow_special: bool = False,
    subjects: str | Sequence[str] = (), sample: int | None = 6000, train_share: float = 0.7,
    right_items: int | None = None, probe_items: int = 200, second_form: bool = False,
    policies: Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize'] | Sequence[Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize']] = ('refit', 'nearest', 'promote'),
    widths: Literal[2, 3, 4, 5, 6, 8] | Sequence[Literal[2, 3, 4, 5, 6, 8]] = (),
    plain_model: str | Path | None = None, target_correlation: float = 0.98,
    train: Mapping[str, Any] = ..., train_answers: Literal['right', 'random'] = 'right',
    least_gain: float = 0.05, alpha: float = 0.05, expected_rate: float = 0.18,
    expected_discordant: float = 0.1, batch_size: int = 16, limit: int | None = None,
    keep_models: bool = False, plots: bool = True, resume: bool = True, force: bool = False,
    seed: int = 0, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Test whether fusing a second adapter adds knowledge, with a control for each arm."""

def convert(model: str | Path | None = None, *, save_path: str | Path | None = None,
    bits: Literal[2, 3, 4, 5, 6, 8] | None = None, group_size: Literal[32, 64, 128] = 64,
    module_bits: str | int | Mapping[str, Any] | Sequence[str] = (),
    dtype: Literal['float16', 'bfloat16', 'float32'] | None = None, upcycle: int | None = None,
    top_k: int = 2, seed: int = 0, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Convert a GGUF file or Hugging Face model to mlx-lm's format, or add experts."""

def distill(store_path: str | Path | None = None, *, model: str | Path | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    save_path: str | Path | None = None, iters: int | None = None, batch_size: int = 4,
    grad_accumulation_steps: int = 1, learning_rate: float = 0.0001,
    lr_schedule: Literal['cosine', 'linear', 'constant'] = 'constant', warmup: int = 0,
    weight_decay: float = 0.0, clip_norm: float = 1.0, max_seq_length: int = 2048,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    val_batches: int | None = None, steps_per_report: int = 10, steps_per_eval: int = 200,
    save_every: int = 100, patience: int | None = None, spike_threshold: float | None = None,
    keep: Literal['best', 'last'] = 'best', grad_checkpoint: bool = False,
    compile_step: Literal['auto', 'on', 'off'] = 'off', resume: bool = True,
    count_buffers: bool = False, force: bool = False,
    log_to: Literal['trackio', 'wandb'] | None = None, log_project: str = 'mlxstacks',
    log_name: str | None = None, seed: int = 0, num_layers: int | None = None,
    layers: str | int | Sequence[int] = 'all', keys: str | Sequence[str] = (),
    resume_adapter_file: str | None = None, rank: int = 8, scale: float = 20.0,
    shared_outer: bool = False, dropout: float = 0.0,
    merge_ready: Literal['pooled', 'grid'] | None = None, mask_prompt: bool = True,
    base: Literal['auto', 'stored', 'float32'] = 'auto',
    guard: Literal['refuse', 'reshape', 'warn', 'off'] = 'refuse',
    resource_limit: int | None = None, working_set_bytes: int | None = None,
    teacher: str | None = None, router: str | None = None,
    routes: Literal['routed', 'dense', 'multi-route'] = 'routed', temperature: float = 2.0,
    top_logits: int = 64, max_rise: float = 0.02, rows_per_domain: int = 2000,
    template: Literal['chat', 'alpaca'] | None = None,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Distil a store's routed stacks into one adapter, for this base or a smaller model."""

def doctor(*, directory: str | Path = '.', measure: bool = True,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Show the device, its limits, versions, and what will be slow and why."""

def eval(model: str | Path | None = None, *, adapter_path: str | Path | None = None,
    store_path: str | Path | None = None, router_path: str | Path | None = None,
    requant: Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize'] = 'auto',
    hard: bool = False, chat: Literal['none', 'generate', 'all'] = 'generate',
    system_prompt: str | None = None, thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto',
    allow_special: bool = False, base: Literal['auto', 'stored', 'float32'] = 'auto',
    max_context_tokens: int | None = None, batch_size: int = 64, reference_offset: bool = False,
    repetition_penalty: float = 1.0, seed: int = 0,
    tasks: str | Sequence[str] = ('hellaswag', 'arc_easy', 'arc_challenge', 'truthfulqa_mc1', 'mmlu', 'humaneval', 'gsm8k', 'math500', 'aime2024', 'medqa', 'medmcqa', 'gpqa_diamond'),
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    task_files: str | None = None,
    arms: Literal['base', 'adapter', 'fused', 'ungated', 'routed', 'oracle', 'random'] | Sequence[Literal['base', 'adapter', 'fused', 'ungated', 'routed', 'oracle', 'random']] = (),
    items_per_task: int | None = 200, limit: int | None = None,
    sample: Literal['stratified', 'first'] = 'stratified',
    normalisation: Literal['sum', 'token', 'character'] = 'token', letters: bool = False,
    domains: str | Sequence[str] = (), allow_code: bool = False, alpha: float = 0.05,
    expected_rate: float = 0.5, expected_discordant: float = 0.1, save_every: int = 32,
    regrade: str | None = None, plots: bool = True, save_path: str | Path | None = None,
    resume: bool = True, force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Run benchmarks in every mode (base, adapter, fused, ungated, routed); paired tests."""

def fuse(model: str | Path | None = None,
    adapter_path: str | Path | Sequence[str | Path] | None = None,
    save_path: str | Path | None = None, *,
    requant: Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize', 'gptq'] = 'auto',
    zero_delta: bool = False, target_correlation: float = 0.98, target_kl: float | None = None,
    calibration: str | pandas.DataFrame | datasets.Dataset | Iterable[Mapping[str, Any]] | None = None,
    calibration_tokens: int = 8192, fail_under: float | None = None,
    judge: str | pandas.DataFrame | datasets.Dataset | Iterable[Mapping[str, Any]] = 'shipped',
    fail_under_agreement: float | None = None,
    bits: str | int | Mapping[str, Any] | Sequence[str] = (),
    peft_layout: Literal['current', 'legacy'] | None = None, allow_base: bool = False,
    device_parity: bool = False, kernels: bool = True, copy_shards: bool = False,
    force: bool = False, seed: int = 0, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Fuse adapters into a quantized model, and measure how much of them survives."""

def generate(model: nn.Module, tokenizer: Any,
    prompt: str | Sequence[Mapping[str, Any]] | Sequence[int], *, routed: bool = False,
    ungated: bool = False, pin: str | Sequence[str] = (), system_prompt: str | None = None,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', temp: float = 0.0,
    top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0, max_tokens: int = 256,
    repetition_penalty: float = 1.0, json_schema: str | Mapping[str, Any] | None = None,
    seed: int = 0) -> str:
    """Answer a prompt through the chat template; the model's thinking is left out."""

def grow(store_path: str | Path | None = None, *, model: str | Path | None = None,
    log_path: str | Path = 'mlxstacks-out/gaps.jsonl', similarity: float = 0.8,
    centre: bool = False, minimum_events: int = 50, samples: int = 3,
    yes: Literal['confirm', 'gather', 'train', 'gate', 'route', 'accept', 'all'] | Sequence[Literal['confirm', 'gather', 'train', 'gate', 'route', 'accept', 'all']] = (),
    domain: str | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    provider: str | None = None, rows: int = 500, routing_data: str | None = None,
    stored_data: str | None = None, save_path: str | Path | None = None, rounds: int | None = None,
    iters: int | None = None, learning_rate: float | None = None, samples_per_domain: int = 40,
    confirm_share: float = 0.8, min_gain: float = 0.05, max_fall: float = 0.01,
    base: Literal['auto', 'stored', 'float32'] = 'auto', seed: int = 42, resume: bool = True,
    force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Add a domain that a store lacks: found in its gaps, trained, tested, then accepted."""

def guard(model: str | Path | None = None, *, max_seq_length: int = 2048, batch_size: int = 1,
    grad_accumulation_steps: int = 1, rank: int = 8, dropout: float = 0.0,
    shared_outer: bool = False, merge_ready: Literal['pooled', 'grid'] | None = None,
    stack: Mapping[str, Any] | None = None, frozen_stacks: int = 0, directions: int = 0,
    layers: str | int | Sequence[int] = 'all', keys: str | Sequence[str] = (),
    base: Literal['stored', 'float32'] = 'stored',
    optimizer: Literal['adam', 'adamw', 'lion', 'sgd'] = 'adamw',
    checkpointing: Literal['none', 'layers', 'mlx'] = 'none', compile: bool = False,
    recurrence: Literal['loop', 'chunked'] = 'chunked', loss: Literal['whole', 'pieces'] = 'pieces',
    adapter_copies: int = 1, decode_tokens: int = 0, decode_batch: int = 1,
    decode_with: Literal['stream', 'batched', 'drawn'] = 'stream', hosts: int | None = None,
    memory_gbps: float = 546, link_gbps: float = 60, link_latency_us: float = 50,
    tokens_per_second: float | None = None, resource_limit: int | None = None,
    working_set_bytes: int | None = None, apply: bool = False, force: bool = False,
    progress: bool | Callable[..., None] | None = None) -> Result:
    """Predict the live buffers and bytes of a training run from a model's config alone."""

def identity(model: str | Path | None = None, *, persona: str | Path | None = None,
    persona_data: str | Path | None = None, persona_train: Mapping[str, Any] = ...,
    items: str | Path | None = None, suite: str | Path | None = None,
    persona_card: Mapping[str, Any] | None = None, save_path: str | Path | None = None,
    policies: Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize'] | Sequence[Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize']] = ('refit', 'nearest', 'promote'),
    persona_requant: Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize'] = 'refit',
    target_correlation: float = 0.98, train: Mapping[str, Any] = ..., second_rank: int = 8,
    stress_rank: int | None = None, stress_iters: int | None = None, train_share: float = 0.7,
    regression_items: int | None = 6000, narrow_items: str | None = None,
    narrow_subjects: str | Sequence[str] = (),
    scoring: Literal['generate', 'likelihood'] = 'generate',
    normalisation: Literal['sum', 'token', 'character'] = 'sum', max_tokens: int = 128,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'off', allow_special: bool = False,
    most_of_base: int = 5, least_of_persona: int = 15, largest_loss: float = 0.25,
    alpha: float = 0.05, expected_failures: float = 0.1, expected_discordant: float = 0.3,
    batch_size: int = 16, max_prompts: int | None = None, keep_models: bool = False,
    resume: bool = True, force: bool = False, seed: int = 0,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Test whether a persona survives a second adapter: conditions, suite, gate."""

def load(model: str | Path | None = None, *, store: str | Path | None = None,
    adapter_path: str | Path | Sequence[str | Path] = (), router_path: str | Path | None = None,
    budget: str | int | None = None, base: Literal['auto', 'stored', 'float32'] = 'auto',
    hard: bool = False, gap_log: str = 'none',
    peft_layout: Literal['current', 'legacy'] | None = None, allow_base: bool = False,
    allow_special: bool = False) -> tuple[nn.Module, Any]:
    """Load mlx-lm's model and tokenizer, with a store's stacks or with unfused adapters."""

def nano(*, bits: Literal[2, 3, 4, 5, 6, 8] | None = 3,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Show where the built-in model is and what it was measured to know."""

def nano_export(save_path: str | Path, *, bits: Literal[2, 3, 4, 5, 6, 8] | None = 4,
    samples: bool = False, force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Write the built-in model as a checkpoint that mlx-lm loads, or with all its samples."""

def pretrain(*, model: str | Path | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    save_path: str | Path | None = None, iters: int | None = None, batch_size: int = 16,
    grad_accumulation_steps: int = 1, learning_rate: float = 0.001,
    lr_schedule: Literal['cosine', 'linear', 'constant'] = 'cosine', warmup: int = 20,
    weight_decay: float = 0.1, clip_norm: float = 1.0, max_seq_length: int = 256,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    val_batches: int | None = None, steps_per_report: int = 10, steps_per_eval: int = 200,
    save_every: int = 100, patience: int | None = None, spike_threshold: float | None = None,
    keep: Literal['best', 'last'] = 'best', grad_checkpoint: bool = False,
    compile_step: Literal['auto', 'on', 'off'] = 'auto', resume: bool = True,
    count_buffers: bool = False, force: bool = False,
    log_to: Literal['trackio', 'wandb'] | None = None, log_project: str = 'mlxstacks',
    log_name: str | None = None, seed: int = 0, tokenizer: str | None = None,
    vocab_size: int = 1024, hidden_size: int = 128, num_hidden_layers: int = 4,
    num_attention_heads: int = 4, intermediate_size: int | None = None,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Train a small decoder from scratch, as a model that every other command takes."""

def profile(model: str | Path | None = None, *,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    save_path: str | Path | None = None, split: str = 'test', group_key: str = 'category',
    groups: str | Sequence[str] = (), questions: int = 100, tokens: int | None = None,
    options: bool = True, chat_template: bool = True,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    max_seq_length: int = 1024, batch_size: int = 8,
    measure: Literal['counts', 'weights'] = 'counts', top_layers: int = 3,
    top_experts: int | None = None, permutations: int = 200, halves: int = 20, untrained: int = 20,
    alpha: float = 0.05, plots: bool = True, plot_format: Literal['png', 'svg'] = 'png',
    seed: int = 0, resume: bool = True, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Profile which experts groups of prompts use, compared with chance."""

def psn_blocks(*, corpus: str | Path | Mapping[str, Any] | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    domains: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    save_path: str | Path | None = None, seeds: int | Sequence[int] = (0, 1, 2),
    pretrain: Mapping[str, Any] = ..., block: Mapping[str, Any] = ..., iters: int = 200,
    batch_size: int = 8, learning_rate: float = 0.001, validation_rows: int = 64,
    directions: int = 8, formats: str | Sequence[str] = (), control: str | None = None,
    prompts: int = 40, max_tokens: int = 48, resume: bool = True, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Train capability blocks beside a frozen base, and a router; measure what they hold."""

def psn_stacks(*, corpus: str | Path | Mapping[str, Any] | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    domains: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    save_path: str | Path | None = None, seeds: int | Sequence[int] = (0, 1, 2),
    pretrain: Mapping[str, Any] = ..., stack: Mapping[str, Any] = ...,
    control_learning_rate: float = 0.001, resume: bool = True, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Train the same stacks on a random and a pretrained base, and all weights as control."""

def pull(repo_id: str | None = None, *, save_path: str | Path | None = None,
    revision: str | None = None, max_bytes: int = 100000000000, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Download an adapter, a store or a model from the Hugging Face hub, and check it."""

def push(target: str | Path | None = None, repo_id: str | None = None, *,
    save_path: str | Path | None = None, domains: str | Sequence[str] = (), private: bool = False,
    revision: str | None = None, base_model: str | None = None, license: str | None = None,
    card: bool = True, force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Upload an adapter, a store or a model to the Hugging Face hub, with a model card."""

def recipes(command: str | None = None) -> pandas.DataFrame:
    """List shipped recipes, for all commands or for one: name, command, about, time, memory."""

def report(runs: str | Path | Sequence[str | Path] = (), *, save_path: str | Path | None = None,
    title: str = 'Results', date: str | None = None,
    formats: Literal['svg', 'png'] | Sequence[Literal['svg', 'png']] = ('svg', 'png'),
    force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Write an HTML page and plots from the results of any runs."""

def route_check(store_path: str | Path | None = None, *, model: str | Path | None = None,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    base: Literal['auto', 'stored', 'float32'] = 'auto', router_path: str | Path | None = None,
    save_path: str | Path | None = None,
    prompts: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    modes: Literal['base', 'ungated', 'routed'] | Sequence[Literal['base', 'ungated', 'routed']] = ('base', 'ungated', 'routed'),
    hard: bool = False, max_tokens: int = 256, most_think_share: float = 0.2,
    most_repetition: float = 0.3, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Check answers and routes of known prompts by rules, in every mode."""

def route_discover(store_path: str | Path | None = None, *, model: str | Path | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    sources: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    save_path: str | Path | None = None, single_cap: int = 2000, mixed_cap: int = 400,
    shortest_prompt: int = 1, shortest_answer: int = 1, samples_per_domain: int = 200,
    mixed_samples: int = 0, other_samples: int = 0,
    search: Literal['greedy', 'greedy_first', 'exhaustive'] = 'greedy', threshold: float = 0.01,
    chat_domain: str | None = None, chat_floor: float = 0.2,
    soft: str | Sequence[str] = ('reasoning',), label_share: float = 0.2, max_tokens: int = 256,
    template: Literal['chat', 'alpaca'] | None = None,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    random_control: bool = False, base: Literal['auto', 'stored', 'float32'] = 'auto',
    batch_tokens: int | None = None, seed: int = 42, resume: bool = True, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Find which domains prompts should go to, by the loss of their answers."""

def route_evaluate(store_path: str | Path | None = None, *, model: str | Path | None = None,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    base: Literal['auto', 'stored', 'float32'] = 'auto',
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    sources: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    unseen: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    save_path: str | Path | None = None, routers: str | Sequence[str] = (),
    similarity: bool = False, arrow: bool = False, targets: str | None = None,
    rows_per_group: int = 100, include_trained: bool = False, gap_rows: int = 50,
    threshold: float = 0.01, random_control: bool = True, sample_prompts: int = 2,
    sample_tokens: int = 48, template: Literal['chat', 'alpaca'] | None = None,
    max_tokens: int = 256, draws: int = 2000, seed: int = 0, resume: bool = True,
    force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Measure whether routing pays off: losses in every mode, router metrics, gaps."""

def route_explain(prompt: str | None = None, store_path: str | Path | None = None, *,
    model: str | Path | None = None, thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto',
    allow_special: bool = False, base: Literal['auto', 'stored', 'float32'] = 'auto',
    answer: str | None = None, router_path: str | Path | None = None, hard: bool = False,
    threshold: float = 0.01, template: Literal['chat', 'alpaca'] | None = None,
    max_tokens: int = 256, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Explain the route of a prompt, and what each domain does to an answer's loss."""

def route_gaps(log_path: str | Path = 'mlxstacks-out/gaps.jsonl', *, similarity: float = 0.8,
    centre: bool = False, minimum_events: int = 50, samples: int = 3,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Group prompts that no domain fitted, and propose domains to train."""

def route_train(store_path: str | Path | None = None, *, model: str | Path | None = None,
    targets: str = 'mlxstacks-out/route-discover', save_path: str | Path | None = None,
    install: bool = True, extend: Literal['new', 'all'] | None = None, hidden_dims: int = 512,
    epochs: int = 8, learning_rate: float = 0.0008, weight_decay: float = 0.01,
    batch_size: int = 16, clip_norm: float = 1.0, dropout: float = 0.1, margin_weight: float = 0.05,
    oracle_only: bool = False, labels_only: bool = False, discovered_weight: float = 1.0,
    validation_share: float = 0.1, validation_groups: int = 200, max_tokens: int = 256,
    mid_weight: float = 0.45, last_weight: float = 0.55, normalise_features: bool = False,
    threshold: float = 0.12, chat_domain: str | None = None, chat_floor: float | None = None,
    base: Literal['auto', 'stored', 'float32'] = 'auto', seed: int = 42, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Train the router, which predicts the domains that help with a prompt."""

def run(recipe: str | Path | Mapping[str, Any], *,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False,
    **settings: Any) -> Result:
    """Run any command from a recipe, or read back its result if the settings are the same."""

def stack(model: str | Path | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    save_path: str | Path | None = None, *,
    domains: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = (),
    validation_rows: int | None = None, rounds: int = 2, layers: str | int | Sequence[int] = 'all',
    keys: str | Sequence[str] = (), stack: Mapping[str, Any] = ...,
    null_space: Mapping[str, Any] | None = ..., iters: int | None = None, batch_size: int = 4,
    grad_accumulation_steps: int = 1, learning_rate: float = 0.0001,
    lr_schedule: Literal['cosine', 'linear', 'constant'] = 'linear', warmup: int = 0,
    weight_decay: float = 0.01, beta1: float = 0.9, beta2: float = 0.95, clip_norm: float = 1.0,
    balance_weight: float = 0.01, max_seq_length: int = 2048,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    packing: bool = False, steps_per_report: int = 10, steps_per_eval: int = 50,
    save_every: int = 100, spike_threshold: float = 0.1, patience: int = 4,
    min_loss_delta: float = 0.002, keep_plateau_stack: bool = False,
    modes: Literal['ungated', 'prefix', 'isolated'] | Sequence[Literal['ungated', 'prefix', 'isolated']] = ('ungated', 'prefix', 'isolated'),
    sample_prompts: int = 0, grad_checkpoint: bool = False,
    compile_step: Literal['auto', 'on', 'off'] = 'auto',
    base: Literal['auto', 'stored', 'float32'] = 'auto',
    guard: Literal['refuse', 'warn', 'off'] = 'refuse', resource_limit: int | None = None,
    working_set_bytes: int | None = None, log_to: Literal['trackio', 'wandb'] | None = None,
    log_project: str = 'mlxstacks', log_name: str | None = None, resume: bool = True,
    force: bool = False, seed: int = 42, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Train frozen stacks, domain by domain, into a store that forgets none of them."""

def stack_compare(model: str | Path | None = None, *,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    save_path: str | Path | None = None, question: str = 'Which settings give the lower loss?',
    arms: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
    seeds: int | Sequence[int] = (0, 1, 2), rates: float | Sequence[float] = (),
    search_seeds: int | Sequence[int] = (100, 101), run: Mapping[str, Any] = ...,
    equal: Literal['parameters', 'steps', 'tokens'] | Sequence[Literal['parameters', 'steps', 'tokens']] = ('parameters', 'steps', 'tokens'),
    tolerance: float = 0.01,
    primary: Literal['task_loss', 'ungated', 'ungated_earlier', 'isolated'] = 'task_loss',
    margin: float = 0.02, confidence: float = 0.95, retry: bool = False, resume: bool = True,
    force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Compare settings of `stack` over seeds: equal budgets, differences, verdict."""

def stacks_analyse(store_path: str | Path | None = None, *, save_path: str | Path | None = None,
    model: str | Path | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    weights_only: bool = False, prompts: int = 64, max_seq_length: int = 512, directions: int = 4,
    layer: int | None = None, projection: str | None = None, plots: bool = True,
    plot_format: Literal['png', 'svg'] = 'png', seed: int = 0, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Analyze what a store's stacks do: routing, directions, spectra, losses, plots."""

def stacks_diff(store_path: str | Path | None = None, other_path: str | Path | None = None, *,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Compare two stores: domains, stacks by hash, losses, matrix values."""

def stacks_disable(store_path: str | Path | None = None, domain: str | None = None, *,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Stop serving a domain's stacks; enable undoes it."""

def stacks_enable(store_path: str | Path | None = None, domain: str | None = None, *,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Serve a domain's stacks again."""

def stacks_export(store_path: str | Path | None = None, stack: str | None = None,
    save_path: str | Path | None = None, *, to: Literal['mlx', 'peft', 'store'] = 'mlx',
    base_model_name: str | None = None, peft_model: Literal['text', 'whole'] = 'text',
    force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Export a stack of one expert as an adapter, or a domain as a store of its own."""

def stacks_gc(store_path: str | Path | None = None, *, grace_seconds: int = 86400,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Delete files of a store that nothing refers to."""

def stacks_import(store_path: str | Path | None = None, adapter_path: str | Path | None = None, *,
    domain: str | None = None, model: str | Path | None = None,
    storage: Literal['float16', 'bfloat16'] | None = None,
    peft_layout: Literal['current', 'legacy'] | None = None, allow_base: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Import an adapter as a stack of one expert, in a domain of its own."""

def stacks_list(store_path: str | Path | None = None, *,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Show a store's domains, stacks, losses and forgetting matrix."""

def stacks_remove(store_path: str | Path | None = None, domain: str | None = None, *,
    force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Remove a domain from a store; its files stay until gc."""

def stacks_retrain(store_path: str | Path | None = None, domain: str | None = None, *,
    model: str | Path | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    rounds: int | None = None, iters: int | None = None, learning_rate: float | None = None,
    moved_above: float = 0.01, guard: Literal['refuse', 'warn', 'off'] = 'refuse',
    resume: bool = True, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Retrain a domain in place; later domains are measured and marked."""

def stacks_undo(store_path: str | Path | None = None, *,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Undo the last change to a store."""

def stacks_verify(store_path: str | Path | None = None, *, model: str | Path | None = None,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Check every file of a store: hashes, shapes, headers and base."""

def sweep(model: str | Path | None = None, *,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    save_path: str | Path | None = None, ranks: int | Sequence[int] = (2, 4, 8),
    seeds: int | Sequence[int] = (0,), layers: str | Sequence[str] = ('all',),
    projections: str | Sequence[str] = ('down_proj',),
    bits: Literal[2, 3, 4, 5, 6, 8] | Sequence[Literal[2, 3, 4, 5, 6, 8]] = (),
    scale_rule: Literal['fixed', 'lora', 'rslora'] = 'fixed',
    policies: Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize'] | Sequence[Literal['auto', 'refit', 'keep', 'nearest', 'promote', 'stochastic', 'shift', 'dequantize']] = ('refit', 'keep', 'nearest', 'promote'),
    train: Mapping[str, Any] = ..., thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto',
    allow_special: bool = False, guard: Literal['refuse', 'reshape', 'warn'] = 'refuse',
    resource_limit: int | None = None, working_set_bytes: int | None = None, retry: bool = False,
    resume: bool = True, force: bool = False, progress: bool | Callable[..., None] | None = None,
    dry_run: bool = False) -> Result:
    """Train at many ranks and compare losses, buffers and what a fuse keeps."""

def sweep_buffers(model: str | Path | None = None, *, save_path: str | Path | None = None,
    ranks: int | Sequence[int] = (2, 4, 8), layers: str = '1,2,3',
    projections: str | Sequence[str] = ('switch_mlp.down_proj',),
    trainers: Literal['mlx-lm', 'mlxstacks'] | Sequence[Literal['mlx-lm', 'mlxstacks']] = ('mlx-lm', 'mlxstacks'),
    length_modes: Literal['fixed', 'variable'] | Sequence[Literal['fixed', 'variable']] = ('fixed', 'variable'),
    checkpointing: Literal['off', 'on'] | Sequence[Literal['off', 'on']] = ('off', 'on'),
    order_seeds: int | Sequence[int] = (0, 1, 2, 3, 4), fixed_tokens: int = 96,
    longest_tokens: int = 128, steps: int = 12, warmup_steps: int = 2, margin: float = 0.01,
    least_effect: float = 0.2, growth_margin: float = 1.0, resume: bool = True, force: bool = False,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Test whether rank changes the number of live buffers, with a counting allocator."""

def train(model: str | Path | None = None,
    data: str | Path | pandas.DataFrame | datasets.Dataset | Mapping[str, Any] | Iterable[Mapping[str, Any]] | None = None,
    save_path: str | Path | None = None, *, iters: int | None = None, batch_size: int = 4,
    grad_accumulation_steps: int = 1, learning_rate: float = 0.0001,
    lr_schedule: Literal['cosine', 'linear', 'constant'] = 'constant', warmup: int = 0,
    weight_decay: float = 0.0, clip_norm: float = 1.0, max_seq_length: int = 2048,
    thinking: bool | Literal['auto', 'on', 'off'] | None = 'auto', allow_special: bool = False,
    val_batches: int | None = None, steps_per_report: int = 10, steps_per_eval: int = 200,
    save_every: int = 100, patience: int | None = None, spike_threshold: float | None = None,
    keep: Literal['best', 'last'] = 'best', grad_checkpoint: bool = False,
    compile_step: Literal['auto', 'on', 'off'] = 'auto', resume: bool = True,
    count_buffers: bool = False, force: bool = False,
    log_to: Literal['trackio', 'wandb'] | None = None, log_project: str = 'mlxstacks',
    log_name: str | None = None, seed: int = 0, num_layers: int | None = None,
    layers: str | int | Sequence[int] = 'all', keys: str | Sequence[str] = (),
    resume_adapter_file: str | None = None, rank: int = 8, scale: float = 20.0,
    shared_outer: bool = False, dropout: float = 0.0,
    merge_ready: Literal['pooled', 'grid'] | None = None, mask_prompt: bool = True,
    base: Literal['auto', 'stored', 'float32'] = 'auto',
    guard: Literal['refuse', 'reshape', 'warn', 'off'] = 'refuse',
    resource_limit: int | None = None, working_set_bytes: int | None = None,
    progress: bool | Callable[..., None] | None = None, dry_run: bool = False) -> Result:
    """Train a LoRA on a model and write an adapter that mlx-lm loads."""

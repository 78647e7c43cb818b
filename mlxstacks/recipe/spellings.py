"""Options and keys as users of mlx-lm, llama.cpp, lm_eval, PEFT, Transformers and Unsloth write
them.

Those that mean the same work under their names; of the others it is said what to use instead.

    mlx_lm.generate  generate      mlx_lm.fuse     fuse       mlx_lm.convert   convert
    mlx_lm.chat      chat          mlx_lm.lora     train      mlx_lm.evaluate, lm_eval  eval
    mlx_lm.server    serve

An option that both have under one name stands in no table. `_` and `-` are one.
"""

from collections.abc import Collection, Mapping
from typing import TypeVar

# Setting -> the letter of its option, on every command that has the setting.
LETTERS: Mapping[str, str] = {"model": "-m", "prompt": "-p"}

# Command, or "" for all -> setting -> names that mean the same elsewhere. Help does not list them.
SPELLINGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "": {
        "model": ("--model-name", "--model-name-or-path"),
        "store_path": ("--store",),
        "adapter_path": ("--adapter",),
        "save_path": ("--output-dir", "--output-path", "--output", "--out-dir", "--out", "-o"),
        "max_tokens": ("--max-new-tokens",),
        "temp": ("--temperature",),
        "system_prompt": ("--system-instruction", "-sys"),
        "data": ("--dataset", "--dataset-name"),
        "rank": ("-r", "--r", "--lora-r", "--lora-rank"),
        "dropout": ("--lora-dropout",),
        "keys": ("--target-modules",),
        "batch_size": ("--per-device-train-batch-size",),
        "grad_accumulation_steps": ("--gradient-accumulation-steps",),
        "learning_rate": ("--lr",),
        "lr_schedule": ("--lr-scheduler-type",),
        "warmup": ("--warmup-steps",),
        "clip_norm": ("--max-grad-norm",),
        "log_to": ("--report-to",),
        "log_project": ("--project-name",),
        "log_name": ("--run-name",),
        "grad_checkpoint": ("--gradient-checkpointing", "--use-gradient-checkpointing"),
    },
    "train": {"save_path": ("--adapter-path",)},
    "stack": {"save_path": ("--store", "--store-path")},
    "confound": {"items": ("--data",)},
    "sweep": {
        "ranks": ("--rank", "-r", "--r", "--lora-r", "--lora-rank"),
        "seeds": ("--seed",),
        "projections": ("--keys", "--target-modules"),
    },
    "align": {
        "save_path": ("--adapter-path", "--output-dir"),
        "method": ("--loss-type", "--train-mode"),
        "reward": ("--reward-funcs",),
        "group_size": ("--num-generations",),
        "max_tokens": ("--max-completion-length",),
        "updates": ("--num-iterations",),
        "clip": ("--epsilon",),
    },
    "compare": {"data": ("--judge",)},
    "generate": {"prompts": ("--data", "--prompts-file")},
    "serve": {"concurrency": ("--decode-concurrency", "-np", "--parallel")},
    "eval": {
        "tasks": ("-t",),
        "batch_size": ("-b",),
        "limit": ("-L",),
        "allow_code": ("--confirm-run-unsafe-code",),
        "task_files": ("--include-path",),
    },
    "identity": {"max_prompts": ("--limit",)},
    "convert": {
        "model": ("--hf-path",),
        "save_path": ("--mlx-path",),
        "bits": ("--q-bits",),
        "group_size": ("--q-group-size",),
    },
}

_UPLOAD = "`mlxstacks push DIRECTORY OWNER/NAME` uploads what is written"
_KV = "the cache keeps the model's own dtype; leave it out"
_DRAFT = "speculative decoding is not offered; answers are decoded token by token"
_TEMPLATE = (
    "the chat template is the model's own, and --thinking its only switch; without a template the "
    "text goes in as it is"
)
_PREFILL = "prompts are read 512 tokens at a time; leave it out"
_RECIPE = (
    "--recipe FILE reads settings: the first line is `command:` and the command, then one setting "
    "a line, not indented, named like these options with underscores, as in `batch_size: 4`"
)
_STACK = "the shape of a stack is nested: --set stack.{}"
_BATCHES = "which counts batches, not optimizer steps"
_ROWS = (
    "both parts in one: a directory with train.jsonl and valid.jsonl, in Python "
    "{'train': rows, 'valid': rows}"
)

_Words = TypeVar("_Words")


def _each(table: Mapping[str | tuple[str, ...], _Words]) -> dict[str, _Words]:
    """One entry for each option; in the table several options may stand before their words."""
    return {
        option: words
        for options, words in table.items()
        for option in ([options] if isinstance(options, str) else options)
    }


# Option -> the setting that comes nearest, and how it differs; for commands that have the setting.
NEAREST: Mapping[str, tuple[str, str]] = _each({
    "--de-quantize": ("requant", "as --requant dequantize"),
    ("--tokens", "--num-tokens", "--n-predict", "-n"): ("max_tokens", ""),
    "--lora": ("adapter_path", "an MLX or PEFT directory; GGUF is not read"),
    "--wandb": ("log_to", "as --log-to wandb"),
    "--lora-layers": ("num_layers", ""),
    "--max-length": ("max_seq_length", ""),
    "--lora-alpha": ("scale", "which is lora_alpha / r, not lora_alpha"),
    ("--num-epochs", "--num-train-epochs", "--epochs"): (
        "iters", "which counts batches; without it the data is seen once"
    ),
    "--max-steps": ("iters", f"{_BATCHES}: max_steps x --grad-accumulation-steps"),
    (
        "--valid", "--validation", "--valid-data", "--val-data", "--eval-data", "--eval-dataset",
        "--validation-data", "--train-dataset", "--train-data",
    ): ("data", _ROWS),
    "--logging-steps": ("steps_per_report", _BATCHES),
    "--eval-steps": ("steps_per_eval", _BATCHES),
    "--save-steps": ("save_every", _BATCHES),
    "--warmup-ratio": ("warmup", "which counts optimizer steps"),
    "--quantization": ("bits", ""),
    "--stacks": ("store_path", ""),
    "--file": ("prompts", "a JSONL file"),
    "--samples": ("limit", "the number of items; they are not named one by one"),
})  # fmt: skip

# Commands that answer the options of another entry of REFUSED too.
_ALSO_ANSWERS = {"chat": ("generate", "decoding"), "generate": ("decoding",),
                 "serve": ("decoding",), "train": ("training",), "align": ("training",),
                 "stack": ("training",)}  # fmt: skip

# Command, or "" for all -> option -> what to do instead.
REFUSED: Mapping[str, Mapping[str, str]] = {
    "": _each({
        "--trust-remote-code": "code of a model is never run; convert it to a class of mlx-lm",
        ("--upload-repo", "--push-to-hub"): _UPLOAD,
        ("--load-in-4bit", "--load-in-8bit"): "a model is quantized once, on disk: `mlxstacks "
        "convert MODEL --bits 4 --save-path DIR`, and --model DIR",
        "--device": "MLX's default device is used; `mlxstacks doctor` shows it",
    }),
    "decoding": _each({
        ("-ngl", "--gpu-layers", "--n-gpu-layers"): "all layers run on MLX's default device; "
        "leave it out",
        ("-c", "--ctx-size"): "the context is the model's own; --max-tokens limits an answer",
    }),
    "training": _each({
        ("--bf16", "--fp16"): "--base says which numbers the frozen base computes with",
        "--optim": "AdamW alone is used; --weight-decay sets its decay",
        "--use-rslora": "--scale is the factor itself: lora_alpha / sqrt(r) for rsLoRA; stacks use "
        "that rule (stack.scale_rule)",
        "--use-dora": "LoRA alone is trained; DoRA is mlx_lm.lora's",
        "--lora-parameters": "rank, scale, dropout and keys stand beside the other settings",
        "--full-finetuning": "LoRA alone is trained; full fine-tuning is mlx_lm.lora's",
        "--resume-from-checkpoint": "a run resumes from its own last state, unless --no-resume",
    }),
    "stack": _each({
        ("-r", "--r", "--rank", "--lora-r", "--lora-rank"): _STACK.format("rank=8"),
        "--lora-alpha": _STACK.format("alpha=16"),
        "--lora-dropout": _STACK.format("dropout=0.1"),
    }),
    "generate": _each({
        "-m": "-m is --model here, as everywhere; --max-tokens sets the length of an answer",
        "--extra-eos-token": "end marks are the model's own; add yours to `eos_token_id` in its "
        "generation_config.json",
        "--image": "images are not read, only text; mlx-vlm reads them",
        "--prefill-response": "an answer begins where the template says; put the beginning into "
        "the prompt",
        ("--xtc-probability", "--xtc-threshold"): "XTC is not offered; --min-p, --top-p and "
        "--top-k narrow the draw",
        "--min-tokens-to-keep": "--min-p always keeps the likeliest token; leave it out",
        ("--ignore-chat-template", "--use-default-chat-template", "--chat-template-config"):
            _TEMPLATE,
        "--max-kv-size": "a cache that forgets is not offered: an answer is refused or cut off "
        "where the model's context is full; --max-tokens limits it",
        "--prefill-step-size": _PREFILL,
        "--prompt-cache-file": "a chat keeps its cache while it runs; none is kept on disk",
        ("--quantize-activations", "-q"): "activations keep their dtype; --base says in which",
        ("--kv-bits", "--kv-group-size", "--quantized-kv-start"): _KV,
        ("--draft-model", "--num-draft-tokens"): _DRAFT,
        "--verbose": "the answer goes to standard output and what is said about it to standard "
        "error, so `2>/dev/null` leaves the answer alone; --verbose takes no value",
    }),
    "chat": _each({
        "--pipeline": "one machine answers; mlx_lm.chat spreads a model over several",
        ("--prompt", "-p"): "prompts are typed, or come a line each from standard input; "
        "`mlxstacks generate` answers one and takes the same options, but --reroute",
    }),
    "serve": _each({
        ("--temp", "--top-p", "--top-k", "--min-p"): "each request gives its own; one without a "
        "temperature is answered greedily",
        ("--prompt-cache-size", "--prompt-cache-bytes"): "--budget bounds it",
        ("--kv-bits", "--kv-group-size", "--quantized-kv-start"): _KV,
        ("--draft-model", "--num-draft-tokens"): _DRAFT,
        ("--chat-template", "--use-default-chat-template"): _TEMPLATE,
        "--chat-template-args": "--thinking on or off is what templates are told",
        "--allowed-origins": "pages of other sites may not use the server",
        "--log-level": "a line a request goes to stderr, without its prompt",
        "--prompt-concurrency": "prompts of up to 8 requests are read together; leave it out",
        "--prefill-step-size": _PREFILL,
        "--pipeline": "one machine answers; mlx_lm.server spreads a model over several",
    }),
    "identity": {"--data": "--persona-data gives the persona's rows, --items the items"},
    "fuse": _each({
        ("--export-gguf", "--gguf-path"): "GGUF is not written; `mlx_lm.fuse --export-gguf` does, "
        "for llama and mistral models",
        "--dequantize": "--requant dequantize leaves the modules that the adapter changes without "
        "quantization; for the whole model, `mlx_lm.convert --dequantize` the result",
    }),
    "guard": {
        "--num-layers": "--layers names them: the last 16 of 40 layers are --layers 24-39",
    },
    "train": _each({
        "--train": "`train` always trains; leave it out",
        "--fine-tune-type": "LoRA alone is trained; leave it out for that, DoRA and full "
        "fine-tuning are mlx_lm.lora's",
        "--optimizer": "AdamW alone is used; --weight-decay 0, the default, makes it Adam",
        ("--test", "--test-batches"): "`mlxstacks eval` measures a trained adapter; `train` "
        "reports validation losses",
        ("--config", "-c"): _RECIPE,
        "--clear-cache-threshold": "the trainer clears the allocator's cache itself; leave it out",
    }),
    "eval": _each({
        ("--model-args", "-a", "-M"): "--model takes the directory or the Hugging Face id itself",
        ("--num-fewshot", "-f", "--num-shots"): "each task brings its own examples; for another "
        "number give a task file with --task-files",
        "--max-tokens": "each task sets the length of its answers; give a task file with "
        "--task-files for another",
        "--fewshot-as-multiturn": "examples stand before the question in one message; leave it out",
        "--apply-chat-template": "--chat all, generate or none says which prompts get it",
        "--no-apply-chat-template": "--chat none does without",
        "--chat-template-args": _TEMPLATE,
        ("--temp", "--top-p", "--top-k", "--gen-kwargs"): "answers are greedy, so that a run "
        "repeats to the letter",
        "--max-batch-size": "batches are as large as --batch-size says; leave it out",
        ("--log-samples", "-s", "--write-out", "-w"): "each answer is in answers/ of the save "
        "path, always; leave it out",
        ("--use-cache", "-c", "--cache-requests"): "a run keeps and checks its own answers; "
        "--no-resume begins again",
        "--check-integrity": "answers and data are hashed and checked in any case; leave it out",
        ("--predict-only", "-x"): "answers are graded too; `--regrade RUN` grades those of a run "
        "again",
        "-E": "--limit N takes items by their order or stratified (--sample)",
        ("--config", "-C"): _RECIPE,
        "--show-config": "--dry-run shows the settings and the plan",
        "--verbosity": "-v says more, -vv all",
        "--metadata": "--task-files reads what tasks need; leave it out",
        ("--wandb-args", "--wandb-config-args", "--trackio-args", "--hf-hub-log-args"):
            "result.json in the save path holds all figures, and `mlxstacks report` draws them",
    }),
    "convert": _each({
        ("--quantize", "-q"): "--bits N alone quantizes",
        "--q-mode": "MLX's affine grid alone is written; `mlx_lm.convert` writes the others",
        "--quant-predicate": "--module-bits PATTERN=N gives modules their own bits",
        ("--dequantize", "-d"): "`mlx_lm.convert --dequantize` does that",
    }),
}  # fmt: skip


# Commands of mlx-lm that have another name here, or none.
COMMANDS_ELSEWHERE: Mapping[str, str] = {
    "bench-metal": "it is a target of make: `make bench-metal` in a clone",
    "lora": "`mlxstacks train` trains one",
    "dpo": "`mlxstacks align` trains by DPO, or by ORPO with --method orpo",
    "orpo": "`mlxstacks align --method orpo` trains by ORPO",
    "grpo": "`mlxstacks align --method grpo --reward NAME` trains by GRPO",
    "dora": "`mlx_lm.lora --fine-tune-type dora` trains one, and `mlxstacks fuse` takes it",
    "evaluate": "`mlxstacks eval` does that",
    "perplexity": "`mlx_lm.perplexity` does; `mlxstacks compare` gives KL and changes of the loss",
    "server": "`mlxstacks serve` does that",
    **dict.fromkeys(("bench", "benchmark"), "`mlx_lm.benchmark` times a model"),
    **dict.fromkeys(("awq", "dwq"), "mlx-lm quantizes so; `mlxstacks fuse` takes the result"),
    "cache_prompt": "`mlxstacks serve` keeps the caches of prompts by itself",
    "upload": _UPLOAD,
    "merge": "`mlxstacks adapter merge` merges adapters, `mlxstacks fuse` puts them into a model",
    "quantize": "`mlxstacks convert MODEL --bits 4 --save-path DIR` does that",
}


def spellings(command: str, settings: Collection[str]) -> dict[str, str]:
    """Spelling -> the setting of a command that it means. A setting's own name wins."""
    own = {"--" + setting.replace("_", "-") for setting in settings}
    return {
        spelling: setting
        for table in (SPELLINGS[""], SPELLINGS.get(command, {}))
        for setting, names in table.items()
        if setting in settings
        for spelling in names
        if spelling not in own
    }


def refusal(command: str, option: str, settings: Collection[str] = ()) -> str | None:
    """What to do instead of an option that a command with these settings does not have, where it is
    known from elsewhere; else None.
    """
    for key in (command, *_ALSO_ANSWERS.get(command, ()), ""):
        if option in REFUSED.get(key, {}):
            return REFUSED[key][option]
    setting, difference = NEAREST.get(option, ("", ""))
    if setting not in settings:
        return None
    name = "--" + setting.replace("_", "-")
    return f"here it is {name}" + (f", {difference}" if difference else "")


def key_elsewhere(command: str, key: str, settings: Collection[str]) -> str | None:
    """What to use for a key of a recipe, or a keyword, that is another tool's; else None."""
    option = ("--" if len(key) > 1 else "-") + key.replace("_", "-")
    if option in (known := spellings(command, settings)):
        return f"here it is {known[option]!r}"
    setting, difference = NEAREST.get(option, ("", ""))
    if setting in settings:
        return f"here it is {setting!r}" + (f", {difference}" if difference else "")
    return refusal(command, option, settings)

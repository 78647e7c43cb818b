"""mlx-lm's options on our commands: those that mean the same, and what is said of the others.

    mlx_lm.generate  generate      mlx_lm.fuse     fuse       mlx_lm.convert   convert
    mlx_lm.chat      chat          mlx_lm.lora     train      mlx_lm.evaluate  eval

An option that both have under one name stands in neither table.
"""

from collections.abc import Mapping

# Command -> setting -> further spellings of its option.
SPELLINGS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "generate": {"prompt": ("-p", "--prompt"), "max_tokens": ("-m",)},
    "chat": {"max_tokens": ("-m",)},
    "train": {"save_path": ("--adapter-path",)},
    "eval": {"save_path": ("--output-dir",), "allow_code": ("--confirm-run-unsafe-code",)},
    "convert": {
        "model": ("--model", "--hf-path"),
        "save_path": ("--mlx-path",),
        "bits": ("--q-bits",),
        "group_size": ("--q-group-size",),
    },
}

_DEQUANTIZE = (
    "Short for --requant dequantize: modules that the adapter changes are left without "
    "quantization, the others keep theirs (mlx_lm.fuse dequantizes all)."
)
# Command -> option -> the setting that it stands for, its value, what help says.
FLAGS: Mapping[str, Mapping[str, tuple[str, str, str]]] = {
    "fuse": {"--dequantize": ("requant", "dequantize", _DEQUANTIZE)}
}

_UPLOAD = "nothing is uploaded from here; `hf upload OWNER/NAME DIRECTORY` uploads what was written"
_XTC = "XTC is not offered; --min-p, --top-p and --top-k narrow the draw"
_KV = "the cache keeps the model's own dtype; leave it out"
_DRAFT = "speculative decoding is not offered; answers are decoded token by token"
_TEMPLATE = (
    "the chat template is the model's own, and --thinking its only switch; without a template the "
    "text goes in as it is"
)
_GREEDY = "answers are greedy, so that a run repeats to the letter"
_TEST = "`mlxstacks eval` measures a trained adapter; `train` reports validation losses"
_LOGS = "each run writes log.jsonl into its save path, and `mlxstacks report` draws it"
_GGUF = "GGUF is not written; `mlx_lm.fuse --export-gguf` does, for llama and mistral models"
_ONE_PROMPT = (
    "prompts are typed, or come a line each from standard input; `mlxstacks generate` answers one "
    "and takes the same options, but --reroute"
)

# Command, or "" for all -> option -> what to do instead. `chat` has those of `generate` too.
REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {
        "--trust-remote-code": "code of a model is never run; convert it to a class of mlx-lm",
        "--upload-repo": _UPLOAD,
    },
    "generate": {
        "--extra-eos-token": "end marks are the model's own; add yours to `eos_token_id` in its "
        "generation_config.json",
        "--image": "images are not read, only text; mlx-vlm reads them",
        "--prefill-response": "an answer begins where the template says; put the beginning into "
        "the prompt",
        "--xtc-probability": _XTC,
        "--xtc-threshold": _XTC,
        "--min-tokens-to-keep": "--min-p always keeps the likeliest token; leave it out",
        "--ignore-chat-template": _TEMPLATE,
        "--use-default-chat-template": _TEMPLATE,
        "--chat-template-config": _TEMPLATE,
        "--max-kv-size": "a cache that forgets is not offered: an answer is refused or cut off "
        "where the model's context is full; --max-tokens limits it",
        "--prefill-step-size": "prompts are read 512 tokens at a time; leave it out",
        "--prompt-cache-file": "a chat keeps its cache while it runs; none is kept on disk",
        "--quantize-activations": "activations keep their dtype; --base says in which",
        "-q": "activations keep their dtype; --base says in which",
        "--kv-bits": _KV,
        "--kv-group-size": _KV,
        "--quantized-kv-start": _KV,
        "--draft-model": _DRAFT,
        "--num-draft-tokens": _DRAFT,
        "--verbose": "the answer goes to standard output and what is said about it to standard "
        "error, so `2>/dev/null` leaves the answer alone; --verbose takes no value",
    },
    "chat": {
        "--pipeline": "one machine answers; mlx_lm.chat spreads a model over several",
        "--prompt": _ONE_PROMPT,
        "-p": _ONE_PROMPT,
    },
    "fuse": {"--export-gguf": _GGUF, "--gguf-path": _GGUF},
    "train": {
        "--train": "`train` always trains; leave it out",
        "--fine-tune-type": "LoRA alone is trained; leave it out for that, DoRA and full "
        "fine-tuning are mlx_lm.lora's",
        "--optimizer": "AdamW alone is used; --weight-decay 0, the default, makes it Adam",
        "--resume-adapter-file": "a run resumes from its own last state; to build on an adapter, "
        "fuse it (`mlxstacks fuse`) and train on the result",
        "--test": _TEST,
        "--test-batches": _TEST,
        "--config": "--recipe FILE reads settings, by the names of these options with underscores "
        "and with `command: train`",
        "-c": "--recipe FILE reads settings, by the names of these options with underscores and "
        "with `command: train`",
        "--clear-cache-threshold": "the trainer clears the allocator's cache itself; leave it out",
        "--report-to": _LOGS,
        "--project-name": _LOGS,
    },
    "eval": {
        "--num-shots": "each task brings its own examples; for another number give a task file "
        "with --task-files",
        "--max-tokens": "each task sets the length of its answers; give a task file with "
        "--task-files for another",
        "--fewshot-as-multiturn": "examples stand before the question in one message; leave it out",
        "--apply-chat-template": "--chat all, generate or none says which prompts get it",
        "--no-apply-chat-template": "--chat none does without",
        "--chat-template-args": _TEMPLATE,
        "--temp": _GREEDY,
        "--top-p": _GREEDY,
        "--top-k": _GREEDY,
    },
    "convert": {
        "--quantize": "--bits N quantizes; leave it out",
        "-q": "--bits N quantizes; leave it out",
        "--q-mode": "MLX's affine grid alone is written; `mlx_lm.convert` writes the others",
        "--quant-predicate": "--module-bits PATTERN=N gives modules their own bits",
        "--dequantize": "`mlx_lm.convert --dequantize` does that",
        "-d": "`mlx_lm.convert --dequantize` does that",
    },
}


def refusal(command: str, option: str) -> str | None:
    """What to do instead of an option of mlx-lm that a command does not have; None for others."""
    tables = [command, *(["generate"] if command == "chat" else []), ""]
    return next((REFUSED[key][option] for key in tables if option in REFUSED.get(key, {})), None)

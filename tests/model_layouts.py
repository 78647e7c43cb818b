"""Tiny model directories in the layouts of public repositories, for tests/test_model_layouts.py.

Each function changes a copy of one of two tiny models: `dense` (llama, 4 bits, one file) or `moe`
(qwen3_5_moe, 4 bits, three shards). The first line of its docstring says where the layout is from.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.tiny_models import (
    NUM_LAYERS,
    qwen_moe_config,
    save_sharded,
    write_llama,
    write_model,
    write_qwen_moe,
)

INDEX = "model.safetensors.index.json"
DENSE_DOWN = "model.layers.1.mlp.down_proj"
MOE_DOWN = "language_model.model.layers.1.mlp.switch_mlp.down_proj"
MTP = {"mtp.fc.weight": mx.ones((8, 16)), "mtp.layers.0.mlp.experts.0.up_proj.weight": mx.ones(4)}
VISION = {"vision_tower.patch_embed.proj.weight": mx.ones((4, 2, 2, 3))}


@dataclass(frozen=True)
class Layout:
    """build: changes a copy of `base`, or (base None) fills an empty directory.

    opens: whether mlx-lm 0.32.2 loads it. touch: the module that a fuse changes. refuses: why a
    fuse of that module is refused, None where it is possible. left: what a fuse leaves behind.
    """

    name: str
    source: str
    build: Callable[[Path], None]
    base: str | None
    opens: bool
    touch: str
    refuses: str | None
    left: tuple[str, ...]


LAYOUTS: list[Layout] = []


def layout(
    base: str | None = "dense",
    opens: bool = True,
    touch: str | None = None,
    refuses: str | None = None,
    left: tuple[str, ...] = (),
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def register(build: Callable[[Path], None]) -> Callable[[Path], None]:
        source = (build.__doc__ or "").strip().splitlines()[0]
        module = touch or (MOE_DOWN if base == "moe" else DENSE_DOWN)
        LAYOUTS.append(Layout(build.__name__, source, build, base, opens, module, refuses, left))
        return build

    return register


def write_bases(directory: Path) -> None:
    write_llama(directory / "dense", bits=4)
    write_qwen_moe(directory / "moe", bits=4)


def tensors_of(directory: Path) -> dict[str, mx.array]:
    tensors: dict[str, mx.array] = {}
    for path in directory.glob("model*.safetensors"):
        tensors.update(mx.load(str(path)))
    mx.eval(tensors)
    return tensors


def rewrite(directory: Path, tensors: Mapping[str, mx.array], writer: str = "mlx") -> None:
    """Replace all shards by one file of `tensors` without an index."""
    for path in directory.glob("model*.safetensors*"):
        path.unlink()
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tensors), {"format": writer})


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    change(content)
    path.write_text(json.dumps(content))


def index_names(directory: Path, names: Mapping[str, str]) -> None:
    edit_json(directory / INDEX, lambda index: index["weight_map"].update(names))


def sidecar(directory: Path, name: str, tensors: Mapping[str, mx.array]) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(directory / name), dict(tensors), {"format": "mlx"})


# --- shards and indices ----------------------------------------------------------------------


@layout()
def one_file_and_index(directory: Path) -> None:
    """mlx_lm.convert of a small model: mlx-community/Qwen3-0.6B-4bit"""


@layout("moe")
def numbered_shards_and_index(directory: Path) -> None:
    """mlx_lm.convert and mlx-vlm 0.6.8: mlx-community/Qwen3.8-27B-4bit has three shards"""


@layout()
def one_file_without_index(directory: Path) -> None:
    """hub repositories of one file: HuggingFaceTB/SmolLM2-135M-Instruct"""
    (directory / INDEX).unlink()


@layout()
def index_of_the_unquantized_source(directory: Path) -> None:
    """mlx-community/Qwen3-VL-4B-Instruct-4bit: names two shards, ships one (mlx-swift-lm 554)"""
    names = [name for name in tensors_of(directory) if name.endswith("weight")]
    shards = {
        name.replace(
            "model.", "model.language_model.", 1
        ): f"model-0000{n % 2 + 1}-of-00002.safetensors"
        for n, name in enumerate(names)
    }
    edit_json(directory / INDEX, lambda index: index.update(weight_map=shards))


@layout("moe")
def index_of_another_count_of_shards(directory: Path) -> None:
    """mlx-community/Qwen3-VL-8B-Instruct-4bit: names four shards, ships two (mlx-swift-lm 554)"""
    names = sorted(tensors_of(directory))
    shards = {name: f"model-0000{n % 4 + 1}-of-00004.safetensors" for n, name in enumerate(names)}
    edit_json(directory / INDEX, lambda index: index.update(weight_map=shards))


@layout("moe", opens=False)
def shard_not_downloaded(directory: Path) -> None:
    """an interrupted download of any repository of several shards"""
    (directory / "model-00002-of-00003.safetensors").unlink()


@layout("moe", opens=False)
def shard_not_downloaded_without_index(directory: Path) -> None:
    """the same, of a repository without an index"""
    shard_not_downloaded(directory)
    (directory / INDEX).unlink()


@layout(opens=False)
def weights_outside_the_glob(directory: Path) -> None:
    """argmaxinc/mlx-FLUX.1-schnell-4bit-quantized: safetensors under other names (omlx 2096)"""
    (directory / "model.safetensors").rename(directory / "llama-4bit-quantized.safetensors")


@layout(opens=False)
def weights_00_safetensors(directory: Path) -> None:
    """mlx-examples before mlx-lm 0.1: weights.00.safetensors"""
    (directory / "model.safetensors").rename(directory / "weights.00.safetensors")
    (directory / INDEX).unlink()


@layout(opens=False)
def weights_npz(directory: Path) -> None:
    """mlx-community/Llama-2-7b-chat-mlx: weights.npz (mlx-llm-server 1)"""
    (directory / "model.safetensors").rename(directory / "weights.npz")
    (directory / INDEX).unlink()


@layout()
def hub_snapshot_of_links(directory: Path) -> None:
    """the hub client's cache: every file of a snapshot is a link to a blob"""
    blobs = directory.parent / f"{directory.name}-blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(directory.iterdir())):
        path.rename(blobs / f"{number:040x}")
        path.symlink_to(f"../{blobs.name}/{number:040x}")


@layout(opens=False)
def cache_folder_instead_of_the_snapshot(directory: Path) -> None:
    """models--owner--name of the hub client's cache, one level above its snapshots"""
    snapshot = directory / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    for path in list(directory.iterdir()):
        if path.is_file():
            path.rename(snapshot / path.name)


# --- vision towers and MTP heads -------------------------------------------------------------


@layout("moe")
def mtp_sidecar_in_the_index(directory: Path) -> None:
    """wang-yang/Ornith-1.0-35B-MTPLX (omlx 2062)"""
    sidecar(directory, "mtp.safetensors", MTP)
    index_names(directory, dict.fromkeys(MTP, "mtp.safetensors"))


@layout("moe")
def mtp_sidecar_not_in_the_index(directory: Path) -> None:
    """mlx-community/Qwen3.6-35B-A3B-OptiQ-4bit (omlx 1944); mlx-community/Qwen3.8-27B-MTP-4bit"""
    sidecar(directory, "mtp.safetensors", MTP)


@layout("moe")
def sidecars_in_a_folder(directory: Path) -> None:
    """mlx-optiq 0.3.1: optiq/mtp.safetensors, and a vision tower there that the index names"""
    sidecar(directory, "optiq/mtp.safetensors", MTP)
    sidecar(directory, "optiq/optiq_vision.safetensors", VISION)
    (directory / "optiq" / "sensitivity.json").write_text("{}")
    index_names(directory, dict.fromkeys(VISION, "optiq/optiq_vision.safetensors"))


@layout("moe", left=("optiq/optiq_vision.safetensors",))
def sidecars_flattened_by_a_download(directory: Path) -> None:
    """LM Studio's downloader flattens folders: the index names optiq/..., which lies at the root"""
    sidecars_in_a_folder(directory)
    for path in list((directory / "optiq").iterdir()):
        path.rename(directory / path.name)
    (directory / "optiq").rmdir()


@layout("moe")
def vision_sidecar_at_the_root(directory: Path) -> None:
    """mlx-optiq 0.7.7: optiq_vision.safetensors beside the shards, named by the index"""
    sidecar(directory, "optiq_vision.safetensors", VISION)
    index_names(directory, dict.fromkeys(VISION, "optiq_vision.safetensors"))
    (directory / "kv_config.json").write_text("{}")


@layout("moe", left=("mtp.safetensors",))
def sidecar_not_downloaded(directory: Path) -> None:
    """mlx_lm's download of wang-yang/Ornith-1.0-35B-MTPLX: the index names what it leaves out"""
    index_names(directory, dict.fromkeys(MTP, "mtp.safetensors"))


@layout("moe")
def sidecar_of_unknown_parts(directory: Path) -> None:
    """standalone drafters linked into a model: names of their own, in the index (mlx-serve 338)"""
    draft = {"layers.0.fc_hidden.weight": mx.ones((4, 4))}
    sidecar(directory, "drafter.safetensors", draft)
    index_names(directory, dict.fromkeys(draft, "drafter.safetensors"))


@layout("moe")
def sidecar_with_names_of_the_model(directory: Path) -> None:
    """a LoRA merged by hand, kept beside the shards: its tensors have the model's own names"""
    sidecar(directory, "backup.safetensors", {f"{MOE_DOWN}.scales": mx.zeros((1,))})


@layout("moe")
def mtp_in_a_file_of_the_glob(directory: Path) -> None:
    """d0xin/Swift-Qwen3.8-27B: model_mtp.safetensors, which model*.safetensors matches"""
    sidecar(directory, "model_mtp.safetensors", MTP)


@layout("moe")
def mtp_among_the_weights(directory: Path) -> None:
    """oMLX and mlx-serve: language_model.mtp.* in the shards of the model"""
    head = {f"language_model.{name}": value for name, value in MTP.items()}
    save_sharded(directory, tensors_of(directory) | head, 3)


@layout("moe")
def vision_among_the_weights(directory: Path) -> None:
    """mlx-community/Qwen3.5-9B-8bit: 333 tensors vision_tower.* in the shards (mlx-lm 946)"""
    save_sharded(directory, tensors_of(directory) | VISION, 3)
    edit_json(directory / "config.json", lambda config: config.update(vision_config={"depth": 1}))
    (directory / "preprocessor_config.json").write_text("{}")
    (directory / "video_preprocessor_config.json").write_text("{}")


@layout("moe")
def drafter_in_a_folder(directory: Path) -> None:
    """a model of its own below the model: a drafter, a pooling layer, ONNX exports"""
    shutil.copytree(directory, directory.parent / "draft-copy")
    (directory.parent / "draft-copy").rename(directory / "draft")
    (directory / "onnx").mkdir()
    (directory / "onnx" / "model.onnx").write_bytes(b"\x08\x07")


# --- what else lies in a directory -----------------------------------------------------------


@layout()
def gguf_beside(directory: Path) -> None:
    """repositories that ship mmproj-F16.gguf or a whole GGUF beside the safetensors"""
    (directory / "mmproj-F16.gguf").write_bytes(b"GGUF\x03\0\0\0")


@layout()
def consolidated_beside(directory: Path) -> None:
    """mistralai/Mistral-7B-Instruct-v0.3: the weights again, under Mistral's names"""
    sidecar(directory, "consolidated.safetensors", {"output.weight": mx.ones((4, 4))})
    (directory / "params.json").write_text("{}")
    (directory / "tokenizer.model.v3").write_bytes(b"\n\x0e\n\x05<unk>")


@layout(left=("original/consolidated.00.pth", "pytorch_model.bin", "pytorch_model.bin.index.json"))
def pickles_beside(directory: Path) -> None:
    """meta-llama/Llama-3.2-1B-Instruct: original/consolidated.00.pth; older: pytorch_model.bin"""
    (directory / "original").mkdir()
    (directory / "original" / "consolidated.00.pth").write_bytes(b"PK\x03\x04")
    (directory / "original" / "params.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x02}")
    (directory / "pytorch_model.bin.index.json").write_text("{}")


@layout(left=("modeling_llama.py", "inference/run.sh"))
def code_beside(directory: Path) -> None:
    """deepseek-ai/DeepSeek-V3 and others: modeling_*.py, an inference folder"""
    (directory / "modeling_llama.py").write_text("raise SystemExit\n")
    (directory / "inference").mkdir()
    (directory / "inference" / "run.sh").write_text("#!/bin/sh\n")
    (directory / "inference" / "config_16B.json").write_text("{}")


@layout()
def adapters_inside(directory: Path) -> None:
    """mlx_lm.lora run inside the model's directory: its default is ./adapters"""
    sidecar(directory, "adapters/adapters.safetensors", {"a.lora_a": mx.ones((4, 2))})
    (directory / "adapters" / "adapter_config.json").write_text("{}")


@layout(left=("adapter_config.json", "adapters.safetensors"))
def adapter_among_the_model_files(directory: Path) -> None:
    """mlx_lm.lora --adapter-path MODEL: transformers would apply that adapter on top of the fuse"""
    sidecar(directory, "adapters.safetensors", {"a.lora_a": mx.ones((4, 2))})
    (directory / "adapter_config.json").write_text("{}")


@layout(left=(".cache", ".gitattributes"))
def downloaded_to_a_folder(directory: Path) -> None:
    """hf download --local-dir: .cache/huggingface and .gitattributes; license and images"""
    (directory / ".cache" / "huggingface").mkdir(parents=True)
    (directory / ".cache" / "huggingface" / ".gitignore").write_text("*")
    (directory / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (directory / "LICENSE").write_text("Apache License\n")
    (directory / "README.md").write_text("---\nlibrary_name: mlx\n---\n")
    (directory / "assets").mkdir()
    (directory / "assets" / "logo.png").write_bytes(b"\x89PNG\r\n")


# --- tokenizers and templates ----------------------------------------------------------------


@layout()
def template_in_tokenizer_config(directory: Path) -> None:
    """mlx-lm before 0.21 and transformers before 4.43"""
    template = (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()
    edit_json(directory / "tokenizer_config.json", lambda c: c.update(chat_template=template))


@layout()
def template_in_json(directory: Path) -> None:
    """mlx-vlm conversions: chat_template.json"""
    template = (directory / "chat_template.jinja").read_text()
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))


@layout()
def several_templates(directory: Path) -> None:
    """transformers 4.53: additional_chat_templates/tool_use.jinja (CohereLabs/c4ai-command-r)"""
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")


@layout()
def sentencepiece_alone(directory: Path) -> None:
    """Llama 2 and Mistral conversions of 2023: tokenizer.model without tokenizer.json"""
    import sentencepiece

    text = directory / "text"
    text.write_text("a b c d e f g h i j k l m n o p\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(directory / "tokenizer"), vocab_size=290,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    for name in ("text", "tokenizer.json", "tokenizer.vocab"):
        (directory / name).unlink()
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@layout(opens=False)
def no_tokenizer(directory: Path) -> None:
    """a model directory copied without its tokenizer"""
    (directory / "tokenizer.json").unlink()


# --- quantization ----------------------------------------------------------------------------


@layout()
def quantization_key_alone(directory: Path) -> None:
    """mlx-lm before 0.20 wrote no quantization_config"""
    edit_json(directory / "config.json", lambda config: config.pop("quantization_config"))


@layout(base=None)
def overrides_under_mlx_names(directory: Path) -> None:
    """mlx_lm.convert --quant-predicate: mlx-community/ERNIE-4.5-300B-A47B-PT-4bit"""
    write_llama(directory, bits=4, overrides={"down_proj": {"bits": 8, "group_size": 32}})


@layout(base=None)
def overrides_under_other_names(directory: Path) -> None:
    """Vontra/DeepSeek-V4-Flash-0731-MXFP4-MLX: keys that no module has (mlx-vlm 1976)"""
    overrides_under_mlx_names(directory)
    edit_json(directory / "config.json", lambda config: hub_keys(config, "model.", "model.text."))


@layout(base=None, touch="language_model.model.layers.1.self_attn.o_proj")
def overrides_and_tensors_under_hub_names(directory: Path) -> None:
    """Intel/Qwen3.6-27B-4.5b-mlx-AutoRound: model.language_model.layers.* (mlx-vlm 1078, 1079)"""
    write_qwen_moe(directory, bits=4, overrides={"o_proj": {"bits": 8, "group_size": 32}})
    tensors = {hub_name(name): value for name, value in tensors_of(directory).items()}
    rewrite(directory, tensors, writer="pt")
    edit_json(
        directory / "config.json",
        lambda config: hub_keys(config, "language_model.model.", "model.language_model."),
    )


def hub_name(name: str) -> str:
    name = name.replace("language_model.model.", "model.language_model.")
    return name.removeprefix("language_model.")


def hub_keys(config: dict[str, Any], old: str, new: str) -> None:
    for key in ("quantization", "quantization_config"):
        config[key] = {name.replace(old, new): entry for name, entry in config[key].items()}


def requantized(directory: Path, **options: Any) -> None:
    """The tiny mixture, quantized by mlx-lm in another mode."""
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    write_qwen_moe(directory, bits=None, hidden_size=64)
    model, config = load_model(directory, lazy=True)
    model, config = quantize_model(model, config, None, None, **options)
    mx.eval(model.parameters())
    for path in directory.glob("model*.safetensors*"):
        path.unlink()
    save_model(directory, model)
    save_config(config, directory / "config.json")


def experts_alone(path: str, _: Any) -> bool | dict[str, Any]:
    return True if "switch_mlp" in path else {"group_size": 32, "bits": 8, "mode": "affine"}


@layout(base=None, touch="language_model.model.layers.1.self_attn.o_proj")
def mxfp4_experts_and_affine_rest(directory: Path) -> None:
    """mlx-community/gpt-oss-20b-MXFP4-Q8 (mlx-vlm 1728)"""
    requantized(directory, mode="mxfp4", quant_predicate=experts_alone)


@layout(base=None, touch=MOE_DOWN)
def mxfp4(directory: Path) -> None:
    """mlx_lm.convert --q-mode mxfp4"""
    requantized(directory, mode="mxfp4")


@layout(base=None, touch=MOE_DOWN)
def nvfp4(directory: Path) -> None:
    """mlx_lm.convert --q-mode nvfp4"""
    requantized(directory, mode="nvfp4")


@layout(base=None, touch=MOE_DOWN)
def mxfp8(directory: Path) -> None:
    """mlx_lm.convert --q-mode mxfp8"""
    requantized(directory, mode="mxfp8")


def as_awq(directory: Path) -> None:
    """Every projection of a plain llama as AutoAWQ packs it: (K, N / 8) int32 and (K / 128, N)."""
    write_llama(directory, bits=None, dtype="float16")
    tensors = {}
    for name, value in tensors_of(directory).items():
        if "_proj" not in name:
            tensors[name] = value
            continue
        rows, width = value.shape
        path = name.removesuffix(".weight")
        tensors[f"{path}.qweight"] = mx.full((width, rows // 8), 0x76543210, mx.int32)
        tensors[f"{path}.qzeros"] = mx.full((width // 128, rows // 8), 0x77777777, mx.int32)
        tensors[f"{path}.scales"] = mx.full((width // 128, rows), 0.01, mx.float16)
    rewrite(directory, tensors, writer="pt")
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    edit_json(
        directory / "config.json", lambda config: config.update(quantization_config=quantization)
    )


@layout(base=None, refuses="mlx-lm computes this weight from other tensors")
def awq(directory: Path) -> None:
    """Qwen/Qwen2.5-7B-Instruct-AWQ"""
    as_awq(directory)


@layout(base=None, opens=False)
def gptq_with_group_indices(directory: Path) -> None:
    """Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4: g_idx, which mlx-lm refuses"""
    as_awq(directory)
    extra = {f"{DENSE_DOWN}.g_idx": mx.zeros((256,), mx.int32)}
    rewrite(directory, tensors_of(directory) | extra, writer="pt")


@layout(opens=False)
def compressed_tensors(directory: Path) -> None:
    """RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16: weight_packed, weight_scale"""
    tensors = tensors_of(directory)
    tensors[f"{DENSE_DOWN}.weight_packed"] = tensors.pop(f"{DENSE_DOWN}.weight")
    tensors[f"{DENSE_DOWN}.weight_scale"] = tensors.pop(f"{DENSE_DOWN}.scales")
    rewrite(directory, tensors, writer="pt")
    hub = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    edit_json(
        directory / "config.json",
        lambda c: (c.pop("quantization"), c.update(quantization_config=hub)),
    )


@layout(base=None, touch="model.embed_tokens")
def bitnet(directory: Path) -> None:
    """microsoft/bitnet-b1.58-2B-4T: two-bit weights in bytes, embedding plain"""
    from mlx_lm.models.bitlinear_layers import bitnet_quantize
    from mlx_lm.utils import load_model, save_model

    config = {**json.loads((write_llama(directory, bits=None) / "config.json").read_text())}
    config |= {"model_type": "bitnet", "tie_word_embeddings": True, "rope_theta": 1e4}
    write_model(directory, config, bits=None, group_size=64, shards=1)
    model, _ = load_model(directory, lazy=True)
    hub = {"quant_method": "bitnet", "linear_class": "autobitlinear", "modules_to_not_convert": []}
    save_model(directory, bitnet_quantize(model, hub))
    edit_json(directory / "config.json", lambda config: config.update(quantization_config=hub))


# --- hub checkpoints that were never converted -----------------------------------------------


@layout(base=None)
def hub_llama(directory: Path) -> None:
    """unsloth/Llama-3.2-1B-Instruct: bfloat16, written by PyTorch, tied embeddings"""
    write_llama(directory, bits=None, tied=True)
    rewrite(directory, tensors_of(directory), writer="pt")


def as_hub_moe(directory: Path) -> None:
    """The tiny mixture as transformers 5 stores it, with vision tower and MTP head."""
    write_qwen_moe(directory, bits=None)
    tensors = {hub_name(name): value for name, value in tensors_of(directory).items()}
    for layer in range(NUM_LAYERS):
        block = f"model.language_model.layers.{layer}.mlp"
        gate, up, down = (
            tensors.pop(f"{block}.switch_mlp.{name}_proj.weight") for name in ("gate", "up", "down")
        )
        tensors[f"{block}.experts.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        tensors[f"{block}.experts.down_proj"] = down
    convolution = "model.language_model.layers.0.linear_attn.conv1d.weight"
    tensors[convolution] = mx.contiguous(tensors[convolution].moveaxis(1, 2))
    side = {"model.visual.patch_embed.proj.weight": mx.ones((4, 2, 2, 3)), **MTP}
    rewrite(directory, tensors | side, writer="pt")


@layout(base=None, touch="language_model.model.layers.1.self_attn.o_proj")
def hub_mixture(directory: Path) -> None:
    """Qwen/Qwen3.6-35B-A3B: experts fused, names and convolutions of the hub, norms minus one"""
    as_hub_moe(directory)


@layout(base=None, touch=MOE_DOWN)
def hub_mixture_down_experts(directory: Path) -> None:
    """the same: down_proj of all experts is one tensor, which mlx-lm takes as it is"""
    as_hub_moe(directory)


@layout(
    base=None,
    touch=MOE_DOWN.replace("down", "up"),
    refuses="computes this weight from other tensors as it loads the model (an unconverted hub",
)
def hub_mixture_up_experts(directory: Path) -> None:
    """the same: up_proj is half a tensor there"""
    as_hub_moe(directory)


@layout(base=None, touch="model.layers.1.mlp.switch_mlp.up_proj", refuses="mlxstacks convert")
def hub_experts_one_by_one(directory: Path) -> None:
    """Qwen/Qwen3-30B-A3B-Instruct-2507: mlp.experts.7.up_proj.weight"""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": NUM_LAYERS,
        "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": 320, "rope_theta": 1e4,
        "num_experts": 2, "num_experts_per_tok": 1, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": 64, "norm_topk_prob": True,
        "tie_word_embeddings": False, "max_position_embeddings": 1024,
    }  # fmt: skip
    write_model(directory, config, bits=None, group_size=64, shards=1)
    tensors = {}
    for name, value in tensors_of(directory).items():
        if ".switch_mlp." not in name:
            tensors[name] = value
            continue
        for expert, matrix in enumerate(value):
            tensors[name.replace("switch_mlp", f"experts.{expert}")] = mx.contiguous(matrix)
    rewrite(directory, tensors, writer="pt")


@layout(base=None, touch="model.layers.1.block_sparse_moe.switch_mlp.up_proj")
def mixtral(directory: Path) -> None:
    """mlx-community/Mixtral-8x7B-Instruct-v0.1-4bit: experts in block_sparse_moe, not in mlp"""
    config = {
        "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": NUM_LAYERS,
        "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_local_experts": 2, "num_experts_per_tok": 1, "vocab_size": 320,
    }  # fmt: skip
    write_model(directory, config, bits=4, group_size=64, shards=1)


# --- generations of configs ------------------------------------------------------------------


def qwen36_27b(directory: Path) -> None:
    config = qwen_moe_config()
    text = config["text_config"]
    dropped = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    for name in (*dropped, "shared_expert_intermediate_size"):
        text.pop(name)
    text |= {
        "model_type": "qwen3_5_text", "attention_bias": False, "attention_dropout": 0.0,
        "attn_output_gate": True, "bos_token_id": 256, "dtype": "bfloat16", "eos_token_id": 256,
        "hidden_act": "silu", "initializer_range": 0.02, "intermediate_size": 256,
        "layer_types": ["linear_attention", "full_attention"], "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish", "pad_token_id": None, "partial_rotary_factor": 0.25,
        "use_cache": True,
    }  # fmt: skip
    text["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    config |= {
        "model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302,
        "vision_end_token_id": 303, "language_model_only": False,
        "vision_config": {"deepstack_visual_indexes": [], "depth": 1, "hidden_size": 8},
    }  # fmt: skip
    write_model(directory, config, bits=4, group_size=64, shards=2, extra_tensors={**VISION, **MTP})


@layout(base=None, touch="language_model.model.layers.1.mlp.down_proj")
def qwen36_dense(directory: Path) -> None:
    """Qwen/Qwen3.6-27B: every key of its config.json"""
    qwen36_27b(directory)


@layout(base=None, touch="language_model.model.layers.1.mlp.down_proj")
def qwen38_dense(directory: Path) -> None:
    """Qwen/Qwen3.8-27B: model_type qwen3_5, keys of Qwen3.6-27B (xorbitsai/inference 5337)"""
    qwen36_27b(directory)
    sidecar(directory, "mtp.safetensors", MTP)  # as maclocal-api 181 has it beside the model


@layout("moe", opens=False)
def qwen38_flash_next(directory: Path) -> None:
    """mlx-community/Qwen3.8-Flash-Next-4bit: model_type qwen4_exp, no class in mlx-lm 0.32.2"""
    edit_json(directory / "config.json", lambda config: config.update(model_type="qwen4_exp"))

"""Fuse three expert projections into a 1.28 GB 3-bit model: `mlx_lm.fuse` beside `mlxstacks fuse`.

    python -m benchmarks.bench_fuse speed [--rounds 5]     whole processes, taking turns
        [--work DIR]  on another file system, one with copy-on-write clones for one
        [--modules 12]  an adapter on more of the experts' projections than three
        [--model DIR --adapter-path DIR]  of your own instead
    python -m benchmarks.bench_fuse memory [--rank 108]    peak memory with an adapter of 3 GB,
        [--layout parameters --rank 139]  in mlx-lm's format or one of PEFT's
        [--to gguf]  converted instead
        [--adapter-path DIR]  of your own, for the model in --work
    python -m benchmarks.bench_fuse fidelity               bits x delta x policy

The model is that of DESIGN section 10: 12 layers, hidden 1024, 128 experts of width 512, 3 bits,
group 64, five shards, random codes. The adapter has rank 2 on three `switch_mlp.down_proj`. The
last line of output is one JSON object.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from benchmarks.timing import Cost, alternate, machine, new_bytes, run_process, spread
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.shards import ShardWriter, read_tensor
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from tests.tiny_models import qwen_moe_config, random_adapter, write_model, write_tokenizer

LAYERS, SHARDS = 12, 5
TOUCHED_LAYERS = (3, 6, 9)
STEPS = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
POLICIES = ("refit", "keep", "nearest", "stochastic", "promote", "dequantize", "auto")


def big_config() -> dict[str, Any]:
    """The benchmark's architecture, as mlx-lm's `qwen3_5_moe` takes it."""
    config = qwen_moe_config(hidden_size=1024, num_experts=128, moe_intermediate_size=512)
    config["text_config"].update(
        num_hidden_layers=LAYERS,
        full_attention_interval=4,
        vocab_size=248320,
        num_attention_heads=8,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts_per_tok=8,
    )
    return config


def write_big_model(directory: Path) -> None:
    """Random codes, small scales, written tensor by tensor; no weight is ever quantized."""
    from mlx_lm.utils import _get_classes, quantize_model, save_config

    config = big_config()
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(json.loads(json.dumps(config))))
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, 64, 3, quant_predicate=model.quant_predicate)
    tensors = [(name, value.shape, value.dtype) for name, value in tree_flatten(model.parameters())]
    del model
    directory.mkdir(parents=True)
    total = sum(int(np.prod(shape)) * dtype.size for _, shape, dtype in tensors)
    weight_map: dict[str, str] = {}
    shards = list(_in_shards(tensors, total))
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_random_shard(directory / file, shard, number)
        weight_map.update({name: file for name, _, _ in shard})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    save_config(config, directory / "config.json")
    write_tokenizer(directory)


def _in_shards(tensors: list[tuple], total: int) -> Iterator[list[tuple]]:
    shard, size = [], 0
    for tensor in tensors:
        shard.append(tensor)
        size += int(np.prod(tensor[1])) * tensor[2].size
        if size >= total / SHARDS:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _write_random_shard(path: Path, tensors: list[tuple], seed: int) -> None:
    names = {mx.uint32: "U32", mx.bfloat16: "BF16", mx.float32: "F32"}
    entries = [(name, names[dtype], tuple(shape)) for name, shape, dtype in tensors]
    random = np.random.default_rng(seed)
    with ShardWriter(path, entries, {"format": "mlx"}) as writer:
        for name, dtype, shape in entries:
            count = int(np.prod(shape))
            if dtype == "U32":
                writer.write(name, random.integers(0, 2**32, count, dtype=np.uint32))
                continue
            # A module's scales again for its biases: zero is a point of the grid, as of MLX's own.
            values = np.random.default_rng(count).uniform(0.004, 0.006, count).astype(np.float32)
            if name.endswith("biases"):
                values *= -4
            raw = values if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
            writer.write(name, raw)
        writer.close()


def write_all_experts_adapter(directory: Path, rank: int, layout: str) -> None:
    """Every expert projection of every layer, written module by module.

    layout: "mlx", or of PEFT "parameters" (gate and up share lora_A) or "per_expert".
    """
    random = np.random.default_rng(0)
    shapes = {"gate_proj": (1024, 512), "up_proj": (1024, 512), "down_proj": (512, 1024)}
    if layout == "parameters":  # the inner wrapper is gate_up_proj
        shapes = {"base_layer": (1024, 1024), "": (512, 1024)}
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    keys = []
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.mlp"
        for name, (width, rows) in shapes.items():
            if layout == "mlx":
                keys.append(f"language_model.{block}.switch_mlp.{name}")
                entries.append((f"{keys[-1]}.lora_a", "F32", (128, rank, width)))
                entries.append((f"{keys[-1]}.lora_b", "F32", (128, rows, rank)))
                continue
            experts = [f"{e}." for e in range(128)] if layout == "per_expert" else [""]
            for expert in experts:
                path = f"base_model.model.{block}.experts.{expert}{name}".rstrip(".")
                ranks = rank * 128 // len(experts)
                entries.append((f"{path}.lora_A.weight", "F32", (ranks, width)))
                entries.append((f"{path}.lora_B.weight", "F32", (rows, ranks)))
    directory.mkdir(parents=True)
    file = "adapters.safetensors" if layout == "mlx" else "adapter_model.safetensors"
    with ShardWriter(directory / file, entries) as writer:
        for name, _, shape in entries:
            size = np.float32(1e-4 if "lora_b" in name.lower() else 1)
            for _ in range(shape[0]):
                writer.write(name, random.standard_normal(shape[1:], np.float32) * size)
    if layout == "mlx":
        _write_adapter_config(directory, rank, keys)
        return
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank,
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))


def _write_adapter_config(directory: Path, rank: int, keys: list[str]) -> None:
    config = {
        "fine_tune_type": "lora",
        "num_layers": LAYERS,
        "lora_parameters": {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": keys},
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))


def memory(
    work: Path, rank: int, layout: str, to: str | None, given: Path | None
) -> dict[str, Any]:
    """Peak memory of a fuse with an adapter on all experts (or another given one), or of its
    conversion.
    """
    model, adapter = work / "model", given or work / f"adapter-{layout}-{rank}"
    if not model.exists():
        write_big_model(model)
    if not adapter.exists():
        write_all_experts_adapter(adapter, rank, layout)
    target = work / "fused"
    fused = ["fuse", "--judge", "none", "--requant", "keep", "--adapter-path", str(adapter)]
    what = ["adapter", "convert", str(adapter), "--to", to] if to else fused
    command = [sys.executable, "-m", "mlxstacks", *what]
    cost = run_process([*command, "--model", str(model), "--save-path", str(target)])
    shutil.rmtree(target)
    return {"adapter_bytes": sum(f.stat().st_size for f in adapter.iterdir()), **cost.__dict__}


def write_big_adapter(directory: Path, modules: int) -> None:
    """Rank 2 on so many `switch_mlp.down_proj`; deltas of about a tenth of a step."""
    random = np.random.default_rng(0)
    tensors, keys = {}, []
    for layer in TOUCHED_LAYERS if modules == len(TOUCHED_LAYERS) else range(modules):
        path = f"language_model.model.layers.{layer}.mlp.switch_mlp.down_proj"
        keys.append(path)
        a = random.standard_normal((128, 2, 512)).astype(np.float32)
        b = random.standard_normal((128, 1024, 2)).astype(np.float32) * np.float32(3.5e-4)
        tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"] = mx.array(a), mx.array(b)
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "adapters.safetensors"), tensors)
    _write_adapter_config(directory, 2, keys)


def speed(work: Path, rounds: int, modules: int, given: tuple[Path, Path] | None) -> dict[str, Any]:
    """Time, peak memory and bytes written, with ratios to mlx_lm.fuse of the same round.

    given: a model and an adapter, instead of the benchmark's on so many modules.
    """
    model, adapter = given or (work / "model", work / f"adapter-{modules}")
    if not model.exists():
        write_big_model(model)
    if not adapter.exists():
        write_big_adapter(adapter, modules)
    written: dict[str, int] = {}
    compared = False
    common = ["--model", str(model), "--adapter-path", str(adapter), "--save-path"]

    def process(name: str, command: list[str]) -> Cost:
        nonlocal compared
        target = work / f"fused-{name}"
        shutil.rmtree(target, ignore_errors=True)
        cost = run_process([sys.executable, "-m", *command, *common, str(target)])
        written[name] = written_bytes(target, model)
        pair = [work / f"fused-{peer}" for peer in ("mlx_lm.fuse", "refit")]
        if not compared and all(path.exists() for path in pair):
            check_same_tensors(*pair)
            compared = True
        # Nothing stays behind but what the comparison still needs.
        for path in work.glob("fused-*"):
            if compared or path not in pair:
                shutil.rmtree(path)
        return cost

    command = ["mlxstacks", "fuse", "--judge", "none", "--requant"]  # the peer judges nothing
    ours = {policy: [*command, policy] for policy in ("refit", "auto", "nearest")}
    commands = {"mlx_lm.fuse": ["mlx_lm", "fuse"], **ours}
    runs = {name: partial(process, name, command) for name, command in commands.items()}
    costs = alternate(runs, rounds, lambda line: print(line, flush=True))
    return {
        "model_bytes": sum(f.stat().st_size for f in model.glob("*.safetensors")),
        "rows": {name: _speed_row(costs, name, written[name]) for name in commands},
    }


def written_bytes(target: Path, model: Path) -> int:
    """As our report counts, where clones are not written; of the peer, the bytes of new files."""
    if not (report := target / "result.json").exists():
        return new_bytes(target, model)
    return int(json.loads(report.read_text())["data"]["written_bytes"])


def check_same_tensors(theirs: Path, ours: Path) -> None:
    """Raises AssertionError where two checkpoints differ in a byte: no speed without equality."""
    expected, found = (open_checkpoint(path).tensors for path in (theirs, ours))
    assert expected.keys() == found.keys()
    for name, info in expected.items():
        np.testing.assert_array_equal(read_tensor(info), read_tensor(found[name]), err_msg=name)


def _speed_row(costs: dict[str, list[Cost]], name: str, written: int) -> dict[str, Any]:
    peer, own = costs["mlx_lm.fuse"], costs[name]
    pairs = list(zip(own, peer, strict=True))
    return {
        "wall_seconds": spread([c.wall_seconds for c in own]).__dict__,
        "time_ratio": spread([a.wall_seconds / b.wall_seconds for a, b in pairs]).__dict__,
        "cpu_seconds": spread([c.cpu_seconds for c in own]).__dict__,
        "cpu_ratio": spread([a.cpu_seconds / b.cpu_seconds for a, b in pairs]).__dict__,
        "peak_bytes": max(c.peak_bytes for c in own),
        "memory_ratio": spread([a.peak_bytes / b.peak_bytes for a, b in pairs]).__dict__,
        "written_bytes": written,
    }


def print_speed(result: dict[str, Any]) -> None:
    """The table as Markdown."""
    print(
        "| process | wall s (p20 to p80) | ratio | CPU s | ratio | peak MB | ratio | written MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, row in result["rows"].items():
        memory = row["memory_ratio"]
        times = [row[kind] for kind in ("wall_seconds", "time_ratio", "cpu_seconds", "cpu_ratio")]
        cells = [f"{t['median']:.3g} ({t['p20']:.3g} to {t['p80']:.3g})" for t in times]
        print(f"| {name} | {' | '.join(cells)} "
              f"| {row['peak_bytes'] / 1e6:.0f} | {memory['median']:.3f} "
              f"| {row['written_bytes'] / 1e6:.0f} |")  # fmt: skip


def fidelity_table(work: Path) -> list[dict[str, Any]]:
    """Every policy on Gaussian weights: 3 and 4 bits by delta, and router gates at 8 bits."""
    rows = []
    for bits in (3, 4):
        model = work / f"gaussian-{bits}"
        config = qwen_moe_config(256, 16, moe_intermediate_size=256)
        write_model(model, config, bits=bits, group_size=64, shards=2)
        for key, label in (("mlp.switch_mlp.down_proj", bits), ("mlp.gate", 8)):
            if label == 8 and bits == 4:
                continue
            for steps in STEPS:
                rows += list(_fidelity_rows(work, model, key, label, steps))
    return rows


def _fidelity_rows(
    work: Path, model: Path, key: str, bits: int, steps: float
) -> Iterator[dict[str, Any]]:
    std = steps * _mean_step(model, key)
    adapter = random_adapter(
        model, [key], rank=8, std=std, directory=work / f"adapter-{bits}-{steps}"
    )
    for policy in POLICIES:
        target = work / "fused"
        settings = FuseSettings(
            model=str(model),
            adapter_path=(str(adapter),),
            save_path=str(target),
            requant=policy,
            force=True,
        )
        report = fuse(settings)
        total = report.total
        assert total is not None
        modules = report.stages[0].modules
        yield {
            "bits": bits,
            "steps": steps,
            "policy": policy,
            "chosen": sorted({m.policy for m in modules}),
            "extra_bytes_percent": 100 * report.extra_bytes / sum(m.bytes_before for m in modules),
            **total.as_json(),
        }


def _mean_step(model: Path, key: str) -> float:
    scales = []
    for file in model.glob("model*.safetensors"):
        for name, value in mx.load(str(file)).items():
            if name.endswith(f"{key}.scales"):
                scales.append(np.abs(np.array(value.astype(mx.float32))).mean())
    return float(np.mean(scales))


def print_fidelity(rows: list[dict[str, Any]]) -> None:
    """The table as Markdown."""
    print(
        "| bits | delta/step | policy | correlation | survival | error | noise | artifact "
        "| bytes | chosen |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [_cell(row[k]) for k in ("correlation", "survival", "error", "noise", "artifact")]
        print(
            f"| {row['bits']} | {row['steps']} | {row['policy']} | {' | '.join(cells)} "
            f"| {row['extra_bytes_percent']:+.0f}% | {', '.join(row['chosen'])} |"
        )


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "memory", "fidelity"))
    parser.add_argument("--rank", type=int, default=108, help="of the adapter of `memory`")
    parser.add_argument("--layout", choices=("mlx", "parameters", "per_expert"), default="mlx")
    parser.add_argument("--to", help="format to which `memory` converts the adapter")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="keep the model there; default: a temporary one")
    parser.add_argument("--modules", type=int, choices=range(1, LAYERS + 1), default=3)
    parser.add_argument("--model", type=Path, help="of `speed`, with --adapter-path")
    parser.add_argument("--adapter-path", type=Path)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        if options.what == "speed":
            given = options.model and (options.model, options.adapter_path)
            result: Any = speed(work, options.rounds, options.modules, given)
            print_speed(result)
        elif options.what == "memory":
            result = memory(work, options.rank, options.layout, options.to, options.adapter_path)
        else:
            result = fidelity_table(work)
            print_fidelity(result)
    print(json.dumps({"benchmark": f"fuse {options.what}", "machine": machine(), "result": result}))


if __name__ == "__main__":
    main()

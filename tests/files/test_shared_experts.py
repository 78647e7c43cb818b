"""Expert adapters with one lora_a or lora_b for all experts ("shared outer"): mlx-lm's and PEFT's.

Such files are in public repositories: melodyhorse/gpt-oss-20b-triviaqa-rl has w1.lora_A of
(1, 32, 2880) and w1.lora_B of (32, 2880, 32); SGLang 21466 and Megatron-Bridge 3981 describe them.
The layouts that vLLM and SGLang read are written from these and from full ones.
Run: pytest tests/files/test_shared_experts.py
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from mlxstacks.errors import AdapterError
from mlxstacks.files.adapter_commands import convert_adapter
from mlxstacks.files.adapters import load_any_adapter, match_adapter, read_adapter, write_adapter
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.lora_modules import Adapter, LoraModule, is_shared_outer, mlx_config
from mlxstacks.files.peft_adapters import read_peft
from mlxstacks.files.peft_export import write_peft
from mlxstacks.files.settings import AdapterConvertSettings, ExpertLayout
from mlxstacks.fuse.run import run
from mlxstacks.fuse.settings import FuseSettings
from tests.files.peft_cases import assert_same, delta_of, save_peft
from tests.tiny_models import write_qwen_moe

EXPERTS, RANK, HIDDEN, INNER = 4, 2, 128, 64
BLOCK = "language_model.model.layers.0.mlp.switch_mlp"
# Experts in lora_a and in lora_b: outer halves shared, the other way round, and both.
SHARED = [(1, EXPERTS), (EXPERTS, 1), (1, 1)]


def halves(experts_a: int, experts_b: int, input_dims: int, output_dims: int) -> list[np.ndarray]:
    rng = np.random.default_rng(experts_a)
    shapes = (experts_a, RANK, input_dims), (experts_b, output_dims, RANK)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def mlx_adapter(directory: Path, a: np.ndarray, b: np.ndarray) -> Path:
    directory.mkdir(parents=True)
    save_file({f"{BLOCK}.down_proj.{n}": x for n, x in (("lora_a", a), ("lora_b", b))},
              directory / "adapters.safetensors")  # fmt: skip
    config = {"num_layers": 2, "lora_parameters": {"rank": RANK, "scale": 2.0, "dropout": 0.0}}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_moe(tmp_path_factory.mktemp("shared") / "model", bits=4, tokenizer=False)


@pytest.mark.parametrize("shared", SHARED)
def test_shared_half_is_fused_as_equal_ones_are(
    shared: tuple[int, int], model: Path, tmp_path: Path
) -> None:
    a, b = halves(*shared, INNER, HIDDEN)
    short = mlx_adapter(tmp_path / "short", a, b)
    repeated = (np.tile(x, (EXPERTS // len(x), 1, 1)) for x in (a, b))
    full = mlx_adapter(tmp_path / "full", *repeated)
    for adapter in (short, full):
        fuse = FuseSettings(
            model=str(model), adapter_path=(str(adapter),), save_path=f"{adapter}-fused"
        )
        run(fuse)
    names = sorted(path.name for path in model.glob("model*.safetensors"))
    for name in names:
        one, other = (tmp_path / f"{kind}-fused" / name for kind in ("short", "full"))
        assert one.read_bytes() == other.read_bytes()
    touched = open_checkpoint(model).tensors[f"{BLOCK}.down_proj.weight"].file.name
    assert (tmp_path / "short-fused" / touched).read_bytes() != (model / touched).read_bytes()


def test_copy_of_a_shared_adapter_is_one_that_mlx_lm_loads(model: Path, tmp_path: Path) -> None:
    """mlx-lm 0.32.2 itself refuses a half with one expert; what is written has them all."""
    from mlx_lm.utils import load_adapters, load_model

    adapter = mlx_adapter(tmp_path / "short", *halves(1, EXPERTS, INNER, HIDDEN))
    with pytest.raises(ValueError, match="does not match"):
        load_adapters(load_model(model, lazy=True)[0], str(adapter))
    write_adapter(read_adapter(adapter), tmp_path / "full")
    load_adapters(load_model(model, lazy=True)[0], str(tmp_path / "full"))
    assert_same(read_adapter(adapter), read_adapter(tmp_path / "full"))


@pytest.mark.parametrize("experts", [2, 8])
def test_halves_of_other_counts_are_refused(experts: int, model: Path, tmp_path: Path) -> None:
    adapter = mlx_adapter(tmp_path / "a", *halves(experts, EXPERTS, INNER, HIDDEN))
    with pytest.raises(AdapterError, match=f"{experts} and 4 experts; either half has all of them"):
        read_adapter(adapter)
    adapter = mlx_adapter(tmp_path / "b", *halves(1, experts, INNER, HIDDEN))
    with pytest.raises(AdapterError, match=r"allowed: lora_a \[4, r, 64\]"):
        match_adapter(read_adapter(adapter), open_checkpoint(model))


@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")])
def test_stacked_experts_of_other_trainers_are_read(
    names: tuple[str, str, str], model: Path, tmp_path: Path
) -> None:
    """gate and up share lora_A, down shares lora_B; gate_up_proj is both, gate above up."""
    gate, up = halves(1, EXPERTS, HIDDEN, INNER), halves(1, EXPERTS, HIDDEN, INNER)
    up[0], up[1] = gate[0], up[1] + 1
    down = halves(EXPERTS, 1, INNER, HIDDEN)
    tensors = {}
    for name, pair in zip(names, (gate, up, down), strict=True):
        for half, values in zip("AB", pair, strict=True):
            tensors[f"mlp.experts.{name}.lora_{half}.weight"] = values
    checkpoint = open_checkpoint(model)
    adapter = load_any_adapter(save_peft(tmp_path / "peft", tensors, {}), model=checkpoint)
    fused = {name: tensors[name] for name in tensors if names[2] in name}
    fused["mlp.experts.gate_up_proj.lora_A.weight"] = gate[0]
    fused["mlp.experts.gate_up_proj.lora_B.weight"] = np.concatenate([gate[1], up[1]], axis=1)
    assert_same(
        load_any_adapter(save_peft(tmp_path / "fused", fused, {}), model=checkpoint), adapter
    )
    assert adapter.modules.keys() == {f"{BLOCK}.{n}_proj" for n in ("gate", "up", "down")}
    for name, (a, b) in {"gate": gate, "up": up, "down": down}.items():
        module = adapter.modules[f"{BLOCK}.{name}_proj"]
        for expert in range(EXPERTS):
            assert (module.lora_a[expert] == a[expert if len(a) > 1 else 0]).all()
            assert (module.lora_b[expert] == b[expert if len(b) > 1 else 0]).all()
        assert module.scale == 2.0
    assert len(match_adapter(adapter, checkpoint)) == 3


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((2, RANK, HIDDEN), (EXPERTS, INNER, RANK), "where either E may be 1"),
        ((1, RANK, HIDDEN), (EXPERTS, INNER, RANK + 1), "where either E may be 1"),
        ((1, 3, HIDDEN), (EXPERTS, INNER, 3), "rank 3 in the file, 2 by the config"),
        ((1, RANK, HIDDEN), (EXPERTS, INNER + 1, RANK), "65 rows are no gate and up"),
    ],
)
def test_stacked_experts_of_wrong_shapes_are_refused(
    a: tuple[int, ...], b: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    tensors = {
        f"mlp.experts.gate_up_proj.lora_{half}.weight": np.ones(shape, np.float32)
        for half, shape in (("A", a), ("B", b))
    }
    with pytest.raises(AdapterError, match=f"layers.0.mlp.experts.gate_up_proj.*{message}"):
        load_any_adapter(save_peft(tmp_path / "peft", tensors, {}))


# --- what servers read ----------------------------------------------------------------------------


def adapter_of(block: str, shared: bool, experts: int = EXPERTS, rank: int = RANK) -> Adapter:
    """gate, up and down of one block and a dense module, random; outer halves shared or not."""
    rng = np.random.default_rng(experts + rank)

    def half(count: int, *shape: int) -> np.ndarray:
        drawn = rng.standard_normal((count, *shape)).astype(np.float32)
        return np.broadcast_to(drawn, (experts, *shape))

    outer = 1 if shared else experts
    pairs = {
        name: (half(outer, rank, HIDDEN), half(experts, INNER, rank)) for name in ("gate", "up")
    }
    pairs["down"] = half(experts, rank, INNER), half(outer, HIDDEN, rank)
    modules = {
        (path := f"model.layers.0.{block}.switch_mlp.{name}_proj"): LoraModule(
            path, *pair, "F32", 2.0
        )
        for name, pair in pairs.items()
    }
    path = "model.layers.0.self_attn.q_proj"
    a, b = (rng.standard_normal(s).astype(np.float32) for s in ((HIDDEN, rank), (rank, HIDDEN)))
    modules[path] = LoraModule(path, a, b, "F32", 2.0)
    return Adapter(Path("an-adapter"), mlx_config(modules), modules, {})


def experts_of(module: LoraModule) -> LoraModule:
    """The same with memory of its own for every expert."""
    a, b = (np.ascontiguousarray(half) for half in (module.lora_a, module.lora_b))
    return LoraModule(module.path, a, b, module.dtype, module.scale)


@given(
    st.sampled_from(["mlp", "block_sparse_moe"]), st.sampled_from(["per_expert", "stacked"]),
    st.booleans(), st.integers(2, 12), st.integers(1, 3),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_layouts_of_servers_read_back_to_the_bit(
    block: str, layout: ExpertLayout, shared: bool, experts: int, rank: int
) -> None:
    adapter = adapter_of(block, shared, experts, rank)
    with tempfile.TemporaryDirectory() as directory:
        write_peft(adapter, f"{directory}/out", experts_layout=layout)
        again = read_peft(f"{directory}/out")
        assert_same(again, Adapter(again.directory, again.config, {
            path: adapter.modules[path] for path in again.modules}, {}))  # fmt: skip
        assert again.modules.keys() == adapter.modules.keys()
        assert is_shared_outer(again.modules.values()) == shared


@pytest.mark.parametrize(("block", "leaf"), [("mlp", "up_proj"), ("block_sparse_moe", "w3")])
def test_vllm_reads_a_linear_of_each_expert(block: str, leaf: str, tmp_path: Path) -> None:
    adapter = adapter_of(block, shared=False)
    write_peft(adapter, tmp_path / "out", experts_layout="per_expert")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    assert config["target_parameters"] is None
    assert len(tensors) == 2 * (3 * EXPERTS + 1)
    prefix = f"base_model.model.model.layers.0.{block}.experts"
    delta = delta_of(adapter.modules[f"model.layers.0.{block}.switch_mlp.up_proj"])
    for expert in range(EXPERTS):
        a, b = (
            tensors[f"{prefix}.{expert}.{leaf}.lora_{half}.weight"].astype(np.float64)
            for half in "AB"
        )
        np.testing.assert_array_equal(config["lora_alpha"] / config["r"] * (b @ a), delta[expert])


@pytest.mark.parametrize("shared", [True, False])
def test_sglang_reads_shared_halves_once(shared: bool, tmp_path: Path) -> None:
    adapter = adapter_of("mlp", shared)
    modules = {path: experts_of(m) if m.is_switch else m for path, m in adapter.modules.items()}
    full = Adapter(adapter.directory, adapter.config, modules, {})
    write_peft(full, tmp_path / "out", experts_layout="stacked")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    once, prefix = 1 if shared else EXPERTS, "base_model.model.model.layers.0.mlp.experts"
    shapes = {"w1": [(once, RANK, HIDDEN), (EXPERTS, INNER, RANK)],
              "w2": [(EXPERTS, RANK, INNER), (once, HIDDEN, RANK)]}  # fmt: skip
    for name, pair in {**shapes, "w3": shapes["w1"]}.items():
        stored = [tensors[f"{prefix}.{name}.lora_{half}.weight"] for half in "AB"]
        assert [half.shape for half in stored] == pair
    up = delta_of(adapter.modules["model.layers.0.mlp.switch_mlp.up_proj"])
    a, b = (tensors[f"{prefix}.w3.lora_{half}.weight"].astype(np.float64) for half in "AB")
    np.testing.assert_array_equal(2.0 * (b @ a), up)


def test_one_module_with_other_halves_leaves_all_in_full(tmp_path: Path) -> None:
    """A server has one flag for all modules."""
    adapter = adapter_of("mlp", shared=True)
    path = "model.layers.0.mlp.switch_mlp.up_proj"
    other = experts_of(adapter.modules[path])
    other.lora_a[1, 0, 0] += 1
    mixed = Adapter(adapter.directory, adapter.config, {**adapter.modules, path: other}, {})
    write_peft(mixed, tmp_path / "out", experts_layout="stacked")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {len(tensor) for name, tensor in tensors.items() if "experts" in name} == {EXPERTS}


def test_mlx_lm_format_with_shared_halves_once(model: Path, tmp_path: Path) -> None:
    a, b = halves(EXPERTS, 1, INNER, HIDDEN)
    source = mlx_adapter(tmp_path / "full", a, np.tile(b, (EXPERTS, 1, 1)))
    target = tmp_path / "short"
    convert_adapter(
        AdapterConvertSettings(
            adapter_path=str(source), save_path=str(target), to="mlx", experts="stacked"
        )
    )
    assert len(load_file(target / "adapters.safetensors")[f"{BLOCK}.down_proj.lora_b"]) == 1
    assert_same(read_adapter(target), read_adapter(source))
    assert len(match_adapter(read_adapter(target), open_checkpoint(model))) == 1

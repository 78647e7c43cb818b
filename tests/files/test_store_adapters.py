"""Adapters into a store and out again: equal deltas, bit for bit where the dtype allows.

pytest tests/files/test_store_adapters.py
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import AdapterError, InputError, StoreError, TargetError
from mlxstacks.files.adapters import load_any_adapter, write_adapter
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.lora_modules import Adapter, LoraModule, mlx_config
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.peft_export import write_peft
from mlxstacks.files.settings import (
    StacksExportSettings,
    StacksImportSettings,
    StacksVerifySettings,
)
from mlxstacks.files.stack_adapters import export_stack, import_adapter
from mlxstacks.files.stack_file import ProjectionShape
from mlxstacks.files.store import Store
from mlxstacks.files.store_verify import verify_store
from mlxstacks.ops.affine import from_storage, to_storage
from tests.files.store_cases import BASE, ONE_EXPERT, add_domain, header, make_store, tensors, tree

LAYER = "language_model.model.layers"
SHAPES = {
    f"{LAYER}.0.linear_attn.out_proj": ((16, 3), (3, 24)),
    f"{LAYER}.1.self_attn.q_proj": ((16, 3), (3, 32)),
    f"{LAYER}.1.mlp.switch_mlp.gate_proj": ((4, 3, 16), (4, 8, 3)),
    f"{LAYER}.1.mlp.switch_mlp.up_proj": ((4, 3, 16), (4, 8, 3)),
    f"{LAYER}.1.mlp.switch_mlp.down_proj": ((4, 3, 8), (4, 16, 3)),
}


def adapter(dtype: str = "F16", scale: float = 1.75, std: float = 0.1, base: str | None = None,
            paths: Any = None) -> Adapter:  # fmt: skip
    random = np.random.default_rng(7)

    def numbers(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return to_storage((std * random.standard_normal(shape)).astype(np.float32), dtype)

    modules = {
        path: LoraModule(path, numbers(a), numbers(b), dtype, scale)
        for path, (a, b) in SHAPES.items()
        if paths is None or path in paths
    }
    return Adapter(Path("made"), mlx_config(modules, "tiny", base), modules, {})


def take_in(store: Store | Path, source: Path, dry_run: bool = False, **options: Any) -> Any:
    path = store.path if isinstance(store, Store) else store
    options = {"domain": "law", **options}
    settings = StacksImportSettings(store_path=str(path), adapter_path=str(source), **options)
    return import_adapter(settings, dry_run)


def give_out(
    store: Store | Path, name: str, out: Path, dry_run: bool = False, **options: Any
) -> Any:
    path = store.path if isinstance(store, Store) else store
    settings = StacksExportSettings(store_path=str(path), stack=name, save_path=str(out), **options)
    return export_stack(settings, dry_run)


def assert_same(first: Adapter, second: Adapter) -> None:
    assert first.modules.keys() == second.modules.keys()
    for path, module in first.modules.items():
        other = second.modules[path]
        assert (module.dtype, module.scale) == (other.dtype, other.scale)
        for mine, theirs in ((module.lora_a, other.lora_a), (module.lora_b, other.lora_b)):
            assert mine.tobytes() == np.ascontiguousarray(theirs).tobytes()


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
@pytest.mark.parametrize("kind", ["mlx", "peft"])
@pytest.mark.parametrize("to", ["mlx", "peft"])
def test_half_precision_goes_in_and_out_bit_for_bit(
    tmp_path: Path, dtype: str, kind: str, to: str
) -> None:
    made = adapter(dtype)
    write = write_adapter if kind == "mlx" else write_peft
    write(made, tmp_path / "in")
    store = make_store(tmp_path / "store", ["chat"])
    done = take_in(store, tmp_path / "in")
    assert (done.exact, done.rounding, done.base) == (True, 0.0, "not verifiable")
    assert done.storage == {"F16": "float16", "BF16": "bfloat16"}[dtype]
    assert verify_store(StacksVerifySettings(store_path=str(store.path))).problems == ()
    give_out(store, "law", tmp_path / "out", to=to)
    back = load_any_adapter(tmp_path / "out")
    assert_same(made, back)
    assert back.base_fingerprint == BASE
    # and in again: the same stack, but for where it came from
    store.refresh()
    take_in(store, tmp_path / "out", domain="law2")
    opened = Store.open(store.path)
    first = opened.read_stack(opened.stack_named("law-r1"))
    second = opened.read_stack(opened.stack_named("law2-r1"))
    assert first.header.projections == second.header.projections
    for name, array in first.tensors.items():
        assert mx.array_equal(array, second.tensors[name]).item()


def test_float32_is_rounded_once_and_says_so(tmp_path: Path) -> None:
    made = adapter("F32")
    write_adapter(made, tmp_path / "in")
    store = make_store(tmp_path / "store", ["chat"])
    done = take_in(store, tmp_path / "in")
    assert not done.exact
    assert 1e-5 < done.rounding < 2**-11
    assert "rounded to float16" in " ".join(done.notes)
    give_out(store, "law-r1", tmp_path / "out")
    back = load_any_adapter(tmp_path / "out")
    for path, module in made.modules.items():
        expected = module.lora_a.astype(np.float16)
        assert np.array_equal(back.modules[path].lora_a, expected)
    # a second round trip changes nothing any more
    done = take_in(store, tmp_path / "out", domain="again")
    assert done.exact


def test_a_stack_computes_the_deltas_of_its_adapter(tmp_path: Path) -> None:
    from mlxstacks.layers.moe_lora import Rows
    from mlxstacks.layers.packed import FrozenStack, PackedStacks, StackShape
    from mlxstacks.layers.selection import StackId

    made = adapter("F16")
    write_adapter(made, tmp_path / "in")
    store = make_store(tmp_path / "store", ["chat"])
    take_in(store, tmp_path / "in")
    opened = Store.open(store.path)
    stack = opened.read_stack(opened.stack_named("law-r1"))
    path = f"{LAYER}.1.self_attn.q_proj"
    p = stack.header.projections[path]
    packed = PackedStacks()
    shape = StackShape(p.form, p.num_experts, p.rank, p.experts_per_token, p.scale)
    a, b = stack.tensors[f"{path}.lora_a"], stack.tensors[f"{path}.lora_b"]
    packed.replace_all([FrozenStack(StackId("law-r1", "law"), shape, a, b, None)])
    x = mx.random.normal((5, 16), key=mx.random.key(0))
    delta = packed(x, Rows())
    assert delta is not None
    module = made.modules[path]
    wanted = module.scale * (
        np.array(x) @ from_storage(module.lora_a, "F16") @ from_storage(module.lora_b, "F16")
    )
    assert np.allclose(np.array(delta), wanted, atol=1e-5)


def test_shared_experts_are_copied_for_each(tmp_path: Path) -> None:
    path = "model.layers.0.mlp.switch_mlp.up_proj"
    shapes = {path: ProjectionShape("shared", 1, 3, 1, 1.7, 16, 8, 5)}
    store = Store.create(tmp_path / "store", "tiny", BASE)
    add_domain(store, "chat", rounds=1, projections=shapes)
    done = give_out(store, "chat", tmp_path / "out")
    assert done.copies == 1
    module = load_any_adapter(tmp_path / "out").modules[path]
    stack = store.read_stack(store.stack_named("chat-r1"))
    assert module.lora_a.shape == (5, 3, 16)
    for expert in range(5):
        assert np.array_equal(module.lora_a[expert], np.array(stack.tensors[f"{path}.lora_a"][0]))
        assert np.array_equal(module.lora_b[expert], np.array(stack.tensors[f"{path}.lora_b"][0]))


def test_trained_one_expert_stack_loads_in_mlx_lm(tmp_path: Path, moe: Path) -> None:
    from mlx_lm import load

    base = fingerprint(open_checkpoint(moe))
    shapes = {
        f"{LAYER}.1.self_attn.o_proj": ProjectionShape("linear", 1, 2, 1, 2.5, 128, 128),
        f"{LAYER}.1.mlp.switch_mlp.up_proj": ProjectionShape(
            "per_expert", 1, 2, 1, 2.5, 128, 64, 4
        ),
    }
    store = Store.create(tmp_path / "store", "moe", base)
    with store.change() as change:
        head = header("chat", projections=shapes, base_fingerprint=base)
        record = change.add_stack(tensors(head), head)
        change.manifest = change.manifest.with_domain(DomainRecord("chat", True, (record,)))
    give_out(store, "chat", tmp_path / "out")
    model, *_ = load(str(moe), adapter_path=str(tmp_path / "out"))
    layer = model.layers[1].self_attn.o_proj
    assert layer.scale == 2.5
    stack = tensors(head)[f"{LAYER}.1.self_attn.o_proj.lora_a"]
    assert mx.array_equal(layer.lora_a, stack[0].T).item()


# --- refusals --------------------------------------------------------------------------------


def test_stacks_with_a_router_are_refused_with_the_reason(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    with pytest.raises(InputError, match=r"2 experts a projection and a router.*num_experts=1"):
        give_out(store, "chat-r1", tmp_path / "out")
    with pytest.raises(InputError, match="domain chat has 2 stacks; name one: chat-r1, chat-r2"):
        give_out(store, "chat", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    shapes = {"layers.0.q": ProjectionShape("linear", 1, 2, 1, 1.0, 8, 8, latent_dim=4)}
    add_domain(store, "code", rounds=1, projections=shapes)
    with pytest.raises(InputError, match="latent projections that it shares"):
        give_out(store, "code", tmp_path / "out")


def test_export_says_what_a_stack_stood_on(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "tiny", BASE)
    add_domain(store, "chat", projections=ONE_EXPERT)
    assert give_out(store, "chat-r1", tmp_path / "a").notes == ()
    assert "on top of chat-r1; alone" in give_out(store, "chat-r2", tmp_path / "b").notes[0]


def test_export_never_writes_into_the_store_or_over_a_target(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "tiny", BASE)
    add_domain(store, "chat", rounds=1, projections=ONE_EXPERT)
    before = tree(tmp_path)
    with pytest.raises(InputError, match="lies inside the store"):
        give_out(store, "chat", store.path / "out")
    with pytest.raises((InputError, TargetError), match=r"inside the store|must not be replaced"):
        give_out(store, "chat", store.path, force=True)
    with pytest.raises(TargetError, match="must not be replaced"):
        give_out(store, "chat", tmp_path, force=True)
    assert give_out(store, "chat", tmp_path / "out", dry_run=True).status == "planned"
    assert tree(tmp_path) == before
    give_out(store, "chat", tmp_path / "out")
    with pytest.raises(TargetError, match="exists"):
        give_out(store, "chat", tmp_path / "out")


def test_a_damaged_stack_is_not_exported(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store", "tiny", BASE)
    add_domain(store, "chat", rounds=1, projections=ONE_EXPERT)
    path = store.path / store.stack_named("chat-r1").file.file
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(StoreError, match="its bytes changed"):
        give_out(store, "chat", tmp_path / "out")


def test_overflow_is_refused_and_bfloat16_helps(tmp_path: Path) -> None:
    made = adapter("F32", std=60_000)
    write_adapter(made, tmp_path / "in")
    store = make_store(tmp_path / "store", ["chat"])
    before = tree(store.path)
    with pytest.raises(
        AdapterError, match=r"lora_a: reaches .*e\+05, too large for float16.*bfloat16"
    ):
        take_in(store, tmp_path / "in")
    assert tree(store.path) == before
    assert take_in(store, tmp_path / "in", storage="bfloat16").storage == "bfloat16"


def test_the_base_is_checked(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    write_adapter(adapter(base=BASE), tmp_path / "same")
    write_adapter(adapter(base="full:" + "c" * 64), tmp_path / "other")
    assert take_in(store, tmp_path / "same").base == "verified"
    with pytest.raises(AdapterError, match=r"fingerprint full:cccc.*--allow-base"):
        take_in(store, tmp_path / "other", domain="med")
    done = take_in(store, tmp_path / "other", domain="med", allow_base=True)
    assert done.base == "overridden"
    data = Store.open(store.path).domain_named("med").data
    assert data["base"] == "overridden"
    assert data["adapter_base_fingerprint"] == "full:" + "c" * 64


def test_shapes_are_checked_against_stacks_and_model(
    tmp_path: Path, moe: Path, llama: Path
) -> None:
    path = f"{LAYER}.1.self_attn.q_proj"
    store = Store.create(tmp_path / "store", "tiny", BASE)
    wrong = {path: ProjectionShape("linear", 1, 2, 1, 1.0, 16, 33)}
    add_domain(store, "chat", rounds=1, projections=wrong)
    write_adapter(adapter(), tmp_path / "in")
    with pytest.raises(AdapterError, match=r"q_proj: dims \(16, 32, None\), chat-r1 has \(16, 33"):
        take_in(store, tmp_path / "in")
    with pytest.raises(StoreError, match="use that base"):
        take_in(store, tmp_path / "in", model=str(llama))
    with pytest.raises(AdapterError, match=r"does not fit the weight|do not fit"):
        take_in(tmp_path / "new", tmp_path / "in", model=str(moe))
    assert not (tmp_path / "new").exists()


def test_a_new_store_is_made_for_a_model(tmp_path: Path, llama: Path, llama_adapter: Path) -> None:
    with pytest.raises(InputError, match="no store there; --model makes one"):
        take_in(tmp_path / "new", llama_adapter)
    assert take_in(tmp_path / "new", llama_adapter, model=str(llama), dry_run=True).created
    assert not (tmp_path / "new").exists()
    done = take_in(tmp_path / "new", llama_adapter, model=str(llama))
    assert done.created
    manifest = Store.open(tmp_path / "new").manifest
    assert manifest.base_fingerprint == fingerprint(open_checkpoint(llama))
    assert manifest.base_model == llama.name
    checked = verify_store(StacksVerifySettings(store_path=str(tmp_path / "new"), model=str(llama)))
    assert (checked.base, checked.problems) == ("same", ())


def test_modules_that_no_stack_can_sit_on_are_listed(tmp_path: Path, moe_adapter: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    with pytest.raises(AdapterError, match="stacks sit on linear and expert projections") as caught:
        take_in(store, moe_adapter)
    for name in ("embed_tokens", "lm_head", "mlp.gate"):
        assert name in str(caught.value)
    outside, _, remedy = str(caught.value).partition(": stacks sit on")
    assert "q_proj" not in outside
    assert re.search(r"keys: \[.*self_attn\.q_proj.*\]\}`, or fuse", remedy)


def test_domains_are_new_and_well_named(tmp_path: Path) -> None:
    write_adapter(adapter(), tmp_path / "my adapter")
    store = make_store(tmp_path / "store", ["chat"])
    with pytest.raises(InputError, match="domain chat is there"):
        take_in(store, tmp_path / "my adapter", domain="chat")
    with pytest.raises(InputError, match="a stack has that name"):
        take_in(store, tmp_path / "my adapter", domain="chat-r1")
    with pytest.raises(InputError, match=r"'my adapter'.*give --domain"):
        take_in(store, tmp_path / "my adapter", domain=None)
    before = tree(store.path)
    assert take_in(store, tmp_path / "my adapter", dry_run=True).status == "planned"
    assert tree(store.path) == before


def test_ranks_and_scales_of_modules_may_differ(tmp_path: Path) -> None:
    """PEFT's patterns: each projection keeps its own in the store; export brings them to one."""
    made = adapter("F16", scale=2.0)
    path = f"{LAYER}.0.linear_attn.out_proj"
    module = made.modules[path]
    modules = {**made.modules, path: replace(module, scale=4.0)}
    store = Store.create(tmp_path / "store", "tiny", BASE)
    from mlxstacks.files.stack_adapters import stack_tensors

    arrays, exact, _ = stack_tensors(replace(made, modules=modules), "float16")
    assert exact
    shapes = {
        p: ProjectionShape("per_expert", 1, m.rank, 1, m.scale, m.lora_a.shape[2],
                           m.lora_b.shape[1], m.lora_a.shape[0])
        if m.is_switch else
        ProjectionShape("linear", 1, m.rank, 1, m.scale, m.lora_a.shape[0], m.lora_b.shape[1])
        for p, m in modules.items()
    }  # fmt: skip
    with store.change() as change:
        record = change.add_stack(arrays, header("law", projections=shapes))
        change.manifest = change.manifest.with_domain(DomainRecord("law", True, (record,)))
    give_out(store, "law", tmp_path / "out")
    back = load_any_adapter(tmp_path / "out").modules[path]
    assert back.scale == 2.0
    # twice the scale is a power of two: folded into lora_b without rounding
    assert np.array_equal(back.lora_b, 2 * module.lora_b)

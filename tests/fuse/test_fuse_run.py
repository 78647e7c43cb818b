"""What a fuse writes, decides and reports. Run: pytest tests/fuse/test_fuse_run.py"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks.errors import InputError, TargetError
from mlxstacks.files.adapters import read_adapter, write_adapter, zero_adapter
from mlxstacks.fuse.blocks import GROUPS_AT_ONCE, Decision, Dense, measure
from mlxstacks.fuse.fidelity import Fidelity, fidelity
from mlxstacks.fuse.module import Task, uniform_draws
from mlxstacks.fuse.report import (
    Alternative,
    FuseReport,
    ModuleReport,
    StageReport,
    below_target,
    shortfall_notes,
    verdict,
)
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.policies import Groups
from tests.fuse.cases import assert_same_bytes, fuse, raw, tensors
from tests.tiny_models import random_adapter, write_llama, write_qwen_moe

DOWN = "mlp.switch_mlp.down_proj"
Finished = Callable[..., tuple[FuseReport, Path]]
LOSSLESS = ["keep", "nearest", "stochastic"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 4-bit mixture of experts in three shards."""
    mx.set_default_device(mx.cpu)
    return write_qwen_moe(tmp_path_factory.mktemp("base") / "model", bits=4)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    """A delta of about a tenth of a step on the experts and an 8-bit gate."""
    return random_adapter(model, [DOWN, "mlp.gate"], rank=2, std=0.004)


@pytest.fixture(scope="module")
def finished(model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A fuse of the two with some options: its report and directory, made once and only read."""
    directory = tmp_path_factory.mktemp("finished")

    @cache
    def one(**options: Any) -> tuple[FuseReport, Path]:
        target = directory / "-".join(map(str, ["out", *options.values()]))
        return fuse(model, adapter, target, **options), target

    return one


def modules(report: FuseReport, stage: int = 0) -> dict[str, Any]:
    return {module["module"]: module for module in report.as_json()["stages"][stage]["modules"]}


@pytest.mark.parametrize("requant", LOSSLESS)
def test_zero_delta_keeps_every_byte(
    model: Path, adapter: Path, tmp_path: Path, requant: str
) -> None:
    report = fuse(model, adapter, tmp_path / "out", requant=requant, zero_delta=True)
    assert_same_bytes(model, tmp_path / "out")
    assert report.total is not None
    assert report.total.artifact == 0.0
    assert report.total.codes_changed_at_zero == 0.0
    assert report.total.survival is None
    assert "no weight changed" in report.verdict


def test_zero_delta_refit_changes_codes_once_and_says_so(
    model: Path, finished: Finished, tmp_path: Path
) -> None:
    first, _ = finished(requant="refit", zero_delta=True)
    assert first.total is not None
    assert first.total.codes_changed_at_zero is not None
    assert 0.05 < first.total.codes_changed_at_zero < 0.2
    assert first.total.codes_changed == first.total.codes_changed_at_zero
    assert "the fuse itself changed the weights" in first.verdict
    down = random_adapter(model, [DOWN], rank=2, std=0.004, directory=tmp_path / "down")
    fuse(model, down, tmp_path / "one", requant="refit", zero_delta=True)
    again = fuse(tmp_path / "one", down, tmp_path / "two", requant="refit", zero_delta=True)
    assert_same_bytes(tmp_path / "one", tmp_path / "two")
    assert again.total is not None
    assert again.total.artifact == 0.0


def test_zero_delta_takes_the_trained_decisions(model: Path, finished: Finished) -> None:
    trained, fused = finished()
    control, unchanged = finished(zero_delta=True)
    chosen = {name: (m["policy"], m["bits_after"]) for name, m in modules(trained).items()}
    assert {n: (m["policy"], m["bits_after"]) for n, m in modules(control).items()} == chosen
    assert any(policy.startswith("promote") for policy, _ in chosen.values())
    names = tensors(fused), tensors(unchanged)
    assert {n: (v.shape, v.dtype) for n, v in names[0].items()} == {
        n: (v.shape, v.dtype) for n, v in names[1].items()
    }
    values_of_promoted_modules_are_those_of_the_base(model, unchanged, control)


def values_of_promoted_modules_are_those_of_the_base(
    model: Path, fused: Path, report: FuseReport
) -> None:
    old, new = tensors(model), tensors(fused)
    for name, module in modules(report).items():
        if module["policy"].startswith("promote"):
            before, after = (
                mx.dequantize(
                    *(store[f"{name}.{leaf}"].astype(t) for leaf, t in LEAVES),
                    group_size=64,
                    bits=bits,
                )
                for store, bits in ((old, module["bits_before"]), (new, module["bits_after"]))
            )
            np.testing.assert_array_equal(np.array(before), np.array(after))


LEAVES = (("weight", mx.uint32), ("scales", mx.float32), ("biases", mx.float32))


def test_zero_delta_equals_a_fuse_of_the_zeroed_adapter(
    model: Path, adapter: Path, finished: Finished, tmp_path: Path
) -> None:
    write_adapter(zero_adapter(read_adapter(adapter)), tmp_path / "zeros")
    fuse(model, tmp_path / "zeros", tmp_path / "fused", requant="refit")
    _, control = finished(requant="refit", zero_delta=True)
    assert_same_bytes(control, tmp_path / "fused")


def test_auto_keeps_what_refit_loses(model: Path, tmp_path: Path) -> None:
    """At a tenth of a step and 4 bits: 0.11 with refit, at least 0.98 with auto."""
    step = float(np.mean(step_sizes(model, DOWN)))
    adapter = random_adapter(model, [DOWN], rank=4, std=0.1 * step, directory=tmp_path / "adapter")
    lost = fuse(model, adapter, tmp_path / "refit", requant="refit").total
    kept = fuse(model, adapter, tmp_path / "auto").total
    assert lost is not None
    assert kept is not None
    assert lost.delta_over_step == pytest.approx(0.1, rel=0.1)
    assert lost.correlation is not None
    assert lost.correlation < 0.2
    assert kept.correlation is not None
    assert kept.correlation >= 0.98
    assert kept.error is not None
    assert kept.error < 0.25


def step_sizes(model: Path, key: str) -> list[float]:
    return [
        float(mx.abs(value.astype(mx.float32)).mean())
        for name, value in tensors(model).items()
        if name.endswith(f"{key}.scales")
    ]


def test_reported_figures_are_those_of_the_files(
    model: Path, adapter: Path, finished: Finished
) -> None:
    """Survival, correlation, noise and artifact again, from the tensors, in float64."""
    report, fused = finished(requant="refit")
    control, unchanged = finished(requant="refit", zero_delta=True)
    assert control.total is not None
    name = next(n for n in modules(report) if n.endswith(DOWN))
    learned = read_adapter(adapter).modules[name]
    delta = learned.scale * (learned.lora_b.astype(np.float64) @ learned.lora_a)
    old, new, zero = (weight_of(d, name) for d in (model, fused, unchanged))
    change, artifact = new - old, zero - old
    survival = (change * delta).sum() / (delta * delta).sum()
    found = modules(report)[name]["fidelity"]
    expected = {
        "survival": survival,
        "correlation": (change * delta).sum() / norm(change) / norm(delta),
        "error": norm(change - delta) / norm(delta),
        "noise": norm(change - survival * delta) / norm(delta),
        "artifact": norm(artifact) / norm(old),
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-4)


def weight_of(directory: Path, name: str) -> np.ndarray:
    stored = tensors(directory)
    parts = [stored[f"{name}.{leaf}"].astype(t) for leaf, t in LEAVES]
    return np.array(mx.dequantize(*parts, group_size=64, bits=4)).astype(np.float64)


def norm(array: np.ndarray) -> float:
    return float(np.sqrt((array * array).sum()))


def test_untouched_shards_are_shared_and_touched_ones_hold_no_stale_tensor(
    model: Path, tmp_path: Path
) -> None:
    adapter = random_adapter(
        model, ["language_model.lm_head"], std=0.01, directory=tmp_path / "adapter"
    )
    report = fuse(model, adapter, tmp_path / "out")
    how = {file["name"]: file["how"] for file in report.files}
    assert sorted(how.values()).count("rewritten") == 1
    for name, kind in how.items():
        shared = (model / name).stat().st_ino == (tmp_path / "out" / name).stat().st_ino
        assert shared == (kind == "linked")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found = tensors(tmp_path / "out")
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    copied = fuse(model, adapter, tmp_path / "copied", copy_shards=True)
    assert {file["how"] for file in copied.files} == {"rewritten", "copied"}
    assert_same_bytes(tmp_path / "out", tmp_path / "copied")


def test_the_source_is_never_written(model: Path, adapter: Path, tmp_path: Path) -> None:
    before = {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in model.iterdir()}
    for requant in ("auto", "dequantize"):
        fuse(model, adapter, tmp_path / requant, requant=requant)
    assert {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in model.iterdir()} == before


def test_config_names_the_bits_of_changed_modules_only(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    report = fuse(model, adapter, tmp_path / "out", bits=("*layers.0.*down_proj=6",))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    base = json.loads((model / "config.json").read_text())
    for key in ("quantization", "quantization_config"):
        new = {n: v for n, v in config[key].items() if base[key].get(n) != v}
        changed = {
            n: m["bits_after"]
            for n, m in modules(report).items()
            if m["bits_after"] != m["bits_before"]
        }
        assert {n: v["bits"] if v else None for n, v in new.items()} == changed
        assert next(v["bits"] for n, v in new.items() if "layers.0" in n) == 6


def test_per_module_bits_load_in_mlx_lm(model: Path, adapter: Path, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model

    report = fuse(model, adapter, tmp_path / "out", bits=("*layers.1.*down_proj=5",))
    loaded, _ = load_model(tmp_path / "out")
    found = dict(loaded.named_modules())
    for name, module in modules(report).items():
        assert getattr(found[name], "bits", None) == module["bits_after"]


def test_several_adapters_are_fused_in_order(
    model: Path, adapter: Path, finished: Finished, tmp_path: Path
) -> None:
    """Two stages in one pass are the two fuses one after the other."""
    second = random_adapter(
        model, [DOWN, "self_attn.v_proj"], std=0.02, seed=9, directory=tmp_path / "second"
    )
    for requant in ("refit", "auto", "dequantize"):
        both = fuse(model, [adapter, second], tmp_path / f"{requant}-both", requant=requant)
        one, fused = finished(requant=requant)
        two = fuse(fused, second, tmp_path / f"{requant}-two", requant=requant)
        assert_same_bytes(tmp_path / f"{requant}-both", tmp_path / f"{requant}-two")
        for stage, alone in enumerate((one, two)):
            together = both.stages[stage].total
            assert together is not None
            assert alone.total is not None
            assert together.as_json() == pytest.approx(alone.total.as_json())


def test_fail_under_writes_the_files_and_reports_the_gate(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    report = fuse(model, adapter, tmp_path / "out", requant="refit", fail_under=0.9)
    assert report.failed_gate is not None
    assert "below --fail-under 0.9" in report.failed_gate
    assert tensors(tmp_path / "out")
    assert fuse(model, adapter, tmp_path / "good", fail_under=0.5).failed_gate is None


def test_another_base_named_by_the_adapter_is_noted(
    model: Path, adapter: Path, finished: Finished, tmp_path: Path
) -> None:
    """mlx-lm writes the base's path and no fingerprint: all that can be done is to say so."""
    assert finished()[0].notes == []
    other = shutil.copytree(model, tmp_path / "other")
    (note,) = fuse(other, adapter, tmp_path / "out").notes
    assert str(model) in note
    assert "no fingerprint" in note


def test_modules_outside_the_config_are_noted(model: Path, adapter: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(adapter, tmp_path / "mine"))
    config = json.loads((mine / "adapter_config.json").read_text())
    config["lora_parameters"]["keys"] = ["mlp.gate_proj"]
    (mine / "adapter_config.json").write_text(json.dumps(config))
    (note,) = fuse(model, mine, tmp_path / "out").notes
    assert "its config leaves out" in note


def test_fuse_of_a_fused_model_is_noted(adapter: Path, finished: Finished, tmp_path: Path) -> None:
    shutil.copytree(finished()[1], tmp_path / "model")
    (note,) = fuse(tmp_path / "model", adapter, tmp_path / "again").notes
    assert "itself the result of a fuse" in note


def test_gate_at_zero_delta_says_that_it_does_not_apply(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    report = fuse(model, adapter, tmp_path / "out", zero_delta=True, fail_under=0.9)
    assert report.failed_gate is None
    assert "does not apply" in report.notes[0]


def test_swapped_model_and_adapter_are_recognised(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    for first, second in ((adapter, model), (model, model)):
        with pytest.raises(InputError, match="swapped"):
            fuse(first, second, tmp_path / "out")


def test_alternative_is_named_only_below_the_target(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    assert (
        "Estimated for --requant promote: correlation 0.9"
        in fuse(model, adapter, tmp_path / "a", requant="keep").verdict
    )
    assert (
        "--requant"
        not in fuse(model, adapter, tmp_path / "b", requant="keep", target_correlation=0.01).verdict
    )


@pytest.mark.parametrize("dry_run", [True, False])
def test_modules_below_the_target_are_named_with_what_to_do(
    model: Path, adapter: Path, tmp_path: Path, dry_run: bool
) -> None:
    report = fuse(model, adapter, tmp_path / "out", dry_run, target_correlation=0.9999999)
    figures = {m.path: m.figures.correlation for m in report.stages[0].modules if m.figures}
    below = {path: c for path, c in figures.items() if c is not None and c < 0.9999999}
    worst = min(below, key=lambda path: below[path])
    assert len(below) > 1
    assert f"{len(below)} of {len(figures)} modules below the target of 1" in report.verdict
    assert f"the worst {worst} with 0.9" in report.verdict
    notes = " ".join(report.notes)
    assert all(f"{path} 0.9" in notes for path in below)
    assert "--requant dequantize does better" in notes or "no policy does better" in notes
    reached = fuse(model, adapter, tmp_path / "reached", dry_run=dry_run)
    assert "below the target" not in " ".join([reached.verdict, *reached.notes])


def test_the_remedy_is_the_one_that_the_estimates_show() -> None:
    modules = [
        ModuleReport(name, 0, "nearest", 8, 8, "verified", 1, 1, figures_of(1.0, 0.97999), {})
        for name in ("helped", "lost")
    ]
    stages = [StageReport("a", modules, figures_of(1.0, 0.97999))]
    plain = {"helped": figures_of(1.0, 0.9999), "lost": figures_of(1.0, 0.975)}
    helped, lost = shortfall_notes(stages, FuseSettings(), plain)
    assert "does better: helped 0.9799 (then about 0.9999)." in helped
    assert "no policy does better: lost 0.9799. Serve the adapter unfused" in lost
    for settings in (FuseSettings(requant="refit"), FuseSettings(zero_delta=True)):
        assert shortfall_notes(stages, settings, plain) == []


def figures_of(
    survival: float | None, correlation: float | None, artifact: float = 0.0
) -> Fidelity:
    return Fidelity(1, 0.1, survival, correlation, 0.1, 0.1, artifact, 0.0, 0.0)


def test_an_alternative_counts_each_module_by_its_weights() -> None:
    estimates = [
        (100, figures_of(1.0, 0.9), 5), (300, figures_of(0.6, 0.5), 7),
        (50, figures_of(None, None), 11),
    ]  # fmt: skip
    found = Alternative.of("promote", estimates)
    assert found is not None
    assert (found.survival, found.correlation) == (pytest.approx(0.7), pytest.approx(0.6))
    assert found.extra_bytes == 23
    assert Alternative.of("promote", estimates[2:]) is None


def test_a_verdict_names_the_largest_artifact_of_the_stages() -> None:
    stages = [StageReport("a", [], figures_of(1.0, 0.99, part)) for part in (0.01, 0.05, 0.02)]
    text = verdict(stages, None, FuseSettings(), None, 0, 1)
    assert "the fuse itself moves the weights by up to 5.0%" in text


def test_a_module_at_the_target_is_not_below_it() -> None:
    modules = [
        ModuleReport(name, 0, "nearest", 8, 8, "verified", 1, 1, figures_of(1.0, correlation), {})
        for name, correlation in (("at", 0.98), ("below", 0.97), ("lowest", 0.9), ("none", None))
    ]
    stages = [StageReport("a", modules, None)]
    below = below_target(stages, FuseSettings(target_correlation=0.98))
    assert [module.path for _, module in below] == ["lowest", "below"]


def test_delta_over_step_is_of_the_quantized_weights_alone() -> None:
    """A plain module among them has no step: neither its delta nor its weights count."""
    grid = Groups(np.zeros((2, 64), np.uint8), np.full(2, 0.25), np.zeros(2), 4, "F32")
    packed = measure(grid, grid, np.full((2, 64), 0.125, np.float32), None)
    dense = Dense(np.zeros((3, 64), np.float32), "F32")
    plain = measure(dense, dense, np.full((3, 64), 7.0, np.float32), None)
    assert fidelity(packed).delta_over_step == pytest.approx(0.5)
    assert fidelity(packed + plain).delta_over_step == pytest.approx(0.5)
    assert fidelity(plain).delta_over_step is None


def test_a_dry_run_says_what_correlation_to_expect(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    report = fuse(model, adapter, tmp_path / "out", requant="refit", dry_run=True)
    figures = {m.path: m.figures.correlation for m in report.stages[0].modules if m.figures}
    worst = min(figures, key=lambda path: figures[path] or 0.0)
    expected = f"no extra bytes; estimated correlation {figures[worst]:.3f} ({worst}) to "
    assert f"nothing was written; {expected}" in report.verdict
    assert "Estimated for --requant promote: correlation 0.9" in report.verdict


def test_dry_run_touches_nothing(model: Path, adapter: Path, tmp_path: Path) -> None:
    report = fuse(model, adapter, tmp_path / "out", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    done = fuse(model, adapter, tmp_path / "out")
    assert report.status == "planned"
    assert report.written_bytes == sum(file["written_bytes"] for file in report.files)
    assert abs(report.written_bytes - done.written_bytes) < 20_000  # headers
    assert [m.policy for m in report.stages[0].modules] == [
        m.policy for m in done.stages[0].modules
    ]


def test_report_in_the_directory_is_the_report(finished: Finished) -> None:
    report, directory = finished()
    saved = json.loads((directory / "result.json").read_text())
    assert saved["data"] == json.loads(json.dumps(report.as_json()))
    assert saved["data"]["stages"][0]["modules"][0]["base"] == "not verifiable"


def test_tokenizer_and_friends_come_along_and_code_does_not(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in model.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    fuse(source, adapter, tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    assert {"generation_config.json", "config.json"} <= names
    assert not any(name.endswith((".py", ".bin")) for name in names)


def test_vision_and_mtp_tensors_are_kept(tmp_path: Path) -> None:
    extra = {"vision_tower.blocks.0.weight": mx.ones((4, 4)), "mtp.layers.0.weight": mx.ones((2,))}
    model = write_qwen_moe(tmp_path / "model", bits=4, extra_tensors=extra)
    adapter = random_adapter(model, [DOWN], std=0.01)
    fuse(model, adapter, tmp_path / "out")
    found = tensors(tmp_path / "out")
    for name, value in extra.items():
        np.testing.assert_array_equal(raw(found[name]), raw(value))


def test_stochastic_draws_differ_by_seed_stage_module_row_and_block() -> None:
    groups = 2 * GROUPS_AT_ONCE
    delta = np.zeros((groups, 64), np.float32)

    def draws(path: str = "a", first: int = 0, stage: int = 0, seed: int = 0) -> np.ndarray:
        stored = SimpleNamespace(group_size=64, input_dims=64)
        module: Any = SimpleNamespace(path=path, stored=stored)
        decision = (Decision("stochastic", 4), delta, None)
        return uniform_draws(Task(module, first, first + groups, {stage: decision}, seed), stage)

    one = draws()
    assert one.shape == delta.shape
    np.testing.assert_array_equal(one, draws())
    others = [draws(path="b"), draws(first=64), draws(stage=1), draws(seed=1)]
    for other in (*others, np.roll(one, GROUPS_AT_ONCE, axis=0)):
        assert (one != other).mean() > 0.99


def test_stochastic_follows_the_seed(model: Path, adapter: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fuse(model, adapter, tmp_path / name, requant="stochastic", seed=seed)
    assert_same_bytes(tmp_path / "a", tmp_path / "b")
    name = next(n for n in tensors(model) if n.endswith(f"{DOWN}.weight"))
    first, other = tensors(tmp_path / "a")[name], tensors(tmp_path / "c")[name]
    assert not np.array_equal(raw(first), raw(other))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": ("*down_proj=3",)}, "more bits only|or more"),
        ({"bits": ("*nothing=6",)}, "matches none"),
        ({"bits": ("*down_proj=4",), "requant": "promote"}, "more bits only"),
        ({"bits": ("*down_proj=6",), "requant": "keep"}, "4 only"),
        ({"bits": ("*down_proj=6",), "requant": "dequantize"}, "allows none"),
    ],
)
def test_impossible_bits_are_refused(
    model: Path, adapter: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        fuse(model, adapter, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_existing_target_needs_force(model: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(TargetError, match="--force"):
            fuse(model, adapter, tmp_path / "out", force=force)
        assert (tmp_path / "out" / "precious.txt").read_text() == "mine"
    fuse(model, adapter, tmp_path / "fused")
    with pytest.raises(TargetError, match="--force to replace"):
        fuse(model, adapter, tmp_path / "fused")
    fuse(model, adapter, tmp_path / "fused", force=True)


def test_fusing_onto_the_model_itself_is_refused(
    model: Path, adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(TargetError, match="must not be replaced"):
        fuse(model, adapter, model, force=True)
    assert tensors(model)


STORIES = Path(__file__).parents[3] / "shared" / "data" / "stories260K"


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs ../shared/data/stories260K")
def test_a_real_llama_keeps_its_story_at_zero_delta(tmp_path: Path) -> None:
    """The 260K-parameter Llama, quantized with group 32 where its dimensions allow it."""
    from mlx_lm import generate, load
    from mlx_lm.convert import convert

    convert(str(STORIES), str(tmp_path / "q"), quantize=True, q_bits=4, q_group_size=32)
    adapter = random_adapter(
        tmp_path / "q", ["mlp.gate_proj", "self_attn.q_proj"], rank=2, std=0.02, num_layers=5
    )
    before = generate(*load(str(tmp_path / "q")), prompt="Once upon a time", max_tokens=8)
    report = fuse(tmp_path / "q", adapter, tmp_path / "zero", zero_delta=True)
    assert report.total is not None
    assert report.total.artifact == 0.0
    after = generate(*load(str(tmp_path / "zero")), prompt="Once upon a time", max_tokens=8)
    assert after == before
    trained = fuse(tmp_path / "q", adapter, tmp_path / "trained")
    assert trained.total is not None
    assert trained.total.correlation is not None
    assert trained.total.correlation > 0.97


def test_dense_model_without_quantization(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", bits=None)
    adapter = random_adapter(model, ["mlp.up_proj"], std=0.05)
    report = fuse(model, adapter, tmp_path / "out")
    assert {module["policy"] for module in modules(report).values()} == {"add"}
    name = next(n for n in tensors(model) if n.endswith("up_proj.weight"))
    learned = read_adapter(adapter).modules[name.removesuffix(".weight")]
    delta = learned.scale * (learned.lora_b.T @ learned.lora_a.T)
    wanted = mx.array(np.array(tensors(model)[name].astype(mx.float32)) + delta)
    np.testing.assert_array_equal(
        np.array(tensors(tmp_path / "out")[name].astype(mx.float32)),
        np.array(wanted.astype(mx.bfloat16).astype(mx.float32)),
    )

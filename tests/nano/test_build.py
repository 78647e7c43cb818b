"""The whole rebuild on a tiny shape, and its pieces. Run: pytest tests/nano/test_build.py"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner

from mlxstacks import base_model
from mlxstacks.cli import run as run_command_line
from mlxstacks.errors import InputError, TargetError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.outputs import MARK, new_mark, write_json
from mlxstacks.files.store import Store
from mlxstacks.nano.exports import ASSETS, read_manifest, write_export
from mlxstacks.nano.settings import Persona
from mlxstacks.routing.settings import OutcomeSettings, RouterTrainSettings
from mlxstacks.training.settings import OptimizerSettings
from tests.warm import WarmSubprocess
from tools.nano import base_training, measure, measure_store, sample_store, workers
from tools.nano.__main__ import main
from tools.nano.adapter_training import persona_documents
from tools.nano.base_training import STATE_FILE, run_id
from tools.nano.build import RebuildResult, _check_saved_state, rebuild, refit_layers
from tools.nano.curriculum import curriculum_files
from tools.nano.curriculum_settings import DOMAINS
from tools.nano.identity import persona_prompts
from tools.nano.measure import refit_in_place, switch_down_projections
from tools.nano.settings import SAMPLE_STACKS, AdapterTraining, NanoShape, RebuildSettings

TINY = RebuildSettings(
    documents=40, batch_size=2, row_length=64, processes=1,
    validation_per_domain=1, items_per_domain=2,
    shape=NanoShape(
        hidden_size=64, num_hidden_layers=3, num_experts=4, vocab_size=400, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, linear_num_key_heads=1, linear_num_value_heads=2,
    ),
    optimizer=OptimizerSettings(steps=3, learning_rate=1e-3, log_every=2),
    adapter=AdapterTraining(
        num_layers=3, batch_size=2, optimizer=OptimizerSettings(steps=2, learning_rate=1e-2)
    ),
    stacks=SAMPLE_STACKS.model_copy(
        update={
            "domains": SAMPLE_STACKS.domains[:2], "layers": "all", "iters": 2, "batch_size": 2,
            "validation_rows": 2, "warmup": 0, "min_loss_delta": 0.0, "steps_per_eval": 1,
            "guard": "off",
        }
    ),
    outcomes=OutcomeSettings(single_cap=4, mixed_cap=2, samples_per_domain=2),
    router=RouterTrainSettings(hidden_dims=8, epochs=2, validation_groups=4),
)  # fmt: skip


def in_this_process(module: str, arguments: list[str], count: int) -> None:
    """Stands in for the processes of the sample store's commands: seconds of imports each."""
    assert (module, count) == ("mlxstacks", 1)
    assert run_command_line(arguments) == 0


@contextmanager
def little_data() -> Iterator[None]:
    """What a rebuild takes in full whatever its settings, cut short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base_training, "TOKENIZER_DOCUMENTS", 400)
        patch.setattr(sample_store, "curriculum_files", partial(curriculum_files, 12))
        patch.setattr(measure, "persona_prompts", lambda *a, **k: persona_prompts(*a, **k)[:2])
        patch.setattr(measure_store, "HELD_OUT_ROWS", 2)
        # What three steps have taught never ends its answer.
        patch.setattr(base_model, "generate", partial(base_model.generate, max_tokens=1))
        yield


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, dict]:
    """Base and adapter are trained in processes, as in a rebuild; what is long is shorter."""
    path = tmp_path_factory.mktemp("rebuild") / "nano"
    with pytest.MonkeyPatch.context() as patch, little_data():
        patch.setattr(sample_store, "run_in_processes", in_this_process)
        patch.setattr(workers, "subprocess", WarmSubprocess)
        result = rebuild(TINY.model_copy(update={"save_path": path}))
    return path, result.as_json()["manifest"]


def test_a_rebuild_writes_model_samples_and_manifest(built) -> None:
    path, manifest = built
    assert [p.name for p in path.parent.iterdir()] == ["nano"]
    model, _, config = base_model.load(path / "model", path / "adapter")
    assert config["quantization"]["bits"] == 8
    assert sum(hasattr(m, "lora_a") for _, m in model.named_modules()) == 3
    assert json.loads((path / "manifest.json").read_text()) == manifest
    measured = manifest["measured"]
    assert set(measured["models"]) == {"as_trained_float32", "8_bit", "4_bit", "3_bit"}
    assert all(len(rows) == 2 for rows in measured["zero_delta_refit_of_down_proj"].values())
    assert measured["adapter"]["identity_with"]["n"] == 2
    assert measured["store"]["domains"]["islands"]["items"] == 2
    assert [record["step"] for record in manifest["base_training"]["history"]] == [2, 3]


def test_the_store_of_a_rebuild_is_of_its_export(built, tmp_path: Path) -> None:
    path, manifest = built
    write_export(path / "model", tmp_path / "export", TINY.adapter.bits)
    store = Store.open(path / "store")
    store.check_base(fingerprint(open_checkpoint(tmp_path / "export")))
    assert [domain.name for domain in store.manifest.domains] == list(DOMAINS[:2])
    assert store.read_router().header.domains == DOMAINS[:2]
    named = {"manifest.json", *(record.file for record in store.manifest.files())}
    listed = {name.removeprefix("store/") for name in manifest["file_bytes"] if "store/" in name}
    assert listed == named


@pytest.mark.slow
def test_a_rebuild_again_gives_the_same_bytes(built, tmp_path: Path) -> None:
    """And with every command in a process of its own."""
    path, manifest = built
    with little_data():
        again = rebuild(TINY.model_copy(update={"save_path": tmp_path / "nano"}))
    for name in manifest["file_bytes"]:
        assert (path / name).read_bytes() == (tmp_path / "nano" / name).read_bytes(), name
    assert again.manifest["measured"] == manifest["measured"]


def test_settings_of_what_comes_after_the_base_leave_its_state_usable() -> None:
    """A rebuild that was stopped after the base goes on with other stacks."""
    known = run_id(TINY)
    for name in ("adapter", "persona", "stacks", "outcomes", "router"):
        other = getattr(TINY, name).model_copy(update={"seed": 7, "name": "Ada", "rank": 2})
        assert run_id(TINY.model_copy(update={name: other})) == known
    assert run_id(TINY.model_copy(update={"seed": 7})) != known


def test_an_existing_target_is_refused_before_anything_is_trained(built) -> None:
    with pytest.raises(TargetError):
        rebuild(TINY.model_copy(update={"save_path": built[0]}))
    assert [p.name for p in built[0].parent.iterdir()] == ["nano"]


def test_the_tool_takes_settings_and_names_what_is_wrong(monkeypatch, tmp_path: Path) -> None:
    asked = []

    def noted(settings: RebuildSettings) -> RebuildResult:
        asked.append(settings)
        return RebuildResult(settings.save_path, read_manifest())

    monkeypatch.setattr("tools.nano.__main__.rebuild", noted)
    words = ["rebuild", str(tmp_path / "nano"), "--set", "optimizer.steps=7", "--no-resume"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "minutes" in done.output
    (settings,) = asked
    assert (settings.optimizer.steps, settings.resume) == (7, False)
    assert settings.optimizer.learning_rate == RebuildSettings().optimizer.learning_rate
    wrong = CliRunner().invoke(main, ["rebuild", "x", "--set", "stepps=7"])
    assert wrong.exit_code == 1
    assert "stepps" in wrong.output


def test_a_state_of_other_settings_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    settings = TINY.model_copy(update={"save_path": tmp_path / "nano"})
    work = tmp_path / ".nano.work"
    work.mkdir()
    write_json(work / MARK, new_mark())
    state = str(work / STATE_FILE)
    mx.save_safetensors(state, {"x": mx.zeros(1)}, {"run_id": run_id(settings)})
    _check_saved_state(settings, work)
    mx.save_safetensors(state, {"x": mx.zeros(1)}, {"run_id": "another"})
    with pytest.raises(InputError, match="--no-resume"):
        rebuild(settings)
    assert Path(state).exists()


def test_persona_documents_leave_the_suite_alone() -> None:
    persona = Persona()
    suite = {p.prompt for p in persona_prompts(persona, suite=True)}
    documents = persona_documents(persona, 400, 0.5, 0)
    assert not suite & {d.prompt for d in documents}
    taught = [d for d in documents if d.domain == "identity"]
    assert 150 < len(taught) < 250
    assert all(persona.name in d.answer or persona.maker in d.answer for d in taught)


@pytest.mark.parametrize("bits", [3, 4])
def test_refit_follows_mlx_lm_and_settles_after_one_pass(bits: int, tmp_path: Path) -> None:
    write_export(ASSETS / "model", tmp_path / "m", bits)
    model, _, _ = base_model.load(tmp_path / "m")
    base_model.attach_lora(model, 6, rank=2, scale=1.0, keys=["mlp.switch_mlp.down_proj"])
    lora = model.layers[1].mlp.switch_mlp.down_proj
    theirs = lora.fuse()  # lora_b starts at zero: this is mlx-lm's zero-delta fuse
    ours, _, _ = base_model.load(tmp_path / "m")
    modules = [module for _, module in switch_down_projections(ours)]
    assert len(modules) == 6
    changed, count = refit_in_place(modules)
    assert 0.005 < changed / count < 0.3
    for name in ("weight", "scales", "biases"):
        assert mx.array_equal(modules[1][name], theirs[name]).item()
    assert refit_in_place(modules)[0] == 0


def test_refit_layers_are_three_inside_the_model() -> None:
    assert refit_layers(40) == (8, 14, 20)
    assert refit_layers(6) == (1, 2, 3)


def test_shipped_adapter_is_small_against_the_quantization_step() -> None:
    figures = json.loads((ASSETS / "manifest.json").read_text())["measured"]["adapter"]
    assert 0.05 < figures["delta_over_step"] < 0.25
    # The identity suite is valid only if it tells the base from the persona.
    assert figures["identity_without"]["score"] <= 5
    assert figures["identity_with"]["score"] >= 15
    weights = mx.load(str(ASSETS / "adapter" / "adapters.safetensors"))
    assert all(np.isfinite(np.array(value.astype(mx.float32))).all() for value in weights.values())

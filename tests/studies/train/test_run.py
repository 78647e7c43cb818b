"""`mlxstacks train` on a tiny hybrid model: what it writes, resumes and refuses.

Run: pytest tests/studies/train/test_run.py
"""

import hashlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.data import TrainDataSettings, make_batch
from mlxstacks.errors import CheckpointError, InputError, TargetError
from mlxstacks.files.adapters import match_adapter, read_adapter
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.lora_modules import is_shared_outer
from mlxstacks.files.outputs import MARK
from mlxstacks.studies.train import run as train_run
from mlxstacks.studies.train.report import result_of
from mlxstacks.studies.train.setup import SaveTimer, set_up
from mlxstacks.study.document import Plot
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import work_path
from mlxstacks.training.loop import NonFiniteError, TrainingState
from mlxstacks.training.settings import TrainSettings
from tests.files.raw import change_between_samples
from tests.studies.train_cases import (
    chat_rows,
    settings_for,
    write_data,
    write_rows,
)
from tests.tiny_models import write_llama


def log_of(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (target / "log.jsonl").read_text().splitlines()]


# --- what is written ------------------------------------------------------------------------------


def test_a_run_lowers_the_loss_and_leaves_only_its_target(trained: Any) -> None:
    report, target = trained
    assert report.status == "trained"
    assert report.best_validation_loss < report.first_validation_loss - 0.05
    assert [path.name for path in target.parent.iterdir()] == ["adapter"]
    assert sorted(path.name for path in target.iterdir()) == [
        MARK, "adapter_config.json", "adapters.safetensors", "checkpoint.safetensors", "log.jsonl",
        "metrics.csv", "recipe.yaml", "result.json", "result.md",
    ]  # fmt: skip


def test_report_and_log_tell_what_happened(trained: Any) -> None:
    report, target = trained
    result = Result.open(target)
    assert not result.standing.reasons
    files = {"adapter_config.json", "adapters.safetensors", "log.jsonl", "recipe.yaml"}
    assert {*result.provenance} == {*files, "metrics.csv"}
    written = result.data
    assert [*result.table("validation")["validation_loss"]] == [
        record["validation_loss"] for record in written["validation"]
    ]
    assert [*result.table("validation")["mark"]].index("best") == 4 * report.best_step // 16
    assert [*result.table("training")["step"]] == [2, 4, 6, 8]
    (plot,) = (block for block in result.blocks if isinstance(block, Plot))
    assert {s.label: s.x for s in plot.series} == {
        "validation": (0, 4, 8), "training": (2, 4, 6, 8)
    }  # fmt: skip
    assert written["trained_parameters"] == report.plan["trained_parameters"]
    assert [r["step"] for r in written["validation"]] == [0, 4, 8]
    assert [r["step"] for r in written["history"]] == [2, 4, 6, 8]
    assert written["train_rows"] == 20
    assert written["best_step"] in (4, 8)
    events = log_of(target)
    assert [e["step"] for e in events if e["event"] == "step"] == [2, 4, 6, 8]
    assert [e["step"] for e in events if e["event"] == "saved"] == [5, 8]
    assert {"loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_bytes"} <= set(
        next(e for e in events if e["event"] == "step")
    )


def test_the_written_recipe_makes_the_same_run(trained: Any) -> None:
    from mlxstacks.recipe.file import load_recipe
    from mlxstacks.recipe.resolve import finished, resolve

    _, target = trained
    recipe = load_recipe(str(target / "recipe.yaml"))
    resolved = resolve("train", {"save_path": str(target)}, recipe)
    assert finished("train", resolved) is not None
    other = resolve("train", {"save_path": str(target), "rank": 4}, recipe)
    assert finished("train", other) is None


def test_mlx_lm_loads_the_adapter_and_computes_what_was_trained(
    trained: Any, places: tuple[Path, Path]
) -> None:
    report, target = trained
    adapter = read_adapter(target)
    checkpoint = open_checkpoint(places[0])
    assert {match.base for match in match_adapter(adapter, checkpoint)} == {"verified"}
    assert len(adapter.modules) == report.plan["modules"]
    setup = set_up(settings_for(*places, target))
    setup.model.load_weights(str(target / "adapters.safetensors"), strict=False)
    setup.model.eval()
    loaded, _, _ = base_model.load(places[0], target)
    # The trainer computed in float32, with the values that are stored.
    base_model.dequantize(loaded)
    base_model.cast(loaded, mx.float32)
    tokens = mx.array(make_batch(setup.train.rows[:2]).tokens)
    wanted, found = setup.model(tokens), loaded(tokens)
    assert mx.allclose(wanted, found, atol=1e-4).item()
    base, _, _ = base_model.load(places[0])
    assert mx.abs(wanted - base(tokens)).max().item() > 0.3


def test_the_best_weights_are_written_or_the_last(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every evaluation is worse, the best adapter is the first one, which does nothing."""
    monkeypatch.setattr(train_run.TrainRun, "_validation_loss", rising())
    report = train_run.run(settings_for(*places, tmp_path / "best", iters=4))
    assert (report.best_step, report.kept) == (0, "best")
    result = result_of(report)
    assert " did not fall: 1.0000 before, 2.0000 at step 4. No step was better" in result.verdict
    assert not result.next_steps  # of an adapter that does nothing
    best = mx.load(str(tmp_path / "best" / "adapters.safetensors"))
    assert all(not mx.any(v).item() for k, v in best.items() if k.endswith("lora_b"))
    last = train_run.run(settings_for(*places, tmp_path / "last", iters=4, keep="last"))
    assert last.kept == "last"
    assert "Try it" in result_of(last).next_steps
    weights = mx.load(str(tmp_path / "last" / "adapters.safetensors"))
    assert any(mx.any(v).item() for k, v in weights.items() if k.endswith("lora_b"))


def rising() -> Any:
    """An evaluator whose every value is worse than the one before."""
    values = itertools.count(1.0)
    return lambda self, model: next(values)


def test_patience_stops_the_run_and_the_report_says_so(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_run.TrainRun, "_validation_loss", rising())
    report = train_run.run(settings_for(*places, tmp_path / "out", patience=2))
    assert (report.status, report.step) == ("stopped", 8)
    assert "2 evaluations in a row" in (report.reason or "")


def test_layers_and_keys_choose_the_projections(places: tuple[Path, Path], tmp_path: Path) -> None:
    changes: dict[str, Any] = {"layers": "1", "keys": ("switch_mlp.down_proj", "q_proj")}
    settings = settings_for(*places, tmp_path / "out", iters=2, **changes)
    train_run.run(settings)
    names = {path.split("layers.")[1] for path in read_adapter(tmp_path / "out").modules}
    assert names == {"1.mlp.switch_mlp.down_proj", "1.self_attn.q_proj"}
    loaded, _, _ = base_model.load(places[0], tmp_path / "out")
    lora = [path for path, module in loaded.named_modules() if "lora_a" in module]
    assert len(lora) == 2


def test_num_layers_counts_from_the_last(places: tuple[Path, Path], tmp_path: Path) -> None:
    setup = set_up(settings_for(*places, tmp_path / "out", num_layers=1))
    assert {target.layer for target in setup.targets} == {1}
    every = set_up(settings_for(*places, tmp_path / "out", num_layers=-1))
    assert {target.layer for target in every.targets} == {0, 1}


def test_accumulated_batches_make_one_step(places: tuple[Path, Path], tmp_path: Path) -> None:
    """Two batches of two accumulated train as one batch of four with the same rows."""
    same: dict[str, Any] = {"iters": 4, "dropout": 0.0, "steps_per_eval": 100, "keep": "last"}
    data = write_data(tmp_path / "data", train=4, valid=0)
    accumulated = {**same, "batch_size": 2, "grad_accumulation_steps": 2}
    one = train_run.run(settings_for(places[0], data, tmp_path / "a", **accumulated))
    whole = {**same, "iters": 2, "batch_size": 4}
    train_run.run(settings_for(places[0], data, tmp_path / "b", **whole))
    assert (one.step, one.plan["iters"]) == (2, 4)
    a, b = (mx.load(str(tmp_path / name / "adapters.safetensors")) for name in "ab")
    for name, value in a.items():
        assert mx.allclose(value, b[name], atol=2e-5).item(), name


def test_checkpointed_layers_train_to_the_same_bytes(
    trained: Any, places: tuple[Path, Path], tmp_path: Path
) -> None:
    train_run.run(settings_for(*places, tmp_path / "out", grad_checkpoint=True))
    again = (tmp_path / "out" / "adapters.safetensors").read_bytes()
    assert again == (trained[1] / "adapters.safetensors").read_bytes()


def test_a_dry_run_plans_and_touches_nothing(
    trained: Any, places: tuple[Path, Path], tmp_path: Path
) -> None:
    report = train_run.run(settings_for(*places, tmp_path / "out"), dry_run=True)
    assert report.status == "planned"
    assert list(tmp_path.iterdir()) == []
    # The numbers of the plan are those of the run.
    assert report.plan == {**trained[0].plan, "writes": [str(tmp_path / "out")]}
    tensors = mx.load(str(trained[1] / "adapters.safetensors"))
    assert report.plan["trained_parameters"] == sum(value.size for value in tensors.values())
    assert report.plan["adapter_bytes"] == sum(value.nbytes for value in tensors.values())


# --- resuming -------------------------------------------------------------------------------------


class StoppedError(Exception):
    pass


def interrupted(settings: TrainSettings, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until step `at`, which is done but not saved, and stop there."""
    plain = train_run.TrainRun._on_step

    def stop(self: Any, state: TrainingState, record: dict[str, float]) -> None:
        if state.step == at:
            raise StoppedError
        plain(self, state, record)

    with monkeypatch.context() as patch:
        patch.setattr(train_run.TrainRun, "_on_step", stop)
        with pytest.raises(StoppedError):
            train_run.run(settings)


def test_a_resumed_run_ends_with_the_same_bytes(
    trained: Any, places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(*places, tmp_path / "out")
    interrupted(settings, 8, monkeypatch)
    assert not (tmp_path / "out").exists()
    saved = read_adapter(work_path(tmp_path / "out") / "adapter")
    assert saved.modules
    with (work_path(tmp_path / "out") / "log.jsonl").open("a") as log:
        log.write('{"event": "step", "st')
    report = train_run.run(settings)
    assert report.figures["resumed_from_step"] == 5
    for name in ("adapters.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (trained[1] / name).read_bytes(), name
    events = log_of(tmp_path / "out")
    assert [e["step"] for e in events if e["event"] == "step"] == [2, 4, 6, 8]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [5]
    assert [r["validation_loss"] for r in report.validation] == [
        r["validation_loss"] for r in trained[0].validation
    ]


def test_processes_that_do_not_see_the_same_state_are_refused(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several machines without a common disk only the first would go on, the rest begin."""
    settings = settings_for(*places, tmp_path / "out")
    interrupted(settings, 8, monkeypatch)
    state = work_path(tmp_path / "out") / "checkpoint.safetensors"
    before = state.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(train_run, "gathered", lambda step, group: [step, 0])
        with pytest.raises(InputError, match=r"from steps \[5, 0\]; only some see this file"):
            train_run.run(settings)
    assert state.read_bytes() == before


def test_a_state_of_another_recipe_is_refused_with_what_differs(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_data(tmp_path / "data")
    settings = settings_for(places[0], data, tmp_path / "out")
    interrupted(settings, 8, monkeypatch)
    state = work_path(tmp_path / "out") / "checkpoint.safetensors"
    before = state.read_bytes()
    other = settings.model_copy(update={"rank": 4, "learning_rate": 2e-2})
    with pytest.raises(InputError) as refused:
        train_run.run(other)
    message = str(refused.value)
    assert "rank: was 2, now 4" in message
    assert "learning_rate: was 0.01, now 0.02" in message
    assert "--no-resume" in message
    assert "seed" not in message
    write_rows(data / "train.jsonl", chat_rows(20, shift=1))
    with pytest.raises(InputError, match="train data: has changed"):
        train_run.run(settings)
    assert state.read_bytes() == before
    fresh = train_run.run(other.model_copy(update={"resume": False, "iters": 2}))
    assert fresh.figures["resumed_from_step"] == 0


def test_a_swapped_model_is_refused_on_resume_and_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_llama(tmp_path / "model", bits=None, hidden_size=256, dtype="float32")
    settings = settings_for(model, write_data(tmp_path / "data"), tmp_path / "out")
    interrupted(settings, 6, monkeypatch)
    change_between_samples(model, keep_mtime=True)
    with pytest.raises(InputError, match="base fingerprint: has changed"):
        train_run.run(settings)
    # begun by a version that took samples: compared in its way, and what comes of it is marked
    run = work_path(tmp_path / "out") / "run.json"
    identity = json.loads(run.read_text())
    sampled = fingerprint(open_checkpoint(model), like="0" * 64)
    run.write_text(json.dumps({**identity, "base_fingerprint": sampled}))
    assert set_up(settings).base_fingerprint == sampled
    anew = settings.model_copy(update={"resume": False})
    assert set_up(anew).base_fingerprint == fingerprint(open_checkpoint(model))
    guarded = train_run.guarded

    def guarded_and_changed(*arguments: Any, **options: Any) -> Any:
        change_between_samples(model)
        return guarded(*arguments, **options)

    monkeypatch.setattr(train_run, "guarded", guarded_and_changed)
    with pytest.raises(CheckpointError, match="changed during the run"):
        train_run.run(anew)


def test_two_runs_to_one_target_do_not_mix(places: tuple[Path, Path], tmp_path: Path) -> None:
    import filelock

    target = tmp_path / "out"
    with (
        filelock.FileLock(f"{work_path(target)}.lock"),
        pytest.raises(TargetError, match="is writing it"),
    ):
        train_run.run(settings_for(*places, target))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 65}, r"rank 65; allowed is 1 to"),
        ({"layers": "0,7"}, "layer 7: the model has layers 0 to 1"),
        ({"num_layers": 3}, "num_layers 3: the model has 2 layers"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"keys": ("donw_proj",)}, "'donw_proj' matches no projection; close: down_proj"),
        ({"keys": ("mlp.gate",)}, "router of a mixture of experts is never adapted"),
        ({"layers": "0", "keys": ("q_proj",)}, "'q_proj': only in layers 1"),
        ({"data": "/nowhere"}, "/nowhere: no such file or directory; put the data there"),
        ({"data": "an-owner/a-set"}, "an-owner/a-set: not in the cache of Hugging Face data sets"),
        ({"data": ""}, "data is empty; give a file, a directory or the id"),
        ({"data": "a\0b"}, "not a usable path: it holds a NUL"),
        ({"data": "\ud800"}, "not a usable path"),
        ({"data": "x" * 5000}, "cannot be opened: File name too long"),
        ({"model": "/nowhere"}, "no such directory"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_told_before_anything_is_written(
    places: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train_run.run(settings_for(*places, tmp_path / "out").model_copy(update=changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "0", "num_layers": 1}, "not both"),
        ({"val_batches": 0}, "val_batches is 0"),
        ({"iters": 2, "grad_accumulation_steps": 3}, "not one optimizer step"),
        ({"rank": 0}, "greater than or equal to 1"),
        ({"learning_rate": float("inf")}, "finite number"),
        ({"scale": float("inf")}, "finite number"),
        ({"scale": 1e308}, "less than or equal to"),
        ({"clip_norm": float("nan")}, "finite number"),
        ({"seed": 2**64}, "less than"),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_for(Path("m"), Path("d"), Path("o"), **changes)


ROPE = {"rope_type": "default", "rope_theta": "x", "partial_rotary_factor": 0.25}


def without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def with_config(file: str = "config.json", **changes: Any) -> Any:
    def change(model: Path) -> None:
        config = json.loads((model / file).read_text())
        config.get("text_config", config).update(changes)
        (model / file).write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_tokenizer, r"model: no tokenizer\.json"),
        (with_config(num_hidden_layers=3), "model: mlx-lm cannot load it: .*Missing"),
        (with_config(num_hidden_layers=1), "model: mlx-lm cannot load it: .*not in model"),
        (with_config(num_hidden_layers=10**9), "model: num_hidden_layers is 1,000,000,000"),
        (with_config(hidden_size="64"), "model: hidden_size is '64' in the config"),
        (with_config(use_cache="x"), "model: mlx-lm cannot load it: StrictDataclass"),
        (with_config(rope_parameters=ROPE), "model: mlx-lm cannot load it: TypeError"),
        (
            with_config("tokenizer_config.json", model_max_length=[]),
            r"model_max_length is \[\] in tokenizer_config\.json, not a number",
        ),
        (
            with_config("tokenizer_config.json", tool_parser_type="chat"),
            r"model: mlx-lm has no mlx_lm\.tool_parsers\.chat; mend .*tokenizer_config\.json",
        ),
    ],
)
def test_a_model_whose_files_do_not_go_together_is_bad_input(
    places: tuple[Path, Path], tmp_path: Path, change: Any, message: str
) -> None:
    model = Path(shutil.copytree(places[0], tmp_path / "model"))
    change(model)
    with pytest.raises(InputError, match=message):
        train_run.run(settings_for(model, places[1], tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_existing_target_is_refused_before_the_model_is_loaded(
    places: tuple[Path, Path], trained: Any
) -> None:
    with pytest.raises(TargetError, match="--force"):
        train_run.run(settings_for(Path("/nowhere"), places[1], trained[1]))


def test_broken_cut_and_empty_rows(places: tuple[Path, Path], tmp_path: Path) -> None:
    data = tmp_path / "data"
    nothing = {"messages": [{"role": "user", "content": "?"}]}
    long = {"prompt": "x", "completion": "y" * 100}
    write_rows(data / "train.jsonl", [*chat_rows(4), nothing, long])
    setup = set_up(settings_for(places[0], data, tmp_path / "out", max_seq_length=40))
    assert (len(setup.train.rows), setup.train.cut, setup.train.empty) == (5, 1, 0)
    assert setup.data["sources"][0]["dropped"] == {"no_answer": 1}
    assert "train: cut to 40 tokens: 1 of 5 rows." in setup.notes
    assert f"data: {data}/train.jsonl: 5 of 6 rows are used (1 no answer)." in setup.notes
    assert any("No rows to validate with" in note for note in setup.notes)
    write_rows(data / "train.jsonl", [nothing, nothing])
    with pytest.raises(InputError, match=r"none of 2 rows is usable: no answer \(2\)"):
        set_up(settings_for(places[0], data, tmp_path / "out"))
    with (data / "train.jsonl").open("a") as lines:
        lines.write("{oops\n")
    with pytest.raises(InputError, match=r"train\.jsonl, line 3: not JSON"):
        set_up(settings_for(places[0], data, tmp_path / "out"))


def test_several_sources_in_their_formats(places: tuple[Path, Path], tmp_path: Path) -> None:
    """As a domain of `stack` has them; what was read is in the report, what was not in a note."""
    alpaca = [
        {"instruction": f"Say {i} twice", "output": f"    {i}  {i}, {i}\n"} for i in range(60)
    ]
    write_rows(tmp_path / "a.jsonl", [*alpaca, {"instruction": "Say nothing", "output": ""}])
    write_rows(tmp_path / "b.jsonl", chat_rows(9))
    sources: list[Any] = [
        str(tmp_path / "a.jsonl"),
        {"path": str(tmp_path / "b.jsonl"), "format": "chat"},
    ]
    data = TrainDataSettings.model_validate({"sources": sources, "validation_fraction": 0.2})
    settings = settings_for(places[0], tmp_path, tmp_path / "out").model_copy(update={"data": data})
    setup = set_up(settings)
    run = train_run.GuardedRun(settings, setup)
    report = train_run.planned(settings, run, tmp_path / "out").as_json()
    read = [(s["formats"], s["rows_kept"]) for s in report["data"]["sources"]]
    assert read == [({"alpaca": 61}, 60), ({"chat": 9}, 9)]
    assert report["train_rows"] + report["validation_rows"] == 69
    assert any(note.startswith("Held out to validate with: ") for note in setup.notes)
    assert any("60 of 61 rows are used (1 no answer)" in note for note in setup.notes)
    assert all(not s["changed"] for s in report["data"]["sources"])
    text = base_model.load(places[0])[1].decode(setup.train.rows[0].tokens)
    assert "    0  0, 0" in text or "    1  1, 1" in text
    # The same rows read by other rules are another run, the same files elsewhere are not.
    identity = setup.identity(settings)
    moved = tmp_path / "moved"
    write_rows(moved / "a.jsonl", [*alpaca, {"instruction": "Say nothing", "output": ""}])
    write_rows(moved / "b.jsonl", chat_rows(9))
    elsewhere = TrainDataSettings.model_validate(
        {"sources": [str(moved / "a.jsonl"), {**sources[1], "path": str(moved / "b.jsonl")}],
         "validation_fraction": 0.2}
    )  # fmt: skip
    again = settings.model_copy(update={"data": elsewhere})
    assert set_up(again).identity(again) == identity
    other = settings.model_copy(update={"data": data.model_copy(update={"seed": 7})})
    assert set_up(other).identity(other) != identity


def test_a_file_without_validation_is_no_old_run_of_it(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    """Rows that are held out now were trained on before: its state must not go on."""
    file = write_rows(tmp_path / "rows.jsonl", [{"text": f"row number {i}"} for i in range(200)])
    settings = settings_for(places[0], file, tmp_path / "out")
    setup = set_up(settings)
    identity = setup.identity(settings)
    # How often it saves is no other recipe.
    often = settings.model_copy(update={"save_every": 3, "steps_per_report": 1})
    assert setup.identity(often) == identity
    assert setup.validation is not None
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert identity["train_data_sha256"] == identity["validation_data_sha256"] == sha256


def test_held_out_rows_that_say_nothing_do_not_stop_a_run(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    """Cut before their answers; with rows that are given for it, that is a mistake to be told."""
    long = [{"prompt": "why " * 90 + str(i), "completion": "so"} for i in range(9)]
    write_rows(tmp_path / "rows" / "train.jsonl", [*chat_rows(1), *long])
    data = TrainDataSettings.model_validate(
        {"sources": str(tmp_path / "rows"), "validation_rows": 1}
    )
    short = settings_for(places[0], tmp_path, tmp_path / "out", max_seq_length=30)
    seeds = (data.model_copy(update={"seed": seed}) for seed in range(2))
    for settings in (short.model_copy(update={"data": data}) for data in seeds):
        setup = set_up(settings)
        assert setup.validation is None
        assert any("held out cannot be validated with: none of 1" in n for n in setup.notes)
    write_rows(tmp_path / "rows" / "valid.jsonl", long)
    with pytest.raises(InputError, match="none of 9 rows has a token to learn from"):
        set_up(settings)


@pytest.mark.parametrize("kind", ["dangling", "directory"])
def test_validation_data_that_cannot_be_read_do_not_pass_for_none(
    places: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    """Without them other weights are kept, so a broken link has to be told."""
    data = write_data(tmp_path / "data", valid=0)
    if kind == "dangling":
        (data / "valid.jsonl").symlink_to("elsewhere")
    else:
        (data / "valid.jsonl").mkdir()
    with pytest.raises(InputError, match=r"valid\.jsonl: (no such file|holds no .jsonl,)"):
        set_up(settings_for(places[0], data, tmp_path / "out"))


def test_a_damaged_run_directory_is_named_and_loses_nothing(
    trained: Any, places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(*places, tmp_path / "out")
    interrupted(settings, 8, monkeypatch)
    work = work_path(tmp_path / "out")
    (work / "log.jsonl").write_bytes(b'\xff\xfe\n[1]\n3\n{"step": "x"}\n{}\n')
    identity = (work / "run.json").read_bytes()
    state = (work / "checkpoint.safetensors").read_bytes()
    for content in (b"[]", b"3", b"", b"\xff", b"{"):
        (work / "run.json").write_bytes(content)
        with pytest.raises(InputError, match=r"run\.json: damaged or missing.*--no-resume"):
            train_run.run(settings)
    (work / "run.json").write_bytes(identity)
    (work / "checkpoint.safetensors").write_bytes(state[:-1])
    with pytest.raises(InputError, match=r"checkpoint\.safetensors: damaged .*--no-resume"):
        train_run.run(settings)
    (work / "checkpoint.safetensors").write_bytes(state)
    assert train_run.run(settings).figures["resumed_from_step"] == 5
    name = "adapters.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (trained[1] / name).read_bytes()
    assert log_of(tmp_path / "out")[0]["event"] == "resumed"


def test_a_full_disk_is_told_and_the_state_before_it_stays(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX's own writer says "[write] Unable to write", which names neither file nor remedy."""
    settings = settings_for(*places, tmp_path / "out")
    plain, count = mx.save_safetensors, itertools.count()

    def full(path: str, *rest: Any) -> None:
        if next(count) >= 2:  # the second save: first a state, then an adapter
            raise RuntimeError("[write] Unable to write 593 bytes to file.")
        plain(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", full)
        with pytest.raises(TargetError, match=r"checkpoint\.safetensors: .* 593 bytes.*make room"):
            train_run.run(settings)
    assert train_run.run(settings).figures["resumed_from_step"] == 5


def test_a_loss_that_is_not_finite_loses_nothing(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 7 on the data give NaN: state and adapter of step 6 are saved."""
    plain = train_run.TrainRun._batches_at

    def poisoned(self: Any, step: int) -> Any:
        batches = plain(self, step)
        if step >= 6:
            batches[0].weights[:] = np.nan
        return batches

    monkeypatch.setattr(train_run.TrainRun, "_batches_at", poisoned)
    settings = settings_for(*places, tmp_path / "out")
    with pytest.raises(NonFiniteError, match=r"step 7: the loss is nan.*saved in"):
        train_run.run(settings)
    work = work_path(tmp_path / "out")
    _, metadata = mx.load(str(work / "checkpoint.safetensors"), return_metadata=True)
    assert metadata["step"] == "6"
    assert read_adapter(work / "adapter").modules
    monkeypatch.undo()
    assert train_run.run(settings).figures["resumed_from_step"] == 6


def test_experts_share_their_outer_half(places: tuple[Path, Path], tmp_path: Path) -> None:
    """mlx-lm's file has a copy for every expert, and fewer numbers were trained."""
    keys = ("switch_mlp.gate_proj", "switch_mlp.down_proj")
    settings = settings_for(*places, tmp_path / "out", shared_outer=True, keys=keys, iters=2)
    train_run.run(settings)
    modules = read_adapter(tmp_path / "out").modules
    assert is_shared_outer(modules.values())
    assert all(len(m.lora_a) == len(m.lora_b) == 4 for m in modules.values())
    assert any(m.lora_b.any() for m in modules.values())
    one = settings.model_copy(update={"keys": ("self_attn.q_proj",)})
    with pytest.raises(InputError, match=r"shared_outer is about routed experts, and .*q_proj"):
        set_up(one)


def test_a_state_is_saved_after_so_many_steps_and_after_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    timer, saved = SaveTimer(steps=10), list[int]()
    for step in range(1, 15):
        now[0] += 25.0
        timer.save_if_due(step, lambda step=step: saved.append(step))  # type: ignore[misc]
    assert saved == [3, 6, 9, 10, 13]

    def slowly() -> None:
        now[0] += 4.0

    timer.save_if_due(20, slowly)
    assert timer.seconds == 200

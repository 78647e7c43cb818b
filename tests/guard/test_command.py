"""`mlxstacks guard`: what it predicts, how it decides, what it refuses.

Run: pytest tests/guard/test_command.py
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.cli import run
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.guard import run as guard_run
from mlxstacks.guard.build import adapted_model, lazy_model, read_config
from mlxstacks.guard.predict import Point, Prediction, predict
from mlxstacks.guard.run import (
    Change,
    DecodeReport,
    GuardReport,
    Limit,
    guard,
    outcome_of,
    predict_training,
    result_of,
    share_of,
)
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.settings import parse_layers
from mlxstacks.study.render.console import result_text
from tests.guard.cases import Case
from tests.tiny_models import llama_config

Run = Callable[..., tuple[int, str, str]]
# A run by mlx-lm; the defaults are those of `mlxstacks train`.
MLX_LM: dict[str, Any] = {
    "recurrence": "loop", "loss": "whole", "optimizer": "adam", "adapter_copies": 0,
}  # fmt: skip
TINY = Case(96, layers=4, interval=4)
# The public architecture of Qwen3.5-35B-A3B.
LARGE: dict[str, Any] = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "head_dim": 256,
    "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], work_dir: Path) -> Run:
    """`command("--json")` is (exit code, stdout, stderr) of `mlxstacks guard --json`."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(["guard", *arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY.config()))
    return str(path)


COUNTS = (
    "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "head_dim",
)  # fmt: skip


@pytest.mark.parametrize("value", [-1, 10**12, "8", float("nan"), True, 1e30, {}])
@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_config_that_counts_what_cannot_be_is_one_clear_error(
    part: str | None, value: Any
) -> None:
    for name in COUNTS:
        config = {"model_type": "qwen3_5_moe", name: value}
        config = config if part is None else {"model_type": "qwen3_5_moe", part: config}
        with pytest.raises(CheckpointError, match=f"{name} is .* in the config; a whole number"):
            lazy_model(config)


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 0}, {"hidden_size": None}, {"vocab_size": [1]},
        {"num_attention_heads": [2, 2]}, {"num_attention_heads": 0}, {"num_key_value_heads": 3},
        {"num_experts": None}, {"num_experts_per_tok": 100}, {"num_experts_per_tok": [2]},
        {"num_experts_per_tok": None}, {"moe_intermediate_size": 0}, {"head_dim": 7},
        {"head_dim": 0}, {"rms_norm_eps": "small"}, {"rope_parameters": 3},
    ],
    ids=str,
)  # fmt: skip
def test_guard_of_a_hostile_config_is_one_clear_error(
    config: str, command: Run, change: dict[str, Any]
) -> None:
    values = json.loads(Path(config).read_text())
    values["text_config"] |= change
    Path(config).write_text(json.dumps(values))
    code, _, message = command("--model", config, "--max-seq-length", "8", "--rank", "2")
    assert (code, "not expected" in message) == (2, False), message


def large_config() -> dict[str, Any]:
    config = TINY.config()
    config["text_config"] |= LARGE
    return config | {
        "dtype": "bfloat16",
        "quantization": {"group_size": 64, "bits": 3, "mode": "affine"},
    }


# --- the published figures ----------------------------------------------------------------------


def test_published_count_of_the_large_model_comes_out() -> None:
    """158,073 live buffers at T=512, LoRA on {8,14,20}, in the loop over tokens."""
    settings = GuardSettings(
        max_seq_length=512, rank=2, layers="8,14,20", keys=("switch_mlp.down_proj",), **MLX_LM
    )
    found = predict_training(large_config(), settings, with_bytes=False)
    assert found.buffers == pytest.approx(158_073, rel=0.002)
    assert found.buffers_per_token == pytest.approx(301, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "published"), [("mlx", 89_914), ("layers", 66_974)])
def test_published_counts_with_checkpointing_come_out(checkpointing: str, published: int) -> None:
    settings = GuardSettings(
        max_seq_length=512, rank=2, layers="8,14,20", keys=("switch_mlp.down_proj",),
        checkpointing=checkpointing, **MLX_LM,
    )  # fmt: skip
    found = predict_training(large_config(), settings, with_bytes=False)
    assert found.buffers == pytest.approx(published, rel=0.01)


def test_chunks_need_a_fraction_on_the_large_model() -> None:
    settings = GuardSettings(
        max_seq_length=512, rank=2, layers="8,14,20", keys=("switch_mlp.down_proj",),
        **MLX_LM | {"recurrence": "chunked"},
    )  # fmt: skip
    found = predict_training(large_config(), settings, with_bytes=False)
    assert found.buffers < 0.06 * 158_073


# --- lines through short rows ---------------------------------------------------------------------


def test_a_line_goes_through_its_points() -> None:
    points = tuple(Point(t, 100 + 7 * t, 1000 + 3 * t, {}, {}) for t in (16, 48))
    found = Prediction(1000, points)
    assert (found.buffers, found.nbytes) == (7100, 4000)
    assert found.buffers_per_token == 7
    assert found.extrapolated


def test_the_phase_that_is_highest_in_the_end_counts() -> None:
    """It need not be the highest of the short rows."""
    early, late = (True, 0, "Add"), (False, 3, "Sum")
    points = tuple(
        Point(t, 1000 + t, 10_000 + t, {}, {early: (1000 + t, 10_000 + t), late: (5 * t, 70 * t)})
        for t in (16, 32)
    )
    found = Prediction(2000, points)
    assert (found.buffers, found.nbytes, found.buffers_per_token) == (10_000, 140_000, 5)
    assert found.buffers_at(100) == 1100


def test_a_phase_of_one_length_only_has_no_line() -> None:
    phase = (False, 1, "Sum")
    points = (Point(16, 100, None, {}, {}), Point(32, 132, None, {}, {phase: (132, 0)}))
    assert Prediction(64, points).buffers == 196


def test_a_single_length_is_never_below_itself() -> None:
    found = Prediction(64, (Point(64, 640, 6400, {}, {}),))
    assert [found.buffers_at(t) for t in (16, 64, 128)] == [640, 640, 1280]


def test_kinds_add_up_and_weights_do_not_grow() -> None:
    kinds = {"linear_attn": 300, "weights": 50, "adapter and optimizer": 10}
    points = (Point(32, 200, None, {}, {}), Point(64, 360, None, kinds, {}))
    found = Prediction(640, points)
    assert found.kinds["weights"] == 50
    assert sum(found.kinds.values()) == pytest.approx(found.buffers, abs=2)


def test_longer_rows_are_on_the_line_of_shorter_ones() -> None:
    """Law: buffers from two lengths to a third, within a percent of its own simulation."""
    settings = TINY.settings()

    def step_at(tokens: int) -> Any:
        from mlxstacks.guard.build import training_step

        return training_step(TINY.config(), settings, tokens)

    line = predict(step_at, 300, (32, 48), 0)
    direct = predict(step_at, 300, (32, 48), 300)
    assert (line.extrapolated, direct.extrapolated) == (True, False)
    assert line.buffers == pytest.approx(direct.buffers, rel=0.01)
    # Rows this short are not yet where bytes grow evenly.
    assert line.nbytes == pytest.approx(direct.nbytes, rel=0.1)


@pytest.mark.parametrize("loss", ["whole", "pieces"])
def test_bytes_follow_the_batch_and_buffers_do_not(loss: str) -> None:
    change = {"max_seq_length": 16, "recurrence": "chunked", "loss": loss}
    one, four = (
        predict_training(
            TINY.config(), TINY.settings().model_copy(update=change | {"batch_size": rows})
        )
        for rows in (1, 4)
    )
    assert four.buffers == pytest.approx(one.buffers, rel=0.02)
    assert one.nbytes is not None
    assert four.nbytes is not None
    assert four.nbytes > 1.5 * one.nbytes


# --- decisions ------------------------------------------------------------------------------------


def limited(config: str, **more: Any) -> GuardReport:
    """Of a run by mlx-lm, in which there is something to change."""
    return guard(GuardSettings(model=config, **{"max_seq_length": 96, **MLX_LM, **more}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> GuardReport:
    path = tmp_path_factory.mktemp("plain") / "config.json"
    path.write_text(json.dumps(TINY.config()))
    return limited(str(path))


@pytest.mark.parametrize(
    ("share", "outcome"),
    [(0.0, "fits"), (0.499, "fits"), (0.5, "tight"), (0.899, "tight"), (0.9, "refused")],
)
def test_warned_from_half_and_refused_from_nine_tenths(share: float, outcome: str) -> None:
    assert outcome_of(share) == outcome


def test_the_nearer_limit_decides() -> None:
    limit = Limit(1000, True, 4000)
    assert share_of(limit, 100, 3600) == 0.9
    assert share_of(limit, 950, 100) == 0.95
    assert share_of(replace(limit, nbytes=None), 100, 10**12) == 0.1


def test_report_counts_bytes_kinds_and_headroom(plain: GuardReport) -> None:
    document = json.loads(json.dumps(plain.as_json()))
    assert document["status"] == "fits"
    assert document["headroom_buffers"] == document["limit"]["buffers"] - document["buffers"]
    parts = document["bytes"]
    whole = sum(parts[f"{n}_bytes"] for n in ("weights", "adapter", "optimizer", "activations"))
    assert parts["total_bytes"] == whole
    assert parts["optimizer_bytes"] >= 2 * parts["adapter_bytes"] > 0
    assert next(iter(plain.kinds)) == "linear_attn"
    assert sum(plain.kinds.values()) == plain.buffers
    assert plain.simulated_tokens[-1] < 96


def test_the_cheapest_change_is_tried_first_and_fits(plain: GuardReport, config: str) -> None:
    found = limited(config, resource_limit=plain.buffers)
    assert found.outcome == "refused"
    assert found.failed_gate
    assert found.change is not None
    assert found.change.settings == {"recurrence": "chunked"}
    assert found.change.buffers < 0.5 * plain.buffers
    again = limited(config, resource_limit=plain.buffers, **found.change.settings)
    assert again.outcome == "fits"
    # What --apply prints is the whole run, changed.
    assert found.apply["recurrence"] == "chunked"
    assert found.apply["max_seq_length"] == 96
    GuardSettings(**found.apply)


def test_shorter_rows_where_nothing_else_helps(plain: GuardReport, config: str) -> None:
    found = limited(config, resource_limit=plain.buffers, recurrence="chunked",
                    checkpointing="layers", working_set_bytes=plain.nbytes.weights)  # fmt: skip
    assert found.outcome == "refused"
    assert found.change is None  # the weights alone are more than that


def test_bytes_count_when_there_is_a_working_set(plain: GuardReport, config: str) -> None:
    total = plain.nbytes.total
    assert total is not None
    found = limited(config, working_set_bytes=int(total / 0.7))
    assert found.outcome == "tight"
    assert "70%" in found.verdict
    assert found.change is not None
    assert found.change.nbytes is not None
    assert found.change.nbytes < 0.7 * total


def test_generating_is_predicted_too(config: str) -> None:
    short = {"max_seq_length": 8, "decode_tokens": 1000}
    found = limited(config, **short, decode_batch=2, decode_with="batched")
    assert found.decode is not None
    # Three of four layers count padding; only the first of them is read.
    assert found.decode.leaked_per_token == 2
    assert found.decode.tokens_until_limit is not None
    assert found.decode.buffers > 2000
    # keys and values of two rows get room for 256 tokens at a time
    rooms = [
        limited(config, **{**short, "decode_tokens": n}, decode_batch=2) for n in (1, 256, 257)
    ]
    first, same, more = (room.decode.nbytes for room in rooms if room.decode is not None)
    assert first == same < more
    still = limited(config, **short)
    assert still.decode is not None
    assert still.decode.leaked_per_token == 0
    assert still.decode.tokens_until_limit is None


def test_a_long_generation_is_refused_by_itself(config: str) -> None:
    found = limited(config, max_seq_length=8, decode_tokens=300_000, decode_with="batched")
    assert found.outcome == "refused"
    assert "after 300,000 tokens" in found.verdict


def test_dense_models_have_no_recurrence_to_change(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama_config(64)))
    found = limited(str(path), resource_limit=400)
    assert found.outcome == "refused"
    assert "self_attn" in found.kinds
    assert found.change is None or "recurrence" not in found.change.settings


# --- the command line -----------------------------------------------------------------------------


def test_bare_run_takes_nano(command: Run) -> None:
    code, out, err = command("--max-seq-length", "64")
    assert code == 0
    assert "nano" in err
    assert "Verdict: The buffers fit" in out


def test_json_is_one_document(command: Run, config: str) -> None:
    code, out, _ = command("--model", config, "--max-seq-length", "40", "--json")
    document = json.loads(out)
    assert (code, document["data"]["status"], document["outcome"]) == (0, "fits", "fits")
    assert document["settings"]["max_seq_length"] == 40


def test_over_the_limit_exits_with_3_unless_forced_and_names_what_fits(
    command: Run, config: str
) -> None:
    arguments = ["--model", config, "--max-seq-length", "64", "--resource-limit", "2600"]
    for name, value in MLX_LM.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    code, out, err = command(*arguments)
    assert code == 3
    assert "Gate not met: does not fit" in err
    assert "cheapest change train the recurrence in chunks" in " ".join(out.split())
    code, out, _ = command(*arguments, "--apply")
    assert code == 0
    recipe = Path("fits.yaml")
    recipe.write_text(out)
    assert 'recurrence: "chunked"\n' in out
    code, out, _ = command("--recipe", str(recipe), "--json")
    assert (code, json.loads(out)["outcome"]) == (0, "fits")
    code, out, err = command(*arguments[: -len(MLX_LM) * 2], "--resource-limit", "10", "--apply")
    assert (code, out) == (3, "")
    assert "no change makes it fit" in err


def test_blocks(plain: GuardReport) -> None:
    """Every figure has its row, in 80 columns."""
    change = Change("shorter rows", {"max_seq_length": 8}, 700, 10**9)
    decode = DecodeReport(100, 800, 10**9, 2, 5000)
    result = result_of(replace(plain, change=change, decode=decode))
    prediction = dict(result.table("prediction").to_records(index=False).tolist())
    assert prediction["live buffers"].startswith(f"{plain.buffers:,} of ")
    assert prediction["headroom"] == f"{plain.limit.buffers - plain.buffers:,} buffers"
    assert prediction["longest row"] == f"{plain.longest:,} tokens"
    assert prediction["generating"] == (
        "800 buffers after 100 tokens, 1 GB; 2 more each token, the limit after 5,000"
    )
    assert prediction["cheapest change"] == "shorter rows: at most 700 buffers, 1 GB"
    nbytes = dict(result.table("bytes").to_records(index=False).tolist())
    assert (nbytes["weights"], nbytes["in all"]) == (plain.nbytes.weights, plain.nbytes.total)
    kinds = result.table("buffers")
    assert dict(zip(kinds["buffers_of"], kinds["count"], strict=True)) == plain.kinds
    assert kinds.share.sum() == pytest.approx(1)
    assert max(map(len, result_text(result, 80).splitlines())) <= 80


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2,40"], "layer 40: the model has layers 0 to 3"),
        (["--layers", "some"], "numbers and ranges as in 8,14,20-24"),
        (["--keys", "dwn_proj"], "close: down_proj"),
        (["--keys", "mlp.gate"], "router"),
        (["--rank", "65"], "rank"),
        (["--rank", "0"], "greater than or equal to 1"),
        (["--max-seq-length", "0"], "greater than or equal to 1"),
        (["--batch-size", "9" * 15], "less than or equal to 1000000"),
        (["--decode-batch", "9" * 15], "less than or equal to 1000000"),
        (["--recurrence", "chunky"], "did you mean 'chunked'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings_exit_with_2(
    command: Run, config: str, arguments: list[str], message: str
) -> None:
    code, _, err = command("--model", config, *arguments)
    assert (code, message in err) == (2, True), err
    assert "Traceback" not in err


def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    config = TINY.config()
    change(config)
    return config


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (broken(lambda c: c.pop("model_type")), "no model_type"),
        (broken(lambda c: c.update(model_type="qwen9")), "'qwen9' is not known to mlx-lm"),
        (broken(lambda c: c["text_config"].update(hidden_size="wide")), "hidden_size is 'wide'"),
        (broken(lambda c: c["text_config"].update(num_attention_heads=0)), "does not describe"),
        (broken(lambda c: c.update(quantization={"bits": 4})), "does not describe"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(made: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        lazy_model(made)


def test_a_config_that_no_row_goes_through_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(llama_config(64) | {"num_key_value_heads": 3}))
    with pytest.raises(CheckpointError, match="the config does not describe a llama: ValueError"):
        guard(GuardSettings(model=str(path), max_seq_length=8))


def test_a_fault_of_the_prediction_is_no_fault_of_the_config(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(*_: Any, **__: Any) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(guard_run, "predict_training", faulty)
    with pytest.raises(KeyError, match="a fault of ours"):
        guard(GuardSettings(model=config, max_seq_length=8))


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layers"])
def test_a_billion_layers_are_refused_before_they_are_built(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is 1,000,000,000 .* from 1 to 1,000 is"):
        lazy_model(llama_config(64) | {name: 10**9})
    with pytest.raises(CheckpointError, match="a whole number from 1 to 1,000 is"):
        lazy_model(broken(lambda c: c["text_config"].update(num_hidden_layers=1001)))


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid"):
        read_config(str(tmp_path))
    with pytest.raises(CheckpointError, match="no such directory or file"):
        read_config("nobody/has-such-a-model")


def test_overrides_in_the_config_are_followed() -> None:
    """A module that the config names has bits of its own, or none."""
    config = replace(TINY, bits=4).config()
    one, two = (f"language_model.model.layers.0.mlp.switch_mlp.{n}_proj" for n in ("up", "down"))
    config["quantization"] |= {one: {"group_size": 64, "bits": 8}, two: False}
    modules = dict(lazy_model(config).named_modules())
    assert modules[one].bits == 8
    assert not hasattr(modules[two], "bits")
    assert modules[one.replace("layers.0", "layers.1")].bits == 4


def test_errors_of_targets_are_input_errors() -> None:
    with pytest.raises(InputError, match="cannot choose"):
        adapted_model(TINY.config(), GuardSettings(keys=("nothing",)))


def test_layers_are_numbers_and_ranges() -> None:
    assert parse_layers("all") is None
    assert parse_layers("8, 14,20-22,8") == (8, 14, 20, 21, 22)
    for wrong in ("", "3-1", "1,,2", "-1", "0-9999999999"):
        with pytest.raises(ValueError, match="layers"):
            parse_layers(wrong)


def test_more_bytes_than_this_machine_has_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(llama_config(64)))
    settings = GuardSettings(model=str(config), max_seq_length=64)
    monkeypatch.setattr(guard_run.memory, "host_memory_bytes", lambda: 1 << 40)
    assert "of this machine" not in guard(settings).verdict
    monkeypatch.setattr(guard_run.memory, "host_memory_bytes", lambda: 100_000)
    assert guard(settings).verdict.endswith("more than the 100 kB of this machine")

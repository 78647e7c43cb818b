"""`mlxstacks fuse` judged by behaviour: what stands in the result, gates, what is never lost.

Run: pytest tests/studies/agreement/test_judge.py
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mlxstacks import memory
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.nano.exports import nano_paths
from mlxstacks.studies.agreement import judge
from mlxstacks.studies.agreement.judge import FUSED, ZERO
from mlxstacks.studies.agreement.run import BASE
from mlxstacks.study.result import Result
from tests.cli.conftest import Run, command
from tests.studies.agreement.test_run import rows
from tests.tiny_models import random_adapter, write_llama

__all__ = ["command", "rows"]


def test_the_verdict_leads_with_behaviour_and_compare_says_the_same(
    rows: Path, command: Run
) -> None:
    gates = ("--fail-under-agreement", "1")
    given = ("--judge", str(rows), "--requant", "refit", *gates)
    code, out, err = command("fuse", "--save-path", "fused", "--json", *given)
    assert code == 3, err
    assert "is below --fail-under-agreement 1.0" in err
    document = json.loads(out)
    figures = document["data"]["behaviour"]
    assert list(figures) == [FUSED, BASE, ZERO]
    # A refit on nano changes tokens by itself, and an adapter changes more of them.
    assert 0 < figures[ZERO]["all"]["kl_nats"] < figures[BASE]["all"]["kl_nats"]
    assert document["verdict"].startswith(
        "Compared with the unfused adapter: the same next token in "
    )
    assert document["blocks"][0]["id"] == "behaviour"
    assert [row[0] for row in document["blocks"][0]["rows"]] == [FUSED, BASE, ZERO]
    assert Result.open("fused").standing.status == "no plan"  # sealed again, with all its files

    model, adapter = str(nano_paths().model_path), str(nano_paths().adapter_path)
    compared = ("compare", model, "fused", "--adapter-path", adapter, "--data", str(rows))
    code, out, err = command(*compared, "--save-path", "compared", "--no-plots", "--json")
    assert code == 0, err
    models = json.loads(out)["data"]["models"]
    assert models["fused"] == figures[FUSED]
    assert models[BASE] == figures[BASE]


def test_a_fuse_of_zeros_is_held_against_the_base(rows: Path, command: Run) -> None:
    code, out, err = command(
        "fuse", "--save-path", "zero", "--zero-delta", "--judge", str(rows), "--json"
    )
    assert code == 0, err
    document = json.loads(out)
    assert list(document["data"]["behaviour"]) == [FUSED]
    assert document["data"]["behaviour"][FUSED]["all"]["agreement"] == 1
    assert document["verdict"].startswith("Compared with the base: the same next token in all of")


def test_a_fuse_says_that_its_judge_cut_rows(rows: Path, command: Run) -> None:
    rows.write_text(json.dumps({"text": "A red boat. " * 99}))
    code, out, err = command("fuse", "--save-path", "long", "--judge", str(rows), "--json")
    assert code == 0, err
    cut = "1 of 1 rows were cut to 256 tokens; mlxstacks compare --max-tokens changes that."
    assert cut in json.loads(out)["notes"]


def test_rows_that_cannot_be_used_stop_the_fuse_before_it_begins(rows: Path, command: Run) -> None:
    rows.write_text("")
    code, _, err = command("fuse", "--save-path", "fused", "--judge", str(rows))
    assert code == 2
    assert f"{rows}: no rows" in err
    gate = ("--judge", "none", "--fail-under-agreement", "1")
    code, _, err = command("fuse", "--save-path", "fused", *gate)
    assert code == 2
    assert "needs a judge" in err
    assert not Path("fused").exists()


@pytest.mark.parametrize("reason", ["memory", "tokenizer"])
def test_a_fuse_that_cannot_be_judged_is_whole_and_says_why(
    rows: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    values = {"judge": str(rows), "save_path": "fused", "requant": "keep"}
    if reason == "memory":
        small = replace(memory.device(), memory_bytes=1000)
        monkeypatch.setattr(memory, "device", lambda: small)
        paths = nano_paths()
        model, adapter, message = paths.model_path, paths.adapter_path, "of memory, and there are"
    else:
        model = write_llama(Path("model"))
        (model / "tokenizer.json").unlink()
        adapter, message = random_adapter(model, ["self_attn.q_proj"], rank=2), "no tokenizer.json"
    settings = FuseSettings.model_validate(
        {**values, "model": str(model), "adapter_path": (str(adapter),)}
    ).model_copy(update={"fail_under_agreement": 0.5})
    result = judge.run(settings)
    assert str(result.failed_gate).startswith("agreement was not measured: ")
    assert result.notes[-1].startswith("Not judged by its behaviour: ")
    assert message in result.notes[-1]
    assert "behaviour" not in result.data
    assert Result.open("fused").notes[-2] == result.notes[-1]
    assert (Path("fused") / "config.json").is_file()


def test_an_adapter_of_another_base_is_judged_where_it_is_taken(rows: Path, command: Run) -> None:
    """With --allow-base, by the fuse and by compare."""
    paths = nano_paths()
    adapter = Path("adapter")
    shutil.copytree(paths.adapter_path, adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["mlxstacks_base_fingerprint"] = "full:" + 64 * "0"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    given = ("--model", str(paths.model_path), "--adapter-path", str(adapter))
    code, _, err = command("fuse", *given, "--save-path", "no", "--judge", str(rows))
    assert code == 2
    assert "--allow-base" in err
    code, out, err = command(
        "fuse", *given, "--allow-base", "--save-path", "fused", "--judge", str(rows), "--json"
    )
    assert code == 0, err
    assert FUSED in json.loads(out)["data"]["behaviour"]
    compared = ("compare", "fused", *given, "--data", str(rows), "--no-plots")
    assert command(*compared, "--save-path", "c")[0] == 2
    assert command(*compared, "--save-path", "c", "--allow-base")[0] == 0


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_rows_that_cannot_be_judged_on_are_refused_before_the_fuse(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"foo": 1}\n')
    code, _, err = command("fuse", "--judge", "rows.jsonl", "--save-path", "fused", *options)
    assert (code, "rows.jsonl: row 1 has 'foo'; give" in err) == (2, True), err
    assert not (tmp_path / "fused").exists()

"""`mlxstacks fuse` judged by behaviour: what stands in the result, gates, what is never lost.

Run: pytest tests/studies/agreement/test_judge.py
"""

import json
import os
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from mlxstacks import memory
from mlxstacks.agreement import Passage, Reference
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.nano.exports import nano_paths
from mlxstacks.studies.agreement import judge, reference_files
from mlxstacks.studies.agreement.judge import FUSED, ZERO
from mlxstacks.studies.agreement.reference_files import Referred, once, reference_key
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
    losses = [(name, parts["all"]["loss_change_nats"]) for name, parts in figures.items()]
    assert [(row[0], row[-1]) for row in document["blocks"][0]["rows"]] == losses
    assert Result.open("fused").standing.status == "no plan"  # sealed again, with all its files

    model, adapter = str(nano_paths().model_path), str(nano_paths().adapter_path)
    compared = ("compare", model, "fused", "--adapter-path", adapter, "--data", str(rows))
    code, out, err = command(*compared, "--save-path", "compared", "--no-plots", "--json")
    assert code == 0, err
    models = json.loads(out)["data"]["models"]
    assert models["fused"] == figures[FUSED]
    assert models[BASE] == figures[BASE]


@pytest.fixture
def references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where references are kept: a place where none is."""
    monkeypatch.setattr(reference_files, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / f"references-{os.getuid()}"


def test_a_second_fuse_asks_no_reference_and_says_the_same(
    rows: Path, command: Run, references: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("fuse", "--judge", str(rows), "--requant", "refit", "--json")
    code, first, err = command(*given, "--save-path", "first")
    assert code == 0, err
    assert len([*references.iterdir()]) == 2  # of the adapter, and of the base for the zeros

    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the reference was asked again")

    monkeypatch.setattr(judge, "refer", asked)
    monkeypatch.setattr(judge, "read_passages", asked)
    code, second, err = command(*given, "--save-path", "second")
    assert code == 0, err
    before, after = (json.loads(out) for out in (first, second))
    assert after["data"]["behaviour"] == before["data"]["behaviour"]
    assert after["notes"] == before["notes"]


def tiny(number: int) -> Reference:
    """8 kB and little more."""
    log_p = np.full((2, 500), number, np.float32)
    passages = (Passage((1, 2, number), 1, "text"),)
    return Reference(passages, np.zeros((2, 500), np.int32), log_p, log_p[:, 0])


def test_a_damaged_reference_is_made_anew(references: Path) -> None:
    asked = []

    def make() -> Referred:
        asked.append(1)
        return tiny(7), ["cut"]

    def once_more() -> Reference:
        reference, notes = once(lambda: "key", make)
        assert notes == ["cut"]
        return reference

    once_more()
    whole = next(references.iterdir()).read_bytes()
    flipped = bytes([*whole[:5000], whole[5000] ^ 1, *whole[5001:]])
    for number, content in enumerate((whole, flipped, whole[:-1], b"")):
        (file,) = references.iterdir()
        file.write_bytes(content)
        found = once_more()
        assert len(asked) == 1 + number
        assert found.passages == tiny(7).passages
        for name in ("ids", "log_p", "loss"):
            np.testing.assert_array_equal(getattr(found, name), getattr(tiny(7), name))


def test_references_have_a_bound_and_are_the_users_own(
    references: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ages = count(1)  # not left to the steps of a clock

    def is_asked(key: str) -> bool:
        asked = []

        def make() -> Referred:
            asked.append(key)
            return tiny(1), []

        once(lambda: key, make)
        for file in references.glob(f"{key}-*"):
            os.utime(file, ns=(0, next(ages)))
        return bool(asked)

    monkeypatch.setattr(reference_files, "MOST_BYTES", 3 * 8_700)
    assert [key for key in "abcadab" if is_asked(key)] == [*"abcdb"]
    assert len([*references.iterdir()]) == 3
    references.chmod(0o755)
    assert is_asked("b")
    assert is_asked("b")
    changing = iter("xy")  # an adapter that is being trained
    references.chmod(0o700)
    once(lambda: next(changing), lambda: (tiny(1), []))
    assert not [*references.glob("[xy]-*")]


def test_what_a_reference_depends_on_is_in_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = nano_paths()
    model = shutil.copytree(paths.model_path, tmp_path / "model")
    adapter = shutil.copytree(paths.adapter_path, tmp_path / "adapter")
    os.mkfifo(model / "pipe.json")  # is no file of the model, and would not end
    keys = []

    def key(*adapters: Path, asked: str = "rows") -> None:
        keys.append(reference_key(model, [*map(str, adapters)], asked))

    key(adapter)
    key(paths.adapter_path)
    assert keys.pop() == keys[0]  # another place is no other adapter
    key()
    key(adapter, adapter)
    key(adapter, asked="others")
    for file, old, new in (
        (adapter / "adapter_config.json", '"scale": ', '"scale": 1'),
        (model / "tokenizer_config.json", "{", '{"a": 1, '),
        (model / "config.json", "{", '{"a": 1, '),
    ):
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        key(adapter)
    monkeypatch.setattr(reference_files, "TOP_K", 64)
    key(adapter)
    small = replace(memory.device(), memory_bytes=1000)  # so that it computes as it is stored
    monkeypatch.setattr(memory, "device", lambda: small)
    key(adapter)
    assert len({*keys}) == len(keys) == 9


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

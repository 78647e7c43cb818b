"""The functions behind `mlxstacks adapter show | zero | convert`.

Run: pytest tests/files/test_adapter_commands.py
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from mlxstacks.errors import InputError, TargetError
from mlxstacks.files.adapter_commands import convert_adapter, show_adapter, zero_adapter_command
from mlxstacks.files.adapters import (
    load_any_adapter,
    read_adapter,
    zero_adapter,
)
from mlxstacks.files.lora_modules import delta_norm
from mlxstacks.files.settings import (
    AdapterConvertSettings,
    AdapterShowSettings,
    AdapterZeroSettings,
)
from mlxstacks.study.document import Table


def test_show_reports_every_module_and_the_size_of_its_delta(moe_adapter: Path) -> None:
    summary = show_adapter(AdapterShowSettings(adapter_path=str(moe_adapter)))
    shown = json.loads(json.dumps(asdict(summary)))
    assert shown["format"] == "mlx"
    assert shown["rank"] == 3
    adapter = read_adapter(moe_adapter)
    assert [m["path"] for m in shown["modules"]] == list(adapter.modules)
    for entry in shown["modules"]:
        module = adapter.modules[entry["path"]]
        product = (
            module.lora_b @ module.lora_a if module.is_switch else module.lora_a @ module.lora_b
        )
        assert entry["delta_rms"] == pytest.approx(
            module.scale * np.sqrt((product**2).mean()), rel=1e-4
        )


def test_norm_of_a_zero_delta_is_zero(moe_adapter: Path) -> None:
    assert {delta_norm(m) for m in zero_adapter(read_adapter(moe_adapter)).modules.values()} == {
        0.0
    }


@pytest.mark.parametrize("source_format", ["mlx", "peft"])
def test_zero_command_keeps_the_format(
    source_format: str, moe_adapter: Path, tmp_path: Path
) -> None:
    source = moe_adapter
    if source_format == "peft":
        source = tmp_path / "peft"
        convert_adapter(
            AdapterConvertSettings(adapter_path=str(moe_adapter), save_path=str(source))
        )
    settings = AdapterZeroSettings(adapter_path=str(source), save_path=str(tmp_path / "zero"))
    result = zero_adapter_command(settings)
    assert (result.source_format, result.format) == (source_format, source_format)
    zero, trained = load_any_adapter(tmp_path / "zero"), read_adapter(moe_adapter)
    assert {p: m.lora_a.shape for p, m in zero.modules.items()} == {
        p: m.lora_a.shape for p, m in trained.modules.items()
    }
    assert not any(m.lora_b.any() or m.lora_a.any() for m in zero.modules.values())


def test_commands_need_paths() -> None:
    with pytest.raises(InputError, match="adapter_path is not set"):
        show_adapter(AdapterShowSettings())
    with pytest.raises(InputError, match="save_path"):
        zero_adapter_command(AdapterZeroSettings(adapter_path="x"))


@pytest.mark.parametrize("to", ["zero", "mlx", "peft"])
@pytest.mark.parametrize("target", ["a", "."])
def test_force_never_replaces_the_adapter_that_is_read(
    moe_adapter: Path, tmp_path: Path, to: str, target: str
) -> None:
    """Neither the directory itself nor one that holds it."""
    source = tmp_path / "held" / "a"
    shutil.copytree(moe_adapter, source)
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    options = {
        "adapter_path": str(source),
        "save_path": str(tmp_path / "held" / target),
        "force": True,
    }

    def write() -> None:
        if to == "zero":
            zero_adapter_command(AdapterZeroSettings(**options))
        else:
            convert_adapter(AdapterConvertSettings(**options, to=to))

    with pytest.raises(TargetError, match="is or holds"):
        write()
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before


def test_home_is_known_on_both_sides(
    moe_adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(moe_adapter, tmp_path / "in")
    written = zero_adapter_command(AdapterZeroSettings(adapter_path="~/in", save_path="~/out"))
    assert written.weight_bytes > 0
    assert (tmp_path / "out" / "adapters.safetensors").is_file()
    with pytest.raises(InputError, match="~nobody-of-this-name/x"):
        show_adapter(AdapterShowSettings(adapter_path="~nobody-of-this-name/x"))


@pytest.mark.parametrize("name", [["x"], {"a": 1}, 5])
def test_a_base_that_is_no_name_is_not_shown(
    moe_adapter: Path, tmp_path: Path, name: object
) -> None:
    shutil.copytree(moe_adapter, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "model": name}))
    summary = show_adapter(AdapterShowSettings(adapter_path=str(tmp_path / "a")))
    assert summary.base_model is None


def test_results_say_what_was_done(moe_adapter: Path, tmp_path: Path) -> None:
    from mlxstacks.studies import adapter

    shown = adapter.show(AdapterShowSettings(adapter_path=str(moe_adapter)))
    facts, modules = shown.blocks
    assert isinstance(facts, Table)
    assert isinstance(modules, Table)
    assert ("format", "mlx-lm") in facts.rows
    assert [row[0] for row in modules.rows] == [m["path"] for m in shown.data["modules"]]
    target = tmp_path / "peft"
    settings = AdapterConvertSettings(adapter_path=moe_adapter, save_path=target, to="peft")
    written = adapter.convert(settings)
    assert written.directory == written.data["save_path"] == str(target)
    (table,) = written.blocks
    assert isinstance(table, Table)
    assert table.rows[0][0] == "PEFT"
    assert table.rows[0][-1] == (target / "adapter_model.safetensors").stat().st_size
    assert f"Wrote {target}" in str(written)
    zeroed = adapter.zero(AdapterZeroSettings(adapter_path=target, save_path=tmp_path / "zero"))
    assert zeroed.data["format"] == "peft"

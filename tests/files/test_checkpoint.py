"""Opening model directories: index, shards, fingerprint, hub cache.

pytest tests/files/test_checkpoint.py
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load

from mlxstacks import base_model
from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.files import checkpoint as checkpoint_module
from mlxstacks.files import lora_modules
from mlxstacks.files.checkpoint import INDEX_NAME, fingerprint, open_checkpoint
from mlxstacks.files.hub import ALLOW_PATTERNS, in_hub_cache, resolve_model
from mlxstacks.files.shards import read_tensor
from mlxstacks.guard.build import read_config
from tests.files.raw import entry, file_bytes
from tests.files.store_cases import make_store
from tests.tiny_models import (
    llama_config,
    random_adapter,
    save_sharded,
    write_llama,
    write_qwen_moe,
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_moe(tmp_path_factory.mktemp("written") / "model", bits=3)


@pytest.fixture
def model(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "model"))


def edit_index(model: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((model / INDEX_NAME).read_text())
    change(index)
    (model / INDEX_NAME).write_text(json.dumps(index))


def reshard(model: Path, shards: int) -> None:
    """Spread the same tensors over another number of files."""
    tensors: dict[str, mx.array] = {}
    for path in model.glob("model*.safetensors"):
        tensors.update(mx.load(str(path)))
    mx.eval(tensors)
    for path in model.glob("model*.safetensors"):
        path.unlink()
    save_sharded(model, tensors, shards)


# --- opening ---------------------------------------------------------------------------------


def test_every_tensor_that_mlx_lm_loads_is_there(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    assert len(checkpoint.headers) == 3
    assert checkpoint.config["model_type"] == "qwen3_5_moe"
    loaded: dict[str, mx.array] = {}
    for path in model.glob("model*.safetensors"):
        loaded.update(mx.load(str(path)))
    assert checkpoint.tensors.keys() == loaded.keys()
    for name, info in checkpoint.tensors.items():
        assert info.shape == loaded[name].shape
        if info.dtype != "BF16":
            assert (read_tensor(info) == loaded[name]).all()
    files = sum(path.stat().st_size for path in model.glob("model*.safetensors"))
    assert sum(header.file_bytes for header in checkpoint.headers) == files


@pytest.mark.parametrize(
    ("write", "bits"), [(write_qwen_moe, 3), (write_qwen_moe, None), (write_llama, 4)]
)
def test_tiny_models_and_their_adapters_load_in_mlx_lm(
    tmp_path: Path, write: Callable[..., Path], bits: int | None
) -> None:
    model = write(tmp_path / "model", bits=bits, group_size=32, hidden_size=64, dtype="float32")
    adapter = random_adapter(model, rank=2, std=0.01)
    plain, tokenizer = load(str(model))
    adapted, _ = load(str(model), adapter_path=str(adapter))
    tokens = mx.array([tokenizer.encode("ab")])
    assert tokens.tolist() == [[97, 98]]
    assert not mx.allclose(plain(tokens), adapted(tokens))
    open_checkpoint(model)


def test_a_model_without_an_index_opens(model: Path) -> None:
    (model / INDEX_NAME).unlink()
    assert open_checkpoint(model).index is None


def test_hub_snapshot_of_symlinks_opens(tmp_path: Path, model: Path) -> None:
    snapshot = as_hub_cache(tmp_path / "hub", model, "owner/name")
    checkpoint = open_checkpoint(snapshot)
    assert checkpoint.tensors.keys() == open_checkpoint(model).tensors.keys()


def test_tensor_missing_from_the_index_is_loaded_as_mlx_lm_does(model: Path) -> None:
    names = open_checkpoint(model).tensors.keys()
    edit_index(model, lambda index: index["weight_map"].popitem())
    assert open_checkpoint(model).tensors.keys() == names


@pytest.mark.parametrize(
    ("tensor", "file"),
    [
        ("language_model.lm_head.weight", "model-00001-of-00003.safetensors"),
        ("ghost", "model-00002-of-00003.safetensors"),
        ("mtp.fc.weight", "mtp.safetensors"),
        ("vision_tower.patch_embed.weight", "optiq/optiq_vision.safetensors"),
        ("model.language_model.layers.0.mlp.gate.weight", "model-00001-of-00011.safetensors"),
    ],
)
def test_stale_index_is_no_error(model: Path, tensor: str, file: str) -> None:
    """mlx-lm does not read it; where a shard seems to be missing, mlx-lm says that none is."""
    names = open_checkpoint(model).tensors.keys()
    edit_index(model, lambda index: index["weight_map"].update({tensor: file}))
    assert open_checkpoint(model).tensors.keys() == names


@pytest.mark.parametrize("hidden_size", [2**40, -1, "wide"])
def test_config_that_no_model_can_have_is_one_clear_error(model: Path, hidden_size: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["hidden_size"] = hidden_size
    (model / "config.json").write_text(json.dumps(config))
    edit_index(model, lambda index: index["weight_map"].update(ghost="ghost.safetensors"))
    with pytest.raises(CheckpointError, match=r"ghost\.safetensors: shard .* hidden_size is"):
        open_checkpoint(model)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "extra/a.jinja"])
def test_a_pipe_in_a_model_is_refused_before_a_loader_waits_for_it(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    (model / name).parent.mkdir(exist_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(CheckpointError, match=rf"{name}: not a regular file"):
        base_model.load(model, lazy=True)


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="no file of the kernel's own here")
def test_what_the_kernel_makes_up_is_no_file(model: Path) -> None:
    (model / "extra.json").symlink_to("/proc/version")
    with pytest.raises(CheckpointError, match=r"extra\.json: not a regular file"):
        base_model.load(model, lazy=True)
    (model / "adapter_config.json").symlink_to("/proc/version")
    with pytest.raises(AdapterError, match=r"adapter_config\.json: not a regular file"):
        lora_modules.read_config(model / "adapter_config.json")


_NO_VOCABULARY = {"version": "1.0", "added_tokens": [], "model": {"type": "Nothing"}}
_BAD_MERGE = {"type": "BPE", "vocab": {"a": 0}, "merges": ["b c"]}


_PANIC = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


@pytest.mark.parametrize("text", [
    "", "[]", "{}", "[" * 100_000, json.dumps(_NO_VOCABULARY),
    json.dumps(_NO_VOCABULARY | {"model": _BAD_MERGE}),
    json.dumps(_NO_VOCABULARY | {"normalizer": _PANIC}),
])  # fmt: skip
def test_a_tokenizer_that_does_not_parse_is_one_clear_error(model: Path, text: str) -> None:
    (model / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="mlx-lm cannot load it"):
        base_model.load(model, lazy=True)


def test_a_token_id_beyond_measure_is_refused_before_tables_are_made(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a: 12345678"] = 4_294_967_295
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: a token has the id 4,294,967,295"):
        base_model.load(model, lazy=True)


def test_numbers_in_names_of_shards_may_be_those_of_another_repository(model: Path) -> None:
    (model / INDEX_NAME).unlink()
    for path in model.glob("model*.safetensors"):
        path.rename(model / path.name.replace("of-00003", "of-00014"))
    assert len(open_checkpoint(model).headers) == 3


BAD_NAMES = [
    "../model-00001-of-00003.safetensors", "/etc/passwd", "sub/../../model.safetensors",
    "sub//model.safetensors", 3000 * "a/" + "model.safetensors", "..\\model.safetensors", "..", ".",
    "", "model\0.safetensors", "model" + 300 * "x" + ".safetensors", "model\n.safetensors",
    7, None, ["model-00001-of-00003.safetensors"],
]  # fmt: skip


def test_index_may_name_nothing_outside_the_directory(model: Path) -> None:
    index = json.loads((model / INDEX_NAME).read_text())
    for file in BAD_NAMES:
        index["weight_map"]["lm.weight"] = file
        (model / INDEX_NAME).write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="in the same directory or below") as caught:
            open_checkpoint(model)
        assert "'lm.weight'" in str(caught.value), file
        assert INDEX_NAME in str(caught.value)


SECOND = "model-00002-of-00003.safetensors"
MISSING = f"{SECOND}: shard is missing"


def without_index(model: Path) -> None:
    (model / INDEX_NAME).unlink()


def damage_missing_shard_no_index(model: Path) -> None:
    (model / SECOND).unlink()
    without_index(model)


def damage_name_outside_glob(model: Path) -> None:
    (model / SECOND).rename(model / "part2.safetensors")
    text = (model / INDEX_NAME).read_text()
    (model / INDEX_NAME).write_text(text.replace("model-00002-of-00003", "part2"))


def damage_index_dangles(model: Path) -> None:
    without_index(model)
    (model / INDEX_NAME).symlink_to(model / "gone")


def damage_only_bin(model: Path) -> None:
    without_index(model)
    for path in model.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))


def damage_no_weights(model: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()


def damage_no_tensors(model: Path) -> None:
    damage_no_weights(model)
    without_index(model)
    (model / "model.safetensors").write_bytes(file_bytes("{}"))


def write(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda model: (model / name).write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing shard": (lambda model: (model / SECOND).unlink(), MISSING),
    "missing shard, no index": (damage_missing_shard_no_index, MISSING),
    "truncated shard": (
        lambda model: os.truncate(model / SECOND, (model / SECOND).stat().st_size - 1),
        f"{SECOND}: no whole safetensors file",
    ),
    "name outside glob": (damage_name_outside_glob, "mlx-lm loads only model*.safetensors"),
    "index is a list": (write(INDEX_NAME, b"[]"), "must be an object, got list"),
    "index without map": (write(INDEX_NAME, b"{}"), "weight_map must map"),
    "index twice": (
        write(INDEX_NAME, b'{"weight_map": {"a": "model.x", "a": "model.y"}}'), "'a' is given twice"
    ),
    "index dangles": (damage_index_dangles, "which is missing"),
    "no config": (lambda model: (model / "config.json").unlink(), "config.json: no such file"),
    "config cut": (write("config.json", b'{"model_type": '), "config.json: not valid"),
    "config binary": (write("config.json", b"\xff\xfe{}"), "config.json: not valid"),
    "config deep": (
        write("config.json", b'{"a":' + b"[" * 200_000), "not valid: JSON is nested too deeply"
    ),
    "config of 200 levels": (
        write("config.json", b'{"a":' + b"[" * 200 + b"]" * 200 + b"}"), "more than 100 levels"
    ),
    "config list": (write("config.json", b"[]"), "must be an object, got list"),
    "only bin": (damage_only_bin, "download the model as safetensors"),
    "no weights": (damage_no_weights, "no model*.safetensors"),
    "no tensors": (damage_no_tensors, "holds no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_model_is_one_clear_error(model: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(model)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    assert message in str(caught.value)
    assert str(model) in str(caught.value)


def test_a_store_says_where_it_is_to_be_given(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a store of stacks.* --store-path"):
        open_checkpoint(make_store(tmp_path / "store").path)


def test_tensor_in_two_files_names_both(model: Path) -> None:
    shutil.copy(model / SECOND, model / "model-old.safetensors")
    with pytest.raises(CheckpointError, match="is in two files") as caught:
        open_checkpoint(model)
    assert SECOND in str(caught.value)
    assert "model-old.safetensors" in str(caught.value)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(tmp_path / "gone")


def test_oversized_json_is_refused_unread(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "MAX_JSON_BYTES", 100)
    with pytest.raises(CheckpointError, match="allowed: 100"):
        open_checkpoint(model)


# --- fingerprint -----------------------------------------------------------------------------


def plain_fingerprints(directory: Path) -> tuple[str, str]:
    """The documented rules, of every byte and of samples, written out again with whole files in
    memory.
    """
    config = json.loads((directory / "config.json").read_text())
    config.pop("_name_or_path", None)
    tensors: dict[str, tuple[dict[str, Any], bytes]] = {}
    for path in directory.glob("model*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, info in json.loads(content[8:start]).items():
            if name != "__metadata__":
                first, last = info["data_offsets"]
                tensors[name] = info, content[start + first : start + last]

    def compact(value: Any) -> bytes:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"

    text, lines = compact(config), b""
    for name in sorted(tensors):
        info, data = tensors[name]
        described = [name, info["dtype"], info["shape"]]
        lines += compact([*described, hashlib.sha256(data).hexdigest()])
        text += compact(described)
        if len(data) <= 65536:
            text += data
        else:
            for i in range(16):
                start = (len(data) - 4096) * i // 15
                text += data[start : start + 4096]
    whole = compact(config) + hashlib.sha256(lines).hexdigest().encode() + b"\n"
    return "full:" + hashlib.sha256(whole).hexdigest(), hashlib.sha256(text).hexdigest()


def big_model(directory: Path) -> Path:
    """One tensor of exactly 64 KiB, one a little larger, one much larger."""
    config = llama_config()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    sizes = {"exact": 65536, "above": 65537, "large": 300_001}
    table, position = {}, 0
    for name, size in sizes.items():
        table[name] = entry("U8", [size], position, position + size)
        position += size
    data = bytes(i * 7919 % 251 for i in range(position))
    (directory / "model.safetensors").write_bytes(file_bytes(table, data))
    return directory


def test_fingerprint_is_the_documented_one(tmp_path: Path, model: Path) -> None:
    for path in (model, big_model(tmp_path / "big")):
        checkpoint = open_checkpoint(path)
        full, sampled = plain_fingerprints(path)
        assert fingerprint(checkpoint) == fingerprint(checkpoint, like=full) == full
        assert fingerprint(checkpoint, like="0" * 64) == sampled


def test_fingerprint_ignores_sharding_and_paths(model: Path) -> None:
    before = fingerprint(open_checkpoint(model))
    for shards in (1, 5):
        reshard(model, shards)
        assert fingerprint(open_checkpoint(model)) == before
    config = json.loads((model / "config.json").read_text())
    config["_name_or_path"] = "/home/somebody/model"
    config["text_config"]["_name_or_path"] = "elsewhere"
    (model / "config.json").write_text(json.dumps(config, indent=3))
    assert fingerprint(open_checkpoint(model)) == before


def test_fingerprint_sees_config_names_and_bytes(tmp_path: Path) -> None:
    model = big_model(tmp_path / "model")
    path = model / "model.safetensors"
    content = path.read_bytes()
    prints = {fingerprint(open_checkpoint(model))}
    # a byte of each tensor, the third between two samples of 4 KiB; a name, a dtype, a shape
    start = 8 + int.from_bytes(content[:8], "little")
    variants = [
        content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        for at in (start, start + 65535, start + 65536, start + 136_000, len(content) - 1)
    ]
    variants += [
        content.replace(b'"large"', b'"largE"'),
        content.replace(b'"dtype": "U8", "shape": [65536]', b'"dtype": "I8", "shape": [65536]'),
        content.replace(b"[65536]", b"[65536,1]").replace(
            b'"shape": [65536,1], ', b'"shape":[65536,1],'
        ),
    ]
    for variant in variants:
        assert len(variant) == len(content)
        path.write_bytes(variant)
        prints.add(fingerprint(open_checkpoint(model)))
    path.write_bytes(content)
    config = json.loads((model / "config.json").read_text())
    config["rope_theta"] = 1.0
    (model / "config.json").write_text(json.dumps(config))
    prints.add(fingerprint(open_checkpoint(model)))
    assert len(prints) == 1 + len(variants) + 1


# --- finding ---------------------------------------------------------------------------------


def as_hub_cache(cache: Path, model: Path, hub_id: str) -> Path:
    """Lay a model out as the hub cache does: blobs, a snapshot of relative links, a ref."""
    folder = cache / f"models--{hub_id.replace('/', '--')}"
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    for number, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, folder / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_hub_id_resolves_from_the_cache_offline(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = as_hub_cache(tmp_path / "hub", model, "owner/name")
    found = resolve_model("owner/name")
    assert found.resolve() == snapshot.resolve()
    assert open_checkpoint(found).tensors


def test_a_pipe_in_the_hub_cache_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    main = as_hub_cache(tmp_path / "hub", model, "owner/name").parents[1] / "refs" / "main"
    main.unlink()
    os.mkfifo(main)
    for look_up in (resolve_model, in_hub_cache, read_config):
        with pytest.raises(CheckpointError, match=r"refs/main: not a regular file"):
            look_up("owner/name")
    assert not in_hub_cache("x" * 300)


def test_unknown_hub_id_offline_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"because HF_HUB_OFFLINE is set\. Give a model"):
        resolve_model("owner/none")


def test_failed_download_gives_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(hub_id: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert "*.py" not in allow_patterns
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"download failed \(Name or service not known\)"):
        resolve_model("owner/none")


def test_sidecars_of_a_cached_model_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm leaves `mtp.safetensors` on the hub; a fuse would lose it without a word."""
    import huggingface_hub
    from huggingface_hub import constants

    asked: list[dict[str, Any]] = []

    def download(hub_id: str, **options: Any) -> str:
        asked.append(options)
        if "revision" in options and unreachable:
            raise ConnectionError
        return str(tmp_path / "a1b2")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for unreachable in (False, True):  # noqa: B007 (download reads it)
        assert resolve_model("owner/name", sidecars=True) == tmp_path / "a1b2"
        assert asked[-1]["revision"] == "a1b2"
        sidecars = ["mtp.safetensors", "optiq/optiq_vision.safetensors"]
        chosen = huggingface_hub.utils.filter_repo_objects(
            [*sidecars, "consolidated.safetensors", "m.py"],
            allow_patterns=asked[-1]["allow_patterns"],
            ignore_patterns=asked[-1]["ignore_patterns"],
        )
        assert list(chosen) == sidecars
    resolve_model("owner/name")
    assert asked[-1] == {"allow_patterns": ALLOW_PATTERNS, "local_files_only": True}


def test_local_paths_never_go_to_the_hub(tmp_path: Path, model: Path) -> None:
    assert resolve_model(model) == model
    assert resolve_model(str(model)) == model
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model(model / "config.json")
    for name in ("./gone", "/gone/away", "a/b/c", "~/gone-away", "owner/..", "bad id", ""):
        with pytest.raises(CheckpointError, match=r"no such directory, and not a hub id"):
            resolve_model(name)
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve_model(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="NUL"):
        resolve_model("a\0b")

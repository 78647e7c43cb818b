"""`push` and `pull` through huggingface_hub, to and from a hub on this machine: only a thing's own
files go, without paths of this machine; nothing that is hostile arrives.

Run: pytest tests/share/test_share.py
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import metadata_load
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, load_file, save

from mlxstacks.errors import InputError
from mlxstacks.files.adapters import read_adapter
from mlxstacks.files.manifest import parse_manifest
from mlxstacks.files.settings import AdapterConvertSettings, StacksVerifySettings
from mlxstacks.files.store_verify import verify_store
from mlxstacks.nano.exports import nano_paths
from mlxstacks.share.pull import pull
from mlxstacks.share.push import push
from mlxstacks.share.settings import PullSettings, PushSettings
from mlxstacks.share.things import without_paths
from mlxstacks.studies.adapter import convert
from mlxstacks.study.document import Table
from mlxstacks.study.result import Result
from mlxstacks.study.write import write_result
from tests.share.local_hub import Hub, serving

REPO = "me/thing"
TOKEN = "hf_" + "secret" * 6
# What lies next to a thing, and is not it.
JUNK = {
    "checkpoint.safetensors", "log.jsonl", "recipe.yaml", "base.json", "training_args.bin",
    "modeling.py", "prompts.json", ".hidden.json", "optimizer.safetensors",
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as hub:
        constants = "huggingface_hub.constants."
        monkeypatch.setattr(f"{constants}HF_HUB_OFFLINE", False)
        monkeypatch.setattr(f"{constants}HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(f"{constants}ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"{constants}HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def adapter(place: Path, model: str = "owner/base") -> Path:
    """nano's, with a base of that name."""
    shutil.copytree(nano_paths(None).adapter_path, place)
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | {"model": model}))
    return place


def peft(place: Path) -> Path:
    source = adapter(place.with_name("mlx-adapter"))
    convert(AdapterConvertSettings(adapter_path=str(source), save_path=str(place), to="peft"))
    return place


def store(place: Path) -> Path:
    return Path(shutil.copytree(nano_paths(None).store_path, place))


def model(place: Path) -> Path:
    return Path(shutil.copytree(nano_paths(3).model_path, place))


def sent(source: Path, **settings: Any) -> Result:
    given = {"target": str(source), "repo_id": REPO, "save_path": str(source.with_name("sent"))}
    return push(PushSettings.model_validate(given | settings))


def head_of(place: Path) -> dict[str, Any]:
    head = metadata_load(place / "sent" / "README.md")
    assert head is not None
    return head


def received(place: Path, **settings: Any) -> Result:
    return pull(PullSettings(repo_id=REPO, save_path=str(place), **settings))


MAKERS: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "adapter": (adapter, {"adapter_config.json", "adapters.safetensors", "README.md"}),
    "peft": (peft, {"adapter_config.json", "adapter_model.safetensors", "README.md"}),
    "model": (
        model,
        {"config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
         "tokenizer_config.json", "README.md"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [*MAKERS, "store"])
def test_what_is_pushed_comes_back_without_what_lay_next_to_it(
    kind: str, tmp_path: Path, hub: Hub
) -> None:
    make, own = MAKERS.get(kind, (store, set()))
    source = make(tmp_path / "source")
    if kind == "store":
        manifest = parse_manifest((source / "manifest.json").read_bytes())
        own = {"manifest.json", "README.md", *(record.file for record in manifest.files())}
    for name in JUNK:
        (source / name).write_bytes(b'{"prompt": "private"}')
    pushed = sent(source)
    uploaded = hub.repositories[REPO]
    assert set(uploaded) == own == set(pushed.data["files"])
    assert pushed.data["commit"] == hub.commit_of(REPO)
    pulled = received(tmp_path / "pulled")
    assert pulled.data["commit"] == pushed.data["commit"]
    came = {
        path.relative_to(tmp_path / "pulled").as_posix(): path.read_bytes()
        for path in (tmp_path / "pulled").rglob("*")
        if path.is_file() and path.name != ".mlxstacks.json"
    }
    # a store keeps its own laws: nothing is in it that no manifest names
    assert came == {n: b for n, b in uploaded.items() if kind != "store" or n != "README.md"}
    weights = {name for name in own if name.endswith(".safetensors")}
    assert weights
    assert all(came[name] == (source / name).read_bytes() for name in weights)
    if kind == "store":
        assert verify_store(StacksVerifySettings(store_path=str(tmp_path / "pulled"))).files == 9
    # the token went to the hub, and nowhere else
    assert f"Bearer {TOKEN}" in hub.tokens
    assert TOKEN not in repr(uploaded) + str(pushed.as_json()) + str(pulled.as_json())


def test_a_dry_run_writes_the_folder_and_asks_nobody(tmp_path: Path, hub: Hub) -> None:
    settings = PushSettings(
        target=str(store(tmp_path / "source")), repo_id=REPO, save_path=str(tmp_path / "sent")
    )
    planned = push(settings, dry_run=True)
    assert (planned.status, hub.asked, hub.repositories) == ("planned", [], {})
    files = planned.table("files")
    assert {tmp_path / "sent" / name for name in files["file"]} == {
        path for path in (tmp_path / "sent").rglob("*")
        if path.is_file() and path.name != ".mlxstacks.json"
    }  # fmt: skip
    assert files["size_bytes"].sum() == sum(planned.data["files"].values())
    # once more: the folder holds only what the dry run wrote there, but is not taken unasked
    with pytest.raises(InputError, match="--force to replace it"):
        push(settings)
    assert push(settings.model_copy(update={"force": True})).status == "done"


def test_a_dry_run_of_pull_lists_what_would_come(tmp_path: Path, hub: Hub) -> None:
    pushed = sent(store(tmp_path / "source"), revision="next")
    hub.asked.clear()
    settings = PullSettings(repo_id=REPO, save_path=str(tmp_path / "pulled"), revision="next")
    planned = pull(settings, dry_run=True)
    assert planned.status == "planned"
    assert {*planned.data["files"]} == {*pushed.data["files"]} - {"README.md"}
    assert hub.asked[0] == f"GET /api/models/{REPO}/revision/next"
    assert {path.rpartition("/")[2] for path in hub.asked[1:]} == {"manifest.json"}
    assert not (tmp_path / "pulled").exists()


def test_no_path_of_this_machine_is_uploaded(tmp_path: Path, hub: Hub) -> None:
    where = adapter(tmp_path / "source", str(tmp_path / "models" / "my-base"))
    result = Result(
        kind="train", title="Training", status="done", verdict=f"Wrote {tmp_path}/x/y, better.",
        settings={"model": f"{tmp_path}/models/my-base", "data": f"{tmp_path}/data"},
        data={"data": {"sources": [{"source": f"{tmp_path}/data/rows.jsonl", "rows_kept": 7}]}},
        blocks=(
            Table.of("validation", f"In {tmp_path}/x", {"of": "text"}, [[f"{tmp_path}/cell"]]),
            Table.of("samples", "Answers", {"prompt": "text"}, [["a private prompt"]]),
        ),
    )  # fmt: skip
    write_result(result, where, where)
    pushed = sent(where)
    assert pushed.data["paths_to_names"] == ["adapter_config.json"]
    card = hub.repositories[REPO]["README.md"].decode()
    assert "Wrote y, better." in card
    assert "| rows.jsonl | 7 |" in card
    assert "private prompt" not in card
    for name, data in hub.repositories[REPO].items():
        assert str(tmp_path).encode() not in data, name
    # in metadata of weights it cannot be taken out
    weights = where / "adapters.safetensors"
    weights.write_bytes(save(load_file(weights), {"base": f"{tmp_path}/models"}))
    with pytest.raises(InputError, match=r"adapters.safetensors: holds a path of this machine"):
        sent(where, force=True)


def test_a_stores_manifest_keeps_its_laws_without_paths(tmp_path: Path, hub: Hub) -> None:
    where = store(tmp_path / "source")
    value = json.loads((where / "manifest.json").read_text())
    del value["checksum"]
    source = value["domains"][0]["data"]["sources"][0]
    path = f"{tmp_path}/data/letters.jsonl"
    source["sha256"] = {path: "0" * 64, f"{tmp_path}/other/letters.jsonl": "1" * 64}
    source["source"] = path
    value["domains"][1]["data"]["settings"]["sources"][0] |= {"dataset": "org/islands"}
    document = type(parse_manifest((where / "manifest.json").read_bytes())).from_json(value)
    (where / "manifest.json").write_text(json.dumps(document.document()))
    sent(where)
    uploaded = hub.repositories[REPO]
    assert str(tmp_path).encode() not in b"".join(uploaded.values())
    assert head_of(tmp_path)["datasets"] == ["org/islands"]
    data: Any = parse_manifest(uploaded["manifest.json"]).domains[0].data
    (public,) = data["sources"]
    assert sorted(public["sha256"]) == ["letters.jsonl", "letters.jsonl (2)"]


def test_domains_of_a_store_are_a_store(tmp_path: Path, hub: Hub) -> None:
    where = store(tmp_path / "source")
    sent(where, domains=("tolu", "letters"))
    received(tmp_path / "pulled")
    verified = verify_store(StacksVerifySettings(store_path=str(tmp_path / "pulled")))
    assert (verified.stacks, verified.problems) == (2, ())
    with pytest.raises(InputError, match=r"no domain 'gone' \(there are: letters, islands"):
        sent(where, domains=("gone",), force=True)
    # the whole store over it, then a part again: what no manifest names goes from the hub
    sent(where, force=True)
    assert len(hub.repositories[REPO]) == 11
    sent(where, domains=("tolu",), force=True)
    assert len(hub.repositories[REPO]) == 4


def test_the_card_says_what_was_measured_while_it_is_of_these_files(
    tmp_path: Path, hub: Hub
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    where = adapter(tmp_path / "source", "owner/base-3bit")
    columns: Any = {"model": "text", "same next token": "share"}
    row: Any = ["this", (0.968, 0.959, 0.977)]
    result = Result(
        kind="fuse", title="Fuse", status="done", verdict="The same in 96.8% (95.9 to 97.7).",
        settings={"model": str(base)}, blocks=(Table.of("behaviour", "Tokens", columns, [row]),),
    )  # fmt: skip
    write_result(result, where, where)
    sent(where, license="mit", revision="next")
    assert hub.branches == {"next"}
    assert head_of(tmp_path) == {
        "base_model": "owner/base-3bit", "library_name": "mlx", "license": "mit",
        "pipeline_tag": "text-generation", "tags": ["mlx", "mlxstacks", "lora"],
    }  # fmt: skip
    card = (tmp_path / "sent" / "README.md").read_text()
    assert "| this | 96.8% (95.9 to 97.7) |" in card
    assert f"mlxstacks pull {REPO} --save-path thing --revision next\n" in card
    config = json.loads((where / "adapter_config.json").read_text()) | {"model": str(base)}
    (where / "adapter_config.json").write_text(json.dumps(config))
    sent(where, force=True)
    assert head_of(tmp_path)["license"] == "apache-2.0"
    card = (tmp_path / "sent" / "README.md").read_text()
    assert "Not shown: the files are not those that were measured." in card
    assert "96.8" not in card
    (where / "result.json").unlink()
    del config["model"]
    (where / "adapter_config.json").write_text(json.dumps(config))
    sent(where, force=True)
    assert "base_model" not in head_of(tmp_path)
    card = (tmp_path / "sent" / "README.md").read_text()
    assert "| base | not named |" in card
    assert "mlxstacks chat --model BASE --adapter-path thing" in card
    assert "Not measured: no result lies next to its files." in card
    sent(where, force=True, base_model="owner/other", card=False)
    assert not (tmp_path / "sent" / "README.md").exists()


def test_what_should_be_private_is_not_put_where_all_can_see_it(tmp_path: Path, hub: Hub) -> None:
    where = adapter(tmp_path / "source")
    sent(where, private=True)
    assert hub.private == {REPO}
    hub.private.clear()
    hub.repositories[REPO].clear()
    with pytest.raises(InputError, match="is public, and --private was asked for"):
        sent(where, private=True, force=True)
    assert hub.repositories[REPO] == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "adapters.safetensors").unlink(), "neither an adapter, a store nor a mod"),
        (lambda d: (d / "adapters.safetensors").write_bytes(b"\x80\x04pickle"), "header length"),
        (
            lambda d: [(d / "adapters.safetensors").rename(d / "x"),
                       (d / "adapters.safetensors").symlink_to("x")],
            "is a link",
        ),
    ],
)  # fmt: skip
def test_what_is_no_whole_thing_is_not_uploaded(
    change: Callable[[Path], Any], message: str, tmp_path: Path, hub: Hub
) -> None:
    change(adapter(tmp_path / "source"))
    with pytest.raises(InputError, match=message):
        sent(tmp_path / "source")
    assert not hub.asked
    assert not (tmp_path / "sent").exists()


# --- hostile repositories -------------------------------------------------------------------------


def header(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def _put(name: str, data: bytes = b"{}") -> Callable[[Hub], None]:
    return lambda hub: hub.repositories[REPO].update({name: data})


def _weights(data: bytes) -> Callable[[Hub], None]:
    return _put("adapters.safetensors", data)


def _gap() -> bytes:
    """A tensor that begins behind the end of the file."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [1 << 40, (1 << 40) + 8]}
    return header(json.dumps({"a": entry}).encode()) + bytes(8)


HOSTILE: dict[str, tuple[Callable[[Hub], None], str]] = {
    "above": (_put("../evil.json"), "names a file '../evil.json'; nothing was downloaded"),
    "below and above": (_put("a/../../evil.json"), "nothing was downloaded"),
    "root": (_put("/etc/evil.json"), "nothing was downloaded"),
    "backslash": (_put("..\\evil.json"), "nothing was downloaded"),
    "control": (_put("a\nb.json"), "nothing was downloaded"),
    "case": (_put("Adapter_config.json"), "where case does not count"),
    "many": (
        lambda hub: hub.repositories[REPO].update({f"{i}.md": b"" for i in range(10_001)}),
        "files, allowed: 10,000",
    ),
    "pickle": (
        lambda hub: hub.repositories[REPO].update(
            {"adapter_model.bin": hub.repositories[REPO].pop("adapters.safetensors")}
        ),
        "pickles and code are not shared",
    ),
    "a pickle by another name": (_weights(b"\x80\x04" + bytes(40)), "header length"),
    "huge header": (_weights(header(b"{}", 1 << 62)), "header length 4611686018427387904"),
    "header beyond its file": (_weights(header(b"{}", 90_000_000)), "header length 90000000"),
    "many parts": (_weights(header(b'{"a":' + b"[" * 2_000_001)), "JSON parts"),
    "gap": (_weights(_gap()), "no whole safetensors file"),
    "no tensors": (_weights(header(b"{}")), "holds no tensors"),
    "config": (_put("adapter_config.json", b"[" * 100_000), "not valid"),
    "size": (
        lambda hub: hub.sizes.update({(REPO, "adapters.safetensors"): 12}),
        "is not what the hub lists",
    ),
    "enormous": (
        lambda hub: hub.sizes.update({(REPO, "adapters.safetensors"): 1 << 60}),
        "1152921504606846976 bytes by the hub",
    ),
    "hash": (
        lambda hub: hub.lfs.update({(REPO, "adapters.safetensors"): "0" * 64}),
        "is not what the hub lists",
    ),
}


def refuses(place: Path, message: str, **settings: Any) -> None:
    """And leaves nothing, neither the target nor what it would have become."""
    with pytest.raises(InputError, match=message):
        received(place / "pulled", **settings)
    assert [path.name for path in place.iterdir() if "pulled" in path.name] == []


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_adapter_does_not_appear(case: str, tmp_path: Path, hub: Hub) -> None:
    sent(adapter(tmp_path / "source"))
    change, message = HOSTILE[case]
    change(hub)
    hub.asked.clear()
    refuses(tmp_path, message)
    if "nothing was downloaded" in message:
        assert not any("/resolve/" in path for path in hub.asked)


def _manifest(change: Callable[[dict[str, Any]], Any], signed: bool = True) -> Any:
    from mlxstacks.files.strict_json import json_sha256

    def changed(files: dict[str, bytes]) -> None:
        value = json.loads(files["manifest.json"])
        checksum = value.pop("checksum")
        change(value)
        files["manifest.json"] = json.dumps(
            {**value, "checksum": json_sha256(value) if signed else checksum}
        ).encode()

    return changed


def _flipped(files: dict[str, bytes]) -> None:
    name = next(name for name in files if name.startswith("stacks/"))
    files[name] = files[name][:-1] + bytes([files[name][-1] ^ 1])


def _file(path: str) -> Any:
    """Another path for the first stack; HASH in it is the beginning of its hash."""

    def change(manifest: Any) -> None:
        record = manifest["domains"][0]["stacks"][0]["file"]
        record["file"] = path.replace("HASH", record["sha256"][:12])

    return _manifest(change)


BAD_STORES: dict[str, tuple[Callable[[dict[str, bytes]], Any], str]] = {
    "flipped bit": (_flipped, r"the store is damaged: 1 problems\n.*bytes changed"),
    "grown": (
        lambda files: files.update({next(n for n in files if "splits/" in n): b'{"train": [1]}'}),
        "truncated: 14 bytes",
    ),
    "missing": (lambda files: files.pop(next(n for n in files if "stacks/" in n)), "not there"),
    "unsigned": (_manifest(lambda v: v.update(base_model="x"), signed=False), "checksum is"),
    "above": (_file("stacks/../../../evil-HASH.safetensors"), "should match pattern"),
    "root": (_file("/etc/evil-HASH.safetensors"), "should match pattern"),
    "nested": (_file("stacks/store/evil-HASH.safetensors"), "should match pattern"),
    "no safetensors": (_file("stacks/evil-HASH.py"), "which is not there"),
    "deep": (lambda f: f.update({"manifest.json": b'{"a":' * 100_000}), "damaged"),
}


@pytest.mark.parametrize("case", BAD_STORES)
def test_a_damaged_store_does_not_appear(case: str, tmp_path: Path, hub: Hub) -> None:
    sent(store(tmp_path / "source"))
    change, message = BAD_STORES[case]
    change(hub.repositories[REPO])
    refuses(tmp_path, message)


def test_a_model_that_names_code_or_has_another_in_it(tmp_path: Path, hub: Hub) -> None:
    sent(model(tmp_path / "source"))
    files = hub.repositories[REPO]
    others = {"store/manifest.json", "adapters.safetensors", "x.py", "pytorch_model.bin", "a.npz"}
    files |= dict.fromkeys(others, b"{}")
    pulled = received(tmp_path / "good")
    assert not {path.name for path in (tmp_path / "good").rglob("*")} & {*others, "store"}
    assert all(name in pulled.notes[0] for name in others)
    assert not any(name in path for name in others for path in hub.asked)
    most = sum(pulled.data["files"].values()) - 1
    refuses(tmp_path, f"allowed: {most:,} bytes; raise --max-bytes", max_bytes=most)
    config = json.loads(files["config.json"])
    files["config.json"] = json.dumps(config | {"model_file": "x.py"}).encode()
    refuses(tmp_path, "names code to run")


def test_a_link_in_the_cache_leads_nowhere(tmp_path: Path, hub: Hub) -> None:
    sent(adapter(tmp_path / "source"))
    received(tmp_path / "first")
    (cached,) = (tmp_path / "hub-cache").rglob("snapshots/*/adapter_config.json")
    cached.unlink()
    (tmp_path / "secret.json").write_text("{}")
    cached.symlink_to(tmp_path / "secret.json")
    refuses(tmp_path, "leads out of the hub's cache")


def test_what_is_no_repository_and_what_is_not_there(tmp_path: Path, hub: Hub) -> None:
    for name in ("thing", "../thing", "a/b/c", "a/..", "a b/c", "", "a/b\n"):
        with pytest.raises(InputError, match="give one as in name/my-adapter"):
            pull(PullSettings(repo_id=name, save_path=str(tmp_path / "pulled")))
    refuses(tmp_path, "there is no such repository for this user; to log in: `hf auth login`")
    hub.repositories[REPO] = {}
    refuses(tmp_path, "it holds nothing")


# --- paths ----------------------------------------------------------------------------------------

PATHS = st.one_of(
    st.text(),
    st.from_regex(r"(/|~/|C:\\|file:///)[a-z /.\\]{0,20}", fullmatch=True),
)
VALUES = st.recursive(
    st.none() | st.integers() | PATHS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PATHS, inner, max_size=4),
)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts([*value, *value.values()])
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)


@given(VALUES)
def test_json_without_paths(value: Any) -> None:
    public = without_paths(value)
    assert without_paths(public) == public
    assert len([*texts(public)]) == len([*texts(value)])
    for text in texts(public):
        assert not text.startswith(("~/", "file:/", "/home/"))


def test_a_text_keeps_what_is_no_path() -> None:
    kept = "and/or https://huggingface.co/a/b </think> 3/4 ../models/x a:/b"
    assert without_paths(kept, within=True) == kept
    text = "in '/Users/me_too/base' and ~/data/x.jsonl"
    assert without_paths(text, within=True) == "in 'base' and x.jsonl"


def test_a_result_that_was_pulled_is_that_adapter(tmp_path: Path, hub: Hub) -> None:
    """By what is computed with: the modules of both are the same."""
    sent(adapter(tmp_path / "source"))
    received(tmp_path / "pulled")
    ours, theirs = (read_adapter(tmp_path / name).modules for name in ("source", "pulled"))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[n].lora_a, theirs[n].lora_a) for n in ours)
    data = hub.repositories[REPO]["adapters.safetensors"]
    assert load(data).keys() == load_file(tmp_path / "source" / "adapters.safetensors").keys()

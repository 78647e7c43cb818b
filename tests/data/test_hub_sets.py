"""Data sets of the hub: files by configuration and split, under a cap no more than it needs; rows
by the card; named mixes. No network: snapshots in a hub cache, and a hub on this machine.

Run: pytest tests/data/test_hub_sets.py
"""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlxstacks.data.hub_sets import NotReachedError, card_of, rows_by_card
from mlxstacks.data.settings import DomainDataSettings, SourceSettings, mix
from mlxstacks.data.sources import open_source, read_source
from mlxstacks.errors import InputError
from mlxstacks.recipe.config_plan import inputs_of
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import resolve
from mlxstacks.study.items import read_items
from mlxstacks.training.settings import StackRunSettings

CARD = {
    "configs": [
        {
            "config_name": "default",
            "data_files": [
                {"split": "train_sft", "path": "data/train_sft-*"},
                {"split": "test", "path": "data/test-*"},
            ],
        },
        {"config_name": "en_mix", "data_files": "mix.json"},
    ],
    "dataset_info": [
        {"config_name": "default", "splits": [{"name": "train_sft", "num_examples": 61135}]},
        {"config_name": "other", "splits": [{"name": "train_sft", "num_examples": 7}]},
    ],
}


def write_set(
    directory: Path, card: dict[str, Any], files: dict[str, list[dict[str, Any]]]
) -> None:
    """A data set as the hub has it: a card with metadata, and files of rows."""
    for name, rows in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")


@pytest.fixture
def offline_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no hub to ask."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    return tmp_path / "hub"


def snapshot(cache: Path, dataset: str) -> Path:
    repository = cache / f"datasets--{dataset.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return repository / "snapshots" / ("0" * 40)


def pairs(start: int, count: int) -> list[dict[str, Any]]:
    return [
        {"instruction": f"what is number {i}?", "output": f"it is number {i}"}
        for i in range(start, start + count)
    ]


@pytest.fixture
def published(offline_cache: Path) -> Path:
    directory = snapshot(offline_cache, "org/set")
    write_set(
        directory,
        CARD,
        {
            "data/train_sft-00000-of-00002.jsonl": pairs(0, 6),
            "data/train_sft-00001-of-00002.jsonl": pairs(6, 6),
            "data/test-00000-of-00001.jsonl": pairs(50, 3),
            "mix.json": [],
            "more/task7_x.jsonl": [{"definition": "do it", "targets": "done", "id": 1}],
        },
    )
    (directory / "mix.json").write_text(json.dumps(pairs(90, 2)))
    return directory


@pytest.mark.usefixtures("published")
def test_configuration_and_split_are_those_of_the_card() -> None:
    def rows(**about: Any) -> list[dict[str, Any]]:
        source = SourceSettings(dataset="org/set", download=True, **about)
        return [row for _, row in open_source(source, Path()).rows]

    assert rows(split="train_sft") == pairs(0, 12)
    assert rows(name="en_mix") == pairs(90, 2)
    renamed = {"instruction": "definition", "output": ["targets", "id"]}
    assert rows(files="**/task7_*", fields=renamed) == [
        {"instruction": "do it", "output": ["done", 1]}
    ]
    with pytest.raises(InputError, match="no split 'train'; it has train_sft, test"):
        rows()
    with pytest.raises(InputError, match="cannot be downloaded: BuilderConfig 'gone' not found"):
        rows(name="gone")
    with pytest.raises(InputError, match=r"task7_x.jsonl, line 1: fields names q, the row has"):
        rows(files="**/task7_*", fields={"question": "q"})


@pytest.mark.usefixtures("published")
def test_under_a_cap_no_file_is_fetched_that_it_does_not_need() -> None:
    """2 x 3 rows are the first file's; with one row more the second is needed too."""
    for cap, files in ((3, 1), (4, 2)):
        source = SourceSettings(dataset="org/set", split="train_sft", download=True, cap=cap)
        about = DomainDataSettings(sources=(source,))
        examples, report = read_source(source, about, Path())
        assert len(examples) == cap
        assert len(report["sha256"]) == files


@pytest.mark.usefixtures("offline_cache")
def test_what_is_not_in_the_cache_is_not_tried_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SourceSettings(dataset="org/gone", download=True)
    with pytest.raises(NotReachedError, match="HF_HUB_OFFLINE is set"):
        open_source(source, Path())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(NotReachedError, match="org/gone: the hub is not reachable: "):
        open_source(source, Path())
    assert time.monotonic() - began < 5


class Hub(HTTPServer):
    """What the hub says of org/set, and that it has no other; the paths that were asked for."""

    asked: list[str]


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        known = self.path == "/api/datasets/org/set"
        body = json.dumps({"id": "org/set", "cardData": CARD} if known else {}).encode()
        self.send_response(200 if known else 404)
        if not known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@pytest.fixture
def hub(offline_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub(("127.0.0.1", 0), _Answers)
    server.asked = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def stack_inputs(*sources: dict[str, Any]) -> list[tuple[str, int | None, str]]:
    domain = {"name": "chat", "data": {"sources": sources}}
    settings = StackRunSettings.model_validate({"model": "m", "domains": [domain]})
    inputs = [i for i in inputs_of("stack", settings) if i.key == "data"]
    assert not any(i.here for i in inputs)
    return [(i.path, i.rows, i.download) for i in inputs]


def test_a_plan_counts_rows_by_the_card_and_fetches_none(hub: Hub) -> None:
    sft = {"dataset": "org/set", "download": True, "split": "train_sft"}
    gone = {"dataset": "org/gone", "download": True}
    first, second, third, fourth = stack_inputs(
        sft | {"cap": 15000}, sft | {"name": "en_mix"}, gone, {"dataset": "org/set"}
    )
    assert first == (
        "org/set (train_sft)", 61135,
        "downloaded by the run, as far as its first 30,000, of which 15,000 are drawn",
    )  # fmt: skip
    assert second == ("org/set/en_mix (train_sft)", None, "downloaded by the run")
    assert third[:2] == ("org/gone (train)", None)
    assert third[2].startswith("the hub has no such data set")
    assert fourth == ("org/set", None, "")
    assert hub.asked == ["/api/datasets/org/set", "/api/datasets/org/gone"]


@pytest.mark.usefixtures("offline_cache")
def test_a_hub_that_is_not_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(dataset: str) -> dict[str, Any]:
        asked.append(dataset)
        return card_of(dataset)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("mlxstacks.data.hub_sets.card_of", counted)
    first, second = stack_inputs(
        {"dataset": "org/a", "download": True}, {"dataset": "org/b", "download": True}
    )
    assert first[2].startswith("the hub is not reachable: ")
    assert second == ("org/b (train)", None, "the hub is not reachable")
    assert asked == ["org/a"]


@pytest.mark.parametrize(
    "info",
    [None, [], {"splits": None}, [1], {"splits": [{"name": "train"}]}, "x", [{"config_name": []}]],
)
def test_a_card_may_hold_anything(info: Any) -> None:
    assert rows_by_card({"dataset_info": info}, None, "train") is None


def test_the_only_configuration_needs_no_name() -> None:
    splits = [{"name": "train", "num_examples": 7473}]
    card = {"dataset_info": {"config_name": "main", "splits": splits}}
    assert [rows_by_card(card, name, "train") for name in (None, "main", "socratic")] == [
        7473, 7473, None
    ]  # fmt: skip


# --- named mixes ----------------------------------------------------------------------------------


def test_the_mixes_of_gemma_have_the_published_caps() -> None:
    settings = resolve("stack", {}, load_recipe("stack-gemma-3-12b")).settings
    assert isinstance(settings, StackRunSettings)
    caps = {d.name: [s.cap for s in d.data.sources] for d in settings.domains if d.data}
    assert caps == {
        "chat": [15000, 15000, 10000],
        "code": [None, 15000, 10000, 5000],
        "math": [None, 20000, 15000, 10000],
        "medical": [10000, 10000, None],
        "reasoning": [20000, 10000, 15000, 5000],
    }
    assert all(s.download and s.dataset for d in settings.domains if d.data for s in d.data.sources)


def test_a_mix_stands_beside_other_sources() -> None:
    about = DomainDataSettings.model_validate({"sources": ["mix:tinyllama-math", "own.jsonl"]})
    assert about.sources == (*mix("tinyllama-math"), SourceSettings(path="own.jsonl"))
    with pytest.raises(ValueError, match="no mix 'gone'; there are gemma-chat, "):
        DomainDataSettings.model_validate({"sources": "mix:gone"})
    with pytest.raises(InputError, match="no mix 'gone'"):
        read_items("mix:gone")


def test_items_of_mmlu_pro_medmcqa_and_arc(offline_cache: Path) -> None:
    pro = {"question_id": 70, "question": "Q?", "options": ["a", "b"], "answer": "B",
           "answer_index": 1, "category": "law"}  # fmt: skip
    medical = {"id": "m-1", "question": "Which?", "opa": "w", "opb": "x", "opc": "y", "opd": "z",
               "cop": 2, "subject_name": "Anatomy", "exp": None}  # fmt: skip
    arc = {"id": "Mercury_1", "question": "Why?", "answerKey": "3",
           "choices": {"text": ["r", "s", "t"], "label": ["1", "2", "3"]}}  # fmt: skip
    for dataset, configs, row in (
        ("TIGER-Lab/MMLU-Pro", {"default": "test"}, pro),
        ("openlifescienceai/medmcqa", {"default": "validation"}, medical),
        ("allenai/ai2_arc", {"ARC-Easy": "test", "ARC-Challenge": "test"}, arc),
    ):
        card = {
            "configs": [
                {"config_name": name, "data_files": [{"split": split, "path": f"{name}/*"}]}
                for name, split in configs.items()
            ]
        }
        files = {
            f"{name}/0.jsonl": [row | {"id": f"{row.get('id')}{name[4:5]}"}] for name in configs
        }
        write_set(snapshot(offline_cache, dataset), card, files)
    items = read_items("mix:mmlu-pro-medmcqa-arc")
    assert [(i.item_id, i.subject, i.options, i.answer_index) for i in items] == [
        ("70", "law", ("a", "b"), 1),
        ("m-1u", "Anatomy", ("w", "x", "y", "z"), 2),
        ("Mercury_1E", "allenai/ai2_arc/ARC-Easy", ("r", "s", "t"), 2),
        ("Mercury_1C", "allenai/ai2_arc/ARC-Challenge", ("r", "s", "t"), 2),
    ]

"""Items from files, directories and the hub's cache: ids, repeats, notes, domains, errors.

Run: pytest tests/studies/benchmarks/test_tasks_data.py
"""

from pathlib import Path
from typing import Any

import pytest

from mlxstacks.data import arrow_sets
from mlxstacks.errors import InputError
from mlxstacks.studies.benchmarks.items import ask, data_of, open_task
from mlxstacks.studies.benchmarks.settings import EvalSettings
from mlxstacks.studies.benchmarks.tasks import READERS, TASKS, task_named
from tests.studies.benchmarks.task_cases import ROWS
from tests.studies.confound_cases import item_row
from tests.studies.train_cases import write_rows

MMLU = ROWS["mmlu"]["hub"]


def arc_rows(count: int) -> list[dict[str, Any]]:
    return [{**ROWS["arc_easy"]["local"], "query": f"Question: {i}?"} for i in range(count)]


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_file_and_a_directory_give_the_same_items(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    rows = [next(iter(ROWS[name].values()))]
    for place, file in enumerate(task.files):
        directory = tmp_path / str(place)
        directory.mkdir()
        path = write_rows(directory / file, rows)
        items = open_task(task, str(path)).items
        assert items == open_task(task, str(directory)).items
        assert [item.item_id for item in items] == [items[0].item_id]
        if task.kind == "likelihood":
            assert (items[0].gold, items[0].candidates) != (0, ())


def test_the_first_of_a_tasks_files_is_read(tmp_path: Path) -> None:
    task = task_named("arc_easy")
    write_rows(tmp_path / "arc_easy.jsonl", arc_rows(2))
    write_rows(tmp_path / "bench_arc_easy.jsonl", arc_rows(3))
    data = open_task(task, str(tmp_path))
    assert len(data.items) == 3
    assert data.source.endswith("bench_arc_easy.jsonl")
    with pytest.raises(InputError, match=r"no file of MMLU; put bench_mmlu.jsonl or mmlu.jsonl"):
        open_task(task_named("mmlu"), str(tmp_path))
    with pytest.raises(InputError, match="no such file"):
        open_task(task, str(tmp_path / "none.jsonl"))


def test_ids_are_the_rows_own_or_the_hash_of_what_they_hold(tmp_path: Path) -> None:
    task = task_named("arc_easy")
    path = write_rows(tmp_path / "a.jsonl", arc_rows(20))
    moved = write_rows(tmp_path / "b.jsonl", list(reversed(arc_rows(20))))
    one, two = open_task(task, str(path)).items, open_task(task, str(moved)).items
    assert [item.item_id for item in one] == [item.item_id for item in reversed(two)]
    assert len({item.item_id for item in one}) == 20
    other = write_rows(tmp_path / "c.jsonl", [{**arc_rows(1)[0], "gold": 2}])
    assert open_task(task, str(other)).items[0].item_id != one[0].item_id
    hub = write_rows(tmp_path / "d.jsonl", [ROWS["arc_easy"]["hub"]])
    assert open_task(task, str(hub)).items[0].item_id == "Mercury_1"


def test_every_row_that_is_no_item_is_told_with_its_line(tmp_path: Path) -> None:
    rows = [{**row, "gold": 7 if place % 2 else 1} for place, row in enumerate(arc_rows(40))]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError) as caught:
        open_task(task_named("arc_easy"), str(path))
    text = str(caught.value)
    assert "not usable as ARC-Easy" in text
    assert "line 2: gold is 7, need one of its 3 options" in text
    assert "and 12 more" in text
    assert "line 1:" not in text


def test_a_file_of_another_benchmark_is_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", arc_rows(2))
    with pytest.raises(InputError, match=r"none of its 2 rows(?s:.*)line 1: endings is None"):
        open_task(task_named("hellaswag"), str(path))
    # As with a bare `mlxstacks eval --tasks arc_easy`: nano's items, of another task.
    items = write_rows(tmp_path / "items.jsonl", [{"question": "?", "options": ["a", "b"]}] * 3)
    with pytest.raises(InputError, match=r"3 rows(?s:.*)for --tasks=items: give --data DIR with b"):
        open_task(task_named("arc_easy"), str(items))


def test_ids_that_occur_twice(tmp_path: Path) -> None:
    row = ROWS["arc_easy"]["hub"]
    path = write_rows(tmp_path / "rows.jsonl", [row, {**row, "question": "Other?"}])
    with pytest.raises(InputError, match=r"line 2: id Mercury_1 was there already: .*line 1"):
        open_task(task_named("arc_easy"), str(path))


def test_repeats(tmp_path: Path) -> None:
    """Without ids of their own they are an error; with them, and in MMLU as published, a note."""
    path = write_rows(tmp_path / "rows.jsonl", [*arc_rows(2), arc_rows(2)[1]])
    with pytest.raises(InputError, match=r"line 3: the same row as .*line 2"):
        open_task(task_named("arc_easy"), str(path))
    named = [{**ROWS["arc_easy"]["hub"], "id": str(place)} for place in range(3)]
    data = open_task(task_named("arc_easy"), str(write_rows(tmp_path / "named.jsonl", named)))
    assert len(data.items) == 3
    assert "2 items the same as an earlier one, word for word" in data.notes
    mmlu = write_rows(tmp_path / "mmlu.jsonl", [MMLU, {**MMLU, "answer": 0}, MMLU, MMLU])
    data = open_task(task_named("mmlu"), str(mmlu))
    ids = [item.item_id for item in data.items]
    assert len({*ids}) == 4
    assert ids[2:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert "2 items the same as an earlier one, word for word" in data.notes


def test_notes_say_what_the_score_hangs_on(tmp_path: Path) -> None:
    twice = {**MMLU, "choices": ["Heart", "Liver", "Liver", "Skin"]}
    wrong_twice = {**MMLU, "choices": ["Heart", "Heart", "Liver", "Skin"]}
    path = write_rows(tmp_path / "mmlu.jsonl", [MMLU, twice, wrong_twice])
    data = open_task(task_named("mmlu"), str(path))
    assert data.notes[0] == (
        "3 items of the published 14,042: scores are not comparable with published ones"
    )
    assert data.notes[1].startswith("1 item with the right answer twice: always a tie")
    assert data.notes[1].endswith(data.items[1].item_id)
    whole = [{**ROWS["aime2024"]["local"], "id": place} for place in range(30)]
    data = open_task(task_named("aime2024"), str(write_rows(tmp_path / "aime.jsonl", whole)))
    assert data.notes == ("29 items the same as an earlier one, word for word",)
    inside = {"question": "No options", "answer": "A"}
    gpqa = write_rows(tmp_path / "gpqa.jsonl", [inside])
    notes = open_task(task_named("gpqa_diamond"), str(gpqa)).notes
    assert "1 item: options could not be separated, so they keep the published order" in notes
    assert "options are shuffled by item id" in notes


def test_items_and_their_domains(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "items.jsonl", [item_row(place) for place in range(4)])
    data = open_task(task_named("items"), str(path))
    first = data.items[0]
    row = item_row(0)
    assert first.prompt == row["question"]
    assert first.candidates == tuple(f" {option}" for option in row["options"])
    assert (first.gold, first.letters) == (0, ())
    assert [item.domain for item in data.items] == ["alpha", "beta", "gamma", "alpha"]
    assert data.notes == ()
    assert open_task(task_named("items"), str(tmp_path)).items == data.items
    pro = open_task(task_named("mmlu_pro"), str(path)).items[0]
    listed = "\n".join(
        f"{letter}. {text}" for letter, text in zip("ABC", row["options"], strict=True)
    )
    assert pro.prompt == f"Question: {row['question']}\n{listed}\nAnswer:"
    assert (pro.letters, pro.domain, pro.stratum) == ((" A", " B", " C"), None, "alpha")
    with pytest.raises(InputError, match="give a file in MMLU-Pro's form"):
        open_task(task_named("items"), None)
    bad = write_rows(tmp_path / "bad.jsonl", [item_row(0, options=["a", " ", "c"])])
    with pytest.raises(InputError, match=r"options is .*, need 2 to 26 texts"):
        open_task(task_named("mmlu_pro"), str(bad))
    with pytest.raises(InputError, match="answer is 'Z'"):
        open_task(task_named("items"), str(write_rows(bad, [item_row(0, answer="Z")])))


def test_a_domain_of_a_task_or_of_strata(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "items.jsonl", [item_row(place) for place in range(3)])
    hashes = set()
    for domains, expected in (
        ((), [None] * 3),
        (("mmlu_pro=medical",), ["medical"] * 3),
        (("mmlu_pro=math", "alpha=code"), ["code", "math", "math"]),
    ):
        asked = ask(EvalSettings(data=str(path), domains=domains), task_named("mmlu_pro"))
        assert [item.domain for item in asked.items] == expected
        hashes.add(data_of(asked, {})["items"])
    assert len(hashes) == 3


def test_the_cache_is_read_and_nothing_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot(dataset: str) -> Path | None:
        asked.append(dataset)
        return tmp_path if dataset in ("allenai/ai2_arc", "Idavidrein/gpqa") else None

    monkeypatch.setattr(arrow_sets, "hub_snapshot", snapshot)
    monkeypatch.setattr(arrow_sets, "cached_set", lambda *_: None)
    hub = ROWS["arc_easy"]["hub"]
    for name in ("ARC-Easy/test", "ARC-Easy/train", "ARC-Challenge/test", "gpqa_diamond/train"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        row = ROWS["gpqa_diamond"]["original"] if "gpqa" in name else {**hub, "id": name}
        write_rows(tmp_path / f"{name}.jsonl", [row])
    data = open_task(task_named("arc_easy"), None)
    assert [item.item_id for item in data.items] == ["ARC-Easy/test"]
    assert data.source == "allenai/ai2_arc/ARC-Easy/test"
    with pytest.raises(InputError, match="hf download --repo-type dataset Rowan/hellaswag"):
        open_task(task_named("hellaswag"), None)
    asked.clear()
    gpqa = open_task(task_named("gpqa_diamond"), None)
    assert asked == ["fingertap/GPQA-Diamond", "Idavidrein/gpqa"]
    assert (gpqa.source, len(gpqa.items)) == ("Idavidrein/gpqa/gpqa_diamond/train", 1)
    # A published set without ids is what it is.
    write_rows(tmp_path / "ARC-Easy/test.jsonl", [arc_rows(1)[0]] * 2)
    data = open_task(task_named("arc_easy"), None)
    assert "1 item the same as an earlier one, word for word" in data.notes

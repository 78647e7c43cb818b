"""`route discover` on a tiny store: examples, conflicts, resume, a domain more, what is written.

Run: pytest tests/studies/route/test_discover.py
"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mlxstacks.errors import InputError
from mlxstacks.files.store import Store, remember_places
from mlxstacks.routing import candidate_losses
from mlxstacks.routing.outcomes import (
    config_text,
    read_discovered_examples,
    read_discovered_outcomes,
    read_discovery,
    read_outcomes,
    targets_or_label,
)
from mlxstacks.routing.settings import OutcomeSettings
from mlxstacks.studies.route.data import read_examples, template_of, trained_rows
from mlxstacks.studies.route.discover import FLOOR, WITH_BEST, run
from mlxstacks.study.document import Plot, Table
from mlxstacks.study.result import Result
from tests.studies.stack_analysis_cases import write_store
from tests.studies.train_cases import WORDS, write_rows, write_tiny_model

DOMAINS = ("alpha", "beta", "chat")


def pairs(name: str, count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{name} {i}: {WORDS[i % 8]}", "completion": f"{WORDS[i % 5]} {name[:2]}"}
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Model, store, data."""
    root = tmp_path_factory.mktemp("discover")
    model = write_tiny_model(root / "model")
    write_store(root / "store", model, root / "trained", dict.fromkeys(DOMAINS, 1))
    data = root / "data"
    for name in DOMAINS:
        write_rows(data / f"{name}.jsonl", pairs(name, 6))
    write_rows(data / "beta+alpha.jsonl", pairs("both", 4))
    write_rows(data / "others.jsonl", pairs("none", 3))
    return model, root / "store", data


def settings_for(places: tuple[Path, Path, Path], target: Path, **changes: Any) -> OutcomeSettings:
    model, store, data = places
    values = {
        "model": str(model), "store_path": str(store), "data": str(data),
        "save_path": str(target), "samples_per_domain": 3, "batch_tokens": 300,
    }  # fmt: skip
    return OutcomeSettings.model_validate(values | changes)


def contents(directory: Path) -> dict[str, str]:
    names = ("examples.jsonl", "outcomes.jsonl", "losses.jsonl")
    return {n: hashlib.sha256((directory / n).read_bytes()).hexdigest() for n in names}


class Discovery(NamedTuple):
    """One run, which the tests below look at. calls: of its progress."""

    result: Result
    target: Path
    calls: list[tuple[float, float, str]]


@pytest.fixture(scope="module")
def discovery(
    places: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Discovery:
    target, calls = tmp_path_factory.mktemp("discovery") / "out", list[tuple[float, float, str]]()
    settings = settings_for(places, target, random_control=True, mixed_samples=2, other_samples=1)
    result = run(settings, progress=lambda *args: calls.append(args))
    return Discovery(result, target, calls)


# --- examples -------------------------------------------------------------------------------------


def test_file_names_are_labels(places: tuple[Path, Path, Path], tmp_path: Path) -> None:
    store = Store.open(places[1])
    examples = read_examples(settings_for(places, tmp_path), store)
    labels = [(one.label, one.kind) for one in examples]
    assert list(dict.fromkeys(labels)) == [
        *(((name,), "single") for name in DOMAINS), (("alpha", "beta"), "mixed"), ((), "other")
    ]  # fmt: skip
    assert len(examples) == 3 * 6 + 4 + 3
    assert not any(one.trained_on for one in examples)
    again = read_examples(settings_for(places, tmp_path), store)
    assert again == examples


@pytest.mark.parametrize("way", ["current directory", "remembered", "data"])
def test_rows_of_the_store_stand_in_and_held_out_ones_come_first(
    places: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    trained_with = tmp_path / "data"
    trained_with.mkdir()
    # a file that is not called as its domain is, and of one domain only: rows share prompts
    shutil.copyfile(places[1].parent / "trained/alpha.jsonl", trained_with / "rows.jsonl")
    store = Store.open(shutil.copytree(places[1], tmp_path / "store"))
    alpha = store.manifest.domains[0]
    alpha = replace(alpha, data=json.loads(json.dumps(alpha.data).replace("alpha.", "rows.")))
    store.manifest = replace(store.manifest, domains=(alpha,))
    monkeypatch.chdir(trained_with if way == "current directory" else tmp_path)
    if way == "remembered":
        remember_places(store, "owner/base", trained_with)
        remember_places(store, "owner/base", tmp_path)
        write_rows(tmp_path / "rows.jsonl", pairs("others of that name", 9))
    data = str(trained_with) if way == "data" else None
    examples = read_examples(settings_for(places, tmp_path, data=data), store)
    trained = [example.trained_on for example in examples]
    assert trained == sorted(trained)
    assert any(trained) and not all(trained)  # noqa: PT018
    assert {e.row_id for e in examples if e.trained_on} <= trained_rows(store)


def test_a_label_that_is_nearly_a_domains_is_refused(
    places: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    settings, store = settings_for(places, tmp_path, data=str(tmp_path)), Store.open(places[1])
    write_rows(tmp_path / "alphas.jsonl", pairs("a", 3))
    write_rows(tmp_path / "beta.jsonl", pairs("b", 3))
    with pytest.raises(InputError, match=r"alphas.*no domain 'alphas', and its domain 'alpha' has"):
        read_examples(settings, store)
    # Where the domain has prompts, the other file is somebody's own.
    write_rows(tmp_path / "alpha.jsonl", pairs("c", 3))
    assert len(read_examples(settings, store)) == 6


def test_one_prompt_with_two_labels_is_an_error_that_lists_it(
    places: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    write_rows(tmp_path / "alpha.jsonl", [*pairs("a", 3), *pairs("same", 2)])
    write_rows(tmp_path / "beta.jsonl", [*pairs("b", 3), *pairs("same", 2)])
    with pytest.raises(InputError, match="2 prompts have two labels") as error:
        read_examples(settings_for(places, tmp_path, data=str(tmp_path)), Store.open(places[1]))
    assert "alpha (alpha.jsonl) and beta (beta.jsonl)" in str(error.value)


def test_caps_short_texts_and_rows_without_answer(
    places: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    rows = [*pairs("alpha", 9), {"text": "a prompt without an answer"}, *pairs("alpha", 2)]
    write_rows(tmp_path / "alpha.jsonl", rows)
    write_rows(tmp_path / "alpha+chat.jsonl", pairs("mixed", 9))
    write_rows(tmp_path / "gone.jsonl", pairs("gone", 2))
    notes: list[str] = []
    settings = settings_for(places, tmp_path, data=str(tmp_path), mixed_cap=4)
    found = read_examples(settings, Store.open(places[1]), None, notes)
    assert [len([e for e in found if e.kind == kind]) for kind in ("single", "mixed")] == [10, 4]
    assert sum(e.answer is None for e in found) == 1
    assert "gone.jsonl is left out: gone not in the store." in notes
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="data of its domains is not here"):
        read_examples(settings.model_copy(update={"data": str(tmp_path / "empty")}),
                      Store.open(places[1]))  # fmt: skip
    short = settings.model_copy(update={"shortest_prompt": 1000})
    with pytest.raises(InputError, match="no prompt is left"):
        read_examples(short, Store.open(places[1]))


def test_sources_of_a_recipe(places: tuple[Path, Path, Path], tmp_path: Path) -> None:
    sources = [
        {"domains": ["beta", "alpha"], "data": {"sources": ["beta+alpha.jsonl"]}},
        {"domains": ["chat"], "data": "chat.jsonl"},
        {"domains": [], "data": "others.jsonl"},
    ]
    store = Store.open(places[1])
    found = read_examples(settings_for(places, tmp_path, sources=sources), store)
    labels = list(dict.fromkeys(one.label for one in found))
    assert labels == [("chat",), ("alpha", "beta"), ()]
    strange = settings_for(places, tmp_path, sources=[{"domains": ["x"], "data": "chat.jsonl"}])
    with pytest.raises(InputError, match=r"no domain x to route to \(there are alpha, beta, chat"):
        read_examples(strange, store)


def test_template_is_that_of_the_store(places: tuple[Path, Path, Path]) -> None:
    store = Store.open(places[1])
    assert template_of(None, store) == "chat"
    about: Any = {"sources": [{"path": "x.jsonl"}], "template": "alpaca"}
    first, *rest = store.manifest.domains
    other = replace(first, data={"settings": about})
    store.manifest = replace(store.manifest, domains=(other, *rest))
    with pytest.raises(InputError, match="alpaca and chat"):
        template_of(None, store)
    assert template_of("alpaca", store) == "alpaca"


# --- the command ----------------------------------------------------------------------------------


def test_what_is_written_is_what_the_router_reads(discovery: Discovery, tmp_path: Path) -> None:
    report, target, _ = discovery
    examples, targets = read_outcomes(target)
    outcomes = read_discovered_outcomes(target)
    assert (len(examples), len(outcomes), len(targets)) == (25, 3 * 3 + 2 + 1, 12)
    figures, changes = read_discovery(target)
    assert (figures, changes) == (report.data, ())
    assert figures["chat_domain"] == "chat"
    assert figures["stacks"].keys() == {*DOMAINS}
    check_tables(report)
    for outcome in outcomes:
        assert {*outcome.losses} >= {"", *DOMAINS}
        assert outcome.base_loss == outcome.losses[""]
        assert outcome.best_loss == outcome.losses[config_text(outcome.best)] <= outcome.base_loss
        assert outcome.targets["chat"] >= 0.2
        assert {*outcome.final} == {*DOMAINS}  # the control is in no target
        for d in DOMAINS:
            label = 0.2 * (d in outcome.label)
            assert outcome.final[d] == pytest.approx(min(0.8 * outcome.targets[d] + label, 1))
        twins = {f"random:{d}" for d in DOMAINS}
        with_best = {f"{WITH_BEST}{twin}" for twin in twins} if outcome.best else set()
        assert {*outcome.control} == {FLOOR} | twins | with_best
    assert figures["control"]["chosen"]["n"] == 12
    assert figures["counts"]["discovered_share"] == 12 / 25
    searched = {outcome.row_id for outcome in outcomes}
    rest = next(e for e in examples if e.row_id not in searched and e.label == ("alpha",))
    wanted = {"alpha": 1.0, "beta": 0.0, "chat": 0.0}
    assert targets_or_label(rest, targets, DOMAINS) == wanted
    by_label = {one["label"]: one for one in figures["oracle"]}
    assert by_label["alpha"]["own_gain"]["n"] == 3
    asked = sum("alpha+beta" in o.losses for o in outcomes if o.kind == "mixed")
    own_gain = by_label["alpha+beta"]["own_gain"]
    assert (own_gain is None) == (asked < 2)
    assert "Chat at its floor" in report.verdict
    changed = shutil.copytree(target, tmp_path / "changed")
    with (changed / "outcomes.jsonl").open("a") as file:
        file.write("\n")
    assert any("outcomes.jsonl" in change for change in read_discovery(changed)[1])


def check_tables(result: Result) -> None:
    """What people are shown of a discovery is of its figures."""
    assert [block.id for block in result.blocks if isinstance(block, Table | Plot)] == [
        "labels", "sets", "gains", "control", "twins", "counts"
    ]  # fmt: skip
    oracle = result.data["oracle"]
    labels = result.table("labels").set_index("label")
    assert [*labels["pairs"]] == [row["n"] for row in oracle]
    assert labels["holds_it_low"]["alpha"] == oracle[0]["label_in_set"]["interval"]["low"]
    control = result.table("control").set_index("what")
    chosen = result.data["control"]["chosen"]
    assert control["number"]["a random stack would be chosen"] == chosen["count"]
    assert [*result.table("twins")["domain"]] == [*DOMAINS]
    assert [*result.table("counts")["searched"]] == [3, 3, 3, 2, 1]


def test_exhaustive_reports_the_gap_of_greedy(
    places: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    report = run(settings_for(places, tmp_path / "out", search="exhaustive"))
    outcomes = read_discovered_outcomes(tmp_path / "out")
    assert all(len(outcome.losses) == 8 for outcome in outcomes)
    assert report.data["greedy_gap"]["nats"]["mean"] >= 0
    assert len(report.table("greedy")) == 4
    grid = report.data["grid"]
    assert [*grid] == [
        "alpha", "beta", "chat", "alpha+beta", "alpha+chat", "beta+chat", "alpha+beta+chat"
    ]  # fmt: skip
    gains = [o.base_loss - o.losses["alpha+chat"] for o in outcomes if o.label == ("beta",)]
    assert grid["alpha+chat"]["beta"]["mean"] == pytest.approx(sum(gains) / len(gains))
    table = report.table("grid").set_index("set")
    assert table["beta"]["alpha+chat"] == grid["alpha+chat"]["beta"]["mean"]
    greedy = run(settings_for(places, tmp_path / "greedy"))
    assert greedy.data["greedy_gap"] is None
    assert "grid" not in greedy.data
    mean = [sum(o["best_loss"] for o in one.data["oracle"]) for one in (report, greedy)]
    assert mean[0] <= mean[1] + 1e-6


def test_pairs_whose_prompt_fills_the_length_are_dropped_and_counted(
    places: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    long = [{"prompt": f"{i} " + "word " * 60, "completion": "yes"} for i in range(4)]
    write_rows(data / "alpha.jsonl", [*pairs("alpha", 3), *long])
    report = run(settings_for(places, tmp_path / "out", data=str(data), max_tokens=80,
                              samples_per_domain=100))  # fmt: skip
    assert report.data["counts"]["dropped_without_answer_tokens"] == 4
    assert (report.data["counts"]["samples"], report.data["counts"]["examples"]) == (3, 7)


def test_dry_run_measures_and_writes_nothing(
    places: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    report = run(settings_for(places, tmp_path / "out"), dry_run=True)
    assert (report.status, report.data["counts"]["samples"]) == ("planned", 9)
    assert report.data["counts"]["passes_at_most"] == 9 * (1 + 3 + 3)
    assert list(tmp_path.iterdir()) == []


def test_a_domain_more_keeps_what_is_known(places: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Disabled and enabled again stands for added: the hashes of the others stay."""
    store = Store.open(places[1])

    def switch(enabled: bool) -> None:
        with store.change("switched") as change:
            beta = replace(store.domain_named("beta"), enabled=enabled)
            change.manifest = change.manifest.with_domain(beta)

    switch(False)
    try:
        first = run(settings_for(places, tmp_path / "out"))
        assert first.data["domains"] == ["alpha", "chat"]
    finally:
        switch(True)
    more = run(settings_for(places, tmp_path / "out", force=True))
    assert more.data["figures"]["passes_recalled"] >= 6 * 3  # base, alpha, chat of six pairs
    fresh = run(settings_for(places, tmp_path / "fresh", resume=False))
    for one, other in zip(
        read_discovered_outcomes(tmp_path / "out"),
        read_discovered_outcomes(tmp_path / "fresh"), strict=True,
    ):  # fmt: skip
        assert one.row_id == other.row_id
        assert one.losses == pytest.approx(other.losses, abs=1e-4)
    assert fresh.data["figures"]["passes_recalled"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_domain": "talk"}, "chat_domain 'talk' is no domain"),
        ({"store_path": None}, "needs a store"),
        ({"store_path": "/nowhere/at/all"}, "not there"),
    ],
)
def test_bad_input(
    places: tuple[Path, Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(settings_for(places, tmp_path / "out", **changes))
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_goes_on_and_ends_with_the_same_files(
    places: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(places, tmp_path / "out", random_control=True, batch_tokens=120)
    whole = run(settings_for(places, tmp_path / "whole", random_control=True, batch_tokens=120))
    measure = candidate_losses.CandidateLosses._measure
    for allowed in (1, 4, 9):
        left = [allowed]

        def stopped(self: Any, batch: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return measure(self, batch)

        monkeypatch.setattr(candidate_losses.CandidateLosses, "_measure", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
        assert not (tmp_path / "out").exists()
        with (tmp_path / ".out.work" / "losses.jsonl").open("ab") as lines:
            lines.write(b'{"losses": [["torn')
    monkeypatch.setattr(candidate_losses.CandidateLosses, "_measure", measure)
    report = run(settings)
    assert report.data["figures"]["passes_recalled"] > 0
    assert report.data["figures"]["passes_made"] < whole.data["figures"]["passes_made"]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert [report.data[key] for key in ("oracle", "control")] == [
        whole.data[key] for key in ("oracle", "control")
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_examples_of_a_discovery_are_read_back(
    places: tuple[Path, Path, Path], discovery: Discovery, tmp_path: Path
) -> None:
    store = Store.open(places[1])
    target = shutil.copytree(discovery.target, tmp_path / "out")
    assert read_discovered_examples(target) == read_examples(settings_for(places, tmp_path), store)
    (target / "examples.jsonl").write_text("")
    with pytest.raises(InputError, match="outcomes belong to no example"):
        read_outcomes(target)
    with pytest.raises(InputError, match="route discover"):
        read_outcomes(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stacks": {"alpha": 3}}, "stacks.alpha"),
        ({"chat_floor": "high"}, "chat_floor"),
        ({"chat_floor": 2.0}, "chat_floor"),
        ({"chat_domain": ["chat"]}, "chat_domain"),
    ],
)
def test_a_changed_report_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    report = {"base_fingerprint": "0", "stacks": {"alpha": ["1"]}, "chat_domain": None,
              "chat_floor": 0.0}  # fmt: skip
    path = tmp_path / "discover_report.json"
    path.write_text(json.dumps(report))
    assert read_discovery(tmp_path) == (report, ())
    path.write_text(json.dumps(report | changes))
    with pytest.raises(InputError, match=message) as error:
        read_discovery(tmp_path)
    assert str(path) in str(error.value)


def test_a_target_outside_of_0_to_1_is_refused_with_its_line(
    discovery: Discovery, tmp_path: Path
) -> None:
    path = shutil.copytree(discovery.target, tmp_path / "out") / "outcomes.jsonl"
    first, second, *rest = path.read_text().splitlines()
    wrong = json.loads(second)
    wrong["final"]["alpha"] = 1.5
    path.write_text("\n".join([first, json.dumps(wrong), *rest]))
    with pytest.raises(InputError, match=r"outcomes.jsonl, line 2: final.alpha"):
        read_outcomes(tmp_path / "out")


def test_an_imported_domain_takes_no_file_that_happens_to_be_here(
    places: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places[2])  # where alpha.jsonl lies
    store = Store.open(places[1])
    one = replace(store.manifest.domains[0], origin="imported")
    store.manifest = replace(store.manifest, domains=(one,))
    with pytest.raises(InputError, match=r"(?s)data of its domains is not here.*imported"):
        read_examples(settings_for(places, tmp_path, data=None), store)


def test_a_note_names_the_domains_whose_training_is_not_recorded(
    places: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Store.open(places[1])
    domains = tuple(replace(d, split=None) for d in opened.manifest.domains)
    opened.manifest = replace(opened.manifest, domains=domains)
    monkeypatch.setattr(Store, "open", lambda path: opened)
    report = run(settings_for(places, tmp_path / "out"), dry_run=True)
    listed = ", ".join(DOMAINS)
    assert any(f"so what was trained on is not recorded: {listed}." in n for n in report.notes)


def test_progress_moves_forward_and_stays_below_its_end(discovery: Discovery) -> None:
    report, target, calls = discovery
    counts, made = report.data["counts"], report.data["figures"]["passes_made"]
    assert 0.75 * counts["passes_expected"] <= made <= counts["passes_at_most"]
    shares = [done / total for done, total, _ in calls]
    assert shares == sorted(shares)
    assert 0 == shares[0] < shares[1] <= shares[-1] < 1
    assert {path.name for path in target.iterdir() if path.name[0] != "."} == {
        "examples.jsonl", "losses.jsonl", "outcomes.jsonl", "result.json", "result.md"
    }  # fmt: skip

"""`mlxstacks stacks analyse`: a small written store, its result, what is said of errors.

Run: pytest tests/studies/stack/test_analysis.py
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxstacks.errors import InputError, StoreError, TargetError
from mlxstacks.files.outputs import entries
from mlxstacks.files.settings import StacksAnalyseSettings
from mlxstacks.files.store import Store
from mlxstacks.layers.stack_files import parts_of
from mlxstacks.studies.stack.analysis import _loss_plots, curves_of, left_out, run
from mlxstacks.study.document import Plot, Table, Text
from mlxstacks.study.result import Result
from tests.studies.stack_analysis_cases import write_store
from tests.study.test_progress import is_one_count
from tests.tiny_models import write_qwen_moe

ROUNDS = {"zeta": 2, "alpha": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with model, data and store."""
    root = tmp_path_factory.mktemp("analysis")
    model = write_qwen_moe(root / "model", bits=4, hidden_size=64, shards=1)
    write_store(root / "store", model, root / "data", ROUNDS)
    return root


def settings_of(place: Path, save_path: Path, **changes: Any) -> StacksAnalyseSettings:
    values: dict[str, Any] = {
        "store_path": str(place / "store"), "save_path": str(save_path), "prompts": 6,
        "model": str(place / "model"), "data": str(place / "data"),
    }  # fmt: skip
    return StacksAnalyseSettings.model_validate(values | changes)


@pytest.fixture(scope="module")
def result(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    told: list[tuple[float, float]] = []
    result = run(
        settings_of(place, tmp_path_factory.mktemp("out") / "analysis", plots=False),
        progress=lambda done, total, what: told.append((done, total)),
    )
    assert is_one_count(told)
    return result


def test_the_result_holds_every_figure(result: Result) -> None:
    assert result.directory is not None
    assert Result.open(result.directory).as_json() == result.as_json()
    document = result.data
    # The order of training, not of the alphabet.
    assert [domain["name"] for domain in document["domains"]] == ["zeta", "alpha"]
    assert list(document["matrix"]["ungated"]) == ["zeta", "alpha"]
    routing, geometry = document["routing"], document["geometry"]
    assert list(routing["stacks"]) == ["zeta-r1", "zeta-r2", "alpha-r1"]
    for stack in routing["stacks"].values():
        for found in stack["on"].values():
            assert found["prompts"] == 6
            assert sum(expert["mean"] for expert in found["gate"]) == pytest.approx(1)
            assert sum(expert["mean"] for expert in found["dispatch"]) == pytest.approx(2)
    assert len(routing["points"]["coordinates"]) == 12
    assert routing["points"]["features"] == sum(
        4 * stack["projections"] for stack in routing["stacks"].values()
    )
    assert geometry["data"]["pairs"] == geometry["weights"]["pairs"] > 0
    assert document["domains"][1]["protected"] == {
        "captured_energy_mean": 0.5, "capacity_used_highest": 0.25,
    }  # fmt: skip
    assert "A prompt's domain is predicted from its routing" in result.verdict


def test_cosines_of_the_result_are_those_of_dense_deltas(place: Path, result: Result) -> None:
    """The whole way from the files: dense M of each domain, NumPy's SVD, all pairs of vectors."""
    store = Store.open(place / "store")
    domains: dict[str, dict[str, list[np.ndarray]]] = {}
    for record in store.enabled_stacks():
        for path, part in parts_of(store.read_stack(record)).items():
            a, b = np.array(part.lora_a, np.float64), np.array(part.lora_b, np.float64)
            experts = [part.shape.scale * b[e] @ a[e] for e in range(4)]
            domains.setdefault(path, {}).setdefault(record.domain, []).extend(experts)
    largest = []
    for by_domain in domains.values():
        first, second = (
            np.linalg.svd(np.concatenate(of, axis=1), full_matrices=False)[0][:, :4]
            for of in by_domain.values()
        )
        largest.append(np.abs(first.T @ second).max())
    table = result.data["geometry"]["weights"]
    assert table["mean"] == pytest.approx(float(np.mean(largest)), rel=1e-6)
    assert table["matrix"]["zeta"]["alpha"] == pytest.approx(table["mean"])
    assert table["matrix"]["alpha"]["alpha"] == 1
    assert table["pairs"] == len(domains)


def test_directions_of_one_projection_are_drawn_in_one_plane(place: Path, tmp_path: Path) -> None:
    """The principal directions (Figure 1 of Brainstacks): every angle in the plane is NumPy's."""
    picked = {"layer": 1, "projection": "q_proj", "directions": 2}
    out = settings_of(place, tmp_path / "out", plots=False, **picked)
    found = run(out)
    planes = found.data["geometry"]["planes"]
    assert planes["path"].endswith("layers.1.self_attn.q_proj")
    store, frames = Store.open(place / "store"), []
    for domain in ("zeta", "alpha"):
        blocks = []
        for record in (r for r in store.enabled_stacks() if r.domain == domain):
            part = parts_of(store.read_stack(record))[planes["path"]]
            a, b = np.array(part.lora_a, np.float64), np.array(part.lora_b, np.float64)
            blocks += [part.shape.scale * b[e] @ a[e] for e in range(4)]
        frames.append(np.linalg.svd(np.concatenate(blocks, axis=1))[0][:, :2])
    _, values, right = np.linalg.svd(np.concatenate(frames, axis=1))
    points = np.concatenate([planes["weights"]["points"][d] for d in ("zeta", "alpha")])
    assert np.abs(points) == pytest.approx(np.abs(values[:2, None] * right[:2]).T, abs=1e-6)
    assert (points[:, 0] >= 0).all()
    assert planes["weights"]["inside"] == pytest.approx(np.sum(values[:2] ** 2) / 4)
    assert 0.5 <= planes["weights"]["inside_chance"] < 1
    plots = {block.id: block for block in found.blocks if isinstance(block, Plot)}
    assert [s.label for s in plots["plane-data"].series] == ["zeta", "alpha"]
    assert plots["plane-weights"].series[0].x[::2] == (0, 0)
    assert "zeta, alpha" in plots["plane-weights"].alt
    for wrong, words in (
        ({"projection": None}, "give both"), ({"layer": 0}, "there are: linear_attn.in_proj_z"),
        ({"projection": "down_proj"}, "several projections"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=words):
            run(settings_of(place, tmp_path / "no", weights_only=True, **picked | wrong))


def test_spectra_of_the_result_are_those_of_dense_deltas(place: Path, result: Result) -> None:
    store = Store.open(place / "store")
    record = store.stack_named("alpha-r1")
    ranks, energy = [], 0.0
    for part in parts_of(store.read_stack(record)).values():
        a, b = np.array(part.lora_a, np.float64), np.array(part.lora_b, np.float64)
        full = np.concatenate([part.shape.scale * b[e] @ a[e] for e in range(4)], axis=1)
        values = np.linalg.svd(full, compute_uv=False)[:8]
        shares = values / values.sum()
        ranks.append(float(np.exp(-np.sum(shares * np.log(shares)))))
        energy += float(np.sum(full**2))
    found = result.data["geometry"]["spectra"]["alpha-r1"]
    assert found["effective_rank"]["mean"] == pytest.approx(float(np.mean(ranks)), rel=1e-6)
    assert found["norm"] == pytest.approx(energy**0.5, rel=1e-6)
    assert found["value_16"] is None  # 4 experts of rank 2 have 8 values
    assert found["domain"] == "alpha"


def test_every_table_and_plot_is_there(result: Result) -> None:
    ids = [block.id for block in result.blocks if not isinstance(block, Text)]
    assert [id for id in ids if not id.startswith(("spectra-", "experts-"))] == [
        "cosines-weights", "cosine-table-weights", "cosines-data", "cosine-table-data",
        "cosines-by-projection", "separation", "routing-components", "distances", "load-gate",
        "load-dispatch", "spectra", "domains", "losses-by-round", "forgetting-ungated",
        "losses-ungated",
    ]  # fmt: skip
    assert sum(id.startswith("experts-gate-") for id in ids) == 3
    assert "spectra-1" in ids
    pandas = pytest.importorskip("pandas")
    load = result.table("load-gate")
    found = result.data["routing"]["stacks"]["zeta-r1"]["on"]["zeta"]["gate"]
    assert [*load.columns[:3]] == ["stack", "rows_of", "expert_0"]
    assert load["expert_0"][0] == found[0]["mean"]
    assert load["expert_0_low"][0] == found[0]["low"]
    assert isinstance(load, pandas.DataFrame)
    [plot] = [block for block in result.blocks if getattr(block, "id", "") == "cosines-weights"]
    assert isinstance(plot, Plot)
    # the diagonal, 1 by definition, would take the scale
    assert plot.series[0].y[0] is None
    assert plot.series[0].y[1] == result.data["geometry"]["weights"]["matrix"]["zeta"]["alpha"]


def test_plots_that_are_not_drawn_are_named(result: Result) -> None:
    geometry = result.data["geometry"]
    many = {"s": {"by_projection": dict.fromkeys(map(str, range(12)))}}
    data = {**result.data, "geometry": {**geometry, "spectra": many}}
    assert left_out(data) == ["Plots show the first 9 of 12 projections."]


def test_a_plot_of_points_joins_none(result: Result) -> None:
    pytest.importorskip("matplotlib")
    [ax] = result.plot("routing-components").axes
    assert [line.get_linestyle() for line in ax.lines] == ["None", "None"]
    assert sum(np.size(line.get_xdata()) for line in ax.lines) == 12


def test_without_matplotlib_the_rest_is_there(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = run(settings_of(place, tmp_path / "out", weights_only=True))
    assert any("pip install 'mlxstacks[plots]'" in note for note in found.notes)
    assert entries(tmp_path / "out") == ["result.json", "result.md"]


def test_weights_alone_need_no_model(place: Path, result: Result, tmp_path: Path) -> None:
    values = {"weights_only": True, "model": None, "data": None, "plots": False}
    found = run(settings_of(place, tmp_path / "out", **values))
    assert found.data["routing"] is None
    assert found.data["geometry"]["weights"] == result.data["geometry"]["weights"]
    assert found.data["geometry"]["data"] is None
    assert entries(tmp_path / "out") == ["result.json", "result.md"]


def test_the_store_is_only_read(place: Path, tmp_path: Path) -> None:
    def state() -> dict[str, bytes]:
        files = sorted(p for p in (place / "store").rglob("*") if p.is_file())
        return {str(path): path.read_bytes() for path in files}

    before = state()
    run(settings_of(place, tmp_path / "out", weights_only=True, plots=False))
    run(settings_of(place, tmp_path / "planned"), dry_run=True)
    assert state() == before
    assert not (tmp_path / "planned").exists()


def test_data_that_is_gone_leaves_a_note(place: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(place / "data" / "zeta.jsonl", data)
    found = run(settings_of(place, tmp_path / "out", data=str(data), plots=False))
    assert any("No prompts of alpha" in note and "--data" in note for note in found.notes)
    routing = found.data["routing"]
    assert list(routing["stacks"]["alpha-r1"]["on"]) == ["zeta"]
    assert routing["points"]["separation"] is None
    # plots and tables of what was not measured are left out
    assert not {"separation", "distances"} & {getattr(block, "id", "") for block in found.blocks}
    nothing = run(settings_of(place, tmp_path / "two", data=str(tmp_path), plots=False))
    assert nothing.data["routing"] is None
    assert any("Nothing was measured on data" in note for note in nothing.notes)


def test_held_out_rows_are_the_prompts(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whose ids the store has, though the files hold others too."""
    from mlxstacks.studies.stack import analysis as stack_analysis

    seen: dict[str, list[tuple[int, ...]]] = {}

    def catch(model: object, prompts: dict[str, Any], progress: object) -> None:
        seen.update(prompts)
        raise InputError("seen enough")

    monkeypatch.setattr(stack_analysis, "run_prompts", catch)
    with pytest.raises(InputError, match="seen enough"):
        run(settings_of(place, tmp_path / "out", prompts=100))
    assert {name: len(rows) for name, rows in seen.items()} == {"zeta": 8, "alpha": 8}
    texts = {bytes(t for t in row if t < 256).decode() for row in seen["zeta"]}
    assert len(texts) == 8


def test_mistakes_are_told(place: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`mlxstacks stack` makes one"):
        run(StacksAnalyseSettings(save_path=str(tmp_path / "out")))
    with pytest.raises(InputError, match="not there"):
        run(settings_of(place, tmp_path / "out", store_path=str(tmp_path / "none")))
    with pytest.raises(TargetError, match="must not be replaced"):
        run(settings_of(place, place / "store", force=True))
    with pytest.raises(InputError, match="with --model; --weights-only does without"):
        run(settings_of(place, tmp_path / "out", model=None))
    other = write_qwen_moe(tmp_path / "other", bits=4, hidden_size=64, shards=1, seed=7)
    with pytest.raises(StoreError, match="fingerprint"):
        run(settings_of(place, tmp_path / "out", model=str(other)))


def test_a_store_without_enabled_stacks_is_refused(place: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    store_path = tmp_path / "store"
    shutil.copytree(place / "store", store_path)
    with Store.open(store_path).change() as change:
        for domain in change.manifest.domains:
            change.manifest = change.manifest.with_domain(replace(domain, enabled=False))
    with pytest.raises(InputError, match="holds no enabled stack"):
        run(settings_of(place, tmp_path / "out", store_path=str(store_path)))


def test_a_flipped_bit_is_named(place: Path, tmp_path: Path) -> None:
    store_path = tmp_path / "store"
    shutil.copytree(place / "store", store_path)
    [file] = (store_path / "stacks").glob("alpha-r1-*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StoreError, match="alpha-r1"):
        run(settings_of(place, tmp_path / "out", store_path=str(store_path)))
    assert not (tmp_path / "out").exists()


def test_curves_come_from_the_log(tmp_path: Path) -> None:
    def line(number: int, step: int, loss: float, event: str = "validation") -> str:
        return json.dumps({"time": "t", "event": event, "domain": "chat", "round": number,
                           "step": step, "validation_loss": loss})  # fmt: skip

    lines = [
        line(1, 0, 3.0), line(1, 50, 2.0), line(2, 0, 2.0), line(1, 0, 2.9), line(1, 50, 1.9),
        line(1, 60, 9.0, event="step"), "not json", "[1]", line(1, 100, 1.8)[:-9],
    ]  # fmt: skip
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    assert curves_of(tmp_path) == {
        "chat": [
            {"round": 1, "step": 0, "validation_loss": 2.9},
            {"round": 1, "step": 50, "validation_loss": 1.9},
        ]
    }
    assert curves_of(tmp_path / "none") == {}


def test_steps_of_later_rounds_are_counted_on() -> None:
    points = [(1, 0, 3.0), (1, 50, 2.0), (2, 0, 2.0), (2, 50, 1.5)]
    curve = [dict(zip(("round", "step", "validation_loss"), p, strict=True)) for p in points]
    [plot] = _loss_plots([{"name": "chat", "curve": curve, "losses": [3.0, 1.5]}])
    assert plot.series[0].x == (0, 50, 50, 100)
    assert plot.series[0].y == (3.0, 2.0, 2.0, 1.5)


Typed = Callable[..., tuple[int, str, str]]


def test_the_command_as_it_is_typed(place: Path, typed: Typed, work_dir: Path) -> None:
    words = ["stacks", "analyse", str(place / "store"), "--weights-only", "--no-plots"]
    code, out, err = typed(*words)
    assert code == 0, err
    flat = " ".join(out.split())
    assert "Wrote mlxstacks-out/stacks-analyse." in flat
    assert "effective rank" in flat
    assert "Largest cosine of 4 directions from weights" in flat
    # A store of one's own is no bare run: what is there is replaced when that is asked for.
    assert typed(*words)[0] == 2
    code, out, err = typed(*words, "--json", "--force")
    assert (code, json.loads(out)["status"]) == (0, "done"), err
    code, out, _ = typed(*words, "--dry-run", "--force")
    assert (code, "Planned only" in out) == (0, True)
    code, _, err = typed("stacks", "analyse", "--dry-run", "--save-path", "new")
    assert (code, "nano's sample stacks" in err) == (0, True)


def test_forgetting_is_the_change_of_a_loss_since_its_domain_was_trained() -> None:
    from mlxstacks.studies.stack.report import matrix_blocks

    rows = {"a": {"a": 1.0}, "b": {"a": 1.5, "b": 0.5}, "c": {"a": 1.25, "b": 0.25, "c": 2.0}}
    plot, table = matrix_blocks({"ungated": rows})
    assert isinstance(plot, Plot)
    assert [row.y for row in plot.series] == [
        (0.0, None, None), (0.5, 0.0, None), (0.25, -0.25, 0.0)
    ]  # fmt: skip
    assert plot.limits == (-0.5, 0.5)
    assert "The largest: a +0.5 after b" in plot.alt
    assert isinstance(table, Table)
    (only,) = matrix_blocks({"prefix": {"a": {"a": 1.0}}})
    assert isinstance(only, Table)

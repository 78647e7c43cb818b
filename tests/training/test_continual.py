"""Outer loop: which stacks are on in each mode, drift, samples and stages of the null space.

Run: pytest tests/training/test_continual.py
"""

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks import base_model
from mlxstacks.data import Row
from mlxstacks.layers.attach import add_active, attach_stacks
from mlxstacks.layers.delta_rows import collect_delta_rows
from mlxstacks.layers.freezing import freeze_active
from mlxstacks.layers.nullspace import null_basis
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.settings import StackSettings, TargetSettings
from mlxstacks.layers.stacked import StackedLayer, stacked_layers
from mlxstacks.layers.targets import find_targets
from mlxstacks.training import continual
from mlxstacks.training.continual import (
    DriftError,
    Served,
    Stage,
    arrival_problems,
    capacity_warning,
    check_prefix,
    full_projections,
    protected_bases,
    protection_report,
    rises,
    sample_rows,
    stacks_for,
    stages,
    train_domain,
)
from mlxstacks.training.settings import (
    DomainSettings,
    NullSpaceSettings,
    StackRunSettings,
)
from tests.layers.build import fill_active
from tests.tiny_models import llama_config

SERVED = [Served("a", ("a-r1", "a-r2")), Served("b", ()), Served("c", ("c-r1",))]


def rows_of(*lengths: int) -> list[Row]:
    return [Row(tuple(range(n)), (0.0,) + (1.0,) * (n - 1)) for n in lengths]


def test_which_stacks_are_on_in_each_mode() -> None:
    assert stacks_for("ungated", SERVED, "a") == ("a-r1", "a-r2", "c-r1")
    assert stacks_for("prefix", SERVED, "a") == ("a-r1", "a-r2")
    assert stacks_for("prefix", SERVED, "b") == ("a-r1", "a-r2")
    assert stacks_for("prefix", SERVED, "c") == ("a-r1", "a-r2", "c-r1")
    assert stacks_for("isolated", SERVED, "b") == ()
    assert stacks_for("isolated", SERVED, "c") == ("c-r1",)


def test_any_drift_is_an_error_that_names_it() -> None:
    check_prefix({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0, "c": 3.0})
    with pytest.raises(DriftError) as drift:
        check_prefix({"a": 1.0, "b": 2.0}, {"a": math.nextafter(1.0, 2.0), "b": 2.0})
    assert "a: was 1.0, is 1.0000000000000002" in str(drift.value)
    assert "b:" not in str(drift.value)
    with pytest.raises(DriftError):
        check_prefix({"a": 1.0}, {"a": float("nan")})


def test_losses_of_another_machine_may_differ_by_rounding_only() -> None:
    stored = {"a": 1.0, "b": 1.0, "c": 1.0}
    wrong, rounding = arrival_problems(stored, {"a": 1.0, "b": 1.0001, "c": 1.1, "d": 5.0})
    assert [line[0] for line in wrong] == ["c"]
    assert [line[0] for line in rounding] == ["b"]


def test_rises_are_from_a_domains_own_row_to_the_last() -> None:
    matrix = {"b": {"b": 1.0}, "a": {"b": 1.5, "a": 2.0}, "c": {"b": 1.25, "a": 1.5, "c": 3.0}}
    assert rises(matrix) == {"b": 0.25, "a": -0.5, "c": 0.0}
    assert rises({}) == {}


@given(
    counts=st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), min_size=1),
    wanted=st.integers(1, 30),
)
def test_samples_are_as_even_as_the_rows_allow(counts: dict[str, int], wanted: int) -> None:
    rows = {
        name: [Row((ord(name), index), (0.0, 1.0)) for index in range(count)]
        for name, count in counts.items()
    }
    found = [tuple(tokens.tolist()) for tokens in sample_rows(rows, wanted)]
    assert len(found) == min(wanted, sum(counts.values()))
    taken = {name: [i for n, i in found if n == ord(name)] for name in counts}
    assert all(indices == list(range(len(indices))) for indices in taken.values())
    # Who has rows left has as many as anybody, or one fewer.
    most = max(len(indices) for indices in taken.values())
    assert all(len(taken[n]) >= most - 1 for n in counts if len(taken[n]) < counts[n])


def test_stages_hold_what_was_frozen_before_each_domain() -> None:
    samples = {"a": rows_of(4, 5), "b": rows_of(6), "c": rows_of(7), "new": rows_of(8)}
    for data, widths in (("previous", [4, 6, 7]), ("new", [8]), ("both", [4, 6, 7, 8])):
        settings = NullSpaceSettings(samples=len(widths), data=data)
        found = stages(SERVED, "new", samples, settings)
        assert [stage.stacks for stage in found] == [
            ("a-r1", "a-r2"), ("a-r1", "a-r2"), ("a-r1", "a-r2", "c-r1"),
        ]  # fmt: skip
        assert [tokens.size for tokens in found[-1].samples] == widths
    assert stages([], "new", samples, NullSpaceSettings()) == []


def test_half_of_the_output_protected_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(30, 10))
    bases = {"low": null_basis(rows, 4), "half": null_basis(rows, 5), "all": null_basis(rows, 10)}
    with caplog.at_level(logging.WARNING):
        assert capacity_warning({"low": bases["low"]}) is None
        warning = capacity_warning(bases)
    assert "2 of 3 projections have 50% or more" in (warning or "")
    assert "most: all, 100%" in (warning or "")
    assert full_projections(bases, ("low", "half", "all", "other")) == ["all"]


def test_the_report_of_protected_directions() -> None:
    rows = np.random.default_rng(0).normal(size=(30, 10))
    bases = {"x": null_basis(rows, 4), "zero": null_basis(np.zeros((5, 10)), 4)}
    report = protection_report(bases)
    assert report["projections"]["x"]["directions"] == 4
    assert report["projections"]["zero"]["directions"] == 0
    assert report["projections"]["zero"]["captured_energy"] is None
    assert report["capacity_used_highest"] == 0.4
    top = np.array(bases["x"].vectors, dtype=np.float64)
    share = np.sum((rows @ top) ** 2) / np.sum(rows**2)
    assert report["captured_energy_mean"] == pytest.approx(share, rel=1e-6)
    assert mx.allclose(bases["x"].vectors.T @ bases["x"].vectors, mx.eye(4), atol=1e-6).item()


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", ".hidden", "a/b", "a\\b", "..", "a b", "ä", "x" * 65, "-x", "a\n", "con:", None]
)
def test_a_domain_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"file names|string"):
        DomainSettings(name=name)


def test_settings_that_contradict_themselves() -> None:
    with pytest.raises(ValueError, match="Math, math are there more than once"):
        StackRunSettings.model_validate({"domains": ["math", "Math", "code"]})
    with pytest.raises(ValueError, match="modes is empty"):
        StackRunSettings(modes=())
    with pytest.raises(ValueError, match="code: 3 batches are below grad_accumulation_steps 4"):
        StackRunSettings.model_validate(
            {"domains": [{"name": "code", "iters": 3}], "grad_accumulation_steps": 4}
        )


def test_a_name_alone_stands_for_a_domain() -> None:
    settings = StackRunSettings.model_validate({"domains": ["math", {"name": "code"}]})
    assert [domain.name for domain in settings.domains] == ["math", "code"]
    assert settings.domains[0] == DomainSettings(name="math")


# --- the search for directions --------------------------------------------------------------------


def frozen_model() -> nn.Module:
    """A tiny dense model with the stacks a-r1 and b-r1."""
    mx.random.seed(0)
    model = base_model.build_model(llama_config())
    attach_stacks(model, find_targets(model, TargetSettings(projections=("q_proj",))))
    for index, domain in enumerate("ab"):
        add_active(model, StackSettings(rank=2), mx.random.key(index))
        for place, (_, layer) in enumerate(stacked_layers(model)):
            fill_active(layer, 10 * index + place)
        freeze_active(model, f"{domain}-r1", domain, mx.float32)
    return model


def test_only_a_stage_that_leaves_stacks_out_packs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed anew, every frozen stack is in memory twice."""
    model, settings = frozen_model(), NullSpaceSettings(directions=2, scope="cumulative")
    layers = len(list(stacked_layers(model)))
    packed: list[int] = []
    plain = StackedLayer.set_stacks

    def counted(self: StackedLayer, stacks: Sequence[FrozenStack]) -> None:
        packed.append(len(stacks))
        plain(self, stacks)

    monkeypatch.setattr(StackedLayer, "set_stacks", counted)
    samples = [mx.array([1, 2, 3]), mx.array([4, 5])]
    both, first = Stage(("a-r1", "b-r1"), samples), Stage(("a-r1",), samples)
    aggregate = protected_bases(model, [first, both], NullSpaceSettings(directions=2), 0)
    assert packed == []
    assert len(aggregate) == layers
    cumulative = protected_bases(model, [first, both], settings, 0)
    assert packed == [1] * layers + [2] * layers
    assert all(basis.vectors.shape[1] == 4 for basis in cumulative.values())
    assert all(len(layer.stacks.ids) == 2 for _, layer in stacked_layers(model))


def test_logits_are_not_made_for_directions(tmp_path: Path) -> None:
    """An output that cannot be evaluated: its file is gone by then."""
    path = tmp_path / "logits.npy"
    np.save(path, np.zeros(1 << 16, np.float32))
    asked = mx.load(str(path))
    assert isinstance(asked, mx.array)
    path.write_bytes(b"")
    with pytest.raises(RuntimeError):
        mx.eval(asked + 1)
    model = frozen_model()

    def forward(model: nn.Module, tokens: mx.array) -> mx.array:
        return mx.sum(model(tokens)) + asked

    rows = collect_delta_rows(model, [mx.array([1, 2, 3])], forward)
    assert {len(found) for found in rows.values()} == {1}


def test_a_stages_directions_are_those_of_its_stacks_alone() -> None:
    model, settings = frozen_model(), NullSpaceSettings(directions=2, scope="cumulative")
    stage = Stage(("a-r1",), [mx.array([1, 2, 3]), mx.array([4, 5])])
    among_others = protected_bases(model, [stage], settings, 0)
    for _, layer in stacked_layers(model):
        layer.set_stacks([s for s in layer.stacks.stacks() if s.id.name == "a-r1"])
    alone = protected_bases(model, [stage], settings, 0)
    assert among_others.keys() == alone.keys()
    assert all(mx.array_equal(among_others[p].vectors, alone[p].vectors) for p in alone)


@pytest.mark.parametrize(("measured", "refused"), [(1.0, False), (1.00001, False), (1.1, True)])
def test_a_resumed_domain_may_differ_by_rounding(
    monkeypatch: pytest.MonkeyPatch, measured: float, refused: bool
) -> None:
    """Another machine measured its rounds before the run was stopped."""
    record = Mock(kept=True, number=1, loss_before=2.0, loss_after=1.0)
    job, checkpoints = Mock(), Mock(rounds=lambda: [record])
    job.name = "a"
    monkeypatch.setattr(continual, "boost_domain", lambda *_: [record])
    monkeypatch.setattr(continual, "measure_row", lambda *_: {"prefix": {"a": measured}})
    with pytest.raises(DriftError) if refused else nullcontext():
        result = train_domain(Mock(), job, checkpoints, [], Mock(), [], {})
        assert result.losses == (2.0, 1.0)

"""What the plots of a confound run show. Run: pytest tests/studies/confound/test_plots.py"""

from functools import partial

import pytest

from mlxstacks.studies.confound.plots import draw_arms, draw_content
from mlxstacks.study.plan import Standing
from tests.studies.confound_cases import POLICIES, case

figure_module = pytest.importorskip("matplotlib.figure")
WAYS = list(POLICIES.ways)


def test_every_arm_is_drawn_with_its_interval_and_guessing_beside() -> None:
    found = case(n=90, a1_refit=40, a0_refit=6)
    figure = figure_module.Figure(layout="constrained")
    draw_arms(figure, found)
    ax = figure.axes[0]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == [name.replace("_", " ") for name in found.arms]
    assert len(ax.containers) == len(found.arms)
    place = labels.index("a1 refit")
    point, _, (bar,) = ax.containers[place].lines
    assert point.get_xdata()[0] == pytest.approx(100 * 40 / 90)
    (low, _), (high, _) = bar.get_segments()[0]
    interval = found.arms["a1_refit"].interval
    assert (low, high) == pytest.approx((100 * interval.low, 100 * interval.high))
    assert ax.lines[0].get_xdata()[0] == pytest.approx(100 * found.guess_rate)
    assert "EXPLORATORY" not in ax.get_title()


def test_what_is_exploratory_says_so_in_every_plot() -> None:
    found = case(n=90, a1_refit=40, a0_refit=6, standing=Standing(("every arm: a subset",)))
    for draw in (draw_arms, partial(draw_content, ways=WAYS, least_gain=0.05)):
        figure = figure_module.Figure(layout="constrained")
        draw(figure, found=found)
        assert figure.axes[0].get_title().endswith("(EXPLORATORY)")


def test_content_is_drawn_by_way_with_its_outcome() -> None:
    found = case(a1_refit=300, a0_refit=30, random_refit=33, a1_promote=40)
    figure = figure_module.Figure(layout="constrained")
    draw_content(figure, found, WAYS, 0.05)
    ax = figure.axes[0]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["refit: content", "promote: guessing", "unfused: no content"]
    against_zero, against_random = ax.containers
    assert against_zero.lines[0].get_xdata()[0] == pytest.approx(100 * 270 / 692)
    assert against_random.lines[0].get_xdata()[0] == pytest.approx(100 * 267 / 692)

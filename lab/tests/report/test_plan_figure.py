import pytest
from matplotlib import image

from distlion.wire import LinkModel
from distlion_lab.errors import DataError
from distlion_lab.planning.advice import advise, build_record
from distlion_lab.planning.planner import compare_methods
from distlion_lab.planning.scenario import Scenario
from distlion_lab.report.plan_figure import draw_plan_figure


@pytest.fixture(scope="module")
def record():
    scenario = Scenario(n_params=10**8, nodes=8, link=LinkModel(1e-4, 1e9), compute_s=0.2)
    comparison = compare_methods(scenario)
    return build_record(comparison, advise(comparison))


def test_figure_is_a_png_with_something_drawn(record, tmp_path):
    draw_plan_figure(record, tmp_path / "plan.png")
    assert image.imread(tmp_path / "plan.png").std() > 0


def test_record_of_something_else_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="sweep"):
        draw_plan_figure({}, tmp_path / "plan.png")


def test_folder_that_does_not_exist_is_a_data_error(record, tmp_path):
    with pytest.raises(DataError, match="cannot be written"):
        draw_plan_figure(record, tmp_path / "missing" / "plan.png")

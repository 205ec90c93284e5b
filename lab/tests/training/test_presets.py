import pytest

from distlion_lab.training.compare_settings import CompareSettings
from distlion_lab.training.presets import PRESETS, Preset, make_quick
from distlion_lab.training.train_settings import TaskName


@pytest.mark.parametrize("task", list(TaskName))
@pytest.mark.parametrize("preset", list(Preset))
def test_quick_shrinks_every_preset(task, preset):
    def count_work(**given):
        settings = CompareSettings.with_defaults(task, **given)
        return sum(
            run.work
            for cell in settings.cells()
            for run in [*cell.tuning_runs(), *cell.reported_runs(0.1)]
        )

    whole = count_work(**PRESETS[preset])
    assert count_work(**{**PRESETS[preset], **make_quick(task)}) < whole / 2


@pytest.mark.parametrize("preset", list(Preset))
def test_quick_keeps_the_methods_a_spread_and_a_course_over_workers(preset):
    quick = {**PRESETS[preset], **make_quick(TaskName.IMAGES)}
    assert quick["methods"] == PRESETS[preset]["methods"]
    assert quick["seeds"] >= 2
    assert len(quick["workers"]) >= 2


@pytest.mark.parametrize("task", list(TaskName))
def test_quick_brings_a_model_for_the_embedded_data_only(task):
    assert make_quick(task)["model_config"].exists()
    assert "model_config" not in make_quick(task, embedded=False)


def test_quick_tunes_by_half_the_steps_of_a_run():
    found = make_quick(TaskName.IMAGES, steps=20)
    assert (found["steps"], found["tuning_steps"]) == (20, 10)
    assert make_quick(TaskName.IMAGES, steps=1)["tuning_steps"] == 1
    default = make_quick(TaskName.IMAGES)
    assert default["tuning_steps"] * 2 == default["steps"]

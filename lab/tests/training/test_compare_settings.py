import pytest

from distlion.errors import InvalidArgumentError
from distlion_lab.training.compare_settings import TUNING_SEED, CompareSettings
from distlion_lab.training.train_settings import TaskName


def make(**given):
    return CompareSettings.with_defaults(TaskName.IMAGES, **given)


def test_every_method_gets_the_same_budget():
    settings = make(methods=("majority", "global-adamw", "terngrad", "dgc"), lrs=5, seeds=3)
    budgets = {
        (
            len(cell.tuning_runs()),
            len({run.lr for run in cell.tuning_runs()}),
            sum(run.work for run in cell.tuning_runs()) // cell.workers,
            len(cell.reported_runs(0.1)),
        )
        for cell in settings.cells()
    }
    assert budgets == {(5, 5, 5 * settings.tuning_steps, 3)}


def test_tuning_seed_is_not_reported():
    (cell, *_) = make().cells()
    assert {run.seed for run in cell.tuning_runs()} == {TUNING_SEED}
    assert TUNING_SEED not in {run.seed for run in cell.reported_runs(0.1)}


def test_grids_have_centers_of_their_own():
    settings = make(methods=("majority", "terngrad"), lrs=3)
    assert len({cell.grid()[1] for cell in settings.cells()}) == 2


def test_all_grids_are_scaled_alike():
    methods = ("majority", "terngrad")
    once, thrice = make(methods=methods), make(methods=methods, lr_scale=3.0)
    for cell, scaled in zip(once.cells(), thrice.cells(), strict=True):
        # Learning rates are rounded to three digits.
        assert scaled.grid() == pytest.approx([3 * lr for lr in cell.grid()], rel=0.01)


def test_cells_are_all_methods_with_all_workers():
    settings = make(methods=("majority", "average"), workers=(2, 8))
    assert [(cell.method, cell.workers) for cell in settings.cells()] == [
        ("majority", 2),
        ("majority", 8),
        ("average", 2),
        ("average", 8),
    ]


def test_one_learning_rate_needs_no_tuning():
    (cell, *_) = make(lrs=1).cells()
    assert cell.tuning_runs() == []
    assert len(cell.grid()) == 1


def test_shorter_tuning_runs_have_an_equal_share_of_warm_up():
    (cell, *_) = make(steps=200, warmup_steps=20, tuning_steps=50).cells()
    assert {(run.steps, run.warmup_steps) for run in cell.tuning_runs()} == {(50, 5)}
    assert {(run.steps, run.warmup_steps) for run in cell.reported_runs(0.1)} == {(200, 20)}


def test_weight_decay_is_that_of_the_method_unless_given():
    (cell, *_) = make(methods=("terngrad",)).cells()
    assert cell.reported_runs(0.1)[0].weight_decay == pytest.approx(5e-4)
    (cell, *_) = make(methods=("terngrad",), weight_decay=0.0).cells()
    assert cell.reported_runs(0.1)[0].weight_decay == 0.0


def test_warm_up_and_evaluations_follow_the_steps():
    settings = make(steps=500)
    assert (settings.warmup_steps, settings.eval_every, settings.tuning_steps) == (50, 50, 500)


def test_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InvalidArgumentError, match="torch finds no such device"):
        make(device="cuda")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"methods": ("majorty",)}, "majorty"),
        ({"methods": ()}, "methods are none"),
        ({"methods": ("average", "average")}, "methods are average, average"),
        ({"workers": (0,)}, "workers is 0"),
        ({"workers": (4, 4)}, "workers are 4, 4"),
        ({"seeds": 0}, "seeds is 0"),
        ({"lrs": 0}, "lrs is 0"),
        ({"lr_factor": 1.0}, "lr_factor is 1.0"),
        ({"lr_scale": 0.0}, "lr_scale is 0.0"),
        ({"tuning_steps": 0}, "tuning_steps is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"alpha": 0.5}, "alpha is 0.5"),
        ({"device": "abacus"}, "device is 'abacus'"),
    ],
)
def test_wrong_value_is_refused_with_its_name(wrong, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make(**wrong)

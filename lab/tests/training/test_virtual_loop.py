import math

import pytest
import torch

from comparisons import make_run
from distlion_lab.errors import DataError
from distlion_lab.tasks.base import Batch
from distlion_lab.training.train_settings import Schedule
from distlion_lab.training.virtual_loop import VirtualLoop, split_heldout

CLASSES = 3


class Model(torch.nn.Module):
    def __init__(self, *, dropout=0.0):
        super().__init__()
        self.layer = torch.nn.Linear(4, CLASSES)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, values):
        class Output:
            logits = self.layer(self.dropout(values))

        return Output


class BlobTask:
    """Points around the corners of a simplex; worker and step choose which."""

    name = unit = "blobs"
    units_per_batch = 4

    def __init__(self, *, heldout=4, dropout=0.0, bad_step=None):
        self._heldout = heldout
        self._dropout = dropout
        self._bad_step = bad_step

    def build_model(self, *, seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Model(dropout=self._dropout)

    def training_batch(self, *, seed, step, rank, world_size):
        batch = self._draw(seed * 7919 + step * 101 + rank)
        if step == self._bad_step and rank == world_size - 1:
            batch.inputs["values"].fill_(math.inf)
        return batch

    def heldout_batches(self):
        return [self._draw(10_000_000 + index) for index in range(self._heldout)]

    def describe(self):
        return {"name": self.name, "data": "blobs", "model_type": "linear"}

    def _draw(self, seed):
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randint(CLASSES, (4,), generator=generator)
        values = torch.nn.functional.one_hot(targets, 4) + 0.1 * torch.randn(
            4, 4, generator=generator
        )
        return Batch({"values": values}, targets)


def ignore(step):
    pass


def run(task=None, observe=ignore, **changes):
    return VirtualLoop(make_run(**changes), task or BlobTask(), observe).run()


def without_time(record):
    return record.to_json() | {"timing": None}


def test_even_heldout_batches_choose_and_odd_ones_are_reported():
    batches = BlobTask(heldout=5).heldout_batches()
    validation, test = split_heldout(BlobTask(heldout=5))
    assert [b.targets.tolist() for b in validation] == [b.targets.tolist() for b in batches[0::2]]
    assert [b.targets.tolist() for b in test] == [b.targets.tolist() for b in batches[1::2]]


def test_one_heldout_batch_is_too_few():
    with pytest.raises(DataError, match="1 evaluation batches"):
        split_heldout(BlobTask(heldout=1))


def test_evaluations_come_first_now_and_then_and_last():
    assert run().series["step"] == [0, 4, 6]


@pytest.mark.parametrize("method", ["majority", "average", "global-lion", "global-adamw", "dgc"])
def test_training_lowers_both_losses(method):
    series = run(method=method, steps=60, lr=0.05).series
    assert series["validation_loss"][-1] < 0.5 * series["validation_loss"][0]
    assert series["test_loss"][-1] < 0.5 * series["test_loss"][0]
    assert series["train_loss"][-1] < series["train_loss"][1]


def test_bytes_grow_evenly_and_add_up():
    record = run()
    sent = record.series["sent_bytes"]
    assert sent[0] == 0
    assert sent[1] * 6 == sent[2] * 4
    assert record.sent_bytes_per_step * 6 == sent[-1]


def test_equal_settings_give_bitwise_identical_records_whatever_was_drawn_before():
    torch.manual_seed(1)
    first = run(BlobTask(dropout=0.5), method="terngrad")
    torch.manual_seed(2)
    torch.rand(5)
    assert without_time(run(BlobTask(dropout=0.5), method="terngrad")) == without_time(first)


@pytest.mark.parametrize(
    "change", [{"seed": 2}, {"lr": 0.02}, {"workers": 2}, {"method": "average"}]
)
def test_other_settings_give_other_parameters(change):
    assert run(**change).parameters_sha256 != run().parameters_sha256


def test_loss_that_is_not_finite_is_recorded_as_divergence():
    record = run(BlobTask(bad_step=5), method="global-lion")
    assert record.diverged["step"] == 5
    assert "not finite" in record.diverged["message"] or "nan" in record.diverged["message"]
    assert record.series["step"] == [0, 4]
    assert record.to_json()["diverged"] == record.diverged


def test_gradient_that_is_not_finite_is_recorded_as_divergence():
    assert run(BlobTask(bad_step=2), method="majority").diverged["step"] == 2


def test_learning_rate_follows_the_schedule():
    loop = VirtualLoop(make_run(schedule=Schedule.COSINE, steps=4, lr=0.1), BlobTask(), ignore)
    loop.run()
    (group,) = loop._workers.optimizer.param_groups
    assert group["lr"] == pytest.approx(0.01)


def test_observer_hears_of_every_step():
    seen = []
    run(observe=seen.append)
    assert seen == [1, 2, 3, 4, 5, 6]


def test_forward_and_backward_are_timed():
    record = run()
    assert 0 < record.timing["compute_s"] < record.timing["wall_s"]

import time

import pytest
import torch

from distlion_netlab import DeviceWorkload
from distlion_netlab.device import EmulatedModel

WORKLOAD = DeviceWorkload(layers=3, width=4, step_s=0.9)


@pytest.fixture
def slept(monkeypatch):
    naps = []
    monkeypatch.setattr(time, "sleep", naps.append)
    return naps


def test_passes_take_the_stated_time_layer_by_layer(slept):
    loss = EmulatedModel(WORKLOAD, seed=0, rank=0)()
    assert slept == pytest.approx([0.1] * 3)
    loss.backward()
    assert slept[3:] == pytest.approx([0.2] * 3)


@pytest.mark.usefixtures("slept")
def test_each_layer_gets_its_gradient_after_its_own_pass():
    model = EmulatedModel(WORKLOAD, seed=0, rank=0)
    arrived = []
    for number, weight in enumerate(model.weights):
        weight.register_post_accumulate_grad_hook(
            lambda _, number=number: arrived.append((number, len(arrived)))
        )
    model().backward()
    assert arrived == [(2, 0), (1, 1), (0, 2)]
    assert all(weight.grad.shape == (4, 4) for weight in model.weights)


@pytest.mark.usefixtures("slept")
def test_workers_begin_alike_and_have_gradients_of_their_own():
    first, second = (EmulatedModel(WORKLOAD, seed=0, rank=rank) for rank in range(2))
    for model in (first, second):
        model().backward()
    for a, b in zip(first.weights, second.weights, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a.grad, b.grad)


@pytest.mark.usefixtures("slept")
def test_a_step_does_not_change_what_the_next_one_finds():
    model = EmulatedModel(WORKLOAD, seed=0, rank=0)
    model().backward()
    first = [weight.grad.clone() for weight in model.weights]
    for weight in model.weights:
        weight.grad.mul_(0)  # as clipping might
        weight.grad = None
    model().backward()
    assert all(torch.equal(w.grad, g) for w, g in zip(model.weights, first, strict=True))

import pytest
import torch
import torch.distributed as dist

from cluster import run_workers
from distlion.training import RuleName, TrainSettings
from distlion.training.methods import build_method, ring_all_reduce_bytes

PARAMETERS = 13 * 7 + 7


def train_steps(rank, world_size, rule, steps):
    """Train a linear layer; return the method's account and a parameter checksum."""
    torch.manual_seed(0)
    model = torch.nn.Linear(13, 7)
    settings = TrainSettings.with_defaults(rule=rule, workers=world_size, lr=1e-3)
    method = build_method(settings, model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        method.model(torch.randn(5, 13, generator=generator)).square().sum().backward()
        method.optimizer.step()
        method.optimizer.zero_grad()
    return method.sent_bytes, method.bits_per_parameter, method.replicas_equal()


def change_one_replica(rank, world_size, rule):
    torch.manual_seed(0)
    model = torch.nn.Linear(13, 7)
    method = build_method(TrainSettings.with_defaults(rule=rule, workers=world_size), model)
    dist.barrier()
    if rank == 1:
        with torch.no_grad():
            model.bias[3] += 1e-6
    return method.replicas_equal()


@pytest.mark.parametrize(
    ("world_size", "expected"),
    # 2 (N - 1) / N of 4,000 bytes.
    [(1, 0), (2, 4000), (4, 6000), (5, 6400)],
)
def test_ring_all_reduce_sends_nearly_twice_the_data(world_size, expected):
    assert ring_all_reduce_bytes(1000, world_size) == expected


@pytest.mark.distributed
@pytest.mark.parametrize("rule", [RuleName.GLOBAL_LION, RuleName.GLOBAL_ADAMW])
def test_all_reduce_counts_every_gradient_of_every_step(rule):
    for sent_bytes, bits, _ in run_workers(train_steps, 2, rule, 3):
        assert sent_bytes == 3 * 4 * PARAMETERS
        assert bits == 32


@pytest.mark.distributed
@pytest.mark.parametrize("rule", list(RuleName))
def test_replicas_that_trained_together_are_equal(rule):
    assert all(equal for _, _, equal in run_workers(train_steps, 3, rule, 4))


@pytest.mark.distributed
@pytest.mark.parametrize("rule", [RuleName.MAJORITY, RuleName.GLOBAL_LION])
def test_replica_that_differs_in_one_number_is_found_on_every_rank(rule):
    assert run_workers(change_one_replica, 2, rule) == [False, False]

import functools

import pytest
import torch
import torch.distributed as dist

import matrix
from cluster import run_workers
from distlion import Agreement, DistributedLion
from distlion_lab.training.loop import start_worker
from distlion_lab.training.methods import BASELINE_NAMES
from distlion_lab.training.train_settings import OnDisagreement, TrainSettings

PARAMETERS = 13 * 7 + 7
RULES = (*matrix.first_of_each_class(), "signsgd", *BASELINE_NAMES)


def train_steps(rank, world_size, rule, steps, width=None):
    """Train a linear layer; return the method's account and whether replicas are equal."""
    torch.manual_seed(0)
    model = torch.nn.Linear(13, 7) if width is None else torch.nn.Linear(width, width)
    settings = TrainSettings.with_defaults(rule=rule, workers=world_size, lr=1e-3)
    method = start_worker(settings, model)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        method.model(torch.randn(5, width or 13, generator=generator)).square().sum().backward()
        method.optimizer.step()
        method.optimizer.zero_grad()
    return method.sent_bytes, method.bits_per_parameter, method.replicas_equal()


def change_one_replica(rank, world_size, rule):
    torch.manual_seed(0)
    model = torch.nn.Linear(13, 7)
    method = start_worker(TrainSettings.with_defaults(rule=rule, workers=world_size), model)
    dist.barrier()
    if rank == 1:
        with torch.no_grad():
            model.bias[3] += 1e-6
    return method.replicas_equal()


@pytest.mark.distributed
@pytest.mark.parametrize("rule", ["global-lion", "global-adamw"])
def test_all_reduce_counts_every_gradient_of_every_step(rule):
    for sent_bytes, bits, _ in run_workers(train_steps, 2, rule, 3):
        assert sent_bytes == 3 * 4 * PARAMETERS
        assert bits == 32


@pytest.mark.distributed
def test_fp16_hook_sends_half_the_bytes():
    for sent_bytes, bits, _ in run_workers(train_steps, 2, "ddp-fp16", 3):
        assert sent_bytes == 3 * 2 * PARAMETERS
        assert bits == 16


@pytest.mark.distributed
def test_powersgd_sends_everything_twice_and_then_factors():
    # Of the matrix of 13 by 7, of rank 4, and the bias; factors must halve what is sent, and
    # 4 * (13 + 7) numbers do not.
    small = run_workers(train_steps, 2, "ddp-powersgd", 5)
    assert [sent_bytes for sent_bytes, _, _ in small] == [5 * 4 * PARAMETERS] * 2
    large = run_workers(train_steps, 2, "ddp-powersgd", 5, 64)
    full, factors = 64 * 64 + 64, 4 * (64 + 64) + 64
    assert [sent_bytes for sent_bytes, _, _ in large] == [4 * (2 * full + 3 * factors)] * 2


@pytest.mark.distributed
def test_dgc_follows_the_warm_up_of_the_settings():
    # Of 91 and 7 elements, 8 bytes each: a quarter in the first 5 of 20 steps, then a sixteenth.
    (sent_bytes, _, _), _ = run_workers(train_steps, 2, "dgc", 6)
    assert sent_bytes == 8 * (5 * (23 + 2) + (6 + 1))


@pytest.mark.distributed
def test_graddrop_sends_4_percent():
    # 4 of 91 and 1 of 7 elements, 8 bytes each, and two lengths of 8 bytes.
    (sent_bytes, _, _), _ = run_workers(train_steps, 2, "graddrop", 2)
    assert sent_bytes == 2 * 8 * (4 + 1 + 2)


def test_signum_and_signsgd_vote_with_their_momenta():
    def betas(rule):
        settings = TrainSettings.with_defaults(rule=rule)
        return start_worker(settings, torch.nn.Linear(2, 1)).optimizer.param_groups[0]["betas"]

    assert betas("signum") == (0.9, 0.9)
    assert betas("signsgd") == (0.0, 0.0)
    assert betas("majority") == (0.9, 0.99)


@pytest.mark.parametrize("choice", list(OnDisagreement))
def test_a_disagreeing_worker_is_treated_as_the_settings_say(choice):
    given = {}

    def make_optimizer(params, lr, **arguments):
        given.update(arguments)
        return DistributedLion(params, lr, **arguments)

    settings = TrainSettings.with_defaults(diagnose_every=4, on_disagreement=choice)
    start_worker(settings, torch.nn.Linear(2, 1), make_optimizer)
    assert given["agreement"] == Agreement(every=4, on_disagreement=choice.value)


def find_betas(rank, world_size, rule):
    settings = TrainSettings.with_defaults(rule=rule, workers=world_size)
    return start_worker(settings, torch.nn.Linear(2, 1)).optimizer.param_groups[0]["betas"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("rule", "betas"),
    [
        ("majority-betas-90-95", (0.9, 0.95)),
        ("global-lion", (0.9, 0.99)),
        ("global-lion-betas-90-95", (0.9, 0.95)),
        ("global-adamw", (0.9, 0.999)),
        ("global-adamw-betas-80-999", (0.8, 0.999)),
    ],
)
def test_name_of_a_rule_says_the_betas(rule, betas):
    assert run_workers(find_betas, 1, rule) == [betas]


def train_all_rules(rank, world_size):
    return {rule: train_steps(rank, world_size, rule, 4)[2] for rule in RULES}


@functools.cache
def equalities():
    return run_workers(train_all_rules, 3)


@pytest.mark.distributed
@pytest.mark.parametrize("rule", RULES)
def test_replicas_that_trained_together_are_equal(rule):
    assert all(equal[rule] for equal in equalities())


@pytest.mark.distributed
@pytest.mark.parametrize("rule", ["majority", "global-lion"])
def test_replica_that_differs_in_one_number_is_found_on_every_rank(rule):
    assert run_workers(change_one_replica, 2, rule) == [False, False]

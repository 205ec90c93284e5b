"""What loggers get of an optimizer's steps."""

import os
import signal

import pytest
import torch

import distlion
from cluster import WorkerDiedError, run_workers
from crews import GOAL, OPTIONS, STRUCK_AT, host_store, make_crew, start, train
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.integrations.logging import VoteLog, VoteMeter, log_to_tensorboard, log_to_wandb

TRAFFIC = {"step_s", "interval_s", "sent_bytes", "sent_bytes_total", "bits_per_parameter"}
CHANGES = {"members", "epoch", "epochs_formed", "members_lost", "forming_s"}
DIAGNOSIS = {"margin", "ties", "agreement", "coherence"}


def make_optimizer(**options):
    model = torch.nn.Linear(4, 3)
    return model, distlion.DistributedLion(model.parameters(), lr=1e-3, **options)


def take_step(model, optimizer):
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class Run:
    def __init__(self):
        self.logged, self.defined = [], {}

    def define_metric(self, name, *, step_metric):
        self.defined[name] = step_metric

    def log(self, data):
        self.logged.append(data)


def test_log_is_every_few_steps_and_once_more_at_the_end():
    steps = []
    model, optimizer = make_optimizer()
    with VoteLog(optimizer, lambda step, numbers: steps.append(step), every=3):
        for _ in range(7):
            take_step(model, optimizer)
    take_step(model, optimizer)
    assert steps == [3, 6, 7]


def test_every_below_1_is_refused():
    with pytest.raises(InvalidArgumentError, match="every is 0"):
        VoteLog(make_optimizer()[1], print, every=0)


def test_an_optimizer_that_does_not_vote_is_refused():
    params = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(UnsupportedTypeError, match="a Lion, which does not vote"):
        VoteMeter(distlion.Lion(params, lr=1e-3))


class Wrapper:
    """As Accelerate's: it passes on neither hooks nor what a voting optimizer has more."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_an_optimizer_in_a_trainers_wrapper_is_measured():
    logged = []
    model, optimizer = make_optimizer()
    with VoteLog(Wrapper(Wrapper(optimizer)), lambda step, numbers: logged.append(step), every=1):
        take_step(model, optimizer)
    assert logged == [1]
    params = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(UnsupportedTypeError, match="a Lion, which does not vote"):
        VoteMeter(Wrapper(distlion.Lion(params, lr=1e-3)))


def test_norm_of_the_gradients_is_logged_where_they_are_clipped():
    model, optimizer = make_optimizer(clip_norm=distlion.ClipNorm(1.0))
    meter = VoteMeter(optimizer)
    take_step(model, optimizer)
    assert meter.read()["grad_norm"] == optimizer.grad_norm > 0
    model, optimizer = make_optimizer()
    meter = VoteMeter(optimizer)
    take_step(model, optimizer)
    assert "grad_norm" not in meter.read()
    assert optimizer.grad_norm is None


def test_nothing_is_read_where_there_was_no_step():
    assert VoteMeter(make_optimizer()[1]).read() == {}


def test_wandb_draws_against_committed_steps():
    model, optimizer = make_optimizer()
    run = Run()
    with log_to_wandb(optimizer, run, every=1, prefix="votes-d"):
        take_step(model, optimizer)
    assert run.defined == {"votes-d/*": "votes-d/committed_step"}
    (data,) = run.logged
    assert data["votes-d/committed_step"] == 1
    assert data.keys() == {f"votes-d/{name}" for name in TRAFFIC | {"committed_step"}}


def test_tensorboard_can_read_what_was_logged(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, optimizer = make_optimizer()
    with SummaryWriter(tmp_path) as writer, log_to_tensorboard(optimizer, writer, every=2):
        for _ in range(4):
            take_step(model, optimizer)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"votes/{name}" for name in TRAFFIC}
    assert [each.step for each in events.Scalars("votes/step_s")] == [2, 4]


def read_each_step(rank, world_size):
    torch.manual_seed(rank)
    model, optimizer = make_optimizer(agreement=distlion.Agreement(every=2))
    meter, found = VoteMeter(optimizer), []
    for _ in range(3):
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        last = [d for d in optimizer.diagnostics() if d.step == optimizer.diagnostics()[-1].step]
        margin = sum(d.margin for d in last) / len(last)
        found.append((meter.read(), optimizer.traffic.last_sent_bytes, margin))
    return found


@pytest.mark.distributed
def test_workers_read_traffic_at_each_step_and_agreement_once_for_each_diagnosis():
    for found in run_workers(read_each_step, 3):
        for step, (numbers, sent_bytes, margin) in enumerate(found):
            assert numbers.keys() == TRAFFIC | (DIAGNOSIS if step % 2 == 0 else set())
            assert numbers["sent_bytes"] == sent_bytes > 0
            assert numbers["interval_s"] >= numbers["step_s"] > 0
            if step % 2 == 0:
                assert numbers["margin"] == pytest.approx(margin)


def log_in_a_crew(rank, size, port):
    crew, rows, logs = make_crew(port, min_workers=2, max_workers=size), {}, []

    def act(optimizer):
        if not logs:
            logs.append(VoteLog(optimizer, rows.__setitem__, every=1))
        if rank == 0 and optimizer.committed_step == STRUCK_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    result = train(crew, OPTIONS["majority"], seed=rank, size=size, each=act)
    return rows, result


@pytest.mark.distributed
def test_members_and_epoch_of_a_crew_are_logged_as_they_change():
    store = host_store()
    dead, *found = start(log_in_a_crew, 3, store.port, may_die=True)
    assert isinstance(dead, WorkerDiedError)
    for rows, result in found:
        before, after = rows[STRUCK_AT - 1], rows[GOAL]
        assert before.keys() == {f"votes/{name}" for name in TRAFFIC | CHANGES}
        assert (before["votes/members"], after["votes/members"]) == (3, 2)
        assert after["votes/epoch"] == result["epochs"][GOAL][0] > before["votes/epoch"] > 0
        assert (before["votes/members_lost"], after["votes/members_lost"]) == (0, 1)
        assert after["votes/forming_s"] > before["votes/forming_s"] > 0

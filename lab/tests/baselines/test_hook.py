import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cluster import run_workers
from distlion.errors import InvalidArgumentError, ProcessGroupError, UnsupportedTypeError
from distlion_lab.baselines.dgc import DeepGradientCompression
from distlion_lab.baselines.graddrop import GradDrop
from distlion_lab.baselines.half import HalfPrecision
from distlion_lab.baselines.hook import CompressionState, compression_hook
from distlion_lab.baselines.terngrad import TernGrad
from distlion_lab.baselines.worker import Worker

pytestmark = pytest.mark.distributed


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 1, bias=False))


# Elements of its parameters.
SIZES = (91, 7, 7)


def train(rank, world_size, compression, steps, scale=1.0):
    """Return the state's accounts, how DDP cut its buckets, and the parameters."""
    model = make_model()
    # A bucket for each parameter, from the first step on and again when DDP cuts them anew.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-6)
    state = CompressionState(compression, wrapped.parameters())
    cuts = []

    def hook(state, bucket):
        cuts.append((bucket.index(), [tuple(p.shape) for p in bucket.parameters()]))
        return compression_hook(state, bucket)

    wrapped.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        (scale * wrapped(torch.randn(5, 13, generator=generator)).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    accounts = (state.steps, state.sent_bytes, state.uplink_bytes, state.reply_bytes)
    return accounts, cuts, [p.detach() for p in model.parameters()]


def test_terngrad_sends_scales_and_levels():
    # All-gathers of three scales and of one row of codes for each bucket, to two others.
    codes = [math.ceil(n / 4) for n in SIZES]
    for accounts, _, _ in run_workers(train, 3, TernGrad(), 2):
        uplink = sum(codes) + 3 * 4
        reply = sum(math.ceil(n * 3 / 8) for n in SIZES) + 3 * 4
        assert accounts == (2, 2 * 2 * uplink, 2 * uplink, 2 * reply)


def test_dgc_sends_its_largest_entries_and_no_lengths():
    kept = [round(0.1 * 91), 1, 1]
    for accounts, _, _ in run_workers(train, 2, DeepGradientCompression(keep=0.1), 2):
        assert accounts[:3] == (2, 2 * 8 * sum(kept), 2 * 8 * sum(kept))
        assert 8 * sum(kept) * 2 <= accounts[3] <= 2 * 8 * sum(kept) * 2


def test_graddrop_without_anything_to_send_sends_lengths_only():
    for accounts, _, _ in run_workers(train, 2, GradDrop(), 2, 0.0):
        assert accounts == (2, 2 * 3 * 8, 0, 0)


def test_state_follows_its_parameter_when_ddp_cuts_its_buckets_anew():
    results = run_workers(train, 2, DeepGradientCompression(keep=0.1), 3)
    cuts = results[0][1]
    assert cuts[: len(cuts) // 3] != cuts[-(len(cuts) // 3) :], "DDP did not cut anew"
    assert follow_with_bare_workers(2, 3) == [p.tolist() for p in results[0][2]]


def follow_with_bare_workers(world_size, steps):
    """Do what ``train`` does without DDP, parameter by parameter."""
    model, method = make_model(), DeepGradientCompression(keep=0.1)
    workers = [
        Worker(method, rank=rank, n_workers=world_size, seed=0) for rank in range(world_size)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    for step in range(steps):
        payloads = []
        for worker, generator in zip(workers, generators, strict=True):
            optimizer.zero_grad()
            model(torch.randn(5, 13, generator=generator)).square().sum().backward()
            payloads.append(
                [
                    worker.compress(index, p.grad.flatten(), step=step, scalar=torch.zeros(()))
                    for index, p in enumerate(model.parameters())
                ]
            )
        for p, parts in zip(model.parameters(), zip(*payloads, strict=True), strict=True):
            p.grad = method.aggregate(parts, p.numel()).view(p.shape)
        optimizer.step()
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("method", [TernGrad(), GradDrop(), DeepGradientCompression()])
def test_replicas_stay_equal(method):
    results = run_workers(train, 3, method, 4)
    for _, _, params in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(results[0][2], params, strict=True))


def average_bfloat16(rank, world_size):
    model = nn.Linear(3, 1, bias=False).bfloat16()
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(
        CompressionState(GradDrop(keep=1.0), wrapped.parameters()), compression_hook
    )
    wrapped(torch.full((1, 3), 1.0 + 2 * rank, dtype=torch.bfloat16)).sum().backward()
    return model.weight.grad


def test_bfloat16_gradients_are_averaged_in_float32():
    for grad in run_workers(average_bfloat16, 2):
        assert torch.equal(grad, torch.full((1, 3), 2.0, dtype=torch.bfloat16))


def make_wrong_states(rank, world_size):
    refused = []
    try:
        CompressionState(HalfPrecision(), [])
    except UnsupportedTypeError as error:
        refused.append(str(error))
    state = CompressionState(GradDrop(), [nn.Parameter(torch.zeros(3))])
    try:
        state.compress(nn.Parameter(torch.zeros(5, 2)), torch.zeros(10), torch.zeros(()))
    except InvalidArgumentError as error:
        refused.append(str(error))
    dist.destroy_process_group()
    try:
        CompressionState(GradDrop(), [])
    except ProcessGroupError as error:
        refused.append(str(error))
    return refused


def test_states_that_cannot_work_are_refused():
    half, unknown, homeless = run_workers(make_wrong_states, 1)[0]
    assert "fp16_compress_hook" in half
    assert "(5, 2)" in unknown
    assert "init_process_group" in homeless

"""What a step does to a GPU: what it launches where, what it copies, and when the host waits."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlion
import matrix
from backends import INTERPRETS
from cluster import run_workers
from distlion import errors, faults
from drawn import draw_grads
from failures import Caught, assert_raised, caught
from tiers import in_tiers

pytestmark = pytest.mark.skipif(not INTERPRETS, reason="runs where TRITON_INTERPRET=1")

SIZES = (70, 300, 1)


def make(device: Any, **settings: Any) -> tuple[distlion.DistributedLion, list[nn.Parameter]]:
    params = [nn.Parameter(device.place(torch.ones(size))) for size in SIZES]
    return distlion.DistributedLion(params, lr=1e-2, **settings), params


def run_backward(params: list[nn.Parameter], rank: int, step: int, device: Any) -> None:
    for param, grad in zip(params, draw_grads(params, rank, step), strict=True):
        (param * device.place(grad)).sum().backward()


def count_waits(
    rank: int, world_size: int, settings: dict[str, Any], at_step: int
) -> tuple[list[str], Counter[str], int, int]:
    """Return the waits, copies, launches and buckets of one step."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        optimizer, params = make(device, **settings)
        for step in range(at_step + 1):
            optimizer.zero_grad()
            device.forget()
            run_backward(params, rank, step, device)
            optimizer.step()
        assert optimizer.committed_step == at_step + 1
        n_buckets = len(optimizer._session.routing.buckets)
        return device.waits, Counter(device.copies), len(device.launches), n_buckets


@pytest.mark.parametrize(
    ("bucket_elements", "overlap"),
    in_tiers(
        itertools.product((None, 100), (False, True)),
        lambda case: case in ((None, False), (100, True)),
    ),
    ids=["one bucket", "one bucket, overlap", "buckets", "buckets, overlap"],
)
def test_the_host_waits_once_for_each_bucket(bucket_elements: int | None, overlap: bool) -> None:
    # "auto" would measure, and choose sizes.
    settings = {
        "exchange": distlion.AllReduce(),
        "overlap": overlap,
        "bucket_elements": bucket_elements or 10_000,
    }
    for waits, copies, n_launches, n_buckets in run_workers(count_waits, 2, settings, 3):
        assert n_buckets == (1 if bucket_elements is None else 3)
        assert waits == ["event"] * n_buckets
        # Votes, whether they are finite, and with overlap whether gradients differ from samples.
        assert copies["down"] == 2 * n_buckets + overlap
        # The encoding's table, the commit's table, and the reply.
        assert copies["up"] == 3 * n_buckets
        assert n_launches == 3 * n_buckets  # encode, blank, commit


@pytest.mark.slow
def test_the_first_steps_wait_no_more_though_they_compare_gradients() -> None:
    settings = {"exchange": distlion.AllReduce(), "replicas": distlion.Replicas(check_every=None)}
    for waits, copies, _, _ in run_workers(count_waits, 2, settings, 0):
        assert waits == ["event"]
        assert copies["down"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", in_tiers(matrix.LISTED.values(), lambda rule: rule == matrix.LISTED["quantized-2"])
)
def test_no_rule_waits_more(rule: Any) -> None:
    settings = {"exchange": distlion.AllReduce(), "aggregation": rule}
    for waits, _, _, _ in run_workers(count_waits, 2, settings, 3):
        assert waits == ["event"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    in_tiers(
        [
            ({"nonfinite": "skip"}, ["event"]),
            ({"nonfinite": "abstain"}, ["event"]),
            # The norm, before anything is encoded.
            ({"clip_norm": distlion.ClipNorm(1.0)}, ["tolist", "event"]),
            ({"clip_norm": distlion.ClipNorm(1.0, scope="global")}, ["tolist", "event"]),
            ({"agreement": distlion.Agreement(every=1)}, ["event", "tolist"]),
            # The row of momenta down, and their mean up, parameter by parameter.
            (
                {"momentum_sync": distlion.MomentumSync(every=1)},
                ["event", "to cpu"] + 3 * ["copy up"],
            ),
            # Digests of the replicas.
            ({"replicas": distlion.Replicas(check_every=1)}, ["event", "cpu"]),
        ],
        lambda case: "momentum_sync" in case[0],
    ),
    ids=str,
)
def test_what_else_is_read_is_read_at_once(settings: dict[str, Any], expected: list[str]) -> None:
    settings = {"exchange": distlion.AllReduce(), **settings}
    for waits, _, _, _ in run_workers(count_waits, 2, settings, 3):
        assert waits == expected


def read_numbers(rank: int, world_size: int) -> list[str]:
    """Return the waits of a step with learning rates, a scale and a found_inf on the device."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        params = [nn.Parameter(device.place(torch.ones(size))) for size in SIZES]
        groups = [{"params": [param], "lr": device.place(torch.tensor(0.01))} for param in params]
        optimizer: Any = distlion.DistributedLion(groups, exchange=distlion.AllReduce())
        for step in range(4):
            optimizer.zero_grad()
            run_backward(params, rank, step, device)
            optimizer.grad_scale = device.place(torch.tensor(2.0))
            optimizer.found_inf = device.place(torch.tensor(0.0))
            device.forget()
            optimizer.step()
        return device.waits


def test_numbers_on_the_device_are_read_together() -> None:
    assert run_workers(read_numbers, 2) == [["tolist", "event"]] * 2


def list_launches(
    rank: int, world_size: int, settings: dict[str, Any], dtype: torch.dtype
) -> tuple[set[Any], set[Any]]:
    """Return the kernels, with their constants, launched at construction and in steps."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        params = [nn.Parameter(device.place(torch.ones(size, dtype=dtype))) for size in SIZES]
        optimizer = distlion.DistributedLion(
            params, lr=1e-2, replicas=distlion.Replicas(check_every=2), **settings
        )
        at_construction = {(one.kernel, one.constants) for one in device.launches}
        device.forget()
        for _ in range(4):
            optimizer.zero_grad()
            for param in params:
                param.grad = device.place(torch.ones(param.shape, dtype=dtype))
            optimizer.step()
        return at_construction, {(one.kernel, one.constants) for one in device.launches}


@pytest.mark.parametrize(
    ("settings", "dtype"),
    in_tiers(
        [
            *(({"aggregation": rule}, torch.float32) for rule in matrix.LISTED.values()),
            ({"overlap": True}, torch.bfloat16),
            ({"precision": distlion.Precision(rounding="stochastic")}, torch.bfloat16),
            ({"precision": distlion.Precision(exp_avg=torch.float32)}, torch.bfloat16),
            ({}, torch.float16),
            ({"clip_norm": distlion.ClipNorm(1.0)}, torch.float32),
            ({"momentum_sync": distlion.MomentumSync(every=2)}, torch.float32),
            (
                {
                    "nodes": distlion.Nodes(ranks_per_node=2),
                    "precision": distlion.Precision(rounding="stochastic"),
                },
                torch.bfloat16,
            ),
        ],
        lambda case: "nodes" in case[0],
    ),
    ids=str,
)
def test_nothing_is_compiled_while_peers_wait(settings: dict[str, Any], dtype: torch.dtype) -> None:
    settings = {"exchange": distlion.AllReduce(), **settings}
    n_ranks = 4 if "nodes" in settings else 2
    for at_construction, in_steps in run_workers(list_launches, n_ranks, settings, dtype):
        assert in_steps
        assert in_steps <= at_construction


def list_streams(rank: int, world_size: int) -> list[tuple[str, str, bool]]:
    """Return kernel, stream, and whether it was put behind backward, in a step with overlap."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        optimizer, params = make(device, overlap=True, bucket_elements=100)
        for step in range(4):
            optimizer.zero_grad()
            device.forget()
            with device.enter(device.make_stream(params[0].device)) as _:
                backward = device.stream.name
                run_backward(params, rank, step, device)
            optimizer.step()
        return [
            (launch.kernel, launch.stream, backward in launch.behind) for launch in device.launches
        ]


def test_votes_are_encoded_behind_backward_on_a_stream_of_their_own() -> None:
    for launches in run_workers(list_streams, 2):
        encoded = [each for each in launches if each[0] in ("encode_kernel", "blank_kernel")]
        committed = [each for each in launches if each[0] == "commit_kernel"]
        assert len(encoded) == 6
        assert {stream for _, stream, _ in encoded}.isdisjoint({"default"})
        assert all(is_behind for _, _, is_behind in encoded)
        assert [stream for _, stream, _ in committed] == ["default"] * 3


def list_what_comes_before(rank: int, world_size: int) -> tuple[set[str], set[str]]:
    """Return the streams of two backward passes, and those that encoding was put behind."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        optimizer, params = make(device, overlap=True, bucket_elements=10_000)
        device.forget()
        backward = set()
        for param in params:
            with device.enter(device.make_stream(param.device)):
                backward.add(device.stream.name)
                run_backward([param], rank, 0, device)
        optimizer.step()
        (encoded,) = [launch for launch in device.launches if launch.kernel == "encode_kernel"]
        return backward, set(encoded.behind)


def test_votes_are_encoded_behind_every_stream_that_had_a_gradient() -> None:
    for backward, before in run_workers(list_what_comes_before, 2):
        assert len(backward) == 3
        assert backward <= before


def edit_on_device(rank: int, world_size: int) -> Caught | None:
    """Write to the first gradient of rank 1 in the second step, so that no counter moves."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        optimizer, params = make(device, overlap=True, bucket_elements=100)
        for step in range(2):
            optimizer.zero_grad()
            run_backward(params, rank, step, device)
            if (rank, step) == (1, 1):
                params[0].grad.data.mul_(0.5)  # type: ignore[union-attr]
            found = caught(optimizer, optimizer.step)
        return found


def test_an_edit_of_a_gradient_on_a_device_ends_the_step_on_all_ranks() -> None:
    for found in run_workers(edit_on_device, 2):
        assert assert_raised(found, errors.GradientChangedError, "param.* rank 1").unchanged


def fail_on_device(rank: int, world_size: int, overlap: bool) -> tuple[Caught | None, list[Tensor]]:
    """Let the device of rank 1 fail in its third step."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        optimizer, params = make(device, overlap=overlap, timeouts=distlion.Timeouts(step_s=5))
        for step in range(2):
            optimizer.zero_grad()
            run_backward(params, rank, step, device)
            optimizer.step()
        optimizer.zero_grad()

        def step_on() -> None:
            device.forget()
            device.fail_at = 1 if rank == 1 else None
            run_backward(params, rank, 2, device)
            try:
                optimizer.step()
            finally:
                device.fail_at = None

        error = caught(optimizer, step_on)
        momenta = [optimizer.state[param]["exp_avg"].cpu() for param in params]
        return error, [*(param.detach().cpu() for param in params), *momenta]


@pytest.mark.parametrize(
    "overlap", in_tiers([False, True], lambda overlap: overlap), ids=["", "overlap"]
)
def test_a_device_that_fails_is_named_and_nothing_is_committed(overlap: bool) -> None:
    rows = run_workers(fail_on_device, 2, overlap)
    assert rows[1][0].kind == "DeviceError"
    assert "cuda:0 failed while votes on bucket 0 were encoded" in rows[1][0].text
    assert "illegal memory access" in rows[1][0].text
    assert rows[0][0].kind in ("PeerLostError", "StepTimeoutError")
    assert all(error.unchanged for error, _ in rows)
    assert all(map(torch.equal, rows[0][1][:3], rows[1][1][:3]))


def find_waits(rank: int, world_size: int) -> tuple[list[str], int]:
    """Return the waits of a step in which another rank's gradient is not finite."""
    from pretend_cuda import pretend_cuda

    with pretend_cuda() as device:
        optimizer, params = make(device, exchange=distlion.AllReduce(), nonfinite="skip")
        fault = faults.arm(rank=1, step=2, point="before_step", action=lambda _: None)
        for step in range(4):
            optimizer.zero_grad()
            run_backward(params, rank, min(step, 3), device)
            if rank == 1 and step == 2:
                grad = params[1].grad
                assert grad is not None
                grad[5] = float("inf")
            device.forget()
            optimizer.step()
        assert fault.fired == (2 if rank == 1 else 0)
        return device.waits, optimizer.committed_step


def test_a_step_that_is_skipped_for_a_value_on_the_device_is_skipped_by_all() -> None:
    assert run_workers(find_waits, 2) == [(["event"], 3)] * 2

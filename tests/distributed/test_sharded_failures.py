"""A step is one transaction over all shards: what happens on one of them, happens on all."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import distlion
from cluster import run_workers
from distlion import faults
from distributed.sharded_models import (
    build,
    digest,
    make_mesh,
    make_optimizer,
    run_backward,
    shard,
)
from tiers import in_tiers

pytestmark = pytest.mark.distributed

TIMEOUT_S = 3.0
N_RANKS = 4  # of 2 workers with 2 shards: 0 and 1 are one worker, 0 and 2 vote with each other


def catch(action: Callable[[], Any]) -> tuple[str, str, tuple[int, ...]]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), tuple(getattr(error, "culprits", ()))
    return "", "", ()


def poison(model: nn.Module, rank: int) -> None:
    """Let one shard of one worker have a NaN."""
    if rank == 1:
        next(model.parameters()).grad._local_tensor[0, 0] = torch.nan


# Two shards of one worker, the same shard of two workers, and three.
VICTIMS = ((0, 1), (1, 3), (0, 2, 3))


def train_with_nan(rank: int, world_size: int) -> dict[str, Any]:
    mesh, found = make_mesh(2, 2), {}
    for policy in ("raise", "skip", "abstain"):
        model = shard(build(), mesh["shard"])
        optimizer = make_optimizer(model, mesh, nonfinite=policy)
        before = digest(model)
        momenta = optimizer.state[next(model.parameters())]["exp_avg"]
        run_backward(model, 0, rank)
        poison(model, rank)
        caught = catch(optimizer.step)
        optimizer.zero_grad()
        stayed, voted = digest(model) == before, bool(momenta.any())
        run_backward(model, 1, rank)
        goes_on = catch(optimizer.step)
        found[policy] = caught, stayed, voted, goes_on, optimizer.committed_step, digest(model)
    for victims in VICTIMS:
        model = shard(build(), mesh["shard"])
        optimizer = make_optimizer(model, mesh)
        run_backward(model, 0, rank)
        if rank in victims:
            next(model.parameters()).grad._local_tensor[0, 0] = torch.nan
        found[str(victims)] = catch(optimizer.step)
    return found


@functools.cache
def with_nan() -> list[dict[str, Any]]:
    return run_workers(train_with_nan, N_RANKS)


class TestNan:
    def test_raise_is_raised_on_all_shards_with_one_culprit_and_nothing_moves(self):
        for rank, found in enumerate(with_nan()):
            (kind, text, culprits), stayed, _, goes_on, steps, _ = found["raise"]
            assert (kind, culprits, stayed) == ("NonFiniteError", (1,), True)
            assert text.startswith(f"[rank {rank}, step 0]")
            assert "0.weight is not finite on rank 1" in text
            assert (goes_on[0], steps) == ("", 1)

    @pytest.mark.parametrize("victims", VICTIMS)
    def test_all_ranks_name_all_culprits(self, victims):
        for found in with_nan():
            kind, _, culprits = found[str(victims)]
            assert (kind, culprits) == ("NonFiniteError", victims)

    def test_skip_skips_on_all_shards(self):
        for found in with_nan():
            caught, stayed, _, goes_on, steps, _ = found["skip"]
            assert (caught[0], stayed, goes_on[0], steps) == ("", True, "", 1)

    def test_abstain_takes_the_parameter_from_all_shards_of_that_worker(self):
        rows = [found["abstain"] for found in with_nan()]
        assert [row[4] for row in rows] == [2] * N_RANKS
        # The worker's momentum of the parameter stays, on both of its shards; the other one votes.
        assert [row[2] for row in rows] == [False, False, True, True]
        assert rows[0][-1] == rows[2][-1]
        assert rows[1][-1] == rows[3][-1]


def train_with_overflow(rank: int, world_size: int) -> tuple[bool, list[bytes]]:
    """Let a GradScaler tell one shard alone of an overflow; return whether this rank voted."""
    mesh = make_mesh(2, 2)
    model = shard(build(), mesh["shard"])
    optimizer = make_optimizer(model, mesh, nonfinite="abstain")
    run_backward(model, 0, rank)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(rank == 1))
    optimizer.step()
    momenta = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    return any(bool(each.any()) for each in momenta), digest(model)


@pytest.mark.slow
def test_an_overflow_that_one_shard_was_told_of_takes_the_vote_from_all_of_that_worker():
    found = run_workers(train_with_overflow, N_RANKS)
    assert [voted for voted, _ in found] == [False, False, True, True]
    assert found[0][1] == found[2][1]


def meet_differences(rank: int, world_size: int) -> dict[str, Any]:
    mesh, found = make_mesh(2, 2), {}

    def fresh(**options: Any) -> tuple[nn.Module, distlion.DistributedLion]:
        model = shard(build(), mesh["shard"])
        optimizer = make_optimizer(
            model, mesh, timeouts=distlion.Timeouts(step_s=TIMEOUT_S), **options
        )
        run_backward(model, 0, rank)
        return model, optimizer

    model, optimizer = fresh()
    if rank == 3:
        optimizer.param_groups[0]["lr"] = 0.5
    found["lr of one rank"] = catch(optimizer.step)

    model, optimizer = fresh(overlap=True, bucket_elements=64)
    found["a step given up on one shard"] = catch(
        optimizer.zero_grad if rank in (0, 2) else optimizer.step
    )

    model, optimizer = fresh()
    if rank in (2, 3):
        optimizer.param_groups[0]["step"] = 5
    found["another step of one worker"] = catch(optimizer.step)

    model, optimizer = fresh()
    if rank == 3:
        with torch.no_grad():
            next(model.parameters())._local_tensor[0, 0] += 1
    found["a shard that differs"] = catch(optimizer.step)

    found["settings at construction"] = catch(lambda: fresh(seed=rank))

    model, optimizer = fresh()  # last, as the error ends all optimizers of the group
    found["another call on one shard"] = catch(
        optimizer.verify_replicas if rank in (1, 3) else optimizer.step
    )
    return found


@functools.cache
def differences() -> list[dict[str, Any]]:
    return run_workers(meet_differences, N_RANKS)


@pytest.mark.parametrize(
    ("what", "kind", "text", "culprits"),
    [
        ("lr of one rank", "ConfigMismatchError", "lr of group 0: 0.5 on rank 3", (3,)),
        (
            "another call on one shard",
            "ConfigMismatchError",
            "optimizer 4 on ranks 1, 3; verify",
            (),
        ),
        ("a step given up on one shard", "StepMismatchError", "gave this step up", (0, 2)),
        ("another step of one worker", "StepMismatchError", "step 0, rank", ()),
        ("a shard that differs", "ReplicaMismatchError", "replicas differ in 0.weight", ()),
        ("settings at construction", "ConfigMismatchError", "seed: 0 on rank 0", ()),
    ],
)
def test_what_differs_on_one_shard_is_raised_on_all_ranks(what, kind, text, culprits):
    for found in differences():
        assert found[what][0] == kind
        assert text in found[what][1]
        assert found[what][2] == culprits


def fail_in_step(
    rank: int, world_size: int, how: int, point: str, policy: str, folder: str
) -> tuple[Any, int, float]:
    """Let rank 1 fail in the second step; return error, steps and seconds of the others."""
    scene, mesh = Path(folder), make_mesh(2, 2)
    model = shard(build(), mesh["shard"])
    optimizer = make_optimizer(
        model, mesh, timeouts=distlion.Timeouts(step_s=TIMEOUT_S), nonfinite=policy
    )

    def fail(_: object) -> None:
        (scene / "victim").write_text(str(os.getpid()))
        os.kill(os.getpid(), how)

    faults.arm(rank=1, step=1, point=point, action=fail)
    run_backward(model, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    run_backward(model, 1, rank)
    start_s = time.monotonic()
    caught = catch(optimizer.step)
    seconds = time.monotonic() - start_s
    if rank != 1 and how == signal.SIGSTOP:
        (scene / f"failed{rank}").touch()
        if len(list(scene.glob("failed*"))) == N_RANKS - 1:
            os.kill(int((scene / "victim").read_text()), signal.SIGCONT)
    return caught, optimizer.committed_step, seconds


POLICIES = ("raise", "skip", "abstain")
KILLS = in_tiers(
    [
        (point, policy)
        for point in ("before_step", "after_encode", "framed", "before_commit")
        for policy in POLICIES
    ],
    lambda case: case == ("framed", "raise"),
)


class TestAFailedShard:
    @pytest.mark.parametrize(("point", "policy"), KILLS)
    def test_all_others_name_the_rank_that_was_killed(self, point, policy, tmp_path):
        arguments = (signal.SIGKILL, point, policy, str(tmp_path))
        outcomes = run_workers(fail_in_step, N_RANKS, *arguments, may_die=True, timeout_s=30)
        assert (tmp_path / "victim").exists()
        assert type(outcomes[1]).__name__ == "WorkerDiedError"
        survivors = [outcomes[rank] for rank in (0, 2, 3)]
        # Past the agreement of its worker, the others may have committed: one step apart at most.
        assert {steps for _, steps, _ in survivors} <= {1, 2}
        if point != "before_commit":
            assert {steps for _, steps, _ in survivors} == {1}
        for (kind, _, culprits), steps, _ in survivors:
            assert (kind, culprits) == ("PeerLostError", (1,)) or (kind, steps) == ("", 2)

    @pytest.mark.slow
    @pytest.mark.parametrize("policy", in_tiers(POLICIES, lambda policy: policy == "raise"))
    def test_all_others_name_the_rank_that_was_stopped(self, policy, tmp_path):
        arguments = (signal.SIGSTOP, "before_step", policy, str(tmp_path))
        outcomes = run_workers(fail_in_step, N_RANKS, *arguments, may_die=True, timeout_s=60)
        assert (tmp_path / "victim").exists()
        for rank in (0, 2, 3):
            (kind, _, culprits), steps, _ = outcomes[rank]
            assert (kind, culprits, steps) == ("StepTimeoutError", (1,), 1)


def train_empty(rank: int, world_size: int, options: dict[str, Any]) -> tuple[bool, list[bytes]]:
    """Train one row of a weight: the second rank of each worker has none of it."""
    mesh = make_mesh(2, 2)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(3, 1), mesh=mesh["shard"])
    optimizer = make_optimizer(model, mesh, **options)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    is_empty = all(param.to_local().numel() == 0 for param in model.parameters())
    return is_empty, digest(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {
            "nonfinite": "abstain",
            "clip_norm": distlion.ClipNorm(0.1),
            "agreement": distlion.Agreement(every=1),
        },
        pytest.param({"overlap": True}, marks=pytest.mark.slow),
        pytest.param({"momentum_sync": distlion.MomentumSync(every=1)}, marks=pytest.mark.slow),
        pytest.param({"exchange": distlion.AllGather()}, marks=pytest.mark.slow),
        pytest.param({"exchange": distlion.ParameterServer()}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_whose_shards_are_all_empty_takes_part(options):
    found = run_workers(train_empty, N_RANKS, options)
    assert [is_empty for is_empty, _ in found] == [False, True, False, True]
    assert found[0][1] == found[2][1]


def differ_among_three(rank: int, world_size: int) -> tuple[str, str, tuple[int, ...]]:
    mesh = make_mesh(3, 2)
    model = shard(build(), mesh["shard"])
    optimizer = make_optimizer(model, mesh)
    run_backward(model, 0, rank)
    if rank == 3:
        with torch.no_grad():
            next(model.parameters())._local_tensor[0, 0] += 1
    return catch(optimizer.step)


@pytest.mark.slow
def test_ranks_of_other_shards_name_who_left_the_majority_too():
    for rank, (kind, text, culprits) in enumerate(run_workers(differ_among_three, 6)):
        assert (kind, culprits) == ("ReplicaMismatchError", (3,))
        assert ("in other shards" in text) == (rank % 2 == 0)


def construct_wrongly(rank: int, world_size: int) -> dict[str, Any]:
    mesh = make_mesh(2, 2)
    model = shard(build(), mesh["shard"])
    named = list(model.named_parameters())
    beside = ("beside", nn.Parameter(torch.ones(3)))
    voters = mesh["replicate"].get_group()
    crossed = [torch.distributed.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    whole = distlion.DistributedLion(build().named_parameters(), process_group=voters)

    def construct(params: Any = named, **options: Any) -> Callable[[], Any]:
        return lambda: distlion.DistributedLion(params, **options)

    return {
        "plain beside": catch(construct([*named, beside], process_group=voters)),
        "no voters": catch(construct()),
        "shards as voters": catch(construct(process_group=mesh["shard"].get_group())),
        "all as voters": catch(construct(process_group=torch.distributed.group.WORLD)),
        "other shards as voters": catch(construct(process_group=crossed[rank in (1, 2)])),
        "shards beside whole": catch(
            lambda: whole.add_param_group({"params": [(f"a {name}", each) for name, each in named]})
        ),
        "virtual workers": catch(lambda: distlion.VirtualCluster(named, workers=2)),
        "nodes": catch(construct(process_group=voters, nodes=distlion.Nodes(ranks_per_node=2))),
        "checkpoint": catch(
            lambda: distlion.save_checkpoint("/nowhere", model, make_optimizer(model, mesh))
        ),
    }


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("plain beside", "UnsupportedTypeError", "beside is a plain tensor beside DTensors"),
        ("no voters", "InvalidArgumentError", "no mesh dim replicates all of them"),
        ("shards as voters", "InvalidArgumentError", "parameters are cut over"),
        ("all as voters", "InvalidArgumentError", "give the group of a mesh dim"),
        ("other shards as voters", "InvalidArgumentError", "so hold different shards"),
        ("shards beside whole", "UnsupportedTypeError", "a 0.weight is a DTensor, and this"),
        ("virtual workers", "UnsupportedTypeError", "0.weight is a DTensor, and this optimizer"),
        ("nodes", "UnsupportedTypeError", "leave nodes out"),
        ("checkpoint", "UnsupportedTypeError", "get_optimizer_state_dict"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(what, kind, text):
    for found in wrongly_constructed():
        assert found[what][0] == kind
        assert text in found[what][1]


@functools.cache
def wrongly_constructed() -> list[dict[str, Any]]:
    return run_workers(construct_wrongly, N_RANKS)

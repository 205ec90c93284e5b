"""An orthogonalized matrix that is cut over ranks is whole in errors too: one transaction."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import distlion
from cluster import run_workers
from distlion import faults
from distlion.step import cut_matrices
from distributed.orthogonal_shards import build, make_optimizer, run_backward, shard
from distributed.sharded_models import digest, make_mesh
from tiers import in_tiers

pytestmark = pytest.mark.distributed

N_RANKS = 4  # of 2 workers with 2 shards: 0 and 1 are one worker, 0 and 2 vote with each other
WEIGHT = "hidden.1.weight"


def catch(action: Callable[[], Any]) -> tuple[str, str, tuple[int, ...]]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), tuple(getattr(error, "culprits", ()))
    return "", "", ()


def make(
    rank: int, victims: tuple[int, ...] = (), **options: Any
) -> tuple[torch.nn.Module, distlion.DistributedLion]:
    """Make a model; of the first gradient of a matrix the victims' shard has a NaN."""
    mesh = make_mesh(2, 2)
    model = shard(build(), mesh["shard"])
    remaining = [rank] if rank in victims else []

    def spoil(param: torch.Tensor) -> None:
        if remaining:
            remaining.clear()
            param.grad._local_tensor[0, 0] = torch.nan

    # Before the optimizer's own hook sees it.
    model.get_parameter(WEIGHT).register_post_accumulate_grad_hook(spoil)
    return model, make_optimizer(model, mesh, **options)


def train_with_nan(rank: int, world_size: int, overlap: bool) -> dict[str, Any]:
    found = {}
    for policy in ("raise", "skip", "abstain"):
        model, optimizer = make(rank, (1,), nonfinite=policy, overlap=overlap)
        before = digest(model)
        momentum = optimizer.state[model.get_parameter(WEIGHT)]["exp_avg"]
        run_backward(model, 0, rank)
        caught = catch(optimizer.step)
        optimizer.zero_grad()
        stayed, moved = digest(model) == before, bool(momentum.any())
        run_backward(model, 1, rank)
        again = catch(optimizer.step)
        steps = optimizer.committed_step
        found[policy] = caught, stayed, moved, again, steps, digest(model)
    model, optimizer = make(rank, (0, 1, 3), overlap=overlap)
    run_backward(model, 0, rank)
    found["three"] = catch(optimizer.step)
    return found


@functools.cache
def with_nan(overlap: bool) -> list[dict[str, Any]]:
    return run_workers(train_with_nan, N_RANKS, overlap)


OVERLAPS = pytest.mark.parametrize("overlap", in_tiers([False, True], lambda overlap: overlap))


@OVERLAPS
class TestNan:
    def test_raise_is_raised_on_all_ranks_with_one_culprit(self, overlap: bool) -> None:
        for rank, found in enumerate(with_nan(overlap)):
            (kind, text, culprits), stayed, _, again, steps, _ = found["raise"]
            assert (kind, culprits, stayed) == ("NonFiniteError", (1,), True)
            assert text.startswith(f"[rank {rank}, step 0]")
            assert f"{WEIGHT} is not finite on rank 1" in text
            assert (again[0], steps) == ("", 1)

    def test_skip_skips_on_all_ranks(self, overlap: bool) -> None:
        for found in with_nan(overlap):
            caught, stayed, _, again, steps, _ = found["skip"]
            assert (caught[0], stayed, again[0], steps) == ("", True, "", 1)

    def test_abstain_takes_the_matrix_from_all_ranks_of_that_worker(self, overlap: bool) -> None:
        rows = [found["abstain"] for found in with_nan(overlap)]
        assert [row[4] for row in rows] == [2] * N_RANKS
        # The worker's momentum of the matrix stays, on both of its shards; the other one votes.
        assert [row[2] for row in rows] == [False, False, True, True]
        assert rows[0][-1] == rows[2][-1]
        assert rows[1][-1] == rows[3][-1]


@OVERLAPS
def test_all_ranks_with_an_odd_shard_are_named(overlap: bool) -> None:
    for found in with_nan(overlap):
        assert found["three"][::2] == ("NonFiniteError", (0, 1, 3))


def lack_a_gradient(rank: int, world_size: int) -> tuple[bool, list[bytes]]:
    """Let one shard of a worker lack a gradient; return whether its momentum moved."""
    model, optimizer = make(rank)
    run_backward(model, 0, rank)
    if rank == 1:
        model.get_parameter(WEIGHT).grad = None
    optimizer.step()
    return bool(optimizer.state[model.get_parameter(WEIGHT)]["exp_avg"].any()), digest(model)


def test_a_worker_abstains_where_one_of_its_shards_lacks_a_gradient() -> None:
    found = run_workers(lack_a_gradient, N_RANKS)
    assert [moved for moved, _ in found] == [False, False, True, True]
    assert found[0][1] == found[2][1]
    assert found[1][1] == found[3][1]


def hear_of_overflow(rank: int, world_size: int) -> dict[str, Any]:
    """Let a GradScaler tell one shard alone of an overflow."""
    found = {}
    for policy in ("raise", "abstain"):
        model, optimizer = make(rank, nonfinite=policy)
        before = digest(model)
        run_backward(model, 0, rank)
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.found_inf = torch.tensor(float(rank == 1))
        caught = catch(optimizer.step)
        momenta = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
        voted = any(bool(each.any()) for each in momenta)
        found[policy] = caught[0], digest(model) == before, voted, digest(model)
    return found


@pytest.mark.slow
def test_an_overflow_that_one_shard_was_told_of_holds_for_its_worker() -> None:
    found = run_workers(hear_of_overflow, N_RANKS)
    assert [rows["raise"][:3] for rows in found] == [("", True, False)] * N_RANKS
    assert [rows["abstain"][2] for rows in found] == [False, False, True, True]
    assert found[0]["abstain"][-1] == found[2]["abstain"][-1]


def meet_trouble(rank: int, world_size: int) -> dict[str, Any]:
    """Return the error of each kind of trouble, and of the next step where one can go on."""
    found = {}

    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory for this product")

    for name in ("compute_direction", "orthogonalize_batch"):
        model, optimizer = make(rank)
        run_backward(model, 0, rank)
        before, kept = digest(model), getattr(cut_matrices, name)
        if rank == 1:
            setattr(cut_matrices, name, fail)
        caught = catch(optimizer.step)
        setattr(cut_matrices, name, kept)
        found[name] = caught, digest(model) == before, catch(optimizer.step)[0]

    model, optimizer = make(rank)
    run_backward(model, 0, rank)
    if rank == 3:
        optimizer.param_groups[0]["lr"] = 0.5
    found["lr of one rank"] = catch(optimizer.step), True, ""

    model, optimizer = make(rank, overlap=True, bucket_elements=300)
    run_backward(model, 0, rank)
    call = optimizer.zero_grad if rank in (0, 2) else optimizer.step
    found["given up"] = catch(call), True, ""

    model, optimizer = make(rank)
    run_backward(model, 0, rank)
    before = digest(model)
    flipped: list[bool] = []

    def flip(chunks: Any) -> None:
        """Flip a bit in the first chunk of the step, which has directions for rank 0."""
        if not flipped:
            flipped.append(True)
            chunks[0, -1] ^= 4

    faults.arm(rank=1, step=0, point="framed", action=flip)
    found["flipped"] = catch(optimizer.step), digest(model) == before, ""
    assert bool(flipped) == (rank == 1)
    model, optimizer = make(rank)  # last, as the error ends all optimizers of the group
    run_backward(model, 0, rank)
    call = optimizer.verify_replicas if rank in (1, 3) else optimizer.step
    found["another call"] = catch(call), True, ""
    return found


@functools.cache
def troubles() -> list[dict[str, Any]]:
    return run_workers(meet_trouble, N_RANKS, timeout_s=120)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("compute_direction", "StepInputError", "no memory for this product"),
        ("orthogonalize_batch", "StepInputError", "no memory for this product"),
        ("lr of one rank", "ConfigMismatchError", "lr of group 0: 0.5 on rank 3"),
        ("another call", "ConfigMismatchError", "on ranks 1, 3; verify_replicas()"),
        ("given up", "StepMismatchError", "gave this step up"),
        ("flipped", "CorruptFrameError", "rank 1"),
    ],
)
def test_trouble_on_one_rank_is_raised_on_all_and_nothing_moves(
    what: str, kind: str, text: str
) -> None:
    for found in troubles():
        caught, stayed, again = found[what]
        assert (caught[0], stayed, again) == (kind, True, "")
        assert text in caught[1]


def fail_in_the_gather(
    rank: int, world_size: int, how: int, folder: str
) -> tuple[tuple[str, str, tuple[int, ...]], int]:
    """Let rank 1 end or stop in the second step, before it has sent directions of matrices."""
    scene = Path(folder)
    model, optimizer = make(rank, timeouts=distlion.Timeouts(step_s=3.0))

    def fail(_: object) -> None:
        (scene / "victim").write_text(str(os.getpid()))
        os.kill(os.getpid(), how)

    # Votes are framed later: the first chunk of a step has directions.
    faults.arm(rank=1, step=1, point="framed", action=fail)
    run_backward(model, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    run_backward(model, 1, rank)
    caught = catch(optimizer.step)
    if rank != 1 and how == signal.SIGSTOP:
        (scene / f"failed{rank}").touch()
        if len(list(scene.glob("failed*"))) == N_RANKS - 1:
            os.kill(int((scene / "victim").read_text()), signal.SIGCONT)
    return caught, optimizer.committed_step


@pytest.mark.parametrize(
    ("how", "kind"),
    in_tiers(
        [(signal.SIGKILL, "PeerLostError"), (signal.SIGSTOP, "StepTimeoutError")],
        lambda case: case[0] == signal.SIGKILL,
    ),
)
def test_all_others_name_a_rank_that_fails_in_the_gather(
    how: int, kind: str, tmp_path: Path
) -> None:
    arguments = (how, str(tmp_path))
    outcomes = run_workers(fail_in_the_gather, N_RANKS, *arguments, may_die=True, timeout_s=60)
    assert (tmp_path / "victim").exists()
    for rank in (0, 2, 3):
        (found, _, culprits), steps = outcomes[rank]
        assert (found, culprits, steps) == (kind, (1,), 1)

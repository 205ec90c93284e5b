"""A pattern that passes on partial counts: same parameters, or a typed error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import distlion
from cluster import run_workers
from distlion.errors import InvalidArgumentError
from replay import Case, GroupSpec, assert_equal_to_the_bit, play_all
from two_levels import TwoLevels

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RULES = {"majority": distlion.MajorityVote(), "average": distlion.Average()}
CASES = [
    Case(
        name,
        (GroupSpec(rule, (1, 65, 513, 4097), lr=2e-3, weight_decay=0.1),),
        steps=3,
        seed=5,
        absent=True,
        exchange=distlion.AllReduce(),
    )
    for name, rule in RULES.items()
]


def test_votes_counted_in_parts_move_parameters_as_votes_counted_at_once() -> None:
    parts = [replace(case, name=f"{case.name}/parts", exchange=TwoLevels()) for case in CASES]
    for outcomes in run_workers(play_all, 3, (*CASES, *parts)):
        for case in CASES:
            in_parts_too = outcomes[f"{case.name}/parts"]
            assert_equal_to_the_bit(outcomes[case.name], in_parts_too, case.name)


def doubled(case: Case) -> tuple[Case, ...]:
    doubling = replace(case, exchange=distlion.RecursiveDoubling())
    return (
        replace(doubling, name=f"{case.name}/doubled"),
        replace(doubling, name=f"{case.name}/in buckets", overlap=True, bucket_elements=600),
    )


# Of 5 workers one is beyond the power of two: it hands its vote over, and is idle in between.
@pytest.mark.parametrize("world_size", [2, 5])
def test_recursive_doubling_moves_parameters_as_all_reduce_does(world_size: int) -> None:
    variants = [each for case in CASES for each in doubled(case)]
    for outcomes in run_workers(play_all, world_size, (*CASES, *variants), timeout_s=120):
        for case in CASES:
            assert outcomes[case.name].error is None, outcomes[case.name].error
            for variant in doubled(case):
                assert_equal_to_the_bit(outcomes[case.name], outcomes[variant.name], variant.name)


def vote_in_nodes(rank: int, world_size: int) -> list[torch.Tensor]:
    """Train with each pattern; the small parameter leaves the second rank of a node no part."""
    ends = []
    for exchange in (distlion.AllReduce(), distlion.RecursiveDoubling()):
        generator = torch.Generator().manual_seed(rank)
        params = [torch.nn.Parameter(torch.ones(n)) for n in (30, 9001)]
        optimizer = distlion.DistributedLion(
            params,
            lr=1e-2,
            exchange=exchange,
            nodes=distlion.Nodes(ranks_per_node=2),
            bucket_elements=64,
        )
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
        ends.append(torch.cat([param.detach() for param in params]))
    return ends


def test_nodes_vote_by_recursive_doubling() -> None:
    for by_all_reduce, by_doubling in run_workers(vote_in_nodes, 6, timeout_s=120):
        assert torch.equal(by_all_reduce, by_doubling)
        assert (by_doubling != 1).all()


def refuse(rank: int, world_size: int) -> list[str]:
    """Make optimizers whose votes, or momenta, cannot be counted in parts."""
    told = []
    for options in (
        {"aggregation": distlion.FullPrecision()},
        {"aggregation": distlion.FeedbackVote()},
        {"momentum_sync": distlion.MomentumSync(every=2)},
    ):
        param = torch.nn.Parameter(torch.ones(3))
        with pytest.raises(InvalidArgumentError) as refused:
            distlion.DistributedLion(
                [param],
                exchange=distlion.RecursiveDoubling(),
                **options,  # type: ignore[arg-type]
            )
        told.append(str(refused.value))
    return told


def test_recursive_doubling_refuses_floats_by_name_at_construction() -> None:
    for told in run_workers(refuse, 2):
        for text, name in zip(
            told, ("FullPrecision", "FeedbackVote", "momentum_sync"), strict=True
        ):
            assert "RecursiveDoubling()" in text
            assert name in text
            assert "AllReduce()" in text


def count_floats_in_parts(rank: int, world_size: int) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = distlion.DistributedLion(
        [param], aggregation=distlion.FullPrecision(), exchange=TwoLevels()
    )
    param.grad = torch.ones(3)
    optimizer.step()


def test_floats_counted_in_parts_are_refused() -> None:
    for error in run_workers(count_floats_in_parts, 2, outcomes=True):
        assert isinstance(error, InvalidArgumentError)

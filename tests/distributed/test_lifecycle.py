"""Whether an optimizer can go on: alive after what all raise, torn after a commit cut short."""

from __future__ import annotations

import pytest
import torch

from cluster import run_workers
from distlion import errors
from distlion.voting import BucketVote
from failures import caught, make_optimizer, set_grads


def cut_commit_short(rank: int, world_size: int) -> tuple[str, str, str]:
    """Interrupt the commit of the second of two buckets; what state_dict() and step() raise."""
    optimizer = make_optimizer(bucket_elements=1)
    set_grads(optimizer, 0, rank)
    commit, committed = BucketVote.commit, []

    def interrupted(vote: BucketVote, inputs: object) -> None:
        committed.append(vote)
        if len(committed) == 2:
            raise KeyboardInterrupt
        commit(vote, inputs)  # type: ignore[arg-type]

    BucketVote.commit = interrupted  # type: ignore[method-assign,assignment]
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    after = optimizer.param_groups[0]["params"]
    moved = [not torch.equal(before[index], param) for index, param in enumerate(after)]
    assert moved == [True, False]
    saved, stepped = caught(None, optimizer.state_dict), caught(None, optimizer.step)
    assert saved is not None
    assert stepped is not None
    return saved.kind, saved.text, stepped.kind


@pytest.mark.distributed
def test_a_commit_cut_short_leaves_nothing_to_save_and_nothing_to_go_on_with() -> None:
    for kind, text, stepped in run_workers(cut_commit_short, 2):
        assert kind == errors.CheckpointError.__name__
        assert "between two steps" in text
        assert stepped == errors.ProcessGroupError.__name__


@pytest.mark.parametrize("is_recoverable", [True, False])
def test_an_error_says_whether_training_may_go_on(is_recoverable: bool) -> None:
    error = errors.NonFiniteError("a", rank=1, step=2, is_recoverable=is_recoverable)
    assert error.is_recoverable is is_recoverable
    assert not errors.PeerLostError("a").is_recoverable

"""A description names what differs, and its digest differs where it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distlion import DistributedLion, MajorityVote
from distlion.errors import InvalidArgumentError
from distlion.peers.fingerprint import Fingerprint, FixedGroups
from distlion.step.hyperparameters import describe_hyperparameters, describe_steps

GROUP: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.99),
    "weight_decay": 0.0,
    "aggregation": MajorityVote(),
    "step": 0,
    "params": [],
}


def make_params() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3), requires_grad=False)


def fixed_groups() -> FixedGroups:
    fixed = FixedGroups()
    fixed.note([GROUP], {})
    return fixed


def digest(found: Fingerprint, groups: list[dict[str, Any]]) -> int:
    changing = describe_hyperparameters(groups) + describe_steps(groups)
    return found.digest(changing, found.list_toggled(groups))


@pytest.mark.parametrize("change", [{"lr": 2e-3}, {"step": 1}, {"betas": (0.8, 0.99)}, {}])
def test_digests_differ_where_lines_do(change: dict[str, Any]) -> None:
    found = Fingerprint(["a: 1"], {}, fixed_groups())
    groups, other = [GROUP], [GROUP | change]
    assert (found.list_lines(groups) != found.list_lines(other)) is bool(change)
    assert (digest(found, groups) != digest(found, other)) is bool(change)


def test_what_is_fixed_tells_in_both() -> None:
    one, other = (
        Fingerprint(["a: 1"], {}, fixed_groups()),
        Fingerprint(["a: 2"], {}, fixed_groups()),
    )
    assert one.list_lines([GROUP])[0] == "a: 1"
    assert digest(one, [GROUP]) != digest(other, [GROUP])


def test_a_unfrozen_parameter_is_named() -> None:
    trained, frozen = make_params()
    found = Fingerprint([], {trained: "trained", frozen: "frozen"}, fixed_groups())
    found.check_unchanged([GROUP])
    before = found.list_lines([GROUP]), digest(found, [GROUP])
    frozen.requires_grad_()
    assert found.list_lines([GROUP]) == [*before[0], "no longer frozen: frozen"]
    assert digest(found, [GROUP]) != before[1]
    with pytest.raises(InvalidArgumentError, match="frozen was frozen"):
        found.check_unchanged([GROUP])


def test_a_group_is_not_added_beside_a_unfrozen_parameter() -> None:
    trained, frozen = make_params()
    optimizer = DistributedLion([("trained", trained), ("frozen", frozen)], lr=1e-3)
    frozen.requires_grad_()
    added = nn.Parameter(torch.zeros(2))
    with pytest.raises(InvalidArgumentError, match="frozen was frozen"):
        optimizer.add_param_group({"params": [("added", added)]})
    assert len(optimizer.param_groups) == 1
    assert added not in optimizer.state

    frozen.requires_grad_(False)
    trained.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.committed_step == 1


def test_a_state_is_not_loaded_beside_a_unfrozen_parameter() -> None:
    trained, frozen = make_params()
    optimizer = DistributedLion([("trained", trained), ("frozen", frozen)], lr=1e-3)
    state = optimizer.state_dict()
    state["state"] = {index: {"exp_avg": torch.ones(3)} for index in range(2)}
    frozen.requires_grad_()
    with pytest.raises(InvalidArgumentError, match="frozen was frozen"):
        optimizer.load_state_dict(state)
    assert "exp_avg" not in optimizer.state[frozen]
    assert not optimizer.state[trained]["exp_avg"].any()

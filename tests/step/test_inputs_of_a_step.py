"""What a step refuses in a hurry is what ``VotingParam.check`` refuses with words, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

import distlion
from distlion.errors import DistlionError
from distlion.step.param import Records, VotingParam, take_gradients

RULES = {"one tensor kept": distlion.MajorityVote(), "two kept": distlion.FeedbackVote()}

HAS_MAKES = hasattr(Tensor, "__dlpack_c_exchange_api__")
"""True if torch has the table that makes are looked up in; torch before 2.10 has none."""


def free(tensor: Tensor) -> Tensor:
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed


STRIDED: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda t: t.clone(),
    "dtype": lambda t: t.double(),
    "integers": lambda t: t.int(),
    "shape": lambda t: torch.zeros(3, 4),
    "one more dim": lambda t: torch.zeros(1, 4, 3),
    "empty": lambda t: torch.zeros(0, 3),
    "device": lambda t: torch.zeros(4, 3, device="meta"),
    "freed": free,
    "not contiguous": lambda t: t.t().contiguous().t(),
    "every other": lambda t: torch.zeros(4, 6)[:, ::2],
    "overlapping": lambda t: torch.zeros(1, 3).expand(4, 3),
    "negative bit": torch._neg_view,
}
CHANGES = {
    **STRIDED,
    "sparse": lambda t: t.to_sparse(),
    "sparse of another shape": lambda t: torch.zeros(3, 4).to_sparse(),
}
KEPT: dict[str, Callable[[Tensor], Any]] = {
    "gone": lambda t: None,
    "no tensor": lambda t: [0.0] * 12,
    "a parameter": nn.Parameter,
}


class Lenient(nn.Parameter):
    """A parameter that any gradient may be assigned to, as its ``.data`` may become any."""

    grad: Any = None


SEEN: dict[VotingParam, Records] = {}
"""Records that an earlier step has found sound, after which it takes all gradients in one call."""


def make_record(rule: str) -> tuple[nn.Parameter, dict[str, Any], VotingParam]:
    """Return a parameter with a gradient, its state and its record."""
    param = Lenient(torch.arange(12.0).view(4, 3))
    optimizer = distlion.DistributedLion([("weight", param)], aggregation=RULES[rule])
    param.grad = torch.arange(12.0).view(4, 3)
    record = optimizer._list_trainable()[0]
    SEEN[record] = Records((record,))
    take_gradients(SEEN[record])
    assert (SEEN[record].makes is not None) == (HAS_MAKES and rule == "one tensor kept")
    return param, optimizer.state[param], record


def outcome_of(function: Callable[[], object]) -> tuple[str, str]:
    """Name the error that a call raises, and what it says; nothing where it raises none."""
    try:
        function()
    except DistlionError as error:
        return type(error).__name__, str(error)
    return "", ""


def compare(record: VotingParam, what: str) -> bool:
    """Assert that both ways refuse the same with the same words; return whether they do."""
    __tracebackhide__ = True  # pytest would print what has no memory
    with torch.no_grad():
        said = outcome_of(record.check)
        for records in ([record], SEEN[record]):
            assert outcome_of(lambda records=records: take_gradients(records)) == said, what
            if said == ("", ""):
                (taken,), expected = take_gradients(records), record.grad()
                assert (taken is None) == (expected is None), what
                assert taken is None or torch.equal(taken, expected), what
                assert taken is None or (taken.is_contiguous() and not taken.is_neg()), what
    return said != ("", "")


@pytest.mark.parametrize("rule", RULES)
def test_a_step_refuses_the_parameters_that_check_refuses(rule: str) -> None:
    refused = set()
    for change, make in STRIDED.items():
        param, _, record = make_record(rule)
        swap_tensors(param, nn.Parameter(make(param.detach()), requires_grad=False))
        if compare(record, change):
            refused.add(change)
    assert refused == STRIDED.keys() - {"nothing", "not contiguous", "every other", "negative bit"}


@pytest.mark.parametrize("rule", RULES)
def test_a_step_refuses_the_gradients_that_check_refuses(rule: str) -> None:
    refused = set()
    for change, make in CHANGES.items():
        param, _, record = make_record(rule)
        param.grad = make(param.grad)
        if compare(record, change):
            refused.add(change)
    sound = {"nothing", "not contiguous", "every other", "negative bit", "overlapping"}
    assert refused == STRIDED.keys() - sound  # what is sparse is refused elsewhere, as such


@pytest.mark.parametrize("rule", RULES)
def test_a_step_refuses_the_momenta_and_estimates_that_check_refuses(rule: str) -> None:
    for key in make_record(rule)[1]:
        refused = set()
        for change, make in {**CHANGES, **KEPT}.items():
            _, state, record = make_record(rule)
            with torch.no_grad():
                state[key] = make(state[key])
            if compare(record, f"{key}: {change}"):
                refused.add(change)
        assert refused >= {"dtype", "shape", "device", "sparse", "freed", "gone", "no tensor"}
        assert not refused & {"nothing", "a parameter"}


@pytest.mark.parametrize("rule", RULES)
def test_a_step_refuses_the_states_that_check_refuses(rule: str) -> None:
    param, state, record = make_record(rule)
    param.grad = None
    assert not compare(record, "no gradient")
    for key in list(state):
        value = state.pop(key)
        assert compare(record, f"no {key}")
        state["another key"] = value
        assert compare(record, f"another key in place of {key}")
        state[key] = state.pop("another key")
    assert not compare(record, "what it was")
    state["of somebody else"] = torch.zeros(1)
    assert not compare(record, "one more key")
    record.state.pop(param)  # type: ignore[attr-defined]
    assert compare(record, "no state")

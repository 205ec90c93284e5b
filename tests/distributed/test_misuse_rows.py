"""Misuse that must get a clear error, row by row; what other files test is linked from here.

row  misuse
  1  params as a set
  2  the same tensor twice in one group
  3  tied weights across groups, or through the model
  4  an empty list, empty groups, everything frozen
  5  no leaf, no tensor, a bare tensor
  6  a sparse gradient
  7  complex parameters
  8  integer, bool and float8 parameters
  9  16-bit parameters that lr does not move
 10  lr out of range, tensors for lr
 11  betas out of range
 12  weight_decay out of range
 13  shapes, dtypes, number or order that differ between ranks
 14  gradients that some ranks lack
 15  gradients that all ranks lack
 16  requires_grad toggled, parameters added later
 17  memory that is not contiguous, or overlaps
 18  devices that the process group cannot carry
 19  meta, quantized and sharded parameters
 20  a process group that is missing, destroyed or replaced
 21  a rank outside of the group; one worker
 22  more workers than can be counted
 23  a model inside DDP
 24  a step in a fork
 25  a step after a failed one
 26  GradScaler
 27  different numbers of batches
 28  states that do not fit
 29  closures, two threads, a step within a step
 30  hyperparameters of one rank
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import distlion
from cluster import run_workers
from distlion import errors
from failures import (
    Caught,
    assert_all_raised,
    assert_raised,
    caught,
    make_optimizer,
    make_params,
    set_grads,
)

pytestmark = pytest.mark.distributed

ARGUMENT = "test_arguments.py::test_argument_is_refused_on_every_rank"
DISAGREE = "test_disagreement.py::test_disagreement_at_construction_is_an_error_on_every_rank"
KINDS = "test_parameter_kinds.py"
THAW = "test_out_of_turn.py::test_a_parameter_unfrozen_on"
GROUP = "test_process_group.py"
LATER = "test_disagreement.py::test_rank_with_another_setting_at_one_step_is_an_error_on_every_rank"

ROWS: dict[int, tuple[str, ...]] = {
    1: (f"{ARGUMENT}[set]",),
    2: (f"{ARGUMENT}[same tensor twice]",),
    3: (
        f"{ARGUMENT}[same tensor in two groups]",
        f"{KINDS}::test_tied_weights_vote_once_and_stay_tied",
    ),
    4: (f"{ARGUMENT}[empty list]", f"{ARGUMENT}[all frozen]"),
    5: tuple(f"{ARGUMENT}[{name}]" for name in ("bare tensor", "not a tensor", "not a leaf")),
    6: ("test_nonfinite.py::test_sparse_gradient_is_an_error_on_every_rank",),
    7: (f"{ARGUMENT}[complex]",),
    8: tuple(f"{ARGUMENT}[{name}]" for name in ("integer", "bool", "float8", "float64")),
    10: (
        *(
            f"{ARGUMENT}[{name}]"
            for name in (
                "negative lr",
                "nan lr",
                "infinite lr",
                "lr beyond float32",
                "lr beyond float",
                "lr tensor beyond float32",
                "lr of two elements",
            )
        ),
        "test_out_of_turn.py::test_tensor_learning_rates_that_print_alike_still_differ",
        "test_arguments.py::test_learning_rate_zero_is_legal_and_moves_the_momentum_only",
    ),
    11: tuple(
        f"{ARGUMENT}[{name}]" for name in ("beta of 1", "negative beta", "nan beta", "three betas")
    ),
    12: tuple(
        f"{ARGUMENT}[{name}]"
        for name in (
            "negative weight decay",
            "nan weight decay",
            "decay past zero",
            "weight decay beyond float32",
        )
    ),
    13: tuple(
        f"{DISAGREE}[{name}]"
        for name in ("shape", "number of parameters", "order", "same shapes in another order")
    ),
    16: (
        f"{THAW}_one_rank_is_an_error_on_every_rank",
        f"{THAW}_all_ranks_is_refused_by_name",
        "test_out_of_turn.py::test_a_call_on_one_rank_while_others_step_is_an_error_on_every_rank"
        "[add_param_group]",
    ),
    17: (
        *(f"{ARGUMENT}[{name}]" for name in ("expanded", "strided onto itself", "one storage")),
        f"{KINDS}::test_layout_in_memory_changes_no_bit",
        f"{KINDS}::test_expanded_gradient_votes_at_every_coordinate",
    ),
    19: tuple(f"{ARGUMENT}[{name}]" for name in ("meta", "quantized", "sharded")),
    20: (
        f"{GROUP}::test_step_after_destroying_the_group_is_an_error_on_every_rank",
        f"{GROUP}::test_step_after_replacing_the_group_is_an_error_on_every_rank",
        f"{GROUP}::test_world_size_without_a_group_is_an_error",
        f"{GROUP}::test_group_that_appears_after_construction_is_an_error_on_every_rank",
    ),
    21: (f"{GROUP}::test_rank_outside_of_the_given_group_is_an_error_there",),
    23: (
        "test_identical_gradients.py::test_identical_gradients_are_warned_of_once_with_both_causes",
        "test_identical_gradients.py::test_ddp_that_averages_gradients_is_warned_of",
    ),
    25: (f"{GROUP}::test_group_is_dead_after_a_peer_was_lost",),
    26: (
        "test_nonfinite.py::test_infinity_found_by_one_grad_scaler_makes_all_ranks_skip",
        "test_nonfinite.py::"
        "test_a_grad_scaler_with_its_defaults_searches_its_scale_and_other_steps_raise",
    ),
    27: (
        "test_disagreement.py::test_rank_that_does_not_come_ends_the_others_at_the_step_timeout",
        "test_disagreement.py::test_rank_that_lets_its_optimizer_go_is_named_by_the_others_at_once",
        "test_culprits.py::test_a_rank_that_kept_the_store_and_left_after_a_failure_is_not_blamed",
    ),
    28: (
        "test_resume.py::test_state_that_does_not_fit_is_refused_and_changes_nothing",
        "test_disagreement.py::"
        "test_states_of_different_steps_are_an_error_on_every_rank_when_loaded",
        "test_out_of_turn.py::test_states_with_different_rules_are_refused_on_every_rank",
    ),
    29: (
        "test_optimizer_interface.py::"
        "test_closure_is_called_once_for_each_step_and_its_loss_returned",
    ),
    30: (f"{LATER}[lr]",),
}
"""Tests of a row in other files of this folder; the others are named ``test_row_N_``, below and in
test_misuse_steps.py."""


@pytest.mark.parametrize("row", range(1, 31))
def test_each_row_has_tests(row: int) -> None:
    here = Path(__file__)
    texts = [file.read_text() for file in (here, here.parent / "test_misuse_steps.py")]
    assert row in ROWS or any(f"\ndef test_row_{row:02}_" in text for text in texts)
    for test in ROWS.get(row, ()):
        file, name, case = re.fullmatch(r"(\w+\.py)::(\w+)(?:\[(.+)\])?", test).groups()  # type: ignore[union-attr]
        text = (here.parent / file).read_text()
        assert f"\ndef {name}(" in text, test
        assert case is None or f'"{case}"' in text, test


def make_partly_empty(rank: int, world_size: int) -> dict[str, Caught | None]:
    def make(*groups: Any) -> Any:
        return lambda: make_optimizer([{"params": list(group)} for group in groups])

    first, second = (param for _, param in make_params())
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    is_odd = rank == 1
    return {
        "empty everywhere": caught(None, make([], [])),
        "one empty group": caught(None, lambda: step_once(make([first], [])(), rank)),
        "empty on one rank": caught(None, make([first], [] if is_odd else [second])),
        "all empty on one rank": caught(None, make([] if is_odd else [first])),
        "frozen on one rank": caught(None, make([frozen if is_odd else nn.Parameter(frozen)])),
    }


def step_once(optimizer: distlion.DistributedLion, rank: int) -> None:
    set_grads(optimizer, 0, rank)
    optimizer.step()
    assert optimizer.committed_step == 1


def test_row_04_groups_may_be_empty_on_all_ranks_or_on_none() -> None:
    for outcome in run_workers(make_partly_empty, 3):
        assert_raised(outcome["empty everywhere"], errors.InvalidArgumentError, "nothing to vote")
        assert outcome["one empty group"] is None
        for name, what in (
            ("empty on one rank", "parameter 0 of group 1: .*, but not on rank 1"),
            ("all empty on one rank", "parameter 0 of group 0: .*, but not on rank 1"),
            ("frozen on one rank", "frozen on rank 1"),
        ):
            found = assert_raised(outcome[name], errors.ConfigMismatchError, what)
            assert found.culprits == (1,)


def collect_warnings(rank: int, world_size: int) -> dict[str, list[tuple[str, str]]]:
    found = {}
    for name, dtype, lr, options in (
        ("bfloat16", torch.bfloat16, 1e-4, {}),
        ("float16", torch.float16, 1e-4, {}),
        ("float32", torch.float32, 1e-4, {}),
        ("large lr", torch.bfloat16, 1e-2, {}),
        ("warm-up", torch.bfloat16, 0.0, {}),
        (
            "stochastic",
            torch.bfloat16,
            1e-4,
            {"precision": distlion.Precision(rounding="stochastic")},
        ),
    ):
        # A few large weights, as of a norm, do not make an update be lost elsewhere.
        groups = [{"params": [nn.Parameter(torch.full((n,), 0.5, dtype=dtype))]} for n in (70, 130)]
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            make_optimizer(groups, lr=lr, **options)
        found[name] = [(type(w.message).__name__, str(w.message)) for w in caught_warnings]
    return found


def test_row_09_lr_that_moves_no_16_bit_weight_is_warned_of_once_on_every_rank() -> None:
    for found in run_workers(collect_warnings, 2):
        for dtype, remedy in (
            ("bfloat16", "Precision(rounding='stochastic') or float32 parameters"),
            ("float16", "use float32 parameters"),
        ):
            assert len(found[dtype]) == 1
            kind, text = found[dtype][0]
            assert kind == errors.LostUpdatesWarning.__name__
            assert f"lr=0.0001 of group 0 moves few of its {dtype} parameters" in text
            assert remedy in text
        for name in ("float32", "large lr", "warm-up", "stochastic"):
            assert found[name] == []


def swap_unnamed(rank: int, world_size: int, seeds_differ: bool) -> Caught | None:
    generator = torch.Generator().manual_seed(5 + rank * seeds_differ)
    params = [nn.Parameter(torch.randn(70, generator=generator)) for _ in range(3)]
    if rank == 1:
        params[1:] = reversed(params[1:])
    return caught(None, lambda: step_once(make_optimizer(params), rank))


def test_row_13_unnamed_parameters_in_another_order_are_refused_by_their_values() -> None:
    outcomes = run_workers(swap_unnamed, 3, False)
    for found in outcomes:
        raised = assert_raised(
            found,
            errors.ConfigMismatchError,
            "what is parameter 1 of group 0, shape .70,. on rank 0 is parameter 2",
            "on rank 1",
            "named_parameters",
        )
        assert raised.culprits == (1,)
    # The limit: of values that differ anyway, nobody can know the order.
    assert run_workers(swap_unnamed, 3, True) == [None] * 3


def train_on_another_backend(rank: int, world_size: int, store: str) -> list[float]:
    dist.init_process_group(
        "cuda:gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    model = nn.BatchNorm1d(70)
    optimizer = make_optimizer(model.named_parameters(), lr=1e-2)
    assert dist.get_backend_config() == "cuda:gloo"
    for step in range(3):
        model.weight.grad = torch.full((70,), float(step - rank))
        optimizer.step()
    optimizer.verify_replicas()
    assert model.running_mean is not None
    model.running_mean.fill_(rank)
    distlion.average_buffers(model)
    distlion.save_checkpoint(f"{store}-checkpoint", model, optimizer)
    distlion.load_checkpoint(f"{store}-checkpoint", model, optimizer)
    return [*model.weight.tolist(), *model.running_mean.tolist()]


def test_row_18_a_group_for_another_device_lends_its_store_to_one_of_the_host(
    tmp_path: Path,
) -> None:
    """As one that was made for NCCL alone does."""
    store = str(tmp_path / "store")
    rows = run_workers(train_on_another_backend, 2, store, process_group=False)
    assert rows[0] == rows[1]
    assert rows[0][70:] == [0.5] * 70


def train_alone(rank: int, world_size: int) -> list[bool]:
    params = [[nn.Parameter(torch.full((n,), 0.5)) for n in (70, 130)] for _ in range(2)]
    voting = make_optimizer(params[0], lr=1e-2, weight_decay=0.1)
    plain = distlion.Lion(params[1], lr=1e-2, weight_decay=0.1)
    for step in range(3):
        for optimizer in (voting, plain):
            set_grads(optimizer, step, rank)
            optimizer.step()
    return [torch.equal(a, b) for a, b in zip(*params, strict=True)]


def test_row_21_a_group_of_one_worker_trains_as_lion() -> None:
    assert run_workers(train_alone, 1) == [[True, True]]


def make_among_too_many(rank: int, world_size: int) -> Caught | None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=1 << 16, store=FakeStore())
    return caught(None, make_optimizer)


def test_row_22_more_workers_than_headers_count_are_refused() -> None:
    assert_all_raised(
        run_workers(make_among_too_many, 2, process_group=False),
        errors.ProcessGroupError,
        "65536 workers",
        "65535 at most",
    )

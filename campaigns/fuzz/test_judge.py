"""The oracle of random programs notices what is not as it must be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuzz.campaign import draw_program, shrink
from fuzz.equations import Equations
from fuzz.judge import DIED, HUNG, Outcome, attempt, compare, judge
from fuzz.operations import forward, step
from fuzz.players import Model, Virtual, odd_defaults
from fuzz.program import Op, Program, Setup
from fuzz.workers import Crew

SETUP = Setup(is_real=False)
STEP = Op("step", {"key": 1})
REFUSED = Op("duplicate", {"how": "copy"})
FAULT = Op("fault", {"victim": 1, "fault": "kill", "key": 1})

HELD = {"committed_step": "3", "p0": "bits"}
OK = Outcome(None, False, "", [HELD], [HELD], False, 0.1)
ERROR = replace(OK, error="StepTimeoutError", is_typed=True, is_dead=True)
MOVED = replace(OK, after=[{"committed_step": "4", "p0": "other bits"}])
VICTIM = replace(OK, error=DIED, before=[], after=[])

WRONG: dict[str, tuple[Op, tuple[Outcome, ...], str]] = {
    "untyped": (REFUSED, (replace(ERROR, error="KeyError", is_typed=False),) * 2, "none of ours"),
    "different": (REFUSED, (ERROR, replace(ERROR, error="PeerLostError")), "end differently"),
    "one succeeds": (STEP, (OK, ERROR), "end differently"),
    "refused": (STEP, (ERROR, ERROR), "should succeed"),
    "accepted": (REFUSED, (OK, OK), "should be refused"),
    "changed": (REFUSED, (ERROR, replace(ERROR, after=MOVED.after)), "yet it changed"),
    "half dead": (REFUSED, (ERROR, replace(ERROR, is_dead=False)), "some are dead"),
    "hangs": (STEP, (OK, replace(OK, error=HUNG)), "rank 1 hangs"),
    "half committed": (FAULT, (replace(MOVED, error="PeerLostError"), OK), "some have committed"),
    "late": (FAULT, (replace(ERROR, seconds=9.0), VICTIM), "hears of it after"),
    "interrupted alone": (
        FAULT,
        (OK, replace(MOVED, error="KeyboardInterrupt", is_typed=False)),
        "some have committed",
    ),
    "not heard of": (FAULT, (MOVED, VICTIM), "the others end with"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_outcome_that_was_not_promised_is_noticed(name: str) -> None:
    op, outcomes, expected = WRONG[name]
    assert any(expected in violation for violation in judge(SETUP, op, outcomes))


def test_outcomes_that_were_promised_pass() -> None:
    assert judge(SETUP, STEP, (MOVED, MOVED)) == []
    assert judge(SETUP, REFUSED, (ERROR, ERROR)) == []
    assert judge(SETUP, FAULT, (ERROR, VICTIM)) == []
    interrupted = replace(MOVED, error="KeyboardInterrupt", is_typed=False)
    assert judge(SETUP, FAULT, (MOVED, interrupted)) == []


def test_who_fails_before_a_step_is_waited_for_until_the_timeout() -> None:
    before = Op("fault", {"victim": 1, "fault": "raise before", "key": 1})
    failed = replace(OK, error="PlannedError")
    assert judge(SETUP, before, (replace(ERROR, seconds=11.0), failed)) == []
    (late,) = judge(SETUP, before, (replace(ERROR, seconds=16.0), failed))
    assert "hears of it after 16.0 s" in late


def test_a_difference_from_the_model_is_noticed(tmp_path: Path) -> None:
    virtual, model = Virtual(SETUP, tmp_path), Equations(SETUP, tmp_path)
    step(model, {"key": 1})
    assert compare([attempt(virtual, STEP)], model) == []
    step(model, {"key": 2})
    differences = compare([attempt(virtual, Op("step", {"key": 3}))], model)
    assert [text.split(" is ")[0] for text in differences] == ["worker 0", "worker 1"]


def test_a_buffer_of_one_worker_that_differs_from_the_model_is_noticed(tmp_path: Path) -> None:
    model = Virtual(SETUP, tmp_path)
    seen_alone = attempt(Virtual(SETUP, tmp_path), Op("forward", {"key": 1, "rank": 1}))
    (difference,) = compare([seen_alone], model)
    assert difference.startswith("worker 1 is not as the model in ['n_seen', 'norm.num_batches_")


def test_averages_are_means_of_statistics_and_the_first_ones_of_all_else(tmp_path: Path) -> None:
    player = Virtual(SETUP, tmp_path)
    forward(player, {"key": 1, "rank": None})
    first, second = (player.buffers(worker) for worker in player.workers)
    player.average()
    for worker in player.workers:
        found = player.buffers(worker)
        mean = (first["norm.running_mean"].double() + second["norm.running_mean"].double()) / 2
        assert torch.equal(found["norm.running_mean"], mean.float())
        assert torch.equal(found["projection"], first["projection"])
    assert not torch.equal(first["projection"], second["projection"])


def test_defaults_of_torch_are_odd_for_a_while_and_models_explicit() -> None:
    with odd_defaults(replace(SETUP, defaults=("float64", "meta"))):
        found = torch.zeros(1)
        model = Model(SETUP)
    assert (found.dtype, found.device.type) == (torch.float64, "meta")
    assert {each.device.type for each in [*model.parameters(), *model.buffers()]} == {"cpu"}
    assert torch.zeros(1).dtype == torch.float32


def test_a_seed_stands_for_one_program() -> None:
    assert repr(draw_program(17)) == repr(draw_program(17))
    assert draw_program(17) != draw_program(19)


def test_a_program_that_fails_is_cut_down_to_what_it_takes() -> None:
    wrong = Op("collect", {"worker": 0})  # promised to be refused, as there are no such workers
    program = Program(1, SETUP, (STEP, Op("step", {"key": 2}), wrong, STEP))
    assert shrink(program, Crew()).ops == (wrong,)

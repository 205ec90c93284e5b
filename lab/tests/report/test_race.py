"""Seconds to a loss: measured, extrapolated from a short run, and computed from bytes."""

import itertools

import pytest

from distlion_lab.report.race import (
    compute_seconds,
    count_timed_steps,
    extrapolate_seconds,
    find_arrival,
    find_target,
    measure_seconds,
)

# Validations of 2 s before the first step and after every second one; a step takes 1 s.
RECORD = {
    "settings": {"steps": 4},
    "sent_bytes_per_worker": 4_000_000,
    "losses": {"seconds": [3.0, 4.0, 7.0, 8.0]},
    "evaluations": {"step": [0, 2, 4], "seconds": [2.0, 6.0, 10.0], "loss": [5.0, 4.0, 2.0]},
}


def test_validations_are_no_part_of_the_time():
    assert measure_seconds(RECORD) == [0.0, 2.0, 4.0]


def test_a_link_adds_the_time_of_the_bytes_of_each_step():
    # 1 MB a step: 0.08 s at 100 Mbit/s.
    assert compute_seconds(RECORD, 1e8) == pytest.approx([0.0, 2.16, 4.32])


def test_the_median_step_after_the_first_ones_is_multiplied():
    ends = [9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 14.5, 15.0, 15.5, 99.0]
    short = {"losses": {"seconds": ends}}
    assert extrapolate_seconds(RECORD, short) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("period", [1, 4, 8, 32, 100])
def test_a_step_that_sends_more_than_the_others_counts_with_its_share(period):
    n_steps = count_timed_steps(period)
    assert n_steps % period == 0
    took = [1.0 if step % period else 1.0 + period for step in range(1, n_steps + 1)]
    short = {"losses": {"seconds": list(itertools.accumulate(took))}}
    assert extrapolate_seconds(RECORD, short, period=period) == pytest.approx([0.0, 4.0, 8.0])


def test_steps_that_all_send_alike_are_timed_25_times():
    assert count_timed_steps(1) == 25


def test_the_target_is_what_all_reach():
    other = {"evaluations": {"loss": [5.0, 2.5, 3.0]}}
    assert find_target([RECORD, other]) == 2.5


@pytest.mark.parametrize(("target", "seconds"), [(5.0, 0.0), (4.0, 2.0), (3.0, 3.0), (2.0, 4.0)])
def test_arrival_is_on_a_line_between_two_validations(target, seconds):
    assert find_arrival(RECORD, measure_seconds(RECORD), target) == seconds


def test_only_the_first_arrival_counts():
    record = {"evaluations": {"loss": [5.0, 2.0, 4.0, 1.0]}}
    assert find_arrival(record, [0.0, 10.0, 20.0, 30.0], 2.0) == 10.0

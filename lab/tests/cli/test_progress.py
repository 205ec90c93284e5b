import dataclasses
import io

import pytest
from rich.console import Console

from distlion_lab.cli.progress import ProgressDisplay
from distlion_lab.training.loop import Progress


def make_progress(step, validation_loss=None):
    return Progress(
        step=step,
        steps=100,
        seconds=1.0,
        train_loss=3.25 if step else None,
        validation_loss=validation_loss,
        unit="tokens",
        units=1234 * step,
        training_s=1.0 * step,
        sent_bytes=2_500_000,
        bits_per_parameter=1.5,
    )


def show(*events, terminal=False):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with ProgressDisplay(console, workers=4) as display:
        display.announce()
        for event in events:
            display(event)
    return console.file.getvalue()


def test_line_shows_loss_throughput_traffic_and_bits():
    line = show(make_progress(1, validation_loss=4.5)).splitlines()[-1]
    assert line.startswith("step 1/100")
    for part in ("loss 3.2500", "validation 4.5000", "1,234 tokens/s", "2.50 MB sent", "1.50 bits"):
        assert part in line


def test_without_a_terminal_quick_steps_share_a_line():
    lines = show(make_progress(0, validation_loss=5.0), *map(make_progress, range(1, 50)))
    assert len(lines.splitlines()) == 2


def test_without_a_terminal_every_evaluation_has_a_line():
    evaluations = [make_progress(step, validation_loss=4.0) for step in range(10)]
    assert len(show(*evaluations).splitlines()) == 11


def test_validation_of_an_earlier_step_is_shown_with_that_step():
    earlier = make_progress(10, validation_loss=4.5)
    line = show(earlier, make_progress(12), terminal=True)
    assert "validation 4.5000 (step 10)" in line
    assert "(step" not in show(earlier)


@pytest.mark.parametrize("terminal", [True, False])
def test_start_of_the_workers_is_reported(terminal):
    assert "starting 4 workers" in show(terminal=terminal)


def test_terminal_gets_a_bar_with_the_steps():
    assert "7/100" in show(make_progress(7, validation_loss=4.0), terminal=True)


@pytest.mark.parametrize("terminal", [True, False])
def test_throughput_is_that_of_the_last_interval(terminal):
    slow, fast = make_progress(10, validation_loss=4.0), make_progress(20, validation_loss=4.0)
    # The mean of both intervals would be another number.
    fast = dataclasses.replace(fast, training_s=slow.training_s + 2, units=slow.units + 50_000)
    shown = show(slow, fast, terminal=terminal)
    assert "25,000 tokens/s" in shown


def test_first_steps_of_a_terminal_have_a_throughput_already():
    first = dataclasses.replace(make_progress(1, validation_loss=4.0), training_s=0.5, units=100)
    assert "200 tokens/s" in show(first, terminal=True)

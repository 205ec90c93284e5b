from dataclasses import astuple

import pytest

from distlion_lab.planning import bench
from distlion_lab.planning.bench import measure_kernels


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_kernels_take_time_and_are_named(backend, monkeypatch):
    monkeypatch.setenv("DISTLION_KERNELS", backend)
    # The plain kernels are slow, and a short row shows as much.
    monkeypatch.setattr("distlion_lab.planning.bench._N_ELEMENTS", 1 << 16)
    rates = measure_kernels()
    assert all(rate > 0 for rate in astuple(rates.machine))
    assert rates.encode_ratio > 0
    assert (rates.kernels == "reference") == (backend == "reference")


def test_share_of_a_core_is_that_which_the_clocks_say(monkeypatch):
    ticks = {"perf_counter": iter([10.0, 14.0]), "thread_time": iter([1.0, 2.0])}
    for name, values in ticks.items():
        monkeypatch.setattr(bench.time, name, lambda values=values: next(values))
    assert bench._CoreClock().read_share() == 0.25

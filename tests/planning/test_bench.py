from dataclasses import astuple

import pytest

from distlion.planning import measure_kernels


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_kernels_take_time_and_are_named(backend, monkeypatch):
    monkeypatch.setenv("DISTLION_KERNELS", backend)
    # The plain kernels are slow, and a short row shows as much.
    monkeypatch.setattr("distlion.planning.bench._N_ELEMENTS", 1 << 16)
    rates = measure_kernels()
    assert all(rate > 0 for rate in astuple(rates.machine))
    assert rates.encode_ratio > 0
    assert (rates.kernels == "reference") == (backend == "reference")

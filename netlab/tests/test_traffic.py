"""What a lab's traffic takes, of links and cores whose time is known."""

from types import SimpleNamespace

import pytest

from distlion.wire import LinkModel
from distlion_netlab import traffic
from distlion_netlab.traffic import measure_gradients, measure_server, measure_votes

HOSTS = 4


class Fleet:
    """Pretends that every call takes a fixed time for each byte and round, and half a core."""

    def __init__(self, monkeypatch, *, rate_bit_per_s, latency_s):
        self.now_s, self.calls = 0.0, []
        self._byte_s, self._latency_s = 8 / rate_bit_per_s, latency_s
        monkeypatch.setattr(traffic, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(traffic, "read_busy_s", lambda: HOSTS * self.now_s / 2)

    def ask(self, verb, size, times):
        self.calls.append((verb, size, times))
        if verb in ("exchange", "gather"):
            sent_bytes, rounds = (HOSTS - 1) * size, 1
        else:
            sent_bytes, rounds = 2 * (HOSTS - 1) / HOSTS * 4 * size, 2 * (HOSTS - 1)
        self.now_s += times * (sent_bytes * self._byte_s + rounds * self._latency_s)


@pytest.mark.parametrize("measure", [measure_votes, measure_gradients])
@pytest.mark.parametrize("rate_bit_per_s", [1e6, 1e8, 1e10])
def test_rate_is_that_of_the_bytes_and_cores_are_counted_for_each(
    monkeypatch, measure, rate_bit_per_s
):
    fleet = Fleet(monkeypatch, rate_bit_per_s=rate_bit_per_s, latency_s=1e-5)
    found = measure(fleet, LinkModel(1e-5, rate_bit_per_s), HOSTS)
    assert found.rate_bit_per_s == pytest.approx(rate_bit_per_s)
    # Half a core a host, rounds included.
    assert found.core_s_per_byte == pytest.approx(4 / rate_bit_per_s, rel=0.2)


@pytest.mark.parametrize("measure", [measure_votes, measure_gradients, measure_server])
@pytest.mark.parametrize("rate_bit_per_s", [1e5, 1e6, 1e8, 1e10])
def test_it_takes_about_a_second_on_every_link(monkeypatch, measure, rate_bit_per_s):
    fleet = Fleet(monkeypatch, rate_bit_per_s=rate_bit_per_s, latency_s=0.0)
    measure(fleet, LinkModel(0.0, rate_bit_per_s), HOSTS)
    (_, warmed, once), (_, size, times) = fleet.calls
    assert (warmed, once) == (size, 1) and times >= 1
    assert 0.5 <= fleet.now_s < 1.6


def test_a_server_that_sends_back_what_it_gets_works_twice(monkeypatch):
    fleet = Fleet(monkeypatch, rate_bit_per_s=1e8, latency_s=0.0)
    found = measure_server(fleet, LinkModel(0.0, 1e8), HOSTS)
    assert found.rate_bit_per_s == pytest.approx(1e8)
    assert found.core_s_per_byte == pytest.approx(2 * 4 / 1e8)

import functools

import pytest
import torch.distributed as dist

from cluster import run_workers
from distlion.wire import MOST_BYTES_AT_ONCE, ByteCount, Gloo, probe, probe_link
from rank_process import PROBE
from slow_start import SlowStart

pytestmark = pytest.mark.distributed

WHOLE = {name: getattr(probe, name) for name in PROBE}
"""The whole measurement; the processes of workers in tests take a shorter one."""


def measure(rank, world_size, settings):
    vars(probe).update(settings)
    link = Gloo(dist.group.WORLD, timeout_s=30)
    link.counted = ByteCount(1, 2, 3)
    model = probe_link(link, step=0)
    assert world_size == 1 or model.ring_above_bytes == MOST_BYTES_AT_ONCE
    link.ring_above_bytes = None
    assert probe_link(link, step=0).ring_above_bytes is None
    return model, link.counted


@functools.cache
def probes_of(world_size):
    return run_workers(measure, world_size, WHOLE)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_result_is_equal_on_all_ranks(world_size):
    probes = probes_of(world_size)
    assert all(each == probes[0] for each in probes)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_probe_is_not_counted(world_size):
    assert all(counted == ByteCount(1, 2, 3) for _, counted in probes_of(world_size))


def exchanged_bytes(rank, world_size, settings):
    vars(probe).update(settings)
    link, sizes = Gloo(dist.group.WORLD, timeout_s=30.0), []

    class Recorded(Gloo):
        def all_to_all(self, out, chunks, *, step):
            sizes.append(chunks[0].nbytes)
            return super().all_to_all(out, chunks, step=step)

    link.__class__ = Recorded
    probe_link(link, step=0)
    return sizes


def test_workers_meet_before_every_exchange_that_is_timed():
    sizes = run_workers(exchanged_bytes, 2, WHOLE)[0]
    # 64 bytes for the latency, larger chunks for the rate; the rest gathers results.
    timed = [place for place, n_bytes in enumerate(sizes) if n_bytes == 64 or n_bytes >= 1024]
    assert len(timed) > 10
    assert all(sizes[place - 1] == 1 for place in timed)


def test_network_takes_time():
    model, _ = probes_of(3)[0]
    assert model.latency_s > 0
    assert 0 < model.rate_bit_per_s < 1e15


@pytest.mark.parametrize("latency_ms", [0.1, 10, 100, 200])
@pytest.mark.parametrize("rate_bit_per_s", [1e6, 1e7, 1e8, 1e9])
def test_rate_is_that_after_slow_start(latency_ms, rate_bit_per_s, monkeypatch):
    link = SlowStart(int(1e6 * latency_ms), rate_bit_per_s)
    monkeypatch.setattr("time.perf_counter_ns", lambda: link.now_ns)
    found = probe_link(link, step=0)
    assert found.latency_s == pytest.approx(1e-3 * latency_ms + 8 * 64 / rate_bit_per_s, rel=0.01)
    most_s = 8 * 4 * 2**20 / rate_bit_per_s  # 4 MiB, the largest size
    # Where they do not fill the link, half a round trip is the least that counts as transfer.
    reached = 0.9 if most_s > found.latency_s else 2 * most_s / (most_s + found.latency_s)
    assert 0.9 * reached < found.rate_bit_per_s / rate_bit_per_s < 1.1


def test_a_slow_link_without_latency_is_measured_once(monkeypatch):
    link = SlowStart(100_000, 1e6)
    monkeypatch.setattr("time.perf_counter_ns", lambda: link.now_ns)
    probe_link(link, step=0)
    assert [size for size in link.sizes if size > 64] == 4 * [192 * 1024]


def test_large_exchanges_take_four_times_the_latency(monkeypatch):
    link = SlowStart(10_000_000, 1e8)
    monkeypatch.setattr("time.perf_counter_ns", lambda: link.now_ns)
    probe_link(link, step=0)
    assert max(link.sizes) == pytest.approx(4 * 0.01 * 1e8 / 8, rel=0.25)

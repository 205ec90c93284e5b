import functools
import types

import pytest
import torch.distributed as dist

from cluster import run_workers
from distlion.wire import ByteCount, Gloo, LinkModel
from distlion_lab.planning.link_probe import LinkProbe, probe_ranks
from slow_start import SlowStart


def measure(rank, world_size):
    link = Gloo(dist.group.WORLD, timeout_s=30)
    link.counted = ByteCount(1, 2, 3)
    return probe_ranks(link, step=0), link.counted


@functools.cache
def probes_of(world_size):
    return run_workers(measure, world_size)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_result_is_equal_on_all_ranks_and_not_counted(world_size):
    probes = probes_of(world_size)
    assert all(each == probes[0] for each in probes)
    found, counted = probes[0]
    assert len(found.ranks) == world_size
    assert counted == ByteCount(1, 2, 3)


def test_slowest_rank_is_the_one_with_the_lowest_rate():
    models = tuple(LinkModel(1e-4, rate) for rate in (1e9, 1e9, 2e8, 9e8))
    found = LinkProbe(models[2], models)
    assert found.slowest == 2
    assert found.slowdown == pytest.approx(4.75)


class OneByOne(SlowStart):
    """Of its group, and itself the group."""

    timeout_s, n_under_way, watch = 30.0, 0, None

    def __init__(self, *args):
        super().__init__(*args)
        self.process_group, self.sizes_alone = self, []

    def alltoall_base(self, out, parts, out_sizes, sizes):
        self.sizes_alone.append(sum(sizes))
        self.send(sum(sizes))
        return types.SimpleNamespace(wait=lambda timeout: None)


def test_large_exchanges_of_a_rank_take_four_times_the_latency(monkeypatch):
    link = OneByOne(10_000_000, 1e8)
    monkeypatch.setattr("time.perf_counter_ns", lambda: link.now_ns)
    found = probe_ranks(link, step=0)
    expected = 4 * 0.01 * 1e8 / 8
    assert max(link.sizes_alone) == pytest.approx(expected, rel=0.1)
    assert [rank.rate_bit_per_s for rank in found.ranks] == pytest.approx([1e8, 1e8], rel=0.1)

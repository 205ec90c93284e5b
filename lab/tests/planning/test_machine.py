from dataclasses import fields, replace

import pytest

from distlion.errors import InvalidArgumentError
from distlion_lab.planning.machine import CPU, GPU, GPUS, Machine


def test_machine_needs_rates_above_zero():
    values = {**vars(CPU), "encode_bytes_per_s": 0.0}
    with pytest.raises(InvalidArgumentError, match="encode_bytes_per_s"):
        Machine(**values)


def test_a_slowed_machine_takes_longer_for_everything():
    machine = replace(CPU, vote_wire_s_per_byte=1e-8, gradient_wire_s_per_byte=2e-9, bucket_s=1e-3)
    slowed = machine.slowed(2)
    for field in fields(Machine):
        before, after = getattr(machine, field.name), getattr(slowed, field.name)
        assert after == (before / 2 if field.name.endswith("_per_s") else 2 * before), field.name


def test_more_bits_take_longer_to_encode():
    seconds = [CPU.encode_s(1e6, planes) for planes in (1, 2, 4, 8)]
    assert seconds == sorted(seconds)


def test_commit_passes_over_twenty_bytes_and_the_reply():
    one_second = CPU.commit_bytes_per_s / (20 + 1 / 8)
    assert CPU.commit_s(one_second, one_second, 1) == pytest.approx(1)


def test_accelerator_is_faster_in_every_pass_over_memory():
    assert GPU.encode_s(1e6, 1) < CPU.encode_s(1e6, 1)
    assert GPU.pass_s(1e6) < CPU.pass_s(1e6)


def test_a_gpu_encodes_by_its_memory_and_its_host_counts():
    assert GPUS["h200"].encode_s(1e9, 1) < GPUS["h100"].encode_s(1e9, 1) < GPU.encode_s(1e9, 1)
    for machine in GPUS.values():
        assert machine.count_bytes_per_s == CPU.count_bytes_per_s
        # Votes cross PCIe besides.
        assert machine.frame_bytes_per_s < CPU.frame_bytes_per_s

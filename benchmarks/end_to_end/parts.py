"""The parts of the benchmark: each is one or several sweeps of the network lab."""

from __future__ import annotations

from distlion_netlab import DeviceWorkload, GptWorkload, SweepSettings, VectorWorkload

RATES = ("100mbit", "1gbit", "10gbit", "unlimited")
BASELINES = ("none", "ddp-fp32", "ddp-fp16", "ddp-powersgd")
PATTERNS = ("all-reduce", "all-gather", "parameter-server", "auto")
RULES = (
    "majority-zero",
    "ternary",
    "average",
    "quantized-2",
    "quantized-4",
    "quantized-8",
    "full-bf16",
    "full",
)

# What DistributedLion does by default, and with overlap; the targets are theirs.
JUDGED = ("majority-auto", "majority-auto-overlap")
# On hosts with a core each, what the first steps find is judged.
FOUND = "majority-auto-overlap-auto"
SHOWN = (*JUDGED, "majority-all-reduce", "majority-all-reduce-overlap")

METHODS = (
    *BASELINES,
    *(f"majority-{pattern}" for pattern in PATTERNS),
    *(f"majority-{pattern}-overlap" for pattern in PATTERNS),
    FOUND,
    *(f"{rule}-all-reduce" for rule in RULES),
)
DRAWN = (*BASELINES, *SHOWN, "quantized-4-all-reduce", "full-all-reduce")

EXCHANGED = ("all-reduce-fp32", "majority-all-reduce", "majority-all-gather")
SCALED = ("none", "ddp-fp32", "majority-all-reduce", "majority-auto")

# Votes over Gloo as well, beside those over distlion's own sockets.
DEVICE_METHODS = (*BASELINES, *JUDGED, *(f"{name}-gloo" for name in JUDGED))
# Every method has a model of its own, and of the largest one a machine of 24 GB holds six.
LARGE = 100e6
# Hosts, layers, width, seconds of the accelerator, rates: 8.4, 25 and 101 million parameters.
DEVICES = (
    (2, 8, 1024, 0.3, ("10mbit", "100mbit", "1gbit", "10gbit")),
    (4, 8, 1024, 0.3, ("100mbit", "1gbit", "10gbit")),
    (4, 24, 1024, 0.3, ("100mbit", "1gbit", "10gbit")),
    (2, 24, 2048, 1.0, ("100mbit", "1gbit", "10gbit")),
)


def plan_training(*, quick: bool) -> SweepSettings:
    """Plan a GPT of about 8 million parameters on 4 hosts; with ``quick`` a small one."""
    if quick:
        methods = ("none", "ddp-fp32", "ddp-fp16", *SHOWN)
        small = GptWorkload(layers=2, width=128, vocabulary=1024)
        return SweepSettings(4, ("100mbit", "1gbit"), methods, small, repetitions=2, block_s=0.2)
    return SweepSettings(4, RATES, METHODS, GptWorkload(), repetitions=5, block_s=0.5)


def plan_pairs(*, quick: bool) -> dict[str, SweepSettings]:
    """Plan the same GPT on 2 hosts, of which each has a core of its own on a machine of 2.

    By the sequences of a worker: the longer a step computes, the more of a vote it can hide.
    """
    methods = ("none", "ddp-fp32", "ddp-fp16", *JUDGED, FOUND)
    if quick:
        small = GptWorkload(layers=2, width=128, vocabulary=1024)
        settings = SweepSettings(2, ("100mbit",), methods, small, repetitions=2, block_s=0.2)
        return {str(small.batch_size): settings}
    return {
        str(batch_size): SweepSettings(
            2, RATES[:3], methods, GptWorkload(batch_size=batch_size), repetitions=7, block_s=1.0
        )
        for batch_size in (2, 4)
    }


def plan_scaling(*, quick: bool) -> dict[str, SweepSettings]:
    """Plan a GPT of 1 million parameters on more and more hosts, by the number of hosts."""
    workload = GptWorkload(layers=4, width=128, vocabulary=1024)
    counts, rates = ((2, 4), ("100mbit",)) if quick else ((2, 4, 8, 16), ("100mbit", "1gbit"))
    return {
        str(hosts): SweepSettings(
            hosts, rates, SCALED, workload, repetitions=2 if quick else 5, block_s=0.3
        )
        for hosts in counts
    }


def plan_exchange(*, quick: bool) -> SweepSettings:
    """Plan the exchange alone: 16 million parameters on 4 hosts."""
    workload = VectorWorkload(1 << 20 if quick else 16 << 20)
    rates = ("1gbit",) if quick else ("100mbit", "1gbit", "10gbit")
    return SweepSettings(
        4, rates, EXCHANGED, workload, repetitions=2 if quick else 5, block_s=0.1 if quick else 0.5
    )


def plan_devices(*, quick: bool) -> dict[str, SweepSettings]:
    """Plan training on accelerators that are emulated, so that the cores are left to packets."""
    if quick:
        small = DeviceWorkload(layers=2, width=128, step_s=0.02)
        rates = ("100mbit", "1gbit")
        return {"quick": SweepSettings(2, rates, DEVICE_METHODS, small, repetitions=2, block_s=0.1)}
    planned = {}
    for hosts, layers, width, step_s, rates in DEVICES:
        workload = DeviceWorkload(layers=layers, width=width, step_s=step_s)
        n_parameters = layers * width**2
        methods = DEVICE_METHODS if n_parameters < LARGE else (*BASELINES, *JUDGED)
        name = f"{n_parameters / 1e6:.3g} million parameters, {hosts} hosts"
        planned[name] = SweepSettings(hosts, rates, methods, workload, repetitions=3, block_s=2.0)
    return planned

"""What votes are compared with, as DDP hooks over pure functions: one file for each paper."""

from distlion.baselines.base import Compression, Payload, State, gathered_bytes
from distlion.baselines.dgc import DeepGradientCompression
from distlion.baselines.graddrop import GradDrop
from distlion.baselines.half import HALF_BYTES, HalfPrecision
from distlion.baselines.hook import CompressionState, compression_hook
from distlion.baselines.power_sgd import PowerSGD
from distlion.baselines.ring import ring_all_gather_bytes, ring_all_reduce_bytes
from distlion.baselines.stock import (
    AllReduceState,
    CountedPowerSGD,
    full_precision_hook,
    half_precision_hook,
    power_sgd_hook,
)
from distlion.baselines.terngrad import TernGrad
from distlion.baselines.worker import Worker

__all__ = [
    "HALF_BYTES",
    "AllReduceState",
    "Compression",
    "CompressionState",
    "CountedPowerSGD",
    "DeepGradientCompression",
    "GradDrop",
    "HalfPrecision",
    "Payload",
    "PowerSGD",
    "State",
    "TernGrad",
    "Worker",
    "compression_hook",
    "full_precision_hook",
    "gathered_bytes",
    "half_precision_hook",
    "power_sgd_hook",
    "ring_all_gather_bytes",
    "ring_all_reduce_bytes",
]

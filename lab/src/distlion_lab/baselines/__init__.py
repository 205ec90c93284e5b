"""Baselines for comparisons: DDP hooks over pure functions, one file for each paper."""

from distlion_lab.baselines.base import Compression, Payload, State, gathered_bytes
from distlion_lab.baselines.ddp import Account, compress_gradients, wrap_in_ddp
from distlion_lab.baselines.dgc import DeepGradientCompression
from distlion_lab.baselines.graddrop import GradDrop
from distlion_lab.baselines.half import HALF_BYTES, HalfPrecision
from distlion_lab.baselines.hook import CompressionState, compression_hook
from distlion_lab.baselines.muon import MOMENTUM, MuonWithAdamW, scale_update
from distlion_lab.baselines.one_bit_adam import OneBitAdam, compress_signs, count_step_bytes
from distlion_lab.baselines.power_sgd import PowerSGD
from distlion_lab.baselines.ring import ring_all_gather_bytes, ring_all_reduce_bytes
from distlion_lab.baselines.stock import (
    AllReduceState,
    CountedPowerSGD,
    full_precision_hook,
    half_precision_hook,
    power_sgd_hook,
)
from distlion_lab.baselines.terngrad import TernGrad
from distlion_lab.baselines.top_bits import TopBits
from distlion_lab.baselines.virtual import VirtualBaseline
from distlion_lab.baselines.worker import Worker

__all__ = [
    "HALF_BYTES",
    "MOMENTUM",
    "Account",
    "AllReduceState",
    "Compression",
    "CompressionState",
    "CountedPowerSGD",
    "DeepGradientCompression",
    "GradDrop",
    "HalfPrecision",
    "MuonWithAdamW",
    "OneBitAdam",
    "Payload",
    "PowerSGD",
    "State",
    "TernGrad",
    "TopBits",
    "VirtualBaseline",
    "Worker",
    "compress_gradients",
    "compress_signs",
    "compression_hook",
    "count_step_bytes",
    "full_precision_hook",
    "gathered_bytes",
    "half_precision_hook",
    "power_sgd_hook",
    "ring_all_gather_bytes",
    "ring_all_reduce_bytes",
    "scale_update",
    "wrap_in_ddp",
]

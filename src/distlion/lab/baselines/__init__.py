"""Baselines for comparisons: DDP hooks over pure functions, one file for each paper."""

from distlion.lab.baselines.base import Compression, Payload, State, gathered_bytes
from distlion.lab.baselines.ddp import Account, compress_gradients, wrap_in_ddp
from distlion.lab.baselines.dgc import DeepGradientCompression
from distlion.lab.baselines.graddrop import GradDrop
from distlion.lab.baselines.half import HALF_BYTES, HalfPrecision
from distlion.lab.baselines.hook import CompressionState, compression_hook
from distlion.lab.baselines.muon import MOMENTUM, MuonWithAdamW, scale_update
from distlion.lab.baselines.one_bit_adam import OneBitAdam, compress_signs, count_step_bytes
from distlion.lab.baselines.power_sgd import PowerSGD
from distlion.lab.baselines.ring import ring_all_gather_bytes, ring_all_reduce_bytes
from distlion.lab.baselines.stock import (
    AllReduceState,
    CountedPowerSGD,
    full_precision_hook,
    half_precision_hook,
    power_sgd_hook,
)
from distlion.lab.baselines.terngrad import TernGrad
from distlion.lab.baselines.top_bits import TopBits
from distlion.lab.baselines.virtual import VirtualBaseline
from distlion.lab.baselines.worker import Worker

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

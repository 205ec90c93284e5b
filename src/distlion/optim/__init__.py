"""Lion, alone and with workers that vote."""

from distlion.optim.clipping import ClipNorm
from distlion.optim.diagnostics import Diagnosis
from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.lion import Lion
from distlion.optim.lion_cub import lion_cub
from distlion.optim.momentum_sync import MomentumSync
from distlion.optim.node_stage import Nodes
from distlion.optim.traffic import Traffic

__all__ = [
    "ClipNorm",
    "Diagnosis",
    "DistributedLion",
    "Lion",
    "MomentumSync",
    "Nodes",
    "Traffic",
    "lion_cub",
]

"""Lion, alone and with workers that vote."""

from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.lion import Lion
from distlion.optim.lion_cub import lion_cub
from distlion.voting.clipping import ClipNorm
from distlion.voting.diagnostics import Diagnosis
from distlion.voting.momentum_sync import MomentumSync
from distlion.voting.node_stage import Nodes
from distlion.voting.traffic import Traffic

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

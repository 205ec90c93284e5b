"""Communication-efficient data-parallel training with the Lion optimizer."""

from importlib.metadata import version as _version

from distlion.aggregation import (
    Average,
    FeedbackVote,
    FullPrecision,
    MajorityVote,
    QuantizedVote,
    TernaryVote,
)
from distlion.checkpoint import load_checkpoint, save_checkpoint
from distlion.crew import Crew, CrewSampler
from distlion.exchange import AllGather, AllReduce, ParameterServer
from distlion.optim import ClipNorm, DistributedLion, Lion, MomentumSync, Nodes, lion_cub
from distlion.options import average_buffers
from distlion.virtual import VirtualCluster

__version__ = _version("distlion")

__all__ = [
    "AllGather",
    "AllReduce",
    "Average",
    "ClipNorm",
    "Crew",
    "CrewSampler",
    "DistributedLion",
    "FeedbackVote",
    "FullPrecision",
    "Lion",
    "MajorityVote",
    "MomentumSync",
    "Nodes",
    "ParameterServer",
    "QuantizedVote",
    "TernaryVote",
    "VirtualCluster",
    "__version__",
    "average_buffers",
    "lion_cub",
    "load_checkpoint",
    "save_checkpoint",
]

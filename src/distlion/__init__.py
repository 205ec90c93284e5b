"""Communication-efficient data-parallel training with the Lion optimizer."""

from importlib.metadata import version as _version

from distlion.aggregation import Average, FullPrecision, MajorityVote, QuantizedVote, TernaryVote
from distlion.exchange import Direct, Gather, Server
from distlion.optim import ClipNorm, DistributedLion, Lion, MomentumSync, Nodes, lion_cub
from distlion.virtual import VirtualCluster

__version__ = _version("distlion")

__all__ = [
    "Average",
    "ClipNorm",
    "Direct",
    "DistributedLion",
    "FullPrecision",
    "Gather",
    "Lion",
    "MajorityVote",
    "MomentumSync",
    "Nodes",
    "QuantizedVote",
    "Server",
    "TernaryVote",
    "VirtualCluster",
    "__version__",
    "lion_cub",
]

"""Communication-efficient data-parallel training with the Lion optimizer."""

from importlib.metadata import version as _version

from distlion.aggregation import (
    Average,
    EstimateVote,
    FeedbackVote,
    FullPrecision,
    MajorityVote,
    MaskedVote,
    QuantizedVote,
    ResidualVote,
    ScaledVote,
    StochasticVote,
    TernaryVote,
)
from distlion.checkpoint import check_checkpoint_folder, load_checkpoint, save_checkpoint
from distlion.crew import Crew, CrewSampler
from distlion.exchange import AllGather, AllReduce, ParameterServer, RecursiveDoubling
from distlion.optim import (
    ClipNorm,
    DistributedLion,
    Lion,
    LocalSteps,
    MomentumSync,
    Nodes,
    describe_groups,
    group_params,
    lion_cub,
    paper_settings,
)
from distlion.options import average_buffers
from distlion.virtual import VirtualCluster, VirtualLocalSteps

__version__ = _version("distlion")

__all__ = [
    "AllGather",
    "AllReduce",
    "Average",
    "ClipNorm",
    "Crew",
    "CrewSampler",
    "DistributedLion",
    "EstimateVote",
    "FeedbackVote",
    "FullPrecision",
    "Lion",
    "LocalSteps",
    "MajorityVote",
    "MaskedVote",
    "MomentumSync",
    "Nodes",
    "ParameterServer",
    "QuantizedVote",
    "RecursiveDoubling",
    "ResidualVote",
    "ScaledVote",
    "StochasticVote",
    "TernaryVote",
    "VirtualCluster",
    "VirtualLocalSteps",
    "__version__",
    "average_buffers",
    "check_checkpoint_folder",
    "describe_groups",
    "group_params",
    "lion_cub",
    "load_checkpoint",
    "paper_settings",
    "save_checkpoint",
]

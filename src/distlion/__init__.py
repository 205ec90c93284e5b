"""Communication-efficient data-parallel training with the Lion optimizer."""

from importlib.metadata import version as _version

from distlion.checkpoint import check_checkpoint_folder, load_checkpoint, save_checkpoint
from distlion.crew import Crew, CrewSampler
from distlion.local.local_steps import LocalSteps
from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.lion import Lion
from distlion.optim.papers import lion_cub, paper_settings
from distlion.optim.param_groups import describe_groups, group_params
from distlion.step.agreement import Agreement
from distlion.step.buffers import average_buffers
from distlion.step.clipping import ClipNorm
from distlion.step.momentum import MomentumSync
from distlion.step.nodes import Nodes
from distlion.step.precision import Precision
from distlion.step.replicas import Replicas
from distlion.step.timeouts import Timeouts
from distlion.virtual import VirtualCluster, VirtualLocalSteps
from distlion.votes.average import Average
from distlion.votes.estimate import EstimateVote
from distlion.votes.feedback import FeedbackVote
from distlion.votes.full_precision import FullPrecision
from distlion.votes.majority import MajorityVote
from distlion.votes.masked import MaskedVote
from distlion.votes.quantized import QuantizedVote
from distlion.votes.residual import ResidualVote
from distlion.votes.scaled import ScaledVote
from distlion.votes.stochastic import StochasticVote
from distlion.votes.ternary import TernaryVote
from distlion.wire.all_gather import AllGather
from distlion.wire.all_reduce import AllReduce
from distlion.wire.parameter_server import ParameterServer
from distlion.wire.recursive_doubling import RecursiveDoubling

__version__ = _version("distlion")

__all__ = [
    "Agreement",
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
    "Precision",
    "QuantizedVote",
    "RecursiveDoubling",
    "Replicas",
    "ResidualVote",
    "ScaledVote",
    "StochasticVote",
    "TernaryVote",
    "Timeouts",
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

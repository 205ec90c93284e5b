"""Lion, alone and with workers that vote."""

from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.lion import Lion
from distlion.optim.traffic import Traffic

__all__ = ["DistributedLion", "Lion", "Traffic"]

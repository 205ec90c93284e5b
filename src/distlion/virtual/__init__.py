"""Many workers inside one process: bitwise identical to real ones, without a network."""

from distlion.virtual.cluster import VirtualCluster
from distlion.virtual.local_steps import VirtualLocalSteps

__all__ = ["VirtualCluster", "VirtualLocalSteps"]

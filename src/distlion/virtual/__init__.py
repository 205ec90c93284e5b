"""Many workers inside one process: the rules of real ones, to the bit, without a network."""

from distlion.virtual.baseline import VirtualBaseline
from distlion.virtual.cluster import VirtualCluster

__all__ = ["VirtualBaseline", "VirtualCluster"]

"""Many workers inside one process: bitwise identical to real ones, without a network."""

from distlion.virtual.cluster import VirtualCluster

__all__ = ["VirtualCluster"]

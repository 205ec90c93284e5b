"""The link that votes cross: its model, its measurement, and the choice of a pattern for it."""

from distlion.cost.choice import (
    choose_exchange,
    count_overlap_buckets,
    exchange_seconds,
)
from distlion.cost.link_model import LinkModel
from distlion.cost.overhead import ETHERNET_BYTES, ETHERNET_MTU, payload_share, wire_bytes
from distlion.cost.probe import LinkProbe, agree_on_model, probe_link, probe_ranks

__all__ = [
    "ETHERNET_BYTES",
    "ETHERNET_MTU",
    "LinkModel",
    "LinkProbe",
    "agree_on_model",
    "choose_exchange",
    "count_overlap_buckets",
    "exchange_seconds",
    "payload_share",
    "probe_link",
    "probe_ranks",
    "wire_bytes",
]

"""A network lab: hosts in namespaces of one Linux machine, with links of chosen rates."""

from distlion.netlab.lab import Lab, remove_abandoned_labs, remove_lab, temporary_or_named
from distlion.netlab.launch import run_command
from distlion.netlab.plan import LabPlan
from distlion.netlab.rate import LinkRate, TokenBucket, parse_host_rates
from distlion.netlab.state import LabState, list_states, read_state
from distlion.netlab.wires import Counters

__all__ = [
    "Counters",
    "Lab",
    "LabPlan",
    "LabState",
    "LinkRate",
    "TokenBucket",
    "list_states",
    "parse_host_rates",
    "read_state",
    "remove_abandoned_labs",
    "remove_lab",
    "run_command",
    "temporary_or_named",
]

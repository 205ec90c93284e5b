"""A network lab: hosts in namespaces of one Linux machine, with links of chosen rates."""

from distlion.netlab.lab import Lab, remove_abandoned_labs, remove_lab, temporary_or_named
from distlion.netlab.lab_plan import LabPlan
from distlion.netlab.launch import run_command
from distlion.netlab.link_rate import LinkRate, TokenBucket, parse_host_rates
from distlion.netlab.state import LabState, list_states, read_state
from distlion.netlab.sweep import SweepSettings, run_sweep
from distlion.netlab.wires import Counters
from distlion.netlab.workload import GptWorkload, VectorWorkload

__all__ = [
    "Counters",
    "GptWorkload",
    "Lab",
    "LabPlan",
    "LabState",
    "LinkRate",
    "SweepSettings",
    "TokenBucket",
    "VectorWorkload",
    "list_states",
    "parse_host_rates",
    "read_state",
    "remove_abandoned_labs",
    "remove_lab",
    "run_command",
    "run_sweep",
    "temporary_or_named",
]

"""A network lab: hosts in namespaces of one Linux machine, with links of chosen rates."""

from distlion_netlab.lab import Lab, remove_abandoned_labs, remove_lab, temporary_or_named
from distlion_netlab.lab_plan import LabPlan
from distlion_netlab.launch import run_command
from distlion_netlab.link_rate import LinkRate, TokenBucket, parse_host_rates
from distlion_netlab.state import LabState, list_states, read_state
from distlion_netlab.sweep import SweepSettings, run_sweep
from distlion_netlab.wires import Counters
from distlion_netlab.workload import DeviceWorkload, GptWorkload, VectorWorkload

__all__ = [
    "Counters",
    "DeviceWorkload",
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

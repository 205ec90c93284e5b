"""All bugs to plant, in the order in which they are planted."""

from __future__ import annotations

from planted import MUTATIONS
from planted_bits import BITS
from planted_cautious import CAUTIOUS
from planted_clients import CLIENTS
from planted_congestion import CONGESTION
from planted_core import CORE
from planted_crews import CREW_MUTATIONS
from planted_cut_matrices import CUT_MATRICES
from planted_device import DEVICE
from planted_doubling import DOUBLED
from planted_endings import ENDINGS
from planted_feedback import FEEDBACK
from planted_files import FILES
from planted_heartbeats import HEARTBEATS
from planted_inner import SEVERAL_INNER
from planted_inputs import INPUTS
from planted_joins import JOIN_MUTATIONS
from planted_kernels import KERNELS
from planted_latency import LATENCY
from planted_leftovers import SHARED
from planted_local import LOCAL_STEPS
from planted_local_crews import LOCAL_CREWS
from planted_local_lab import AROUND_LOCAL_STEPS
from planted_losses import LOSSES
from planted_machines import MACHINE_MUTATIONS
from planted_methods import NAMES
from planted_misuse import MISUSES
from planted_newcomer import NEWCOMER
from planted_orthogonal import ORTHOGONAL
from planted_outages import OUTAGES
from planted_overlap import OVERLAP
from planted_protocol import PROTOCOL
from planted_race import RACES
from planted_reliability import RELIABILITY
from planted_saves import SAVES
from planted_sharded_local import SHARDED_LOCAL
from planted_sharing import TOGETHER
from planted_signals import SIGNALS
from planted_simulated import SIMULATED
from planted_state import STATES
from planted_trainers import TRAINERS
from planted_trial import TRIAL
from planted_weights import WEIGHTS
from planted_wire import WIRE

EVERYWHERE = (
    *MUTATIONS,
    *KERNELS,
    *DEVICE,
    *CUT_MATRICES,
    *MISUSES,
    *LOSSES,
    *MACHINE_MUTATIONS,
    *ENDINGS,
    *PROTOCOL,
    *DOUBLED,
    *TRIAL,
    *FEEDBACK,
    *STATES,
    *SAVES,
    *TRAINERS,
    *SIGNALS,
    *INPUTS,
    *FILES,
    *OVERLAP,
    *OUTAGES,
    *NEWCOMER,
    *JOIN_MUTATIONS,
    *CAUTIOUS,
    *CLIENTS,
    *BITS,
    *SHARED,
    *CORE,
    *AROUND_LOCAL_STEPS,
    *RACES,
    *NAMES,
    *CREW_MUTATIONS,
    *LOCAL_STEPS,
    *LOCAL_CREWS,
    *SEVERAL_INNER,
    *SHARDED_LOCAL,
    *TOGETHER,
    *WIRE,
    *RELIABILITY,
    *WEIGHTS,
    *LATENCY,
    *CONGESTION,
    *ORTHOGONAL,
    *HEARTBEATS,
    *SIMULATED,
)

"""The parts that all steps share, and all work between steps: join, meet, compare."""

from distlion.session.fingerprint import (
    Fingerprint,
    FixedGroups,
    check_frozen,
)
from distlion.session.ownership import Gather, MomentumOwnership, find_ownership, name_worker
from distlion.session.replicas import broadcast_tensor
from distlion.session.session import Session, open_session

__all__ = [
    "Fingerprint",
    "FixedGroups",
    "Gather",
    "MomentumOwnership",
    "Session",
    "broadcast_tensor",
    "check_frozen",
    "find_ownership",
    "name_worker",
    "open_session",
]

"""All that happens in each step of voting workers."""

from distlion.step.alone import (
    ClipAlone,
    check_finite,
    commit_alone,
    gather_alone,
    move_alone,
    step_alone,
)
from distlion.step.cut_matrices import Box, CutMatrices, CutMatrix
from distlion.step.flat_route import FlatRoute
from distlion.step.gradients import GradientWatch, UseWatch, look_at_gradients, warn_user
from distlion.step.hyperparameters import (
    GroupNumbers,
    check_hyperparameters,
    check_number,
    check_positive,
    check_step,
    describe_hyperparameters,
    read_groups,
    read_step,
)
from distlion.step.inputs import NoteNorm, StepInputs
from distlion.step.lifecycle import Lifecycle
from distlion.step.make import Make, describe_make
from distlion.step.memory import check_own_memory, check_shared_memory
from distlion.step.outcome import (
    describe_problem,
    explain,
    log_abstention,
    log_skip,
    note_overflow,
)
from distlion.step.param import (
    ALONE,
    SPARSE,
    Copies,
    GradientMark,
    VotingParam,
    count_turns,
    is_dtensor,
    local_tensor,
    take_gradients,
)
from distlion.step.ranks import Ranks, check_member
from distlion.step.route import Route
from distlion.step.staging import bring_down, bring_up, name_failure, read_together
from distlion.step.traffic import Traffic, TrafficMeter
from distlion.step.vote import (
    CastVote,
    Clipper,
    Completion,
    Pipeline,
    abstain,
    abstain_from,
    abstain_from_all,
    cast_votes,
    check_unchanged,
    draft_and_cast,
    judge_votes,
    run_all,
)

__all__ = [
    "ALONE",
    "SPARSE",
    "Box",
    "CastVote",
    "ClipAlone",
    "Clipper",
    "Completion",
    "Copies",
    "CutMatrices",
    "CutMatrix",
    "FlatRoute",
    "GradientMark",
    "GradientWatch",
    "GroupNumbers",
    "Lifecycle",
    "Make",
    "NoteNorm",
    "Pipeline",
    "Ranks",
    "Route",
    "StepInputs",
    "Traffic",
    "TrafficMeter",
    "UseWatch",
    "VotingParam",
    "abstain",
    "abstain_from",
    "abstain_from_all",
    "bring_down",
    "bring_up",
    "cast_votes",
    "check_finite",
    "check_hyperparameters",
    "check_member",
    "check_number",
    "check_own_memory",
    "check_positive",
    "check_shared_memory",
    "check_step",
    "check_unchanged",
    "commit_alone",
    "count_turns",
    "describe_hyperparameters",
    "describe_make",
    "describe_problem",
    "draft_and_cast",
    "explain",
    "gather_alone",
    "is_dtensor",
    "judge_votes",
    "local_tensor",
    "log_abstention",
    "log_skip",
    "look_at_gradients",
    "move_alone",
    "name_failure",
    "note_overflow",
    "read_groups",
    "read_step",
    "read_together",
    "run_all",
    "step_alone",
    "take_gradients",
    "warn_user",
]

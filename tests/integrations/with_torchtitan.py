"""torchtitan's container, sharding and clipping, as a contestant of the exam.

Its Trainer trains models of its own; the example's test is about that.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.distributed.utils import clip_grad_norm_

from integrations.job import Job, Trained
from integrations.with_fsdp import make_mesh, run, shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from torchtitan_votes import voting_lion


def train(job: Job, rank: int) -> Trained:
    """Do what the job says; called on every rank."""
    mesh = make_mesh(job)
    model = shard(job.make_model(mesh.get_local_rank("replicate")), mesh)
    # torchtitan adds gradients, and divides losses by the tokens of all ranks.
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
    (optimizer,) = voting_lion(**job.optimizer_options).build(model_parts=[model])
    return run(job, mesh, model, optimizer, clip=clip_grad_norm_, added=mesh["shard"].size())

"""Ray Train, as a contestant of the exam: its workers, its process group, its prepare_model.

python -m integrations.with_ray WORLD_SIZE < jobs
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
from typing import Any

import ray.train
import ray.train.torch

from integrations import plain
from integrations.job import Job, Trained


def train(job: Job, rank: int) -> Trained:
    """Do what the job says; called on every rank."""
    prepare = functools.partial(ray.train.torch.prepare_model, parallel_strategy=None)
    return plain.train(job, rank, prepare=prepare)


def sit_in_a_worker(config: dict[str, Any]) -> None:
    from integrations import exam

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    exam.sit(rank, world_size, "integrations.with_ray", config["jobs"])


def main() -> None:
    world_size, jobs = int(sys.argv[1]), pickle.load(sys.stdin.buffer)
    path = os.pathsep.join(each for each in sys.path if each)
    ray.init(num_cpus=world_size, runtime_env={"env_vars": {"PYTHONPATH": path}})
    ray.train.torch.TorchTrainer(
        sit_in_a_worker,
        train_loop_config={"jobs": jobs},
        scaling_config=ray.train.ScalingConfig(num_workers=world_size),
        run_config=ray.train.RunConfig(storage_path=os.path.dirname(jobs[0].folder)),
    ).fit()


if __name__ == "__main__":
    main()

"""The one list of frameworks that sit the exam."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contestant:
    """A framework, and the function that does a job with it.

    Attributes:
        name: As in the table of docs/how-to/trainers/index.md.
        distribution: What must be installed, by its name in a package registry.
        module: Imported in every rank's process, never in that of the tests; its
            ``train(job: Job, rank: int) -> Trained`` does the job there, and lets every error out.
        tested_with: Its version, for the table.
        lacks: Rows of the exam that the framework does not offer, by name.
        shards: Ranks of each worker.
        launcher: A module that starts the ranks, run as a program; None for ours.
        plain: The module of the plain loop that it is compared with, for another model and loss.
    """

    name: str
    distribution: str
    module: str
    tested_with: str
    lacks: tuple[str, ...] = ()
    shards: int = 1
    launcher: str | None = None
    plain: str = "integrations.plain"


CONTESTANTS: tuple[Contestant, ...] = (
    Contestant("Trainer", "transformers", "integrations.with_trainer", "transformers 5.23"),
    Contestant(
        "SFTTrainer",
        "trl",
        "integrations.with_sft_trainer",
        "trl 1.16",
        plain="integrations.plain_sft",
    ),
    Contestant("Accelerate", "accelerate", "integrations.with_accelerate", "accelerate 1.15"),
    Contestant("Lightning", "lightning", "integrations.with_lightning", "lightning 2.6"),
    Contestant("Fabric", "lightning", "integrations.with_fabric", "lightning 2.6"),
    Contestant("FSDP2", "torch", "integrations.with_fsdp", "torch 2.13", shards=2),
    Contestant(
        "torchtitan",
        "torchtitan",
        "integrations.with_torchtitan",
        "torchtitan 0.3.0",
        shards=2,
    ),
    Contestant(
        "Ray Train",
        "ray",
        "integrations.with_ray",
        "ray 2.60",
        launcher="integrations.with_ray",
    ),
)

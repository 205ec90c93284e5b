"""Optimizers for torchtitan with replicas that vote: a file to copy beside a config registry.

Tested with torchtitan 0.3.0 and torch 2.13.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import distlion
from distlion.integrations.fsdp import disable_all_reduce


class VotingOptimizers(OptimizersContainer):
    """DistributedLion for torchtitan: the replicas of ``data_parallel_replicate_degree`` vote."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        for part in model_parts:
            disable_all_reduce(part)
        super().__init__(config, model_parts=model_parts)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name != "DistributedLion":  # replicas would diverge
            raise ValueError(f"VotingOptimizers has no {name}, only DistributedLion")
        return distlion.DistributedLion

    @staticmethod
    def _build_impl_kwargs(config: Config) -> dict[str, Any]:
        return {}  # no choice of kernels: fused=, foreach=


def voting_lion(lr: float, weight_decay: float, **options: Any) -> VotingOptimizers.Config:
    """Train all parameters by votes, with options of DistributedLion."""
    group = {"lr": lr, "weight_decay": weight_decay}
    return VotingOptimizers.Config(
        param_groups=[
            ParamGroupConfig(pattern=".*", optimizer_name="DistributedLion", optimizer_kwargs=group)
        ],
        optimizer_factory_kwargs_by_name={"DistributedLion": options},
    )

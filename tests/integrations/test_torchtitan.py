"""torchtitan's container of optimizers whose replicas vote, and the example that trains with it."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cluster import run_workers
from distlion import Replicas
from distlion.errors import UnsupportedTypeError

pytest.importorskip("torchtitan")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "replicas": Replicas(check_every=1)}


def build(replicas: int | None) -> tuple[nn.Module, Any]:
    """Return a model as torchtitan shards it, and its optimizers; None is FSDP alone."""
    sys.path.insert(0, str(EXAMPLES))
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
    from torchtitan_votes import voting_lion

    names = ("dp_replicate", "fsdp")
    shape = (replicas or 1, dist.get_world_size() // (replicas or 1))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if replicas is None:
        mesh = mesh["fsdp"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 8, bias=False))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
    return model, voting_lion(**OPTIONS).build(model_parts=[model])


def train(model: nn.Module, optimizers: Any, rank: int, steps: range) -> None:
    from torchtitan.distributed.utils import clip_grad_norm_

    for step in steps:
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs).square().mean().backward()
        clip_grad_norm_(list(model.parameters()), 1.0)
        optimizers.step()
        optimizers.zero_grad()


def digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.to_local().detach().contiguous().numpy().tobytes())
    return total.hexdigest()


def describe(model: nn.Module, optimizers: Any) -> tuple[str, str]:
    """Return digests of this rank's part of the parameters, and of its momentum."""
    (optimizer,) = optimizers
    params = list(model.parameters())
    momenta = (optimizer.state_dict()["state"][i]["exp_avg"] for i in range(len(params)))
    return digest(params), digest(momenta)


def train_and_resume(rank: int, world_size: int, replicas: int, folder: str) -> list[Any]:
    """Train six steps; save after three, and do the rest with new objects too."""
    model, optimizers = build(replicas)
    train(model, optimizers, rank, range(3))
    dcp.save({"model": model.state_dict(), "optim": optimizers.state_dict()}, checkpoint_id=folder)
    train(model, optimizers, rank, range(3, 6))

    resumed, others = build(replicas)
    state = {"model": resumed.state_dict(), "optim": others.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    resumed.load_state_dict(state["model"])
    others.load_state_dict(state["optim"])
    train(resumed, others, rank, range(3, 6))
    steps = [optimizer.committed_step for each in (optimizers, others) for optimizer in each]
    return [describe(model, optimizers), describe(resumed, others), steps]


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 2), (4, 2)])
def test_replicas_vote_and_every_momentum_comes_back(
    world_size: int, replicas: int, tmp_path: Path
) -> None:
    found = run_workers(
        train_and_resume, world_size, replicas, str(tmp_path / "saved"), timeout_s=120
    )
    for straight, resumed, steps in found:
        assert straight == resumed
        assert steps == [6, 6]
    n_shards = world_size // replicas
    for shard in range(n_shards):
        params, momenta = zip(*(each[0] for each in found[shard::n_shards]), strict=True)
        assert len(set(params)) == 1
        assert len(set(momenta)) == replicas, "gradients were averaged before the vote"


def refuse_another_optimizer(rank: int, world_size: int) -> str:
    model, optimizers = build(world_size)
    from torchtitan.components.optimizer import default_adamw

    config = type(optimizers).Config(param_groups=default_adamw().param_groups)
    with pytest.raises(ValueError, match="no AdamW, only DistributedLion") as caught:
        config.build(model_parts=[model])
    return str(caught.value)


def test_an_optimizer_that_does_not_vote_is_refused() -> None:
    assert all(run_workers(refuse_another_optimizer, 2, timeout_s=120))


def refuse_a_single_replica(rank: int, world_size: int) -> str:
    with pytest.raises(UnsupportedTypeError, match="without a replicate dim") as caught:
        build(None)
    return str(caught.value)


def test_a_model_whose_replicas_are_one_is_refused() -> None:
    assert all(run_workers(refuse_a_single_replica, 2, timeout_s=120))


def run_example(*options: str) -> str:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    finished = subprocess.run(
        [*launch, str(EXAMPLES / "06_torchtitan.py"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def read(checkpoint: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint."""
    whole = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, whole)
    return dict(list_tensors(torch.load(whole, weights_only=False), ""))


def list_tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from list_tensors(each, f"{name}.{key}")


def test_example_trains_and_resumes_under_torchtitans_trainer(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="torchtitan's models import Triton")
    before = run_example("--before", "--steps=6", "--save-every=6", f"--folder={tmp_path}")
    assert "bytes sent" not in before
    printed = run_example("--steps=12", "--save-every=6", f"--folder={tmp_path}")
    n_params = 2_753_792
    (sent,) = re.findall(r"bytes sent in a step (\d+)", printed)
    assert n_params / 8 < int(sent) < 2 * n_params / 8
    (loss,) = re.findall(r"test loss (\d\.\d+)", printed)
    assert float(loss) < 6  # begins with 7.7
    straight = read(tmp_path / "votes" / "checkpoint" / "step-12")
    (tmp_path / "votes" / "checkpoint" / "step-12").rename(tmp_path / "straight")
    run_example("--steps=12", "--save-every=6", f"--folder={tmp_path}")
    resumed = read(tmp_path / "votes" / "checkpoint" / "step-12")

    assert straight.keys() == resumed.keys()
    momenta = [key for key in straight if key.endswith(".exp_avg")]
    assert momenta
    for key in straight:
        assert torch.equal(straight[key], resumed[key]), key
    for key in momenta:  # (workers, *shape): of workers that have seen other data
        assert not torch.equal(*straight[key]), key

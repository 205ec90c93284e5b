"""A run of a method in the network lab, inside one worker: its steps and their bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config

from distlion.local import LocalSteps
from distlion.optim import DistributedLion, Lion
from distlion.step import Replicas
from distlion.wire.tcp import WIRE_VARIABLE, choose_wire
from distlion_lab.baselines.ddp import compress_gradients, wrap_in_ddp
from distlion_lab.planning.line import wire_bytes
from distlion_lab.tasks.base import Batch, batch_loss, seeded_generator
from distlion_lab.tasks.models import build_language_model
from distlion_netlab.device import EmulatedModel
from distlion_netlab.method_names import (
    ALL_REDUCE,
    BASELINES,
    FLOOR,
    find_period,
    find_wire,
    parse_vote,
)
from distlion_netlab.rehearsal import is_trying_overlap, rehearse_step
from distlion_netlab.workload import DeviceWorkload, GptWorkload, VectorWorkload, Workload

_LR = 1e-4
_WEIGHT_DECAY = 0.1
_SEED = 0
# Batches that a worker repeats again and again.
_BATCHES = 4


@dataclass(frozen=True)
class LabRun:
    """A method with its own model, optimizer and state.

    Attributes:
        step: Function that does one step.
        optimizer: The voting optimizer; None for a baseline.
        n_parameters: Number of trainable elements.
        device: Device that trains.
        wire: The transport of votes.
    """

    step: Callable[[], None]
    optimizer: DistributedLion | LocalSteps | None
    n_parameters: int
    device: str = "cpu"
    wire: str = "gloo"

    def wait_for_device(self) -> None:
        """Wait until the device has done all steps."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def sent_bytes(self) -> int | None:
        """Return the bytes that the last step handed to the network; None if not counted."""
        return None if self.optimizer is None else self.optimizer.traffic.last_sent_bytes

    def wire_bytes(self) -> int | None:
        """Return the bytes that the interface should count for that, by the cost model."""
        return None if self.optimizer is None else wire_bytes(self.optimizer.plan, wire=self.wire)

    def verify_replicas(self) -> None:
        """Check that all workers hold the same parameters, for a method that votes.

        Raises:
            ReplicaMismatchError: They do not.
        """
        if self.optimizer is not None:
            self.optimizer.verify_replicas()


def start_run(name: str, workload: Workload, *, rank: int) -> LabRun:
    """Start a run; every rank calls it, in the same order.

    Args:
        name: Name of the method, as in ``distlion_netlab.method_names``.
        workload: Model and data, emulated accelerator, or vector.
        rank: Number of this worker; data differs between workers.
    """
    with _over(find_wire(name)):
        if isinstance(workload, VectorWorkload):
            run = _build_exchange(name, workload, rank)
        else:
            run = _build_training(name, workload, rank)
        return replace(run, wire=choose_wire())


@contextmanager
def _over(wire: str | None) -> Iterator[None]:
    """Let optimizers that are made meanwhile take this transport; None for the default one."""
    before = os.environ.get(WIRE_VARIABLE)
    if wire is not None:
        os.environ[WIRE_VARIABLE] = wire
    try:
        yield
    finally:  # a method that cannot run leaves the next one its own transport
        os.environ.pop(WIRE_VARIABLE, None)
        if before is not None:
            os.environ[WIRE_VARIABLE] = before


def average_gradients(model: nn.Module, name: str, *, seed: int) -> nn.Module:
    """Wrap a model in DDP as one of ``BASELINES``; without compression it has no hook.

    Args:
        model: The model, on every worker.
        name: Name of the method.
        seed: Seed of PowerSGD's draws.
    """
    compression = BASELINES[name]
    wrapped = wrap_in_ddp(model, compression)
    if compression is not None:
        compress_gradients(wrapped, compression, seed=seed)
    return wrapped


def make_batches(workload: GptWorkload, *, rank: int) -> list[Batch]:
    """Draw a worker's batches of random tokens, on its device."""
    batches = []
    for number in range(_BATCHES):
        generator = seeded_generator(_SEED, number, rank)
        shape = (workload.batch_size, workload.context + 1)
        tokens = torch.randint(workload.vocabulary, shape, generator=generator, device="cpu")
        tokens = tokens.to(workload.device)
        batches.append(
            Batch({"input_ids": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous())
        )
    return batches


def _build_training(name: str, workload: GptWorkload | DeviceWorkload, rank: int) -> LabRun:
    if isinstance(workload, DeviceWorkload):
        model: nn.Module = EmulatedModel(workload, seed=_SEED, rank=rank)
        find_loss: FindLoss = _loss_of_device
        device, backwards = "cpu", 1
    else:
        device, backwards = workload.device, workload.backwards
        model = build_language_model(_describe_model(workload), seed=_SEED).to(device)
        batches = make_batches(workload, rank=rank)
        find_loss = partial(_loss_of_gpt, batches, device)
    n_parameters = sum(p.numel() for p in model.parameters())
    if name == FLOOR or name in BASELINES:
        optimizer = Lion(model.parameters(), lr=_LR, weight_decay=_WEIGHT_DECAY)
        model = model if name == FLOOR else average_gradients(model, name, seed=_SEED)
        step = _training_step(model, optimizer, find_loss, backwards)
        return LabRun(step, None, n_parameters, device)
    if (every := find_period(name)) > 1:
        inner = torch.optim.AdamW(model.parameters(), lr=_LR, fused=True)
        local = LocalSteps(inner, every=every, replicas=Replicas(check_every=None), seed=_SEED)
        step = _training_step(model, local, find_loss, backwards)
        return LabRun(step, local, n_parameters, device)
    voting = _build_optimizer(name, model)
    step = _training_step(model, voting, find_loss, backwards)
    while is_trying_overlap(voting):
        step()
    return LabRun(step, voting, n_parameters, device)


FindLoss = Callable[[nn.Module, int], Tensor]
"""A function of the model and the number of the backward pass."""


def _loss_of_gpt(batches: list[Batch], device: str, model: nn.Module, number: int) -> Tensor:
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        return batch_loss(model, batches[number % len(batches)])


def _loss_of_device(model: nn.Module, number: int) -> Tensor:
    loss: Tensor = model()
    return loss


def _describe_model(workload: GptWorkload) -> GPT2Config:
    return GPT2Config(
        vocab_size=workload.vocabulary,
        n_positions=workload.context,
        n_embd=workload.width,
        n_layer=workload.layers,
        n_head=workload.heads,
        activation_function="gelu_pytorch_tanh",  # GPT-2's, in one operation
        tie_word_embeddings=workload.ties_embeddings,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def _build_optimizer(name: str, model: nn.Module) -> DistributedLion:
    return DistributedLion(
        model.named_parameters(),
        lr=_LR,
        weight_decay=_WEIGHT_DECAY,
        # Regular comparisons of replicas would make a few steps longer; one follows at the end.
        replicas=Replicas(check_every=None),
        seed=_SEED,
        **parse_vote(name),
    )


def _training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | LocalSteps,
    find_loss: FindLoss,
    backwards: int,
) -> Callable[[], None]:
    done = 0

    def step() -> None:
        nonlocal done
        for left in reversed(range(backwards)):
            with _accumulate(model, optimizer) if left else nullcontext():
                (find_loss(model, done) / backwards).backward()  # type: ignore[no-untyped-call]
            done += 1
        optimizer.step()
        optimizer.zero_grad()

    return step


def _accumulate(model: nn.Module, optimizer: object) -> AbstractContextManager[None]:
    """Return a context in which gradients add up, and nothing is sent."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return optimizer.no_sync() if isinstance(optimizer, DistributedLion) else nullcontext()


def _build_exchange(name: str, workload: VectorWorkload, rank: int) -> LabRun:
    n_elements = workload.n_elements
    if name == ALL_REDUCE:
        # Sums would soon overflow; zeros take the same time.
        vector = torch.zeros(n_elements, dtype=torch.float32, device="cpu")
        return LabRun(lambda: _all_reduce(vector), None, n_elements)
    param = nn.Parameter(torch.zeros(n_elements, dtype=torch.float32, device="cpu"))
    param.grad = torch.randn(
        n_elements, generator=seeded_generator(_SEED, rank), dtype=torch.float32, device="cpu"
    )
    holder = nn.ParameterDict({"vector": param})
    optimizer = _build_optimizer(name, holder)
    # The commit is no part of the exchange.
    return LabRun(partial(rehearse_step, optimizer), optimizer, n_elements)


def _all_reduce(vector: Tensor) -> None:
    dist.all_reduce(vector)

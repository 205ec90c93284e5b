"""Accelerate with workers that vote: no wrapper around the model, every momentum saved.

Tested with accelerate 1.15; another major version is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from distlion.checkpoint import Check, WorldChange, load_together, save_checkpoint
from distlion.errors import ProcessGroupError, UnsupportedTypeError
from distlion.integrations.frameworks import (
    Voter,
    broadcast_rest,
    check_version,
    check_votes,
    compare_at_end,
    hold_back,
    refuse_between_votes,
    save_for_all,
    vote_on_deltas,
)
from distlion.integrations.logging import PREFIX, VoteMeter
from distlion.local.local_steps import LocalSteps
from distlion.optim.distributed_lion import DistributedLion

check_version("accelerate", major=1, extra="accelerate")
from accelerate import Accelerator  # noqa: E402, once its version is known
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

# The optimizers are included, so that a script needs one import line for its changes.
__all__ = ["DistributedLion", "LocalSteps", "VotingAccelerator"]

FOLDER = "distlion"
"""Folder inside the one that ``save_state`` writes; further optimizers add a number to it."""


class VotingAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator for workers that keep their gradients and momentum, and vote.

    Args:
        args, kwargs: Arguments of ``Accelerator``.
        on_world_change: Momenta with which workers begin if ``load_state`` finds another number
            of them, as in ``distlion.load_checkpoint``. "raise" refuses.

    Raises:
        MissingDependencyError: accelerate has another major version.
        UnsupportedTypeError: An optimizer does not vote, or Accelerate is set up to
            shard the model.
        ProcessGroupError: Accelerate counts other processes than the process group has.
        CheckpointError: As in ``distlion.save_checkpoint`` and ``load_checkpoint``; on every rank.

    Notes:
        The model is not wrapped in DistributedDataParallel. With overlap, ``accumulate``
        and ``no_sync`` hold back votes; ``clip_grad_norm_`` clips each worker by its own norm.
        ``save_state`` writes ``distlion/`` beside Accelerate's files, and ``load_state`` needs it.
        Workers of ``LocalSteps`` vote before ``save_state``; call ``vote()`` before an evaluation
        and before ``save_model``, which refuses a model between two votes.

    Example:
        >>> accelerator = VotingAccelerator()
        >>> optimizer = DistributedLion(model.parameters(), lr=1e-4)
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    """

    step: int
    _optimizers: list[Optimizer]

    def __init__(self, *args: Any, on_world_change: WorldChange = "raise", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kind = self.distributed_type.value
        if not (kind == "NO" or kind.startswith("MULTI_")):
            raise UnsupportedTypeError(
                f"Accelerate is set up for {kind}, which shards the model or drives the optimizer "
                "in its own way; VotingAccelerator needs plain data parallelism"
            )
        if dist.is_initialized() and dist.get_world_size() != self.num_processes:
            # Accelerate would give all processes the same data, and each would save on its own.
            raise ProcessGroupError(
                f"Accelerate counts {self.num_processes} processes, and the process group has "
                f"{dist.get_world_size()}; on CPUs give VotingAccelerator(cpu=True)"
            )
        self._on_world_change = on_world_change
        self._voting: list[_VotingOptimizer] = []
        self._meters: list[VoteMeter] = []
        self.register_save_state_pre_hook(self._save_votes)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Place a model, without a wrapper that averages its gradients."""
        placed: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not evaluation_mode:
            broadcast_rest(placed)
        return placed

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> Optimizer:
        """Prepare an optimizer, which must vote."""
        if not isinstance(optimizer, _VotingOptimizer):
            placement = self.device_placement if device_placement is None else device_placement
            voter = save_for_all(check_votes(optimizer, type(self).__name__))
            optimizer = _VotingOptimizer(voter, placement, self.scaler)
            self._voting.append(optimizer)
            self._meters.append(VoteMeter(voter))
        prepared: Optimizer = super().prepare_optimizer(optimizer)
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients: in this context, overlap sends no votes during backward."""
        with ExitStack() as stack:
            for each in self._voting:
                stack.enter_context(hold_back(each.voter))
            yield

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """Set whether batches are made even, as in Accelerate; every process takes every step.

        Raises:
            UnsupportedTypeError: They would not be even.
        """
        is_even = self.even_batches if even_batches is None else even_batches
        if self.num_processes > 1 and not is_even:
            raise UnsupportedTypeError(
                "join_uneven_inputs: a worker whose batches have run out would not vote, and each "
                "step needs all workers; give even_batches=True, or drop the last batches"
            )
        # Accelerate hands bare models to torch's Join on GPUs, which takes only DDP's.
        samplers: list[Any] = [getattr(each, "batch_sampler", None) for each in self._dataloaders]
        kept = [(each, each.even_batches) for each in samplers if hasattr(each, "even_batches")]
        for sampler, _ in kept:
            sampler.even_batches = is_even
        try:
            yield
        finally:
            for sampler, before in kept:
                sampler.even_batches = before

    def free_memory(self, *objects: Any) -> Any:
        """Release models and optimizers as Accelerate does, between two trainings."""
        while self._meters:
            self._meters.pop().close()
        self._voting.clear()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Compare replicas once more, then end as Accelerate does; every process must call it.

        Raises:
            ReplicaMismatchError: Replicas differ; on every rank.
        """
        compare_at_end(each.voter for each in self._voting)
        super().end_training()

    def vote(self) -> None:
        """Let workers of ``LocalSteps`` vote, so that all have the same parameters.

        Every process must call it, for example before an evaluation and at the end of a run.
        ``DistributedLion`` votes in each step and needs nothing here.
        """
        vote_on_deltas(each.voter for each in self._voting)

    def log_votes(self, step: int | None = None) -> None:
        """Log measurements of the votes since the last call to the trackers of ``init_trackers``.

        Args:
            step: Number of the step, as in ``log``. Names of further optimizers have their number.
        """
        for number, meter in enumerate(self._meters):
            prefix = f"{PREFIX}-{number}" if number else PREFIX
            numbers = {f"{prefix}/{name}": value for name, value in meter.read().items()}
            if numbers:
                self.log(numbers, step=step)

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Save as Accelerate does, and return once all processes have written their files.

        Workers with local steps vote first: Accelerate saves one model for all.
        """
        self.vote()
        folder: str = super().save_state(*args, **kwargs)
        self.wait_for_everyone()
        return folder

    def save_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Save a model as Accelerate does, after a vote.

        Raises:
            CheckpointError: This worker has taken local steps since the last vote, so its
                parameters are not those of the others.
        """
        voters = [each.voter for each in self._voting]
        refuse_between_votes(voters, call="accelerator.vote()")
        super().save_model(model, *args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load Accelerate's state and every worker's momentum: all of it, or nothing on any rank.

        Raises:
            CheckpointError: A process cannot load a file; raised on every rank, with nothing
                changed.
        """
        step, load = self.step, super().load_state

        def load_rest(check: Check) -> None:
            with self._loading_no_optimizer(check):
                load(*args, **kwargs)

        try:
            load_together(
                nn.ModuleList(self._models),
                [each.voter for each in self._voting],
                load_rest,
                *(self._schedulers, self._dataloaders, self._custom_objects, self.scaler),
                on_world_change=self._on_world_change,
            )
        except BaseException:
            self.step = step
            raise

    @contextmanager
    def _loading_no_optimizer(self, check: Check) -> Iterator[None]:
        """Keep Accelerate from loading rank 0's momenta, and run the check before other hooks."""
        hook = self.register_load_state_pre_hook(
            lambda models, folder: check(self._name_folders(folder))
        )
        self._load_model_state_pre_hook.move_to_end(hook.id, last=False)
        optimizers, self._optimizers = self._optimizers, []
        try:
            yield
        finally:
            self._optimizers = optimizers
            hook.remove()

    def _save_votes(self, models: list[nn.Module], weights: Any, folder: str) -> None:
        for each, path in zip(self._voting, self._name_folders(folder), strict=True):
            # Accelerate saves the model, and replaces files of another run in the folder.
            model = nn.ModuleList(models)
            save_checkpoint(path, model, each.voter, keep_last=1, only_trained=True, overwrite=True)

    def _name_folders(self, folder: str) -> list[Path]:
        names = [f"{FOLDER}-{number}" if number else FOLDER for number in range(len(self._voting))]
        return [Path(folder, name) for name in names]


class _VotingOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer that Accelerate treats as its own."""

    def __init__(self, voter: Voter, device_placement: bool, scaler: Any) -> None:
        super().__init__(voter, device_placement=device_placement, scaler=scaler)
        self.voter = voter
        self._is_accelerate_prepared = True  # so that it is not wrapped again

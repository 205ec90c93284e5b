"""Lightning's Trainer with workers that vote: no wrapper around the model, every momentum saved.

Tested with lightning 2.6; another major version is refused. For Fabric there is
``distlion.integrations.fabric``.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from distlion.checkpoint import WorldChange, check_checkpoints, load_together
from distlion.errors import InvalidArgumentError
from distlion.integrations.companion import (
    KEY,
    check_names,
    find_votes,
    name_companion,
    saving_votes,
)
from distlion.integrations.frameworks import (
    Voter,
    broadcast_rest,
    check_retries,
    check_version,
    check_votes,
    compare_at_end,
    hold_back,
    naming_what_is_loaded,
    save_for_all,
    vote_on_deltas,
)
from distlion.integrations.logging import PREFIX, VoteMeter
from distlion.local.local_steps import LocalSteps
from distlion.optim.distributed_lion import DistributedLion
from distlion.step.arguments import check_positive

check_version("lightning", major=2, extra="lightning")
from lightning.pytorch.callbacks import Callback  # noqa: E402, once its version is known
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

# The optimizers are included, so that a script needs one import line for its changes.
__all__ = ["CrewSteps", "DistributedLion", "LocalSteps", "VoteMonitor", "VotingStrategy"]

_OF_DDP = {"ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period"}


class VotingStrategy(DDPStrategy):  # type: ignore[misc]
    """A strategy for workers that keep their gradients and momentum, and vote.

    Args:
        on_world_change: Momenta with which workers begin if a run is resumed on another number of
            them, as in ``distlion.load_checkpoint``. "raise" refuses.
        kwargs: Arguments of ``DDPStrategy``, except for its averaging of gradients.

    Raises:
        MissingDependencyError: lightning has another major version.
        UnsupportedTypeError: An optimizer does not vote.
        InvalidArgumentError: An argument concerns the averaging of gradients.
        CheckpointError: As in ``distlion.save_checkpoint`` and ``load_checkpoint``; on every rank.

    Notes:
        The module is not wrapped in DistributedDataParallel. Accumulation holds back votes under
        overlap; ``gradient_clip_val`` clips each worker by its own norm. The workers' momenta of a
        checkpoint ``NAME.ckpt`` are in the folder ``NAME.ckpt.distlion`` beside it; a run does not
        resume without them. Workers of ``LocalSteps`` vote before each validation, before they are
        saved, and at the end of a fit.

    Example:
        >>> trainer = lightning.Trainer(strategy=VotingStrategy(), devices=2)
        >>> trainer.fit(module, loader)  # its configure_optimizers returns a DistributedLion
    """

    def __init__(self, *, on_world_change: WorldChange = "raise", **kwargs: Any) -> None:
        refused = sorted(_OF_DDP & kwargs.keys())
        if refused:
            raise InvalidArgumentError(
                f"{', '.join(refused)}: VotingStrategy averages no gradients and has no such hook"
            )
        super().__init__(**kwargs)
        self._on_world_change = on_world_change

    @property
    def voters(self) -> list[Voter]:
        """The optimizers, without Lightning's wrappers."""
        return [check_votes(optimizer, type(self).__name__) for optimizer in self.optimizers]

    def configure_ddp(self) -> None:
        """Leave the module unwrapped, but copy buffers and frozen parameters from rank 0."""
        broadcast_rest(self.lightning_module)

    def setup_optimizers(self, trainer: Any) -> None:
        """Create optimizers, which must vote."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            save_for_all(check_votes(optimizer, type(self).__name__))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients: in this context, overlap sends no votes during backward."""
        with ExitStack() as stack:
            for voter in self.voters:
                stack.enter_context(hold_back(voter))
            yield

    def on_validation_start(self) -> None:
        """Let workers with local steps vote: each validates a part of the data."""
        super().on_validation_start()
        self._vote()

    def on_train_end(self) -> None:
        """Let workers with local steps vote, and compare replicas: all end with the same ones."""
        super().on_train_end()
        self._vote()
        compare_at_end(self.voters)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state for Lightning, after a vote of workers with local steps."""
        self._vote()
        saved: dict[str, Any] = super().lightning_module_state_dict()
        return saved

    def _vote(self) -> None:
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            vote_on_deltas(self.voters)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save the momenta of all workers, then Lightning's file, which names them."""
        votes: AbstractContextManager[None] = nullcontext()
        if "optimizer_states" in checkpoint:
            voters = dict(enumerate(self.voters))
            model, barrier = self.lightning_module, self.barrier
            votes = saving_votes(checkpoint, filepath, model, voters, barrier=barrier)
        with votes:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load Lightning's file; to resume, check all workers' momenta before loading anything.

        Raises:
            CheckpointError: A worker cannot resume from it; on every rank, with nothing changed.
        """
        load = partial(super().load_checkpoint, checkpoint_path, *args, **kwargs)
        checkpoint: dict[str, Any] = {}
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            checkpoint.update(load())
            return checkpoint

        def find() -> list[Path]:
            checkpoint.update(load())
            checkpoint[KEY] = find_votes(checkpoint, checkpoint_path)
            return list(checkpoint[KEY].values())

        check_checkpoints(find, on_world_change=self._on_world_change)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the momenta of all workers, not rank 0's momenta from the file."""
        voters, folders = dict(enumerate(self.voters)), checkpoint.get(KEY, {})
        with naming_what_is_loaded("Lightning"):
            check_names(folders, voters)
            load_together(
                self.lightning_module,
                list(voters.values()),
                lambda check: check([folders[name] for name in voters]),
                on_world_change=self._on_world_change,
            )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint with its momenta."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(name_companion(filepath), ignore_errors=True)


class VoteMonitor(Callback):  # type: ignore[misc]
    """Log measurements of the votes to the Trainer's loggers, every ``log_every_n_steps`` steps.

    Example:
        >>> lightning.Trainer(strategy=VotingStrategy(), callbacks=[VoteMonitor()])
    """

    def __init__(self) -> None:
        self._meters: list[VoteMeter] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin measuring."""
        voters = [check_votes(each, type(self).__name__) for each in trainer.optimizers]
        self._meters = [VoteMeter(voter) for voter in voters]

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Log whenever the Trainer does; names of further optimizers have their number."""
        if trainer.global_step == 0 or trainer.global_step % trainer.log_every_n_steps:
            return
        for number, meter in enumerate(self._meters):
            prefix = f"{PREFIX}-{number}" if number else PREFIX
            numbers = {f"{prefix}/{name}": value for name, value in meter.read().items()}
            for logger in trainer.loggers if numbers else ():
                logger.log_metrics(numbers, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Release the optimizers."""
        for meter in self._meters:
            meter.close()


class CrewSteps(Callback):  # type: ignore[misc]
    """End a fit once the crew has taken its steps: a newcomer has fewer to take.

    Args:
        max_steps: Committed steps at which all members end. Give the Trainer ``max_epochs=-1``.

    Raises:
        UnsupportedTypeError: An optimizer does not try its steps again as members come and go.
        InvalidArgumentError: The Trainer is to resume from a checkpoint, or not to end early.
    """

    def __init__(self, max_steps: int) -> None:
        check_positive("max_steps", max_steps)
        self._goal = max_steps

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check what the Trainer is asked for."""
        if stage == TrainerFn.FITTING and trainer.ckpt_path is not None:
            raise InvalidArgumentError(
                f"ckpt_path={trainer.ckpt_path!r}: Lightning's checkpoints have no momenta of a "
                "crew, and a load needs all members at one time; load the module's weights on all "
                "of them and fit without it"
            )
        if trainer.fit_loop.min_epochs or trainer.fit_loop.min_steps:
            raise InvalidArgumentError(
                f"min_epochs={trainer.fit_loop.min_epochs}, min_steps={trainer.fit_loop.min_steps}:"
                " this member would go on after the others have ended; leave them out"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the optimizers."""
        for each in trainer.optimizers:
            check_retries(each)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Let in the workers that wait."""
        for each in trainer.optimizers:
            check_retries(each).admit()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Look at the committed steps."""
        if min(check_retries(each).committed_step for each in trainer.optimizers) >= self._goal:
            trainer.should_stop = True

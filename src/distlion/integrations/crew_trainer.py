"""Hugging Face's Trainer, and TRL's trainers derived from it, as a member of a crew.

Tested with transformers 5.23 and accelerate 1.15.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distlion.crew import Crew
from distlion.crew.retry import RetryingLion
from distlion.errors import CheckpointError, InvalidArgumentError, UnsupportedTypeError
from distlion.integrations.frameworks import check_retries, check_version
from distlion.integrations.transformers import EXTRA, check_trainer

# The crew is included, so that a script needs one import line for its changes.
__all__ = ["Crew", "CrewMixin"]

# Once distlion.integrations.transformers has checked its version.
from transformers import Trainer, TrainerCallback

_OVERRIDDEN = (
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "train",
    "set_initial_training_values",
    "_save",
    "_save_optimizer_and_scheduler",
)
check_trainer(Trainer, _OVERRIDDEN)


class CrewMixin(Trainer):  # type: ignore[misc]
    """A mixin to put before a Trainer, which then trains as a member of a crew.

    Start each member by itself, with ``python``. After each step ``state.global_step`` is the
    crew's committed step: a newcomer goes on from where the others are, and ends where they do.

    Raises:
        MissingDependencyError: transformers, accelerate or TRL has another major version.
        UnsupportedTypeError: The optimizer is no crew's, or was made without ``retry=True``; or
            the environment tells the Trainer of other processes.
        InvalidArgumentError: The scheduler is missing or not carried; there is no ``max_steps``;
            or an argument asks for what members do not share, as the message says.
        CheckpointError: transformers saved no weights.

    Notes:
        All members need the same ``max_steps``, and ``data_seed=crew.id``, without which all read
        the same batches. Each saves its own model into its own ``output_dir``, without momenta.

    Example:
        >>> class CrewTrainer(CrewMixin, Trainer): ...
        >>> with distlion.Crew("head:29400", min_workers=2) as crew:
        ...     optimizer = crew.optimizer(model.named_parameters(), lr=1e-4, retry=True)
        ...     scheduler = get_cosine_schedule_with_warmup(optimizer, 200, 1000)
        ...     crew.carry(scheduler=scheduler)
        ...     args = TrainingArguments(max_steps=1000, data_seed=crew.id)
        ...     both = (optimizer, scheduler)
        ...     CrewTrainer(model, args, train_dataset=data, optimizers=both).train()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._member = check_retries(self.optimizer)
        # Before the callbacks that read the number of steps.
        self.callback_handler.callbacks.insert(0, _Following(self, self._member))

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that knows of this process alone, and loads no optimizer."""
        if any(base.__module__.split(".")[0] == "trl" for base in type(self).__mro__):
            check_version("trl", major=1, extra=EXTRA)
        super().create_accelerator_and_postprocess()
        kind = self.accelerator.distributed_type.value
        if kind != "NO":
            raise UnsupportedTypeError(
                f"the Trainer is set up for {kind}, and a member of a crew trains by itself: start "
                "it with python, without torchrun, accelerate launch, --fsdp and --deepspeed, and "
                "without RANK and WORLD_SIZE in its environment"
            )
        prepare = self.accelerator.prepare_optimizer

        def prepare_in_place(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> Any:
            # A load needs all members at one time, and newcomers come when they come.
            return prepare(optimizer, device_placement=False)

        self.accelerator.prepare_optimizer = prepare_in_place

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the crew's optimizer, which the Trainer was given."""
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train until the crew has taken ``max_steps``."""
        if resume_from_checkpoint:
            raise InvalidArgumentError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: the Trainer's checkpoints "
                "have no momenta of a crew, and its members must begin alike; load the model with "
                "from_pretrained on all members and call train()"
            )
        if self.lr_scheduler is None or not self._member.carries(self.lr_scheduler):
            raise InvalidArgumentError(
                "the scheduler is missing, or a newcomer would begin it anew, at another learning "
                "rate than the others; make it, call crew.carry(scheduler=scheduler) and give "
                "optimizers=(optimizer, scheduler)"
            )
        if self.args.max_steps <= 0:
            raise InvalidArgumentError(
                f"max_steps={self.args.max_steps}: members end at one step of the crew, and a pass "
                "over the data is each member's own; give TrainingArguments max_steps="
            )
        if self.args.load_best_model_at_end:
            raise InvalidArgumentError(
                "load_best_model_at_end=True: a newcomer has not seen the earlier checkpoints, so "
                "that members would end with different models; load the best one afterwards"
            )
        return super().train(None, *args, **kwargs)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Let the passes over the data go on until the crew has taken its steps."""
        _, *rest = super().set_initial_training_values(*args, **kwargs)
        return (sys.maxsize, *rest)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # transformers asks the process group whether to write, and each member has files of its
        # own.
        with _saved_by_all(self.accelerator.unwrap_model(self.model)):
            super()._save(output_dir, state_dict)
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
            raise CheckpointError(
                f"transformers {version('transformers')} saved no weights in {folder}: it takes "
                f"another member for the one that saves; pip install 'distlion[{EXTRA}]'"
            )

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save neither: one member's momenta are not those of the others."""


@contextmanager
def _saved_by_all(model: nn.Module) -> Iterator[None]:
    """Let a model be saved whatever this process's rank in the crew is."""
    if not hasattr(model, "should_save_on_this_rank"):
        yield
        return
    vars(model)["should_save_on_this_rank"] = lambda is_main_process: is_main_process
    try:
        yield
    finally:
        del vars(model)["should_save_on_this_rank"]


class _Following(TrainerCallback):  # type: ignore[misc]
    """Let the Trainer count the steps of the crew.

    Args:
        trainer: The Trainer.
        optimizer: The crew's.
    """

    def __init__(self, trainer: CrewMixin, optimizer: RetryingLion) -> None:
        self._trainer, self._optimizer = trainer, optimizer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._optimizer.admit()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The loss that is logged next is the mean over the steps that this member has taken.
        self._trainer._globalstep_last_logged += self._optimizer.committed_step - state.global_step
        state.global_step = self._optimizer.committed_step

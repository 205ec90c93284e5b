"""Hugging Face's Trainer, and TRL's trainers derived from it, as a member of a crew.

Tested with transformers 5.23 and accelerate 1.15.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distlion.crew import Crew
from distlion.crew.retry import RetryingLion
from distlion.errors import InvalidArgumentError
from distlion.integrations.frameworks import check_retries
from distlion.integrations.transformers import check_trainer, refuse_sharding

# The crew is included, so that a script needs one import line for its changes.
__all__ = ["Crew", "CrewMixin"]

# Once distlion.integrations.transformers has checked its version.
from transformers import Trainer, TrainerCallback

_OVERRIDDEN = (
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "train",
    "_init_training_state",
    "_save_optimizer_and_scheduler",
)
check_trainer(Trainer, _OVERRIDDEN)


class CrewMixin(Trainer):  # type: ignore[misc]
    """A mixin to put before a Trainer, which then trains as a member of a crew.

    Start each member by itself, with ``python``. ``state.global_step`` is the crew's committed
    step: a newcomer begins with those that the others have taken, and ends where they do.

    Raises:
        MissingDependencyError: transformers or accelerate has another major version.
        UnsupportedTypeError: The optimizer is none of a crew, or the model is sharded or wrapped.
        InvalidArgumentError: The optimizer was made without ``retry=True``, or the Trainer is to
            resume from a checkpoint.

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
        self.add_callback(_Following(self._member))

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that neither wraps the model nor loads the optimizer's state."""
        super().create_accelerator_and_postprocess()
        refuse_sharding(self.accelerator, "CrewMixin")
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
        return super().train(None, *args, **kwargs)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        begun: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        self.state.global_step = self._member.committed_step
        return begun

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save neither: one member's momenta are not those of the others."""


class _Following(TrainerCallback):  # type: ignore[misc]
    """Let the Trainer count the steps of the crew."""

    def __init__(self, optimizer: RetryingLion) -> None:
        self._optimizer = optimizer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.global_step = self._optimizer.committed_step
        if state.global_step >= state.max_steps:
            control.should_training_stop = True

"""Hugging Face's Trainer, and TRL's trainers derived from it, with workers that vote.

Tested with transformers 5.23, accelerate 1.15, trl 1.16 and peft 0.21.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from distlion.checkpoint import (
    WorldChange,
    check_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from distlion.errors import (
    CheckpointError,
    InvalidArgumentError,
    MissingDependencyError,
    UnsupportedTypeError,
)
from distlion.integrations.frameworks import (
    Voter,
    begin_at_loaded,
    check_version,
    compare_at_end,
    hold_back,
    naming_what_is_loaded,
    refuse_between_votes,
    save_for_all,
    vote_on_deltas,
)
from distlion.integrations.logging import PREFIX, VoteMeter
from distlion.local.local_steps import LocalSteps
from distlion.optim.distributed_lion import DistributedLion
from distlion.step.buffers import average_buffers

# The optimizers are included, so that a script needs one import line for its changes.
__all__ = ["DistributedLion", "LocalSteps", "VotingMixin"]

EXTRA = "transformers"

FOLDER = "distlion"
"""Folder inside each ``checkpoint-N`` of a Trainer."""

_OVERRIDDEN = (
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "train",
    "training_step",
    "evaluate",
    "_get_grad_norm",
    "save_model",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
)


def check_trainer(trainer: type, overridden: Sequence[str] = _OVERRIDDEN) -> None:
    """Refuse a Trainer without the methods overridden here: votes would be lost silently.

    Raises:
        MissingDependencyError: The Trainer lacks one of them.
    """
    missing = [name for name in overridden if not hasattr(trainer, name)]
    if missing:
        raise MissingDependencyError(
            f"the Trainer of transformers {version('transformers')} has no {', '.join(missing)}, "
            f"which distlion.integrations.transformers overrides: "
            f"pip install 'distlion[{EXTRA}]'"
        )


# The overridden methods may have other names in other major versions.
check_version("transformers", major=5, extra=EXTRA)
check_version("accelerate", major=1, extra=EXTRA)
from transformers import Trainer  # noqa: E402, once its version is known

check_trainer(Trainer)


# A Trainer itself, so that Python refuses it after Trainer in a list of bases, where it would do
# nothing.
class VotingMixin(Trainer):  # type: ignore[misc]
    """A mixin to put before a Trainer: workers keep their gradients and momentum, and vote.

    The model is not wrapped in DistributedDataParallel. Checkpoints hold every worker's momentum,
    in ``checkpoint-N/distlion``, and runs resume with them.

    Attributes:
        on_world_change: Momenta with which workers begin if a run is resumed on another number of
            them, as in ``distlion.load_checkpoint``. "raise" refuses.

    Raises:
        MissingDependencyError: transformers, accelerate or TRL has another major version.
        UnsupportedTypeError: The optimizer does not vote, or the model is sharded or wrapped by
            FSDP, DeepSpeed, DistributedDataParallel or another plugin.
        InvalidArgumentError: Arguments contradict each other; the message names them.
        CheckpointError: As in ``distlion.save_checkpoint`` and ``load_checkpoint``.

    Notes:
        Without "lr", the optimizer takes ``TrainingArguments.learning_rate``. The weight decay is
        ``TrainingArguments.weight_decay``, for the parameters that the Trainer decays. With
        ``max_grad_norm`` the Trainer clips each worker's gradients by their own norm. "grad_norm"
        in its logs is rank 0's own, before clipping. Buffers start as on rank 0. Frozen parameters
        are not sent, as they may be large; load them alike.

        Local steps: ``optimizer_cls_and_kwargs=(LocalSteps, {"inner": torch.optim.AdamW, "every":
        8})``, where "inner_options" has further arguments of the inner optimizer. Workers vote
        before each evaluation, before they are saved, and at the end.

    Example:
        >>> class VotingTrainer(VotingMixin, Trainer): ...
        >>> trainer = VotingTrainer(
        ...     model,
        ...     TrainingArguments(learning_rate=1e-4, weight_decay=0.1),
        ...     train_dataset=data,
        ...     optimizer_cls_and_kwargs=(DistributedLion, {}),
        ... )
        >>> trainer.train()
    """

    on_world_change: WorldChange = "raise"
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    _begun: Voter | None = None
    _meter: VoteMeter | None = None

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that neither wraps nor shards the model."""
        if any(base.__module__.split(".")[0] == "trl" for base in type(self).__mro__):
            check_version("trl", major=1, extra=EXTRA)
        super().create_accelerator_and_postprocess()
        accelerator = self.accelerator
        kind = accelerator.distributed_type.value
        if not (kind == "NO" or kind.startswith("MULTI_")):
            raise UnsupportedTypeError(
                f"the Trainer is set up for {kind}, which shards or wraps the model in its own "
                "way; VotingMixin needs plain data parallelism (no --fsdp, no --deepspeed)"
            )
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
        prepare = accelerator.prepare_optimizer

        def begin_and_prepare(*args: Any, **kwargs: Any) -> Any:
            # Here rather than in create_optimizer, which Trainers of users override.
            self._begin()
            return prepare(*args, **kwargs)

        accelerator.prepare_optimizer = begin_and_prepare

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer, by default with the Trainer's learning rate."""
        if self.optimizer is None and self.optimizer_cls_and_kwargs is not None:
            kind, given = self.optimizer_cls_and_kwargs
            decay = given.get("weight_decay", self.args.weight_decay)
            if decay != self.args.weight_decay and "params" not in given:
                raise InvalidArgumentError(
                    f"weight_decay={decay} in optimizer_cls_and_kwargs is overridden by "
                    f"TrainingArguments.weight_decay, {self.args.weight_decay}: give it there"
                )
            kind = _OverGroups if kind is LocalSteps else kind
            self.optimizer_cls_and_kwargs = kind, {"lr": self.args.learning_rate, **given}
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        return optimizer

    def _begin(self) -> None:
        """Check an optimizer, and begin to measure it with equal buffers, whoever made it.

        With ``model_init`` each training makes another model and optimizer.
        """
        self._check_optimizer()
        if self._begun is not self.voter:
            self._begun = save_for_all(self.voter)
            self._meter = VoteMeter(self._begun)
            average_buffers(self.model)  # only those that differ travel

    @property
    def voter(self) -> Voter:
        """The optimizer, without accelerate's wrapper."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, Voter):
            raise UnsupportedTypeError(
                f"the optimizer is a {type(optimizer).__name__}, which does not vote, so that "
                "replicas would diverge; give optimizer_cls_and_kwargs=(distlion.DistributedLion, "
                "{...}) or optimizers=(distlion.DistributedLion(...), None)"
            )
        return optimizer

    def _check_optimizer(self) -> None:
        """Refuse options that conflict with the Trainer's clipping."""
        voter, norm = self.voter, self.args.max_grad_norm
        if isinstance(voter, LocalSteps):
            return  # its inner steps use the clipped gradients
        settings = voter.settings
        conflicts = {
            "overlap: votes leave before the norm is known": settings.overlap,
            f"{settings.clip_norm!r}: it would see gradients that are already clipped": (
                settings.clip_norm is not None
            ),
            'nonfinite="abstain": where one gradient of a worker is NaN, all of them become NaN': (
                settings.nonfinite == "abstain"
            ),
        }
        for conflict, is_there in conflicts.items():
            if norm > 0 and is_there:
                raise InvalidArgumentError(
                    f"max_grad_norm={norm} (1.0 by default), by which the Trainer clips gradients, "
                    f"cannot be used with {conflict}; give TrainingArguments max_grad_norm=0"
                )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; at the end workers with local steps vote, and replicas are compared."""
        output = super().train(*args, **kwargs)
        self._vote()
        compare_at_end([self.voter])
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate; during training, workers with local steps vote first."""
        if self.is_in_train:
            self._vote()
        metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return metrics

    def _vote(self) -> None:
        if self.optimizer is not None:
            vote_on_deltas([self.voter])

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients; votes wait for the last micro-batch of an accumulation."""
        if isinstance(model, DistributedDataParallel):
            raise UnsupportedTypeError(
                "the model is wrapped in DistributedDataParallel, which averages gradients before "
                "the vote; hand the Trainer the model itself"
            )
        voter, is_last = self.voter, self.accelerator.sync_gradients
        with nullcontext() if is_last else hold_back(voter):
            loss: Tensor = super().training_step(model, *args, **kwargs)
        return loss

    def _get_grad_norm(
        self, model: nn.Module, grad_norm: Tensor | None = None
    ) -> Tensor | float | None:
        # The Trainer's own method clips at infinity to measure. That counts as a change of
        # gradients, and a single NaN makes all of them NaN.
        if grad_norm is None:
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            scaler = getattr(self.accelerator, "scaler", None)
            grad_norm = get_total_norm(grads) / (1.0 if scaler is None else scaler.get_scale())
        norm: Tensor | float | None = super()._get_grad_norm(model, grad_norm)
        return norm

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does and, with the training loss, measurements of the votes."""
        if "loss" in logs and self._meter is not None:
            logs |= {f"{PREFIX}/{name}": value for name, value in self._meter.read().items()}
        super().log(logs, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as the Trainer does; during training with local steps after a vote only.

        Raises:
            CheckpointError: This worker has taken local steps since the last vote, so its
                parameters are not those of the others.
        """
        if self.is_in_train:
            refuse_between_votes([self.voter], call="trainer.voter.vote()")
        super().save_model(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer saves one model for all workers.
        self._vote()
        super()._save_checkpoint(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # Replaces rank 0's optimizer.pt, and scheduler.pt. Trained parameters are saved too: a
        # Trainer reads its own model file by tensor names, which differ from the model's for some
        # models (ViT, 5.23). It would then continue with a warning and without the weights.
        folder = Path(output_dir, FOLDER)
        if self.accelerator.is_local_main_process:
            # Of an earlier run with an overwritten model. No rank writes until all have come.
            shutil.rmtree(folder, ignore_errors=True)
        save_checkpoint(folder, self.model, self.voter, self.lr_scheduler, only_trained=True)

    def _load_best_model(self) -> None:
        self._vote()  # what the best model does not hold stays, and has to be equal
        super()._load_best_model()
        begin_at_loaded([self.voter])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        # The Trainer loads weights before there is an optimizer.
        folder = Path(resume_from_checkpoint, FOLDER)
        check_checkpoints(lambda: [_find(folder)], on_world_change=self.on_world_change)
        super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # The Trainer's own method loads rank 0's optimizer.pt.
        if checkpoint is not None:
            with naming_what_is_loaded("The Trainer"):
                load_checkpoint(
                    Path(checkpoint, FOLDER),
                    self.model,
                    self.voter,
                    self.lr_scheduler,
                    on_world_change=self.on_world_change,
                )


class _OverGroups(torch.optim.Optimizer):
    """A class for the Trainer to call, which makes ``LocalSteps`` over its groups."""

    def __new__(
        cls,
        params: Any,
        *,
        lr: float,
        inner: Callable[..., torch.optim.Optimizer] | None = None,
        inner_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Make the inner optimizer, and ``LocalSteps`` over it.

        Raises:
            InvalidArgumentError: There is no inner optimizer, or "inner_options" has an argument
                that the Trainer sets.
        """
        if inner is None:
            raise InvalidArgumentError(
                'optimizer_cls_and_kwargs has LocalSteps without "inner". Expected the class of an '
                'optimizer that takes the local steps. Give {"inner": torch.optim.AdamW, ...}'
            )
        given = dict(inner_options or {})
        if "lr" in given:
            raise InvalidArgumentError(
                f'"inner_options" has lr={given["lr"]}, and the Trainer sets lr={lr}. Expected one '
                'learning rate. Give it as TrainingArguments.learning_rate, or as "lr" beside '
                '"inner"'
            )
        groups = list(params)
        decays = {group["weight_decay"] for group in groups if "weight_decay" in group}
        wanted = options.pop("weight_decay", given.get("weight_decay"))
        if wanted is not None and decays and wanted not in decays:
            raise InvalidArgumentError(
                f"weight_decay={wanted} is given for LocalSteps, and the Trainer's groups have "
                f"{' and '.join(map(str, sorted(decays)))}, which would override it. Give it as "
                "TrainingArguments.weight_decay"
            )
        return LocalSteps(inner(groups, lr=lr, **given), **options)


def _find(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is missing, where a VotingMixin saves the momenta of all workers. To begin "
            "with the weights alone, use from_pretrained"
        )
    return folder
